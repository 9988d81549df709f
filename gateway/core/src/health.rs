//! Health of each region at this gateway, from two sources that cannot both be wrong: the region's own reports, five a
//! second, and the results of the requests that were sent there.
//!
//! Reports stop when a region dies, is partitioned or freezes (a TCP check passes on a frozen process). Refused
//! requests are seen within one round trip, long before a report is missed. Neither needs the hub.
//!
//! ```text
//!            report                  silence > SUSPECT_AFTER           silence > DOWN_AFTER, or 3 failures in a row
//!  Unknown ─────────▶ Healthy ────────────────────────────▶ Suspect ───────────────────────────▶ Down
//!                        ▲ ◀──────────── report ─────────────┘                                     │ report
//!                        └────────── RECOVERY_TIME of unbroken reports ───────── Recovering ◀──────┘
//! ```
//!
//! A suspect region is ranked last but still used; one that is down is not. A recovering region is treated as suspect
//! for a while, so that a flapping region does not take its traffic up and down with it, and yet serves at once the
//! deployments without an alternative.
//!
//! Silence is counted only while this process was running. When all regions that were up become silent at the same
//! moment, the likelier cause is this gateway (stopped, starved, partitioned), and silence proves nothing: the last
//! state is kept. A failed request still counts.

use regions::health::Health;
use regions::id::DeploymentName;
use regions::set::{RegionIndex, RegionSet};
use scheduler_api::report::EXCHANGE_PERIOD;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// Maximum period of [`RegionHealthTracker::tick`]; a longer gap means that this process was not running.
pub const TICK_PERIOD_MAX: Duration = Duration::from_millis(100);
/// Silence after which a region is suspect: three missed reports. Half a round trip is added, because the last report
/// was that old when it came.
pub const SUSPECT_AFTER: Duration = Duration::from_millis(600);
/// Silence after which a region is down. It matters only for requests without an alternative, because a suspect region
/// is left for any healthy one; and a machine with six times more work than cores was observed to be silent for 2 s and
/// then to respond, so such requests should wait.
pub const DOWN_AFTER: Duration = Duration::from_millis(3000);
/// Time of unbroken reports after which a region that was down is healthy again.
pub const RECOVERY_TIME: Duration = Duration::from_secs(5);
/// Consecutive failures after which a region is down, regardless of its reports.
pub const FAILURES_MAX: u32 = 3;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Unknown,
    Healthy,
    Suspect,
    Down,
    Recovering { since: Instant },
}

#[derive(Clone, Debug)]
struct RegionHealth {
    state: State,
    last_seen: Option<Instant>,
    round_trip: Duration,
    failures: u32,
    /// Deployments with a ready replica, by the region's reports; `None` until it has reported.
    ready: Option<BTreeSet<DeploymentName>>,
}

/// Health of all regions at this gateway.
#[derive(Clone, Debug)]
pub struct RegionHealthTracker {
    regions: BTreeMap<RegionIndex, RegionHealth>,
    /// Regions that have reported.
    reported: RegionSet,
    /// Regions that drain, by their last reports.
    draining: RegionSet,
    /// Reporting regions that have each deployment ready: an inverted index of the reports, so that a request needs one
    /// lookup for its deployment and not one for each region.
    serving: BTreeMap<DeploymentName, RegionSet>,
    /// Time of the last tick.
    last_tick: Option<Instant>,
}

/// Health-related content of a region's report.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HealthReport {
    /// Time from the poll to its response.
    pub round_trip: Duration,
    /// Deployments that may have changed since the last report: whether the region has a ready replica, or will start one on
    /// demand. All deployments in its first report.
    pub serves: Vec<(DeploymentName, bool)>,
    /// Whether the region is draining.
    pub draining: bool,
}

/// Deterioration of a region's health, of interest to requests in flight there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HealthChange {
    /// Index of the region.
    pub region: RegionIndex,
    /// Its health now: suspect or down.
    pub health: Health,
}

impl Default for RegionHealthTracker {
    fn default() -> RegionHealthTracker {
        RegionHealthTracker {
            regions: BTreeMap::new(),
            reported: RegionSet::EMPTY,
            draining: RegionSet::EMPTY,
            serving: BTreeMap::new(),
            last_tick: None,
        }
    }
}

