//! A tensor of a checkpoint, whatever kind of floats it holds.
//!
//! Checkpoints come in 32-bit and in both 16-bit formats. The numbers stay where they lie, in the mapped file, and are
//! widened when they are read: a packed copy is made of most of them anyway, and of a table of words a batch touches a
//! few rows. Nothing is rounded: every 16-bit float is a 32-bit float.

use std::io;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use super::finite::{NotFinite, first_not_finite};
use super::{MappedFile, ModelError, TensorProblem};

/// The kinds of floats that are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    F32,
    F16,
    Bf16,
}

/// A tensor of floats. It keeps its file mapped.
#[derive(Clone, Debug)]
pub struct Tensor {
    /// Where it was read from, for messages.
    origin: Arc<Origin>,
    file: Arc<MappedFile>,
    bytes: Range<usize>,
    kind: Kind,
    rows: usize,
    /// Numbers of one row: the last dimension.
    row_length: usize,
}

/// The file and the name of a tensor.
#[derive(Debug)]
pub(super) struct Origin {
    /// The file.
    pub(super) path: PathBuf,
    /// The name in the file's header.
    pub(super) name: String,
}

/// Numbers where they lie in the file.
#[derive(Clone, Copy, Debug)]
pub enum Numbers<'a> {
    /// 32-bit floats, each as its bytes.
    F32(&'a [[u8; 4]]),
    /// 16-bit floats with five bits of exponent.
    F16(&'a [[u8; 2]]),
    /// The upper halves of 32-bit floats.
    Bf16(&'a [[u8; 2]]),
}

impl Tensor {
    /// The tensor of this kind and shape at these bytes of the file, which are as many as that takes.
    pub(super) fn new(
        origin: Origin,
        file: Arc<MappedFile>,
        bytes: Range<usize>,
        kind: Kind,
        shape: &[usize],
    ) -> Tensor {
        let (rows, row_length) = match shape.split_last() {
            Some((last, rest)) => (rest.iter().product(), *last),
            None => (1, 1),
        };
        Tensor { origin: Arc::new(origin), file, bytes, kind, rows, row_length }
    }

    /// Zeros in the place of a tensor that cannot be had, so that the others can be looked for as well.
    pub(crate) fn placeholder(shape: &[usize]) -> io::Result<Tensor> {
        let numbers: usize = shape.iter().product();
        let bytes = numbers * size_of::<f32>();
        let file = Arc::new(MappedFile::private(bytes.max(1), |_| {})?);
        let origin = Origin { path: PathBuf::new(), name: String::new() };
        Ok(Tensor::new(origin, file, 0..bytes, Kind::F32, shape))
    }

    /// Refuses a tensor that holds NaN, an infinity, or a number that overflows when it is multiplied by `factor`.
    /// Reads all of it.
    pub fn check_finite(&self, factor: f32) -> Result<(), ModelError> {
        let Some(NotFinite { index, value }) = first_not_finite(self.numbers(), factor) else {
            return Ok(());
        };
        let width = self.row_length.max(1);
        let at = [index / width, index % width];
        let problem = match value.is_finite() {
            false => TensorProblem::NotFinite { value: value.to_string(), at },
            true => TensorProblem::Overflow { value: format!("{value:e}"), at, factor: factor.to_string() },
        };
        let Origin { path, name } = &*self.origin;
        let (path, tensor) = (path.clone(), name.clone());
        Err(ModelError::Tensor { path, tensor, problem, deciding: None })
    }

    /// Rows: all dimensions but the last.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Numbers of a row.
    pub fn row_length(&self) -> usize {
        self.row_length
    }

    /// All numbers, row after row.
    pub fn numbers(&self) -> Numbers<'_> {
        let bytes = &self.file.bytes()[self.bytes.clone()];
        match self.kind {
            Kind::F32 => Numbers::F32(bytes.as_chunks().0),
            Kind::F16 => Numbers::F16(bytes.as_chunks().0),
            Kind::Bf16 => Numbers::Bf16(bytes.as_chunks().0),
        }
    }

    /// The numbers of one row.
    pub fn row(&self, index: usize) -> Numbers<'_> {
        let start = index * self.row_length;
        let place = start..start + self.row_length;
        match self.numbers() {
            Numbers::F32(numbers) => Numbers::F32(&numbers[place]),
            Numbers::F16(numbers) => Numbers::F16(&numbers[place]),
            Numbers::Bf16(numbers) => Numbers::Bf16(&numbers[place]),
        }
    }

    /// These rows of it.
    pub fn rows_of(&self, rows: Range<usize>) -> Tensor {
        assert!(rows.end <= self.rows, "rows of the tensor");
        let each = self.bytes.len() / self.rows.max(1);
        let bytes = self.bytes.start + rows.start * each..self.bytes.start + rows.end * each;
        Tensor { bytes, rows: rows.len(), ..self.clone() }
    }

    /// The numbers of this tensor less those of another one, of which there are as many; in memory of this process.
    pub fn less(&self, other: &Tensor) -> io::Result<Tensor> {
        let mut numbers = self.to_vec();
        numbers.iter_mut().zip(other.to_vec()).for_each(|(number, other)| *number -= other);
        let bytes = size_of_val(numbers.as_slice());
        let file = MappedFile::private(bytes, |memory| {
            memory
                .as_chunks_mut()
                .0
                .iter_mut()
                .zip(&numbers)
                .for_each(|(out, number)| *out = number.to_le_bytes());
        })?;
        Ok(Tensor { file: Arc::new(file), bytes: 0..bytes, kind: Kind::F32, ..self.clone() })
    }

    /// A copy of the numbers.
    pub fn to_vec(&self) -> Vec<f32> {
        let mut copy = vec![0.0; self.rows * self.row_length];
        self.numbers().copy_to(&mut copy);
        copy
    }
}

impl Numbers<'_> {
    /// How many they are.
    pub fn len(&self) -> usize {
        match self {
            Numbers::F32(numbers) => numbers.len(),
            Numbers::F16(numbers) | Numbers::Bf16(numbers) => numbers.len(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Writes them to `out`, which has room for exactly these.
    pub fn copy_to(&self, out: &mut [f32]) {
        self.each_with(out, |out, number| *out = number);
    }

    /// Adds them to the numbers of `out`, which are as many.
    pub fn add_to(&self, out: &mut [f32]) {
        self.each_with(out, |out, number| *out += number);
    }

    /// Calls `act` with each place of `out` and the number that belongs to it.
    #[inline(always)]
    pub fn each_with<T>(&self, out: &mut [T], act: impl Fn(&mut T, f32)) {
        assert_eq!(out.len(), self.len(), "as many places as numbers");
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

/// One bit of sign, five of exponent with the middle at 15, ten of fraction. Without a branch that would keep a loop
/// from being computed in vectors.
pub(super) fn from_f16(bytes: [u8; 2]) -> f32 {
    let bits = u32::from(u16::from_le_bytes(bytes));
    let (sign, rest) = (bits & 0x8000, bits & 0x7fff);
    // The exponent's middle is 127 here; infinities and NaNs keep the highest exponent that there is.
    let middle = if rest >= 0x7c00 { (255 - 31) << 23 } else { (127 - 15) << 23 };
    let normal = f32::from_bits((rest << 13) + middle);
    // Below the smallest exponent numbers are multiples of 2^-24.
    let small = rest as f32 * f32::from_bits((127 - 24) << 23);
    let magnitude = if rest < 0x0400 { small } else { normal };
    f32::from_bits(magnitude.to_bits() | sign << 16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_16_bit_float_is_the_number_that_its_bits_say() {
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
