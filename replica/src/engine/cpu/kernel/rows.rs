//! What is done to whole rows: normalising each, and making one of many.

use super::{Kernel, Simd, load_up_to, store_up_to};
use crate::engine::cpu::matrix::{View, Window};
use crate::model::Pooling;

/// Parameters of a layer normalisation.
#[derive(Debug)]
pub(in super::super) struct Norm {
    pub(in super::super) scale: Vec<f32>,
    pub(in super::super) shift: Vec<f32>,
    pub(in super::super) epsilon: f32,
}

/// Layer normalisation of every row, in place.
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
            let row = rows.row_mut(index);
            let mean = total(simd, row) / row.len() as f32;
            let variance = squares(simd, row, mean) / row.len() as f32;
            let factor = simd.splat((variance + norm.epsilon).sqrt().recip());
            let mean = simd.splat(mean);
            let parameters = norm.scale.chunks(S::LANES).zip(norm.shift.chunks(S::LANES));
            for (row, (scale, shift)) in row.chunks_mut(S::LANES).zip(parameters) {
                let value = simd.mul(simd.sub(load_up_to(simd, row, 0.0), mean), factor);
                let (scale, shift) = (load_up_to(simd, scale, 0.0), load_up_to(simd, shift, 0.0));
                store_up_to(simd, simd.mul_add(value, scale, shift), row);
            }
        }
    }
}

/// One vector from the vectors of a sequence's tokens.
pub(in super::super) struct PoolRows<'a> {
    pub(in super::super) pooling: Pooling,
    /// Whether it is brought to length one.
    pub(in super::super) normalize: bool,
    pub(in super::super) rows: View<'a>,
    pub(in super::super) out: &'a mut [f32],
}

/// Shorter vectors than this are not stretched to one, as in PyTorch's `normalize`.
const MIN_LENGTH: f32 = 1e-12;

impl Kernel for PoolRows<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let PoolRows { pooling, normalize, rows, out } = self;
        out.copy_from_slice(rows.row(0));
        match pooling {
            Pooling::Cls => {}
            Pooling::Mean => {
                for index in 1..rows.rows() {
                    for (out, row) in out.chunks_mut(S::LANES).zip(rows.row(index).chunks(S::LANES)) {
                        let sum = simd.add(load_up_to(simd, out, 0.0), load_up_to(simd, row, 0.0));
                        store_up_to(simd, sum, out);
                    }
                }
                divide(simd, out, rows.rows() as f32);
            }
        }
        if normalize {
            let length = squares(simd, out, 0.0).sqrt();
            divide(simd, out, length.max(MIN_LENGTH));
        }
    }
}

/// The sum of all numbers.
#[inline(always)]
fn total<S: Simd>(simd: S, row: &[f32]) -> f32 {
    let mut sum = simd.splat(0.0);
    for lanes in row.chunks(S::LANES) {
        sum = simd.add(sum, load_up_to(simd, lanes, 0.0));
    }
    simd.sum(sum)
}

/// The sum of the squared distances from `middle`.
#[inline(always)]
fn squares<S: Simd>(simd: S, row: &[f32], middle: f32) -> f32 {
    let mut sum = simd.splat(0.0);
    for lanes in row.chunks(S::LANES) {
        let distance = simd.sub(load_up_to(simd, lanes, middle), simd.splat(middle));
        sum = simd.mul_add(distance, distance, sum);
    }
    simd.sum(sum)
}

#[inline(always)]
fn divide<S: Simd>(simd: S, row: &mut [f32], divisor: f32) {
    let divisor = simd.splat(divisor);
    for lanes in row.chunks_mut(S::LANES) {
        store_up_to(simd, simd.div(load_up_to(simd, lanes, 0.0), divisor), lanes);
    }
}
