//! Health checks that do what requests do.
//!
//! `/livez` and `/readyz` that only look at a flag report a process as ready that cannot serve anybody. A check here takes
//! the locks that requests take, on a thread of its own and within a time: one that panics, or does not return, is a process
//! that is not well. A check that hangs is not started again, so a probe every second costs one thread and not one each.

use crate::panics;
use crate::process;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::time::timeout;

/// Timeout of a check: probes of Kubernetes and of load balancers wait for a second or more by default.
pub const WITHIN: Duration = Duration::from_millis(800);

/// Runs checks of one kind, one at a time.
#[derive(Clone, Debug, Default)]
pub struct Health {
    under_way: Arc<AtomicBool>,
}

impl Health {
    /// Whether the process serves: it has not failed, and `check` returns within [`WITHIN`] and finds nothing.
    ///
    /// # Errors
    ///
    /// Reason of a failure, as one line of text.
    pub async fn probe(
        &self,
        check: impl FnOnce() -> Result<(), String> + Send + 'static,
    ) -> Result<(), String> {
        if let Some(reason) = process::failure() {
            return Err(format!("failed: {reason}"));
        }
        if self.under_way.swap(true, Ordering::AcqRel) {
            // Two probes at once are no reason to report a fault: the other one has its time as well.
            let waited = timeout(WITHIN, async {
                while self.under_way.load(Ordering::Acquire) {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
            });
            if waited.await.is_err() || self.under_way.swap(true, Ordering::AcqRel) {
                return Err(format!("a check has not returned within {WITHIN:?}"));
            }
        }
        let (tell, told) = oneshot::channel();
        let under_way = Arc::clone(&self.under_way);
        let run = move || {
            let found = catch_unwind(AssertUnwindSafe(check))
                .unwrap_or_else(|payload| Err(format!("a check panicked: {}", panics::message(&*payload))));
            under_way.store(false, Ordering::Release);
            // Whoever asked may have gone.
            tell.send(found).ok();
        };
        if let Err(error) = std::thread::Builder::new().name("health".to_owned()).spawn(run) {
            self.under_way.store(false, Ordering::Release);
            return Err(format!("no thread for a check: {error}"));
        }
        match timeout(WITHIN, told).await {
            Ok(Ok(found)) => found,
            Ok(Err(_)) => Err("a check ended without a result".to_owned()),
            Err(_) => Err(format!("a check has not returned within {WITHIN:?}")),
        }
    }
}
