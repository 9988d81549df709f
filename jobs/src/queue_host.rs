//! A process that serves a queue: it writes payloads, results and records, and applies the log.
//!
//! Submissions that wait at the same time are written together: one object with all payloads, one entry of the log with all
//! records (group commit). A submission is confirmed when both are durable and its record was applied.

mod batches;
mod maintenance;
mod replay;
mod submissions;
mod transfers;

pub use batches::{
    ChunkLines, ChunkWork, ContentOrigin, Created, FileContent, FileInfo, FileRows, NewUpload,
};

use crate::cpu::CpuWork;
use crate::log::{JobLog, JobLogError};
use crate::objects::{JobObjects, ObjectError};
use crate::space::StoredContent;
use bytes::Bytes;
use jobs_core::batch::id::BatchId;
use jobs_core::decide::{
    self, AttemptPolicy, ComputeEnd, DeliveryEnd, DeliveryPolicy, JobFilter, JobWorker, QueueLimits,
    SubmissionError,
};
use jobs_core::delivery::{DeliveriesInFlight, DeliveryLimits};
use jobs_core::erasure::{ContentOwner, ErasureQueue, PendingRemovals};
use jobs_core::job::{DurableJob, DurableJobId, JobSpec, JobStatus, StoredRange, UnixMillis};
use jobs_core::queue::{Cancellation, DurableJobQueue, JobPosition, QueueTotals, RecordEffect};
use jobs_core::record::{DeliveryOutcome, JobRecord};
use jobs_core::webhook::MESSAGE_RESULT_BYTES_MAX;
use rand::Rng;
use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};
use supervision::Mutex;
use tokio::sync::{broadcast, mpsc, oneshot, watch};

/// Submissions that wait for a write; further callers wait.
const SUBMISSIONS_MAX: usize = 1024;
/// Time within which the record that refers to a new object must be appended. Later, for example after the machine was
/// suspended, the object may have been deleted as one without a job.
const RECORD_WITHIN: Duration = maintenance::ORPHAN_AGE.checked_div(2).expect("not a division by zero");
/// Ended jobs and batches that a subscriber may have yet to read, some 64 bytes each.
pub const ENDED_MAX: usize = 4096;
/// Pause after a failure of the log.
const RETRY_PAUSE: Duration = Duration::from_secs(1);

/// Configuration of a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueConfig {
    /// Limits on submissions.
    pub limits: QueueLimits,
    /// Attempts to compute a job.
    pub computation: AttemptPolicy,
    /// Attempts to deliver a result.
    pub delivery: DeliveryPolicy,
    /// Time after which a finished job is removed with its payload and its result.
    pub retention: Duration,
}

/// Error of an operation on a queue.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum QueueError {
    /// The submission was rejected.
    #[error(transparent)]
    Rejected(#[from] SubmissionError),
    /// The idempotency key was used before, for a request with another content.
    #[error("the idempotency key belongs to another request, that of {0}; use another key")]
    OtherRequest(DurableJobId),
    /// No job has this identifier, or its result has been deleted after its retention time.
    #[error("there is no such job")]
    Unknown,
    /// The log failed.
    #[error(transparent)]
    Log(#[from] JobLogError),
    /// The object store failed.
    #[error(transparent)]
    Objects(#[from] ObjectError),
    /// The process is stopping, and its queue accepts no more requests.
    #[error("the queue is closed")]
    Closed,
}

/// A job that a worker has taken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TakenJob {
    /// Identifier.
    pub id: DurableJobId,
    /// The job when it was taken.
    pub job: DurableJob,
    /// Token of the lease.
    pub token: u64,
    /// Payload; of a job that was taken for delivery the result, unless it is larger than a message can contain.
    pub body: Bytes,
}

/// End of a computation, with the result itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ComputationEnd {
    /// The result.
    Computed(Bytes),
    /// The lines of a chunk of a batch.
    Chunk(ChunkLines),
    /// Another end.
    Other(ComputeEnd),
}

/// A job and its position, if it waits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobView {
    /// The job, which the queue shares.
    pub job: Arc<DurableJob>,
    /// Position in the queue.
    pub position: Option<JobPosition>,
}

/// Job or batch whose end this process has recorded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EndedWork {
    /// Job, also of a chunk of a batch.
    Job(DurableJobId),
    /// Batch.
    Batch(BatchId),
}

struct JobSubmission {
    spec: JobSpec,
    payload: Bytes,
    respond: oneshot::Sender<Result<DurableJobId, QueueError>>,
}

