//! `config.json` of a BERT: its sizes, and the choices that change the numbers.

use std::path::Path;

use serde::Deserialize;

use super::{ModelError, json};

/// What stands between the two halves of a feed-forward block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// `x·Φ(x)`, by the error function.
    Gelu,
    /// `x·Φ(x)`, by the hyperbolic tangent.
    GeluTanh,
    /// `max(x, 0)`.
    Relu,
}

/// The sizes of a BERT. None is zero, and [`BertConfig::heads`] divides [`BertConfig::hidden`].
#[derive(Clone, Debug, PartialEq)]
pub struct BertConfig {
    /// Entries of the vocabulary.
    pub vocabulary: usize,
    /// Numbers that describe one token between layers.
    pub hidden: usize,
    /// Layers.
    pub layers: usize,
    /// Attention heads of a layer.
    pub heads: usize,
    /// Width of the feed-forward block.
    pub intermediate: usize,
    /// Between the halves of the feed-forward block.
    pub activation: Activation,
    /// Added to the variance when normalising.
    pub norm_epsilon: f32,
    /// Positions that were learnt: no input can be longer.
    pub positions: usize,
    /// Kinds of segment, as in question and answer.
    pub token_types: usize,
}

impl BertConfig {
    /// Numbers of one head.
    pub fn head_width(&self) -> usize {
        self.hidden / self.heads
    }

    /// Floating-point operations of the matrix products for one token.
    pub fn product_flops(&self) -> f64 {
        let per_layer = self.hidden * (4 * self.hidden + 2 * self.intermediate);
        2.0 * (self.layers * per_layer) as f64
    }

    /// Floating-point operations of attention for one token among `length` tokens.
    pub fn attention_flops(&self, length: usize) -> f64 {
        4.0 * (self.layers * self.hidden * length) as f64
    }
}

#[derive(Deserialize)]
struct RawConfig {
    model_type: Option<String>,
    vocab_size: Option<usize>,
    hidden_size: Option<usize>,
    num_hidden_layers: Option<usize>,
    num_attention_heads: Option<usize>,
    intermediate_size: Option<usize>,
    max_position_embeddings: Option<usize>,
    type_vocab_size: Option<usize>,
    hidden_act: Option<String>,
    layer_norm_eps: Option<f64>,
    position_embedding_type: Option<String>,
    #[serde(default)]
    is_decoder: bool,
}

pub(super) fn read(path: &Path) -> Result<BertConfig, ModelError> {
    let raw: RawConfig = json(path)?;
    raw.check()
        .map_err(|problems| ModelError::Content { path: path.to_owned(), problem: problems.join("; ") })
}

/// Larger than any model has; what is beyond is a damaged file, and would overflow a product of three sizes.
const MAX_SIZE: usize = 1 << 20;

