//! Model revisions on the wire: those that replicas report, and those that deployments are served with.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::{WireError, parsed, reject_too_many};
use regions::deployment::MAX_DEPLOYMENTS;
use regions::{
    Deployment, DeploymentName, EngineSpec, ModelRevision, ModelSpec, NextRevision, ReportedModel,
    ServedRevision,
};

/// Maximum number of revisions that a region may report per deployment: the served one, the next one, and a few
/// mismatches.
pub const REVISIONS_MAX: usize = 16;

/// Replicas of one deployment in one region, by model revision.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReplicaRevisions {
    /// Desired number of replicas, where the region starts and stops them itself.
    pub target: Option<u32>,
    /// Replicas by model, ordered by revision.
    pub models: Vec<RevisionReplicas>,
}

/// Replicas that run the same model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RevisionReplicas {
    /// Model that they run.
    pub model: ReportedModel,
    /// Number of replicas.
    pub replicas: u32,
    /// Number of ready replicas.
    pub ready: u32,
}

impl ReplicaRevisions {
    /// Returns the number of ready replicas of this revision.
    pub fn ready(&self, revision: ModelRevision) -> u32 {
        let of = self.models.iter().filter(|replicas| replicas.model.revision == revision);
        of.map(|replicas| replicas.ready).sum()
    }
}

/// Operator's decision about changes of the model: hold or promote.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Orders {
    /// Changes that wait for a promotion (`meridian apply --hold`).
    pub held: BTreeSet<DeploymentName>,
    /// Revisions that an operator has promoted.
    pub promoted: BTreeMap<DeploymentName, ModelRevision>,
}

/// Replicas of one deployment in one region, by model revision.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReplicaRevisionsV1 {
    /// Name of the deployment.
    pub name: String,
    /// Desired number of replicas, where the region starts and stops them itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<u32>,
    /// Replicas by model.
    pub models: Vec<RevisionReplicasV1>,
}

/// Replicas of one deployment in one region that run the same model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RevisionReplicasV1 {
    /// Revision of their model.
    pub revision: String,
    /// Model reference.
    pub source: String,
    /// Task of the model.
    pub task: String,
    /// Engine that runs it.
    pub engine: EngineV1,
    /// Number of replicas.
    pub replicas: u32,
    /// Number of ready replicas.
    pub ready: u32,
}

/// Revision that a deployment is served with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServedRevisionV1 {
    /// Name of the deployment.
    pub name: String,
    /// Served revision.
    pub current: String,
    /// Model that replaces it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<NextRevisionV1>,
}

/// Model that is to replace the served one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NextRevisionV1 {
    /// Task of the model.
    pub task: String,
    /// Model reference.
    pub model: String,
    /// Engine that runs it.
    pub engine: EngineV1,
    /// Revision that its replicas report; absent until the first report.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revision: Option<String>,
    /// Whether it waits for an operator.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub held: bool,
}

/// Engine and its settings.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineV1 {
    /// Kind of the engine.
    pub kind: String,
    /// Number format of the computation.
    pub precision: String,
}

/// Converts an engine to its wire form.
pub fn engine_v1(engine: EngineSpec) -> EngineV1 {
    let EngineSpec { kind, precision } = engine;
    EngineV1 { kind: kind.to_string(), precision: precision.to_string() }
}

fn read_engine(at: &str, wire: &EngineV1) -> Result<EngineSpec, WireError> {
    let EngineV1 { kind, precision } = wire;
    Ok(EngineSpec {
        kind: parsed(format!("{at}.kind"), kind)?,
        precision: parsed(format!("{at}.precision"), precision)?,
    })
}

/// Converts replicas of one model to their wire form.
pub fn revision_replicas_v1(counted: &RevisionReplicas) -> RevisionReplicasV1 {
    let RevisionReplicas { model: ReportedModel { revision, source, task, engine }, replicas, ready } =
        counted;
    RevisionReplicasV1 {
        revision: revision.to_string(),
        source: source.clone(),
        task: task.to_string(),
        engine: engine_v1(*engine),
        replicas: *replicas,
        ready: *ready,
    }
}

