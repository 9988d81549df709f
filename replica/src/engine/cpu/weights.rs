//! Weights of a transformer, by function.
//!
//! Large matrices are packed and shared ([`Linears`]); the embedding tables stay in the mapped checkpoint, of which a
//! batch reads a few rows; vectors (biases, normalizations) are copied. Constant factors of the architecture are folded
//! into the weights here, so that they cost nothing per token:
//!
//! * The three projections of attention are one layer.
//! * Scores are scaled, and in units of the binary logarithm, in which the softmax is computed: the factor is folded
//!   into the weights of the queries or, where queries are normalized, into the weights of that normalization.
//! * A normalization by `1 + w` has the one added.
//!
//! Numbers that are not finite are rejected with the name of their tensor: those of tables and vectors here, at every
//! start, and those of large matrices when they are packed.

use std::cell::RefCell;
use std::collections::BTreeSet;

use replica_core::Precision;

use super::distance::DistanceBiases;
use super::kernel::{Finish, Norm};
use super::linear::{LinearId, LinearSources, Linears};
use super::packed_file::{PackedCache, WeightsLocation};
use super::panels::LinearSource;
use crate::model::{
    Activation, Architecture, Dense, DenseActivation, DistanceBias, FeedForwardNames, HeadSource, HeadStep,
    Logits, ModelCheckpoint, ModelError, NormKind, Part, ProjectionNames, Tensor, TensorNames, YesNo,
};

/// Weights of a transformer.
pub(super) struct TransformerWeights {
    pub(super) words: Tensor,
    pub(super) types: Option<Tensor>,
    pub(super) positions: Option<Tensor>,
    pub(super) embedding_norm: Option<Norm>,
    pub(super) layers: Vec<LayerWeights>,
    pub(super) final_norm: Option<Norm>,
    pub(super) distance_biases: Option<DistanceBiases>,
    pub(super) linears: Linears,
}

/// Weights of one layer, in the order of computation.
pub(super) struct LayerWeights {
    pub(super) before_attention: Option<Norm>,
    /// Projections to queries, keys and values, concatenated.
    pub(super) project: LinearId,
    pub(super) query_norm: Option<Norm>,
    pub(super) key_norm: Option<Norm>,
    /// Projection of the attention output.
    pub(super) output: LinearId,
    pub(super) after_attention: Option<Norm>,
    pub(super) before_feed_forward: Option<Norm>,
    pub(super) expand: LinearId,
    pub(super) contract: LinearId,
    pub(super) after_feed_forward: Option<Norm>,
}

/// Weights of the steps after pooling, always in 32-bit floats: they are small, and no later step would average out
/// rounding errors.
pub(super) struct HeadWeights {
    pub(super) steps: Vec<HeadLayer>,
    pub(super) linears: Linears,
}

/// One step after pooling.
pub(super) struct HeadLayer {
    pub(super) linear: LinearId,
    pub(super) finish: Finish,
    pub(super) norm: Option<Norm>,
}

impl TransformerWeights {
    /// Loads every tensor, and packs.
    pub(super) fn load(
        checkpoint: &ModelCheckpoint,
        architecture: &Architecture,
        precision: Precision,
        cache: Option<&PackedCache>,
    ) -> Result<(TransformerWeights, WeightsLocation), ModelError> {
        let (with, sources) = TransformerWeights::look_up(checkpoint, architecture)?;
        let (linears, place) = Linears::obtain(sources, precision, cache)?;
        Ok((with(linears), place))
    }

    /// Checks every tensor, and packs nothing.
    pub(super) fn check(checkpoint: &ModelCheckpoint, architecture: &Architecture) -> Result<(), ModelError> {
        let (_, sources) = TransformerWeights::look_up(checkpoint, architecture)?;
        sources.check_finite()
    }

