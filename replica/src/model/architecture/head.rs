//! Label heads: the few layers between a sequence's row and its logits.

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

/// One layer of a label head: `norm(activation(W·x + b))`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeadStep {
    /// Its tensor, without `.weight`. Those of the transformer's own pooler bear its prefix.
    pub name: &'static str,
    /// Whether the name follows the transformer's prefix.
    pub prefixed: bool,
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
        HeadStep { name, prefixed: false, outputs, bias: true, activation: None, norm: None }
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
