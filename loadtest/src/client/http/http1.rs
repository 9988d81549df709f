//! HTTP/1.1 exchange: sends a request and reads the response into one buffer.
//!
//! Parsing is strict where leniency would let two parsers see different responses (response smuggling): both a length
//! and chunked encoding, two different lengths, or bytes after the end are rejected. A connection is reused only after
//! a response that ended at its declared end.

use std::ops::Range;

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};

use super::{HEAD_BYTES_MAX, HeaderLines, HttpAttemptError, HttpResponse, RESPONSE_BYTES_MAX};

/// Transport for a request.
pub(super) trait Io: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Io for T {}

/// Maximum number of header lines of a response.
const HEADERS_MAX: usize = 96;

/// Capacity reserved in a new buffer for the first read.
const FIRST_READ_BYTES: usize = 64 << 10;

/// Framing of a response body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ResponseFraming {
    Length(usize),
    Chunks,
    UntilClosed,
}

#[derive(Debug)]
struct ParsedHead {
    status: u16,
    headers: HeaderLines,
    bytes: usize,
    framing: ResponseFraming,
    reusable: bool,
}

/// Sends a request and reads the response into `buffer`. `bodiless` marks requests whose response never has a body
/// (HEAD). Returns the status, the response, and whether the connection can be reused.
pub(super) async fn exchange(
    io: &mut dyn Io,
    request: &[u8],
    bodiless: bool,
    mut buffer: Vec<u8>,
) -> Result<(u16, HttpResponse, bool), HttpAttemptError> {
    // A server may reject a request before reading all of it; its response is more informative than the write error.
    let sent = io.write_all(request).await;
    buffer.clear();
    buffer.reserve(FIRST_READ_BYTES);
    let head = match head(io, &mut buffer, bodiless).await {
        Ok(head) => head,
        Err(failure) => {
            return Err(sent
                .err()
                .map_or(failure, |error| HttpAttemptError::ConnectionClosed(error.to_string())));
        }
    };
    let ParsedHead { status, headers, bytes, framing, reusable } = head;
    let (body, ended) = match framing {
        ResponseFraming::Length(length) => {
            let end = bytes + length;
            buffer.reserve(end.saturating_sub(buffer.len()));
            while buffer.len() < end {
                more(io, &mut buffer).await?;
            }
            (bytes..end, buffer.len() == end)
        }
        ResponseFraming::Chunks => chunks(io, &mut buffer, bytes).await?,
        ResponseFraming::UntilClosed => {
            while io.read_buf(&mut buffer).await.map_err(broken)? > 0 {
                within_limit(buffer.len() - bytes)?;
            }
            (bytes..buffer.len(), false)
        }
    };
    Ok((status, HttpResponse { headers, buffer, body }, reusable && ended && sent.is_ok()))
}

/// Reads the head of the final response; skips interim (1xx) responses.
async fn head(io: &mut dyn Io, buffer: &mut Vec<u8>, bodiless: bool) -> Result<ParsedHead, HttpAttemptError> {
    loop {
        if let Some(head) = parse(buffer, bodiless)? {
            if head.status >= 200 {
                return Ok(head);
            }
            if head.status == 101 {
                return Err(malformed("unsolicited protocol switch"));
            }
            buffer.drain(..head.bytes);
        } else if buffer.len() > HEAD_BYTES_MAX {
            return Err(malformed("head is too long"));
        } else {
            more(io, buffer).await?;
        }
    }
}

