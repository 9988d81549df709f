//! `config_sentence_transformers.json`: what a model wants before a text, by what the text is for, and what becomes of the
//! vector at the end.
//!
//! Models that were trained with instructions answer worse without them, and nobody sees it. So the prompts are read
//! with the model, and a default that is named and not there is refused.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Map, Value};

use super::fields::{Fields, Inert, Kind, shown};
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

pub(super) const FILE: &str = "config_sentence_transformers.json";

/// What the file says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Settings {
    pub(super) prompts: Prompts,
    /// The class of sentence-transformers that wrote the model.
    pub(super) model_type: Option<String>,
    /// What makes scores of a cross-encoder's numbers.
    pub(super) activation_fn: Option<String>,
    /// Numbers that are kept of a vector.
    pub(super) truncate_dim: Option<usize>,
}

impl Settings {
    /// Refuses what is not the file of a cross-encoder with a list of stages.
    pub(super) fn check_pairs(&self, folder: &Path) -> Result<(), ModelError> {
        match self.model_type.as_deref() {
            Some("CrossEncoder") => Ok(()),
            other => {
                let problem = format!(
                    "`model_type` is {}, and the stages in modules.json are those of a CrossEncoder, which would not take over \
                     the rest of this file",
                    other.unwrap_or("absent, which means SentenceTransformer")
                );
                Err(ModelError::Content { path: folder.join(FILE), problem })
            }
        }
    }

    /// Refuses what is not the file of a model that makes vectors.
    pub(super) fn check_vectors(&self, folder: &Path) -> Result<(), ModelError> {
        match self.model_type.as_deref() {
            None | Some("SentenceTransformer") => Ok(()),
            Some(other) => {
                let problem = format!(
                    "`model_type` is {other}, and the stages in modules.json are those of a SentenceTransformer, which would \
                     not take over the rest of this file"
                );
                Err(ModelError::Content { path: folder.join(FILE), problem })
            }
        }
    }
}

pub(super) fn read(folder: &Path) -> Result<Settings, ModelError> {
    let path = folder.join(FILE);
    let Some(raw) = optional_json::<Map<String, Value>>(&path)? else { return Ok(Settings::default()) };
    parse(&raw).map_err(|problems| ModelError::Content { path, problem: problems.join("; ") })
}

fn parse(raw: &Map<String, Value>) -> Result<Settings, Vec<String>> {
    let mut fields = Fields::new(raw);
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
    // How a caller compares vectors; here that is always the cosine, and said so.
    fields.leave(&[Inert(Kind::OptionalText, &["similarity_fn_name"])]);
    // Versions of libraries that the model wants, and layers that are computed in another precision.
    fields.leave(&[Inert(Kind::Off, &["requirements", "keep_in_fp32_modules"])]);
    fields.refuse_others();
    let prompts = Prompts { by_name, default };
    fields.finish(Settings { prompts, model_type, activation_fn, truncate_dim })
}

/// A value is null where a class of sentence-transformers knows the name and the model has no text for it.
fn prompts(fields: &mut Fields<'_>) -> BTreeMap<String, String> {
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

/// The versions that wrote the model. That of sentence-transformers has to be one.
fn versions(fields: &mut Fields<'_>) {
    let Some(given) = fields.get("__version__") else { return };
    let Some(version) = given.get("sentence_transformers") else { return };
    let is_version = |text: &str| text.starts_with(|c: char| c.is_ascii_digit());
    if !version.as_str().is_some_and(is_version) {
        fields.problem(format!(
            "`__version__` has `sentence_transformers` = {}, which is no version",
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
