//! Domain model that all components share: regions, residency policies, latency estimates, region selection.
//!
//! In reading order:
//!
//! - [`id`], [`geography`], [`jurisdiction`]: value types. A region has a name, coordinates, and jurisdictions that
//!   contain it.
//! - [`accelerator`]: accelerators that a region offers, with their number and price.
//! - [`address`]: host and port of an endpoint; [`network`]: IP network of trusted peers.
//! - [`catalogue`]: the known regions, read from `configs/regions.toml`, validated, sorted and immutable. Each region
//!   has an ordinal in it, and a [`RegionSet`] is a bit set of a few machine words.
//! - [`residency`]: residency policies. A policy names areas and permits a set of regions; sets are only intersected.
//! - [`latency`] (over [`ewma`]): round-trip estimates, from the great-circle distance until measurements replace them.
//! - [`deployment`] (over [`engine`]), [`route`]: deployments, requirements of their placement, and the regions that serve them; [`tenant`]: rules of the customers.
//! - [`identity`]: the exact model that a replica runs, and the one that a deployment is served with.
//! - [`weights`]: traffic shares that the hub assigns to regions, and the random draw of one region by them.
//! - [`colour`]: colour of a region in reports and plots.
//! - [`spiffe`]: names of processes and operators in their certificates.
//! - [`health`]: health of a region as observed by a gateway; [`invariants`]: requirements of a routing decision.
//!
//! Everything here is pure: no IO, no clock, no runtime. Time and measurements are arguments, so that a test
//! and the gateway run the same code.

pub mod accelerator;
pub mod address;
pub mod catalogue;
pub mod colour;
pub mod deployment;
pub mod engine;
pub mod ewma;
pub mod geography;
pub mod health;
pub mod id;
pub mod identity;
pub mod invariants;
pub mod jurisdiction;
pub mod latency;
pub mod network;
pub mod priority;
pub mod region_list;
pub mod residency;
pub mod route;
pub mod set;
pub mod spiffe;
pub mod tenant;
pub mod weights;
mod written;

pub use accelerator::{Accelerators, Offering};
pub use address::{Host, HostName, HostPort};
pub use catalogue::{Catalogue, Region};
pub use configuration::{Problem, did_you_mean, duration};
pub use deployment::{
    Deployment, MAX_TENSOR_PARALLEL, PlacementSpec, Scaling, parse_deployments, write_deployments,
};
pub use engine::{EngineKind, EngineSpec, Precision, Task};
pub use geography::GeoPoint;
pub use health::Health;
pub use id::{AcceleratorType, DeploymentName, InstanceName, RegionId, TenantId};
pub use identity::{
    ModelIdentity, ModelMatch, ModelRevision, ModelSpec, NextRevision, ReportedModel, ServedRevision,
};
pub use jurisdiction::Jurisdiction;
pub use latency::LatencyModel;
pub use network::IpNetwork;
pub use priority::Priority;
pub use region_list::parse_region_list;
pub use residency::{Area, ResidencyPolicy};
pub use route::{Generation, RegionRoute, RouteTable, Tenants, Widening};
pub use set::{RegionIndex, RegionSet};
pub use tenant::{KeyDigest, LimitShare, PerLimit, TenantRules, parse_tenants, write_tenants};
pub use weights::Share;
pub use written::Unwritable;

/// Returns an arbitrary instant as the time origin of a test.
#[cfg(test)]
#[expect(
    clippy::disallowed_methods,
    reason = "the standard library offers no other constructor, and no test depends on the value"
)]
fn some_instant() -> std::time::Instant {
    std::time::Instant::now()
}