/// Queue after its last applied entry.
#[derive(Default)]
struct Applied {
    queue: DurableJobQueue,
    /// Effects of the last applied entries, oldest first.
    effects: VecDeque<Vec<RecordEffect>>,
}

struct Shared {
    log: Arc<dyn JobLog>,
    objects: JobObjects,
    config: QueueConfig,
    applied: Mutex<Applied>,
    /// Reason why entries of the log cannot be applied now, if there is one.
    failure: watch::Sender<Option<JobLogError>>,
    /// Sequence number of the last applied entry.
    position: watch::Sender<u64>,
    /// Content whose removal may not be applied yet.
    removals: Mutex<PendingRemovals>,
    /// Content without a job that is to be erased.
    erasures: Mutex<ErasureQueue>,
    /// Work on the content of files.
    cpu: CpuWork,
    accepted: AtomicU64,
    repeated: AtomicU64,
    /// Jobs and batches that this process ends.
    ended: broadcast::Sender<EndedWork>,
}

/// Confirmed submissions since the start of this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SubmissionTotals {
    /// Those that have added a job.
    pub accepted: u64,
    /// Those with the idempotency key of an earlier job, which they have returned.
    pub repeated: u64,
}

/// A queue. Clones are handles of the same one.
#[derive(Clone)]
pub struct QueueHost {
    shared: Arc<Shared>,
    submissions: mpsc::Sender<JobSubmission>,
}

/// Tasks of a queue, which the caller runs as long as it serves the queue.
pub struct QueueTasks {
    shared: Arc<Shared>,
    submissions: mpsc::Receiver<JobSubmission>,
}

impl QueueHost {
    /// Reads the queue from the log. A log that other processes share is read later if it cannot be read now; until then each
    /// operation fails.
    ///
    /// # Errors
    ///
    /// When a log of this process alone cannot be read.
    pub async fn open(
        log: Arc<dyn JobLog>,
        objects: JobObjects,
        config: QueueConfig,
    ) -> Result<(QueueHost, QueueTasks), JobLogError> {
        let (applied, failure, position) =
            (Mutex::new(Applied::default()), watch::Sender::new(None), watch::Sender::new(0));
        let (removals, erasures, cpu) = (Mutex::default(), Mutex::default(), objects.cpu().clone());
        let (accepted, repeated) = (AtomicU64::new(0), AtomicU64::new(0));
        let ended = broadcast::Sender::new(ENDED_MAX);
        let shared = Arc::new(Shared {
            log,
            objects,
            config,
            applied,
            failure,
            position,
            removals,
            erasures,
            cpu,
            accepted,
            repeated,
            ended,
        });
        match shared.read_log().await {
            // The process has other tasks besides, and continues with these when the servers of the log respond.
            Err(error) if shared.log.is_shared() => drop(shared.failure.send_replace(Some(error))),
            read => read?,
        }
        shared.end_leases().await?;
        let (sender, submissions) = mpsc::channel(SUBMISSIONS_MAX);
        Ok((QueueHost { shared: shared.clone(), submissions: sender }, QueueTasks { shared, submissions }))
    }

    /// Adds a job; `spec.payload` is ignored. Returns its identifier, or that of the job with the same idempotency key,
    /// when it is durable.
    pub async fn submit(&self, spec: JobSpec, payload: Bytes) -> Result<DurableJobId, QueueError> {
        let (respond, response) = oneshot::channel();
        let submission = JobSubmission { spec, payload, respond };
        self.submissions.send(submission).await.map_err(|_| QueueError::Closed)?;
        response.await.map_err(|_| QueueError::Closed)?
    }

    /// Returns a job of a tenant.
    pub fn job(&self, tenant: &str, id: DurableJobId) -> Result<JobView, QueueError> {
        let applied = self.shared.applied.lock();
        let is_own = |job: &Arc<DurableJob>| job.spec.tenant == tenant && job.spec.chunk.is_none();
        let job = applied.queue.shared_job(id).filter(is_own).ok_or(QueueError::Unknown)?;
        Ok(JobView { job, position: applied.queue.position(id) })
    }

    /// Returns a job of any tenant, also that of a chunk of a batch.
    pub fn job_of_any_tenant(&self, id: DurableJobId) -> Option<Arc<DurableJob>> {
        self.shared.applied.lock().queue.shared_job(id)
    }

