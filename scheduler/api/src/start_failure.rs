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

/// Maximum bytes of the failures of a region in one message. If all of ten thousand deployments fail, for example because of a
/// full disk, a registration must stay within the 2 MiB that a hub reads, most of which its other lists may need.
const FAILURES_BYTES_MAX: usize = 256 << 10;
/// Those of them for names, models and reasons, about a thousand deployments; the rest is for texts.
const REASONS_BYTES_MAX: usize = 192 << 10;
/// Maximum bytes of the reason for which a deployment waits.
const WAITING_BYTES_MAX: usize = 128;

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

/// Failed models of one deployment in one region, or the reason for which its replicas wait.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeploymentFailures {
    /// The served model: the deployment has failed in this region.
    pub served: Option<FailedModel>,
    /// The model that is to replace it.
    pub next: Option<FailedModel>,
    /// Reason for which replicas are not started now, although none of them has failed: they start when other ones end.
    pub waiting: Option<String>,
}

impl DeploymentFailures {
    /// Returns whether no model has failed, and no replica waits.
    pub fn is_empty(&self) -> bool {
        self.served.is_none() && self.next.is_none() && self.waiting.is_none()
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

/// Failed models of one deployment in one region, or the reason for which its replicas wait.
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
    /// Reason for which replicas are not started now, although none of them has failed. Absent if none waits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waiting: Option<String>,
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

/// Converts the failures of a region to their wire form, by deployment. If they are too large for a message, it has the names, models
/// and reasons of as many deployments as fit, failed ones first, and the texts of the first ones of these.
pub(super) fn failures_v1<'a>(
    failures: impl IntoIterator<Item = (&'a DeploymentName, &'a DeploymentFailures)>,
) -> BTreeMap<&'a DeploymentName, DeploymentFailuresV1> {
    let mut all: Vec<_> = failures.into_iter().filter(|(_, failures)| !failures.is_empty()).collect();
    all.sort_by_key(|(name, failures)| (failures.served.is_none(), failures.next.is_none(), *name));
    let (mut kept, mut bytes) = (Vec::new(), 0);
    for (name, failures) in all {
        let wire = without_texts(name, failures);
        // The comma as well.
        let more = json_bytes(&wire) + 1;
        if bytes + more <= REASONS_BYTES_MAX {
            bytes += more;
            kept.push((name, failures, wire));
        }
    }
    for (_, failures, wire) in &mut kept {
        let both = [(&failures.served, &mut wire.served), (&failures.next, &mut wire.next)];
        for (failed, wire) in both.into_iter().filter_map(|(failed, wire)| failed.as_ref().zip(wire.as_mut()))
        {
            let message = &failed.failure.message;
            let more = json_bytes(message);
            if bytes + more <= FAILURES_BYTES_MAX {
                bytes += more;
                wire.failure.message.clone_from(message);
            }
        }
    }
    kept.into_iter().map(|(name, _, wire)| (name, wire)).collect()
}

/// Returns the wire form without the texts of failures.
fn without_texts(
    name: &DeploymentName,
    DeploymentFailures { served, next, waiting }: &DeploymentFailures,
) -> DeploymentFailuresV1 {
    let without_text = |failed: &FailedModel| {
        let FailedModel { model, task, engine, failure } = failed;
        let failure = StartFailureReport::new(failure.reason, "");
        FailedModelV1::from(&FailedModel { model: model.clone(), task: *task, engine: *engine, failure })
    };
    DeploymentFailuresV1 {
        name: name.to_string(),
        served: served.as_ref().map(without_text),
        next: next.as_ref().map(without_text),
        waiting: waiting.clone().map(bounded_waiting),
    }
}

/// Returns the reason for which a deployment waits, cut at a character boundary.
pub(super) fn bounded_waiting(mut waiting: String) -> String {
    waiting.truncate(waiting.floor_char_boundary(WAITING_BYTES_MAX));
    waiting
}

/// Returns the bytes of a value in a message.
fn json_bytes(value: &impl Serialize) -> usize {
    serde_json::to_vec(value).map_or(FAILURES_BYTES_MAX, |text| text.len())
}

pub(super) fn read_failures(
    field: &str,
    wire: Vec<DeploymentFailuresV1>,
) -> Result<BTreeMap<DeploymentName, DeploymentFailures>, WireError> {
    entries(field, ".name", wire, MAX_DEPLOYMENTS, |at, wire| {
        let DeploymentFailuresV1 { name, served, next, waiting } = wire;
        let read = |what: &str, wire: Option<FailedModelV1>| {
            wire.map(|wire| read_failed_model(&format!("{at}.{what}"), wire)).transpose()
        };
        let (served, next) = (read("served", served)?, read("next", next)?);
        let failures = DeploymentFailures { served, next, waiting: waiting.map(bounded_waiting) };
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
            (
                "a".parse().unwrap(),
                DeploymentFailures { served: Some(served), next: Some(next.clone()), waiting: None },
            ),
            ("b".parse().unwrap(), DeploymentFailures { next: Some(next), ..DeploymentFailures::default() }),
            (
                "c".parse().unwrap(),
                DeploymentFailures { waiting: Some("text".to_owned()), ..DeploymentFailures::default() },
            ),
        ]);
        let wire: Vec<_> = failures_v1(&failures).into_values().collect();
        let text = serde_json::to_string(&wire).unwrap();
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
    fn the_failures_of_ten_thousand_deployments_fit_in_a_message_with_as_many_reasons_and_some_texts() {
        // Each control character has six bytes in a message.
        let failure = StartFailureReport::new(StartFailure::ModelUnavailable, "\u{1}".repeat(512));
        let engine = EngineSpec { kind: EngineKind::TensorrtLlm, precision: Precision::Bf16 };
        let failed = FailedModel {
            model: "hf://organisation/model-with-a-usual-name".to_owned(),
            task: Some(Task::Embed),
            engine: Some(engine),
            failure,
        };
        let waits = DeploymentFailures { waiting: Some("é".repeat(100)), ..DeploymentFailures::default() };
        let fails = DeploymentFailures { served: Some(failed.clone()), ..DeploymentFailures::default() };
        let named = |number: usize| {
            // The failed ones are the last ones by name.
            let failures = if number < 1_000 { &waits } else { &fails };
            (format!("deployment-{number:05}").parse().unwrap(), failures.clone())
        };
        let all: BTreeMap<DeploymentName, _> = (0..MAX_DEPLOYMENTS).map(named).collect();
        let wire: Vec<_> = failures_v1(&all).into_values().collect();
        assert!(json_bytes(&wire) <= FAILURES_BYTES_MAX + 2, "{}", json_bytes(&wire));
        let failures: Vec<_> = wire.iter().filter_map(|wire| Some(&wire.served.as_ref()?.failure)).collect();
        assert!(failures.len() > 800, "{}", failures.len());
        assert!(failures.iter().all(|failure| failure.reason == StartFailure::ModelUnavailable));
        let texts = failures.iter().filter(|failure| !failure.message.is_empty()).count();
        assert!((10..100).contains(&texts), "{texts}");
        // Read and sent again, as by a hub, they stay the same.
        let read = read_failures("failures", wire.clone()).unwrap();
        assert!(failures_v1(&read).into_values().eq(wire));

        let few: BTreeMap<DeploymentName, _> = [named(0), named(1_000)].into();
        let wire: Vec<_> = failures_v1(&few).into_values().collect();
        assert_eq!(wire[1].served, Some(FailedModelV1::from(&failed)), "with its text");
        assert_eq!(wire[0].waiting.as_ref().map(String::len), Some(WAITING_BYTES_MAX));
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
