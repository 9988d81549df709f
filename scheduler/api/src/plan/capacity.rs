//! Capacity of a region's replicas.

use std::collections::{BTreeMap, BTreeSet};

use regions::DeploymentName;
use regions::deployment::MAX_DEPLOYMENTS;
use serde::{Deserialize, Serialize};

use super::super::{WireError, parsed, reject_too_many};

/// Capacity of a region.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RegionCapacity {
    /// Pools of replicas.
    pub pools: Vec<ReplicaPool>,
}

/// Replicas that serve the same deployments.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReplicaPool {
    /// Number of ready replicas.
    pub ready: u32,
    /// Total speed; 0 while unknown.
    pub tokens_per_second: u64,
    /// Deployments that the replicas serve.
    pub deployments: BTreeMap<DeploymentName, ReplicaCount>,
}

/// Replica counts of one deployment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReplicaCount {
    /// Number of ready replicas.
    pub ready: u32,
    /// Maximum number of replicas; the current number where nothing starts replicas.
    pub max: u32,
}

/// Replicas that serve the same deployments.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolV1 {
    /// Number of ready replicas.
    pub ready: u32,
    /// Total speed; 0 while unknown.
    pub tokens_per_second: u64,
    /// Deployments that they serve.
    pub deployments: Vec<CountV1>,
}

/// Replica counts of one deployment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CountV1 {
    /// Name of the deployment.
    pub name: String,
    /// Number of ready replicas.
    pub ready: u32,
    /// Maximum number of replicas.
    pub max: u32,
}

impl From<&RegionCapacity> for Vec<PoolV1> {
    fn from(capacity: &RegionCapacity) -> Vec<PoolV1> {
        let RegionCapacity { pools } = capacity;
        let pools = pools.iter().map(|ReplicaPool { ready, tokens_per_second, deployments }| PoolV1 {
            ready: *ready,
            tokens_per_second: *tokens_per_second,
            deployments: deployments
                .iter()
                .map(|(name, ReplicaCount { ready, max })| CountV1 {
                    name: name.to_string(),
                    ready: *ready,
                    max: *max,
                })
                .collect(),
        });
        pools.collect()
    }
}

impl TryFrom<Vec<PoolV1>> for RegionCapacity {
    type Error = WireError;

    fn try_from(wire: Vec<PoolV1>) -> Result<RegionCapacity, WireError> {
        reject_too_many("capacity", wire.len(), MAX_DEPLOYMENTS)?;
        let mut known = BTreeSet::new();
        let mut pools = Vec::with_capacity(wire.len());
        for (index, PoolV1 { ready, tokens_per_second, deployments }) in wire.into_iter().enumerate() {
            let what = format!("capacity[{index}].deployments");
            reject_too_many(&what, deployments.len(), MAX_DEPLOYMENTS)?;
            let mut counts = BTreeMap::new();
            for (at, CountV1 { name, ready, max }) in deployments.into_iter().enumerate() {
                let field = format!("{what}[{at}].name");
                let parsed: DeploymentName = parsed(field.clone(), &name)?;
                if !known.insert(parsed.clone()) {
                    return Err(WireError::new(field, format!("`{name}` is listed twice in the capacity")));
                }
                counts.insert(parsed, ReplicaCount { ready, max });
            }
            pools.push(ReplicaPool { ready, tokens_per_second, deployments: counts });
        }
        Ok(RegionCapacity { pools })
    }
}
