//! Loads of a region in its reports to gateways.

use std::collections::BTreeMap;
use std::time::Instant;

use regions::DeploymentName;
use scheduler_api::report::DeploymentLoad;

use super::Spoke;

impl Spoke {
    /// Returns the loads in the reports of this spoke, without grants: its share of the load of the region's replicas,
    /// rounded up, so that the reports of all spokes of the region add up to its load.
    pub fn loads(&self, now: Instant) -> BTreeMap<DeploymentName, DeploymentLoad> {
        let known =
            self.replicas.each().flat_map(|(_, replica)| replica.names()).chain(self.provisioning.names());
        let mut deployments: BTreeMap<_, _> =
            known.map(|name| (name.clone(), DeploymentLoad::default())).collect();
        let serving = self.serving_by_name(now);
        for (name, load) in &mut deployments {
            let replicas = serving.get(name).map_or(&[][..], Vec::as_slice);
            for replica in replicas.iter().filter_map(|index| self.replicas.get(*index)) {
                let before = if load.ready == 0 { Some(0) } else { load.interactive_tokens };
                load.interactive_tokens =
                    before.zip(replica.interactive_tokens()).map(|(sum, more)| sum.saturating_add(more));
                load.ready += 1;
                load.pending_tokens = load.pending_tokens.saturating_add(replica.backlog_tokens());
                load.tokens_per_second += replica.speed().unwrap_or(0.0);
            }
            load.ready = load.ready.div_ceil(self.instances);
            load.pending_tokens = load.pending_tokens.div_ceil(self.instances.into());
            load.interactive_tokens = load.interactive_tokens.map(|all| all.div_ceil(self.instances.into()));
            load.tokens_per_second /= f64::from(self.instances);
            load.ready_in = self.wait_estimate(name, replicas.len(), now);
            let failed = replicas.is_empty().then(|| self.start_failure(name, now)).flatten();
            load.failed = failed.map(|failed| failed.failure.reason);
        }
        deployments
    }
}
