//! What is known of the regions, shared between those who learn and those who ask: what they say of themselves, what this
//! edge's own requests have seen of them, and what may be spent on them.
//!
//! `gateway_core` decides; here are the lock around it, the clock, the dice, and the bell that wakes requests which wait
//! for a region that has got worse. The lock is held for one decision at a time and never across an await.

use super::cold::Holding;
use super::shedding::Shedding;
use gateway_core::circuit::{Permille, Seen};
use gateway_core::cold;
use gateway_core::health::{Fleet, Heard, LOOK_PERIOD_MAX, Worse};
use gateway_core::hedge::is_calm;
use gateway_core::lane::Lane;
use gateway_core::outcome::Failure;
use gateway_core::pace::{Patience, Size};
use gateway_core::plan::{Budgets, Due, Load, RequestPlan, Sight, Step, Waits};
use gateway_core::queue::Queue;
use gateway_core::spill::Spill;
use gateway_core::targets::{CircuitState, Targets, UnderWay, Yardstick};
use rand::Rng;
use regions::catalogue::Catalogue;
use regions::geography::GeoPoint;
use regions::id::DeploymentName;
use regions::latency::LatencyModel;
use regions::selection::Health;
use regions::set::RegionIndex;
use scheduler_core::spoke::{self, Report};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// How often silence is looked for: twice as often as has to be.
const LOOK_PERIOD: Duration = LOOK_PERIOD_MAX.checked_div(2).expect("two is not zero");
/// Requests of one edge that may wait for one region. At 20 ms each that is 400,000 a second, more than an edge passes on;
/// what waits beyond it waits for a region that does not answer, and would take the room of all others.
pub(crate) const REGION_IN_FLIGHT_MAX: u32 = 8192;

/// What is known, and the bell.
pub(crate) struct Watch {
    known: Mutex<Known>,
    /// How much there is before each region, and whose.
    pub(super) shedding: Shedding,
    bell: watch::Sender<()>,
}

/// Everything that changes with what regions say and do.
pub(crate) struct Known {
    pub(crate) fleet: Fleet,
    pub(crate) latency: LatencyModel,
    pub(crate) targets: Targets<RegionIndex>,
    /// What each region last said of the work in it.
    works: BTreeMap<RegionIndex, BTreeMap<DeploymentName, Work>>,
    /// Where a request would be held.
    pub(super) holding: Holding,
    pub(crate) budgets: Budgets,
    /// What regions have offered to take of others' overflow.
    pub(crate) spill: Spill,
}

/// The work that one deployment has in one region.
#[derive(Clone, Copy)]
struct Work {
    load: spoke::Load,
    /// Everything that waits.
    queue: Queue,
    /// Of it, what goes before a lookup: other lookups, where the region knows them apart.
    lookups: Queue,
}

impl Work {
    /// What a region says now, after what it said `before`.
    fn heard(before: Option<&Work>, load: &spoke::Load, now: Instant) -> Work {
        let of = |before, tokens| Queue::heard(before, tokens, load.tokens_per_second, now);
        Work {
            load: *load,
            queue: of(before.map(|work| work.queue), load.pending_tokens),
            lookups: of(before.map(|work| work.lookups), load.lookup_tokens.unwrap_or(load.pending_tokens)),
        }
    }

    /// How long what goes before a request of this lane takes.
    fn wait(&self, lane: Lane) -> Duration {
        match lane {
            Lane::Interactive => self.lookups.wait(),
            Lane::Bulk => self.queue.wait(),
        }
    }
}

/// What of a request its way hangs on.
#[derive(Clone, Copy)]
pub(crate) struct About<'a> {
    pub(crate) deployment: &'a DeploymentName,
    pub(crate) lane: Lane,
    pub(crate) size: Size,
    /// The request's own, drawn once.
    pub(crate) chance: Permille,
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

impl Known {
    /// What `region` last said of the work that a deployment has there.
    pub(crate) fn load(&self, region: RegionIndex, deployment: &DeploymentName) -> spoke::Load {
        self.work(region, deployment).map(|work| work.load).unwrap_or_default()
    }

