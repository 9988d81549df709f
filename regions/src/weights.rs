//! By how much each region is asked: what a hub plans, and a gateway draws by.
//!
//! A weight divides what *may* go to several regions among them. It is looked at after the residency policy and after health, and can
//! add nobody to those who are left: whoever draws says who that is, and a region of whatever weight that is not among
//! them is not drawn. Where none of those who are left has a weight nothing is drawn, and the nearest is asked.
//!
//! Chance is an argument, and every share is a whole number of thousandths, so that the same throw gives the same region
//! everywhere.

use crate::set::RegionIndex;

/// The whole that is divided.
pub const WHOLE_PERMILLE: u16 = 1000;

/// Why a region has a share. Closed: what is told to operators, and a label of metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Why {
    /// It is the nearest that serves it, and has room.
    Nearest,
    /// Nearer ones have no room left.
    NearerFull,
    /// All that may serve it are full, and each has its part of what is too much.
    AllFull,
    /// It is being drained, and nobody else may serve it.
    OnlyHere,
    /// It had this share before, and what would be gained by a change is not worth one.
    Kept,
    /// It had more before, and gives it up in steps.
    Leaving,
}

impl Why {
    /// Every reason there is.
    pub const ALL: [Why; 6] =
        [Why::Nearest, Why::NearerFull, Why::AllFull, Why::OnlyHere, Why::Kept, Why::Leaving];

    /// The reason on the wire and in explanations.
    pub fn as_str(self) -> &'static str {
        match self {
            Why::Nearest => "nearest",
            Why::NearerFull => "nearer_full",
            Why::AllFull => "all_full",
            Why::OnlyHere => "only_here",
            Why::Kept => "kept",
            Why::Leaving => "leaving",
        }
    }

    /// The reason of this name.
    pub fn parse(text: &str) -> Option<Why> {
        Why::ALL.into_iter().find(|why| why.as_str() == text)
    }
}

/// One region's part of what is to be divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// Which region.
    pub region: RegionIndex,
    /// So many thousandths.
    pub permille: u16,
    /// For this reason.
    pub why: Why,
}

/// One of these regions, each as likely as its share is of all that may be used; none, where none of them may.
/// `chance` is a number from 0 to 999, each equally likely.
pub fn draw(shares: &[Share], usable: impl Fn(RegionIndex) -> bool, chance: u16) -> Option<RegionIndex> {
    let open = || shares.iter().filter(|share| usable(share.region));
    let whole: u32 = open().map(|share| u32::from(share.permille)).sum();
    let mut left = u32::from(chance.min(WHOLE_PERMILLE - 1)) * whole / u32::from(WHOLE_PERMILLE);
    for share in open() {
        match left.checked_sub(u32::from(share.permille)) {
            Some(less) => left = less,
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
        Share { region: RegionIndex::new(region).unwrap(), permille, why: Why::Nearest }
    }

    /// How often each region is drawn, over all chances.
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
    fn each_region_is_drawn_as_often_as_its_share_says() {
        let shares = [share(3, 700), share(5, 299), share(9, 1)];
        assert_eq!(drawn(&shares, |_| true), [(3, 700), (5, 299), (9, 1)]);
    }

    #[test]
    fn the_share_of_whoever_cannot_be_used_is_divided_among_the_others() {
        let shares = [share(3, 500), share(5, 300), share(9, 200)];
        assert_eq!(drawn(&shares, |region| region != 3), [(5, 600), (9, 400)]);
        assert_eq!(drawn(&shares, |region| region == 9), [(9, 1000)]);
        assert_eq!(drawn(&shares, |_| false), []);
        assert_eq!(drawn(&[share(3, 0)], |_| true), [], "who has no weight is not drawn");
        assert_eq!(drawn(&[], |_| true), []);
    }

    #[test]
    fn a_reason_is_read_back_as_it_was_written() {
        for why in Why::ALL {
            assert_eq!(Why::parse(why.as_str()), Some(why));
        }
        assert_eq!(Why::parse("because"), None);
    }

    proptest! {
        /// A weight adds nobody: whatever the shares, only who may be used is drawn.
        #[test]
        fn only_who_may_be_used_is_drawn(
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
