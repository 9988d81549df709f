//! Demand of a gateway, by class and origin.

use std::collections::{BTreeMap, BTreeSet};

use regions::RegionId;
use regions::set::MAX_REGIONS;
use serde::{Deserialize, Serialize};

use super::super::deployment::{policy_to_wire, required_option};
use super::super::{MessageVersion, VERSION, WireError, list, parsed, reject_too_many, to_strings};
use super::{ROWS_MAX, TrafficClass, parse_class};

/// Complete demand of a gateway in `POST /v1/demand`; also the stored record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DemandV1 {
    /// Version of the message.
    pub version: MessageVersion,
    /// Region of the gateway.
    pub gateway: String,
    /// Random number drawn at its start.
    pub boot_id: u64,
    /// Demand by class. A class stays listed for a while after its last request, so that the size of the message is
    /// constant under load.
    pub classes: Vec<ClassDemandV1>,
    /// Regions whose reports the gateway receives. Absent from gateways that do not report them or receive none, which
    /// may be their own fault.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reachable_regions: Option<Vec<String>>,
}

/// Demand of one class from one origin.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClassDemandV1 {
    /// Requested deployment.
    pub deployment: String,
    /// Residency policy of the requests; `null` allows all regions.
    #[serde(deserialize_with = "required_option")]
    pub residency: Option<String>,
    /// Origin of the requests.
    pub origin: String,
    /// Demand in tokens per second.
    pub tokens_per_second: u64,
}

/// Identity of a gateway instance.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct GatewayBoot {
    /// Its region.
    pub region: RegionId,
    /// Random number drawn at its start.
    pub boot_id: u64,
}

/// Demand of one gateway.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GatewayDemand {
    /// The gateway.
    pub gateway: GatewayBoot,
    /// Tokens per second, by class and origin.
    pub classes: BTreeMap<(TrafficClass, RegionId), u64>,
    /// Regions whose reports it receives, if it reports them.
    pub reachable_regions: Option<BTreeSet<RegionId>>,
}

impl From<&GatewayDemand> for DemandV1 {
    fn from(demand: &GatewayDemand) -> DemandV1 {
        let GatewayDemand { gateway: GatewayBoot { region, boot_id }, classes, reachable_regions } = demand;
        let classes =
            classes.iter().map(|((TrafficClass { deployment, residency }, origin), tokens)| ClassDemandV1 {
                deployment: deployment.to_string(),
                residency: policy_to_wire(residency),
                origin: origin.to_string(),
                tokens_per_second: *tokens,
            });
        DemandV1 {
            version: VERSION,
            gateway: region.to_string(),
            boot_id: *boot_id,
            classes: classes.collect(),
            reachable_regions: reachable_regions.as_ref().map(to_strings),
        }
    }
}

impl TryFrom<DemandV1> for GatewayDemand {
    type Error = WireError;

    fn try_from(wire: DemandV1) -> Result<GatewayDemand, WireError> {
        let DemandV1 { version: _, gateway, boot_id, classes, reachable_regions } = wire;
        reject_too_many("classes", classes.len(), ROWS_MAX)?;
        reject_too_many("reachable_regions", reachable_regions.as_ref().map_or(0, Vec::len), MAX_REGIONS)?;
        let regions = |given| list("reachable_regions", given, |at, id: String| parsed(at, &id));
        let reachable_regions = reachable_regions.map(regions).transpose()?;
        let gateway = GatewayBoot { region: parsed("gateway", &gateway)?, boot_id };
        let mut each = BTreeMap::new();
        for (index, class) in classes.into_iter().enumerate() {
            let ClassDemandV1 { deployment, residency, origin, tokens_per_second } = class;
            let what = format!("classes[{index}]");
            let row = parse_class(&what, &deployment, residency, &origin)?;
            if each.insert(row, tokens_per_second).is_some() {
                return Err(WireError::new(what, "this class is listed twice for this origin"));
            }
        }
        let reachable_regions = reachable_regions.map(|given| given.into_iter().collect());
        Ok(GatewayDemand { gateway, classes: each, reachable_regions })
    }
}