    fn work(&self, region: RegionIndex, deployment: &DeploymentName) -> Option<&Work> {
        self.works.get(&region)?.get(deployment)
    }

    /// The health of a region for a request: whoever is left alone for a while is a suspect.
    pub(crate) fn health(&self, region: RegionIndex, about: &About<'_>, now: Instant) -> Health {
        health(&self.fleet, &self.targets, region, about, now)
    }

    /// Calls `decide` with what is known, and with the budgets.
    fn decide<T>(
        &mut self,
        about: &About<'_>,
        now: Instant,
        decide: impl FnOnce(Sight<'_>, &mut Budgets) -> T,
    ) -> T {
        let Known { fleet, latency: _, targets, works, holding, budgets, spill: _ } = self;
        let work = |region| works.get(&region).and_then(|works| works.get(about.deployment));
        let calm = |region| {
            work(region).is_none_or(|work| is_calm(work.load.pending_tokens, work.load.tokens_per_second))
                && targets.is_calm(region)
        };
        let load = |region| match region {
            region if targets.is_full(region) => Load::Full,
            region if calm(region) => Load::Calm,
            _ => Load::Busy,
        };
        let holds = |region| holding.has(region, about.deployment);
        let waits = |region| {
            let first_byte = targets.first_byte(region, about.deployment, about.size);
            let queue = work(region).map(|work| work.wait(about.lane)).unwrap_or_default();
            let waits = Waits {
                late: first_byte.map(|first_byte| first_byte + queue),
                hedge: targets.hedge_after(region, about.deployment, about.size),
            };
            cold::patience(waits, work(region).filter(|_| holds(region)).and_then(|work| work.load.ready_in))
        };
        // Nobody leaves a region that is late, or races it, for one that would only hold the request.
        let health = |region| match health(fleet, targets, region, about, now) {
            Health::Healthy if holds(region) => Health::Suspect,
            health => health,
        };
        decide(Sight { health: &health, load: &load, waits: &waits }, budgets)
    }

    /// When an answer from a region is late that was `asked` then, by what is known now; nothing where that is over.
    fn late_at(
        &self,
        region: RegionIndex,
        about: &About<'_>,
        asked: Option<Instant>,
        now: Instant,
    ) -> Option<Instant> {
        let late = self.targets.first_byte(region, about.deployment, about.size).unwrap_or_default();
        if let Some(held_for) = self.held_for(region, about.deployment) {
            let waits = Waits { late: Some(late), hedge: None };
            return cold::patience(waits, Some(held_for)).late.map(|late| now + late);
        }
        let late_at = asked? + late + self.queue(region, about);
        (now < late_at).then_some(late_at)
    }

    /// How long what goes before a request in `region` already will take it.
    fn queue(&self, region: RegionIndex, about: &About<'_>) -> Duration {
        self.work(region, about.deployment).map(|work| work.wait(about.lane)).unwrap_or_default()
    }

    /// Something was seen of `region`; if it is ejected for it, what is in flight there may leave.
    fn saw(&mut self, region: RegionIndex, seen: Seen, now: Instant) {
        if self.targets.saw(region, seen, chance(), now) {
            tracing::warn!(region = region.as_usize(), ?seen, "a region is left alone for a while");
            self.budgets.evacuate(region, self.targets.in_flight(region), now);
        }
    }
}

impl Watch {
    pub(crate) fn new(place: GeoPoint, catalogue: &Catalogue) -> Watch {
        let known = Known {
            fleet: Fleet::default(),
            latency: LatencyModel::new(place, catalogue),
            targets: Targets::new(Patience::WITH_A_REGION, Yardstick::Own, REGION_IN_FLIGHT_MAX),
            works: BTreeMap::new(),
            holding: Holding::default(),
            budgets: Budgets::new(Instant::now()),
            spill: Spill::default(),
        };
        Watch { known: Mutex::new(known), shedding: Shedding::default(), bell: watch::Sender::new(()) }
    }

    pub(crate) fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().expect("no decision panics while it holds the lock")
    }

