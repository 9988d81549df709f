//! Matrix products: rows of activations times weights in panels.
//!
//! Weights lie in panels of [`PANEL`] columns; within a panel, the columns' weights for one input are side by side. A
//! tile, some rows times one panel, keeps its sums in registers while it walks down the inputs, loading each weight once
//! for all of its rows. The loop is [`tile`]; attention uses it too.
//!
//! Every sum runs over the inputs in order and in one register, whatever the size of the tile. So a row comes to the
//! same bits in every batch.

use super::math::activate;
use super::{Kernel, Simd, TILE_VECTORS, load_up_to, store_up_to};
use crate::engine::cpu::matrix::{View, Window};
use crate::engine::cpu::panels::{Line, PANEL, Panels};
use crate::model::Activation;

/// Rows of the largest tile of any instruction set.
pub(super) const MAX_TILE_ROWS: usize = 12;

/// What a tile comes to: a line per row, each beginning where a cache line begins.
#[derive(Default)]
#[repr(align(64))]
pub(super) struct Sums(pub(super) [Line; MAX_TILE_ROWS]);

/// What becomes of a product.
#[derive(Clone, Copy)]
pub(in super::super) enum Finish {
    /// It is the result.
    Store,
    /// The result is the activation of it.
    Activate(Activation),
    /// It is added to what was there.
    Add,
}

/// `out = finish(input · weights + bias)`, for the columns of `out`, which begin where a panel begins.
pub(in super::super) struct Product<'a, 'w> {
    pub(in super::super) input: View<'a>,
    pub(in super::super) weights: Panels<'a>,
    pub(in super::super) bias: &'a [f32],
    pub(in super::super) finish: Finish,
    pub(in super::super) out: &'a mut Window<'w>,
}

impl Kernel for Product<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Product { input, weights, bias, finish, out } = self;
        let columns = out.columns();
        assert!(columns.start % PANEL == 0, "a part of a product begins with a panel");
        let panels = columns.start / PANEL..columns.end.div_ceil(PANEL);
        let mut sums = Sums::default();
        for index in panels.clone() {
            let first = index * PANEL;
            let width = PANEL.min(columns.end - first);
            let bias = &bias[first..][..width];
            let panel = weights.panel(index);
            let next = if index + 1 < panels.end { weights.panel(index + 1) } else { &[] };
            // The panel stays in a near cache while all rows pass it. Meanwhile the next one is fetched.
            for (start, rows) in tiles::<S>(input.rows()) {
                let place = |row| row * next.len() / input.rows();
                let ahead = &next[place(start)..place(start + rows)];
                Tile { input, start, rows, panel, ahead }.sum(simd, &mut sums);
                for (row, sums) in (start..start + rows).zip(&sums.0) {
                    let out = &mut out.row_mut(row)[first - columns.start..][..width];
                    finish_row(simd, finish, sums, bias, out);
                }
            }
        }
    }
}

/// Cuts rows into tiles of nearly equal size, as few as possible: start and number of rows of each.
#[inline(always)]
pub(super) fn tiles<S: Simd>(rows: usize) -> impl Iterator<Item = (usize, usize)> {
    let count = rows.div_ceil(S::TILE_ROWS);
    (0..count).map(move |index| {
        let start = index * rows / count;
        (start, (index + 1) * rows / count - start)
    })
}

/// Some rows of a matrix, to be multiplied with one panel.
pub(super) struct Tile<'a> {
    pub(super) input: View<'a>,
    /// The first row.
    pub(super) start: usize,
    /// How many; at most [`Simd::TILE_ROWS`].
    pub(super) rows: usize,
    pub(super) panel: &'a [Line],
    /// Lines that are wanted soon and may be far away.
    pub(super) ahead: &'a [Line],
}

