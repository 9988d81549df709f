//! State of a queue: the result of its log.

mod index;
mod pending;
#[cfg(test)]
mod tests;

pub use pending::JobPosition;

use crate::batch::id::BatchId;
use crate::batch::state::{
    BatchRow, BatchSpec, BatchTable, ChunkResult, ChunkState, FileDeletion, KeyOwner, PlannedChunk,
};
use crate::erasure::ContentOwner;
use crate::job::{
    BatchChunkRef, DeliveryProgress, DurableJob, DurableJobId, IdempotencyKey, JobDelivery, JobLease,
    JobOutcome, JobPhase, JobSpec, JobStatus, StoredRange, UnixMillis,
};
use crate::record::{DeliveryOutcome, JobRecord, LeasePurpose};
use index::stored;
use pending::PendingJobs;
use regions::Priority;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::sync::Arc;

/// Reason of an attempt to deliver a result whose lease has ended.
const SENDER_ENDED: &str = "the process that sent it ended before it recorded the outcome";

/// Effect of a record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RecordEffect {
    /// The job was added.
    Submitted,
    /// The tenant's idempotency key belongs to this job, file or batch, so none was added. `same_request` is false if that one
    /// has another request, which is the client's error.
    AlreadyExists {
        /// Number of the earlier job, file or batch.
        id: DurableJobId,
        /// Whether it has the same request.
        same_request: bool,
    },
    /// The jobs whose lease was granted; the token is the sequence number of its entry.
    Leased(Vec<DurableJobId>),
    /// The jobs whose lease was extended. The worker has lost the others.
    Extended(Vec<DurableJobId>),
    /// Outcome of a cancellation request.
    Cancellation(Cancellation),
    /// Outcome of the deletion of a file.
    FileDeletion(FileDeletion),
    /// The job has changed as the record says.
    Changed,
    /// The record has no effect: there is no such job, it has another status, or the token is that of an earlier lease.
    Ignored,
}

/// Response to a cancellation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cancellation {
    /// The job is cancelled: its result will never be delivered.
    Confirmed,
    /// The job was cancelled before.
    AlreadyCancelled,
    /// The job is finished without a webhook, or it has failed, expired, or been delivered.
    AlreadyFinished,
    /// Its result is being sent at this moment, so it may already have arrived.
    BeingDelivered,
    /// There is no such job.
    Unknown,
}

/// Unfinished work of a tenant, for limits.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TenantUsage {
    /// Number of unfinished jobs.
    pub jobs: u64,
    /// Their payloads, bytes.
    pub bytes: u64,
    /// Estimated tokens of those that are chunks of batches.
    pub batch_tokens: u64,
}

/// Number of jobs by status, and the age of the oldest unfinished one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct QueueTotals {
    /// Jobs that wait.
    pub queued: u64,
    /// Jobs that are computed, or whose worker has ended.
    pub running: u64,
    /// Finished jobs that are kept until the end of their retention.
    pub finished: u64,
    /// Submission of the oldest unfinished job.
    pub oldest: Option<UnixMillis>,
    /// Results that are still to be sent to a webhook.
    pub undelivered: u64,
    /// Beginning of the oldest delivery that has not ended.
    pub oldest_undelivered: Option<UnixMillis>,
}

/// Queue of durable jobs of a jurisdiction.
#[derive(Debug, Clone, Default)]
pub struct DurableJobQueue {
    /// Jobs. A snapshot shares them, and a job is copied before it changes while one exists.
    jobs: BTreeMap<DurableJobId, Arc<DurableJob>>,
    /// Sequence number of the last entry.
    applied: u64,
    pending: PendingJobs,
    /// Unfinished jobs, by submission.
    unfinished: BTreeSet<DurableJobId>,
    usage: BTreeMap<String, TenantUsage>,
    idempotency: BTreeMap<(String, [u8; 32]), DurableJobId>,
    /// Ends of leases for computation.
    computing: BTreeSet<(UnixMillis, DurableJobId)>,
    /// Times at which a webhook is due, or the lease for its delivery ends, by tenant.
    deliveries: BTreeMap<String, BTreeSet<(UnixMillis, DurableJobId)>>,
    /// Beginnings of the deliveries that have not ended.
    undelivered: BTreeSet<(UnixMillis, DurableJobId)>,
    /// Times at which an unfinished job expires.
    expirations: BTreeSet<(UnixMillis, DurableJobId)>,
    /// Times at which jobs were finished.
    finished: BTreeSet<(UnixMillis, DurableJobId)>,
    /// Jobs of each tenant by status and deployment.
    by_tenant: BTreeMap<String, BTreeMap<(JobPhase, String), BTreeSet<DurableJobId>>>,
    /// Number of payloads and results in each stored object.
    objects: BTreeMap<u64, u64>,
    /// Files and batches.
    batches: BatchTable,
}

