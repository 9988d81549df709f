//! AVX-512: vectors of sixteen, thirty-two registers.

use std::arch::x86_64::*;

use super::tile::{STEP, Tile};
use super::{Kernel, SQUARE, Simd};
use crate::engine::cpu::panels::{Line, PANEL};

/// Proof that this processor has AVX-512F: only [`Avx512::detect`] returns one.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Avx512(());

impl Avx512 {
    pub(super) fn detect() -> Option<Avx512> {
        is_x86_feature_detected!("avx512f").then_some(Avx512(()))
    }
}

/// Defines methods that are one instruction.
macro_rules! instructions {
    ($($name:ident($($argument:ident),*) -> $result:ty = $instruction:ident;)*) => {$(
        #[inline(always)]
        fn $name(self, $($argument: __m512),*) -> $result {
            // SAFETY: `self` exists, so the processor has AVX-512F; the instruction touches registers only.
            unsafe { $instruction($($argument),*) }
        }
    )*};
}

impl Simd for Avx512 {
    type Vector = __m512;
    const LANES: usize = 16;
    /// 14 · 2 sums, 2 weights and 1 broadcast are 31 of 32 registers.
    const TILE_ROWS: usize = 14;

    #[inline]
    fn run<K: Kernel>(self, kernel: K) -> K::Output {
        #[inline(never)]
        #[target_feature(enable = "avx512f")]
        fn enter<K: Kernel>(simd: Avx512, kernel: K) -> K::Output {
            kernel.run(simd)
        }
        // SAFETY: `self` exists, so the processor has AVX-512F.
        unsafe { enter(self, kernel) }
    }

    instructions! {
        add(a, b) -> __m512 = _mm512_add_ps;
        sub(a, b) -> __m512 = _mm512_sub_ps;
        mul(a, b) -> __m512 = _mm512_mul_ps;
        div(a, b) -> __m512 = _mm512_div_ps;
        min(a, b) -> __m512 = _mm512_min_ps;
        max(a, b) -> __m512 = _mm512_max_ps;
        mul_add(a, b, c) -> __m512 = _mm512_fmadd_ps;
        scale(a, n) -> __m512 = _mm512_scalef_ps;
        sum(a) -> f32 = _mm512_reduce_add_ps;
        largest(a) -> f32 = _mm512_reduce_max_ps;
    }

    /// A reciprocal of 14 bits, which one Newton step improves to 28: 6 instructions, where `vdivps` alone occupies its
    /// unit for 16 cycles.
    #[inline(always)]
    fn quotient(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: `self` exists, so the processor has AVX-512F; the instructions touch registers only.
        unsafe {
            let near = _mm512_rcp14_ps(b);
            let reciprocal = _mm512_mul_ps(near, _mm512_fnmadd_ps(b, near, _mm512_set1_ps(2.0)));
            _mm512_mul_ps(a, reciprocal)
        }
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
    fn splat(self, value: f32) -> __m512 {
        // SAFETY: `self` exists, so the processor has AVX-512F.
        unsafe { _mm512_set1_ps(value) }
    }

    #[inline(always)]
    fn load(self, from: &[f32]) -> __m512 {
        let from: &[f32; 16] = from.first_chunk().expect("a kernel loads whole vectors");
        // SAFETY: `self` exists, so the processor has AVX-512F; sixteen floats are behind the pointer, aligned or not.
        unsafe { _mm512_loadu_ps(from.as_ptr()) }
    }

    #[inline(always)]
    fn store(self, vector: __m512, to: &mut [f32]) {
        let to: &mut [f32; 16] = to.first_chunk_mut().expect("a kernel stores whole vectors");
        // SAFETY: `self` exists, so the processor has AVX-512F; sixteen floats are behind the pointer, aligned or not.
        unsafe { _mm512_storeu_ps(to.as_mut_ptr(), vector) }
    }

    /// Four rounds, in which neighbours at distance one, two, four and eight exchange half of their numbers.
    #[inline(always)]
    fn transpose(self, rows: &[&[f32]; SQUARE], lines: &mut [Line], lane: usize) {
        let mut square = [self.splat(0.0); SQUARE];
        for (vector, row) in square.iter_mut().zip(rows) {
            *vector = self.load(row);
        }
        // SAFETY: `self` exists, so the processor has AVX-512F; the instructions touch registers only.
        unsafe {
            for four in square.as_chunks_mut::<4>().0 {
                let [a, b, c, d] = *four;
                let (ab, cd) = (_mm512_unpacklo_ps(a, b), _mm512_unpacklo_ps(c, d));
                let (left, right) = (_mm512_castps_pd(ab), _mm512_castps_pd(cd));
                four[0] = _mm512_castpd_ps(_mm512_unpacklo_pd(left, right));
                four[1] = _mm512_castpd_ps(_mm512_unpackhi_pd(left, right));
                let (ab, cd) = (_mm512_unpackhi_ps(a, b), _mm512_unpackhi_ps(c, d));
                let (left, right) = (_mm512_castps_pd(ab), _mm512_castps_pd(cd));
                four[2] = _mm512_castpd_ps(_mm512_unpacklo_pd(left, right));
                four[3] = _mm512_castpd_ps(_mm512_unpackhi_pd(left, right));
            }
            // Each vector now has four columns, of four rows each.
            for column in 0..4 {
                let (a, b) = (square[column], square[column + 4]);
                let (c, d) = (square[column + 8], square[column + 12]);
                let (ab_even, ab_odd) =
                    (_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0xdd>(a, b));
                let (cd_even, cd_odd) =
                    (_mm512_shuffle_f32x4::<0x88>(c, d), _mm512_shuffle_f32x4::<0xdd>(c, d));
                square[column] = _mm512_shuffle_f32x4::<0x88>(ab_even, cd_even);
                square[column + 8] = _mm512_shuffle_f32x4::<0xdd>(ab_even, cd_even);
                square[column + 4] = _mm512_shuffle_f32x4::<0x88>(ab_odd, cd_odd);
                square[column + 12] = _mm512_shuffle_f32x4::<0xdd>(ab_odd, cd_odd);
            }
        }
        for (line, column) in lines.iter_mut().zip(square) {
            self.store(column, &mut line[lane..]);
        }
    }

    #[inline(always)]
    fn load_whole(self, from: &[i32]) -> __m512 {
        let from: &[i32; 16] = from.first_chunk().expect("a kernel loads whole vectors");
        // SAFETY: `self` exists, so the processor has AVX-512F; sixteen integers are behind the pointer, aligned or not.
        unsafe { _mm512_cvtepi32_ps(_mm512_loadu_si512(from.as_ptr().cast())) }
    }

    #[inline(always)]
    fn store_bytes(self, vector: __m512, to: &mut [u8]) {
        let to: &mut [u8; 16] = to.first_chunk_mut().expect("a kernel stores whole vectors");
        // SAFETY: `self` exists, so the processor has AVX-512F; sixteen bytes are behind the pointer, aligned or not.
        unsafe {
            let whole = _mm512_max_epi32(_mm512_cvtps_epi32(vector), _mm512_setzero_si512());
            _mm_storeu_si128(to.as_mut_ptr().cast(), _mm512_cvtusepi32_epi8(whole));
        }
    }

    #[inline(always)]
    fn store_low_bytes(self, vector: __m512, to: &mut [u8]) {
        let to: &mut [u8; 16] = to.first_chunk_mut().expect("a kernel stores whole vectors");
        // SAFETY: `self` exists, so the processor has AVX-512F; sixteen bytes are behind the pointer, aligned or not.
        unsafe { _mm_storeu_si128(to.as_mut_ptr().cast(), _mm512_cvtepi32_epi8(_mm512_castps_si512(vector))) }
    }

    #[inline(always)]
    fn store_quads(self, [a, b, c, d]: [__m512; 4], to: &mut [u8]) {
        let to: &mut [u8; 64] = to.first_chunk_mut().expect("a kernel stores whole vectors");
        // SAFETY: `self` exists, so the processor has AVX-512F; 64 bytes are behind the pointer, aligned or not.
        unsafe {
            let byte = _mm512_set1_epi32(0xff);
            let a = _mm512_and_si512(_mm512_cvtps_epi32(a), byte);
            let b = _mm512_slli_epi32::<8>(_mm512_and_si512(_mm512_cvtps_epi32(b), byte));
            let c = _mm512_slli_epi32::<16>(_mm512_and_si512(_mm512_cvtps_epi32(c), byte));
            let d = _mm512_slli_epi32::<24>(_mm512_cvtps_epi32(d));
            let all = _mm512_or_si512(_mm512_or_si512(a, b), _mm512_or_si512(c, d));
            _mm512_storeu_si512(to.as_mut_ptr().cast(), all);
        }
    }

    #[inline(always)]
    fn round(self, a: __m512) -> __m512 {
        // SAFETY: `self` exists, so the processor has AVX-512F.
        unsafe { _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a) }
    }

