//! Framing of HTTP/1.1 responses (RFC 9112 §6): end of the head, length of the body, and the part of it that has
//! arrived.
//!
//! Bytes in, bytes out; the caller does the I/O. A response that two parsers could split differently is rejected: two
//! lengths, a length and chunks, an unknown transfer coding. The peer is not a compliant HTTP server then, and the
//! connection is closed.

use bytes::{Buf, Bytes, BytesMut};
use http::header::{CONNECTION, CONTENT_LENGTH, TRANSFER_ENCODING};
use http::response::Parts;
use http::{HeaderName, HeaderValue, StatusCode};
use std::mem::MaybeUninit;

/// Maximum headers of a response; Pingora and nginx accept about as many.
const HEADERS_MAX: usize = 128;
/// Maximum bytes of a response head.
pub(super) const HEAD_BYTES_MAX: usize = 64 << 10;
/// Maximum length of a chunk-size line: sixteen digits, and extensions, which are not used in practice.
const CHUNK_LINE_BYTES_MAX: usize = 256;
/// Maximum bytes of trailers.
const TRAILER_BYTES_MAX: usize = 8 << 10;

/// Invalid response, and the reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid response: {0}")]
pub(crate) struct MalformedResponse(pub(super) &'static str);

/// Parsed response head.
#[derive(Debug)]
pub(super) struct ResponseHead {
    pub(super) head: Parts,
    pub(super) body: BodyFraming,
    /// Whether the connection can be reused after the body.
    pub(super) keep_alive: bool,
}

/// Remaining part of a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BodyFraming {
    /// The number of remaining bytes.
    Length(u64),
    /// Chunked coding.
    Chunked(ChunkState),
    /// All bytes until the connection closes.
    UntilClosed,
}

/// Position within a chunked body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ChunkState {
    /// Before a chunk-size line.
    Line,
    /// Within chunk data, with the number of remaining bytes.
    Data(u64),
    /// Before the line end after chunk data.
    DataEnd,
    /// Within the trailers, with the number of bytes so far.
    Trailers(usize),
    /// After the end.
    Done,
}

/// Removes a head from the front of `buffer`; `None` if it is incomplete. The header values share its memory.
pub(super) fn head(buffer: &mut BytesMut) -> Result<Option<ResponseHead>, MalformedResponse> {
    let mut headers = [const { MaybeUninit::uninit() }; HEADERS_MAX];
    let mut response = httparse::Response::new(&mut []);
    let parsed = httparse::ParserConfig::default().parse_response_with_uninit_headers(
        &mut response,
        buffer,
        &mut headers,
    );
    let length = match parsed {
        Ok(httparse::Status::Complete(length)) => length,
        Ok(httparse::Status::Partial) if buffer.len() > HEAD_BYTES_MAX => {
            return Err(MalformedResponse("its head is too long"));
        }
        Ok(httparse::Status::Partial) => return Ok(None),
        Err(_) => return Err(MalformedResponse("its head is not HTTP/1.1")),
    };
    let (status, minor) = (response.code.unwrap_or(0), response.version.unwrap_or(0));
    let start = buffer.as_ptr() as usize;
    let range = |part: &[u8]| {
        let begin = part.as_ptr() as usize - start;
        begin..begin + part.len()
    };
    let fields = response.headers.iter().map(|field| (range(field.name.as_bytes()), range(field.value)));
    let fields: Vec<_> = fields.collect();
    let text = buffer.split_to(length).freeze();
    let (mut head, ()) = http::Response::new(()).into_parts();
    head.status = StatusCode::from_u16(status).map_err(|_| MalformedResponse("its status is invalid"))?;
    head.headers.reserve(fields.len());
    let (mut length, mut chunked, mut connection) = (None, false, None);
    for (name, value) in fields {
        let name =
            HeaderName::from_bytes(&text[name]).map_err(|_| MalformedResponse("a header name is invalid"))?;
        let value = text.slice(value);
        if name == CONTENT_LENGTH {
            let this = number(&value).ok_or(MalformedResponse("its length is not a number"))?;
            if length.replace(this).is_some_and(|other| other != this) {
                return Err(MalformedResponse("it has two lengths"));
            }
        } else if name == TRANSFER_ENCODING {
            if chunked || !value.eq_ignore_ascii_case(b"chunked") {
                return Err(MalformedResponse("its transfer coding is not 'chunked'"));
            }
            chunked = true;
            continue;
        } else if name == CONNECTION {
            connection = has_token(&value, b"close").then_some(false).or(connection);
            connection = connection.or(has_token(&value, b"keep-alive").then_some(true));
            continue;
        }
        let value = HeaderValue::from_maybe_shared(value)
            .map_err(|_| MalformedResponse("a header value is invalid"))?;
        head.headers.append(name, value);
    }
    let body = match (length, chunked) {
        (Some(_), true) => return Err(MalformedResponse("it has a length and chunks")),
        _ if status < 200 || status == 204 || status == 304 => BodyFraming::Length(0),
        (Some(length), false) => BodyFraming::Length(length),
        (None, true) => BodyFraming::Chunked(ChunkState::Line),
        (None, false) => BodyFraming::UntilClosed,
    };
    let keep_alive = body != BodyFraming::UntilClosed && connection.unwrap_or(minor == 1);
    Ok(Some(ResponseHead { head, body, keep_alive }))
}

