//! How what a gateway is asked for is divided over the regions.

use std::collections::BTreeMap;

use regions::set::MAX_REGIONS;
use regions::weights::{WHOLE_PERMILLE, Why};
use regions::{Generation, RegionId};
use serde::{Deserialize, Serialize};

use super::super::deployment::{present, written};
use super::super::{VERSION, WireError, known_version, parsed, refuse_other_versions, refuse_too_many};
use super::{ROWS_MAX, class_from};
use crate::plan::TrafficClass;

/// The rows of one gateway.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WeightsV1 {
    /// 1.
    #[serde(deserialize_with = "known_version")]
    pub version: u32,
    /// Of the store.
    pub epoch: u64,
    /// Of these rows, within the epoch.
    pub generation: u64,
    /// Whose rows they are.
    pub gateway: String,
    /// The rows.
    pub rows: Vec<RowV1>,
}

/// How one class from one origin is divided.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RowV1 {
    /// What is asked for.
    pub deployment: String,
    /// The residency policy that it travels under; `null` is anywhere.
    #[serde(deserialize_with = "present")]
    pub residency: Option<String>,
    /// Where it comes from.
    pub origin: String,
    /// Thousandths that make up the whole.
    pub shares: Vec<ShareV1>,
}

/// One region's share.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShareV1 {
    /// `cloud/name`.
    pub region: String,
    /// So many thousandths.
    pub permille: u16,
    /// For this reason.
    pub reason: String,
}

/// One region's share of a row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedShare {
    /// Which region.
    pub region: RegionId,
    /// So many thousandths.
    pub permille: u16,
    /// For this reason.
    pub reason: Why,
}

/// The rows of one gateway.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GatewayWeights {
    /// How new they are.
    pub generation: Generation,
    /// Whose they are, by its index.
    pub gateway: RegionId,
    /// By class and origin.
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
            residency: written(residency),
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
        let WeightsV1 { version, epoch, generation: number, gateway, rows } = wire;
        refuse_other_versions(version)?;
        refuse_too_many("rows", rows.len(), ROWS_MAX)?;
        let mut each = BTreeMap::new();
        for (index, row) in rows.into_iter().enumerate() {
            let RowV1 { deployment, residency, origin, shares } = row;
            let what = format!("rows[{index}]");
            let class = class_from(&what, &deployment, residency, &origin)?;
            if each.insert(class, whole(&format!("{what}.shares"), shares)?).is_some() {
                return Err(WireError::new(what, "this class stands here twice from this origin"));
            }
        }
        Ok(GatewayWeights {
            generation: Generation { epoch, number },
            gateway: parsed("gateway", &gateway)?,
            rows: each,
        })
    }
}

/// Shares that make up the whole.
fn whole(what: &str, shares: Vec<ShareV1>) -> Result<Vec<NamedShare>, WireError> {
    refuse_too_many(what, shares.len(), MAX_REGIONS)?;
    let mut whole: Vec<NamedShare> = Vec::with_capacity(shares.len());
    for (index, ShareV1 { region, permille, reason }) in shares.into_iter().enumerate() {
        let region: RegionId = parsed(format!("{what}[{index}].region"), &region)?;
        if whole.iter().any(|share| share.region == region) {
            return Err(WireError::new(
                format!("{what}[{index}].region"),
                format!("`{region}` has two shares"),
            ));
        }
        let reason = Why::parse(&reason)
            .ok_or_else(|| WireError::new(format!("{what}[{index}].reason"), "this reason is not known here"))?;
        whole.push(NamedShare { region, permille, reason });
    }
    let sum: u32 = whole.iter().map(|share| u32::from(share.permille)).sum();
    if sum != u32::from(WHOLE_PERMILLE) {
        return Err(WireError::new(what, format!("they are {sum} thousandths and not {WHOLE_PERMILLE}")));
    }
    Ok(whole)
}
