//! Room for others' overflow, rationed by the region that has it.
//!
//! A gateway whose nearest region is full would like to send what is too much to another. It knows how busy that one was a
//! moment ago, and so do all other gateways: each for itself would select_replica the same idle neighbour, and bury it. So it asks
//! first, with every question for a report: *so many tokens I would have liked to send elsewhere in the last period*. The
//! region answers with a **grant**: so many tokens you may send me until you ask again.
//!
//! ```text
//! spare = 0.9 · speed · period - what comes by itself in a period     a third of it while more than a period's work waits
//! grant = spare · (requested + floor) / Σ (requested + floor)               over all gateways, and no more than nobody else holds
//! ```
//!
//! The floor means that in calm everybody holds an equal share of what is spare, so the first moment of a surge finds
//! credits at hand and does not wait a round trip for them.
//!
//! What is given out never exceeds what is spare (invariant 7, *Rationed spill*): a grant is taken from what the others do
//! not hold, whatever its share would be. It ends with the next question of the same gateway, or after [`GRANT_TTL`] of
//! silence, so what a lost gateway held comes back by itself. Deployments on the same replicas share their spare room, and
//! are counted together.
//!
//! The obvious other way, gateways that spill to whoever reported the least, was simulated in all its variants: with
//! reports 200 ms old two thirds of a surge end up far from home, and the neighbours swing between idle and full.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::invariants;
use regions::DeploymentName;

/// How often a gateway asks; a grant is for so long.
pub const GRANT_PERIOD: Duration = Duration::from_millis(200);
/// After this a grant that was not renewed is over: three periods, so that a gateway on the other side of the world, whose
/// answers are under way for more than one, is never without.
pub const GRANT_TTL: Duration = Duration::from_millis(600);
/// What everybody counts as wanting beyond what it says, in tokens: a lookup or two.
const MIN_SHARE_TOKENS: u64 = 64;
/// Gateways that may hold grants at one region. One more is answered and granted nothing.
pub const GATEWAYS_MAX: usize = 1024;

/// A gateway, as a region tells it from others: its location, and the number that it drew when it started.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Gateway {
    /// Where it says that it is.
    pub location: String,
    /// Which of its starts; also tells two in one location apart.
    pub boot_id: u64,
}

/// Deployments that share replicas, and what they can take beyond what comes by itself.
#[derive(Debug)]
pub(super) struct SparePool<'a> {
    pub(super) deployments: Vec<&'a DeploymentName>,
    /// In tokens, for one period.
    pub(super) spare: u64,
}

/// Who holds what.
#[derive(Debug, Default)]
pub(super) struct Grants {
    gateways: BTreeMap<Gateway, GatewayGrants>,
    /// Over all gateways.
    sums: BTreeMap<DeploymentName, GrantTotals>,
}

/// What one gateway holds.
#[derive(Debug)]
struct GatewayGrants {
    asked_at: Instant,
    each: BTreeMap<DeploymentName, Grant>,
}

