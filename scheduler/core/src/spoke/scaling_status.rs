//! What the region's scaler has scaling_status last, for whoever looks at the region: operators, by the ingress's metrics.

use std::collections::BTreeMap;

use super::Spoke;
use crate::scale::ScalingDecision;
use regions::DeploymentName;

/// One deployment's replicas, as they should be and as they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScalingStatus {
    /// How many there should be, and why.
    pub decision: ScalingDecision,
    /// How many take work.
    pub ready: u32,
    /// How many are on their way.
    pub provisioning: u32,
    /// How many finish what they have and go.
    pub draining: u32,
    /// How many have died since the spoke started.
    pub deaths: u64,
    /// How long nine of ten take at most to start, in milliseconds.
    pub start_ms: u64,
}

impl Spoke {
    /// What was scaling_status, for each deployment that is scaled here.
    pub fn set_scaling_status(&mut self, scaling_status: BTreeMap<DeploymentName, ScalingStatus>) {
        self.scaling_status = scaling_status;
    }

    /// What was scaling_status last.
    pub fn scaling_status(&self) -> &BTreeMap<DeploymentName, ScalingStatus> {
        &self.scaling_status
    }
}
