//! Tests of a request plan, as sequences of events and the steps that follow.

use super::*;
use crate::some_instant;
use AttemptFailure::*;
use proptest::prelude::*;

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);
const FIRST_BYTE_TIMEOUT: Duration = Duration::from_millis(100);
const HEDGE_AFTER: Duration = Duration::from_millis(30);

fn region(number: u16) -> RegionIndex {
    RegionIndex::new(number.into()).expect("a small number")
}

/// State of the budgets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BudgetState {
    /// All budgets are full.
    Rich,
    /// All budgets are empty.
    Poor,
    /// Only the evacuation budget of region 0 has a balance.
    Evacuating,
}

use BudgetState::*;

fn budgets(funds: BudgetState, now: Instant) -> Budgets<RegionIndex> {
    let mut budgets = Budgets::new(now);
    match funds {
        Rich => {
            (0..16).for_each(|number| budgets.evacuate(region(number), 1000, now));
            (0..1000).for_each(|_| budgets.hedge.deposit());
        }
        Poor => drain(&mut budgets, now),
        Evacuating => {
            drain(&mut budgets, now);
            budgets.evacuate(region(0), 0, now);
        }
    }
    budgets
}

/// Withdraws every retry, including those that are gained during a request.
fn drain(budgets: &mut Budgets<RegionIndex>, now: Instant) {
    while budgets.retry.withdraw(now + SECOND) {}
}

/// Scenario of one request over regions 0, 1 and 2.
struct PlanScenario {
    plan: RequestPlan,
    budgets: Budgets<RegionIndex>,
    now: Instant,
    down: &'static [u16],
    suspect: &'static [u16],
    busy: &'static [u16],
    full: &'static [u16],
}

#[derive(Clone, Copy, Debug)]
enum Event {
    Fails(u16, AttemptFailure),
    /// Time passes, and expired timers are handled.
    Passes(Duration),
}

use Event::*;

impl PlanScenario {
    fn new(funds: BudgetState) -> PlanScenario {
        let now = some_instant();
        let order = vec![region(0), region(1), region(2)];
        PlanScenario {
            plan: RequestPlan::new(order, true, now + SECOND),
            budgets: budgets(funds, now),
            now,
            down: &[],
            suspect: &[],
            busy: &[],
            full: &[],
        }
    }

