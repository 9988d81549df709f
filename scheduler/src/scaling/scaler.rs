//! Scaling state of one deployment in one region.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use regions::Deployment;
use regions::deployment::timetable;
use scheduler_api::start_failure::{DeploymentFailures, FailedModel};
use scheduler_core::scale::restarts;
use scheduler_core::scale::start_failures::{FAILED_STARTS, StartFailures};
use scheduler_core::scale::starts::StartTimes;
use scheduler_core::scale::step::OwnReplica;
use scheduler_core::scale::{ScaleDownBlocker, Scaler, ScalingDecision, ScalingObservation, ScalingReason};
use scheduler_core::spoke::{DeploymentDemand, MemberState};

use crate::actuator::{Crashes, EndedStarts, ModelKey, ReplicaId, model_key};
use crate::agent::table::FollowedTable;

/// Time after the last request that spilled over from another region during which no replica is terminated.
const OVERFLOW_HOLD: Duration = Duration::from_secs(10);

/// Deployment in the region, with its replica counts.
pub(super) struct DeploymentScaler {
    pub(super) deployment: Arc<Deployment>,
    /// The deployment with its next model, whose replicas are started beside the present ones.
    pub(super) next: Option<Arc<Deployment>>,
    pub(super) scaler: Scaler,
    /// The deployment should no longer run in this region.
    pub(super) retired: bool,
    /// Number of replicas that should run, without those that are stopping and those of `next`.
    pub(super) target: u32,
    /// Number of replicas of `next` that should run, without those that are stopping.
    pub(super) next_target: u32,
    pub(super) desired: Option<ScalingDecision>,
    pub(super) starts: StartTimes,
    /// Last measured throughput; without a replica there is no present value.
    pub(super) speed: u64,
    pub(super) overflow: Option<Instant>,
    pub(super) crashes: Crashes,
    pub(super) crashed_at: Option<Instant>,
    /// Failed starts of the served model, and of `next`.
    pub(super) served_starts: ModelStarts,
    pub(super) next_starts: ModelStarts,
    /// Reason for which replicas of either model are not started before other ones end.
    pub(super) waiting: Option<String>,
}

/// Failed starts of one model.
#[derive(Debug, Default)]
pub(super) struct ModelStarts {
    pub(super) failures: StartFailures,
    /// Number of the ended starts that are recorded.
    recorded: u64,
}

impl ModelStarts {
    /// Records the starts that have ended since the last call.
    fn record(&mut self, ended: Option<&EndedStarts>) {
        let Some(EndedStarts { count, last }) = ended else { return };
        let new = count.saturating_sub(self.recorded).min(FAILED_STARTS as u64);
        (0..new).for_each(|_| self.failures.start_ended(last.clone()));
        self.recorded = *count;
    }
}

/// Replica in a scaling decision. An ordered replica that has not been started sorts last and is cancelled first.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum ReplicaSlot {
    Existing(ReplicaId),
    Ordered(u32),
}

impl DeploymentScaler {
    pub(super) fn new(deployment: Arc<Deployment>, now: Instant) -> DeploymentScaler {
        DeploymentScaler {
            scaler: Scaler::new(deployment.scaling.clone(), now),
            deployment,
            next: None,
            retired: false,
            target: 0,
            next_target: 0,
            desired: None,
            starts: StartTimes::default(),
            speed: 0,
            overflow: None,
            crashes: Crashes::default(),
            crashed_at: None,
            served_starts: ModelStarts::default(),
            next_starts: ModelStarts::default(),
            waiting: None,
        }
    }

    /// Returns the reason that forbids scaling down, if any.
    fn blocker(&self, hub: &FollowedTable, now: Instant) -> Option<ScaleDownBlocker> {
        let within =
            |at: Option<Instant>, lasts| at.is_some_and(|at| now.saturating_duration_since(at) < lasts);
        if within(self.crashed_at, restarts::SCALE_DOWN_BLOCK) {
            Some(ScaleDownBlocker::ReplicaCrashed)
        } else if hub.hub_is_silent(now) {
            Some(ScaleDownBlocker::HubUnreachable)
        } else if within(self.overflow, OVERFLOW_HOLD) {
            Some(ScaleDownBlocker::ReceivesSpillover)
        } else {
            None
        }
    }

