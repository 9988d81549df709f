//! Runs over HTTP/2: by prior knowledge, by ALPN, and with a server that lacks it.

use std::convert::Infallible;
use std::future::pending;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper::{Request, Response, Version};
use hyper_util::rt::{TokioExecutor, TokioIo};
use loadtest::{Options, RawOptions, RunError, run};
use rustls::ServerConfig;
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_rustls::TlsAcceptor;

use crate::server::{rows, to};

/// Counters of a server, which responds as soon as `gate` is open.
struct Http2Server {
    connections: AtomicUsize,
    over_http2: AtomicUsize,
    gate: watch::Sender<bool>,
}

async fn serve(tls: Option<ServerConfig>, is_open: bool) -> (u16, Arc<Http2Server>) {
    serve_with(tls.into_iter().collect(), is_open).await
}

/// Serves each connection with its own TLS configuration, and further ones with the last; without TLS if there is none.
async fn serve_with(tls: Vec<ServerConfig>, is_open: bool) -> (u16, Arc<Http2Server>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let port = listener.local_addr().expect("a bound listener has an address").port();
    let (connections, over_http2) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let server = Arc::new(Http2Server { connections, over_http2, gate: watch::Sender::new(is_open) });
    let serving = Arc::clone(&server);
    let acceptors: Vec<_> = tls.into_iter().map(|config| TlsAcceptor::from(Arc::new(config))).collect();
    tokio::spawn(async move {
        let mut accepted = 0;
        while let Ok((stream, _)) = listener.accept().await {
            let tls = acceptors.get(accepted).or(acceptors.last()).cloned();
            let server = Arc::clone(&serving);
            accepted += 1;
            tokio::spawn(async move {
                match tls {
                    None => connection(stream, server).await,
                    Some(tls) => {
                        if let Ok(stream) = tls.accept(stream).await {
                            connection(stream, server).await;
                        }
                    }
                }
            });
        }
    });
    (port, server)
}

async fn connection(stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static, server: Arc<Http2Server>) {
    server.connections.fetch_add(1, Ordering::SeqCst);
    let service = service_fn(move |request: Request<Incoming>| {
        let (server, mut gate) = (Arc::clone(&server), server.gate.subscribe());
        async move {
            server.over_http2.fetch_add(usize::from(request.version() == Version::HTTP_2), Ordering::SeqCst);
            assert_eq!(request.uri().path(), "/v1/embeddings");
            let header = |name| request.headers().get(name).and_then(|value| value.to_str().ok());
            assert_eq!(
                (header("x-meridian-priority"), header("authorization"), header("x-meridian-client-geo")),
                (Some("interactive"), Some("Bearer local"), Some("50.11,8.68"))
            );
            let body = request.into_body().collect().await.expect("a body").to_bytes();
            assert!(body.starts_with(b"{\"model\":"), "{body:?}");
            drop(gate.wait_for(|is_open| *is_open).await.expect("the server outlives the request"));
            let response = Response::builder()
                .header("x-meridian-region", "aws/us-east-1")
                .header("x-meridian-attempts", "2")
                .body(Full::new(Bytes::from(rows(&[&[0.25; 384]]))));
            Ok::<_, Infallible>(response.expect("headers make a response"))
        }
    });
    // Connection errors are checked at the client.
    drop(http2::Builder::new(TokioExecutor::new()).serve_connection(TokioIo::new(stream), service).await);
}

/// Creates a certificate for `localhost` in `folder` and a server configuration that offers these ALPN protocols.
fn certificate(folder: &Path, protocols: &[&[u8]]) -> (PathBuf, ServerConfig) {
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).expect("a certificate");
    let file = folder.join("ca.pem");
    std::fs::write(&file, made.cert.pem()).expect("a file");
    let key = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(made.signing_key.serialize_der()));
    let mut config = ServerConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_no_client_auth()
        .with_single_cert(vec![made.cert.der().clone()], key)
        .expect("a key that fits");
    config.alpn_protocols = protocols.iter().map(|protocol| protocol.to_vec()).collect();
    (file, config)
}

