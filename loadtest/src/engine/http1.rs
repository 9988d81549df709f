//! Incremental parser of HTTP/1.1 responses.
//!
//! It performs no I/O. A response that is complete in one read is returned in place, without a copy; a longer one is
//! buffered. Anything that is not valid HTTP (an invalid head, two lengths, a chunk without a size) ends the connection,
//! because the start of the next response is then unknown.

use http::StatusCode;
use replica_core::wire::error::ErrorCode;
use replica_core::wire::headers;

use crate::record::Served;

/// Maximum size of a response: 2048 rows of 4096 numbers with 12 digits each, with some margin.
pub(crate) const ANSWER_BYTES_MAX: usize = 128 << 20;

/// Maximum number of header lines; Meridian's responses have about a dozen.
const HEADERS_MAX: usize = 64;

/// Maximum size of a response head.
const HEAD_BYTES_MAX: usize = 64 << 10;

/// Maximum length of a chunk-size line.
const CHUNK_LINE_BYTES_MAX: usize = 256;

/// Relevant fields of a response head.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Head {
    pub(crate) status: u16,
    /// Regions that served the request, if named.
    pub(crate) served: Served,
    /// Whether the gateway needed more than one attempt.
    pub(crate) retried: bool,
    /// Meridian's error code.
    pub(crate) code: Option<ErrorCode>,
    /// Whether the connection can be reused.
    pub(crate) kept: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Framing {
    Length(usize),
    Chunked,
    UntilClose,
}

/// Complete response.
#[derive(Debug)]
pub(crate) struct Whole<'a> {
    pub(crate) head: Head,
    pub(crate) body: &'a [u8],
}

/// Protocol error that ends the connection.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Unreadable {
    /// The data is not valid HTTP.
    NotHttp,
    /// The response exceeds [`RESPONSE_BYTES_MAX`].
    TooLarge,
}

/// Parser of the consecutive responses of one connection.
#[derive(Debug, Default)]
pub(crate) struct Reader {
    /// Received data that has not been returned.
    gathered: Vec<u8>,
    /// Head of the current response, framing of its body, and start of the body.
    head: Option<(Head, Framing, usize)>,
    /// Chunked body: parsed up to this position, and decoded content.
    read_to: usize,
    unchunked: Vec<u8>,
}

impl Reader {
    /// Returns whether no part of a response is buffered.
    pub(crate) fn is_empty(&self) -> bool {
        self.gathered.is_empty() && self.head.is_none()
    }

