//! The hub's store, modelled on etcd: embedded in one file, in a real etcd, and in memory for tests.
//!
//! A single machine needs no etcd, but the hub should be written only once. So all stores have etcd's semantics: a
//! revision that only rises, transactions guarded by revisions, leases that delete their keys, watches that resume from
//! a revision, leader terms. Features of etcd that the hub does not need (reads at an old revision, compares of values
//! and versions, the else branch of a transaction) are left out.
//!
//! In reading order:
//!
//! - [`model`]: data types. Keys, revisions, transactions, leases, events, errors.
//! - [`Store`]: the interface of every store, and [`Term`], the right to write as the leader.
//! - `state`: the state of a store and its operations. Pure; the time is an argument.
//! - `history`: recent events for watches. Bounded; a watch that needs older events gets an error.
//! - [`EmbeddedStore`]: a store in one redb file. One thread owns the file; concurrent requests are written together,
//!   with one fsync, before any response is sent and before watches are notified.
//! - [`SimStore`]: a store in memory, with injectable failures.
//! - [`EtcdStore`]: a client of a real etcd, which handles the failures of its members and connections.
//!
//! A response therefore means that the change survives the loss of power. An error of the disk or of the network means
//! that the change may or may not have been written; a caller that depends on it reads the key.
//!
//! `tests/conformance` runs the same suite on all three, and compares the first two with the responses of a real etcd.

mod embedded;
mod etcd;
mod history;
mod local_watch;
pub mod model;
mod sim;
mod state;
mod store;

pub use embedded::{EmbeddedStore, StoreOpenError};
pub use etcd::{CALL_BUDGET, EtcdConfig, EtcdStore, EtcdTls, EtcdTlsError, EtcdUser, EtcdWatch, KEEP_ALIVE};
pub use local_watch::LocalWatch;
pub use model::{
    Compare, Event, KeyRange, KeyValue, Lease, Op, Page, PageContent, Range, StoreError, Txn, TxnOutcome,
    WatchError,
};
pub use sim::{SimSnapshot, SimStore};
pub use store::{Store, Term, Watch};
