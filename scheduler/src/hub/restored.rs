//! Start of a hub whose etcd was restored from a snapshot: a new epoch.
//!
//! Gateways have newer tables than a restored store, and reject older ones: without a new epoch, a revoked API key would
//! stay in use until as many tables were published again. A hub that kept running notices that its store went back
//! ([`scheduler_core::hub::required_epoch`]); one that lost its disks cannot, so `meridian restore` marks its identity
//! folder. The hub deletes the join tokens for the same mark ([`super::pki::distrust_tokens`]).

use std::path::PathBuf;

use scheduler_api::keys;
use scheduler_core::hub::restored_epoch;
use scheduler_store::{Compare, Op, Store, StoreError, Txn};
use tokio::time::sleep;

use super::controller::STORE_RETRY_DELAY;
use super::pki::is_restored;
use super::{HubError, records};
use crate::events::{RestoredEpochBegun, StoreFailed};

/// Begins a new epoch if the hub with this identity folder was restored. `now` is the time since 1970 in seconds. Waits
/// for the store.
pub(super) async fn begin_epoch_if_restored<S: Store>(
    store: &S,
    folder: Option<PathBuf>,
    now: u64,
) -> Result<(), HubError> {
    let Some(folder) = folder else { return Ok(()) };
    if !is_restored(folder).await {
        return Ok(());
    }
    loop {
        match begin_epoch(store, now).await {
            Ok(Some(epoch)) => {
                RestoredEpochBegun { epoch }.emit();
                return Ok(());
            }
            // Another restored hub has begun one at the same time.
            Ok(None) => {}
            Err(HubError::Store(error)) if error != StoreError::Closed => {
                StoreFailed { error: &error }.emit();
            }
            Err(error) => return Err(error),
        }
        sleep(STORE_RETRY_DELAY).await;
    }
}

/// Begins an epoch that is later than the present one, and ends the term of a hub that leads in the present one. Returns
/// `None` if another hub has changed it.
async fn begin_epoch<S: Store>(store: &S, now: u64) -> Result<Option<u64>, HubError> {
    let entry = store.get(keys::EPOCH).await?;
    let present = entry.as_ref().map(records::epoch).transpose().map_err(HubError::Record)?;
    let epoch = restored_epoch(present.unwrap_or_default(), now);
    let at = entry.map_or(0, |entry| entry.mod_revision);
    let txn = Txn {
        when: vec![Compare::ModRevision(keys::EPOCH.to_owned(), at)],
        then: vec![
            Op::Put { key: keys::EPOCH.to_owned(), value: epoch.to_string().into_bytes(), lease: None },
            Op::Delete { key: keys::LEADER.to_owned() },
        ],
    };
    Ok(store.txn(txn).await?.succeeded.then_some(epoch))
}

#[cfg(test)]
mod tests {
    use super::super::pki::distrust_tokens;
    use super::*;
    use scheduler_store::SimStore;

    async fn epoch_of(store: &SimStore) -> Option<u64> {
        let entry = store.get(keys::EPOCH).await.unwrap()?;
        Some(records::epoch(&entry).unwrap())
    }

    #[tokio::test]
    async fn only_a_restored_hub_begins_an_epoch_which_is_later_than_that_of_the_store() {
        let (dir, store) = (tempfile::tempdir().unwrap(), SimStore::new());
        let begin = async |now| begin_epoch_if_restored(&store, Some(dir.path().to_owned()), now).await;
        begin(100).await.unwrap();
        assert_eq!(epoch_of(&store).await, None, "the hub was not restored");
        distrust_tokens(dir.path()).unwrap();
        for (now, expected) in [(100, 100), (90, 101), (200, 200)] {
            store.put(keys::LEADER, b"another".to_vec(), None).await.unwrap();
            begin(now).await.unwrap();
            assert_eq!(epoch_of(&store).await, Some(expected));
            assert_eq!(store.get(keys::LEADER).await.unwrap(), None, "the term of the former epoch is over");
        }
    }
}
