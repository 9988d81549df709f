//! Labels of a sequence classifier, and the activation of its logits.
//!
//! A reranker is a classifier with one label. The activation is configured in different places: transformers writes the
//! problem type of the training, sentence-transformers the function at the end of its CrossEncoder; the function takes
//! precedence. If neither is present, both libraries use the sigmoid for one label; for more labels they differ, and
//! the softmax of transformers' text classification is used: the labels exclude each other.
//!
//! An LLM reranker (yes/no logits) is a reranker as well, although its configuration has no labels: the module after
//! the transformer computes one number, and only sentence-transformers configures its activation.

use std::collections::BTreeMap;

use replica_core::{DeploymentTask, scores};
use serde_json::{Map, Value};

use super::architecture::DEFAULT_LABELS;
use super::fields::{Inert, JsonFields, Kind, shown};
use super::prompts::SentenceTransformersConfig;
use super::sentence::TrailingModule;

/// Labels of a sequence classifier.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LabelHead {
    /// Labels by id; at least one.
    pub labels: Vec<String>,
    /// Activation of the logits.
    pub activation: LabelActivation,
}

impl LabelHead {
    /// Applies the activation to rows of one logit per label.
    pub fn activate(&self, rows: &mut [f32]) {
        let width = self.labels.len();
        match self.activation {
            LabelActivation::Identity => {}
            // The softmax of a single label is always 1; transformers uses the sigmoid in this case as well.
            LabelActivation::Softmax if width > 1 => {
                rows.chunks_exact_mut(width).for_each(scores::softmax);
            }
            LabelActivation::Softmax | LabelActivation::Sigmoid => {
                rows.iter_mut().for_each(|logit| *logit = scores::sigmoid(*logit));
            }
        }
    }
}

/// Activation of the logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LabelActivation {
    /// The labels exclude each other: the scores sum to one.
    Softmax,
    /// Labels are independent.
    Sigmoid,
    /// The logits are the scores.
    Identity,
}

/// Source of the logits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum HeadKind {
    /// Classification head with its own layers.
    Classifier(LabelHead),
    /// Logits of the yes and no tokens.
    YesNo(LabelHead),
}

/// Maximum number of labels; a larger number indicates a damaged file.
pub const MAX_LABELS: usize = 1 << 16;

/// Reason why a head cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum HeadError {
    /// The files are invalid or unsupported.
    #[error("{0}")]
    Content(String),
    /// The model is for another task than the deployment.
    #[error("{0}")]
    OtherTask(String),
}

impl From<String> for HeadError {
    fn from(problem: String) -> HeadError {
        HeadError::Content(problem)
    }
}

/// Facts about the model from outside config.json.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct HeadContext {
    /// Task of the deployment, if stated.
    pub(super) task: Option<DeploymentTask>,
    /// Whether the model's class is a causal language model.
    pub(super) is_causal_lm: bool,
    /// Whether the chat template has the roles query and document.
    pub(super) is_reranker: bool,
}

impl HeadContext {
    /// Returns whether neither the deployment nor the files state whether a language model embeds or reranks.
    pub(super) fn is_task_ambiguous(
        &self,
        settings: &SentenceTransformersConfig,
        trailing: &TrailingModule,
    ) -> bool {
        self.is_causal_lm
            && self.task.is_none()
            && settings.model_type.is_none()
            && *trailing == TrailingModule::Unlisted
    }
}

/// Returns the head described by `config.json`, if any; `trailing` is the module after the transformer.
pub(super) fn read(
    raw: &Map<String, Value>,
    settings: &SentenceTransformersConfig,
    trailing: &TrailingModule,
    given: &HeadContext,
) -> Result<Option<HeadKind>, HeadError> {
    let mut fields = JsonFields::new(raw);
    let head = parse(&mut fields, settings, trailing, given);
    let problems = fields.problems();
    if problems.is_empty() { head } else { Err(problems.join("; ").into()) }
}

