//! A request's way from region to region until there is an answer or a refusal.
//!
//! The plan is made once, from the regions that may see the request, in the order of preference. It never asks a region
//! that is not in that list, so whatever happens on the way, the law that made the list holds. It asks each region at
//! most once (a stale connection aside), pays for every attempt after the first, and ends at the deadline.
//!
//! | the attempt ended | next | paid from |
//! |---|---|---|
//! | stale connection | the same region, once | nothing: it has not seen the request |
//! | unreachable, or "elsewhere" | the next region, once | the retry budget |
//! | region lost | the next region, once | the evacuation budget of the lost region |
//! | deadline passed | a refusal | |
//!
//! An answer that says "elsewhere" is given to the client when there is no elsewhere: it says more than we could.

use crate::budget::{EvacuationBudget, RetryBudget};
use crate::outcome::Failure;
use regions::selection::Health;
use regions::set::RegionIndex;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// The budgets of one gateway.
#[derive(Clone, Debug)]
pub struct Budgets {
    /// Pays for retries.
    pub retry: RetryBudget,
    /// Pays for leaving a lost region; one for each that was lost lately.
    evacuation: BTreeMap<RegionIndex, EvacuationBudget>,
    /// Attempts that wait for each region: the measure of its evacuation.
    in_flight: BTreeMap<RegionIndex, u32>,
}

impl Budgets {
    /// The budgets of a gateway that starts.
    pub fn new(now: Instant) -> Budgets {
        Budgets { retry: RetryBudget::new(now), evacuation: BTreeMap::new(), in_flight: BTreeMap::new() }
    }

    /// An attempt at `region` begins.
    pub fn began(&mut self, region: RegionIndex) {
        *self.in_flight.entry(region).or_default() += 1;
    }

    /// An attempt at `region` that [began](Budgets::began) is over, however it ended.
    pub fn ended(&mut self, region: RegionIndex) {
        let waiting = self.in_flight.get_mut(&region).filter(|waiting| **waiting > 0);
        *waiting.expect("an attempt ends once, after it began") -= 1;
    }

    /// `region` has got worse: whatever is in flight there may leave. What has left already no longer counts, so a
    /// region that is first suspected and then down, or that comes back and is lost again, pays for each attempt once.
    pub fn evacuate(&mut self, region: RegionIndex, now: Instant) {
        let in_flight = self.in_flight.get(&region).copied().unwrap_or(0);
        self.evacuation.insert(region, EvacuationBudget::opened(in_flight, now));
    }

    fn pay(&mut self, failure: Failure, region: RegionIndex, now: Instant) -> bool {
        match failure {
            Failure::StaleConnection => true,
            Failure::Lost => self.evacuation.get_mut(&region).is_some_and(|budget| budget.withdraw(now)),
            Failure::Unreachable | Failure::Elsewhere => self.retry.withdraw(now),
            Failure::DeadlinePassed => false,
        }
    }
}

/// What to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Send the request to `region` as its `attempt`-th attempt and wait until `deadline` for the first byte.
    Send {
        /// Where to.
        region: RegionIndex,
        /// From 1.
        attempt: u32,
    },
    /// Give the client the answer at hand, though it is a refusal: nobody else can do better.
    Relay,
    /// Tell the client that no region could be reached.
    NobodyReachable,
    /// Tell the client that its time is over.
    DeadlinePassed,
}

/// One request's way.
#[derive(Clone, Debug)]
pub struct RequestPlan {
    order: Vec<RegionIndex>,
    at: usize,
    attempts: u32,
    retried: bool,
    evacuated: bool,
    replayed: bool,
    deadline: Instant,
}

impl RequestPlan {
    /// A plan over the allowed regions in order of preference, until `deadline`.
    pub fn new(order: Vec<RegionIndex>, deadline: Instant) -> RequestPlan {
        RequestPlan { order, at: 0, attempts: 0, retried: false, evacuated: false, replayed: false, deadline }
    }

    /// The first step.
    pub fn start(&mut self, now: Instant) -> Step {
        match self.order.first() {
            None => Step::NobodyReachable,
            Some(_) if now >= self.deadline => Step::DeadlinePassed,
            Some(&region) => self.send(region),
        }
    }

