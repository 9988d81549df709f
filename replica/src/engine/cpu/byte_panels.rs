//! Int8 weights, in the order in which products of bytes read them.
//!
//! Panels are those of [`super::panels`]; a line holds the weights of [`GROUP`] inputs for each output of the panel,
//! those of one output side by side. Weights are symmetric about zero and scaled per output, so that the largest
//! magnitude of an output is 127. After the lines follow the scale of each output and the sum of its bytes, which
//! products need: inputs are unsigned, `x ≈ low + step·q`, and so `Σ x·w = scale·(step·Σ q·b + low·Σ b)` for weights `w
//! ≈ scale·b`.

use super::panels::{Line, LinearSource, PANEL, panel_order, panels_of};

/// Inputs that one instruction multiplies and accumulates.
pub(super) const GROUP: usize = 4;

/// Signed weights of one group of inputs for the outputs of a panel.
pub(super) type ByteLine = [u8; PANEL * GROUP];

/// The largest magnitude of a weight. −128 is not used, so that the range is symmetric. A choice for weights;
/// the bytes of the attention have their own.
const LARGEST: f32 = 127.0;

/// Sums of more inputs than this could overflow: 66 000 · 255 · 127 < 2³¹. Wider layers are not quantized.
pub(super) const MAX_INPUTS: usize = 66_000;

const LINE_BYTES: usize = size_of::<Line>();

/// Weights of one linear layer.
#[derive(Clone, Copy)]
pub(super) struct BytePanels<'a> {
    groups: usize,
    lines: &'a [ByteLine],
    /// Of the outputs of all panels.
    scales: &'a [Line],
    /// Of the outputs of all panels, as integers.
    sums: &'a [Line],
}

impl<'a> BytePanels<'a> {
    /// Creates a view of the output of [`pack`]: as bytes, and the same memory as floats.
    pub(super) fn new(inputs: usize, panels: usize, bytes: &'a [u8], numbers: &'a [f32]) -> BytePanels<'a> {
        let groups = inputs.div_ceil(GROUP);
        let (lines, _) = bytes.as_chunks();
        let (numbers, _) = numbers.as_chunks::<PANEL>();
        let (scales, sums) = numbers[groups * panels..][..2 * panels].split_at(panels);
        BytePanels { groups, lines: &lines[..groups * panels], scales, sums }
    }

    /// Returns one line per group of inputs.
    pub(super) fn panel(&self, index: usize) -> &'a [ByteLine] {
        &self.lines[index * self.groups..][..self.groups]
    }

    /// Returns the lines of a panel, or an empty slice after the last one.
    pub(super) fn panel_if_any(&self, index: usize) -> &'a [ByteLine] {
        let lines = self.lines.get(index * self.groups..).unwrap_or_default();
        &lines[..lines.len().min(self.groups)]
    }

    pub(super) fn scales(&self, panel: usize) -> &'a Line {
        &self.scales[panel]
    }

    pub(super) fn sums(&self, panel: usize) -> &'a Line {
        &self.sums[panel]
    }
}

/// Returns the packed size of a layer, in bytes.
pub(super) fn packed_size(source: &LinearSource) -> usize {
    // A line of bytes has the size of a line of floats.
    (source.inputs.div_ceil(GROUP) + 2) * panels_of(source.outputs(), source.gated) * LINE_BYTES
}

/// Packs the weights into panels; `packed` has the [`packed_size`] and is all zeros.
pub(super) fn pack(source: &LinearSource, packed: &mut [u8]) {
    let (inputs, outputs) = (source.inputs, source.outputs());
    let (groups, panels) = (inputs.div_ceil(GROUP), panels_of(outputs, source.gated));
    let (lines, numbers) = packed.split_at_mut(groups * panels * LINE_BYTES);
    let (lines, _) = lines.as_chunks_mut::<{ PANEL * GROUP }>();
    let (numbers, _) = numbers.as_chunks_mut::<4>();
    let (scales, sums) = numbers.split_at_mut(panels * PANEL);
    let mut row = vec![0.0; inputs];
    let mut output = 0;
    for (part, factor) in &source.parts {
        for index in 0..part.rows() {
            part.row(index).copy_to(&mut row);
            let place = panel_order(output, outputs, source.gated);
            let panel = &mut lines[place / PANEL * groups..][..groups];
            let (scale, sum) = pack_output(&row, panel, place % PANEL);
            scales[place] = (scale * factor).to_ne_bytes();
            sums[place] = (sum as f32).to_ne_bytes();
            output += 1;
        }
    }
}

/// Packs the weights of one output; returns their scale and their sum.
fn pack_output(row: &[f32], panel: &mut [ByteLine], column: usize) -> (f32, i32) {
    let largest = row.iter().fold(0.0_f32, |largest, weight| largest.max(weight.abs()));
    let scale = largest / LARGEST;
    // In binary64: below 127/2^128 the quotient overflows binary32, and every weight would be ±127.
    let factor = if largest > 0.0 { f64::from(LARGEST) / f64::from(largest) } else { 0.0 };
    let mut sum = 0;
    for (group, line) in row.chunks(GROUP).zip(panel) {
        for (weight, byte) in group.iter().zip(&mut line[GROUP * column..]) {
            let rounded = (f64::from(*weight) * factor).round_ties_even() as i8;
            *byte = rounded.cast_unsigned();
            sum += i32::from(rounded);
        }
    }
    (scale, sum)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_weight_is_its_byte_times_the_scale_of_its_output() {
        let row = [0.5, -1.0, 0.25, 0.0, 1.0];
        let mut panel = [[0; PANEL * GROUP]; 2];
        let (scale, sum) = pack_output(&row, &mut panel, 3);
        let bytes: Vec<i8> =
            panel.iter().flat_map(|line| line[12..16].iter().map(|byte| byte.cast_signed())).collect();
        assert_eq!(bytes, [64, -127, 32, 0, 127, 0, 0, 0]);
        assert_eq!((scale, sum), (1.0 / 127.0, 96));
        assert_eq!(panel.iter().flatten().filter(|byte| **byte != 0).count(), 4);
    }

    #[test]
    fn the_smallest_and_the_largest_weights_keep_their_proportions() {
        for largest in [f32::MAX, 3.0e38, 1.0, 1.0e-37, 1.0e-40] {
            let row = [largest, -largest / 4.0, 0.0, largest / 127.0];
            let mut panel = [[0; PANEL * GROUP]; 1];
            let (scale, sum) = pack_output(&row, &mut panel, 0);
            let bytes: Vec<i8> = panel[0][..4].iter().map(|byte| byte.cast_signed()).collect();
            assert_eq!(bytes, [127, -32, 0, 1], "{largest:e}");
            assert!(scale.is_finite() && sum == 96, "{largest:e}");
        }
    }

    #[test]
    fn an_output_of_zeros_has_no_scale() {
        let mut panel = [[0; PANEL * GROUP]; 1];
        assert_eq!(pack_output(&[0.0; 4], &mut panel, 0), (0.0, 0));
    }

    #[test]
    fn sums_of_the_widest_layer_fit() {
        assert!(MAX_INPUTS as i64 * 255 * 127 <= i64::from(i32::MAX));
    }
}
