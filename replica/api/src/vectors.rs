//! Vectors of a response, in the encodings of all dialects.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::ser::{Serialize, Serializer};

/// Encoding of a vector in the response.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Encoding {
    /// A JSON list of numbers.
    #[default]
    Float,
    /// Base64 of the little-endian f32 numbers: a third of the bytes, and the default of the Python client.
    Base64,
    /// One bit for each number, set where the number is above 0, the first in the highest bit: bytes from -128 to 127,
    /// each 128 less than the value of its bits (*offset binary*).
    Binary,
    /// The same bits as bytes from 0 to 255.
    Ubinary,
    /// Base64 of the bytes of [`Encoding::Binary`].
    BinaryBase64,
    /// Base64 of the bytes of [`Encoding::Ubinary`].
    UbinaryBase64,
}

/// View of the engine's rows in one slice.
#[derive(Clone, Copy, Debug)]
pub struct RowsView<'a> {
    values: &'a [f32],
    dimensions: usize,
}

impl<'a> RowsView<'a> {
    /// Creates a view of rows of `dimensions` numbers each.
    pub fn new(values: &'a [f32], dimensions: usize) -> RowsView<'a> {
        assert!(dimensions > 0 && values.len().is_multiple_of(dimensions), "whole rows");
        RowsView { values, dimensions }
    }

    /// Returns an iterator over the rows.
    pub fn iter(self) -> std::slice::ChunksExact<'a, f32> {
        self.values.chunks_exact(self.dimensions)
    }

    /// Returns the total count of numbers.
    pub fn numbers(&self) -> usize {
        self.values.len()
    }
}

/// One vector to write.
#[derive(Clone, Copy, Debug)]
pub struct Vector<'a> {
    /// The numbers.
    pub row: &'a [f32],
    /// Encoding of the numbers.
    pub encoding: Encoding,
}

impl Serialize for Vector<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let signed = |bits: u8| bits ^ 0x80;
        match self.encoding {
            Encoding::Float => self.row.serialize(serializer),
            Encoding::Base64 => {
                let bytes: Vec<u8> = self.row.iter().flat_map(|number| number.to_le_bytes()).collect();
                serializer.serialize_str(&STANDARD.encode(&bytes))
            }
            Encoding::Ubinary => serializer.collect_seq(self.bits()),
            Encoding::Binary => serializer.collect_seq(self.bits().map(|bits| signed(bits) as i8)),
            Encoding::UbinaryBase64 => {
                serializer.serialize_str(&STANDARD.encode(self.bits().collect::<Vec<u8>>()))
            }
            Encoding::BinaryBase64 => {
                serializer.serialize_str(&STANDARD.encode(self.bits().map(signed).collect::<Vec<u8>>()))
            }
        }
    }
}

impl Vector<'_> {
    /// Packs eight numbers into a byte, the first in the highest bit; missing numbers at the end count as 0.
    fn bits(&self) -> impl Iterator<Item = u8> {
        self.row.chunks(8).map(|numbers| {
            let bit = |(at, number): (usize, &f32)| u8::from(*number > 0.0) << (7 - at);
            numbers.iter().enumerate().map(bit).sum()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_are_those_of_numpy_packbits() {
        let row = [0.5, -0.5, 0.0, 1.0, 1.0, -1.0, 1.0, -1.0, 0.1, 0.1];
        let written =
            |encoding| serde_json::to_string(&Vector { row: &row, encoding }).expect("numbers serialise");
        // np.packbits(row > 0) is [154, 192]; `binary` is 128 less.
        assert_eq!(written(Encoding::Ubinary), "[154,192]");
        assert_eq!(written(Encoding::Binary), "[26,64]");
        assert_eq!(written(Encoding::UbinaryBase64), format!("\"{}\"", STANDARD.encode([154, 192])));
        assert_eq!(written(Encoding::BinaryBase64), format!("\"{}\"", STANDARD.encode([26, 64])));
    }
}
