//! Regions in which a request would be held, because no replica is ready there yet, beside those that are warm.
//!
//! Such a region serves the deployment; it says with every report how long a request that comes now would wait. Distance
//! alone would send everybody to the nearest and let them wait there for half a minute, with a warm region an ocean away; and
//! to take one that starts for one that does not serve would leave a deployment that sleeps everywhere without anybody.
//! So what is compared is when each would *answer*: the round trip, what a request takes there, its queue, and for whom it
//! would be held. Whoever holds comes after every warm region that is as healthy and answers no later ([`mark_response_times`]);
//! the order of the warm ones among each other stays what it was.
//!
//! A cold start is no fault of its region. The time for which it says that it holds requests is added to the patience with
//! it, and nobody is raced or left for it ([`patience`]).

use crate::plan::Waits;
use crate::route::Candidate;
use regions::set::RegionIndex;
use std::time::Duration;

/// Beside what it says: what a replica is given at once of those who were held (`scheduler_core::spoke::AHEAD`), so long the
/// last of them waits more than any.
const LET_GO: Duration = Duration::from_millis(500);

/// What is known of how a region would answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outlook {
    /// The way there and back, its queue, and the work, were a replica ready at once.
    pub answers_in: Duration,
    /// For how long it would hold a request; nothing where a replica takes it at once.
    pub held_for: Option<Duration>,
}

impl Outlook {
    fn in_all(self) -> Duration {
        self.answers_in.saturating_add(self.held_for.unwrap_or_default())
    }
}

/// Sets [`Score::response_in`](crate::route::Score) and `holds` of candidates that are sorted by the rest of their scores. Sorted
/// again, a region that would hold the request comes after the equally healthy warm regions that respond no later, and
/// the warm ones keep their order.
pub fn mark_response_times(order: &mut [Candidate], outlook: impl Fn(&Candidate) -> Outlook) {
    // A warm region counts as the soonest of the warm ones from it on, so that sorting keeps their order.
    let mut soonest = (None, Duration::MAX);
    for candidate in order.iter_mut().rev() {
        let look = outlook(candidate);
        candidate.score.holds = look.held_for.is_some();
        candidate.score.response_in = look.in_all();
        if look.held_for.is_none() {
            let health = Some(candidate.score.health);
            let before = if soonest.0 == health { soonest.1 } else { Duration::MAX };
            soonest = (health, before.min(look.in_all()));
            candidate.score.response_in = soonest.1;
        }
    }
}

/// For how long a region is waited for that holds requests, and never somebody else asked as well: what one that takes them
/// at once gets, from when it no longer does.
pub fn patience(waits: Waits, held_for: Option<Duration>) -> Waits {
    let Some(held_for) = held_for else { return waits };
    let late = waits.late.map(|late| late.saturating_add(held_for).saturating_add(LET_GO));
    Waits { late, hedge: None }
}