impl Tile<'_> {
    /// The sums of its rows.
    #[inline(always)]
    pub(super) fn sum<S: Simd>(&self, simd: S, sums: &mut Sums) {
        // Each size is a loop of its own, and sizes that the instruction set does not use are compiled to nothing.
        match self.rows {
            1 => simd.run(Sum::<1>::new(self, sums)),
            2 => simd.run(Sum::<2>::new(self, sums)),
            3 => simd.run(Sum::<3>::new(self, sums)),
            4 if S::TILE_ROWS >= 4 => simd.run(Sum::<4>::new(self, sums)),
            5 if S::TILE_ROWS >= 5 => simd.run(Sum::<5>::new(self, sums)),
            6 if S::TILE_ROWS >= 6 => simd.run(Sum::<6>::new(self, sums)),
            7 if S::TILE_ROWS >= 7 => simd.run(Sum::<7>::new(self, sums)),
            8 if S::TILE_ROWS >= 8 => simd.run(Sum::<8>::new(self, sums)),
            9 if S::TILE_ROWS >= 9 => simd.run(Sum::<9>::new(self, sums)),
            10 if S::TILE_ROWS >= 10 => simd.run(Sum::<10>::new(self, sums)),
            11 if S::TILE_ROWS >= 11 => simd.run(Sum::<11>::new(self, sums)),
            12 if S::TILE_ROWS >= 12 => simd.run(Sum::<12>::new(self, sums)),
            rows => unreachable!("a tile of {rows} rows, of at most {}", S::TILE_ROWS),
        }
    }
}

/// Lines between two looks at what is to be fetched ahead. Fetches in one go would fill the queue to memory and hold up
/// the loads behind them; spread out they cost nothing.
const STEP: usize = 8;

/// The innermost loop. It is given rows, not a matrix: the compiler then keeps a pointer to each in a register, where it
/// would compute addresses from the distance of rows, and decoding that takes longer than the multiplications.
struct Sum<'a, const ROWS: usize> {
    rows: [&'a [f32]; ROWS],
    panel: &'a [Line],
    ahead: &'a [Line],
    sums: &'a mut Sums,
}

impl<'a, const ROWS: usize> Sum<'a, ROWS> {
    #[inline(always)]
    fn new(tile: &Tile<'a>, sums: &'a mut Sums) -> Sum<'a, ROWS> {
        let mut rows: [&[f32]; ROWS] = [&[]; ROWS];
        for (index, row) in rows.iter_mut().enumerate() {
            *row = tile.input.row(tile.start + index);
        }
        Sum { rows, panel: tile.panel, ahead: tile.ahead, sums }
    }
}

impl<const ROWS: usize> Kernel for Sum<'_, ROWS> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Sum { rows, panel, ahead, sums } = self;
        let steps = panel.len().div_ceil(STEP);
        let mut column = 0;
        while column < PANEL {
            let mut totals = [[simd.splat(0.0); TILE_VECTORS]; ROWS];
            let mut ahead = ahead.chunks(ahead.len().div_ceil(steps).max(1));
            for (step, lines) in panel.chunks(STEP).enumerate() {
                for line in ahead.next().unwrap_or_default() {
                    simd.prefetch(line);
                }
                // All slices are of one length: the loop below needs no check.
                let mut values: [&[f32]; ROWS] = [&[]; ROWS];
                for (values, row) in values.iter_mut().zip(rows) {
                    *values = &row[step * STEP..][..lines.len()];
                }
                for (index, line) in lines.iter().enumerate() {
                    let left = simd.load(&line[column..]);
                    let right = simd.load(&line[column + S::LANES..]);
                    for (totals, values) in totals.iter_mut().zip(&values) {
                        let value = simd.splat(values[index]);
                        totals[0] = simd.mul_add(value, left, totals[0]);
                        totals[1] = simd.mul_add(value, right, totals[1]);
                    }
                }
            }
            for (totals, sums) in totals.iter().zip(&mut sums.0) {
                simd.store(totals[0], &mut sums[column..]);
                simd.store(totals[1], &mut sums[column + S::LANES..]);
            }
            column += TILE_VECTORS * S::LANES;
        }
    }
}

/// Bias and finish of one row's share of a panel.
#[inline(always)]
fn finish_row<S: Simd>(simd: S, finish: Finish, sums: &Line, bias: &[f32], out: &mut [f32]) {
    let lanes = sums.chunks_exact(S::LANES);
    for ((sums, bias), out) in lanes.zip(bias.chunks(S::LANES)).zip(out.chunks_mut(S::LANES)) {
        let value = simd.add(simd.load(sums), load_up_to(simd, bias, 0.0));
        let value = match finish {
            Finish::Store => value,
            Finish::Activate(activation) => activate(simd, activation, value),
            Finish::Add => simd.add(value, load_up_to(simd, out, 0.0)),
        };
        store_up_to(simd, value, out);
    }
}
