//! A replica that computes nothing and takes its time, for drills: so many inputs a second, one request after another.
//!
//! On a machine that carries a whole world, what a region can do would be whatever the others leave of the processor; with
//! these it is what is said, and a drill can speak of 80 % of it. Everything around them is real. They say of themselves what
//! a replica says, what waits and how fast they have been, and answer `kind = "scripted"` at `/info`. `POST /slow?times=N` makes
//! one N times slower from the next request on, and it goes on saying that it is well: a grey failure.
//!
//! Each has one row for each input, of two numbers. Whoever hangs up before their turn is not computed.

use crate::cli::ScriptedOptions;
use axum::body::Bytes;
use axum::extract::{Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use replica_core::rate::TokenRate;
use replica_core::wire::status::{StateV1, StatusV1};
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

/// What a request takes besides its turn: it is read, a batch is put together, an answer is written.
const AROUND: Duration = Duration::from_millis(3);

struct Replica {
    names: Vec<String>,
    inputs_per_second: u32,
    queue: Mutex<Queue>,
    work: Notify,
}

/// Somebody's turn.
struct Turn {
    tokens: u64,
    inputs: u64,
    done: oneshot::Sender<()>,
}

struct Queue {
    waiting: VecDeque<Turn>,
    /// Tokens of the one that has its turn.
    computing: u64,
    times_slower: u32,
    requests: u64,
    rate: TokenRate,
}

#[derive(Deserialize)]
struct Slow {
    times: u32,
}

/// Serves until `shutdown`.
pub(crate) async fn run(
    options: ScriptedOptions,
    shutdown: impl Future<Output = ()> + Send + 'static,
    ready: impl FnOnce(SocketAddr),
) -> io::Result<()> {
    let ScriptedOptions { listen, inputs_per_second, names } = options;
    let queue = Queue {
        waiting: VecDeque::new(),
        computing: 0,
        times_slower: 1,
        requests: 0,
        rate: TokenRate::default(),
    };
    let inputs_per_second = inputs_per_second.max(1);
    let replica =
        Arc::new(Replica { names, inputs_per_second, queue: Mutex::new(queue), work: Notify::new() });
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
        () = replica.take_turns() => Ok(()),
    }
}

impl Replica {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock()
    }

    /// Gives everybody their turn, one after another, for ever. A sleep that ends late makes nobody slower: the next begins
    /// where the one before should have ended.
    async fn take_turns(&self) {
        let mut free = Instant::now();
        loop {
            let Some((turn, times_slower)) = self.next() else {
                self.work.notified().await;
                free = free.max(Instant::now());
                continue;
            };
            if turn.done.is_closed() {
                continue;
            }
            let takes = f64::from(times_slower) * turn.inputs as f64 / f64::from(self.inputs_per_second);
            let takes = Duration::from_secs_f64(takes);
            free += takes;
            tokio::time::sleep_until(free.into()).await;
            self.queue().rate.observe(turn.tokens, takes);
            // Whoever asked may have hung up.
            turn.done.send(()).ok();
        }
    }

    fn next(&self) -> Option<(Turn, u32)> {
        let queue = &mut *self.queue();
        let turn = queue.waiting.pop_front();
        queue.computing = turn.as_ref().map_or(0, |turn| turn.tokens);
        Some((turn?, queue.times_slower))
    }
}

async fn status(State(replica): State<Arc<Replica>>) -> Json<StatusV1> {
    let queue = replica.queue();
    let waiting: u64 = queue.waiting.iter().map(|turn| turn.tokens).sum();
    Json(StatusV1 {
        // It computes nothing, so it has no model; a deployment that is served with one never uses it.
        identity: None,
        version: 1,
        names: replica.names.clone(),
        model: "scripted".to_owned(),
        state: StateV1::Ready,
        pending_tokens: waiting + queue.computing,
        interactive_tokens: Some(waiting),
        pending_inputs: queue.waiting.iter().map(|turn| turn.inputs).sum(),
        requests_total: queue.requests,
        tokens_per_second: queue.rate.tokens_per_second(),
    })
}

async fn info(State(replica): State<Arc<Replica>>) -> Json<serde_json::Value> {
    let engine = json!({"kind": "scripted", "inputs_per_second": replica.inputs_per_second});
    Json(json!({"engine": engine, "names": replica.names}))
}

async fn slow(State(replica): State<Arc<Replica>>, Query(Slow { times }): Query<Slow>) {
    replica.queue().times_slower = times.max(1);
}

async fn embed(State(replica): State<Arc<Replica>>, body: Bytes) -> Response {
    let Ok(reading) = gateway_core::body::read(&body) else {
        return (StatusCode::BAD_REQUEST, "no request for vectors\n").into_response();
    };
    let (done, computed) = oneshot::channel();
    {
        let queue = &mut *replica.queue();
        queue.requests += 1;
        queue.waiting.push_back(Turn { tokens: reading.tokens, inputs: reading.inputs, done });
    }
    replica.work.notify_one();
    if computed.await.is_err() {
        return StatusCode::SERVICE_UNAVAILABLE.into_response();
    }
    tokio::time::sleep(AROUND).await;
    let row = |index| json!({"object": "embedding", "index": index, "embedding": [0.6, 0.8]});
    let rows: Vec<_> = (0..reading.inputs).map(row).collect();
    let usage = json!({"prompt_tokens": reading.tokens, "total_tokens": reading.tokens});
    let answer = json!({"object": "list", "data": rows, "model": "scripted", "usage": usage});
    ([("x-meridian-tokens", reading.tokens.to_string())], Json(answer)).into_response()
}
