//! Reports the traffic of this gateway to the consoles of the hubs ([`scheduler_api::traffic`]), one task for each hub.
//!
//! [`gateway_core::traffic`] computes the counts from the ring of finished requests that `/explain` reads, so a request costs
//! nothing more. A worsened health of a region is reported at once, and so are the routing decisions that the hub has
//! requested. No request waits for these reports; a lost one is not repeated, and its requests are in the next one.

use super::explain::{self, Explanations};
use super::region_monitor::RegionMonitor;
use super::table::Current;
use crate::config::EdgeConfig;
use crate::events::FinishedRequest;
use crate::metrics::RequestOutcome;
use gateway_core::traffic::{FinishedTraffic, TrafficRows, TrafficSummary};
use regions::set::RegionIndex;
use replica_api::error::{ErrorCode, Fault};
use scheduler_api::paths;
use scheduler_api::plan::GatewayBoot;
use scheduler_api::traffic::{
    EXPLANATIONS_MAX, GatewayTraffic, ObservedLoad, ObservedRegion, TRAFFIC_IDLE_PERIOD, TRAFFIC_PERIOD,
    TRAFFIC_ROWS_MAX, TrafficReportV1, TrafficResponseV1,
};
use scheduler_client::hub::{ControlPlaneClient, EXCHANGE_TIMEOUT, HubRequest};
use serde_json::Value;
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
}

/// Reports to one hub; never returns.
pub(super) async fn follow(client: ControlPlaneClient, source: TrafficSource) {
    let mut health_changes = source.region_monitor.subscribe();
    let (mut reported, mut reported_at) = (source.explanations.recorded(), Instant::now());
    let mut wanted: Vec<String> = Vec::new();
    let mut next = INTERVAL_MIN;
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
        let explained = source.explain(std::mem::take(&mut wanted));
        let traffic = source.traffic(rows, explained, now.saturating_duration_since(reported_at), now);
        let request = HubRequest::post(paths::TRAFFIC, &TrafficReportV1::from(&traffic), EXCHANGE_TIMEOUT);
        let response = client.send::<TrafficResponseV1>(&request).await;
        next = match response {
            Ok(TrafficResponseV1 { version: _, next_ms, explain }) => {
                (reported, reported_at, wanted) = (recorded, now, explain);
                let next = Duration::from_millis(next_ms).clamp(INTERVAL_MIN, TRAFFIC_IDLE_PERIOD);
                if wanted.is_empty() { next } else { INTERVAL_MIN }
            }
            Err(error) => {
                // The console of this hub does not show the traffic of this gateway. Requests are not affected.
                tracing::debug!(%error, "traffic report failed");
                let is_unknown = error.failure.status().is_some_and(|status| status.is_client_error());
                if is_unknown { TRAFFIC_IDLE_PERIOD } else { TRAFFIC_PERIOD }
            }
        };
    }
}

/// Returns whether a request failed by no fault of the client.
fn is_failed(outcome: RequestOutcome) -> bool {
    match outcome {
        RequestOutcome::Complete { code: Some(code), .. } => {
            matches!(code.fault(), Fault::Capacity | Fault::Replica | Fault::Network)
        }
        RequestOutcome::Complete { status, code: None } => status >= 500,
        RequestOutcome::Truncated { .. } | RequestOutcome::Shutdown => true,
        RequestOutcome::ClientDisconnected => false,
    }
}

fn finished_traffic(request: &FinishedRequest) -> FinishedTraffic<'_> {
    let FinishedRequest { id, outcome, tenant, trail, served_by, tokens, total, resolved, .. } = request;
    let is_success = matches!(outcome, RequestOutcome::Complete { status: 200..300, code: None });
    let is_limited = matches!(outcome, RequestOutcome::Complete { code: Some(ErrorCode::RateLimited), .. });
    FinishedTraffic {
        id,
        deployment: resolved.as_ref().map(|resolved| &resolved.deployment),
        tenant: tenant.as_ref(),
        region: served_by.map(|(region, _)| region),
        failure: (!is_success).then(|| RequestOutcome::name(outcome.index())),
        is_failed: is_failed(*outcome),
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

    /// Returns the routing decisions of these requests, as far as they are known.
    fn explain(&self, wanted: Vec<String>) -> BTreeMap<String, Option<Value>> {
        let explanation = |id: String| {
            let found = self.explanations.find(&id);
            let explanation = found.map(|request| explain::to_json(&request, &self.config.catalogue));
            (id, explanation)
        };
        wanted.into_iter().take(EXPLANATIONS_MAX).map(explanation).collect()
    }

    fn traffic(
        &self,
        rows: TrafficRows,
        explained: BTreeMap<String, Option<Value>>,
        interval: Duration,
        now: Instant,
    ) -> GatewayTraffic {
        let TrafficRows { served, failures, tenants, moves } = rows;
        let view = self.views.borrow().clone();
        let states = self.region_monitor.states();
        let observed = |region: RegionIndex| {
            let (health, report_age) = states.fleet.state(region, now);
            let awake = states.loads.in_region(region).filter(|(_, backlog)| !backlog.load.is_asleep());
            let loads = awake.take(TRAFFIC_ROWS_MAX).map(|(name, backlog)| {
                let load = ObservedLoad {
                    ready: backlog.load.ready,
                    pending_tokens: backlog.load.pending_tokens,
                    tokens_per_second: backlog.load.tokens_per_second as u64,
                    held_for: backlog.load.ready_in,
                };
                (name.clone(), load)
            });
            let observed = ObservedRegion {
                health,
                report_age,
                rtt: states.latency.estimate(region, now),
                in_flight: states.targets.in_flight(region),
                loads: loads.collect(),
            };
            (self.config.catalogue.region(region).id.clone(), observed)
        };
        let regions: BTreeMap<_, _> = view.iter().flat_map(|view| view.regions()).map(observed).collect();
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
        }
    }
}
