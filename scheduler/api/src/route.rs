//! Route table, as the hub publishes and stores it.
//!
//! A reader accepts a table as a whole or not at all: if one entry is invalid or listed twice, the current table stays.
//! A reader that has a table receives the [`changes`] of the next one.

pub mod changes;

use std::collections::BTreeMap;
use std::fmt::Display;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::api_key::{TableKeyV1, read_table_keys, table_keys_v1};
use super::deployment::{DeploymentV1, read_deployments};
use super::revision::{ServedRevisionV1, read_served, served_v1};
use super::tenant::{TenantV1, read_tenants};
use super::{MessageVersion, VERSION, WireError, entries, names, parsed, to_strings};
use regions::route::MAX_INSTANCES;
use regions::set::MAX_REGIONS;
use regions::{Generation, HostPort, InstanceName, RegionRoute, RouteTable, Tenants, Widening};

/// Response of `GET /v1/routes`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RouteTableV1 {
    /// Version of the message.
    pub version: MessageVersion,
    /// Epoch of the generation.
    pub epoch: u64,
    /// Number of the generation within the epoch.
    pub generation: u64,
    /// Route of each region.
    pub regions: Vec<RegionRouteV1>,
    /// All deployments.
    pub deployments: Vec<DeploymentV1>,
    /// Announced wider residencies of deployments; absent if none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub widening: Vec<WideningV1>,
    /// Served model revision of each deployment. Absent from hubs without support for revisions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revisions: Option<Vec<ServedRevisionV1>>,
    /// Tenants; absent if none were applied, in which case each gateway uses its own file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tenants: Option<Vec<TenantV1>>,
    /// Announced wider residencies of tenants; absent if none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tenant_widening: Vec<WideningV1>,
    /// Keys that operators created, beside those of the tenants; absent if none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub api_keys: Vec<TableKeyV1>,
}

/// Announced residency.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WideningV1 {
    /// Name of the deployment or tenant.
    pub name: String,
    /// Future residency; `anywhere` allows all regions.
    pub to: String,
    /// Generation of the first table with the announcement.
    pub since: String,
}

/// Route of one region.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RegionRouteV1 {
    /// Region, as `cloud/name`.
    pub id: String,
    /// Its spoke instances.
    pub instances: Vec<InstanceRouteV1>,
    /// Deployments with a ready replica, by the last reports of the region.
    pub deployments: Vec<String>,
    /// Whether an operator drains the region. Absent if not.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub draining: bool,
}

/// Route of one spoke instance.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InstanceRouteV1 {
    /// Name of the instance.
    pub name: String,
    /// Address at which gateways reach it.
    pub endpoint: String,
}

impl From<&RouteTable> for RouteTableV1 {
    fn from(table: &RouteTable) -> RouteTableV1 {
        let RouteTable { generation, regions, deployments, widening, revisions, tenants } = table;
        let Generation { epoch, number } = generation;
        let announced = tenants.iter().flat_map(|tenants| &tenants.widening);
        let regions = regions.iter().map(|(id, route)| {
            let RegionRoute { instances, deployments, draining } = route;
            RegionRouteV1 {
                id: id.to_string(),
                instances: instances_v1(instances),
                deployments: to_strings(deployments),
                draining: *draining,
            }
        });
        RouteTableV1 {
            version: VERSION,
            epoch: *epoch,
            generation: *number,
            regions: regions.collect(),
            deployments: deployments.values().map(DeploymentV1::from).collect(),
            widening: widening.iter().map(widening_v1).collect(),
            revisions: revisions.as_ref().map(served_v1),
            tenants: tenants.as_ref().map(|tenants| tenants.all.values().map(TenantV1::from).collect()),
            tenant_widening: announced.map(widening_v1).collect(),
            api_keys: tenants.as_ref().map(|tenants| table_keys_v1(&tenants.keys)).unwrap_or_default(),
        }
    }
}

