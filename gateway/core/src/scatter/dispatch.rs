//! Dispatch of a split request: size of the sub-requests, their regions, and the number in flight.
//!
//! A sub-request is worth a round trip if computing it takes longer than sending it: [`plan_split`]. Beyond that
//! sub-requests should be small, because the slowest one delays the response, and a lost region takes whole
//! sub-requests along. So each replica gets a handful of them.
//!
//! They are not assigned at the beginning but dispatched as regions have capacity, in the order of the inputs:
//! [`SubRequestDispatcher`] sends the next one to the region that would *finish it first* (its round trip, its queue,
//! our sub-requests in flight there, and this one, at its speed), and never more to a region than keeps its replicas
//! busy during a round trip. A region that is slower than it reported finishes less often and so gets fewer; a distant
//! region is used as soon as waiting for the near one would take longer; a lost region gets no more. The obvious
//! alternative, assignment by reported speed, would make the whole request wait for a region with a wrong report.
//!
//! This does not bypass a region's load protection: a sub-request has bulk priority there, and a request has few of
//! them in flight in a region, whatever their total. A region that rejects a sub-request gets none until its
//! `retry-after` has passed: the sub-request goes to another region meanwhile, or waits.

use super::split::{SUB_REQUEST_INPUTS_MAX, SUB_REQUEST_TOKENS_MAX};
use regions::health::Health;
use regions::set::RegionIndex;
use replica_api::limits::MAX_INPUTS as REPLICA_INPUTS_MAX;
use std::time::{Duration, Instant};

/// Inputs below which a request with fewer tokens than [`SPLIT_TOKENS_MIN`] is never split. Interactive and rerank
/// requests are smaller (`replica_api::priority`: at most some 100 inputs), and would finish before a split had paid
/// for itself.
pub const SPLIT_INPUTS_MIN: u64 = 256;
/// As [`SPLIT_INPUTS_MIN`], for few long inputs: two sub-requests that are worth their overhead.
pub const SPLIT_TOKENS_MIN: u64 = 2 * SUB_REQUEST_TOKENS_MIN;
/// Tokens below which no sub-request is worth its overhead of a millisecond or so on each side, whatever the distance:
/// half a second of MiniLM on two cores.
pub const SUB_REQUEST_TOKENS_MIN: u64 = 2048;
/// Minimum computing time of a sub-request, in round trips: a replica that receives the next one while it computes
/// never waits for the network.
const COMPUTE_ROUND_TRIPS_MIN: u32 = 2;
/// Sub-requests for each replica: the last one to end, or one lost with its region, is at most a quarter of a replica's
/// share.
const SUB_REQUESTS_PER_REPLICA: u64 = 4;
/// Sub-requests in flight for each replica: one that is computed, and one that is queued behind it.
const IN_FLIGHT_PER_REPLICA: u32 = 2;
/// Sub-requests in flight for one request, over all regions.
pub const IN_FLIGHT_MAX: u32 = 32;
/// Tokens a second of a replica of unknown speed: MiniLM on two cores (`replica_api::limits`).
const SPEED_DEFAULT: u64 = 4_000;

/// Region that can take sub-requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SplitTarget {
    /// Index of the region.
    pub region: RegionIndex,
    /// Network round-trip time.
    pub rtt: Duration,
    /// Ready replicas of the deployment; at least one.
    pub replicas: u32,
    /// Tokens queued or being computed there.
    pub pending_tokens: u64,
    /// Speed of its replicas together; 0 if not known yet.
    pub tokens_per_second: u64,
}

/// Plan by which a request is split.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SplitPlan {
    /// Target size of a sub-request, in tokens.
    pub sub_request_tokens: u64,
    /// Participating regions, in the order in which an unsplit request would try them.
    pub targets: Vec<SplitTarget>,
}

/// Returns how to split a request over `targets`, which are in the order in which an unsplit request would try them;
/// `None` if it should not be split. Regions that are too distant for sub-requests of this size do not participate.
pub fn plan_split(inputs: u64, tokens: u64, targets: &[SplitTarget]) -> Option<SplitPlan> {
    let mut targets = targets.to_vec();
    while let Some(farthest) = targets.iter().map(|target| target.rtt).max() {
        let replicas: u64 = targets.iter().map(|target| u64::from(target.replicas)).sum();
        let minimum = tokens_worth_sending(farthest, &targets);
        if inputs >= 2 && replicas >= 2 && tokens >= 2 * minimum || must_be_split(inputs, tokens) {
            let share = tokens / (replicas.max(1) * SUB_REQUESTS_PER_REPLICA);
            return Some(SplitPlan {
                sub_request_tokens: share.max(minimum).min(SUB_REQUEST_TOKENS_MAX),
                targets,
            });
        }
        targets.retain(|target| target.rtt < farthest);
    }
    None
}

