//! What an edge knows of the regions: what they say of themselves, what its own requests have seen of them, and what may be
//! spent on them. Time and chance are arguments; [`watch`](super::watch) has the clock, the dice and the lock.

use super::cold::Holding;
use gateway_core::circuit::Permille;
use gateway_core::cold;
use gateway_core::health::RegionHealthTracker;
use gateway_core::hedge::is_lightly_loaded;
use gateway_core::latency::{FirstByteTimeout, SizeClass};
use gateway_core::outlier::OutlierEvidence;
use gateway_core::plan::{AttemptTimeouts, Budgets, RegionLoad, RegionView};
use gateway_core::priority::Priority;
use gateway_core::queue::RegionQueue;
use gateway_core::spill::Spill;
use gateway_core::targets::{LatencyBaseline, TargetTracker};
use regions::catalogue::Catalogue;
use regions::geography::GeoPoint;
use regions::health::Health;
use regions::id::DeploymentName;
use regions::latency::LatencyModel;
use regions::set::RegionIndex;
use scheduler_core::spoke::{self, Report};
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// Requests of one edge that may wait for one region. At 20 ms each that is 400,000 a second, more than an edge passes on;
/// what waits beyond it waits for a region that does not answer, and would take the room of all others.
pub(crate) const REGION_IN_FLIGHT_MAX: u32 = 8192;

/// Everything that changes with what regions say and do.
pub(crate) struct Known {
    pub(crate) fleet: RegionHealthTracker,
    pub(crate) latency: LatencyModel,
    pub(crate) targets: TargetTracker<RegionIndex>,
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
    load: spoke::DeploymentLoad,
    /// Everything that waits.
    queue: RegionQueue,
    /// Of it, what goes before a lookup: other lookups, where the region knows them apart.
    lookups: RegionQueue,
}

impl Work {
    /// What a region says now, after what it said `before`.
    fn heard(before: Option<&Work>, load: &spoke::DeploymentLoad, now: Instant) -> Work {
        let of = |before, tokens| RegionQueue::updated(before, tokens, load.tokens_per_second, now);
        Work {
            load: *load,
            queue: of(before.map(|work| work.queue), load.pending_tokens),
            lookups: of(
                before.map(|work| work.lookups),
                load.interactive_tokens.unwrap_or(load.pending_tokens),
            ),
        }
    }

    /// How long what goes before a request of this priority takes.
    fn wait(&self, priority: Priority) -> Duration {
        match priority {
            Priority::Interactive => self.lookups.wait(),
            Priority::Bulk => self.queue.wait(),
        }
    }
}

/// What of a request its way hangs on.
#[derive(Clone, Copy)]
pub(crate) struct About<'a> {
    pub(crate) deployment: &'a DeploymentName,
    pub(crate) priority: Priority,
    pub(crate) size: SizeClass,
    /// The request's own, drawn once.
    pub(crate) chance: Permille,
    /// The engine computes it, so the time that it takes is compared with that of others.
    pub(crate) uses_engine: bool,
}

impl Known {
    pub(super) fn new(place: GeoPoint, catalogue: &Catalogue, now: Instant) -> Known {
        Known {
            fleet: RegionHealthTracker::default(),
            latency: LatencyModel::new(place, catalogue),
            targets: TargetTracker::new(
                FirstByteTimeout::FOR_REGION,
                LatencyBaseline::Own,
                REGION_IN_FLIGHT_MAX,
            ),
            works: BTreeMap::new(),
            holding: Holding::default(),
            budgets: Budgets::new(now),
            spill: Spill::default(),
        }
    }

    /// Of exactly these regions from now on.
    pub(super) fn watch(&mut self, wanted: impl IntoIterator<Item = RegionIndex> + Clone) {
        self.fleet.set_regions(wanted.clone());
        let wanted: BTreeSet<_> = wanted.into_iter().collect();
        self.works.retain(|region, _| wanted.contains(region));
        self.holding.watch(wanted.iter().copied().collect());
        self.targets.set_targets(wanted.iter().copied());
        self.spill.retain_regions(|region| wanted.contains(&region));
    }

    /// What `region` says of the work in it, and what it offers, in answer to what it was `asked`.
    pub(super) fn loaded(&mut self, region: RegionIndex, report: &Report, asked: Instant, now: Instant) {
        let granted = report.deployments.iter().map(|(name, load)| (name.clone(), load.granted_tokens));
        self.spill.set_credits(region, granted.collect(), asked);
        self.holding.heard(region, report);
        let works = report
            .deployments
            .iter()
            .map(|(name, load)| (name.clone(), Work::heard(self.work(region, name), load, now)));
        let works = works.collect();
        self.works.insert(region, works);
    }

    /// What would have liked to leave other regions in the last period, for all that `region` serves.
    pub(super) fn wanted(&self, region: RegionIndex, now: Instant) -> BTreeMap<DeploymentName, u64> {
        let served = self.works.get(&region).into_iter().flat_map(BTreeMap::keys);
        served.map(|name| (name.clone(), self.spill.demand(name, now))).collect()
    }