impl BodyFraming {
    /// Removes the available part of the body from the front of `buffer`; `None` if more bytes are needed first, or the
    /// body has ended.
    pub(super) fn take(&mut self, buffer: &mut BytesMut) -> Result<Option<Bytes>, MalformedResponse> {
        loop {
            match self {
                BodyFraming::Length(0) | BodyFraming::Chunked(ChunkState::Done) => return Ok(None),
                _ if buffer.is_empty() => return Ok(None),
                BodyFraming::Length(left) | BodyFraming::Chunked(ChunkState::Data(left)) => {
                    let here = usize::try_from(*left).unwrap_or(usize::MAX).min(buffer.len());
                    *left -= here as u64;
                    if *self == BodyFraming::Chunked(ChunkState::Data(0)) {
                        *self = BodyFraming::Chunked(ChunkState::DataEnd);
                    }
                    return Ok(Some(buffer.split_to(here).freeze()));
                }
                BodyFraming::UntilClosed => return Ok(Some(buffer.split().freeze())),
                BodyFraming::Chunked(chunk) => match chunk.step(buffer)? {
                    Some(next) => *chunk = next,
                    None => return Ok(None),
                },
            }
        }
    }

    /// Returns whether the body has ended.
    pub(super) fn is_done(&self) -> bool {
        matches!(self, BodyFraming::Length(0) | BodyFraming::Chunked(ChunkState::Done))
    }
}

impl ChunkState {
    /// Consumes one line around the data; `None` if it is incomplete.
    fn step(self, buffer: &mut BytesMut) -> Result<Option<ChunkState>, MalformedResponse> {
        let limit = match self {
            ChunkState::Line => CHUNK_LINE_BYTES_MAX,
            ChunkState::Trailers(before) => TRAILER_BYTES_MAX - before,
            ChunkState::DataEnd | ChunkState::Data(_) | ChunkState::Done => 0,
        };
        let Some(end) = memchr::memchr(b'\n', buffer) else {
            return if buffer.len() > limit + 1 {
                Err(MalformedResponse("a line between chunks is too long"))
            } else {
                Ok(None)
            };
        };
        let line = buffer[..end]
            .strip_suffix(b"\r")
            .ok_or(MalformedResponse("a line between chunks ends in a bare LF"))?;
        if line.len() > limit {
            return Err(MalformedResponse("a line between chunks is too long"));
        }
        let next = match self {
            ChunkState::Line => {
                let digits =
                    line.split(|byte| matches!(byte, b';' | b' ' | b'\t')).next().unwrap_or_default();
                match hexadecimal(digits).ok_or(MalformedResponse("a chunk size is not a number"))? {
                    0 => ChunkState::Trailers(0),
                    length => ChunkState::Data(length),
                }
            }
            ChunkState::DataEnd => ChunkState::Line,
            ChunkState::Trailers(_) if line.is_empty() => ChunkState::Done,
            ChunkState::Trailers(before) => ChunkState::Trailers(before + line.len()),
            ChunkState::Data(_) | ChunkState::Done => unreachable!("data is consumed by take"),
        };
        buffer.advance(end + 1);
        Ok(Some(next))
    }
}

fn number(text: &[u8]) -> Option<u64> {
    let digits = !text.is_empty() && text.iter().all(u8::is_ascii_digit);
    std::str::from_utf8(text).ok().filter(|_| digits)?.parse().ok()
}

fn hexadecimal(text: &[u8]) -> Option<u64> {
    let digits = !text.is_empty() && text.iter().all(u8::is_ascii_hexdigit);
    u64::from_str_radix(std::str::from_utf8(text).ok().filter(|_| digits)?, 16).ok()
}

