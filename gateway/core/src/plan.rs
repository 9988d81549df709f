//! Retry state machine of one request: its attempts, until there is a response or an error.
//!
//! The plan is made once, from the allowed regions in the order of preference. It never uses a region that is not in
//! that list, so the residency policy that made the list holds throughout. Each region gets at most one attempt (apart
//! from the replay after a stale connection, one at another of its instances, and a return to one that was late), every attempt after the first is
//! paid from a budget, and the plan ends at the deadline. Where the policy has become narrower meanwhile, regions
//! are removed from the list ([`RequestPlan::restrict`]); none is added.
//!
//! | event | next attempt | paid from |
//! |---|---|---|
//! | stale connection | the same region, once | free: the region has not seen the request |
//! | unreachable, wrong peer, or region or instance lost | another instance of the same region ([`crate::instances`]), once | the evacuation budget if there is one, else the retry budget |
//! | unreachable, wrong peer, or declined | the next region, once | the retry budget |
//! | first-byte timeout | the next healthy region instead, or else an instance of the same region that reports and whose last request did not fail, once | the evacuation budget if there is one, else the retry budget |
//! | what took over after a first-byte timeout fails or declines, and no region is left | the region that was late, if the retry was not used | the retry budget |
//! | region down | the next region, once | the evacuation budget of that region |
//! | slower than the 95th percentile | the next healthy, lightly loaded region as well, once | the hedge budget |
//! | deadline exceeded | none: error | |
//! | the receipt cannot be made durable | none: error; nothing was sent | |
//!
//! A first-byte timeout is no failure yet: without a healthy region to take over, or a budget to pay for it, the plan
//! keeps waiting. If what took over fails, the request returns to the region that was late, so a timeout that is too short rarely
//! costs a response. While two attempts race,
//! the failure of one leaves the other in flight.
//!
//! Another instance comes before the next region: the request has been admitted to its region, is near it, and a
//! residency policy may allow no other. After a first-byte timeout, or if the region declines, the next region comes
//! first, because all instances of a region have the same replicas.
//!
//! A response that declines the request is relayed to the client when there is no other region: it is more specific
//! than an error of the gateway.
//!
//! The obvious alternative, a loop of attempts with a timeout each, can neither keep waiting nor race, and spreads over
//! the code what the table above states in one place.

mod limits;
pub mod replica;

use crate::budget::Budgets;
use crate::instances::{InstanceIndex, SelectedInstance};
use crate::outcome::AttemptFailure;
use crate::trail::AttemptCause;
use limits::{RetryLimits, RunningAttempt};
use regions::health::Health;
use regions::set::{RegionIndex, RegionSet};
use scheduler_api::report::DISPATCH_AHEAD;
use std::time::{Duration, Instant};

/// State of the regions at the time of a decision.
#[derive(Clone, Copy)]
pub struct RegionView<'a> {
    /// Health of a region; an ejected region counts as suspect.
    pub health: &'a dyn Fn(RegionIndex) -> Health,
    /// Load of a region.
    pub load: &'a dyn Fn(RegionIndex) -> RegionLoad,
    /// Timeouts of an attempt at a region.
    pub timeouts: &'a dyn Fn(RegionIndex) -> AttemptTimeouts,
    /// Instance of a region for the next attempt of a request that has failed at the given ones; `None` if it has none.
    pub instance: &'a dyn Fn(RegionIndex, &[InstanceIndex]) -> Option<SelectedInstance>,
}

/// Load of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum RegionLoad {
    /// May get hedges.
    Light,
    /// May get first attempts and retries.
    Busy,
    /// At the limit of requests in flight of this gateway.
    Full,
}

/// Timeouts of an attempt; `None` if not known yet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AttemptTimeouts {
    /// First-byte timeout.
    pub first_byte: Option<Duration>,
    /// Hedging delay: the 95th percentile of the latency.
    pub hedge: Option<Duration>,
}

