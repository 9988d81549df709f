//! Ranking of regions in a cold start, where a request would be held because no replica is ready, among warm ones.
//!
//! Such a region serves the deployment; with every report it states how long a new request would be held. Distance
//! alone would send all requests to the nearest and hold them there for half a minute, with a warm region an ocean
//! away; and to count a starting region as not serving would leave a deployment that is scaled to zero everywhere
//! without any region. So regions are compared by the time to the *response*: the round trip, the latency there, the
//! queue, and the holding time. A region that holds requests comes after every warm region with the same health that
//! responds no later ([`mark_response_times`]); the order among warm regions is kept.
//!
//! A cold start is no fault of its region. The holding time that it reports is added to the first-byte timeout, and
//! there is no hedge or retry because of it ([`AttemptTimeouts::while_held`](crate::plan::AttemptTimeouts::while_held)).

use crate::candidate::Candidate;
use regions::set::RegionIndex;
use std::time::Duration;

/// Estimate of the time to a response of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResponseEstimate {
    /// Round trip, queue and computation, if a replica were ready at once.
    pub responds_in: Duration,
    /// Time for which it would hold a request; `None` if a replica is ready.
    pub held_for: Option<Duration>,
}

impl ResponseEstimate {
    fn total(self) -> Duration {
        self.responds_in.saturating_add(self.held_for.unwrap_or_default())
    }
}

/// Sets [`Score::response_in`](crate::candidate::Score) and `holds` of candidates that are sorted by the rest of their scores.
/// Sorted again, a region that would hold the request comes after the equally healthy warm regions that respond no later,
/// and the warm ones keep their order.
pub fn mark_response_times(order: &mut [Candidate], estimator: impl Fn(&Candidate) -> ResponseEstimate) {
    // A warm region counts as the soonest of the warm ones from it on, so that sorting keeps their order.
    let mut soonest = (None, Duration::MAX);
    for candidate in order.iter_mut().rev() {
        let estimate = estimator(candidate);
        candidate.score.holds = estimate.held_for.is_some();
        candidate.score.response_in = estimate.total();
        if estimate.held_for.is_none() {
            let tier = Some(candidate.score.tier());
            let before = if soonest.0 == tier { soonest.1 } else { Duration::MAX };
            soonest = (tier, before.min(estimate.total()));
            candidate.score.response_in = soonest.1;
        }
    }
}

