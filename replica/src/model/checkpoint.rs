//! The weights: `model.safetensors`, mapped.
//!
//! The header is read and checked at once, so that a tensor that is handed out lies inside the file and has the shape
//! that was asked for. The numbers are not looked at: that would read the whole file at every start, and whoever pulled
//! it compared its checksum.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, Metadata, TensorInfo};

use super::{MappedFile, ModelError, TensorProblem};

/// The length of the header, as eight bytes, stands before the header.
const LENGTH_BYTES: usize = 8;

/// A file of tensors.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    file: Arc<MappedFile>,
    tensors: Metadata,
    data_start: usize,
}

/// A tensor of 32-bit floats. It keeps its file mapped.
#[derive(Clone, Debug)]
pub struct Tensor {
    file: Arc<MappedFile>,
    bytes: Range<usize>,
    /// Numbers of one row: the last dimension.
    row_length: usize,
}

impl Checkpoint {
    /// Maps the file and checks its header.
    pub fn open(path: &Path) -> Result<Checkpoint, ModelError> {
        let file =
            MappedFile::open(path).map_err(|reason| ModelError::Read { path: path.to_owned(), reason })?;
        let (header, tensors) = SafeTensors::read_metadata(file.bytes()).map_err(|error| {
            first_damage(path, file.bytes()).unwrap_or_else(|| ModelError::Content {
                path: path.to_owned(),
                problem: format!("{error}: the file is corrupt, pull the model again"),
            })
        })?;
        Ok(Checkpoint {
            path: path.to_owned(),
            file: Arc::new(file),
            tensors,
            data_start: LENGTH_BYTES + header,
        })
    }

    /// Whether there is such a tensor.
    pub fn has(&self, name: &str) -> bool {
        self.tensors.info(name).is_some()
    }

    /// The tensor of this name, if it is 32-bit floats of this shape.
    pub fn tensor(&self, name: &str, shape: &[usize]) -> Result<Tensor, ModelError> {
        let fault =
            |problem| ModelError::Tensor { path: self.path.clone(), tensor: name.to_owned(), problem };
        let info = self.tensors.info(name).ok_or_else(|| fault(TensorProblem::Missing))?;
        if info.dtype != Dtype::F32 {
            return Err(fault(TensorProblem::Kind { found: info.dtype.to_string() }));
        }
        if info.shape != shape {
            return Err(fault(TensorProblem::Shape { wanted: shape.to_owned(), found: info.shape.clone() }));
        }
        let (start, end) = info.data_offsets;
        Ok(Tensor {
            file: Arc::clone(&self.file),
            bytes: self.data_start + start..self.data_start + end,
            row_length: shape.last().copied().unwrap_or(1),
        })
    }
}

impl Tensor {
    /// The numbers, each as its four bytes.
    pub fn floats(&self) -> &[[u8; 4]] {
        self.file.bytes()[self.bytes.clone()].as_chunks().0
    }

    /// The numbers of one row.
    pub fn row(&self, index: usize) -> &[[u8; 4]] {
        &self.floats()[index * self.row_length..][..self.row_length]
    }

    /// A copy of the numbers.
    pub fn to_vec(&self) -> Vec<f32> {
        self.floats().iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
    }
}

/// The first tensor that is wrong, in a file whose header was refused; `None` if the header cannot be read at all.
fn first_damage(path: &Path, file: &[u8]) -> Option<ModelError> {
    let (length, rest) = file.split_first_chunk::<LENGTH_BYTES>()?;
    let length = usize::try_from(u64::from_le_bytes(*length)).ok()?;
    let header: serde_json::Map<String, serde_json::Value> =
        serde_json::from_slice(rest.get(..length)?).ok()?;
    let data_start = LENGTH_BYTES + length;
    let mut damages = Vec::new();
    for (tensor, entry) in header.into_iter().filter(|(name, _)| name != "__metadata__") {
        let (start, problem) = match serde_json::from_value::<TensorInfo>(entry) {
            Ok(info) => (info.data_offsets.0, damage(&info, data_start, file.len())),
            Err(error) => (0, Some(corrupt(error))),
        };
        damages.extend(problem.map(|problem| (start, tensor, problem)));
    }
    let (_, tensor, problem) = damages.into_iter().min_by_key(|(start, ..)| *start)?;
    let path = path.to_owned();
    Some(ModelError::Tensor { path, tensor, problem })
}

