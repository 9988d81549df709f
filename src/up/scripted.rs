//! Scripted replica for drills: computes nothing, and takes a fixed time per input, one request after another.
//!
//! On a machine that runs a whole fleet, the capacity of a real region would depend on the CPU time that the other processes
//! leave; scripted replicas have a defined capacity, so that a drill can use 80 % of it. Everything around them is real.
//! They report status, queue and throughput like a replica, and return `kind = "scripted"` at `/info`.
//! `POST /slow?times=N` makes one N times slower from the next request on, while it still reports ready: a grey failure.
//!
//! The response has one row of two numbers per input. A request whose client disconnects while it is queued is skipped.

use crate::cli::ScriptedReplicaOptions;
use axum::body::Bytes;
use axum::extract::{Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use replica_api::status::{StateV1, StatusV1};
use replica_core::rate::TokenRate;
use serde::Deserialize;
use serde_json::json;
use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};
use supervision::{Mutex, MutexGuard};
use tokio::net::TcpListener;
use tokio::sync::{Notify, oneshot};

/// Time of a request besides the simulated computation: reading, batching, writing the response.
const OVERHEAD: Duration = Duration::from_millis(3);

struct ScriptedReplica {
    names: Vec<String>,
    inputs_per_second: u32,
    queue: Mutex<ScriptedQueue>,
    work: Notify,
}

/// Queued request.
struct ScriptedRequest {
    tokens: u64,
    inputs: u64,
    done: oneshot::Sender<()>,
}

struct ScriptedQueue {
    waiting: VecDeque<ScriptedRequest>,
    /// Tokens of the request that is being computed.
    computing: u64,
    times_slower: u32,
    requests: u64,
    rate: TokenRate,
}

#[derive(Deserialize)]
struct SlowQuery {
    times: u32,
}

/// Serves until `shutdown`.
pub(crate) async fn run(
    options: ScriptedReplicaOptions,
    shutdown: impl Future<Output = ()> + Send + 'static,
    ready: impl FnOnce(SocketAddr),
) -> io::Result<()> {
    let ScriptedReplicaOptions { listen, inputs_per_second, names } = options;
    let queue = ScriptedQueue {
        waiting: VecDeque::new(),
        computing: 0,
        times_slower: 1,
        requests: 0,
        rate: TokenRate::default(),
    };
    let inputs_per_second = inputs_per_second.max(1);
    let replica =
        Arc::new(ScriptedReplica { names, inputs_per_second, queue: Mutex::new(queue), work: Notify::new() });
    let router = Router::new()
        .route("/status", get(status))
        .route("/info", get(info))
        .route("/slow", post(slow))
        .route("/v1/embeddings", post(embed))
        .with_state(replica.clone());
    let socket = TcpListener::bind(listen).await?;
    ready(socket.local_addr()?);
    tokio::select! {
        ended = axum::serve(socket, router).with_graceful_shutdown(shutdown) => ended,
        () = replica.compute() => Ok(()),
    }
}

impl ScriptedReplica {
    fn queue(&self) -> MutexGuard<'_, ScriptedQueue> {
        self.queue.lock()
    }

    /// Serves the queue forever. A request starts at the time at which its predecessor should have ended, so that late
    /// wakeups do not reduce the throughput.
    async fn compute(&self) {
        let mut free = Instant::now();
        loop {
            let Some((request, times_slower)) = self.next() else {
                self.work.notified().await;
                free = free.max(Instant::now());
                continue;
            };
            if request.done.is_closed() {
                continue;
            }
            let duration =
                f64::from(times_slower) * request.inputs as f64 / f64::from(self.inputs_per_second);
            let duration = Duration::from_secs_f64(duration);
            free += duration;
            tokio::time::sleep_until(free.into()).await;
            self.queue().rate.observe(request.tokens, duration);
            // The client may have disconnected.
            request.done.send(()).ok();
        }
    }

    fn next(&self) -> Option<(ScriptedRequest, u32)> {
        let queue = &mut *self.queue();
        let request = queue.waiting.pop_front();
        queue.computing = request.as_ref().map_or(0, |request| request.tokens);
        Some((request?, queue.times_slower))
    }
}

async fn status(State(replica): State<Arc<ScriptedReplica>>) -> Json<StatusV1> {
    let queue = replica.queue();
    let waiting: u64 = queue.waiting.iter().map(|request| request.tokens).sum();
    Json(StatusV1 {
        // Without a model there is no identity; a deployment that is served with a pinned model never uses this replica.
        identity: None,
        version: 1,
        names: replica.names.clone(),
        model: "scripted".to_owned(),
        state: StateV1::Ready,
        pending_tokens: waiting + queue.computing,
        interactive_tokens: Some(waiting),
        pending_inputs: queue.waiting.iter().map(|request| request.inputs).sum(),
        requests_total: queue.requests,
        tokens_per_second: queue.rate.tokens_per_second(),
    })
}

async fn info(State(replica): State<Arc<ScriptedReplica>>) -> Json<serde_json::Value> {
    let engine = json!({"kind": "scripted", "inputs_per_second": replica.inputs_per_second});
    Json(json!({"engine": engine, "names": replica.names}))
}

async fn slow(State(replica): State<Arc<ScriptedReplica>>, Query(SlowQuery { times }): Query<SlowQuery>) {
    replica.queue().times_slower = times.max(1);
}

async fn embed(State(replica): State<Arc<ScriptedReplica>>, body: Bytes) -> Response {
    let Ok(reading) = gateway_core::body::read(&body) else {
        return (StatusCode::BAD_REQUEST, "not an embeddings request\n").into_response();
    };
    let (done, computed) = oneshot::channel();
    {
        let queue = &mut *replica.queue();
        queue.requests += 1;
        queue.waiting.push_back(ScriptedRequest { tokens: reading.tokens, inputs: reading.inputs, done });
    }
    replica.work.notify_one();
    if computed.await.is_err() {
        return StatusCode::SERVICE_UNAVAILABLE.into_response();
    }
    tokio::time::sleep(OVERHEAD).await;
    let row = |index| json!({"object": "embedding", "index": index, "embedding": [0.6, 0.8]});
    let rows: Vec<_> = (0..reading.inputs).map(row).collect();
    let usage = json!({"prompt_tokens": reading.tokens, "total_tokens": reading.tokens});
    let response = json!({"object": "list", "data": rows, "model": "scripted", "usage": usage});
    ([("x-meridian-tokens", reading.tokens.to_string())], Json(response)).into_response()
}
