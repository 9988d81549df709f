//! Encoders on plain TensorRT: BERT, RoBERTa and XLM-RoBERTa, as embedding models, classifiers and cross-encoders.
//!
//! One thread owns the engine, since an execution context is not thread-safe, and sleeps until there is a batch. At
//! most [`BATCHES_AHEAD`] batches are queued; a further one is rejected. Sequences that were cancelled before their
//! batch starts are removed from it. A batch that fails is retried one sequence at a time, so that only the failing
//! sequence gets the error.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

use cxx::UniquePtr;

use crate::bridge;
use crate::numbers::EngineRows;
use crate::packed::PackedBatch;
use crate::result::{ExecutorError, Pending, ResultSlot};

/// Batches that are queued while one is computed, which is not counted. (The number of a decoder includes it.)
pub const BATCHES_AHEAD: usize = 2;

/// Settings of an encoder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EncoderConfig {
    /// File of the engine.
    pub engine: PathBuf,
}

/// Limits of an encoder; a limit that the engine does not report is unlimited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Tokens of a batch.
    pub max_batch_tokens: usize,
    /// Sequences of a batch.
    pub max_batch_size: usize,
    /// Tokens of a sequence.
    pub max_tokens: usize,
}

/// Counters of an encoder.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Runs of the engine.
    pub iterations: u64,
    /// Sequences with results.
    pub completed: u64,
    /// Batches that failed and were retried, one sequence at a time.
    pub retried_batches: u64,
}

/// Model on TensorRT. Dropping it ends its thread, after the current batch.
pub struct Encoder {
    jobs: Mutex<Option<SyncSender<EncodeJob>>>,
    worker: Mutex<Option<JoinHandle<()>>>,
    totals: Arc<EncoderTotals>,
    limits: Limits,
}

struct EncodeJob {
    batch: PackedBatch,
    slots: Vec<Arc<ResultSlot>>,
}

impl Drop for EncodeJob {
    /// Ends the remaining requests: they would not get a result any more.
    fn drop(&mut self) {
        self.slots.iter().for_each(|slot| slot.put(Err(ExecutorError::Closed)));
    }
}

#[derive(Default)]
struct EncoderTotals {
    iterations: AtomicU64,
    completed: AtomicU64,
    retried_batches: AtomicU64,
    /// Set on shutdown: queued batches are not computed.
    closed: AtomicBool,
}

impl Encoder {
    /// Loads the engine, which takes seconds, and starts its thread.
    pub fn open(config: &EncoderConfig) -> Result<Encoder, ExecutorError> {
        let engine = bridge::open_encoder(&config.engine.display().to_string());
        if let Some(failure) = bridge::failure(engine.failure()) {
            return Err(ExecutorError::Broken(failure));
        }
        let bridge::EncoderLimits { tokens, sequences, longest } = engine.limits();
        let most = |limit: usize| if limit == 0 { usize::MAX } else { limit };
        let limits = Limits {
            max_batch_tokens: most(tokens),
            max_batch_size: most(sequences),
            max_tokens: most(longest),
        };
        let (sender, jobs) = sync_channel(BATCHES_AHEAD);
        let totals = Arc::new(EncoderTotals::default());
        let counts = Arc::clone(&totals);
        let work = move || work(&engine, &jobs, &counts);
        let worker = thread::Builder::new().name("tensorrt".to_owned()).spawn(work);
        let worker = worker.map_err(|error| {
            ExecutorError::Broken(format!("the engine thread cannot be started: {error}"))
        })?;
        Ok(Encoder { jobs: Mutex::new(Some(sender)), worker: Mutex::new(Some(worker)), totals, limits })
    }

    /// Submits a batch, without waiting for its result. The results are in the order of the sequences: the rows of the
    /// tokens, or the row of labels.
    pub fn submit(&self, batch: PackedBatch) -> Result<Vec<Pending>, ExecutorError> {
        self.check(&batch)?;
        let slots: Vec<Arc<ResultSlot>> = batch.lengths().map(|_| Arc::default()).collect();
        let job = EncodeJob { batch, slots: slots.clone() };
        let jobs = self.jobs.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(jobs) = jobs.as_ref() else { return Err(ExecutorError::Closed) };
        match jobs.try_send(job) {
            Ok(()) => {}
            Err(TrySendError::Full(_)) => return Err(ExecutorError::Overloaded),
            Err(TrySendError::Disconnected(_)) => return Err(ExecutorError::Closed),
        }
        // The engine thread checks for cancelled sequences itself.
        let waiting = |slot| Pending { slot, abandon: Some(Box::new(|| {})) };
        Ok(slots.into_iter().map(waiting).collect())
    }

    /// Returns the limits.
    pub fn limits(&self) -> Limits {
        self.limits
    }

