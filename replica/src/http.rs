//! The HTTP API, thin: each route reads, asks, and writes.
//!
//! `POST /v1/embeddings` and `GET /v1/models` are OpenAI's; `/health`, `/info` and `/status` are for the region and for
//! people. Work that grows with the body (parsing a large one, writing many vectors) leaves the reactor's threads.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, Response, Uri};
use axum::middleware::{Next, from_fn};
use axum::routing::{get, post};
use axum::{Extension, Router};
use replica_core::input::Input;
use replica_core::refusal::Refusal;
use replica_core::wire::headers;
use replica_core::wire::openai::response::Rows;
use replica_core::wire::openai::{EmbeddingsRequest, EmbeddingsResponse, ModelList};
use tokio::task::spawn_blocking;
use tokio::time::timeout_at;

use crate::app::{App, Service, State as Life};
use crate::batcher::Unanswered;
use crate::events::{RequestAnswered, RequestReceived, RequestRefused, TokenizerFailed};
use crate::respond;
use crate::tokenize::{MAX_JOBS, TokenIds, TokenizeError};

/// Above this, parsing takes longer (some 50 µs) than handing it to another thread.
const INLINE_BODY_BYTES: usize = 64 << 10;
/// Above this, so does writing: 16 vectors of 384 numbers.
const INLINE_NUMBERS: usize = 16 * 384;
/// The longest request identifier that is taken over from a client.
const MAX_REQUEST_ID_BYTES: usize = 128;

/// The routes.
pub(crate) fn router(app: Arc<App>) -> Router {
    Router::new()
        .route("/v1/embeddings", post(embeddings))
        .route("/v1/models", get(models))
        .route("/health", get(health))
        .route("/info", get(info))
        .route("/status", get(status))
        .fallback(not_found)
        .method_not_allowed_fallback(method_not_allowed)
        .layer(from_fn(identify))
        .with_state(app)
}

/// The name of a request in logs and answers: the client's, or one of ours.
#[derive(Clone)]
struct RequestId(HeaderValue);

impl RequestId {
    fn of(headers: &HeaderMap) -> RequestId {
        let given = headers.get(headers::REQUEST_ID).filter(|id| {
            let printable = id.as_bytes().iter().all(u8::is_ascii_graphic);
            printable && (1..=MAX_REQUEST_ID_BYTES).contains(&id.len())
        });
        let made = || {
            let id = format!("{:032x}", rand::random::<u128>());
            HeaderValue::from_str(&id).expect("hexadecimal digits are a header value")
        };
        RequestId(given.cloned().unwrap_or_else(made))
    }

    fn as_str(&self) -> &str {
        self.0.to_str().unwrap_or_default()
    }
}

/// Every answer carries the identifier of its request.
async fn identify(mut request: Request, next: Next) -> Response<Body> {
    let id = RequestId::of(request.headers());
    request.extensions_mut().insert(id.clone());
    let mut response = next.run(request).await;
    response.headers_mut().insert(headers::REQUEST_ID, id.0);
    response
}

async fn health(State(app): State<Arc<App>>) -> Response<Body> {
    match app.life() {
        Life::Ready => respond::json(b"{\"status\":\"ready\"}".to_vec()),
        Life::Starting => respond::refused(&Refusal::not_ready()),
        Life::Draining => respond::refused(&Refusal::draining()),
    }
}

async fn info(State(app): State<Arc<App>>) -> Response<Body> {
    respond::json(to_json(&app.info()))
}

async fn status(State(app): State<Arc<App>>) -> Response<Body> {
    respond::json(to_json(&app.status()))
}

async fn models(State(app): State<Arc<App>>) -> Response<Body> {
    respond::json(to_json(&ModelList::new(app.names.iter().map(String::as_str), app.started_at)))
}

async fn not_found(uri: Uri) -> Response<Body> {
    respond::refused(&Refusal::not_found(uri.path()))
}

