//! Transformer module (`sentence_bert_config.json`): input options of the first module of sentence-transformers.
//!
//! The keys of the file are the arguments of the module, so the library rejects unknown ones. Keys that make the
//! library load, tokenize or compute differently from the other files of the folder are rejected.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::model::fields::{Inert, JsonFields, Kind, shown};
use crate::model::{ModelError, optional_json};

/// Names of the file in all versions; some contain the name of the model's family.
const FILES: [&str; 7] = [
    "sentence_bert_config.json",
    "sentence_roberta_config.json",
    "sentence_distilbert_config.json",
    "sentence_camembert_config.json",
    "sentence_albert_config.json",
    "sentence_xlm-roberta_config.json",
    "sentence_xlnet_config.json",
];

/// Output for which the transformer is loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::model) enum TransformerTask {
    /// Hidden states, which are pooled.
    HiddenStates,
    /// Logits of labels.
    LabelLogits,
    /// Logits of the yes and no tokens, after a chat template.
    YesNoLogits,
}

impl TransformerTask {
    /// Returns `transformer_task`, the output of the model that is used, and the name of that output.
    fn words(self) -> [&'static str; 3] {
        match self {
            TransformerTask::HiddenStates => ["feature-extraction", "last_hidden_state", "token_embeddings"],
            TransformerTask::LabelLogits => ["sequence-classification", "logits", "scores"],
            TransformerTask::YesNoLogits => ["text-generation", "logits", "causal_logits"],
        }
    }
}

/// Input options.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct TransformerConfig {
    /// Maximum tokens of an input; overrides the tokenizer's files.
    pub(super) max_tokens: Option<usize>,
    /// Whether texts are lower-cased first.
    pub(super) lower_case: bool,
}

/// Path of the file, and its keys.
type ConfigFile = (PathBuf, Map<String, Value>);

/// Returns the file, if it exists.
pub(in crate::model) fn find(folder: &Path) -> Result<Option<ConfigFile>, ModelError> {
    for file in FILES {
        let path = folder.join(file);
        // sentence-transformers skips empty files as well.
        if let Some(raw) = optional_json::<Map<String, Value>>(&path)?.filter(|raw| !raw.is_empty()) {
            return Ok(Some((path, raw)));
        }
    }
    Ok(None)
}

/// Reads the file of a model with modules.json; without modules.json the library ignores it.
pub(super) fn read(folder: &Path, purpose: TransformerTask) -> Result<TransformerConfig, ModelError> {
    let Some((path, raw)) = find(folder)? else {
        // The default task is feature extraction.
        return Ok(TransformerConfig::default());
    };
    parse(&raw, purpose).map_err(|problems| ModelError::Content { path, problem: problems.join("; ") })
}

fn parse(raw: &Map<String, Value>, purpose: TransformerTask) -> Result<TransformerConfig, Vec<String>> {
    let mut fields = JsonFields::new(raw);
    let [task, output, name] = purpose.words();
    let given = fields.word("transformer_task").unwrap_or("feature-extraction");
    if given != task {
        fields.problem(format!(
            "`transformer_task` is {given}, but the other files are those of a model for {task}; set it to {task}"
        ));
    }
    modalities(&mut fields, purpose, output);
    if fields.has("modality_config") {
        let given = fields.word("module_output_name");
        if given != Some(name) {
            fields.problem(format!(
                "`module_output_name` = {} is not {name}, which the next module reads",
                given.unwrap_or("null")
            ));
        }
    }
    // Arguments that change the processing of texts.
    if purpose != TransformerTask::YesNoLogits {
        fields.ignore(&[Inert(Kind::Off, &["processing_kwargs"])]);
    }
    fields.optional("processing_kwargs");
    for key in
        ["model_args", "model_kwargs", "tokenizer_args", "processor_kwargs", "config_args", "config_kwargs"]
    {
        let others = fields.optional(key).and_then(Value::as_object).into_iter().flatten();
        // Code that comes with a model is never executed, regardless of this option; the library removes it as well.
        if let Some((other, value)) = others.into_iter().find(|(other, _)| *other != "trust_remote_code") {
            fields.problem(format!(
                "`{key}` has `{other}` = {}, which is not supported; set it in the file to which it belongs",
                shown(value)
            ));
        }
    }
    fields.ignore(&[
        // Computation without padding, which does not change the results.
        Inert(Kind::OptionalFlag, &["unpad_inputs"]),
        // Without modalities the library sets it by the task.
        Inert(Kind::OptionalText, &["module_output_name"]),
        // Separate limits for queries and documents, tokens appended to queries, another tokenizer.
        Inert(Kind::Off, &["query_length", "document_length", "query_expansion", "tokenizer_name_or_path"]),
    ]);
    fields.optional("do_lower_case");
    let lower_case = fields.flag("do_lower_case", false);
    fields.optional("max_seq_length");
    let max_tokens = fields.optional_size("max_seq_length");
    fields.refuse_others();
    fields.finish(TransformerConfig { max_tokens, lower_case })
}

