//! Overflow: when a request goes past the nearest region because there is too much for it, and to which.
//!
//! Distance alone sends a surge to one region until it drowns, with idle ones an ocean away. Going by what others report
//! sends every gateway's surge to the same idle one. So who is *asked* to take overflow is decided by whoever would take
//! it: a region grants each gateway **credits**, in tokens, with every report (`scheduler_core::spoke::grants` has the
//! rationing, and the evidence). Here is the gateway's half:
//!
//! - **When.** A region whose queue holds a request up for longer than is calm gives away the share of its requests by which
//!   that is too long: `1 - calm / wait`, at most [`SHARE_MAX_PERMILLE`]. A share and not all, because a report is a moment old, and
//!   everybody who leaves at once comes back at once.
//! - **Where.** The nearest of the others that has granted enough, does not make it wait longer than it would here, and
//!   answers before its caller leaves. Only of regions that may see the request: whoever asks names them.
//! - **How much.** What would leave if all could is told to every region with the next question, so that who needs more
//!   is granted more.
//!
//! Credits are spent at once and end with the next report, or after three periods. Nothing here waits for anybody: without
//! a hub, and with reports that stopped, a request stays where it would have gone.

use crate::circuit::Permille;
use crate::health::REPORT_PERIOD;
use crate::priority::Priority;
use regions::id::DeploymentName;
use regions::set::RegionIndex;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// At most so much of a region's requests goes elsewhere: it stays busy, and its next report says what is right.
const SHARE_MAX_PERMILLE: u16 = 700;
/// A queue of this length is calm: a lookup does not notice it, and a batch or two need it.
const CALM_LOOKUP: Duration = Duration::from_millis(50);
/// A backfill notices less.
const CALM_BULK: Duration = Duration::from_secs(1);
/// Further than this beyond what it saves, a request does not go for room. It may cost it more than it saves: what leaves
/// makes room for those behind it.
const DETOUR_MAX: Duration = Duration::from_millis(250);
/// For how long a credit is good, counted from the question: three periods, so that one that was answered from the other
/// side of the world is good for one at least.
const CREDIT_FOR: Duration = REPORT_PERIOD.checked_mul(3).expect("three periods are no more than a second");
/// Deployments whose overflow is counted at a time; one more begins anew.
const WANTED_MAX: usize = 4096;

/// A region that a request could go to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Which.
    pub region: RegionIndex,
    /// There and back.
    pub rtt: Duration,
    /// How long the request would wait in its queues, by its last report; nothing where that is not known.
    pub wait: Option<Duration>,
}

/// A request that would go to the nearest region.
#[derive(Clone, Copy, Debug)]
pub struct Ask<'a> {
    /// For what.
    pub deployment: &'a DeploymentName,
    /// In which priority.
    pub priority: Priority,
    /// How much it is.
    pub tokens: u64,
    /// How long its caller will still wait.
    pub left: Duration,
    /// It would be turned away there.
    pub turned_away: bool,
    /// Its own, drawn once.
    pub chance: Permille,
}

/// Decision about a request whose primary region is not calm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Departure {
    /// Tokens that would leave, on the average, if every region granted enough credit.
    pub demand: u64,
    /// Tokens of the request.
    pub tokens: u64,
    /// Region that it leaves for; `None`: it stays.
    pub to: Option<RegionIndex>,
}

/// What regions have offered, and what was wanted of them.
#[derive(Clone, Debug, Default)]
pub struct Spill {
    offers: BTreeMap<RegionIndex, Offers>,
    wanted: BTreeMap<DeploymentName, Wanted>,
}

#[derive(Clone, Debug)]
struct Offers {
    tokens: BTreeMap<DeploymentName, u64>,
    until: Instant,
}

/// The current period and the last.
#[derive(Clone, Copy, Debug)]
struct Wanted {
    tokens: [u64; 2],
    since: Instant,
}

impl Spill {
    /// A region has granted this much in answer to what it was `asked`; what it granted before is over.
    pub fn heard(&mut self, region: RegionIndex, granted: BTreeMap<DeploymentName, u64>, asked: Instant) {
        self.offers.insert(region, Offers { tokens: granted, until: asked + CREDIT_FOR });
    }

    /// Keeps what exactly these have offered.
    pub fn watch(&mut self, wanted: impl Fn(RegionIndex) -> bool) {
        self.offers.retain(|region, _| wanted(*region));
    }