fn instances_v1(instances: &BTreeMap<InstanceName, HostPort>) -> Vec<InstanceRouteV1> {
    let each = instances.iter();
    each.map(|(name, at)| InstanceRouteV1 { name: name.to_string(), endpoint: at.to_string() }).collect()
}

fn widening_v1((name, widening): (&impl ToString, &Widening)) -> WideningV1 {
    let Widening { to, since } = widening;
    WideningV1 { name: name.to_string(), to: to.to_string(), since: since.to_string() }
}

/// Parses the announced residencies in `field`; each must belong to an entry of `known`.
fn read_widening<Name: FromStr<Err: Display> + Ord + Display, Known>(
    field: &str,
    announced: &[WideningV1],
    known: &BTreeMap<Name, Known>,
) -> Result<BTreeMap<Name, Widening>, WireError> {
    entries(field, ".name", announced, known.len(), |at, WideningV1 { name: text, to, since }| {
        let at = |what: &str| format!("{at}.{what}");
        let name: Name = parsed(at("name"), text)?;
        if !known.contains_key(&name) {
            return Err(WireError::new(at("name"), format!("`{text}` is not in this table")));
        }
        Ok((name, Widening { to: parsed(at("to"), to)?, since: parsed(at("since"), since)? }))
    })
}

/// Parses the instances of a region: at least one.
fn read_instances(
    field: &str,
    instances: Vec<InstanceRouteV1>,
) -> Result<BTreeMap<InstanceName, HostPort>, WireError> {
    if instances.is_empty() {
        return Err(WireError::new(field, "is empty; a region in the table has at least one instance"));
    }
    entries(field, ".name", instances, MAX_INSTANCES, |at, InstanceRouteV1 { name, endpoint }| {
        Ok((parsed(format!("{at}.name"), &name)?, parsed(format!("{at}.endpoint"), &endpoint)?))
    })
}

impl TryFrom<RouteTableV1> for RouteTable {
    type Error = WireError;

    fn try_from(wire: RouteTableV1) -> Result<RouteTable, WireError> {
        let RouteTableV1 {
            version: _,
            epoch,
            generation: number,
            regions,
            deployments,
            widening,
            revisions,
            tenants,
            tenant_widening,
            api_keys,
        } = wire;
        let regions = entries("regions", ".id", regions, MAX_REGIONS, |at, region| {
            let RegionRouteV1 { id, instances, deployments, draining } = region;
            let at = |field: &str| format!("{at}.{field}");
            let route = RegionRoute {
                instances: read_instances(&at("instances"), instances)?,
                deployments: names(&at("deployments"), &deployments)?,
                draining,
            };
            Ok((parsed(at("id"), &id)?, route))
        })?;
        let deployed = read_deployments(deployments)?;
        let widening = read_widening("widening", &widening, &deployed)?;
        let revisions = revisions.map(|served| read_served("revisions", served, &deployed)).transpose()?;
        let tenants = tenants.map(read_tenants).transpose()?;
        let known = BTreeMap::new();
        let announced =
            read_widening("tenant_widening", &tenant_widening, tenants.as_ref().unwrap_or(&known))?;
        let keys = read_table_keys(api_keys, tenants.as_ref().unwrap_or(&known))?;
        let is_used =
            |digest| tenants.iter().flat_map(BTreeMap::values).any(|rules| rules.keys.contains(digest));
        if let Some(at) = keys.keys().position(is_used) {
            return Err(WireError::new(format!("api_keys[{at}].key_sha256"), "a tenant has this key too"));
        }
        let tenants = tenants.map(|all| Tenants { all, widening: announced, keys });
        let generation = Generation { epoch, number };
        Ok(RouteTable { generation, regions, deployments: deployed, widening, revisions, tenants })
    }
}