fn parse(
    fields: &mut JsonFields<'_>,
    settings: &SentenceTransformersConfig,
    trailing: &TrailingModule,
    given: &HeadContext,
) -> Result<Option<HeadKind>, HeadError> {
    let classes = fields.optional("architectures").and_then(Value::as_array);
    let classes: Vec<&str> = classes.into_iter().flatten().filter_map(Value::as_str).collect();
    let is = |end: &str| classes.iter().any(|class| class.ends_with(end));
    let (classifies, is_causal_lm) = (is("ForSequenceClassification"), is("ForCausalLM"));
    let crosses = settings.model_type.as_deref() == Some("CrossEncoder");
    let is_yes_no = match trailing {
        // sentence-transformers ignores the head of a model that it pools.
        TrailingModule::Pooling => {
            return match given.task {
                None | Some(DeploymentTask::Embed | DeploymentTask::Rerank) => Ok(None),
                Some(DeploymentTask::Classify) => {
                    Err(other_task(DeploymentTask::Classify, "pools its tokens (modules.json)"))
                }
            };
        }
        TrailingModule::LogitScore(_) => true,
        TrailingModule::Unlisted if is_causal_lm && !classifies => {
            crosses || given.is_reranker || given.task == Some(DeploymentTask::Rerank)
        }
        TrailingModule::Unlisted | TrailingModule::Other => false,
    };
    if is_yes_no && !is_causal_lm || crosses && !is_yes_no && !classifies {
        return Err(format!(
            "`architectures` = {} is not supported for a cross-encoder; supported are …ForSequenceClassification, and \
             …ForCausalLM followed by LogitScore in modules.json, as `CrossEncoder(…).save_pretrained(…)` of \
             sentence-transformers 6 writes it",
            classes.join(", ")
        )
        .into());
    }
    if !is_yes_no && !classifies {
        return match given.task {
            Some(DeploymentTask::Classify) => Err(other_task(
                DeploymentTask::Classify,
                "has no classification head (`architectures` does not end with ForSequenceClassification)",
            )),
            Some(DeploymentTask::Embed | DeploymentTask::Rerank) | None => Ok(None),
        };
    }
    let labels = if is_yes_no { vec![name(0)] } else { labels(fields)? };
    match given.task {
        Some(task @ DeploymentTask::Embed) => {
            let what = if is_yes_no {
                "is an LLM reranker (yes/no logits)"
            } else {
                "has a classification head (`architectures`)"
            };
            return Err(other_task(task, what));
        }
        Some(task @ DeploymentTask::Rerank) if labels.len() > 1 => {
            let what =
                format!("has {} labels (`id2label`, `num_labels`), but a reranker has one", labels.len());
            return Err(other_task(task, &what));
        }
        Some(task @ DeploymentTask::Classify) if is_yes_no => {
            return Err(other_task(task, "is an LLM reranker (yes/no logits)"));
        }
        Some(_) | None => {}
    }
    let function = function(fields, settings)?;
    // The problem type of a language model does not apply, and a cross-encoder ignores it.
    let problem = fields.optional("problem_type").and_then(Value::as_str).filter(|_| !is_yes_no);
    let of_problem = problem.map(|kind| of_problem(kind, labels.len())).transpose()?;
    let of_problem = of_problem.filter(|_| given.task != Some(DeploymentTask::Rerank));
    let activation = match (of_problem, function) {
        (_, Some(function)) => of_function(&function)?,
        (Some(activation), None) => activation,
        (None, None) if labels.len() == 1 => LabelActivation::Sigmoid,
        (None, None) => LabelActivation::Softmax,
    };
    let head = LabelHead { labels, activation };
    Ok(Some(if is_yes_no { HeadKind::YesNo(head) } else { HeadKind::Classifier(head) }))
}

fn other_task(task: DeploymentTask, what: &str) -> HeadError {
    HeadError::OtherTask(format!(
        "the deployment's `task` is {task}, but the model {what}; set the task that the model was trained for"
    ))
}

