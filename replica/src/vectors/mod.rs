//! Rows that were computed before, by what they were computed from.
//!
//! Off unless it is given bytes. What is asked for twice is a query; what is asked for once is a passage of a backfill, a
//! million of them in a row. So the question about eviction is what a scan does to the queries, and a plain LRU is the
//! wrong answer: a backfill flushes it. `quick_cache` evicts by S3-FIFO (Yang et al., SOSP 2023): newcomers pass through a
//! small probationary queue, and only what is asked for again while it is there, or so soon after that its ghost is
//! remembered, comes to the part that stays. It is bounded by weight and brings nothing that was not locked already.
//!
//! The key is the input's own (tenant, output, token ids, types; `batcher::sequence`) digested together with the model
//! and its precision. So one tenant's rows are never found by another: not because the rows are secret, who has the text can
//! compute them, but because an answer that comes at once tells that the text was asked for before.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use quick_cache::sync::Cache;
use quick_cache::{DefaultHashBuilder, Lifecycle, OptionsBuilder, Weighter};
use sha2::{Digest, Sha256};

use crate::batcher::SequenceKey;
use crate::metrics::Metrics;

/// What an entry takes besides its numbers: key, pointers, and its places in the map and the queue.
const OVERHEAD_BYTES: u64 = 128;
/// What an entry is thought to take when the map is laid out: 384 numbers.
const USUAL_BYTES: u64 = 384 * 4 + OVERHEAD_BYTES;

/// Parts of the cache that are locked apart; each has its part of the bytes.
const SHARDS: usize = 8;

/// Keys that are remembered after their rows have gone, as a part of those that are there. As many: a key costs some bytes
/// and a row thousands, and what is asked for again within twice the size of the cache is then found.
const GHOSTS: f64 = 1.0;

/// Rows of inputs.
#[derive(Debug)]
pub struct RowCache {
    model: [u8; 32],
    rows: Cache<[u8; 32], Arc<[f32]>, Bytes, DefaultHashBuilder, Evictions>,
    evicted: Arc<AtomicU64>,
}

impl RowCache {
    /// For at most `bytes` of rows of one model in one precision; none for 0 bytes.
    pub fn new(bytes: u64, model_digest: &str, precision: &str) -> Option<RowCache> {
        if bytes == 0 {
            return None;
        }
        let evicted = Arc::new(AtomicU64::new(0));
        let options = OptionsBuilder::new()
            .weight_capacity(bytes)
            .estimated_items_capacity(usize::try_from(bytes / USUAL_BYTES).unwrap_or(usize::MAX).max(1))
            .shards(SHARDS)
            .ghost_allocation(GHOSTS)
            .build()
            .expect("both capacities are given");
        let evictions = Evictions(Arc::clone(&evicted));
        let rows = Cache::with_options(options, Bytes, DefaultHashBuilder::default(), evictions);
        let model = Sha256::new().chain_update(model_digest).chain_update([0]).chain_update(precision);
        Some(RowCache { model: model.finalize().into(), rows, evicted })
    }

    /// The rows of this input, if they are there.
    pub(crate) fn get(&self, key: SequenceKey) -> Option<Arc<[f32]>> {
        self.rows.get(&self.key(key))
    }

    /// Keeps the rows of this input, as long as there is no better use for the room.
    pub(crate) fn insert(&self, key: SequenceKey, rows: &[f32]) {
        self.rows.insert(self.key(key), rows.into());
    }

    /// Stores for `/metrics` what is in it.
    pub(crate) fn publish(&self, metrics: &Metrics) {
        let cached = (self.rows.weight(), self.rows.len() as u64);
        metrics.update_gauges(|gauges| gauges.cached = cached);
        metrics.cache_evictions.set(self.evicted.load(Ordering::Relaxed));
    }

    fn key(&self, SequenceKey(input): SequenceKey) -> [u8; 32] {
        Sha256::new().chain_update(self.model).chain_update(input).finalize().into()
    }
}

/// What an entry takes.
#[derive(Clone, Copy, Debug)]
struct Bytes;

impl Weighter<[u8; 32], Arc<[f32]>> for Bytes {
    fn weight(&self, _: &[u8; 32], rows: &Arc<[f32]>) -> u64 {
        size_of_val::<[f32]>(rows) as u64 + OVERHEAD_BYTES
    }
}

/// Counts what makes room.
#[derive(Clone, Debug)]
struct Evictions(Arc<AtomicU64>);

impl Lifecycle<[u8; 32], Arc<[f32]>> for Evictions {
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

    /// Room for so many rows.
    fn cache(rows: u64) -> RowCache {
        RowCache::new(rows * ENTRY, "digest", "f32").expect("bytes")
    }

    #[test]
    fn no_bytes_is_no_cache() {
        assert!(RowCache::new(0, "digest", "f32").is_none());
    }

    #[test]
    fn what_was_put_in_comes_out_and_nothing_else_does() {
        let cache = cache(1000);
        (0..100).for_each(|n| cache.insert(key(n), &[n as f32; WIDTH]));
        for n in 0..100 {
            assert_eq!(cache.get(key(n)).as_deref(), Some(&[n as f32; WIDTH][..]));
        }
        assert_eq!(cache.get(key(100)), None);
    }

    #[test]
    fn it_never_takes_more_than_its_bytes() {
        let cache = cache(1000);
        for n in 0..10_000 {
            cache.insert(key(n), &[0.0; WIDTH]);
            assert!(cache.rows.weight() <= 1000 * ENTRY, "{} after {n}", cache.rows.weight());
        }
        assert!(cache.rows.weight() >= 900 * ENTRY, "and it uses them: {}", cache.rows.weight());
        let metrics = Metrics::default();
        cache.publish(&metrics);
        assert_eq!(metrics.cache_evictions.get() + cache.rows.len() as u64, 10_000);
    }

    #[test]
    fn a_backfill_does_not_flush_what_is_asked_for_again_and_again() {
        let cache = cache(1000);
        let (mut found, mut asked) = (0, 0);
        let mut once = 1_000_000;
        for round in 0..200 {
            // Two hundred queries that people repeat, and between each two of them six passages that nobody does.
            for query in 0..200 {
                let key = key(query);
                if cache.get(key).is_none() {
                    cache.insert(key, &[0.0; WIDTH]);
                } else if round >= 100 {
                    found += 1;
                }
                asked += u64::from(round >= 100);
                for _ in 0..6 {
                    once += 1;
                    cache.insert(self::key(once), &[0.0; WIDTH]);
                }
            }
        }
        // An LRU finds none of them: 1 400 inputs lie between two askings, and there is room for 1 000. This
        // one finds about four fifths, more or less by the seed of its hashes.
        assert!(found * 10 >= asked * 6, "{found} of {asked}");
    }

    #[test]
    fn another_model_or_precision_has_other_keys() {
        let of =
            |model: &str, precision: &str| RowCache::new(1, model, precision).expect("bytes").key(key(1));
        assert_ne!(of("a", "f32"), of("b", "f32"));
        assert_ne!(of("a", "f32"), of("a", "int8"));
        assert_eq!(of("a", "f32"), of("a", "f32"));
    }
}
