//! Client of a Kubernetes API server: requests and watches over HTTP/1.1 with JSON, and a token that is read again for
//! each request because Kubernetes rotates it every hour.
//!
//! Each request has a connection of its own. There are a few per minute and one that stays open, the watch, so a pool
//! would save nothing, and a connection that hangs blocks only its own request.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HOST};
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use serde::de::DeserializeOwned;
use serde_json::Value;
use supervision::task::contained;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use crate::config::KubernetesConfig;

/// Time limit of a request, from connecting to the last byte of the response.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum bytes of a response or of a line of a watch: etcd lets an API server store 1.5 MiB per object, and a list
/// has at most some hundreds of pods.
const RESPONSE_BYTES_MAX: usize = 32 << 20;
/// Time after which a silent watch counts as broken: an API server sends a bookmark about every minute.
const WATCH_IDLE_TIMEOUT: Duration = Duration::from_secs(150);

/// Reason why a request failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum ApiError {
    /// The API server is unreachable, or its response is malformed HTTP.
    #[error("{operation}: {error}")]
    Io { operation: &'static str, error: io::Error },
    /// The API server of Kubernetes did not respond in time.
    #[error("no response within {} s", TIMEOUT.as_secs())]
    Timeout,
    /// The API server of Kubernetes sent a response that is not JSON of the expected schema. Check that the address is
    /// that of an API server.
    #[error("unreadable response: {0}")]
    Schema(#[from] serde_json::Error),
    /// The API server of Kubernetes rejected the request. With 401 or 403 check the permissions of the spoke.
    #[error("rejected with {status}: {reason}")]
    Rejected { status: StatusCode, reason: String },
}

impl ApiError {
    /// Another client has changed the object (409).
    pub(super) fn is_conflict(&self) -> bool {
        matches!(self, ApiError::Rejected { status: StatusCode::CONFLICT, .. })
    }

    /// The resource version is too old (410): the objects have to be listed again.
    pub(super) fn is_expired(&self) -> bool {
        matches!(self, ApiError::Rejected { status: StatusCode::GONE, .. })
    }
}

fn io_error<E: Into<Box<dyn std::error::Error + Send + Sync>>>(
    operation: &'static str,
) -> impl FnOnce(E) -> ApiError {
    move |error| ApiError::Io { operation, error: io::Error::other(error) }
}

/// API server.
#[derive(Clone)]
pub(super) struct Api {
    host: String,
    port: u16,
    /// Host and port, as in the URL.
    authority: String,
    tls: Option<(TlsConnector, ServerName<'static>)>,
    token_file: Option<PathBuf>,
}

/// Body of a request.
pub(super) enum RequestBody {
    Empty,
    /// Replaces the whole object.
    Replace(Value),
    /// A merge patch (RFC 7386).
    MergePatch(Value),
}

impl Api {
    /// Creates the client.
    ///
    /// # Errors
    ///
    /// When the CA file is unusable.
    pub(super) fn new(config: &KubernetesConfig) -> io::Result<Api> {
        let KubernetesConfig { api, token_file, ca_file, .. } = config;
        let host_and_brackets = api.host_str().unwrap_or_default();
        // Brackets around an IPv6 address belong to the URL only.
        let host = host_and_brackets.trim_start_matches('[').trim_end_matches(']').to_owned();
        let port = api.port_or_known_default().unwrap_or(443);
        let authority = format!("{host_and_brackets}:{port}");
        let tls = (api.scheme() == "https").then(|| connector(ca_file, &host)).transpose()?;
        Ok(Api { host, port, authority, tls, token_file: token_file.clone() })
    }

    /// Sends a request and parses the response.
    pub(super) async fn request<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: RequestBody,
    ) -> Result<T, ApiError> {
        let exchange = async {
            let (response, _connection) = self.send(method, path, body).await?;
            let bytes = read_body(response.into_body()).await?;
            Ok(serde_json::from_slice(&bytes)?)
        };
        timeout(TIMEOUT, exchange).await.map_err(|_| ApiError::Timeout)?
    }

    /// Starts a watch.
    pub(super) async fn watch(&self, path: &str) -> Result<ApiWatch, ApiError> {
        let exchange = self.send(Method::GET, path, RequestBody::Empty);
        let (response, connection) = timeout(TIMEOUT, exchange).await.map_err(|_| ApiError::Timeout)??;
        Ok(ApiWatch { body: response.into_body(), read: BytesMut::new(), _connection: connection })
    }

    async fn send(
        &self,
        method: Method,
        path: &str,
        body: RequestBody,
    ) -> Result<(Response<Incoming>, JoinSet<()>), ApiError> {
        let stream = TcpStream::connect((self.host.as_str(), self.port)).await;
        let stream = stream.map_err(io_error("cannot connect to the API server"))?;
        stream.set_nodelay(true).map_err(io_error("cannot connect to the API server"))?;
        match &self.tls {
            None => self.exchange(stream, method, path, body).await,
            Some((connector, name)) => {
                let stream = connector.connect(name.clone(), stream).await;
                let stream = stream.map_err(io_error("TLS handshake with the API server failed"))?;
                self.exchange(stream, method, path, body).await
            }
        }
    }

    async fn exchange<S: AsyncRead + AsyncWrite + Send + Unpin + 'static>(
        &self,
        stream: S,
        method: Method,
        path: &str,
        body: RequestBody,
    ) -> Result<(Response<Incoming>, JoinSet<()>), ApiError> {
        let handshake = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await;
        let (mut sender, connection) =
            handshake.map_err(io_error("HTTP handshake with the API server failed"))?;
        let mut connection_task = JoinSet::new();
        connection_task.spawn(async move {
            let ended = contained("API server connection", connection).await;
            if let Some(Err(error)) = ended {
                // A connection to the API server of Kubernetes ended with an error. The next request opens another one.
                tracing::debug!(%error, "connection to the API server closed");
            }
        });
        let mut request = Request::builder().method(method).uri(path).header(HOST, &self.authority);
        request = request.header(ACCEPT, "application/json");
        if let Some(file) = &self.token_file {
            let token =
                tokio::fs::read_to_string(file).await.map_err(io_error("cannot read scaling.token_file"))?;
            request = request.header(AUTHORIZATION, format!("Bearer {}", token.trim()));
        }
        let (kind, body) = match body {
            RequestBody::Empty => (None, Bytes::new()),
            RequestBody::Replace(value) => (Some("application/json"), value.to_string().into()),
            RequestBody::MergePatch(value) => {
                (Some("application/merge-patch+json"), value.to_string().into())
            }
        };
        if let Some(kind) = kind {
            request = request.header(CONTENT_TYPE, kind);
        }
        let request = request.body(Full::new(body)).map_err(io_error("cannot build the request"))?;
        let response =
            sender.send_request(request).await.map_err(io_error("no response from the API server"))?;
        let status = response.status();
        if status.is_success() {
            return Ok((response, connection_task));
        }
        let bytes = read_body(response.into_body()).await?;
        Err(ApiError::Rejected { status, reason: reason(&bytes) })
    }
}

