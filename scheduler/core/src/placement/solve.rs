//! Cheapest set of regions that survives the loss of its largest one.
//!
//! The regions are taken in ascending order of capacity. If a region is the largest of a set, the others precede it, and
//! they are what is left after its loss. So the cheapest set with that largest region is the region and the cheapest set of
//! its predecessors with `min_regions - 1` regions and the required capacity, and one pass over the regions finds the
//! cheapest set of all:
//!
//! ```text
//!  cheapest set of the predecessors, by number of regions (up to min_regions - 1) and capacity (up to min_replicas)
//!
//!                 capacity 0    1    2  …  min_replicas
//!  0 regions           ∅    -    -       -
//!  1 region            …                                    add each region to each set: the usual
//!  min_regions - 1     …                 ■ complete         knapsack, with counts that saturate
//! ```
//!
//! Sets are compared completely: by cost, size, new regions and names. Adding the same region to two sets keeps their
//! order, so the best of each cell suffices, ties included.

use std::cmp::Ordering;

use super::PlacementCost;
use regions::{RegionIndex, RegionSet};

/// Region with the cost that counts for the choice.
#[derive(Clone, Copy, Debug)]
pub(super) struct Priced {
    pub(super) region: RegionIndex,
    /// Replicas that it can hold, at least 1.
    pub(super) capacity: u32,
    pub(super) cost: PlacementCost,
    /// Whether the deployment runs there now.
    pub(super) is_current: bool,
}

/// Set of regions in the order of preference: less is better.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Scored {
    cost: PlacementCost,
    size: u32,
    new: u32,
    names: Names,
}

/// Regions, ordered by the first one in which two sets differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Names(RegionSet);

impl Ord for Names {
    fn cmp(&self, other: &Names) -> Ordering {
        let (ours, theirs) = (self.0.minus(other.0).iter().next(), other.0.minus(self.0).iter().next());
        match (ours, theirs) {
            (Some(ours), Some(theirs)) => ours.cmp(&theirs),
            (Some(_), None) => Ordering::Less,
            (None, Some(_)) => Ordering::Greater,
            (None, None) => Ordering::Equal,
        }
    }
}

impl PartialOrd for Names {
    fn partial_cmp(&self, other: &Names) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Scored {
    const EMPTY: Scored = Scored {
        cost: PlacementCost { unpriced: 0, millionths: 0 },
        size: 0,
        new: 0,
        names: Names(RegionSet::EMPTY),
    };

    fn with(self, region: &Priced) -> Scored {
        let Scored { cost, size, new, names: Names(mut regions) } = self;
        regions.insert(region.region);
        Scored {
            cost: cost.plus(region.cost),
            size: size + 1,
            new: new + u32::from(!region.is_current),
            names: Names(regions),
        }
    }
}

/// Returns the cheapest set with at least `min_regions` regions which, without its largest one, can hold `min_replicas`;
/// `None` if there is none.
pub(super) fn cheapest(mut regions: Vec<Priced>, min_regions: u32, min_replicas: u32) -> Option<RegionSet> {
    regions.sort_by_key(|region| (region.capacity, region.region));
    let others = min_regions.saturating_sub(1) as usize;
    let width = min_replicas as usize + 1;
    let complete = others * width + width - 1;
    // One cell for each number of regions and capacity, as in the picture.
    let mut cells: Vec<Option<Scored>> = vec![None; complete + 1];
    cells[0] = Some(Scored::EMPTY);
    let mut best: Option<Scored> = None;
    for region in &regions {
        if let Some(rest) = cells[complete] {
            keep_less(&mut best, rest.with(region));
        }
        // In descending order no cell is read after the region was added to it, so no set has it twice. A complete set is
        // not extended: that costs at least as much, and it is larger.
        for cell in (0..complete).rev() {
            let Some(set) = cells[cell] else { continue };
            let (count, capacity) = (cell / width, cell % width);
            let count = (count + 1).min(others);
            let capacity = (capacity + region.capacity as usize).min(width - 1);
            keep_less(&mut cells[count * width + capacity], set.with(region));
        }
    }
    best.map(|Scored { names: Names(regions), .. }| regions)
}

fn keep_less(known: &mut Option<Scored>, other: Scored) {
    if known.is_none_or(|known| other < known) {
        *known = Some(other);
    }
}
