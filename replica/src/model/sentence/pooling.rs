//! `1_Pooling/config.json`: how the vectors of the tokens become one.

use std::path::Path;

use serde_json::{Map, Value};

use crate::model::{ModelError, json};

/// How the vectors of the tokens become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pooling {
    /// Their mean.
    Mean,
    /// The first one's.
    Cls,
    /// The last one's.
    LastToken,
    /// Their mean, in which the first counts once, the second twice, and so on.
    WeightedMean,
    /// The largest of each number.
    Max,
    /// Their sum by the square root of their count.
    MeanSqrtLength,
}

impl Pooling {
    /// By the name that sentence-transformers gives it.
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

/// What the file says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PoolingConfig {
    pub(super) pooling: Pooling,
    pub(super) include_prompt: bool,
}

pub(super) fn read(path: &Path) -> Result<PoolingConfig, ModelError> {
    let config: Map<String, Value> = json(path)?;
    let problem = |problem: String| ModelError::Content { path: path.to_owned(), problem };
    let names = names(&config);
    let pooling = match names.as_slice() {
        [] => Pooling::Mean,
        [name] => Pooling::named(name).ok_or_else(|| {
            problem(format!(
                "pooling by {name} is not supported; cls, mean, lasttoken, weightedmean, max and \
                 mean_sqrt_len_tokens are"
            ))
        })?,
        names => {
            return Err(problem(format!(
                "pooling by {} at once is not supported; one of them is",
                names.join(" and ")
            )));
        }
    };
    let include_prompt = match config.get("include_prompt") {
        None => true,
        Some(Value::Bool(include)) => *include,
        Some(other) => return Err(problem(format!("`include_prompt` = {other} is neither true nor false"))),
    };
    Ok(PoolingConfig { pooling, include_prompt })
}

/// `"pooling_mode": "mean"`, or a list, or before version 6 one truth per mode.
fn names(config: &Map<String, Value>) -> Vec<String> {
    let name = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    match config.get("pooling_mode") {
        Some(Value::Array(modes)) => modes.iter().map(name).collect(),
        Some(mode) => vec![name(mode)],
        None => config
            .iter()
            .filter(|(_, value)| **value == Value::Bool(true))
            .filter_map(|(key, _)| key.strip_prefix("pooling_mode_"))
            .map(|key| match key {
                "cls_token" => "cls",
                "mean_tokens" => "mean",
                "max_tokens" => "max",
                "weightedmean_tokens" => "weightedmean",
                // `mean_sqrt_len_tokens` and `lasttoken` are called so in both.
                other => other,
            })
            .map(str::to_owned)
            .collect(),
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
    fn every_mode_is_known_by_its_new_and_by_its_old_name() {
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
            let list = format!(r#"{{"pooling_mode": ["{new}"], "include_prompt": false}}"#);
            assert_eq!(check(&list), Ok((pooling, false)), "{new}");
            let old_form = format!(
                r#"{{"word_embedding_dimension": 8, "pooling_mode_{old}": true, "pooling_mode_other": false}}"#
            );
            assert_eq!(check(&old_form), Ok((pooling, true)), "{old}");
        }
        assert_eq!(check("{}"), Ok((Pooling::Mean, true)));
    }

    #[test]
    fn what_is_not_built_is_refused_by_name() {
        for (text, sentence) in [
            (r#"{"pooling_mode": "median"}"#, "pooling by median is not supported"),
            (r#"{"pooling_mode": 3}"#, "pooling by 3 is not supported"),
            (r#"{"pooling_mode": ["cls", "mean"]}"#, "pooling by cls and mean at once"),
            (
                r#"{"pooling_mode_cls_token": true, "pooling_mode_mean_tokens": true}"#,
                "pooling by cls and mean at once",
            ),
            (r#"{"include_prompt": "yes"}"#, "`include_prompt` = \"yes\""),
        ] {
            let error = check(text).unwrap_err();
            assert!(error.contains(sentence), "{text}: {error}");
        }
    }
}
