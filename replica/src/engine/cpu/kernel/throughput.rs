//! How many multiplications and additions this processor can do when nothing else is in the way.

use super::{Kernel, Simd};

/// Chains of additions that do not wait for each other: two units of four cycles' latency want eight.
const CHAINS: usize = 12;

/// Multiplies and adds in registers, so many times per chain. Comes to the floating-point operations done, and a number
/// that depends on all of them.
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
