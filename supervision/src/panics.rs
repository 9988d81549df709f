//! Counts of panics and of restarts, for `/metrics`, and the log line of a panic.

use std::collections::BTreeMap;
use std::panic::PanicHookInfo;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// Where a panic was contained.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Scope {
    /// In a request, which was answered with an error.
    Request,
    /// In a long-running task or thread.
    Task,
    /// In a section that holds a lock; counted beside the request or task in which that was.
    Lock,
}

impl Scope {
    /// All of them.
    pub const ALL: [Scope; 3] = [Scope::Request, Scope::Task, Scope::Lock];

    /// Its name in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Scope::Request => "request",
            Scope::Task => "task",
            Scope::Lock => "lock",
        }
    }
}

static CONTAINED: [AtomicU64; Scope::ALL.len()] = [const { AtomicU64::new(0) }; Scope::ALL.len()];
/// By the name of the task. Held for one statement at a time.
static RESTARTS: Mutex<BTreeMap<&'static str, u64>> = Mutex::new(BTreeMap::new());

pub(crate) fn count(scope: Scope) {
    CONTAINED[scope as usize].fetch_add(1, Ordering::Relaxed);
}

pub(crate) fn count_restart(task: &'static str) {
    *RESTARTS.lock().unwrap_or_else(PoisonError::into_inner).entry(task).or_default() += 1;
}

/// Panics since the process started, by where they were contained.
pub fn contained(scope: Scope) -> u64 {
    CONTAINED[scope as usize].load(Ordering::Relaxed)
}

/// Restarts of tasks since the process started, by task.
pub fn restarts() -> BTreeMap<&'static str, u64> {
    RESTARTS.lock().unwrap_or_else(PoisonError::into_inner).clone()
}

/// Returns the message of a panic.
pub fn message(payload: &(dyn std::any::Any + Send)) -> &str {
    let text = payload.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| payload.downcast_ref::<&'static str>().copied()).unwrap_or("a panic without a message")
}

/// Makes panics lines of the log, with the place in the source, instead of text on stderr. To be called once, by the front
/// door.
pub fn log_panics() {
    std::panic::set_hook(Box::new(|info: &PanicHookInfo<'_>| {
        let thread = std::thread::current();
        let at = info.location().map(ToString::to_string).unwrap_or_default();
        let thread = thread.name().unwrap_or_default();
        tracing::error!(at, thread, reason = message(info.payload()), "panicked");
    }));
}
