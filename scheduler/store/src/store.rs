//! What every store can do.
//!
//! Time is an argument where a lease begins or is kept alive, so that a test or a simulation passes as much of it as it
//! likes. etcd has a clock of its own and does not look at ours.
//!
//! Who leads is no question of its own here: a *term* is a key under a lease, which whoever comes first creates and
//! everybody else waits for. What the key is good for is the revision at which it was created: a write that is guarded by
//! it ([`Term::guard`]) fails from the moment on in which the term has ended, whether or not the one who writes has
//! noticed. etcd's own elections add a queue to that, which a handful of candidates does not need, and its lock says
//! nothing about writes at all.

use std::future::Future;
use std::time::{Duration, Instant};

use crate::model::{Compare, Event, KeyValue, Lease, Op, Range, StoreError, Txn, TxnOutcome, WatchError};

/// A store, as the hub uses it. Clones are handles of the same one.
///
/// Every call may fail with [`StoreError::Unavailable`] or [`StoreError::Closed`]; what else may be wrong is said with it.
pub trait Store: Clone + Send + Sync + 'static {
    /// What [`Store::watch`] gives.
    type Watch: Watch;

    /// The key, if it is there: as it is after everything that was answered to anybody before.
    fn get(&self, key: &str) -> impl Future<Output = Result<Option<KeyValue>, StoreError>> + Send;

    /// The keys that start with `prefix`, all of them at one revision.
    fn range(&self, prefix: &str) -> impl Future<Output = Result<Range, StoreError>> + Send;

    /// Carries out a transaction, if what it asks for holds.
    ///
    /// # Errors
    ///
    /// When it is malformed or names a lease that does not stand, in which case nothing is done. A store that is reached
    /// over a network may try twice: then the first try may be what made the guard of the second fail.
    fn txn(&self, txn: Txn) -> impl Future<Output = Result<TxnOutcome, StoreError>> + Send;

    /// The changes to keys that start with `prefix`, at the revision `from` and later.
    fn watch(&self, prefix: &str, from: u64) -> Self::Watch;

    /// A new lease, which ends after `ttl` unless it is kept alive.
    ///
    /// # Errors
    ///
    /// [`StoreError::TooManyLeases`].
    fn lease_grant(
        &self,
        ttl: Duration,
        now: Instant,
    ) -> impl Future<Output = Result<Lease, StoreError>> + Send;

    /// Gives a lease its whole time to live again, and says which keys go with it.
    ///
    /// # Errors
    ///
    /// [`StoreError::NoSuchLease`].
    fn lease_keep_alive(
        &self,
        lease: Lease,
        now: Instant,
    ) -> impl Future<Output = Result<Vec<String>, StoreError>> + Send;

    /// Ends a lease and takes its keys away.
    ///
    /// # Errors
    ///
    /// [`StoreError::NoSuchLease`].
    fn lease_revoke(&self, lease: Lease) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// Ends the leases that nobody has kept alive, and says which. Whoever owns the store calls this now and then; etcd
    /// does it by itself, and has nothing to say here.
    fn expire(&self, now: Instant) -> impl Future<Output = Result<Vec<Lease>, StoreError>> + Send;

    /// Gives a key a value, to go with `lease`. Returns the store's revision after it.
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

    /// Takes a key away, if it is there. Returns the store's revision after it.
    fn delete(&self, key: &str) -> impl Future<Output = Result<u64, StoreError>> + Send {
        let then = vec![Op::Delete { key: key.to_owned() }];
        async move { Ok(self.txn(Txn { when: Vec::new(), then }).await?.revision) }
    }

    /// Waits until nobody else has `key`, and takes it under `lease`, which is kept alive by whoever calls this. Whoever
    /// stops waiting and calls it again with the same lease finds a term that had begun meanwhile.
    ///
    /// # Errors
    ///
    /// As [`Store::txn`]; with [`StoreError::NoSuchLease`], when the lease has ended before the term began.
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
                // Whether that was done is read and not told: of two tries the first may have done it.
                let Range { entries, revision } = self.range(key).await?;
                let Some(holder) = entries.into_iter().find(|entry| entry.key == key) else { continue };
                if holder.lease == Some(lease) {
                    return Ok(Term { key: holder.key, created: holder.create_revision, lease });
                }
                ended(self.watch(key, revision + 1), key).await?;
            }
        }
    }
}

/// A watch: the changes under a prefix, from a revision on, in order and without a gap.
pub trait Watch: Send {
    /// Waits for changes and returns all there are, at least one. Dropping the future loses none.
    ///
    /// # Errors
    ///
    /// When there is a gap: some changes that it was to return are no longer known. Every later call says so too.
    fn next(&mut self) -> impl Future<Output = Result<Vec<Event>, WatchError>> + Send;
}

/// The right to write as the leader, for as long as it lasts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Term {
    /// The key that whoever leads has.
    pub key: String,
    /// The revision at which it was created for this term.
    pub created: u64,
    /// The lease with which the term ends.
    pub lease: Lease,
}

impl Term {
    /// What a write of this term is to be guarded by: that the term has not ended.
    pub fn guard(&self) -> Compare {
        Compare::CreateRevision(self.key.clone(), self.created)
    }
}

/// Waits until the key may be gone.
async fn ended(mut watch: impl Watch, key: &str) -> Result<(), StoreError> {
    loop {
        match watch.next().await {
            Ok(events) => {
                let gone =
                    |event: &Event| matches!(event, Event::Delete { key: deleted, .. } if deleted == key);
                if events.iter().any(gone) {
                    return Ok(());
                }
            }
            Err(WatchError::Compacted { .. } | WatchError::FromTheFuture { .. }) => return Ok(()),
            Err(WatchError::Closed) => return Err(StoreError::Closed),
        }
    }
}
