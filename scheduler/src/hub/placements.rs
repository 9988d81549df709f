//! Placements for `GET /v1/plan`: the regions of each deployment that states a placement, and the reasons.
//!
//! Any hub computes them from the store and the published table, as the leader does. While the store does not respond,
//! there are none: the plan of which they are a part is shown without the store.

use regions::{Deployment, RouteTable};
use scheduler_api::keys;
use scheduler_api::plan::PlacementDecisionV1;
use scheduler_core::placement::{Fleet, report};
use scheduler_core::registry::{RegisteredSpoke, representatives};
use scheduler_store::Store;

use super::api::HubApi;
use super::records;

/// Returns the placement of each deployment that states one.
pub(super) async fn all<S: Store>(api: &HubApi<S>) -> Vec<PlacementDecisionV1> {
    let published = api.current.borrow().clone();
    let none = RouteTable::empty();
    let table = published.as_ref().map_or(&none, |published| &published.table);
    let stored = api.store.get(keys::DEPLOYMENTS).await.ok().flatten();
    let desired = stored.and_then(|entry| records::wanted(&entry).ok()).unwrap_or_default().deployments;
    let placed: Vec<&Deployment> =
        desired.values().filter(|deployment| deployment.placement.is_some()).collect();
    if placed.is_empty() {
        return Vec::new();
    }
    let Ok(spokes) = api.store.range(keys::SPOKES).await else { return Vec::new() };
    let spokes: Vec<RegisteredSpoke> =
        spokes.entries.iter().filter_map(|entry| records::spoke(entry).ok()).collect();
    let drained = table.regions.iter().filter(|(_, route)| route.draining);
    let drains = drained.map(|(region, _)| region.clone()).collect();
    let reporting = representatives(&spokes);
    let fleet = Fleet::new(&api.catalogue, table.regions.keys(), reporting.into_values(), &drains, false);
    report(placed, table, &fleet)
}
