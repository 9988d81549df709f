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

use super::queue::Pressing;
use super::{Backlog, BatchPlanner, Input, Item, RequestId};
use crate::cost::BatchCost;
use crate::priority::Priority;

/// Maximum number of inputs that are skipped for one batch: enough to find a short input among long ones, few enough to
/// cost nothing compared with the batch.
const PASSED_OVER: usize = 32;
/// Factor on the estimated time for the whole backlog within which a deadline is urgent: the speed is an estimate, and
/// the other priority takes a part of it.
const CAUTION: u32 = 2;

/// Batch that is being filled.
struct Filling<T: Input> {
    items: Vec<Item<T>>,
    class: Option<T::Class>,
    room: u64,
    passes: usize,
}

impl<T: Input> Filling<T> {
    fn is_over(&self) -> bool {
        self.room == 0 || self.passes == 0
    }

    /// Limits the batch so that it finishes by `deadline`, the deadline of an input in it, if that is possible.
    fn end_by(&mut self, deadline: Instant, cost: Option<BatchCost>, now: Instant) {
        let Some(cost) = cost else { return };
        let taken: u64 = self.items.iter().map(|item| item.tokens).sum();
        let most = cost.tokens_within(deadline.saturating_duration_since(now));
        if let Some(room) = most.checked_sub(taken) {
            self.room = self.room.min(room);
        }
    }
}

impl<T: Input> BatchPlanner<T> {
    /// Takes a batch of at most `budget` tokens out of a priority that is not empty.
    pub(super) fn fill(&mut self, priority: Priority, budget: u64, now: Instant) -> Vec<Item<T>> {
        let mut filling = Filling { items: Vec::new(), class: None, room: budget, passes: PASSED_OVER };
        self.fill_pressing(&mut filling, priority, now);
        let mut last = None;
        while !filling.is_over()
            && let Some(turn) = self.queues.of(priority).next_turn(last)
        {
            last = Some(turn);
            self.take(&mut filling, priority, turn.1, now);
        }
        filling.items
    }

    fn fill_pressing(&mut self, filling: &mut Filling<T>, priority: Priority, now: Instant) {
        let rate = self.rate;
        // Without a measured speed, every deadline may be near.
        let horizon = rate
            .time_for(self.backlog().tokens)
            .and_then(|time| now.checked_add(time.saturating_mul(CAUTION)));
        let makes = |deadline: Instant, left: Backlog| {
            let takes = rate.time_for(left.tokens).unwrap_or(Duration::ZERO);
            takes <= deadline.saturating_duration_since(now)
        };
        let mut last = None;
        while !filling.is_over()
            && let Some((due, pressing)) = self.queues.of(priority).next_pressing(last, now, horizon, makes)
        {
            last = Some(due);
            while self.take(filling, priority, due.1, now) {
                match pressing {
                    Pressing::Deadline => filling.end_by(due.0, self.cost.cost(), now),
                    Pressing::Patience => break,
                }
            }
        }
    }

    /// Takes the next input of `request` if it is of the batch's class and fits; returns whether it did.
    fn take(
        &mut self,
        filling: &mut Filling<T>,
        priority: Priority,
        request: RequestId,
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
        let fits = tokens <= filling.room || filling.items.is_empty();
        if filling.class.is_some_and(|batch| batch != class) || !fits {
            filling.passes -= 1;
            return false;
        }
        let owners: Vec<RequestId> = job.owners.iter().map(|owner| owner.request).collect();
        self.jobs.begin(id);
        self.loads.of_mut(job_priority).queued.sub(tokens, 1);
        self.queues.of_mut(priority).had_turn(request, now);
        for owner in owners {
            self.begun(owner, tokens);
        }
        filling.items.push(Item { job: id, tokens, input });
        filling.class = Some(class);
        filling.room = filling.room.saturating_sub(tokens);
        true
    }

    /// Accounts for an input of `request` whose computation has started.
    fn begun(&mut self, request: RequestId, tokens: u64) {
        let Some(priority) = self.requests.get(&request).map(|request| request.priority) else { return };
        let queue = self.queues.of_mut(priority);
        let before = queue.len();
        queue.begun(request, tokens);
        let load = self.loads.of_mut(priority);
        load.asked.sub(tokens, 1);
        load.requests -= (before - queue.len()) as u64;
    }
}
