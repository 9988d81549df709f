//! A plan whose regions become fewer while it is under way.

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

/// What follows when region 0 was asked first, the plan is restricted to `allowed`, and then `next` happens.
fn after(allowed: &[u16], next: impl Fn(&mut RequestPlan, Sight<'_>, &mut Budgets, Instant) -> Step) -> Step {
    let now = some_instant();
    let mut budgets = Budgets::new(now);
    budgets.evacuate(region(0), 1000, now);
    (0..1000).for_each(|_| budgets.hedge.pay_in());
    let waits = |_: RegionIndex| Waits { late: Some(SECOND / 10), hedge: Some(SECOND / 20) };
    let sight = Sight { health: &|_| Health::Healthy, load: &|_| Load::Calm, waits: &waits };
    let mut plan = RequestPlan::new(vec![region(0), region(1), region(2)], true, now + SECOND);
    let first = plan.start(sight, &mut budgets, now);
    assert!(matches!(first, Step::Send { region: to, .. } if to == region(0)), "{first:?}");
    plan.restrict(only(allowed));
    next(&mut plan, sight, &mut budgets, now)
}

fn sent_to(step: Step) -> Option<RegionIndex> {
    match step {
        Step::Send { region, .. } => Some(region),
        _ => None,
    }
}

#[test]
fn a_region_that_is_no_longer_allowed_is_asked_neither_instead_nor_as_well_nor_again() {
    let fails = |failure: Failure| {
        move |plan: &mut RequestPlan, sight: Sight<'_>, budgets: &mut Budgets, now: Instant| {
            plan.failed(region(0), failure, sight, budgets, now)
        }
    };
    for failure in [Failure::Unreachable, Failure::Lost, Failure::Elsewhere] {
        assert_eq!(sent_to(after(&[0, 1, 2], fails(failure))), Some(region(1)), "{failure:?}");
        assert_eq!(sent_to(after(&[0, 2], fails(failure))), Some(region(2)), "{failure:?}");
        assert_eq!(sent_to(after(&[], fails(failure))), None, "{failure:?}");
    }
    assert_eq!(after(&[], fails(Failure::Unreachable)), Step::NobodyReachable);
    assert_eq!(sent_to(after(&[0], fails(Failure::StaleConnection))), Some(region(0)));
    assert_eq!(sent_to(after(&[1], fails(Failure::StaleConnection))), Some(region(1)), "not there again");
    assert_eq!(sent_to(after(&[], fails(Failure::StaleConnection))), None);
    let hedge = |plan: &mut RequestPlan, sight: Sight<'_>, budgets: &mut Budgets, now: Instant| {
        plan.hedge(sight, budgets, now)
    };
    assert_eq!(sent_to(after(&[0, 2], hedge)), Some(region(2)));
    assert_eq!(after(&[0], hedge), Step::Wait, "what is under way goes on");
    let late = |plan: &mut RequestPlan, sight: Sight<'_>, budgets: &mut Budgets, now: Instant| {
        plan.late(region(0), sight, budgets, now)
    };
    assert_eq!(sent_to(after(&[2], late)), Some(region(2)));
    assert_eq!(after(&[], late), Step::Wait);
}

#[test]
fn a_receipt_that_cannot_be_written_ends_the_request_unless_another_attempt_is_under_way() {
    let now = some_instant();
    let fails = |plan: &mut RequestPlan, sight: Sight<'_>, budgets: &mut Budgets, _: Instant| {
        plan.failed(region(0), Failure::ReceiptUnavailable, sight, budgets, now)
    };
    assert_eq!(after(&[0, 1, 2], fails), Step::NoReceipt);
    let races = |plan: &mut RequestPlan, sight: Sight<'_>, budgets: &mut Budgets, _: Instant| {
        assert!(sent_to(plan.hedge(sight, budgets, now)).is_some());
        plan.failed(region(1), Failure::ReceiptUnavailable, sight, budgets, now)
    };
    assert_eq!(after(&[0, 1, 2], races), Step::Wait);
}
