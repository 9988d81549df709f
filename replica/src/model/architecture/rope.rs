//! Rotary positions: queries and keys are turned by angles that grow with the position, so that their product depends
//! on the distance alone.
//!
//! What varies is how fast each pair of numbers turns, and how a model that was trained on short texts was stretched to
//! long ones. Rates are computed in 32-bit floats step by step as PyTorch does: an angle is a rate times a position, and
//! a rate that is off in the last digit is off by that many times more at position 8000.

use std::f64::consts::PI;

use serde_json::{Map, Value};

use crate::model::fields::Fields;

/// How queries and keys are turned.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Radians per position, for each pair of numbers of a head: the first number of its first half and the first of
    /// its second half, and so on.
    pub rates: Vec<f32>,
    /// By what the turned vectors are multiplied.
    pub magnitude: f32,
}

impl Rope {
    /// `rate = theta^(−2i/width)`
    pub(super) fn plain(theta: f64, width: usize) -> Rope {
        let rate = |index: usize| {
            let exponent = (2 * index) as f32 / width as f32;
            1.0 / (theta.powf(f64::from(exponent)) as f32)
        };
        Rope { rates: (0..width / 2).map(rate).collect(), magnitude: 1.0 }
    }
}

/// The rotary positions of a model that has the same ones in all layers.
pub(super) fn for_all(fields: &mut Fields<'_>, default_theta: f64, width: usize, positions: usize) -> Rope {
    // The older key wins where both are given, as in transformers.
    let key = fields.either(["rope_scaling", "rope_parameters"]);
    let other = if key == "rope_scaling" { "rope_parameters" } else { "rope_scaling" };
    if fields.optional(other).is_some() {
        fields.problem(
            "`rope_scaling` and `rope_parameters` are both there; remove the one that does not apply"
                .to_owned(),
        );
    }
    let given = parameters(fields, key);
    let theta = fields.positive("rope_theta").unwrap_or(default_theta);
    make(fields, key, given, theta, width, positions)
}

/// The rotary positions of one kind of layers. Older files have a theta of its own for each kind, and one stretching,
/// which is for this kind if it is `stretched`.
pub(super) fn for_kind(
    fields: &mut Fields<'_>,
    kind: &'static str,
    theta_key: &str,
    default_theta: f64,
    width: usize,
    positions: usize,
    stretched: bool,
) -> Rope {
    let theta = fields.positive(theta_key).unwrap_or(default_theta);
    let all = parameters(fields, "rope_parameters");
    for (key, value) in all.into_iter().flatten().filter(|(key, _)| !KINDS.contains(&key.as_str())) {
        fields.problem(format!(
            "`rope_parameters` has `{key}` = {value}, and a kind of layers is expected there"
        ));
    }
    let of_kind = all.and_then(|all| all.get(kind)).and_then(Value::as_object);
    let old = if stretched { parameters(fields, "rope_scaling") } else { None };
    if of_kind.is_none() && fields.get("rope_parameters").is_some() {
        fields.problem(format!("`rope_parameters` says nothing of {kind}"));
    }
    if old.is_some_and(|old| !old.contains_key("rope_type")) {
        fields.problem(
            "`rope_scaling` names its type by `type`, which version 5 of transformers ignores for this family; write \
             `rope_type`"
                .to_owned(),
        );
    }
    let place = if old.is_some() { "rope_scaling" } else { kind };
    make(fields, place, old.or(of_kind), theta, width, positions)
}

fn parameters<'a>(fields: &mut Fields<'a>, key: &str) -> Option<&'a Map<String, Value>> {
    let given = fields.optional(key)?;
    if !given.is_object() {
        fields.problem(format!("`{key}` = {given} is not an object"));
    }
    given.as_object()
}

/// Kinds of layers, where each has rotary positions of its own.
const KINDS: [&str; 2] = ["full_attention", "sliding_attention"];

/// What each way of stretching reads.
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

fn make(
    fields: &mut Fields<'_>,
    place: &str,
    given: Option<&Map<String, Value>>,
    theta: f64,
    width: usize,
    positions: usize,
) -> Rope {
    if !width.is_multiple_of(2) {
        fields.problem(format!("heads of {width} numbers cannot be turned in pairs"));
    }
    let Some(given) = given else { return Rope::plain(theta, width) };
    let mut within = Fields::new(given);
    let theta = within.positive("rope_theta").unwrap_or(theta);
    let kind_key = within.either(["rope_type", "type"]);
    let kind = within.word(kind_key).unwrap_or("default");
    if let Some(part) = within.number("partial_rotary_factor").filter(|part| *part != 1.0) {
        within.problem(format!("`partial_rotary_factor` = {part} is not supported; 1 is"));
    }
    let Some((_, known)) = KNOWN.iter().find(|(name, _)| *name == kind) else {
        let names: Vec<&str> = KNOWN.iter().map(|(name, _)| *name).collect();
        fields.problem(format!(
            "`{place}`: `rope_type` (or `type`) = {kind} is not supported; {} are",
            names.join(", ")
        ));
        return Rope::plain(theta, width);
    };
    for key in ["rope_theta", "rope_type", "type"] {
        if within.is_null(key) {
            within.problem(format!("`{key}` is null"));
        }
    }
    for (key, value) in given.iter().filter(|(_, value)| !value.is_null()) {
        let common = ["rope_type", "type", "rope_theta", "partial_rotary_factor"].contains(&key.as_str());
        if !common && !known.contains(&key.as_str()) {
            within.problem(format!(
                "`{key}` = {value} is not understood with `rope_type` (or `type`) = {kind}"
            ));
        }
    }
    let plain = Rope::plain(theta, width);
    let rope = match kind {
        "linear" => {
            let factor = within.wanted("factor");
            Rope { rates: plain.rates.iter().map(|rate| rate / factor as f32).collect(), ..plain }
        }
        "llama3" => llama3(&mut within, plain, positions as f64),
        "yarn" => yarn(&mut within, plain, theta, positions as f64),
        _ => plain,
    };
    for problem in within.problems() {
        fields.problem(format!("`{place}`: {problem}"));
    }
    rope
}

/// Slow turns are slowed by the factor, fast ones are left, and between the two it goes gradually.
fn llama3(within: &mut Fields<'_>, plain: Rope, original: f64) -> Rope {
    let factor = within.wanted("factor") as f32;
    let low = within.wanted("low_freq_factor") as f32;
    let high = within.wanted("high_freq_factor") as f32;
    let original = within.positive("original_max_position_embeddings").unwrap_or(original) as f32;
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
    Rope { rates: plain.rates.into_iter().map(stretch).collect(), ..plain }
}

/// Pairs that turn many times within the original length are left, those that turn less than once are slowed by the
/// factor, and between the two it goes by their number; and all scores are sharpened a little.
fn yarn(within: &mut Fields<'_>, plain: Rope, theta: f64, original: f64) -> Rope {
    let factor = within.wanted("factor");
    let original = within.positive("original_max_position_embeddings").unwrap_or(original);
    let fast = within.positive("beta_fast").unwrap_or(32.0);
    let slow = within.positive("beta_slow").unwrap_or(1.0);
    let truncate = within.flag("truncate", true);
    let magnitude = within.positive("attention_factor");
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
    Rope { rates, magnitude: magnitude as f32 }
}
