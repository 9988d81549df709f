//! Properties of the routing decision, over random situations, and its comparison with the decision that it replaced.
//!
//! In reading order: `situation` — random situations; `previous` — the former decision; then the properties.

#![expect(clippy::disallowed_methods, reason = "a test has a clock")]
#![expect(clippy::unwrap_used, reason = "a situation that cannot be made fails the test")]

mod previous;
mod situation;

use gateway_core::candidate::{Candidate, OrderPosition, Score};
use gateway_core::route::{PassedOver, RejectReason, RouteDecision};
use previous::PreviousDecision;
use regions::health::Health;
use regions::invariants::{ResidencyViolation, check_residency};
use regions::set::{RegionIndex, RegionSet};
use situation::{Situation, at};
use std::cmp::Reverse;
use std::time::Duration;

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

/// The situation with an order of some of its regions, rotated by the seed.
fn ordered(situation: &Situation, seed: u64) -> (Vec<RegionIndex>, Situation) {
    let count = situation.regions.len();
    let rotated = (0..count).map(|place| at((place * 5 + seed as usize) % count));
    let mut order: Vec<RegionIndex> = Vec::new();
    for region in rotated.take(1 + seed as usize % count) {
        if !order.contains(&region) {
            order.push(region);
        }
    }
    let with_order = Situation { order: Some(order.clone().into()), assigned: None, ..situation.clone() };
    (order, with_order)
}

#[test]
fn the_first_healthy_region_of_the_order_takes_the_request_whatever_the_distance_or_the_plan() {
    let (mut first, mut later, mut outside) = (0, 0, 0);
    for_each_situation(SITUATIONS, |situation, seed| {
        let (order, situation) = ordered(situation, seed);
        let decision = situation.route();
        let is_cold = situation.regions.iter().any(|state| state.held_for.is_some());
        let eligible = situation.routed.intersect(situation.allowed).intersect(situation.serving);
        let rank = |region: RegionIndex| {
            let state = situation.state(region);
            let index = order.iter().position(|ordered| *ordered == region).unwrap_or(order.len());
            let holds = is_cold && state.held_for.is_some();
            (state.health, situation.draining.contains(region), holds, index)
        };
        let up = eligible.iter().filter(|region| situation.state(*region).health != Health::Down);
        let mut expected: Vec<_> = up.map(rank).collect();
        expected.sort();
        let ranks: Vec<_> = decision.candidates.iter().map(|candidate| rank(candidate.region)).collect();
        assert_eq!(ranks, expected, "seed {seed}: {situation:?}");
        match decision.order_index() {
            Some(0) => first += 1,
            Some(_) => later += 1,
            None => outside += u32::from(!decision.candidates.is_empty()),
        }
        // Every region before the primary has a reason, and the reasons are those of the situation.
        let passed_over: Vec<_> = decision.passed_over().collect();
        let before = decision.order_index().unwrap_or(order.len());
        assert!(
            passed_over.iter().map(|(region, _)| *region).eq(order[..before].iter().copied()),
            "seed {seed}"
        );
        for (region, reason) in passed_over {
            let health = situation.state(region).health;
            match reason {
                PassedOver::NotRouted => assert!(!situation.routed.contains(region), "seed {seed}"),
                PassedOver::Rejected(RejectReason::ForbiddenByResidency) => {
                    assert!(!situation.allowed.contains(region), "seed {seed}");
                }
                PassedOver::Rejected(RejectReason::NotServing) => {
                    assert!(!situation.serving.contains(region), "seed {seed}");
                }
                PassedOver::Rejected(RejectReason::Down) => assert_eq!(health, Health::Down, "seed {seed}"),
                PassedOver::Unhealthy(reported) => assert_eq!(reported, health, "seed {seed}"),
                PassedOver::Draining => assert!(situation.draining.contains(region), "seed {seed}"),
                PassedOver::ColdStart => assert!(situation.state(region).held_for.is_some(), "seed {seed}"),
            }
        }
    });
    assert!(first > 1000 && later > 1000 && outside > 100, "{first} {later} {outside}");
}

/// Invariant 1 (Residency): an order names regions, and permits none.
#[test]
fn an_order_brings_no_forbidden_region_into_a_decision_and_changes_none_of_the_candidates() {
    for_each_situation(SITUATIONS, |situation, seed| {
        let (_, with_order) = ordered(situation, seed);
        let without = Situation { order: None, ..with_order.clone() }.route();
        let decision = with_order.route();
        let set = |decision: &RouteDecision| -> RegionSet {
            decision.candidates.iter().map(|candidate| candidate.region).collect()
        };
        assert_eq!(set(&decision), set(&without), "seed {seed}");
        assert_eq!((decision.rejected, decision.origin), (without.rejected, without.origin), "seed {seed}");
        let targets = decision.targets().map(|candidate| candidate.region);
        assert_eq!(check_residency(&situation.allowed, targets), Ok(()), "seed {seed}");
        assert_eq!(without.passed_over().count(), 0, "seed {seed}");
    });
}