    /// Returns the replicas scheduled by the timetable, both now and at the time when a replica started now becomes
    /// ready.
    fn scheduled(&self, now: SystemTime) -> u32 {
        let at = |time: SystemTime| {
            let seconds = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
            timetable::scheduled_min(&self.deployment.scaling.timetable, seconds)
        };
        at(now).max(at(now + self.starts.p90()))
    }

    /// Returns whether a replica was started for another model than the deployed one.
    pub(super) fn is_stale(&self, started: &Deployment) -> bool {
        started.model_spec() != self.deployment.model_spec()
    }

    /// Returns whether a replica was started for the next model.
    pub(super) fn is_next(&self, started: &Deployment) -> bool {
        self.next.as_ref().is_some_and(|next| next.model_spec() == started.model_spec())
    }

    /// Sets the deployment. Another model begins without failed starts, unless it was the next one.
    pub(super) fn set_deployment(&mut self, deployment: Arc<Deployment>) {
        if deployment.model_spec() != self.deployment.model_spec() {
            let next = std::mem::take(&mut self.next_starts);
            self.served_starts = if self.is_next(&deployment) { next } else { ModelStarts::default() };
        }
        self.deployment = deployment;
    }

    /// Records the starts that have ended before readiness.
    pub(super) fn record_ended_starts(&mut self, ended: &BTreeMap<ModelKey, EndedStarts>) {
        self.served_starts.record(ended.get(&model_key(&self.deployment)));
        if let Some(next) = &self.next {
            self.next_starts.record(ended.get(&model_key(next)));
        }
    }

    /// Records the reasons for which replicas wait, by deployment and model.
    pub(super) fn record_waiting(&mut self, waiting: &BTreeMap<ModelKey, String>) {
        let of = |deployment: &Deployment| waiting.get(&model_key(deployment)).cloned();
        self.waiting = of(&self.deployment).or_else(|| of(self.next.as_ref()?));
    }

    /// Forgets the failed starts of both models, and not that they are recorded.
    pub(super) fn forget_failures(&mut self) {
        for starts in [&mut self.served_starts, &mut self.next_starts] {
            starts.failures = StartFailures::default();
        }
    }

    /// Returns the models of which no replica can start, as of the last evaluation, and the reason for which replicas wait.
    pub(super) fn failures(&self) -> DeploymentFailures {
        let failed = |deployment: &Deployment, starts: &ModelStarts| {
            Some(FailedModel::of(deployment, starts.failures.failed()?.clone()))
        };
        DeploymentFailures {
            served: failed(&self.deployment, &self.served_starts),
            next: self.next.as_ref().and_then(|next| failed(next, &self.next_starts)),
            waiting: self.waiting.clone(),
        }
    }

    /// Sets the next model. Replicas that were started for the previous next model count with the others: that model is
    /// either served now, or no longer needed.
    pub(super) fn set_next(&mut self, next: Option<Arc<Deployment>>) {
        let spec = |it: &Option<Arc<Deployment>>| it.as_ref().map(|it| it.model_spec());
        if spec(&next) != spec(&self.next) {
            self.target += std::mem::take(&mut self.next_target);
            self.next_starts = ModelStarts::default();
        }
        self.next = next;
    }

    /// Lowers the target for a replica that no longer counts.
    pub(super) fn decrement_target(&mut self, started: &Deployment) {
        let target = if self.is_next(started) { &mut self.next_target } else { &mut self.target };
        *target = target.saturating_sub(1);
    }

    /// Returns the desired number of replicas of the next model: as many as of the served one, and at least one, from
    /// which the hub learns the revision.
    pub(super) fn next_desired(&self, desired: ScalingDecision) -> u32 {
        if self.next.is_some() && !self.retired { desired.replicas.max(1) } else { 0 }
    }

