//! Minimum numbers of replicas of a region.

use std::collections::BTreeMap;

use regions::deployment::MAX_DEPLOYMENTS;
use regions::{DeploymentName, Generation, RegionId};
use serde::{Deserialize, Serialize};

use super::super::{VERSION, WireError, known_version, parsed, reject_other_versions, reject_too_many};

/// Stored floors of one region.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RegionFloorsV1 {
    /// Version of the message: 1.
    #[serde(deserialize_with = "known_version")]
    pub version: u32,
    /// Epoch of the generation.
    pub epoch: u64,
    /// Number of the generation within the epoch.
    pub generation: u64,
    /// Region of the floors.
    pub region: String,
    /// The floors.
    pub floors: Vec<FloorV1>,
}

/// Floor of one deployment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FloorV1 {
    /// Name of the deployment.
    pub name: String,
    /// Minimum number of replicas.
    pub replicas: u32,
}

/// Floors of one region.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegionFloors {
    /// Generation of the floors.
    pub generation: Generation,
    /// Region of the floors.
    pub region: RegionId,
    /// Minimum number of replicas, by deployment.
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
        reject_other_versions(version)?;
        let generation = Generation { epoch, number };
        Ok(RegionFloors {
            generation,
            region: parsed("region", &region)?,
            floors: floors_from_wire(&floors)?,
        })
    }
}

/// Converts floors to their wire form.
pub fn floors_to_wire(floors: &BTreeMap<DeploymentName, u32>) -> Vec<FloorV1> {
    floors.iter().map(|(name, replicas)| FloorV1 { name: name.to_string(), replicas: *replicas }).collect()
}

/// Parses floors from their wire form.
///
/// # Errors
///
/// The first invalid entry.
pub fn floors_from_wire(floors: &[FloorV1]) -> Result<BTreeMap<DeploymentName, u32>, WireError> {
    reject_too_many("floors", floors.len(), MAX_DEPLOYMENTS)?;
    let mut each = BTreeMap::new();
    for (index, FloorV1 { name, replicas }) in floors.iter().enumerate() {
        let at = format!("floors[{index}].name");
        if each.insert(parsed(at.clone(), name)?, *replicas).is_some() {
            return Err(WireError::new(at, format!("`{name}` is listed twice")));
        }
    }
    Ok(each)
}
