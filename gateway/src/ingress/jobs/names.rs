//! Kinds and phases of jobs and batches, as the API names them.

use jobs_core::batch::state::BatchPhase;
use jobs_core::job::{JobOperation, JobPhase};
use replica_api::jobs::JobKind;

/// Returns the name of a job's phase.
pub(super) fn phase_text(phase: JobPhase) -> &'static str {
    match phase {
        JobPhase::Queued => "queued",
        JobPhase::Running => "running",
        JobPhase::Succeeded => "succeeded",
        JobPhase::Failed => "failed",
        JobPhase::Cancelled => "cancelled",
        JobPhase::Expired => "expired",
    }
}

/// Returns the name of a batch's phase.
pub(super) fn batch_phase_text(phase: BatchPhase) -> &'static str {
    match phase {
        BatchPhase::InProgress => "in_progress",
        BatchPhase::Finalizing => "finalizing",
        BatchPhase::Completed => "completed",
        BatchPhase::Failed => "failed",
        BatchPhase::Expired => "expired",
        BatchPhase::Cancelling => "cancelling",
        BatchPhase::Cancelled => "cancelled",
    }
}

/// Returns the stored operation of a kind.
pub(super) fn operation(kind: JobKind) -> JobOperation {
    match kind {
        JobKind::Embeddings => JobOperation::Embeddings,
        JobKind::Rerank => JobOperation::Rerank,
        JobKind::Predict => JobOperation::Predict,
        JobKind::Classify => JobOperation::Classify,
    }
}

/// Returns the kind of a stored operation.
pub(super) fn kind(operation: JobOperation) -> JobKind {
    match operation {
        JobOperation::Embeddings => JobKind::Embeddings,
        JobOperation::Rerank => JobKind::Rerank,
        JobOperation::Predict => JobKind::Predict,
        JobOperation::Classify => JobKind::Classify,
    }
}
