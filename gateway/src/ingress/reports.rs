//! Reports to gateways: the state of the region, in response to each of their requests.
//!
//! The requests of a gateway are the messages of one request body, and each is responded to by a message of the response
//! body ([`scheduler_api::report::stream`]), one after another. The stream ends when the gateway ends it, is silent, or sends
//! a message that cannot be read, when the ingress closes its connections, and with its connection, for example when the
//! certificate of the gateway is revoked.

use crate::listener::AfterResponse;
use crate::listener::notice::closing;
use crate::metrics::IngressMetrics;
use crate::respond::{self, ForwardError, Rejection};
use bytes::Bytes;
use http::header::{CONTENT_LENGTH, CONTENT_TYPE, TRANSFER_ENCODING};
use pingora::protocols::http::ServerSession;
use replica_api::error::ErrorCode;
use scheduler_api::report::delta::ReportEncoder;
use scheduler_api::report::stream::{
    ExchangeRequestReader, MessageBuffer, MessageError, REQUEST_BYTES_MAX, ReportWriter, STREAMS_MAX,
};
use scheduler_api::report::{EXCHANGE_PERIOD, ExchangeRequest, GATEWAYS_MAX, ReportV1};
use scheduler_core::spoke::Spoke;
use std::sync::Arc;
use std::time::{Duration, Instant};
use supervision::Mutex;
use tokio::sync::Semaphore;

/// Time without a message after which a stream ends: 25 intervals, longer than a gateway keeps a stream that does not
/// respond.
const SILENCE_MAX: Duration = EXCHANGE_PERIOD.saturating_mul(25);
/// Maximum number of streams of all gateways.
pub(super) const ALL_STREAMS_MAX: usize = STREAMS_MAX * GATEWAYS_MAX;

/// Responds to the report requests of gateways.
pub(super) struct ReportExchange {
    spoke: Arc<Mutex<Spoke>>,
    encoder: Mutex<ReportEncoder>,
    /// One permit for each stream that may still be opened.
    streams: Semaphore,
    metrics: Arc<IngressMetrics>,
}

/// Result of waiting for a message.
enum NextRequest {
    Request(ExchangeRequest),
    /// The body has ended, or must not continue.
    Ended,
    /// The message cannot be read.
    Invalid(MessageError),
    /// The connection has failed.
    Disconnected,
}

/// Requests of one stream.
struct GatewayRequests {
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
            tokio::select! {
                biased;
                piece = session.read_request_body() => match piece {
                    Ok(Some(piece)) => self.messages.push(&piece),
                    Ok(None) => self.is_complete = true,
                    Err(error) => {
                        // A gateway disconnected from the stream of reports, or its body is malformed.
                        tracing::debug!(%error, "reading report requests failed");
                        return NextRequest::Disconnected;
                    }
                },
                () = &mut closing => return NextRequest::Ended,
                () = &mut silence => {
                    // A gateway has sent no request for reports for five seconds.
                    tracing::debug!("stream of reports ended after silence");
                    return NextRequest::Ended;
                }
            }
        }
    }
}

impl ReportExchange {
    pub(super) fn new(spoke: Arc<Mutex<Spoke>>, metrics: Arc<IngressMetrics>) -> ReportExchange {
        let (encoder, streams) = (Mutex::new(ReportEncoder::default()), Semaphore::new(ALL_STREAMS_MAX));
        ReportExchange { spoke, encoder, streams, metrics }
    }

    /// Responds to the requests of a gateway with reports of the region, until the stream ends.
    pub(super) async fn respond(&self, session: &mut ServerSession) -> Result<AfterResponse, ForwardError> {
        let _permit = self.streams.try_acquire().map_err(|_| {
            let message = format!(
                "{ALL_STREAMS_MAX} streams of reports are open, the maximum; stop gateways that are not needed."
            );
            Rejection::new(ErrorCode::Overloaded, message)
        })?;
        let (messages, reader) = (MessageBuffer::new(REQUEST_BYTES_MAX), ExchangeRequestReader::default());
        let mut requests = GatewayRequests { messages, reader, is_complete: false };
        let mut request = match requests.next(session).await {
            NextRequest::Request(request) => request,
            NextRequest::Invalid(error) => return Err(invalid(&error).into()),
            NextRequest::Ended => {
                let message = "The body has no exchange request; send one, as a line of JSON.";
                return Err(Rejection::new(ErrorCode::InvalidJson, message).into());
            }
            NextRequest::Disconnected => return Err(ForwardError::ClientDisconnected),
        };
        let mut writer = ReportWriter::default();
        if session.get_header(CONTENT_LENGTH).is_some() {
            // A body of a known length is no stream: one request, and one response.
            let report = self.report(&request);
            return Ok(respond::ok(session, writer.message(&report, None), &[]).await);
        }
        let mut head = respond::head(200, &[]);
        respond::put(&mut head, CONTENT_TYPE.as_str(), "application/x-ndjson");
        if !session.is_http2() {
            // Otherwise the end of the stream would be that of its connection, and no different from a failure.
            respond::put(&mut head, TRANSFER_ENCODING.as_str(), "chunked");
        }
        // Ended streams are rare, and the gateway opens the next one on another connection.
        session.set_keepalive(None);
        if respond::begin(session, head).await.is_err() {
            return Err(ForwardError::ClientDisconnected);
        }
        loop {
            let report = self.report(&request);
            let message = writer.message(&report, request.known);
            if session.write_response_body(message.into(), false).await.is_err() {
                return Err(ForwardError::ClientDisconnected);
            }
            request = match requests.next(session).await {
                NextRequest::Request(request) => request,
                NextRequest::Ended => break,
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
        session.write_response_body(Bytes::new(), true).await.ok();
        Ok(AfterResponse::Close)
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
