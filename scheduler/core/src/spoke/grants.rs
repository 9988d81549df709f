//! Credits for spillover, granted by the region that has spare capacity.
//!
//! A gateway whose nearest region is full needs another region for its overflow. It knows how busy that region was a
//! moment ago, and so do all other gateways: left alone, they would all select the same idle region and overload it. A
//! gateway therefore asks first: each request for a report contains its overflow of the last period, in tokens. The
//! region responds with a **grant**: the number of tokens that the gateway may send until its next request.
//!
//! ```text
//! spare = 0.9 · speed · period - local arrivals per period       30 % of it while the backlog exceeds one period
//! grant = spare · (requested + floor) / Σ (requested + floor)    over all gateways, limited to the ungranted tokens
//! ```
//!
//! Because of the floor, all gateways hold equal shares of the spare capacity under low load, so the first moment of a
//! surge finds credits available and does not wait for a round trip. The floors of all gateways together are at most a quarter of
//! the spare tokens: otherwise the gateways without overflow would hold most of the tokens of a small region during a surge.
//!
//! The sum of the grants never exceeds the spare capacity (invariant 7, *Rationed spillover*): a grant is limited to what
//! is not granted to others, whatever its share would be. It ends with the next request of the same gateway or after
//! [`GRANT_TTL`], so the grants of a lost gateway expire. Deployments on the same replicas share their spare capacity
//! and are counted together.
//!
//! The obvious alternative, gateways that spill over to the region with the lowest reported load, was simulated in all
//! variants: with reports 200 ms old, two thirds of a surge end up in distant regions, and the neighbours oscillate
//! between idle and full.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::invariants;
use regions::DeploymentName;
use scheduler_api::report::{GATEWAYS_MAX, Gateway};

/// Time after which a grant that was not renewed expires: three periods, so that a gateway with a round-trip time of
/// more than one period always has a grant.
pub const GRANT_TTL: Duration = Duration::from_millis(600);
/// Maximum floor, which is added to every gateway's requested tokens: an interactive request or two.
const FLOOR_TOKENS_MAX: u64 = 64;
/// The floors of all gateways together are at most the spare tokens divided by this.
const FLOORS_DIVISOR: u64 = 4;

/// Deployments that share replicas, and their spare capacity.
#[derive(Debug)]
pub(super) struct SparePool<'a> {
    pub(super) deployments: Vec<&'a DeploymentName>,
    /// Spare tokens of one period.
    pub(super) spare: u64,
}

/// Outstanding grants.
#[derive(Debug, Default)]
pub(super) struct Grants {
    gateways: BTreeMap<Gateway, GatewayGrants>,
    /// Totals over all gateways.
    sums: BTreeMap<DeploymentName, GrantTotals>,
}

/// Grants of one gateway.
#[derive(Debug)]
struct GatewayGrants {
    requested_at: Instant,
    each: BTreeMap<DeploymentName, Grant>,
}

/// Requested and granted tokens of one deployment.
#[derive(Clone, Copy, Debug)]
struct Grant {
    requested: u64,
    granted: u64,
}

/// Totals of one deployment.
#[derive(Clone, Copy, Debug, Default)]
struct GrantTotals {
    gateways: u64,
    requested: u64,
    granted: u64,
}

impl Grants {
    /// Grants tokens to one gateway by its requested tokens per deployment; its previous grants end.
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
        let mut held = GatewayGrants { requested_at: now, each: BTreeMap::new() };
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

    /// Returns the granted tokens of a deployment, over all gateways.
    pub(super) fn outstanding(&self, deployment: &DeploymentName) -> u64 {
        self.sums.get(deployment).map_or(0, |sum| sum.granted)
    }

    /// Adds a gateway's grants in one pool.
    fn share(
        &self,
        pool: &SparePool<'_>,
        requested: &BTreeMap<DeploymentName, u64>,
        held: &mut GatewayGrants,
    ) {
        let of = |name: &DeploymentName| self.sums.get(name).copied().unwrap_or_default();
        let sharers: u64 = pool.deployments.iter().map(|name| of(name).gateways + 1).sum();
        let floor = (pool.spare / FLOORS_DIVISOR / sharers.max(1)).clamp(1, FLOOR_TOKENS_MAX);
        let (mut others_weight, mut others_hold) = (0u128, 0u64);
        for name in &pool.deployments {
            let sum = of(name);
            others_weight += u128::from(sum.requested) + u128::from(sum.gateways) * u128::from(floor);
            others_hold = others_hold.saturating_add(sum.granted);
        }
        let want = |name: &DeploymentName| requested.get(name).copied().unwrap_or(0);
        let weight = |name: &DeploymentName| u128::from(want(name)) + u128::from(floor);
        let own_weight: u128 = pool.deployments.iter().map(|name| weight(name)).sum();
        let mut available = pool.spare.saturating_sub(others_hold);
        for &name in &pool.deployments {
            let share = u128::from(pool.spare) * weight(name) / (others_weight + own_weight);
            let granted = u64::try_from(share).expect("a part of the spare tokens").min(available);
            available -= granted;
            held.each.insert(name.clone(), Grant { requested: want(name), granted });
        }
        let given = pool.deployments.iter().filter_map(|name| held.each.get(*name));
        let given = given.map(|grant| grant.granted).sum();
        invariants::rationed(pool.spare, others_hold, given)
            .expect("a grant is limited to what is not granted yet");
    }

