//! Jobs that wait, by deployment, priority and tenant.
//!
//! Tenants share a deployment by weighted fair queueing: each has a virtual time, which advances by the inputs of the
//! jobs that it starts, and the tenant with the earliest one is next. So a tenant with one job does not wait for the
//! million jobs of another. A tenant that was idle begins at the current virtual time if its own is earlier, so it cannot
//! save up a share; if its own is later, it is kept, so a tenant that submits one job after another has no advantage.
//! (Goyal, Vin, Cheng: Start-time fair queueing, SIGCOMM 1996.)

use crate::job::{DurableJob, DurableJobId, UnixMillis};
use crate::ranked::RankedSet;
use regions::Priority;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Order of the jobs of a tenant: by deadline, then by submission.
type PendingKey = (UnixMillis, u64, DurableJobId);

/// Position of a job that waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct JobPosition {
    /// Number of jobs before it: of the same tenant, deployment and priority, and the interactive jobs of the tenant.
    pub jobs: u64,
    /// Inputs of these jobs.
    pub inputs: u64,
    /// Number of tenants that share the deployment.
    pub tenants: u64,
}

#[derive(Debug, Clone, Default)]
pub(super) struct PendingJobs {
    deployments: BTreeMap<String, DeploymentJobs>,
    /// Jobs that wait for the end of a pause.
    paused: BTreeSet<(UnixMillis, DurableJobId)>,
}

#[derive(Debug, Clone, Default)]
struct DeploymentJobs {
    interactive: FairJobQueue,
    bulk: FairJobQueue,
}

/// Jobs of one deployment and priority.
#[derive(Debug, Clone, Default)]
struct FairJobQueue {
    tenants: BTreeMap<String, TenantQueue>,
    /// Tenants with jobs by virtual time.
    order: BTreeSet<(u64, String)>,
    /// Tenants without jobs whose virtual time is later than the current one.
    idle: BTreeSet<(u64, String)>,
    /// Virtual time of the job that started last.
    now: u64,
}

#[derive(Debug, Clone, Default)]
struct TenantQueue {
    jobs: RankedSet<PendingKey>,
    virtual_time: u64,
}

impl PendingJobs {
    pub(super) fn insert(&mut self, id: DurableJobId, job: &DurableJob, not_before: UnixMillis) {
        if not_before > UnixMillis(0) {
            self.paused.insert((not_before, id));
        } else {
            self.queue_mut(job).insert(id, job);
        }
    }

    pub(super) fn remove(&mut self, id: DurableJobId, job: &DurableJob, not_before: UnixMillis) {
        if !self.paused.remove(&(not_before, id)) {
            self.queue_mut(job).remove(id, job);
            self.forget_empty(&job.spec.deployment);
        }
    }

    /// Moves the jobs whose pause has ended to those that can start.
    pub(super) fn advance(&mut self, now: UnixMillis, jobs: &BTreeMap<DurableJobId, Arc<DurableJob>>) {
        while let Some((time, id)) = self.paused.first().copied()
            && time <= now
        {
            self.paused.remove(&(time, id));
            if let Some(job) = jobs.get(&id) {
                self.queue_mut(job).insert(id, job);
            }
        }
    }

    /// Counts a started job as work of its tenant.
    pub(super) fn charge(&mut self, job: &DurableJob) {
        self.queue_mut(job).charge(job);
        self.forget_empty(&job.spec.deployment);
    }

    pub(super) fn position(&self, id: DurableJobId, job: &DurableJob) -> Option<JobPosition> {
        let queue = self.deployments.get(&job.spec.deployment)?;
        let own = queue.of(job.spec.priority).tenants.get(&job.spec.tenant)?;
        let mut before = own.jobs.rank(&key(id, job));
        if job.spec.priority == Priority::Bulk
            && let Some(first) = queue.interactive.tenants.get(&job.spec.tenant)
        {
            before.keys += first.jobs.total().keys;
            before.weight += first.jobs.total().weight;
        }
        let tenants = queue.of(job.spec.priority).order.len() as u64;
        Some(JobPosition { jobs: before.keys, inputs: before.weight, tenants })
    }

