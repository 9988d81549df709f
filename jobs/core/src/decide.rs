//! Decisions of the processes that append records: admission, leases, retries, expiration and retention.

use crate::batch::id::BatchId;
use crate::batch::state::{FileUsage, PlannedChunk};
use crate::delivery::{self, DeliveriesInFlight, DeliveryLimits};
use crate::job::{
    DeliveryProgress, DurableJob, DurableJobId, JobDelivery, JobOutcome, JobPhase, JobSpec, JobStatus,
    StoredRange, UnixMillis,
};
use crate::queue::{DurableJobQueue, JobPosition, TenantUsage};
use crate::record::{DeliveryOutcome, JobRecord, LeasePurpose};
use backoff::Backoff;
use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::time::Duration;

/// Limits of a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueLimits {
    /// Unfinished jobs of a tenant.
    pub tenant_jobs: u64,
    /// Payloads of the unfinished jobs of a tenant, bytes.
    pub tenant_bytes: u64,
    /// Estimated tokens of the unfinished batches of a tenant. Their requests are not charged to the rate limits, which are those
    /// of a second or a minute.
    pub tenant_batch_tokens: u64,
    /// Longest time until the deadline of a job.
    pub age: Duration,
}

/// Reason for the rejection of a submission.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SubmissionError {
    /// The tenant has the maximum number of unfinished jobs.
    #[error(
        "you have {jobs} unfinished jobs, and the limit is {limit}: wait until some are finished, or cancel some"
    )]
    Jobs {
        /// Unfinished jobs.
        jobs: u64,
        /// Limit.
        limit: u64,
    },
    /// The payloads of the tenant's unfinished jobs have the maximum size.
    #[error(
        "your unfinished jobs have {bytes} bytes with this one, and the limit is {limit}: wait until some are finished, or cancel some"
    )]
    Bytes {
        /// Bytes, with those of the rejected job.
        bytes: u64,
        /// Limit.
        limit: u64,
    },
    /// The unfinished batches of the tenant have the maximum number of tokens.
    #[error(
        "your unfinished batches have some {tokens} tokens with this one, and the limit is {limit}: wait until some are finished, or cancel some"
    )]
    BatchTokens {
        /// Tokens, with those of the rejected batch.
        tokens: u64,
        /// Limit.
        limit: u64,
    },
    /// The batch alone exceeds the limit of tokens.
    #[error(
        "it has some {tokens} tokens, and the limit of all unfinished batches is {limit}: split its file, and create the next batch when one is finished"
    )]
    BatchSize {
        /// Tokens of the batch.
        tokens: u64,
        /// Limit.
        limit: u64,
    },
    /// The stored files of the tenant have the maximum size.
    #[error(
        "your stored files have {bytes} bytes with this one, and the limit is {limit}: delete files that you do not need"
    )]
    StoredBytes {
        /// Bytes, with those of the rejected file.
        bytes: u64,
        /// Limit.
        limit: u64,
    },
    /// The tenant has the maximum number of files.
    #[error("you have {limit} files, which is the limit: delete files that you do not need")]
    Files {
        /// Limit.
        limit: usize,
    },
    /// The tenant has the maximum number of batches, each of which is unfinished or has a file.
    #[error(
        "you have {limit} batches that are unfinished or have output or error files, which is the limit: delete the files of batches \
         that have ended, or wait until others are finished"
    )]
    Batches {
        /// Limit.
        limit: usize,
    },
    /// The files and batches of the tenant have the maximum number of parts.
    #[error(
        "your files and batches have {parts} parts with this one, and the limit is {limit}: delete uploaded files, and the files of \
         batches that have ended"
    )]
    FileParts {
        /// Parts, with those of the rejected file or batch.
        parts: usize,
        /// Limit.
        limit: usize,
    },
    /// The deadline or the latest start of a job has passed.
    #[error("`{field}` is not in the future")]
    Past {
        /// Field of the request.
        field: &'static str,
    },
    /// The deadline or the latest start of a job is further in the future than permitted.
    #[error("`{field}` is more than {} s in the future", limit.as_secs())]
    Late {
        /// Field of the request.
        field: &'static str,
        /// Limit.
        limit: Duration,
    },
}

