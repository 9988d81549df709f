//! What a gateway is asked for, by class and origin.

use std::collections::{BTreeMap, BTreeSet};

use regions::RegionId;
use regions::set::MAX_REGIONS;
use serde::{Deserialize, Serialize};

use super::super::deployment::{present, written};
use super::super::{
    VERSION, WireError, known_version, parsed, refuse_other_versions, refuse_too_many, texts,
};
use super::{ROWS_MAX, class_from};
use crate::plan::TrafficClass;

/// `POST /v1/demand`, and what the store keeps of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DemandV1 {
    /// 1.
    #[serde(deserialize_with = "known_version")]
    pub version: u32,
    /// The index of the gateway.
    pub gateway: String,
    /// Drawn anew whenever it starts.
    pub boot_id: u64,
    /// What it is asked for; a class is named for a while after it was last asked for, so that the message is as long in
    /// calm as in crisis.
    pub classes: Vec<ClassDemandV1>,
    /// The regions whose reports it hears. Absent from gateways that do not say, or hear none, which may be their own fault.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reachable_regions: Option<Vec<String>>,
}

/// One class from one origin.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClassDemandV1 {
    /// What is asked for.
    pub deployment: String,
    /// The residency policy that it travels under; `null` is anywhere.
    #[serde(deserialize_with = "present")]
    pub residency: Option<String>,
    /// Where it comes from.
    pub origin: String,
    /// How much.
    pub tokens_per_second: u64,
}

/// A gateway, as a plan tells it from others.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct GatewayBoot {
    /// Where it stands.
    pub region: RegionId,
    /// Which of its starts.
    pub boot_id: u64,
}

/// What one gateway is asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GatewayDemand {
    /// Which.
    pub gateway: GatewayBoot,
    /// By class and origin, in tokens per second.
    pub classes: BTreeMap<(TrafficClass, RegionId), u64>,
    /// The regions whose reports it hears, if it says.
    pub reachable_regions: Option<BTreeSet<RegionId>>,
}

impl From<&GatewayDemand> for DemandV1 {
    fn from(demand: &GatewayDemand) -> DemandV1 {
        let GatewayDemand { gateway: GatewayBoot { region, boot_id }, classes, reachable_regions } = demand;
        let classes =
            classes.iter().map(|((TrafficClass { deployment, residency }, origin), tokens)| ClassDemandV1 {
                deployment: deployment.to_string(),
                residency: written(residency),
                origin: origin.to_string(),
                tokens_per_second: *tokens,
            });
        DemandV1 {
            version: VERSION,
            gateway: region.to_string(),
            boot_id: *boot_id,
            classes: classes.collect(),
            reachable_regions: reachable_regions.as_ref().map(texts),
        }
    }
}

impl TryFrom<DemandV1> for GatewayDemand {
    type Error = WireError;

    fn try_from(wire: DemandV1) -> Result<GatewayDemand, WireError> {
        let DemandV1 { version, gateway, boot_id, classes, reachable_regions } = wire;
        refuse_other_versions(version)?;
        refuse_too_many("classes", classes.len(), ROWS_MAX)?;
        refuse_too_many("reachable_regions", reachable_regions.as_ref().map_or(0, Vec::len), MAX_REGIONS)?;
        let region = |(index, id): (usize, &String)| parsed(format!("reachable_regions[{index}]"), id);
        let reachable_regions = reachable_regions.map(|given| given.iter().enumerate().map(region).collect()).transpose()?;
        let gateway = GatewayBoot { region: parsed("gateway", &gateway)?, boot_id };
        let mut each = BTreeMap::new();
        for (index, class) in classes.into_iter().enumerate() {
            let ClassDemandV1 { deployment, residency, origin, tokens_per_second } = class;
            let what = format!("classes[{index}]");
            let row = class_from(&what, &deployment, residency, &origin)?;
            if each.insert(row, tokens_per_second).is_some() {
                return Err(WireError::new(what, "this class stands here twice from this origin"));
            }
        }
        Ok(GatewayDemand { gateway, classes: each, reachable_regions })
    }
}
