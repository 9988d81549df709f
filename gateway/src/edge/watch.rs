//! The health of the regions as this edge sees it, shared between those who learn and those who ask.
//!
//! `gateway_core` decides; here are the lock around it and the bell that wakes requests which wait for a region that has
//! got worse. The lock is held for one decision at a time and never across an await.

use gateway_core::health::{Fleet, Heard, LOOK_PERIOD_MAX, Worse};
use gateway_core::outcome::Failure;
use gateway_core::plan::{Budgets, RequestPlan, Step};
use regions::catalogue::Catalogue;
use regions::geography::GeoPoint;
use regions::id::DeploymentName;
use regions::latency::LatencyModel;
use regions::selection::Health;
use regions::set::RegionIndex;
use scheduler_core::spoke::{Load, Report};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// How often silence is looked for: twice as often as has to be.
const LOOK_PERIOD: Duration = LOOK_PERIOD_MAX.checked_div(2).expect("two is not zero");

/// What is known, and the bell.
pub(crate) struct Watch {
    known: Mutex<Known>,
    bell: watch::Sender<()>,
}

/// Everything that changes with what regions say and do.
pub(crate) struct Known {
    pub(crate) fleet: Fleet,
    pub(crate) latency: LatencyModel,
    /// What each region last said of the work in it.
    loads: BTreeMap<RegionIndex, BTreeMap<DeploymentName, Load>>,
    budgets: Budgets,
}

impl Known {
    /// What `region` last said of the work that a deployment has there.
    pub(crate) fn load(&self, region: RegionIndex, deployment: &DeploymentName) -> Load {
        self.loads.get(&region).and_then(|loads| loads.get(deployment)).copied().unwrap_or_default()
    }
}

impl Watch {
    pub(crate) fn new(place: GeoPoint, catalogue: &Catalogue) -> Watch {
        let latency = LatencyModel::new(place, catalogue);
        let known = Known {
            fleet: Fleet::default(),
            latency,
            loads: BTreeMap::new(),
            budgets: Budgets::new(Instant::now()),
        };
        Watch { known: Mutex::new(known), bell: watch::Sender::new(()) }
    }

    pub(crate) fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().expect("no decision panics while it holds the lock")
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

    /// What `region` says of the work in it.
    pub(crate) fn loaded(&self, region: RegionIndex, report: &Report) {
        self.known().loads.insert(region, report.deployments.clone());
    }

    /// An attempt at `region` is in flight until what this returns is dropped.
    pub(crate) fn in_flight(&self, region: RegionIndex) -> InFlight<'_> {
        self.known().budgets.began(region);
        InFlight { watch: self, region }
    }

    /// A request was answered there.
    pub(crate) fn answered(&self, region: RegionIndex) {
        let known = &mut *self.known();
        known.fleet.answered(region, Instant::now());
        known.budgets.retry.succeeded();
    }

    /// An attempt at `region` failed; what the plan does next.
    pub(crate) fn failed(
        &self,
        plan: &mut RequestPlan,
        region: RegionIndex,
        failure: Failure,
        deployment: &DeploymentName,
    ) -> Step {
        let now = Instant::now();
        let known = &mut *self.known();
        let worse = if failure.blames_region() { known.fleet.failed(region) } else { None };
        self.tell(known, worse, now);
        let Known { fleet, budgets, .. } = known;
        // What breaks off because its region dies is part of the evacuation, not a retry.
        let down = fleet.health(region, deployment) == Health::Down;
        let failure = if failure == Failure::Unreachable && down { Failure::Lost } else { failure };
        plan.failed(failure, |next| fleet.health(next, deployment), budgets, now)
    }

    /// Whether a request that waits for `region` should give it up.
    pub(crate) fn gives_up(
        &self,
        plan: &RequestPlan,
        region: RegionIndex,
        deployment: &DeploymentName,
    ) -> bool {
        let known = self.known();
        plan.gives_up(known.fleet.health(region, deployment), |next| known.fleet.health(next, deployment))
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
            known.budgets.evacuate(region, now);
            tracing::warn!(region = region.as_usize(), ?health, "a region got worse");
            self.bell.send_replace(());
        }
    }
}

/// An attempt that waits for a region. It ends when this is dropped: also when the client has hung up.
pub(crate) struct InFlight<'a> {
    watch: &'a Watch,
    region: RegionIndex,
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        self.watch.known().budgets.ended(self.region);
    }
}
