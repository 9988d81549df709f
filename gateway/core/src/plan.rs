//! A request's way from region to region until there is an answer or a refusal.
//!
//! The plan is made once, from the regions that may see the request, in the order of preference. It never asks a region
//! that is not in that list, so whatever happens on the way, the residency policy that made the list holds. It asks each region at
//! most once (a stale connection aside), pays for every attempt after the first, and ends at the deadline. Where the policy
//! has become narrower meanwhile, regions are taken out of the list ([`RequestPlan::restrict`]); none is added.
//!
//! | what happens | next | paid from |
//! |---|---|---|
//! | stale connection | the same region, once | nothing: it has not seen the request |
//! | unreachable, the wrong peer, or "elsewhere" | the next region, once | the retry budget |
//! | first byte late | the next healthy region instead, once | the evacuation budget of a region that is ejected, else the retry budget |
//! | region lost | the next region, once | the evacuation budget of the lost region |
//! | slower than nearly all | the next healthy and calm region as well, once | the hedge budget |
//! | deadline passed | a refusal | |
//! | the receipt cannot be made durable | a refusal: nothing was sent | |
//!
//! A first byte that is late is no failure yet: without somebody healthy to take over, or a budget to pay for it, the plan
//! waits on. So a deadline that is too short costs a few attempts and never an answer. While two attempts race, one that
//! fails is simply out of the race.
//!
//! An answer that says "elsewhere" is given to the client when there is no elsewhere: it says more than we could.
//!
//! The obvious other way, a loop of attempts with a timeout each, can neither wait on nor race, and spreads over the code
//! what the table above says in one place.

use crate::budget::{EvacuationBudget, RetryBudget};
use crate::hedge::HedgeBudget;
use crate::outcome::Failure;
use crate::trail::Cause;
use regions::health::Health;
use regions::set::{RegionIndex, RegionSet};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// The budgets of one gateway.
#[derive(Clone, Debug)]
pub struct Budgets {
    /// Pays for retries.
    pub retry: RetryBudget,
    /// Pays for races.
    pub hedge: HedgeBudget,
    /// Pays for leaving a lost region; one for each that was lost lately.
    evacuation: BTreeMap<RegionIndex, EvacuationBudget>,
}

impl Budgets {
    /// The budgets of a gateway that starts.
    pub fn new(now: Instant) -> Budgets {
        Budgets { retry: RetryBudget::new(now), hedge: HedgeBudget::default(), evacuation: BTreeMap::new() }
    }

    /// `region` has got worse: whatever is in flight there may leave. What has left already no longer counts, so a
    /// region that is first suspected and then down, or that comes back and is lost again, pays for each attempt once.
    pub fn evacuate(&mut self, region: RegionIndex, in_flight: u32, now: Instant) {
        self.evacuation.insert(region, EvacuationBudget::opened(in_flight, now));
    }

    /// What each region that was lost lately may still be left for.
    pub fn evacuations_left(&self, now: Instant) -> impl Iterator<Item = (RegionIndex, u32)> {
        self.evacuation.iter().map(move |(region, budget)| (*region, budget.left(now)))
    }

    fn pay(&mut self, failure: Failure, region: RegionIndex, now: Instant) -> bool {
        let mut evacuation = || self.evacuation.get_mut(&region).is_some_and(|budget| budget.withdraw(now));
        match failure {
            Failure::StaleConnection => true,
            Failure::Lost => evacuation(),
            Failure::Late => evacuation() || self.retry.withdraw(now),
            Failure::Unreachable | Failure::WrongPeer | Failure::Elsewhere => self.retry.withdraw(now),
            Failure::DeadlinePassed | Failure::ReceiptUnavailable => false,
        }
    }
}

/// What is known of the regions when a plan decides.
#[derive(Clone, Copy)]
pub struct Sight<'a> {
    /// How a region looks; one that is left alone for a while is a suspect.
    pub health: &'a dyn Fn(RegionIndex) -> Health,
    /// How much waits there.
    pub load: &'a dyn Fn(RegionIndex) -> Load,
    /// How long it takes.
    pub waits: &'a dyn Fn(RegionIndex) -> Waits,
}

/// How much waits for a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Load {
    /// It may be asked for what need not be asked.
    Calm,
    /// It may be asked.
    Busy,
    /// As many requests of this gateway wait for it as may.
    Full,
}

/// How long to wait for the first byte of a region's answer; `None` where that is not known yet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Waits {
    /// After this it is late.
    pub late: Option<Duration>,
    /// After this it is slower than nearly all.
    pub hedge: Option<Duration>,
}

