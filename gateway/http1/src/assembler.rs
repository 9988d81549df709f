//! Assembly of a complete response in one buffer.

use crate::{BodyFraming, BodyPart, FramingError, HEAD_BYTES_MAX, ResponseHead, head};
use std::ops::Range;

/// Reason why a response is not assembled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ResponseError {
    /// The response is malformed.
    #[error("{0}")]
    Malformed(#[from] FramingError),
    /// The response of an upstream is longer than the limit of its caller.
    #[error("its body is too long")]
    TooLarge,
}

/// Assembles one response in a buffer to which the caller appends the bytes that it reads. Chunks are joined in place, so that
/// a body is contiguous and is moved at most once.
#[derive(Debug)]
pub struct ResponseAssembler<H> {
    body_bytes_max: usize,
    is_head: bool,
    head: Option<AssembledHead<H>>,
}

#[derive(Debug)]
struct AssembledHead<H> {
    head: H,
    framing: BodyFraming,
    keep_alive: bool,
    /// Start of the body.
    begin: usize,
    /// End of the joined body.
    end: usize,
    /// Start of the unparsed bytes.
    at: usize,
}

impl<H> ResponseAssembler<H> {
    /// Creates the assembler of a response with a body of at most `body_bytes_max` bytes; see [`head`] about `is_head`.
    pub fn new(body_bytes_max: usize, is_head: bool) -> ResponseAssembler<H> {
        ResponseAssembler { body_bytes_max, is_head, head: None }
    }

    /// Returns whether the head has been parsed.
    pub fn has_head(&self) -> bool {
        self.head.is_some()
    }

    /// Returns the number of bytes of the body that are known to follow.
    pub fn remaining(&self) -> usize {
        let remaining = self.head.as_ref().map_or(0, |head| head.framing.remaining());
        usize::try_from(remaining).unwrap_or(usize::MAX).min(self.body_bytes_max)
    }

    /// Parses the bytes that were appended to `buffer`; returns whether the response is complete. `convert` is called once, with
    /// the head.
    ///
    /// # Errors
    ///
    /// If the response is malformed, or larger than the limit.
    pub fn advance(
        &mut self,
        buffer: &mut [u8],
        convert: impl FnOnce(&ResponseHead<'_, '_>) -> H,
    ) -> Result<bool, ResponseError> {
        if self.head.is_none() {
            self.head = head(buffer, self.is_head, |parsed| {
                let ResponseHead { length, framing, keep_alive, .. } = *parsed;
                let head = convert(parsed);
                AssembledHead { head, framing, keep_alive, begin: length, end: length, at: length }
            })?;
        }
        let Some(AssembledHead { framing, begin, end, at, .. }) = &mut self.head else { return Ok(false) };
        let max = self.body_bytes_max;
        loop {
            let BodyPart { skipped, data } = framing.next(&buffer[*at..])?;
            let from = *at + skipped;
            if from > *end {
                buffer.copy_within(from..from + data, *end);
            }
            *end += data;
            *at = from + data;
            // A chunked body has a second limit, because the framing of small chunks is longer than they are.
            let body = ((*end - *begin) as u64).saturating_add(framing.remaining());
            if body > max as u64 || *at - *begin > max.saturating_add(HEAD_BYTES_MAX) {
                return Err(ResponseError::TooLarge);
            }
            if skipped + data == 0 || framing.is_done() {
                return Ok(framing.is_done());
            }
        }
    }

    /// Returns whether the end of the connection completes the response.
    pub fn ends_with_connection(&self) -> bool {
        self.head.as_ref().is_some_and(|head| head.framing == BodyFraming::UntilClosed)
    }

    /// Takes the complete response out: its head, the range of its body in the buffer, and whether the connection can be
    /// reused, which it cannot if more than the response was `received`. The next response starts with an empty buffer.
    pub fn take(&mut self, received: usize) -> Option<(H, Range<usize>, bool)> {
        let AssembledHead { head, keep_alive, begin, end, at, framing } = self.head.take()?;
        Some((head, begin..end, keep_alive && framing.is_done() && at == received))
    }
}
