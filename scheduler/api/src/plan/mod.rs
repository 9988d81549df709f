//! Demand, traffic plan and floors, as messages between gateways, spokes and the hub and as records of the store.
//!
//! Once a second a gateway reports its demand by class and origin ([`DemandV1`]). The response contains its rows of the
//! plan ([`WeightsV1`]) if they are newer. The gateway accepts the rows as a whole or not at all: if the shares of a
//! row do not add up, a region occurs twice, or a reason is unknown, the current rows stay.
//!
//! With it, the gateway reports the demand of tenants and receives its shares of their rate limits ([`shares`]).
//!
//! The capacity of a spoke is part of its registration ([`super::registration`]); its floors are part of the lease
//! response.

mod capacity;
mod demand;
mod demand_report;
mod floors;
mod placement;
mod shares;
mod weights;

pub use capacity::{CountV1, PoolV1, RegionCapacity, ReplicaCount, ReplicaPool};
pub use demand::{ClassDemandV1, DemandV1, GatewayBoot, GatewayDemand};
pub use demand_report::{DemandChangesV1, DemandReportError, DemandReportV1, DemandReporter, RemovedClassV1};
pub use floors::{FloorV1, RegionFloors, RegionFloorsV1, floors_from_wire, floors_to_wire};
pub use placement::{CandidateStateV1, PlacementCandidateV1, PlacementDecisionV1};
pub use shares::{
    AllSharesV1, GatewayInstance, SharesResponseV1, TenantDemand, TenantDemandV1, TenantShare, TenantShareV1,
    TenantShares, TenantSharesV1, TenantUsageV1,
};
pub use weights::{GatewayWeights, NamedShare, RowV1, ShareV1, WeightsV1};

use std::time::Duration;

use regions::{DeploymentName, RegionId, ResidencyPolicy};
use serde::{Deserialize, Serialize};

use super::deployment::parse_policy;
use super::{MessageVersion, WireError, parsed};

/// Interval between plans, and between the demand reports of a gateway.
pub const PLAN_PERIOD: Duration = Duration::from_secs(1);
/// Maximum number of classes that a gateway reports, and of its rows: a thousand deployments from eight origins, or under eight policies.
pub const ROWS_MAX: usize = 8192;

/// `GET /v1/plan`: the complete plan, for operators.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlanV1 {
    /// Version of the message.
    pub version: MessageVersion,
    /// Rows of the gateways in each region.
    pub weights: Vec<WeightsV1>,
    /// Floors of each region.
    pub floors: Vec<RegionFloorsV1>,
    /// Regions of each deployment that states a placement. Absent if there are none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub placements: Vec<PlacementDecisionV1>,
}

/// `PUT /v1/drains/{cloud}/{name}`: the response; also the stored record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DrainV1 {
    /// Version of the message.
    pub version: MessageVersion,
    /// Region that is being drained.
    pub region: String,
}

impl TryFrom<DrainV1> for RegionId {
    type Error = WireError;

    fn try_from(wire: DrainV1) -> Result<RegionId, WireError> {
        let DrainV1 { version: _, region } = wire;
        parsed("region", &region)
    }
}

/// Requests with the same deployment and the same allowed regions.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct TrafficClass {
    /// Requested deployment.
    pub deployment: DeploymentName,
    /// Residency policy of the requests, as gateways report it.
    pub residency: ResidencyPolicy,
}

fn parse_class(
    what: &str,
    deployment: &str,
    residency: Option<String>,
    origin: &str,
) -> Result<(TrafficClass, RegionId), WireError> {
    let deployment = parsed(format!("{what}.deployment"), deployment)?;
    let residency = parse_policy(&format!("{what}.residency"), residency)?;
    Ok((TrafficClass { deployment, residency }, parsed(format!("{what}.origin"), origin)?))
}

#[cfg(test)]
mod tests;
