//! Request at the ingress, and the headers in which its gateway describes it.

use crate::body_memory::BufferedBody;
use crate::circuits::random_draw;
use crate::relay::ForwardedHeaders;
use crate::request_body::BodyReader;
use crate::respond::{ForwardError, Rejection};
use gateway_core::body::BYTES_PER_TOKEN;
use gateway_core::circuit::Permille;
use gateway_core::latency::SizeClass;
use gateway_core::memory::BodyOwner;
use gateway_core::request_options::TIMEOUT_DEFAULT;
use gateway_core::residency::AllowedRegions;
use pingora::protocols::http::ServerSession;
use regions::ModelRevision;
use regions::id::DeploymentName;
use replica_api::error::ErrorCode;
use replica_api::headers;
use replica_api::priority::Priority;
use scheduler_core::spoke::{RequestedRevision, TrafficOrigin};
use std::time::{Duration, Instant};
use telemetry::request::RequestTrace;

/// Request to be forwarded to a replica.
pub(super) struct ForwardedRequest {
    pub(super) id: String,
    pub(super) tenant: Option<String>,
    pub(super) headers: ForwardedHeaders,
    /// Path at the replica.
    pub(super) path: &'static str,
    pub(super) deployment: DeploymentName,
    pub(super) policy: AllowedRegions,
    pub(super) body: BufferedBody,
    /// Whether its gateway sent it as spillover.
    pub(super) origin: TrafficOrigin,
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
    /// Reads the options and the body of a request for `path`. `policy` and `deployment` were checked before.
    pub(super) async fn read(
        session: &mut ServerSession,
        body_reader: &BodyReader,
        path: &'static str,
        (policy, deployment): (AllowedRegions, DeploymentName),
        arrived: Instant,
        trace: Option<&RequestTrace>,
    ) -> Result<ForwardedRequest, ForwardError> {
        let deadline = arrived + milliseconds(session, headers::TIMEOUT_MS)?.unwrap_or(TIMEOUT_DEFAULT);
        let origin = if session.get_header(headers::SPILLOVER).is_some() {
            TrafficOrigin::Spillover
        } else {
            TrafficOrigin::Local
        };
        let body = body_reader.body(session, BodyOwner::default()).await?;
        let priority = text(session, headers::PRIORITY)?;
        Ok(ForwardedRequest {
            id: text(session, headers::REQUEST_ID)?.unwrap_or_default().to_owned(),
            tenant: text(session, headers::TENANT)?.map(str::to_owned),
            headers: ForwardedHeaders::of(session, &[], trace),
            path,
            deployment,
            // First estimate of the cost, before the request is tokenized: of the whole JSON text.
            tokens: (body.bytes.len() as u64 / BYTES_PER_TOKEN).max(1),
            body,
            origin,
            policy,
            revision: RequestedRevision {
                required: revision(session, headers::REQUIRED_REVISION)?,
                known: revision(session, headers::MODEL_REVISION)?,
            },
            deadline,
            draw: random_draw(),
            priority: priority.and_then(|priority| priority.parse().ok()).unwrap_or(Priority::Interactive),
            elsewhere: milliseconds(session, headers::ALTERNATIVE_MS)?,
        })
    }

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

fn revision(session: &ServerSession, name: &'static str) -> Result<Option<ModelRevision>, Rejection> {
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
