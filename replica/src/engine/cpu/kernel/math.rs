//! Exponential, error function and the activations based on them, as polynomials.

use super::Simd;
use crate::model::Activation;

/// Returns `2ˣ` within 3 units in the last place; `x` is clamped to ±126.
///
/// `x = n + r` with `|r| ≤ ½`, and `2ʳ` by the polynomial of degree 5 with the least relative error, 8·10⁻⁸ (computed
/// by the Remez exchange algorithm in 64-bit floats).
#[inline(always)]
pub(super) fn exp2<S: Simd>(simd: S, x: S::Vector) -> S::Vector {
    let x = simd.max(simd.min(x, simd.splat(126.0)), simd.splat(-126.0));
    let n = simd.round(x);
    let r = simd.sub(x, n);
    #[expect(clippy::approx_constant, reason = "the best coefficient is near ln 2, not equal to it")]
    let terms = [1.327_647_2e-3, 9.675_541e-3, 5.550_713_3e-2, 0.240_221_2, 0.693_147, 1.0];
    simd.scale(polynomial(simd, r, terms), n)
}

/// Returns `2ˣ` with a relative error of 10⁻⁴, for results that are quantized to bytes. `x` is clamped at −64: results
/// must not be subnormal, which take a processor a hundred cycles. Arguments above 127 do not occur.
#[inline(always)]
pub(super) fn exp2_coarse<S: Simd>(simd: S, x: S::Vector) -> S::Vector {
    let x = simd.max(x, simd.splat(-64.0));
    let n = simd.round(x);
    let terms = [5.517_163e-2, 0.242_611_14, 0.693_260_97, 0.999_928_06];
    simd.scale(polynomial(simd, simd.sub(x, n), terms), n)
}

/// Returns `x·Φ(x)` within 5·10⁻⁴, for results that are quantized to bytes, whose steps are some twenty times as large:
/// `Φ − ½` is an odd polynomial, which reaches ½ at ±3.7 and is clamped there (least weighted error, by the exchange
/// algorithm, in 64-bit floats).
#[inline(always)]
fn gelu_coarse<S: Simd>(simd: S, x: S::Vector) -> S::Vector {
    let inner = simd.max(simd.min(x, simd.splat(3.7)), simd.splat(-3.7));
    let terms = [-4.901_522e-7, 2.689_562e-5, -6.175_983e-4, 7.849_3e-3, -6.258_931e-2, 0.396_476_4];
    let half = polynomial(simd, simd.mul(inner, inner), terms);
    simd.mul(x, simd.mul_add(inner, half, simd.splat(0.5)))
}

/// Applies the activation to every lane, with the precision that quantization to bytes needs.
#[inline(always)]
pub(super) fn activate_coarse<S: Simd>(simd: S, activation: Activation, x: S::Vector) -> S::Vector {
    match activation {
        Activation::Gelu => gelu_coarse(simd, x),
        other => activate(simd, other, x),
    }
}

/// Returns `eˣ`, slightly less exact for large arguments: the product is rounded.
#[inline(always)]
fn exp<S: Simd>(simd: S, x: S::Vector) -> S::Vector {
    let x = simd.max(simd.min(x, simd.splat(87.0)), simd.splat(-87.0));
    let n = simd.round(simd.mul(x, simd.splat(std::f32::consts::LOG2_E)));
    // ln 2 in two parts, the first with so few bits that n times it is exact.
    let r = simd.mul_add(n, simd.splat(-0.693_359_4), x);
    let r = simd.mul_add(n, simd.splat(2.121_944_4e-4), r);
    let terms = [1.987_569_1e-4, 1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 0.166_666_65, 0.5];
    let tail = polynomial(simd, r, terms);
    let value = simd.add(simd.mul_add(simd.mul(r, r), tail, r), simd.splat(1.0));
    simd.scale(value, n)
}

/// Returns `tanh x` within 3·10⁻⁷: `1 − 2/(1 + e²ˣ)`.
#[inline(always)]
pub(super) fn tanh<S: Simd>(simd: S, x: S::Vector) -> S::Vector {
    let power = exp(simd, simd.add(x, x));
    let one = simd.splat(1.0);
    simd.sub(one, simd.quotient(simd.splat(2.0), simd.add(one, power)))
}

