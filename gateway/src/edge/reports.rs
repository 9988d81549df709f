//! Requests a report from every spoke instance of every region five times a second.
//!
//! The gateway sends a request and the region responds with its report. So the gateway needs no listener for regions,
//! the time from request to response is the round trip, and a region that is unreachable in either direction sends no
//! reports. Requests are sent at a fixed interval, whether or not earlier ones were responded to: across an ocean two
//! or three are in flight at once, and a stall is detected within one interval. They are the messages of one request that
//! does not end ([`scheduler_api::report::stream`]), on a connection of its own that is authenticated like those of client
//! requests ([`crate::hop`]), so an endpoint that fails to authenticate as the region cannot report for it either. When
//! responses are missing, another stream is opened beside it ([`gateway_core::exchange_streams`]). A report of another region
//! or of another instance, at whose address the spoke of the route table no longer runs, is rejected.
//!
//! ```text
//!  task per instance: opens streams ──▶ task per stream ──┬─ request: a message per interval ──▶ spoke
//!       ▲ which are open, what is in flight                └─ receive: decode, check, apply ◀──── spoke
//!       └─ ReceivedReports ◀──────────────────────────────────┘
//! ```

use super::region_monitor::RegionMonitor;
use super::router::AdmissionPools;
use super::table::Current;
use crate::config::EdgeConfig;
use crate::events::ReportRejected;
use crate::hop::UpstreamKey;
use crate::http1::{DuplexRequest, DuplexResponse};
use crate::metrics::{EdgeMetrics, ReportRejection};
use crate::request_head::{AUTHORITY, RequestHead, UpstreamMethod};
use crate::upstream::Upstream;
use gateway_core::exchange_streams::{EXCHANGES_IN_FLIGHT_MAX, ExchangeResponse, ExchangeStreams, StreamId};
use gateway_core::instances::InstanceIndex;
use http::header::{CONTENT_TYPE, HOST};
use regions::id::{InstanceName, RegionId};
use scheduler_api::paths;
use scheduler_api::report::delta::{DecodedReport, ReportDecoder, ReportError};
use scheduler_api::report::stream::{ExchangeRequestWriter, MessageBuffer, REPORT_BYTES_MAX, ReportReader};
use scheduler_api::report::{EXCHANGE_PERIOD, ExchangeRequest, Gateway, KnownState, ReportV1};
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;
use supervision::Mutex;
use supervision::task::{contained, supervise};
use tokio::sync::{Notify, watch};
use tokio::task::{AbortHandle, JoinSet};

/// Intervals between checks of the connection beside a stream: whether the next request of a client has an open
/// connection, and whether the stream leads to a current address of the instance. Connections are checked for the latter
/// when they are reused, and a stream is not.
const CHECK_INTERVALS: u64 = 5;
/// Rejected reports in a row after which a stream is closed: five seconds. Another connection may lead to another process.
const REJECTED_MAX: usize = 25;

/// Parts of a gateway that a report changes.
#[derive(Clone)]
pub(crate) struct ReportEffects {
    pub(crate) region_monitor: Arc<RegionMonitor>,
    pub(crate) pools: Arc<AdmissionPools>,
    pub(crate) metrics: Arc<EdgeMetrics>,
}

