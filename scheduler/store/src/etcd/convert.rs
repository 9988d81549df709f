//! Conversions between the types and errors of etcd and of this crate.
//!
//! Revisions and leases are signed in etcd's protocol and never negative. Errors are gRPC statuses; only the text tells
//! the cause, which etcd has kept unchanged since version 3.0 (`api/v3rpc/rpctypes/error.go`).

use std::time::Duration;

use etcd_client::{self as etcd, Error, EventType, ResponseHeader, TxnOp};

use crate::model::{Compare, Event, KeyValue, Lease, Op, Txn};

const NO_SUCH_LEASE: &str = "etcdserver: requested lease not found";
const COMPACTED: &str = "etcdserver: mvcc: required revision has been compacted";
const FUTURE: &str = "etcdserver: mvcc: required revision is a future revision";

/// Keys with the store's prefix in etcd.
#[derive(Clone, Debug)]
pub(super) struct PrefixedKeys {
    prefix: String,
}

impl PrefixedKeys {
    pub(super) fn new(prefix: String) -> PrefixedKeys {
        PrefixedKeys { prefix }
    }

    pub(super) fn outer(&self, key: &str) -> String {
        format!("{}{key}", self.prefix)
    }

    /// Removes the prefix. A key that is not UTF-8 belongs to another application; it is converted lossily.
    pub(super) fn inner(&self, key: &[u8]) -> String {
        let key = String::from_utf8_lossy(key);
        key.strip_prefix(&self.prefix).unwrap_or(&key).to_owned()
    }

    pub(super) fn entry(&self, entry: &etcd::KeyValue) -> KeyValue {
        let lease = unsigned(entry.lease());
        KeyValue {
            key: self.inner(entry.key()),
            value: entry.value().into(),
            create_revision: unsigned(entry.create_revision()),
            mod_revision: unsigned(entry.mod_revision()),
            lease: (lease != 0).then_some(Lease(lease)),
        }
    }

    pub(super) fn event(&self, event: &etcd::Event) -> Option<Event> {
        let entry = event.kv()?;
        Some(match event.event_type() {
            EventType::Put => Event::Put(self.entry(entry)),
            EventType::Delete => {
                Event::Delete { key: self.inner(entry.key()), revision: unsigned(entry.mod_revision()) }
            }
        })
    }

    pub(super) fn txn(&self, txn: &Txn) -> etcd::Txn {
        let Txn { when, then } = txn;
        let equal = etcd::CompareOp::Equal;
        let compare = |compare: &Compare| match compare {
            Compare::CreateRevision(key, revision) => {
                etcd::Compare::create_revision(self.outer(key), equal, signed(*revision))
            }
            Compare::ModRevision(key, revision) => {
                etcd::Compare::mod_revision(self.outer(key), equal, signed(*revision))
            }
        };
        let op = |op: &Op| match op {
            Op::Put { key, value, lease } => {
                let under = lease.map(|lease| etcd::PutOptions::new().with_lease(signed(lease.0)));
                TxnOp::put(self.outer(key), value.clone(), under)
            }
            Op::Delete { key } => TxnOp::delete(self.outer(key), None),
        };
        etcd::Txn::new()
            .when(when.iter().map(compare).collect::<Vec<_>>())
            .and_then(then.iter().map(op).collect::<Vec<_>>())
    }
}

/// Returns the leases that a transaction names, in its order.
pub(super) fn leases_of(txn: &Txn) -> impl Iterator<Item = Lease> {
    txn.then.iter().filter_map(|op| match op {
        Op::Put { lease, .. } => *lease,
        Op::Delete { .. } => None,
    })
}

pub(super) fn revision(header: Option<&ResponseHeader>) -> u64 {
    header.map_or(0, |header| unsigned(header.revision()))
}

pub(super) fn signed(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

pub(super) fn unsigned(number: i64) -> u64 {
    u64::try_from(number).unwrap_or(0)
}

/// Converts a time to live to etcd's unit, seconds.
pub(super) fn whole_seconds(ttl: Duration) -> i64 {
    signed(ttl.as_secs() + u64::from(ttl.subsec_nanos() > 0)).max(1)
}

pub(super) fn is_no_such_lease(error: &Error) -> bool {
    match error {
        Error::GRpcStatus(status) => status.message() == NO_SUCH_LEASE,
        // etcd-client's error for a keep-alive of an expired lease.
        Error::LeaseKeepAliveError(problem) => problem == "lease not found",
        _ => false,
    }
}

pub(super) fn is_compacted(error: &Error) -> bool {
    matches!(error, Error::GRpcStatus(status) if status.message() == COMPACTED)
}

pub(super) fn is_future_revision(error: &Error) -> bool {
    matches!(error, Error::GRpcStatus(status) if status.message() == FUTURE)
}

/// Returns whether another attempt or another member would give the same error.
pub(super) fn is_final(error: &Error) -> bool {
    let Error::GRpcStatus(status) = error else { return is_no_such_lease(error) };
    // gRPC status codes as numbers.
    match i32::from(status.code()) {
        // Cancelled, unknown, deadline exceeded, aborted, internal, unavailable, unauthenticated.
        1 | 2 | 4 | 10 | 13 | 14 | 16 => false,
        _ => true,
    }
}
