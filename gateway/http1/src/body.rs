//! Body of a response: which of the received bytes belong to it, and where it ends.

use crate::FramingError;
use crate::chunks::{BodyPart, ChunkDecoder, take};

/// Framing of a body, and the position in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BodyFraming {
    /// The number of remaining bytes.
    Length(u64),
    /// Chunked coding.
    Chunked(ChunkDecoder),
    /// All bytes until the connection closes.
    UntilClosed,
}

impl BodyFraming {
    /// Consumes the part at the front of `bytes`; never past the end of the body.
    ///
    /// # Errors
    ///
    /// If the chunks are malformed.
    pub fn next(&mut self, bytes: &[u8]) -> Result<BodyPart, FramingError> {
        match self {
            BodyFraming::Length(left) => Ok(BodyPart { skipped: 0, data: take(left, bytes) }),
            BodyFraming::Chunked(chunks) => chunks.next(bytes),
            BodyFraming::UntilClosed => Ok(BodyPart { skipped: 0, data: bytes.len() }),
        }
    }

    /// Returns whether the body has ended.
    pub fn is_done(&self) -> bool {
        match self {
            BodyFraming::Length(left) => *left == 0,
            BodyFraming::Chunked(chunks) => chunks.is_done(),
            BodyFraming::UntilClosed => false,
        }
    }

    /// Returns the number of bytes of the body that are known to follow.
    pub fn remaining(&self) -> u64 {
        match self {
            BodyFraming::Length(left) => *left,
            BodyFraming::Chunked(chunks) => chunks.remaining(),
            BodyFraming::UntilClosed => 0,
        }
    }
}
