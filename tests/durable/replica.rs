//! Replica whose result is a function of the input, as a process of its own: this test binary, started again.
//!
//! The scripted replica of `meridian` returns the same row for every input, so it would not show that a job has the result of
//! another one. Here a row is made from the hash of its text, and [`response`] says in this process what a job must return.

use axum::body::Bytes;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use replica_api::status::{StateV1, StatusV1};
use ring::digest::{SHA256, digest};
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Variable with the address of the replica; the test below does nothing without it.
const ADDRESS: &str = "MERIDIAN_TEST_REPLICA_ADDRESS";
/// Variable with the deployments that it serves, separated by commas.
const NAMES: &str = "MERIDIAN_TEST_REPLICA_NAMES";
/// Time of a request: with 64 jobs in flight a replica computes 3200 in a second, more than two cores can submit.
const SERVICE_TIME: Duration = Duration::from_millis(20);
/// Throughput that it reports: so high that its queue never delays a job.
const TOKENS_PER_SECOND: f64 = 1e6;
/// Numbers of a row.
const DIMENSIONS: usize = 8;

struct Replica {
    names: Vec<String>,
    requests: AtomicU64,
    in_flight: AtomicU64,
}

/// Returns the command that runs a replica; it prints `ready` when it listens.
pub(crate) fn command(listen: SocketAddr, names: &[&str]) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "replica::process", "--nocapture"]);
    command.env(ADDRESS, listen.to_string()).env(NAMES, names.join(","));
    command
}

/// The response to a request with one text.
pub(crate) fn response(model: &str, text: &str) -> Value {
    let hash = digest(&SHA256, text.as_bytes());
    // Multiples of 1/256 are the same numbers as text and as 32-bit floats.
    let row: Vec<f64> = hash.as_ref()[..DIMENSIONS].iter().map(|byte| f64::from(*byte) / 256.0).collect();
    let data = json!([{"object": "embedding", "index": 0, "embedding": row}]);
    let usage = json!({"prompt_tokens": text.len(), "total_tokens": text.len()});
    json!({"object": "list", "data": data, "model": model, "usage": usage})
}

/// The replica itself, if this process was started as one.
#[test]
fn process() {
    let Ok(listen) = std::env::var(ADDRESS) else { return };
    // The kernel kills it when the test ends, however that ends.
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL)).unwrap();
    let names = std::env::var(NAMES).unwrap().split(',').map(str::to_owned).collect();
    let replica = Arc::new(Replica { names, requests: AtomicU64::new(0), in_flight: AtomicU64::new(0) });
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let router = Router::new()
            .route("/status", get(status))
            .route("/v1/embeddings", post(embed))
            .with_state(replica);
        let socket = tokio::net::TcpListener::bind(listen).await.unwrap();
        println!("\nready replica on {}", socket.local_addr().unwrap());
        axum::serve(socket, router).await.unwrap();
    });
}

async fn status(State(replica): State<Arc<Replica>>) -> Json<StatusV1> {
    let in_flight = replica.in_flight.load(Ordering::Relaxed);
    Json(StatusV1 {
        identity: None,
        version: 1,
        boot_id: None,
        names: replica.names.clone(),
        model: "hash".to_owned(),
        state: StateV1::Ready,
        pending_tokens: in_flight,
        interactive_tokens: Some(0),
        pending_inputs: in_flight,
        requests_total: replica.requests.load(Ordering::Relaxed),
        tokens_per_second: TOKENS_PER_SECOND,
        download: None,
        failure: None,
    })
}

async fn embed(State(replica): State<Arc<Replica>>, body: Bytes) -> Response {
    let request: Value = serde_json::from_slice(&body).unwrap();
    let (model, text) = (request["model"].as_str().unwrap(), request["input"][0].as_str().unwrap());
    replica.requests.fetch_add(1, Ordering::Relaxed);
    replica.in_flight.fetch_add(1, Ordering::Relaxed);
    tokio::time::sleep(SERVICE_TIME).await;
    replica.in_flight.fetch_sub(1, Ordering::Relaxed);
    ([("x-meridian-tokens", text.len().to_string())], Json(response(model, text))).into_response()
}
