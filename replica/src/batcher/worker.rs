//! The engine's thread: asks the planner, computes, hands over. An engine that wants several batches ahead has as many of
//! these threads, and is taken to compute one batch after another all the same.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};
use supervision::Mutex;
use supervision::request::{Panicked, contain_work};

use replica_core::batch::{Backlog, Batch, BatchPlan, BatchRequestId, FinishedBatch, NextAction, RowOwner};
use replica_core::priority::Priority;

use super::sequence::Sequence;
use super::{Shared, State, Unanswered};
use crate::engine::{
    BatchBuffer, BatchCallbacks, ComputeNested, Engine, EngineError, FailedSequence, Output, RaggedBatch,
};
use crate::events::{BatchComputed, EngineFailed, EngineWaits, InputsDropped};

/// A batch that was computed, and whose rows it made.
pub(super) struct Done {
    batch: Batch<Sequence>,
    owners: Vec<Vec<RowOwner>>,
    /// Or why there are none.
    rows: Result<Computed, String>,
    busy: Duration,
}

/// What came of a batch.
struct Computed {
    rows: Vec<f32>,
    /// Items that have none of these, in order.
    failed: Vec<FailedSequence>,
}

/// A batch that was computed, before the planner knows.
struct Ran {
    batch: Batch<Sequence>,
    rows: Result<Computed, String>,
    started: Instant,
    /// Of the time since, what went to others that were let in.
    others: Duration,
}

/// What an engine may ask while it computes a batch.
struct AtHand<'a> {
    shared: &'a Shared,
    batch: &'a Batch<Sequence>,
    hand_over: &'a Sender<Done>,
    /// How long others were computed meanwhile.
    others: Mutex<Duration>,
}

impl BatchCallbacks for AtHand<'_> {
    fn is_needed(&self, sequence: usize) -> bool {
        self.shared.lock().planner.has_waiting_owner(self.batch.items[sequence].job)
    }

    fn has_urgent(&self) -> bool {
        self.batch.priority == Priority::Bulk && self.shared.lookups.load(Ordering::Relaxed)
    }

    fn run_urgent(&self, beside: &mut ComputeNested<'_>) {
        let begun = Instant::now();
        let mut tokens = BatchBuffer::default();
        while let Some(batch) = self.shared.next_between() {
            let ran = self.shared.run(&mut tokens, batch, |_, batch, output, rows| {
                beside(batch, output, rows).map(|()| Vec::new())
            });
            let busy = ran.started.elapsed();
            let done = self.shared.finish(&mut self.shared.lock(), ran, busy);
            self.hand_over.send(done).unwrap_or_else(|unsent| self.shared.answer(unsent.0));
        }
        *self.others.lock() += begun.elapsed();
    }
}

impl Shared {
    pub(super) fn work(&self, engine: &dyn Engine, hand_over: &Sender<Done>) {
        let mut tokens = BatchBuffer::default();
        let mut ran = None;
        while let Some(batch) = self.next_batch(ran.take(), hand_over) {
            let mut others = Duration::ZERO;
            let mut computed = self.run(&mut tokens, batch, |at_hand, batch, output, rows| {
                let meanwhile = AtHand {
                    shared: self,
                    batch: at_hand,
                    hand_over,
                    others: Mutex::independent(Duration::ZERO),
                };
                let computed = engine.compute_each(batch, output, &meanwhile, rows);
                others = meanwhile.others.into_inner();
                computed
            });
            computed.others = others;
            if let Some(statistics) = engine.statistics() {
                self.metrics.set_now(|now| now.engine = Some(statistics));
            }
            ran = Some(computed);
        }
    }

    /// Has `compute` make the rows of a batch.
    fn run(
        &self,
        tokens: &mut BatchBuffer,
        batch: Batch<Sequence>,
        compute: impl FnOnce(
            &Batch<Sequence>,
            &RaggedBatch<'_>,
            Output,
            &mut [f32],
        ) -> Result<Vec<FailedSequence>, EngineError>,
    ) -> Ran {
        let started = Instant::now();
        let output = batch.items[0].input.output;
        tokens.clear();
        for item in &batch.items {
            tokens.push(&item.input.tokens.ids, item.input.tokens.types.as_deref());
        }
        let numbers: usize = batch.items.iter().map(|item| item.input.rows()).sum();
        let mut rows = vec![0.0; numbers * self.width_of(output)];
        let computed = contain_work(|| compute(&batch, &tokens.batch(), output, &mut rows));
        let rows = match computed {
            Ok(Ok(failed)) => Ok(Computed { rows, failed }),
            Ok(Err(error)) => Err(error.to_string()),
            Err(Panicked(reason)) => Err(reason),
        };
        Ran { batch, rows, started, others: Duration::ZERO }
    }

    /// Lookups that go before the rest of a batch of bulk; `None` when that is to go on.
    fn next_between(&self) -> Option<Batch<Sequence>> {
        let mut state = self.lock();
        if state.closed {
            return None;
        }
        let BatchPlan { next, expired } = state.planner.next_between_steps(Instant::now());
        self.publish(&state.planner);
        let next = match next {
            NextAction::Compute(batch) => Some(batch),
            NextAction::Wait(_) | NextAction::Idle => {
                // Under the lock: whoever comes later says so again.
                self.lookups.store(false, Ordering::Relaxed);
                None
            }
        };
        drop(state);
        self.expire(expired);
        next
    }

