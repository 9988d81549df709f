//! Spillover: whether a request is sent past the primary region because of its queue, and to which region.
//!
//! Distance alone sends a surge to one region until it is overloaded, with idle ones an ocean away. Reported load alone
//! sends every gateway's surge to the same idle region. So the receiving region decides: with every report it grants
//! each gateway **credits**, in tokens (`scheduler_core::spoke::grants` has the rationing, and the evidence). This is
//! the gateway's half:
//!
//! - **Share.** A region whose queueing delay is above the threshold gives away the share of its requests by which that
//!   is too long: `1 - threshold / wait`, at most [`SHARE_MAX_PERMILLE`]. A share and not all, because a report is
//!   slightly old, and requests that all leave at once all come back at once.
//! - **Target.** The nearest of the others, or the first in the order of the deployment if it has one, that has granted
//!   enough credit, has a shorter queue than here, and responds before the request's deadline. The caller passes only allowed
//!   regions.
//! - **Demand.** The tokens that would spill over with unlimited credit are sent to every region with the next poll, so
//!   that a
//!   gateway with more demand is granted more.
//!
//! Credits are spent at once and end with the next report, or after three periods. Nothing here waits: without a hub,
//! and without reports, a request stays at its primary.

use crate::by_deployment::ByDeployment;
use crate::candidate::OrderPosition;
use crate::circuit::Permille;
use crate::instances::InstanceIndex;
use regions::id::DeploymentName;
use regions::set::RegionIndex;
use replica_api::priority::Priority;
use scheduler_api::report::EXCHANGE_PERIOD;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Maximum share of a region's requests that spills over: it stays busy, and its next report corrects the share.
const SHARE_MAX_PERMILLE: u16 = 700;
/// Queueing delay threshold of interactive requests: too short to notice, and long enough for a batch or two.
const INTERACTIVE_THRESHOLD: Duration = Duration::from_millis(50);
/// Queueing delay threshold of bulk requests.
const BULK_THRESHOLD: Duration = Duration::from_secs(1);
/// Maximum extra round trip beyond the saved wait. It may cost the request more than it saves, because it shortens the
/// queue for those behind it.
const DETOUR_MAX: Duration = Duration::from_millis(250);
/// Lifetime of a credit from the time of the poll: three periods, so that one from the other side of the world is valid
/// for at least one.
const CREDIT_LIFETIME: Duration =
    EXCHANGE_PERIOD.checked_mul(3).expect("three periods are no more than a second");
/// Maximum deployments with counted spillover demand; one more clears all of them.
const DEMANDS_MAX: usize = 4096;

/// Region that is a possible target of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpillCandidate {
    /// Index of the region.
    pub region: RegionIndex,
    /// Network round-trip time.
    pub rtt: Duration,
    /// Queueing delay by its last report; `None` if it is not known.
    pub wait: Option<Duration>,
}

/// Rank of a region to which a request may spill over; less is better. **The order of the fields is the policy.**
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct SpillRank {
    /// Position in the order of the deployment; equal for all without one.
    pub order: OrderPosition,
    /// Network round-trip time.
    pub rtt: Duration,
    /// Index of the region.
    pub region: RegionIndex,
}

/// Request that may spill over.
#[derive(Clone, Copy, Debug)]
pub struct SpillRequest<'a> {
    /// Requested deployment.
    pub deployment: &'a DeploymentName,
    /// Priority of the request.
    pub priority: Priority,
    /// Tokens of the request.
    pub tokens: u64,
    /// Time until its deadline.
    pub left: Duration,
    /// Whether the admission pool of the primary rejects it.
    pub is_shed: bool,
    /// Draw that decides whether it leaves an overloaded primary.
    pub leave_draw: Permille,
}

/// Spillover decision about a request whose primary has a queueing delay above the threshold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpilloverDecision {
    /// Average number of tokens that would spill over with unlimited credit.
    pub demand: u64,
    /// Tokens of the request.
    pub tokens: u64,
    /// Region to which it spills over; `None` if it stays.
    pub to: Option<RegionIndex>,
}

