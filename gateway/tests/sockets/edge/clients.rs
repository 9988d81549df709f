//! The two client protocols: plaintext HTTP/1.1, and HTTP/2 over TLS. Responses and records are the same.

use super::fixture::Fixture;
use bytes::Bytes;
use h2::client::SendRequest;
use http::{HeaderMap, Request};
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, RootCertStore};
use serde_json::json;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

/// Protocol of clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ClientProtocol {
    Http1,
    Http2OverTls,
}

/// Protocol to regions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RegionProtocol {
    Http1,
    Http2,
}

impl RegionProtocol {
    /// Returns the configuration lines for this protocol.
    pub(crate) fn config(self) -> &'static str {
        match self {
            RegionProtocol::Http1 => "",
            RegionProtocol::Http2 => "region_http = 2\n",
        }
    }
}

/// Client with one persistent connection.
pub(crate) enum Client {
    Http1(reqwest::Client, String),
    Http2(SendRequest<Bytes>),
}

/// Response as a client sees it.
#[derive(Debug)]
pub(crate) struct ClientResponse {
    pub(crate) status: u16,
    pub(crate) region: String,
    pub(crate) attempts: String,
    /// `None` if it was truncated.
    pub(crate) body: Option<Bytes>,
    /// Time to its last byte, or to the truncation.
    pub(crate) took: Duration,
}

impl Client {
    /// Connects a client; the fixture uses TLS if the protocol does.
    pub(crate) async fn of(fixture: &Fixture, client_protocol: ClientProtocol) -> Client {
        match client_protocol {
            ClientProtocol::Http1 => Client::Http1(fixture.client.clone(), fixture.url.clone()),
            ClientProtocol::Http2OverTls => {
                let mut roots = RootCertStore::empty();
                roots.add(fixture.certificate.clone()).unwrap();
                let provider = Arc::new(rustls::crypto::ring::default_provider());
                let builder = ClientConfig::builder_with_provider(provider);
                let builder = builder.with_safe_default_protocol_versions().unwrap();
                let mut config = builder.with_root_certificates(roots).with_no_client_auth();
                config.alpn_protocols = vec![b"h2".to_vec()];
                let stream = TcpStream::connect(fixture.address).await.unwrap();
                stream.set_nodelay(true).unwrap();
                let name = ServerName::try_from("localhost").unwrap();
                let stream = TlsConnector::from(Arc::new(config)).connect(name, stream).await.unwrap();
                let mut builder = h2::client::Builder::new();
                let builder = builder.initial_window_size(8 << 20).initial_connection_window_size(8 << 20);
                let (send, connection) = builder.handshake(stream).await.unwrap();
                tokio::spawn(connection);
                Client::Http2(send)
            }
        }
    }

    /// Requests an embedding of `model`.
    pub(crate) async fn send(&self, model: &str, headers: &[(&str, &str)]) -> ClientResponse {
        let body = Bytes::from(json!({"model": model, "input": "x"}).to_string());
        let begun = Instant::now();
        let (status, fields, body) = match self {
            Client::Http1(client, url) => {
                let mut request = client.post(url).bearer_auth("k").body(body);
                for (name, value) in headers {
                    request = request.header(*name, *value);
                }
                let response = request.send().await.unwrap();
                (response.status(), response.headers().clone(), response.bytes().await.ok())
            }
            Client::Http2(send) => {
                let request =
                    Request::post("https://localhost/v1/embeddings").header("authorization", "Bearer k");
                let request =
                    headers.iter().fold(request, |request, (name, value)| request.header(*name, *value));
                let mut send = send.clone().ready().await.unwrap();
                let (response, mut sending) = send.send_request(request.body(()).unwrap(), false).unwrap();
                sending.send_data(body, true).unwrap();
                let (head, body) = response.await.unwrap().into_parts();
                (head.status, head.headers, read_body(body).await)
            }
        };
        let text = |name| text(&fields, name);
        let (region, attempts) = (text("x-meridian-region"), text("x-meridian-attempts"));
        ClientResponse { status: status.as_u16(), region, attempts, body, took: begun.elapsed() }
    }
}

fn text(fields: &HeaderMap, name: &str) -> String {
    fields.get(name).map_or("", |value| value.to_str().unwrap()).to_owned()
}

async fn read_body(mut body: h2::RecvStream) -> Option<Bytes> {
    let mut all = Vec::new();
    while let Some(piece) = body.data().await {
        let piece = piece.ok()?;
        body.flow_control().release_capacity(piece.len()).ok()?;
        all.extend_from_slice(&piece);
    }
    Some(all.into())
}
