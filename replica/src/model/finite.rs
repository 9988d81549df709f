//! Check of weights for NaN, infinities and overflow.
//!
//! A single number that is not finite makes every row of the model NaN, which JSON can only represent as `null`. So
//! weights are checked where they are read: tables and vectors at every startup, packed matrices once, when they are
//! packed. The check is a running maximum of the magnitudes, compared as integers: floats without a sign are ordered
//! like their bits, with infinities and NaNs above all others. It runs at memory bandwidth.

use super::numbers::{Numbers, from_bf16, from_f16};

/// First number that is not finite.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct NotFinite {
    /// Index among the numbers.
    pub(super) index: usize,
    /// Value as stored.
    pub(super) value: f32,
}

/// Numbers that are checked before an early exit.
const BLOCK: usize = 4096;

/// Returns the first number whose product with `factor` is not finite.
pub(super) fn first_not_finite(numbers: Numbers<'_>, factor: f32) -> Option<NotFinite> {
    let largest = largest_allowed(factor);
    match numbers {
        Numbers::F32(numbers) => first(
            numbers,
            |block| {
                let bits = block.iter().map(|bytes| u32::from_le_bytes(*bytes) & 0x7fff_ffff);
                f32::from_bits(bits.fold(0, u32::max)) <= largest
            },
            |bytes| f32::from_le_bytes(*bytes),
            factor,
        ),
        Numbers::F16(numbers) => {
            first(numbers, |block| from_f16(magnitude(block)) <= largest, |bytes| from_f16(*bytes), factor)
        }
        Numbers::Bf16(numbers) => {
            first(numbers, |block| from_bf16(magnitude(block)) <= largest, |bytes| from_bf16(*bytes), factor)
        }
    }
}

/// Returns the largest magnitude whose product with `factor` is finite; NaN, which no number is below, if there is
/// none.
fn largest_allowed(factor: f32) -> f32 {
    let factor = factor.abs();
    if factor <= 1.0 { f32::MAX } else { f32::MAX / factor }
}

/// Returns the largest magnitude of 16-bit floats, without the sign.
fn magnitude(block: &[[u8; 2]]) -> [u8; 2] {
    block.iter().map(|bytes| u16::from_le_bytes(*bytes) & 0x7fff).fold(0, u16::max).to_le_bytes()
}

fn first<B>(
    numbers: &[B],
    is_fine: impl Fn(&[B]) -> bool,
    read: impl Fn(&B) -> f32,
    factor: f32,
) -> Option<NotFinite> {
    let mut blocks = numbers.chunks(BLOCK).zip(0..).filter(|(block, _)| !is_fine(block));
    blocks.find_map(|(block, block_index)| {
        block.iter().zip(block_index * BLOCK..).find_map(|(number, index)| {
            let value = read(number);
            (!(value * factor).is_finite()).then_some(NotFinite { index, value })
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(numbers: &[f32], factor: f32) -> Option<(usize, String)> {
        let bytes: Vec<[u8; 4]> = numbers.iter().map(|number| number.to_le_bytes()).collect();
        let found = first_not_finite(Numbers::F32(&bytes), factor);
        found.map(|NotFinite { index, value }| (index, value.to_string()))
    }

    #[test]
    fn the_first_number_that_is_not_finite_is_found_at_any_index() {
        for index in [0, 1, BLOCK - 1, BLOCK, 3 * BLOCK - 1, 3 * BLOCK + 6] {
            for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -f32::NAN] {
                let mut numbers = vec![0.5; 3 * BLOCK + 7];
                assert_eq!(check(&numbers, 1.0), None);
                numbers[index] = value;
                assert_eq!(check(&numbers, 1.0), Some((index, value.to_string())));
                let halves = |bits: u16| -> Vec<[u8; 2]> {
                    let all = numbers.iter().map(|number| if *number == 0.5 { 0 } else { bits });
                    all.map(u16::to_le_bytes).collect()
                };
                for (bits, is_bf16) in [(0x7c00, false), (0xfe00, false), (0xff80, true), (0x7fff, true)] {
                    let halves = halves(bits);
                    let numbers = if is_bf16 { Numbers::Bf16(&halves) } else { Numbers::F16(&halves) };
                    let found = first_not_finite(numbers, 1.0).map(|found| found.index);
                    assert_eq!(found, Some(index), "{bits:#06x}");
                }
            }
        }
    }

    #[test]
    fn a_number_that_overflows_when_multiplied_is_found() {
        assert_eq!(check(&[1.0, -f32::MAX], 1.0), None);
        assert_eq!(check(&[1.0, -f32::MAX], 0.5), None);
        assert_eq!(check(&[1.0, -3.0e38], 1.5), Some((1, (-3.0e38_f32).to_string())));
        assert_eq!(check(&[1.0, 2.0e38], -1.5), None);
        let bf16: [[u8; 2]; 2] = [[0x80, 0x3f], [0x7f, 0x7f]];
        assert_eq!(first_not_finite(Numbers::Bf16(&bf16), 1.0), None);
        assert_eq!(first_not_finite(Numbers::Bf16(&bf16), 1.5).map(|found| found.index), Some(1));
    }
}
