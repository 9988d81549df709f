//! Locks without poisoning, with a defined consequence of a panic of their holder.
//!
//! By default the process fails: state that several statements keep consistent may be half changed when one of them
//! panics. [`Mutex::independent`] and [`RwLock::independent`] are for state of which every change is one statement (a
//! value that is replaced, an entry that is inserted, a number that grows): there a panic has no consequence beyond the
//! request or task in which it occurs.
//!
//! The lock stays usable in both cases. While a failed process drains, requests that take the lock find the state as its
//! last holder left it; if one of them panics over it, that is contained like any other panic.

use crate::panics::{self, Scope};
use crate::process;
use std::ops::{Deref, DerefMut};
use std::sync::{self, PoisonError};
use std::time::Duration;

/// Consequence of a panic of the holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum OnPanic {
    FailProcess,
    Continue,
}

/// Guard that detects, when it is dropped, whether the holder of the lock panics.
#[derive(Debug)]
struct PanicGuard {
    on_panic: OnPanic,
    /// Whether the thread was already unwinding when it took the lock; then the lock's state is not involved.
    was_panicking: bool,
    state: &'static str,
}

impl PanicGuard {
    fn of<T: ?Sized>(on_panic: OnPanic) -> PanicGuard {
        let state = std::any::type_name::<T>();
        PanicGuard { on_panic, was_panicking: std::thread::panicking(), state }
    }
}

impl Drop for PanicGuard {
    fn drop(&mut self) {
        if self.was_panicking || !std::thread::panicking() {
            return;
        }
        panics::count(Scope::Lock);
        let state = self.state;
        match self.on_panic {
            OnPanic::FailProcess => process::fail(&format!("a panic occurred while {state} was locked")),
            OnPanic::Continue => {
                // A defect. The process continues. Report it with the line `panicked`.
                tracing::error!(state, "panic while a lock was held; its state is consistent")
            }
        }
    }
}

/// Hook for failpoints: a test may make the holder panic here.
fn acquired<T: ?Sized>() {
    #[cfg(feature = "failpoints")]
    crate::failpoint::acquired(std::any::type_name::<T>());
}

/// `std::sync::Mutex` with the panic rule of this module.
#[derive(Debug)]
pub struct Mutex<T: ?Sized> {
    on_panic: OnPanic,
    inner: sync::Mutex<T>,
}

/// Guard of a [`Mutex`].
#[derive(Debug)]
#[must_use = "the lock is released when this is dropped"]
pub struct MutexGuard<'a, T: ?Sized> {
    // Dropped in this order: the log line of the panic guard may need this very lock, if it is that of the log's buffer.
    inner: sync::MutexGuard<'a, T>,
    panic_guard: PanicGuard,
}

impl<T> Mutex<T> {
    /// Creates a lock for state that a panic can leave half changed; a panic of a holder fails the process.
    pub const fn new(state: T) -> Mutex<T> {
        Mutex { on_panic: OnPanic::FailProcess, inner: sync::Mutex::new(state) }
    }

    /// Creates a lock for state of which every change is one statement; a panic of a holder has no further consequence.
    pub const fn independent(state: T) -> Mutex<T> {
        Mutex { on_panic: OnPanic::Continue, inner: sync::Mutex::new(state) }
    }
}

impl<T> Mutex<T> {
    /// Consumes the lock and returns the state.
    pub fn into_inner(self) -> T {
        self.inner.into_inner().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T: ?Sized> Mutex<T> {
    /// Acquires the lock.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        let inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let guard = MutexGuard { panic_guard: PanicGuard::of::<T>(self.on_panic), inner };
        acquired::<T>();
        guard
    }
}

impl<T: Default> Default for Mutex<T> {
    /// Creates a lock with [`Mutex::new`].
    fn default() -> Mutex<T> {
        Mutex::new(T::default())
    }
}

impl<T: ?Sized> Deref for MutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.inner
    }
}

impl<T: ?Sized> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.inner
    }
}

/// `std::sync::Condvar`, for a [`Mutex`].
#[derive(Debug, Default)]
pub struct Condvar(sync::Condvar);