/// Returns the time in which the best warm region other than `than` would respond; `None` if all others hold requests.
pub fn elsewhere<'a>(
    order: impl Iterator<Item = &'a Candidate>,
    than: RegionIndex,
    estimator: impl Fn(&Candidate) -> ResponseEstimate,
) -> Option<Duration> {
    let mut others = order.filter(|candidate| candidate.region != than).map(estimator);
    others.find(|estimate| estimate.held_for.is_none()).map(ResponseEstimate::total)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::budget::Budgets;
    use crate::candidate::Score;
    use crate::plan::{AttemptTimeouts, ExpiredTimer, RegionLoad, RegionView, RequestPlan, Step};
    use crate::some_instant;
    use regions::health::Health;

    /// Region of a test: its health, its response time in milliseconds, and its holding time.
    type TestRegion = (Health, u64, Option<u64>);

    fn candidates(regions: &[TestRegion]) -> (Vec<Candidate>, impl Fn(&Candidate) -> ResponseEstimate) {
        let at = |number| RegionIndex::new(number).unwrap();
        let order = regions.iter().enumerate().map(|(number, (health, ..))| {
            let (region, rtt) = (at(number), Duration::from_millis(number as u64));
            Candidate { region, score: Score::new(region, *health, false, rtt), planned: None }
        });
        let estimate = |candidate: &Candidate| {
            let (_, responds_in, held_for) = regions[candidate.region.as_usize()];
            let (responds_in, held_for) =
                (Duration::from_millis(responds_in), held_for.map(Duration::from_millis));
            ResponseEstimate { responds_in, held_for }
        };
        (order.collect(), estimate)
    }

    use Health::{Healthy, Suspect};

    #[test]
    fn a_region_that_holds_requests_comes_after_warm_ones_that_respond_no_later() {
        let check = |regions: &[TestRegion], expected: &[usize]| {
            let (mut order, estimate) = candidates(regions);
            mark_response_times(&mut order, estimate);
            order.sort_by_key(|candidate| candidate.score);
            let order: Vec<_> = order.iter().map(|candidate| candidate.region.as_usize()).collect();
            assert_eq!(order, expected, "{regions:?}");
        };
        check(&[(Healthy, 10, None), (Healthy, 90, None)], &[0, 1]);
        check(&[(Healthy, 10, Some(500)), (Healthy, 90, None)], &[1, 0]);
        check(&[(Healthy, 10, Some(70)), (Healthy, 90, None)], &[0, 1]); // it starts sooner than the other responds
        check(&[(Healthy, 10, Some(80)), (Healthy, 90, None)], &[1, 0]); // a tie: the warm one
        check(&[(Healthy, 10, Some(500)), (Suspect, 90, None)], &[0, 1]); // it is in better health
        check(&[(Healthy, 10, Some(900)), (Healthy, 90, Some(500))], &[1, 0]); // the one that is ready first
        check(&[(Healthy, 10, Some(500)), (Healthy, 90, Some(420))], &[0, 1]); // equal: as they were
        // The warm ones keep their order, and all that are sooner come first.
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
    fn the_timeout_of_a_holding_region_is_extended_and_there_is_no_hedge() {
        let ms = Duration::from_millis;
        let timeouts = AttemptTimeouts { first_byte: Some(ms(100)), hedge: Some(ms(40)) };
        assert_eq!(timeouts.while_held(None), timeouts);
        assert_eq!(
            timeouts.while_held(Some(ms(900))),
            AttemptTimeouts { first_byte: Some(ms(1500)), hedge: None }
        );
        let unknown = AttemptTimeouts { first_byte: None, hedge: None };
        assert_eq!(unknown.while_held(Some(ms(900))), unknown);
    }

    #[test]
    fn the_first_byte_timeout_of_a_held_request_can_be_extended() {
        let (now, region, ms) = (some_instant(), RegionIndex::new(0).unwrap(), Duration::from_millis);
        let timeouts = |_: RegionIndex| AttemptTimeouts { first_byte: Some(ms(100)), hedge: None };
        let view = RegionView {
            health: &|_| Healthy,
            load: &|_| RegionLoad::Light,
            timeouts: &timeouts,
            instance: &|_, _| None,
        };
        let mut plan = RequestPlan::new(vec![region], false, now + ms(10_000));
        assert!(matches!(plan.start(view, &mut Budgets::new(now), now), Step::Send { .. }));
        assert_eq!(plan.expired_timer(now + ms(100)), Some(ExpiredTimer::FirstByte(region)));
        plan.extend_first_byte_timeout(region, now + ms(700));
        assert_eq!((plan.expired_timer(now + ms(699)), plan.next_timer()), (None, now + ms(700)));
        assert_eq!(plan.expired_timer(now + ms(700)), Some(ExpiredTimer::FirstByte(region)));
        plan.extend_first_byte_timeout(region, now + ms(900));
        assert!(plan.responded(region), "it met the extended timeout");
    }

    #[test]
    fn the_response_time_of_the_best_warm_region_is_found() {
        let check = |regions: &[TestRegion], than: usize, expected: Option<u64>| {
            let (order, estimate) = candidates(regions);
            let result = elsewhere(order.iter(), RegionIndex::new(than).unwrap(), estimate);
            assert_eq!(result, expected.map(Duration::from_millis), "{regions:?}, {than}");
        };
        let regions = [(Healthy, 10, Some(50)), (Healthy, 90, None), (Healthy, 70, None)];
        check(&regions, 0, Some(90));
        check(&regions, 1, Some(70));
        check(&regions, 2, Some(90));
        check(&regions[..1], 0, None);
        check(&[(Healthy, 10, Some(50)), (Healthy, 20, Some(5))], 0, None);
    }
}
