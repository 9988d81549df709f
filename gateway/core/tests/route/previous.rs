//! The former routing decision, as it was spread over the gateway's shell: `home` ranked the regions to enter an
//! admission pool, `rank_regions` ranked them again to send, and four functions re-ordered the result.

use crate::situation::Situation;
use gateway_core::candidate::OrderPosition;
use gateway_core::route::Observations;
use gateway_core::spill::{SpillCandidate, SpillRank, SpillRequest, SpilloverDecision};
use gateway_core::weights::throw;
use regions::health::Health;
use regions::set::RegionIndex;
use regions::weights::draw;
use std::time::Duration;

/// Result of the former decision.
pub(crate) struct PreviousDecision {
    /// Region whose admission pool the request entered.
    pub(crate) entry_region: Option<RegionIndex>,
    pub(crate) origin: RegionIndex,
    pub(crate) drawn: Option<RegionIndex>,
    /// Region that it was sent to first, spillover aside.
    pub(crate) primary: Option<RegionIndex>,
    pub(crate) spillover: Option<SpilloverDecision>,
    pub(crate) spillover_if_shed: Option<SpilloverDecision>,
    /// Regions in the order of the attempts.
    pub(crate) order: Vec<RegionIndex>,
}

#[derive(Clone, Copy)]
struct Ranked {
    region: RegionIndex,
    health: Health,
    draining: bool,
    rtt: Duration,
}

impl PreviousDecision {
    pub(crate) fn decide(situation: &Situation) -> PreviousDecision {
        let is_unsplit = situation.assigned.is_none();
        let (entry_region, origin, drawn) = entry_region(situation);
        let drawn = drawn.filter(|_| is_unsplit);
        let order = rank_regions(situation, drawn);
        let departs = |entry_region, is_shed| {
            if situation.spills && is_unsplit {
                decide_spillover(situation, entry_region, is_shed)
            } else {
                None
            }
        };
        let spillover = entry_region.and_then(|entry_region| departs(entry_region, false));
        let spillover_if_shed = entry_region.and_then(|entry_region| departs(entry_region, true));
        let first = spillover.and_then(|spillover| spillover.to).or(situation.assigned);
        let primary = order.first().map(|ranked| ranked.region);
        let mut order: Vec<RegionIndex> = order.iter().map(|ranked| ranked.region).collect();
        if let Some(position) = order.iter().position(|region| Some(*region) == first) {
            order[..=position].rotate_right(1);
        }
        PreviousDecision { entry_region, origin, drawn, primary, spillover, spillover_if_shed, order }
    }
}

fn serving(situation: &Situation) -> impl Iterator<Item = RegionIndex> + use<> {
    situation.serving.intersect(situation.allowed).intersect(situation.routed).iter()
}

fn entry_region(situation: &Situation) -> (Option<RegionIndex>, RegionIndex, Option<RegionIndex>) {
    let (mut to, mut from) = (None, None);
    for region in serving(situation) {
        let health = situation.health(region);
        if health != Health::Down {
            let away = situation.rtt(region);
            let draining = situation.draining.contains(region);
            let key = (health, draining, away + situation.held_for(region).unwrap_or_default(), region);
            to = Some(to.map_or(key, |best| key.min(best)));
            from = Some(from.map_or((health, away, region), |best| (health, away, region).min(best)));
        }
    }
    let (Some((best, .., nearest)), Some((.., from))) = (to, from) else {
        return (None, situation.gateway, None);
    };
    let origin = if situation.is_client_located { from } else { situation.gateway };
    let shares = situation
        .plan
        .as_ref()
        .map_or(&[][..], |weights| weights.of(&situation.deployment, origin, &situation.allowed));
    let usable = |region: RegionIndex| {
        serving(situation).any(|other| other == region)
            && situation.health(region) == best
            && (region == nearest || situation.held_for(region).is_none())
    };
    let drawn = draw(shares, usable, throw(situation.priority, situation.interactive_share, situation.draw));
    (Some(drawn.unwrap_or(nearest)), origin, drawn)
}

