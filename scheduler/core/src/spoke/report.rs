//! What a region says of itself to a gateway.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use regions::{DeploymentName, RegionId};

use super::Spoke;

/// What a region says of itself to a gateway.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// Which region.
    pub region: RegionId,
    /// Drawn anew whenever the spoke starts.
    pub boot_id: u64,
    /// That of the question.
    pub sequence: u64,
    /// Every deployment that some replica answers to, or would.
    pub deployments: BTreeMap<DeploymentName, DeploymentLoad>,
    /// The region takes nothing new.
    pub draining: bool,
}

/// One deployment in a region, over those of its replicas that take work.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct DeploymentLoad {
    /// How many they are.
    pub ready: u32,
    /// How long a request that comes now would be held until one takes it (see [`super::hold`]); nothing where it would not be.
    pub ready_in: Option<Duration>,
    /// Tokens that wait or are being computed in them.
    pub pending_tokens: u64,
    /// Of those, lookups that wait, by the replicas' last words; nothing if one of them does not say.
    pub interactive_tokens: Option<u64>,
    /// What they compute together, as far as it is known.
    pub tokens_per_second: f64,
    /// Tokens of others' overflow that the asker may send until it asks again.
    pub granted_tokens: u64,
}

impl Spoke {
    /// What the region says of itself in answer to the question `sequence`; nothing is granted by it.
    pub fn report(&self, sequence: u64, now: Instant) -> Report {
        let known = self.replicas.each().flat_map(|(_, replica)| replica.names()).chain(self.provisioning.names());
        let mut deployments: BTreeMap<_, _> = known.map(|name| (name.clone(), DeploymentLoad::default())).collect();
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