/// Converts the next revision to its wire form.
pub fn next_v1(next: &NextRevision) -> NextRevisionV1 {
    let NextRevision { spec: ModelSpec { task, model, engine }, revision, held } = next;
    NextRevisionV1 {
        task: task.to_string(),
        model: model.clone(),
        engine: engine_v1(*engine),
        revision: revision.map(|revision| revision.to_string()),
        held: *held,
    }
}

pub(super) fn replica_revisions_v1(
    reported: &BTreeMap<DeploymentName, ReplicaRevisions>,
) -> Vec<ReplicaRevisionsV1> {
    let each = reported.iter().map(|(name, ReplicaRevisions { target, models })| ReplicaRevisionsV1 {
        name: name.to_string(),
        target: *target,
        models: models.iter().take(REVISIONS_MAX).map(revision_replicas_v1).collect(),
    });
    each.collect()
}

pub(super) fn read_replica_revisions(
    field: &str,
    wire: Vec<ReplicaRevisionsV1>,
) -> Result<BTreeMap<DeploymentName, ReplicaRevisions>, WireError> {
    reject_too_many(field, wire.len(), MAX_DEPLOYMENTS)?;
    let mut reported = BTreeMap::new();
    for (index, ReplicaRevisionsV1 { name, target, models }) in wire.into_iter().enumerate() {
        let at = format!("{field}[{index}]");
        reject_too_many(&format!("{at}.models"), models.len(), REVISIONS_MAX)?;
        let counted = |(index, wire): (usize, RevisionReplicasV1)| {
            let RevisionReplicasV1 { revision, source, task, engine, replicas, ready } = wire;
            let at = format!("{at}.models[{index}]");
            let model = ReportedModel {
                revision: parsed(format!("{at}.revision"), &revision)?,
                source,
                task: parsed(format!("{at}.task"), &task)?,
                engine: read_engine(&format!("{at}.engine"), &engine)?,
            };
            Ok(RevisionReplicas { model, replicas, ready })
        };
        let models = models.into_iter().enumerate().map(counted).collect::<Result<_, WireError>>()?;
        let key: DeploymentName = parsed(format!("{at}.name"), &name)?;
        if reported.insert(key, ReplicaRevisions { target, models }).is_some() {
            return Err(WireError::new(format!("{at}.name"), format!("`{name}` is listed twice")));
        }
    }
    Ok(reported)
}

pub(super) fn served_v1(revisions: &BTreeMap<DeploymentName, ServedRevision>) -> Vec<ServedRevisionV1> {
    let each = revisions.iter().map(|(name, served)| ServedRevisionV1 {
        name: name.to_string(),
        current: served.current.to_string(),
        next: served.next.as_ref().map(next_v1),
    });
    each.collect()
}

/// Parses the revisions of a table; each must belong to a deployment in the table.
pub(super) fn read_served(
    field: &str,
    wire: Vec<ServedRevisionV1>,
    deployed: &BTreeMap<DeploymentName, Deployment>,
) -> Result<BTreeMap<DeploymentName, ServedRevision>, WireError> {
    reject_too_many(field, wire.len(), MAX_DEPLOYMENTS)?;
    let mut served = BTreeMap::new();
    for (index, ServedRevisionV1 { name, current, next }) in wire.into_iter().enumerate() {
        let at = |what: &str| format!("{field}[{index}].{what}");
        let key: DeploymentName = parsed(at("name"), &name)?;
        if !deployed.contains_key(&key) {
            return Err(WireError::new(at("name"), format!("`{name}` is not in this table")));
        }
        let read = |wire: NextRevisionV1| {
            let NextRevisionV1 { task, model, engine, revision, held } = wire;
            let spec = ModelSpec {
                task: parsed(at("next.task"), &task)?,
                model,
                engine: read_engine(&at("next.engine"), &engine)?,
            };
            let revision = revision.map(|text| parsed(at("next.revision"), &text)).transpose()?;
            Ok::<_, WireError>(NextRevision { spec, revision, held })
        };
        let one =
            ServedRevision { current: parsed(at("current"), &current)?, next: next.map(read).transpose()? };
        if served.insert(key, one).is_some() {
            return Err(WireError::new(at("name"), format!("`{name}` is listed twice in the table")));
        }
    }
    Ok(served)
}