    /// Loads every tensor; returns the sources of the large matrices, and the remaining weights. The errors of all
    /// tensors are reported together.
    fn look_up(
        checkpoint: &ModelCheckpoint,
        architecture: &Architecture,
    ) -> Result<(impl FnOnce(Linears) -> TransformerWeights, LinearSources), ModelError> {
        let reader = Reader::new(checkpoint, architecture);
        let TensorNames { words, types, positions, embedding_norm, final_norm, .. } = *reader.names;
        let Architecture { vocabulary, hidden, token_types, .. } = *architecture;
        let embedding = &architecture.embedding;
        let table = |part: Part, name: &str, rows| {
            let table = reader.tensor(part, &format!("{name}.weight"), &[rows, hidden])?;
            reader.finite(&table, 1.0);
            Ok(table)
        };
        let words = table(Part::Words, words, vocabulary)?;
        let types = embedding.types.then(|| table(Part::Types, types, token_types)).transpose()?;
        let positions =
            embedding.positions.map(|learnt| table(Part::Positions, positions, learnt.rows)).transpose()?;
        let embedding_norm = reader.optional_norm(embedding.norm, embedding_norm, hidden)?;
        let final_norm = reader.optional_norm(!final_norm.is_empty(), final_norm, hidden)?;
        let distance_biases = reader.distance_biases()?;
        let mut sources = LinearSources::default();
        let layers: Result<Vec<LayerWeights>, ModelError> =
            (0..architecture.layers.len()).map(|index| reader.layer(index, &mut sources)).collect();
        let layers = layers?;
        reader.reject_unknown_tensors(&HeadWeights::names(architecture, reader.prefix));
        reader.finish()?;
        let with = move |linears| TransformerWeights {
            words,
            types,
            positions,
            embedding_norm,
            layers,
            final_norm,
            distance_biases,
            linears,
        };
        Ok((with, sources))
    }
}

impl HeadWeights {
    /// Returns the names of the tensors of a label head.
    fn names(architecture: &Architecture, prefix: &str) -> BTreeSet<String> {
        let mut names = BTreeSet::new();
        for step in architecture.head.iter().flatten() {
            let name = match step.source {
                HeadSource::Named(name) => name.to_owned(),
                HeadSource::Prefixed(name) => format!("{prefix}{name}"),
                HeadSource::YesNo(..) => Logits::NAME.to_owned(),
            };
            names.insert(format!("{name}.weight"));
            if step.bias {
                names.insert(format!("{name}.bias"));
            }
            if let Some(norm) = step.norm {
                names.insert(format!("{norm}.weight"));
                if architecture.norm.kind == NormKind::Layer {
                    names.insert(format!("{norm}.bias"));
                }
            }
        }
        names
    }

    /// Loads the tensors of these dense layers.
    pub(super) fn of_dense(dense: &[Dense]) -> Result<HeadWeights, ModelError> {
        let mut sources = LinearSources::default();
        let mut steps = Vec::new();
        for layer in dense {
            let weight = layer.checkpoint.tensor(Dense::WEIGHT, &[layer.outputs, layer.inputs])?;
            let bias = layer.bias.then(|| layer.checkpoint.tensor(Dense::BIAS, &[layer.outputs]));
            let bias = bias.transpose()?;
            if let Some(bias) = &bias {
                bias.check_finite(1.0)?;
            }
            let bias = bias.map(|bias| bias.to_vec());
            let source =
                LinearSource { inputs: layer.inputs, parts: vec![(weight, 1.0)], bias, gated: false };
            let finish = match layer.activation {
                DenseActivation::Identity => Finish::Store,
                DenseActivation::Tanh => Finish::Activate(Activation::Tanh),
                DenseActivation::Relu => Finish::Activate(Activation::Relu),
                DenseActivation::Gelu => Finish::Activate(Activation::Gelu),
            };
            steps.push(HeadLayer { linear: sources.add(source), finish, norm: None });
        }
        let (linears, _) = Linears::obtain(sources, Precision::F32, None)?;
        Ok(HeadWeights { steps, linears })
    }

