//! Drives the planner and the engine, and brings rows back to whoever waits for them.
//!
//! The engine has a thread of its own. Requests come in under one short lock, without a channel between: the planner
//! *is* the queue, so what is in it is what is waiting, and a caller who goes away takes its work out at once by
//! dropping its [`Ticket`]. While the engine computes one batch, the lock is free and the next requests are tokenised
//! and taken in; when it is done it plans again with everything that has come meanwhile. An idle engine starts at once:
//! there is no timer that waits for more.
//!
//! A batch on which the engine fails, or panics, costs the requests in it and nobody else.

use std::any::Any;
use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use replica_core::batch::{Backlog, BatchPlanner, Item, Plan, QueueFull, RequestId};
use replica_core::limits::Limits;
use tokio::sync::oneshot;

use crate::counters::Counters;
use crate::engine::{BatchBuffer, Engine};
use crate::events::{BatchComputed, EngineFailed, InputsDropped};
use crate::tokenize::TokenIds;

/// The vectors of one request.
#[derive(Debug)]
pub struct Vectors {
    /// Rows, one after the other, in the order of the inputs.
    pub values: Vec<f32>,
    /// Tokens that were computed.
    pub tokens: u64,
    /// How long they waited for the engine, all in all.
    pub queue: Duration,
    /// How long the batches that they were in took.
    pub engine: Duration,
}

/// Why there are no vectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unanswered {
    /// The deadline passed before they were computed.
    Expired,
    /// The engine failed; its event says why.
    EngineFailed,
    /// The batcher was stopped.
    Stopped,
}

/// The queue and the engine's thread, which ends when this is dropped.
pub struct Batcher {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    state: Mutex<State>,
    work: Condvar,
    dimensions: usize,
    counters: Arc<Counters>,
}

struct State {
    planner: BatchPlanner<TokenIds>,
    replies: BTreeMap<RequestId, Reply>,
    closed: bool,
}

/// A request that has not been answered.
struct Reply {
    values: Vec<f32>,
    left: usize,
    tokens: u64,
    taken_in: Instant,
    engine: Duration,
    answer: oneshot::Sender<Result<Vectors, Unanswered>>,
}

impl Batcher {
    /// Starts the engine's thread.
    pub fn start(
        engine: Box<dyn Engine>,
        limits: &Limits,
        counters: Arc<Counters>,
    ) -> std::io::Result<Batcher> {
        let state = State {
            planner: BatchPlanner::new(limits.batch_tokens, limits.max_queue_tokens),
            replies: BTreeMap::new(),
            closed: false,
        };
        let dimensions = engine.describe().dimensions;
        let shared =
            Arc::new(Shared { state: Mutex::new(state), work: Condvar::new(), dimensions, counters });
        let worker = Arc::clone(&shared);
        let thread = thread::Builder::new().name("batcher".to_owned()).spawn(move || worker.work(engine))?;
        Ok(Batcher { shared, thread: Some(thread) })
    }

    /// Takes in the inputs of one request, all or none.
    pub fn submit(&self, inputs: Vec<TokenIds>, deadline: Option<Instant>) -> Result<Ticket, QueueFull> {
        let tokens: u64 = inputs.iter().map(|input| input.len() as u64).sum();
        let left = inputs.len();
        let items = inputs.into_iter().map(|input| (input.len() as u64, input)).collect();
        let (answer, answered) = oneshot::channel();
        let values = vec![0.0; left * self.shared.dimensions];
        let mut state = self.shared.lock();
        let request = state.planner.push(items, deadline)?;
        let reply = Reply { values, left, tokens, taken_in: Instant::now(), engine: Duration::ZERO, answer };
        state.replies.insert(request, reply);
        drop(state);
        self.shared.work.notify_one();
        Ok(Ticket { request, shared: Arc::clone(&self.shared), answered })
    }

    /// What waits and what is being computed.
    pub fn backlog(&self) -> Backlog {
        self.shared.lock().planner.backlog()
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
        if let Some(thread) = self.thread.take() {
            // It catches the engine's panics; if it panicked itself, stderr has said so.
            let _ = thread.join();
        }
    }
}

