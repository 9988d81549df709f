//! Worker of a queue: it takes jobs for which there is capacity, sends them to replicas, and stores the results.
//!
//! One task decides; each job has a task of its own. Jobs that end at the same time are stored together, as one object and one
//! entry of the log. `jobs_core::pace` decides how many inputs are in flight. A deployment without capacity gets no job until
//! the time that its rejection names, so that its jobs are not taken and released in turn. If it has no replica at all, for
//! example because it was removed, that time doubles with each rejection: a job would otherwise write two entries of the log
//! in each second until it expires.

use super::RegionalJobQueue;
use super::api::kind;
use super::batches::count_lines;
use crate::body_memory::BufferedBody;
use crate::circuits::random_draw;
use crate::events::JobAttemptEnded;
use crate::ingress::forwarder::{ReplicaForwarder, ReplicaResponse};
use crate::ingress::request::ForwardedRequest;
use crate::ingress::residency::ResidencyGuard;
use crate::metrics::JobAttemptOutcome;
use crate::relay::ForwardedHeaders;
use crate::request_body::BodyReader;
use crate::respond::Rejection;
use crate::upstream::{ResponseBody, Upstream, UpstreamResponse};
use bytes::{Bytes, BytesMut};
use gateway_core::body::BYTES_PER_TOKEN;
use gateway_core::residency::AllowedRegions;
use jobs::queue_host::{ComputationEnd, QueueError, TakenJob};
use jobs_core::decide::{ComputeEnd, JobWorker};
use jobs_core::job::{DurableJobId, JobSpec};
use jobs_core::pace::{self, CapacityPause, JobCapacity};
use regions::catalogue::Catalogue;
use regions::id::{DeploymentName, RegionId};
use replica_api::error::{ErrorBody, ErrorCode, Fault, Remedy};
use replica_api::headers;
use replica_api::priority::Priority;
use scheduler_core::spoke::{RequestedRevision, Spoke, TrafficOrigin};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use supervision::Mutex;
use supervision::task::contained;
use tokio::task::{AbortHandle, Id, JoinSet};

/// Duration of a lease. After the end of a worker its jobs are computed again so much later.
const LEASE: Duration = Duration::from_secs(15);
/// Period in which the leases of jobs in flight are extended.
const EXTENSION_PERIOD: Duration = Duration::from_secs(5);
/// Timeout of an attempt: long enough for the start of a replica, and for the largest request on a slow one.
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(600);
/// Pause while no job can start: the load of replicas changes several times a second.
const PAUSE: Duration = Duration::from_millis(50);
/// The same while there is no job. A new one ends it at once; the end of a pause after a failed attempt does not.
const IDLE_PAUSE: Duration = Duration::from_secs(1);
/// Pause after an error of the queue.
const ERROR_PAUSE: Duration = Duration::from_secs(1);
/// Pause of a deployment without capacity, if its rejection names none.
const NO_CAPACITY_PAUSE: Duration = Duration::from_secs(1);
/// Pause after results could not be stored. What is computed meanwhile would be lost as well.
const UNSTORED_PAUSE: Duration = Duration::from_secs(5);
/// Largest result, bytes: the vectors of the most inputs of one request, 2048 of 4096 dimensions as text.
pub(super) const RESULT_BYTES_MAX: usize = 256 << 20;

/// Job in flight.
struct JobInFlight {
    id: DurableJobId,
    token: u64,
    deployment: String,
    inputs: u64,
    task: AbortHandle,
}

/// Parts of the ingress that compute jobs.
pub(in crate::ingress) struct JobComputation {
    pub(in crate::ingress) region: RegionId,
    pub(in crate::ingress) catalogue: Arc<Catalogue>,
    pub(in crate::ingress) spoke: Arc<Mutex<Spoke>>,
    pub(in crate::ingress) residency: Arc<ResidencyGuard>,
    pub(in crate::ingress) forwarder: Arc<ReplicaForwarder>,
    pub(in crate::ingress) body_reader: Arc<BodyReader>,
}

/// End of one request to a replica.
pub(super) enum ReplicaAttemptEnd {
    /// The response.
    Computed(Bytes),
    /// The same request would fail again: its status and its error.
    Rejected((u16, ErrorBody)),
    /// It failed, with the reason.
    Failed(String),
    /// There was no capacity.
    NoCapacity {
        /// Reason.
        reason: String,
        /// Time until a retry is useful.
        retry_after: Duration,
    },
}

