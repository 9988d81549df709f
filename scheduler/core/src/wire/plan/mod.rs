//! What a plan is made from and what comes of it, between gateways, spokes and the hub, and in the store.
//!
//! A gateway says once a second how much it is asked for, by class and origin ([`DemandV1`]), and is answered with its
//! rows of the plan ([`WeightsV1`]) when they are newer than those it has. It takes them whole or not at all: a row whose
//! shares are not the whole, a region twice, a reason that it does not know, and what it has stays.
//!
//! What a spoke says about its capacity travels in its registration ([`super::registry`]); the floors that it is to keep
//! travel back with its lease.

mod capacity;
mod demand;
mod floors;
mod weights;

pub use capacity::{CountV1, PoolV1};
pub use demand::{ClassDemandV1, DemandV1, GatewayBoot, GatewayDemand};
pub use floors::{FloorV1, RegionFloors, RegionFloorsV1, floors_from_wire, floors_to_wire};
pub use weights::{NamedShare, RowV1, ShareV1, GatewayWeights, WeightsV1};

use regions::RegionId;
use serde::{Deserialize, Serialize};

use super::deployment::policy;
use super::{WireError, known_version, parsed, refuse_other_versions};
use crate::plan::TrafficClass;

/// Rows of one gateway: a thousand deployments from eight origins, or under eight policies.
pub const ROWS_MAX: usize = 8192;

/// `GET /v1/plan`: all of it, for operators.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlanV1 {
    /// 1.
    #[serde(deserialize_with = "known_version")]
    pub version: u32,
    /// The rows of the gateways at each index.
    pub weights: Vec<WeightsV1>,
    /// The floors of each region.
    pub floors: Vec<RegionFloorsV1>,
}

/// `PUT /v1/drains/{cloud}/{name}`: the answer, and what the store keeps of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DrainV1 {
    /// 1.
    #[serde(deserialize_with = "known_version")]
    pub version: u32,
    /// The region that is to be emptied.
    pub region: String,
}

impl TryFrom<DrainV1> for RegionId {
    type Error = WireError;

    fn try_from(wire: DrainV1) -> Result<RegionId, WireError> {
        let DrainV1 { version, region } = wire;
        refuse_other_versions(version)?;
        parsed("region", &region)
    }
}

fn class_from(
    what: &str,
    deployment: &str,
    residency: Option<String>,
    origin: &str,
) -> Result<(TrafficClass, RegionId), WireError> {
    let deployment = parsed(format!("{what}.deployment"), deployment)?;
    let residency = policy(&format!("{what}.residency"), residency)?;
    Ok((TrafficClass { deployment, residency }, parsed(format!("{what}.origin"), origin)?))
}

#[cfg(test)]
mod tests;