/// The right to the vectors of one request. Dropped before they are there, it takes the request out of the queue.
pub struct Ticket {
    request: RequestId,
    shared: Arc<Shared>,
    answered: oneshot::Receiver<Result<Vectors, Unanswered>>,
}

impl Ticket {
    /// Waits for the vectors.
    pub async fn vectors(mut self) -> Result<Vectors, Unanswered> {
        (&mut self.answered).await.unwrap_or(Err(Unanswered::Stopped))
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        if state.replies.remove(&self.request).is_some() {
            let inputs = state.planner.cancel(self.request).len() as u64;
            drop(state);
            InputsDropped { inputs }.record(&self.shared.counters);
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // The planner asserts before it changes anything, so what a panic leaves behind is whole.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self, engine: Box<dyn Engine>) {
        let (mut tokens, mut rows) = (BatchBuffer::default(), Vec::new());
        while let Some(batch) = self.next_batch() {
            let started = Instant::now();
            tokens.clear();
            batch.iter().for_each(|item| tokens.push(&item.payload));
            rows.clear();
            rows.resize(batch.len() * self.dimensions, 0.0);
            let computed = catch_unwind(AssertUnwindSafe(|| engine.embed(&tokens.batch(), &mut rows)));
            let busy = started.elapsed();
            match computed {
                Ok(Ok(())) => self.answer(&batch, &rows, busy),
                Ok(Err(error)) => self.fail(&batch, &error.to_string(), busy),
                Err(panic) => self.fail(&batch, panic_text(&*panic), busy),
            }
        }
        // Whoever still waits is told so by its sender being dropped.
        self.lock().replies.clear();
    }

    /// The next batch, waiting for one; `None` when the batcher ends.
    fn next_batch(&self) -> Option<Vec<Item<TokenIds>>> {
        let mut state = self.lock();
        loop {
            if state.closed {
                return None;
            }
            let Plan { batch, expired } = state.planner.next(Instant::now());
            for (request, items) in expired {
                state.end(request, Err(Unanswered::Expired));
                InputsDropped { inputs: items.len() as u64 }.record(&self.counters);
            }
            if !batch.is_empty() {
                return Some(batch);
            }
            state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn answer(&self, batch: &[Item<TokenIds>], rows: &[f32], busy: Duration) {
        BatchComputed.record(&self.counters);
        let requests: BTreeSet<RequestId> = batch.iter().map(|item| item.request).collect();
        let mut state = self.lock();
        state.planner.finished(size(batch), busy);
        for (item, row) in batch.iter().zip(rows.chunks_exact(self.dimensions)) {
            // A request that was cancelled or expired while its first inputs were computed is not there any more.
            if let Some(reply) = state.replies.get_mut(&item.request) {
                reply.values[item.index * self.dimensions..][..self.dimensions].copy_from_slice(row);
                reply.left -= 1;
            }
        }
        let now = Instant::now();
        for request in requests {
            let Some(reply) = state.replies.get_mut(&request) else { continue };
            reply.engine += busy;
            if reply.left == 0 {
                let values = std::mem::take(&mut reply.values);
                let queue = now.saturating_duration_since(reply.taken_in).saturating_sub(reply.engine);
                let vectors = Vectors { values, tokens: reply.tokens, queue, engine: reply.engine };
                state.end(request, Ok(vectors));
            }
        }
    }

    fn fail(&self, batch: &[Item<TokenIds>], reason: &str, busy: Duration) {
        let done = size(batch);
        EngineFailed { reason, inputs: batch.len(), tokens: done.tokens }.record();
        let mut state = self.lock();
        state.planner.finished(done, busy);
        for item in batch {
            state.planner.cancel(item.request);
            state.end(item.request, Err(Unanswered::EngineFailed));
        }
    }
}

impl State {
    /// Answers a request, unless that has been done.
    fn end(&mut self, request: RequestId, answer: Result<Vectors, Unanswered>) {
        if let Some(reply) = self.replies.remove(&request) {
            // Whoever has gone away in this very moment does not want it.
            let _ = reply.answer.send(answer);
        }
    }
}

fn size(batch: &[Item<TokenIds>]) -> Backlog {
    Backlog { tokens: batch.iter().map(|item| item.tokens).sum(), inputs: batch.len() as u64 }
}

fn panic_text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("it panicked")
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};

    use replica_core::{EngineKind, EngineSpec, Precision};
    use tokio::runtime;

    use super::*;
    use crate::engine::{Description, EngineError, RaggedBatch};

    /// Token ids with a meaning of their own.
    const FAILS: u32 = 666;
    const PANICS: u32 = 667;

    /// The vector of a sequence is its first token and its length. Before each batch it says that it begins, and waits
    /// until it may.
    struct Scripted {
        description: Description,
        begins: Mutex<Sender<Vec<u32>>>,
        may_go_on: Mutex<Receiver<()>>,
    }

    impl Engine for Scripted {
        fn describe(&self) -> &Description {
            &self.description
        }

        fn embed(&self, batch: &RaggedBatch<'_>, out: &mut [f32]) -> Result<(), EngineError> {
            let firsts = batch.sequences().map(|range| batch.token_ids()[range.start]).collect();
            self.begins.lock().expect("begins").send(firsts).ok();
            // A test that has let go of the gate lets everything pass.
            let _ = self.may_go_on.lock().expect("may go on").recv();
            assert!(!batch.token_ids().contains(&PANICS), "a token that panics");
            if batch.token_ids().contains(&FAILS) {
                return Err(EngineError::Broken { reason: "a token that fails".to_owned() });
            }
            for (row, range) in out.chunks_exact_mut(2).zip(batch.sequences()) {
                row.copy_from_slice(&[batch.token_ids()[range.start] as f32, range.len() as f32]);
            }
            Ok(())
        }
    }

    /// A batcher over a scripted engine.
    struct Play {
        batcher: Batcher,
        counters: Arc<Counters>,
        began: Receiver<Vec<u32>>,
        go_on: Option<Sender<()>>,
    }

    impl Play {
        /// Batches of ten tokens, and a queue of a hundred.
        fn new() -> Play {
            let (begins, began) = channel();
            let (go_on, may_go_on) = channel();
            let description = Description {
                engine: EngineSpec { kind: EngineKind::Cpu, precision: Precision::F32 },
                architecture: "scripted".to_owned(),
                dimensions: 2,
                max_tokens: 100,
                vocabulary: 1000,
                token_types: 1,
                instruction_set: "none".to_owned(),
                threads: 1,
            };
            let engine =
                Scripted { description, begins: Mutex::new(begins), may_go_on: Mutex::new(may_go_on) };
            let limits = Limits { batch_tokens: 10, max_queue_tokens: 100, ..Limits::default() };
            let counters = Arc::<Counters>::default();
            let batcher = Batcher::start(Box::new(engine), &limits, Arc::clone(&counters)).expect("a thread");
            Play { batcher, counters, began, go_on: Some(go_on) }
        }

        /// A request of `(first token, length)` inputs.
        fn submit(&self, inputs: &[(u32, usize)], deadline: Option<Instant>) -> Result<Ticket, QueueFull> {
            let input = |(first, length): &(u32, usize)| vec![*first; *length].into_boxed_slice();
            self.batcher.submit(inputs.iter().map(input).collect(), deadline)
        }

        /// Waits until the engine begins, and returns the first tokens of its batch.
        fn begins(&self) -> Vec<u32> {
            self.began.recv().expect("the engine's thread")
        }

        /// Lets the engine go on, for good.
        fn let_go(&mut self) {
            self.go_on = None;
        }
    }

    fn wait(ticket: Ticket) -> Result<Vec<f32>, Unanswered> {
        let runtime = runtime::Builder::new_current_thread().build().expect("a runtime");
        runtime.block_on(ticket.vectors()).map(|vectors| vectors.values)
    }

    #[test]
    fn each_caller_gets_the_rows_of_his_inputs_in_their_order() {
        let mut play = Play::new();
        play.let_go();
        let many: Vec<(u32, usize)> = (1..=9).map(|n| (n, n as usize % 4 + 1)).collect();
        let requests = [&many[..], &[(50, 25)], &[(60, 1), (61, 2)]];
        let tickets: Vec<Ticket> =
            requests.iter().map(|inputs| play.submit(inputs, None).expect("room")).collect();
        for (ticket, inputs) in tickets.into_iter().zip(requests) {
            let expected: Vec<f32> =
                inputs.iter().flat_map(|(first, n)| [*first as f32, *n as f32]).collect();
            assert_eq!(wait(ticket), Ok(expected));
        }
        assert_eq!(play.batcher.backlog(), Backlog::default());
        assert!(play.batcher.tokens_per_second() > 0.0);
    }

    #[test]
    fn a_batch_that_fails_or_panics_costs_its_requests_and_nobody_else() {
        for poison in [FAILS, PANICS] {
            let mut play = Play::new();
            let first = play.submit(&[(1, 10)], None).expect("room");
            assert_eq!(play.begins(), [1]);
            let poisoned = play.submit(&[(2, 5), (poison, 1), (3, 5)], None).expect("room");
            play.let_go();
            assert!(wait(first).is_ok());
            assert_eq!(wait(poisoned), Err(Unanswered::EngineFailed));
            let last = play.submit(&[(4, 1)], None).expect("room");
            assert_eq!(wait(last), Ok(vec![4.0, 1.0]), "the engine goes on");
            assert_eq!(play.batcher.backlog(), Backlog::default());
        }
    }

    #[test]
    fn what_nobody_waits_for_any_more_is_not_computed() {
        let mut play = Play::new();
        let running = play.submit(&[(1, 1)], None).expect("room");
        assert_eq!(play.begins(), [1]);
        let left = play.submit(&[(2, 1), (3, 1), (4, 1)], None).expect("room");
        let last = play.submit(&[(5, 1)], None).expect("room");
        drop(left);
        assert_eq!(play.batcher.backlog(), Backlog { tokens: 2, inputs: 2 });
        play.let_go();
        assert!(wait(running).is_ok() && wait(last).is_ok());
        assert_eq!(play.begins(), [5], "only the last was still wanted");
        assert_eq!(play.counters.read().dropped_inputs_total, 3);
    }

    #[test]
    fn what_is_too_late_is_not_computed() {
        let mut play = Play::new();
        let running = play.submit(&[(1, 1)], None).expect("room");
        assert_eq!(play.begins(), [1]);
        let late = play.submit(&[(2, 1)], Some(Instant::now())).expect("room");
        let last = play.submit(&[(3, 1)], Some(Instant::now() + Duration::from_secs(3600))).expect("room");
        play.let_go();
        assert_eq!(wait(late), Err(Unanswered::Expired));
        assert!(wait(running).is_ok() && wait(last).is_ok());
        assert_eq!(play.begins(), [3]);
        assert_eq!(play.counters.read().dropped_inputs_total, 1);
    }

    #[test]
    fn a_full_queue_refuses_and_computes_what_it_has() {
        let mut play = Play::new();
        let running = play.submit(&[(1, 1)], None).expect("room");
        assert_eq!(play.begins(), [1]);
        let waiting = play.submit(&[(2, 10), (3, 90)], None).expect("exactly full");
        let full = play.submit(&[(4, 1)], None).err().expect("one token past it");
        assert_eq!((full.pending_tokens, full.max_queue_tokens), (101, 100));
        play.let_go();
        assert!(wait(running).is_ok() && wait(waiting).is_ok());
    }

    #[test]
    fn whoever_waits_when_it_stops_is_told_so() {
        let mut play = Play::new();
        let running = play.submit(&[(1, 1)], None).expect("room");
        assert_eq!(play.begins(), [1]);
        let waiting = play.submit(&[(2, 1)], None).expect("room");
        let shared = Arc::clone(&play.batcher.shared);
        let go_on = play.go_on.take();
        thread::scope(|scope| {
            scope.spawn(|| drop(play));
            while !shared.lock().closed {
                thread::yield_now();
            }
            drop(go_on);
        });
        assert!(wait(running).is_ok(), "what was being computed is finished");
        assert_eq!(wait(waiting), Err(Unanswered::Stopped));
    }
}