    /// The step after an attempt failed; `health` is what is known of a region now.
    pub fn failed(
        &mut self,
        failure: Failure,
        health: impl Fn(RegionIndex) -> Health,
        budgets: &mut Budgets,
        now: Instant,
    ) -> Step {
        let Some(&region) = self.order.get(self.at) else {
            return Step::NobodyReachable;
        };
        if now >= self.deadline || failure == Failure::DeadlinePassed {
            return Step::DeadlinePassed;
        }
        if failure == Failure::StaleConnection && !self.replayed {
            self.replayed = true;
            return self.send(region);
        }
        let spent = match failure {
            Failure::Lost => &mut self.evacuated,
            Failure::StaleConnection
            | Failure::Unreachable
            | Failure::Elsewhere
            | Failure::DeadlinePassed => &mut self.retried,
        };
        let next = (self.at + 1..self.order.len()).find(|&next| health(self.order[next]) != Health::Down);
        match next {
            Some(next) if !*spent && budgets.pay(failure, region, now) => {
                *spent = true;
                self.at = next;
                self.send(self.order[next])
            }
            _ if failure == Failure::Elsewhere => Step::Relay,
            _ => Step::NobodyReachable,
        }
    }

    /// Whether to give up waiting for the region of the running attempt, which has got worse: always when it is down;
    /// when it is only suspected, if somebody healthy could take over.
    pub fn gives_up(&self, now_at: Health, health: impl Fn(RegionIndex) -> Health) -> bool {
        match now_at {
            Health::Down => true,
            Health::Suspect => {
                !self.evacuated
                    && self.order.iter().skip(self.at + 1).any(|&next| health(next) == Health::Healthy)
            }
            Health::Healthy | Health::Unknown => false,
        }
    }

    /// Attempts so far.
    pub fn attempts(&self) -> u32 {
        self.attempts
    }

    /// What is left of the request's time.
    pub fn left(&self, now: Instant) -> Duration {
        self.deadline.saturating_duration_since(now)
    }

