//! Int8 products on x86-64: AVX-512 VNNI, AVX-VNNI, and AVX2 without either.

use std::arch::x86_64::*;

use super::dots::{ByteTile, Dot, DotKernel, WholeSums};
use super::tile::{STEP, share_of_step};
use crate::engine::cpu::byte_panels::{ByteLine, GROUP};

/// Proof that this processor has AVX-512 VNNI.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Avx512Dots(());

impl Avx512Dots {
    pub(super) fn detect() -> Option<Avx512Dots> {
        let has = is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512vnni");
        has.then_some(Avx512Dots(()))
    }
}

impl Dot for Avx512Dots {
    type Sums = __m512i;
    const LANES: usize = 16;
    /// The same as for floats.
    const TILE_ROWS: usize = 14;

    #[inline]
    fn run<K: DotKernel>(self, kernel: K) -> K::Output {
        #[inline(never)]
        #[target_feature(enable = "avx512f,avx512vnni")]
        fn enter<K: DotKernel>(dot: Avx512Dots, kernel: K) -> K::Output {
            kernel.run(dot)
        }
        // SAFETY: `self` exists, so the processor has AVX-512F and VNNI.
        unsafe { enter(self, kernel) }
    }

    #[inline(always)]
    fn prefetch(self, line: &ByteLine) {
        prefetch_line(line);
    }

    #[inline(always)]
    fn zero(self) -> __m512i {
        // SAFETY: `self` exists, so the processor has AVX-512F.
        unsafe { _mm512_setzero_si512() }
    }

    #[inline(always)]
    fn add(self, sums: __m512i, inputs: [u8; GROUP], weights: &[u8]) -> __m512i {
        let weights: &[u8; 64] = weights.first_chunk().expect("a tile reads whole vectors");
        // SAFETY: `self` exists, so the processor has AVX-512F and VNNI; 64 bytes are behind the pointer, aligned or not.
        unsafe {
            let weights = _mm512_loadu_si512(weights.as_ptr().cast());
            _mm512_dpbusd_epi32(sums, _mm512_set1_epi32(i32::from_le_bytes(inputs)), weights)
        }
    }

    #[inline(always)]
    fn store(self, sums: __m512i, to: &mut [i32]) {
        let to: &mut [i32; 16] = to.first_chunk_mut().expect("a tile stores whole vectors");
        // SAFETY: `self` exists, so the processor has AVX-512F; sixteen integers are behind the pointer, aligned or not.
        unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), sums) }
    }

    /// Uses one pointer and the row stride. A slice for each row would fill the integer registers, and checking their
    /// lengths every few lines took a fifth of the time.
    #[inline(always)]
    fn tile<const ROWS: usize>(self, tile: &ByteTile<'_>, sums: &mut WholeSums) {
        let (panel, stride) = (tile.panel, tile.stride);
        let rows = &tile.bytes[tile.start * stride..][..ROWS * stride];
        assert!(panel.len() * GROUP <= stride, "rows have one input for each weight");
        let mut ahead = tile.ahead.chunks(share_of_step(tile.ahead.len(), panel.len()));
        let mut totals = [[self.zero(); 2]; ROWS];
        let mut inputs = rows.as_ptr();
        for lines in panel.chunks(STEP) {
            for line in ahead.next().unwrap_or_default() {
                prefetch_line(line);
            }
            for line in lines {
                // SAFETY: `self` exists, so the processor has AVX-512F and VNNI. A line is 128 bytes. `inputs` is at
                // least one group below the end of the first row, as there are no more lines than groups of a row; so
                // the group that is a number of whole rows behind it is in a row, of which there are `ROWS`.
                unsafe {
                    let left = _mm512_loadu_si512(line.as_ptr().cast());
                    let right = _mm512_loadu_si512(line.as_ptr().add(64).cast());
                    for (row, totals) in totals.iter_mut().enumerate() {
                        // An addressing mode can express three rows per pointer.
                        let group = inputs.add(row / 3 * (3 * stride) + row % 3 * stride);
                        let group = _mm512_set1_epi32(group.cast::<i32>().read_unaligned());
                        totals[0] = _mm512_dpbusd_epi32(totals[0], group, left);
                        totals[1] = _mm512_dpbusd_epi32(totals[1], group, right);
                    }
                    inputs = inputs.add(GROUP);
                }
            }
        }
        for (totals, sums) in totals.iter().zip(&mut sums.0) {
            self.store(totals[0], sums);
            self.store(totals[1], &mut sums[Self::LANES..]);
        }
    }
}

