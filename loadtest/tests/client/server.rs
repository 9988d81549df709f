//! A server that does as it is told.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::http::{Response, StatusCode};
use axum::routing::post;
use loadtest::client::{Client, EndpointSettings, Settings};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

/// What it does with a request.
#[derive(Clone, Debug)]
pub(crate) enum Does {
    /// Answers as one should.
    Answer,
    /// Says this instead, with status 200.
    Say(String),
    /// Refuses, and says in how many seconds to come back.
    Refuse(u16, Option<u32>),
    /// Answers half, and hangs up.
    BreakOff,
    /// Never answers.
    Hang,
}

type Script = dyn Fn(usize, &Value) -> Does + Send + Sync;

pub(crate) struct Server {
    pub(crate) url: String,
    shared: Arc<Shared>,
    task: JoinHandle<()>,
}

struct Shared {
    script: Box<Script>,
    asked: AtomicUsize,
    /// Requests that are being hung, for as long as their clients wait.
    hung: AtomicUsize,
}

impl Server {
    /// A server that asks `script` what to do with each request, of which it is told the number from 0 and the body.
    pub(crate) async fn start(script: impl Fn(usize, &Value) -> Does + Send + Sync + 'static) -> Server {
        let shared = Arc::new(Shared { script: Box::new(script), asked: 0.into(), hung: 0.into() });
        let router = Router::new()
            .route("/v1/embeddings", post(answer))
            .route("/rerank", post(answer))
            .route("/predict", post(answer))
            .route("/echo", post(answer))
            .with_state(Arc::clone(&shared));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let task = tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
        Server { url, shared, task }
    }

    pub(crate) fn asked(&self) -> usize {
        self.shared.asked.load(Ordering::SeqCst)
    }

    pub(crate) fn hung(&self) -> usize {
        self.shared.hung.load(Ordering::SeqCst)
    }

    /// Gone: nobody listens there any more.
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
    Client::new(&Settings { endpoints, ..Settings::default() }).unwrap()
}

/// Counts for as long as it lives: hung requests end when their client is gone.
struct Hung(Arc<Shared>);

impl Drop for Hung {
    fn drop(&mut self) {
        self.0.hung.fetch_sub(1, Ordering::SeqCst);
    }
}

async fn answer(State(shared): State<Arc<Shared>>, body: String) -> Response<Body> {
    let number = shared.asked.fetch_add(1, Ordering::SeqCst);
    let body: Value = serde_json::from_str(&body).unwrap();
    match (shared.script)(number, &body) {
        Does::Answer => Response::new(Body::from(good(&body).to_string())),
        Does::Say(text) => Response::new(Body::from(text)),
        Does::Refuse(status, retry_after) => {
            let mut response = Response::new(Body::from("{\"error\":\"no\"}"));
            *response.status_mut() = StatusCode::from_u16(status).unwrap();
            if let Some(seconds) = retry_after {
                response.headers_mut().insert("retry-after", seconds.into());
            }
            response
        }
        Does::BreakOff => {
            let half = good(&body).to_string();
            let half = half[..half.len() / 2].to_owned();
            let pieces = [Ok(half), Err(std::io::Error::other("as told"))];
            Response::new(Body::from_stream(futures_util::stream::iter(pieces)))
        }
        Does::Hang => {
            shared.hung.fetch_add(1, Ordering::SeqCst);
            let _hung = Hung(Arc::clone(&shared));
            std::future::pending().await
        }
    }
}

/// What a good server answers: the vector of `text 7` is (7, 1).
pub(crate) fn good(body: &Value) -> Value {
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
    // Backwards, since nothing says that rows come in order.
    let rows: Vec<Value> =
        rows.rev().map(|(index, text)| json!({"index": index, "embedding": row(text)})).collect();
    let tokens = texts.len();
    json!({"data": rows, "model": "m", "usage": {"prompt_tokens": tokens, "total_tokens": tokens}})
}

fn number(text: &Value) -> f32 {
    text.as_str().unwrap().trim_start_matches("text ").parse().unwrap()
}
