//! Placements of all deployments, kept from table to table: a decision is repeated only when its input has changed.
//!
//! The hub computes a table after each change of a registration, several times a second. A choice takes up to milliseconds, and
//! there may be ten thousand deployments. So each decision is kept with its input: the deployment, its current regions, and the
//! version of the facts of the fleet. The deployments with their regions are kept too, and only changed ones are copied.
//!
//! The time of the last move is kept for the dwell time. A new leader does not know it, and permits one move.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use super::Infeasible;
use super::fleet::{Fleet, current_regions, decide, leaving};
use regions::{
    Accelerators, Deployment, DeploymentName, EngineKind, PlacementSpec, RegionId, RegionIndex, RegionSet,
    RouteTable,
};
use scheduler_api::placements::{DecidedPlacement, DecidedPlacements, deployment_digest};

type Deployments = BTreeMap<DeploymentName, Deployment>;

/// Time after a move during which a deployment moves only out of regions that can no longer run it. During a move it runs in
/// old and new regions, some minutes until the model is loaded. Others are chosen if they save more than 10 %, which within an
/// hour pays for six minutes of twice the cost.
pub const MIN_DWELL: Duration = Duration::from_secs(3600);

/// Placements of all deployments.
#[derive(Debug, Default)]
pub struct Placements {
    /// Desired deployments with the regions that were chosen for them, without those that have none yet.
    placed: Deployments,
    known: BTreeMap<DeploymentName, KnownPlacement>,
    facts: FleetFacts,
    infeasible: BTreeMap<DeploymentName, Infeasible>,
    /// Raised whenever a decision changes.
    revision: u64,
    /// Earliest end of a dwell time that keeps a deployment from a move.
    next_due: Option<Instant>,
    /// Number of decisions that were computed.
    decisions: u64,
}

/// Decision for a deployment, and its input.
#[derive(Debug)]
struct KnownPlacement {
    deployment: Deployment,
    digest: u64,
    input: PlacementInput,
    regions: RegionSet,
    infeasible: Option<Infeasible>,
    /// Time of the last move.
    moved: Option<Instant>,
    /// End of the dwell time, if it keeps the deployment from a move.
    dwells_until: Option<Instant>,
    /// The dwell time has ended.
    is_due: bool,
}

/// Input of a decision, besides the deployment and the time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct PlacementInput {
    current: RegionSet,
    /// Regions that start no replicas and have one of the deployment.
    serving: RegionSet,
    /// Version of the facts of the fleet.
    version: u64,
}

/// Facts of the regions that all decisions depend on.
#[derive(Debug, Default)]
struct FleetFacts {
    version: u64,
    regions: Vec<(RegionIndex, RegionFacts)>,
}

/// Facts of a region with a route.
#[derive(Debug, PartialEq, Eq)]
struct RegionFacts {
    is_registered: bool,
    is_known: bool,
    is_draining: bool,
    scales: bool,
    engines: Option<BTreeSet<EngineKind>>,
    accelerators: Accelerators,
    cost: Option<u64>,
}

impl FleetFacts {
    /// Takes the facts of a fleet, and raises the version if they have changed.
    fn update(&mut self, fleet: &Fleet<'_>) {
        let facts = fleet.regions.iter().filter_map(|(id, registered)| {
            let index = fleet.catalogue.index_of(id)?;
            let region = fleet.catalogue.region(index);
            let last = fleet.registration(id);
            let stated = last.map(|last| &last.accelerators).filter(|stated| !stated.is_empty());
            let facts = RegionFacts {
                is_registered: registered.is_some(),
                is_known: last.is_some(),
                is_draining: fleet.drains.contains(*id) || registered.is_some_and(|it| it.draining),
                scales: registered.is_some_and(|it| it.scales),
                engines: last.and_then(|last| last.engines.clone()),
                accelerators: stated.unwrap_or(&region.accelerators).clone(),
                cost: region.cost,
            };
            Some((index, facts))
        });
        let regions: Vec<_> = facts.collect();
        if regions != self.regions {
            self.regions = regions;
            self.version += 1;
        }
    }