impl RegionHealthTracker {
    /// Replaces the set of regions; the state of those that stay is kept.
    pub fn set_regions(&mut self, new_regions: impl IntoIterator<Item = RegionIndex>) {
        let mut regions = BTreeMap::new();
        for region in new_regions {
            let health = self.regions.remove(&region).unwrap_or(RegionHealth {
                state: State::Unknown,
                last_seen: None,
                round_trip: Duration::ZERO,
                failures: 0,
                ready: None,
            });
            regions.insert(region, health);
        }
        let removed = std::mem::replace(&mut self.regions, regions);
        for (region, health) in removed {
            for name in health.ready.unwrap_or_default() {
                self.set_serving(region, &name, false);
            }
            self.reported.remove(region);
            self.draining.remove(region);
        }
    }

    /// Updates the index: whether a region has a deployment ready.
    fn set_serving(&mut self, region: RegionIndex, name: &DeploymentName, serves: bool) {
        match (self.serving.get_mut(name), serves) {
            (Some(serving), true) => serving.insert(region),
            (Some(serving), false) => {
                serving.remove(region);
                if serving.is_empty() {
                    self.serving.remove(name);
                }
            }
            (None, true) => {
                self.serving.entry(name.clone()).or_insert(RegionSet::EMPTY).insert(region);
            }
            (None, false) => {}
        }
    }

    /// Applies a report of a region.
    pub fn reported(&mut self, region: RegionIndex, report: HealthReport, now: Instant) {
        let Some(health) = self.regions.get_mut(&region) else {
            return;
        };
        let HealthReport { round_trip, serves, draining } = report;
        let gap = health.silence(now);
        health.last_seen = Some(now);
        health.round_trip = round_trip;
        health.state = match health.state {
            State::Unknown | State::Suspect | State::Healthy => State::Healthy,
            State::Down => State::Recovering { since: now },
            State::Recovering { .. } if gap > SUSPECT_AFTER => State::Recovering { since: now },
            State::Recovering { since } if now.saturating_duration_since(since) >= RECOVERY_TIME => {
                State::Healthy
            }
            State::Recovering { since } => State::Recovering { since },
        };
        if health.state == State::Healthy {
            health.failures = 0;
        }
        let ready = health.ready.get_or_insert_default();
        let mut changes: Vec<(DeploymentName, bool)> = Vec::new();
        for (name, serves) in serves {
            let is_change = if serves { ready.insert(name.clone()) } else { ready.remove(&name) };
            if is_change {
                changes.push((name, serves));
            }
        }
        self.reported.insert(region);
        if draining {
            self.draining.insert(region);
        } else {
            self.draining.remove(region);
        }
        for (name, serves) in changes {
            self.set_serving(region, &name, serves);
        }
    }

    /// Records a response of a region.
    pub fn responded(&mut self, region: RegionIndex, now: Instant) {
        let Some(health) = self.regions.get_mut(&region) else {
            return;
        };
        health.failures = 0;
        health.last_seen = Some(now);
        if matches!(health.state, State::Unknown | State::Suspect) {
            health.state = State::Healthy;
        }
    }

    /// Records a request that could not be delivered, or broke off before a response.
    pub fn failed(&mut self, region: RegionIndex) -> Option<HealthChange> {
        let health = self.regions.get_mut(&region)?;
        health.failures = health.failures.saturating_add(1);
        if health.failures < FAILURES_MAX || health.state == State::Down {
            return None;
        }
        health.state = State::Down;
        Some(HealthChange { region, health: Health::Down })
    }

    /// Checks for silence; to be called at least every [`TICK_PERIOD_MAX`].
    pub fn tick(&mut self, now: Instant) -> Vec<HealthChange> {
        self.exclude_own_pause(now);
        if self.all_silent_at_once(now) {
            return Vec::new();
        }
        let mut changes = Vec::new();
        for (&region, health) in &mut self.regions {
            if health.last_seen.is_none() {
                continue;
            }
            let silence = health.silence(now);
            let next = match health.state {
                State::Healthy | State::Suspect | State::Recovering { .. } if silence > DOWN_AFTER => {
                    State::Down
                }
                State::Healthy if silence > SUSPECT_AFTER => State::Suspect,
                same => same,
            };
            if next != health.state {
                health.state = next;
                changes.push(HealthChange { region, health: health.health() });
            }
        }
        changes
    }

