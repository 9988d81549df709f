//! Batcher: drives the planner and the engine, and delivers rows to the requests that wait for them.
//!
//! The engine runs on a thread of its own, or on as many threads as the number of batches it accepts ahead: one, except
//! for GPU engines. Requests are enqueued under one short lock, without a channel in between: the planner *is* the
//! queue, so it holds exactly what is waiting, and a caller that disconnects removes its work at once by dropping its
//! [`ComputeTicket`]. While the engine computes one batch, the next requests are tokenized and enqueued.
//!
//! Between two batches the engine thread does the minimum: it reports the finished batch to the planner and takes the
//! next one. The rows go to a second thread (`pending`), which copies them into their responses and wakes the callers
//! while the engine is already busy again. A batch is chosen at the last moment and never prepared ahead: preparing
//! ahead would save microseconds of copying token ids, and make an interactive request wait behind one more batch. An
//! engine that can suspend a batch computes interactive batches between two steps of a bulk batch, so that interactive
//! requests wait for one step only. When there is nothing to compute, the engine thread delivers the rows itself, so a
//! lone request pays for no hand-over.
//!
//! If the engine fails or panics on a batch, the requests in this batch fail and no other.
//!
//! 1. `sequence`: identity of an input for the planner and the cache.
//! 2. `pending`: responses whose rows are incomplete.
//! 3. `worker`: the engine thread.

mod pending;
pub(crate) mod sequence;
#[cfg(test)]
mod tests;
mod worker;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Instant;
use supervision::{Condvar, Mutex, MutexGuard, task};

use replica_api::priority::Priority;
use replica_core::batch::{AdmittedRequest, Backlog, BatchPlanner, BatchRequestId, BatchSettings, QueueFull};
use telemetry::context::TraceContext;
use tokio::sync::oneshot;

pub use self::pending::{ComputeError, ComputedRows};

use self::pending::{PendingResponse, PendingResponses};
use self::sequence::QueuedSequence;
use crate::engine::{Engine, Output};
use crate::events::{CacheLookup, InputsDeduplicated, InputsDropped, RequestShed};
use crate::metrics::Metrics;
use crate::tokenize::Tokenized;
use crate::vectors::RowCache;

pub use sequence::TenantKey;

/// Inputs of one request, to be computed.
#[derive(Clone, Debug)]
pub struct ComputeRequest {
    /// Tokenized inputs.
    pub inputs: Vec<Tokenized>,
    /// Requested output of each input.
    pub output: Output,
    /// Priority in the queue.
    pub priority: Priority,
    /// Time after which the request is dropped unless it is complete.
    pub deadline: Option<Instant>,
    /// Tenant of the request: equal inputs share work and cached rows within a tenant only.
    pub tenant: Option<TenantKey>,
}

/// Options of a batcher.
#[derive(Debug)]
pub struct Options {
    /// Batch limits and batching delay.
    pub batch: BatchSettings,
    /// Limit of the tokens in the queue.
    pub max_queue_tokens: u64,
    /// Cache of computed rows; absent = disabled.
    pub cache: Option<RowCache>,
    /// Metrics of the replica.
    pub metrics: Arc<Metrics>,
}

/// Queue and engine threads. Dropping it stops the threads.
pub struct Batcher {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared {
    state: Mutex<State>,
    work: Condvar,
    /// Set when an interactive request is enqueued; cleared when the planner has no interactive batch left.
    interactive_pending: AtomicBool,
    pending: PendingResponses,
    cache: Option<RowCache>,
    /// Whether requests have traces, for which their batches are recorded.
    is_traced: bool,
    /// Values in a row: `width` for pooled output, `hidden` for token rows.
    width: usize,
    hidden: usize,
    metrics: Arc<Metrics>,
}

struct State {
    planner: BatchPlanner<QueuedSequence>,
    /// Time at which the engine last finished a batch.
    ended: Option<Instant>,
    closed: bool,
}

impl Batcher {
    /// Starts the engine threads and the delivery thread.
    pub fn start(engine: Arc<dyn Engine>, options: Options) -> std::io::Result<Batcher> {
        Batcher::start_traced(engine, options, false)
    }

    /// Starts the threads; with `is_traced`, batches are recorded for the traces of requests.
    pub(crate) fn start_traced(
        engine: Arc<dyn Engine>,
        options: Options,
        is_traced: bool,
    ) -> std::io::Result<Batcher> {
        let Options { batch, max_queue_tokens, cache, metrics } = options;
        let planner = BatchPlanner::new(batch, max_queue_tokens);
        let (width, hidden) = (engine.describe().width, engine.describe().hidden);
        let shared = Arc::new(Shared {
            state: Mutex::new(State { planner, ended: None, closed: false }),
            work: Condvar::new(),
            interactive_pending: AtomicBool::new(false),
            pending: PendingResponses::default(),
            cache,
            is_traced,
            width,
            hidden,
            metrics,
        });
        let mut batcher = Batcher { shared: Arc::clone(&shared), threads: Vec::new() };
        let (finished_batches, finished) = std::sync::mpsc::channel();
        let delivering = Arc::clone(&shared);
        for _ in 0..engine.batches_ahead() {
            let (shared, engine, finished_batches) =
                (Arc::clone(&shared), Arc::clone(&engine), finished_batches.clone());
            batcher.threads.push(task::thread("batcher", move || shared.work(&*engine, &finished_batches))?);
        }
        drop(finished_batches);
        // This thread ends when the engine threads do, because they own the senders of the channel.
        batcher.threads.push(task::thread("delivery", move || {
            finished.iter().for_each(|finished| delivering.deliver(finished))
        })?);
        Ok(batcher)
    }