    /// Calls `decide` with the state of this scenario.
    fn decide<T>(
        &mut self,
        decide: impl FnOnce(&mut RequestPlan, RegionView<'_>, &mut Budgets<RegionIndex>, Instant) -> T,
    ) -> T {
        let PlanScenario { plan, budgets, now, down, suspect, busy, full } = self;
        let of = |list: &[u16], at: RegionIndex| list.contains(&(at.as_usize() as u16));
        let health = |at: RegionIndex| match at {
            at if of(down, at) => Health::Down,
            at if of(suspect, at) => Health::Suspect,
            _ => Health::Healthy,
        };
        let load = |at: RegionIndex| match at {
            at if of(full, at) => RegionLoad::Full,
            at if of(busy, at) => RegionLoad::Busy,
            _ => RegionLoad::Light,
        };
        let timeouts = |_: RegionIndex| AttemptTimeouts {
            first_byte: Some(FIRST_BYTE_TIMEOUT),
            hedge: Some(HEDGE_AFTER),
        };
        let view = RegionView { health: &health, load: &load, timeouts: &timeouts, instance: &|_, _| None };
        decide(plan, view, budgets, *now)
    }

    fn start(&mut self) -> Step {
        self.decide(|plan, view, budgets, now| plan.start(view, budgets, now))
    }

    fn apply_event(&mut self, event: Event) -> Step {
        match event {
            Fails(at, failure) => {
                self.decide(|plan, view, budgets, now| plan.failed(region(at), failure, view, budgets, now))
            }
            Passes(time) => {
                self.now += time;
                self.wake()
            }
        }
    }

    /// Handles expired timers, as a shell does.
    fn wake(&mut self) -> Step {
        while let Some(timer) = self.plan.expired_timer(self.now) {
            let step = self.decide(|plan, view, budgets, now| match timer {
                ExpiredTimer::Deadline => Step::DeadlineExceeded,
                ExpiredTimer::FirstByte(region) => plan.first_byte_timed_out(region, view, budgets, now),
                ExpiredTimer::Hedge => plan.hedge(view, budgets, now),
            });
            if step != Step::Wait {
                return step;
            }
        }
        Step::Wait
    }

    fn run(mut self, events: &[Event]) -> Vec<Step> {
        let mut steps = vec![self.start()];
        steps.extend(events.iter().map(|event| self.apply_event(*event)));
        steps
    }
}

fn send(to: u16, attempt: u32, cause: AttemptCause) -> Step {
    Step::Send { region: region(to), instance: None, attempt, cause, instead_of: None }
}

fn retry_instead(of: u16, to: u16, attempt: u32) -> Step {
    Step::Send {
        region: region(to),
        instance: None,
        attempt,
        cause: AttemptCause::FirstByteTimeout,
        instead_of: Some(region(of)),
    }
}

/// State × cause × budget, as data: the events so far, the budgets, and the last step.
#[test]
fn each_event_leads_to_the_step_of_the_table() {
    use AttemptCause::*;
    let check = |funds: BudgetState, events: &[Event], last: Step| {
        assert_eq!(PlanScenario::new(funds).run(events).last(), Some(&last), "{events:?}");
    };
    let (hedged, late) = (Passes(HEDGE_AFTER), Passes(FIRST_BYTE_TIMEOUT));
    check(Rich, &[], send(0, 1, First));
    // The first attempt fails.
    check(Rich, &[Fails(0, StaleConnection)], send(0, 2, Replay));
    check(Rich, &[Fails(0, Unreachable)], send(1, 2, Retry));
    check(Rich, &[Fails(0, Declined)], send(1, 2, Retry));
    check(Rich, &[Fails(0, RegionDown)], send(1, 2, Evacuation));
    check(Rich, &[Fails(0, DeadlineExceeded)], Step::DeadlineExceeded);
    // All budgets are empty.
    check(Poor, &[Fails(0, StaleConnection)], send(0, 2, Replay));
    check(Poor, &[Fails(0, Unreachable)], Step::NoRegionReachable);
    check(Poor, &[Fails(0, Declined)], Step::RelayResponse);
    check(Poor, &[Fails(0, RegionDown)], Step::NoRegionReachable);
    check(Poor, &[hedged], Step::Wait);
    check(Poor, &[late], Step::Wait);
    check(Poor, &[late, Passes(800 * MS)], Step::Wait);
    check(Poor, &[late, Passes(900 * MS)], Step::DeadlineExceeded);
    // Only an evacuation is affordable.
    check(Evacuating, &[Fails(0, RegionDown)], send(1, 2, Evacuation));
    check(Evacuating, &[Fails(0, Unreachable)], Step::NoRegionReachable);
    check(Evacuating, &[late], retry_instead(0, 1, 2));
    check(Evacuating, &[late, late], Step::Wait);
    // The second fails too.
    check(Rich, &[Fails(0, StaleConnection), Fails(0, StaleConnection)], send(1, 3, Retry));
    check(Rich, &[Fails(0, Unreachable), Fails(1, Unreachable)], Step::NoRegionReachable);
    check(Rich, &[Fails(0, Unreachable), Fails(1, Declined)], Step::RelayResponse);
    check(Rich, &[Fails(0, Unreachable), Fails(1, RegionDown)], send(2, 3, Evacuation));
    check(Rich, &[Fails(0, RegionDown), Fails(1, RegionDown)], Step::NoRegionReachable);
    check(Rich, &[Fails(0, RegionDown), Fails(1, Unreachable)], send(2, 3, Retry));
    // A first-byte timeout, after a hedge was sent.
    check(Rich, &[hedged], send(1, 2, Hedge));
    check(Rich, &[hedged, late], Step::Wait);
    check(Rich, &[hedged, Fails(0, Unreachable)], Step::Wait);
    check(Rich, &[hedged, Fails(1, Unreachable)], Step::Wait);
    check(Rich, &[hedged, Fails(1, Unreachable), Fails(0, Unreachable)], send(2, 3, Retry));
    check(Rich, &[hedged, Fails(0, RegionDown), Fails(1, Declined)], send(2, 3, Retry));
    check(Rich, &[hedged, Fails(0, StaleConnection)], Step::Wait);
    check(Rich, &[hedged, Fails(0, Unreachable), late], retry_instead(1, 2, 3));
    check(Rich, &[Passes(HEDGE_AFTER - MS)], Step::Wait);
    check(Evacuating, &[Passes(FIRST_BYTE_TIMEOUT - MS)], Step::Wait);
    check(Evacuating, &[late, Fails(1, Unreachable)], Step::NoRegionReachable);
    check(Evacuating, &[late, Fails(1, StaleConnection)], send(1, 3, Replay));
}

#[test]
fn a_region_that_cannot_take_over_is_skipped() {
    let check = |change: fn(&mut PlanScenario), event: Event, last: Step| {
        let mut scenario = PlanScenario::new(Rich);
        change(&mut scenario);
        assert_eq!(scenario.run(&[event]).last(), Some(&last), "{event:?}");
    };
    let retry = |to| send(to, 2, AttemptCause::Retry);
    let hedge = Passes(HEDGE_AFTER);
    check(|scenario| scenario.down = &[1], Fails(0, Unreachable), retry(2));
    check(|scenario| scenario.full = &[1], Fails(0, Unreachable), retry(2));
    check(|scenario| scenario.suspect = &[1], Fails(0, Unreachable), retry(1));
    check(|scenario| scenario.down = &[1, 2], Fails(0, Unreachable), Step::NoRegionReachable);
    check(|scenario| scenario.down = &[1, 2], Fails(0, Declined), Step::RelayResponse);
    check(|scenario| scenario.full = &[1, 2], Fails(0, RegionDown), Step::NoRegionReachable);
    check(|scenario| scenario.suspect = &[1], hedge, send(2, 2, AttemptCause::Hedge));
    check(|scenario| scenario.busy = &[1], hedge, send(2, 2, AttemptCause::Hedge));
    check(|scenario| scenario.busy = &[1, 2], hedge, Step::Wait);
    check(|scenario| scenario.busy = &[0], hedge, Step::Wait);
    check(|scenario| scenario.suspect = &[1, 2], hedge, Step::Wait);
    check(
        |scenario| (scenario.busy, scenario.suspect) = (&[0], &[1]),
        Passes(FIRST_BYTE_TIMEOUT),
        retry_instead(0, 2, 2),
    );
    check(
        |scenario| (scenario.busy, scenario.suspect) = (&[0], &[1, 2]),
        Passes(FIRST_BYTE_TIMEOUT),
        Step::Wait,
    );
    check(
        |scenario| (scenario.busy, scenario.full) = (&[0], &[1]),
        Passes(FIRST_BYTE_TIMEOUT),
        retry_instead(0, 2, 2),
    );
}

#[test]
fn a_region_at_its_limit_rejects_and_does_not_spill_over() {
    let mut scenario = PlanScenario::new(Rich);
    scenario.full = &[0];
    assert_eq!(scenario.start(), Step::RegionFull(region(0)));
    scenario.full = &[1];
    assert_eq!(scenario.start(), send(0, 1, AttemptCause::First));
}

#[test]
fn without_allowed_regions_no_region_is_reachable() {
    let mut scenario = PlanScenario::new(Rich);
    scenario.plan = RequestPlan::new(Vec::new(), true, scenario.now + SECOND);
    assert_eq!(scenario.start(), Step::NoRegionReachable);
}

#[test]
fn a_deadline_ends_a_request_in_every_state() {
    let mut scenario = PlanScenario::new(Rich);
    scenario.plan.limits.deadline = scenario.now;
    assert_eq!(scenario.start(), Step::DeadlineExceeded);
    for failure in [StaleConnection, Unreachable, Declined, FirstByteTimeout, RegionDown, DeadlineExceeded] {
        let mut scenario = PlanScenario::new(Rich);
        scenario.start();
        scenario.now += SECOND;
        assert_eq!(scenario.apply_event(Fails(0, failure)), Step::DeadlineExceeded, "{failure:?}");
    }
    let mut scenario = PlanScenario::new(Rich);
    scenario.start();
    assert_eq!(scenario.apply_event(Passes(SECOND)), Step::DeadlineExceeded);
}

#[test]
fn the_next_timer_is_the_earliest_one() {
    let mut scenario = PlanScenario::new(Rich);
    scenario.start();
    let begun = scenario.now;
    assert_eq!(scenario.plan.next_timer(), begun + HEDGE_AFTER);
    scenario.apply_event(Passes(HEDGE_AFTER));
    assert_eq!(scenario.plan.next_timer(), begun + FIRST_BYTE_TIMEOUT);
    scenario.apply_event(Passes(FIRST_BYTE_TIMEOUT - HEDGE_AFTER));
    assert_eq!(
        scenario.plan.next_timer(),
        begun + HEDGE_AFTER + FIRST_BYTE_TIMEOUT,
        "the hedge has a separate first-byte timeout"
    );
    scenario.apply_event(Passes(HEDGE_AFTER));
    assert_eq!(scenario.plan.next_timer(), begun + SECOND);
}

#[test]
fn the_first_response_ends_the_race_and_may_have_missed_its_timeout() {
    let mut scenario = PlanScenario::new(Rich);
    scenario.start();
    scenario.apply_event(Passes(HEDGE_AFTER));
    assert!(scenario.plan.responded(region(1)));
    assert!(!scenario.plan.has_attempt_in_flight(), "the other attempt is dropped");
    let mut alone = PlanScenario::new(Poor);
    alone.start();
    alone.apply_event(Passes(FIRST_BYTE_TIMEOUT));
    assert!(!alone.plan.responded(region(0)), "it missed the first-byte timeout");
}

#[test]
fn a_request_without_hedging_is_not_hedged_and_deposits_nothing() {
    let mut scenario = PlanScenario::new(Rich);
    scenario.plan.hedges = false;
    scenario.start();
    assert_eq!(scenario.apply_event(Passes(HEDGE_AFTER)), Step::Wait);
    let mut poor = PlanScenario::new(Poor);
    poor.plan.hedges = false;
    (0..100).for_each(|_| {
        let now = poor.now;
        poor.plan = RequestPlan::new(vec![region(0)], false, now + SECOND);
        poor.start();
    });
    assert!(!poor.budgets.hedge.withdraw());
}

/// A region with 100 requests a second lost 142 in flight, and 12 of them had no budget.
#[test]
fn an_evacuation_covers_the_requests_in_flight_each_time_the_region_gets_worse() {
    let now = some_instant();
    let mut budgets = Budgets::new(now);
    let moved = |budgets: &mut Budgets<RegionIndex>| {
        (0..500).filter(|_| budgets.pay(RegionDown, region(0), now)).count()
    };
    budgets.evacuate(region(0), 142, now);
    assert_eq!(moved(&mut budgets), 142 + 16);
    budgets.evacuate(region(0), 0, now);
    assert_eq!(moved(&mut budgets), 16);
}

#[test]
fn a_suspect_region_is_abandoned_only_for_a_healthy_one() {
    let should_abandon = |health: Health, suspect: &'static [u16]| {
        let mut scenario = PlanScenario::new(Rich);
        scenario.suspect = suspect;
        scenario.start();
        scenario.decide(|plan, view, _, _| plan.should_abandon(health, view))
    };
    assert!(should_abandon(Health::Suspect, &[0]));
    assert!(!should_abandon(Health::Suspect, &[0, 1, 2]));
    assert!(should_abandon(Health::Down, &[0, 1, 2]));
    assert!(!should_abandon(Health::Healthy, &[]));
}

