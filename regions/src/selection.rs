//! The choice of a region: filter, then score, then order.
//!
//! *Filter* says what is possible, with a reason for each region that is not. It is set algebra: the allowed set comes
//! first, everything later works on what it left, and so no health, no distance and no load can bring a forbidden region
//! back. *Score* ranks what is possible; the order of its fields is the policy. *Order* sorts, and ties end in the
//! region's ordinal, so the same question has the same answer everywhere.
//!
//! The obvious other way, one weighted sum over everything with a large penalty for what is forbidden, makes the residency policy a
//! matter of arithmetic.

use std::time::Duration;

use crate::invariants;
use crate::set::{RegionIndex, RegionSet};
use crate::weights::Share;

/// How a region has looked of late. The order is that of preference.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Health {
    /// It reports.
    Healthy,
    /// Nothing was heard of it yet, neither good nor bad.
    Unknown,
    /// It has missed reports or failed requests; it is used when nothing better is left.
    Suspect,
    /// It is not used.
    Down,
}

/// Why a region cannot take a request. The order is that in which the reasons are looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Ineligible {
    /// The residency policy forbids it, whatever else may be true of it.
    ForbiddenByResidency,
    /// It has not registered, or we have not heard of it.
    NotInRouteTable,
    /// No replica of the deployment is ready there.
    NotDeployedThere,
    /// It is down.
    Down,
}

/// What is asked: where could this request go?
#[derive(Clone, Copy)]
pub struct Query<'a> {
    /// The regions that the question is about; the answer gives each a place or a reason.
    pub considered: RegionSet,
    /// What the residency policy permits: the intersection of all policies.
    pub allowed: RegionSet,
    /// What the route table holds.
    pub routed: RegionSet,
    /// Where the deployment has a ready replica.
    pub serving: RegionSet,
    /// Regions that are being drained: asked after all others that are as well.
    pub draining: RegionSet,
    /// How each region has looked of late. Asked only of regions that could serve otherwise.
    pub health: &'a dyn Fn(RegionIndex) -> Health,
    /// The expected round trip to each region: from the client where its place is known, else from the gateway.
    pub rtt: &'a dyn Fn(RegionIndex) -> Duration,
}

/// How good a region is for a request; less is better. **The order of the fields is the policy.**
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Score {
    /// A healthy region far away is better than a suspect one nearby.
    pub health: Health,
    /// Among the equally healthy one that is being drained comes last.
    pub draining: bool,
    /// Of the others the nearest.
    pub rtt: Duration,
    /// Among the equally near the first of the catalogue, so that no two are equal.
    pub region: RegionIndex,
}

/// A region that could take the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// Which.
    pub region: RegionIndex,
    /// How good.
    pub score: Score,
    /// What the plan gives it of requests like this one, where a plan says anything of them. It does not rank: whoever
    /// draws by it puts the region that was drawn in front.
    pub planned: Option<Share>,
}

/// The answer, with its reasons.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selection {
    /// What could take the request, best first.
    pub order: Vec<Candidate>,
    /// What could not, and why.
    pub refused: Refused,
}

/// The considered regions that cannot take the request, by reason. Four sets, so that explaining costs nothing until
/// somebody asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refused {
    forbidden: RegionSet,
    unrouted: RegionSet,
    undeployed: RegionSet,
    down: RegionSet,
}

/// Chooses: filter, score, order.
pub fn select(query: &Query<'_>) -> Selection {
    select_in(query, Vec::new())
}

/// The same in the room of an order that is no longer needed: where that was large enough, nothing is allocated.
pub fn select_in(query: &Query<'_>, room: Vec<Candidate>) -> Selection {
    let (eligible, refused) = filter(query);
    let scored = eligible.iter().map(|region| score(query, region));
    let order = order(scored, eligible.len(), room);
    invariants::check_residency(&query.allowed, &order)
        .expect("the filter takes forbidden regions out before all else");
    Selection { order, refused }
}

/// What is possible, and why the rest is not.
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

/// How good a possible region is.
pub fn score(query: &Query<'_>, region: RegionIndex) -> Candidate {
    let draining = query.draining.contains(region);
    let score = Score { health: (query.health)(region), draining, rtt: (query.rtt)(region), region };
    Candidate { region, score, planned: None }
}

/// The candidates, best first, in `room`. `len` is how many there are, so that an allocation, if there is one, is of the
/// right size.
pub fn order(
    candidates: impl Iterator<Item = Candidate>,
    len: usize,
    room: Vec<Candidate>,
) -> Vec<Candidate> {
    let mut order = room;
    order.clear();
    order.reserve_exact(len);
    order.extend(candidates);
    order.sort_unstable_by_key(|candidate: &Candidate| candidate.score);
    order
}

