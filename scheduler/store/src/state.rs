//! State of a store, and its operations.
//!
//! An operation changes the state at once and records the [`Changes`] to be written to disk and sent to watches. The
//! owner of the state writes them to disk before any response or event is sent; if that fails, the state is discarded
//! and read again.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::model::{
    Compare, Event, KeyRange, KeyValue, LEASES_MAX, Lease, Op, Page, PageContent, Range, StoreError, Txn,
    TxnOutcome,
};

/// State of a store.
#[derive(Clone, Debug, Default)]
pub(crate) struct State {
    /// Number of transactions that have changed something.
    pub(crate) revision: u64,
    /// Highest lease id that was ever granted.
    pub(crate) last_lease: u64,
    entries: BTreeMap<String, KeyValue>,
    leases: BTreeMap<Lease, LeaseState>,
    changes: Changes,
}

/// Existing lease.
#[derive(Clone, Debug)]
struct LeaseState {
    ttl: Duration,
    expires_at: Instant,
    keys: BTreeSet<String>,
}

/// Changes that are not written to disk yet.
#[derive(Clone, Debug, Default)]
pub(crate) struct Changes {
    /// The events of each new revision, in order.
    pub(crate) events: Vec<Vec<Event>>,
    /// Leases that were granted, with their time to live, and leases that ended.
    pub(crate) leases: BTreeMap<Lease, Option<Duration>>,
}

impl Changes {
    pub(crate) fn is_empty(&self) -> bool {
        self.events.is_empty() && self.leases.is_empty()
    }
}

impl State {
    /// Creates the state from its records on disk. Every lease gets its whole time to live, as after a change of etcd's
    /// leader: its holder could not keep it alive while the store was down.
    pub(crate) fn restored(
        revision: u64,
        last_lease: u64,
        entries: Vec<KeyValue>,
        leases: Vec<(Lease, Duration)>,
        now: Instant,
    ) -> State {
        let granted = |ttl| LeaseState { ttl, expires_at: now + ttl, keys: BTreeSet::new() };
        let mut leases: BTreeMap<_, _> =
            leases.into_iter().map(|(lease, ttl)| (lease, granted(ttl))).collect();
        for entry in &entries {
            if let Some(granted) = entry.lease.and_then(|lease| leases.get_mut(&lease)) {
                granted.keys.insert(entry.key.clone());
            }
        }
        let entries = entries.into_iter().map(|entry| (entry.key.clone(), entry)).collect();
        State { revision, last_lease, entries, leases, changes: Changes::default() }
    }

    /// Returns the changes since the last call.
    pub(crate) fn take_changes(&mut self) -> Changes {
        std::mem::take(&mut self.changes)
    }

    pub(crate) fn get(&self, key: &str) -> Option<KeyValue> {
        self.entries.get(key).cloned()
    }

    pub(crate) fn range(&self, keys: &KeyRange) -> Range {
        Range { entries: self.entries_of(keys).cloned().collect(), revision: self.revision }
    }

    /// Returns the first keys of a range.
    pub(crate) fn page(&self, keys: &KeyRange, limit: usize, content: PageContent) -> Page {
        let entries = self.entries_of(keys).take(limit).map(|entry| match content {
            PageContent::Values => entry.clone(),
            PageContent::Keys => KeyValue { value: Arc::default(), ..entry.clone() },
        });
        Page { entries: entries.collect(), total: self.entries_of(keys).count() }
    }

    fn entries_of<'a>(&'a self, keys: &'a KeyRange) -> impl Iterator<Item = &'a KeyValue> {
        let from = self.entries.range::<str, _>((Bound::Included(keys.from()), Bound::Unbounded));
        from.take_while(|(key, _)| keys.contains(key)).map(|(_, entry)| entry)
    }

    /// Executes a transaction, if its guards hold.
    pub(crate) fn txn(&mut self, txn: Txn) -> Result<TxnOutcome, StoreError> {
        txn.validate()?;
        let Txn { when, then } = txn;
        if !when.iter().all(|compare| self.holds(compare)) {
            return Ok(TxnOutcome { succeeded: false, revision: self.revision });
        }
        if let Some(lost) = then.iter().find_map(|op| self.lost_lease(op)) {
            return Err(StoreError::NoSuchLease(lost));
        }
        let next = self.revision + 1;
        let events = then.into_iter().filter_map(|op| match op {
            Op::Put { key, value, lease } => Some(self.put(key, value.into(), lease, next)),
            Op::Delete { key } => self.delete(key, next),
        });
        let events = events.collect();
        self.record(events);
        Ok(TxnOutcome { succeeded: true, revision: self.revision })
    }

