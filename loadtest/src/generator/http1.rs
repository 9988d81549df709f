//! Incremental parser of HTTP/1.1 responses.
//!
//! It performs no I/O. A response that is complete in one read is returned in place, without a copy; a longer one is
//! buffered. Anything that is not valid HTTP (an invalid head, two lengths, a chunk without a size) ends the
//! connection, because the start of the next response is then unknown.

use http::StatusCode;
use replica_api::error::ErrorCode;
use replica_api::headers;

use crate::record::ServingRegions;

/// Maximum size of a response: 2048 rows of 4096 numbers with 12 digits each, with some margin.
pub(crate) const RESPONSE_BYTES_MAX: usize = 128 << 20;

/// Maximum number of header lines; Meridian's responses have about a dozen.
const HEADERS_MAX: usize = 64;

/// Maximum size of a response head.
const HEAD_BYTES_MAX: usize = 64 << 10;

/// Maximum length of a chunk-size line.
const CHUNK_LINE_BYTES_MAX: usize = 256;

/// Relevant fields of a response head.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ReceivedHead {
    pub(crate) status: u16,
    /// Regions that served the request, if named.
    pub(crate) served: ServingRegions,
    /// Whether the gateway needed more than one attempt.
    pub(crate) retried: bool,
    /// Meridian's error code.
    pub(crate) code: Option<ErrorCode>,
    /// Whether the connection can be reused.
    pub(crate) reusable: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum ResponseBodyFraming {
    Length(usize),
    Chunked,
    UntilClose,
}

/// Complete response.
#[derive(Debug)]
pub(crate) struct CompleteResponse<'a> {
    pub(crate) head: ReceivedHead,
    pub(crate) body: &'a [u8],
}

/// Protocol error that ends the connection.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum ProtocolError {
    /// The data is not valid HTTP.
    NotHttp,
    /// The response exceeds [`RESPONSE_BYTES_MAX`].
    TooLarge,
}

/// Parser of the consecutive responses of one connection.
#[derive(Debug, Default)]
pub(crate) struct ResponseReader {
    /// Received data that has not been returned.
    buffered: Vec<u8>,
    /// Head of the current response, framing of its body, and start of the body.
    head: Option<(ReceivedHead, ResponseBodyFraming, usize)>,
    /// Chunked body: parsed up to this position, and decoded content.
    read_to: usize,
    decoded: Vec<u8>,
}

impl ResponseReader {
    /// Returns whether no part of a response is buffered.
    pub(crate) fn is_empty(&self) -> bool {
        self.buffered.is_empty() && self.head.is_none()
    }

