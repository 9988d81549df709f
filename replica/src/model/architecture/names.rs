//! Tensor names of the families.

/// Names of the tensors of a model. Tensors that the architecture does not have are empty strings.
#[derive(Debug, PartialEq, Eq)]
pub struct TensorNames {
    /// Prefixes of all names. A bare transformer has none; one with a head has its name as the prefix.
    pub prefixes: &'static [&'static str],
    /// Word embeddings.
    pub words: &'static str,
    /// Embeddings of token types.
    pub types: &'static str,
    /// Embeddings of positions.
    pub positions: &'static str,
    /// Normalization of the sum of the embeddings.
    pub embedding_norm: &'static str,
    /// Bias of attention scores by distance.
    pub distance_bias: &'static str,
    /// Normalization after the last layer.
    pub final_norm: &'static str,
    /// Prefix of the names of a layer; `{}` is its index.
    pub layer: &'static str,
    /// Names within a layer.
    pub in_layer: LayerNames,
}

/// Tensor names within a layer, relative to [`TensorNames::layer`].
#[derive(Debug, PartialEq, Eq)]
pub struct LayerNames {
    /// Projections to queries, keys and values.
    pub projection: ProjectionNames,
    /// Output projection of attention.
    pub output: &'static str,
    /// Normalization of each head's query.
    pub query_norm: &'static str,
    /// Normalization of each head's key.
    pub key_norm: &'static str,
    /// Normalization before attention.
    pub before_attention: &'static str,
    /// Normalization after attention: of the sum, or of the attention's output.
    pub after_attention: &'static str,
    /// Normalization before the feed-forward block.
    pub before_feed_forward: &'static str,
    /// Normalization after the feed-forward block: of the sum, or of the block's output.
    pub after_feed_forward: &'static str,
    /// Feed-forward block.
    pub feed_forward: FeedForwardNames,
}

/// Keys of `config.json` that decide the sizes of tensors, for families with different key names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SizeKeys {
    /// Key of the hidden size.
    pub hidden: &'static str,
    /// Key of the number of layers.
    pub layers: &'static str,
    /// Key of the number of heads.
    pub heads: &'static str,
    /// Key of the intermediate size.
    pub intermediate: &'static str,
    /// Key of the number of positions.
    pub positions: &'static str,
}

/// Part of the model to which a tensor belongs; it selects the keys that decide its existence and size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Word embeddings.
    Words,
    /// Embeddings of token types.
    Types,
    /// Embeddings of positions.
    Positions,
    /// Query, key, value and output projections.
    Attention,
    /// Feed-forward block.
    FeedForward,
    /// Normalization.
    Norm,
    /// Modules after the transformer.
    Head,
    /// Language-model head.
    Logits,
}

impl SizeKeys {
    /// Returns the keys that decide whether a tensor exists and its shape; `layered` if each layer has one.
    pub fn deciding(&self, part: Part, layered: bool) -> Vec<&'static str> {
        let own: &[&'static str] = match part {
            Part::Words => &["vocab_size"],
            Part::Types => &["type_vocab_size"],
            Part::Positions => &[self.positions],
            Part::Attention => {
                &[self.heads, "num_key_value_heads", "head_dim", "attention_bias", "layer_types"]
            }
            Part::FeedForward => &[self.intermediate, "mlp_bias"],
            Part::Norm => &["head_dim", "norm_bias"],
            Part::Logits => &["tie_word_embeddings", "architectures", "vocab_size"],
            Part::Head => {
                &["architectures", "num_labels", "id2label", "classifier_bias", "norm_bias", "vocab_size"]
            }
        };
        let layers: &[&'static str] = if layered { &[self.layers] } else { &[] };
        [&["model_type", self.hidden], own, layers].concat()
    }
}

