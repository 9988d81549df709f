//! Drives the planner and the engine, and brings rows back to whoever waits for them.
//!
//! The engine has a thread of its own, or as many as it wants batches ahead: one, but for engines on a GPU. Requests come in under one short lock, without a channel between: the planner
//! *is* the queue, so what is in it is what is waiting, and a caller who goes away takes its work out at once by
//! dropping its [`Ticket`]. While the engine computes one batch, the next requests are tokenised and taken in.
//!
//! Between two batches the engine's thread does only what it must: it tells the planner that the one is done and asks for
//! the next. The rows go to a second thread (`replies`), which copies them to their requests and wakes their callers
//! while the engine is at work again. A batch is chosen at the last moment and never prepared ahead: what would be saved
//! is microseconds of copying token ids, and what it would cost is that a lookup waits behind one more batch. An engine
//! that can lay a batch aside is let have lookups between two steps of one of bulk, so that they wait for a step.
//! When there is nothing to compute, the engine's thread answers by itself, so a lone request pays for no hand-over.
//!
//! A batch on which the engine fails, or panics, costs the requests in it and nobody else.
//!
//! 1. `sequence` — an input, as the planner and the cache tell it from others.
//! 2. `replies` — rows on their way to their requests.
//! 3. `worker` — the engine's thread.

mod replies;
mod sequence;
#[cfg(test)]
mod tests;
mod worker;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use supervision::{Condvar, Mutex, MutexGuard, task};

use replica_core::batch::{AdmittedRequest, Backlog, BatchPlanner, BatchRequestId, BatchSettings, QueueFull};
use replica_core::priority::Priority;
use tokio::sync::oneshot;

use self::replies::{Replies, Reply};
use self::sequence::Sequence;
use crate::engine::{Engine, Output};
use crate::events::{InputsDropped, InputsJoined, RequestShed, RowsLookedUp};
use crate::metrics::Metrics;
use crate::tokenize::Tokenized;
use crate::vectors::RowCache;

pub(crate) use sequence::SequenceKey;
pub use sequence::TenantKey;

/// What one request wants computed.
#[derive(Clone, Debug)]
pub struct Work {
    /// What the model reads.
    pub inputs: Vec<Tokenized>,
    /// What is wanted of each.
    pub output: Output,
    /// Who goes first.
    pub priority: Priority,
    /// After this nobody wants it any more.
    pub deadline: Option<Instant>,
    /// Whose it is: equal inputs share work and cached rows within a tenant only.
    pub tenant: Option<TenantKey>,
}

/// The rows of one request.
#[derive(Debug)]
pub struct Computed {
    /// Rows, one after the other, in the order of the inputs.
    pub rows: Vec<f32>,
    /// Numbers of one row.
    pub width: usize,
    /// Rows of each input: 1, or as many as it has tokens.
    pub counts: Vec<u32>,
    /// Tokens of all inputs.
    pub tokens: u64,
    /// Inputs whose rows were in the cache.
    pub cached_inputs: u64,
    /// How long they waited for the engine, all in all.
    pub queue: Duration,
    /// How long the batches that they were in took.
    pub engine: Duration,
}

/// Why there are no rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unanswered {
    /// The deadline passed before they were computed.
    Expired,
    /// The engine failed; its event says why.
    EngineFailed,
    /// The engine computed NaN or an infinity.
    NotFinite,
    /// The batcher was stopped.
    Stopped,
}

/// What a batcher works with.
#[derive(Debug)]
pub struct Options {
    /// How batches are made.
    pub batch: BatchSettings,
    /// Tokens that may wait.
    pub max_queue_tokens: u64,
    /// Rows that were computed before; absent = none are kept.
    pub cache: Option<RowCache>,
    /// Where everything is counted.
    pub metrics: Arc<Metrics>,
}

/// The queue and the engine's thread, which ends when this is dropped.
pub struct Batcher {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared {
    state: Mutex<State>,
    work: Condvar,
    /// Lookups have come since the planner last had none to let in.
    lookups: AtomicBool,
    replies: Replies,
    cache: Option<RowCache>,
    /// Numbers of one row, by what is wanted.
    width: usize,
    hidden: usize,
    metrics: Arc<Metrics>,
}

struct State {
    planner: BatchPlanner<Sequence>,
    /// When the engine was last done with a batch.
    ended: Option<Instant>,
    closed: bool,
}

impl Batcher {
    /// Starts the engine's thread, and the one that answers.
    pub fn start(engine: Arc<dyn Engine>, options: Options) -> std::io::Result<Batcher> {
        let Options { batch, max_queue_tokens, cache, metrics } = options;
        let planner = BatchPlanner::new(batch, max_queue_tokens);
        let (width, hidden) = (engine.describe().width, engine.describe().hidden);
        let shared = Arc::new(Shared {
            state: Mutex::new(State { planner, ended: None, closed: false }),
            work: Condvar::new(),
            lookups: AtomicBool::new(false),
            replies: Replies::default(),
            cache,
            width,
            hidden,
            metrics,
        });
        let mut batcher = Batcher { shared: Arc::clone(&shared), threads: Vec::new() };
        let (hand_over, done) = std::sync::mpsc::channel();
        let answering = Arc::clone(&shared);
        for _ in 0..engine.batches_ahead() {
            let (shared, engine, hand_over) = (Arc::clone(&shared), Arc::clone(&engine), hand_over.clone());
            batcher.threads.push(task::thread("batcher", move || shared.work(&*engine, &hand_over))?);
        }
        drop(hand_over);
        // It ends when the engine's threads do, because they let go of the channel.
        batcher
            .threads
            .push(task::thread("answers", move || done.iter().for_each(|done| answering.answer(done)))?);
        Ok(batcher)
    }

