//! Jobs: inputs to compute, deduplicated across requests.
//!
//! A *job* is one input to compute. A request for an input that is already queued or being computed becomes a further
//! owner of the existing job: equal inputs are computed once. A job is removed when it is done, or when its last owner
//! leaves before it has started. So cancellation or expiry of one owner never costs another owner its row.
//!
//! The priority of a job is that of its most urgent owner.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use replica_api::priority::{PerPriority, Priority};

/// One input, as the planner sees it. Equal inputs are the same work.
pub trait BatchInput: Ord {
    /// Property that the inputs of one batch must share.
    type Class: Copy + Eq;
    /// Returns the cost of the input in tokens.
    fn tokens(&self) -> u64;
    /// Returns the class of the input; the same for all inputs of a request.
    fn class(&self) -> Self::Class;
}

/// Identifier of a request within one planner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BatchRequestId(pub(super) u64);

/// Amount of work that is queued or being computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Backlog {
    /// Tokens.
    pub tokens: u64,
    /// Inputs.
    pub inputs: u64,
}

impl Backlog {
    pub(super) fn add(&mut self, tokens: u64, inputs: u64) {
        self.tokens += tokens;
        self.inputs += inputs;
    }

    pub(super) fn sub(&mut self, tokens: u64, inputs: u64) {
        self.tokens -= tokens;
        self.inputs -= inputs;
    }
}

/// Identifier of a job within one planner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct JobId(u64);

/// Owner of a row: an input of a request, by index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct RowOwner {
    /// The request.
    pub request: BatchRequestId,
    /// Index among the inputs of the request.
    pub index: usize,
}

/// One input to compute.
pub(super) struct BatchJob<T> {
    pub(super) input: Arc<T>,
    pub(super) owners: BTreeSet<RowOwner>,
    /// Number of owners per priority.
    priorities: PerPriority<usize>,
    pub(super) running: bool,
}

impl<T> BatchJob<T> {
    /// Returns the priority of the most urgent owner.
    pub(super) fn priority(&self) -> Priority {
        if self.priorities.interactive > 0 { Priority::Interactive } else { Priority::Bulk }
    }
}

/// Result of adding an owner.
pub(super) enum JoinOutcome {
    /// A new job was created.
    New,
    /// The owner joined a queued job, which had this priority before.
    Waiting(Priority),
    /// The owner joined a job that is being computed.
    Running,
}

/// All jobs that are not finished.
pub(super) struct Jobs<T> {
    jobs: BTreeMap<JobId, BatchJob<T>>,
    by_input: BTreeMap<Arc<T>, JobId>,
    last_id: u64,
}

impl<T: BatchInput> Jobs<T> {
    pub(super) fn new() -> Jobs<T> {
        Jobs { jobs: BTreeMap::new(), by_input: BTreeMap::new(), last_id: 0 }
    }

    /// Adds an owner with `priority` to the job of `input`, which is created if it does not exist.
    pub(super) fn join(&mut self, input: T, owner: RowOwner, priority: Priority) -> (JobId, JoinOutcome) {
        let (id, joined) = match self.by_input.get(&input) {
            Some(id) => {
                let job = &self.jobs[id];
                (*id, if job.running { JoinOutcome::Running } else { JoinOutcome::Waiting(job.priority()) })
            }
            None => {
                self.last_id += 1;
                let (id, input) = (JobId(self.last_id), Arc::new(input));
                self.by_input.insert(Arc::clone(&input), id);
                let (owners, priorities) = (BTreeSet::new(), PerPriority::default());
                self.jobs.insert(id, BatchJob { input, owners, priorities, running: false });
                (id, JoinOutcome::New)
            }
        };
        let job = self.jobs.get_mut(&id).expect("the job was found or created above");
        job.owners.insert(owner);
        *job.priorities.of_mut(priority) += 1;
        (id, joined)
    }

    /// Removes all inputs of `request`, which has `priority`, from a queued job; returns the job if it has no owner
    /// left.
    pub(super) fn leave(
        &mut self,
        id: JobId,
        request: BatchRequestId,
        priority: Priority,
    ) -> Option<BatchJob<T>> {
        let job = self.jobs.get_mut(&id)?;
        assert!(!job.running, "owners of a running job are removed when it finishes");
        let before = job.owners.len();
        let (first, last) = (RowOwner { request, index: 0 }, RowOwner { request, index: usize::MAX });
        while let Some(owner) = job.owners.range(first..=last).next().copied() {
            job.owners.remove(&owner);
        }
        let left = before - job.owners.len();
        *job.priorities.of_mut(priority) -= left;
        if job.owners.is_empty() { self.remove(id) } else { None }
    }

    pub(super) fn get(&self, id: JobId) -> Option<&BatchJob<T>> {
        self.jobs.get(&id)
    }

    /// Returns the job if it has not started.
    pub(super) fn waiting(&self, id: JobId) -> Option<&BatchJob<T>> {
        self.jobs.get(&id).filter(|job| !job.running)
    }

    /// Marks the job as being computed.
    pub(super) fn start(&mut self, id: JobId) {
        let job = self.jobs.get_mut(&id).expect("a queued job exists");
        assert!(!job.running, "a job starts once");
        job.running = true;
    }

    /// Prevents further owners from joining: later requests for the same input get a new job.
    pub(super) fn seal(&mut self, id: JobId) {
        if let Some(job) = self.jobs.get(&id)
            && self.by_input.get(&job.input) == Some(&id)
        {
            self.by_input.remove(&job.input);
        }
    }

    /// Removes a job that is finished or has no owner left.
    pub(super) fn remove(&mut self, id: JobId) -> Option<BatchJob<T>> {
        self.seal(id);
        self.jobs.remove(&id)
    }
}
