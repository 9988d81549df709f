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
use crate::events::ReportRejected;
use crate::hop::UpstreamKey;
use crate::metrics::{EdgeMetrics, ReportRejection};
use crate::request_head::{AUTHORITY, RequestHead, UpstreamMethod};
use crate::upstream::{ResponseBody, Upstream, UpstreamResponse};
use bytes::Bytes;
use gateway_core::instances::InstanceIndex;
use http::header::{CONTENT_LENGTH, CONTENT_TYPE, HOST};
use regions::id::{InstanceName, RegionId};
use scheduler_api::paths;
use scheduler_api::report::delta::{DecodedReport, ReportDecoder, ReportError};
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

/// Parts of a gateway that a report changes.
#[derive(Clone)]
pub(crate) struct ReportEffects {
    pub(crate) region_monitor: Arc<RegionMonitor>,
    pub(crate) pools: Arc<AdmissionPools>,
    pub(crate) metrics: Arc<EdgeMetrics>,
}

/// Polls the regions of the current route table for ever.
pub(crate) async fn listen(
    config: Arc<EdgeConfig>,
    upstream: Arc<Upstream>,
    mut views: watch::Receiver<Current>,
    effects: ReportEffects,
) {
    let mut receivers: BTreeMap<InstanceIndex, tokio::task::AbortHandle> = BTreeMap::new();
    let mut tasks = JoinSet::new();
    let gateway = Gateway { location: config.region.to_string(), boot_id: rand::random() };
    loop {
        let instances = match &*views.borrow_and_update() {
            Some(view) => effects.region_monitor.states().set_routes(view),
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
                    region: config.catalogue.region(index.region()).id.clone(),
                    name,
                    key: UpstreamKey { region: index.region(), address },
                    gateway: gateway.clone(),
                    upstream: upstream.clone(),
                    effects: effects.clone(),
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
    region: RegionId,
    name: InstanceName,
    key: UpstreamKey,
    gateway: Gateway,
    upstream: Arc<Upstream>,
    effects: ReportEffects,
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
    /// Consecutive reports with a lower state number than an earlier one.
    outdated: usize,
    /// Reason why the last report was rejected.
    rejected: Option<ReportRejection>,
}

/// Rejected report.
#[derive(Debug, PartialEq)]
struct RejectedReport {
    reason: ReportRejection,
    problem: String,
}

impl RejectedReport {
    fn new(reason: ReportRejection, problem: impl std::fmt::Display) -> RejectedReport {
        RejectedReport { reason, problem: problem.to_string() }
    }
}

/// Failed exchange.
enum ExchangeFailure {
    /// There is no report.
    NoReport(String),
    /// There is one, and it cannot be read.
    Unreadable(String),
}

impl ReceivedReports {
    /// Returns the sequence number of the next request, and the state that it names.
    fn next_request(&mut self) -> (u64, Option<KnownState>) {
        self.requested += 1;
        (self.requested, self.decoder.known())
    }

    /// Returns whether a report with this sequence number is the newest response to a request, and records it.
    fn accept(&mut self, sequence: u64) -> Result<bool, RejectedReport> {
        if sequence > self.requested {
            // It would make every later report late.
            let problem = format!("sequence {sequence}, and {} is the last request", self.requested);
            return Err(RejectedReport::new(ReportRejection::Unrequested, problem));
        }
        let is_newest = sequence > self.newest;
        self.newest = self.newest.max(sequence);
        Ok(is_newest)
    }

    /// Decides on a report at the address of this instance of a region: `apply` is called with one that is accepted.
    /// Returns whether it was; late and reordered reports have no effect.
    fn receive(
        &mut self,
        report: ReportV1,
        (region, instance): (&RegionId, &InstanceName),
        apply: impl FnOnce(&DecodedReport),
    ) -> Result<bool, RejectedReport> {
        if !self.accept(report.sequence)? {
            return Ok(false);
        }
        // Until the report is applied there is no state to refer to: whatever goes wrong, the next request asks for all
        // loads.
        let mut decoder = std::mem::take(&mut self.decoder);
        let outdated = std::mem::take(&mut self.outdated);
        let decoded = match decoder.decode(report) {
            Ok(decoded) => decoded,
            // Of the reports that were in flight at once, some may have been computed in another order.
            Err(ReportError::Outdated { .. }) if outdated < EXCHANGES_IN_FLIGHT_MAX => {
                self.outdated = outdated + 1;
                self.decoder = decoder;
                return Ok(false);
            }
            // More of them mean that an earlier number was wrong. It is forgotten, or no report would be accepted again.
            Err(error @ ReportError::Outdated { .. }) => {
                return Err(RejectedReport::new(ReportRejection::Outdated, error));
            }
            Err(ReportError::UnknownBase { .. }) => {
                self.decoder = decoder;
                return Ok(false);
            }
            Err(error @ ReportError::Invalid(_)) => {
                return Err(RejectedReport::new(ReportRejection::Invalid, error));
            }
            Err(error @ ReportError::Checksum { .. }) => {
                return Err(RejectedReport::new(ReportRejection::Checksum, error));
            }
        };
        let (reported, other) = (&decoded.report.region, &decoded.report.instance);
        let reason = match (reported == region, other == instance) {
            (false, _) => ReportRejection::OtherRegion,
            (true, false) => ReportRejection::OtherInstance,
            (true, true) => {
                apply(decoded);
                self.decoder = decoder;
                return Ok(true);
            }
        };
        Err(RejectedReport::new(reason, format!("it is one of {reported} {other}")))
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
        let desired = self.effects.region_monitor.states().spillover_demand(self.index, Instant::now());
        let (sequence, known) = self.received.lock().next_request();
        let request = ExchangeRequest { gateway: self.gateway.clone(), sequence, known, requested: desired };
        match tokio::time::timeout(EXCHANGE_TIMEOUT, self.send(&ExchangeRequestV1::from(request))).await {
            Ok(Ok((report, round_trip))) => self.received(report, round_trip, sent_at),
            Ok(Err(ExchangeFailure::Unreadable(problem))) => {
                let rejected = RejectedReport::new(ReportRejection::Invalid, problem);
                self.rejected(&mut self.received.lock(), &rejected);
            }
            Ok(Err(ExchangeFailure::NoReport(error))) => {
                // The request for the report of a spoke failed (`error`). Without reports for 0.6 s the spoke is suspect.
                tracing::debug!(address = %self.key.address, error, "region report failed");
            }
            // A spoke did not send its report in time. Without reports for 0.6 s it is suspect.
            Err(late) => tracing::debug!(address = %self.key.address, %late, "region report timed out"),
        }
    }

    /// Exchanges a request for a report; returns the report and the round-trip time.
    async fn send(&self, request: &ExchangeRequestV1) -> Result<(ReportV1, Duration), ExchangeFailure> {
        let body = Bytes::from(serde_json::to_vec(request).expect("a request serialises to JSON"));
        let mut head = RequestHead::new(UpstreamMethod::Post).for_path(paths::EXCHANGE);
        head.put(HOST.as_str(), AUTHORITY);
        head.put(CONTENT_TYPE.as_str(), "application/json");
        head.put(CONTENT_LENGTH.as_str(), body.len().to_string());
        let received = self.upstream.send_own(&self.key, &head, &body, REPORT_BYTES_MAX).await;
        let (UpstreamResponse { head, body }, round_trip) =
            received.map_err(|failure| ExchangeFailure::NoReport(format!("{failure:?}")))?;
        match body {
            ResponseBody::Buffered(body) if head.status.is_success() => {
                let report = serde_json::from_slice(&body);
                let report = report.map_err(|error| ExchangeFailure::Unreadable(error.to_string()))?;
                Ok((report, round_trip))
            }
            ResponseBody::Buffered(_) => {
                Err(ExchangeFailure::NoReport(format!("the region responded {}", head.status)))
            }
            ResponseBody::Streamed(_) => {
                Err(ExchangeFailure::Unreadable(format!("it is longer than {REPORT_BYTES_MAX} bytes")))
            }
        }
    }

    fn received(&self, report: ReportV1, round_trip: Duration, sent_at: Instant) {
        let ReportEffects { region_monitor, pools, metrics: _ } = &self.effects;
        let received = &mut *self.received.lock();
        let accepted = received.receive(report, (&self.region, &self.name), |decoded| {
            let states = &mut *region_monitor.states();
            // Under the lock of the states, so that changes are applied in the same order everywhere.
            let combined = states.reported(self.index, decoded, round_trip, sent_at, Instant::now());
            if let Some(combined) = combined {
                pools.reported(self.key.region, &combined);
            }
        });
        match accepted {
            Ok(true) => received.rejected = None,
            // A report is older than the last one, or continues a state that this gateway does not have. The next report
            // replaces it.
            Ok(false) => tracing::debug!(address = %self.key.address, "late report of a region ignored"),
            Err(rejected) => self.rejected(received, &rejected),
        }
    }

    fn rejected(&self, received: &mut ReceivedReports, rejected: &RejectedReport) {
        let RejectedReport { reason, problem } = rejected;
        let is_repeated = received.rejected.replace(*reason) == Some(*reason);
        let (region, instance, address) = (&self.region, &self.name, &self.key.address);
        let event = ReportRejected { region, instance, address, reason: *reason, problem, is_repeated };
        event.record(&self.effects.metrics);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use scheduler_api::report::SpokeReport;
    use scheduler_api::report::delta::ReportEncoder;

    #[test]
    fn late_repeated_and_unrequested_reports_are_ignored_and_numbers_continue() {
        let mut received = ReceivedReports::default();
        assert_eq!([1, 2, 3].map(|_| received.next_request().0), [1, 2, 3]);
        let unrequested = received.accept(u64::MAX).unwrap_err();
        assert_eq!(unrequested.reason, ReportRejection::Unrequested, "it would make every later report late");
        assert_eq!([2, 2, 1].map(|sequence| received.accept(sequence)), [Ok(true), Ok(false), Ok(false)]);
        assert!(received.accept(4).is_err());
        assert_eq!(received.next_request().0, 4, "a restarted task continues");
        assert_eq!(received.accept(4), Ok(true));
    }

    /// Spoke `a` of a region, and what a gateway has received from it.
    struct Scene {
        encoder: ReportEncoder,
        received: ReceivedReports,
        gateway: Gateway,
        accepted: u32,
    }

    impl Scene {
        fn new() -> Scene {
            let gateway = Gateway { location: "aws/us-east-1".to_owned(), boot_id: 1 };
            Scene {
                encoder: ReportEncoder::default(),
                received: ReceivedReports::default(),
                gateway,
                accepted: 0,
            }
        }

        /// Returns the report of the spoke for the next request.
        fn next(&mut self) -> ReportV1 {
            let (sequence, known) = self.received.next_request();
            let loads = [("minilm".parse().unwrap(), Default::default())];
            self.encoder.update(loads.into(), Instant::now());
            let (region, instance) = (region(), instance());
            let report = SpokeReport {
                region,
                instance,
                boot_id: 7,
                sequence,
                draining: false,
                has_jobs: false,
                grants: BTreeMap::new(),
            };
            self.encoder.encode(report, &self.gateway, known)
        }

        fn receive(&mut self, report: ReportV1) -> Result<bool, ReportRejection> {
            let accepted = &mut self.accepted;
            let received = self.received.receive(report, (&region(), &instance()), |_| *accepted += 1);
            received.map_err(|rejected| rejected.reason)
        }
    }

    fn region() -> RegionId {
        "aws/eu-central-1".parse().unwrap()
    }

    fn instance() -> InstanceName {
        "a".parse().unwrap()
    }

    #[test]
    fn a_forged_report_is_rejected_and_changes_nothing() {
        let mut scene = Scene::new();
        let report = scene.next();
        assert_eq!(scene.receive(report), Ok(true));
        type Forgery = fn(&mut ReportV1);
        let forgeries: [(Forgery, ReportRejection); 5] = [
            (|report| report.region = "aws/us-east-1".to_owned(), ReportRejection::OtherRegion),
            (|report| report.instance = "b".to_owned(), ReportRejection::OtherInstance),
            (|report| report.region = "nowhere".to_owned(), ReportRejection::Invalid),
            (|report| report.state.as_mut().unwrap().checksum ^= 1, ReportRejection::Checksum),
            (|report| report.sequence = u64::MAX, ReportRejection::Unrequested),
        ];
        for (forge, reason) in forgeries {
            let mut report = scene.next();
            forge(&mut report);
            let before = scene.accepted;
            assert_eq!(scene.receive(report), Err(reason));
            assert_eq!(scene.accepted, before, "{reason:?}");
            let report = scene.next();
            assert_eq!(scene.receive(report), Ok(true), "the next report after {reason:?} is accepted");
        }
    }

    #[test]
    fn a_jump_of_the_state_number_is_forgotten_after_as_many_reports_as_may_be_in_flight() {
        let mut scene = Scene::new();
        let mut report = scene.next();
        report.state.as_mut().unwrap().number = u64::MAX;
        assert_eq!(scene.receive(report), Ok(true), "the first number may be any");
        for _ in 0..EXCHANGES_IN_FLIGHT_MAX {
            let report = scene.next();
            assert_eq!(scene.receive(report), Ok(false));
        }
        let report = scene.next();
        assert_eq!(scene.receive(report), Err(ReportRejection::Outdated));
        let report = scene.next();
        assert_eq!(scene.receive(report), Ok(true));
        assert_eq!(scene.accepted, 2);
    }
}