    pub(super) fn startable(&self, deployment: &str) -> impl Iterator<Item = (DurableJobId, u64)> + '_ {
        let queue = self.deployments.get(deployment);
        queue.into_iter().flat_map(|queue| queue.interactive.in_order().chain(queue.bulk.in_order()))
    }

    pub(super) fn inputs(&self, deployment: &str) -> u64 {
        let queues = self.deployments.get(deployment).into_iter();
        let tenants = queues.flat_map(|queue| [&queue.interactive, &queue.bulk]);
        tenants.flat_map(|queue| queue.tenants.values()).map(|tenant| tenant.jobs.total().weight).sum()
    }

    pub(super) fn deployments(&self) -> impl Iterator<Item = &str> {
        let with_jobs = self
            .deployments
            .iter()
            .filter(|(_, jobs)| [&jobs.interactive, &jobs.bulk].iter().any(|queue| !queue.is_empty()));
        with_jobs.map(|(name, _)| name.as_str())
    }

    fn queue_mut(&mut self, job: &DurableJob) -> &mut FairJobQueue {
        let queue = self.deployments.entry(job.spec.deployment.clone()).or_default();
        match job.spec.priority {
            Priority::Interactive => &mut queue.interactive,
            Priority::Bulk => &mut queue.bulk,
        }
    }

    fn forget_empty(&mut self, deployment: &str) {
        let is_empty = |queue: &DeploymentJobs| queue.interactive.is_empty() && queue.bulk.is_empty();
        if self.deployments.get(deployment).is_some_and(is_empty) {
            self.deployments.remove(deployment);
        }
    }
}

impl DeploymentJobs {
    fn of(&self, priority: Priority) -> &FairJobQueue {
        match priority {
            Priority::Interactive => &self.interactive,
            Priority::Bulk => &self.bulk,
        }
    }
}

impl FairJobQueue {
    fn is_empty(&self) -> bool {
        self.order.is_empty()
    }

    fn insert(&mut self, id: DurableJobId, job: &DurableJob) {
        let (name, now) = (&job.spec.tenant, self.now);
        let tenant = self.tenants.entry(name.clone()).or_default();
        if tenant.jobs.total().keys == 0 {
            self.idle.remove(&(tenant.virtual_time, name.clone()));
            tenant.virtual_time = tenant.virtual_time.max(now);
            self.order.insert((tenant.virtual_time, name.clone()));
        }
        tenant.jobs.insert(key(id, job), job.spec.inputs);
    }

    fn remove(&mut self, id: DurableJobId, job: &DurableJob) {
        let name = &job.spec.tenant;
        let Some(tenant) = self.tenants.get_mut(name) else { return };
        if tenant.jobs.remove(&key(id, job)) && tenant.jobs.total().keys == 0 {
            self.order.remove(&(tenant.virtual_time, name.clone()));
            self.idle.insert((tenant.virtual_time, name.clone()));
        }
    }

    /// Advances the virtual time of a tenant by a job that has been removed because it starts.
    fn charge(&mut self, job: &DurableJob) {
        let name = &job.spec.tenant;
        let Some(tenant) = self.tenants.get_mut(name) else { return };
        let of = if tenant.jobs.total().keys == 0 { &mut self.idle } else { &mut self.order };
        of.remove(&(tenant.virtual_time, name.clone()));
        self.now = self.now.max(tenant.virtual_time);
        tenant.virtual_time = tenant.virtual_time.saturating_add(job.spec.inputs.max(1));
        of.insert((tenant.virtual_time, name.clone()));
        while self.idle.first().is_some_and(|(time, _)| *time <= self.now)
            && let Some((_, name)) = self.idle.pop_first()
        {
            self.tenants.remove(&name);
        }
    }

    /// Returns the jobs in the order in which they start if nothing is added.
    fn in_order(&self) -> impl Iterator<Item = (DurableJobId, u64)> + '_ {
        let mut next: BTreeMap<(u64, &str), _> = BTreeMap::new();
        for (time, name) in &self.order {
            let mut jobs = self.tenants[name].jobs.iter();
            if let Some(first) = jobs.next() {
                next.insert((*time, name.as_str()), (first, jobs));
            }
        }
        std::iter::from_fn(move || {
            let ((time, name), (((_, _, id), inputs), mut jobs)) = next.pop_first()?;
            if let Some(following) = jobs.next() {
                next.insert((time.saturating_add(inputs.max(1)), name), (following, jobs));
            }
            Some((id, inputs))
        })
    }
}

fn key(id: DurableJobId, job: &DurableJob) -> PendingKey {
    (job.spec.deadline.unwrap_or(UnixMillis::NEVER), job.sequence, id)
}
