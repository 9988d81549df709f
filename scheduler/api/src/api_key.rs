//! API keys that operators create: messages of `meridian key`, the stored record, and the keys of the route table.
//!
//! The hub never receives a key. `meridian key` draws it and sends its SHA-256.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use regions::TenantId;
use regions::tenant::{ApiKey, KeyDigest, MAX_CREATED_KEYS};
use serde::{Deserialize, Serialize};

use super::{MessageVersion, VERSION, WireError, entries, parsed};

/// Shortest validity of a key.
pub const VALIDITY_MIN: Duration = Duration::from_secs(1);
/// Longest validity of a key that expires: ten years.
pub const VALIDITY_MAX: Duration = Duration::from_secs(3650 * 86_400);
/// Maximum bytes of the name and of the owner of a key.
pub const LABEL_BYTES_MAX: usize = 128;
/// Number of hexadecimal digits of the digest that identify a key.
const ID_DIGITS: usize = 16;

/// `POST /v1/keys`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CreateKeyV1 {
    /// Version of the message.
    pub version: MessageVersion,
    /// Tenant that the key authenticates.
    pub tenant: String,
    /// SHA-256 of the key, in hexadecimal digits.
    pub key_sha256: String,
    /// Name, unique among the keys of the tenant.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Person or team that has the key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    /// Validity in seconds; absent if the key does not expire.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_in_s: Option<u64>,
}

/// Created key; also the response to [`CreateKeyV1`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CreatedKeyV1 {
    /// Identifier: the first 16 digits of its SHA-256.
    pub id: String,
    /// Tenant that it authenticates.
    pub tenant: String,
    /// SHA-256 of the key, in hexadecimal digits.
    pub key_sha256: String,
    /// Name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Person or team that has the key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    /// Time of its creation, in seconds since 1970.
    pub created_at: u64,
    /// Time from which on it is rejected, in seconds since 1970; absent if it does not expire.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_at: Option<u64>,
}

/// All created keys: the response of `GET /v1/keys`; also the stored record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CreatedKeysV1 {
    /// Version of the message.
    pub version: MessageVersion,
    /// The keys.
    pub keys: Vec<CreatedKeyV1>,
}

/// Created key in the route table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TableKeyV1 {
    /// Tenant that it authenticates.
    pub tenant: String,
    /// SHA-256 of the key, in hexadecimal digits.
    pub key_sha256: String,
    /// Time from which on it is rejected, in seconds since 1970; absent if it does not expire.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_at: Option<u64>,
}

/// Created key, as the hub stores it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CreatedKey {
    /// Tenant and expiry.
    pub key: ApiKey,
    /// Name, unique among the keys of the tenant.
    pub name: Option<String>,
    /// Person or team that has the key.
    pub owner: Option<String>,
    /// Time of its creation, in seconds since 1970.
    pub created_at: u64,
}

/// Created keys by digest.
pub type CreatedKeys = BTreeMap<KeyDigest, CreatedKey>;

/// Returns the identifier of a key.
pub fn id(digest: &KeyDigest) -> String {
    let mut id = digest.to_string();
    id.truncate(ID_DIGITS);
    id
}

/// Parses the name or the owner of a key.
///
/// # Errors
///
/// If it is empty, too long, or has control characters.
pub fn label(field: &str, text: Option<String>) -> Result<Option<String>, WireError> {
    let Some(text) = text else { return Ok(None) };
    if text.is_empty() || text.len() > LABEL_BYTES_MAX || text.chars().any(char::is_control) {
        let problem = format!("write 1 to {LABEL_BYTES_MAX} bytes without control characters");
        return Err(WireError::new(field, problem));
    }
    Ok(Some(text))
}

/// Returns the message of one key.
pub fn created_v1(digest: &KeyDigest, created: &CreatedKey) -> CreatedKeyV1 {
    let CreatedKey { key: ApiKey { tenant, expires_at }, name, owner, created_at } = created;
    CreatedKeyV1 {
        id: id(digest),
        tenant: tenant.to_string(),
        key_sha256: digest.to_string(),
        name: name.clone(),
        owner: owner.clone(),
        created_at: *created_at,
        expires_at: *expires_at,
    }
}

impl From<&CreatedKeys> for CreatedKeysV1 {
    fn from(keys: &CreatedKeys) -> CreatedKeysV1 {
        let keys = keys.iter().map(|(digest, created)| created_v1(digest, created));
        CreatedKeysV1 { version: VERSION, keys: keys.collect() }
    }
}