    /// What would have gone elsewhere in a period if all could, in tokens: what to tell a region that is asked now.
    pub fn wanted(&self, deployment: &DeploymentName, now: Instant) -> u64 {
        let [current, last] = self.wanted.get(deployment).map_or([0; 2], |wanted| wanted.at(now).tokens);
        current.max(last)
    }

    /// What may still be sent to `region`.
    pub fn credit(&self, region: RegionIndex, deployment: &DeploymentName, now: Instant) -> u64 {
        self.offered(region, deployment, now).unwrap_or(0)
    }

    /// The same, and nothing where the region has not offered anything: a request that costs nothing (`/info`) goes only to
    /// one that has.
    fn offered(&self, region: RegionIndex, deployment: &DeploymentName, now: Instant) -> Option<u64> {
        let good = self.offers.get(&region).filter(|offers| now < offers.until)?;
        good.tokens.get(deployment).copied()
    }

    /// Decides whether a request leaves `home`, its primary region, and for which of `others`: healthy regions that may see it,
    /// nearest first. `None`: its primary is calm. Spends nothing; see [`Spill::commit`].
    pub fn decide(
        &self,
        ask: &Ask<'_>,
        home: Place,
        others: &[Place],
        now: Instant,
    ) -> Option<Departure> {
        let share = share(ask, home)?;
        let demand = u128::from(ask.tokens) * u128::from(share.get()) / 1000;
        let demand = u64::try_from(demand).expect("a part of a number of tokens");
        let to = if ask.chance < share { self.target(ask, home, others, now) } else { None };
        Some(Departure { demand, tokens: ask.tokens, to })
    }

    /// Nearest region that has granted enough credit, responds sooner than `home`, and in time.
    fn target(&self, ask: &Ask<'_>, home: Place, others: &[Place], now: Instant) -> Option<RegionIndex> {
        let wait = home.wait.unwrap_or_default();
        let to = others.iter().find(|other| {
            let there = other.wait.unwrap_or_default();
            let detour = other.rtt.saturating_sub(home.rtt);
            self.offered(other.region, ask.deployment, now).is_some_and(|tokens| tokens >= ask.tokens)
                && (there < wait || ask.turned_away)
                && detour <= wait + DETOUR_MAX
                && other.rtt + there < ask.left
        })?;
        Some(to.region)
    }

    /// Counts the demand of a departure, and spends the credit that it uses.
    pub fn commit(&mut self, deployment: &DeploymentName, departure: Departure, now: Instant) {
        self.wants(deployment, departure.demand, now);
        let offers = departure.to.and_then(|region| self.offers.get_mut(&region));
        if let Some(tokens) = offers.and_then(|offers| offers.tokens.get_mut(deployment)) {
            *tokens = tokens.saturating_sub(departure.tokens);
        }
    }

    /// Whether one of these would take so much of a deployment's overflow. Spends nothing.
    pub fn would_take(
        &self,
        deployment: &DeploymentName,
        tokens: u64,
        regions: impl IntoIterator<Item = RegionIndex>,
        now: Instant,
    ) -> bool {
        regions
            .into_iter()
            .any(|region| self.offered(region, deployment, now).is_some_and(|offered| offered >= tokens))
    }

    fn wants(&mut self, deployment: &DeploymentName, tokens: u64, now: Instant) {
        if let Some(wanted) = self.wanted.get_mut(deployment) {
            *wanted = wanted.at(now);
            wanted.tokens[0] = wanted.tokens[0].saturating_add(tokens);
            return;
        }
        if self.wanted.len() >= WANTED_MAX {
            self.wanted.clear();
        }
        self.wanted.insert(deployment.clone(), Wanted { tokens: [tokens, 0], since: now });
    }
}

impl Wanted {
    fn at(self, now: Instant) -> Wanted {
        let passed = now.saturating_duration_since(self.since).as_millis() / REPORT_PERIOD.as_millis();
        match passed {
            0 => self,
            1 => Wanted { tokens: [0, self.tokens[0]], since: self.since + REPORT_PERIOD },
            _ => Wanted { tokens: [0; 2], since: now },
        }
    }
}

impl Ask<'_> {
    /// Whether it stays for certain, wherever else there may be room.
    pub fn is_calm_at(&self, home: Place) -> bool {
        share(self, home).is_none()
    }
}

