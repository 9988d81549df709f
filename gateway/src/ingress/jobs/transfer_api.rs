//! API of transfers, for gateways ([`scheduler_api::job_transfer`]).
//!
//! A gateway gets the payload of a job, and the region that it names computes it. A job under a residency policy is offered only if
//! the policy allows the region of the gateway and the other region; the region of a gateway is that of its certificate
//! ([`super::readers`]).

use super::attempt::JobAttemptResponse;
use super::readers::RequestingGateway;
use super::transfers::GrantedRequest;
use super::{JobApi, RegionalJobQueue};
use crate::listener::AfterResponse;
use crate::listener::notice::closing;
use crate::relay;
use crate::respond::{self, ForwardError, Rejection};
use gateway_core::memory::BodyOwner;
use http::header::CONTENT_LENGTH;
use jobs_core::pace::JobCapacity;
use jobs_core::transfer::{self, TICKET_LEASE, TicketRequest, TransferGroup, WaitingGroup};
use pingora::protocols::http::ServerSession;
use replica_api::error::ErrorCode;
use scheduler_api::job_transfer::{
    self, GROUPS_MAX, JobGroupV1, PullRequest, PullRequestV1, PulledRequestV1, RenewalV1, ReturnedV1,
    WAITING_MAX, WaitingGroupV1, WaitingJobsV1,
};
use scheduler_api::{VERSION, WireError, paths};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use tokio::time::timeout_at;

/// Time after which a gateway may repeat a request that was rejected because too many wait.
const BUSY_RETRY: Duration = Duration::from_secs(1);

/// Request of the API of transfers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::ingress) enum TransferCall {
    /// Which jobs wait.
    Waiting,
    /// A request of one of them.
    Pull,
    /// The ticket continues.
    Renew,
    /// The result.
    Return,
}

impl TransferCall {
    /// Returns the request of a method and a path; none if it is another path.
    pub(in crate::ingress) fn of(method: &str, path: &str) -> Option<TransferCall> {
        match (method, path) {
            ("POST", paths::JOBS_WAITING) => Some(TransferCall::Waiting),
            ("POST", paths::JOBS_PULL) => Some(TransferCall::Pull),
            ("POST", paths::JOBS_RENEW) => Some(TransferCall::Renew),
            ("POST", paths::JOBS_RESULT) => Some(TransferCall::Return),
            _ => None,
        }
    }
}

impl JobApi {
    /// Serves a request about transfers.
    pub(in crate::ingress) async fn transfer_call(
        &self,
        session: &mut ServerSession,
        call: TransferCall,
    ) -> Result<AfterResponse, ForwardError> {
        let queue = self.queue.as_deref().ok_or_else(|| self.no_queue())?;
        let gateway = RequestingGateway::of(session, &self.residency.catalogue)?;
        let body = self.body_reader.body(session, BodyOwner::default()).await?.bytes;
        match call {
            TransferCall::Waiting => self.waiting(session, queue, &gateway).await,
            TransferCall::Pull => {
                let message = serde_json::from_slice::<PullRequestV1>(&body).map_err(invalid_json)?;
                let pull = PullRequest::try_from(message).map_err(invalid)?;
                self.pull(session, queue, &gateway, pull).await
            }
            TransferCall::Renew => {
                let message = serde_json::from_slice::<RenewalV1>(&body).map_err(invalid_json)?;
                Ok(acknowledge(session, queue.transfers.renew(message.ticket)).await)
            }
            TransferCall::Return => {
                let (message, at) = job_transfer::first_line::<ReturnedV1>(&body).map_err(invalid)?;
                let ReturnedV1 { version: _, ticket, status, error, retry_after_ms, reason, tokens } =
                    message;
                let retry_after = retry_after_ms.map(Duration::from_millis);
                let response = match status {
                    Some(status) => Ok(JobAttemptResponse {
                        status,
                        error: error.as_deref().and_then(ErrorCode::parse),
                        retry_after,
                        tokens: tokens.unwrap_or_default(),
                        body: body.slice(at..),
                    }),
                    None => {
                        let reason = reason.unwrap_or_else(|| "no region has responded".to_owned());
                        Err((reason, retry_after))
                    }
                };
                Ok(acknowledge(session, queue.transfers.end(ticket, response)).await)
            }
        }
    }

