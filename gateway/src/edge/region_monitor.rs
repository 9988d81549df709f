//! State of all regions, shared between the reports that update it and the requests that are routed by it.
//!
//! [`RegionStates`] and `gateway_core` decide. This module adds the lock, the clock, the random draws, and the notification of
//! requests that wait for a region whose health has worsened. The lock is held for one decision at a time and never across an
//! await.

use super::region_states::{RegionStates, RoutingContext};
use crate::circuits::random_draw;
use crate::events::{InstanceHealthWorsened, RegionHealthWorsened};
use gateway_core::circuit::Permille;
use gateway_core::health::{HealthChange, TICK_PERIOD_MAX};
use gateway_core::instances::InstanceIndex;
use gateway_core::outcome::AttemptFailure;
use gateway_core::outlier::{DeadlineSetBy, OutlierEvidence, UpstreamAction, evidence};
use gateway_core::plan::{ExpiredTimer, RequestPlan, Step};
use gateway_core::targets::{InFlightRequest, TargetStatus};
use rand::Rng;
use regions::HostPort;
use regions::catalogue::Catalogue;
use regions::geography::GeoPoint;
use regions::health::Health;
use regions::id::InstanceName;
use regions::set::RegionIndex;
use std::sync::Arc;
use std::time::{Duration, Instant};
use supervision::{Mutex, MutexGuard};
use tokio::sync::watch;

/// Interval of the check for silent regions: half of the maximum.
const SILENCE_CHECK_PERIOD: Duration = TICK_PERIOD_MAX.checked_div(2).expect("two is not zero");

/// State of all regions with the notification of worsened health.
pub(crate) struct RegionMonitor {
    states: Mutex<RegionStates>,
    health_changes: watch::Sender<()>,
}

/// Next step of a request plan. An attempt to be sent counts as in flight from the same moment, so that two requests cannot take
/// the last slot of a region.
pub(crate) struct NextStep<'a> {
    pub(crate) step: Step,
    pub(crate) in_flight: Option<InFlight<'a>>,
}

impl NextStep<'_> {
    /// Continue to wait.
    pub(crate) const WAIT: NextStep<'static> = NextStep { step: Step::Wait, in_flight: None };
}

/// Returns three independent draws for three independent decisions, from one random number. With a shared draw, the requests
/// that stay in a region from which many spill over would all have a high draw, and none of them would be sent to a region
/// with a low traffic share.
pub(crate) fn random_draws() -> [Permille; 3] {
    let number: u32 = rand::rng().random_range(0..1_000_000_000);
    [number / 1_000_000, number / 1000 % 1000, number % 1000]
        .map(|part| Permille::new(u16::try_from(part).expect("less than a thousand")))
}

impl RegionMonitor {
    pub(crate) fn new(location: GeoPoint, catalogue: &Arc<Catalogue>) -> RegionMonitor {
        let states = RegionStates::new(location, catalogue, Instant::now());
        RegionMonitor { states: Mutex::new(states), health_changes: watch::Sender::new(()) }
    }

