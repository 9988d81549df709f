//! ChangeKind an operator says to the hub and hears from it: `meridian apply` and `meridian get`.
//!
//! An operator sends files as they are, and the hub reads them: it has the catalogue that counts. ChangeKind goes back is for a
//! person, so a value is a text here and not a number.

use serde::{Deserialize, Serialize};

use super::deployment::{DeploymentV1, EngineV1};
use super::known_version;
use super::revision::{RevisionReplicasV1, NextRevisionV1};

/// `POST /v1/apply`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ApplyV1 {
    /// 1.
    #[serde(deserialize_with = "known_version")]
    pub version: u32,
    /// Nothing is changed; what would be is told.
    pub dry_run: bool,
    /// The revision that the operator has seen the difference to. If another stands by now, nothing is changed.
    pub base: Option<u64>,
    /// Changes of a deployment's model wait for a promotion.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub hold: bool,
    /// All deployments that there shall be, in one file or more; absent, they stay as they are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deployments: Option<Vec<ApplyFileV1>>,
    /// All tenants, likewise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tenants: Option<Vec<ApplyFileV1>>,
}

/// A file, as it stands on the operator's machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ApplyFileV1 {
    /// ChangeKind it is called in a complaint.
    pub name: String,
    /// ChangeKind is in it.
    pub text: String,
}

/// The answer: what changes, or has changed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AppliedV1 {
    /// 1.
    #[serde(deserialize_with = "known_version")]
    pub version: u32,
    /// It was carried out.
    pub applied: bool,
    /// The revision of what stood there before, to which this is the difference; 0 if nothing did.
    pub base: u64,
    /// ChangeKind changes: deployments and then tenants, each in the order of names.
    pub changes: Vec<ChangeV1>,
    /// ChangeKind else there is to know.
    pub notes: Vec<String>,
}

/// The answer where the files are not right: nothing has changed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProblemsV1 {
    /// 1.
    #[serde(deserialize_with = "known_version")]
    pub version: u32,
    /// Everything that is wrong.
    pub problems: Vec<ProblemV1>,
}

/// One thing that is wrong, and what to write instead.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProblemV1 {
    /// The file.
    pub file: String,
    /// The line in it, counted from one.
    pub line: usize,
    /// ChangeKind is wrong there.
    pub message: String,
}

/// ChangeKind becomes of one deployment or tenant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChangeV1 {
    /// Which of the two it is.
    #[serde(default)]
    pub kind: Kind,
    /// Its name.
    pub name: String,
    /// ChangeKind happens to it.
    pub change: ChangeKind,
    /// Its fields: those that change, or all.
    pub fields: Vec<FieldV1>,
}

/// ChangeKind something is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// A deployment.
    #[default]
    Deployment,
    /// A tenant.
    Tenant,
}

impl Kind {
    /// Its name.
    pub fn as_str(self) -> &'static str {
        match self {
            Kind::Deployment => "deployment",
            Kind::Tenant => "tenant",
        }
    }
}

/// ChangeKind happens to something.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ChangeKind {
    /// It is new.
    Added,
    /// Some of its fields are others.
    Changed,
    /// It goes.
    Removed,
}

/// A field that is another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FieldV1 {
    /// As it is called in the file.
    pub field: String,
    /// ChangeKind it was.
    pub before: Option<String>,
    /// ChangeKind it will be.
    pub after: Option<String>,
    /// ChangeKind that means for where requests may go, where it is the residency policy that changes.
    pub residency_change: Option<ResidencyChange>,
}

/// ChangeKind a change of residency means.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ResidencyChange {
    /// Fewer regions: at once.
    Narrows,
    /// More regions: when everybody has heard of it.
    Widens,
    /// Some fewer at once, and others when everybody has heard of it.
    NarrowsAndWidens,
    /// The same regions in other words.
    Rewords,
}

/// `GET /v1/deployments`: what was applied.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AppliedDeploymentsV1 {
    /// 1.
    #[serde(deserialize_with = "known_version")]
    pub version: u32,
    /// The revision at which that was.
    pub revision: u64,
    /// The deployments, in the order of their names.
    pub deployments: Vec<DeploymentV1>,
}

/// `GET /v1/rollout`: what of it has not come about yet, and who is waited for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RolloutV1 {
    /// 1.
    #[serde(deserialize_with = "known_version")]
    pub version: u32,
    /// The generation of the table that is published.
    pub generation: String,
    /// Deployments and tenants whose residency will be wider.
    pub pending: Vec<PendingWideningV1>,
    /// Everybody who has lately said which table it runs.
    pub readers: Vec<ReaderV1>,
    /// The replicas of each deployment.
    #[serde(default)]
    pub deployments: Vec<DeploymentReplicasV1>,
}

/// The replicas of one deployment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeploymentReplicasV1 {
    /// The deployment.
    pub name: String,
    /// The model reference that is served.
    pub model: String,
    /// The engine that is served.
    pub engine: EngineV1,
    /// The model revision that is served; `None` until the first replica has reported one.
    pub revision: Option<String>,
    /// ChangeKind is to replace it.
    pub next: Option<NextRevisionV1>,
    /// Where it has replicas, or would have.
    pub regions: Vec<RegionReplicasV1>,
}

/// The replicas of one deployment in one region.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RegionReplicasV1 {
    /// The region.
    pub region: String,
    /// How many there should be, where the region starts and stops them itself.
    pub target: Option<u32>,
    /// Those that are there, by what they run.
    pub models: Vec<RevisionReplicasV1>,
}

/// A deployment or a tenant whose residency will be wider.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PendingWideningV1 {
    /// Which of the two it is.
    #[serde(default)]
    pub kind: Kind,
    /// Its name.
    pub name: String,
    /// ChangeKind its residency is.
    pub residency: String,
    /// ChangeKind it will be.
    pub to: String,
    /// The first table that said so.
    pub since: String,
    /// Who runs an older one.
    pub outdated_readers: Vec<String>,
}

/// A reader and the table that it runs; also what the store keeps of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReaderV1 {
    /// 1.
    #[serde(deserialize_with = "known_version")]
    pub version: u32,
    /// Who.
    pub reader: String,
    /// The table's generation.
    pub generation: String,
}
