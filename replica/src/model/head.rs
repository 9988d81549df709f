//! What a sequence classifier's labels are called, and how its raw numbers become scores.
//!
//! A reranker is a classifier of one label. What its numbers mean is said in different places: transformers writes the
//! kind of problem that was trained for, sentence-transformers the function that its CrossEncoder ends with, which counts
//! if both are there. Where
//! neither is written the convention of both holds, that one label is a probability of its own; for more labels they
//! differ, and the one of transformers' text classification is taken: the labels exclude each other.
//!
//! A language model that judges pairs by two words is a reranker as well, though its configuration counts no labels: the
//! stage behind it makes one number, and what becomes of that only sentence-transformers says.

use std::collections::BTreeMap;

use replica_core::{DeploymentTask, scores};
use serde_json::{Map, Value};

use super::fields::{Fields, Inert, Kind, shown};
use super::prompts::Settings;
use super::sentence::Behind;

/// The labels of a sequence classifier.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LabelHead {
    /// By id; at least one.
    pub labels: Vec<String>,
    /// How raw numbers become scores.
    pub activation: LabelActivation,
}

impl LabelHead {
    /// What the configuration makes of raw numbers: rows of one number per label.
    pub fn activate(&self, rows: &mut [f32]) {
        let width = self.labels.len();
        match self.activation {
            LabelActivation::Identity => {}
            // Of one label the softmax is 1 whatever the model says; transformers takes the sigmoid there as well.
            LabelActivation::Softmax if width > 1 => {
                rows.chunks_exact_mut(width).for_each(scores::softmax);
            }
            LabelActivation::Softmax | LabelActivation::Sigmoid => {
                rows.iter_mut().for_each(|logit| *logit = scores::sigmoid(*logit));
            }
        }
    }
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

/// What is known of the model beside its files on labels.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Given {
    /// What the deployment is for, if that is stated.
    pub(super) task: Option<DeploymentTask>,
    /// Whether its class goes on with texts.
    pub(super) continues: bool,
    /// Whether its chat template shows a query and a document.
    pub(super) is_reranker: bool,
}

impl Given {
    /// Whether neither the deployment nor the files say if a language model embeds or judges.
    pub(super) fn is_open(&self, settings: &Settings, behind: &Behind) -> bool {
        self.continues && self.task.is_none() && settings.model_type.is_none() && *behind == Behind::Unlisted
    }
}

/// What transformers leaves out of `config.json`, since it is the default of its configurations.
const DEFAULT_LABELS: usize = 2;

/// The head that the keys of `config.json` describe, if the model has one; `behind` is what its stages say.
pub(super) fn read(
    raw: &Map<String, Value>,
    settings: &Settings,
    behind: &Behind,
    given: &Given,
) -> Result<Option<Head>, String> {
    let mut fields = Fields::new(raw);
    let head = parse(&mut fields, settings, behind, given);
    let problems = fields.problems();
    if problems.is_empty() { head } else { Err(problems.join("; ")) }
}

