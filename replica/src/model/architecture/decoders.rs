//! Decoder families: pre-normalization by the root mean square, rotary positions, gated feed-forward blocks, and causal
//! attention unless configured otherwise.

use super::ClassKind;
use super::head::{HeadPooling, HeadStep, Logits, attach};
use super::rope::{self, RotaryEmbedding};
use super::{
    Architecture, AttentionSpec, Embedding, FeedForward, LayerSpec, NormKind, NormSpec, Placement, Reach,
    SizeKeys, TensorNames, names,
};
use crate::model::fields::{Activation, Inert, JsonFields, Kind};

/// Defaults of a family's code.
struct Defaults {
    /// Absent = hidden size divided by the number of heads.
    head_width: Option<usize>,
    /// Absent = the number of heads.
    key_value_heads: Option<usize>,
    theta: f64,
    activation_key: &'static str,
    activation: Activation,
    projection_bias: bool,
    tied: bool,
    names: &'static TensorNames,
}

const LLAMA: Defaults = Defaults {
    head_width: None,
    key_value_heads: None,
    theta: 10_000.0,
    activation_key: "hidden_act",
    activation: Activation::Silu,
    projection_bias: false,
    tied: false,
    names: &names::DECODER,
};

const GEMMA: Defaults = Defaults {
    head_width: Some(256),
    key_value_heads: Some(4),
    activation_key: "hidden_activation",
    activation: Activation::GeluTanh,
    tied: true,
    names: &names::GEMMA,
    ..LLAMA
};

/// Returns a window of this many tokens, to preceding tokens or to both sides.
fn window(tokens: usize, causal: bool) -> Reach {
    // A causal window includes the token itself, a window to both sides does not.
    if causal { Reach { before: tokens - 1, behind: 0 } } else { Reach::around(tokens) }
}

/// Reads the common keys; all layers have the same window and rotary positions.
fn decoder(
    fields: &mut JsonFields<'_>,
    family: &str,
    class: Option<ClassKind>,
    defaults: &Defaults,
) -> Architecture {
    let hidden = fields.size("hidden_size");
    let heads = fields.size("num_attention_heads");
    let layers = fields.size("num_hidden_layers");
    let positions = fields.size("max_position_embeddings");
    if defaults.key_value_heads.is_none() {
        fields.optional("num_key_value_heads");
    }
    let key_value_heads =
        fields.optional_size("num_key_value_heads").or(defaults.key_value_heads).unwrap_or(heads);
    if !heads.is_multiple_of(key_value_heads) {
        fields.problem(format!(
            "`num_attention_heads` = {heads} cannot be divided by `num_key_value_heads` = {key_value_heads}"
        ));
    }
    let head_width = match defaults.head_width {
        Some(width) => fields.optional_size("head_dim").unwrap_or(width),
        None => fields.head_width(hidden, heads, "num_attention_heads"),
    };
    let reach = if fields.flag("is_causal", true) { Reach::CAUSAL } else { Reach::ALL };
    if family != "gemma3_text" {
        fields.optional("use_bidirectional_attention");
        fields.must_be(
            "use_bidirectional_attention",
            false,
            "transformers ignores it for this family, but the code of some repositories does not; if the model \
             attends to both sides, write `is_causal` = false instead, which both understand",
        );
    }
    let biased = fields.flag("attention_bias", false);
    let mut decoder = Architecture {
        family: family.to_owned(),
        vocabulary: fields.size("vocab_size"),
        hidden,
        positions,
        token_types: 1,
        embedding: Embedding { positions: None, types: false, norm: false, scale: 1.0 },
        attention: AttentionSpec {
            heads,
            key_value_heads,
            head_width,
            scale: (head_width as f32).sqrt().recip(),
            projection_bias: biased || defaults.projection_bias,
            output_bias: biased,
            query_key_norm: false,
            softcap: None,
            distance_bias: None,
        },
        feed_forward: FeedForward {
            width: fields.size("intermediate_size"),
            activation: fields.activation(defaults.activation_key, defaults.activation),
            gated: true,
            input_bias: false,
            output_bias: false,
        },
        norm: NormSpec { kind: NormKind::Rms, epsilon: fields.epsilon("rms_norm_eps", 1e-6) },
        placement: Placement::Pre,
        layers: vec![LayerSpec { reach, rope: Some(0), input_norm: true }; layers],
        ropes: Vec::new(),
        logits: Some(Logits { tied: fields.flag("tie_word_embeddings", defaults.tied), softcap: None }),
        head: None,
        head_pooling: HeadPooling::First,
        names: defaults.names,
        keys: SizeKeys {
            hidden: "hidden_size",
            layers: "num_hidden_layers",
            heads: "num_attention_heads",
            intermediate: "intermediate_size",
            positions: "max_position_embeddings",
        },
        class: None,
    };
    let vocabulary = decoder.vocabulary;
    attach(fields, class, &mut decoder, |fields, labels| {
        let score = HeadStep { bias: false, ..HeadStep::new("score", labels) };
        (HeadPooling::Last { padding: fields.token("pad_token_id", vocabulary) }, vec![score])
    });
    decoder
}