/// What to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Send the request to `region` as its `attempt`-th attempt.
    Send {
        /// Where to.
        region: RegionIndex,
        /// From 1.
        attempt: u32,
        /// Why.
        cause: Cause,
        /// Give up the attempt there, which is late.
        instead_of: Option<RegionIndex>,
    },
    /// Wait for what is under way.
    Wait,
    /// Give the client the answer at hand, though it is a refusal: nobody else can do better.
    Relay,
    /// Tell the client that no region could be reached.
    NobodyReachable,
    /// Tell the client that as many requests wait for this region as may. To send it elsewhere would be overflow, which
    /// only the one that takes it may allow.
    Full(RegionIndex),
    /// Tell the client that its time is over.
    DeadlinePassed,
    /// Tell the client that the receipt which it must have cannot be written.
    NoReceipt,
}

/// What has come to its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Due {
    /// The request's own deadline.
    Deadline,
    /// The first byte from this region is late.
    Late(RegionIndex),
    /// The answer takes longer than nearly all.
    Hedge,
}

/// One request's way.
#[derive(Clone, Debug)]
pub struct RequestPlan {
    order: Vec<RegionIndex>,
    asked: RegionSet,
    running: [Option<Running>; 2],
    attempts: u32,
    /// Whether it may be raced at all.
    hedges: bool,
    hedge_at: Option<Instant>,
    spent: Spent,
    deadline: Instant,
}

#[derive(Clone, Copy, Debug)]
struct Running {
    region: RegionIndex,
    asked: Instant,
    late_at: Option<Instant>,
    missed: bool,
}

/// What a request may do once.
#[derive(Clone, Copy, Debug, Default)]
struct Spent {
    replay: bool,
    retry: bool,
    late: bool,
    evacuation: bool,
}

/// The most attempts that one request can have: the first, and one for each thing that it may do once.
pub const ATTEMPTS_MAX: u32 = 6;

impl RequestPlan {
    /// A plan over the allowed regions in order of preference, until `deadline`; `hedges` says whether it may be raced.
    pub fn new(order: Vec<RegionIndex>, hedges: bool, deadline: Instant) -> RequestPlan {
        RequestPlan {
            order,
            asked: RegionSet::EMPTY,
            running: [None; 2],
            attempts: 0,
            hedges,
            hedge_at: None,
            spent: Spent::default(),
            deadline,
        }
    }

    /// From now on no region outside `allowed` is asked, not even again: the policy has become narrower since the plan was
    /// made. What is under way is left alone.
    pub fn restrict(&mut self, allowed: RegionSet) {
        self.order.retain(|region| allowed.contains(*region));
    }

    /// The first step.
    pub fn start(&mut self, sight: Sight<'_>, budgets: &mut Budgets, now: Instant) -> Step {
        match self.order.first() {
            None => Step::NobodyReachable,
            Some(_) if now >= self.deadline => Step::DeadlinePassed,
            Some(&region) if (sight.load)(region) == Load::Full => Step::Full(region),
            Some(&region) => {
                if self.hedges {
                    budgets.hedge.pay_in();
                    self.hedge_at = (sight.waits)(region).hedge.map(|after| now + after);
                }
                self.send(region, Cause::First, None, sight, now)
            }
        }
    }

    /// The step after the attempt at `region` failed.
    pub fn failed(
        &mut self,
        region: RegionIndex,
        failure: Failure,
        sight: Sight<'_>,
        budgets: &mut Budgets,
        now: Instant,
    ) -> Step {
        self.over(region);
        if now >= self.deadline || failure == Failure::DeadlinePassed {
            return Step::DeadlinePassed;
        }
        if self.races() {
            return Step::Wait;
        }
        if failure == Failure::ReceiptUnavailable {
            return Step::NoReceipt;
        }
        let may_replay = self.order.contains(&region);
        if failure == Failure::StaleConnection
            && may_replay
            && !std::mem::replace(&mut self.spent.replay, true)
        {
            return self.send(region, Cause::Replay, None, sight, now);
        }
        match self.successor(sight, |health, load| health != Health::Down && load != Load::Full) {
            Some(next) if self.pays(failure, region, budgets, now) => {
                self.send(next, Cause::after(failure), None, sight, now)
            }
            _ if failure == Failure::Elsewhere => Step::Relay,
            _ => Step::NobodyReachable,
        }
    }

    /// What has come to its time by `now`, each thing once; the deadline for ever.
    pub fn due(&mut self, now: Instant) -> Option<Due> {
        if now >= self.deadline {
            return Some(Due::Deadline);
        }
        for running in self.running.iter_mut().flatten() {
            if !running.missed && running.late_at.is_some_and(|at| now >= at) {
                running.missed = true;
                return Some(Due::Late(running.region));
            }
        }
        self.hedge_at.take_if(|at| now >= *at).map(|_| Due::Hedge)
    }

    /// When `region` was asked that has not answered yet.
    pub fn asked_at(&self, region: RegionIndex) -> Option<Instant> {
        let mut running = self.running.iter().flatten();
        running.find(|running| running.region == region).map(|running| running.asked)
    }

