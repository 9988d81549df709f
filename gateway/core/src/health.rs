//! What this gateway knows of each region, from the two things that cannot be faked at once: the region's own reports,
//! five a second, and what became of the requests that were sent there.
//!
//! Reports say *alive* and stop when a region dies, is cut off or freezes (a TCP check passes on a frozen process).
//! Requests say *refused* within one round trip, long before a report is missed. Neither waits for the hub.
//!
//! ```text
//!            report                      silence > LATE                 silence > LOST, or 3 failures in a row
//!  Unknown ─────────▶ Healthy ────────────────────────────▶ Suspect ───────────────────────────▶ Down
//!                        ▲ ◀──────────── report ─────────────┘                                     │ report
//!                        └──────────── RETURN_AFTER of unbroken reports ──────── Returning ◀───────┘
//! ```
//!
//! A suspect is still asked, after everybody else; one that is down is not. Someone who returns is treated as a suspect
//! for a while, so that a flapping region does not take its traffic up and down with it, and yet serves at once the
//! deployments that have nowhere else to go.
//!
//! Silence is counted only while this gateway was awake to hear. When all regions that were up fall silent in the same moment, the likelier cause is this gateway (stopped, starved,
//! cut off), and silence proves nothing: the last state stands. A refusal in band still counts.

use regions::id::DeploymentName;
use regions::health::Health;
use regions::set::{RegionIndex, RegionSet};
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// How often a region reports.
pub const REPORT_PERIOD: Duration = Duration::from_millis(200);
/// How often silence has to be looked for; a longer gap means that this process was asleep.
pub const LOOK_PERIOD_MAX: Duration = Duration::from_millis(100);
/// Silence after which a region is suspected: three reports missed. Half a round trip is added, for the last report was
/// that old when it came.
pub const LATE: Duration = Duration::from_millis(600);
/// Silence after which a region is down. It decides only for requests that have nowhere else to go, since a suspect is
/// left for anybody healthy; and a machine with six times more work than cores was seen to be silent for 2 s and to
/// answer then, so they had better wait.
pub const LOST: Duration = Duration::from_millis(3000);
/// Unbroken reports after which a region that was down is trusted again.
pub const RETURN_AFTER: Duration = Duration::from_secs(5);
/// Failures in a row after which a region is down, whatever it reports.
pub const FAILURES_MAX: u32 = 3;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Unknown,
    Healthy,
    Suspect,
    Down,
    Returning { since: Instant },
}

#[derive(Clone, Debug)]
struct Region {
    state: State,
    heard: Option<Instant>,
    round_trip: Duration,
    failures: u32,
    /// Deployments with a replica that is ready, by the region's last report; `None` until it has reported.
    ready: Option<BTreeSet<DeploymentName>>,
}

/// The regions that this gateway watches.
#[derive(Clone, Debug)]
pub struct Fleet {
    regions: BTreeMap<RegionIndex, Region>,
    /// The regions that have reported.
    reported: RegionSet,
    /// Of those, the ones that have each deployment ready: what all the reports say, turned round, so that a request
    /// looks its deployment up once and not once for each region.
    serving: BTreeMap<DeploymentName, RegionSet>,
    /// When silence was last looked for.
    looked: Option<Instant>,
}

/// What a region's report says that matters here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Heard {
    /// From the question to the answer.
    pub round_trip: Duration,
    /// The deployments that have a replica ready, or will have one for whoever asks.
    pub ready: BTreeSet<DeploymentName>,
    /// The region asks to be left alone.
    pub draining: bool,
}

/// A change for the worse that whoever waits for this region should hear about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Worse {
    /// Which region.
    pub region: RegionIndex,
    /// Its health now: suspect or down.
    pub health: Health,
}

impl Default for Fleet {
    fn default() -> Fleet {
        Fleet { regions: BTreeMap::new(), reported: RegionSet::EMPTY, serving: BTreeMap::new(), looked: None }
    }
}

impl Fleet {
    /// Watches exactly these regions from now on; what is known of those that stay is kept.
    pub fn watch(&mut self, wanted: impl IntoIterator<Item = RegionIndex>) {
        let mut regions = BTreeMap::new();
        for region in wanted {
            let known = self.regions.remove(&region).unwrap_or(Region {
                state: State::Unknown,
                heard: None,
                round_trip: Duration::ZERO,
                failures: 0,
                ready: None,
            });
            regions.insert(region, known);
        }
        let gone = std::mem::replace(&mut self.regions, regions);
        for (region, known) in gone {
            self.turn_round(region, known.ready.unwrap_or_default(), &BTreeSet::new());
            self.reported.remove(region);
        }
    }