/// Decides whether a job with a payload of this number of bytes can be submitted. `usage` is that of its tenant. Several
/// processes that decide at the same time can exceed a limit, because each counts only the records that it has applied.
pub fn check_submission(
    usage: TenantUsage,
    limits: &QueueLimits,
    spec: &JobSpec,
    bytes: u64,
    now: UnixMillis,
) -> Result<(), SubmissionError> {
    for (field, time) in [("deadline", spec.deadline), ("max_time_in_queue", spec.start_by)] {
        match time {
            Some(time) if time <= now => return Err(SubmissionError::Past { field }),
            Some(time) if time.since(now) > limits.age => {
                return Err(SubmissionError::Late { field, limit: limits.age });
            }
            _ => {}
        }
    }
    if usage.jobs >= limits.tenant_jobs {
        return Err(SubmissionError::Jobs { jobs: usage.jobs, limit: limits.tenant_jobs });
    }
    let bytes = usage.bytes.saturating_add(bytes);
    if bytes > limits.tenant_bytes {
        return Err(SubmissionError::Bytes { bytes, limit: limits.tenant_bytes });
    }
    Ok(())
}

/// Retries of a failed attempt: exponential backoff with full jitter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttemptPolicy {
    /// Number of attempts, with the first one.
    pub attempts: u32,
    /// Pauses after attempts.
    pub backoff: Backoff,
}

/// Retries of the delivery of a result: exponential backoff with full jitter, for a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeliveryPolicy {
    /// Pauses after attempts. The longest one also bounds the `retry-after` of a target.
    pub backoff: Backoff,
    /// Time from the beginning of a delivery to its last attempt.
    pub retry_for: Duration,
}

/// A process that takes jobs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct JobWorker {
    /// Number of the process, for logs.
    pub number: u64,
    /// Duration of its leases. It extends them at half of it.
    pub lease: Duration,
}

/// Decides which jobs of a deployment a worker takes, up to this number of inputs (and at least one job): jobs of
/// workers that have ended first, then the others by priority, tenant and deadline. Returns no record if there are none.
pub fn take(
    queue: &mut DurableJobQueue,
    deployment: &str,
    inputs: u64,
    policy: &AttemptPolicy,
    worker: JobWorker,
    now: UnixMillis,
) -> Option<JobRecord> {
    queue.advance(now);
    let mut left = inputs;
    let mut jobs = Vec::new();
    for (id, inputs) in takeable(queue, deployment, policy, now) {
        if !jobs.is_empty() && inputs > left {
            break;
        }
        left = left.saturating_sub(inputs);
        jobs.push(id);
    }
    lease(jobs, LeasePurpose::Compute, worker, now)
}

/// Returns the jobs of a deployment that a worker may take, in the order of [`take`], with their inputs.
pub(crate) fn takeable<'a>(
    queue: &'a DurableJobQueue,
    deployment: &'a str,
    policy: &'a AttemptPolicy,
    now: UnixMillis,
) -> impl Iterator<Item = (DurableJobId, u64)> + 'a {
    let abandoned = queue.abandoned(now).filter(move |(_, job)| {
        job.spec.deployment == deployment && job.attempts < policy.attempts && job.expires() > now
    });
    let abandoned = abandoned.map(|(id, job)| (id, job.spec.inputs));
    let startable = queue.startable(deployment);
    let startable = startable.filter(move |(id, _)| queue.job(*id).is_some_and(|job| job.expires() > now));
    abandoned.chain(startable)
}

/// Decides to end all leases now, because the processes that hold them have ended. Returns no record if there are none.
pub fn end_leases(queue: &DurableJobQueue, now: UnixMillis) -> Option<JobRecord> {
    let leased = |(id, job): (DurableJobId, &DurableJob)| Some((id, job.lease()?.token));
    let jobs: Vec<_> = queue.leased().filter_map(leased).collect();
    (!jobs.is_empty()).then_some(JobRecord::Extended { jobs, until: now })
}

/// Decides which results a process sends to webhooks, beside those that it is sending.
pub fn take_deliveries(
    queue: &DurableJobQueue,
    in_flight: &DeliveriesInFlight,
    limits: DeliveryLimits,
    worker: JobWorker,
    now: UnixMillis,
) -> Option<JobRecord> {
    lease(delivery::select(queue, in_flight, limits, now), LeasePurpose::Deliver, worker, now)
}

