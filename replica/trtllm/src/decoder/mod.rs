//! Decoders on TensorRT-LLM's executor: embedding models and rerankers that are based on language models.
//!
//! The calling thread submits a request to the executor, under the shim's mutex, and gets a [`Pending`]. One thread
//! polls for responses: it sleeps while the executor is empty, waits inside the executor otherwise, and delivers
//! responses by the tag that is the client id of the request. No other thread waits for the GPU.
//!
//! A request is registered before it is submitted. The executor may respond before the submitting call returns, and a
//! response to an unregistered request would be lost.

mod scheduler;

use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use cxx::UniquePtr;

use self::scheduler::{ExecutorResponse, RequestScheduler, Submission};
use crate::bridge;
use crate::numbers::EngineRows;
use crate::result::{ExecutorError, Pending, RequestResult, ResultSlot};

/// Longest poll for responses inside the executor: the latency of shutdown, and of requests that were held back.
const POLL: Duration = Duration::from_millis(20);

/// Batches that are submitted to the executor concurrently: the one that it computes and one that is queued, so that it
/// never idles, and no more, so that priorities, deadlines and cancellation stay with the owner of the queue.
/// Cancelling a request in the executor's own queue has an effect only once it has become active.
pub const BATCHES_AHEAD: u32 = 2;

/// Model and its settings.
#[derive(Clone, Debug, PartialEq)]
pub struct DecoderConfig {
    /// Directory with the engine and its `config.json`.
    pub directory: PathBuf,
    /// Requested output.
    pub output: OutputTensor,
    /// Sequences of one batch; not more than the engine was built for.
    pub max_batch_size: u32,
    /// Tokens of one batch; not more than the engine was built for.
    pub max_batch_tokens: u32,
    /// Tokens of the longest sequence.
    pub max_tokens: u32,
    /// Token ids are below this.
    pub vocabulary: u32,
    /// Fraction of the GPU's free memory for the key-value cache. An embedding model keeps no keys from one batch to
    /// the next, so the need of one batch is enough.
    pub cache_fraction: f32,
}

/// Output tensor of a decoder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OutputTensor {
    /// An additional output of this name with one row for each sequence: the last token's state before `lm_head`.
    Pooled(String),
    /// An additional output of this name with one row for each token, for means.
    States(String),
    /// One row for each token, as wide as the vocabulary (or as the labels, where `lm_head` is a head for labels).
    ContextLogits,
    /// One row, as wide as the vocabulary.
    GenerationLogits,
}

/// Limits of a decoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Tokens of the longest sequence.
    pub max_tokens: usize,
    /// Maximum number of concurrent requests.
    pub max_requests: usize,
}

/// Counters and load of a decoder.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Counters {
    /// Iterations since the start.
    pub iterations: u64,
    /// Time of the iterations in milliseconds.
    pub busy_ms: f64,
    /// Requests that the executor has completed since the start.
    pub completed: u64,
    /// Requests in the executor's last iteration.
    pub active: u64,
    /// Requests that were queued then.
    pub queued: u64,
    /// GPU memory in use then, in bytes.
    pub gpu_bytes: u64,
    /// Requests that have not ended.
    pub pending: u64,
}

/// Model on the executor. Dropping it shuts it down.
pub struct Decoder {
    shared: Arc<Shared>,
    poller: Mutex<Option<JoinHandle<()>>>,
}

struct Shared {
    executor: UniquePtr<bridge::Decoder>,
    scheduler: Mutex<RequestScheduler>,
    /// Signalled when a request was added, or on shutdown.
    work: Condvar,
    counters: Mutex<Counters>,
    limits: Limits,
    vocabulary: u32,
}

impl Decoder {
    /// Loads the engine, which takes seconds to minutes, and starts the polling thread.
    pub fn open(config: &DecoderConfig) -> Result<Decoder, ExecutorError> {
        let max_requests = config.max_batch_size.saturating_mul(BATCHES_AHEAD).max(1);
        let executor = bridge::open_decoder(&settings(config, max_requests));
        if let Some(failure) = bridge::failure(executor.failure()) {
            return Err(ExecutorError::Broken(failure));
        }
        let limits = Limits { max_tokens: config.max_tokens as usize, max_requests: max_requests as usize };
        let shared = Arc::new(Shared {
            executor,
            scheduler: Mutex::new(RequestScheduler::new(limits.max_requests)),
            work: Condvar::new(),
            counters: Mutex::default(),
            limits,
            vocabulary: config.vocabulary,
        });
        let polls = Arc::clone(&shared);
        let poller = thread::Builder::new().name("trtllm-poll".to_owned()).spawn(move || polls.poll());
        let poller = poller.map_err(|error| {
            ExecutorError::Broken(format!("the polling thread cannot be started: {error}"))
        })?;
        Ok(Decoder { shared, poller: Mutex::new(Some(poller)) })
    }

