//! Candidate: a region that may serve a request, with its rank.

use regions::health::Health;
use regions::set::RegionIndex;
use regions::weights::Share;
use std::cmp::Reverse;
use std::time::Duration;

/// Rank of a region for a request; less is better. **The order of the fields is the policy.**
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Score {
    /// The region that a part of a split request was assigned to comes first.
    pub assigned: Reverse<bool>,
    /// A healthy region far away is better than a suspect one nearby.
    pub health: Health,
    /// Among equally healthy regions the first in the order of the deployment; equal for all without one.
    pub order: OrderPosition,
    /// Expected response time; zero for all unless one of the regions would hold the request during a cold start.
    pub response_in: Duration,
    /// At equal response times a region with a ready replica is better than one that would hold the request.
    pub holds: bool,
    /// Among equally near regions the one with shorter measured response times.
    pub fastest: Reverse<bool>,
    /// The region that was drawn by the weights of the traffic plan.
    pub drawn: Reverse<bool>,
    /// A region that is being drained comes after the others.
    pub draining: bool,
    /// Of the others the nearest.
    pub rtt: Duration,
    /// Ties end in the order of the catalogue, so no two scores are equal.
    pub region: RegionIndex,
}

/// Position of a region in the order of its deployment (active-passive); less is better. **The order of the fields is the
/// policy.** All regions of a deployment without an order have the default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct OrderPosition {
    /// A region that is being drained hands over to the next one.
    pub draining: bool,
    /// A region with a ready replica takes the requests that an earlier one would hold during a cold start.
    pub holds: bool,
    /// Index in the order. The regions outside the order share the last one, and are ranked as without an order.
    pub index: u16,
}

impl Score {
    /// Score of a region by itself, without what depends on other regions, the plan or the splitter.
    pub fn new(region: RegionIndex, health: Health, draining: bool, rtt: Duration) -> Score {
        Score {
            assigned: Reverse(false),
            health,
            order: OrderPosition::default(),
            response_in: Duration::ZERO,
            holds: false,
            fastest: Reverse(false),
            drawn: Reverse(false),
            draining,
            rtt,
            region,
        }
    }

    /// Criteria that come before the expected response time.
    pub fn tier(&self) -> (Reverse<bool>, Health, OrderPosition) {
        (self.assigned, self.health, self.order)
    }

    /// Returns whether a region is preferred to the other, if at all, only by the draw or by distance.
    pub fn is_equal_but_for_distance(&self, other: &Score) -> bool {
        Score { drawn: other.drawn, rtt: other.rtt, region: other.region, ..*self } == *other
    }
}

/// Region that may serve the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// The region.
    pub region: RegionIndex,
    /// Its rank.
    pub score: Score,
    /// Its share in the traffic plan, if the plan has a row for requests like this one.
    pub planned: Option<Share>,
}
