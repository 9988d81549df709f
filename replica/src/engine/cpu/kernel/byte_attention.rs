//! Attention of some heads over one sequence, in bytes: for models whose layers are bytes.
//!
//! Both products are those of [`super::dots`], which multiply four times as much at once as numbers do. Of the first,
//! `Q·Kᵀ`, queries are the unsigned side and keys the signed one; of the second, the weights that the softmax comes to
//! are unsigned by nature, and values signed:
//!
//! * Queries of a head have one range over the sequence, `q ≈ low + step·u`; keys one scale, `k ≈ scale·b`. So a score is
//!   `scale·step·Σ u·b + scale·low·Σ b`, one multiplication of the whole sum and, for each key, something to add.
//! * A weight is a byte of 255 steps, of which the largest of a row has all. Values have a scale for each column, and a
//!   row is divided by the sum of its bytes, so that what rounding does to weights does not make it longer or shorter.
//!
//! Ranges are of the sequence and the head, so a sequence comes to the same in any company. How scores are cut into
//! tiles, and who sees whom, is as in [`super::attention`]. Weights below the 510th part of a row's largest are nothing:
//! no loss among some hundred keys, but among many thousand they could be what counts together. Longer sequences than
//! [`MAX_KEYS`] are therefore left to numbers.

#[cfg(test)]
mod tests;

use super::attention::blot;
use super::dots::{ByteTile, Dots, MAX_DOT_ROWS, WholeSums};
use super::math::exp2_coarse;
use super::quantize::round_row;
use super::tile::tiles;
use super::{Isa, Kernel, MAX_LANES, Simd, load_up_to, store_up_to};
use crate::engine::cpu::byte_panels::{ByteLine, GROUP};
use crate::engine::cpu::matrix::{Matrix, View, Window};
use crate::engine::cpu::panels::PANEL;
use crate::model::Reach;

/// Keys of the longest sequence: all that is rounded away is then about one largest weight, if it were all there can be.
pub(in super::super) const MAX_KEYS: usize = 512;

/// What a signed byte is stored with.
const OFFSET: f32 = 128.0;

/// The largest magnitude of a signed byte.
const LARGEST: f32 = 127.0;

/// Steps of the largest weight.
const STEPS: f32 = 255.0;

/// A number that a float of its size cannot have a fraction behind: adding it rounds.
const WHOLE: f32 = 8_388_608.0;

/// Heads that share their keys and values, over one sequence.
pub(in super::super) struct ByteAttention<'a, 'w> {
    pub(in super::super) isa: Isa,
    /// The sequence's queries; the first head's stand first.
    pub(in super::super) queries: View<'a>,
    /// Its keys.
    pub(in super::super) keys: View<'a>,
    /// Its values.
    pub(in super::super) values: View<'a>,
    /// What each token sees.
    pub(in super::super) reach: Reach,
    /// Where the result goes: the sequence's rows, the heads' columns.
    pub(in super::super) out: &'a mut Window<'w>,
    /// Room to work in.
    pub(in super::super) scratch: &'a mut ByteAttentionScratch,
}

/// Room for one sequence. It grows to the longest one.
#[derive(Default)]
pub(in super::super) struct ByteAttentionScratch {
    /// Of one head, row by row.
    queries: Bytes,
    /// Kᵀ in panels of [`PANEL`] keys, a line for each group of columns.
    keys: Bytes,
    /// Sums of each key's bytes; behind them, of one head, what is added to each key's scores.
    key_numbers: Matrix,
    /// V in panels of [`PANEL`] columns, a line for each group of keys.
    values: Bytes,
    /// Of each column of V.
    value_scales: Matrix,
    /// Of the rows of a tile, to all keys.
    scores: Matrix,
    /// What they become.
    weights: Bytes,
    /// A row on its way to lines; behind it a row of ones.
    row: Bytes,
}

/// Bytes that begin where a cache line begins. Its memory only grows.
#[derive(Default)]
struct Bytes {
    data: Vec<u8>,
    start: usize,
}

impl Bytes {
    /// So many, with anything in them.
    fn room(&mut self, bytes: usize) -> &mut [u8] {
        let line = size_of::<ByteLine>();
        if self.data.len() < bytes + line {
            self.data = vec![0; bytes + line];
            self.start = self.data.as_ptr().align_offset(line);
        }
        &mut self.data[self.start..][..bytes]
    }

    fn lines(&mut self, lines: usize) -> &mut [ByteLine] {
        self.room(lines * size_of::<ByteLine>()).as_chunks_mut().0
    }
}

