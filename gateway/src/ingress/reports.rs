//! Reports to gateways: the state of the region, in response to each of their requests.
//!
//! The requests of a gateway are the messages of one request body, and each is responded to by a message of the response
//! body ([`scheduler_api::report::stream`]), one after another and at a limited rate. The stream ends when the gateway ends it,
//! is silent, does not read, or sends a message that cannot be read; when the gateway has newer ones, or its messages need too
//! much memory ([`super::report_streams`]); when the ingress closes its connections; and with its connection, for example
//! when the certificate of the gateway is revoked.

use super::report_streams::{ReportStream, ReportStreams, StreamsExceeded};
use crate::listener::AfterResponse;
use crate::listener::notice::closing;
use crate::metrics::{IngressMetrics, ReportStreamLimit};
use crate::respond::{self, ForwardError, Rejection};
use bytes::Bytes;
use futures_util::FutureExt;
use gateway_core::bucket::{RateQuota, Shortfall, TokenBucket};
use gateway_core::exchange_streams::{EXCHANGE_TIMEOUT, EXCHANGES_IN_FLIGHT_MAX};
use http::header::{CONTENT_LENGTH, CONTENT_TYPE, TRANSFER_ENCODING};
use pingora::protocols::http::ServerSession;
use replica_api::error::ErrorCode;
use scheduler_api::report::delta::ReportEncoder;
use scheduler_api::report::stream::{
    ExchangeRequestReader, LOAD_BYTES_MAX, MessageBuffer, MessageError, REQUEST_BYTES_MAX, ReportWriter,
};
use scheduler_api::report::{EXCHANGE_PERIOD, ExchangeRequest, ReportV1};
use scheduler_core::spoke::Spoke;
use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::{Duration, Instant};
use supervision::{Mutex, MutexGuard};

/// Time without a message after which a stream ends, and time in which the gateway must read a report: 25 intervals, longer
/// than a gateway keeps a stream that does not respond.
const SILENCE_MAX: Duration = EXCHANGE_PERIOD.saturating_mul(25);
/// Time for the report that is being written when the ingress closes its connections. A gateway that reads needs a round trip or
/// two for a large one.
const LAST_WRITE: Duration = Duration::from_secs(1);
/// Time for which a report waits for its memory, after which its gateway has closed the stream.
const MEMORY_WAIT_MAX: Duration = EXCHANGE_TIMEOUT;
const _: () =
    assert!(MEMORY_WAIT_MAX.as_millis() < SILENCE_MAX.as_millis(), "the gateway still reads the report");
/// Maximum rate of the reports of a stream, twice that of a gateway: on average one per half an interval, and at once as many as a
/// gateway has in flight, which arrive together after a delay on the path.
const REPORT_RATE: RateQuota = RateQuota {
    units: NonZeroU64::new(EXCHANGES_IN_FLIGHT_MAX as u64).expect("requests may be in flight"),
    period: EXCHANGE_PERIOD.saturating_mul(EXCHANGES_IN_FLIGHT_MAX as u32 / 2),
};

/// Responds to the report requests of gateways.
pub(super) struct ReportExchange {
    spoke: Arc<Mutex<Spoke>>,
    /// Boot id of the spoke.
    boot_id: u64,
    encoder: Mutex<ReportEncoder>,
    streams: ReportStreams,
    metrics: Arc<IngressMetrics>,
}

/// Result of waiting for a message.
enum NextRequest {
    Request(ExchangeRequest),
    /// The body has ended.
    Ended,
    /// The ingress closes its connections.
    Closing,
    /// No message has arrived in time.
    Silent,
    /// The message cannot be read.
    Invalid(MessageError),
    /// A limit is reached.
    Exceeded(StreamsExceeded),
    /// The connection has failed.
    Disconnected,
}

/// Result of waiting for the memory of a report.
enum Reserved {
    Memory,
    /// The ingress closes its connections.
    Closing,
    /// A limit is reached.
    Exceeded(StreamsExceeded),
}

/// Requests of one stream.
struct GatewayRequests {
    stream: ReportStream,
    messages: MessageBuffer,
    reader: ExchangeRequestReader,
    /// Whether all pieces of the body have been received.
    is_complete: bool,
}

