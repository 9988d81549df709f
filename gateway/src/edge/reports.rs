//! Polls a report from every spoke instance of every region five times a second.
//!
//! The gateway sends a request and the region responds with its report. So the gateway needs no listener for regions,
//! the time from request to response is the round trip, and a region that is unreachable in either direction sends no
//! reports. Requests are sent at a fixed interval, whether or not earlier ones were responded to: across an ocean two
//! or three are in flight at once, and a stall is detected within one interval. They use the same connections as client
//! requests ([`crate::hop`]), so an endpoint that fails to authenticate as the region cannot report for it either. A
//! report of another region or of another instance, at whose address the spoke of the route table no longer runs, is
//! rejected.

use super::region_monitor::RegionMonitor;
use super::router::AdmissionPools;
use super::table::Current;
use crate::config::EdgeConfig;
use crate::events::ForeignReport;
use crate::hop::UpstreamKey;
use crate::request_head::{AUTHORITY, RequestHead, UpstreamMethod};
use crate::upstream::{ResponseBody, Upstream, UpstreamResponse};
use bytes::Bytes;
use gateway_core::instances::InstanceIndex;
use http::header::{CONTENT_LENGTH, CONTENT_TYPE, HOST};
use regions::id::InstanceName;
use scheduler_api::paths;
use scheduler_api::report::delta::{ReportDecoder, ReportError};
use scheduler_api::report::{
    EXCHANGE_PERIOD, ExchangeRequest, ExchangeRequestV1, Gateway, KnownState, ReportV1,
};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use supervision::Mutex;
use supervision::task::{contained, supervise};
use tokio::sync::watch;
use tokio::task::JoinSet;

/// Timeout of a report; a region is considered down well before it. Independent of the timeouts of the exchanges with
/// hubs and between spokes: this one bounds the reports in flight.
const EXCHANGE_TIMEOUT: Duration = Duration::from_secs(2);
/// Limit on the bytes of a report: 1,000 deployments with names of maximum length take half of it.
const REPORT_BYTES_MAX: usize = 512 << 10;
/// Limit on exchanges in flight with one region: as many as are started within the timeout.
const EXCHANGES_IN_FLIGHT_MAX: usize = (EXCHANGE_TIMEOUT.as_millis() / EXCHANGE_PERIOD.as_millis()) as usize;