/// Returns the function at the end of a CrossEncoder, as written by version 6, by versions 4 and 5, or by older ones.
fn function(
    fields: &mut JsonFields<'_>,
    settings: &SentenceTransformersConfig,
) -> Result<Option<String>, String> {
    let old = fields.optional("sbert_ce_default_activation_function").and_then(Value::as_str);
    let mut written = None;
    if let Some(raw) = fields.optional("sentence_transformers").and_then(Value::as_object) {
        let mut nested = JsonFields::new(raw);
        written = nested.word("activation_fn");
        nested.ignore(&[Inert(Kind::OptionalText, &["version"])]);
        nested.refuse_others();
        nested.finish(()).map_err(|problems| format!("`sentence_transformers`: {}", problems.join("; ")))?;
    }
    Ok(settings.activation_fn.as_deref().or(written).or(old).map(str::to_owned))
}

fn name(id: usize) -> String {
    format!("LABEL_{id}")
}

/// Returns the names of the labels by id.
fn labels(fields: &mut JsonFields<'_>) -> Result<Vec<String>, String> {
    let named = fields.optional("id2label").and_then(Value::as_object);
    let mut names = BTreeMap::new();
    for (id, name) in named.into_iter().flatten() {
        match (id.parse::<usize>(), name.as_str()) {
            (Ok(id), Some(name)) => names.insert(id, name.to_owned()),
            _ => {
                return Err(format!(
                    "`id2label` has `{id}` = {}, which is not a label with its id",
                    shown(name)
                ));
            }
        };
    }
    let counted = fields.optional("num_labels").map(|count| {
        let problem = || format!("`num_labels` = {} is not between 1 and {MAX_LABELS}", shown(count));
        count.as_u64().and_then(|count| usize::try_from(count).ok()).ok_or_else(problem)
    });
    let count = match (names.len(), counted.transpose()?) {
        (0, None) => DEFAULT_LABELS,
        (0, Some(count)) => count,
        // transformers derives the number from the names as well.
        (named, _) => named,
    };
    if !(1..=MAX_LABELS).contains(&count) {
        return Err(format!("`num_labels` = {count} is not between 1 and {MAX_LABELS}"));
    }
    if let Some((id, name)) = names.last_key_value().filter(|(id, _)| **id >= count) {
        return Err(format!(
            "`id2label` has {count} labels, but `{name}` has the id {id}; number them from 0"
        ));
    }
    Ok((0..count).map(|id| names.get(&id).cloned().unwrap_or_else(|| name(id))).collect())
}

fn of_problem(kind: &str, labels: usize) -> Result<LabelActivation, String> {
    match kind {
        "regression" => Ok(LabelActivation::Identity),
        "single_label_classification" if labels == 1 => Err(
            "`problem_type` = single_label_classification is for more than one label, but the model has one"
                .to_owned(),
        ),
        "single_label_classification" => Ok(LabelActivation::Softmax),
        "multi_label_classification" => Ok(LabelActivation::Sigmoid),
        other => Err(format!(
            "`problem_type` = {other} is not supported; regression, single_label_classification and \
             multi_label_classification are"
        )),
    }
}

