//! What is too many, too long and too big for one replica.
//!
//! A limit that nobody can name is met for the first time in production. So each stands here with its default and the
//! reason for it, `replica.toml` may move it, `/info` shows it, and the refusal that it causes states it. How many
//! tokens *one input* may have is not here: that is a property of the model.

/// OpenAI's own limit, so that a client that cuts its lists for OpenAI is never refused here.
pub const MAX_INPUTS: usize = 2048;

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
    /// Bytes of one body.
    pub max_body_bytes: usize,
    /// Bytes of all bodies at once.
    pub max_buffered_bytes: usize,
    /// Tokens that wait for the engine.
    pub max_queue_tokens: u64,
    /// Tokens of one engine call.
    pub batch_tokens: u64,
    /// Milliseconds that a body may take to arrive.
    pub body_timeout_ms: u64,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            max_inputs: MAX_INPUTS,
            max_body_bytes: MAX_BODY_BYTES,
            max_buffered_bytes: MAX_BUFFERED_BYTES,
            max_queue_tokens: MAX_QUEUE_TOKENS,
            batch_tokens: BATCH_TOKENS,
            body_timeout_ms: BODY_TIMEOUT_MS,
        }
    }
}