    /// Returns a job of a tenant with everything that was confirmed before this call, also by another process.
    pub async fn latest_job(&self, tenant: &str, id: DurableJobId) -> Result<JobView, QueueError> {
        let is_final = |view: &JobView| view.job.is_finished() && view.job.spec.webhook.is_none();
        match self.job(tenant, id) {
            // It does not change, so it can be read while the log cannot.
            Ok(view) if is_final(&view) => Ok(view),
            _ => {
                self.shared.catch_up().await?;
                self.job(tenant, id)
            }
        }
    }

    /// Returns the result of a job of a tenant; none if it has none.
    pub async fn result(&self, tenant: &str, id: DurableJobId) -> Result<Option<Bytes>, QueueError> {
        match self.job(tenant, id)?.job.status {
            JobStatus::Finished { result: Some(range), .. } => {
                let result = self.shared.objects.get(range).await?;
                // The result of a job that was removed meanwhile may have been overwritten with zeros.
                self.job(tenant, id)?;
                Ok(Some(result))
            }
            _ => Ok(None),
        }
    }

    /// Returns the number of jobs by status.
    pub fn totals(&self) -> QueueTotals {
        self.shared.applied.lock().queue.totals()
    }

    /// Returns the confirmed submissions of jobs.
    pub fn submissions(&self) -> SubmissionTotals {
        let [accepted, repeated] = [&self.shared.accepted, &self.shared.repeated];
        SubmissionTotals {
            accepted: accepted.load(Ordering::Relaxed),
            repeated: repeated.load(Ordering::Relaxed),
        }
    }

    /// Returns the number of stored parts that were not overwritten when their jobs were removed, because too many waited.
    pub fn erasures_dropped(&self) -> u64 {
        self.shared.erasures.lock().dropped()
    }

    /// Returns the limits, attempts and retention.
    pub fn config(&self) -> &QueueConfig {
        &self.shared.config
    }

    /// Returns the reason why the log cannot be read, when it changes. While there is one, submissions fail at once.
    pub fn failure(&self) -> watch::Receiver<Option<JobLogError>> {
        self.shared.failure.subscribe()
    }