/// Parses the head at the start of `bytes`; `None` while it is incomplete.
fn parse(bytes: &[u8], bodiless: bool) -> Result<Option<ParsedHead>, HttpAttemptError> {
    let mut fields = [httparse::EMPTY_HEADER; HEADERS_MAX];
    let mut response = httparse::Response::new(&mut fields);
    let length = match response.parse(bytes) {
        Ok(httparse::Status::Complete(length)) => length,
        Ok(httparse::Status::Partial) => return Ok(None),
        Err(error) => return Err(malformed(&error.to_string())),
    };
    let status = response.code.unwrap_or_default();
    let mut headers = HeaderLines::default();
    let mut reusable = response.version == Some(1);
    let (mut content_length, mut chunked) = (None, false);
    for field in response.headers.iter() {
        headers.push(field.name, field.value);
        if field.name.eq_ignore_ascii_case("content-length") {
            let text = std::str::from_utf8(field.value).unwrap_or_default().trim();
            let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
            let declared: usize = text
                .parse()
                .ok()
                .filter(|_| digits)
                .ok_or_else(|| malformed("content-length is not a number"))?;
            if content_length.is_some_and(|earlier| earlier != declared) {
                return Err(malformed("conflicting content-length headers"));
            }
            content_length = Some(declared);
        } else if field.name.eq_ignore_ascii_case("transfer-encoding") {
            if !field.value.trim_ascii().eq_ignore_ascii_case(b"chunked") {
                return Err(malformed("unsupported transfer encoding"));
            }
            chunked = true;
        } else if field.name.eq_ignore_ascii_case("connection") {
            let has = |word: &[u8]| {
                field.value.split(|byte| *byte == b',').any(|one| one.trim_ascii().eq_ignore_ascii_case(word))
            };
            reusable = (reusable || has(b"keep-alive")) && !has(b"close");
        }
    }
    let framing = match (chunked, content_length) {
        _ if bodiless || status < 200 || matches!(status, 204 | 304) => ResponseFraming::Length(0),
        (true, Some(_)) => return Err(malformed("both content-length and chunked encoding")),
        (true, None) => ResponseFraming::Chunks,
        (false, Some(length)) => {
            within_limit(length)?;
            ResponseFraming::Length(length)
        }
        (false, None) => ResponseFraming::UntilClosed,
    };
    Ok(Some(ParsedHead { status, headers, bytes: length, framing, reusable }))
}

/// Joins the chunks from `begin` on. Returns the range of the body, and whether no bytes follow it.
async fn chunks(
    io: &mut dyn Io,
    buffer: &mut Vec<u8>,
    begin: usize,
) -> Result<(Range<usize>, bool), HttpAttemptError> {
    // The body so far ends at `end`; unparsed bytes begin at `at`.
    let (mut end, mut at) = (begin, begin);
    loop {
        let line = line(io, buffer, at).await?;
        let text = std::str::from_utf8(&buffer[at..line]).unwrap_or_default();
        let size = text.split(';').next().unwrap_or_default().trim();
        let digits = !size.is_empty() && size.bytes().all(|byte| byte.is_ascii_hexdigit());
        let size = usize::from_str_radix(size, 16).ok().filter(|_| digits);
        let size = size.ok_or_else(|| malformed("chunk without a size"))?;
        at = line + 2;
        if size == 0 {
            break;
        }
        within_limit((end - begin).saturating_add(size))?;
        let next = at + size + 2;
        buffer.reserve(next.saturating_sub(buffer.len()));
        while buffer.len() < next {
            more(io, buffer).await?;
        }
        if &buffer[next - 2..next] != b"\r\n" {
            return Err(malformed("chunk is longer than its size"));
        }
        buffer.copy_within(at..at + size, end);
        (end, at) = (end + size, next);
    }
    // Trailers, up to an empty line.
    let trailers = at;
    loop {
        let line = line(io, buffer, at).await?;
        let empty = line == at;
        at = line + 2;
        if empty {
            return Ok((begin..end, buffer.len() == at));
        }
        if at - trailers > HEAD_BYTES_MAX {
            return Err(malformed("trailers are too long"));
        }
    }
}

/// Returns the end of the line that begins at `at`, before its CRLF.
async fn line(io: &mut dyn Io, buffer: &mut Vec<u8>, at: usize) -> Result<usize, HttpAttemptError> {
    /// Maximum length of a line: sizes are a few digits; extensions and trailers are ignored.
    const LINE_BYTES_MAX: usize = 8 << 10;
    loop {
        if let Some(found) = memchr::memmem::find(&buffer[at..], b"\r\n") {
            return Ok(at + found);
        }
        if buffer.len() - at > LINE_BYTES_MAX {
            return Err(malformed("chunk size line is too long"));
        }
        more(io, buffer).await?;
    }
}

async fn more(io: &mut dyn Io, buffer: &mut Vec<u8>) -> Result<(), HttpAttemptError> {
    match io.read_buf(buffer).await {
        Ok(0) => Err(HttpAttemptError::ConnectionClosed("end of stream".to_owned())),
        Ok(_) => Ok(()),
        Err(error) => Err(broken(error)),
    }
}

fn within_limit(bytes: usize) -> Result<(), HttpAttemptError> {
    if bytes > RESPONSE_BYTES_MAX {
        return Err(malformed(&format!(
            "body exceeds {RESPONSE_BYTES_MAX} bytes; send fewer texts per request"
        )));
    }
    Ok(())
}

fn broken(error: std::io::Error) -> HttpAttemptError {
    HttpAttemptError::ConnectionClosed(error.to_string())
}

