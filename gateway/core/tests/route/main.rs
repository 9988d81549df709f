//! Properties of the routing decision, over random situations, and its comparison with the decision that it replaced.
//!
//! In reading order: `situation` — random situations; `previous` — the former decision; then the properties.

#![expect(clippy::disallowed_methods, reason = "a test has a clock")]
#![expect(clippy::unwrap_used, reason = "a situation that cannot be made fails the test")]

mod previous;
mod situation;

use gateway_core::candidate::{Candidate, Score};
use gateway_core::route::{RejectReason, RouteDecision};
use previous::PreviousDecision;
use regions::health::Health;
use regions::invariants::{ResidencyViolation, check_residency};
use regions::set::RegionSet;
use situation::Situation;
use std::cmp::Reverse;

/// Situations of each property.
const SITUATIONS: u64 = 20_000;
/// Situations in the comparison with the former decision, unless `MERIDIAN_SITUATIONS` is set. A million take half a
/// minute in the release profile.
const COMPARED: u64 = 100_000;

fn for_each_situation(count: u64, mut check: impl FnMut(&Situation, u64)) {
    for seed in 0..count {
        check(&Situation::random(seed), seed);
    }
}

#[test]
fn no_health_distance_plan_or_credit_brings_a_forbidden_region_into_a_decision() {
    for_each_situation(SITUATIONS, |situation, seed| {
        let decision = situation.route();
        let targets: Vec<_> = decision.targets().map(|candidate| candidate.region).collect();
        let assigned = decision.admission_pool();
        assert_eq!(check_residency(&situation.allowed, targets), Ok(()), "seed {seed}");
        assert_eq!(check_residency(&situation.allowed, assigned), Ok(()), "seed {seed}");
        let shed = situation.rejected_by(decision.primary()).route().spillover_target();
        assert_eq!(check_residency(&situation.allowed, shed), Ok(()), "seed {seed}");
        for region in situation.routed.iter() {
            let forbidden = decision.rejected.reason(region) == Some(RejectReason::ForbiddenByResidency);
            assert_eq!(forbidden, !situation.allowed.contains(region), "seed {seed}");
        }
    });
}

#[test]
fn each_region_of_the_route_table_is_a_candidate_or_has_a_reason() {
    for_each_situation(SITUATIONS, |situation, seed| {
        let decision = situation.route();
        let candidates: RegionSet = decision.candidates.iter().map(|candidate| candidate.region).collect();
        let rejected: RegionSet = decision.rejected.iter().map(|(region, _)| region).collect();
        assert_eq!(candidates.len(), decision.candidates.len(), "seed {seed}");
        assert!(candidates.intersect(rejected).is_empty(), "seed {seed}");
        assert_eq!(candidates.union(rejected), situation.routed, "seed {seed}");
    });
}

#[test]
fn a_region_that_stops_is_a_candidate_only_if_no_other_one_is() {
    let mut last = 0;
    for_each_situation(SITUATIONS, |situation, seed| {
        let stopping: RegionSet =
            situation.routed.iter().filter(|at| (seed >> at.as_usize()) & 1 == 1).collect();
        let decision = Situation { stopping, ..situation.clone() }.route();
        let without = Situation { serving: situation.serving.minus(stopping), ..situation.clone() }.route();
        if !without.candidates.is_empty() {
            assert_eq!(decision.candidates, without.candidates, "seed {seed}");
            return;
        }
        assert_eq!(decision.candidates, situation.route().candidates, "seed {seed}");
        last += u32::from(!decision.candidates.is_empty());
    });
    assert!(last > 100, "{last} situations in which only stopping regions are left");
}

#[test]
fn the_order_of_the_scores_is_final() {
    for_each_situation(SITUATIONS, |situation, seed| {
        let decision = situation.route();
        assert!(decision.candidates.is_sorted_by(|a, b| a.score < b.score), "seed {seed}: {decision:?}");
        let targets: Vec<_> = decision.targets().map(|candidate| candidate.region).collect();
        let rest = targets.iter().copied().filter(|region| Some(*region) != decision.spillover_target());
        let candidates = decision.candidates.iter().map(|candidate| candidate.region);
        let candidates = candidates.filter(|region| Some(*region) != decision.spillover_target());
        assert!(rest.eq(candidates), "seed {seed}: only the spillover target precedes the candidates");
        assert_eq!(targets.len(), decision.candidates.len(), "seed {seed}");
    });
}

