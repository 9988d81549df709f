//! `meridian apply --wait`: follows the applied deployments until all are ready, or one has failed.
//!
//! The hub knows the status of each deployment in each of its regions ([`DeploymentStatusV1`]). A deployment has failed as
//! soon as one region cannot start the applied model; the other regions may still serve it, or the older model. One with a
//! placement is ready when the regions that the hub has chosen for the applied version are.

use super::CommandError;
use scheduler_api::apply::{
    AppliedDeploymentsV1, DeploymentReplicasV1, DeploymentStatusV1, RegionStatusV1, RolloutStatus,
};
use scheduler_api::paths;
use scheduler_client::hub::HubFailure;
use scheduler_client::operator::OperatorClient;
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// Interval of the requests to the hub: a region reports a failure within a fraction of a second.
const PERIOD: Duration = Duration::from_millis(500);

/// State of the deployments that the command waits for.
#[derive(Debug, PartialEq, Eq)]
enum Progress {
    /// All are ready.
    Ready,
    /// No one has failed, and these are not ready, with the regions that they wait for.
    Pending(Vec<String>),
    /// These have failed, with region and reason.
    Failed(Vec<String>),
}

/// Returns the state of the deployments with these names; of all without names.
fn progress(statuses: &[DeploymentStatusV1], names: Option<&BTreeSet<String>>) -> Progress {
    let is_waited_for = |status: &&DeploymentStatusV1| names.is_none_or(|names| names.contains(&status.name));
    let waited_for: Vec<_> = statuses.iter().filter(is_waited_for).collect();
    let mut failed: Vec<String> = waited_for.iter().flat_map(|status| failures(status)).collect();
    let known: BTreeSet<_> = statuses.iter().map(|status| &status.name).collect();
    let removed = names.into_iter().flatten().filter(|name| !known.contains(name));
    failed.extend(removed.map(|name| format!("{name} was removed by another change meanwhile")));
    if !failed.is_empty() {
        return Progress::Failed(failed);
    }
    let pending = waited_for.iter().filter(|status| status.status != RolloutStatus::Ready);
    let pending: Vec<_> = pending.map(|status| waits_for(status)).collect();
    if pending.is_empty() { Progress::Ready } else { Progress::Pending(pending) }
}

/// Returns a line for each region in which a deployment has failed.
pub(super) fn failures(status: &DeploymentStatusV1) -> impl Iterator<Item = String> {
    let DeploymentStatusV1 { name, regions, status: _, infeasible: _, awaits_placement: _ } = status;
    let failed = regions.iter().filter(|region| region.status == RolloutStatus::Failed);
    failed.map(move |RegionStatusV1 { region, failed, .. }| {
        let reason = failed.as_ref().map_or_else(String::new, |failed| {
            // The text is that of a process: it must not change the terminal or end the line.
            let message = failed.failure.message.replace(char::is_control, " ");
            format!(": {}: {message}", failed.failure.reason.as_str())
        });
        format!("{name} has failed in {region}{reason}")
    })
}

/// Returns the same lines, with the previous model where a region still serves it, which `replicas` has.
pub(super) fn failures_and_served(
    status: &DeploymentStatusV1,
    replicas: &[DeploymentReplicasV1],
) -> impl Iterator<Item = String> {
    let served = replicas.iter().find(|known| known.name == status.name && known.next.is_some());
    let failed = status.regions.iter().filter(|region| region.status == RolloutStatus::Failed);
    failed.zip(failures(status)).map(move |(failed, line)| {
        let serves = |known: &&DeploymentReplicasV1| {
            let of_region = known.regions.iter().filter(|region| region.region == failed.region);
            let models = of_region.flat_map(|region| &region.models).filter(|model| model.ready > 0);
            models.into_iter().any(|model| model.source == known.model && model.engine == known.engine)
        };
        match served.filter(serves) {
            Some(DeploymentReplicasV1 { model, engine, .. }) => {
                format!(
                    "{line}; it still serves the previous model: {model}, {} {}",
                    engine.kind, engine.precision
                )
            }
            None => line,
        }
    })
}

