//! Modern encoder families: rotary positions, gated feed-forward blocks, few biases.

use super::ClassKind;
use super::head::{HeadPooling, HeadStep, attach};
use super::rope::{self, RotaryEmbedding};
use super::{
    Activation, Architecture, AttentionSpec, Embedding, FeedForward, LayerSpec, NormKind, NormSpec,
    Placement, Reach, SizeKeys, names,
};
use crate::model::fields::JsonFields;

/// Default padding id of ModernBERT.
const PADDING: usize = 50_283;

pub(super) fn modernbert(
    fields: &mut JsonFields<'_>,
    family: &str,
    class: Option<ClassKind>,
) -> Architecture {
    let hidden = fields.size("hidden_size");
    let heads = fields.size("num_attention_heads");
    let count = fields.size("num_hidden_layers");
    let positions = fields.size("max_position_embeddings");
    let head_width = fields.head_width(hidden, heads, "num_attention_heads");
    let kind = if fields.flag("norm_bias", false) { NormKind::Layer } else { NormKind::LayerWithoutBias };
    let epsilon = fields.epsilon("norm_eps", 1e-5);
    // The key is the size of the window to both sides together.
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
    let layer = |(index, sliding): (usize, bool)| LayerSpec {
        reach: if sliding { local } else { Reach::ALL },
        rope: Some(usize::from(sliding)),
        // The first layer reads the embeddings, which are normalized already.
        input_norm: index > 0,
    };
    let vocabulary = fields.size("vocab_size");
    // The default is a token of the first ModernBERT models.
    if !fields.has("pad_token_id") && !fields.is_null("pad_token_id") && vocabulary <= PADDING {
        fields.problem(format!(
            "`pad_token_id` is missing; its default, {PADDING}, is not a token of this model; set it"
        ));
    }
    let (attention_bias, mlp_bias) = (fields.flag("attention_bias", false), fields.flag("mlp_bias", false));
    let mut modernbert = Architecture {
        family: family.to_owned(),
        vocabulary,
        hidden,
        positions,
        token_types: 1,
        embedding: Embedding { positions: None, types: false, norm: true, scale: 1.0 },
        attention: AttentionSpec {
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
        keys: SizeKeys {
            hidden: "hidden_size",
            layers: "num_hidden_layers",
            heads: "num_attention_heads",
            intermediate: "intermediate_size",
            positions: "max_position_embeddings",
        },
        class: None,
    };
    attach(fields, class, &mut modernbert, |fields, labels| {
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

/// Requires all keys of the makers' own code if the file uses them: the defaults of that code describe another
/// structure (GPT-2's), and the library's own defaults differ again.
fn wants_published(fields: &mut JsonFields<'_>) {
    for key in [
        "activation_function",
        "causal",
        "layer_norm_epsilon",
        "mlp_fc1_bias",
        "mlp_fc2_bias",
        "n_inner",
        "parallel_block",
        "prenorm",
        "qkv_proj_bias",
        "rotary_emb_base",
        "rotary_emb_fraction",
        "rotary_emb_interleaved",
        "use_rms_norm",
    ] {
        if !fields.has(key) {
            fields.problem(format!(
                "`{key}` is missing beside `n_embd`; set the value that the model was trained with"
            ));
        }
    }
    if !fields.has("rotary_scaling_factor") && !fields.is_null("rotary_scaling_factor") {
        fields.problem(
            "`rotary_scaling_factor` is missing beside `n_embd`; set null if there is none".to_owned(),
        );
    }
    if fields.has("hidden_act") {
        fields.problem("`hidden_act` and `activation_function` are both set; remove one".to_owned());
    }
}

/// Rejects the options of the makers' own code for structures that are not implemented.
fn refuse_other_structures(fields: &mut JsonFields<'_>) {
    for key in ["prenorm", "causal", "parallel_block", "qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias"] {
        fields.must_be(key, false, "this structure of NomicBERT is not implemented");
    }
    for key in ["use_rms_norm", "rotary_emb_interleaved", "scale_attn_by_inverse_layer_idx"] {
        fields.must_be(key, false, "this structure of NomicBERT is not implemented");
    }
    fields.must_be("scale_attn_weights", true, "this structure of NomicBERT is not implemented");
    fields.refuse("rotary_emb_scale_base", "xPos scaling of rotary positions is not implemented");
    fields.refuse("rotary_scaling_factor", "dynamic scaling of rotary positions is not implemented");
    if let Some(part) = fields.number("rotary_emb_fraction").filter(|part| *part != 1.0) {
        fields.problem(format!("`rotary_emb_fraction` = {part} is not supported; 1 is"));
    }
    fields.refuse("num_experts", "a mixture of experts is not supported");
    fields.must_be("moe", false, "a mixture of experts is not supported");
}

/// Reads the rotary positions of NomicBERT, with the key of the makers' own code or those of transformers.
fn nomic_rope(fields: &mut JsonFields<'_>, head_width: usize, positions: usize) -> RotaryEmbedding {
    for key in ["rope_parameters", "rope_scaling"] {
        if fields.has("rotary_emb_base") && fields.has(key) {
            fields.optional(key);
            fields.problem(format!("`rotary_emb_base` and `{key}` are both set; remove one"));
        }
    }
    match fields.positive("rotary_emb_base") {
        Some(theta) => RotaryEmbedding::plain(theta, head_width),
        None => rope::for_all(fields, 1000.0, head_width, positions),
    }
}

/// Reads NomicBERT with the keys of transformers, or with those of its makers' own code, which descend from GPT-2's.
pub(super) fn nomic(fields: &mut JsonFields<'_>, family: &str, class: Option<ClassKind>) -> Architecture {
    let [hidden_key, heads_key, layers_key, width_key, positions_key] = [
        ["hidden_size", "n_embd"],
        ["num_attention_heads", "n_head"],
        ["num_hidden_layers", "n_layer"],
        ["intermediate_size", "n_inner"],
        ["max_position_embeddings", "n_positions"],
    ]
    .map(|keys| fields.one_of(keys));
    let epsilon_key = fields.either(["layer_norm_eps", "layer_norm_epsilon"]);
    if hidden_key == "n_embd" {
        wants_published(fields);
    }
    if fields.is_null("pad_token_id") {
        fields.problem(
            "`pad_token_id` is null, but a NomicBERT needs one; remove the key or set it".to_owned(),
        );
    }
    let hidden = fields.size(hidden_key);
    let heads = fields.size(heads_key);
    let count = fields.size(layers_key);
    let positions = fields.size(positions_key);
    let head_width = fields.head_width(hidden, heads, heads_key);
    refuse_other_structures(fields);
    let rope = nomic_rope(fields, head_width, positions);
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
        attention: AttentionSpec {
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
        layers: vec![LayerSpec { reach: Reach::ALL, rope: Some(0), input_norm: false }; count],
        ropes: vec![rope],
        logits: None,
        head: None,
        head_pooling: HeadPooling::First,
        names: &names::NOMIC,
        keys: SizeKeys {
            hidden: hidden_key,
            layers: layers_key,
            heads: heads_key,
            intermediate: width_key,
            positions: positions_key,
        },
        class: None,
    };
    attach(fields, class, &mut nomic, |_, labels| {
        let pooler = HeadStep::pooler("pooler.dense", hidden);
        (HeadPooling::First, vec![pooler, HeadStep::new("classifier", labels)])
    });
    nomic
}