/// Sets the same rotary positions for all layers.
fn with_rope(fields: &mut JsonFields<'_>, decoder: &mut Architecture, theta: f64) {
    let rope: RotaryEmbedding = rope::for_all(fields, theta, decoder.attention.head_width, decoder.positions);
    decoder.ropes = vec![rope];
}

pub(super) fn llama(fields: &mut JsonFields<'_>, family: &str, class: Option<ClassKind>) -> Architecture {
    let mut llama = decoder(fields, family, class, &LLAMA);
    with_rope(fields, &mut llama, LLAMA.theta);
    let biased = fields.flag("mlp_bias", false);
    (llama.feed_forward.input_bias, llama.feed_forward.output_bias) = (biased, biased);
    llama
}

pub(super) fn mistral(fields: &mut JsonFields<'_>, family: &str, class: Option<ClassKind>) -> Architecture {
    let mut mistral = decoder(fields, family, class, &Defaults { key_value_heads: Some(8), ..LLAMA });
    with_rope(fields, &mut mistral, LLAMA.theta);
    fields.must_be("attention_bias", false, "Mistral has none");
    fields.refuse("layer_types", "all layers of a Mistral have the same window");
    // Absent means the default window of its code, null means none.
    if let Some(tokens) = fields.size_unless_null("sliding_window", 4096) {
        let causal = mistral.layers[0].reach == Reach::CAUSAL;
        mistral.layers.iter_mut().for_each(|layer| layer.reach = window(tokens, causal));
    }
    mistral
}

/// Sets the sliding window of the layers that have one.
fn slide(
    fields: &mut JsonFields<'_>,
    decoder: &mut Architecture,
    tokens: usize,
    slides: impl Fn(usize) -> bool,
) {
    let sliding = fields.sliding_layers(decoder.layers.len(), slides);
    for (layer, sliding) in decoder.layers.iter_mut().zip(sliding) {
        if sliding {
            layer.reach = window(tokens, layer.reach == Reach::CAUSAL);
        }
    }
}

fn qwen(
    fields: &mut JsonFields<'_>,
    family: &str,
    class: Option<ClassKind>,
    defaults: &Defaults,
) -> Architecture {
    let mut qwen = decoder(fields, family, class, defaults);
    with_rope(fields, &mut qwen, defaults.theta);
    let first = fields.whole("max_window_layers", 28);
    if fields.flag("use_sliding_window", false)
        && let Some(tokens) = fields.size_unless_null("sliding_window", 4096)
    {
        slide(fields, &mut qwen, tokens, |index| index >= first);
    } else {
        fields.ignore(&[Inert(Kind::OptionalWhole, &["sliding_window"])]);
        // Sliding layers without a window are a contradiction.
        let full = fields.sliding_layers(qwen.layers.len(), |_| false);
        if full.contains(&true) {
            fields.problem(
                "`layer_types` has sliding layers, but `use_sliding_window` is false; set it to true"
                    .to_owned(),
            );
        }
    }
    qwen
}

