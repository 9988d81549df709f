//! Forwarding of a request to a replica, with retries on other replicas.
//!
//! [`ReplicaPlan`] decides after each event; this module selects, sends, waits and holds. A hung replica neither refuses
//! nor responds, so each attempt has a first-byte timeout, measured against the best replica. When it expires, the
//! request is sent to another replica, once, if there is one and the budget allows it; otherwise the ingress continues to
//! wait, because a late response is better than none.
//!
//! If no replica is ready and one is provisioning, the request is held ([`super::hold`]) and the selection starts
//! again.

use super::Ingress;
use super::hold::HoldGuard;
use super::replicas::{REPLICA_IN_FLIGHT_MAX, ReplicaAttempt};
use super::request::ForwardedRequest;
use crate::events::RevisionChanged;
use crate::respond::Rejection;
use crate::upstream::{BUFFERED_RESPONSE_MAX, UpstreamResponse};
use gateway_core::outcome::AttemptFailure;
use gateway_core::plan::replica::{ReplicaPlan, ReplicaStep};
use regions::{HostPort, ModelRevision};
use replica_api::error::ErrorCode;
use replica_api::headers;
use scheduler_core::spoke;
use scheduler_core::spoke::hold::{HoldLimit, HoldLimits, HoldRejection, ReleaseReason};
use std::time::{Duration, Instant};

/// Connect timeout. Replicas are in the same region; one that does not accept a connection in this time does not accept
/// any.
const CONNECT_TIMEOUT: Duration = Duration::from_millis(200);

/// Times for which a request was held.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct HoldTimes {
    pub(super) lasted: Option<Duration>,
    pub(super) cold_start: Option<Duration>,
}

impl HoldTimes {
    /// Returns the response headers.
    pub(super) fn headers(&self) -> Vec<(&'static str, String)> {
        let times = [(headers::HELD_MS, self.lasted), (headers::COLD_START_MS, self.cold_start)];
        let times = times.into_iter().filter_map(|(name, lasted)| Some((name, lasted?)));
        times.map(|(name, lasted)| (name, lasted.as_millis().to_string())).collect()
    }
}

impl Ingress {
    /// Sends a request to replicas, one after the other, until one responds.
    pub(super) async fn send_to_replica(
        &self,
        request: &ForwardedRequest,
    ) -> Result<(UpstreamResponse, ReplicaAttempt<'_>, HoldTimes), Rejection> {
        let (mut plan, mut held) = (ReplicaPlan::new(request.deadline), HoldTimes::default());
        let mut attempt = self.select_replica(request, &mut plan, &mut held).await?;
        loop {
            let ended = {
                let response = self.send(request, attempt.endpoint(), attempt.revision());
                tokio::pin!(response);
                loop {
                    tokio::select! {
                        biased;
                        ended = &mut response => break Ok(ended),
                        () = timer(plan.next_timer()) => {
                            if let Some(other) = self.replicas.timed_out(&mut plan, &attempt, request) {
                                break Err(other);
                            }
                        }
                    }
                }
            };
            let step = match ended {
                Err(other) => {
                    tracing::debug!(replica = %attempt.endpoint(), "replica timed out, request sent to another");
                    attempt.abandon(request);
                    attempt = other;
                    ReplicaStep::Send
                }
                Ok(Ok(response)) if self.has_other_revision(&response, &attempt) => {
                    attempt.model_changed();
                    plan.revision_changed()
                }
                Ok(Ok(response)) => {
                    attempt.responded(request, response.head.status.as_u16(), plan.responded());
                    return Ok((response, attempt, held));
                }
                Ok(Err(failure)) => {
                    let (step, recorded) = plan.failed(failure, Instant::now());
                    if let Some(failure) = recorded {
                        tracing::debug!(replica = %attempt.endpoint(), ?failure, "replica did not respond");
                        attempt.failed(failure);
                    }
                    step
                }
            };
            match step {
                ReplicaStep::Send | ReplicaStep::Wait => {}
                ReplicaStep::Select | ReplicaStep::Hold => {
                    drop(attempt);
                    attempt = self.select_replica(request, &mut plan, &mut held).await?;
                }
                ReplicaStep::NoReplica => {
                    return Err(self.no_replica(request, spoke::NoReplica::RevisionNotServed));
                }
                ReplicaStep::Failed(failure) => return Err(no_response(failure)),
            }
        }
    }