/// Three healthy regions, of which the farthest is the first of the order, and the nearest is outside it.
fn active_passive() -> Situation {
    let seed = (0..).find(|seed| Situation::random(*seed).regions.len() == 3).unwrap();
    let mut situation = Situation::random(seed);
    let all: RegionSet = (0..3).map(at).collect();
    for (state, rtt) in situation.regions.iter_mut().zip([10, 90, 200]) {
        state.health = Health::Healthy;
        state.rtt = Duration::from_millis(rtt);
        (state.held_for, state.measured, state.queue, state.credit) = (None, None, None, Some(1_000_000));
    }
    (situation.allowed, situation.routed, situation.serving) = (all, all, all);
    (situation.draining, situation.stopping) = (RegionSet::EMPTY, RegionSet::EMPTY);
    situation.leave_draw = gateway_core::circuit::Permille::new(0);
    let (assigned, spills, left) = (None, true, Duration::from_secs(30));
    let order = Some([at(2), at(1)].into());
    Situation { assigned, spills, left, order, tokens: 10, ..situation }
}

#[test]
fn the_next_region_takes_over_while_the_first_is_unhealthy_and_hands_back_when_it_has_recovered() {
    let mut situation = active_passive();
    let order_of = |situation: &Situation| -> Vec<usize> {
        situation.route().candidates.iter().map(|candidate| candidate.region.as_usize()).collect()
    };
    let reasons = |situation: &Situation| -> Vec<PassedOver> {
        situation.route().passed_over().map(|(_, reason)| reason).collect()
    };
    assert_eq!(order_of(&situation), [2, 1, 0], "the order comes before distance, also for retries");
    assert_eq!(reasons(&situation), []);
    for (health, expected, reason) in [
        (Health::Suspect, vec![1, 0, 2], PassedOver::Unhealthy(Health::Suspect)),
        (Health::Down, vec![1, 0], PassedOver::Rejected(RejectReason::Down)),
        (Health::Suspect, vec![1, 0, 2], PassedOver::Unhealthy(Health::Suspect)),
    ] {
        situation.regions[2].health = health;
        assert_eq!(order_of(&situation), expected);
        assert_eq!(reasons(&situation), [reason]);
        assert_eq!(situation.route().order_index(), Some(1), "the second of the order");
    }
    situation.regions[2].health = Health::Healthy;
    assert_eq!(order_of(&situation), [2, 1, 0], "it has recovered");
    let draining = Situation { draining: [at(2)].into_iter().collect(), ..situation.clone() };
    assert_eq!((order_of(&draining), reasons(&draining)), (vec![1, 0, 2], vec![PassedOver::Draining]));
    situation.regions[2].held_for = Some(Duration::from_millis(1));
    assert_eq!((order_of(&situation), reasons(&situation)), (vec![1, 0, 2], vec![PassedOver::ColdStart]));
    situation.regions[1].held_for = Some(Duration::from_millis(1));
    situation.regions[0].held_for = Some(Duration::from_millis(1));
    assert_eq!(order_of(&situation), [2, 1, 0], "all would hold it");
    situation.regions.iter_mut().for_each(|state| state.health = Health::Down);
    let reasons = reasons(&situation);
    assert_eq!(reasons, [PassedOver::Rejected(RejectReason::Down); 2], "nothing takes it");
}

#[test]
fn an_overloaded_first_region_spills_over_to_the_next_of_the_order_only_with_spillover_enabled() {
    let mut situation = active_passive();
    situation.regions[2].queue = Some(Duration::from_secs(20));
    assert_eq!(situation.route().spillover_target(), Some(at(1)), "not to the nearest");
    assert_eq!(situation.route().primary(), Some(at(2)));
    situation.regions[1].credit = None;
    assert_eq!(situation.route().spillover_target(), Some(at(0)), "outside the order, if that has no credit");
    let without = Situation { spills: false, ..situation };
    assert_eq!(without.route().admission_pool(), Some(at(2)), "it waits in the queue, or is shed");
}

#[test]
fn a_part_leaves_the_region_that_it_was_assigned_to_when_another_one_of_the_order_is_healthier() {
    let mut situation = Situation { assigned: Some(at(2)), ..active_passive() };
    assert_eq!(situation.route().primary(), Some(at(2)));
    situation.regions[2].health = Health::Suspect;
    assert_eq!(situation.route().primary(), Some(at(1)));
    let unordered = Situation { order: None, ..situation };
    assert_eq!(
        unordered.route().primary(),
        Some(at(2)),
        "without an order, its region was selected for its capacity"
    );
    let score = unordered.route().candidates[0].score;
    assert_eq!(score.order, OrderPosition::default());
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