/// Returns the deployments of which [`take`] would take a job.
pub fn startable_deployments(
    queue: &mut DurableJobQueue,
    policy: &AttemptPolicy,
    now: UnixMillis,
) -> BTreeSet<String> {
    queue.advance(now);
    let abandoned = queue.abandoned(now);
    let abandoned = abandoned.filter(|(_, job)| job.attempts < policy.attempts && job.expires() > now);
    let abandoned = abandoned.map(|(_, job)| job.spec.deployment.as_str());
    abandoned.chain(queue.deployments()).map(str::to_owned).collect()
}

/// Returns the record that leases these jobs; none without a job.
pub(crate) fn lease(
    jobs: Vec<DurableJobId>,
    purpose: LeasePurpose,
    worker: JobWorker,
    now: UnixMillis,
) -> Option<JobRecord> {
    let leased =
        JobRecord::Leased { worker: worker.number, purpose, jobs, at: now, until: now.after(worker.lease) };
    matches!(&leased, JobRecord::Leased { jobs, .. } if !jobs.is_empty()).then_some(leased)
}

/// Files of a tenant. They are rows in the memory of each spoke.
pub const FILES_PER_TENANT_MAX: usize = 1_000;
/// Batches of a tenant. Beyond it the oldest of those that have ended and whose files were deleted are removed.
pub const BATCHES_PER_TENANT_MAX: usize = 1_000;
/// Segments of the files and chunks of the batches of a tenant, some 300 bytes each: those of a thousand files of 50,000 lines.
pub const FILE_PARTS_PER_TENANT_MAX: usize = 200_000;

/// Decides whether a tenant may store a file of this size.
///
/// # Errors
///
/// With the limit that the file exceeds.
pub fn check_file(usage: FileUsage, bytes: u64, segments: usize, limit: u64) -> Result<(), SubmissionError> {
    let with_it = usage.bytes.saturating_add(bytes);
    if with_it > limit {
        return Err(SubmissionError::StoredBytes { bytes: with_it, limit });
    }
    if usage.files >= FILES_PER_TENANT_MAX {
        return Err(SubmissionError::Files { limit: FILES_PER_TENANT_MAX });
    }
    check_parts(usage.parts + segments)
}

/// Decides whether a tenant may create a batch with these chunks; returns the batches that are removed for it. They are the oldest of
/// those that have ended and whose files were deleted, as `without_files` returns them with the numbers of their chunks: a batch
/// cannot be deleted by itself, and one that a client has finished with must not count until its retention has passed. What the
/// batch will write is not known, so the limit of bytes applies to what is stored before.
///
/// # Errors
///
/// With the limit that the tenant has reached.
pub fn check_batch(
    usage: FileUsage,
    chunks: usize,
    limit: u64,
    without_files: impl IntoIterator<Item = (BatchId, usize)>,
) -> Result<Vec<BatchId>, SubmissionError> {
    if usage.bytes >= limit {
        return Err(SubmissionError::StoredBytes { bytes: usage.bytes, limit });
    }
    let (mut batches, mut parts) = (usage.batches, usage.parts + chunks);
    let (mut removed, mut without_files) = (Vec::new(), without_files.into_iter());
    while batches >= BATCHES_PER_TENANT_MAX || parts > FILE_PARTS_PER_TENANT_MAX {
        let Some((id, chunks)) = without_files.next() else { break };
        removed.push(id);
        (batches, parts) = (batches - 1, parts - chunks);
    }
    if batches >= BATCHES_PER_TENANT_MAX {
        return Err(SubmissionError::Batches { limit: BATCHES_PER_TENANT_MAX });
    }
    check_parts(parts).map(|()| removed)
}

fn check_parts(parts: usize) -> Result<(), SubmissionError> {
    let limit = FILE_PARTS_PER_TENANT_MAX;
    if parts > limit { Err(SubmissionError::FileParts { parts, limit }) } else { Ok(()) }
}

