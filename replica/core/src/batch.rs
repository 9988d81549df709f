//! Whose tokens are computed next, and whom nobody waits for any more.
//!
//! The model: a *request* is a list of *items* (inputs, as token ids) with one deadline. Batches are ragged: their cost
//! is the sum of their tokens, and there is no padding to save by sorting. So the planner need not look for items of
//! like length; it only has to be fair.
//!
//! A batch is filled in rounds: in each round every waiting request gives its next item, beginning after the request
//! that gave the last one. A lone short request therefore waits for at most the batch that is running and the round
//! that is under way, however large the backfill beside it, and the backfill still gets every token of the budget that
//! nobody else wants. When the next item does not fit, the batch is closed instead of looking for a smaller one behind
//! it: the room that is lost is less than one input, and nobody is overtaken for ever.
//!
//! Named invariant, *one fate*: each item that was taken in comes out exactly once, in a batch, as expired, or as
//! cancelled.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Bound;
use std::time::{Duration, Instant};

use crate::rate::TokenRate;

/// Names a request within one planner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(u64);

/// One input of one request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Item<T> {
    /// The request that it belongs to.
    pub request: RequestId,
    /// Its place among the inputs of that request.
    pub index: usize,
    /// What it costs.
    pub tokens: u64,
    /// What the engine reads.
    pub payload: T,
}

/// What to do next.
#[derive(Debug, PartialEq, Eq)]
pub struct Plan<T> {
    /// To compute, in one engine call; empty when nothing waits.
    pub batch: Vec<Item<T>>,
    /// Requests whose deadline has passed, with the items that will now never be computed.
    pub expired: Vec<(RequestId, Vec<Item<T>>)>,
}

impl<T> Plan<T> {
    /// Tokens of the batch.
    pub fn batch_tokens(&self) -> u64 {
        self.batch.iter().map(|item| item.tokens).sum()
    }
}

/// The queue has no room for this request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueFull {
    /// Tokens that wait or are being computed.
    pub pending_tokens: u64,
    /// The limit.
    pub max_queue_tokens: u64,
    /// After this there should be room, at the measured speed; `None` while no speed is known.
    pub wait: Option<Duration>,
}

/// What waits and what is being computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Backlog {
    /// Tokens.
    pub tokens: u64,
    /// Inputs.
    pub inputs: u64,
}

struct Waiting<T> {
    deadline: Option<Instant>,
    items: VecDeque<Item<T>>,
}

/// The queue, and the choice from it.
pub struct BatchPlanner<T> {
    batch_tokens: u64,
    max_queue_tokens: u64,
    waiting: BTreeMap<RequestId, Waiting<T>>,
    deadlines: BTreeSet<(Instant, RequestId)>,
    last_served: RequestId,
    last_id: u64,
    queued: Backlog,
    running: Backlog,
    rate: TokenRate,
}

impl<T> BatchPlanner<T> {
    /// Batches of at most `batch_tokens` from a queue of at most `max_queue_tokens`.
    pub fn new(batch_tokens: u64, max_queue_tokens: u64) -> BatchPlanner<T> {
        BatchPlanner {
            batch_tokens,
            max_queue_tokens,
            waiting: BTreeMap::new(),
            deadlines: BTreeSet::new(),
            last_served: RequestId(0),
            last_id: 0,
            queued: Backlog::default(),
            running: Backlog::default(),
            rate: TokenRate::default(),
        }
    }

