//! Records of a queue's log, in the order in which they are applied.

use crate::batch::id::{BatchFileId, BatchId, UploadId};
use crate::batch::state::{BatchSpec, ChunkResult, PlannedChunk, UploadedFile};
use crate::job::{DurableJobId, JobOutcome, JobSpec, StoredRange, UnixMillis};
use serde::{Deserialize, Serialize};

/// Purpose of a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LeasePurpose {
    /// To compute the result.
    Compute,
    /// To send the result to the webhook.
    Deliver,
}

/// End of an attempt to deliver a result.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DeliveryOutcome {
    /// The target has accepted the result.
    Delivered,
    /// The attempt failed; the next one is due at this time.
    Retry {
        /// Time of the next attempt.
        not_before: UnixMillis,
        /// Reason.
        reason: String,
    },
    /// The attempt failed, and no further one is made.
    Abandoned {
        /// Reason.
        reason: String,
    },
    /// The target wants no further attempts.
    Stopped {
        /// Reason.
        reason: String,
    },
}

/// A change of a queue.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum JobRecord {
    /// A client submitted a job.
    Submitted {
        /// Its identifier.
        id: DurableJobId,
        /// Its request.
        spec: Box<JobSpec>,
    },
    /// A process takes jobs. The jobs of the list that another one has taken meanwhile are skipped.
    Leased {
        /// Number of the process.
        worker: u64,
        /// Purpose.
        purpose: LeasePurpose,
        /// Jobs.
        jobs: Vec<DurableJobId>,
        /// Time of the decision. Leases that have expired by then are ignored.
        at: UnixMillis,
        /// End of the lease.
        until: UnixMillis,
    },
    /// A process continues with jobs that it has leased.
    Extended {
        /// Jobs and the tokens of their leases.
        jobs: Vec<(DurableJobId, u64)>,
        /// New end of the leases.
        until: UnixMillis,
    },
    /// A computation has ended without a result: the job waits again.
    Released {
        /// Job.
        id: DurableJobId,
        /// Token of the lease.
        token: u64,
        /// Whether the attempt counts: false if the job is not the cause, for example because no region has capacity.
        counted: bool,
        /// Reason.
        reason: String,
        /// Earliest start of the next attempt.
        not_before: UnixMillis,
    },
    /// A job is done, or its computation has failed for good.
    Finished {
        /// Job.
        id: DurableJobId,
        /// Token of the lease; absent for a job that is not leased, such as one that has expired in the queue.
        token: Option<u64>,
        /// Outcome.
        outcome: JobOutcome,
        /// Stored result.
        result: Option<StoredRange>,
        /// Time.
        at: UnixMillis,
    },
    /// The client cancels a job. Without effect while the result is being sent or after it was delivered.
    CancelRequested {
        /// Job.
        id: DurableJobId,
        /// Time.
        at: UnixMillis,
    },
    /// An attempt to deliver a result has ended.
    DeliveryEnded {
        /// Job.
        id: DurableJobId,
        /// Token of the lease.
        token: u64,
        /// Outcome.
        outcome: DeliveryOutcome,
        /// Time.
        at: UnixMillis,
    },
    /// The client requests that a result is sent again, or now if its next attempt is due later.
    RedeliveryRequested {
        /// Job.
        id: DurableJobId,
        /// Time.
        at: UnixMillis,
    },
    /// Finished jobs are removed because their retention time has passed. Unfinished jobs in the list are not removed.
    Removed {
        /// Jobs.
        jobs: Vec<DurableJobId>,
    },
    /// A client uploaded a file.
    FileUploaded {
        /// Its identifier.
        id: UploadId,
        /// The file.
        file: Box<UploadedFile>,
    },
    /// A client deletes a file. Without effect while a batch reads it.
    FileDeleted {
        /// Tenant.
        tenant: String,
        /// File.
        id: BatchFileId,
    },
    /// A client created a batch. Its chunks become jobs.
    BatchCreated {
        /// Its identifier.
        id: BatchId,
        /// Its request.
        spec: Box<BatchSpec>,
        /// Its chunks.
        chunks: Vec<PlannedChunk>,
    },
    /// A client cancels a batch. Its unfinished chunks end.
    BatchCancelled {
        /// Batch.
        id: BatchId,
        /// Time.
        at: UnixMillis,
    },
    /// A chunk was computed; its job ends.
    ChunkComputed {
        /// Job.
        id: DurableJobId,
        /// Token of the lease.
        token: u64,
        /// Results.
        result: ChunkResult,
        /// Time.
        at: UnixMillis,
    },
    /// The error lines of the lines that no chunk has computed are stored: the batch has ended.
    BatchFinalized {
        /// Batch.
        id: BatchId,
        /// Error lines, by segment.
        uncomputed: Vec<(u32, StoredRange)>,
        /// Their bytes.
        error_bytes: u64,
        /// Time.
        at: UnixMillis,
    },
    /// Batches and files are removed because their retention time has passed. Unfinished ones are not removed.
    BatchesRemoved {
        /// Batches.
        batches: Vec<BatchId>,
        /// Files.
        files: Vec<UploadId>,
    },
}
