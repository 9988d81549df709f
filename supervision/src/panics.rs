//! Counters of panics and restarts for `/metrics`, and the log line of a panic.

use metrics::{ByName, Family, Total, labels, metric_set};
use std::collections::BTreeMap;
use std::panic::PanicHookInfo;
use std::sync::{LazyLock, Mutex, PoisonError};

labels! {
    /// Scope in which a panic was contained.
    #[derive(PartialOrd, Ord)]
    pub enum Scope {
        /// A request, whose client got an error response.
        Request = "request",
        /// A long-running task or thread.
        Task = "task",
        /// A section that holds a lock; counted in addition to its request or task.
        Lock = "lock",
    }
}

metric_set! {
    /// Metrics of this process.
    #[derive(Debug)]
    pub struct PanicMetrics {
        /// Contained panics, by scope. Each is a defect and is logged.
        panics: &'static Family<Scope> = "meridian_{role}_panics_total" ["scope"],
        /// Restarts of long-running tasks after a panic or an unexpected end.
        task_restarts: ByName<Total> = "meridian_{role}_task_restarts_total" ["task"],
    }
}

impl PanicMetrics {
    /// Returns the current values.
    pub fn read() -> PanicMetrics {
        let task_restarts = restarts().into_iter().map(|(task, n)| (task, Total(n))).collect();
        PanicMetrics { panics: &CONTAINED, task_restarts }
    }
}

static CONTAINED: LazyLock<Family<Scope>> = LazyLock::new(Family::default);
/// Restarts by task name. Locked for one statement at a time.
static RESTARTS: Mutex<BTreeMap<&'static str, u64>> = Mutex::new(BTreeMap::new());

pub(crate) fn count(scope: Scope) {
    CONTAINED.count(scope);
}

pub(crate) fn count_restart(task: &'static str) {
    *RESTARTS.lock().unwrap_or_else(PoisonError::into_inner).entry(task).or_default() += 1;
}

/// Returns the number of panics since the process started that were contained in this scope.
pub fn contained(scope: Scope) -> u64 {
    CONTAINED.of(scope).get()
}

/// Returns the number of restarts since the process started, by task.
pub fn restarts() -> BTreeMap<&'static str, u64> {
    RESTARTS.lock().unwrap_or_else(PoisonError::into_inner).clone()
}

/// Returns the message of a panic.
pub fn message(payload: &(dyn std::any::Any + Send)) -> &str {
    let text = payload.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| payload.downcast_ref::<&'static str>().copied()).unwrap_or("a panic without a message")
}

/// Installs a panic hook that logs panics, with their source location, instead of writing to stderr. Called once, by
/// the CLI.
pub fn log_panics() {
    std::panic::set_hook(Box::new(|info: &PanicHookInfo<'_>| {
        let thread = std::thread::current();
        let at = info.location().map(ToString::to_string).unwrap_or_default();
        let thread = thread.name().unwrap_or_default();
        // A defect; `at` is its position in the source. Report it with the lines that follow.
        tracing::error!(at, thread, reason = message(info.payload()), "panicked");
    }));
}
