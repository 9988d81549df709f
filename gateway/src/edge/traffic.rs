//! Reports the traffic of this gateway to the consoles of the hubs ([`scheduler_api::traffic`]), one task for each hub.
//!
//! [`gateway_core::traffic`] computes the counts from the ring of finished requests that `/explain` reads, so a request costs
//! nothing more. A worsened health of a region is reported at once, and so are the routing decisions that the hub has
//! requested. No request waits for these reports; a lost one is not repeated, and its requests are in the next one.

use super::explain::Explanations;
use super::explanation_archive::ExplanationArchive;
use super::lookups::{HubLookups, LookupResults};
use super::region_monitor::RegionMonitor;
use super::table::Current;
use super::view::View;
use crate::config::EdgeConfig;
use crate::events::FinishedRequest;
use crate::metrics::{ObjectiveResult, RequestOutcome};
use gateway_core::traffic::{
    FinishedTraffic, ReportedLoads, TrafficRows, TrafficSummary, pause_after_failure,
};
use regions::RegionId;
use replica_api::error::ErrorCode;
use scheduler_api::paths;
use scheduler_api::plan::GatewayBoot;
use scheduler_api::traffic::{
    GatewayTraffic, ObservedRegion, TRAFFIC_IDLE_PERIOD, TRAFFIC_PERIOD, TrafficReportV1, TrafficResponseV1,
};
use scheduler_client::hub::{ControlPlaneClient, EXCHANGE_TIMEOUT, HubRequest};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// Minimum interval of reports, however often the health of regions changes.
const INTERVAL_MIN: Duration = Duration::from_millis(200);

/// Components from which reports are computed.
#[derive(Clone)]
pub(super) struct TrafficSource {
    pub(super) config: Arc<EdgeConfig>,
    /// Random number of this process.
    pub(super) boot_id: u64,
    pub(super) views: watch::Receiver<Current>,
    pub(super) region_monitor: Arc<RegionMonitor>,
    pub(super) explanations: Arc<Explanations>,
    /// Explanations on disk, if they are configured.
    pub(super) archive: Option<Arc<ExplanationArchive>>,
}

/// Reports to one hub; never returns.
pub(super) async fn follow(client: ControlPlaneClient, source: TrafficSource) {
    let mut health_changes = source.region_monitor.subscribe();
    let (mut reported, mut reported_at) = (source.explanations.recorded(), Instant::now());
    let catalogue = source.config.catalogue.clone();
    let mut lookups = HubLookups::new(source.explanations.clone(), source.archive.clone(), catalogue);
    let (mut next, mut failures) = (INTERVAL_MIN, 0_u32);
    loop {
        tokio::select! {
            () = tokio::time::sleep(next) => {}
            // The monitor lives as long as the gateway.
            Ok(()) = health_changes.changed(), if next <= TRAFFIC_PERIOD => tokio::time::sleep(INTERVAL_MIN.min(next)).await,
        }
        health_changes.mark_unchanged();
        let now = Instant::now();
        let (requests, recorded) = source.explanations.since(reported);
        let finished = recorded.wrapping_sub(reported) as u64;
        let rows = source.rows(&requests, finished);
        let traffic = source.traffic(rows, lookups.take(), now.saturating_duration_since(reported_at), now);
        let request = HubRequest::post(paths::TRAFFIC, &TrafficReportV1::from(&traffic), EXCHANGE_TIMEOUT);
        let response = client.send::<TrafficResponseV1>(&request).await;
        next = match response {
            Ok(TrafficResponseV1 { version: _, next_ms, explain, search }) => {
                (reported, reported_at, failures) = (recorded, now, 0);
                lookups.begin(explain, search);
                let next = Duration::from_millis(next_ms).clamp(INTERVAL_MIN, TRAFFIC_IDLE_PERIOD);
                if lookups.is_busy() { INTERVAL_MIN } else { next }
            }
            Err(error) => {
                // The console of this hub does not show the traffic of this gateway. Requests are not affected.
                tracing::debug!(%error, "traffic report failed");
                failures = failures.saturating_add(1);
                pause_after_failure(error.failure.status().map(|status| status.as_u16()), failures)
            }
        };
    }
}

fn finished_traffic(request: &FinishedRequest) -> FinishedTraffic<'_> {
    let FinishedRequest { id, outcome, tenant, trail, served_by, tokens, total, resolved, .. } = request;
    let is_success = matches!(outcome, RequestOutcome::Complete { status: 200..300, code: None });
    let is_limited = matches!(outcome, RequestOutcome::Complete { code: Some(ErrorCode::RateLimited), .. });
    FinishedTraffic {
        id,
        is_locked: resolved.as_ref().is_none_or(|resolved| resolved.policy.residency.is_locked()),
        deployment: resolved.as_ref().map(|resolved| &resolved.deployment),
        tenant: tenant.as_ref(),
        region: served_by.map(|(region, _)| region),
        failure: (!is_success).then(|| RequestOutcome::name(outcome.index())),
        is_failed: ObjectiveResult::of(*outcome) == ObjectiveResult::Failed,
        is_limited,
        inputs: resolved.as_ref().map_or(0, |resolved| resolved.cost.inputs),
        tokens: tokens.unwrap_or(0),
        total: *total,
        trail,
    }
}

impl TrafficSource {
    fn rows(&self, requests: &[Arc<FinishedRequest>], finished: u64) -> TrafficRows {
        let mut summary = TrafficSummary::default();
        requests.iter().for_each(|request| summary.add(&finished_traffic(request)));
        summary.rows(finished, &self.config.catalogue)
    }

    /// Returns the regions of the route table as this gateway observes them. The lock that routing needs is held for one region
    /// or deployment at a time, so that no request waits for all of them.
    fn observed(&self, view: &View, now: Instant) -> BTreeMap<RegionId, ObservedRegion> {
        let mut loads = ReportedLoads::default();
        for deployment in view.deployments() {
            let reported = self.region_monitor.states().loads.of(&deployment.name).map(|regions| {
                regions.iter().map(|(region, backlog)| (*region, backlog.load)).collect::<Vec<_>>()
            });
            loads.add(&deployment.name, reported.into_iter().flatten());
        }
        let mut loads = loads.by_region();
        let regions = view.regions().map(|region| {
            let states = self.region_monitor.states();
            let (health, report_age) = states.fleet.state(region, now);
            let (rtt, in_flight) = (states.latency.estimate(region, now), states.targets.in_flight(region));
            drop(states);
            let loads = loads.remove(&region).unwrap_or_default();
            let observed = ObservedRegion { health, report_age, rtt, in_flight, loads };
            (self.config.catalogue.region(region).id.clone(), observed)
        });
        regions.collect()
    }

    fn traffic(
        &self,
        rows: TrafficRows,
        LookupResults { explained, searched }: LookupResults,
        interval: Duration,
        now: Instant,
    ) -> GatewayTraffic {
        let TrafficRows { served, failures, tenants, moves } = rows;
        let view = self.views.borrow().clone();
        let regions = view.as_ref().map(|view| self.observed(view, now)).unwrap_or_default();
        GatewayTraffic {
            gateway: GatewayBoot { region: self.config.region.clone(), boot_id: self.boot_id },
            generation: view.as_ref().map(|view| view.generation),
            interval,
            in_flight: regions.values().map(|observed| u64::from(observed.in_flight)).sum(),
            regions,
            served,
            failures,
            tenants,
            moves,
            explained,
            searched,
        }
    }
}
