//! The weights: `model.safetensors`, or the files among which `model.safetensors.index.json` shares them out; mapped.
//!
//! The headers are read and checked at once, so that a tensor that is handed out lies inside its file and has the shape
//! that was asked for. The numbers are not looked at here: that would read the whole file at every start. The engine
//! checks those that it takes ([`Tensor::check_finite`]).
//!
//! Weights in Python's pickle format are refused: to read them is to run the program that they are.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, Metadata, TensorInfo};
use serde::Deserialize;

use super::tensor::{Kind, Origin, Tensor};
use super::{MappedFile, ModelError, TensorProblem, formats, json};

/// The length of the header, as eight bytes, stands before the header.
const LENGTH_BYTES: usize = 8;
const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
const PICKLES: [&str; 2] = ["pytorch_model.bin", "pytorch_model.bin.index.json"];

/// The tensors of a model, or of a part of one.
#[derive(Clone, Debug)]
pub struct Checkpoint {
    /// The file that says what there is: the only one, or the index.
    path: PathBuf,
    files: Arc<[TensorFile]>,
    /// By the index, the file of each tensor.
    places: Option<Arc<BTreeMap<String, usize>>>,
}

/// One file of tensors.
#[derive(Debug)]
struct TensorFile {
    path: PathBuf,
    file: Arc<MappedFile>,
    tensors: Metadata,
    data_start: usize,
}

#[derive(Deserialize)]
struct RawIndex {
    /// The file of each tensor.
    weight_map: BTreeMap<String, String>,
}

impl Checkpoint {
    /// Maps the weights that lie in this folder and checks their headers.
    pub fn open(folder: &Path) -> Result<Checkpoint, ModelError> {
        let there = |name: &str| folder.join(name).is_file();
        if there(SINGLE) {
            return Checkpoint::single(folder.join(SINGLE));
        }
        if there(INDEX) {
            return Checkpoint::sharded(folder, folder.join(INDEX));
        }
        if let Some(pickle) = PICKLES.into_iter().find(|name| there(name)) {
            let problem = formats::pickle(folder);
            return Err(ModelError::Content { path: folder.join(pickle), problem });
        }
        // There is none: the sentence is that of the file that most models have.
        Checkpoint::single(folder.join(SINGLE))
    }

    fn single(path: PathBuf) -> Result<Checkpoint, ModelError> {
        let file = TensorFile::open(path.clone())?;
        Ok(Checkpoint { path, files: Arc::new([file]), places: None })
    }

    fn sharded(folder: &Path, index: PathBuf) -> Result<Checkpoint, ModelError> {
        let RawIndex { weight_map } = json(&index)?;
        let mut files: Vec<(String, TensorFile)> = Vec::new();
        let mut places = BTreeMap::new();
        for (tensor, name) in weight_map {
            if name.is_empty() || name.contains(['/', '\\']) || name == ".." {
                let reason = format!("the index says that it is in `{name}`, which is not a file beside it");
                let problem = TensorProblem::Corrupt { reason };
                return Err(fault(index, tensor, problem));
            }
            let place = match files.iter().position(|(known, _)| *known == name) {
                Some(place) => place,
                None => {
                    let file = TensorFile::open(folder.join(&name))?;
                    files.push((name, file));
                    files.len() - 1
                }
            };
            let (_, file) = &files[place];
            if file.tensors.info(&tensor).is_none() {
                let path = file.path.clone();
                return Err(fault(path, tensor, TensorProblem::Missing));
            }
            places.insert(tensor, place);
        }
        let files = files.into_iter().map(|(_, file)| file).collect();
        Ok(Checkpoint { path: index, files, places: Some(Arc::new(places)) })
    }

    /// The file that says what there is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether there is such a tensor.
    pub fn has(&self, name: &str) -> bool {
        self.find(name).is_some()
    }