impl From<ReplicaAttemptEnd> for ComputationEnd {
    fn from(end: ReplicaAttemptEnd) -> ComputationEnd {
        ComputationEnd::Other(match end {
            ReplicaAttemptEnd::Computed(result) => return ComputationEnd::Computed(result),
            ReplicaAttemptEnd::Rejected((_, error)) => ComputeEnd::Rejected(error.error.message),
            ReplicaAttemptEnd::Failed(reason) => ComputeEnd::Failed(reason),
            ReplicaAttemptEnd::NoCapacity { reason, retry_after } => {
                ComputeEnd::NoCapacity { reason, retry_after }
            }
        })
    }
}

/// Computes the jobs of a queue until the spoke drains.
pub(in crate::ingress) async fn work(computation: Arc<JobComputation>, queue: Arc<RegionalJobQueue>) {
    let mut worker = Worker {
        identity: JobWorker { number: rand::random(), lease: LEASE },
        in_flight: BTreeMap::new(),
        tasks: JoinSet::new(),
        paused: BTreeMap::new(),
        extended: Instant::now(),
        unstored_until: None,
        computation,
        queue,
    };
    let mut changes = worker.queue.host.changes();
    loop {
        changes.borrow_and_update();
        let step = worker.step().await;
        let (state, pause) = worker.queue.recorded(step).unwrap_or((WorkerState::Blocked, ERROR_PAUSE));
        tokio::select! {
            biased;
            ended = worker.tasks.join_next_with_id(), if !worker.tasks.is_empty() => {
                let mut all = vec![ended];
                while let Some(ended) = worker.tasks.try_join_next_with_id() {
                    all.push(Some(ended));
                }
                let stored = worker.store(all.into_iter().flatten().collect()).await;
                if worker.queue.recorded(stored).is_err() {
                    tokio::time::sleep(ERROR_PAUSE).await;
                }
            }
            _ = changes.changed(), if state == WorkerState::Idle => {}
            () = tokio::time::sleep(pause) => {}
        }
    }
}

/// State of a worker without a step to make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WorkerState {
    /// It waits for a job.
    Idle,
    /// It waits for capacity.
    Blocked,
}

type EndedJob = (DurableJobId, u64, ComputationEnd);
type JoinedJob = Result<(Id, Option<ComputationEnd>), tokio::task::JoinError>;

struct Worker {
    computation: Arc<JobComputation>,
    queue: Arc<RegionalJobQueue>,
    identity: JobWorker,
    in_flight: BTreeMap<Id, JobInFlight>,
    tasks: JoinSet<Option<ComputationEnd>>,
    /// Deployments whose last attempt had no capacity.
    paused: BTreeMap<String, CapacityPause>,
    /// Time of the last extension of leases.
    extended: Instant,
    /// End of the pause after results could not be stored.
    unstored_until: Option<Instant>,
}

impl Worker {
    /// Extends leases, and starts the jobs for which there is capacity. Returns the state after that, and the longest time to wait.
    async fn step(&mut self) -> Result<(WorkerState, Duration), QueueError> {
        self.extend().await?;
        let now = Instant::now();
        let deployments = self.queue.host.startable_deployments();
        if deployments.is_empty() {
            return Ok((
                WorkerState::Idle,
                if self.in_flight.is_empty() { IDLE_PAUSE } else { EXTENSION_PERIOD },
            ));
        }
        if self.computation.spoke.lock().is_draining() {
            // Another process computes them, or this one after its restart.
            return Ok((WorkerState::Blocked, PAUSE));
        }
        if self.unstored_until.is_some_and(|until| now < until) {
            return Ok((WorkerState::Blocked, PAUSE));
        }
        let loads = self.capacities(now);
        let has_replica = |deployment: &str| loads.get(deployment).is_some_and(|load| load.ready > 0);
        self.paused.retain(|deployment, pause| {
            let is_over = pause.is_over(has_replica(deployment), now);
            !is_over || (deployments.contains(deployment) && !has_replica(deployment))
        });
        for deployment in deployments {
            let pause = self.paused.get(&deployment);
            if pause.is_some_and(|pause| !pause.is_over(has_replica(&deployment), now)) {
                continue;
            }
            let asleep = JobCapacity { ready: 0, held: 0, pending_tokens: 0, tokens_per_second: 0.0 };
            let capacity = loads.get(deployment.as_str()).unwrap_or(&asleep);
            let under_way = self.in_flight.values().filter(|job| job.deployment == deployment);
            let under_way = under_way.map(|job| job.inputs.max(1)).sum();
            let room = pace::free_inputs(capacity, under_way);
            if room > 0 {
                if under_way == 0 {
                    self.queue.measure(&deployment, |rate, now| rate.started(now));
                }
                let jobs = self.queue.host.take(&deployment, room, self.identity).await?;
                jobs.into_iter().for_each(|job| self.start(job));
            }
        }
        Ok((WorkerState::Blocked, PAUSE))
    }