impl Kernel for ByteAttention<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let ByteAttention { isa, queries, keys, values, reach, out, scratch } = self;
        let dots = Dots::of(isa);
        let (length, width) = (keys.rows(), keys.width());
        let (key_panels, value_panels) = (length.div_ceil(PANEL), width.div_ceil(PANEL));
        let (key_groups, value_groups) = (width.div_ceil(GROUP), length.div_ceil(GROUP));
        let (stride, row_bytes) = (key_panels * PANEL, width.next_multiple_of(MAX_LANES));
        let query_bytes = scratch.queries.room(length * row_bytes);
        let key_lines = scratch.keys.lines(key_panels * key_groups);
        let value_lines = scratch.values.lines(value_panels * value_groups);
        let (row, ones) = scratch.row.room(2 * row_bytes).split_at_mut(row_bytes);
        // One row more than there are, since a view of some columns ends behind the last row's last.
        let weights = scratch.weights.room((MAX_DOT_ROWS + 1) * stride);
        scratch.scores.resize(MAX_DOT_ROWS, stride);
        let scores = scratch.scores.data_mut();
        scratch.key_numbers.resize(2, stride);
        let (key_sums, biases) = scratch.key_numbers.data_mut().split_at_mut(stride);
        scratch.value_scales.resize(value_panels, PANEL);
        let value_scales = scratch.value_scales.data_mut();

        let key_scale = pack_keys(simd, keys, row, key_lines);
        pack_values(simd, values, value_scales, value_lines);
        let mut sums = WholeSums::default();
        ones.fill(1);
        for (panel, key_sums) in key_lines.chunks_exact(key_groups).zip(key_sums.chunks_exact_mut(PANEL)) {
            let tile = ByteTile { bytes: ones, stride: row_bytes, start: 0, rows: 1, panel, ahead: &[] };
            dots.sum(&tile, &mut sums);
            for (whole, sums) in sums.0[0].chunks_exact(S::LANES).zip(key_sums.chunks_exact_mut(S::LANES)) {
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
            let scale = simd.splat(key_scale * step);
            for (start, rows) in tiles(length, dots.tile_rows()) {
                let seen = reach.of(start..start + rows, length);
                // What all of them see.
                let (begin, end) =
                    (reach.of(start + rows - 1..start + rows, length), reach.of(start..start + 1, length));
                let by_all = begin.start..end.end;
                let panels = seen.start / PANEL..seen.end.div_ceil(PANEL);
                let mut largest = [simd.splat(f32::NEG_INFINITY); MAX_DOT_ROWS];
                for panel in panels.clone() {
                    let lines = &key_lines[panel * key_groups..][..key_groups];
                    dots.sum(
                        &ByteTile {
                            bytes: query_bytes,
                            stride: row_bytes,
                            start,
                            rows,
                            panel: lines,
                            ahead: &[],
                        },
                        &mut sums,
                    );
                    let mut column = 0;
                    while column < PANEL && panel * PANEL + column < seen.end {
                        let key = panel * PANEL + column;
                        let bias = simd.load(&biases[key..]);
                        let whole = by_all.start <= key && key + S::LANES <= by_all.end;
                        let rows_of = scores.chunks_exact_mut(stride).zip(&sums.0).zip(&mut largest);
                        for (row, ((scores, sums), largest)) in rows_of.take(rows).enumerate() {
                            let mut score = simd.mul_add(simd.load_whole(&sums[column..]), scale, bias);
                            if !whole {
                                let query = start + row;
                                score = blot(simd, score, key, &reach.of(query..query + 1, length));
                            }
                            *largest = simd.max(*largest, score);
                            simd.store(score, &mut scores[key..]);
                        }
                        column += S::LANES;
                    }
                }
                let first = panels.start * PANEL;
                let around = first..seen.end.next_multiple_of(S::LANES);
                let mut shares = [0.0; MAX_DOT_ROWS];
                let of_rows = scores.chunks_exact(stride).zip(weights.chunks_exact_mut(stride));
                for ((scores, weights), (largest, share)) in
                    of_rows.zip(largest.iter().zip(&mut shares)).take(rows)
                {
                    let largest = simd.largest(*largest);
                    *share =
                        weigh(simd, &scores[around.clone()], largest, &mut weights[around.clone()]).recip();
                }
                for panel in 0..value_panels {
                    let lines = &value_lines[panel * value_groups..][..value_groups];
                    let lines = &lines[first / GROUP..seen.end.div_ceil(GROUP)];
                    dots.sum(
                        &ByteTile {
                            bytes: &weights[first..],
                            stride,
                            start: 0,
                            rows,
                            panel: lines,
                            ahead: &[],
                        },
                        &mut sums,
                    );
                    let columns = PANEL.min(width - panel * PANEL);
                    let scales = &value_scales[panel * PANEL..][..PANEL];
                    for (row, (sums, share)) in sums.0[..rows].iter().zip(&shares).enumerate() {
                        let share = simd.splat(*share);
                        let out = &mut out.row_mut(start + row)[first_column + panel * PANEL..][..columns];
                        let lanes = sums.chunks_exact(S::LANES).zip(scales.chunks_exact(S::LANES));
                        for (out, (sums, scales)) in out.chunks_mut(S::LANES).zip(lanes) {
                            let scale = simd.mul(simd.load(scales), share);
                            store_up_to(simd, simd.mul(simd.load_whole(sums), scale), out);
                        }
                    }
                }
            }
        }
    }
}