pub(super) fn qwen2(fields: &mut JsonFields<'_>, family: &str, class: Option<ClassKind>) -> Architecture {
    fields.must_be("attention_bias", true, "queries, keys and values of a Qwen2 have biases");
    let mut qwen = qwen(fields, family, class, &Defaults { projection_bias: true, ..LLAMA });
    qwen.attention.output_bias = false;
    qwen
}

pub(super) fn qwen3(fields: &mut JsonFields<'_>, family: &str, class: Option<ClassKind>) -> Architecture {
    let mut qwen = qwen(fields, family, class, &Defaults { head_width: Some(128), ..LLAMA });
    qwen.attention.query_key_norm = true;
    qwen
}

fn gemma(fields: &mut JsonFields<'_>, family: &str, class: Option<ClassKind>) -> Architecture {
    let mut gemma = decoder(fields, family, class, &GEMMA);
    gemma.embedding.scale = (gemma.hidden as f64).sqrt() as f32;
    gemma.norm.kind = NormKind::RmsPlusOne;
    gemma.placement = Placement::Sandwich;
    let divisor = fields.positive("query_pre_attn_scalar").unwrap_or(256.0);
    gemma.attention.scale = divisor.sqrt().recip() as f32;
    // Gemma3 has the key without a default.
    let softcap = if family == "gemma2" {
        fields.positive_unless_null("final_logit_softcapping", 30.0)
    } else {
        fields.optional("final_logit_softcapping");
        fields.positive("final_logit_softcapping")
    };
    gemma.logits = gemma.logits.map(|logits| Logits { softcap, ..logits });
    gemma
}

/// Returns the sliding window. Gemma's code always has one, and fails without.
fn gemma_window(fields: &mut JsonFields<'_>) -> usize {
    fields.optional_size("sliding_window").unwrap_or(4096)
}

pub(super) fn gemma2(fields: &mut JsonFields<'_>, family: &str, class: Option<ClassKind>) -> Architecture {
    let mut gemma = gemma(fields, family, class);
    with_rope(fields, &mut gemma, GEMMA.theta);
    gemma.attention.softcap =
        fields.positive_unless_null("attn_logit_softcapping", 50.0).map(|cap| cap as f32);
    let tokens = gemma_window(fields);
    slide(fields, &mut gemma, tokens, |index| index.is_multiple_of(2));
    gemma
}

pub(super) fn gemma3(fields: &mut JsonFields<'_>, family: &str, class: Option<ClassKind>) -> Architecture {
    let mut gemma = gemma(fields, family, class);
    gemma.attention.query_key_norm = true;
    fields.refuse("attn_logit_softcapping", "scores of a Gemma3 are not capped");
    let every = fields.optional_size("sliding_window_pattern").unwrap_or(6);
    let sliding = fields.sliding_layers(gemma.layers.len(), |index| !(index + 1).is_multiple_of(every));
    let tokens = gemma_window(fields);
    let (width, positions) = (gemma.attention.head_width, gemma.positions);
    gemma.ropes = vec![
        rope::for_kind(fields, "full_attention", "rope_theta", 1_000_000.0, width, positions, true),
        rope::for_kind(
            fields,
            "sliding_attention",
            "rope_local_base_freq",
            10_000.0,
            width,
            positions,
            false,
        ),
    ];
    fields.optional("use_bidirectional_attention");
    let both = fields.flag("use_bidirectional_attention", false);
    for (layer, sliding) in gemma.layers.iter_mut().zip(sliding) {
        layer.rope = Some(usize::from(sliding));
        layer.reach = match (both, sliding) {
            (true, false) => Reach::ALL,
            // The configured window covers both sides together; if `is_causal` is false as well, the library builds a
            // different mask, which includes the boundary.
            (true, true) => Reach::around(tokens / 2 + usize::from(layer.reach != Reach::CAUSAL)),
            (false, false) => layer.reach,
            (false, true) => window(tokens, layer.reach == Reach::CAUSAL),
        };
    }
    gemma
}