impl GatewayRequests {
    /// Waits for the next request.
    async fn next(&mut self, session: &mut ServerSession) -> NextRequest {
        let closing = closing(session);
        let silence = tokio::time::sleep(SILENCE_MAX);
        tokio::pin!(closing, silence);
        loop {
            // Also while requests are buffered.
            if closing.as_mut().now_or_never().is_some() {
                return NextRequest::Closing;
            }
            if let Some(exceeded) = self.stream.replaced().now_or_never() {
                return NextRequest::Exceeded(exceeded);
            }
            let message = match self.messages.take() {
                Ok(None) if self.is_complete => self.messages.take_rest(),
                Ok(message) => message,
                Err(error) => return NextRequest::Invalid(error),
            };
            match message.map(|message| self.reader.read(&message)) {
                Some(Ok(request)) => return NextRequest::Request(request),
                Some(Err(error)) => return NextRequest::Invalid(error),
                None if self.is_complete => return NextRequest::Ended,
                None => {}
            }
            if let Err(exceeded) = self.stream.hold(self.kept_bytes()) {
                return NextRequest::Exceeded(exceeded);
            }
            tokio::select! {
                biased;
                () = &mut closing => return NextRequest::Closing,
                exceeded = self.stream.replaced() => return NextRequest::Exceeded(exceeded),
                piece = session.read_request_body() => match piece {
                    Ok(Some(piece)) => self.messages.push(&piece),
                    Ok(None) => self.is_complete = true,
                    Err(error) => {
                        // A gateway disconnected from the stream of reports, or its body is malformed.
                        tracing::debug!(%error, "reading report requests failed");
                        return NextRequest::Disconnected;
                    }
                },
                () = &mut silence => {
                    // A gateway has sent no request for reports for five seconds.
                    tracing::debug!("stream of reports ended after silence");
                    return NextRequest::Silent;
                }
            }
        }
    }

    /// Returns the bytes of what has arrived, and of what the next request may refer to.
    fn kept_bytes(&self) -> usize {
        self.messages.buffered() + self.reader.kept_bytes()
    }
}

impl ReportExchange {
    pub(super) fn new(spoke: Arc<Mutex<Spoke>>, metrics: Arc<IngressMetrics>) -> ReportExchange {
        let boot_id = spoke.lock().boot_id();
        ReportExchange {
            spoke,
            boot_id,
            encoder: Mutex::default(),
            streams: ReportStreams::default(),
            metrics,
        }
    }

    /// Responds to the requests of a gateway with reports of the region, until the stream ends.
    pub(super) async fn respond(&self, session: &mut ServerSession) -> Result<AfterResponse, ForwardError> {
        let stream = self.streams.open(session).map_err(|exceeded| self.rejection(exceeded))?;
        let (messages, reader) = (MessageBuffer::new(REQUEST_BYTES_MAX), ExchangeRequestReader::default());
        let mut requests = GatewayRequests { stream, messages, reader, is_complete: false };
        let request = match requests.next(session).await {
            NextRequest::Request(request) => request,
            NextRequest::Invalid(error) => return Err(invalid(&error).into()),
            NextRequest::Exceeded(exceeded) => return Err(self.rejection(exceeded).into()),
            NextRequest::Ended => {
                let message = "The body has no exchange request; send one, as a line of JSON.";
                return Err(Rejection::new(ErrorCode::InvalidJson, message).into());
            }
            NextRequest::Closing => return Err(draining().into()),
            NextRequest::Silent => {
                let message = format!("No complete exchange request arrived within {SILENCE_MAX:?}.");
                return Err(Rejection::new(ErrorCode::BodyTimeout, message).into());
            }
            NextRequest::Disconnected => return Err(ForwardError::ClientDisconnected),
        };
        requests.stream.identify(&request.gateway).map_err(|exceeded| self.rejection(exceeded))?;
        if session.get_header(CONTENT_LENGTH).is_some() {
            // A body of a known length is no stream: one request, and one response.
            match self.reserve(session, &mut requests, &request).await {
                Reserved::Memory => {}
                Reserved::Closing => return Err(draining().into()),
                Reserved::Exceeded(exceeded) => return Err(self.rejection(exceeded).into()),
            }
            let message = ReportWriter::default().message(&self.report(&request), None);
            let bytes = requests.kept_bytes() + message.len();
            requests.stream.hold(bytes).map_err(|exceeded| self.rejection(exceeded))?;
            let (closing, ok) = (closing(session), respond::ok(session, message, &[]));
            return Ok(self.written(ok, closing, &requests.stream).await.unwrap_or(AfterResponse::Close));
        }
        let mut head = respond::head(200, &[]);
        respond::put(&mut head, CONTENT_TYPE.as_str(), "application/x-ndjson");
        if !session.is_http2() {
            // Otherwise the end of the stream would be that of its connection, and no different from a failure.
            respond::put(&mut head, TRANSFER_ENCODING.as_str(), "chunked");
        }
        // Ended streams are rare, and the gateway opens the next one on another connection.
        session.set_keepalive(None);
        let (closing, begin) = (closing(session), respond::begin(session, head));
        match self.written(begin, closing, &requests.stream).await {
            Some(Ok(())) => self.exchange(session, &mut requests, request).await,
            Some(Err(_)) => Err(ForwardError::ClientDisconnected),
            None => Ok(AfterResponse::Close),
        }
    }

