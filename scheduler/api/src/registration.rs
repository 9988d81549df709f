//! Registration of a spoke at the hub: its address, and the deployments that are ready in its region.
//!
//! A region has one or more spokes, which serve the same replicas. Each has a name, its *instance*, which no other
//! spoke of the region may use while its lease is valid.
//!
//! A registration is valid as long as its lease is kept alive. The same type is the stored record of a spoke.

use std::collections::{BTreeMap, BTreeSet};
use std::str::FromStr;

use regions::accelerator::{PRICE_MAX, TYPES_MAX, to_millionths};
use regions::{Accelerators, DeploymentName, EngineKind, HostPort, InstanceName, Offering, RegionId};
use serde::{Deserialize, Serialize};

use super::plan::{FloorV1, PoolV1, RegionCapacity};
use super::revision::{ReplicaRevisions, ReplicaRevisionsV1, read_replica_revisions, replica_revisions_v1};
use super::scaler::ScalerLeaseV1;
use super::start_failure::{DeploymentFailures, DeploymentFailuresV1, failures_v1, read_failures};
use super::{MessageVersion, VERSION, WireError, entries, names, parsed, to_strings};

/// Registration of a spoke.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Registration {
    /// Region of the spoke.
    pub region: RegionId,
    /// Name of the spoke within its region.
    pub instance: InstanceName,
    /// Address at which gateways reach it.
    pub endpoint: HostPort,
    /// Random number drawn at each start of the spoke.
    pub boot_id: u64,
    /// Deployments that have a ready replica, or would start one on demand.
    pub deployments: BTreeSet<DeploymentName>,
    /// Capacity of the region.
    pub capacity: RegionCapacity,
    /// Model revisions that its replicas run.
    pub models: BTreeMap<DeploymentName, ReplicaRevisions>,
    /// Models of which no replica can start.
    pub failures: BTreeMap<DeploymentName, DeploymentFailures>,
    /// Engines that its replicas can run; `None` if the spoke does not know.
    pub engines: Option<BTreeSet<EngineKind>>,
    /// Whether the spoke finishes its requests and stops.
    pub draining: bool,
    /// Whether the spoke can start replicas, so that it may hold the scaler lease of its region.
    pub scales: bool,
    /// Log of its queue of jobs, if it has one.
    pub job_log: Option<JobLogKind>,
    /// Accelerators of the region, by its operator; empty if those of the catalogue apply.
    pub accelerators: Accelerators,
}

/// Storage of the log of a queue of jobs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JobLogKind {
    /// File of the spoke.
    File,
    /// Stream of NATS JetStream, which the spokes of a region share.
    Nats,
}

impl JobLogKind {
    /// Returns whether a spoke with this log and another one of its region have two queues. Gateways look for a job at one.
    pub fn is_another_queue(self, other: JobLogKind) -> bool {
        (self, other) != (JobLogKind::Nats, JobLogKind::Nats)
    }

    /// Returns the text of the messages.
    fn as_str(self) -> &'static str {
        match self {
            JobLogKind::File => "file",
            JobLogKind::Nats => "nats",
        }
    }
}

impl FromStr for JobLogKind {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<JobLogKind, &'static str> {
        let all = [JobLogKind::File, JobLogKind::Nats];
        all.into_iter().find(|kind| kind.as_str() == text).ok_or("is not \"file\" or \"nats\"")
    }
}

/// `POST /v1/spokes`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RegisterV1 {
    /// Version of the message.
    pub version: MessageVersion,
    /// Region of the spoke.
    pub region: String,
    /// Name of the spoke within its region.
    pub instance: String,
    /// Address at which gateways reach it.
    pub endpoint: String,
    /// Random number drawn at each start of the spoke.
    pub boot_id: u64,
    /// Deployments that have a ready replica, or would start one on demand.
    pub deployments: Vec<String>,
    /// Capacity of the region. Absent from spokes that do not report it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub capacity: Vec<PoolV1>,
    /// Model revisions that its replicas run. Absent from spokes that do not report them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub models: Vec<ReplicaRevisionsV1>,
    /// Models of which no replica can start. Absent if there are none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub failures: Vec<DeploymentFailuresV1>,
    /// Engines that its replicas can run. Absent if the spoke does not know. Kinds of later versions are ignored.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub engines: Option<Vec<String>>,
    /// Whether the spoke finishes its requests and stops. Absent if not.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub draining: bool,
    /// Whether the spoke can start replicas. Absent if not.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub scales: bool,
    /// Log of its queue of jobs: `file` or `nats`. Absent without a queue, and from spokes that do not report it; spokes of later
    /// versions may send other ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub job_log: Option<String>,
    /// Accelerators of the region. Absent if those of the hub's catalogue apply.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub accelerators: Vec<OfferingV1>,
}

