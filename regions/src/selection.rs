//! Region selection: filter, then score, then order.
//!
//! *Filter* determines the eligible regions, with a reason for each ineligible one. It is set algebra: the allowed
//! regions come first and every later step only removes regions, so no health, distance or load can bring a forbidden
//! region back. *Score* ranks the eligible regions; the order of its fields is the policy. *Order* sorts, with ties
//! broken by the region's ordinal, so the same query has the same result everywhere.
//!
//! The obvious alternative, one weighted sum with a large penalty for forbidden regions, would make residency depend on
//! the magnitudes of the weights.

use std::time::Duration;

use crate::invariants;
use crate::set::{RegionIndex, RegionSet};
use crate::weights::Share;

/// Recent health of a region. The order is that of preference.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Health {
    /// It sends reports.
    Healthy,
    /// No report was received yet, and no failure.
    Unknown,
    /// It has missed reports or failed requests; it is used when no better region is available.
    Suspect,
    /// It is not used.
    Down,
}

/// Reason why a region is ineligible. The order is that of the checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Ineligible {
    /// The residency policy forbids it, regardless of everything else.
    ForbiddenByResidency,
    /// It has not registered, or the route table with its registration has not arrived.
    NotInRouteTable,
    /// No replica of the deployment is ready there.
    NotDeployedThere,
    /// Its health is [`Health::Down`].
    Down,
}

/// Input of the selection for one request.
#[derive(Clone, Copy)]
pub struct Query<'a> {
    /// Regions to decide on; the result contains a position or a reason for each.
    pub considered: RegionSet,
    /// Regions that all residency policies of the request permit.
    pub allowed: RegionSet,
    /// Regions in the route table.
    pub routed: RegionSet,
    /// Regions in which the deployment has a ready replica.
    pub serving: RegionSet,
    /// Regions that are being drained. They rank after all other regions of the same health.
    pub draining: RegionSet,
    /// Health of a region. Called only for regions that are eligible otherwise.
    pub health: &'a dyn Fn(RegionIndex) -> Health,
    /// Expected round trip to a region: from the client where its location is known, else from the gateway.
    pub rtt: &'a dyn Fn(RegionIndex) -> Duration,
}

/// Rank of a region for a request; lower is better. **The order of the fields is the policy.**
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Score {
    /// A distant healthy region is better than a near suspect one.
    pub health: Health,
    /// Among regions of equal health, those being drained come last.
    pub draining: bool,
    /// Then the nearest region is preferred.
    pub rtt: Duration,
    /// Tie-break: the first in the catalogue, so that no two scores are equal.
    pub region: RegionIndex,
}

/// Eligible region with its score.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// Region.
    pub region: RegionIndex,
    /// Rank.
    pub score: Score,
    /// Share of such requests that the traffic plan assigns to the region, if the plan covers them. It does not affect
    /// the rank: the caller draws a region by these shares and moves it to the front.
    pub planned: Option<Share>,
}

/// Result of the selection, with reasons.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selection {
    /// Eligible regions, best first.
    pub order: Vec<Candidate>,
    /// Ineligible regions and the reasons.
    pub refused: Refused,
}

/// Ineligible regions by reason. Stored as four sets, so that reasons cost nothing until an explanation is requested.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refused {
    forbidden: RegionSet,
    unrouted: RegionSet,
    undeployed: RegionSet,
    down: RegionSet,
}

/// Selects regions: filter, score, order.
pub fn select(query: &Query<'_>) -> Selection {
    select_in(query, Vec::new())
}

/// Like [`select`], but reuses the allocation of a previous result. Allocates only if its capacity is too small.
pub fn select_in(query: &Query<'_>, buffer: Vec<Candidate>) -> Selection {
    let (eligible, refused) = filter(query);
    let scored = eligible.iter().map(|region| score(query, region));
    let order = order(scored, eligible.len(), buffer);
    invariants::check_residency(&query.allowed, &order).expect("the filter removes forbidden regions first");
    Selection { order, refused }
}