/// Returns a line with what a deployment waits for; `None` if it is ready, or only regions in which it has failed are not.
pub(super) fn pending(status: &DeploymentStatusV1) -> Option<String> {
    let is_pending = match status.status {
        RolloutStatus::Ready | RolloutStatus::Failed => status.infeasible.is_some(),
        RolloutStatus::Pending | RolloutStatus::Unknown => true,
    };
    is_pending.then(|| waits_for(status))
}

/// Returns a line with the constraint that no set of regions meets, or with the regions in which a deployment is not ready and their
/// reasons as far as they state one.
fn waits_for(status: &DeploymentStatusV1) -> String {
    let DeploymentStatusV1 { name, regions, infeasible, awaits_placement, status: _ } = status;
    if let Some(constraint) = infeasible {
        let constraint = constraint.replace(char::is_control, " ");
        return format!("{name}: no set of regions meets its placement: {constraint}");
    }
    if *awaits_placement {
        return format!("{name}: the leader has not chosen regions for this version yet");
    }
    let waiting = regions.iter().filter(|region| region.status != RolloutStatus::Ready);
    let waiting = waiting.map(|RegionStatusV1 { region, waiting, .. }| match waiting {
        Some(reason) => format!("{region} ({})", reason.replace(char::is_control, " ")),
        None => region.clone(),
    });
    let waiting: Vec<_> = waiting.collect();
    match waiting.as_slice() {
        [] => format!("{name}: no registered region has or starts replicas of it"),
        waiting => format!("{name}: not ready in {}", waiting.join(", ")),
    }
}

