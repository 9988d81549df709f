//! Models that a region cannot start, in reports to the hub and between the spokes of a region.
//!
//! A deployment has a served model and, during a change, the next one. Each can fail on its own: a next model that cannot
//! start does not affect the requests, and is what an operator who has just applied it waits for.

use std::collections::BTreeMap;

use regions::deployment::MAX_DEPLOYMENTS;
use regions::{Deployment, DeploymentName, EngineSpec, Task};
use replica_api::start_failure::StartFailureReport;
use serde::{Deserialize, Serialize};

use super::deployment::{EngineV1, engine_v1, read_engine};
use super::{WireError, entries, parsed};

/// Maximum number of deployments whose failures are reported to the hub with their text. If all deployments fail, for example
/// because of a full disk, the texts of thousands would exceed a transaction of the hub's store.
const FAILURE_TEXTS_MAX: usize = 256;

/// Model of which no replica can start in a region.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FailedModel {
    /// Model reference.
    pub model: String,
    /// Task; `None` if the region does not know it, because it has not started the replicas itself.
    pub task: Option<Task>,
    /// Engine; `None` likewise.
    pub engine: Option<EngineSpec>,
    /// Reason.
    pub failure: StartFailureReport,
}

impl FailedModel {
    /// Creates the failure of the model of a deployment.
    pub fn of(deployment: &Deployment, failure: StartFailureReport) -> FailedModel {
        let Deployment { model, task, engine, .. } = deployment;
        FailedModel { model: model.clone(), task: Some(*task), engine: Some(*engine), failure }
    }
}

/// Failed models of one deployment in one region.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeploymentFailures {
    /// The served model: the deployment has failed in this region.
    pub served: Option<FailedModel>,
    /// The model that is to replace it.
    pub next: Option<FailedModel>,
}

impl DeploymentFailures {
    /// Returns whether no model has failed.
    pub fn is_empty(&self) -> bool {
        self.served.is_none() && self.next.is_none()
    }
}

/// Model of which no replica can start in a region.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FailedModelV1 {
    /// Model reference.
    pub model: String,
    /// Task of the model. Absent if the region does not know it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub task: Option<String>,
    /// Engine. Absent if the region does not know it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub engine: Option<EngineV1>,
    /// Reason.
    pub failure: StartFailureReport,
}

impl FailedModelV1 {
    /// Returns whether this is the model of a deployment, as far as the region knows its task and engine.
    pub fn is_model_of(&self, model: &str, task: &str, engine: &EngineV1) -> bool {
        self.model == model
            && self.task.as_ref().is_none_or(|failed| failed == task)
            && self.engine.as_ref().is_none_or(|failed| failed == engine)
    }
}

/// Failed models of one deployment in one region.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeploymentFailuresV1 {
    /// Name of the deployment.
    pub name: String,
    /// The served model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub served: Option<FailedModelV1>,
    /// The model that is to replace it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<FailedModelV1>,
}

impl From<&FailedModel> for FailedModelV1 {
    fn from(failed: &FailedModel) -> FailedModelV1 {
        let FailedModel { model, task, engine, failure } = failed;
        FailedModelV1 {
            model: model.clone(),
            task: task.map(|task| task.to_string()),
            engine: engine.map(engine_v1),
            failure: failure.clone(),
        }
    }
}

/// Parses a failed model in the field `at`.
pub(super) fn read_failed_model(at: &str, wire: FailedModelV1) -> Result<FailedModel, WireError> {
    let FailedModelV1 { model, task, engine, failure } = wire;
    Ok(FailedModel {
        model,
        task: task.map(|task| parsed(format!("{at}.task"), &task)).transpose()?,
        engine: engine.map(|engine| read_engine(&format!("{at}.engine"), &engine)).transpose()?,
        failure,
    })
}

/// Converts the failures of a region to their wire form; those beyond [`FAILURE_TEXTS_MAX`] deployments without their text.
pub(super) fn failures_v1(
    failures: &BTreeMap<DeploymentName, DeploymentFailures>,
) -> Vec<DeploymentFailuresV1> {
    let each = failures.iter().enumerate().map(|(number, (name, DeploymentFailures { served, next }))| {
        let wire = |failed: &FailedModel| {
            let mut wire = FailedModelV1::from(failed);
            if number >= FAILURE_TEXTS_MAX {
                wire.failure.message.clear();
            }
            wire
        };
        DeploymentFailuresV1 {
            name: name.to_string(),
            served: served.as_ref().map(wire),
            next: next.as_ref().map(wire),
        }
    });
    each.collect()
}

