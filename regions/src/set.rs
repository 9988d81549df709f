//! Sets of regions, as bit sets.
//!
//! Within one process a catalogue gives each region an ordinal, and a set of regions is one bit per ordinal. That makes
//! the residency filter cheap: the allowed, deployed and healthy regions are three sets, and the eligible regions are
//! three `and`s over eight words. Ordinals never leave the process; between processes regions are identified by name.

/// Maximum number of regions in a catalogue. All public regions of all clouds that rent accelerators are some 250 today.
pub const MAX_REGIONS: usize = 512;

const WORD_BITS: usize = u64::BITS as usize;

/// Ordinal of a region in this process's catalogue. Ordinals are in order of [`crate::RegionId`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RegionIndex(u16);

impl RegionIndex {
    /// Returns the index of the region with this ordinal; `None` from [`MAX_REGIONS`] on.
    pub fn new(ordinal: usize) -> Option<RegionIndex> {
        (ordinal < MAX_REGIONS).then_some(RegionIndex(ordinal as u16))
    }

    /// Returns the ordinal, for indexing.
    pub fn as_usize(self) -> usize {
        usize::from(self.0)
    }
}

/// Set of regions of one catalogue.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct RegionSet([u64; MAX_REGIONS / WORD_BITS]);

impl RegionSet {
    /// The empty set.
    pub const EMPTY: RegionSet = RegionSet([0; MAX_REGIONS / WORD_BITS]);

    /// Returns the empty set.
    pub fn empty() -> RegionSet {
        RegionSet::EMPTY
    }

    /// Returns the first `n` regions: every region of a catalogue of length `n`.
    pub fn all(n: usize) -> RegionSet {
        (0..n).filter_map(RegionIndex::new).collect()
    }

    /// Adds a region.
    pub fn insert(&mut self, region: RegionIndex) {
        self.0[region.as_usize() / WORD_BITS] |= 1 << (region.as_usize() % WORD_BITS);
    }

    /// Removes a region.
    pub fn remove(&mut self, region: RegionIndex) {
        self.0[region.as_usize() / WORD_BITS] &= !(1 << (region.as_usize() % WORD_BITS));
    }

    /// Returns whether the region is in the set.
    pub fn contains(&self, region: RegionIndex) -> bool {
        self.0[region.as_usize() / WORD_BITS] & (1 << (region.as_usize() % WORD_BITS)) != 0
    }

    /// Returns the regions that are in both sets.
    #[must_use]
    pub fn intersect(self, other: RegionSet) -> RegionSet {
        self.zip(other, |a, b| a & b)
    }

    /// Returns the regions that are in either set.
    #[must_use]
    pub fn union(self, other: RegionSet) -> RegionSet {
        self.zip(other, |a, b| a | b)
    }

    /// Returns the regions that are in this set and not in the other.
    #[must_use]
    pub fn minus(self, other: RegionSet) -> RegionSet {
        self.zip(other, |a, b| a & !b)
    }

    /// Returns whether every region of this set is in the other.
    pub fn is_subset(&self, other: &RegionSet) -> bool {
        self.minus(*other).is_empty()
    }

    /// Returns whether the set is empty.
    pub fn is_empty(&self) -> bool {
        self.0.iter().all(|word| *word == 0)
    }

    /// Returns the number of regions in the set.
    pub fn len(&self) -> usize {
        self.0.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// Returns an iterator over the regions in ascending order.
    pub fn iter(&self) -> Iter {
        Iter { rest: *self, word: 0 }
    }

    fn zip(self, other: RegionSet, of: impl Fn(u64, u64) -> u64) -> RegionSet {
        let mut words = self.0;
        for (word, theirs) in words.iter_mut().zip(other.0) {
            *word = of(*word, theirs);
        }
        RegionSet(words)
    }
}

/// Iterator over the regions of a [`RegionSet`], ascending.
#[derive(Clone, Debug)]
pub struct Iter {
    rest: RegionSet,
    word: usize,
}

impl Iterator for Iter {
    type Item = RegionIndex;

    fn next(&mut self) -> Option<RegionIndex> {
        while let Some(word) = self.rest.0.get_mut(self.word) {
            if *word != 0 {
                let bit = word.trailing_zeros() as usize;
                *word &= *word - 1;
                return RegionIndex::new(self.word * WORD_BITS + bit);
            }
            self.word += 1;
        }
        None
    }
}

impl IntoIterator for RegionSet {
    type Item = RegionIndex;
    type IntoIter = Iter;

    fn into_iter(self) -> Iter {
        self.iter()
    }
}

impl FromIterator<RegionIndex> for RegionSet {
    fn from_iter<I: IntoIterator<Item = RegionIndex>>(regions: I) -> RegionSet {
        let mut set = RegionSet::EMPTY;
        for region in regions {
            set.insert(region);
        }
        set
    }
}

impl std::fmt::Debug for RegionSet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_set().entries(self.iter().map(RegionIndex::as_usize)).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn set(ordinals: &BTreeSet<usize>) -> RegionSet {
        ordinals.iter().filter_map(|ordinal| RegionIndex::new(*ordinal)).collect()
    }

    fn ordinals(set: RegionSet) -> BTreeSet<usize> {
        set.iter().map(RegionIndex::as_usize).collect()
    }

    fn any_ordinals() -> impl Strategy<Value = BTreeSet<usize>> {
        prop::collection::btree_set(0..MAX_REGIONS, 0..40)
    }

    proptest! {
        #[test]
        fn a_set_of_bits_behaves_as_a_set_of_ordinals(a in any_ordinals(), b in any_ordinals()) {
            prop_assert_eq!(ordinals(set(&a)), a.clone());
            prop_assert_eq!(set(&a).len(), a.len());
            prop_assert_eq!(set(&a).is_empty(), a.is_empty());
            prop_assert_eq!(set(&a).is_subset(&set(&b)), a.is_subset(&b));
            prop_assert_eq!(ordinals(set(&a).intersect(set(&b))), &a & &b);
            prop_assert_eq!(ordinals(set(&a).union(set(&b))), &a | &b);
            prop_assert_eq!(ordinals(set(&a).minus(set(&b))), &a - &b);
        }
    }

    #[test]
    fn the_last_ordinal_is_valid_and_the_next_one_is_not() {
        let last = RegionIndex::new(MAX_REGIONS - 1).unwrap();
        let mut set = RegionSet::empty();
        set.insert(last);
        assert!(set.contains(last));
        assert_eq!(set.iter().collect::<Vec<_>>(), [last]);
        set.remove(last);
        assert!(set.is_empty());
        assert_eq!(RegionIndex::new(MAX_REGIONS), None);
        assert_eq!(RegionSet::all(MAX_REGIONS).len(), MAX_REGIONS);
        assert_eq!(RegionSet::all(0), RegionSet::EMPTY);
    }
}