impl AttemptTimeouts {
    /// Returns the timeouts of an attempt at a region that holds the request during a cold start: the first-byte timeout is
    /// extended by that time, and there is no hedge.
    #[must_use]
    pub fn while_held(self, held_for: Option<Duration>) -> AttemptTimeouts {
        let Some(held_for) = held_for else { return self };
        let extended = |timeout: Duration| timeout.saturating_add(held_for).saturating_add(DISPATCH_AHEAD);
        AttemptTimeouts { first_byte: self.first_byte.map(extended), hedge: None }
    }
}

/// Next action for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Send attempt number `attempt` to `region`.
    Send {
        /// Region of the attempt.
        region: RegionIndex,
        /// Instance of that region; `None` if the route table has none any more.
        instance: Option<InstanceIndex>,
        /// Number of the attempt, from 1.
        attempt: u32,
        /// Cause of the attempt.
        cause: AttemptCause,
        /// Region whose attempt is cancelled for this one, after a first-byte timeout.
        instead_of: Option<RegionIndex>,
    },
    /// Wait for the attempts in flight.
    Wait,
    /// Relay the response at hand to the client, though it declines the request: there is no better region.
    RelayResponse,
    /// Respond that no region could be reached.
    NoRegionReachable,
    /// Respond that this region is at its limit of requests in flight. Sending to another one would be spillover, which
    /// needs an offer of that region.
    RegionFull(RegionIndex),
    /// Respond that the deadline is exceeded.
    DeadlineExceeded,
    /// Respond that the required receipt cannot be written.
    ReceiptUnavailable,
}

/// Expired timer of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpiredTimer {
    /// Deadline of the request.
    Deadline,
    /// First-byte timeout of this region.
    FirstByte(RegionIndex),
    /// Hedging delay.
    Hedge,
}

/// Retry state of one request.
#[derive(Clone, Debug)]
pub struct RequestPlan {
    order: Vec<RegionIndex>,
    attempted: RegionSet,
    /// Instances at which an attempt has failed.
    failed_instances: Vec<InstanceIndex>,
    /// Region and instance whose attempt was cancelled after its first-byte timeout. It may only have been slow.
    late: Option<(RegionIndex, Option<InstanceIndex>)>,
    running: [Option<RunningAttempt<RegionIndex>>; 2],
    /// Whether it may be hedged.
    hedges: bool,
    hedge_at: Option<Instant>,
    limits: RetryLimits,
    is_replayed: bool,
}

/// Maximum attempts of one request: the first, and one for each kind that is allowed once.
pub const ATTEMPTS_MAX: u32 = 7;

impl RequestPlan {
    /// Makes a plan over the allowed regions in order of preference, until `deadline`; `hedges` states whether it may
    /// be hedged.
    pub fn new(order: Vec<RegionIndex>, hedges: bool, deadline: Instant) -> RequestPlan {
        RequestPlan {
            order,
            attempted: RegionSet::EMPTY,
            failed_instances: Vec::new(),
            late: None,
            running: [None; 2],
            hedges,
            hedge_at: None,
            limits: RetryLimits::new(deadline, ATTEMPTS_MAX),
            is_replayed: false,
        }
    }

    /// Removes the regions outside `allowed`, for replays as well: the policy has become narrower since the plan was
    /// made. Attempts in flight are not affected.
    pub fn restrict(&mut self, allowed: RegionSet) {
        self.order.retain(|region| allowed.contains(*region));
    }

    /// Returns the first step.
    pub fn start(&mut self, view: RegionView<'_>, budgets: &mut Budgets<RegionIndex>, now: Instant) -> Step {
        match self.order.first() {
            None => Step::NoRegionReachable,
            Some(_) if self.limits.is_past_deadline(now) => Step::DeadlineExceeded,
            Some(&region) if (view.load)(region) == RegionLoad::Full => Step::RegionFull(region),
            Some(&region) => {
                if self.hedges {
                    budgets.hedge.deposit();
                    self.hedge_at = (view.timeouts)(region).hedge.map(|after| now + after);
                }
                self.send(region, AttemptCause::First, None, view, now)
            }
        }
    }

