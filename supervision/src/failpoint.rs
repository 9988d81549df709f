//! Failpoints for tests: make the next holder of a chosen lock panic (feature `failpoints`).
//!
//! A lock is identified by the type of its state, so that a test can list the locks that were taken and try each.

pub mod trial;

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

/// Locks are recorded only after a test enables it, so that a benchmark that is built with the feature measures the same
/// as without.
static IS_RECORDING: AtomicBool = AtomicBool::new(false);
static RECORDED: Mutex<BTreeSet<&'static str>> = Mutex::new(BTreeSet::new());
static ARMED: Mutex<Option<String>> = Mutex::new(None);

/// Starts to record the locks that are taken.
pub fn record() {
    IS_RECORDING.store(true, Ordering::SeqCst);
}

/// Returns the locks that were taken since [`record`].
pub fn recorded() -> BTreeSet<&'static str> {
    RECORDED.lock().unwrap_or_else(PoisonError::into_inner).clone()
}

/// Makes the next holder of a lock of this state panic, once.
pub fn arm(state: &str) {
    *ARMED.lock().unwrap_or_else(PoisonError::into_inner) = Some(state.to_owned());
    record();
}

/// Returns whether the armed failpoint has fired.
pub fn has_fired() -> bool {
    ARMED.lock().unwrap_or_else(PoisonError::into_inner).is_none()
}

/// Called by the lock with this state after it was acquired; panics if armed for it.
pub(crate) fn acquired(state: &'static str) {
    // A lock that is taken while a panic unwinds must not panic as well: that would abort the process.
    if !IS_RECORDING.load(Ordering::Relaxed) || std::thread::panicking() {
        return;
    }
    RECORDED.lock().unwrap_or_else(PoisonError::into_inner).insert(state);
    let is_armed = {
        let mut armed = ARMED.lock().unwrap_or_else(PoisonError::into_inner);
        armed.take_if(|armed| *armed == state).is_some()
    };
    assert!(!is_armed, "failpoint while {state} is held");
}
