//! Registering, keeping alive, leaving: what each does to the store, and what goes back: the lease, and how many replicas
//! the plan wants kept.
//!
//! A spoke is one key under one lease. Whoever asks is answered when the store has it on disk; the route table follows
//! a moment later, when the keeper sees the change.

use std::collections::BTreeSet;
use std::time::Instant;

use regions::{DeploymentName, RegionId};
use scheduler_core::lease::{LeaseHolder, LeaseId};
use scheduler_core::publish::unknown;
use scheduler_core::registry::{Registration, SPOKES_PER_REGION_MAX};
use scheduler_core::wire::registry::{LeaseV1, RegionState, RegisterV1};
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
    let Registration { region, endpoint, boot_id, deployments, capacity: _, models: _ } = &registration;
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
    let id = LeaseId::from_random(rand::random());
    let holder = LeaseHolder { region: region.clone(), boot_id: *boot_id };
    let put = |key: String, value: Vec<u8>| Op::Put { key, value, lease: Some(lease) };
    let then = vec![
        put(key, records::packed(&RegisterV1::from(&registration))),
        put(keys::lease(&holder), id.to_string().into_bytes()),
    ];
    desk.store.txn(Txn { when: Vec::new(), then }).await.map_err(refusal)?;
    if let Some(orphan) = before.and_then(|entry| entry.lease) {
        // It holds no key any longer; if this fails, it runs out.
        desk.store.lease_revoke(orphan).await.ok();
    }
    SpokeRegistered { region, boot_id: *boot_id, endpoint: *endpoint, lease: lease.0 }.emit();
    Ok(granted(desk, id, region, deployments))
}

/// Keeps a spoke's lease alive, and notes what it says of its region, where that is news.
pub(super) async fn keep_alive<S: Store>(
    desk: &Desk<S>,
    id: LeaseId,
    holder: &LeaseHolder,
    state: RegionState,
) -> Result<LeaseV1, Refusal> {
    let lease = lease_of(desk, id, holder).await?;
    desk.store.lease_keep_alive(lease, Instant::now()).await.map_err(refusal)?;
    let entry = desk.store.get(&keys::spoke(&holder.region, holder.boot_id)).await.map_err(refusal)?;
    let entry = entry.filter(|entry| entry.lease == Some(lease)).ok_or_else(ended)?;
    let ready = state.deployments.clone();
    let region = note(desk, entry, lease, state).await?;
    Ok(granted(desk, id, &region, &ready))
}

/// Notes what is news of a spoke, and says whose it is.
async fn note<S: Store>(
    desk: &Desk<S>,
    entry: KeyValue,
    lease: Lease,
    state: RegionState,
) -> Result<RegionId, Refusal> {
    let unreadable = |error: records::RecordError| Refusal::new(Code::StoreUnavailable, error.to_string());
    let mut registration = records::standing(&entry).map_err(unreadable)?.registration;
    let region = registration.region.clone();
    let RegionState { deployments, capacity, models } = state;
    let same = registration.deployments == deployments && registration.models == models;
    if same && capacity.is_similar_to(&registration.capacity) {
        return Ok(region);
    }
    (registration.deployments, registration.capacity) = (deployments, capacity);
    registration.models = models;
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
pub(super) async fn leave<S: Store>(
    desk: &Desk<S>,
    id: LeaseId,
    holder: &LeaseHolder,
) -> Result<(), Refusal> {
    let lease = lease_of(desk, id, holder).await?;
    desk.store.lease_revoke(lease).await.map_err(refusal)
}

/// The store's lease of this spoke instance, if `id` is the identifier that it was given. The answer is the same whether the
/// instance is unknown, has registered again since, or is another one.
async fn lease_of<S: Store>(desk: &Desk<S>, id: LeaseId, holder: &LeaseHolder) -> Result<Lease, Refusal> {
    let entry = desk.store.get(&keys::lease(holder)).await.map_err(refusal)?;
    let lease = entry.and_then(|entry| {
        let given = std::str::from_utf8(&entry.value).ok()?.parse::<LeaseId>().ok()?;
        entry.lease.filter(|_| given.matches(id))
    });
    lease.ok_or_else(ended)
}

fn ended() -> Refusal {
    let message = "This instance holds no such lease, or it has ended; register again.";
    Refusal::new(Code::LeaseNotFound, message).of("lease")
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

fn granted<S>(
    desk: &Desk<S>,
    lease: LeaseId,
    region: &RegionId,
    ready: &BTreeSet<DeploymentName>,
) -> LeaseV1 {
    let current = desk.current.borrow();
    // Before the first table nothing is known to be unknown.
    let names = current.iter().flat_map(|published| unknown(ready, &published.table.deployments));
    LeaseV1 {
        version: wire::VERSION,
        lease: lease.to_string(),
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
