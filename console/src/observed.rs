//! Regions as the gateways observe them: the number of gateways by health, the state that follows, and the newest loads.
//!
//! A report changes the counts of those regions whose health differs from the last report of the same gateway. So the work
//! for a report depends neither on the number of gateways nor on that of all regions.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use regions::health::Health;
use regions::{DeploymentName, RegionId};
use scheduler_api::traffic::ObservedLoad;

/// State of a region according to all gateways.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RegionStatus {
    /// All gateways that know it receive its reports.
    Healthy,
    /// Some gateways miss its reports.
    Degraded,
    /// No gateway uses it.
    Down,
    /// No gateway has a report of it yet.
    #[default]
    Unknown,
}

impl RegionStatus {
    /// Returns the name.
    pub fn as_str(self) -> &'static str {
        match self {
            RegionStatus::Healthy => "healthy",
            RegionStatus::Degraded => "degraded",
            RegionStatus::Down => "down",
            RegionStatus::Unknown => "unknown",
        }
    }

    /// Returns the state of a region with these observations.
    pub fn of(observed: impl IntoIterator<Item = Health>) -> RegionStatus {
        let mut seen = BTreeSet::new();
        seen.extend(observed.into_iter().filter(|health| *health != Health::Unknown));
        let has = |health| seen.contains(&health);
        match (has(Health::Healthy), has(Health::Suspect), has(Health::Down)) {
            (true, false, false) => RegionStatus::Healthy,
            (false, false, true) => RegionStatus::Down,
            (false, false, false) => RegionStatus::Unknown,
            _ => RegionStatus::Degraded,
        }
    }
}

/// Loads of a region by deployment.
pub type RegionLoads = BTreeMap<DeploymentName, ObservedLoad>;

/// Regions that at least one reporting gateway knows.
#[derive(Clone, Debug, Default)]
pub struct ObservedRegions(BTreeMap<RegionId, RegionRecord>);

#[derive(Clone, Debug, Default)]
struct RegionRecord {
    /// Number of gateways by the health that they observe.
    gateways: BTreeMap<Health, usize>,
    status: RegionStatus,
    /// Loads of the newest report. A region reports the same to every gateway, so one copy is enough. It is shared with the
    /// snapshots that are being computed.
    loads: Arc<RegionLoads>,
}

/// Change of the state of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StatusChange {
    pub(crate) from: RegionStatus,
    pub(crate) to: RegionStatus,
}

impl ObservedRegions {
    /// Replaces what one gateway observes of a region; `None` if it does not know it. Returns the change of the region's
    /// state, if there is one. That a region becomes known and healthy is none, nor that no gateway knows it any more.
    pub(crate) fn replace(
        &mut self,
        region: &RegionId,
        before: Option<Health>,
        after: Option<Health>,
    ) -> Option<StatusChange> {
        if before == after {
            return None;
        }
        let record = self.0.entry(region.clone()).or_default();
        if let Some(count) = before.and_then(|before| record.gateways.get_mut(&before)) {
            *count = count.saturating_sub(1);
        }
        if let Some(after) = after {
            *record.gateways.entry(after).or_default() += 1;
        }
        record.gateways.retain(|_, count| *count > 0);
        if record.gateways.is_empty() {
            self.0.remove(region);
            return None;
        }
        if !record.gateways.contains_key(&Health::Healthy) {
            // The last load of a lost region says nothing.
            record.loads = Arc::default();
        }
        let (from, to) = (record.status, RegionStatus::of(record.gateways.keys().copied()));
        record.status = to;
        let is_news = from != to && (from, to) != (RegionStatus::Unknown, RegionStatus::Healthy);
        is_news.then_some(StatusChange { from, to })
    }

    /// Replaces the loads of a region that a gateway observes as healthy.
    pub(crate) fn replace_loads(&mut self, region: &RegionId, loads: RegionLoads) {
        if let Some(record) = self.0.get_mut(region) {
            record.loads = Arc::new(loads);
        }
    }

    /// Returns the regions and their states.
    pub fn states(&self) -> impl Iterator<Item = (&RegionId, RegionStatus)> {
        self.0.iter().map(|(region, record)| (region, record.status))
    }

    /// Returns the state of a region.
    pub fn state(&self, region: &RegionId) -> RegionStatus {
        self.0.get(region).map_or(RegionStatus::Unknown, |record| record.status)
    }

    /// Returns the loads of a region.
    pub fn loads(&self, region: &RegionId) -> impl Iterator<Item = (&DeploymentName, &ObservedLoad)> {
        self.0.get(region).into_iter().flat_map(|record| record.loads.iter())
    }

    /// Returns the load of a deployment in a region.
    pub fn load(&self, region: &RegionId, deployment: &DeploymentName) -> Option<&ObservedLoad> {
        self.0.get(region)?.loads.get(deployment)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Health::{Down, Healthy, Suspect, Unknown};

    fn region() -> RegionId {
        "gcp/europe-west4".parse().unwrap()
    }

    #[test]
    fn the_state_of_a_region_is_that_of_all_gateways() {
        for (seen, expected) in [
            (vec![Healthy, Healthy], RegionStatus::Healthy),
            (vec![Healthy, Unknown], RegionStatus::Healthy),
            (vec![Healthy, Down], RegionStatus::Degraded),
            (vec![Suspect], RegionStatus::Degraded),
            (vec![Down, Unknown], RegionStatus::Down),
            (vec![Unknown], RegionStatus::Unknown),
            (vec![], RegionStatus::Unknown),
        ] {
            assert_eq!(RegionStatus::of(seen.clone()), expected, "{seen:?}");
        }
    }

    #[test]
    fn counts_give_the_same_states_as_all_observations() {
        let (mut regions, mut gateways) = (ObservedRegions::default(), [None; 3]);
        let all = [None, Some(Healthy), Some(Unknown), Some(Suspect), Some(Down)];
        for step in 0..1000_usize {
            // A multiplier that is coprime to the number of states visits their combinations.
            let (gateway, after) = (step % 3, all[step * 7 / 3 % 5]);
            let before = std::mem::replace(&mut gateways[gateway], after);
            let was = regions.state(&region());
            let change = regions.replace(&region(), before, after);
            let expected = RegionStatus::of(gateways.into_iter().flatten());
            assert_eq!(regions.state(&region()), expected, "{gateways:?}");
            assert_eq!(regions.states().count(), usize::from(gateways.iter().any(Option::is_some)));
            if let Some(StatusChange { from, to }) = change {
                assert_eq!((from, to), (was, expected), "{gateways:?}");
            }
        }
    }

    #[test]
    fn the_loads_of_a_region_are_those_of_the_newest_report_while_a_gateway_receives_them() {
        let mut regions = ObservedRegions::default();
        let load = |pending_tokens| {
            let load = ObservedLoad { pending_tokens, ..ObservedLoad::default() };
            RegionLoads::from([("minilm".parse().unwrap(), load)])
        };
        let found = |regions: &ObservedRegions| {
            regions.load(&region(), &"minilm".parse().unwrap()).map(|load| load.pending_tokens)
        };
        regions.replace(&region(), None, Some(Healthy));
        regions.replace_loads(&region(), load(9));
        regions.replace_loads(&region(), load(7));
        assert_eq!(found(&regions), Some(7));
        regions.replace(&region(), None, Some(Down));
        assert_eq!(found(&regions), Some(7), "another gateway receives its reports");
        regions.replace(&region(), Some(Healthy), Some(Down));
        assert_eq!(found(&regions), None);
    }
}
