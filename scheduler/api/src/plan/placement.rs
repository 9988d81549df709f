//! Placements of deployments, for operators.

use serde::{Deserialize, Serialize};

/// Regions that are chosen for a deployment, with the reasons.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlacementDecisionV1 {
    /// Name of the deployment.
    pub deployment: String,
    /// Constraint that no set of regions meets; absent if one does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub infeasible: Option<String>,
    /// Cost of the minimum numbers of replicas of the chosen regions per hour, in millionths of the operator's currency unit.
    /// Absent if a price is unknown or no set is feasible.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cost_millionths: Option<u64>,
    /// Maximum of this cost, if one is stated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_cost_millionths: Option<u64>,
    /// Candidates: the regions with a spoke, and those in which it runs.
    pub regions: Vec<PlacementCandidateV1>,
}

/// Candidate of a placement.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlacementCandidateV1 {
    /// Region.
    pub region: String,
    /// Result.
    pub state: CandidateStateV1,
    /// Type of its accelerators that counts; absent if none does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accelerator: Option<String>,
    /// Cost of one replica per hour, in millionths; absent if unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub price_millionths: Option<u64>,
    /// Replicas that it can hold; absent if it cannot run the deployment.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replicas_max: Option<u32>,
    /// Reason for the result.
    pub reason: String,
}

/// Result for a candidate of a placement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CandidateStateV1 {
    /// The deployment runs there.
    Chosen,
    /// The deployment runs there, because no set of regions is feasible.
    Kept,
    /// The deployment runs there until the chosen regions are ready.
    Leaving,
    /// It could run the deployment.
    NotNeeded,
    /// It cannot run the deployment.
    Rejected,
    /// A result that this version does not know.
    #[serde(other)]
    Unknown,
}

impl CandidateStateV1 {
    /// Returns the result as text.
    pub fn as_str(self) -> &'static str {
        match self {
            CandidateStateV1::Chosen => "chosen",
            CandidateStateV1::Kept => "kept",
            CandidateStateV1::Leaving => "leaving",
            CandidateStateV1::NotNeeded => "not needed",
            CandidateStateV1::Rejected => "rejected",
            CandidateStateV1::Unknown => "unknown",
        }
    }
}
