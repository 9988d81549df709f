//! Decoders over TensorRT-LLM's executor: embedders and rerankers that grew out of language models.
//!
//! Whoever submits gives the request to the executor himself, under the shim's mutex, and gets a [`Pending`]. One thread
//! asks for answers: it sleeps while nothing is under way, waits inside the executor while something is, and hands answers
//! out by the tag that went in as the client's id. Nobody waits for the GPU but that thread.
//!
//! A request is registered before it is submitted. The executor may answer before its own call returns, and an answer that
//! nobody is registered for is lost.

mod desk;

use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use cxx::UniquePtr;

use self::desk::{Desk, Entrant, Said};
use crate::answer::{Answer, EngineError, Pending, Slot};
use crate::bridge;
use crate::numbers::Rows;

/// The longest wait for answers inside the executor: how late the end is noticed, and whoever was held back lately.
const POLL: Duration = Duration::from_millis(20);

/// Batches that the executor is given at once: the one that it computes and one that waits, so that it never runs dry, and no
/// more, so that priorities, deadlines and cancellation stay with who has the queue. Cancelling something that waits in the
/// executor's own queue only helps once it has become active.
pub const BATCHES_AHEAD: u32 = 2;

/// A model and how it is to be run.
#[derive(Clone, Debug, PartialEq)]
pub struct DecoderConfig {
    /// The folder with the engine and its `config.json`.
    pub directory: PathBuf,
    /// What is wanted of it.
    pub output: DecoderOutput,
    /// Sequences of one batch; not more than the engine was built for.
    pub max_batch_size: u32,
    /// Tokens of one batch; not more than the engine was built for.
    pub max_batch_tokens: u32,
    /// Tokens of the longest sequence.
    pub max_tokens: u32,
    /// Token ids are below this.
    pub vocabulary: u32,
    /// The part of the GPU's free memory that the cache of keys and values may have. An embedder keeps none from one batch
    /// to the next, so what a batch needs is enough.
    pub cache_fraction: f32,
}

/// Which tensor a decoder answers with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DecoderOutput {
    /// An additional output of this name with one row for each sequence: the last token's state before `lm_head`.
    Pooled(String),
    /// An additional output of this name with one row for each token, for means.
    States(String),
    /// One row for each token, as wide as the vocabulary (or as the labels, where `lm_head` is a head for labels).
    ContextLogits,
    /// One row, as wide as the vocabulary.
    GenerationLogits,
}

/// What a decoder takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Tokens of the longest sequence.
    pub max_tokens: usize,
    /// Requests that are taken and not answered, at once.
    pub max_requests: usize,
}

/// What a decoder has done, and what it has before it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Counters {
    /// Iterations since the start.
    pub iterations: u64,
    /// Milliseconds that they took.
    pub busy_ms: f64,
    /// Requests that the executor completed since the start.
    pub completed: u64,
    /// Requests in the executor's last iteration.
    pub active: u64,
    /// Requests that waited for it then.
    pub queued: u64,
    /// Memory of the GPU that was in use then.
    pub gpu_bytes: u64,
    /// Requests that were taken and have not ended.
    pub pending: u64,
}

/// A model behind the executor. Dropping it shuts it down.
pub struct Decoder {
    shared: Arc<Shared>,
    poller: Mutex<Option<JoinHandle<()>>>,
}

struct Shared {
    executor: UniquePtr<bridge::Decoder>,
    desk: Mutex<Desk>,
    /// Something has been taken, or the end has come.
    work: Condvar,
    counters: Mutex<Counters>,
    limits: Limits,
    vocabulary: u32,
}

