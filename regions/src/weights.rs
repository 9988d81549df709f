//! Traffic weights: the hub plans them, and a gateway draws a region by them.
//!
//! Weights divide traffic among the eligible regions. They apply after the residency policy and after health, and cannot
//! add a region: the caller passes the eligible ones, and any other region is never drawn, whatever its weight. If no
//! eligible region has a weight, none is drawn and the nearest is used.
//!
//! The random number is an argument and every share is an integer in permille, so that the same number draws the same
//! region everywhere.

use crate::set::RegionIndex;

/// Sum of all shares of a plan.
pub const WHOLE_PERMILLE: u16 = 1000;

/// Reason for a region's share. A closed list, shown to operators and used as a metric label.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ShareReason {
    /// It is the nearest serving region, or the first one of the deployment's order, and has capacity.
    Nearest,
    /// Nearer regions have no capacity left.
    NearerFull,
    /// All serving regions are full, and each takes a part of the excess; or the first one of the deployment's order is full, and
    /// takes all.
    AllFull,
    /// It is being drained, and no other region may serve the requests.
    OnlyHere,
    /// It had this share before, and the gain of a change is below the hysteresis threshold.
    Kept,
    /// It had a larger share before, which is reduced in steps.
    Leaving,
}

impl ShareReason {
    /// All reasons.
    pub const ALL: [ShareReason; 6] = [
        ShareReason::Nearest,
        ShareReason::NearerFull,
        ShareReason::AllFull,
        ShareReason::OnlyHere,
        ShareReason::Kept,
        ShareReason::Leaving,
    ];

    /// Returns the reason as on the wire and in explanations.
    pub fn as_str(self) -> &'static str {
        match self {
            ShareReason::Nearest => "nearest",
            ShareReason::NearerFull => "nearer_full",
            ShareReason::AllFull => "all_full",
            ShareReason::OnlyHere => "only_here",
            ShareReason::Kept => "kept",
            ShareReason::Leaving => "leaving",
        }
    }

    /// Returns the reason with this name.
    pub fn parse(text: &str) -> Option<ShareReason> {
        ShareReason::ALL.into_iter().find(|reason| reason.as_str() == text)
    }
}

/// Share of one region in the traffic that is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// Region.
    pub region: RegionIndex,
    /// Share in thousandths.
    pub permille: u16,
    /// Reason for the share.
    pub reason: ShareReason,
}

/// Draws one of the usable regions with a probability proportional to its share; `None` if no usable region has a share.
/// `chance` is a uniform random number from 0 to 999.
pub fn draw(shares: &[Share], usable: impl Fn(RegionIndex) -> bool, chance: u16) -> Option<RegionIndex> {
    let candidates = || shares.iter().filter(|share| usable(share.region));
    let total: u32 = candidates().map(|share| u32::from(share.permille)).sum();
    let mut rest = u32::from(chance.min(WHOLE_PERMILLE - 1)) * total / u32::from(WHOLE_PERMILLE);
    for share in candidates() {
        match rest.checked_sub(u32::from(share.permille)) {
            Some(less) => rest = less,
            None => return Some(share.region),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn share(region: usize, permille: u16) -> Share {
        Share { region: RegionIndex::new(region).unwrap(), permille, reason: ShareReason::Nearest }
    }

    /// Returns the number of draws of each region over all random numbers.
    fn drawn(shares: &[Share], usable: impl Fn(usize) -> bool) -> Vec<(usize, u32)> {
        let mut counts = std::collections::BTreeMap::new();
        for chance in 0..WHOLE_PERMILLE {
            if let Some(region) = draw(shares, |region| usable(region.as_usize()), chance) {
                *counts.entry(region.as_usize()).or_default() += 1;
            }
        }
        counts.into_iter().collect()
    }

    #[test]
    fn each_region_is_drawn_in_proportion_to_its_share() {
        let shares = [share(3, 700), share(5, 299), share(9, 1)];
        assert_eq!(drawn(&shares, |_| true), [(3, 700), (5, 299), (9, 1)]);
    }

    #[test]
    fn the_share_of_an_unusable_region_is_divided_among_the_others() {
        let shares = [share(3, 500), share(5, 300), share(9, 200)];
        assert_eq!(drawn(&shares, |region| region != 3), [(5, 600), (9, 400)]);
        assert_eq!(drawn(&shares, |region| region == 9), [(9, 1000)]);
        assert_eq!(drawn(&shares, |_| false), []);
        assert_eq!(drawn(&[share(3, 0)], |_| true), [], "a region without a weight is not drawn");
        assert_eq!(drawn(&[], |_| true), []);
    }

    #[test]
    fn a_reason_round_trips_through_its_text_form() {
        for reason in ShareReason::ALL {
            assert_eq!(ShareReason::parse(reason.as_str()), Some(reason));
        }
        assert_eq!(ShareReason::parse("because"), None);
    }

    proptest! {
        /// A weight adds no region: only usable regions are drawn, whatever the shares.
        #[test]
        fn only_usable_regions_are_drawn(
            shares in prop::collection::vec((0..64usize, 0..=1000u16), 0..8),
            usable in any::<u64>(),
            chance in 0..2000u16,
        ) {
            let shares: Vec<Share> = shares.into_iter().map(|(region, permille)| share(region, permille)).collect();
            let may = |region: RegionIndex| usable >> region.as_usize() & 1 == 1;
            let found = draw(&shares, may, chance);
            let any = shares.iter().any(|share| share.permille > 0 && may(share.region));
            prop_assert_eq!(found.is_some(), any);
            prop_assert!(found.is_none_or(may));
        }
    }
}
