//! Selection of the inputs of one batch.
//!
//! Urgent requests are taken first, then rounds (`queue` defines the order). An input that does not fit into the
//! remaining budget is skipped in favour of a smaller one behind it, so that budgets are used up with mixed lengths. At
//! most [`MAX_SKIPPED`] inputs are skipped per batch, and a skipped input is first in the next batch, so each waits for
//! at most one further batch. A batch that contains an urgent input ends before the deadline of that input if it can:
//! other inputs must not make the batch so long that this input expires. A single input above the budget is a batch by
//! itself.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::queue::Urgency;
use super::{Backlog, BatchInput, BatchPlanner, BatchRequestId, Item};
use crate::cost::BatchCost;
use replica_api::priority::Priority;

/// Maximum number of inputs that are skipped for one batch: enough to find a short input among long ones, few enough to
/// cost nothing compared with the batch.
const MAX_SKIPPED: usize = 32;
/// Factor on the estimated time for the whole backlog within which a deadline is urgent: the speed is an estimate, and
/// the other priority takes a part of it.
const HORIZON_FACTOR: u32 = 2;

/// Batch that is being filled.
struct BatchBuilder<T: BatchInput> {
    items: Vec<Item<T>>,
    class: Option<T::Class>,
    remaining_tokens: u64,
    skips_left: usize,
}

impl<T: BatchInput> BatchBuilder<T> {
    fn is_full(&self) -> bool {
        self.remaining_tokens == 0 || self.skips_left == 0
    }

    /// Limits the batch so that it finishes by `deadline`, the deadline of an input in it, if that is possible.
    fn limit_to_deadline(&mut self, deadline: Instant, cost: Option<BatchCost>, now: Instant) {
        let Some(cost) = cost else { return };
        let taken: u64 = self.items.iter().map(|item| item.tokens).sum();
        let most = cost.tokens_within(deadline.saturating_duration_since(now));
        if let Some(remaining_tokens) = most.checked_sub(taken) {
            self.remaining_tokens = self.remaining_tokens.min(remaining_tokens);
        }
    }
}

impl<T: BatchInput> BatchPlanner<T> {
    /// Takes a batch of at most `budget` tokens out of a priority that is not empty.
    pub(super) fn fill(&mut self, priority: Priority, budget: u64, now: Instant) -> Vec<Item<T>> {
        let mut builder = BatchBuilder {
            items: Vec::new(),
            class: None,
            remaining_tokens: budget,
            skips_left: MAX_SKIPPED,
        };
        self.fill_urgent(&mut builder, priority, now);
        let mut last = None;
        while !builder.is_full()
            && let Some(turn) = self.queues.of(priority).next_turn(last)
        {
            last = Some(turn);
            self.take_next(&mut builder, priority, turn.1, now);
        }
        builder.items
    }

    fn fill_urgent(&mut self, builder: &mut BatchBuilder<T>, priority: Priority, now: Instant) {
        let rate = self.rate;
        // Without a measured speed, every deadline may be near.
        let horizon = rate
            .time_for(self.backlog().tokens)
            .and_then(|time| now.checked_add(time.saturating_mul(HORIZON_FACTOR)));
        let can_meet = |deadline: Instant, left: Backlog| {
            let takes = rate.time_for(left.tokens).unwrap_or(Duration::ZERO);
            takes <= deadline.saturating_duration_since(now)
        };
        let mut last = None;
        while !builder.is_full()
            && let Some((due, urgent)) = self.queues.of(priority).next_urgent(last, now, horizon, can_meet)
        {
            last = Some(due);
            while self.take_next(builder, priority, due.1, now) {
                match urgent {
                    Urgency::Deadline => builder.limit_to_deadline(due.0, self.cost.cost(), now),
                    Urgency::Starvation => break,
                }
            }
        }
    }

    /// Takes the next input of `request` if it is of the batch's class and fits; returns whether it did.
    fn take_next(
        &mut self,
        builder: &mut BatchBuilder<T>,
        priority: Priority,
        request: BatchRequestId,
        now: Instant,
    ) -> bool {
        let jobs = &self.jobs;
        let Some((id, class)) =
            self.queues.of_mut(priority).front(request, |job| jobs.waiting(job).is_some())
        else {
            return false;
        };
        let job = self.jobs.get(id).expect("a queued job exists");
        let (input, tokens, job_priority) = (Arc::clone(&job.input), job.input.tokens(), job.priority());
        let fits = tokens <= builder.remaining_tokens || builder.items.is_empty();
        if builder.class.is_some_and(|batch| batch != class) || !fits {
            builder.skips_left -= 1;
            return false;
        }
        let owners: Vec<BatchRequestId> = job.owners.iter().map(|owner| owner.request).collect();
        self.jobs.start(id);
        self.loads.of_mut(job_priority).queued.sub(tokens, 1);
        self.queues.of_mut(priority).finish_turn(request, now);
        for owner in owners {
            self.started(owner, tokens);
        }
        builder.items.push(Item { job: id, tokens, input });
        builder.class = Some(class);
        builder.remaining_tokens = builder.remaining_tokens.saturating_sub(tokens);
        true
    }

    /// Accounts for an input of `request` whose computation has started.
    fn started(&mut self, request: BatchRequestId, tokens: u64) {
        let Some(priority) = self.requests.get(&request).map(|request| request.priority) else { return };
        let queue = self.queues.of_mut(priority);
        let before = queue.len();
        queue.started(request, tokens);
        let load = self.loads.of_mut(priority);
        load.requested.sub(tokens, 1);
        load.requests -= (before - queue.len()) as u64;
    }
}