/// Returns the activation for a class of PyTorch. sentence-transformers replaces unknown classes by its default; they
/// are rejected here.
fn of_function(path: &str) -> Result<LabelActivation, String> {
    match path {
        "torch.nn.modules.linear.Identity" | "torch.nn.Identity" => Ok(LabelActivation::Identity),
        "torch.nn.modules.activation.Sigmoid" | "torch.nn.Sigmoid" => Ok(LabelActivation::Sigmoid),
        "torch.nn.modules.activation.Softmax" | "torch.nn.Softmax" => Ok(LabelActivation::Softmax),
        other => Err(format!(
            "`activation_fn` (of `sentence_transformers` or config_sentence_transformers.json, or \
             `sbert_ce_default_activation_function`) {other} is not supported; Identity, Sigmoid and Softmax of \
             torch.nn.modules are"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use LabelActivation::{Identity, Sigmoid, Softmax};

    /// Returns settings with these keys of config_sentence_transformers.json.
    fn settings(beside: &str) -> SentenceTransformersConfig {
        let raw: Map<String, Value> = serde_json::from_str(beside).unwrap();
        let word = |key: &str| raw.get(key).map(|value| value.as_str().unwrap().to_owned());
        SentenceTransformersConfig {
            model_type: word("model_type"),
            activation_fn: word("activation_fn"),
            ..SentenceTransformersConfig::default()
        }
    }

    fn read_text(
        text: &str,
        beside: &str,
        trailing: &TrailingModule,
        task: Option<DeploymentTask>,
    ) -> Result<Option<HeadKind>, String> {
        read_for(text, beside, trailing, task).map_err(|error| error.to_string())
    }

    fn read_for(
        text: &str,
        beside: &str,
        trailing: &TrailingModule,
        task: Option<DeploymentTask>,
    ) -> Result<Option<HeadKind>, HeadError> {
        let raw: Map<String, Value> = serde_json::from_str(text).unwrap();
        let given = HeadContext { task, is_causal_lm: text.contains("ForCausalLM"), is_reranker: false };
        read(&raw, &settings(beside), trailing, &given)
    }

    /// Returns the head of a `BertForSequenceClassification` with additional keys, and with these settings.
    fn check(keys: &str, beside: &str) -> Result<Option<(Vec<String>, LabelActivation)>, String> {
        let text = format!(r#"{{"architectures": ["BertForSequenceClassification"]{keys}}}"#);
        let head = read_text(&text, beside, &TrailingModule::Unlisted, None)?;
        Ok(head.map(|head| match head {
            HeadKind::Classifier(head) => (head.labels, head.activation),
            HeadKind::YesNo(_) => panic!("a classifier has layers"),
        }))
    }

    #[test]
    fn only_a_sequence_classifier_has_labels() {
        for text in [r#"{"architectures": ["BertModel"], "num_labels": 3}"#, "{}"] {
            assert_eq!(read_text(text, "{}", &TrailingModule::Unlisted, None), Ok(None), "{text}");
        }
    }

    /// Returns the head of a model of this class, with these settings.
    fn of_class(
        class: &str,
        keys: &str,
        beside: &str,
        trailing: &TrailingModule,
    ) -> Result<Option<HeadKind>, String> {
        let text = format!(r#"{{"architectures": ["{class}"]{keys}}}"#);
        read_text(&text, beside, trailing, None)
    }

    const CROSS: &str = r#"{"model_type": "CrossEncoder"}"#;

    #[test]
    fn a_language_model_reranks_if_its_modules_or_settings_state_it() {
        let one =
            |activation| Some(HeadKind::YesNo(LabelHead { labels: vec!["LABEL_0".to_owned()], activation }));
        let (scored, qwen) = (TrailingModule::LogitScore("1_LogitScore".into()), "Qwen3ForCausalLM");
        let identity =
            r#"{"model_type": "CrossEncoder", "activation_fn": "torch.nn.modules.linear.Identity"}"#;
        for (keys, beside, trailing, head) in [
            ("", CROSS, &scored, one(Sigmoid)),
            ("", "{}", &scored, one(Sigmoid)),
            (r#", "id2label": {"0": "a", "1": "b"}"#, identity, &scored, one(Identity)),
            (r#", "problem_type": "regression""#, CROSS, &scored, one(Sigmoid)),
            ("", CROSS, &TrailingModule::Unlisted, one(Sigmoid)),
            ("", "{}", &TrailingModule::Unlisted, None),
            ("", CROSS, &TrailingModule::Pooling, None),
        ] {
            assert_eq!(of_class(qwen, keys, beside, trailing), Ok(head), "{keys} {beside} {trailing:?}");
        }
    }

    #[test]
    fn an_unsupported_cross_encoder_is_rejected_with_the_fix() {
        let scored = TrailingModule::LogitScore("1_LogitScore".into());
        for (class, trailing) in [
            ("Qwen3ForCausalLM", &TrailingModule::Other),
            ("Qwen3Model", &TrailingModule::Unlisted),
            ("Qwen3Model", &scored),
            ("BertForSequenceClassification", &scored),
        ] {
            let error = of_class(class, "", CROSS, trailing).unwrap_err();
            assert!(
                error.contains(&format!("`architectures` = {class} is not supported for a cross-encoder")),
                "{error}"
            );
            assert!(error.contains("save_pretrained"), "{error}");
        }
    }

    #[test]
    fn a_stated_task_must_match_the_model() {
        use DeploymentTask::{Classify, Embed, Rerank};
        let bert = |labels: usize| {
            format!(r#"{{"architectures": ["BertForSequenceClassification"], "num_labels": {labels}}}"#)
        };
        let qwen = r#"{"architectures": ["Qwen3ForCausalLM"]}"#.to_owned();
        let base = r#"{"architectures": ["BertModel"]}"#.to_owned();
        for (text, trailing, task, expected) in [
            (bert(1), TrailingModule::Unlisted, Rerank, Ok("layers")),
            (
                bert(3),
                TrailingModule::Unlisted,
                Rerank,
                Err("the deployment's `task` is rerank, but the model has 3 labels"),
            ),
            (bert(3), TrailingModule::Unlisted, Classify, Ok("layers")),
            (
                bert(1),
                TrailingModule::Unlisted,
                Embed,
                Err("`task` is embed, but the model has a classification head"),
            ),
            (bert(1), TrailingModule::Pooling, Embed, Ok("none")),
            (qwen.clone(), TrailingModule::Unlisted, Rerank, Ok("words")),
            (qwen.clone(), TrailingModule::Unlisted, Embed, Ok("none")),
            (
                qwen.clone(),
                TrailingModule::LogitScore("1".into()),
                Embed,
                Err("the model is an LLM reranker"),
            ),
            (qwen, TrailingModule::Unlisted, Classify, Err("has no classification head")),
            (base.clone(), TrailingModule::Pooling, Classify, Err("the model pools its tokens")),
            (base, TrailingModule::Unlisted, Rerank, Ok("none")),
        ] {
            let found = read_for(&text, "{}", &trailing, Some(task));
            assert!(!matches!(found, Err(HeadError::Content(_))), "{found:?}");
            let found = found.map_err(|error| error.to_string());
            match (found, expected) {
                (Ok(head), Ok(expected)) => {
                    let head = match head {
                        None => "none",
                        Some(HeadKind::Classifier(_)) => "layers",
                        Some(HeadKind::YesNo(_)) => "words",
                    };
                    assert_eq!(head, expected, "{text} {task}");
                }
                (Err(error), Err(expected)) => assert!(error.contains(expected), "{error}"),
                (found, expected) => panic!("{text} {task}: {found:?}, not {expected:?}"),
            }
        }
    }

    #[test]
    fn labels_have_their_configured_names_or_numbers() {
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
    fn the_activation_follows_the_configuration() {
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
    fn unsupported_values_are_rejected_by_name() {
        for (keys, beside, sentence) in [
            (r#", "problem_type": "ranking""#, "{}", "`problem_type` = ranking is not supported"),
            (
                r#", "sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Tanh"}"#,
                "{}",
                "torch.nn.modules.activation.Tanh is not supported",
            ),
            (r#", "num_labels": 0"#, "{}", "`num_labels` = 0 is not between 1 and 65536"),
            (r#", "num_labels": 65537"#, "{}", "`num_labels` = 65537"),
            (r#", "id2label": {"0": "a", "2": "b"}"#, "{}", "`id2label` has 2 labels, but `b` has the id 2"),
        ] {
            let error = check(keys, beside).unwrap_err();
            assert!(error.contains(sentence), "{error}");
        }
        assert_eq!(check(r#", "num_labels": 65536"#, "{}").unwrap().unwrap().0.len(), MAX_LABELS);
    }
}
