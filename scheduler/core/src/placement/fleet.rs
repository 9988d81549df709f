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

use std::collections::{BTreeMap, BTreeSet};

use super::{
    PlacementCandidate, PlacementDecision, PlacementVerdict, Requirement, SpokeState, choose, kept, stay,
};
use crate::registry::RegisteredSpoke;
use regions::{
    Accelerators, Catalogue, Deployment, DeploymentName, EngineKind, PlacementSpec, Region, RegionId,
    RegionIndex, RegionSet,
};
use scheduler_api::registration::Registration;

/// State of the fleet that placements depend on.
#[derive(Clone, Debug)]
pub struct Fleet<'a> {
    /// Facts of the regions.
    pub catalogue: &'a Catalogue,
    /// Regions with a route, and the spoke that reports for each of them; `None` while its spokes have lapsed.
    pub regions: BTreeMap<&'a RegionId, Option<&'a Registration>>,
    /// Last registration of regions whose spokes have lapsed, as far as this hub knows them.
    pub lapsed: BTreeMap<&'a RegionId, &'a Registration>,
    /// Regions that an operator drains.
    pub drains: &'a BTreeSet<RegionId>,
    /// So many leases ended at once that the store is suspected: current placements stay.
    pub in_doubt: bool,
}

impl<'a> Fleet<'a> {
    /// Returns the state of a fleet with these routes, the spokes that report for their regions, those that did so last for regions
    /// whose spokes have lapsed, and drains.
    pub fn new(
        catalogue: &'a Catalogue,
        routed: impl IntoIterator<Item = &'a RegionId>,
        spokes: impl IntoIterator<Item = &'a RegisteredSpoke>,
        lapsed: impl IntoIterator<Item = &'a RegisteredSpoke>,
        drains: &'a BTreeSet<RegionId>,
        in_doubt: bool,
    ) -> Fleet<'a> {
        let registration = |spoke: &'a RegisteredSpoke| (&spoke.registration.region, &spoke.registration);
        let mut regions: BTreeMap<_, _> = routed.into_iter().map(|region| (region, None)).collect();
        let registered = spokes.into_iter().map(registration);
        regions.extend(registered.map(|(region, registration)| (region, Some(registration))));
        let lapsed = lapsed.into_iter().map(registration).collect();
        Fleet { catalogue, regions, lapsed, drains, in_doubt }
    }

    /// Returns what a region has registered; while its spokes have lapsed, what they registered last.
    pub(super) fn registration(&self, region: &RegionId) -> Option<&'a Registration> {
        self.regions.get(region).copied().flatten().or_else(|| self.lapsed.get(region).copied())
    }

    /// Returns whether the spokes of a region have lapsed, and it is not known what they had registered.
    fn is_unknown(&self, region: &RegionId) -> bool {
        matches!(self.regions.get(region), Some(None)) && !self.lapsed.contains_key(region)
    }

    /// Returns those of these regions that are in the catalogue.
    pub(super) fn indices<'b>(&self, regions: impl IntoIterator<Item = &'b RegionId>) -> RegionSet {
        regions.into_iter().filter_map(|region| self.catalogue.index_of(region)).collect()
    }
}

/// Regions of one deployment in the next table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct StagedPlacement {
    pub(super) decision: PlacementDecision,
    /// Regions that would be chosen if the dwell time did not keep the deployment where it is.
    pub(super) later: RegionSet,
    /// The current regions stay because it is not known what one of them had registered.
    pub(super) is_held: bool,
}

/// Returns the decision for a deployment that runs in `current`. It stays in the regions `dwells_in`, if there are any and they are
/// a feasible set.
pub(super) fn decide(
    deployment: &Deployment,
    placement: &PlacementSpec,
    current: RegionSet,
    dwells_in: Option<RegionSet>,
    fleet: &Fleet<'_>,
) -> StagedPlacement {
    let permitted = deployment.residency.permitted(fleet.catalogue);
    let registered = fleet.indices(fleet.regions.keys().copied());
    let candidates = registered.union(current).iter().map(|index| {
        let region = fleet.catalogue.region(index);
        let spoke = fleet.registration(&region.id);
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
    let candidates: Vec<_> = candidates.collect();
    let requirement = requirement(deployment, placement);
    let free = choose(&candidates, &requirement, current);
    let stays = kept(&candidates, current);
    let is_unknown = |index: RegionIndex| fleet.is_unknown(&fleet.catalogue.region(index).id);
    // A region whose accelerators and prices are unknown may be the one that a feasible set lacks.
    let is_rejected = |index| free.infeasible.is_some() || !free.regions.contains(index);
    if stays.iter().any(|index| is_rejected(index) && is_unknown(index)) {
        let decision = hold(free, stays);
        return StagedPlacement { decision, later: RegionSet::EMPTY, is_held: true };
    }
    let chosen = |decision, later| StagedPlacement { decision, later, is_held: false };
    if free.infeasible.is_some() {
        return chosen(free, RegionSet::EMPTY);
    }
    if let Some(regions) = dwells_in.filter(|regions| *regions != free.regions)
        && let Some(decision) = stay(&candidates, &requirement, current, regions)
    {
        return chosen(decision, free.regions);
    }
    chosen(free, RegionSet::EMPTY)
}

/// Returns the decision to keep the current regions `stays`, although others would be chosen, or no set would be feasible.
fn hold(free: PlacementDecision, stays: RegionSet) -> PlacementDecision {
    let verdicts = free.verdicts.into_iter().map(|(index, verdict)| {
        let verdict = match verdict {
            _ if stays.contains(index) => PlacementVerdict::Kept,
            PlacementVerdict::Chosen(eligible) => PlacementVerdict::NotNeeded(eligible),
            other => other,
        };
        (index, verdict)
    });
    PlacementDecision { regions: stays, cost: None, infeasible: None, verdicts: verdicts.collect() }
}

/// Returns the current regions that are no longer chosen, and stay until each chosen one is ready.
pub(super) fn leaving(
    deployment: &Deployment,
    chosen: RegionSet,
    current: RegionSet,
    fleet: &Fleet<'_>,
) -> RegionSet {
    let others = current.minus(chosen);
    let is_ready = |index: RegionIndex| {
        let registration = fleet.regions.get(&fleet.catalogue.region(index).id).copied().flatten();
        registration.is_some_and(|registration| is_ready(deployment, registration))
    };
    if others.is_empty() || chosen.iter().all(is_ready) {
        return RegionSet::EMPTY;
    }
    let permitted = deployment.residency.permitted(fleet.catalogue);
    others.intersect(permitted).intersect(fleet.indices(fleet.regions.keys().copied()))
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
pub(super) fn current_regions(before: Option<&Deployment>, fleet: &Fleet<'_>) -> RegionSet {
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
