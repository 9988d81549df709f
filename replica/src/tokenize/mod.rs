//! Texts to token ids, on threads of their own, and back.
//!
//! 1. [`text`] — one text or pair, as one model wants it: prompt, truncation, special tokens, types.
//!    [`templated`] — a pair that a chat template makes one text of. [`word_pieces`] — a shorter way to the same tokens, for plain texts.
//! 2. [`jobs`] — those of one request.
//! 3. [`pool`] — many requests, on worker threads, so that nobody's sockets wait for them.

mod jobs;
mod pool;
mod settings;
mod templated;
#[cfg(test)]
mod tests;
mod text;
mod word_pieces;

use replica_core::input::InvalidInput;

pub use pool::{MAX_JOBS, TokenizerPool};
pub use text::{LoadError, Reading, Text, TextTokenizer};

/// The tokens of one input.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tokenized {
    /// Their ids, special tokens included.
    pub ids: Box<[u32]>,
    /// Their types, which say to which text of a pair each belongs; absent if all are 0.
    pub types: Option<Box<[u32]>>,
}

/// Why texts did not become tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TokenizeError {
    /// An input cannot be read by the model; the first one of those, by index.
    Unreadable {
        /// Its place among the inputs.
        index: usize,
        /// Why.
        why: InvalidInput,
    },
    /// The model's chat template does not take an input; the first one of those, by index.
    Template {
        /// Its place among the inputs.
        index: usize,
        /// Why.
        why: String,
    },
    /// [`MAX_JOBS`] are waiting.
    Full,
    /// The pool was stopped.
    Stopped,
    /// The tokenizer failed; the text is for the log.
    Broken(String),
}
