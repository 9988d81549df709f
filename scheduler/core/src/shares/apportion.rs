//! Division of one rate limit among gateways by their demand.
//!
//! Water-filling: a gateway gets its demand and a tenth more, up to a common level at which the limit is used up; what
//! is not demanded is divided equally, so that every gateway can serve a burst. So the demand that one gateway claims,
//! however large, takes nothing from gateways below the level.

use super::{FLOOR, FLOORS_MAX};
use regions::tenant::LimitShare;

/// Whole limit in millionths.
const WHOLE: u64 = LimitShare::WHOLE.millionths() as u64;
/// Part of a gateway's demand that it gets in addition, for noise.
const HEADROOM_PART: u64 = 10;
/// Deviation from the target, summed over all gateways, below which shares stay: a tenth of the limit.
const HYSTERESIS: u64 = WHOLE / 10;
/// Undistributed part of the limit above which shares do not stay.
const UNUSED_MAX: u64 = WHOLE / 100;

/// One gateway in the division of one limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Claim {
    /// Demand in units per minute.
    pub(super) demand: u64,
    /// Share that was issued last, in millionths; 0 before the first.
    pub(super) issued: u32,
    /// Largest share that the gateway may be applying.
    pub(super) usable: u32,
}

/// Returns the smallest share of each of `gateways`.
pub(super) fn floor(gateways: usize) -> u64 {
    FLOOR.min(FLOORS_MAX / gateways.max(1) as u64).max(1)
}

/// Returns the share of each gateway in millionths. `reserved` is the sum of the shares that silent gateways may still be
/// applying.
///
/// A share grows only by what no other gateway may be applying: those that shrink have to acknowledge that first.
pub(super) fn apportion(limit_per_minute: u64, reserved: u64, claims: &[Claim]) -> Vec<u32> {
    let budget = WHOLE.saturating_sub(reserved);
    let floor = floor(claims.len());
    let wants: Vec<u64> =
        claims.iter().map(|claim| wanted(claim.demand, limit_per_minute).max(floor)).collect();
    let targets = targets(budget, &wants);
    let targets = if stays(budget, claims, &wants, &targets) {
        claims.iter().map(|claim| u64::from(claim.issued)).collect()
    } else {
        targets
    };
    let used: u64 = claims.iter().map(|claim| u64::from(claim.usable)).sum();
    let free = budget.saturating_sub(used);
    let growth = |claim: &Claim, target: u64| target.saturating_sub(claim.usable.into());
    let needed: u64 = claims.iter().zip(&targets).map(|(claim, target)| growth(claim, *target)).sum();
    let share = |(claim, target): (&Claim, &u64)| {
        let grown = growth(claim, *target);
        let granted = if needed <= free { grown } else { grown * free / needed };
        let share = if grown == 0 { *target } else { u64::from(claim.usable) + granted };
        u32::try_from(share.clamp(floor, WHOLE)).expect("at most the whole")
    };
    claims.iter().zip(&targets).map(share).collect()
}

/// Returns the share that serves a demand.
fn wanted(demand: u64, limit_per_minute: u64) -> u64 {
    let demand = u128::from(demand) + u128::from(demand / HEADROOM_PART);
    let share = demand * u128::from(WHOLE) / u128::from(limit_per_minute.max(1));
    u64::try_from(share).unwrap_or(WHOLE).min(WHOLE)
}

/// Divides the budget without regard to the issued shares.
fn targets(budget: u64, wants: &[u64]) -> Vec<u64> {
    let sum: u64 = wants.iter().sum();
    if sum <= budget {
        let extra = (budget - sum) / wants.len().max(1) as u64;
        return wants.iter().map(|want| want + extra).collect();
    }
    let mut order: Vec<usize> = (0..wants.len()).collect();
    order.sort_by_key(|at| wants[*at]);
    let (mut targets, mut rest) = (vec![0; wants.len()], budget);
    for (position, at) in order.into_iter().enumerate() {
        let level = rest / (wants.len() - position) as u64;
        targets[at] = wants[at].min(level);
        rest -= targets[at];
    }
    targets
}

