//! `config_sentence_transformers.json`: prompts of a model, and settings of sentence-transformers.
//!
//! Models that were trained with instructions are silently less accurate without them. So the prompts are read with the
//! model, and a default prompt that does not exist is rejected.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Map, Value};

use super::fields::{Inert, JsonFields, Kind, shown};
use super::{ModelError, optional_json};

/// Prompts of a model.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Prompts {
    /// Prompt texts by name, such as `query`.
    pub by_name: BTreeMap<String, String>,
    /// Name of the default prompt.
    pub default: Option<String>,
}

impl Prompts {
    /// Returns the text of the default prompt.
    pub fn of_default(&self) -> Option<&str> {
        self.by_name.get(self.default.as_ref()?).map(String::as_str)
    }
}

pub(super) const FILE: &str = "config_sentence_transformers.json";

/// Content of the file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct SentenceTransformersConfig {
    pub(super) prompts: Prompts,
    /// Class of sentence-transformers that wrote the model.
    pub(super) model_type: Option<String>,
    /// Function that converts a cross-encoder's logits to scores.
    pub(super) activation_fn: Option<String>,
    /// Dimensions that are kept of a vector.
    pub(super) truncate_dim: Option<usize>,
}

impl SentenceTransformersConfig {
    /// Rejects a file that does not belong to a cross-encoder.
    pub(super) fn check_pairs(&self, folder: &Path) -> Result<(), ModelError> {
        match self.model_type.as_deref() {
            Some("CrossEncoder") => Ok(()),
            other => {
                let problem = format!(
                    "`model_type` is {}, but the modules in modules.json are those of a CrossEncoder, which would \
                     ignore the rest of this file; set it to CrossEncoder",
                    other.unwrap_or("absent, which means SentenceTransformer")
                );
                Err(ModelError::Content { path: folder.join(FILE), problem })
            }
        }
    }

    /// Rejects a file that does not belong to an embedding model.
    pub(super) fn check_vectors(&self, folder: &Path) -> Result<(), ModelError> {
        match self.model_type.as_deref() {
            None | Some("SentenceTransformer") => Ok(()),
            Some(other) => {
                let problem = format!(
                    "`model_type` is {other}, but the modules in modules.json are those of a SentenceTransformer, \
                     which would ignore the rest of this file; set it to SentenceTransformer"
                );
                Err(ModelError::Content { path: folder.join(FILE), problem })
            }
        }
    }
}

pub(super) fn read(folder: &Path) -> Result<SentenceTransformersConfig, ModelError> {
    let path = folder.join(FILE);
    let Some(raw) = optional_json::<Map<String, Value>>(&path)? else {
        return Ok(SentenceTransformersConfig::default());
    };
    parse(&raw).map_err(|problems| ModelError::Content { path, problem: problems.join("; ") })
}

fn parse(raw: &Map<String, Value>) -> Result<SentenceTransformersConfig, Vec<String>> {
    let mut fields = JsonFields::new(raw);
    let by_name = prompts(&mut fields);
    fields.optional("default_prompt_name");
    let default = fields.word("default_prompt_name").map(str::to_owned);
    if let Some(name) = default.as_ref().filter(|name| !by_name.contains_key(*name)) {
        let known: Vec<&str> = by_name.keys().map(String::as_str).collect();
        fields.problem(format!(
            "`default_prompt_name` = {name} is not among the prompts ({})",
            known.join(", ")
        ));
    }
    fields.optional("truncate_dim");
    let truncate_dim = fields.optional_size("truncate_dim");
    let model_type = fields.word("model_type").map(str::to_owned);
    fields.optional("activation_fn");
    let activation_fn = fields.word("activation_fn").map(str::to_owned);
    versions(&mut fields);
    // Function with which a caller compares vectors. The `/similarity` and rerank routes always use the cosine, as
    // documented.
    fields.ignore(&[Inert(Kind::OptionalText, &["similarity_fn_name"])]);
    // Required versions of libraries, and layers computed in another precision.
    fields.ignore(&[Inert(Kind::Off, &["requirements", "keep_in_fp32_modules"])]);
    fields.refuse_others();
    let prompts = Prompts { by_name, default };
    fields.finish(SentenceTransformersConfig { prompts, model_type, activation_fn, truncate_dim })
}

/// A value is null if a class of sentence-transformers defines the name and the model has no text for it.
fn prompts(fields: &mut JsonFields<'_>) -> BTreeMap<String, String> {
    let mut by_name = BTreeMap::new();
    let Some(given) = fields.get("prompts") else { return by_name };
    if !given.is_object() {
        fields.problem(format!("`prompts` = {} is not an object", shown(given)));
    }
    for (name, text) in given.as_object().into_iter().flatten() {
        if !text.is_null() && !text.is_string() {
            fields.problem(format!("`prompts` has `{name}` = {}, which is not a text", shown(text)));
        }
        by_name.insert(name.clone(), text.as_str().unwrap_or_default().to_owned());
    }
    by_name
}

/// Checks the versions that wrote the model; that of sentence-transformers must be a version number.
fn versions(fields: &mut JsonFields<'_>) {
    let Some(given) = fields.get("__version__") else { return };
    let Some(version) = given.get("sentence_transformers") else { return };
    let is_version = |text: &str| text.starts_with(|c: char| c.is_ascii_digit());
    if !version.as_str().is_some_and(is_version) {
        fields.problem(format!(
            "`__version__` has `sentence_transformers` = {}, which is not a version number",
            shown(version)
        ));
    }
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
        read(folder.path()).map(|settings| settings.prompts).map_err(|error| error.to_string())
    }

    #[test]
    fn prompts_are_read_by_name_and_the_default_must_exist() {
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