fn damage(info: &TensorInfo, data_start: usize, file_length: usize) -> Option<TensorProblem> {
    let (start, end) = info.data_offsets;
    let numbers = info.shape.iter().try_fold(1_usize, |product, size| product.checked_mul(*size));
    let bytes = numbers.and_then(|numbers| numbers.checked_mul(info.dtype.bitsize())).map(|bits| bits / 8);
    if end.checked_sub(start) != bytes {
        return Some(corrupt(format!("{:?} {} in bytes {start} to {end}", info.shape, info.dtype)));
    }
    let end = data_start.saturating_add(end);
    (end > file_length).then_some(TensorProblem::Truncated { end: end as u64, length: file_length as u64 })
}

fn corrupt(reason: impl ToString) -> TensorProblem {
    let reason = reason.to_string();
    TensorProblem::Corrupt { reason }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// A file with this header, and `data` bytes behind it.
    fn open(header: &str, data: usize) -> Result<Checkpoint, String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend(header.as_bytes());
        file.extend(std::iter::repeat_n(0x40, data));
        fs::write(&path, file).unwrap();
        let sentence = |error: ModelError| error.to_string().replace(&*path.to_string_lossy(), "FILE");
        Checkpoint::open(&path).map_err(sentence)
    }

    const TWO: &str = r#"{"__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]}}"#;

    #[test]
    fn a_tensor_is_had_by_name_and_shape() {
        let checkpoint = open(TWO, 32).unwrap();
        let a = checkpoint.tensor("a", &[2, 3]).unwrap();
        assert_eq!(a.to_vec(), [f32::from_le_bytes([0x40; 4]); 6]);
        assert_eq!(a.row(1).len(), 3);
        let error = |name: &str, shape: &[usize]| match checkpoint.tensor(name, shape).unwrap_err() {
            ModelError::Tensor { tensor, problem, .. } => format!("{tensor} {problem}"),
            other => panic!("{other}"),
        };
        assert_eq!(error("a", &[3, 2]), "a has the shape [2, 3] and should have [3, 2]");
        assert_eq!(error("b", &[4]), "b holds BF16; only F32 is supported");
        assert_eq!(error("c", &[4]), "c is missing");
    }

    #[test]
    fn a_damaged_file_is_refused_and_the_damaged_tensor_named() {
        for (header, data, sentence) in [
            (TWO.to_owned(), 31, "FILE: tensor `b` ends at byte"),
            (TWO.to_owned(), 20, "FILE: tensor `a` ends at byte"),
            (TWO.replace("[2, 3]", "[2, 4]"), 32, "FILE: tensor `a` is described wrongly ([2, 4] F32"),
            (TWO.replace("[24, 32]", "[24, 16]"), 32, "FILE: tensor `b` is described wrongly"),
            (TWO.replace("BF16", "F7"), 32, "FILE: tensor `b` is described wrongly (unknown variant `F7`"),
            (TWO.to_owned(), 40, "FILE: incomplete metadata"),
            ("{".to_owned(), 0, "FILE: invalid JSON"),
        ] {
            let error = open(&header, data).unwrap_err();
            assert!(error.starts_with(sentence), "{error}");
        }
    }

    #[test]
    fn a_file_too_short_for_a_header_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        for content in [&[][..], &[1, 2, 3], &[255; 8], &[9, 0, 0, 0, 0, 0, 0, 0, b'{']] {
            let path = folder.path().join("model.safetensors");
            fs::write(&path, content).unwrap();
            let error = Checkpoint::open(&path).unwrap_err().to_string();
            assert!(error.contains("pull the model again"), "{content:?}: {error}");
        }
    }
}