fn malformed(what: &str) -> HttpAttemptError {
    HttpAttemptError::Malformed(what.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::duplex;

    /// Parses `response`, which is delivered in pieces of `piece` bytes and then ends.
    async fn read(response: &[u8], piece: usize) -> Result<(u16, String, bool), HttpAttemptError> {
        let (mut ours, mut theirs) = duplex(1 << 20);
        let response = response.to_vec();
        let server = async move {
            let mut request = [0; 4];
            theirs.read_exact(&mut request).await.expect("a request");
            for piece in response.chunks(piece) {
                theirs.write_all(piece).await.expect("the client reads");
                tokio::task::yield_now().await;
            }
        };
        let exchange = exchange(&mut ours, b"ping", false, Vec::new());
        let (got, ()) = tokio::join!(exchange, server);
        got.map(|(status, response, reusable)| {
            (status, String::from_utf8_lossy(response.body()).into_owned(), reusable)
        })
    }

    async fn check(response: &str, expected: Option<(u16, &str, bool)>) {
        for piece in [1, 7, 4096] {
            let got = read(response.as_bytes(), piece).await;
            let as_expected = match (&got, expected) {
                (Ok((status, body, reusable)), Some(expected)) => {
                    (*status, body.as_str(), *reusable) == expected
                }
                (got, expected) => got.is_err() && expected.is_none(),
            };
            assert!(as_expected, "{response:?} in pieces of {piece}: {got:?}");
        }
    }

    #[tokio::test]
    async fn a_response_ends_at_its_declared_end() {
        check("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi", Some((200, "hi", true))).await;
        check(
            "HTTP/1.1 200 OK\r\nconnection: Close\r\ncontent-length: 2\r\n\r\nhi",
            Some((200, "hi", false)),
        )
        .await;
        check("HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nhi", Some((200, "hi", false))).await;
        check("HTTP/1.1 200 OK\r\n\r\nall of it", Some((200, "all of it", false))).await;
        check("HTTP/1.1 204 No\r\n\r\n", Some((204, "", true))).await;
        check("HTTP/1.1 100 Go\r\n\r\nHTTP/1.1 429 No\r\ncontent-length: 0\r\n\r\n", Some((429, "", true)))
            .await;
        let chunked = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n";
        check(
            &format!("{chunked}2\r\nhi\r\nA;x=y\r\n 0123456\r\n\r\n0\r\n\r\n"),
            Some((200, "hi 0123456\r\n", true)),
        )
        .await;
        check(&format!("{chunked}0\r\nx-trailer: 1\r\n\r\n"), Some((200, "", true))).await;
    }

    #[tokio::test]
    async fn a_response_with_an_invalid_end_is_rejected() {
        check("", None).await;
        check("HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nhi", None).await;
        check("HTTP/1.1 200 OK\r\ncontent-length: -2\r\n\r\nhi", None).await;
        check("HTTP/1.1 200 OK\r\ncontent-length: +2\r\n\r\nhi", None).await;
        check("HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\nhi!", None).await;
        check("HTTP/1.1 200 OK\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\nhi", None).await;
        check("HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\nhi", None).await;
        check("HTTP/1.1 101 Switch\r\n\r\n", None).await;
        check("SSH-2.0-OpenSSH\r\n\r\n", None).await;
        let chunked = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n";
        for rest in ["2\r\nhi\r\n", "2\r\nhi!\r\n0\r\n\r\n", "x\r\n", "-1\r\n", "2\r\nh"] {
            check(&format!("{chunked}{rest}"), None).await;
        }
    }

    #[tokio::test]
    async fn a_connection_with_bytes_after_the_response_is_not_reused() {
        let got = read(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi!", 4096).await;
        assert_eq!(got, Ok((200, "hi".to_owned(), false)));
    }

    #[test]
    fn heads_and_bodies_have_limits() {
        let head = |length: usize| format!("HTTP/1.1 200 OK\r\ncontent-length: {length}\r\n\r\n");
        assert!(parse(head(RESPONSE_BYTES_MAX).as_bytes(), false).is_ok());
        assert!(parse(head(RESPONSE_BYTES_MAX + 1).as_bytes(), false).is_err());
        let many = |count: usize| format!("HTTP/1.1 200 OK\r\n{}\r\n", "a: b\r\n".repeat(count));
        assert!(parse(many(HEADERS_MAX).as_bytes(), false).is_ok());
        assert!(parse(many(HEADERS_MAX + 1).as_bytes(), false).is_err());
    }
}
