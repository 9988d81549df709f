//! Deployments, as the hub publishes and stores them, and as scalers store them.
//!
//! The residency field is required: `null` means "anywhere" only if it was written explicitly, and a missing field is
//! an error.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use serde::{Deserialize, Deserializer, Serialize};

use super::{MessageVersion, VERSION, WireError, entries, list, names, parsed, reject_too_many, to_strings};
use regions::deployment::MAX_DEPLOYMENTS;
use regions::deployment::placement::ACCELERATORS_MAX;
use regions::deployment::timetable::{TIMETABLE_ENTRIES_MAX, TimetableEntry};
use regions::set::MAX_REGIONS;
use regions::{
    Deployment, DeploymentName, EngineSpec, ModelRevision, PlacementSpec, RegionId, ResidencyPolicy, Scaling,
};

/// Deployment of a route table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeploymentV1 {
    /// Name that clients send in `model`.
    pub name: String,
    /// Task of the model.
    pub task: String,
    /// Model reference.
    pub model: String,
    /// Engine that runs the model.
    pub engine: EngineV1,
    /// Allowed regions; `null` allows all.
    #[serde(deserialize_with = "required_option")]
    pub residency: Option<String>,
    /// Regions in which it runs; if empty, all regions with a spoke.
    pub regions: Vec<String>,
    /// Requirement from which the hub chooses the regions. Absent if an operator lists them, and in a route table, whose readers
    /// need only the chosen regions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub placement: Option<PlacementV1>,
    /// Autoscaling settings for each region; if absent, always one replica.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scaling: Option<ScalingV1>,
    /// Routing of its requests; if absent, to the nearest region. Processes that do not know it route to the nearest region.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub routing: Option<RoutingV1>,
}

/// Routing of a deployment's requests.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RoutingV1 {
    /// Regions in order of preference, each one of the deployment's; if empty, the nearest region.
    #[serde(default)]
    pub order: Vec<String>,
}

/// Requirement of a deployment's placement.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlacementV1 {
    /// Accelerator types, of which each region has one; absent if none is needed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub accelerators: Vec<String>,
    /// Minimum number of regions.
    pub min_regions: u32,
    /// Replicas that the regions can hold after the loss of the largest one; absent for no further requirement.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub min_replicas: u32,
    /// Maximum cost per hour, in millionths of the operator's currency unit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_cost_millionths: Option<u64>,
}

fn is_zero(number: &u32) -> bool {
    *number == 0
}

/// Autoscaling settings of a deployment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScalingV1 {
    /// Minimum number of replicas.
    pub min: u32,
    /// Maximum number of replicas.
    pub max: u32,
    /// Target of concurrent requests per replica, if used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub concurrency_target: Option<u32>,
    /// Target utilization in percent.
    pub target_utilization: u32,
    /// Averaging window of the traffic.
    pub autoscaling_window_ms: u64,
    /// Delay before scaling down.
    pub scale_down_delay_ms: u64,
    /// Idle time before scaling to zero; absent means never.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub zero_after_ms: Option<u64>,
    /// Minimum numbers of replicas at certain times of the week.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub timetable: Vec<ShiftV1>,
}

/// Time of the week, in UTC, with a minimum number of replicas.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShiftV1 {
    /// Days on which it begins, such as `mon,tue`.
    pub days: String,
    /// Start, such as `07:30`.
    pub from: String,
    /// End, such as `19:00`; on the next day if it is not later than the start.
    pub to: String,
    /// Minimum number of replicas.
    pub min: u32,
}

/// Engine and its settings.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineV1 {
    /// Kind of the engine.
    pub kind: String,
    /// Number format of the computation.
    pub precision: String,
}

/// Single deployment, as a scaler stores it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoredDeploymentV1 {
    /// Version of the message.
    pub version: MessageVersion,
    /// The deployment.
    pub deployment: DeploymentV1,
}

/// Operator's decision about changes of the model: hold or promote.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Promotions {
    /// Changes that wait for a promotion (`meridian apply --hold`).
    pub held: BTreeSet<DeploymentName>,
    /// Revisions that an operator has promoted.
    pub promoted: BTreeMap<DeploymentName, ModelRevision>,
}

