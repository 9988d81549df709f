//! How many replicas a region is to keep, whatever it is asked for.

use std::collections::BTreeMap;

use regions::deployment::MAX_DEPLOYMENTS;
use regions::{DeploymentName, Generation, RegionId};
use serde::{Deserialize, Serialize};

use super::super::{VERSION, WireError, known_version, parsed, refuse_other_versions, refuse_too_many};

/// The floors of one region, in the store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RegionFloorsV1 {
    /// 1.
    #[serde(deserialize_with = "known_version")]
    pub version: u32,
    /// Of the store.
    pub epoch: u64,
    /// Of these floors, within the epoch.
    pub generation: u64,
    /// Whose floors they are.
    pub region: String,
    /// The floors.
    pub floors: Vec<FloorV1>,
}

/// One deployment's floor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FloorV1 {
    /// Which.
    pub name: String,
    /// Never fewer replicas.
    pub replicas: u32,
}

/// The floors of one region.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegionFloors {
    /// How new they are.
    pub generation: Generation,
    /// Whose they are.
    pub region: RegionId,
    /// Never fewer replicas, by deployment.
    pub floors: BTreeMap<DeploymentName, u32>,
}

impl From<&RegionFloors> for RegionFloorsV1 {
    fn from(floors: &RegionFloors) -> RegionFloorsV1 {
        let RegionFloors { generation: Generation { epoch, number }, region, floors } = floors;
        RegionFloorsV1 {
            version: VERSION,
            epoch: *epoch,
            generation: *number,
            region: region.to_string(),
            floors: floors_to_wire(floors),
        }
    }
}

impl TryFrom<RegionFloorsV1> for RegionFloors {
    type Error = WireError;

    fn try_from(wire: RegionFloorsV1) -> Result<RegionFloors, WireError> {
        let RegionFloorsV1 { version, epoch, generation: number, region, floors } = wire;
        refuse_other_versions(version)?;
        let generation = Generation { epoch, number };
        Ok(RegionFloors { generation, region: parsed("region", &region)?, floors: floors_from_wire(&floors)? })
    }
}

/// Floors, as they are floors_to_wire.
pub fn floors_to_wire(floors: &BTreeMap<DeploymentName, u32>) -> Vec<FloorV1> {
    floors.iter().map(|(name, replicas)| FloorV1 { name: name.to_string(), replicas: *replicas }).collect()
}

/// Floors, as they were floors_to_wire.
///
/// # Errors
///
/// The first that cannot be right.
pub fn floors_from_wire(floors: &[FloorV1]) -> Result<BTreeMap<DeploymentName, u32>, WireError> {
    refuse_too_many("floors", floors.len(), MAX_DEPLOYMENTS)?;
    let mut each = BTreeMap::new();
    for (index, FloorV1 { name, replicas }) in floors.iter().enumerate() {
        let at = format!("floors[{index}].name");
        if each.insert(parsed(at.clone(), name)?, *replicas).is_some() {
            return Err(WireError::new(at, format!("`{name}` stands here twice")));
        }
    }
    Ok(each)
}