/// Returns whether a comma-separated list contains `word`.
fn has_token(list: &[u8], word: &[u8]) -> bool {
    list.split(|byte| *byte == b',').any(|each| each.trim_ascii().eq_ignore_ascii_case(word))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parse(text: &str) -> Result<Option<ResponseHead>, MalformedResponse> {
        head(&mut BytesMut::from(text))
    }

    /// Checks the body framing and keep-alive of a complete head.
    fn check(text: &str, expected: Result<(BodyFraming, bool), &str>) {
        let actual =
            parse(text).map(|head| head.expect("a whole head")).map(|head| (head.body, head.keep_alive));
        assert_eq!(
            actual,
            expected.map_err(|why| MalformedResponse(Box::leak(why.to_owned().into_boxed_str()))),
            "{text}"
        );
    }

    #[test]
    fn the_head_determines_the_body_framing_and_ambiguous_heads_are_rejected() {
        let with = |headers: &str| format!("HTTP/1.1 200 OK\r\n{headers}\r\n");
        check(&with("content-length: 7\r\n"), Ok((BodyFraming::Length(7), true)));
        check(&with("content-length: 7\r\nContent-Length: 7\r\n"), Ok((BodyFraming::Length(7), true)));
        check(&with("content-length: 7\r\ncontent-length: 8\r\n"), Err("it has two lengths"));
        check(&with("content-length: +7\r\n"), Err("its length is not a number"));
        check(&with("content-length: 7, 7\r\n"), Err("its length is not a number"));
        check(&with("content-length:\r\n"), Err("its length is not a number"));
        check(&with("content-length: 99999999999999999999\r\n"), Err("its length is not a number"));
        check(&with("transfer-encoding: Chunked\r\n"), Ok((BodyFraming::Chunked(ChunkState::Line), true)));
        check(&with("transfer-encoding: gzip, chunked\r\n"), Err("its transfer coding is not 'chunked'"));
        check(
            &with("transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n"),
            Err("its transfer coding is not 'chunked'"),
        );
        check(
            &with("content-length: 7\r\ntransfer-encoding: chunked\r\n"),
            Err("it has a length and chunks"),
        );
        check(&with(""), Ok((BodyFraming::UntilClosed, false)));
        check("HTTP/1.1 204 No Content\r\n\r\n", Ok((BodyFraming::Length(0), true)));
        check("HTTP/1.1 304 Same\r\ncontent-length: 7\r\n\r\n", Ok((BodyFraming::Length(0), true)));
        check("HTTP/1.1 100 Go on\r\n\r\n", Ok((BodyFraming::Length(0), true)));
        check("HTTP/2 200 OK\r\n\r\n", Err("its head is not HTTP/1.1"));
        check("HTTP/1.1 099 OK\r\n\r\n", Err("its status is invalid"));
    }

    #[test]
    fn a_connection_is_kept_alive_as_version_and_header_say() {
        let with = |version: &str, headers: &str| {
            format!("HTTP/{version} 200 OK\r\ncontent-length: 1\r\n{headers}\r\n")
        };
        let check =
            |version, headers, keep| check(&with(version, headers), Ok((BodyFraming::Length(1), keep)));
        check("1.1", "", true);
        check("1.1", "connection: close\r\n", false);
        check("1.1", "connection: x, Close\r\n", false);
        check("1.1", "connection: keep-alive\r\nconnection: close\r\n", false);
        check("1.0", "", false);
        check("1.0", "connection: keep-alive\r\n", true);
    }

    #[test]
    fn end_to_end_headers_are_kept_and_hop_by_hop_headers_removed() {
        let text = "HTTP/1.1 200 OK\r\nconnection: x\r\ntransfer-encoding: chunked\r\nX-Meridian-Tokens: 60\r\na: \r\n\r\n";
        let head = parse(text).unwrap().unwrap().head;
        let names: Vec<_> =
            head.headers.iter().map(|(name, value)| (name.as_str(), value.as_bytes())).collect();
        assert_eq!(names, [("x-meridian-tokens", b"60".as_slice()), ("a", b"")]);
    }

    #[test]
    fn a_head_is_accepted_at_its_limits_and_rejected_past_them() {
        let headers = |count: usize| format!("HTTP/1.1 200 OK\r\n{}\r\n", "a: b\r\n".repeat(count));
        assert!(parse(&headers(HEADERS_MAX)).unwrap().is_some());
        assert_eq!(
            parse(&headers(HEADERS_MAX + 1)).unwrap_err(),
            MalformedResponse("its head is not HTTP/1.1")
        );
        let endless = |bytes: usize| "HTTP/1.1 200 OK\r\na: ".to_owned() + &"b".repeat(bytes - 20);
        assert!(parse(&endless(HEAD_BYTES_MAX)).unwrap().is_none());
        assert_eq!(
            parse(&endless(HEAD_BYTES_MAX + 1)).unwrap_err(),
            MalformedResponse("its head is too long")
        );
    }

    /// Reads a body that arrives in pieces of this size; returns its content, whether it ended, and the remaining
    /// bytes.
    fn read(
        mut body: BodyFraming,
        text: &[u8],
        piece: usize,
    ) -> Result<(Vec<u8>, bool, Vec<u8>), MalformedResponse> {
        let (mut buffer, mut read) = (BytesMut::new(), Vec::new());
        for part in text.chunks(piece) {
            buffer.extend_from_slice(part);
            while let Some(bytes) = body.take(&mut buffer)? {
                read.extend_from_slice(&bytes);
            }
        }
        Ok((read, body.is_done(), buffer.to_vec()))
    }

    #[test]
    fn chunks_are_joined_and_malformed_chunk_lines_are_rejected() {
        let check = |text: &str, expected: Result<(&str, bool), &str>| {
            for piece in [1, 2, 3, 7, 1000] {
                let actual = read(BodyFraming::Chunked(ChunkState::Line), text.as_bytes(), piece);
                let actual = actual
                    .map(|(read, done, _)| (String::from_utf8(read).unwrap(), done))
                    .map_err(|why| why.0);
                let expected = expected.map(|(read, done)| (read.to_owned(), done));
                assert_eq!(actual, expected, "{text:?} in pieces of {piece}");
            }
        };
        check("3\r\nabc\r\n0\r\n\r\n", Ok(("abc", true)));
        check("3;x=y\r\nabc\r\nA \r\n0123456789\r\n0\r\nt: u\r\n\r\n", Ok(("abc0123456789", true)));
        check("3\r\nab", Ok(("ab", false)));
        check("0\r\n", Ok(("", false)));
        check("3\r\nabcd\r\n", Err("a line between chunks is too long"));
        check("3\nabc\r\n", Err("a line between chunks ends in a bare LF"));
        check("-3\r\n", Err("a chunk size is not a number"));
        check("\r\n", Err("a chunk size is not a number"));
        check("fffffffffffffffff\r\n", Err("a chunk size is not a number"));
        let line = |extra: usize| format!("0;{}\r\n\r\n", "x".repeat(CHUNK_LINE_BYTES_MAX - 2 + extra));
        check(&line(0), Ok(("", true)));
        check(&line(1), Err("a line between chunks is too long"));
        let trailer = |extra: usize| format!("0\r\n{}\r\n\r\n", "x".repeat(TRAILER_BYTES_MAX + extra));
        check(&trailer(0), Ok(("", true)));
        check(&trailer(1), Err("a line between chunks is too long"));
    }

    proptest! {
        #[test]
        fn a_body_is_read_exactly_for_every_segmentation(
            chunks in prop::collection::vec(prop::collection::vec(any::<u8>(), 1..40), 0..6),
            piece in 1usize..50,
            beyond in prop::collection::vec(any::<u8>(), 0..9),
        ) {
            let body = chunks.concat();
            let mut text = Vec::new();
            for chunk in &chunks {
                text.extend(format!("{:x}\r\n", chunk.len()).into_bytes());
                text.extend(chunk);
                text.extend(b"\r\n");
            }
            text.extend(b"0\r\n\r\n");
            text.extend(&beyond);
            prop_assert_eq!(read(BodyFraming::Chunked(ChunkState::Line), &text, piece), Ok((body.clone(), true, beyond.clone())));
            let plain = [body.clone(), beyond.clone()].concat();
            prop_assert_eq!(read(BodyFraming::Length(body.len() as u64), &plain, piece), Ok((body, true, beyond)));
        }

        #[test]
        fn no_bytes_make_it_panic(bytes in prop::collection::vec(any::<u8>(), 0..200), piece in 1usize..50) {
            let mut buffer = BytesMut::from([b"HTTP/1.1 200 OK\r\n", bytes.as_slice()].concat().as_slice());
            head(&mut buffer).ok();
            read(BodyFraming::Chunked(ChunkState::Line), &bytes, piece).ok();
        }
    }
}