fn any_failure() -> impl Strategy<Value = AttemptFailure> {
    prop::sample::select(vec![StaleConnection, Unreachable, Declined, RegionDown, DeadlineExceeded])
}

proptest! {
    /// Invariants 1 (Residency), 2 (One outcome) and 6 (Bounded): after any events, only regions of the list get
    /// attempts, no two at once the same region, each kind of retry at most once, none at or after the deadline, and
    /// the request ends once.
    #[test]
    fn no_sequence_of_events_leaves_the_allowed_regions_or_runs_for_ever(
        allowed in prop::collection::btree_set(0u16..16, 0..6),
        events in prop::collection::vec((any_failure(), any::<bool>(), 0u64..120, 0usize..2), 0..40),
        marks in prop::collection::vec(0u8..5, 16),
        funds in prop::sample::select(vec![Rich, Poor, Evacuating]),
    ) {
        let start = some_instant();
        let mut now = start;
        let mut budgets = budgets(funds, now);
        let mut plan = RequestPlan::new(allowed.iter().copied().map(region).collect(), true, now + SECOND);
        let mark = |at: RegionIndex| marks[at.as_usize()];
        let health = |at: RegionIndex| match mark(at) { 0 => Health::Down, 1 => Health::Suspect, _ => Health::Healthy };
        let load = |at: RegionIndex| match mark(at) { 2 => RegionLoad::Full, 3 => RegionLoad::Busy, _ => RegionLoad::Light };
        let timeouts = |_: RegionIndex| AttemptTimeouts { first_byte: Some(FIRST_BYTE_TIMEOUT), hedge: Some(HEDGE_AFTER) };
        let instance = |of: RegionIndex, failed: &[InstanceIndex]| {
            let both = [0, 1].map(|number| InstanceIndex::new(of, number));
            let left = both.into_iter().find(|instance| !failed.contains(instance));
            let (is_alternative, instance) = (left.is_some(), left.unwrap_or(both[0]));
            Some(SelectedInstance { instance, is_alternative, is_sound_alternative: is_alternative })
        };
        let view = RegionView { health: &health, load: &load, timeouts: &timeouts, instance: &instance };
        let mut running: Vec<RegionIndex> = Vec::new();
        let (mut sent, mut extra, mut ended) = (0, 0, false);
        let mut step = plan.start(view, &mut budgets, now);
        for (failure, wakes, wait_ms, which) in events {
            match step {
                Step::Send { region: to, instance: _, attempt, cause, instead_of } => {
                    sent += 1;
                    extra += u32::from(!matches!(cause, AttemptCause::First | AttemptCause::Replay));
                    prop_assert!(allowed.contains(&(to.as_usize() as u16)), "{:?} is not allowed", to);
                    prop_assert!(load(to) != RegionLoad::Full || cause == AttemptCause::Replay);
                    prop_assert_eq!(attempt, sent);
                    prop_assert!(now < start + SECOND);
                    if let Some(left) = instead_of {
                        prop_assert!(running.contains(&left));
                        running.retain(|region| *region != left);
                    }
                    prop_assert!(!running.contains(&to));
                    running.push(to);
                    prop_assert!(running.len() <= 2);
                }
                Step::Wait => prop_assert!(!running.is_empty(), "an attempt is in flight"),
                Step::RelayResponse
                | Step::NoRegionReachable
                | Step::RegionFull(_)
                | Step::ReceiptUnavailable
                | Step::DeadlineExceeded => ended = true,
            }
            if ended {
                break;
            }
            now += Duration::from_millis(wait_ms);
            step = if wakes {
                match plan.expired_timer(now) {
                    None => Step::Wait,
                    Some(ExpiredTimer::Deadline) => Step::DeadlineExceeded,
                    Some(ExpiredTimer::FirstByte(region)) => plan.first_byte_timed_out(region, view, &mut budgets, now),
                    Some(ExpiredTimer::Hedge) => plan.hedge(view, &mut budgets, now),
                }
            } else {
                let failed = running.remove(which.min(running.len() - 1));
                plan.failed(failed, failure, view, &mut budgets, now)
            };
        }
        prop_assert!(sent <= ATTEMPTS_MAX);
        if funds == Poor {
            prop_assert_eq!(extra, 0);
        }
    }
}

