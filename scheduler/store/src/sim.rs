//! Store in memory for tests and simulations: the embedded store without its disk, thread and clock.
//!
//! It uses the same `state` and `history`, so it behaves the same; in addition it can fail as etcd does: be
//! unavailable, compact its history, be restored to an older snapshot. The same calls in the same order give the same
//! results; only watches wait.

use std::sync::Arc;
use std::time::{Duration, Instant};
use supervision::{Mutex, MutexGuard};

use tokio::sync::watch;

use crate::history::History;
use crate::local_watch::LocalWatch;
use crate::model::{KeyRange, KeyValue, Lease, Page, PageContent, Range, StoreError, Txn, TxnOutcome};
use crate::state::State;
use crate::store::Store;

/// Simulated store. Clones are handles of the same store.
#[derive(Clone, Debug)]
pub struct SimStore {
    inner: Arc<Mutex<Inner>>,
    history: Arc<Mutex<History>>,
    notify: watch::Sender<()>,
}

#[derive(Debug)]
struct Inner {
    state: State,
    unavailable: bool,
}

/// Copy of a simulated store's state.
#[derive(Clone, Debug)]
pub struct SimSnapshot(State);

impl SimStore {
    /// Creates an empty store.
    #[expect(clippy::new_without_default, reason = "a store is created explicitly")]
    pub fn new() -> SimStore {
        let inner = Inner { state: State::default(), unavailable: false };
        let (notify, _) = watch::channel(());
        SimStore {
            inner: Arc::new(Mutex::new(inner)),
            history: Arc::new(Mutex::new(History::starting_at(0))),
            notify,
        }
    }

    /// Makes every call fail, or no call.
    pub fn set_unavailable(&self, unavailable: bool) {
        self.inner().unavailable = unavailable;
    }

    /// Discards the history, as etcd does at a compaction.
    pub fn compact(&self) {
        let revision = self.inner().state.revision;
        self.reset_history(revision);
    }

    /// Returns a copy of the state.
    pub fn snapshot(&self) -> SimSnapshot {
        SimSnapshot(self.inner().state.clone())
    }

    /// Restores a copy; its leases have their whole time to live from `now` on, as after a change of etcd's leader.
    pub fn restore(&self, snapshot: SimSnapshot, now: Instant) {
        let mut inner = self.inner();
        inner.state = snapshot.0;
        inner.state.renew_all(now);
        let revision = inner.state.revision;
        drop(inner);
        self.reset_history(revision);
    }

    fn reset_history(&self, revision: u64) {
        *self.history.lock() = History::starting_at(revision);
        self.notify.send_replace(());
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock()
    }

    fn execute<T>(&self, work: impl FnOnce(&mut State) -> Result<T, StoreError>) -> Result<T, StoreError> {
        let mut inner = self.inner();
        if inner.unavailable {
            return Err(StoreError::Unavailable("simulated failure".to_owned()));
        }
        let result = work(&mut inner.state);
        let changes = inner.state.take_changes();
        if !changes.events.is_empty() {
            let mut history = self.history.lock();
            changes.events.into_iter().for_each(|events| history.push(events));
            drop(history);
            self.notify.send_replace(());
        }
        result
    }
}

impl Store for SimStore {
    type Watch = LocalWatch;

    async fn get(&self, key: &str) -> Result<Option<KeyValue>, StoreError> {
        self.execute(|state| Ok(state.get(key)))
    }

    async fn range(&self, keys: impl Into<KeyRange> + Send) -> Result<Range, StoreError> {
        let keys = keys.into();
        self.execute(|state| Ok(state.range(&keys)))
    }

    async fn page(&self, keys: KeyRange, limit: usize, content: PageContent) -> Result<Page, StoreError> {
        self.execute(|state| Ok(state.page(&keys, limit, content)))
    }

    async fn txn(&self, txn: Txn) -> Result<TxnOutcome, StoreError> {
        self.execute(|state| state.txn(txn))
    }

    async fn lease_grant(&self, ttl: Duration, now: Instant) -> Result<Lease, StoreError> {
        self.execute(|state| state.grant(ttl, now))
    }

    async fn lease_keep_alive(&self, lease: Lease, now: Instant) -> Result<Vec<String>, StoreError> {
        self.execute(|state| state.keep_alive(lease, now))
    }

    async fn lease_revoke(&self, lease: Lease) -> Result<(), StoreError> {
        self.execute(|state| state.revoke(lease))
    }

    async fn expire(&self, now: Instant) -> Result<Vec<Lease>, StoreError> {
        self.execute(|state| Ok(state.expire(now)))
    }

    fn watch(&self, keys: impl Into<KeyRange>, from: u64) -> LocalWatch {
        LocalWatch::new(keys.into(), from, self.history.clone(), self.notify.subscribe())
    }
}
