//! What the region's scaler has decided last, for whoever looks at the region: operators, by the ingress's metrics.

use std::collections::BTreeMap;

use super::Spoke;
use crate::scale::Wanted;
use regions::DeploymentName;

/// One deployment's replicas, as they should be and as they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decided {
    /// How many there should be, and why.
    pub wanted: Wanted,
    /// How many take work.
    pub ready: u32,
    /// How many are on their way.
    pub ordered: u32,
    /// How many finish what they have and go.
    pub leaving: u32,
    /// How many have died since the spoke started.
    pub deaths: u64,
    /// How long nine of ten take at most to start, in milliseconds.
    pub start_ms: u64,
}

impl Spoke {
    /// What was decided, for each deployment that is scaled here.
    pub fn set_decided(&mut self, decided: BTreeMap<DeploymentName, Decided>) {
        self.decided = decided;
    }

    /// What was decided last.
    pub fn decided(&self) -> &BTreeMap<DeploymentName, Decided> {
        &self.decided
    }
}
