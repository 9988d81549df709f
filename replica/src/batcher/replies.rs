//! Rows on their way to their requests.
//!
//! A reply is the whole answer of a request with holes in it. Batches fill the holes in any order, from two threads;
//! whoever fills the last one sends it. Each reply has a lock of its own, so that copying a large answer stops nobody but
//! its own caller.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use supervision::Mutex;

use replica_core::batch::{BatchRequestId, RowOwner};
use tokio::sync::oneshot;

use super::{Computed, Unanswered};

/// A request that has not been answered.
pub(super) struct Reply {
    rows: Vec<f32>,
    width: usize,
    counts: Vec<u32>,
    /// Where among the rows, in numbers, those of the inputs that had to be computed begin.
    missing: Vec<usize>,
    left: usize,
    tokens: u64,
    cached: u64,
    taken_in: Instant,
    engine: Duration,
    answer: oneshot::Sender<Result<Computed, Unanswered>>,
}

impl Reply {
    pub(super) fn new(
        width: usize,
        taken_in: Instant,
        answer: oneshot::Sender<Result<Computed, Unanswered>>,
    ) -> Reply {
        Reply {
            rows: Vec::new(),
            width,
            counts: Vec::new(),
            missing: Vec::new(),
            left: 0,
            tokens: 0,
            cached: 0,
            taken_in,
            engine: Duration::ZERO,
            answer,
        }
    }

    fn push(&mut self, tokens: usize, rows: usize) {
        self.tokens += tokens as u64;
        self.counts.push(u32::try_from(rows).expect("an input has a limit far below four billion tokens"));
    }

    /// The next input, of so many tokens, whose rows are known.
    pub(super) fn push_cached(&mut self, tokens: usize, rows: usize, cached: &[f32]) {
        assert_eq!(cached.len(), rows * self.width, "cached rows are those of the input");
        self.push(tokens, rows);
        self.cached += 1;
        self.rows.extend_from_slice(cached);
    }

    /// The next input, whose rows are not.
    pub(super) fn push_missing(&mut self, tokens: usize, rows: usize) {
        self.push(tokens, rows);
        self.missing.push(self.rows.len());
        self.left += 1;
        self.rows.resize(self.rows.len() + rows * self.width, 0.0);
    }

    /// Inputs whose rows were cached.
    pub(super) fn cached(&self) -> u64 {
        self.cached
    }

    /// Answers.
    pub(super) fn send(self, now: Instant) {
        let Reply { rows, width, counts, tokens, cached, taken_in, engine, answer, .. } = self;
        let queue = now.saturating_duration_since(taken_in).saturating_sub(engine);
        // Whoever has gone away in this very moment does not want it.
        let _ =
            answer.send(Ok(Computed { rows, width, counts, tokens, cached_inputs: cached, queue, engine }));
    }
}

/// All of them.
#[derive(Default)]
pub(super) struct Replies(Mutex<BTreeMap<BatchRequestId, Arc<Mutex<Option<Reply>>>>>);

impl Replies {
    pub(super) fn insert(&self, request: BatchRequestId, reply: Reply) {
        self.0.lock().insert(request, Arc::new(Mutex::independent(Some(reply))));
    }

    /// Takes a reply out, unless it was answered.
    pub(super) fn take(&self, request: BatchRequestId) -> Option<Reply> {
        let reply = self.0.lock().remove(&request)?;
        reply.lock().take()
    }

    /// Says no, unless it was answered.
    pub(super) fn refuse(&self, request: BatchRequestId, why: Unanswered) {
        if let Some(reply) = self.take(request) {
            // As above.
            let _ = reply.answer.send(Err(why));
        }
    }

    /// Fills one hole.
    pub(super) fn fill(&self, owner: RowOwner, rows: &[f32]) {
        self.change(owner.request, |reply| {
            let begin = reply.missing[owner.index];
            reply.rows[begin..begin + rows.len()].copy_from_slice(rows);
            reply.left -= 1;
        });
    }

    /// A batch that filled holes of this request took `busy`; if none is left, it is answered.
    pub(super) fn filled(&self, request: BatchRequestId, busy: Duration, now: Instant) {
        let mut complete = false;
        self.change(request, |reply| {
            reply.engine += busy;
            complete = reply.left == 0;
        });
        if complete && let Some(reply) = self.take(request) {
            reply.send(now);
        }
    }

    /// Drops all of them.
    pub(super) fn clear(&self) {
        self.0.lock().clear();
    }

    /// A request that was cancelled or expired while some of its inputs were computed is not there any more.
    fn change(&self, request: BatchRequestId, change: impl FnOnce(&mut Reply)) {
        let Some(reply) = self.0.lock().get(&request).map(Arc::clone) else { return };
        if let Some(reply) = reply.lock().as_mut() {
            change(reply);
        }
    }
}
