//! A request's way, told as what happens to it.

use super::*;
use crate::some_instant;
use Failure::*;
use proptest::prelude::*;

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);
const LATE_AFTER: Duration = Duration::from_millis(100);
const HEDGE_AFTER: Duration = Duration::from_millis(30);

fn region(number: u16) -> RegionIndex {
    RegionIndex::new(number.into()).expect("a small number")
}

/// What is known of the regions, and what may be spent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Purse {
    /// Everything is paid for.
    Rich,
    /// Nothing is.
    Poor,
    /// Only leaving region 0, which is being evacuated.
    Evacuating,
}

use Purse::*;

fn budgets(purse: Purse, now: Instant) -> Budgets {
    let mut budgets = Budgets::new(now);
    match purse {
        Rich => {
            (0..16).for_each(|number| budgets.evacuate(region(number), 1000, now));
            (0..1000).for_each(|_| budgets.hedge.pay_in());
        }
        Poor => drain(&mut budgets, now),
        Evacuating => {
            drain(&mut budgets, now);
            budgets.evacuate(region(0), 0, now);
        }
    }
    budgets
}

/// Takes out every retry that is there, and that a request's time will earn.
fn drain(budgets: &mut Budgets, now: Instant) {
    while budgets.retry.withdraw(now + SECOND) {}
}

/// A request over regions 0, 1 and 2.
struct Way {
    plan: RequestPlan,
    budgets: Budgets,
    now: Instant,
    down: &'static [u16],
    suspect: &'static [u16],
    busy: &'static [u16],
    full: &'static [u16],
}

#[derive(Clone, Copy, Debug)]
enum Event {
    Fails(u16, Failure),
    /// So much time passes, and what is due is done.
    Passes(Duration),
}

use Event::*;

impl Way {
    fn new(purse: Purse) -> Way {
        let now = some_instant();
        let order = vec![region(0), region(1), region(2)];
        Way {
            plan: RequestPlan::new(order, true, now + SECOND),
            budgets: budgets(purse, now),
            now,
            down: &[],
            suspect: &[],
            busy: &[],
            full: &[],
        }
    }