    /// Loads the tensors of these steps of a label head.
    pub(super) fn of_labels(
        checkpoint: &ModelCheckpoint,
        architecture: &Architecture,
        steps: &[HeadStep],
    ) -> Result<HeadWeights, ModelError> {
        let reader = Reader::new(checkpoint, architecture);
        let mut sources = LinearSources::default();
        let mut inputs = architecture.hidden;
        let mut layers = Vec::new();
        for step in steps {
            let shape = [step.outputs, inputs];
            let (weight, bias) = match step.source {
                HeadSource::Named(name) => reader.layer_at(name, &shape, step.bias)?,
                HeadSource::Prefixed(name) => {
                    reader.layer_at(&format!("{}{name}", reader.prefix), &shape, step.bias)?
                }
                HeadSource::YesNo(words, logits) => (reader.words(words, logits)?, None),
            };
            let source = LinearSource {
                inputs,
                parts: vec![(weight, 1.0)],
                bias: bias.map(|bias| reader.vector(&bias)),
                gated: false,
            };
            let norm = step.norm.map(|norm| reader.norm_at(norm, step.outputs)).transpose()?;
            layers.push(HeadLayer {
                linear: sources.add(source),
                finish: step.activation.map_or(Finish::Store, Finish::Activate),
                norm,
            });
            inputs = step.outputs;
        }
        reader.finish()?;
        let (linears, _) = Linears::obtain(sources, Precision::F32, None)?;
        Ok(HeadWeights { steps: layers, linears })
    }
}

/// Reader of tensors by the names of the architecture.
struct Reader<'a> {
    checkpoint: &'a ModelCheckpoint,
    architecture: &'a Architecture,
    names: &'static TensorNames,
    prefix: &'static str,
    /// Errors so far. A tensor that could not be loaded is replaced by zeros.
    problems: RefCell<Vec<ModelError>>,
    /// Names of the tensors that were read.
    read_names: RefCell<BTreeSet<String>>,
}

/// Part of a layer: name, number of rows, and factor.
type LayerPart = (String, usize, f32);

