//! Batch planner: selects the inputs that are computed next, and handles expiry and cancellation.
//!
//! A *request* is a list of inputs with one priority and at most one deadline. Each input is a *job*, which equal
//! inputs share ([`jobs`](self::JobId)). Batches are ragged: their cost is the sum of their tokens, and sorting saves
//! no padding. Four decisions are separate, each in its own file:
//!
//! 1. `share`: the priority of the next batch, and its maximum length.
//! 2. [`crate::window`]: whether to start now or to wait for further requests (batching delay).
//! 3. `queue`: the order of inputs within the priority.
//! 4. `fill`: the inputs that make up the batch.
//!
//! Admission counts requested tokens: [`BatchPlanner::push`] admits a whole request, or rejects it with the time after
//! which there should be capacity. Bulk may fill only [`BULK_QUEUE_PERCENT`] of the queue, and while a rejected
//! interactive request would still be rejected, no bulk is admitted.
//!
//! Invariants. *One outcome*: each admitted input leaves exactly once: computed, expired, or cancelled. *Bounded*:
//! queued tokens never exceed the queue limit, except for one request that arrived while its priority was empty.
//! *Priorities*: no interactive request is shed while bulk is admitted.

mod fill;
mod jobs;
mod plan;
mod queue;
mod settings;
mod share;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

pub use jobs::{Backlog, BatchInput, BatchRequestId, JobId, RowOwner};
pub use plan::{Batch, BatchPlan, FinishedBatch, Item, NextAction};
pub use settings::{BULK_SHARE_PERCENT, BatchSettings, INTERACTIVE_BATCH_TOKENS, WINDOW_MAX};

use self::jobs::{Jobs, JoinOutcome};
use self::queue::FairQueue;
use self::share::PriorityShare;
use crate::cost::{BatchCost, CostModel};
use crate::rate::TokenRate;
use crate::window::{BatchDecision, DecisionInput, StartReason, Window};
use replica_api::priority::{PerPriority, Priority};

/// Maximum percentage of the queue that bulk may fill; the rest is reserved for interactive requests.
pub const BULK_QUEUE_PERCENT: u64 = 75;
/// Time without a turn after which the next input of a request becomes urgent, by priority. A second is long for an
/// interactive request; a backfill that progresses every half minute is not starved.
const STARVATION_LIMITS: PerPriority<Duration> =
    PerPriority { interactive: Duration::from_secs(1), bulk: Duration::from_secs(30) };

/// Result of admitting a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdmittedRequest {
    /// Identifier of the request.
    pub request: BatchRequestId,
    /// Inputs that share a job that was already queued or running, of this request or of another one.
    pub joined: u64,
}

/// The queue has no capacity for this request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueFull {
    /// Priority of the request.
    pub priority: Priority,
    /// Tokens that are queued or being computed.
    pub pending_tokens: u64,
    /// Limit for this priority.
    pub max_queue_tokens: u64,
    /// Time after which there should be capacity, at the measured speed; `None` while no speed is known.
    pub wait: Option<Duration>,
}

/// Load of one priority.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PriorityLoad {
    /// Requests with queued inputs.
    pub requests: u64,
    /// Queued work, each job once, at the priority of its most urgent owner.
    pub queued: Backlog,
    /// Requested work that is queued; equal inputs count once per request.
    pub requested: Backlog,
}

/// Request with outstanding rows.
struct Request {
    priority: Priority,
    /// Inputs without a row.
    left: usize,
}

/// Request queue and batch planner.
pub struct BatchPlanner<T: BatchInput> {
    max_queue_tokens: u64,
    requests: BTreeMap<BatchRequestId, Request>,
    jobs: Jobs<T>,
    queues: PerPriority<FairQueue<T::Class>>,
    loads: PerPriority<PriorityLoad>,
    running: Backlog,
    last_id: u64,
    /// Tokens of a rejected interactive request, until there is capacity for it.
    shed: Option<u64>,
    share: PriorityShare,
    window: Window,
    cost: CostModel,
    rate: TokenRate,
}

