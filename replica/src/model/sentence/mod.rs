//! What sentence-transformers adds to a transformer: which texts it reads, and how tokens become one vector.
//!
//! `modules.json` lists the stages: a transformer, then pooling, then any number of dense layers, then (or not) a
//! normalisation. Without the file a model is pooled as sentence-transformers does it then, by the mean or, if it was
//! made to continue texts, by the last token, and not normalised. A cross-encoder has the transformer alone, or behind it
//! the words by which it judges. The names of classes, files and keys have changed with the versions 4 to 6; all forms
//! are read.

mod dense;
mod pooling;
pub(super) mod transformer;

use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::{Map, Value};

use super::fields::{Fields, Inert, Kind, shown};
use super::{CONFIG, ModelError, TokenizerConfig, json, optional_json};

pub use dense::{Dense, DenseActivation};
pub use pooling::Pooling;
use pooling::PoolingConfig;
pub(super) use transformer::Purpose;
use transformer::TransformerConfig;

/// What the folder says beyond the transformer.
#[derive(Clone, Debug)]
pub struct SentenceConfig {
    /// Tokens of the longest input, special tokens included.
    pub max_tokens: usize,
    /// Whether texts are put into lower case before the tokenizer's own steps, which may not do that.
    pub lower_case: bool,
    /// How tokens become one vector.
    pub pooling: Pooling,
    /// Whether the tokens of a prompt take part in that.
    pub include_prompt: bool,
    /// What the pooled vector goes through, in order.
    pub dense: Vec<Dense>,
    /// Whether the vector is brought to length one at the end.
    pub normalize: bool,
    /// Numbers of the vector that are kept after all that, if not all of them.
    pub truncate: Option<usize>,
}

impl SentenceConfig {
    /// Numbers of the vector that the engine makes, if the transformer makes `hidden` of them.
    pub fn width(&self, hidden: usize) -> usize {
        self.dense.last().map_or(hidden, |last| last.outputs)
    }

    /// Numbers of the vector that is served, if the engine makes `width` of them.
    pub fn served_width(&self, width: usize) -> usize {
        self.truncate.map_or(width, |keep| keep.min(width))
    }

    /// Whether the vectors that are served have length one, if the engine makes `width` numbers.
    pub fn is_normalized(&self, width: usize) -> bool {
        self.normalize && self.served_width(width) == width
    }

    /// Makes the vectors that are served of those that the engine makes, in the order of sentence-transformers: first
    /// the stages to the last, and then the vector is cut, which leaves it shorter than one.
    pub fn serve(&self, mut rows: Vec<f32>, width: usize) -> Vec<f32> {
        if self.normalize {
            replica_core::scores::normalize(&mut rows, width);
        }
        replica_core::scores::shorten(rows, width, self.served_width(width))
    }
}

/// What `modules.json` lists.
pub(super) struct Stages {
    path: PathBuf,
    /// Absent if there is no such file.
    modules: Option<Vec<RawModule>>,
}

/// A stage.
struct RawModule {
    path: String,
    class: &'static str,
}

/// The stages that are understood, by the names of their classes in every version.
const CLASSES: &[(&str, &str)] = &[
    ("sentence_transformers.models.Transformer", "Transformer"),
    ("sentence_transformers.base.modules.transformer.Transformer", "Transformer"),
    ("sentence_transformers.base.modules.Transformer", "Transformer"),
    ("sentence_transformers.models.Pooling", "Pooling"),
    ("sentence_transformers.sentence_transformer.modules.pooling.Pooling", "Pooling"),
    ("sentence_transformers.sentence_transformer.modules.Pooling", "Pooling"),
    ("sentence_transformers.models.Dense", "Dense"),
    ("sentence_transformers.base.modules.dense.Dense", "Dense"),
    ("sentence_transformers.base.modules.Dense", "Dense"),
    ("sentence_transformers.models.Normalize", "Normalize"),
    ("sentence_transformers.base.modules.normalize.Normalize", "Normalize"),
    ("sentence_transformers.base.modules.Normalize", "Normalize"),
    ("sentence_transformers.models.Dropout", "Dropout"),
    ("sentence_transformers.sentence_transformer.modules.dropout.Dropout", "Dropout"),
    ("sentence_transformers.cross_encoder.modules.logit_score.LogitScore", "LogitScore"),
    ("sentence_transformers.cross_encoder.modules.LogitScore", "LogitScore"),
];

