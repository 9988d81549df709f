//! Client of the hub, for gateways, spokes and the CLI.
//!
//! Gateways and spokes follow the same control plane: each request goes to the current hub of a list, each failure to
//! the next hub or into a backoff, and each accepted message to disk before it is used, so that a process starts
//! without a hub. The decisions are in `scheduler_core` (`hubs`: next hub and backoff; `bound`: accepted generations;
//! `table_watch`: timeouts of polls); this crate has the sockets, the files and the clock.
//!
//! In reading order:
//!
//! - [`hub`]: one request, and the connection of a long-running task to the hubs.
//! - `connect`: a connection to a hub, with the identity of the process.
//! - [`snapshot`]: snapshot file of a message, with a checksum and a lock.
//! - [`table`]: long poll of the route table.
//! - [`plan`]: exchange of demand for the traffic plan.
//! - [`shares`]: exchange of the demand of tenants for shares of their rate limits.
//! - [`operator`]: API for operators; [`operator_token`]: their tokens.
//! - [`authority`]: client of the built-in certificate authority; [`identity_folder`]: the folder with the certificate;
//!   [`membership`]: task that keeps the folder current.
//! - [`readiness`]: probe of a replica that a spoke has started.

pub mod authority;
mod connect;
pub mod hub;
pub mod identity_folder;
pub mod membership;
pub mod operator;
pub mod operator_token;
pub mod plan;
pub mod readiness;
pub mod shares;
pub mod snapshot;
pub mod table;

use std::time::{Duration, SystemTime};

/// Returns the wall-clock time since 1970.
pub fn unix_time() -> Duration {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default()
}
