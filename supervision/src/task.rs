//! Long-running tasks and threads: none of them ends silently.

use crate::panics::{self, Scope};
use crate::process;
use futures_util::FutureExt;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::time::Instant;

/// The pause before the first restart; it doubles with each that follows.
const BACKOFF_MIN: Duration = Duration::from_millis(100);
/// The longest pause: what a route table, a plan or a report may at most be late by for it.
const BACKOFF_MAX: Duration = Duration::from_secs(5);
/// A task that ran for so long has recovered, and its next restart is a first one again.
const RECOVERED_AFTER: Duration = Duration::from_secs(60);
/// Restarts in a row after which the process fails: half a minute of trying with the pauses above. What a restart of the
/// task does not mend, one of the process may.
pub const RESTARTS_MAX: u32 = 10;

/// Runs a task that is never over, and starts it again when it panics or ends: with a pause, a log line `task restarted` and
/// a count. The process fails when the task does not recover.
///
/// `start` is called for each run, so what the task needs is cloned in it.
pub async fn supervise<F>(name: &'static str, start: impl FnMut() -> F)
where
    F: Future<Output = ()>,
{
    restarting(name, start, true).await;
}

/// As [`supervise`], for a task that may be over: it is started again only when it panics.
pub async fn supervise_until_done<F>(name: &'static str, start: impl FnMut() -> F)
where
    F: Future<Output = ()>,
{
    restarting(name, start, false).await;
}

async fn restarting<F>(name: &'static str, mut start: impl FnMut() -> F, endless: bool)
where
    F: Future<Output = ()>,
{
    let mut in_a_row = 0;
    loop {
        let began = Instant::now();
        // To start it may panic as well.
        let run = AssertUnwindSafe(async { start().await }).catch_unwind().await;
        let reason = match &run {
            Ok(()) if !endless => return,
            Ok(()) => "it ended",
            Err(payload) => {
                panics::count(Scope::Task);
                panics::message(&**payload)
            }
        };
        if began.elapsed() >= RECOVERED_AFTER {
            in_a_row = 0;
        }
        if in_a_row == RESTARTS_MAX {
            process::fail(&format!("task {name} does not recover: {reason}"));
            return std::future::pending().await;
        }
        let pause = backoff(in_a_row);
        in_a_row += 1;
        tracing::error!(task = name, reason, ?pause, in_a_row, "task failed");
        tokio::time::sleep(pause).await;
        panics::count_restart(name);
        tracing::warn!(task = name, in_a_row, "task restarted");
    }
}

/// The pause before a restart that was preceded by so many.
fn backoff(restarts: u32) -> Duration {
    BACKOFF_MIN.saturating_mul(1 << restarts.min(16)).min(BACKOFF_MAX)
}

/// Runs a task that cannot be started again (it owns a socket, or the only end of a channel): the process fails when it
/// panics. Returns what it returns, and nothing after a panic.
pub async fn essential<T>(name: &'static str, task: impl Future<Output = T>) -> Option<T> {
    match AssertUnwindSafe(task).catch_unwind().await {
        Ok(value) => Some(value),
        Err(payload) => {
            panics::count(Scope::Task);
            process::fail(&format!("task {name} panicked: {}", panics::message(&*payload)));
            None
        }
    }
}

/// Runs one of many like it, such as one report of those that come five times a second: when it panics, that is logged and
/// counted, and the next one is its restart. Returns nothing then.
pub async fn contained<T>(name: &'static str, task: impl Future<Output = T>) -> Option<T> {
    AssertUnwindSafe(task)
        .catch_unwind()
        .await
        .inspect_err(|payload| {
            panics::count(Scope::Task);
            tracing::error!(task = name, reason = panics::message(&**payload), "task failed");
        })
        .ok()
}

/// Starts a thread that cannot be started again: the process fails when it panics.
///
/// # Errors
///
/// When the machine has no room for one more thread.
pub fn thread(name: &str, run: impl FnOnce() + Send + 'static) -> std::io::Result<JoinHandle<()>> {
    let owned = name.to_owned();
    std::thread::Builder::new().name(name.to_owned()).spawn(move || {
        if let Err(payload) = catch_unwind(AssertUnwindSafe(run)) {
            panics::count(Scope::Task);
            process::fail(&format!("thread {owned} panicked: {}", panics::message(&*payload)));
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_longest() {
        let pauses: Vec<u128> = (0..8).map(|restarts| backoff(restarts).as_millis()).collect();
        assert_eq!(pauses, [100, 200, 400, 800, 1_600, 3_200, 5_000, 5_000]);
        assert_eq!(backoff(u32::MAX), BACKOFF_MAX);
    }
}
