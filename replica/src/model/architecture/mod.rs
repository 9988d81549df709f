//! `config.json`: everything that it says about the transformer, for every family, in one vocabulary.
//!
//! Families differ less than their names suggest: in where the normalisations stand, in what attention may see and how
//! it learns of positions, in whether the feed-forward block is gated. So there is one [`Architecture`] of such choices,
//! a reader per family that makes them from the family's own keys, and one engine that looks at the choices and never at
//! the family. The tensors' names, the other half of a family, are data as well ([`Names`]).
//!
//! Readers report every problem of a file together. Every key is looked up, or is listed with the reason why it is
//! without effect, or is refused.
//!
//! 1. `encoders`, `modern`, `decoders` — the families.
//! 2. `rope` — rotary positions and how they are stretched; `head` — label heads.
//! 3. `names` — what tensors are called, and by which keys their sizes go.
//! 4. `classes` — which classes and which code of repositories are known; `inert` — keys without effect.

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

use super::ModelError;
use super::fields::Fields;

pub(super) use classes::ClassKind;

pub use head::{HeadPooling, HeadSource, HeadStep, Logits, YesNo};
pub use names::{FeedForwardNames, LayerNames, Names, Part, ProjectionNames, SizeKeys};
pub use rope::Rope;

/// A transformer, described. No size is zero, heads share keys and values evenly, and every layer is there.
#[derive(Clone, Debug, PartialEq)]
pub struct Architecture {
    /// The family, as `model_type` names it.
    pub family: String,
    /// Entries of the vocabulary.
    pub vocabulary: usize,
    /// Numbers that describe one token between layers.
    pub hidden: usize,
    /// Tokens of the longest sequence that it can read.
    pub positions: usize,
    /// Kinds of segment, as in question and answer; 1 if it knows none.
    pub token_types: usize,
    /// What a token is before the first layer.
    pub embedding: Embedding,
    /// What all attentions have in common.
    pub attention: Attention,
    /// Between two attentions.
    pub feed_forward: FeedForward,
    /// What normalisations do.
    pub norm: NormSpec,
    /// Where they stand.
    pub placement: Placement,
    /// What differs from layer to layer.
    pub layers: Vec<Layer>,
    /// Rotary positions; [`Layer::rope`] says which of them.
    pub ropes: Vec<Rope>,
    /// How it would go on with a text, if its family does.
    pub logits: Option<Logits>,
    /// How logits are made of the last layer's rows, if the model classifies.
    pub head: Option<Vec<HeadStep>>,
    /// Which row the head reads.
    pub head_pooling: HeadPooling,
    /// What its tensors are called.
    pub names: &'static Names,
    /// By which keys the sizes of its tensors go.
    pub keys: SizeKeys,
    /// What its class has behind the transformer; absent if no class is named.
    pub(super) class: Option<ClassKind>,
}

/// What a token is before the first layer.
#[derive(Clone, Debug, PartialEq)]
pub struct Embedding {
    /// A vector for each position, if positions are learnt so.
    pub positions: Option<LearntPositions>,
    /// Whether there is a vector for each token type.
    pub types: bool,
    /// Whether the sum is normalised.
    pub norm: bool,
    /// By what the word's vector is multiplied.
    pub scale: f32,
}

/// Positions as rows of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LearntPositions {
    /// Rows of the table.
    pub rows: usize,
    /// Padding, in the way of RoBERTa: tokens of this id have the row of this number and are not counted, and the first
    /// counted token has the row behind it. Without padding rows are counted from 0.
    pub padding: Option<u32>,
}

/// What all attentions of a model have in common.
#[derive(Clone, Debug, PartialEq)]
pub struct Attention {
    /// Heads that ask.
    pub heads: usize,
    /// Heads that are asked; a divisor of [`Attention::heads`].
    pub key_value_heads: usize,
    /// Numbers of one head.
    pub head_width: usize,
    /// By what scores are multiplied.
    pub scale: f32,
    /// Whether queries, keys and values have biases.
    pub projection_bias: bool,
    /// Whether the way back has.
    pub output_bias: bool,
    /// Whether each head's query and key are normalised.
    pub query_key_norm: bool,
    /// Scores `s` become `c·tanh(s/c)`.
    pub softcap: Option<f32>,
    /// What is added to scores by distance.
    pub distance_bias: Option<DistanceBias>,
}