impl DurableJobQueue {
    /// Restores a queue from its jobs at a position of the log.
    pub fn restore(
        jobs: impl IntoIterator<Item = (DurableJobId, impl Into<Arc<DurableJob>>)>,
        applied: u64,
    ) -> DurableJobQueue {
        let mut queue = DurableJobQueue { applied, ..DurableJobQueue::default() };
        for (id, job) in jobs {
            queue.insert(id, job.into());
        }
        queue
    }

    /// Restores the files and batches of a queue.
    #[must_use]
    pub fn with_batches(self, rows: Vec<BatchRow>) -> DurableJobQueue {
        DurableJobQueue { batches: BatchTable::restore(rows), ..self }
    }

    /// Returns the files and batches.
    pub fn batches(&self) -> &BatchTable {
        &self.batches
    }

    /// Returns all jobs, sorted by their submission.
    pub fn jobs(&self) -> impl Iterator<Item = (DurableJobId, &DurableJob)> {
        self.jobs.iter().map(|(id, job)| (*id, job.as_ref()))
    }

    /// Returns all jobs for a snapshot, which shares them with the queue. No other operation on the queue proceeds meanwhile: for
    /// 100,000 jobs 23 ms of the processor and 75 ms for a copy, without optimization (`jobs/tests/queue.rs`; two shared cores of an
    /// EPYC, 2026-11-26).
    pub fn shared_jobs(&self) -> Vec<(DurableJobId, Arc<DurableJob>)> {
        self.jobs.iter().map(|(id, job)| (*id, job.clone())).collect()
    }

    /// Returns the number of jobs, with the finished ones.
    pub fn len(&self) -> usize {
        self.jobs.len()
    }

    /// Whether there is no job.
    pub fn is_empty(&self) -> bool {
        self.jobs.is_empty()
    }

    /// Returns the jobs that were submitted before one, or all, the newest first. Chunks
    /// of batches are left out.
    pub fn newest(&self, before: Option<DurableJobId>) -> impl Iterator<Item = (DurableJobId, &DurableJob)> {
        let end = before.map_or(Bound::Unbounded, Bound::Excluded);
        let jobs = self.jobs.range((Bound::Unbounded, end)).rev().map(|(id, job)| (*id, job.as_ref()));
        jobs.filter(|(_, job)| job.spec.chunk.is_none())
    }

    /// Returns the jobs of a tenant for each status and deployment that it has jobs of, the newest first; those that were
    /// submitted before `before`.
    pub fn newest_of(
        &self,
        tenant: &str,
        before: Option<DurableJobId>,
    ) -> impl Iterator<Item = (JobPhase, &str, impl Iterator<Item = (DurableJobId, &DurableJob)>)> {
        let end = before.map_or(Bound::Unbounded, Bound::Excluded);
        let groups = self.by_tenant.get(tenant).into_iter().flatten();
        groups.map(move |((phase, deployment), ids)| {
            let ids = ids.range((Bound::Unbounded, end)).rev();
            (*phase, deployment.as_str(), ids.filter_map(|id| Some((*id, self.job(*id)?))))
        })
    }

    /// Returns a job.
    pub fn job(&self, id: DurableJobId) -> Option<&DurableJob> {
        self.jobs.get(&id).map(Arc::as_ref)
    }

    /// Returns a job, which the queue shares.
    pub fn shared_job(&self, id: DurableJobId) -> Option<Arc<DurableJob>> {
        self.jobs.get(&id).cloned()
    }

    /// Returns the number of jobs by status.
    pub fn totals(&self) -> QueueTotals {
        let running = self.computing.len() as u64;
        QueueTotals {
            queued: self.unfinished.len() as u64 - running,
            running,
            finished: self.finished.len() as u64,
            oldest: self.unfinished.first().map(|id| id.submitted()),
            undelivered: self.undelivered.len() as u64,
            oldest_undelivered: self.undelivered.first().map(|(since, _)| *since),
        }
    }