#[derive(Clone, Copy, Debug)]
struct Grant {
    requested: u64,
    granted: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct GrantTotals {
    gateways: u64,
    requested: u64,
    granted: u64,
}

impl Grants {
    /// Answers one gateway, which wants so much of each deployment in the pools; what it held before is over.
    pub(super) fn grant(
        &mut self,
        gateway: &Gateway,
        requested: &BTreeMap<DeploymentName, u64>,
        pools: &[SparePool<'_>],
        now: Instant,
    ) -> BTreeMap<DeploymentName, u64> {
        self.expire(now);
        if let Some(before) = self.gateways.remove(gateway) {
            self.return_grants(&before);
        }
        if self.gateways.len() >= GATEWAYS_MAX {
            return BTreeMap::new();
        }
        let mut held = GatewayGrants { asked_at: now, each: BTreeMap::new() };
        for pool in pools {
            self.share(pool, requested, &mut held);
        }
        let granted = held.each.iter().map(|(name, grant)| (name.clone(), grant.granted)).collect();
        for (name, grant) in &held.each {
            let sum = self.sums.entry(name.clone()).or_default();
            sum.gateways += 1;
            sum.requested = sum.requested.saturating_add(grant.requested);
            sum.granted = sum.granted.saturating_add(grant.granted);
        }
        self.gateways.insert(gateway.clone(), held);
        granted
    }

    /// Tokens that somebody may still send, over all gateways.
    pub(super) fn outstanding(&self, deployment: &DeploymentName) -> u64 {
        self.sums.get(deployment).map_or(0, |sum| sum.granted)
    }

    /// One pool's part of a gateway's answer.
    fn share(&self, pool: &SparePool<'_>, requested: &BTreeMap<DeploymentName, u64>, held: &mut GatewayGrants) {
        let of = |name: &DeploymentName| self.sums.get(name).copied().unwrap_or_default();
        let (mut others_weight, mut others_hold) = (0u128, 0u64);
        for name in &pool.deployments {
            let sum = of(name);
            others_weight += u128::from(sum.requested) + u128::from(sum.gateways) * u128::from(MIN_SHARE_TOKENS);
            others_hold = others_hold.saturating_add(sum.granted);
        }
        let want = |name: &DeploymentName| requested.get(name).copied().unwrap_or(0);
        let weight = |name: &DeploymentName| u128::from(want(name)) + u128::from(MIN_SHARE_TOKENS);
        let own_weight: u128 = pool.deployments.iter().map(|name| weight(name)).sum();
        let mut room = pool.spare.saturating_sub(others_hold);
        for &name in &pool.deployments {
            let share = u128::from(pool.spare) * weight(name) / (others_weight + own_weight);
            let granted = u64::try_from(share).expect("a part of what is spare").min(room);
            room -= granted;
            held.each.insert(name.clone(), Grant { requested: want(name), granted });
        }
        let given = pool.deployments.iter().filter_map(|name| held.each.get(*name));
        let given = given.map(|grant| grant.granted).sum();
        invariants::rationed(pool.spare, others_hold, given)
            .expect("a grant is taken from what nobody holds");
    }

    /// Whoever has not asked_at for too long holds nothing any longer.
    fn expire(&mut self, now: Instant) {
        let silent = |held: &GatewayGrants| now.saturating_duration_since(held.asked_at) > GRANT_TTL;
        let gone: Vec<_> = self.gateways.extract_if(.., |_, held| silent(held)).collect();
        for (_, held) in gone {
            self.return_grants(&held);
        }
    }

    fn return_grants(&mut self, held: &GatewayGrants) {
        for (name, grant) in &held.each {
            let sum = self.sums.get_mut(name).expect("what was granted was counted");
            sum.gateways -= 1;
            sum.requested = sum.requested.saturating_sub(grant.requested);
            sum.granted = sum.granted.saturating_sub(grant.granted);
            if sum.gateways == 0 {
                self.sums.remove(name);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::some_instant;
    use proptest::prelude::*;

    fn name(text: &str) -> DeploymentName {
        text.parse().unwrap()
    }

    fn gateway(number: u64) -> Gateway {
        Gateway { location: "50.1,8.7".to_owned(), boot_id: number }
    }

    fn wants(tokens: u64) -> BTreeMap<DeploymentName, u64> {
        [(name("d"), tokens)].into()
    }

    /// What gateway `number` gets of `spare` for what it wants.
    fn asks(grants: &mut Grants, number: u64, requested: u64, spare: u64, now: Instant) -> u64 {
        let d = name("d");
        grants.grant(&gateway(number), &wants(requested), &[SparePool { deployments: vec![&d], spare }], now)[&d]
    }

    #[test]
    fn in_calm_everybody_holds_the_same() {
        let (mut grants, now) = (Grants::default(), some_instant());
        for round in 0..3 {
            let got: Vec<_> = (0..4).map(|number| asks(&mut grants, number, 0, 1000, now)).collect();
            // Whoever asks first is alone, until the others have asked_at.
            assert!(round == 0 || got == [250, 250, 250, 250], "{got:?}");
        }
    }

    #[test]
    fn whoever_wants_more_gets_more_and_the_others_keep_a_little() {
        let (mut grants, now) = (Grants::default(), some_instant());
        let mut got = [0; 3];
        for _ in 0..4 {
            got =
                [(0, 3000), (1, 1000), (2, 0)].map(|(who, requested)| asks(&mut grants, who, requested, 1000, now));
        }
        assert_eq!(got, [730, 253, 15]);
    }

    #[test]
    fn nobody_is_given_what_another_holds() {
        let (mut grants, now) = (Grants::default(), some_instant());
        assert_eq!(asks(&mut grants, 0, 0, 1000, now), 1000, "the first has it all");
        assert_eq!(asks(&mut grants, 1, 1_000_000, 1000, now), 0, "until it asks again");
        assert_eq!(asks(&mut grants, 0, 0, 1000, now), 0);
        assert_eq!(asks(&mut grants, 1, 1_000_000, 1000, now), 999);
        assert_eq!(asks(&mut grants, 1, 1_000_000, 10, now), 9, "less is spare now");
    }

    #[test]
    fn what_a_silent_gateway_holds_comes_back() {
        let (mut grants, now) = (Grants::default(), some_instant());
        asks(&mut grants, 0, 0, 1000, now);
        assert_eq!(asks(&mut grants, 1, 0, 1000, now + GRANT_TTL), 0, "at the limit");
        let after = now + GRANT_TTL + Duration::from_millis(1);
        assert_eq!(asks(&mut grants, 1, 0, 1000, after), 1000);
        assert_eq!(grants.outstanding(&name("d")), 1000);
    }

    #[test]
    fn as_many_gateways_hold_grants_as_may_and_one_more_holds_nothing() {
        let (mut grants, now) = (Grants::default(), some_instant());
        for number in 0..GATEWAYS_MAX as u64 {
            asks(&mut grants, number, 0, 1000, now);
        }
        let d = name("d");
        let one_more = gateway(GATEWAYS_MAX as u64);
        let pool = [SparePool { deployments: vec![&d], spare: 1000 }];
        assert!(grants.grant(&one_more, &wants(1), &pool, now).is_empty());
        assert!(!grants.grant(&gateway(0), &wants(1), &pool, now).is_empty(), "one of them asks again");
    }

    proptest! {
        /// Invariant 7: whoever asks whenever, for whatever, of pools of whatever room: nobody is given what would
        /// bring what is held in a pool above what is spare in it.
        #[test]
        fn no_more_is_held_than_is_spare(
            questions in prop::collection::vec(
                (0u64..4, 0u64..100_000, 0u64..100_000, 0u64..50_000, 0u64..400), 1..80,
            ),
        ) {
            let (mut grants, mut now) = (Grants::default(), some_instant());
            let names = [name("a"), name("b")];
            for (who, first, second, spare, later) in questions {
                now += Duration::from_millis(later);
                let requested = [(names[0].clone(), first), (names[1].clone(), second)].into();
                let pool = SparePool { deployments: names.iter().collect(), spare };
                let granted = grants.grant(&gateway(who), &requested, &[pool], now);
                let held: u64 = names.iter().map(|name| grants.outstanding(name)).sum();
                let own: u64 = granted.values().sum();
                prop_assert!(invariants::rationed(spare, held - own, own).is_ok(), "{held} of {spare}");
                let counted: u64 = grants.gateways.values().flat_map(|held| held.each.values()).map(|grant| grant.granted).sum();
                prop_assert_eq!(counted, held);
            }
        }
    }
}
