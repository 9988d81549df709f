//! Indexes of the jobs of a queue, which follow from the jobs, and the reads that use them.

use super::DurableJobQueue;
use crate::job::{DurableJob, DurableJobId, JobDelivery, JobPhase, JobStatus, StoredRange, UnixMillis};
use std::collections::BTreeSet;

impl DurableJobQueue {
    /// Adds a job to the indexes.
    pub(super) fn index(&mut self, id: DurableJobId, job: &DurableJob) {
        // Lists have no chunks: a client sees its batches.
        if job.spec.chunk.is_none() {
            let groups = self.by_tenant.entry(job.spec.tenant.clone()).or_default();
            groups.entry(group(job)).or_default().insert(id);
        }
        for object in objects(job) {
            *self.objects.entry(object).or_default() += 1;
        }
        if job.expires() < UnixMillis::NEVER {
            self.expirations.insert((job.expires(), id));
        }
        if !job.is_finished() {
            self.unfinished.insert(id);
            let usage = self.usage.entry(job.spec.tenant.clone()).or_default();
            usage.jobs += 1;
            usage.bytes += job.spec.payload.length;
            usage.batch_tokens += job.spec.chunk.map_or(0, |chunk| chunk.tokens);
        }
        match &job.status {
            JobStatus::Queued { not_before } => self.pending.insert(id, job, *not_before),
            JobStatus::Running { lease } => {
                self.computing.insert((lease.until, id));
            }
            JobStatus::Finished { at, delivery, .. } => {
                self.finished.insert((*at, id));
                if let Some((since, due)) = due(delivery) {
                    self.deliveries.entry(job.spec.tenant.clone()).or_default().insert((due, id));
                    self.undelivered.insert((since, id));
                }
            }
        }
    }

    /// Removes a job from the indexes.
    pub(super) fn unindex(&mut self, id: DurableJobId, job: &DurableJob) {
        if let Some(groups) = self.by_tenant.get_mut(&job.spec.tenant) {
            let group = group(job);
            if let Some(ids) = groups.get_mut(&group) {
                ids.remove(&id);
                if ids.is_empty() {
                    groups.remove(&group);
                }
            }
            if groups.is_empty() {
                self.by_tenant.remove(&job.spec.tenant);
            }
        }
        for object in objects(job) {
            if let Some(count) = self.objects.get_mut(&object) {
                *count -= 1;
                if *count == 0 {
                    self.objects.remove(&object);
                }
            }
        }
        self.expirations.remove(&(job.expires(), id));
        self.unfinished.remove(&id);
        if !job.is_finished()
            && let Some(usage) = self.usage.get_mut(&job.spec.tenant)
        {
            usage.jobs -= 1;
            usage.bytes -= job.spec.payload.length;
            usage.batch_tokens -= job.spec.chunk.map_or(0, |chunk| chunk.tokens);
            if usage.jobs == 0 {
                self.usage.remove(&job.spec.tenant);
            }
        }
        match &job.status {
            JobStatus::Queued { not_before } => self.pending.remove(id, job, *not_before),
            JobStatus::Running { lease } => {
                self.computing.remove(&(lease.until, id));
            }
            JobStatus::Finished { at, delivery, .. } => {
                self.finished.remove(&(*at, id));
                if let Some((since, due)) = due(delivery) {
                    if let Some(times) = self.deliveries.get_mut(&job.spec.tenant) {
                        times.remove(&(due, id));
                        if times.is_empty() {
                            self.deliveries.remove(&job.spec.tenant);
                        }
                    }
                    self.undelivered.remove(&(since, id));
                }
            }
        }
    }

    /// Moves jobs whose pause after a failed attempt has ended to the jobs that can start.
    pub(crate) fn advance(&mut self, now: UnixMillis) {
        self.pending.advance(now, &self.jobs);
    }

