//! Receipts to be written: the conversion of messages to entries, and the lines of one write.

use super::{Received, Receiving};
use gateway_core::receipt::PseudonymKey;
use gateway_core::receipt::chain::ChainHash;
use gateway_core::receipt::entry::Entry;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::time::Duration;

/// Maximum number of cached pseudonyms: each takes a hash of four blocks and two hundred bytes. The tenant names at a
/// spoke come from its peers; beyond this number the cache is cleared and pseudonyms are computed again.
const PSEUDONYMS_MAX: usize = 4096;

/// Lines that are not in a file yet, and the head of the chain after them.
pub(super) struct Batch {
    pub(super) lines: Vec<u8>,
    pub(super) head: ChainHash,
}

impl Batch {
    /// Creates an empty batch that follows `head`.
    pub(super) fn after(head: ChainHash) -> Batch {
        Batch { lines: Vec::new(), head }
    }

    pub(super) fn put(&mut self, entry: &Entry<'_>) {
        self.head.append(entry, &mut self.lines);
    }
}

/// Computes and caches pseudonyms.
pub(super) struct Pseudonyms {
    key: PseudonymKey,
    known: BTreeMap<String, String>,
}

impl Pseudonyms {
    pub(super) fn new(key: PseudonymKey) -> Pseudonyms {
        Pseudonyms { key, known: BTreeMap::new() }
    }

    pub(super) fn of(&mut self, tenant: &str) -> &str {
        if !self.known.contains_key(tenant) {
            if self.known.len() == PSEUDONYMS_MAX {
                self.known.clear();
            }
            self.known.insert(tenant.to_owned(), self.key.pseudonym(tenant));
        }
        &self.known[tenant]
    }
}

pub(super) fn arrival<'a>(pseudonyms: &'a mut Pseudonyms, received: &'a Received) -> Entry<'a> {
    let Received { request, attempt, tenant, deployment, residency, at_ms, took, outcome, key, number: _ } =
        received;
    Entry::Arrival {
        request: request.into(),
        attempt: *attempt,
        tenant: tenant.as_deref().map(|tenant| pseudonyms.of(tenant).into()),
        deployment: deployment.as_ref().map(|name| name.as_str().into()),
        residency: residency.as_deref().unwrap_or("anywhere").into(),
        at_ms: *at_ms,
        took_us: micros(*took),
        outcome: Cow::Borrowed(*outcome),
        key: key.map(|key| key.to_string().into()),
    }
}

pub(super) fn received<'a>(pseudonyms: &'a mut Pseudonyms, receiving: &'a Receiving) -> Entry<'a> {
    let Receiving { number, request, attempt, tenant, deployment, residency, at_ms, key } = receiving;
    Entry::Received {
        number: *number,
        request: request.into(),
        attempt: *attempt,
        tenant: tenant.as_deref().map(|tenant| pseudonyms.of(tenant).into()),
        deployment: deployment.as_ref().map(|name| name.as_str().into()),
        residency: residency.as_deref().unwrap_or("anywhere").into(),
        at_ms: *at_ms,
        key: key.map(|key| key.to_string().into()),
    }
}

pub(super) fn micros(took: Duration) -> u64 {
    u64::try_from(took.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pseudonyms_are_the_same_whether_cached_or_not() {
        let key = PseudonymKey::new(b"0123456789abcdef").unwrap();
        let mut pseudonyms = Pseudonyms::new(key.clone());
        for number in 0..PSEUDONYMS_MAX {
            let name = number.to_string();
            assert_eq!(pseudonyms.of(&name), key.pseudonym(&name));
        }
        assert_eq!(pseudonyms.known.len(), PSEUDONYMS_MAX, "at the bound");
        assert_eq!(pseudonyms.of("7"), key.pseudonym("7"));
        assert_eq!(pseudonyms.known.len(), PSEUDONYMS_MAX);
        assert_eq!(pseudonyms.of("one more"), key.pseudonym("one more"));
        assert_eq!(pseudonyms.known.len(), 1, "one past it");
    }
}
