//! `sentence_bert_config.json`: how the first stage of sentence-transformers reads texts and runs its transformer.
//!
//! The file's keys are the arguments of the stage, so the library fails on any that it does not know. Those that would
//! have the library load, tokenise or compute otherwise than by the other files of the folder are refused.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::model::fields::{Fields, Inert, Kind, shown};
use crate::model::{ModelError, optional_json};

/// The names that the file had in some version, after the model that it stood beside.
const FILES: [&str; 7] = [
    "sentence_bert_config.json",
    "sentence_roberta_config.json",
    "sentence_distilbert_config.json",
    "sentence_camembert_config.json",
    "sentence_albert_config.json",
    "sentence_xlm-roberta_config.json",
    "sentence_xlnet_config.json",
];

/// What the transformer is loaded for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::model) enum Purpose {
    /// Its states, which are pooled.
    States,
    /// The logits of its labels.
    Labels,
    /// The logits of words, behind a chat template.
    Words,
}

impl Purpose {
    /// `transformer_task`, what of the model's output is taken, and what that is called.
    fn words(self) -> [&'static str; 3] {
        match self {
            Purpose::States => ["feature-extraction", "last_hidden_state", "token_embeddings"],
            Purpose::Labels => ["sequence-classification", "logits", "scores"],
            Purpose::Words => ["text-generation", "logits", "causal_logits"],
        }
    }
}

/// What the file says of texts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct TransformerConfig {
    /// Tokens of the longest input, whatever the tokenizer's files say.
    pub(super) max_tokens: Option<usize>,
    /// Whether texts are put into lower case before anything else.
    pub(super) lower_case: bool,
}

/// Where the file is, and its keys.
type Found = (PathBuf, Map<String, Value>);

/// The file, if there is one.
pub(in crate::model) fn find(folder: &Path) -> Result<Option<Found>, ModelError> {
    for file in FILES {
        let path = folder.join(file);
        // sentence-transformers goes on to the next one behind an empty one, too.
        if let Some(raw) = optional_json::<Map<String, Value>>(&path)?.filter(|raw| !raw.is_empty()) {
            return Ok(Some((path, raw)));
        }
    }
    Ok(None)
}

/// Reads the file of a model with a list of stages; without a list it is not read.
pub(super) fn read(folder: &Path, purpose: Purpose) -> Result<TransformerConfig, ModelError> {
    let Some((path, raw)) = find(folder)? else {
        // By default the states are what is wanted.
        return Ok(TransformerConfig::default());
    };
    parse(&raw, purpose).map_err(|problems| ModelError::Content { path, problem: problems.join("; ") })
}

fn parse(raw: &Map<String, Value>, purpose: Purpose) -> Result<TransformerConfig, Vec<String>> {
    let mut fields = Fields::new(raw);
    let [task, output, name] = purpose.words();
    let given = fields.word("transformer_task").unwrap_or("feature-extraction");
    if given != task {
        fields.problem(format!(
            "`transformer_task` is {given}, and the other files are those of a model for {task}"
        ));
    }
    modalities(&mut fields, purpose, output);
    if fields.has("modality_config") {
        let given = fields.word("module_output_name");
        if given != Some(name) {
            fields.problem(format!(
                "`module_output_name` = {} is not {name}, which the next stage reads",
                given.unwrap_or("null")
            ));
        }
    }
    // What is computed for texts otherwise than by the other files.
    if purpose != Purpose::Words {
        fields.leave(&[Inert(Kind::Off, &["processing_kwargs"])]);
    }
    fields.optional("processing_kwargs");
    for key in
        ["model_args", "model_kwargs", "tokenizer_args", "processor_kwargs", "config_args", "config_kwargs"]
    {
        let others = fields.optional(key).and_then(Value::as_object).into_iter().flatten();
        // Nothing that comes with a model is run, whatever this says; the library takes it out as well.
        if let Some((other, value)) = others.into_iter().find(|(other, _)| *other != "trust_remote_code") {
            fields.problem(format!(
                "`{key}` has `{other}` = {}, which is not supported; write it to the file that it is for",
                shown(value)
            ));
        }
    }
    fields.leave(&[
        // The same without padding between texts.
        Inert(Kind::OptionalFlag, &["unpad_inputs"]),
        // Without modalities the library sets it by the task.
        Inert(Kind::OptionalText, &["module_output_name"]),
        // Limits of their own for queries and documents, tokens that are put behind queries, another tokenizer.
        Inert(Kind::Off, &["query_length", "document_length", "query_expansion", "tokenizer_name_or_path"]),
    ]);
    fields.optional("do_lower_case");
    let lower_case = fields.flag("do_lower_case", false);
    fields.optional("max_seq_length");
    let max_tokens = fields.optional_size("max_seq_length");
    fields.refuse_others();
    fields.finish(TransformerConfig { max_tokens, lower_case })
}

/// Texts are read as text or, of a model that judges by words, as messages.
fn modalities(fields: &mut Fields<'_>, purpose: Purpose, output: &str) {
    let Some(given) = fields.get("modality_config") else { return };
    let Some(modalities) = given.as_object() else {
        fields.problem(format!("`modality_config` = {} is not an object", shown(given)));
        return;
    };
    let wanted: &[&str] = if purpose == Purpose::Words { &["text", "message"] } else { &["text"] };
    if !modalities.contains_key("text") {
        fields.problem("`modality_config` has no `text`".to_owned());
    }
    for (modality, parameters) in modalities {
        if !wanted.contains(&modality.as_str()) {
            fields.problem(format!(
                "`modality_config` has `{modality}`, which is not supported; {} is",
                wanted.join(" and ")
            ));
            continue;
        }
        let Some(parameters) = parameters.as_object() else {
            fields
                .problem(format!("`modality_config`: `{modality}` = {} is not an object", shown(parameters)));
            continue;
        };
        let mut within = Fields::new(parameters);
        if within.word("method") != Some("forward") {
            within.problem("`method` is not forward".to_owned());
        }
        let found = within.get("method_output_name");
        let is_output = |value: &Value| {
            value.as_str() == Some(output)
                || value.as_array().is_some_and(|all| matches!(all.as_slice(), [one] if *one == output))
        };
        if !found.is_some_and(is_output) {
            within.problem(format!("`method_output_name` is not {output}"));
        }
        // Of a message it is looked up with the chat template; of a text it means nothing.
        within.leave(&[Inert(Kind::Any, &["format"])]);
        within.refuse_others();
        for problem in within.problems() {
            fields.problem(format!("`modality_config`: `{modality}`: {problem}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn check(raw: Value, purpose: Purpose) -> Result<TransformerConfig, String> {
        parse(raw.as_object().unwrap(), purpose).map_err(|problems| problems.join("; "))
    }

    #[test]
    fn both_forms_are_read_and_what_changes_the_vectors_is_refused_by_its_key() {
        let old = check(json!({"max_seq_length": 256, "do_lower_case": false}), Purpose::States);
        assert_eq!(old, Ok(TransformerConfig { max_tokens: Some(256), lower_case: false }));
        let modern = json!({"transformer_task": "feature-extraction", "module_output_name": "token_embeddings",
            "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}});
        assert_eq!(check(modern.clone(), Purpose::States), Ok(TransformerConfig::default()));
        let change = |change: Value| {
            let mut raw = modern.clone();
            raw.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
            check(raw, Purpose::States).unwrap_err()
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
        check(json!({"model_args": {"trust_remote_code": true}}), Purpose::States).unwrap();
    }
}