    /// What `region` last said of the work that a deployment has there.
    pub(crate) fn load(&self, region: RegionIndex, deployment: &DeploymentName) -> spoke::DeploymentLoad {
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
    pub(super) fn decide<T>(
        &mut self,
        about: &About<'_>,
        now: Instant,
        decide: impl FnOnce(RegionView<'_>, &mut Budgets) -> T,
    ) -> T {
        let Known { fleet, latency: _, targets, works, holding, budgets, spill: _ } = self;
        let work = |region| works.get(&region).and_then(|works| works.get(about.deployment));
        let calm = |region| {
            work(region)
                .is_none_or(|work| is_lightly_loaded(work.load.pending_tokens, work.load.tokens_per_second))
                && targets.is_lightly_loaded(region)
        };
        let load = |region| match region {
            region if targets.is_full(region) => RegionLoad::Full,
            region if calm(region) => RegionLoad::Light,
            _ => RegionLoad::Busy,
        };
        let holds = |region| holding.has(region, about.deployment);
        let waits = |region| {
            let first_byte = targets.first_byte_timeout(region, about.deployment, about.size);
            let queue = work(region).map(|work| work.wait(about.priority)).unwrap_or_default();
            let waits = AttemptTimeouts {
                first_byte: first_byte.map(|first_byte| first_byte + queue),
                hedge: targets.hedge_after(region, about.deployment, about.size),
            };
            cold::extend_timeouts(
                waits,
                work(region).filter(|_| holds(region)).and_then(|work| work.load.ready_in),
            )
        };
        // Nobody leaves a region that is late, or races it, for one that would only hold the request.
        let health = |region| match health(fleet, targets, region, about, now) {
            Health::Healthy if holds(region) => Health::Suspect,
            health => health,
        };
        decide(RegionView { health: &health, load: &load, timeouts: &waits }, budgets)
    }

    /// When an answer from a region is late that was `asked` then, by what is known now; nothing where that is over.
    pub(super) fn late_at(
        &self,
        region: RegionIndex,
        about: &About<'_>,
        asked: Option<Instant>,
        now: Instant,
    ) -> Option<Instant> {
        let late = self.targets.first_byte_timeout(region, about.deployment, about.size).unwrap_or_default();
        if let Some(held_for) = self.held_for(region, about.deployment) {
            let waits = AttemptTimeouts { first_byte: Some(late), hedge: None };
            return cold::extend_timeouts(waits, Some(held_for)).first_byte.map(|late| now + late);
        }
        let late_at = asked? + late + self.queue(region, about);
        (now < late_at).then_some(late_at)
    }

    /// How long what goes before a request in `region` already will take it.
    pub(super) fn queue(&self, region: RegionIndex, about: &About<'_>) -> Duration {
        self.work(region, about.deployment).map(|work| work.wait(about.priority)).unwrap_or_default()
    }

    /// Counts what an attempt says about `region`; if it is ejected for it, what is in flight there may leave.
    pub(super) fn saw(
        &mut self,
        region: RegionIndex,
        evidence: Option<OutlierEvidence>,
        chance: Permille,
        now: Instant,
    ) {
        let Some(evidence) = evidence else { return };
        if self.targets.record(region, evidence, chance, now) {
            tracing::warn!(region = region.as_usize(), ?evidence, "region ejected");
            self.budgets.evacuate(region, self.targets.in_flight(region), now);
        }
    }
}

fn health(
    fleet: &RegionHealthTracker,
    targets: &TargetTracker<RegionIndex>,
    region: RegionIndex,
    about: &About<'_>,
    now: Instant,
) -> Health {
    let health = fleet.health(region, about.deployment);
    let left_alone = || !targets.state(region, now).admits(about.chance);
    if health == Health::Healthy && left_alone() { Health::Suspect } else { health }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lookup_is_late_behind_lookups_and_not_behind_a_backfill_where_the_region_knows_them_apart() {
        let catalogue = Catalogue::builtin();
        let id = "aws/us-east-1".parse().unwrap();
        let region = catalogue.index_of(&id).unwrap();
        let now = Instant::now();
        let mut known = Known::new(GeoPoint::new(40.0, -74.0).unwrap(), &catalogue, now);
        let deployment: DeploymentName = "d".parse().unwrap();
        let mut waits = |lookup_tokens| {
            let load = spoke::DeploymentLoad {
                ready: 1,
                pending_tokens: 1500,
                interactive_tokens: lookup_tokens,
                tokens_per_second: 1000.0,
                ..spoke::DeploymentLoad::default()
            };
            let deployments = BTreeMap::from([(deployment.clone(), load)]);
            let report = Report { region: id.clone(), boot_id: 1, sequence: 1, deployments, draining: false };
            known.loaded(region, &report, now, now);
            [Priority::Interactive, Priority::Bulk].map(|priority| {
                let about = About {
                    deployment: &deployment,
                    priority,
                    size: SizeClass::of(10),
                    chance: Permille::ALL,
                    uses_engine: true,
                };
                known.queue(region, &about).as_millis()
            })
        };
        assert_eq!(waits(Some(100)), [100, 1500]);
        assert_eq!(waits(Some(0)), [0, 1500]);
        assert_eq!(waits(None), [1500, 1500]);
    }
}
