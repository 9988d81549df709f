//! Int8 products: `Σ input·weight` over unsigned inputs and signed weights, in integers.
//!
//! Four adjacent inputs of a row form one 32-bit word, and a lane of a vector of weights contains the weights of those
//! four inputs for one output. `vpdpbusd` multiplies the four pairs and adds all of them to the lane's sum. Processors
//! without it need several instructions; integer arithmetic has no rounding, so all paths return the same sums.
//!
//! (`vpmaddubsw`, the usual substitute, is not equivalent: it saturates at 16 bits, which two pairs can exceed.)
//!
//! The tile is that of [`super::tile`], with the word instead of the float.

use super::tile::{STEP, share_of_step};
use crate::engine::cpu::byte_panels::{ByteLine, GROUP};
use crate::engine::cpu::panels::PANEL;

/// Rows of the largest tile of any instruction set.
pub(super) const MAX_DOT_ROWS: usize = 14;

/// Vectors of one row in a tile of integer sums; that of float products depends on other registers.
const TILE_VECTORS: usize = 2;

/// Integer sums of a tile.
#[derive(Default)]
#[repr(align(64))]
pub(super) struct WholeSums(pub(super) [[i32; PANEL]; MAX_DOT_ROWS]);

/// Some rows of bytes, to be multiplied with one panel.
pub(super) struct ByteTile<'a> {
    /// All rows, `stride` bytes apart.
    pub(super) bytes: &'a [u8],
    pub(super) stride: usize,
    /// Offset of the first row.
    pub(super) start: usize,
    /// Number of rows; at most [`Dot::TILE_ROWS`].
    pub(super) rows: usize,
    pub(super) panel: &'a [ByteLine],
    /// Lines to prefetch.
    pub(super) ahead: &'a [ByteLine],
}

/// Computation with bytes that is generic over the instruction set.
pub(super) trait DotKernel {
    /// Result.
    type Output;

    /// Computes; implementations are `#[inline(always)]`.
    fn run<D: Dot>(self, dot: D) -> Self::Output;
}

/// Operations on bytes of an instruction set.
pub(super) trait Dot: Copy {
    /// Vector of 32-bit sums of one instruction.
    type Sums: Copy;

    /// Number of lanes.
    const LANES: usize;

    /// Rows of the largest tile.
    const TILE_ROWS: usize;

    /// Enters a function that is compiled with these instructions.
    fn run<K: DotKernel>(self, kernel: K) -> K::Output;

    /// Prefetches these weights.
    #[inline(always)]
    fn prefetch(self, line: &ByteLine) {
        let _ = line;
    }

    fn zero(self) -> Self::Sums;

    /// Adds to each lane the products of the four inputs with its four weights, which are the first bytes of the slice.
    fn add(self, sums: Self::Sums, inputs: [u8; GROUP], weights: &[u8]) -> Self::Sums;

    /// Stores into the first lanes of a slice.
    fn store(self, sums: Self::Sums, to: &mut [i32]);

    /// Computes the sums of the tile's `ROWS` rows.
    #[inline(always)]
    fn tile<const ROWS: usize>(self, tile: &ByteTile<'_>, sums: &mut WholeSums) {
        let mut rows: [&[[u8; GROUP]]; ROWS] = [&[]; ROWS];
        for (index, row) in rows.iter_mut().enumerate() {
            let bytes = &tile.bytes[(tile.start + index) * tile.stride..][..tile.stride];
            *row = &bytes.as_chunks().0[..tile.panel.len()];
        }
        let each = share_of_step(tile.ahead.len(), tile.panel.len());
        let mut column = 0;
        while column < PANEL {
            let mut totals = [[self.zero(); TILE_VECTORS]; ROWS];
            let mut ahead = tile.ahead.chunks(each);
            for (block, lines) in tile.panel.chunks(STEP).enumerate() {
                for line in ahead.next().unwrap_or_default() {
                    self.prefetch(line);
                }
                let mut inputs: [&[[u8; GROUP]]; ROWS] = [&[]; ROWS];
                for (inputs, row) in inputs.iter_mut().zip(rows) {
                    *inputs = &row[block * STEP..][..lines.len()];
                }
                for (index, line) in lines.iter().enumerate() {
                    let left = &line[GROUP * column..];
                    let right = &line[GROUP * (column + Self::LANES)..];
                    for (totals, inputs) in totals.iter_mut().zip(&inputs) {
                        totals[0] = self.add(totals[0], inputs[index], left);
                        totals[1] = self.add(totals[1], inputs[index], right);
                    }
                }
            }
            for (totals, sums) in totals.iter().zip(&mut sums.0) {
                self.store(totals[0], &mut sums[column..]);
                self.store(totals[1], &mut sums[column + Self::LANES..]);
            }
            column += TILE_VECTORS * Self::LANES;
        }
    }
}

