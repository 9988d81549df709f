//! Arithmetic, written once and compiled for each instruction set.
//!
//! A kernel is a value with a method that is generic over [`Simd`], the dozen operations that all instruction sets
//! share. [`Isa::run`] enters a function that the compiler may fill with the instructions in question and runs the
//! kernel there. So a formula exists once, the reference path of the tests is the same code with plain arrays for
//! vectors, and `unsafe` is limited to three short files: those that name instructions.
//!
//! Requirements of a kernel: everything between [`Kernel::run`] and the operations must be `#[inline(always)]`, and no
//! closure may contain an operation. A function that is not inlined would be compiled without the instructions:
//! correct, and slow.

mod attention;
mod byte_attention;
mod byte_isa;
#[cfg_attr(
    target_arch = "x86_64",
    expect(unsafe_code, reason = "names the instruction that reads the counter")
)]
mod counter;
mod dots;
mod heads;
mod math;
mod portable;
mod product;
mod quantize;
mod rows;
mod throughput;
mod tile;
#[cfg(target_arch = "x86_64")]
#[expect(unsafe_code, reason = "names AVX2 and FMA instructions")]
mod x86_avx2;
#[cfg(target_arch = "x86_64")]
#[expect(unsafe_code, reason = "names AVX-512 instructions")]
mod x86_avx512;
#[cfg(target_arch = "x86_64")]
#[expect(unsafe_code, reason = "names AVX-512 VNNI, AVX-VNNI and AVX2 instructions")]
mod x86_dots;

use std::fmt;

use super::panels::Line;
use tile::Tile;

pub(super) use attention::{Attention, AttentionScratch};
pub(super) use byte_attention::{ByteAttention, ByteAttentionScratch, MAX_KEYS};
pub(super) use counter::ticks;
pub(super) use heads::PrepareHeads;
pub(super) use product::{ByteProduct, Finish, Product};
pub(super) use quantize::{ByteRows, Quantize};
pub(super) use rows::{Norm, Normalize, NormalizeInto, PoolRows, Scale};
pub(super) use throughput::{MultiplyAdd, MultiplyBytes};

/// Instruction set that this processor supports. Only [`Isa::available`] returns values.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Isa(Set);

#[derive(Clone, Copy, PartialEq, Eq)]
enum Set {
    #[cfg(target_arch = "x86_64")]
    Avx512(x86_avx512::Avx512),
    #[cfg(target_arch = "x86_64")]
    Avx2(x86_avx2::Avx2),
    Portable(portable::Portable),
}

impl Isa {
    /// Returns the supported instruction sets, the fastest first. The last one is always the portable path.
    pub fn available() -> Vec<Isa> {
        let mut sets = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            sets.extend(x86_avx512::Avx512::detect().map(Set::Avx512));
            sets.extend(x86_avx2::Avx2::detect().map(Set::Avx2));
        }
        sets.push(Set::Portable(portable::Portable));
        sets.into_iter().map(Isa).collect()
    }

    /// Returns the fastest supported instruction set.
    pub fn best() -> Isa {
        Isa::available()[0]
    }

    /// Returns the name.
    pub fn name(self) -> &'static str {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Set::Avx512(_) => "avx512f",
            #[cfg(target_arch = "x86_64")]
            Set::Avx2(_) => "avx2+fma",
            Set::Portable(_) => "portable",
        }
    }

    /// Returns the number of lanes of one instruction.
    fn lanes(self) -> usize {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Set::Avx512(_) => x86_avx512::Avx512::LANES,
            #[cfg(target_arch = "x86_64")]
            Set::Avx2(_) => x86_avx2::Avx2::LANES,
            Set::Portable(_) => portable::Portable::LANES,
        }
    }

    fn is_portable(self) -> bool {
        matches!(self.0, Set::Portable(_))
    }

    /// Runs the kernel with these instructions.
    pub(super) fn run<K: Kernel>(self, kernel: K) -> K::Output {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Set::Avx512(simd) => simd.run(kernel),
            #[cfg(target_arch = "x86_64")]
            Set::Avx2(simd) => simd.run(kernel),
            Set::Portable(simd) => simd.run(kernel),
        }
    }
}

impl fmt::Debug for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Computation that is generic over the instruction set.
pub(super) trait Kernel {
    /// Result.
    type Output;

    /// Computes; implementations are `#[inline(always)]`.
    fn run<S: Simd>(self, simd: S) -> Self::Output;
}

/// Operations of an instruction set. A value of this type is the proof that the processor supports it.
pub(super) trait Simd: Copy {
    /// Vector of 32-bit floats of one instruction.
    type Vector: Copy;

    /// Number of lanes; a divisor of [`MAX_LANES`].
    const LANES: usize;

    /// Rows of the largest tile of a matrix product whose sums, [`TILE_VECTORS`] vectors per row, stay in registers.
    const TILE_ROWS: usize;

    /// Enters a function that is compiled with these instructions.
    fn run<K: Kernel>(self, kernel: K) -> K::Output;

    /// Prefetches these numbers to the second-level cache.
    #[inline(always)]
    fn prefetch(self, numbers: &[f32]) {
        let _ = numbers;
    }

