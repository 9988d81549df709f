//! What a spoke tells the hub: where gateways reach its region, and what is ready there.
//!
//! A registration stands for as long as its lease is kept alive. The same message is what the store keeps of a spoke, so
//! that there is one form of it and not two.

use serde::{Deserialize, Serialize};

use super::plan::{FloorV1, PoolV1};
use super::revision::{ReplicaRevisionsV1, read_replica_revisions, replica_revisions_v1};
use super::{VERSION, WireError, endpoint, known_version, names, parsed, refuse_other_versions, texts};
use crate::plan::capacity::RegionCapacity;
use crate::registry::Registration;
use crate::revisions::ReplicaRevisions;
use regions::DeploymentName;
use std::collections::{BTreeMap, BTreeSet};

/// `POST /v1/spokes`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RegisterV1 {
    /// 1.
    #[serde(deserialize_with = "known_version")]
    pub version: u32,
    /// The region whose spoke this is.
    pub region: String,
    /// Where gateways reach it.
    pub endpoint: String,
    /// Drawn anew whenever the spoke starts.
    pub boot_id: u64,
    /// The deployments that have a replica ready, or would have one for whoever asks.
    pub deployments: Vec<String>,
    /// What the region can do. Absent from spokes that do not say.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub capacity: Vec<PoolV1>,
    /// What its replicas run. Absent from spokes that do not say.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub models: Vec<ReplicaRevisionsV1>,
}

/// `POST /v1/leases/{lease}/keepalive?holder={holder}`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeepAliveV1 {
    /// 1.
    #[serde(deserialize_with = "known_version")]
    pub version: u32,
    /// Those that have a replica ready, or would have one for whoever asks: all of them, as in the registration.
    pub deployments: Vec<String>,
    /// What the region can do, as in the registration.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub capacity: Vec<PoolV1>,
    /// What its replicas run, as in the registration.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub models: Vec<ReplicaRevisionsV1>,
}

/// What a spoke says of its region again and again.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RegionState {
    /// The deployments that have a replica ready, or would have one for whoever asks.
    pub deployments: BTreeSet<DeploymentName>,
    /// What the region can do.
    pub capacity: RegionCapacity,
    /// What its replicas run.
    pub models: BTreeMap<DeploymentName, ReplicaRevisions>,
}

/// The answer to both: the registration stands.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseV1 {
    /// 1.
    #[serde(deserialize_with = "known_version")]
    pub version: u32,
    /// By which its holder renews and ends it ([`crate::lease`]): 32 hexadecimal digits, known to nobody else.
    pub lease: String,
    /// For how long it stands without being kept alive.
    pub ttl_ms: u64,
    /// Deployments that were named and that the hub does not know. The route table leaves them out until it does.
    pub unknown: Vec<String>,
    /// How many replicas the region is to keep at least, by deployment. Absent where nobody has planned yet: then what was
    /// told before stands.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub floors: Option<Vec<FloorV1>>,
}

impl From<&Registration> for RegisterV1 {
    fn from(registration: &Registration) -> RegisterV1 {
        let Registration { region, endpoint, boot_id, deployments, capacity, models } = registration;
        RegisterV1 {
            version: VERSION,
            region: region.to_string(),
            endpoint: endpoint.to_string(),
            boot_id: *boot_id,
            deployments: texts(deployments),
            capacity: capacity.into(),
            models: replica_revisions_v1(models),
        }
    }
}

impl TryFrom<RegisterV1> for Registration {
    type Error = WireError;

    fn try_from(wire: RegisterV1) -> Result<Registration, WireError> {
        let RegisterV1 { version, region, endpoint: at, boot_id, deployments, capacity, models } = wire;
        refuse_other_versions(version)?;
        Ok(Registration {
            region: parsed("region", &region)?,
            endpoint: endpoint("endpoint", &at)?,
            boot_id,
            deployments: names("deployments", &deployments)?,
            capacity: capacity.try_into()?,
            models: read_replica_revisions("models", models)?,
        })
    }
}

impl KeepAliveV1 {
    /// The message that says this of the region.
    pub fn new(state: &RegionState) -> KeepAliveV1 {
        let RegionState { deployments, capacity, models } = state;
        KeepAliveV1 {
            version: VERSION,
            deployments: texts(deployments),
            capacity: capacity.into(),
            models: replica_revisions_v1(models),
        }
    }