    /// Returns the time until a replica ordered now is ready.
    pub(super) fn start_from(&self, now: Instant) -> Duration {
        let pause = self.crashes.restart_at.map_or(Duration::ZERO, |at| at.saturating_duration_since(now));
        pause + self.starts.p90()
    }

    /// Returns the remaining start time of each provisioning replica.
    pub(super) fn provisioning(&self, own: &[OwnReplica<ReplicaSlot>], now: Instant) -> Vec<Duration> {
        let provisioning = own.iter().filter(|it| it.state == MemberState::Pending);
        let left = provisioning.map(|it| match it.id {
            ReplicaSlot::Existing(_) => self.starts.remaining(now.saturating_duration_since(it.ordered_at)),
            ReplicaSlot::Ordered(_) => self.start_from(now),
        });
        left.collect()
    }

    pub(super) fn decide(
        &mut self,
        hub: &FollowedTable,
        demand: DeploymentDemand,
        mut ordered: Vec<Duration>,
        rolls_out: bool,
        floor: u32,
        now: Instant,
    ) -> ScalingDecision {
        if self.retired {
            return ScalingDecision { replicas: 0, reason: ScalingReason::Idle };
        }
        // Gateways send no requests for a failed deployment, so none would cause another start.
        let floor = floor.max(u32::from(self.served_starts.failures.failed().is_some()));
        if demand.speed > 0 {
            self.speed = demand.speed;
        }
        if demand.has_spillover {
            self.overflow = Some(now);
        }
        let mut ready = demand.ready;
        if rolls_out {
            // Replicas that exist twice during a rollout count once.
            let most = self.desired.map_or(ready, |desired| desired.replicas);
            ready = ready.min(most);
            ordered.truncate(most.saturating_sub(ready) as usize);
        }
        let observation = ScalingObservation {
            arrived: demand.arrived,
            backlog: demand.pending,
            in_flight: demand.in_flight,
            ready,
            provisioning: ordered,
            speed: self.speed,
            start: self.starts.p90(),
            floor: floor.max(self.scheduled(SystemTime::now())),
            blocker: self.blocker(hub, now).or(rolls_out.then_some(ScaleDownBlocker::RolloutInProgress)),
        };
        self.scaler.tick(&observation, now)
    }
}

#[cfg(test)]
mod tests {
    use regions::{Catalogue, parse_deployments};
    use replica_api::start_failure::{StartFailure, StartFailureReport};
    use scheduler_core::scale::start_failures::EndedStart;

    use super::*;

    #[test]
    fn forgotten_failures_are_not_recorded_again() {
        let text = "[[deployment]]\nname = \"a\"\ntask = \"embed\"\nmodel = \"m\"\nengine = { kind = \"cpu\", precision = \"f32\" }\n";
        let deployment = Arc::new(parse_deployments(text, &Catalogue::builtin()).unwrap().remove(0));
        let now = Instant::now();
        let mut scaler = DeploymentScaler::new(deployment.clone(), now);
        let failure = StartFailureReport::new(StartFailure::CrashLoop, "it ends");
        let last = EndedStart { at: now, lasted: Duration::ZERO, failure };
        let ended = [(model_key(&deployment), EndedStarts { count: 3, last })].into();
        scaler.record_ended_starts(&ended);
        scaler.served_starts.failures.observe([], now);
        assert!(scaler.failures().served.is_some());
        scaler.forget_failures();
        scaler.record_ended_starts(&ended);
        scaler.served_starts.failures.observe([], now);
        assert!(scaler.failures().is_empty());
        let waiting = "no free device: 1 of 1 in use".to_owned();
        scaler.record_waiting(&[(model_key(&deployment), waiting.clone())].into());
        assert_eq!(scaler.failures().waiting, Some(waiting));
        scaler.record_waiting(&BTreeMap::new());
        assert!(scaler.failures().is_empty());
    }
}