    /// A region no longer has `before` ready, but `after`.
    fn turn_round(
        &mut self,
        region: RegionIndex,
        before: BTreeSet<DeploymentName>,
        after: &BTreeSet<DeploymentName>,
    ) {
        for name in before.difference(after) {
            if let Some(serving) = self.serving.get_mut(name) {
                serving.remove(region);
                if serving.is_empty() {
                    self.serving.remove(name);
                }
            }
        }
        for name in after.difference(&before) {
            self.serving.entry(name.clone()).or_insert(RegionSet::EMPTY).insert(region);
        }
    }

    /// A report came.
    pub fn reported(&mut self, region: RegionIndex, heard: Heard, now: Instant) {
        let Some(known) = self.regions.get_mut(&region) else {
            return;
        };
        let Heard { round_trip, ready, draining } = heard;
        let gap = known.silence(now);
        known.heard = Some(now);
        known.round_trip = round_trip;
        let ready = if draining { BTreeSet::new() } else { ready };
        let before = known.ready.replace(ready.clone());
        known.state = match known.state {
            State::Unknown | State::Suspect | State::Healthy => State::Healthy,
            State::Down => State::Returning { since: now },
            State::Returning { .. } if gap > LATE => State::Returning { since: now },
            State::Returning { since } if now.saturating_duration_since(since) >= RETURN_AFTER => {
                State::Healthy
            }
            State::Returning { since } => State::Returning { since },
        };
        if known.state == State::Healthy {
            known.failures = 0;
        }
        self.reported.insert(region);
        self.turn_round(region, before.unwrap_or_default(), &ready);
    }

    /// A request was answered there.
    pub fn answered(&mut self, region: RegionIndex, now: Instant) {
        let Some(known) = self.regions.get_mut(&region) else {
            return;
        };
        known.failures = 0;
        known.heard = Some(now);
        if matches!(known.state, State::Unknown | State::Suspect) {
            known.state = State::Healthy;
        }
    }

    /// A request could not be delivered there, or broke off before an answer.
    pub fn failed(&mut self, region: RegionIndex) -> Option<Worse> {
        let known = self.regions.get_mut(&region)?;
        known.failures = known.failures.saturating_add(1);
        if known.failures < FAILURES_MAX || known.state == State::Down {
            return None;
        }
        known.state = State::Down;
        Some(Worse { region, health: Health::Down })
    }

    /// Looks for silence; to be called at least every [`LOOK_PERIOD_MAX`].
    pub fn tick(&mut self, now: Instant) -> Vec<Worse> {
        self.forgive_own_sleep(now);
        if self.silence_is_ours(now) {
            return Vec::new();
        }
        let mut worse = Vec::new();
        for (&region, known) in &mut self.regions {
            if known.heard.is_none() {
                continue;
            }
            let silence = known.silence(now);
            let next = match known.state {
                State::Healthy | State::Suspect | State::Returning { .. } if silence > LOST => State::Down,
                State::Healthy if silence > LATE => State::Suspect,
                same => same,
            };
            if next != known.state {
                known.state = next;
                worse.push(Worse { region, health: known.health() });
            }
        }
        worse
    }

    /// Time in which nobody looked (this process was stopped, or starved) is nobody's silence: reports may have come and
    /// not been read.
    fn forgive_own_sleep(&mut self, now: Instant) {
        let Some(looked) = self.looked.replace(now) else { return };
        let slept = now.saturating_duration_since(looked).saturating_sub(LOOK_PERIOD_MAX);
        for known in self.regions.values_mut() {
            known.heard = known.heard.map(|heard| (heard + slept).min(now));
        }
    }

    /// Whether every region that was up went silent at once. One region alone can be its own fault.
    fn silence_is_ours(&self, now: Instant) -> bool {
        let up = self.regions.values().filter(|known| matches!(known.state, State::Healthy | State::Suspect));
        let (mut count, mut first, mut last) = (0, None, None);
        for known in up {
            if known.silence(now) <= LATE {
                return false;
            }
            count += 1;
            first = first.min(known.heard).or(known.heard);
            last = last.max(known.heard);
        }
        match (first, last) {
            (Some(first), Some(last)) => count >= 2 && last.saturating_duration_since(first) <= REPORT_PERIOD,
            _ => false,
        }
    }