    /// Watches exactly these regions from now on.
    pub(crate) fn watch(&self, wanted: impl IntoIterator<Item = RegionIndex> + Clone) {
        let known = &mut *self.known();
        known.fleet.watch(wanted.clone());
        let wanted: BTreeSet<_> = wanted.into_iter().collect();
        known.works.retain(|region, _| wanted.contains(region));
        known.holding.watch(wanted.iter().copied().collect());
        known.targets.watch(wanted.iter().copied());
        known.spill.watch(|region| wanted.contains(&region));
    }

    /// How each region stands with this edge; for operators.
    pub(crate) fn circuits(&self) -> Vec<CircuitState<RegionIndex>> {
        self.known().targets.states(Instant::now())
    }

    /// Rings when a region gets worse.
    pub(crate) fn bell(&self) -> watch::Receiver<()> {
        self.bell.subscribe()
    }

    pub(crate) fn reported(&self, region: RegionIndex, heard: Heard) {
        let now = Instant::now();
        let known = &mut *self.known();
        known.latency.observe(region, heard.round_trip, now);
        known.fleet.reported(region, heard, now);
    }

    /// What `region` says of the work in it, and what it offers, in answer to what it was `asked`.
    pub(crate) fn loaded(&self, region: RegionIndex, report: &Report, asked: Instant) {
        let granted = report.deployments.iter().map(|(name, load)| (name.clone(), load.granted_tokens));
        let known = &mut *self.known();
        known.spill.heard(region, granted.collect(), asked);
        known.holding.heard(region, report);
        let now = Instant::now();
        let works = report
            .deployments
            .iter()
            .map(|(name, load)| (name.clone(), Work::heard(known.work(region, name), load, now)));
        let works = works.collect();
        known.works.insert(region, works);
    }

    /// What would have liked to leave other regions in the last period, for all that `region` serves.
    pub(crate) fn wanted(&self, region: RegionIndex) -> BTreeMap<DeploymentName, u64> {
        let now = Instant::now();
        let known = &*self.known();
        let served = known.works.get(&region).into_iter().flat_map(BTreeMap::keys);
        served.map(|name| (name.clone(), known.spill.wanted(name, now))).collect()
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
            Step::Wait | Step::Relay | Step::NobodyReachable | Step::Full(_) | Step::DeadlinePassed => None,
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
        known.fleet.answered(region, now);
        known.budgets.retry.succeeded();
        let in_time = plan.answered(region);
        let mut seen = seen(status);
        // A refusal is quick, whoever gives it: it says nothing of how long the work takes.
        if (200..300).contains(&status) {
            let (deployment, size) = (about.deployment, about.size);
            // Who was long in its queue is not slow for that.
            let computed = took.saturating_sub(attempt.queue);
            if known.targets.too_slow_for_a_trial(region, deployment, size, computed, now) {
                seen = Seen::Missed;
            }
            known.targets.took(region, deployment, size, took, now);
        }
        if in_time {
            known.saw(region, seen, now);
        }
        attempt.over(known, now);
    }

    /// An attempt lost a race against one that began later.
    pub(crate) fn overtaken(&self, attempt: &InFlight<'_>) {
        if let Some(request) = &attempt.request {
            self.known().targets.overtaken(request, chance(), Instant::now());
        }
    }

