//! What a sequence classifier's labels are called, and how its raw numbers become scores.
//!
//! A reranker is a classifier of one label. What its numbers mean is said in different places: transformers writes the
//! kind of problem that was trained for, sentence-transformers the function that its CrossEncoder ends with. Where
//! neither is written the convention of both holds, that one label is a probability of its own; for more labels they
//! differ, and the one of transformers' text classification is taken: the labels exclude each other.
//!
//! A language model that judges pairs by two words is a reranker as well, though its configuration counts no labels: the
//! stage behind it makes one number, and what becomes of that only sentence-transformers says.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Deserialize;

use super::sentence::Behind;
use super::{ModelError, json, optional_json, prompts};

/// The labels of a sequence classifier.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LabelHead {
    /// By id; at least one.
    pub labels: Vec<String>,
    /// How raw numbers become scores.
    pub activation: LabelActivation,
}

/// How the raw numbers of the labels become scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LabelActivation {
    /// One label is right: together they make one.
    Softmax,
    /// Each label is right or not for itself.
    Sigmoid,
    /// The raw numbers are the scores.
    Identity,
}

/// What makes the numbers of the labels.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Head {
    /// Layers of their own.
    Layers(LabelHead),
    /// The logits of words.
    Words(LabelHead),
}

/// More labels than any classifier has; what is beyond is a damaged file.
pub const MAX_LABELS: usize = 1 << 16;

#[derive(Deserialize)]
struct RawConfig {
    architectures: Option<Vec<String>>,
    id2label: Option<BTreeMap<usize, String>>,
    num_labels: Option<usize>,
    problem_type: Option<String>,
    sentence_transformers: Option<RawCrossEncoder>,
    /// The same before version 4.
    sbert_ce_default_activation_function: Option<String>,
}

/// In `config.json` of version 4 and 5, in `config_sentence_transformers.json` of version 6.
#[derive(Default, Deserialize)]
struct RawCrossEncoder {
    activation_fn: Option<String>,
    model_type: Option<String>,
}

/// What transformers leaves out of `config.json`, since it is the default of its configurations.
const DEFAULT_LABELS: usize = 2;

/// The head that `config.json` at this path describes, if the model has one; `behind` is what its stages say.
pub(super) fn read(folder: &Path, path: &Path, behind: &Behind) -> Result<Option<Head>, ModelError> {
    let raw: RawConfig = json(path)?;
    let beside: RawCrossEncoder = optional_json(&folder.join(prompts::FILE))?.unwrap_or_default();
    raw.check(beside, behind).map_err(|problem| ModelError::Content { path: path.to_owned(), problem })
}

impl RawConfig {
    fn check(self, beside: RawCrossEncoder, behind: &Behind) -> Result<Option<Head>, String> {
        let is = |end: &str| self.architectures.iter().flatten().any(|class| class.ends_with(end));
        let (classifies, continues) = (is("ForSequenceClassification"), is("ForCausalLM"));
        let crosses = beside.model_type.as_deref() == Some("CrossEncoder");
        let words = match behind {
            // sentence-transformers takes the transformer alone of whatever it pools.
            Behind::Pooling => return Ok(None),
            Behind::LogitScore(_) => true,
            Behind::Unlisted => crosses && continues && !classifies,
            Behind::Other => false,
        };
        if words && !continues || crosses && !words && !classifies {
            let given = self.architectures.unwrap_or_default().join(", ");
            return Err(format!(
                "`architectures` = {given} as a cross-encoder is not supported; a …ForSequenceClassification is, and a \
                 …ForCausalLM with LogitScore behind it in modules.json, as `CrossEncoder(…).save_pretrained(…)` of \
                 sentence-transformers 6 writes it"
            ));
        }
        if !words && !classifies {
            return Ok(None);
        }
        let labels = if words { labels(None, Some(1))? } else { labels(self.id2label, self.num_labels)? };
        let old = self.sbert_ce_default_activation_function;
        let function = self
            .sentence_transformers
            .and_then(|written| written.activation_fn)
            .or(old)
            .or(beside.activation_fn);
        // What a language model was trained for is none of these problems.
        let problem = self.problem_type.filter(|_| !words);
        let activation = match (problem.as_deref(), function.as_deref()) {
            (Some(kind), _) => of_problem(kind)?,
            (None, Some(function)) => of_function(function)?,
            (None, None) if labels.len() == 1 => LabelActivation::Sigmoid,
            (None, None) => LabelActivation::Softmax,
        };
        let head = LabelHead { labels, activation };
        Ok(Some(if words { Head::Words(head) } else { Head::Layers(head) }))
    }
}

