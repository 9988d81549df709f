//! Int8 attention of some heads over one sequence, for models with int8 layers.
//!
//! Both products are those of [`super::dots`], which multiply four times as many bytes at once as floats. In the first,
//! `Q·Kᵀ`, queries are the unsigned operand and keys the signed one; in the second, the softmax weights are unsigned by
//! nature, and values signed:
//!
//! * Queries of a head have one range over the sequence, `q ≈ low + step·u`; keys one scale, `k ≈ scale·b`. So a score
//!   is `scale·step·Σ u·b + scale·low·Σ b`, one multiplication of the integer sum and, for each key, one addition.
//! * A weight is a byte of 255 steps; the largest of a row is 255. Values have a scale for each column, and a row is
//!   divided by the sum of its bytes, so that quantization of the weights does not change its length.
//!
//! Ranges are per sequence and head, so the result of a sequence does not depend on its batch. Tiles and masking are as
//! in [`super::attention`]. Weights below the 510th part of a row's largest become zero: no loss among some hundred
//! keys, but among many thousand their sum could be significant. Sequences longer than [`MAX_KEYS`] are therefore
//! computed in f32.

#[cfg(test)]
mod tests;

use std::ops::Range;

use super::attention::mask;
use super::byte_isa::Dots;
use super::dots::{ByteTile, MAX_DOT_ROWS, WholeSums};
use super::math::exp2_coarse;
use super::quantize::{Extremes, round_row};
use super::tile::tiles;
use super::{Isa, Kernel, MAX_LANES, SQUARE, Simd, load_up_to, store_up_to};
use crate::engine::cpu::byte_panels::{ByteLine, GROUP};
use crate::engine::cpu::matrix::{Matrix, MatrixView, Window};
use crate::engine::cpu::panels::PANEL;
use crate::engine::cpu::profile::{ComputeStage, StageTicks};
use crate::model::Reach;

/// Keys of the longest sequence: the sum of all weights that are rounded to zero is then at most about one largest
/// weight.
pub(in super::super) const MAX_KEYS: usize = 512;

/// Largest magnitude of a key or value as a signed byte. A choice for the attention; the weights of layers have their own.
const LARGEST: f32 = 127.0;

/// Steps of the largest attention weight, an unsigned byte. The activations of layers have their own.
const STEPS: f32 = 255.0;

/// Number from which floats have no fractional bits: adding it rounds to an integer.
const WHOLE: f32 = 8_388_608.0;

/// Heads that share their keys and values, over one sequence.
pub(in super::super) struct ByteAttention<'a, 'w> {
    pub(in super::super) isa: Isa,
    /// Queries of the sequence, from the first head on.
    pub(in super::super) queries: MatrixView<'a>,
    /// Keys.
    pub(in super::super) keys: MatrixView<'a>,
    /// Values.
    pub(in super::super) values: MatrixView<'a>,
    /// Keys that each token attends to.
    pub(in super::super) reach: Reach,
    /// Output: the rows of the sequence, the columns of the heads.
    pub(in super::super) out: &'a mut Window<'w>,
    /// Working memory.
    pub(in super::super) scratch: &'a mut ByteAttentionScratch,
}

/// Working memory for one sequence. It grows to the longest one.
#[derive(Default)]
pub(in super::super) struct ByteAttentionScratch {
    /// Queries of one head, row by row.
    queries: AlignedBytes,
    /// Kᵀ in panels of [`PANEL`] keys, a line for each group of columns.
    keys: AlignedBytes,
    /// Sum of each key's bytes, followed by the additive terms of each key's scores for one head.
    key_numbers: Matrix,
    /// V in panels of [`PANEL`] columns, a line for each group of keys.
    values: AlignedBytes,
    /// Scale of each column of V.
    value_scales: Matrix,
    /// Integer sums of the rows of a tile with all keys, one panel of keys after another.
    sums: Vec<WholeSums>,
    /// Scores of one row with all keys.
    scores: Matrix,
    /// Quantized softmax weights.
    weights: AlignedBytes,
    /// A row of ones.
    ones: AlignedBytes,
    /// Profile counters of the thread.
    pub(in super::super) stage_ticks: StageTicks,
}

/// Bytes that are aligned to a cache line. The memory only grows.
#[derive(Default)]
struct AlignedBytes {
    data: Vec<u8>,
    start: usize,
}

