//! Forwarding of a request to a replica, with retries on other replicas.
//!
//! [`ReplicaPlan`] decides after each event; this module selects, sends, waits and holds. A hung replica neither refuses
//! nor responds, so each attempt has a first-byte timeout, measured against the best replica. When it expires, the
//! request is sent to another replica, once, if there is one and the budget allows it; otherwise the ingress continues to
//! wait, because a late response is better than none.
//!
//! If no replica is ready and one is provisioning, the request is held ([`super::hold`]) and the selection starts
//! again.

use super::hold::{Hold, HoldGuard};
use super::refusals::{held_too_long, no_replica, no_response, not_held};
use super::replicas::{ReplicaAttempt, Replicas};
use super::request::ForwardedRequest;
use super::residency::ResidencyGuard;
use super::spans::IngressStages;
use crate::events::RevisionChanged;
use crate::respond::Rejection;
use crate::upstream::{BUFFERED_RESPONSE_MAX, Upstream, UpstreamResponse};
use gateway_core::outcome::AttemptFailure;
use gateway_core::plan::replica::{ReplicaPlan, ReplicaStep};
use gateway_core::trail::AttemptEnd;
use regions::id::RegionId;
use regions::set::RegionIndex;
use regions::{HostPort, ModelRevision};
use replica_api::error::ErrorCode;
use replica_api::headers;
use scheduler_core::spoke;
use scheduler_core::spoke::hold::{HoldRejection, ReleaseReason};
use std::sync::Arc;
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

/// Forwards requests to the replicas of the region.
pub(super) struct ReplicaForwarder {
    pub(super) region: RegionId,
    pub(super) here: RegionIndex,
    pub(super) residency: Arc<ResidencyGuard>,
    pub(super) replicas: Arc<Replicas>,
    pub(super) hold: Arc<Hold>,
    pub(super) upstream: Arc<Upstream>,
}

/// Response of a replica.
pub(super) struct ReplicaResponse<'a> {
    pub(super) response: UpstreamResponse,
    /// The attempt, until the response is relayed.
    pub(super) attempt: ReplicaAttempt<'a>,
    pub(super) held: HoldTimes,
}

impl ReplicaForwarder {
    /// Sends a request to replicas, one after the other, until one responds.
    pub(super) async fn forward(
        &self,
        request: &ForwardedRequest,
        stages: &mut IngressStages,
    ) -> Result<ReplicaResponse<'_>, Rejection> {
        let (mut plan, mut held) = (ReplicaPlan::new(request.deadline), HoldTimes::default());
        let mut attempt = self.select_replica(request, &mut plan, &mut held, stages).await?;
        loop {
            let traceparent = stages.attempting(attempt.endpoint());
            let ended = {
                let response =
                    self.send(request, attempt.endpoint(), attempt.revision(), traceparent.as_deref());
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
                    // A replica did not respond by its deadline, and the request is sent to another one.
                    tracing::debug!(replica = %attempt.endpoint(), "replica timed out, request sent to another");
                    stages.failed(AttemptFailure::FirstByteTimeout);
                    attempt.abandon(request);
                    attempt = other;
                    ReplicaStep::Send
                }
                Ok(Ok(response)) if self.has_other_revision(&response, &attempt) => {
                    stages.attempted(AttemptEnd::Responded { status: response.head.status.as_u16() });
                    attempt.model_changed();
                    plan.revision_changed()
                }
                Ok(Ok(response)) => {
                    stages.attempted(AttemptEnd::Responded { status: response.head.status.as_u16() });
                    attempt.responded(request, response.head.status.as_u16(), plan.responded());
                    return Ok(ReplicaResponse { response, attempt, held });
                }
                Ok(Err(failure)) => {
                    stages.failed(failure);
                    let (step, recorded) = plan.failed(failure, Instant::now());
                    if let Some(failure) = recorded {
                        // An attempt at a replica failed (`failure`). The request is sent to another replica if there
                        // is one.
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
                    attempt = self.select_replica(request, &mut plan, &mut held, stages).await?;
                }
                ReplicaStep::NoReplica => {
                    return Err(no_replica(
                        &request.deployment,
                        &self.region,
                        spoke::NoReplica::RevisionNotServed,
                    ));
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
        stages: &mut IngressStages,
    ) -> Result<ReplicaAttempt<'_>, Rejection> {
        stages.selecting();
        // Kept until the next selection: a request that was released occupies its position.
        let mut guard: Option<HoldGuard<'_>> = None;
        loop {
            let refusal = match self.replicas.choose(request, plan) {
                Ok(attempt) => {
                    stages.selected();
                    return Ok(attempt);
                }
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
                return Err(no_replica(&request.deployment, &self.region, refusal));
            }
            let mut hold = match self.hold.enter(request, stages.sampled_trace()) {
                Ok(None) if plan.not_held() == ReplicaStep::Select => continue,
                Ok(None) | Err(HoldRejection::NotProvisioned) => {
                    return Err(no_replica(&request.deployment, &self.region, refusal));
                }
                Ok(Some(hold)) => hold,
                Err(rejection) => return Err(not_held(&request.deployment, &self.region, rejection)),
            };
            stages.holding();
            let outcome = hold.wait(plan.deadline()).await;
            stages.released(match &outcome {
                Some(ReleaseReason::ReplicaReady { cold_start }) => *cold_start,
                Some(ReleaseReason::Unservable) | None => None,
            });
            held.lasted = Some(held.lasted.unwrap_or_default() + hold.held_for());
            // A policy that was narrowed during the hold applies to this request as well (invariant 1, Residency).
            self.residency.check_deployment_policy(&request.deployment)?;
            match outcome {
                Some(ReleaseReason::ReplicaReady { cold_start }) => held.cold_start = cold_start,
                Some(ReleaseReason::Unservable) => {
                    let rejection = match self.hold.start_failure(&request.deployment) {
                        Some(reason) => {
                            let failed = HoldRejection::Failed { reason };
                            not_held(&request.deployment, &self.region, failed)
                        }
                        None => no_replica(&request.deployment, &self.region, refusal),
                    };
                    return Err(rejection.with(held.headers()));
                }
                None => return Err(held_too_long(&request.deployment).with(held.headers())),
            }
            plan.released();
            guard = Some(hold);
        }
    }

    async fn send(
        &self,
        request: &ForwardedRequest,
        replica: &HostPort,
        revision: Option<ModelRevision>,
        traceparent: Option<&str>,
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
        extra.extend(traceparent.map(|context| (headers::TRACEPARENT, context)));
        let head = headers.head(path, &body.bytes, &extra);
        let body = policy.seal(body.bytes.clone());
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