/// Desired deployments, as stored.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DesiredDeployments {
    /// Whether an operator has applied them. Otherwise they come from a hub's own file, which may differ at the next
    /// start of the hub.
    pub applied: bool,
    /// The deployments.
    pub deployments: BTreeMap<DeploymentName, Deployment>,
    /// Operator's orders for model changes.
    pub promotions: Promotions,
}

/// Desired deployments, as stored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeploymentsV1 {
    /// Version of the message.
    pub version: MessageVersion,
    /// Whether an operator has applied them; otherwise they come from a hub's file.
    pub applied: bool,
    /// All deployments.
    pub deployments: Vec<DeploymentV1>,
    /// Deployments whose model change waits for a promotion; absent if none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub held: Vec<String>,
    /// Promoted model revisions; absent if none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub promoted: Vec<PromotedV1>,
}

/// Model revision that an operator has promoted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PromotedV1 {
    /// Name of the deployment.
    pub name: String,
    /// The revision.
    pub revision: String,
}

/// Converts an engine to its wire form.
pub fn engine_v1(engine: EngineSpec) -> EngineV1 {
    let EngineSpec { kind, precision } = engine;
    EngineV1 { kind: kind.to_string(), precision: precision.to_string() }
}

pub(super) fn read_engine(at: &str, wire: &EngineV1) -> Result<EngineSpec, WireError> {
    let EngineV1 { kind, precision } = wire;
    Ok(EngineSpec {
        kind: parsed(format!("{at}.kind"), kind)?,
        precision: parsed(format!("{at}.precision"), precision)?,
    })
}

/// Deserializes a required `Option`; by default, serde accepts a missing field as `None`.
pub(super) fn required_option<'de, D: Deserializer<'de>, T: Deserialize<'de>>(
    from: D,
) -> Result<Option<T>, D::Error> {
    Option::deserialize(from)
}

/// Converts a policy to its wire form.
pub(super) fn policy_to_wire(residency: &ResidencyPolicy) -> Option<String> {
    match residency {
        ResidencyPolicy::Anywhere => None,
        ResidencyPolicy::Only(_) => Some(residency.to_string()),
    }
}

/// Parses a policy from its wire form.
pub(super) fn parse_policy(field: &str, residency: Option<String>) -> Result<ResidencyPolicy, WireError> {
    match residency {
        None => Ok(ResidencyPolicy::Anywhere),
        Some(text) => parsed(field, &text),
    }
}

impl From<&Deployment> for DeploymentV1 {
    fn from(deployment: &Deployment) -> DeploymentV1 {
        let Deployment { name, task, model, engine, residency, regions, order, placement, scaling } =
            deployment;
        DeploymentV1 {
            name: name.to_string(),
            task: task.to_string(),
            model: model.clone(),
            engine: engine_v1(*engine),
            residency: policy_to_wire(residency),
            regions: to_strings(regions),
            placement: placement.as_ref().map(PlacementV1::from),
            scaling: (*scaling != Scaling::default()).then(|| scaling.into()),
            routing: (!order.is_empty()).then(|| RoutingV1 { order: to_strings(order) }),
        }
    }
}

impl From<&PlacementSpec> for PlacementV1 {
    fn from(placement: &PlacementSpec) -> PlacementV1 {
        let PlacementSpec { accelerators, min_regions, min_replicas, max_cost } = placement;
        PlacementV1 {
            accelerators: to_strings(accelerators),
            min_regions: *min_regions,
            min_replicas: *min_replicas,
            max_cost_millionths: *max_cost,
        }
    }
}

