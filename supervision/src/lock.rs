//! Locks that do not poison, and that decide what a panic of their holder costs.
//!
//! The default is the careful one: state that several statements keep consistent may be half changed when one of them
//! panics, so the process fails. [`Mutex::independent`] and [`RwLock::independent`] are for state of which every change is
//! one statement (a value that is replaced, an entry that is inserted, a number that grows): there a panic costs whoever had
//! it and nobody else.
//!
//! The lock itself goes on in both cases. While a failed process drains, requests that take the lock find what its last
//! holder left; one that panics over it is contained like any other panic.

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

/// Sees, when it is dropped, whether its holder panics.
#[derive(Debug)]
struct Holder {
    on_panic: OnPanic,
    /// A lock that is taken while unwinding says nothing about who unwinds.
    was_panicking: bool,
    state: &'static str,
}

impl Holder {
    fn of<T: ?Sized>(on_panic: OnPanic) -> Holder {
        let state = std::any::type_name::<T>();
        Holder { on_panic, was_panicking: std::thread::panicking(), state }
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        if self.was_panicking || !std::thread::panicking() {
            return;
        }
        panics::count(Scope::Lock);
        let state = self.state;
        match self.on_panic {
            OnPanic::FailProcess => process::fail(&format!("a panic while {state} was changed")),
            OnPanic::Continue => tracing::error!(state, "panic while a lock was held, its state is whole"),
        }
    }
}

/// Where a test may make the holder panic.
fn taken<T: ?Sized>() {
    #[cfg(feature = "failpoints")]
    crate::failpoint::taken(std::any::type_name::<T>());
}

/// `std::sync::Mutex`, with the rule of this module for panics.
#[derive(Debug)]
pub struct Mutex<T: ?Sized> {
    on_panic: OnPanic,
    inner: sync::Mutex<T>,
}

/// Access to what a [`Mutex`] holds.
#[derive(Debug)]
#[must_use = "the lock is released when this is dropped"]
pub struct MutexGuard<'a, T: ?Sized> {
    // Dropped in this order: what the holder logs may need this very lock, that of the log's own buffer.
    inner: sync::MutexGuard<'a, T>,
    holder: Holder,
}

impl<T> Mutex<T> {
    /// For state that a panic can leave half changed: then the process fails.
    pub const fn new(state: T) -> Mutex<T> {
        Mutex { on_panic: OnPanic::FailProcess, inner: sync::Mutex::new(state) }
    }

    /// For state of which every change is one statement: a panic of a holder costs nothing beyond it.
    pub const fn independent(state: T) -> Mutex<T> {
        Mutex { on_panic: OnPanic::Continue, inner: sync::Mutex::new(state) }
    }
}

impl<T> Mutex<T> {
    /// Returns the state; the lock has no other owner any more.
    pub fn into_inner(self) -> T {
        self.inner.into_inner().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T: ?Sized> Mutex<T> {
    /// Waits for the lock.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        let inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let guard = MutexGuard { holder: Holder::of::<T>(self.on_panic), inner };
        taken::<T>();
        guard
    }
}

impl<T: Default> Default for Mutex<T> {
    /// As [`Mutex::new`] has it.
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
    /// One that nobody waits for.
    pub const fn new() -> Condvar {
        Condvar(sync::Condvar::new())
    }

    /// Waits for a notification; there may be none, as with `std`.
    pub fn wait<'a, T>(&self, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
        let MutexGuard { holder, inner } = guard;
        let inner = self.0.wait(inner).unwrap_or_else(PoisonError::into_inner);
        MutexGuard { holder, inner }
    }

    /// Waits for a notification, and no longer than `timeout`; says whether that has passed.
    pub fn wait_timeout<'a, T>(
        &self,
        guard: MutexGuard<'a, T>,
        timeout: Duration,
    ) -> (MutexGuard<'a, T>, bool) {
        let MutexGuard { holder, inner } = guard;
        let (inner, timed_out) = self.0.wait_timeout(inner, timeout).unwrap_or_else(PoisonError::into_inner);
        (MutexGuard { holder, inner }, timed_out.timed_out())
    }

    /// Waits while `condition` holds, and no longer than `timeout`.
    pub fn wait_timeout_while<'a, T>(
        &self,
        guard: MutexGuard<'a, T>,
        timeout: Duration,
        condition: impl FnMut(&mut T) -> bool,
    ) -> MutexGuard<'a, T> {
        let MutexGuard { holder, inner } = guard;
        let (inner, _) =
            self.0.wait_timeout_while(inner, timeout, condition).unwrap_or_else(PoisonError::into_inner);
        MutexGuard { holder, inner }
    }

    /// Wakes one.
    pub fn notify_one(&self) {
        self.0.notify_one();
    }

    /// Wakes all.
    pub fn notify_all(&self) {
        self.0.notify_all();
    }
}

/// `std::sync::RwLock`, with the rule of this module for panics of writers. Readers change nothing.
#[derive(Debug)]
pub struct RwLock<T: ?Sized> {
    on_panic: OnPanic,
    inner: sync::RwLock<T>,
}

/// Shared access to what a [`RwLock`] holds.
pub type RwLockReadGuard<'a, T> = sync::RwLockReadGuard<'a, T>;

/// Exclusive access to what a [`RwLock`] holds.
#[derive(Debug)]
#[must_use = "the lock is released when this is dropped"]
pub struct RwLockWriteGuard<'a, T: ?Sized> {
    inner: sync::RwLockWriteGuard<'a, T>,
    _holder: Holder,
}

impl<T> RwLock<T> {
    /// For state that a panic can leave half changed: then the process fails.
    pub const fn new(state: T) -> RwLock<T> {
        RwLock { on_panic: OnPanic::FailProcess, inner: sync::RwLock::new(state) }
    }

    /// For state of which every change is one statement: a panic of a holder costs nothing beyond it.
    pub const fn independent(state: T) -> RwLock<T> {
        RwLock { on_panic: OnPanic::Continue, inner: sync::RwLock::new(state) }
    }
}

impl<T: ?Sized> RwLock<T> {
    /// Waits for the lock, beside other readers.
    pub fn read(&self) -> RwLockReadGuard<'_, T> {
        let guard = self.inner.read().unwrap_or_else(PoisonError::into_inner);
        taken::<T>();
        guard
    }

    /// Waits for the lock, alone.
    pub fn write(&self) -> RwLockWriteGuard<'_, T> {
        let inner = self.inner.write().unwrap_or_else(PoisonError::into_inner);
        let guard = RwLockWriteGuard { _holder: Holder::of::<T>(self.on_panic), inner };
        taken::<T>();
        guard
    }
}

impl<T: Default> Default for RwLock<T> {
    /// As [`RwLock::new`] has it.
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
