//! Selection of the instruction set for byte products ([`super::dots`]).

use super::Isa;
use super::dots::{ByteTile, Dot, DotKernel, PortableDots, WholeSums};
#[cfg(target_arch = "x86_64")]
use super::x86_dots::{Avx2Dots, Avx512Dots};

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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::cpu::byte_panels::{ByteLine, GROUP};
    use crate::engine::cpu::kernel::dots::MAX_DOT_ROWS;
    use crate::engine::cpu::panels::PANEL;

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
