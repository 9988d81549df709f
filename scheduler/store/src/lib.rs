//! The hub's store on one machine, in the shape of etcd.
//!
//! One machine needs no etcd, but the hub should not be written twice. So this store speaks etcd's language: a revision
//! that only rises, transactions guarded by revisions, leases that take their keys with them, and watches that resume
//! from a revision. What etcd has and the hub does not need (reads at an old revision, compares of values and versions,
//! the branch of a transaction whose guard fails, elections) is not here.
//!
//! In reading order:
//!
//! - [`model`]: the nouns. Keys, revisions, transactions, leases, events, errors.
//! - `state`: what stands in the store, and what an operation makes of it. Pure; leases are given the time.
//! - `history`: the events that a watch may still ask for. Bounded; what is gone is *said* to be gone.
//! - `disk`: the same on disk, in one redb file.
//! - [`Store`]: the handle. One thread owns the file; what is asked for at the same time is written together, with one
//!   fsync, before anybody is answered or any watch is woken.
//!
//! An answer therefore means: this survives the loss of power. An error of the disk means: this may or may not have been
//! written, and everybody who watches is told to look again.

mod disk;
mod history;
pub mod model;
mod state;
mod store;
mod watch;

pub use model::{Compare, Event, KeyValue, Lease, Op, Range, StoreError, Txn, TxnOutcome, WatchError};
pub use store::Store;
pub use watch::Watch;
