//! What the tensors of a family are called.

/// The tensors of a model. Those that an architecture does not have are empty strings.
#[derive(Debug, PartialEq, Eq)]
pub struct Names {
    /// What stands before all of them. A transformer alone writes its tensors bare, one with a head under its name.
    pub prefixes: &'static [&'static str],
    /// The table of the vocabulary.
    pub words: &'static str,
    /// The table of token types.
    pub types: &'static str,
    /// The table of positions.
    pub positions: &'static str,
    /// The normalisation of the sum of these.
    pub embedding_norm: &'static str,
    /// What is added to scores by distance.
    pub distance_bias: &'static str,
    /// The normalisation behind the last layer.
    pub final_norm: &'static str,
    /// What stands before all names of a layer; `{}` is its number.
    pub layer: &'static str,
    /// The rest of the names of a layer.
    pub in_layer: LayerNames,
}

/// The tensors of a layer, behind [`Names::layer`].
#[derive(Debug, PartialEq, Eq)]
pub struct LayerNames {
    /// To queries, keys and values.
    pub projection: ProjectionNames,
    /// From what attention came to.
    pub output: &'static str,
    /// The normalisation of each head's query.
    pub query_norm: &'static str,
    /// The normalisation of each head's key.
    pub key_norm: &'static str,
    /// Normalisations, by where they stand.
    pub before_attention: &'static str,
    /// Behind attention: of the sum, or of what is added.
    pub after_attention: &'static str,
    /// Before the feed-forward block.
    pub before_feed_forward: &'static str,
    /// Behind it: of the sum, or of what is added.
    pub after_feed_forward: &'static str,
    /// The feed-forward block.
    pub feed_forward: FeedForwardNames,
}

/// The keys of `config.json` by which the sizes of tensors go, where families call them otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SizeKeys {
    /// Of numbers that describe a token.
    pub hidden: &'static str,
    /// Of layers.
    pub layers: &'static str,
    /// Of heads.
    pub heads: &'static str,
    /// Of numbers inside a feed-forward block.
    pub intermediate: &'static str,
    /// Of positions.
    pub positions: &'static str,
}

/// What a tensor is part of, as far as other keys decide whether it is there and how large it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The table of the vocabulary.
    Words,
    /// The table of token types.
    Types,
    /// The table of positions.
    Positions,
    /// Queries, keys, values, and the way back.
    Attention,
    /// A feed-forward block.
    FeedForward,
    /// A normalisation.
    Norm,
    /// What follows the transformer.
    Head,
    /// The layer from a row to a logit for each token.
    Logits,
}

impl SizeKeys {
    /// The keys that decide whether there is a tensor and what its shape is; `layered` if each layer has one.
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

/// Queries, keys and values.
#[derive(Debug, PartialEq, Eq)]
pub enum ProjectionNames {
    /// A tensor for each, in this order.
    Separate([&'static str; 3]),
    /// One, with their rows in this order.
    Fused(&'static str),
}

/// The feed-forward block.
#[derive(Debug, PartialEq, Eq)]
pub enum FeedForwardNames {
    /// In and out.
    Plain([&'static str; 2]),
    /// What is activated, what it is multiplied with, and out.
    Gated([&'static str; 3]),
    /// The rows of the first two in one tensor, and out.
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

const NO_NAMES: Names = Names {
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

const BERT_LIKE: Names = Names {
    words: "embeddings.word_embeddings",
    types: "embeddings.token_type_embeddings",
    positions: "embeddings.position_embeddings",
    embedding_norm: "embeddings.LayerNorm",
    layer: "encoder.layer.{}.",
    in_layer: BERT_LAYER,
    ..NO_NAMES
};

pub(super) const BERT: Names = Names { prefixes: &["", "bert."], ..BERT_LIKE };

/// JinaBERT: a BERT whose feed-forward block is gated.
pub(super) const JINA: Names = Names {
    in_layer: LayerNames {
        feed_forward: FeedForwardNames::GatedFused(["mlp.gated_layers", "mlp.wo"]),
        after_feed_forward: "mlp.layernorm",
        ..BERT_LAYER
    },
    ..BERT
};

pub(super) const ROBERTA: Names = Names { prefixes: &["", "roberta."], ..BERT_LIKE };

pub(super) const DISTILBERT: Names = Names {
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

pub(super) const MPNET: Names = Names {
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

pub(super) const MODERNBERT: Names = Names {
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

/// Also transformers, which calls them otherwise, reads and writes them as their makers do.
pub(super) const NOMIC: Names = Names {
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

pub(super) const DECODER: Names = Names {
    prefixes: &["", "model."],
    words: "embed_tokens",
    final_norm: "norm",
    layer: "layers.{}.",
    in_layer: DECODER_LAYER,
    ..NO_NAMES
};

pub(super) const GEMMA: Names = Names {
    in_layer: LayerNames {
        after_attention: "post_attention_layernorm",
        before_feed_forward: "pre_feedforward_layernorm",
        after_feed_forward: "post_feedforward_layernorm",
        ..DECODER_LAYER
    },
    ..DECODER
};
