//! Pooling module (`1_Pooling/config.json`): combines the vectors of the tokens into one.

use std::path::Path;

use serde_json::{Map, Value};

use crate::model::fields::{JsonFields, shown};
use crate::model::{ModelError, json};

/// Pooling of the vectors of the tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pooling {
    /// Mean.
    Mean,
    /// Vector of the first token.
    Cls,
    /// Vector of the last token.
    LastToken,
    /// Mean weighted by position: the first token counts once, the second twice, and so on.
    WeightedMean,
    /// Maximum of each dimension.
    Max,
    /// Sum divided by the square root of the count.
    MeanSqrtLength,
}

impl Pooling {
    /// Returns the pooling with this name in sentence-transformers.
    fn named(name: &str) -> Option<Pooling> {
        match name {
            "mean" => Some(Pooling::Mean),
            "cls" => Some(Pooling::Cls),
            "lasttoken" => Some(Pooling::LastToken),
            "weightedmean" => Some(Pooling::WeightedMean),
            "max" => Some(Pooling::Max),
            "mean_sqrt_len_tokens" => Some(Pooling::MeanSqrtLength),
            _ => None,
        }
    }
}

/// Content of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PoolingConfig {
    pub(super) pooling: Pooling,
    pub(super) include_prompt: bool,
}

pub(super) fn read(path: &Path) -> Result<PoolingConfig, ModelError> {
    let config: Map<String, Value> = json(path)?;
    parse(&config)
        .map_err(|problems| ModelError::Content { path: path.to_owned(), problem: problems.join("; ") })
}

fn parse(raw: &Map<String, Value>) -> Result<PoolingConfig, Vec<String>> {
    let mut fields = JsonFields::new(raw);
    let names = names(&mut fields);
    let pooling = match names.as_slice() {
        [name] => Pooling::named(name),
        _ => None,
    };
    match names.as_slice() {
        [] => fields.problem("`pooling_mode` is empty; name one pooling mode".to_owned()),
        [name] if pooling.is_none() => fields.problem(format!(
            "`pooling_mode`: pooling by {name} is not supported; cls, mean, lasttoken, weightedmean, max and \
             mean_sqrt_len_tokens are"
        )),
        [_] => {}
        names => fields.problem(format!(
            "pooling by {} at once is not supported; keep one of them ({})",
            names.join(" and "),
            keys(raw)
        )),
    }
    // The width is known from the model; the library requires the key nevertheless.
    let width = fields.either(["embedding_dimension", "word_embedding_dimension"]);
    fields.size(width);
    fields.optional_size("word_embedding_dimension");
    let include_prompt = fields.flag("include_prompt", true);
    fields.refuse_others();
    fields.finish(PoolingConfig { pooling: pooling.unwrap_or(Pooling::Mean), include_prompt })
}

/// Booleans for each mode, as before version 6.
const TRUTHS: [(&str, &str); 6] = [
    ("pooling_mode_cls_token", "cls"),
    ("pooling_mode_max_tokens", "max"),
    ("pooling_mode_mean_tokens", "mean"),
    ("pooling_mode_mean_sqrt_len_tokens", "mean_sqrt_len_tokens"),
    ("pooling_mode_weightedmean_tokens", "weightedmean"),
    ("pooling_mode_lasttoken", "lasttoken"),
];

/// Returns the keys that select a mode, for a message.
fn keys(raw: &Map<String, Value>) -> String {
    let is_set = |key: &&str| raw.get(*key).is_some_and(|value| *value != Value::Bool(false));
    let keys: Vec<String> = ["pooling_mode"]
        .into_iter()
        .chain(TRUTHS.iter().map(|(key, _)| *key))
        .filter(is_set)
        .map(|key| format!("`{key}`"))
        .collect();
    keys.join(", ")
}

/// Returns the selected modes: `"pooling_mode": "mean"`, or a list, or before version 6 a boolean per mode.
fn names(fields: &mut JsonFields<'_>) -> Vec<String> {
    let name = |value: &Value| value.as_str().map_or_else(|| shown(value), str::to_owned);
    let mut truths = Vec::new();
    for (key, mode) in TRUTHS {
        fields.optional(key);
        if fields.flag(key, false) {
            truths.push(mode.to_owned());
        }
    }
    match fields.get("pooling_mode") {
        Some(Value::Array(modes)) => modes.iter().map(name).collect(),
        Some(mode) => vec![name(mode)],
        None if truths.is_empty() => vec!["mean".to_owned()],
        None => truths,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn check(text: &str) -> Result<(Pooling, bool), String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config.json");
        fs::write(&path, text).unwrap();
        let read = read(&path).map_err(|error| error.to_string())?;
        Ok((read.pooling, read.include_prompt))
    }

    #[test]
    fn every_mode_is_read_by_its_new_and_old_name() {
        for (new, old, pooling) in [
            ("mean", "mean_tokens", Pooling::Mean),
            ("cls", "cls_token", Pooling::Cls),
            ("lasttoken", "lasttoken", Pooling::LastToken),
            ("weightedmean", "weightedmean_tokens", Pooling::WeightedMean),
            ("max", "max_tokens", Pooling::Max),
            ("mean_sqrt_len_tokens", "mean_sqrt_len_tokens", Pooling::MeanSqrtLength),
        ] {
            let new_form = format!(r#"{{"embedding_dimension": 8, "pooling_mode": "{new}"}}"#);
            assert_eq!(check(&new_form), Ok((pooling, true)), "{new}");
            let list = format!(
                r#"{{"embedding_dimension": 8, "pooling_mode": ["{new}"], "include_prompt": false}}"#
            );
            assert_eq!(check(&list), Ok((pooling, false)), "{new}");
            let old_form = format!(r#"{{"word_embedding_dimension": 8, "pooling_mode_{old}": true}}"#);
            assert_eq!(check(&old_form), Ok((pooling, true)), "{old}");
        }
        assert_eq!(check(r#"{"word_embedding_dimension": 8}"#), Ok((Pooling::Mean, true)));
    }

    #[test]
    fn unsupported_modes_are_rejected_by_name() {
        for (text, sentence) in [
            (r#"{"pooling_mode": "median"}"#, "pooling by median is not supported"),
            (r#"{"pooling_mode": 3}"#, "pooling by 3 is not supported"),
            (r#"{"pooling_mode": ["cls", "mean"]}"#, "pooling by cls and mean at once"),
            (
                r#"{"pooling_mode_cls_token": true, "pooling_mode_mean_tokens": true}"#,
                "pooling by cls and mean at once",
            ),
            (r#"{"pooling_mode": []}"#, "`pooling_mode` is empty"),
            (r#"{"pooling_mode": "mean"}"#, "`embedding_dimension` is missing"),
            (
                r#"{"embedding_dimension": 8, "pooling_mode_other": false}"#,
                "`pooling_mode_other` = false is not understood",
            ),
            (r#"{"include_prompt": "yes"}"#, "`include_prompt` = \"yes\""),
        ] {
            let error = check(text).unwrap_err();
            assert!(error.contains(sentence), "{text}: {error}");
        }
    }
}
