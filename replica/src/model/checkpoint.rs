//! Weights of a model: `model.safetensors`, or the shards listed by `model.safetensors.index.json`; memory-mapped.
//!
//! The headers are validated on opening, so that a returned tensor lies inside its file and has the requested shape.
//! The numbers are not checked here, because that would read the whole file at every startup. The engine checks those
//! that it uses ([`Tensor::check_finite`]).
//!
//! Weights in Python's pickle format are rejected: loading a pickle executes the program that it contains.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, Metadata, TensorInfo};
use serde::Deserialize;

use super::shortened::{shortened_shape, shortened_text};
use super::tensor::{Kind, Origin, Tensor};
use super::{MappedFile, ModelError, TensorProblem, formats, json};

/// Bytes of the header length, which precedes the header.
const LENGTH_BYTES: usize = 8;
const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
const PICKLES: [&str; 2] = ["pytorch_model.bin", "pytorch_model.bin.index.json"];

/// Tensors of a model or of one of its modules.
#[derive(Clone, Debug)]
pub struct ModelCheckpoint {
    /// The file itself, or the index of the shards.
    path: PathBuf,
    files: Arc<[TensorFile]>,
    /// Index into `files` by tensor name; absent for a single file.
    file_indices: Option<Arc<BTreeMap<String, usize>>>,
}

/// File of tensors.
#[derive(Debug)]
struct TensorFile {
    path: PathBuf,
    file: Arc<MappedFile>,
    tensors: Metadata,
    data_start: usize,
}

#[derive(Deserialize)]
struct RawIndex {
    /// File name of each tensor.
    weight_map: BTreeMap<String, String>,
}

impl ModelCheckpoint {
    /// Maps the weights in this folder and validates their headers.
    pub fn open(folder: &Path) -> Result<ModelCheckpoint, ModelError> {
        let exists = |name: &str| folder.join(name).is_file();
        if exists(SINGLE) {
            return ModelCheckpoint::single(folder.join(SINGLE));
        }
        if exists(INDEX) {
            return ModelCheckpoint::sharded(folder, folder.join(INDEX));
        }
        if let Some(pickle) = PICKLES.into_iter().find(|name| exists(name)) {
            let problem = formats::pickle(folder);
            return Err(ModelError::Content { path: folder.join(pickle), problem });
        }
        // No weights exist; the error names the file that most models have.
        ModelCheckpoint::single(folder.join(SINGLE))
    }

    fn single(path: PathBuf) -> Result<ModelCheckpoint, ModelError> {
        let file = TensorFile::open(path.clone())?;
        Ok(ModelCheckpoint { path, files: Arc::new([file]), file_indices: None })
    }

    fn sharded(folder: &Path, index: PathBuf) -> Result<ModelCheckpoint, ModelError> {
        let RawIndex { weight_map } = json(&index)?;
        let mut files: Vec<(String, TensorFile)> = Vec::new();
        let mut file_indices = BTreeMap::new();
        for (tensor, name) in weight_map {
            if name.is_empty() || name.contains(['/', '\\']) || name == ".." {
                let reason =
                    format!("the index locates it in `{name}`, which is not a file in the same folder");
                let problem = TensorProblem::Corrupt { reason };
                return Err(tensor_error(index, tensor, problem));
            }
            let file_index = match files.iter().position(|(known, _)| *known == name) {
                Some(file_index) => file_index,
                None => {
                    let file = TensorFile::open(folder.join(&name))?;
                    files.push((name, file));
                    files.len() - 1
                }
            };
            let (_, file) = &files[file_index];
            if file.tensors.info(&tensor).is_none() {
                let path = file.path.clone();
                return Err(tensor_error(path, tensor, TensorProblem::Missing));
            }
            file_indices.insert(tensor, file_index);
        }
        let files = files.into_iter().map(|(_, file)| file).collect();
        Ok(ModelCheckpoint { path: index, files, file_indices: Some(Arc::new(file_indices)) })
    }

    /// Returns the path of the file, or of the index of the shards.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns whether the tensor exists.
    pub fn has(&self, name: &str) -> bool {
        self.find(name).is_some()
    }

    /// Returns the tensor with this name, if it has floats and this shape.
    pub fn tensor(&self, name: &str, shape: &[usize]) -> Result<Tensor, ModelError> {
        let tensor_error = |path: &Path, problem| tensor_error(path.to_owned(), name.to_owned(), problem);
        let (file, info) = self.find(name).ok_or_else(|| tensor_error(&self.path, TensorProblem::Missing))?;
        let kind = match info.dtype {
            Dtype::F32 => Kind::F32,
            Dtype::F16 => Kind::F16,
            Dtype::BF16 => Kind::Bf16,
            // The enum belongs to another crate and is non-exhaustive.
            other => return Err(tensor_error(&file.path, TensorProblem::Kind { actual: other.to_string() })),
        };
        if info.shape != shape {
            let (expected, actual) = (shape.to_owned(), info.shape.clone());
            return Err(tensor_error(&file.path, TensorProblem::Shape { expected, actual }));
        }
        let (start, end) = info.data_offsets;
        let bytes = file.data_start + start..file.data_start + end;
        let origin = Origin { path: file.path.clone(), name: name.to_owned() };
        Ok(Tensor::new(origin, Arc::clone(&file.file), bytes, kind, shape))
    }

