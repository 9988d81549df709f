//! Keys of a JSON file, looked up one by one, so that none is ignored by accident.
//!
//! What a replica computes must be what the libraries compute that the checkpoint was made for, or the checkpoint is
//! refused. So every key of a file is one of three: looked up by a reader, listed as [`Inert`] with a reason, or refused by
//! its name ([`Fields::refuse_others`]). All problems of a file are reported together.

use std::cell::RefCell;
use std::collections::BTreeSet;

use serde_json::{Map, Value};

use super::Activation;

/// Larger than any model has; what is beyond is a damaged file, and would overflow a product of three sizes.
const MAX_SIZE: u64 = 1 << 20;
/// Characters of a value that are shown in a message.
const SHOWN: usize = 80;

/// The keys of a file, and the problems that were found.
pub(super) struct Fields<'a> {
    raw: &'a Map<String, Value>,
    /// Keys that were looked up, and whether null means "none" to the library.
    read: RefCell<BTreeSet<(String, bool)>>,
    problems: Vec<String>,
}

/// Keys without effect on what is served. The library still checks the kinds of their values.
pub(super) struct Inert(pub(super) Kind, pub(super) &'static [&'static str]);

/// Kind of the value of a key without effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Anything.
    Any,
    /// True or false.
    Flag,
    /// True, false or null.
    OptionalFlag,
    /// A number with a point.
    Float,
    /// A whole number, or null.
    OptionalWhole,
    /// A whole number.
    Whole,
    /// A number from 0 to 1: a probability.
    Share,
    /// The same, or null.
    OptionalShare,
    /// A string, or null.
    OptionalText,
    /// A token id, a list of them, or null.
    OptionalTokens,
    /// An object, or null.
    OptionalObject,
    /// The name of a format of floats, or null.
    OptionalDtype,
    /// One of these words.
    OneOf(&'static [&'static str]),
    /// A string.
    Text,
    /// A value that turns a feature off: null, false, 0, an empty list or object.
    Off,
}

impl Kind {
    fn takes(self, value: &Value) -> bool {
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

    fn says(self) -> &'static str {
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
            Kind::OneOf(_) => "a word that the library knows there",
            Kind::Text => "a string",
            Kind::Off => "absent",
        }
    }
}

/// A value for a message.
pub(super) fn shown(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(SHOWN) {
        None => text,
        Some((end, _)) => format!("{}…", &text[..end]),
    }
}

impl<'a> Fields<'a> {
    pub(super) fn new(raw: &'a Map<String, Value>) -> Fields<'a> {
        Fields { raw, read: RefCell::default(), problems: Vec::new() }
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

    /// Passes over keys without effect; one whose value the library does not take is a problem.
    pub(super) fn leave(&mut self, groups: &[Inert]) {
        for Inert(kind, keys) in groups {
            for key in *keys {
                let Some(value) = self.raw.get(*key) else { continue };
                self.read.borrow_mut().insert(((*key).to_owned(), true));
                if !kind.takes(value) {
                    self.problems.push(format!("`{key}` = {} is not {}", shown(value), kind.says()));
                }
            }
        }
    }

    /// Refuses every key that was not looked up, and nulls where the library wants a value.
    pub(super) fn refuse_others(&mut self) {
        let read = self.read.take();
        let of_key = |key: &str, null| read.contains(&(key.to_owned(), null));
        for (key, value) in self.raw {
            let (wanted, optional) = (of_key(key, false), of_key(key, true));
            if !wanted && !optional {
                self.problems.push(format!(
                    "`{key}` = {} is not understood, and it may change what the model computes; if the model's own code \
                     does not read it, remove it from the file",
                    shown(value)
                ));
            } else if value.is_null() && !optional {
                self.problems.push(format!("`{key}` is null; give it a value"));
            }
        }
        self.read = RefCell::new(read);
    }

    /// Returns the value of a key. Null is a problem, which [`Fields::refuse_others`] reports.
    pub(super) fn get(&self, key: &str) -> Option<&'a Value> {
        self.read.borrow_mut().insert((key.to_owned(), false));
        self.raw.get(key).filter(|value| !value.is_null())
    }

    /// Returns the value of a key; null is the same as absent.
    pub(super) fn optional(&self, key: &str) -> Option<&'a Value> {
        self.read.borrow_mut().insert((key.to_owned(), true));
        self.raw.get(key).filter(|value| !value.is_null())
    }

    /// Whether there is something, without looking it up.
    pub(super) fn has(&self, key: &str) -> bool {
        self.raw.get(key).is_some_and(|value| !value.is_null())
    }

    /// Whether null stands there.
    pub(super) fn is_null(&self, key: &str) -> bool {
        self.raw.get(key).is_some_and(Value::is_null)
    }

