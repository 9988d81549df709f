//! Decisions of the hub and the spokes. The messages between them are in `scheduler_api`. The crate is pure:
//! sockets, files and the clock belong to the shells around it.
//!
//! In reading order:
//!
//! - [`spoke`]: one region. Replica selection, held requests, and the region's reports.
//! - [`scale`]: autoscaler of a deployment in a region.
//! - [`registry`]: registered spokes, and the routes of regions whose leases have ended.
//! - [`rollout`]: desired deployments and tenants: parsing, diff, and rollout in two steps where a residency widens.
//! - [`revisions`]: model revision that each deployment is served with, and the switch to a new one.
//! - [`placement`]: regions of deployments that state a requirement in place of a list of regions.
//! - [`publish`]: next route table, if it differs from the last one.
//! - [`plan`]: traffic plan: shares of each class by region, and minimum numbers of replicas against the loss of a
//!   region.
//! - [`shares`]: shares of gateways in the rate limits of tenants.
//! - [`hub`]: state machine of the hub: events in, commands out.
//! - [`hubs`]: list of hub URLs with failover; [`table_watch`]: long poll of the route table; [`table_history`]: changes
//!   between the last tables.
//! - [`bound`]: limits on published generations.
//! - [`pki`]: built-in certificate authority: join tokens, renewal, revocation, rotation.
//! - [`operators`]: operators with tokens of an identity provider.
//! - [`policy_age`]: maximum age of residency policies without a reachable hub.
//! - [`jobs`]: configuration of the queue of durable jobs of a spoke.
//! - [`invariants`]: named invariants, as functions that the code and its tests share.

pub mod bound;
#[cfg(test)]
mod fixtures;
pub mod hub;
pub mod hubs;
pub mod invariants;
pub mod jobs;
pub mod operators;
pub mod pki;
pub mod placement;
pub mod plan;
pub mod policy_age;
pub mod publish;
pub mod receipts;
pub mod registry;
pub mod revisions;
pub mod rollout;
pub mod scale;
pub mod shares;
pub mod spoke;
pub mod table_history;
pub mod table_watch;

/// Returns an arbitrary instant for tests.
#[cfg(test)]
#[expect(
    clippy::disallowed_methods,
    reason = "an Instant has no constant constructor, and no test depends on its value"
)]
fn some_instant() -> std::time::Instant {
    std::time::Instant::now()
}
