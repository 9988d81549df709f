//! Route table, as the hub publishes and stores it.
//!
//! A reader accepts a table as a whole or not at all: if one entry is invalid or listed twice, the current table stays.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::deployment::{DeploymentV1, read_deployments};
use super::revision::{ServedRevisionV1, read_served, served_v1};
use super::tenant::{TenantV1, read_tenants};
use super::{MessageVersion, VERSION, WireError, entries, names, parsed, to_strings};
use regions::set::MAX_REGIONS;
use regions::{Generation, RegionRoute, RouteTable, Tenants, Widening};

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
    /// Address at which gateways reach it.
    pub endpoint: String,
    /// Deployments with a ready replica, by the last report of the region.
    pub deployments: Vec<String>,
    /// Whether an operator drains the region. Absent if not.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub draining: bool,
}

impl From<&RouteTable> for RouteTableV1 {
    fn from(table: &RouteTable) -> RouteTableV1 {
        let RouteTable { generation, regions, deployments, widening, revisions, tenants } = table;
        let Generation { epoch, number } = generation;
        let announced = tenants.iter().flat_map(|tenants| &tenants.widening);
        let regions = regions.iter().map(|(id, route)| {
            let RegionRoute { endpoint, deployments, draining } = route;
            RegionRouteV1 {
                id: id.to_string(),
                endpoint: endpoint.to_string(),
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
        }
    }
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
        } = wire;
        let regions = entries("regions", ".id", regions, MAX_REGIONS, |at, region| {
            let RegionRouteV1 { id, endpoint, deployments, draining } = region;
            let at = |field: &str| format!("{at}.{field}");
            let route = RegionRoute {
                endpoint: parsed(at("endpoint"), &endpoint)?,
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
        let tenants = tenants.map(|all| Tenants { all, widening: announced });
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
    use regions::{Deployment, DeploymentName, NextRevision, Scaling, ServedRevision};
    use serde_json::{Value, json};

    prop_compose! {
        fn route()(endpoint in any::endpoint(), deployments in any::names(), draining: bool) -> RegionRoute {
            RegionRoute { endpoint, deployments, draining }
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
        fn table()(
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
                Tenants { all, widening }
            });
            let deployments: BTreeMap<_, _> = named.collect();
            let revisions = pinned.then(|| deployments.iter().take(3).map(served).collect());
            RouteTable { generation, regions, deployments, widening, revisions, tenants }
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
        let region = |id: &str| json!({"id": id, "endpoint": "10.0.0.7:7100", "deployments": ["minilm"]});
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
        check("/regions/0/endpoint", json!("here"), "regions[0].endpoint");
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
