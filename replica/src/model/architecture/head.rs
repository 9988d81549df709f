//! Label heads: the few layers between a sequence's row and its logits.
//!
//! A language model that judges by two words has one as well. Its score is the logit of the one word less that of the
//! other, both are products with the same row, and so is their difference: a head of one label, whose weights are those
//! of the one word less those of the other.

use super::fields::Fields;
use super::{Activation, Architecture};

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

/// Labels, if the model classifies sequences.
pub(super) fn labels(fields: &mut Fields<'_>) -> Option<usize> {
    let classes = fields.get("architectures").and_then(|value| value.as_array())?;
    let classifies = |class: &serde_json::Value| {
        class.as_str().is_some_and(|class| class.ends_with("ForSequenceClassification"))
    };
    if !classes.iter().any(classifies) {
        return None;
    }
    // Files name labels, or count them, or mean the two that are the default.
    let named = fields.get("id2label").and_then(|value| value.as_object()).map(serde_json::Map::len);
    Some(named.or_else(|| fields.optional_size("num_labels")).unwrap_or(2).max(1))
}

/// Gives the architecture the head that is made by `steps` for so many labels, if it classifies.
pub(super) fn attach(
    fields: &mut Fields<'_>,
    architecture: &mut Architecture,
    steps: impl FnOnce(&mut Fields<'_>, usize) -> (HeadPooling, Vec<HeadStep>),
) {
    if let Some(labels) = labels(fields) {
        let (pooling, steps) = steps(fields, labels);
        architecture.head_pooling = pooling;
        architecture.head = Some(steps);
    }
}