impl<T: BatchInput> BatchPlanner<T> {
    /// Creates a planner with `settings` and a queue of at most `max_queue_tokens`.
    pub fn new(settings: BatchSettings, max_queue_tokens: u64) -> BatchPlanner<T> {
        BatchPlanner {
            max_queue_tokens,
            requests: BTreeMap::new(),
            jobs: Jobs::new(),
            queues: PerPriority {
                interactive: FairQueue::new(STARVATION_LIMITS.interactive),
                bulk: FairQueue::new(STARVATION_LIMITS.bulk),
            },
            loads: PerPriority::default(),
            running: Backlog::default(),
            last_id: 0,
            shed: None,
            share: PriorityShare::new(settings),
            window: Window::new(settings.window_max),
            cost: CostModel::default(),
            rate: TokenRate::default(),
        }
    }

    /// Admits a whole request, or rejects it.
    ///
    /// A request that is larger than its priority's part of the queue is admitted when its priority is empty; otherwise
    /// it could never be served.
    pub fn push(
        &mut self,
        priority: Priority,
        inputs: Vec<T>,
        deadline: Option<Instant>,
        now: Instant,
    ) -> Result<AdmittedRequest, QueueFull> {
        let tokens: u64 = inputs.iter().map(BatchInput::tokens).sum();
        self.admit(priority, tokens)?;
        self.last_id += 1;
        let request = BatchRequestId(self.last_id);
        let Some(class) = inputs.first().map(BatchInput::class) else {
            return Ok(AdmittedRequest { request, joined: 0 });
        };
        self.window.arrived(now);
        self.share.arrived(priority, now);
        self.requests.insert(request, Request { priority, left: inputs.len() });
        let (mut waits, mut left, mut joined) = (VecDeque::new(), Backlog::default(), 0);
        for (index, input) in inputs.into_iter().enumerate() {
            let tokens = input.tokens();
            let (job, how) = self.jobs.join(input, RowOwner { request, index }, priority);
            match how {
                JoinOutcome::New => self.loads.of_mut(priority).queued.add(tokens, 1),
                JoinOutcome::Waiting(before) => {
                    joined += 1;
                    self.update_priority(job, before);
                }
                JoinOutcome::Running => {
                    joined += 1;
                    continue;
                }
            }
            waits.push_back(job);
            left.add(tokens, 1);
        }
        if left.inputs > 0 {
            let load = self.loads.of_mut(priority);
            load.requested.add(left.tokens, left.inputs);
            load.requests += 1;
            self.queues.of_mut(priority).push(request, class, deadline, (waits, left), now);
        }
        Ok(AdmittedRequest { request, joined })
    }

    /// Checks whether the queue has capacity for `tokens` at this priority.
    fn admit(&mut self, priority: Priority, tokens: u64) -> Result<(), QueueFull> {
        let requested = self.loads.interactive.requested.tokens + self.loads.bulk.requested.tokens;
        let excess = |tokens: u64, limit: u64| (requested + tokens).saturating_sub(limit);
        self.shed = self.shed.filter(|shed| excess(*shed, self.max_queue_tokens) > 0);
        let (limit, excess) = match priority {
            Priority::Interactive => (self.max_queue_tokens, excess(tokens, self.max_queue_tokens)),
            Priority::Bulk => {
                let limit = percent(self.max_queue_tokens, BULK_QUEUE_PERCENT);
                let shed = self.shed.map_or(0, |shed| excess(shed, self.max_queue_tokens));
                (limit, excess(tokens, limit).max(shed))
            }
        };
        let shedding = priority == Priority::Bulk && self.shed.is_some();
        let alone = self.queues.of(priority).is_empty() && !shedding;
        if excess == 0 || alone {
            return Ok(());
        }
        if priority == Priority::Interactive {
            self.shed = Some(self.shed.map_or(tokens, |shed| shed.min(tokens)));
        }
        let pending_tokens = self.backlog().tokens;
        let wait = self.rate.time_for(excess.min(pending_tokens));
        Err(QueueFull { priority, pending_tokens, max_queue_tokens: limit, wait })
    }

