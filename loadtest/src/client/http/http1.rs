//! HTTP/1.1 exchange: sends a request and reads the response into one buffer.
//!
//! The package `http1` parses the response and rejects an ambiguous one. A connection is reused only after a response that
//! ended at its declared end.

use http1::{ResponseAssembler, ResponseError};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};

use super::{HeaderLines, HttpAttemptError, HttpResponse, RESPONSE_BYTES_MAX};

/// Transport for a request.
pub(super) trait Io: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Io for T {}

/// Capacity reserved in a new buffer for the first read.
const FIRST_READ_BYTES: usize = 64 << 10;

/// Sends a request and reads the response into `buffer`. `is_head` marks a HEAD request, whose response has no body.
/// Returns the status, the response, and whether the connection can be reused.
pub(super) async fn exchange(
    io: &mut dyn Io,
    request: &[u8],
    is_head: bool,
    mut buffer: Vec<u8>,
) -> Result<(u16, HttpResponse, bool), HttpAttemptError> {
    // A server may reject a request before reading all of it; its response is more informative than the write error.
    let sent = io.write_all(request).await;
    buffer.clear();
    buffer.reserve(FIRST_READ_BYTES);
    let mut response = ResponseAssembler::new(RESPONSE_BYTES_MAX, is_head);
    if let Err(failure) = receive(io, &mut buffer, &mut response).await {
        return Err(match sent {
            Err(error) if !response.has_head() => HttpAttemptError::ConnectionClosed(error.to_string()),
            _ => failure,
        });
    }
    let ((status, headers), body, reusable) = response.take(buffer.len()).expect("the response is complete");
    Ok((status, HttpResponse { headers, buffer, body }, reusable && sent.is_ok()))
}

/// Reads a complete response into `buffer`.
async fn receive(
    io: &mut dyn Io,
    buffer: &mut Vec<u8>,
    response: &mut ResponseAssembler<(u16, HeaderLines)>,
) -> Result<(), HttpAttemptError> {
    let closed = |reason: String| Err(HttpAttemptError::ConnectionClosed(reason));
    loop {
        match io.read_buf(buffer).await {
            Ok(0) if response.ends_with_connection() => return Ok(()),
            Ok(0) => return closed("end of stream".to_owned()),
            Ok(_) => {}
            Err(error) => return closed(error.to_string()),
        }
        let complete = response.advance(buffer, |head| {
            let mut headers = HeaderLines::default();
            head.headers.iter().for_each(|header| headers.push(header.name, header.value));
            (head.status, headers)
        });
        match complete {
            Ok(true) => return Ok(()),
            Ok(false) => buffer.reserve(response.remaining()),
            Err(ResponseError::TooLarge) => return Err(HttpAttemptError::TooLarge),
            Err(ResponseError::Malformed(reason)) => {
                return Err(HttpAttemptError::Malformed(reason.to_string()));
            }
        }
    }
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
    async fn a_response_ends_at_its_declared_end_and_is_otherwise_rejected() {
        check("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi", Some((200, "hi", true))).await;
        check("HTTP/1.1 200 OK\r\n\r\nall of it", Some((200, "all of it", false))).await;
        check("HTTP/1.1 100 Go\r\n\r\nHTTP/1.1 429 No\r\ncontent-length: 0\r\n\r\n", Some((429, "", true)))
            .await;
        let chunked =
            "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\nA;x=y\r\n 0123456\r\n\r\n";
        check(&format!("{chunked}0\r\nx-trailer: 1\r\n\r\n"), Some((200, "hi 0123456\r\n", true))).await;
        check(chunked, None).await;
        check("", None).await;
        check("HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nhi", None).await;
        check("SSH-2.0-OpenSSH\r\n\r\n", None).await;
    }

    #[tokio::test]
    async fn the_size_of_a_response_is_limited() {
        let head = |length: usize| format!("HTTP/1.1 200 OK\r\ncontent-length: {length}\r\n\r\n");
        let closed = HttpAttemptError::ConnectionClosed("end of stream".to_owned());
        assert_eq!(read(head(RESPONSE_BYTES_MAX).as_bytes(), 4096).await, Err(closed));
        assert_eq!(
            read(head(RESPONSE_BYTES_MAX + 1).as_bytes(), 4096).await,
            Err(HttpAttemptError::TooLarge)
        );
    }

    #[tokio::test]
    async fn a_connection_with_bytes_after_the_response_is_not_reused() {
        let got = read(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi!", 4096).await;
        assert_eq!(got, Ok((200, "hi".to_owned(), false)));
    }
}
