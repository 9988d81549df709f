//! A process that serves a queue: it writes payloads, results and records, and applies the log.
//!
//! Submissions that wait at the same time are written together: one object with all payloads, one entry of the log with all
//! records (group commit). A submission is confirmed when both are durable and its record was applied.

mod batches;
mod maintenance;
mod transfers;

pub use batches::{ChunkLines, ChunkWork, ContentOrigin, Created, FileContent, FileInfo, NewUpload};

use crate::cpu::CpuWork;
use crate::log::{EncodedEntry, JobLog, JobLogError, QueueSnapshot};
use crate::objects::{JobObjects, ObjectError};
use bytes::Bytes;
use jobs_core::batch::state::BatchRow;
use jobs_core::decide::{
    self, AttemptPolicy, ComputeEnd, DeliveryEnd, DeliveryPolicy, JobFilter, JobWorker, QueueLimits,
    SubmissionError,
};
use jobs_core::delivery::{DeliveriesInFlight, DeliveryLimits};
use jobs_core::erasure::{ContentOwner, ErasureQueue, PendingRemovals};
use jobs_core::job::{DurableJob, DurableJobId, JobSpec, JobStatus, StoredRange, UnixMillis};
use jobs_core::queue::{Cancellation, DurableJobQueue, JobPosition, QueueTotals, RecordEffect, TenantUsage};
use jobs_core::record::{DeliveryOutcome, JobRecord};
use jobs_core::webhook::MESSAGE_RESULT_BYTES_MAX;
use rand::Rng;
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use supervision::Mutex;
use tokio::sync::{mpsc, oneshot, watch};