    /// Calls `decide` with what this scene knows.
    fn decide<T>(
        &mut self,
        decide: impl FnOnce(&mut RequestPlan, Sight<'_>, &mut Budgets, Instant) -> T,
    ) -> T {
        let Way { plan, budgets, now, down, suspect, busy, full } = self;
        let of = |list: &[u16], at: RegionIndex| list.contains(&(at.as_usize() as u16));
        let health = |at: RegionIndex| match at {
            at if of(down, at) => Health::Down,
            at if of(suspect, at) => Health::Suspect,
            _ => Health::Healthy,
        };
        let load = |at: RegionIndex| match at {
            at if of(full, at) => Load::Full,
            at if of(busy, at) => Load::Busy,
            _ => Load::Calm,
        };
        let waits = |_: RegionIndex| Waits { late: Some(LATE_AFTER), hedge: Some(HEDGE_AFTER) };
        let sight = Sight { health: &health, load: &load, waits: &waits };
        decide(plan, sight, budgets, *now)
    }

    fn start(&mut self) -> Step {
        self.decide(|plan, sight, budgets, now| plan.start(sight, budgets, now))
    }

    fn after(&mut self, event: Event) -> Step {
        match event {
            Fails(at, failure) => {
                self.decide(|plan, sight, budgets, now| plan.failed(region(at), failure, sight, budgets, now))
            }
            Passes(time) => {
                self.now += time;
                self.wake()
            }
        }
    }

    /// Does what is due, as a shell does.
    fn wake(&mut self) -> Step {
        while let Some(due) = self.plan.due(self.now) {
            let step = self.decide(|plan, sight, budgets, now| match due {
                Due::Deadline => Step::DeadlinePassed,
                Due::Late(region) => plan.late(region, sight, budgets, now),
                Due::Hedge => plan.hedge(sight, budgets, now),
            });
            if step != Step::Wait {
                return step;
            }
        }
        Step::Wait
    }

    fn walk(mut self, events: &[Event]) -> Vec<Step> {
        let mut steps = vec![self.start()];
        steps.extend(events.iter().map(|event| self.after(*event)));
        steps
    }
}

fn send(to: u16, attempt: u32, cause: Cause) -> Step {
    Step::Send { region: region(to), attempt, cause, instead_of: None }
}

fn instead(of: u16, to: u16, attempt: u32) -> Step {
    Step::Send { region: region(to), attempt, cause: Cause::Late, instead_of: Some(region(of)) }
}

/// Stage × cause × budget, as data: what has happened so far, what may be spent, and the last step.
#[test]
fn each_event_leads_where_the_table_says() {
    use Cause::*;
    let check = |purse: Purse, events: &[Event], last: Step| {
        assert_eq!(Way::new(purse).walk(events).last(), Some(&last), "{events:?}");
    };
    let (hedged, late) = (Passes(HEDGE_AFTER), Passes(LATE_AFTER));
    check(Rich, &[], send(0, 1, First));
    // The first attempt fails.
    check(Rich, &[Fails(0, StaleConnection)], send(0, 2, Replay));
    check(Rich, &[Fails(0, Unreachable)], send(1, 2, Retry));
    check(Rich, &[Fails(0, Elsewhere)], send(1, 2, Retry));
    check(Rich, &[Fails(0, Lost)], send(1, 2, Evacuation));
    check(Rich, &[Fails(0, DeadlinePassed)], Step::DeadlinePassed);
    // Nothing pays.
    check(Poor, &[Fails(0, StaleConnection)], send(0, 2, Replay));
    check(Poor, &[Fails(0, Unreachable)], Step::NobodyReachable);
    check(Poor, &[Fails(0, Elsewhere)], Step::Relay);
    check(Poor, &[Fails(0, Lost)], Step::NobodyReachable);
    check(Poor, &[hedged], Step::Wait);
    check(Poor, &[late], Step::Wait);
    check(Poor, &[late, Passes(800 * MS)], Step::Wait);
    check(Poor, &[late, Passes(900 * MS)], Step::DeadlinePassed);
    // Only an evacuation is paid for.
    check(Evacuating, &[Fails(0, Lost)], send(1, 2, Evacuation));
    check(Evacuating, &[Fails(0, Unreachable)], Step::NobodyReachable);
    check(Evacuating, &[late], instead(0, 1, 2));
    check(Evacuating, &[late, late], Step::Wait);
    // The second fails too.
    check(Rich, &[Fails(0, StaleConnection), Fails(0, StaleConnection)], send(1, 3, Replay));
    check(Rich, &[Fails(0, Unreachable), Fails(1, Unreachable)], Step::NobodyReachable);
    check(Rich, &[Fails(0, Unreachable), Fails(1, Elsewhere)], Step::Relay);
    check(Rich, &[Fails(0, Unreachable), Fails(1, Lost)], send(2, 3, Evacuation));
    check(Rich, &[Fails(0, Lost), Fails(1, Lost)], Step::NobodyReachable);
    check(Rich, &[Fails(0, Lost), Fails(1, Unreachable)], send(2, 3, Retry));
    // The first byte is late, after the time in which a hedge was due and run.
    check(Rich, &[hedged], send(1, 2, Hedge));
    check(Rich, &[hedged, late], Step::Wait);
    check(Rich, &[hedged, Fails(0, Unreachable)], Step::Wait);
    check(Rich, &[hedged, Fails(1, Unreachable)], Step::Wait);
    check(Rich, &[hedged, Fails(1, Unreachable), Fails(0, Unreachable)], send(2, 3, Retry));
    check(Rich, &[hedged, Fails(0, Lost), Fails(1, Elsewhere)], send(2, 3, Retry));
    check(Rich, &[hedged, Fails(0, StaleConnection)], Step::Wait);
    check(Rich, &[hedged, Fails(0, Unreachable), late], instead(1, 2, 3));
    check(Rich, &[Passes(HEDGE_AFTER - MS)], Step::Wait);
    check(Evacuating, &[Passes(LATE_AFTER - MS)], Step::Wait);
    check(Evacuating, &[late, Fails(1, Unreachable)], Step::NobodyReachable);
    check(Evacuating, &[late, Fails(1, StaleConnection)], send(1, 3, Replay));
}

#[test]
fn who_cannot_take_over_is_passed_by() {
    let check = |change: fn(&mut Way), event: Event, last: Step| {
        let mut way = Way::new(Rich);
        change(&mut way);
        assert_eq!(way.walk(&[event]).last(), Some(&last), "{event:?}");
    };
    let retry = |to| send(to, 2, Cause::Retry);
    let hedge = Passes(HEDGE_AFTER);
    check(|way| way.down = &[1], Fails(0, Unreachable), retry(2));
    check(|way| way.full = &[1], Fails(0, Unreachable), retry(2));
    check(|way| way.suspect = &[1], Fails(0, Unreachable), retry(1));
    check(|way| way.down = &[1, 2], Fails(0, Unreachable), Step::NobodyReachable);
    check(|way| way.down = &[1, 2], Fails(0, Elsewhere), Step::Relay);
    check(|way| way.full = &[1, 2], Fails(0, Lost), Step::NobodyReachable);
    check(|way| way.suspect = &[1], hedge, send(2, 2, Cause::Hedge));
    check(|way| way.busy = &[1], hedge, send(2, 2, Cause::Hedge));
    check(|way| way.busy = &[1, 2], hedge, Step::Wait);
    check(|way| way.busy = &[0], hedge, Step::Wait);
    check(|way| way.suspect = &[1, 2], hedge, Step::Wait);
    check(|way| (way.busy, way.suspect) = (&[0], &[1]), Passes(LATE_AFTER), instead(0, 2, 2));
    check(|way| (way.busy, way.suspect) = (&[0], &[1, 2]), Passes(LATE_AFTER), Step::Wait);
    check(|way| (way.busy, way.full) = (&[0], &[1]), Passes(LATE_AFTER), instead(0, 2, 2));
}

#[test]
fn a_region_as_full_as_may_be_refuses_and_is_not_overflowed_into_another() {
    let mut way = Way::new(Rich);
    way.full = &[0];
    assert_eq!(way.start(), Step::Full(region(0)));
    way.full = &[1];
    assert_eq!(way.start(), send(0, 1, Cause::First));
}

#[test]
fn nobody_is_asked_when_nobody_may_be() {
    let mut way = Way::new(Rich);
    way.plan = RequestPlan::new(Vec::new(), true, way.now + SECOND);
    assert_eq!(way.start(), Step::NobodyReachable);
}

#[test]
fn a_deadline_ends_the_way_wherever_it_is() {
    let mut way = Way::new(Rich);
    way.plan.deadline = way.now;
    assert_eq!(way.start(), Step::DeadlinePassed);
    for failure in [StaleConnection, Unreachable, Elsewhere, Late, Lost, DeadlinePassed] {
        let mut way = Way::new(Rich);
        way.start();
        way.now += SECOND;
        assert_eq!(way.after(Fails(0, failure)), Step::DeadlinePassed, "{failure:?}");
    }
    let mut way = Way::new(Rich);
    way.start();
    assert_eq!(way.after(Passes(SECOND)), Step::DeadlinePassed);
}

#[test]
fn a_plan_asks_to_be_woken_when_something_comes_to_its_time() {
    let mut way = Way::new(Rich);
    way.start();
    let begun = way.now;
    assert_eq!(way.plan.alarm(), begun + HEDGE_AFTER);
    way.after(Passes(HEDGE_AFTER));
    assert_eq!(way.plan.alarm(), begun + LATE_AFTER);
    way.after(Passes(LATE_AFTER - HEDGE_AFTER));
    assert_eq!(way.plan.alarm(), begun + HEDGE_AFTER + LATE_AFTER, "the hedge has a time of its own");
    way.after(Passes(HEDGE_AFTER));
    assert_eq!(way.plan.alarm(), begun + SECOND);
}

#[test]
fn whoever_answers_first_has_won_and_was_in_time_or_not() {
    let mut way = Way::new(Rich);
    way.start();
    way.after(Passes(HEDGE_AFTER));
    assert!(way.plan.answered(region(1)));
    assert!(!way.plan.races(), "nobody else runs");
    let mut alone = Way::new(Poor);
    alone.start();
    alone.after(Passes(LATE_AFTER));
    assert!(!alone.plan.answered(region(0)), "it was waited for, and it was late");
}

#[test]
fn a_request_that_is_not_to_be_raced_is_not_and_pays_nothing_in() {
    let mut way = Way::new(Rich);
    way.plan.hedges = false;
    way.start();
    assert_eq!(way.after(Passes(HEDGE_AFTER)), Step::Wait);
    let mut poor = Way::new(Poor);
    poor.plan.hedges = false;
    (0..100).for_each(|_| {
        let now = poor.now;
        poor.plan = RequestPlan::new(vec![region(0)], false, now + SECOND);
        poor.start();
    });
    assert!(!poor.budgets.hedge.withdraw());
}

/// A region that answered 100 requests a second lost 142 that were in flight, and 12 of them had no budget.
#[test]
fn an_evacuation_is_as_large_as_what_is_in_flight_each_time_that_the_region_gets_worse() {
    let now = some_instant();
    let mut budgets = Budgets::new(now);
    let moved = |budgets: &mut Budgets| (0..500).filter(|_| budgets.pay(Lost, region(0), now)).count();
    budgets.evacuate(region(0), 142, now);
    assert_eq!(moved(&mut budgets), 142 + 16);
    budgets.evacuate(region(0), 0, now);
    assert_eq!(moved(&mut budgets), 16);
}

#[test]
fn a_suspect_is_left_only_for_somebody_healthy() {
    let gives_up = |now_at: Health, suspect: &'static [u16]| {
        let mut way = Way::new(Rich);
        way.suspect = suspect;
        way.start();
        way.decide(|plan, sight, _, _| plan.gives_up(now_at, sight))
    };
    assert!(gives_up(Health::Suspect, &[0]));
    assert!(!gives_up(Health::Suspect, &[0, 1, 2]));
    assert!(gives_up(Health::Down, &[0, 1, 2]));
    assert!(!gives_up(Health::Healthy, &[]));
}

