//! Fault containment: what a panic costs, decided once for every process.
//!
//! A panic is a bug. It must cost the request or the task in which it happens and nothing else; where it can leave state
//! behind that other requests rely on, the process must stop and be restarted, because nobody can know what that state is
//! worth. The rule has four parts, and each is a module:
//!
//! | what panics | what it costs | module |
//! |---|---|---|
//! | a request | its client gets 500, and the connection closes | [`request`] |
//! | a long-running task or thread | it is restarted with backoff; one that cannot be restarted, or panics again and again, fails the process | [`task`] |
//! | the holder of a lock | the process fails; not for a lock of [`Mutex::independent`], whose state is whole between any two statements | [`lock`] |
//! | anything, in a *failed process* | not ready from that moment, drained, exit with an error | [`process`] |
//!
//! Locks never poison: a request that finds a lock whose holder panicked is served with what is there until the process has
//! ended. `std`'s locks are not used beside these (`tests/tidy/locks.rs`), so no `.lock().expect(..)` can turn one panic
//! into one for each request that follows.
//!
//! [`health`] is the other half: a health check does what requests do, within a time, so that a process that cannot serve
//! does not report that it can. [`panics`] counts.

#[cfg(feature = "failpoints")]
pub mod failpoint;
pub mod health;
pub mod lock;
pub mod panics;
pub mod process;
pub mod request;
pub mod task;

pub use lock::{Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};