impl<'a> Reader<'a> {
    /// Determines the prefix of the tensor names in the checkpoint.
    fn new(checkpoint: &'a ModelCheckpoint, architecture: &'a Architecture) -> Reader<'a> {
        let names = architecture.names;
        let has_words = |prefix: &&str| checkpoint.has(&format!("{prefix}{}.weight", names.words));
        // Without any, its tensors are looked up without prefix and reported as missing.
        let prefix = names.prefixes.iter().copied().find(has_words).unwrap_or_default();
        Reader {
            checkpoint,
            architecture,
            names,
            prefix,
            problems: RefCell::default(),
            read_names: RefCell::default(),
        }
    }

    /// Fails if there were errors.
    fn finish(self) -> Result<(), ModelError> {
        ModelError::of_all(self.problems.into_inner()).map_or(Ok(()), Err)
    }

    /// Returns the tensor with this full name. `part` is the part of the model that requires it, for the error message.
    fn find(&self, part: Part, name: &str, shape: &[usize]) -> Result<Tensor, ModelError> {
        self.read_names.borrow_mut().insert(name.to_owned());
        self.checkpoint.tensor(name, shape).or_else(|problem| {
            let layered = self.layer_of(name).is_some();
            let keys = self.architecture.keys.deciding(part, layered);
            self.problems.borrow_mut().push(problem.decided_by("config.json", &keys));
            // The shape may need more memory than there is, because the configuration is wrong.
            Tensor::placeholder(shape).map_err(|reason| {
                let unreadable = ModelError::Read { path: self.checkpoint.path().to_owned(), reason };
                ModelError::of_all(self.problems.take()).unwrap_or(unreadable)
            })
        })
    }

    /// Records an error if a number of the tensor times this factor is not finite.
    fn finite(&self, tensor: &Tensor, factor: f32) {
        self.problems.borrow_mut().extend(tensor.check_finite(factor).err());
    }

    /// Returns a copy of the tensor.
    fn vector(&self, tensor: &Tensor) -> Vec<f32> {
        self.finite(tensor, 1.0);
        tensor.to_vec()
    }

    fn in_layer(&self, index: usize, name: &str) -> String {
        format!("{}{name}", self.names.layer.replace("{}", &index.to_string()))
    }

    /// Returns the layer number of a tensor with this full name.
    fn layer_of(&self, name: &str) -> Option<usize> {
        let before = self.names.layer.split("{}").next()?;
        let rest = name.strip_prefix(self.prefix)?.strip_prefix(before)?;
        rest.split('.').next()?.parse().ok()
    }

    fn tensor(&self, part: Part, name: &str, shape: &[usize]) -> Result<Tensor, ModelError> {
        self.find(part, &format!("{}{name}", self.prefix), shape)
    }

    /// Rejects tensors that are neither read here nor in `others`, and that are not known to be unused.
    fn reject_unknown_tensors(&self, others: &BTreeSet<String>) {
        let read_names = self.read_names.borrow();
        for name in self.checkpoint.names() {
            if read_names.contains(&name) || others.contains(&name) || self.is_without_effect(&name) {
                continue;
            }
            let part = match () {
                () if self.layer_of(&name).is_none() => Part::Head,
                () if name.contains("norm") || name.contains("Norm") => Part::Norm,
                () if name.contains("attn") || name.contains("attention") => Part::Attention,
                () => Part::FeedForward,
            };
            let mut keys = self.architecture.keys.deciding(part, self.layer_of(&name).is_some());
            keys.push("architectures");
            keys.dedup();
            self.problems.borrow_mut().push(self.checkpoint.unused(name).decided_by("config.json", &keys));
        }
    }

    /// Returns whether a tensor is known to have no effect on the outputs:
    ///
    /// * numbers of positions and rates of rotation, which older versions of the libraries saved with the weights;
    /// * the pooler of a transformer, which no stage of sentence-transformers reads;
    /// * language model heads, of a class that has them, and the next-sentence head of BERT's pre-training.
    fn is_without_effect(&self, name: &str) -> bool {
        let within = name.strip_prefix(self.prefix).unwrap_or(name);
        let begins =
            |parts: &[&str]| parts.iter().any(|part| name.starts_with(part) || within.starts_with(part));
        let buffers = ["embeddings.position_ids", "embeddings.token_type_ids", "rotary_emb.inv_freq"];
        let is_buffer = buffers.contains(&within)
            || self.layer_of(name).is_some() && name.ends_with(".rotary_emb.inv_freq")
            || within == "encoder.alibi"
            || name.ends_with("attn.rotary_emb.inv_freq");
        // A head that uses it has read it.
        let is_pooler = within.starts_with("pooler.");
        let is_guess = self.architecture.has_lm_head()
            && begins(&[
                "cls.",
                "lm_head.",
                "vocab_transform.",
                "vocab_layer_norm.",
                "vocab_projector.",
                "decoder.",
                "head.",
            ]);
        // Tied: the same numbers as the word embeddings.
        let is_tied = self.architecture.logits.is_some() && name == "lm_head.weight";
        is_buffer || is_pooler || is_guess || is_tied
    }

    /// Returns the weights with this full name, without `.weight`, and their bias if required.
    fn layer_at(
        &self,
        name: &str,
        shape: &[usize; 2],
        biased: bool,
    ) -> Result<(Tensor, Option<Tensor>), ModelError> {
        let weight = self.find(Part::Head, &format!("{name}.weight"), shape)?;
        let bias = biased.then(|| self.find(Part::Head, &format!("{name}.bias"), &shape[..1]));
        Ok((weight, bias.transpose()?))
    }

    /// Returns the weight vector for the difference between the logits of the two tokens.
    fn words(&self, words: YesNo, logits: Logits) -> Result<Tensor, ModelError> {
        let Architecture { vocabulary, hidden, .. } = *self.architecture;
        let own = format!("{}.weight", Logits::NAME);
        let tied = format!("{}{}.weight", self.prefix, self.names.words);
        let name = if logits.tied { &tied } else { &own };
        let table = self.find(Part::Logits, name, &[vocabulary, hidden])?;
        let row_of = |table: &Tensor, id: u32| table.rows_of(id as usize..id as usize + 1);
        if logits.tied && self.checkpoint.has(&own) {
            // Version 5 of transformers would use the layer, version 4 the table.
            let layer = self.find(Part::Logits, &own, &[vocabulary, hidden])?;
            let differs = |id: u32| row_of(&table, id).to_vec() != row_of(&layer, id).to_vec();
            if differs(words.yes) || words.no.is_some_and(differs) {
                let keys = self.architecture.keys.deciding(Part::Logits, false);
                self.problems.borrow_mut().push(self.checkpoint.unused(own).decided_by("config.json", &keys));
            }
        }
        let row = |id: u32| row_of(&table, id);
        let (yes, no) = (row(words.yes), words.no.map(row));
        let Some(no) = no else { return Ok(yes) };
        yes.less(&no).map_err(|reason| ModelError::Read { path: self.checkpoint.path().to_owned(), reason })
    }

    fn layer(&self, index: usize, sources: &mut LinearSources) -> Result<LayerWeights, ModelError> {
        let Architecture { attention, feed_forward, hidden, .. } = self.architecture;
        let names = &self.names.in_layer;
        let norm = |name: &str, required: bool, width: usize| {
            self.optional_norm(required && !name.is_empty(), &self.in_layer(index, name), width)
        };
        let (query_width, width) = (self.architecture.query_width(), feed_forward.width);
        let head_norm = |name: &str, factor: f32| -> Result<Option<Norm>, ModelError> {
            let norm = norm(name, attention.query_key_norm, attention.head_width)?;
            Ok(norm.map(|norm| norm.times(factor)))
        };
        let (contract, expand) = match &names.feed_forward {
            FeedForwardNames::Plain([expand, contract]) => (contract, vec![(*expand, width)]),
            FeedForwardNames::Gated([gate, up, contract]) => (contract, vec![(*gate, width), (*up, width)]),
            FeedForwardNames::GatedFused([both, contract]) => (contract, vec![(*both, 2 * width)]),
        };
        let expand: Vec<LayerPart> =
            expand.into_iter().map(|(name, rows)| (self.in_layer(index, name), rows, 1.0)).collect();
        let one = |name: &str, rows| [(self.in_layer(index, name), rows, 1.0)];
        Ok(LayerWeights {
            before_attention: norm(
                names.before_attention,
                self.architecture.layers[index].input_norm,
                *hidden,
            )?,
            project: sources.add(self.projection(index)?),
            query_norm: head_norm(names.query_norm, self.score_factor())?,
            key_norm: head_norm(names.key_norm, 1.0)?,
            output: sources.add(self.linear(
                Part::Attention,
                &one(names.output, *hidden),
                query_width,
                attention.output_bias,
                false,
            )?),
            after_attention: norm(names.after_attention, true, *hidden)?,
            before_feed_forward: norm(names.before_feed_forward, true, *hidden)?,
            expand: sources.add(self.linear(
                Part::FeedForward,
                &expand,
                *hidden,
                feed_forward.input_bias,
                feed_forward.gated,
            )?),
            contract: sources.add(self.linear(
                Part::FeedForward,
                &one(contract, *hidden),
                width,
                feed_forward.output_bias,
                false,
            )?),
            after_feed_forward: norm(names.after_feed_forward, true, *hidden)?,
        })
    }

    /// Returns the factor of the attention scores.
    fn score_factor(&self) -> f32 {
        self.architecture.attention.scale * std::f32::consts::LOG2_E
    }

    fn projection(&self, index: usize) -> Result<LinearSource, ModelError> {
        let Architecture { attention, hidden, .. } = self.architecture;
        let factor = if attention.query_key_norm { 1.0 } else { self.score_factor() };
        let rows = [self.architecture.query_width(), self.architecture.key_value_width()];
        let rows = [(rows[0], factor), (rows[1], 1.0), (rows[1], 1.0)];
        match &self.names.in_layer.projection {
            ProjectionNames::Separate(names) => {
                let parts = names.iter().zip(rows);
                let parts: Vec<LayerPart> =
                    parts.map(|(name, (rows, factor))| (self.in_layer(index, name), rows, factor)).collect();
                self.linear(Part::Attention, &parts, *hidden, attention.projection_bias, false)
            }
            ProjectionNames::Fused(name) => {
                let total = rows.iter().map(|(rows, _)| rows).sum();
                let whole = (self.in_layer(index, name), total, 1.0);
                let mut source =
                    self.linear(Part::Attention, &[whole], *hidden, attention.projection_bias, false)?;
                let (whole, _) = source.parts.remove(0);
                let mut start = 0;
                for (rows, factor) in rows {
                    source.parts.push((whole.rows_of(start..start + rows), factor));
                    let bias = source.bias.iter_mut().flat_map(|bias| &mut bias[start..start + rows]);
                    bias.for_each(|value| *value *= factor);
                    start += rows;
                }
                Ok(source)
            }
        }
    }

    /// Concatenates layers with the same inputs into one.
    fn linear(
        &self,
        part_of: Part,
        parts: &[LayerPart],
        inputs: usize,
        biased: bool,
        gated: bool,
    ) -> Result<LinearSource, ModelError> {
        let mut weights = Vec::new();
        let mut bias = biased.then(Vec::new);
        for (name, rows, factor) in parts {
            weights.push((self.tensor(part_of, &format!("{name}.weight"), &[*rows, inputs])?, *factor));
            if let Some(bias) = &mut bias {
                let part = self.tensor(part_of, &format!("{name}.bias"), &[*rows])?;
                self.finite(&part, *factor);
                bias.extend(part.to_vec().into_iter().map(|value| value * factor));
            }
        }
        Ok(LinearSource { inputs, parts: weights, bias, gated })
    }

    fn optional_norm(&self, required: bool, name: &str, width: usize) -> Result<Option<Norm>, ModelError> {
        required.then(|| self.norm_at(&format!("{}{name}", self.prefix), width)).transpose()
    }

    /// Returns the normalization with this full name.
    fn norm_at(&self, name: &str, width: usize) -> Result<Norm, ModelError> {
        // The first BERTs, which were converted from TensorFlow, name them gamma and beta.
        let old = self.checkpoint.has(&format!("{name}.gamma"));
        let (scale, shift) = if old { ("gamma", "beta") } else { ("weight", "bias") };
        let vector = |part: &str| {
            let tensor = self.find(Part::Norm, &format!("{name}.{part}"), &[width])?;
            Ok::<_, ModelError>(self.vector(&tensor))
        };
        let spec = self.architecture.norm;
        let mut scale: Vec<f32> = vector(scale)?;
        let (centred, shifted) = match spec.kind {
            NormKind::Layer => (true, true),
            NormKind::LayerWithoutBias => (true, false),
            NormKind::Rms => (false, false),
            NormKind::RmsPlusOne => {
                scale.iter_mut().for_each(|value| *value += 1.0);
                (false, false)
            }
        };
        let shift = if shifted { vector(shift)? } else { vec![0.0; width] };
        Ok(Norm { centred, scale, shift, epsilon: spec.epsilon })
    }

    fn distance_biases(&self) -> Result<Option<DistanceBiases>, ModelError> {
        let (heads, positions) = (self.architecture.attention.heads, self.architecture.positions);
        match self.architecture.attention.distance_bias {
            None => Ok(None),
            Some(DistanceBias::Alibi) => Ok(Some(DistanceBiases::alibi(heads, positions))),
            Some(DistanceBias::Buckets(buckets)) => {
                let name = format!("{}.weight", self.names.distance_bias);
                let table = self.vector(&self.tensor(Part::Attention, &name, &[buckets, heads])?);
                Ok(Some(DistanceBiases::buckets(heads, positions, buckets, &table)))
            }
        }
    }
}