    /// Submits a sequence to the executor, without waiting for its result.
    pub fn submit(&self, tokens: &[u32]) -> Result<Pending, ExecutorError> {
        self.shared.submit(tokens)
    }

    /// Returns the limits.
    pub fn limits(&self) -> Limits {
        self.shared.limits
    }

    /// Returns the counters.
    pub fn counters(&self) -> Result<Counters, ExecutorError> {
        self.shared.counters()
    }

    /// Ends all requests with [`ExecutorError::Closed`], and shuts the executor down. Requests in progress are
    /// cancelled. A second call has no effect.
    pub fn shutdown(&self) -> Result<(), ExecutorError> {
        let Some(poller) = self.poller.lock().unwrap_or_else(PoisonError::into_inner).take() else {
            return Ok(());
        };
        self.shared.end(&ExecutorError::Closed);
        let joined = poller.join();
        let outcome = self.shared.executor.shutdown();
        match bridge::failure(&outcome.failure) {
            Some(failure) => Err(ExecutorError::Broken(failure)),
            None if joined.is_err() => Err(ExecutorError::Broken("the polling thread panicked".to_owned())),
            None => Ok(()),
        }
    }
}

impl Drop for Decoder {
    fn drop(&mut self) {
        // A caller that needs the result of the shutdown has called it before.
        let _ = self.shutdown();
    }
}

impl Shared {
    fn submit(self: &Arc<Self>, tokens: &[u32]) -> Result<Pending, ExecutorError> {
        let tokens = self.checked(tokens)?;
        let slot = Arc::new(ResultSlot::default());
        let (tag, at_once) = self.lock().add(&slot, &tokens)?;
        self.work.notify_one();
        if at_once {
            self.enter(Submission { tag, tokens })?;
        }
        let shared = Arc::downgrade(self);
        let abandon = Box::new(move || abandon(&shared, tag));
        Ok(Pending { slot, abandon: Some(abandon) })
    }

    /// Rejects requests that the executor would reject; here that is cheap and the message names the limit.
    fn checked(&self, tokens: &[u32]) -> Result<Vec<i32>, ExecutorError> {
        let (length, max_tokens) = (tokens.len(), self.limits.max_tokens);
        if length == 0 || length > max_tokens {
            let reason = format!("the sequence has {length} tokens; allowed are 1 to {max_tokens}");
            return Err(ExecutorError::Rejected(reason));
        }
        let vocabulary = self.vocabulary.min(i32::MAX.unsigned_abs());
        let checked = tokens.iter().map(|token| {
            let known = i32::try_from(*token).ok().filter(|_| *token < vocabulary);
            known.ok_or_else(|| {
                ExecutorError::Rejected(format!("token {token} is outside the vocabulary of {vocabulary}"))
            })
        });
        checked.collect()
    }

    /// Submits a registered request to the executor.
    fn enter(&self, submission: Submission) -> Result<(), ExecutorError> {
        let Submission { tag, tokens } = submission;
        let submitted = self.executor.submit(tag, &tokens);
        match bridge::failure(&submitted.failure) {
            Some(failure) => {
                self.lock().rejected(tag);
                Err(submission_error(failure))
            }
            None => {
                if self.lock().submitted(tag, submitted.id) {
                    self.executor.cancel(submitted.id);
                }
                Ok(())
            }
        }
    }

    /// Main loop of the polling thread.
    fn poll(&self) {
        while self.wait_for_work() {
            let batch = self.executor.poll(POLL.as_millis() as u32);
            if let Some(failure) = bridge::failure(batch.failure()) {
                self.end(&ExecutorError::Broken(failure));
                return;
            }
            for (slot, result) in self.collect(&batch) {
                slot.put(result);
            }
            while let Some((submission, slot)) = self.next() {
                if let Err(error) = self.enter(submission) {
                    slot.put(Err(error));
                }
            }
        }
    }