    /// Returns the sequence number of the last entry.
    pub fn applied(&self) -> u64 {
        self.applied
    }

    /// Returns the unfinished work of a tenant.
    pub fn usage(&self, tenant: &str) -> TenantUsage {
        self.usage.get(tenant).copied().unwrap_or_default()
    }

    /// Returns the job that a tenant submitted with an idempotency key.
    pub fn with_key(&self, tenant: &str, key: &IdempotencyKey) -> Option<DurableJobId> {
        self.idempotency.get(&(tenant.to_owned(), key.key)).copied()
    }

    /// Whether a job has its payload or its result in a stored object. An object without one can be deleted, unless it is
    /// so new that the record which refers to it may not be applied yet.
    pub fn refers_to(&self, object: u64) -> bool {
        self.objects.contains_key(&object) || self.batches.refers_to(object)
    }

    /// Returns where the content of an owner is stored; empty if it does not exist.
    pub fn stored(&self, owner: ContentOwner) -> Vec<StoredRange> {
        match owner {
            ContentOwner::Job(id) => self.job(id).into_iter().flat_map(stored).collect(),
            ContentOwner::Batch(id) => self.batches.ranges_of_batch(id),
            ContentOwner::Upload(id) => self.batches.ranges_of_file(id),
        }
    }

    /// Returns the position of a job that waits; none for another one.
    pub fn position(&self, id: DurableJobId) -> Option<JobPosition> {
        let job = self.jobs.get(&id)?;
        matches!(job.status, JobStatus::Queued { .. }).then(|| self.pending.position(id, job)).flatten()
    }

    /// Applies the next entry of the log: records that were appended together, which have one sequence number. Returns
    /// the effect of each. Entries that were applied before are ignored, so a log can be read again from any earlier
    /// position.
    pub fn apply(&mut self, sequence: u64, entry: &[JobRecord]) -> Vec<RecordEffect> {
        if sequence <= self.applied {
            return vec![RecordEffect::Ignored; entry.len()];
        }
        self.applied = sequence;
        entry.iter().map(|record| self.apply_record(sequence, record)).collect()
    }

    fn apply_record(&mut self, sequence: u64, record: &JobRecord) -> RecordEffect {
        match record {
            JobRecord::Submitted { id, spec } => self.submit(*id, spec, sequence),
            JobRecord::Leased { worker, purpose, jobs, at, until } => {
                let lease = JobLease { token: sequence, worker: *worker, until: *until };
                let mut granted = jobs.clone();
                granted.retain(|id| self.lease(*id, *purpose, lease, *at));
                RecordEffect::Leased(granted)
            }
            JobRecord::Extended { jobs, until } => {
                let held = jobs.iter().filter(|(id, token)| self.extend(*id, *token, *until));
                RecordEffect::Extended(held.map(|(id, _)| *id).collect())
            }
            JobRecord::Released { id, token, counted, reason, not_before } => {
                changed(self.release(*id, *token, *counted, reason, *not_before))
            }
            JobRecord::Finished { id, token, outcome, result, at } => {
                changed(self.finish(*id, *token, outcome, *result, *at))
            }
            JobRecord::CancelRequested { id, at } => RecordEffect::Cancellation(self.cancel(*id, *at)),
            JobRecord::DeliveryEnded { id, token, outcome, at } => {
                changed(self.end_delivery(*id, *token, outcome, *at))
            }
            JobRecord::RedeliveryRequested { id, at } => changed(self.redeliver(*id, *at)),
            JobRecord::Removed { jobs } => changed(self.remove_finished(jobs)),
            JobRecord::FileUploaded { id, file } => {
                if let Some(earlier) = self.earlier(&file.tenant, file.idempotency) {
                    return earlier;
                }
                self.batches.add_file(*id, Arc::new((**file).clone()));
                RecordEffect::Changed
            }
            JobRecord::FileDeleted { tenant, id } => {
                RecordEffect::FileDeletion(self.batches.delete_file(tenant, *id))
            }
            JobRecord::BatchCreated { id, spec, chunks } => {
                if let Some(earlier) = self.earlier(&spec.tenant, spec.idempotency) {
                    return earlier;
                }
                changed(self.create_batch(*id, spec, chunks, sequence))
            }
            JobRecord::BatchCancelled { id, at } => {
                let jobs = self.batches.cancel(*id, *at);
                jobs.iter().flatten().for_each(|job| self.remove(*job));
                changed(jobs.is_some())
            }
            JobRecord::ChunkComputed { id, token, result, at } => {
                changed(self.chunk_computed(*id, *token, result, *at))
            }
            JobRecord::BatchFinalized { id, uncomputed, error_bytes, at } => {
                changed(self.batches.finalize(*id, uncomputed, *error_bytes, *at))
            }
            JobRecord::BatchesRemoved { batches, files } => {
                self.batches.remove(batches, files);
                RecordEffect::Changed
            }
        }
    }

