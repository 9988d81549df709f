//! What a plan is made from and what comes of it, between gateways, spokes and the hub, and in the store.
//!
//! A gateway says once a second how much it is asked for, by class and origin ([`DemandV1`]), and is answered with its
//! rows of the plan ([`WeightsV1`]) when they are newer than those it has. It takes them whole or not at all: a row whose
//! shares are not the whole, a region twice, a reason that it does not know, and what it has stays.
//!
//! What a spoke says about its capacity travels in its registration ([`super::registry`]); the floors that it is to keep
//! travel back with its lease.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::route::{law, present, written};
use super::{VERSION, WireError, known_version, parsed, refuse_other_versions, refuse_too_many};
use crate::plan::Class;
use crate::plan::capacity::{Capacity, Count, Replicas};
use regions::deployment::MAX_DEPLOYMENTS;
use regions::set::MAX_REGIONS;
use regions::weights::{WHOLE_PERMILLE, Why};
use regions::{DeploymentName, Generation, RegionId};

/// Rows of one gateway: a thousand deployments from eight origins, or under eight laws.
pub const ROWS_MAX: usize = 8192;

/// `POST /v1/demand`, and what the store keeps of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DemandV1 {
    /// 1.
    #[serde(deserialize_with = "known_version")]
    pub version: u32,
    /// The place of the gateway.
    pub gateway: String,
    /// Drawn anew whenever it starts.
    pub boot_id: u64,
    /// What it is asked for; a class is named for a while after it was last asked for, so that the message is as long in
    /// calm as in crisis.
    pub classes: Vec<ClassDemandV1>,
}

/// One class from one origin.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClassDemandV1 {
    /// What is asked for.
    pub deployment: String,
    /// The law that it travels under; `null` is anywhere.
    #[serde(deserialize_with = "present")]
    pub residency: Option<String>,
    /// Where it comes from.
    pub origin: String,
    /// How much.
    pub tokens_per_second: u64,
}

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
    /// The law that it travels under; `null` is anywhere.
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
    pub why: String,
}

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

/// `PUT /v1/drains/{cloud}/{name}`: the answer, and what the store keeps of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DrainV1 {
    /// 1.
    #[serde(deserialize_with = "known_version")]
    pub version: u32,
    /// The region that is to be emptied.
    pub region: String,
}

/// Replicas that work for the same deployments, as a spoke tells of them.
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

/// A gateway, as a plan tells it from others.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct GatewayBoot {
    /// Where it stands.
    pub place: RegionId,
    /// Which of its starts.
    pub boot_id: u64,
}

/// What one gateway is asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GatewayDemand {
    /// Which.
    pub gateway: GatewayBoot,
    /// By class and origin, in tokens per second.
    pub classes: BTreeMap<(Class, RegionId), u64>,
}

/// One region's share of a row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedShare {
    /// Which region.
    pub region: RegionId,
    /// So many thousandths.
    pub permille: u16,
    /// For this reason.
    pub why: Why,
}

/// The rows of one gateway.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Weights {
    /// How new they are.
    pub generation: Generation,
    /// Whose they are, by its place.
    pub gateway: RegionId,
    /// By class and origin.
    pub rows: BTreeMap<(Class, RegionId), Vec<NamedShare>>,
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

impl From<&GatewayDemand> for DemandV1 {
    fn from(demand: &GatewayDemand) -> DemandV1 {
        let GatewayDemand { gateway: GatewayBoot { place, boot_id }, classes } = demand;
        let classes =
            classes.iter().map(|((Class { deployment, residency }, origin), tokens)| ClassDemandV1 {
                deployment: deployment.to_string(),
                residency: written(residency),
                origin: origin.to_string(),
                tokens_per_second: *tokens,
            });
        DemandV1 {
            version: VERSION,
            gateway: place.to_string(),
            boot_id: *boot_id,
            classes: classes.collect(),
        }
    }
}

impl TryFrom<DemandV1> for GatewayDemand {
    type Error = WireError;

    fn try_from(wire: DemandV1) -> Result<GatewayDemand, WireError> {
        let DemandV1 { version, gateway, boot_id, classes } = wire;
        refuse_other_versions(version)?;
        refuse_too_many("classes", classes.len(), ROWS_MAX)?;
        let gateway = GatewayBoot { place: parsed("gateway", &gateway)?, boot_id };
        let mut each = BTreeMap::new();
        for (place, class) in classes.into_iter().enumerate() {
            let ClassDemandV1 { deployment, residency, origin, tokens_per_second } = class;
            let what = format!("classes[{place}]");
            let row = class_from(&what, &deployment, residency, &origin)?;
            if each.insert(row, tokens_per_second).is_some() {
                return Err(WireError::new(what, "this class stands here twice from this origin"));
            }
        }
        Ok(GatewayDemand { gateway, classes: each })
    }
}