    /// Takes in one request, all of it or nothing.
    pub fn submit(&self, work: Work) -> Result<Ticket, QueueFull> {
        let Work { inputs, output, priority, deadline, tenant } = work;
        let shared = &self.shared;
        let cached = shared.cache.is_some();
        let sequences = inputs.into_iter().map(|input| Sequence::new(input, output, tenant, cached));
        let (answer, answered) = oneshot::channel();
        let taken_in = Instant::now();
        let mut reply = Reply::new(shared.width_of(output), taken_in, answer);
        let mut missing = Vec::new();
        for sequence in sequences {
            let rows = sequence.rows();
            let known = shared.cache.as_ref().zip(sequence.key).and_then(|(cache, key)| cache.get(key));
            match known {
                Some(cached) => reply.push_cached(sequence.len(), rows, &cached),
                None => {
                    reply.push_missing(sequence.len(), rows);
                    missing.push(sequence);
                }
            }
        }
        if shared.cache.is_some() {
            RowsLookedUp { found: reply.cached(), missing: missing.len() as u64 }.record(&shared.metrics);
        }
        if missing.is_empty() {
            reply.send(taken_in);
            return Ok(Ticket { request: None, shared: Arc::clone(shared), answered });
        }
        let mut state = shared.lock();
        let admitted = state.planner.push(priority, missing, deadline, taken_in);
        let AdmittedRequest { request, joined } = admitted.inspect_err(|full| {
            RequestShed { priority: full.priority }.record(&shared.metrics);
        })?;
        // Under the lock, or the engine could be done with it before it is there.
        shared.replies.insert(request, reply);
        if priority == Priority::Interactive {
            shared.lookups.store(true, Ordering::Relaxed);
        }
        shared.publish(&state.planner);
        drop(state);
        shared.work.notify_one();
        InputsJoined { inputs: joined }.record(&shared.metrics);
        Ok(Ticket { request: Some(request), shared: Arc::clone(shared), answered })
    }

    /// What waits and what is being computed.
    pub fn backlog(&self) -> Backlog {
        self.shared.lock().planner.backlog()
    }

    /// Tokens of lookups that wait.
    pub fn lookup_tokens(&self) -> u64 {
        self.shared.lock().planner.loads().interactive.queued.tokens
    }

    /// Measured speed of the engine; 0 until it is known.
    pub fn tokens_per_second(&self) -> f64 {
        self.shared.lock().planner.tokens_per_second()
    }
}

impl Drop for Batcher {
    fn drop(&mut self) {
        self.shared.lock().closed = true;
        self.shared.work.notify_all();
        for thread in self.threads.drain(..) {
            // It catches the engine's panics; if it panicked itself, stderr has said so.
            let _ = thread.join();
        }
        // Whoever still waits is told so by its sender being dropped.
        self.shared.replies.clear();
    }
}

/// The right to the rows of one request. Dropped before they are there, it takes the request out of the queue.
pub struct Ticket {
    /// None if all of it was in the cache.
    request: Option<BatchRequestId>,
    shared: Arc<Shared>,
    answered: oneshot::Receiver<Result<Computed, Unanswered>>,
}

impl Ticket {
    /// Waits for the rows.
    pub async fn rows(mut self) -> Result<Computed, Unanswered> {
        (&mut self.answered).await.unwrap_or(Err(Unanswered::Stopped))
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let Some(request) = self.request else { return };
        if self.shared.replies.take(request).is_some() {
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

    /// Stores for `/metrics` what the planner holds.
    fn publish(&self, planner: &BatchPlanner<Sequence>) {
        let (loads, cost, tokens_per_second) = (planner.loads(), planner.cost(), planner.tokens_per_second());
        self.metrics.set_now(|now| {
            now.loads = loads;
            now.cost = cost;
            now.tokens_per_second = tokens_per_second;
        });
    }
}