/// Submissions that wait for a write; further callers wait.
const SUBMISSIONS_MAX: usize = 1024;
/// Submissions that are written together, and the sum of their payloads in bytes.
const BATCH_MAX: usize = 512;
const BATCH_BYTES: usize = 16 << 20;
/// Bytes of the records of an entry that has several: half of the largest message of NATS, 1 MiB. A record is smaller than that
/// message, because its texts and lists are limited.
const ENTRY_BYTES: usize = 512 << 10;
/// Entries that are read and applied together.
const READ_MAX: usize = 1024;
/// Entries whose effects are kept for the callers that have appended them.
const EFFECTS_MAX: usize = 1 << 12;
/// Time within which the record that refers to a new object must be appended. Later, for example after the machine was
/// suspended, the object may have been deleted as one without a job.
const RECORD_WITHIN: Duration = maintenance::ORPHAN_AGE.checked_div(2).expect("not a division by zero");
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
        let shared =
            Arc::new(Shared { log, objects, config, applied, failure, position, removals, erasures, cpu });
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
                    self.shared.discard(result.into_iter().collect());
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
            false => self.shared.objects.put(&results, since_epoch()).await?,
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
    /// Reads the last snapshot and the entries after it.
    async fn read_log(&self) -> Result<(), JobLogError> {
        let QueueSnapshot { applied, jobs, batches } = self.log.saved().await?;
        if applied > *self.position.borrow() {
            self.replace(jobs, batches, applied);
        }
        let latest = self.log.latest().await?;
        while *self.position.borrow() < latest {
            self.apply_next().await?;
        }
        Ok(())
    }

    /// Ends the leases of earlier processes, if this process has the log for itself: they have ended, and their jobs need not
    /// wait until their leases expire. An attempt counts as if its lease had expired.
    async fn end_leases(&self) -> Result<(), JobLogError> {
        if self.log.is_shared() {
            return Ok(());
        }
        let record = decide::end_leases(&self.applied.lock().queue, now());
        let Some(record) = record else { return Ok(()) };
        let sequence = self.log.append(EncodedEntry::of(&[record])).await?;
        while *self.position.borrow() < sequence {
            self.apply_next().await?;
        }
        Ok(())
    }

    /// Appends records, and returns the sequence number of the last entry with the effects of all. They are one entry unless
    /// they are larger than [`ENTRY_BYTES`].
    async fn append(&self, records: Vec<JobRecord>) -> Result<(u64, Vec<RecordEffect>), QueueError> {
        let (mut last, mut effects) = (0, Vec::with_capacity(records.len()));
        for entry in entries(&records) {
            let (sequence, of_entry) = self.append_entry(entry).await?;
            last = sequence;
            effects.extend(of_entry);
        }
        Ok((last, effects))
    }

    async fn append_entry(&self, entry: EncodedEntry) -> Result<(u64, Vec<RecordEffect>), QueueError> {
        // An entry that follows an unreadable one would never be applied.
        let failure = self.failure.borrow().clone();
        if let Some(error) = failure {
            return Err(error.into());
        }
        let sequence = self.log.append(entry).await?;
        self.wait_for(sequence).await?;
        let applied = self.applied.lock();
        let since = (applied.queue.applied() - sequence) as usize;
        // After more than `EFFECTS_MAX` other entries, and if a snapshot has replaced the entry, the outcome is unknown.
        let index = applied.effects.len().checked_sub(since + 1).ok_or(QueueError::Closed)?;
        Ok((sequence, applied.effects[index].clone()))
    }

    /// Applies the next entries of the log; waits for some.
    async fn apply_next(&self) -> Result<(), JobLogError> {
        let after = *self.position.borrow();
        let mut last = self.log.last();
        if last.wait_for(|last| *last > after).await.is_err() {
            return Err(JobLogError::Unavailable("closed".to_owned()));
        }
        let entries = self.log.read(after, READ_MAX).await?;
        if entries.first().is_none_or(|(sequence, _)| *sequence != after + 1) {
            return self.restore(after).await;
        }
        let mut applied = self.applied.lock();
        for (sequence, entry) in &entries {
            let next = applied.queue.applied() + 1;
            if *sequence != next {
                return Err(JobLogError::Unavailable(format!("entry {next} is missing")));
            }
            let effects = applied.queue.apply(*sequence, entry);
            applied.effects.push_back(effects);
            if applied.effects.len() > EFFECTS_MAX {
                applied.effects.pop_front();
            }
        }
        let position = applied.queue.applied();
        drop(applied);
        self.position.send_replace(position);
        Ok(())
    }

    /// Continues from the last snapshot, after another process has replaced the next entries by it.
    async fn restore(&self, after: u64) -> Result<(), JobLogError> {
        let QueueSnapshot { applied: position, jobs, batches } = self.log.saved().await?;
        if position <= after {
            return Err(JobLogError::Unavailable(format!("entry {} is missing", after + 1)));
        }
        self.replace(jobs, batches, position);
        Ok(())
    }

    /// Replaces the queue by a later one. The effects of the entries that were not applied are unknown.
    fn replace(&self, jobs: Vec<(DurableJobId, Arc<DurableJob>)>, batches: Vec<BatchRow>, position: u64) {
        let queue = DurableJobQueue::restore(jobs, position).with_batches(batches);
        *self.applied.lock() = Applied { queue, effects: VecDeque::new() };
        self.position.send_replace(position);
    }

    /// Waits until all entries are applied that any process has appended before this call.
    async fn catch_up(&self) -> Result<(), QueueError> {
        let failure = self.failure.borrow().clone();
        if let Some(error) = failure {
            return Err(error.into());
        }
        let latest = self.log.latest().await?;
        self.wait_for(latest).await
    }

    /// Waits until an entry is applied; fails when entries cannot be read.
    async fn wait_for(&self, sequence: u64) -> Result<(), QueueError> {
        let (mut position, mut failure) = (self.position.subscribe(), self.failure.subscribe());
        tokio::select! {
            biased;
            applied = position.wait_for(|position| *position >= sequence) => {
                applied.map(drop).map_err(|_| QueueError::Closed)
            }
            failed = failure.wait_for(Option::is_some) => {
                Err(failed.ok().and_then(|failed| failed.clone()).map_or(QueueError::Closed, QueueError::Log))
            }
        }
    }

    async fn follow(&self) {
        loop {
            // After a failure there may be no next entry to wait for.
            let has_failed = self.failure.borrow().is_some();
            let applied = if has_failed { self.read_log().await } else { self.apply_next().await };
            match applied {
                Ok(()) => {
                    self.failure.send_if_modified(|failure| failure.take().is_some());
                }
                Err(error) => {
                    self.failure.send_if_modified(|failure| {
                        failure.replace(error.clone()).is_none_or(|before| before != error)
                    });
                    tokio::time::sleep(RETRY_PAUSE).await;
                }
            }
        }
    }

    async fn write_submissions(&self, mut inbox: mpsc::Receiver<JobSubmission>) {
        while let Some(first) = inbox.recv().await {
            let mut bytes = first.payload.len();
            let mut batch = vec![first];
            while batch.len() < BATCH_MAX
                && bytes < BATCH_BYTES
                && let Ok(next) = inbox.try_recv()
            {
                bytes += next.payload.len();
                batch.push(next);
            }
            self.write(batch).await;
        }
    }

    /// Writes submissions together and responds to each. The job of a client that has disconnected is durable all the same.
    async fn write(&self, batch: Vec<JobSubmission>) {
        let (mut accepted, mut usages) = (Vec::new(), HashMap::<String, TenantUsage>::new());
        {
            let applied = self.applied.lock();
            for submission in batch {
                let JobSubmission { spec, payload, .. } = &submission;
                let bytes = payload.len() as u64;
                let usage =
                    usages.entry(spec.tenant.clone()).or_insert_with(|| applied.queue.usage(&spec.tenant));
                // A repeated submission adds nothing, so it is not rejected by a limit.
                let known =
                    spec.idempotency.is_some_and(|key| applied.queue.with_key(&spec.tenant, &key).is_some());
                match decide::check_submission(*usage, &self.config.limits, spec, bytes, now()) {
                    Err(error) if !known => drop(submission.respond.send(Err(error.into()))),
                    _ => {
                        usage.jobs += 1;
                        usage.bytes += bytes;
                        accepted.push(submission);
                    }
                }
            }
        }
        if accepted.is_empty() {
            return;
        }
        let payloads: Vec<_> = accepted.iter().map(|submission| submission.payload.clone()).collect();
        let written = async {
            // Payloads that no record can follow would stay until a sweep.
            self.catch_up().await?;
            let ranges = self.objects.put(&payloads, since_epoch()).await?;
            self.submitted(&accepted, ranges).await
        };
        let written = written.await;
        match written {
            Ok(responses) => {
                for (submission, response) in accepted.into_iter().zip(responses) {
                    submission.respond.send(response).ok();
                }
            }
            Err(error) => {
                for submission in accepted {
                    submission.respond.send(Err(error.clone())).ok();
                }
            }
        }
    }

    async fn submitted(
        &self,
        accepted: &[JobSubmission],
        ranges: Vec<StoredRange>,
    ) -> Result<Vec<Result<DurableJobId, QueueError>>, QueueError> {
        let mut ids = Vec::with_capacity(accepted.len());
        check_recent(&ranges)?;
        let records = accepted.iter().zip(ranges.clone()).map(|(submission, payload)| {
            let id = DurableJobId::new(now(), rand::rng().random());
            ids.push(id);
            JobRecord::Submitted { id, spec: Box::new(JobSpec { payload, ..submission.spec.clone() }) }
        });
        let records = records.collect();
        let (_, effects) = self.append(records).await?;
        let repeated =
            ranges.into_iter().zip(&effects).filter(|(_, effect)| **effect != RecordEffect::Submitted);
        self.discard(repeated.map(|(range, _)| range).collect());
        let response = |(id, effect)| match effect {
            RecordEffect::AlreadyExists { id, same_request: true } => Ok(id),
            RecordEffect::AlreadyExists { id, .. } => Err(QueueError::OtherRequest(id)),
            _ => Ok(id),
        };
        Ok(ids.into_iter().zip(effects).map(response).collect())
    }

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

