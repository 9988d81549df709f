//! Weights in the order in which products read them.
//!
//! A checkpoint stores a linear layer as one row of inputs per output. A tile of a product reads, for one input after
//! another, the weights of adjacent outputs. So outputs are grouped into panels of [`PANEL`], and a panel is a [`Line`]
//! per input. The last panel is padded with zeros.
//!
//! The width is the same for all instruction sets: a line is two AVX-512 vectors, or two passes of two AVX2 vectors. So
//! a file of packed weights can be used on every processor.
//!
//! A panel of a gated layer is [`GATED_COLUMNS`] gates followed by the gated outputs, so that both are available when a
//! tile is finished.

use crate::model::{ModelError, Tensor};

/// Outputs of one panel.
pub(super) const PANEL: usize = 32;

/// Gates of one panel of a gated layer, which is the number of its output columns.
pub(super) const GATED_COLUMNS: usize = PANEL / 2;

/// Weights of one input for the outputs of a panel.
pub(super) type Line = [f32; PANEL];

/// Definition of one linear layer.
pub(super) struct LinearSource {
    /// Numbers of one input row.
    pub(super) inputs: usize,
    /// Rows of weights, one per output, with a factor for each part; the outputs of the parts are concatenated.
    pub(super) parts: Vec<(Tensor, f32)>,
    /// One number per output of all parts, its factor included.
    pub(super) bias: Option<Vec<f32>>,
    /// Whether the first half of the outputs are gates for the second half. Then [`Finish::Gate`] is the only valid
    /// epilogue, and an output row has half the width.
    pub(super) gated: bool,
}

impl LinearSource {
    /// Rejects weights that are not finite after multiplication by their factor.
    pub(super) fn check_finite(&self) -> Result<(), ModelError> {
        self.parts.iter().try_for_each(|(part, factor)| part.check_finite(*factor))
    }

    /// Returns the number of outputs of all parts.
    pub(super) fn outputs(&self) -> usize {
        self.parts.iter().map(|(part, _)| part.rows()).sum()
    }
}

/// Weights of one linear layer.
#[derive(Clone, Copy)]
pub(super) struct Panels<'a> {
    inputs: usize,
    lines: &'a [Line],
}

impl<'a> Panels<'a> {
    /// Creates a view of the output of [`pack`].
    pub(super) fn new(inputs: usize, packed: &'a [f32]) -> Panels<'a> {
        Panels { inputs, lines: packed.as_chunks().0 }
    }

    /// Returns one line per input.
    pub(super) fn panel(&self, index: usize) -> &'a [Line] {
        &self.lines[index * self.inputs..][..self.inputs]
    }

    /// Returns the lines of a panel, or an empty slice after the last one.
    pub(super) fn panel_if_any(&self, index: usize) -> &'a [Line] {
        let lines = self.lines.get(index * self.inputs..).unwrap_or_default();
        &lines[..lines.len().min(self.inputs)]
    }
}

/// Returns the column of an output among the columns of the panels.
pub(super) fn panel_order(output: usize, outputs: usize, gated: bool) -> usize {
    if !gated {
        return output;
    }
    let (column, half) = (output % (outputs / 2), output / (outputs / 2));
    column / GATED_COLUMNS * PANEL + half * GATED_COLUMNS + column % GATED_COLUMNS
}

/// Returns the number of panels of a layer, the last one possibly padded.
pub(super) fn panels_of(outputs: usize, gated: bool) -> usize {
    if gated { (outputs / 2).div_ceil(GATED_COLUMNS) } else { outputs.div_ceil(PANEL) }
}

/// Returns the packed size of a layer, in bytes.
pub(super) fn packed_size(source: &LinearSource) -> usize {
    source.inputs * panels_of(source.outputs(), source.gated) * size_of::<Line>()
}

/// Packs the weights into panels; `packed` has the [`packed_size`] and is all zeros.
pub(super) fn pack(source: &LinearSource, packed: &mut [u8]) {
    let (numbers, _) = packed.as_chunks_mut::<4>();
    let (lines, _) = numbers.as_chunks_mut::<PANEL>();
    let (inputs, outputs) = (source.inputs, source.outputs());
    let rows = source
        .parts
        .iter()
        .flat_map(|(part, factor)| (0..part.rows()).map(move |index| (part.row(index), *factor)));
    for (output, (row, factor)) in rows.enumerate() {
        let place = panel_order(output, outputs, source.gated);
        let panel = &mut lines[place / PANEL * inputs..][..inputs];
        row.each_with(panel, |line, weight| line[place % PANEL] = (weight * factor).to_ne_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gate_and_its_output_are_in_one_panel() {
        let places: Vec<usize> = (0..40).map(|output| panel_order(output, 40, true)).collect();
        assert_eq!((places[0], places[15], places[16], places[19]), (0, 15, 32, 35));
        assert_eq!((places[20], places[35], places[36], places[39]), (16, 31, 48, 51));
        assert_eq!(panels_of(40, true), 2);
        assert_eq!(
            (0..40).map(|output| panel_order(output, 40, false)).collect::<Vec<_>>(),
            Vec::from_iter(0..40)
        );
    }
}
