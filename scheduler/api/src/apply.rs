//! Messages between operator and hub: `meridian apply` and `meridian get`.
//!
//! The operator sends the files unchanged, and the hub parses them, with its own catalogue. The responses are for
//! display, so their values are texts, and values that only a later hub knows are displayed as such.

use serde::{Deserialize, Serialize};

use super::MessageVersion;
use super::deployment::{DeploymentV1, EngineV1};
use super::revision::{NextRevisionV1, RevisionReplicasV1};
use super::start_failure::FailedModelV1;

/// `POST /v1/apply`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ApplyV1 {
    /// Version of the message.
    pub version: MessageVersion,
    /// Whether only the changes are computed and reported, without applying them.
    pub dry_run: bool,
    /// Revision of the diff that the operator has confirmed. If the current revision differs, nothing is changed.
    pub base: Option<u64>,
    /// Whether changes of a deployment's model wait for a promotion.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub hold: bool,
    /// Complete set of deployments, in one or more files; if absent, they stay unchanged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deployments: Option<Vec<ApplyFileV1>>,
    /// Complete set of tenants, likewise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tenants: Option<Vec<ApplyFileV1>>,
}

/// Configuration file of the operator.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ApplyFileV1 {
    /// Name of the file in error messages.
    pub name: String,
    /// Content of the file.
    pub text: String,
}

/// Response: the changes, planned or applied.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AppliedV1 {
    /// Version of the message.
    pub version: MessageVersion,
    /// Whether the changes were applied.
    pub applied: bool,
    /// Revision that the changes are based on; 0 if nothing was stored.
    pub base: u64,
    /// Changes of deployments, then of tenants, each ordered by name.
    pub changes: Vec<ChangeV1>,
    /// Further notes for the operator.
    pub notes: Vec<String>,
}

/// Response to invalid files: nothing was changed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProblemsV1 {
    /// Version of the message.
    pub version: MessageVersion,
    /// All problems.
    pub problems: Vec<ProblemV1>,
}

/// Problem in a file, with its fix.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProblemV1 {
    /// The file.
    pub file: String,
    /// Line number, from one.
    pub line: usize,
    /// Description of the problem.
    pub message: String,
}

/// Change of one deployment or tenant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChangeV1 {
    /// Kind of the resource.
    #[serde(default)]
    pub kind: Kind,
    /// Its name.
    pub name: String,
    /// Kind of the change.
    pub change: ChangeKind,
    /// Changed fields; all fields of an added or removed resource.
    pub fields: Vec<FieldV1>,
}

/// Kind of a resource.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// A deployment.
    #[default]
    Deployment,
    /// A tenant.
    Tenant,
    /// A kind that only a later version knows.
    #[serde(other)]
    Other,
}

impl Kind {
    /// Returns the name of the kind.
    pub fn as_str(self) -> &'static str {
        match self {
            Kind::Deployment => "deployment",
            Kind::Tenant => "tenant",
            Kind::Other => "resource",
        }
    }
}

/// Kind of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ChangeKind {
    /// The resource is new.
    Added,
    /// Some fields differ.
    Changed,
    /// The resource is removed.
    Removed,
    /// A kind of change that only a later version knows.
    #[serde(other)]
    Other,
}

/// Changed field.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FieldV1 {
    /// Name of the field in the file.
    pub field: String,
    /// Previous value.
    pub before: Option<String>,
    /// New value.
    pub after: Option<String>,
    /// Effect on the allowed regions, if the residency policy changes.
    pub residency_change: Option<ResidencyChange>,
}

/// Effect of a residency change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ResidencyChange {
    /// Fewer regions; in force at once.
    Narrows,
    /// More regions; in force after all readers have acknowledged.
    Widens,
    /// Some regions fewer at once, and others more after all readers have acknowledged.
    NarrowsAndWidens,
    /// The same regions, written differently.
    Rewords,
    /// An effect that only a later version knows.
    #[serde(other)]
    Other,
}

/// `GET /v1/deployments`: the applied deployments.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AppliedDeploymentsV1 {
    /// Version of the message.
    pub version: MessageVersion,
    /// Revision at which they were applied.
    pub revision: u64,
    /// Deployments, ordered by name.
    pub deployments: Vec<DeploymentV1>,
    /// Status of each deployment, in the same order. Absent from hubs that do not report it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub statuses: Vec<DeploymentStatusV1>,
}

/// Status of one deployment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeploymentStatusV1 {
    /// Name of the deployment.
    pub name: String,
    /// The worst status of its regions; `Pending` without any. Not `Ready` while `infeasible` is set.
    pub status: RolloutStatus,
    /// Constraint of its placement that no set of regions meets; it stays in its regions meanwhile. Absent if one does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub infeasible: Option<String>,
    /// The leader has not chosen regions for this version of a deployment with a placement yet. Absent if it has.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub awaits_placement: bool,
    /// Regions that have replicas, or should have.
    pub regions: Vec<RegionStatusV1>,
}

