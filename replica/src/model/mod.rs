//! Models on disk: configuration and weights of a model folder.
//!
//! The folder has the layout of sentence-transformers. [`ModelDir::open`] reads the small files and the headers of the
//! weights, so that a [`ModelDir`] is a model whose configuration is supported and whose tensors lie inside their
//! files. The engine requests tensors by name and shape; every deviation is a [`ModelError`] that names the tensor.
//!
//! A replica computes exactly what the checkpoint's own libraries compute, or rejects the checkpoint with the file and
//! the key. So no key is ignored unless it is listed with the reason why it has no effect (dropout, the version of a
//! library); `fields` enforces it. The same holds for tensors: an unused tensor is rejected unless it is listed.

mod architecture;
mod checkpoint;
mod error;
mod fields;
mod finite;
pub(crate) mod formats;
mod head;
#[expect(unsafe_code, reason = "a mapped file is memory that another process could change")]
mod mapped;
mod numbers;
mod prompts;
#[cfg(test)]
mod published;
mod sentence;
mod shortened;
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
    Architecture, AttentionSpec, DistanceBias, Embedding, FeedForward, FeedForwardNames, HeadPooling,
    HeadSource, HeadStep, LayerNames, LayerSpec, LearntPositions, Logits, NormKind, NormSpec, Part,
    Placement, ProjectionNames, Reach, RotaryEmbedding, SizeKeys, TensorNames, YesNo,
};
pub use checkpoint::ModelCheckpoint;
pub(crate) use error::is_of_this_machine;
pub use error::{DecidingKeys, ModelError, TensorProblem};
pub use fields::Activation;
use head::{HeadError, HeadKind};
pub use head::{LabelActivation, LabelHead, MAX_LABELS};
pub use mapped::MappedFile;
pub use numbers::Numbers;
pub use prompts::Prompts;
use replica_core::DeploymentTask;
pub use sentence::{Dense, DenseActivation, Pooling, SentenceConfig};
use sentence::{ModuleList, TrailingModule, TransformerSizes, TransformerTask};
pub(crate) use shortened::{shortened_name, shortened_text};
pub use template::PairTemplate;
pub use tensor::Tensor;
pub use tokenizer::TokenizerConfig;
pub(crate) use tokenizer::{TOKENS, TokenizerClass, WordOptions};

const CONFIG: &str = "config.json";

/// Model whose folder was read and validated.
#[derive(Debug)]
pub struct ModelDir {
    /// Path of the folder.
    pub folder: PathBuf,
    /// Transformer.
    pub architecture: Architecture,
    /// Modules after the transformer: pooling, dense layers, normalization.
    pub sentence: SentenceConfig,
    /// Labels and activation, if the model is a sequence classifier or a reranker.
    pub head: Option<LabelHead>,
    /// Prompts before texts.
    pub prompts: Prompts,
    /// Chat template that formats a pair as one text, for an LLM reranker; other models join pairs by special tokens.
    pub template: Option<PairTemplate>,
    /// Settings of the tokenizer from the files beside tokenizer.json.
    pub tokenizer: TokenizerConfig,
    /// Whether the model could be an LLM reranker, but nothing states it: a language model without modules, for a
    /// deployment without a task. Such a model computes vectors and does not rank.
    pub is_task_ambiguous: bool,
    /// Weights.
    pub checkpoint: ModelCheckpoint,
}

impl ModelDir {
    /// Reads the folder for the task that its files state; the weights are mapped, not read.
    pub fn open(folder: &Path) -> Result<ModelDir, ModelError> {
        ModelDir::open_for(folder, None)
    }