fn labels(names: Option<BTreeMap<usize, String>>, count: Option<usize>) -> Result<Vec<String>, String> {
    let names = names.unwrap_or_default();
    let count = match (names.len(), count) {
        (0, None) => DEFAULT_LABELS,
        (0, Some(count)) => count,
        // transformers takes the number from the names, too.
        (named, _) => named,
    };
    if !(1..=MAX_LABELS).contains(&count) {
        return Err(format!("`num_labels` = {count} is not between 1 and {MAX_LABELS}"));
    }
    if let Some((id, name)) = names.last_key_value().filter(|(id, _)| **id >= count) {
        return Err(format!("`id2label` has {count} labels, of which `{name}` is number {id}"));
    }
    Ok((0..count).map(|id| names.get(&id).cloned().unwrap_or_else(|| format!("LABEL_{id}"))).collect())
}

fn of_problem(kind: &str) -> Result<LabelActivation, String> {
    match kind {
        "regression" => Ok(LabelActivation::Identity),
        "single_label_classification" => Ok(LabelActivation::Softmax),
        "multi_label_classification" => Ok(LabelActivation::Sigmoid),
        other => Err(format!(
            "`problem_type` = {other} is not supported; regression, single_label_classification and \
             multi_label_classification are"
        )),
    }
}

