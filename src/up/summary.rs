//! Summary of a local fleet, which is printed when it is ready.

use super::fleet::LocalFleet;
use super::plan::FleetPlan;
use crate::apply;
use crate::cli::CallerOptions;
use anyhow::{Context, Result, anyhow};
use regions::residency::ResidencyPolicy;

impl LocalFleet {
    /// Prints the regions, addresses and an example request.
    pub(super) async fn announce(&self, plan: &FleetPlan, key: &str) -> Result<()> {
        let gateway_region = &plan.regions[0];
        println!("\n{:<28} {:<16} {:>9} {:>8}  state", "region", "city", "distance", "rtt");
        for region in &plan.regions {
            let (distance_km, round_trip) = plan.distance(gateway_region, region);
            let city = &plan.catalogue.get(region).context("planned above")?.city;
            let millis = round_trip.as_secs_f64() * 1e3;
            println!("{:<28} {city:<16} {distance_km:>6.0} km {millis:>5.0} ms  healthy", region.as_str());
        }
        let (scheme, curl_option) = match &self.certificate {
            Some(file) => ("https", format!("--cacert {} ", file.display())),
            None => ("http", String::new()),
        };
        let (url, model) = (&self.urls()[0], &plan.deployments[0].name);
        println!("\nmodels      {}", names(plan));
        for gateway in &self.gateways {
            println!("gateway     {scheme}://{} for callers near {}", gateway.address, gateway.region);
        }
        for gateway in &self.gateways {
            println!("operations  http://{}/routes", gateway.operations);
        }
        for hub in &self.hubs {
            println!("hub         https://{} (--identity {})", hub.address, self.operator().display());
        }
        println!(
            "console     {} (once, within 10 minutes; `meridian console` prints another link)",
            self.console_link().await?
        );
        println!("control     http://{} (cut, slow, heal, kill, stop, pause, restart, drain)", self.control);
        println!("metrics     {} lists the targets for Prometheus", self.targets.display());
        println!(
            "webhooks    to loopback addresses; the secret is in {} (docs/jobs.md)",
            self.webhook_secrets.display()
        );
        if let Some(file) = &self.certificate {
            println!("certificate {}", file.display());
        }
        println!("\nready  {url}/v1\n");
        println!(
            "curl -s {curl_option}{url}/v1/embeddings -H 'authorization: Bearer {key}' -H 'content-type: application/json' \\\n  \
             -d '{{\"model\": \"{model}\", \"input\": \"The sea was calm that morning.\"}}'"
        );
        Ok(())
    }
}

impl LocalFleet {
    /// Returns the link that signs a browser in as operator, once.
    async fn console_link(&self) -> Result<String> {
        let hub = self.hubs.first().context("no hub")?.address;
        let operator =
            CallerOptions { identity: Some(self.operator().to_owned()), ..CallerOptions::default() };
        let client = apply::client(&format!("https://{hub}"), &operator, apply::RECORD_TIMEOUT);
        let client = client.map_err(|problem| anyhow!(problem))?;
        Ok(client.create_console_login().await.context("no link to the console")?.url)
    }
}

fn names(plan: &FleetPlan) -> String {
    let each = plan.deployments.iter().map(|deployment| match &deployment.residency {
        ResidencyPolicy::Anywhere => deployment.name.to_string(),
        residency => format!("{} (only in {residency})", deployment.name),
    });
    each.collect::<Vec<_>>().join(", ")
}