/// Requests reports of the regions of the current route table for ever.
pub(crate) async fn listen(
    config: Arc<EdgeConfig>,
    upstream: Arc<Upstream>,
    mut views: watch::Receiver<Current>,
    effects: ReportEffects,
) {
    let mut receivers: BTreeMap<InstanceIndex, AbortHandle> = BTreeMap::new();
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
                    overdue: Notify::new(),
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
    /// Signal that a response is overdue.
    overdue: Notify,
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
    /// Consecutive reports that were rejected.
    rejections: usize,
    /// Open streams, and the requests in flight on them.
    streams: ExchangeStreams,
    /// Time of the last accepted report.
    accepted_at: Option<Instant>,
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

/// Stream that is open until this is dropped.
struct OpenStream {
    receiver: Arc<ReportReceiver>,
    id: StreamId,
}

impl Drop for OpenStream {
    fn drop(&mut self) {
        self.receiver.received.lock().streams.ended(self.id, Instant::now(), rand::random());
    }
}

/// Why a stream has ended.
enum ReportStreamEnd {
    /// The connection failed, the spoke ended it or rejected the request, or another stream is used.
    Closed(String),
    /// A message cannot be read.
    Unreadable(String),
}

impl ReportStreamEnd {
    fn replaced() -> ReportStreamEnd {
        ReportStreamEnd::Closed("another stream is used".to_owned())
    }
}

impl ReceivedReports {
    /// Returns the sequence number of the next request, and the state that it names.
    fn next_request(&mut self) -> (u64, Option<KnownState>) {
        self.requested += 1;
        (self.requested, self.decoder.known())
    }

    /// Returns the next request on a stream, which is sent `now`; `None` if as many as allowed are in flight.
    fn next_on(&mut self, stream: StreamId, now: Instant) -> Option<(u64, Option<KnownState>)> {
        if !self.streams.may_send(stream) {
            return None;
        }
        let (sequence, known) = self.next_request();
        self.streams.sent(stream, sequence, now);
        Some((sequence, known))
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
            Err(error @ (ReportError::Checksum { .. } | ReportError::GrantsChecksum { .. })) => {
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
    /// Opens streams to the instance, for ever.
    async fn listen(self: Arc<ReportReceiver>) {
        let mut interval = tokio::time::interval(EXCHANGE_PERIOD);
        interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Skip);
        let mut tasks = JoinSet::new();
        let mut streams: BTreeMap<StreamId, AbortHandle> = BTreeMap::new();
        let mut standby: Option<AbortHandle> = None;
        let mut checks = 0_u64;
        loop {
            let is_check = tokio::select! {
                _ = interval.tick() => {
                    checks += 1;
                    checks.is_multiple_of(CHECK_INTERVALS)
                }
                () = self.overdue.notified() => false,
            };
            while tasks.try_join_next().is_some() {}
            let now = Instant::now();
            let (opened, is_healthy) = {
                let received = &mut *self.received.lock();
                let opened = received.streams.tick(now);
                streams.retain(|id, task| {
                    let is_open = received.streams.is_open(*id);
                    if !is_open {
                        task.abort();
                    }
                    is_open
                });
                let age = received.accepted_at.map(|at| now.saturating_duration_since(at));
                (opened, age.is_some_and(|age| age < EXCHANGE_PERIOD * 3))
            };
            if let Some((id, others)) = opened {
                // One that replaces another may use an idle connection; the replacement of that one may not, because those
                // may be stalled as well.
                let may_reuse = others < 2;
                let stream = OpenStream { receiver: self.clone(), id };
                let exchange = async move { stream.exchange(may_reuse).await };
                streams.insert(id, tasks.spawn(contained("report of a region", exchange)));
            }
            if is_check && is_healthy && standby.as_ref().is_none_or(AbortHandle::is_finished) {
                let receiver = self.clone();
                let keep = async move {
                    if let Err(failure) = receiver.upstream.keep_connection(&receiver.key).await {
                        // No idle connection to a region could be opened for the next request.
                        tracing::debug!(address = %receiver.key.address, ?failure, "idle connection not opened");
                    }
                };
                standby = Some(tasks.spawn(contained("idle connection", keep)));
            }
        }
    }

    /// Applies a report, or rejects it.
    ///
    /// # Errors
    ///
    /// When its stream must end.
    fn received(&self, stream: StreamId, report: ReportV1) -> Result<(), ReportStreamEnd> {
        let ReportEffects { region_monitor, pools, metrics: _ } = &self.effects;
        let received = &mut *self.received.lock();
        let now = Instant::now();
        let sent_at = match received.streams.responded(stream, report.sequence, now) {
            ExchangeResponse::Requested(sent_at) => sent_at,
            ExchangeResponse::Closed => return Err(ReportStreamEnd::replaced()),
            ExchangeResponse::Unrequested => {
                let problem = format!("sequence {}, not that of the oldest request", report.sequence);
                self.rejected(received, &RejectedReport::new(ReportRejection::Unrequested, problem));
                return Err(ReportStreamEnd::Closed("a report was not requested".to_owned()));
            }
        };
        let round_trip = now.saturating_duration_since(sent_at);
        let apply = |decoded: &DecodedReport| {
            let states = &mut *region_monitor.states();
            // Under the lock of the states, so that changes are applied in the same order everywhere.
            let combined = states.reported(self.index, decoded, round_trip, sent_at, Instant::now());
            if let Some(combined) = combined {
                pools.reported(self.key.region, &combined);
            }
        };
        match received.receive(report, (&self.region, &self.name), apply) {
            Ok(true) => {
                (received.rejected, received.rejections, received.accepted_at) = (None, 0, Some(now));
                received.streams.keep(stream);
            }
            // A report is older than the last one, or continues a state that this gateway does not have. The next report
            // replaces it.
            Ok(false) => tracing::debug!(address = %self.key.address, "late report of a region ignored"),
            Err(rejected) => {
                self.rejected(received, &rejected);
                received.rejections += 1;
                if received.rejections >= REJECTED_MAX {
                    received.rejections = 0;
                    return Err(ReportStreamEnd::Closed("its reports are rejected".to_owned()));
                }
            }
        }
        Ok(())
    }

    fn rejected(&self, received: &mut ReceivedReports, rejected: &RejectedReport) {
        let RejectedReport { reason, problem } = rejected;
        let is_repeated = received.rejected.replace(*reason) == Some(*reason);
        let (region, instance, address) = (&self.region, &self.name, &self.key.address);
        let event = ReportRejected { region, instance, address, reason: *reason, problem, is_repeated };
        event.record(&self.effects.metrics);
    }
}

impl OpenStream {
    /// Exchanges messages on a stream until its end.
    async fn exchange(self, may_reuse: bool) {
        let receiver = &self.receiver;
        let address = &receiver.key.address;
        let mut head = RequestHead::new(UpstreamMethod::Post).for_path(paths::EXCHANGE);
        head.put(HOST.as_str(), AUTHORITY);
        head.put(CONTENT_TYPE.as_str(), "application/x-ndjson");
        let (request, response) = match receiver.upstream.open_duplex(&receiver.key, &head, may_reuse).await {
            Ok(opened) => opened,
            Err(failure) => {
                // No stream to a spoke could be opened (`failure`). Without reports for 0.6 s the spoke is suspect.
                return tracing::debug!(%address, ?failure, "region report failed");
            }
        };
        let remote = response.remote;
        if response.is_reused {
            receiver.received.lock().streams.reuses_connection(self.id);
        }
        let end = tokio::select! {
            end = self.send_requests(request, remote) => end,
            end = self.receive_reports(response) => end,
        };
        match end {
            ReportStreamEnd::Closed(reason) => {
                // The stream of reports of a spoke has ended (`reason`), and another one is opened within an interval, or
                // within a second if several have ended soon, unless there is one. Without reports for 0.6 s the spoke is suspect.
                tracing::debug!(%address, reason, "region report stream ended");
            }
            ReportStreamEnd::Unreadable(problem) => {
                let rejected = RejectedReport::new(ReportRejection::Invalid, problem);
                receiver.rejected(&mut receiver.received.lock(), &rejected);
            }
        }
    }

    /// Sends a request per interval; returns when the stream must end.
    async fn send_requests(&self, mut request: DuplexRequest, remote: IpAddr) -> ReportStreamEnd {
        let ReportReceiver { index, key, gateway, upstream, effects, received, .. } = &*self.receiver;
        let mut interval = tokio::time::interval(EXCHANGE_PERIOD);
        interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Skip);
        let mut writer = ExchangeRequestWriter::default();
        let mut tick = 0_u64;
        loop {
            self.next_interval(&mut interval).await;
            tick += 1;
            if tick.is_multiple_of(CHECK_INTERVALS) && !upstream.is_current(key, remote) {
                return ReportStreamEnd::Closed("the instance has another address".to_owned());
            }
            let requested = effects.region_monitor.states().spillover_demand(*index, Instant::now());
            let next = {
                let received = &mut *received.lock();
                if !received.streams.is_open(self.id) {
                    return ReportStreamEnd::replaced();
                }
                received.next_on(self.id, Instant::now())
            };
            let Some((sequence, known)) = next else { continue };
            let message =
                writer.message(ExchangeRequest { gateway: gateway.clone(), sequence, known, requested });
            if let Err(error) = request.send(&message).await {
                return ReportStreamEnd::Closed(error.to_string());
            }
        }
    }

    /// Waits for the next interval. If a response is overdue before, another stream is opened.
    async fn next_interval(&self, interval: &mut tokio::time::Interval) {
        let overdue_at = self.receiver.received.lock().streams.overdue_at(self.id);
        let Some(overdue_at) = overdue_at else {
            interval.tick().await;
            return;
        };
        tokio::select! {
            _ = interval.tick() => return,
            () = tokio::time::sleep_until(overdue_at.into()) => self.receiver.overdue.notify_one(),
        }
        interval.tick().await;
    }

    /// Receives reports until the end of the response.
    async fn receive_reports(&self, mut response: DuplexResponse) -> ReportStreamEnd {
        let head = match response.head().await {
            Ok(head) if head.status.is_success() => head,
            Ok(head) => return ReportStreamEnd::Closed(format!("the region responded {}", head.status)),
            Err(error) => return ReportStreamEnd::Closed(error.to_string()),
        };
        drop(head);
        let (mut messages, mut reader) = (MessageBuffer::new(REPORT_BYTES_MAX), ReportReader::default());
        loop {
            match response.piece().await {
                Ok(Some(piece)) => messages.push(&piece),
                Ok(None) => return ReportStreamEnd::Closed("the region ended it".to_owned()),
                Err(error) => return ReportStreamEnd::Closed(error.to_string()),
            }
            loop {
                let report = match messages.take() {
                    Ok(Some(message)) => reader.read(&message),
                    Ok(None) => break,
                    Err(error) => Err(error),
                };
                let received = match report {
                    Ok(report) => self.receiver.received(self.id, report),
                    Err(error) => Err(ReportStreamEnd::Unreadable(error.to_string())),
                };
                if let Err(end) = received {
                    return end;
                }
            }
        }
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