    /// Returns the names of all tensors.
    pub fn names(&self) -> Vec<String> {
        match &self.file_indices {
            Some(file_indices) => file_indices.keys().cloned().collect(),
            None => self.files[0].tensors.offset_keys(),
        }
    }

    /// Returns the error of an unused tensor.
    pub(crate) fn unused(&self, name: String) -> ModelError {
        tensor_error(self.path.clone(), name, TensorProblem::Unused)
    }

    /// Rejects unused tensors: the served model would lack their contribution.
    pub fn refuse_others(&self, is_known: impl Fn(&str) -> bool) -> Result<(), ModelError> {
        let mut names = self.names();
        names.sort();
        let unused = names.into_iter().filter(|name| !is_known(name));
        let problems = unused.map(|name| self.unused(name)).collect();
        ModelError::of_all(problems).map_or(Ok(()), Err)
    }

    fn find(&self, name: &str) -> Option<(&TensorFile, &TensorInfo)> {
        let file = match &self.file_indices {
            Some(file_indices) => &self.files[*file_indices.get(name)?],
            None => &self.files[0],
        };
        Some((file, file.tensors.info(name)?))
    }
}

impl TensorFile {
    fn open(path: PathBuf) -> Result<TensorFile, ModelError> {
        let file =
            MappedFile::open(&path).map_err(|reason| ModelError::Read { path: path.clone(), reason })?;
        let (header, tensors) = SafeTensors::read_metadata(file.bytes()).map_err(|error| {
            first_damage(&path, file.bytes()).unwrap_or_else(|| ModelError::Content {
                path: path.clone(),
                problem: format!(
                    "{}: the file is truncated or invalid; save the model again",
                    shortened_text(&error.to_string())
                ),
            })
        })?;
        Ok(TensorFile { path, file: Arc::new(file), tensors, data_start: LENGTH_BYTES + header })
    }
}

/// Returns the first invalid tensor of a file whose header was rejected; `None` if the header cannot be parsed.
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
    Some(tensor_error(path, tensor, problem))
}

fn tensor_error(path: PathBuf, tensor: String, problem: TensorProblem) -> ModelError {
    ModelError::Tensor { path, tensor, problem, deciding: None }
}