    fn capacities(&self, now: Instant) -> BTreeMap<String, JobCapacity> {
        let spoke = self.computation.spoke.lock();
        let loads = spoke.loads(now).into_iter();
        let capacity = loads.map(|(name, load)| {
            let capacity = JobCapacity {
                ready: load.ready,
                held: spoke.held(&name).requests as u64,
                pending_tokens: load.pending_tokens,
                tokens_per_second: load.tokens_per_second,
            };
            (name.to_string(), capacity)
        });
        capacity.collect()
    }

    fn start(&mut self, job: TakenJob) {
        let (id, token) = (job.id, job.token);
        let (deployment, inputs) = (job.job.spec.deployment.clone(), job.job.spec.inputs);
        let (computation, queue) = (self.computation.clone(), self.queue.clone());
        let compute = async move {
            let Some(chunk) = job.job.spec.chunk else {
                return computation.attempt(job.id.to_string(), &job.job.spec, job.body.clone()).await.into();
            };
            let is_last = job.job.attempts >= queue.host.config().computation.attempts;
            match queue.host.chunk_work(chunk) {
                Some(work) => computation.compute_chunk(&job, work, is_last).await,
                None => ComputationEnd::Other(ComputeEnd::Rejected("the batch does not exist".to_owned())),
            }
        };
        let task = self.tasks.spawn(contained("job", compute));
        self.in_flight.insert(task.id(), JobInFlight { id, token, deployment, inputs, task });
    }

    /// Extends the leases of the jobs in flight, and stops those that were cancelled or taken over.
    async fn extend(&mut self) -> Result<(), QueueError> {
        if self.extended.elapsed() < EXTENSION_PERIOD || self.in_flight.is_empty() {
            return Ok(());
        }
        self.extended = Instant::now();
        let jobs = self.in_flight.values().map(|job| (job.id, job.token)).collect();
        let held = self.queue.host.extend(jobs, LEASE).await?;
        for job in self.in_flight.values().filter(|job| !held.contains(&job.id)) {
            job.task.abort();
        }
        Ok(())
    }

    /// Stores the ends of jobs. If that fails for as long as a lease, for example while the log in NATS has no leader, they are
    /// computed again.
    async fn store(&mut self, ended: Vec<JoinedJob>) -> Result<(), QueueError> {
        let mut ends: Vec<EndedJob> = Vec::with_capacity(ended.len());
        let now = Instant::now();
        let loads = self.capacities(now);
        for joined in ended {
            let (task, end) = match joined {
                Ok((task, end)) => (task, end),
                // Aborted.
                Err(error) => (error.id(), None),
            };
            let Some(job) = self.in_flight.remove(&task) else { continue };
            let aborted = end.is_none();
            let end = match end {
                Some(end) => end,
                // After a panic, which counts as an attempt. An aborted job has another lease, so this has no effect.
                None => ComputationEnd::Other(ComputeEnd::Failed("the worker failed".to_owned())),
            };
            let (outcome, reason) = outcome(&end);
            if !aborted {
                JobAttemptEnded { id: job.id, outcome, reason }.record(&self.queue.metrics);
            }
            match &end {
                ComputationEnd::Other(ComputeEnd::NoCapacity { retry_after, .. }) => {
                    let has_replica = loads.get(&job.deployment).is_some_and(|load| load.ready > 0);
                    let pause = self.paused.entry(job.deployment).or_insert_with(|| CapacityPause::new(now));
                    pause.rejected(*retry_after, has_replica, now);
                }
                ComputationEnd::Computed(_) | ComputationEnd::Chunk(_) => {
                    self.queue.measure(&job.deployment, |rate, now| rate.completed(job.inputs, now));
                }
                ComputationEnd::Other(_) => {}
            }
            ends.push((job.id, job.token, end));
        }
        if ends.is_empty() {
            return Ok(());
        }
        let begun = Instant::now();
        loop {
            let stored = self.queue.host.end(ends.clone()).await;
            // An entry that was stored although its append failed has ended the job; then the next one has no effect.
            let error = match self.queue.recorded(stored) {
                Ok(changed) => {
                    for ((_, _, end), _) in ends.iter().zip(changed).filter(|(_, changed)| *changed) {
                        if let ComputationEnd::Chunk(lines) = end {
                            count_lines(&self.queue, lines.completed, lines.failed);
                        }
                    }
                    return Ok(());
                }
                Err(error) => error,
            };
            if begun.elapsed() + ERROR_PAUSE >= LEASE {
                return self.release(ends, error).await;
            }
            tokio::time::sleep(ERROR_PAUSE).await;
        }
    }

