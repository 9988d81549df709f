//! `config.json`: description of the transformer, in the same terms for every family.
//!
//! Families differ in few respects: placement of the normalizations, attention window, positions, gating of the
//! feed-forward block. So there is one [`Architecture`] with these options, one reader per family that derives them
//! from the family's own keys, and one engine that uses the options and never the family. The names of the tensors, the
//! other difference between families, are data as well ([`TensorNames`]).
//!
//! Readers report all problems of a file together. Every key is read, or listed with the reason why it has no effect,
//! or rejected.
//!
//! 1. `encoders`, `modern`, `decoders`: the families.
//! 2. `rope`: rotary positions and their scaling; `head`: classification heads.
//! 3. `names`: names of tensors, and the keys that decide their sizes.
//! 4. `classes`: supported classes and repository code; `inert`: keys without effect.

mod classes;
mod decoders;
mod encoders;
mod head;
mod inert;
mod modern;
mod names;
mod rope;
#[cfg(test)]
mod tests;

use std::path::Path;

use serde_json::{Map, Value};

use super::fields::{Activation, JsonFields};
use super::{ModelError, shortened_name};

pub(super) use classes::ClassKind;
pub(super) use head::DEFAULT_LABELS;

pub use head::{HeadPooling, HeadSource, HeadStep, Logits, YesNo};
pub use names::{FeedForwardNames, LayerNames, Part, ProjectionNames, SizeKeys, TensorNames};
pub use rope::RotaryEmbedding;

/// Description of a transformer. No size is zero, the query heads are a multiple of the key/value heads, and every
/// layer is listed.
#[derive(Clone, Debug, PartialEq)]
pub struct Architecture {
    /// Family, as named by `model_type`.
    pub family: String,
    /// Entries of the vocabulary.
    pub vocabulary: usize,
    /// Hidden size: numbers per token between layers.
    pub hidden: usize,
    /// Maximum tokens of a sequence.
    pub positions: usize,
    /// Number of token types (segments), as in question and answer; 1 if the model has none.
    pub token_types: usize,
    /// Embedding of a token before the first layer.
    pub embedding: Embedding,
    /// Options common to the attention of all layers.
    pub attention: AttentionSpec,
    /// Feed-forward block.
    pub feed_forward: FeedForward,
    /// Normalizations.
    pub norm: NormSpec,
    /// Placement of the normalizations.
    pub placement: Placement,
    /// Options of each layer.
    pub layers: Vec<LayerSpec>,
    /// Rotary positions; [`LayerSpec::rope`] is an index into them.
    pub ropes: Vec<RotaryEmbedding>,
    /// Language-model head, if the family has one.
    pub logits: Option<Logits>,
    /// Classification head, which computes logits from the last layer's rows, if the model has one.
    pub head: Option<Vec<HeadStep>>,
    /// Row that the head reads.
    pub head_pooling: HeadPooling,
    /// Names of the tensors.
    pub names: &'static TensorNames,
    /// Keys that decide the sizes of the tensors.
    pub keys: SizeKeys,
    /// Kind of the model's class; absent if no class is named.
    pub(super) class: Option<ClassKind>,
}

/// Embedding of a token before the first layer.
#[derive(Clone, Debug, PartialEq)]
pub struct Embedding {
    /// Learned positions, if the model has them.
    pub positions: Option<LearntPositions>,
    /// Whether there is an embedding for each token type.
    pub types: bool,
    /// Whether the sum is normalized.
    pub norm: bool,
    /// Factor of the word embedding.
    pub scale: f32,
}

/// Learned positions: rows of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LearntPositions {
    /// Rows of the table.
    pub rows: usize,
    /// Padding id in RoBERTa's scheme: tokens with this id use the row of this number and are not counted, and the
    /// first counted token uses the next row. Absent = rows are counted from 0.
    pub padding: Option<u32>,
}

