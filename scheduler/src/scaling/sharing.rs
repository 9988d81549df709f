//! State that a spoke shares with the other spokes of its region while it scales.

use std::collections::BTreeMap;
use std::sync::Arc;

use regions::DeploymentName;
use scheduler_api::peer::SharedDeployment;
use tokio::sync::watch;

use super::ScalingSignals;
use crate::config::{ActuatorConfig, SpokeConfig};

/// State that the scaler shares with the other spokes.
pub(super) struct Sharing {
    /// Start times and numbers of the last decision.
    pub(super) deployments: BTreeMap<DeploymentName, SharedDeployment>,
    /// Whether replicas of other spokes drain.
    pub(super) drains_remote: bool,
    /// Sequence number of the state.
    pub(super) sequence: Arc<watch::Sender<u64>>,
    /// Whether other spokes can reach the replicas of this one.
    pub(super) is_reachable: bool,
    /// The opposite was logged.
    pub(super) is_logged: bool,
}

impl Sharing {
    pub(super) fn new(config: &SpokeConfig, signals: &ScalingSignals) -> Sharing {
        let on_loopback = match config.scaling.as_ref().map(|scaling| &scaling.actuator) {
            Some(ActuatorConfig::Process(process)) => process.address.is_loopback(),
            Some(ActuatorConfig::Kubernetes(_)) | None => false,
        };
        Sharing {
            deployments: BTreeMap::new(),
            drains_remote: false,
            sequence: signals.shared.clone(),
            // On one machine, other spokes reach loopback too.
            is_reachable: !on_loopback || config.advertise.is_loopback(),
            is_logged: false,
        }
    }
}

/// Returns whether the actuator stops its replicas with the spoke.
pub(super) fn ends_with_spoke(config: &SpokeConfig) -> bool {
    let actuator = config.scaling.as_ref().map(|scaling| &scaling.actuator);
    matches!(actuator, Some(ActuatorConfig::Process(_)))
}
