//! Worker of a queue: it takes jobs for which there is capacity, sends them to replicas, and stores the results.
//!
//! One task decides; each job has a task of its own. Jobs that end at the same time are stored together, as one object and one
//! entry of the log. `jobs_core::pace` decides how many inputs are in flight. A deployment without capacity gets no job until
//! the time that its rejection names, so that its jobs are not taken and released in turn. If it has no replica at all, for
//! example because it was removed, that time doubles with each rejection: a job would otherwise write two entries of the log
//! in each second until it expires.
//!
//! While the jobs of a deployment would wait for too long, the worker also takes jobs for the gateways that would send them to
//! another region ([`super::transfers`]). Their leases, attempts and results are those of all jobs.

use super::RegionalJobQueue;
use super::attempt::{self, JobAttemptEnd, JobRequestEnd};
use super::batches::count_lines;
use super::names::kind;
use super::traces::{JobAttemptTrace, JobTraces};
use super::transfers::{TargetRegion, UnmetDemand};
use super::usage::ComputedUsage;
use crate::body_memory::BufferedBody;
use crate::circuits::random_draw;
use crate::events::JobAttemptEnded;
use crate::ingress::forwarder::{ReplicaForwarder, ReplicaResponse};
use crate::ingress::request::ForwardedRequest;
use crate::ingress::residency::ResidencyGuard;
use crate::ingress::spans::IngressStages;
use crate::metrics::JobAttemptOutcome;
use crate::relay::ForwardedHeaders;
use crate::request_body::BodyReader;
use bytes::Bytes;
use gateway_core::body::BYTES_PER_TOKEN;
use gateway_core::residency::AllowedRegions;
use jobs::queue_host::{self, ComputationEnd, QueueError, TakenJob};
use jobs_core::decide::{ComputeEnd, JobWorker};
use jobs_core::job::{DurableJobId, JobSpec};
use jobs_core::pace::{self, CapacityPause, JobCapacity};
use jobs_core::transfer::{self, JobBacklog, WaitingGroup};
use regions::catalogue::Catalogue;
use regions::id::{DeploymentName, RegionId};
use regions::set::RegionIndex;
use replica_api::error::ErrorCode;
use replica_api::headers;
use replica_api::priority::Priority;
use scheduler_core::spoke::{RequestedRevision, Spoke, TrafficOrigin};
use std::collections::{BTreeMap, BTreeSet};
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
/// Pause after results could not be stored. What is computed meanwhile would be lost as well.
const UNSTORED_PAUSE: Duration = Duration::from_secs(5);

/// Period in which the backlogs of deployments are estimated: that of the gateways' polls.
const BACKLOG_PERIOD: Duration = Duration::from_millis(200);
/// Capacity of a deployment without a replica.
const ASLEEP: JobCapacity = JobCapacity { ready: 0, held: 0, pending_tokens: 0, tokens_per_second: 0.0 };

/// Job in flight.
struct JobInFlight {
    id: DurableJobId,
    token: u64,
    tenant: String,
    deployment: String,
    inputs: u64,
    /// Other region that computes it.
    target: Option<RegionIndex>,
    task: AbortHandle,
    /// Trace of the attempt, if traces are configured.
    trace: Option<Arc<JobAttemptTrace>>,
}

/// Parts of the ingress that compute jobs.
pub(in crate::ingress) struct JobComputation {
    pub(in crate::ingress) region: RegionId,
    pub(in crate::ingress) catalogue: Arc<Catalogue>,
    pub(in crate::ingress) spoke: Arc<Mutex<Spoke>>,
    pub(in crate::ingress) residency: Arc<ResidencyGuard>,
    pub(in crate::ingress) forwarder: Arc<ReplicaForwarder>,
    pub(in crate::ingress) body_reader: Arc<BodyReader>,
    /// Traces of jobs, if traces are configured.
    pub(in crate::ingress) traces: Option<Arc<JobTraces>>,
}