impl Decoder {
    /// Loads the engine, which takes seconds to minutes, and starts the thread that asks for answers.
    pub fn open(config: &DecoderConfig) -> Result<Decoder, EngineError> {
        let max_requests = config.max_batch_size.saturating_mul(BATCHES_AHEAD).max(1);
        let executor = bridge::open_decoder(&settings(config, max_requests));
        if let Some(failure) = bridge::failure(executor.failure()) {
            return Err(EngineError::Broken(failure));
        }
        let limits = Limits { max_tokens: config.max_tokens as usize, max_requests: max_requests as usize };
        let shared = Arc::new(Shared {
            executor,
            desk: Mutex::new(Desk::new(limits.max_requests)),
            work: Condvar::new(),
            counters: Mutex::default(),
            limits,
            vocabulary: config.vocabulary,
        });
        let polls = Arc::clone(&shared);
        let poller = thread::Builder::new().name("trtllm-answers".to_owned()).spawn(move || polls.poll());
        let poller =
            poller.map_err(|error| EngineError::Broken(format!("no thread for answers: {error}")))?;
        Ok(Decoder { shared, poller: Mutex::new(Some(poller)) })
    }

    /// Hands a sequence to the executor. Never waits for what it computes.
    pub fn submit(&self, tokens: &[u32]) -> Result<Pending, EngineError> {
        self.shared.submit(tokens)
    }

    /// What it takes.
    pub fn limits(&self) -> Limits {
        self.shared.limits
    }

    /// What it has done.
    pub fn counters(&self) -> Result<Counters, EngineError> {
        self.shared.counters()
    }

    /// Answers whoever waits that it is over, and ends. What is being computed is given up. The second time nothing
    /// happens.
    pub fn shutdown(&self) -> Result<(), EngineError> {
        let Some(poller) = self.poller.lock().unwrap_or_else(PoisonError::into_inner).take() else {
            return Ok(());
        };
        self.shared.end(&EngineError::Closed);
        let joined = poller.join();
        let outcome = self.shared.executor.shutdown();
        match bridge::failure(&outcome.failure) {
            Some(failure) => Err(EngineError::Broken(failure)),
            None if joined.is_err() => Err(EngineError::Broken("the thread for answers panicked".to_owned())),
            None => Ok(()),
        }
    }
}

impl Drop for Decoder {
    fn drop(&mut self) {
        // Whoever wants to know how it ended has asked.
        let _ = self.shutdown();
    }
}

impl Shared {
    fn submit(self: &Arc<Self>, tokens: &[u32]) -> Result<Pending, EngineError> {
        let tokens = self.checked(tokens)?;
        let slot = Arc::new(Slot::default());
        let (tag, at_once) = self.lock().take(&slot, &tokens)?;
        self.work.notify_one();
        if at_once {
            self.enter(Entrant { tag, tokens })?;
        }
        let shared = Arc::downgrade(self);
        let abandon = Box::new(move || abandon(&shared, tag));
        Ok(Pending { slot, abandon: Some(abandon) })
    }

    /// What the executor would refuse is refused here, where it costs nothing and names the limit.
    fn checked(&self, tokens: &[u32]) -> Result<Vec<i32>, EngineError> {
        let (length, most) = (tokens.len(), self.limits.max_tokens);
        if length == 0 || length > most {
            let why = format!("it has {length} tokens; give at least one and at most {most}");
            return Err(EngineError::Rejected(why));
        }
        let vocabulary = self.vocabulary.min(i32::MAX.unsigned_abs());
        let checked = tokens.iter().map(|token| {
            let known = i32::try_from(*token).ok().filter(|_| *token < vocabulary);
            known.ok_or_else(|| {
                EngineError::Rejected(format!("token {token} is beyond the vocabulary of {vocabulary}"))
            })
        });
        checked.collect()
    }

    /// Gives a request to the executor; it is registered already.
    fn enter(&self, entrant: Entrant) -> Result<(), EngineError> {
        let Entrant { tag, tokens } = entrant;
        let submitted = self.executor.submit(tag, &tokens);
        match bridge::failure(&submitted.failure) {
            Some(failure) => {
                self.lock().refused(tag);
                Err(why_not_taken(failure))
            }
            None => {
                if self.lock().entered(tag, submitted.id) {
                    self.executor.cancel(submitted.id);
                }
                Ok(())
            }
        }
    }

