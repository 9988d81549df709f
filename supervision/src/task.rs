//! Supervision of long-running tasks and threads: none of them ends silently.

use crate::panics::{self, Scope};
use crate::process;
use backoff::Backoff;
use futures_util::FutureExt;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::task::JoinError;
use tokio::time::Instant;

/// Delays before restarts. The maximum is the longest time by which it can postpone a route table, a plan or a report.
/// Without jitter: the tasks of a process share nothing that simultaneous restarts would overload.
const BACKOFF: Backoff = Backoff { first: Duration::from_millis(100), max: Duration::from_secs(5) };
/// Running time after which a task counts as recovered and the number of consecutive restarts is reset.
const RECOVERED_AFTER: Duration = Duration::from_secs(60);
/// Consecutive restarts after which the process fails: half a minute with the delays above. A restart of the process may
/// fix what a restart of the task does not.
pub const RESTARTS_MAX: u32 = 10;

/// Runs an endless task and restarts it when it panics or ends, with backoff, a log line `task restarted` and a counter.
/// The process fails if the task does not recover.
///
/// `start` is called for each run; it clones the inputs of the task.
pub async fn supervise<F>(name: &'static str, start: impl FnMut() -> F)
where
    F: Future<Output = ()>,
{
    restarting(name, start, true).await;
}

/// Like [`supervise`], for a task that may finish: it is restarted only after a panic.
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
    let mut consecutive = 0;
    loop {
        let began = Instant::now();
        // `start` itself may panic, too.
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
            consecutive = 0;
        }
        if consecutive == RESTARTS_MAX {
            process::fail(&format!("task {name} does not recover: {reason}"));
            return std::future::pending().await;
        }
        consecutive += 1;
        let delay = BACKOFF.delay(consecutive);
        // A defect. The task is started again after the delay. Report it with the line `panicked`.
        tracing::error!(task = name, reason, ?delay, consecutive, "task failed; restarting");
        tokio::time::sleep(delay).await;
        panics::count_restart(name);
        // The task of the line `task failed; restarting` runs again. Report the defect with the line `panicked`.
        tracing::warn!(task = name, consecutive, "task restarted");
    }
}

/// Runs a task that cannot be restarted (it owns a socket, or the only end of a channel): the process fails if it
/// panics. Returns the task's result, or `None` after a panic.
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

/// Runs one of many short tasks, such as one of the reports that are sent five times a second: a panic is logged and
/// counted, and the next task takes its place. Returns `None` after a panic.
pub fn contained<T>(name: &'static str, task: impl Future<Output = T>) -> impl Future<Output = Option<T>> {
    AssertUnwindSafe(task).catch_unwind().map(move |result| {
        let result = result.inspect_err(|payload| {
            panics::count(Scope::Task);
            // A defect. The next run of the task takes its place. Report it with the line `panicked`.
            tracing::error!(task = name, reason = panics::message(&**payload), "task failed");
        });
        result.ok()
    })
}

/// Runs a function that blocks, on a thread for such functions, and returns its result. A panic of the function continues in
/// the caller.
///
/// A runtime that is being shut down does not run the function; the future is then pending until the runtime drops it.
pub async fn blocking<T: Send + 'static>(run: impl FnOnce() -> T + Send + 'static) -> T {
    joined(&mut tokio::task::spawn_blocking(run)).await
}

/// Returns the result of a function that was started on a thread for blocking functions, as [`blocking`] does. Dropping this future
/// leaves the function running.
pub async fn joined<T>(function: &mut tokio::task::JoinHandle<T>) -> T {
    match function.await.map_err(JoinError::try_into_panic) {
        Ok(value) => value,
        Err(Ok(payload)) => resume_unwind(payload),
        Err(Err(_)) => std::future::pending().await,
    }
}

/// Starts a thread that cannot be restarted: the process fails if it panics.
///
/// # Errors
///
/// If the thread cannot be created.
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
    fn a_process_fails_after_half_a_minute_of_restarts() {
        let total: Duration = (1..=RESTARTS_MAX).map(|restarts| BACKOFF.delay(restarts)).sum();
        assert_eq!(total, Duration::from_millis(26_300));
    }

    #[tokio::test]
    async fn a_panic_of_a_blocking_function_continues_in_the_caller() {
        let run: fn() -> u32 = || panic!("defect");
        let payload = AssertUnwindSafe(blocking(run)).catch_unwind().await.expect_err("the function panics");
        assert_eq!(panics::message(&*payload), "defect");
    }

    /// Regression: a process that ended at once logged a panic of the task that reloads its certificate.
    #[test]
    fn a_blocking_function_that_a_shutdown_cancels_causes_no_panic() {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).build();
        let runtime = runtime.expect("a runtime");
        let handle = runtime.handle().clone();
        runtime.shutdown_background();
        // A task that is not dropped yet can still be polled.
        let _context = handle.enter();
        assert_eq!(blocking(|| ()).now_or_never(), None, "it waits until it is dropped");
    }
}
