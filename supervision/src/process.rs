//! Failure of the process: reported once, irrevocable.
//!
//! The caller of [`fail`] continues. The main task waits for [`failed`], drains as for SIGTERM and returns an
//! error; [`exit_within`] ends the process if the drain does not finish. Health checks report the failure immediately
//! ([`crate::health`]).

use std::sync::Arc;
use std::sync::LazyLock;
use std::time::Duration;
use tokio::sync::watch;

/// Exit status of a process that has failed: `EX_SOFTWARE` of sysexits.h, an internal software error.
pub const EXIT_STATUS: u8 = 70;

static FAILURE: LazyLock<watch::Sender<Option<Arc<str>>>> = LazyLock::new(|| watch::Sender::new(None));

/// Fails the process: it becomes not ready, drains, and exits with an error. The first reason is kept.
pub fn fail(reason: &str) {
    let is_first = FAILURE.send_if_modified(|failure| {
        let is_first = failure.is_none();
        failure.get_or_insert_with(|| Arc::from(reason));
        is_first
    });
    if is_first {
        // The state of the process may be inconsistent (`reason`). It finishes the requests in flight and exits with
        // status 70; its supervisor restarts it.
        tracing::error!(reason, "process failed, draining");
    }
}

/// Returns the reason if the process has failed.
pub fn failure() -> Option<Arc<str>> {
    FAILURE.borrow().clone()
}

/// Waits until the process fails; returns the reason.
pub async fn failed() -> Arc<str> {
    let mut failure = FAILURE.subscribe();
    loop {
        if let Some(reason) = failure.borrow_and_update().clone() {
            return reason;
        }
        // Cannot fail: the sender is static.
        failure.changed().await.ok();
    }
}

/// Exits with [`EXIT_STATUS`] after `bound`, regardless of the drain, which can wait for a thread that never
/// finishes.
///
/// # Errors
///
/// If no thread can be created; the caller then exits at once.
pub fn exit_within(bound: Duration) -> std::io::Result<()> {
    let exit = move || {
        std::thread::sleep(bound);
        // The process had failed (see `process failed, draining`), and requests in flight did not end in time. Its
        // supervisor restarts it.
        tracing::error!(?bound, "drain timeout; exiting");
        std::process::exit(EXIT_STATUS.into());
    };
    std::thread::Builder::new().name("exit".to_owned()).spawn(exit).map(drop)
}
