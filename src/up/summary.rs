//! Summary of a local fleet, which is printed when it is ready.

use super::fleet::LocalFleet;
use super::plan::FleetPlan;
use crate::apply;
use crate::cli::{CallerOptions, UpOptions};
use anyhow::{Context, Result, anyhow};
use regions::deployment::Deployment;
use regions::residency::ResidencyPolicy;
use scheduler_api::apply::AppliedDeploymentsV1;
use scheduler_api::deployment::{DeploymentV1, read_deployments};
use scheduler_api::paths;
use scheduler_client::operator::OperatorClient;
use std::path::Path;

impl LocalFleet {
    /// Prints the regions, addresses and an example request. The deployments are those of the hub, whose store precedes the
    /// file of the command line.
    pub(super) async fn announce(&self, plan: &FleetPlan, options: &UpOptions) -> Result<()> {
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
        let hub = self.hub_client()?;
        let applied: AppliedDeploymentsV1 = hub.get(paths::DEPLOYMENTS).await.context("no deployments")?;
        let note =
            options.deployments.as_deref().filter(|_| differs(&plan.deployments, &applied.deployments));
        let applied = read_deployments(applied.deployments).context("invalid deployments of the hub")?;
        println!("\nmodels      {}", names(applied.values()));
        if let Some(file) = note {
            println!("{}", self.note(file)?);
        }
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
            hub.create_console_login().await.context("no link to the console")?.url
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
        let url = &self.urls()[0];
        println!("\nready  {url}/v1\n");
        let planned = plan.deployments.iter().map(|deployment| &deployment.name);
        let model = planned.chain(applied.keys()).find(|name| applied.contains_key(*name));
        if let Some(model) = model {
            let key = &options.key;
            println!(
                "curl -s {curl_option}{url}/v1/embeddings -H 'authorization: Bearer {key}' -H 'content-type: application/json' \\\n  \
                 -d '{{\"model\": \"{model}\", \"input\": \"The sea was calm that morning.\"}}'"
            );
        }
        Ok(())
    }
}

impl LocalFleet {
    /// Returns the note that a file is not in use.
    fn note(&self, file: &Path) -> Result<String> {
        let hub = self.hubs.first().context("no hub")?.address;
        let (file, operator) = (file.display(), self.operator().display());
        Ok(format!(
            "note        the deployments of the hub differ from {file}: its store has precedence after the first `meridian \
             apply`\n            to use the file, run `meridian apply {file} --hub https://{hub} --identity {operator}`"
        ))
    }

    /// Returns a client of the first hub, as operator.
    fn hub_client(&self) -> Result<OperatorClient> {
        let hub = self.hubs.first().context("no hub")?.address;
        let operator =
            CallerOptions { identity: Some(self.operator().to_owned()), ..CallerOptions::default() };
        let client = apply::client(&format!("https://{hub}"), &operator, apply::RECORD_TIMEOUT);
        client.map_err(|problem| anyhow!(problem))
    }
}

/// Returns whether the hub has other deployments than those of a file, in any order.
fn differs(planned: &[Deployment], applied: &[DeploymentV1]) -> bool {
    let planned: Vec<_> = planned.iter().map(DeploymentV1::from).collect();
    planned.len() != applied.len() || planned.iter().any(|deployment| !applied.contains(deployment))
}

fn names<'a>(deployments: impl Iterator<Item = &'a Deployment>) -> String {
    let each = deployments.map(|deployment| match &deployment.residency {
        ResidencyPolicy::Anywhere => deployment.name.to_string(),
        residency => format!("{} (only in {residency})", deployment.name),
    });
    each.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use regions::catalogue::Catalogue;
    use regions::deployment::parse_deployments;

    #[test]
    fn a_changed_file_differs_from_the_deployments_of_the_hub_and_its_order_does_not() {
        let read = |names: &[&str], model: &str| {
            let table = |name: &&str| {
                format!(
                    "[[deployment]]\nname = \"{name}\"\ntask = \"embed\"\nmodel = \"{model}\"\n\
                     engine = {{ kind = \"cpu\", precision = \"f32\" }}\nscaling = {{ min = 1, max = 1 }}\n"
                )
            };
            let text: String = names.iter().map(table).collect();
            parse_deployments(&text, &Catalogue::builtin()).expect("deployments")
        };
        let applied: Vec<_> = read(&["a", "b"], "pypi://m").iter().map(DeploymentV1::from).collect();
        assert!(!differs(&read(&["b", "a"], "pypi://m"), &applied));
        assert!(differs(&read(&["a", "b"], "pypi://n"), &applied));
        assert!(
            differs(&read(&["a"], "pypi://m"), &applied)
                && differs(&read(&["a", "b", "c"], "pypi://m"), &applied)
        );
    }
}
