//! AVX2 with FMA: vectors of eight, sixteen registers.

use std::arch::x86_64::*;

use super::{Kernel, Simd};

/// Proof that this processor has AVX2 and FMA: only [`Avx2::detect`] returns one.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Avx2(());

impl Avx2 {
    pub(super) fn detect() -> Option<Avx2> {
        (is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")).then_some(Avx2(()))
    }
}

/// Defines methods that are one instruction.
macro_rules! instructions {
    ($($name:ident($($argument:ident),*) = $instruction:ident;)*) => {$(
        #[inline(always)]
        fn $name(self, $($argument: __m256),*) -> __m256 {
            // SAFETY: `self` exists, so the processor has AVX2 and FMA; the instruction touches registers only.
            unsafe { $instruction($($argument),*) }
        }
    )*};
}

impl Simd for Avx2 {
    type Vector = __m256;
    const LANES: usize = 8;
    /// 6 · 2 sums, 2 weights and 1 broadcast are 15 of 16 registers.
    const TILE_ROWS: usize = 6;

    #[inline]
    fn run<K: Kernel>(self, kernel: K) -> K::Output {
        #[inline(never)]
        #[target_feature(enable = "avx2,fma")]
        fn enter<K: Kernel>(simd: Avx2, kernel: K) -> K::Output {
            kernel.run(simd)
        }
        // SAFETY: `self` exists, so the processor has AVX2 and FMA.
        unsafe { enter(self, kernel) }
    }

    instructions! {
        add(a, b) = _mm256_add_ps;
        sub(a, b) = _mm256_sub_ps;
        mul(a, b) = _mm256_mul_ps;
        div(a, b) = _mm256_div_ps;
        min(a, b) = _mm256_min_ps;
        max(a, b) = _mm256_max_ps;
        mul_add(a, b, c) = _mm256_fmadd_ps;
    }

    #[inline(always)]
    fn prefetch(self, numbers: &[f32]) {
        for line in numbers.chunks(16) {
            // SAFETY: a prefetch is a hint that accepts any address; all x86-64 processors have it.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(line.as_ptr().cast()) }
        }
    }

    #[inline(always)]
    fn prefetch_near(self, numbers: &[f32]) {
        for line in numbers.chunks(16) {
            // SAFETY: a prefetch is a hint that accepts any address; all x86-64 processors have it.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().cast()) }
        }
    }

    #[inline(always)]
    fn splat(self, value: f32) -> __m256 {
        // SAFETY: `self` exists, so the processor has AVX.
        unsafe { _mm256_set1_ps(value) }
    }

    #[inline(always)]
    fn load(self, from: &[f32]) -> __m256 {
        let from: &[f32; 8] = from.first_chunk().expect("a kernel loads whole vectors");
        // SAFETY: `self` exists, so the processor has AVX; eight floats are behind the pointer, aligned or not.
        unsafe { _mm256_loadu_ps(from.as_ptr()) }
    }

    #[inline(always)]
    fn store(self, vector: __m256, to: &mut [f32]) {
        let to: &mut [f32; 8] = to.first_chunk_mut().expect("a kernel stores whole vectors");
        // SAFETY: `self` exists, so the processor has AVX; eight floats are behind the pointer, aligned or not.
        unsafe { _mm256_storeu_ps(to.as_mut_ptr(), vector) }
    }

    #[inline(always)]
    fn load_whole(self, from: &[i32]) -> __m256 {
        let from: &[i32; 8] = from.first_chunk().expect("a kernel loads whole vectors");
        // SAFETY: `self` exists, so the processor has AVX; eight integers are behind the pointer, aligned or not.
        unsafe { _mm256_cvtepi32_ps(_mm256_loadu_si256(from.as_ptr().cast())) }
    }

    #[inline(always)]
    fn store_bytes(self, vector: __m256, to: &mut [u8]) {
        let to: &mut [u8; 8] = to.first_chunk_mut().expect("a kernel stores whole vectors");
        // SAFETY: `self` exists, so the processor has AVX2; eight bytes are behind the pointer, aligned or not.
        unsafe {
            let whole = _mm256_cvtps_epi32(vector);
            let pairs = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256::<1>(whole));
            _mm_storel_epi64(to.as_mut_ptr().cast(), _mm_packus_epi16(pairs, pairs));
        }
    }

    #[inline(always)]
    fn store_quads(self, [a, b, c, d]: [__m256; 4], to: &mut [u8]) {
        let to: &mut [u8; 32] = to.first_chunk_mut().expect("a kernel stores whole vectors");
        // SAFETY: `self` exists, so the processor has AVX2; 32 bytes are behind the pointer, aligned or not.
        unsafe {
            let byte = _mm256_set1_epi32(0xff);
            let a = _mm256_and_si256(_mm256_cvtps_epi32(a), byte);
            let b = _mm256_slli_epi32::<8>(_mm256_and_si256(_mm256_cvtps_epi32(b), byte));
            let c = _mm256_slli_epi32::<16>(_mm256_and_si256(_mm256_cvtps_epi32(c), byte));
            let d = _mm256_slli_epi32::<24>(_mm256_cvtps_epi32(d));
            let all = _mm256_or_si256(_mm256_or_si256(a, b), _mm256_or_si256(c, d));
            _mm256_storeu_si256(to.as_mut_ptr().cast(), all);
        }
    }

    #[inline(always)]
    fn round(self, a: __m256) -> __m256 {
        // SAFETY: `self` exists, so the processor has AVX.
        unsafe { _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a) }
    }

    #[inline(always)]
    fn scale(self, a: __m256, n: __m256) -> __m256 {
        // SAFETY: `self` exists, so the processor has AVX2. The exponent of 2ⁿ, biased by 127, begins at bit 23.
        unsafe {
            let biased = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
            _mm256_mul_ps(a, _mm256_castsi256_ps(_mm256_slli_epi32::<23>(biased)))
        }
    }

    #[inline(always)]
    fn sum(self, a: __m256) -> f32 {
        let mut lanes = [0.0; 8];
        self.store(a, &mut lanes);
        let [a, b, c, d, e, f, g, h] = lanes;
        ((a + e) + (c + g)) + ((b + f) + (d + h))
    }

    #[inline(always)]
    fn largest(self, a: __m256) -> f32 {
        let mut lanes = [0.0; 8];
        self.store(a, &mut lanes);
        lanes.into_iter().fold(f32::NEG_INFINITY, f32::max)
    }
}