/// What is added to scores by distance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DistanceBias {
    /// A learnt number for each head and each of so many ranges of distances.
    Buckets(usize),
    /// The distance itself, times a slope for each head.
    Alibi,
}

/// The block between two attentions.
#[derive(Clone, Debug, PartialEq)]
pub struct FeedForward {
    /// Numbers of a row inside.
    pub width: usize,
    /// What is done to them.
    pub activation: Activation,
    /// Whether the result is multiplied with a second projection.
    pub gated: bool,
    /// Whether the way in has a bias.
    pub input_bias: bool,
    /// Whether the way out has.
    pub output_bias: bool,
}

/// What a normalisation does.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NormSpec {
    /// Its formula.
    pub kind: NormKind,
    /// Added to the variance or the mean square.
    pub epsilon: f32,
}

/// The formula of a normalisation.
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

/// Where normalisations stand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// `x = norm(x + block(x))`
    Post,
    /// `x = x + block(norm(x))`, and one after the last layer.
    Pre,
    /// `x = x + norm(block(norm(x)))`, and one after the last layer.
    Sandwich,
}

/// What is particular to a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layer {
    /// What its attention sees.
    pub reach: Reach,
    /// Which rotary positions it has.
    pub rope: Option<usize>,
    /// Whether there is a normalisation before its attention, where the placement has one.
    pub input_norm: bool,
}

/// How many tokens before and behind a token its attention sees, beside itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reach {
    /// [`usize::MAX`]: all.
    pub before: usize,
    /// [`usize::MAX`]: all.
    pub behind: usize,
}

impl Reach {
    /// Everything.
    pub const ALL: Reach = Reach { before: usize::MAX, behind: usize::MAX };
    /// What came before.
    pub const CAUSAL: Reach = Reach { before: usize::MAX, behind: 0 };

    /// As much to both sides.
    pub fn around(tokens: usize) -> Reach {
        Reach { before: tokens, behind: tokens }
    }

    /// Of `length` tokens, those that the tokens `rows` see between them.
    pub fn of(self, rows: std::ops::Range<usize>, length: usize) -> std::ops::Range<usize> {
        rows.start.saturating_sub(self.before)..rows.end.saturating_add(self.behind).min(length)
    }
}

/// What stands between two projections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// `x·Φ(x)`, by the error function.
    Gelu,
    /// `x·Φ(x)`, by the hyperbolic tangent.
    GeluTanh,
    /// `x·σ(1.702·x)`
    QuickGelu,
    /// `max(x, 0)`
    Relu,
    /// `x·σ(x)`
    Silu,
    /// `tanh x`
    Tanh,
}

impl Architecture {
    /// Reads the keys of the file at this path.
    pub(super) fn read(path: &Path, raw: &Map<String, Value>) -> Result<Architecture, ModelError> {
        Architecture::parse(raw)
            .map_err(|problems| ModelError::Content { path: path.to_owned(), problem: problems.join("; ") })
    }

    fn parse(raw: &Map<String, Value>) -> Result<Architecture, Vec<String>> {
        let family = raw.get("model_type").and_then(Value::as_str).unwrap_or("absent");
        let Some((_, reader)) = FAMILIES.iter().find(|(name, _)| *name == family) else {
            let known: Vec<&str> = FAMILIES.iter().map(|(name, _)| *name).collect();
            return Err(vec![format!("`model_type` is {family}; supported are {}", known.join(", "))]);
        };
        let mut fields = Fields::new(raw);
        fields.get("model_type");
        fields.refuse("quantization_config", "the weights are quantised in a way that is not read");
        let class = classes::read(&mut fields, family);
        let mut architecture = reader(&mut fields, family, class);
        architecture.class = class;
        fields.token("pad_token_id", architecture.vocabulary);
        fields.optional("return_dict");
        fields.must_be("return_dict", true, "the library fails on outputs without names");
        let is_jina = architecture.attention.distance_bias == Some(DistanceBias::Alibi);
        for groups in inert::of(family, is_jina) {
            fields.leave(groups);
        }
        head::leave(&mut fields);
        fields.refuse_others();
        fields.finish(architecture)
    }