/// In what time the best of the warm regions would answer, beside `than`; nothing where all would hold it.
pub fn elsewhere<'a>(
    order: impl Iterator<Item = &'a Candidate>,
    than: RegionIndex,
    outlook: impl Fn(&Candidate) -> Outlook,
) -> Option<Duration> {
    let mut others = order.filter(|candidate| candidate.region != than).map(outlook);
    others.find(|look| look.held_for.is_none()).map(Outlook::in_all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{Budgets, Due, Load, RequestPlan, Sight, Step};
    use crate::some_instant;
    use crate::route::Score;
    use regions::health::Health;

    /// A region of a scene: how healthy it is, in how many milliseconds it answers, and for how long it holds.
    type Seen = (Health, u64, Option<u64>);

    fn scene(seen: &[Seen]) -> (Vec<Candidate>, impl Fn(&Candidate) -> Outlook) {
        let at = |number| RegionIndex::new(number).unwrap();
        let order = seen.iter().enumerate().map(|(number, (health, ..))| {
            let (region, rtt) = (at(number), Duration::from_millis(number as u64));
            Candidate { region, score: Score::new(region, *health, false, rtt), planned: None }
        });
        let look = |candidate: &Candidate| {
            let (_, answers_in, held_for) = seen[candidate.region.as_usize()];
            let (answers_in, held_for) =
                (Duration::from_millis(answers_in), held_for.map(Duration::from_millis));
            Outlook { answers_in, held_for }
        };
        (order.collect(), look)
    }

    use Health::{Healthy, Suspect};

    #[test]
    fn a_region_that_holds_requests_comes_after_those_that_are_warm_and_answer_no_later() {
        let check = |seen: &[Seen], expected: &[usize]| {
            let (mut order, look) = scene(seen);
            mark_response_times(&mut order, look);
            order.sort_by_key(|candidate| candidate.score);
            let order: Vec<_> = order.iter().map(|candidate| candidate.region.as_usize()).collect();
            assert_eq!(order, expected, "{seen:?}");
        };
        check(&[(Healthy, 10, None), (Healthy, 90, None)], &[0, 1]);
        check(&[(Healthy, 10, Some(500)), (Healthy, 90, None)], &[1, 0]);
        check(&[(Healthy, 10, Some(70)), (Healthy, 90, None)], &[0, 1]); // it starts sooner than the other answers
        check(&[(Healthy, 10, Some(80)), (Healthy, 90, None)], &[1, 0]); // a tie: the warm one
        check(&[(Healthy, 10, Some(500)), (Suspect, 90, None)], &[0, 1]); // it is in better health
        check(&[(Healthy, 10, Some(900)), (Healthy, 90, Some(500))], &[1, 0]); // whoever is ready first
        check(&[(Healthy, 10, Some(500)), (Healthy, 90, Some(420))], &[0, 1]); // equal: as they were
        // The warm ones stay in their order, and all that are sooner come first.
        check(
            &[(Healthy, 10, Some(90)), (Healthy, 50, None), (Healthy, 200, None), (Healthy, 80, None)],
            &[1, 2, 3, 0],
        );
        check(
            &[(Healthy, 10, Some(60)), (Healthy, 50, None), (Healthy, 200, None), (Healthy, 80, None)],
            &[1, 0, 2, 3],
        );
        check(&[(Healthy, 10, Some(60)), (Healthy, 90, None), (Suspect, 1, None)], &[0, 1, 2]);
    }

    #[test]
    fn a_region_that_holds_requests_is_given_that_time_and_not_raced() {
        let ms = Duration::from_millis;
        let waits = Waits { late: Some(ms(100)), hedge: Some(ms(40)) };
        assert_eq!(patience(waits, None), waits);
        assert_eq!(patience(waits, Some(ms(900))), Waits { late: Some(ms(1500)), hedge: None });
        let unknown = Waits { late: None, hedge: None };
        assert_eq!(patience(unknown, Some(ms(900))), unknown);
    }

    #[test]
    fn a_request_that_is_held_longer_than_was_said_is_late_only_after_that() {
        let (now, region, ms) = (some_instant(), RegionIndex::new(0).unwrap(), Duration::from_millis);
        let waits = |_: RegionIndex| Waits { late: Some(ms(100)), hedge: None };
        let sight = Sight { health: &|_| Healthy, load: &|_| Load::Calm, waits: &waits };
        let mut plan = RequestPlan::new(vec![region], false, now + ms(10_000));
        assert!(matches!(plan.start(sight, &mut Budgets::new(now), now), Step::Send { .. }));
        assert_eq!(plan.due(now + ms(100)), Some(Due::Late(region)));
        plan.put_off(region, now + ms(700));
        assert_eq!((plan.due(now + ms(699)), plan.alarm()), (None, now + ms(700)));
        assert_eq!(plan.due(now + ms(700)), Some(Due::Late(region)));
        plan.put_off(region, now + ms(900));
        assert!(plan.answered(region), "it came in time");
    }

    #[test]
    fn a_region_without_a_replica_is_told_how_soon_the_best_of_the_warm_ones_answers() {
        let check = |seen: &[Seen], than: usize, expected: Option<u64>| {
            let (order, look) = scene(seen);
            let found = elsewhere(order.iter(), RegionIndex::new(than).unwrap(), look);
            assert_eq!(found, expected.map(Duration::from_millis), "{seen:?}, {than}");
        };
        let seen = [(Healthy, 10, Some(50)), (Healthy, 90, None), (Healthy, 70, None)];
        check(&seen, 0, Some(90));
        check(&seen, 1, Some(70));
        check(&seen, 2, Some(90));
        check(&seen[..1], 0, None);
        check(&[(Healthy, 10, Some(50)), (Healthy, 20, Some(5))], 0, None);
    }
}
