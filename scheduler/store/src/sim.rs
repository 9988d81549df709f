//! A store in memory, for tests and simulations: what the embedded store is without its disk, its thread and its clock.
//!
//! It stands on the same `state` and `history`, so what it does is what they do; beside that it can be made to fail as
//! etcd fails: to be away, to forget its history, to be set back to an older copy of itself. The same calls in the same
//! order give the same answers; no call waits for anything but a watch for a change.

use std::sync::Arc;
use std::time::{Duration, Instant};
use supervision::{Mutex, MutexGuard};

use tokio::sync::watch;

use crate::history::History;
use crate::local_watch::LocalWatch;
use crate::model::{KeyValue, Lease, Range, StoreError, Txn, TxnOutcome};
use crate::state::State;
use crate::store::Store;

/// The simulated store. Clones are handles of the same one.
#[derive(Clone, Debug)]
pub struct Sim {
    inner: Arc<Mutex<Inner>>,
    history: Arc<Mutex<History>>,
    bell: watch::Sender<()>,
}

#[derive(Debug)]
struct Inner {
    state: State,
    away: bool,
}

/// What stood in a simulated store once.
#[derive(Clone, Debug)]
pub struct Snapshot(State);

impl Sim {
    /// An empty store.
    #[expect(clippy::new_without_default, reason = "a store is made on purpose")]
    pub fn new() -> Sim {
        let inner = Inner { state: State::default(), away: false };
        let (bell, _) = watch::channel(());
        Sim {
            inner: Arc::new(Mutex::new(inner)),
            history: Arc::new(Mutex::new(History::starting_at(0))),
            bell,
        }
    }

    /// From now on every call fails, or none does.
    pub fn set_away(&self, away: bool) {
        self.inner().away = away;
    }

    /// Forgets every change until now, as etcd does when its history is compacted.
    pub fn compact(&self) {
        let revision = self.inner().state.revision;
        self.tell_anew(revision);
    }

    /// A copy of what stands.
    pub fn snapshot(&self) -> Snapshot {
        Snapshot(self.inner().state.clone())
    }

    /// Puts back what stood then; its leases have their whole time to live from `now`, as after a change of etcd's
    /// leader.
    pub fn restore(&self, snapshot: Snapshot, now: Instant) {
        let mut inner = self.inner();
        inner.state = snapshot.0;
        inner.state.renew_all(now);
        let revision = inner.state.revision;
        drop(inner);
        self.tell_anew(revision);
    }

    fn tell_anew(&self, revision: u64) {
        *self.history.lock() = History::starting_at(revision);
        self.bell.send_replace(());
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock()
    }

    fn ask<T>(&self, work: impl FnOnce(&mut State) -> Result<T, StoreError>) -> Result<T, StoreError> {
        let mut inner = self.inner();
        if inner.away {
            return Err(StoreError::Unavailable("it is away".to_owned()));
        }
        let answer = work(&mut inner.state);
        let changes = inner.state.take_changes();
        if !changes.events.is_empty() {
            let mut history = self.history.lock();
            changes.events.into_iter().for_each(|events| history.push(events));
            drop(history);
            self.bell.send_replace(());
        }
        answer
    }
}

impl Store for Sim {
    type Watch = LocalWatch;

    async fn get(&self, key: &str) -> Result<Option<KeyValue>, StoreError> {
        self.ask(|state| Ok(state.get(key)))
    }

    async fn range(&self, prefix: &str) -> Result<Range, StoreError> {
        self.ask(|state| Ok(state.range(prefix)))
    }

    async fn txn(&self, txn: Txn) -> Result<TxnOutcome, StoreError> {
        self.ask(|state| state.txn(txn))
    }

    async fn lease_grant(&self, ttl: Duration, now: Instant) -> Result<Lease, StoreError> {
        self.ask(|state| state.grant(ttl, now))
    }

    async fn lease_keep_alive(&self, lease: Lease, now: Instant) -> Result<Vec<String>, StoreError> {
        self.ask(|state| state.keep_alive(lease, now))
    }

    async fn lease_revoke(&self, lease: Lease) -> Result<(), StoreError> {
        self.ask(|state| state.revoke(lease))
    }

    async fn expire(&self, now: Instant) -> Result<Vec<Lease>, StoreError> {
        self.ask(|state| Ok(state.expire(now)))
    }

    fn watch(&self, prefix: &str, from: u64) -> LocalWatch {
        LocalWatch::new(prefix.to_owned(), from, self.history.clone(), self.bell.subscribe())
    }
}