/// Scenario of a request whose first region has two instances, of which the others than the failed ones are
/// alternatives.
fn with_instances(order: &[u16], events: &[Event]) -> Vec<(Step, Option<InstanceIndex>)> {
    let now = some_instant();
    let (mut budgets, mut at) = (budgets(Rich, now), now);
    let order = order.iter().copied().map(region).collect();
    let mut plan = RequestPlan::new(order, false, now + SECOND);
    let instance = |of: RegionIndex, failed: &[InstanceIndex]| {
        let both = [0, 1].map(|number| InstanceIndex::new(of, number));
        let left = both.into_iter().find(|instance| !failed.contains(instance));
        Some(SelectedInstance {
            instance: left.unwrap_or(both[0]),
            is_alternative: left.is_some(),
            is_sound_alternative: left.is_some(),
        })
    };
    let timeouts = |_: RegionIndex| AttemptTimeouts { first_byte: Some(FIRST_BYTE_TIMEOUT), hedge: None };
    let view = RegionView {
        health: &|_| Health::Healthy,
        load: &|_| RegionLoad::Light,
        timeouts: &timeouts,
        instance: &instance,
    };
    let mut steps = vec![plan.start(view, &mut budgets, now)];
    for event in events {
        steps.push(match *event {
            Fails(of, failure) => plan.failed(region(of), failure, view, &mut budgets, at),
            Passes(time) => {
                at += time;
                match plan.expired_timer(at) {
                    Some(ExpiredTimer::FirstByte(late)) => {
                        plan.first_byte_timed_out(late, view, &mut budgets, at)
                    }
                    _ => Step::Wait,
                }
            }
        });
    }
    let instance_of = |step: &Step| match step {
        Step::Send { instance, .. } => *instance,
        _ => None,
    };
    steps.iter().map(|step| (*step, instance_of(step))).collect()
}