    /// Whether it was made to go on with texts.
    pub(super) fn continues(&self) -> bool {
        self.class == Some(ClassKind::CausalLm)
    }

    /// Whether its class has a layer that guesses words, which has no part in what is served.
    pub(crate) fn guesses_words(&self) -> bool {
        matches!(self.class, Some(ClassKind::MaskedLm | ClassKind::CausalLm))
    }

    /// The same transformer, which judges by these words at the end of a sequence. Of a sequence that was made by a chat
    /// template that is the very last token, whatever it is.
    pub(super) fn judge_by(&mut self, words: YesNo) -> Result<(), String> {
        let Some(logits) = self.logits else {
            return Err(format!(
                "a {} that judges pairs by words is not supported; a decoder of the families mistral, llama, \
                 qwen2, qwen3, gemma2 or gemma3_text is",
                self.family
            ));
        };
        if let Some(cap) = logits.softcap {
            return Err(format!(
                "`final_logit_softcapping` = {cap} is not supported in a cross-encoder: the score would not be linear"
            ));
        }
        self.head = Some(vec![HeadStep::words(words, logits)]);
        self.head_pooling = HeadPooling::Last { padding: None };
        Ok(())
    }

    /// Numbers of the queries of one token, all heads together.
    pub fn query_width(&self) -> usize {
        self.attention.heads * self.attention.head_width
    }

    /// Numbers of the keys, or of the values, of one token, all heads together.
    pub fn key_value_width(&self) -> usize {
        self.attention.key_value_heads * self.attention.head_width
    }

    /// Numbers of a pooled row as the transformer leaves it, before dense modules: one per label, or a vector's.
    pub fn width(&self) -> usize {
        self.head.as_ref().and_then(|steps| steps.last()).map_or(self.hidden, |step| step.outputs)
    }

    /// Floating-point operations of the matrix products for one token.
    pub fn product_flops(&self) -> f64 {
        let attention = self.hidden * (2 * self.query_width() + 2 * self.key_value_width());
        let matrices = if self.feed_forward.gated { 3 } else { 2 };
        let feed_forward = matrices * self.hidden * self.feed_forward.width;
        2.0 * self.layers.len() as f64 * (attention + feed_forward) as f64
    }

    /// Floating-point operations of attention for one token among `length` tokens.
    pub fn attention_flops(&self, length: usize) -> f64 {
        let seen = |layer: &Layer| -> usize {
            (0..length).map(|token| layer.reach.of(token..token + 1, length).len()).sum()
        };
        let pairs: f64 = self.layers.iter().map(|layer| seen(layer) as f64 / length as f64).sum();
        4.0 * self.query_width() as f64 * pairs
    }
}

/// Makes an architecture of the keys of a family. Problems stay in the fields, and what is returned then means nothing.
type Reader = fn(&mut Fields<'_>, &str, Option<ClassKind>) -> Architecture;

const FAMILIES: &[(&str, Reader)] = &[
    ("bert", encoders::bert),
    ("roberta", encoders::roberta),
    ("xlm-roberta", encoders::roberta),
    ("camembert", encoders::roberta),
    ("distilbert", encoders::distilbert),
    ("mpnet", encoders::mpnet),
    ("modernbert", modern::modernbert),
    ("nomic_bert", modern::nomic),
    ("mistral", decoders::mistral),
    ("llama", decoders::llama),
    ("qwen2", decoders::qwen2),
    ("qwen3", decoders::qwen3),
    ("gemma2", decoders::gemma2),
    ("gemma3_text", decoders::gemma3),
];
