//! Pool of tokenizer threads.
//!
//! Tokenization is pure computation, and the longest text that a body may hold takes seconds; on a reactor thread it
//! would block all connections. So the texts of a request are enqueued as one *job* in a bounded queue. Workers take a
//! chunk of texts and put the job back, so that all threads work on a request of two thousand texts at once.
//! [`TokenizationQueue`] decides the order, so that neither many texts nor long texts delay short ones.
//!
//! A job whose caller has disconnected is dropped at its next turn.

use std::ops::Range;
use std::sync::Arc;
use std::thread::JoinHandle;
use supervision::{Condvar, Mutex, task};

use replica_api::tei::SimpleToken;
use replica_core::tokenization::{JobSize, TokenizationQueue};

use super::jobs::{Decode, Encode, Inspect, TaskJob, TokenizeJob, TokenizeTask};
use super::{EncodeOptions, TextInput, TextTokenizer, TokenizeError, Tokenized};

/// Maximum number of jobs that wait or are in progress. It is far more than the engine's queue admits, except for the
/// shortest requests; it bounds the memory of a flood of those.
pub const MAX_JOBS: usize = 4096;

/// Worker threads; dropping the pool stops them.
pub struct TokenizerPool {
    pub(super) shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
}

pub(super) struct Shared {
    tokenizer: TextTokenizer,
    pub(super) queue: Mutex<JobQueue>,
    pub(super) work: Condvar,
}

pub(super) struct JobQueue {
    /// Jobs with texts that no worker has taken yet.
    turns: TokenizationQueue<Arc<dyn TokenizeJob>>,
    /// Jobs without a result.
    pub(super) open: usize,
    pub(super) closed: bool,
}

impl TokenizerPool {
    /// Starts `threads` workers.
    pub fn start(tokenizer: TextTokenizer, threads: usize) -> std::io::Result<TokenizerPool> {
        let queue = Mutex::new(JobQueue { turns: TokenizationQueue::new(threads), open: 0, closed: false });
        let shared = Arc::new(Shared { tokenizer, queue, work: Condvar::new() });
        let mut pool = TokenizerPool { shared, workers: Vec::new() };
        for n in 0..threads {
            let shared = Arc::clone(&pool.shared);
            pool.workers.push(task::thread(&format!("tokenizer-{n}"), move || shared.work())?);
        }
        Ok(pool)
    }

    /// Returns the number of special tokens around a text.
    pub fn special_tokens(&self) -> usize {
        self.shared.tokenizer.special_tokens(false)
    }

    /// Returns the tokens of each text, special tokens included, in the order of the texts.
    pub async fn encode(
        &self,
        texts: Vec<TextInput>,
        options: EncodeOptions,
    ) -> Result<Vec<Tokenized>, TokenizeError> {
        self.submit(Encode(options), texts).await
    }

    /// Returns the tokens of each text with their offsets; `special` adds the model's special tokens.
    pub async fn inspect(
        &self,
        texts: Vec<String>,
        prompt: Option<Arc<str>>,
        special: bool,
    ) -> Result<Vec<Vec<SimpleToken>>, TokenizeError> {
        self.submit(Inspect { prompt, special }, texts).await
    }

    /// Returns the text of each list of tokens.
    pub async fn decode(
        &self,
        lists: Vec<Vec<u32>>,
        skip_special_tokens: bool,
    ) -> Result<Vec<String>, TokenizeError> {
        self.submit(Decode { skip_special_tokens }, lists).await
    }

    /// Returns the number of jobs that wait or are in progress.
    pub(crate) fn open_jobs(&self) -> usize {
        self.shared.queue.lock().open
    }

    async fn submit<T: TokenizeTask>(
        &self,
        task: T,
        items: Vec<T::Item>,
    ) -> Result<Vec<T::Output>, TokenizeError> {
        if items.is_empty() {
            return Ok(Vec::new());
        }
        let (job, receiver) = TaskJob::new(task, items);
        self.shared.enqueue(Arc::new(job))?;
        receiver.await.unwrap_or(Err(TokenizeError::Stopped))
    }
}

impl Drop for TokenizerPool {
    fn drop(&mut self) {
        self.shared.queue.lock().closed = true;
        self.shared.work.notify_all();
        for worker in self.workers.drain(..) {
            // A worker that panicked has printed its message to stderr.
            let _ = worker.join();
        }
    }
}

impl Shared {
    fn enqueue(&self, job: Arc<dyn TokenizeJob>) -> Result<(), TokenizeError> {
        let size = job.size();
        let mut queue = self.queue.lock();
        if queue.open >= MAX_JOBS {
            return Err(TokenizeError::Full);
        }
        queue.open += 1;
        queue.turns.push(job, size);
        drop(queue);
        self.work.notify_one();
        Ok(())
    }

    pub(super) fn work(&self) {
        while let Some((job, chunk, size)) = self.next_turn() {
            let last = job.work(&self.tokenizer, chunk);
            let mut queue = self.queue.lock();
            if last {
                queue.open -= 1;
            }
            if size == JobSize::Huge {
                queue.turns.finish_huge();
                // Another huge text, and its worker, may have waited for this one.
                self.work.notify_one();
            }
        }
    }

    /// Returns the next chunk to process, waiting for one; `None` when the pool stops.
    fn next_turn(&self) -> Option<(Arc<dyn TokenizeJob>, Range<usize>, JobSize)> {
        let mut queue = self.queue.lock();
        loop {
            if queue.closed {
                return None;
            }
            let Some((job, size)) = queue.turns.take() else {
                queue = self.work.wait(queue);
                continue;
            };
            match job.take() {
                Some((chunk, more)) => {
                    if let Some(more) = more {
                        queue.turns.push(Arc::clone(&job), more);
                        self.work.notify_one();
                    }
                    return Some((job, chunk, size));
                }
                None => {
                    queue.open -= 1;
                    if size == JobSize::Huge {
                        queue.turns.finish_huge();
                    }
                }
            }
        }
    }
}