#[cfg(test)]
mod tests {
    use super::super::any;
    use super::super::deployment::tests::deployment;
    use super::super::tenant::tests::tenant;
    use super::*;
    use proptest::collection::{btree_map, vec};
    use proptest::prelude::*;
    use proptest::sample::select;
    use regions::tenant::{ApiKey, KeyDigest};
    use regions::{Deployment, DeploymentName, NextRevision, Scaling, ServedRevision, TenantId};
    use serde_json::{Value, json};

    prop_compose! {
        fn route()(
            instances in btree_map(any::instance(), any::endpoint(), 1..4), deployments in any::names(), draining: bool,
        ) -> RegionRoute {
            RegionRoute { instances, deployments, draining }
        }
    }

    /// Returns the served revision of a deployment, for some with a next revision.
    fn served((name, deployment): (&DeploymentName, &Deployment)) -> (DeploymentName, ServedRevision) {
        let revision = |text: &str| text.parse().unwrap();
        let next = NextRevision {
            spec: deployment.model_spec(),
            revision: (name.as_str().len() > 3).then(|| revision("00000000000000bb")),
            held: name.as_str().len() > 5,
        };
        let next = (name.as_str().len() > 1).then_some(next);
        (name.clone(), ServedRevision { current: revision("00000000000000aa"), next })
    }

    prop_compose! {
        pub(super) fn table()(
            epoch: u64,
            number: u64,
            regions in btree_map(any::region(), route(), 0..4),
            deployments in vec(deployment(), 0..4),
            to in select(vec!["anywhere", "eu", "de,fr & eu"]),
            tenants in proptest::option::of(vec(tenant(), 0..4)),
            pinned: bool,
        ) -> RouteTable {
            let generation = Generation { epoch, number };
            let widens = |deployment: &Deployment| {
                (deployment.name.clone(), Widening { to: to.parse().unwrap(), since: generation })
            };
            let widening = deployments.iter().take(2).map(widens).collect();
            let named = deployments.into_iter().map(|deployment| (deployment.name.clone(), deployment));
            let tenants = tenants.map(|each| {
                let all: BTreeMap<_, _> = each.into_iter().map(|tenant| (tenant.id.clone(), tenant)).collect();
                let announced = Widening { to: to.parse().unwrap(), since: generation };
                let widening = all.keys().take(2).map(|id| (id.clone(), announced.clone())).collect();
                let key = |tenant: &TenantId| ApiKey { tenant: tenant.clone(), expires_at: (number % 2 == 0).then_some(epoch) };
                let keys = all.keys().take(1).map(|tenant| (KeyDigest([7; 32]), key(tenant))).collect();
                Tenants { all, widening, keys }
            });
            let deployments: BTreeMap<_, _> = named.collect();
            let revisions = pinned.then(|| deployments.iter().take(3).map(served).collect());
            RouteTable { generation, regions, deployments, widening, revisions, tenants }
        }
    }

