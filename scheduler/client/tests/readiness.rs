//! Readiness prober with a replica whose state is scripted.

#![expect(clippy::unwrap_used, reason = "a missing prerequisite fails the test")]

use axum::http::StatusCode;
use axum::routing::get;
use axum::{Json, Router};
use identity::Transport;
use replica_api::start_failure::{StartFailure, StartFailureReport};
use scheduler_client::readiness::ReadinessProber;
use serde_json::json;
use std::future::IntoFuture;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio::sync::mpsc;

const STARTING: usize = 0;
const FAILING: usize = 1;
const READY: usize = 2;

/// Starts a replica with a state that the test sets.
async fn replica() -> (Arc<AtomicUsize>, SocketAddr) {
    let state = Arc::new(AtomicUsize::new(STARTING));
    let (health, status) = (state.clone(), state.clone());
    let health = move || async move {
        if health.load(Ordering::SeqCst) == READY { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }
    };
    let status = move || async move {
        let failure = (status.load(Ordering::SeqCst) == FAILING)
            .then(|| json!({"reason": "model_missing", "message": "404", "source": "of a later version"}));
        Json(json!({"version": 1, "names": ["m"], "model": "m", "state": "starting", "pending_tokens": 0,
                    "pending_inputs": 0, "requests_total": 0, "tokens_per_second": 0.0, "failure": failure}))
    };
    let router = Router::new().route("/health", get(health)).route("/status", get(status));
    let socket = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = socket.local_addr().unwrap();
    tokio::spawn(axum::serve(socket, router).into_future());
    (state, address)
}

#[tokio::test]
async fn each_change_of_a_failure_is_reported_once_until_the_replica_is_ready() {
    let (state, address) = replica().await;
    let prober = ReadinessProber::new(&Transport::Loopback).unwrap();
    assert_eq!(prober.start_failure(address).await, None);
    let (changes, mut reported) = mpsc::unbounded_channel();
    let probing = tokio::spawn({
        let prober = prober.clone();
        async move { prober.until_ready(address, move |failure| changes.send(failure).unwrap()).await }
    });
    let failure = StartFailureReport::new(StartFailure::ModelMissing, "404");
    state.store(FAILING, Ordering::SeqCst);
    assert_eq!(reported.recv().await, Some(Some(failure.clone())));
    assert_eq!(prober.start_failure(address).await, Some(failure));
    state.store(STARTING, Ordering::SeqCst);
    assert_eq!(reported.recv().await, Some(None), "it has ended by itself");
    state.store(READY, Ordering::SeqCst);
    probing.await.unwrap();
    assert_eq!(reported.recv().await, None, "nothing else was reported");
}
