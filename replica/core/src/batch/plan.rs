//! What the planner says to do, and what came of it.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Backlog, JobId, Owner, RequestId};
use crate::priority::Priority;
use crate::window::Reason;

/// One job of a batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Item<T> {
    /// Which.
    pub job: JobId,
    /// What it costs.
    pub tokens: u64,
    /// What the engine reads.
    pub input: Arc<T>,
}

/// To compute, in one engine call. It counts as running until [`BatchPlanner::finished`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch<T> {
    /// At least one, all of one class.
    pub items: Vec<Item<T>>,
    /// The priority from which they are.
    pub priority: Priority,
    /// Why nobody else was waited for.
    pub reason: Reason,
    /// How long company was waited for.
    pub waited: Duration,
}

impl<T> Batch<T> {
    /// Its tokens and inputs.
    pub fn size(&self) -> Backlog {
        Backlog { tokens: self.items.iter().map(|item| item.tokens).sum(), inputs: self.items.len() as u64 }
    }
}

/// What to do next.
#[derive(Debug, PartialEq, Eq)]
pub struct Plan<T> {
    /// For the engine.
    pub next: Next<T>,
    /// Requests whose deadline has passed, and how many of their inputs will now never be computed for them.
    pub expired: Vec<(RequestId, u64)>,
}

/// What the engine does next.
#[derive(Debug, PartialEq, Eq)]
pub enum Next<T> {
    /// It computes this.
    Compute(Batch<T>),
    /// It waits until then, or until something comes in.
    Wait(Instant),
    /// Nothing waits.
    Idle,
}

/// What a finished batch comes to.
#[derive(Debug, PartialEq, Eq)]
pub struct Finished {
    /// Whose row each item's is, in the order of the batch; nobody's, if everybody has gone away.
    pub owners: Vec<Vec<Owner>>,
    /// Requests that have all their rows now.
    pub complete: BTreeSet<RequestId>,
}
