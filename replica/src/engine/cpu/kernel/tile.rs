//! Tiles: the innermost loop of every product of floats.
//!
//! A tile is some rows times one panel. It keeps its sums in registers while it iterates over the inputs, loading each
//! weight once for all of its rows. Every sum runs over the inputs in order and in one register, whatever the size of
//! the tile. So a row has the same bits in every batch.

use super::{Kernel, Simd, TILE_VECTORS};
use crate::engine::cpu::panels::Line;

/// Rows of the largest tile of any instruction set.
pub(super) const MAX_TILE_ROWS: usize = 14;

/// Lines between two prefetches. Prefetches in one burst would fill the queue to memory and stall the loads behind
/// them; spread out they cost nothing.
pub(super) const STEP: usize = 8;

/// Some rows of a matrix, to be multiplied with the lines of one panel.
#[derive(Clone, Copy)]
pub(in super::super) struct Tile<'a> {
    /// From the first row's number for the first line to the last row's for the last.
    pub(super) inputs: &'a [f32],
    /// Numbers from one row to the next.
    pub(super) stride: usize,
    /// Number of rows; at most [`Simd::TILE_ROWS`].
    pub(super) rows: usize,
    pub(super) lines: &'a [Line],
    /// Columns of the panel that are used; the others are unspecified.
    pub(super) columns: usize,
    /// Lines to prefetch.
    pub(super) ahead: &'a [Line],
    /// Rows to prefetch.
    pub(super) rows_ahead: &'a [f32],
}

impl Tile<'_> {
    /// Writes the sums of its rows, `stride` numbers from one row to the next.
    #[inline(always)]
    pub(super) fn sum<S: Simd>(&self, simd: S, sums: &mut [f32], stride: usize) {
        // Each size is a separate loop, and sizes that the instruction set does not use are compiled to nothing.
        match self.rows {
            1 => simd.run(TileLoop::<1> { tile: self, sums, stride }),
            2 => simd.run(TileLoop::<2> { tile: self, sums, stride }),
            3 => simd.run(TileLoop::<3> { tile: self, sums, stride }),
            4 if S::TILE_ROWS >= 4 => simd.run(TileLoop::<4> { tile: self, sums, stride }),
            5 if S::TILE_ROWS >= 5 => simd.run(TileLoop::<5> { tile: self, sums, stride }),
            6 if S::TILE_ROWS >= 6 => simd.run(TileLoop::<6> { tile: self, sums, stride }),
            7 if S::TILE_ROWS >= 7 => simd.run(TileLoop::<7> { tile: self, sums, stride }),
            8 if S::TILE_ROWS >= 8 => simd.run(TileLoop::<8> { tile: self, sums, stride }),
            9 if S::TILE_ROWS >= 9 => simd.run(TileLoop::<9> { tile: self, sums, stride }),
            10 if S::TILE_ROWS >= 10 => simd.run(TileLoop::<10> { tile: self, sums, stride }),
            11 if S::TILE_ROWS >= 11 => simd.run(TileLoop::<11> { tile: self, sums, stride }),
            12 if S::TILE_ROWS >= 12 => simd.run(TileLoop::<12> { tile: self, sums, stride }),
            13 if S::TILE_ROWS >= 13 => simd.run(TileLoop::<13> { tile: self, sums, stride }),
            14 if S::TILE_ROWS >= 14 => simd.run(TileLoop::<14> { tile: self, sums, stride }),
            rows => unreachable!("a tile of {rows} rows, of at most {}", S::TILE_ROWS),
        }
    }

    /// Returns the numbers of lines and of row elements to prefetch with each block of [`STEP`] lines.
    #[inline(always)]
    pub(super) fn ahead_each(&self) -> [usize; 2] {
        [self.ahead.len(), self.rows_ahead.len()].map(|all| share_of_step(all, self.lines.len()))
    }
}

/// Returns the number of `all` elements per block of [`STEP`] lines; at least one.
#[inline(always)]
pub(super) fn share_of_step(all: usize, lines: usize) -> usize {
    all.div_ceil(lines.div_ceil(STEP).max(1)).max(1)
}

/// Divides rows into the least number of tiles of nearly equal size; returns start and number of rows of each.
#[inline(always)]
pub(super) fn tiles(rows: usize, largest: usize) -> impl Iterator<Item = (usize, usize)> {
    let count = rows.div_ceil(largest);
    let (each, more) = (rows / count.max(1), rows % count.max(1));
    let mut next = 0;
    (0..count).map(move |index| {
        let (start, size) = (next, each + usize::from(index < more));
        next += size;
        (start, size)
    })
}

/// Innermost loop: a separate function for each number of rows.
struct TileLoop<'a, 't, const ROWS: usize> {
    tile: &'a Tile<'t>,
    sums: &'a mut [f32],
    stride: usize,
}