/// Options common to the attention of all layers.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionSpec {
    /// Query heads.
    pub heads: usize,
    /// Key/value heads; a divisor of [`AttentionSpec::heads`].
    pub key_value_heads: usize,
    /// Numbers per head.
    pub head_width: usize,
    /// Factor of the scores.
    pub scale: f32,
    /// Whether queries, keys and values have biases.
    pub projection_bias: bool,
    /// Whether the output projection has a bias.
    pub output_bias: bool,
    /// Whether the query and key of each head are normalized.
    pub query_key_norm: bool,
    /// Soft cap: scores `s` become `c·tanh(s/c)`.
    pub softcap: Option<f32>,
    /// Bias of the scores by distance.
    pub distance_bias: Option<DistanceBias>,
}

/// Bias of the scores by distance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DistanceBias {
    /// A learned number for each head and each of this many distance ranges.
    Buckets(usize),
    /// Distance times a slope per head.
    Alibi,
}

/// Feed-forward block.
#[derive(Clone, Debug, PartialEq)]
pub struct FeedForward {
    /// Intermediate size.
    pub width: usize,
    /// Activation.
    pub activation: Activation,
    /// Whether the result is multiplied with a second projection.
    pub gated: bool,
    /// Whether the input projection has a bias.
    pub input_bias: bool,
    /// Whether the output projection has a bias.
    pub output_bias: bool,
}

/// Normalization.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NormSpec {
    /// Formula.
    pub kind: NormKind,
    /// Epsilon added to the variance or the mean square.
    pub epsilon: f32,
}

/// Formula of a normalization.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormKind {
    /// `(x − mean)/deviation·w + b`
    Layer,
    /// The same without `b`.
    LayerWithoutBias,
    /// `x/rms·w`
    Rms,
    /// `x/rms·(1 + w)`
    RmsPlusOne,
}

/// Placement of the normalizations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// `x = norm(x + block(x))`
    Post,
    /// `x = x + block(norm(x))`, and a normalization after the last layer.
    Pre,
    /// `x = x + norm(block(norm(x)))`, and a normalization after the last layer.
    Sandwich,
}

/// Options of one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerSpec {
    /// Attention window.
    pub reach: Reach,
    /// Index of its rotary positions.
    pub rope: Option<usize>,
    /// Whether there is a normalization before its attention, if the placement has one.
    pub input_norm: bool,
}

/// Attention window: number of tokens before and after a token that its attention includes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reach {
    /// [`usize::MAX`] = unlimited.
    pub before: usize,
    /// [`usize::MAX`] = unlimited.
    pub behind: usize,
}

impl Reach {
    /// All tokens.
    pub const ALL: Reach = Reach { before: usize::MAX, behind: usize::MAX };
    /// All preceding tokens.
    pub const CAUSAL: Reach = Reach { before: usize::MAX, behind: 0 };

    /// Returns a window of this many tokens to each side.
    pub fn around(tokens: usize) -> Reach {
        Reach { before: tokens, behind: tokens }
    }

    /// Returns the tokens, out of `length`, that the tokens `rows` attend to together.
    pub fn of(self, rows: std::ops::Range<usize>, length: usize) -> std::ops::Range<usize> {
        rows.start.saturating_sub(self.before)..rows.end.saturating_add(self.behind).min(length)
    }
}

/// Returns the family of a model and its reader; the error names the supported families.
fn family(raw: &Map<String, Value>) -> Result<(&'static str, Reader), String> {
    let family = raw.get("model_type").and_then(Value::as_str).unwrap_or("absent");
    let known = || FAMILIES.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ");
    let found = FAMILIES.iter().find(|(name, _)| *name == family);
    found
        .copied()
        .ok_or_else(|| format!("`model_type` is {}; supported are {}", shortened_name(family), known()))
}

impl Architecture {
    /// Reads the keys of the file at this path.
    pub(super) fn read(path: &Path, raw: &Map<String, Value>) -> Result<Architecture, ModelError> {
        if let Err(problem) = family(raw) {
            return Err(ModelError::UnknownFamily { path: path.to_owned(), problem });
        }
        Architecture::parse(raw)
            .map_err(|problems| ModelError::Content { path: path.to_owned(), problem: problems.join("; ") })
    }

