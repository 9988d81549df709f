//! What the hub and the spokes decide, and what they and the gateways say to each other. Pure: the shells around it own
//! the sockets, the files and the clock.
//!
//! In reading order:
//!
//! - [`spoke`]: a region by itself. Which replica takes a request, and what the region reports.
//! - [`scale`]: how many replicas a deployment should have there.
//! - [`registry`]: the spokes that the hub knows, and for how long it remembers one that fell silent.
//! - [`rollout`]: what an operator wants, checked and compared, and how it comes about without anybody being overtaken.
//! - [`revisions`]: which model revision each deployment is served with, and when another one replaces it.
//! - [`publish`]: from what is registered and what is deployed to the next route table, if it differs from the last.
//! - [`plan`]: what share of each class goes to which region, and how many replicas there should be against a loss.
//! - [`hub`]: the machine around these: events in, commands out.
//! - [`hubs`]: which of several hubs is asked; [`follow`]: for what, and which answer is taken.
//! - [`bound`]: how fast generations rise, and how far a reader lets them.
//! - [`access`]: which callers may use which path of a hub, by which [`token`]; [`lease`]: who may renew a spoke's lease.
//! - [`wire`]: what crosses a process, each message with its version.
//! - [`invariants`]: what must hold of it, as functions that the code and its tests share.

pub mod access;
pub mod bound;
pub mod follow;
pub mod hub;
pub mod hubs;
pub mod invariants;
pub mod lease;
pub mod plan;
pub mod policy_age;
pub mod publish;
pub mod registry;
pub mod revisions;
pub mod rollout;
pub mod scale;
pub mod spoke;
pub mod token;
pub mod wire;

/// Some instant for tests to count from.
#[cfg(test)]
#[expect(
    clippy::disallowed_methods,
    reason = "an Instant cannot be made from nothing, and no test looks at which it is"
)]
fn some_instant() -> std::time::Instant {
    std::time::Instant::now()
}