    /// Enqueues all inputs of one request, or none of them.
    pub fn submit(&self, compute: ComputeRequest) -> Result<ComputeTicket, QueueFull> {
        self.submit_traced(compute, None)
    }

    /// Enqueues a request whose batches are recorded for its trace, if it has one.
    pub(crate) fn submit_traced(
        &self,
        compute: ComputeRequest,
        trace: Option<TraceContext>,
    ) -> Result<ComputeTicket, QueueFull> {
        let ComputeRequest { inputs, output, priority, deadline, tenant } = compute;
        let shared = &self.shared;
        let cached = shared.cache.is_some();
        let sequences = inputs.into_iter().map(|input| QueuedSequence::new(input, output, tenant, cached));
        let (sender, receiver) = oneshot::channel();
        let enqueued_at = Instant::now();
        let mut response = PendingResponse::new(shared.width_of(output), enqueued_at, trace, sender);
        let mut missing = Vec::new();
        for sequence in sequences {
            let rows = sequence.rows();
            let cached_rows = shared.cache.as_ref().zip(sequence.key).and_then(|(cache, key)| cache.get(key));
            match cached_rows {
                Some(cached) => response.push_cached(sequence.len(), rows, &cached),
                None => {
                    response.push_missing(sequence.len(), rows);
                    missing.push(sequence);
                }
            }
        }
        if shared.cache.is_some() {
            CacheLookup { hits: response.cached(), misses: missing.len() as u64 }.record(&shared.metrics);
        }
        if missing.is_empty() {
            response.send(enqueued_at);
            return Ok(ComputeTicket { request: None, shared: Arc::clone(shared), receiver });
        }
        let mut state = shared.lock();
        let admitted = state.planner.push(priority, missing, deadline, enqueued_at);
        let AdmittedRequest { request, joined } = admitted.inspect_err(|full| {
            RequestShed { priority: full.priority }.record(&shared.metrics);
        })?;
        // Inserted under the lock: otherwise the engine could finish the batch before the response is registered.
        shared.pending.insert(request, response);
        if priority == Priority::Interactive {
            shared.interactive_pending.store(true, Ordering::Relaxed);
        }
        shared.publish(&state.planner);
        drop(state);
        shared.work.notify_one();
        InputsDeduplicated { inputs: joined }.record(&shared.metrics);
        Ok(ComputeTicket { request: Some(request), shared: Arc::clone(shared), receiver })
    }

    /// Returns the tokens and inputs that wait or are being computed.
    pub fn backlog(&self) -> Backlog {
        self.shared.lock().planner.backlog()
    }

    /// Returns the tokens of interactive requests in the queue.
    pub fn interactive_tokens(&self) -> u64 {
        self.shared.lock().planner.loads().interactive.queued.tokens
    }

    /// Returns the measured speed of the engine; 0 before the first measurement.
    pub fn tokens_per_second(&self) -> f64 {
        self.shared.lock().planner.tokens_per_second()
    }
}

impl Drop for Batcher {
    fn drop(&mut self) {
        self.shared.lock().closed = true;
        self.shared.work.notify_all();
        for thread in self.threads.drain(..) {
            // The thread catches panics of the engine; a panic of its own has been printed to stderr.
            let _ = thread.join();
        }
        // Dropping the senders completes the remaining callers with `ComputeError::Stopped`.
        self.shared.pending.clear();
    }
}

/// Handle to the rows of one request. Dropping it before they are complete cancels the request.
pub struct ComputeTicket {
    /// None if all rows came from the cache.
    request: Option<BatchRequestId>,
    shared: Arc<Shared>,
    receiver: oneshot::Receiver<Result<ComputedRows, ComputeError>>,
}

impl ComputeTicket {
    /// Waits for the rows.
    pub async fn rows(mut self) -> Result<ComputedRows, ComputeError> {
        (&mut self.receiver).await.unwrap_or(Err(ComputeError::Stopped))
    }
}

impl Drop for ComputeTicket {
    fn drop(&mut self) {
        let Some(request) = self.request else { return };
        if self.shared.pending.take(request).is_some() {
            let mut state = self.shared.lock();
            let inputs = state.planner.cancel(request);
            self.shared.publish(&state.planner);
            drop(state);
            InputsDropped { inputs }.record(&self.shared.metrics);
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    fn width_of(&self, output: Output) -> usize {
        match output {
            Output::Pooled => self.width,
            Output::Tokens => self.hidden,
        }
    }

    /// Copies the planner's state to the gauges of `/metrics`.
    fn publish(&self, planner: &BatchPlanner<QueuedSequence>) {
        let (loads, cost, tokens_per_second) = (planner.loads(), planner.cost(), planner.tokens_per_second());
        self.metrics.update_gauges(|gauges| {
            gauges.loads = loads;
            gauges.cost = cost;
            gauges.tokens_per_second = tokens_per_second;
        });
    }
}