impl ByteTile<'_> {
    #[inline(always)]
    pub(super) fn sum<D: Dot>(&self, dot: D, sums: &mut WholeSums) {
        match self.rows {
            1 => dot.run(RowsLoop::<1> { tile: self, sums }),
            2 => dot.run(RowsLoop::<2> { tile: self, sums }),
            3 => dot.run(RowsLoop::<3> { tile: self, sums }),
            4 if D::TILE_ROWS >= 4 => dot.run(RowsLoop::<4> { tile: self, sums }),
            5 if D::TILE_ROWS >= 5 => dot.run(RowsLoop::<5> { tile: self, sums }),
            6 if D::TILE_ROWS >= 6 => dot.run(RowsLoop::<6> { tile: self, sums }),
            7 if D::TILE_ROWS >= 7 => dot.run(RowsLoop::<7> { tile: self, sums }),
            8 if D::TILE_ROWS >= 8 => dot.run(RowsLoop::<8> { tile: self, sums }),
            9 if D::TILE_ROWS >= 9 => dot.run(RowsLoop::<9> { tile: self, sums }),
            10 if D::TILE_ROWS >= 10 => dot.run(RowsLoop::<10> { tile: self, sums }),
            11 if D::TILE_ROWS >= 11 => dot.run(RowsLoop::<11> { tile: self, sums }),
            12 if D::TILE_ROWS >= 12 => dot.run(RowsLoop::<12> { tile: self, sums }),
            13 if D::TILE_ROWS >= 13 => dot.run(RowsLoop::<13> { tile: self, sums }),
            14 if D::TILE_ROWS >= 14 => dot.run(RowsLoop::<14> { tile: self, sums }),
            rows => unreachable!("a tile of {rows} rows, of at most {}", D::TILE_ROWS),
        }
    }
}

/// Innermost loop: a separate function for each number of rows.
struct RowsLoop<'a, 't, const ROWS: usize> {
    tile: &'a ByteTile<'t>,
    sums: &'a mut WholeSums,
}

impl<const ROWS: usize> DotKernel for RowsLoop<'_, '_, ROWS> {
    type Output = ();

    #[inline(always)]
    fn run<D: Dot>(self, dot: D) {
        dot.tile::<ROWS>(self.tile, self.sums);
    }
}

/// Implementation with plain arrays.
#[derive(Clone, Copy)]
pub(super) struct PortableDots;

impl Dot for PortableDots {
    type Sums = [i32; 8];
    const LANES: usize = 8;
    const TILE_ROWS: usize = 3;

    fn run<K: DotKernel>(self, kernel: K) -> K::Output {
        kernel.run(self)
    }

    #[inline(always)]
    fn zero(self) -> [i32; 8] {
        [0; 8]
    }

    #[inline(always)]
    fn add(self, sums: [i32; 8], inputs: [u8; GROUP], weights: &[u8]) -> [i32; 8] {
        std::array::from_fn(|lane| {
            let products = |index: usize| {
                i32::from(inputs[index]) * i32::from(weights[GROUP * lane + index].cast_signed())
            };
            sums[lane] + (products(0) + products(1)) + (products(2) + products(3))
        })
    }

    #[inline(always)]
    fn store(self, sums: [i32; 8], to: &mut [i32]) {
        *to.first_chunk_mut().expect("a tile stores whole vectors") = sums;
    }
}
