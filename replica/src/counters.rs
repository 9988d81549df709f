//! What a replica has done since it started, for `/info` and `/status`.
//!
//! Only [`crate::events`] counts: an event that is logged is counted, and the reverse.

use std::sync::atomic::{AtomicU64, Ordering};

use replica_core::wire::info::CountersV1;

/// Totals since the start.
#[derive(Debug, Default)]
pub struct Counters {
    pub(crate) requests: AtomicU64,
    pub(crate) inputs: AtomicU64,
    pub(crate) tokens: AtomicU64,
    pub(crate) errors: AtomicU64,
    pub(crate) batches: AtomicU64,
    pub(crate) dropped_inputs: AtomicU64,
}

/// Counts `n` more. The totals are independent of each other, so no order among them is promised.
pub(crate) fn add(counter: &AtomicU64, n: u64) {
    counter.fetch_add(n, Ordering::Relaxed);
}

impl Counters {
    /// Requests for vectors so far.
    pub fn requests_total(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }

    /// All of them.
    pub fn read(&self) -> CountersV1 {
        let Counters { requests, inputs, tokens, errors, batches, dropped_inputs } = self;
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        CountersV1 {
            requests_total: read(requests),
            inputs_total: read(inputs),
            tokens_total: read(tokens),
            errors_total: read(errors),
            batches_total: read(batches),
            dropped_inputs_total: read(dropped_inputs),
        }
    }
}
