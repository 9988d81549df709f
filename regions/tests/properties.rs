//! Property tests of residency policies and region selection over random fleets.
//!
//! A fleet is drawn over the regions of the real catalogue: any policies, any health, any distances. The
//! checker of the invariant *Residency* is the one that the selection asserts at run time. The last test implements the
//! classic mistake, residency as a preference, and shows that the same checker finds it.

use std::sync::LazyLock;
use std::time::Duration;

use proptest::prelude::*;
use regions::invariants::{ResidencyViolation, check_residency};
use regions::residency::MAX_POLICY_LEN;
use regions::selection::{Candidate, Health, Ineligible, Query, Score, select};
use regions::{Area, Catalogue, Jurisdiction, RegionId, RegionIndex, RegionSet, ResidencyPolicy};

static CATALOGUE: LazyLock<Catalogue> = LazyLock::new(Catalogue::builtin);

fn any_area() -> impl Strategy<Value = Area> {
    let jurisdictions: Vec<Jurisdiction> = CATALOGUE.jurisdictions().cloned().collect();
    let regions: Vec<RegionId> = CATALOGUE.iter().map(|(_, region)| region.id.clone()).collect();
    prop_oneof![
        prop::sample::select(jurisdictions).prop_map(Area::Jurisdiction),
        prop::sample::select(regions).prop_map(Area::Region),
    ]
}

fn any_condition() -> impl Strategy<Value = ResidencyPolicy> {
    prop::collection::vec(any_area(), 1..5)
        .prop_map(|areas| ResidencyPolicy::any_of(areas).expect("not empty"))
}

fn any_policy() -> impl Strategy<Value = ResidencyPolicy> {
    prop_oneof![
        1 => Just(ResidencyPolicy::Anywhere),
        4 => any_condition(),
        2 => (any_condition(), any_condition()).prop_map(|(a, b)| a.narrow(&b)),
    ]
}

/// Policy texts with and without spaces, with lengths around the limit.
fn any_text() -> impl Strategy<Value = String> {
    let spaced = |sign: &'static str| prop::sample::select(vec![sign.to_owned(), format!(" {sign} ")]);
    let areas = prop::collection::vec(any_area(), 1..4);
    prop::collection::vec((areas, spaced("&"), spaced(",")), 1..500).prop_map(|conditions| {
        let mut text = String::new();
        for (areas, and, or) in conditions {
            let areas: Vec<String> = areas.iter().map(Area::to_string).collect();
            text += &format!("{}{}", if text.is_empty() { "" } else { &and }, areas.join(&or));
        }
        text
    })
}

fn any_set() -> impl Strategy<Value = RegionSet> {
    prop::collection::vec(any::<bool>(), CATALOGUE.len()).prop_map(|members| {
        let members = members.into_iter().enumerate().filter(|(_, member)| *member);
        members.filter_map(|(ordinal, _)| RegionIndex::new(ordinal)).collect()
    })
}

/// Random fleet as observed by a gateway.
#[derive(Clone, Debug)]
struct Fleet {
    routed: RegionSet,
    serving: RegionSet,
    health: Vec<Health>,
    rtt_us: Vec<u64>,
}

fn any_fleet() -> impl Strategy<Value = Fleet> {
    let health = prop::sample::select(vec![Health::Healthy, Health::Unknown, Health::Suspect, Health::Down]);
    (
        any_set(),
        any_set(),
        prop::collection::vec(health, CATALOGUE.len()),
        prop::collection::vec(0..400_000_u64, CATALOGUE.len()),
    )
        .prop_map(|(routed, serving, health, rtt_us)| Fleet { routed, serving, health, rtt_us })
}

impl Fleet {
    fn health(&self, region: RegionIndex) -> Health {
        self.health[region.as_usize()]
    }

    fn rtt(&self, region: RegionIndex) -> Duration {
        Duration::from_micros(self.rtt_us[region.as_usize()])
    }

    fn select(&self, allowed: RegionSet) -> regions::Selection {
        select(&Query {
            considered: CATALOGUE.all(),
            allowed,
            routed: self.routed,
            serving: self.serving,
            draining: RegionSet::EMPTY,
            health: &|region| self.health(region),
            rtt: &|region| self.rtt(region),
        })
    }

    /// Faulty selection: residency as the first preference, with every serving region as a candidate. Its results are
    /// right as long as an allowed region is up.
    fn select_by_preference(&self, allowed: RegionSet) -> Vec<Candidate> {
        let up =
            self.routed.intersect(self.serving).iter().filter(|region| self.health(*region) != Health::Down);
        let mut order: Vec<Candidate> = up
            .map(|region| Candidate {
                region,
                score: Score { health: self.health(region), draining: false, rtt: self.rtt(region), region },
                planned: None,
            })
            .collect();
        order.sort_by_key(|candidate| (!allowed.contains(candidate.region), candidate.score));
        order
    }
}

