//! Readiness prober with a replica whose state is scripted.

#![expect(clippy::unwrap_used, reason = "a missing prerequisite fails the test")]

use axum::http::StatusCode;
use axum::routing::get;
use axum::{Json, Router};
use identity::Transport;
use replica_api::start_failure::{StartFailure, StartFailureReport};
use scheduler_client::readiness::{ReadinessProber, StartReport};
use serde_json::json;
use std::future::IntoFuture;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::sync::mpsc;

const STARTING: usize = 0;
const FAILING: usize = 1;
const DOWNLOADING: usize = 2;
const READY: usize = 3;
const WAITING: usize = 4;

/// Starts a replica with a state that the test sets.
async fn replica() -> (Arc<AtomicUsize>, SocketAddr) {
    let state = Arc::new(AtomicUsize::new(STARTING));
    let (health, status) = (state.clone(), state.clone());
    let health = move || async move {
        if health.load(Ordering::SeqCst) == READY { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }
    };
    let status = move || async move {
        let state = status.load(Ordering::SeqCst);
        let failure = (state == FAILING)
            .then(|| json!({"reason": "model_missing", "message": "404", "source": "of a later version"}));
        let download = match state {
            DOWNLOADING => Some(json!({"phase": "downloading", "left_ms": 1500})),
            WAITING => Some(json!({"phase": "waiting for another pull"})),
            _ => None,
        };
        Json(json!({"version": 1, "names": ["m"], "model": "m", "state": "starting", "pending_tokens": 0,
                    "pending_inputs": 0, "requests_total": 0, "tokens_per_second": 0.0, "failure": failure,
                    "download": download}))
    };
    let router = Router::new().route("/health", get(health)).route("/status", get(status));
    let socket = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = socket.local_addr().unwrap();
    tokio::spawn(axum::serve(socket, router).into_future());
    (state, address)
}

#[tokio::test]
async fn the_failure_and_the_download_of_a_replica_are_reported_until_it_is_ready() {
    let (state, address) = replica().await;
    let prober = ReadinessProber::new(&Transport::Loopback).unwrap();
    assert_eq!(prober.start_report(address).await, StartReport::default());
    let (sender, mut reported) = mpsc::unbounded_channel();
    let probing = tokio::spawn({
        let prober = prober.clone();
        async move { prober.until_ready(address, move |report| sender.send(report).unwrap()).await }
    });
    let mut until = async |expected: StartReport| while reported.recv().await.unwrap() != expected {};
    let failure = StartFailureReport::new(StartFailure::ModelMissing, "404");
    state.store(FAILING, Ordering::SeqCst);
    let failing = StartReport { failure: Some(failure), ..StartReport::default() };
    until(failing.clone()).await;
    assert_eq!(prober.start_report(address).await, failing);
    state.store(WAITING, Ordering::SeqCst);
    until(StartReport { waits_for_pull: true, ..StartReport::default() }).await;
    state.store(DOWNLOADING, Ordering::SeqCst);
    until(StartReport { download_left: Some(Duration::from_millis(1500)), ..StartReport::default() }).await;
    state.store(STARTING, Ordering::SeqCst);
    until(StartReport::default()).await;
    state.store(READY, Ordering::SeqCst);
    probing.await.unwrap();
}