    /// Adds a job, unless its tenant has submitted it before.
    fn submit(&mut self, id: DurableJobId, spec: &JobSpec, sequence: u64) -> RecordEffect {
        if self.jobs.contains_key(&id) {
            return RecordEffect::Ignored;
        }
        if let Some(key) = &spec.idempotency
            && let Some(earlier) = self.with_key(&spec.tenant, key)
        {
            let request = self.jobs[&earlier].spec.idempotency.map(|key| key.request);
            return RecordEffect::AlreadyExists { id: earlier, same_request: request == Some(key.request) };
        }
        let (spec, status) = (spec.clone(), JobStatus::Queued { not_before: UnixMillis(0) });
        self.insert(id, Arc::new(DurableJob { spec, sequence, attempts: 0, last_error: None, status }));
        RecordEffect::Submitted
    }

    /// Returns the effect of a file or a batch with an idempotency key that an earlier one has.
    fn earlier(&self, tenant: &str, key: Option<IdempotencyKey>) -> Option<RecordEffect> {
        let KeyOwner { number, same_request } = self.batches.with_key(tenant, &key?)?;
        Some(RecordEffect::AlreadyExists { id: number, same_request })
    }

    /// Adds a batch with a job for each chunk, unless its file was deleted.
    fn create_batch(
        &mut self,
        id: BatchId,
        spec: &BatchSpec,
        chunks: &[PlannedChunk],
        sequence: u64,
    ) -> bool {
        let Some(payloads) = self.batches.create(id, spec, chunks) else { return false };
        for (index, (chunk, payload)) in chunks.iter().zip(payloads).enumerate() {
            let job = JobSpec {
                tenant: spec.tenant.clone(),
                deployment: chunk.deployment.clone(),
                operation: spec.operation,
                priority: Priority::Bulk,
                inputs: chunk.inputs,
                payload,
                deadline: Some(spec.expires),
                start_by: None,
                idempotency: None,
                webhook: None,
                chunk: Some(BatchChunkRef { batch: id.0, chunk: index as u32, tokens: chunk.tokens }),
                residency: spec.residency.clone(),
                trace: spec.trace.clone(),
            };
            self.submit(chunk.job, &job, sequence);
        }
        true
    }

    /// Ends the job of a chunk with its result.
    fn chunk_computed(&mut self, id: DurableJobId, token: u64, result: &ChunkResult, at: UnixMillis) -> bool {
        let Some(job) = self.jobs.get(&id) else { return false };
        let computes = matches!(&job.status, JobStatus::Running { lease } if lease.token == token);
        let Some(chunk) = job.spec.chunk.filter(|_| computes) else { return false };
        self.batches.chunk_computed(chunk, result, at);
        self.remove(id);
        true
    }

    /// Removes the job of a chunk that has ended without a result. Its batch keeps the reason.
    fn settle_chunk(&mut self, id: DurableJobId) {
        let Some(job) = self.jobs.get(&id) else { return };
        let (Some(chunk), JobStatus::Finished { outcome, at, .. }) = (job.spec.chunk, &job.status) else {
            return;
        };
        let state = match outcome {
            JobOutcome::Expired => ChunkState::Expired,
            JobOutcome::Cancelled => ChunkState::Cancelled,
            JobOutcome::Failed { reason } => ChunkState::Failed(reason.clone()),
            JobOutcome::Succeeded => ChunkState::Failed("the result is missing".to_owned()),
        };
        self.batches.chunk_lost(chunk, state, *at);
        self.remove(id);
    }

