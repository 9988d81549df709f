//! Readiness of a local fleet.

use super::plan::FleetPlan;
use anyhow::{Context, Result};
use regions::id::RegionId;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::Duration;

/// Time that the gateway may take, after all processes are ready, to observe every region as healthy.
const HEALTHY_TIMEOUT: Duration = Duration::from_secs(30);

/// Regions with replicas, and the deployments that each of them must serve: at least one, if none is named.
#[derive(Clone)]
pub(super) struct ServedRegions(BTreeMap<RegionId, BTreeSet<String>>);

impl ServedRegions {
    /// Returns the regions of a fleet. No deployment is named if the fleet is autoscaled, because its deployments start on demand, or if
    /// its replicas are scripted, because a region may have none of them.
    pub(super) fn of(plan: &FleetPlan) -> ServedRegions {
        let are_named = !plan.is_autoscaled() && plan.scripted.is_none();
        let regions = plan.regions.iter().filter_map(|region| {
            let replicas = plan.replicas(region);
            let named = replicas.values().flatten().filter(|_| are_named);
            let names = named.map(|deployment| deployment.name.to_string()).collect();
            (!replicas.is_empty()).then(|| (region.clone(), names))
        });
        ServedRegions(regions.collect())
    }

    /// Returns whether the routes of a gateway have all of them, healthy and with their deployments.
    fn are_ready(&self, routes: &Value) -> bool {
        let regions = routes["regions"].as_array().map(Vec::as_slice).unwrap_or_default();
        self.0.iter().all(|(id, names)| {
            let observed = regions.iter().find(|region| region["region"] == id.as_str());
            observed.is_some_and(|region| {
                let ready = region["ready"].as_array().map(Vec::as_slice).unwrap_or_default();
                let is_served = |name: &String| ready.iter().any(|ready| ready == name.as_str());
                region["health"] == "healthy" && !ready.is_empty() && names.iter().all(is_served)
            })
        })
    }
}

/// Waits until the gateway observes these regions as healthy, with their deployments.
pub(super) async fn until_healthy(operations: SocketAddr, served: &ServedRegions) -> Result<()> {
    let client = reqwest::Client::builder().no_proxy().build()?;
    let url = format!("http://{operations}/routes");
    let polled = async {
        let mut poll = tokio::time::interval(Duration::from_millis(50));
        loop {
            poll.tick().await;
            let Ok(response) = client.get(&url).send().await else {
                continue;
            };
            if response.json().await.is_ok_and(|routes| served.are_ready(&routes)) {
                return;
            }
        }
    };
    tokio::time::timeout(HEALTHY_TIMEOUT, polled).await.with_context(|| {
        format!(
            "the gateway did not report every region as healthy, with all its deployments, within {} s; see {url}",
            HEALTHY_TIMEOUT.as_secs()
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// Regression: a fleet counted as ready when one of its deployments was, and the first request for another one was rejected.
    #[test]
    fn a_region_is_ready_with_all_its_deployments() {
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        let id: RegionId = "aws/us-east-1".parse().unwrap();
        let routes = |health: &str, ready: &[&str]| json!({"regions": [{"region": id.as_str(), "health": health, "ready": ready}]});
        let two = ServedRegions(BTreeMap::from([(id.clone(), names(&["a", "b"]))]));
        assert!(two.are_ready(&routes("healthy", &["b", "a"])));
        assert!(!two.are_ready(&routes("healthy", &["b"])));
        assert!(!two.are_ready(&routes("degraded", &["a", "b"])));
        assert!(!two.are_ready(&json!({"regions": []})));
        let any = ServedRegions(BTreeMap::from([(id.clone(), BTreeSet::new())]));
        assert!(any.are_ready(&routes("healthy", &["b"])));
        assert!(!any.are_ready(&routes("healthy", &[])));
    }
}
