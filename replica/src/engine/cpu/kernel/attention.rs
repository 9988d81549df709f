//! Attention of some heads over one sequence: `softmax(Q·Kᵀ)·V`, without padding.
//!
//! Keys and values of the sequence are packed into panels once for all heads that share them; then both products are
//! tiles of some rows times a panel, whose sums stay in registers. The scores of a tile's rows stay in the first-level
//! cache between the two products. Keys that no row of a tile attends to at either end are not computed; keys that only
//! some of its rows attend to are computed and then masked.
//!
//! Scores are in units of the binary logarithm (see `weights`), because processors compute powers of two. The sums of a
//! row run over keys in order, whatever the sequence is batched with.

#[cfg(test)]
pub(super) mod tests;

use std::ops::Range;

use super::math::{exp2, tanh};
use super::tile::{MAX_TILE_ROWS, Tile, tiles};
use super::{Kernel, MAX_LANES, SQUARE, Simd, load_up_to, store_up_to};
use crate::engine::cpu::distance::DistanceBiases;
use crate::engine::cpu::matrix::{Matrix, MatrixView, Window};
use crate::engine::cpu::panels::{Line, PANEL};
use crate::engine::cpu::profile::{ComputeStage, StageTicks};
use crate::model::Reach;

/// Heads that share their keys and values, over one sequence.
pub(in super::super) struct Attention<'a, 'w> {
    /// Queries of the sequence, from the first head on.
    pub(in super::super) queries: MatrixView<'a>,
    /// Keys.
    pub(in super::super) keys: MatrixView<'a>,
    /// Values.
    pub(in super::super) values: MatrixView<'a>,
    /// Keys that each token attends to.
    pub(in super::super) reach: Reach,
    /// Soft cap `c`: scores `s` become `c·tanh(s/c)`.
    pub(in super::super) softcap: Option<f32>,
    /// Biases of the scores, and the number of the first head.
    pub(in super::super) biases: Option<(&'a DistanceBiases, usize)>,
    /// Output: the rows of the sequence, the columns of the heads.
    pub(in super::super) out: &'a mut Window<'w>,
    /// Working memory.
    pub(in super::super) scratch: &'a mut AttentionScratch,
}

/// Working memory for one sequence. It grows to the longest one.
#[derive(Default)]
pub(in super::super) struct AttentionScratch {
    /// Kᵀ in panels of [`PANEL`] keys, a row per line.
    keys: Matrix,
    /// V in panels of [`PANEL`] columns, a row per line.
    values: Matrix,
    /// Scores of the rows of a tile with all keys.
    scores: Matrix,
    /// Profile counters of the thread.
    pub(in super::super) stage_ticks: StageTicks,
}

impl Kernel for Attention<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Attention { queries, keys, values, reach, softcap, biases, out, scratch } = self;
        let (length, width) = (keys.rows(), keys.width());
        let (key_panels, value_panels) = (length.div_ceil(PANEL), width.div_ceil(PANEL));
        let AttentionScratch { keys: key_lines, values: value_lines, scores, stage_ticks } = scratch;
        let mut lap = stage_ticks.begin();
        key_lines.resize(key_panels * width, PANEL);
        value_lines.resize(value_panels * length, PANEL);
        let stride = key_panels * PANEL;
        scores.resize(MAX_TILE_ROWS, stride);
        let (key_lines, _) = key_lines.data_mut().as_chunks_mut::<PANEL>();
        let (value_lines, _) = value_lines.data_mut().as_chunks_mut::<PANEL>();
        pack_keys(simd, keys, key_lines);
        pack_values(values, value_lines);
        let mut sums = AttentionSums::default();
        for head in 0..queries.width() / width {
            let first_column = head * width;
            let queries = queries.columns(first_column..first_column + width);
            for (start, rows) in tiles(length, S::TILE_ROWS) {
                let visible = reach.of(start..start + rows, length);
                lap = stage_ticks.end(ComputeStage::Attention, lap);
                for panel in visible.start / PANEL..visible.end.div_ceil(PANEL) {
                    let lines = &key_lines[panel * width..][..width];
                    let columns = PANEL.min(visible.end - panel * PANEL);
                    let (inputs, stride_in) = queries.span(start..start + rows);
                    tile(inputs, stride_in, rows, lines, columns).sum(
                        simd,
                        &mut scores.data_mut()[panel * PANEL..],
                        stride,
                    );
                }
                lap = stage_ticks.end(ComputeStage::AttentionProducts, lap);
                let mut weights = [0.0; MAX_TILE_ROWS];
                // Range of whole vectors that contains the visible keys.
                let padded = visible.start / PANEL * PANEL..visible.end.next_multiple_of(S::LANES);
                let score_rows = scores.data_mut().chunks_exact_mut(stride);
                for (row, (scores, weight)) in score_rows.zip(&mut weights[..rows]).enumerate() {
                    let query = start + row;
                    if let Some((biases, first)) = biases {
                        add(
                            simd,
                            &mut scores[visible.clone()],
                            biases.of(first + head, query, visible.start),
                        );
                    }
                    if let Some(cap) = softcap {
                        soft_cap(simd, &mut scores[visible.clone()], cap);
                    }
                    let of_row = reach.of(query..query + 1, length);
                    let of_row = of_row.start - padded.start..of_row.end - padded.start;
                    *weight = exponentials(simd, &mut scores[padded.clone()], of_row).recip();
                }
                for panel in 0..value_panels {
                    let lines = &value_lines[panel * length..][visible.clone()];
                    let columns = PANEL.min(width - panel * PANEL);
                    let inputs = &scores.data()[visible.start..(rows - 1) * stride + visible.end];
                    lap = stage_ticks.end(ComputeStage::Attention, lap);
                    tile(inputs, stride, rows, lines, columns).sum(simd, sums.0.as_flattened_mut(), PANEL);
                    lap = stage_ticks.end(ComputeStage::AttentionProducts, lap);
                    for (row, (sums, weight)) in sums.0[..rows].iter().zip(&weights).enumerate() {
                        let out = &mut out.row_mut(start + row)[first_column + panel * PANEL..][..columns];
                        for (out, sums) in out.chunks_mut(S::LANES).zip(sums.chunks(S::LANES)) {
                            store_up_to(simd, simd.mul(simd.load(sums), simd.splat(*weight)), out);
                        }
                    }
                }
            }
        }
        stage_ticks.end(ComputeStage::Attention, lap);
    }
}

