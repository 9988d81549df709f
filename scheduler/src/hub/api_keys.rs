//! `meridian key`: creates, lists and revokes API keys, of which the hub stores the SHA-256.
//!
//! All created keys are one record, like the tenants. Every write is guarded by the revisions that it is based on, and is
//! repeated if another operator was faster. The leader publishes the keys with the tenants; keys of a tenant that is not
//! applied stay in the record and are not published.

use std::collections::BTreeMap;
use std::time::SystemTime;

use axum::Json;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use regions::tenant::{ApiKey, KeyDigest, MAX_CREATED_KEYS, MAX_CREATED_KEYS_PER_TENANT};
use regions::{TenantId, TenantRules};
use replica_api::error::ErrorCode;
use scheduler_api::api_key::{
    self, CreateKeyV1, CreatedKey, CreatedKeyV1, CreatedKeys, CreatedKeysV1, VALIDITY_MAX, VALIDITY_MIN,
    created_v1,
};
use scheduler_api::error::HubErrorCode;
use scheduler_api::{keys, parsed};
use scheduler_store::{Compare, Op, Store, Txn};

use super::api::{Body, HubApi, json};
use super::records;
use crate::events::{ApiKeyCreated, ApiKeyRevoked};
use crate::respond::{Code, ErrorResponse};

/// Attempts of a write if other operators write at the same time.
const ATTEMPTS_MAX: usize = 5;

/// Records that a change of keys is based on.
struct StoredKeys {
    keys: CreatedKeys,
    revision: u64,
    tenants: BTreeMap<TenantId, TenantRules>,
    tenants_revision: u64,
}

impl StoredKeys {
    async fn read<S: Store>(store: &S) -> Result<StoredKeys, ErrorResponse> {
        let (keys, tenants) = (store.get(keys::CREATED_KEYS).await?, store.get(keys::TENANTS).await?);
        let revision =
            |entry: &Option<scheduler_store::KeyValue>| entry.as_ref().map_or(0, |it| it.mod_revision);
        let (revision, tenants_revision) = (revision(&keys), revision(&tenants));
        Ok(StoredKeys {
            keys: keys.as_ref().map(records::created_keys).transpose()?.unwrap_or_default(),
            revision,
            tenants: tenants.as_ref().map(records::tenants).transpose()?.unwrap_or_default(),
            tenants_revision,
        })
    }

    /// Writes the keys; returns whether the records were unchanged since they were read.
    async fn write<S: Store>(&self, store: &S) -> Result<bool, ErrorResponse> {
        let guard = |key: &str, revision| Compare::ModRevision(key.to_owned(), revision);
        let when =
            vec![guard(keys::CREATED_KEYS, self.revision), guard(keys::TENANTS, self.tenants_revision)];
        let value = records::packed(&CreatedKeysV1::from(&self.keys));
        let then = vec![Op::Put { key: keys::CREATED_KEYS.to_owned(), value, lease: None }];
        Ok(store.txn(Txn { when, then }).await?.succeeded)
    }

    /// Adds a key.
    fn add(&mut self, digest: KeyDigest, created: CreatedKey) -> Result<(), ErrorResponse> {
        let (id, tenant) = (api_key::id(&digest), &created.key.tenant);
        let invalid = |code: Code, field: &str, message: String| {
            Err(ErrorResponse::new(code, message).with_field(field))
        };
        if !self.tenants.contains_key(tenant) {
            let message = format!(
                "`tenant`: `{tenant}` is not an applied tenant; apply it with `meridian apply` first."
            );
            return invalid(ErrorCode::InvalidValue.into(), "tenant", message);
        }
        let is_used = self.tenants.values().any(|rules| rules.keys.contains(&digest));
        if is_used || self.keys.keys().any(|known| api_key::id(known) == id) {
            let message = "`key_sha256`: this key exists already; create another one.".to_owned();
            return invalid(HubErrorCode::Conflict.into(), "key_sha256", message);
        }
        let of_tenant: Vec<_> = self.keys.values().filter(|known| known.key.tenant == *tenant).collect();
        if let Some(name) =
            created.name.as_ref().filter(|_| of_tenant.iter().any(|known| known.name == created.name))
        {
            let message = format!(
                "`name`: `{tenant}` has a key `{name}` already; choose another name or revoke that key."
            );
            return invalid(HubErrorCode::Conflict.into(), "name", message);
        }
        let limits = [
            (of_tenant.len(), MAX_CREATED_KEYS_PER_TENANT, "this tenant has"),
            (self.keys.len(), MAX_CREATED_KEYS, "there are"),
        ];
        if let Some((_, max, which)) = limits.into_iter().find(|(count, max, _)| count >= max) {
            let message =
                format!("`tenant`: {which} {max} created keys, the maximum; revoke expired or unused ones.");
            return invalid(ErrorCode::Overloaded.into(), "tenant", message);
        }
        self.keys.insert(digest, created);
        Ok(())
    }
}

fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// Stores a key, by its digest.
pub(super) async fn create<S: Store>(
    State(api): State<HubApi<S>>,
    body: Body,
) -> Result<Json<CreatedKeyV1>, ErrorResponse> {
    let CreateKeyV1 { version: _, tenant, key_sha256, name, owner, expires_in_s } = json(body)?;
    let (tenant, digest): (TenantId, KeyDigest) =
        (parsed("tenant", &tenant)?, parsed("key_sha256", &key_sha256)?);
    let (name, owner) = (api_key::label("name", name)?, api_key::label("owner", owner)?);
    let (least, most) = (VALIDITY_MIN.as_secs(), VALIDITY_MAX.as_secs());
    if let Some(seconds) = expires_in_s.filter(|seconds| !(least..=most).contains(seconds)) {
        let message = format!("`expires_in_s`: {seconds} is out of range; write {least} to {most}.");
        return Err(ErrorResponse::new(ErrorCode::InvalidValue, message).with_field("expires_in_s"));
    }
    let created_at = unix_seconds();
    let expires_at = expires_in_s.map(|seconds| created_at.saturating_add(seconds));
    let created = CreatedKey { key: ApiKey { tenant, expires_at }, name, owner, created_at };
    for _ in 0..ATTEMPTS_MAX {
        let mut stored = StoredKeys::read(&api.store).await?;
        stored.add(digest, created.clone())?;
        if stored.write(&api.store).await? {
            let response = created_v1(&digest, &created);
            ApiKeyCreated { id: &response.id, tenant: &created.key.tenant }.emit();
            return Ok(Json(response));
        }
    }
    Err(busy())
}

/// Returns all keys, without their secrets.
pub(super) async fn list<S: Store>(
    State(api): State<HubApi<S>>,
) -> Result<Json<CreatedKeysV1>, ErrorResponse> {
    let stored = StoredKeys::read(&api.store).await?;
    Ok(Json(CreatedKeysV1::from(&stored.keys)))
}

/// Revokes a key.
pub(super) async fn revoke<S: Store>(
    State(api): State<HubApi<S>>,
    Path(id): Path<String>,
) -> Result<StatusCode, ErrorResponse> {
    for _ in 0..ATTEMPTS_MAX {
        let mut stored = StoredKeys::read(&api.store).await?;
        let Some(digest) = stored.keys.keys().find(|digest| api_key::id(digest) == id).copied() else {
            let message = "No created key has this identifier; it may have been revoked already. `meridian key list` \
                           shows all keys.";
            return Err(ErrorResponse::new(ErrorCode::NotFound, message).with_field("id"));
        };
        let revoked = stored.keys.remove(&digest);
        if stored.write(&api.store).await? {
            if let Some(revoked) = revoked {
                ApiKeyRevoked { id: &id, tenant: &revoked.key.tenant }.emit();
            }
            return Ok(StatusCode::NO_CONTENT);
        }
    }
    Err(busy())
}

fn busy() -> ErrorResponse {
    ErrorResponse::new(
        HubErrorCode::Conflict,
        "Keys or tenants are being changed by other operators; try again.",
    )
}
