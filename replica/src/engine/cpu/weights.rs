//! The weights of a BERT, by what they are for.
//!
//! Large matrices are packed and shared ([`Packed`]); the tables of embeddings stay in the mapped checkpoint, of which a
//! batch touches a few rows; vectors (biases, normalisations) are copied. The three projections of attention are one
//! layer, and the scale of the scores is in the weights that make the queries.

use super::kernel::Norm;
use super::packed::{Packed, PackedCache, WeightsPlace};
use super::panels::{Panels, Unpacked};
use crate::model::{BertConfig, Checkpoint, ModelError, Tensor};

/// The weights of a BERT.
pub(super) struct BertWeights {
    pub(super) words: Tensor,
    pub(super) kinds: Tensor,
    pub(super) positions: Tensor,
    pub(super) norm: Norm,
    pub(super) layers: Vec<BertLayer>,
    packed: Packed,
}

/// One layer of it, in the order of computation.
pub(super) struct BertLayer {
    /// To queries, keys and values, side by side.
    pub(super) project: Linear,
    /// From what attention came to.
    pub(super) gather: Linear,
    pub(super) norm: Norm,
    pub(super) expand: Linear,
    pub(super) contract: Linear,
    pub(super) final_norm: Norm,
}

/// A linear layer.
pub(super) struct Linear {
    packed: usize,
    pub(super) bias: Vec<f32>,
}

impl BertWeights {
    /// Looks up every tensor, and packs.
    pub(super) fn load(
        checkpoint: &Checkpoint,
        config: &BertConfig,
        cache: Option<&PackedCache>,
    ) -> Result<(BertWeights, WeightsPlace), ModelError> {
        let mut reader = Reader {
            checkpoint,
            // `BertModel` writes its tensors bare, models built around it under its name.
            prefix: if checkpoint.has("bert.embeddings.word_embeddings.weight") { "bert." } else { "" },
            epsilon: config.norm_epsilon,
            layers: Vec::new(),
        };
        let hidden = config.hidden;
        let table = |name: &str, rows| {
            reader.tensor(&format!("embeddings.{name}_embeddings.weight"), &[rows, hidden])
        };
        let words = table("word", config.vocabulary)?;
        let kinds = table("token_type", config.token_types)?;
        let positions = table("position", config.positions)?;
        let norm = reader.norm("embeddings.LayerNorm", hidden)?;
        let layers: Result<Vec<BertLayer>, ModelError> =
            (0..config.layers).map(|index| reader.layer(index, config)).collect();
        let layers = layers?;
        let (packed, place) = Packed::obtain(&reader.layers, cache);
        let weights = BertWeights { words, kinds, positions, norm, layers, packed };
        Ok((weights, place))
    }

    /// The matrix of a layer.
    pub(super) fn matrix(&self, linear: &Linear) -> Panels<'_> {
        self.packed.layer(linear.packed)
    }
}

/// Looks tensors up by the names that a BERT gives them.
struct Reader<'a> {
    checkpoint: &'a Checkpoint,
    prefix: &'static str,
    epsilon: f32,
    /// What is to be packed, in order.
    layers: Vec<Unpacked>,
}

impl Reader<'_> {
    fn tensor(&self, name: &str, shape: &[usize]) -> Result<Tensor, ModelError> {
        self.checkpoint.tensor(&format!("{}{name}", self.prefix), shape)
    }

    fn layer(&mut self, index: usize, config: &BertConfig) -> Result<BertLayer, ModelError> {
        let (hidden, intermediate) = (config.hidden, config.intermediate);
        let name = |part: &str| format!("encoder.layer.{index}.{part}");
        let scale = (config.head_width() as f32).sqrt().recip();
        Ok(BertLayer {
            project: self.linear(
                &[
                    (name("attention.self.query"), scale),
                    (name("attention.self.key"), 1.0),
                    (name("attention.self.value"), 1.0),
                ],
                hidden,
                hidden,
            )?,
            gather: self.linear(&[(name("attention.output.dense"), 1.0)], hidden, hidden)?,
            norm: self.norm(&name("attention.output.LayerNorm"), hidden)?,
            expand: self.linear(&[(name("intermediate.dense"), 1.0)], hidden, intermediate)?,
            contract: self.linear(&[(name("output.dense"), 1.0)], intermediate, hidden)?,
            final_norm: self.norm(&name("output.LayerNorm"), hidden)?,
        })
    }

    /// Layers of this size each, to be computed as one, each times its factor.
    fn linear(
        &mut self,
        parts: &[(String, f32)],
        inputs: usize,
        outputs: usize,
    ) -> Result<Linear, ModelError> {
        let mut weights = Vec::new();
        let mut bias = Vec::new();
        for (name, factor) in parts {
            weights.push((self.tensor(&format!("{name}.weight"), &[outputs, inputs])?, *factor));
            let part = self.tensor(&format!("{name}.bias"), &[outputs])?;
            bias.extend(part.to_vec().into_iter().map(|value| value * factor));
        }
        self.layers.push(Unpacked { inputs, parts: weights });
        let packed = self.layers.len() - 1;
        Ok(Linear { packed, bias })
    }

    fn norm(&self, name: &str, width: usize) -> Result<Norm, ModelError> {
        // The first BERTs, which came from TensorFlow, call them gamma and beta.
        let old = self.checkpoint.has(&format!("{}{name}.gamma", self.prefix));
        let (scale, shift) = if old { ("gamma", "beta") } else { ("weight", "bias") };
        Ok(Norm {
            scale: self.tensor(&format!("{name}.{scale}"), &[width])?.to_vec(),
            shift: self.tensor(&format!("{name}.{shift}"), &[width])?.to_vec(),
            epsilon: self.epsilon,
        })
    }
}