    fn parse(raw: &Map<String, Value>) -> Result<Architecture, Vec<String>> {
        let (family, reader) = family(raw).map_err(|problem| vec![problem])?;
        let mut fields = JsonFields::new(raw);
        fields.get("model_type");
        fields.refuse("quantization_config", "quantized weights are not supported; use the original model");
        let class = classes::read(&mut fields, family);
        let mut architecture = reader(&mut fields, family, class);
        architecture.class = class;
        fields.token("pad_token_id", architecture.vocabulary);
        fields.optional("return_dict");
        fields.must_be("return_dict", true, "the library requires outputs by name");
        let is_jina = architecture.attention.distance_bias == Some(DistanceBias::Alibi);
        for groups in inert::of(family, is_jina) {
            fields.ignore(groups);
        }
        head::ignore(&mut fields);
        fields.refuse_others();
        fields.finish(architecture)
    }

    /// Returns whether the model's class is a causal language model.
    pub(super) fn is_causal_lm(&self) -> bool {
        self.class == Some(ClassKind::CausalLm)
    }

    /// Returns whether the model's class has a language-model head, which is unused here.
    pub(crate) fn has_lm_head(&self) -> bool {
        matches!(self.class, Some(ClassKind::MaskedLm | ClassKind::CausalLm))
    }

    /// Configures the transformer as an LLM reranker with these tokens. Its head reads the last token of the sequence,
    /// which the chat template made, regardless of padding.
    pub(super) fn set_yes_no_head(&mut self, tokens: YesNo) -> Result<(), String> {
        let Some(logits) = self.logits else {
            return Err(format!(
                "an LLM reranker of the family {} is not supported; decoders of the families mistral, llama, \
                 qwen2, qwen3, gemma2 and gemma3_text are",
                self.family
            ));
        };
        if let Some(cap) = logits.softcap {
            return Err(format!(
                "`final_logit_softcapping` = {cap} is not supported for a reranker: the score would not be linear"
            ));
        }
        self.head = Some(vec![HeadStep::yes_no(tokens, logits)]);
        self.head_pooling = HeadPooling::Last { padding: None };
        Ok(())
    }

    /// Returns the numbers of the queries of one token, for all heads.
    pub fn query_width(&self) -> usize {
        self.attention.heads * self.attention.head_width
    }

    /// Returns the numbers of the keys, or of the values, of one token, for all heads.
    pub fn key_value_width(&self) -> usize {
        self.attention.key_value_heads * self.attention.head_width
    }

    /// Returns the numbers of a pooled row before dense modules: one per label, or the hidden size.
    pub fn width(&self) -> usize {
        self.head.as_ref().and_then(|steps| steps.last()).map_or(self.hidden, |step| step.outputs)
    }

    /// Returns the floating-point operations of the matrix products for one token.
    pub fn product_flops(&self) -> f64 {
        let attention = self.hidden * (2 * self.query_width() + 2 * self.key_value_width());
        let matrices = if self.feed_forward.gated { 3 } else { 2 };
        let feed_forward = matrices * self.hidden * self.feed_forward.width;
        2.0 * self.layers.len() as f64 * (attention + feed_forward) as f64
    }

    /// Returns the floating-point operations of attention for one token in a sequence of `length` tokens.
    pub fn attention_flops(&self, length: usize) -> f64 {
        let attended = |layer: &LayerSpec| -> usize {
            (0..length).map(|token| layer.reach.of(token..token + 1, length).len()).sum()
        };
        let pairs: f64 = self.layers.iter().map(|layer| attended(layer) as f64 / length as f64).sum();
        4.0 * self.query_width() as f64 * pairs
    }
}

/// Derives an architecture from the keys of a family. Problems are collected in the fields; the result is unusable if
/// there are any.
type Reader = fn(&mut JsonFields<'_>, &str, Option<ClassKind>) -> Architecture;

const FAMILIES: &[(&str, Reader)] = &[
    ("bert", encoders::bert),
    ("roberta", encoders::roberta),
    ("xlm-roberta", encoders::roberta),
    ("camembert", encoders::roberta),
    ("distilbert", encoders::distilbert),
    ("mpnet", encoders::mpnet),
    ("electra", encoders::electra),
    ("modernbert", modern::modernbert),
    ("nomic_bert", modern::nomic),
    ("mistral", decoders::mistral),
    ("llama", decoders::llama),
    ("qwen2", decoders::qwen2),
    ("qwen3", decoders::qwen3),
    ("gemma2", decoders::gemma2),
    ("gemma3_text", decoders::gemma3),
];
