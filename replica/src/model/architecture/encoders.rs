//! BERT and similar families: post-normalization, learned positions, a plain feed-forward block, attention to both
//! sides.

use super::ClassKind;
use super::head::{HeadPooling, HeadStep, attach};
use super::{
    Architecture, AttentionSpec, DistanceBias, Embedding, FeedForward, LayerSpec, LearntPositions, NormKind,
    NormSpec, Placement, Reach, SizeKeys, TensorNames, names,
};
use crate::model::fields::{Activation, JsonFields};

const BERT_KEYS: SizeKeys = SizeKeys {
    hidden: "hidden_size",
    layers: "num_hidden_layers",
    heads: "num_attention_heads",
    intermediate: "intermediate_size",
    positions: "max_position_embeddings",
};

const DISTILBERT_KEYS: SizeKeys = SizeKeys {
    hidden: "dim",
    layers: "n_layers",
    heads: "n_heads",
    intermediate: "hidden_dim",
    positions: "max_position_embeddings",
};

/// Reads the common keys; `padding` is the padding id of positions.
fn encoder(
    fields: &mut JsonFields<'_>,
    family: &str,
    keys: SizeKeys,
    activation_key: &str,
    padding: Option<u32>,
    names: &'static TensorNames,
) -> Architecture {
    let hidden = fields.size(keys.hidden);
    let heads = fields.size(keys.heads);
    let layers = fields.size(keys.layers);
    let rows = fields.size(keys.positions);
    let unused = padding.map_or(0, |padding| padding as usize + 1);
    if rows <= unused {
        fields.problem(format!(
            "`max_position_embeddings` = {rows} leaves no position after those for padding; raise it"
        ));
    }
    // Encoders have no key for it.
    let head_width = match hidden.is_multiple_of(heads) {
        true => hidden / heads,
        false => {
            fields.problem(format!(
                "`{}` = {hidden} cannot be divided by `{}` = {heads}",
                keys.hidden, keys.heads
            ));
            1
        }
    };
    fields.must_be("is_decoder", false, "attention is to both sides");
    fields.must_be("add_cross_attention", false, "there is no second sequence to attend to");
    Architecture {
        family: family.to_owned(),
        vocabulary: fields.size("vocab_size"),
        hidden,
        positions: rows.saturating_sub(unused).max(1),
        token_types: 1,
        embedding: Embedding {
            positions: Some(LearntPositions { rows, padding }),
            types: false,
            norm: true,
            scale: 1.0,
        },
        attention: AttentionSpec {
            heads,
            key_value_heads: heads,
            head_width,
            scale: (head_width as f32).sqrt().recip(),
            projection_bias: true,
            output_bias: true,
            query_key_norm: false,
            softcap: None,
            distance_bias: None,
        },
        feed_forward: FeedForward {
            width: fields.size(keys.intermediate),
            activation: fields.activation(activation_key, Activation::Gelu),
            gated: false,
            input_bias: true,
            output_bias: true,
        },
        // Constant of DistilBERT's code; other families have a key for it.
        norm: NormSpec { kind: NormKind::Layer, epsilon: 1e-12 },
        placement: Placement::Post,
        layers: vec![LayerSpec { reach: Reach::ALL, rope: None, input_norm: false }; layers],
        ropes: Vec::new(),
        logits: None,
        head: None,
        head_pooling: HeadPooling::First,
        names,
        keys,
        class: None,
    }
}

/// Adjusts a BERT to JinaBERT, which has the same `model_type`: positions are distances, and the feed-forward block is
/// gated.
fn jina(fields: &mut JsonFields<'_>, bert: &mut Architecture) {
    bert.embedding.positions = None;
    bert.attention.distance_bias = Some(DistanceBias::Alibi);
    bert.names = &names::JINA;
    bert.feed_forward.gated = true;
    bert.feed_forward.input_bias = false;
    bert.feed_forward.activation = Activation::Gelu;
    let given = fields.word("feed_forward_type").unwrap_or("absent");
    if given != "geglu" {
        fields.problem(format!(
            "`feed_forward_type` = {given} is not supported; geglu is, where `position_embedding_type` is alibi"
        ));
    }
    // Its repositories are distinguished by name; one of them normalizes queries and keys.
    if fields.optional("auto_map").is_some_and(|code| code.to_string().contains("qk-post-norm")) {
        fields.problem("a JinaBERT whose queries and keys are normalised is not supported".to_owned());
    }
}

/// Rejects other position embeddings than learned absolute ones.
fn absolute(fields: &mut JsonFields<'_>) {
    if let Some(given) = fields.word("position_embedding_type").filter(|given| *given != "absolute") {
        fields.problem(format!("`position_embedding_type` = {given} is not supported; absolute is"));
    }
}

fn with_types(fields: &mut JsonFields<'_>, architecture: &mut Architecture) {
    architecture.token_types = fields.size("type_vocab_size");
    architecture.embedding.types = true;
}

