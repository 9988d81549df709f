//! Label heads: the few layers between a sequence's row and its logits.
//!
//! A language model that judges by two words has one as well. Its score is the logit of the one word less that of the
//! other, both are products with the same row, and so is their difference: a head of one label, whose weights are those
//! of the one word less those of the other.

use super::{Activation, Architecture, ClassKind};
use crate::model::fields::{Fields, Inert, Kind};

/// Which row of a sequence a label head reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeadPooling {
    /// The first.
    First,
    /// The mean of all.
    Mean,
    /// The last one that is not padding.
    Last {
        /// The id of padding, which some texts hold at their end.
        padding: Option<u32>,
    },
}

/// The words by which a language model judges. Both are of its vocabulary, and they differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct YesNo {
    /// The id of the token whose logit counts.
    pub yes: u32,
    /// The id of the one whose logit counts against it, if there is one.
    pub no: Option<u32>,
}

/// How a family goes on with a text: the layer from a row to a logit for each token of the vocabulary.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Logits {
    /// Whether its weights are the table of words.
    pub tied: bool,
    /// Logits `z` become `c·tanh(z/c)`.
    pub softcap: Option<f64>,
}

impl Logits {
    /// Its tensor, without `.weight`, in every family that has it.
    pub const NAME: &str = "lm_head";
}

/// Where the weights of a step of a head are.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum HeadSource {
    /// In the tensor of this name, without `.weight`.
    Named(&'static str),
    /// The same behind the transformer's prefix, as those of its own pooler are.
    Prefixed(&'static str),
    /// In the rows of these words of [`Logits::NAME`], or of the table of words if it is tied.
    Words(YesNo, Logits),
}

/// One layer of a label head: `norm(activation(W·x + b))`.
#[derive(Clone, Debug, PartialEq)]
pub struct HeadStep {
    /// Where its weights are.
    pub source: HeadSource,
    /// Numbers that it makes.
    pub outputs: usize,
    /// Whether it has a bias.
    pub bias: bool,
    /// What is done to them.
    pub activation: Option<Activation>,
    /// The name of the normalisation behind it.
    pub norm: Option<&'static str>,
}

impl HeadStep {
    pub(super) fn new(name: &'static str, outputs: usize) -> HeadStep {
        HeadStep { source: HeadSource::Named(name), outputs, bias: true, activation: None, norm: None }
    }

    /// One label, for these words.
    pub(super) fn words(words: YesNo, logits: Logits) -> HeadStep {
        let source = HeadSource::Words(words, logits);
        HeadStep { source, outputs: 1, bias: false, activation: None, norm: None }
    }

    /// That of a transformer's own pooler.
    pub(super) fn pooler(name: &'static str, outputs: usize) -> HeadStep {
        let activation = Some(Activation::Tanh);
        HeadStep { source: HeadSource::Prefixed(name), activation, ..HeadStep::new(name, outputs) }
    }
}

/// What transformers takes where neither labels nor their number are given.
const DEFAULT_LABELS: usize = 2;

/// How many labels there are, of a model that classifies sequences.
fn labels(fields: &mut Fields<'_>) -> usize {
    let named = fields.optional("id2label").and_then(|value| value.as_object()).map(serde_json::Map::len);
    let counted = fields.optional_size("num_labels");
    if let (Some(named), Some(counted)) = (named, counted)
        && named != counted
    {
        fields.problem(format!("`num_labels` = {counted} and `id2label` has {named} labels"));
    }
    named.or(counted).unwrap_or(DEFAULT_LABELS).max(1)
}

/// Gives the architecture the head that is made by `steps` for so many labels, if its class has one.
pub(super) fn attach(
    fields: &mut Fields<'_>,
    class: Option<ClassKind>,
    architecture: &mut Architecture,
    steps: impl FnOnce(&mut Fields<'_>, usize) -> (HeadPooling, Vec<HeadStep>),
) {
    if class == Some(ClassKind::SequenceClassification) {
        let labels = labels(fields);
        let (pooling, steps) = steps(fields, labels);
        architecture.head_pooling = pooling;
        architecture.head = Some(steps);
    }
}

/// Passes over the keys of labels: they are read with the head, and without one they are without effect.
pub(super) fn leave(fields: &mut Fields<'_>) {
    fields.leave(&[
        Inert(Kind::OptionalObject, &["id2label", "sentence_transformers"]),
        Inert(Kind::OptionalWhole, &["num_labels"]),
        Inert(Kind::OptionalText, &["problem_type", "sbert_ce_default_activation_function"]),
    ]);
}