fn class_from(
    what: &str,
    deployment: &str,
    residency: Option<String>,
    origin: &str,
) -> Result<(Class, RegionId), WireError> {
    let deployment = parsed(format!("{what}.deployment"), deployment)?;
    let residency = law(&format!("{what}.residency"), residency)?;
    Ok((Class { deployment, residency }, parsed(format!("{what}.origin"), origin)?))
}

impl From<&Weights> for WeightsV1 {
    fn from(weights: &Weights) -> WeightsV1 {
        let Weights { generation: Generation { epoch, number }, gateway, rows } = weights;
        let share = |share: &NamedShare| {
            let NamedShare { region, permille, why } = share;
            ShareV1 { region: region.to_string(), permille: *permille, why: why.as_str().to_owned() }
        };
        let rows = rows.iter().map(|((Class { deployment, residency }, origin), shares)| RowV1 {
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

impl TryFrom<WeightsV1> for Weights {
    type Error = WireError;

    fn try_from(wire: WeightsV1) -> Result<Weights, WireError> {
        let WeightsV1 { version, epoch, generation: number, gateway, rows } = wire;
        refuse_other_versions(version)?;
        refuse_too_many("rows", rows.len(), ROWS_MAX)?;
        let mut each = BTreeMap::new();
        for (place, row) in rows.into_iter().enumerate() {
            let RowV1 { deployment, residency, origin, shares } = row;
            let what = format!("rows[{place}]");
            let class = class_from(&what, &deployment, residency, &origin)?;
            if each.insert(class, whole(&format!("{what}.shares"), shares)?).is_some() {
                return Err(WireError::new(what, "this class stands here twice from this origin"));
            }
        }
        Ok(Weights {
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
    for (place, ShareV1 { region, permille, why }) in shares.into_iter().enumerate() {
        let region: RegionId = parsed(format!("{what}[{place}].region"), &region)?;
        if whole.iter().any(|share| share.region == region) {
            return Err(WireError::new(
                format!("{what}[{place}].region"),
                format!("`{region}` has two shares"),
            ));
        }
        let why = Why::parse(&why)
            .ok_or_else(|| WireError::new(format!("{what}[{place}].why"), "this reason is not known here"))?;
        whole.push(NamedShare { region, permille, why });
    }
    let sum: u32 = whole.iter().map(|share| u32::from(share.permille)).sum();
    if sum != u32::from(WHOLE_PERMILLE) {
        return Err(WireError::new(what, format!("they are {sum} thousandths and not {WHOLE_PERMILLE}")));
    }
    Ok(whole)
}

impl From<&RegionFloors> for RegionFloorsV1 {
    fn from(floors: &RegionFloors) -> RegionFloorsV1 {
        let RegionFloors { generation: Generation { epoch, number }, region, floors } = floors;
        RegionFloorsV1 {
            version: VERSION,
            epoch: *epoch,
            generation: *number,
            region: region.to_string(),
            floors: told(floors),
        }
    }
}

impl TryFrom<RegionFloorsV1> for RegionFloors {
    type Error = WireError;

    fn try_from(wire: RegionFloorsV1) -> Result<RegionFloors, WireError> {
        let RegionFloorsV1 { version, epoch, generation: number, region, floors } = wire;
        refuse_other_versions(version)?;
        let generation = Generation { epoch, number };
        Ok(RegionFloors { generation, region: parsed("region", &region)?, floors: heard(&floors)? })
    }
}

impl TryFrom<DrainV1> for RegionId {
    type Error = WireError;

    fn try_from(wire: DrainV1) -> Result<RegionId, WireError> {
        let DrainV1 { version, region } = wire;
        refuse_other_versions(version)?;
        parsed("region", &region)
    }
}

/// Floors, as they are told.
pub fn told(floors: &BTreeMap<DeploymentName, u32>) -> Vec<FloorV1> {
    floors.iter().map(|(name, replicas)| FloorV1 { name: name.to_string(), replicas: *replicas }).collect()
}

/// Floors, as they were told.
///
/// # Errors
///
/// The first that cannot be right.
pub fn heard(floors: &[FloorV1]) -> Result<BTreeMap<DeploymentName, u32>, WireError> {
    refuse_too_many("floors", floors.len(), MAX_DEPLOYMENTS)?;
    let mut each = BTreeMap::new();
    for (place, FloorV1 { name, replicas }) in floors.iter().enumerate() {
        let at = format!("floors[{place}].name");
        if each.insert(parsed(at.clone(), name)?, *replicas).is_some() {
            return Err(WireError::new(at, format!("`{name}` stands here twice")));
        }
    }
    Ok(each)
}

impl From<&Capacity> for Vec<PoolV1> {
    fn from(capacity: &Capacity) -> Vec<PoolV1> {
        let Capacity { pools } = capacity;
        let pools = pools.iter().map(|Replicas { ready, tokens_per_second, deployments }| PoolV1 {
            ready: *ready,
            tokens_per_second: *tokens_per_second,
            deployments: deployments
                .iter()
                .map(|(name, Count { ready, max })| CountV1 {
                    name: name.to_string(),
                    ready: *ready,
                    max: *max,
                })
                .collect(),
        });
        pools.collect()
    }
}

impl TryFrom<Vec<PoolV1>> for Capacity {
    type Error = WireError;

    fn try_from(wire: Vec<PoolV1>) -> Result<Capacity, WireError> {
        refuse_too_many("capacity", wire.len(), MAX_DEPLOYMENTS)?;
        let mut known = std::collections::BTreeSet::new();
        let mut pools = Vec::with_capacity(wire.len());
        for (place, PoolV1 { ready, tokens_per_second, deployments }) in wire.into_iter().enumerate() {
            let what = format!("capacity[{place}].deployments");
            refuse_too_many(&what, deployments.len(), MAX_DEPLOYMENTS)?;
            let mut counts = BTreeMap::new();
            for (at, CountV1 { name, ready, max }) in deployments.into_iter().enumerate() {
                let field = format!("{what}[{at}].name");
                let parsed: DeploymentName = parsed(field.clone(), &name)?;
                if !known.insert(parsed.clone()) {
                    return Err(WireError::new(field, format!("`{name}` stands in the capacity twice")));
                }
                counts.insert(parsed, Count { ready, max });
            }
            pools.push(Replicas { ready, tokens_per_second, deployments: counts });
        }
        Ok(Capacity { pools })
    }
}

#[cfg(test)]
mod tests {
    use super::super::any;
    use super::*;
    use proptest::collection::{btree_map, vec};
    use proptest::prelude::*;
    use proptest::sample::select;
    use serde_json::{Value, json};

    prop_compose! {
        fn row()(
            deployment in any::name(),
            residency in select(vec!["anywhere", "eu", "de,eu,aws/us-east-1", "de,fr & eu"]),
            origin in any::region(),
        ) -> (Class, RegionId) {
            (Class { deployment, residency: residency.parse().unwrap() }, origin)
        }
    }

    prop_compose! {
        fn shares()(
            first in 1..1000u16, regions in proptest::collection::btree_set(any::region(), 2), why in select(&Why::ALL[..]),
        ) -> Vec<NamedShare> {
            let permilles = [first, WHOLE_PERMILLE - first];
            regions.into_iter().zip(permilles).map(|(region, permille)| NamedShare { region, permille, why }).collect()
        }
    }

    prop_compose! {
        fn pool()(ready: u32, tokens_per_second: u64, counts in vec((any::<u32>(), any::<u32>()), 0..3)) -> (u32, u64, Vec<(u32, u32)>) {
            (ready, tokens_per_second, counts)
        }
    }

    proptest! {
        #[test]
        fn demand_comes_back_as_it_went(
            place in any::region(), boot_id: u64, classes in btree_map(row(), any::<u64>(), 0..4),
        ) {
            let demand = GatewayDemand { gateway: GatewayBoot { place, boot_id }, classes };
            let text = serde_json::to_string(&DemandV1::from(&demand)).unwrap();
            let wire: DemandV1 = serde_json::from_str(&text).unwrap();
            prop_assert_eq!(GatewayDemand::try_from(wire), Ok(demand));
        }

        #[test]
        fn rows_come_back_as_they_went(
            epoch: u64, number: u64, gateway in any::region(), rows in btree_map(row(), shares(), 0..4),
        ) {
            let weights = Weights { generation: Generation { epoch, number }, gateway, rows };
            let text = serde_json::to_string(&WeightsV1::from(&weights)).unwrap();
            let wire: WeightsV1 = serde_json::from_str(&text).unwrap();
            prop_assert_eq!(Weights::try_from(wire), Ok(weights));
        }

        #[test]
        fn floors_come_back_as_they_went(
            epoch: u64, number: u64, region in any::region(), floors in btree_map(any::name(), any::<u32>(), 0..4),
        ) {
            let floors = RegionFloors { generation: Generation { epoch, number }, region, floors };
            let text = serde_json::to_string(&RegionFloorsV1::from(&floors)).unwrap();
            let wire: RegionFloorsV1 = serde_json::from_str(&text).unwrap();
            prop_assert_eq!(RegionFloors::try_from(wire), Ok(floors));
        }

        #[test]
        fn capacity_comes_back_as_it_went(pools in vec(pool(), 0..4)) {
            let mut number = 0;
            let mut name = || {
                number += 1;
                format!("d{number}").parse().unwrap()
            };
            let pools = pools.into_iter().map(|(ready, tokens_per_second, counts)| {
                let deployments = counts.into_iter().map(|(ready, max)| (name(), Count { ready, max })).collect();
                Replicas { ready, tokens_per_second, deployments }
            });
            let capacity = Capacity { pools: pools.collect() };
            let text = serde_json::to_string(&Vec::<PoolV1>::from(&capacity)).unwrap();
            let wire: Vec<PoolV1> = serde_json::from_str(&text).unwrap();
            prop_assert_eq!(Capacity::try_from(wire), Ok(capacity));
        }
    }

    fn weights() -> Value {
        let share =
            |region: &str, permille: u16| json!({"region": region, "permille": permille, "why": "nearest"});
        let row = |deployment: &str| {
            json!({"deployment": deployment, "residency": null, "origin": "aws/us-east-1",
                   "shares": [share("aws/us-east-1", 600), share("gcp/europe-west4", 400)]})
        };
        json!({"version": 1, "epoch": 1, "generation": 7, "gateway": "aws/us-east-1", "rows": [row("a"), row("b")]})
    }

    #[test]
    fn rows_of_which_one_cannot_be_read_are_refused_whole() {
        let check = |pointer: &str, value: Value, field: &str| {
            let mut message = weights();
            *message.pointer_mut(pointer).unwrap() = value;
            let wire: WeightsV1 = serde_json::from_value(message).unwrap();
            assert_eq!(Weights::try_from(wire).unwrap_err().field, field);
        };
        check("/gateway", json!("here"), "gateway");
        check("/rows/1/deployment", json!("a"), "rows[1]");
        check("/rows/1/deployment", json!("a b"), "rows[1].deployment");
        check("/rows/0/residency", json!(""), "rows[0].residency");
        check("/rows/0/origin", json!("mars"), "rows[0].origin");
        check("/rows/0/shares/0/permille", json!(599), "rows[0].shares");
        check("/rows/0/shares/0/permille", json!(601), "rows[0].shares");
        check("/rows/0/shares", json!([]), "rows[0].shares");
        check("/rows/0/shares/1/region", json!("aws/us-east-1"), "rows[0].shares[1].region");
        check("/rows/0/shares/1/why", json!("because"), "rows[0].shares[1].why");
        let mut lost = weights();
        lost["rows"][0].as_object_mut().unwrap().remove("residency");
        let error = serde_json::from_value::<WeightsV1>(lost).unwrap_err();
        assert!(error.to_string().contains("missing field `residency`"), "{error}");
    }

    #[test]
    fn as_many_rows_as_there_may_be_are_read_and_one_more_is_not() {
        let rows = |count: usize| {
            let class = |number: usize| ClassDemandV1 {
                deployment: format!("d{number}"),
                residency: None,
                origin: "aws/us-east-1".to_owned(),
                tokens_per_second: 1,
            };
            let gateway = "aws/us-east-1".to_owned();
            DemandV1 { version: 1, gateway, boot_id: 1, classes: (0..count).map(class).collect() }
        };
        assert_eq!(GatewayDemand::try_from(rows(ROWS_MAX)).map(|demand| demand.classes.len()), Ok(ROWS_MAX));
        assert_eq!(GatewayDemand::try_from(rows(ROWS_MAX + 1)).unwrap_err().field, "classes");
    }

    #[test]
    fn a_deployment_has_one_capacity() {
        let count = || CountV1 { name: "a".to_owned(), ready: 1, max: 1 };
        let pool = |deployments| PoolV1 { ready: 1, tokens_per_second: 1, deployments };
        let twice = Capacity::try_from(vec![pool(vec![count()]), pool(vec![count()])]);
        assert_eq!(twice.unwrap_err().field, "capacity[1].deployments[0].name");
    }
}
