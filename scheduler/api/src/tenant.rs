//! Tenants, as the hub publishes them in its route table and stores the applied ones.
//!
//! As in a deployment, restricting fields are required: a missing residency or list of deployments is an error.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU64;

use serde::{Deserialize, Serialize};

use super::deployment::{parse_policy, policy_to_wire, required_option};
use super::{
    VERSION, WireError, known_version, names, parsed, reject_other_versions, reject_too_many, to_strings,
};
use regions::TenantId;
use regions::deployment::MAX_DEPLOYMENTS;
use regions::tenant::{KeyDigest, MAX_KEYS, MAX_TENANTS, MAX_WEIGHT, TenantLimits, TenantRules};

/// Tenant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TenantV1 {
    /// Name of the tenant.
    pub name: String,
    /// SHA-256 digests of its keys, in hexadecimal digits.
    pub key_sha256: Vec<String>,
    /// Issuer of its signed tokens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub issuer: Option<String>,
    /// Deployments that it may use; `null` allows all.
    #[serde(deserialize_with = "required_option")]
    pub deployments: Option<Vec<String>>,
    /// Allowed regions; `null` allows those of the deployment.
    #[serde(deserialize_with = "required_option")]
    pub residency: Option<String>,
    /// Its only priority; absent if it may use both.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub priority: Option<String>,
    /// Weight in fair sharing.
    pub weight: u32,
    /// Rate limits; absent where there is none.
    pub limits: TenantLimitsV1,
}

/// Rate limits of a tenant.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TenantLimitsV1 {
    /// Requests per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub requests_per_second: Option<NonZeroU64>,
    /// Inputs per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub inputs_per_second: Option<NonZeroU64>,
    /// Tokens per minute.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokens_per_minute: Option<NonZeroU64>,
}

/// Applied tenants, as stored; also the response of `GET /v1/tenants`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TenantsV1 {
    /// Version of the message: 1.
    #[serde(deserialize_with = "known_version")]
    pub version: u32,
    /// All tenants.
    pub tenants: Vec<TenantV1>,
}

impl From<&TenantRules> for TenantV1 {
    fn from(rules: &TenantRules) -> TenantV1 {
        let TenantRules { id, keys, issuer, deployments, residency, priority, weight, limits } = rules;
        let TenantLimits { requests_per_second, inputs_per_second, tokens_per_minute } = *limits;
        TenantV1 {
            name: id.to_string(),
            key_sha256: to_strings(keys),
            issuer: issuer.clone(),
            deployments: deployments.as_ref().map(to_strings),
            residency: policy_to_wire(residency),
            priority: priority.map(|priority| priority.as_str().to_owned()),
            weight: *weight,
            limits: TenantLimitsV1 { requests_per_second, inputs_per_second, tokens_per_minute },
        }
    }
}

fn read_tenant(what: &str, wire: TenantV1) -> Result<TenantRules, WireError> {
    let TenantV1 { name, key_sha256, issuer, deployments, residency, priority, weight, limits } = wire;
    let TenantLimitsV1 { requests_per_second, inputs_per_second, tokens_per_minute } = limits;
    let at = |field: &str| format!("{what}.{field}");
    reject_too_many(&at("key_sha256"), key_sha256.len(), MAX_KEYS)?;
    let key = |(index, text): (usize, &String)| parsed(format!("{what}.key_sha256[{index}]"), text);
    if !(1..=MAX_WEIGHT).contains(&weight) {
        return Err(WireError::new(
            at("weight"),
            format!("{weight} is out of range; write a weight from 1 to {MAX_WEIGHT}"),
        ));
    }
    if let Some(deployments) = &deployments {
        reject_too_many(&at("deployments"), deployments.len(), MAX_DEPLOYMENTS)?;
    }
    Ok(TenantRules {
        id: parsed(at("name"), &name)?,
        keys: key_sha256.iter().enumerate().map(key).collect::<Result<BTreeSet<KeyDigest>, _>>()?,
        issuer,
        deployments: deployments.map(|given| names(&at("deployments"), &given)).transpose()?,
        residency: parse_policy(&at("residency"), residency)?,
        priority: priority.map(|priority| parsed(at("priority"), &priority)).transpose()?,
        weight,
        limits: TenantLimits { requests_per_second, inputs_per_second, tokens_per_minute },
    })
}

/// Parses a list of distinct tenants with distinct keys.
pub(super) fn read_tenants(wire: Vec<TenantV1>) -> Result<BTreeMap<TenantId, TenantRules>, WireError> {
    reject_too_many("tenants", wire.len(), MAX_TENANTS)?;
    let (mut tenants, mut keys) = (BTreeMap::new(), BTreeSet::new());
    for (index, tenant) in wire.into_iter().enumerate() {
        let what = format!("tenants[{index}]");
        let tenant = read_tenant(&what, tenant)?;
        if !tenant.keys.iter().all(|key| keys.insert(*key)) {
            return Err(WireError::new(format!("{what}.key_sha256"), "another tenant has this key"));
        }
        let id = tenant.id.clone();
        if tenants.insert(id.clone(), tenant).is_some() {
            return Err(WireError::new(format!("{what}.name"), format!("`{id}` is listed twice")));
        }
    }
    Ok(tenants)
}