fn options(url: String, cacert: Option<PathBuf>, rate: &str, duration: &str) -> Options {
    let raw = RawOptions {
        url,
        cacert,
        rate: rate.to_owned(),
        duration: Some(duration.to_owned()),
        http2: true,
        ..to("127.0.0.1:1".parse().expect("an address"))
    };
    Options::check(raw).expect("the options are valid")
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_over_http2_share_a_few_connections() {
    let (port, server) = serve(None, true).await;
    let options = options(format!("http://127.0.0.1:{port}"), None, "400", "500ms");
    let report = run(options, |_| {}, pending()).await.expect("the server listens");
    let total = report.record.total();
    assert_eq!((total.ok(), total.retried, report.failed()), (200, 200, 0), "{}", report.table());
    assert!(
        report.table().contains("aws/us-east-1") && report.table().contains(", HTTP/2"),
        "{}",
        report.table()
    );
    assert_eq!(server.over_http2.load(Ordering::SeqCst), 200);
    // The check before the run opens one more.
    assert!((2..=4).contains(&server.connections.load(Ordering::SeqCst)));
}

#[tokio::test(flavor = "multi_thread")]
async fn more_than_a_thousand_requests_are_in_flight_on_few_connections() {
    let (port, server) = serve(None, false).await;
    let options = options(format!("http://127.0.0.1:{port}"), None, "20000", "75ms");
    let mut most = 0;
    let open_after_the_last_start = |snapshot: &loadtest::RunSnapshot| {
        most = most.max(snapshot.in_flight);
        server.gate.send_if_modified(|is_open| {
            !*is_open && {
                *is_open = snapshot.in_flight == 1500;
                *is_open
            }
        });
    };
    let report = run(options, open_after_the_last_start, pending()).await.expect("the server listens");
    assert_eq!((report.record.total().ok(), report.failed(), most), (1500, 0, 1500), "{}", report.table());
    // At most 96 streams each, and the check before the run.
    assert_eq!(server.connections.load(Ordering::SeqCst), 1 + 1500_usize.div_ceil(96));
}

#[tokio::test(flavor = "multi_thread")]
async fn alpn_selects_http2_and_a_server_without_it_is_named() {
    let folder = tempfile::tempdir().expect("a folder");
    let (ca, config) = certificate(folder.path(), &[b"http/1.1", b"h2"]);
    let (port, server) = serve(Some(config), true).await;
    let url = format!("https://localhost:{port}");
    let report = run(options(url, Some(ca), "100", "200ms"), |_| {}, pending()).await.expect("it listens");
    assert_eq!((report.record.total().ok(), report.failed()), (20, 0), "{}", report.table());
    assert_eq!(server.over_http2.load(Ordering::SeqCst), 20);
    for protocols in [&[b"http/1.1".as_slice()][..], &[]] {
        let (ca, config) = certificate(folder.path(), protocols);
        let (port, _) = serve(Some(config), true).await;
        let options = options(format!("https://localhost:{port}"), Some(ca), "100", "200ms");
        match run(options, |_| {}, pending()).await {
            Err(error @ RunError::NoHttp2 { .. }) => {
                assert!(error.to_string().contains("--http2"), "{error}")
            }
            other => panic!("{protocols:?}: {other:?}"),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_declines_http2_during_the_run_ends_it() {
    let folder = tempfile::tempdir().expect("a folder");
    let (ca, config) = certificate(folder.path(), &[b"h2"]);
    // One server rejects the handshake, the other ignores the offered protocols.
    for declined in [vec![b"http/1.1".to_vec()], Vec::new()] {
        let mut declining = config.clone();
        declining.alpn_protocols = declined.clone();
        // The check before the run and the first connection of 96 streams; the run needs a third connection.
        let (port, _server) = serve_with(vec![config.clone(), config.clone(), declining], false).await;
        let options = options(format!("https://localhost:{port}"), Some(ca.clone()), "20000", "75ms");
        match run(options, |_| {}, pending()).await {
            Err(error @ RunError::Http2Declined { .. }) => {
                let error = error.to_string();
                assert!(error.contains("declined it on a later connection"), "{error}");
            }
            other => panic!("{declined:?}: {other:?}"),
        }
    }
}