    /// The regions that are heard from.
    pub fn heard(&self) -> impl Iterator<Item = RegionIndex> {
        let heard = |known: &Region| matches!(known.health(), Health::Healthy | Health::Suspect);
        self.regions.iter().filter(move |(_, known)| heard(known)).map(|(region, _)| *region)
    }

    /// The health of a region, for one deployment.
    pub fn health(&self, region: RegionIndex, deployment: &DeploymentName) -> Health {
        if self.reported.contains(region) && !self.says(region, deployment) {
            return Health::Down;
        }
        self.standing(region)
    }

    /// The health of a region, whatever it serves.
    pub fn standing(&self, region: RegionIndex) -> Health {
        self.regions.get(&region).map_or(Health::Unknown, Region::health)
    }

    /// The regions that have a replica ready for this deployment: by their own word, and where there is none yet by
    /// `registered`, what the route table says.
    pub fn serving(&self, deployment: &DeploymentName, registered: RegionSet) -> RegionSet {
        let said = self.serving.get(deployment).copied().unwrap_or(RegionSet::EMPTY);
        said.union(registered.minus(self.reported))
    }

    fn says(&self, region: RegionIndex, deployment: &DeploymentName) -> bool {
        self.serving.get(deployment).is_some_and(|serving| serving.contains(region))
    }

    /// The deployments that a region says it has a replica ready for; for operators.
    pub fn ready(&self, region: RegionIndex) -> Vec<&str> {
        let ready = self.regions.get(&region).and_then(|known| known.ready.as_ref());
        ready.into_iter().flatten().map(DeploymentName::as_str).collect()
    }

    /// The health of a region, whatever it serves, and how long ago it was heard of; for operators.
    pub fn state(&self, region: RegionIndex, now: Instant) -> (Health, Option<Duration>) {
        match self.regions.get(&region) {
            None => (Health::Unknown, None),
            Some(known) => (known.health(), known.heard.map(|heard| now.saturating_duration_since(heard))),
        }
    }
}

impl Region {
    fn silence(&self, now: Instant) -> Duration {
        let since = self.heard.map_or(Duration::ZERO, |heard| now.saturating_duration_since(heard));
        since.saturating_sub(self.round_trip / 2)
    }