    fn send(&mut self, region: RegionIndex) -> Step {
        self.attempts += 1;
        Step::Send { region, attempt: self.attempts }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::some_instant;
    use Failure::*;
    use proptest::prelude::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn region(number: u16) -> RegionIndex {
        RegionIndex::new(number.into()).expect("a small number")
    }

    /// Budgets that allow everything: every region is being evacuated.
    fn rich(now: Instant) -> Budgets {
        let mut budgets = Budgets::new(now);
        (0..16).for_each(|number| budgets.evacuate(region(number), now));
        budgets
    }

    /// Runs a plan over regions 0, 1, 2 through these failures; returns its steps.
    fn walk(failures: &[Failure], down: &[u16]) -> Vec<Step> {
        let now = some_instant();
        let mut budgets = rich(now);
        let mut plan = RequestPlan::new(vec![region(0), region(1), region(2)], now + SECOND);
        let health = |at: RegionIndex| {
            if down.contains(&(at.as_usize() as u16)) { Health::Down } else { Health::Healthy }
        };
        let mut steps = vec![plan.start(now)];
        steps.extend(failures.iter().map(|&failure| plan.failed(failure, health, &mut budgets, now)));
        steps
    }

    fn send(to: u16, attempt: u32) -> Step {
        Step::Send { region: region(to), attempt }
    }

    #[test]
    fn each_failure_leads_where_the_table_says() {
        let check = |failures: &[Failure], down: &[u16], last| {
            assert_eq!(walk(failures, down).last(), Some(&last), "{failures:?} with {down:?} down");
        };
        check(&[], &[], send(0, 1));
        check(&[StaleConnection], &[], send(0, 2));
        check(&[StaleConnection, StaleConnection], &[], send(1, 3));
        check(&[Unreachable], &[], send(1, 2));
        check(&[Elsewhere], &[], send(1, 2));
        check(&[Lost], &[], send(1, 2));
        check(&[Unreachable], &[1], send(2, 2));
        check(&[Lost, Unreachable], &[], send(2, 3));
        check(&[Unreachable, Lost], &[], send(2, 3));
        check(&[Unreachable, Unreachable], &[], Step::NobodyReachable);
        check(&[Lost, Lost], &[], Step::NobodyReachable);
        check(&[Unreachable, Elsewhere], &[], Step::Relay);
        check(&[Elsewhere], &[1, 2], Step::Relay);
        check(&[Unreachable], &[1, 2], Step::NobodyReachable);
        check(&[DeadlinePassed], &[], Step::DeadlinePassed);
    }

    #[test]
    fn nobody_is_asked_when_nobody_may_be() {
        let now = some_instant();
        assert_eq!(RequestPlan::new(Vec::new(), now + SECOND).start(now), Step::NobodyReachable);
    }

    #[test]
    fn a_deadline_ends_the_way_wherever_it_is() {
        let now = some_instant();
        let mut plan = RequestPlan::new(vec![region(0), region(1)], now + SECOND);
        assert_eq!(RequestPlan::new(vec![region(0)], now).start(now), Step::DeadlinePassed);
        plan.start(now);
        let step = plan.failed(Unreachable, |_| Health::Healthy, &mut rich(now), now + SECOND);
        assert_eq!(step, Step::DeadlinePassed);
    }

    #[test]
    fn without_budget_a_failure_is_final() {
        let now = some_instant();
        let mut poor = Budgets::new(now);
        while poor.retry.withdraw(now) {}
        let mut plan = RequestPlan::new(vec![region(0), region(1)], now + SECOND);
        plan.start(now);
        assert_eq!(plan.failed(Unreachable, |_| Health::Healthy, &mut poor, now), Step::NobodyReachable);
        assert_eq!(plan.failed(Lost, |_| Health::Healthy, &mut poor, now), Step::NobodyReachable);
    }

    /// A region that answered 100 requests a second lost 142 that were in flight, and 12 of them had no budget.
    #[test]
    fn an_evacuation_is_as_large_as_what_is_in_flight_each_time_that_the_region_gets_worse() {
        let now = some_instant();
        let mut budgets = Budgets::new(now);
        let moved = |budgets: &mut Budgets| (0..500).filter(|_| budgets.pay(Lost, region(0), now)).count();
        (0..142).for_each(|_| budgets.began(region(0)));
        budgets.evacuate(region(0), now);
        assert_eq!(moved(&mut budgets), 142 + 16);
        (0..142).for_each(|_| budgets.ended(region(0)));
        budgets.evacuate(region(0), now);
        assert_eq!(moved(&mut budgets), 16);
    }

    #[test]
    fn a_suspect_is_left_only_for_somebody_healthy() {
        let now = some_instant();
        let mut plan = RequestPlan::new(vec![region(0), region(1)], now + SECOND);
        plan.start(now);
        assert!(plan.gives_up(Health::Suspect, |_| Health::Healthy));
        assert!(!plan.gives_up(Health::Suspect, |_| Health::Suspect));
        assert!(plan.gives_up(Health::Down, |_| Health::Down));
        assert!(!plan.gives_up(Health::Healthy, |_| Health::Healthy));
    }

    fn any_failure() -> impl Strategy<Value = Failure> {
        prop::sample::select(vec![StaleConnection, Unreachable, Elsewhere, Lost, DeadlinePassed])
    }

    proptest! {
        /// Invariants 1 (Lawful) and 6 (Bounded): whatever happens on the way, only regions of the list are asked,
        /// and not more often than one try, one stale replay, one retry and one evacuation allow.
        #[test]
        fn no_sequence_of_failures_leaves_the_allowed_regions_or_goes_on_for_ever(
            allowed in prop::collection::btree_set(0u16..16, 0..6),
            failures in prop::collection::vec((any_failure(), 0u64..300), 0..20),
            down in prop::collection::btree_set(0u16..16, 0..6),
        ) {
            let mut now = some_instant();
            let mut budgets = rich(now);
            let mut plan = RequestPlan::new(allowed.iter().copied().map(region).collect(), now + SECOND);
            let mut step = plan.start(now);
            let mut sent = 0;
            for (failure, wait_ms) in failures {
                let Step::Send { region: to, attempt } = step else { break };
                sent += 1;
                prop_assert!(allowed.contains(&(to.as_usize() as u16)), "{to:?} is not allowed");
                prop_assert_eq!(attempt, sent);
                prop_assert!(now < plan.deadline);
                now += Duration::from_millis(wait_ms);
                let health = |at: RegionIndex| if down.contains(&(at.as_usize() as u16)) { Health::Down } else { Health::Healthy };
                step = plan.failed(failure, health, &mut budgets, now);
            }
            prop_assert!(sent <= 4);
        }
    }
}
