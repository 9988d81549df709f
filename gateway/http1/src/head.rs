//! Head of a response: status, headers, framing of the body, reuse of the connection.

use crate::{BodyFraming, ChunkDecoder, FramingError, HEAD_BYTES_MAX, HEADERS_MAX, INTERIM_RESPONSES_MAX};
use httparse::{Error, Header, ParserConfig, Response, Status};
use std::mem::MaybeUninit;

/// Head of a final response, borrowed from the received bytes.
#[derive(Debug)]
pub struct ResponseHead<'headers, 'bytes> {
    /// Status code, from 200 to 999.
    pub status: u16,
    /// Headers in the order of reception.
    pub headers: &'headers [Header<'bytes>],
    /// Bytes of the head, with the interim responses before it; the body follows.
    pub length: usize,
    /// Framing of the body.
    pub framing: BodyFraming,
    /// Whether the connection can be reused after the body.
    pub keep_alive: bool,
}

/// Parses the head of the final response at the front of `bytes` and returns its conversion; `None` if it is incomplete.
/// `is_head` marks the response to a HEAD request, which has no body.
///
/// # Errors
///
/// If the head is not HTTP/1.x, exceeds a limit, switches protocols, or leaves the end of the body ambiguous.
pub fn head<T>(
    bytes: &[u8],
    is_head: bool,
    convert: impl FnOnce(&ResponseHead<'_, '_>) -> T,
) -> Result<Option<T>, FramingError> {
    const TOO_LONG: FramingError = FramingError("its head is too long");
    // One byte past the limit at most: the result must not depend on how much arrived at once.
    let bytes = &bytes[..bytes.len().min(HEAD_BYTES_MAX + 1)];
    let mut length = 0;
    for _ in 0..=INTERIM_RESPONSES_MAX {
        let mut headers = [const { MaybeUninit::uninit() }; HEADERS_MAX];
        let mut response = Response::new(&mut []);
        let rest = &bytes[length..];
        let parsed =
            ParserConfig::default().parse_response_with_uninit_headers(&mut response, rest, &mut headers);
        match parsed {
            Ok(Status::Complete(bytes)) => length += bytes,
            Ok(Status::Partial) if bytes.len() > HEAD_BYTES_MAX => return Err(TOO_LONG),
            Ok(Status::Partial) => return Ok(None),
            Err(Error::TooManyHeaders) => return Err(FramingError("it has too many headers")),
            Err(_) => return Err(FramingError("its head is not HTTP/1.1")),
        }
        if length > HEAD_BYTES_MAX {
            return Err(TOO_LONG);
        }
        let (status, minor) = (response.code.unwrap_or(0), response.version.unwrap_or(0));
        let headers = &*response.headers;
        let (framing, keep_alive) = framing(headers, status, minor, is_head)?;
        match status {
            101 => return Err(FramingError("it switches protocols")),
            100..200 => {}
            200.. => {
                return Ok(Some(convert(&ResponseHead { status, headers, length, framing, keep_alive })));
            }
            _ => return Err(FramingError("its status is invalid")),
        }
    }
    Err(FramingError("it has too many interim responses"))
}

/// Determines the framing of the body (RFC 9112, 6.3), and whether the connection can be reused after it (9.3).
fn framing(
    headers: &[Header<'_>],
    status: u16,
    minor: u8,
    is_head: bool,
) -> Result<(BodyFraming, bool), FramingError> {
    let (mut length, mut chunked, mut connection) = (None, false, None);
    for Header { name, value } in headers {
        if name.eq_ignore_ascii_case("content-length") {
            let this = number(value).ok_or(FramingError("its length is not a number"))?;
            if length.replace(this).is_some_and(|other| other != this) {
                return Err(FramingError("it has two lengths"));
            }
        } else if name.eq_ignore_ascii_case("transfer-encoding") {
            if chunked || !value.eq_ignore_ascii_case(b"chunked") {
                return Err(FramingError("its transfer coding is not 'chunked'"));
            }
            chunked = true;
        } else if name.eq_ignore_ascii_case("connection") {
            connection = has_token(value, b"close").then_some(false).or(connection);
            connection = connection.or(has_token(value, b"keep-alive").then_some(true));
        }
    }
    let framing = match (length, chunked) {
        (Some(_), true) => return Err(FramingError("it has a length and chunks")),
        _ if is_head || status < 200 || status == 204 || status == 304 => BodyFraming::Length(0),
        (Some(length), false) => BodyFraming::Length(length),
        (None, true) => BodyFraming::Chunked(ChunkDecoder::default()),
        (None, false) => BodyFraming::UntilClosed,
    };
    // HTTP/1.0 has no chunks: an intermediary of that version did not understand the framing.
    let is_delimited = framing != BodyFraming::UntilClosed && !(chunked && minor == 0);
    Ok((framing, is_delimited && connection.unwrap_or(minor == 1)))
}

fn number(text: &[u8]) -> Option<u64> {
    let digits = !text.is_empty() && text.iter().all(u8::is_ascii_digit);
    std::str::from_utf8(text).ok().filter(|_| digits)?.parse().ok()
}

/// Returns whether a comma-separated list contains `word`.
fn has_token(list: &[u8], word: &[u8]) -> bool {
    list.split(|byte| *byte == b',').any(|each| each.trim_ascii().eq_ignore_ascii_case(word))
}
