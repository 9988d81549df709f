//! Endpoint and its connection pool.

use std::io::ErrorKind;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::task::{Context, Waker};
use std::time::Duration;

use bytes::Bytes;
use http::header::{ACCEPT, CONTENT_LENGTH, CONTENT_TYPE, HOST, TRANSFER_ENCODING, USER_AGENT};
use http::uri::PathAndQuery;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Uri};
use http_body_util::Full;
use tokio::io::ReadBuf;
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::http1::{self, Io};
use super::http2::Http2Connection;
use super::tls::{ClientTls, is_alpn_rejection};
use super::{HttpAttemptError, HttpProtocol, HttpResponse, check_status};
use crate::endpoint::parse_url;

/// Timeout of a connection attempt, so that another endpoint can be tried.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Maximum number of idle connections: as many as the client has requests in flight. The pool of a gateway has a limit of
/// its own.
const IDLE_MAX: usize = 1024;

const AGENT: &str = concat!("meridian-client/", env!("CARGO_PKG_VERSION"));

/// Client of one endpoint.
pub(crate) struct EndpointClient {
    uri: Uri,
    host: String,
    port: u16,
    /// Path prefix of the endpoint.
    base: String,
    key: Option<HeaderValue>,
    protocol: HttpProtocol,
    trust: Option<ClientTls>,
    idle: Mutex<Vec<Box<dyn Io>>>,
    sessions: tokio::sync::Mutex<Vec<Http2Connection>>,
    /// Whether the server declined HTTP/2 in ALPN.
    declined: AtomicBool,
    /// Whether this is an error, instead of a reason for HTTP/1.1.
    requires_http2: bool,
}

/// Request parts that are the same in all requests of an operation to one endpoint.
pub(crate) struct RequestTemplate {
    method: Method,
    uri: Uri,
    headers: HeaderMap,
    /// Serialized HTTP/1.1 head up to the value of `content-length`.
    head: Vec<u8>,
}

/// Returns whether a caller may set this header; headers that define message framing are reserved.
pub(in crate::client) fn is_settable(name: &HeaderName) -> bool {
    ![CONTENT_LENGTH, TRANSFER_ENCODING, HOST, http::header::CONNECTION, http::header::UPGRADE].contains(name)
}

impl EndpointClient {
    /// Creates the client for a URL, with or without `/v1`.
    pub(crate) fn new(
        url: &str,
        key: Option<HeaderValue>,
        protocol: HttpProtocol,
        trust: Option<ClientTls>,
    ) -> Result<EndpointClient, String> {
        let (uri, base) = parse_url("endpoint", url)?;
        let default_port = if uri.scheme_str() == Some("https") { 443 } else { 80 };
        Ok(EndpointClient {
            host: uri.host().unwrap_or_default().trim_matches(['[', ']']).to_owned(),
            port: uri.port_u16().unwrap_or(default_port),
            base,
            key,
            protocol,
            trust: (default_port == 443).then_some(trust).flatten(),
            idle: Mutex::new(Vec::new()),
            sessions: tokio::sync::Mutex::new(Vec::new()),
            declined: AtomicBool::new(false),
            requires_http2: false,
            uri,
        })
    }

    /// Makes requests fail with [`HttpAttemptError::Http2Declined`] if the server declines HTTP/2: measurements of both
    /// versions must not be mixed.
    pub(crate) fn requiring_http2(self) -> EndpointClient {
        EndpointClient { requires_http2: true, ..self }
    }

    /// Returns whether a URL is at this endpoint, and ends with `path`.
    pub(in crate::client) fn serves(&self, url: &str, path: &str) -> bool {
        let Ok(uri) = url.parse::<Uri>() else { return false };
        let default_port = if uri.scheme_str() == Some("https") { 443 } else { 80 };
        let host = uri.host().unwrap_or_default().trim_matches(['[', ']']);
        uri.scheme() == self.uri.scheme()
            && host.eq_ignore_ascii_case(&self.host)
            && uri.port_u16().unwrap_or(default_port) == self.port
            && uri.path_and_query().is_some_and(|found| found.as_str().ends_with(path))
            && !uri.authority().is_some_and(|authority| authority.as_str().contains('@'))
    }

