//! Replicas of each deployment for `GET /v1/rollout`: target and ready count by region and model.

use regions::{DeploymentName, NextRevision, RegionId, RouteTable};
use scheduler_api::apply::{DeploymentReplicasV1, RegionReplicasV1};
use scheduler_api::deployment::engine_v1;
use scheduler_api::revision::{ReplicaRevisions, next_v1, revision_replicas_v1};
use scheduler_api::start_failure::{DeploymentFailures, FailedModelV1};
use scheduler_core::registry::{RegisteredSpoke, representatives};

/// Returns the replicas of each deployment of a table, from the latest reports of the regions.
pub(super) fn list(table: &RouteTable, spokes: Vec<RegisteredSpoke>) -> Vec<DeploymentReplicasV1> {
    let reporting = representatives(&spokes);
    let each = table.deployments.iter().map(|(name, deployment)| {
        let served = table.revision(name);
        DeploymentReplicasV1 {
            name: name.to_string(),
            model: deployment.model.clone(),
            engine: engine_v1(deployment.engine),
            revision: served.map(|served| served.current.to_string()),
            next: served.and_then(|served| served.next.as_ref()).map(|next: &NextRevision| next_v1(next)),
            regions: reporting
                .iter()
                .filter_map(|(region, standing)| in_region(name, region, standing))
                .collect(),
        }
    });
    each.collect()
}

fn in_region(
    name: &DeploymentName,
    region: &RegionId,
    standing: &RegisteredSpoke,
) -> Option<RegionReplicasV1> {
    let registration = &standing.registration;
    let (reported, failures) = (registration.models.get(name), registration.failures.get(name));
    // A region that can start replicas of the deployment and has none is listed too.
    if reported.is_none() && failures.is_none() && !registration.deployments.contains(name) {
        return None;
    }
    let none = ReplicaRevisions::default();
    let ReplicaRevisions { target, models } = reported.unwrap_or(&none);
    let DeploymentFailures { served, next, waiting: _ } = failures.cloned().unwrap_or_default();
    Some(RegionReplicasV1 {
        region: region.to_string(),
        target: *target,
        models: models.iter().map(revision_replicas_v1).collect(),
        failed: served.as_ref().map(FailedModelV1::from),
        failed_next: next.as_ref().map(FailedModelV1::from),
    })
}
