//! What holds for every store: one suite, run on all three; what only a real etcd can do to its callers; and a random
//! history that all three must answer alike.
//!
//! The etcd is Debian's, with three members on loopback ports, started and ended by the test that needs it.

#![expect(clippy::unwrap_used, reason = "a test that cannot get what it needs has failed")]

mod cluster;
mod differential;
mod faults;
mod known;
mod restored;
mod suite;

use std::time::{Duration, Instant};

/// How long anything that is waited for may take before a test gives up.
const PATIENCE: Duration = Duration::from_secs(60);

/// Waits for a condition.
async fn until(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let begun = Instant::now();
    while !holds().await {
        assert!(begun.elapsed() < PATIENCE, "{what} did not come true");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// What comes, or the test's end.
async fn soon<T>(what: &str, wanted: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, wanted).await.unwrap_or_else(|_| panic!("{what} did not come"))
}
