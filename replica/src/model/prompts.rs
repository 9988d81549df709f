//! `config_sentence_transformers.json`: what a model wants before a text, by what the text is for.
//!
//! Models that were trained with instructions answer worse without them, and nobody sees it. So the prompts are read
//! with the model, and a default that is named and not there is refused.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Deserialize;

use super::{ModelError, optional_json};

/// Texts to be put before inputs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Prompts {
    /// Each by its name, such as `query`.
    pub by_name: BTreeMap<String, String>,
    /// The name of the one that is used where none is asked for.
    pub default: Option<String>,
}

impl Prompts {
    /// The text that is used where none is asked for.
    pub fn of_default(&self) -> Option<&str> {
        self.by_name.get(self.default.as_ref()?).map(String::as_str)
    }
}

#[derive(Default, Deserialize)]
struct RawPrompts {
    /// A value is null where a class of sentence-transformers knows the name and the model has no text for it.
    prompts: Option<BTreeMap<String, Option<String>>>,
    default_prompt_name: Option<String>,
}

pub(super) const FILE: &str = "config_sentence_transformers.json";

pub(super) fn read(folder: &Path) -> Result<Prompts, ModelError> {
    let path = folder.join(FILE);
    let raw: RawPrompts = optional_json(&path)?.unwrap_or_default();
    let by_name: BTreeMap<String, String> = raw
        .prompts
        .unwrap_or_default()
        .into_iter()
        .map(|(name, text)| (name, text.unwrap_or_default()))
        .collect();
    if let Some(name) = raw.default_prompt_name.as_ref().filter(|name| !by_name.contains_key(*name)) {
        let known: Vec<&str> = by_name.keys().map(String::as_str).collect();
        let problem =
            format!("`default_prompt_name` = {name} is not among the prompts ({})", known.join(", "));
        return Err(ModelError::Content { path, problem });
    }
    Ok(Prompts { by_name, default: raw.default_prompt_name })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn check(text: Option<&str>) -> Result<Prompts, String> {
        let folder = tempfile::tempdir().unwrap();
        if let Some(text) = text {
            fs::write(folder.path().join(FILE), text).unwrap();
        }
        read(folder.path()).map_err(|error| error.to_string())
    }

    #[test]
    fn prompts_are_had_by_name_and_the_default_is_one_of_them() {
        assert_eq!(check(None), Ok(Prompts::default()));
        let old = r#"{"__version__": {"sentence_transformers": "2.2.0"}}"#;
        assert_eq!(check(Some(old)), Ok(Prompts::default()));
        let two = r#"{"prompts": {"query": "query: ", "document": null}, "default_prompt_name": "query"}"#;
        let by_name = [("query", "query: "), ("document", "")];
        let by_name = by_name.map(|(name, text)| (name.to_owned(), text.to_owned())).into();
        assert_eq!(check(Some(two)), Ok(Prompts { by_name, default: Some("query".to_owned()) }));
        let error = check(Some(&two.replace("e\": \"query\"", "e\": \"passage\""))).unwrap_err();
        assert!(error.contains("= passage is not among the prompts (document, query)"), "{error}");
    }
}
