//! In-process server whose responses are defined by the test.

use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use axum::Router;
use axum::body::Bytes;
use axum::extract::ConnectInfo;
use axum::http::{HeaderMap, Uri};
use axum::response::Response;
use loadtest::{Options, RawOptions};

/// Received request.
#[derive(Clone, Debug)]
pub(crate) struct CapturedRequest {
    /// Index in the order of arrival, from 0.
    pub(crate) number: u64,
    pub(crate) from: SocketAddr,
    pub(crate) path: String,
    pub(crate) headers: HeaderMap,
    pub(crate) body: serde_json::Value,
}

/// Serves `respond` until the test ends.
pub(crate) async fn serve<F>(handle: impl Fn(CapturedRequest) -> F + Send + Sync + 'static) -> SocketAddr
where
    F: Future<Output = Response> + Send + 'static,
{
    let (arrived, handle) = (Arc::new(AtomicU64::new(0)), Arc::new(handle));
    let handler = move |uri: Uri, from: ConnectInfo<SocketAddr>, headers: HeaderMap, body: Bytes| {
        let number = arrived.fetch_add(1, Ordering::SeqCst);
        let body = serde_json::from_slice(&body).expect("the load tool sends JSON");
        let arrived = CapturedRequest { number, from: from.0, path: uri.path().to_owned(), headers, body };
        let handle = Arc::clone(&handle);
        async move { handle(arrived).await }
    };
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = listener.local_addr().expect("a bound listener has an address");
    let service = Router::new().fallback(handler).into_make_service_with_connect_info::<SocketAddr>();
    tokio::spawn(async move { axum::serve(listener, service).await });
    address
}

/// Creates a response of `status` from `region`.
pub(crate) fn respond(status: u16, region: &str, body: impl Into<axum::body::Body>) -> Response {
    Response::builder()
        .status(status)
        .header("x-meridian-region", region)
        .body(body.into())
        .expect("a status and a header make a response")
}

/// Creates the body of an embeddings response.
pub(crate) fn rows(rows: &[&[f32]]) -> String {
    let data: Vec<_> = rows
        .iter()
        .enumerate()
        .map(|(index, row)| serde_json::json!({"object": "embedding", "index": index, "embedding": row}))
        .collect();
    serde_json::json!({"object": "list", "data": data, "model": "m"}).to_string()
}

/// Options for `rate` requests per second for `duration`, one text each.
pub(crate) fn options(address: SocketAddr, rate: &str, duration: &str) -> Options {
    Options::check(RawOptions { rate: rate.to_owned(), duration: Some(duration.to_owned()), ..to(address) })
        .expect("the options are valid")
}

/// Default options for the server at `address`.
pub(crate) fn to(address: SocketAddr) -> RawOptions {
    RawOptions {
        url: format!("http://{address}/v1"),
        key: Some("local".to_owned()),
        model: "m".to_owned(),
        timeout: "60s".to_owned(),
        geo: Some("50.11,8.68".to_owned()),
        ..RawOptions::default()
    }
}