/// Status of one deployment in one region.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RegionStatusV1 {
    /// Region.
    pub region: String,
    /// Status.
    pub status: RolloutStatus,
    /// Model that cannot start, if the status is `Failed`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failed: Option<FailedModelV1>,
    /// Reason for which its replicas are not started now, if the status is `Pending` and the region states one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waiting: Option<String>,
}

/// Status of the applied model of a deployment, ordered from the best to the worst.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum RolloutStatus {
    /// A replica of the applied model is ready, or none is needed before the next request.
    Ready,
    /// Replicas of the applied model are expected, and none is ready yet.
    Pending,
    /// No replica of the applied model can start.
    Failed,
    /// A status of a later version.
    #[serde(other)]
    Unknown,
}

/// `GET /v1/rollout`: pending changes, and the readers that they wait for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RolloutV1 {
    /// Version of the message.
    pub version: MessageVersion,
    /// Generation of the published table.
    pub generation: String,
    /// Deployments and tenants whose wider residency is pending.
    pub pending: Vec<PendingWideningV1>,
    /// Readers that have acknowledged a table recently.
    pub readers: Vec<ReaderV1>,
    /// Replicas of each deployment.
    #[serde(default)]
    pub deployments: Vec<DeploymentReplicasV1>,
}

/// Replicas of one deployment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeploymentReplicasV1 {
    /// Name of the deployment.
    pub name: String,
    /// Served model reference.
    pub model: String,
    /// Served engine.
    pub engine: EngineV1,
    /// Served model revision; `None` until the first replica has reported one.
    pub revision: Option<String>,
    /// Model that is to replace it.
    pub next: Option<NextRevisionV1>,
    /// Regions that have replicas, or should have.
    pub regions: Vec<RegionReplicasV1>,
}

/// Replicas of one deployment in one region.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RegionReplicasV1 {
    /// Region.
    pub region: String,
    /// Desired number of replicas, where the region starts and stops them itself.
    pub target: Option<u32>,
    /// Replicas by model.
    pub models: Vec<RevisionReplicasV1>,
    /// The served model, if no replica of it can start. Absent otherwise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failed: Option<FailedModelV1>,
    /// The next model, if no replica of it can start. Absent otherwise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failed_next: Option<FailedModelV1>,
}

/// Deployment or tenant whose wider residency is pending.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PendingWideningV1 {
    /// Kind of the resource.
    #[serde(default)]
    pub kind: Kind,
    /// Its name.
    pub name: String,
    /// Current residency.
    pub residency: String,
    /// Announced residency.
    pub to: String,
    /// First generation with the announcement.
    pub since: String,
    /// Readers that run an older table.
    pub outdated_readers: Vec<String>,
}

/// Reader and the table that it runs; also the stored record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReaderV1 {
    /// Version of the message.
    pub version: MessageVersion,
    /// Name of the reader.
    pub reader: String,
    /// Generation of its table.
    pub generation: String,
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_response_with_values_that_only_a_later_hub_knows_is_displayed() {
        let field = json!({"field": "f", "before": null, "after": "a", "residency_change": "moves"});
        let change = json!({"kind": "catalogue", "name": "n", "change": "renamed", "fields": [field]});
        let response =
            json!({"version": 1, "applied": false, "base": 1, "changes": [change], "notes": [], "cost": 7});
        let applied: AppliedV1 = serde_json::from_value(response).unwrap();
        let ChangeV1 { kind, name: _, change, fields } = &applied.changes[0];
        assert_eq!((*kind, *change), (Kind::Other, ChangeKind::Other));
        assert_eq!(fields[0].residency_change, Some(ResidencyChange::Other));
        let known =
            serde_json::from_value::<Vec<ChangeKind>>(json!(["added", "changed", "removed"])).unwrap();
        assert_eq!(known, [ChangeKind::Added, ChangeKind::Changed, ChangeKind::Removed]);
    }

    /// The hub would do something else than what the operator has ordered if it ignored an option.
    #[test]
    fn an_order_with_an_option_that_only_a_later_version_knows_is_rejected() {
        let order = json!({"version": 1, "dry_run": true, "base": null});
        assert!(serde_json::from_value::<ApplyV1>(order.clone()).is_ok());
        let mut later = order;
        later["canary"] = json!(true);
        let error = serde_json::from_value::<ApplyV1>(later).unwrap_err().to_string();
        assert!(error.contains("unknown field `canary`"), "{error}");
    }
}