/// Accelerators of one type in a region.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OfferingV1 {
    /// Type, as deployments name it.
    #[serde(rename = "type")]
    pub kind: String,
    /// Number that the fleet may use; absent if unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub count: Option<u32>,
    /// Price of one per hour, in millionths of the operator's currency unit; absent if unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub price_millionths: Option<u64>,
}

/// Converts accelerators to their wire form.
fn accelerators_v1(accelerators: &Accelerators) -> Vec<OfferingV1> {
    let each = accelerators.iter().map(|(kind, Offering { count, price })| OfferingV1 {
        kind: kind.to_string(),
        count: *count,
        price_millionths: *price,
    });
    each.collect()
}

/// Parses a list of accelerators, each type once.
fn read_accelerators(wire: Vec<OfferingV1>) -> Result<Accelerators, WireError> {
    entries("accelerators", ".type", wire, TYPES_MAX, |at, OfferingV1 { kind, count, price_millionths }| {
        if price_millionths.is_some_and(|price| price > to_millionths(PRICE_MAX)) {
            let problem = format!("is above {PRICE_MAX} per hour");
            return Err(WireError::new(format!("{at}.price_millionths"), problem));
        }
        Ok((parsed(format!("{at}.type"), &kind)?, Offering { count, price: price_millionths }))
    })
}

/// `POST /v1/leases/{lease}/keepalive?holder={holder}`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeepAliveV1 {
    /// Version of the message.
    pub version: MessageVersion,
    /// State of the region. Absent if it is that of the last keep-alive that the hub has confirmed, or else of the
    /// registration.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state: Option<RegionStateV1>,
}

/// Changing part of a registration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RegionStateV1 {
    /// All deployments that have a ready replica, or would start one on demand, as in the registration.
    pub deployments: Vec<String>,
    /// Capacity of the region, as in the registration.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub capacity: Vec<PoolV1>,
    /// Model revisions that its replicas run, as in the registration.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub models: Vec<ReplicaRevisionsV1>,
    /// Models of which no replica can start, as in the registration.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub failures: Vec<DeploymentFailuresV1>,
    /// Whether the spoke finishes its requests and stops. Absent if not.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub draining: bool,
}

/// Changing part of a registration.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RegionState {
    /// Deployments that have a ready replica, or would start one on demand.
    pub deployments: BTreeSet<DeploymentName>,
    /// Capacity of the region.
    pub capacity: RegionCapacity,
    /// Model revisions that its replicas run.
    pub models: BTreeMap<DeploymentName, ReplicaRevisions>,
    /// Models of which no replica can start.
    pub failures: BTreeMap<DeploymentName, DeploymentFailures>,
    /// Whether the spoke finishes its requests and stops.
    pub draining: bool,
}

/// Response to both: the registration is valid.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseV1 {
    /// Version of the message.
    pub version: MessageVersion,
    /// Identifier with which the holder renews and ends its lease ([`crate::lease`]): 32 hexadecimal digits, a secret
    /// of the holder.
    pub lease: String,
    /// Time to live of the lease without a renewal, in milliseconds.
    pub ttl_ms: u64,
    /// Listed deployments that the hub does not know. The route table omits them until it does.
    pub unknown: Vec<String>,
    /// Minimum numbers of replicas by deployment. Absent before the first plan; then the previous floors stay in force.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub floors: Option<Vec<FloorV1>>,
    /// Scaler lease of the region. Absent if no spoke holds it, and from hubs that do not grant it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scaler: Option<ScalerLeaseV1>,
}

impl From<&Registration> for RegisterV1 {
    fn from(registration: &Registration) -> RegisterV1 {
        let Registration {
            region,
            instance,
            endpoint,
            boot_id,
            deployments,
            capacity,
            models,
            failures,
            engines,
            draining,
            scales,
            job_log,
            accelerators,
        } = registration;
        RegisterV1 {
            version: VERSION,
            region: region.to_string(),
            instance: instance.to_string(),
            endpoint: endpoint.to_string(),
            boot_id: *boot_id,
            deployments: to_strings(deployments),
            capacity: capacity.into(),
            models: replica_revisions_v1(models),
            failures: failures_v1(failures).into_values().collect(),
            engines: engines.as_ref().map(to_strings),
            draining: *draining,
            scales: *scales,
            job_log: job_log.map(|kind| kind.as_str().to_owned()),
            accelerators: accelerators_v1(accelerators),
        }
    }
}

impl TryFrom<RegisterV1> for Registration {
    type Error = WireError;