    /// The tensor of this name, if it is floats of this shape.
    pub fn tensor(&self, name: &str, shape: &[usize]) -> Result<Tensor, ModelError> {
        let fault = |path: &Path, problem| fault(path.to_owned(), name.to_owned(), problem);
        let (file, info) = self.find(name).ok_or_else(|| fault(&self.path, TensorProblem::Missing))?;
        let kind = match info.dtype {
            Dtype::F32 => Kind::F32,
            Dtype::F16 => Kind::F16,
            Dtype::BF16 => Kind::Bf16,
            // The list is another crate's and grows.
            other => return Err(fault(&file.path, TensorProblem::Kind { found: other.to_string() })),
        };
        if info.shape != shape {
            let (wanted, found) = (shape.to_owned(), info.shape.clone());
            return Err(fault(&file.path, TensorProblem::Shape { wanted, found }));
        }
        let (start, end) = info.data_offsets;
        let bytes = file.data_start + start..file.data_start + end;
        let origin = Origin { path: file.path.clone(), name: name.to_owned() };
        Ok(Tensor::new(origin, Arc::clone(&file.file), bytes, kind, shape))
    }

    /// The names of all tensors.
    pub fn names(&self) -> Vec<String> {
        match &self.places {
            Some(places) => places.keys().cloned().collect(),
            None => self.files[0].tensors.offset_keys(),
        }
    }

    /// A tensor that nothing takes.
    pub(crate) fn unused(&self, name: String) -> ModelError {
        fault(self.path.clone(), name, TensorProblem::Unused)
    }

    /// Refuses tensors that nothing takes: what they would add to the model would be missing from what is served.
    pub fn refuse_others(&self, is_known: impl Fn(&str) -> bool) -> Result<(), ModelError> {
        let mut names = self.names();
        names.sort();
        let unused = names.into_iter().filter(|name| !is_known(name));
        let problems = unused.map(|name| self.unused(name)).collect();
        ModelError::of_all(problems).map_or(Ok(()), Err)
    }

    fn find(&self, name: &str) -> Option<(&TensorFile, &TensorInfo)> {
        let file = match &self.places {
            Some(places) => &self.files[*places.get(name)?],
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
                problem: format!("{error}: the file is corrupt, pull the model again"),
            })
        })?;
        Ok(TensorFile { path, file: Arc::new(file), tensors, data_start: LENGTH_BYTES + header })
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
    Some(fault(path, tensor, problem))
}