    /// Excludes time in which this process was not running (stopped, or starved) from the silence: reports may have
    /// come and not been read.
    fn exclude_own_pause(&mut self, now: Instant) {
        let Some(last_tick) = self.last_tick.replace(now) else { return };
        let paused = now.saturating_duration_since(last_tick).saturating_sub(TICK_PERIOD_MAX);
        for health in self.regions.values_mut() {
            health.last_seen = health.last_seen.map(|last_seen| (last_seen + paused).min(now));
        }
    }

    /// Returns whether all regions that were up became silent at once. A single region may be at fault itself.
    fn all_silent_at_once(&self, now: Instant) -> bool {
        let up =
            self.regions.values().filter(|health| matches!(health.state, State::Healthy | State::Suspect));
        let (mut count, mut first, mut last) = (0, None, None);
        for health in up {
            if health.silence(now) <= SUSPECT_AFTER {
                return false;
            }
            count += 1;
            first = first.min(health.last_seen).or(health.last_seen);
            last = last.max(health.last_seen);
        }
        match (first, last) {
            (Some(first), Some(last)) => {
                count >= 2 && last.saturating_duration_since(first) <= EXCHANGE_PERIOD
            }
            _ => false,
        }
    }

    /// Returns the healthy and suspect regions.
    pub fn reachable(&self) -> impl Iterator<Item = RegionIndex> {
        let is_reachable =
            |health: &RegionHealth| matches!(health.health(), Health::Healthy | Health::Suspect);
        self.regions.iter().filter(move |(_, health)| is_reachable(health)).map(|(region, _)| *region)
    }

    /// Returns the health of a region for one deployment.
    pub fn health(&self, region: RegionIndex, deployment: &DeploymentName) -> Health {
        if self.reported.contains(region) && !self.reports_ready(region, deployment) {
            return Health::Down;
        }
        self.region_health(region)
    }

    /// Returns the health of a region regardless of deployments. It is that of a region in [`RegionHealthTracker::serving`], for
    /// which a routing decision need not search the deployment again.
    pub fn region_health(&self, region: RegionIndex) -> Health {
        self.regions.get(&region).map_or(Health::Unknown, RegionHealth::health)
    }

    /// Returns the regions that have a replica ready for this deployment: by their report, and before the first one by
    /// `registered`, from the route table.
    pub fn serving(&self, deployment: &DeploymentName, registered: RegionSet) -> RegionSet {
        let reported_serving = self.serving.get(deployment).copied().unwrap_or(RegionSet::EMPTY);
        reported_serving.union(registered.minus(self.reported))
    }

    /// Returns the regions whose spokes all drain because they stop, by their last reports. They still accept requests, and are
    /// used only if no other region is left.
    pub fn draining(&self) -> RegionSet {
        self.draining
    }

    fn reports_ready(&self, region: RegionIndex, deployment: &DeploymentName) -> bool {
        self.serving.get(deployment).is_some_and(|serving| serving.contains(region))
    }

    /// Returns the deployments for which a region reports a ready replica, for operators.
    pub fn ready(&self, region: RegionIndex) -> Vec<&str> {
        let health = self.regions.get(&region).filter(|_| !self.draining.contains(region));
        let ready = health.and_then(|health| health.ready.as_ref());
        ready.into_iter().flatten().map(DeploymentName::as_str).collect()
    }

    /// Returns the health of a region regardless of deployments, and the time since its last sign of life, for
    /// operators.
    pub fn state(&self, region: RegionIndex, now: Instant) -> (Health, Option<Duration>) {
        match self.regions.get(&region) {
            None => (Health::Unknown, None),
            Some(health) => {
                (health.health(), health.last_seen.map(|last_seen| now.saturating_duration_since(last_seen)))
            }
        }
    }
}

impl RegionHealth {
    fn silence(&self, now: Instant) -> Duration {
        let since =
            self.last_seen.map_or(Duration::ZERO, |last_seen| now.saturating_duration_since(last_seen));
        since.saturating_sub(self.round_trip / 2)
    }

