//! Status of the applied deployments, from the reports of the regions: ready, pending or failed.
//!
//! The status is that of the *applied* model. While the regions still serve an older one, it is pending; if no replica
//! of the applied model can start, it is failed, although the older one may be served well. `meridian apply --wait`
//! ends by it.
//!
//! The regions of a deployment with a placement are those that the leader has chosen for the applied version of it, by its record
//! in the store ([`scheduler_api::placements`]). Until it has decided, the deployment is pending: the route table still has the
//! regions of the earlier version.

use std::collections::{BTreeMap, BTreeSet};

use regions::{Catalogue, Deployment, DeploymentName, RegionId, RouteTable};
use scheduler_api::apply::{DeploymentStatusV1, RegionStatusV1, RolloutStatus};
use scheduler_api::deployment::engine_v1;
use scheduler_api::placements::{DecidedPlacement, DecidedPlacements};
use scheduler_api::registration::Registration;
use scheduler_api::start_failure::FailedModelV1;

use crate::registry::{RegisteredSpoke, representatives};

/// Returns the status of each of these deployments, by name. `table` is the published table, if there is one; `decided` are the
/// leader's decisions on the placements of these versions of the deployments, if it records them.
pub fn statuses(
    desired: &BTreeMap<DeploymentName, Deployment>,
    table: Option<&RouteTable>,
    decided: Option<&DecidedPlacements>,
    spokes: &[RegisteredSpoke],
    catalogue: &Catalogue,
) -> Vec<DeploymentStatusV1> {
    let reporting = representatives(spokes);
    // Any spoke of a region may be the one that scales it.
    let scaling = spokes.iter().map(|spoke| &spoke.registration).filter(|registration| registration.scales);
    let scaling: BTreeSet<&RegionId> = scaling.map(|registration| &registration.region).collect();
    let each = desired.values().map(|deployment| {
        let decision = decided.and_then(|decided| decision(deployment, decided));
        let stated = stated_regions(deployment, table, decided, decision);
        let infeasible = decision.and_then(|decision| decision.infeasible.clone());
        let is_placed_in = |region: &RegionId| deployment.placement.is_none() || stated.contains(region);
        let regions: Vec<_> = reporting
            .iter()
            .filter(|(region, _)| is_placed_in(region) && runs_in(deployment, region, catalogue))
            .filter_map(|(region, spoke)| {
                in_region(deployment, table, &spoke.registration, scaling.contains(region))
            })
            .collect();
        let missing = stated.iter().filter(|region| {
            runs_in(deployment, region, catalogue)
                && !regions.iter().any(|known| known.region == region.as_str())
        });
        let missing: Vec<_> = missing.map(pending).collect();
        let regions: Vec<_> = regions.into_iter().chain(missing).collect();
        let worst = regions.iter().map(|region| region.status).max().unwrap_or(RolloutStatus::Pending);
        let status = if infeasible.is_some() { worst.max(RolloutStatus::Pending) } else { worst };
        let awaits_placement = deployment.placement.is_some() && infeasible.is_none() && stated.is_empty();
        let name = deployment.name.to_string();
        DeploymentStatusV1 { name, status, infeasible, awaits_placement, regions }
    });
    each.collect()
}

/// Returns the regions that an operator has listed, or that the hub has chosen. Each of them must be ready; one without a spoke
/// cannot be. A deployment without a list runs in the regions that have a spoke. One with a placement runs nowhere until the hub
/// has chosen regions for this version of it; a leader of an earlier version of Meridian records no decisions, and its table has
/// the regions.
fn stated_regions<'a>(
    deployment: &'a Deployment,
    table: Option<&'a RouteTable>,
    decided: Option<&DecidedPlacements>,
    decision: Option<&'a DecidedPlacement>,
) -> &'a [RegionId] {
    if deployment.placement.is_none() {
        return &deployment.regions;
    }
    if decided.is_none() {
        let published = table.and_then(|table| table.deployments.get(&deployment.name));
        return published.map_or(&[], |published| &published.regions);
    }
    decision.map_or(&[], |decision| &decision.regions)
}

/// Returns the decision on the placement of a deployment.
fn decision<'a>(deployment: &Deployment, decided: &'a DecidedPlacements) -> Option<&'a DecidedPlacement> {
    decided.get(&deployment.name).filter(|_| deployment.placement.is_some())
}

/// Returns the status in a region that reports nothing about the deployment.
fn pending(region: &RegionId) -> RegionStatusV1 {
    RegionStatusV1 { region: region.to_string(), status: RolloutStatus::Pending, failed: None, waiting: None }
}

