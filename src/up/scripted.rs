//! Scripted replica for drills: computes nothing, and takes a fixed time per input.
//!
//! On a machine that runs a whole fleet, the capacity of a real region would depend on the CPU time that the other processes
//! leave; scripted replicas have a defined capacity, so that a drill can use 80 % of it. Everything around them is real.
//! They report status, queue and throughput like a replica, and return `kind = "scripted"` at `/info`.
//! `POST /slow?times=N` makes one N times slower from the next request on, while it still reports ready: a grey failure.
//!
//! Inputs are selected in the order of the batch planner (`replica_core::batch`): in each round every queued request contributes one
//! input, so a request of one input does not wait for a large one. A batch takes at most [`BATCH_TIME`]. Deadlines and priorities have no
//! effect.
//!
//! An input counts at most [`INPUT_TOKENS_MAX`] tokens, as in a model that truncates: a region reports the queued tokens, and its gateways
//! would otherwise reject requests that wait behind one long text.
//!
//! The response has one row of two numbers per input. A request whose client disconnects while it is queued is skipped.

use crate::cli::ScriptedReplicaOptions;
use axum::body::Bytes;
use axum::extract::{Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use configuration::{ConfigFile, Files, section};
use identity::operations::{self, OperationsLimits};
use identity::{AcceptedPeers, IdentitySection, ServerTls, Transport};
use regions::spiffe::Role;
use replica::server::CONNECTIONS_MAX;
use replica_api::api::Operation;
use replica_api::status::{StateV1, StatusV1};
use replica_api::{headers, paths};
use replica_core::rate::TokenRate;
use serde::Deserialize;
use serde_json::json;
use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};
use supervision::{Mutex, MutexGuard};
use tokio::net::TcpListener;
use tokio::sync::{Notify, oneshot};

/// Time of a request besides the simulated computation: reading, batching, writing the response.
const OVERHEAD: Duration = Duration::from_millis(3);
/// Maximum number of tokens of an input.
const INPUT_TOKENS_MAX: u64 = 512;
/// Maximum computing time of a batch of several inputs, if the replica has its full speed.
const BATCH_TIME: Duration = Duration::from_millis(1);

struct ScriptedReplica {
    names: Vec<String>,
    /// [`StatusV1::boot_id`].
    boot_id: u64,
    inputs_per_second: u32,
    queue: Mutex<ScriptedQueue>,
    work: Notify,
}

/// Queued request.
struct ScriptedRequest {
    tokens: u64,
    inputs: u64,
    /// Inputs that have been computed or are in the current batch.
    started: u64,
    done: oneshot::Sender<()>,
}

/// Selected inputs.
#[derive(Default)]
struct ScriptedBatch {
    tokens: u64,
    inputs: u64,
    /// Requests whose last input is in this batch.
    complete: Vec<ScriptedRequest>,
}

struct ScriptedQueue {
    /// In the order of turns.
    waiting: VecDeque<ScriptedRequest>,
    /// Tokens of the batch that is being computed.
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
    transport: Transport,
    shutdown: impl Future<Output = ()> + Send + 'static,
    ready: impl FnOnce(SocketAddr),
) -> io::Result<()> {
    let ScriptedReplicaOptions { listen, inputs_per_second, names, config: _, join: _, operations } = options;
    let inputs_per_second = inputs_per_second.max(1);
    let replica = Arc::new(ScriptedReplica {
        names,
        boot_id: rand::random(),
        inputs_per_second,
        queue: Mutex::new(ScriptedQueue::new()),
        work: Notify::new(),
    });
    let router = Router::new()
        .route(paths::STATUS, get(status))
        .route(Operation::Info.definition().path, get(info))
        .route(Operation::Embeddings.definition().path, post(embed))
        .with_state(replica.clone());
    let commands = Router::new()
        .route(paths::STATUS, get(status))
        .route("/slow", post(slow))
        .with_state(replica.clone());
    let operations = TcpListener::bind(operations).await?;
    let identity = transport.identity();
    let tls = identity.map(|identity| {
        let accepted = AcceptedPeers { roles: &[], same_region: &[Role::Spoke] };
        ServerTls::new(identity, accepted, &[b"http/1.1"]).map_err(io::Error::other)
    });
    let socket = TcpListener::bind(listen).await?;
    let (listener, acceptor) =
        identity::listener::listen(socket, tls.transpose()?, CONNECTIONS_MAX, Arc::default())?;
    let following = async {
        match identity {
            Some(identity) => identity.clone().follow().await,
            None => std::future::pending().await,
        }
    };
    // The acceptor ends with the listener, while requests in flight finish.
    let accepting = async {
        acceptor.run().await;
        std::future::pending::<()>().await;
    };
    ready(listener.address());
    let server = axum::serve(listener, router).with_graceful_shutdown(shutdown).into_future();
    let commands = operations::serve(operations, commands, OperationsLimits::DEFAULT, Arc::default());
    tokio::select! {
        ended = server => ended,
        ended = commands => ended,
        () = accepting => Ok(()),
        () = following => Ok(()),
        () = replica.compute() => Ok(()),
    }
}

