//! Tests of a plan whose allowed regions become fewer while attempts are in flight.

use super::*;
use crate::some_instant;

const SECOND: Duration = Duration::from_secs(1);

fn region(number: u16) -> RegionIndex {
    RegionIndex::new(number.into()).expect("a small number")
}

fn only(numbers: &[u16]) -> RegionSet {
    let mut set = RegionSet::EMPTY;
    numbers.iter().for_each(|number| set.insert(region(*number)));
    set
}

/// Returns the step after a first attempt at region 0, a restriction of the plan to `allowed`, and the event `next`.
fn after(
    allowed: &[u16],
    next: impl Fn(&mut RequestPlan, RegionView<'_>, &mut Budgets<RegionIndex>, Instant) -> Step,
) -> Step {
    let now = some_instant();
    let mut budgets = Budgets::new(now);
    budgets.evacuate(region(0), 1000, now);
    (0..1000).for_each(|_| budgets.hedge.deposit());
    let timeouts =
        |_: RegionIndex| AttemptTimeouts { first_byte: Some(SECOND / 10), hedge: Some(SECOND / 20) };
    let view = RegionView {
        health: &|_| Health::Healthy,
        load: &|_| RegionLoad::Light,
        timeouts: &timeouts,
        instance: &|_, _| None,
    };
    let mut plan = RequestPlan::new(vec![region(0), region(1), region(2)], true, now + SECOND);
    let first = plan.start(view, &mut budgets, now);
    assert!(matches!(first, Step::Send { region: to, .. } if to == region(0)), "{first:?}");
    plan.restrict(only(allowed));
    next(&mut plan, view, &mut budgets, now)
}

fn sent_to(step: Step) -> Option<RegionIndex> {
    match step {
        Step::Send { region, .. } => Some(region),
        _ => None,
    }
}

#[test]
fn a_region_that_is_no_longer_allowed_gets_no_retry_hedge_or_replay() {
    let fails = |failure: AttemptFailure| {
        move |plan: &mut RequestPlan,
              view: RegionView<'_>,
              budgets: &mut Budgets<RegionIndex>,
              now: Instant| { plan.failed(region(0), failure, view, budgets, now) }
    };
    for failure in [AttemptFailure::Unreachable, AttemptFailure::RegionDown, AttemptFailure::Declined] {
        assert_eq!(sent_to(after(&[0, 1, 2], fails(failure))), Some(region(1)), "{failure:?}");
        assert_eq!(sent_to(after(&[0, 2], fails(failure))), Some(region(2)), "{failure:?}");
        assert_eq!(sent_to(after(&[], fails(failure))), None, "{failure:?}");
    }
    assert_eq!(after(&[], fails(AttemptFailure::Unreachable)), Step::NoRegionReachable);
    assert_eq!(sent_to(after(&[0], fails(AttemptFailure::StaleConnection))), Some(region(0)));
    assert_eq!(
        sent_to(after(&[1], fails(AttemptFailure::StaleConnection))),
        Some(region(1)),
        "no replay at a region that is not allowed"
    );
    assert_eq!(sent_to(after(&[], fails(AttemptFailure::StaleConnection))), None);
    let hedge = |plan: &mut RequestPlan,
                 view: RegionView<'_>,
                 budgets: &mut Budgets<RegionIndex>,
                 now: Instant| { plan.hedge(view, budgets, now) };
    assert_eq!(sent_to(after(&[0, 2], hedge)), Some(region(2)));
    assert_eq!(after(&[0], hedge), Step::Wait, "the attempt in flight continues");
    let timed_out =
        |plan: &mut RequestPlan, view: RegionView<'_>, budgets: &mut Budgets<RegionIndex>, now: Instant| {
            plan.first_byte_timed_out(region(0), view, budgets, now)
        };
    assert_eq!(sent_to(after(&[2], timed_out)), Some(region(2)));
    assert_eq!(after(&[], timed_out), Step::Wait);
    // The region that was late, when what took over has failed.
    let returns = |allowed: &'static [u16]| {
        move |plan: &mut RequestPlan,
              view: RegionView<'_>,
              budgets: &mut Budgets<RegionIndex>,
              now: Instant| {
            assert_eq!(sent_to(plan.first_byte_timed_out(region(0), view, budgets, now)), Some(region(1)));
            plan.restrict(only(allowed));
            plan.failed(region(1), AttemptFailure::Unreachable, view, budgets, now)
        }
    };
    assert_eq!(sent_to(after(&[0, 1], returns(&[0, 1]))), Some(region(0)));
    assert_eq!(after(&[0, 1], returns(&[1])), Step::NoRegionReachable);
}

#[test]
fn a_receipt_that_cannot_be_written_ends_the_request_unless_another_attempt_is_in_flight() {
    let now = some_instant();
    let fails =
        |plan: &mut RequestPlan, view: RegionView<'_>, budgets: &mut Budgets<RegionIndex>, _: Instant| {
            plan.failed(region(0), AttemptFailure::ReceiptUnavailable, view, budgets, now)
        };
    assert_eq!(after(&[0, 1, 2], fails), Step::ReceiptUnavailable);
    let fails_in_race =
        |plan: &mut RequestPlan, view: RegionView<'_>, budgets: &mut Budgets<RegionIndex>, _: Instant| {
            assert!(sent_to(plan.hedge(view, budgets, now)).is_some());
            plan.failed(region(1), AttemptFailure::ReceiptUnavailable, view, budgets, now)
        };
    assert_eq!(after(&[0, 1, 2], fails_in_race), Step::Wait);
}
