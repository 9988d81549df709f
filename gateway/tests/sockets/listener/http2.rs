//! HTTP/2 without TLS (prior knowledge): the same requests, concurrently on one connection.

use super::fixture::{BODY, Edge, Fixture, Mode, TIMEOUT, wait_until};
use bytes::Bytes;
use h2::client::{Connection, SendRequest};
use h2::{Reason, RecvStream};
use http::{Method, Request, Response};
use serde_json::Value;
use std::time::{Duration, Instant};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::task::JoinHandle;

/// Connection, and how it ended.
pub(crate) struct Client {
    pub(crate) send: SendRequest<Bytes>,
    pub(crate) ended: JoinHandle<Result<(), h2::Error>>,
}

/// Response.
pub(crate) struct Http2Response {
    pub(crate) head: Response<()>,
    pub(crate) body: Vec<u8>,
}

impl Http2Response {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap()
    }
}

impl Client {
    pub(crate) async fn plain(edge: &Edge) -> Client {
        Client::over(edge.connect().await).await
    }

    pub(crate) async fn over(stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static) -> Client {
        let (send, connection): (_, Connection<_, Bytes>) = h2::client::Builder::new()
            .initial_window_size(1 << 20)
            .initial_connection_window_size(4 << 20)
            .handshake(stream)
            .await
            .unwrap();
        Client { send, ended: tokio::spawn(connection) }
    }

    /// Begins a request; its body is sent later.
    pub(crate) async fn begin(
        &self,
        request: Request<()>,
        end: bool,
    ) -> Result<(h2::client::ResponseFuture, h2::SendStream<Bytes>), h2::Error> {
        let mut send = self.send.clone().ready().await?;
        send.send_request(request, end)
    }

    pub(crate) async fn request(
        &self,
        request: Request<()>,
        body: Bytes,
    ) -> Result<Http2Response, h2::Error> {
        let (response, mut stream) = self.begin(request, body.is_empty()).await?;
        let sending = async {
            let mut body = body;
            while !body.is_empty() {
                stream.reserve_capacity(body.len());
                match std::future::poll_fn(|context| stream.poll_capacity(context)).await {
                    Some(Ok(room)) => {
                        let piece = body.split_to(room.min(body.len()));
                        if stream.send_data(piece, body.is_empty()).is_err() {
                            return;
                        }
                    }
                    // The response arrived before the request was complete.
                    Some(Err(_)) | None => return,
                }
            }
        };
        let (response, ()) = tokio::join!(response, sending);
        let (head, body) = response?.into_parts();
        Ok(Http2Response { head: Response::from_parts(head, ()), body: read_body(body).await? })
    }

    pub(crate) async fn post(&self, body: impl Into<Bytes>) -> Result<Http2Response, h2::Error> {
        self.request(post(), body.into()).await
    }
}

pub(crate) fn post() -> Request<()> {
    request(Method::POST, "/v1/embeddings", &[])
}

pub(crate) fn request(method: Method, path: &str, fields: &[(&str, &str)]) -> Request<()> {
    let request = Request::builder().method(method).uri(format!("http://localhost{path}"));
    let request = request.header("authorization", "Bearer k");
    fields.iter().fold(request, |request, (name, value)| request.header(*name, *value)).body(()).unwrap()
}

async fn read_body(mut body: RecvStream) -> Result<Vec<u8>, h2::Error> {
    let mut all = Vec::new();
    while let Some(piece) = body.data().await {
        let piece = piece?;
        body.flow_control().release_capacity(piece.len()).unwrap();
        all.extend_from_slice(&piece);
    }
    Ok(all)
}

