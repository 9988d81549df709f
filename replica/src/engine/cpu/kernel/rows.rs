//! Operations on whole rows: normalization, addition, pooling.

use super::{Kernel, Simd, load_up_to, store_up_to};
use crate::engine::cpu::matrix::{MatrixView, Window};
use crate::model::Pooling;

/// Parameters of a normalization.
#[derive(Debug)]
pub(in super::super) struct Norm {
    /// Whether the mean is subtracted first (layer norm); otherwise the root mean square is used (RMSNorm).
    pub(in super::super) centred: bool,
    pub(in super::super) scale: Vec<f32>,
    pub(in super::super) shift: Vec<f32>,
    pub(in super::super) epsilon: f32,
}

impl Norm {
    /// Returns the normalization with its output multiplied by `factor`.
    pub(in super::super) fn times(mut self, factor: f32) -> Norm {
        self.scale.iter_mut().chain(&mut self.shift).for_each(|value| *value *= factor);
        self
    }

    /// Returns the mean to subtract, and the factor that scales the rest to a deviation of one.
    #[inline(always)]
    fn measure<S: Simd>(&self, simd: S, row: &[f32]) -> (S::Vector, S::Vector) {
        let mean = if self.centred { total(simd, row) / row.len() as f32 } else { 0.0 };
        let variance = squares(simd, row, mean) / row.len() as f32;
        (simd.splat(mean), simd.splat((variance + self.epsilon).sqrt().recip()))
    }

    /// Normalizes a row in place.
    #[inline(always)]
    pub(super) fn apply<S: Simd>(&self, simd: S, row: &mut [f32]) {
        let (mean, factor) = self.measure(simd, row);
        let whole = row.len() / S::LANES * S::LANES;
        let (row, row_rest) = row.split_at_mut(whole);
        let (scale, scale_rest) = self.scale.split_at(whole);
        let (shift, shift_rest) = self.shift.split_at(whole);
        let parameters = scale.chunks_exact(S::LANES).zip(shift.chunks_exact(S::LANES));
        for (row, (scale, shift)) in row.chunks_exact_mut(S::LANES).zip(parameters) {
            let value = simd.mul(simd.sub(simd.load(row), mean), factor);
            simd.store(simd.mul_add(value, simd.load(scale), simd.load(shift)), row);
        }
        if !row_rest.is_empty() {
            let value = simd.mul(simd.sub(load_up_to(simd, row_rest, 0.0), mean), factor);
            let scale = load_up_to(simd, scale_rest, 0.0);
            let shift = load_up_to(simd, shift_rest, 0.0);
            store_up_to(simd, simd.mul_add(value, scale, shift), row_rest);
        }
    }
}

/// Normalization of every row, in place.
pub(in super::super) struct Normalize<'a, 'w> {
    pub(in super::super) norm: &'a Norm,
    pub(in super::super) rows: &'a mut Window<'w>,
}

impl Kernel for Normalize<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Normalize { norm, rows } = self;
        for index in 0..rows.rows().len() {
            norm.apply(simd, rows.row_mut(index));
        }
    }
}

/// Normalization of every row of `input`, which replaces a row of `out` or is added to it.
pub(in super::super) struct NormalizeInto<'a, 'w> {
    pub(in super::super) norm: &'a Norm,
    pub(in super::super) input: MatrixView<'a>,
    pub(in super::super) add: bool,
    pub(in super::super) out: &'a mut Window<'w>,
}

impl Kernel for NormalizeInto<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let NormalizeInto { norm, input, add, out } = self;
        for index in 0..out.rows().len() {
            let input = input.row(index);
            let (mean, factor) = norm.measure(simd, input);
            let parameters = norm.scale.chunks(S::LANES).zip(norm.shift.chunks(S::LANES));
            let places = out.row_mut(index).chunks_mut(S::LANES).zip(input.chunks(S::LANES));
            for ((out, input), (scale, shift)) in places.zip(parameters) {
                let value = simd.mul(simd.sub(load_up_to(simd, input, 0.0), mean), factor);
                let (scale, shift) = (load_up_to(simd, scale, 0.0), load_up_to(simd, shift, 0.0));
                let value = simd.mul_add(value, scale, shift);
                let value = if add { simd.add(load_up_to(simd, out, 0.0), value) } else { value };
                store_up_to(simd, value, out);
            }
        }
    }
}

/// Multiplication of every number with a factor.
pub(in super::super) struct Scale<'a> {
    pub(in super::super) factor: f32,
    pub(in super::super) numbers: &'a mut [f32],
}