    /// What it says of the region.
    ///
    /// # Errors
    ///
    /// The first field that cannot be right.
    pub fn into_state(self) -> Result<RegionState, WireError> {
        let KeepAliveV1 { version, deployments, capacity, models } = self;
        refuse_other_versions(version)?;
        Ok(RegionState {
            deployments: names("deployments", &deployments)?,
            capacity: capacity.try_into()?,
            models: read_replica_revisions("models", models)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::any;
    use super::*;
    use crate::plan::capacity::{ReplicaCount, ReplicaPool};
    use crate::revisions::RevisionReplicas;
    use proptest::prelude::*;
    use regions::{EngineKind, EngineSpec, Precision, ReportedModel, Task};
    use serde_json::{Value, json};

    prop_compose! {
        fn registration()(
            region in any::region(), endpoint in any::endpoint(), boot_id: u64, deployments in any::names(), speed: u64,
        ) -> Registration {
            let capacity = capacity(&deployments, speed);
            let models = models(&deployments);
            Registration { region, endpoint, boot_id, deployments, capacity, models }
        }
    }

    proptest! {
        #[test]
        fn a_registration_comes_back_as_it_went(registration in registration()) {
            let text = serde_json::to_string(&RegisterV1::from(&registration)).unwrap();
            let wire: RegisterV1 = serde_json::from_str(&text).unwrap();
            prop_assert_eq!(Registration::try_from(wire), Ok(registration));
        }

        #[test]
        fn what_is_ready_comes_back_as_it_went(ready in any::names(), speed: u64) {
            let state = RegionState { capacity: capacity(&ready, speed), models: models(&ready), deployments: ready };
            let text = serde_json::to_string(&KeepAliveV1::new(&state)).unwrap();
            let wire: KeepAliveV1 = serde_json::from_str(&text).unwrap();
            prop_assert_eq!(wire.into_state(), Ok(state));
        }
    }

    /// Two revisions of each of these.
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

    /// One pool for all of these.
    fn capacity(names: &BTreeSet<DeploymentName>, tokens_per_second: u64) -> RegionCapacity {
        let deployments = names.iter().map(|name| (name.clone(), ReplicaCount { ready: 1, max: 4 })).collect();
        RegionCapacity { pools: vec![ReplicaPool { ready: 1, tokens_per_second, deployments }] }
    }

    #[test]
    fn a_spoke_that_does_not_say_what_it_can_do_is_read_as_one_that_can_do_nothing_known() {
        let wire: KeepAliveV1 = serde_json::from_value(json!({"version": 1, "deployments": ["a"]})).unwrap();
        assert_eq!(wire.into_state().unwrap().capacity, RegionCapacity::default());
        let lease = json!({"version": 1, "lease": "00", "ttl_ms": 5000, "unknown": []});
        assert_eq!(serde_json::from_value::<LeaseV1>(lease).unwrap().floors, None);
    }

    #[test]
    fn a_registration_that_cannot_be_right_is_refused_by_its_field() {
        let check = |field: &str, value: Value, named: &str| {
            let mut message = json!({"version": 1, "region": "aws/us-east-1", "endpoint": "10.0.0.7:7100",
                                     "boot_id": 1, "deployments": ["a"]});
            message[field] = value;
            let wire: RegisterV1 = serde_json::from_value(message).unwrap();
            let error = Registration::try_from(wire).unwrap_err();
            assert_eq!(error.field, named, "{error}");
        };
        check("region", json!("us-east-1"), "region");
        check("endpoint", json!("0.0.0.0:7100"), "endpoint");
        check("deployments", json!(["a", "b/c"]), "deployments[1]");
        check("deployments", json!(["a", "a"]), "deployments[1]");
    }

    #[test]
    fn a_message_of_another_version_is_refused_by_name() {
        let other = json!({"version": 7});
        let errors = [
            serde_json::from_value::<RegisterV1>(other.clone()).unwrap_err(),
            serde_json::from_value::<KeepAliveV1>(other.clone()).unwrap_err(),
            serde_json::from_value::<LeaseV1>(other).unwrap_err(),
        ];
        for error in errors {
            assert!(error.to_string().starts_with("version 7 is not known here"), "{error}");
        }
    }
}
