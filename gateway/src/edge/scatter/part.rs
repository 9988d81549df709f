//! One part of a split request: from its body to its part of the joined response.

use super::super::forwarder::AttemptResponse;
use super::super::forwarder::Permit;
use super::super::request::ReceiptIds;
use super::super::request::Request;
use super::super::router::Routable;
use super::super::view::View;
use super::join_buffer::{PART_RESPONSE_BYTES_MAX, ReceivedPart, Source, response_too_large};
use super::split::Splitter;
use crate::body_memory::BufferedBody;
use crate::circuits::random_draw;
use crate::respond::ForwardError;
use crate::respond::{self, Rejection};
use crate::upstream::{ResponseBody, StreamedBody, UpstreamResponse};
use bytes::{Bytes, BytesMut};
use gateway_core::scatter::join::{InvalidResponse, PartialResponse};
use gateway_core::scatter::split::{self, SplittableBody, SubRequest};
use gateway_core::tenant::Cost;
use gateway_core::timing::RegionTiming;
use gateway_core::trail::Trail;
use http::HeaderValue;
use http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use regions::ModelRevision;
use regions::set::RegionIndex;
use replica_api::error::ErrorCode;
use replica_api::headers;
use std::sync::Arc;
use std::time::Instant;
use supervision::task::blocking;
use tokio::sync::OwnedSemaphorePermit;

/// Limit on the bytes of a response that is parsed inline; parsing it takes no longer than handing it to another
/// thread.
const INLINE_PARSE_BYTES_MAX: usize = 64 << 10;

/// Context that all parts of a request share.
#[derive(Clone, Copy)]
pub(super) struct PartContext<'a> {
    pub(super) request: &'a Request,
    pub(super) view: &'a Arc<View>,
    pub(super) splittable: &'a Arc<SplittableBody>,
    /// Source of the receipt identifiers, if the client is to get some.
    pub(super) receipts: Option<&'a ReceiptIds<'a>>,
}

/// Part that is not in flight: not sent yet, or to be retried.
pub(super) struct PendingPart<'t> {
    /// Number of the part, from 0.
    pub(super) number: usize,
    pub(super) sub_request: SubRequest,
    pub(super) trail: &'t mut Trail,
    /// Number of rejections so far; `last_failure` is the last one.
    pub(super) rejections: u32,
    pub(super) last_failure: Option<PartFailure>,
    /// Earliest time of the next attempt.
    pub(super) not_before: Instant,
}

/// Part that has ended, or whose response has started.
pub(super) struct PartProgress<'t> {
    /// Region that it was sent to first.
    pub(super) region: RegionIndex,
    pub(super) pending: PendingPart<'t>,
    pub(super) stage: PartStage,
}

/// Stage that a part has reached.
pub(super) enum PartStage {
    Received(ReceivedPart),
    /// The response is large and is read when the buffer has capacity for it.
    Streaming(StreamingPart),
    Failed(PartFailure),
}

/// Response of which only the head was read.
pub(super) struct StreamingPart {
    source: Source,
    stream: Box<StreamedBody>,
    /// Expected bytes of the body.
    pub(super) bytes: usize,
}

/// Failure of a part; without a successful retry it fails the whole request.
pub(super) enum PartFailure {
    /// Error response of a region.
    Response(Box<AttemptResponse>),
    /// The response of this region was truncated.
    Truncated(RegionIndex),
    /// The part was not forwarded.
    Request(ForwardError),
}

impl From<ForwardError> for PartFailure {
    fn from(error: ForwardError) -> PartFailure {
        PartFailure::Request(error)
    }
}

impl From<Rejection> for PartFailure {
    fn from(refusal: Rejection) -> PartFailure {
        PartFailure::Request(refusal.into())
    }
}

