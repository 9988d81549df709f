//! Targets of a Prometheus that observes a local fleet, in the format of file-based service discovery.
//!
//! The labels are those of configs/observability/prometheus.yml, on which the rules and dashboards depend. Scripted replicas have no
//! metrics, and those that a spoke starts are not known in advance; neither are targets.

use super::fleet::{PreparedGateway, PreparedHub, PreparedRegion};
use regions::id::RegionId;
use serde_json::{Value, json};
use std::net::SocketAddr;

/// Returns the processes of the fleet, one target each. The hubs are where the first gateway is.
pub(super) fn of(
    hub_region: &RegionId,
    hubs: &[PreparedHub],
    gateways: &[PreparedGateway],
    regions: &[PreparedRegion],
) -> Value {
    let hubs = hubs.iter().map(|hub| target("hub", hub.operations, "region", hub_region, None));
    let gateways =
        gateways.iter().map(|gateway| target("gateway", gateway.operations, "origin", &gateway.region, None));
    let in_regions = regions.iter().flat_map(|PreparedRegion { region, spokes, replicas, delays: _ }| {
        let spokes =
            spokes.iter().map(move |spoke| target("spoke", spoke.operations, "region", region, None));
        let replicas = replicas.iter().filter_map(move |replica| {
            let deployment = replica.deployment.as_deref()?;
            Some(target("replica", replica.operations, "region", region, Some(deployment)))
        });
        spokes.chain(replicas)
    });
    Value::Array(hubs.chain(gateways).chain(in_regions).collect())
}

fn target(
    role: &str,
    operations: SocketAddr,
    place: &str,
    region: &RegionId,
    deployment: Option<&str>,
) -> Value {
    let mut labels = json!({ "job": format!("meridian-{role}"), place: region.as_str() });
    if let Some(deployment) = deployment {
        labels["deployment"] = deployment.into();
    }
    json!({ "targets": [operations], "labels": labels })
}
