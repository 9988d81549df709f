//! Decisions on placements that the leader has made, as any hub reads them from the store.
//!
//! The route table has the regions in which a deployment runs: also those that it leaves, and before a change is carried out,
//! those of the old requirement. The status of a deployment depends on the regions that are chosen for the applied one, so each
//! decision names the version of the deployment that it was made for.

use std::collections::BTreeMap;

use regions::deployment::MAX_DEPLOYMENTS;
use regions::{Deployment, DeploymentName, RegionId};
use serde::{Deserialize, Serialize};

use crate::deployment::DeploymentV1;
use crate::{MessageVersion, VERSION, WireError, entries, json_checksum, list, parsed, to_strings};

/// Record of the decisions on all deployments that state a placement.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlacementsV1 {
    /// Version of the message.
    pub version: MessageVersion,
    /// The decisions.
    pub deployments: Vec<DecidedPlacementV1>,
}

/// Decision on the placement of one deployment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DecidedPlacementV1 {
    /// Name of the deployment.
    pub name: String,
    /// Digest of the deployment that the decision was made for.
    pub deployment: u64,
    /// Chosen regions; while no set of regions is feasible, those in which it stays.
    pub regions: Vec<String>,
    /// Constraint that no set of regions meets; absent if one does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub infeasible: Option<String>,
}

/// Decision on the placement of one deployment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DecidedPlacement {
    /// [Digest](deployment_digest) of the deployment that the decision was made for.
    pub deployment: u64,
    /// Chosen regions; while no set of regions is feasible, those in which it stays.
    pub regions: Vec<RegionId>,
    /// Constraint that no set of regions meets, if none does.
    pub infeasible: Option<String>,
}

/// Decisions on the deployments that state a placement.
pub type DecidedPlacements = BTreeMap<DeploymentName, DecidedPlacement>;

impl From<&DecidedPlacements> for PlacementsV1 {
    fn from(decided: &DecidedPlacements) -> PlacementsV1 {
        let each = decided.iter().map(|(name, decided)| {
            let DecidedPlacement { deployment, regions, infeasible } = decided;
            DecidedPlacementV1 {
                name: name.to_string(),
                deployment: *deployment,
                regions: to_strings(regions),
                infeasible: infeasible.clone(),
            }
        });
        PlacementsV1 { version: VERSION, deployments: each.collect() }
    }
}

impl TryFrom<PlacementsV1> for DecidedPlacements {
    type Error = WireError;

    fn try_from(wire: PlacementsV1) -> Result<DecidedPlacements, WireError> {
        let PlacementsV1 { version: _, deployments } = wire;
        entries("deployments", ".name", deployments, MAX_DEPLOYMENTS, |at, decided| {
            let DecidedPlacementV1 { name, deployment, regions, infeasible } = decided;
            let regions = list(&format!("{at}.regions"), &regions, |at, region: &String| parsed(at, region))?;
            Ok((parsed(format!("{at}.name"), &name)?, DecidedPlacement { deployment, regions, infeasible }))
        })
    }
}

/// Returns a digest of a desired deployment. It distinguishes the versions of one deployment.
pub fn deployment_digest(deployment: &Deployment) -> u64 {
    json_checksum(&DeploymentV1::from(deployment))
}

#[cfg(test)]
mod tests {
    use super::*;
    use regions::{Catalogue, parse_deployments};

    fn deployment(more: &str) -> Deployment {
        let text = format!(
            "[[deployment]]\nname = \"m\"\ntask = \"embed\"\nmodel = \"pypi://m\"\n\
             engine = {{ kind = \"cpu\", precision = \"f32\" }}\n{more}\n"
        );
        parse_deployments(&text, &Catalogue::builtin()).unwrap().remove(0)
    }

    #[test]
    fn decisions_are_stored_and_a_changed_deployment_has_another_digest() {
        let [one, two] =
            ["placement = { min_regions = 1 }", "placement = { min_regions = 2 }"].map(deployment);
        assert_eq!(deployment_digest(&one), deployment_digest(&one.clone()));
        assert_ne!(deployment_digest(&one), deployment_digest(&two));
        let regions = vec!["aws/us-east-1".parse().unwrap()];
        let infeasible = Some("max_cost".to_owned());
        let decided = DecidedPlacement { deployment: deployment_digest(&one), regions, infeasible };
        let decided = DecidedPlacements::from([(one.name, decided)]);
        let text = serde_json::to_string(&PlacementsV1::from(&decided)).unwrap();
        let wire: PlacementsV1 = serde_json::from_str(&text).unwrap();
        assert_eq!(DecidedPlacements::try_from(wire), Ok(decided));
        let (name, regions, infeasible) = ("m".to_owned(), vec!["x".to_owned()], None);
        let wrong = DecidedPlacementV1 { name, deployment: 1, regions, infeasible };
        let wire = PlacementsV1 { version: VERSION, deployments: vec![wrong] };
        assert_eq!(DecidedPlacements::try_from(wire).unwrap_err().field, "deployments[0].regions[0]");
    }
}