impl From<&BTreeMap<TenantId, TenantRules>> for TenantsV1 {
    fn from(tenants: &BTreeMap<TenantId, TenantRules>) -> TenantsV1 {
        TenantsV1 { version: VERSION, tenants: tenants.values().map(TenantV1::from).collect() }
    }
}

impl TryFrom<TenantsV1> for BTreeMap<TenantId, TenantRules> {
    type Error = WireError;

    fn try_from(wire: TenantsV1) -> Result<BTreeMap<TenantId, TenantRules>, WireError> {
        let TenantsV1 { version, tenants } = wire;
        reject_other_versions(version)?;
        read_tenants(tenants)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::any;
    use super::*;
    use proptest::collection::{btree_set, vec};
    use proptest::option;
    use proptest::prelude::*;
    use proptest::sample::select;
    use regions::Priority;
    use serde_json::{Value, json};

    prop_compose! {
        pub(crate) fn tenant()(
            id in "[a-z0-9._-]{1,32}",
            keys in btree_set(any::<[u8; 32]>(), 0..3),
            issuer in option::of("https://[a-z]{1,8}/"),
            deployments in option::of(any::names()),
            residency in select(vec!["anywhere", "eu", "de,fr & eu"]),
            priority in option::of(select(vec![Priority::Interactive, Priority::Bulk])),
            weight in 1..=MAX_WEIGHT,
            tokens in any::<u64>(),
        ) -> TenantRules {
            let limits = TenantLimits { tokens_per_minute: NonZeroU64::new(tokens), ..TenantLimits::default() };
            let keys = keys.into_iter().map(KeyDigest).collect();
            let (id, residency) = (id.parse().unwrap(), residency.parse().unwrap());
            TenantRules { id, keys, issuer, deployments, residency, priority, weight, limits }
        }
    }

    proptest! {
        #[test]
        fn tenants_survive_a_round_trip(tenants in vec(tenant(), 0..4)) {
            let all: BTreeMap<_, _> = tenants.into_iter().map(|tenant| (tenant.id.clone(), tenant)).collect();
            let text = serde_json::to_string(&TenantsV1::from(&all)).unwrap();
            let wire: TenantsV1 = serde_json::from_str(&text).unwrap();
            prop_assert_eq!(BTreeMap::try_from(wire), Ok(all));
        }
    }

    fn message() -> Value {
        let tenant = |name: &str, key: char| {
            json!({"name": name, "key_sha256": [key.to_string().repeat(64)], "deployments": ["minilm"],
                   "residency": "eu", "priority": "bulk", "weight": 2, "limits": {"tokens_per_minute": 3}})
        };
        json!({"version": 1, "tenants": [tenant("a", 'a'), tenant("b", 'b')]})
    }

    #[test]
    fn tenants_with_one_invalid_entry_are_rejected_as_a_whole() {
        let check = |pointer: &str, value: Value, field: &str| {
            let mut message = message();
            *message.pointer_mut(pointer).unwrap() = value;
            let wire: TenantsV1 = serde_json::from_value(message).unwrap();
            assert_eq!(BTreeMap::try_from(wire).unwrap_err().field, field);
        };
        check("/tenants/1/name", json!("a"), "tenants[1].name");
        check("/tenants/1/name", json!("a b"), "tenants[1].name");
        check("/tenants/1/key_sha256/0", json!("a".repeat(64)), "tenants[1].key_sha256");
        check("/tenants/0/key_sha256/0", json!("s3cret"), "tenants[0].key_sha256[0]");
        check("/tenants/0/key_sha256", json!(vec!["c".repeat(64); MAX_KEYS + 1]), "tenants[0].key_sha256");
        check("/tenants/0/deployments/0", json!("a/b"), "tenants[0].deployments[0]");
        check("/tenants/0/residency", json!(""), "tenants[0].residency");
        check("/tenants/0/priority", json!("fast"), "tenants[0].priority");
        check("/tenants/0/weight", json!(0), "tenants[0].weight");
        check("/tenants/0/weight", json!(MAX_WEIGHT + 1), "tenants[0].weight");
        let one = message()["tenants"][0].clone();
        check("/tenants", json!(vec![one; MAX_TENANTS + 1]), "tenants");
    }

    #[test]
    fn a_missing_restriction_of_a_tenant_is_an_error() {
        for field in ["deployments", "residency", "key_sha256", "weight", "limits"] {
            let mut lost = message();
            lost["tenants"][0].as_object_mut().unwrap().remove(field);
            let error = serde_json::from_value::<TenantsV1>(lost).unwrap_err().to_string();
            assert!(error.contains(&format!("missing field `{field}`")), "{error}");
        }
    }
}