#[tokio::test]
async fn many_concurrent_requests_share_one_connection() {
    let fixture = Fixture::new().await;
    let edge = fixture.edge("").await;
    let client = Client::plain(&edge).await;
    assert_eq!(
        client.post(BODY).await.unwrap().head.status(),
        200,
        "the client has received the stream limit"
    );
    fixture.region.mode.send_replace(Mode::Waits);
    // One more than the limit: it waits and is not rejected.
    let mut requests = tokio::task::JoinSet::new();
    for _ in 0..129 {
        let send = client.send.clone();
        requests.spawn(async move {
            let (response, mut stream) = send.ready().await?.send_request(post(), false)?;
            stream.send_data(BODY.into(), true)?;
            let (head, body) = response.await?.into_parts();
            Ok::<_, h2::Error>((head.status.as_u16(), read_body(body).await?))
        });
    }
    fixture.region.wait_for_requests(129).await;
    fixture.region.go_on.send_replace(true);
    while let Some(response) = requests.join_next().await {
        assert_eq!(response.unwrap().unwrap(), (200, br#"{"bytes":35}"#.to_vec()));
    }
    assert_eq!(fixture.region.requests(), 130);
}

#[tokio::test]
async fn responses_and_errors_are_those_of_http_1() {
    let fixture = Fixture::new().await;
    let edge = fixture.edge("").await;
    let client = Client::plain(&edge).await;
    let response = client.post(BODY).await.unwrap();
    assert_eq!((response.head.status().as_u16(), response.json()["bytes"].as_u64()), (200, Some(35)));
    assert_eq!(response.head.headers()["x-meridian-attempts"], "1");
    assert!(!response.head.headers().contains_key("connection"), "{:?}", response.head);
    let check = async |request: Request<()>, body: &str, status: u16, code: &str| {
        let response = client.request(request, Bytes::copy_from_slice(body.as_bytes())).await.unwrap();
        assert_eq!(response.head.status().as_u16(), status, "{:?}", response.head);
        assert_eq!(response.head.headers()["x-meridian-error"], code);
        response
    };
    check(post(), "{\"model\": 7}", 400, "invalid_value").await;
    check(request(Method::POST, "/v1/nothing", &[]), "{}", 404, "not_found").await;
    check(request(Method::PUT, "/v1/embeddings", &[]), BODY, 405, "method_not_allowed").await;
    check(request(Method::POST, "/embed", &[("x-meridian-timeout-ms", "x")]), BODY, 400, "invalid_header")
        .await;
    let head = client.request(request(Method::HEAD, "/v1/models", &[]), Bytes::new()).await.unwrap();
    assert_eq!((head.head.status().as_u16(), head.body.len()), (200, 0));
    // A body that is rejected while it is sent ends only its stream.
    let large = "x".repeat((32 << 20) + 1);
    let declared = request(Method::POST, "/v1/embeddings", &[("content-length", &large.len().to_string())]);
    check(declared, &large, 413, "body_too_large").await;
    check(post(), &large, 413, "body_too_large").await;
    assert_eq!(client.post(BODY).await.unwrap().head.status(), 200, "the connection stays open");
}

#[tokio::test]
async fn bodies_may_be_as_large_as_over_http_1() {
    let fixture = Fixture::new().await;
    let edge = fixture.edge("").await;
    let client = Client::plain(&edge).await;
    let body = BODY.replace("\"x\"", &format!("\"{}\"", "x".repeat((32 << 20) - BODY.len() + 1)));
    assert_eq!(client.post(body).await.unwrap().json()["bytes"].as_u64(), Some(32 << 20));
    fixture.region.mode.send_replace(Mode::Responds(64 << 20));
    assert_eq!(client.post(BODY).await.unwrap().body.len(), 64 << 20);
}

#[tokio::test]
async fn a_reset_cancels_its_request_and_no_other() {
    let fixture = Fixture::new().await;
    let edge = fixture.edge("").await;
    let client = Client::plain(&edge).await;
    fixture.region.mode.send_replace(Mode::Waits);
    let (kept, mut stream) = client.begin(post(), false).await.unwrap();
    stream.send_data(BODY.into(), true).unwrap();
    let (_left, mut left) = client.begin(post(), false).await.unwrap();
    left.send_data(BODY.into(), true).unwrap();
    fixture.region.wait_for_requests(2).await;
    left.send_reset(Reason::CANCEL);
    let cancelled =
        async { fixture.region.cancelled.subscribe().wait_for(|count| *count == 1).await.map(|_| ()) };
    tokio::time::timeout(TIMEOUT, cancelled).await.expect("the request is cancelled at the region").unwrap();
    fixture.region.go_on.send_replace(true);
    assert_eq!(kept.await.unwrap().status(), 200);
    assert_eq!(fixture.region.requests(), 2, "no request was retried");
    // A closed connection cancels all of its requests.
    fixture.region.go_on.send_replace(false);
    let (_waiting, mut stream) = client.begin(post(), false).await.unwrap();
    stream.send_data(BODY.into(), true).unwrap();
    fixture.region.wait_for_requests(3).await;
    client.ended.abort();
    wait_until("the request is cancelled at the region again", || *fixture.region.cancelled.borrow() == 2)
        .await;
}

#[tokio::test]
async fn oversized_heads_are_rejected_and_an_idle_connection_gets_goaway() {
    let fixture = Fixture::new().await;
    let edge = fixture.quick_edge().await;
    let client = Client::plain(&edge).await;
    let large = request(Method::GET, "/v1/models", &[("x-a", &"x".repeat(70 << 10))]);
    match client.request(large, Bytes::new()).await {
        Ok(response) => assert_eq!(response.head.status().as_u16(), 431),
        Err(error) => assert!(error.is_reset() || error.is_go_away(), "{error}"),
    }
    let client = Client::plain(&edge).await;
    assert_eq!(client.post(BODY).await.unwrap().head.status(), 200);
    let begun = Instant::now();
    let Client { send, ended } = client;
    tokio::time::timeout(TIMEOUT, ended).await.expect("it is closed").unwrap().unwrap();
    assert!(begun.elapsed() >= Duration::from_millis(300), "{:?}", begun.elapsed());
    drop(send);
}