impl Splitter {
    /// Forwards a part, to `region` first. Its response must be of the model revision `required`, if one is given.
    /// Without a `body_permit` it waits for the memory of its body.
    pub(super) async fn forward_pending<'t>(
        &self,
        context: PartContext<'_>,
        pending: PendingPart<'t>,
        region: RegionIndex,
        required: Option<ModelRevision>,
        body_permit: Option<OwnedSemaphorePermit>,
    ) -> PartProgress<'t> {
        let PartContext { request, view, splittable, receipts } = context;
        let sub_request = &pending.sub_request;
        let body_permit = match body_permit {
            Some(body_permit) => body_permit,
            None => {
                self.split_capacity
                    .reserve_body(splittable.body_bytes(request.body.bytes.len(), sub_request))
                    .await
            }
        };
        let body = BufferedBody::piece(splittable.body(&request.body.bytes, sub_request).into(), body_permit);
        let cost = Cost { inputs: sub_request.inputs.len() as u64, tokens: sub_request.tokens };
        let stage = match self
            .forward_part(request, view, (body, cost), region, required, pending.trail)
            .await
        {
            Ok(received) if received.response.head.status.is_success() => {
                let AttemptResponse { response: UpstreamResponse { head, body }, region, waited } = received;
                let text = |name: &str| head.headers.get(name).and_then(|value| value.to_str().ok());
                let attempt = pending.trail.attempts().last();
                // A copy: the received value shares the buffer of the response.
                let content_type = head.headers.get(CONTENT_TYPE);
                let content_type = content_type.and_then(|it| HeaderValue::from_bytes(it.as_bytes()).ok());
                let source = Source {
                    region,
                    content_type,
                    revision: text(headers::MODEL_REVISION).and_then(|revision| revision.parse().ok()),
                    attempts: pending.trail.count(),
                    waited,
                    timing: RegionTiming::parse(text(headers::SERVER_TIMING).unwrap_or_default()),
                    tokens: text(headers::TOKENS).and_then(|tokens| tokens.parse().ok()),
                    receipt: receipts.zip(attempt).map(|(receipts, attempt)| receipts.of(attempt)),
                };
                match body {
                    ResponseBody::Buffered(body) => {
                        self.parse_part(splittable, &pending.sub_request, source, body).await
                    }
                    ResponseBody::Streamed(stream) => {
                        let declared = text(CONTENT_LENGTH.as_str()).and_then(|length| length.parse().ok());
                        let bytes = declared.unwrap_or(PART_RESPONSE_BYTES_MAX);
                        PartStage::Streaming(StreamingPart { source, stream, bytes })
                    }
                }
            }
            Ok(received) => {
                PartStage::Failed(rejected(received, splittable.field, pending.sub_request.inputs.start))
            }
            Err(error) => PartStage::Failed(error.into()),
        };
        PartProgress { region, pending, stage }
    }

    /// Routes a part by the newest route table, `region` first, and forwards it.
    async fn forward_part(
        &self,
        request: &Request,
        view: &Arc<View>,
        (body, cost): (BufferedBody, Cost),
        region: RegionIndex,
        required: Option<ModelRevision>,
        trail: &mut Trail,
    ) -> Result<AttemptResponse, ForwardError> {
        let mut permit = Permit::of(request, view);
        self.policy.renew(request, &mut permit)?;
        let target_draw = random_draw();
        let (routing, allowed) = (request.part_routing_context(cost, target_draw), *permit.allowed);
        let (client, registered) = (request.client, request.registered);
        let part = Routable { view: &permit.view, routing, allowed, registered, client };
        let route = self.router.route_part(&part, region);
        let part = request.part(body, cost, (target_draw, route), required);
        self.forwarder.forward(&part, permit, trail).await
    }

    /// Reads the rest of a response for which the buffer has capacity.
    pub(super) async fn read_streaming<'t>(
        &self,
        context: PartContext<'_>,
        pending: PendingPart<'t>,
        region: RegionIndex,
        streaming: StreamingPart,
    ) -> PartProgress<'t> {
        let StreamingPart { source, mut stream, bytes } = streaming;
        let mut body = BytesMut::with_capacity(bytes);
        let stage = loop {
            match stream.chunk().await {
                Ok(Some(chunk)) if body.len() + chunk.len() <= bytes => body.extend_from_slice(&chunk),
                Ok(Some(_)) => break PartStage::Failed(response_too_large().into()),
                Ok(None) => {
                    stream.finish(&self.upstream);
                    break self
                        .parse_part(context.splittable, &pending.sub_request, source, body.freeze())
                        .await;
                }
                Err(error) => {
                    // The response to a part of a split request ended before it was complete. The part is sent again if
                    // possible.
                    tracing::debug!(%error, "response to a part truncated");
                    break PartStage::Failed(PartFailure::Truncated(source.region));
                }
            }
        };
        PartProgress { region, pending, stage }
    }

    /// Parses the response to a part.
    async fn parse_part(
        &self,
        splittable: &SplittableBody,
        sub_request: &SubRequest,
        source: Source,
        body: Bytes,
    ) -> PartStage {
        let (shape, inputs, large) =
            (splittable.shape, sub_request.inputs.clone(), body.len() > INLINE_PARSE_BYTES_MAX);
        let read = move || PartialResponse::read(shape, &body, inputs.len(), inputs.start);
        let response = if large { blocking(read).await } else { read() };
        match response {
            Ok(part) => PartStage::Received(ReceivedPart { part, source }),
            Err(error) => PartStage::Failed(self.invalid_response(sub_request, source.region, error).into()),
        }
    }

    fn invalid_response(
        &self,
        sub_request: &SubRequest,
        region: RegionIndex,
        error: InvalidResponse,
    ) -> Rejection {
        let region = self.config.catalogue.region(region).id.as_str();
        // A part of a split request got an invalid response (`reason`), and the request failed. Compare the versions of
        // the replicas of this region with the others.
        tracing::error!(region, inputs = ?sub_request.inputs, reason = error.reason, "invalid response of a region to a part of a request");
        let message = format!(
            "The response of region {region} to the inputs {} to {} is not valid: {}.",
            sub_request.inputs.start,
            sub_request.inputs.end - 1,
            error.reason
        );
        Rejection::new(ErrorCode::Internal, message)
    }
}

/// Failure by an error response of a region; the index of its input is changed to that in the whole request.
fn rejected(mut received: AttemptResponse, field: &str, first: usize) -> PartFailure {
    if let ResponseBody::Buffered(body) = &received.response.body {
        let body = split::rebase_input_index(body, field, first);
        respond::put(&mut received.response.head, CONTENT_LENGTH.as_str(), &body.len().to_string());
        received.response.body = ResponseBody::Buffered(body.into());
    }
    PartFailure::Response(Box::new(received))
}