/// Returns whether the issued shares are so near to the targets that they stay. Shares of a tenant without demand do not,
/// so that they become equal and need not be listed.
fn stays(budget: u64, claims: &[Claim], wants: &[u64], targets: &[u64]) -> bool {
    let issued: u64 = claims.iter().map(|claim| u64::from(claim.issued)).sum();
    let is_complete = claims.iter().all(|claim| claim.issued > 0) && issued <= budget;
    if !is_complete || budget - issued > UNUSED_MAX || claims.iter().all(|claim| claim.demand == 0) {
        return false;
    }
    let is_served = claims.iter().zip(wants).all(|(claim, want)| *want <= claim.issued.into());
    let band = if is_served { HYSTERESIS } else { HYSTERESIS / claims.len().max(1) as u64 };
    claims.iter().zip(targets).all(|(claim, target)| target.abs_diff(claim.issued.into()) <= band)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn claim(demand: u64, share: u32) -> Claim {
        Claim { demand, issued: share, usable: share }
    }

    #[test]
    fn demand_below_the_level_is_served_and_the_rest_shares_what_is_left() {
        let claims = [900, 50, 30, 20].map(|demand| claim(demand * 60, 250_000));
        let shrunk = apportion(500 * 60, 0, &claims);
        assert_eq!(shrunk, [250_000, 110_000, 66_000, 44_000], "nothing grows before others have shrunk");
        let acknowledged: Vec<_> =
            claims.iter().zip(&shrunk).map(|(before, share)| claim(before.demand, *share)).collect();
        assert_eq!(apportion(500 * 60, 0, &acknowledged), [780_000, 110_000, 66_000, 44_000]);
    }

    #[test]
    fn an_unused_limit_is_divided_equally() {
        assert_eq!(apportion(6000, 0, &[claim(0, 900_000), claim(0, 100_000)]), [500_000, 100_000]);
        assert_eq!(apportion(6000, 0, &[claim(0, 500_000), claim(0, 100_000)]), [500_000, 500_000]);
    }

    #[test]
    fn absurd_demand_takes_nothing_from_gateways_below_the_level() {
        let claims = [claim(u64::MAX, 500_000), claim(1000, 500_000)];
        assert_eq!(apportion(6000, 0, &claims), [500_000, 183_333]);
        let claims = [claim(u64::MAX, 500_000), claim(u64::MAX, 500_000)];
        assert_eq!(apportion(1, 0, &claims), [500_000, 500_000]);
        assert_eq!(apportion(u64::MAX, 0, &claims), [500_000, 500_000]);
    }

    #[test]
    fn small_changes_of_demand_do_not_move_shares() {
        let steady = [claim(6000, 490_000), claim(6100, 510_000)];
        assert_eq!(apportion(6000, 0, &steady), [490_000, 510_000], "both exceed their shares");
        let served = [claim(600, 560_000), claim(700, 440_000)];
        assert_eq!(apportion(6000, 0, &served), [560_000, 440_000], "both are served");
        let moved = [claim(600, 800_000), claim(700, 200_000)];
        assert_eq!(apportion(6000, 0, &moved), [490_833, 200_000]);
    }

    proptest! {
        /// The shares that gateways may be applying never exceed the limit by more than the floors.
        #[test]
        fn usable_shares_never_exceed_the_limit(
            limit in 1u64..1_000_000,
            reserved in 0u64..200_000,
            demands in prop::collection::vec((any::<u64>(), 0u32..1000, any::<bool>()), 1..40),
        ) {
            let budget = WHOLE - reserved;
            let weights: u64 = demands.iter().map(|(_, weight, _)| u64::from(*weight)).sum::<u64>().max(1);
            let claims: Vec<_> = demands.iter().map(|(demand, weight, is_smaller)| {
                let usable = (budget * u64::from(*weight) / weights) as u32;
                Claim { demand: *demand, issued: if *is_smaller { usable / 2 } else { usable }, usable }
            }).collect();
            let shares = apportion(limit, reserved, &claims);
            let usable: u64 = claims.iter().zip(&shares).map(|(claim, share)| u64::from(claim.usable.max(*share))).sum();
            prop_assert!(usable <= budget + FLOORS_MAX.max(claims.len() as u64), "{usable} of {budget}");
            prop_assert!(shares.iter().all(|share| u64::from(*share) >= floor(claims.len())));
        }
    }
}