/// What part of the requests like this one leaves; nothing where it is calm.
fn share(ask: &Ask<'_>, home: Place) -> Option<Permille> {
    if ask.turned_away {
        return Some(Permille::ALL);
    }
    let calm = match ask.priority {
        Priority::Interactive => CALM_LOOKUP,
        Priority::Bulk => CALM_BULK,
    };
    let wait = home.wait.filter(|wait| *wait > calm)?;
    let stays = u16::try_from(calm.as_micros() * 1000 / wait.as_micros()).expect("a part of a thousand");
    Some(Permille::new((1000 - stays).min(SHARE_MAX_PERMILLE)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::some_instant;

    const MS: Duration = Duration::from_millis(1);

    fn at(number: usize) -> RegionIndex {
        RegionIndex::new(number).expect("a small number")
    }

    fn name() -> DeploymentName {
        "d".parse().unwrap()
    }

    fn place(number: usize, rtt_ms: u32, wait_ms: u32) -> Place {
        Place { region: at(number), rtt: rtt_ms * MS, wait: Some(wait_ms * MS) }
    }

    /// Region 0 is home, and the others have granted something.
    struct Story {
        spill: Spill,
        now: Instant,
    }

    impl Story {
        fn with(granted: &[u64]) -> Story {
            let (mut spill, now) = (Spill::default(), some_instant());
            for (place, tokens) in granted.iter().enumerate() {
                spill.heard(at(place + 1), [(name(), *tokens)].into(), now);
            }
            Story { spill, now }
        }
    }

    impl Spill {
        fn leaves(&mut self, ask: &Ask<'_>, home: Place, others: &[Place], now: Instant) -> Option<RegionIndex> {
            let departure = self.decide(ask, home, others, now)?;
            self.commit(ask.deployment, departure, now);
            departure.to
        }
    }

    /// A lookup of a hundred tokens that is among the first to leave.
    fn lookup(name: &DeploymentName) -> Ask<'_> {
        let (left, chance) = (Duration::from_secs(30), Permille::new(0));
        Ask {
            deployment: name,
            priority: Priority::Interactive,
            tokens: 100,
            left,
            turned_away: false,
            chance,
        }
    }

    #[test]
    fn so_much_of_a_region_leaves_as_makes_its_queue_calm() {
        let leaves = |wait_ms: u32, priority: Priority, chance: u16| {
            let (mut story, name) = (Story::with(&[1000]), name());
            let ask = Ask { priority, chance: Permille::new(chance), ..lookup(&name) };
            let (home, other) = (place(0, 20, wait_ms), place(1, 40, 0));
            story.spill.leaves(&ask, home, &[other], story.now).is_some()
        };
        use Priority::{Bulk, Interactive};
        assert!(!leaves(50, Interactive, 0), "that is calm");
        assert!(leaves(100, Interactive, 499) && !leaves(100, Interactive, 500));
        assert!(leaves(10_000, Interactive, 699) && !leaves(10_000, Interactive, 700), "never all");
        assert!(!leaves(1000, Bulk, 0) && leaves(2000, Bulk, 499) && !leaves(2000, Bulk, 500));
    }

    #[test]
    fn it_goes_to_the_nearest_that_has_room_for_it_and_is_worth_it() {
        let goes = |granted: &[u64], others: &[Place], left_ms: u32| {
            let (mut story, name) = (Story::with(granted), name());
            let ask = Ask { left: left_ms * MS, ..lookup(&name) };
            story.spill.leaves(&ask, place(0, 20, 400), others, story.now)
        };
        let others = [place(1, 60, 0), place(2, 90, 0)];
        assert_eq!(goes(&[100, 1000], &others, 5000), Some(at(1)));
        assert_eq!(goes(&[99, 1000], &others, 5000), Some(at(2)), "the nearest has granted too little");
        assert_eq!(goes(&[99, 99], &others, 5000), None);
        assert_eq!(
            goes(&[100, 100], &[place(1, 60, 400), place(2, 90, 399)], 5000),
            Some(at(2)),
            "no quicker there"
        );
        assert_eq!(goes(&[100], &[place(1, 670, 0)], 5000), Some(at(1)));
        assert_eq!(goes(&[100], &[place(1, 671, 0)], 5000), None, "too far");
        assert_eq!(goes(&[100], &[place(1, 60, 300)], 360), None, "its caller would be gone");
        assert_eq!(goes(&[100], &[place(1, 60, 300)], 361), Some(at(1)));
        assert_eq!(goes(&[100, 100], &[], 5000), None, "nobody else may see it");
    }

    #[test]
    fn a_credit_is_spent_once_and_not_for_ever_good() {
        let name = name();
        let ask = lookup(&name);
        let leaves = |story: &mut Story, now| {
            story.spill.leaves(&ask, place(0, 20, 400), &[place(1, 60, 0)], now).is_some()
        };
        let mut story = Story::with(&[250]);
        let now = story.now;
        assert!(leaves(&mut story, now) && leaves(&mut story, now) && !leaves(&mut story, now));
        story.spill.heard(at(1), [(name.clone(), 100)].into(), now);
        assert!(
            leaves(&mut story, now) && !leaves(&mut story, now),
            "a new grant is in the place of the old"
        );
        let mut story = Story::with(&[1000]);
        let last = story.now + CREDIT_FOR - MS;
        assert!(leaves(&mut story, last));
        assert!(!leaves(&mut story, last + MS), "the region may have granted it to others by now");
        let mut story = Story::with(&[1000]);
        story.spill.watch(|region| region != at(1));
        assert!(!leaves(&mut story, now));
    }

    #[test]
    fn who_would_be_turned_away_leaves_wherever_there_is_room() {
        let name = name();
        let ask = Ask { turned_away: true, chance: Permille::new(999), ..lookup(&name) };
        let mut story = Story::with(&[100]);
        assert!(story.spill.would_take(&name, 100, [at(1)], story.now));
        assert!(!story.spill.would_take(&name, 101, [at(1)], story.now));
        let unknown = Place { wait: None, ..place(0, 20, 0) };
        assert_eq!(story.spill.leaves(&ask, unknown, &[place(1, 60, 500)], story.now), Some(at(1)));
    }

    #[test]
    fn a_request_that_costs_nothing_goes_only_where_something_was_offered() {
        let name = name();
        let ask = Ask { tokens: 0, turned_away: true, ..lookup(&name) };
        let others = [place(1, 60, 0), place(2, 90, 0)];
        let mut story = Story::with(&[]);
        assert_eq!(story.spill.leaves(&ask, place(0, 20, 400), &others, story.now), None);
        assert!(!story.spill.would_take(&name, 0, [at(1), at(2)], story.now));
        // Nothing of this deployment, and nothing left of it.
        story.spill.heard(at(1), BTreeMap::new(), story.now);
        story.spill.heard(at(2), [(name.clone(), 0)].into(), story.now);
        assert_eq!(story.spill.leaves(&ask, place(0, 20, 400), &others, story.now), Some(at(2)));
        assert!(story.spill.would_take(&name, 0, [at(1), at(2)], story.now));
    }

    #[test]
    fn what_is_wanted_is_what_would_leave_if_all_could() {
        let name = name();
        let mut story = Story::with(&[]);
        let now = story.now;
        let mut asks = |wait_ms, chance, at| {
            let ask = Ask { chance: Permille::new(chance), ..lookup(&name) };
            story.spill.leaves(&ask, place(0, 20, wait_ms), &[], at);
            story.spill.wanted(&name, at)
        };
        assert_eq!(asks(50, 0, now), 0);
        assert_eq!(asks(100, 0, now), 50);
        assert_eq!(asks(100, 999, now), 100, "also of who stays");
        assert_eq!(asks(200, 0, now + REPORT_PERIOD), 100, "the last period was more");
        assert_eq!(story.spill.wanted(&name, now + REPORT_PERIOD * 2), 70);
        assert_eq!(story.spill.wanted(&name, now + REPORT_PERIOD * 3), 0);
    }

    #[test]
    fn as_many_deployments_are_counted_as_may_be_and_one_more_begins_anew() {
        let mut spill = Spill::default();
        let now = some_instant();
        let mut wants = |number: usize| {
            let name: DeploymentName = format!("d{number}").parse().unwrap();
            let unused = spill.leaves(&lookup(&name), place(0, 20, 100), &[], now);
            assert_eq!(unused, None);
            spill.wanted.len()
        };
        (1..WANTED_MAX).for_each(|number| assert_eq!(wants(number), number));
        assert_eq!(wants(WANTED_MAX), WANTED_MAX);
        assert_eq!(wants(0), 1);
    }
}
