//! What the requests of one process have seen of everybody whom it may ask: how long they take ([`pace`](crate::pace)),
//! whether they are left alone for a while ([`circuit`](crate::circuit)), and how much waits for them.
//!
//! The edge keeps it for regions, the regional ingress for replicas; the two differ in whom they measure a first byte
//! against. The replicas of a region stand side by side, so the best of them says what is possible, and one that was
//! always slow is late. Regions stand at different distances, so each is measured against itself.
//!
//! Everything here is seen in band. What somebody says of themselves (reports, status) is kept elsewhere and looked at
//! beside this: a frozen process says nothing, and a slow one that it is well.

use crate::circuit::{Circuits, Permille, Standing};
use crate::outlier::Evidence;
use crate::pace::{Pace, Patience, Size};
use regions::id::DeploymentName;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Paces that are kept, one for each target and deployment that was asked: some ten megabytes. The next one starts all
/// of them over, which costs a few dozen requests their deadlines.
pub const PACES_MAX: usize = 8192;
/// No hedge before this: what is quicker is not worth a second request.
const HEDGE_FLOOR: Duration = Duration::from_millis(20);
/// How fast it is forgotten that somebody was slower than the best: what exceeds the best halves every so often while
/// nobody asks them. Then they get one request, and are believed what it says.
const SLOWNESS_HALVES: Duration = Duration::from_secs(5);
/// Somebody is left for another who is as near when they take twice as long and this much longer: below it is noise, and
/// whoever runs after noise drives everybody to and fro.
const SLOW_BY: Duration = Duration::from_millis(25);
/// The share of requests by which somebody who is not known yet is tried out: a dozen and a half of them is enough.
const TRIED_OUT_PERMILLE: u16 = 125;
/// The most by which somebody can be found slower than the best.
const SLOWNESS_MAX_PERMILLE: u64 = 1_000_000;

/// Against whose times a first byte is late.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Yardstick {
    /// The target's own.
    Own,
    /// Those of the best target for the same deployment.
    Best,
}

/// Everybody who may be asked.
#[derive(Clone, Debug)]
pub struct Targets<K> {
    patience: Patience,
    yardstick: Yardstick,
    in_flight_max: u32,
    circuits: Circuits<K>,
    paces: BTreeMap<DeploymentName, BTreeMap<K, Pace>>,
    paces_kept: usize,
    in_flight: BTreeMap<K, u32>,
}

/// A request that waits for an answer.
#[derive(Debug)]
pub struct UnderWay<K> {
    /// Who was asked.
    pub key: K,
    on_trial: bool,
}

/// What is known of one target; for operators.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CircuitState<K> {
    /// Who.
    pub target: K,
    /// Whether it is left alone.
    pub standing: Standing,
    /// Requests that wait for it.
    pub in_flight: u32,
    /// As many as may.
    pub in_flight_max: u32,
    /// After how long a first byte is late, by deployment and size of the request; where none is given it is not known
    /// yet.
    pub first_byte: Vec<(DeploymentName, Size, Duration)>,
}

impl<K: Copy + Ord> Targets<K> {
    /// Nobody yet. At most `in_flight_max` requests wait for each.
    pub fn new(patience: Patience, yardstick: Yardstick, in_flight_max: u32) -> Targets<K> {
        Targets {
            patience,
            yardstick,
            in_flight_max,
            circuits: Circuits::default(),
            paces: BTreeMap::new(),
            paces_kept: 0,
            in_flight: BTreeMap::new(),
        }
    }

    /// Keeps exactly these from now on, and what is known of those who stay.
    pub fn watch(&mut self, wanted: impl IntoIterator<Item = K> + Clone) {
        self.circuits.watch(wanted.clone());
        let wanted: std::collections::BTreeSet<K> = wanted.into_iter().collect();
        self.paces.values_mut().for_each(|paces| paces.retain(|key, _| wanted.contains(key)));
        self.paces.retain(|_, paces| !paces.is_empty());
        self.paces_kept = self.paces.values().map(BTreeMap::len).sum();
        // Whoever has gone is forgotten with the last request that waits for it.
        self.in_flight.retain(|key, waiting| *waiting > 0 || wanted.contains(key));
    }

