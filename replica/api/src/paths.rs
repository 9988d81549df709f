//! Paths of the data-plane API that no model computes. The paths of the operations are in [`crate::api`].

/// Deployments that a key may use; at a replica, its deployments.
pub const MODELS: &str = "/v1/models";
/// One deployment.
pub const MODEL: &str = "/v1/models/{id}";
/// The list of [`MODELS`] with the members that Infinity's client requires.
pub const INFINITY_MODELS: &str = "/infinity/models";
/// Description of the API.
pub const OPENAPI: &str = "/openapi.json";
/// Readiness probe of a replica.
pub const HEALTH: &str = "/health";
/// Status of a replica, which its region polls ([`crate::status`]).
pub const STATUS: &str = "/status";
/// Metrics of a replica. The other roles serve theirs at the path of the control plane (`scheduler_api::paths`).
pub const METRICS: &str = "/metrics";