/// Proof that this processor has AVX2, and AVX-VNNI if `VNNI`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Avx2Dots<const VNNI: bool>(());

impl<const VNNI: bool> Avx2Dots<VNNI> {
    pub(super) fn detect() -> Option<Avx2Dots<VNNI>> {
        let has = is_x86_feature_detected!("avx2") && (!VNNI || is_x86_feature_detected!("avxvnni"));
        has.then_some(Avx2Dots(()))
    }
}

impl<const VNNI: bool> Dot for Avx2Dots<VNNI> {
    type Sums = __m256i;
    const LANES: usize = 8;
    /// With VNNI the same as for floats. Without it weights take four registers and inputs two: 8 sums and one product
    /// make 15 of 16.
    const TILE_ROWS: usize = if VNNI { 6 } else { 4 };

    #[inline]
    fn run<K: DotKernel>(self, kernel: K) -> K::Output {
        #[inline(never)]
        #[target_feature(enable = "avx2,avxvnni")]
        fn enter_vnni<K: DotKernel, const VNNI: bool>(dot: Avx2Dots<VNNI>, kernel: K) -> K::Output {
            kernel.run(dot)
        }
        #[inline(never)]
        #[target_feature(enable = "avx2")]
        fn enter<K: DotKernel, const VNNI: bool>(dot: Avx2Dots<VNNI>, kernel: K) -> K::Output {
            kernel.run(dot)
        }
        // SAFETY: `self` exists, so the processor has AVX2, and AVX-VNNI if `VNNI`.
        unsafe { if VNNI { enter_vnni(self, kernel) } else { enter(self, kernel) } }
    }

    #[inline(always)]
    fn prefetch(self, line: &ByteLine) {
        prefetch_line(line);
    }

    #[inline(always)]
    fn zero(self) -> __m256i {
        // SAFETY: `self` exists, so the processor has AVX.
        unsafe { _mm256_setzero_si256() }
    }

    #[inline(always)]
    fn add(self, sums: __m256i, inputs: [u8; GROUP], weights: &[u8]) -> __m256i {
        let weights: &[u8; 32] = weights.first_chunk().expect("a tile reads whole vectors");
        // SAFETY: `self` exists, so the processor has AVX2, and AVX-VNNI if `VNNI`; 32 bytes are behind the pointer,
        // aligned or not.
        unsafe {
            let weights = _mm256_loadu_si256(weights.as_ptr().cast());
            let inputs = _mm256_set1_epi32(i32::from_le_bytes(inputs));
            if VNNI {
                return _mm256_dpbusd_avx_epi32(sums, inputs, weights);
            }
            // Bytes with even and with odd index, each as 16 bits; a pair of products is below 2 · 255 · 128 and fits
            // 32.
            let even = _mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(weights));
            let odd = _mm256_srai_epi16::<8>(weights);
            let low = _mm256_and_si256(inputs, _mm256_set1_epi16(0xff));
            let high = _mm256_srli_epi16::<8>(inputs);
            let sums = _mm256_add_epi32(sums, _mm256_madd_epi16(even, low));
            _mm256_add_epi32(sums, _mm256_madd_epi16(odd, high))
        }
    }

    #[inline(always)]
    fn store(self, sums: __m256i, to: &mut [i32]) {
        let to: &mut [i32; 8] = to.first_chunk_mut().expect("a tile stores whole vectors");
        // SAFETY: `self` exists, so the processor has AVX; eight integers are behind the pointer, aligned or not.
        unsafe { _mm256_storeu_si256(to.as_mut_ptr().cast(), sums) }
    }
}

#[inline(always)]
fn prefetch_line(line: &ByteLine) {
    for bytes in line.chunks(64) {
        // SAFETY: a prefetch is a hint that accepts any address; all x86-64 processors have it.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(bytes.as_ptr().cast()) }
    }
}
