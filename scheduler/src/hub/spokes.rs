//! Registration, keep-alive and deregistration of spokes: the writes to the store, and the response with the lease and
//! the replica floors of the plan.
//!
//! An instance name belongs to one spoke of its region at a time: a second one is rejected until the lease of the
//! first has ended, since gateways and operators would take the two for one.
//!
//! Of the spokes of a region that can start replicas, one holds the scaler lease ([`scalers`]).
//!
//! A spoke is one key under one lease. The response is sent when the store has the write on disk; the route table
//! follows shortly after, when the leader's watch delivers the change.

use std::collections::BTreeSet;
use std::time::Instant;

use axum::Json;
use axum::extract::{Path, RawQuery, State};
use axum::http::StatusCode;
use regions::{DeploymentName, RegionId};
use replica_api::error::ErrorCode;
use scheduler_api::error::HubErrorCode;
use scheduler_api::lease::{LeaseHolder, LeaseId};
use scheduler_api::registration::{KeepAliveV1, LeaseV1, RegionState, RegisterV1, Registration};
use scheduler_api::scaler::{ScalerLease, ScalerLeaseV1};
use scheduler_api::{VERSION, WireError, keys, parsed, paths};
use scheduler_core::plan::capacity::are_similar;
use scheduler_core::publish::unknown;
use scheduler_core::registry::SPOKES_PER_REGION_MAX;
use scheduler_store::{Compare, KeyValue, Lease, Op, Store, StoreError, Txn};

use super::access::Caller;
use super::api::{Body, HubApi, json};
use super::{records, scalers};
use crate::events::SpokeRegistered;
use crate::respond::ErrorResponse;

/// Registers a spoke under a new lease.
pub(super) async fn register<S: Store>(
    State(api): State<HubApi<S>>,
    caller: Caller,
    body: Body,
) -> Result<Json<LeaseV1>, ErrorResponse> {
    let registration = Registration::try_from(json::<RegisterV1>(body)?)?;
    let Registration { region, instance, endpoint, boot_id, deployments, .. } = &registration;
    api.check_region(region)?;
    caller.check_region(&api, region, paths::SPOKES)?;
    let key = keys::spoke(region, *boot_id);
    let registered = api.store.range(&keys::spokes_of(region)).await?.entries;
    let before = registered.iter().find(|entry| entry.key == key);
    if before.is_none() && registered.len() >= SPOKES_PER_REGION_MAX {
        let message = format!(
            "{region} has the maximum of {SPOKES_PER_REGION_MAX} spokes; stop some, or wait until their leases expire."
        );
        return Err(ErrorResponse::new(ErrorCode::Overloaded, message).with_field("region"));
    }
    let name_key = keys::instance(region, instance);
    let name = api.store.get(&name_key).await?;
    let own_name = format!("{boot_id:016x}").into_bytes();
    if name.as_ref().is_some_and(|name| *name.value != *own_name) {
        return Err(instance_in_use(&registration));
    }
    let lease = api.store.lease_grant(api.lease_ttl, Instant::now()).await?;
    let id = LeaseId::from_random(rand::random());
    let holder = LeaseHolder { region: region.clone(), boot_id: *boot_id };
    let put = |key: String, value: Vec<u8>| Op::Put { key, value, lease: Some(lease) };
    let then = vec![
        put(key, records::packed(&RegisterV1::from(&registration))),
        put(keys::lease(&holder), id.to_string().into_bytes()),
        put(name_key.clone(), own_name),
    ];
    let when = vec![Compare::ModRevision(name_key, name.map_or(0, |name| name.mod_revision))];
    if !api.store.txn(Txn { when, then }).await?.succeeded {
        return Err(instance_in_use(&registration));
    }
    // Before the revocation of the previous lease, which may hold the scaler lease.
    let scaler = scaler_lease(&api, &registration, lease).await?;
    if let Some(previous) = before.and_then(|entry| entry.lease) {
        // It holds no key any more; if the revocation fails, it expires.
        api.store.lease_revoke(previous).await.ok();
    }
    SpokeRegistered { region, instance, boot_id: *boot_id, endpoint, lease: lease.0 }.emit();
    Ok(Json(lease_response(&api, id, region, deployments, scaler)))
}

/// Keeps a spoke's lease alive and writes the region state, if the spoke reports one that has changed.
pub(super) async fn keep_alive<S: Store>(
    State(api): State<HubApi<S>>,
    caller: Caller,
    Path(id): Path<String>,
    RawQuery(query): RawQuery,
    body: Body,
) -> Result<Json<LeaseV1>, ErrorResponse> {
    let (id, holder) = lease_and_holder(&id, query)?;
    caller.check_region(&api, &holder.region, paths::KEEP_ALIVE)?;
    let state = json::<KeepAliveV1>(body)?.state.map(RegionState::try_from).transpose()?;
    let lease = lease_of(&api, id, &holder).await?;
    api.store.lease_keep_alive(lease, Instant::now()).await?;
    let entry = api.store.get(&keys::spoke(&holder.region, holder.boot_id)).await?;
    let entry = entry.filter(|entry| entry.lease == Some(lease)).ok_or_else(lease_not_found)?;
    let registration = match state {
        Some(state) => update(&api, entry, lease, state).await?,
        None => records::spoke(&entry)?.registration,
    };
    let scaler = scaler_lease(&api, &registration, lease).await?;
    Ok(Json(lease_response(&api, id, &holder.region, &registration.deployments, scaler)))
}

