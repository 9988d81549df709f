//! Sets of regions, as bits.
//!
//! Within one process a catalogue gives each region an ordinal, and a set of regions is one bit per ordinal. That makes
//! the residency policy cheap: what is permitted, deployed and alive are three sets, and what remains is three `and`s over eight
//! words. Ordinals never leave the process; between processes regions go by name.

/// How many regions a catalogue may hold. All public regions of all clouds that rent accelerators are some 250 today.
pub const MAX_REGIONS: usize = 512;

const WORD_BITS: usize = u64::BITS as usize;

/// The ordinal of a region in this process's catalogue. Ordinals are in order of [`crate::RegionId`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RegionIndex(u16);

impl RegionIndex {
    /// The region at this place of the catalogue; `None` past [`MAX_REGIONS`].
    pub fn new(ordinal: usize) -> Option<RegionIndex> {
        (ordinal < MAX_REGIONS).then_some(RegionIndex(ordinal as u16))
    }

    /// The place in the catalogue, for indexing.
    pub fn as_usize(self) -> usize {
        usize::from(self.0)
    }
}

/// A set of regions of one catalogue.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct RegionSet([u64; MAX_REGIONS / WORD_BITS]);

impl RegionSet {
    /// No region.
    pub const EMPTY: RegionSet = RegionSet([0; MAX_REGIONS / WORD_BITS]);

    /// No region.
    pub fn empty() -> RegionSet {
        RegionSet::EMPTY
    }

    /// The first `n` regions: every region of a catalogue of length `n`.
    pub fn all(n: usize) -> RegionSet {
        (0..n).filter_map(RegionIndex::new).collect()
    }

    /// Adds a region.
    pub fn insert(&mut self, region: RegionIndex) {
        self.0[region.as_usize() / WORD_BITS] |= 1 << (region.as_usize() % WORD_BITS);
    }

    /// Takes a region out.
    pub fn remove(&mut self, region: RegionIndex) {
        self.0[region.as_usize() / WORD_BITS] &= !(1 << (region.as_usize() % WORD_BITS));
    }

    /// Whether the region is in the set.
    pub fn contains(&self, region: RegionIndex) -> bool {
        self.0[region.as_usize() / WORD_BITS] & (1 << (region.as_usize() % WORD_BITS)) != 0
    }

    /// What is in both.
    #[must_use]
    pub fn intersect(self, other: RegionSet) -> RegionSet {
        self.zip(other, |a, b| a & b)
    }

    /// What is in either.
    #[must_use]
    pub fn union(self, other: RegionSet) -> RegionSet {
        self.zip(other, |a, b| a | b)
    }

    /// What is in this set and not in the other.
    #[must_use]
    pub fn minus(self, other: RegionSet) -> RegionSet {
        self.zip(other, |a, b| a & !b)
    }

    /// Whether every region of this set is in the other.
    pub fn is_subset(&self, other: &RegionSet) -> bool {
        self.minus(*other).is_empty()
    }

    /// Whether there is no region in the set.
    pub fn is_empty(&self) -> bool {
        self.0.iter().all(|word| *word == 0)
    }

    /// How many regions are in the set.
    pub fn len(&self) -> usize {
        self.0.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// The regions in ascending order.
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

/// The regions of a [`RegionSet`], ascending.
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
    fn the_last_ordinal_fits_and_the_one_past_it_is_none() {
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