    /// Processes received bytes. Calls `complete` if they complete a response, and returns whether they did.
    pub(crate) fn take(&mut self, fresh: &[u8], whole: impl FnOnce(Whole<'_>)) -> Result<bool, Unreadable> {
        if self.is_empty() {
            // Common case: a complete response in one read.
            let mut at = 0;
            while let Some((head, framing, length)) = head(&fresh[at..])? {
                at += length;
                if informs(head.status) {
                    continue;
                }
                if let Framing::Length(body) = framing
                    && fresh.len() - at >= body
                {
                    let kept = head.kept && fresh.len() - at == body;
                    whole(Whole { head: Head { kept, ..head }, body: &fresh[at..at + body] });
                    return Ok(true);
                }
                self.head = Some((head, framing, 0));
                break;
            }
            self.gathered.extend_from_slice(&fresh[at..]);
        } else {
            self.gathered.extend_from_slice(fresh);
        }
        self.again(whole)
    }

    /// Handles the end of the connection, which completes a response without a declared length.
    pub(crate) fn end(&mut self, whole: impl FnOnce(Whole<'_>)) -> bool {
        let Some((head, Framing::UntilClose, begins)) = self.head.take() else { return false };
        whole(Whole { head: Head { kept: false, ..head }, body: &self.gathered[begins..] });
        true
    }

    /// Continues parsing the buffered data.
    fn again(&mut self, whole: impl FnOnce(Whole<'_>)) -> Result<bool, Unreadable> {
        while self.head.is_none() {
            let Some((head, framing, length)) = head(&self.gathered)? else { return Ok(false) };
            if informs(head.status) {
                self.gathered.drain(..length);
            } else {
                self.head = Some((head, framing, length));
                self.read_to = length;
            }
        }
        let Some((_, framing, begins)) = self.head.as_ref() else { return Ok(false) };
        let (begins, came) = (*begins, self.gathered.len());
        let ends = match *framing {
            Framing::Length(length) if length > ANSWER_BYTES_MAX => return Err(Unreadable::TooLarge),
            Framing::Length(length) => {
                self.gathered.reserve((begins + length).saturating_sub(came));
                Some(begins + length).filter(|ends| *ends <= came)
            }
            Framing::Chunked => self.chunks()?,
            Framing::UntilClose => None,
        };
        if came - begins > ANSWER_BYTES_MAX + HEAD_BYTES_MAX {
            return Err(Unreadable::TooLarge);
        }
        let Some(ends) = ends else { return Ok(false) };
        let Some((head, framing, begins)) = self.head.take() else { return Ok(false) };
        let kept = head.kept && came == ends;
        let body =
            if framing == Framing::Chunked { &self.unchunked[..] } else { &self.gathered[begins..ends] };
        whole(Whole { head: Head { kept, ..head }, body });
        // Memory of a large response is released.
        self.gathered = Vec::new();
        self.unchunked = Vec::new();
        self.read_to = 0;
        Ok(true)
    }

    /// Decodes available chunks; returns the end of the body if it is complete.
    fn chunks(&mut self) -> Result<Option<usize>, Unreadable> {
        loop {
            let rest = &self.gathered[self.read_to..];
            let (line, size) = match httparse::parse_chunk_size(rest) {
                Ok(httparse::Status::Complete(chunk)) => chunk,
                Ok(httparse::Status::Partial) if rest.len() <= CHUNK_LINE_BYTES_MAX => return Ok(None),
                Ok(httparse::Status::Partial) | Err(_) => return Err(Unreadable::NotHttp),
            };
            if size == 0 {
                return trailers(&rest[line..]).map(|ends| ends.map(|ends| self.read_to + line + ends));
            }
            let size = usize::try_from(size).ok().filter(|size| *size <= ANSWER_BYTES_MAX);
            let size = size.ok_or(Unreadable::TooLarge)?;
            if rest.len() < line + size + 2 {
                return Ok(None);
            }
            if &rest[line + size..line + size + 2] != b"\r\n" {
                return Err(Unreadable::NotHttp);
            }
            self.unchunked.extend_from_slice(&rest[line..line + size]);
            self.read_to += line + size + 2;
            if self.unchunked.len() > ANSWER_BYTES_MAX {
                return Err(Unreadable::TooLarge);
            }
        }
    }
}

/// Returns the end of the trailers, after an empty line.
fn trailers(rest: &[u8]) -> Result<Option<usize>, Unreadable> {
    if rest.starts_with(b"\r\n") {
        return Ok(Some(2));
    }
    match rest.windows(4).position(|window| window == b"\r\n\r\n") {
        Some(at) => Ok(Some(at + 4)),
        None if rest.len() <= HEAD_BYTES_MAX => Ok(None),
        None => Err(Unreadable::NotHttp),
    }
}

/// Returns whether the status is interim (1xx), so that another response follows.
fn informs(status: u16) -> bool {
    (100..200).contains(&status)
}

/// Parses the head at the start of `bytes`; returns it with the framing of the body and its own length. `None` while it is
/// incomplete.
fn head(bytes: &[u8]) -> Result<Option<(Head, Framing, usize)>, Unreadable> {
    let mut lines = [httparse::EMPTY_HEADER; HEADERS_MAX];
    let mut response = httparse::Response::new(&mut lines);
    let length = match response.parse(bytes) {
        Ok(httparse::Status::Complete(length)) => length,
        Ok(httparse::Status::Partial) if bytes.len() <= HEAD_BYTES_MAX => return Ok(None),
        Ok(httparse::Status::Partial) | Err(_) => return Err(Unreadable::NotHttp),
    };
    let status = response.code.unwrap_or_default();
    let kept = response.version == Some(1);
    let mut head = Head { status, served: Served::Unnamed, retried: false, code: None, kept };
    let (mut told, mut chunked) = (None, false);
    let (mut attempts, mut parts) = (1_u32, 1_u32);
    for line in response.headers {
        let text = || std::str::from_utf8(line.value).ok().map(str::trim);
        let named = |name: &str| line.name.eq_ignore_ascii_case(name);
        if named("content-length") {
            let value: usize = text().and_then(|text| text.parse().ok()).ok_or(Unreadable::NotHttp)?;
            if told.is_some_and(|told| told != value) {
                return Err(Unreadable::NotHttp);
            }
            told = Some(value);
        } else if named("transfer-encoding") {
            chunked = text().is_some_and(|text| text.eq_ignore_ascii_case("chunked"));
            if !chunked {
                return Err(Unreadable::NotHttp);
            }
        } else if named("connection") {
            let says = |word| text().is_some_and(|text| text.eq_ignore_ascii_case(word));
            head.kept = (head.kept || says("keep-alive")) && !says("close");
        } else if named(headers::REGION) {
            head.served = text().map_or(Served::Unnamed, Served::read);
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
    let framing = match (chunked, told) {
        _ if status == StatusCode::NO_CONTENT || status == StatusCode::NOT_MODIFIED => Framing::Length(0),
        (true, _) => Framing::Chunked,
        (false, Some(length)) => Framing::Length(length),
        (false, None) => Framing::UntilClose,
    };
    Ok(Some((head, framing, length)))
}

#[cfg(test)]
mod tests {
    use super::*;

    type Got = Result<Option<(u16, String, bool)>, Unreadable>;

    /// Parses `bytes`, delivered in pieces of this size.
    fn read(bytes: &[u8], piece: usize, ends: bool) -> Got {
        let (mut reader, mut got) = (Reader::default(), None);
        let mut keep = |whole: Whole<'_>| {
            let body = String::from_utf8_lossy(whole.body).into_owned();
            got = Some((whole.head.status, body, whole.head.kept));
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

    fn check(bytes: &str, ends: bool, expected: Result<Option<(u16, &str, bool)>, Unreadable>) {
        let expected = expected.map(|some| some.map(|(status, body, kept)| (status, body.to_owned(), kept)));
        for piece in [bytes.len(), 1, 7] {
            assert_eq!(read(bytes.as_bytes(), piece, ends), expected, "{bytes:?} by {piece}");
        }
    }

    #[test]
    fn an_answer_is_whole_at_its_length_its_last_chunk_or_the_end() {
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
    fn an_answer_that_is_cut_short_is_none() {
        check("HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nhello", true, Ok(None));
        check("HTTP/1.1 200 OK\r\ncontent-le", true, Ok(None));
        check("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhel", true, Ok(None));
    }

    #[test]
    fn a_connection_is_kept_unless_somebody_says_otherwise() {
        check(
            "HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n",
            false,
            Ok(Some((200, "", false))),
        );
        check("HTTP/1.0 200 OK\r\ncontent-length: 0\r\n\r\n", false, Ok(Some((200, "", false))));
        let kept = "HTTP/1.0 200 OK\r\nconnection: keep-alive\r\ncontent-length: 0\r\n\r\n";
        check(kept, false, Ok(Some((200, "", true))));
        // Unsolicited bytes: they cannot be told from the next response.
        let more = "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nokmore";
        assert_eq!(read(more.as_bytes(), more.len(), false), Ok(Some((200, "ok".to_owned(), false))));
    }

    #[test]
    fn what_is_not_http_ends_the_connection() {
        check("SSH-2.0-OpenSSH_9.2\r\n", false, Err(Unreadable::NotHttp));
        check(
            "HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
            false,
            Err(Unreadable::NotHttp),
        );
        check("HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n", false, Err(Unreadable::NotHttp));
        check("HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\n", false, Err(Unreadable::NotHttp));
        check(
            "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nhello\r\n",
            false,
            Err(Unreadable::NotHttp),
        );
        check(
            "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhello\r\n",
            false,
            Err(Unreadable::NotHttp),
        );
    }

    #[test]
    fn an_answer_may_have_so_many_bytes_and_no_more() {
        let with = |length: usize| {
            let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {length}\r\n\r\n");
            read(head.as_bytes(), head.len(), false)
        };
        assert_eq!(with(ANSWER_BYTES_MAX), Ok(None));
        assert_eq!(with(ANSWER_BYTES_MAX + 1), Err(Unreadable::TooLarge));
    }

    #[test]
    fn the_head_tells_who_answered_and_why_not() {
        let bytes = b"HTTP/1.1 503 No\r\nX-Meridian-Region: aws/us-east-1\r\nx-meridian-attempts: 2\r\n\
            x-meridian-error: not_ready\r\ncontent-length: 0\r\n\r\n";
        let mut seen = None;
        Reader::default().take(bytes, |whole| seen = Some(whole.head)).unwrap();
        let head = seen.unwrap();
        assert_eq!(head.served, Served::read("aws/us-east-1"));
        assert_eq!((head.status, head.retried, head.code), (503, true, Some(ErrorCode::NotReady)));
    }

    #[test]
    fn the_parts_of_a_split_request_are_no_retries() {
        let retried = |lines: &str| {
            let bytes = format!("HTTP/1.1 200 OK\r\n{lines}content-length: 0\r\n\r\n");
            let mut seen = None;
            Reader::default().take(bytes.as_bytes(), |whole| seen = Some(whole.head.retried)).unwrap();
            seen.unwrap()
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