    fn health(&self) -> Health {
        match self.state {
            State::Unknown => Health::Unknown,
            State::Healthy => Health::Healthy,
            State::Suspect | State::Recovering { .. } => Health::Suspect,
            State::Down => Health::Down,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::some_instant;
    use proptest::prelude::*;

    const MS: Duration = Duration::from_millis(1);

    struct HealthScenario {
        tracker: RegionHealthTracker,
        now: Instant,
        changes: Vec<HealthChange>,
    }

    fn region(number: u16) -> RegionIndex {
        RegionIndex::new(number.into()).expect("a small number")
    }

    fn deployment() -> DeploymentName {
        "d".parse().unwrap()
    }

    impl HealthScenario {
        fn of(count: u16) -> HealthScenario {
            let mut tracker = RegionHealthTracker::default();
            tracker.set_regions((0..count).map(region));
            HealthScenario { tracker, now: some_instant(), changes: Vec::new() }
        }

        /// Advances by `millis`; the regions in `speaking` report every period, and ticks come every 50 ms.
        fn pass(mut self, millis: u32, speaking: &[u16]) -> HealthScenario {
            for step in 1..=millis / 50 {
                self.now += 50 * MS;
                if step % 4 == 0 {
                    for &number in speaking {
                        self.report(number);
                    }
                }
                self.changes.extend(self.tracker.tick(self.now));
            }
            self
        }

        fn report(&mut self, number: u16) {
            let report =
                HealthReport { round_trip: 100 * MS, serves: vec![(deployment(), true)], draining: false };
            self.tracker.reported(region(number), report, self.now);
        }

        fn fail(mut self, number: u16, times: u32) -> HealthScenario {
            (0..times).for_each(|_| self.changes.extend(self.tracker.failed(region(number))));
            self
        }

        fn expect(self, expected: &[Health]) -> HealthScenario {
            let observed: Vec<_> = (0..expected.len())
                .map(|number| self.tracker.health(region(number as u16), &deployment()))
                .collect();
            assert_eq!(observed, expected);
            self
        }
    }

    use Health::{Down, Healthy, Suspect, Unknown};

    #[test]
    fn a_silent_region_is_suspect_and_then_down() {
        HealthScenario::of(2)
            .expect(&[Unknown, Unknown])
            .pass(1000, &[0, 1])
            .expect(&[Healthy, Healthy])
            .pass(650, &[0])
            .expect(&[Healthy, Healthy])
            .pass(50, &[0])
            .expect(&[Healthy, Suspect])
            .pass(2300, &[0])
            .expect(&[Healthy, Suspect])
            .pass(100, &[0])
            .expect(&[Healthy, Down]);
    }

    #[test]
    fn a_report_clears_a_suspect_region_at_once_but_one_that_was_down_recovers_slowly() {
        HealthScenario::of(2)
            .pass(1000, &[0, 1])
            .pass(800, &[0])
            .expect(&[Healthy, Suspect])
            .pass(200, &[0, 1])
            .expect(&[Healthy, Healthy])
            .pass(3500, &[0])
            .expect(&[Healthy, Down])
            .pass(4800, &[0, 1])
            .expect(&[Healthy, Suspect])
            .pass(400, &[0, 1])
            .expect(&[Healthy, Healthy]);
    }

    #[test]
    fn failed_requests_take_precedence_over_reports() {
        HealthScenario::of(2)
            .pass(1000, &[0, 1])
            .fail(1, FAILURES_MAX - 1)
            .expect(&[Healthy, Healthy])
            .fail(1, 1)
            .expect(&[Healthy, Down])
            .pass(1000, &[0, 1])
            .expect(&[Healthy, Suspect]);
    }

    #[test]
    fn simultaneous_silence_of_all_regions_is_ignored() {
        HealthScenario::of(3).pass(1000, &[0, 1, 2]).pass(60_000, &[]).expect(&[Healthy, Healthy, Healthy]);
        HealthScenario::of(1).pass(1000, &[0]).pass(3500, &[]).expect(&[Down]);
    }

    #[test]
    fn a_pause_of_the_gateway_is_not_counted_as_silence() {
        let mut scenario = HealthScenario::of(1).pass(1000, &[0]);
        scenario.now += Duration::from_secs(60);
        scenario.pass(550, &[]).expect(&[Healthy]);
        let mut scenario = HealthScenario::of(1).pass(1000, &[0]);
        scenario.now += Duration::from_secs(60);
        scenario.pass(1000, &[]).expect(&[Suspect]);
    }

    #[test]
    fn two_regions_that_die_one_after_the_other_are_both_detected() {
        HealthScenario::of(3)
            .pass(1000, &[0, 1, 2])
            .pass(400, &[1, 2])
            .pass(4000, &[2])
            .expect(&[Down, Down, Healthy]);
    }

    #[test]
    fn each_change_is_returned_once() {
        let scenario = HealthScenario::of(2).pass(1000, &[0, 1]).pass(4000, &[0]);
        let changes: Vec<_> = scenario.changes.iter().map(|change| (change.region, change.health)).collect();
        assert_eq!(changes, [(region(1), Suspect), (region(1), Down)]);
        assert_eq!(HealthScenario::of(1).pass(1000, &[0]).fail(0, 10).changes.len(), 1);
    }

    #[test]
    fn a_region_without_a_ready_replica_is_down_for_that_deployment_alone() {
        let mut scenario = HealthScenario::of(1).pass(1000, &[0]);
        assert_eq!(scenario.tracker.health(region(0), &"other".parse().unwrap()), Down);
        let report = HealthReport { round_trip: MS, serves: vec![(deployment(), true)], draining: true };
        scenario.tracker.reported(region(0), report, scenario.now);
        assert_eq!(scenario.tracker.health(region(0), &deployment()), Healthy, "it still accepts requests");
        assert!(scenario.tracker.draining().contains(region(0)));
        let report = HealthReport { round_trip: MS, serves: vec![(deployment(), false)], draining: false };
        scenario.tracker.reported(region(0), report, scenario.now);
        assert!(scenario.tracker.draining().is_empty());
        scenario.expect(&[Down]);
    }

    proptest! {
        /// The index of ready deployments equals the last report of each region, after any sequence of reports,
        /// draining, and changes of the set of regions.
        #[test]
        fn the_index_equals_the_last_report_of_each_region(
            events in prop::collection::vec((0u16..4, prop::collection::btree_set("[a-c]", 0..3), 0u8..6), 1..60),
            registered in prop::collection::btree_set(0u16..4, 0..4),
        ) {
            let now = some_instant();
            let mut tracker = RegionHealthTracker::default();
            let mut reported_serving: BTreeMap<u16, Option<BTreeSet<String>>> = (0..4).map(|number| (number, None)).collect();
            tracker.set_regions((0..4).map(region));
            for (number, names, kind) in events {
                if kind == 0 {
                    // Removed, and added again.
                    tracker.set_regions((0..4).filter(|other| *other != number).map(region));
                    tracker.set_regions((0..4).map(region));
                    reported_serving.insert(number, None);
                    continue;
                }
                let draining = kind == 1;
                let all = ["a", "b", "c"].iter();
                let serves = all.map(|name| (name.parse().unwrap(), names.contains(*name))).collect();
                tracker.reported(region(number), HealthReport { round_trip: MS, serves, draining }, now);
                reported_serving.insert(number, Some(names));
                prop_assert_eq!(tracker.draining().contains(region(number)), draining);
            }
            let registered: RegionSet = registered.into_iter().map(region).collect();
            for name in ["a", "b", "c"] {
                let deployment: DeploymentName = name.parse().unwrap();
                let serving = tracker.serving(&deployment, registered);
                for (number, names) in &reported_serving {
                    let expected = names.as_ref().map(|names| names.contains(name));
                    let at = region(*number);
                    prop_assert_eq!(serving.contains(at), expected.unwrap_or(registered.contains(at)));
                    prop_assert_eq!(tracker.health(at, &deployment) == Health::Down, expected == Some(false));
                }
            }
            let health: BTreeSet<&String> = reported_serving.values().flatten().flatten().collect();
            prop_assert_eq!(tracker.serving.len(), health.len(), "a deployment without a replica is dropped");
        }
    }
}
