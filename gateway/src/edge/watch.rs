//! What is known of the regions, shared between those who learn and those who ask, and what becomes of a request by it.
//!
//! [`Known`] and `gateway_core` decide; here are the lock around it, the clock, the dice, and the bell that wakes requests
//! which wait for a region that has got worse. The lock is held for one decision at a time and never across an await.

use super::known::{About, Known};
use gateway_core::circuit::Permille;
use gateway_core::health::{HealthChange, HealthReport, TICK_PERIOD_MAX};
use gateway_core::outcome::AttemptFailure;
use gateway_core::outlier::{DeadlineSetBy, OutlierEvidence, UpstreamAction, evidence};
use gateway_core::plan::{ExpiredTimer, RequestPlan, Step};
use gateway_core::targets::{InFlightRequest, TargetStatus};
use rand::Rng;
use regions::catalogue::Catalogue;
use regions::geography::GeoPoint;
use regions::health::Health;
use regions::id::DeploymentName;
use regions::set::RegionIndex;
use scheduler_core::spoke::Report;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use supervision::{Mutex, MutexGuard};
use tokio::sync::watch;

/// How often silence is looked for: twice as often as has to be.
const LOOK_PERIOD: Duration = TICK_PERIOD_MAX.checked_div(2).expect("two is not zero");

/// What is known, and the bell.
pub(crate) struct Watch {
    known: Mutex<Known>,
    bell: watch::Sender<()>,
}

/// What a plan does next. Whoever is asked counts as waiting from the same moment, so that no two requests take the last
/// place.
pub(crate) struct Next<'a> {
    pub(crate) step: Step,
    pub(crate) in_flight: Option<InFlight<'a>>,
}

impl Next<'_> {
    /// On with waiting.
    pub(crate) const WAIT: Next<'static> = Next { step: Step::Wait, in_flight: None };
}

/// A throw of the dice.
pub(crate) fn chance() -> Permille {
    chances()[0]
}

/// One throw for three decisions that must not hang on each other: if those who stay where many leave were all of a high
/// chance, none of them would go to a region that takes a low share.
pub(crate) fn chances() -> [Permille; 3] {
    let thrown: u32 = rand::rng().random_range(0..1_000_000_000);
    [thrown / 1_000_000, thrown / 1000 % 1000, thrown % 1000]
        .map(|part| Permille::new(u16::try_from(part).expect("less than a thousand")))
}

impl Watch {
    pub(crate) fn new(place: GeoPoint, catalogue: &Catalogue) -> Watch {
        let known = Known::new(place, catalogue, Instant::now());
        Watch { known: Mutex::new(known), bell: watch::Sender::new(()) }
    }

