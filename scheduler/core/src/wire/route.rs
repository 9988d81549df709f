//! The route table and the deployments in it, as the hub publishes and keeps them.
//!
//! A reader takes a table whole or not at all: one entry that it cannot read, one that stands twice, and the table in
//! hand stays. The residency of a deployment must be *there*: `null` is "anywhere" because somebody wrote it down, and
//! a field that got lost frees nothing.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Deserializer, Serialize};

use super::{
    VERSION, WireError, endpoint, known_version, names, parsed, refuse_other_versions, refuse_too_many, texts,
};
use crate::rollout::Wanted;
use regions::deployment::MAX_DEPLOYMENTS;
use regions::deployment::timetable::{SHIFTS_MAX, Shift};
use regions::set::MAX_REGIONS;
use regions::{
    Deployment, DeploymentName, EngineSpec, Generation, RegionRoute, ResidencyPolicy, RouteTable, Scaling,
    Widening,
};

/// The answer of `GET /v1/routes`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RouteTableV1 {
    /// 1.
    #[serde(deserialize_with = "known_version")]
    pub version: u32,
    /// Of the store.
    pub epoch: u64,
    /// Of the table, within the epoch.
    pub generation: u64,
    /// Where each region is reached.
    pub regions: Vec<RegionRouteV1>,
    /// What is deployed.
    pub deployments: Vec<DeploymentV1>,
    /// Deployments whose residency will be wider; absent is none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub widening: Vec<WideningV1>,
}

/// A residency that is announced.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WideningV1 {
    /// The deployment's name.
    pub name: String,
    /// What its residency will be; `anywhere` is all regions.
    pub to: String,
    /// The generation of the first table that said so.
    pub since: String,
}

/// One region of a route table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RegionRouteV1 {
    /// `cloud/name`.
    pub id: String,
    /// Where gateways reach it.
    pub endpoint: String,
    /// What had a replica ready there when the region last said so.
    pub deployments: Vec<String>,
    /// Its operator empties it. Absent where not.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub draining: bool,
}

/// One deployment of a route table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeploymentV1 {
    /// What clients put in `model`.
    pub name: String,
    /// What it does with a text.
    pub task: String,
    /// Where the model comes from.
    pub model: String,
    /// What runs it.
    pub engine: EngineV1,
    /// Which regions may see its requests; `null` is all of them.
    #[serde(deserialize_with = "present")]
    pub residency: Option<String>,
    /// Where it should run; empty is wherever there is a spoke.
    pub regions: Vec<String>,
    /// How many replicas it should have in each; absent is one, always.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scaling: Option<ScalingV1>,
}

/// How many replicas a deployment should have in a region.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScalingV1 {
    /// Never fewer.
    pub min: u32,
    /// Never more.
    pub max: u32,
    /// Requests at a time that one replica should have, if that counts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub concurrency_target: Option<u32>,
    /// In percent.
    pub target_utilization: u32,
    /// Over how long traffic is averaged.
    pub autoscaling_window_ms: u64,
    /// For how long what was needed is kept.
    pub scale_down_delay_ms: u64,
    /// For how long nobody must have asked until there is none; absent is never.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub zero_after_ms: Option<u64>,
    /// Never fewer at these times of the week.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub timetable: Vec<ShiftV1>,
}

/// A time of the week, of UTC, and how many replicas there are at least.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShiftV1 {
    /// On which it begins, as `mon,tue`.
    pub days: String,
    /// As `07:30`.
    pub from: String,
    /// As `19:00`; the next day, if that is not later.
    pub to: String,
    /// So many at least.
    pub min: u32,
}

/// An engine and how it is to be run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineV1 {
    /// What runs the model.
    pub kind: String,
    /// The number format that it computes in.
    pub precision: String,
}

/// One deployment by itself, as whoever starts its replicas keeps it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoredDeploymentV1 {
    /// 1.
    #[serde(deserialize_with = "known_version")]
    pub version: u32,
    /// The deployment.
    pub deployment: DeploymentV1,
}

