//! Head of a request to the next hop.

use http::header::HOST;
use http::uri::{Authority, PathAndQuery, Scheme, Uri};
use http::{HeaderName, HeaderValue, Method, Request};
use std::borrow::Cow;

/// Method of a request to the next hop. HEAD is excluded: the content-length of its response is that of an absent body,
/// so the reader would have to know the method. A client's HEAD is answered with the head of a GET response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum UpstreamMethod {
    Get,
    Post,
    Delete,
}

impl UpstreamMethod {
    /// Returns the method with which a client's request is forwarded.
    pub(crate) fn for_client(method: &Method) -> UpstreamMethod {
        match *method {
            Method::GET | Method::HEAD => UpstreamMethod::Get,
            Method::DELETE => UpstreamMethod::Delete,
            _ => UpstreamMethod::Post,
        }
    }

    fn as_http(self) -> Method {
        match self {
            UpstreamMethod::Get => Method::GET,
            UpstreamMethod::Post => Method::POST,
            UpstreamMethod::Delete => Method::DELETE,
        }
    }
}

/// Head of a request to the next hop, in wire format.
#[derive(Clone, Debug)]
pub(crate) struct RequestHead {
    method: UpstreamMethod,
    path: Cow<'static, str>,
    /// One line per header.
    lines: Vec<u8>,
}

/// Host of every request to a next hop; the connection determines the actual peer.
pub(crate) const AUTHORITY: &str = "region";
/// Initial capacity for the headers of a usual request, so that they are allocated once.
const LINES_BYTES: usize = 1024;

impl RequestHead {
    pub(crate) fn new(method: UpstreamMethod) -> RequestHead {
        RequestHead { method, path: Cow::Borrowed("/"), lines: Vec::with_capacity(LINES_BYTES) }
    }

    /// Returns the same head for another path.
    pub(crate) fn for_path(&self, path: impl Into<Cow<'static, str>>) -> RequestHead {
        let mut lines = Vec::with_capacity(LINES_BYTES);
        lines.extend_from_slice(&self.lines);
        RequestHead { method: self.method, path: path.into(), lines }
    }

    /// Adds a header of ours, or one with a [valid value](is_valid_header_value).
    pub(crate) fn put(&mut self, name: &str, value: impl AsRef<[u8]>) {
        let value = value.as_ref();
        // A line break in a client's value would inject a header or a request.
        assert!(is_valid_header_value(value), "the value of {name} is not a valid header value");
        for part in [name.as_bytes(), b": ", value, b"\r\n"] {
            self.lines.extend_from_slice(part);
        }
    }

    /// Serializes the head for HTTP/1.1.
    pub(crate) fn to_http1(&self) -> Vec<u8> {
        let method = self.method.as_http();
        let parts =
            [method.as_str().as_bytes(), b" ", self.path.as_bytes(), b" HTTP/1.1\r\n", &self.lines, b"\r\n"];
        parts.concat()
    }

    /// Converts the head for HTTP/2.
    pub(crate) fn to_http2(&self) -> Request<()> {
        let mut parts = http::uri::Parts::default();
        parts.scheme = Some(Scheme::HTTPS);
        parts.authority = Some(Authority::from_static(AUTHORITY));
        parts.path_and_query = Some(match &self.path {
            Cow::Borrowed(path) => PathAndQuery::from_static(path),
            Cow::Owned(path) => path.parse().expect("a path that was made of valid parts"),
        });
        let mut request = Request::new(());
        *request.uri_mut() = Uri::from_parts(parts).expect("scheme, authority and path are set");
        *request.method_mut() = self.method.as_http();
        for line in self.lines.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
            let colon = line.iter().position(|byte| *byte == b':').expect("a line contains a colon");
            let (name, value) = (&line[..colon], &line[colon + 2..line.len() - 1]);
            if name != HOST.as_str().as_bytes() {
                let name = HeaderName::from_bytes(name).expect("our header names are valid");
                let value = HeaderValue::from_bytes(value).expect("checked when it was added");
                request.headers_mut().append(name, value);
            }
        }
        request
    }
}

/// Returns whether a value cannot end its header line (RFC 9110, 5.5). Every byte is read, so that several are compared at once.
pub(crate) fn is_valid_header_value(value: &[u8]) -> bool {
    value.iter().fold(true, |valid, byte| valid & ((*byte >= b' ' && *byte != 0x7f) | (*byte == b'\t')))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_head_is_serialized_for_both_protocols() {
        let mut head = RequestHead::new(UpstreamMethod::Post);
        head.put("host", "region");
        let mut other = head.for_path("/v1/embeddings");
        other.put("x-request-id", "a\tb c~é");
        assert_eq!(head.to_http1(), b"POST / HTTP/1.1\r\nhost: region\r\n\r\n");
        let wire = "POST /v1/embeddings HTTP/1.1\r\nhost: region\r\nx-request-id: a\tb c~é\r\n\r\n";
        assert_eq!(other.to_http1(), wire.as_bytes());
        let request = other.to_http2();
        assert_eq!(
            (request.method(), request.uri().to_string()),
            (&Method::POST, "https://region/v1/embeddings".to_owned())
        );
        let headers: Vec<_> =
            request.headers().iter().map(|(name, value)| (name.as_str(), value.as_bytes())).collect();
        assert_eq!(headers, [("x-request-id", "a\tb c~é".as_bytes())], "host is replaced by the authority");
    }

    #[test]
    fn a_head_request_is_forwarded_as_get() {
        for (method, forwarded) in [(Method::HEAD, "GET "), (Method::GET, "GET "), (Method::POST, "POST ")] {
            let head = RequestHead::new(UpstreamMethod::for_client(&method));
            assert!(head.to_http1().starts_with(forwarded.as_bytes()), "{method}");
            assert_eq!(head.to_http2().method().as_str(), forwarded.trim(), "{method}");
        }
    }

    #[test]
    fn values_with_line_breaks_or_control_characters_are_invalid() {
        for value in ["a\r\nx: y", "a\nb", "a\rb", "a\0b", "a\x7fb"] {
            assert!(!is_valid_header_value(value.as_bytes()), "{value:?}");
        }
    }
}
