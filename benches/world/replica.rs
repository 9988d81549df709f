//! Scripted replica with a given throughput in tokens per second, one request after another.
//!
//! It is a separate process, `fleet replica LISTEN TOKENS_PER_SECOND`, and reports its queue and its measured throughput like
//! a real one. The capacity of a region is thus defined, and does not depend on the cores of the machine that runs the whole
//! fleet. `POST /slow?times=N` makes it N times slower from the next request on, while it still reports ready: a grey
//! failure. Requests whose client disconnects are skipped.

use axum::body::Bytes;
use axum::extract::{Query, State};
use axum::http::StatusCode;
use axum::response::IntoResponse;
use axum::routing::{get, post};
use axum::{Json, Router};
use replica_api::status::{StateV1, StatusV1};
use replica_core::rate::TokenRate;
use serde::Deserialize;
use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use tokio::sync::{Notify, oneshot};

/// Deployment that it serves.
pub(crate) const MODEL: &str = "bench";

/// Time of a request besides the simulated computation: tokenizing, batching, writing the response.
const OVERHEAD: Duration = Duration::from_millis(10);

struct Replica {
    tokens_per_second: u64,
    queue: Mutex<Queue>,
    work: Notify,
}

struct Queue {
    waiting: VecDeque<(u64, oneshot::Sender<()>)>,
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

/// Serves until the process is killed.
pub(crate) async fn run(listen: SocketAddr, tokens_per_second: u64) {
    let queue = Queue {
        waiting: VecDeque::new(),
        computing: 0,
        times_slower: 1,
        requests: 0,
        rate: TokenRate::default(),
    };
    let replica = Arc::new(Replica { tokens_per_second, queue: Mutex::new(queue), work: Notify::new() });
    let router = Router::new()
        .route("/status", get(status))
        .route("/slow", post(slow))
        .route("/v1/embeddings", post(embed))
        .with_state(replica.clone());
    let socket = tokio::net::TcpListener::bind(listen).await.unwrap();
    println!("ready replica on {listen}");
    tokio::select! {
        ended = axum::serve(socket, router) => ended.unwrap(),
        () = replica.compute() => {}
    }
}

impl Replica {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap()
    }

    /// Serves the queue forever. A request starts at the time at which its predecessor should have ended, so that late
    /// wakeups do not reduce the throughput.
    async fn compute(&self) {
        let mut free = Instant::now();
        loop {
            let next = {
                let queue = &mut *self.queue();
                queue.computing = 0;
                let next = queue.waiting.pop_front();
                next.map(|(tokens, done)| {
                    queue.computing = tokens;
                    (tokens, done, queue.times_slower)
                })
            };
            let Some((tokens, done, times_slower)) = next else {
                self.work.notified().await;
                free = free.max(Instant::now());
                continue;
            };
            if done.is_closed() {
                continue;
            }
            let busy = Duration::from_secs_f64(tokens as f64 / self.tokens_per_second as f64) * times_slower;
            free += busy;
            tokio::time::sleep_until(free.into()).await;
            self.queue().rate.observe(tokens, busy);
            // The client may have disconnected.
            done.send(()).ok();
        }
    }
}

async fn status(State(replica): State<Arc<Replica>>) -> Json<StatusV1> {
    let queue = replica.queue();
    let waiting: u64 = queue.waiting.iter().map(|(tokens, _)| tokens).sum();
    Json(StatusV1 {
        identity: None,
        version: 1,
        boot_id: None,
        names: vec![MODEL.to_owned()],
        model: MODEL.to_owned(),
        state: StateV1::Ready,
        pending_tokens: waiting + queue.computing,
        interactive_tokens: Some(waiting),
        pending_inputs: queue.waiting.len() as u64,
        requests_total: queue.requests,
        tokens_per_second: queue.rate.tokens_per_second(),
        download: None,
        failure: None,
    })
}

async fn slow(State(replica): State<Arc<Replica>>, Query(SlowQuery { times }): Query<SlowQuery>) {
    replica.queue().times_slower = times;
}

async fn embed(State(replica): State<Arc<Replica>>, body: Bytes) -> impl IntoResponse {
    let reading = gateway_core::body::read(&body).unwrap();
    let (done, computed) = oneshot::channel();
    {
        let queue = &mut *replica.queue();
        queue.requests += 1;
        queue.waiting.push_back((reading.tokens, done));
    }
    replica.work.notify_one();
    computed.await.unwrap();
    tokio::time::sleep(OVERHEAD).await;
    let rows: Vec<_> = (0..reading.inputs)
        .map(|index| serde_json::json!({"object": "embedding", "index": index, "embedding": [0.6, 0.8]}))
        .collect();
    let usage = serde_json::json!({"prompt_tokens": reading.tokens, "total_tokens": reading.tokens});
    let response = serde_json::json!({"object": "list", "data": rows, "model": MODEL, "usage": usage});
    (StatusCode::OK, [("x-meridian-tokens", reading.tokens.to_string())], Json(response))
}