/// Encodes records, and divides them into entries.
fn entries(records: &[JobRecord]) -> Vec<EncodedEntry> {
    let mut entries = Vec::<EncodedEntry>::new();
    for record in records {
        let record = serde_json::to_vec(record).expect("a record serialises to JSON");
        match entries.last_mut().filter(|entry| entry.len() + record.len() <= ENTRY_BYTES) {
            Some(entry) => entry.push(&record),
            None => {
                let mut entry = EncodedEntry::default();
                entry.push(&record);
                entries.push(entry);
            }
        }
    }
    entries
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_divided_into_entries_that_a_log_can_store() {
        let id = |number: u64| DurableJobId::new(UnixMillis(number), 0);
        let failed = |number, bytes| JobRecord::Finished {
            id: id(number),
            token: None,
            outcome: jobs_core::job::JobOutcome::Failed { reason: "x".repeat(bytes) },
            result: None,
            at: now(),
        };
        assert!(entries(&[]).is_empty());
        for (count, bytes, expected) in [(1, 900_000, 1), (3, 100, 1), (9_000, 100, 5), (5, 400_000, 5)] {
            let records: Vec<_> = (0..count).map(|number| failed(number, bytes)).collect();
            let divided = entries(&records);
            assert_eq!(divided.len(), expected, "{count} records of {bytes}");
            let stored: Vec<_> = divided.into_iter().map(EncodedEntry::into_bytes).collect();
            assert!(stored.iter().all(|entry| entry.len() < 1 << 20));
            let read =
                stored.iter().flat_map(|entry| serde_json::from_slice::<Vec<JobRecord>>(entry).unwrap());
            assert_eq!(read.collect::<Vec<_>>(), records, "the order is kept");
        }
    }
}