/// Decides whether the jobs of a batch with a file of this size can be added to the unfinished work of its tenant.
///
/// # Errors
///
/// With the limit that would be exceeded.
pub fn check_batch_work(
    usage: TenantUsage,
    limits: &QueueLimits,
    chunks: &[PlannedChunk],
    file_bytes: u64,
) -> Result<(), SubmissionError> {
    let jobs = usage.jobs + chunks.len() as u64;
    if jobs > limits.tenant_jobs {
        return Err(SubmissionError::Jobs { jobs, limit: limits.tenant_jobs });
    }
    let bytes = usage.bytes.saturating_add(file_bytes);
    if bytes > limits.tenant_bytes {
        return Err(SubmissionError::Bytes { bytes, limit: limits.tenant_bytes });
    }
    let tokens = chunks.iter().fold(0u64, |sum, chunk| sum.saturating_add(chunk.tokens));
    let limit = limits.tenant_batch_tokens;
    if tokens > limit {
        return Err(SubmissionError::BatchSize { tokens, limit });
    }
    let tokens = tokens.saturating_add(usage.batch_tokens);
    if tokens > limit {
        return Err(SubmissionError::BatchTokens { tokens, limit });
    }
    Ok(())
}

/// End of an attempt to compute a job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ComputeEnd {
    /// The result is stored.
    Computed(StoredRange),
    /// The request can never succeed, for example because the model rejects it.
    Rejected(String),
    /// The attempt failed.
    Failed(String),
    /// There was no capacity, so the attempt does not count.
    NoCapacity {
        /// Reason.
        reason: String,
        /// Time until a retry is useful.
        retry_after: Duration,
    },
}

/// Longest reason of a failed attempt, bytes. A replica writes it, and it is in the log and in each list that has the job.
pub const REASON_BYTES_MAX: usize = 4096;

fn bounded(mut reason: String) -> String {
    reason.truncate(reason.floor_char_boundary(REASON_BYTES_MAX));
    reason
}

/// Decides what follows an attempt to compute a job. `draw` is uniform in [0, 1).
pub fn after_computation(
    (id, job): (DurableJobId, &DurableJob),
    token: u64,
    end: ComputeEnd,
    policy: &AttemptPolicy,
    now: UnixMillis,
    draw: f64,
) -> JobRecord {
    let finished = |outcome, result| JobRecord::Finished { id, token: Some(token), outcome, result, at: now };
    let released = |counted, reason, pause| JobRecord::Released {
        id,
        token,
        counted,
        reason,
        not_before: now.after(pause),
    };
    match end {
        ComputeEnd::Computed(result) => finished(JobOutcome::Succeeded, Some(result)),
        ComputeEnd::Rejected(reason) => finished(JobOutcome::Failed { reason: bounded(reason) }, None),
        ComputeEnd::Failed(reason) if job.attempts >= policy.attempts => {
            let reason = format!("all {} attempts failed; the last one: {}", job.attempts, bounded(reason));
            finished(JobOutcome::Failed { reason }, None)
        }
        ComputeEnd::Failed(reason) => {
            released(true, bounded(reason), policy.backoff.full_jitter(job.attempts, draw))
        }
        ComputeEnd::NoCapacity { reason, retry_after } => released(false, bounded(reason), retry_after),
    }
}

/// End of an attempt to deliver a result.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DeliveryEnd {
    /// The target responded with a status from 200 to 299.
    Accepted,
    /// The target responded with 410 Gone: it wants no further attempts.
    Gone,
    /// Another status, or no response.
    Failed {
        /// Reason.
        reason: String,
        /// Delay in the `retry-after` header of the target.
        retry_after: Option<Duration>,
    },
}

/// Decides what follows an attempt to deliver the result of a job. `draw` is uniform in [0, 1).
pub fn after_delivery(
    (id, job): (DurableJobId, &DurableJob),
    token: u64,
    end: DeliveryEnd,
    policy: &DeliveryPolicy,
    now: UnixMillis,
    draw: f64,
) -> JobRecord {
    let begun = DeliveryProgress::begun(now);
    let progress = match &job.status {
        JobStatus::Finished { delivery: JobDelivery::Sending { progress, .. }, .. } => progress,
        _ => &begun,
    };
    let (attempts, last) = (progress.attempts + 1, progress.since.after(policy.retry_for));
    let outcome = match end {
        DeliveryEnd::Accepted => DeliveryOutcome::Delivered,
        DeliveryEnd::Gone => DeliveryOutcome::Stopped { reason: "the target responded 410 Gone".to_owned() },
        DeliveryEnd::Failed { reason, .. } if now >= last => DeliveryOutcome::Abandoned {
            reason: format!("all {attempts} attempts failed; the last one: {reason}"),
        },
        DeliveryEnd::Failed { reason, retry_after } => {
            let pause = policy
                .backoff
                .full_jitter(attempts, draw)
                .max(retry_after.unwrap_or_default().min(policy.backoff.max));
            DeliveryOutcome::Retry { not_before: now.after(pause).min(last), reason }
        }
    };
    JobRecord::DeliveryEnded { id, token, outcome, at: now }
}

