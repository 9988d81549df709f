//! Plans of the batch planner and their results.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Backlog, BatchRequestId, JobId, RowOwner};
use crate::window::StartReason;
use replica_api::priority::Priority;

/// One job of a batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Item<T> {
    /// Identifier of the job.
    pub job: JobId,
    /// Cost in tokens.
    pub tokens: u64,
    /// Input for the engine.
    pub input: Arc<T>,
}

/// Batch to compute in one engine call. It counts as running until [`BatchPlanner::finished`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch<T> {
    /// At least one item; all are of one class.
    pub items: Vec<Item<T>>,
    /// Priority of the batch.
    pub priority: Priority,
    /// Why the batch starts now.
    pub reason: StartReason,
    /// Batching delay before it.
    pub waited: Duration,
}

impl<T> Batch<T> {
    /// Returns its tokens and inputs.
    pub fn size(&self) -> Backlog {
        Backlog { tokens: self.items.iter().map(|item| item.tokens).sum(), inputs: self.items.len() as u64 }
    }
}

/// Result of [`BatchPlanner::next`].
#[derive(Debug, PartialEq, Eq)]
pub struct BatchPlan<T> {
    /// Action for the engine.
    pub next: NextAction<T>,
    /// Requests whose deadline has passed, with the number of their inputs that will not be computed for them.
    pub expired: Vec<(BatchRequestId, u64)>,
}

/// Next action of the engine.
#[derive(Debug, PartialEq, Eq)]
pub enum NextAction<T> {
    /// Compute this batch.
    Compute(Batch<T>),
    /// Wait until this time, or until a request arrives.
    Wait(Instant),
    /// The queue is empty.
    Idle,
}

/// Result of a finished batch.
#[derive(Debug, PartialEq, Eq)]
pub struct FinishedBatch {
    /// Owners of each item's row, in the order of the batch; empty if all of them were cancelled.
    pub owners: Vec<Vec<RowOwner>>,
    /// Requests that now have all their rows.
    pub complete: BTreeSet<BatchRequestId>,
}
