//! Failure of the process: announced once, and never taken back.
//!
//! The caller of [`fail`] continues. The main task waits for [`failed`], drains as for SIGTERM and returns an
//! error; [`exit_within`] ends the process where that does not come to an end. Health checks report the failure from the
//! first moment ([`crate::health`]).

use std::sync::Arc;
use std::sync::LazyLock;
use std::time::Duration;
use tokio::sync::watch;

/// Exit status of a process that has failed: `EX_SOFTWARE` of sysexits.h, an internal software error.
pub const EXIT_STATUS: u8 = 70;

static FAILURE: LazyLock<watch::Sender<Option<Arc<str>>>> = LazyLock::new(|| watch::Sender::new(None));

/// Fails the process: it is not ready from now on, drains, and exits with an error. The first reason stays.
pub fn fail(reason: &str) {
    let is_first = FAILURE.send_if_modified(|failure| {
        let is_first = failure.is_none();
        failure.get_or_insert_with(|| Arc::from(reason));
        is_first
    });
    if is_first {
        tracing::error!(reason, "process failed, it drains and exits");
    }
}

/// Why the process has failed, if it has.
pub fn failure() -> Option<Arc<str>> {
    FAILURE.borrow().clone()
}

/// Waits until the process fails; returns why.
pub async fn failed() -> Arc<str> {
    let mut failure = FAILURE.subscribe();
    loop {
        if let Some(reason) = failure.borrow_and_update().clone() {
            return reason;
        }
        // The sender is static.
        failure.changed().await.ok();
    }
}

/// Exits with [`EXIT_STATUS`] after `bound`, whatever else the process does: a drain can wait for a thread that never
/// answers.
///
/// # Errors
///
/// When the machine has no room for one more thread; the caller then exits at once.
pub fn exit_within(bound: Duration) -> std::io::Result<()> {
    let exit = move || {
        std::thread::sleep(bound);
        tracing::error!(?bound, "process did not drain within its bound, exiting");
        std::process::exit(EXIT_STATUS.into());
    };
    std::thread::Builder::new().name("exit".to_owned()).spawn(exit).map(drop)
}
