//! Traffic plan: the share of each gateway's requests, by class, that each region receives.
//!
//! Without a plan, gateways send everything to the nearest region, and the overflow to other regions by credits, which
//! are renewed five times a second. Credits react to a surge within a second, but they are local: they cannot know that
//! two gateways share one region, or that a class with a single allowed region needs the capacity that another class
//! takes there. The plan considers all regions and classes together. It is slower for the same reason: it is computed
//! once a second, from numbers that are seconds old. It therefore decides only the *proportions* of traffic; everything
//! faster overrides it: residency policy, health, credits.
//!
//! ```text
//! capacity, by region ─┐   most constrained classes first,     nearest first      ┌▶ rows: shares by source and class
//! demand, by class ────┼─▶ each source's demand into the ────▶ by steps from the ─┤
//! previous plan ───────┘   free capacity of each pool          previous plan      └▶ floors: replicas against a loss
//! ```
//!
//! - **Capacity** of a pool of replicas is what it computes at its target utilization: [`TARGET_UTILIZATION_PERCENT`]
//!   of its measured speed.
//! - A **class** is a deployment and the residency policy of a request, and thereby a set of allowed regions. Classes
//!   with the fewest allowed regions are placed first, because the others have alternatives.
//! - A **source** is a gateway and the origin of its requests: its own location, or the location that clients have
//!   sent. Among the sources of equally constrained classes, the source nearest to a region is placed there first.
//! - A class with an **order** (active-passive) has one region: the first of the order that serves it and is not being drained.
//!   It takes the whole row, at once and beyond its capacity, because another region receives a share of it only if the first
//!   one fails. The next region of the order has floors as large as the first one's.
//! - Demand beyond the total capacity is divided over the class's regions in proportion to their capacity, so that all
//!   are overloaded alike. Credits and load shedding handle the rest.
//! - **Hysteresis**: shifts of less than [`MIN_SHIFT_PERMILLE`] are not made while the current shares fit; larger ones
//!   are made in steps of at most [`MAX_SHIFT_PERMILLE`]. Only the shares of a region that is *gone* move at once. A
//!   drain therefore takes ten plans.
//!
//! The computation is pure and uses integers: the same input and the same previous plan give the same plan, and with a
//! constant input the plans converge. The obvious alternative, a linear program, finds slightly better plans but jumps
//! between equally good solutions.

pub mod capacity;
mod floors;
mod solve;

use std::collections::BTreeMap;
use std::time::Duration;

pub use floors::{Floor, Floors};
use regions::{DeploymentName, RegionIndex, RegionSet, Share};
use scheduler_api::plan::TrafficClass;

/// Share of a pool's measured speed that the plan uses at most. At 75 % the queue is about three requests long, and an
/// interactive request still meets its latency target; at 90 % it is nine requests long.
pub const TARGET_UTILIZATION_PERCENT: u64 = 75;

/// Largest part of a row that moves from one plan to the next: ten plans for a complete move. Reports show the effect
/// of a wrong plan twice before the second step.
pub const MAX_SHIFT_PERMILLE: u16 = 100;

/// Smallest shift that is made while the current shares fit: demand is averaged over seconds and not more exact than
/// this.
pub const MIN_SHIFT_PERMILLE: u16 = 20;

/// Source of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Source {
    /// Gateway that receives them, by its region.
    pub gateway: RegionIndex,
    /// Origin of the requests: the gateway's region, or the region nearest to the location that the clients have sent.
    pub origin: RegionIndex,
}

/// Demand of one class.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClassDemand {
    /// Allowed regions.
    pub allowed: RegionSet,
    /// Order of the deployment's regions; empty if it is routed to the nearest region. Regions outside `allowed` are ignored.
    pub order: Vec<RegionIndex>,
    /// Recent maximum over all sources, in tokens per second: must be served after the loss of a region.
    pub peak: u64,
    /// Current demand, in tokens per second.
    pub by_source: BTreeMap<Source, u64>,
}

/// Replicas that serve the same deployments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CapacityPool {
    /// Region of the replicas.
    pub region: RegionIndex,
    /// Tokens per second that the pool can be given.
    pub tokens_per_second: u64,
}

/// Capacity of one deployment in one region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeploymentCapacity {
    /// Pool that serves the deployment there, as an index into [`PlanInput::pools`].
    pub pool: usize,
    /// Ready replicas.
    pub ready: u32,
    /// Maximum number of replicas; the ready ones where nothing can start replicas.
    pub max: u32,
    /// Tokens per second that one replica can be given.
    pub tokens_per_replica: u64,
}

/// Input of a plan.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PlanInput {
    /// Round-trip time from an origin to a region. A missing pair counts as farther than all others.
    pub rtt: BTreeMap<(RegionIndex, RegionIndex), Duration>,
    /// Regions that are being drained.
    pub draining: RegionSet,
    /// Cost of a replica per hour, in millionths of the operator's currency unit; absent where unknown.
    pub cost: BTreeMap<RegionIndex, u64>,
    /// All pools.
    pub pools: Vec<CapacityPool>,
    /// Regions in which each deployment runs or could run.
    pub deployments: BTreeMap<DeploymentName, BTreeMap<RegionIndex, DeploymentCapacity>>,
    /// Demand by class.
    pub demand: BTreeMap<TrafficClass, ClassDemand>,
}

/// Shares of the requests of one class from one source: 1000 ‰ in total, ordered by region.
pub type Row = Vec<Share>;

/// Traffic plan.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TrafficPlan {
    /// Rows by class and source. A class that no region can serve now has no rows; gateways send it to the nearest
    /// region.
    pub rows: BTreeMap<TrafficClass, BTreeMap<Source, Row>>,
    /// Minimum numbers of replicas.
    pub floors: Floors,
}

/// Returns the plan that follows `previous`.
pub fn plan(input: &PlanInput, previous: &TrafficPlan) -> TrafficPlan {
    let rows = solve::rows(input, &previous.rows);
    let floors = floors::floors(input, &rows);
    TrafficPlan { rows, floors }
}

#[cfg(test)]
mod properties;
#[cfg(test)]
mod tests;
