//! The chunks of an HTTP/1.1 request body, looked at before any parser acts on them (RFC 9112, 7.1).
//!
//! Some parsers accept any octet in a chunk extension, a line feed too, and others end the line there. The two see different
//! bodies, and different requests behind them (request smuggling by `TERM.EXT`). So lines end in CRLF here
//! and hold no control characters, and trailers are fields that say nothing of framing, routing or authentication. [`Scan`]
//! looks at the bytes as they come, in pieces of any size, and changes nothing.

/// Digits of a chunk's size: more do not fit into 64 bits.
const SIZE_DIGITS_MAX: u32 = 16;
/// Bytes of a trailer's name that are looked at; no forbidden one is longer.
const NAME_BYTES: usize = 32;
/// Fields that no trailer may have (RFC 9110, 6.5.1): a reader that merges them into the head would read another request.
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

/// Why the chunks are refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkProblem(pub &'static str);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// The size of a chunk, of which so many digits have come.
    Size {
        size: u64,
        digits: u32,
    },
    /// Behind the size: white space and extensions.
    Extensions {
        size: u64,
    },
    /// The line is to end.
    LineFeed {
        size: u64,
    },
    /// So many bytes of data.
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
pub struct Scan {
    state: State,
    /// The name of the trailer at hand, in small letters.
    name: [u8; NAME_BYTES],
}

impl Default for Scan {
    fn default() -> Scan {
        Scan { state: State::Size { size: 0, digits: 0 }, name: [0; NAME_BYTES] }
    }
}

impl Scan {
    /// Looks at the next bytes of the connection; what stands behind the end of the body is not looked at.
    ///
    /// # Errors
    ///
    /// As soon as it is known that two readers could read the body in two ways.
    pub fn go_on(&mut self, mut bytes: &[u8]) -> Result<(), ChunkProblem> {
        while let [byte, rest @ ..] = bytes {
            match self.state {
                State::Done => return Ok(()),
                State::Data(left) => {
                    let here = usize::try_from(left).unwrap_or(usize::MAX).min(bytes.len());
                    bytes = &bytes[here..];
                    let left = left - here as u64;
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
            (State::Size { .. }, _) => return Err(ChunkProblem("the size of a chunk is no number")),
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
                    return Err(ChunkProblem("a trailer has a name that no trailer may have"));
                }
                State::TrailerValue
            }
            (State::TrailerName { length }, byte) if crate::head::is_token(byte) => {
                if let Some(place) = self.name.get_mut(length) {
                    *place = byte.to_ascii_lowercase();
                }
                State::TrailerName { length: length + 1 }
            }
            (State::TrailerName { .. }, _) => return Err(ChunkProblem("a trailer is no field")),
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

    /// Whole, and byte for byte.
    #[track_caller]
    fn check(body: &str, expected: Option<&str>) {
        let whole = Scan::default().go_on(body.as_bytes());
        let mut scan = Scan::default();
        let in_bytes = body.as_bytes().iter().try_for_each(|byte| scan.go_on(&[*byte]));
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
    fn chunks_are_read_to_their_end_and_what_follows_is_not_looked_at() {
        check("0\r\n\r\n", None);
        check("5\r\nabcde\r\n1e;a=b\r\n\r\n\0\nxxxxxxxxxxxxxxxxxxxxxxxxxx\r\n0\r\n\r\n", None);
        check("5;a=\"b c\";d \r\nabcde\r\n000\r\nx-trailer: y\r\nx-more:\r\n\r\n", None);
        check("5 \r\nabcde\r\n0\r\n\r\n\nGET \0", None);
        check(&format!("0\r\n{}: x\r\n\r\n", "y".repeat(100)), None);
    }

    #[test]
    fn what_two_readers_could_read_in_two_ways_is_refused() {
        let refused = |body: &str, word: &str| check(body, Some(word));
        refused("5;x\nabcde\r\n0\r\n\r\n", "LF without CR");
        refused("5;\nabcde\r\n0\r\n\r\n", "LF without CR");
        refused("5 \nabcde\r\n0\r\n\r\n", "LF without CR");
        refused("5;\"a\nb\"\r\nabcde\r\n0\r\n\r\n", "LF without CR");
        refused("5;a\0\r\nabcde\r\n0\r\n\r\n", "control");
        refused("5;a\rb\r\n", "not followed by LF");
        refused("5\nabcde\r\n", "no number");
        refused("\r\n", "no size");
        refused("-5\r\n", "no size");
        refused("0x5\r\n", "no number");
        refused("11111111111111111\r\n", "16 digits");
        refused("5\r\nabcdef\r\n", "does not end");
        refused("5\r\nabcde\n0", "does not end");
        refused("5\r\nabcde\r0", "does not end");
        refused("0\r\nx: y\n\r\n", "control");
        refused("0\r\nx: y\rz", "not followed by LF");
        refused("0\r\n\r\r", "not followed by LF");
        refused("0\r\nx y: z\r\n", "no field");
        refused("0\r\n: z\r\n", "no trailer may have");
        refused("0\r\n x: z\r\n", "no field");
        refused("0\r\nnothing\r\n", "no field");
        for name in ["Content-Length", "TRANSFER-ENCODING", "host", "authorization", "te"] {
            refused(&format!("0\r\n{name}: x\r\n\r\n"), "no trailer may have");
        }
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic_and_pieces_make_no_difference(
            bytes in prop::collection::vec(prop_oneof![Just(b'\r'), Just(b'\n'), Just(b'0'), Just(b'3'), Just(b';'), any::<u8>()], 0..80),
            cut in 0_usize..80,
        ) {
            let cut = cut.min(bytes.len());
            let whole = Scan::default().go_on(&bytes);
            let mut scan = Scan::default();
            let pieces = scan.go_on(&bytes[..cut]).and_then(|()| scan.go_on(&bytes[cut..]));
            prop_assert_eq!(whole, pieces);
        }
    }
}