    /// How `key` stands.
    pub fn standing(&self, key: K, now: Instant) -> Standing {
        self.circuits.standing(key, now)
    }

    /// Requests that wait for `key`.
    pub fn in_flight(&self, key: K) -> u32 {
        self.in_flight.get(&key).copied().unwrap_or(0)
    }

    /// As many as may wait for each.
    pub fn in_flight_max(&self) -> u32 {
        self.in_flight_max
    }

    /// Whether as many wait for `key` as may.
    pub fn is_full(&self, key: K) -> bool {
        self.in_flight(key) >= self.in_flight_max
    }

    /// Whether so few wait for `key` that it may be asked for what need not be asked.
    pub fn is_calm(&self, key: K) -> bool {
        self.in_flight(key) < self.in_flight_max / 2
    }

    /// A request is sent to `key`. What this returns is given back when it is [over](Targets::ended).
    pub fn began(&mut self, key: K, now: Instant) -> UnderWay<K> {
        *self.in_flight.entry(key).or_default() += 1;
        UnderWay { key, on_trial: self.circuits.began(key, now) }
    }

    /// A request is over, however it ended. If it was a trial and nothing was [seen](Targets::saw) of it, another may try.
    pub fn ended(&mut self, request: &UnderWay<K>, now: Instant) {
        // This runs where a request is dropped, under a lock that everybody takes, and must not fail.
        match self.in_flight.get_mut(&request.key).filter(|waiting| **waiting > 0) {
            Some(waiting) => *waiting -= 1,
            None => debug_assert!(false, "an attempt ends once, after it began"),
        }
        if request.on_trial {
            self.circuits.given_up(request.key, now);
        }
    }

    /// A request was overtaken by one that was sent later elsewhere.
    pub fn overtaken(&mut self, request: &UnderWay<K>, chance: Permille, now: Instant) {
        if request.on_trial {
            self.circuits.overtaken(request.key, chance, now);
        }
    }

    /// Counts what a request to `key` says about it. `chance` spreads the return. True when `key` is ejected for it.
    pub fn saw(&mut self, key: K, evidence: Evidence, chance: Permille, now: Instant) -> bool {
        self.circuits.saw(key, evidence, chance, now)
    }

    /// Whether an answer that came in time was all the same too slow to speak for whoever gave it. Somebody grey, who is slower
    /// by much and dead by nothing, has little to do while it is left alone, so that a trial just comes in time; taken at that
    /// it would be given its share again, and again be late with it. So on trial it has to be about as quick as is usual.
    pub fn too_slow_for_a_trial(
        &self,
        key: K,
        deployment: &DeploymentName,
        size: Size,
        took: Duration,
        now: Instant,
    ) -> bool {
        if !self.circuits.has_to_be_quick(key, now) {
            return false;
        }
        let Some(paces) = self.paces.get(deployment) else { return false };
        let usual = match self.yardstick {
            Yardstick::Own => paces.get(&key).and_then(|pace| pace.usual(size)),
            Yardstick::Best => paces.values().filter_map(|pace| pace.usual(size)).min(),
        };
        usual.is_some_and(|usual| took > 2 * usual + SLOW_BY)
    }

    /// An answer to a request of this size took so long.
    pub fn took(&mut self, key: K, deployment: &DeploymentName, size: Size, took: Duration, now: Instant) {
        self.pace_of(key, deployment).saw(size, took, now);
    }

    /// An answer to a request of this size was given up after so long.
    pub fn gave_up(
        &mut self,
        key: K,
        deployment: &DeploymentName,
        size: Size,
        waited: Duration,
        now: Instant,
    ) {
        self.pace_of(key, deployment).gave_up(size, waited, now);
    }

