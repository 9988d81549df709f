//! Runs over TLS: with a trusted and an untrusted server certificate.

use std::future::pending;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;

use crate::server::{rows, to};
use loadtest::{Options, RawOptions, RunError, run};
use rustls::ServerConfig;
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio_rustls::TlsAcceptor;

/// Starts a TLS server that responds to every read with a row; writes its certificate to `folder`.
async fn serve(folder: &Path) -> SocketAddr {
    let made = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).expect("a certificate");
    std::fs::write(folder.join("ca.pem"), made.cert.pem()).expect("a file");
    let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(made.signing_key.serialize_der()));
    let config = ServerConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_no_client_auth()
        .with_single_cert(vec![made.cert.der().clone()], key)
        .expect("a key that fits");
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = listener.local_addr().expect("a bound listener has an address");
    tokio::spawn(async move {
        while let Ok((connection, _)) = listener.accept().await {
            let acceptor = acceptor.clone();
            tokio::spawn(async move {
                let Ok(mut connection) = acceptor.accept(connection).await else { return };
                let body = rows(&[&[0.25; 384]]);
                let respond = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{body}", body.len());
                let mut request = [0; 16 << 10];
                while connection.read(&mut request).await.is_ok_and(|bytes| bytes > 0) {
                    if connection.write_all(respond.as_bytes()).await.is_err() {
                        return;
                    }
                }
            });
        }
    });
    address
}

fn options(address: SocketAddr, cacert: Option<&Path>) -> Options {
    let raw = RawOptions {
        url: format!("https://localhost:{}/v1", address.port()),
        cacert: cacert.map(Path::to_owned),
        rate: "200".to_owned(),
        duration: Some("500ms".to_owned()),
        ..to(address)
    };
    Options::check(raw).expect("the options are valid")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_with_a_trusted_certificate_is_accepted() {
    let folder = tempfile::tempdir().expect("a folder");
    let address = serve(folder.path()).await;
    let options = options(address, Some(&folder.path().join("ca.pem")));
    let report = run(options, |_| {}, pending()).await.expect("the server listens");
    assert_eq!((report.record.total().ok(), report.failed()), (100, 0), "{}", report.table());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_without_a_trusted_certificate_is_rejected() {
    let [one, other] = [(); 2].map(|()| tempfile::tempdir().expect("a folder"));
    let address = serve(one.path()).await;
    serve(other.path()).await;
    for roots in [Some(other.path().join("ca.pem")), None] {
        match run(options(address, roots.as_deref()), |_| {}, pending()).await {
            Err(error @ RunError::NotTrusted { .. }) => {
                assert!(error.to_string().contains("--cacert"), "{error}");
            }
            other => panic!("{other:?}"),
        }
    }
}
