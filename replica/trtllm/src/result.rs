//! Results of requests: each request ends exactly once, with rows or with an error.
//!
//! A [`Pending`] is a future and also has a blocking wait, so neither an async runtime nor a dedicated thread is
//! required. It wakes the task that polled last. Dropping it before its result cancels the request.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Instant;

use crate::EngineRows;

/// Error of a request.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ExecutorError {
    /// The engine has the maximum of requests.
    #[error("the queue of the engine is full; retry after a request has ended")]
    Overloaded,
    /// The request is not valid for the engine. A retry does not help.
    #[error("the engine rejected the request: {0}")]
    Rejected(String),
    /// The engine failed on this request alone, also when it was repeated without its batch.
    #[error("the engine failed on this request: {0}")]
    BatchFailed(String),
    /// The caller of the engine cancelled the request.
    #[error("the request was cancelled")]
    Cancelled,
    /// The engine cancelled the request after its own timeout.
    #[error("the request exceeded the engine's timeout")]
    TimedOut,
    /// The engine is shutting down with its replica.
    #[error("the engine was shut down")]
    Closed,
    /// The engine has failed permanently. Restart the replica.
    #[error("the engine is broken: {0}")]
    Broken(String),
}

/// Result of a request.
pub type RequestResult = Result<EngineRows, ExecutorError>;

/// Submitted request without a result.
#[must_use = "dropping it cancels the request"]
pub struct Pending {
    pub(crate) slot: Arc<ResultSlot>,
    /// Called if the request is cancelled.
    pub(crate) abandon: Option<Box<dyn FnOnce() + Send + Sync>>,
}

/// Cell of a result.
#[derive(Default)]
pub(crate) struct ResultSlot {
    state: Mutex<State>,
    ready: Condvar,
}

#[derive(Default)]
struct State {
    result: Option<RequestResult>,
    /// Whether the caller has dropped the request.
    abandoned: bool,
    waker: Option<Waker>,
}

impl ResultSlot {
    /// Stores the result; a second one is ignored.
    pub(crate) fn put(&self, result: RequestResult) {
        let mut state = self.lock();
        if state.result.is_none() && !state.abandoned {
            state.result = Some(result);
            let waker = state.waker.take();
            drop(state);
            self.ready.notify_all();
            if let Some(waker) = waker {
                waker.wake();
            }
        }
    }

    /// Returns whether the caller still waits for the result.
    pub(crate) fn is_awaited(&self) -> bool {
        !self.lock().abandoned
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Pending {
    /// Blocks this thread until the request has ended.
    pub fn wait(mut self) -> RequestResult {
        let mut state = self.slot.lock();
        let result = loop {
            match state.result.take() {
                Some(result) => break result,
                None => {
                    state = self.slot.ready.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
            }
        };
        drop(state);
        self.abandon = None;
        result
    }

    /// Blocks this thread until the request has ended or `end` has passed; in the latter case the request continues.
    pub fn wait_until(mut self, end: Instant) -> Result<RequestResult, Pending> {
        let mut state = self.slot.lock();
        let result = loop {
            if let Some(result) = state.result.take() {
                break result;
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                drop(state);
                return Err(self);
            }
            state = self.slot.ready.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        };
        drop(state);
        self.abandon = None;
        Ok(result)
    }
}

impl Future for Pending {
    type Output = RequestResult;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<RequestResult> {
        let mut state = self.slot.lock();
        match state.result.take() {
            Some(result) => {
                drop(state);
                self.abandon = None;
                Poll::Ready(result)
            }
            None => {
                state.waker = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        let Some(abandon) = self.abandon.take() else { return };
        let mut state = self.slot.lock();
        state.abandoned = true;
        let awaited = state.result.is_none();
        drop(state);
        if awaited {
            abandon();
        }
    }
}

impl std::fmt::Debug for Pending {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pending").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::Wake;
    use std::thread;
    use std::time::Duration;

    use super::*;

    struct CountingWaker(AtomicUsize);

    impl Wake for CountingWaker {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    fn pending(slot: &Arc<ResultSlot>, abandoned: &Arc<AtomicUsize>) -> Pending {
        let abandoned = Arc::clone(abandoned);
        let abandon = Box::new(move || {
            abandoned.fetch_add(1, Ordering::SeqCst);
        });
        Pending { slot: Arc::clone(slot), abandon: Some(abandon) }
    }

    #[test]
    fn the_first_result_is_kept_and_a_finished_request_is_not_cancelled() {
        let (slot, abandoned) = (Arc::new(ResultSlot::default()), Arc::new(AtomicUsize::new(0)));
        let waiting = pending(&slot, &abandoned);
        slot.put(Err(ExecutorError::TimedOut));
        slot.put(Err(ExecutorError::Closed));
        assert_eq!(waiting.wait(), Err(ExecutorError::TimedOut));
        assert_eq!(abandoned.load(Ordering::SeqCst), 0);
    }

    #[test]
    fn a_dropped_request_is_cancelled_once_and_needs_no_result() {
        let (slot, abandoned) = (Arc::new(ResultSlot::default()), Arc::new(AtomicUsize::new(0)));
        let waiting = pending(&slot, &abandoned).wait_until(Instant::now()).unwrap_err();
        assert!(slot.is_awaited());
        drop(waiting);
        assert!(!slot.is_awaited());
        assert_eq!(abandoned.load(Ordering::SeqCst), 1);
    }

    #[test]
    fn a_task_is_woken_by_the_result() {
        let (slot, abandoned) = (Arc::new(ResultSlot::default()), Arc::new(AtomicUsize::new(0)));
        let mut waiting = pending(&slot, &abandoned);
        let woken = Arc::new(CountingWaker(AtomicUsize::new(0)));
        let waker = Waker::from(Arc::clone(&woken));
        let mut context = Context::from_waker(&waker);
        assert!(Pin::new(&mut waiting).poll(&mut context).is_pending());
        let rows = EngineRows { width: 1, numbers: vec![4.0] };
        thread::scope(|scope| scope.spawn(|| slot.put(Ok(rows.clone()))).join().unwrap());
        assert_eq!(woken.0.load(Ordering::SeqCst), 1);
        assert_eq!(Pin::new(&mut waiting).poll(&mut context), Poll::Ready(Ok(rows)));
        drop(waiting);
        assert_eq!(abandoned.load(Ordering::SeqCst), 0);
    }

    #[test]
    fn a_blocked_thread_is_woken_by_the_result() {
        let (slot, abandoned) = (Arc::new(ResultSlot::default()), Arc::new(AtomicUsize::new(0)));
        let waiting = pending(&slot, &abandoned);
        let end = Instant::now() + Duration::from_secs(60);
        let result = thread::scope(|scope| {
            let waits = scope.spawn(|| waiting.wait_until(end).unwrap());
            slot.put(Err(ExecutorError::Cancelled));
            waits.join().unwrap()
        });
        assert_eq!(result, Err(ExecutorError::Cancelled));
    }
}
