//! Tests of the connection to the API server: verification of its certificate, and the bearer token.

use std::sync::Arc;

use hyper::Method;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use rustls::ServerConfig;
use rustls::pki_types::PrivateKeyDer;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;

use super::super::api::{Api, RequestBody};
use super::config;
use crate::config::{KubernetesConfig, WorkloadKind};

fn authority() -> CertifiedIssuer<'static, KeyPair> {
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap()
}

/// Starts a server that responds to every request with the token that it received.
async fn server(issuer: &CertifiedIssuer<'static, KeyPair>) -> String {
    let key = KeyPair::generate().unwrap();
    let certificate =
        CertificateParams::new(vec!["localhost".to_owned()]).unwrap().signed_by(&key, issuer).unwrap();
    let key = PrivateKeyDer::try_from(key.serialize_der()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    let config = config.with_no_client_auth().with_single_cert(vec![certificate.der().clone()], key).unwrap();
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("https://localhost:{}", socket.local_addr().unwrap().port());
    tokio::spawn(async move {
        loop {
            let (stream, _) = socket.accept().await.unwrap();
            // A client that rejects the certificate closes the connection.
            let Ok(mut stream) = acceptor.accept(stream).await else { continue };
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                head.push(stream.read_u8().await.unwrap());
            }
            let head = String::from_utf8(head).unwrap();
            let token =
                head.lines().find_map(|line| line.strip_prefix("authorization: ")).unwrap_or_default();
            let body = json!({"token": token}).to_string();
            let response = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{body}", body.len());
            stream.write_all(response.as_bytes()).await.unwrap();
            stream.shutdown().await.ok();
        }
    });
    url
}

#[tokio::test]
async fn only_a_server_with_a_valid_certificate_receives_requests_and_the_newest_token() {
    let dir = tempfile::tempdir().unwrap();
    let (ours, other) = (authority(), authority());
    let url = server(&ours).await;
    let api = |issuer: &CertifiedIssuer<'static, KeyPair>, name: &str| {
        let (ca_file, token_file) = (dir.path().join(name), dir.path().join("token"));
        std::fs::write(&ca_file, issuer.pem()).unwrap();
        let config = config(&url, WorkloadKind::Deployment);
        Api::new(&KubernetesConfig { ca_file: Some(ca_file), token_file: Some(token_file), ..config })
            .unwrap()
    };
    let (trusted, untrusted) = (api(&ours, "ours.crt"), api(&other, "other.crt"));
    for token in ["first", "second"] {
        std::fs::write(dir.path().join("token"), format!("{token}\n")).unwrap();
        let response: Value = trusted.request(Method::GET, "/version", RequestBody::Empty).await.unwrap();
        assert_eq!(response["token"], format!("Bearer {token}"));
    }
    let error = untrusted.request::<Value>(Method::GET, "/version", RequestBody::Empty).await.unwrap_err();
    assert!(error.to_string().contains("TLS handshake with the API server failed"), "{error}");
}