    /// Reads the folder of a model for this task, and rejects a model for another task.
    pub fn open_for(folder: &Path, task: Option<DeploymentTask>) -> Result<ModelDir, ModelError> {
        let config = folder.join(CONFIG);
        let raw: Map<String, Value> = json(&config)?;
        let mut architecture = Architecture::read(&config, &raw)?;
        let modules = ModuleList::read(folder)?;
        let trailing = modules.trailing(folder);
        let settings = prompts::read(folder)?;
        let refuse = |problem| ModelError::Content { path: config.clone(), problem };
        let is_causal_lm = architecture.is_causal_lm();
        let given = head::HeadContext { task, is_causal_lm, is_reranker: false };
        let given = head::HeadContext {
            is_reranker: given.is_task_ambiguous(&settings, &trailing)
                && template::is_reranker_template(folder),
            ..given
        };
        let head = head::read(&raw, &settings, &trailing, &given).map_err(|error| match error {
            HeadError::Content(problem) => refuse(problem),
            HeadError::OtherTask(problem) => ModelError::OtherTask { path: config.clone(), problem },
        })?;
        let prompts = settings.prompts.clone();
        let (head, template, purpose) = match head {
            None => (None, None, TransformerTask::HiddenStates),
            Some(HeadKind::Classifier(head)) => (Some(head), None, TransformerTask::LabelLogits),
            Some(HeadKind::YesNo(head)) => {
                let words = match &trailing {
                    TrailingModule::LogitScore(module) => yes_no::read(module, architecture.vocabulary)?,
                    TrailingModule::Pooling | TrailingModule::Other | TrailingModule::Unlisted => {
                        yes_no::by_default(folder, architecture.vocabulary)?
                    }
                };
                architecture.set_yes_no_head(words).map_err(refuse)?;
                let listed = trailing != TrailingModule::Unlisted;
                let template = PairTemplate::read(folder, listed, prompts.of_default())?;
                (Some(head), Some(template), TransformerTask::YesNoLogits)
            }
        };
        if purpose != TransformerTask::HiddenStates && trailing != TrailingModule::Unlisted {
            settings.check_pairs(folder)?;
        }
        if purpose == TransformerTask::LabelLogits
            && trailing == TrailingModule::Unlisted
            && task != Some(DeploymentTask::Classify)
        {
            template::refuse_for_labels(folder, head.as_ref())?;
        }
        if purpose == TransformerTask::HiddenStates {
            // Rows are pooled; the classification head is unused.
            architecture.head = None;
            if trailing == TrailingModule::Pooling {
                settings.check_vectors(folder)?;
            }
        }
        let class = raw.get("tokenizer_class").and_then(Value::as_str);
        let tokenizer = TokenizerConfig::read(folder, &architecture.family, class)?;
        let sizes = TransformerSizes {
            hidden: architecture.hidden,
            positions: architecture.positions,
            rows: architecture.embedding.positions.map_or(architecture.positions, |learnt| learnt.rows),
            key: architecture.keys.positions,
        };
        let mut sentence = modules.config(folder, sizes, purpose, &tokenizer)?;
        sentence.truncate = settings.truncate_dim.filter(|_| purpose == TransformerTask::HiddenStates);
        let checkpoint = ModelCheckpoint::open(folder)?;
        let is_task_ambiguous = purpose == TransformerTask::HiddenStates
            && task.is_none()
            && is_causal_lm
            && trailing == TrailingModule::Unlisted;
        Ok(ModelDir {
            folder: folder.to_owned(),
            architecture,
            sentence,
            head,
            prompts,
            template,
            tokenizer,
            is_task_ambiguous,
            checkpoint,
        })
    }
}

/// Reads a JSON file; an error contains its path.
fn json<T: DeserializeOwned>(path: &Path) -> Result<T, ModelError> {
    match optional_json(path)? {
        Some(read) => Ok(read),
        None => {
            Err(ModelError::Read { path: path.to_owned(), reason: io::Error::from(io::ErrorKind::NotFound) })
        }
    }
}

/// Reads a JSON file, if it exists.
fn optional_json<T: DeserializeOwned>(path: &Path) -> Result<Option<T>, ModelError> {
    let text = match fs::read(path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(reason) => {
            let path = path.to_owned();
            return Err(ModelError::Read { path, reason });
        }
    };
    let read = serde_json::from_slice(&text).map_err(|error| ModelError::Content {
        path: path.to_owned(),
        problem: shortened_text(&error.to_string()),
    })?;
    Ok(Some(read))
}
