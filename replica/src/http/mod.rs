//! HTTP API. Each route parses, computes and writes; the logic is elsewhere.
//!
//! 1. [`call`]: the steps shared by all requests that need the engine.
//! 2. [`embeddings`]: embeddings in every dialect; [`rerank`]: pairs in the formats of Cohere, Jina, Voyage,
//!    Infinity, TEI and vLLM; [`tei`]: the other routes of TEI, and classification.
//!
//! `/health`, `/info`, `/status` and `/metrics` are for the spoke and for operators; `/log` is at the listener for operators only. Each
//! path writes errors in the format of its API.

mod call;
mod embeddings;
mod rerank;
mod tei;

use std::future::Future;
use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Path, Request, State};
use axum::http::header::ACCEPT;
use axum::http::{HeaderMap, HeaderValue, Method, Response, Uri};
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::routing::{MethodRouter, get, post};
use axum::{Extension, Router};
use metrics::Format;
use replica_api::api::{Dialect, Operation};
use replica_api::bedrock::InvokeRequest;
use replica_api::cohere::CohereEmbedRequest;
use replica_api::embeddings::EmbeddingsDialect;
use replica_api::headers;
use replica_api::openai::{EmbeddingsRequest, ModelList, ModelObject};
use replica_api::paths;
use replica_api::refusal::{ListLimit, Refusal};
use replica_api::tei::EmbedRequest;
use replica_api::voyage::VoyageEmbeddingsRequest;

use self::call::{ApiCall, ComputedResponse, HttpRequestId};
use crate::app::{App, Lifecycle};
use crate::events::RequestPanicked;
use crate::respond;
use crate::start_state;
use supervision::request::{Panicked, contain};

/// Returns the routes.
pub(crate) fn router(app: Arc<App>) -> Router {
    let operations = Operation::ALL.iter().fold(Router::new(), |router, operation| {
        router.route(operation.definition().path, handler(*operation))
    });
    operations
        .route(paths::MODELS, get(models))
        .route(paths::MODEL, get(model))
        .merge(probes())
        .fallback(not_found)
        .method_not_allowed_fallback(method_not_allowed)
        .layer(from_fn_with_state(Arc::clone(&app), check_revision))
        .layer(from_fn(identify))
        .with_state(app)
}

/// Returns the routes of the listener for operators.
pub(crate) fn operations_router(app: Arc<App>) -> Router {
    probes()
        .route(Operation::Info.definition().path, handler(Operation::Info))
        .merge(telemetry::logs::http::routes())
        .fallback(not_found)
        .method_not_allowed_fallback(method_not_allowed)
        .layer(from_fn(identify))
        .with_state(app)
}

/// Returns the routes of both listeners.
fn probes() -> Router<Arc<App>> {
    Router::new()
        .route(paths::HEALTH, get(health))
        .route(paths::STATUS, get(status))
        .route(paths::METRICS, get(metrics))
}

/// Returns the handler of an operation.
fn handler(operation: Operation) -> MethodRouter<Arc<App>> {
    match operation {
        Operation::Embeddings | Operation::InfinityEmbeddings => {
            embeddings(operation, EmbeddingsRequest::parse)
        }
        Operation::CohereEmbedV1 => embeddings(operation, CohereEmbedRequest::parse_v1),
        Operation::CohereEmbedV2 => embeddings(operation, CohereEmbedRequest::parse_v2),
        Operation::VoyageEmbeddings => embeddings(operation, VoyageEmbeddingsRequest::parse),
        Operation::Embed => embeddings(operation, EmbedRequest::parse),
        Operation::BedrockInvoke => embeddings(operation, InvokeRequest::parse),
        Operation::VoyageRerank => computed(operation, rerank::voyage),
        Operation::InfinityRerank => computed(operation, rerank::infinity),
        Operation::RerankV1 => computed(operation, rerank::v1),
        Operation::RerankV2 => computed(operation, rerank::v2),
        Operation::Rerank => computed(operation, rerank::tei),
        Operation::Score | Operation::ScoreV1 => computed(operation, rerank::score),
        Operation::Pooling | Operation::PoolingV1 => computed(operation, self::embeddings::pooling),
        Operation::InfinityClassify => computed(operation, tei::classify_infinity),
        Operation::Classify | Operation::ClassifyV1 => computed(operation, tei::classify),
        Operation::EmbedAll => computed(operation, tei::embed_all),
        Operation::Predict => computed(operation, tei::predict),
        Operation::Similarity => computed(operation, tei::similarity),
        Operation::Tokenize => computed(operation, tei::tokenize),
        Operation::Decode => computed(operation, tei::decode),
        Operation::Root => computed(operation, tei::root).get(health),
        Operation::Info => get(info),
    }
}

/// Route of a request for embeddings whose body is parsed by `parse`.
fn embeddings<R: EmbeddingsDialect>(
    operation: Operation,
    parse: fn(&[u8], ListLimit) -> Result<R, Refusal>,
) -> MethodRouter<Arc<App>> {
    let path = operation.definition().path;
    computed(operation, move |call, body| self::embeddings::embeddings(call, body, path, parse))
}