    /// Takes in a request of `(tokens, payload)` items, all or none.
    ///
    /// A request that is larger than the whole queue may be is taken when nothing else waits; otherwise it could
    /// never be served.
    pub fn push(&mut self, items: Vec<(u64, T)>, deadline: Option<Instant>) -> Result<RequestId, QueueFull> {
        let tokens: u64 = items.iter().map(|(tokens, _)| tokens).sum();
        let excess = (self.queued.tokens + tokens).saturating_sub(self.max_queue_tokens);
        if excess > 0 && self.queued.inputs > 0 {
            let pending_tokens = self.backlog().tokens;
            let wait = self.rate.time_for(excess.min(pending_tokens));
            return Err(QueueFull { pending_tokens, max_queue_tokens: self.max_queue_tokens, wait });
        }
        self.last_id += 1;
        let request = RequestId(self.last_id);
        let items: VecDeque<Item<T>> = items
            .into_iter()
            .enumerate()
            .map(|(index, (tokens, payload))| Item { request, index, tokens, payload })
            .collect();
        if items.is_empty() {
            return Ok(request);
        }
        self.queued =
            Backlog { tokens: self.queued.tokens + tokens, inputs: self.queued.inputs + items.len() as u64 };
        if let Some(deadline) = deadline {
            self.deadlines.insert((deadline, request));
        }
        self.waiting.insert(request, Waiting { deadline, items });
        Ok(request)
    }

    /// Nobody waits for `request` any more; what of it was not computed comes back.
    pub fn cancel(&mut self, request: RequestId) -> Vec<Item<T>> {
        let Some(Waiting { deadline, items }) = self.waiting.remove(&request) else {
            return Vec::new();
        };
        if let Some(deadline) = deadline {
            self.deadlines.remove(&(deadline, request));
        }
        for item in &items {
            self.queued.tokens -= item.tokens;
            self.queued.inputs -= 1;
        }
        items.into()
    }

    /// What to compute now. The batch counts as running until [`BatchPlanner::finished`].
    pub fn next(&mut self, now: Instant) -> Plan<T> {
        let expired = self.expire(now);
        let mut batch: Vec<Item<T>> = Vec::new();
        let mut room = self.batch_tokens;
        while let Some(item) = self.take_next(room, batch.is_empty()) {
            room = room.saturating_sub(item.tokens);
            batch.push(item);
        }
        let tokens = batch.iter().map(|item| item.tokens).sum::<u64>();
        self.running.tokens += tokens;
        self.running.inputs += batch.len() as u64;
        debug_assert!(tokens <= self.batch_tokens || batch.len() == 1, "over budget");
        Plan { batch, expired }
    }

    /// A batch of this size is done, after `busy`.
    pub fn finished(&mut self, batch: Backlog, busy: Duration) {
        assert!(
            batch.tokens <= self.running.tokens && batch.inputs <= self.running.inputs,
            "finished what never ran"
        );
        self.running.tokens -= batch.tokens;
        self.running.inputs -= batch.inputs;
        self.rate.observe(batch.tokens, busy);
    }

    /// Whether nothing waits.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// What waits and what is being computed.
    pub fn backlog(&self) -> Backlog {
        Backlog {
            tokens: self.queued.tokens + self.running.tokens,
            inputs: self.queued.inputs + self.running.inputs,
        }
    }

    /// Measured speed; 0 until it is known.
    pub fn tokens_per_second(&self) -> f64 {
        self.rate.tokens_per_second()
    }

    fn expire(&mut self, now: Instant) -> Vec<(RequestId, Vec<Item<T>>)> {
        let mut expired = Vec::new();
        while let Some((deadline, request)) = self.deadlines.first().copied()
            && deadline <= now
        {
            expired.push((request, self.cancel(request)));
        }
        expired
    }

    /// The next item of the request whose turn it is, if it fits into `room` or the batch is still empty.
    fn take_next(&mut self, room: u64, batch_is_empty: bool) -> Option<Item<T>> {
        let after = (Bound::Excluded(self.last_served), Bound::Unbounded);
        let turn = self.waiting.range(after).next().or_else(|| self.waiting.first_key_value());
        let request = *turn?.0;
        let waiting = self.waiting.get_mut(&request)?;
        let item = waiting.items.pop_front_if(|item| batch_is_empty || item.tokens <= room)?;
        self.last_served = request;
        self.queued.tokens -= item.tokens;
        self.queued.inputs -= 1;
        if waiting.items.is_empty() {
            if let Some(deadline) = waiting.deadline {
                self.deadlines.remove(&(deadline, request));
            }
            self.waiting.remove(&request);
        }
        Some(item)
    }
}
