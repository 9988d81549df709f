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
use gateway_core::exchange_streams::EXCHANGES_IN_FLIGHT_MAX;
use http::header::{CONTENT_LENGTH, CONTENT_TYPE, TRANSFER_ENCODING};
use pingora::protocols::http::ServerSession;
use replica_api::error::ErrorCode;
use scheduler_api::report::delta::ReportEncoder;
use scheduler_api::report::stream::{
    ExchangeRequestReader, MessageBuffer, MessageError, REQUEST_BYTES_MAX, ReportWriter,
};
use scheduler_api::report::{EXCHANGE_PERIOD, ExchangeRequest, ReportV1};
use scheduler_core::spoke::Spoke;
use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::{Duration, Instant};
use supervision::Mutex;

/// Time without a message after which a stream ends, and time in which the gateway must read a report: 25 intervals, longer
/// than a gateway keeps a stream that does not respond.
const SILENCE_MAX: Duration = EXCHANGE_PERIOD.saturating_mul(25);
/// Time for the report that is being written when the ingress closes its connections. A gateway that reads needs a round trip or
/// two for a large one.
const LAST_WRITE: Duration = Duration::from_secs(1);
/// Maximum rate of the reports of a stream, twice that of a gateway: on average one per half an interval, and at once as many as a
/// gateway has in flight, which arrive together after a delay on the path.
const REPORT_RATE: RateQuota = RateQuota {
    units: NonZeroU64::new(EXCHANGES_IN_FLIGHT_MAX as u64).expect("requests may be in flight"),
    period: EXCHANGE_PERIOD.saturating_mul(EXCHANGES_IN_FLIGHT_MAX as u32 / 2),
};

/// Responds to the report requests of gateways.
pub(super) struct ReportExchange {
    spoke: Arc<Mutex<Spoke>>,
    encoder: Mutex<ReportEncoder>,
    streams: ReportStreams,
    metrics: Arc<IngressMetrics>,
}

/// Result of waiting for a message.
enum NextRequest {
    Request(ExchangeRequest),
    /// The body has ended, or must not continue.
    Ended,
    /// The message cannot be read.
    Invalid(MessageError),
    /// A limit is reached.
    Exceeded(StreamsExceeded),
    /// The connection has failed.
    Disconnected,
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
                return NextRequest::Ended;
            }
            if self.stream.replaced().now_or_never().is_some() {
                return NextRequest::Exceeded(StreamsExceeded::GatewayStreams);
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
                () = &mut closing => return NextRequest::Ended,
                () = self.stream.replaced() => return NextRequest::Exceeded(StreamsExceeded::GatewayStreams),
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
                    return NextRequest::Ended;
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
        ReportExchange { spoke, encoder: Mutex::default(), streams: ReportStreams::default(), metrics }
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
            NextRequest::Disconnected => return Err(ForwardError::ClientDisconnected),
        };
        requests.stream.identify(&request.gateway).map_err(|exceeded| self.rejection(exceeded))?;
        if session.get_header(CONTENT_LENGTH).is_some() {
            // A body of a known length is no stream: one request, and one response.
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
        loop {
            let message: Bytes = writer.message(&self.report(&request), request.known).into();
            drop(request);
            let bytes = requests.kept_bytes() + writer.kept_bytes() + message.len();
            if let Err(exceeded) = requests.stream.hold(bytes) {
                self.exceeded(exceeded);
                break;
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
                NextRequest::Ended => break,
                NextRequest::Exceeded(exceeded) => {
                    self.exceeded(exceeded);
                    break;
                }
                NextRequest::Invalid(error) => {
                    // A gateway sent an invalid message after valid ones: it has another version, or a defect. Its stream
                    // ends, and it opens another one.
                    tracing::debug!(%error, "report request rejected");
                    break;
                }
                NextRequest::Disconnected => return Err(ForwardError::ClientDisconnected),
            };
        }
        // The gateway may have disconnected.
        let (closing, end) = (closing(session), session.write_response_body(Bytes::new(), true));
        self.written(end, closing, &requests.stream).await;
        Ok(AfterResponse::Close)
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
                () = stream.replaced() => ReportStreamLimit::GatewayStreams,
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
        self.metrics.report_stream_limits.count(match exceeded {
            StreamsExceeded::Streams => ReportStreamLimit::Streams,
            StreamsExceeded::GatewayStreams => ReportStreamLimit::GatewayStreams,
            StreamsExceeded::GatewayBytes => ReportStreamLimit::GatewayBytes,
            StreamsExceeded::AllBytes => ReportStreamLimit::Bytes,
        });
        // A gateway has newer streams, or a spoke has too many, or their messages need too much memory (`exceeded`).
        tracing::debug!(%exceeded, "stream of reports rejected");
    }

    /// Returns the rejection of a stream because of a limit.
    fn rejection(&self, exceeded: StreamsExceeded) -> Rejection {
        self.exceeded(exceeded);
        Rejection::new(ErrorCode::Overloaded, format!("No report: {exceeded}."))
    }

    /// Returns the report for a request.
    fn report(&self, request: &ExchangeRequest) -> ReportV1 {
        self.metrics.exchanges.add(1);
        let now = Instant::now();
        let needs_loads = self.encoder.lock().needs_loads(now);
        let (report, loads) = {
            let mut spoke = self.spoke.lock();
            (spoke.exchange(request, now), needs_loads.then(|| spoke.loads(now)))
        };
        // Not under the lock of the spoke, which every request takes: an update compares the loads of all deployments.
        let report = {
            let mut encoder = self.encoder.lock();
            if let Some(loads) = loads {
                encoder.update(loads, now);
            }
            encoder.encode(report, &request.gateway, request.known)
        };
        self.metrics.loads_sent.add(report.deployments.len() as u64);
        report
    }
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
