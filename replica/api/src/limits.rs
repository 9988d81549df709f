//! Maximum counts, lengths and sizes of one replica.
//!
//! Each limit has a default and its reason here, a key in `replica.toml`, an entry in `/info`, and an error message
//! that states it. The maximum number of tokens of *one input* is a property of the model and is not defined here.

use std::ops::RangeInclusive;

use configuration::section;
use serde::{Deserialize, Serialize};

use crate::refusal::{ListLimit, Refusal};

/// OpenAI's own limit, so that a client that splits its lists for OpenAI is never rejected here.
pub const MAX_INPUTS: usize = 2048;

/// Documents of one rerank request: ten times Cohere's recommendation, and Cohere's own limit. Their cost is bounded by
/// [`MAX_REQUEST_TOKENS`]; this limit is checked before tokens are counted.
pub const MAX_DOCUMENTS: usize = 10_000;

/// Texts and pairs of one classification request: the same as for embeddings.
pub const MAX_PAIRS: usize = MAX_INPUTS;

/// Sentences that one similarity request compares with its source: the same as for embeddings.
pub const MAX_SENTENCES: usize = MAX_INPUTS;

/// Tokens of one request: the capacity of the queue, so that one request is never longer than the longest queue.
/// OpenAI's own limit, 300 000, is below it.
pub const MAX_REQUEST_TOKENS: u64 = MAX_QUEUE_TOKENS;

/// The largest request that [`MAX_INPUTS`] suggests: 2048 texts of 8 k tokens at two bytes each. A larger body is a
/// mistake or an attack. Other gateways fail between 32 KiB and 2 MiB.
pub const MAX_BODY_BYTES: usize = 32 << 20;

/// Bytes of all bodies in memory. Eight of the largest fit; without this limit a thousand callers with 32 MiB each
/// would use 32 GiB.
pub const MAX_BUFFERED_BYTES: usize = 8 * MAX_BODY_BYTES;

/// Tokens queued for the engine. A million is about two minutes of MiniLM on two cores (`servers.md` §1); a caller that
/// would wait longer is better rejected at once.
pub const MAX_QUEUE_TOKENS: u64 = 1 << 20;

/// Tokens of one engine call. This is the longest time for which a lone short request waits behind a backfill, so it is
/// the smallest value that costs no throughput. MiniLM in f32 on two cores of a Cascade Lake Xeon (November 2026)
/// computes 3.7, 4.1, 4.2, 4.2 and 4.1 thousand tokens/s with batches of 128, 256, 512, 1024 and 2048, which take 34 ms
/// to 495 ms; the machine was shared, so only the shape of that curve counts.
pub const BATCH_TOKENS: u64 = 512;

/// Milliseconds within which a body must arrive.
pub const BODY_TIMEOUT_MS: u64 = 30_000;

/// Range of a limit. All limits fit into 32 bits, so that a sum of two does not overflow.
const COUNT: RangeInclusive<usize> = 1..=u32::MAX as usize;
const TOKENS: RangeInclusive<u64> = 1..=u32::MAX as u64;

section! {
    /// Limits of requests.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
    pub struct Limits {
        /// Inputs of one request.
        pub max_inputs: usize = MAX_INPUTS, in COUNT;
        /// Documents of one rerank request.
        pub max_documents: usize = MAX_DOCUMENTS, in COUNT;
        /// Texts and pairs of one classification request.
        pub max_pairs: usize = MAX_PAIRS, in COUNT;
        /// Sentences of one similarity request.
        pub max_sentences: usize = MAX_SENTENCES, in COUNT;
        /// Tokens of one request, all inputs together.
        pub max_request_tokens: u64 = MAX_REQUEST_TOKENS, in TOKENS;
        /// Bytes of one body.
        pub max_body_bytes: usize = MAX_BODY_BYTES, in COUNT;
        /// Bytes of all bodies at once.
        pub max_buffered_bytes: usize = MAX_BUFFERED_BYTES, in COUNT;
        /// Tokens that are queued for the engine.
        pub max_queue_tokens: u64 = MAX_QUEUE_TOKENS, in TOKENS;
        /// Milliseconds within which a body must arrive.
        pub body_timeout_ms: u64 = BODY_TIMEOUT_MS, in TOKENS;
    }
}

impl Default for Limits {
    fn default() -> Limits {
        configuration::of_defaults().expect("every limit has a default")
    }
}

impl Limits {
    /// Returns the limit of the inputs of one request.
    pub fn inputs(&self) -> ListLimit {
        ListLimit { count: self.max_inputs, key: "max_inputs" }
    }

    /// Returns the limit of the documents of one rerank request.
    pub fn documents(&self) -> ListLimit {
        ListLimit { count: self.max_documents, key: "max_documents" }
    }

    /// Returns the limit of the texts and pairs of one classification request.
    pub fn pairs(&self) -> ListLimit {
        ListLimit { count: self.max_pairs, key: "max_pairs" }
    }

    /// Returns the limit of the sentences of one similarity request.
    pub fn sentences(&self) -> ListLimit {
        ListLimit { count: self.max_sentences, key: "max_sentences" }
    }

    /// Rejects a request that exceeds the token limit.
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
    use crate::error::ErrorCode;

    #[test]
    fn the_token_limit_of_a_request_holds_at_the_limit_and_one_past_it() {
        let limits = Limits { max_request_tokens: 7, ..Limits::default() };
        assert_eq!(limits.check_request_tokens(7), Ok(()));
        let refusal = limits.check_request_tokens(8).expect_err("one past it");
        assert_eq!(refusal.code, ErrorCode::TooManyTokens);
        for part in ["has 8 tokens", "limit is 7", "max_request_tokens"] {
            assert!(refusal.message.contains(part), "{}", refusal.message);
        }
    }
}
