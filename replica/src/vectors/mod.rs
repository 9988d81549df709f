//! Cache of computed rows.
//!
//! The cache is disabled unless memory is configured for it. Inputs that repeat are queries; inputs that occur once are
//! passages of a bulk indexing job, a million of them in a row. So the eviction policy must be scan-resistant, and a
//! plain LRU is not: an indexing job flushes it. `quick_cache` evicts by S3-FIFO (Yang et al., SOSP 2023): new entries
//! pass through a small probationary queue, and only those that are requested again while they are in it, or soon
//! enough afterwards that their ghost entry still exists, move to the main queue. It is bounded by weight and adds no
//! dependency that was not in the lock file already.
//!
//! The key is the key of the input (tenant, output, token ids, types; `batcher::sequence`) hashed together with the
//! model and its precision. So rows are never shared between tenants: not because they are secret (every owner of the
//! text can compute them), but because an immediate response would reveal that the text was requested before.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use quick_cache::sync::Cache;
use quick_cache::{DefaultHashBuilder, Lifecycle, OptionsBuilder, Weighter};
use sha2::{Digest, Sha256};

use crate::batcher::sequence::SequenceKey;
use crate::metrics::Metrics;

/// Bytes of an entry besides its numbers: key, pointers, and its slots in the map and the queue.
const OVERHEAD_BYTES: u64 = 128;
/// Estimated bytes of an entry for the initial size of the map: 384 numbers.
const ESTIMATED_ENTRY_BYTES: u64 = 384 * 4 + OVERHEAD_BYTES;

/// Number of shards, each with its own lock and an equal part of the bytes.
const SHARDS: usize = 8;

/// Number of ghost entries (keys of evicted rows) relative to the number of entries. A key costs some bytes and a row
/// thousands; with as many ghosts as entries, inputs that repeat within twice the size of the cache are kept.
const GHOST_RATIO: f64 = 1.0;

/// Cache of the rows of inputs.
#[derive(Debug)]
pub struct RowCache {
    model: [u8; 32],
    rows: Cache<[u8; 32], Arc<[f32]>, RowWeighter, DefaultHashBuilder, EvictionCounter>,
    evicted: Arc<AtomicU64>,
}

impl RowCache {
    /// Creates a cache of at most `bytes` for one model in one precision; `None` for 0 bytes.
    pub fn new(bytes: u64, model_digest: &str, precision: &str) -> Option<RowCache> {
        if bytes == 0 {
            return None;
        }
        let evicted = Arc::new(AtomicU64::new(0));
        let options = OptionsBuilder::new()
            .weight_capacity(bytes)
            .estimated_items_capacity(
                usize::try_from(bytes / ESTIMATED_ENTRY_BYTES).unwrap_or(usize::MAX).max(1),
            )
            .shards(SHARDS)
            .ghost_allocation(GHOST_RATIO)
            .build()
            .expect("both capacities are given");
        let evictions = EvictionCounter(Arc::clone(&evicted));
        let rows = Cache::with_options(options, RowWeighter, DefaultHashBuilder::default(), evictions);
        let model = Sha256::new().chain_update(model_digest).chain_update([0]).chain_update(precision);
        Some(RowCache { model: model.finalize().into(), rows, evicted })
    }

    /// Returns the rows of this input, if cached.
    pub(crate) fn get(&self, key: SequenceKey) -> Option<Arc<[f32]>> {
        self.rows.get(&self.key(key))
    }

    /// Inserts the rows of this input.
    pub(crate) fn insert(&self, key: SequenceKey, rows: &[f32]) {
        self.rows.insert(self.key(key), rows.into());
    }

    /// Copies the size of the cache to the metrics.
    pub(crate) fn publish(&self, metrics: &Metrics) {
        let cached = (self.rows.weight(), self.rows.len() as u64);
        metrics.update_gauges(|gauges| gauges.cached = cached);
        metrics.counts.cache_evictions.set(self.evicted.load(Ordering::Relaxed));
    }

