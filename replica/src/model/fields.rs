//! Strict reader of a JSON file: no key is ignored by accident.
//!
//! A replica computes exactly what the libraries of the checkpoint compute, or the checkpoint is rejected. So every
//! key of a file is either read, or listed as [`Inert`] with a reason, or rejected by name
//! ([`JsonFields::refuse_others`]). All problems of a file are reported together.

use std::cell::RefCell;
use std::collections::BTreeSet;

use serde_json::{Map, Value};

use super::shortened_name;

/// Maximum of a size: larger than in any model, and small enough that a product of three sizes does not overflow.
const MAX_SIZE: u64 = 1 << 20;
/// Maximum characters of a value in a message.
const SHOWN: usize = 80;

/// Activation between two projections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// `x·Φ(x)`, exact (error function).
    Gelu,
    /// `x·Φ(x)`, approximated by the hyperbolic tangent.
    GeluTanh,
    /// `x·σ(1.702·x)`
    QuickGelu,
    /// `max(x, 0)`
    Relu,
    /// `x·σ(x)`
    Silu,
    /// `tanh x`
    Tanh,
}

/// Keys of a file, and the problems found so far.
pub(super) struct JsonFields<'a> {
    raw: &'a Map<String, Value>,
    /// Keys that were read, and whether the library accepts null for them.
    read: RefCell<BTreeSet<(String, bool)>>,
    problems: Vec<String>,
}

/// Keys without effect on the results. The library still checks the types of their values.
pub(super) struct Inert(pub(super) Kind, pub(super) &'static [&'static str]);

/// Type of the value of a key without effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Any value.
    Any,
    /// True or false.
    Flag,
    /// True, false or null.
    OptionalFlag,
    /// A number with a decimal point.
    Float,
    /// A whole number, or null.
    OptionalWhole,
    /// A whole number.
    Whole,
    /// A number from 0 to 1, such as a probability.
    Share,
    /// A number from 0 to 1, or null.
    OptionalShare,
    /// A string, or null.
    OptionalText,
    /// A token id, a list of them, or null.
    OptionalTokens,
    /// An object, or null.
    OptionalObject,
    /// The name of a float format, or null.
    OptionalDtype,
    /// One of these strings.
    OneOf(&'static [&'static str]),
    /// A string.
    Text,
    /// A value that disables a feature: null, false, 0, an empty list or object.
    Off,
}

impl Kind {
    fn accepts(self, value: &Value) -> bool {
        let share = || value.as_f64().is_some_and(|share| (0.0..=1.0).contains(&share));
        match self {
            Kind::Any => true,
            Kind::Flag => value.is_boolean(),
            Kind::OptionalFlag => value.is_boolean() || value.is_null(),
            Kind::Float => value.is_f64(),
            Kind::Whole => value.is_i64() || value.is_u64(),
            Kind::OptionalWhole => value.is_i64() || value.is_u64() || value.is_null(),
            Kind::Share => share(),
            Kind::OptionalShare => value.is_null() || share(),
            Kind::OptionalText => value.is_string() || value.is_null(),
            Kind::OneOf(words) => value.as_str().is_some_and(|word| words.contains(&word)),
            Kind::Text => value.is_string(),
            Kind::OptionalTokens => {
                let token = |value: &Value| value.is_i64() || value.is_u64();
                value.is_null() || token(value) || value.as_array().is_some_and(|all| all.iter().all(token))
            }
            Kind::OptionalObject => value.is_object() || value.is_null(),
            Kind::OptionalDtype => {
                value.is_null()
                    || value
                        .as_str()
                        .is_some_and(|name| ["float32", "float16", "bfloat16", "float64"].contains(&name))
            }
            Kind::Off => match value {
                Value::Null | Value::Bool(false) => true,
                Value::Number(number) => number.as_f64() == Some(0.0),
                Value::Array(all) => all.is_empty(),
                Value::Object(all) => all.is_empty(),
                Value::Bool(true) | Value::String(_) => false,
            },
        }
    }