    /// Returns the step after the attempt at `region` failed.
    pub fn failed(
        &mut self,
        region: RegionIndex,
        failure: AttemptFailure,
        view: RegionView<'_>,
        budgets: &mut Budgets<RegionIndex>,
        now: Instant,
    ) -> Step {
        let instance = self.remove_attempt(region).and_then(|running| running.instance);
        // An instance that also closes the connection of the replay is lost.
        if failure != AttemptFailure::StaleConnection || self.is_replayed {
            self.failed_instances.extend(instance);
        }
        if self.limits.is_past_deadline(now) || failure == AttemptFailure::DeadlineExceeded {
            return Step::DeadlineExceeded;
        }
        if self.has_attempt_in_flight() {
            return Step::Wait;
        }
        if failure == AttemptFailure::ReceiptUnavailable {
            return Step::ReceiptUnavailable;
        }
        let is_allowed = self.order.contains(&region);
        if failure == AttemptFailure::StaleConnection
            && is_allowed
            && !std::mem::replace(&mut self.is_replayed, true)
        {
            return self.send(region, AttemptCause::Replay, None, view, now);
        }
        // Only the replay is free.
        let failure = match failure {
            AttemptFailure::StaleConnection => AttemptFailure::Unreachable,
            failure => failure,
        };
        let cause = AttemptCause::after(failure);
        if failure != AttemptFailure::Declined && self.moves_to_other_instance(region, view, budgets, now) {
            return self.send(region, cause, None, view, now);
        }
        match self.next_candidate(view, |health, load| health != Health::Down && load != RegionLoad::Full) {
            Some(next) if self.limits.withdraw(failure, region, budgets, now) => {
                self.send(next, cause, None, view, now)
            }
            None if failure == AttemptFailure::Declined
                && self.moves_to_other_instance(region, view, budgets, now) =>
            {
                self.send(region, cause, None, view, now)
            }
            None if let Some(late) = self.return_to_late(region, failure, view, budgets, now) => {
                self.send(late, cause, None, view, now)
            }
            _ if failure == AttemptFailure::Declined => Step::RelayResponse,
            _ => Step::NoRegionReachable,
        }
    }

    /// Returns the region whose attempt was cancelled because it was late, if what replaced it has failed at `region`, and
    /// pays for another attempt there.
    fn return_to_late(
        &mut self,
        region: RegionIndex,
        failure: AttemptFailure,
        view: RegionView<'_>,
        budgets: &mut Budgets<RegionIndex>,
        now: Instant,
    ) -> Option<RegionIndex> {
        let (late, late_instance) = self.late?;
        let is_usable = self.order.contains(&late)
            && (view.health)(late) != Health::Down
            && (view.load)(late) != RegionLoad::Full;
        if !is_usable || !self.limits.withdraw(failure, region, budgets, now) {
            return None;
        }
        self.late = None;
        let next = (view.instance)(late, &self.failed_instances);
        if !next.is_some_and(|next| next.is_alternative) {
            // The others have failed, and the late one may only have been slow.
            self.failed_instances.retain(|failed| Some(*failed) != late_instance);
        }
        Some(late)
    }

    /// Returns a timer that has expired at `now`, each one once, except for the deadline.
    pub fn expired_timer(&mut self, now: Instant) -> Option<ExpiredTimer> {
        if self.limits.is_past_deadline(now) {
            return Some(ExpiredTimer::Deadline);
        }
        let mut running = self.running.iter_mut().flatten();
        let timed_out = running.find_map(|running| running.times_out(now).then_some(running.target));
        if let Some(region) = timed_out {
            return Some(ExpiredTimer::FirstByte(region));
        }
        self.hedge_at.take_if(|at| now >= *at).map(|_| ExpiredTimer::Hedge)
    }

