//! What sentence-transformers adds to a transformer: which texts it reads, and how tokens become one vector.
//!
//! `modules.json` lists the stages. Understood are a transformer, then pooling, then (or not) a normalisation; without
//! the file a model is pooled by the mean and not normalised, as sentence-transformers does it. The names of classes and
//! keys changed in version 6; both forms are read.

use std::path::Path;

use serde::Deserialize;
use serde_json::Value;

use super::{BertConfig, ModelError, json, optional_json};

/// How the vectors of the tokens become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pooling {
    /// Their mean.
    Mean,
    /// The first one's.
    Cls,
}

/// What the folder says beyond the transformer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SentenceConfig {
    /// Tokens of the longest input, special tokens included.
    pub max_tokens: usize,
    /// Whether texts are put into lower case before they are tokenised.
    pub lower_case: bool,
    /// How tokens become one vector.
    pub pooling: Pooling,
    /// Whether that vector is brought to length one.
    pub normalize: bool,
}

#[derive(Deserialize)]
struct RawModule {
    idx: usize,
    path: String,
    r#type: String,
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

pub(super) fn read(folder: &Path, bert: &BertConfig) -> Result<SentenceConfig, ModelError> {
    let raw: RawSentence = optional_json(&folder.join("sentence_bert_config.json"))?.unwrap_or_default();
    let tokenizer: RawTokenizer = optional_json(&folder.join("tokenizer_config.json"))?.unwrap_or_default();
    let (pooling, normalize) = read_modules(folder)?;
    let of_tokenizer = tokenizer.model_max_length.map(|length| length as usize);
    let max_tokens = raw.max_seq_length.or(of_tokenizer).unwrap_or(bert.positions);
    Ok(SentenceConfig {
        max_tokens: max_tokens.clamp(1, bert.positions),
        lower_case: raw.do_lower_case,
        pooling,
        normalize,
    })
}

fn read_modules(folder: &Path) -> Result<(Pooling, bool), ModelError> {
    let path = folder.join("modules.json");
    let Some(mut modules) = optional_json::<Vec<RawModule>>(&path)? else {
        return Ok((Pooling::Mean, false));
    };
    modules.sort_by_key(|module| module.idx);
    let kinds: Vec<&str> = modules.iter().map(|module| class(&module.r#type)).collect();
    let normalize = match kinds.as_slice() {
        ["Transformer", "Pooling"] => false,
        ["Transformer", "Pooling", "Normalize"] => true,
        other => {
            let problem = format!(
                "the stages {} are not supported; Transformer, Pooling and, if wanted, Normalize are",
                other.join(", ")
            );
            return Err(ModelError::Content { path, problem });
        }
    };
    if !modules[0].path.is_empty() {
        let problem =
            format!("the transformer lies in {}; only one beside modules.json is supported", modules[0].path);
        return Err(ModelError::Content { path, problem });
    }
    let pooling = read_pooling(&folder.join(&modules[1].path).join("config.json"))?;
    if let Some(module) = modules.get(2) {
        check_normalize(&folder.join(&module.path).join("config.json"))?;
    }
    Ok((pooling, normalize))
}

/// `sentence_transformers.models.Pooling` is a Pooling, wherever the class lies this year.
fn class(path: &str) -> &str {
    path.rsplit('.').next().unwrap_or(path)
}

fn read_pooling(path: &Path) -> Result<Pooling, ModelError> {
    let config: serde_json::Map<String, Value> = json(path)?;
    let modes = pooling_modes(&config);
    match modes.as_slice() {
        [] => Ok(Pooling::Mean),
        [mode] if mode == "mean" => Ok(Pooling::Mean),
        [mode] if mode == "cls" => Ok(Pooling::Cls),
        modes => Err(ModelError::Content {
            path: path.to_owned(),
            problem: format!("pooling by {} is not supported; mean and cls are", modes.join(" and ")),
        }),
    }
}

/// `"pooling_mode": "mean"`, or a list, or before version 6 one truth per mode.
fn pooling_modes(config: &serde_json::Map<String, Value>) -> Vec<String> {
    let name = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    match config.get("pooling_mode") {
        Some(Value::Array(modes)) => modes.iter().map(name).collect(),
        Some(mode) => vec![name(mode)],
        None => config
            .iter()
            .filter(|(_, value)| **value == Value::Bool(true))
            .filter_map(|(key, _)| key.strip_prefix("pooling_mode_"))
            .map(|mode| mode.trim_end_matches("_tokens").trim_end_matches("_token").to_owned())
            .collect(),
    }
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
mod tests {
    use super::*;
    use crate::model::Activation;
    use std::fs;

    const STAGES: &str = r#"[{"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        {"idx": 2, "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}]"#;

    fn check(files: &[(&str, &str)]) -> Result<SentenceConfig, String> {
        let folder = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = folder.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let bert = BertConfig {
            vocabulary: 100,
            hidden: 64,
            layers: 2,
            heads: 4,
            intermediate: 128,
            activation: Activation::Gelu,
            norm_epsilon: 1e-12,
            positions: 512,
            token_types: 2,
        };
        read(folder.path(), &bert).map_err(|error| error.to_string())
    }

    #[test]
    fn the_files_of_old_and_of_new_versions_say_the_same() {
        let old = check(&[
            ("modules.json", STAGES),
            (
                "1_Pooling/config.json",
                r#"{"word_embedding_dimension": 64, "pooling_mode_cls_token": true, "pooling_mode_mean_tokens": false}"#,
            ),
            ("sentence_bert_config.json", r#"{"max_seq_length": 256, "do_lower_case": false}"#),
        ]);
        let new = check(&[
            (
                "modules.json",
                &STAGES.replace("sentence_transformers.models", "sentence_transformers.base.modules.x"),
            ),
            ("1_Pooling/config.json", r#"{"pooling_mode": "cls", "include_prompt": true}"#),
            ("2_Normalize/config.json", r#"{"module_input_name": "sentence_embedding"}"#),
            ("sentence_bert_config.json", r#"{"transformer_task": "feature-extraction"}"#),
            ("tokenizer_config.json", r#"{"model_max_length": 256}"#),
        ]);
        let wanted =
            SentenceConfig { max_tokens: 256, lower_case: false, pooling: Pooling::Cls, normalize: true };
        assert_eq!((old, new), (Ok(wanted.clone()), Ok(wanted)));
    }

    #[test]
    fn a_bare_transformer_is_pooled_by_the_mean_and_reads_what_it_has_positions_for() {
        let bare =
            SentenceConfig { max_tokens: 512, lower_case: false, pooling: Pooling::Mean, normalize: false };
        let unlimited = ("tokenizer_config.json", r#"{"model_max_length": 1000000000000000019884624838656}"#);
        assert_eq!(check(&[]), Ok(bare.clone()));
        assert_eq!(check(&[unlimited]), Ok(bare));
    }

    #[test]
    fn stages_and_poolings_that_are_not_built_are_refused_by_name() {
        let pooling = "1_Pooling/config.json";
        for (files, sentence) in [
            (
                vec![("modules.json", STAGES.replace("Normalize", "Dense")), (pooling, "{}".to_owned())],
                "Transformer, Pooling, Dense are not supported",
            ),
            (
                vec![("modules.json", STAGES.to_owned()), (pooling, r#"{"pooling_mode": "max"}"#.to_owned())],
                "pooling by max is not supported",
            ),
            (
                vec![
                    ("modules.json", STAGES.to_owned()),
                    (
                        pooling,
                        r#"{"pooling_mode_cls_token": true, "pooling_mode_mean_tokens": true}"#.to_owned(),
                    ),
                ],
                "pooling by cls and mean is not supported",
            ),
            (
                vec![
                    ("modules.json", STAGES.to_owned()),
                    (pooling, "{}".to_owned()),
                    ("2_Normalize/config.json", r#"{"module_input_name": "token_embeddings"}"#.to_owned()),
                ],
                "normalising token_embeddings is not supported",
            ),
            (vec![("modules.json", STAGES.to_owned())], "1_Pooling/config.json cannot be read"),
            (vec![("modules.json", "[".to_owned())], "modules.json: EOF"),
        ] {
            let files: Vec<(&str, &str)> = files.iter().map(|(path, text)| (*path, text.as_str())).collect();
            let error = check(&files).unwrap_err();
            assert!(error.contains(sentence), "{error}");
        }
    }
}