    /// Waits for requests; returns `false` on shutdown.
    fn wait_for_work(&self) -> bool {
        let mut scheduler = self.lock();
        while !scheduler.is_busy() && !scheduler.is_shut_down() {
            scheduler = self.work.wait(scheduler).unwrap_or_else(PoisonError::into_inner);
        }
        !scheduler.is_shut_down()
    }

    fn collect(&self, batch: &bridge::ResponseBatch) -> Vec<(Arc<ResultSlot>, RequestResult)> {
        // Numbers are converted before the lock is taken.
        let responses: Vec<(u64, ExecutorResponse)> =
            (0..batch.size()).map(|index| (batch.tag(index), executor_response(batch, index))).collect();
        let mut scheduler = self.lock();
        responses.into_iter().filter_map(|(tag, response)| scheduler.responded(tag, response)).collect()
    }

    fn next(&self) -> Option<(Submission, Arc<ResultSlot>)> {
        let mut scheduler = self.lock();
        let submission = scheduler.next()?;
        let slot = scheduler.slot(submission.tag)?;
        Some((submission, slot))
    }

    fn counters(&self) -> Result<Counters, ExecutorError> {
        let mut counters = self.counters.lock().unwrap_or_else(PoisonError::into_inner);
        let latest = self.executor.statistics();
        if let Some(failure) = bridge::failure(&latest.failure) {
            return Err(ExecutorError::Broken(failure));
        }
        counters.iterations += latest.iterations;
        counters.busy_ms += latest.busy_ms;
        counters.completed += latest.completed;
        if latest.iterations > 0 {
            counters.active = latest.active;
            counters.queued = latest.queued;
            counters.gpu_bytes = latest.gpu_bytes;
        }
        counters.pending = self.lock().len() as u64;
        Ok(*counters)
    }

    fn end(&self, error: &ExecutorError) {
        let (slots, ids) = self.lock().shut_down(error);
        self.work.notify_all();
        slots.iter().for_each(|slot| slot.put(Err(error.clone())));
        for id in ids {
            self.executor.cancel(id);
        }
    }

    fn lock(&self) -> MutexGuard<'_, RequestScheduler> {
        self.scheduler.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Cancels the request.
fn abandon(shared: &Weak<Shared>, tag: u64) {
    let Some(shared) = shared.upgrade() else { return };
    let id = shared.lock().abandon(tag);
    if let Some(id) = id {
        // It may have ended in between; then the executor keeps an id that it never uses again.
        shared.executor.cancel(id);
    }
}

fn settings(config: &DecoderConfig, max_requests: u32) -> bridge::DecoderSettings {
    let (output, tensor) = match &config.output {
        OutputTensor::Pooled(tensor) => (bridge::DecoderOutput::Pooled, tensor.clone()),
        OutputTensor::States(tensor) => (bridge::DecoderOutput::States, tensor.clone()),
        OutputTensor::ContextLogits => (bridge::DecoderOutput::ContextLogits, String::new()),
        OutputTensor::GenerationLogits => (bridge::DecoderOutput::GenerationLogits, String::new()),
    };
    // One token is generated for each sequence, so the cache holds one more token per sequence.
    let cache_tokens = config.max_batch_tokens.saturating_add(config.max_batch_size);
    bridge::DecoderSettings {
        directory: config.directory.display().to_string(),
        output,
        tensor,
        max_batch_size: config.max_batch_size,
        max_batch_tokens: config.max_batch_tokens,
        max_queue: max_requests,
        cache_tokens: cache_tokens.saturating_mul(BATCHES_AHEAD),
        cache_fraction: config.cache_fraction,
    }
}

fn executor_response(batch: &bridge::ResponseBatch, index: usize) -> ExecutorResponse {
    let message = || bridge::failure(batch.message(index)).unwrap_or_default();
    match batch.kind(index) {
        0 => {
            let (rows, width) = (batch.rows(index), batch.width(index));
            EngineRows::read(batch.format(index), rows, width, batch.data(index))
                .map_or_else(ExecutorResponse::Failed, ExecutorResponse::Rows)
        }
        2 => ExecutorResponse::Cancelled,
        3 => ExecutorResponse::TimedOut,
        _ => ExecutorResponse::Failed(message()),
    }
}

/// Maps an error message of the executor: it reports a full queue and a shutdown as text.
fn submission_error(failure: String) -> ExecutorError {
    if failure.contains("Maximum queue size") {
        ExecutorError::Overloaded
    } else if failure.contains("Shutdown called") || failure.contains("shutdown") {
        ExecutorError::Closed
    } else {
        ExecutorError::Rejected(failure)
    }
}
