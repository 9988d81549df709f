//! A request that panics, beside others on the same listener and on the same connection.

use super::{AfterAnswer, Door, Leave, Listener};
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

/// Panics where the path says so, with a lock in its hand.
struct Defective(Mutex<u32>);

impl Door for Defective {
    async fn answer(&self, session: &mut ServerSession) -> AfterAnswer {
        let path = session.req_header().uri.path().to_owned();
        match path.as_str() {
            "/before-its-answer" => {
                let mut counted = self.0.lock();
                *counted += 1;
                panic!("4 is not 5");
            }
            "/in-its-answer" => {
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
    let leave = std::future::pending::<Leave>();
    let serving = tokio::spawn(listener.serve(Arc::new(Defective(Mutex::independent(0))), leave, timeouts));
    (address, serving)
}

async fn ask(address: SocketAddr, path: &str) -> String {
    let mut stream = TcpStream::connect(address).await.expect("it accepts");
    let head = format!("GET {path} HTTP/1.1\r\nhost: a\r\nx-request-id: one\r\nconnection: close\r\n\r\n");
    stream.write_all(head.as_bytes()).await.expect("it reads");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.expect("it ends in order");
    answer
}

#[tokio::test]
async fn a_panic_costs_the_request_that_it_is_in_and_its_connection() {
    let (address, serving) = serve().await;
    let before = contained(Scope::Request);
    let answer = ask(address, "/before-its-answer").await;
    assert!(
        answer.starts_with("HTTP/1.1 500 ")
            && answer.to_lowercase().contains("x-meridian-error: internal\r\n"),
        "{answer}"
    );
    assert!(answer.to_lowercase().contains("connection: close") && answer.contains("one"), "{answer}");
    assert!(!answer.contains("4 is not 5"), "what it says is for the log: {answer}");
    let answer = ask(address, "/in-its-answer").await;
    assert!(answer.starts_with("HTTP/1.1 200 ") && answer.ends_with("\r\n\r\n"), "it breaks off: {answer}");
    // Other tests of this process make requests panic as well.
    assert!(contained(Scope::Request) - before >= 2);

    let answer = ask(address, "/").await;
    assert!(answer.starts_with("HTTP/1.1 200 ") && answer.ends_with("\r\n\r\n1"), "{answer}");
    assert_eq!(process::failure(), None);
    serving.abort();
}

#[tokio::test]
async fn a_panic_costs_one_stream_of_a_connection_and_no_other() {
    let (address, serving) = serve().await;
    let stream = TcpStream::connect(address).await.expect("it accepts");
    let (mut requests, connection) = h2::client::handshake(stream).await.expect("it speaks HTTP/2");
    let driver = tokio::spawn(async move { connection.await.ok() });
    let mut send = |path: &str| {
        let request = Request::get(format!("http://a{path}")).body(()).expect("a request");
        requests.send_request(request, true).expect("it is open").0
    };
    let asked = ["/before-its-answer", "/", "/in-its-answer", "/"].map(&mut send);
    let mut statuses = Vec::new();
    for answer in asked {
        // One that breaks off may do so before its head was sent.
        let Ok(answer) = answer.await else {
            statuses.push((StatusCode::OK, false));
            continue;
        };
        let (head, mut body) = answer.into_parts();
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
        "the third breaks off"
    );
    driver.abort();
    serving.abort();
}
