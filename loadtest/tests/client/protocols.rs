//! Operations over HTTP/1.1 and HTTP/2: by ALPN, by prior knowledge, and with a server that declines HTTP/2.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::server::conn::{http1, http2};
use hyper::service::service_fn;
use hyper::{Request, Response, Version};
use hyper_util::rt::{TokioExecutor, TokioIo};
use loadtest::client::{
    Client, ClientError, ClientSettings, EndpointSettings, HttpAttemptError, HttpProtocol,
};
use rustls::ServerConfig;
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;

use crate::server::valid_response;
use crate::{embed, fast_retries, in_order};

/// Counters of connections and of requests over HTTP/2.
#[derive(Default)]
struct Counts {
    connections: AtomicUsize,
    over_http2: AtomicUsize,
}

/// Starts a server with valid responses over HTTP/2 (`two`) or HTTP/1.1, optionally with TLS.
async fn serve(two: bool, tls: Option<ServerConfig>) -> (u16, Arc<Counts>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let counts = Arc::new(Counts::default());
    let counters = Arc::clone(&counts);
    let tls = tls.map(|config| TlsAcceptor::from(Arc::new(config)));
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            counters.connections.fetch_add(1, Ordering::SeqCst);
            let (tls, counters) = (tls.clone(), Arc::clone(&counters));
            tokio::spawn(async move {
                match tls {
                    None => connection(stream, two, counters).await,
                    // A client that does not trust the certificate closes the connection.
                    Some(tls) => {
                        if let Ok(stream) = tls.accept(stream).await {
                            connection(stream, two, counters).await;
                        }
                    }
                }
            });
        }
    });
    (port, counts)
}

async fn connection(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    two: bool,
    counts: Arc<Counts>,
) {
    let service = service_fn(move |request: Request<Incoming>| {
        let counts = Arc::clone(&counts);
        async move {
            let over_http2 = usize::from(request.version() == Version::HTTP_2);
            counts.over_http2.fetch_add(over_http2, Ordering::SeqCst);
            let body = request.into_body().collect().await.unwrap().to_bytes();
            let response = valid_response(&serde_json::from_slice(&body).unwrap()).to_string();
            Ok::<_, Infallible>(Response::new(Full::new(Bytes::from(response))))
        }
    });
    let io = TokioIo::new(stream);
    // Connection errors are checked at the client.
    if two {
        drop(http2::Builder::new(TokioExecutor::new()).serve_connection(io, service).await);
    } else {
        drop(http1::Builder::new().serve_connection(io, service).await);
    }
}

/// Creates a certificate for `localhost` and a server configuration that offers these ALPN protocols.
fn certificate(protocols: &[&[u8]]) -> (String, ServerConfig) {
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let key = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(made.signing_key.serialize_der()));
    let mut config = ServerConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![made.cert.der().clone()], key)
        .unwrap();
    config.alpn_protocols = protocols.iter().map(|protocol| protocol.to_vec()).collect();
    (made.cert.pem(), config)
}

fn client(url: String, protocol: HttpProtocol, roots: Option<&str>) -> Client {
    let roots_pem = roots.map(|pem| pem.as_bytes().to_vec());
    Client::new(&ClientSettings { endpoints: vec![EndpointSettings::new(url, None)], protocol, roots_pem })
        .unwrap()
}

#[tokio::test]
async fn many_requests_share_a_few_connections_of_http2() {
    let (port, counts) = serve(true, None).await;
    let client = client(format!("http://127.0.0.1:{port}"), HttpProtocol::Http2, None);
    in_order(&embed(&client, 3000, &fast_retries()).await.unwrap(), 3000);
    assert_eq!(counts.over_http2.load(Ordering::SeqCst), 300);
    // 256 in flight, at most 96 per connection.
    assert!((1..=3).contains(&counts.connections.load(Ordering::SeqCst)));
}

#[tokio::test]
async fn alpn_selects_the_protocol() {
    for (protocol, offered, over_http2) in [
        (HttpProtocol::Http2, &b"h2"[..], true),
        (HttpProtocol::Http2, b"http/1.1", false),
        (HttpProtocol::Http1, b"http/1.1", false),
    ] {
        let (pem, config) = certificate(&[offered]);
        let (port, counts) = serve(over_http2, Some(config)).await;
        let client = client(format!("https://localhost:{port}"), protocol, Some(&pem));
        in_order(&embed(&client, 200, &fast_retries()).await.unwrap(), 200);
        let expected = if over_http2 { 20 } else { 0 };
        assert_eq!(
            counts.over_http2.load(Ordering::SeqCst),
            expected,
            "{protocol:?} with {offered:?} offered"
        );
    }
}

#[tokio::test]
async fn an_untrusted_server_receives_no_request() {
    let (_, config) = certificate(&[b"http/1.1"]);
    let (other, _) = certificate(&[]);
    let (port, counts) = serve(false, Some(config)).await;
    let client = client(format!("https://localhost:{port}"), HttpProtocol::Http1, Some(&other));
    let mut preference = fast_retries();
    preference.retries.retries_max = 0;
    let error = embed(&client, 5, &preference).await.unwrap_err();
    let unreachable = matches!(&error, ClientError::Failed { failure: HttpAttemptError::Unreachable(_), .. });
    assert!(unreachable && counts.over_http2.load(Ordering::SeqCst) == 0, "{error}");
}
