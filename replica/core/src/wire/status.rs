//! `GET /status`: what a replica tells its region, many times a second.

use serde::{Deserialize, Serialize};

use super::identity::IdentityV1;

/// Where a replica stands in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StateV1 {
    /// The weights are being loaded.
    Starting,
    /// It takes work.
    Ready,
    /// It finishes what it has and takes nothing new.
    Draining,
}

/// The answer of `GET /status`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StatusV1 {
    /// 1.
    pub version: u32,
    /// The deployments that this replica answers to.
    pub names: Vec<String>,
    /// The model behind them, as configured.
    pub model: String,
    /// The identity of what is loaded. Absent while it is being loaded, and from replicas that do not know theirs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub identity: Option<IdentityV1>,
    /// Where it stands in its life.
    pub state: StateV1,
    /// Tokens that wait or are being computed.
    pub pending_tokens: u64,
    /// Of those, lookups that wait: what a new lookup waits for beside the batch that is being computed. Absent from
    /// replicas that do not know it yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lookup_tokens: Option<u64>,
    /// Inputs that wait or are being computed.
    pub pending_inputs: u64,
    /// Requests for vectors since the start, refused ones included.
    pub requests_total: u64,
    /// Measured speed of the engine; 0 until it is known.
    pub tokens_per_second: f64,
}
