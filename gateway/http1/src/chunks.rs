//! Chunked transfer coding of a request or a response (RFC 9112, 7.1).
//!
//! Some parsers accept any octet in a chunk extension, even a line feed, and others end the line there. The two see different
//! bodies, and different messages after them (smuggling by `TERM.EXT`). So lines have to end in CRLF here and must not contain
//! control characters, and trailers must not be about framing, routing or authentication.

use crate::{CHUNK_LINE_BYTES_MAX, CHUNK_SIZE_DIGITS_MAX, FramingError, TRAILER_BYTES_MAX};

/// Bytes of a trailer's name that are stored; no forbidden one is longer.
const NAME_BYTES: usize = 32;
/// Fields that are forbidden in trailers (RFC 9110, 6.5.1): a reader that merges them into the head would read another
/// message. The names of our own headers are those of `replica_api::headers`, which this crate does not import.
const FORBIDDEN_TRAILERS: [&[u8]; 13] = [
    b"authorization",
    b"api-key",
    b"x-api-key",
    b"connection",
    b"content-encoding",
    b"content-length",
    b"content-range",
    b"content-type",
    b"expect",
    b"host",
    b"te",
    b"trailer",
    b"transfer-encoding",
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// The size of a chunk, with the digits so far.
    Size {
        size: u64,
        digits: usize,
    },
    /// After the size: whitespace and extensions.
    Extensions {
        size: u64,
    },
    /// Before the LF of the size line.
    LineFeed {
        size: u64,
    },
    /// Remaining bytes of data.
    Data(u64),
    DataEnd,
    DataLineFeed,
    /// The name of a trailer, or the end.
    TrailerName {
        length: usize,
    },
    TrailerValue,
    TrailerLineFeed,
    LastLineFeed,
    Done,
}

/// Next part of the received bytes. Both numbers are 0 if more bytes are needed first, or the body has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BodyPart {
    /// Bytes of framing.
    pub skipped: usize,
    /// Bytes of the body after them.
    pub data: usize,
}

/// Consumes up to `left` bytes and returns their number.
pub(crate) fn take(left: &mut u64, bytes: &[u8]) -> usize {
    let taken = usize::try_from(*left).unwrap_or(usize::MAX).min(bytes.len());
    *left -= taken as u64;
    taken
}

/// Decoder of a chunked body, fed with its bytes in pieces of any size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkDecoder {
    state: State,
    /// Bytes of the current size line, or of all trailers, so far.
    line_bytes: usize,
    /// Name of the current trailer, in lower case.
    name: [u8; NAME_BYTES],
}

impl Default for ChunkDecoder {
    fn default() -> ChunkDecoder {
        ChunkDecoder { state: State::Size { size: 0, digits: 0 }, line_bytes: 0, name: [0; NAME_BYTES] }
    }
}

impl ChunkDecoder {
    /// Consumes the framing at the front of `bytes`, and the data after it; never past the end of the body.
    ///
    /// # Errors
    ///
    /// As soon as two readers could interpret the body differently.
    pub fn next(&mut self, bytes: &[u8]) -> Result<BodyPart, FramingError> {
        let mut skipped = 0;
        while let Some(byte) = bytes.get(skipped) {
            match &mut self.state {
                State::Done => break,
                State::Data(left) => {
                    let data = take(left, &bytes[skipped..]);
                    if *left == 0 {
                        self.state = State::DataEnd;
                    }
                    return Ok(BodyPart { skipped, data });
                }
                state => {
                    let state = *state;
                    self.state = self.after(state, *byte)?;
                    skipped += 1;
                }
            }
        }
        Ok(BodyPart { skipped, data: 0 })
    }

    /// Inspects the next bytes of the connection without use for the data; bytes after the end of the body are ignored.
    ///
    /// # Errors
    ///
    /// As [`ChunkDecoder::next`].
    pub fn scan(&mut self, mut bytes: &[u8]) -> Result<(), FramingError> {
        while !bytes.is_empty() && !self.is_done() {
            let BodyPart { skipped, data } = self.next(bytes)?;
            bytes = &bytes[skipped + data..];
        }
        Ok(())
    }

    /// Returns whether the body has ended.
    pub fn is_done(&self) -> bool {
        self.state == State::Done
    }