/// Returns the message of an error response, truncated for a log line.
fn reason(bytes: &[u8]) -> String {
    let value: Option<Value> = serde_json::from_slice(bytes).ok();
    let message = value.as_ref().and_then(|status| status["message"].as_str()).unwrap_or_default();
    message.chars().take(256).collect()
}

async fn read_body(body: Incoming) -> Result<Bytes, ApiError> {
    let collected = Limited::new(body, RESPONSE_BYTES_MAX).collect().await;
    collected.map(|body| body.to_bytes()).map_err(io_error("incomplete response"))
}

fn connector(ca_file: &Option<PathBuf>, host: &str) -> io::Result<(TlsConnector, ServerName<'static>)> {
    let mut roots = RootCertStore::empty();
    if let Some(file) = ca_file {
        for certificate in CertificateDer::pem_file_iter(file).map_err(io::Error::other)? {
            roots.add(certificate.map_err(io::Error::other)?).map_err(io::Error::other)?;
        }
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let config = config.map_err(io::Error::other)?.with_root_certificates(roots).with_no_client_auth();
    let name = ServerName::try_from(host.to_owned()).map_err(io::Error::other)?;
    Ok((TlsConnector::from(Arc::new(config)), name))
}

/// Open watch.
pub(super) struct ApiWatch {
    body: Incoming,
    /// Bytes of an incomplete line.
    read: BytesMut,
    _connection: JoinSet<()>,
}

impl ApiWatch {
    /// Returns the next event; `None` once the watch has ended, which is not an error.
    pub(super) async fn next<T: DeserializeOwned>(&mut self) -> Result<Option<T>, ApiError> {
        loop {
            if let Some(end) = self.read.iter().position(|byte| *byte == b'\n') {
                let line = self.read.split_to(end + 1);
                return Ok(Some(serde_json::from_slice(line.trim_ascii())?));
            }
            if self.read.len() > RESPONSE_BYTES_MAX {
                return Err(io_error("a line of the watch is too long")("line without end"));
            }
            match timeout(WATCH_IDLE_TIMEOUT, self.body.frame()).await {
                Ok(Some(Ok(frame))) => {
                    if let Ok(mut data) = frame.into_data() {
                        self.read.extend_from_slice(data.chunk());
                        data.advance(data.remaining());
                    }
                }
                // However the watch ended, the next one continues from the same version.
                Ok(Some(Err(_)) | None) | Err(_) => return Ok(None),
            }
        }
    }
}
