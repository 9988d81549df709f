//! The nouns, as etcd has them (<https://etcd.io/docs/v3.6/learning/data_model/>).
//!
//! The *revision* counts the transactions that changed something, since the store was made. A key carries the revision
//! at which it came to be and the one at which it last changed; both are 0 for a key that is not there.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

/// Operations in one transaction; etcd's default (`--max-txn-ops`).
pub const TXN_OPS_MAX: usize = 128;
/// Bytes of the keys and values that one transaction puts. etcd takes requests of 1.5 MiB (`--max-request-bytes`), and what
/// stands around keys and values in a request is less than the rest.
pub const TXN_BYTES_MAX: usize = 1 << 20;
/// Leases at a time: eight for each region that a catalogue can have, and as many again that run out.
pub const LEASES_MAX: usize = 8192;

/// A lease, by its number. Numbers are not used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Lease(pub u64);

/// A key that is there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyValue {
    /// The key.
    pub key: String,
    /// Its value.
    pub value: Arc<[u8]>,
    /// The revision at which it came to be; deleting a key and putting it again makes a new one.
    pub create_revision: u64,
    /// The revision at which it was last put.
    pub mod_revision: u64,
    /// The lease with which it goes.
    pub lease: Option<Lease>,
}

/// What stands under a prefix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Range {
    /// In the order of their keys.
    pub entries: Vec<KeyValue>,
    /// The store's revision when it was read; a watch that shall miss nothing starts with the next.
    pub revision: u64,
}

/// Something that must hold for a transaction to be carried out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Compare {
    /// The key came to be at this revision; 0 is a key that is not there.
    CreateRevision(String, u64),
    /// The key was last put at this revision; 0 is a key that is not there.
    ModRevision(String, u64),
}

/// Something that a transaction does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Op {
    /// Gives a key a value. It goes with `lease` from now on, and with no other.
    Put {
        /// The key.
        key: String,
        /// Its new value.
        value: Vec<u8>,
        /// The lease with which it goes.
        lease: Option<Lease>,
    },
    /// Takes a key away, if it is there.
    Delete {
        /// The key.
        key: String,
    },
}

/// Operations that are carried out together, at one revision, or not at all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Txn {
    /// What must hold, all of it.
    pub when: Vec<Compare>,
    /// What is done then.
    pub then: Vec<Op>,
}

impl Txn {
    /// Says what is wrong with it in itself, whatever stands in the store. Every store asks this before it does anything,
    /// so that what one takes all of them take.
    pub(crate) fn refuse_malformed(&self) -> Result<(), StoreError> {
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

/// What became of a transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TxnOutcome {
    /// Everything held, and the operations were carried out.
    pub succeeded: bool,
    /// The store's revision after it.
    pub revision: u64,
}

/// A change, as a watch tells it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The key has this value now.
    Put(KeyValue),
    /// The key is gone.
    Delete {
        /// The key.
        key: String,
        /// The revision at which it went.
        revision: u64,
    },
}

impl Event {
    /// The key that changed.
    pub fn key(&self) -> &str {
        match self {
            Event::Put(entry) => &entry.key,
            Event::Delete { key, .. } => key,
        }
    }

    /// The revision at which it changed.
    pub fn revision(&self) -> u64 {
        match self {
            Event::Put(entry) => entry.mod_revision,
            Event::Delete { revision, .. } => *revision,
        }
    }
}

/// Why something was not done.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    /// The lease has run out, was revoked, or never was.
    #[error("lease {} does not stand (any longer)", .0.0)]
    NoSuchLease(Lease),
    /// There are too many leases.
    #[error("{LEASES_MAX} leases stand already, and no more fit")]
    TooManyLeases,
    /// The transaction has too many operations.
    #[error("a transaction of {0} operations is too long; {TXN_OPS_MAX} fit")]
    TooManyOps(usize),
    /// Two operations of one transaction are about the same key.
    #[error("the transaction names `{0}` twice")]
    DuplicateKey(String),
    /// What the transaction puts is too large.
    #[error("what is to be put has {0} bytes, keys and values together; {TXN_BYTES_MAX} fit")]
    TooLarge(usize),
    /// The disk, or etcd, does not do its part. What was asked for may or may not have been written.
    #[error("the store cannot be written or read: {0}")]
    Unavailable(String),
    /// The store was closed.
    #[error("the store is closed")]
    Closed,
}

/// Why a watch tells nothing more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WatchError {
    /// Changes that it was to tell are no longer known. List what there is, and watch on from there.
    #[error("changes before revision {oldest} are no longer known; list what there is and watch from there")]
    Compacted {
        /// A watch may start from here at the earliest.
        oldest: u64,
    },
    /// It was to start with a revision that is further away than the next: of another store, or of this one before it
    /// was restored.
    #[error("revision {from} has not come yet; the store is at {revision}")]
    FromTheFuture {
        /// Where it was to start.
        from: u64,
        /// Where the store is.
        revision: u64,
    },
    /// The store was closed.
    #[error("the store is closed")]
    Closed,
}

/// How long a lease stands, in the whole milliseconds in which it is kept.
pub(crate) fn whole_millis(ttl: Duration) -> u64 {
    u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX).max(1)
}
