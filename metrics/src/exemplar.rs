//! Exemplars: for each bucket of a histogram, the last value that was observed with a trace.
//!
//! A bucket has one slot, so the memory of a histogram is bounded, and the slots are allocated with the first exemplar.
//! Slots are written on the request path, so a slot is a sequence lock of atomics: a writer that meets another one drops its
//! exemplar, and a reader that meets a writer reads none. Neither waits.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering, fence};

/// Trace of an observed value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exemplar {
    /// Identifier of the trace (W3C Trace Context).
    pub trace_id: [u8; 16],
    /// Time of the observation, in milliseconds since 1970.
    pub at_ms: u64,
}

/// Last exemplar of each of `N` buckets.
#[derive(Debug)]
pub(crate) struct Exemplars<const N: usize>(OnceLock<Box<[ExemplarSlot; N]>>);

impl<const N: usize> Default for Exemplars<N> {
    fn default() -> Exemplars<N> {
        Exemplars(OnceLock::new())
    }
}

impl<const N: usize> Exemplars<N> {
    /// Stores the exemplar of a value in this bucket.
    pub(crate) fn put(&self, bucket: usize, value: f64, exemplar: Exemplar) {
        let slots = self.0.get_or_init(|| Box::new(std::array::from_fn(|_| ExemplarSlot::default())));
        slots[bucket].put(value, exemplar);
    }

    /// Returns the last value of a bucket that has an exemplar.
    pub(crate) fn get(&self, bucket: usize) -> Option<(f64, Exemplar)> {
        self.0.get()?[bucket].get()
    }
}

/// Exemplar of one bucket.
#[derive(Debug, Default)]
struct ExemplarSlot {
    /// 0 before the first exemplar, odd while one is written.
    version: AtomicU64,
    /// Trace, value and time.
    words: [AtomicU64; 4],
}

impl ExemplarSlot {
    fn put(&self, value: f64, Exemplar { trace_id, at_ms }: Exemplar) {
        let trace = u128::from_be_bytes(trace_id);
        let words = [(trace >> 64) as u64, trace as u64, value.to_bits(), at_ms];
        let version = self.version.load(Ordering::Relaxed);
        let taken = version % 2 == 1
            || self
                .version
                .compare_exchange(version, version + 1, Ordering::Relaxed, Ordering::Relaxed)
                .is_err();
        if taken {
            return;
        }
        // The odd version is seen before any of the words.
        fence(Ordering::Release);
        self.words.iter().zip(words).for_each(|(word, value)| word.store(value, Ordering::Relaxed));
        self.version.store(version + 2, Ordering::Release);
    }

    fn get(&self) -> Option<(f64, Exemplar)> {
        let version = self.version.load(Ordering::Acquire);
        let [high, low, value, at_ms] = self.words.each_ref().map(|word| word.load(Ordering::Relaxed));
        fence(Ordering::Acquire);
        let is_whole =
            version > 0 && version.is_multiple_of(2) && self.version.load(Ordering::Relaxed) == version;
        let trace_id = (u128::from(high) << 64 | u128::from(low)).to_be_bytes();
        is_whole.then_some((f64::from_bits(value), Exemplar { trace_id, at_ms }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_exemplar_is_read_whole_or_not_at_all() {
        let slot = ExemplarSlot::default();
        assert_eq!(slot.get(), None);
        // All words of an exemplar derive from one number.
        let exemplar = |n: u64| {
            let trace_id = (u128::from(n) << 64 | u128::from(n)).to_be_bytes();
            (n as f64, Exemplar { trace_id, at_ms: n })
        };
        std::thread::scope(|scope| {
            for first in [1, 2] {
                let slot = &slot;
                scope.spawn(move || {
                    for n in (first..200_000).step_by(2) {
                        let (value, exemplar) = exemplar(n);
                        slot.put(value, exemplar);
                    }
                });
            }
            for _ in 0..200_000 {
                if let Some((value, read)) = slot.get() {
                    assert_eq!((value, read), exemplar(read.at_ms));
                }
            }
        });
        let (value, last) = exemplar(7);
        slot.put(value, last);
        assert_eq!(slot.get(), Some((7.0, last)), "the last one stays");
    }
}