/// Spillover state of a gateway: credits of the regions, and demand.
#[derive(Clone, Debug, Default)]
pub struct Spill {
    /// Each instance of a region grants its share; together they are the credit of the region.
    credits: ByDeployment<Credit, InstanceIndex>,
    demand: BTreeMap<DeploymentName, SpillDemand>,
}

#[derive(Clone, Copy, Debug)]
struct Credit {
    tokens: u64,
    until: Instant,
}

/// Spillover demand in the current period and the last one.
#[derive(Clone, Copy, Debug)]
struct SpillDemand {
    tokens: [u64; 2],
    since: Instant,
}

impl Spill {
    /// Sets credits of an instance by a report; `None` removes one. `polled_at` is the time of the poll.
    pub fn set_credits<'a>(
        &mut self,
        instance: InstanceIndex,
        granted: impl IntoIterator<Item = (&'a DeploymentName, Option<u64>)>,
        polled_at: Instant,
    ) {
        let until = polled_at + CREDIT_LIFETIME;
        for (name, tokens) in granted {
            self.credits.set(instance, name, tokens.map(|tokens| Credit { tokens, until }));
        }
    }

    /// Drops the credits of other instances.
    pub fn retain_instances(&mut self, is_retained: impl Fn(InstanceIndex) -> bool) {
        self.credits.retain_regions(is_retained);
    }

    /// Returns the spillover demand of a period with unlimited credit, in tokens, to be sent with the next poll.
    pub fn demand(&self, deployment: &DeploymentName, now: Instant) -> u64 {
        let [current, last] = self.demand.get(deployment).map_or([0; 2], |demand| demand.at(now).tokens);
        current.max(last)
    }

    /// Returns the deployments with demand in this period or the last one, and the [demand](Spill::demand) of each.
    pub fn demands(&self, now: Instant) -> impl Iterator<Item = (&DeploymentName, u64)> {
        let all = self.demand.keys().map(move |name| (name, self.demand(name, now)));
        all.filter(|(_, tokens)| *tokens > 0)
    }

    /// Returns the tokens that may still be sent to `region`.
    pub fn credit(&self, region: RegionIndex, deployment: &DeploymentName, now: Instant) -> u64 {
        self.offered(region, deployment, now).unwrap_or(0)
    }

    /// Returns the same, and `None` without an offer: a request without cost (`/info`) spills over only to a region
    /// that has made one.
    fn offered(&self, region: RegionIndex, deployment: &DeploymentName, now: Instant) -> Option<u64> {
        valid(self.credits.of(deployment)?, region, now)
    }

    /// Decides whether a request spills over from `primary`, and to which of `others`: healthy allowed regions with their ranks.
    /// `queue_wait` returns the queueing delay of one of them, `admits` whether its admission pool admits the request.
    /// `None`: the queueing delay of its primary is below the threshold. Spends nothing; see [`Spill::commit`].
    pub fn decide(
        &self,
        request: &SpillRequest<'_>,
        primary: SpillCandidate,
        others: impl Iterator<Item = SpillRank>,
        queue_wait: impl Fn(RegionIndex) -> Option<Duration>,
        admits: impl Fn(RegionIndex) -> bool,
        now: Instant,
    ) -> Option<SpilloverDecision> {
        let share = share(request, primary)?;
        let demand = u128::from(request.tokens) * u128::from(share.get()) / 1000;
        let demand = u64::try_from(demand).expect("a part of a number of tokens");
        let leaves = request.leave_draw < share;
        let to = if leaves { self.target(request, primary, others, queue_wait, admits, now) } else { None };
        Some(SpilloverDecision { demand, tokens: request.tokens, to })
    }

