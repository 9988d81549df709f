//! Yes and no tokens of an LLM reranker: from the module LogitScore of sentence-transformers, or its default.
//!
//! Such a model has no classification head. It is prompted with a pair, and its score is the logit of "yes" minus the
//! logit of "no"; the folder of the module states the token ids. A cross-encoder that was not saved by
//! sentence-transformers has no modules, and then the tokens are looked up in its vocabulary.

use std::path::Path;

use serde_json::{Map, Value};
use tokenizers::Tokenizer;

use super::fields::JsonFields;
use super::{ModelError, YesNo, json};

/// Default of sentence-transformers.
const WORDS: [&str; 2] = ["yes", "no"];
/// Input of the module: the logits of the last token.
const LOGITS: &str = "causal_logits";

/// Reads the tokens from the folder of the module.
pub(super) fn read(stage: &Path, vocabulary: usize) -> Result<YesNo, ModelError> {
    let path = stage.join("config.json");
    let raw: Map<String, Value> = json(&path)?;
    parse(&raw, vocabulary).map_err(|problem| ModelError::Content { path, problem })
}

fn parse(raw: &Map<String, Value>, vocabulary: usize) -> Result<YesNo, String> {
    let mut fields = JsonFields::new(raw);
    if let Some(name) = fields.get("module_input_name").filter(|name| *name != LOGITS) {
        fields.problem(format!("`module_input_name` = {name} is not supported; {LOGITS} is"));
    }
    let mut token = |key: &str| {
        let id = fields.optional(key)?;
        let found =
            id.as_u64().and_then(|id| u32::try_from(id).ok()).filter(|id| (*id as usize) < vocabulary);
        if found.is_none() {
            fields.problem(format!(
                "`{key}` = {id} is not a token of this model, whose ids are below {vocabulary}"
            ));
        }
        found
    };
    let (yes, no) = (token("true_token_id"), token("false_token_id"));
    if yes.is_none() && !fields.has("true_token_id") {
        fields.problem("`true_token_id` is missing".to_owned());
    }
    if let (Some(yes), Some(no)) = (yes, no)
        && yes == no
    {
        fields.problem(format!(
            "`true_token_id` and `false_token_id` are both {yes}, so that every score would be 0"
        ));
    }
    fields.refuse_others();
    let words = YesNo { yes: yes.unwrap_or(0), no };
    fields.finish(words).map_err(|problems| problems.join("; "))
}

/// Returns the default tokens, for a model without modules.
pub(super) fn by_default(folder: &Path, vocabulary: usize) -> Result<YesNo, ModelError> {
    let path = folder.join("tokenizer.json");
    let refuse = |problem: String| ModelError::Content { path: path.clone(), problem };
    let tokenizer = Tokenizer::from_file(&path).map_err(|error| refuse(error.to_string()))?;
    let [yes, no] = WORDS.map(|word| {
        let id = tokenizer.token_to_id(word).filter(|id| (*id as usize) < vocabulary);
        id.ok_or_else(|| {
            refuse(format!(
                "there is no token `{word}`, which an LLM reranker without modules.json needs for its score; if the \
                 model is no reranker (`architectures` of config.json is that of a language model), set another \
                 `task` for the deployment, else save it with the tokens that it was trained with: in Python, \
                 `CrossEncoder(modules=[transformer, LogitScore(…)]).save_pretrained(…)`"
            ))
        })
    });
    Ok(YesNo { yes: yes?, no: Some(no?) })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str) -> Result<YesNo, String> {
        parse(&serde_json::from_str(text).unwrap(), 100)
    }

    #[test]
    fn the_tokens_must_be_in_the_vocabulary_and_the_second_is_optional() {
        for (text, yes, no) in [
            (
                r#"{"true_token_id": 99, "false_token_id": 0, "module_input_name": "causal_logits"}"#,
                99,
                Some(0),
            ),
            (r#"{"true_token_id": 0, "false_token_id": null}"#, 0, None),
            (r#"{"true_token_id": 7}"#, 7, None),
        ] {
            assert_eq!(check(text), Ok(YesNo { yes, no }), "{text}");
        }
        for (text, sentence) in [
            (
                r#"{"true_token_id": 100}"#,
                "`true_token_id` = 100 is not a token of this model, whose ids are below 100",
            ),
            (r#"{"true_token_id": 1, "false_token_id": -1}"#, "`false_token_id` = -1 is not a token"),
            (r#"{"true_token_id": "yes"}"#, "`true_token_id` = \"yes\" is not a token"),
            (r#"{"false_token_id": 1}"#, "`true_token_id` is missing"),
            (r#"{"true_token_id": 5, "false_token_id": 5}"#, "are both 5"),
            (
                r#"{"true_token_id": 1, "module_input_name": "token_embeddings"}"#,
                "`module_input_name` = \"token_embeddings\" is not supported",
            ),
        ] {
            let error = check(text).unwrap_err();
            assert!(error.contains(sentence), "{text}: {error}");
        }
    }

    /// Looks up the default tokens in a vocabulary of these words.
    fn default_of(words: &[&str], vocabulary: usize) -> Result<YesNo, String> {
        let words: Vec<String> =
            words.iter().zip(0..).map(|(word, id): (_, u32)| format!(r#""{word}": {id}"#)).collect();
        let file = format!(
            r#"{{"version": "1.0", "added_tokens": [], "normalizer": null, "pre_tokenizer": null, "decoder": null,
                "post_processor": null, "truncation": null, "padding": null,
                "model": {{"type": "WordLevel", "unk_token": "?", "vocab": {{{}}}}}}}"#,
            words.join(", ")
        );
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("tokenizer.json"), file).unwrap();
        by_default(folder.path(), vocabulary).map_err(|error| error.to_string())
    }

    #[test]
    fn without_modules_the_tokens_are_yes_and_no_and_must_exist() {
        assert_eq!(default_of(&["?", "no", "yes"], 3), Ok(YesNo { yes: 2, no: Some(1) }));
        for (words, vocabulary, missing) in [(&["?", "no", "Yes"], 3, "yes"), (&["?", "yes", "no"], 2, "no")]
        {
            let error = default_of(words, vocabulary).unwrap_err();
            assert!(error.contains(&format!("there is no token `{missing}`")), "{error}");
        }
    }
}