    /// Grants a lease of a job unless another one has not ended.
    fn lease(&mut self, id: DurableJobId, purpose: LeasePurpose, lease: JobLease, at: UnixMillis) -> bool {
        let granted = self.change(id, |job| {
            let ended = job.lease().is_none_or(|other| other.until <= at);
            let expired = job.expires() <= at;
            match (&mut job.status, purpose) {
                (JobStatus::Queued { not_before }, LeasePurpose::Compute)
                    if *not_before <= at && !expired => {}
                (JobStatus::Running { .. }, LeasePurpose::Compute) if ended && !expired => {}
                (JobStatus::Finished { delivery, .. }, LeasePurpose::Deliver) => {
                    let progress = match delivery {
                        JobDelivery::Pending { progress, not_before } if *not_before <= at => {
                            progress.clone()
                        }
                        // Whether the earlier process has sent it is unknown; the target can recognise the id.
                        JobDelivery::Sending { progress, .. } if ended => progress.failed(SENDER_ENDED),
                        _ => return false,
                    };
                    *delivery = JobDelivery::Sending { progress, lease };
                    return true;
                }
                _ => return false,
            }
            job.attempts += 1;
            job.status = JobStatus::Running { lease };
            true
        });
        if granted && purpose == LeasePurpose::Compute {
            let job = &self.jobs[&id];
            self.pending.charge(job);
            if let Some(chunk) = job.spec.chunk {
                self.batches.chunk_started(chunk, at);
            }
        }
        granted
    }

    /// Extends the lease of a job for its computation or its delivery.
    fn extend(&mut self, id: DurableJobId, token: u64, until: UnixMillis) -> bool {
        self.change_leased(id, token, |job, lease| {
            let lease = JobLease { until, ..lease };
            match &mut job.status {
                JobStatus::Running { lease: current } => *current = lease,
                JobStatus::Finished { delivery: JobDelivery::Sending { lease: current, .. }, .. } => {
                    *current = lease;
                }
                _ => {}
            }
            true
        })
    }

    /// Queues a job again whose computation has ended without a result.
    fn release(
        &mut self,
        id: DurableJobId,
        token: u64,
        counted: bool,
        reason: &str,
        not_before: UnixMillis,
    ) -> bool {
        self.change_leased(id, token, |job, _| {
            let computes = matches!(job.status, JobStatus::Running { .. });
            if computes {
                job.attempts -= u32::from(!counted);
                job.last_error = Some(reason.to_owned());
                job.status = JobStatus::Queued { not_before };
            }
            computes
        })
    }

    /// Finishes a job that is leased with this token; without one, a job that waits, or whose lease or time has ended. Its
    /// result is delivered if it has a webhook.
    fn finish(
        &mut self,
        id: DurableJobId,
        token: Option<u64>,
        outcome: &JobOutcome,
        result: Option<StoredRange>,
        at: UnixMillis,
    ) -> bool {
        let finish = |job: &mut DurableJob| {
            let has_result = *outcome != JobOutcome::Cancelled && job.spec.webhook.is_some();
            let delivery = match has_result {
                true => JobDelivery::Pending { progress: DeliveryProgress::begun(at), not_before: at },
                false => JobDelivery::None,
            };
            job.status = JobStatus::Finished { outcome: outcome.clone(), result, at, delivery };
        };
        match token {
            Some(token) => self.change_leased(id, token, |job, _| {
                let computes = matches!(job.status, JobStatus::Running { .. });
                if computes {
                    finish(job);
                }
                computes
            }),
            None => self.change(id, |job| {
                let waits = match job.status {
                    JobStatus::Queued { .. } => true,
                    JobStatus::Running { lease } => lease.until <= at || job.expires() <= at,
                    JobStatus::Finished { .. } => false,
                };
                if waits {
                    finish(job);
                }
                waits
            }),
        }
    }

    /// Cancels a job whose result is not being delivered and was not delivered.
    fn cancel(&mut self, id: DurableJobId, at: UnixMillis) -> Cancellation {
        let mut response = Cancellation::Unknown;
        self.change(id, |job| {
            let delivery = match &job.status {
                JobStatus::Finished { outcome: JobOutcome::Cancelled, .. } => {
                    response = Cancellation::AlreadyCancelled;
                    return false;
                }
                JobStatus::Finished { delivery, .. } => Some(delivery),
                _ => None,
            };
            response = match delivery {
                // A failed attempt may still have reached the target, for example if its response was lost. A
                // confirmation says that nothing is sent later.
                None
                | Some(
                    JobDelivery::Pending { .. } | JobDelivery::Abandoned { .. } | JobDelivery::Stopped { .. },
                ) => Cancellation::Confirmed,
                Some(JobDelivery::Sending { .. }) => Cancellation::BeingDelivered,
                Some(JobDelivery::None | JobDelivery::Delivered { .. }) => Cancellation::AlreadyFinished,
            };
            if response == Cancellation::Confirmed {
                let (outcome, delivery) = (JobOutcome::Cancelled, JobDelivery::None);
                job.status = JobStatus::Finished { outcome, result: None, at, delivery };
            }
            response == Cancellation::Confirmed
        });
        response
    }