    /// Responds with the jobs that other regions may compute, when there are some.
    async fn waiting(
        &self,
        session: &mut ServerSession,
        queue: &RegionalJobQueue,
        gateway: &RequestingGateway,
    ) -> Result<AfterResponse, ForwardError> {
        let _permit = queue.transfers.polls.try_acquire().map_err(|_| busy("for waiting jobs"))?;
        let deadline = Instant::now() + WAITING_MAX;
        let found = async {
            let mut waiting = queue.transfers.waiting();
            loop {
                let groups = waiting.borrow_and_update().clone();
                let groups = self.permitted(gateway, &groups);
                let is_over = !groups.is_empty();
                // The sender outlives the request.
                if is_over || !matches!(timeout_at(deadline.into(), waiting.changed()).await, Ok(Ok(()))) {
                    return transfer::listed(groups, GROUPS_MAX, rand::random());
                }
            }
        };
        let closing = closing(session);
        let groups = tokio::select! {
            biased;
            groups = found => groups,
            () = closing => Vec::new(),
            () = relay::client_disconnected(session) => return Err(ForwardError::ClientDisconnected),
        };
        let groups = groups.into_iter().map(|waiting| WaitingGroupV1 {
            group: group_message(waiting.group),
            jobs: waiting.jobs,
            bytes: waiting.bytes,
        });
        let message = WaitingJobsV1 { version: VERSION, groups: groups.collect() };
        let body = serde_json::to_vec(&message).expect("a message serialises to JSON");
        Ok(respond::ok(session, body, &[]).await)
    }

    /// Returns the groups whose jobs may pass through a gateway.
    fn permitted(&self, gateway: &RequestingGateway, groups: &[WaitingGroup]) -> Vec<WaitingGroup> {
        // The tenant has no effect on it.
        let mut by_policy = BTreeMap::<(&str, &str), bool>::new();
        let permitted = groups.iter().filter(|WaitingGroup { group, .. }| {
            let is_permitted = by_policy.entry((&group.deployment, &group.residency));
            *is_permitted.or_insert_with(|| self.residency.permits_transfer(gateway, group, None))
        });
        permitted.cloned().collect()
    }

    /// Responds with a request and its ticket, or without one.
    async fn pull(
        &self,
        session: &mut ServerSession,
        queue: &RegionalJobQueue,
        gateway: &RequestingGateway,
        pull: PullRequest,
    ) -> Result<AfterResponse, ForwardError> {
        let PullRequest { deployment, tenant, residency, target, ready, pending_tokens, tokens_per_second } =
            pull;
        let group = TransferGroup { deployment: deployment.to_string(), tenant, residency };
        let target =
            self.residency.catalogue.index_of(&target).filter(|target| *target != self.residency.here);
        let Some(target) = target else { return Ok(acknowledge(session, true).await) };
        let _permit = queue.transfers.pulls.try_acquire().map_err(|_| busy("for a request of a job"))?;
        let capacity = JobCapacity { ready, held: 0, pending_tokens, tokens_per_second };
        let is_permitted = || self.residency.permits_transfer(gateway, &group, Some(target));
        let request = TicketRequest { group: group.clone(), target };
        let pulled = tokio::select! {
            biased;
            pulled = queue.transfers.pull(&request, capacity, is_permitted) => pulled,
            () = relay::client_disconnected(session) => return Err(ForwardError::ClientDisconnected),
        };
        let Some(GrantedRequest { ticket, id, traceparent, path, body }) = pulled else {
            return Ok(acknowledge(session, true).await);
        };
        let line = PulledRequestV1 {
            version: VERSION,
            ticket,
            id,
            path: path.to_owned(),
            lease_ms: TICKET_LEASE.as_millis() as u64,
            traceparent,
        };
        let after = respond::ok(session, job_transfer::framed(&line, &body), &[]).await;
        if after == AfterResponse::Close {
            queue.transfers.undelivered(ticket);
        }
        Ok(after)
    }
}

fn group_message(group: TransferGroup) -> JobGroupV1 {
    let TransferGroup { deployment, tenant, residency } = group;
    JobGroupV1 { deployment, tenant, residency }
}

/// Responds without a body: 200, or 404 if the ticket has ended.
async fn acknowledge(session: &mut ServerSession, is_held: bool) -> AfterResponse {
    let status = if is_held { 200 } else { 404 };
    let head = respond::head(status, &[(CONTENT_LENGTH.as_str(), "0")]);
    respond::whole(session, head, bytes::Bytes::new()).await
}

fn busy(what: &str) -> Rejection {
    let message = format!("Too many requests of gateways {what} wait; repeat the request.");
    Rejection::new(ErrorCode::Overloaded, message).after(BUSY_RETRY)
}

fn invalid_json(error: serde_json::Error) -> Rejection {
    Rejection::new(ErrorCode::InvalidJson, format!("Invalid message of a gateway: {error}."))
}

fn invalid(error: WireError) -> Rejection {
    Rejection::new(ErrorCode::InvalidValue, format!("Invalid message of a gateway: {error}."))
}
