//! Modules of sentence-transformers around the transformer: input limits, pooling, dense layers, normalization.
//!
//! `modules.json` lists the modules: a transformer, then pooling, then any number of dense layers, then optionally a
//! normalization. Without the file a model is pooled by the default of sentence-transformers, the mean or, for a causal
//! language model, the last token, and not normalized. A cross-encoder has the transformer only, or an LLM reranker
//! followed by LogitScore. The names of classes, files and keys have changed between the versions 4 and 6; all of them
//! are supported.

mod dense;
mod pooling;
pub(super) mod transformer;

use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::{Map, Value};

use super::fields::{Inert, JsonFields, Kind, shown};
use super::{CONFIG, ModelError, TokenizerConfig, json, optional_json};

pub use dense::{Dense, DenseActivation};
pub use pooling::Pooling;
use pooling::PoolingConfig;
use transformer::TransformerConfig;
pub(super) use transformer::TransformerTask;

/// Modules of a model besides the transformer.
#[derive(Clone, Debug)]
pub struct SentenceConfig {
    /// Maximum tokens of an input, special tokens included.
    pub max_tokens: usize,
    /// Whether texts are lower-cased before the tokenizer's own steps, which may not do it.
    pub lower_case: bool,
    /// Pooling of tokens to one vector.
    pub pooling: Pooling,
    /// Whether the tokens of a prompt are included in the pooling.
    pub include_prompt: bool,
    /// Dense layers after the pooling, in order.
    pub dense: Vec<Dense>,
    /// Whether the vector is normalized to length one at the end.
    pub normalize: bool,
    /// Dimensions that are kept after all modules, if not all.
    pub truncate: Option<usize>,
}

impl SentenceConfig {
    /// Returns the width of the engine's vector, given the transformer's hidden size.
    pub fn width(&self, hidden: usize) -> usize {
        self.dense.last().map_or(hidden, |last| last.outputs)
    }

    /// Returns the width of the served vector, given the width of the engine's.
    pub fn served_width(&self, width: usize) -> usize {
        self.truncate.map_or(width, |keep| keep.min(width))
    }

    /// Returns whether served vectors have length one, given the width of the engine's.
    pub fn is_normalized(&self, width: usize) -> bool {
        self.normalize && self.served_width(width) == width
    }

    /// Converts the engine's vectors to served ones, in the order of sentence-transformers: first the last module
    /// (normalization), then truncation, after which the length is below one.
    pub fn serve(&self, mut rows: Vec<f32>, width: usize) -> Vec<f32> {
        if self.normalize {
            replica_core::scores::normalize(&mut rows, width);
        }
        replica_core::scores::shorten(rows, width, self.served_width(width))
    }
}

/// List of modules in `modules.json`.
pub(super) struct ModuleList {
    path: PathBuf,
    /// Absent if the file does not exist.
    modules: Option<Vec<RawModule>>,
}

/// Entry of the list.
struct RawModule {
    path: String,
    class: &'static str,
}

/// Supported modules, by the names of their classes in every version.
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

/// Parses the list, in its order: sentence-transformers ignores `idx` as well.
fn read_modules(entries: &[Value]) -> Result<Vec<RawModule>, String> {
    let mut names = Vec::new();
    let mut modules = Vec::new();
    for (index, entry) in entries.iter().enumerate() {
        let entry = entry.as_object().ok_or_else(|| format!("module {index} is not an object"))?;
        let mut fields = JsonFields::new(entry);
        // Arguments of requests passed to modules; no supported module reads them.
        fields.ignore(&[Inert(Kind::Any, &["idx", "kwargs"])]);
        let mut word = |key: &str| {
            let found = fields.word(key);
            if found.is_none() {
                fields.problem(format!("`{key}` is missing"));
            }
            found.unwrap_or_default()
        };
        let (name, path, class) = (word("name"), word("path"), word("type"));
        if names.contains(&name) {
            fields.problem(format!(
                "`name` = {name} is used by another module, which it would replace; rename it"
            ));
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
            fields.problem(format!("`path` = {path} is outside the model's folder"));
        }
        fields.refuse_others();
        let module = RawModule { path: path.to_owned(), class: known.map_or("", |(_, class)| class) };
        let module =
            fields.finish(module).map_err(|problems| format!("module {index}: {}", problems.join("; ")))?;
        modules.push(module);
    }
    Ok(modules)
}

/// Keys of `config.json` that decide the default pooling.
#[derive(Deserialize)]
struct RawTransformerConfig {
    architectures: Option<Vec<String>>,
    is_causal: Option<bool>,
}

/// Module after the transformer, as far as it decides the task of the model.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum TrailingModule {
    /// Pooling to one vector.
    Pooling,
    /// LogitScore of an LLM reranker, with the folder of the module.
    LogitScore(PathBuf),
    /// Neither.
    Other,
    /// `modules.json` does not exist.
    Unlisted,
}

impl ModuleList {
    pub(super) fn read(folder: &Path) -> Result<ModuleList, ModelError> {
        let path = folder.join("modules.json");
        let entries = optional_json::<Vec<Value>>(&path)?;
        let modules = entries.map(|entries| read_modules(&entries)).transpose();
        match modules {
            Ok(modules) => Ok(ModuleList { path, modules }),
            Err(problem) => Err(ModelError::Content { path, problem }),
        }
    }

    /// Returns the module after the transformer.
    pub(super) fn trailing(&self, folder: &Path) -> TrailingModule {
        let Some(modules) = &self.modules else { return TrailingModule::Unlisted };
        if modules.iter().any(|module| module.class == "Pooling") {
            return TrailingModule::Pooling;
        }
        match modules.iter().find(|module| module.class == "LogitScore") {
            Some(module) => TrailingModule::LogitScore(folder.join(&module.path)),
            None => TrailingModule::Other,
        }
    }