impl<const ROWS: usize> Kernel for TileLoop<'_, '_, ROWS> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let TileLoop { tile, sums, stride } = self;
        let mut column = 0;
        while column + S::LANES < tile.columns {
            simd.tile::<ROWS, TILE_VECTORS>(tile, column, sums, stride);
            column += TILE_VECTORS * S::LANES;
        }
        if column < tile.columns {
            simd.tile::<ROWS, 1>(tile, column, sums, stride);
        }
    }
}

/// Computes the sums of `ROWS` rows and `VECTORS` vectors from this column on, with the operations that every
/// instruction set has.
#[inline(always)]
pub(super) fn plain<S: Simd, const ROWS: usize, const VECTORS: usize>(
    simd: S,
    tile: &Tile<'_>,
    column: usize,
    sums: &mut [f32],
    stride: usize,
) {
    let mut rows: [&[f32]; ROWS] = [&[]; ROWS];
    for (index, row) in rows.iter_mut().enumerate() {
        *row = &tile.inputs[index * tile.stride..][..tile.lines.len()];
    }
    let each = tile.ahead_each();
    let (mut ahead, mut rows_ahead) = (tile.ahead.chunks(each[0]), tile.rows_ahead.chunks(each[1]));
    let mut totals = [[simd.splat(0.0); VECTORS]; ROWS];
    for (block, lines) in tile.lines.chunks(STEP).enumerate() {
        for line in ahead.next().unwrap_or_default() {
            simd.prefetch(line);
        }
        simd.prefetch(rows_ahead.next().unwrap_or_default());
        // All slices have one length: the loop below needs no bounds check.
        let mut values: [&[f32]; ROWS] = [&[]; ROWS];
        for (values, row) in values.iter_mut().zip(rows) {
            *values = &row[block * STEP..][..lines.len()];
        }
        for (index, line) in lines.iter().enumerate() {
            let mut weights = [simd.splat(0.0); VECTORS];
            for (vector, weights) in weights.iter_mut().enumerate() {
                *weights = simd.load(&line[column + vector * S::LANES..]);
            }
            for (totals, values) in totals.iter_mut().zip(&values) {
                let value = simd.splat(values[index]);
                for (total, weights) in totals.iter_mut().zip(weights) {
                    *total = simd.mul_add(value, weights, *total);
                }
            }
        }
    }
    for (row, totals) in totals.iter().enumerate() {
        let sums = &mut sums[row * stride + column..][..VECTORS * S::LANES];
        for (vector, total) in totals.iter().enumerate() {
            simd.store(*total, &mut sums[vector * S::LANES..]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Isa;
    use super::*;
    use crate::engine::cpu::panels::PANEL;

    struct WholeTile<'a>(Tile<'a>, &'a mut [f32]);

    impl Kernel for WholeTile<'_> {
        type Output = ();

        #[inline(always)]
        fn run<S: Simd>(self, simd: S) {
            let tile = Tile { rows: self.0.rows.min(S::TILE_ROWS), ..self.0 };
            tile.sum(simd, self.1, PANEL);
        }
    }

    /// Numbers without a pattern, between −1 and 1.
    fn noise(count: usize) -> Vec<f32> {
        let numbers = (0..count as u32).map(|index| index.wrapping_mul(2_654_435_761) >> 8);
        numbers.map(|number| number as f32 / (1 << 23) as f32 - 1.0).collect()
    }

    #[test]
    fn a_row_has_the_same_sums_in_every_tile_size() {
        for (inputs, columns) in [(1, PANEL), (7, 16), (8, PANEL), (17, 8), (40, PANEL)] {
            let (stride, rows) = (inputs + 3, MAX_TILE_ROWS);
            let numbers = noise(stride * rows);
            let lines: Vec<Line> = noise(inputs * PANEL).as_chunks().0.to_vec();
            for isa in Isa::available() {
                let sums = |first: usize, rows: usize| {
                    let mut sums = [[0.0; PANEL]; MAX_TILE_ROWS];
                    let numbers = &numbers[first * stride..][..(rows - 1) * stride + inputs];
                    let (ahead, rows_ahead) = (&lines[..], numbers);
                    let tile =
                        Tile { inputs: numbers, stride, rows, lines: &lines, columns, ahead, rows_ahead };
                    isa.run(WholeTile(tile, sums.as_flattened_mut()));
                    sums
                };
                for size in 1..=rows {
                    let together = sums(0, size);
                    for row in 0..size {
                        if together[row][..columns] == [0.0; PANEL][..columns] {
                            // Beyond the largest tile of this instruction set.
                            assert!(row >= 3, "{isa:?}: nothing in row {row} of {size}");
                            continue;
                        }
                        assert_eq!(
                            together[row][..columns],
                            sums(row, 1)[0][..columns],
                            "{isa:?}, {size} rows"
                        );
                        for column in 0..columns {
                            let products = lines.iter().zip(&numbers[row * stride..]);
                            let expected: f64 = products
                                .map(|(line, number)| f64::from(line[column]) * f64::from(*number))
                                .sum();
                            let error = (f64::from(together[row][column]) - expected).abs();
                            assert!(error < 1e-5, "{isa:?}, row {row} of {size}, column {column}");
                        }
                    }
                }
            }
        }
    }
}