    /// Returns the region with the best rank that has granted enough credit, responds sooner than `primary` and in time, and
    /// admits the request.
    fn target(
        &self,
        request: &SpillRequest<'_>,
        primary: SpillCandidate,
        others: impl Iterator<Item = SpillRank>,
        queue_wait: impl Fn(RegionIndex) -> Option<Duration>,
        admits: impl Fn(RegionIndex) -> bool,
        now: Instant,
    ) -> Option<RegionIndex> {
        let credits = self.credits.of(request.deployment)?;
        let wait = primary.wait.unwrap_or_default();
        let is_suitable = |region: RegionIndex, rtt: Duration| {
            let there = queue_wait(region).unwrap_or_default();
            (there < wait || request.is_shed)
                && rtt + there < request.left
                && valid(credits, region, now).is_some_and(|tokens| tokens >= request.tokens)
                && admits(region)
        };
        let mut best: Option<SpillRank> = None;
        for rank in others {
            let SpillRank { order: _, rtt, region } = rank;
            // The state of a region is looked up only if it is better than the best one so far.
            let is_better = best.is_none_or(|best| rank < best);
            let is_on_the_way = rtt.saturating_sub(primary.rtt) <= wait + DETOUR_MAX;
            if is_better && is_on_the_way && is_suitable(region, rtt) {
                best = Some(rank);
            }
        }
        best.map(|best| best.region)
    }

    /// Counts the demand of a spillover decision, and spends the credit that it uses. To be called once for each decision.
    pub fn commit(&mut self, deployment: &DeploymentName, decision: SpilloverDecision, now: Instant) {
        self.add_demand(deployment, decision.demand, now);
        let Some(region) = decision.to else { return };
        let mut left = decision.tokens;
        for credit in self.credits.range_mut(InstanceIndex::all_of(region), deployment) {
            if now < credit.until {
                let spent = left.min(credit.tokens);
                (credit.tokens, left) = (credit.tokens - spent, left - spent);
            }
        }
    }

    /// Returns whether one of these regions would accept this much spillover of a deployment. Spends nothing.
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

    fn add_demand(&mut self, deployment: &DeploymentName, tokens: u64, now: Instant) {
        if let Some(demand) = self.demand.get_mut(deployment) {
            *demand = demand.at(now);
            demand.tokens[0] = demand.tokens[0].saturating_add(tokens);
            return;
        }
        if self.demand.len() >= DEMANDS_MAX {
            self.demand.clear();
        }
        self.demand.insert(deployment.clone(), SpillDemand { tokens: [tokens, 0], since: now });
    }
}

impl SpillDemand {
    fn at(self, now: Instant) -> SpillDemand {
        let passed = now.saturating_duration_since(self.since).as_millis() / EXCHANGE_PERIOD.as_millis();
        match passed {
            0 => self,
            1 => SpillDemand { tokens: [0, self.tokens[0]], since: self.since + EXCHANGE_PERIOD },
            _ => SpillDemand { tokens: [0; 2], since: now },
        }
    }
}

impl SpillRequest<'_> {
    /// Returns whether it stays for certain, whatever the credits.
    pub fn is_calm_at(&self, primary: SpillCandidate) -> bool {
        share(self, primary).is_none()
    }
}

/// Returns the tokens of the credits of a region that have not expired; `None` if there are none.
fn valid(credits: &BTreeMap<InstanceIndex, Credit>, region: RegionIndex, now: Instant) -> Option<u64> {
    let each = credits.range(InstanceIndex::all_of(region)).map(|(_, credit)| credit);
    each.filter(|credit| now < credit.until).map(|credit| credit.tokens).reduce(u64::saturating_add)
}

