//! What sentence-transformers adds to a transformer: which texts it reads, and how tokens become one vector.
//!
//! `modules.json` lists the stages: a transformer, then pooling, then any number of dense layers, then (or not) a
//! normalisation. Without the file a model is pooled as sentence-transformers does it then, by the mean or, if it was
//! made to continue texts, by the last token, and not normalised. A cross-encoder has the transformer alone, or behind it
//! the words by which it judges. The names of classes, files and keys have changed with the versions 4 to 6; all forms
//! are read.

mod dense;
mod pooling;

use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::{CONFIG, ModelError, json, optional_json};

pub use dense::{Dense, DenseActivation};
pub use pooling::Pooling;
use pooling::PoolingConfig;

/// What the folder says beyond the transformer.
#[derive(Clone, Debug)]
pub struct SentenceConfig {
    /// Tokens of the longest input, special tokens included.
    pub max_tokens: usize,
    /// Whether texts are put into lower case before they are tokenised.
    pub lower_case: bool,
    /// How tokens become one vector.
    pub pooling: Pooling,
    /// Whether the tokens of a prompt take part in that.
    pub include_prompt: bool,
    /// What the pooled vector goes through, in order.
    pub dense: Vec<Dense>,
    /// Whether the vector is brought to length one at the end.
    pub normalize: bool,
}

impl SentenceConfig {
    /// Numbers of the vector, if the transformer makes `hidden` of them.
    pub fn width(&self, hidden: usize) -> usize {
        self.dense.last().map_or(hidden, |last| last.outputs)
    }
}

/// What `modules.json` lists.
pub(super) struct Stages {
    path: PathBuf,
    /// Absent if there is no such file.
    modules: Option<Vec<RawModule>>,
}

#[derive(Deserialize)]
struct RawModule {
    idx: usize,
    path: String,
    r#type: String,
}

impl RawModule {
    /// `sentence_transformers.models.Pooling` is a Pooling, wherever the class lies this year.
    fn class(&self) -> &str {
        self.r#type.rsplit('.').next().unwrap_or(&self.r#type)
    }
}

#[derive(Default, Deserialize)]
struct RawSentence {
    max_seq_length: Option<usize>,
    #[serde(default)]
    do_lower_case: bool,
}

#[derive(Default, Deserialize)]
struct RawTokenizer {
    /// As a float, since "no limit" is written as 10³⁰.
    model_max_length: Option<f64>,
}

#[derive(Default, Deserialize)]
struct RawNormalize {
    module_input_name: Option<String>,
}

/// What `config.json` says about the purpose of the transformer.
#[derive(Deserialize)]
struct RawPurpose {
    architectures: Option<Vec<String>>,
    is_causal: Option<bool>,
}

/// What stands behind the transformer, as far as it decides what a model's numbers are.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Behind {
    /// A stage that makes one vector of the tokens.
    Pooling,
    /// The words by which a language model judges; the folder of the stage.
    LogitScore(PathBuf),
    /// Neither.
    Other,
    /// No stages are listed.
    Unlisted,
}

/// The names that the file had in some version, after the model that it stood beside.
const SENTENCE_FILES: [&str; 7] = [
    "sentence_bert_config.json",
    "sentence_roberta_config.json",
    "sentence_distilbert_config.json",
    "sentence_camembert_config.json",
    "sentence_albert_config.json",
    "sentence_xlm-roberta_config.json",
    "sentence_xlnet_config.json",
];

impl Stages {
    pub(super) fn read(folder: &Path) -> Result<Stages, ModelError> {
        let path = folder.join("modules.json");
        let mut modules = optional_json::<Vec<RawModule>>(&path)?;
        if let Some(modules) = &mut modules {
            modules.sort_by_key(|module| module.idx);
        }
        Ok(Stages { path, modules })
    }

    /// What stands behind the transformer.
    pub(super) fn behind(&self, folder: &Path) -> Behind {
        let Some(modules) = &self.modules else { return Behind::Unlisted };
        if modules.iter().any(|module| module.class() == "Pooling") {
            return Behind::Pooling;
        }
        match modules.iter().find(|module| module.class() == "LogitScore") {
            Some(stage) => Behind::LogitScore(folder.join(&stage.path)),
            None => Behind::Other,
        }
    }

