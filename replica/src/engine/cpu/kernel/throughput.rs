//! Peak rate of multiplications and additions of this processor.

use super::byte_isa::Dots;
use super::dots::{Dot, DotKernel};
use super::{Isa, Kernel, Simd};
use crate::engine::cpu::byte_panels::GROUP;
use crate::engine::cpu::panels::PANEL;

/// Independent chains of additions: two units with a latency of four cycles need eight.
const CHAINS: usize = 12;

/// Multiplies and adds in registers, a number of rounds per chain. Returns the number of floating-point operations, and
/// a number that depends on all of them.
pub(in super::super) struct MultiplyAdd {
    pub(in super::super) rounds: usize,
}

impl Kernel for MultiplyAdd {
    type Output = (f64, f32);

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> (f64, f32) {
        let factor = simd.splat(std::hint::black_box(0.999));
        let mut chains = [simd.splat(1.0); CHAINS];
        for _ in 0..self.rounds {
            for chain in &mut chains {
                *chain = simd.mul_add(*chain, factor, factor);
            }
        }
        let mut total = chains[0];
        for chain in &chains[1..] {
            total = simd.add(total, *chain);
        }
        let operations = 2 * self.rounds * CHAINS * S::LANES;
        (operations as f64, simd.sum(total))
    }
}

/// Multiplies and adds bytes, with the instructions that accompany `isa`.
pub(in super::super) struct MultiplyBytes {
    pub(in super::super) isa: Isa,
    pub(in super::super) rounds: usize,
}

impl MultiplyBytes {
    pub(in super::super) fn run(self) -> (f64, i32) {
        Dots::of(self.isa).run(self)
    }
}

impl DotKernel for MultiplyBytes {
    type Output = (f64, i32);

    #[inline(always)]
    fn run<D: Dot>(self, dot: D) -> (f64, i32) {
        let weights = std::hint::black_box([1; PANEL * GROUP]);
        let inputs = std::hint::black_box([1; GROUP]);
        let mut chains = [dot.zero(); CHAINS];
        for _ in 0..self.rounds {
            for chain in &mut chains {
                *chain = dot.add(*chain, inputs, &weights);
            }
        }
        let mut total = 0;
        for chain in chains {
            let mut sums = [0; PANEL];
            dot.store(chain, &mut sums);
            total += sums[0];
        }
        let operations = 2 * self.rounds * CHAINS * GROUP * D::LANES;
        (operations as f64, total)
    }
}