    /// The thread that asks for answers.
    fn poll(&self) {
        while self.wait_for_work() {
            let answers = self.executor.poll(POLL.as_millis() as u32);
            if let Some(failure) = bridge::failure(answers.failure()) {
                self.end(&EngineError::Broken(failure));
                return;
            }
            for (slot, answer) in self.collect(&answers) {
                slot.put(answer);
            }
            while let Some((entrant, slot)) = self.next() {
                if let Err(error) = self.enter(entrant) {
                    slot.put(Err(error));
                }
            }
        }
    }

    /// `false` at the end.
    fn wait_for_work(&self) -> bool {
        let mut desk = self.lock();
        while !desk.is_busy() && !desk.has_ended() {
            desk = self.work.wait(desk).unwrap_or_else(PoisonError::into_inner);
        }
        !desk.has_ended()
    }

    fn collect(&self, answers: &bridge::Answers) -> Vec<(Arc<Slot>, Answer)> {
        // Numbers are converted before the lock is taken.
        let said: Vec<(u64, Said)> =
            (0..answers.size()).map(|index| (answers.tag(index), said(answers, index))).collect();
        let mut desk = self.lock();
        said.into_iter().filter_map(|(tag, said)| desk.said(tag, said)).collect()
    }

    fn next(&self) -> Option<(Entrant, Arc<Slot>)> {
        let mut desk = self.lock();
        let entrant = desk.next()?;
        let slot = desk.slot(entrant.tag)?;
        Some((entrant, slot))
    }

    fn counters(&self) -> Result<Counters, EngineError> {
        let mut counters = self.counters.lock().unwrap_or_else(PoisonError::into_inner);
        let latest = self.executor.statistics();
        if let Some(failure) = bridge::failure(&latest.failure) {
            return Err(EngineError::Broken(failure));
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

    fn end(&self, why: &EngineError) {
        let (slots, ids) = self.lock().end(why);
        self.work.notify_all();
        slots.iter().for_each(|slot| slot.put(Err(why.clone())));
        for id in ids {
            self.executor.cancel(id);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Desk> {
        self.desk.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Nobody waits for the request any more.
fn abandon(shared: &Weak<Shared>, tag: u64) {
    let Some(shared) = shared.upgrade() else { return };
    let id = shared.lock().abandon(tag);
    if let Some(id) = id {
        // It may have been answered in between; then the executor keeps a number that it never uses again.
        shared.executor.cancel(id);
    }
}

fn settings(config: &DecoderConfig, max_requests: u32) -> bridge::DecoderSettings {
    let (output, tensor) = match &config.output {
        DecoderOutput::Pooled(tensor) => (bridge::DecoderOutput::Pooled, tensor.clone()),
        DecoderOutput::States(tensor) => (bridge::DecoderOutput::States, tensor.clone()),
        DecoderOutput::ContextLogits => (bridge::DecoderOutput::ContextLogits, String::new()),
        DecoderOutput::GenerationLogits => (bridge::DecoderOutput::GenerationLogits, String::new()),
    };
    // One token is generated for each sequence, so a batch keeps one more than it was given.
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

fn said(answers: &bridge::Answers, index: usize) -> Said {
    let message = || bridge::failure(answers.message(index)).unwrap_or_default();
    match answers.kind(index) {
        0 => {
            let (rows, width) = (answers.rows(index), answers.width(index));
            Rows::read(answers.format(index), rows, width, answers.data(index))
                .map_or_else(Said::Failed, Said::Rows)
        }
        2 => Said::Cancelled,
        3 => Said::TimedOut,
        _ => Said::Failed(message()),
    }
}

/// The executor says that its queue is full by a sentence, and that it has ended by another.
fn why_not_taken(failure: String) -> EngineError {
    if failure.contains("Maximum queue size") {
        EngineError::Overloaded
    } else if failure.contains("Shutdown called") || failure.contains("shutdown") {
        EngineError::Closed
    } else {
        EngineError::Rejected(failure)
    }
}