    /// Returns the number of bytes that are left of the current chunk.
    pub(crate) fn remaining(&self) -> u64 {
        if let State::Data(left) = self.state { left } else { 0 }
    }

    fn after(&mut self, state: State, byte: u8) -> Result<State, FramingError> {
        match state {
            State::Size { digits: 0, .. } => self.line_bytes = 1,
            State::Size { .. } | State::Extensions { .. } if byte != b'\r' => {
                self.line_bytes += 1;
                if self.line_bytes > CHUNK_LINE_BYTES_MAX {
                    return Err(FramingError("the size line of a chunk is too long"));
                }
            }
            State::LineFeed { size: 0 } => self.line_bytes = 0,
            State::TrailerName { .. } | State::TrailerValue if byte != b'\r' => {
                self.line_bytes += 1;
                if self.line_bytes > TRAILER_BYTES_MAX {
                    return Err(FramingError("the trailers are too long"));
                }
            }
            _ => {}
        }
        Ok(match (state, byte) {
            (State::Size { size, digits }, byte) if byte.is_ascii_hexdigit() => {
                if digits == CHUNK_SIZE_DIGITS_MAX {
                    return Err(FramingError("the size of a chunk has more than 16 digits"));
                }
                let digit = char::from(byte).to_digit(16).unwrap_or(0);
                State::Size { size: size << 4 | u64::from(digit), digits: digits + 1 }
            }
            (State::Size { digits: 0, .. }, _) => return Err(FramingError("a chunk has no size")),
            (State::Size { size, .. }, b';' | b' ' | b'\t') => State::Extensions { size },
            (State::Size { size, .. } | State::Extensions { size }, b'\r') => State::LineFeed { size },
            (State::Size { .. }, _) => return Err(FramingError("the size of a chunk is not a number")),
            (State::Extensions { .. }, b'\n') => {
                return Err(FramingError("the extension of a chunk has a LF without CR"));
            }
            (State::Extensions { .. }, byte) if is_control(byte) => {
                return Err(FramingError("the extension of a chunk has a control character"));
            }
            (State::Extensions { size }, _) => State::Extensions { size },
            (State::LineFeed { size: 0 }, b'\n') => State::TrailerName { length: 0 },
            (State::LineFeed { size }, b'\n') => State::Data(size),
            (State::DataEnd, b'\r') => State::DataLineFeed,
            (State::DataLineFeed, b'\n') => State::Size { size: 0, digits: 0 },
            (State::DataEnd | State::DataLineFeed, _) => {
                return Err(FramingError("the data of a chunk does not end in CRLF"));
            }
            (State::TrailerName { length: 0 }, b'\r') => State::LastLineFeed,
            (State::TrailerName { length }, b':') => {
                let name = &self.name[..length.min(NAME_BYTES)];
                if length == 0 || (length <= NAME_BYTES && FORBIDDEN_TRAILERS.contains(&name)) {
                    return Err(FramingError("a trailer has a name that is not allowed in trailers"));
                }
                State::TrailerValue
            }
            (State::TrailerName { length }, byte) if is_token(byte) => {
                if let Some(slot) = self.name.get_mut(length) {
                    *slot = byte.to_ascii_lowercase();
                }
                State::TrailerName { length: length + 1 }
            }
            (State::TrailerName { .. }, _) => return Err(FramingError("a trailer is not a field")),
            (State::TrailerValue, b'\r') => State::TrailerLineFeed,
            (State::TrailerValue, byte) if is_control(byte) => {
                return Err(FramingError("a trailer has a control character"));
            }
            (State::TrailerValue, _) => State::TrailerValue,
            (State::TrailerLineFeed, b'\n') => State::TrailerName { length: 0 },
            (State::LastLineFeed, b'\n') => State::Done,
            (State::LineFeed { .. } | State::TrailerLineFeed | State::LastLineFeed, _) => {
                return Err(FramingError("a CR is not followed by LF"));
            }
            (State::Data(_) | State::Done, _) => state,
        })
    }
}

fn is_control(byte: u8) -> bool {
    (byte < b' ' && byte != b'\t') || byte == 0x7f
}

/// Returns whether this character may be part of a field name (RFC 9110, 5.6.2).
fn is_token(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte)
}
