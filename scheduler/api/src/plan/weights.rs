//! Rows of the traffic plan for one gateway.

use std::collections::BTreeMap;

use regions::set::MAX_REGIONS;
use regions::weights::{ShareReason, WHOLE_PERMILLE};
use regions::{Generation, RegionId};
use serde::{Deserialize, Serialize};

use super::super::deployment::{policy_to_wire, required_option};
use super::super::{MessageVersion, VERSION, WireError, parsed, reject_too_many};
use super::{ROWS_MAX, parse_class};
use crate::plan::TrafficClass;

/// Rows of one gateway.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WeightsV1 {
    /// Version of the message.
    pub version: MessageVersion,
    /// Epoch of the generation.
    pub epoch: u64,
    /// Number of the generation within the epoch.
    pub generation: u64,
    /// Region of the gateway.
    pub gateway: String,
    /// The rows.
    pub rows: Vec<RowV1>,
}

/// Shares of one class from one origin.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RowV1 {
    /// Requested deployment.
    pub deployment: String,
    /// Residency policy of the requests; `null` allows all regions.
    #[serde(deserialize_with = "required_option")]
    pub residency: Option<String>,
    /// Origin of the requests.
    pub origin: String,
    /// Shares that add up to 1000 permille.
    pub shares: Vec<ShareV1>,
}

/// Share of one region.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShareV1 {
    /// Region, as `cloud/name`.
    pub region: String,
    /// Share in permille.
    pub permille: u16,
    /// Reason of the share.
    pub reason: String,
}

/// Share of one region in a row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedShare {
    /// The region.
    pub region: RegionId,
    /// Share in permille.
    pub permille: u16,
    /// Reason of the share.
    pub reason: ShareReason,
}

/// Rows of one gateway.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GatewayWeights {
    /// Generation of the rows.
    pub generation: Generation,
    /// Region of the gateway.
    pub gateway: RegionId,
    /// Rows by class and origin.
    pub rows: BTreeMap<(TrafficClass, RegionId), Vec<NamedShare>>,
}

impl From<&GatewayWeights> for WeightsV1 {
    fn from(weights: &GatewayWeights) -> WeightsV1 {
        let GatewayWeights { generation: Generation { epoch, number }, gateway, rows } = weights;
        let share = |share: &NamedShare| {
            let NamedShare { region, permille, reason } = share;
            ShareV1 { region: region.to_string(), permille: *permille, reason: reason.as_str().to_owned() }
        };
        let rows = rows.iter().map(|((TrafficClass { deployment, residency }, origin), shares)| RowV1 {
            deployment: deployment.to_string(),
            residency: policy_to_wire(residency),
            origin: origin.to_string(),
            shares: shares.iter().map(share).collect(),
        });
        WeightsV1 {
            version: VERSION,
            epoch: *epoch,
            generation: *number,
            gateway: gateway.to_string(),
            rows: rows.collect(),
        }
    }
}

impl TryFrom<WeightsV1> for GatewayWeights {
    type Error = WireError;

    fn try_from(wire: WeightsV1) -> Result<GatewayWeights, WireError> {
        let WeightsV1 { version: _, epoch, generation: number, gateway, rows } = wire;
        reject_too_many("rows", rows.len(), ROWS_MAX)?;
        let mut each = BTreeMap::new();
        for (index, row) in rows.into_iter().enumerate() {
            let RowV1 { deployment, residency, origin, shares } = row;
            let what = format!("rows[{index}]");
            let class = parse_class(&what, &deployment, residency, &origin)?;
            if each.insert(class, parse_shares(&format!("{what}.shares"), shares)?).is_some() {
                return Err(WireError::new(what, "this class is listed twice for this origin"));
            }
        }
        Ok(GatewayWeights {
            generation: Generation { epoch, number },
            gateway: parsed("gateway", &gateway)?,
            rows: each,
        })
    }
}

/// Parses shares that add up to 1000 permille.
fn parse_shares(what: &str, shares: Vec<ShareV1>) -> Result<Vec<NamedShare>, WireError> {
    reject_too_many(what, shares.len(), MAX_REGIONS)?;
    let mut whole: Vec<NamedShare> = Vec::with_capacity(shares.len());
    for (index, ShareV1 { region, permille, reason }) in shares.into_iter().enumerate() {
        let region: RegionId = parsed(format!("{what}[{index}].region"), &region)?;
        if whole.iter().any(|share| share.region == region) {
            return Err(WireError::new(
                format!("{what}[{index}].region"),
                format!("`{region}` has two shares"),
            ));
        }
        let reason = ShareReason::parse(&reason)
            .ok_or_else(|| WireError::new(format!("{what}[{index}].reason"), "unknown reason"))?;
        whole.push(NamedShare { region, permille, reason });
    }
    let sum: u32 = whole.iter().map(|share| u32::from(share.permille)).sum();
    if sum != u32::from(WHOLE_PERMILLE) {
        return Err(WireError::new(
            what,
            format!("the shares add up to {sum} permille, not {WHOLE_PERMILLE}"),
        ));
    }
    Ok(whole)
}
