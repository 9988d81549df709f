//! Hears every region five times a second.
//!
//! The edge asks and the region answers with its report: so the edge needs no door for regions, the time from question
//! to answer is the round trip, and a region that is cut off in either direction falls silent. Questions leave on the
//! beat whether or not earlier ones were answered: over an ocean two or three are under way at once, and a stall is
//! seen in the beat that it happens. They go the way of requests and over the same connections ([`crate::hop`]), so whoever
//! answers there and is not the region is not believed about it either.

use super::admission::AdmissionPools;
use super::table::Current;
use super::watch::Watch;
use crate::config::EdgeConfig;
use crate::http1::UpstreamKey;
use crate::upstream::{AUTHORITY, RequestHead, ResponseBody, Upstream, UpstreamMethod, UpstreamResponse};
use bytes::Bytes;
use gateway_core::health::{HealthReport, REPORT_PERIOD};
use http::header::{CONTENT_LENGTH, CONTENT_TYPE, HOST};
use regions::set::RegionIndex;
use scheduler_core::spoke::{DeploymentLoad, ExchangeRequest, Gateway};
use scheduler_core::wire::report::{ExchangeRequestV1, ReportV1};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use supervision::task::{contained, supervise};
use tokio::sync::watch;
use tokio::task::JoinSet;

/// How long a report is waited for; by then the region is long known to be down.
const EXCHANGE_TIMEOUT: Duration = Duration::from_secs(2);
/// Bytes of a report: 1,000 deployments of the longest names with their numbers are half of it.
const REPORT_BYTES_MAX: usize = 512 << 10;
/// Questions under way to one region: all that fit into the timeout.
const UNDER_WAY_MAX: usize = (EXCHANGE_TIMEOUT.as_millis() / REPORT_PERIOD.as_millis()) as usize;

/// Listens to the regions of the current table, for ever.
pub(crate) async fn listen(
    config: Arc<EdgeConfig>,
    upstream: Arc<Upstream>,
    mut views: watch::Receiver<Current>,
    watch: Arc<Watch>,
    pools: Arc<AdmissionPools>,
) {
    let mut heard: BTreeMap<(RegionIndex, SocketAddr), tokio::task::AbortHandle> = BTreeMap::new();
    let mut tasks = JoinSet::new();
    let gateway = Gateway { location: config.region.to_string(), boot_id: rand::random() };
    loop {
        let wanted: Vec<_> = views.borrow_and_update().iter().flat_map(|view| view.regions()).collect();
        watch.watch(wanted.iter().map(|(region, _)| *region));
        heard.retain(|region, task| {
            let stays = wanted.contains(region);
            if !stays {
                task.abort();
            }
            stays
        });
        for (region, address) in wanted {
            heard.entry((region, address)).or_insert_with(|| {
                let receiver = ReportReceiver {
                    key: UpstreamKey { region, address },
                    gateway: gateway.clone(),
                    upstream: upstream.clone(),
                    watch: watch.clone(),
                    pools: pools.clone(),
                    newest: AtomicU64::new(0),
                };
                let receiver = Arc::new(receiver);
                tasks.spawn(supervise("reports of a region", move || receiver.clone().listen()))
            });
        }
        if views.changed().await.is_err() {
            return;
        }
    }
}

/// Receiver of the reports of one region.
struct ReportReceiver {
    key: UpstreamKey,
    gateway: Gateway,
    upstream: Arc<Upstream>,
    watch: Arc<Watch>,
    pools: Arc<AdmissionPools>,
    /// The newest report that was taken; an older one that comes later says nothing new.
    newest: AtomicU64,
}

impl ReportReceiver {
    async fn listen(self: Arc<ReportReceiver>) {
        let mut beat = tokio::time::interval(REPORT_PERIOD);
        beat.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Skip);
        let mut under_way = JoinSet::new();
        for sequence in 1.. {
            beat.tick().await;
            while under_way.try_join_next().is_some() {}
            if under_way.len() < UNDER_WAY_MAX {
                under_way.spawn(contained("report of a region", self.clone().exchange(sequence)));
            }
        }
    }

    async fn exchange(self: Arc<ReportReceiver>, sequence: u64) {
        let asked = Instant::now();
        let wanted = self.watch.wanted(self.key.region);
        let question = ExchangeRequest { gateway: self.gateway.clone(), sequence, requested: wanted };
        match tokio::time::timeout(EXCHANGE_TIMEOUT, self.ask(&ExchangeRequestV1::from(question))).await {
            Ok(Ok((report, round_trip))) => self.take(report, round_trip, asked),
            Ok(Err(error)) => tracing::debug!(address = %self.key.address, error, "no report"),
            Err(late) => tracing::debug!(address = %self.key.address, %late, "no report"),
        }
    }

    /// The report, and how long it took to come.
    async fn ask(&self, question: &ExchangeRequestV1) -> Result<(ReportV1, Duration), String> {
        let body = Bytes::from(serde_json::to_vec(question).expect("a question serialises to JSON"));
        let mut head = RequestHead::new(UpstreamMethod::Post).for_path("/spoke/v1/exchange");
        head.put(HOST.as_str(), AUTHORITY);
        head.put(CONTENT_TYPE.as_str(), "application/json");
        head.put(CONTENT_LENGTH.as_str(), body.len().to_string());
        let asked = self.upstream.send_own(self.key, &head, &body, REPORT_BYTES_MAX).await;
        let (UpstreamResponse { head, body }, round_trip) =
            asked.map_err(|failure| format!("{failure:?}"))?;
        match body {
            ResponseBody::Buffered(body) if head.status.is_success() => {
                let report = serde_json::from_slice(&body).map_err(|error| error.to_string())?;
                Ok((report, round_trip))
            }
            ResponseBody::Buffered(_) => Err(format!("the region says {}", head.status)),
            ResponseBody::Streamed(_) => Err(format!("the region says more than {REPORT_BYTES_MAX} bytes")),
        }
    }

    fn take(&self, report: ReportV1, round_trip: Duration, asked: Instant) {
        let report = match scheduler_core::spoke::Report::try_from(report) {
            Ok(report) => report,
            Err(error) => {
                let address = self.key.address;
                return tracing::warn!(%address, %error, "a report that cannot be read is refused");
            }
        };
        if self.newest.fetch_max(report.sequence, Ordering::Relaxed) >= report.sequence {
            return;
        }
        let region = self.key.region;
        self.watch.loaded(region, &report, asked);
        self.pools.reported(region, &report);
        // What it would hold until a replica is ready is served as well.
        let serves = |load: &DeploymentLoad| load.ready > 0 || load.ready_in.is_some();
        let ready = report.deployments.iter().filter(|(_, load)| serves(load));
        let ready = ready.map(|(name, _)| name.clone()).collect();
        self.watch.reported(region, HealthReport { round_trip, ready, draining: report.draining });
    }
}
