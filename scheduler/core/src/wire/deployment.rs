//! A deployment, alone and among others, as the hub publishes it and as whoever has to do with it keeps it.
//!
//! The residency must be *there*: `null` is "anywhere" because somebody wrote it down, and a field that got lost frees nothing.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Deserializer, Serialize};

use super::{
    VERSION, WireError, known_version, names, parsed, refuse_other_versions, refuse_too_many, texts,
};
use crate::revisions::Orders;
use crate::rollout::Wanted;
use regions::deployment::MAX_DEPLOYMENTS;
use regions::deployment::timetable::{TIMETABLE_ENTRIES_MAX, TimetableEntry};
use regions::set::MAX_REGIONS;
use regions::{Deployment, DeploymentName, EngineSpec, ResidencyPolicy, Scaling};

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
    /// Those whose change of the model waits for a promotion; absent is none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub held: Vec<String>,
    /// Model revisions that an operator has promoted; absent is none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub promoted: Vec<PromotedV1>,
}

/// A model revision that an operator has promoted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PromotedV1 {
    /// The deployment.
    pub name: String,
    /// The revision.
    pub revision: String,
}

/// Reads an `Option` that must be there; serde's own reading takes an absent field for `None`.
pub(super) fn present<'de, D: Deserializer<'de>, T: Deserialize<'de>>(
    from: D,
) -> Result<Option<T>, D::Error> {
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
pub(super) fn policy(field: &str, residency: Option<String>) -> Result<ResidencyPolicy, WireError> {
    match residency {
        None => Ok(ResidencyPolicy::Anywhere),
        Some(text) => parsed(field, &text),
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
        let shift = |shift: &TimetableEntry| {
            let TimetableEntry { days, from, to, min } = shift;
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
    refuse_too_many(&format!("{at}.timetable"), timetable.len(), TIMETABLE_ENTRIES_MAX)?;
    let shift = |(place, wire): (usize, ShiftV1)| {
        let ShiftV1 { days, from, to, min } = wire;
        let field = |field: &str| format!("{at}.timetable[{place}].{field}");
        let (days, from) = (parsed(field("days"), &days)?, parsed(field("from"), &from)?);
        Ok(TimetableEntry { days, from, to: parsed(field("to"), &to)?, min })
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
        residency: policy(&at("residency"), residency)?,
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
        let Wanted { applied, deployments, orders: Orders { held, promoted } } = wanted;
        let deployments = deployments.values().map(DeploymentV1::from).collect();
        let promoted = promoted
            .iter()
            .map(|(name, revision)| PromotedV1 { name: name.to_string(), revision: revision.to_string() });
        DeploymentsV1 {
            version: VERSION,
            applied: *applied,
            deployments,
            held: texts(held),
            promoted: promoted.collect(),
        }
    }
}

impl TryFrom<DeploymentsV1> for Wanted {
    type Error = WireError;

    fn try_from(wire: DeploymentsV1) -> Result<Wanted, WireError> {
        let DeploymentsV1 { version, applied, deployments, held, promoted } = wire;
        refuse_other_versions(version)?;
        refuse_too_many("promoted", promoted.len(), MAX_DEPLOYMENTS)?;
        let read = |(place, PromotedV1 { name, revision }): (usize, &PromotedV1)| {
            let at = |field: &str| format!("promoted[{place}].{field}");
            Ok::<_, WireError>((parsed(at("name"), name)?, parsed(at("revision"), revision)?))
        };
        let promoted = promoted.iter().enumerate().map(read).collect::<Result<_, _>>()?;
        let orders = Orders { held: names("held", &held)?, promoted };
        Ok(Wanted { applied, deployments: read_deployments(deployments)?, orders })
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
pub(super) mod tests {
    use super::super::any;
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;
    use proptest::sample::select;
    use regions::{EngineKind, Precision, Task};
    use serde_json::json;

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
                    TimetableEntry { days: days.parse().unwrap(), from, to, min: 1 }
                }).collect(),
            }
        }
    }

    prop_compose! {
        pub(in crate::wire) fn deployment()(
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

    proptest! {
        #[test]
        fn a_stored_deployment_comes_back_as_it_went(deployment in deployment()) {
            let text = serde_json::to_string(&StoredDeploymentV1::from(&deployment)).unwrap();
            let wire: StoredDeploymentV1 = serde_json::from_str(&text).unwrap();
            prop_assert_eq!(Deployment::try_from(wire), Ok(deployment));
        }

        #[test]
        fn what_is_wanted_comes_back_as_it_went(applied: bool, deployments in vec(deployment(), 0..4)) {
            let named = deployments.into_iter().map(|deployment| (deployment.name.clone(), deployment));
            let wanted = Wanted { applied, deployments: named.collect(), orders: Orders::default() };
            let text = serde_json::to_string(&DeploymentsV1::from(&wanted)).unwrap();
            let wire: DeploymentsV1 = serde_json::from_str(&text).unwrap();
            prop_assert_eq!(Wanted::try_from(wire), Ok(wanted));
        }
    }

    #[test]
    fn a_message_of_another_version_is_refused_by_name() {
        let other = json!({"version": 2});
        let errors = [
            serde_json::from_value::<StoredDeploymentV1>(other.clone()).unwrap_err(),
            serde_json::from_value::<DeploymentsV1>(other).unwrap_err(),
        ];
        for error in errors {
            assert!(error.to_string().starts_with("version 2 is not known here"), "{error}");
        }
    }
}
