//! One request to one replica, and to another when the first is gone or late.
//!
//! A replica that is frozen refuses nothing and answers nothing, so each attempt has a time for its first byte, measured
//! against the best of the replicas. Past it the request goes to another, once, if there is one and the budget pays;
//! otherwise it waits on, because a late answer is better than none.
//!
//! Where none is ready and one is on its way, it waits for that ([`super::hold`]); then everything begins anew.

use super::Ingress;
use super::hold::{Place, Waited};
use super::replicas::{Sent, replica_is_late};
use crate::events::RevisionChanged;
use crate::relay::Crossing;
use crate::respond::Refusal;
use crate::upstream::{Answer, WHOLE_ANSWER_MAX};
use bytes::Bytes;
use gateway_core::circuit::Permille;
use gateway_core::latency::SizeClass;
use gateway_core::outcome::AttemptFailure;
use gateway_core::residency::AllowedRegions;
use regions::ModelRevision;
use regions::id::DeploymentName;
use replica_core::wire::error::ErrorCode;
use replica_core::wire::headers;
use scheduler_core::spoke::hold::{Band, Bound, Bounds, NotHeld};
use scheduler_core::spoke::{self, RevisionAsked};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// Replicas stand beside the ingress: one that does not take a connection in this time takes none.
const CONNECT_TIMEOUT: Duration = Duration::from_millis(200);

/// A request on its way to a replica.
pub(super) struct Passing {
    pub(super) id: String,
    pub(super) tenant: Option<String>,
    pub(super) crossing: Crossing,
    /// As a replica serves it.
    pub(super) path: &'static str,
    pub(super) deployment: DeploymentName,
    pub(super) policy: AllowedRegions,
    pub(super) body: Bytes,
    /// What its gateway says of the model revision of its answer.
    pub(super) revision: RevisionAsked,
    /// By estimate.
    pub(super) tokens: u64,
    pub(super) deadline: Instant,
    /// The request's own, drawn once.
    pub(super) chance: Permille,
    pub(super) band: Band,
    /// In what time a region that has a replica ready would answer it, if its edge knows one.
    pub(super) elsewhere: Option<Duration>,
}

/// How a request was held, if it was.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct WasHeld {
    pub(super) lasted: Option<Duration>,
    pub(super) cold_start: Option<Duration>,
}

impl WasHeld {
    /// As its client is told.
    pub(super) fn headers(&self) -> Vec<(&'static str, String)> {
        let told = [(headers::HELD_MS, self.lasted), (headers::COLD_START_MS, self.cold_start)];
        let told = told.into_iter().filter_map(|(name, lasted)| Some((name, lasted?)));
        told.map(|(name, lasted)| (name, lasted.as_millis().to_string())).collect()
    }
}

impl Passing {
    pub(super) fn size(&self) -> SizeClass {
        SizeClass::of(self.tokens)
    }
}

impl Ingress {
    /// Offers a request to one replica, to another if the first is gone, and to another if the first is late.
    pub(super) async fn go(&self, request: &Passing) -> Result<(Answer, Sent<'_>, WasHeld), Refusal> {
        let (mut tried, mut held) = (Vec::new(), WasHeld::default());
        let (mut retried, mut left_late) = (false, false);
        let mut sent = self.choose(request, &mut tried, &mut held).await?;
        loop {
            tried.push(sent.index());
            let asked = self.ask(request, sent.endpoint(), sent.revision());
            tokio::pin!(asked);
            let ended = tokio::select! {
                biased;
                ended = &mut asked => ended,
                () = replica_is_late(self.replicas.first_byte(&sent, request)) => {
                    self.replicas.missed(&mut sent);
                    let other = if left_late { None } else { self.replicas.instead_of(&sent, request, &tried) };
                    if let Some(other) = other {
                        tracing::debug!(replica = %sent.endpoint(), "a replica is late, another is asked");
                        left_late = true;
                        sent.left(request);
                        sent = other;
                        continue;
                    }
                    asked.await
                }
            };
            match ended {
                Ok(answer) if self.is_of_another_model(&answer, &sent) => {
                    sent.changed();
                    drop(sent);
                    sent = self.choose(request, &mut tried, &mut held).await?;
                }
                Ok(answer) => {
                    sent.took(request, answer.head.status.as_u16());
                    return Ok((answer, sent, held));
                }
                Err(AttemptFailure::DeadlineExceeded) => {
                    return Err(not_answered(AttemptFailure::DeadlineExceeded));
                }
                Err(failure) => {
                    tracing::debug!(replica = %sent.endpoint(), ?failure, "a replica did not answer");
                    sent.failed(failure);
                    if std::mem::replace(&mut retried, true) {
                        return Err(not_answered(failure));
                    }
                    drop(sent);
                    sent = self.choose(request, &mut tried, &mut held).await?;
                }
            }
        }
    }

