//! Where traffic should go: how much of what each gateway receives for each class goes to which region.
//!
//! Left to themselves gateways send everything to the nearest region, and what is too much goes elsewhere by credits, beat
//! by beat. That answers a surge within a second and knows nothing of tomorrow: that two gateways share one region, that
//! a class which may go nowhere else needs the room that another takes there. The plan knows, because it looks at
//! everything at once, and is slow for the same reason: once a second, from numbers that are seconds old. So it says in
//! what *proportion* requests go, and everything quicker stands above it: policy, health, credits.
//!
//! ```text
//! capacity, by region ─┐    most constrained classes first,      nearest first      ┌▶ rows: shares by source and class
//! demand, by class ────┼──▶ each source's demand into what ───▶ by steps from the ──┤
//! previous plan ───────┘    is left of each pool                previous plan       └▶ floors: replicas against a loss
//! ```
//!
//! - **Capacity** is what a pool of replicas computes at its service objective: [`OBJECTIVE_PERCENT`] of its speed.
//! - A **class** is a deployment and the residency policy of a request, and so the regions that may see it. Those with the fewest are
//!   served first, since the others can go elsewhere.
//! - A **source** is a gateway and the place that its requests come from: its own, or that of clients who have said
//!   theirs. Among the sources of equally constrained classes whoever is nearest to a region has it first.
//! - What fits nowhere is divided over the class's regions by what they can do: each is too full, and none drowns. There
//!   credits and shedding take over.
//! - **Incumbency**: less than [`WORTH_PERMILLE`] is not moved while what there is fits; more is moved in steps of
//!   [`STEP_PERMILLE`]. Only what a region that is *gone* had moves at once. A drain therefore takes ten plans.
//!
//! Pure and in whole numbers: the same problem and the same previous plan give the same plan, and a problem that stays the
//! same comes to rest. The obvious other way, a linear program, finds a little more and jumps between equally good answers.

pub mod capacity;
mod floors;
mod solve;

use std::collections::BTreeMap;
use std::time::Duration;

pub use floors::{Floor, Floors};
use regions::{DeploymentName, RegionIndex, RegionSet, ResidencyPolicy, Share};

/// Of its measured speed a pool is given so much at most. At three quarters a queue is about three requests long, where
/// a lookup still answers in its time; at nine tenths it is nine.
pub const OBJECTIVE_PERCENT: u64 = 75;

/// As much of a row as is moved from one plan to the next: from all to nothing in ten plans. A plan that is wrong is seen
/// in reports twice before the second step.
pub const STEP_PERMILLE: u16 = 100;

/// Less than this is not moved while what there is fits: demand that is measured over seconds is no more exact.
pub const WORTH_PERMILLE: u16 = 20;

/// Where requests come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Source {
    /// The gateway that receives them, by its place.
    pub gateway: RegionIndex,
    /// Where they come from: the gateway's place, or the region that is nearest to clients who have said where they are.
    pub origin: RegionIndex,
}

/// Requests that may go to the same regions for the same thing.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Class {
    /// What they ask for.
    pub deployment: DeploymentName,
    /// The residency policy they travel under, as gateways write it.
    pub residency: ResidencyPolicy,
}

/// What is asked of one class.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Demand {
    /// The regions that may see it.
    pub allowed: RegionSet,
    /// The most that was asked for lately, over all sources, in tokens per second: what must be served when a region is lost.
    pub peak: u64,
    /// What is asked for now, in tokens per second.
    pub by_source: BTreeMap<Source, u64>,
}

/// Replicas that work for the same deployments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pool {
    /// Where they are.
    pub region: RegionIndex,
    /// What they can be given, in tokens per second.
    pub tokens_per_second: u64,
}

/// One deployment in one region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The pool that serves it there, by its number in [`Problem::pools`].
    pub pool: usize,
    /// Replicas that take its work.
    pub ready: u32,
    /// As many as there may be; what is ready, where nobody can start one.
    pub max: u32,
    /// What one of them can be given, in tokens per second.
    pub each: u64,
}

/// Everything that a plan is made from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Problem {
    /// The round trip from an origin to a region. One that is not named is further than all that are.
    pub away: BTreeMap<(RegionIndex, RegionIndex), Duration>,
    /// Regions that are to be emptied.
    pub draining: RegionSet,
    /// What a replica costs an hour, in millionths of whatever the operator counts in; nothing where not named.
    pub cost: BTreeMap<RegionIndex, u64>,
    /// All pools.
    pub pools: Vec<Pool>,
    /// Where each deployment runs or could.
    pub places: BTreeMap<DeploymentName, BTreeMap<RegionIndex, Place>>,
    /// What is asked for.
    pub demand: BTreeMap<Class, Demand>,
}

/// How the requests of one class from one source are divided: a thousand thousandths, regions in order.
pub type Row = Vec<Share>;

/// The answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// By class and source. A class that no region can serve now has none: whoever receives it asks the nearest.
    pub rows: BTreeMap<Class, BTreeMap<Source, Row>>,
    /// How many replicas there should be at least.
    pub floors: Floors,
}

/// The plan that follows `previous`.
pub fn plan(problem: &Problem, previous: &Plan) -> Plan {
    let rows = solve::rows(problem, &previous.rows);
    let floors = floors::floors(problem, &rows);
    Plan { rows, floors }
}

#[cfg(test)]
mod properties;
#[cfg(test)]
mod tests;
