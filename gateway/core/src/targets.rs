//! Observations of the requests of one process about all its targets: latency ([`latency`](crate::latency)), circuit
//! breaker ([`circuit`](crate::circuit)), and requests in flight.
//!
//! The edge keeps them for regions, the regional ingress for replicas; the two differ in the baseline of a first-byte
//! timeout. The replicas of a region are at the same distance, so the fastest of them shows the latency to expect, and
//! a replica that was always slow times out. Regions are at different distances, so each is measured against its own
//! history.
//!
//! All observations are in-band. Reports and statuses that targets send about themselves are kept elsewhere and used in
//! addition: a frozen process sends none, and a slow one reports that it is healthy.

use crate::circuit::{BreakerState, Circuits, Permille};
use crate::latency::{FirstByteTimeout, LatencyStats, SizeClass, decayed_slowness};
use crate::outlier::OutlierEvidence;
use regions::id::DeploymentName;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Maximum latency records, one for each target and deployment: some ten megabytes. One more clears all of them, which
/// costs a few dozen requests their first-byte timeouts.
pub const LATENCIES_MAX: usize = 8192;
/// Minimum delay of a hedge: a faster response is not worth a second request.
const HEDGE_DELAY_MIN: Duration = Duration::from_millis(20);
/// A target is passed over for another one at the same distance if it takes twice as long and this much longer. Smaller
/// differences are noise, and following them makes traffic oscillate.
const SLOW_MARGIN: Duration = Duration::from_millis(25);
/// Share of requests that explore a target of unknown latency: some eighteen of them are enough.
const EXPLORATION_PERMILLE: u16 = 125;
/// Largest slowness relative to the fastest target.
const SLOWNESS_MAX_PERMILLE: u64 = 1_000_000;

/// Baseline of a first-byte timeout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LatencyBaseline {
    /// Latency of the target itself.
    Own,
    /// Latency of the fastest target of the same deployment.
    Best,
}

/// Observations about all targets.
#[derive(Clone, Debug)]
pub struct TargetTracker<K> {
    first_byte_timeout: FirstByteTimeout,
    baseline: LatencyBaseline,
    in_flight_max: u32,
    circuits: Circuits<K>,
    latencies: BTreeMap<DeploymentName, BTreeMap<K, LatencyStats>>,
    latencies_count: usize,
    in_flight: BTreeMap<K, u32>,
}

/// Request in flight to a target.
#[derive(Debug)]
pub struct InFlightRequest<K> {
    /// The target.
    pub key: K,
    is_probe: bool,
}

/// State of one target, for operators.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TargetStatus<K> {
    /// The target.
    pub target: K,
    /// State of its circuit breaker.
    pub state: BreakerState,
    /// Requests in flight.
    pub in_flight: u32,
    /// Limit of `in_flight`.
    pub in_flight_max: u32,
    /// First-byte timeout by deployment and size of the request; sizes without enough samples are left out.
    pub first_byte_timeouts: Vec<(DeploymentName, SizeClass, Duration)>,
}

impl<K: Copy + Ord> TargetTracker<K> {
    /// Makes an empty set of targets, with at most `in_flight_max` requests in flight to each.
    pub fn new(
        first_byte_timeout: FirstByteTimeout,
        baseline: LatencyBaseline,
        in_flight_max: u32,
    ) -> TargetTracker<K> {
        TargetTracker {
            first_byte_timeout,
            baseline,
            in_flight_max,
            circuits: Circuits::default(),
            latencies: BTreeMap::new(),
            latencies_count: 0,
            in_flight: BTreeMap::new(),
        }
    }

    /// Replaces the set of targets; observations about those that stay are kept.
    pub fn set_targets(&mut self, targets: impl IntoIterator<Item = K> + Clone) {
        self.circuits.set_targets(targets.clone());
        let targets: std::collections::BTreeSet<K> = targets.into_iter().collect();
        self.latencies.values_mut().for_each(|latencies| latencies.retain(|key, _| targets.contains(key)));
        self.latencies.retain(|_, latencies| !latencies.is_empty());
        self.latencies_count = self.latencies.values().map(BTreeMap::len).sum();
        // A removed target is kept until its last request in flight has ended.
        self.in_flight.retain(|key, in_flight| *in_flight > 0 || targets.contains(key));
    }

    /// Forgets the latencies of `key`, whose process was restarted: those of the former one, which was ending or
    /// overloaded, would keep requests from the new one for minutes. Failures are kept, since they may have the same
    /// cause.
    pub fn restarted(&mut self, key: K) {
        self.latencies.values_mut().for_each(|latencies| drop(latencies.remove(&key)));
        self.latencies.retain(|_, latencies| !latencies.is_empty());
        self.latencies_count = self.latencies.values().map(BTreeMap::len).sum();
    }