/// Turns scores into bytes, the largest into [`STEPS`]; comes to the sum of the bytes. Whole vectors.
#[inline(always)]
fn weigh<S: Simd>(simd: S, scores: &[f32], largest: f32, weights: &mut [u8]) -> f32 {
    let top = simd.splat(STEPS.log2() - largest);
    let whole = simd.splat(WHOLE);
    let mut totals = [simd.splat(0.0); 2];
    for (scores, weights) in scores.chunks_exact(S::LANES).zip(weights.chunks_exact_mut(S::LANES)) {
        let weight = exp2_coarse(simd, simd.add(simd.load(scores), top));
        let weight = simd.sub(simd.add(weight, whole), whole);
        simd.store_bytes(weight, weights);
        let [a, b] = totals;
        totals = [b, simd.add(a, weight)];
    }
    let [a, b] = totals;
    simd.sum(simd.add(a, b))
}

/// The smallest and the largest number of all rows.
#[inline(always)]
fn extremes<S: Simd>(simd: S, rows: View<'_>) -> (f32, f32) {
    let any = rows.row(0)[0];
    let (mut least, mut largest) = ([simd.splat(any); 2], [simd.splat(any); 2]);
    for index in 0..rows.rows() {
        for block in rows.row(index).chunks(2 * S::LANES) {
            for ((least, largest), lanes) in least.iter_mut().zip(&mut largest).zip(block.chunks(S::LANES)) {
                let value = load_up_to(simd, lanes, any);
                *least = simd.min(*least, value);
                *largest = simd.max(*largest, value);
            }
        }
    }
    let least = simd.sub(simd.splat(0.0), simd.min(least[0], least[1]));
    (-simd.largest(least), simd.largest(simd.max(largest[0], largest[1])))
}

/// Key `j` becomes lane `j % PANEL` of panel `j / PANEL`; comes to the scale of the bytes. Lanes beyond the last key keep
/// what was there.
#[inline(always)]
fn pack_keys<S: Simd>(simd: S, keys: View<'_>, row: &mut [u8], lines: &mut [ByteLine]) -> f32 {
    let groups = keys.width().div_ceil(GROUP);
    let (low, high) = extremes(simd, keys);
    let most = high.max(-low);
    let factor = if most > 0.0 { LARGEST / most } else { 0.0 };
    for index in 0..keys.rows() {
        for (lanes, bytes) in keys.row(index).chunks(S::LANES).zip(row.chunks_mut(S::LANES)) {
            let value = simd.mul_add(load_up_to(simd, lanes, 0.0), simd.splat(factor), simd.splat(OFFSET));
            simd.store_bytes(value, bytes);
        }
        let panel = &mut lines[index / PANEL * groups..][..groups];
        let place = index % PANEL * GROUP;
        for (line, group) in panel.iter_mut().zip(row.as_chunks::<GROUP>().0) {
            let signed = u32::from_le_bytes(*group) ^ SIGNS;
            line[place..place + GROUP].copy_from_slice(&signed.to_le_bytes());
        }
    }
    most / LARGEST
}

/// The bits in which four bytes with [`OFFSET`] differ from signed ones.
const SIGNS: u32 = 0x8080_8080;

/// Four keys' values of a column become a lane; `scales` are given to each column. Columns beyond the width and keys
/// beyond the last one are zeros.
#[inline(always)]
fn pack_values<S: Simd>(simd: S, values: View<'_>, scales: &mut [f32], lines: &mut [ByteLine]) {
    let (length, width) = (values.rows(), values.width());
    let groups = length.div_ceil(GROUP);
    for first in (0..width).step_by(S::LANES) {
        let columns = first..width.min(first + S::LANES);
        let mut most = simd.splat(1e-30);
        for index in 0..length {
            let value = load_up_to(simd, &values.row(index)[columns.clone()], 0.0);
            most = simd.max(most, simd.max(value, simd.sub(simd.splat(0.0), value)));
        }
        simd.store(simd.mul(most, simd.splat(LARGEST.recip())), &mut scales[first..]);
        let factor = simd.div(simd.splat(LARGEST), most);
        for group in 0..groups {
            let mut rows = [[OFFSET as u8; MAX_LANES]; GROUP];
            for (row, index) in rows.iter_mut().zip(group * GROUP..length) {
                let value = load_up_to(simd, &values.row(index)[columns.clone()], 0.0);
                simd.store_bytes(simd.mul_add(value, factor, simd.splat(OFFSET)), row);
            }
            let line =
                &mut lines[first / PANEL * groups + group][first % PANEL * GROUP..][..S::LANES * GROUP];
            let [a, b, c, d] = &rows;
            let places = line.as_chunks_mut::<GROUP>().0.iter_mut();
            for ((((place, a), b), c), d) in places.zip(a).zip(b).zip(c).zip(d) {
                let [a, b, c, d] = [*a, *b, *c, *d].map(u32::from);
                *place = ((a | b << 8 | c << 16 | d << 24) ^ SIGNS).to_le_bytes();
            }
        }
    }
}
