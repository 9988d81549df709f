//! Responses to clients: those of regions, those that the gateway makes itself, and the headers of both.

use super::forwarder::AttemptResponse;
use super::request::Request;
use super::request::RequestContext;
use super::scatter::join_buffer::JoinedHead;
use super::tenant_limiters::TokenReservation;
use crate::compress;
use crate::config::EdgeConfig;
use crate::events::RequestTimes;
use crate::listener::notice::{AfterResponse, apply_drain_notice};
use crate::metrics::RequestOutcome;
use crate::names;
use crate::relay;
use crate::respond::{self, Rejection};
use crate::upstream::{Upstream, UpstreamResponse};
use bytes::Bytes;
use gateway_core::cors::ResponseHeaders;
use gateway_core::decimal;
use gateway_core::endpoint::{Endpoint, NotServed};
use gateway_core::timing::RegionTiming;
use http::header::{ACCESS_CONTROL_REQUEST_HEADERS, ACCESS_CONTROL_REQUEST_METHOD, ORIGIN};
use http::header::{CONTENT_LENGTH, CONTENT_TYPE, TRANSFER_ENCODING};
use http::{Method, Version};
use pingora::protocols::http::ServerSession;
use replica_api::headers;
use std::sync::Arc;

/// Writes responses to clients.
pub(super) struct Responder {
    pub(super) config: Arc<EdgeConfig>,
    pub(super) upstream: Arc<Upstream>,
}

impl Responder {
    /// CORS headers for the response to the page that sent the request.
    pub(super) fn cors(&self, session: &ServerSession) -> ResponseHeaders {
        let Some(cors) = &self.config.cors else { return ResponseHeaders::new() };
        cors.response(session.get_header(ORIGIN).map(http::HeaderValue::as_bytes))
    }

    /// Headers of the response to a CORS preflight of a served path; `None` if the request is not a preflight or the
    /// origin is not allowed.
    pub(super) fn preflight(&self, session: &ServerSession, path: &str) -> Option<ResponseHeaders> {
        let cors = self.config.cors.as_ref()?;
        if session.req_header().method != Method::OPTIONS {
            return None;
        }
        session.get_header(ACCESS_CONTROL_REQUEST_METHOD)?;
        let method = match Endpoint::of(Method::OPTIONS.as_str(), path) {
            Err(NotServed::Method(method)) => method,
            Err(NotServed::Path) | Ok(_) => return None,
        };
        let requested = session.get_header(ACCESS_CONTROL_REQUEST_HEADERS).map(http::HeaderValue::as_bytes);
        cors.preflight(session.get_header(ORIGIN)?.as_bytes(), method, requested)
    }

    /// Responds with a body that the gateway makes itself.
    pub(super) async fn local(&self, session: &mut ServerSession, body: Vec<u8>, id: &str) -> AfterResponse {
        let cors = self.cors(session);
        let mut extra = vec![(headers::REQUEST_ID, id)];
        extra.extend(cors.iter().map(|(name, value)| (*name, value.as_str())));
        respond::ok(session, body, &extra).await
    }

    /// Rejects a request.
    pub(super) async fn refuse(
        &self,
        session: &mut ServerSession,
        refusal: &Rejection,
        context: &mut RequestContext<'_>,
    ) -> AfterResponse {
        let attempts = context.trail.count().to_string();
        let parts = Some(context.trail.parts()).filter(|parts| *parts > 1).map(|n| n.to_string());
        let receipt = context.receipt().map(|id| id.text());
        let mut extra = vec![(headers::REQUEST_ID, context.id.as_str()), (headers::ATTEMPTS, &attempts)];
        extra.extend(parts.as_deref().map(|parts| (headers::PARTS, parts)));
        extra.extend(receipt.as_deref().map(|id| (headers::RECEIPT, id)));
        let cors = self.cors(session);
        extra.extend(cors.iter().map(|(name, value)| (*name, value.as_str())));
        let after = respond::reject(session, refusal, &extra).await;
        context.outcome = RequestOutcome::of_session(session);
        after
    }

