//! Events of a gateway, one struct for each. Each struct owns its log line and its metrics, so every logged event is
//! counted and every counted event is logged.
//!
//! The line of a request has the target `access` and level INFO; `MERIDIAN_LOG=info,access=off` omits it, and
//! `MERIDIAN_LOG_FORMAT=json` writes it as JSON. It names the tenant, which is configuration; the only client-supplied
//! value is the request id, which is bounded and printable.

mod arrival;
mod deployment;
mod finished;
mod hop;
mod job;
mod model;
mod peer;
mod region;
mod request;
mod webhook;

pub(crate) use arrival::ArrivalEnded;
pub(crate) use deployment::DeploymentFailureChanged;
pub(crate) use finished::{FinishedRequest, ResolvedRequest, at, began_ms};
pub(crate) use hop::HopFailed;
pub(crate) use job::{
    JobAttemptEnded, JobLogReadable, JobLogUnreadable, JobStoreFailed, JobTransferEnded, JobTransferLate,
    JobTransfersExpired,
};
pub(crate) use model::{ReplicaMismatch, RevisionChanged};
pub(crate) use peer::PeerExchangeFailed;
pub(crate) use region::{
    InstanceEjected, InstanceHealthWorsened, RegionEjected, RegionHealthWorsened, ReportRejected,
};
pub(crate) use request::{RequestEnded, RequestTimes};
pub(crate) use webhook::{
    WebhookAttemptEnded, WebhookAuthoritiesMissing, WebhookSecretsRejected, WebhookSecretsReloaded,
};

/// Log target of access lines.
pub const ACCESS: &str = "access";

/// Converts a duration to milliseconds with three decimals.
fn millis(took: std::time::Duration) -> f64 {
    took.as_micros() as f64 / 1e3
}
