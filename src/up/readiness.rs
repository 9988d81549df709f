//! Readiness of a local fleet.

use super::plan::FleetPlan;
use anyhow::{Context, Result};
use std::net::SocketAddr;
use std::time::Duration;

/// Time that the gateway may take, after all processes are ready, to observe every region as healthy.
const HEALTHY_TIMEOUT: Duration = Duration::from_secs(30);

/// Returns the number of regions with replicas.
pub(super) fn served_regions(plan: &FleetPlan) -> usize {
    plan.regions.iter().filter(|region| !plan.replicas(region).is_empty()).count()
}

/// Waits until the gateway reports this number of regions as healthy, with a deployment that is ready or can be started on demand.
pub(super) async fn until_healthy(operations: SocketAddr, served_regions: usize) -> Result<()> {
    let client = reqwest::Client::builder().no_proxy().build()?;
    let url = format!("http://{operations}/routes");
    let polled = async {
        let mut poll = tokio::time::interval(Duration::from_millis(50));
        loop {
            poll.tick().await;
            let Ok(response) = client.get(&url).send().await else {
                continue;
            };
            let Ok(routes) = response.json::<serde_json::Value>().await else {
                continue;
            };
            let regions = routes["regions"].as_array().map(Vec::as_slice).unwrap_or_default();
            let healthy = |region: &&serde_json::Value| {
                region["health"] == "healthy"
                    && region["ready"].as_array().is_some_and(|ready| !ready.is_empty())
            };
            if regions.iter().filter(healthy).count() >= served_regions {
                return;
            }
        }
    };
    tokio::time::timeout(HEALTHY_TIMEOUT, polled).await.with_context(|| {
        format!(
            "the gateway did not report every region as healthy within {} s; see {url}",
            HEALTHY_TIMEOUT.as_secs()
        )
    })
}
