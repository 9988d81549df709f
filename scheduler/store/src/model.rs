//! Data model, as in etcd (<https://etcd.io/docs/v3.6/learning/data_model/>).
//!
//! The *revision* is the number of transactions that have changed something since the store was created. A key has a
//! create revision and a modification revision; both are 0 for a key that does not exist.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

/// Maximum operations of a transaction; etcd's default (`--max-txn-ops`).
pub const TXN_OPS_MAX: usize = 128;
/// Maximum bytes of the keys and values that a transaction puts. etcd accepts requests of 1.5 MiB
/// (`--max-request-bytes`); the encoding around keys and values needs less than the difference.
pub const TXN_BYTES_MAX: usize = 1 << 20;
/// Maximum number of leases: eight for each possible region of a catalogue, and as many again that are expiring.
pub const LEASES_MAX: usize = 8192;

/// Lease, by its id. Ids are not reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Lease(pub u64);

/// Existing key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyValue {
    /// The key.
    pub key: String,
    /// Its value.
    pub value: Arc<[u8]>,
    /// Revision at which it was created; a key that was deleted and put again has a new one.
    pub create_revision: u64,
    /// Revision at which it was last put.
    pub mod_revision: u64,
    /// Lease that deletes it at its end.
    pub lease: Option<Lease>,
}

/// Keys of a read or a watch. A text stands for a prefix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeyRange {
    /// Keys with this prefix.
    Prefix(String),
    /// Keys from one on, before another, in the order of their bytes.
    Between {
        /// First key.
        from: String,
        /// First key after the range; not empty.
        before: String,
    },
}

impl KeyRange {
    /// Returns the first key of the range.
    pub(crate) fn from(&self) -> &str {
        match self {
            KeyRange::Prefix(from) | KeyRange::Between { from, .. } => from,
        }
    }

    /// Returns whether the range has this key.
    pub fn contains(&self, key: &str) -> bool {
        match self {
            KeyRange::Prefix(prefix) => key.starts_with(prefix),
            KeyRange::Between { from, before } => (from.as_str()..before).contains(&key),
        }
    }
}

impl From<&str> for KeyRange {
    fn from(prefix: &str) -> KeyRange {
        KeyRange::Prefix(prefix.to_owned())
    }
}

impl From<&String> for KeyRange {
    fn from(prefix: &String) -> KeyRange {
        KeyRange::Prefix(prefix.clone())
    }
}

/// Part of the entries that a read of a page returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageContent {
    /// Keys and values.
    Values,
    /// Keys; the values are empty.
    Keys,
}

/// First keys of a range.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Page {
    /// Entries in the order of their keys, at most the limit.
    pub entries: Vec<KeyValue>,
    /// Number of keys in the whole range.
    pub total: usize,
}

/// All keys of a range.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Range {
    /// Entries in the order of their keys.
    pub entries: Vec<KeyValue>,
    /// Revision of the store at the read; a watch without a gap starts at the next one.
    pub revision: u64,
}

/// Guard of a transaction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Compare {
    /// The create revision of a key; 0 if the key must not exist.
    CreateRevision(String, u64),
    /// The modification revision of a key; 0 if the key must not exist.
    ModRevision(String, u64),
}

/// Operation of a transaction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Op {
    /// Puts a key and attaches it to `lease` and no other.
    Put {
        /// The key.
        key: String,
        /// Its new value.
        value: Vec<u8>,
        /// The lease that deletes the key at its end.
        lease: Option<Lease>,
    },
    /// Deletes a key, if it exists.
    Delete {
        /// The key.
        key: String,
    },
}

/// Transaction: operations that are executed together, at one revision, or not at all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Txn {
    /// Guards, all of which must hold.
    pub when: Vec<Compare>,
    /// Operations.
    pub then: Vec<Op>,
}

impl Txn {
    /// Checks the limits of a transaction, independent of the store's content. Every store calls this first, so that
    /// all of them accept the same transactions.
    pub(crate) fn validate(&self) -> Result<(), StoreError> {
        if self.then.len() > TXN_OPS_MAX {
            return Err(StoreError::TooManyOps(self.then.len()));
        }
        let mut keys = BTreeSet::new();
        let mut bytes = 0;
        for op in &self.then {
            let (key, value) = match op {
                Op::Put { key, value, .. } => (key, value.len()),
                Op::Delete { key } => (key, 0),
            };
            bytes += key.len() + value;
            if !keys.insert(key) {
                return Err(StoreError::DuplicateKey(key.clone()));
            }
        }
        if bytes > TXN_BYTES_MAX { Err(StoreError::TooLarge(bytes)) } else { Ok(()) }
    }
}

/// Outcome of a transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TxnOutcome {
    /// All guards held, and the operations were executed.
    pub succeeded: bool,
    /// Revision of the store after it.
    pub revision: u64,
}

/// Change received by a watch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The key was put.
    Put(KeyValue),
    /// The key was deleted.
    Delete {
        /// The key.
        key: String,
        /// Revision of the deletion.
        revision: u64,
    },
}

impl Event {
    /// Returns the key that changed.
    pub fn key(&self) -> &str {
        match self {
            Event::Put(entry) => &entry.key,
            Event::Delete { key, .. } => key,
        }
    }

    /// Returns the revision of the change.
    pub fn revision(&self) -> u64 {
        match self {
            Event::Put(entry) => entry.mod_revision,
            Event::Delete { revision, .. } => *revision,
        }
    }
}

/// Error of an operation.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    /// The lease has expired, was revoked, or never existed. Its owner registers again by itself.
    #[error("lease {} does not exist or has ended", .0.0)]
    NoSuchLease(Lease),
    /// The limit of leases in the store is reached, so no further spoke can register.
    #[error("the store has the maximum of {LEASES_MAX} leases")]
    TooManyLeases,
    /// One change has more records than the store permits. It has no effect.
    #[error("the transaction has {0} operations, more than {TXN_OPS_MAX}")]
    TooManyOps(usize),
    /// A defect: two operations of one transaction have the same key. Report it.
    #[error("the transaction has two operations on key `{0}`")]
    DuplicateKey(String),
    /// One change has more bytes than the store permits. It has no effect.
    #[error("the transaction puts {0} bytes of keys and values, more than {TXN_BYTES_MAX}")]
    TooLarge(usize),
    /// The disk or etcd has failed. The operation may or may not have been written.
    #[error("the store is unavailable: {0}")]
    Unavailable(String),
    /// The hub is stopping, and its store accepts no more requests.
    #[error("the store is closed")]
    Closed,
}

/// Reason why a watch has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WatchError {
    /// A watch starts at a revision whose changes the store has removed. The hub lists the keys again by itself.
    #[error("changes before revision {oldest} were compacted; list the keys and watch from there")]
    Compacted {
        /// Earliest revision from which a watch can start.
        oldest: u64,
    },
    /// A watch starts at a revision that the store does not have yet: it belongs to another store, or to this one
    /// before it was restored.
    #[error("revision {from} is in the future; the store is at {revision}")]
    FutureRevision {
        /// Start revision of the watch.
        from: u64,
        /// Present revision of the store.
        revision: u64,
    },
    /// The hub is stopping, and its store accepts no more requests.
    #[error("the store is closed")]
    Closed,
}

/// Returns a time to live in the whole milliseconds in which it is stored.
pub(crate) fn whole_millis(ttl: Duration) -> u64 {
    u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX).max(1)
}
