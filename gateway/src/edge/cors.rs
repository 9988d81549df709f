//! Cross-origin requests at the edge: the headers that `gateway_core::cors` decides on, on every response.

use super::forward::Edge;
use crate::listener::AfterResponse;
use crate::respond;
use bytes::Bytes;
use gateway_core::cors::ResponseHeaders;
use gateway_core::endpoint::{Endpoint, NotServed};
use http::Method;
use http::header::{ACCESS_CONTROL_REQUEST_HEADERS, ACCESS_CONTROL_REQUEST_METHOD, ORIGIN};
use pingora::protocols::http::ServerSession;
use replica_core::wire::headers;

impl Edge {
    /// CORS headers for the response to the page that sent the request.
    pub(super) fn cors(&self, session: &ServerSession) -> ResponseHeaders {
        let Some(cors) = &self.config.cors else { return ResponseHeaders::new() };
        cors.response(session.get_header(ORIGIN).map(http::HeaderValue::as_bytes))
    }

    /// The answer to a preflight of a path that is served; nothing if the request is none, or the page may not.
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
        let asked = session.get_header(ACCESS_CONTROL_REQUEST_HEADERS).map(http::HeaderValue::as_bytes);
        cors.preflight(session.get_header(ORIGIN)?.as_bytes(), method, asked)
    }
}

/// Answers a preflight.
pub(super) async fn answer(
    session: &mut ServerSession,
    preflight: &ResponseHeaders,
    id: &str,
) -> AfterResponse {
    let mut extra = vec![(headers::REQUEST_ID, id)];
    extra.extend(preflight.iter().map(|(name, value)| (*name, value.as_str())));
    let head = respond::head(204, &extra);
    respond::whole(session, head, Bytes::new()).await
}
