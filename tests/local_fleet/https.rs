//! HTTP/2 client over TLS with one persistent connection.

use super::{LocalFleet, TIMEOUT};
use bytes::Bytes;
use h2::client::SendRequest;
use http::{HeaderMap, Request};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio_rustls::TlsConnector;

/// Connection to the gateway of a local fleet.
#[derive(Clone)]
pub(crate) struct HttpsClient {
    send: SendRequest<Bytes>,
}

/// Outcomes of a load's requests.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    /// Responses with status 200, by region.
    pub(crate) served: BTreeMap<String, u64>,
    /// All other outcomes, as text.
    pub(crate) failed: Vec<String>,
}

impl HttpsClient {
    /// Connects to a fleet that was started with `--tls`.
    pub(crate) async fn connect(fleet: &LocalFleet) -> HttpsClient {
        let certificate =
            std::fs::read(&fleet.certificate).expect("the fleet prints the path of its certificate");
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(&certificate).expect("PEM")).expect("a certificate");
        let mut config =
            ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
                .with_safe_default_protocol_versions()
                .expect("TLS 1.3")
                .with_root_certificates(roots)
                .with_no_client_auth();
        config.alpn_protocols = vec![b"h2".to_vec()];
        let address = fleet.url.strip_prefix("https://").expect("a fleet with TLS");
        let tcp = TcpStream::connect(address).await.expect("a connection");
        let name = ServerName::try_from("localhost").expect("a name");
        let tls = TlsConnector::from(Arc::new(config)).connect(name, tcp).await.expect("a handshake");
        assert_eq!(tls.get_ref().1.alpn_protocol(), Some(&b"h2"[..]));
        let (send, connection) = h2::client::handshake(tls).await.expect("HTTP/2");
        // Ends with the last handle.
        tokio::spawn(connection);
        HttpsClient { send }
    }

    /// Sends an embeddings request; returns status, headers and body.
    pub(crate) async fn embed(&self, model: &str) -> Result<(u16, HeaderMap, Value), h2::Error> {
        let request = async {
            let request =
                Request::post("https://localhost/v1/embeddings").header("authorization", "Bearer local");
            let request = request.body(()).expect("a request");
            let (response, mut body) = self.send.clone().ready().await?.send_request(request, false)?;
            body.send_data(json!({"model": model, "input": "over TLS"}).to_string().into(), true)?;
            let (head, mut body) = response.await?.into_parts();
            let mut all = Vec::new();
            while let Some(piece) = body.data().await {
                let piece = piece?;
                body.flow_control().release_capacity(piece.len())?;
                all.extend_from_slice(&piece);
            }
            Ok((head.status.as_u16(), head.headers, serde_json::from_slice(&all).unwrap_or(Value::Null)))
        };
        tokio::time::timeout(TIMEOUT, request).await.expect("a response in time")
    }

    /// Sends requests at this rate per second (open loop) while `during` runs.
    pub(crate) async fn load(&self, rate: u32, during: impl Future<Output = ()>) -> Outcome {
        let mut beat = tokio::time::interval(Duration::from_secs(1) / rate);
        let mut requests = JoinSet::new();
        tokio::pin!(during);
        loop {
            tokio::select! {
                () = &mut during => break,
                _ = beat.tick() => {
                    let client = self.clone();
                    requests.spawn(async move { client.embed("minilm").await });
                }
            }
        }
        let mut outcome = Outcome::default();
        while let Some(response) = requests.join_next().await {
            match response.expect("the request does not panic") {
                Ok((200, headers, _)) => {
                    let region = headers.get("x-meridian-region").and_then(|region| region.to_str().ok());
                    *outcome.served.entry(region.unwrap_or_default().to_owned()).or_default() += 1;
                }
                Ok((status, _, body)) => outcome.failed.push(format!("{status} {body}")),
                Err(error) => outcome.failed.push(error.to_string()),
            }
        }
        outcome
    }
}