/// The deployments that there shall be, as the store keeps them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeploymentsV1 {
    /// 1.
    #[serde(deserialize_with = "known_version")]
    pub version: u32,
    /// An operator has applied them; otherwise they are those of a hub's file.
    pub applied: bool,
    /// All of them.
    pub deployments: Vec<DeploymentV1>,
}

/// Reads an `Option` that must be there; serde's own reading takes an absent field for `None`.
pub(super) fn present<'de, D: Deserializer<'de>>(from: D) -> Result<Option<String>, D::Error> {
    Option::deserialize(from)
}

/// A policy as it crosses a process.
pub(super) fn written(residency: &ResidencyPolicy) -> Option<String> {
    match residency {
        ResidencyPolicy::Anywhere => None,
        ResidencyPolicy::Only(_) => Some(residency.to_string()),
    }
}

/// A policy that has crossed one.
pub(super) fn law(field: &str, residency: Option<String>) -> Result<ResidencyPolicy, WireError> {
    match residency {
        None => Ok(ResidencyPolicy::Anywhere),
        Some(text) => parsed(field, &text),
    }
}

impl From<&RouteTable> for RouteTableV1 {
    fn from(table: &RouteTable) -> RouteTableV1 {
        let RouteTable { generation: Generation { epoch, number }, regions, deployments, widening } = table;
        let regions = regions.iter().map(|(id, route)| {
            let RegionRoute { endpoint, deployments, draining } = route;
            RegionRouteV1 {
                id: id.to_string(),
                endpoint: endpoint.to_string(),
                deployments: texts(deployments),
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
        }
    }
}

fn widening_v1((name, widening): (&DeploymentName, &Widening)) -> WideningV1 {
    let Widening { to, since } = widening;
    WideningV1 { name: name.to_string(), to: to.to_string(), since: since.to_string() }
}

/// A residency that is announced for a deployment of this table.
fn read_widening(
    what: &str,
    wire: &WideningV1,
    deployed: &BTreeMap<DeploymentName, Deployment>,
) -> Result<(DeploymentName, Widening), WireError> {
    let WideningV1 { name, to, since } = wire;
    let at = |field: &str| format!("{what}.{field}");
    let widening = Widening { to: parsed(at("to"), to)?, since: parsed(at("since"), since)? };
    let name: DeploymentName = parsed(at("name"), name)?;
    if !deployed.contains_key(&name) {
        return Err(WireError::new(at("name"), format!("`{name}` is not deployed in this table")));
    }
    Ok((name, widening))
}

impl TryFrom<RouteTableV1> for RouteTable {
    type Error = WireError;

    fn try_from(wire: RouteTableV1) -> Result<RouteTable, WireError> {
        let RouteTableV1 { version, epoch, generation: number, regions, deployments, widening: announced } =
            wire;
        refuse_other_versions(version)?;
        refuse_too_many("regions", regions.len(), MAX_REGIONS)?;
        let mut routes = BTreeMap::new();
        for (place, region) in regions.into_iter().enumerate() {
            let RegionRouteV1 { id, endpoint: reached, deployments, draining } = region;
            let at = |field: &str| format!("regions[{place}].{field}");
            let route = RegionRoute {
                endpoint: endpoint(at("endpoint"), &reached)?,
                deployments: names(&at("deployments"), &deployments)?,
                draining,
            };
            if routes.insert(parsed(at("id"), &id)?, route).is_some() {
                return Err(WireError::new(at("id"), format!("`{id}` stands in the table twice")));
            }
        }
        let deployed = read_deployments(deployments)?;
        refuse_too_many("widening", announced.len(), deployed.len())?;
        let mut widening = BTreeMap::new();
        for (place, announced) in announced.iter().enumerate() {
            let (name, announced) = read_widening(&format!("widening[{place}]"), announced, &deployed)?;
            if widening.insert(name.clone(), announced).is_some() {
                let problem = format!("`{name}` stands in the table twice");
                return Err(WireError::new(format!("widening[{place}].name"), problem));
            }
        }
        let generation = Generation { epoch, number };
        Ok(RouteTable { generation, regions: routes, deployments: deployed, widening })
    }
}

impl From<&Deployment> for DeploymentV1 {
    fn from(deployment: &Deployment) -> DeploymentV1 {
        let Deployment {
            name,
            task,
            model,
            engine: EngineSpec { kind, precision },
            residency,
            regions,
            scaling,
        } = deployment;
        DeploymentV1 {
            name: name.to_string(),
            task: task.to_string(),
            model: model.clone(),
            engine: EngineV1 { kind: kind.to_string(), precision: precision.to_string() },
            residency: written(residency),
            regions: texts(regions),
            scaling: (*scaling != Scaling::default()).then(|| scaling.into()),
        }
    }
}

impl From<&Scaling> for ScalingV1 {
    fn from(scaling: &Scaling) -> ScalingV1 {
        let Scaling {
            min,
            max,
            concurrency_target,
            target_utilization,
            autoscaling_window,
            scale_down_delay,
            zero_after,
            ref timetable,
        } = *scaling;
        let shift = |shift: &Shift| {
            let Shift { days, from, to, min } = shift;
            ShiftV1 { days: days.to_string(), from: from.to_string(), to: to.to_string(), min: *min }
        };
        ScalingV1 {
            min,
            max,
            concurrency_target,
            target_utilization,
            autoscaling_window_ms: millis(autoscaling_window),
            scale_down_delay_ms: millis(scale_down_delay),
            zero_after_ms: zero_after.map(millis),
            timetable: timetable.iter().map(shift).collect(),
        }
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

fn read_scaling(at: &str, wire: ScalingV1) -> Result<Scaling, WireError> {
    let ScalingV1 {
        min,
        max,
        concurrency_target,
        target_utilization,
        autoscaling_window_ms,
        scale_down_delay_ms,
        zero_after_ms,
        timetable,
    } = wire;
    refuse_too_many(&format!("{at}.timetable"), timetable.len(), SHIFTS_MAX)?;
    let shift = |(place, wire): (usize, ShiftV1)| {
        let ShiftV1 { days, from, to, min } = wire;
        let field = |field: &str| format!("{at}.timetable[{place}].{field}");
        let (days, from) = (parsed(field("days"), &days)?, parsed(field("from"), &from)?);
        Ok(Shift { days, from, to: parsed(field("to"), &to)?, min })
    };
    let timetable = timetable.into_iter().enumerate().map(shift).collect::<Result<_, WireError>>()?;
    let scaling = Scaling {
        min,
        max,
        concurrency_target,
        target_utilization,
        autoscaling_window: Duration::from_millis(autoscaling_window_ms),
        scale_down_delay: Duration::from_millis(scale_down_delay_ms),
        zero_after: zero_after_ms.map(Duration::from_millis),
        timetable,
    };
    match scaling.problems().first() {
        None => Ok(scaling),
        Some((key, problem)) => Err(WireError::new(format!("{at}.{key}"), problem)),
    }
}

fn read_deployment(what: &str, wire: DeploymentV1) -> Result<Deployment, WireError> {
    let DeploymentV1 { name, task, model, engine, residency, regions, scaling } = wire;
    let EngineV1 { kind, precision } = engine;
    let at = |field: &str| format!("{what}.{field}");
    refuse_too_many(&at("regions"), regions.len(), MAX_REGIONS)?;
    let region = |(place, id): (usize, &String)| parsed(format!("{what}.regions[{place}]"), id);
    Ok(Deployment {
        name: parsed(at("name"), &name)?,
        task: parsed(at("task"), &task)?,
        model,
        engine: EngineSpec {
            kind: parsed(at("engine.kind"), &kind)?,
            precision: parsed(at("engine.precision"), &precision)?,
        },
        residency: law(&at("residency"), residency)?,
        regions: regions.iter().enumerate().map(region).collect::<Result<_, _>>()?,
        scaling: scaling.map_or(Ok(Scaling::default()), |scaling| read_scaling(&at("scaling"), scaling))?,
    })
}

impl From<&Deployment> for StoredDeploymentV1 {
    fn from(deployment: &Deployment) -> StoredDeploymentV1 {
        StoredDeploymentV1 { version: VERSION, deployment: deployment.into() }
    }
}

impl TryFrom<StoredDeploymentV1> for Deployment {
    type Error = WireError;

    fn try_from(wire: StoredDeploymentV1) -> Result<Deployment, WireError> {
        let StoredDeploymentV1 { version, deployment } = wire;
        refuse_other_versions(version)?;
        read_deployment("deployment", deployment)
    }
}

impl From<&Wanted> for DeploymentsV1 {
    fn from(wanted: &Wanted) -> DeploymentsV1 {
        let Wanted { applied, deployments } = wanted;
        let deployments = deployments.values().map(DeploymentV1::from).collect();
        DeploymentsV1 { version: VERSION, applied: *applied, deployments }
    }
}

impl TryFrom<DeploymentsV1> for Wanted {
    type Error = WireError;

    fn try_from(wire: DeploymentsV1) -> Result<Wanted, WireError> {
        let DeploymentsV1 { version, applied, deployments } = wire;
        refuse_other_versions(version)?;
        Ok(Wanted { applied, deployments: read_deployments(deployments)? })
    }
}

/// A list that deploys nothing twice.
pub fn read_deployments(wire: Vec<DeploymentV1>) -> Result<BTreeMap<DeploymentName, Deployment>, WireError> {
    refuse_too_many("deployments", wire.len(), MAX_DEPLOYMENTS)?;
    let mut deployed = BTreeMap::new();
    for (place, deployment) in wire.into_iter().enumerate() {
        let deployment = read_deployment(&format!("deployments[{place}]"), deployment)?;
        let name = deployment.name.clone();
        if deployed.insert(name.clone(), deployment).is_some() {
            let problem = format!("`{name}` stands here twice");
            return Err(WireError::new(format!("deployments[{place}].name"), problem));
        }
    }
    Ok(deployed)
}

#[cfg(test)]
mod tests {
    use super::super::any;
    use super::*;
    use proptest::collection::{btree_map, vec};
    use proptest::prelude::*;
    use proptest::sample::select;
    use regions::{EngineKind, Precision, Task};
    use serde_json::{Value, json};

    prop_compose! {
        fn scaling()(
            min in 0u32..5,
            more in 0u32..100,
            concurrency_target in proptest::option::of(1u32..=1024),
            target_utilization in 1u32..=100,
            window_ms in 1000u64..=3_600_000,
            delay_ms in 0u64..=3_600_000,
            zero_ms in proptest::option::of(1000u64..=86_400_000),
            shifts in vec((select(vec!["mon-fri", "sat,sun"]), select(vec!["00:00", "07:30"]), select(vec!["06:00", "24:00"])), 0..3),
        ) -> Scaling {
            Scaling {
                min,
                max: (min + more).max(1),
                concurrency_target,
                target_utilization,
                autoscaling_window: Duration::from_millis(window_ms),
                scale_down_delay: Duration::from_millis(delay_ms),
                zero_after: zero_ms.filter(|_| min == 0).map(Duration::from_millis),
                timetable: shifts.into_iter().map(|(days, from, to)| {
                    let [from, to] = [from, to].map(|time: &str| time.parse().unwrap());
                    Shift { days: days.parse().unwrap(), from, to, min: 1 }
                }).collect(),
            }
        }
    }

    prop_compose! {
        fn deployment()(
            name in any::name(),
            task in select(Task::ALL),
            model in "(pypi|hf)://[a-z/]{1,12}",
            kind in select(EngineKind::ALL),
            precision in select(Precision::ALL),
            residency in select(vec!["anywhere", "eu", "de,eu,aws/us-east-1", "de,fr & eu"]),
            regions in vec(any::region(), 0..3),
            scaling in prop_oneof![Just(Scaling::default()), scaling()],
        ) -> Deployment {
            let engine = EngineSpec { kind, precision };
            Deployment { name, task, model, engine, residency: residency.parse().unwrap(), regions, scaling }
        }
    }

    prop_compose! {
        fn route()(endpoint in any::endpoint(), deployments in any::names(), draining: bool) -> RegionRoute {
            RegionRoute { endpoint, deployments, draining }
        }
    }

    prop_compose! {
        fn table()(
            epoch: u64,
            number: u64,
            regions in btree_map(any::region(), route(), 0..4),
            deployments in vec(deployment(), 0..4),
            to in select(vec!["anywhere", "eu", "de,fr & eu"]),
        ) -> RouteTable {
            let generation = Generation { epoch, number };
            let widens = |deployment: &Deployment| {
                (deployment.name.clone(), Widening { to: to.parse().unwrap(), since: generation })
            };
            let widening = deployments.iter().take(2).map(widens).collect();
            let named = deployments.into_iter().map(|deployment| (deployment.name.clone(), deployment));
            RouteTable { generation, regions, deployments: named.collect(), widening }
        }
    }

    proptest! {
        #[test]
        fn a_table_comes_back_as_it_went(table in table()) {
            let text = serde_json::to_string(&RouteTableV1::from(&table)).unwrap();
            let wire: RouteTableV1 = serde_json::from_str(&text).unwrap();
            prop_assert_eq!(RouteTable::try_from(wire), Ok(table));
        }

        #[test]
        fn a_stored_deployment_comes_back_as_it_went(deployment in deployment()) {
            let text = serde_json::to_string(&StoredDeploymentV1::from(&deployment)).unwrap();
            let wire: StoredDeploymentV1 = serde_json::from_str(&text).unwrap();
            prop_assert_eq!(Deployment::try_from(wire), Ok(deployment));
        }

        #[test]
        fn what_is_wanted_comes_back_as_it_went(applied: bool, deployments in vec(deployment(), 0..4)) {
            let named = deployments.into_iter().map(|deployment| (deployment.name.clone(), deployment));
            let wanted = Wanted { applied, deployments: named.collect() };
            let text = serde_json::to_string(&DeploymentsV1::from(&wanted)).unwrap();
            let wire: DeploymentsV1 = serde_json::from_str(&text).unwrap();
            prop_assert_eq!(Wanted::try_from(wire), Ok(wanted));
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
    fn a_table_of_which_one_entry_cannot_be_read_is_refused_whole() {
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
    fn a_residency_that_got_lost_or_blanked_frees_nothing() {
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
    fn a_deployment_that_says_nothing_of_scaling_has_one_replica_and_goes_as_it_went_before() {
        let wire: RouteTableV1 = serde_json::from_value(message()).unwrap();
        let table = RouteTable::try_from(wire).unwrap();
        assert!(table.deployments.values().all(|deployment| deployment.scaling == Scaling::default()));
        assert_eq!(serde_json::to_value(RouteTableV1::from(&table)).unwrap(), message());
    }

    #[test]
    fn a_message_of_another_version_is_refused_by_name() {
        let other = json!({"version": 2});
        let errors = [
            serde_json::from_value::<RouteTableV1>(other.clone()).unwrap_err(),
            serde_json::from_value::<StoredDeploymentV1>(other.clone()).unwrap_err(),
            serde_json::from_value::<DeploymentsV1>(other).unwrap_err(),
        ];
        for error in errors {
            assert!(error.to_string().starts_with("version 2 is not known here"), "{error}");
        }
    }
}
