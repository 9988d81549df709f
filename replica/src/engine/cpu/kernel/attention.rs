//! Attention of one head over one sequence: `softmax(Q·Kᵀ)·V`, with no padding and no mask.
//!
//! Keys and values of the sequence are put into panels once; then both products are tiles, as everywhere. The scores of
//! a tile's rows stay in the nearest cache between the two. The scale `1/√width` is in the weights that made `Q`.

use super::math::exp;
use super::product::{MAX_TILE_ROWS, Sums, Tile, tiles};
use super::{Kernel, Simd};
use crate::engine::cpu::matrix::{Matrix, View, Window};
use crate::engine::cpu::panels::{Line, PANEL};

/// One head over one sequence.
pub(in super::super) struct Attention<'a, 'w> {
    /// The sequence's rows: all heads of Q, then of K, then of V.
    pub(in super::super) projections: View<'a>,
    /// Where the result goes: the sequence's rows, the head's columns.
    pub(in super::super) out: &'a mut Window<'w>,
    /// Room to work in.
    pub(in super::super) scratch: &'a mut AttentionScratch,
}

/// Room for one sequence. It grows to the longest one.
#[derive(Default)]
pub(in super::super) struct AttentionScratch {
    /// Kᵀ in panels of [`PANEL`] keys, a row per line.
    keys: Matrix,
    /// V in panels of [`PANEL`] columns, a row per line.
    values: Matrix,
    /// Of the rows of a tile, to all keys.
    scores: Matrix,
}

impl Kernel for Attention<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Attention { projections, out, scratch } = self;
        let (length, head) = (projections.rows(), out.columns());
        let (width, hidden) = (head.len(), projections.width() / 3);
        let (key_panels, value_panels) = (length.div_ceil(PANEL), width.div_ceil(PANEL));
        let AttentionScratch { keys, values, scores } = scratch;
        keys.resize(key_panels * width, PANEL);
        values.resize(value_panels * length, PANEL);
        scores.resize(MAX_TILE_ROWS, key_panels * PANEL);
        let (keys, _) = keys.data_mut().as_chunks_mut::<PANEL>();
        let (values, _) = values.data_mut().as_chunks_mut::<PANEL>();
        let queries = projections.columns(head.clone());
        pack_keys(projections.columns(head.start + hidden..head.end + hidden), keys);
        pack_values(projections.columns(head.start + 2 * hidden..head.end + 2 * hidden), values);
        let mut sums = Sums::default();
        let mut weights = [0.0; MAX_TILE_ROWS];
        for (start, rows) in tiles::<S>(length) {
            for index in 0..key_panels {
                let panel = &keys[index * width..][..width];
                let tile = Tile { input: queries, start, rows, panel, ahead: &[] };
                tile.sum(simd, &mut sums);
                for (row, sums) in sums.0[..rows].iter().enumerate() {
                    scores.row_mut(row)[index * PANEL..][..PANEL].copy_from_slice(sums);
                }
            }
            for (row, weight) in weights[..rows].iter_mut().enumerate() {
                *weight = exponentials(simd, scores.row_mut(row), length).recip();
            }
            for index in 0..value_panels {
                let panel = &values[index * length..][..length];
                let input = scores.view(0..rows).columns(0..length);
                Tile { input, start: 0, rows, panel, ahead: &[] }.sum(simd, &mut sums);
                for (row, (sums, weight)) in sums.0[..rows].iter().zip(&weights).enumerate() {
                    let out = out.row_mut(start + row)[index * PANEL..].iter_mut();
                    for (out, sum) in out.zip(sums) {
                        *out = sum * weight;
                    }
                }
            }
        }
    }
}

/// Key `j` becomes lane `j % PANEL` of panel `j / PANEL`. Lanes beyond the last key keep what was there.
#[inline(always)]
fn pack_keys(keys: View<'_>, panels: &mut [Line]) {
    let width = keys.width();
    for index in 0..keys.rows() {
        let lines = &mut panels[index / PANEL * width..][..width];
        for (line, value) in lines.iter_mut().zip(keys.row(index)) {
            line[index % PANEL] = *value;
        }
    }
}

/// Columns beyond the head's width keep what was there; nobody reads what they come to.
#[inline(always)]
fn pack_values(values: View<'_>, panels: &mut [Line]) {
    let length = values.rows();
    for index in 0..length {
        for (panel, part) in values.row(index).chunks(PANEL).enumerate() {
            panels[panel * length + index][..part.len()].copy_from_slice(part);
        }
    }
}

/// Replaces the first `length` scores by their exponentials, relative to the largest, and comes to their sum.
#[inline(always)]
fn exponentials<S: Simd>(simd: S, scores: &mut [f32], length: usize) -> f32 {
    // Scores of keys that are not there: nothing beside the largest, which becomes one.
    scores[length..].fill(f32::NEG_INFINITY);
    let mut largest = simd.splat(f32::NEG_INFINITY);
    for lanes in scores.chunks_exact(S::LANES) {
        largest = simd.max(largest, simd.load(lanes));
    }
    let largest = simd.splat(simd.largest(largest));
    let mut total = simd.splat(0.0);
    for lanes in scores.chunks_exact_mut(S::LANES) {
        let value = exp(simd, simd.sub(simd.load(lanes), largest));
        total = simd.add(total, value);
        simd.store(value, lanes);
    }
    simd.sum(total)
}