    /// Returns when the attempt in flight to `region` was sent.
    pub fn sent_at(&self, region: RegionIndex) -> Option<Instant> {
        let mut running = self.running.iter().flatten();
        running.find(|running| running.target == region).map(|running| running.sent)
    }

    /// Moves the first-byte timeout of `region`, which has to start a replica or has a longer queue than was known.
    pub fn extend_first_byte_timeout(&mut self, region: RegionIndex, first_byte_deadline: Instant) {
        let mut running = self.running.iter_mut().flatten();
        if let Some(running) = running.find(|running| running.target == region) {
            (running.first_byte_deadline, running.timed_out) = (Some(first_byte_deadline), false);
        }
    }

    /// Returns when the next timer expires.
    pub fn next_timer(&self) -> Instant {
        let first_byte = self.running.iter().flatten().filter_map(RunningAttempt::timer);
        first_byte.chain(self.hedge_at).fold(self.limits.deadline, Instant::min)
    }

    /// Returns the step after the [first-byte timeout](ExpiredTimer::FirstByte) of `region`: a healthy region instead,
    /// or wait.
    pub fn first_byte_timed_out(
        &mut self,
        region: RegionIndex,
        view: RegionView<'_>,
        budgets: &mut Budgets<RegionIndex>,
        now: Instant,
    ) -> Step {
        let healthy = |health, load| health == Health::Healthy && load != RegionLoad::Full;
        let is_only_attempt = self.running.iter().flatten().count() == 1;
        match self.next_candidate(view, healthy) {
            Some(next)
                if is_only_attempt
                    && self.limits.withdraw(AttemptFailure::FirstByteTimeout, region, budgets, now) =>
            {
                self.cancel_late(region);
                self.send(next, AttemptCause::FirstByteTimeout, Some(region), view, now)
            }
            None if is_only_attempt => {
                let known = self.failed_instances.len();
                self.failed_instances.extend(self.instance_of(region));
                let selected = (view.instance)(region, &self.failed_instances);
                if selected.is_some_and(|selected| selected.is_sound_alternative)
                    && self.moves_to_other_instance(region, view, budgets, now)
                {
                    self.cancel_late(region);
                    return self.send(region, AttemptCause::FirstByteTimeout, Some(region), view, now);
                }
                self.failed_instances.truncate(known);
                Step::Wait
            }
            _ => Step::Wait,
        }
    }

    /// Returns the step after the [hedging delay](ExpiredTimer::Hedge): a healthy and lightly loaded region in
    /// addition, or wait.
    pub fn hedge(&mut self, view: RegionView<'_>, budgets: &mut Budgets<RegionIndex>, now: Instant) -> Step {
        // Where all regions are busy the response is late because of the load, and a hedge adds to it.
        let is_light = |region| (view.load)(region) == RegionLoad::Light;
        let is_only_attempt = self.running.iter().flatten().count() == 1;
        let all_light = self.running.iter().flatten().all(|running| is_light(running.target));
        let healthy = |health, load| health == Health::Healthy && load == RegionLoad::Light;
        match self.next_candidate(view, healthy) {
            Some(next) if is_only_attempt && all_light && budgets.hedge.withdraw() => {
                self.send(next, AttemptCause::Hedge, None, view, now)
            }
            _ => Step::Wait,
        }
    }

    /// Records the response of `region`; returns whether it met the first-byte timeout. The other attempt is dropped.
    pub fn responded(&mut self, region: RegionIndex) -> bool {
        let timed_out = self.remove_attempt(region).is_some_and(|running| running.timed_out);
        self.running = [None; 2];
        !timed_out
    }

    /// Returns whether to abandon the attempt at a region whose health got worse: always when it is down; when it is
    /// suspect, if another attempt is in flight or a healthy region could take over.
    pub fn should_abandon(&self, health: Health, view: RegionView<'_>) -> bool {
        match health {
            Health::Down => true,
            Health::Suspect => {
                let is_racing = self.running.iter().flatten().count() > 1;
                let healthy = |health, load| health == Health::Healthy && load != RegionLoad::Full;
                is_racing || (!self.limits.has_evacuated() && self.next_candidate(view, healthy).is_some())
            }
            Health::Healthy | Health::Unknown => false,
        }
    }