    /// Whether a replica has shown that it does not run the model for which it was chosen: it was started anew since it last
    /// reported one. Its response is not passed on.
    fn is_of_another_model(&self, answer: &Answer, sent: &Sent<'_>) -> bool {
        let Some(expected) = sent.revision() else { return false };
        let text = |name: &str| answer.head.headers.get(name).and_then(|value| value.to_str().ok());
        let found = text(headers::MODEL_REVISION);
        let differs = found.and_then(|text| text.parse().ok()) != Some(expected);
        let refused = text(headers::ERROR) == Some(ErrorCode::ModelRevisionUnavailable.as_str());
        let changed = refused || differs && answer.head.status.is_success();
        if changed {
            let (region, replica) = (&self.region, sent.endpoint());
            RevisionChanged { region, replica, expected, found: found.unwrap_or("none") }.record();
        }
        changed
    }

    /// The replica that takes a request, of those that were not `tried`: as soon as there is one.
    async fn choose(
        &self,
        request: &Passing,
        tried: &mut Vec<usize>,
        held: &mut WasHeld,
    ) -> Result<Sent<'_>, Refusal> {
        let mut place: Option<Place<'_>> = None;
        loop {
            // Whoever was at a replica, or was called to one, has waited.
            let waited = place.is_some() || !tried.is_empty();
            let refusal = match self.replicas.choose(request, tried, waited) {
                Ok(sent) => return Ok(sent),
                Err(refusal @ (spoke::Refusal::Full { .. } | spoke::Refusal::OtherRevision)) => {
                    return Err(self.none(request, refusal));
                }
                Err(refusal) => refusal,
            };
            drop(place.take());
            let mut waits = match self.hold.comes(request) {
                // Somebody became ready at this moment; if it is not those who were tried, it takes this one.
                Ok(None) if tried.is_empty() => continue,
                Ok(None) | Err(NotHeld::NobodyStarts) => return Err(self.none(request, refusal)),
                Ok(Some(waits)) => waits,
                Err(why) => return Err(self.not_held(request, why)),
            };
            let ended = waits.wait(request.deadline).await;
            held.lasted = Some(held.lasted.unwrap_or_default() + waits.held_for());
            // What was narrowed while it waited holds for it as well (invariant 1, Residency).
            self.permitted(&request.deployment)?;
            match ended {
                Waited::Called { cold_start } => held.cold_start = cold_start,
                Waited::Nothing => return Err(self.none(request, refusal).with(held.headers())),
                Waited::TooLong => return Err(held_too_long(request).with(held.headers())),
            }
            // Those who are there now are others, or have recovered.
            tried.clear();
            place = Some(waits);
        }
    }

    /// Why nobody takes a request that was not held.
    fn none(&self, request: &Passing, refusal: spoke::Refusal) -> Refusal {
        let (deployment, region) = (&request.deployment, &self.region);
        match refusal {
            spoke::Refusal::UnknownHere => {
                let message = format!("Region {region} has no replica for '{deployment}'.");
                Refusal::new(ErrorCode::NotReady, message)
            }
            spoke::Refusal::NoneReady { .. } | spoke::Refusal::OthersWait => {
                let message = format!("No replica for '{deployment}' is ready in region {region}.");
                Refusal::new(ErrorCode::NotReady, message)
            }
            spoke::Refusal::OtherRevision => {
                let message = format!(
                    "No replica for '{deployment}' in region {region} has the model revision that this request must be \
                     computed with."
                );
                Refusal::new(ErrorCode::ModelRevisionUnavailable, message)
            }
            spoke::Refusal::Full { retry_after } => {
                let message = format!(
                    "As many requests as may, {}, wait for each replica of '{deployment}' in region {region}; try again \
                     shortly, or send fewer at once.",
                    super::replicas::REPLICA_IN_FLIGHT_MAX
                );
                Refusal::new(ErrorCode::Overloaded, message).after(retry_after)
            }
        }
    }

    /// Why a request that found no replica does not wait for one here.
    fn not_held(&self, request: &Passing, why: NotHeld) -> Refusal {
        let (deployment, region) = (&request.deployment, &self.region);
        let (ready_in, code, message) = match why {
            NotHeld::NobodyStarts => return self.none(request, spoke::Refusal::UnknownHere),
            NotHeld::Elsewhere { ready_in } => (
                ready_in,
                ErrorCode::NotReady,
                format!(
                    "A replica for '{deployment}' takes {} ms to be ready in region {region}; another region answers \
                     sooner.",
                    ready_in.as_millis()
                ),
            ),
            NotHeld::TooLate { ready_in } => (
                ready_in,
                ErrorCode::ColdStart,
                format!(
                    "A replica for '{deployment}' takes {} ms to be ready in region {region}, longer than this request \
                     has; come back then, or give it more time with {}.",
                    ready_in.as_millis(),
                    headers::TIMEOUT_MS
                ),
            ),
            NotHeld::Full { bound: Bound::TenantRequests | Bound::TenantBytes, ready_in } => (
                ready_in,
                ErrorCode::Overloaded,
                format!(
                    "As much of this tenant waits for a replica of '{deployment}' in region {region} as may, {} requests or \
                     {} bytes; one is ready in {} ms.",
                    Bounds::USUAL.tenant_requests,
                    Bounds::USUAL.tenant_bytes,
                    ready_in.as_millis()
                ),
            ),
            NotHeld::Full { bound: Bound::Requests | Bound::Bytes, ready_in } => (
                ready_in,
                ErrorCode::Saturated,
                format!(
                    "As much waits for replicas in region {region} as may, {} requests or {} bytes; one for \
                     '{deployment}' is ready in {} ms.",
                    Bounds::USUAL.requests,
                    Bounds::USUAL.bytes,
                    ready_in.as_millis()
                ),
            ),
        };
        Refusal::new(code, message).after(ready_in)
    }

    async fn ask(
        &self,
        request: &Passing,
        replica: SocketAddr,
        revision: Option<ModelRevision>,
    ) -> Result<Answer, AttemptFailure> {
        let Passing { id, tenant, crossing, path, policy, body, deadline, .. } = request;
        let to = policy
            .open(self.here, replica)
            .expect("the residency policy was asked at the door (invariant 1, Residency)");
        let left = deadline.saturating_duration_since(Instant::now());
        let left_ms = left.as_millis().max(1).to_string();
        let mut extra = vec![(headers::REQUEST_ID, id.as_str()), (headers::TIMEOUT_MS, &left_ms)];
        extra.extend(tenant.as_deref().map(|tenant| (headers::TENANT, tenant)));
        let revision = revision.map(|revision| revision.to_string());
        extra.extend(revision.as_deref().map(|revision| (headers::MODEL_REVISION, revision)));
        let head = crossing.head(path, body, &extra);
        // A pooled connection that the replica has closed has not brought it the request: once more, on another.
        for _ in 0..2 {
            let left = deadline.saturating_duration_since(Instant::now());
            let body = policy.seal(body.clone());
            let asked = self.upstream.ask(to, CONNECT_TIMEOUT, head.clone(), body, WHOLE_ANSWER_MAX);
            match tokio::time::timeout(left, asked).await {
                Ok(Err(AttemptFailure::StaleConnection)) => {}
                Ok(asked) => return asked,
                Err(_) => return Err(AttemptFailure::DeadlineExceeded),
            }
        }
        Err(AttemptFailure::Unreachable)
    }
}

fn held_too_long(request: &Passing) -> Refusal {
    let message =
        format!("No replica for '{}' became ready before the request's deadline.", request.deployment);
    Refusal::new(ErrorCode::DeadlineExceeded, message)
}

fn not_answered(failure: AttemptFailure) -> Refusal {
    match failure {
        AttemptFailure::DeadlineExceeded => Refusal::new(
            ErrorCode::DeadlineExceeded,
            "The replica did not answer before the request's deadline.",
        ),
        AttemptFailure::StaleConnection
        | AttemptFailure::Unreachable
        | AttemptFailure::WrongPeer
        | AttemptFailure::Declined
        | AttemptFailure::FirstByteTimeout
        | AttemptFailure::RegionDown
        | AttemptFailure::ReceiptUnavailable => Refusal::new(
            ErrorCode::ReplicaUnreachable,
            "The replica could not be reached or broke off before it answered.",
        ),
    }
}