    /// The one of these keys that is there, by which a family's own code and another library call the same.
    pub(super) fn one_of(&mut self, keys: [&'static str; 2]) -> &'static str {
        if keys.iter().all(|key| self.has(key)) {
            self.problem(format!("`{}` and `{}` are both there; remove one", keys[0], keys[1]));
            for key in keys {
                self.optional(key);
            }
        }
        if !keys.iter().any(|key| self.has(key)) {
            self.problem(format!("there is neither `{}` nor `{}`", keys[0], keys[1]));
        }
        self.either(keys)
    }

    /// The first of these keys that is there; families were renamed.
    pub(super) fn either(&self, keys: [&'static str; 2]) -> &'static str {
        if !self.has(keys[0]) && self.has(keys[1]) { keys[1] } else { keys[0] }
    }

    /// A size that must be there.
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

    /// A size that may be there.
    pub(super) fn optional_size(&mut self, key: &str) -> Option<usize> {
        let given = self.get(key)?;
        match given.as_u64() {
            Some(size @ 1..=MAX_SIZE) => Some(size as usize),
            Some(_) | None => {
                self.problem(format!("`{key}` = {given} is not between 1 and {MAX_SIZE}"));
                None
            }
        }
    }

    /// A whole number, which may be 0 or less.
    pub(super) fn whole(&mut self, key: &str, default: usize) -> usize {
        let Some(given) = self.get(key) else { return default };
        if given.as_i64().is_none() {
            self.problem(format!("`{key}` = {} is not a whole number", shown(given)));
        }
        given.as_i64().map_or(default, |number| usize::try_from(number).unwrap_or(0))
    }

    /// A number.
    pub(super) fn number(&mut self, key: &str) -> Option<f64> {
        let given = self.get(key)?;
        if given.as_f64().is_none() {
            self.problem(format!("`{key}` = {given} is not a number"));
        }
        given.as_f64()
    }

    /// A number above zero.
    pub(super) fn positive(&mut self, key: &str) -> Option<f64> {
        let number = self.number(key)?;
        if number > 0.0 && number.is_finite() {
            return Some(number);
        }
        self.problem(format!("`{key}` = {number} is not above 0"));
        None
    }

    /// What is added to a variance.
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

    /// A number above zero that must be there.
    pub(super) fn wanted(&mut self, key: &str) -> f64 {
        if self.get(key).is_none() {
            self.problem(format!("`{key}` is missing"));
        }
        self.positive(key).unwrap_or(1.0)
    }

    /// A size; absent it is the default, and null means that there is none.
    pub(super) fn size_unless_null(&mut self, key: &str, default: usize) -> Option<usize> {
        self.optional(key);
        if self.raw.contains_key(key) { self.optional_size(key) } else { Some(default) }
    }

    /// A number above zero; absent it is the default, and null means that there is none.
    pub(super) fn positive_unless_null(&mut self, key: &str, default: f64) -> Option<f64> {
        self.optional(key);
        if self.raw.contains_key(key) { self.positive(key) } else { Some(default) }
    }

    /// Which of the layers look through a window: as `layer_types` lists them, or by the family's pattern.
    pub(super) fn sliding_layers(&mut self, layers: usize, pattern: impl Fn(usize) -> bool) -> Vec<bool> {
        let by_pattern: Vec<bool> = (0..layers).map(pattern).collect();
        let Some(given) = self.optional("layer_types") else { return by_pattern };
        let kinds = given.as_array().map_or(&[][..], Vec::as_slice);
        if kinds.len() != layers {
            self.problem(format!("`layer_types` lists {} layers and there are {layers}", kinds.len()));
            return by_pattern;
        }
        let mut sliding = Vec::new();
        for kind in kinds {
            match kind.as_str() {
                Some("full_attention") => sliding.push(false),
                Some("sliding_attention") => sliding.push(true),
                Some(_) | None => {
                    self.problem(format!(
                        "`layer_types` has {kind}; supported are full_attention and sliding_attention"
                    ));
                    return by_pattern;
                }
            }
        }
        sliding
    }

    /// A truth.
    pub(super) fn flag(&mut self, key: &str, default: bool) -> bool {
        let Some(given) = self.get(key) else { return default };
        if given.as_bool().is_none() {
            self.problem(format!("`{key}` = {given} is neither true nor false"));
        }
        given.as_bool().unwrap_or(default)
    }

    /// A word.
    pub(super) fn word(&mut self, key: &str) -> Option<&'a str> {
        let given = self.get(key)?;
        if given.as_str().is_none() {
            self.problem(format!("`{key}` = {given} is not a string"));
        }
        given.as_str()
    }

    /// A token id below `vocabulary`. Some files hold −1 for "none".
    pub(super) fn token(&mut self, key: &str, vocabulary: usize) -> Option<u32> {
        let given = self.optional(key)?;
        match given.as_i64() {
            Some(id) if id < 0 => None,
            Some(id) if usize::try_from(id).is_ok_and(|id| id < vocabulary) => u32::try_from(id).ok(),
            Some(_) | None => {
                self.problem(format!(
                    "`{key}` = {} is not a token of this model, whose `vocab_size` is {vocabulary}",
                    shown(given)
                ));
                None
            }
        }
    }

    /// A key that must not be there, since nobody here knows what to do with it.
    pub(super) fn refuse(&mut self, key: &str, why: &str) {
        if let Some(given) = self.optional(key) {
            self.problem(format!("`{key}` = {} is not supported: {why}", shown(given)));
        }
    }

    /// A truth that is understood with one value only.
    pub(super) fn must_be(&mut self, key: &str, wanted: bool, why: &str) {
        if self.flag(key, wanted) != wanted {
            self.problem(format!("`{key}` = {} is not supported: {why}", !wanted));
        }
    }

    /// The name of an activation.
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
                    "`{key}` = {given} is not supported; gelu, gelu_new, quick_gelu, relu, silu and tanh are"
                ));
                default
            }
        }
    }

    /// The width of a head: what the key says, or the heads' even share.
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
