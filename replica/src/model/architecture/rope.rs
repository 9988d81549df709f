//! Rotary position embeddings (RoPE): queries and keys are rotated by angles proportional to the position, so that
//! their product depends on the distance only.
//!
//! Models differ in the rotation rates, and in the scaling of a model that was trained on short texts to long ones.
//! Rates are computed in 32-bit floats in the same steps as in PyTorch: an angle is a rate times a position, so that an
//! error in the last digit of a rate is multiplied by the position, up to 8000.

use std::f64::consts::PI;

use serde_json::{Map, Value};

use crate::model::fields::JsonFields;

/// Rotation of queries and keys.
#[derive(Clone, Debug, PartialEq)]
pub struct RotaryEmbedding {
    /// Radians per position, for each pair of numbers of a head: pair `i` consists of number `i` of the first half and
    /// number `i` of the second half.
    pub rates: Vec<f32>,
    /// Factor of the rotated vectors.
    pub magnitude: f32,
}

impl RotaryEmbedding {
    /// `rate = theta^(−2i/width)`
    pub(super) fn plain(theta: f64, width: usize) -> RotaryEmbedding {
        let rate = |index: usize| {
            let exponent = (2 * index) as f32 / width as f32;
            1.0 / (theta.powf(f64::from(exponent)) as f32)
        };
        RotaryEmbedding { rates: (0..width / 2).map(rate).collect(), magnitude: 1.0 }
    }
}

/// Returns the rotary positions of a model that has the same ones in all layers.
pub(super) fn for_all(
    fields: &mut JsonFields<'_>,
    default_theta: f64,
    width: usize,
    positions: usize,
) -> RotaryEmbedding {
    // If both keys exist, the older one takes precedence, as in transformers.
    let key = fields.either(["rope_scaling", "rope_parameters"]);
    let other = if key == "rope_scaling" { "rope_parameters" } else { "rope_scaling" };
    if fields.optional(other).is_some() {
        fields.problem(
            "`rope_scaling` and `rope_parameters` are both set; remove the one that does not apply"
                .to_owned(),
        );
    }
    let given = parameters(fields, key);
    let theta = fields.positive("rope_theta").unwrap_or(default_theta);
    build(fields, key, given, theta, width, positions)
}

/// Returns the rotary positions of one kind of layers. Older files have a theta for each kind, and one scaling, which
/// applies to this kind if `stretched`.
pub(super) fn for_kind(
    fields: &mut JsonFields<'_>,
    kind: &'static str,
    theta_key: &str,
    default_theta: f64,
    width: usize,
    positions: usize,
    stretched: bool,
) -> RotaryEmbedding {
    let theta = fields.positive(theta_key).unwrap_or(default_theta);
    let all = parameters(fields, "rope_parameters");
    for (key, value) in all.into_iter().flatten().filter(|(key, _)| !KINDS.contains(&key.as_str())) {
        fields.problem(format!(
            "`rope_parameters` has `{key}` = {value}; only full_attention and sliding_attention are supported keys"
        ));
    }
    let of_kind = all.and_then(|all| all.get(kind)).and_then(Value::as_object);
    let old = if stretched { parameters(fields, "rope_scaling") } else { None };
    if of_kind.is_none() && fields.get("rope_parameters").is_some() {
        fields.problem(format!("`rope_parameters` has no `{kind}`; add it"));
    }
    if old.is_some_and(|old| !old.contains_key("rope_type")) {
        fields.problem(
            "`rope_scaling` has its type in `type`, which version 5 of transformers ignores for this family; rename \
             it to `rope_type`"
                .to_owned(),
        );
    }
    let name = if old.is_some() { "rope_scaling" } else { kind };
    build(fields, name, old.or(of_kind), theta, width, positions)
}

fn parameters<'a>(fields: &mut JsonFields<'a>, key: &str) -> Option<&'a Map<String, Value>> {
    let given = fields.optional(key)?;
    if !given.is_object() {
        fields.problem(format!("`{key}` = {given} is not an object"));
    }
    given.as_object()
}

/// Kinds of layers with their own rotary positions.
const KINDS: [&str; 2] = ["full_attention", "sliding_attention"];

