//! Keys of a `config.json`, looked up one by one; what is wrong with any of them is kept until the end.

use serde_json::{Map, Value};

use super::{Activation, Architecture};

/// Larger than any model has; what is beyond is a damaged file, and would overflow a product of three sizes.
const MAX_SIZE: u64 = 1 << 20;

/// The keys, and the problems that were found.
pub(super) struct Fields<'a> {
    raw: &'a Map<String, Value>,
    problems: Vec<String>,
}

impl<'a> Fields<'a> {
    pub(super) fn new(raw: &'a Map<String, Value>) -> Fields<'a> {
        Fields { raw, problems: Vec::new() }
    }

    /// The architecture, unless there were problems.
    pub(super) fn finish(self, architecture: Architecture) -> Result<Architecture, Vec<String>> {
        if self.problems.is_empty() { Ok(architecture) } else { Err(self.problems) }
    }

    /// What was found so far, for whoever looked into a part of a file.
    pub(super) fn problems(self) -> Vec<String> {
        self.problems
    }

    pub(super) fn problem(&mut self, problem: String) {
        self.problems.push(problem);
    }

    /// What stands there; null is nothing.
    pub(super) fn get(&self, key: &str) -> Option<&'a Value> {
        self.raw.get(key).filter(|value| !value.is_null())
    }

    /// The first of these keys that is there; families were renamed.
    pub(super) fn either(&self, keys: [&'static str; 2]) -> &'static str {
        if self.get(keys[0]).is_none() && self.get(keys[1]).is_some() { keys[1] } else { keys[0] }
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
        if self.raw.contains_key(key) { self.optional_size(key) } else { Some(default) }
    }

    /// A number above zero; absent it is the default, and null means that there is none.
    pub(super) fn positive_unless_null(&mut self, key: &str, default: f64) -> Option<f64> {
        if self.raw.contains_key(key) { self.positive(key) } else { Some(default) }
    }

    /// Which of the layers look through a window: as `layer_types` lists them, or by the family's pattern.
    pub(super) fn sliding_layers(&mut self, layers: usize, pattern: impl Fn(usize) -> bool) -> Vec<bool> {
        let by_pattern: Vec<bool> = (0..layers).map(pattern).collect();
        let Some(given) = self.get("layer_types") else { return by_pattern };
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

    /// A token id.
    pub(super) fn token(&mut self, key: &str) -> Option<u32> {
        let given = self.get(key)?;
        // Some files hold −1 for "none".
        given.as_u64().and_then(|id| u32::try_from(id).ok())
    }

    /// A key that must not be there, since nobody here knows what to do with it.
    pub(super) fn refuse(&mut self, key: &str, why: &str) {
        if let Some(given) = self.get(key) {
            let given: String = given.to_string().chars().take(80).collect();
            self.problem(format!("`{key}` = {given} is not supported: {why}"));
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
