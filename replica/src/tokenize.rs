//! Texts to token ids, on threads of their own.
//!
//! Tokenising is plain computation, and the longest text that a body may hold takes seconds; on a reactor thread it
//! would stop everybody's sockets. So a request's texts go as one *job* into a bounded queue, from which worker threads
//! take a handful of texts at a time and then put the job back at the end: a request of two thousand texts is worked
//! on by all threads at once, and one of a single text waits for a handful, not for the two thousand.
//!
//! A job whose caller has gone away is dropped at the next handful.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use replica_core::input::Readable;
use replica_core::refusal::Refusal;
use tokenizers::Tokenizer;
use tokio::sync::oneshot;

/// Jobs that wait or are worked on. Far more than the engine's queue admits of any but the shortest requests; what it
/// bounds is the memory of a flood of those.
pub const MAX_JOBS: usize = 4096;
/// Bytes of text that a worker takes at a time: about a millisecond of work.
const HANDFUL_BYTES: usize = 8 << 10;

/// The token ids of one input.
pub type TokenIds = Box<[u32]>;

/// Why texts did not become tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TokenizeError {
    /// An input cannot be read by the model.
    Refused(Refusal),
    /// [`MAX_JOBS`] are waiting.
    Full,
    /// The pool was stopped.
    Stopped,
    /// The tokenizer failed; the text is for the log.
    Broken(String),
}

/// A tokenizer that cannot be loaded.
#[derive(Debug, thiserror::Error)]
#[error("cannot load the tokenizer {path}: {reason}")]
pub struct LoadError {
    path: String,
    reason: String,
}

/// What makes tokens of a text, as one model wants it.
pub struct TextTokenizer {
    tokenizer: Tokenizer,
    /// Some models were trained on lower-case text and leave that to whoever calls the tokenizer.
    lower_case: bool,
    readable: Readable,
}

impl TextTokenizer {
    /// Loads `tokenizer.json` from `model_folder`, without the truncation and padding that it may ask for: too long an
    /// input is refused here, and batches are ragged.
    pub fn load(
        model_folder: &Path,
        lower_case: bool,
        readable: Readable,
    ) -> Result<TextTokenizer, LoadError> {
        let path = model_folder.join("tokenizer.json");
        let failed = |reason: tokenizers::Error| LoadError {
            path: path.display().to_string(),
            reason: reason.to_string(),
        };
        let mut tokenizer = Tokenizer::from_file(&path).map_err(failed)?;
        tokenizer.with_truncation(None).map_err(failed)?;
        tokenizer.with_padding(None);
        Ok(TextTokenizer { tokenizer, lower_case, readable })
    }

    /// The token ids of the text at `index`, special tokens included.
    fn encode(&self, texts: &[String], index: usize) -> Result<TokenIds, TokenizeError> {
        let mut text = Cow::Borrowed(texts[index].as_str());
        if self.lower_case {
            text = Cow::Owned(text.to_lowercase());
        }
        // Third-party code meets strangers' text here; if it panics, that costs this request and not the thread.
        let encoding = match catch_unwind(AssertUnwindSafe(|| self.tokenizer.encode_fast(text, true))) {
            Ok(Ok(encoding)) => encoding,
            Ok(Err(error)) => return Err(TokenizeError::Broken(error.to_string())),
            Err(_) => return Err(TokenizeError::Broken("it panicked".to_owned())),
        };
        let ids = encoding.get_ids();
        self.readable.check_length(index, texts.len(), ids.len()).map_err(TokenizeError::Refused)?;
        Ok(ids.into())
    }
}

/// The worker threads; they end when it is dropped.
pub struct TokenizerPool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
}

struct Shared {
    tokenizer: TextTokenizer,
    queue: Mutex<Queue>,
    work: Condvar,
}

#[derive(Default)]
struct Queue {
    /// Jobs of which some texts are still untouched.
    waiting: VecDeque<Arc<Job>>,
    /// Jobs that have not been answered.
    open: usize,
    closed: bool,
}

/// The texts of one request.
struct Job {
    texts: Vec<String>,
    progress: Mutex<Progress>,
}

struct Progress {
    /// Texts before this one are done or being done.
    taken: usize,
    /// Texts that are not done.
    left: usize,
    tokens: Vec<TokenIds>,
    /// The first input, by index, that failed.
    failure: Option<(usize, TokenizeError)>,
    answer: Option<oneshot::Sender<Result<Vec<TokenIds>, TokenizeError>>>,
}

impl TokenizerPool {
    /// Starts `threads` workers.
    pub fn start(tokenizer: TextTokenizer, threads: usize) -> std::io::Result<TokenizerPool> {
        let (queue, work) = (Mutex::default(), Condvar::new());
        let shared = Arc::new(Shared { tokenizer, queue, work });
        let mut pool = TokenizerPool { shared, workers: Vec::new() };
        for n in 0..threads {
            let shared = Arc::clone(&pool.shared);
            let worker = thread::Builder::new().name(format!("tokenizer-{n}"));
            pool.workers.push(worker.spawn(move || shared.work())?);
        }
        Ok(pool)
    }