    pub(crate) fn states(&self) -> MutexGuard<'_, RegionStates> {
        self.states.lock()
    }

    /// Returns the circuit breaker state of each region; for operators.
    pub(crate) fn circuit_states(&self) -> Vec<TargetStatus<RegionIndex>> {
        self.states().targets.states(Instant::now())
    }

    /// Returns a receiver that is notified when the health of a region worsens.
    pub(crate) fn subscribe(&self) -> watch::Receiver<()> {
        self.health_changes.subscribe()
    }

    /// Returns the first step of a plan.
    pub(crate) fn start(&self, plan: &mut RequestPlan, routing: &RoutingContext<'_>) -> NextStep<'_> {
        let now = Instant::now();
        let states = &mut *self.states();
        let step = states.decide(routing, now, |view, budgets| plan.start(view, budgets, now));
        self.next_step(states, step, routing, now)
    }

    fn next_step(
        &self,
        states: &mut RegionStates,
        step: Step,
        routing: &RoutingContext<'_>,
        now: Instant,
    ) -> NextStep<'_> {
        let in_flight = match step {
            Step::Send { region, instance, .. } => {
                let queue_wait = states.queue_wait(region, routing);
                let request = Some(states.targets.began(region, now));
                let instance = instance.map(|index| (index, states.instances.began(index, now)));
                let routed = instance.and_then(|(index, _)| states.instances.get(index));
                let spoke = routed.map(|(name, address)| (name.clone(), address.clone()));
                Some(InFlight { monitor: self, region, instance, spoke, queue_wait, request })
            }
            Step::Wait
            | Step::RelayResponse
            | Step::NoRegionReachable
            | Step::RegionFull(_)
            | Step::ReceiptUnavailable
            | Step::DeadlineExceeded => None,
        };
        NextStep { step, in_flight }
    }

    /// Records the response to an attempt, with `status` and after `elapsed`.
    pub(crate) fn response_received(
        &self,
        plan: &mut RequestPlan,
        attempt: InFlight<'_>,
        routing: &RoutingContext<'_>,
        status: u16,
        elapsed: Duration,
    ) {
        let now = Instant::now();
        let (region, instance) = (attempt.region(), attempt.instance());
        let states = &mut *self.states();
        states.fleet.responded(region, now);
        states.budgets.retry.succeeded();
        let is_before_timeout = plan.responded(region);
        let mut action = UpstreamAction::Responded { status };
        let mut measured = None;
        // An error response is fast in any region and says nothing about the time of the computation.
        if (200..300).contains(&status) && routing.uses_engine {
            let (deployment, size) = (routing.deployment, routing.size);
            // Time in the queue does not make a region slow.
            let computed = elapsed.saturating_sub(attempt.queue_wait);
            measured = Some(computed);
            if states.targets.is_too_slow_for_probe(region, deployment, size, computed, now) {
                action = UpstreamAction::RespondedSlowlyToProbe;
            }
            states.targets.record_latency(region, deployment, size, elapsed, now);
        }
        if let Some(instance) = instance {
            states.instances.responded(instance, measured, now);
        }
        if is_before_timeout {
            let evidence = evidence(DeadlineSetBy::Measurement, action);
            states.record_evidence(region, instance, evidence, random_draw(), now);
        }
        attempt.finish(states, now);
    }

    /// Records that an attempt lost against a hedged attempt, which began later.
    pub(crate) fn hedge_won(&self, attempt: &InFlight<'_>) {
        if let Some(request) = &attempt.request {
            self.states().targets.hedge_won(request, random_draw(), Instant::now());
        }
    }

    /// Records a failed attempt and returns the next step of the plan. `status` is that of an error response with the remedy
    /// "elsewhere".
    pub(crate) fn attempt_failed(
        &self,
        plan: &mut RequestPlan,
        attempt: InFlight<'_>,
        failure: AttemptFailure,
        status: Option<u16>,
        routing: &RoutingContext<'_>,
    ) -> NextStep<'_> {
        let now = Instant::now();
        let (region, instance) = (attempt.region(), attempt.instance());
        let states = &mut *self.states();
        let evidence = failure.evidence(status);
        if evidence.is_some_and(OutlierEvidence::is_failure) {
            let is_of_instance = states.is_fault_of_instance(instance, now);
            let worse = instance.filter(|instance| states.instances.failed(*instance, now));
            self.instances_worsened(states, worse, now);
            let changes = if is_of_instance { None } else { states.fleet.failed(region) };
            self.health_worsened(states, changes, now);
        }
        states.record_evidence(region, instance, evidence, random_draw(), now);
        attempt.finish(states, now);
        // A connection that breaks because its region is down belongs to the evacuation and is not a retry.
        let is_down = states.fleet.health(region, routing.deployment) == Health::Down;
        let is_connection_failure =
            matches!(failure, AttemptFailure::Unreachable | AttemptFailure::WrongPeer);
        let failure = if is_connection_failure && is_down { AttemptFailure::RegionDown } else { failure };
        let step =
            states.decide(routing, now, |view, budgets| plan.failed(region, failure, view, budgets, now));
        self.next_step(states, step, routing, now)
    }

    /// Handles the expired timers of a plan and returns its next step.
    pub(crate) fn timers_expired(
        &self,
        plan: &mut RequestPlan,
        routing: &RoutingContext<'_>,
    ) -> NextStep<'_> {
        let now = Instant::now();
        let states = &mut *self.states();
        while let Some(due) = plan.expired_timer(now) {
            if let ExpiredTimer::FirstByte(region) = due {
                // A cold start that takes longer than reported is not a failure, nor is a queue that has grown since the request
                // was sent.
                if let Some(deadline) = states.first_byte_deadline(region, routing, plan.sent_at(region), now)
                {
                    plan.extend_first_byte_timeout(region, deadline);
                    continue;
                }
                let evidence = AttemptFailure::FirstByteTimeout.evidence(None);
                states.record_evidence(region, plan.instance_of(region), evidence, random_draw(), now);
            }
            let step = states.decide(routing, now, |view, budgets| match due {
                ExpiredTimer::Deadline => Step::DeadlineExceeded,
                ExpiredTimer::FirstByte(region) => plan.first_byte_timed_out(region, view, budgets, now),
                ExpiredTimer::Hedge => plan.hedge(view, budgets, now),
            });
            if step != Step::Wait {
                return self.next_step(states, step, routing, now);
            }
        }
        NextStep::WAIT
    }

    /// Returns whether a request in flight to `region` should abandon that attempt, because of the health of the
    /// region or of the instance there.
    pub(crate) fn should_abandon(
        &self,
        plan: &RequestPlan,
        region: RegionIndex,
        routing: &RoutingContext<'_>,
    ) -> bool {
        let now = Instant::now();
        let states = &mut *self.states();
        let health = states.fleet.health(region, routing.deployment);
        let lost = plan.instance_of(region).filter(|it| states.instances.health(*it, now) >= Health::Suspect);
        states.decide(routing, now, |view, _| {
            plan.should_abandon(health, view)
                || lost.is_some_and(|instance| plan.should_abandon_instance(instance, view))
        })
    }

    /// Detects regions whose reports have stopped; never returns.
    pub(crate) async fn detect_silent_regions(self: Arc<RegionMonitor>) {
        let mut period = tokio::time::interval(SILENCE_CHECK_PERIOD);
        period.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            period.tick().await;
            let now = Instant::now();
            let states = &mut *self.states();
            let changes = states.fleet.tick(now);
            self.health_worsened(states, changes, now);
            let worse = states.instances.tick(now);
            self.instances_worsened(states, worse, now);
        }
    }

    /// Lets the requests in flight to lost instances continue at others of their region. Without another one, the
    /// health of the region decides.
    fn instances_worsened(
        &self,
        states: &mut RegionStates,
        worse: impl IntoIterator<Item = InstanceIndex>,
        now: Instant,
    ) {
        for instance in worse {
            let region = instance.region();
            if states.instances.has_sound_alternative(instance, now)
                && let Some((name, _)) = states.instances.get(instance)
            {
                let health = states.instances.health(instance, now);
                let id = &states.catalogue.region(region).id;
                InstanceHealthWorsened { region: id, instance: name, health }.record();
                let in_flight = states.instances.in_flight(instance);
                states.budgets.evacuate(region, in_flight, now);
                self.health_changes.send_replace(());
            }
        }
    }

    fn health_worsened(
        &self,
        states: &mut RegionStates,
        changes: impl IntoIterator<Item = HealthChange>,
        now: Instant,
    ) {
        for HealthChange { region, health } in changes {
            states.budgets.evacuate(region, states.targets.in_flight(region), now);
            RegionHealthWorsened { region: &states.catalogue.region(region).id, health }.record();
            self.health_changes.send_replace(());
        }
    }
}