    fn try_from(wire: RegisterV1) -> Result<Registration, WireError> {
        let RegisterV1 {
            version: _,
            region,
            instance,
            endpoint,
            boot_id,
            deployments,
            capacity,
            models,
            failures,
            engines,
            draining,
            scales,
            job_log,
            accelerators,
        } = wire;
        Ok(Registration {
            region: parsed("region", &region)?,
            instance: parsed("instance", &instance)?,
            endpoint: parsed("endpoint", &endpoint)?,
            boot_id,
            deployments: names("deployments", &deployments)?,
            capacity: capacity.try_into()?,
            models: read_replica_revisions("models", models)?,
            failures: read_failures("failures", failures)?,
            engines: engines.map(|kinds| kinds.iter().filter_map(|kind| kind.parse().ok()).collect()),
            draining,
            scales,
            // A log of a later version is not compared with those of other spokes, and the spoke is registered.
            job_log: job_log.and_then(|kind| kind.parse().ok()),
            accelerators: read_accelerators(accelerators)?,
        })
    }
}

impl From<&RegionState> for RegionStateV1 {
    fn from(state: &RegionState) -> RegionStateV1 {
        let RegionState { deployments, capacity, models, failures, draining } = state;
        RegionStateV1 {
            deployments: to_strings(deployments),
            capacity: capacity.into(),
            models: replica_revisions_v1(models),
            failures: failures_v1(failures).into_values().collect(),
            draining: *draining,
        }
    }
}

impl TryFrom<RegionStateV1> for RegionState {
    type Error = WireError;