    /// Returns a signal of each applied entry of the log: jobs were submitted, or have ended.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.shared.position.subscribe()
    }

    /// Returns the jobs and batches whose ends this process records from now on. A subscriber that is slower misses those before the last
    /// [`ENDED_MAX`].
    pub fn subscribe_ended(&self) -> broadcast::Receiver<EndedWork> {
        self.shared.ended.subscribe()
    }

    /// Returns the deployments of which [`Self::take`] would take a job.
    pub fn startable_deployments(&self) -> BTreeSet<String> {
        let mut applied = self.shared.applied.lock();
        decide::startable_deployments(&mut applied.queue, &self.shared.config.computation, now())
    }

    /// Returns [`Self::list`] with everything that was confirmed before this call, also by another process.
    pub async fn latest_list(
        &self,
        filter: &JobFilter,
        count: usize,
    ) -> Result<Vec<(DurableJobId, Arc<DurableJob>)>, QueueError> {
        self.shared.catch_up().await?;
        Ok(self.list(filter, count))
    }

    /// Returns a page of jobs, the newest first.
    pub fn list(&self, filter: &JobFilter, count: usize) -> Vec<(DurableJobId, Arc<DurableJob>)> {
        let applied = self.shared.applied.lock();
        let jobs = decide::list(&applied.queue, filter, count).into_iter();
        jobs.filter_map(|(id, _)| Some((id, applied.queue.shared_job(id)?))).collect()
    }

    /// Cancels a job of a tenant.
    pub async fn cancel(&self, tenant: &str, id: DurableJobId) -> Result<Cancellation, QueueError> {
        let job = self.latest_job(tenant, id).await?.job;
        let result = match &job.status {
            JobStatus::Finished { result, .. } => *result,
            _ => None,
        };
        let appended = self.shared.append(vec![JobRecord::CancelRequested { id, at: now() }]).await;
        if appended.is_err() {
            // The record may be stored, and then the job has no result any more.
            self.shared.removals.lock().add(ContentOwner::Job(id), result);
        }
        match appended?.1.pop() {
            Some(RecordEffect::Cancellation(cancellation)) => {
                if cancellation == Cancellation::Confirmed {
                    if !job.is_finished() {
                        // There may be no subscriber.
                        self.shared.ended.send(EndedWork::Job(id)).ok();
                    }
                    self.shared.discard_of(ContentOwner::Job(id), result.into_iter().collect());
                }
                Ok(cancellation)
            }
            _ => Ok(Cancellation::Unknown),
        }
    }

    /// Takes jobs of a deployment up to this number of inputs, for computation.
    pub async fn take(
        &self,
        deployment: &str,
        inputs: u64,
        worker: JobWorker,
    ) -> Result<Vec<TakenJob>, QueueError> {
        let record = {
            let mut applied = self.shared.applied.lock();
            decide::take(
                &mut applied.queue,
                deployment,
                inputs,
                &self.shared.config.computation,
                worker,
                now(),
            )
        };
        self.shared.lease(record).await
    }

    /// Takes results for delivery, beside those that this process is sending.
    pub async fn take_deliveries(
        &self,
        in_flight: &DeliveriesInFlight,
        limits: DeliveryLimits,
        worker: JobWorker,
    ) -> Result<Vec<TakenJob>, QueueError> {
        let record = {
            let applied = self.shared.applied.lock();
            decide::take_deliveries(&applied.queue, in_flight, limits, worker, now())
        };
        self.shared.lease(record).await
    }

    /// Queues the delivery of a job's result again, or makes it due. Returns whether that has changed it: not if the result is
    /// due or being sent.
    pub async fn redeliver(&self, tenant: &str, id: DurableJobId) -> Result<bool, QueueError> {
        self.job(tenant, id)?;
        let record = JobRecord::RedeliveryRequested { id, at: now() };
        Ok(self.shared.append(vec![record]).await?.1.pop() == Some(RecordEffect::Changed))
    }

    /// Extends leases until this much later. Returns the jobs that the worker still holds.
    pub async fn extend(
        &self,
        jobs: Vec<(DurableJobId, u64)>,
        lease: Duration,
    ) -> Result<Vec<DurableJobId>, QueueError> {
        match self.shared.append(vec![JobRecord::Extended { jobs, until: now().after(lease) }]).await?.1.pop()
        {
            Some(RecordEffect::Extended(held)) => Ok(held),
            _ => Ok(Vec::new()),
        }
    }

    /// Ends computations; the results are written into one object. Returns for each whether it has changed the job: not
    /// if the worker has lost the lease, or the job was cancelled.
    pub async fn end(&self, ends: Vec<(DurableJobId, u64, ComputationEnd)>) -> Result<Vec<bool>, QueueError> {
        let results: Vec<Bytes> = ends
            .iter()
            .flat_map(|(_, _, end)| match end {
                ComputationEnd::Computed(result) => vec![result.clone()],
                ComputationEnd::Chunk(lines) => lines.parts().collect(),
                ComputationEnd::Other(_) => Vec::new(),
            })
            .collect();
        let ranges = match results.is_empty() {
            true => Vec::new(),
            false => {
                self.shared.objects.check_space(StoredContent::Result).await?;
                self.shared.objects.put(&results, since_epoch()).await?
            }
        };
        check_recent(&ranges)?;
        let mut ranges = ranges.into_iter();
        let mut without_job = Vec::new();
        let (mut records, mut indexes) = (Vec::new(), Vec::new());
        {
            let applied = self.shared.applied.lock();
            for (index, (id, token, end)) in ends.into_iter().enumerate() {
                let end = match end {
                    ComputationEnd::Computed(_) => ranges.next().map(ComputeEnd::Computed),
                    ComputationEnd::Chunk(lines) => {
                        let result = lines.stored(&mut ranges);
                        let stored = [result.output, result.errors].into_iter().flatten();
                        without_job.extend(stored.map(|range| (index, range)));
                        records.push(JobRecord::ChunkComputed { id, token, result, at: now() });
                        indexes.push(index);
                        continue;
                    }
                    ComputationEnd::Other(end) => Some(end),
                };
                without_job.extend(match &end {
                    Some(ComputeEnd::Computed(range)) => Some((index, *range)),
                    _ => None,
                });
                if let (Some(job), Some(end)) = (applied.queue.job(id), end) {
                    let policy = &self.shared.config.computation;
                    records.push(decide::after_computation((id, job), token, end, policy, now(), draw()));
                    indexes.push(index);
                }
            }
        }
        let mut changed = vec![false; indexes.last().map_or(0, |last| last + 1)];
        if !records.is_empty() {
            let (_, effects) = self.shared.append(records).await?;
            for (index, effect) in indexes.into_iter().zip(effects) {
                changed[index] = effect == RecordEffect::Changed;
            }
        }
        without_job.retain(|(index, _)| !changed.get(*index).copied().unwrap_or_default());
        self.shared.discard(without_job.into_iter().map(|(_, range)| range).collect());
        Ok(changed)
    }

    /// Ends an attempt to deliver a result; returns what follows.
    pub async fn end_delivery(
        &self,
        id: DurableJobId,
        token: u64,
        end: DeliveryEnd,
    ) -> Result<DeliveryOutcome, QueueError> {
        let record = {
            let applied = self.shared.applied.lock();
            let job = applied.queue.job(id).ok_or(QueueError::Unknown)?;
            decide::after_delivery((id, job), token, end, &self.shared.config.delivery, now(), draw())
        };
        let JobRecord::DeliveryEnded { outcome, .. } = &record else { return Err(QueueError::Unknown) };
        let outcome = outcome.clone();
        self.shared.append(vec![record]).await?;
        Ok(outcome)
    }
}