    /// Returns the counters.
    pub fn counters(&self) -> Counters {
        Counters {
            iterations: self.totals.iterations.load(Ordering::Relaxed),
            completed: self.totals.completed.load(Ordering::Relaxed),
            retried_batches: self.totals.retried_batches.load(Ordering::Relaxed),
        }
    }

    /// Finishes the current batch, ends the queued ones with [`ExecutorError::Closed`], and joins the thread.
    pub fn shutdown(&self) {
        self.totals.closed.store(true, Ordering::Release);
        drop(self.jobs.lock().unwrap_or_else(PoisonError::into_inner).take());
        if let Some(worker) = self.worker.lock().unwrap_or_else(PoisonError::into_inner).take() {
            // The panic hook has logged the panic.
            let _ = worker.join();
        }
    }

    fn check(&self, batch: &PackedBatch) -> Result<(), ExecutorError> {
        let Limits { max_batch_tokens, max_batch_size, max_tokens } = self.limits;
        let over = [
            ("sequences in a batch", batch.len(), max_batch_size),
            ("tokens in a batch", batch.tokens(), max_batch_tokens),
            ("tokens in a sequence", batch.longest(), max_tokens),
        ];
        match over.into_iter().find(|(_, given, most)| given > most) {
            Some((what, given, most)) => {
                Err(ExecutorError::Rejected(format!("{given} {what}; the limit of the engine is {most}")))
            }
            None if batch.is_empty() => Err(ExecutorError::Rejected("the batch is empty".to_owned())),
            None => Ok(()),
        }
    }
}

impl Drop for Encoder {
    fn drop(&mut self) {
        self.shutdown();
    }
}

fn work(engine: &UniquePtr<bridge::Encoder>, jobs: &Receiver<EncodeJob>, totals: &EncoderTotals) {
    while let Ok(job) = jobs.recv() {
        if totals.closed.load(Ordering::Acquire) {
            continue;
        }
        let awaited: Vec<bool> = job.slots.iter().map(|slot| slot.is_awaited()).collect();
        let batch = job.batch.select(|index| awaited[index]);
        let slots: Vec<&ResultSlot> = job
            .slots
            .iter()
            .zip(&awaited)
            .filter(|(_, awaited)| **awaited)
            .map(|(slot, _)| &**slot)
            .collect();
        if slots.is_empty() {
            continue;
        }
        match run(engine, &batch, totals) {
            Ok(rows) => slots.iter().zip(rows).for_each(|(slot, rows)| slot.put(Ok(rows))),
            Err(failure) if slots.len() == 1 => slots[0].put(Err(ExecutorError::BatchFailed(failure))),
            Err(_) => {
                totals.retried_batches.fetch_add(1, Ordering::Relaxed);
                for (index, slot) in slots.iter().enumerate() {
                    let alone = run(engine, &batch.select(|other| other == index), totals);
                    let rows = alone.map(|mut rows| rows.pop().unwrap_or_default());
                    slot.put(rows.map_err(ExecutorError::BatchFailed));
                }
            }
        }
    }
}

/// Computes a batch, and divides the rows among its sequences.
fn run(
    engine: &bridge::Encoder,
    batch: &PackedBatch,
    totals: &EncoderTotals,
) -> Result<Vec<EngineRows>, String> {
    let PackedBatch { tokens, types, positions, lengths } = batch;
    let longest = batch.longest();
    let ran = engine.run(&bridge::EncoderInput { tokens, types, positions, lengths, longest });
    totals.iterations.fetch_add(1, Ordering::Relaxed);
    if let Some(failure) = bridge::failure(ran.failure()) {
        return Err(failure);
    }
    let rows = EngineRows::read(ran.format(), ran.rows(), ran.width(), ran.data())?;
    let divided = divide(&rows, batch)?;
    totals.completed.fetch_add(divided.len() as u64, Ordering::Relaxed);
    Ok(divided)
}

/// Returns one row for each token, or one for each sequence: the engine does not report which, and the number of rows
/// decides. If every sequence has one token both are the same.
fn divide(rows: &EngineRows, batch: &PackedBatch) -> Result<Vec<EngineRows>, String> {
    let each: Vec<usize> = if rows.len() == batch.tokens() {
        batch.lengths().collect()
    } else if rows.len() == batch.len() {
        vec![1; batch.len()]
    } else {
        let (rows, tokens, sequences) = (rows.len(), batch.tokens(), batch.len());
        return Err(format!("the engine returned {rows} rows for {tokens} tokens in {sequences} sequences"));
    };
    let mut rest = rows.numbers.as_slice();
    let parts = each.into_iter().map(|count| {
        let (part, after) = rest.split_at(count * rows.width);
        rest = after;
        EngineRows { width: rows.width, numbers: part.to_vec() }
    });
    Ok(parts.collect())
}
