//! Report of a region to a gateway.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use regions::{DeploymentName, RegionId};

use super::Spoke;

/// Report of a region to a gateway.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// The reporting region.
    pub region: RegionId,
    /// Random number drawn at each start of the spoke.
    pub boot_id: u64,
    /// Sequence number of the request.
    pub sequence: u64,
    /// Load of every deployment that this region serves, or would serve on demand.
    pub deployments: BTreeMap<DeploymentName, DeploymentLoad>,
    /// Whether the region is draining.
    pub draining: bool,
}

/// Load of one deployment in a region, summed over its ready replicas.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct DeploymentLoad {
    /// Number of ready replicas.
    pub ready: u32,
    /// Time for which a new request would be held (see [`super::hold`]); `None` if it would not be held.
    pub ready_in: Option<Duration>,
    /// Tokens that are queued or being computed.
    pub pending_tokens: u64,
    /// Queued tokens of interactive requests, by the last statuses; `None` if a replica does not report them.
    pub interactive_tokens: Option<u64>,
    /// Total measured speed.
    pub tokens_per_second: f64,
    /// Spillover tokens that the gateway may send until its next request.
    pub granted_tokens: u64,
}

impl Spoke {
    /// Returns the region's report for the request `sequence`, without a grant.
    pub fn report(&self, sequence: u64, now: Instant) -> Report {
        let known =
            self.replicas.each().flat_map(|(_, replica)| replica.names()).chain(self.provisioning.names());
        let mut deployments: BTreeMap<_, _> =
            known.map(|name| (name.clone(), DeploymentLoad::default())).collect();
        for (name, load) in &mut deployments {
            for (_, replica) in self.serving(name, now) {
                let before = if load.ready == 0 { Some(0) } else { load.interactive_tokens };
                load.interactive_tokens =
                    before.zip(replica.interactive_tokens()).map(|(sum, more)| sum.saturating_add(more));
                load.ready += 1;
                load.pending_tokens = load.pending_tokens.saturating_add(replica.backlog_tokens());
                load.tokens_per_second += replica.speed().unwrap_or(0.0);
            }
            load.ready_in = self.wait_estimate(name, now);
        }
        Report {
            region: self.region.clone(),
            boot_id: self.boot_id,
            sequence,
            deployments,
            draining: self.draining,
        }
    }
}
