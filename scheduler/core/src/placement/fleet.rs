//! Placement at the hub: candidates from the registrations, and the chosen regions in the next route table.
//!
//! The chosen regions take the place of the regions that an operator lists: route table, plan and scalers read
//! `Deployment::regions`, and the requirement is not part of the table, so that its readers need not understand it. The
//! current set is that of the last table, so that a new leader continues where the last one stopped.
//!
//! ```text
//!  chosen   a, b ─────────── b, c ──────────────────────── b, c
//!  table    a, b             a, b, c  (c starts replicas)   b, c   (a drains)
//!                                     c is ready ───────▶
//! ```
//!
//! A region that is no longer chosen stays in the table until every chosen one has its minimum number of replicas ready. A
//! region that residency no longer permits leaves at once.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

use super::{Infeasible, PlacementCandidate, PlacementDecision, Requirement, SpokeState, choose};
use crate::registry::RegisteredSpoke;
use regions::{
    Accelerators, Catalogue, Deployment, DeploymentName, EngineKind, PlacementSpec, Region, RegionId,
    RegionIndex, RegionSet, RouteTable,
};
use scheduler_api::registration::Registration;

type Deployments = BTreeMap<DeploymentName, Deployment>;

/// State of the fleet that placements depend on.
#[derive(Clone, Debug)]
pub struct Fleet<'a> {
    /// Facts of the regions.
    pub catalogue: &'a Catalogue,
    /// Regions with a route, and the spoke that reports for each of them; `None` while its spokes have lapsed.
    pub regions: BTreeMap<&'a RegionId, Option<&'a Registration>>,
    /// Regions that an operator drains.
    pub drains: &'a BTreeSet<RegionId>,
    /// So many leases ended at once that the store is suspected: current placements stay.
    pub in_doubt: bool,
}

impl<'a> Fleet<'a> {
    /// Returns the state of a fleet with these routes, the spokes that report for their regions, and drains.
    pub fn new(
        catalogue: &'a Catalogue,
        routed: impl IntoIterator<Item = &'a RegionId>,
        spokes: impl IntoIterator<Item = &'a RegisteredSpoke>,
        drains: &'a BTreeSet<RegionId>,
        in_doubt: bool,
    ) -> Fleet<'a> {
        let mut regions: BTreeMap<_, _> = routed.into_iter().map(|region| (region, None)).collect();
        let registrations = spokes.into_iter().map(|spoke| &spoke.registration);
        regions.extend(registrations.map(|registration| (&registration.region, Some(registration))));
        Fleet { catalogue, regions, drains, in_doubt }
    }
}

/// Desired deployments with the regions that were chosen for them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlacedDeployments<'a> {
    /// Deployments without those for which no region is chosen yet.
    pub deployments: Cow<'a, Deployments>,
    /// Deployments for which no set of regions is feasible now, with the constraint.
    pub infeasible: BTreeMap<DeploymentName, Infeasible>,
}

/// Placement of one deployment in the next table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct StagedPlacement {
    pub(super) decision: PlacementDecision,
    /// Regions that are no longer chosen, and stay until the chosen ones are ready.
    pub(super) leaving: RegionSet,
}

/// Returns the deployments of the table that follows `last`, with their regions.
pub fn stage<'a>(desired: &'a Deployments, last: &RouteTable, fleet: &Fleet<'_>) -> PlacedDeployments<'a> {
    let mut deployments = Cow::Borrowed(desired);
    let mut infeasible = BTreeMap::new();
    for (name, deployment) in desired {
        let Some(placement) = &deployment.placement else { continue };
        let before = last.deployments.get(name);
        if let Some(before) = before.filter(|_| fleet.in_doubt) {
            deployments.to_mut().insert(name.clone(), placed(deployment, before.regions.clone()));
            continue;
        }
        let StagedPlacement { decision, leaving } = stage_one(deployment, placement, before, fleet);
        infeasible.extend(decision.infeasible.map(|constraint| (name.clone(), constraint)));
        let regions = decision.regions.union(leaving);
        if regions.is_empty() {
            deployments.to_mut().remove(name);
            continue;
        }
        let regions = regions.iter().map(|region| fleet.catalogue.region(region).id.clone()).collect();
        deployments.to_mut().insert(name.clone(), placed(deployment, regions));
    }
    PlacedDeployments { deployments, infeasible }
}

/// Returns a deployment as if an operator had listed these regions.
fn placed(deployment: &Deployment, regions: Vec<RegionId>) -> Deployment {
    Deployment { regions, placement: None, ..deployment.clone() }
}

