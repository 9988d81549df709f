//! A model on disk: what its folder says about it, and its weights.
//!
//! The layout is that of sentence-transformers. [`ModelDir::open`] reads the small files and the header of the weights,
//! so whoever holds a [`ModelDir`] holds a model whose configuration is understood and whose tensors lie inside their
//! file. The engine asks for tensors by name and shape; whatever is not as wanted is a [`ModelError`] that names it.
//!
//! A replica serves what the checkpoint's own libraries compute, or refuses the checkpoint by the name of the file and the
//! key. So no key is ignored unless it is listed, with the reason why it changes nothing (dropout, the version of a
//! library); `fields` holds to that. The same goes for tensors: one that nothing takes is refused unless it is listed.

mod architecture;
mod checkpoint;
mod error;
mod fields;
mod finite;
pub(crate) mod formats;
mod head;
#[expect(unsafe_code, reason = "a mapped file is memory that another process could change")]
mod mapped;
mod prompts;
#[cfg(test)]
mod published;
mod sentence;
mod template;
mod tensor;
mod tokenizer;
mod yes_no;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

pub use architecture::{
    Activation, Architecture, Attention, DistanceBias, Embedding, FeedForward, FeedForwardNames, HeadPooling,
    HeadSource, HeadStep, Layer, LayerNames, LearntPositions, Logits, Names, NormKind, NormSpec, Part,
    Placement, ProjectionNames, Reach, Rope, SizeKeys, YesNo,
};
pub use checkpoint::Checkpoint;
pub use error::{Deciding, ModelError, TensorProblem};
use head::Head;
pub use head::{LabelActivation, LabelHead, MAX_LABELS};
pub use mapped::MappedFile;
pub use prompts::Prompts;
use replica_core::DeploymentTask;
use sentence::{Behind, Purpose, Sizes, Stages};
pub use sentence::{Dense, DenseActivation, Pooling, SentenceConfig};
pub use template::PairTemplate;
pub use tensor::{Numbers, Tensor};
pub use tokenizer::TokenizerConfig;
pub(crate) use tokenizer::{TOKENS, TokenizerClass, Words};

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
    /// What the files beside tokenizer.json say of the tokenizer.
    pub tokenizer: TokenizerConfig,
    /// Whether it may be meant to judge pairs and nothing says how: a language model alone, for no stated task. Then it
    /// makes vectors, and does not rank.
    pub is_bare: bool,
    /// The weights.
    pub checkpoint: Checkpoint,
}

impl ModelDir {
    /// Reads the folder for whatever task its files say; the weights are mapped, not read.
    pub fn open(folder: &Path) -> Result<ModelDir, ModelError> {
        ModelDir::open_for(folder, None)
    }

    /// Reads the folder of a model for this task, and refuses one that is for another.
    pub fn open_for(folder: &Path, task: Option<DeploymentTask>) -> Result<ModelDir, ModelError> {
        let config = folder.join(CONFIG);
        let raw: Map<String, Value> = json(&config)?;
        let mut architecture = Architecture::read(&config, &raw)?;
        let stages = Stages::read(folder)?;
        let behind = stages.behind(folder);
        let settings = prompts::read(folder)?;
        let refuse = |problem| ModelError::Content { path: config.clone(), problem };
        let continues = architecture.continues();
        let given = head::Given { task, continues, is_reranker: false };
        let given = head::Given {
            is_reranker: given.is_open(&settings, &behind) && template::judges_pairs(folder),
            ..given
        };
        let head = head::read(&raw, &settings, &behind, &given).map_err(refuse)?;
        let prompts = settings.prompts.clone();
        let (head, template, purpose) = match head {
            None => (None, None, Purpose::States),
            Some(Head::Layers(head)) => (Some(head), None, Purpose::Labels),
            Some(Head::Words(head)) => {
                let words = match &behind {
                    Behind::LogitScore(stage) => yes_no::read(stage, architecture.vocabulary)?,
                    Behind::Pooling | Behind::Other | Behind::Unlisted => {
                        yes_no::by_default(folder, architecture.vocabulary)?
                    }
                };
                architecture.judge_by(words).map_err(refuse)?;
                let listed = behind != Behind::Unlisted;
                let template = PairTemplate::read(folder, listed, prompts.of_default())?;
                (Some(head), Some(template), Purpose::Words)
            }
        };
        if purpose != Purpose::States && behind != Behind::Unlisted {
            settings.check_pairs(folder)?;
        }
        if purpose == Purpose::Labels && behind == Behind::Unlisted && task != Some(DeploymentTask::Classify)
        {
            template::refuse_for_labels(folder, head.as_ref())?;
        }
        if purpose == Purpose::States {
            // Rows are pooled: a head of labels has no part in it.
            architecture.head = None;
            if behind == Behind::Pooling {
                settings.check_vectors(folder)?;
            }
        }
        let class = raw.get("tokenizer_class").and_then(Value::as_str);
        let tokenizer = TokenizerConfig::read(folder, &architecture.family, class)?;
        let sizes = Sizes {
            hidden: architecture.hidden,
            positions: architecture.positions,
            rows: architecture.embedding.positions.map_or(architecture.positions, |learnt| learnt.rows),
            key: architecture.keys.positions,
        };
        let mut sentence = stages.config(folder, sizes, purpose, &tokenizer)?;
        sentence.truncate = settings.truncate_dim.filter(|_| purpose == Purpose::States);
        let checkpoint = Checkpoint::open(folder)?;
        let is_bare = purpose == Purpose::States && task.is_none() && continues && behind == Behind::Unlisted;
        Ok(ModelDir {
            folder: folder.to_owned(),
            architecture,
            sentence,
            head,
            prompts,
            template,
            tokenizer,
            is_bare,
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