    /// Responds to `request` and to those after it, after the head of the response.
    async fn exchange(
        &self,
        session: &mut ServerSession,
        requests: &mut GatewayRequests,
        mut request: ExchangeRequest,
    ) -> Result<AfterResponse, ForwardError> {
        let mut writer = ReportWriter::default();
        let mut rate = TokenBucket::new(REPORT_RATE, Instant::now());
        let exceeded = loop {
            match self.reserve(session, requests, &request).await {
                Reserved::Memory => {}
                Reserved::Closing => break None,
                Reserved::Exceeded(exceeded) => break Some(exceeded),
            }
            let message: Bytes = writer.message(&self.report(&request), request.known).into();
            drop(request);
            let bytes = requests.kept_bytes() + writer.kept_bytes() + message.len();
            if let Err(exceeded) = requests.stream.hold(bytes) {
                break Some(exceeded);
            }
            let (closing, write) = (closing(session), session.write_response_body(message, false));
            match self.written(write, closing, &requests.stream).await {
                Some(Ok(())) => {}
                Some(Err(_)) => return Err(ForwardError::ClientDisconnected),
                None => return Ok(AfterResponse::Close),
            }
            rate.take(1, Instant::now());
            if let Err(Shortfall::NotYet { wait }) = rate.check(1, Instant::now()) {
                // At most half an interval. Until then nothing is read from the gateway.
                tokio::time::sleep(wait).await;
            }
            request = match requests.next(session).await {
                NextRequest::Request(request) => request,
                NextRequest::Ended | NextRequest::Closing | NextRequest::Silent => break None,
                NextRequest::Exceeded(exceeded) => break Some(exceeded),
                NextRequest::Invalid(error) => {
                    // A gateway sent an invalid message after valid ones: it has another version, or a defect. Its stream
                    // ends, and it opens another one.
                    tracing::debug!(%error, "report request rejected");
                    break None;
                }
                NextRequest::Disconnected => return Err(ForwardError::ClientDisconnected),
            };
        };
        // The gateway may have disconnected.
        let (closing, end) = (closing(session), session.write_response_body(Bytes::new(), true));
        match exceeded {
            // It may not read, and is counted once: its end is written if the socket has space for it.
            Some(exceeded) => {
                self.exceeded(exceeded);
                end.now_or_never();
            }
            None => drop(self.written(end, closing, &requests.stream).await),
        }
        Ok(AfterResponse::Close)
    }

