//! Int8 products: `Σ input·weight` over unsigned inputs and signed weights, in integers.
//!
//! Four adjacent inputs of a row form one 32-bit word, and a lane of a vector of weights contains the weights of those
//! four inputs for one output. `vpdpbusd` multiplies the four pairs and adds all of them to the lane's sum. Processors
//! without it need several instructions; integer arithmetic has no rounding, so all paths return the same sums.
//!
//! (`vpmaddubsw`, the usual substitute, is not equivalent: it saturates at 16 bits, which two pairs can exceed.)
//!
//! The tile is that of [`super::tile`], with the word instead of the float.

use super::Isa;
use super::tile::{STEP, share_of_step};
#[cfg(target_arch = "x86_64")]
use super::x86_dots::{Avx2Dots, Avx512Dots};
use crate::engine::cpu::byte_panels::{ByteLine, GROUP};
use crate::engine::cpu::panels::PANEL;

/// Rows of the largest tile of any instruction set.
pub(super) const MAX_DOT_ROWS: usize = 14;

/// Vectors of one row in a tile.
const TILE_VECTORS: usize = 2;

/// Integer sums of a tile.
#[derive(Default)]
#[repr(align(64))]
pub(super) struct WholeSums(pub(super) [[i32; PANEL]; MAX_DOT_ROWS]);

/// Instruction set for byte products. A value of this type is the proof that the processor supports it.
#[derive(Clone, Copy, Debug)]
pub(super) enum Dots {
    #[cfg(target_arch = "x86_64")]
    Avx512(Avx512Dots),
    #[cfg(target_arch = "x86_64")]
    AvxVnni(Avx2Dots<true>),
    #[cfg(target_arch = "x86_64")]
    Avx2(Avx2Dots<false>),
    Portable,
}

/// Some rows of bytes, to be multiplied with one panel.
pub(super) struct ByteTile<'a> {
    /// All rows, `stride` bytes apart.
    pub(super) bytes: &'a [u8],
    pub(super) stride: usize,
    /// Offset of the first row.
    pub(super) start: usize,
    /// Number of rows; at most [`Dots::tile_rows`].
    pub(super) rows: usize,
    pub(super) panel: &'a [ByteLine],
    /// Lines to prefetch.
    pub(super) ahead: &'a [ByteLine],
}

impl Dots {
    /// Returns the byte instructions that accompany an instruction set for floats.
    pub(super) fn of(isa: Isa) -> Dots {
        let best = |widest: usize| {
            let fits = |dots: &Dots| dots.lanes() <= widest;
            Dots::available().into_iter().find(fits).unwrap_or(Dots::Portable)
        };
        match isa.lanes() {
            _ if isa.is_portable() => Dots::Portable,
            lanes => best(lanes),
        }
    }

    /// Returns the supported instruction sets, the fastest first.
    pub(super) fn available() -> Vec<Dots> {
        let mut all = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            all.extend(Avx512Dots::detect().map(Dots::Avx512));
            all.extend(Avx2Dots::<true>::detect().map(Dots::AvxVnni));
            all.extend(Avx2Dots::<false>::detect().map(Dots::Avx2));
        }
        all.push(Dots::Portable);
        all
    }

    fn lanes(&self) -> usize {
        match self {
            #[cfg(target_arch = "x86_64")]
            Dots::Avx512(_) => Avx512Dots::LANES,
            #[cfg(target_arch = "x86_64")]
            Dots::AvxVnni(_) => Avx2Dots::<true>::LANES,
            #[cfg(target_arch = "x86_64")]
            Dots::Avx2(_) => Avx2Dots::<false>::LANES,
            Dots::Portable => PortableDots::LANES,
        }
    }

    /// Returns the rows of the largest tile.
    #[inline(always)]
    pub(super) fn tile_rows(self) -> usize {
        match self {
            #[cfg(target_arch = "x86_64")]
            Dots::Avx512(_) => Avx512Dots::TILE_ROWS,
            #[cfg(target_arch = "x86_64")]
            Dots::AvxVnni(_) => Avx2Dots::<true>::TILE_ROWS,
            #[cfg(target_arch = "x86_64")]
            Dots::Avx2(_) => Avx2Dots::<false>::TILE_ROWS,
            Dots::Portable => PortableDots::TILE_ROWS,
        }
    }

    /// Runs the computation with these instructions.
    pub(super) fn run<K: DotKernel>(self, kernel: K) -> K::Output {
        match self {
            #[cfg(target_arch = "x86_64")]
            Dots::Avx512(dot) => dot.run(kernel),
            #[cfg(target_arch = "x86_64")]
            Dots::AvxVnni(dot) => dot.run(kernel),
            #[cfg(target_arch = "x86_64")]
            Dots::Avx2(dot) => dot.run(kernel),
            Dots::Portable => PortableDots.run(kernel),
        }
    }

    /// Computes the sums of the tile's rows.
    #[inline(always)]
    pub(super) fn sum(self, tile: &ByteTile<'_>, sums: &mut WholeSums) {
        match self {
            #[cfg(target_arch = "x86_64")]
            Dots::Avx512(dot) => tile.sum(dot, sums),
            #[cfg(target_arch = "x86_64")]
            Dots::AvxVnni(dot) => tile.sum(dot, sums),
            #[cfg(target_arch = "x86_64")]
            Dots::Avx2(dot) => tile.sum(dot, sums),
            Dots::Portable => tile.sum(PortableDots, sums),
        }
    }
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
    fn sum<D: Dot>(&self, dot: D, sums: &mut WholeSums) {
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
struct PortableDots;

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

#[cfg(test)]
mod tests {
    use super::*;

    /// Pseudorandom numbers.
    fn noise(seed: u32) -> impl FnMut() -> u8 {
        let mut state = seed;
        move || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 24) as u8
        }
    }

    #[test]
    fn all_paths_return_the_same_integers_for_every_tile_size() {
        for groups in [1, 7, 8, 9, 24] {
            let mut random = noise(groups as u32);
            let stride = groups * GROUP;
            let bytes: Vec<u8> = (0..stride * MAX_DOT_ROWS).map(|_| random()).collect();
            let panel: Vec<ByteLine> = (0..groups).map(|_| std::array::from_fn(|_| random())).collect();
            for dots in Dots::available() {
                for rows in 1..=dots.tile_rows() {
                    let mut sums = WholeSums::default();
                    dots.sum(
                        &ByteTile { bytes: &bytes, stride, start: 0, rows, panel: &panel, ahead: &[] },
                        &mut sums,
                    );
                    for (row, sums) in sums.0[..rows].iter().enumerate() {
                        for (column, sum) in sums.iter().enumerate() {
                            let expected: i32 = (0..stride)
                                .map(|input| {
                                    let weight =
                                        panel[input / GROUP][GROUP * column + input % GROUP].cast_signed();
                                    i32::from(bytes[row * stride + input]) * i32::from(weight)
                                })
                                .sum();
                            assert_eq!(
                                *sum, expected,
                                "{dots:?}, {groups} groups, row {row} of {rows}, column {column}"
                            );
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn the_largest_products_do_not_saturate() {
        let (bytes, panel) = ([255; 64], [[(-127_i8).cast_unsigned(); 128]; 16]);
        for dots in Dots::available() {
            let mut sums = WholeSums::default();
            dots.sum(
                &ByteTile { bytes: &bytes, stride: 64, start: 0, rows: 1, panel: &panel, ahead: &[] },
                &mut sums,
            );
            assert_eq!(sums.0[0], [-127 * 255 * 64; PANEL], "{dots:?}");
        }
    }
}