/// Polls the regions of the current route table for ever.
pub(crate) async fn listen(
    config: Arc<EdgeConfig>,
    upstream: Arc<Upstream>,
    mut views: watch::Receiver<Current>,
    region_monitor: Arc<RegionMonitor>,
    pools: Arc<AdmissionPools>,
) {
    let mut receivers: BTreeMap<InstanceIndex, tokio::task::AbortHandle> = BTreeMap::new();
    let mut tasks = JoinSet::new();
    let gateway = Gateway { location: config.region.to_string(), boot_id: rand::random() };
    loop {
        let instances = match &*views.borrow_and_update() {
            Some(view) => region_monitor.states().set_routes(view),
            None => Vec::new(),
        };
        receivers.retain(|index, task| {
            let stays = instances.iter().any(|(other, _, _)| other == index);
            if !stays {
                task.abort();
            }
            stays
        });
        for (index, name, address) in instances {
            receivers.entry(index).or_insert_with(|| {
                let receiver = ReportReceiver {
                    index,
                    name,
                    key: UpstreamKey { region: index.region(), address },
                    gateway: gateway.clone(),
                    upstream: upstream.clone(),
                    region_monitor: region_monitor.clone(),
                    pools: pools.clone(),
                    received: Mutex::new(ReceivedReports::default()),
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

/// Receiver of the reports of one instance.
struct ReportReceiver {
    index: InstanceIndex,
    name: InstanceName,
    key: UpstreamKey,
    gateway: Gateway,
    upstream: Arc<Upstream>,
    region_monitor: Arc<RegionMonitor>,
    pools: Arc<AdmissionPools>,
    received: Mutex<ReceivedReports>,
}

/// Reports of one instance so far. They outlive a restart of the task that requests them: with sequence numbers that
/// begin again, all reports would be older than the newest one.
#[derive(Default)]
struct ReceivedReports {
    /// Sequence number of the last request.
    requested: u64,
    /// Sequence number of the newest accepted report; an older one that arrives later is ignored.
    newest: u64,
    decoder: ReportDecoder,
    /// Whether the last report was one of another spoke.
    is_foreign: bool,
}

impl ReceivedReports {
    /// Returns the sequence number of the next request, and the state that it names.
    fn next_request(&mut self) -> (u64, Option<KnownState>) {
        self.requested += 1;
        (self.requested, self.decoder.known())
    }

    /// Returns whether a report with this sequence number is the newest response to a request, and records it.
    fn accept(&mut self, sequence: u64) -> bool {
        let is_newest = sequence > self.newest && sequence <= self.requested;
        if is_newest {
            self.newest = sequence;
        }
        is_newest
    }
}

impl ReportReceiver {
    async fn listen(self: Arc<ReportReceiver>) {
        let mut interval = tokio::time::interval(EXCHANGE_PERIOD);
        interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Skip);
        let mut in_flight = JoinSet::new();
        loop {
            interval.tick().await;
            while in_flight.try_join_next().is_some() {}
            if in_flight.len() < EXCHANGES_IN_FLIGHT_MAX {
                in_flight.spawn(contained("report of a region", self.clone().exchange()));
            }
        }
    }

    async fn exchange(self: Arc<ReportReceiver>) {
        let sent_at = Instant::now();
        let desired = self.region_monitor.states().spillover_demand(self.index, Instant::now());
        let (sequence, known) = self.received.lock().next_request();
        let request = ExchangeRequest { gateway: self.gateway.clone(), sequence, known, requested: desired };
        match tokio::time::timeout(EXCHANGE_TIMEOUT, self.send(&ExchangeRequestV1::from(request))).await {
            Ok(Ok((report, round_trip))) => self.accept(report, round_trip, sent_at),
            // The request for the report of a spoke failed (`error`). Without reports for 0.6 s the spoke is suspect.
            Ok(Err(error)) => tracing::debug!(address = %self.key.address, error, "region report failed"),
            // A spoke did not send its report in time. Without reports for 0.6 s it is suspect.
            Err(late) => tracing::debug!(address = %self.key.address, %late, "region report timed out"),
        }
    }

    /// Exchanges a request for a report; returns the report and the round-trip time.
    async fn send(&self, request: &ExchangeRequestV1) -> Result<(ReportV1, Duration), String> {
        let body = Bytes::from(serde_json::to_vec(request).expect("a request serialises to JSON"));
        let mut head = RequestHead::new(UpstreamMethod::Post).for_path(paths::EXCHANGE);
        head.put(HOST.as_str(), AUTHORITY);
        head.put(CONTENT_TYPE.as_str(), "application/json");
        head.put(CONTENT_LENGTH.as_str(), body.len().to_string());
        let received = self.upstream.send_own(&self.key, &head, &body, REPORT_BYTES_MAX).await;
        let (UpstreamResponse { head, body }, round_trip) =
            received.map_err(|failure| format!("{failure:?}"))?;
        match body {
            ResponseBody::Buffered(body) if head.status.is_success() => {
                let report = serde_json::from_slice(&body).map_err(|error| error.to_string())?;
                Ok((report, round_trip))
            }
            ResponseBody::Buffered(_) => Err(format!("the region responded {}", head.status)),
            ResponseBody::Streamed(_) => Err(format!("the report is longer than {REPORT_BYTES_MAX} bytes")),
        }
    }

    fn accept(&self, report: ReportV1, round_trip: Duration, sent_at: Instant) {
        let received = &mut *self.received.lock();
        if !received.accept(report.sequence) {
            return;
        }
        let address = &self.key.address;
        // Until the report is applied there is no state to refer to: whatever goes wrong, the next request asks for all
        // loads.
        let mut decoder = std::mem::take(&mut received.decoder);
        let decoded = match decoder.decode(report) {
            Ok(decoded) => decoded,
            Err(error @ (ReportError::UnknownBase { .. } | ReportError::Outdated { .. })) => {
                // A report is older than the last one, or continues a state that this gateway does not have. The next
                // report replaces it.
                tracing::debug!(%address, %error, "region report ignored");
                received.decoder = decoder;
                return;
            }
            Err(error @ (ReportError::Invalid(_) | ReportError::Checksum { .. })) => {
                // The spoke at this address runs another version. Upgrade the older one.
                return tracing::warn!(%address, %error, "invalid region report rejected");
            }
        };
        let (region, now) = (self.key.region, Instant::now());
        let states = &mut *self.region_monitor.states();
        let id = &states.catalogue.region(region).id;
        let report = &decoded.report;
        let is_foreign = report.instance != self.name || report.region != *id;
        let was_foreign = std::mem::replace(&mut received.is_foreign, is_foreign);
        if is_foreign {
            let (instance, reported) = (&self.name, (&report.region, &report.instance));
            if !was_foreign {
                ForeignReport { region: id, instance, address, reported }.record();
            }
            return;
        }
        // Under the lock of the states, so that changes are applied in the same order everywhere.
        if let Some(combined) = states.reported(self.index, decoded, round_trip, sent_at, now) {
            self.pools.reported(region, &combined);
        }
        received.decoder = decoder;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn late_repeated_and_unrequested_reports_are_ignored_and_numbers_continue() {
        let mut received = ReceivedReports::default();
        assert_eq!([1, 2, 3].map(|_| received.next_request().0), [1, 2, 3]);
        assert!(!received.accept(u64::MAX), "it would make every later report late");
        assert!(received.accept(2) && !received.accept(2) && !received.accept(1));
        assert!(!received.accept(4));
        assert_eq!(received.next_request().0, 4, "a restarted task continues");
        assert!(received.accept(4));
    }
}
