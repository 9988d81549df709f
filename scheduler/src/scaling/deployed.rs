//! One deployment in one region: how many replicas it should have, and what is remembered for that.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use regions::Deployment;
use regions::deployment::timetable;
use scheduler_core::scale::restarts;
use scheduler_core::scale::starts::StartTimes;
use scheduler_core::scale::step::OwnReplica;
use scheduler_core::scale::{ScaleDownBlocker, Scaler, ScalingDecision, ScalingObservation, ScalingReason};
use scheduler_core::spoke::{DeploymentDemand, MemberState};

use crate::actuator::{Deaths, ReplicaId};
use crate::agent::table::Followed;

/// For so long after another region's overflow came nobody is let go.
const OVERFLOW_LASTS: Duration = Duration::from_secs(10);

/// One deployment.
pub(super) struct Deployed {
    pub(super) deployment: Arc<Deployment>,
    /// The same with the model that is to replace the one that is served: its replicas are started beside the others.
    pub(super) next: Option<Arc<Deployment>>,
    pub(super) scaler: Scaler,
    /// It should not run here any longer.
    pub(super) retired: bool,
    /// So many should run, beside those that stop and those of `next`.
    pub(super) target: u32,
    /// So many of `next` should run, beside those that stop.
    pub(super) next_target: u32,
    pub(super) wanted: Option<ScalingDecision>,
    pub(super) starts: StartTimes,
    /// The last that was measured: with no replica there is nobody to ask.
    pub(super) speed: u64,
    pub(super) overflow: Option<Instant>,
    pub(super) deaths: Deaths,
    pub(super) died: Option<Instant>,
}

/// Who is counted when it is decided who comes and who goes: who was ordered and is not there yet is the first to be let off.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Id {
    There(ReplicaId),
    Ordered(u32),
}

impl Deployed {
    pub(super) fn new(deployment: Arc<Deployment>, now: Instant) -> Deployed {
        Deployed {
            scaler: Scaler::new(deployment.scaling.clone(), now),
            deployment,
            next: None,
            retired: false,
            target: 0,
            next_target: 0,
            wanted: None,
            starts: StartTimes::default(),
            speed: 0,
            overflow: None,
            deaths: Deaths::default(),
            died: None,
        }
    }

    /// Why none may be let go, if somebody knows better than traffic.
    fn brake(&self, hub: &Followed, now: Instant) -> Option<ScaleDownBlocker> {
        let lately =
            |at: Option<Instant>, lasts| at.is_some_and(|at| now.saturating_duration_since(at) < lasts);
        if lately(self.died, restarts::SCALE_DOWN_BLOCK) {
            Some(ScaleDownBlocker::ReplicaCrashed)
        } else if hub.hub_is_silent(now) {
            Some(ScaleDownBlocker::HubUnreachable)
        } else if lately(self.overflow, OVERFLOW_LASTS) {
            Some(ScaleDownBlocker::ReceivesSpillover)
        } else {
            None
        }
    }

    /// What the timetable says, in time for what it will say when somebody who is ordered now is ready.
    fn scheduled(&self, now: SystemTime) -> u32 {
        let at = |time: SystemTime| {
            let seconds = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
            timetable::floor(&self.deployment.scaling.timetable, seconds)
        };
        at(now).max(at(now + self.starts.p90()))
    }

    /// Whether what somebody was started for is not what is deployed now.
    pub(super) fn is_stale(&self, started: &Deployment) -> bool {
        started.model_spec() != self.deployment.model_spec()
    }

    /// Whether somebody was started for the model that is to replace the one that is served.
    pub(super) fn is_next(&self, started: &Deployment) -> bool {
        self.next.as_ref().is_some_and(|next| next.model_spec() == started.model_spec())
    }

    /// From now on this is to replace what is served. What was started for another one before counts with the rest: it is
    /// what is served now, or it is of no use any longer.
    pub(super) fn set_next(&mut self, next: Option<Arc<Deployment>>) {
        let spec = |it: &Option<Arc<Deployment>>| it.as_ref().map(|it| it.model_spec());
        if spec(&next) != spec(&self.next) {
            self.target += std::mem::take(&mut self.next_target);
        }
        self.next = next;
    }

    /// One of those that run, or should, is not counted any longer.
    pub(super) fn one_less(&mut self, started: &Deployment) {
        let target = if self.is_next(started) { &mut self.next_target } else { &mut self.target };
        *target = target.saturating_sub(1);
    }

    /// So many of the next model should run: as many as of the one that is served, and one at least, by which the hub learns
    /// its revision.
    pub(super) fn next_wanted(&self, wanted: ScalingDecision) -> u32 {
        if self.next.is_some() && !self.retired { wanted.replicas.max(1) } else { 0 }
    }

    /// How long it takes from an order that is not carried out yet.
    pub(super) fn start_from(&self, now: Instant) -> Duration {
        let pause = self.deaths.restart_at.map_or(Duration::ZERO, |at| at.saturating_duration_since(now));
        pause + self.starts.p90()
    }

    /// Those on their way, each with the time until it is ready.
    pub(super) fn ordered(&self, own: &[OwnReplica<Id>], now: Instant) -> Vec<Duration> {
        let on_the_way = own.iter().filter(|it| it.state == MemberState::Pending);
        let left = on_the_way.map(|it| match it.id {
            Id::There(_) => self.starts.remaining(now.saturating_duration_since(it.ordered_at)),
            Id::Ordered(_) => self.start_from(now),
        });
        left.collect()
    }

    pub(super) fn wants(
        &mut self,
        hub: &Followed,
        demand: DeploymentDemand,
        mut ordered: Vec<Duration>,
        rolls_out: bool,
        floor: u32,
        now: Instant,
    ) -> ScalingDecision {
        if self.retired {
            return ScalingDecision { replicas: 0, reason: ScalingReason::Idle };
        }
        if demand.speed > 0 {
            self.speed = demand.speed;
        }
        if demand.has_spillover {
            self.overflow = Some(now);
        }
        let mut ready = demand.ready;
        if rolls_out {
            // Those who are there twice, coming and going, are no more than are wanted.
            let most = self.wanted.map_or(ready, |wanted| wanted.replicas);
            ready = ready.min(most);
            ordered.truncate(most.saturating_sub(ready) as usize);
        }
        let seen = ScalingObservation {
            arrived: demand.arrived,
            backlog: demand.pending,
            in_flight: demand.in_flight,
            ready,
            provisioning: ordered,
            speed: self.speed,
            start: self.starts.p90(),
            floor: floor.max(self.scheduled(SystemTime::now())),
            blocker: self.brake(hub, now).or(rolls_out.then_some(ScaleDownBlocker::RolloutInProgress)),
        };
        self.scaler.tick(&seen, now)
    }
}