#[test]
fn a_request_enters_the_pool_of_the_region_that_it_is_sent_to_first() {
    for_each_situation(SITUATIONS, |situation, seed| {
        let decision = situation.route();
        let first = decision.targets().next().map(|candidate| candidate.region);
        assert_eq!(decision.admission_pool(), first, "seed {seed}");
    });
}

#[test]
fn a_request_spills_over_only_to_a_healthy_region_with_enough_credit() {
    for_each_situation(SITUATIONS, |situation, seed| {
        let decision = situation.route();
        let shed = situation.rejected_by(decision.primary()).route().spillover_target();
        for region in decision.spillover_target().into_iter().chain(shed) {
            let credit = situation.credits().credit(region, &situation.deployment, situation.now);
            assert!(credit >= situation.tokens, "seed {seed}: {credit}");
            assert_ne!(Some(region), decision.primary(), "seed {seed}");
            let candidate = decision.candidates.iter().find(|candidate| candidate.region == region).unwrap();
            assert_eq!(candidate.score.health, Health::Healthy, "seed {seed}");
            assert!(!candidate.score.draining, "seed {seed}");
        }
    });
}

#[test]
fn a_request_that_the_pool_of_its_primary_rejects_goes_to_a_region_that_admits_it_or_is_shed() {
    let (mut taken, mut shed) = (0, 0);
    for_each_situation(SITUATIONS, |situation, seed| {
        // Every second region rejects it, and the primary always.
        let primary = situation.route().primary();
        let others =
            situation.routed.iter().filter(|region| (region.as_usize() as u64 + seed).is_multiple_of(2));
        let situation = situation.rejected_by(others.chain(primary));
        let decision = situation.route();
        assert_eq!(
            decision.primary(),
            primary,
            "seed {seed}: a rejection is no reason to rank a region lower"
        );
        assert_eq!(decision.rejection.is_some(), primary.is_some(), "seed {seed}");
        match decision.spillover_target() {
            Some(target) => {
                taken += 1;
                assert!(!situation.rejecting.contains(target), "seed {seed}");
                assert_eq!(decision.admission_pool(), Some(target), "seed {seed}");
            }
            None => {
                shed += u32::from(primary.is_some());
                assert_eq!(decision.admission_pool(), primary, "seed {seed}");
            }
        }
    });
    assert!(taken > 100 && shed > 100, "{taken} {shed}");
}

#[test]
fn the_region_that_a_part_is_assigned_to_comes_first_and_nothing_else_changes() {
    for_each_situation(SITUATIONS, |situation, seed| {
        // A part is not drawn and does not spill over.
        let situation = Situation { plan: None, spills: false, ..situation.clone() };
        let whole = Situation { assigned: None, ..situation.clone() }.route();
        for candidate in &whole.candidates {
            let part = Situation { assigned: Some(candidate.region), ..situation.clone() }.route();
            let expected = std::iter::once(candidate.region).chain(
                whole.candidates.iter().map(|other| other.region).filter(|other| *other != candidate.region),
            );
            assert!(part.candidates.iter().map(|other| other.region).eq(expected), "seed {seed}");
        }
    });
}

#[test]
fn a_region_with_a_lower_round_trip_time_never_loses_its_rank() {
    for_each_situation(SITUATIONS, |situation, seed| {
        // Measured response times, the plan and cold starts are other criteria.
        let mut plain = Situation { plan: None, ..situation.clone() };
        for region in &mut plain.regions {
            (region.measured, region.held_for) = (None, None);
        }
        let rank = |situation: &Situation, region: usize| {
            situation.route().candidates.iter().position(|candidate| candidate.region.as_usize() == region)
        };
        for region in 0..plain.regions.len() {
            let mut nearer = plain.clone();
            nearer.regions[region].rtt /= 2;
            assert!(rank(&nearer, region) <= rank(&plain, region), "seed {seed}");
        }
    });
}

