//! Sorted set that also returns the rank of a key: the position of a job in its queue.

/// Number of keys at which a chunk is divided. A queue of 10⁶ jobs has some 3,000 chunks, and a rank is a sum over them.
const CHUNK_MAX: usize = 512;

/// Number of keys before a key, and the sum of their weights.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct RankSum {
    pub(crate) keys: u64,
    pub(crate) weight: u64,
}

/// Sorted set of weighted keys, in sorted chunks. An insertion or removal moves the keys of one chunk at most.
#[derive(Debug, Clone)]
pub(crate) struct RankedSet<K> {
    chunks: Vec<Chunk<K>>,
    total: RankSum,
}

#[derive(Debug, Clone)]
struct Chunk<K> {
    keys: Vec<(K, u64)>,
    weight: u64,
}

impl<K> Default for RankedSet<K> {
    fn default() -> RankedSet<K> {
        RankedSet { chunks: Vec::new(), total: RankSum::default() }
    }
}

impl<K: Ord + Copy> RankedSet<K> {
    /// Returns the number of keys and the sum of all weights.
    pub(crate) fn total(&self) -> RankSum {
        self.total
    }

    /// Returns the keys with their weights in order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (K, u64)> + '_ {
        self.chunks.iter().flat_map(|chunk| chunk.keys.iter().copied())
    }

    /// Adds a key that the set does not have.
    pub(crate) fn insert(&mut self, key: K, weight: u64) {
        let at = self.chunk_of(&key).min(self.chunks.len().saturating_sub(1));
        let Some(chunk) = self.chunks.get_mut(at) else {
            self.chunks.push(Chunk { keys: vec![(key, weight)], weight });
            self.total = RankSum { keys: 1, weight };
            return;
        };
        let Err(position) = chunk.keys.binary_search_by(|(other, _)| other.cmp(&key)) else { return };
        chunk.keys.insert(position, (key, weight));
        chunk.weight += weight;
        self.total = RankSum { keys: self.total.keys + 1, weight: self.total.weight + weight };
        if chunk.keys.len() > CHUNK_MAX {
            let keys = chunk.keys.split_off(CHUNK_MAX / 2);
            let weight = keys.iter().map(|(_, weight)| weight).sum();
            chunk.weight -= weight;
            self.chunks.insert(at + 1, Chunk { keys, weight });
        }
    }

    /// Removes a key; returns whether the set had it.
    pub(crate) fn remove(&mut self, key: &K) -> bool {
        let at = self.chunk_of(key);
        let Some(chunk) = self.chunks.get_mut(at) else { return false };
        let Ok(position) = chunk.keys.binary_search_by(|(other, _)| other.cmp(key)) else { return false };
        let (_, weight) = chunk.keys.remove(position);
        chunk.weight -= weight;
        self.total = RankSum { keys: self.total.keys - 1, weight: self.total.weight - weight };
        if chunk.keys.is_empty() {
            self.chunks.remove(at);
        }
        true
    }

    /// Returns what is before a key.
    pub(crate) fn rank(&self, key: &K) -> RankSum {
        let at = self.chunk_of(key);
        let mut rank = self.chunks[..at].iter().fold(RankSum::default(), |sum, chunk| RankSum {
            keys: sum.keys + chunk.keys.len() as u64,
            weight: sum.weight + chunk.weight,
        });
        let last = self.chunks.get(at).map_or(&[][..], |chunk| &chunk.keys[..]);
        for (_, weight) in last.iter().take_while(|(other, _)| other < key) {
            rank.keys += 1;
            rank.weight += weight;
        }
        rank
    }

    /// Returns the first chunk whose last key is greater than or equal to this one.
    fn chunk_of(&self, key: &K) -> usize {
        self.chunks.partition_point(|chunk| chunk.keys.last().is_some_and(|(last, _)| last < key))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn ranks_are_those_of_a_map(steps in prop::collection::vec((any::<bool>(), 0u16..3000, 0u64..9), 0..4000)) {
            let (mut set, mut map) = (RankedSet::default(), BTreeMap::new());
            for (adds, key, weight) in steps {
                if adds {
                    map.entry(key).or_insert(weight);
                    set.insert(key, weight);
                } else {
                    prop_assert_eq!(set.remove(&key), map.remove(&key).is_some());
                }
            }
            prop_assert!(set.iter().eq(map.iter().map(|(key, weight)| (*key, *weight))));
            prop_assert_eq!(set.total(), RankSum { keys: map.len() as u64, weight: map.values().sum() });
            for key in (0..3000).step_by(97) {
                let before = map.range(..key);
                let expected = before.fold(RankSum::default(), |sum, (_, weight)| RankSum {
                    keys: sum.keys + 1,
                    weight: sum.weight + weight,
                });
                prop_assert_eq!(set.rank(&key), expected);
            }
            prop_assert!(set.chunks.iter().all(|chunk| (1..=CHUNK_MAX).contains(&chunk.keys.len())));
        }
    }
}