    /// Returns the state of the circuit breaker of `key`.
    pub fn state(&self, key: K, now: Instant) -> BreakerState {
        self.circuits.state(key, now)
    }

    /// Returns the number of requests in flight to `key`.
    pub fn in_flight(&self, key: K) -> u32 {
        self.in_flight.get(&key).copied().unwrap_or(0)
    }

    /// Returns the limit of requests in flight to each target.
    pub fn in_flight_max(&self) -> u32 {
        self.in_flight_max
    }

    /// Returns whether `key` is at its limit of requests in flight.
    pub fn is_full(&self, key: K) -> bool {
        self.in_flight(key) >= self.in_flight_max
    }

    /// Returns whether `key` has less than half of its limit in flight, so that a hedge may be sent to it.
    pub fn is_lightly_loaded(&self, key: K) -> bool {
        self.in_flight(key) < self.in_flight_max / 2
    }

    /// Records that a request is sent to `key`. The returned value is passed to [`TargetTracker::ended`].
    pub fn began(&mut self, key: K, now: Instant) -> InFlightRequest<K> {
        *self.in_flight.entry(key).or_default() += 1;
        InFlightRequest { key, is_probe: self.circuits.began(key, now) }
    }

    /// Records that a request ended. If it was a probe without [evidence](Targets::record), another request may be the
    /// probe.
    pub fn ended(&mut self, request: &InFlightRequest<K>, now: Instant) {
        // This runs when a request is dropped, under a lock shared by all requests, and must not panic.
        match self.in_flight.get_mut(&request.key).filter(|in_flight| **in_flight > 0) {
            Some(in_flight) => *in_flight -= 1,
            None => debug_assert!(false, "an attempt ends once, after it began"),
        }
        if request.is_probe {
            self.circuits.probe_cancelled(request.key, now);
        }
    }

    /// Records that a request lost a race against a hedge.
    pub fn hedge_won(&mut self, request: &InFlightRequest<K>, draw: Permille, now: Instant) {
        if request.is_probe {
            self.circuits.hedge_won(request.key, draw, now);
        }
    }

    /// Records evidence about `key`; `draw` jitters the ejection time. Returns whether it ejects `key`.
    pub fn record(&mut self, key: K, evidence: OutlierEvidence, draw: Permille, now: Instant) -> bool {
        self.circuits.record(key, evidence, draw, now)
    }

    /// Returns whether a response in time was still too slow for a successful probe. A target with a grey failure, much
    /// slower but not dead, has little load while it is ejected, so that its probe just meets the timeout; after
    /// recovery it would time out again under load. So the latency of a probe has to be close to the usual one.
    pub fn is_too_slow_for_probe(
        &self,
        key: K,
        deployment: &DeploymentName,
        size: SizeClass,
        latency: Duration,
        now: Instant,
    ) -> bool {
        if !self.circuits.probe_must_be_fast(key, now) {
            return false;
        }
        let Some(latencies) = self.latencies.get(deployment) else { return false };
        let long_term_average = match self.baseline {
            LatencyBaseline::Own => latencies.get(&key).and_then(|stats| stats.long_term_average(size)),
            LatencyBaseline::Best => {
                latencies.values().filter_map(|stats| stats.long_term_average(size)).min()
            }
        };
        long_term_average.is_some_and(|long_term_average| latency > 2 * long_term_average + SLOW_MARGIN)
    }

    /// Records the latency of a response to a request of this size.
    pub fn record_latency(
        &mut self,
        key: K,
        deployment: &DeploymentName,
        size: SizeClass,
        latency: Duration,
        now: Instant,
    ) {
        self.latency_of(key, deployment).record(size, latency, now);
    }

    /// Records that a request of this size was abandoned after waiting for `waited`.
    pub fn record_abandoned(
        &mut self,
        key: K,
        deployment: &DeploymentName,
        size: SizeClass,
        waited: Duration,
        now: Instant,
    ) {
        self.latency_of(key, deployment).record_abandoned(size, waited, now);
    }

    /// Returns the first-byte timeout; `None` until there are enough samples.
    pub fn first_byte_timeout(
        &self,
        key: K,
        deployment: &DeploymentName,
        size: SizeClass,
    ) -> Option<Duration> {
        let latencies = self.latencies.get(deployment)?;
        let average = match self.baseline {
            LatencyBaseline::Own => latencies.get(&key)?.average(size),
            LatencyBaseline::Best => latencies.values().filter_map(|stats| stats.average(size)).min(),
        };
        average.map(|average| self.first_byte_timeout.for_average(average))
    }