    /// The engine was busy with this batch for so long.
    fn finish(&self, state: &mut State, ran: Ran, busy: Duration) -> Done {
        let Ran { batch, rows, .. } = ran;
        let FinishedBatch { owners, complete: _ } = state.planner.finished(&batch, busy, Instant::now());
        let failed: Vec<&Vec<RowOwner>> = match &rows {
            Ok(computed) => computed.failed.iter().map(|failed| &owners[failed.sequence]).collect(),
            Err(_) => owners.iter().collect(),
        };
        // Before the next batch is chosen, so that no more is computed for them.
        failed.into_iter().flatten().for_each(|owner| {
            state.planner.cancel(owner.request);
        });
        Done { batch, owners, rows, busy }
    }

    /// Takes over what ran, and returns the next batch, waiting for one; `None` when the batcher ends.
    fn next_batch(&self, ran: Option<Ran>, hand_over: &Sender<Done>) -> Option<Batch<Sequence>> {
        let mut state = self.lock();
        let mut done = ran.map(|ran| {
            // While it waited behind another batch the engine was busy with that one.
            let now = Instant::now();
            let begun = state.ended.replace(now).map_or(ran.started, |ended| ended.max(ran.started));
            let busy = now.saturating_duration_since(begun).saturating_sub(ran.others);
            self.finish(&mut state, ran, busy)
        });
        loop {
            if state.closed {
                drop(state);
                done.into_iter().for_each(|done| self.answer(done));
                return None;
            }
            let BatchPlan { next, expired } = state.planner.next(Instant::now());
            self.publish(&state.planner);
            let until = match next {
                NextAction::Compute(batch) => {
                    drop(state);
                    self.expire(expired);
                    if let Some(done) = done {
                        // Nobody listens only if that thread has panicked; what it had is lost, and this is not.
                        hand_over.send(done).unwrap_or_else(|unsent| self.answer(unsent.0));
                    }
                    return Some(batch);
                }
                NextAction::Wait(until) => {
                    EngineWaits.record(&self.metrics);
                    Some(until)
                }
                NextAction::Idle => None,
            };
            if done.is_some() || !expired.is_empty() {
                drop(state);
                self.expire(expired);
                done.take().into_iter().for_each(|done| self.answer(done));
                state = self.lock();
                continue;
            }
            state = match until {
                None => self.work.wait(state),
                Some(until) => {
                    let time = until.saturating_duration_since(Instant::now());
                    self.work.wait_timeout(state, time).0
                }
            };
        }
    }

    fn expire(&self, expired: Vec<(BatchRequestId, u64)>) {
        for (request, inputs) in expired {
            self.replies.refuse(request, Unanswered::Expired);
            InputsDropped { inputs }.record(&self.metrics);
        }
    }

    /// Brings rows to their requests.
    pub(super) fn answer(&self, done: Done) {
        let Done { batch, owners, rows, busy } = done;
        let requests: BTreeSet<BatchRequestId> = owners.iter().flatten().map(|owner| owner.request).collect();
        let Computed { rows, failed } = match rows {
            Ok(computed) => computed,
            Err(reason) => {
                let Backlog { tokens, inputs } = batch.size();
                EngineFailed { reason: &reason, inputs, tokens }.record(&self.metrics);
                for request in requests {
                    self.replies.refuse(request, Unanswered::EngineFailed);
                }
                return;
            }
        };
        for FailedSequence { sequence, reason } in &failed {
            // Whom nobody waited for was given up, and did not fail.
            if !owners[*sequence].is_empty() {
                EngineFailed { reason, inputs: 1, tokens: batch.items[*sequence].tokens }
                    .record(&self.metrics);
            }
            for owner in &owners[*sequence] {
                self.replies.refuse(owner.request, Unanswered::EngineFailed);
            }
        }
        let mut rest = rows.as_slice();
        for (index, (item, owners)) in batch.items.iter().zip(&owners).enumerate() {
            let (rows, after) = rest.split_at(item.input.rows() * self.width_of(item.input.output));
            rest = after;
            if failed.iter().any(|failed| failed.sequence == index) {
                continue;
            }
            if !rows.iter().all(|number| number.is_finite()) {
                // It is neither sent, for JSON has no word for it, nor kept for the next request.
                let reason = "a row holds NaN or an infinity";
                EngineFailed { reason, inputs: 1, tokens: item.tokens }.record(&self.metrics);
                for owner in owners {
                    self.replies.refuse(owner.request, Unanswered::NotFinite);
                }
                continue;
            }
            for owner in owners {
                self.replies.fill(*owner, rows);
            }
            if let (Some(cache), Some(key)) = (&self.cache, item.input.key) {
                cache.insert(key, rows);
            }
        }
        // Counted before anybody hears of it, so that whoever asks after his answer finds it counted.
        let longest = batch.items.iter().map(|item| item.tokens).max().unwrap_or_default();
        BatchComputed {
            size: batch.size(),
            longest,
            priority: batch.priority,
            reason: batch.reason,
            waited: batch.waited,
            busy,
        }
        .record(&self.metrics);
        if let Some(cache) = &self.cache {
            cache.publish(&self.metrics);
        }
        let now = Instant::now();
        for request in requests {
            self.replies.filled(request, busy, now);
        }
    }
}