impl QueueTasks {
    /// Runs until all handles are dropped.
    pub async fn run(self) {
        let QueueTasks { shared, submissions } = self;
        let background = async {
            tokio::join!(shared.follow(), shared.maintain(), shared.erase(), shared.sweep());
        };
        tokio::select! {
            () = shared.write_submissions(submissions) => {}
            () = background => {}
        }
    }
}

impl Shared {
    /// Appends a lease and reads the bodies of the jobs that it was granted for. An attempt whose body cannot be read has
    /// failed; the others are not affected.
    async fn lease(&self, record: Option<JobRecord>) -> Result<Vec<TakenJob>, QueueError> {
        let Some(record) = record else { return Ok(Vec::new()) };
        let (token, mut effects) = self.append(vec![record]).await?;
        let Some(RecordEffect::Leased(ids)) = effects.pop() else { return Ok(Vec::new()) };
        let granted: Vec<_> = {
            let applied = self.applied.lock();
            let jobs = ids.into_iter().filter_map(|id| Some((id, applied.queue.job(id)?)));
            jobs.map(|(id, job)| (id, job.clone())).collect()
        };
        let (mut taken, mut unreadable) = (Vec::with_capacity(granted.len()), Vec::new());
        for (id, job) in granted {
            let range = match &job.status {
                JobStatus::Finished { result, .. } => {
                    result.filter(|range| range.length <= MESSAGE_RESULT_BYTES_MAX)
                }
                _ => Some(job.spec.payload),
            };
            let body = match range {
                Some(range) => self.objects.get(range).await,
                None => Ok(Bytes::new()),
            };
            match body {
                Ok(body) => taken.push(TakenJob { id, job, token, body }),
                Err(error) => unreadable.push(self.unreadable((id, &job), token, error)),
            }
        }
        if !unreadable.is_empty() {
            self.append(unreadable).await?;
        }
        Ok(taken)
    }

    /// Decides what follows an attempt whose body cannot be read.
    fn unreadable(&self, job: (DurableJobId, &DurableJob), token: u64, error: ObjectError) -> JobRecord {
        let reason = error.to_string();
        if job.1.is_finished() {
            let end = DeliveryEnd::Failed { reason, retry_after: None };
            return decide::after_delivery(job, token, end, &self.config.delivery, now(), draw());
        }
        let end = match error {
            ObjectError::Missing(_) | ObjectError::Undecryptable(_) => ComputeEnd::Rejected(reason),
            ObjectError::Full | ObjectError::Denied(_) | ObjectError::Unavailable(_) => {
                ComputeEnd::NoCapacity { reason, retry_after: RETRY_PAUSE }
            }
        };
        decide::after_computation(job, token, end, &self.config.computation, now(), draw())
    }
}

/// Fails if objects were written so long ago that they may have been deleted.
fn check_recent(ranges: &[StoredRange]) -> Result<(), ObjectError> {
    let age = |range: &StoredRange| since_epoch().saturating_sub(JobObjects::written(range.object));
    match ranges.first().is_some_and(|range| age(range) >= RECORD_WITHIN) {
        true => Err(ObjectError::Unavailable(format!(
            "the process was suspended for more than {RECORD_WITHIN:?} while it wrote an object"
        ))),
        false => Ok(()),
    }
}

fn since_epoch() -> Duration {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default()
}

/// Returns the time, as in the records of a queue.
pub fn now() -> UnixMillis {
    UnixMillis(since_epoch().as_millis() as u64)
}

fn draw() -> f64 {
    rand::rng().random()
}