impl AlignedBytes {
    /// Returns `bytes` bytes with unspecified content.
    fn reserve(&mut self, bytes: usize) -> &mut [u8] {
        let line = size_of::<ByteLine>();
        if self.data.len() < bytes + line {
            self.data = vec![0; bytes + line];
            self.start = self.data.as_ptr().align_offset(line);
        }
        &mut self.data[self.start..][..bytes]
    }

    fn lines(&mut self, lines: usize) -> &mut [ByteLine] {
        self.reserve(lines * size_of::<ByteLine>()).as_chunks_mut().0
    }
}

impl Kernel for ByteAttention<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let ByteAttention { isa, queries, keys, values, reach, out, scratch } = self;
        // A separate window: writes through it cannot change the window itself, so its extent need not be reloaded.
        let mut out = out.reborrow();
        let dots = Dots::of(isa);
        let (length, width) = (keys.rows(), keys.width());
        let (key_panels, value_panels) = (length.div_ceil(PANEL), width.div_ceil(PANEL));
        let (key_groups, value_groups) = (width.div_ceil(GROUP), length.div_ceil(GROUP));
        let (stride, row_bytes) = (key_panels * PANEL, width.next_multiple_of(MAX_LANES));
        let query_bytes = scratch.queries.reserve(length * row_bytes);
        let key_lines = scratch.keys.lines(key_panels * key_groups);
        let value_lines = scratch.values.lines(value_panels * value_groups);
        let ones = scratch.ones.reserve(row_bytes);
        let stage_ticks = &mut scratch.stage_ticks;
        let mut lap = stage_ticks.begin();
        // One row more than needed, because a view of some columns extends beyond the last row.
        let weights = scratch.weights.reserve((MAX_DOT_ROWS + 1) * stride);
        if scratch.sums.len() < key_panels {
            scratch.sums.resize_with(key_panels, WholeSums::default);
        }
        let sums = scratch.sums.as_mut_slice();
        scratch.scores.resize(1, stride);
        let scores = scratch.scores.data_mut();
        scratch.key_numbers.resize(2, stride);
        let (key_sums, biases) = scratch.key_numbers.data_mut().split_at_mut(stride);
        scratch.value_scales.resize(value_panels, PANEL);
        let value_scales = scratch.value_scales.data_mut();

        let key_scale = pack_keys(simd, keys, key_lines);
        pack_values(simd, values, value_scales, value_lines);
        ones.fill(1);
        let mut of_values = WholeSums::default();
        for (panel, key_sums) in key_lines.chunks_exact(key_groups).zip(key_sums.chunks_exact_mut(PANEL)) {
            let tile = ByteTile { bytes: ones, stride: row_bytes, start: 0, rows: 1, panel, ahead: &[] };
            dots.sum(&tile, &mut of_values);
            let whole = of_values.0[0].chunks_exact(S::LANES);
            for (whole, sums) in whole.zip(key_sums.chunks_exact_mut(S::LANES)) {
                simd.store(simd.load_whole(whole), sums);
            }
        }
        for head in 0..queries.width() / width {
            let first_column = head * width;
            let queries = queries.columns(first_column..first_column + width);
            let (low, high) = extremes(simd, queries);
            let step = (high - low) / STEPS;
            let factor = if step > 0.0 { step.recip() } else { 0.0 };
            for (index, bytes) in query_bytes.chunks_exact_mut(row_bytes).enumerate() {
                round_row(simd, queries.row(index), low, factor, bytes);
            }
            let of_low = simd.splat(key_scale * low);
            for (sums, biases) in key_sums.chunks_exact(S::LANES).zip(biases.chunks_exact_mut(S::LANES)) {
                simd.store(simd.mul(simd.load(sums), of_low), biases);
            }
            let scale = key_scale * step;
            for (start, rows) in tiles(length, dots.tile_rows()) {
                let visible = reach.of(start..start + rows, length);
                let panels = visible.start / PANEL..visible.end.div_ceil(PANEL);
                lap = stage_ticks.end(ComputeStage::Attention, lap);
                for (panel, sums) in panels.clone().zip(&mut sums[panels.clone()]) {
                    let panel = &key_lines[panel * key_groups..][..key_groups];
                    let stride = row_bytes;
                    dots.sum(&ByteTile { bytes: query_bytes, stride, start, rows, panel, ahead: &[] }, sums);
                }
                lap = stage_ticks.end(ComputeStage::AttentionProducts, lap);
                let first = panels.start * PANEL;
                let around = first..visible.end.next_multiple_of(S::LANES);
                let mut shares = [0.0; MAX_DOT_ROWS];
                let of_rows = weights.chunks_exact_mut(stride).zip(&mut shares[..rows]);
                for (row, (weights, share)) in of_rows.enumerate() {
                    let visible = reach.of(start + row..start + row + 1, length);
                    let made = ScoreOperands { sums, row, biases, scale, visible };
                    let largest = made.scores(simd, around.clone(), scores);
                    let weights = &mut weights[around.clone()];
                    *share = quantize_weights(simd, &scores[around.clone()], largest, weights).recip();
                }
                for panel in 0..value_panels {
                    let lines = &value_lines[panel * value_groups..][..value_groups];
                    let lines = &lines[first / GROUP..visible.end.div_ceil(GROUP)];
                    let bytes = &weights[first..];
                    lap = stage_ticks.end(ComputeStage::Attention, lap);
                    dots.sum(
                        &ByteTile { bytes, stride, start: 0, rows, panel: lines, ahead: &[] },
                        &mut of_values,
                    );
                    lap = stage_ticks.end(ComputeStage::AttentionProducts, lap);
                    let columns = PANEL.min(width - panel * PANEL);
                    for from in (0..columns).step_by(S::LANES) {
                        let scales = simd.load(&value_scales[panel * PANEL + from..]);
                        let (first, lanes) =
                            (first_column + panel * PANEL + from, S::LANES.min(columns - from));
                        for (row, (sums, share)) in of_values.0[..rows].iter().zip(&shares).enumerate() {
                            let value = simd.mul(simd.load_whole(&sums[from..]), scales);
                            let out = &mut out.row_mut(start + row)[first..][..lanes];
                            store_up_to(simd, simd.mul(value, simd.splat(*share)), out);
                        }
                    }
                }
            }
        }
        stage_ticks.end(ComputeStage::Attention, lap);
    }
}

