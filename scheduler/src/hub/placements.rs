//! Placements for `GET /v1/plan`: the regions of each deployment that states a placement, and the reasons.
//!
//! Any hub computes them from the store and the published table, as the leader does. While the store does not respond,
//! there are none: the plan of which they are a part is shown without the store.
//!
//! The choices of ten thousand deployments take seconds, so they are computed on a thread for blocking functions, for a limited
//! number of requests at a time.

use std::sync::Arc;

use regions::{Catalogue, Deployment, RouteTable};
use replica_api::error::ErrorCode;
use scheduler_api::keys;
use scheduler_api::placements::DecidedPlacements;
use scheduler_api::plan::PlacementDecisionV1;
use scheduler_core::placement::{Fleet, report};
use scheduler_core::registry::{RegisteredSpoke, representatives};
use scheduler_store::{KeyValue, Store, StoreError};
use supervision::task::blocking;

use super::api::HubApi;
use super::{PublishedTable, records};
use crate::respond::ErrorResponse;

/// Maximum number of requests for which placements are computed at the same time: each takes a processor of the hub.
pub(super) const PLANS_MAX: usize = 2;

/// Record of the leader's decisions, and the leader's key.
pub(super) struct DecisionEntries {
    record: Option<KeyValue>,
    leader: Option<KeyValue>,
}

impl DecisionEntries {
    /// Reads both. The leader is read last, so that no record counts as that of a later term.
    pub(super) async fn read<S: Store>(store: &S) -> Result<DecisionEntries, StoreError> {
        let record = store.get(keys::PLACEMENTS).await?;
        Ok(DecisionEntries { record, leader: store.get(keys::LEADER).await? })
    }

    /// Returns the leader's decisions on the desired deployments of this revision; `None` if it has written no record, like a leader
    /// of an earlier version. It replaces an unreadable record; until then no decision is known.
    pub(super) fn decided_on(&self, revision: u64) -> Option<DecidedPlacements> {
        let term = self.leader.as_ref().map(|leader| leader.create_revision);
        match records::placements(self.record.as_ref()?) {
            Ok(record) => record.decided_on(revision, term),
            Err(_) => Some(DecidedPlacements::new()),
        }
    }
}

/// Returns the placement of each deployment that states one.
///
/// # Errors
///
/// `overloaded` while other requests have all permits.
pub(super) async fn all<S: Store>(api: &HubApi<S>) -> Result<Vec<PlacementDecisionV1>, ErrorResponse> {
    let Ok(Some(deployments)) = api.store.get(keys::DEPLOYMENTS).await else { return Ok(Vec::new()) };
    let revision = deployments.mod_revision;
    let placed = blocking(move || placed(&deployments)).await;
    if placed.is_empty() {
        return Ok(Vec::new());
    }
    let Ok(decisions) = DecisionEntries::read(&api.store).await else { return Ok(Vec::new()) };
    let Ok(spokes) = api.store.range(keys::SPOKES).await else { return Ok(Vec::new()) };
    // After the store has responded: a slow store must not use up the permits.
    let Ok(permit) = api.placement_reports.clone().try_acquire_owned() else {
        let message = format!(
            "{PLANS_MAX} requests for the plan run at this hub, which is the limit; try again shortly."
        );
        return Err(ErrorResponse::new(ErrorCode::Overloaded, message));
    };
    let published = api.current.borrow().clone();
    let records = PlacementRecords { placed, revision, decisions, spokes: spokes.entries };
    let catalogue = api.catalogue.clone();
    let report = blocking(move || {
        // A client that disconnects leaves the function running, with its permit.
        let _permit = permit;
        records.report(published, &catalogue)
    });
    Ok(report.await)
}

/// Returns the desired deployments that state a placement.
fn placed(deployments: &KeyValue) -> Vec<Deployment> {
    let desired = records::wanted(deployments).unwrap_or_default().deployments;
    desired.into_values().filter(|deployment| deployment.placement.is_some()).collect()
}

/// Records from which placements are computed.
struct PlacementRecords {
    /// Desired deployments that state a placement.
    placed: Vec<Deployment>,
    /// Revision of the desired deployments.
    revision: u64,
    decisions: DecisionEntries,
    spokes: Vec<KeyValue>,
}

impl PlacementRecords {
    fn report(
        &self,
        published: Option<Arc<PublishedTable>>,
        catalogue: &Catalogue,
    ) -> Vec<PlacementDecisionV1> {
        let none = RouteTable::empty();
        let table = published.as_ref().map_or(&none, |published| &published.table);
        let spokes = self.spokes.iter().filter_map(|entry| records::spoke(entry).ok());
        let spokes: Vec<RegisteredSpoke> = spokes.collect();
        let decided = self.decisions.decided_on(self.revision).unwrap_or_default();
        let drained = table.regions.iter().filter(|(_, route)| route.draining);
        let drains = drained.map(|(region, _)| region.clone()).collect();
        let reporting = representatives(&spokes).into_values();
        // What lapsed spokes had registered is no longer in the store.
        let lapsed = std::iter::empty();
        let fleet = Fleet::new(catalogue, table.regions.keys(), reporting, lapsed, &drains, false);
        report(&self.placed, table, &decided, &fleet)
    }
}