/// Returns the placement of a deployment whose last published state is `before`.
pub(super) fn stage_one(
    deployment: &Deployment,
    placement: &PlacementSpec,
    before: Option<&Deployment>,
    fleet: &Fleet<'_>,
) -> StagedPlacement {
    let current = current_regions(before, fleet);
    let permitted = deployment.residency.permitted(fleet.catalogue);
    let registered: RegionSet =
        fleet.regions.keys().filter_map(|region| fleet.catalogue.index_of(region)).collect();
    let candidates = registered.union(current).iter().map(|index| {
        let region = fleet.catalogue.region(index);
        let spoke = fleet.regions.get(&region.id).copied().flatten();
        let facts = facts(index, region, deployment, spoke.map(|spoke| &spoke.accelerators));
        // A spoke that states no engines counts as able to run each of the catalogue's.
        let engines = spoke.and_then(|spoke| spoke.engines.as_ref());
        PlacementCandidate {
            is_permitted: permitted.contains(index),
            has_engine: facts.has_engine
                && engines.is_none_or(|engines| engines.contains(&deployment.engine.kind)),
            spokes: spoke_state(&deployment.name, &region.id, fleet),
            ..facts
        }
    });
    let decision = choose(&candidates.collect::<Vec<_>>(), &requirement(deployment, placement), current);
    let is_ready = |index: RegionIndex| {
        let registration = fleet.regions.get(&fleet.catalogue.region(index).id).copied().flatten();
        registration.is_some_and(|registration| is_ready(deployment, registration))
    };
    let leaving = match decision.regions.iter().all(is_ready) {
        true => RegionSet::EMPTY,
        false => current.minus(decision.regions).intersect(permitted).intersect(registered),
    };
    StagedPlacement { decision, leaving }
}

/// Returns a candidate with what is known of its region; `registered` are the accelerators that its spoke states. With
/// accelerators, it has the engine that needs them.
pub(super) fn facts<'a>(
    index: RegionIndex,
    region: &'a Region,
    deployment: &Deployment,
    registered: Option<&'a Accelerators>,
) -> PlacementCandidate<'a> {
    let accelerators = registered.filter(|stated| !stated.is_empty()).unwrap_or(&region.accelerators);
    let kind = deployment.engine.kind;
    PlacementCandidate {
        region: index,
        is_permitted: false,
        has_engine: region.engines.contains(&kind)
            || kind == EngineKind::TensorrtLlm && !accelerators.is_empty(),
        spokes: SpokeState::Unregistered,
        accelerators,
        cost: region.cost,
    }
}

/// Returns the requirement of a deployment with this placement.
pub(super) fn requirement<'a>(deployment: &Deployment, placement: &'a PlacementSpec) -> Requirement<'a> {
    Requirement { placement, min: deployment.scaling.minimum_of_the_week(), max: deployment.scaling.max }
}

/// Returns the regions in which a deployment runs by the last table. One without a list runs wherever it is served.
fn current_regions(before: Option<&Deployment>, fleet: &Fleet<'_>) -> RegionSet {
    let Some(before) = before else { return RegionSet::EMPTY };
    if !before.regions.is_empty() {
        return before.placement(fleet.catalogue);
    }
    let serves = |registration: &&Registration| registration.deployments.contains(&before.name);
    let serving = fleet.regions.iter().filter(|(_, registration)| registration.as_ref().is_some_and(serves));
    serving.filter_map(|(region, _)| fleet.catalogue.index_of(region)).collect()
}

fn spoke_state(name: &DeploymentName, region: &RegionId, fleet: &Fleet<'_>) -> SpokeState {
    let registration = match fleet.regions.get(region) {
        None => return SpokeState::Unregistered,
        Some(None) => return SpokeState::Lapsed,
        Some(Some(registration)) => registration,
    };
    if registration.draining || fleet.drains.contains(region) {
        SpokeState::Draining
    } else if registration.scales || registration.deployments.contains(name) {
        SpokeState::Available
    } else {
        SpokeState::StartsNone
    }
}

/// Returns whether a region has its minimum number of replicas ready; where nothing starts replicas, all that it has. A
/// region of a deployment that scales to zero is ready once it would start a replica.
fn is_ready(deployment: &Deployment, registration: &Registration) -> bool {
    if !registration.deployments.contains(&deployment.name) {
        return false;
    }
    let min = deployment.scaling.min;
    let counts = registration.capacity.pools.iter().filter_map(|pool| pool.deployments.get(&deployment.name));
    // A spoke that reports no capacity has at least one ready replica.
    counts.max_by_key(|count| count.ready).is_none_or(|count| count.ready >= min.min(count.max))
}

#[cfg(test)]
mod tests;
