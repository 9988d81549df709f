//! What happens at a gateway, one struct for each event. Each owns its log line and its metrics, so that nothing is
//! logged that is not counted, nor the reverse.
//!
//! The line of a request goes to the target `access` at INFO; `MERIDIAN_LOG=info,access=off` leaves it out, and
//! `MERIDIAN_LOG_FORMAT=json` writes it for machines. It names the tenant, which is configuration, and nothing that a
//! client wrote but the request's identifier, which is bounded and printable.

mod arrival;
mod finished;
mod hop;
mod model;
mod request;

pub(crate) use arrival::ArrivalEnded;
pub(crate) use finished::{Finished, Understood, at, began_ms};
pub(crate) use hop::{HopFailed, HopFailures, HopRefused};
pub(crate) use model::{ReplicaMismatch, RevisionChanged};
pub(crate) use request::{RequestEnded, Times};

/// Where access lines go.
pub const ACCESS: &str = "access";

/// For a person to read: milliseconds with three decimals.
fn millis(took: std::time::Duration) -> f64 {
    took.as_micros() as f64 / 1e3
}
