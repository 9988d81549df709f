//! One request to one replica, and to another when the first is gone or late.
//!
//! A replica that is frozen refuses nothing and answers nothing, so each attempt has a time for its first byte, measured
//! against the best of the replicas. Past it the request goes to another, once, if there is one and the budget pays;
//! otherwise it waits on, because a late answer is better than none.

use super::Ingress;
use super::replicas::{Sent, replica_is_late};
use crate::relay::Crossing;
use crate::respond::Refusal;
use crate::upstream::{Answer, WHOLE_ANSWER_MAX};
use bytes::Bytes;
use gateway_core::circuit::Permille;
use gateway_core::lawful::Law;
use gateway_core::outcome::Failure;
use gateway_core::pace::Size;
use regions::id::DeploymentName;
use replica_core::wire::error::ErrorCode;
use replica_core::wire::headers;
use scheduler_core::spoke;
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
    pub(super) law: Law,
    pub(super) body: Bytes,
    /// By estimate.
    pub(super) tokens: u64,
    pub(super) deadline: Instant,
    /// The request's own, drawn once.
    pub(super) chance: Permille,
}

impl Passing {
    pub(super) fn size(&self) -> Size {
        Size::of(self.tokens)
    }
}

impl Ingress {
    /// Offers a request to one replica, to another if the first is gone, and to another if the first is late.
    pub(super) async fn go(&self, request: &Passing) -> Result<(Answer, Sent<'_>), Refusal> {
        let mut tried = Vec::new();
        let (mut retried, mut left_late) = (false, false);
        let mut sent = self.choose(request, &tried)?;
        loop {
            tried.push(sent.index());
            let asked = self.ask(request, sent.endpoint());
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
                Ok(answer) => {
                    sent.took(request, answer.head.status.as_u16());
                    return Ok((answer, sent));
                }
                Err(Failure::DeadlinePassed) => return Err(not_answered(Failure::DeadlinePassed)),
                Err(failure) => {
                    tracing::debug!(replica = %sent.endpoint(), ?failure, "a replica did not answer");
                    sent.failed();
                    if std::mem::replace(&mut retried, true) {
                        return Err(not_answered(failure));
                    }
                    drop(sent);
                    sent = self.choose(request, &tried)?;
                }
            }
        }
    }

    fn choose(&self, request: &Passing, tried: &[usize]) -> Result<Sent<'_>, Refusal> {
        let (deployment, region) = (&request.deployment, &self.region);
        self.replicas.choose(request, tried).map_err(|refusal| match refusal {
            spoke::Refusal::UnknownHere => {
                let message = format!("Region {region} has no replica for '{deployment}'.");
                Refusal::new(ErrorCode::NotReady, message)
            }
            spoke::Refusal::NoneReady { .. } => {
                let message = format!("No replica for '{deployment}' is ready in region {region}.");
                Refusal::new(ErrorCode::NotReady, message)
            }
            spoke::Refusal::Full { retry_after } => {
                let message = format!(
                    "As many requests as may, {}, wait for each replica of '{deployment}' in region {region}; try again \
                     shortly, or send fewer at once.",
                    super::replicas::REPLICA_IN_FLIGHT_MAX
                );
                Refusal::new(ErrorCode::Overloaded, message).after(retry_after)
            }
        })
    }

    async fn ask(&self, request: &Passing, replica: SocketAddr) -> Result<Answer, Failure> {
        let Passing { id, tenant, crossing, path, law, body, deadline, .. } = request;
        let to = law.open(self.here, replica).expect("the law was asked at the door (invariant 1, Lawful)");
        let left = deadline.saturating_duration_since(Instant::now());
        let left_ms = left.as_millis().max(1).to_string();
        let mut extra = vec![(headers::REQUEST_ID, id.as_str()), (headers::TIMEOUT_MS, &left_ms)];
        extra.extend(tenant.as_deref().map(|tenant| (headers::TENANT, tenant)));
        let head = crossing.head(path, body, &extra);
        // A pooled connection that the replica has closed has not brought it the request: once more, on another.
        for _ in 0..2 {
            let left = deadline.saturating_duration_since(Instant::now());
            let body = law.seal(body.clone());
            let asked = self.upstream.ask(to, CONNECT_TIMEOUT, head.clone(), body, WHOLE_ANSWER_MAX);
            match tokio::time::timeout(left, asked).await {
                Ok(Err(Failure::StaleConnection)) => {}
                Ok(asked) => return asked,
                Err(_) => return Err(Failure::DeadlinePassed),
            }
        }
        Err(Failure::Unreachable)
    }
}

fn not_answered(failure: Failure) -> Refusal {
    match failure {
        Failure::DeadlinePassed => Refusal::new(
            ErrorCode::DeadlineExceeded,
            "The replica did not answer before the request's deadline.",
        ),
        Failure::StaleConnection
        | Failure::Unreachable
        | Failure::WrongPeer
        | Failure::Elsewhere
        | Failure::Late
        | Failure::Lost => Refusal::new(
            ErrorCode::ReplicaUnreachable,
            "The replica could not be reached or broke off before it answered.",
        ),
    }
}