fn any_failure() -> impl Strategy<Value = Failure> {
    prop::sample::select(vec![StaleConnection, Unreachable, Elsewhere, Lost, DeadlinePassed])
}

proptest! {
    /// Invariants 1 (Residency), 2 (One fate) and 6 (Bounded): whatever happens on the way, only regions of the list are
    /// asked, no two at once are the same, no more than each thing once, nothing at or after the deadline, and the way
    /// has one end.
    #[test]
    fn no_sequence_of_events_leaves_the_allowed_regions_or_goes_on_for_ever(
        allowed in prop::collection::btree_set(0u16..16, 0..6),
        events in prop::collection::vec((any_failure(), any::<bool>(), 0u64..120, 0usize..2), 0..40),
        marks in prop::collection::vec(0u8..5, 16),
        purse in prop::sample::select(vec![Rich, Poor, Evacuating]),
    ) {
        let start = some_instant();
        let mut now = start;
        let mut budgets = budgets(purse, now);
        let mut plan = RequestPlan::new(allowed.iter().copied().map(region).collect(), true, now + SECOND);
        let mark = |at: RegionIndex| marks[at.as_usize()];
        let health = |at: RegionIndex| match mark(at) { 0 => Health::Down, 1 => Health::Suspect, _ => Health::Healthy };
        let load = |at: RegionIndex| match mark(at) { 2 => Load::Full, 3 => Load::Busy, _ => Load::Calm };
        let waits = |_: RegionIndex| Waits { late: Some(LATE_AFTER), hedge: Some(HEDGE_AFTER) };
        let sight = Sight { health: &health, load: &load, waits: &waits };
        let mut running: Vec<RegionIndex> = Vec::new();
        let (mut sent, mut extra, mut ended) = (0, 0, false);
        let mut step = plan.start(sight, &mut budgets, now);
        for (failure, wakes, wait_ms, which) in events {
            match step {
                Step::Send { region: to, attempt, cause, instead_of } => {
                    sent += 1;
                    extra += u32::from(!matches!(cause, Cause::First | Cause::Replay));
                    prop_assert!(allowed.contains(&(to.as_usize() as u16)), "{:?} is not allowed", to);
                    prop_assert!(load(to) != Load::Full || cause == Cause::Replay);
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
                Step::Wait => prop_assert!(!running.is_empty(), "nobody is waited for"),
                Step::Relay
                | Step::NobodyReachable
                | Step::Full(_)
                | Step::NoReceipt
                | Step::DeadlinePassed => ended = true,
            }
            if ended {
                break;
            }
            now += Duration::from_millis(wait_ms);
            step = if wakes {
                match plan.due(now) {
                    None => Step::Wait,
                    Some(Due::Deadline) => Step::DeadlinePassed,
                    Some(Due::Late(region)) => plan.late(region, sight, &mut budgets, now),
                    Some(Due::Hedge) => plan.hedge(sight, &mut budgets, now),
                }
            } else {
                let failed = running.remove(which.min(running.len() - 1));
                plan.failed(failed, failure, sight, &mut budgets, now)
            };
        }
        prop_assert!(sent <= ATTEMPTS_MAX);
        if purse == Poor {
            prop_assert_eq!(extra, 0);
        }
    }
}