/// Supported types of scaling, with their keys.
const KNOWN: &[(&str, &[&str])] = &[
    ("default", &[]),
    ("linear", &["factor"]),
    ("llama3", &["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]),
    (
        "yarn",
        &[
            "factor",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "original_max_position_embeddings",
            "truncate",
        ],
    ),
];

fn build(
    fields: &mut JsonFields<'_>,
    name: &str,
    given: Option<&Map<String, Value>>,
    theta: f64,
    width: usize,
    positions: usize,
) -> RotaryEmbedding {
    if !width.is_multiple_of(2) {
        fields
            .problem(format!("a head width of {width} is odd, but rotary positions rotate pairs of numbers"));
    }
    let Some(given) = given else { return RotaryEmbedding::plain(theta, width) };
    let mut nested = JsonFields::new(given);
    let theta = nested.positive("rope_theta").unwrap_or(theta);
    let kind_key = nested.either(["rope_type", "type"]);
    let kind = nested.word(kind_key).unwrap_or("default");
    if let Some(part) = nested.number("partial_rotary_factor").filter(|part| *part != 1.0) {
        nested.problem(format!("`partial_rotary_factor` = {part} is not supported; 1 is"));
    }
    let Some((_, known)) = KNOWN.iter().find(|(name, _)| *name == kind) else {
        let names: Vec<&str> = KNOWN.iter().map(|(name, _)| *name).collect();
        fields.problem(format!(
            "`{name}`: `rope_type` (or `type`) = {kind} is not supported; {} are",
            names.join(", ")
        ));
        return RotaryEmbedding::plain(theta, width);
    };
    for key in ["rope_theta", "rope_type", "type"] {
        if nested.is_null(key) {
            nested.problem(format!("`{key}` is null"));
        }
    }
    for (key, value) in given.iter().filter(|(_, value)| !value.is_null()) {
        let common = ["rope_type", "type", "rope_theta", "partial_rotary_factor"].contains(&key.as_str());
        if !common && !known.contains(&key.as_str()) {
            nested.problem(format!(
                "`{key}` = {value} is not understood with `rope_type` (or `type`) = {kind}; remove it"
            ));
        }
    }
    let plain = RotaryEmbedding::plain(theta, width);
    let rope = match kind {
        "linear" => {
            let factor = nested.required_positive("factor");
            RotaryEmbedding { rates: plain.rates.iter().map(|rate| rate / factor as f32).collect(), ..plain }
        }
        "llama3" => llama3(&mut nested, plain, positions as f64),
        "yarn" => yarn(&mut nested, plain, theta, positions as f64),
        _ => plain,
    };
    for problem in nested.problems() {
        fields.problem(format!("`{name}`: {problem}"));
    }
    rope
}

/// Scaling of Llama 3: slow rotations are divided by the factor, fast ones are kept, with a smooth transition.
fn llama3(nested: &mut JsonFields<'_>, plain: RotaryEmbedding, original: f64) -> RotaryEmbedding {
    let factor = nested.required_positive("factor") as f32;
    let low = nested.required_positive("low_freq_factor") as f32;
    let high = nested.required_positive("high_freq_factor") as f32;
    let original = nested.positive("original_max_position_embeddings").unwrap_or(original) as f32;
    let stretch = |rate: f32| {
        let length = 2.0 * std::f32::consts::PI / rate;
        if length > original / low {
            rate / factor
        } else if length < original / high {
            rate
        } else {
            let smooth = (original / length - low) / (high - low);
            (1.0 - smooth) * rate / factor + smooth * rate
        }
    };
    RotaryEmbedding { rates: plain.rates.into_iter().map(stretch).collect(), ..plain }
}

/// YaRN scaling: pairs that rotate many times within the original length are kept, those that rotate less than once are
/// divided by the factor, with a linear transition by index; all scores are scaled up slightly.
fn yarn(nested: &mut JsonFields<'_>, plain: RotaryEmbedding, theta: f64, original: f64) -> RotaryEmbedding {
    let factor = nested.required_positive("factor");
    let original = nested.positive("original_max_position_embeddings").unwrap_or(original);
    let fast = nested.positive("beta_fast").unwrap_or(32.0);
    let slow = nested.positive("beta_slow").unwrap_or(1.0);
    let truncate = nested.flag("truncate", true);
    let magnitude = nested.positive("attention_factor");
    let magnitude = magnitude.unwrap_or(if factor <= 1.0 { 1.0 } else { 0.1 * factor.ln() + 1.0 });
    let width = 2 * plain.rates.len();
    let pair_of = |turns: f64| width as f64 * (original / (turns * 2.0 * PI)).ln() / (2.0 * theta.ln());
    let (mut low, mut high) = (pair_of(fast), pair_of(slow));
    if truncate {
        (low, high) = (low.floor(), high.ceil());
    }
    (low, high) = (low.max(0.0), high.min(width as f64 - 1.0));
    if low == high {
        high += 0.001;
    }
    let stretch = |(index, rate): (usize, f32)| {
        let stretched = ((index as f32 - low as f32) / (high - low) as f32).clamp(0.0, 1.0);
        rate / factor as f32 * stretched + rate * (1.0 - stretched)
    };
    let rates = plain.rates.into_iter().enumerate().map(stretch).collect();
    RotaryEmbedding { rates, magnitude: magnitude as f32 }
}