#[test]
fn the_buffer_of_an_earlier_decision_leaves_no_trace_and_is_used_again() {
    let (mut one, other) = (Situation::random(1), Situation::random(2));
    for region in &mut one.regions {
        region.health = Health::Healthy;
    }
    one.allowed = one.routed;
    one.serving = one.routed;
    let before = one.route().candidates;
    let (capacity, address) = (before.capacity(), before.as_ptr());
    let after = other.route_in(before);
    assert_eq!(after, other.route());
    assert_eq!((after.candidates.capacity(), after.candidates.as_ptr()), (capacity, address));
}

/// Invariant 1 (Residency), violated on purpose: residency as the first of the preferences instead of a filter. It looks right
/// as long as an allowed region is up.
#[test]
fn the_check_of_residency_finds_a_decision_that_makes_it_a_preference() {
    let mut found = 0;
    for_each_situation(SITUATIONS, |situation, _| {
        let Situation { allowed, routed, serving, .. } = situation;
        let up = routed.intersect(*serving);
        let up = up.iter().filter(|region| situation.regions[region.as_usize()].health != Health::Down);
        let mut candidates: Vec<Candidate> = up
            .map(|region| {
                let state = &situation.regions[region.as_usize()];
                let score = Score::new(region, state.health, false, state.rtt);
                Candidate { region, score, planned: None }
            })
            .collect();
        candidates.sort_by_key(|candidate| (!allowed.contains(candidate.region), candidate.score));
        let first = candidates.first().map(|candidate| candidate.region);
        found += u32::from(matches!(check_residency(allowed, first), Err(ResidencyViolation(_))));
        let RouteDecision { candidates, .. } = situation.route();
        assert!(candidates.iter().all(|candidate| allowed.contains(candidate.region)));
    });
    assert!(found > 1000, "{found}");
}

/// The former decision ranked the regions twice by different code: once to enter an admission pool, once to send. Where both
/// selected the same region, the new decision is the same in every respect. The others are counted.
#[test]
fn the_decision_is_the_former_one_where_that_entered_the_pool_of_the_region_it_was_sent_to() {
    let (mut same, mut other_pool, mut spilled, mut none) = (0u64, 0u64, 0u64, 0u64);
    let compared = std::env::var("MERIDIAN_SITUATIONS").map_or(COMPARED, |count| count.parse().unwrap());
    for_each_situation(compared, |situation, seed| {
        let decision = situation.route();
        let previous = PreviousDecision::decide(situation);
        let targets: Vec<_> = decision.targets().map(|candidate| candidate.region).collect();
        if situation.assigned.is_some() {
            // A part of a split request: only its order was decided.
            assert_eq!(targets, previous.order, "seed {seed}: {situation:?}");
            same += 1;
            return;
        }
        let Some(entry_region) = previous.entry_region else {
            assert_eq!(targets, [], "seed {seed}");
            none += 1;
            return;
        };
        assert_eq!(decision.origin, previous.origin, "seed {seed}");
        if previous.primary != Some(entry_region) {
            other_pool += 1;
            assert_eq!(decision.primary(), previous.primary, "seed {seed}: {situation:?}");
            return;
        }
        same += 1;
        spilled += u64::from(previous.spillover.is_some_and(|spillover| spillover.to.is_some()));
        assert_eq!(targets, previous.order, "seed {seed}: {situation:?}");
        assert_eq!(decision.spillover, previous.spillover, "seed {seed}: {situation:?}");
        let shed = situation.rejected_by(decision.primary()).route();
        assert_eq!(shed.spillover, previous.spillover_if_shed, "seed {seed}: {situation:?}");
        assert_eq!(
            decision.admission_pool(),
            decision.spillover_target().or(Some(entry_region)),
            "seed {seed}"
        );
        let drawn = decision.candidates.iter().find(|candidate| candidate.score.drawn == Reverse(true));
        assert_eq!(drawn.map(|candidate| candidate.region), previous.drawn, "seed {seed}: {situation:?}");
    });
    println!(
        "{compared} situations: {same} equal ({spilled} of them with spillover), {none} without a candidate, \
         {other_pool} in which the former decision entered the pool of another region than the one it was sent to"
    );
    assert!(same > compared / 2 && other_pool > 0 && spilled > compared / 1000);
}