section! {
    /// Scripted replica.
    partial struct ScriptedFile {
        /// Catalogue of clouds and regions; the built-in one if absent.
        catalogue: Option<PathBuf>;
        /// Identity for mutual TLS with the spokes of its region.
        identity: Option<IdentitySection>;
    }
}

/// Reads the configuration of a scripted replica.
pub(crate) fn read(document: &ConfigFile<'_>, files: &Files<'_>) -> Option<Transport> {
    let ScriptedFile { catalogue, identity } = document.section()?;
    replica::config::transport(document, files, identity, catalogue)
}

impl ScriptedReplica {
    fn queue(&self) -> MutexGuard<'_, ScriptedQueue> {
        self.queue.lock()
    }

    /// Serves the queue forever. A batch starts at the time at which its predecessor should have ended, so that late
    /// wakeups do not reduce the throughput.
    async fn compute(&self) {
        let inputs_max = (BATCH_TIME.as_secs_f64() * f64::from(self.inputs_per_second)) as u64;
        let mut free = Instant::now();
        loop {
            let (batch, times_slower) = {
                let queue = &mut *self.queue();
                (queue.next_batch(inputs_max), queue.times_slower)
            };
            if batch.inputs == 0 {
                self.work.notified().await;
                free = free.max(Instant::now());
                continue;
            }
            let duration = f64::from(times_slower) * batch.inputs as f64 / f64::from(self.inputs_per_second);
            let duration = Duration::from_secs_f64(duration);
            free += duration;
            tokio::time::sleep_until(free.into()).await;
            self.queue().rate.observe(batch.tokens, duration);
            for request in batch.complete {
                // The client may have disconnected.
                request.done.send(()).ok();
            }
        }
    }
}

impl ScriptedQueue {
    fn new() -> ScriptedQueue {
        ScriptedQueue {
            waiting: VecDeque::new(),
            computing: 0,
            times_slower: 1,
            requests: 0,
            rate: TokenRate::default(),
        }
    }

    fn push(&mut self, tokens: u64, inputs: u64) -> oneshot::Receiver<()> {
        let (done, computed) = oneshot::channel();
        self.requests += 1;
        // A request without inputs takes as long as one with a single input.
        self.waiting.push_back(ScriptedRequest { tokens, inputs: inputs.max(1), started: 0, done });
        computed
    }

    /// Takes at most `inputs_max` inputs, and at least one if any is queued: one of each request per round.
    fn next_batch(&mut self, inputs_max: u64) -> ScriptedBatch {
        let mut batch = ScriptedBatch::default();
        while batch.inputs < inputs_max.max(1)
            && let Some(mut request) = self.waiting.pop_front()
        {
            if request.done.is_closed() {
                continue;
            }
            let left = request.tokens_left();
            request.started += 1;
            batch.inputs += 1;
            batch.tokens += left - request.tokens_left();
            if request.started == request.inputs {
                batch.complete.push(request);
            } else {
                self.waiting.push_back(request);
            }
        }
        self.computing = batch.tokens;
        batch
    }
}

impl ScriptedRequest {
    fn inputs_left(&self) -> u64 {
        self.inputs - self.started
    }

    /// Returns the tokens of the inputs that have not started, if all inputs are equally long.
    fn tokens_left(&self) -> u64 {
        (u128::from(self.tokens) * u128::from(self.inputs_left()) / u128::from(self.inputs)) as u64
    }
}

