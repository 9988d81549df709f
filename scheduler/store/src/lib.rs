//! The hub's store, in the shape of etcd: on one machine, in a real etcd, and in memory for tests.
//!
//! One machine needs no etcd, but the hub should not be written twice. So all stores speak etcd's language: a revision
//! that only rises, transactions guarded by revisions, leases that take their keys with them, watches that resume from a
//! revision, a leader's term. What etcd has and the hub does not need (reads at an old revision, compares of values and
//! versions, the branch of a transaction whose guard fails) is not here.
//!
//! In reading order:
//!
//! - [`model`]: the nouns. Keys, revisions, transactions, leases, events, errors.
//! - [`Store`]: what every store can do, and [`Term`], the right to write as the leader.
//! - `state`: what stands in a store, and what an operation makes of it. Pure; leases are given the time.
//! - `history`: the events that a watch may still ask for. Bounded; what is gone is *said* to be gone.
//! - [`Embedded`]: the same on disk, in one redb file. One thread owns the file; what is asked for at the same time is
//!   written together, with one fsync, before anybody is answered or any watch is woken.
//! - [`Sim`]: the same in memory, which fails when it is told to.
//! - [`Etcd`]: a real one, and everything that may happen on the way there.
//!
//! An answer therefore means: this survives the loss of power. An error of the disk or of the network means: this may or
//! may not have been written, and who is not sure looks.
//!
//! `tests/conformance` holds the three to the same suite, and the first two to what a real etcd answers.

mod embedded;
mod etcd;
mod history;
mod local_watch;
pub mod model;
mod sim;
mod state;
mod store;

pub use embedded::{Embedded, OpenError};
pub use etcd::{CALL_BUDGET, Etcd, EtcdConfig, EtcdTls, EtcdUser, EtcdWatch, KEEP_ALIVE};
pub use local_watch::LocalWatch;
pub use model::{Compare, Event, KeyValue, Lease, Op, Range, StoreError, Txn, TxnOutcome, WatchError};
pub use sim::{Sim, Snapshot};
pub use store::{Store, Term, Watch};
