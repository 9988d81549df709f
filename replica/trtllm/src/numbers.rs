//! Rows of numbers, converted from the output formats of an engine.

/// Number format of an output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// IEEE 754, 32 bits.
    F32,
    /// IEEE 754, 16 bits: 5 of exponent, 10 of fraction.
    F16,
    /// The upper half of an F32.
    Bf16,
}

impl Format {
    /// Returns the format with this number in the bridge; `None` for formats that are not used for rows.
    pub(crate) fn numbered(number: u8) -> Option<Format> {
        [Format::F32, Format::F16, Format::Bf16].get(usize::from(number)).copied()
    }

    /// Returns the bytes of one number.
    pub fn width(self) -> usize {
        match self {
            Format::F32 => 4,
            Format::F16 | Format::Bf16 => 2,
        }
    }

    /// Converts bytes to numbers, in the byte order of the machine.
    pub(crate) fn numbers(self, bytes: &[u8]) -> Vec<f32> {
        match self {
            Format::F32 => bytes.as_chunks().0.iter().map(|bytes| f32::from_ne_bytes(*bytes)).collect(),
            Format::F16 => {
                bytes.as_chunks().0.iter().map(|bytes| from_f16(u16::from_ne_bytes(*bytes))).collect()
            }
            Format::Bf16 => {
                bytes.as_chunks().0.iter().map(|bytes| from_bf16(u16::from_ne_bytes(*bytes))).collect()
            }
        }
    }
}

/// Rows of equal width.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EngineRows {
    /// Numbers of one row.
    pub width: usize,
    /// All rows, concatenated.
    pub numbers: Vec<f32>,
}

impl EngineRows {
    /// Converts the output of an engine; an error describes inconsistent sizes.
    pub(crate) fn read(format: u8, rows: usize, width: usize, bytes: &[u8]) -> Result<EngineRows, String> {
        let Some(format) = Format::numbered(format) else {
            return Err("the output is neither fp32 nor fp16 nor bf16".to_owned());
        };
        let expected = rows.checked_mul(width).and_then(|numbers| numbers.checked_mul(format.width()));
        if expected != Some(bytes.len()) || width == 0 {
            let got = bytes.len();
            return Err(format!(
                "the output has {got} bytes, which do not match {rows} rows of {width} {format:?}"
            ));
        }
        Ok(EngineRows { width, numbers: format.numbers(bytes) })
    }

    /// Returns the number of rows.
    pub fn len(&self) -> usize {
        self.numbers.len().checked_div(self.width).unwrap_or(0)
    }

    /// Returns whether there are no rows.
    pub fn is_empty(&self) -> bool {
        self.numbers.is_empty()
    }

    /// Returns an iterator over the rows.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &[f32]> {
        self.numbers.chunks_exact(self.width.max(1))
    }
}

fn from_bf16(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

fn from_f16(bits: u16) -> f32 {
    let sign = u32::from(bits >> 15) << 31;
    let exponent = u32::from((bits >> 10) & 0x1f);
    let fraction = u32::from(bits & 0x3ff);
    let magnitude = match exponent {
        // Subnormal: the fraction counts in steps of 2⁻²⁴, which are exact in f32.
        0 => (fraction as f32 * f32::from_bits(0x3380_0000)).to_bits(),
        0x1f => 0x7f80_0000 | (fraction << 13),
        _ => ((exponent + (127 - 15)) << 23) | (fraction << 13),
    };
    f32::from_bits(sign | magnitude)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sixteen_bit_formats_are_converted_exactly() {
        // From IEEE 754: one, the largest, the smallest normal and subnormal, a third, minus two, the infinities.
        let table = [
            (0x3c00, 1.0),
            (0x7bff, 65504.0),
            (0x0400, 6.103_515_6e-5),
            (0x0001, 5.960_464_5e-8),
            (0x3555, 0.333_251_95),
            (0xc000, -2.0),
            (0x8000, -0.0),
            (0x7c00, f32::INFINITY),
            (0xfc00, f32::NEG_INFINITY),
        ];
        for (bits, number) in table {
            assert_eq!(from_f16(bits).to_bits(), f32::to_bits(number), "{bits:#06x}");
        }
        assert!(from_f16(0x7e00).is_nan());
        assert_eq!((from_bf16(0x3f80), from_bf16(0xc000), from_bf16(0x4049)), (1.0, -2.0, 3.140_625));
    }

    #[test]
    fn bytes_that_do_not_match_the_rows_are_rejected() {
        let three = [1.0f32, 2.0, 3.0].map(f32::to_ne_bytes).concat();
        assert_eq!(
            EngineRows::read(0, 1, 3, &three),
            Ok(EngineRows { width: 3, numbers: vec![1.0, 2.0, 3.0] })
        );
        for (format, rows, width) in [(0, 1, 2), (1, 1, 3), (2, 3, 1), (0, usize::MAX, 2), (0, 0, 0)] {
            assert!(EngineRows::read(format, rows, width, &three).is_err(), "{format} {rows} {width}");
        }
        assert!(EngineRows::read(255, 1, 3, &three).unwrap_err().contains("neither fp32"));
    }
}