fn parse(
    fields: &mut Fields<'_>,
    settings: &Settings,
    behind: &Behind,
    given: &Given,
) -> Result<Option<Head>, String> {
    let classes = fields.optional("architectures").and_then(Value::as_array);
    let classes: Vec<&str> = classes.into_iter().flatten().filter_map(Value::as_str).collect();
    let is = |end: &str| classes.iter().any(|class| class.ends_with(end));
    let (classifies, continues) = (is("ForSequenceClassification"), is("ForCausalLM"));
    let crosses = settings.model_type.as_deref() == Some("CrossEncoder");
    let words = match behind {
        // sentence-transformers takes the transformer alone of whatever it pools.
        Behind::Pooling => {
            return match given.task {
                None | Some(DeploymentTask::Embed | DeploymentTask::Rerank) => Ok(None),
                Some(DeploymentTask::Classify) => {
                    Err(other_task(DeploymentTask::Classify, "pools (modules.json)"))
                }
            };
        }
        Behind::LogitScore(_) => true,
        Behind::Unlisted if continues && !classifies => {
            crosses || given.is_reranker || given.task == Some(DeploymentTask::Rerank)
        }
        Behind::Unlisted | Behind::Other => false,
    };
    if words && !continues || crosses && !words && !classifies {
        return Err(format!(
            "`architectures` = {} as a cross-encoder is not supported; a …ForSequenceClassification is, and a \
             …ForCausalLM with LogitScore behind it in modules.json, as `CrossEncoder(…).save_pretrained(…)` of \
             sentence-transformers 6 writes it",
            classes.join(", ")
        ));
    }
    if !words && !classifies {
        return match given.task {
            Some(DeploymentTask::Classify) => Err(other_task(
                DeploymentTask::Classify,
                "has no head for labels (`architectures` ends with ForSequenceClassification of one that has)",
            )),
            Some(DeploymentTask::Embed | DeploymentTask::Rerank) | None => Ok(None),
        };
    }
    let labels = if words { vec![name(0)] } else { labels(fields)? };
    match given.task {
        Some(task @ DeploymentTask::Embed) => {
            let what =
                if words { "judges pairs by words" } else { "has a head for labels (`architectures`)" };
            return Err(other_task(task, what));
        }
        Some(task @ DeploymentTask::Rerank) if labels.len() > 1 => {
            let what =
                format!("has {} labels (`id2label`, `num_labels`), and a reranker has one", labels.len());
            return Err(other_task(task, &what));
        }
        Some(task @ DeploymentTask::Classify) if words => {
            return Err(other_task(task, "judges pairs by words"));
        }
        Some(_) | None => {}
    }
    let function = function(fields, settings)?;
    // What a language model was trained for is none of these problems, and a cross-encoder does not look at it.
    let problem = fields.optional("problem_type").and_then(Value::as_str).filter(|_| !words);
    let of_problem = problem.map(|kind| of_problem(kind, labels.len())).transpose()?;
    let of_problem = of_problem.filter(|_| given.task != Some(DeploymentTask::Rerank));
    let activation = match (of_problem, function) {
        (_, Some(function)) => of_function(&function)?,
        (Some(activation), None) => activation,
        (None, None) if labels.len() == 1 => LabelActivation::Sigmoid,
        (None, None) => LabelActivation::Softmax,
    };
    let head = LabelHead { labels, activation };
    Ok(Some(if words { Head::Words(head) } else { Head::Layers(head) }))
}

fn other_task(task: DeploymentTask, what: &str) -> String {
    format!(
        "the deployment's `task` is {task}, and the model {what}; state the task that the model was trained for"
    )
}

/// The function that a CrossEncoder ends with: as version 6 writes it, as versions 4 and 5 do, or as those before.
fn function(fields: &mut Fields<'_>, settings: &Settings) -> Result<Option<String>, String> {
    let old = fields.optional("sbert_ce_default_activation_function").and_then(Value::as_str);
    let mut written = None;
    if let Some(raw) = fields.optional("sentence_transformers").and_then(Value::as_object) {
        let mut within = Fields::new(raw);
        written = within.word("activation_fn");
        within.leave(&[Inert(Kind::OptionalText, &["version"])]);
        within.refuse_others();
        within.finish(()).map_err(|problems| format!("`sentence_transformers`: {}", problems.join("; ")))?;
    }
    Ok(settings.activation_fn.as_deref().or(written).or(old).map(str::to_owned))
}

fn name(id: usize) -> String {
    format!("LABEL_{id}")
}

