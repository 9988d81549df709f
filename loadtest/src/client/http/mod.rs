//! Sends one request to one endpoint and reads the response into one buffer.
//!
//! HTTP/1.1 is implemented here ([`http1`]). A bulk client sends few, large requests and spends its time on the bytes
//! of the responses. A general client passes frames between tasks and reassembles them, which costs as much as
//! decoding. Here a connection belongs to the request that uses it and reads directly into the buffer that is decoded.
//! HTTP/2 is hyper's ([`http2`]). [`pool`] keeps connections, [`tls`] secures them.

mod http1;
mod http2;
mod pool;
mod tls;

pub(crate) use http2::STREAMS_MAX;
pub(super) use pool::is_settable;
pub(crate) use pool::{EndpointClient, RequestTemplate};
pub(crate) use tls::{ClientTls, is_alpn_rejection};

use std::ops::Range;
use std::time::Duration;

/// Maximum size of a response: 2048 rows of 4096 numbers with 12 digits each, with some margin.
pub const RESPONSE_BYTES_MAX: usize = 128 << 20;

/// HTTP version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum HttpProtocol {
    /// HTTP/1.1, one connection per request in flight. The faster option (docs/benchmarks.md).
    #[default]
    Http1,
    /// HTTP/2, many requests on few connections. Over TLS negotiated by ALPN, with HTTP/1.1 as the fallback; without
    /// TLS by prior knowledge.
    Http2,
}

/// Error of an attempt.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HttpAttemptError {
    /// No connection to the server could be opened.
    #[error("connection failed: {0}")]
    Unreachable(String),
    /// The connection was closed before the response was complete.
    #[error("connection closed: {0}")]
    ConnectionClosed(String),
    /// The response was not complete within the timeout.
    #[error("timeout")]
    Timeout,
    /// The server responded with this error status.
    #[error("status {status}: {message}")]
    ErrorStatus {
        /// Status code.
        status: u16,
        /// Start of the response body.
        message: String,
        /// Value of `retry-after`.
        retry_after: Option<Duration>,
    },
    /// The server redirects the request, and the client does not follow: the API key is sent to no host outside of its endpoints.
    #[error(
        "redirected to {location}, and the client follows only one redirect, to an endpoint of its own list; add that URL to \
         the endpoints: {message}"
    )]
    Redirected {
        /// URL that the server names.
        location: String,
        /// Start of the response body.
        message: String,
    },
    /// The response is not valid HTTP.
    #[error("invalid HTTP response: {0}")]
    Malformed(String),
    /// The body of the response is longer than the limit.
    #[error("invalid HTTP response: body exceeds {RESPONSE_BYTES_MAX} bytes; send fewer texts per request")]
    TooLarge,
    /// The server does not select HTTP/2 in the TLS handshake, and the client may not fall back to HTTP/1.1.
    #[error("server declined HTTP/2")]
    Http2Declined,
}

/// Headers of a response, one `name:value` per line, names in lower case.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HeaderLines(String);

impl HeaderLines {
    pub(super) fn push(&mut self, name: &str, value: &[u8]) {
        self.0.extend(name.chars().map(|c| c.to_ascii_lowercase()));
        self.0.push(':');
        self.0.push_str(&String::from_utf8_lossy(value).replace(['\r', '\n'], " "));
        self.0.push('\n');
    }

    /// Iterates over name and value in the order of reception.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.lines().filter_map(|line| line.split_once(':'))
    }

    /// Returns the first value of a header; `name` in lower case.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.iter().find(|(key, _)| *key == name).map(|(_, value)| value)
    }
}

/// Response with a success status.
#[derive(Debug)]
pub(crate) struct HttpResponse {
    pub(super) headers: HeaderLines,
    /// Buffer that holds the response; reused for the next one.
    pub(super) buffer: Vec<u8>,
    /// Range of the body in the buffer.
    pub(super) body: Range<usize>,
}

impl HttpResponse {
    pub(crate) fn headers(&self) -> &HeaderLines {
        &self.headers
    }

    pub(crate) fn body(&self) -> &[u8] {
        &self.buffer[self.body.clone()]
    }
}

/// Maximum length of a response body that is quoted in an error.
const MESSAGE_BYTES_MAX: usize = 512;

/// Returns the response if its status is 2xx, otherwise an error.
fn check_status(status: u16, response: HttpResponse) -> Result<HttpResponse, HttpAttemptError> {
    if (200..300).contains(&status) {
        return Ok(response);
    }
    let body = response.body();
    let message = String::from_utf8_lossy(&body[..body.len().min(MESSAGE_BYTES_MAX)]).trim().to_owned();
    // The statuses of a redirect that keeps method and body.
    if let (307 | 308, Some(location)) = (status, response.headers.get("location")) {
        return Err(HttpAttemptError::Redirected { location: location.trim().to_owned(), message });
    }
    // Only delta-seconds are supported; an HTTP date is ignored.
    let retry_after =
        response.headers.get(replica_api::headers::RETRY_AFTER).and_then(|wait| wait.trim().parse().ok());
    Err(HttpAttemptError::ErrorStatus { status, message, retry_after: retry_after.map(Duration::from_secs) })
}
