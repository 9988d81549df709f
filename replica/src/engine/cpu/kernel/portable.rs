//! Plain arrays instead of vectors: for every processor, and as the reference of the others.
//!
//! The compiler turns the loops into the baseline vector instructions of the target (SSE2, NEON). `a·b + c` is rounded
//! twice, since without an instruction for it the single rounding would be a library call.

use super::{Kernel, Simd};

const LANES: usize = 8;

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Portable;

#[inline(always)]
fn lanewise(a: [f32; LANES], b: [f32; LANES], operation: impl Fn(f32, f32) -> f32) -> [f32; LANES] {
    std::array::from_fn(|lane| operation(a[lane], b[lane]))
}

impl Simd for Portable {
    type Vector = [f32; LANES];
    const LANES: usize = LANES;
    const TILE_ROWS: usize = 3;

    fn run<K: Kernel>(self, kernel: K) -> K::Output {
        kernel.run(self)
    }

    #[inline(always)]
    fn splat(self, value: f32) -> Self::Vector {
        [value; LANES]
    }

    #[inline(always)]
    fn load(self, from: &[f32]) -> Self::Vector {
        *from.first_chunk().expect("a kernel loads whole vectors")
    }

    #[inline(always)]
    fn store(self, vector: Self::Vector, to: &mut [f32]) {
        *to.first_chunk_mut().expect("a kernel stores whole vectors") = vector;
    }

    #[inline(always)]
    fn load_whole(self, from: &[i32]) -> Self::Vector {
        let from: &[i32; LANES] = from.first_chunk().expect("a kernel loads whole vectors");
        from.map(|whole| whole as f32)
    }

    #[inline(always)]
    fn store_bytes(self, vector: Self::Vector, to: &mut [u8]) {
        let to: &mut [u8; LANES] = to.first_chunk_mut().expect("a kernel stores whole vectors");
        *to = vector.map(|value| value.round_ties_even() as u8);
    }

    #[inline(always)]
    fn add(self, a: Self::Vector, b: Self::Vector) -> Self::Vector {
        lanewise(a, b, |a, b| a + b)
    }

    #[inline(always)]
    fn sub(self, a: Self::Vector, b: Self::Vector) -> Self::Vector {
        lanewise(a, b, |a, b| a - b)
    }

    #[inline(always)]
    fn mul(self, a: Self::Vector, b: Self::Vector) -> Self::Vector {
        lanewise(a, b, |a, b| a * b)
    }

    #[inline(always)]
    fn div(self, a: Self::Vector, b: Self::Vector) -> Self::Vector {
        lanewise(a, b, |a, b| a / b)
    }

    #[inline(always)]
    fn min(self, a: Self::Vector, b: Self::Vector) -> Self::Vector {
        lanewise(a, b, f32::min)
    }

    #[inline(always)]
    fn max(self, a: Self::Vector, b: Self::Vector) -> Self::Vector {
        lanewise(a, b, f32::max)
    }

    #[inline(always)]
    fn mul_add(self, a: Self::Vector, b: Self::Vector, c: Self::Vector) -> Self::Vector {
        self.add(self.mul(a, b), c)
    }

    #[inline(always)]
    fn round(self, a: Self::Vector) -> Self::Vector {
        a.map(f32::round_ties_even)
    }

    #[inline(always)]
    fn scale(self, a: Self::Vector, n: Self::Vector) -> Self::Vector {
        lanewise(a, n, |a, n| a * f32::from_bits(((n as i32 + 127) as u32) << 23))
    }

    #[inline(always)]
    fn sum(self, a: Self::Vector) -> f32 {
        let half: [f32; 4] = std::array::from_fn(|lane| a[lane] + a[lane + 4]);
        (half[0] + half[2]) + (half[1] + half[3])
    }

    #[inline(always)]
    fn largest(self, a: Self::Vector) -> f32 {
        a.into_iter().fold(f32::NEG_INFINITY, f32::max)
    }
}