    /// Prepares requests with this method, path and headers.
    pub(crate) fn outgoing(
        &self,
        method: &Method,
        path: &str,
        extra: &HeaderMap,
    ) -> Result<RequestTemplate, String> {
        let wrong = || format!("path {path:?}: is not a path; write it like /v1/embeddings");
        if !path.starts_with('/') {
            return Err(wrong());
        }
        let path_and_query: PathAndQuery = format!("{}{path}", self.base).parse().map_err(|_| wrong())?;
        let authority = self.uri.authority().map_or("", |authority| authority.as_str());
        let mut headers = HeaderMap::new();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        headers.insert(ACCEPT, HeaderValue::from_static("application/json"));
        headers.insert(USER_AGENT, HeaderValue::from_static(AGENT));
        if let Some(key) = &self.key {
            headers.insert(http::header::AUTHORIZATION, key.clone());
        }
        headers.extend(extra.clone());
        let mut head = format!("{method} {path_and_query} HTTP/1.1\r\nhost: {authority}\r\n").into_bytes();
        for (name, value) in &headers {
            head.extend_from_slice(name.as_str().as_bytes());
            head.extend_from_slice(b": ");
            head.extend_from_slice(value.as_bytes());
            head.extend_from_slice(b"\r\n");
        }
        head.extend_from_slice(b"content-length: ");
        let mut parts = self.uri.clone().into_parts();
        parts.path_and_query = Some(path_and_query);
        let uri = Uri::from_parts(parts).map_err(|_| wrong())?;
        Ok(RequestTemplate { method: method.clone(), uri, headers, head })
    }

    /// Sends a request and reads the response into `buffer`; an error status is an error.
    pub(in crate::client) async fn send(
        &self,
        out: &RequestTemplate,
        body: Vec<u8>,
        buffer: Vec<u8>,
    ) -> Result<HttpResponse, HttpAttemptError> {
        let (status, response) = self.exchange(out, body, buffer).await?;
        check_status(status, response)
    }

    /// Sends a request and reads the response into `buffer`, whatever its status.
    pub(crate) async fn exchange(
        &self,
        out: &RequestTemplate,
        body: Vec<u8>,
        buffer: Vec<u8>,
    ) -> Result<(u16, HttpResponse), HttpAttemptError> {
        if self.protocol == HttpProtocol::Http2
            && let Some(session) = self.session().await?
        {
            let mut request = Request::new(Full::new(Bytes::from(body)));
            *request.method_mut() = out.method.clone();
            *request.uri_mut() = out.uri.clone();
            *request.headers_mut() = out.headers.clone();
            return session.exchange(request, buffer).await;
        }
        let mut request = Vec::with_capacity(out.head.len() + 24 + body.len());
        request.extend_from_slice(&out.head);
        request.extend_from_slice(body.len().to_string().as_bytes());
        request.extend_from_slice(b"\r\n\r\n");
        request.extend_from_slice(&body);
        let mut io = match self.take_idle() {
            Some(io) => io,
            None => self.connect().await?.0,
        };
        let is_head = out.method == Method::HEAD;
        let (status, response, reusable) = http1::exchange(&mut *io, &request, is_head, buffer).await?;
        if reusable {
            self.put_idle(io);
        }
        Ok((status, response))
    }

    /// Returns an HTTP/2 connection with a free stream; `None` if the server does not support HTTP/2.
    async fn session(&self) -> Result<Option<Http2Connection>, HttpAttemptError> {
        if self.declined.load(Ordering::Relaxed) {
            return Ok(None);
        }
        // Held during the connection attempt: other waiting requests will most likely share the new connection.
        let mut sessions = self.sessions.lock().await;
        sessions.retain(|session| !session.is_closed());
        if let Some(session) = sessions.iter().find(|session| session.has_capacity()) {
            return Ok(Some(session.clone()));
        }
        if self.declined.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let (io, agreed) = self.connect().await?;
        if !agreed && self.requires_http2 {
            return Err(HttpAttemptError::Http2Declined);
        }
        if !agreed {
            self.declined.store(true, Ordering::Relaxed);
            self.put_idle(io);
            return Ok(None);
        }
        let session = Http2Connection::open(io).await?;
        sessions.push(session.clone());
        Ok(Some(session))
    }