/// Returns the share of such requests that spills over; `None` below the threshold.
fn share(request: &SpillRequest<'_>, primary: SpillCandidate) -> Option<Permille> {
    if request.is_shed {
        return Some(Permille::ALL);
    }
    let threshold = match request.priority {
        Priority::Interactive => INTERACTIVE_THRESHOLD,
        Priority::Bulk => BULK_THRESHOLD,
    };
    let wait = primary.wait.filter(|wait| *wait > threshold)?;
    let staying =
        u16::try_from(threshold.as_micros() * 1000 / wait.as_micros()).expect("a part of a thousand");
    Some(Permille::new((1000 - staying).min(SHARE_MAX_PERMILLE)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::some_instant;

    const MS: Duration = Duration::from_millis(1);

    fn at(number: usize) -> RegionIndex {
        RegionIndex::new(number).expect("a small number")
    }

    /// Returns the only instance of a region.
    fn of(number: usize) -> InstanceIndex {
        InstanceIndex::new(at(number), 0)
    }

    fn name() -> DeploymentName {
        "d".parse().unwrap()
    }

    fn candidate(number: usize, rtt_ms: u32, wait_ms: u32) -> SpillCandidate {
        SpillCandidate { region: at(number), rtt: rtt_ms * MS, wait: Some(wait_ms * MS) }
    }

    fn rank(candidate: SpillCandidate, index: u16) -> SpillRank {
        let SpillCandidate { region, rtt, wait: _ } = candidate;
        SpillRank { order: OrderPosition { index, ..OrderPosition::default() }, rtt, region }
    }

    /// Region 0 is the primary, and the others have granted credits.
    struct SpillScenario {
        spill: Spill,
        now: Instant,
    }

    impl SpillScenario {
        fn with(granted: &[u64]) -> SpillScenario {
            let (mut spill, now) = (Spill::default(), some_instant());
            for (candidate, tokens) in granted.iter().enumerate() {
                spill.set_credits(of(candidate + 1), [(&name(), Some(*tokens))], now);
            }
            SpillScenario { spill, now }
        }
    }

    impl Spill {
        fn leaves(
            &mut self,
            request: &SpillRequest<'_>,
            primary: SpillCandidate,
            others: &[SpillCandidate],
            now: Instant,
        ) -> Option<RegionIndex> {
            let ranks = others.iter().map(|other| rank(*other, 0));
            let wait = |region| others.iter().find(|other| other.region == region)?.wait;
            let decision = self.decide(request, primary, ranks, wait, |_| true, now)?;
            self.commit(request.deployment, decision, now);
            decision.to
        }
    }

    /// Interactive request of a hundred tokens that is among the first to spill over.
    fn interactive(name: &DeploymentName) -> SpillRequest<'_> {
        let (left, leave_draw) = (Duration::from_secs(30), Permille::new(0));
        SpillRequest {
            deployment: name,
            priority: Priority::Interactive,
            tokens: 100,
            left,
            is_shed: false,
            leave_draw,
        }
    }

    #[test]
    fn the_spilled_share_reduces_the_queue_to_the_threshold() {
        let leaves = |wait_ms: u32, priority: Priority, leave_draw: u16| {
            let (mut scenario, name) = (SpillScenario::with(&[1000]), name());
            let request =
                SpillRequest { priority, leave_draw: Permille::new(leave_draw), ..interactive(&name) };
            let (primary, other) = (candidate(0, 20, wait_ms), candidate(1, 40, 0));
            scenario.spill.leaves(&request, primary, &[other], scenario.now).is_some()
        };
        use Priority::{Bulk, Interactive};
        assert!(!leaves(50, Interactive, 0), "at the threshold");
        assert!(leaves(100, Interactive, 499) && !leaves(100, Interactive, 500));
        assert!(leaves(10_000, Interactive, 699) && !leaves(10_000, Interactive, 700), "never all");
        assert!(!leaves(1000, Bulk, 0) && leaves(2000, Bulk, 499) && !leaves(2000, Bulk, 500));
    }

    #[test]
    fn a_request_spills_over_to_the_nearest_region_with_credit_that_responds_sooner() {
        let target = |granted: &[u64], others: &[SpillCandidate], left_ms: u32| {
            let (mut scenario, name) = (SpillScenario::with(granted), name());
            let request = SpillRequest { left: left_ms * MS, ..interactive(&name) };
            scenario.spill.leaves(&request, candidate(0, 20, 400), others, scenario.now)
        };
        let others = [candidate(1, 60, 0), candidate(2, 90, 0)];
        assert_eq!(target(&[100, 1000], &others, 5000), Some(at(1)));
        assert_eq!(target(&[99, 1000], &others, 5000), Some(at(2)), "the nearest has granted too little");
        assert_eq!(target(&[99, 99], &others, 5000), None);
        assert_eq!(
            target(&[100, 100], &[candidate(1, 60, 400), candidate(2, 90, 399)], 5000),
            Some(at(2)),
            "no quicker there"
        );
        assert_eq!(target(&[100], &[candidate(1, 670, 0)], 5000), Some(at(1)));
        assert_eq!(target(&[100], &[candidate(1, 671, 0)], 5000), None, "too far");
        assert_eq!(target(&[100], &[candidate(1, 60, 300)], 360), None, "it would miss its deadline");
        assert_eq!(target(&[100], &[candidate(1, 60, 300)], 361), Some(at(1)));
        assert_eq!(target(&[100, 100], &[], 5000), None, "no other region is allowed");
    }

    #[test]
    fn a_request_of_an_ordered_deployment_spills_over_in_the_order_whatever_is_nearer() {
        let name = name();
        let request = interactive(&name);
        let target = |granted: &[u64], waits: [u32; 3]| {
            let SpillScenario { spill, now } = SpillScenario::with(granted);
            let others = [candidate(1, 30, waits[0]), candidate(2, 60, waits[1]), candidate(3, 90, waits[2])];
            // The farthest is the next in the order, and the nearest is outside it.
            let ranks = [rank(others[0], 3), rank(others[1], 2), rank(others[2], 1)].into_iter();
            let wait = |region| others.iter().find(|other| other.region == region)?.wait;
            spill.decide(&request, candidate(0, 20, 400), ranks, wait, |_| true, now)?.to
        };
        assert_eq!(target(&[1000, 1000, 1000], [0, 0, 0]), Some(at(3)));
        assert_eq!(target(&[1000, 1000, 99], [0, 0, 0]), Some(at(2)), "the next one has granted too little");
        assert_eq!(target(&[1000, 1000, 1000], [0, 400, 400]), Some(at(1)), "no quicker in the order");
        assert_eq!(target(&[99, 99, 99], [0, 0, 0]), None, "it stays");
    }

    #[test]
    fn a_credit_is_spent_once_and_expires() {
        let name = name();
        let request = interactive(&name);
        let leaves = |scenario: &mut SpillScenario, now| {
            scenario.spill.leaves(&request, candidate(0, 20, 400), &[candidate(1, 60, 0)], now).is_some()
        };
        let mut scenario = SpillScenario::with(&[250]);
        let now = scenario.now;
        assert!(leaves(&mut scenario, now) && leaves(&mut scenario, now) && !leaves(&mut scenario, now));
        scenario.spill.set_credits(of(1), [(&name, Some(100))], now);
        assert!(
            leaves(&mut scenario, now) && !leaves(&mut scenario, now),
            "a new grant replaces the old one"
        );
        let mut scenario = SpillScenario::with(&[1000]);
        let last = scenario.now + CREDIT_LIFETIME - MS;
        assert!(leaves(&mut scenario, last));
        assert!(!leaves(&mut scenario, last + MS), "the credit has expired");
        let mut scenario = SpillScenario::with(&[1000]);
        scenario.spill.retain_instances(|instance| instance.region() != at(1));
        assert!(!leaves(&mut scenario, now));
    }

    #[test]
    fn the_credits_of_the_instances_of_a_region_add_up_and_each_is_spent_once() {
        let name = name();
        let request = interactive(&name);
        let leaves = |scenario: &mut SpillScenario, now| {
            scenario.spill.leaves(&request, candidate(0, 20, 400), &[candidate(1, 60, 0)], now).is_some()
        };
        let mut scenario = SpillScenario::with(&[150]);
        let now = scenario.now;
        let other = InstanceIndex::new(at(1), 7);
        scenario.spill.set_credits(other, [(&name, Some(60))], now);
        assert_eq!(scenario.spill.credit(at(1), &name, now), 210);
        assert!(leaves(&mut scenario, now) && leaves(&mut scenario, now) && !leaves(&mut scenario, now));
        // A report of one instance does not renew the credit of the other.
        scenario.spill.set_credits(other, [(&name, Some(60))], now);
        assert_eq!(scenario.spill.credit(at(1), &name, now), 60);
        scenario.spill.retain_instances(|instance| instance != other);
        assert_eq!(scenario.spill.credit(at(1), &name, now), 0);
    }

    #[test]
    fn a_request_that_would_be_shed_spills_over_wherever_there_is_credit() {
        let name = name();
        let request = SpillRequest { is_shed: true, leave_draw: Permille::new(999), ..interactive(&name) };
        let mut scenario = SpillScenario::with(&[100]);
        assert!(scenario.spill.would_take(&name, 100, [at(1)], scenario.now));
        assert!(!scenario.spill.would_take(&name, 101, [at(1)], scenario.now));
        let unknown = SpillCandidate { wait: None, ..candidate(0, 20, 0) };
        assert_eq!(
            scenario.spill.leaves(&request, unknown, &[candidate(1, 60, 500)], scenario.now),
            Some(at(1))
        );
    }

    #[test]
    fn a_request_without_cost_spills_over_only_to_a_region_with_an_offer() {
        let name = name();
        let request = SpillRequest { tokens: 0, is_shed: true, ..interactive(&name) };
        let others = [candidate(1, 60, 0), candidate(2, 90, 0)];
        let mut scenario = SpillScenario::with(&[]);
        assert_eq!(scenario.spill.leaves(&request, candidate(0, 20, 400), &others, scenario.now), None);
        assert!(!scenario.spill.would_take(&name, 0, [at(1), at(2)], scenario.now));
        // No credit for this deployment, and then a credit of zero.
        scenario.spill.set_credits(of(1), [(&name, None)], scenario.now);
        scenario.spill.set_credits(of(2), [(&name, Some(0))], scenario.now);
        assert_eq!(
            scenario.spill.leaves(&request, candidate(0, 20, 400), &others, scenario.now),
            Some(at(2))
        );
        assert!(scenario.spill.would_take(&name, 0, [at(1), at(2)], scenario.now));
    }

    #[test]
    fn the_demand_is_the_spillover_with_unlimited_credit() {
        let name = name();
        let mut scenario = SpillScenario::with(&[]);
        let now = scenario.now;
        let mut demand = |wait_ms, leave_draw, at| {
            let request = SpillRequest { leave_draw: Permille::new(leave_draw), ..interactive(&name) };
            scenario.spill.leaves(&request, candidate(0, 20, wait_ms), &[], at);
            scenario.spill.demand(&name, at)
        };
        assert_eq!(demand(50, 0, now), 0);
        assert_eq!(demand(100, 0, now), 50);
        assert_eq!(demand(100, 999, now), 100, "also of requests that stay");
        assert_eq!(demand(200, 0, now + EXCHANGE_PERIOD), 100, "the last period was more");
        assert_eq!(scenario.spill.demand(&name, now + EXCHANGE_PERIOD * 2), 70);
        assert_eq!(scenario.spill.demand(&name, now + EXCHANGE_PERIOD * 3), 0);
    }

    #[test]
    fn deployments_are_counted_up_to_the_limit_and_one_more_clears_them() {
        let mut spill = Spill::default();
        let now = some_instant();
        let mut add_demand = |number: usize| {
            let name: DeploymentName = format!("d{number}").parse().unwrap();
            let unused = spill.leaves(&interactive(&name), candidate(0, 20, 100), &[], now);
            assert_eq!(unused, None);
            spill.demand.len()
        };
        (1..DEMANDS_MAX).for_each(|number| assert_eq!(add_demand(number), number));
        assert_eq!(add_demand(DEMANDS_MAX), DEMANDS_MAX);
        assert_eq!(add_demand(0), 1);
    }
}