/// Operands of the scores of a row.
struct ScoreOperands<'a> {
    sums: &'a [WholeSums],
    /// Row of the tile.
    row: usize,
    /// Additive term of each key.
    biases: &'a [f32],
    scale: f32,
    /// Keys that the row attends to.
    visible: Range<usize>,
}

impl ScoreOperands<'_> {
    /// Computes the scores of these keys, in whole vectors; returns the largest.
    #[inline(always)]
    fn scores<S: Simd>(self, simd: S, keys: Range<usize>, scores: &mut [f32]) -> f32 {
        let ScoreOperands { sums, row, biases, scale, visible } = self;
        let scale = simd.splat(scale);
        let mut largest = [simd.splat(f32::NEG_INFINITY); 2];
        for key in keys.step_by(S::LANES) {
            let sums = &sums[key / PANEL].0[row][key % PANEL..];
            let mut score = simd.mul_add(simd.load_whole(sums), scale, simd.load(&biases[key..]));
            if key < visible.start || visible.end < key + S::LANES {
                score = mask(simd, score, key, &visible);
            }
            simd.store(score, &mut scores[key..]);
            let [a, b] = largest;
            largest = [b, simd.max(a, score)];
        }
        let [a, b] = largest;
        simd.largest(simd.max(a, b))
    }
}

/// Quantizes scores to bytes, the largest to [`STEPS`]; returns the sum of the bytes. Whole vectors.
#[inline(always)]
fn quantize_weights<S: Simd>(simd: S, scores: &[f32], largest: f32, weights: &mut [u8]) -> f32 {
    let top = simd.splat(STEPS.log2() - largest);
    let whole = simd.splat(WHOLE);
    let mut totals = [simd.splat(0.0); 2];
    for (scores, weights) in scores.chunks_exact(S::LANES).zip(weights.chunks_exact_mut(S::LANES)) {
        // The addition rounds, so the weight is in the lowest bits.
        let weight = simd.add(exp2_coarse(simd, simd.add(simd.load(scores), top)), whole);
        simd.store_low_bytes(weight, weights);
        let [a, b] = totals;
        totals = [b, simd.add(a, simd.sub(weight, whole))];
    }
    let [a, b] = totals;
    simd.sum(simd.add(a, b))
}