fn decide_spillover(
    situation: &Situation,
    entry_region: RegionIndex,
    is_shed: bool,
) -> Option<SpilloverDecision> {
    let candidate =
        |region| SpillCandidate { region, rtt: situation.rtt(region), wait: situation.queue_wait(region) };
    let request = SpillRequest { is_shed, ..situation.spilling() };
    if request.is_calm_at(candidate(entry_region)) {
        return None;
    }
    let others = serving(situation)
        .filter(|region| *region != entry_region && !situation.draining.contains(*region))
        .filter(|region| situation.health(*region) == Health::Healthy);
    let mut others: Vec<_> = others.map(|region| (situation.rtt(region), region)).collect();
    others.sort_unstable();
    let (credits, wait) = (situation.credits(), |region| situation.queue_wait(region));
    let decide = |other: Option<(Duration, RegionIndex)>| {
        let order = OrderPosition::default();
        let other = other.into_iter().map(|(rtt, region)| SpillRank { order, rtt, region });
        credits.decide(&request, candidate(entry_region), other, wait, |_| true, situation.now)
    };
    let to = others.into_iter().find_map(|other| decide(Some(other))?.to);
    Some(SpilloverDecision { to, ..decide(None)? })
}

fn rank_regions(situation: &Situation, drawn: Option<RegionIndex>) -> Vec<Ranked> {
    let ranked = serving(situation).map(|region| Ranked {
        region,
        health: situation.health(region),
        draining: situation.draining.contains(region),
        rtt: situation.rtt(region),
    });
    let mut order: Vec<Ranked> = ranked.filter(|ranked| ranked.health != Health::Down).collect();
    order.sort_unstable_by_key(|ranked| (ranked.health, ranked.draining, ranked.rtt, ranked.region));
    // `put_drawn_first`
    let best = order.first().map(|ranked| ranked.health);
    let position =
        order.iter().position(|ranked| Some(ranked.region) == drawn && Some(ranked.health) == best);
    if let Some(position) = position {
        order[..=position].rotate_right(1);
    }
    // `preferred`
    if let [best, _, ..] = order[..] {
        let as_near = |ranked: &&Ranked| {
            ranked.health == best.health
                && ranked.draining == best.draining
                && ranked.rtt.abs_diff(best.rtt) <= Duration::from_millis(25)
        };
        let near = order.iter().filter(as_near).map(|ranked| ranked.region);
        let preferred = situation.fastest(near);
        let position = |first| order.iter().position(|ranked| ranked.region == first);
        if let Some(position) = preferred.and_then(position) {
            order[..=position].rotate_right(1);
        }
    }
    if situation.is_any_cold() {
        sort_by_response_time(situation, &mut order);
    }
    order
}

fn sort_by_response_time(situation: &Situation, order: &mut [Ranked]) {
    let mut placed: Vec<_> = order
        .iter()
        .map(|ranked| (*ranked, situation.response_estimate(ranked.region, ranked.rtt)))
        .collect();
    let in_all = |estimate: &gateway_core::cold::ResponseEstimate| {
        estimate.responds_in + estimate.held_for.unwrap_or_default()
    };
    let mut soonest = (None, Duration::MAX);
    for (ranked, estimate) in placed.iter_mut().rev().filter(|(_, estimate)| estimate.held_for.is_none()) {
        let health = Some(ranked.health);
        let time = in_all(estimate);
        soonest = if soonest.0 == health { (health, soonest.1.min(time)) } else { (health, time) };
        estimate.responds_in = soonest.1;
    }
    placed.sort_by_key(|(ranked, estimate)| (ranked.health, in_all(estimate), estimate.held_for.is_some()));
    for (candidate, (ranked, _)) in order.iter_mut().zip(placed) {
        *candidate = ranked;
    }
}
