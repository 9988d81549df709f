//! Placements of all deployments, kept from table to table: a decision is repeated only when its input has changed.
//!
//! The hub computes a table after each change of a registration, several times a second. A choice takes up to milliseconds, and
//! there may be ten thousand deployments. So each decision is kept with its input: the deployment, its current regions, and the
//! version of the facts of the fleet. The deployments with their regions are kept too, and only changed ones are copied.
//!
//! The decisions of one table have a budget of work, because the hub keeps its lease alive between two tables: ten thousand decisions
//! at the limit of a requirement take 20 s, four times the lease. Those beyond the budget keep the last decision, and follow with the
//! next table, which the hub computes at once.
//!
//! The time of the last move is kept for the dwell time. A new leader does not know it, and permits one move.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::Infeasible;
use super::facts::FleetFacts;
use super::fleet::{Fleet, current_regions, decide, leaving};
use regions::{Catalogue, Deployment, DeploymentName, PlacementSpec, RegionId, RegionSet, RouteTable};
use scheduler_api::placements::{DecidedPlacement, DecidedPlacements};

type Deployments = BTreeMap<DeploymentName, Deployment>;

/// Time after a move during which a deployment moves only out of regions that can no longer run it. During a move it runs in
/// old and new regions, some minutes until the model is loaded. Others are chosen if they save more than 10 %, which within an
/// hour pays for six minutes of twice the cost.
pub const MIN_DWELL: Duration = Duration::from_secs(3600);

/// Maximum work of the decisions in one table, in cells ([`work`]). A cell takes 4 to 8 ns (2026-11, 64 regions: 4 µs for two regions
/// and 8 replicas, 2 ms for 16 and 256), so these take about 30 ms, a small part of the lease of a leader. The largest decision, among
/// 512 regions with `max_cost`, takes as much.
const WORK_MAX: u64 = 4_300_000;

/// Cells that take as long as the filter and the verdict of one region.
const CELLS_PER_CANDIDATE: u64 = 16;

/// Returns the work of a decision among these regions, in cells of the table of [`super::solve`] that are visited.
fn work(placement: &PlacementSpec, regions: usize) -> u64 {
    let PlacementSpec { min_regions, min_replicas, max_cost, .. } = placement;
    // A limit of the cost may take a second pass, without hysteresis.
    let passes = if max_cost.is_some() { 2 } else { 1 };
    let cells = u64::from(*min_regions).saturating_mul(u64::from(*min_replicas).saturating_add(1));
    let each = cells.saturating_mul(passes).saturating_add(CELLS_PER_CANDIDATE);
    each.saturating_mul(regions.max(1) as u64)
}

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
    /// Number of decisions that wait for the next call, because the budget of the last one was spent.
    pending: usize,
    /// Work of the decisions in the last call.
    work: u64,
}

/// Decision for a deployment, and its input.
#[derive(Debug)]
struct KnownPlacement {
    deployment: Deployment,
    input: PlacementInput,
    /// Number of the decision.
    number: u64,
    regions: RegionSet,
    /// Regions of the last decision that was feasible and based on the registrations of all current regions.
    settled: Option<RegionSet>,
    infeasible: Option<Infeasible>,
    /// Time of the last move.
    moved: Option<Instant>,
    /// End of the dwell time, if it keeps the deployment from a move.
    dwells_until: Option<Instant>,
    /// The dwell time has ended.
    is_due: bool,
}

/// Deployment with a placement, and the input of its decision.
#[derive(Debug)]
struct PlacementTask<'a> {
    deployment: &'a Deployment,
    placement: &'a PlacementSpec,
    input: PlacementInput,
    /// The decision waits for the next call.
    is_pending: bool,
}

/// Turn of a decision whose input has changed. Field order is the order: new and changed deployments first, then the one whose last
/// decision is the oldest, so that each has its turn however often the facts of the fleet change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Turn {
    is_unchanged: bool,
    /// Number of the last decision; 0 without one.
    last: u64,
    /// Position by name.
    index: usize,
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

impl KnownPlacement {
    /// Returns whether the decision holds for this input.
    fn holds(&self, deployment: &Deployment, input: &PlacementInput) -> bool {
        self.input == *input && !self.is_due && self.deployment == *deployment
    }