/// Returns whether a request must be split whatever the overhead: no replica accepts as many inputs, or can be expected
/// to accept as many tokens.
pub fn must_be_split(inputs: u64, tokens: u64) -> bool {
    inputs > REPLICA_INPUTS_MAX as u64 || tokens > 2 * SUB_REQUEST_TOKENS_MAX
}

/// Returns the tokens that are worth a round trip to the farthest target.
fn tokens_worth_sending(farthest: Duration, targets: &[SplitTarget]) -> u64 {
    let fastest =
        targets.iter().map(|target| speed(target, targets) / u64::from(target.replicas.max(1))).max();
    let computing_time = farthest * COMPUTE_ROUND_TRIPS_MIN;
    let tokens = u128::from(fastest.unwrap_or(SPEED_DEFAULT)) * computing_time.as_micros() / 1_000_000;
    u64::try_from(tokens).unwrap_or(u64::MAX).clamp(SUB_REQUEST_TOKENS_MIN, SUB_REQUEST_TOKENS_MAX)
}

/// Returns the speed of a target. One of unknown speed counts as fast as the fastest, replica by replica: its speed is
/// known once it gets work.
fn speed(target: &SplitTarget, targets: &[SplitTarget]) -> u64 {
    if target.tokens_per_second > 0 {
        return target.tokens_per_second;
    }
    let per_replica = |target: &SplitTarget| target.tokens_per_second / u64::from(target.replicas.max(1));
    let fastest = targets.iter().map(per_replica).filter(|speed| *speed > 0).max();
    fastest.unwrap_or(SPEED_DEFAULT).saturating_mul(u64::from(target.replicas.max(1)))
}

/// Sub-requests of one request in flight, by region.
#[derive(Clone, Debug)]
pub struct SubRequestDispatcher {
    loads: Vec<TargetLoad>,
}

#[derive(Clone, Debug)]
struct TargetLoad {
    target: SplitTarget,
    tokens_per_second: u64,
    /// Our sub-requests in flight there, and their tokens.
    sub_requests: u32,
    tokens: u64,
    /// End of the time in which it gets none because it has rejected one.
    rejecting_until: Option<Instant>,
}

/// Preference among targets for the next sub-request; less is better. **The order of the fields is the policy.**
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct TargetScore {
    finish: Duration,
    /// Tie-break: the order of an unsplit request.
    order: usize,
}

/// Health of a target. **The order of the variants is the preference.**
#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum TargetHealth {
    Healthy,
    Suspect,
    Down,
}

impl TargetHealth {
    fn of(health: Health) -> TargetHealth {
        match health {
            Health::Healthy | Health::Unknown => TargetHealth::Healthy,
            Health::Suspect => TargetHealth::Suspect,
            Health::Down => TargetHealth::Down,
        }
    }
}

impl SubRequestDispatcher {
    /// Makes a dispatcher over these targets, in the order in which an unsplit request would try them.
    pub fn new(targets: &[SplitTarget]) -> SubRequestDispatcher {
        let load = |target: &SplitTarget| TargetLoad {
            target: *target,
            tokens_per_second: speed(target, targets),
            sub_requests: 0,
            tokens: 0,
            rejecting_until: None,
        };
        SubRequestDispatcher { loads: targets.iter().map(load).collect() }
    }

    /// Returns the region of the next sub-request; `None` while all are at their limit. The sub-request counts as in
    /// flight there until [`SubRequestDispatcher::ended`]. `health` is the current health of a region: a sub-request
    /// waits for a healthy region rather than going to a suspect one, and one that is down is used only if all are;
    /// then the plan of the sub-request returns the error.
    pub fn next(
        &mut self,
        tokens: u64,
        health: impl Fn(RegionIndex) -> Health,
        now: Instant,
    ) -> Option<RegionIndex> {
        if self.in_flight() >= IN_FLIGHT_MAX {
            return None;
        }
        let best = self.loads.iter().map(|load| TargetHealth::of(health(load.target.region))).min()?;
        let scores = self.loads.iter().enumerate().filter_map(|(order, load)| {
            let usable = TargetHealth::of(health(load.target.region)) == best;
            (usable && load.is_accepting(now) && load.sub_requests < load.sub_requests_max())
                .then(|| TargetScore { finish: load.finish(tokens), order })
        });
        let TargetScore { order, .. } = scores.min()?;
        let load = &mut self.loads[order];
        load.sub_requests += 1;
        load.tokens = load.tokens.saturating_add(tokens);
        Some(load.target.region)
    }