    fn description(self) -> &'static str {
        match self {
            Kind::Any => "a value",
            Kind::Flag => "true or false",
            Kind::OptionalFlag => "true, false or null",
            Kind::Float => "a number with a decimal point",
            Kind::Whole => "a whole number",
            Kind::OptionalWhole => "a whole number or null",
            Kind::Share => "a number from 0 to 1",
            Kind::OptionalShare => "a number from 0 to 1, or null",
            Kind::OptionalText => "a string or null",
            Kind::OptionalTokens => "a token id, a list of token ids, or null",
            Kind::OptionalObject => "an object or null",
            Kind::OptionalDtype => "float32, float16, bfloat16 or float64",
            Kind::OneOf(_) => "a value that the library knows for it",
            Kind::Text => "a string",
            Kind::Off => "absent or disabled",
        }
    }
}

/// Returns a value, shortened for a message.
pub(super) fn shown(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(SHOWN) {
        None => text,
        Some((end, _)) => format!("{}…", &text[..end]),
    }
}

impl<'a> JsonFields<'a> {
    pub(super) fn new(raw: &'a Map<String, Value>) -> JsonFields<'a> {
        JsonFields { raw, read: RefCell::default(), problems: Vec::new() }
    }

    /// Returns `read`, or all problems.
    pub(super) fn finish<T>(self, read: T) -> Result<T, Vec<String>> {
        if self.problems.is_empty() { Ok(read) } else { Err(self.problems) }
    }

    /// Returns the problems found so far, for a reader of a part of a file.
    pub(super) fn problems(self) -> Vec<String> {
        self.problems
    }

    pub(super) fn problem(&mut self, problem: String) {
        self.problems.push(problem);
    }

    /// Marks keys without effect as read; a value that the library rejects is a problem.
    pub(super) fn ignore(&mut self, groups: &[Inert]) {
        for Inert(kind, keys) in groups {
            for key in *keys {
                let Some(value) = self.raw.get(*key) else { continue };
                self.read.borrow_mut().insert(((*key).to_owned(), true));
                if !kind.accepts(value) {
                    self.problems.push(format!("`{key}` = {} is not {}", shown(value), kind.description()));
                }
            }
        }
    }

    /// Rejects every key that was not read, and nulls where the library requires a value.
    pub(super) fn refuse_others(&mut self) {
        let read = self.read.take();
        let of_key = |key: &str, null| read.contains(&(key.to_owned(), null));
        for (key, value) in self.raw {
            let (required, optional) = (of_key(key, false), of_key(key, true));
            if !required && !optional {
                self.problems.push(format!(
                    "`{key}` = {} is not understood, and it may change the results of the model; if the model's own \
                     code does not read it, remove it from the file",
                    shown(value)
                ));
            } else if value.is_null() && !optional {
                self.problems.push(format!("`{key}` is null; set a value"));
            }
        }
        self.read = RefCell::new(read);
    }

    /// Returns the value of a key. Null is a problem, which [`JsonFields::refuse_others`] reports.
    pub(super) fn get(&self, key: &str) -> Option<&'a Value> {
        self.read.borrow_mut().insert((key.to_owned(), false));
        self.raw.get(key).filter(|value| !value.is_null())
    }

