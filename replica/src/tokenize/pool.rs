//! Many texts, on worker threads.
//!
//! Tokenising is plain computation, and the longest text that a body may hold takes seconds; on a reactor thread it
//! would stop everybody's sockets. So a request's texts go as one *job* into a bounded queue, from which workers take a
//! handful of texts at a time and then put the job back: a request of two thousand texts is worked on by all threads at
//! once. Whose turn it is, so that neither many texts nor long ones hold up short ones, [`TokenizationQueue`] decides.
//!
//! A job whose caller has gone away is dropped at its next turn.

use std::ops::Range;
use std::sync::Arc;
use std::thread::JoinHandle;
use supervision::{Condvar, Mutex, task};

use replica_core::tokenization::{JobSize, TokenizationQueue};
use replica_core::wire::tei::SimpleToken;

use super::jobs::{Decode, Encode, Inspect, Items, Job, Task};
use super::{Reading, Text, TextTokenizer, TokenizeError, Tokenized};

/// Jobs that wait or are worked on. Far more than the engine's queue admits of any but the shortest requests; what it
/// bounds is the memory of a flood of those.
pub const MAX_JOBS: usize = 4096;

/// The worker threads; they end when it is dropped.
pub struct TokenizerPool {
    pub(super) shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
}

pub(super) struct Shared {
    tokenizer: TextTokenizer,
    pub(super) queue: Mutex<Queue>,
    pub(super) work: Condvar,
}

pub(super) struct Queue {
    /// Jobs of which some texts are still untouched.
    turns: TokenizationQueue<Arc<dyn Job>>,
    /// Jobs that have not been answered.
    pub(super) open: usize,
    pub(super) closed: bool,
}

impl TokenizerPool {
    /// Starts `threads` workers.
    pub fn start(tokenizer: TextTokenizer, threads: usize) -> std::io::Result<TokenizerPool> {
        let queue = Mutex::new(Queue { turns: TokenizationQueue::new(threads), open: 0, closed: false });
        let shared = Arc::new(Shared { tokenizer, queue, work: Condvar::new() });
        let mut pool = TokenizerPool { shared, workers: Vec::new() };
        for n in 0..threads {
            let shared = Arc::clone(&pool.shared);
            pool.workers.push(task::thread(&format!("tokenizer-{n}"), move || shared.work())?);
        }
        Ok(pool)
    }

    /// The special tokens around a text.
    pub fn special_tokens(&self) -> usize {
        self.shared.tokenizer.special_tokens(false)
    }

    /// The tokens of each text, special tokens included, in the order of the texts.
    pub async fn encode(&self, texts: Vec<Text>, reading: Reading) -> Result<Vec<Tokenized>, TokenizeError> {
        self.ask(Encode(reading), texts).await
    }

    /// The tokens of each text with their places in it; with those that the model wants around it if `special`.
    pub async fn inspect(
        &self,
        texts: Vec<String>,
        prompt: Option<Arc<str>>,
        special: bool,
    ) -> Result<Vec<Vec<SimpleToken>>, TokenizeError> {
        self.ask(Inspect { prompt, special }, texts).await
    }

    /// The text of each list of tokens.
    pub async fn decode(
        &self,
        lists: Vec<Vec<u32>>,
        skip_special_tokens: bool,
    ) -> Result<Vec<String>, TokenizeError> {
        self.ask(Decode { skip_special_tokens }, lists).await
    }

    /// Jobs that wait or are worked on.
    pub(crate) fn open_jobs(&self) -> usize {
        self.shared.queue.lock().open
    }

    async fn ask<T: Task>(&self, task: T, items: Vec<T::Item>) -> Result<Vec<T::Done>, TokenizeError> {
        if items.is_empty() {
            return Ok(Vec::new());
        }
        let (job, answered) = Items::new(task, items);
        self.shared.take_in(Arc::new(job))?;
        answered.await.unwrap_or(Err(TokenizeError::Stopped))
    }
}

impl Drop for TokenizerPool {
    fn drop(&mut self) {
        self.shared.queue.lock().closed = true;
        self.shared.work.notify_all();
        for worker in self.workers.drain(..) {
            // A worker that panicked has said so on stderr; there is nothing to add on the way out.
            let _ = worker.join();
        }
    }
}

impl Shared {
    fn take_in(&self, job: Arc<dyn Job>) -> Result<(), TokenizeError> {
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
                // Another huge text may have waited for this one, and its worker with it.
                self.work.notify_one();
            }
        }
    }

    /// The next texts to work on, waiting for them; `None` when the pool ends.
    fn next_turn(&self) -> Option<(Arc<dyn Job>, Range<usize>, JobSize)> {
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