    /// Waits for the memory of a report before it is made. After a restart of the spoke all gateways request complete reports
    /// at once, and a report without memory would be made for nothing.
    async fn reserve(
        &self,
        session: &ServerSession,
        requests: &mut GatewayRequests,
        request: &ExchangeRequest,
    ) -> Reserved {
        let bytes = requests.kept_bytes() + self.report_bytes(request);
        let Err(exceeded) = requests.stream.hold(bytes) else { return Reserved::Memory };
        let (closing, replaced) = (closing(session), requests.stream.replaced());
        tokio::select! {
            biased;
            () = closing => Reserved::Closing,
            replaced = replaced => Reserved::Exceeded(replaced),
            held = requests.stream.hold_when_available(bytes) => match held {
                Ok(()) => {
                    // The loads are those of the time before the wait.
                    drop(self.update_loads(Instant::now()));
                    Reserved::Memory
                }
                Err(exceeded) => Reserved::Exceeded(exceeded),
            },
            () = tokio::time::sleep(MEMORY_WAIT_MAX) => Reserved::Exceeded(exceeded),
        }
    }

    /// Updates the loads, and returns an estimate of the bytes of the report for a request, which is at least those of its loads.
    fn report_bytes(&self, request: &ExchangeRequest) -> usize {
        let encoder = self.update_loads(Instant::now());
        encoder.changed_loads(request.known, self.boot_id) * LOAD_BYTES_MAX
    }

    /// Performs a write; returns `None` if it takes too long, so that a gateway that does not read keeps neither the memory of its
    /// reports nor a draining ingress. The connection must be closed then.
    async fn written<T>(
        &self,
        write: impl Future<Output = T>,
        closing: impl Future<Output = ()>,
        stream: &ReportStream,
    ) -> Option<T> {
        let limit = async {
            tokio::select! {
                exceeded = stream.replaced() => exceeded.limit(),
                () = tokio::time::sleep(SILENCE_MAX) => ReportStreamLimit::WriteTime,
                () = async { closing.await; tokio::time::sleep(LAST_WRITE).await } => ReportStreamLimit::WriteTime,
            }
        };
        tokio::select! {
            biased;
            written = write => Some(written),
            limit = limit => {
                self.metrics.report_stream_limits.count(limit);
                // A gateway did not read its reports in time, or has opened newer streams (`limit`), and its stream was closed.
                tracing::debug!(limit = limit.as_str(), "stream of reports closed");
                None
            }
        }
    }

    /// Counts a stream that ends, or is rejected, because of a limit.
    fn exceeded(&self, exceeded: StreamsExceeded) {
        self.metrics.report_stream_limits.count(exceeded.limit());
        // A gateway has newer streams, or a spoke has too many, or their messages need too much memory (`exceeded`).
        tracing::debug!(%exceeded, "stream of reports rejected");
    }

    /// Returns the rejection of a stream because of a limit.
    fn rejection(&self, exceeded: StreamsExceeded) -> Rejection {
        self.exceeded(exceeded);
        Rejection::new(ErrorCode::Overloaded, format!("No report: {exceeded}."))
    }

    /// Returns the report for a request, after [`ReportExchange::reserve`], which updates the loads.
    fn report(&self, request: &ExchangeRequest) -> ReportV1 {
        self.metrics.exchanges.add(1);
        let now = Instant::now();
        let report = self.spoke.lock().exchange(request, now);
        let report = self.encoder.lock().encode(report, &request.gateway, request.known);
        self.metrics.loads_sent.add(report.deployments.len() as u64);
        report
    }

    /// Computes the loads of all deployments if they are too old for the next report. Returns the encoder with them.
    fn update_loads(&self, now: Instant) -> MutexGuard<'_, ReportEncoder> {
        let encoder = self.encoder.lock();
        if !encoder.needs_loads(now) {
            return encoder;
        }
        drop(encoder);
        let loads = self.spoke.lock().loads(now);
        // Not under the lock of the spoke, which every request takes: an update compares the loads of all deployments.
        let mut encoder = self.encoder.lock();
        encoder.update(loads, now);
        encoder
    }
}

/// Returns the rejection of a stream by an ingress that closes its connections.
fn draining() -> Rejection {
    Rejection::new(ErrorCode::Draining, "The spoke is stopping; use another one of the region.")
}

/// Returns the rejection of the first message of a stream.
fn invalid(error: &MessageError) -> Rejection {
    let code = match error {
        MessageError::Json(_) => ErrorCode::InvalidJson,
        MessageError::Invalid(_) => ErrorCode::InvalidValue,
        MessageError::TooLong(_) => ErrorCode::BodyTooLarge,
    };
    Rejection::new(code, format!("Invalid exchange request: {error}."))
}