impl Selection {
    /// The region to try first.
    pub fn best(&self) -> Option<RegionIndex> {
        self.order.first().map(|candidate| candidate.region)
    }
}

impl Refused {
    /// Every refused region with its reason, in the order of the catalogue.
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

    /// Why a region was refused; `None` if it was not, or was not considered.
    pub fn reason(&self, region: RegionIndex) -> Option<Ineligible> {
        self.iter().find(|(refused, _)| *refused == region).map(|(_, reason)| reason)
    }
}

impl Ineligible {
    /// The reason in words, for explanations.
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

    /// One region of a scene: what the residency policy, the table and its health say, and how far it is.
    #[derive(Clone, Copy)]
    struct Seen {
        allowed: bool,
        routed: bool,
        serving: bool,
        draining: bool,
        health: Health,
        rtt_ms: u64,
    }

    const FINE: Seen = Seen {
        allowed: true,
        routed: true,
        serving: true,
        draining: false,
        health: Health::Healthy,
        rtt_ms: 10,
    };

    fn set(scene: &[Seen], holds: impl Fn(&Seen) -> bool) -> RegionSet {
        let ordinals = scene.iter().enumerate().filter(|(_, seen)| holds(seen));
        ordinals.filter_map(|(ordinal, _)| RegionIndex::new(ordinal)).collect()
    }

    #[track_caller]
    fn check(scene: &[Seen], order: &[usize], refused: &[(usize, Ineligible)]) {
        let selection = select(&Query {
            considered: set(scene, |_| true),
            allowed: set(scene, |seen| seen.allowed),
            routed: set(scene, |seen| seen.routed),
            serving: set(scene, |seen| seen.serving),
            draining: set(scene, |seen| seen.draining),
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
        let at = |rtt_ms| Seen { rtt_ms, ..FINE };
        check(&[at(90), at(10), at(200), at(40)], &[1, 3, 0, 2], &[]);
    }

    #[test]
    fn what_was_chosen_before_in_the_same_room_leaves_no_trace() {
        let all: RegionSet = (0..9).filter_map(RegionIndex::new).collect();
        let choose = |allowed, room| {
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
                room,
            )
        };
        let some: RegionSet = [3, 7].into_iter().filter_map(RegionIndex::new).collect();
        let before = choose(all, Vec::new());
        let (room, at) = (before.order.capacity(), before.order.as_ptr());
        let after = choose(some, before.order);
        assert_eq!(after, choose(some, Vec::new()));
        assert_eq!((after.order.capacity(), after.order.as_ptr()), (room, at), "it is the same room");
    }

    #[test]
    fn of_two_equally_near_regions_the_first_of_the_catalogue_is_first() {
        check(&[FINE, FINE, FINE], &[0, 1, 2], &[]);
    }

    #[test]
    fn a_healthy_region_far_away_comes_before_an_unknown_one_and_that_before_a_suspect_one() {
        let seen = |health, rtt_ms| Seen { health, rtt_ms, ..FINE };
        let scene = [seen(Health::Suspect, 1), seen(Health::Unknown, 50), seen(Health::Healthy, 300)];
        check(&scene, &[2, 1, 0], &[]);
    }

    #[test]
    fn a_region_that_is_being_drained_is_asked_after_all_that_are_as_well_and_before_the_others() {
        let seen = |draining, health, rtt_ms| Seen { draining, health, rtt_ms, ..FINE };
        let scene = [
            seen(true, Health::Healthy, 1),
            seen(false, Health::Suspect, 2),
            seen(false, Health::Healthy, 300),
            Seen { allowed: false, ..FINE },
        ];
        check(&scene, &[2, 0, 1], &[(3, Ineligible::ForbiddenByResidency)]);
    }

    #[test]
    fn a_region_that_cannot_take_the_request_is_refused_for_the_first_reason_that_holds() {
        let forbidden = Seen { allowed: false, ..FINE };
        let hopeless =
            Seen { allowed: false, routed: false, serving: false, health: Health::Down, rtt_ms: 0, ..FINE };
        let scene = [
            FINE,
            forbidden,
            hopeless,
            Seen { allowed: true, ..hopeless },
            Seen { allowed: true, routed: true, ..hopeless },
            Seen { allowed: true, routed: true, serving: true, ..hopeless },
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
    fn when_all_that_is_allowed_is_down_nothing_is_chosen() {
        let down = Seen { health: Health::Down, ..FINE };
        let forbidden = Seen { allowed: false, rtt_ms: 1, ..FINE };
        check(&[down, forbidden], &[], &[(0, Ineligible::Down), (1, Ineligible::ForbiddenByResidency)]);
    }
}