/// Computes the jobs of a queue until the spoke drains.
pub(in crate::ingress) async fn work(computation: Arc<JobComputation>, queue: Arc<RegionalJobQueue>) {
    let mut worker = Worker {
        identity: JobWorker { number: rand::random(), lease: LEASE },
        in_flight: BTreeMap::new(),
        tasks: JoinSet::new(),
        paused: BTreeMap::new(),
        targets_paused: BTreeMap::new(),
        backlogs_checked: Instant::now(),
        extended: Instant::now(),
        unstored_until: None,
        computation,
        queue,
    };
    let mut changes = worker.queue.host.changes();
    loop {
        changes.borrow_and_update();
        let step = worker.step().await;
        let step = worker.queue.recorded(step);
        let has_failed = step.is_err();
        if has_failed {
            // No job can be leased. Gateways would wait for one in vain, and their pulls would end the pause.
            worker.queue.transfers.set_waiting(Vec::new());
        }
        let (state, pause) = step.unwrap_or((WorkerState::Blocked, ERROR_PAUSE));
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
            () = worker.queue.transfers.changed.notified(), if !has_failed => {}
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
type JoinedJob = Result<(Id, Option<JobAttemptEnd>), tokio::task::JoinError>;

struct Worker {
    computation: Arc<JobComputation>,
    queue: Arc<RegionalJobQueue>,
    identity: JobWorker,
    in_flight: BTreeMap<Id, JobInFlight>,
    tasks: JoinSet<Option<JobAttemptEnd>>,
    /// Deployments whose last attempt had no capacity.
    paused: BTreeMap<String, CapacityPause>,
    /// The same for other regions that compute jobs of a deployment.
    targets_paused: BTreeMap<(String, RegionIndex), CapacityPause>,
    /// Time of the last estimate of the backlogs.
    backlogs_checked: Instant,
    /// Time of the last extension of leases.
    extended: Instant,
    /// End of the pause after results could not be stored.
    unstored_until: Option<Instant>,
}

impl Worker {
    /// Ends the tickets of lost gateways, extends leases, and starts the jobs for which there is capacity. Returns the state after
    /// that, and the longest time to wait.
    async fn step(&mut self) -> Result<(WorkerState, Duration), QueueError> {
        let expiry = self.queue.transfers.expire(Instant::now());
        self.extend().await?;
        let now = Instant::now();
        let deployments = self.queue.host.startable_deployments();
        if deployments.is_empty() {
            self.queue.transfers.set_waiting(Vec::new());
            let pause = if self.in_flight.is_empty() { IDLE_PAUSE } else { EXTENSION_PERIOD };
            let until_expiry = expiry.map_or(pause, |expiry| expiry.saturating_duration_since(now));
            return Ok((WorkerState::Idle, pause.min(until_expiry.max(PAUSE))));
        }
        let is_draining = self.computation.spoke.lock().is_draining();
        if is_draining || self.unstored_until.is_some_and(|until| now < until) {
            // Another process computes them, or this one after its restart; or what is computed would be lost.
            self.queue.transfers.set_waiting(Vec::new());
            return Ok((WorkerState::Blocked, PAUSE));
        }
        let loads = self.capacities(now);
        self.start_own(&deployments, &loads, now).await?;
        if now.saturating_duration_since(self.backlogs_checked) >= BACKLOG_PERIOD {
            self.backlogs_checked = now;
            let groups = deployments.iter().flat_map(|name| self.transferable(name, &loads));
            self.queue.transfers.set_waiting(transfer::interleaved(groups.collect()));
        }
        self.start_transfers(now).await?;
        Ok((WorkerState::Blocked, PAUSE))
    }

    /// Starts the jobs for which the replicas of the region have capacity.
    async fn start_own(
        &mut self,
        deployments: &BTreeSet<String>,
        loads: &BTreeMap<String, JobCapacity>,
        now: Instant,
    ) -> Result<(), QueueError> {
        let has_replica = |deployment: &str| loads.get(deployment).is_some_and(|load| load.ready > 0);
        self.paused.retain(|deployment, pause| {
            let is_over = pause.is_over(has_replica(deployment), now);
            !is_over || (deployments.contains(deployment) && !has_replica(deployment))
        });
        for deployment in deployments {
            let pause = self.paused.get(deployment);
            if pause.is_some_and(|pause| !pause.is_over(has_replica(deployment), now)) {
                continue;
            }
            let under_way = self.inputs_in_flight(deployment, None);
            let free_inputs = pace::free_inputs(loads.get(deployment).unwrap_or(&ASLEEP), under_way);
            if free_inputs > 0 {
                if under_way == 0 {
                    self.queue.measure(deployment, |rate, now| rate.started(now));
                }
                let jobs = self.queue.host.take(deployment, free_inputs, self.identity).await?;
                jobs.into_iter().for_each(|job| self.start(job, TargetRegion::Local));
            }
        }
        Ok(())
    }

    /// Returns the jobs of a deployment that other regions may compute: none if they would not wait for too long in this region.
    fn transferable(&self, deployment: &str, loads: &BTreeMap<String, JobCapacity>) -> Vec<WaitingGroup> {
        let JobBacklog { bytes, oldest, groups } = self.queue.host.backlog(deployment);
        let capacity = loads.get(deployment).unwrap_or(&ASLEEP);
        let is_backlogged =
            transfer::is_backlogged(capacity, bytes / BYTES_PER_TOKEN, oldest, queue_host::now());
        if is_backlogged { groups } else { Vec::new() }
    }

    /// Starts the jobs of backlogged deployments that gateways wait for, paced by the capacity of the regions that they have selected.
    async fn start_transfers(&mut self, now: Instant) -> Result<(), QueueError> {
        let waiting = self.queue.transfers.waiting().borrow().clone();
        let deployments: BTreeSet<_> =
            waiting.iter().map(|waiting| waiting.group.deployment.as_str()).collect();
        self.targets_paused.retain(|(deployment, _), _| deployments.contains(deployment.as_str()));
        let mut free_tickets = BTreeMap::new();
        let demands = self.queue.transfers.demands();
        for (request, UnmetDemand { capacity, count }) in transfer::in_order(demands, &waiting) {
            let deployment = &request.group.deployment;
            let pause = self.targets_paused.get(&(deployment.clone(), request.target));
            if pause.is_some_and(|pause| !pause.is_over(false, now)) || capacity.ready == 0 {
                continue;
            }
            let free_tickets = free_tickets
                .entry(request.target)
                .or_insert_with(|| self.queue.transfers.free_tickets(request.target));
            let free_inputs =
                pace::free_inputs(&capacity, self.inputs_in_flight(deployment, Some(request.target)));
            let count = count.min(*free_tickets);
            if free_inputs == 0 || count == 0 {
                continue;
            }
            let taken = self
                .queue
                .host
                .take_for_transfer(&request.group, (count, free_inputs), self.identity)
                .await?;
            *free_tickets -= taken.len().min(*free_tickets);
            self.queue.transfers.met(&request, taken.len());
            for job in taken {
                self.start(job, TargetRegion::Remote(self.queue.transfers.clone(), request.clone()));
            }
        }
        Ok(())
    }

    /// Returns the inputs of a deployment's jobs in flight in the region of the queue, or in another one.
    fn inputs_in_flight(&self, deployment: &str, target: Option<RegionIndex>) -> u64 {
        let in_flight = self.in_flight.values();
        let in_flight = in_flight.filter(|job| job.deployment == deployment && job.target == target);
        in_flight.map(|job| job.inputs.max(1)).sum()
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

    fn start(&mut self, job: TakenJob, region: TargetRegion) {
        let target = match &region {
            TargetRegion::Local => None,
            TargetRegion::Remote(_, request) => Some(request.target),
        };
        let (id, token) = (job.id, job.token);
        let JobSpec { tenant, deployment, inputs, .. } = &job.job.spec;
        let (tenant, deployment, inputs) = (tenant.clone(), deployment.clone(), *inputs);
        let (computation, queue) = (self.computation.clone(), self.queue.clone());
        let trace = computation.traces.as_ref().map(|traces| traces.attempt(&job));
        let of_requests = trace.clone();
        let compute = async move {
            let trace = of_requests.as_deref();
            let Some(chunk) = job.job.spec.chunk else {
                let (name, body) = (job.id.to_string(), job.body.clone());
                let ended = computation.attempt(name, &job.job.spec, body, (&region, trace)).await;
                return ended.of_job(inputs);
            };
            let is_last = job.job.attempts >= queue.host.config().computation.attempts;
            match queue.host.chunk_work(chunk) {
                Some(work) => computation.compute_chunk(&job, work, (&region, trace), is_last).await,
                None => {
                    let reason = "the batch does not exist".to_owned();
                    attempt::rejected(ErrorCode::NotFound, reason).into()
                }
            }
        };
        let task = self.tasks.spawn(contained("job", compute));
        let job = JobInFlight { id, token, tenant, deployment, inputs, target, task, trace };
        self.in_flight.insert(job.task.id(), job);
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
        let mut computed: Vec<ComputedUsage> = Vec::with_capacity(ended.len());
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
            // After a panic, which counts as an attempt. An aborted job has another lease, so this has no effect.
            let end = end.unwrap_or_else(|| attempt::failed("the worker failed").into());
            let JobAttemptEnd { end, usage, is_gateway_lost } = end;
            let (outcome, reason) = outcome(&end);
            if let Some(trace) = &job.trace {
                let target = job.target.map(|target| &self.computation.catalogue.region(target).id);
                trace.ended(&self.queue, target, (!aborted).then_some(outcome));
            }
            if !aborted {
                JobAttemptEnded { id: job.id, outcome, reason }.record(&self.queue.metrics);
            }
            // A lost gateway says nothing about the region that it would have sent the request to.
            if !aborted && !is_gateway_lost {
                self.pace(&job, &end, &loads, now);
            }
            ends.push((job.id, job.token, end));
            let JobInFlight { tenant, deployment, target, .. } = job;
            computed.push(ComputedUsage { tenant, deployment, target, counts: usage });
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
                    let stored = ends.iter().zip(&computed).zip(changed).filter(|(_, changed)| *changed);
                    for (((_, _, end), computed), _) in stored {
                        if let ComputationEnd::Chunk(lines) = end {
                            count_lines(&self.queue, lines.completed, lines.failed);
                        }
                        self.queue.usage.count(computed);
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

    /// Adapts the pace to the end of an attempt: pauses without capacity, and the measured rate.
    fn pace(
        &mut self,
        job: &JobInFlight,
        end: &ComputationEnd,
        loads: &BTreeMap<String, JobCapacity>,
        now: Instant,
    ) {
        let retry_after = match end {
            ComputationEnd::Other(ComputeEnd::NoCapacity { retry_after, .. }) => Some(*retry_after),
            // At a replica of this region the job itself pauses. Another region may be the cause, and has more jobs.
            ComputationEnd::Other(ComputeEnd::Failed(_)) => job.target.map(|_| ERROR_PAUSE),
            ComputationEnd::Other(_) => None,
            ComputationEnd::Computed(_) | ComputationEnd::Chunk(_) => {
                self.queue.measure(&job.deployment, |rate, now| rate.completed(job.inputs, now));
                if let Some(target) = job.target {
                    self.targets_paused.remove(&(job.deployment.clone(), target));
                }
                None
            }
        };
        let Some(retry_after) = retry_after else { return };
        let has_replica =
            job.target.is_none() && loads.get(&job.deployment).is_some_and(|load| load.ready > 0);
        let deployment = job.deployment.clone();
        let pause = match job.target {
            None => self.paused.entry(deployment).or_insert_with(|| CapacityPause::new(now)),
            Some(target) => {
                self.targets_paused.entry((deployment, target)).or_insert_with(|| CapacityPause::new(now))
            }
        };
        pause.rejected(retry_after, has_replica, now);
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
    /// Makes one request of an attempt at a job, which may have a trace.
    pub(super) async fn attempt(
        &self,
        id: String,
        spec: &JobSpec,
        body: Bytes,
        (target, trace): (&TargetRegion, Option<&JobAttemptTrace>),
    ) -> JobRequestEnd {
        let mut stages = trace.map(JobAttemptTrace::request).unwrap_or_default();
        let ended = self.send(id, spec, body, target, &mut stages).await;
        if let Some(trace) = trace {
            let target = match target {
                TargetRegion::Local => None,
                TargetRegion::Remote(_, request) => Some(&self.catalogue.region(request.target).id),
            };
            trace.request_ended(&stages, target, &ended.end);
        }
        ended
    }

    /// Sends one request of a job, as the ingress forwards the request of a gateway, or offers it to another region.
    async fn send(
        &self,
        id: String,
        spec: &JobSpec,
        body: Bytes,
        target: &TargetRegion,
        stages: &mut IngressStages,
    ) -> JobRequestEnd {
        let Ok(deployment) = spec.deployment.parse::<DeploymentName>() else {
            let message = format!("`{}` is not the name of a deployment", spec.deployment);
            return attempt::rejected(ErrorCode::ModelNotFound, message).into();
        };
        // A residency policy that was narrowed since the submission applies to the job as well (invariant 1, Residency).
        if let Err(rejection) = self.residency.check_deployment_policy(&deployment) {
            return attempt::rejected(rejection.code, rejection.message).into();
        }
        let path = kind(spec.operation).computed_path();
        if let TargetRegion::Remote(transfers, request) = target {
            let traceparent = stages.trace().map(|request| request.context().traceparent());
            return transfers.compute(request.clone(), (id, traceparent), path, body).await;
        }
        // Here it is sent to replicas of this region, and to no others.
        let policy = self.region.as_str().parse().expect("the name of a region is a policy");
        let tokens = (body.len() as u64 / BYTES_PER_TOKEN).max(1);
        let request = ForwardedRequest {
            id,
            tenant: Some(spec.tenant.clone()),
            headers: ForwardedHeaders::of_job(&[(headers::PRIORITY, Priority::Bulk.as_str())]),
            path,
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
        match self.forwarder.forward(&request, stages).await {
            Err(rejection) => attempt::not_computed(rejection).into(),
            Ok(ReplicaResponse { response, attempt: replica, held: _ }) => {
                let end = attempt::received(&self.forwarder.upstream, response).await;
                replica.finish();
                end.into()
            }
        }
    }
}
