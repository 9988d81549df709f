//! Health checks that take the same locks as requests.
//!
//! A `/livez` or `/readyz` that only reads a flag reports processes as ready that cannot serve. These checks take the
//! locks that requests take, on a separate thread and with a timeout: a check that panics or does not return is
//! a failure. A check that hangs is not started again, so probes every second cost one thread in total.

use crate::panics;
use crate::process;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::time::timeout;

/// Timeout of a check. Probes of Kubernetes and of load balancers wait for a second or more by default.
pub const CHECK_TIMEOUT: Duration = Duration::from_millis(800);

/// Runner of health checks of one kind, one at a time.
#[derive(Clone, Debug, Default)]
pub struct HealthCheck {
    is_running: Arc<AtomicBool>,
}

impl HealthCheck {
    /// Returns `Ok` if the process has not failed and `check` returns `Ok` within [`CHECK_TIMEOUT`].
    ///
    /// # Errors
    ///
    /// The reason of the failure, as one line of text.
    pub async fn probe(
        &self,
        check: impl FnOnce() -> Result<(), String> + Send + 'static,
    ) -> Result<(), String> {
        if let Some(reason) = process::failure() {
            return Err(format!("failed: {reason}"));
        }
        if self.is_running.swap(true, Ordering::AcqRel) {
            // Two concurrent probes are not a failure: wait for the other check.
            let waited = timeout(CHECK_TIMEOUT, async {
                while self.is_running.load(Ordering::Acquire) {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
            });
            if waited.await.is_err() || self.is_running.swap(true, Ordering::AcqRel) {
                return Err(format!("a check has not returned within {CHECK_TIMEOUT:?}"));
            }
        }
        let (sender, receiver) = oneshot::channel();
        let is_running = Arc::clone(&self.is_running);
        let run = move || {
            let result = catch_unwind(AssertUnwindSafe(check))
                .unwrap_or_else(|payload| Err(format!("a check panicked: {}", panics::message(&*payload))));
            is_running.store(false, Ordering::Release);
            // The receiver is gone after a timeout.
            sender.send(result).ok();
        };
        if let Err(error) = std::thread::Builder::new().name("health".to_owned()).spawn(run) {
            self.is_running.store(false, Ordering::Release);
            return Err(format!("cannot start a thread for a check: {error}"));
        }
        match timeout(CHECK_TIMEOUT, receiver).await {
            Ok(Ok(result)) => result,
            Ok(Err(_)) => Err("a check ended without a result".to_owned()),
            Err(_) => Err(format!("a check has not returned within {CHECK_TIMEOUT:?}")),
        }
    }
}
