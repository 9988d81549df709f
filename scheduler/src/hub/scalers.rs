//! Scaler lease: grants it to one spoke of a region ([`scheduler_api::scaler`]).
//!
//! The lease is a key under the lease of its holder, so the store ends both together. There is no queue: each spoke that
//! could hold it asks with every keep-alive, so a free lease is taken after one keep-alive interval. Its epoch is the
//! create revision of the key, within the epoch of the store.

use regions::RegionId;
use scheduler_api::keys;
use scheduler_api::scaler::{ScalerEpoch, ScalerLease};
use scheduler_store::{Compare, KeyValue, Lease, Op, Store, StoreError, Txn};

use super::records;
use crate::events::ScalerLeaseGranted;
use crate::respond::ErrorResponse;

/// Returns the scaler lease of a region, and grants it to the spoke `boot_id` under its `lease` if it is free.
pub(super) async fn acquire<S: Store>(
    store: &S,
    region: &RegionId,
    boot_id: u64,
    lease: Lease,
) -> Result<Option<ScalerLease>, ErrorResponse> {
    let key = keys::scaler(region);
    let found = store.get(&key).await?;
    let when = match &found {
        None => Compare::CreateRevision(key.clone(), 0),
        // The spoke has registered again: its present lease holds the key from now on, with the same epoch.
        Some(entry) if holder(entry) == Some(boot_id) && entry.lease != Some(lease) => {
            Compare::ModRevision(key.clone(), entry.mod_revision)
        }
        Some(_) => return current(store, found).await,
    };
    let value = format!("{boot_id:016x}").into_bytes();
    let then = vec![Op::Put { key: key.clone(), value, lease: Some(lease) }];
    let succeeded = store.txn(Txn { when: vec![when], then }).await?.succeeded;
    let granted = current(store, store.get(&key).await?).await?;
    if let Some(granted) = granted.filter(|_| succeeded && found.is_none()) {
        ScalerLeaseGranted { region, boot_id: granted.boot_id, epoch: granted.epoch }.emit();
    }
    Ok(granted)
}

/// Returns the scaler lease of a region.
pub(super) async fn get<S: Store>(
    store: &S,
    region: &RegionId,
) -> Result<Option<ScalerLease>, ErrorResponse> {
    current(store, store.get(&keys::scaler(region)).await?).await
}

/// Ends the scaler lease of a region if the spoke `boot_id` holds it.
pub(super) async fn release<S: Store>(store: &S, region: &RegionId, boot_id: u64) -> Result<(), StoreError> {
    let key = keys::scaler(region);
    let Some(entry) = store.get(&key).await?.filter(|entry| holder(entry) == Some(boot_id)) else {
        return Ok(());
    };
    let when = vec![Compare::CreateRevision(key.clone(), entry.create_revision)];
    // If the guard fails, the lease has ended by itself.
    store.txn(Txn { when, then: vec![Op::Delete { key }] }).await.map(drop)
}

/// Returns the lease of an entry; `None` without one, and for one that is unreadable.
async fn current<S: Store>(store: &S, entry: Option<KeyValue>) -> Result<Option<ScalerLease>, ErrorResponse> {
    let Some((boot_id, entry)) = entry.and_then(|entry| Some((holder(&entry)?, entry))) else {
        return Ok(None);
    };
    let epoch = store.get(keys::EPOCH).await?.map(|epoch| records::epoch(&epoch)).transpose()?;
    // A store without an epoch has had no leader yet.
    let epoch = ScalerEpoch { store: epoch.unwrap_or(0), revision: entry.create_revision };
    Ok(Some(ScalerLease { boot_id, epoch }))
}

/// Returns the spoke that holds the lease.
fn holder(entry: &KeyValue) -> Option<u64> {
    u64::from_str_radix(std::str::from_utf8(&entry.value).ok()?, 16).ok()
}