async fn status(State(replica): State<Arc<ScriptedReplica>>) -> Json<StatusV1> {
    let queue = replica.queue();
    let waiting: u64 = queue.waiting.iter().map(ScriptedRequest::tokens_left).sum();
    Json(StatusV1 {
        // Without a model there is no identity; a deployment that is served with a pinned model never uses this replica.
        identity: None,
        version: 1,
        boot_id: Some(replica.boot_id),
        names: replica.names.clone(),
        model: "scripted".to_owned(),
        state: StateV1::Ready,
        pending_tokens: waiting + queue.computing,
        interactive_tokens: Some(waiting),
        pending_inputs: queue.waiting.iter().map(ScriptedRequest::inputs_left).sum(),
        requests_total: queue.requests,
        tokens_per_second: queue.rate.tokens_per_second(),
        download: None,
        failure: None,
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
    let tokens = truncated(reading.tokens, reading.inputs);
    let computed = replica.queue().push(tokens, reading.inputs);
    replica.work.notify_one();
    if computed.await.is_err() {
        return StatusCode::SERVICE_UNAVAILABLE.into_response();
    }
    tokio::time::sleep(OVERHEAD).await;
    let row = |index| json!({"object": "embedding", "index": index, "embedding": [0.6, 0.8]});
    let rows: Vec<_> = (0..reading.inputs).map(row).collect();
    let usage = json!({"prompt_tokens": tokens, "total_tokens": tokens});
    let response = json!({"object": "list", "data": rows, "model": "scripted", "usage": usage});
    ([(headers::TOKENS, tokens.to_string())], Json(response)).into_response()
}

/// Returns the tokens of a request after the truncation of its inputs, whose lengths are unknown.
fn truncated(tokens: u64, inputs: u64) -> u64 {
    tokens.min(inputs.saturating_mul(INPUT_TOKENS_MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_of_one_input_waits_for_one_round_of_a_large_one() {
        let mut queue = ScriptedQueue::new();
        let mut large = queue.push(20_000, 2_000);
        assert_eq!(queue.next_batch(100).inputs, 100);
        let mut small = queue.push(7, 1);
        let batch = queue.next_batch(100);
        assert_eq!((batch.inputs, batch.tokens), (100, 99 * 10 + 7));
        assert_eq!(batch.complete.len(), 1);
        batch.complete.into_iter().for_each(|request| request.done.send(()).unwrap());
        assert!(small.try_recv().is_ok(), "the small request is complete");
        assert!(large.try_recv().is_err(), "the large request is not");
        assert_eq!(queue.waiting[0].inputs_left(), 2_000 - 199);
    }

    #[test]
    fn batches_contain_each_input_and_token_once_and_skip_disconnected_clients() {
        let mut queue = ScriptedQueue::new();
        let kept = [queue.push(1_000, 3), queue.push(5, 7), queue.push(0, 0)];
        drop(queue.push(1_000_000, 1_000));
        let (mut inputs, mut tokens, mut complete) = (0, 0, 0);
        loop {
            let batch = queue.next_batch(2);
            if batch.inputs == 0 {
                break;
            }
            assert!(batch.inputs <= 2);
            inputs += batch.inputs;
            tokens += batch.tokens;
            complete += batch.complete.len();
        }
        assert_eq!((inputs, tokens, complete), (3 + 7 + 1, 1_005, kept.len()));
    }

    /// Regression: one text of 200 kB was reported as 50 s of work, and requests of others were rejected.
    #[test]
    fn a_long_text_is_truncated() {
        assert_eq!(truncated(50_000, 1), INPUT_TOKENS_MAX);
        assert_eq!(truncated(50_000, 1_000), 50_000);
        assert_eq!(truncated(1, u64::MAX), 1);
    }

    #[test]
    fn a_slow_replica_computes_one_input_at_a_time() {
        let mut queue = ScriptedQueue::new();
        let _waiting = [queue.push(1, 2), queue.push(1, 1)];
        let batch = queue.next_batch(0);
        assert_eq!((batch.inputs, batch.complete.len()), (1, 0));
    }
}
