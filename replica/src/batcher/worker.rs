//! Engine thread: takes a batch from the planner, computes it and hands the rows over. An engine that accepts several
//! batches ahead has as many of these threads; for the accounting of busy time it still computes one batch after
//! another.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};
use supervision::Mutex;
use supervision::request::{Panicked, contain_work};

use replica_api::priority::Priority;
use replica_core::batch::{Backlog, Batch, BatchPlan, BatchRequestId, FinishedBatch, NextAction, RowOwner};

use super::sequence::QueuedSequence;
use super::{ComputeError, Shared, State};
use crate::engine::{
    BatchBuffer, BatchCallbacks, ComputeNested, Engine, EngineError, EngineStep, FailedSequence, Output,
    RaggedBatch,
};
use crate::events::{BatchComputed, BatchDelayed, EngineFailed, InputsDropped};
use crate::trace::{BatchTimes, BatchTrace};

/// Finished batch, on its way to the delivery thread.
pub(super) struct BatchResult {
    batch: Batch<QueuedSequence>,
    owners: Vec<Vec<RowOwner>>,
    /// Rows, or the error message of the engine.
    rows: Result<BatchRows, String>,
    busy: Duration,
    /// Begin and end of the computation.
    computed: (Instant, Instant),
    /// Steps of the computation, each with its begin.
    steps: Vec<(EngineStep, Instant)>,
}

/// Rows of a batch.
struct BatchRows {
    rows: Vec<f32>,
    /// Items without rows, in order.
    failed: Vec<FailedSequence>,
}

/// Batch that was executed, but not yet reported to the planner.
struct ExecutedBatch {
    batch: Batch<QueuedSequence>,
    rows: Result<BatchRows, String>,
    started: Instant,
    /// Part of the time since `started` in which interrupting batches were computed.
    interruptions: Duration,
    /// Steps of the computation, each with its begin, if traces are recorded.
    steps: Vec<(EngineStep, Instant)>,
}

/// Callbacks of an engine during a batch.
struct WorkerCallbacks<'a> {
    shared: &'a Shared,
    batch: &'a Batch<QueuedSequence>,
    finished_batches: &'a Sender<BatchResult>,
    /// Time spent on interrupting batches.
    interruptions: Mutex<Duration>,
    /// Steps of the batch, if traces are recorded.
    steps: Mutex<Vec<(EngineStep, Instant)>>,
}

impl BatchCallbacks for WorkerCallbacks<'_> {
    fn is_needed(&self, sequence: usize) -> bool {
        self.shared.lock().planner.has_waiting_owner(self.batch.items[sequence].job)
    }

    fn has_urgent(&self) -> bool {
        self.batch.priority == Priority::Bulk && self.shared.interactive_pending.load(Ordering::Relaxed)
    }

    fn began(&self, step: EngineStep) {
        if self.shared.is_traced {
            self.steps.lock().push((step, Instant::now()));
        }
    }

    fn run_urgent(&self, compute_nested: &mut ComputeNested<'_>) {
        let begun = Instant::now();
        let mut tokens = BatchBuffer::default();
        while let Some(batch) = self.shared.next_interrupting() {
            let executed = self.shared.run(&mut tokens, batch, |_, batch, output, rows| {
                compute_nested(batch, output, rows).map(|()| Vec::new())
            });
            let busy = executed.started.elapsed();
            let finished = self.shared.finish(&mut self.shared.lock(), executed, busy);
            self.finished_batches.send(finished).unwrap_or_else(|unsent| self.shared.deliver(unsent.0));
        }
        *self.interruptions.lock() += begun.elapsed();
    }
}

impl Shared {
    pub(super) fn work(&self, engine: &dyn Engine, finished_batches: &Sender<BatchResult>) {
        let mut tokens = BatchBuffer::default();
        let mut executed = None;
        while let Some(batch) = self.next_batch(executed.take(), finished_batches) {
            let (mut interruptions, mut steps) = (Duration::ZERO, Vec::new());
            let mut computed = self.run(&mut tokens, batch, |own_batch, batch, output, rows| {
                let callbacks = WorkerCallbacks {
                    shared: self,
                    batch: own_batch,
                    finished_batches,
                    interruptions: Mutex::independent(Duration::ZERO),
                    steps: Mutex::independent(Vec::new()),
                };
                let computed = engine.compute_each(batch, output, &callbacks, rows);
                interruptions = callbacks.interruptions.into_inner();
                steps = callbacks.steps.into_inner();
                computed
            });
            (computed.interruptions, computed.steps) = (interruptions, steps);
            if let Some(statistics) = engine.statistics() {
                self.metrics.update_gauges(|gauges| gauges.engine = Some(statistics));
            }
            executed = Some(computed);
        }
    }