    /// Reads the modules around a transformer of these sizes, loaded for this purpose. A model with label or yes/no
    /// logits must not have a pooling module.
    pub(super) fn config(
        &self,
        folder: &Path,
        sizes: TransformerSizes,
        purpose: TransformerTask,
        tokenizer: &TokenizerConfig,
    ) -> Result<SentenceConfig, ModelError> {
        let hidden = sizes.hidden;
        let classifies = purpose != TransformerTask::HiddenStates;
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
        let (pooling, trailing) = match modules.as_slice() {
            [first] if classifies && first.class == "Transformer" => {
                self.check_beside(first)?;
                return Ok(config);
            }
            [first, second] if classifies && first.class == "Transformer" && second.class == "LogitScore" => {
                self.check_beside(first)?;
                return Ok(config);
            }
            [first, second, trailing @ ..]
                if first.class == "Transformer" && second.class == "Pooling" && !classifies =>
            {
                self.check_beside(first)?;
                (second, trailing)
            }
            _ => return Err(self.refused(modules)),
        };
        let PoolingConfig { pooling, include_prompt } =
            pooling::read(&folder.join(&pooling.path).join("config.json"))?;
        (config.pooling, config.include_prompt) = (pooling, include_prompt);
        for module in trailing {
            let place = folder.join(&module.path);
            match module.class {
                // Dropout is active in training only.
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
            "the transformer is in the folder {}; only a transformer beside modules.json is supported",
            transformer.path
        );
        Err(ModelError::Content { path: self.path.clone(), problem })
    }

    fn refused(&self, modules: &[RawModule]) -> ModelError {
        let classes: Vec<&str> = modules.iter().map(|module| module.class).collect();
        let problem = format!(
            "the modules {} are not supported; supported are Transformer, Pooling, any number of Dense and optionally \
             Normalize, or for a cross-encoder Transformer alone or with LogitScore",
            classes.join(", ")
        );
        ModelError::Content { path: self.path.clone(), problem }
    }
}

/// Sizes of a transformer.
#[derive(Clone, Copy, Debug)]
pub(super) struct TransformerSizes {
    /// Hidden size.
    pub(super) hidden: usize,
    /// Maximum tokens of a sequence.
    pub(super) positions: usize,
    /// Number of positions in the configuration, which some families count differently.
    pub(super) rows: usize,
    /// Key of that number.
    pub(super) key: &'static str,
}

impl TransformerSizes {
    /// Returns the maximum tokens of an input: `configured`, or the limit of tokenizer and transformer.
    fn max_tokens(
        self,
        folder: &Path,
        configured: Option<usize>,
        tokenizer: &TokenizerConfig,
    ) -> Result<usize, ModelError> {
        let TransformerSizes { positions, rows, key, .. } = self;
        if let Some(configured) = configured {
            // The library would read them, and fail or compute positions that the model was not trained for.
            if configured > positions {
                let path = transformer::find(folder)?.map_or_else(|| folder.to_owned(), |(path, _)| path);
                let problem = format!(
                    "`max_seq_length` = {configured} is more than the {positions} tokens for which the model has \
                     positions (`{key}` = {rows} in {CONFIG}); lower it"
                );
                return Err(ModelError::Content { path, problem });
            }
            return Ok(configured);
        }
        let allowed = tokenizer.max_tokens.unwrap_or(usize::MAX).min(rows);
        if allowed > positions && tokenizer.exists {
            let problem = format!(
                "`model_max_length` is absent, or more than the {positions} tokens for which the model has positions \
                 (`{key}` = {rows} in {CONFIG}); set it to {positions}"
            );
            return Err(ModelError::Content { path: folder.join(TokenizerConfig::FILE), problem });
        }
        Ok(allowed.min(positions))
    }
}

/// Returns the default pooling of a model without modules.
fn bare_pooling(folder: &Path) -> Result<Pooling, ModelError> {
    let RawTransformerConfig { architectures, is_causal } = json(&folder.join(CONFIG))?;
    let first = architectures.and_then(|all| all.into_iter().next());
    let is_causal_lm = first.is_some_and(|name| name.ends_with("ForCausalLM"));
    Ok(if is_causal_lm && is_causal.unwrap_or(true) { Pooling::LastToken } else { Pooling::Mean })
}

/// The keys are the arguments of the class, so the library rejects unknown ones.
fn check_dropout(path: &Path) -> Result<(), ModelError> {
    let config: Map<String, Value> = optional_json(path)?.unwrap_or_default();
    let mut fields = JsonFields::new(&config);
    fields.ignore(&[Inert(Kind::Share, &["dropout"])]);
    fields.refuse_others();
    fields
        .finish(())
        .map_err(|problems| ModelError::Content { path: path.to_owned(), problem: problems.join("; ") })
}

/// Normalization of every token, for late-interaction models, is not supported.
fn check_normalize(path: &Path) -> Result<(), ModelError> {
    let config: Map<String, Value> = optional_json(path)?.unwrap_or_default();
    let mut fields = JsonFields::new(&config);
    fields.optional("module_output_name");
    for key in ["module_input_name", "module_output_name"] {
        if let Some(given) = fields.get(key).filter(|given| given.as_str() != Some("sentence_embedding")) {
            fields.problem(format!("`{key}` = {} is not supported; sentence_embedding is", shown(given)));
        }
    }
    // The library removes these two keys from the file and ignores all others.
    if fields.is_null("module_input_name") {
        fields.problem("`module_input_name` is null; remove it".to_owned());
    }
    fields
        .finish(())
        .map_err(|problems| ModelError::Content { path: path.to_owned(), problem: problems.join("; ") })
}

#[cfg(test)]
mod tests;