pub(super) fn read_failures(
    field: &str,
    wire: Vec<DeploymentFailuresV1>,
) -> Result<BTreeMap<DeploymentName, DeploymentFailures>, WireError> {
    entries(field, ".name", wire, MAX_DEPLOYMENTS, |at, DeploymentFailuresV1 { name, served, next }| {
        let read = |what: &str, wire: Option<FailedModelV1>| {
            wire.map(|wire| read_failed_model(&format!("{at}.{what}"), wire)).transpose()
        };
        let failures = DeploymentFailures { served: read("served", served)?, next: read("next", next)? };
        Ok((parsed(format!("{at}.name"), &name)?, failures))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use regions::{EngineKind, Precision};
    use replica_api::start_failure::StartFailure;
    use serde_json::json;

    #[test]
    fn failures_survive_a_round_trip_and_an_invalid_one_is_rejected_with_its_field() {
        let failure = |reason| StartFailureReport::new(reason, "text");
        let served = FailedModel {
            model: "hf://m".to_owned(),
            task: Some(Task::Embed),
            engine: Some(EngineSpec { kind: EngineKind::Cpu, precision: Precision::F32 }),
            failure: failure(StartFailure::ModelMissing),
        };
        let next = FailedModel {
            task: None,
            engine: None,
            failure: failure(StartFailure::DiskFull),
            ..served.clone()
        };
        let failures = BTreeMap::from([
            ("a".parse().unwrap(), DeploymentFailures { served: Some(served), next: Some(next.clone()) }),
            ("b".parse().unwrap(), DeploymentFailures { served: None, next: Some(next) }),
        ]);
        let text = serde_json::to_string(&failures_v1(&failures)).unwrap();
        assert_eq!(read_failures("failures", serde_json::from_str(&text).unwrap()), Ok(failures));

        let check = |value: serde_json::Value, field: &str| {
            let wire = serde_json::from_value(json!([value])).unwrap();
            assert_eq!(read_failures("failures", wire).unwrap_err().field, field);
        };
        let failed = |task: &str| json!({"model": "m", "task": task, "failure": {"reason": "later"}});
        check(json!({"name": "b c"}), "failures[0].name");
        check(json!({"name": "a", "served": failed("embde")}), "failures[0].served.task");
        check(json!({"name": "a", "next": failed("embde")}), "failures[0].next.task");
    }

    #[test]
    fn the_limit_of_texts_is_enforced_and_every_reason_is_sent() {
        let failure = StartFailureReport::new(StartFailure::DiskFull, "text");
        let failed = FailedModel { model: "m".to_owned(), task: None, engine: None, failure };
        let failures = DeploymentFailures { served: Some(failed), next: None };
        let named = |number: usize| (format!("d-{number:04}").parse().unwrap(), failures.clone());
        let wire = failures_v1(&(0..=FAILURE_TEXTS_MAX).map(named).collect());
        let texts: Vec<_> = wire.iter().map(|wire| wire.served.as_ref().unwrap().failure.clone()).collect();
        assert_eq!(texts.iter().filter(|failure| failure.message == "text").count(), FAILURE_TEXTS_MAX);
        assert!(texts.iter().all(|failure| failure.reason == StartFailure::DiskFull));
        assert_eq!(texts[FAILURE_TEXTS_MAX].message, "");
    }

    #[test]
    fn a_failed_model_of_unknown_engine_is_that_of_each_deployment_with_its_reference() {
        let engine = |precision: &str| EngineV1 { kind: "cpu".to_owned(), precision: precision.to_owned() };
        let failure = StartFailureReport::new(StartFailure::Other, "");
        let known = FailedModelV1 {
            model: "m".to_owned(),
            task: Some("embed".to_owned()),
            engine: Some(engine("f32")),
            failure,
        };
        assert!(known.is_model_of("m", "embed", &engine("f32")));
        assert!(
            !known.is_model_of("m", "embed", &engine("int8"))
                && !known.is_model_of("n", "embed", &engine("f32"))
        );
        assert!(!known.is_model_of("m", "rerank", &engine("f32")));
        let unknown = FailedModelV1 { task: None, engine: None, ..known };
        assert!(
            unknown.is_model_of("m", "rerank", &engine("int8"))
                && !unknown.is_model_of("n", "rerank", &engine("int8"))
        );
    }
}