impl Condvar {
    /// Creates a condition variable.
    pub const fn new() -> Condvar {
        Condvar(sync::Condvar::new())
    }

    /// Waits for a notification; like with `std`, wakeups can be spurious.
    pub fn wait<'a, T>(&self, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
        let MutexGuard { panic_guard, inner } = guard;
        let inner = self.0.wait(inner).unwrap_or_else(PoisonError::into_inner);
        MutexGuard { panic_guard, inner }
    }

    /// Waits for a notification for at most `timeout`; returns whether it timed out.
    pub fn wait_timeout<'a, T>(
        &self,
        guard: MutexGuard<'a, T>,
        timeout: Duration,
    ) -> (MutexGuard<'a, T>, bool) {
        let MutexGuard { panic_guard, inner } = guard;
        let (inner, timed_out) = self.0.wait_timeout(inner, timeout).unwrap_or_else(PoisonError::into_inner);
        (MutexGuard { panic_guard, inner }, timed_out.timed_out())
    }

    /// Waits while `condition` holds, for at most `timeout`.
    pub fn wait_timeout_while<'a, T>(
        &self,
        guard: MutexGuard<'a, T>,
        timeout: Duration,
        condition: impl FnMut(&mut T) -> bool,
    ) -> MutexGuard<'a, T> {
        let MutexGuard { panic_guard, inner } = guard;
        let (inner, _) =
            self.0.wait_timeout_while(inner, timeout, condition).unwrap_or_else(PoisonError::into_inner);
        MutexGuard { panic_guard, inner }
    }

    /// Wakes one waiter.
    pub fn notify_one(&self) {
        self.0.notify_one();
    }

    /// Wakes all waiters.
    pub fn notify_all(&self) {
        self.0.notify_all();
    }
}

/// `std::sync::RwLock` with the panic rule of this module for writers. Readers change nothing.
#[derive(Debug)]
pub struct RwLock<T: ?Sized> {
    on_panic: OnPanic,
    inner: sync::RwLock<T>,
}

/// Shared guard of a [`RwLock`].
pub type RwLockReadGuard<'a, T> = sync::RwLockReadGuard<'a, T>;

/// Exclusive guard of a [`RwLock`].
#[derive(Debug)]
#[must_use = "the lock is released when this is dropped"]
pub struct RwLockWriteGuard<'a, T: ?Sized> {
    inner: sync::RwLockWriteGuard<'a, T>,
    _panic_guard: PanicGuard,
}

impl<T> RwLock<T> {
    /// Creates a lock for state that a panic can leave half changed; a panic of a writer fails the process.
    pub const fn new(state: T) -> RwLock<T> {
        RwLock { on_panic: OnPanic::FailProcess, inner: sync::RwLock::new(state) }
    }

    /// Creates a lock for state of which every change is one statement; a panic of a writer has no further consequence.
    pub const fn independent(state: T) -> RwLock<T> {
        RwLock { on_panic: OnPanic::Continue, inner: sync::RwLock::new(state) }
    }
}

impl<T: ?Sized> RwLock<T> {
    /// Acquires the lock for reading.
    pub fn read(&self) -> RwLockReadGuard<'_, T> {
        let guard = self.inner.read().unwrap_or_else(PoisonError::into_inner);
        acquired::<T>();
        guard
    }

    /// Acquires the lock for writing.
    pub fn write(&self) -> RwLockWriteGuard<'_, T> {
        let inner = self.inner.write().unwrap_or_else(PoisonError::into_inner);
        let guard = RwLockWriteGuard { _panic_guard: PanicGuard::of::<T>(self.on_panic), inner };
        acquired::<T>();
        guard
    }
}

impl<T: Default> Default for RwLock<T> {
    /// Creates a lock with [`RwLock::new`].
    fn default() -> RwLock<T> {
        RwLock::new(T::default())
    }
}

impl<T: ?Sized> Deref for RwLockWriteGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.inner
    }
}

impl<T: ?Sized> DerefMut for RwLockWriteGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.inner
    }
}