    fn health(&self) -> Health {
        match self.state {
            State::Unknown => Health::Unknown,
            State::Healthy => Health::Healthy,
            State::Suspect | State::Returning { .. } => Health::Suspect,
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

    struct Story {
        fleet: Fleet,
        now: Instant,
        worse: Vec<Worse>,
    }

    fn region(number: u16) -> RegionIndex {
        RegionIndex::new(number.into()).expect("a small number")
    }

    fn deployment() -> DeploymentName {
        "d".parse().unwrap()
    }

    impl Story {
        fn of(count: u16) -> Story {
            let mut fleet = Fleet::default();
            fleet.watch((0..count).map(region));
            Story { fleet, now: some_instant(), worse: Vec::new() }
        }

        /// Lets `millis` pass; those in `speaking` report every period, the watch looks every 50 ms.
        fn pass(mut self, millis: u32, speaking: &[u16]) -> Story {
            for step in 1..=millis / 50 {
                self.now += 50 * MS;
                if step % 4 == 0 {
                    for &number in speaking {
                        self.report(number);
                    }
                }
                self.worse.extend(self.fleet.tick(self.now));
            }
            self
        }

        fn report(&mut self, number: u16) {
            let heard = Heard { round_trip: 100 * MS, ready: [deployment()].into(), draining: false };
            self.fleet.reported(region(number), heard, self.now);
        }

        fn fail(mut self, number: u16, times: u32) -> Story {
            (0..times).for_each(|_| self.worse.extend(self.fleet.failed(region(number))));
            self
        }

        fn expect(self, expected: &[Health]) -> Story {
            let seen: Vec<_> = (0..expected.len())
                .map(|number| self.fleet.health(region(number as u16), &deployment()))
                .collect();
            assert_eq!(seen, expected);
            self
        }
    }

    use Health::{Down, Healthy, Suspect, Unknown};

    #[test]
    fn a_region_that_falls_silent_is_suspected_and_then_down() {
        Story::of(2)
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
    fn a_late_report_clears_a_suspect_at_once_but_one_that_was_down_must_prove_itself() {
        Story::of(2)
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
    fn refusals_in_band_are_believed_over_reports() {
        Story::of(2)
            .pass(1000, &[0, 1])
            .fail(1, FAILURES_MAX - 1)
            .expect(&[Healthy, Healthy])
            .fail(1, 1)
            .expect(&[Healthy, Down])
            .pass(1000, &[0, 1])
            .expect(&[Healthy, Suspect]);
    }

    #[test]
    fn silence_of_everybody_at_once_is_the_gateways_own() {
        Story::of(3).pass(1000, &[0, 1, 2]).pass(60_000, &[]).expect(&[Healthy, Healthy, Healthy]);
        Story::of(1).pass(1000, &[0]).pass(3500, &[]).expect(&[Down]);
    }

    #[test]
    fn what_a_gateway_slept_through_is_nobodys_silence() {
        let mut story = Story::of(1).pass(1000, &[0]);
        story.now += Duration::from_secs(60);
        story.pass(550, &[]).expect(&[Healthy]);
        let mut story = Story::of(1).pass(1000, &[0]);
        story.now += Duration::from_secs(60);
        story.pass(1000, &[]).expect(&[Suspect]);
    }

    #[test]
    fn two_regions_that_die_one_after_the_other_are_both_found() {
        Story::of(3)
            .pass(1000, &[0, 1, 2])
            .pass(400, &[1, 2])
            .pass(4000, &[2])
            .expect(&[Down, Down, Healthy]);
    }

    #[test]
    fn those_who_wait_are_told_once_per_step() {
        let story = Story::of(2).pass(1000, &[0, 1]).pass(4000, &[0]);
        let told: Vec<_> = story.worse.iter().map(|worse| (worse.region, worse.health)).collect();
        assert_eq!(told, [(region(1), Suspect), (region(1), Down)]);
        assert_eq!(Story::of(1).pass(1000, &[0]).fail(0, 10).worse.len(), 1);
    }

    #[test]
    fn a_region_without_a_ready_replica_is_down_for_that_deployment_alone() {
        let mut story = Story::of(1).pass(1000, &[0]);
        assert_eq!(story.fleet.health(region(0), &"other".parse().unwrap()), Down);
        let heard = Heard { round_trip: MS, ready: [deployment()].into(), draining: true };
        story.fleet.reported(region(0), heard, story.now);
        story.expect(&[Down]);
    }

    proptest! {
        /// What all the reports say, turned round, is what each of them said last, whoever came, went, drained or was
        /// no longer watched meanwhile.
        #[test]
        fn who_serves_what_is_what_each_said_last(
            events in prop::collection::vec((0u16..4, prop::collection::btree_set("[a-c]", 0..3), 0u8..6), 1..60),
            registered in prop::collection::btree_set(0u16..4, 0..4),
        ) {
            let now = some_instant();
            let mut fleet = Fleet::default();
            let mut said: BTreeMap<u16, Option<BTreeSet<String>>> = (0..4).map(|number| (number, None)).collect();
            fleet.watch((0..4).map(region));
            for (number, names, what) in events {
                if what == 0 {
                    // No longer watched, and then again.
                    fleet.watch((0..4).filter(|other| *other != number).map(region));
                    fleet.watch((0..4).map(region));
                    said.insert(number, None);
                    continue;
                }
                let draining = what == 1;
                let ready = names.iter().map(|name| name.parse().unwrap()).collect();
                fleet.reported(region(number), Heard { round_trip: MS, ready, draining }, now);
                said.insert(number, Some(if draining { BTreeSet::new() } else { names }));
            }
            let registered: RegionSet = registered.into_iter().map(region).collect();
            for name in ["a", "b", "c"] {
                let deployment: DeploymentName = name.parse().unwrap();
                let serving = fleet.serving(&deployment, registered);
                for (number, names) in &said {
                    let expected = names.as_ref().map(|names| names.contains(name));
                    let at = region(*number);
                    prop_assert_eq!(serving.contains(at), expected.unwrap_or(registered.contains(at)));
                    prop_assert_eq!(fleet.health(at, &deployment) == Health::Down, expected == Some(false));
                }
            }
            let known: BTreeSet<&String> = said.values().flatten().flatten().collect();
            prop_assert_eq!(fleet.serving.len(), known.len(), "a deployment that nobody has is forgotten");
        }
    }
}