    /// Records that a sub-request to `region` ended, whatever its result and whichever region responded.
    pub fn ended(&mut self, region: RegionIndex, tokens: u64) {
        let load = self.loads.iter_mut().find(|load| load.target.region == region && load.sub_requests > 0);
        let load = load.expect("a sub-request ends once, where it was sent");
        load.sub_requests -= 1;
        load.tokens = load.tokens.saturating_sub(tokens);
    }

    /// Records that `region` has rejected a sub-request: it gets no other before `until`.
    pub fn reject_until(&mut self, region: RegionIndex, until: Instant) {
        // A region that received a retry or hedge need not be among the targets.
        if let Some(load) = self.loads.iter_mut().find(|load| load.target.region == region) {
            load.rejecting_until = load.rejecting_until.max(Some(until));
        }
    }

    /// Returns when the next rejecting region accepts sub-requests again; `None` if no region is rejecting.
    pub fn next_accepting(&self, now: Instant) -> Option<Instant> {
        self.loads.iter().filter(|load| !load.is_accepting(now)).filter_map(|load| load.rejecting_until).min()
    }

    /// Returns the regions that accept sub-requests before `deadline`.
    pub fn accepting_before(&self, deadline: Instant) -> impl Iterator<Item = RegionIndex> {
        self.loads.iter().filter(move |load| load.is_accepting(deadline)).map(|load| load.target.region)
    }

    /// Returns the number of sub-requests in flight.
    pub fn in_flight(&self) -> u32 {
        self.loads.iter().map(|load| load.sub_requests).sum()
    }
}

impl TargetLoad {
    fn is_accepting(&self, now: Instant) -> bool {
        self.rejecting_until.is_none_or(|until| until <= now)
    }

    fn sub_requests_max(&self) -> u32 {
        self.target.replicas.max(1).saturating_mul(IN_FLIGHT_PER_REPLICA)
    }

    /// Returns the time until a sub-request of this size would be finished.
    fn finish(&self, tokens: u64) -> Duration {
        let before = self.target.pending_tokens.saturating_add(self.tokens).saturating_add(tokens);
        let micros = u128::from(before) * 1_000_000 / u128::from(self.tokens_per_second.max(1));
        self.target.rtt.saturating_add(Duration::from_micros(u64::try_from(micros).unwrap_or(u64::MAX)))
    }
}