    /// Records the outcome of an attempt to deliver a result.
    fn end_delivery(
        &mut self,
        id: DurableJobId,
        token: u64,
        outcome: &DeliveryOutcome,
        at: UnixMillis,
    ) -> bool {
        self.change_leased(id, token, |job, _| {
            let JobStatus::Finished { delivery, .. } = &mut job.status else { return false };
            let JobDelivery::Sending { progress, .. } = &*delivery else { return false };
            let attempts = progress.attempts + 1;
            *delivery = match outcome {
                DeliveryOutcome::Delivered => JobDelivery::Delivered { at, attempts },
                DeliveryOutcome::Retry { not_before, reason } => {
                    JobDelivery::Pending { progress: progress.failed(reason), not_before: *not_before }
                }
                DeliveryOutcome::Abandoned { reason } => {
                    JobDelivery::Abandoned { reason: reason.clone(), attempts }
                }
                DeliveryOutcome::Stopped { reason } => {
                    JobDelivery::Stopped { reason: reason.clone(), attempts }
                }
            };
            true
        })
    }

    /// Queues the delivery of a result again that has ended or is due later. Without effect while the result is being sent.
    fn redeliver(&mut self, id: DurableJobId, at: UnixMillis) -> bool {
        self.change(id, |job| {
            let JobStatus::Finished { delivery, .. } = &mut job.status else { return false };
            let waits = match delivery {
                JobDelivery::Delivered { .. }
                | JobDelivery::Abandoned { .. }
                | JobDelivery::Stopped { .. } => true,
                JobDelivery::Pending { not_before, .. } => *not_before > at,
                JobDelivery::None | JobDelivery::Sending { .. } => false,
            };
            if waits {
                *delivery = JobDelivery::Pending { progress: DeliveryProgress::begun(at), not_before: at };
            }
            waits
        })
    }

    /// Removes those of the jobs that are finished; returns whether there was one.
    fn remove_finished(&mut self, jobs: &[DurableJobId]) -> bool {
        let before = self.jobs.len();
        for id in jobs {
            if self.job(*id).is_some_and(DurableJob::is_finished) {
                self.remove(*id);
            }
        }
        self.jobs.len() < before
    }

    /// Changes a job that is leased with this token.
    fn change_leased(
        &mut self,
        id: DurableJobId,
        token: u64,
        change: impl FnOnce(&mut DurableJob, JobLease) -> bool,
    ) -> bool {
        self.change(id, |job| match job.lease() {
            Some(lease) if lease.token == token => change(job, lease),
            _ => false,
        })
    }

    /// Changes a job and the indexes; returns what `change` returns, or false if there is no such job.
    fn change(&mut self, id: DurableJobId, change: impl FnOnce(&mut DurableJob) -> bool) -> bool {
        let Some(mut job) = self.jobs.remove(&id) else { return false };
        self.unindex(id, &job);
        let changed = change(Arc::make_mut(&mut job));
        self.index(id, &job);
        self.jobs.insert(id, job);
        self.settle_chunk(id);
        changed
    }

    fn insert(&mut self, id: DurableJobId, job: Arc<DurableJob>) {
        if let Some(key) = job.spec.idempotency {
            self.idempotency.insert((job.spec.tenant.clone(), key.key), id);
        }
        self.index(id, &job);
        self.jobs.insert(id, job);
    }

    fn remove(&mut self, id: DurableJobId) {
        let Some(job) = self.jobs.remove(&id) else { return };
        self.unindex(id, &job);
        if let Some(key) = job.spec.idempotency {
            self.idempotency.remove(&(job.spec.tenant.clone(), key.key));
        }
    }
}

fn changed(changed: bool) -> RecordEffect {
    if changed { RecordEffect::Changed } else { RecordEffect::Ignored }
}
