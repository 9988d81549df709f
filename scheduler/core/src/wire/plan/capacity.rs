//! What a region's replicas can do.

use std::collections::{BTreeMap, BTreeSet};

use regions::DeploymentName;
use regions::deployment::MAX_DEPLOYMENTS;
use serde::{Deserialize, Serialize};

use super::super::{WireError, parsed, refuse_too_many};
use crate::plan::capacity::{RegionCapacity, ReplicaCount, ReplicaPool};

/// ReplicaPool that work for the same deployments, as a spoke tells of them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolV1 {
    /// How many take work.
    pub ready: u32,
    /// What they compute together; 0 until it is known.
    pub tokens_per_second: u64,
    /// What they answer to.
    pub deployments: Vec<CountV1>,
}

/// The replicas of one deployment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CountV1 {
    /// Which.
    pub name: String,
    /// Those that take its work.
    pub ready: u32,
    /// As many as there may be.
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
        refuse_too_many("capacity", wire.len(), MAX_DEPLOYMENTS)?;
        let mut known = BTreeSet::new();
        let mut pools = Vec::with_capacity(wire.len());
        for (index, PoolV1 { ready, tokens_per_second, deployments }) in wire.into_iter().enumerate() {
            let what = format!("capacity[{index}].deployments");
            refuse_too_many(&what, deployments.len(), MAX_DEPLOYMENTS)?;
            let mut counts = BTreeMap::new();
            for (at, CountV1 { name, ready, max }) in deployments.into_iter().enumerate() {
                let field = format!("{what}[{at}].name");
                let parsed: DeploymentName = parsed(field.clone(), &name)?;
                if !known.insert(parsed.clone()) {
                    return Err(WireError::new(field, format!("`{name}` stands in the capacity twice")));
                }
                counts.insert(parsed, ReplicaCount { ready, max });
            }
            pools.push(ReplicaPool { ready, tokens_per_second, deployments: counts });
        }
        Ok(RegionCapacity { pools })
    }
}