/// Returns the scaler lease of a region. A spoke that can scale gets it if it is free; one that drains gives it up.
async fn scaler_lease<S: Store>(
    api: &HubApi<S>,
    Registration { region, boot_id, scales, draining, .. }: &Registration,
    lease: Lease,
) -> Result<Option<ScalerLease>, ErrorResponse> {
    if *scales && !*draining {
        return scalers::acquire(&api.store, region, *boot_id, lease).await;
    }
    if *scales {
        scalers::release(&api.store, region, *boot_id).await?;
    }
    scalers::get(&api.store, region).await
}

/// Writes the reported state of a spoke if it has changed. Returns the registration with this state.
async fn update<S: Store>(
    api: &HubApi<S>,
    entry: KeyValue,
    lease: Lease,
    state: RegionState,
) -> Result<Registration, ErrorResponse> {
    let mut registration = records::spoke(&entry)?.registration;
    let RegionState { deployments, capacity, models, failures, draining } = state;
    let same = registration.deployments == deployments
        && registration.models == models
        && registration.failures == failures
        && registration.draining == draining;
    if same && are_similar(&capacity, &registration.capacity) {
        return Ok(registration);
    }
    (registration.deployments, registration.capacity) = (deployments, capacity);
    (registration.models, registration.failures) = (models, failures);
    registration.draining = draining;
    let value = records::packed(&RegisterV1::from(&registration));
    let KeyValue { key, mod_revision, .. } = entry;
    let when = vec![Compare::ModRevision(key.clone(), mod_revision)];
    let then = vec![Op::Put { key: key.clone(), value: value.clone(), lease: Some(lease) }];
    if api.store.txn(Txn { when, then }).await?.succeeded {
        return Ok(registration);
    }
    // Either the first of two attempts of this transaction succeeded, or the spoke has registered again at the same
    // time; then the newer registration is kept.
    let now = api.store.get(&key).await?;
    let written = now.is_some_and(|now| now.lease == Some(lease) && *now.value == *value);
    if written { Ok(registration) } else { Err(StoreError::NoSuchLease(lease).into()) }
}

/// Deregisters a spoke: revokes its lease.
pub(super) async fn deregister<S: Store>(
    State(api): State<HubApi<S>>,
    caller: Caller,
    Path(id): Path<String>,
    RawQuery(query): RawQuery,
) -> Result<StatusCode, ErrorResponse> {
    let (id, holder) = lease_and_holder(&id, query)?;
    caller.check_region(&api, &holder.region, paths::LEASE)?;
    let lease = lease_of(&api, id, &holder).await?;
    api.store.lease_revoke(lease).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Parses the lease of a path and the holder of its query.
fn lease_and_holder(lease: &str, query: Option<String>) -> Result<(LeaseId, LeaseHolder), WireError> {
    Ok((parsed("lease", lease)?, paths::holder(&query.unwrap_or_default())?))
}

/// Returns the store's lease of this spoke instance, if `id` is the identifier that the instance was given. The error
/// is the same if the instance is unknown, has registered again since, or is another one.
async fn lease_of<S: Store>(
    api: &HubApi<S>,
    id: LeaseId,
    holder: &LeaseHolder,
) -> Result<Lease, ErrorResponse> {
    let entry = api.store.get(&keys::lease(holder)).await?;
    let lease = entry.and_then(|entry| {
        let given = std::str::from_utf8(&entry.value).ok()?.parse::<LeaseId>().ok()?;
        entry.lease.filter(|_| given.matches(id))
    });
    lease.ok_or_else(lease_not_found)
}

fn instance_in_use(Registration { region, instance, .. }: &Registration) -> ErrorResponse {
    let message = format!(
        "{region} has another spoke with the instance name {instance}; give each spoke of a region its own `instance`. If \
         the other one is this spoke before it was killed, the name is free when that lease has expired."
    );
    ErrorResponse::new(HubErrorCode::InstanceInUse, message).with_field("instance")
}

fn lease_not_found() -> ErrorResponse {
    let message = "This instance holds no such lease, or it has ended; register again.";
    ErrorResponse::new(HubErrorCode::LeaseNotFound, message).with_field("lease")
}

fn lease_response<S>(
    api: &HubApi<S>,
    lease: LeaseId,
    region: &RegionId,
    ready: &BTreeSet<DeploymentName>,
    scaler: Option<ScalerLease>,
) -> LeaseV1 {
    let current = api.current.borrow();
    // Before the first table, no deployment can be called unknown.
    let names = current.iter().flat_map(|published| unknown(ready, &published.table.deployments));
    LeaseV1 {
        version: VERSION,
        lease: lease.to_string(),
        ttl_ms: u64::try_from(api.lease_ttl.as_millis()).unwrap_or(u64::MAX),
        unknown: names.map(DeploymentName::to_string).collect(),
        floors: api.plans.floors(region),
        scaler: scaler.map(ScalerLeaseV1::from),
    }
}
