//! Classification heads: the layers between a sequence's row and its logits.
//!
//! An LLM reranker has one as well. Its score is the logit of one token minus that of another; both are products with
//! the same row, and so is their difference: a head with one label, whose weights are those of the first token minus
//! those of the second.

use super::{Architecture, ClassKind};
use crate::model::fields::{Activation, Inert, JsonFields, Kind};

/// Row of a sequence that a head reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeadPooling {
    /// First row.
    First,
    /// Mean of all rows.
    Mean,
    /// Last row that is not padding.
    Last {
        /// Padding id, which texts may contain at their end.
        padding: Option<u32>,
    },
}

/// Yes and no tokens of an LLM reranker. Both are in its vocabulary, and they differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct YesNo {
    /// Token whose logit is the score.
    pub yes: u32,
    /// Token whose logit is subtracted, if any.
    pub no: Option<u32>,
}

/// Language-model head: the layer from a row to a logit for each token of the vocabulary.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Logits {
    /// Whether its weights are the word embeddings.
    pub tied: bool,
    /// Soft cap: logits `z` become `c·tanh(z/c)`.
    pub softcap: Option<f64>,
}

impl Logits {
    /// Name of its tensor, without `.weight`, in every family that has it.
    pub const NAME: &str = "lm_head";
}

/// Source of the weights of a head's layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum HeadSource {
    /// Tensor with this name, without `.weight`.
    Named(&'static str),
    /// Tensor with this name after the transformer's prefix, as for the transformer's own pooler.
    Prefixed(&'static str),
    /// Rows of these tokens in [`Logits::NAME`], or in the word embeddings if tied.
    YesNo(YesNo, Logits),
}

/// Layer of a head: `norm(activation(W·x + b))`.
#[derive(Clone, Debug, PartialEq)]
pub struct HeadStep {
    /// Source of the weights.
    pub source: HeadSource,
    /// Number of outputs.
    pub outputs: usize,
    /// Whether it has a bias.
    pub bias: bool,
    /// Activation of the outputs.
    pub activation: Option<Activation>,
    /// Name of the normalization after it.
    pub norm: Option<&'static str>,
}

impl HeadStep {
    pub(super) fn new(name: &'static str, outputs: usize) -> HeadStep {
        HeadStep { source: HeadSource::Named(name), outputs, bias: true, activation: None, norm: None }
    }

    /// Returns the layer of an LLM reranker, with one label.
    pub(super) fn yes_no(tokens: YesNo, logits: Logits) -> HeadStep {
        let source = HeadSource::YesNo(tokens, logits);
        HeadStep { source, outputs: 1, bias: false, activation: None, norm: None }
    }

    /// Returns the layer of a transformer's own pooler.
    pub(super) fn pooler(name: &'static str, outputs: usize) -> HeadStep {
        let activation = Some(Activation::Tanh);
        HeadStep { source: HeadSource::Prefixed(name), activation, ..HeadStep::new(name, outputs) }
    }
}

/// Number of labels where `config.json` has neither them nor their number: the default of transformers, which omits
/// defaults.
pub(in crate::model) const DEFAULT_LABELS: usize = 2;

/// Returns the number of labels of a sequence classifier.
fn labels(fields: &mut JsonFields<'_>) -> usize {
    let named = fields.optional("id2label").and_then(|value| value.as_object()).map(serde_json::Map::len);
    let counted = fields.optional_size("num_labels");
    if let (Some(named), Some(counted)) = (named, counted)
        && named != counted
    {
        fields.problem(format!(
            "`num_labels` = {counted}, but `id2label` has {named} labels; remove the wrong one"
        ));
    }
    named.or(counted).unwrap_or(DEFAULT_LABELS).max(1)
}

/// Adds the head that `steps` returns for the number of labels, if the model's class has one.
pub(super) fn attach(
    fields: &mut JsonFields<'_>,
    class: Option<ClassKind>,
    architecture: &mut Architecture,
    steps: impl FnOnce(&mut JsonFields<'_>, usize) -> (HeadPooling, Vec<HeadStep>),
) {
    if class == Some(ClassKind::SequenceClassification) {
        let labels = labels(fields);
        let (pooling, steps) = steps(fields, labels);
        architecture.head_pooling = pooling;
        architecture.head = Some(steps);
    }
}

/// Ignores the keys of labels: they are read with the head, and without one they have no effect.
pub(super) fn ignore(fields: &mut JsonFields<'_>) {
    fields.ignore(&[
        Inert(Kind::OptionalObject, &["id2label", "sentence_transformers"]),
        Inert(Kind::OptionalWhole, &["num_labels"]),
        Inert(Kind::OptionalText, &["problem_type", "sbert_ce_default_activation_function"]),
    ]);
}