/// Route of a request that needs the engine, handled by `handle`.
fn computed<H, F>(operation: Operation, handle: H) -> MethodRouter<Arc<App>>
where
    H: Fn(Arc<ApiCall>, Vec<u8>) -> F + Clone + Send + Sync + 'static,
    F: Future<Output = Result<ComputedResponse, Refusal>> + Send + 'static,
{
    post(move |State(app): State<Arc<App>>, Extension(id): Extension<HttpRequestId>, request: Request| {
        call::serve(app, id, operation, request, handle)
    })
}

/// Adds the request id to every response, and turns a panic into a 500.
async fn identify(mut request: Request, next: Next) -> Response<Body> {
    let id = HttpRequestId::of(request.headers());
    request.extensions_mut().insert(id.clone());
    let path = request.uri().path().to_owned();
    let mut response = contain(next.run(request)).await.unwrap_or_else(|Panicked(reason)| {
        RequestPanicked { id: id.as_str(), reason: &reason }.record();
        respond::refused(&Refusal::internal(id.as_str()), Dialect::of_path(&path))
    });
    response.headers_mut().insert(headers::REQUEST_ID, id.0);
    response
}

/// Rejects a request that requires another model revision; adds the revision to every response once a model is loaded.
async fn check_revision(State(app): State<Arc<App>>, request: Request, next: Next) -> Response<Body> {
    let required = request.headers().get(headers::MODEL_REVISION).cloned();
    let loaded = app.service().map(|service| service.revision.clone());
    let mut response = match (&required, &loaded) {
        (Some(required), Some(loaded)) if required != loaded => {
            let text = |value: &HeaderValue| String::from_utf8_lossy(value.as_bytes()).into_owned();
            let dialect = Dialect::of_path(request.uri().path());
            respond::refused(&Refusal::other_revision(&text(required), &text(loaded)), dialect)
        }
        _ => next.run(request).await,
    };
    if let Some(loaded) = loaded {
        response.headers_mut().insert(headers::MODEL_REVISION, loaded);
    }
    response
}

async fn health(State(app): State<Arc<App>>) -> Response<Body> {
    let checked = Arc::clone(&app);
    if let Err(problem) = app.health.probe(move || checked.check_locks()).await {
        return respond::refused(&Refusal::unhealthy(&problem), Dialect::OpenAi);
    }
    match app.lifecycle() {
        Lifecycle::Ready => respond::json(b"{\"status\":\"ready\"}".to_vec()),
        Lifecycle::Starting => starting(&app),
        Lifecycle::Draining => respond::refused(&Refusal::draining(), Dialect::OpenAi),
    }
}

/// Returns the response of a replica that is not ready yet, with the progress of its start.
fn starting(app: &App) -> Response<Body> {
    let (download, failure) = app.start.report();
    let Some(problem) = start_state::describe(&app.source, download.as_ref(), failure.as_ref()) else {
        return respond::refused(&Refusal::not_ready(), Dialect::OpenAi);
    };
    respond::refused(&Refusal::not_started(&problem), Dialect::OpenAi)
}

async fn info(State(app): State<Arc<App>>) -> Response<Body> {
    respond::json(to_json(&app.info()))
}

async fn status(State(app): State<Arc<App>>) -> Response<Body> {
    respond::json(to_json(&app.status()))
}

async fn metrics(State(app): State<Arc<App>>, headers: HeaderMap) -> Response<Body> {
    let accept = headers.get(ACCEPT).and_then(|value| value.to_str().ok());
    let format = Format::negotiate(accept);
    respond::text(format.content_type(), app.snapshot().text(format))
}

async fn models(State(app): State<Arc<App>>) -> Response<Body> {
    respond::json(to_json(&ModelList::new(app.names.iter().map(String::as_str), app.started_at)))
}

async fn model(State(app): State<Arc<App>>, Path(id): Path<String>) -> Response<Body> {
    if !app.names.contains(&id) {
        return respond::refused(&Refusal::model_not_found(&id, &app.names), Dialect::OpenAi);
    }
    respond::json(to_json(&ModelObject::new(&id, app.started_at)))
}

async fn not_found(uri: Uri) -> Response<Body> {
    respond::refused(&Refusal::not_found(uri.path()), Dialect::of_path(uri.path()))
}

async fn method_not_allowed(method: Method, uri: Uri) -> Response<Body> {
    let refusal = Refusal::method_not_allowed(method.as_str(), uri.path());
    respond::refused(&refusal, Dialect::of_path(uri.path()))
}

fn to_json(value: &impl serde::Serialize) -> Vec<u8> {
    serde_json::to_vec(value).expect("strings and numbers serialise to JSON")
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{TcpListener, TcpStream};

    use super::*;

    /// Returns the response heads of `GET /health` and `POST /v1/embeddings` of a replica without a model.
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
    async fn a_replica_without_a_model_responds_not_ready() {
        for head in heads(false).await {
            assert!(
                head.starts_with("HTTP/1.1 503 ") && head.contains("x-meridian-error: not_ready\r\n"),
                "{head}"
            );
            assert!(head.contains("retry-after: 1\r\n"), "{head}");
        }
    }

    #[tokio::test]
    async fn a_draining_replica_rejects_requests() {
        for head in heads(true).await {
            assert!(
                head.starts_with("HTTP/1.1 503 ") && head.contains("x-meridian-error: draining\r\n"),
                "{head}"
            );
        }
    }
}
