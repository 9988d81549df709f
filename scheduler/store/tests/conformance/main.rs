//! Conformance tests of the stores: one suite, run on all three; failures of a real etcd; and random histories, to
//! which all three must respond alike.
//!
//! The etcd is Debian's, with three members on loopback ports, started and ended by the test that needs it.

#![expect(clippy::unwrap_used, reason = "a missing prerequisite fails the test")]

mod cluster;
mod differential;
mod faults;
mod known;
mod restored;
mod suite;

use std::time::{Duration, Instant};

/// Time limit of every wait.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Waits for a condition.
async fn wait_until(description: &str, mut holds: impl AsyncFnMut() -> bool) {
    let begun = Instant::now();
    while !holds().await {
        assert!(begun.elapsed() < TIMEOUT, "timed out: {description}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Waits for a result, within the time limit.
async fn soon<T>(description: &str, result: impl Future<Output = T>) -> T {
    tokio::time::timeout(TIMEOUT, result).await.unwrap_or_else(|_| panic!("timed out: {description}"))
}