    /// Returns the decision for a deployment; `before` is the last one.
    fn decide(
        task: &PlacementTask<'_>,
        before: Option<&KnownPlacement>,
        number: u64,
        (fleet, now): (&Fleet<'_>, Instant),
    ) -> KnownPlacement {
        let PlacementTask { deployment, placement, input, is_pending: _ } = *task;
        let unchanged = before.filter(|before| before.deployment == *deployment);
        let (settled, moved) = before.map_or((None, None), |before| (before.settled, before.moved));
        let dwell = settled.zip(moved).map(|(regions, moved)| (regions, moved + MIN_DWELL));
        let dwell = dwell.filter(|(_, until)| unchanged.is_some() && now < *until);
        let staged = decide(deployment, placement, input.current, dwell.map(|(regions, _)| regions), fleet);
        let regions = staged.decision.regions;
        // Current regions that stay for want of a feasible set, or of what a region had registered, are not a move, and the
        // deployment need not dwell in them.
        let is_settled = staged.decision.infeasible.is_none() && !staged.is_held;
        let last = settled.unwrap_or(input.current);
        let has_moved = is_settled && !last.is_empty() && !regions.is_subset(&last);
        KnownPlacement {
            deployment: deployment.clone(),
            input,
            number,
            regions,
            settled: if is_settled { Some(regions) } else { settled },
            infeasible: staged.decision.infeasible,
            moved: if has_moved { Some(now) } else { moved },
            dwells_until: dwell.filter(|_| !staged.later.is_empty()).map(|(_, until)| until),
            is_due: false,
        }
    }
}

impl Placements {
    /// Returns the deployments of the table that follows `last`, with their regions, without those for which no region is chosen
    /// yet. Decisions beyond [`WORK_MAX`] follow in the next calls ([`Placements::has_pending`]).
    pub fn stage<'a>(
        &'a mut self,
        desired: &'a Deployments,
        last: &RouteTable,
        fleet: &Fleet<'_>,
        now: Instant,
    ) -> &'a Deployments {
        self.infeasible.clear();
        (self.next_due, self.pending, self.work) = (None, 0, 0);
        let names_before = self.known.len();
        self.known.retain(|name, _| desired.get(name).is_some_and(|known| known.placement.is_some()));
        self.revision += u64::from(self.known.len() < names_before);
        if desired.values().all(|deployment| deployment.placement.is_none()) {
            self.placed.clear();
            return desired;
        }
        self.facts.update(fleet);
        self.placed.retain(|name, _| desired.contains_key(name));
        let mut tasks = Vec::new();
        for (name, deployment) in desired {
            match &deployment.placement {
                Some(placement) => {
                    tasks.extend(self.task(deployment, placement, last.deployments.get(name), fleet));
                }
                None if self.placed.get(name) == Some(deployment) => {}
                None => drop(self.placed.insert(name.clone(), deployment.clone())),
            }
        }
        self.decide_within_budget(&mut tasks, fleet, now);
        tasks.iter().for_each(|task| self.place(task, fleet));
        &self.placed
    }

    /// Returns the input of the decision on a deployment whose last published state is `published`. While the store is suspected, a
    /// published deployment stays as it is, without a decision.
    fn task<'a>(
        &mut self,
        deployment: &'a Deployment,
        placement: &'a PlacementSpec,
        published: Option<&Deployment>,
        fleet: &Fleet<'_>,
    ) -> Option<PlacementTask<'a>> {
        let name = &deployment.name;
        if let Some(published) = published.filter(|_| fleet.in_doubt) {
            // The last constraint: that of a fleet in which most regions have lapsed would be an error of the store.
            let constraint = self.known.get(name).and_then(|before| before.infeasible.clone());
            self.infeasible.extend(constraint.map(|constraint| (name.clone(), constraint)));
            place(&mut self.placed, deployment, published.regions.iter());
            return None;
        }
        let (serving, version) = (self.facts.serving(name, fleet), self.facts.version());
        let input = PlacementInput { current: current_regions(published, fleet), serving, version };
        Some(PlacementTask { deployment, placement, input, is_pending: false })
    }

    /// Repeats the decisions whose input has changed, in their order, until the budget is spent; the others stay pending.
    fn decide_within_budget(&mut self, tasks: &mut [PlacementTask<'_>], fleet: &Fleet<'_>, now: Instant) {
        let turn = |(index, task): (usize, &PlacementTask<'_>)| {
            let before = self.known.get(&task.deployment.name);
            if before.is_some_and(|before| before.holds(task.deployment, &task.input)) {
                return None;
            }
            let is_unchanged = before.is_some_and(|before| before.deployment == *task.deployment);
            Some(Turn { is_unchanged, last: before.map_or(0, |before| before.number), index })
        };
        let mut turns: Vec<Turn> = tasks.iter().enumerate().filter_map(turn).collect();
        turns.sort_unstable();
        for Turn { index, .. } in turns {
            let Some(task) = tasks.get_mut(index) else { continue };
            let work = work(task.placement, fleet.regions.len());
            // The first decision is always made, so that none waits for ever.
            if self.pending > 0 || (self.work > 0 && self.work.saturating_add(work) > WORK_MAX) {
                task.is_pending = true;
                self.pending += 1;
                continue;
            }
            self.work = self.work.saturating_add(work);
            self.decide(task, fleet, now);
        }
    }

    fn decide(&mut self, task: &PlacementTask<'_>, fleet: &Fleet<'_>, now: Instant) {
        let name = &task.deployment.name;
        let before = self.known.get(name);
        self.decisions += 1;
        let next = KnownPlacement::decide(task, before, self.decisions, (fleet, now));
        let is_same = |before: &KnownPlacement| {
            (before.regions, &before.infeasible) == (next.regions, &next.infeasible)
                && before.deployment == next.deployment
        };
        self.revision += u64::from(!before.is_some_and(is_same));
        self.known.insert(name.clone(), next);
    }

    /// Places a deployment by its decision; while that is pending, in the regions of the last one, or in those where it runs, as far
    /// as its residency permits them.
    fn place(&mut self, task: &PlacementTask<'_>, fleet: &Fleet<'_>) {
        let PlacementTask { deployment, input: PlacementInput { current, .. }, is_pending, .. } = task;
        let name = &deployment.name;
        let known = self.known.get(name);
        let mut chosen = known.map_or(*current, |known| known.regions);
        if *is_pending {
            chosen = chosen.intersect(deployment.residency.permitted(fleet.catalogue));
        }
        let of_this_version = known.filter(|known| !is_pending || known.deployment == **deployment);
        let constraint = of_this_version.and_then(|known| known.infeasible.clone());
        self.infeasible.extend(constraint.map(|constraint| (name.clone(), constraint)));
        let dwells_until = known.filter(|known| !known.is_due).and_then(|known| known.dwells_until);
        self.next_due = self.next_due.into_iter().chain(dwells_until).min();
        let regions = chosen.union(leaving(deployment, chosen, *current, fleet));
        if regions.is_empty() {
            self.placed.remove(name);
            return;
        }
        let regions = regions.iter().map(|region| &fleet.catalogue.region(region).id);
        place(&mut self.placed, deployment, regions);
    }

    /// Returns whether decisions wait for the next call of [`Placements::stage`], because the last one has spent its budget.
    pub fn has_pending(&self) -> bool {
        self.pending > 0
    }

    /// Records that the desired deployments have another revision in the store, so that the decisions are recorded for it.
    pub fn deployments_changed(&mut self) {
        self.revision += u64::from(self.revision > 0);
    }

    /// Returns the deployments for which no set of regions is feasible, with the constraint.
    pub fn infeasible(&self) -> &BTreeMap<DeploymentName, Infeasible> {
        &self.infeasible
    }

    /// Returns a number that is higher after each change of a decision; 0 without a decision.
    pub fn revision(&self) -> u64 {
        self.revision
    }

    /// Returns the decisions on the current versions of the desired deployments, by name.
    pub fn decided(&self, desired: &Deployments, catalogue: &Catalogue) -> DecidedPlacements {
        let current = self.known.iter().filter(|(name, known)| desired.get(*name) == Some(&known.deployment));
        let each = current.map(|(name, known)| {
            let regions = known.regions.iter().map(|region| catalogue.region(region).id.clone()).collect();
            let infeasible = known.infeasible.as_ref().map(|why| format!("{}: {why}", why.key()));
            (name.clone(), DecidedPlacement { regions, infeasible })
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

    /// Returns the work of the decisions in the last call of [`Placements::stage`].
    #[cfg(test)]
    pub(crate) fn work(&self) -> u64 {
        self.work
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

#[cfg(test)]
mod tests;