fn read_placement(at: &str, wire: PlacementV1) -> Result<PlacementSpec, WireError> {
    let PlacementV1 { accelerators, min_regions, min_replicas, max_cost_millionths } = wire;
    reject_too_many(&format!("{at}.accelerators"), accelerators.len(), ACCELERATORS_MAX)?;
    let placement = PlacementSpec {
        accelerators: list(&format!("{at}.accelerators"), &accelerators, |at, kind| parsed(at, kind))?,
        min_regions,
        min_replicas,
        max_cost: max_cost_millionths,
    };
    match placement.problem() {
        None => Ok(placement),
        Some((key, problem)) => Err(WireError::new(format!("{at}.{key}"), problem)),
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
    reject_too_many(&format!("{at}.timetable"), timetable.len(), TIMETABLE_ENTRIES_MAX)?;
    let timetable = list(&format!("{at}.timetable"), timetable, |at, ShiftV1 { days, from, to, min }| {
        let field = |field: &str| format!("{at}.{field}");
        let (days, from) = (parsed(field("days"), &days)?, parsed(field("from"), &from)?);
        Ok(TimetableEntry { days, from, to: parsed(field("to"), &to)?, min })
    })?;
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

/// Reads the order of a deployment that runs in `regions`; empty if it has none.
fn read_order(
    at: &str,
    routing: Option<RoutingV1>,
    regions: &[RegionId],
) -> Result<Vec<RegionId>, WireError> {
    let Some(RoutingV1 { order }) = routing else { return Ok(Vec::new()) };
    reject_too_many(at, order.len(), MAX_REGIONS)?;
    let order: Vec<RegionId> = list(at, &order, |at, id| parsed(at, id))?;
    match Deployment::order_problem(&order, regions) {
        None => Ok(order),
        Some((index, problem)) => Err(WireError::new(format!("{at}[{index}]"), problem)),
    }
}

fn read_deployment(what: &str, wire: DeploymentV1) -> Result<Deployment, WireError> {
    let DeploymentV1 { name, task, model, engine, residency, regions, placement, scaling, routing } = wire;
    let at = |field: &str| format!("{what}.{field}");
    reject_too_many(&at("regions"), regions.len(), MAX_REGIONS)?;
    let regions = list(&at("regions"), &regions, |at, id| parsed(at, id))?;
    let order = read_order(&at("routing.order"), routing, &regions)?;
    Ok(Deployment {
        name: parsed(at("name"), &name)?,
        task: parsed(at("task"), &task)?,
        model,
        engine: read_engine(&at("engine"), &engine)?,
        residency: parse_policy(&at("residency"), residency)?,
        regions,
        order,
        placement: placement.map(|placement| read_placement(&at("placement"), placement)).transpose()?,
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
        let StoredDeploymentV1 { version: _, deployment } = wire;
        read_deployment("deployment", deployment)
    }
}

impl From<&DesiredDeployments> for DeploymentsV1 {
    fn from(desired: &DesiredDeployments) -> DeploymentsV1 {
        let DesiredDeployments { applied, deployments, promotions: Promotions { held, promoted } } = desired;
        let deployments = deployments.values().map(DeploymentV1::from).collect();
        let promoted = promoted
            .iter()
            .map(|(name, revision)| PromotedV1 { name: name.to_string(), revision: revision.to_string() });
        DeploymentsV1 {
            version: VERSION,
            applied: *applied,
            deployments,
            held: to_strings(held),
            promoted: promoted.collect(),
        }
    }
}

impl TryFrom<DeploymentsV1> for DesiredDeployments {
    type Error = WireError;

    fn try_from(wire: DeploymentsV1) -> Result<DesiredDeployments, WireError> {
        let DeploymentsV1 { version: _, applied, deployments, held, promoted } = wire;
        let promoted = entries("promoted", ".name", promoted, MAX_DEPLOYMENTS, |at, wire| {
            let PromotedV1 { name, revision } = wire;
            Ok((parsed(format!("{at}.name"), &name)?, parsed(format!("{at}.revision"), &revision)?))
        })?;
        let promotions = Promotions { held: names("held", &held)?, promoted };
        Ok(DesiredDeployments { applied, deployments: read_deployments(deployments)?, promotions })
    }
}

/// Parses a list of distinct deployments.
pub fn read_deployments(wire: Vec<DeploymentV1>) -> Result<BTreeMap<DeploymentName, Deployment>, WireError> {
    entries("deployments", ".name", wire, MAX_DEPLOYMENTS, |at, wire| {
        let deployment = read_deployment(at, wire)?;
        Ok((deployment.name.clone(), deployment))
    })
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
        fn placement()(
            accelerators in vec(select(vec!["l4", "h100", "a100-80gb"]), 0..3),
            min_regions in 1u32..=16, min_replicas in 0u32..=1024, max_cost in proptest::option::of(any::<u64>()),
        ) -> PlacementSpec {
            let accelerators = accelerators.into_iter().map(|kind| kind.parse().unwrap()).collect();
            PlacementSpec { accelerators, min_regions, min_replicas, max_cost }
        }
    }

    prop_compose! {
        pub(crate) fn deployment()(
            name in any::name(),
            task in select(Task::ALL),
            model in "(pypi|hf)://[a-z/]{1,12}",
            kind in select(EngineKind::ALL),
            precision in select(Precision::ALL),
            residency in select(vec!["anywhere", "eu", "de,eu,aws/us-east-1", "de,fr & eu"]),
            regions in vec(any::region(), 0..3),
            ordered in 0..3usize,
            placement in proptest::option::of(placement()),
            scaling in prop_oneof![Just(Scaling::default()), scaling()],
        ) -> Deployment {
            let engine = EngineSpec { kind, precision };
            // The first regions, last one first.
            let mut order: Vec<RegionId> = Vec::new();
            for region in regions.iter().take(ordered) {
                if !order.contains(region) {
                    order.insert(0, region.clone());
                }
            }
            let residency = residency.parse().unwrap();
            Deployment { name, task, model, engine, residency, regions, order, placement, scaling }
        }
    }

    proptest! {
        #[test]
        fn a_stored_deployment_survives_a_round_trip(deployment in deployment()) {
            let text = serde_json::to_string(&StoredDeploymentV1::from(&deployment)).unwrap();
            let wire: StoredDeploymentV1 = serde_json::from_str(&text).unwrap();
            prop_assert_eq!(Deployment::try_from(wire), Ok(deployment));
        }

        #[test]
        fn a_placement_within_its_limits_is_accepted_and_another_one_rejected_with_its_field(
            accelerators in 0usize..20, min_regions in 0u32..20, min_replicas in 0u32..2048,
        ) {
            let accelerators: Vec<_> = (0..accelerators).map(|n| format!("gpu-{n}")).collect();
            let placement = json!({"accelerators": accelerators, "min_regions": min_regions, "min_replicas": min_replicas});
            let deployment = json!({"name": "m", "task": "embed", "model": "m", "regions": [], "residency": null,
                                    "engine": {"kind": "cpu", "precision": "f32"}, "placement": placement});
            let wire: StoredDeploymentV1 = serde_json::from_value(json!({"version": 1, "deployment": deployment})).unwrap();
            let wrong = [
                (accelerators.len() > 16, "deployment.placement.accelerators"),
                (!(1..=16).contains(&min_regions), "deployment.placement.min_regions"),
                (min_replicas > 1024, "deployment.placement.min_replicas"),
            ];
            let field = wrong.iter().find(|(is_wrong, _)| *is_wrong).map(|(_, field)| (*field).to_owned());
            let read = Deployment::try_from(wire);
            prop_assert_eq!(read.err().map(|error| error.field), field);
        }

        #[test]
        fn desired_deployments_survive_a_round_trip(applied: bool, deployments in vec(deployment(), 0..4)) {
            let named = deployments.into_iter().map(|deployment| (deployment.name.clone(), deployment));
            let desired = DesiredDeployments { applied, deployments: named.collect(), promotions: Promotions::default() };
            let text = serde_json::to_string(&DeploymentsV1::from(&desired)).unwrap();
            let wire: DeploymentsV1 = serde_json::from_str(&text).unwrap();
            prop_assert_eq!(DesiredDeployments::try_from(wire), Ok(desired));
        }
    }

    #[test]
    fn a_message_of_another_version_is_rejected() {
        let other = json!({"version": 2});
        let errors = [
            serde_json::from_value::<StoredDeploymentV1>(other.clone()).unwrap_err(),
            serde_json::from_value::<DeploymentsV1>(other).unwrap_err(),
        ];
        for error in errors {
            assert!(error.to_string().starts_with("version 2 is not supported"), "{error}");
        }
    }
}