    /// Returns the average latency of a request of this size, from the first sample on.
    pub fn average_latency(&self, key: K, deployment: &DeploymentName, size: SizeClass) -> Option<Duration> {
        self.latencies.get(deployment)?.get(&key)?.hint(size).map(|(average, _)| average)
    }

    /// Returns the hedging delay; `None` until there are enough samples.
    pub fn hedge_after(&self, key: K, deployment: &DeploymentName, size: SizeClass) -> Option<Duration> {
        let p95 = self.latencies.get(deployment)?.get(&key)?.p95(size)?;
        Some(p95.max(HEDGE_DELAY_MIN))
    }

    /// Returns the latency of `key` in thousandths of the fastest target's: at least 1000, and 1000 if it is not known.
    pub fn slowness_permille(
        &self,
        key: K,
        deployment: &DeploymentName,
        size: SizeClass,
        now: Instant,
    ) -> u64 {
        let hint = |stats: &LatencyStats| stats.hint(size).map(|(average, _)| average.as_micros() as u64);
        let Some(latencies) = self.latencies.get(deployment) else { return 1000 };
        let Some((own, last)) = latencies.get(&key).and_then(|stats| stats.hint(size)) else { return 1000 };
        let best = latencies.values().filter_map(hint).min().unwrap_or(0).max(1);
        let ratio = (own.as_micros() as u64).saturating_mul(1000) / best;
        let excess = ratio.clamp(1000, SLOWNESS_MAX_PERMILLE) - 1000;
        1000 + decayed_slowness(excess, now.saturating_duration_since(last))
    }

    /// Returns the primary among `near`, nearest first and all at about the same distance: the nearest, unless it is
    /// much slower than another. Some requests explore one with too few samples.
    pub fn preferred(
        &self,
        mut near: impl Iterator<Item = K> + Clone,
        deployment: &DeploymentName,
        size: SizeClass,
        draw: Permille,
        now: Instant,
    ) -> Option<K> {
        let latencies = self.latencies.get(deployment);
        let average = |key: &K| latencies?.get(key)?.average(size);
        if draw >= Permille::new(1000 - EXPLORATION_PERMILLE)
            && let Some(unexplored) = near.clone().find(|key| average(key).is_none())
        {
            return Some(unexplored);
        }
        let best = near.clone().filter_map(|key| average(&key)).min()?;
        let slower = |key: &K| {
            let slowness =
                u32::try_from(self.slowness_permille(*key, deployment, size, now)).unwrap_or(u32::MAX);
            best.saturating_mul(slowness) / 1000 > 2 * best + SLOW_MARGIN
        };
        near.find(|key| !slower(key))
    }

    /// Returns the state of all targets, for operators.
    pub fn states(&self, now: Instant) -> Vec<TargetStatus<K>> {
        self.circuits.targets().map(|key| self.status(key, now)).collect()
    }

    fn status(&self, target: K, now: Instant) -> TargetStatus<K> {
        let mut first_byte_timeouts = Vec::new();
        for (deployment, latencies) in &self.latencies {
            for (size, _) in latencies.get(&target).into_iter().flat_map(LatencyStats::averages) {
                let timeout = self.first_byte_timeout(target, deployment, size);
                first_byte_timeouts.extend(timeout.map(|timeout| (deployment.clone(), size, timeout)));
            }
        }
        TargetStatus {
            target,
            state: self.state(target, now),
            in_flight: self.in_flight(target),
            in_flight_max: self.in_flight_max,
            first_byte_timeouts,
        }
    }