/// Decides what is due without an attempt, up to this number of jobs: jobs that have expired, jobs whose workers have
/// ended at the last attempt (set aside, so that one job cannot end worker after worker), and finished jobs whose
/// retention time has passed.
pub fn maintain(
    queue: &DurableJobQueue,
    policy: &AttemptPolicy,
    retention: Duration,
    now: UnixMillis,
    count: usize,
) -> Vec<JobRecord> {
    let finished = |id, outcome| JobRecord::Finished { id, token: None, outcome, result: None, at: now };
    let expired = queue.expired(now).map(|id| finished(id, JobOutcome::Expired));
    let failed =
        queue.abandoned(now).filter(|(_, job)| job.attempts >= policy.attempts && job.expires() > now);
    let failed = failed.map(|(id, job)| {
        let last = job.last_error.as_deref().unwrap_or("none");
        let reason = format!(
            "{} attempts, in the last of which the worker ended or lost its lease; last error: {last}",
            job.attempts
        );
        finished(id, JobOutcome::Failed { reason })
    });
    let mut records: Vec<_> = expired.chain(failed).take(count).collect();
    let by = UnixMillis(now.0.saturating_sub(u64::try_from(retention.as_millis()).unwrap_or(u64::MAX)));
    let jobs: Vec<_> = queue.finished(by).map(|(id, _)| id).take(count - records.len()).collect();
    records.extend((!jobs.is_empty()).then_some(JobRecord::Removed { jobs }));
    records
}

/// Returns the estimated time until a job starts. `inputs_per_second` is the measured rate of the deployment, which its
/// tenants share equally; none without a rate.
pub fn start_estimate(position: &JobPosition, inputs_per_second: f64) -> Option<Duration> {
    let seconds = position.inputs as f64 * position.tenants.max(1) as f64 / inputs_per_second;
    Duration::try_from_secs_f64(seconds).ok()
}

/// Filter of a list of jobs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct JobFilter {
    /// Only these jobs of a tenant; all tenants for an operator.
    pub tenant: Option<String>,
    /// Only jobs with this status.
    pub status: Option<JobPhase>,
    /// Only jobs of this deployment.
    pub deployment: Option<String>,
    /// Only jobs that were submitted at this time or later.
    pub since: Option<UnixMillis>,
    /// Only jobs that were submitted before this one: the last one of the previous page.
    pub before: Option<DurableJobId>,
}

/// Returns a page of jobs, the newest first.
pub fn list<'a>(
    queue: &'a DurableJobQueue,
    filter: &JobFilter,
    count: usize,
) -> Vec<(DurableJobId, &'a DurableJob)> {
    let JobFilter { tenant, status, deployment, since, before } = filter;
    let of_status = |phase: JobPhase| status.is_none_or(|status| status == phase);
    let of_deployment = |name: &str| deployment.as_ref().is_none_or(|deployment| deployment == name);
    let is_new = |(id, _): &(DurableJobId, &DurableJob)| since.is_none_or(|since| id.submitted() >= since);
    let Some(tenant) = tenant else {
        let jobs = queue.newest(*before).take_while(is_new);
        return jobs
            .filter(|(_, job)| of_status(JobPhase::of(job)) && of_deployment(&job.spec.deployment))
            .take(count)
            .collect();
    };
    // The newest of each status and deployment, of which the page has the newest: a page of a tenant costs the same however many
    // jobs it and the others have.
    let groups = queue.newest_of(tenant, *before);
    let groups = groups.filter(|(phase, deployment, _)| of_status(*phase) && of_deployment(deployment));
    let newest = groups.flat_map(|(_, _, jobs)| jobs.take_while(is_new).take(count));
    let mut page: Vec<_> = newest.collect();
    page.sort_unstable_by_key(|(id, _)| Reverse(*id));
    page.truncate(count);
    page
}