    prop_compose! {
        /// A table with some entries of `before` and some others.
        pub(super) fn table_after(before: RouteTable)(
            other in table(),
            kept in vec(any::<bool>(), 16),
        ) -> RouteTable {
            fn mixed<K: Ord + Clone, V: Clone>(
                before: &BTreeMap<K, V>, other: &BTreeMap<K, V>, kept: &[bool],
            ) -> BTreeMap<K, V> {
                let before = before.iter().zip(kept).filter(|(_, kept)| **kept).map(|(entry, _)| entry);
                before.chain(other).map(|(name, value)| (name.clone(), value.clone())).collect()
            }
            let deployments = mixed(&before.deployments, &other.deployments, &kept);
            let mut widening = mixed(&before.widening, &other.widening, &kept);
            widening.retain(|name, _| deployments.contains_key(name));
            let mut regions = mixed(&before.regions, &other.regions, &kept);
            // A region that stays with other deployments and another state.
            if let Some((id, route)) = before.regions.first_key_value() {
                let ready = other.regions.values().flat_map(|route| route.deployments.clone());
                let draining = route.draining ^ kept[0];
                let deployments = route.deployments.iter().skip(1).cloned().chain(ready).collect();
                regions.insert(id.clone(), RegionRoute { deployments, draining, ..route.clone() });
            }
            let mut revisions = before.revisions.as_ref().map(|before| {
                mixed(before, &other.revisions.clone().unwrap_or_default(), &kept)
            });
            revisions.iter_mut().for_each(|all| all.retain(|name, _| deployments.contains_key(name)));
            let tenants = before.tenants.as_ref().map(|before| {
                let other = other.tenants.clone().unwrap_or_default();
                // Other keys of the same tenants: no digest may belong to two.
                let all = if kept[1] { before.all.clone() } else { other.all };
                let known = |id: &TenantId| all.contains_key(id);
                let widening = mixed(&before.widening, &other.widening, &kept);
                let widening = widening.into_iter().filter(|(id, _)| known(id)).collect();
                let keys = if kept[1] && kept[2] { before.keys.clone() } else { other.keys };
                let keys = keys.into_iter().filter(|(_, key)| known(&key.tenant)).collect();
                Tenants { all, widening, keys }
            });
            let tenants = if kept.iter().take(6).any(|kept| *kept) { tenants } else { None };
            RouteTable { generation: other.generation, regions, deployments, widening, revisions, tenants }
        }
    }

    proptest! {
        #[test]
        fn a_table_survives_a_round_trip(table in table()) {
            let text = serde_json::to_string(&RouteTableV1::from(&table)).unwrap();
            let wire: RouteTableV1 = serde_json::from_str(&text).unwrap();
            prop_assert_eq!(RouteTable::try_from(wire), Ok(table));
        }

    }

    fn message() -> Value {
        let region = |id: &str| {
            json!({"id": id, "instances": [{"name": "a", "endpoint": "10.0.0.7:7100"}, {"name": "b", "endpoint": "10.0.0.8:7100"}],
                   "deployments": ["minilm"]})
        };
        let deployment = |name: &str| {
            let engine = json!({"kind": "cpu", "precision": "f32"});
            json!({"name": name, "task": "embed", "model": "pypi://m", "engine": engine, "residency": null,
                   "regions": ["aws/us-east-1"]})
        };
        let regions = [region("aws/us-east-1"), region("gcp/europe-west4")];
        let deployments = [deployment("minilm"), deployment("minilm-eu")];
        let widening = [json!({"name": "minilm", "to": "eu", "since": "1.2"})];
        json!({"version": 1, "epoch": 1, "generation": 2, "regions": regions, "deployments": deployments,
               "widening": widening})
    }