    /// Returns the regions that start no replicas and have one of this deployment.
    fn serving(&self, name: &DeploymentName, fleet: &Fleet<'_>) -> RegionSet {
        let starts_none = self.regions.iter().filter(|(_, facts)| facts.is_registered && !facts.scales);
        let serves = |index: &RegionIndex| {
            let registration = fleet.registration(&fleet.catalogue.region(*index).id);
            registration.is_some_and(|registration| registration.deployments.contains(name))
        };
        starts_none.map(|(index, _)| *index).filter(serves).collect()
    }
}

impl KnownPlacement {
    /// Returns whether the decision holds for this input.
    fn holds(&self, deployment: &Deployment, input: &PlacementInput) -> bool {
        self.input == *input && !self.is_due && self.deployment == *deployment
    }

    /// Returns the decision for a deployment; `before` is the last one.
    fn decide(
        deployment: &Deployment,
        placement: &PlacementSpec,
        before: Option<&KnownPlacement>,
        input: PlacementInput,
        (fleet, now): (&Fleet<'_>, Instant),
    ) -> KnownPlacement {
        let unchanged = before.filter(|before| before.deployment == *deployment);
        let digest = unchanged.map_or_else(|| deployment_digest(deployment), |before| before.digest);
        let moved = before.and_then(|before| before.moved);
        let dwell = unchanged.zip(moved).map(|(before, moved)| (before.regions, moved + MIN_DWELL));
        let dwell = dwell.filter(|(_, until)| now < *until);
        let staged = decide(deployment, placement, input.current, dwell.map(|(regions, _)| regions), fleet);
        let regions = staged.decision.regions;
        let last = before.map_or(input.current, |before| before.regions);
        let has_moved = !last.is_empty() && !regions.is_subset(&last);
        KnownPlacement {
            deployment: deployment.clone(),
            digest,
            input,
            regions,
            infeasible: staged.decision.infeasible,
            moved: if has_moved { Some(now) } else { moved },
            dwells_until: dwell.filter(|_| !staged.later.is_empty()).map(|(_, until)| until),
            is_due: false,
        }
    }
}

impl Placements {
    /// Returns the deployments of the table that follows `last`, with their regions, without those for which no region is chosen
    /// yet.
    pub fn stage<'a>(
        &'a mut self,
        desired: &'a Deployments,
        last: &RouteTable,
        fleet: &Fleet<'_>,
        now: Instant,
    ) -> &'a Deployments {
        self.infeasible.clear();
        self.next_due = None;
        let names_before = self.known.len();
        self.known.retain(|name, _| desired.get(name).is_some_and(|known| known.placement.is_some()));
        self.revision += u64::from(self.known.len() < names_before);
        if desired.values().all(|deployment| deployment.placement.is_none()) {
            self.placed.clear();
            return desired;
        }
        self.facts.update(fleet);
        self.placed.retain(|name, _| desired.contains_key(name));
        for (name, deployment) in desired {
            match &deployment.placement {
                Some(placement) => {
                    let before = last.deployments.get(name);
                    self.stage_one(deployment, placement, before, (fleet, now));
                }
                None if self.placed.get(name) == Some(deployment) => {}
                None => drop(self.placed.insert(name.clone(), deployment.clone())),
            }
        }
        &self.placed
    }

    /// Stages a deployment whose last published state is `published`.
    fn stage_one(
        &mut self,
        deployment: &Deployment,
        placement: &PlacementSpec,
        published: Option<&Deployment>,
        (fleet, now): (&Fleet<'_>, Instant),
    ) {
        let name = &deployment.name;
        let before = self.known.get(name);
        if let Some(published) = published.filter(|_| fleet.in_doubt) {
            // The last constraint: that of a fleet in which most regions have lapsed would be an error of the store.
            let constraint = before.and_then(|before| before.infeasible.clone());
            self.infeasible.extend(constraint.map(|constraint| (name.clone(), constraint)));
            place(&mut self.placed, deployment, published.regions.iter());
            return;
        }
        let current = current_regions(published, fleet);
        let (serving, version) = (self.facts.serving(name, fleet), self.facts.version);
        let input = PlacementInput { current, serving, version };
        if !before.is_some_and(|before| before.holds(deployment, &input)) {
            let next = KnownPlacement::decide(deployment, placement, before, input, (fleet, now));
            let is_same = |before: &KnownPlacement| {
                (before.digest, before.regions, &before.infeasible)
                    == (next.digest, next.regions, &next.infeasible)
            };
            self.revision += u64::from(!before.is_some_and(is_same));
            self.decisions += 1;
            self.known.insert(name.clone(), next);
        }
        let Some(known) = self.known.get(name) else { return };
        self.infeasible.extend(known.infeasible.clone().map(|constraint| (name.clone(), constraint)));
        self.next_due = self.next_due.into_iter().chain(known.dwells_until).min();
        let regions = known.regions.union(leaving(deployment, known.regions, current, fleet));
        if regions.is_empty() {
            self.placed.remove(name);
            return;
        }
        let regions = regions.iter().map(|region| &fleet.catalogue.region(region).id);
        place(&mut self.placed, deployment, regions);
    }

    /// Returns the deployments for which no set of regions is feasible, with the constraint.
    pub fn infeasible(&self) -> &BTreeMap<DeploymentName, Infeasible> {
        &self.infeasible
    }

    /// Returns a number that is higher after each change of a decision; 0 without a decision.
    pub fn revision(&self) -> u64 {
        self.revision
    }

    /// Returns the decisions, by name.
    pub fn decided(&self, catalogue: &regions::Catalogue) -> DecidedPlacements {
        let each = self.known.iter().map(|(name, known)| {
            let regions = known.regions.iter().map(|region| catalogue.region(region).id.clone()).collect();
            let infeasible = known.infeasible.as_ref().map(|why| format!("{}: {why}", why.key()));
            (name.clone(), DecidedPlacement { deployment: known.digest, regions, infeasible })
        });
        each.collect()
    }

    /// Returns the next time at which a dwell time ends that keeps a deployment from a move.
    pub fn next_due(&self) -> Option<Instant> {
        self.next_due
    }

    /// Processes the passage of time. Returns whether a dwell time has ended since the last call.
    pub fn tick(&mut self, now: Instant) -> bool {
        if self.next_due.take_if(|due| *due <= now).is_none() {
            return false;
        }
        for known in self.known.values_mut() {
            known.is_due |= known.dwells_until.is_some_and(|until| until <= now);
        }
        true
    }

    /// Returns the number of decisions that were computed.
    #[cfg(test)]
    pub(crate) fn decisions(&self) -> u64 {
        self.decisions
    }
}

/// Sets the regions of a deployment, as if an operator had listed them. Copies it only if something has changed.
fn place<'a>(
    placed: &mut Deployments,
    deployment: &Deployment,
    regions: impl Iterator<Item = &'a RegionId> + Clone,
) {
    let is_same = |known: &Deployment| {
        let Deployment { name, task, model, engine, residency, regions: _, order, placement: _, scaling } =
            deployment;
        known.placement.is_none()
            && known.regions.iter().eq(regions.clone())
            && (name, task, model, engine) == (&known.name, &known.task, &known.model, &known.engine)
            && (residency, order, scaling) == (&known.residency, &known.order, &known.scaling)
    };
    if !placed.get(&deployment.name).is_some_and(is_same) {
        let regions = regions.cloned().collect();
        let next = Deployment { regions, placement: None, ..deployment.clone() };
        placed.insert(deployment.name.clone(), next);
    }
}