/// Waits until the deployments with these names are ready, all of them without names. `show` gets each change of what is
/// waited for.
///
/// # Errors
///
/// When one has failed, when they are not ready within `timeout`, or when the hub rejects the request.
pub(super) async fn follow(
    hub: &OperatorClient,
    names: Option<&BTreeSet<String>>,
    timeout: Duration,
    mut show: impl FnMut(&str),
) -> Result<(), CommandError> {
    let begun = Instant::now();
    let mut pending = Vec::new();
    loop {
        match hub.get::<AppliedDeploymentsV1>(paths::DEPLOYMENTS).await {
            Ok(AppliedDeploymentsV1 { deployments, statuses, .. }) => {
                if statuses.len() < deployments.len() {
                    let problem = "the hub reports no status of its deployments; upgrade it, or omit --wait";
                    return Err(CommandError::Failed(problem.to_owned()));
                }
                match progress(&statuses, names) {
                    Progress::Ready => return Ok(()),
                    Progress::Failed(problems) => {
                        return Err(CommandError::Partial { text: None, problems });
                    }
                    Progress::Pending(lines) => {
                        let is_new = |line: &&String| !pending.contains(*line);
                        lines.iter().filter(is_new).for_each(|line| show(line));
                        pending = lines;
                    }
                }
            }
            Err(error) if matches!(error.failure, HubFailure::Rejected { .. }) => return Err(error.into()),
            Err(error) if begun.elapsed() >= timeout => return Err(error.into()),
            // A hub that restarts is back within the time limit.
            Err(_) => {}
        }
        if begun.elapsed() >= timeout {
            let seconds = timeout.as_secs();
            let problem = format!("not ready after {seconds} s: {}", pending.join("; "));
            return Err(CommandError::Failed(format!("{problem}; see `meridian get rollout`")));
        }
        tokio::time::sleep(PERIOD).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn statuses(value: Value) -> Vec<DeploymentStatusV1> {
        serde_json::from_value(value).expect("statuses")
    }

    fn region(region: &str, status: &str) -> Value {
        json!({"region": region, "status": status})
    }

    fn failed(region: &str) -> Value {
        let failure = json!({"reason": "model_missing", "message": "hf://m:\n\u{1b}[31m404"});
        json!({"region": region, "status": "Failed", "failed": {"model": "hf://m", "failure": failure}})
    }

    #[test]
    fn the_command_ends_with_the_first_failure_of_a_deployment_that_it_waits_for() {
        let all = statuses(json!([
            {"name": "a", "status": "Failed", "regions": [region("aws/us-east-1", "Ready"), failed("gcp/europe-west4")]},
            {"name": "b", "status": "Pending", "regions": [region("aws/us-east-1", "Pending")]},
        ]));
        let line = "a has failed in gcp/europe-west4: model_missing: hf://m:  [31m404";
        assert_eq!(progress(&all, None), Progress::Failed(vec![line.to_owned()]));
        let only = |name: &str| BTreeSet::from([name.to_owned()]);
        assert_eq!(progress(&all, Some(&only("a"))), Progress::Failed(vec![line.to_owned()]));
        let pending = Progress::Pending(vec!["b: not ready in aws/us-east-1".to_owned()]);
        assert_eq!(progress(&all, Some(&only("b"))), pending, "a is not waited for");
        let removed = Progress::Failed(vec!["c was removed by another change meanwhile".to_owned()]);
        assert_eq!(progress(&all, Some(&only("c"))), removed);
    }

    #[test]
    fn a_failure_of_the_next_model_names_the_one_that_is_served() {
        let status =
            statuses(json!([{"name": "a", "status": "Failed", "regions": [failed("gcp/europe-west4")]}]))
                .remove(0);
        let line = "a has failed in gcp/europe-west4: model_missing: hf://m:  [31m404";
        let lines = |next: Value, ready: u32| -> Vec<String> {
            let engine = json!({"kind": "cpu", "precision": "f32"});
            let model = json!({"revision": "1".repeat(16), "source": "pypi://old", "task": "embed", "engine": engine,
                               "replicas": 1, "ready": ready});
            let region = json!({"region": "gcp/europe-west4", "target": 1, "models": [model]});
            let known = json!([{"name": "a", "model": "pypi://old", "engine": engine, "revision": null, "next": next,
                                "regions": [region]}]);
            let known: Vec<DeploymentReplicasV1> = serde_json::from_value(known).expect("replicas");
            failures_and_served(&status, &known).collect()
        };
        let next = json!({"task": "embed", "model": "hf://m", "engine": {"kind": "cpu", "precision": "f32"},
                          "revision": null, "held": false});
        let beside = format!("{line}; it still serves the previous model: pypi://old, cpu f32");
        assert_eq!(lines(next.clone(), 1), [beside]);
        assert_eq!(lines(Value::Null, 1), [line], "the failed model is the only one");
        assert_eq!(lines(next, 0), [line], "no replica of the previous one is ready");
        assert_eq!(failures_and_served(&status, &[]).collect::<Vec<_>>(), [line]);
    }

    #[test]
    fn the_command_waits_until_every_region_is_ready() {
        let of = |regions: Value, status: &str| {
            progress(&statuses(json!([{"name": "a", "status": status, "regions": regions}])), None)
        };
        let (america, europe) = (region("aws/us-east-1", "Ready"), region("gcp/europe-west4", "Pending"));
        let pending = |line: &str| Progress::Pending(vec![line.to_owned()]);
        assert_eq!(of(json!([]), "Pending"), pending("a: no registered region has or starts replicas of it"));
        assert_eq!(of(json!([america, europe]), "Pending"), pending("a: not ready in gcp/europe-west4"));
        let later = region("gcp/europe-west4", "Suspended");
        assert_eq!(
            of(json!([later]), "Suspended"),
            pending("a: not ready in gcp/europe-west4"),
            "of a later version"
        );
        let mut full = europe.clone();
        full["waiting"] = json!("no free device: 2 of 2 in use");
        let line = "a: not ready in gcp/europe-west4 (no free device: 2 of 2 in use)";
        assert_eq!(of(json!([full]), "Pending"), pending(line));
        assert_eq!(of(json!([america]), "Ready"), Progress::Ready);
        let infeasible = json!([{"name": "a", "status": "Pending", "infeasible": "min_regions: 1 of 2", "regions": [america]}]);
        assert_eq!(
            progress(&statuses(infeasible), None),
            pending("a: no set of regions meets its placement: min_regions: 1 of 2")
        );
        let undecided = json!([{"name": "a", "status": "Pending", "awaits_placement": true, "regions": []}]);
        assert_eq!(
            progress(&statuses(undecided), None),
            pending("a: the leader has not chosen regions for this version yet")
        );
        assert_eq!(progress(&[], None), Progress::Ready, "nothing is deployed");
    }
}