impl RawConfig {
    fn check(self) -> Result<BertConfig, Vec<String>> {
        let mut problems = Vec::new();
        if self.model_type.as_deref() != Some("bert") {
            let given = self.model_type.as_deref().unwrap_or("absent");
            return Err(vec![format!("`model_type` is {given}; only bert is supported")]);
        }
        let mut size = |key: &str, given: Option<usize>| match given {
            Some(size @ 1..=MAX_SIZE) => size,
            Some(size) => {
                problems.push(format!("`{key}` = {size} is not between 1 and {MAX_SIZE}"));
                1
            }
            None => {
                problems.push(format!("`{key}` is missing"));
                1
            }
        };
        let mut config = BertConfig {
            vocabulary: size("vocab_size", self.vocab_size),
            hidden: size("hidden_size", self.hidden_size),
            layers: size("num_hidden_layers", self.num_hidden_layers),
            heads: size("num_attention_heads", self.num_attention_heads),
            intermediate: size("intermediate_size", self.intermediate_size),
            positions: size("max_position_embeddings", self.max_position_embeddings),
            token_types: size("type_vocab_size", self.type_vocab_size),
            activation: Activation::Gelu,
            norm_epsilon: self.layer_norm_eps.unwrap_or(1e-12) as f32,
        };
        match self.hidden_act.as_deref() {
            None | Some("gelu" | "gelu_python") => {}
            Some("gelu_new" | "gelu_fast" | "gelu_pytorch_tanh") => config.activation = Activation::GeluTanh,
            Some("relu") => config.activation = Activation::Relu,
            Some(given) => {
                problems.push(format!("`hidden_act` = {given} is not supported; gelu, gelu_new and relu are"))
            }
        }
        if !config.hidden.is_multiple_of(config.heads) {
            problems.push(format!(
                "`hidden_size` = {} cannot be divided by `num_attention_heads` = {}",
                config.hidden, config.heads
            ));
        }
        if !(config.norm_epsilon >= 0.0 && config.norm_epsilon < 1.0) {
            problems.push(format!("`layer_norm_eps` = {} is not between 0 and 1", config.norm_epsilon));
        }
        if let Some(given) = self.position_embedding_type.filter(|given| given.as_str() != "absolute") {
            problems.push(format!("`position_embedding_type` = {given} is not supported; absolute is"));
        }
        if self.is_decoder {
            problems.push("`is_decoder` = true is not supported: attention is to both sides".to_owned());
        }
        if problems.is_empty() { Ok(config) } else { Err(problems) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(change: &str) -> Result<BertConfig, String> {
        let text = r#"{"model_type": "bert", "vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 4, "intermediate_size": 128, "max_position_embeddings": 32, "type_vocab_size": 2"#;
        let raw: RawConfig = serde_json::from_str(&format!("{text}{change}}}")).unwrap();
        raw.check().map_err(|problems| problems.join("; "))
    }

    #[test]
    fn what_the_numbers_depend_on_is_read() {
        let config = check(r#", "hidden_act": "gelu_new", "layer_norm_eps": 1e-5"#).unwrap();
        assert_eq!((config.activation, config.norm_epsilon), (Activation::GeluTanh, 1e-5));
        assert_eq!(config.head_width(), 16);
        assert_eq!(check("").unwrap().activation, Activation::Gelu);
    }

    #[test]
    fn the_sketch_of_minilm_is_the_known_one() {
        let minilm = BertConfig {
            vocabulary: 30_522,
            hidden: 384,
            layers: 6,
            intermediate: 1536,
            ..check("").unwrap()
        };
        // servers.md §1: 21.3 MFLOP per token, and 9.2 kFLOP times length for attention.
        assert_eq!((minilm.product_flops() / 1e5).round(), 212.0);
        assert_eq!(minilm.attention_flops(1), 9216.0);
    }

    #[test]
    fn what_would_change_the_numbers_and_is_not_built_is_refused() {
        for (change, sentence) in [
            (r#", "hidden_act": "swish""#, "`hidden_act` = swish is not supported"),
            (r#", "position_embedding_type": "relative_key""#, "relative_key is not supported"),
            (r#", "is_decoder": true"#, "`is_decoder` = true"),
            (r#", "layer_norm_eps": -1"#, "`layer_norm_eps` = -1"),
        ] {
            let error = check(change).unwrap_err();
            assert!(error.contains(sentence), "{change}: {error}");
        }
        let heads: RawConfig = serde_json::from_str(r#"{"model_type": "bert", "hidden_size": 0}"#).unwrap();
        let problems = heads.check().unwrap_err();
        assert!(problems[0].contains("`vocab_size` is missing"), "{problems:?}");
        assert!(problems[1].contains("`hidden_size` = 0"), "{problems:?}");
        let other: RawConfig = serde_json::from_str(r#"{"model_type": "t5"}"#).unwrap();
        assert_eq!(other.check().unwrap_err(), ["`model_type` is t5; only bert is supported"]);
    }
}