    /// An attempt failed; what the plan does next. `status` is that of an answer which says "elsewhere".
    pub(crate) fn failed(
        &self,
        plan: &mut RequestPlan,
        attempt: InFlight<'_>,
        failure: Failure,
        status: Option<u16>,
        about: &About<'_>,
    ) -> Next<'_> {
        let now = Instant::now();
        let region = attempt.region();
        let known = &mut *self.known();
        if failure.blames_region() {
            let worse = known.fleet.failed(region);
            self.tell(known, worse, now);
            known.saw(region, Seen::Failed, now);
        }
        if let Some(status) = status.filter(|status| seen(*status) == Seen::Faulted) {
            known.saw(region, seen(status), now);
        }
        attempt.over(known, now);
        // What breaks off because its region dies is part of the evacuation, not a retry.
        let down = known.fleet.health(region, about.deployment) == Health::Down;
        let broke_off = matches!(failure, Failure::Unreachable | Failure::WrongPeer);
        let failure = if broke_off && down { Failure::Lost } else { failure };
        let step =
            known.decide(about, now, |sight, budgets| plan.failed(region, failure, sight, budgets, now));
        self.next(known, step, about, now)
    }

    /// Something of a plan has come to its time; what the plan does next.
    pub(crate) fn woke(&self, plan: &mut RequestPlan, about: &About<'_>) -> Next<'_> {
        let now = Instant::now();
        let known = &mut *self.known();
        while let Some(due) = plan.due(now) {
            if let Due::Late(region) = due {
                // A cold start that takes longer than was said is no fault, nor is a queue that has grown since it was asked.
                if let Some(late_at) = known.late_at(region, about, plan.asked_at(region), now) {
                    plan.put_off(region, late_at);
                    continue;
                }
                known.saw(region, Seen::Missed, now);
            }
            let step = known.decide(about, now, |sight, budgets| match due {
                Due::Deadline => Step::DeadlinePassed,
                Due::Late(region) => plan.late(region, sight, budgets, now),
                Due::Hedge => plan.hedge(sight, budgets, now),
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
        known.decide(about, Instant::now(), |sight, _| plan.gives_up(health, sight))
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

    fn tell(&self, known: &mut Known, worse: impl IntoIterator<Item = Worse>, now: Instant) {
        for Worse { region, health } in worse {
            known.budgets.evacuate(region, known.targets.in_flight(region), now);
            tracing::warn!(region = region.as_usize(), ?health, "a region got worse");
            self.bell.send_replace(());
        }
    }
}

fn health(
    fleet: &Fleet,
    targets: &Targets<RegionIndex>,
    region: RegionIndex,
    about: &About<'_>,
    now: Instant,
) -> Health {
    let health = fleet.health(region, about.deployment);
    let left_alone = || !targets.standing(region, now).takes(about.chance);
    if health == Health::Healthy && left_alone() { Health::Suspect } else { health }
}

/// What an answer of this status says of whoever gave it. 503 and 504 are said of a load or a deadline, not of a fault.
fn seen(status: u16) -> Seen {
    if matches!(status, 500 | 502) { Seen::Faulted } else { Seen::Answered }
}

/// An attempt that waits for a region. It ends when this is dropped, also when the client has hung up; or when it has been
/// judged, and never before that: the end of a trial of which nothing was seen makes room for another one.
pub(crate) struct InFlight<'a> {
    watch: &'a Watch,
    region: RegionIndex,
    /// What waited before it when it was sent.
    queue: Duration,
    /// Until it is over.
    request: Option<UnderWay<RegionIndex>>,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lookup_is_late_behind_lookups_and_not_behind_a_backfill_where_the_region_knows_them_apart() {
        let catalogue = Catalogue::builtin();
        let id = "aws/us-east-1".parse().unwrap();
        let region = catalogue.index_of(&id).unwrap();
        let watch = Watch::new(GeoPoint::new(40.0, -74.0).unwrap(), &catalogue);
        let deployment: DeploymentName = "d".parse().unwrap();
        let waits = |lookup_tokens, asked| {
            let load = spoke::Load {
                ready: 1,
                pending_tokens: 1500,
                lookup_tokens,
                tokens_per_second: 1000.0,
                ..spoke::Load::default()
            };
            let deployments = BTreeMap::from([(deployment.clone(), load)]);
            let report = Report { region: id.clone(), boot_id: 1, sequence: 1, deployments, draining: false };
            watch.loaded(region, &report, asked);
            [Lane::Interactive, Lane::Bulk].map(|lane| {
                let about =
                    About { deployment: &deployment, lane, size: Size::of(10), chance: Permille::ALL };
                watch.known().queue(region, &about).as_millis()
            })
        };
        let now = Instant::now();
        assert_eq!(waits(Some(100), now), [100, 1500]);
        assert_eq!(waits(Some(0), now), [0, 1500]);
        assert_eq!(waits(None, now), [1500, 1500]);
    }
}