    /// Returns the value of a key; null is the same as absent.
    pub(super) fn optional(&self, key: &str) -> Option<&'a Value> {
        self.read.borrow_mut().insert((key.to_owned(), true));
        self.raw.get(key).filter(|value| !value.is_null())
    }

    /// Returns whether the key has a value, without marking it as read.
    pub(super) fn has(&self, key: &str) -> bool {
        self.raw.get(key).is_some_and(|value| !value.is_null())
    }

    /// Returns whether the value is null.
    pub(super) fn is_null(&self, key: &str) -> bool {
        self.raw.get(key).is_some_and(Value::is_null)
    }

    /// Returns whichever of these keys exists: a family's own code and the library use different names for it.
    pub(super) fn one_of(&mut self, keys: [&'static str; 2]) -> &'static str {
        if keys.iter().all(|key| self.has(key)) {
            self.problem(format!("`{}` and `{}` are both set; remove one", keys[0], keys[1]));
            for key in keys {
                self.optional(key);
            }
        }
        if !keys.iter().any(|key| self.has(key)) {
            self.problem(format!("neither `{}` nor `{}` is set; set one", keys[0], keys[1]));
        }
        self.either(keys)
    }

    /// Returns the first of these keys that exists; the key was renamed.
    pub(super) fn either(&self, keys: [&'static str; 2]) -> &'static str {
        if !self.has(keys[0]) && self.has(keys[1]) { keys[1] } else { keys[0] }
    }

    /// Returns a required size.
    pub(super) fn size(&mut self, key: &str) -> usize {
        match self.optional_size(key) {
            Some(size) => size,
            None => {
                if self.get(key).is_none() {
                    self.problem(format!("`{key}` is missing"));
                }
                1
            }
        }
    }

    /// Returns an optional size.
    pub(super) fn optional_size(&mut self, key: &str) -> Option<usize> {
        let given = self.get(key)?;
        match given.as_u64() {
            Some(size @ 1..=MAX_SIZE) => Some(size as usize),
            Some(_) | None => {
                self.problem(format!("`{key}` = {} is not between 1 and {MAX_SIZE}", shown(given)));
                None
            }
        }
    }

    /// Returns a whole number, which may be 0 or negative.
    pub(super) fn whole(&mut self, key: &str, default: usize) -> usize {
        let Some(given) = self.get(key) else { return default };
        if given.as_i64().is_none() {
            self.problem(format!("`{key}` = {} is not a whole number", shown(given)));
        }
        given.as_i64().map_or(default, |number| usize::try_from(number).unwrap_or(0))
    }

    /// Returns a number.
    pub(super) fn number(&mut self, key: &str) -> Option<f64> {
        let given = self.get(key)?;
        if given.as_f64().is_none() {
            self.problem(format!("`{key}` = {} is not a number", shown(given)));
        }
        given.as_f64()
    }

    /// Returns a positive number.
    pub(super) fn positive(&mut self, key: &str) -> Option<f64> {
        let number = self.number(key)?;
        if number > 0.0 && number.is_finite() {
            return Some(number);
        }
        self.problem(format!("`{key}` = {number} is not above 0"));
        None
    }

    /// Returns the epsilon that is added to a variance.
    pub(super) fn epsilon(&mut self, key: &str, default: f64) -> f32 {
        let epsilon = self.number(key).unwrap_or(default);
        if self.has(key) && !self.raw[key].is_f64() {
            self.problem(format!("`{key}` = {} is not a number with a decimal point", shown(&self.raw[key])));
        }
        if !(0.0..1.0).contains(&epsilon) {
            self.problem(format!("`{key}` = {epsilon} is not between 0 and 1"));
        }
        epsilon as f32
    }

    /// Returns a required positive number.
    pub(super) fn required_positive(&mut self, key: &str) -> f64 {
        if self.get(key).is_none() {
            self.problem(format!("`{key}` is missing"));
        }
        self.positive(key).unwrap_or(1.0)
    }

    /// Returns a size; absent means the default, null means none.
    pub(super) fn size_unless_null(&mut self, key: &str, default: usize) -> Option<usize> {
        self.optional(key);
        if self.raw.contains_key(key) { self.optional_size(key) } else { Some(default) }
    }

    /// Returns a positive number; absent means the default, null means none.
    pub(super) fn positive_unless_null(&mut self, key: &str, default: f64) -> Option<f64> {
        self.optional(key);
        if self.raw.contains_key(key) { self.positive(key) } else { Some(default) }
    }

    /// Returns for each layer whether its attention has a sliding window: from `layer_types`, or by the family's
    /// pattern.
    pub(super) fn sliding_layers(&mut self, layers: usize, pattern: impl Fn(usize) -> bool) -> Vec<bool> {
        let by_pattern: Vec<bool> = (0..layers).map(pattern).collect();
        let Some(given) = self.optional("layer_types") else { return by_pattern };
        let kinds = given.as_array().map_or(&[][..], Vec::as_slice);
        if kinds.len() != layers {
            self.problem(format!("`layer_types` lists {} layers, but the model has {layers}", kinds.len()));
            return by_pattern;
        }
        let mut sliding = Vec::new();
        for kind in kinds {
            match kind.as_str() {
                Some("full_attention") => sliding.push(false),
                Some("sliding_attention") => sliding.push(true),
                Some(_) | None => {
                    self.problem(format!(
                        "`layer_types` has {}; supported are full_attention and sliding_attention",
                        shown(kind)
                    ));
                    return by_pattern;
                }
            }
        }
        sliding
    }

    /// Returns a boolean.
    pub(super) fn flag(&mut self, key: &str, default: bool) -> bool {
        let Some(given) = self.get(key) else { return default };
        if given.as_bool().is_none() {
            self.problem(format!("`{key}` = {} is not true or false", shown(given)));
        }
        given.as_bool().unwrap_or(default)
    }

    /// Returns a string.
    pub(super) fn word(&mut self, key: &str) -> Option<&'a str> {
        let given = self.get(key)?;
        if given.as_str().is_none() {
            self.problem(format!("`{key}` = {} is not a string", shown(given)));
        }
        given.as_str()
    }

    /// Returns a token id below `vocabulary`. Some files write −1 for "none".
    pub(super) fn token(&mut self, key: &str, vocabulary: usize) -> Option<u32> {
        let given = self.optional(key)?;
        match given.as_i64() {
            Some(id) if id < 0 => None,
            Some(id) if usize::try_from(id).is_ok_and(|id| id < vocabulary) => u32::try_from(id).ok(),
            Some(_) | None => {
                self.problem(format!(
                    "`{key}` = {} is not a token of this model; `vocab_size` is {vocabulary}",
                    shown(given)
                ));
                None
            }
        }
    }

    /// Rejects a key that is not supported.
    pub(super) fn refuse(&mut self, key: &str, reason: &str) {
        if let Some(given) = self.optional(key) {
            self.problem(format!("`{key}` = {} is not supported: {reason}", shown(given)));
        }
    }

    /// Rejects a boolean that has another value than the supported one.
    pub(super) fn must_be(&mut self, key: &str, expected: bool, reason: &str) {
        if self.flag(key, expected) != expected {
            self.problem(format!("`{key}` = {} is not supported: {reason}", !expected));
        }
    }

    /// Returns an activation by name.
    pub(super) fn activation(&mut self, key: &str, default: Activation) -> Activation {
        match self.word(key) {
            None => default,
            Some("gelu" | "gelu_python") => Activation::Gelu,
            Some("gelu_new" | "gelu_fast" | "gelu_pytorch_tanh" | "gelu_accurate") => Activation::GeluTanh,
            Some("quick_gelu") => Activation::QuickGelu,
            Some("relu") => Activation::Relu,
            Some("silu" | "swish") => Activation::Silu,
            Some("tanh") => Activation::Tanh,
            Some(given) => {
                self.problem(format!(
                    "`{key}` = {} is not supported; gelu, gelu_new, quick_gelu, relu, silu and tanh are",
                    shortened_name(given)
                ));
                default
            }
        }
    }

    /// Returns the width of a head: from its key, or the hidden size divided by the number of heads.
    pub(super) fn head_width(&mut self, hidden: usize, heads: usize, heads_key: &str) -> usize {
        if let Some(width) = self.optional_size("head_dim") {
            return width;
        }
        if !hidden.is_multiple_of(heads) {
            self.problem(format!("the hidden size of {hidden} cannot be divided by `{heads_key}` = {heads}"));
        }
        (hidden / heads).max(1)
    }
}