    /// The token ids of each text, special tokens included, in the order of the texts.
    pub async fn encode(&self, texts: Vec<String>) -> Result<Vec<TokenIds>, TokenizeError> {
        let (answer, answered) = oneshot::channel();
        let left = texts.len();
        let progress = Progress {
            taken: 0,
            left,
            tokens: vec![TokenIds::default(); left],
            failure: None,
            answer: Some(answer),
        };
        self.shared.take_in(Job { texts, progress: Mutex::new(progress) })?;
        answered.await.unwrap_or(Err(TokenizeError::Stopped))
    }
}

impl Drop for TokenizerPool {
    fn drop(&mut self) {
        lock(&self.shared.queue).closed = true;
        self.shared.work.notify_all();
        for worker in self.workers.drain(..) {
            // A worker that panicked has said so on stderr; there is nothing to add on the way out.
            let _ = worker.join();
        }
    }
}

impl Shared {
    fn take_in(&self, job: Job) -> Result<(), TokenizeError> {
        let mut queue = lock(&self.queue);
        if queue.open >= MAX_JOBS {
            return Err(TokenizeError::Full);
        }
        queue.open += 1;
        queue.waiting.push_back(Arc::new(job));
        drop(queue);
        self.work.notify_one();
        Ok(())
    }

    fn work(&self) {
        while let Some((job, handful)) = self.next_handful() {
            let done: Vec<(usize, Result<TokenIds, TokenizeError>)> =
                handful.map(|index| (index, self.tokenizer.encode(&job.texts, index))).collect();
            if job.finish(done) {
                lock(&self.queue).open -= 1;
            }
        }
    }

    /// The next texts to work on, waiting for them; `None` when the pool ends.
    fn next_handful(&self) -> Option<(Arc<Job>, Range<usize>)> {
        let mut queue = lock(&self.queue);
        loop {
            if queue.closed {
                return None;
            }
            let Some(job) = queue.waiting.pop_front() else {
                queue = self.work.wait(queue).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            match job.take_handful() {
                Some((handful, more)) => {
                    if more {
                        queue.waiting.push_back(Arc::clone(&job));
                        self.work.notify_one();
                    }
                    return Some((job, handful));
                }
                None => queue.open -= 1,
            }
        }
    }
}

impl Job {
    /// Takes the next texts, and says whether there are more; `None` if nobody waits for them any more.
    fn take_handful(&self) -> Option<(Range<usize>, bool)> {
        let mut progress = lock(&self.progress);
        if progress.answer.as_ref().is_none_or(oneshot::Sender::is_closed) {
            return None;
        }
        let from = progress.taken;
        let mut bytes = 0;
        let taken = self.texts[from..].iter().take_while(|text| {
            bytes += text.len();
            bytes - text.len() < HANDFUL_BYTES
        });
        progress.taken = from + taken.count();
        Some((from..progress.taken, progress.taken < self.texts.len()))
    }

    /// Takes over what was done, answers if that was all of it, and says whether it did.
    fn finish(&self, done: Vec<(usize, Result<TokenIds, TokenizeError>)>) -> bool {
        let mut progress = lock(&self.progress);
        for (index, result) in done {
            progress.left -= 1;
            match result {
                Ok(tokens) => progress.tokens[index] = tokens,
                Err(error) if progress.failure.as_ref().is_none_or(|(first, _)| index < *first) => {
                    progress.failure = Some((index, error));
                }
                Err(_) => {}
            }
        }
        if progress.left > 0 {
            return false;
        }
        let outcome = match progress.failure.take() {
            Some((_, error)) => Err(error),
            None => Ok(std::mem::take(&mut progress.tokens)),
        };
        if let Some(answer) = progress.answer.take() {
            // A caller that has gone away does not want it.
            let _ = answer.send(outcome);
        }
        true
    }
}

/// A worker that panicked held the lock over plain moves only, so what it guards is whole.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::{Pin, pin};
    use std::task::{Context, Poll, Waker};

    use replica_core::wire::error::ErrorCode;
    use tokio::runtime;

    use super::*;