    /// Grants a lease that expires after `ttl` unless it is kept alive.
    pub(crate) fn grant(&mut self, ttl: Duration, now: Instant) -> Result<Lease, StoreError> {
        if self.leases.len() >= LEASES_MAX {
            return Err(StoreError::TooManyLeases);
        }
        self.last_lease += 1;
        let lease = Lease(self.last_lease);
        self.leases.insert(lease, LeaseState { ttl, expires_at: now + ttl, keys: BTreeSet::new() });
        self.changes.leases.insert(lease, Some(ttl));
        Ok(lease)
    }

    /// Renews a lease to its whole time to live, and returns its keys. Nothing is written to disk: a restarted store
    /// grants that time anyway.
    pub(crate) fn keep_alive(&mut self, lease: Lease, now: Instant) -> Result<Vec<String>, StoreError> {
        let granted = self.leases.get_mut(&lease).ok_or(StoreError::NoSuchLease(lease))?;
        granted.expires_at = now + granted.ttl;
        Ok(granted.keys.iter().cloned().collect())
    }

    /// Renews every lease to its whole time to live.
    pub(crate) fn renew_all(&mut self, now: Instant) {
        self.leases.values_mut().for_each(|granted| granted.expires_at = now + granted.ttl);
    }

    /// Ends a lease and deletes its keys.
    pub(crate) fn revoke(&mut self, lease: Lease) -> Result<(), StoreError> {
        let granted = self.leases.remove(&lease).ok_or(StoreError::NoSuchLease(lease))?;
        self.changes.leases.insert(lease, None);
        let next = self.revision + 1;
        let events = granted.keys.into_iter().filter_map(|key| self.delete(key, next)).collect();
        self.record(events);
        Ok(())
    }

    /// Expires the leases that were not kept alive, and returns them.
    pub(crate) fn expire(&mut self, now: Instant) -> Vec<Lease> {
        let expired = self.leases.iter().filter(|(_, granted)| granted.expires_at <= now);
        let expired: Vec<_> = expired.map(|(lease, _)| *lease).collect();
        for lease in &expired {
            self.revoke(*lease).expect("the lease was listed above");
        }
        expired
    }

    fn holds(&self, compare: &Compare) -> bool {
        match compare {
            Compare::CreateRevision(key, revision) => {
                self.entries.get(key).map_or(0, |entry| entry.create_revision) == *revision
            }
            Compare::ModRevision(key, revision) => {
                self.entries.get(key).map_or(0, |entry| entry.mod_revision) == *revision
            }
        }
    }

    fn lost_lease(&self, op: &Op) -> Option<Lease> {
        match op {
            Op::Put { lease: Some(lease), .. } if !self.leases.contains_key(lease) => Some(*lease),
            Op::Put { .. } | Op::Delete { .. } => None,
        }
    }

    fn put(&mut self, key: String, value: Arc<[u8]>, lease: Option<Lease>, revision: u64) -> Event {
        let before = self.entries.get(&key);
        let create_revision = before.map_or(revision, |before| before.create_revision);
        let lease_before = before.and_then(|before| before.lease);
        if let Some(granted) = lease_before.and_then(|lease| self.leases.get_mut(&lease)) {
            granted.keys.remove(&key);
        }
        if let Some(granted) = lease.and_then(|lease| self.leases.get_mut(&lease)) {
            granted.keys.insert(key.clone());
        }
        let entry = KeyValue { key: key.clone(), value, create_revision, mod_revision: revision, lease };
        self.entries.insert(key, entry.clone());
        Event::Put(entry)
    }

    fn delete(&mut self, key: String, revision: u64) -> Option<Event> {
        let entry = self.entries.remove(&key)?;
        if let Some(granted) = entry.lease.and_then(|lease| self.leases.get_mut(&lease)) {
            granted.keys.remove(&key);
        }
        Some(Event::Delete { key, revision })
    }

    /// Records the changes of a new revision, if there are any.
    fn record(&mut self, events: Vec<Event>) {
        if !events.is_empty() {
            self.revision += 1;
            self.changes.events.push(events);
        }
    }
}

#[cfg(test)]
mod tests;