    /// Cancels `request`; returns how many of its inputs will not be computed for it.
    pub fn cancel(&mut self, request: BatchRequestId) -> u64 {
        let Some(Request { priority, .. }) = self.requests.remove(&request) else { return 0 };
        let Some(waiting) = self.queues.of_mut(priority).remove(request) else { return 0 };
        let load = self.loads.of_mut(priority);
        load.requests -= 1;
        load.requested.sub(waiting.left.tokens, waiting.left.inputs);
        for job in waiting.jobs() {
            let Some(before) = self.jobs.waiting(job).map(jobs::BatchJob::priority) else { continue };
            match self.jobs.leave(job, request, priority) {
                Some(abandoned) => self.loads.of_mut(before).queued.sub(abandoned.input.tokens(), 1),
                None => self.update_priority(job, before),
            }
        }
        waiting.left.inputs
    }

    /// Returns the next action for the engine.
    pub fn next(&mut self, now: Instant) -> BatchPlan<T> {
        let expired = self.expire(now);
        let budget = self.share.budget(self.cost.cost(), now);
        let waits = PerPriority {
            interactive: !self.queues.interactive.is_empty(),
            bulk: !self.queues.bulk.is_empty(),
        };
        let queued = PerPriority {
            interactive: self.loads.interactive.queued.tokens,
            bulk: self.loads.bulk.queued.tokens,
        };
        let Some(priority) = self.share.choose(waits, queued, budget) else {
            self.window.stop_waiting();
            return BatchPlan { next: NextAction::Idle, expired };
        };
        let waiting_since = self.window.waiting_since();
        let decision = if *waits.of(priority.other()) {
            self.window.stop_waiting();
            BatchDecision::Now(StartReason::OtherPriority)
        } else {
            let decision_input = self.decision_input(priority, budget, now);
            self.window.decide(decision_input)
        };
        let reason = match decision {
            BatchDecision::Now(reason) => reason,
            BatchDecision::Wait(until) => return BatchPlan { next: NextAction::Wait(until), expired },
        };
        let waited = waiting_since
            .map_or(Duration::ZERO, |waiting_since| now.saturating_duration_since(waiting_since));
        let batch = Batch { items: self.start(priority, budget, now), priority, reason, waited };
        self.share.served(priority, batch.size().tokens, !self.queues.bulk.is_empty());
        BatchPlan { next: NextAction::Compute(batch), expired }
    }

    /// Returns a batch of interactive requests to compute between two steps of a bulk batch, if any are queued and bulk
    /// has received its share. [`NextAction::Idle`] means that the bulk batch continues.
    pub fn next_between_steps(&mut self, now: Instant) -> BatchPlan<T> {
        let expired = self.expire(now);
        let interactive = !self.queues.interactive.is_empty();
        // The bulk work that counts is the interrupted batch: it continues when interactive requests have had their
        // share.
        let queued =
            PerPriority { interactive: self.loads.interactive.queued.tokens, bulk: self.running.tokens };
        if self.share.choose(PerPriority { interactive, bulk: true }, queued, queued.bulk)
            == Some(Priority::Bulk)
        {
            return BatchPlan { next: NextAction::Idle, expired };
        }
        let items = self.start(Priority::Interactive, self.budget(now), now);
        let batch = Batch {
            items,
            priority: Priority::Interactive,
            reason: StartReason::BetweenSteps,
            waited: Duration::ZERO,
        };
        self.share.served(Priority::Interactive, batch.size().tokens, true);
        BatchPlan { next: NextAction::Compute(batch), expired }
    }

    /// Takes a batch out of a priority that is not empty.
    fn start(&mut self, priority: Priority, budget: u64, now: Instant) -> Vec<Item<T>> {
        let items = self.fill(priority, budget, now);
        let (tokens, inputs) = (items.iter().map(|item| item.tokens).sum(), items.len() as u64);
        assert!(inputs > 0, "a batch of a queue that is not empty is not empty");
        assert!(tokens <= budget || inputs == 1, "a batch of several inputs is within its budget");
        self.running.add(tokens, inputs);
        items
    }

