//! Scripted in-process server.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::http::{Response, StatusCode};
use axum::routing::post;
use loadtest::client::{Client, ClientSettings, EndpointSettings};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

/// Reaction to a request.
#[derive(Clone, Debug)]
pub(crate) enum Reaction {
    /// Sends a valid response.
    Respond,
    /// Sends this body with status 200.
    RespondWith(String),
    /// Sends an error status, optionally with `retry-after` in seconds.
    Reject(u16, Option<u32>),
    /// Sends half of the response and closes the connection.
    CloseConnection,
    /// Sends no response.
    Hang,
}

type Script = dyn Fn(usize, &Value) -> Reaction + Send + Sync;

pub(crate) struct Server {
    pub(crate) url: String,
    state: Arc<ScriptState>,
    task: JoinHandle<()>,
}

struct ScriptState {
    script: Box<Script>,
    request_count: AtomicUsize,
    /// Requests without a response whose clients still wait.
    hanging_count: AtomicUsize,
}

impl Server {
    /// Starts a server that calls `script` with the index (from 0) and the body of each request.
    pub(crate) async fn start(script: impl Fn(usize, &Value) -> Reaction + Send + Sync + 'static) -> Server {
        let state = Arc::new(ScriptState {
            script: Box::new(script),
            request_count: 0.into(),
            hanging_count: 0.into(),
        });
        let router = Router::new()
            .route("/v1/embeddings", post(respond))
            .route("/rerank", post(respond))
            .route("/predict", post(respond))
            .route("/echo", post(respond))
            .with_state(Arc::clone(&state));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let task = tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
        Server { url, state, task }
    }

    pub(crate) fn request_count(&self) -> usize {
        self.state.request_count.load(Ordering::SeqCst)
    }

    pub(crate) fn hanging_count(&self) -> usize {
        self.state.hanging_count.load(Ordering::SeqCst)
    }

    /// Stops the server; its port is closed afterwards.
    pub(crate) async fn stop(&self) {
        self.task.abort();
        while !self.task.is_finished() {
            tokio::task::yield_now().await;
        }
    }

    pub(crate) fn client(&self) -> Client {
        client(&[(self, 1.0)])
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

pub(crate) fn client(servers: &[(&Server, f64)]) -> Client {
    let endpoint = |(server, weight): &(&Server, f64)| EndpointSettings {
        weight: *weight,
        ..EndpointSettings::new(&server.url, Some("key"))
    };
    let endpoints = servers.iter().map(endpoint).collect();
    Client::new(&ClientSettings { endpoints, ..ClientSettings::default() }).unwrap()
}

/// Decrements the count when the request ends because its client disconnected.
struct HangingGuard(Arc<ScriptState>);

impl Drop for HangingGuard {
    fn drop(&mut self) {
        self.0.hanging_count.fetch_sub(1, Ordering::SeqCst);
    }
}

async fn respond(State(state): State<Arc<ScriptState>>, body: String) -> Response<Body> {
    let number = state.request_count.fetch_add(1, Ordering::SeqCst);
    let body: Value = serde_json::from_str(&body).unwrap();
    match (state.script)(number, &body) {
        Reaction::Respond => Response::new(Body::from(valid_response(&body).to_string())),
        Reaction::RespondWith(text) => Response::new(Body::from(text)),
        Reaction::Reject(status, retry_after) => {
            let mut response = Response::new(Body::from("{\"error\":\"no\"}"));
            *response.status_mut() = StatusCode::from_u16(status).unwrap();
            if let Some(seconds) = retry_after {
                response.headers_mut().insert("retry-after", seconds.into());
            }
            response
        }
        Reaction::CloseConnection => {
            let half = valid_response(&body).to_string();
            let half = half[..half.len() / 2].to_owned();
            let pieces = [Ok(half), Err(std::io::Error::other("scripted"))];
            Response::new(Body::from_stream(futures_util::stream::iter(pieces)))
        }
        Reaction::Hang => {
            state.hanging_count.fetch_add(1, Ordering::SeqCst);
            let _hung = HangingGuard(Arc::clone(&state));
            std::future::pending().await
        }
    }
}

/// Valid response: the vector of `text 7` is (7, 1).
pub(crate) fn valid_response(body: &Value) -> Value {
    if let Some(texts) = body["input"].as_array() {
        return embeddings(texts, |text| vec![number(text), 1.0]);
    }
    if let Some(texts) = body["texts"].as_array() {
        let rank = |(index, text): (usize, &Value)| json!({"index": index, "score": number(text)});
        return texts.iter().enumerate().rev().map(rank).collect();
    }
    if let Some(texts) = body["inputs"].as_array() {
        let classes = |text: &Value| json!([{"label": text[0], "score": number(&text[0])}]);
        return texts.iter().map(classes).collect();
    }
    json!({ "echo": body })
}

pub(crate) fn embeddings(texts: &[Value], row: impl Fn(&Value) -> Vec<f32>) -> Value {
    let rows = texts.iter().enumerate();
    // In reverse order, because the order of rows is not guaranteed.
    let rows: Vec<Value> =
        rows.rev().map(|(index, text)| json!({"index": index, "embedding": row(text)})).collect();
    let tokens = texts.len();
    json!({"data": rows, "model": "m", "usage": {"prompt_tokens": tokens, "total_tokens": tokens}})
}

fn number(text: &Value) -> f32 {
    text.as_str().unwrap().trim_start_matches("text ").parse().unwrap()
}
