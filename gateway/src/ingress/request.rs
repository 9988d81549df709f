//! Request at the ingress, and the headers in which its gateway describes it.

use crate::relay::ForwardedHeaders;
use crate::respond::Rejection;
use bytes::Bytes;
use gateway_core::circuit::Permille;
use gateway_core::latency::SizeClass;
use gateway_core::residency::AllowedRegions;
use pingora::protocols::http::ServerSession;
use regions::ModelRevision;
use regions::id::DeploymentName;
use replica_api::error::ErrorCode;
use replica_api::headers;
use replica_api::priority::Priority;
use scheduler_core::spoke::RequestedRevision;
use std::time::{Duration, Instant};

/// Request to be forwarded to a replica.
pub(super) struct ForwardedRequest {
    pub(super) id: String,
    pub(super) tenant: Option<String>,
    pub(super) headers: ForwardedHeaders,
    /// Path at the replica.
    pub(super) path: &'static str,
    pub(super) deployment: DeploymentName,
    pub(super) policy: AllowedRegions,
    pub(super) body: Bytes,
    /// Requirements of the gateway for the model revision of the response.
    pub(super) revision: RequestedRevision,
    /// Estimated tokens.
    pub(super) tokens: u64,
    pub(super) deadline: Instant,
    /// Random draw of the request for circuit breakers.
    pub(super) draw: Permille,
    /// Priority that the gateway decided.
    pub(super) priority: Priority,
    /// Estimated response time in another region that has a ready replica, if the gateway knows one.
    pub(super) elsewhere: Option<Duration>,
}

impl ForwardedRequest {
    pub(super) fn size(&self) -> SizeClass {
        SizeClass::of(self.tokens)
    }
}

pub(super) fn deployment(session: &ServerSession) -> Result<DeploymentName, Rejection> {
    let name = text(session, headers::DEPLOYMENT)?.ok_or_else(|| {
        let message = format!("An ingress is reached through a gateway, which sets {}.", headers::DEPLOYMENT);
        Rejection::new(ErrorCode::InvalidHeader, message).of(headers::DEPLOYMENT)
    })?;
    name.parse().map_err(|error| unreadable(headers::DEPLOYMENT, &error))
}

pub(super) fn milliseconds(
    session: &ServerSession,
    name: &'static str,
) -> Result<Option<Duration>, Rejection> {
    let value = text(session, name)?.map(str::parse::<u64>).transpose();
    value.map(|value| value.map(Duration::from_millis)).map_err(|error| unreadable(name, &error))
}

pub(super) fn revision(
    session: &ServerSession,
    name: &'static str,
) -> Result<Option<ModelRevision>, Rejection> {
    let value = text(session, name)?.map(str::parse).transpose();
    value.map_err(|error| unreadable(name, &error))
}

pub(super) fn text<'a>(session: &'a ServerSession, name: &'static str) -> Result<Option<&'a str>, Rejection> {
    if session.req_header().headers.get_all(name).iter().count() > 1 {
        return Err(unreadable(name, &"it is repeated"));
    }
    let value = session.get_header(name);
    value.map(|value| value.to_str().map_err(|error| unreadable(name, &error))).transpose()
}

pub(super) fn unreadable(header: &'static str, error: &dyn std::fmt::Display) -> Rejection {
    Rejection::new(ErrorCode::InvalidHeader, format!("{header} cannot be read: {error}.")).of(header)
}