    /// Returns whether the request may continue at another instance of `region`, and pays for it.
    fn moves_to_other_instance(
        &mut self,
        region: RegionIndex,
        view: RegionView<'_>,
        budgets: &mut Budgets<RegionIndex>,
        now: Instant,
    ) -> bool {
        let has_alternative = || {
            (view.instance)(region, &self.failed_instances).is_some_and(|selected| selected.is_alternative)
        };
        self.order.contains(&region)
            && has_alternative()
            && self.limits.withdraw_instance(region, budgets, now)
    }

    /// Returns the instance of the attempt in flight to `region`.
    pub fn instance_of(&self, region: RegionIndex) -> Option<InstanceIndex> {
        let mut running = self.running.iter().flatten();
        running.find(|running| running.target == region).and_then(|running| running.instance)
    }

    /// Returns whether to abandon an attempt at an instance that was lost: another instance of its region could take
    /// over.
    pub fn should_abandon_instance(&self, instance: InstanceIndex, view: RegionView<'_>) -> bool {
        let mut failed = self.failed_instances.clone();
        failed.push(instance);
        let selected = (view.instance)(instance.region(), &failed);
        self.limits.allows_instance() && selected.is_some_and(|selected| selected.is_alternative)
    }

    /// Returns the number of attempts so far.
    pub fn attempts(&self) -> u32 {
        self.limits.attempts()
    }

    /// Returns the time until the deadline.
    pub fn time_left(&self, now: Instant) -> Duration {
        self.limits.time_left(now)
    }

    fn has_attempt_in_flight(&self) -> bool {
        self.running.iter().flatten().next().is_some()
    }

    fn remove_attempt(&mut self, region: RegionIndex) -> Option<RunningAttempt<RegionIndex>> {
        let of = |running: &Option<RunningAttempt<RegionIndex>>| {
            running.is_some_and(|running| running.target == region)
        };
        self.running.iter_mut().find(|running| of(running)).and_then(Option::take)
    }

    /// Removes the attempt at `region`, which is late. Other instances of the region come before that one.
    fn cancel_late(&mut self, region: RegionIndex) {
        let instance = self.remove_attempt(region).and_then(|running| running.instance);
        self.late = Some((region, instance));
        self.failed_instances.extend(instance.filter(|it| !self.failed_instances.contains(it)));
    }

    /// Returns the first region without an attempt for which `is_fit` holds.
    fn next_candidate(
        &self,
        view: RegionView<'_>,
        is_fit: impl Fn(Health, RegionLoad) -> bool,
    ) -> Option<RegionIndex> {
        let mut rest = self.order.iter().copied().filter(|region| !self.attempted.contains(*region));
        rest.find(|region| is_fit((view.health)(*region), (view.load)(*region)))
    }

    fn send(
        &mut self,
        region: RegionIndex,
        cause: AttemptCause,
        instead_of: Option<RegionIndex>,
        view: RegionView<'_>,
        now: Instant,
    ) -> Step {
        let attempt = self.limits.count_attempt();
        self.attempted.insert(region);
        let first_byte_deadline = (view.timeouts)(region).first_byte.map(|after| now + after);
        let slot = self.running.iter_mut().find(|running| running.is_none());
        let instance = (view.instance)(region, &self.failed_instances).map(|selected| selected.instance);
        *slot.expect("at most two attempts race") = Some(RunningAttempt {
            target: region,
            instance,
            sent: now,
            first_byte_deadline,
            timed_out: false,
        });
        Step::Send { region, instance, attempt, cause, instead_of }
    }
}

#[cfg(test)]
mod restricted;
#[cfg(test)]
mod simulated;
#[cfg(test)]
mod tests;
