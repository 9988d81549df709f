//! Tests of the hub and the agent with real HTTP, a real store, and real leases. Time is real too, but no test waits
//! for a fixed time: leases are short, and every wait is for a condition.

#![expect(clippy::unwrap_used, reason = "a missing prerequisite fails the test")]

mod access;
mod agent;
mod apply;
mod console;
#[path = "../../../resolver/tests/dns_server/mod.rs"]
mod dns_server;
mod failures;
mod hub;
mod keys;
mod locks;
mod operators;
mod pki;
mod plan;
mod rejections;
mod revisions;
mod tenants;
mod usage;
mod world;
