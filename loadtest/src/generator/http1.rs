//! Reader of the consecutive HTTP/1.1 responses of one connection.
//!
//! It performs no I/O. A response that is complete in one read is returned in place, without a copy; a longer one is
//! buffered. Anything that is not valid HTTP ends the connection, because the start of the next response is then unknown.

use http1::{BodyFraming, ResponseAssembler, ResponseError, ResponseHead};
use replica_api::error::ErrorCode;
use replica_api::headers;

use crate::client::RESPONSE_BYTES_MAX;
use crate::record::ServingRegions;

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
}

/// Complete response.
#[derive(Debug)]
pub(crate) struct CompleteResponse<'a> {
    pub(crate) head: ReceivedHead,
    pub(crate) body: &'a [u8],
}

/// Reader of the responses of one connection.
#[derive(Debug)]
pub(crate) struct ResponseReader {
    /// Received data that has not been returned.
    buffered: Vec<u8>,
    assembler: ResponseAssembler<ReceivedHead>,
}

impl Default for ResponseReader {
    fn default() -> ResponseReader {
        let assembler = ResponseAssembler::new(RESPONSE_BYTES_MAX, false);
        ResponseReader { buffered: Vec::new(), assembler }
    }
}

impl ResponseReader {
    /// Processes received bytes. If they complete a response, returns the result of `use_response`, and whether the connection
    /// can be reused.
    pub(crate) fn take<T>(
        &mut self,
        fresh: &[u8],
        use_response: impl FnOnce(CompleteResponse<'_>) -> T,
    ) -> Result<Option<(T, bool)>, ResponseError> {
        if self.buffered.is_empty() {
            // Common case: a complete response in one read.
            let parsed = http1::head(fresh, false, |head| {
                let BodyFraming::Length(length) = head.framing else { return None };
                let end = head.length.checked_add(usize::try_from(length).ok()?)?;
                let body = fresh.get(head.length..end)?;
                let response = CompleteResponse { head: ReceivedHead::of(head), body };
                Some((response, head.keep_alive && fresh.len() == end))
            })?;
            if let Some((response, reusable)) = parsed.flatten() {
                return Ok(Some((use_response(response), reusable)));
            }
        }
        self.buffered.extend_from_slice(fresh);
        if self.assembler.advance(&mut self.buffered, ReceivedHead::of)? {
            return Ok(self.complete(use_response));
        }
        self.buffered.reserve(self.assembler.remaining());
        Ok(None)
    }

    /// Handles the end of the connection, which completes a response without a declared length.
    pub(crate) fn end<T>(&mut self, use_response: impl FnOnce(CompleteResponse<'_>) -> T) -> Option<T> {
        let ends = self.assembler.ends_with_connection();
        ends.then(|| self.complete(use_response)).flatten().map(|(result, _)| result)
    }

    fn complete<T>(&mut self, use_response: impl FnOnce(CompleteResponse<'_>) -> T) -> Option<(T, bool)> {
        // Memory of a large response is released.
        let buffered = std::mem::take(&mut self.buffered);
        let (head, body, reusable) = self.assembler.take(buffered.len())?;
        Some((use_response(CompleteResponse { head, body: &buffered[body] }), reusable))
    }
}

impl ReceivedHead {
    fn of(head: &ResponseHead<'_, '_>) -> ReceivedHead {
        let headers = head.headers.iter().map(|line| (line.name, std::str::from_utf8(line.value).ok()));
        ReceivedHead::of_headers(head.status, headers)
    }

    /// Reads the relevant headers; a value that is not text is ignored.
    pub(crate) fn of_headers<'a>(
        status: u16,
        headers: impl Iterator<Item = (&'a str, Option<&'a str>)>,
    ) -> ReceivedHead {
        let mut received =
            ReceivedHead { status, served: ServingRegions::Unknown, retried: false, code: None };
        let (mut attempts, mut parts) = (1_u32, 1_u32);
        for (name, value) in headers {
            let text = || value;
            let named = |expected: &str| name.eq_ignore_ascii_case(expected);
            if named(headers::REGION) {
                received.served = text().map_or(ServingRegions::Unknown, ServingRegions::parse);
            } else if named(headers::ATTEMPTS) {
                attempts = text().and_then(|text| text.parse().ok()).unwrap_or(1);
            } else if named(headers::PARTS) {
                parts = text().and_then(|text| text.parse().ok()).unwrap_or(1);
            } else if named(headers::ERROR) {
                received.code = text().and_then(ErrorCode::parse);
            }
        }
        // Each part of a split request takes one attempt.
        received.retried = attempts > parts;
        received
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Got = Result<Option<(u16, String, bool)>, ResponseError>;

    /// Parses `bytes`, delivered in pieces of this size.
    fn read(bytes: &[u8], piece: usize, ends: bool) -> Got {
        let mut reader = ResponseReader::default();
        let convert = |response: CompleteResponse<'_>| {
            (response.head.status, String::from_utf8_lossy(response.body).into_owned())
        };
        for piece in bytes.chunks(piece) {
            if let Some(((status, body), reusable)) = reader.take(piece, convert)? {
                return Ok(Some((status, body, reusable)));
            }
        }
        let last = if ends { reader.end(convert) } else { None };
        Ok(last.map(|(status, body)| (status, body, false)))
    }

    fn check(bytes: &str, ends: bool, expected: Result<Option<(u16, &str, bool)>, ResponseError>) {
        let expected =
            expected.map(|some| some.map(|(status, body, reusable)| (status, body.to_owned(), reusable)));
        for piece in [bytes.len(), 1, 7] {
            assert_eq!(read(bytes.as_bytes(), piece, ends), expected, "{bytes:?} by {piece}");
        }
    }

    #[test]
    fn a_response_is_returned_in_place_or_from_the_buffer() {
        let response = "HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello";
        check(response, false, Ok(Some((200, "hello", true))));
        check(&format!("HTTP/1.1 100 Continue\r\n\r\n{response}"), false, Ok(Some((200, "hello", true))));
        let chunks =
            "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n6;x=y\r\n world\r\n0\r\n\r\n";
        check(chunks, false, Ok(Some((200, "hello world", true))));
        check("HTTP/1.1 200 OK\r\n\r\nhello", true, Ok(Some((200, "hello", false))));
        check("HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nhello", true, Ok(None));
        let closed = "HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
        check(closed, false, Ok(Some((200, "", false))));
        // Unsolicited bytes: they cannot be distinguished from the next response.
        let more = format!("{response}more");
        assert_eq!(read(more.as_bytes(), more.len(), false), Ok(Some((200, "hello".to_owned(), false))));
    }

    #[test]
    fn the_size_of_a_response_is_limited() {
        let with = |length: usize| {
            let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {length}\r\n\r\n");
            read(head.as_bytes(), head.len(), false)
        };
        assert_eq!(with(RESPONSE_BYTES_MAX), Ok(None));
        assert_eq!(with(RESPONSE_BYTES_MAX + 1), Err(ResponseError::TooLarge));
    }

    #[test]
    fn region_retries_and_error_code_come_from_the_head() {
        let bytes = b"HTTP/1.1 503 No\r\nX-Meridian-Region: aws/us-east-1\r\nx-meridian-attempts: 2\r\n\
            x-meridian-error: not_ready\r\ncontent-length: 0\r\n\r\n";
        let (head, _) = ResponseReader::default().take(bytes, |response| response.head).unwrap().unwrap();
        assert_eq!(head.served, ServingRegions::parse("aws/us-east-1"));
        assert_eq!((head.status, head.retried, head.code), (503, true, Some(ErrorCode::NotReady)));
    }

    #[test]
    fn the_parts_of_a_split_request_are_not_retries() {
        let retried = |lines: &str| {
            let bytes = format!("HTTP/1.1 200 OK\r\n{lines}content-length: 0\r\n\r\n");
            let taken = ResponseReader::default().take(bytes.as_bytes(), |response| response.head.retried);
            taken.unwrap().unwrap().0
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