impl Kernel for Scale<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let factor = simd.splat(self.factor);
        for lanes in self.numbers.chunks_mut(S::LANES) {
            store_up_to(simd, simd.mul(load_up_to(simd, lanes, 0.0), factor), lanes);
        }
    }
}

/// Pooling of the vectors of a sequence's tokens to one vector.
pub(in super::super) struct PoolRows<'a> {
    pub(in super::super) pooling: Pooling,
    pub(in super::super) rows: MatrixView<'a>,
    pub(in super::super) out: &'a mut [f32],
}

impl Kernel for PoolRows<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let PoolRows { pooling, rows, out } = self;
        let count = rows.rows();
        out.copy_from_slice(rows.row(if pooling == Pooling::LastToken { count - 1 } else { 0 }));
        match pooling {
            Pooling::Cls | Pooling::LastToken => {}
            Pooling::Mean => {
                fold(simd, &rows, out, Fold::Sum);
                divide(simd, out, count as f32);
            }
            Pooling::MeanSqrtLength => {
                fold(simd, &rows, out, Fold::Sum);
                divide(simd, out, (count as f32).sqrt());
            }
            Pooling::WeightedMean => {
                fold(simd, &rows, out, Fold::ByPosition);
                divide(simd, out, (count * (count + 1) / 2) as f32);
            }
            Pooling::Max => fold(simd, &rows, out, Fold::Largest),
        }
    }
}

/// Reduction of rows to one.
#[derive(Clone, Copy)]
enum Fold {
    Sum,
    /// Sum of the rows, weighted by position: the first once, the second twice, and so on.
    ByPosition,
    Largest,
}

/// Reduces all rows but the first, which is in `out`, into `out`.
#[inline(always)]
fn fold<S: Simd>(simd: S, rows: &MatrixView<'_>, out: &mut [f32], how: Fold) {
    for index in 1..rows.rows() {
        let weight = simd.splat((index + 1) as f32);
        for (out, row) in out.chunks_mut(S::LANES).zip(rows.row(index).chunks(S::LANES)) {
            let (before, row) = (load_up_to(simd, out, 0.0), load_up_to(simd, row, 0.0));
            let folded = match how {
                Fold::Sum => simd.add(before, row),
                Fold::ByPosition => simd.mul_add(row, weight, before),
                Fold::Largest => simd.max(before, row),
            };
            store_up_to(simd, folded, out);
        }
    }
}

/// Returns the sum of all numbers.
#[inline(always)]
fn total<S: Simd>(simd: S, row: &[f32]) -> f32 {
    sum_of::<S, false>(simd, row, 0.0)
}

/// Returns the sum of the squared distances from `middle`.
#[inline(always)]
fn squares<S: Simd>(simd: S, row: &[f32], middle: f32) -> f32 {
    sum_of::<S, true>(simd, row, middle)
}

/// Independent accumulators: an addition has a latency of some cycles.
const SUMS: usize = 4;

/// Returns the sum of the distances from `middle`, or of their squares. The accumulators have indices that are known at
/// compile time: otherwise they would be in memory, and each addition would wait for the previous store.
#[inline(always)]
fn sum_of<S: Simd, const SQUARED: bool>(simd: S, row: &[f32], middle: f32) -> f32 {
    let from = simd.splat(middle);
    let mut sums = [simd.splat(0.0); SUMS];
    let blocks = row.chunks_exact(SUMS * S::LANES);
    let rest = blocks.remainder();
    for block in blocks {
        for (place, sum) in sums.iter_mut().enumerate() {
            let distance = simd.sub(simd.load(&block[place * S::LANES..]), from);
            *sum = if SQUARED { simd.mul_add(distance, distance, *sum) } else { simd.add(*sum, distance) };
        }
    }
    for (place, sum) in sums.iter_mut().enumerate() {
        if let Some(lanes) = rest.get(place * S::LANES..).filter(|lanes| !lanes.is_empty()) {
            let lanes = &lanes[..lanes.len().min(S::LANES)];
            let distance = simd.sub(load_up_to(simd, lanes, middle), from);
            *sum = if SQUARED { simd.mul_add(distance, distance, *sum) } else { simd.add(*sum, distance) };
        }
    }
    let [a, b, c, d] = sums;
    simd.sum(simd.add(simd.add(a, b), simd.add(c, d)))
}

#[inline(always)]
fn divide<S: Simd>(simd: S, row: &mut [f32], divisor: f32) {
    let divisor = simd.splat(divisor);
    for lanes in row.chunks_mut(S::LANES) {
        store_up_to(simd, simd.div(load_up_to(simd, lanes, 0.0), divisor), lanes);
    }
}