    /// Uses one pointer and the row stride. A slice for each row would fill the integer registers, and checking their
    /// lengths every few lines took a fifth of the time.
    #[inline(always)]
    fn tile<const ROWS: usize, const VECTORS: usize>(
        self,
        tile: &Tile<'_>,
        column: usize,
        sums: &mut [f32],
        stride: usize,
    ) {
        let &Tile { inputs, stride: distance, lines, .. } = tile;
        assert!(ROWS > 0 && inputs.len() >= (ROWS - 1) * distance + lines.len(), "one input for each weight");
        assert!(column + VECTORS * Self::LANES <= PANEL, "the vectors are inside the panel");
        let each = tile.ahead_each();
        let (mut ahead, mut rows_ahead) = (tile.ahead.chunks(each[0]), tile.rows_ahead.chunks(each[1]));
        let mut totals = [[self.splat(0.0); VECTORS]; ROWS];
        let mut inputs = inputs.as_ptr();
        for lines in lines.chunks(STEP) {
            for line in ahead.next().unwrap_or_default() {
                self.prefetch(line);
            }
            self.prefetch(rows_ahead.next().unwrap_or_default());
            for line in lines {
                // SAFETY: `self` exists, so the processor has AVX-512F. The vectors end inside the line. `inputs`
                // points to a number of the first row, which has one for each line, and adding a number of whole row
                // strides gives one of another row: the last row's last number is inside the slice.
                unsafe {
                    let mut weights = [self.splat(0.0); VECTORS];
                    for (vector, weights) in weights.iter_mut().enumerate() {
                        *weights = _mm512_loadu_ps(line.as_ptr().add(column + vector * Self::LANES));
                    }
                    for (row, totals) in totals.iter_mut().enumerate() {
                        // An addressing mode can express three rows per pointer.
                        let value = *inputs.add(row / 3 * (3 * distance) + row % 3 * distance);
                        let value = _mm512_set1_ps(value);
                        for (total, weights) in totals.iter_mut().zip(weights) {
                            *total = _mm512_fmadd_ps(value, weights, *total);
                        }
                    }
                    inputs = inputs.add(1);
                }
            }
        }
        for (row, totals) in totals.iter().enumerate() {
            let sums = &mut sums[row * stride + column..][..VECTORS * Self::LANES];
            for (vector, total) in totals.iter().enumerate() {
                self.store(*total, &mut sums[vector * Self::LANES..]);
            }
        }
    }
}
