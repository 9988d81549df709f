//! Age of the oldest receipt that is not durable yet.
//!
//! A receipt is pending from the moment at which it is queued until its file is synced. Its time moves with it: a recorder
//! notes it before it queues the receipt, the writer takes it over with the receipt, and clears it with the sync. A
//! receipt that cannot be written is no longer pending but part of a gap.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Times of the oldest receipts in the queue and at the writer, in milliseconds since 1970; 0 without one.
#[derive(Debug, Default)]
pub(super) struct PendingSince {
    queued: AtomicU64,
    taken: AtomicU64,
}

impl PendingSince {
    /// Notes that a receipt is about to be queued.
    pub(super) fn queued(&self, now_ms: u64) {
        // Only the oldest one counts; this is on the request path, where a load is cheaper than a failed exchange.
        if self.queued.load(Ordering::Relaxed) == 0 {
            let _ = self.queued.compare_exchange(0, now_ms, Ordering::Relaxed, Ordering::Relaxed);
        }
    }

    /// Notes that the writer has taken receipts from the queue. `left_ms` is the time of those that it may have left there.
    pub(super) fn take(&self, left_ms: Option<u64>, now_ms: u64) {
        // A receipt that is queued at this moment may lose its time; it is taken milliseconds later, and then counts from there.
        let since = match self.queued.swap(left_ms.unwrap_or(0), Ordering::Relaxed) {
            0 => now_ms,
            since => since,
        };
        let _ = self.taken.compare_exchange(0, since, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// Notes that all receipts that the writer has taken are durable or missing.
    pub(super) fn settle(&self) {
        self.taken.store(0, Ordering::Relaxed);
    }

    /// Returns the age of the oldest pending receipt; zero without one. The time of the queue counts only while something is
    /// in it.
    pub(super) fn age(&self, is_queue_used: bool, now_ms: u64) -> Duration {
        let queued = self.queued.load(Ordering::Relaxed) * u64::from(is_queue_used);
        let oldest =
            [queued, self.taken.load(Ordering::Relaxed)].into_iter().filter(|since| *since > 0).min();
        Duration::from_millis(oldest.map_or(0, |since| now_ms.saturating_sub(since)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_receipt_is_pending_from_the_queue_to_the_sync() {
        let pending = PendingSince::default();
        let age = |is_queue_used, now| pending.age(is_queue_used, now).as_millis();
        assert_eq!(age(false, 1000), 0);
        pending.queued(1000);
        pending.queued(1500);
        assert_eq!(age(true, 3000), 2000, "the oldest one counts");
        assert_eq!(age(false, 3000), 0, "the queue is empty, so it was not queued after all");
        pending.take(None, 3500);
        assert_eq!(age(false, 4000), 3000, "written and not synced");
        pending.queued(4000);
        pending.take(None, 4500);
        assert_eq!(age(false, 5000), 4000, "a later one does not make it younger");
        pending.settle();
        assert_eq!(age(false, 6000), 0);
        // The writer takes a part of a long queue.
        pending.queued(6000);
        pending.take(Some(7000), 8000);
        pending.settle();
        assert_eq!(age(true, 9000), 2000);
        // The time of a receipt was lost with the others.
        pending.take(None, 9000);
        pending.settle();
        pending.take(None, 9500);
        assert_eq!(age(false, 10_000), 500);
    }
}