    /// Relays the response of a region.
    pub(super) async fn relay(
        &self,
        session: &mut ServerSession,
        request: &Request,
        reservation: &mut TokenReservation,
        received: AttemptResponse,
        context: &mut RequestContext<'_>,
    ) -> AfterResponse {
        let AttemptResponse { response, region, waited } = received;
        let timing = RegionTiming::parse(text(&response, headers::SERVER_TIMING).unwrap_or_default());
        let times = RequestTimes { to_head: request.arrived.elapsed(), waited, region: timing };
        context.served_by = Some((region, times));
        if response.head.status.is_success() {
            context.tokens = text(&response, headers::TOKENS).and_then(|tokens| tokens.parse().ok());
            reservation.record_usage(context.tokens);
        }
        let timing = timing.gateway_header(times.to_head, waited);
        let region = self.config.catalogue.region(region).id.as_str();
        let attempts = decimal::text(|text| decimal::push(text, context.trail.count() as u64));
        let receipt = context.receipt().map(|id| id.text());
        let left = reservation.headers();
        let mut extra = vec![
            (headers::REQUEST_ID, request.id.as_str()),
            (headers::REGION, region),
            (headers::ATTEMPTS, &attempts),
            (headers::SERVER_TIMING, &timing),
        ];
        if request.priority_changed {
            extra.push((headers::PRIORITY, request.priority.as_str()));
        }
        extra.extend(receipt.as_deref().map(|id| (headers::RECEIPT, id)));
        let cors = self.cors(session);
        extra.extend(cors.iter().map(|(name, value)| (*name, value.as_str())));
        extra.extend(left.iter().map(|(name, value)| (*name, value.as_str())));
        let response = compress::compress_response(session, response, self.config.gzip_min_bytes).await;
        let after = relay::forward_response(session, response, &self.upstream, &extra).await;
        context.outcome = match after {
            AfterResponse::Reuse => RequestOutcome::of_session(session),
            AfterResponse::Close => RequestOutcome::of_session(session).truncated(),
        };
        after
    }

    /// Begins the response to a split request.
    pub(super) async fn begin_joined(
        &self,
        session: &mut ServerSession,
        request: &Request,
        reservation: &TokenReservation,
        head: JoinedHead,
    ) -> pingora::Result<()> {
        let JoinedHead {
            length,
            content_type,
            revision,
            regions,
            attempts,
            parts,
            tokens,
            slowest: (waited, timing),
        } = head;
        // One receipt of each region that responded, in their order; the other receipts of the request share its
        // identifier.
        let receipts: Vec<_> =
            regions.iter().filter_map(|(_, receipt)| receipt.map(|id| id.to_string())).collect();
        let receipts = receipts.join(",");
        let id = |(region, _)| self.config.catalogue.region(region).id.as_str();
        let regions = regions.into_iter().map(id).collect::<Vec<_>>().join(",");
        let timing = timing.gateway_header(request.arrived.elapsed(), waited);
        let left = reservation.headers();
        let parts = parts.to_string();
        let (attempts, tokens) = (attempts.to_string(), tokens.map(|tokens| tokens.to_string()));
        let mut extra = vec![
            (headers::REQUEST_ID, request.id.as_str()),
            (headers::REGION, &regions),
            (headers::ATTEMPTS, &attempts),
            (headers::PARTS, &parts),
            (headers::SERVER_TIMING, &timing),
        ];
        extra.extend(left.iter().map(|(name, value)| (*name, value.as_str())));
        let revision = revision.map(|revision| revision.to_string());
        extra.extend(revision.as_deref().map(|revision| (headers::MODEL_REVISION, revision)));
        let cors = self.cors(session);
        extra.extend(cors.iter().map(|(name, value)| (*name, value.as_str())));
        extra.extend((!receipts.is_empty()).then_some((headers::RECEIPT, receipts.as_str())));
        // The token count of a response that is still being computed is unknown.
        extra.extend(tokens.as_deref().filter(|_| length.is_some()).map(|tokens| (headers::TOKENS, tokens)));
        let mut response = respond::head(200, &extra);
        if let Some(content_type) = content_type {
            response.headers.insert(CONTENT_TYPE, content_type);
        }
        match length {
            Some(length) => respond::put(&mut response, CONTENT_LENGTH.as_str(), &length.to_string()),
            // HTTP/2 has its own framing, and HTTP/1.0 ends a body by closing the connection.
            None if !session.is_http2() && session.req_header().version == Version::HTTP_11 => {
                respond::put(&mut response, TRANSFER_ENCODING.as_str(), "chunked");
            }
            None => {}
        }
        apply_drain_notice(session);
        respond::begin(session, response).await
    }
}

/// Responds to a CORS preflight.
pub(super) async fn preflight_response(
    session: &mut ServerSession,
    preflight: &ResponseHeaders,
    id: &str,
) -> AfterResponse {
    let mut extra = vec![(headers::REQUEST_ID, id)];
    extra.extend(preflight.iter().map(|(name, value)| (*name, value.as_str())));
    let head = respond::head(204, &extra);
    respond::whole(session, head, Bytes::new()).await
}

/// Value of a header of a region's response.
fn text<'a>(response: &'a UpstreamResponse, name: &'static str) -> Option<&'a str> {
    response.head.headers.get(names::name(name))?.to_str().ok()
}
