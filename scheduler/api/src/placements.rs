//! Decisions on placements that the leader has made, as any hub reads them from the store.
//!
//! The route table has the regions in which a deployment runs: also those that it leaves, and before a change is carried out,
//! those of the old requirement. The status of a deployment depends on the regions that are chosen for the applied one, so the record
//! names the revision of the desired deployments that its decisions were made for. It also names the term of its leader: a leader of an
//! earlier version of Meridian, such as during a rolling upgrade, does not write it.

use std::collections::BTreeMap;

use regions::deployment::MAX_DEPLOYMENTS;
use regions::{DeploymentName, RegionId};
use serde::{Deserialize, Serialize};

use crate::{MessageVersion, VERSION, WireError, entries, list, parsed, to_strings};

/// Record of the decisions on all deployments that state a placement.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlacementsV1 {
    /// Version of the message.
    pub version: MessageVersion,
    /// Term of the leader that has decided: the revision at which its key was created.
    pub term: u64,
    /// Revision of the record of the desired deployments that the decisions were made for.
    pub revision: u64,
    /// The decisions. A deployment without one waits for its first, or for that on its changed version.
    pub deployments: Vec<DecidedPlacementV1>,
}

/// Decision on the placement of one deployment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DecidedPlacementV1 {
    /// Name of the deployment.
    pub name: String,
    /// Chosen regions; while no set of regions is feasible, those in which it stays.
    pub regions: Vec<String>,
    /// Constraint that no set of regions meets; absent if one does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub infeasible: Option<String>,
}

/// Decision on the placement of one deployment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DecidedPlacement {
    /// Chosen regions; while no set of regions is feasible, those in which it stays.
    pub regions: Vec<RegionId>,
    /// Constraint that no set of regions meets, if none does.
    pub infeasible: Option<String>,
}

/// Decisions on the deployments that state a placement.
pub type DecidedPlacements = BTreeMap<DeploymentName, DecidedPlacement>;

/// Record of the decisions of a leader.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlacementsRecord {
    /// Term of the leader: the revision at which its key was created.
    pub term: u64,
    /// Revision of the record of the desired deployments.
    pub revision: u64,
    /// Decisions on deployments of that revision.
    pub decided: DecidedPlacements,
}

impl PlacementsRecord {
    /// Returns the decisions on the desired deployments of this revision: none until the leader has recorded those on it. `None` if
    /// the current leader, whose term is `term`, has not written the record. Between two terms, the last record holds.
    pub fn decided_on(self, revision: u64, term: Option<u64>) -> Option<DecidedPlacements> {
        if term.is_some_and(|term| term != self.term) {
            return None;
        }
        Some(if revision == self.revision { self.decided } else { DecidedPlacements::new() })
    }
}

impl From<&PlacementsRecord> for PlacementsV1 {
    fn from(record: &PlacementsRecord) -> PlacementsV1 {
        let PlacementsRecord { term, revision, decided } = record;
        let each = decided.iter().map(|(name, decided)| {
            let DecidedPlacement { regions, infeasible } = decided;
            DecidedPlacementV1 {
                name: name.to_string(),
                regions: to_strings(regions),
                infeasible: infeasible.clone(),
            }
        });
        PlacementsV1 { version: VERSION, term: *term, revision: *revision, deployments: each.collect() }
    }
}

impl TryFrom<PlacementsV1> for PlacementsRecord {
    type Error = WireError;

    fn try_from(wire: PlacementsV1) -> Result<PlacementsRecord, WireError> {
        let PlacementsV1 { version: _, term, revision, deployments } = wire;
        let decided = entries("deployments", ".name", deployments, MAX_DEPLOYMENTS, |at, decided| {
            let DecidedPlacementV1 { name, regions, infeasible } = decided;
            let regions = list(&format!("{at}.regions"), &regions, |at, region: &String| parsed(at, region))?;
            Ok((parsed(format!("{at}.name"), &name)?, DecidedPlacement { regions, infeasible }))
        })?;
        Ok(PlacementsRecord { term, revision, decided })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> PlacementsRecord {
        let (regions, infeasible) = (vec!["aws/us-east-1".parse().unwrap()], Some("max_cost".to_owned()));
        let decided = [("m".parse().unwrap(), DecidedPlacement { regions, infeasible })].into();
        PlacementsRecord { term: 7, revision: 9, decided }
    }

    #[test]
    fn decisions_are_stored_with_the_term_and_the_revision_of_the_deployments() {
        let record = record();
        let text = serde_json::to_string(&PlacementsV1::from(&record)).unwrap();
        let wire: PlacementsV1 = serde_json::from_str(&text).unwrap();
        assert_eq!(PlacementsRecord::try_from(wire), Ok(record));
        let wrong =
            DecidedPlacementV1 { name: "m".to_owned(), regions: vec!["x".to_owned()], infeasible: None };
        let wire = PlacementsV1 { version: VERSION, term: 1, revision: 1, deployments: vec![wrong] };
        assert_eq!(PlacementsRecord::try_from(wire).unwrap_err().field, "deployments[0].regions[0]");
    }

    #[test]
    fn only_the_record_of_the_current_leader_on_the_applied_deployments_counts() {
        let check = |revision, term, expected| {
            assert_eq!(record().decided_on(revision, term), expected, "{revision} {term:?}");
        };
        check(9, Some(7), Some(record().decided));
        check(10, Some(7), Some(DecidedPlacements::new()));
        check(9, Some(8), None);
        check(9, None, Some(record().decided));
    }
}