/// `torch.nn.modules.activation.Sigmoid` is a Sigmoid.
fn of_function(path: &str) -> Result<LabelActivation, String> {
    match path.rsplit('.').next().unwrap_or(path) {
        "Identity" => Ok(LabelActivation::Identity),
        "Sigmoid" => Ok(LabelActivation::Sigmoid),
        "Softmax" => Ok(LabelActivation::Softmax),
        other => Err(format!("`activation_fn` {other} is not supported; Identity, Sigmoid and Softmax are")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use LabelActivation::{Identity, Sigmoid, Softmax};

    /// The head of a `BertForSequenceClassification` with these keys more, and of what is written beside it.
    fn check(keys: &str, beside: &str) -> Result<Option<(Vec<String>, LabelActivation)>, String> {
        let text = format!(r#"{{"architectures": ["BertForSequenceClassification"]{keys}}}"#);
        let raw: RawConfig = serde_json::from_str(&text).unwrap();
        let head = raw.check(serde_json::from_str(beside).unwrap(), &Behind::Unlisted)?;
        Ok(head.map(|head| match head {
            Head::Layers(head) => (head.labels, head.activation),
            Head::Words(_) => panic!("a classifier has layers"),
        }))
    }

    #[test]
    fn only_a_sequence_classifier_has_labels() {
        for text in [r#"{"architectures": ["BertModel"], "num_labels": 3}"#, "{}"] {
            let raw: RawConfig = serde_json::from_str(text).unwrap();
            assert_eq!(raw.check(RawCrossEncoder::default(), &Behind::Unlisted), Ok(None), "{text}");
        }
    }

    /// The head of a model of this class, which is marked as a cross-encoder or not.
    fn of_class(class: &str, keys: &str, beside: &str, behind: &Behind) -> Result<Option<Head>, String> {
        let text = format!(r#"{{"architectures": ["{class}"]{keys}}}"#);
        let raw: RawConfig = serde_json::from_str(&text).unwrap();
        raw.check(serde_json::from_str(beside).unwrap(), behind)
    }

    const CROSS: &str = r#"{"model_type": "CrossEncoder"}"#;

    #[test]
    fn a_language_model_judges_by_words_where_its_stages_say_so_or_there_are_none() {
        let one =
            |activation| Some(Head::Words(LabelHead { labels: vec!["LABEL_0".to_owned()], activation }));
        let (scored, qwen) = (Behind::LogitScore("1_LogitScore".into()), "Qwen3ForCausalLM");
        let identity =
            r#"{"model_type": "CrossEncoder", "activation_fn": "torch.nn.modules.linear.Identity"}"#;
        for (keys, beside, behind, head) in [
            ("", CROSS, &scored, one(Sigmoid)),
            ("", "{}", &scored, one(Sigmoid)),
            (r#", "id2label": {"0": "a", "1": "b"}"#, identity, &scored, one(Identity)),
            (r#", "problem_type": "regression""#, CROSS, &scored, one(Sigmoid)),
            ("", CROSS, &Behind::Unlisted, one(Sigmoid)),
            ("", "{}", &Behind::Unlisted, None),
            ("", CROSS, &Behind::Pooling, None),
        ] {
            assert_eq!(of_class(qwen, keys, beside, behind), Ok(head), "{keys} {beside} {behind:?}");
        }
    }

    #[test]
    fn a_cross_encoder_of_another_kind_is_refused_with_what_to_do() {
        let scored = Behind::LogitScore("1_LogitScore".into());
        for (class, behind) in [
            ("Qwen3ForCausalLM", &Behind::Other),
            ("Qwen3Model", &Behind::Unlisted),
            ("Qwen3Model", &scored),
            ("BertForSequenceClassification", &scored),
        ] {
            let error = of_class(class, "", CROSS, behind).unwrap_err();
            assert!(error.contains(&format!("`architectures` = {class} as a cross-encoder")), "{error}");
            assert!(error.contains("save_pretrained"), "{error}");
        }
    }

    #[test]
    fn labels_have_the_names_that_are_written_or_their_numbers() {
        for (keys, labels) in [
            ("", &["LABEL_0", "LABEL_1"][..]),
            (r#", "num_labels": 1"#, &["LABEL_0"]),
            (r#", "id2label": {"1": "no", "0": "yes", "2": "maybe"}"#, &["yes", "no", "maybe"]),
        ] {
            let (found, _) = check(keys, "{}").unwrap().unwrap();
            assert_eq!(found, labels, "{keys}");
        }
    }

    #[test]
    fn scores_are_made_as_the_configuration_says() {
        const ONE: &str = r#", "num_labels": 1"#;
        for (keys, beside, activation) in [
            (ONE.to_owned(), "{}", Sigmoid),
            (String::new(), "{}", Softmax),
            (r#", "problem_type": "multi_label_classification""#.to_owned(), "{}", Sigmoid),
            (r#", "problem_type": "single_label_classification""#.to_owned(), "{}", Softmax),
            (format!(r#"{ONE}, "problem_type": "regression""#), "{}", Identity),
            (
                format!(
                    r#"{ONE}, "sentence_transformers": {{"activation_fn": "torch.nn.modules.linear.Identity"}}"#
                ),
                "{}",
                Identity,
            ),
            (
                format!(
                    r#"{ONE}, "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity""#
                ),
                "{}",
                Identity,
            ),
            (
                ONE.to_owned(),
                r#"{"model_type": "CrossEncoder", "activation_fn": "torch.nn.modules.linear.Identity"}"#,
                Identity,
            ),
            (
                r#", "sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}"#
                    .to_owned(),
                "{}",
                Sigmoid,
            ),
        ] {
            assert_eq!(check(&keys, beside).unwrap().unwrap().1, activation, "{keys} {beside}");
        }
    }

    #[test]
    fn what_is_not_understood_is_refused_by_name() {
        for (keys, beside, sentence) in [
            (r#", "problem_type": "ranking""#, "{}", "`problem_type` = ranking is not supported"),
            (
                r#", "sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Tanh"}"#,
                "{}",
                "`activation_fn` Tanh is not supported",
            ),
            (r#", "num_labels": 0"#, "{}", "`num_labels` = 0 is not between 1 and 65536"),
            (r#", "num_labels": 65537"#, "{}", "`num_labels` = 65537"),
            (
                r#", "id2label": {"0": "a", "2": "b"}"#,
                "{}",
                "`id2label` has 2 labels, of which `b` is number 2",
            ),
        ] {
            let error = check(keys, beside).unwrap_err();
            assert!(error.contains(sentence), "{error}");
        }
        assert_eq!(check(r#", "num_labels": 65536"#, "{}").unwrap().unwrap().0.len(), MAX_LABELS);
    }
}
