//! Weights in the order in which products read them.
//!
//! A checkpoint holds a linear layer as one row of inputs per output. A tile of a product wants, for one input after
//! another, the weights of some neighbouring outputs. So outputs are put into panels of [`PANEL`], and a panel is a
//! [`Line`] per input. The last panel is filled up with zeros.
//!
//! The width is the same for all instruction sets: a line is two AVX-512 vectors, or two passes of two AVX2 vectors. So
//! a file of packed weights serves every processor.

use crate::model::Tensor;

/// Outputs of one panel.
pub(super) const PANEL: usize = 32;

/// One input's weights for the outputs of a panel.
pub(super) type Line = [f32; PANEL];

/// The weights of one linear layer.
#[derive(Clone, Copy)]
pub(super) struct Panels<'a> {
    inputs: usize,
    lines: &'a [Line],
}

impl<'a> Panels<'a> {
    /// Numbers that a layer of this size takes.
    pub(super) fn size(inputs: usize, outputs: usize) -> usize {
        inputs * outputs.div_ceil(PANEL) * PANEL
    }

    /// What [`pack`] has written.
    pub(super) fn new(inputs: usize, packed: &'a [f32]) -> Panels<'a> {
        Panels { inputs, lines: packed.as_chunks().0 }
    }

    /// One line per input.
    pub(super) fn panel(&self, index: usize) -> &'a [Line] {
        &self.lines[index * self.inputs..][..self.inputs]
    }
}

/// Layers of the same inputs, to be computed as one: their outputs side by side, each times its factor.
pub(super) struct Unpacked {
    pub(super) inputs: usize,
    pub(super) parts: Vec<(Tensor, f32)>,
}

impl Unpacked {
    /// Outputs of all parts.
    fn outputs(&self) -> usize {
        self.parts.iter().map(|(part, _)| part.floats().len() / self.inputs).sum()
    }

    /// Numbers that it takes packed.
    pub(super) fn packed_size(&self) -> usize {
        Panels::size(self.inputs, self.outputs())
    }
}

/// Writes the weights into panels; `packed` has the [`Unpacked::packed_size`] and is all zeros.
pub(super) fn pack(weights: &Unpacked, packed: &mut [f32]) {
    let (lines, _) = packed.as_chunks_mut::<PANEL>();
    let rows = weights
        .parts
        .iter()
        .flat_map(|(part, factor)| part.floats().chunks_exact(weights.inputs).map(move |row| (row, *factor)));
    for (output, (row, factor)) in rows.enumerate() {
        let panel = &mut lines[output / PANEL * weights.inputs..][..weights.inputs];
        for (line, weight) in panel.iter_mut().zip(row) {
            line[output % PANEL] = f32::from_le_bytes(*weight) * factor;
        }
    }
}