async fn method_not_allowed(method: Method, uri: Uri) -> Response<Body> {
    respond::refused(&Refusal::method_not_allowed(method.as_str(), uri.path()))
}

async fn embeddings(
    State(app): State<Arc<App>>,
    Extension(id): Extension<RequestId>,
    request: Request,
) -> Response<Body> {
    RequestReceived.record(&app.counters);
    match embed(&app, &id, request).await {
        Ok(response) => response,
        Err(refusal) => {
            RequestRefused { request_id: id.as_str(), refusal: &refusal }.record(&app.counters);
            respond::refused(&refusal)
        }
    }
}

async fn embed(app: &App, id: &RequestId, request: Request) -> Result<Response<Body>, Refusal> {
    let received = Instant::now();
    let service = match app.life() {
        Life::Ready => app.service().ok_or_else(Refusal::not_ready)?,
        Life::Starting => return Err(Refusal::not_ready()),
        Life::Draining => return Err(Refusal::draining()),
    };
    let Some(timeout) = timeout_of(request.headers())? else {
        return answer(app, service, id, request, None).await;
    };
    let deadline = received + timeout;
    let answered = timeout_at(deadline.into(), answer(app, service, id, request, Some(deadline))).await;
    // Whichever notices first, the timer here or the queue, the caller hears the same.
    match answered {
        Ok(Ok(response)) => Ok(response),
        Ok(Err(refusal)) if Instant::now() < deadline => Err(refusal),
        Ok(Err(_)) | Err(_) => Err(Refusal::deadline_exceeded(timeout)),
    }
}

async fn answer(
    app: &App,
    service: &Service,
    id: &RequestId,
    request: Request,
    deadline: Option<Instant>,
) -> Result<Response<Body>, Refusal> {
    let (head, body) = request.into_parts();
    let body = app.bodies.read(&head.headers, body).await?;
    let max_inputs = app.limits.max_inputs;
    let (bytes, _room) = (body.bytes, body.room);
    let large = bytes.len() > INLINE_BODY_BYTES;
    let asked = off_reactor(large, id, move || EmbeddingsRequest::parse(&bytes, max_inputs)).await??;
    if !app.names.contains(&asked.model) {
        return Err(Refusal::model_not_found(&asked.model, &app.names));
    }
    asked.check_dimensions(service.dimensions)?;
    let EmbeddingsRequest { model, input, encoding, dimensions: _ } = asked;

    let started = Instant::now();
    let inputs = tokens(service, id, input).await?;
    let tokenize = started.elapsed();
    let count = inputs.len() as u64;
    let ticket = service.batcher.submit(inputs, deadline).map_err(|full| {
        let pending = format!("{} tokens are waiting", full.pending_tokens);
        Refusal::overloaded(&pending, full.max_queue_tokens, full.wait)
    })?;
    let vectors = ticket.vectors().await.map_err(|unanswered| match unanswered {
        Unanswered::Expired => Refusal::deadline_exceeded(started.elapsed()),
        Unanswered::EngineFailed => Refusal::internal(id.as_str()),
        Unanswered::Stopped => Refusal::draining(),
    })?;
    let (tokens, queue, engine) = (vectors.tokens, vectors.queue, vectors.engine);
    let large = vectors.values.len() > INLINE_NUMBERS;
    let columns = service.dimensions;
    let write =
        move || EmbeddingsResponse::write(&model, Rows::new(&vectors.values, columns), encoding, tokens);
    let mut response = respond::json(off_reactor(large, id, write).await?);
    response.headers_mut().insert(headers::SERVER_TIMING, server_timing(queue, tokenize, engine));
    RequestAnswered { request_id: id.as_str(), inputs: count, tokens, queue, tokenize, engine }
        .record(&app.counters);
    Ok(response)
}