/// Returns the eligible regions, and the reasons for the others.
pub fn filter(query: &Query<'_>) -> (RegionSet, Refused) {
    let permitted = query.considered.intersect(query.allowed);
    let routed = permitted.intersect(query.routed);
    let deployed = routed.intersect(query.serving);
    let down: RegionSet = deployed.iter().filter(|region| (query.health)(*region) == Health::Down).collect();
    let refused = Refused {
        forbidden: query.considered.minus(query.allowed),
        unrouted: permitted.minus(query.routed),
        undeployed: routed.minus(query.serving),
        down,
    };
    (deployed.minus(down), refused)
}

/// Returns an eligible region with its score.
pub fn score(query: &Query<'_>, region: RegionIndex) -> Candidate {
    let draining = query.draining.contains(region);
    let score = Score { health: (query.health)(region), draining, rtt: (query.rtt)(region), region };
    Candidate { region, score, planned: None }
}

/// Sorts the candidates, best first, into `buffer`. `len` is their number, so that an allocation, if one is needed, has
/// the right size.
pub fn order(
    candidates: impl Iterator<Item = Candidate>,
    len: usize,
    buffer: Vec<Candidate>,
) -> Vec<Candidate> {
    let mut order = buffer;
    order.clear();
    order.reserve_exact(len);
    order.extend(candidates);
    order.sort_unstable_by_key(|candidate: &Candidate| candidate.score);
    order
}

impl Selection {
    /// Returns the region to try first.
    pub fn best(&self) -> Option<RegionIndex> {
        self.order.first().map(|candidate| candidate.region)
    }
}

impl Refused {
    /// Returns every ineligible region with its reason, in catalogue order.
    pub fn iter(&self) -> impl Iterator<Item = (RegionIndex, Ineligible)> {
        let Refused { forbidden, unrouted, undeployed, down } = *self;
        let all = forbidden.union(unrouted).union(undeployed).union(down);
        all.iter().map(move |region| {
            let reason = if forbidden.contains(region) {
                Ineligible::ForbiddenByResidency
            } else if unrouted.contains(region) {
                Ineligible::NotInRouteTable
            } else if undeployed.contains(region) {
                Ineligible::NotDeployedThere
            } else {
                Ineligible::Down
            };
            (region, reason)
        })
    }

    /// Returns the reason why a region is ineligible; `None` if it is eligible or was not considered.
    pub fn reason(&self, region: RegionIndex) -> Option<Ineligible> {
        self.iter().find(|(refused, _)| *refused == region).map(|(_, reason)| reason)
    }
}