    /// Releases jobs whose results cannot be stored, for example because the disk is full, so that these attempts do not
    /// count: the jobs would have failed after some.
    async fn release(&mut self, ends: Vec<EndedJob>, error: QueueError) -> Result<(), QueueError> {
        let reason = format!("the result was not stored: {error}");
        let released = ends.into_iter().map(|(id, token, _)| {
            let end = ComputeEnd::NoCapacity { reason: reason.clone(), retry_after: UNSTORED_PAUSE };
            (id, token, ComputationEnd::Other(end))
        });
        self.unstored_until = Some(Instant::now() + UNSTORED_PAUSE);
        self.queue.host.end(released.collect()).await?;
        Err(error)
    }
}

fn outcome(end: &ComputationEnd) -> (JobAttemptOutcome, Option<&str>) {
    match end {
        ComputationEnd::Computed(_)
        | ComputationEnd::Chunk(_)
        | ComputationEnd::Other(ComputeEnd::Computed(_)) => (JobAttemptOutcome::Succeeded, None),
        ComputationEnd::Other(ComputeEnd::Rejected(reason)) => (JobAttemptOutcome::Rejected, Some(reason)),
        ComputationEnd::Other(ComputeEnd::Failed(reason)) => (JobAttemptOutcome::Failed, Some(reason)),
        ComputationEnd::Other(ComputeEnd::NoCapacity { reason, .. }) => {
            (JobAttemptOutcome::NoCapacity, Some(reason))
        }
    }
}

impl JobComputation {
    /// Sends one request of a job, as the ingress forwards the request of a gateway.
    pub(super) async fn attempt(&self, id: String, spec: &JobSpec, body: Bytes) -> ReplicaAttemptEnd {
        let Ok(deployment) = spec.deployment.parse::<DeploymentName>() else {
            let message = format!("`{}` is not the name of a deployment", spec.deployment);
            return rejected(ErrorCode::ModelNotFound, message);
        };
        // A residency policy that was narrowed since the submission applies to the job as well (invariant 1, Residency).
        if let Err(rejection) = self.residency.check_deployment_policy(&deployment) {
            return rejected(rejection.code, rejection.message);
        }
        // The job is computed where its queue is, and nowhere else.
        let policy = self.region.as_str().parse().expect("the name of a region is a policy");
        let tokens = (body.len() as u64 / BYTES_PER_TOKEN).max(1);
        let request = ForwardedRequest {
            id,
            tenant: Some(spec.tenant.clone()),
            headers: ForwardedHeaders::of_job(&[(headers::PRIORITY, Priority::Bulk.as_str())]),
            path: kind(spec.operation).computed_path(),
            deployment,
            policy: AllowedRegions::of_policy(&policy, &self.catalogue),
            body: BufferedBody::of_job(body),
            origin: TrafficOrigin::Local,
            revision: RequestedRevision::default(),
            tokens,
            deadline: Instant::now() + ATTEMPT_TIMEOUT,
            draw: random_draw(),
            priority: Priority::Bulk,
            elsewhere: None,
        };
        self.spoke.lock().arrived(&request.deployment, tokens, request.origin, Instant::now());
        match self.forwarder.forward(&request).await {
            Err(rejection) => not_computed(rejection),
            Ok(ReplicaResponse { response, attempt, held: _ }) => {
                let end = received(&self.forwarder.upstream, response).await;
                attempt.finish();
                end
            }
        }
    }
}

