//! Validation of a chunked HTTP/1.1 request body before any parser acts on it (RFC 9112, 7.1).
//!
//! Some parsers accept any octet in a chunk extension, even a line feed, and others end the line there. The two see
//! different bodies, and different requests after them (request smuggling by `TERM.EXT`). So lines have to end in CRLF
//! here and must not contain control characters, and trailers must not be about framing, routing or authentication.
//! [`ChunkScanner`] inspects the bytes as they come, in reads of any size, and changes nothing.

/// Maximum digits of a chunk's size: more do not fit into 64 bits.
const SIZE_DIGITS_MAX: u32 = 16;
/// Bytes of a trailer's name that are stored; no forbidden one is longer.
const NAME_BYTES: usize = 32;
/// Fields that are forbidden in trailers (RFC 9110, 6.5.1): a reader that merges them into the head would read another
/// request.
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

/// Reason why a chunked body is rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkProblem(pub &'static str);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// The size of a chunk, with the digits so far.
    Size {
        size: u64,
        digits: u32,
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

/// Scanner of a chunked body, fed with its bytes in pieces of any size.
#[derive(Clone, Debug)]
pub struct ChunkScanner {
    state: State,
    /// Name of the current trailer, in lower case.
    name: [u8; NAME_BYTES],
}

impl Default for ChunkScanner {
    fn default() -> ChunkScanner {
        ChunkScanner { state: State::Size { size: 0, digits: 0 }, name: [0; NAME_BYTES] }
    }
}

impl ChunkScanner {
    /// Inspects the next bytes of the connection; bytes after the end of the body are ignored.
    ///
    /// # Errors
    ///
    /// As soon as two readers could interpret the body differently.
    pub fn advance(&mut self, mut bytes: &[u8]) -> Result<(), ChunkProblem> {
        while let [byte, rest @ ..] = bytes {
            match self.state {
                State::Done => return Ok(()),
                State::Data(left) => {
                    let in_this_read = usize::try_from(left).unwrap_or(usize::MAX).min(bytes.len());
                    bytes = &bytes[in_this_read..];
                    let left = left - in_this_read as u64;
                    self.state = if left == 0 { State::DataEnd } else { State::Data(left) };
                    continue;
                }
                state => self.state = self.next(state, *byte)?,
            }
            bytes = rest;
        }
        Ok(())
    }

    fn next(&mut self, state: State, byte: u8) -> Result<State, ChunkProblem> {
        Ok(match (state, byte) {
            (State::Size { size, digits }, byte) if byte.is_ascii_hexdigit() => {
                if digits == SIZE_DIGITS_MAX {
                    return Err(ChunkProblem("the size of a chunk has more than 16 digits"));
                }
                let digit = char::from(byte).to_digit(16).unwrap_or(0);
                State::Size { size: size << 4 | u64::from(digit), digits: digits + 1 }
            }
            (State::Size { digits: 0, .. }, _) => return Err(ChunkProblem("a chunk has no size")),
            (State::Size { size, .. }, b';' | b' ' | b'\t') => State::Extensions { size },
            (State::Size { size, .. } | State::Extensions { size }, b'\r') => State::LineFeed { size },
            (State::Size { .. }, _) => return Err(ChunkProblem("the size of a chunk is not a number")),
            (State::Extensions { .. }, b'\n') => {
                return Err(ChunkProblem("the extension of a chunk has a LF without CR"));
            }
            (State::Extensions { .. }, byte) if is_control(byte) => {
                return Err(ChunkProblem("the extension of a chunk has a control character"));
            }
            (State::Extensions { size }, _) => State::Extensions { size },
            (State::LineFeed { size: 0 }, b'\n') => State::TrailerName { length: 0 },
            (State::LineFeed { size }, b'\n') => State::Data(size),
            (State::DataEnd, b'\r') => State::DataLineFeed,
            (State::DataLineFeed, b'\n') => State::Size { size: 0, digits: 0 },
            (State::DataEnd | State::DataLineFeed, _) => {
                return Err(ChunkProblem("the data of a chunk does not end in CRLF"));
            }
            (State::TrailerName { length: 0 }, b'\r') => State::LastLineFeed,
            (State::TrailerName { length }, b':') => {
                let name = &self.name[..length.min(NAME_BYTES)];
                if length == 0 || (length <= NAME_BYTES && FORBIDDEN_TRAILERS.contains(&name)) {
                    return Err(ChunkProblem("a trailer has a name that is not allowed in trailers"));
                }
                State::TrailerValue
            }
            (State::TrailerName { length }, byte) if crate::head::is_token(byte) => {
                if let Some(slot) = self.name.get_mut(length) {
                    *slot = byte.to_ascii_lowercase();
                }
                State::TrailerName { length: length + 1 }
            }
            (State::TrailerName { .. }, _) => return Err(ChunkProblem("a trailer is not a field")),
            (State::TrailerValue, b'\r') => State::TrailerLineFeed,
            (State::TrailerValue, byte) if is_control(byte) => {
                return Err(ChunkProblem("a trailer has a control character"));
            }
            (State::TrailerValue, _) => State::TrailerValue,
            (State::TrailerLineFeed, b'\n') => State::TrailerName { length: 0 },
            (State::LastLineFeed, b'\n') => State::Done,
            (State::LineFeed { .. } | State::TrailerLineFeed | State::LastLineFeed, _) => {
                return Err(ChunkProblem("a CR is not followed by LF"));
            }
            (State::Data(_) | State::Done, _) => state,
        })
    }
}

fn is_control(byte: u8) -> bool {
    (byte < b' ' && byte != b'\t') || byte == 0x7f
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Checks a body at once, and byte for byte.
    #[track_caller]
    fn check(body: &str, expected: Option<&str>) {
        let whole = ChunkScanner::default().advance(body.as_bytes());
        let mut scan = ChunkScanner::default();
        let in_bytes = body.as_bytes().iter().try_for_each(|byte| scan.advance(&[*byte]));
        assert_eq!(whole, in_bytes, "{body:?}");
        match expected {
            None => assert_eq!((whole, scan.state), (Ok(()), State::Done), "{body:?}"),
            Some(word) => {
                let ChunkProblem(problem) = whole.expect_err(body);
                assert!(problem.contains(word), "{body:?}: {problem}");
            }
        }
    }

    #[test]
    fn chunks_are_scanned_to_their_end_and_later_bytes_are_ignored() {
        check("0\r\n\r\n", None);
        check("5\r\nabcde\r\n1e;a=b\r\n\r\n\0\nxxxxxxxxxxxxxxxxxxxxxxxxxx\r\n0\r\n\r\n", None);
        check("5;a=\"b c\";d \r\nabcde\r\n000\r\nx-trailer: y\r\nx-more:\r\n\r\n", None);
        check("5 \r\nabcde\r\n0\r\n\r\n\nGET \0", None);
        check(&format!("0\r\n{}: x\r\n\r\n", "y".repeat(100)), None);
    }

    #[test]
    fn an_ambiguous_body_is_rejected() {
        let rejected = |body: &str, word: &str| check(body, Some(word));
        rejected("5;x\nabcde\r\n0\r\n\r\n", "LF without CR");
        rejected("5;\nabcde\r\n0\r\n\r\n", "LF without CR");
        rejected("5 \nabcde\r\n0\r\n\r\n", "LF without CR");
        rejected("5;\"a\nb\"\r\nabcde\r\n0\r\n\r\n", "LF without CR");
        rejected("5;a\0\r\nabcde\r\n0\r\n\r\n", "control");
        rejected("5;a\rb\r\n", "not followed by LF");
        rejected("5\nabcde\r\n", "not a number");
        rejected("\r\n", "no size");
        rejected("-5\r\n", "no size");
        rejected("0x5\r\n", "not a number");
        rejected("11111111111111111\r\n", "16 digits");
        rejected("5\r\nabcdef\r\n", "does not end");
        rejected("5\r\nabcde\n0", "does not end");
        rejected("5\r\nabcde\r0", "does not end");
        rejected("0\r\nx: y\n\r\n", "control");
        rejected("0\r\nx: y\rz", "not followed by LF");
        rejected("0\r\n\r\r", "not followed by LF");
        rejected("0\r\nx y: z\r\n", "not a field");
        rejected("0\r\n: z\r\n", "not allowed in trailers");
        rejected("0\r\n x: z\r\n", "not a field");
        rejected("0\r\nnothing\r\n", "not a field");
        for name in ["Content-Length", "TRANSFER-ENCODING", "host", "authorization", "te"] {
            rejected(&format!("0\r\n{name}: x\r\n\r\n"), "not allowed in trailers");
        }
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic_and_splitting_makes_no_difference(
            bytes in prop::collection::vec(prop_oneof![Just(b'\r'), Just(b'\n'), Just(b'0'), Just(b'3'), Just(b';'), any::<u8>()], 0..80),
            cut in 0_usize..80,
        ) {
            let cut = cut.min(bytes.len());
            let whole = ChunkScanner::default().advance(&bytes);
            let mut scan = ChunkScanner::default();
            let pieces = scan.advance(&bytes[..cut]).and_then(|()| scan.advance(&bytes[cut..]));
            prop_assert_eq!(whole, pieces);
        }
    }
}
