//! Quantization of rows to bytes: inputs of int8 products.
//!
//! Each row has its own range, from its smallest number to its largest, in 255 equal steps: a row after a GELU has
//! large positive and hardly any negative values, and a symmetric range would waste half of the steps. The bytes of a
//! row depend on the row only.

use super::{Kernel, MAX_LANES, Simd, load_up_to};
use crate::engine::cpu::byte_panels::GROUP;
use crate::engine::cpu::matrix::MatrixView;

/// Steps between the smallest number of a row of activations and its largest, as unsigned bytes. The attention has its own.
const STEPS: f32 = 255.0;

/// Rows of bytes. The memory only grows.
#[derive(Default)]
pub(in super::super) struct ByteRows {
    bytes: Vec<u8>,
    /// Bytes from one row to the next: whole groups, and whole vectors, so that no store is truncated.
    stride: usize,
    ranges: Vec<ByteRange>,
}

/// Meaning of the bytes of a row: `low + step·byte`.
#[derive(Clone, Copy, Default)]
pub(super) struct ByteRange {
    pub(super) low: f32,
    pub(super) step: f32,
}

impl ByteRows {
    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    pub(super) fn stride(&self) -> usize {
        self.stride
    }

    /// Returns the range of every row.
    pub(super) fn ranges(&self) -> &[ByteRange] {
        &self.ranges
    }
}

/// Quantizes rows of floats.
pub(in super::super) struct Quantize<'a> {
    pub(in super::super) rows: MatrixView<'a>,
    pub(in super::super) out: &'a mut ByteRows,
}

impl Kernel for Quantize<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Quantize { rows, out } = self;
        out.stride = rows.width().next_multiple_of(GROUP.max(MAX_LANES));
        if out.bytes.len() < rows.rows() * out.stride {
            out.bytes.resize(rows.rows() * out.stride, 0);
        }
        out.ranges.clear();
        for index in 0..rows.rows() {
            let bytes = &mut out.bytes[index * out.stride..][..out.stride];
            out.ranges.push(quantize(simd, rows.row(index), bytes));
        }
    }
}

#[inline(always)]
fn quantize<S: Simd>(simd: S, row: &[f32], bytes: &mut [u8]) -> ByteRange {
    let (low, high) = Extremes::of(simd, row[0]).and(simd, row).all(simd);
    let step = (high - low) / STEPS;
    round_row(simd, row, low, if step > 0.0 { step.recip() } else { 0.0 }, bytes);
    ByteRange { low, step }
}

/// Quantizes a row: `factor` is the number of steps per unit above `low`. Bytes are whole vectors; those after the end
/// of the row are zeros.
#[inline(always)]
pub(super) fn round_row<S: Simd>(simd: S, row: &[f32], low: f32, factor: f32, bytes: &mut [u8]) {
    let (base, factor) = (simd.splat(low), simd.splat(factor));
    let whole = row.len() / S::LANES * S::LANES;
    for (lanes, bytes) in row[..whole].chunks_exact(S::LANES).zip(bytes.chunks_exact_mut(S::LANES)) {
        simd.store_bytes(simd.mul(simd.sub(simd.load(lanes), base), factor), bytes);
    }
    if whole < row.len() {
        let value = load_up_to(simd, &row[whole..], low);
        simd.store_bytes(simd.mul(simd.sub(value, base), factor), &mut bytes[whole..]);
    }
}

/// Independent accumulators: a comparison has a latency of some cycles.
const SIDES: usize = 4;

/// Smallest and largest numbers, lane by lane, in [`SIDES`] accumulators with constant indices as in [`super::rows`].
#[derive(Clone, Copy)]
pub(super) struct Extremes<S: Simd> {
    least: [S::Vector; SIDES],
    largest: [S::Vector; SIDES],
}

impl<S: Simd> Extremes<S> {
    /// Returns the extremes of this number alone.
    #[inline(always)]
    pub(super) fn of(simd: S, any: f32) -> Extremes<S> {
        Extremes { least: [simd.splat(any); SIDES], largest: [simd.splat(any); SIDES] }
    }

    /// Adds a row.
    #[inline(always)]
    pub(super) fn and(mut self, simd: S, row: &[f32]) -> Extremes<S> {
        let blocks = row.chunks_exact(SIDES * S::LANES);
        let rest = blocks.remainder();
        for block in blocks {
            for (place, (least, largest)) in self.least.iter_mut().zip(&mut self.largest).enumerate() {
                let value = simd.load(&block[place * S::LANES..]);
                *least = simd.min(*least, value);
                *largest = simd.max(*largest, value);
            }
        }
        for (place, (least, largest)) in self.least.iter_mut().zip(&mut self.largest).enumerate() {
            if let Some(lanes) = rest.get(place * S::LANES..).filter(|lanes| !lanes.is_empty()) {
                let value = load_up_to(simd, &lanes[..lanes.len().min(S::LANES)], row[0]);
                *least = simd.min(*least, value);
                *largest = simd.max(*largest, value);
            }
        }
        self
    }

    /// Returns the smallest and the largest number.
    #[inline(always)]
    pub(super) fn all(self, simd: S) -> (f32, f32) {
        let ([a, b, c, d], [e, f, g, h]) = (self.least, self.largest);
        let least = simd.min(simd.min(a, b), simd.min(c, d));
        let largest = simd.max(simd.max(e, f), simd.max(g, h));
        (-simd.largest(simd.sub(simd.splat(0.0), least)), simd.largest(largest))
    }
}

#[cfg(test)]
mod tests {
    use super::super::Isa;
    use super::*;
    use crate::engine::cpu::matrix::Matrix;

    fn rows(width: usize, rows: &[&[f32]]) -> Matrix {
        let mut matrix = Matrix::default();
        matrix.resize(rows.len(), width);
        for (index, row) in rows.iter().enumerate() {
            matrix.data_mut()[index * width..][..width].copy_from_slice(row);
        }
        matrix
    }

    #[test]
    fn a_number_is_within_half_a_step_of_its_dequantized_byte() {
        let row: Vec<f32> = (0..37).map(|index| ((index * 29) % 37) as f32 * 0.11 - 1.3).collect();
        let matrix = rows(37, &[&row, &[0.25; 37]]);
        for isa in Isa::available() {
            let mut out = ByteRows::default();
            isa.run(Quantize { rows: matrix.view(0..2), out: &mut out });
            assert_eq!((out.ranges.len(), out.stride()), (2, 48));
            let range = out.ranges()[0];
            for (value, byte) in row.iter().zip(out.bytes()) {
                let error = (range.low + range.step * f32::from(*byte) - value).abs();
                assert!(error <= range.step * 0.501, "{isa:?}: {value} is byte {byte}");
            }
            assert!(out.bytes()[..37].contains(&0) && out.bytes()[..37].contains(&255), "{isa:?}");
            // A row of equal numbers has no range.
            assert_eq!((out.ranges()[1].low, out.ranges()[1].step), (0.25, 0.0), "{isa:?}");
        }
    }

    #[test]
    fn all_paths_return_the_same_bytes() {
        let row: Vec<f32> = (0..100).map(|index| (index as f32 * 0.7).sin()).collect();
        let matrix = rows(100, &[&row]);
        let bytes = |isa: Isa| {
            let mut out = ByteRows::default();
            isa.run(Quantize { rows: matrix.view(0..1), out: &mut out });
            out.bytes()[..100].to_vec()
        };
        let expected = bytes(Isa::best());
        for isa in Isa::available() {
            assert_eq!(bytes(isa), expected, "{isa:?}");
        }
    }
}