#[test]
fn a_request_continues_at_another_instance_of_its_region_and_then_in_the_next_region() {
    let sent = |order: &[u16], events: &[Event]| -> Vec<Option<(u16, u32)>> {
        let at = |instance: InstanceIndex| {
            let number = u32::from(instance != InstanceIndex::new(instance.region(), 0));
            (instance.region().as_usize() as u16, number)
        };
        with_instances(order, events).into_iter().map(|(_, instance)| instance.map(at)).collect()
    };
    for failure in [Unreachable, WrongPeer, RegionDown] {
        let steps = sent(&[0, 1], &[Fails(0, failure), Fails(0, Unreachable), Fails(1, Unreachable)]);
        assert_eq!(steps, [Some((0, 0)), Some((0, 1)), Some((1, 0)), None], "{failure:?}");
        assert_eq!(sent(&[0], &[Fails(0, failure), Fails(0, failure)]), [Some((0, 0)), Some((0, 1)), None]);
    }
    // All instances have the same replicas, so another region is better.
    assert_eq!(sent(&[0, 1], &[Fails(0, Declined)]), [Some((0, 0)), Some((1, 0))]);
    assert_eq!(sent(&[0, 1], &[Passes(FIRST_BYTE_TIMEOUT)]), [Some((0, 0)), Some((1, 0))]);
    assert_eq!(sent(&[0], &[Fails(0, Declined)]), [Some((0, 0)), Some((0, 1))]);
    assert_eq!(
        sent(&[0], &[Passes(FIRST_BYTE_TIMEOUT), Passes(FIRST_BYTE_TIMEOUT)]),
        [Some((0, 0)), Some((0, 1)), None]
    );
    // What was late may only have been slow, and what replaced it was lost.
    let late = Passes(FIRST_BYTE_TIMEOUT);
    assert_eq!(
        sent(&[0], &[late, Fails(0, Unreachable), Fails(0, Unreachable)]),
        [Some((0, 0)), Some((0, 1)), Some((0, 0)), None]
    );
    assert_eq!(
        sent(&[0, 1], &[late, Fails(1, Unreachable), Fails(1, Unreachable)]),
        [Some((0, 0)), Some((1, 0)), Some((1, 1)), Some((0, 1))],
        "another instance than the late one"
    );
    assert_eq!(sent(&[0, 1], &[late, Fails(1, Declined)]), [Some((0, 0)), Some((1, 0)), Some((1, 1))]);
    assert_eq!(
        sent(&[0, 1], &[late, Fails(1, Declined), Fails(1, Declined)]),
        [Some((0, 0)), Some((1, 0)), Some((1, 1)), Some((0, 1))]
    );
    // A second closed connection is paid for, also for the return.
    let killed = [late, Fails(1, StaleConnection), Fails(1, StaleConnection), Fails(1, StaleConnection)];
    let steps = with_instances(&[0, 1], &killed);
    let causes = steps.iter().filter_map(|(step, _)| match step {
        Step::Send { cause, .. } => Some(*cause),
        _ => None,
    });
    let expected = [
        AttemptCause::First,
        AttemptCause::FirstByteTimeout,
        AttemptCause::Replay,
        AttemptCause::Retry,
        AttemptCause::Retry,
    ];
    assert_eq!(causes.collect::<Vec<_>>(), expected);
    // A replay is no failure of the instance, but a second closed connection is: it was killed.
    let killed = [Fails(0, StaleConnection), Fails(0, StaleConnection)];
    assert_eq!(sent(&[0], &killed), [Some((0, 0)), Some((0, 0)), Some((0, 1))]);
    assert_eq!(sent(&[0], &[Fails(0, StaleConnection)]), [Some((0, 0)), Some((0, 0))]);
}

