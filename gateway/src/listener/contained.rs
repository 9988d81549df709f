//! Tests of panicking requests beside others on the same listener and connection.

use super::{AfterResponse, Listener, RequestHandler, StopReason};
use crate::config::Timeouts;
use crate::respond;
use http::{Request, StatusCode};
use pingora::protocols::http::ServerSession;
use std::net::SocketAddr;
use std::sync::Arc;
use supervision::panics::{Scope, contained};
use supervision::{Mutex, process};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// Handler that panics for certain paths, while it holds a lock.
struct Defective(Mutex<u32>);

impl RequestHandler for Defective {
    async fn handle(&self, session: &mut ServerSession) -> AfterResponse {
        let path = session.req_header().uri.path().to_owned();
        match path.as_str() {
            "/before-response" => {
                let mut counted = self.0.lock();
                *counted += 1;
                panic!("4 is not 5");
            }
            "/within-response" => {
                let head = respond::head(200, &[("content-length", "10")]);
                respond::begin(session, head).await.expect("the client is there");
                panic!("4 is not 5");
            }
            _ => {
                let counted = self.0.lock().to_string();
                respond::ok(session, counted.into_bytes(), &[]).await
            }
        }
    }
}

async fn serve() -> (SocketAddr, tokio::task::JoinHandle<()>) {
    let listener = Listener::bind("127.0.0.1:0".parse().expect("an address")).await.expect("a port");
    let address = listener.address();
    let timeouts = Timeouts::default();
    let stop = std::future::pending::<StopReason>();
    let serving = tokio::spawn(listener.serve(Arc::new(Defective(Mutex::independent(0))), stop, timeouts));
    (address, serving)
}

async fn get(address: SocketAddr, path: &str) -> String {
    let mut stream = TcpStream::connect(address).await.expect("connected");
    let head = format!("GET {path} HTTP/1.1\r\nhost: a\r\nx-request-id: one\r\nconnection: close\r\n\r\n");
    stream.write_all(head.as_bytes()).await.expect("written");
    let mut response = String::new();
    stream.read_to_string(&mut response).await.expect("closed cleanly");
    response
}

#[tokio::test]
async fn a_panic_fails_its_request_and_connection_only() {
    let (address, serving) = serve().await;
    let before = contained(Scope::Request);
    let response = get(address, "/before-response").await;
    assert!(
        response.starts_with("HTTP/1.1 500 ")
            && response.to_lowercase().contains("x-meridian-error: internal\r\n"),
        "{response}"
    );
    assert!(response.to_lowercase().contains("connection: close") && response.contains("one"), "{response}");
    assert!(!response.contains("4 is not 5"), "the panic message is only logged: {response}");
    let response = get(address, "/within-response").await;
    assert!(
        response.starts_with("HTTP/1.1 200 ") && response.ends_with("\r\n\r\n"),
        "it is truncated: {response}"
    );
    // Other tests of this process panic in requests as well.
    assert!(contained(Scope::Request) - before >= 2);

    let response = get(address, "/").await;
    assert!(response.starts_with("HTTP/1.1 200 ") && response.ends_with("\r\n\r\n1"), "{response}");
    assert_eq!(process::failure(), None);
    serving.abort();
}

#[tokio::test]
async fn a_panic_fails_one_stream_of_a_connection_only() {
    let (address, serving) = serve().await;
    let stream = TcpStream::connect(address).await.expect("connected");
    let (mut requests, connection) = h2::client::handshake(stream).await.expect("HTTP/2 handshake");
    let driver = tokio::spawn(async move { connection.await.ok() });
    let mut send = |path: &str| {
        let request = Request::get(format!("http://a{path}")).body(()).expect("a request");
        requests.send_request(request, true).expect("it is open").0
    };
    let responses = ["/before-response", "/", "/within-response", "/"].map(&mut send);
    let mut statuses = Vec::new();
    for response in responses {
        // A truncated response may be reset before its head was sent.
        let Ok(response) = response.await else {
            statuses.push((StatusCode::OK, false));
            continue;
        };
        let (head, mut body) = response.into_parts();
        let ended = loop {
            match body.data().await {
                Some(Ok(_)) => {}
                Some(Err(_)) => break false,
                None => break true,
            }
        };
        statuses.push((head.status, ended));
    }
    let ok = (StatusCode::OK, true);
    assert_eq!(
        statuses,
        [(StatusCode::INTERNAL_SERVER_ERROR, true), ok, (StatusCode::OK, false), ok],
        "the third is truncated"
    );
    driver.abort();
    serving.abort();
}