    fn key(&self, SequenceKey(input): SequenceKey) -> [u8; 32] {
        Sha256::new().chain_update(self.model).chain_update(input).finalize().into()
    }
}

/// Weight of an entry in bytes.
#[derive(Clone, Copy, Debug)]
struct RowWeighter;

impl Weighter<[u8; 32], Arc<[f32]>> for RowWeighter {
    fn weight(&self, _: &[u8; 32], rows: &Arc<[f32]>) -> u64 {
        size_of_val::<[f32]>(rows) as u64 + OVERHEAD_BYTES
    }
}

/// Counter of evictions.
#[derive(Clone, Debug)]
struct EvictionCounter(Arc<AtomicU64>);

impl Lifecycle<[u8; 32], Arc<[f32]>> for EvictionCounter {
    type RequestState = ();

    fn on_evict(&self, (): &mut (), _: [u8; 32], _: Arc<[f32]>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WIDTH: usize = 384;
    const ENTRY: u64 = (WIDTH * 4) as u64 + OVERHEAD_BYTES;

    fn key(n: u64) -> SequenceKey {
        SequenceKey(Sha256::digest(n.to_le_bytes()).into())
    }

    /// Returns a cache with capacity for this many rows.
    fn cache(rows: u64) -> RowCache {
        RowCache::new(rows * ENTRY, "digest", "f32").expect("bytes")
    }

    #[test]
    fn zero_bytes_disable_the_cache() {
        assert!(RowCache::new(0, "digest", "f32").is_none());
    }

    #[test]
    fn cached_rows_are_returned_and_others_are_not() {
        let cache = cache(1000);
        (0..100).for_each(|n| cache.insert(key(n), &[n as f32; WIDTH]));
        for n in 0..100 {
            assert_eq!(cache.get(key(n)).as_deref(), Some(&[n as f32; WIDTH][..]));
        }
        assert_eq!(cache.get(key(100)), None);
    }

    #[test]
    fn the_cache_never_exceeds_its_bytes() {
        let cache = cache(1000);
        for n in 0..10_000 {
            cache.insert(key(n), &[0.0; WIDTH]);
            assert!(cache.rows.weight() <= 1000 * ENTRY, "{} after {n}", cache.rows.weight());
        }
        assert!(cache.rows.weight() >= 900 * ENTRY, "capacity is unused: {}", cache.rows.weight());
        let metrics = Metrics::default();
        cache.publish(&metrics);
        assert_eq!(metrics.counts.cache_evictions.get() + cache.rows.len() as u64, 10_000);
    }

    #[test]
    fn a_bulk_job_does_not_flush_repeated_queries() {
        let cache = cache(1000);
        let (mut hits, mut requested) = (0, 0);
        let mut once = 1_000_000;
        for round in 0..200 {
            // Two hundred repeated queries, with six distinct passages after each of them.
            for query in 0..200 {
                let key = key(query);
                if cache.get(key).is_none() {
                    cache.insert(key, &[0.0; WIDTH]);
                } else if round >= 100 {
                    hits += 1;
                }
                requested += u64::from(round >= 100);
                for _ in 0..6 {
                    once += 1;
                    cache.insert(self::key(once), &[0.0; WIDTH]);
                }
            }
        }
        // An LRU has no hits: 1 400 inputs lie between two requests of a query, and the capacity is 1 000. This cache
        // finds about four fifths, depending on the seed of its hashes.
        assert!(hits * 10 >= requested * 6, "{hits} of {requested}");
    }

    #[test]
    fn keys_differ_by_model_and_precision() {
        let of =
            |model: &str, precision: &str| RowCache::new(1, model, precision).expect("bytes").key(key(1));
        assert_ne!(of("a", "f32"), of("b", "f32"));
        assert_ne!(of("a", "f32"), of("a", "int8"));
        assert_eq!(of("a", "f32"), of("a", "f32"));
    }
}