/// Attempt in flight to a region. It ends when this is dropped, also when the client disconnects, or when its outcome has been
/// recorded, and never before that: a probe of an ejected region that ends without an outcome frees the slot for another probe.
pub(crate) struct InFlight<'a> {
    monitor: &'a RegionMonitor,
    region: RegionIndex,
    /// Its instance, and whether this request is the probe of the instance.
    instance: Option<(InstanceIndex, bool)>,
    /// Name and address of that instance, until the attempt is sent.
    spoke: Option<(InstanceName, HostPort)>,
    /// Expected wait in the queue of the region when it was sent.
    queue_wait: Duration,
    /// Registration as in flight; `None` once ended.
    request: Option<InFlightRequest<RegionIndex>>,
}

impl InFlight<'_> {
    pub(crate) fn region(&self) -> RegionIndex {
        self.region
    }

    pub(crate) fn instance(&self) -> Option<InstanceIndex> {
        self.instance.map(|(instance, _)| instance)
    }

    /// Takes the name and the address of the instance.
    pub(crate) fn take_spoke(&mut self) -> Option<(InstanceName, HostPort)> {
        self.spoke.take()
    }

    /// Ends the attempt after its outcome was recorded, under the held lock.
    fn finish(mut self, states: &mut RegionStates, now: Instant) {
        self.end(states, now);
    }

    fn end(&mut self, states: &mut RegionStates, now: Instant) {
        if let Some(request) = self.request.take() {
            states.targets.ended(&request, now);
            if let Some((instance, is_probe)) = self.instance {
                states.instances.ended(instance, is_probe, now);
            }
        }
    }
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        if self.request.is_some() {
            let monitor = self.monitor;
            self.end(&mut monitor.states(), Instant::now());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gateway_core::circuit::CONSECUTIVE_FAILURES_MAX;
    use std::fs::File;
    use std::io::{Read, Seek};

    #[test]
    fn events_of_a_region_have_its_name() {
        let catalogue = Arc::new(Catalogue::builtin());
        let [region, other] =
            ["aws/us-east-1", "gcp/europe-west4"].map(|id| catalogue.index_of(&id.parse().unwrap()).unwrap());
        let monitor = RegionMonitor::new(GeoPoint::new(40.0, -74.0).unwrap(), &catalogue);
        monitor.states().targets.set_targets([region, other]);
        let log = Arc::new(tempfile::tempfile().unwrap());
        let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(log.clone()).finish();
        tracing::subscriber::with_default(subscriber, || {
            let (states, now) = (&mut *monitor.states(), Instant::now());
            monitor.health_worsened(states, [HealthChange { region, health: Health::Down }], now);
            for _ in 0..CONSECUTIVE_FAILURES_MAX {
                let failure = evidence(DeadlineSetBy::Measurement, UpstreamAction::Unreachable);
                states.record_evidence(region, None, failure, Permille::ALL, now);
            }
        });
        let (mut text, mut file): (_, &File) = (String::new(), &log);
        file.rewind().unwrap();
        file.read_to_string(&mut text).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 2, "{text}");
        for (line, message) in lines.iter().zip(["region health worsened", "region ejected"]) {
            assert!(line.contains(message) && line.contains("region=aws/us-east-1"), "{line}");
        }
    }
}