    #[test]
    fn a_table_with_one_invalid_entry_is_rejected_as_a_whole() {
        let check = |pointer: &str, value: Value, field: &str| {
            let mut message = message();
            *message.pointer_mut(pointer).unwrap() = value;
            let wire: RouteTableV1 = serde_json::from_value(message).unwrap();
            assert_eq!(RouteTable::try_from(wire).unwrap_err().field, field);
        };
        check("/regions/1/id", json!("europe-west4"), "regions[1].id");
        check("/regions/1/id", json!("aws/us-east-1"), "regions[1].id");
        check("/regions/0/instances/1/endpoint", json!("here"), "regions[0].instances[1].endpoint");
        check("/regions/0/instances/1/name", json!("a"), "regions[0].instances[1].name");
        check("/regions/0/instances/1/name", json!("a/b"), "regions[0].instances[1].name");
        check("/regions/1/instances", json!([]), "regions[1].instances");
        let instance = message()["regions"][0]["instances"][0].clone();
        check("/regions/1/instances", json!(vec![instance; MAX_INSTANCES + 1]), "regions[1].instances");
        check("/regions/0/deployments/0", json!(""), "regions[0].deployments[0]");
        check("/deployments/1/name", json!("minilm"), "deployments[1].name");
        check("/deployments/0/task", json!("embroider"), "deployments[0].task");
        check("/deployments/0/engine/kind", json!("abacus"), "deployments[0].engine.kind");
        check("/deployments/0/engine/precision", json!("f7"), "deployments[0].engine.precision");
        check("/deployments/0/regions/0", json!("mars"), "deployments[0].regions[0]");
        check("/widening/0/to", json!(""), "widening[0].to");
        check("/widening/0/since", json!("2"), "widening[0].since");
        check("/widening/0/name", json!("other"), "widening[0].name");
        let twice = message()["widening"][0].clone();
        check("/widening", json!([twice, twice]), "widening[1].name");
        let scaling = json!({"min": 3, "max": 2, "target_utilization": 75, "autoscaling_window_ms": 60_000,
                             "scale_down_delay_ms": 0});
        let mut scaled = message()["deployments"][1].clone();
        scaled["scaling"] = scaling;
        check("/deployments/1", scaled.clone(), "deployments[1].scaling.min");
        let mut ordered = message()["deployments"][1].clone();
        for (order, field) in [
            (json!(["mars"]), "deployments[1].routing.order[0]"),
            (json!(["aws/us-east-1", "aws/us-east-1"]), "deployments[1].routing.order[1]"),
            (json!(["gcp/europe-west4"]), "deployments[1].routing.order[0]"),
            (json!(vec!["aws/us-east-1"; MAX_REGIONS + 1]), "deployments[1].routing.order"),
        ] {
            ordered["routing"] = json!({ "order": order });
            check("/deployments/1", ordered.clone(), field);
        }
        let shift = json!({"days": "mon", "from": "07:00", "to": "soon", "min": 1});
        scaled["scaling"]["timetable"] = json!([shift]);
        check("/deployments/1", scaled, "deployments[1].scaling.timetable[0].to");
        let one = message()["regions"][0].clone();
        check("/regions", json!(vec![one; MAX_REGIONS + 1]), "regions");
    }

    #[test]
    fn a_missing_or_empty_residency_is_an_error() {
        let mut lost = message();
        lost["deployments"][0].as_object_mut().unwrap().remove("residency");
        let error = serde_json::from_value::<RouteTableV1>(lost).unwrap_err();
        assert!(error.to_string().contains("missing field `residency`"), "{error}");

        let mut blank = message();
        blank["deployments"][0]["residency"] = json!("");
        let wire: RouteTableV1 = serde_json::from_value(blank).unwrap();
        assert_eq!(RouteTable::try_from(wire).unwrap_err().field, "deployments[0].residency");
    }

    #[test]
    fn an_order_is_read_and_unknown_keys_beside_it_are_ignored() {
        let order = |routing: Value| {
            let mut message = message();
            message["deployments"][0]["routing"] = routing;
            let wire: RouteTableV1 = serde_json::from_value(message).unwrap();
            let table = RouteTable::try_from(wire).unwrap();
            to_strings(&table.deployments["minilm"].order)
        };
        assert_eq!(order(json!({"order": ["aws/us-east-1"]})), ["aws/us-east-1"]);
        assert_eq!(order(json!({"order": ["aws/us-east-1"], "of_a_later_version": 7})), ["aws/us-east-1"]);
        assert!(order(json!({"of_a_later_version": 7})).is_empty());
        assert!(order(Value::Null).is_empty());
    }

    #[test]
    fn a_deployment_without_scaling_has_one_replica_and_is_serialized_without_it() {
        let wire: RouteTableV1 = serde_json::from_value(message()).unwrap();
        let table = RouteTable::try_from(wire).unwrap();
        assert!(table.deployments.values().all(|deployment| deployment.scaling == Scaling::default()));
        assert_eq!(serde_json::to_value(RouteTableV1::from(&table)).unwrap(), message());
    }

    #[test]
    fn a_message_of_another_version_is_rejected() {
        let other = json!({"version": 2});
        let error = serde_json::from_value::<RouteTableV1>(other).unwrap_err();
        assert!(error.to_string().starts_with("version 2 is not supported"), "{error}");
    }
}