    pub(crate) fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock()
    }

    /// Watches exactly these regions from now on.
    pub(crate) fn watch(&self, wanted: impl IntoIterator<Item = RegionIndex> + Clone) {
        self.known().watch(wanted);
    }

    /// How each region stands with this edge; for operators.
    pub(crate) fn circuits(&self) -> Vec<TargetStatus<RegionIndex>> {
        self.known().targets.states(Instant::now())
    }

    /// Rings when a region gets worse.
    pub(crate) fn bell(&self) -> watch::Receiver<()> {
        self.bell.subscribe()
    }

    pub(crate) fn reported(&self, region: RegionIndex, heard: HealthReport) {
        let now = Instant::now();
        let known = &mut *self.known();
        known.latency.observe(region, heard.round_trip, now);
        known.fleet.reported(region, heard, now);
    }

    /// What `region` says of the work in it, and what it offers, in answer to what it was `asked`.
    pub(crate) fn loaded(&self, region: RegionIndex, report: &Report, asked: Instant) {
        self.known().loaded(region, report, asked, Instant::now());
    }

    /// What would have liked to leave other regions in the last period, for all that `region` serves.
    pub(crate) fn wanted(&self, region: RegionIndex) -> BTreeMap<DeploymentName, u64> {
        self.known().wanted(region, Instant::now())
    }

    /// The first step of a plan.
    pub(crate) fn start(&self, plan: &mut RequestPlan, about: &About<'_>) -> Next<'_> {
        let now = Instant::now();
        let known = &mut *self.known();
        let step = known.decide(about, now, |sight, budgets| plan.start(sight, budgets, now));
        self.next(known, step, about, now)
    }

    fn next(&self, known: &mut Known, step: Step, about: &About<'_>, now: Instant) -> Next<'_> {
        let in_flight = match step {
            Step::Send { region, .. } => {
                let queue = known.queue(region, about);
                let request = Some(known.targets.began(region, now));
                Some(InFlight { watch: self, region, queue, request })
            }
            Step::Wait
            | Step::RelayResponse
            | Step::NoRegionReachable
            | Step::RegionFull(_)
            | Step::ReceiptUnavailable
            | Step::DeadlineExceeded => None,
        };
        Next { step, in_flight }
    }

    /// An attempt was answered with `status`, after `took`.
    pub(crate) fn answered(
        &self,
        plan: &mut RequestPlan,
        attempt: InFlight<'_>,
        about: &About<'_>,
        status: u16,
        took: Duration,
    ) {
        let now = Instant::now();
        let region = attempt.region();
        let known = &mut *self.known();
        known.fleet.responded(region, now);
        known.budgets.retry.succeeded();
        let in_time = plan.responded(region);
        let mut action = UpstreamAction::Responded { status };
        // A refusal is quick, whoever gives it: it says nothing of how long the work takes.
        if (200..300).contains(&status) && about.uses_engine {
            let (deployment, size) = (about.deployment, about.size);
            // Who was long in its queue is not slow for that.
            let computed = took.saturating_sub(attempt.queue);
            if known.targets.is_too_slow_for_probe(region, deployment, size, computed, now) {
                action = UpstreamAction::RespondedSlowlyToProbe;
            }
            known.targets.record_latency(region, deployment, size, took, now);
        }
        if in_time {
            known.saw(region, evidence(DeadlineSetBy::Measurement, action), chance(), now);
        }
        attempt.over(known, now);
    }

    /// An attempt lost a race against one that began later.
    pub(crate) fn overtaken(&self, attempt: &InFlight<'_>) {
        if let Some(request) = &attempt.request {
            self.known().targets.hedge_won(request, chance(), Instant::now());
        }
    }

    /// An attempt failed; what the plan does next. `status` is that of an answer which says "elsewhere".
    pub(crate) fn failed(
        &self,
        plan: &mut RequestPlan,
        attempt: InFlight<'_>,
        failure: AttemptFailure,
        status: Option<u16>,
        about: &About<'_>,
    ) -> Next<'_> {
        let now = Instant::now();
        let region = attempt.region();
        let known = &mut *self.known();
        let evidence = failure.evidence(status);
        if evidence.is_some_and(OutlierEvidence::is_failure) {
            let worse = known.fleet.failed(region);
            self.tell(known, worse, now);
        }
        known.saw(region, evidence, chance(), now);
        attempt.over(known, now);
        // What breaks off because its region dies is part of the evacuation, not a retry.
        let down = known.fleet.health(region, about.deployment) == Health::Down;
        let broke_off = matches!(failure, AttemptFailure::Unreachable | AttemptFailure::WrongPeer);
        let failure = if broke_off && down { AttemptFailure::RegionDown } else { failure };
        let step =
            known.decide(about, now, |sight, budgets| plan.failed(region, failure, sight, budgets, now));
        self.next(known, step, about, now)
    }

    /// Something of a plan has come to its time; what the plan does next.
    pub(crate) fn woke(&self, plan: &mut RequestPlan, about: &About<'_>) -> Next<'_> {
        let now = Instant::now();
        let known = &mut *self.known();
        while let Some(due) = plan.expired_timer(now) {
            if let ExpiredTimer::FirstByte(region) = due {
                // A cold start that takes longer than was said is no fault, nor is a queue that has grown since it was asked.
                if let Some(late_at) = known.late_at(region, about, plan.sent_at(region), now) {
                    plan.extend_first_byte_timeout(region, late_at);
                    continue;
                }
                known.saw(region, AttemptFailure::FirstByteTimeout.evidence(None), chance(), now);
            }
            let step = known.decide(about, now, |sight, budgets| match due {
                ExpiredTimer::Deadline => Step::DeadlineExceeded,
                ExpiredTimer::FirstByte(region) => plan.first_byte_timed_out(region, sight, budgets, now),
                ExpiredTimer::Hedge => plan.hedge(sight, budgets, now),
            });
            if step != Step::Wait {
                return self.next(known, step, about, now);
            }
        }
        Next::WAIT
    }

    /// Whether a request that waits for `region` should give it up.
    pub(crate) fn gives_up(&self, plan: &RequestPlan, region: RegionIndex, about: &About<'_>) -> bool {
        let known = &mut *self.known();
        let health = known.fleet.health(region, about.deployment);
        known.decide(about, Instant::now(), |sight, _| plan.should_abandon(health, sight))
    }

    /// Looks for silence for ever.
    pub(crate) async fn look_for_silence(self: Arc<Watch>) {
        let mut period = tokio::time::interval(LOOK_PERIOD);
        period.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            period.tick().await;
            let now = Instant::now();
            let known = &mut *self.known();
            let worse = known.fleet.tick(now);
            self.tell(known, worse, now);
        }
    }

    fn tell(&self, known: &mut Known, worse: impl IntoIterator<Item = HealthChange>, now: Instant) {
        for HealthChange { region, health } in worse {
            known.budgets.evacuate(region, known.targets.in_flight(region), now);
            tracing::warn!(region = region.as_usize(), ?health, "a region got worse");
            self.bell.send_replace(());
        }
    }
}

/// An attempt that waits for a region. It ends when this is dropped, also when the client has hung up; or when it has been
/// judged, and never before that: the end of a trial of which nothing was seen makes room for another one.
pub(crate) struct InFlight<'a> {
    watch: &'a Watch,
    region: RegionIndex,
    /// What waited before it when it was sent.
    queue: Duration,
    /// Until it is over.
    request: Option<InFlightRequest<RegionIndex>>,
}

impl InFlight<'_> {
    pub(crate) fn region(&self) -> RegionIndex {
        self.region
    }

    /// It was judged, under the lock that is held.
    fn over(mut self, known: &mut Known, now: Instant) {
        if let Some(request) = self.request.take() {
            known.targets.ended(&request, now);
        }
    }
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        if let Some(request) = self.request.take() {
            self.watch.known().targets.ended(&request, Instant::now());
        }
    }
}
