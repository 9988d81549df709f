//! The work itself, apart from who asked for it.
//!
//! A *job* is one input to compute. Whoever asks for an input that waits already, or is being computed, becomes one more
//! owner of its job: equal inputs are computed once. A job leaves when it is done, or when its last owner goes away
//! before it was begun; so what one owner does (cancel, expire) never costs another his row.
//!
//! A job is on the priority of its most urgent owner.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::{Input, RequestId};
use crate::priority::{PerPriority, Priority};

/// Names a job within one planner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct JobId(u64);

/// Whose row it is: an input of a request, by its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Owner {
    /// The request.
    pub request: RequestId,
    /// The place among its inputs.
    pub index: usize,
}

/// One input to compute.
pub(super) struct Job<T> {
    pub(super) input: Arc<T>,
    pub(super) owners: BTreeSet<Owner>,
    /// How many of the owners are on which priority.
    priorities: PerPriority<usize>,
    pub(super) running: bool,
}

impl<T> Job<T> {
    /// That of the most urgent owner.
    pub(super) fn priority(&self) -> Priority {
        if self.priorities.interactive > 0 { Priority::Interactive } else { Priority::Bulk }
    }
}

/// What became of an input that was asked for.
pub(super) enum Joined {
    /// There is a new job for it.
    New,
    /// It is part of a job that waits; on which priority that was before.
    Waiting(Priority),
    /// It is part of a job that is being computed.
    Running,
}

/// All jobs that are not done.
pub(super) struct Jobs<T> {
    jobs: BTreeMap<JobId, Job<T>>,
    by_input: BTreeMap<Arc<T>, JobId>,
    last_id: u64,
}

impl<T: Input> Jobs<T> {
    pub(super) fn new() -> Jobs<T> {
        Jobs { jobs: BTreeMap::new(), by_input: BTreeMap::new(), last_id: 0 }
    }

    /// One more owner on `priority`, of a job that is there or is made.
    pub(super) fn join(&mut self, input: T, owner: Owner, priority: Priority) -> (JobId, Joined) {
        let (id, joined) = match self.by_input.get(&input) {
            Some(id) => {
                let job = &self.jobs[id];
                (*id, if job.running { Joined::Running } else { Joined::Waiting(job.priority()) })
            }
            None => {
                self.last_id += 1;
                let (id, input) = (JobId(self.last_id), Arc::new(input));
                self.by_input.insert(Arc::clone(&input), id);
                let (owners, priorities) = (BTreeSet::new(), PerPriority::default());
                self.jobs.insert(id, Job { input, owners, priorities, running: false });
                (id, Joined::New)
            }
        };
        let job = self.jobs.get_mut(&id).expect("a job that was found or made");
        job.owners.insert(owner);
        *job.priorities.of_mut(priority) += 1;
        (id, joined)
    }

    /// Takes all inputs of `request`, which is on `priority`, from a job that waits; the job itself, if nobody else wants it.
    pub(super) fn leave(&mut self, id: JobId, request: RequestId, priority: Priority) -> Option<Job<T>> {
        let job = self.jobs.get_mut(&id)?;
        assert!(!job.running, "who leaves a job that runs is forgotten when it is done");
        let before = job.owners.len();
        let (first, last) = (Owner { request, index: 0 }, Owner { request, index: usize::MAX });
        while let Some(owner) = job.owners.range(first..=last).next().copied() {
            job.owners.remove(&owner);
        }
        let left = before - job.owners.len();
        *job.priorities.of_mut(priority) -= left;
        if job.owners.is_empty() { self.remove(id) } else { None }
    }

    pub(super) fn get(&self, id: JobId) -> Option<&Job<T>> {
        self.jobs.get(&id)
    }

    /// The job, if it was not begun.
    pub(super) fn waiting(&self, id: JobId) -> Option<&Job<T>> {
        self.jobs.get(&id).filter(|job| !job.running)
    }

    /// From now on it is being computed.
    pub(super) fn begin(&mut self, id: JobId) {
        let job = self.jobs.get_mut(&id).expect("a job that waits");
        assert!(!job.running, "begun twice");
        job.running = true;
    }

    /// From now on nobody joins it: whoever asks for the same gets a job of its own.
    pub(super) fn seal(&mut self, id: JobId) {
        if let Some(job) = self.jobs.get(&id)
            && self.by_input.get(&job.input) == Some(&id)
        {
            self.by_input.remove(&job.input);
        }
    }

    /// It is done, or nobody wants it.
    pub(super) fn remove(&mut self, id: JobId) -> Option<Job<T>> {
        self.seal(id);
        self.jobs.remove(&id)
    }
}