/// Query, key and value projections.
#[derive(Debug, PartialEq, Eq)]
pub enum ProjectionNames {
    /// A tensor for each, in this order.
    Separate([&'static str; 3]),
    /// One tensor, with their rows in this order.
    Fused(&'static str),
}

/// Feed-forward block.
#[derive(Debug, PartialEq, Eq)]
pub enum FeedForwardNames {
    /// Input and output projections.
    Plain([&'static str; 2]),
    /// Gate, up and output projections.
    Gated([&'static str; 3]),
    /// Gate and up projections in one tensor, and the output projection.
    GatedFused([&'static str; 2]),
}

const NO_NORMS: LayerNames = LayerNames {
    projection: ProjectionNames::Fused(""),
    output: "",
    query_norm: "",
    key_norm: "",
    before_attention: "",
    after_attention: "",
    before_feed_forward: "",
    after_feed_forward: "",
    feed_forward: FeedForwardNames::Plain(["", ""]),
};

const NO_NAMES: TensorNames = TensorNames {
    prefixes: &[""],
    words: "",
    types: "",
    positions: "",
    embedding_norm: "",
    distance_bias: "",
    final_norm: "",
    layer: "",
    in_layer: NO_NORMS,
};

const BERT_LAYER: LayerNames = LayerNames {
    projection: ProjectionNames::Separate([
        "attention.self.query",
        "attention.self.key",
        "attention.self.value",
    ]),
    output: "attention.output.dense",
    after_attention: "attention.output.LayerNorm",
    feed_forward: FeedForwardNames::Plain(["intermediate.dense", "output.dense"]),
    after_feed_forward: "output.LayerNorm",
    ..NO_NORMS
};

const BERT_LIKE: TensorNames = TensorNames {
    words: "embeddings.word_embeddings",
    types: "embeddings.token_type_embeddings",
    positions: "embeddings.position_embeddings",
    embedding_norm: "embeddings.LayerNorm",
    layer: "encoder.layer.{}.",
    in_layer: BERT_LAYER,
    ..NO_NAMES
};

pub(super) const BERT: TensorNames = TensorNames { prefixes: &["", "bert."], ..BERT_LIKE };

/// JinaBERT: a BERT with a gated feed-forward block.
pub(super) const JINA: TensorNames = TensorNames {
    in_layer: LayerNames {
        feed_forward: FeedForwardNames::GatedFused(["mlp.gated_layers", "mlp.wo"]),
        after_feed_forward: "mlp.layernorm",
        ..BERT_LAYER
    },
    ..BERT
};

pub(super) const ROBERTA: TensorNames = TensorNames { prefixes: &["", "roberta."], ..BERT_LIKE };

pub(super) const ELECTRA: TensorNames = TensorNames { prefixes: &["", "electra."], ..BERT_LIKE };

pub(super) const DISTILBERT: TensorNames = TensorNames {
    prefixes: &["", "distilbert."],
    layer: "transformer.layer.{}.",
    in_layer: LayerNames {
        projection: ProjectionNames::Separate(["attention.q_lin", "attention.k_lin", "attention.v_lin"]),
        output: "attention.out_lin",
        after_attention: "sa_layer_norm",
        feed_forward: FeedForwardNames::Plain(["ffn.lin1", "ffn.lin2"]),
        after_feed_forward: "output_layer_norm",
        ..NO_NORMS
    },
    ..BERT_LIKE
};

pub(super) const MPNET: TensorNames = TensorNames {
    prefixes: &["", "mpnet."],
    distance_bias: "encoder.relative_attention_bias",
    in_layer: LayerNames {
        projection: ProjectionNames::Separate(["attention.attn.q", "attention.attn.k", "attention.attn.v"]),
        output: "attention.attn.o",
        after_attention: "attention.LayerNorm",
        ..BERT_LAYER
    },
    ..BERT_LIKE
};

pub(super) const MODERNBERT: TensorNames = TensorNames {
    prefixes: &["", "model."],
    words: "embeddings.tok_embeddings",
    embedding_norm: "embeddings.norm",
    final_norm: "final_norm",
    layer: "layers.{}.",
    in_layer: LayerNames {
        projection: ProjectionNames::Fused("attn.Wqkv"),
        output: "attn.Wo",
        before_attention: "attn_norm",
        before_feed_forward: "mlp_norm",
        feed_forward: FeedForwardNames::GatedFused(["mlp.Wi", "mlp.Wo"]),
        ..NO_NORMS
    },
    ..NO_NAMES
};

/// transformers uses other names internally, but reads and writes these.
pub(super) const NOMIC: TensorNames = TensorNames {
    prefixes: &["", "nomic_bert.", "bert."],
    embedding_norm: "emb_ln",
    layer: "encoder.layers.{}.",
    in_layer: LayerNames {
        projection: ProjectionNames::Fused("attn.Wqkv"),
        output: "attn.out_proj",
        after_attention: "norm1",
        feed_forward: FeedForwardNames::Gated(["mlp.fc12", "mlp.fc11", "mlp.fc2"]),
        after_feed_forward: "norm2",
        ..NO_NORMS
    },
    ..BERT_LIKE
};

const DECODER_LAYER: LayerNames = LayerNames {
    projection: ProjectionNames::Separate(["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
    output: "self_attn.o_proj",
    query_norm: "self_attn.q_norm",
    key_norm: "self_attn.k_norm",
    before_attention: "input_layernorm",
    before_feed_forward: "post_attention_layernorm",
    feed_forward: FeedForwardNames::Gated(["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]),
    ..NO_NORMS
};

pub(super) const DECODER: TensorNames = TensorNames {
    prefixes: &["", "model."],
    words: "embed_tokens",
    final_norm: "norm",
    layer: "layers.{}.",
    in_layer: DECODER_LAYER,
    ..NO_NAMES
};

pub(super) const GEMMA: TensorNames = TensorNames {
    in_layer: LayerNames {
        after_attention: "post_attention_layernorm",
        before_feed_forward: "pre_feedforward_layernorm",
        after_feed_forward: "post_feedforward_layernorm",
        ..DECODER_LAYER
    },
    ..DECODER
};