    /// `w7` is the token 7, and nothing is added around the words. The file asks for truncation and padding.
    fn tokenizer(max_input_tokens: usize, lower_case: bool) -> TextTokenizer {
        let words = (1..100).map(|n| format!(r#", "w{n}": {n}"#)).collect::<String>();
        let file = format!(
            r#"{{"version": "1.0", "added_tokens": [], "normalizer": null, "post_processor": null, "decoder": null,
                "truncation": {{"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}},
                "padding": {{"strategy": {{"Fixed": 8}}, "direction": "Right", "pad_to_multiple_of": null,
                             "pad_id": 0, "pad_type_id": 0, "pad_token": "[UNK]"}},
                "pre_tokenizer": {{"type": "WhitespaceSplit"}},
                "model": {{"type": "WordLevel", "unk_token": "[UNK]", "vocab": {{"[UNK]": 0{words}}}}}}}"#
        );
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::write(folder.path().join("tokenizer.json"), file).expect("a file");
        let readable = Readable { max_input_tokens, vocabulary: 100 };
        TextTokenizer::load(folder.path(), lower_case, readable).expect("a tokenizer")
    }

    fn encode(pool: &TokenizerPool, texts: &[&str]) -> Result<Vec<TokenIds>, TokenizeError> {
        let texts = texts.iter().map(|text| (*text).to_owned()).collect();
        runtime::Builder::new_current_thread().build().expect("a runtime").block_on(pool.encode(texts))
    }

    #[test]
    fn tokens_come_back_in_the_order_of_the_texts() {
        let pool = TokenizerPool::start(tokenizer(10_000, false), 3).expect("threads");
        // Of a thousand texts each seventh fills a handful by itself.
        let long = "w1 ".repeat(HANDFUL_BYTES / 3 + 1);
        let texts: Vec<String> = (0..1000)
            .map(|i| if i % 7 == 0 { long.clone() } else { format!("w{} w2", i % 97 + 1) })
            .collect();
        let tokens = encode(&pool, &texts.iter().map(String::as_str).collect::<Vec<_>>()).expect("tokens");
        for (i, tokens) in tokens.iter().enumerate() {
            if i % 7 == 0 {
                assert_eq!(tokens.len(), HANDFUL_BYTES / 3 + 1, "{i}");
            } else {
                assert_eq!(**tokens, [i as u32 % 97 + 1, 2], "{i}");
            }
        }
    }

    #[test]
    fn the_truncation_and_padding_of_the_file_are_not_applied() {
        let pool = TokenizerPool::start(tokenizer(3, false), 1).expect("threads");
        assert_eq!(*encode(&pool, &["w1 w2 w3"]).expect("three tokens")[0], [1, 2, 3]);
        assert_eq!(*encode(&pool, &["w1"]).expect("one token")[0], [1]);
    }

    #[test]
    fn the_first_input_that_cannot_be_read_is_named() {
        let pool = TokenizerPool::start(tokenizer(3, false), 2).expect("threads");
        let check = |texts: &[&str], code: ErrorCode, place: &str| match encode(&pool, texts) {
            Err(TokenizeError::Refused(refusal)) => {
                assert_eq!(refusal.code, code);
                assert!(refusal.message.starts_with(place), "{}", refusal.message);
            }
            other => panic!("{other:?}"),
        };
        let long = "w1 w1 w1 w1";
        check(
            &["w1", long, "w1", long],
            ErrorCode::InputTooLong,
            "`input[1]` has 4 tokens and this model reads 3",
        );
        check(&[long], ErrorCode::InputTooLong, "`input` has 4 tokens");
        check(&["w1", "  "], ErrorCode::EmptyInput, "`input[1]` is empty");
    }

    #[test]
    fn a_model_that_wants_lower_case_gets_it() {
        for (lower_case, id) in [(true, 5), (false, 0)] {
            let pool = TokenizerPool::start(tokenizer(3, lower_case), 1).expect("threads");
            assert_eq!(*encode(&pool, &["W5"]).expect("a token")[0], [id]);
        }
    }

    #[test]
    fn jobs_beyond_the_limit_are_refused_and_those_of_callers_who_left_make_room() {
        let pool = TokenizerPool::start(tokenizer(3, false), 0).expect("no threads");
        let mut cx = Context::from_waker(Waker::noop());
        let mut waiting: Vec<Pin<Box<dyn Future<Output = _> + '_>>> = Vec::new();
        for _ in 0..MAX_JOBS {
            waiting.push(Box::pin(pool.encode(vec!["w1".to_owned()])));
            assert!(waiting.last_mut().expect("one").as_mut().poll(&mut cx).is_pending());
        }
        let one_more = pin!(pool.encode(vec!["w1".to_owned()]));
        assert_eq!(one_more.poll(&mut cx), Poll::Ready(Err(TokenizeError::Full)));
        waiting.clear();
        thread::scope(|scope| {
            scope.spawn(|| pool.shared.work());
            while encode(&pool, &["w1"]) == Err(TokenizeError::Full) {
                thread::yield_now();
            }
            while lock(&pool.shared.queue).open > 0 {
                thread::yield_now();
            }
            lock(&pool.shared.queue).closed = true;
            pool.shared.work.notify_all();
        });
    }
}
