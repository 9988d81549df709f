//! What is too many, too long and too big for one replica.
//!
//! A limit that nobody can name is met for the first time in production. So each stands here with its default and the
//! reason for it, `replica.toml` may move it, `/info` shows it, and the refusal that it causes states it. How many
//! tokens *one input* may have is not here: that is a property of the model.

use crate::refusal::Refusal;

/// OpenAI's own limit, so that a client that cuts its lists for OpenAI is never refused here.
pub const MAX_INPUTS: usize = 2048;

/// Documents of one rerank: ten times what Cohere recommends, and its own limit. What they cost is bounded by
/// [`MAX_REQUEST_TOKENS`]; this bounds what is counted before a token is.
pub const MAX_DOCUMENTS: usize = 10_000;

/// Texts and pairs of one classification: as many as embeddings.
pub const MAX_PAIRS: usize = MAX_INPUTS;

/// Sentences that one similarity request compares with its source: as many as embeddings.
pub const MAX_SENTENCES: usize = MAX_INPUTS;

/// Tokens of one request: as many as may wait for the engine, so that one request is never longer than the longest
/// queue. OpenAI's own limit, 300 000, is below it.
pub const MAX_REQUEST_TOKENS: u64 = MAX_QUEUE_TOKENS;

/// The largest request that [`MAX_INPUTS`] suggests: 2048 texts of 8 k tokens at two bytes each. A body that is
/// larger is a mistake or an attack.
pub const MAX_BODY_BYTES: usize = 32 << 20;

/// Bytes of all bodies that are being read or worked on. Eight of the largest fit; without it a thousand callers with
/// 32 MiB each would be 32 GiB.
pub const MAX_BUFFERED_BYTES: usize = 8 * MAX_BODY_BYTES;

/// Tokens waiting for the engine. A million is about two minutes of MiniLM on two cores (`servers.md` §1): whoever
/// would wait longer is better told so at once.
pub const MAX_QUEUE_TOKENS: u64 = 1 << 20;

/// Tokens of one engine call: the longest time for which a lone short request waits behind a backfill, so as few as
/// cost nothing. MiniLM in f32 on two cores of a Cascade Lake Xeon (November 2026) comes to 3.7, 4.1, 4.2, 4.2 and 4.1
/// thousand tokens/s with batches of 128, 256, 512, 1024 and 2048, which take 34 ms to 495 ms; the machine was shared,
/// so only the shape of that curve counts.
pub const BATCH_TOKENS: u64 = 512;

/// How long a body may take to arrive.
pub const BODY_TIMEOUT_MS: u64 = 30_000;

/// The limits that a replica runs with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Inputs of one request.
    pub max_inputs: usize,
    /// Documents of one rerank.
    pub max_documents: usize,
    /// Texts and pairs of one classification.
    pub max_pairs: usize,
    /// Sentences of one similarity request.
    pub max_sentences: usize,
    /// Tokens of one request, all inputs together.
    pub max_request_tokens: u64,
    /// Bytes of one body.
    pub max_body_bytes: usize,
    /// Bytes of all bodies at once.
    pub max_buffered_bytes: usize,
    /// Tokens that wait for the engine.
    pub max_queue_tokens: u64,
    /// Milliseconds that a body may take to arrive.
    pub body_timeout_ms: u64,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            max_inputs: MAX_INPUTS,
            max_documents: MAX_DOCUMENTS,
            max_pairs: MAX_PAIRS,
            max_sentences: MAX_SENTENCES,
            max_request_tokens: MAX_REQUEST_TOKENS,
            max_body_bytes: MAX_BODY_BYTES,
            max_buffered_bytes: MAX_BUFFERED_BYTES,
            max_queue_tokens: MAX_QUEUE_TOKENS,
            body_timeout_ms: BODY_TIMEOUT_MS,
        }
    }
}

/// How many elements a list may have, and the key of `replica.toml` that says so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AtMost {
    /// The limit.
    pub count: usize,
    /// Its name.
    pub key: &'static str,
}

impl Limits {
    /// Inputs of one request.
    pub fn inputs(&self) -> AtMost {
        AtMost { count: self.max_inputs, key: "max_inputs" }
    }

    /// Documents of one rerank.
    pub fn documents(&self) -> AtMost {
        AtMost { count: self.max_documents, key: "max_documents" }
    }

    /// Texts and pairs of one classification.
    pub fn pairs(&self) -> AtMost {
        AtMost { count: self.max_pairs, key: "max_pairs" }
    }

    /// Sentences of one similarity request.
    pub fn sentences(&self) -> AtMost {
        AtMost { count: self.max_sentences, key: "max_sentences" }
    }

    /// Refuses a request of more tokens than one may have.
    pub fn check_request_tokens(&self, tokens: u64) -> Result<(), Refusal> {
        if tokens > self.max_request_tokens {
            return Err(Refusal::too_many_tokens(self.max_request_tokens, tokens));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::error::ErrorCode;

    #[test]
    fn the_limit_of_tokens_of_a_request_holds_at_it_and_one_past_it() {
        let limits = Limits { max_request_tokens: 7, ..Limits::default() };
        assert_eq!(limits.check_request_tokens(7), Ok(()));
        let refusal = limits.check_request_tokens(8).expect_err("one past it");
        assert_eq!(refusal.code, ErrorCode::TooManyTokens);
        for part in ["has 8 tokens", "carry 7", "max_request_tokens"] {
            assert!(refusal.message.contains(part), "{}", refusal.message);
        }
    }
}