    fn try_from(wire: RegionStateV1) -> Result<RegionState, WireError> {
        let RegionStateV1 { deployments, capacity, models, failures, draining } = wire;
        Ok(RegionState {
            deployments: names("deployments", &deployments)?,
            capacity: capacity.try_into()?,
            models: read_replica_revisions("models", models)?,
            failures: read_failures("failures", failures)?,
            draining,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::any;
    use super::*;
    use crate::plan::{ReplicaCount, ReplicaPool};
    use crate::revision::RevisionReplicas;
    use crate::start_failure::FailedModel;
    use proptest::prelude::*;
    use regions::{EngineSpec, Precision, ReportedModel, Task};
    use replica_api::start_failure::{StartFailure, StartFailureReport};
    use serde_json::{Value, json};

    prop_compose! {
        fn registration()(
            region in any::region(), instance in any::instance(), endpoint in any::endpoint(), boot_id: u64,
            deployments in any::names(), speed: u64, draining: bool, scales: bool, knows_engines: bool,
            job_log in proptest::option::of(prop_oneof![Just(JobLogKind::File), Just(JobLogKind::Nats)]),
            offered in proptest::option::of((proptest::option::of(0u32..9), proptest::option::of(0..=to_millionths(PRICE_MAX)))),
        ) -> Registration {
            let capacity = capacity(&deployments, speed);
            let (models, failures) = (models(&deployments), failures(&deployments));
            let engines = knows_engines.then(|| BTreeSet::from([EngineKind::Cpu]));
            let offering = |(count, price)| ("l4".parse().unwrap(), Offering { count, price });
            let accelerators = offered.map(offering).into_iter().collect();
            Registration {
                region, instance, endpoint, boot_id, deployments, capacity, models, failures, engines, draining, scales,
                job_log, accelerators,
            }
        }
    }

    proptest! {
        #[test]
        fn a_registration_survives_a_round_trip(registration in registration()) {
            let text = serde_json::to_string(&RegisterV1::from(&registration)).unwrap();
            let wire: RegisterV1 = serde_json::from_str(&text).unwrap();
            prop_assert_eq!(Registration::try_from(wire), Ok(registration));
        }

        #[test]
        fn what_is_ready_survives_a_round_trip(ready in any::names(), speed: u64, draining: bool) {
            let (capacity, models, failures) = (capacity(&ready, speed), models(&ready), failures(&ready));
            let state = RegionState { capacity, models, failures, deployments: ready, draining };
            let sent = KeepAliveV1 { version: VERSION, state: Some((&state).into()) };
            let text = serde_json::to_string(&sent).unwrap();
            let wire: KeepAliveV1 = serde_json::from_str(&text).unwrap();
            prop_assert_eq!(wire.state.map(RegionState::try_from), Some(Ok(state)));
        }
    }

    /// Returns two revisions of each of these deployments.
    fn models(names: &BTreeSet<DeploymentName>) -> BTreeMap<DeploymentName, ReplicaRevisions> {
        let counted = |revision: &str, ready| RevisionReplicas {
            model: ReportedModel {
                revision: revision.parse().unwrap(),
                source: "pypi://m".to_owned(),
                task: Task::Embed,
                engine: EngineSpec { kind: EngineKind::Cpu, precision: Precision::F32 },
            },
            replicas: 2,
            ready,
        };
        let models = vec![counted("00000000000000aa", 2), counted("00000000000000bb", 0)];
        names
            .iter()
            .map(|name| (name.clone(), ReplicaRevisions { target: Some(3), models: models.clone() }))
            .collect()
    }

    /// Returns a failed model of each of these deployments.
    fn failures(names: &BTreeSet<DeploymentName>) -> BTreeMap<DeploymentName, DeploymentFailures> {
        let failure = StartFailureReport::new(StartFailure::ModelForbidden, "403");
        let failed =
            FailedModel { model: "hf://m".to_owned(), task: Some(Task::Embed), engine: None, failure };
        let failures = DeploymentFailures { served: Some(failed.clone()), next: Some(failed), waiting: None };
        names.iter().map(|name| (name.clone(), failures.clone())).collect()
    }

    #[test]
    fn an_engine_of_a_later_version_is_ignored() {
        let message = json!({"version": 1, "region": "aws/us-east-1", "instance": "a", "endpoint": "10.0.0.7:7100",
                             "boot_id": 1, "deployments": [], "engines": ["cpu", "tpu"]});
        let wire: RegisterV1 = serde_json::from_value(message).unwrap();
        assert_eq!(Registration::try_from(wire).unwrap().engines, Some(BTreeSet::from([EngineKind::Cpu])));
    }

    /// Returns one pool for all of these deployments.
    fn capacity(names: &BTreeSet<DeploymentName>, tokens_per_second: u64) -> RegionCapacity {
        let deployments =
            names.iter().map(|name| (name.clone(), ReplicaCount { ready: 1, max: 4 })).collect();
        RegionCapacity { pools: vec![ReplicaPool { ready: 1, tokens_per_second, deployments }] }
    }

    #[test]
    fn a_registration_without_a_capacity_has_the_default_capacity() {
        let wire: RegionStateV1 = serde_json::from_value(json!({"deployments": ["a"]})).unwrap();
        assert_eq!(RegionState::try_from(wire).unwrap().capacity, RegionCapacity::default());
        let lease = json!({"version": 1, "lease": "00", "ttl_ms": 5000, "unknown": []});
        let lease = serde_json::from_value::<LeaseV1>(lease).unwrap();
        assert_eq!((lease.floors, lease.scaler), (None, None));
    }

    #[test]
    fn a_registration_that_is_invalid_is_rejected_with_its_field() {
        let check = |field: &str, value: Value, named: &str| {
            let mut message = json!({"version": 1, "region": "aws/us-east-1", "instance": "a",
                                     "endpoint": "10.0.0.7:7100", "boot_id": 1, "deployments": ["a"]});
            message[field] = value;
            let wire: RegisterV1 = serde_json::from_value(message).unwrap();
            let error = Registration::try_from(wire).unwrap_err();
            assert_eq!(error.field, named, "{error}");
        };
        check("region", json!("us-east-1"), "region");
        check("instance", json!(""), "instance");
        check("instance", json!("a/b"), "instance");
        for unreachable in ["0.0.0.0:7100", "[::]:7100", "spoke.internal", "10.0.0.7:0", ""] {
            check("endpoint", json!(unreachable), "endpoint");
        }
        check("deployments", json!(["a", "b/c"]), "deployments[1]");
        check("deployments", json!(["a", "a"]), "deployments[1]");
        check("accelerators", json!([{"type": "l 4"}]), "accelerators[0].type");
        check("accelerators", json!([{"type": "l4"}, {"type": "l4"}]), "accelerators[1].type");
        let price = json!([{"type": "l4", "price_millionths": 1_000_000_000_001u64}]);
        check("accelerators", price, "accelerators[0].price_millionths");
    }

    #[test]
    fn a_spoke_of_a_later_version_is_registered_without_what_only_that_version_knows() {
        let mut message = json!({"version": 1, "region": "aws/us-east-1", "instance": "a", "endpoint": "10.0.0.7:7100",
                                 "boot_id": 1, "deployments": ["a"], "job_log": "nats"});
        let read = |message: &Value| {
            Registration::try_from(serde_json::from_value::<RegisterV1>(message.clone()).unwrap()).unwrap()
        };
        let known = read(&message);
        assert_eq!(known.job_log, Some(JobLogKind::Nats));
        message["job_log"] = json!("redis");
        message["zone"] = json!("a");
        assert_eq!(read(&message), Registration { job_log: None, ..known });
    }

    #[test]
    fn a_message_of_another_version_is_rejected() {
        let other = json!({"version": 7});
        let errors = [
            serde_json::from_value::<RegisterV1>(other.clone()).unwrap_err(),
            serde_json::from_value::<KeepAliveV1>(other.clone()).unwrap_err(),
            serde_json::from_value::<LeaseV1>(other).unwrap_err(),
        ];
        for error in errors {
            assert!(error.to_string().starts_with("version 7 is not supported"), "{error}");
        }
    }
}
