//! Facts of the regions that all decisions on placements depend on, with a version that is raised by each change.

use std::collections::BTreeSet;

use super::fleet::Fleet;
use regions::{Accelerators, DeploymentName, EngineKind, RegionIndex, RegionSet};

/// Facts of the regions that all decisions depend on.
#[derive(Debug, Default)]
pub(super) struct FleetFacts {
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
    /// Returns the number of changes of the facts.
    pub(super) fn version(&self) -> u64 {
        self.version
    }

    /// Takes the facts of a fleet, and raises the version if they have changed.
    pub(super) fn update(&mut self, fleet: &Fleet<'_>) {
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
    pub(super) fn serving(&self, name: &DeploymentName, fleet: &Fleet<'_>) -> RegionSet {
        let starts_none = self.regions.iter().filter(|(_, facts)| facts.is_registered && !facts.scales);
        let serves = |index: &RegionIndex| {
            let registration = fleet.registration(&fleet.catalogue.region(*index).id);
            registration.is_some_and(|registration| registration.deployments.contains(name))
        };
        starts_none.map(|(index, _)| *index).filter(serves).collect()
    }
}
