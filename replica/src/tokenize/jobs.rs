//! Tokenizer jobs: the texts of one request and the task to perform on them.
//!
//! Several threads work on a job at once, a chunk of texts each; the result is sent when the last chunk is done. If
//! several inputs fail, the failure with the smallest index is reported, so that a request is always rejected for the
//! same input.

use std::ops::Range;
use std::sync::Arc;
use supervision::Mutex;

use replica_api::tei::SimpleToken;
use replica_core::tokenization::{CHUNK_BYTES, HUGE_BYTES, JobSize};
use tokio::sync::oneshot;

use super::text::{FirstEncoding, Problem};
use super::{EncodeOptions, TextInput, TextTokenizer, TokenizeError, Tokenized};

/// Texts of one request and the task to perform on them.
pub(super) trait TokenizeJob: Send + Sync {
    /// Returns the size of the next chunk.
    fn size(&self) -> JobSize;
    /// Takes the next chunk, and returns the size of the chunk after it; `None` if the caller has disconnected.
    fn take(&self) -> Option<(Range<usize>, Option<JobSize>)>;
    /// Processes a chunk, and returns whether it was the last one.
    fn work(&self, tokenizer: &TextTokenizer, chunk: Range<usize>) -> bool;
}

/// Operation on the items of a job.
pub(super) trait TokenizeTask: Send + Sync + 'static {
    type Item: Send + Sync;
    type Output: Send;
    fn bytes(item: &Self::Item) -> usize;
    /// Processes a chunk.
    fn run(
        &self,
        tokenizer: &TextTokenizer,
        chunk: &[Self::Item],
    ) -> impl Iterator<Item = Result<Self::Output, Problem>>;
}

/// Converts texts to tokens.
pub(super) struct Encode(pub(super) EncodeOptions);

impl TokenizeTask for Encode {
    type Item = TextInput;
    type Output = Tokenized;

    fn bytes(text: &TextInput) -> usize {
        text.bytes()
    }

    fn run(
        &self,
        tokenizer: &TextTokenizer,
        texts: &[TextInput],
    ) -> impl Iterator<Item = Result<Tokenized, Problem>> {
        let mut first_encoding = FirstEncoding::default();
        texts.iter().map(move |text| tokenizer.encode(text, &self.0, &mut first_encoding))
    }
}

/// Converts texts to tokens with their offsets.
pub(super) struct Inspect {
    pub(super) prompt: Option<Arc<str>>,
    pub(super) special: bool,
}

impl TokenizeTask for Inspect {
    type Item = String;
    type Output = Vec<SimpleToken>;

    fn bytes(text: &String) -> usize {
        text.len()
    }

    fn run(
        &self,
        tokenizer: &TextTokenizer,
        texts: &[String],
    ) -> impl Iterator<Item = Result<Vec<SimpleToken>, Problem>> {
        texts.iter().map(|text| tokenizer.inspect(text, self.prompt.as_deref(), self.special))
    }
}

/// Converts tokens to texts.
pub(super) struct Decode {
    pub(super) skip_special_tokens: bool,
}

impl TokenizeTask for Decode {
    type Item = Vec<u32>;
    type Output = String;

    fn bytes(ids: &Vec<u32>) -> usize {
        size_of_val(ids.as_slice())
    }

    fn run(
        &self,
        tokenizer: &TextTokenizer,
        lists: &[Vec<u32>],
    ) -> impl Iterator<Item = Result<String, Problem>> {
        lists.iter().map(|ids| tokenizer.decode(ids, self.skip_special_tokens))
    }
}

/// Job of this task.
pub(super) struct TaskJob<T: TokenizeTask> {
    task: T,
    items: Vec<T::Item>,
    progress: Mutex<JobProgress<T::Output>>,
}

struct JobProgress<D> {
    /// Items before this index are done or in progress.
    taken: usize,
    /// Bytes of the other items.
    bytes_left: usize,
    /// Items that are not done.
    left: usize,
    done: Vec<Option<D>>,
    /// Failure with the smallest index.
    failure: Option<(usize, Problem)>,
    result_sender: Option<oneshot::Sender<JobResult<D>>>,
}

/// Result of a job.
pub(super) type JobResult<D> = Result<Vec<D>, TokenizeError>;

impl<T: TokenizeTask> TaskJob<T> {
    /// Creates a job of at least one item; the receiver gets its result.
    pub(super) fn new(task: T, items: Vec<T::Item>) -> (TaskJob<T>, oneshot::Receiver<JobResult<T::Output>>) {
        let (sender, receiver) = oneshot::channel();
        let progress = JobProgress {
            taken: 0,
            bytes_left: items.iter().map(T::bytes).sum(),
            left: items.len(),
            done: items.iter().map(|_| None).collect(),
            failure: None,
            result_sender: Some(sender),
        };
        (TaskJob { task, items, progress: Mutex::independent(progress) }, receiver)
    }

    fn next_size(&self, progress: &JobProgress<T::Output>) -> Option<JobSize> {
        let next = self.items.get(progress.taken)?;
        Some(JobSize::of(T::bytes(next), progress.bytes_left))
    }

    /// Sends the result.
    fn send_result(&self, progress: &mut JobProgress<T::Output>) {
        let outcome = match progress.failure.take() {
            Some((index, Problem::Unreadable(reason))) => Err(TokenizeError::Unreadable { index, reason }),
            Some((index, Problem::Template(reason))) => Err(TokenizeError::Template { index, reason }),
            Some((_, Problem::Broken(reason))) => Err(TokenizeError::Broken(reason)),
            // Without a failure all items are done.
            None => Ok(progress.done.drain(..).flatten().collect()),
        };
        if let Some(sender) = progress.result_sender.take() {
            // The send fails if the caller has disconnected.
            let _ = sender.send(outcome);
        }
    }
}

impl<T: TokenizeTask> TokenizeJob for TaskJob<T> {
    fn size(&self) -> JobSize {
        self.next_size(&self.progress.lock()).unwrap_or(JobSize::Short)
    }

    fn take(&self) -> Option<(Range<usize>, Option<JobSize>)> {
        let mut progress = self.progress.lock();
        if progress.result_sender.as_ref().is_none_or(oneshot::Sender::is_closed) {
            return None;
        }
        let from = progress.taken;
        let mut bytes = 0;
        for item in &self.items[from..] {
            let more = T::bytes(item);
            // A huge text is a chunk of its own.
            if progress.taken > from && (bytes >= CHUNK_BYTES || more > HUGE_BYTES) {
                break;
            }
            progress.taken += 1;
            bytes += more;
            if more > HUGE_BYTES {
                break;
            }
        }
        progress.bytes_left -= bytes;
        Some((from..progress.taken, self.next_size(&progress)))
    }

    fn work(&self, tokenizer: &TextTokenizer, chunk: Range<usize>) -> bool {
        let done: Vec<Result<T::Output, Problem>> =
            self.task.run(tokenizer, &self.items[chunk.clone()]).collect();
        let mut progress = self.progress.lock();
        for (index, result) in chunk.zip(done) {
            progress.left -= 1;
            match result {
                Ok(done) => progress.done[index] = Some(done),
                Err(problem) if progress.failure.as_ref().is_none_or(|(first, _)| index < *first) => {
                    progress.failure = Some((index, problem));
                }
                Err(_) => {}
            }
        }
        let last = progress.left == 0;
        if last {
            self.send_result(&mut progress);
        }
        last
    }
}
