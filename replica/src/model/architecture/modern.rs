//! Encoders of the second generation: rotary positions, gated feed-forward blocks, hardly any biases.

use super::fields::Fields;
use super::head::{HeadPooling, HeadStep, attach};
use super::rope::{self, Rope};
use super::{
    Activation, Architecture, Attention, Embedding, FeedForward, Layer, NormKind, NormSpec, Placement, Reach,
    names,
};

pub(super) fn modernbert(fields: &mut Fields<'_>, family: &str) -> Architecture {
    let hidden = fields.size("hidden_size");
    let heads = fields.size("num_attention_heads");
    let count = fields.size("num_hidden_layers");
    let positions = fields.size("max_position_embeddings");
    let head_width = fields.head_width(hidden, heads, "num_attention_heads");
    let kind = if fields.flag("norm_bias", false) { NormKind::Layer } else { NormKind::LayerWithoutBias };
    let epsilon = fields.epsilon("norm_eps", 1e-5);
    // What is seen is half of it to each side.
    let local = Reach::around(fields.optional_size("local_attention").unwrap_or(128) / 2);
    let every = fields.optional_size("global_attn_every_n_layers").unwrap_or(3);
    let sliding = fields.sliding_layers(count, |index| !index.is_multiple_of(every));
    let ropes = ["full_attention", "sliding_attention"].map(|kind| {
        let (key, default) = match kind {
            "full_attention" => ("global_rope_theta", 160_000.0),
            _ => ("local_rope_theta", 10_000.0),
        };
        rope::for_kind(fields, kind, key, default, head_width, positions, true)
    });
    let layer = |(index, sliding): (usize, bool)| Layer {
        reach: if sliding { local } else { Reach::ALL },
        rope: Some(usize::from(sliding)),
        // The first layer reads the embeddings, which were normalised.
        input_norm: index > 0,
    };
    let (attention_bias, mlp_bias) = (fields.flag("attention_bias", false), fields.flag("mlp_bias", false));
    let mut modernbert = Architecture {
        family: family.to_owned(),
        vocabulary: fields.size("vocab_size"),
        hidden,
        positions,
        token_types: 1,
        embedding: Embedding { positions: None, types: false, norm: true, scale: 1.0 },
        attention: Attention {
            heads,
            key_value_heads: heads,
            head_width,
            scale: (head_width as f32).sqrt().recip(),
            projection_bias: attention_bias,
            output_bias: attention_bias,
            query_key_norm: false,
            softcap: None,
            distance_bias: None,
        },
        feed_forward: FeedForward {
            width: fields.size("intermediate_size"),
            activation: fields.activation("hidden_activation", Activation::Gelu),
            gated: true,
            input_bias: mlp_bias,
            output_bias: mlp_bias,
        },
        norm: NormSpec { kind, epsilon },
        placement: Placement::Pre,
        layers: sliding.into_iter().enumerate().map(layer).collect(),
        ropes: ropes.into(),
        logits: None,
        head: None,
        head_pooling: HeadPooling::First,
        names: &names::MODERNBERT,
    };
    attach(fields, &mut modernbert, |fields, labels| {
        let pooling = match fields.word("classifier_pooling") {
            None | Some("cls") => HeadPooling::First,
            Some("mean") => HeadPooling::Mean,
            Some(given) => {
                fields.problem(format!("`classifier_pooling` = {given} is not supported; cls and mean are"));
                HeadPooling::First
            }
        };
        let dense = HeadStep {
            bias: fields.flag("classifier_bias", false),
            activation: Some(fields.activation("classifier_activation", Activation::Gelu)),
            norm: Some("head.norm"),
            ..HeadStep::new("head.dense", hidden)
        };
        (pooling, vec![dense, HeadStep::new("classifier", labels)])
    });
    modernbert
}

/// Both as transformers configures it, and with the keys of its makers' own code, which descend from GPT-2's.
pub(super) fn nomic(fields: &mut Fields<'_>, family: &str) -> Architecture {
    let [hidden_key, heads_key, layers_key, width_key, positions_key, epsilon_key] = [
        ["hidden_size", "n_embd"],
        ["num_attention_heads", "n_head"],
        ["num_hidden_layers", "n_layer"],
        ["intermediate_size", "n_inner"],
        ["max_position_embeddings", "n_positions"],
        ["layer_norm_eps", "layer_norm_epsilon"],
    ]
    .map(|keys| fields.either(keys));
    let hidden = fields.size(hidden_key);
    let heads = fields.size(heads_key);
    let count = fields.size(layers_key);
    let positions = fields.size(positions_key);
    let head_width = fields.head_width(hidden, heads, heads_key);
    for key in ["prenorm", "causal", "parallel_block", "qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias"] {
        fields.must_be(key, false, "this NomicBERT has a structure of its own");
    }
    for key in ["use_rms_norm", "rotary_emb_interleaved", "scale_attn_by_inverse_layer_idx"] {
        fields.must_be(key, false, "this NomicBERT has a structure of its own");
    }
    fields.must_be("scale_attn_weights", true, "this NomicBERT has a structure of its own");
    fields.refuse("rotary_emb_scale_base", "rotary positions that decay are not built");
    fields.refuse("rotary_scaling_factor", "rotary positions that stretch with the text are not built");
    if let Some(part) = fields.number("rotary_emb_fraction").filter(|part| *part != 1.0) {
        fields.problem(format!("`rotary_emb_fraction` = {part} is not supported; 1 is"));
    }
    if fields.get("num_experts").is_some() || fields.flag("moe", false) {
        fields.problem("a mixture of experts is not supported".to_owned());
    }
    let rope = match fields.positive("rotary_emb_base") {
        Some(theta) => Rope::plain(theta, head_width),
        None => rope::for_all(fields, 1000.0, head_width, positions),
    };
    match fields.word("activation_function") {
        None | Some("swiglu") => {}
        Some(given) => {
            fields.problem(format!("`activation_function` = {given} is not supported; swiglu is"));
        }
    }
    let mut nomic = Architecture {
        family: family.to_owned(),
        vocabulary: fields.size("vocab_size"),
        hidden,
        positions,
        token_types: fields.size("type_vocab_size"),
        embedding: Embedding { positions: None, types: true, norm: true, scale: 1.0 },
        attention: Attention {
            heads,
            key_value_heads: heads,
            head_width,
            scale: (head_width as f32).sqrt().recip(),
            projection_bias: false,
            output_bias: false,
            query_key_norm: false,
            softcap: None,
            distance_bias: None,
        },
        feed_forward: FeedForward {
            width: fields.size(width_key),
            activation: fields.activation("hidden_act", Activation::Silu),
            gated: true,
            input_bias: false,
            output_bias: false,
        },
        norm: NormSpec { kind: NormKind::Layer, epsilon: fields.epsilon(epsilon_key, 1e-12) },
        placement: Placement::Post,
        layers: vec![Layer { reach: Reach::ALL, rope: Some(0), input_norm: false }; count],
        ropes: vec![rope],
        logits: None,
        head: None,
        head_pooling: HeadPooling::First,
        names: &names::NOMIC,
    };
    attach(fields, &mut nomic, |_, labels| {
        let pooler = HeadStep::pooler("pooler.dense", hidden);
        (HeadPooling::First, vec![pooler, HeadStep::new("classifier", labels)])
    });
    nomic
}
