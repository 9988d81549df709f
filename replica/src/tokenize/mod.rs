//! Conversion between texts and token ids, on dedicated threads.
//!
//! 1. [`text`]: one text or pair for one model: prompt, truncation, special tokens, types. [`templated`]: a pair
//!    formatted by a chat template. [`word_pieces`]: a fast path for plain ASCII texts.
//! 2. [`jobs`]: the texts of one request.
//! 3. [`pool`]: worker threads for many requests, so that no connection waits for tokenization.

mod jobs;
mod pool;
mod settings;
mod templated;
#[cfg(test)]
mod tests;
mod text;
mod vocabulary;
mod word_pieces;

use replica_api::input::InvalidInput;

pub use pool::{MAX_JOBS, TokenizerPool};
pub use text::{EncodeOptions, TextInput, TextTokenizer, TokenizerLoadError};

/// Tokens of one input.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tokenized {
    /// Token ids, special tokens included.
    pub ids: Box<[u32]>,
    /// Token types, which state to which text of a pair each token belongs; absent if all are 0.
    pub types: Option<Box<[u32]>>,
}

/// Reason why texts could not be tokenized.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TokenizeError {
    /// The model cannot read an input; the first such input is reported.
    Unreadable {
        /// Index of the input.
        index: usize,
        /// Reason.
        reason: InvalidInput,
    },
    /// The model's chat template rejects an input; the first such input is reported.
    Template {
        /// Index of the input.
        index: usize,
        /// Message of the template.
        reason: String,
    },
    /// [`MAX_JOBS`] jobs are waiting.
    Full,
    /// The pool was stopped.
    Stopped,
    /// The tokenizer failed; the message is for the log.
    Broken(String),
}