// A sub-request never has more inputs than a replica accepts.
const _: () = assert!(SUB_REQUEST_INPUTS_MAX <= REPLICA_INPUTS_MAX);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::some_instant;
    use Health::*;
    use proptest::prelude::*;

    fn target(
        region: usize,
        rtt_ms: u64,
        replicas: u32,
        pending_tokens: u64,
        tokens_per_second: u64,
    ) -> SplitTarget {
        let region = RegionIndex::new(region).unwrap();
        SplitTarget {
            region,
            rtt: Duration::from_millis(rtt_ms),
            replicas,
            pending_tokens,
            tokens_per_second,
        }
    }

    /// Returns the regions of the next sub-requests until all targets are at their limit.
    fn dispatched(targets: &[SplitTarget], tokens: u64, health: impl Fn(usize) -> Health) -> Vec<usize> {
        let mut dispatcher = SubRequestDispatcher::new(targets);
        std::iter::from_fn(|| dispatcher.next(tokens, |region| health(region.as_usize()), some_instant()))
            .map(|region| region.as_usize())
            .collect()
    }

    #[test]
    fn a_request_is_not_split_if_its_parts_are_not_worth_a_round_trip() {
        let check = |inputs: u64, tokens: u64, targets: &[SplitTarget], expected: Option<u64>| {
            let plan = plan_split(inputs, tokens, targets);
            assert_eq!(
                plan.as_ref().map(|plan| plan.sub_request_tokens),
                expected,
                "{inputs} {tokens} {targets:?}"
            );
            assert!(plan.is_none_or(|plan| plan.targets == targets), "{inputs} {tokens} {targets:?}");
        };
        let near = target(0, 2, 1, 0, 4_000);
        let far = target(1, 200, 1, 0, 4_000);
        check(1_000, 20_000, &[], None);
        check(1_000, 20_000, &[near], None);
        check(1_000, 20_000, &[near, far], Some(2_500));
        check(2, 2 * SUB_REQUEST_TOKENS_MIN, &[near, far], Some(SUB_REQUEST_TOKENS_MIN));
        check(2, 2 * SUB_REQUEST_TOKENS_MIN - 1, &[near, far], None);
        check(1, 20_000, &[near, far], None);
        // At twenty-five times the speed, a sub-request has to be larger to be worth the same round trip.
        let fast = |far: SplitTarget| SplitTarget { tokens_per_second: 100_000, ..far };
        check(1_000, 70_000, &[fast(near), fast(far)], None);
        check(1_000, 80_000, &[fast(near), fast(far)], Some(40_000));
        // A request that no replica accepts is split even for one target.
        check(REPLICA_INPUTS_MAX as u64, 6_000, &[near], None);
        check(REPLICA_INPUTS_MAX as u64 + 1, 6_000, &[near], Some(SUB_REQUEST_TOKENS_MIN));
        check(2, 2 * SUB_REQUEST_TOKENS_MAX, &[near], None);
        check(2, 2 * SUB_REQUEST_TOKENS_MAX + 1, &[near], Some(65_536));
        check(100_000, u64::MAX, &[near], Some(SUB_REQUEST_TOKENS_MAX));
    }

    #[test]
    fn a_region_too_distant_for_the_sub_requests_does_not_participate() {
        let check = |tokens: u64, targets: &[SplitTarget], expected: Option<(u64, &[usize])>| {
            let plan = plan_split(1_000, tokens, targets);
            let result = plan.map(|SplitPlan { sub_request_tokens, targets }| {
                (
                    sub_request_tokens,
                    targets.iter().map(|target| target.region.as_usize()).collect::<Vec<_>>(),
                )
            });
            assert_eq!(result, expected.map(|(tokens, regions)| (tokens, regions.to_vec())), "{tokens}");
        };
        let targets = [target(0, 2, 1, 0, 50_000), target(1, 250, 1, 0, 50_000), target(2, 20, 1, 0, 50_000)];
        check(50_000, &targets, Some((25_000, &[0, 1, 2])));
        check(49_999, &targets, Some((6_249, &[0, 2])));
        check(4_095, &targets, None);
        // Two replicas in the nearest region are enough, and one is not.
        let near = [target(0, 2, 2, 0, 100_000), target(1, 250, 1, 0, 50_000)];
        check(20_000, &near, Some((2_500, &[0])));
        check(20_000, &[target(0, 2, 1, 0, 50_000), near[1]], None);
    }

    #[test]
    fn a_sub_request_goes_to_the_region_that_finishes_it_first() {
        // A second of work each; the near one is used until waiting for it takes longer than the round trip to the far
        // one.
        let near_and_far = [target(0, 2, 2, 0, 8_000), target(1, 200, 1, 0, 4_000)];
        assert_eq!(dispatched(&near_and_far, 4_000, |_| Healthy), [0, 0, 1, 0, 0, 1]);
        let tenth = [target(0, 2, 2, 0, 80_000), target(1, 200, 1, 0, 40_000)];
        assert_eq!(dispatched(&tenth, 4_000, |_| Healthy), [0, 0, 0, 0, 1, 1]);
        let busy = [target(0, 2, 1, 20_000, 4_000), target(1, 200, 1, 0, 4_000)];
        assert_eq!(dispatched(&busy, 4_000, |_| Healthy), [1, 1, 0, 0]);
        // In proportion to their speeds.
        let unequal = [target(0, 2, 1, 0, 1_000), target(1, 2, 4, 0, 4_000)];
        assert_eq!(dispatched(&unequal, 1_000, |_| Healthy), [1, 1, 1, 0, 1, 1, 1, 1, 0, 1]);
        // An unknown speed is that of the others; if no speed is known, all are equal.
        let unknown = [target(0, 3, 1, 0, 0), target(1, 2, 1, 0, 50_000), target(2, 1, 1, 0, 0)];
        assert_eq!(dispatched(&unknown, 4_000, |_| Healthy), [2, 1, 0, 2, 1, 0]);
    }

    #[test]
    fn a_suspect_region_is_used_only_if_none_is_healthy() {
        let targets = [target(0, 2, 1, 0, 0), target(1, 2, 1, 0, 0), target(2, 2, 1, 0, 0)];
        assert_eq!(dispatched(&targets, 4_000, |at| [Suspect, Healthy, Unknown][at]), [1, 2, 1, 2]);
        assert_eq!(dispatched(&targets, 4_000, |at| [Suspect, Down, Down][at]), [0, 0]);
        assert_eq!(dispatched(&targets, 4_000, |at| [Healthy, Down, Healthy][at]), [0, 2, 0, 2]);
        assert_eq!(
            dispatched(&targets, 4_000, |_| Down).len(),
            6,
            "a region that is down may have recovered"
        );
    }

    #[test]
    fn the_limit_of_sub_requests_in_flight_holds_at_it_and_one_past_it() {
        let mut dispatcher = SubRequestDispatcher::new(&[target(0, 2, 100, 0, 0)]);
        let sent: Vec<_> = std::iter::from_fn(|| dispatcher.next(1, |_| Healthy, some_instant())).collect();
        assert_eq!(sent.len(), IN_FLIGHT_MAX as usize);
        dispatcher.ended(sent[0], 1);
        assert!(dispatcher.next(1, |_| Healthy, some_instant()).is_some());
        assert!(dispatcher.next(1, |_| Healthy, some_instant()).is_none());
    }

    #[test]
    fn a_region_that_rejects_a_sub_request_gets_none_until_it_accepts_again() {
        let (now, second) = (some_instant(), Duration::from_secs(1));
        let mut dispatcher = SubRequestDispatcher::new(&[target(0, 2, 1, 0, 0), target(1, 90, 1, 0, 0)]);
        let near = dispatcher.next(1, |_| Healthy, now).unwrap();
        assert_eq!((near.as_usize(), dispatcher.next_accepting(now)), (0, None));
        dispatcher.ended(near, 1);
        dispatcher.reject_until(near, now + second);
        assert_eq!(dispatcher.next_accepting(now), Some(now + second));
        let mut next = |now| dispatcher.next(1, |_| Healthy, now).map(RegionIndex::as_usize);
        // The far one instead, up to its limit; then the next one waits.
        assert_eq!([(); 3].map(|()| next(now)), [Some(1), Some(1), None]);
        assert_eq!(next(now + second - Duration::from_millis(1)), None);
        assert_eq!([(); 3].map(|()| next(now + second)), [Some(0), Some(0), None]);
        assert_eq!(dispatcher.next_accepting(now + second), None);
        // The later of two times applies.
        dispatcher.reject_until(near, now + 3 * second);
        dispatcher.reject_until(near, now + 2 * second);
        assert_eq!(dispatcher.next_accepting(now + second), Some(now + 3 * second));
        let accepting = |at| dispatcher.accepting_before(at).map(RegionIndex::as_usize).collect::<Vec<_>>();
        assert_eq!((accepting(now + 2 * second), accepting(now + 3 * second)), (vec![1], vec![0, 1]));
        dispatcher.reject_until(RegionIndex::new(7).unwrap(), now + 9 * second);
        assert_eq!(
            dispatcher.next_accepting(now + 3 * second),
            None,
            "a region that is no target is ignored"
        );
    }

    proptest! {
        /// Invariant 1, Residency, and progress: after any events, only the given targets get sub-requests, and a
        /// target is always available while none is in flight, or will be when a rejecting one accepts again.
        #[test]
        fn sub_requests_go_only_to_the_given_targets_and_never_get_stuck(
            targets_by_index in prop::collection::btree_map(0usize..16, (0u64..300, 1u32..4, 0u64..1 << 40, 0u64..1 << 40), 1..5),
            steps in prop::collection::vec((1u64..1 << 40, 0u64..4, 0usize..16), 1..80),
        ) {
            let targets: Vec<_> = targets_by_index.iter().map(|(at, (rtt, replicas, pending, speed))| target(*at, *rtt, *replicas, *pending, *speed)).collect();
            let mut dispatcher = SubRequestDispatcher::new(&targets);
            let mut in_flight = Vec::new();
            let now = some_instant();
            for (at, (tokens, end, down)) in steps.into_iter().enumerate() {
                let now = now + Duration::from_secs(at as u64);
                let health = |region: RegionIndex| if region.as_usize() == down { Down } else { Healthy };
                match dispatcher.next(tokens, health, now) {
                    Some(region) => {
                        prop_assert!(targets_by_index.contains_key(&region.as_usize()));
                        in_flight.push((region, tokens));
                    }
                    None => prop_assert!(!in_flight.is_empty() || dispatcher.next_accepting(now) > Some(now)),
                }
                match (end, in_flight.pop()) {
                    (0, Some(sub_request)) => in_flight.push(sub_request),
                    (rejected, Some((region, tokens))) => {
                        dispatcher.ended(region, tokens);
                        if rejected == 1 {
                            dispatcher.reject_until(region, now + Duration::from_secs(tokens % 5));
                        }
                    }
                    (_, None) => {}
                }
                prop_assert_eq!(dispatcher.in_flight() as usize, in_flight.len());
            }
        }
    }
}