/// Starts a request to region 0, which has another instance for each attempt, and calls `check` with its start.
fn start_in_one_region(
    funds: BudgetState,
    is_sound_alternative: bool,
    check: impl FnOnce(&mut RequestPlan, RegionView<'_>, &mut Budgets<RegionIndex>, Instant),
) {
    let now = some_instant();
    let mut budgets = budgets(funds, now);
    let mut plan = RequestPlan::new(vec![region(0)], false, now + SECOND);
    let instance = |of: RegionIndex, failed: &[InstanceIndex]| {
        let instance = InstanceIndex::new(of, failed.len() as u32);
        Some(SelectedInstance { instance, is_alternative: true, is_sound_alternative })
    };
    let timeouts = |_: RegionIndex| AttemptTimeouts { first_byte: Some(FIRST_BYTE_TIMEOUT), hedge: None };
    let view = RegionView {
        health: &|_| Health::Healthy,
        load: &|_| RegionLoad::Light,
        timeouts: &timeouts,
        instance: &instance,
    };
    plan.start(view, &mut budgets, now);
    check(&mut plan, view, &mut budgets, now);
}

#[test]
fn a_late_attempt_is_not_cancelled_for_an_instance_that_may_be_lost() {
    start_in_one_region(Rich, false, |plan, view, budgets, now| {
        let late = now + FIRST_BYTE_TIMEOUT;
        assert_eq!(plan.expired_timer(late), Some(ExpiredTimer::FirstByte(region(0))));
        assert_eq!(plan.first_byte_timed_out(region(0), view, budgets, late), Step::Wait);
        let after = plan.failed(region(0), Unreachable, view, budgets, late);
        assert!(matches!(after, Step::Send { .. }), "a failed attempt moves there: {after:?}");
    });
}

#[test]
fn without_a_budget_no_request_moves_to_another_instance() {
    start_in_one_region(Poor, true, |plan, view, budgets, now| {
        assert_eq!(plan.failed(region(0), Unreachable, view, budgets, now), Step::NoRegionReachable);
    });
}
