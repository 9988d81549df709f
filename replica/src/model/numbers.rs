//! Numbers of a checkpoint in their float format, widened to f32 when they are read. The conversion is exact: every 16-bit
//! float is a 32-bit float.

/// Numbers in the file.
#[derive(Clone, Copy, Debug)]
pub enum Numbers<'a> {
    /// 32-bit floats, as bytes.
    F32(&'a [[u8; 4]]),
    /// 16-bit floats with five exponent bits.
    F16(&'a [[u8; 2]]),
    /// 16-bit floats that are the upper halves of 32-bit floats.
    Bf16(&'a [[u8; 2]]),
}

impl Numbers<'_> {
    /// Returns the count of numbers.
    pub fn len(&self) -> usize {
        match self {
            Numbers::F32(numbers) => numbers.len(),
            Numbers::F16(numbers) | Numbers::Bf16(numbers) => numbers.len(),
        }
    }

    /// Returns whether there are no numbers.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Copies the numbers to `out`, which has the same length.
    pub fn copy_to(&self, out: &mut [f32]) {
        self.each_with(out, |out, number| *out = number);
    }

    /// Adds the numbers to `out`, which has the same length.
    pub fn add_to(&self, out: &mut [f32]) {
        self.each_with(out, |out, number| *out += number);
    }

    /// Calls `act` with each element of `out` and the corresponding number.
    #[inline(always)]
    pub fn each_with<T>(&self, out: &mut [T], act: impl Fn(&mut T, f32)) {
        assert_eq!(out.len(), self.len(), "lengths differ");
        match self {
            Numbers::F32(numbers) => {
                out.iter_mut().zip(*numbers).for_each(|(out, bytes)| act(out, f32::from_le_bytes(*bytes)));
            }
            Numbers::F16(numbers) => {
                out.iter_mut().zip(*numbers).for_each(|(out, bytes)| act(out, from_f16(*bytes)));
            }
            Numbers::Bf16(numbers) => {
                out.iter_mut().zip(*numbers).for_each(|(out, bytes)| act(out, from_bf16(*bytes)));
            }
        }
    }
}

pub(super) fn from_bf16(bytes: [u8; 2]) -> f32 {
    f32::from_bits(u32::from(u16::from_le_bytes(bytes)) << 16)
}

/// Converts a 16-bit float: one sign bit, five exponent bits with the bias 15, ten fraction bits. Without branches, so
/// that the loop can be vectorized.
pub(super) fn from_f16(bytes: [u8; 2]) -> f32 {
    let bits = u32::from(u16::from_le_bytes(bytes));
    let (sign, rest) = (bits & 0x8000, bits & 0x7fff);
    // The exponent bias of f32 is 127; infinities and NaNs keep the maximum exponent.
    let middle = if rest >= 0x7c00 { (255 - 31) << 23 } else { (127 - 15) << 23 };
    let normal = f32::from_bits((rest << 13) + middle);
    // Subnormal numbers are multiples of 2^-24.
    let small = rest as f32 * f32::from_bits((127 - 24) << 23);
    let magnitude = if rest < 0x0400 { small } else { normal };
    f32::from_bits(magnitude.to_bits() | sign << 16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_16_bit_float_is_converted_exactly() {
        for bits in 0..=u16::MAX {
            let bytes = bits.to_le_bytes();
            let sign = if bits >> 15 == 0 { 1.0 } else { -1.0 };
            let (exponent, fraction) = (i32::from(bits >> 10 & 31), f64::from(bits & 1023) / 1024.0);
            let found = f64::from(from_f16(bytes));
            match exponent {
                31 if fraction == 0.0 => assert_eq!(found, sign * f64::INFINITY, "{bits:#06x}"),
                31 => assert!(found.is_nan(), "{bits:#06x}"),
                0 => assert_eq!(found, sign * fraction * 2_f64.powi(-14), "{bits:#06x}"),
                _ => assert_eq!(found, sign * (1.0 + fraction) * 2_f64.powi(exponent - 15), "{bits:#06x}"),
            }
            assert_eq!(from_bf16(bytes).to_bits(), u32::from(bits) << 16);
        }
        assert!(from_f16([0, 0x80]).is_sign_negative());
    }
}
