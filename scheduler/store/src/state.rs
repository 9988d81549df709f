//! What stands in the store, and what an operation makes of it.
//!
//! An operation changes the state at once and leaves word of what is to be written and told: [`Changes`]. Whoever owns
//! the state writes them down before anybody hears of them; if that fails, the state is thrown away and read back.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::model::{Compare, Event, KeyValue, LEASES_MAX, Lease, Op, Range, StoreError, Txn, TxnOutcome};

/// What stands in the store.
#[derive(Clone, Debug, Default)]
pub(crate) struct State {
    /// How many transactions have changed something.
    pub(crate) revision: u64,
    /// The highest lease that was ever granted.
    pub(crate) last_lease: u64,
    entries: BTreeMap<String, KeyValue>,
    leases: BTreeMap<Lease, Granted>,
    changes: Changes,
}

/// A lease that stands.
#[derive(Clone, Debug)]
struct Granted {
    ttl: Duration,
    until: Instant,
    keys: BTreeSet<String>,
}

/// What has changed since it was last written down.
#[derive(Clone, Debug, Default)]
pub(crate) struct Changes {
    /// The events of each new revision, in order.
    pub(crate) events: Vec<Vec<Event>>,
    /// Leases that were granted, with their time to live, or ended.
    pub(crate) leases: BTreeMap<Lease, Option<Duration>>,
}

impl Changes {
    pub(crate) fn is_empty(&self) -> bool {
        self.events.is_empty() && self.leases.is_empty()
    }
}

impl State {
    /// What was written down. Every lease has its whole time to live before it, as after a change of etcd's leader: its
    /// holder could not keep it alive while the store was away.
    pub(crate) fn restored(
        revision: u64,
        last_lease: u64,
        entries: Vec<KeyValue>,
        leases: Vec<(Lease, Duration)>,
        now: Instant,
    ) -> State {
        let granted = |ttl| Granted { ttl, until: now + ttl, keys: BTreeSet::new() };
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

    /// What has changed since this was last asked.
    pub(crate) fn take_changes(&mut self) -> Changes {
        std::mem::take(&mut self.changes)
    }

    pub(crate) fn get(&self, key: &str) -> Option<KeyValue> {
        self.entries.get(key).cloned()
    }

    pub(crate) fn range(&self, prefix: &str) -> Range {
        let from = self.entries.range::<str, _>((Bound::Included(prefix), Bound::Unbounded));
        let under = from.take_while(|(key, _)| key.starts_with(prefix));
        Range { entries: under.map(|(_, entry)| entry.clone()).collect(), revision: self.revision }
    }

    /// Carries a transaction out, if what it asks for holds.
    pub(crate) fn txn(&mut self, txn: Txn) -> Result<TxnOutcome, StoreError> {
        txn.refuse_malformed()?;
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
        self.tell(events);
        Ok(TxnOutcome { succeeded: true, revision: self.revision })
    }

    /// A new lease, which ends after `ttl` unless it is kept alive.
    pub(crate) fn grant(&mut self, ttl: Duration, now: Instant) -> Result<Lease, StoreError> {
        if self.leases.len() >= LEASES_MAX {
            return Err(StoreError::TooManyLeases);
        }
        self.last_lease += 1;
        let lease = Lease(self.last_lease);
        self.leases.insert(lease, Granted { ttl, until: now + ttl, keys: BTreeSet::new() });
        self.changes.leases.insert(lease, Some(ttl));
        Ok(lease)
    }

    /// Gives a lease its whole time to live again, and says which keys go with it. Nothing is written: who restarts the
    /// store grants that time anyway.
    pub(crate) fn keep_alive(&mut self, lease: Lease, now: Instant) -> Result<Vec<String>, StoreError> {
        let granted = self.leases.get_mut(&lease).ok_or(StoreError::NoSuchLease(lease))?;
        granted.until = now + granted.ttl;
        Ok(granted.keys.iter().cloned().collect())
    }

    /// Gives every lease its whole time to live again.
    pub(crate) fn renew_all(&mut self, now: Instant) {
        self.leases.values_mut().for_each(|granted| granted.until = now + granted.ttl);
    }

    /// Ends a lease and takes its keys away.
    pub(crate) fn revoke(&mut self, lease: Lease) -> Result<(), StoreError> {
        let granted = self.leases.remove(&lease).ok_or(StoreError::NoSuchLease(lease))?;
        self.changes.leases.insert(lease, None);
        let next = self.revision + 1;
        let events = granted.keys.into_iter().filter_map(|key| self.delete(key, next)).collect();
        self.tell(events);
        Ok(())
    }

    /// Ends the leases that nobody has kept alive, and says which.
    pub(crate) fn expire(&mut self, now: Instant) -> Vec<Lease> {
        let over = self.leases.iter().filter(|(_, granted)| granted.until <= now);
        let over: Vec<_> = over.map(|(lease, _)| *lease).collect();
        for lease in &over {
            self.revoke(*lease).expect("it stood a moment ago");
        }
        over
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

    /// Counts a revision at which something changed.
    fn tell(&mut self, events: Vec<Event>) {
        if !events.is_empty() {
            self.revision += 1;
            self.changes.events.push(events);
        }
    }
}

#[cfg(test)]
mod tests;