impl Ineligible {
    /// Returns the reason as text, for explanations.
    pub fn as_str(self) -> &'static str {
        match self {
            Ineligible::ForbiddenByResidency => "forbidden by residency",
            Ineligible::NotInRouteTable => "not in the route table",
            Ineligible::NotDeployedThere => "no ready replica of the deployment",
            Ineligible::Down => "down",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One region of a test case: residency, route table, health and distance.
    #[derive(Clone, Copy)]
    struct RegionCase {
        allowed: bool,
        routed: bool,
        serving: bool,
        draining: bool,
        health: Health,
        rtt_ms: u64,
    }

    const FINE: RegionCase = RegionCase {
        allowed: true,
        routed: true,
        serving: true,
        draining: false,
        health: Health::Healthy,
        rtt_ms: 10,
    };

    fn set(scene: &[RegionCase], holds: impl Fn(&RegionCase) -> bool) -> RegionSet {
        let ordinals = scene.iter().enumerate().filter(|(_, case)| holds(case));
        ordinals.filter_map(|(ordinal, _)| RegionIndex::new(ordinal)).collect()
    }

    #[track_caller]
    fn check(scene: &[RegionCase], order: &[usize], refused: &[(usize, Ineligible)]) {
        let selection = select(&Query {
            considered: set(scene, |_| true),
            allowed: set(scene, |case| case.allowed),
            routed: set(scene, |case| case.routed),
            serving: set(scene, |case| case.serving),
            draining: set(scene, |case| case.draining),
            health: &|region| scene[region.as_usize()].health,
            rtt: &|region| Duration::from_millis(scene[region.as_usize()].rtt_ms),
        });
        let found: Vec<usize> = selection.order.iter().map(|candidate| candidate.region.as_usize()).collect();
        assert_eq!(found, order);
        assert_eq!(selection.best().map(RegionIndex::as_usize), order.first().copied());
        let found: Vec<_> =
            selection.refused.iter().map(|(region, reason)| (region.as_usize(), reason)).collect();
        assert_eq!(found, refused);
    }

    #[test]
    fn the_nearest_region_is_first() {
        let at = |rtt_ms| RegionCase { rtt_ms, ..FINE };
        check(&[at(90), at(10), at(200), at(40)], &[1, 3, 0, 2], &[]);
    }

    #[test]
    fn a_reused_buffer_keeps_nothing_of_the_previous_selection() {
        let all: RegionSet = (0..9).filter_map(RegionIndex::new).collect();
        let choose = |allowed, buffer| {
            select_in(
                &Query {
                    considered: all,
                    allowed,
                    routed: all,
                    serving: all,
                    draining: RegionSet::EMPTY,
                    health: &|_| Health::Healthy,
                    rtt: &|region| Duration::from_millis(region.as_usize() as u64),
                },
                buffer,
            )
        };
        let some: RegionSet = [3, 7].into_iter().filter_map(RegionIndex::new).collect();
        let before = choose(all, Vec::new());
        let (capacity, address) = (before.order.capacity(), before.order.as_ptr());
        let after = choose(some, before.order);
        assert_eq!(after, choose(some, Vec::new()));
        assert_eq!(
            (after.order.capacity(), after.order.as_ptr()),
            (capacity, address),
            "the buffer is reused"
        );
    }

    #[test]
    fn among_equally_near_regions_the_first_of_the_catalogue_is_first() {
        check(&[FINE, FINE, FINE], &[0, 1, 2], &[]);
    }

    #[test]
    fn health_ranks_before_distance() {
        let case = |health, rtt_ms| RegionCase { health, rtt_ms, ..FINE };
        let scene = [case(Health::Suspect, 1), case(Health::Unknown, 50), case(Health::Healthy, 300)];
        check(&scene, &[2, 1, 0], &[]);
    }

    #[test]
    fn a_draining_region_ranks_last_among_regions_of_equal_health() {
        let case = |draining, health, rtt_ms| RegionCase { draining, health, rtt_ms, ..FINE };
        let scene = [
            case(true, Health::Healthy, 1),
            case(false, Health::Suspect, 2),
            case(false, Health::Healthy, 300),
            RegionCase { allowed: false, ..FINE },
        ];
        check(&scene, &[2, 0, 1], &[(3, Ineligible::ForbiddenByResidency)]);
    }

    #[test]
    fn an_ineligible_region_is_reported_with_the_first_reason_that_applies() {
        let forbidden = RegionCase { allowed: false, ..FINE };
        let ineligible = RegionCase {
            allowed: false,
            routed: false,
            serving: false,
            health: Health::Down,
            rtt_ms: 0,
            ..FINE
        };
        let scene = [
            FINE,
            forbidden,
            ineligible,
            RegionCase { allowed: true, ..ineligible },
            RegionCase { allowed: true, routed: true, ..ineligible },
            RegionCase { allowed: true, routed: true, serving: true, ..ineligible },
        ];
        check(
            &scene,
            &[0],
            &[
                (1, Ineligible::ForbiddenByResidency),
                (2, Ineligible::ForbiddenByResidency),
                (3, Ineligible::NotInRouteTable),
                (4, Ineligible::NotDeployedThere),
                (5, Ineligible::Down),
            ],
        );
    }

    #[test]
    fn when_all_allowed_regions_are_down_none_is_selected() {
        let down = RegionCase { health: Health::Down, ..FINE };
        let forbidden = RegionCase { allowed: false, rtt_ms: 1, ..FINE };
        check(&[down, forbidden], &[], &[(0, Ineligible::Down), (1, Ineligible::ForbiddenByResidency)]);
    }
}