    /// Returns jobs of a deployment that can start, in the order in which they should: tenants by their share of the
    /// work so far, the jobs of a tenant by deadline and submission.
    pub(crate) fn startable(&self, deployment: &str) -> impl Iterator<Item = (DurableJobId, u64)> + '_ {
        self.pending.startable(deployment)
    }

    /// Returns the inputs of a deployment's jobs that can start, without those whose worker has ended.
    pub(crate) fn waiting_inputs(&self, deployment: &str) -> u64 {
        self.pending.inputs(deployment)
    }

    /// Returns the deployments with jobs that can start, without those whose worker has ended.
    pub(crate) fn deployments(&self) -> impl Iterator<Item = &str> {
        self.pending.deployments()
    }

    /// Returns the jobs that are leased, or whose lease has ended without another one.
    pub(crate) fn leased(&self) -> impl Iterator<Item = (DurableJobId, &DurableJob)> {
        let ids = self.computing.iter().chain(self.deliveries.values().flatten()).map(|(_, id)| *id);
        ids.map(|id| (id, self.jobs[&id].as_ref())).filter(|(_, job)| job.lease().is_some())
    }

    /// Returns the jobs whose lease for computation has ended.
    pub(crate) fn abandoned(&self, now: UnixMillis) -> impl Iterator<Item = (DurableJobId, &DurableJob)> {
        due_by(&self.computing, now).map(|id| (id, self.jobs[&id].as_ref()))
    }

    /// Returns the tenants with a result to send now or later, each with the results to send now, earliest first.
    pub(crate) fn deliverable(
        &self,
        now: UnixMillis,
    ) -> impl Iterator<Item = (&str, impl Iterator<Item = (UnixMillis, DurableJobId)>)> {
        self.deliveries.iter().map(move |(tenant, times)| (tenant.as_str(), times_by(times, now)))
    }

    /// Returns the unfinished jobs that have expired.
    pub(crate) fn expired(&self, now: UnixMillis) -> impl Iterator<Item = DurableJobId> + '_ {
        due_by(&self.expirations, now)
    }

    /// Returns the jobs that were finished by this time.
    pub(crate) fn finished(&self, by: UnixMillis) -> impl Iterator<Item = (DurableJobId, &DurableJob)> {
        due_by(&self.finished, by).map(|id| (id, self.jobs[&id].as_ref()))
    }
}

/// Returns the group of the jobs of its tenant that a job belongs to.
fn group(job: &DurableJob) -> (JobPhase, String) {
    (JobPhase::of(job), job.spec.deployment.clone())
}

/// Returns the objects with the payload and the result of a job.
fn objects(job: &DurableJob) -> impl Iterator<Item = u64> {
    stored(job).map(|range| range.object)
}

/// Returns where the payload and the result of a job are stored.
pub(super) fn stored(job: &DurableJob) -> impl Iterator<Item = StoredRange> {
    let result = match &job.status {
        JobStatus::Finished { result, .. } => *result,
        _ => None,
    };
    [Some(job.spec.payload), result].into_iter().flatten()
}

/// Returns the beginning of a delivery, and the time at which it is due or can be taken over; none if it has ended.
fn due(delivery: &JobDelivery) -> Option<(UnixMillis, UnixMillis)> {
    match delivery {
        JobDelivery::Pending { progress, not_before } => Some((progress.since, *not_before)),
        JobDelivery::Sending { progress, lease } => Some((progress.since, lease.until)),
        JobDelivery::None
        | JobDelivery::Delivered { .. }
        | JobDelivery::Abandoned { .. }
        | JobDelivery::Stopped { .. } => None,
    }
}

/// Ids with a time up to `now`, earliest first.
fn due_by(
    times: &BTreeSet<(UnixMillis, DurableJobId)>,
    now: UnixMillis,
) -> impl Iterator<Item = DurableJobId> + '_ {
    times_by(times, now).map(|(_, id)| id)
}

/// Times up to `now` with their ids, earliest first.
fn times_by(
    times: &BTreeSet<(UnixMillis, DurableJobId)>,
    now: UnixMillis,
) -> impl Iterator<Item = (UnixMillis, DurableJobId)> + '_ {
    times.iter().copied().take_while(move |(time, _)| *time <= now)
}