/// The names of the labels by id.
fn labels(fields: &mut Fields<'_>) -> Result<Vec<String>, String> {
    let named = fields.optional("id2label").and_then(Value::as_object);
    let mut names = BTreeMap::new();
    for (id, name) in named.into_iter().flatten() {
        match (id.parse::<usize>(), name.as_str()) {
            (Ok(id), Some(name)) => names.insert(id, name.to_owned()),
            _ => {
                return Err(format!(
                    "`id2label` has `{id}` = {}, which is not a label by its id",
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
        // transformers takes the number from the names, too.
        (named, _) => named,
    };
    if !(1..=MAX_LABELS).contains(&count) {
        return Err(format!("`num_labels` = {count} is not between 1 and {MAX_LABELS}"));
    }
    if let Some((id, name)) = names.last_key_value().filter(|(id, _)| **id >= count) {
        return Err(format!("`id2label` has {count} labels, of which `{name}` is number {id}"));
    }
    Ok((0..count).map(|id| names.get(&id).cloned().unwrap_or_else(|| name(id))).collect())
}

fn of_problem(kind: &str, labels: usize) -> Result<LabelActivation, String> {
    match kind {
        "regression" => Ok(LabelActivation::Identity),
        "single_label_classification" if labels == 1 => {
            Err("`problem_type` = single_label_classification is for more than one label, and there is one"
                .to_owned())
        }
        "single_label_classification" => Ok(LabelActivation::Softmax),
        "multi_label_classification" => Ok(LabelActivation::Sigmoid),
        other => Err(format!(
            "`problem_type` = {other} is not supported; regression, single_label_classification and \
             multi_label_classification are"
        )),
    }
}

/// By the classes of PyTorch; for others sentence-transformers takes its default, which this does not.
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

    /// What is written beside `config.json`.
    fn settings(beside: &str) -> Settings {
        let raw: Map<String, Value> = serde_json::from_str(beside).unwrap();
        let word = |key: &str| raw.get(key).map(|value| value.as_str().unwrap().to_owned());
        Settings {
            model_type: word("model_type"),
            activation_fn: word("activation_fn"),
            ..Settings::default()
        }
    }

    fn read_text(
        text: &str,
        beside: &str,
        behind: &Behind,
        task: Option<DeploymentTask>,
    ) -> Result<Option<Head>, String> {
        let raw: Map<String, Value> = serde_json::from_str(text).unwrap();
        let given = Given { task, continues: text.contains("ForCausalLM"), is_reranker: false };
        read(&raw, &settings(beside), behind, &given)
    }

    /// The head of a `BertForSequenceClassification` with these keys more, and of what is written beside it.
    fn check(keys: &str, beside: &str) -> Result<Option<(Vec<String>, LabelActivation)>, String> {
        let text = format!(r#"{{"architectures": ["BertForSequenceClassification"]{keys}}}"#);
        let head = read_text(&text, beside, &Behind::Unlisted, None)?;
        Ok(head.map(|head| match head {
            Head::Layers(head) => (head.labels, head.activation),
            Head::Words(_) => panic!("a classifier has layers"),
        }))
    }

    #[test]
    fn only_a_sequence_classifier_has_labels() {
        for text in [r#"{"architectures": ["BertModel"], "num_labels": 3}"#, "{}"] {
            assert_eq!(read_text(text, "{}", &Behind::Unlisted, None), Ok(None), "{text}");
        }
    }

    /// The head of a model of this class, which is marked as a cross-encoder or not.
    fn of_class(class: &str, keys: &str, beside: &str, behind: &Behind) -> Result<Option<Head>, String> {
        let text = format!(r#"{{"architectures": ["{class}"]{keys}}}"#);
        read_text(&text, beside, behind, None)
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
    fn a_stated_task_is_held_against_the_model() {
        use DeploymentTask::{Classify, Embed, Rerank};
        let bert = |labels: usize| {
            format!(r#"{{"architectures": ["BertForSequenceClassification"], "num_labels": {labels}}}"#)
        };
        let qwen = r#"{"architectures": ["Qwen3ForCausalLM"]}"#.to_owned();
        let base = r#"{"architectures": ["BertModel"]}"#.to_owned();
        for (text, behind, task, wanted) in [
            (bert(1), Behind::Unlisted, Rerank, Ok("layers")),
            (
                bert(3),
                Behind::Unlisted,
                Rerank,
                Err("the deployment's `task` is rerank, and the model has 3 labels"),
            ),
            (bert(3), Behind::Unlisted, Classify, Ok("layers")),
            (bert(1), Behind::Unlisted, Embed, Err("`task` is embed, and the model has a head for labels")),
            (bert(1), Behind::Pooling, Embed, Ok("none")),
            (qwen.clone(), Behind::Unlisted, Rerank, Ok("words")),
            (qwen.clone(), Behind::Unlisted, Embed, Ok("none")),
            (qwen.clone(), Behind::LogitScore("1".into()), Embed, Err("the model judges pairs by words")),
            (qwen, Behind::Unlisted, Classify, Err("has no head for labels")),
            (base.clone(), Behind::Pooling, Classify, Err("the model pools")),
            (base, Behind::Unlisted, Rerank, Ok("none")),
        ] {
            let found = read_text(&text, "{}", &behind, Some(task));
            match (found, wanted) {
                (Ok(head), Ok(wanted)) => {
                    let head = match head {
                        None => "none",
                        Some(Head::Layers(_)) => "layers",
                        Some(Head::Words(_)) => "words",
                    };
                    assert_eq!(head, wanted, "{text} {task}");
                }
                (Err(error), Err(wanted)) => assert!(error.contains(wanted), "{error}"),
                (found, wanted) => panic!("{text} {task}: {found:?}, not {wanted:?}"),
            }
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
                "torch.nn.modules.activation.Tanh is not supported",
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
