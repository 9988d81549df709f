//! The facts, the residency policy, the distance and the choice that everybody in Meridian shares.
//!
//! In reading order:
//!
//! - [`id`], [`geography`], [`jurisdiction`]: the nouns. A region has a name, a place, and policies that contain it.
//! - [`catalogue`]: the facts, read from `configs/regions.toml`, checked, ordered and from then on immutable. In it a
//!   region has an ordinal, and a [`RegionSet`] is a few machine words.
//! - [`residency`]: the residency policy. A policy names areas; what it permits is a set, and sets are only ever intersected.
//! - [`latency`] (over [`ewma`]): the distance. A guess from the globe until measurements replace it.
//! - [`deployment`], [`route`]: what is served, and where it was last known to be served; [`tenant`]: for whom.
//! - [`identity`]: which model a replica runs, exactly, and which one a deployment is served with.
//! - [`weights`]: how the hub divides what may go to several regions, and how one of them is drawn.
//! - [`health`]: health of a region as a gateway observes it; [`invariants`]: what must hold of a routing decision.
//!
//! Everything here is pure: no IO, no clock, no runtime. Time and measurements are arguments, so that a test
//! and the gateway run the same code.

pub mod catalogue;
pub mod deployment;
pub mod document;
pub mod duration;
pub mod ewma;
pub mod geography;
pub mod health;
pub mod id;
pub mod identity;
pub mod invariants;
pub mod jurisdiction;
pub mod latency;
pub mod region_list;
pub mod residency;
pub mod route;
pub mod set;
mod suggest;
pub mod tenant;
pub mod weights;

pub use catalogue::{Catalogue, Region};
pub use deployment::{
    Deployment, EngineKind, EngineSpec, MAX_TENSOR_PARALLEL, Precision, Scaling, Task, parse_deployments,
    write_deployments,
};
pub use document::Problem;
pub use geography::GeoPoint;
pub use health::Health;
pub use id::{DeploymentName, RegionId, TenantId};
pub use identity::{
    Agreement, ModelIdentity, ModelRevision, ModelSpec, NextRevision, ReportedModel, ServedRevision,
};
pub use jurisdiction::Jurisdiction;
pub use latency::LatencyModel;
pub use region_list::parse_region_list;
pub use residency::{Area, ResidencyPolicy};
pub use route::{Generation, RegionRoute, RouteTable, Tenants, Widening};
pub use set::{RegionIndex, RegionSet};
pub use suggest::did_you_mean;
pub use tenant::{KeyDigest, TenantRules, parse_tenants, write_tenants};
pub use weights::Share;

/// Some instant for tests to count from.
#[cfg(test)]
#[expect(
    clippy::disallowed_methods,
    reason = "an Instant cannot be made from nothing, and no test looks at which it is"
)]
fn some_instant() -> std::time::Instant {
    std::time::Instant::now()
}
