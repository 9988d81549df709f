//! What a world says when it is ready, and how it is found out that it is.

use super::plan::Plan;
use super::world::World;
use anyhow::{Context, Result};
use regions::residency::ResidencyPolicy;
use std::net::SocketAddr;
use std::time::Duration;

/// How long after that the gateway may take to see every region healthy.
const HEALTHY_TIMEOUT: Duration = Duration::from_secs(30);

impl World {
    /// Says what there is and how to use it.
    pub(super) async fn announce(&self, plan: &Plan, key: &str) -> Result<()> {
        let place = &plan.regions[0];
        println!("\n{:<28} {:<16} {:>9} {:>8}  state", "region", "city", "distance", "rtt");
        for region in &plan.regions {
            let (distance_km, round_trip) = plan.apart(place, region);
            let city = &plan.catalogue.get(region).context("planned above")?.city;
            let millis = round_trip.as_secs_f64() * 1e3;
            println!("{:<28} {city:<16} {distance_km:>6.0} km {millis:>5.0} ms  healthy", region.as_str());
        }
        let (scheme, believing) = match &self.certificate {
            Some(file) => ("https", format!("--cacert {} ", file.display())),
            None => ("http", String::new()),
        };
        let (url, model) = (format!("{scheme}://{}", self.gateway.1), &plan.deployments[0].name);
        println!("\nmodels      {}", names(plan));
        println!("operations  http://{}/routes", self.operations);
        for (_, hub) in &self.hubs {
            println!("hub         http://{hub} (--token-file {})", self.operator_token.display());
        }
        println!("control     http://{} (cut, slow, heal, kill, stop, pause, restart, drain)", self.control);
        if let Some(file) = &self.certificate {
            println!("certificate {}", file.display());
        }
        println!("\nready  {url}/v1\n");
        println!(
            "curl -s {believing}{url}/v1/embeddings -H 'authorization: Bearer {key}' -H 'content-type: application/json' \\\n  \
             -d '{{\"model\": \"{model}\", \"input\": \"The sea was calm that morning.\"}}'"
        );
        Ok(())
    }
}

fn names(plan: &Plan) -> String {
    let each = plan.deployments.iter().map(|deployment| match &deployment.residency {
        ResidencyPolicy::Anywhere => deployment.name.to_string(),
        residency => format!("{} (only in {residency})", deployment.name),
    });
    each.collect::<Vec<_>>().join(", ")
}

/// Waits until the gateway sees every region healthy, with a replica ready for something or one that would be started for it.
pub(super) async fn healthy(operations: SocketAddr, plan: &Plan) -> Result<()> {
    let client = reqwest::Client::builder().no_proxy().build()?;
    let url = format!("http://{operations}/routes");
    let seen = async {
        let mut look = tokio::time::interval(Duration::from_millis(50));
        loop {
            look.tick().await;
            let Ok(answer) = client.get(&url).send().await else {
                continue;
            };
            let Ok(routes) = answer.json::<serde_json::Value>().await else {
                continue;
            };
            let regions = routes["regions"].as_array().map(Vec::as_slice).unwrap_or_default();
            let healthy = |region: &&serde_json::Value| {
                region["health"] == "healthy"
                    && region["ready"].as_array().is_some_and(|ready| !ready.is_empty())
            };
            if regions.iter().filter(healthy).count()
                >= plan.regions.iter().filter(|region| !plan.replicas(region).is_empty()).count()
            {
                return;
            }
        }
    };
    tokio::time::timeout(HEALTHY_TIMEOUT, seen).await.with_context(|| {
        format!(
            "the gateway did not see every region healthy within {} s; see {url}",
            HEALTHY_TIMEOUT.as_secs()
        )
    })
}