/// Packs keys: key `j` becomes lane `j % PANEL` of panel `j / PANEL`. Lanes after the last key are unchanged.
#[inline(always)]
fn pack_keys<S: Simd>(simd: S, keys: MatrixView<'_>, panels: &mut [Line]) {
    let (length, width) = (keys.rows(), keys.width());
    for first in (0..length).step_by(SQUARE) {
        let lines = &mut panels[first / PANEL * width..][..width];
        let lane = first % PANEL;
        let whole = if first + SQUARE <= length { width / SQUARE * SQUARE } else { 0 };
        if whole > 0 {
            let mut rows: [&[f32]; SQUARE] = [&[]; SQUARE];
            for column in (0..whole).step_by(SQUARE) {
                for (index, row) in rows.iter_mut().enumerate() {
                    *row = &keys.row(first + index)[column..];
                }
                simd.transpose(&rows, &mut lines[column..column + SQUARE], lane);
            }
        }
        for index in first..length.min(first + SQUARE) {
            let lane = index % PANEL;
            for (line, value) in lines[whole..].iter_mut().zip(&keys.row(index)[whole..]) {
                line[lane] = *value;
            }
        }
    }
}

/// Packs values. Columns beyond the head's width are unchanged; their results are not used.
#[inline(always)]
fn pack_values(values: MatrixView<'_>, panels: &mut [Line]) {
    let length = values.rows();
    for index in 0..length {
        for (panel, part) in values.row(index).chunks(PANEL).enumerate() {
            let line = &mut panels[panel * length + index];
            match part.first_chunk::<PANEL>() {
                Some(part) => *line = *part,
                None => line[..part.len()].copy_from_slice(part),
            }
        }
    }
}