    /// Records that `batch` finished after `busy`.
    pub fn finished(&mut self, batch: &Batch<T>, busy: Duration, now: Instant) -> FinishedBatch {
        let Backlog { tokens, inputs } = batch.size();
        self.running.sub(tokens, inputs);
        self.rate.observe(tokens, busy);
        self.cost.observe(tokens, busy);
        let mut complete = BTreeSet::new();
        let mut owners_of = |item: &Item<T>| {
            let job = self.jobs.remove(item.job).expect("a job finishes once");
            let mut owners = Vec::new();
            for owner in job.owners {
                // Requests that were cancelled in the meantime are not in the map any more.
                let Some(request) = self.requests.get_mut(&owner.request) else { continue };
                request.left -= 1;
                if request.left == 0 {
                    self.requests.remove(&owner.request);
                    complete.insert(owner.request);
                }
                owners.push(owner);
            }
            owners
        };
        let owners = batch.items.iter().map(&mut owners_of).collect();
        self.window.responded(now, complete.len());
        FinishedBatch { owners, complete }
    }

    /// Returns whether a request still waits for a job that is being computed. If not, no request can join it any more,
    /// and the engine may cancel it.
    pub fn has_waiting_owner(&mut self, job: JobId) -> bool {
        let Some(found) = self.jobs.get(job) else { return false };
        let has_owner = found.owners.iter().any(|owner| self.requests.contains_key(&owner.request));
        if !has_owner {
            self.jobs.seal(job);
        }
        has_owner
    }

    /// Returns whether no request is queued.
    pub fn is_empty(&self) -> bool {
        self.queues.interactive.is_empty() && self.queues.bulk.is_empty()
    }

    /// Returns the work that is queued or being computed, each job once.
    pub fn backlog(&self) -> Backlog {
        let mut backlog = self.running;
        for priority in Priority::ALL {
            let queued = self.loads.of(priority).queued;
            backlog.add(queued.tokens, queued.inputs);
        }
        backlog
    }

    /// Returns the load of each priority.
    pub fn loads(&self) -> PerPriority<PriorityLoad> {
        self.loads
    }

    /// Returns the learnt cost of a batch; `None` until batches of different sizes are done.
    pub fn cost(&self) -> Option<BatchCost> {
        self.cost.cost()
    }

    /// Returns the maximum number of tokens of the next batch.
    pub fn budget(&self, now: Instant) -> u64 {
        self.share.budget(self.cost.cost(), now)
    }

    /// Returns the measured speed; 0 until it is known.
    pub fn tokens_per_second(&self) -> f64 {
        self.rate.tokens_per_second()
    }

    fn decision_input(&mut self, priority: Priority, budget: u64, now: Instant) -> DecisionInput {
        let queued = self.loads.of(priority).queued;
        let cost = self.cost.cost();
        let latest_start = self.queues.of(priority).first_deadline().map(|(deadline, _)| {
            let takes = cost.map_or(Duration::ZERO, |cost| cost.time(queued.tokens.min(budget)));
            deadline.checked_sub(takes).unwrap_or(now)
        });
        DecisionInput {
            now,
            tokens: queued.tokens,
            budget,
            cost,
            latest_start,
            waiting_since: None,
            expected: self.window.expected(now),
            max: Duration::ZERO,
        }
    }

    fn expire(&mut self, now: Instant) -> Vec<(BatchRequestId, u64)> {
        let mut expired = Vec::new();
        for priority in Priority::ALL {
            while let Some((deadline, request)) = self.queues.of(priority).first_deadline()
                && deadline <= now
            {
                expired.push((request, self.cancel(request)));
            }
        }
        expired
    }

    /// Updates the loads after the owners of a queued job, and with them possibly its priority, have changed.
    fn update_priority(&mut self, job: JobId, before: Priority) {
        let Some(job) = self.jobs.waiting(job) else { return };
        if job.priority() != before {
            let tokens = job.input.tokens();
            self.loads.of_mut(before).queued.sub(tokens, 1);
            self.loads.of_mut(job.priority()).queued.add(tokens, 1);
        }
    }
}

/// Returns `percent` percent of a number, rounded down, without overflow.
fn percent(number: u64, percent: u64) -> u64 {
    number / 100 * percent + number % 100 * percent / 100
}
