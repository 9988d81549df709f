//! The hub and the agent as processes see them: real HTTP, a real store, real leases. Time is real too, and nothing here
//! waits for a while: leases are made short, and what is waited for is a condition.

#![expect(clippy::unwrap_used, reason = "a test that cannot get what it needs has failed")]

mod access;
mod agent;
mod apply;
mod hub;
mod locks;
mod plan;
mod revisions;
mod tenants;
mod world;