    /// After how long the first byte of an answer is late; `None` until enough was seen to say.
    pub fn first_byte(&self, key: K, deployment: &DeploymentName, size: Size) -> Option<Duration> {
        let paces = self.paces.get(deployment)?;
        let average = match self.yardstick {
            Yardstick::Own => paces.get(&key)?.average(size),
            Yardstick::Best => paces.values().filter_map(|pace| pace.average(size)).min(),
        };
        average.map(|average| self.patience.after(average))
    }

    /// How long an answer to a request of this size takes on the average, as soon as one was seen.
    pub fn usually(&self, key: K, deployment: &DeploymentName, size: Size) -> Option<Duration> {
        self.paces.get(deployment)?.get(&key)?.hint(size).map(|(average, _)| average)
    }

    /// After how long a hedge is worth it; `None` until enough was seen to say.
    pub fn hedge_after(&self, key: K, deployment: &DeploymentName, size: Size) -> Option<Duration> {
        let nearly_all = self.paces.get(deployment)?.get(&key)?.nearly_all(size)?;
        Some(nearly_all.max(HEDGE_FLOOR))
    }

    /// How many thousandths of the best one's time `key` takes: 1000 and more. 1000 for whoever is not known.
    pub fn slowness_permille(&self, key: K, deployment: &DeploymentName, size: Size, now: Instant) -> u64 {
        let hint = |pace: &Pace| pace.hint(size).map(|(average, _)| average.as_micros() as u64);
        let Some(paces) = self.paces.get(deployment) else { return 1000 };
        let Some((own, last)) = paces.get(&key).and_then(|pace| pace.hint(size)) else { return 1000 };
        let best = paces.values().filter_map(hint).min().unwrap_or(0).max(1);
        let ratio = (own.as_micros() as u64).saturating_mul(1000) / best;
        let excess = ratio.clamp(1000, SLOWNESS_MAX_PERMILLE) - 1000;
        let halvings = now.saturating_duration_since(last).as_millis() / SLOWNESS_HALVES.as_millis();
        1000 + excess.checked_shr(u32::try_from(halvings).unwrap_or(u32::MAX)).unwrap_or(0)
    }

    /// Which of these, nearest first and all about as near, is asked first: the nearest, unless it is much slower than
    /// another. One of whom not enough is known is now and then asked to find out.
    pub fn preferred(
        &self,
        mut near: impl Iterator<Item = K> + Clone,
        deployment: &DeploymentName,
        size: Size,
        chance: Permille,
        now: Instant,
    ) -> Option<K> {
        let paces = self.paces.get(deployment);
        let average = |key: &K| paces?.get(key)?.average(size);
        if chance >= Permille::new(1000 - TRIED_OUT_PERMILLE)
            && let Some(unknown) = near.clone().find(|key| average(key).is_none())
        {
            return Some(unknown);
        }
        let best = near.clone().filter_map(|key| average(&key)).min()?;
        let slower = |key: &K| {
            let slowness =
                u32::try_from(self.slowness_permille(*key, deployment, size, now)).unwrap_or(u32::MAX);
            best.saturating_mul(slowness) / 1000 > 2 * best + SLOW_BY
        };
        near.find(|key| !slower(key))
    }

    /// What is known of everybody; for operators.
    pub fn states(&self, now: Instant) -> Vec<CircuitState<K>> {
        self.circuits.watched().map(|key| self.state(key, now)).collect()
    }

    fn state(&self, target: K, now: Instant) -> CircuitState<K> {
        let mut first_byte = Vec::new();
        for (deployment, paces) in &self.paces {
            for (size, _) in paces.get(&target).into_iter().flat_map(Pace::averages) {
                let deadline = self.first_byte(target, deployment, size);
                first_byte.extend(deadline.map(|deadline| (deployment.clone(), size, deadline)));
            }
        }
        CircuitState {
            target,
            standing: self.standing(target, now),
            in_flight: self.in_flight(target),
            in_flight_max: self.in_flight_max,
            first_byte,
        }
    }

