//! A model on disk: what its folder says about it, and its weights.
//!
//! The layout is that of sentence-transformers. [`ModelDir::open`] reads the small files and the header of the weights,
//! so whoever holds a [`ModelDir`] holds a model whose configuration is understood and whose tensors lie inside their
//! file. The engine asks for tensors by name and shape; whatever is not as wanted is a [`ModelError`] that names it.
//!
//! A folder says more than is read here. What would change the vectors and is not understood is refused; what would not
//! (dropout, the version of a library) is ignored, for the files belong to others and grow keys every year.

mod bert;
mod checkpoint;
mod error;
#[expect(unsafe_code, reason = "a mapped file is memory that another process could change")]
mod mapped;
mod sentence;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;

pub use bert::{Activation, BertConfig};
pub use checkpoint::{Checkpoint, Tensor};
pub use error::{ModelError, TensorProblem};
pub use mapped::MappedFile;
pub use sentence::{Pooling, SentenceConfig};

const CONFIG: &str = "config.json";
const WEIGHTS: &str = "model.safetensors";

/// A model whose folder was read and understood.
#[derive(Debug)]
pub struct ModelDir {
    /// Where it lies.
    pub folder: PathBuf,
    /// The transformer.
    pub bert: BertConfig,
    /// What makes one vector of its tokens.
    pub sentence: SentenceConfig,
    /// The weights.
    pub checkpoint: Checkpoint,
}

impl ModelDir {
    /// Reads the folder; the weights are mapped, not read.
    pub fn open(folder: &Path) -> Result<ModelDir, ModelError> {
        let bert = bert::read(&folder.join(CONFIG))?;
        let sentence = sentence::read(folder, &bert)?;
        let checkpoint = Checkpoint::open(&folder.join(WEIGHTS))?;
        Ok(ModelDir { folder: folder.to_owned(), bert, sentence, checkpoint })
    }
}

/// The file, read as JSON; a problem names the file.
fn json<T: DeserializeOwned>(path: &Path) -> Result<T, ModelError> {
    match optional_json(path)? {
        Some(read) => Ok(read),
        None => {
            Err(ModelError::Read { path: path.to_owned(), reason: io::Error::from(io::ErrorKind::NotFound) })
        }
    }
}

/// The file, if there is one.
fn optional_json<T: DeserializeOwned>(path: &Path) -> Result<Option<T>, ModelError> {
    let text = match fs::read(path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(reason) => {
            let path = path.to_owned();
            return Err(ModelError::Read { path, reason });
        }
    };
    let read = serde_json::from_slice(&text)
        .map_err(|error| ModelError::Content { path: path.to_owned(), problem: error.to_string() })?;
    Ok(Some(read))
}
