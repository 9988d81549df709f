//! A model on disk: what its folder says about it, and its weights.
//!
//! The layout is that of sentence-transformers. [`ModelDir::open`] reads the small files and the header of the weights,
//! so whoever holds a [`ModelDir`] holds a model whose configuration is understood and whose tensors lie inside their
//! file. The engine asks for tensors by name and shape; whatever is not as wanted is a [`ModelError`] that names it.
//!
//! A folder says more than is read here. What would change the vectors and is not understood is refused; what would not
//! (dropout, the version of a library) is ignored, for the files belong to others and grow keys every year.

mod architecture;
mod checkpoint;
mod error;
mod finite;
pub(crate) mod formats;
mod head;
#[expect(unsafe_code, reason = "a mapped file is memory that another process could change")]
mod mapped;
mod prompts;
mod sentence;
mod template;
mod tensor;
mod yes_no;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;

pub use architecture::{
    Activation, Architecture, Attention, DistanceBias, Embedding, FeedForward, FeedForwardNames, HeadPooling,
    HeadSource, HeadStep, Layer, LayerNames, LearntPositions, Logits, Names, NormKind, NormSpec, Placement,
    ProjectionNames, Reach, Rope, YesNo,
};
pub use checkpoint::Checkpoint;
pub use error::{ModelError, TensorProblem};
use head::Head;
pub use head::{LabelActivation, LabelHead, MAX_LABELS};
pub use mapped::MappedFile;
pub use prompts::Prompts;
use sentence::{Behind, Stages};
pub use sentence::{Dense, DenseActivation, Pooling, SentenceConfig};
pub use template::PairTemplate;
pub use tensor::{Numbers, Tensor};

const CONFIG: &str = "config.json";

/// A model whose folder was read and understood.
#[derive(Debug)]
pub struct ModelDir {
    /// Where it lies.
    pub folder: PathBuf,
    /// The transformer.
    pub architecture: Architecture,
    /// What makes one vector of its tokens.
    pub sentence: SentenceConfig,
    /// What its raw numbers are, if it is a sequence classifier.
    pub head: Option<LabelHead>,
    /// What it wants before texts.
    pub prompts: Prompts,
    /// What makes one text of a pair, if it is a language model that judges pairs; others join them by their tokens.
    pub template: Option<PairTemplate>,
    /// The weights.
    pub checkpoint: Checkpoint,
}

impl ModelDir {
    /// Reads the folder; the weights are mapped, not read.
    pub fn open(folder: &Path) -> Result<ModelDir, ModelError> {
        let config = folder.join(CONFIG);
        let mut architecture = Architecture::read(&config)?;
        let stages = Stages::read(folder)?;
        let behind = stages.behind(folder);
        let prompts = prompts::read(folder)?;
        let (head, template) = match head::read(folder, &config, &behind)? {
            None => (None, None),
            Some(Head::Layers(head)) => (Some(head), None),
            Some(Head::Words(head)) => {
                let words = match &behind {
                    Behind::LogitScore(stage) => yes_no::read(stage, architecture.vocabulary)?,
                    Behind::Pooling | Behind::Other | Behind::Unlisted => {
                        yes_no::by_default(folder, architecture.vocabulary)?
                    }
                };
                let refuse = |problem| ModelError::Content { path: config.clone(), problem };
                architecture.judge_by(words).map_err(refuse)?;
                let listed = behind != Behind::Unlisted;
                (Some(head), Some(PairTemplate::read(folder, listed, prompts.of_default())?))
            }
        };
        let sentence = stages.config(folder, architecture.hidden, architecture.positions, head.is_some())?;
        let checkpoint = Checkpoint::open(folder)?;
        Ok(ModelDir {
            folder: folder.to_owned(),
            architecture,
            sentence,
            head,
            prompts,
            template,
            checkpoint,
        })
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