    fn latency_of(&mut self, key: K, deployment: &DeploymentName) -> &mut LatencyStats {
        let is_known = self.latencies.get(deployment).is_some_and(|latencies| latencies.contains_key(&key));
        if !is_known {
            if self.latencies_count == LATENCIES_MAX {
                self.latencies.clear();
                self.latencies_count = 0;
            }
            self.latencies_count += 1;
            self.latencies.entry(deployment.clone()).or_default().insert(key, LatencyStats::default());
        }
        let latencies = self.latencies.get_mut(deployment).expect("it was there or was just put there");
        latencies.get_mut(&key).expect("it was there or was just put there")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::circuit::CONSECUTIVE_TIMEOUTS_MAX;
    use crate::latency::{SAMPLES_MIN, SLOWNESS_HALF_LIFE};
    use crate::outlier::AttemptOutcome;
    use crate::some_instant;

    const MS: Duration = Duration::from_millis(1);

    fn name(text: &str) -> DeploymentName {
        text.parse().unwrap()
    }

    /// Targets whose latencies are `latencies_ms`, in milliseconds.
    fn of(baseline: LatencyBaseline, latencies_ms: &[u32]) -> (TargetTracker<usize>, Instant) {
        let now = some_instant();
        let mut targets = TargetTracker::new(FirstByteTimeout::FOR_REPLICA, baseline, 8);
        targets.set_targets(0..latencies_ms.len());
        for (key, millis) in latencies_ms.iter().enumerate() {
            (0..SAMPLES_MIN)
                .for_each(|_| targets.record_latency(key, &name("d"), SizeClass::of(1), *millis * MS, now));
        }
        (targets, now)
    }

    #[test]
    fn the_first_byte_timeout_of_a_replica_follows_the_fastest_and_of_a_region_its_own_latency() {
        let timeout = |baseline, key, deployment: &str, tokens| {
            let (targets, _) = of(baseline, &[20, 400]);
            targets.first_byte_timeout(key, &name(deployment), SizeClass::of(tokens))
        };
        assert_eq!(timeout(LatencyBaseline::Best, 1, "d", 1), Some(80 * MS));
        assert_eq!(timeout(LatencyBaseline::Own, 1, "d", 1), Some(1600 * MS));
        assert_eq!(timeout(LatencyBaseline::Best, 1, "d", 2), None);
        assert_eq!(timeout(LatencyBaseline::Best, 1, "other", 1), None);
    }

    #[test]
    fn a_restarted_target_is_not_as_slow_as_its_former_process() {
        // The former process computed its last requests while the machine was busy, ten times slower than the other target.
        let (before, begin) = of(LatencyBaseline::Best, &[5, 50]);
        let slowness = |targets: &TargetTracker<usize>, now| {
            targets.slowness_permille(1, &name("d"), SizeClass::of(1), now)
        };
        // A target gets a request while the other one has one in flight if it is not twice as slow.
        let responses = |mut targets: TargetTracker<usize>| {
            let mut responses = 0;
            for tenths in 0..900 {
                let now = begin + tenths * 100 * MS;
                if slowness(&targets, now) < 2000 {
                    responses += 1;
                    targets.record_latency(1, &name("d"), SizeClass::of(1), 5 * MS, now);
                }
            }
            responses
        };
        let (mut after, _) = of(LatencyBaseline::Best, &[5, 50]);
        after.restarted(1);
        assert_eq!((slowness(&before, begin), slowness(&after, begin)), (10_000, 1000));
        let (before, after) = (responses(before), responses(after));
        assert!(before < 10, "{before} responses in 90 s, although the new process is as fast as the other");
        assert_eq!(after, 900);
    }

    #[test]
    fn the_slowness_of_a_target_decays_until_its_next_request() {
        let (mut targets, now) = of(LatencyBaseline::Best, &[20, 400]);
        let slowness = |targets: &TargetTracker<usize>, key, now| {
            targets.slowness_permille(key, &name("d"), SizeClass::of(1), now)
        };
        assert_eq!((slowness(&targets, 0, now), slowness(&targets, 1, now)), (1000, 20_000));
        assert_eq!(slowness(&targets, 1, now + SLOWNESS_HALF_LIFE), 10_500);
        assert_eq!(slowness(&targets, 1, now + 600 * SLOWNESS_HALF_LIFE), 1000);
        let later = now + 2 * SLOWNESS_HALF_LIFE;
        targets.record_abandoned(1, &name("d"), SizeClass::of(1), 80 * MS, later);
        assert_eq!(slowness(&targets, 1, later), 20_000, "still slow");
        assert_eq!(targets.slowness_permille(1, &name("new"), SizeClass::of(1), now), 1000);
    }

    #[test]
    fn the_nearest_is_preferred_unless_it_is_much_slower_than_another_at_the_same_distance() {
        let preferred = |latencies_ms: &[u32], draw| {
            let (targets, now) = of(LatencyBaseline::Own, latencies_ms);
            targets.preferred(0..2, &name("d"), SizeClass::of(1), Permille::new(draw), now)
        };
        assert_eq!(preferred(&[20, 20], 999), Some(0));
        assert_eq!(preferred(&[65, 20], 0), Some(0), "a little slower");
        assert_eq!(preferred(&[66, 20], 0), Some(1));
        assert_eq!(preferred(&[20, 400], 0), Some(0));
        assert_eq!(preferred(&[400], 0), Some(0), "the other has too few samples");
        assert_eq!(
            (preferred(&[400], 874), preferred(&[400], 875)),
            (Some(0), Some(1)),
            "some requests explore it"
        );
        let (targets, now) = of(LatencyBaseline::Own, &[400, 20]);
        let later = now + 4 * SLOWNESS_HALF_LIFE;
        let again = targets.preferred(0..2, &name("d"), SizeClass::of(1), Permille::new(0), later);
        assert_eq!(again, Some(0), "its slowness has decayed");
    }

    #[test]
    fn a_target_is_full_at_its_limit_of_requests_in_flight() {
        let (mut targets, now) = of(LatencyBaseline::Own, &[20]);
        assert!(targets.is_lightly_loaded(0));
        for _ in 0..4 {
            targets.began(0, now);
        }
        assert!(!targets.is_lightly_loaded(0) && !targets.is_full(0));
        for _ in 0..3 {
            targets.began(0, now);
        }
        assert!(!targets.is_full(0));
        let last = targets.began(0, now);
        assert!(targets.is_full(0));
        targets.ended(&last, now);
        assert!(!targets.is_full(0));
    }

    /// A region ten times slower, whose probes meet the timeout because it has no other load.
    #[test]
    fn a_grey_failure_does_not_recover_by_slow_probes_until_the_sixth() {
        let (mut targets, mut now) = of(LatencyBaseline::Own, &[25, 25]);
        let (name, size, none) = (name("d"), SizeClass::of(1), Permille::new(0));
        (0..500).for_each(|_| targets.record_latency(0, &name, size, 25 * MS, now));
        for _ in 0..CONSECUTIVE_TIMEOUTS_MAX {
            targets.record_abandoned(0, &name, size, 125 * MS, now);
            targets.record(0, OutlierEvidence::of(AttemptOutcome::Timeout), none, now);
        }
        let mut probes = 0;
        while let BreakerState::Ejected { until } = targets.state(0, now) {
            now = until;
            let probe = targets.began(0, now);
            let too_slow = targets.is_too_slow_for_probe(0, &name, size, 118 * MS, now);
            assert!(!targets.is_too_slow_for_probe(0, &name, size, 60 * MS, now), "about as quick");
            targets.record_latency(0, &name, size, 118 * MS, now);
            targets.record(
                0,
                OutlierEvidence::of(if too_slow { AttemptOutcome::Timeout } else { AttemptOutcome::Success }),
                none,
                now,
            );
            targets.ended(&probe, now);
            probes += 1;
        }
        assert_eq!(probes, 6, "five slow probes fail, and the sixth succeeds");
        assert!(
            !targets.is_too_slow_for_probe(1, &name, size, 500 * MS, now),
            "a target without a probe is never too slow"
        );
    }

    #[test]
    fn the_hedging_delay_has_a_minimum() {
        let (targets, _) = of(LatencyBaseline::Own, &[2, 80]);
        assert_eq!(targets.hedge_after(0, &name("d"), SizeClass::of(1)), Some(HEDGE_DELAY_MIN));
        assert!(targets.hedge_after(1, &name("d"), SizeClass::of(1)).unwrap() >= 80 * MS);
    }

    #[test]
    fn latencies_are_kept_up_to_the_limit_and_one_more_clears_them() {
        let (mut targets, now) = of(LatencyBaseline::Own, &[20]);
        let record = |targets: &mut TargetTracker<usize>, n: usize| {
            targets.record_latency(0, &name(&format!("d{n}")), SizeClass::of(1), MS, now)
        };
        (1..LATENCIES_MAX).for_each(|n| record(&mut targets, n));
        assert!(targets.first_byte_timeout(0, &name("d"), SizeClass::of(1)).is_some());
        record(&mut targets, LATENCIES_MAX);
        assert!(targets.first_byte_timeout(0, &name("d"), SizeClass::of(1)).is_none());
        assert_eq!(targets.latencies.len(), 1);
    }

    #[test]
    fn a_removed_target_is_forgotten() {
        let (mut targets, now) = of(LatencyBaseline::Own, &[20, 20]);
        targets.set_targets([1]);
        assert_eq!(targets.first_byte_timeout(0, &name("d"), SizeClass::of(1)), None);
        assert!(targets.first_byte_timeout(1, &name("d"), SizeClass::of(1)).is_some());
        let status = &targets.states(now)[0];
        assert_eq!(
            (status.state, status.in_flight, status.first_byte_timeouts.len()),
            (BreakerState::Closed, 0, 1)
        );
    }
}
