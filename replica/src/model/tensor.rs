//! Tensor of a checkpoint, independent of its float format.
//!
//! Checkpoints use 32-bit and both 16-bit formats. The numbers stay in the mapped file and are widened when they are
//! read: most of them are packed into a copy anyway, and a batch touches few rows of the word embeddings.

use std::io;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use super::finite::{NotFinite, first_not_finite};
use super::{MappedFile, ModelError, Numbers, TensorProblem};

/// Supported float formats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    F32,
    F16,
    Bf16,
}

/// Tensor of floats. It keeps its file mapped.
#[derive(Clone, Debug)]
pub struct Tensor {
    /// Source of the tensor, for messages.
    origin: Arc<Origin>,
    file: Arc<MappedFile>,
    bytes: Range<usize>,
    kind: Kind,
    rows: usize,
    /// Numbers of a row: the last dimension.
    row_length: usize,
}

/// File and name of a tensor.
#[derive(Debug)]
pub(super) struct Origin {
    /// Path of the file.
    pub(super) path: PathBuf,
    /// Name in the file's header.
    pub(super) name: String,
}

impl Tensor {
    /// Creates a tensor of this type and shape from these bytes of the file; their length must match.
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

    /// Returns zeros in place of a missing tensor, so that the check of the other tensors can continue.
    pub(crate) fn placeholder(shape: &[usize]) -> io::Result<Tensor> {
        let numbers: usize = shape.iter().product();
        let bytes = numbers * size_of::<f32>();
        let file = Arc::new(MappedFile::private(bytes.max(1), |_| {})?);
        let origin = Origin { path: PathBuf::new(), name: String::new() };
        Ok(Tensor::new(origin, file, 0..bytes, Kind::F32, shape))
    }

    /// Rejects a tensor that contains NaN, an infinity, or a number that overflows when it is multiplied by `factor`.
    /// Reads the whole tensor.
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

    /// Returns the number of rows: the product of all dimensions but the last.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Returns the numbers in a row.
    pub fn row_length(&self) -> usize {
        self.row_length
    }

    /// Returns all numbers, row by row.
    pub fn numbers(&self) -> Numbers<'_> {
        let bytes = &self.file.bytes()[self.bytes.clone()];
        match self.kind {
            Kind::F32 => Numbers::F32(bytes.as_chunks().0),
            Kind::F16 => Numbers::F16(bytes.as_chunks().0),
            Kind::Bf16 => Numbers::Bf16(bytes.as_chunks().0),
        }
    }

    /// Returns the numbers of one row.
    pub fn row(&self, index: usize) -> Numbers<'_> {
        let start = index * self.row_length;
        let range = start..start + self.row_length;
        match self.numbers() {
            Numbers::F32(numbers) => Numbers::F32(&numbers[range]),
            Numbers::F16(numbers) => Numbers::F16(&numbers[range]),
            Numbers::Bf16(numbers) => Numbers::Bf16(&numbers[range]),
        }
    }

    /// Returns these rows as a tensor.
    pub fn rows_of(&self, rows: Range<usize>) -> Tensor {
        assert!(rows.end <= self.rows, "rows of the tensor");
        let each = self.bytes.len() / self.rows.max(1);
        let bytes = self.bytes.start + rows.start * each..self.bytes.start + rows.end * each;
        Tensor { bytes, rows: rows.len(), ..self.clone() }
    }

    /// Returns the difference of this tensor and another one of the same size, in private memory.
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

    /// Returns a copy of the numbers.
    pub fn to_vec(&self) -> Vec<f32> {
        let mut copy = vec![0.0; self.rows * self.row_length];
        self.numbers().copy_to(&mut copy);
        copy
    }
}