fn damage(info: &TensorInfo, data_start: usize, file_length: usize) -> Option<TensorProblem> {
    let (start, end) = info.data_offsets;
    let numbers = info.shape.iter().try_fold(1_usize, |product, size| product.checked_mul(*size));
    let bytes = numbers.and_then(|numbers| numbers.checked_mul(info.dtype.bitsize())).map(|bits| bits / 8);
    if end.checked_sub(start) != bytes {
        return Some(corrupt(format!(
            "{} {} in bytes {start} to {end}",
            shortened_shape(&info.shape),
            info.dtype
        )));
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

    /// Writes a file with this header, followed by `data` bytes.
    fn write(path: &Path, header: &str, data: usize) {
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend(header.as_bytes());
        file.extend(std::iter::repeat_n(0x40, data));
        fs::write(path, file).unwrap();
    }

    /// Returns the error message without the path of the folder.
    fn sentence(folder: &Path, error: &ModelError) -> String {
        error.to_string().replace(&*folder.to_string_lossy(), "FOLDER")
    }

    fn open(header: &str, data: usize) -> Result<ModelCheckpoint, String> {
        let folder = tempfile::tempdir().unwrap();
        write(&folder.path().join(SINGLE), header, data);
        ModelCheckpoint::open(folder.path()).map_err(|error| sentence(folder.path(), &error))
    }

    const THREE: &str = r#"{"__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
        "c": {"dtype": "I8", "shape": [4], "data_offsets": [32, 36]}}"#;

    #[test]
    fn a_tensor_is_found_by_name_and_shape() {
        let checkpoint = open(THREE, 36).unwrap();
        let a = checkpoint.tensor("a", &[2, 3]).unwrap();
        assert_eq!(a.to_vec(), [f32::from_le_bytes([0x40; 4]); 6]);
        assert_eq!((a.rows(), a.row(1).len()), (2, 3));
        let b = checkpoint.tensor("b", &[4]).unwrap();
        assert_eq!(b.to_vec(), [f32::from_bits(0x4040_0000); 4]);
        let error = |name: &str, shape: &[usize]| match checkpoint.tensor(name, shape).unwrap_err() {
            ModelError::Tensor { tensor, problem, .. } => format!("{tensor} {problem}"),
            other => panic!("{other}"),
        };
        assert_eq!(error("a", &[3, 2]), "a has the shape [2, 3], expected [3, 2]");
        assert_eq!(error("c", &[4]), "c has the type I8; F32, F16 and BF16 are supported");
        assert_eq!(error("d", &[4]), "d is missing");
    }

    #[test]
    fn a_damaged_file_is_rejected_with_the_damaged_tensor() {
        for (header, data, sentence) in [
            (THREE.to_owned(), 31, "FOLDER/model.safetensors: tensor `b` ends at byte"),
            (THREE.to_owned(), 20, "FOLDER/model.safetensors: tensor `a` ends at byte"),
            (
                THREE.replace("[2, 3]", "[2, 4]"),
                36,
                "FOLDER/model.safetensors: tensor `a` has an invalid entry in the header ([2, 4] F32",
            ),
            (
                THREE.replace("[24, 32]", "[24, 16]"),
                36,
                "FOLDER/model.safetensors: tensor `b` has an invalid entry in the header",
            ),
            (
                THREE.replace("BF16", "F7"),
                36,
                "FOLDER/model.safetensors: tensor `b` has an invalid entry in the header (unknown variant `F7`",
            ),
            (THREE.to_owned(), 40, "FOLDER/model.safetensors: incomplete metadata"),
            ("{".to_owned(), 0, "FOLDER/model.safetensors: invalid JSON"),
        ] {
            let error = open(&header, data).unwrap_err();
            assert!(error.starts_with(sentence), "{error}");
        }
    }

    #[test]
    fn a_file_too_short_for_a_header_is_rejected() {
        let folder = tempfile::tempdir().unwrap();
        for content in [&[][..], &[1, 2, 3], &[255; 8], &[9, 0, 0, 0, 0, 0, 0, 0, b'{']] {
            fs::write(folder.path().join(SINGLE), content).unwrap();
            let error = ModelCheckpoint::open(folder.path()).unwrap_err().to_string();
            assert!(error.contains("the file is truncated or invalid"), "{content:?}: {error}");
        }
    }

    #[test]
    fn pickled_weights_are_rejected_with_the_conversion_command() {
        let folder = tempfile::tempdir().unwrap();
        let refused = || sentence(folder.path(), &ModelCheckpoint::open(folder.path()).unwrap_err());
        assert!(refused().starts_with("FOLDER/model.safetensors cannot be read"), "{}", refused());
        fs::write(folder.path().join("pytorch_model.bin"), "a program").unwrap();
        let error = refused();
        assert!(error.starts_with("FOLDER/pytorch_model.bin: weights in Python's pickle format"), "{error}");
        assert!(error.contains("save_pretrained"), "{error}");
        write(&folder.path().join(SINGLE), THREE, 36);
        ModelCheckpoint::open(folder.path()).unwrap();
    }

    /// Opens a folder of two files with this index.
    fn open_shards(index: &str) -> Result<ModelCheckpoint, String> {
        let folder = tempfile::tempdir().unwrap();
        for (name, tensor, dtype, bytes) in [("one", "a", "F32", 8), ("two", "b", "F16", 4)] {
            let header = format!(
                r#"{{"{tensor}": {{"dtype": "{dtype}", "shape": [2], "data_offsets": [0, {bytes}]}}}}"#
            );
            write(&folder.path().join(format!("{name}.safetensors")), &header, bytes);
        }
        fs::write(folder.path().join(INDEX), index).unwrap();
        ModelCheckpoint::open(folder.path()).map_err(|error| sentence(folder.path(), &error))
    }

    #[test]
    fn tensors_are_found_in_the_files_of_the_index() {
        let index = r#"{"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}"#;
        let checkpoint = open_shards(index).unwrap();
        assert_eq!(checkpoint.tensor("a", &[2]).unwrap().to_vec(), [f32::from_le_bytes([0x40; 4]); 2]);
        // 0x4040 as F16: 2^(16-15) * (1 + 64/1024).
        assert_eq!(checkpoint.tensor("b", &[2]).unwrap().to_vec(), [2.125; 2]);
        let tensor_error =
            |name: &str, shape: &[usize]| checkpoint.tensor(name, shape).unwrap_err().to_string();
        assert!(tensor_error("b", &[3]).contains("two.safetensors: tensor `b` has the shape"));
        assert!(tensor_error("c", &[2]).contains("index.json: tensor `c` is missing"));
    }

    #[test]
    fn an_index_that_contradicts_its_files_is_rejected() {
        for (index, sentence) in [
            (r#"{"weight_map": {"c": "one.safetensors"}}"#, "FOLDER/one.safetensors: tensor `c` is missing"),
            (r#"{"weight_map": {"a": "three.safetensors"}}"#, "FOLDER/three.safetensors cannot be read"),
            (r#"{"weight_map": {"a": "../one.safetensors"}}"#, "index.json: tensor `a` has an invalid entry"),
            (r#"{"weights": {}}"#, "index.json: missing field `weight_map`"),
        ] {
            let error = open_shards(index).unwrap_err();
            assert!(error.contains(sentence), "{error}");
        }
    }
}