    /// Removes the grants of gateways that have not renewed them.
    fn expire(&mut self, now: Instant) {
        let expired = |held: &GatewayGrants| now.saturating_duration_since(held.requested_at) > GRANT_TTL;
        let removed: Vec<_> = self.gateways.extract_if(.., |_, held| expired(held)).collect();
        for (_, held) in removed {
            self.return_grants(&held);
        }
    }

    fn return_grants(&mut self, held: &GatewayGrants) {
        for (name, grant) in &held.each {
            let sum = self.sums.get_mut(name).expect("every grant is counted");
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

    fn demand(tokens: u64) -> BTreeMap<DeploymentName, u64> {
        [(name("d"), tokens)].into()
    }

    /// Returns the tokens granted to gateway `number` for `requested` tokens of `spare`.
    fn request(grants: &mut Grants, number: u64, requested: u64, spare: u64, now: Instant) -> u64 {
        let d = name("d");
        grants.grant(&gateway(number), &demand(requested), &[SparePool { deployments: vec![&d], spare }], now)
            [&d]
    }

    #[test]
    fn under_low_load_all_gateways_hold_equal_grants() {
        let (mut grants, now) = (Grants::default(), some_instant());
        for round in 0..3 {
            let got: Vec<_> = (0..4).map(|number| request(&mut grants, number, 0, 1000, now)).collect();
            // The first gateway gets everything until the others have made a request.
            assert!(round == 0 || got == [250, 250, 250, 250], "{got:?}");
        }
    }

    #[test]
    fn a_larger_request_gets_more_and_the_others_keep_a_little() {
        let (mut grants, now) = (Grants::default(), some_instant());
        let mut got = [0; 3];
        for _ in 0..4 {
            got = [(0, 3000), (1, 1000), (2, 0)]
                .map(|(number, requested)| request(&mut grants, number, requested, 1000, now));
        }
        assert_eq!(got, [730, 253, 15]);
    }

    #[test]
    fn gateways_without_overflow_do_not_hold_most_of_a_small_region() {
        let (mut grants, now) = (Grants::default(), some_instant());
        let mut got = [0; 4];
        for _ in 0..4 {
            got = [(0, 320), (1, 0), (2, 0), (3, 0)]
                .map(|(number, requested)| request(&mut grants, number, requested, 160, now));
        }
        assert_eq!(got, [146, 4, 4, 4]);
    }

    #[test]
    fn tokens_granted_to_one_gateway_are_not_granted_to_another() {
        let (mut grants, now) = (Grants::default(), some_instant());
        assert_eq!(request(&mut grants, 0, 0, 1000, now), 1000, "the first gets everything");
        assert_eq!(request(&mut grants, 1, 1_000_000, 1000, now), 0, "until its next request");
        assert_eq!(request(&mut grants, 0, 0, 1000, now), 0);
        assert_eq!(request(&mut grants, 1, 1_000_000, 1000, now), 999);
        assert_eq!(request(&mut grants, 1, 1_000_000, 10, now), 9, "less is spare now");
    }

    #[test]
    fn the_grants_of_a_silent_gateway_expire() {
        let (mut grants, now) = (Grants::default(), some_instant());
        request(&mut grants, 0, 0, 1000, now);
        assert_eq!(request(&mut grants, 1, 0, 1000, now + GRANT_TTL), 0, "at the limit");
        let after = now + GRANT_TTL + Duration::from_millis(1);
        assert_eq!(request(&mut grants, 1, 0, 1000, after), 1000);
        assert_eq!(grants.outstanding(&name("d")), 1000);
    }

    #[test]
    fn the_maximum_number_of_gateways_hold_grants_and_one_more_gets_none() {
        let (mut grants, now) = (Grants::default(), some_instant());
        for number in 0..GATEWAYS_MAX as u64 {
            request(&mut grants, number, 0, 1000, now);
        }
        let d = name("d");
        let one_more = gateway(GATEWAYS_MAX as u64);
        let pool = [SparePool { deployments: vec![&d], spare: 1000 }];
        assert!(grants.grant(&one_more, &demand(1), &pool, now).is_empty());
        assert!(!grants.grant(&gateway(0), &demand(1), &pool, now).is_empty(), "a known gateway");
    }

    proptest! {
        /// Invariant 7: for any sequence of requests, times and pools, no grant raises the granted tokens of a pool
        /// above its spare tokens.
        #[test]
        fn no_more_is_granted_than_is_spare(
            requests in prop::collection::vec(
                (0u64..4, 0u64..100_000, 0u64..100_000, 0u64..50_000, 0u64..400), 1..80,
            ),
        ) {
            let (mut grants, mut now) = (Grants::default(), some_instant());
            let names = [name("a"), name("b")];
            for (number, first, second, spare, later) in requests {
                now += Duration::from_millis(later);
                let requested = [(names[0].clone(), first), (names[1].clone(), second)].into();
                let pool = SparePool { deployments: names.iter().collect(), spare };
                let granted = grants.grant(&gateway(number), &requested, &[pool], now);
                let held: u64 = names.iter().map(|name| grants.outstanding(name)).sum();
                let own: u64 = granted.values().sum();
                prop_assert!(invariants::rationed(spare, held - own, own).is_ok(), "{held} of {spare}");
                let counted: u64 = grants.gateways.values().flat_map(|held| held.each.values()).map(|grant| grant.granted).sum();
                prop_assert_eq!(counted, held);
            }
        }
    }
}