pub(super) fn bert(fields: &mut JsonFields<'_>, family: &str, class: Option<ClassKind>) -> Architecture {
    let mut bert = encoder(fields, family, BERT_KEYS, "hidden_act", None, &names::BERT);
    with_types(fields, &mut bert);
    bert.norm.epsilon = fields.epsilon("layer_norm_eps", 1e-12);
    if fields.word("position_embedding_type") == Some("alibi") {
        jina(fields, &mut bert);
    } else {
        absolute(fields);
    }
    let hidden = bert.hidden;
    attach(fields, class, &mut bert, |_, labels| {
        let pooler = HeadStep::pooler("pooler.dense", hidden);
        (HeadPooling::First, vec![pooler, HeadStep::new("classifier", labels)])
    });
    bert
}

/// RoBERTa's head, which MPNet shares.
fn dense_and_out(hidden: usize, labels: usize) -> (HeadPooling, Vec<HeadStep>) {
    let dense = HeadStep { activation: Some(Activation::Tanh), ..HeadStep::new("classifier.dense", hidden) };
    (HeadPooling::First, vec![dense, HeadStep::new("classifier.out_proj", labels)])
}

/// Returns the padding id, after which positions are counted.
fn padding(fields: &mut JsonFields<'_>) -> u32 {
    let Some(given) = fields.get("pad_token_id") else {
        if fields.is_null("pad_token_id") {
            fields.problem("`pad_token_id` is null, but positions are counted from it; set it".to_owned());
        }
        return 1;
    };
    given.as_u64().and_then(|id| u32::try_from(id).ok()).unwrap_or_else(|| {
        fields.problem(format!(
            "`pad_token_id` = {given} is not a token, but positions are counted from it; set it"
        ));
        1
    })
}

pub(super) fn roberta(fields: &mut JsonFields<'_>, family: &str, class: Option<ClassKind>) -> Architecture {
    absolute(fields);
    let padding = padding(fields);
    let mut roberta = encoder(fields, family, BERT_KEYS, "hidden_act", Some(padding), &names::ROBERTA);
    with_types(fields, &mut roberta);
    roberta.norm.epsilon = fields.epsilon("layer_norm_eps", 1e-12);
    let hidden = roberta.hidden;
    attach(fields, class, &mut roberta, |_, labels| dense_and_out(hidden, labels));
    roberta
}

pub(super) fn distilbert(
    fields: &mut JsonFields<'_>,
    family: &str,
    class: Option<ClassKind>,
) -> Architecture {
    let mut distilbert = encoder(fields, family, DISTILBERT_KEYS, "activation", None, &names::DISTILBERT);
    let hidden = distilbert.hidden;
    attach(fields, class, &mut distilbert, |_, labels| {
        let first =
            HeadStep { activation: Some(Activation::Relu), ..HeadStep::new("pre_classifier", hidden) };
        (HeadPooling::First, vec![first, HeadStep::new("classifier", labels)])
    });
    distilbert
}

/// Default width of ELECTRA's embeddings, a constant of its code.
const ELECTRA_EMBEDDING: usize = 128;

/// Distance buckets of MPNet, a constant of its code.
const MPNET_BUCKETS: usize = 32;

pub(super) fn mpnet(fields: &mut JsonFields<'_>, family: &str, class: Option<ClassKind>) -> Architecture {
    // The padding id is a constant (1) of its code.
    let mut mpnet = encoder(fields, family, BERT_KEYS, "hidden_act", Some(1), &names::MPNET);
    mpnet.norm.epsilon = fields.epsilon("layer_norm_eps", 1e-12);
    let buckets = fields.optional_size("relative_attention_num_buckets").unwrap_or(MPNET_BUCKETS);
    if buckets != MPNET_BUCKETS {
        fields.problem(format!(
            "`relative_attention_num_buckets` = {buckets} is not supported; {MPNET_BUCKETS} is"
        ));
    }
    mpnet.attention.distance_bias = Some(DistanceBias::Buckets(MPNET_BUCKETS));
    let hidden = mpnet.hidden;
    attach(fields, class, &mut mpnet, |_, labels| dense_and_out(hidden, labels));
    mpnet
}

pub(super) fn electra(fields: &mut JsonFields<'_>, family: &str, class: Option<ClassKind>) -> Architecture {
    let mut electra = encoder(fields, family, BERT_KEYS, "hidden_act", None, &names::ELECTRA);
    with_types(fields, &mut electra);
    electra.norm.epsilon = fields.epsilon("layer_norm_eps", 1e-12);
    absolute(fields);
    let hidden = electra.hidden;
    let width = fields.optional_size("embedding_size").unwrap_or(ELECTRA_EMBEDDING);
    if width != hidden {
        fields.problem(format!(
            "`embedding_size` = {width} differs from `hidden_size` = {hidden}, which is not supported; use a checkpoint \
             whose embeddings are not projected, such as the base size"
        ));
    }
    attach(fields, class, &mut electra, |_, labels| {
        let dense =
            HeadStep { activation: Some(Activation::Gelu), ..HeadStep::new("classifier.dense", hidden) };
        (HeadPooling::First, vec![dense, HeadStep::new("classifier.out_proj", labels)])
    });
    electra
}
