//! Counters of panics and restarts for `/metrics`, and the log line of a panic.

use std::collections::BTreeMap;
use std::panic::PanicHookInfo;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// Scope in which a panic was contained.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Scope {
    /// A request, whose client got an error response.
    Request,
    /// A long-running task or thread.
    Task,
    /// A section that holds a lock; counted in addition to its request or task.
    Lock,
}

impl Scope {
    /// All scopes.
    pub const ALL: [Scope; 3] = [Scope::Request, Scope::Task, Scope::Lock];

    /// Returns the name in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Scope::Request => "request",
            Scope::Task => "task",
            Scope::Lock => "lock",
        }
    }
}

static CONTAINED: [AtomicU64; Scope::ALL.len()] = [const { AtomicU64::new(0) }; Scope::ALL.len()];
/// Restarts by task name. Locked for one statement at a time.
static RESTARTS: Mutex<BTreeMap<&'static str, u64>> = Mutex::new(BTreeMap::new());

pub(crate) fn count(scope: Scope) {
    CONTAINED[scope as usize].fetch_add(1, Ordering::Relaxed);
}

pub(crate) fn count_restart(task: &'static str) {
    *RESTARTS.lock().unwrap_or_else(PoisonError::into_inner).entry(task).or_default() += 1;
}

/// Returns the number of panics since the process started that were contained in this scope.
pub fn contained(scope: Scope) -> u64 {
    CONTAINED[scope as usize].load(Ordering::Relaxed)
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
        // A defect, with its position in the source. Report it.
        tracing::error!(at, thread, reason = message(info.payload()), "panicked");
    }));
}