    /// Returns whether a replica runs a model other than the one for which it was selected: it restarted since its last
    /// report. Its response is discarded.
    fn has_other_revision(&self, response: &UpstreamResponse, attempt: &ReplicaAttempt<'_>) -> bool {
        let Some(expected) = attempt.revision() else { return false };
        let text = |name: &str| response.head.headers.get(name).and_then(|value| value.to_str().ok());
        let found = text(headers::MODEL_REVISION);
        let differs = found.and_then(|text| text.parse().ok()) != Some(expected);
        let refused = text(headers::ERROR) == Some(ErrorCode::ModelRevisionUnavailable.as_str());
        let changed = refused || differs && response.head.status.is_success();
        if changed {
            let (region, replica) = (&self.region, attempt.endpoint());
            RevisionChanged { region, replica, expected, found: found.unwrap_or("none") }.record();
        }
        changed
    }

    /// Selects a replica; if none is ready, holds the request until one is.
    async fn select_replica(
        &self,
        request: &ForwardedRequest,
        plan: &mut ReplicaPlan<usize>,
        held: &mut HoldTimes,
    ) -> Result<ReplicaAttempt<'_>, Rejection> {
        // Kept until the next selection: a request that was released occupies its position.
        let mut guard: Option<HoldGuard<'_>> = None;
        loop {
            let refusal = match self.replicas.choose(request, plan) {
                Ok(attempt) => return Ok(attempt),
                Err(refusal) => refusal,
            };
            drop(guard.take());
            let may_become_ready = match refusal {
                spoke::NoReplica::Full { .. } | spoke::NoReplica::RevisionNotServed => false,
                spoke::NoReplica::UnknownDeployment
                | spoke::NoReplica::NoneReady { .. }
                | spoke::NoReplica::QueueNotEmpty => true,
            };
            if plan.not_selected(may_become_ready) != ReplicaStep::Hold {
                return Err(self.no_replica(request, refusal));
            }
            let mut hold = match self.hold.enter(request) {
                Ok(None) if plan.not_held() == ReplicaStep::Select => continue,
                Ok(None) | Err(HoldRejection::NotProvisioned) => {
                    return Err(self.no_replica(request, refusal));
                }
                Ok(Some(hold)) => hold,
                Err(why) => return Err(self.not_held(request, why)),
            };
            let outcome = hold.wait(plan.deadline()).await;
            held.lasted = Some(held.lasted.unwrap_or_default() + hold.held_for());
            // A policy that was narrowed during the hold applies to this request as well (invariant 1, Residency).
            self.check_deployment_policy(&request.deployment)?;
            match outcome {
                Some(ReleaseReason::ReplicaReady { cold_start }) => held.cold_start = cold_start,
                Some(ReleaseReason::Unservable) => {
                    return Err(self.no_replica(request, refusal).with(held.headers()));
                }
                None => return Err(held_too_long(request).with(held.headers())),
            }
            plan.released();
            guard = Some(hold);
        }
    }

    /// Returns the error of a request that no replica takes and that was not held.
    fn no_replica(&self, request: &ForwardedRequest, refusal: spoke::NoReplica) -> Rejection {
        let (deployment, region) = (&request.deployment, &self.region);
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
    fn not_held(&self, request: &ForwardedRequest, why: HoldRejection) -> Rejection {
        let (deployment, region) = (&request.deployment, &self.region);
        let (ready_in, code, message) = match why {
            HoldRejection::NotProvisioned => {
                return self.no_replica(request, spoke::NoReplica::UnknownDeployment);
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

    async fn send(
        &self,
        request: &ForwardedRequest,
        replica: &HostPort,
        revision: Option<ModelRevision>,
    ) -> Result<UpstreamResponse, AttemptFailure> {
        let ForwardedRequest { id, tenant, headers, path, policy, body, deadline, .. } = request;
        let to = policy
            .open(self.here, replica.clone())
            .expect("the residency policy was checked on arrival (invariant 1, Residency)");
        let left = deadline.saturating_duration_since(Instant::now());
        let left_ms = left.as_millis().max(1).to_string();
        let mut extra = vec![(headers::REQUEST_ID, id.as_str()), (headers::TIMEOUT_MS, &left_ms)];
        extra.extend(tenant.as_deref().map(|tenant| (headers::TENANT, tenant)));
        let revision = revision.map(|revision| revision.to_string());
        extra.extend(revision.as_deref().map(|revision| (headers::MODEL_REVISION, revision)));
        let head = headers.head(path, body, &extra);
        let body = policy.seal(body.clone());
        let response = self.upstream.send(to, CONNECT_TIMEOUT, head, body, BUFFERED_RESPONSE_MAX);
        tokio::time::timeout(left, response).await.unwrap_or(Err(AttemptFailure::DeadlineExceeded))
    }
}

/// Completes at `at`; never without one.
async fn timer(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at.into()).await,
        None => std::future::pending().await,
    }
}

fn held_too_long(request: &ForwardedRequest) -> Rejection {
    let message =
        format!("No replica for '{}' became ready before the request's deadline.", request.deployment);
    Rejection::new(ErrorCode::DeadlineExceeded, message)
}

fn no_response(failure: AttemptFailure) -> Rejection {
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
