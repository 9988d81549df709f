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

use crate::answer::{EngineError, Pending, Slot};
use crate::bridge;
use crate::numbers::Rows;
use crate::packed::Packed;

/// Batches that are queued while one is computed.
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
    pub taken_apart: u64,
}

/// Model on TensorRT. Dropping it ends its thread, after the current batch.
pub struct Encoder {
    jobs: Mutex<Option<SyncSender<Job>>>,
    worker: Mutex<Option<JoinHandle<()>>>,
    counted: Arc<Counted>,
    limits: Limits,
}

struct Job {
    batch: Packed,
    slots: Vec<Arc<Slot>>,
}

impl Drop for Job {
    /// Ends the remaining requests: they would not get a result any more.
    fn drop(&mut self) {
        self.slots.iter().for_each(|slot| slot.put(Err(EngineError::Closed)));
    }
}

#[derive(Default)]
struct Counted {
    iterations: AtomicU64,
    completed: AtomicU64,
    taken_apart: AtomicU64,
    /// Set on shutdown: queued batches are not computed.
    closed: AtomicBool,
}

impl Encoder {
    /// Loads the engine, which takes seconds, and starts its thread.
    pub fn open(config: &EncoderConfig) -> Result<Encoder, EngineError> {
        let engine = bridge::open_encoder(&config.engine.display().to_string());
        if let Some(failure) = bridge::failure(engine.failure()) {
            return Err(EngineError::Broken(failure));
        }
        let bridge::EncoderLimits { tokens, sequences, longest } = engine.limits();
        let most = |limit: usize| if limit == 0 { usize::MAX } else { limit };
        let limits = Limits {
            max_batch_tokens: most(tokens),
            max_batch_size: most(sequences),
            max_tokens: most(longest),
        };
        let (sender, jobs) = sync_channel(BATCHES_AHEAD);
        let counted = Arc::new(Counted::default());
        let counts = Arc::clone(&counted);
        let work = move || work(&engine, &jobs, &counts);
        let worker = thread::Builder::new().name("tensorrt".to_owned()).spawn(work);
        let worker =
            worker.map_err(|error| EngineError::Broken(format!("the engine thread cannot be started: {error}")))?;
        Ok(Encoder { jobs: Mutex::new(Some(sender)), worker: Mutex::new(Some(worker)), counted, limits })
    }

    /// Submits a batch, without waiting for its result. The results are in the order of the sequences: the rows of the
    /// tokens, or the row of labels.
    pub fn submit(&self, batch: Packed) -> Result<Vec<Pending>, EngineError> {
        self.check(&batch)?;
        let slots: Vec<Arc<Slot>> = batch.lengths().map(|_| Arc::default()).collect();
        let job = Job { batch, slots: slots.clone() };
        let jobs = self.jobs.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(jobs) = jobs.as_ref() else { return Err(EngineError::Closed) };
        match jobs.try_send(job) {
            Ok(()) => {}
            Err(TrySendError::Full(_)) => return Err(EngineError::Overloaded),
            Err(TrySendError::Disconnected(_)) => return Err(EngineError::Closed),
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
            iterations: self.counted.iterations.load(Ordering::Relaxed),
            completed: self.counted.completed.load(Ordering::Relaxed),
            taken_apart: self.counted.taken_apart.load(Ordering::Relaxed),
        }
    }

    /// Finishes the current batch, ends the queued ones with [`ExecutorError::Closed`], and joins the thread.
    pub fn shutdown(&self) {
        self.counted.closed.store(true, Ordering::Release);
        drop(self.jobs.lock().unwrap_or_else(PoisonError::into_inner).take());
        if let Some(worker) = self.worker.lock().unwrap_or_else(PoisonError::into_inner).take() {
            // The panic hook has logged the panic.
            let _ = worker.join();
        }
    }

    fn check(&self, batch: &Packed) -> Result<(), EngineError> {
        let Limits { max_batch_tokens, max_batch_size, max_tokens } = self.limits;
        let over = [
            ("sequences in a batch", batch.len(), max_batch_size),
            ("tokens in a batch", batch.tokens(), max_batch_tokens),
            ("tokens in a sequence", batch.longest(), max_tokens),
        ];
        match over.into_iter().find(|(_, given, most)| given > most) {
            Some((what, given, most)) => {
                Err(EngineError::Rejected(format!("{given} {what}; the limit of the engine is {most}")))
            }
            None if batch.is_empty() => Err(EngineError::Rejected("the batch is empty".to_owned())),
            None => Ok(()),
        }
    }
}

impl Drop for Encoder {
    fn drop(&mut self) {
        self.shutdown();
    }
}

fn work(engine: &UniquePtr<bridge::Encoder>, jobs: &Receiver<Job>, counted: &Counted) {
    while let Ok(job) = jobs.recv() {
        if counted.closed.load(Ordering::Acquire) {
            continue;
        }
        let wanted: Vec<bool> = job.slots.iter().map(|slot| slot.is_wanted()).collect();
        let batch = job.batch.only(|index| wanted[index]);
        let slots: Vec<&Slot> =
            job.slots.iter().zip(&wanted).filter(|(_, wanted)| **wanted).map(|(slot, _)| &**slot).collect();
        if slots.is_empty() {
            continue;
        }
        match run(engine, &batch, counted) {
            Ok(rows) => slots.iter().zip(rows).for_each(|(slot, rows)| slot.put(Ok(rows))),
            Err(failure) if slots.len() == 1 => slots[0].put(Err(EngineError::BatchFailed(failure))),
            Err(_) => {
                counted.taken_apart.fetch_add(1, Ordering::Relaxed);
                for (index, slot) in slots.iter().enumerate() {
                    let alone = run(engine, &batch.only(|other| other == index), counted);
                    let rows = alone.map(|mut rows| rows.pop().unwrap_or_default());
                    slot.put(rows.map_err(EngineError::BatchFailed));
                }
            }
        }
    }
}

/// Computes a batch, and divides the rows among its sequences.
fn run(engine: &bridge::Encoder, batch: &Packed, counted: &Counted) -> Result<Vec<Rows>, String> {
    let Packed { tokens, types, positions, lengths } = batch;
    let longest = batch.longest();
    let ran = engine.run(&bridge::EncoderInput { tokens, types, positions, lengths, longest });
    counted.iterations.fetch_add(1, Ordering::Relaxed);
    if let Some(failure) = bridge::failure(ran.failure()) {
        return Err(failure);
    }
    let rows = Rows::read(ran.format(), ran.rows(), ran.width(), ran.data())?;
    let divided = divide(&rows, batch)?;
    counted.completed.fetch_add(divided.len() as u64, Ordering::Relaxed);
    Ok(divided)
}

/// Returns one row for each token, or one for each sequence: the engine does not report which, and the number of rows
/// decides. If every sequence has one token both are the same.
fn divide(rows: &Rows, batch: &Packed) -> Result<Vec<Rows>, String> {
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
        Rows { width: rows.width, numbers: part.to_vec() }
    });
    Ok(parts.collect())
}
