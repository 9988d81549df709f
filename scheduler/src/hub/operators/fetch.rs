//! Client that fetches the key set of an issuer: HTTPS with the hub's resolver, one connection for each fetch, since there
//! is one every ten minutes. Redirects are not followed: the configured URL determines the server.

use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use http_body_util::{BodyExt, Empty, Limited};
use hyper::header::{ACCEPT, HOST};
use hyper::{Request, StatusCode};
use hyper_util::rt::TokioIo;
use identity::authorities::read_roots;
use jwt::jwks::JWKS_BYTES_MAX;
use regions::HostPort;
use resolver::{DnsSection, Resolver};
use rustls::ClientConfig;
use rustls::crypto::ring;
use rustls::pki_types::ServerName;
use rustls_platform_verifier::BuilderVerifierExt;
use supervision::task::contained;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use url::Url;

use super::FETCH_TIMEOUT;

/// Client of one URL.
pub(super) struct KeySetClient {
    url: Url,
    endpoint: HostPort,
    name: ServerName<'static>,
    tls: TlsConnector,
    resolver: Resolver,
}

impl KeySetClient {
    /// Creates the client. Without a file of authorities, those of the system are trusted.
    ///
    /// # Errors
    ///
    /// When the host or the file cannot be used.
    pub(super) fn new(url: Url, authorities: Option<&Path>) -> Result<KeySetClient, String> {
        let host = url.host_str().unwrap_or_default();
        let port = url.port_or_known_default().unwrap_or(443);
        let unusable = |error: &dyn std::fmt::Display| format!("jwks_url: {error}");
        let endpoint = format!("{host}:{port}").parse().map_err(|error| unusable(&error))?;
        let bare = host.trim_start_matches('[').trim_end_matches(']').to_owned();
        let name = ServerName::try_from(bare).map_err(|error| unusable(&error))?;
        let tls = TlsConnector::from(Arc::new(tls_config(authorities)?));
        Ok(KeySetClient { url, endpoint, name, tls, resolver: Resolver::new(&DnsSection::default()) })
    }

    /// Fetches the key set.
    ///
    /// # Errors
    ///
    /// Why there is none, with the URL.
    pub(super) async fn fetch(&self) -> Result<Vec<u8>, String> {
        let fetched = timeout(FETCH_TIMEOUT, self.exchange()).await;
        let fetched = fetched.unwrap_or_else(|_| Err(format!("no response within {FETCH_TIMEOUT:?}")));
        fetched.map_err(|problem| format!("{}: {problem}", self.url))
    }

    async fn exchange(&self) -> Result<Vec<u8>, String> {
        let tcp = self.resolver.connect(&self.endpoint, FETCH_TIMEOUT, |_| true).await;
        let tcp = tcp.map_err(|error| error.to_string())?;
        let stream = self.tls.connect(self.name.clone(), tcp).await.map_err(|error| error.to_string())?;
        let handshake = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await;
        let (mut sender, connection) = handshake.map_err(|error| error.to_string())?;
        let mut task = JoinSet::new();
        task.spawn(async move {
            // Its failure is that of the request.
            contained("issuer connection", connection).await.map(Result::ok);
        });
        let path = &self.url[url::Position::BeforePath..url::Position::AfterQuery];
        let authority = &self.url[url::Position::BeforeHost..url::Position::AfterPort];
        let request = Request::get(path).header(HOST, authority).header(ACCEPT, "application/json");
        let request = request.body(Empty::<Bytes>::new()).map_err(|error| error.to_string())?;
        let response = sender.send_request(request).await.map_err(|error| error.to_string())?;
        if response.status() != StatusCode::OK {
            return Err(format!("the status is {}, not 200", response.status()));
        }
        let body = Limited::new(response.into_body(), JWKS_BYTES_MAX).collect().await;
        let body = body.map_err(|error| format!("{error}; the maximum is {JWKS_BYTES_MAX} bytes"))?;
        Ok(body.to_bytes().into())
    }
}

fn tls_config(authorities: Option<&Path>) -> Result<ClientConfig, String> {
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())?;
    let Some(path) = authorities else {
        let builder = builder.with_platform_verifier();
        let builder =
            builder.map_err(|error| format!("the certificates of the system: {error}; set jwks_ca"))?;
        return Ok(builder.with_no_client_auth());
    };
    let roots = read_roots(path).map_err(|error| format!("jwks_ca: {error}"))?;
    Ok(builder.with_root_certificates(roots).with_no_client_auth())
}