    fn pace_of(&mut self, key: K, deployment: &DeploymentName) -> &mut Pace {
        let known = self.paces.get(deployment).is_some_and(|paces| paces.contains_key(&key));
        if !known {
            if self.paces_kept == PACES_MAX {
                self.paces.clear();
                self.paces_kept = 0;
            }
            self.paces_kept += 1;
            self.paces.entry(deployment.clone()).or_default().insert(key, Pace::default());
        }
        let paces = self.paces.get_mut(deployment).expect("it was there or was just put there");
        paces.get_mut(&key).expect("it was there or was just put there")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::circuit::MISSES_MAX;
    use crate::outlier::Seen;
    use crate::pace::SAMPLES_MIN;
    use crate::some_instant;

    const MS: Duration = Duration::from_millis(1);

    fn name(text: &str) -> DeploymentName {
        text.parse().unwrap()
    }

    /// Target `n` takes `takes[n]` milliseconds.
    fn of(yardstick: Yardstick, takes: &[u32]) -> (Targets<usize>, Instant) {
        let now = some_instant();
        let mut targets = Targets::new(Patience::WITH_A_REPLICA, yardstick, 8);
        targets.watch(0..takes.len());
        for (key, millis) in takes.iter().enumerate() {
            (0..SAMPLES_MIN).for_each(|_| targets.took(key, &name("d"), Size::of(1), *millis * MS, now));
        }
        (targets, now)
    }

    #[test]
    fn a_replica_is_late_by_the_best_of_them_and_a_region_by_its_own_distance() {
        let late = |yardstick, key, deployment: &str, tokens| {
            let (targets, _) = of(yardstick, &[20, 400]);
            targets.first_byte(key, &name(deployment), Size::of(tokens))
        };
        assert_eq!(late(Yardstick::Best, 1, "d", 1), Some(80 * MS));
        assert_eq!(late(Yardstick::Own, 1, "d", 1), Some(1600 * MS));
        assert_eq!(late(Yardstick::Best, 1, "d", 2), None);
        assert_eq!(late(Yardstick::Best, 1, "other", 1), None);
    }

    #[test]
    fn somebody_slow_is_asked_again_after_a_while_and_believed() {
        let (mut targets, now) = of(Yardstick::Best, &[20, 400]);
        let slowness =
            |targets: &Targets<usize>, key, now| targets.slowness_permille(key, &name("d"), Size::of(1), now);
        assert_eq!((slowness(&targets, 0, now), slowness(&targets, 1, now)), (1000, 20_000));
        assert_eq!(slowness(&targets, 1, now + SLOWNESS_HALVES), 10_500);
        assert_eq!(slowness(&targets, 1, now + 600 * SLOWNESS_HALVES), 1000);
        let later = now + 2 * SLOWNESS_HALVES;
        targets.gave_up(1, &name("d"), Size::of(1), 80 * MS, later);
        assert_eq!(slowness(&targets, 1, later), 20_000, "still slow");
        assert_eq!(targets.slowness_permille(1, &name("new"), Size::of(1), now), 1000);
    }

    #[test]
    fn the_nearest_is_asked_first_unless_it_is_much_slower_than_another_as_near() {
        let preferred = |takes: &[u32], chance| {
            let (targets, now) = of(Yardstick::Own, takes);
            targets.preferred(0..2, &name("d"), Size::of(1), Permille::new(chance), now)
        };
        assert_eq!(preferred(&[20, 20], 999), Some(0));
        assert_eq!(preferred(&[65, 20], 0), Some(0), "a little slower");
        assert_eq!(preferred(&[66, 20], 0), Some(1));
        assert_eq!(preferred(&[20, 400], 0), Some(0));
        assert_eq!(preferred(&[400], 0), Some(0), "nobody knows whether the other is better");
        assert_eq!((preferred(&[400], 874), preferred(&[400], 875)), (Some(0), Some(1)), "some try it out");
        let (targets, now) = of(Yardstick::Own, &[400, 20]);
        let later = now + 4 * SLOWNESS_HALVES;
        let again = targets.preferred(0..2, &name("d"), Size::of(1), Permille::new(0), later);
        assert_eq!(again, Some(0), "after a while it is asked again");
    }

    #[test]
    fn so_many_wait_for_one_and_no_more() {
        let (mut targets, now) = of(Yardstick::Own, &[20]);
        assert!(targets.is_calm(0));
        for _ in 0..4 {
            targets.began(0, now);
        }
        assert!(!targets.is_calm(0) && !targets.is_full(0));
        for _ in 0..3 {
            targets.began(0, now);
        }
        assert!(!targets.is_full(0));
        let last = targets.began(0, now);
        assert!(targets.is_full(0));
        targets.ended(&last, now);
        assert!(!targets.is_full(0));
    }

    /// A region ten times slower, whose trials come in time because it has nothing else to do.
    #[test]
    fn somebody_grey_does_not_return_by_an_answer_that_just_comes_in_time_until_it_is_believed() {
        let (mut targets, mut now) = of(Yardstick::Own, &[25, 25]);
        let (name, size, none) = (name("d"), Size::of(1), Permille::new(0));
        (0..500).for_each(|_| targets.took(0, &name, size, 25 * MS, now));
        for _ in 0..MISSES_MAX {
            targets.gave_up(0, &name, size, 125 * MS, now);
            targets.saw(0, Evidence::of(Seen::Missed), none, now);
        }
        let mut trials = 0;
        while let Standing::Ejected { until } = targets.standing(0, now) {
            now = until;
            let trial = targets.began(0, now);
            let slow = targets.too_slow_for_a_trial(0, &name, size, 118 * MS, now);
            assert!(!targets.too_slow_for_a_trial(0, &name, size, 60 * MS, now), "about as quick");
            targets.took(0, &name, size, 118 * MS, now);
            targets.saw(0, Evidence::of(if slow { Seen::Missed } else { Seen::Answered }), none, now);
            targets.ended(&trial, now);
            trials += 1;
        }
        assert_eq!(trials, 6, "five are not, and the next is believed");
        assert!(!targets.too_slow_for_a_trial(1, &name, size, 500 * MS, now), "who is not on trial has none");
    }

    #[test]
    fn a_hedge_waits_its_floor_at_least() {
        let (targets, _) = of(Yardstick::Own, &[2, 80]);
        assert_eq!(targets.hedge_after(0, &name("d"), Size::of(1)), Some(HEDGE_FLOOR));
        assert!(targets.hedge_after(1, &name("d"), Size::of(1)).unwrap() >= 80 * MS);
    }

    #[test]
    fn as_many_paces_are_kept_as_may_be_and_one_more_starts_over() {
        let (mut targets, now) = of(Yardstick::Own, &[20]);
        let ask = |targets: &mut Targets<usize>, n: usize| {
            targets.took(0, &name(&format!("d{n}")), Size::of(1), MS, now)
        };
        (1..PACES_MAX).for_each(|n| ask(&mut targets, n));
        assert!(targets.first_byte(0, &name("d"), Size::of(1)).is_some());
        ask(&mut targets, PACES_MAX);
        assert!(targets.first_byte(0, &name("d"), Size::of(1)).is_none());
        assert_eq!(targets.paces.len(), 1);
    }

    #[test]
    fn whoever_is_no_longer_watched_is_forgotten() {
        let (mut targets, now) = of(Yardstick::Own, &[20, 20]);
        targets.watch([1]);
        assert_eq!(targets.first_byte(0, &name("d"), Size::of(1)), None);
        assert!(targets.first_byte(1, &name("d"), Size::of(1)).is_some());
        let state = &targets.states(now)[0];
        assert_eq!((state.standing, state.in_flight, state.first_byte.len()), (Standing::Closed, 0, 1));
    }
}
