//! The engine's thread: asks the planner, computes, hands over. An engine that wants several batches ahead has as many of
//! these threads, and is taken to compute one batch after another all the same.

use std::any::Any;
use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::PoisonError;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use replica_core::batch::{Backlog, Batch, Finished, Next, Owner, Plan, RequestId};

use super::sequence::Sequence;
use super::{Shared, Unanswered};
use crate::engine::{BatchBuffer, Engine, Failed};
use crate::events::{BatchComputed, EngineFailed, EngineWaits, InputsDropped};

/// A batch that was computed, and whose rows it made.
pub(super) struct Done {
    batch: Batch<Sequence>,
    owners: Vec<Vec<Owner>>,
    /// Or why there are none.
    rows: Result<Computed, String>,
    busy: Duration,
}

/// What came of a batch.
struct Computed {
    rows: Vec<f32>,
    /// Items that have none of these, in order.
    failed: Vec<Failed>,
}

/// A batch that was computed, before the planner knows.
struct Ran {
    batch: Batch<Sequence>,
    rows: Result<Computed, String>,
    started: Instant,
}

impl Shared {
    pub(super) fn work(&self, engine: &dyn Engine, hand_over: &Sender<Done>) {
        let mut tokens = BatchBuffer::default();
        let mut ran = None;
        while let Some(batch) = self.next_batch(ran.take(), hand_over) {
            ran = Some(self.compute(engine, &mut tokens, batch));
        }
    }

    fn compute(&self, engine: &dyn Engine, tokens: &mut BatchBuffer, batch: Batch<Sequence>) -> Ran {
        let started = Instant::now();
        let output = batch.items[0].input.output;
        tokens.clear();
        for item in &batch.items {
            tokens.push(&item.input.tokens.ids, item.input.tokens.types.as_deref());
        }
        let numbers: usize = batch.items.iter().map(|item| item.input.rows()).sum();
        let mut rows = vec![0.0; numbers * self.width_of(output)];
        let wanted = |sequence: usize| self.lock().planner.is_wanted(batch.items[sequence].job);
        let computed = catch_unwind(AssertUnwindSafe(|| {
            engine.compute_each(&tokens.batch(), output, &wanted, &mut rows)
        }));
        let rows = match computed {
            Ok(Ok(failed)) => Ok(Computed { rows, failed }),
            Ok(Err(error)) => Err(error.to_string()),
            Err(panic) => Err(panic_text(&*panic).to_owned()),
        };
        if let Some(statistics) = engine.statistics() {
            self.metrics.set_now(|now| now.engine = Some(statistics));
        }
        Ran { batch, rows, started }
    }

    /// Takes over what ran, and returns the next batch, waiting for one; `None` when the batcher ends.
    fn next_batch(&self, ran: Option<Ran>, hand_over: &Sender<Done>) -> Option<Batch<Sequence>> {
        let mut state = self.lock();
        let mut done = ran.map(|Ran { batch, rows, started }| {
            // While it waited behind another batch the engine was busy with that one.
            let now = Instant::now();
            let begun = state.ended.replace(now).map_or(started, |ended| ended.max(started));
            let busy = now.saturating_duration_since(begun);
            let Finished { owners, complete: _ } = state.planner.finished(&batch, busy, now);
            let failed: Vec<&Vec<Owner>> = match &rows {
                Ok(computed) => computed.failed.iter().map(|failed| &owners[failed.sequence]).collect(),
                Err(_) => owners.iter().collect(),
            };
            // Before the next batch is chosen, so that no more is computed for them.
            failed.into_iter().flatten().for_each(|owner| {
                state.planner.cancel(owner.request);
            });
            Done { batch, owners, rows, busy }
        });
        loop {
            if state.closed {
                drop(state);
                done.into_iter().for_each(|done| self.answer(done));
                return None;
            }
            let Plan { next, expired } = state.planner.next(Instant::now());
            self.publish(&state.planner);
            let until = match next {
                Next::Compute(batch) => {
                    drop(state);
                    self.expire(expired);
                    if let Some(done) = done {
                        // Nobody listens only if that thread has panicked; what it had is lost, and this is not.
                        hand_over.send(done).unwrap_or_else(|unsent| self.answer(unsent.0));
                    }
                    return Some(batch);
                }
                Next::Wait(until) => {
                    EngineWaits.record(&self.metrics);
                    Some(until)
                }
                Next::Idle => None,
            };
            if done.is_some() || !expired.is_empty() {
                drop(state);
                self.expire(expired);
                done.take().into_iter().for_each(|done| self.answer(done));
                state = self.lock();
                continue;
            }
            state = match until {
                None => self.work.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(until) => {
                    let time = until.saturating_duration_since(Instant::now());
                    self.work.wait_timeout(state, time).unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }

    fn expire(&self, expired: Vec<(RequestId, u64)>) {
        for (request, inputs) in expired {
            self.replies.refuse(request, Unanswered::Expired);
            InputsDropped { inputs }.record(&self.metrics);
        }
    }

    /// Brings rows to their requests.
    pub(super) fn answer(&self, done: Done) {
        let Done { batch, owners, rows, busy } = done;
        let requests: BTreeSet<RequestId> = owners.iter().flatten().map(|owner| owner.request).collect();
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
        for Failed { sequence, reason } in &failed {
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
            lane: batch.lane,
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

fn panic_text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("it panicked")
}
