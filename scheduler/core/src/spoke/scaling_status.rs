//! Last decisions of the region's scaler, for the ingress's metrics.

use std::collections::BTreeMap;

use super::Spoke;
use crate::scale::ScalingDecision;
use regions::DeploymentName;

/// Desired and current replicas of one deployment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScalingStatus {
    /// Last decision of the autoscaler.
    pub decision: ScalingDecision,
    /// Number of ready replicas.
    pub ready: u32,
    /// Number of replicas that are being provisioned.
    pub provisioning: u32,
    /// Number of draining replicas.
    pub draining: u32,
    /// Number of crashes since the start of the spoke.
    pub crashes: u64,
    /// 90th percentile of the start times, in milliseconds.
    pub start_ms: u64,
}

impl Spoke {
    /// Replaces the status of all deployments that are scaled here.
    pub fn set_scaling_status(&mut self, scaling_status: BTreeMap<DeploymentName, ScalingStatus>) {
        self.scaling_status = scaling_status;
    }

    /// Returns the last status by deployment.
    pub fn scaling_status(&self) -> &BTreeMap<DeploymentName, ScalingStatus> {
        &self.scaling_status
    }
}