/// Checks the modalities: texts are read as text or, by an LLM reranker, as messages.
fn modalities(fields: &mut JsonFields<'_>, purpose: TransformerTask, output: &str) {
    let Some(given) = fields.get("modality_config") else { return };
    let Some(modalities) = given.as_object() else {
        fields.problem(format!("`modality_config` = {} is not an object", shown(given)));
        return;
    };
    let supported: &[&str] =
        if purpose == TransformerTask::YesNoLogits { &["text", "message"] } else { &["text"] };
    if !modalities.contains_key("text") {
        fields.problem("`modality_config` has no `text`".to_owned());
    }
    for (modality, parameters) in modalities {
        if !supported.contains(&modality.as_str()) {
            fields.problem(format!(
                "`modality_config` has `{modality}`, which is not supported; {} is",
                supported.join(" and ")
            ));
            continue;
        }
        let Some(parameters) = parameters.as_object() else {
            fields
                .problem(format!("`modality_config`: `{modality}` = {} is not an object", shown(parameters)));
            continue;
        };
        let mut nested = JsonFields::new(parameters);
        if nested.word("method") != Some("forward") {
            nested.problem("`method` is not forward".to_owned());
        }
        let found = nested.get("method_output_name");
        let is_output = |value: &Value| {
            value.as_str() == Some(output)
                || value.as_array().is_some_and(|all| matches!(all.as_slice(), [one] if *one == output))
        };
        if !found.is_some_and(is_output) {
            nested.problem(format!("`method_output_name` is not {output}; set it"));
        }
        // For messages it is read with the chat template; for texts it has no effect.
        nested.ignore(&[Inert(Kind::Any, &["format"])]);
        nested.refuse_others();
        for problem in nested.problems() {
            fields.problem(format!("`modality_config`: `{modality}`: {problem}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn check(raw: Value, purpose: TransformerTask) -> Result<TransformerConfig, String> {
        parse(raw.as_object().unwrap(), purpose).map_err(|problems| problems.join("; "))
    }

    #[test]
    fn old_and_new_files_are_read_and_unsupported_values_rejected_by_key() {
        let old =
            check(json!({"max_seq_length": 256, "do_lower_case": false}), TransformerTask::HiddenStates);
        assert_eq!(old, Ok(TransformerConfig { max_tokens: Some(256), lower_case: false }));
        let modern = json!({"transformer_task": "feature-extraction", "module_output_name": "token_embeddings",
            "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}});
        assert_eq!(check(modern.clone(), TransformerTask::HiddenStates), Ok(TransformerConfig::default()));
        let change = |change: Value| {
            let mut raw = modern.clone();
            raw.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
            check(raw, TransformerTask::HiddenStates).unwrap_err()
        };
        for (changed, sentence) in [
            (json!({"transformer_task": "fill-mask"}), "`transformer_task` is fill-mask"),
            (
                json!({"module_output_name": "scores"}),
                "`module_output_name` = scores is not token_embeddings",
            ),
            (json!({"max_seq_length": 0}), "`max_seq_length` = 0 is not between 1"),
            (json!({"processing_kwargs": {"text": {"max_length": 10}}}), "`processing_kwargs` ="),
            (
                json!({"config_kwargs": {"num_hidden_layers": 1}}),
                "`config_kwargs` has `num_hidden_layers` = 1",
            ),
            (json!({"query_length": 32}), "`query_length` = 32 is not absent"),
            (json!({"made_up": 1}), "`made_up` = 1 is not understood"),
            (
                json!({"modality_config": {"text": {"method": "forward", "method_output_name": ["hidden_states", 1]}}}),
                "`modality_config`: `text`: `method_output_name` is not last_hidden_state",
            ),
        ] {
            let error = change(changed);
            assert!(error.contains(sentence), "{error}");
        }
        check(json!({"model_args": {"trust_remote_code": true}}), TransformerTask::HiddenStates).unwrap();
    }
}