fn rejected(code: ErrorCode, message: String) -> ReplicaAttemptEnd {
    ReplicaAttemptEnd::Rejected((code.status(), ErrorBody::new(code, message, None)))
}

fn failed(reason: impl Into<String>) -> ReplicaAttemptEnd {
    ReplicaAttemptEnd::Failed(reason.into())
}

/// Returns the end of an attempt that no replica has responded to.
fn not_computed(rejection: Rejection) -> ReplicaAttemptEnd {
    let Rejection { code, message, retry_after, .. } = rejection;
    match code.fault() {
        Fault::Policy | Fault::Caller | Fault::Quota => rejected(code, message),
        Fault::Capacity if code != ErrorCode::DeadlineExceeded => no_capacity(message, retry_after),
        Fault::Capacity | Fault::Replica | Fault::Network => failed(message),
    }
}

fn no_capacity(reason: String, retry_after: Option<Duration>) -> ReplicaAttemptEnd {
    let retry_after = retry_after.unwrap_or(NO_CAPACITY_PAUSE).max(PAUSE);
    ReplicaAttemptEnd::NoCapacity { reason, retry_after }
}

/// Reads the response of a replica.
async fn received(upstream: &Upstream, response: UpstreamResponse) -> ReplicaAttemptEnd {
    let UpstreamResponse { head, body } = response;
    let text = |name: &str| head.headers.get(name).and_then(|value| value.to_str().ok());
    let body = match body {
        ResponseBody::Buffered(body) => body,
        ResponseBody::Streamed(mut streamed) => {
            let mut whole = BytesMut::new();
            loop {
                match streamed.chunk().await {
                    Ok(Some(chunk)) if whole.len() + chunk.len() > RESULT_BYTES_MAX => {
                        let problem =
                            format!("the result has more than {RESULT_BYTES_MAX} bytes; send fewer inputs");
                        return rejected(ErrorCode::InvalidValue, problem);
                    }
                    Ok(Some(chunk)) => whole.extend_from_slice(&chunk),
                    Ok(None) => break,
                    Err(_) => return failed("the response of the replica was truncated"),
                }
            }
            streamed.finish(upstream);
            whole.freeze()
        }
    };
    let status = head.status.as_u16();
    if (200..300).contains(&status) {
        return ReplicaAttemptEnd::Computed(body);
    }
    let retry_after =
        text(headers::RETRY_AFTER_MS).and_then(|wait| wait.parse().ok()).map(Duration::from_millis);
    let reason = message(&body).unwrap_or_else(|| format!("the replica responded with status {status}"));
    match text(headers::ERROR).and_then(ErrorCode::parse) {
        Some(code) if code.fault() == Fault::Capacity && code != ErrorCode::DeadlineExceeded => {
            no_capacity(reason, retry_after)
        }
        Some(code) if code.remedy() == Remedy::Nothing && code != ErrorCode::DeadlineExceeded => {
            let param = param(&body);
            ReplicaAttemptEnd::Rejected((status, ErrorBody::new(code, reason, param.as_deref())))
        }
        Some(_) => failed(reason),
        None if (400..500).contains(&status) && ![408, 429].contains(&status) => {
            ReplicaAttemptEnd::Rejected((status, ErrorBody::new(ErrorCode::InvalidValue, reason, None)))
        }
        None => failed(reason),
    }
}

/// Returns the field that an error body names.
fn param(body: &Bytes) -> Option<String> {
    serde_json::from_slice::<ErrorBody>(body).ok()?.error.param
}

/// Returns the message of an error body.
fn message(body: &Bytes) -> Option<String> {
    if let Ok(body) = serde_json::from_slice::<ErrorBody>(body) {
        return Some(body.error.message);
    }
    let body: serde_json::Value = serde_json::from_slice(body).ok()?;
    body.get("error")?.as_str().map(str::to_owned)
}