    /// Computes the rows of a batch with `compute`.
    fn run(
        &self,
        tokens: &mut BatchBuffer,
        batch: Batch<QueuedSequence>,
        compute: impl FnOnce(
            &Batch<QueuedSequence>,
            &RaggedBatch<'_>,
            Output,
            &mut [f32],
        ) -> Result<Vec<FailedSequence>, EngineError>,
    ) -> ExecutedBatch {
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
            Ok(Ok(failed)) => Ok(BatchRows { rows, failed }),
            Ok(Err(error)) => Err(error.to_string()),
            Err(Panicked(reason)) => Err(reason),
        };
        ExecutedBatch { batch, rows, started, interruptions: Duration::ZERO, steps: Vec::new() }
    }

    /// Returns an interactive batch that interrupts a bulk batch; `None` resumes the bulk batch.
    fn next_interrupting(&self) -> Option<Batch<QueuedSequence>> {
        let mut state = self.lock();
        if state.closed {
            return None;
        }
        let BatchPlan { next, expired } = state.planner.next_between_steps(Instant::now());
        self.publish(&state.planner);
        let next = match next {
            NextAction::Compute(batch) => Some(batch),
            NextAction::Wait(_) | NextAction::Idle => {
                // Cleared under the lock: a later request sets the flag again.
                self.interactive_pending.store(false, Ordering::Relaxed);
                None
            }
        };
        drop(state);
        self.expire(expired);
        next
    }

    /// Reports to the planner that the engine was busy with this batch for `busy`.
    fn finish(&self, state: &mut State, executed: ExecutedBatch, busy: Duration) -> BatchResult {
        let ExecutedBatch { batch, rows, started, interruptions: _, steps } = executed;
        let now = Instant::now();
        let FinishedBatch { owners, complete: _ } = state.planner.finished(&batch, busy, now);
        let failed: Vec<&Vec<RowOwner>> = match &rows {
            Ok(computed) => computed.failed.iter().map(|failed| &owners[failed.sequence]).collect(),
            Err(_) => owners.iter().collect(),
        };
        // Cancelled before the next batch is chosen, so that no further inputs of them are computed.
        failed.into_iter().flatten().for_each(|owner| {
            state.planner.cancel(owner.request);
        });
        BatchResult { batch, owners, rows, busy, computed: (started, now), steps }
    }

    /// Reports `executed` and returns the next batch, waiting for one if necessary; `None` when the batcher stops.
    fn next_batch(
        &self,
        executed: Option<ExecutedBatch>,
        finished_batches: &Sender<BatchResult>,
    ) -> Option<Batch<QueuedSequence>> {
        let mut state = self.lock();
        let mut finished = executed.map(|executed| {
            // While this batch waited behind another one, the engine was busy with that one.
            let now = Instant::now();
            let begun =
                state.ended.replace(now).map_or(executed.started, |ended| ended.max(executed.started));
            let busy = now.saturating_duration_since(begun).saturating_sub(executed.interruptions);
            self.finish(&mut state, executed, busy)
        });
        loop {
            if state.closed {
                drop(state);
                finished.into_iter().for_each(|finished| self.deliver(finished));
                return None;
            }
            let BatchPlan { next, expired } = state.planner.next(Instant::now());
            self.publish(&state.planner);
            let until = match next {
                NextAction::Compute(batch) => {
                    drop(state);
                    self.expire(expired);
                    if let Some(finished) = finished {
                        // The send fails only if the delivery thread has panicked; deliver from this thread instead.
                        finished_batches.send(finished).unwrap_or_else(|unsent| self.deliver(unsent.0));
                    }
                    return Some(batch);
                }
                NextAction::Wait(until) => {
                    BatchDelayed.record(&self.metrics);
                    Some(until)
                }
                NextAction::Idle => None,
            };
            if finished.is_some() || !expired.is_empty() {
                drop(state);
                self.expire(expired);
                finished.take().into_iter().for_each(|finished| self.deliver(finished));
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
            self.pending.fail(request, ComputeError::Expired);
            InputsDropped { inputs }.record(&self.metrics);
        }
    }

    /// Copies rows into their responses and sends the complete ones.
    pub(super) fn deliver(&self, finished: BatchResult) {
        let BatchResult { batch, owners, rows, busy, computed, steps } = finished;
        let requests: BTreeSet<BatchRequestId> = owners.iter().flatten().map(|owner| owner.request).collect();
        let BatchRows { rows, failed } = match rows {
            Ok(computed) => computed,
            Err(reason) => {
                let Backlog { tokens, inputs } = batch.size();
                EngineFailed { reason: &reason, inputs, tokens }.record(&self.metrics);
                for request in requests {
                    self.pending.fail(request, ComputeError::EngineFailed);
                }
                return;
            }
        };
        for FailedSequence { sequence, reason } in &failed {
            // An input without owners was cancelled; that is no failure.
            if !owners[*sequence].is_empty() {
                EngineFailed { reason, inputs: 1, tokens: batch.items[*sequence].tokens }
                    .record(&self.metrics);
            }
            for owner in &owners[*sequence] {
                self.pending.fail(owner.request, ComputeError::EngineFailed);
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
                // The row is neither sent (JSON cannot represent it) nor cached for later requests.
                let reason = "a row holds NaN or an infinity";
                EngineFailed { reason, inputs: 1, tokens: item.tokens }.record(&self.metrics);
                for owner in owners {
                    self.pending.fail(owner.request, ComputeError::NotFinite);
                }
                continue;
            }
            for owner in owners {
                self.pending.fill(*owner, rows);
            }
            if let (Some(cache), Some(key)) = (&self.cache, item.input.key) {
                cache.insert(key, rows);
            }
        }
        let links = if self.is_traced { self.pending.traces(&requests) } else { Vec::new() };
        let sampled = links.iter().find(|link| link.is_sampled);
        // Recorded before the responses are sent, so that a client that reads the metrics afterwards finds its request.
        let longest = batch.items.iter().map(|item| item.tokens).max().unwrap_or_default();
        BatchComputed {
            size: batch.size(),
            longest,
            priority: batch.priority,
            reason: batch.reason,
            waited: batch.waited,
            busy,
            exemplar: sampled.map(|link| telemetry::exemplar(link.trace, Instant::now())),
        }
        .record(&self.metrics);
        if let Some(cache) = &self.cache {
            cache.publish(&self.metrics);
        }
        let trace = (!links.is_empty()).then(|| {
            let times = BatchTimes { began: computed.0, ended: computed.1, steps };
            Arc::new(BatchTrace::new(batch.priority, batch.size(), times, requests.len(), links))
        });
        let now = Instant::now();
        for request in requests {
            self.pending.filled(request, busy, trace.as_ref(), now);
        }
    }
}