proptest! {
    #[test]
    fn the_canonical_form_of_every_accepted_policy_is_accepted(one in any_text(), other in any_text()) {
        let read = |text: &str| text.parse::<ResidencyPolicy>().ok();
        for text in [&one, &other] {
            if let Some(policy) = read(text) {
                prop_assert_eq!(read(&policy.to_string()), Some(policy));
            }
        }
        if let (Some(one), Some(other)) = (read(&one), read(&other)) {
            match one.narrow_checked(&other) {
                Ok(both) => prop_assert_eq!(read(&both.to_string()), Some(both)),
                Err(_) => prop_assert!(one.narrow(&other).to_string().len() > MAX_POLICY_LEN),
            }
        }
    }

    #[test]
    fn narrowing_is_the_intersection(a in any_policy(), b in any_policy()) {
        let (of_a, of_b) = (a.permitted(&CATALOGUE), b.permitted(&CATALOGUE));
        let of_both = a.narrow(&b).permitted(&CATALOGUE);
        prop_assert_eq!(of_both, of_a.intersect(of_b));
        prop_assert!(of_both.is_subset(&of_a) && of_both.is_subset(&of_b));
        prop_assert_eq!(a.narrow(&b), b.narrow(&a));
    }

    #[test]
    fn a_policy_round_trips_through_its_text_form(policy in any_policy()) {
        prop_assert_eq!(policy.to_string().parse::<ResidencyPolicy>(), Ok(policy));
    }

    #[test]
    fn residency_a_forbidden_region_is_never_selected(
        fleet in any_fleet(),
        policy in any_policy(),
    ) {
        let allowed = policy.permitted(&CATALOGUE);
        let selection = fleet.select(allowed);
        prop_assert_eq!(check_residency(&allowed, &selection.order), Ok(()));
        for (region, _) in CATALOGUE.iter() {
            let forbidden = selection.refused.reason(region) == Some(Ineligible::ForbiddenByResidency);
            prop_assert_eq!(forbidden, !allowed.contains(region));
        }
    }

    #[test]
    fn each_region_has_a_position_or_a_reason_and_the_order_is_total(fleet in any_fleet(), allowed in any_set()) {
        let selection = fleet.select(allowed);
        let chosen: RegionSet = selection.order.iter().map(|candidate| candidate.region).collect();
        let refused: RegionSet = selection.refused.iter().map(|(region, _)| region).collect();
        prop_assert_eq!(chosen.len(), selection.order.len());
        prop_assert!(chosen.intersect(refused).is_empty());
        prop_assert_eq!(chosen.union(refused), CATALOGUE.all());
        prop_assert!(selection.order.is_sorted_by(|a, b| a.score < b.score));
    }

    #[test]
    fn a_shorter_distance_never_lowers_the_rank(
        fleet in any_fleet(),
        allowed in any_set(),
        region in 0..CATALOGUE.len(),
    ) {
        let position = |fleet: &Fleet| {
            fleet.select(allowed).order.iter().position(|candidate| candidate.region.as_usize() == region)
        };
        let mut nearer = fleet.clone();
        nearer.rtt_us[region] /= 2;
        prop_assert!(position(&nearer) <= position(&fleet));
    }
}

#[test]
fn residency_check_catches_a_selector_that_makes_residency_a_preference() {
    let index =
        |id: &str| CATALOGUE.index_of(&id.parse().expect("an id")).expect("a region of the catalogue");
    let (european, american) = (index("gcp/europe-west4"), index("aws/us-east-1"));
    let both = RegionSet::from_iter([european, american]);
    let policy: ResidencyPolicy = "eu".parse().expect("a policy");
    let allowed = policy.permitted(&CATALOGUE);
    let mut fleet = Fleet {
        routed: both,
        serving: both,
        health: vec![Health::Healthy; CATALOGUE.len()],
        rtt_us: vec![1000; CATALOGUE.len()],
    };
    assert_eq!(
        fleet.select_by_preference(allowed)[0].region,
        european,
        "the faulty selection is right while the region is up"
    );

    fleet.health[european.as_usize()] = Health::Down;
    assert_eq!(
        check_residency(&allowed, &fleet.select_by_preference(allowed)),
        Err(ResidencyViolation(american))
    );
    assert_eq!(fleet.select(allowed).order, [], "the correct selection rejects instead");
}
