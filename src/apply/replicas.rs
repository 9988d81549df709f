//! Text output of the replicas of a deployment: ready and target counts, regions, model revisions.

use scheduler_api::apply::{DeploymentReplicasV1, RegionReplicasV1};
use scheduler_api::deployment::EngineV1;
use scheduler_api::revision::{NextRevisionV1, RevisionReplicasV1};
use scheduler_api::start_failure::FailedModelV1;

/// Returns the lines of one deployment in `meridian get rollout`.
pub(super) fn format_deployment(deployment: &DeploymentReplicasV1) -> Vec<String> {
    let DeploymentReplicasV1 { name, model, engine, revision, next, regions } = deployment;
    let shown = revision.as_deref().unwrap_or("unknown: no replica has reported one");
    let mut lines =
        vec![format!("deployment {name}: {model}, {}, model revision {shown}", engine_of(engine))];
    lines.extend(regions.iter().map(|region| format!("  {}", of_revision(region, revision.as_deref()))));
    if let Some(next) = next {
        lines.push(format!("  {}", change(name, next)));
        lines.extend(
            regions.iter().map(|region| format!("    {}", of_revision(region, next.revision.as_deref()))),
        );
    }
    for region in regions {
        lines.extend(failed(region, name).map(|line| format!("  {}: {line}", region.region)));
        lines.extend(mismatched(region, deployment).map(|line| format!("  {}: {line}", region.region)));
    }
    lines
}

/// Returns the lines of a region in `meridian get regions` for replicas that get no requests because of their model.
pub(super) fn mismatches<'a>(
    region: &'a str,
    deployments: &'a [DeploymentReplicasV1],
) -> impl Iterator<Item = String> + 'a {
    let here = deployments
        .iter()
        .flat_map(|deployment| deployment.regions.iter().map(move |region| (deployment, region)));
    here.filter(move |(_, replicas)| replicas.region == region)
        .flat_map(|(deployment, replicas)| mismatched(replicas, deployment))
}

fn change(name: &str, next: &NextRevisionV1) -> String {
    let NextRevisionV1 { task: _, model, engine, revision, held } = next;
    let engine = engine_of(engine);
    match (revision, held) {
        (None, _) => format!("changes to {model}, {engine}: no replica of it is ready yet"),
        (Some(revision), false) => {
            format!(
                "changes to {model}, {engine}, model revision {revision}, when it is ready in every region"
            )
        }
        (Some(revision), true) => {
            format!(
                "held: {model}, {engine}, model revision {revision}; `meridian apply --promote {name}` switches to it"
            )
        }
    }
}

/// Formats the ready replicas of one revision in one region.
fn of_revision(replicas: &RegionReplicasV1, revision: Option<&str>) -> String {
    let RegionReplicasV1 { region, target, models, .. } = replicas;
    let of_it = || models.iter().filter(|counted| Some(counted.revision.as_str()) == revision);
    let ready: u32 = of_it().map(|counted| counted.ready).sum();
    let running: u32 = of_it().map(|counted| counted.replicas).sum();
    format!("{region}: {ready} of {} replicas ready", target.unwrap_or(running))
}

/// Returns the lines of a region in `meridian get regions` for models that it cannot start.
pub(super) fn failures<'a>(
    region: &'a str,
    deployments: &'a [DeploymentReplicasV1],
) -> impl Iterator<Item = String> + 'a {
    let each =
        deployments.iter().flat_map(|deployment| deployment.regions.iter().map(move |it| (deployment, it)));
    each.filter(move |(_, replicas)| replicas.region == region)
        .flat_map(|(deployment, replicas)| failed(replicas, &deployment.name))
}

/// Returns a line for each model of a deployment that the region cannot start.
fn failed<'a>(replicas: &'a RegionReplicasV1, name: &'a str) -> impl Iterator<Item = String> + 'a {
    let failed = [&replicas.failed, &replicas.failed_next].into_iter().flatten();
    failed.map(move |FailedModelV1 { model, failure, .. }| {
        let message = failure.message.replace(char::is_control, " ");
        format!("Failed: {name}: {model}: {}: {message}", failure.reason.as_str())
    })
}

/// Returns the lines of the replicas that run neither the served model nor the next one.
fn mismatched<'a>(
    replicas: &'a RegionReplicasV1,
    deployment: &'a DeploymentReplicasV1,
) -> impl Iterator<Item = String> + 'a {
    let next = deployment.next.as_ref().and_then(|next| next.revision.as_ref());
    let expected = [deployment.revision.as_ref(), next];
    let mismatched = replicas
        .models
        .iter()
        .filter(move |counted| deployment.revision.is_some() && !expected.contains(&Some(&counted.revision)));
    mismatched.map(|counted| {
        let RevisionReplicasV1 { revision, source, task: _, engine, replicas, ready: _ } = counted;
        format!(
            "mismatch: {replicas} of {} run {source}, {}, model revision {revision}, and get no requests",
            deployment.name,
            engine_of(engine)
        )
    })
}

fn engine_of(EngineV1 { kind, precision }: &EngineV1) -> String {
    format!("{kind} {precision}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_text_shows_ready_replicas_by_model() {
        let (old, new, other) = ("00000000000000aa", "00000000000000bb", "00000000000000cc");
        let model = |revision: &str, precision: &str, replicas: u32, ready: u32| {
            json!({"revision": revision, "source": "pypi://m", "task": "embed",
                   "engine": {"kind": "cpu", "precision": precision}, "replicas": replicas, "ready": ready})
        };
        let replicas = json!({
            "name": "a", "model": "pypi://m", "engine": {"kind": "cpu", "precision": "f32"}, "revision": old,
            "next": {"task": "embed", "model": "pypi://m", "engine": {"kind": "cpu", "precision": "int8"},
                     "revision": new, "held": true},
            "regions": [
                {"region": "aws/us-east-1", "target": 3, "failed_next": {"model": "pypi://m", "failure": {"reason": "disk_full", "message": "no space"}}, "models": [model(old, "f32", 3, 2), model(new, "int8", 1, 1)]},
                {"region": "oci/ap-tokyo-1", "target": null, "models": [model(old, "f32", 1, 1), model(other, "f32", 1, 1)]},
            ],
        });
        let deployment: DeploymentReplicasV1 = serde_json::from_value(replicas).expect("replicas");
        let expected = [
            "deployment a: pypi://m, cpu f32, model revision 00000000000000aa",
            "  aws/us-east-1: 2 of 3 replicas ready",
            "  oci/ap-tokyo-1: 1 of 1 replicas ready",
            "  held: pypi://m, cpu int8, model revision 00000000000000bb; `meridian apply --promote a` switches to it",
            "    aws/us-east-1: 1 of 3 replicas ready",
            "    oci/ap-tokyo-1: 0 of 0 replicas ready",
            "  aws/us-east-1: Failed: a: pypi://m: disk_full: no space",
            "  oci/ap-tokyo-1: mismatch: 1 of a run pypi://m, cpu f32, model revision 00000000000000cc, and get no requests",
        ];
        assert_eq!(format_deployment(&deployment), expected);
        let all = [deployment];
        assert_eq!(failures("aws/us-east-1", &all).count(), 1);
        assert_eq!(failures("oci/ap-tokyo-1", &all).count(), 0);
        assert_eq!(mismatches("oci/ap-tokyo-1", &all).count(), 1);
        assert_eq!(mismatches("aws/us-east-1", &all).count(), 0);
    }
}