/// Returns the smallest and the largest number of all rows.
#[inline(always)]
fn extremes<S: Simd>(simd: S, rows: MatrixView<'_>) -> (f32, f32) {
    let mut found = Extremes::of(simd, rows.row(0)[0]);
    for index in 0..rows.rows() {
        found = found.and(simd, rows.row(index));
    }
    found.all(simd)
}

/// Packs keys: key `j` becomes lane `j % PANEL` of panel `j / PANEL`, four columns per line; returns the scale of the
/// bytes. Lanes after the last key are unspecified.
#[inline(always)]
fn pack_keys<S: Simd>(simd: S, keys: MatrixView<'_>, lines: &mut [ByteLine]) -> f32 {
    let (length, width) = (keys.rows(), keys.width());
    let groups = width.div_ceil(GROUP);
    let (low, high) = extremes(simd, keys);
    let most = high.max(-low);
    let factor = simd.splat(if most > 0.0 { LARGEST / most } else { 0.0 });
    // Columns of sixteen keys, as lines.
    let mut square = [[0.0; PANEL]; SQUARE];
    for first in (0..length).step_by(SQUARE) {
        let mut rows: [&[f32]; SQUARE] = [&[]; SQUARE];
        for (index, row) in rows.iter_mut().enumerate() {
            *row = keys.row((first + index).min(length - 1));
        }
        for column in (0..width).step_by(SQUARE) {
            let columns = SQUARE.min(width - column);
            if columns == SQUARE {
                let parts = rows.map(|row| &row[column..]);
                simd.transpose(&parts, &mut square, 0);
            } else {
                square = [[0.0; PANEL]; SQUARE];
                for (lane, row) in rows.iter().enumerate() {
                    for (line, value) in square.iter_mut().zip(&row[column..]) {
                        line[lane] = *value;
                    }
                }
            }
            let fours = square.as_chunks::<GROUP>().0.iter().take(columns.div_ceil(GROUP));
            for (group, [a, b, c, d]) in fours.enumerate() {
                let line = &mut lines[first / PANEL * groups + column / GROUP + group];
                let bytes = &mut line[first % PANEL * GROUP..][..SQUARE * GROUP];
                for (index, bytes) in bytes.chunks_exact_mut(S::LANES * GROUP).enumerate() {
                    let lane = index * S::LANES;
                    let four = [
                        simd.mul(simd.load(&a[lane..]), factor),
                        simd.mul(simd.load(&b[lane..]), factor),
                        simd.mul(simd.load(&c[lane..]), factor),
                        simd.mul(simd.load(&d[lane..]), factor),
                    ];
                    simd.store_quads(four, bytes);
                }
            }
        }
    }
    most / LARGEST
}

/// Packs values: four keys' values of a column become a lane; `scales` receives the scale of each column. Columns
/// beyond the width and keys after the last one are zeros.
#[inline(always)]
fn pack_values<S: Simd>(simd: S, values: MatrixView<'_>, scales: &mut [f32], lines: &mut [ByteLine]) {
    let (length, width) = (values.rows(), values.width());
    let groups = length.div_ceil(GROUP);
    let zero = simd.splat(0.0);
    for first in (0..width).step_by(S::LANES) {
        let columns = first..width.min(first + S::LANES);
        let (mut least, mut most) = (zero, simd.splat(1e-30));
        for index in 0..length {
            let value = load_up_to(simd, &values.row(index)[columns.clone()], 0.0);
            least = simd.min(least, value);
            most = simd.max(most, value);
        }
        let most = simd.max(most, simd.sub(zero, least));
        simd.store(simd.mul(most, simd.splat(LARGEST.recip())), &mut scales[first..]);
        let factor = simd.div(simd.splat(LARGEST), most);
        for group in 0..groups {
            let mut four = [zero; GROUP];
            for (place, value) in four.iter_mut().enumerate() {
                let index = group * GROUP + place;
                if index < length {
                    let row = &values.row(index)[columns.clone()];
                    *value = simd.mul(load_up_to(simd, row, 0.0), factor);
                }
            }
            let line = &mut lines[first / PANEL * groups + group];
            simd.store_quads(four, &mut line[first % PANEL * GROUP..]);
        }
    }
}
