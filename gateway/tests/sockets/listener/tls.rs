//! TLS: protocols, replaced certificates, and invalid files.

use super::fixture::{
    BODY, Edge, Fixture, TIMEOUT, certify, post, read_response, read_until_closed, send_and_read,
};
use super::http2::Client;
use http::HeaderValue;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

pub(crate) const TLS: &str = "[tls]\ncertificate = 'gateway.crt'\nkey = 'gateway.key'\n";

/// Connects a client that trusts `certificate` and offers `protocols`.
pub(crate) async fn connect(
    edge: &Edge,
    certificate: &CertificateDer<'static>,
    protocols: &[&[u8]],
) -> std::io::Result<TlsStream<TcpStream>> {
    let mut roots = RootCertStore::empty();
    roots.add(certificate.clone()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = protocols.iter().map(|protocol| protocol.to_vec()).collect();
    let name = ServerName::try_from("localhost").unwrap();
    TlsConnector::from(Arc::new(config)).connect(name, edge.connect().await).await
}

fn agreed(stream: &TlsStream<TcpStream>) -> Option<&[u8]> {
    stream.get_ref().1.alpn_protocol()
}

#[tokio::test]
async fn alpn_selects_http_2_or_http_1_as_the_client_offers() {
    let fixture = Fixture::new().await;
    let certificate = certify(fixture.dir.path());
    let edge = fixture.edge(TLS).await;
    for protocols in [&[&b"http/1.1"[..]][..], &[]] {
        let mut stream = connect(&edge, &certificate, protocols).await.unwrap();
        assert_eq!(agreed(&stream), protocols.first().copied());
        for _ in 0..2 {
            assert_eq!(send_and_read(&mut stream).await.status, 200);
        }
    }
    let stream = connect(&edge, &certificate, &[b"http/1.1", b"h2"]).await.unwrap();
    assert_eq!(agreed(&stream), Some(&b"h2"[..]), "the preferred protocol");
    let client = Client::over(stream).await;
    assert_eq!(client.post(BODY).await.unwrap().head.status(), 200);
    let large = BODY.replace("\"x\"", &format!("\"{}\"", "x".repeat(8 << 20)));
    let response = client.post(large.clone()).await.unwrap();
    assert_eq!(response.json()["bytes"].as_u64(), Some(large.len() as u64));
    assert!(connect(&edge, &certificate, &[b"h3"]).await.is_err(), "no common protocol");
}

/// Requests that are rejected in plaintext are rejected over TLS: the same parser, over each protocol.
#[tokio::test]
async fn malformed_bodies_are_rejected_over_tls_and_their_connections_continue() {
    let fixture = Fixture::new().await;
    let certificate = certify(fixture.dir.path());
    let edge = fixture.edge(&format!("{TLS}[timeouts]\nbody = '500ms'\n")).await;
    let mut http1 = connect(&edge, &certificate, &[b"http/1.1"]).await.unwrap();
    let http2 = Client::over(connect(&edge, &certificate, &[b"h2"]).await.unwrap()).await;
    let plain = fixture.edge("").await;
    let in_the_clear = Client::plain(&plain).await;
    let deep =
        format!("{{\"model\": \"anywhere\", \"input\": {}{}}}", "[".repeat(10_000), "]".repeat(10_000));
    for (body, code) in [
        (deep.as_str(), "invalid_json"),
        (r#"{"model": 7, "input": "x"}"#, "invalid_value"),
        (r#"{"model": "anywhere", "model": "b", "input": "x"}"#, "invalid_value"),
        ("{\"model\": ", "invalid_json"),
    ] {
        http1.write_all(post("", body).as_bytes()).await.unwrap();
        let response = read_response(&mut http1).await;
        assert_eq!((response.status, response.code()), (400, code), "{response:?}");
        for client in [&http2, &in_the_clear] {
            let response = client.post(body.to_owned()).await.unwrap();
            assert_eq!(
                (response.head.status().as_u16(), &response.head.headers()["x-meridian-error"]),
                (400, &HeaderValue::from_static(code))
            );
        }
    }
    // A body that never ends.
    let (response, mut body) = http2.begin(super::http2::post(), false).await.unwrap();
    body.send_data("{".into(), false).unwrap();
    let response = tokio::time::timeout(TIMEOUT, response).await.expect("an answer").unwrap();
    assert_eq!(response.status().as_u16(), 408);
    let unended = post("", BODY).replace("content-length: 35", "content-length: 1000000");
    let mut slow = connect(&edge, &certificate, &[]).await.unwrap();
    slow.write_all(unended.as_bytes()).await.unwrap();
    assert_eq!(read_until_closed(&mut slow).await.status, 408);
    // Ambiguous heads.
    for fields in ["host: y\r\n", "transfer-encoding: chunked\r\n", "x: a\rb\r\n", "content-length: 1\r\n"] {
        let mut stream = connect(&edge, &certificate, &[]).await.unwrap();
        stream.write_all(post(fields, BODY).as_bytes()).await.unwrap();
        let response = read_until_closed(&mut stream).await;
        assert_eq!(
            (response.status, response.code()),
            (400, "malformed_request"),
            "{fields:?}: {response:?}"
        );
    }
    assert_eq!(http2.post(BODY).await.unwrap().head.status(), 200);
    assert_eq!(send_and_read(&mut http1).await.status, 200);
    assert_eq!(fixture.region.requests(), 2, "no other request reached the region");
}

#[tokio::test]
async fn plaintext_and_slow_handshakes_on_a_tls_port_are_closed() {
    let fixture = Fixture::new().await;
    let certificate = certify(fixture.dir.path());
    let edge = fixture.edge(&format!("{TLS}[timeouts]\nhead = '300ms'\n")).await;
    let response = edge.send_bytes(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n").await;
    assert_ne!(response.status, 200, "{response:?}");
    let mut slow = edge.connect().await;
    slow.write_all(&[22, 3, 1]).await.unwrap();
    assert_eq!(read_until_closed(&mut slow).await.status, 0);
    // The HTTP/2 preface after ALPN selected HTTP/1 is no request.
    let mut stream = connect(&edge, &certificate, &[b"http/1.1"]).await.unwrap();
    stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.unwrap();
    assert_eq!(read_until_closed(&mut stream).await.status, 400);
    let mut stream = connect(&edge, &certificate, &[b"http/1.1"]).await.unwrap();
    assert_eq!(send_and_read(&mut stream).await.status, 200);
}

#[tokio::test]
async fn a_replaced_certificate_is_used_while_connections_continue() {
    let fixture = Fixture::new().await;
    let old = certify(fixture.dir.path());
    let edge = fixture.edge(TLS).await;
    let mut open = connect(&edge, &old, &[]).await.unwrap();
    assert_eq!(send_and_read(&mut open).await.status, 200);

    // The files are replaced one after the other: for a moment they do not match, and the old pair stays in use. That
    // no reload happens can only be tested by waiting longer than the reload interval of a second.
    let next = fixture.dir.path().join("next");
    std::fs::create_dir(&next).unwrap();
    let new = certify(&next);
    let rename = |file: &str| std::fs::rename(next.join(file), fixture.dir.path().join(file)).unwrap();
    rename("gateway.crt");
    tokio::time::sleep(Duration::from_millis(1500)).await;
    assert_eq!(send_and_read(&mut connect(&edge, &old, &[]).await.unwrap()).await.status, 200);
    rename("gateway.key");
    let taken = async {
        while connect(&edge, &new, &[]).await.is_err() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(TIMEOUT, taken).await.expect("the new certificate is used");
    assert!(connect(&edge, &old, &[]).await.is_err(), "the old certificate is not used");
    assert_eq!(send_and_read(&mut open).await.status, 200, "open connections continue");
}

#[tokio::test]
async fn invalid_files_are_reported_by_name_and_all_at_once() {
    let fixture = Fixture::new().await;
    certify(fixture.dir.path());
    let check = |config: &str, words: &[&str]| {
        let problems = fixture.config(config).err().expect("wrong files");
        assert_eq!(problems.len(), words.len(), "{problems:#?}");
        for (problem, word) in problems.iter().zip(words) {
            assert!(problem.contains(word), "'{word}' in {problem}");
        }
    };
    check("[tls]\ncertificate = 'no.crt'\nkey = 'no.key'\n", &["no.crt", "no.key"]);
    check("[tls]\ncertificate = 'key'\nkey = 'key'\n", &["no certificate", "no private key"]);
    check("[tls]\ncertificate = 'gateway.key'\nkey = 'gateway.key'\n", &["no certificate"]);
    let key = std::fs::read(fixture.dir.path().join("gateway.key")).unwrap();
    certify(fixture.dir.path());
    std::fs::write(fixture.dir.path().join("gateway.key"), key).unwrap();
    check(TLS, &["do not match"]);
    assert!(fixture.config("[tls]\ncertificate = 'gateway.crt'\n").is_err(), "a key is needed");
}