impl TryFrom<CreatedKeysV1> for CreatedKeys {
    type Error = WireError;

    fn try_from(wire: CreatedKeysV1) -> Result<CreatedKeys, WireError> {
        let CreatedKeysV1 { version: _, keys } = wire;
        let mut ids = BTreeSet::new();
        entries("keys", ".key_sha256", keys, MAX_CREATED_KEYS, |at, key| {
            let CreatedKeyV1 { id: _, tenant, key_sha256, name, owner, created_at, expires_at } = key;
            let field = |field: &str| format!("{at}.{field}");
            let digest: KeyDigest = parsed(field("key_sha256"), &key_sha256)?;
            if !ids.insert(id(&digest)) {
                return Err(WireError::new(field("id"), "another key has this identifier"));
            }
            let key = ApiKey { tenant: parsed(field("tenant"), &tenant)?, expires_at };
            let (name, owner) = (label(&field("name"), name)?, label(&field("owner"), owner)?);
            Ok((digest, CreatedKey { key, name, owner, created_at }))
        })
    }
}

/// Returns the keys of a route table.
pub(super) fn table_keys_v1(keys: &BTreeMap<KeyDigest, ApiKey>) -> Vec<TableKeyV1> {
    let key = |(digest, ApiKey { tenant, expires_at }): (&KeyDigest, &ApiKey)| TableKeyV1 {
        tenant: tenant.to_string(),
        key_sha256: digest.to_string(),
        expires_at: *expires_at,
    };
    keys.iter().map(key).collect()
}

/// Parses the keys of a route table; each must belong to one of its tenants.
pub(super) fn read_table_keys<Rules>(
    keys: Vec<TableKeyV1>,
    known: &BTreeMap<TenantId, Rules>,
) -> Result<BTreeMap<KeyDigest, ApiKey>, WireError> {
    entries("api_keys", ".key_sha256", keys, MAX_CREATED_KEYS, |at, key| {
        let TableKeyV1 { tenant, key_sha256, expires_at } = key;
        let id: TenantId = parsed(format!("{at}.tenant"), &tenant)?;
        if !known.contains_key(&id) {
            return Err(WireError::new(format!("{at}.tenant"), format!("`{tenant}` is not in this table")));
        }
        Ok((parsed(format!("{at}.key_sha256"), &key_sha256)?, ApiKey { tenant: id, expires_at }))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn record() -> Value {
        let key = |digit: char| {
            json!({"id": "any", "tenant": "acme", "key_sha256": digit.to_string().repeat(64), "name": "ci",
                   "created_at": 5, "expires_at": 9})
        };
        json!({"version": 1, "keys": [key('a'), key('b')]})
    }

    fn read(record: Value) -> Result<CreatedKeys, WireError> {
        CreatedKeys::try_from(serde_json::from_value::<CreatedKeysV1>(record).unwrap())
    }

    #[test]
    fn created_keys_round_trip_and_have_the_beginning_of_their_digest_as_identifier() {
        let keys = read(record()).unwrap();
        let wire = CreatedKeysV1::from(&keys);
        assert_eq!(wire.keys[0].id, "a".repeat(16));
        assert_eq!(CreatedKeys::try_from(wire), Ok(keys));
    }

    #[test]
    fn invalid_keys_are_rejected_as_a_whole() {
        let check = |pointer: &str, value: Value, field: &str| {
            let mut record = record();
            *record.pointer_mut(pointer).unwrap() = value;
            assert_eq!(read(record).unwrap_err().field, field);
        };
        check("/keys/1/key_sha256", json!("a".repeat(64)), "keys[1].id");
        check("/keys/1/key_sha256", json!("s3cret"), "keys[1].key_sha256");
        check("/keys/1/key_sha256", json!("a".repeat(16) + &"c".repeat(48)), "keys[1].id");
        check("/keys/0/tenant", json!("a b"), "keys[0].tenant");
        check("/keys/0/name", json!(""), "keys[0].name");
        check("/keys/0/name", json!("a\nb"), "keys[0].name");
        check("/keys/0/name", json!("n".repeat(LABEL_BYTES_MAX + 1)), "keys[0].name");
        let one = record()["keys"][0].clone();
        check("/keys", json!(vec![one; MAX_CREATED_KEYS + 1]), "keys");
    }
}
