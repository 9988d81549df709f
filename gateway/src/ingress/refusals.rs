//! Rejections of an ingress.

use super::replicas::REPLICA_IN_FLIGHT_MAX;
use crate::respond::Rejection;
use crate::start_failure::deployment_failed;
use gateway_core::outcome::AttemptFailure;
use regions::id::{DeploymentName, RegionId};
use replica_api::error::ErrorCode;
use replica_api::headers;
use scheduler_core::spoke;
use scheduler_core::spoke::hold::{HoldLimit, HoldLimits, HoldRejection};

/// Returns the error of a request without a durable receipt. Another allowed region may be able to write one.
pub(super) fn no_receipt(region: &RegionId) -> Rejection {
    let message = format!(
        "Every request of a locked deployment requires a receipt, which region {region} cannot write at the moment."
    );
    Rejection::new(ErrorCode::NotReady, message)
}

/// Returns the error of a request that no replica takes and that was not held.
pub(super) fn no_replica(
    deployment: &DeploymentName,
    region: &RegionId,
    refusal: spoke::NoReplica,
) -> Rejection {
    match refusal {
        spoke::NoReplica::UnknownDeployment => {
            let message = format!("Region {region} has no replica for '{deployment}'.");
            Rejection::new(ErrorCode::NotReady, message)
        }
        spoke::NoReplica::NoneReady { .. } | spoke::NoReplica::QueueNotEmpty => {
            let message = format!("No replica for '{deployment}' is ready in region {region}.");
            Rejection::new(ErrorCode::NotReady, message)
        }
        spoke::NoReplica::RevisionNotServed => {
            let message = format!(
                "No replica for '{deployment}' in region {region} has the model revision that this request must be \
                 computed with."
            );
            Rejection::new(ErrorCode::ModelRevisionUnavailable, message)
        }
        spoke::NoReplica::Full { retry_after } => {
            let message = format!(
                "Each replica of '{deployment}' in region {region} has {} requests in flight, the limit; try again \
                 shortly, or send fewer at once.",
                REPLICA_IN_FLIGHT_MAX
            );
            Rejection::new(ErrorCode::Overloaded, message).after(retry_after)
        }
    }
}

/// Returns the error of a request that is not held for a replica.
pub(super) fn not_held(
    deployment: &DeploymentName,
    region: &RegionId,
    rejection: HoldRejection,
) -> Rejection {
    let (ready_in, code, message) = match rejection {
        HoldRejection::NotProvisioned => {
            return no_replica(deployment, region, spoke::NoReplica::UnknownDeployment);
        }
        HoldRejection::Failed { reason } => {
            return deployment_failed(deployment, [(region, reason)]);
        }
        HoldRejection::OtherRegion { ready_in } => (
            ready_in,
            ErrorCode::NotReady,
            format!(
                "A replica for '{deployment}' needs {} ms to be ready in region {region}; another region responds \
                 sooner.",
                ready_in.as_millis()
            ),
        ),
        HoldRejection::PastDeadline { ready_in } => (
            ready_in,
            ErrorCode::ColdStart,
            format!(
                "A replica for '{deployment}' needs {} ms to be ready in region {region}, longer than \
                 the deadline of this request; retry then, or set a longer timeout with {}.",
                ready_in.as_millis(),
                headers::TIMEOUT_MS
            ),
        ),
        HoldRejection::Full { limit: HoldLimit::TenantRequests | HoldLimit::TenantBytes, ready_in } => (
            ready_in,
            ErrorCode::Overloaded,
            format!(
                "The requests of this tenant that wait for a replica of '{deployment}' in region {region} \
                 have reached the limit, {} requests or {} bytes; one is ready in {} ms.",
                HoldLimits::DEFAULT.tenant_requests,
                HoldLimits::DEFAULT.tenant_bytes,
                ready_in.as_millis()
            ),
        ),
        HoldRejection::Full { limit: HoldLimit::Requests | HoldLimit::Bytes, ready_in } => (
            ready_in,
            ErrorCode::Saturated,
            format!(
                "The requests that wait for replicas in region {region} have reached the limit, {} requests or {} \
                 bytes; one for '{deployment}' is ready in {} ms.",
                HoldLimits::DEFAULT.requests,
                HoldLimits::DEFAULT.bytes,
                ready_in.as_millis()
            ),
        ),
    };
    Rejection::new(code, message).after(ready_in)
}

/// Returns the error of a request that was held until its deadline.
pub(super) fn held_too_long(deployment: &DeploymentName) -> Rejection {
    let message = format!("No replica for '{deployment}' became ready before the request's deadline.");
    Rejection::new(ErrorCode::DeadlineExceeded, message)
}

/// Returns the error of a request to which no replica responded.
pub(super) fn no_response(failure: AttemptFailure) -> Rejection {
    match failure {
        AttemptFailure::DeadlineExceeded => Rejection::new(
            ErrorCode::DeadlineExceeded,
            "The replica did not respond before the request's deadline.",
        ),
        AttemptFailure::StaleConnection
        | AttemptFailure::Unreachable
        | AttemptFailure::WrongPeer
        | AttemptFailure::Declined
        | AttemptFailure::FirstByteTimeout
        | AttemptFailure::RegionDown
        | AttemptFailure::ReceiptUnavailable => Rejection::new(
            ErrorCode::ReplicaUnreachable,
            "The replica could not be reached or closed the connection before it responded.",
        ),
    }
}