/// The list of stages, in the order of the list: `idx` is not looked at by sentence-transformers either.
fn read_modules(entries: &[Value]) -> Result<Vec<RawModule>, String> {
    let mut names = Vec::new();
    let mut modules = Vec::new();
    for (index, entry) in entries.iter().enumerate() {
        let entry = entry.as_object().ok_or_else(|| format!("stage {index} is not an object"))?;
        let mut fields = Fields::new(entry);
        // What stages are given of a request, which no stage here reads.
        fields.leave(&[Inert(Kind::Any, &["idx", "kwargs"])]);
        let mut word = |key: &str| {
            let found = fields.word(key);
            if found.is_none() {
                fields.problem(format!("`{key}` is missing"));
            }
            found.unwrap_or_default()
        };
        let (name, path, class) = (word("name"), word("path"), word("type"));
        if names.contains(&name) {
            fields.problem(format!("`name` = {name} is that of another stage, which it would replace"));
        }
        names.push(name);
        let known = CLASSES.iter().find(|(known, _)| *known == class);
        if known.is_none() && !class.is_empty() {
            fields.problem(format!(
                "`type` = {class} is not supported; Transformer, Pooling, Dense, Normalize, Dropout and LogitScore of \
                 sentence-transformers are"
            ));
        }
        if path.starts_with('/') || path.split('/').any(|part| part == "..") {
            fields.problem(format!("`path` = {path} is not below the model's folder"));
        }
        fields.refuse_others();
        let module = RawModule { path: path.to_owned(), class: known.map_or("", |(_, class)| class) };
        let module =
            fields.finish(module).map_err(|problems| format!("stage {index}: {}", problems.join("; ")))?;
        modules.push(module);
    }
    Ok(modules)
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

impl Stages {
    pub(super) fn read(folder: &Path) -> Result<Stages, ModelError> {
        let path = folder.join("modules.json");
        let entries = optional_json::<Vec<Value>>(&path)?;
        let modules = entries.map(|entries| read_modules(&entries)).transpose();
        match modules {
            Ok(modules) => Ok(Stages { path, modules }),
            Err(problem) => Err(ModelError::Content { path, problem }),
        }
    }

    /// What stands behind the transformer.
    pub(super) fn behind(&self, folder: &Path) -> Behind {
        let Some(modules) = &self.modules else { return Behind::Unlisted };
        if modules.iter().any(|module| module.class == "Pooling") {
            return Behind::Pooling;
        }
        match modules.iter().find(|module| module.class == "LogitScore") {
            Some(stage) => Behind::LogitScore(folder.join(&stage.path)),
            None => Behind::Other,
        }
    }

    /// What the folder says beyond a transformer of these sizes, loaded for this purpose. One that is loaded for labels
    /// or words has nothing behind it that pools.
    pub(super) fn config(
        &self,
        folder: &Path,
        sizes: Sizes,
        purpose: Purpose,
        tokenizer: &TokenizerConfig,
    ) -> Result<SentenceConfig, ModelError> {
        let hidden = sizes.hidden;
        let classifies = purpose != Purpose::States;
        let transformer = match &self.modules {
            Some(_) => transformer::read(folder, purpose)?,
            None => TransformerConfig::default(),
        };
        let mut config = SentenceConfig {
            max_tokens: sizes.max_tokens(folder, transformer.max_tokens, tokenizer)?,
            lower_case: transformer.lower_case,
            pooling: Pooling::Mean,
            include_prompt: true,
            dense: Vec::new(),
            normalize: false,
            truncate: None,
        };
        let Some(modules) = &self.modules else {
            config.pooling = bare_pooling(folder)?;
            return Ok(config);
        };
        let (pooling, behind) = match modules.as_slice() {
            [first] if classifies && first.class == "Transformer" => {
                self.check_beside(first)?;
                return Ok(config);
            }
            [first, second] if classifies && first.class == "Transformer" && second.class == "LogitScore" => {
                self.check_beside(first)?;
                return Ok(config);
            }
            [first, second, behind @ ..]
                if first.class == "Transformer" && second.class == "Pooling" && !classifies =>
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
            match module.class {
                // It acts in training only.
                "Dropout" => check_dropout(&place.join("config.json"))?,
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
        let classes: Vec<&str> = modules.iter().map(|module| module.class).collect();
        let problem = format!(
            "the stages {} are not supported; Transformer, Pooling, any number of Dense and, if wanted, Normalize \
             are, or for a cross-encoder Transformer alone or with LogitScore",
            classes.join(", ")
        );
        ModelError::Content { path: self.path.clone(), problem }
    }
}

/// Sizes of a transformer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    /// Numbers of a token.
    pub(super) hidden: usize,
    /// Tokens that it can read.
    pub(super) positions: usize,
    /// What its configuration calls that, which some families number otherwise.
    pub(super) rows: usize,
    /// The key of that.
    pub(super) key: &'static str,
}

impl Sizes {
    /// Tokens of the longest input: `wanted`, or as many as tokenizer and transformer allow.
    fn max_tokens(
        self,
        folder: &Path,
        wanted: Option<usize>,
        tokenizer: &TokenizerConfig,
    ) -> Result<usize, ModelError> {
        let Sizes { positions, rows, key, .. } = self;
        if let Some(wanted) = wanted {
            // The library reads them, and fails or computes what the model was not trained for.
            if wanted > positions {
                let path = transformer::find(folder)?.map_or_else(|| folder.to_owned(), |(path, _)| path);
                let problem = format!(
                    "`max_seq_length` = {wanted} is more than the {positions} tokens for which the model has positions \
                     (`{key}` = {rows} in {CONFIG})"
                );
                return Err(ModelError::Content { path, problem });
            }
            return Ok(wanted);
        }
        let allowed = tokenizer.max_tokens.unwrap_or(usize::MAX).min(rows);
        if allowed > positions && tokenizer.is_there {
            let problem = format!(
                "`model_max_length` is more than the {positions} tokens for which the model has positions (`{key}` = {rows} \
                 in {CONFIG}), or absent; write {positions}"
            );
            return Err(ModelError::Content { path: folder.join(TokenizerConfig::FILE), problem });
        }
        Ok(allowed.min(positions))
    }
}

/// How a model is pooled that has no stages.
fn bare_pooling(folder: &Path) -> Result<Pooling, ModelError> {
    let RawPurpose { architectures, is_causal } = json(&folder.join(CONFIG))?;
    let first = architectures.and_then(|all| all.into_iter().next());
    let continues = first.is_some_and(|name| name.ends_with("ForCausalLM"));
    Ok(if continues && is_causal.unwrap_or(true) { Pooling::LastToken } else { Pooling::Mean })
}

/// The keys are the arguments of the class, so the library fails on others.
fn check_dropout(path: &Path) -> Result<(), ModelError> {
    let config: Map<String, Value> = optional_json(path)?.unwrap_or_default();
    let mut fields = Fields::new(&config);
    fields.leave(&[Inert(Kind::Share, &["dropout"])]);
    fields.refuse_others();
    fields
        .finish(())
        .map_err(|problems| ModelError::Content { path: path.to_owned(), problem: problems.join("; ") })
}

/// A normalisation of every token, which models for late interaction have, is another thing.
fn check_normalize(path: &Path) -> Result<(), ModelError> {
    let config: Map<String, Value> = optional_json(path)?.unwrap_or_default();
    let mut fields = Fields::new(&config);
    fields.optional("module_output_name");
    for key in ["module_input_name", "module_output_name"] {
        if let Some(given) = fields.get(key).filter(|given| given.as_str() != Some("sentence_embedding")) {
            fields.problem(format!(
                "`{key}` = {} is not supported: normalising sentence_embedding is",
                shown(given)
            ));
        }
    }
    // The library takes these two keys out of the file, whatever else is in it.
    if fields.is_null("module_input_name") {
        fields.problem("`module_input_name` is null".to_owned());
    }
    fields
        .finish(())
        .map_err(|problems| ModelError::Content { path: path.to_owned(), problem: problems.join("; ") })
}

#[cfg(test)]
mod tests;
