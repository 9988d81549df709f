//! Tests of keys that are fetched from a URL, over real sockets and TLS.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::http::HeaderValue;
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use jwt::TokenRules;
use ring::rand::SystemRandom;
use ring::signature::{Ed25519KeyPair, KeyPair};
use rustls::pki_types::PrivateKeyDer;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;

use super::*;

/// Issuer that serves a key set over HTTPS, with a certificate of an authority of its own.
struct Issuer {
    pair: Ed25519KeyPair,
    address: SocketAddr,
    authorities: PathBuf,
    fetches: Arc<AtomicUsize>,
    response: Arc<Mutex<Vec<u8>>>,
    _dir: tempfile::TempDir,
    _task: tokio::task::JoinSet<()>,
}

fn response(status: &str, body: &[u8]) -> Vec<u8> {
    let head = format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n", body.len());
    [head.as_bytes(), body].concat()
}

impl Issuer {
    async fn start() -> Issuer {
        let made = Ed25519KeyPair::generate_pkcs8(&SystemRandom::new()).unwrap();
        let pair = Ed25519KeyPair::from_pkcs8(made.as_ref()).unwrap();
        let certified = rcgen::generate_simple_self_signed(vec!["127.0.0.1".to_owned()]).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let authorities = dir.path().join("ca.pem");
        std::fs::write(&authorities, certified.cert.pem()).unwrap();
        let key = PrivateKeyDer::try_from(certified.signing_key.serialize_der()).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![certified.cert.der().clone()], key)
            .unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (fetches, served) = (Arc::<AtomicUsize>::default(), Arc::new(Mutex::independent(Vec::new())));
        let mut task = tokio::task::JoinSet::new();
        let (counted, current, acceptor) =
            (fetches.clone(), served.clone(), TlsAcceptor::from(Arc::new(config)));
        task.spawn(async move {
            loop {
                let (tcp, _) = listener.accept().await.unwrap();
                let Ok(mut stream) = acceptor.accept(tcp).await else { continue };
                let mut head = Vec::new();
                while !head.ends_with(b"\r\n\r\n") {
                    head.push(stream.read_u8().await.unwrap());
                }
                assert!(
                    head.starts_with(b"GET /keys?set=1 HTTP/1.1\r\n"),
                    "{}",
                    String::from_utf8_lossy(&head)
                );
                counted.fetch_add(1, Ordering::Relaxed);
                let response = current.lock().clone();
                stream.write_all(&response).await.ok();
                stream.shutdown().await.ok();
            }
        });
        let issuer = Issuer { pair, address, authorities, fetches, response: served, _dir: dir, _task: task };
        issuer.serve(response("200 OK", issuer.set("1").as_bytes()));
        issuer
    }

    fn serve(&self, response: Vec<u8>) {
        *self.response.lock() = response;
    }

    fn set(&self, kid: &str) -> String {
        let x = URL_SAFE_NO_PAD.encode(self.pair.public_key().as_ref());
        json!({"keys": [{"kty": "OKP", "crv": "Ed25519", "kid": kid, "x": x}]}).to_string()
    }

    fn tokens(&self) -> OperatorTokens {
        let token = TokenRules { issuer: "i".to_owned(), audience: "a".to_owned(), leeway: Duration::ZERO };
        let rules = OperatorRules {
            token,
            roles_claim: "roles".to_owned(),
            viewers: Vec::new(),
            operators: vec!["operator".to_owned()],
        };
        let url = format!("https://{}/keys?set=1", self.address).parse().unwrap();
        let keys = KeySource::Url { url, authorities: Some(self.authorities.clone()) };
        OperatorTokens::new(OperatorsConfig { rules, keys }, Arc::default()).unwrap()
    }

    fn headers(&self, kid: &str) -> HeaderMap {
        let claims = json!({"iss": "i", "aud": "a", "roles": "operator", "exp": unix_time().as_secs() + 600});
        let part = |value: &Value| URL_SAFE_NO_PAD.encode(value.to_string());
        let text = format!("{}.{}", part(&json!({"alg": "EdDSA", "kid": kid})), part(&claims));
        let signature = URL_SAFE_NO_PAD.encode(self.pair.sign(text.as_bytes()));
        let value = HeaderValue::try_from(format!("Bearer {text}.{signature}")).unwrap();
        HeaderMap::from_iter([(AUTHORIZATION, value)])
    }

    fn fetches(&self) -> usize {
        self.fetches.load(Ordering::Relaxed)
    }
}

#[tokio::test]
async fn an_unknown_key_is_fetched_once_in_a_minute_however_many_tokens_name_one() {
    let issuer = Issuer::start().await;
    let tokens = issuer.tokens();
    let found = tokens.authenticate(&issuer.headers("1")).await.map(|operator| operator.role);
    assert_eq!(found.ok(), Some(Some(regions::spiffe::Role::Operator)), "the first token waits for the keys");
    for _ in 0..100 {
        let rejected = tokens.authenticate(&issuer.headers("2")).await;
        assert!(matches!(rejected, Err(TokenRejection::Key)));
    }
    assert_eq!(issuer.fetches(), 1);
    assert!(tokens.authenticate(&issuer.headers("1")).await.is_ok());
}

#[tokio::test]
async fn the_last_valid_keys_stay_in_use_while_the_issuer_serves_none() {
    let issuer = Issuer::start().await;
    let tokens = issuer.tokens();
    tokens.fetch().await;
    let large = vec![b' '; jwks::JWKS_BYTES_MAX + 1];
    let mut at_limit = issuer.set("1").into_bytes();
    at_limit.resize(jwks::JWKS_BYTES_MAX, b' ');
    for (served, failures) in [
        (response("503 Service Unavailable", b""), 1),
        (response("302 Found", issuer.set("1").as_bytes()), 2),
        (response("200 OK", b"{}"), 3),
        (response("200 OK", &large), 4),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{".to_vec(), 5),
        (response("200 OK", &at_limit), 5),
    ] {
        issuer.serve(served);
        tokens.fetch().await;
        assert_eq!(tokens.metrics.operators.key_fetch_failures.get(), failures);
        assert!(tokens.authenticate(&issuer.headers("1")).await.is_ok(), "{failures}");
    }
    issuer.serve(response("200 OK", issuer.set("2").as_bytes()));
    tokens.fetch().await;
    assert!(tokens.authenticate(&issuer.headers("2")).await.is_ok());
    // No certificate of a configured authority: the keys of an impostor are not used.
    let other = Issuer::start().await;
    let mistaken = Issuer { address: other.address, ..issuer };
    let tokens = mistaken.tokens();
    tokens.fetch().await;
    assert_eq!((tokens.metrics.operators.key_fetch_failures.get(), other.fetches()), (1, 0));
}

#[test]
fn only_one_bearer_token_is_read() {
    let read = |values: &[&'static str]| {
        let mut headers = HeaderMap::new();
        for value in values {
            headers.append(AUTHORIZATION, HeaderValue::from_static(value));
        }
        bearer(&headers).map(<[u8]>::to_vec)
    };
    assert_eq!(read(&["Bearer a.b.c"]), Some(b"a.b.c".to_vec()));
    assert_eq!(read(&["bearer  a "]), Some(b"a".to_vec()));
    for none in [&[][..], &["Basic a"], &["Bearer a", "Bearer a"], &["Bearer"], &[""]] {
        assert_eq!(read(none), None, "{none:?}");
    }
}