    /// Opens a connection; returns also whether it speaks HTTP/2.
    async fn connect(&self) -> Result<(Box<dyn Io>, bool), HttpAttemptError> {
        let connected = timeout(CONNECT_TIMEOUT, async {
            let tcp = TcpStream::connect((self.host.as_str(), self.port)).await?;
            tcp.set_nodelay(true)?;
            Ok(match &self.trust {
                None => (Box::new(tcp) as Box<dyn Io>, self.protocol == HttpProtocol::Http2),
                Some(trust) => {
                    let (stream, agreed) = trust.secure(tcp, &self.host).await?;
                    (Box::new(stream) as Box<dyn Io>, agreed)
                }
            })
        });
        let failed = |error: std::io::Error| match self.requires_http2 && is_alpn_rejection(&error) {
            true => HttpAttemptError::Http2Declined,
            false => HttpAttemptError::Unreachable(error.to_string()),
        };
        connected.await.unwrap_or_else(|_| Err(ErrorKind::TimedOut.into())).map_err(failed)
    }

    /// Returns the most recently used idle connection that is still usable.
    fn take_idle(&self) -> Option<Box<dyn Io>> {
        loop {
            let mut io = self.idle().pop()?;
            let mut byte = [0];
            let mut buffer = ReadBuf::new(&mut byte);
            let mut context = Context::from_waker(Waker::noop());
            // Readable means closed by the server, or unsolicited bytes: unusable in both cases.
            if Pin::new(&mut *io).poll_read(&mut context, &mut buffer).is_pending() {
                return Some(io);
            }
        }
    }

    fn put_idle(&self, io: Box<dyn Io>) {
        let mut idle = self.idle();
        if idle.len() < IDLE_MAX {
            idle.push(io);
        }
    }

    fn idle(&self) -> MutexGuard<'_, Vec<Box<dyn Io>>> {
        self.idle.lock().expect("no panic while the lock is held")
    }

    /// Returns the URL for error messages.
    pub(in crate::client) fn name(&self) -> String {
        self.uri.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn endpoint_client(url: &str) -> Result<EndpointClient, String> {
        EndpointClient::new(url, None, HttpProtocol::Http1, None)
    }

    #[test]
    fn endpoint_urls_are_those_of_openai_clients() {
        let check = |url: &str, expected: &str| {
            let out = endpoint_client(url)
                .unwrap()
                .outgoing(&Method::POST, "/v1/embeddings", &HeaderMap::new())
                .unwrap();
            assert_eq!(out.uri.to_string(), expected, "{url}");
            let head = String::from_utf8(out.head).unwrap();
            assert!(head.starts_with(&format!("POST {} HTTP/1.1\r\nhost: ", out.uri.path())), "{head}");
        };
        check("http://127.0.0.1:8080", "http://127.0.0.1:8080/v1/embeddings");
        check("https://a.b/v1/", "https://a.b/v1/embeddings");
        check("http://[::1]:1/under/deployments/m/v1", "http://[::1]:1/under/deployments/m/v1/embeddings");
        for wrong in ["", "127.0.0.1:80", "ftp://a", "http://", "http://a?b", "http://user@a", "a b"] {
            assert!(endpoint_client(wrong).is_err(), "{wrong}");
        }
        let of_path =
            |path| endpoint_client("http://a").unwrap().outgoing(&Method::POST, path, &HeaderMap::new());
        for wrong in ["", "x", "/a b", "/a\r\nx: y"] {
            assert!(of_path(wrong).is_err(), "{wrong:?}");
        }
        assert!(of_path("/a?b=c").is_ok());
    }
}