    /// Prefetches these numbers to the first-level cache.
    #[inline(always)]
    fn prefetch_near(self, numbers: &[f32]) {
        let _ = numbers;
    }

    fn splat(self, value: f32) -> Self::Vector;
    /// Loads the first [`Simd::LANES`] numbers of a slice.
    fn load(self, from: &[f32]) -> Self::Vector;
    /// Stores into the first [`Simd::LANES`] numbers of a slice.
    fn store(self, vector: Self::Vector, to: &mut [f32]);
    /// Loads the first [`Simd::LANES`] integers of a slice.
    fn load_whole(self, from: &[i32]) -> Self::Vector;
    /// Rounds to the nearest integers from 0 to 255, and stores into the first [`Simd::LANES`] bytes of a slice.
    fn store_bytes(self, vector: Self::Vector, to: &mut [u8]);
    /// Stores the lowest byte of each lane's bits into the first [`Simd::LANES`] bytes of a slice.
    #[inline(always)]
    fn store_low_bytes(self, vector: Self::Vector, to: &mut [u8]) {
        let mut lanes = [0.0; MAX_LANES];
        self.store(vector, &mut lanes);
        for (byte, lane) in to[..Self::LANES].iter_mut().zip(lanes) {
            *byte = lane.to_bits() as u8;
        }
    }
    /// Rounds to the nearest integers, which are from −128 to 127, and stores them as signed bytes, the four of each
    /// lane side by side, into the first bytes of a slice.
    #[inline(always)]
    fn store_quads(self, four: [Self::Vector; 4], to: &mut [u8]) {
        for (place, vector) in four.into_iter().enumerate() {
            let mut lanes = [0.0; MAX_LANES];
            self.store(vector, &mut lanes);
            for (four, lane) in to[..4 * Self::LANES].chunks_exact_mut(4).zip(lanes) {
                four[place] = (lane.round_ties_even() as i8).cast_unsigned();
            }
        }
    }
    fn add(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    fn sub(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    fn mul(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    fn div(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// Returns `a/b` within 2 units in the last place, for `|b|` from 10⁻³⁰ to 10³⁷. Faster where a division takes
    /// longer than a dozen multiplications.
    #[inline(always)]
    fn quotient(self, a: Self::Vector, b: Self::Vector) -> Self::Vector {
        self.div(a, b)
    }
    fn min(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    fn max(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// `a·b + c`
    fn mul_add(self, a: Self::Vector, b: Self::Vector, c: Self::Vector) -> Self::Vector;
    /// Writes sixteen numbers of each of sixteen rows into sixteen lines, as columns from this lane on.
    #[inline(always)]
    fn transpose(self, rows: &[&[f32]; SQUARE], lines: &mut [Line], lane: usize) {
        for (index, row) in rows.iter().enumerate() {
            for (line, value) in lines.iter_mut().zip(&row[..SQUARE]) {
                line[lane + index] = *value;
            }
        }
    }

    /// Computes the sums of `ROWS` rows of a tile, `VECTORS` vectors from this column on, into rows of `stride`
    /// numbers.
    #[inline(always)]
    fn tile<const ROWS: usize, const VECTORS: usize>(
        self,
        tile: &Tile<'_>,
        column: usize,
        sums: &mut [f32],
        stride: usize,
    ) {
        tile::plain::<Self, ROWS, VECTORS>(self, tile, column, sums, stride);
    }

    /// Rounds to the nearest integer.
    fn round(self, a: Self::Vector) -> Self::Vector;
    /// Returns `a·2ⁿ` for integers `n` between −126 and 127.
    fn scale(self, a: Self::Vector, n: Self::Vector) -> Self::Vector;
    /// Returns the sum of all lanes, in an order that depends only on [`Simd::LANES`].
    fn sum(self, a: Self::Vector) -> f32;
    /// Returns the largest lane.
    fn largest(self, a: Self::Vector) -> f32;
}

/// Lanes of the widest vector.
pub(super) const MAX_LANES: usize = 16;

/// Rows and columns of one transposition.
pub(super) const SQUARE: usize = 16;

/// Vectors of one row in a tile of a matrix product.
pub(super) const TILE_VECTORS: usize = 2;

/// Loads a slice of at most one vector; the remaining lanes are `fill`.
#[inline(always)]
fn load_up_to<S: Simd>(simd: S, from: &[f32], fill: f32) -> S::Vector {
    if from.len() == S::LANES {
        return simd.load(from);
    }
    let mut lanes = [fill; MAX_LANES];
    lanes[..from.len()].copy_from_slice(from);
    simd.load(&lanes)
}

/// Stores into a slice of at most one vector; the remaining lanes are dropped.
#[inline(always)]
fn store_up_to<S: Simd>(simd: S, vector: S::Vector, to: &mut [f32]) {
    if to.len() == S::LANES {
        return simd.store(vector, to);
    }
    let mut lanes = [0.0; MAX_LANES];
    simd.store(vector, &mut lanes);
    to.copy_from_slice(&lanes[..to.len()]);
}
