//! Registering, keeping alive, leaving: what each does to the store, and what goes back: the lease, and how many replicas
//! the plan wants kept.
//!
//! A spoke is one key under one lease. Whoever asks is answered when the store has it on disk; the route table follows
//! a moment later, when the keeper sees the change.

use std::collections::BTreeSet;
use std::time::Instant;

use regions::{DeploymentName, RegionId};
use scheduler_core::plan::capacity::Capacity;
use scheduler_core::publish::unknown;
use scheduler_core::registry::{Registration, SPOKES_PER_REGION_MAX};
use scheduler_core::wire::registry::{LeaseV1, RegisterV1};
use scheduler_core::wire::{self, keys};
use scheduler_store::{Compare, KeyValue, Lease, Op, Store, StoreError, Txn};

use super::http::Desk;
use super::records;
use crate::events::SpokeRegistered;
use crate::respond::{Code, Refusal};

/// Registers a spoke under a new lease.
pub(super) async fn register<S: Store>(
    desk: &Desk<S>,
    registration: Registration,
) -> Result<LeaseV1, Refusal> {
    let Registration { region, endpoint, boot_id, deployments, capacity: _ } = &registration;
    known(desk, region)?;
    let key = keys::spoke(region, *boot_id);
    let standing = desk.store.range(&keys::spokes_of(region)).await.map_err(refusal)?.entries;
    let before = standing.iter().find(|entry| entry.key == key);
    if before.is_none() && standing.len() >= SPOKES_PER_REGION_MAX {
        let message = format!(
            "{region} has {SPOKES_PER_REGION_MAX} spokes already; stop some, or wait until their leases have ended."
        );
        return Err(Refusal::new(Code::Overloaded, message).of("region"));
    }
    let lease = desk.store.lease_grant(desk.lease_ttl, Instant::now()).await.map_err(refusal)?;
    let value = records::packed(&RegisterV1::from(&registration));
    desk.store.put(&key, value, Some(lease)).await.map_err(refusal)?;
    if let Some(orphan) = before.and_then(|entry| entry.lease) {
        // It holds no key any longer; if this fails, it runs out.
        desk.store.lease_revoke(orphan).await.ok();
    }
    SpokeRegistered { region, boot_id: *boot_id, endpoint: *endpoint, lease: lease.0 }.emit();
    Ok(granted(desk, lease, region, deployments))
}

/// Keeps a spoke's lease alive, and notes what is ready and what the region can do, where that is news.
pub(super) async fn keep_alive<S: Store>(
    desk: &Desk<S>,
    lease: Lease,
    ready: BTreeSet<DeploymentName>,
    capacity: Capacity,
) -> Result<LeaseV1, Refusal> {
    let key = key_under(desk, lease).await?;
    let entry = desk.store.get(&key).await.map_err(refusal)?;
    let entry = entry.ok_or_else(|| refusal(StoreError::NoSuchLease(lease)))?;
    let region = note(desk, entry, lease, &ready, capacity).await?;
    Ok(granted(desk, lease, &region, &ready))
}

/// Notes what is news of a spoke, and says whose it is.
async fn note<S: Store>(
    desk: &Desk<S>,
    entry: KeyValue,
    lease: Lease,
    ready: &BTreeSet<DeploymentName>,
    capacity: Capacity,
) -> Result<RegionId, Refusal> {
    let unreadable = |error: records::RecordError| Refusal::new(Code::StoreUnavailable, error.to_string());
    let mut registration = records::standing(&entry).map_err(unreadable)?.registration;
    let region = registration.region.clone();
    if registration.deployments == *ready && capacity.is_like(&registration.capacity) {
        return Ok(region);
    }
    registration.deployments.clone_from(ready);
    registration.capacity = capacity;
    let value = records::packed(&RegisterV1::from(&registration));
    let KeyValue { key, mod_revision, .. } = entry;
    let when = vec![Compare::ModRevision(key.clone(), mod_revision)];
    let then = vec![Op::Put { key: key.clone(), value: value.clone(), lease: Some(lease) }];
    if desk.store.txn(Txn { when, then }).await.map_err(refusal)?.succeeded {
        return Ok(region);
    }
    // Either it was written at the first try and the store was asked twice, or the spoke has registered again in this
    // very moment; then the newer word stands.
    let now = desk.store.get(&key).await.map_err(refusal)?;
    let written = now.is_some_and(|now| now.lease == Some(lease) && *now.value == *value);
    if written { Ok(region) } else { Err(refusal(StoreError::NoSuchLease(lease))) }
}

/// Ends a spoke's lease.
pub(super) async fn leave<S: Store>(desk: &Desk<S>, lease: Lease) -> Result<(), Refusal> {
    key_under(desk, lease).await?;
    desk.store.lease_revoke(lease).await.map_err(refusal)
}

/// The key of the spoke whose lease this is, which has its whole time again. One without a key is that of a spoke that has
/// registered again since; and one with another's key is no spoke's: a store counts its leases from one, so the number that
/// a spoke has from another store is that of whoever came first on this one, a hub or a reader.
async fn key_under<S: Store>(desk: &Desk<S>, lease: Lease) -> Result<String, Refusal> {
    let held = desk.store.lease_keep_alive(lease, Instant::now()).await.map_err(refusal)?;
    let key = held.into_iter().find(|key| key.starts_with(keys::SPOKES));
    key.ok_or_else(|| refusal(StoreError::NoSuchLease(lease)))
}

/// Refuses a region that is not in the catalogue, and says which may have been meant.
pub(super) fn known<S>(desk: &Desk<S>, region: &RegionId) -> Result<(), Refusal> {
    if desk.catalogue.get(region).is_some() {
        return Ok(());
    }
    let near = desk.catalogue.nearest_names(region.as_str());
    let hint = if near.is_empty() { String::new() } else { format!("; perhaps {}", near.join(" or ")) };
    let message = format!("`region`: {region} is not in the hub's catalogue{hint}.");
    Err(Refusal::new(Code::InvalidValue, message).of("region"))
}

fn granted<S>(desk: &Desk<S>, lease: Lease, region: &RegionId, ready: &BTreeSet<DeploymentName>) -> LeaseV1 {
    let current = desk.current.borrow();
    // Before the first table nothing is known to be unknown.
    let names = current.iter().flat_map(|published| unknown(ready, &published.table.deployments));
    LeaseV1 {
        version: wire::VERSION,
        lease: lease.0,
        ttl_ms: u64::try_from(desk.lease_ttl.as_millis()).unwrap_or(u64::MAX),
        unknown: names.map(DeploymentName::to_string).collect(),
        floors: desk.plans.floors(region),
    }
}

/// What the store refuses, in the words of HTTP.
pub(super) fn refusal(error: StoreError) -> Refusal {
    let code = match &error {
        StoreError::NoSuchLease(_) => Code::LeaseNotFound,
        StoreError::TooManyLeases => Code::Overloaded,
        StoreError::TooLarge(_) => Code::BodyTooLarge,
        StoreError::TooManyOps(_)
        | StoreError::DuplicateKey(_)
        | StoreError::Unavailable(_)
        | StoreError::Closed => Code::StoreUnavailable,
    };
    match code {
        Code::LeaseNotFound => Refusal::new(code, format!("{error}; register again.")).of("lease"),
        _ => Refusal::new(code, error.to_string()),
    }
}
