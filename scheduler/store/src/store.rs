//! Interface of every store.
//!
//! Time is an argument where a lease is granted or kept alive, so that tests and simulations control it. etcd uses its
//! own clock and ignores the argument.
//!
//! Leader election needs no further operation: a *term* is a key under a lease, created by the first candidate while
//! the others wait. A write guarded by the key's create revision ([`Term::guard`]) fails as soon as the term has ended,
//! whether or not the writer has noticed. etcd's own elections add a queue, which a few candidates do not need, and its
//! lock does not guard writes.

use std::future::Future;
use std::time::{Duration, Instant};

use crate::model::{
    Compare, Event, KeyRange, KeyValue, Lease, Op, Page, PageContent, Range, StoreError, Txn, TxnOutcome,
    WatchError,
};

/// Store of the hub. Clones are handles of the same store.
///
/// Every call may fail with [`StoreError::Unavailable`] or [`StoreError::Closed`]; further errors are listed with it.
pub trait Store: Clone + Send + Sync + 'static {
    /// Type returned by [`Store::watch`].
    type Watch: Watch;

    /// Returns the key, if it exists. The read is linearisable.
    fn get(&self, key: &str) -> impl Future<Output = Result<Option<KeyValue>, StoreError>> + Send;

    /// Returns all of these keys, at one revision. The caller knows that they fit into one response; [`Store::page`] reads
    /// keys whose number has no such limit.
    fn range(
        &self,
        keys: impl Into<KeyRange> + Send,
    ) -> impl Future<Output = Result<Range, StoreError>> + Send;

    /// Returns the first `limit` of these keys, and the number of all.
    fn page(
        &self,
        keys: KeyRange,
        limit: usize,
        content: PageContent,
    ) -> impl Future<Output = Result<Page, StoreError>> + Send;

    /// Executes a transaction, if its guards hold.
    ///
    /// # Errors
    ///
    /// When it is malformed or names a lease that does not exist; then nothing is written. A store in a network may
    /// send it twice: then the first attempt may be the reason why a guard of the second one fails.
    fn txn(&self, txn: Txn) -> impl Future<Output = Result<TxnOutcome, StoreError>> + Send;

    /// Watches the changes to these keys, from the revision `from` on.
    fn watch(&self, keys: impl Into<KeyRange>, from: u64) -> Self::Watch;

    /// Grants a lease that expires after `ttl` unless it is kept alive.
    ///
    /// # Errors
    ///
    /// [`StoreError::TooManyLeases`].
    fn lease_grant(
        &self,
        ttl: Duration,
        now: Instant,
    ) -> impl Future<Output = Result<Lease, StoreError>> + Send;

    /// Renews a lease to its whole time to live, and returns its keys.
    ///
    /// # Errors
    ///
    /// [`StoreError::NoSuchLease`].
    fn lease_keep_alive(
        &self,
        lease: Lease,
        now: Instant,
    ) -> impl Future<Output = Result<Vec<String>, StoreError>> + Send;

    /// Revokes a lease and deletes its keys.
    ///
    /// # Errors
    ///
    /// [`StoreError::NoSuchLease`].
    fn lease_revoke(&self, lease: Lease) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// Expires the leases that were not kept alive, and returns them. The owner of the store calls this periodically;
    /// etcd expires leases by itself, and returns an empty list.
    fn expire(&self, now: Instant) -> impl Future<Output = Result<Vec<Lease>, StoreError>> + Send;

    /// Puts a key, attached to `lease`. Returns the store's revision after it.
    ///
    /// # Errors
    ///
    /// As [`Store::txn`].
    fn put(
        &self,
        key: &str,
        value: Vec<u8>,
        lease: Option<Lease>,
    ) -> impl Future<Output = Result<u64, StoreError>> + Send {
        let then = vec![Op::Put { key: key.to_owned(), value, lease }];
        async move { Ok(self.txn(Txn { when: Vec::new(), then }).await?.revision) }
    }

    /// Deletes a key, if it exists. Returns the store's revision after it.
    fn delete(&self, key: &str) -> impl Future<Output = Result<u64, StoreError>> + Send {
        let then = vec![Op::Delete { key: key.to_owned() }];
        async move { Ok(self.txn(Txn { when: Vec::new(), then }).await?.revision) }
    }

    /// Waits until `key` does not exist, and creates it under `lease`, which the caller keeps alive. If the future is
    /// dropped and the method called again with the same lease, a term that began meanwhile is found.
    ///
    /// # Errors
    ///
    /// As [`Store::txn`]; with [`StoreError::NoSuchLease`] if the lease ended before the term began.
    fn campaign(
        &self,
        key: &str,
        value: Vec<u8>,
        lease: Lease,
    ) -> impl Future<Output = Result<Term, StoreError>> + Send {
        async move {
            loop {
                let when = vec![Compare::CreateRevision(key.to_owned(), 0)];
                let then = vec![Op::Put { key: key.to_owned(), value: value.clone(), lease: Some(lease) }];
                self.txn(Txn { when, then }).await?;
                // The result is read, not taken from the response: of two attempts the first may have succeeded.
                let Range { entries, revision } = self.range(key).await?;
                let Some(holder) = entries.into_iter().find(|entry| entry.key == key) else { continue };
                if holder.lease == Some(lease) {
                    return Ok(Term { key: holder.key, created: holder.create_revision, lease });
                }
                until_deleted(self.watch(key, revision + 1), key).await?;
            }
        }
    }
}

/// Watch: the changes to some keys, from a revision on, in order and without a gap.
pub trait Watch: Send {
    /// Waits for changes and returns all available ones, at least one. Dropping the future loses none.
    ///
    /// # Errors
    ///
    /// When there is a gap, because some of the changes are no longer stored. Every later call returns the same error.
    fn next(&mut self) -> impl Future<Output = Result<Vec<Event>, WatchError>> + Send;
}

/// Right to write as the leader, while the term lasts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Term {
    /// Key of the leader.
    pub key: String,
    /// Revision at which the key was created for this term.
    pub created: u64,
    /// Lease whose end is the end of the term.
    pub lease: Lease,
}

impl Term {
    /// Returns the guard for writes of this term, which fails once the term has ended.
    pub fn guard(&self) -> Compare {
        Compare::CreateRevision(self.key.clone(), self.created)
    }
}

/// Waits until the key may have been deleted.
async fn until_deleted(mut watch: impl Watch, key: &str) -> Result<(), StoreError> {
    loop {
        match watch.next().await {
            Ok(events) => {
                let gone =
                    |event: &Event| matches!(event, Event::Delete { key: deleted, .. } if deleted == key);
                if events.iter().any(gone) {
                    return Ok(());
                }
            }
            Err(WatchError::Compacted { .. } | WatchError::FutureRevision { .. }) => return Ok(()),
            Err(WatchError::Closed) => return Err(StoreError::Closed),
        }
    }
}