/// Returns whether the regions and the residency policy of a deployment allow a region.
pub(super) fn runs_in(deployment: &Deployment, region: &RegionId, catalogue: &Catalogue) -> bool {
    let allowed = deployment.residency.permitted(catalogue).intersect(deployment.placement(catalogue));
    catalogue.index_of(region).is_some_and(|index| allowed.contains(index))
}

/// Returns the status in one region; `None` if the region does not run the deployment.
fn in_region(
    deployment: &Deployment,
    table: Option<&RouteTable>,
    registration: &Registration,
    scales: bool,
) -> Option<RegionStatusV1> {
    let name = &deployment.name;
    let (reported, failures) = (registration.models.get(name), registration.failures.get(name));
    if !scales && reported.is_none() && failures.is_none() && !registration.deployments.contains(name) {
        return None;
    }
    let failed = failures.into_iter().flat_map(|failures| failures.served.iter().chain(&failures.next));
    let (task, engine) = (deployment.task.to_string(), engine_v1(deployment.engine));
    let failed = failed.map(FailedModelV1::from).find(|it| it.is_model_of(&deployment.model, &task, &engine));
    let published = table.and_then(|table| table.deployments.get(name));
    let is_published = published.is_some_and(|published| published.model_spec() == deployment.model_spec());
    let served = table.and_then(|table| table.revision(name));
    let ready = served.zip(reported).map_or(0, |(served, reported)| reported.ready(served.current));
    // Without a minimum, the first replica is started for the first request.
    let is_on_demand = deployment.scaling.min == 0 && registration.deployments.contains(name);
    let status = match &failed {
        Some(_) => RolloutStatus::Failed,
        None if is_published && (ready > 0 || is_on_demand) => RolloutStatus::Ready,
        None => RolloutStatus::Pending,
    };
    // Replicas that wait for a device start when other ones end, so the deployment has not failed.
    let waiting = failures.and_then(|failures| failures.waiting.clone());
    let waiting = waiting.filter(|_| status == RolloutStatus::Pending);
    Some(RegionStatusV1 { region: registration.region.to_string(), status, failed, waiting })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::some_registration;
    use regions::{ModelRevision, ReportedModel, ServedRevision, parse_deployments};
    use replica_api::start_failure::{StartFailure, StartFailureReport};
    use scheduler_api::revision::{ReplicaRevisions, RevisionReplicas};
    use scheduler_api::start_failure::{DeploymentFailures, FailedModel};

    const EUROPE: &str = "gcp/europe-west4";
    const AMERICA: &str = "aws/us-east-1";

    fn deployment(model: &str, more: &str) -> Deployment {
        let text = format!(
            "[[deployment]]\nname = \"m\"\ntask = \"embed\"\nmodel = \"{model}\"\nengine = {{ kind = \"cpu\", precision = \"f32\" }}\n{more}"
        );
        parse_deployments(&text, &Catalogue::builtin()).unwrap().remove(0)
    }

    fn spoke(region: &str, scales: bool) -> Registration {
        Registration { scales, ..some_registration(region) }
    }

    fn failing(deployment: &Deployment) -> FailedModel {
        FailedModel::of(deployment, StartFailureReport::new(StartFailure::ModelMissing, "no such model"))
    }

    fn ready(registration: Registration, revision: ModelRevision) -> Registration {
        let deployment = deployment("pypi://m", "");
        let model = ReportedModel {
            revision,
            source: deployment.model,
            task: deployment.task,
            engine: deployment.engine,
        };
        let models = vec![RevisionReplicas { model, replicas: 1, ready: 1 }];
        let models = ReplicaRevisions { target: Some(1), models };
        Registration { models: [("m".parse().unwrap(), models)].into(), ..registration }
    }

    fn table(published: &Deployment, current: ModelRevision) -> RouteTable {
        let mut table = RouteTable::empty();
        let name = published.name.clone();
        table.deployments.insert(name.clone(), published.clone());
        table.revisions = Some([(name, ServedRevision { current, next: None })].into());
        table
    }

    fn status(
        desired: &Deployment,
        table: Option<&RouteTable>,
        spokes: &[Registration],
    ) -> (RolloutStatus, Vec<(String, RolloutStatus)>) {
        status_by(desired, table, None, spokes)
    }

    fn status_by(
        desired: &Deployment,
        table: Option<&RouteTable>,
        decided: Option<&DecidedPlacements>,
        spokes: &[Registration],
    ) -> (RolloutStatus, Vec<(String, RolloutStatus)>) {
        let desired = [(desired.name.clone(), desired.clone())].into();
        let registered = spokes.iter().zip(1..);
        let registered: Vec<_> = registered
            .map(|(registration, created)| RegisteredSpoke { registration: registration.clone(), created })
            .collect();
        let DeploymentStatusV1 { status, regions, .. } =
            statuses(&desired, table, decided, &registered, &Catalogue::builtin()).remove(0);
        (status, regions.into_iter().map(|region| (region.region, region.status)).collect())
    }

    #[test]
    fn a_deployment_is_ready_when_each_of_its_regions_has_a_ready_replica_of_the_applied_model() {
        use RolloutStatus::{Pending, Ready};
        let revision: ModelRevision = "00000000000000aa".parse().unwrap();
        let applied = deployment("pypi://m", "");
        let published = table(&applied, revision);
        assert_eq!(status(&applied, Some(&published), &[]), (Pending, Vec::new()), "no region is registered");
        let (america, europe) = (spoke(AMERICA, true), spoke(EUROPE, true));
        let both = [ready(america.clone(), revision), europe.clone()];
        let (all, regions) = status(&applied, Some(&published), &both);
        assert_eq!(
            (all, regions),
            (Pending, vec![(AMERICA.to_owned(), Ready), (EUROPE.to_owned(), Pending)])
        );
        let both = [ready(america, revision), ready(europe, revision)];
        assert_eq!(status(&applied, Some(&published), &both).0, Ready);
        assert_eq!(status(&applied, None, &both).0, Pending, "nothing is published");
        let changed = deployment("pypi://other", "");
        assert_eq!(status(&changed, Some(&published), &both).0, Pending, "the older model is served");
    }

    #[test]
    fn a_deployment_is_failed_as_soon_as_one_region_cannot_start_the_applied_model() {
        let revision: ModelRevision = "00000000000000aa".parse().unwrap();
        let (served, applied) = (deployment("pypi://m", ""), deployment("hf://missing", ""));
        let published = table(&served, revision);
        let mut america = ready(spoke(AMERICA, true), revision);
        let next = DeploymentFailures { next: Some(failing(&applied)), ..DeploymentFailures::default() };
        america.failures = [(applied.name.clone(), next)].into();
        let europe = ready(spoke(EUROPE, true), revision);
        let (all, regions) = status(&applied, Some(&published), &[america.clone(), europe]);
        assert_eq!(all, RolloutStatus::Failed);
        assert_eq!(regions[1].1, RolloutStatus::Pending, "Europe has not reported");
        // The failure of a model that is no longer applied counts no more.
        assert_eq!(status(&served, Some(&published), &[america]).0, RolloutStatus::Ready);
    }

    #[test]
    fn a_deployment_whose_replicas_wait_is_pending_with_the_reason() {
        let revision: ModelRevision = "00000000000000aa".parse().unwrap();
        let applied = deployment("pypi://m", "");
        let published = table(&applied, revision);
        let mut america = spoke(AMERICA, true);
        let waiting = Some("no free device: 2 of 2 in use".to_owned());
        let waits = DeploymentFailures { waiting: waiting.clone(), ..DeploymentFailures::default() };
        america.failures = [(applied.name.clone(), waits)].into();
        let shown = |america: Registration| {
            let desired = [(applied.name.clone(), applied.clone())].into();
            let spokes = [RegisteredSpoke { registration: america, created: 1 }];
            let region = statuses(&desired, Some(&published), None, &spokes, &Catalogue::builtin())
                .remove(0)
                .regions
                .remove(0);
            (region.status, region.waiting)
        };
        assert_eq!(shown(america.clone()), (RolloutStatus::Pending, waiting));
        assert_eq!(shown(ready(america, revision)), (RolloutStatus::Ready, None), "another replica is ready");
    }

    #[test]
    fn a_region_outside_the_placement_or_without_the_deployment_does_not_count() {
        let revision: ModelRevision = "00000000000000aa".parse().unwrap();
        let locked = deployment("pypi://m", "residency = { allow = [\"eu\"] }");
        let published = table(&locked, revision);
        let spokes = [spoke(AMERICA, true), ready(spoke(EUROPE, false), revision)];
        let expected = vec![(EUROPE.to_owned(), RolloutStatus::Ready)];
        assert_eq!(status(&locked, Some(&published), &spokes), (RolloutStatus::Ready, expected));
        let anywhere = deployment("pypi://m", "");
        let listed = [spoke(AMERICA, false), ready(spoke(EUROPE, false), revision)];
        assert_eq!(status(&anywhere, Some(&table(&anywhere, revision)), &listed).1.len(), 1);
    }

    #[test]
    fn a_listed_region_without_a_spoke_is_pending() {
        let revision: ModelRevision = "00000000000000aa".parse().unwrap();
        let listed = deployment("pypi://m", &format!("regions = [\"{AMERICA}\", \"{EUROPE}\"]"));
        let published = table(&listed, revision);
        let america = ready(spoke(AMERICA, true), revision);
        let regions =
            vec![(AMERICA.to_owned(), RolloutStatus::Ready), (EUROPE.to_owned(), RolloutStatus::Pending)];
        for spokes in [vec![america.clone()], vec![america.clone(), spoke(EUROPE, false)]] {
            assert_eq!(status(&listed, Some(&published), &spokes), (RolloutStatus::Pending, regions.clone()));
        }
    }

    #[test]
    fn of_a_deployment_with_a_placement_only_the_chosen_regions_count() {
        let revision: ModelRevision = "00000000000000aa".parse().unwrap();
        let applied = deployment("pypi://m", "placement = { min_regions = 1 }");
        let spokes = [spoke(AMERICA, true), ready(spoke(EUROPE, true), revision)];
        let expected = (RolloutStatus::Pending, Vec::new());
        assert_eq!(status(&applied, None, &spokes), expected, "no region is chosen");
        let chosen =
            Deployment { regions: vec![EUROPE.parse().unwrap()], placement: None, ..applied.clone() };
        let expected = (RolloutStatus::Ready, vec![(EUROPE.to_owned(), RolloutStatus::Ready)]);
        assert_eq!(status(&applied, Some(&table(&chosen, revision)), &spokes), expected);
    }

    #[test]
    fn a_changed_placement_is_pending_until_the_regions_chosen_for_it_are_ready() {
        use RolloutStatus::{Pending, Ready};
        let revision: ModelRevision = "00000000000000aa".parse().unwrap();
        let applied = deployment("pypi://m", "placement = { min_regions = 2 }");
        let decided = |regions: &[&str]| {
            let regions = regions.iter().map(|region| region.parse().unwrap()).collect();
            DecidedPlacements::from([(applied.name.clone(), DecidedPlacement { regions, infeasible: None })])
        };
        let published =
            Deployment { regions: vec![EUROPE.parse().unwrap()], placement: None, ..applied.clone() };
        let published = table(&published, revision);
        let (america, europe) = (spoke(AMERICA, true), ready(spoke(EUROPE, true), revision));
        let check = |decided: &DecidedPlacements, america: &Registration, expected: (_, &[_])| {
            let spokes = [america.clone(), europe.clone()];
            let (status, regions) = status_by(&applied, Some(&published), Some(decided), &spokes);
            let regions: Vec<_> = regions.iter().map(|(region, status)| (region.as_str(), *status)).collect();
            assert_eq!((status, regions.as_slice()), expected);
        };
        check(&DecidedPlacements::new(), &america, (Pending, &[]));
        let chosen = decided(&[AMERICA, EUROPE]);
        check(&chosen, &america, (Pending, &[(AMERICA, Pending), (EUROPE, Ready)]));
        let america = ready(america, revision);
        check(&chosen, &america, (Ready, &[(AMERICA, Ready), (EUROPE, Ready)]));
        // A region that the deployment leaves does not count.
        let mut america_only = decided(&[AMERICA]);
        check(&america_only, &america, (Ready, &[(AMERICA, Ready)]));
        for decision in america_only.values_mut() {
            decision.infeasible = Some("min_regions".to_owned());
        }
        check(&america_only, &america, (Pending, &[(AMERICA, Ready)]));
    }

    #[test]
    fn a_deployment_awaits_its_placement_until_the_leader_has_decided() {
        let placed = deployment("pypi://m", "placement = { min_regions = 1 }");
        let listed = deployment("pypi://m", "");
        let awaits = |desired: &Deployment, decided: Option<&DecidedPlacements>| {
            let desired = [(desired.name.clone(), desired.clone())].into();
            statuses(&desired, None, decided, &[], &Catalogue::builtin()).remove(0).awaits_placement
        };
        let none = DecidedPlacements::new();
        assert!(awaits(&placed, Some(&none)) && awaits(&placed, None));
        assert!(!awaits(&listed, Some(&none)), "it states no placement");
        let decision = |regions, infeasible| {
            DecidedPlacements::from([(placed.name.clone(), DecidedPlacement { regions, infeasible })])
        };
        assert!(!awaits(&placed, Some(&decision(vec![EUROPE.parse().unwrap()], None))));
        assert!(!awaits(&placed, Some(&decision(Vec::new(), Some("min_regions".to_owned())))));
    }

    #[test]
    fn a_deployment_that_starts_on_demand_is_ready_without_a_replica() {
        let revision: ModelRevision = "00000000000000aa".parse().unwrap();
        let on_demand = deployment("pypi://m", "scaling = { min = 0, max = 2 }");
        let published = table(&on_demand, revision);
        let mut america = spoke(AMERICA, true);
        assert_eq!(status(&on_demand, Some(&published), &[america.clone()]).0, RolloutStatus::Pending);
        america.deployments.insert(on_demand.name.clone());
        assert_eq!(status(&on_demand, Some(&published), &[america]).0, RolloutStatus::Ready);
    }
}