    /// Processes received bytes. Calls `complete` if they complete a response, and returns whether they did.
    pub(crate) fn take(
        &mut self,
        fresh: &[u8],
        complete: impl FnOnce(CompleteResponse<'_>),
    ) -> Result<bool, ProtocolError> {
        if self.is_empty() {
            // Common case: a complete response in one read.
            let mut at = 0;
            while let Some((head, framing, length)) = head(&fresh[at..])? {
                at += length;
                if is_interim(head.status) {
                    continue;
                }
                if let ResponseBodyFraming::Length(body) = framing
                    && fresh.len() - at >= body
                {
                    let reusable = head.reusable && fresh.len() - at == body;
                    complete(CompleteResponse {
                        head: ReceivedHead { reusable, ..head },
                        body: &fresh[at..at + body],
                    });
                    return Ok(true);
                }
                self.head = Some((head, framing, 0));
                break;
            }
            self.buffered.extend_from_slice(&fresh[at..]);
        } else {
            self.buffered.extend_from_slice(fresh);
        }
        self.parse_buffered(complete)
    }

    /// Handles the end of the connection, which completes a response without a declared length.
    pub(crate) fn end(&mut self, complete: impl FnOnce(CompleteResponse<'_>)) -> bool {
        let Some((head, ResponseBodyFraming::UntilClose, begins)) = self.head.take() else { return false };
        complete(CompleteResponse {
            head: ReceivedHead { reusable: false, ..head },
            body: &self.buffered[begins..],
        });
        true
    }

    /// Continues parsing the buffered data.
    fn parse_buffered(&mut self, complete: impl FnOnce(CompleteResponse<'_>)) -> Result<bool, ProtocolError> {
        while self.head.is_none() {
            let Some((head, framing, length)) = head(&self.buffered)? else { return Ok(false) };
            if is_interim(head.status) {
                self.buffered.drain(..length);
            } else {
                self.head = Some((head, framing, length));
                self.read_to = length;
            }
        }
        let Some((_, framing, begins)) = self.head.as_ref() else { return Ok(false) };
        let (begins, received) = (*begins, self.buffered.len());
        let ends = match *framing {
            ResponseBodyFraming::Length(length) if length > RESPONSE_BYTES_MAX => {
                return Err(ProtocolError::TooLarge);
            }
            ResponseBodyFraming::Length(length) => {
                self.buffered.reserve((begins + length).saturating_sub(received));
                Some(begins + length).filter(|ends| *ends <= received)
            }
            ResponseBodyFraming::Chunked => self.chunks()?,
            ResponseBodyFraming::UntilClose => None,
        };
        if received - begins > RESPONSE_BYTES_MAX + HEAD_BYTES_MAX {
            return Err(ProtocolError::TooLarge);
        }
        let Some(ends) = ends else { return Ok(false) };
        let Some((head, framing, begins)) = self.head.take() else { return Ok(false) };
        let reusable = head.reusable && received == ends;
        let body = if framing == ResponseBodyFraming::Chunked {
            &self.decoded[..]
        } else {
            &self.buffered[begins..ends]
        };
        complete(CompleteResponse { head: ReceivedHead { reusable, ..head }, body });
        // Memory of a large response is released.
        self.buffered = Vec::new();
        self.decoded = Vec::new();
        self.read_to = 0;
        Ok(true)
    }

    /// Decodes available chunks; returns the end of the body if it is complete.
    fn chunks(&mut self) -> Result<Option<usize>, ProtocolError> {
        loop {
            let rest = &self.buffered[self.read_to..];
            let (line, size) = match httparse::parse_chunk_size(rest) {
                Ok(httparse::Status::Complete(chunk)) => chunk,
                Ok(httparse::Status::Partial) if rest.len() <= CHUNK_LINE_BYTES_MAX => return Ok(None),
                Ok(httparse::Status::Partial) | Err(_) => return Err(ProtocolError::NotHttp),
            };
            if size == 0 {
                return trailers(&rest[line..]).map(|ends| ends.map(|ends| self.read_to + line + ends));
            }
            let size = usize::try_from(size).ok().filter(|size| *size <= RESPONSE_BYTES_MAX);
            let size = size.ok_or(ProtocolError::TooLarge)?;
            if rest.len() < line + size + 2 {
                return Ok(None);
            }
            if &rest[line + size..line + size + 2] != b"\r\n" {
                return Err(ProtocolError::NotHttp);
            }
            self.decoded.extend_from_slice(&rest[line..line + size]);
            self.read_to += line + size + 2;
            if self.decoded.len() > RESPONSE_BYTES_MAX {
                return Err(ProtocolError::TooLarge);
            }
        }
    }
}

/// Returns the end of the trailers, after an empty line.
fn trailers(rest: &[u8]) -> Result<Option<usize>, ProtocolError> {
    if rest.starts_with(b"\r\n") {
        return Ok(Some(2));
    }
    match rest.windows(4).position(|bytes| bytes == b"\r\n\r\n") {
        Some(at) => Ok(Some(at + 4)),
        None if rest.len() <= HEAD_BYTES_MAX => Ok(None),
        None => Err(ProtocolError::NotHttp),
    }
}

/// Returns whether the status is interim (1xx), so that another response follows.
fn is_interim(status: u16) -> bool {
    (100..200).contains(&status)
}

/// Parses the head at the start of `bytes`; returns it with the framing of the body and its own length. `None` while
/// it is incomplete.
fn head(bytes: &[u8]) -> Result<Option<(ReceivedHead, ResponseBodyFraming, usize)>, ProtocolError> {
    let mut lines = [httparse::EMPTY_HEADER; HEADERS_MAX];
    let mut response = httparse::Response::new(&mut lines);
    let length = match response.parse(bytes) {
        Ok(httparse::Status::Complete(length)) => length,
        Ok(httparse::Status::Partial) if bytes.len() <= HEAD_BYTES_MAX => return Ok(None),
        Ok(httparse::Status::Partial) | Err(_) => return Err(ProtocolError::NotHttp),
    };
    let status = response.code.unwrap_or_default();
    let reusable = response.version == Some(1);
    let mut head =
        ReceivedHead { status, served: ServingRegions::Unknown, retried: false, code: None, reusable };
    let (mut declared_length, mut chunked) = (None, false);
    let (mut attempts, mut parts) = (1_u32, 1_u32);
    for line in response.headers {
        let text = || std::str::from_utf8(line.value).ok().map(str::trim);
        let named = |name: &str| line.name.eq_ignore_ascii_case(name);
        if named("content-length") {
            let value: usize = text().and_then(|text| text.parse().ok()).ok_or(ProtocolError::NotHttp)?;
            if declared_length.is_some_and(|earlier| earlier != value) {
                return Err(ProtocolError::NotHttp);
            }
            declared_length = Some(value);
        } else if named("transfer-encoding") {
            chunked = text().is_some_and(|text| text.eq_ignore_ascii_case("chunked"));
            if !chunked {
                return Err(ProtocolError::NotHttp);
            }
        } else if named("connection") {
            let has_option = |option| text().is_some_and(|text| text.eq_ignore_ascii_case(option));
            head.reusable = (head.reusable || has_option("keep-alive")) && !has_option("close");
        } else if named(headers::REGION) {
            head.served = text().map_or(ServingRegions::Unknown, ServingRegions::parse);
        } else if named(headers::ATTEMPTS) {
            attempts = text().and_then(|text| text.parse().ok()).unwrap_or(1);
        } else if named(headers::PARTS) {
            parts = text().and_then(|text| text.parse().ok()).unwrap_or(1);
        } else if named(headers::ERROR) {
            head.code = text().and_then(ErrorCode::parse);
        }
    }
    // Each part of a split request takes one attempt.
    head.retried = attempts > parts;
    let framing = match (chunked, declared_length) {
        _ if status == StatusCode::NO_CONTENT || status == StatusCode::NOT_MODIFIED => {
            ResponseBodyFraming::Length(0)
        }
        (true, _) => ResponseBodyFraming::Chunked,
        (false, Some(length)) => ResponseBodyFraming::Length(length),
        (false, None) => ResponseBodyFraming::UntilClose,
    };
    Ok(Some((head, framing, length)))
}

#[cfg(test)]
mod tests {
    use super::*;

    type Got = Result<Option<(u16, String, bool)>, ProtocolError>;

    /// Parses `bytes`, delivered in pieces of this size.
    fn read(bytes: &[u8], piece: usize, ends: bool) -> Got {
        let (mut reader, mut got) = (ResponseReader::default(), None);
        let mut keep = |response: CompleteResponse<'_>| {
            let body = String::from_utf8_lossy(response.body).into_owned();
            got = Some((response.head.status, body, response.head.reusable));
        };
        for piece in bytes.chunks(piece) {
            if reader.take(piece, &mut keep)? {
                return Ok(got);
            }
        }
        if ends {
            reader.end(&mut keep);
        }
        Ok(got)
    }

    fn check(bytes: &str, ends: bool, expected: Result<Option<(u16, &str, bool)>, ProtocolError>) {
        let expected =
            expected.map(|some| some.map(|(status, body, reusable)| (status, body.to_owned(), reusable)));
        for piece in [bytes.len(), 1, 7] {
            assert_eq!(read(bytes.as_bytes(), piece, ends), expected, "{bytes:?} by {piece}");
        }
    }

    #[test]
    fn a_response_is_complete_at_its_length_its_last_chunk_or_the_end() {
        check("HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello", false, Ok(Some((200, "hello", true))));
        check("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", false, Ok(Some((200, "", true))));
        check("HTTP/1.1 204 No Content\r\n\r\n", false, Ok(Some((204, "", true))));
        let chunks =
            "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n6;x=y\r\n world\r\n0\r\n\r\n";
        check(chunks, false, Ok(Some((200, "hello world", true))));
        let trailer = chunks.replace("0\r\n\r\n", "0\r\nx: y\r\n\r\n");
        check(&trailer, false, Ok(Some((200, "hello world", true))));
        check("HTTP/1.1 200 OK\r\n\r\nhello", true, Ok(Some((200, "hello", false))));
        check(
            "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok",
            false,
            Ok(Some((200, "ok", true))),
        );
    }

    #[test]
    fn a_truncated_response_is_not_returned() {
        check("HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nhello", true, Ok(None));
        check("HTTP/1.1 200 OK\r\ncontent-le", true, Ok(None));
        check("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhel", true, Ok(None));
    }

    #[test]
    fn a_connection_is_reusable_unless_closed_explicitly() {
        check(
            "HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n",
            false,
            Ok(Some((200, "", false))),
        );
        check("HTTP/1.0 200 OK\r\ncontent-length: 0\r\n\r\n", false, Ok(Some((200, "", false))));
        let kept_open = "HTTP/1.0 200 OK\r\nconnection: keep-alive\r\ncontent-length: 0\r\n\r\n";
        check(kept_open, false, Ok(Some((200, "", true))));
        // Unsolicited bytes: they cannot be distinguished from the next response.
        let more = "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nokmore";
        assert_eq!(read(more.as_bytes(), more.len(), false), Ok(Some((200, "ok".to_owned(), false))));
    }

    #[test]
    fn invalid_http_ends_the_connection() {
        check("SSH-2.0-OpenSSH_9.2\r\n", false, Err(ProtocolError::NotHttp));
        check(
            "HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
            false,
            Err(ProtocolError::NotHttp),
        );
        check("HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n", false, Err(ProtocolError::NotHttp));
        check("HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\n", false, Err(ProtocolError::NotHttp));
        check(
            "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nhello\r\n",
            false,
            Err(ProtocolError::NotHttp),
        );
        check(
            "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhello\r\n",
            false,
            Err(ProtocolError::NotHttp),
        );
    }

    #[test]
    fn the_size_of_a_response_is_limited() {
        let with = |length: usize| {
            let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {length}\r\n\r\n");
            read(head.as_bytes(), head.len(), false)
        };
        assert_eq!(with(RESPONSE_BYTES_MAX), Ok(None));
        assert_eq!(with(RESPONSE_BYTES_MAX + 1), Err(ProtocolError::TooLarge));
    }

    #[test]
    fn region_retries_and_error_code_come_from_the_head() {
        let bytes = b"HTTP/1.1 503 No\r\nX-Meridian-Region: aws/us-east-1\r\nx-meridian-attempts: 2\r\n\
            x-meridian-error: not_ready\r\ncontent-length: 0\r\n\r\n";
        let mut found = None;
        ResponseReader::default().take(bytes, |response| found = Some(response.head)).unwrap();
        let head = found.unwrap();
        assert_eq!(head.served, ServingRegions::parse("aws/us-east-1"));
        assert_eq!((head.status, head.retried, head.code), (503, true, Some(ErrorCode::NotReady)));
    }

    #[test]
    fn the_parts_of_a_split_request_are_not_retries() {
        let retried = |lines: &str| {
            let bytes = format!("HTTP/1.1 200 OK\r\n{lines}content-length: 0\r\n\r\n");
            let mut found = None;
            ResponseReader::default()
                .take(bytes.as_bytes(), |response| found = Some(response.head.retried))
                .unwrap();
            found.unwrap()
        };
        for (lines, expected) in [
            ("", false),
            ("x-meridian-attempts: 1\r\n", false),
            ("x-meridian-attempts: 2\r\n", true),
            ("x-meridian-attempts: 6\r\nx-meridian-parts: 6\r\n", false),
            ("x-meridian-parts: 6\r\nx-meridian-attempts: 6\r\n", false),
            ("x-meridian-attempts: 7\r\nx-meridian-parts: 6\r\n", true),
        ] {
            assert_eq!(retried(lines), expected, "{lines}");
        }
    }
}
