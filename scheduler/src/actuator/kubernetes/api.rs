//! Asks a Kubernetes API server, and listens to it: HTTP/1.1, JSON, a token that is read anew for each question because
//! Kubernetes changes it every hour.
//!
//! Each exchange has a connection of its own. There are a few in a minute and one that stays open, the watch, so a pool would
//! save nothing, and a connection that hangs can hold up nobody but whoever uses it.

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

/// How long one question may take, from the connection to the last byte of its answer.
const TIMEOUT: Duration = Duration::from_secs(10);
/// The most that one answer or one line of a watch may be: what etcd lets an API server keep of one object is 1.5 MiB, and a
/// list has at most some hundreds of pods.
const ANSWER_BYTES_MAX: usize = 32 << 20;
/// A watch that has said nothing for so long is over: an API server sends a bookmark about every minute.
const WATCH_SILENCE_MAX: Duration = Duration::from_secs(150);

/// Why there is no answer to work with.
#[derive(Debug, thiserror::Error)]
pub(super) enum ApiError {
    /// It could not be asked, or said something that is no answer.
    #[error("{what}: {error}")]
    Io { what: &'static str, error: io::Error },
    /// Not in time.
    #[error("no answer within {} s", TIMEOUT.as_secs())]
    Late,
    /// It is no JSON of the wanted shape.
    #[error("its answer cannot be read: {0}")]
    Shape(#[from] serde_json::Error),
    /// It refuses.
    #[error("refused with {status}: {reason}")]
    Refused { status: StatusCode, reason: String },
}

impl ApiError {
    /// Somebody else has changed what was to be changed.
    pub(super) fn is_conflict(&self) -> bool {
        matches!(self, ApiError::Refused { status: StatusCode::CONFLICT, .. })
    }

    /// The version that was asked from is not known any longer: everything has to be listed again.
    pub(super) fn is_expired(&self) -> bool {
        matches!(self, ApiError::Refused { status: StatusCode::GONE, .. })
    }
}

fn io_error<E: Into<Box<dyn std::error::Error + Send + Sync>>>(
    what: &'static str,
) -> impl FnOnce(E) -> ApiError {
    move |error| ApiError::Io { what, error: io::Error::other(error) }
}

/// An API server.
#[derive(Clone)]
pub(super) struct Api {
    host: String,
    port: u16,
    /// As it stands in the URL.
    authority: String,
    tls: Option<(TlsConnector, ServerName<'static>)>,
    token_file: Option<PathBuf>,
}

/// What is sent beside the path.
pub(super) enum Sent {
    Nothing,
    /// The whole object, in the place of the one that is there.
    Whole(Value),
    /// A merge patch (RFC 7386).
    Merge(Value),
}

impl Api {
    /// # Errors
    ///
    /// When the authority's file cannot be used.
    pub(super) fn new(config: &KubernetesConfig) -> io::Result<Api> {
        let KubernetesConfig { api, token_file, ca_file, .. } = config;
        let shown = api.host_str().unwrap_or_default();
        // The brackets of an IPv6 address are the URL's.
        let host = shown.trim_start_matches('[').trim_end_matches(']').to_owned();
        let port = api.port_or_known_default().unwrap_or(443);
        let authority = format!("{shown}:{port}");
        let tls = (api.scheme() == "https").then(|| connector(ca_file, &host)).transpose()?;
        Ok(Api { host, port, authority, tls, token_file: token_file.clone() })
    }

    /// The answer to one question.
    pub(super) async fn ask<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        sent: Sent,
    ) -> Result<T, ApiError> {
        let asked = async {
            let (answer, _connection) = self.send(method, path, sent).await?;
            let bytes = whole(answer.into_body()).await?;
            Ok(serde_json::from_slice(&bytes)?)
        };
        timeout(TIMEOUT, asked).await.map_err(|_| ApiError::Late)?
    }

    /// Begins to listen.
    pub(super) async fn watch(&self, path: &str) -> Result<Watch, ApiError> {
        let asked = self.send(Method::GET, path, Sent::Nothing);
        let (answer, connection) = timeout(TIMEOUT, asked).await.map_err(|_| ApiError::Late)??;
        Ok(Watch { body: answer.into_body(), read: BytesMut::new(), _connection: connection })
    }

    async fn send(
        &self,
        method: Method,
        path: &str,
        sent: Sent,
    ) -> Result<(Response<Incoming>, JoinSet<()>), ApiError> {
        let stream = TcpStream::connect((self.host.as_str(), self.port)).await;
        let stream = stream.map_err(io_error("no connection to the API server"))?;
        stream.set_nodelay(true).map_err(io_error("no connection to the API server"))?;
        match &self.tls {
            None => self.exchange(stream, method, path, sent).await,
            Some((connector, name)) => {
                let stream = connector.connect(name.clone(), stream).await;
                let stream = stream.map_err(io_error("no TLS with the API server"))?;
                self.exchange(stream, method, path, sent).await
            }
        }
    }

    async fn exchange<S: AsyncRead + AsyncWrite + Send + Unpin + 'static>(
        &self,
        stream: S,
        method: Method,
        path: &str,
        sent: Sent,
    ) -> Result<(Response<Incoming>, JoinSet<()>), ApiError> {
        let handshake = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await;
        let (mut sender, connection) = handshake.map_err(io_error("no HTTP with the API server"))?;
        let mut owned = JoinSet::new();
        owned.spawn(async move {
            let ended = contained("API server connection", connection).await;
            if let Some(Err(error)) = ended {
                tracing::debug!(%error, "a connection to the API server has ended");
            }
        });
        let mut request = Request::builder().method(method).uri(path).header(HOST, &self.authority);
        request = request.header(ACCEPT, "application/json");
        if let Some(file) = &self.token_file {
            let token =
                tokio::fs::read_to_string(file).await.map_err(io_error("the token cannot be read"))?;
            request = request.header(AUTHORIZATION, format!("Bearer {}", token.trim()));
        }
        let (kind, body) = match sent {
            Sent::Nothing => (None, Bytes::new()),
            Sent::Whole(value) => (Some("application/json"), value.to_string().into()),
            Sent::Merge(value) => (Some("application/merge-patch+json"), value.to_string().into()),
        };
        if let Some(kind) = kind {
            request = request.header(CONTENT_TYPE, kind);
        }
        let request = request.body(Full::new(body)).map_err(io_error("no request can be made"))?;
        let answer = sender.send_request(request).await.map_err(io_error("no answer of the API server"))?;
        let status = answer.status();
        if status.is_success() {
            return Ok((answer, owned));
        }
        let bytes = whole(answer.into_body()).await?;
        Err(ApiError::Refused { status, reason: reason(&bytes) })
    }
}

/// What an API server says of a refusal, as far as it goes into a line.
fn reason(bytes: &[u8]) -> String {
    let value: Option<Value> = serde_json::from_slice(bytes).ok();
    let message = value.as_ref().and_then(|status| status["message"].as_str()).unwrap_or_default();
    message.chars().take(256).collect()
}

async fn whole(body: Incoming) -> Result<Bytes, ApiError> {
    let collected = Limited::new(body, ANSWER_BYTES_MAX).collect().await;
    collected.map(|whole| whole.to_bytes()).map_err(io_error("its answer breaks off"))
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

/// A watch that is listened to.
pub(super) struct Watch {
    body: Incoming,
    /// Bytes that are no whole line yet.
    read: BytesMut,
    _connection: JoinSet<()>,
}

impl Watch {
    /// The next thing that it says; nothing once it has ended, which says nothing about anything.
    pub(super) async fn next<T: DeserializeOwned>(&mut self) -> Result<Option<T>, ApiError> {
        loop {
            if let Some(end) = self.read.iter().position(|byte| *byte == b'\n') {
                let line = self.read.split_to(end + 1);
                return Ok(Some(serde_json::from_slice(line.trim_ascii())?));
            }
            if self.read.len() > ANSWER_BYTES_MAX {
                return Err(io_error("a line of the watch is too long")("it has no end"));
            }
            match timeout(WATCH_SILENCE_MAX, self.body.frame()).await {
                Ok(Some(Ok(frame))) => {
                    if let Ok(mut data) = frame.into_data() {
                        self.read.extend_from_slice(data.chunk());
                        data.advance(data.remaining());
                    }
                }
                // However it ended, the next one goes on where this one was.
                Ok(Some(Err(_)) | None) | Err(_) => return Ok(None),
            }
        }
    }
}