/// Returns `x·σ(factor·x)`.
#[inline(always)]
fn swish<S: Simd>(simd: S, x: S::Vector, factor: f32) -> S::Vector {
    let power = exp(simd, simd.mul(x, simd.splat(-factor)));
    simd.quotient(x, simd.add(simd.splat(1.0), power))
}

/// Returns the error function within 4·10⁻⁷: the rational approximation of Eigen and XLA, odd over even in `x²`. Beyond
/// 4 it is one within 2·10⁻⁸.
#[inline(always)]
fn erf<S: Simd>(simd: S, x: S::Vector) -> S::Vector {
    let x = simd.max(simd.min(x, simd.splat(4.0)), simd.splat(-4.0));
    let square = simd.mul(x, x);
    let above = [
        -2.726_142_3e-10,
        2.770_681_4e-8,
        -2.101_024e-6,
        -5.692_506_4e-5,
        -7.349_906_3e-4,
        -2.954_6e-3,
        -1.609_603_3e-2,
    ];
    let below = [-1.456_607_18e-5, -2.133_740_5e-4, -1.682_827e-3, -7.373_329_2e-3, -1.426_473_9e-2];
    simd.quotient(simd.mul(x, polynomial(simd, square, above)), polynomial(simd, square, below))
}

/// Evaluates the polynomial with these coefficients, from the highest power down.
#[inline(always)]
fn polynomial<S: Simd, const N: usize>(simd: S, x: S::Vector, coefficients: [f32; N]) -> S::Vector {
    let mut value = simd.splat(coefficients[0]);
    for coefficient in &coefficients[1..] {
        value = simd.mul_add(value, x, simd.splat(*coefficient));
    }
    value
}