fn fault(path: PathBuf, tensor: String, problem: TensorProblem) -> ModelError {
    ModelError::Tensor { path, tensor, problem, deciding: None }
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
    fn write(path: &Path, header: &str, data: usize) {
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend(header.as_bytes());
        file.extend(std::iter::repeat_n(0x40, data));
        fs::write(path, file).unwrap();
    }

    /// What it says, without the place of the folder.
    fn sentence(folder: &Path, error: &ModelError) -> String {
        error.to_string().replace(&*folder.to_string_lossy(), "FOLDER")
    }

    fn open(header: &str, data: usize) -> Result<Checkpoint, String> {
        let folder = tempfile::tempdir().unwrap();
        write(&folder.path().join(SINGLE), header, data);
        Checkpoint::open(folder.path()).map_err(|error| sentence(folder.path(), &error))
    }

    const THREE: &str = r#"{"__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
        "c": {"dtype": "I8", "shape": [4], "data_offsets": [32, 36]}}"#;

    #[test]
    fn a_tensor_is_had_by_name_and_shape() {
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
        assert_eq!(error("a", &[3, 2]), "a has the shape [2, 3] and should have [3, 2]");
        assert_eq!(error("c", &[4]), "c holds I8; F32, F16 and BF16 are supported");
        assert_eq!(error("d", &[4]), "d is missing");
    }

    #[test]
    fn a_damaged_file_is_refused_and_the_damaged_tensor_named() {
        for (header, data, sentence) in [
            (THREE.to_owned(), 31, "FOLDER/model.safetensors: tensor `b` ends at byte"),
            (THREE.to_owned(), 20, "FOLDER/model.safetensors: tensor `a` ends at byte"),
            (
                THREE.replace("[2, 3]", "[2, 4]"),
                36,
                "FOLDER/model.safetensors: tensor `a` is described wrongly ([2, 4] F32",
            ),
            (
                THREE.replace("[24, 32]", "[24, 16]"),
                36,
                "FOLDER/model.safetensors: tensor `b` is described wrongly",
            ),
            (
                THREE.replace("BF16", "F7"),
                36,
                "FOLDER/model.safetensors: tensor `b` is described wrongly (unknown variant `F7`",
            ),
            (THREE.to_owned(), 40, "FOLDER/model.safetensors: incomplete metadata"),
            ("{".to_owned(), 0, "FOLDER/model.safetensors: invalid JSON"),
        ] {
            let error = open(&header, data).unwrap_err();
            assert!(error.starts_with(sentence), "{error}");
        }
    }

    #[test]
    fn a_file_too_short_for_a_header_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        for content in [&[][..], &[1, 2, 3], &[255; 8], &[9, 0, 0, 0, 0, 0, 0, 0, b'{']] {
            fs::write(folder.path().join(SINGLE), content).unwrap();
            let error = Checkpoint::open(folder.path()).unwrap_err().to_string();
            assert!(error.contains("pull the model again"), "{content:?}: {error}");
        }
    }

    #[test]
    fn pickled_weights_are_refused_with_what_to_do() {
        let folder = tempfile::tempdir().unwrap();
        let refused = || sentence(folder.path(), &Checkpoint::open(folder.path()).unwrap_err());
        assert!(refused().starts_with("FOLDER/model.safetensors cannot be read"), "{}", refused());
        fs::write(folder.path().join("pytorch_model.bin"), "a program").unwrap();
        let error = refused();
        assert!(error.starts_with("FOLDER/pytorch_model.bin: weights in Python's pickle format"), "{error}");
        assert!(error.contains("save_pretrained"), "{error}");
        write(&folder.path().join(SINGLE), THREE, 36);
        Checkpoint::open(folder.path()).unwrap();
    }

    /// A folder of two files, and an index that is this.
    fn open_shards(index: &str) -> Result<Checkpoint, String> {
        let folder = tempfile::tempdir().unwrap();
        for (name, tensor, dtype, bytes) in [("one", "a", "F32", 8), ("two", "b", "F16", 4)] {
            let header = format!(
                r#"{{"{tensor}": {{"dtype": "{dtype}", "shape": [2], "data_offsets": [0, {bytes}]}}}}"#
            );
            write(&folder.path().join(format!("{name}.safetensors")), &header, bytes);
        }
        fs::write(folder.path().join(INDEX), index).unwrap();
        Checkpoint::open(folder.path()).map_err(|error| sentence(folder.path(), &error))
    }

    #[test]
    fn tensors_are_found_in_the_files_that_the_index_names() {
        let index = r#"{"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}"#;
        let checkpoint = open_shards(index).unwrap();
        assert_eq!(checkpoint.tensor("a", &[2]).unwrap().to_vec(), [f32::from_le_bytes([0x40; 4]); 2]);
        // 0x4040 as F16: 2^(16-15) * (1 + 64/1024).
        assert_eq!(checkpoint.tensor("b", &[2]).unwrap().to_vec(), [2.125; 2]);
        let fault = |name: &str, shape: &[usize]| checkpoint.tensor(name, shape).unwrap_err().to_string();
        assert!(fault("b", &[3]).contains("two.safetensors: tensor `b` has the shape"));
        assert!(fault("c", &[2]).contains("index.json: tensor `c` is missing"));
    }

    #[test]
    fn an_index_that_its_files_do_not_bear_out_is_refused() {
        for (index, sentence) in [
            (r#"{"weight_map": {"c": "one.safetensors"}}"#, "FOLDER/one.safetensors: tensor `c` is missing"),
            (r#"{"weight_map": {"a": "three.safetensors"}}"#, "FOLDER/three.safetensors cannot be read"),
            (r#"{"weight_map": {"a": "../one.safetensors"}}"#, "index.json: tensor `a` is described wrongly"),
            (r#"{"weights": {}}"#, "index.json: missing field `weight_map`"),
        ] {
            let error = open_shards(index).unwrap_err();
            assert!(error.contains(sentence), "{error}");
        }
    }
}
