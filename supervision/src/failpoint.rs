//! Panics on demand, for tests: of whoever takes a lock of a given state next (feature `failpoints`).
//!
//! A lock is named by the type of what it holds, so that a test can list those that were taken and try each of them.

pub mod trial;

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

/// Nothing is noted before a test asks for it, so that a benchmark that is built with the feature measures what it would
/// without.
static WATCHING: AtomicBool = AtomicBool::new(false);
static SEEN: Mutex<BTreeSet<&'static str>> = Mutex::new(BTreeSet::new());
static ARMED: Mutex<Option<String>> = Mutex::new(None);

/// Notes from now on which locks are taken.
pub fn watch() {
    WATCHING.store(true, Ordering::SeqCst);
}

/// Those that were taken since.
pub fn seen() -> BTreeSet<&'static str> {
    SEEN.lock().unwrap_or_else(PoisonError::into_inner).clone()
}

/// Makes the next holder of a lock of this state panic, once.
pub fn arm(state: &str) {
    *ARMED.lock().unwrap_or_else(PoisonError::into_inner) = Some(state.to_owned());
    watch();
}

/// Whether that has come to pass.
pub fn has_fired() -> bool {
    ARMED.lock().unwrap_or_else(PoisonError::into_inner).is_none()
}

/// A lock of this state was taken, and is held.
pub(crate) fn taken(state: &'static str) {
    // What is given back while a panic unwinds must not panic as well: that would be an abort.
    if !WATCHING.load(Ordering::Relaxed) || std::thread::panicking() {
        return;
    }
    SEEN.lock().unwrap_or_else(PoisonError::into_inner).insert(state);
    let fires = {
        let mut armed = ARMED.lock().unwrap_or_else(PoisonError::into_inner);
        armed.take_if(|armed| *armed == state).is_some()
    };
    assert!(!fires, "failpoint while {state} is held");
}