/// Applies the activation to every lane.
#[inline(always)]
pub(super) fn activate<S: Simd>(simd: S, activation: Activation, x: S::Vector) -> S::Vector {
    match activation {
        Activation::Gelu => {
            let half = simd.mul(x, simd.splat(0.5));
            let erf = erf(simd, simd.mul(x, simd.splat(std::f32::consts::FRAC_1_SQRT_2)));
            simd.mul_add(half, erf, half)
        }
        // ½x·(1 + tanh u) = x / (1 + e⁻²ᵘ), u = √(2/π)·(x + 0.044715·x³)
        Activation::GeluTanh => {
            let cube = simd.mul(simd.mul(x, x), x);
            let inner = simd.mul_add(cube, simd.splat(0.044_715), x);
            let power = simd.mul(inner, simd.splat(-2.0 * 0.797_884_6));
            simd.quotient(x, simd.add(simd.splat(1.0), exp(simd, power)))
        }
        Activation::QuickGelu => swish(simd, x, 1.702),
        Activation::Relu => simd.max(x, simd.splat(0.0)),
        Activation::Silu => swish(simd, x, 1.0),
        Activation::Tanh => tanh(simd, x),
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Isa, Kernel};
    use super::*;

    enum TestFunction {
        Exp,
        Exp2,
        Exp2Coarse,
        GeluCoarse,
        Erf,
        Activate(Activation),
    }

    struct Apply<'a>(TestFunction, &'a mut [f32]);

    impl Kernel for Apply<'_> {
        type Output = ();

        #[inline(always)]
        fn run<S: Simd>(self, simd: S) {
            for lanes in self.1.chunks_exact_mut(S::LANES) {
                let x = simd.load(lanes);
                let y = match self.0 {
                    TestFunction::Exp => exp(simd, x),
                    TestFunction::Exp2 => exp2(simd, x),
                    TestFunction::Exp2Coarse => exp2_coarse(simd, x),
                    TestFunction::GeluCoarse => activate_coarse(simd, Activation::Gelu, x),
                    TestFunction::Erf => erf(simd, x),
                    TestFunction::Activate(activation) => activate(simd, activation, x),
                };
                simd.store(y, lanes);
            }
        }
    }

    /// Compares every instruction set with the reference, over `-limit..limit`.
    fn check(
        function: impl Fn() -> TestFunction,
        limit: f32,
        error: impl Fn(f64, f64) -> f64,
        tolerance: f64,
    ) {
        let arguments: Vec<f32> = (0..8192).map(|i| limit * (i as f32 / 4096.0 - 1.0)).collect();
        for isa in Isa::available() {
            let mut values = arguments.clone();
            isa.run(Apply(function(), &mut values));
            for (x, value) in arguments.iter().zip(values) {
                let expected = reference(&function(), f64::from(*x));
                let error = error(f64::from(value), expected);
                assert!(error <= tolerance, "{isa:?} at {x}: {value}, not {expected} ({error:e})");
            }
        }
    }

    fn reference(function: &TestFunction, x: f64) -> f64 {
        match function {
            TestFunction::Exp => x.exp(),
            TestFunction::Exp2 | TestFunction::Exp2Coarse => x.exp2(),
            TestFunction::Erf => reference_erf(x),
            TestFunction::GeluCoarse | TestFunction::Activate(Activation::Gelu) => {
                0.5 * x * (1.0 + reference_erf(x * 0.5_f64.sqrt()))
            }
            TestFunction::Activate(Activation::GeluTanh) => {
                let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
                0.5 * x * (1.0 + inner.tanh())
            }
            TestFunction::Activate(Activation::QuickGelu) => x / (1.0 + (-1.702 * x).exp()),
            TestFunction::Activate(Activation::Relu) => x.max(0.0),
            TestFunction::Activate(Activation::Silu) => x / (1.0 + (-x).exp()),
            TestFunction::Activate(Activation::Tanh) => x.tanh(),
        }
    }

    /// Returns `2/√π·e^(−x²)·Σ 2ⁿx²ⁿ⁺¹/(2n+1)!!`, whose terms all have one sign, so that there is no cancellation.
    fn reference_erf(x: f64) -> f64 {
        if x.abs() > 6.0 {
            return x.signum();
        }
        let mut term = x;
        let mut sum = x;
        for n in 1..200 {
            term *= 2.0 * x * x / f64::from(2 * n + 1);
            sum += term;
        }
        sum * (-x * x).exp() * 2.0 / std::f64::consts::PI.sqrt()
    }

    fn absolute(value: f64, expected: f64) -> f64 {
        (value - expected).abs()
    }

    fn relative(value: f64, expected: f64) -> f64 {
        ((value - expected) / expected).abs()
    }

    #[test]
    fn the_exponential_is_exact_to_the_last_places() {
        check(|| TestFunction::Exp, 86.0, relative, 2.5e-7);
        check(|| TestFunction::Exp, 1.0, relative, 2.5e-7);
        check(|| TestFunction::Exp2, 125.0, relative, 3.5e-7);
        check(|| TestFunction::Exp2, 1.0, relative, 3.5e-7);
    }

    #[test]
    fn coarse_functions_are_within_their_tolerance() {
        check(|| TestFunction::Exp2Coarse, 64.0, relative, 1e-4);
        check(|| TestFunction::GeluCoarse, 3.5, absolute, 6e-4);
        // Beyond this, the remaining error of the polynomial grows with the argument, as the row's range does.
        check(
            || TestFunction::GeluCoarse,
            100.0,
            |value, expected| absolute(value, expected) / (1.0 + expected.abs()),
            6e-4,
        );
    }

    #[test]
    fn the_exponential_of_minus_infinity_is_negligible() {
        for isa in Isa::available() {
            let mut values = [f32::NEG_INFINITY; 16];
            isa.run(Apply(TestFunction::Exp2, &mut values));
            assert!(values.iter().all(|value| (0.0..1e-37).contains(value)), "{isa:?}: {values:?}");
        }
    }

    #[test]
    fn the_error_function_is_within_its_tolerance() {
        check(|| TestFunction::Erf, 6.0, absolute, 4e-7);
    }

    #[test]
    fn the_activations_are_within_their_tolerance() {
        // Error of erf times half the argument, and rounding of the result.
        let of_magnitude = |value: f64, expected: f64| absolute(value, expected) / (1.0 + expected.abs());
        check(|| TestFunction::Activate(Activation::Gelu), 8.0, of_magnitude, 1e-6);
        check(|| TestFunction::Activate(Activation::GeluTanh), 8.0, of_magnitude, 5e-7);
        check(|| TestFunction::Activate(Activation::QuickGelu), 20.0, of_magnitude, 5e-7);
        check(|| TestFunction::Activate(Activation::Relu), 8.0, absolute, 0.0);
        check(|| TestFunction::Activate(Activation::Silu), 20.0, of_magnitude, 5e-7);
        check(|| TestFunction::Activate(Activation::Tanh), 20.0, absolute, 3e-7);
    }
}
