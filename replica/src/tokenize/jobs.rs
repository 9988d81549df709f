//! The texts of one request, and what is to be done with them.
//!
//! A job is worked on by several threads at once, a handful each, and answers when the last handful is done. A failure
//! is that of its first input that failed, whichever thread met it first, so that a request is refused for the same input
//! every time.

use std::ops::Range;
use std::sync::Arc;
use supervision::Mutex;

use replica_core::tokenization::{CHUNK_BYTES, HUGE_BYTES, JobSize};
use replica_core::wire::tei::SimpleToken;
use tokio::sync::oneshot;

use super::text::{LastFirst, Problem};
use super::{Reading, Text, TextTokenizer, TokenizeError, Tokenized};

/// The texts of one request and what is to be done with them.
pub(super) trait Job: Send + Sync {
    /// What the next handful is.
    fn size(&self) -> JobSize;
    /// Takes the next handful, and says what the one after it is; `None` if nobody waits for them any more.
    fn take(&self) -> Option<(Range<usize>, Option<JobSize>)>;
    /// Works on a handful, and says whether it was the last one.
    fn work(&self, tokenizer: &TextTokenizer, chunk: Range<usize>) -> bool;
}

/// What is done with the items of a job.
pub(super) trait Task: Send + Sync + 'static {
    type Item: Send + Sync;
    type Done: Send;
    fn bytes(item: &Self::Item) -> usize;
    /// Works on a handful.
    fn run(
        &self,
        tokenizer: &TextTokenizer,
        chunk: &[Self::Item],
    ) -> impl Iterator<Item = Result<Self::Done, Problem>>;
}

/// Texts to tokens.
pub(super) struct Encode(pub(super) Reading);

impl Task for Encode {
    type Item = Text;
    type Done = Tokenized;

    fn bytes(text: &Text) -> usize {
        text.bytes()
    }

    fn run(
        &self,
        tokenizer: &TextTokenizer,
        texts: &[Text],
    ) -> impl Iterator<Item = Result<Tokenized, Problem>> {
        let mut firsts = LastFirst::default();
        texts.iter().map(move |text| tokenizer.encode(text, &self.0, &mut firsts))
    }
}

/// Texts to tokens with their places.
pub(super) struct Inspect {
    pub(super) prompt: Option<Arc<str>>,
    pub(super) special: bool,
}

impl Task for Inspect {
    type Item = String;
    type Done = Vec<SimpleToken>;

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

/// Tokens to texts.
pub(super) struct Decode {
    pub(super) skip_special_tokens: bool,
}

impl Task for Decode {
    type Item = Vec<u32>;
    type Done = String;

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

/// A job of this task.
pub(super) struct Items<T: Task> {
    task: T,
    items: Vec<T::Item>,
    progress: Mutex<Progress<T::Done>>,
}

struct Progress<D> {
    /// Items before this one are done or being done.
    taken: usize,
    /// Bytes of those that are not.
    bytes_left: usize,
    /// Items that are not done.
    left: usize,
    done: Vec<Option<D>>,
    /// The first item, by index, that failed.
    failure: Option<(usize, Problem)>,
    answer: Option<oneshot::Sender<Outcome<D>>>,
}

/// What a job comes to.
pub(super) type Outcome<D> = Result<Vec<D>, TokenizeError>;

impl<T: Task> Items<T> {
    /// At least one item, and where the answer will be.
    pub(super) fn new(task: T, items: Vec<T::Item>) -> (Items<T>, oneshot::Receiver<Outcome<T::Done>>) {
        let (answer, answered) = oneshot::channel();
        let progress = Progress {
            taken: 0,
            bytes_left: items.iter().map(T::bytes).sum(),
            left: items.len(),
            done: items.iter().map(|_| None).collect(),
            failure: None,
            answer: Some(answer),
        };
        (Items { task, items, progress: Mutex::independent(progress) }, answered)
    }

    fn next_size(&self, progress: &Progress<T::Done>) -> Option<JobSize> {
        let next = self.items.get(progress.taken)?;
        Some(JobSize::of(T::bytes(next), progress.bytes_left))
    }

    /// Answers with what there is.
    fn answer(&self, progress: &mut Progress<T::Done>) {
        let outcome = match progress.failure.take() {
            Some((index, Problem::Unreadable(why))) => Err(TokenizeError::Unreadable { index, why }),
            Some((index, Problem::Template(why))) => Err(TokenizeError::Template { index, why }),
            Some((_, Problem::Broken(reason))) => Err(TokenizeError::Broken(reason)),
            // Without a failure each item was done.
            None => Ok(progress.done.drain(..).flatten().collect()),
        };
        if let Some(answer) = progress.answer.take() {
            // A caller that has gone away does not want it.
            let _ = answer.send(outcome);
        }
    }
}

impl<T: Task> Job for Items<T> {
    fn size(&self) -> JobSize {
        self.next_size(&self.progress.lock()).unwrap_or(JobSize::Short)
    }

    fn take(&self) -> Option<(Range<usize>, Option<JobSize>)> {
        let mut progress = self.progress.lock();
        if progress.answer.as_ref().is_none_or(oneshot::Sender::is_closed) {
            return None;
        }
        let from = progress.taken;
        let mut bytes = 0;
        for item in &self.items[from..] {
            let more = T::bytes(item);
            // A huge text is a handful by itself.
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
        let done: Vec<Result<T::Done, Problem>> =
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
            self.answer(&mut progress);
        }
        last
    }
}