    /// `region` has more to do first than was known, a replica to start or a queue: its first byte is late only after this.
    pub fn put_off(&mut self, region: RegionIndex, late_at: Instant) {
        let mut running = self.running.iter_mut().flatten();
        if let Some(running) = running.find(|running| running.region == region) {
            (running.late_at, running.missed) = (Some(late_at), false);
        }
    }

    /// When something comes to its time next.
    pub fn alarm(&self) -> Instant {
        let late = self.running.iter().flatten().filter(|running| !running.missed);
        let times = late.filter_map(|running| running.late_at).chain(self.hedge_at);
        times.fold(self.deadline, Instant::min)
    }

    /// The first byte from `region` is [due](Due::Late): somebody healthy instead, or on with waiting.
    pub fn late(
        &mut self,
        region: RegionIndex,
        sight: Sight<'_>,
        budgets: &mut Budgets,
        now: Instant,
    ) -> Step {
        let healthy = |health, load| health == Health::Healthy && load != Load::Full;
        let alone = self.running.iter().flatten().count() == 1;
        match self.successor(sight, healthy) {
            Some(next) if alone && self.pays(Failure::Late, region, budgets, now) => {
                self.over(region);
                self.send(next, Cause::Late, Some(region), sight, now)
            }
            _ => Step::Wait,
        }
    }

    /// The answer takes [longer than nearly all](Due::Hedge): somebody healthy and calm as well, or on with waiting.
    pub fn hedge(&mut self, sight: Sight<'_>, budgets: &mut Budgets, now: Instant) -> Step {
        // Where everybody is busy the answer is late because of the load, and a second request is more of it.
        let calm = |region| (sight.load)(region) == Load::Calm;
        let alone = self.running.iter().flatten().count() == 1;
        let all_calm = self.running.iter().flatten().all(|running| calm(running.region));
        let healthy = |health, load| health == Health::Healthy && load == Load::Calm;
        match self.successor(sight, healthy) {
            Some(next) if alone && all_calm && budgets.hedge.withdraw() => {
                self.send(next, Cause::Hedge, None, sight, now)
            }
            _ => Step::Wait,
        }
    }

    /// The attempt at `region` was answered; whether in time. Whatever else runs has lost.
    pub fn answered(&mut self, region: RegionIndex) -> bool {
        let missed = self.over(region).is_some_and(|running| running.missed);
        self.running = [None; 2];
        !missed
    }

    /// Whether to give up waiting for `region`, which has got worse: always when it is down; when it is only suspected,
    /// if somebody healthy could take over or is asked already.
    pub fn gives_up(&self, now_at: Health, sight: Sight<'_>) -> bool {
        match now_at {
            Health::Down => true,
            Health::Suspect => {
                let races = self.running.iter().flatten().count() > 1;
                let healthy = |health, load| health == Health::Healthy && load != Load::Full;
                races || (!self.spent.evacuation && self.successor(sight, healthy).is_some())
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

    fn races(&self) -> bool {
        self.running.iter().flatten().next().is_some()
    }

    fn over(&mut self, region: RegionIndex) -> Option<Running> {
        let of = |running: &Option<Running>| running.is_some_and(|running| running.region == region);
        self.running.iter_mut().find(|running| of(running)).and_then(Option::take)
    }

    /// The first region that was not asked yet and is fit.
    fn successor(&self, sight: Sight<'_>, fit: impl Fn(Health, Load) -> bool) -> Option<RegionIndex> {
        let mut rest = self.order.iter().copied().filter(|region| !self.asked.contains(*region));
        rest.find(|region| fit((sight.health)(*region), (sight.load)(*region)))
    }

    /// Pays for going on after `failure`, where that was not done before.
    fn pays(&mut self, failure: Failure, region: RegionIndex, budgets: &mut Budgets, now: Instant) -> bool {
        let spent = match failure {
            Failure::Lost => &mut self.spent.evacuation,
            Failure::Late => &mut self.spent.late,
            Failure::StaleConnection
            | Failure::Unreachable
            | Failure::WrongPeer
            | Failure::Elsewhere
            | Failure::DeadlinePassed
            | Failure::ReceiptUnavailable => &mut self.spent.retry,
        };
        let pays = !*spent && budgets.pay(failure, region, now);
        *spent |= pays;
        pays
    }

    fn send(
        &mut self,
        region: RegionIndex,
        cause: Cause,
        instead_of: Option<RegionIndex>,
        sight: Sight<'_>,
        now: Instant,
    ) -> Step {
        self.attempts += 1;
        self.asked.insert(region);
        let late_at = (sight.waits)(region).late.map(|after| now + after);
        let free = self.running.iter_mut().find(|running| running.is_none());
        *free.expect("no more than two race") = Some(Running { region, asked: now, late_at, missed: false });
        assert!(self.attempts <= ATTEMPTS_MAX, "each thing is done once (invariant 6, Bounded)");
        Step::Send { region, attempt: self.attempts, cause, instead_of }
    }
}

#[cfg(test)]
mod restricted;
#[cfg(test)]
mod simulated;
#[cfg(test)]
mod tests;
