//! Fault containment: the consequences of a panic, defined once for every process.
//!
//! A panic is a bug. It must affect only the request or the task in which it occurs. If it can leave shared state
//! half changed, the process must stop and be restarted, because the consistency of that state is unknown. The rule has
//! four parts, each in a module:
//!
//! | panic in | consequence | module |
//! |---|---|---|
//! | a request | its client gets 500, and the connection closes | [`request`] |
//! | a long-running task or thread | it is restarted with backoff; one that cannot be restarted, or that panics repeatedly, fails the process | [`task`] |
//! | the holder of a lock | the process fails, except for a lock of [`Mutex::independent`], whose state is consistent between any two statements | [`lock`] |
//! | any code in a *failed process* | the process is already not ready, drains and exits with an error | [`process`] |
//!
//! Locks never poison: after a panic of the holder, later requests use the state as it is until the process has ended.
//! `std`'s locks are not used (`tests/tidy/locks.rs`), so no `.lock().expect(..)` can turn one panic into a panic of
//! every later request.
//!
//! [`health`] checks take the same locks as requests, with a timeout, so that a process that cannot serve does not report
//! that it can. [`panics`] counts.

#[cfg(feature = "failpoints")]
pub mod failpoint;
pub mod health;
pub mod lock;
pub mod panics;
pub mod process;
pub mod request;
pub mod task;

pub use lock::{Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};