#[inline(always)]
fn add<S: Simd>(simd: S, scores: &mut [f32], biases: &[f32]) {
    for (scores, biases) in scores.chunks_mut(S::LANES).zip(biases.chunks(S::LANES)) {
        let biases = load_up_to(simd, &biases[..scores.len()], 0.0);
        store_up_to(simd, simd.add(load_up_to(simd, scores, 0.0), biases), scores);
    }
}

#[inline(always)]
fn soft_cap<S: Simd>(simd: S, scores: &mut [f32], cap: f32) {
    for scores in scores.chunks_mut(S::LANES) {
        let part = simd.mul(load_up_to(simd, scores, 0.0), simd.splat(cap.recip()));
        store_up_to(simd, simd.mul(tanh(simd, part), simd.splat(cap)), scores);
    }
}

/// Replaces the visible scores by powers of two relative to the largest, and the others by zero or values that are
/// negligible; returns their sum. Scores are whole vectors.
#[inline(always)]
fn exponentials<S: Simd>(simd: S, scores: &mut [f32], visible: Range<usize>) -> f32 {
    // Four independent accumulators: the result of one is needed four vectors later, when it is available.
    let mut largest = [simd.splat(f32::NEG_INFINITY); 4];
    for (index, lanes) in scores.chunks_exact_mut(S::LANES).enumerate() {
        let first = index * S::LANES;
        let mut score = simd.load(lanes);
        if first < visible.start || first + S::LANES > visible.end {
            score = mask(simd, score, first, &visible);
            simd.store(score, lanes);
        }
        let [a, b, c, d] = largest;
        largest = [b, c, d, simd.max(a, score)];
    }
    let [a, b, c, d] = largest;
    let largest = simd.splat(simd.largest(simd.max(simd.max(a, b), simd.max(c, d))));
    let mut totals = [simd.splat(0.0); 4];
    for lanes in scores.chunks_exact_mut(S::LANES) {
        let value = exp2(simd, simd.sub(simd.load(lanes), largest));
        simd.store(value, lanes);
        let [a, b, c, d] = totals;
        totals = [b, c, d, simd.add(a, value)];
    }
    let [a, b, c, d] = totals;
    simd.sum(simd.add(simd.add(a, b), simd.add(c, d)))
}

/// A vector that begins or ends with values that a minimum leaves unchanged.
const EDGE: [[f32; MAX_LANES]; 3] =
    [[f32::NEG_INFINITY; MAX_LANES], [f32::INFINITY; MAX_LANES], [f32::NEG_INFINITY; MAX_LANES]];

/// Masks the scores from `first` on that are not visible. (Writing them one by one would stall the load of the vector:
/// store-to-load forwarding does not work from several pending stores.)
#[inline(always)]
pub(super) fn mask<S: Simd>(simd: S, scores: S::Vector, first: usize, visible: &Range<usize>) -> S::Vector {
    let edge = EDGE.as_flattened();
    let within = |end: usize| end.saturating_sub(first).min(S::LANES);
    let from_start = simd.load(&edge[MAX_LANES - within(visible.start)..]);
    let to_end = simd.load(&edge[2 * MAX_LANES - within(visible.end)..]);
    // If a score is NaN, which that of a lane without a key may be, the minimum is its second operand.
    simd.min(simd.min(scores, from_start), to_end)
}

/// Sums of a tile: a line per row, aligned to cache lines.
#[derive(Default)]
#[repr(align(64))]
struct AttentionSums([Line; MAX_TILE_ROWS]);

/// Tile without prefetching, because its data is cached.
#[inline(always)]
fn tile<'a>(inputs: &'a [f32], stride: usize, rows: usize, lines: &'a [Line], columns: usize) -> Tile<'a> {
    Tile { inputs, stride, rows, lines, columns, ahead: &[], rows_ahead: &[] }
}