/// The token ids of the inputs.
async fn tokens(service: &Service, id: &RequestId, input: Input) -> Result<Vec<TokenIds>, Refusal> {
    let texts = match input {
        Input::Texts(texts) => texts,
        Input::Tokens(inputs) => {
            service.readable.check_tokens(&inputs)?;
            return Ok(inputs.into_iter().map(Vec::into_boxed_slice).collect());
        }
    };
    service.tokenizer.encode(texts).await.map_err(|error| match error {
        TokenizeError::Refused(refusal) => refusal,
        TokenizeError::Full => {
            Refusal::overloaded("too many requests wait for a tokenizer", MAX_JOBS as u64, None)
        }
        TokenizeError::Stopped => Refusal::draining(),
        TokenizeError::Broken(reason) => {
            TokenizerFailed { request_id: id.as_str(), reason: &reason }.record();
            Refusal::internal(id.as_str())
        }
    })
}

/// Does `work` here if it is small, else where it stops nobody.
async fn off_reactor<T: Send + 'static>(
    large: bool,
    id: &RequestId,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Refusal> {
    if large { spawn_blocking(work).await.map_err(|_| Refusal::internal(id.as_str())) } else { Ok(work()) }
}

/// How long the caller is willing to wait.
fn timeout_of(headers: &HeaderMap) -> Result<Option<Duration>, Refusal> {
    let Some(given) = headers.get(headers::TIMEOUT_MS) else { return Ok(None) };
    let given = given.to_str().unwrap_or("not text");
    // A day is for ever, and keeps the sum with the clock from overflowing.
    match given.parse::<u64>() {
        Ok(millis @ 1..=86_400_000) => Ok(Some(Duration::from_millis(millis))),
        Ok(_) | Err(_) => {
            Err(Refusal::invalid_header(headers::TIMEOUT_MS, given, "whole milliseconds from 1 to 86400000"))
        }
    }
}

fn server_timing(queue: Duration, tokenize: Duration, engine: Duration) -> HeaderValue {
    let millis = |duration: Duration| duration.as_secs_f64() * 1e3;
    let (queue, tokenize, engine) = (millis(queue), millis(tokenize), millis(engine));
    let text = format!("queue;dur={queue:.3}, tokenize;dur={tokenize:.3}, engine;dur={engine:.3}");
    HeaderValue::from_str(&text).expect("letters, digits and punctuation are a header value")
}

fn to_json(value: &impl serde::Serialize) -> Vec<u8> {
    serde_json::to_vec(value).expect("strings and numbers serialise to JSON")
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{TcpListener, TcpStream};

    use super::*;

    /// The heads of the answers to `GET /health` and `POST /v1/embeddings` of a replica that has no model yet.
    async fn heads(draining: bool) -> [String; 2] {
        let text = "listen = \"127.0.0.1:0\"\nnames = [\"a\"]\nmodel = \"/model\"\n";
        let app = Arc::new(App::new(&text.parse().expect("a configuration")));
        if draining {
            app.drain();
        }
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("its address");
        let server = tokio::spawn(axum::serve(listener, router(app)).into_future());
        let mut heads = [String::new(), String::new()];
        for (head, request) in heads.iter_mut().zip(["GET /health", "POST /v1/embeddings"]) {
            let mut stream = TcpStream::connect(address).await.expect("a connection");
            let request =
                format!("{request} HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
            stream.write_all(request.as_bytes()).await.expect("to send");
            stream.read_to_string(head).await.expect("an answer");
        }
        server.abort();
        heads
    }

    #[tokio::test]
    async fn before_its_model_is_there_a_replica_says_so_and_sends_work_elsewhere() {
        for head in heads(false).await {
            assert!(
                head.starts_with("HTTP/1.1 503 ") && head.contains("x-meridian-error: not_ready\r\n"),
                "{head}"
            );
            assert!(head.contains("retry-after: 1\r\n"), "{head}");
        }
    }

    #[tokio::test]
    async fn a_replica_that_is_going_away_takes_no_work() {
        for head in heads(true).await {
            assert!(
                head.starts_with("HTTP/1.1 503 ") && head.contains("x-meridian-error: draining\r\n"),
                "{head}"
            );
        }
    }
}