    /// What the folder says beyond a transformer that makes `hidden` numbers and reads `positions` tokens. One that
    /// `classifies` has nothing behind it.
    pub(super) fn config(
        &self,
        folder: &Path,
        hidden: usize,
        positions: usize,
        classifies: bool,
    ) -> Result<SentenceConfig, ModelError> {
        let raw: RawSentence = read_sentence(folder)?;
        let tokenizer: RawTokenizer =
            optional_json(&folder.join("tokenizer_config.json"))?.unwrap_or_default();
        let of_tokenizer = tokenizer.model_max_length.map(|length| length as usize);
        let max_tokens = raw.max_seq_length.or(of_tokenizer).unwrap_or(positions);
        let mut config = SentenceConfig {
            max_tokens: max_tokens.clamp(1, positions),
            lower_case: raw.do_lower_case,
            pooling: Pooling::Mean,
            include_prompt: true,
            dense: Vec::new(),
            normalize: false,
        };
        let Some(modules) = &self.modules else {
            config.pooling = bare_pooling(folder)?;
            return Ok(config);
        };
        let (pooling, behind) = match modules.as_slice() {
            [first] if classifies && first.class() == "Transformer" => {
                self.check_beside(first)?;
                return Ok(config);
            }
            [first, second]
                if classifies && first.class() == "Transformer" && second.class() == "LogitScore" =>
            {
                self.check_beside(first)?;
                return Ok(config);
            }
            [first, second, behind @ ..]
                if first.class() == "Transformer" && second.class() == "Pooling" && !classifies =>
            {
                self.check_beside(first)?;
                (second, behind)
            }
            _ => return Err(self.refused(modules)),
        };
        let PoolingConfig { pooling, include_prompt } =
            pooling::read(&folder.join(&pooling.path).join("config.json"))?;
        (config.pooling, config.include_prompt) = (pooling, include_prompt);
        for module in behind {
            let place = folder.join(&module.path);
            match module.class() {
                // It acts in training only.
                "Dropout" => {}
                "Dense" if !config.normalize => {
                    let inputs = config.width(hidden);
                    config.dense.push(Dense::read(&place, inputs)?);
                }
                "Normalize" => {
                    check_normalize(&place.join("config.json"))?;
                    config.normalize = true;
                }
                _ => return Err(self.refused(modules)),
            }
        }
        Ok(config)
    }

    fn check_beside(&self, transformer: &RawModule) -> Result<(), ModelError> {
        if transformer.path.is_empty() {
            return Ok(());
        }
        let problem = format!(
            "the transformer lies in {}; only one beside modules.json is supported",
            transformer.path
        );
        Err(ModelError::Content { path: self.path.clone(), problem })
    }

    fn refused(&self, modules: &[RawModule]) -> ModelError {
        let classes: Vec<&str> = modules.iter().map(RawModule::class).collect();
        let problem = format!(
            "the stages {} are not supported; Transformer, Pooling, any number of Dense and, if wanted, Normalize \
             are, or for a cross-encoder Transformer alone or with LogitScore",
            classes.join(", ")
        );
        ModelError::Content { path: self.path.clone(), problem }
    }
}

/// What is wanted of the file that says how texts are read.
pub(super) fn read_sentence<T: Default + DeserializeOwned>(folder: &Path) -> Result<T, ModelError> {
    for file in SENTENCE_FILES {
        if let Some(raw) = optional_json(&folder.join(file))? {
            return Ok(raw);
        }
    }
    Ok(T::default())
}

/// How a model is pooled that has no stages.
fn bare_pooling(folder: &Path) -> Result<Pooling, ModelError> {
    let RawPurpose { architectures, is_causal } = json(&folder.join(CONFIG))?;
    let first = architectures.and_then(|all| all.into_iter().next());
    let continues = first.is_some_and(|name| name.ends_with("ForCausalLM"));
    Ok(if continues && is_causal.unwrap_or(true) { Pooling::LastToken } else { Pooling::Mean })
}

/// A normalisation of every token, which models for late interaction have, is another thing.
fn check_normalize(path: &Path) -> Result<(), ModelError> {
    let config: RawNormalize = optional_json(path)?.unwrap_or_default();
    match config.module_input_name.as_deref() {
        None | Some("sentence_embedding") => Ok(()),
        Some(other) => Err(ModelError::Content {
            path: path.to_owned(),
            problem: format!("normalising {other} is not supported; sentence_embedding is"),
        }),
    }
}

#[cfg(test)]
mod tests;
