//! Requests of jobs that other regions compute: the demand of gateways, the offered requests, and the granted ones.
//!
//! ```text
//! gateway ─▶ pull ─▶ demand ─▶ worker takes a job ─▶ attempt ─▶ offer ─▶ pull ─▶ gateway ─▶ other region
//!                                                      ▲                                       │
//!                                                      └──────── end ◀── result ◀── gateway ◀──┘
//! ```
//!
//! The worker takes a job for another region only while a gateway waits for one, so that no job is leased for a gateway that
//! does not exist. The attempt at such a job is the same as at any other, except that its requests are offered here instead of
//! being sent to a replica; so the chunks of batches are transferred request by request. [`jobs_core::transfer`] decides which
//! ticket a gateway has and when it ends; this module adds the lock, the clock, the bodies and the signals.

use super::attempt::{self, JobAttemptResponse, ReplicaAttemptEnd};
use crate::events::{JobTransferEnded, JobTransferLate, JobTransfersExpired};
use crate::metrics::{JobMetrics, JobTransferOutcome};
use bytes::Bytes;
use jobs_core::pace::JobCapacity;
use jobs_core::transfer::{TICKETS_PER_REGION_MAX, TicketRequest, TicketTable};
use regions::catalogue::Catalogue;
use scheduler_api::job_transfer::PULL_WAIT_MAX;
use scheduler_api::report::GATEWAYS_MAX;
use std::collections::{BTreeMap, BTreeSet};
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};
use supervision::Mutex;
use tokio::sync::{Notify, Semaphore, oneshot, watch};
use tokio::time::timeout_at;

/// Requests for waiting jobs that are held: one of each gateway.
pub(in crate::ingress) const POLLS_MAX: usize = GATEWAYS_MAX;
/// Requests for a body that wait: four for each gateway, or those of eight gateways with the maximum of transfers.
pub(in crate::ingress) const PULLS_MAX: usize = 256;
/// Retry time after a request that no gateway has taken, or for which there is no ticket: about that of a gateway's next poll.
const NOT_TAKEN_RETRY: Duration = Duration::from_millis(500);

/// Requests of the jobs of a queue for other regions.
pub(super) struct OfferedTransfers {
    pub(super) catalogue: Arc<Catalogue>,
    metrics: Arc<JobMetrics>,
    state: Mutex<TransferState>,
    /// Signal to the worker: a gateway waits for a request.
    pub(super) demanded: Notify,
    /// Signal to the gateways that wait: a request was offered.
    offered: Notify,
    /// Deployments whose jobs other regions may compute.
    backlogged: watch::Sender<BTreeSet<String>>,
    /// Permits to wait.
    pub(super) polls: Semaphore,
    pub(super) pulls: Semaphore,
}

struct TransferState {
    tickets: TicketTable,
    /// The requests of the tickets.
    requests: BTreeMap<u64, OfferedRequest>,
    /// Gateways that wait for a request.
    demands: BTreeMap<u64, TransferDemand>,
    next_demand: u64,
}

struct OfferedRequest {
    id: String,
    path: &'static str,
    body: Bytes,
    respond: oneshot::Sender<ReplicaAttemptEnd>,
}

/// A gateway that waits for a request.
#[derive(Clone)]
pub(super) struct TransferDemand {
    /// Group and region of the requests that it waits for.
    pub(super) request: TicketRequest,
    /// Capacity of the region that it has selected.
    pub(super) capacity: JobCapacity,
    /// Whether the worker has taken a job for it.
    is_met: bool,
}

/// Request that a gateway has pulled.
pub(super) struct GrantedRequest {
    pub(super) ticket: u64,
    pub(super) id: String,
    pub(super) path: &'static str,
    pub(super) body: Bytes,
}

/// Region that computes the requests of a job.
#[derive(Clone)]
pub(super) enum TargetRegion {
    /// In the region of the queue.
    Local,
    /// In another region.
    Remote(Arc<OfferedTransfers>, TicketRequest),
}

impl OfferedTransfers {
    pub(super) fn new(catalogue: Arc<Catalogue>, metrics: Arc<JobMetrics>) -> OfferedTransfers {
        let state = TransferState {
            tickets: TicketTable::new(rand::random()),
            requests: BTreeMap::new(),
            demands: BTreeMap::new(),
            next_demand: 0,
        };
        OfferedTransfers {
            catalogue,
            metrics,
            state: Mutex::new(state),
            demanded: Notify::new(),
            offered: Notify::new(),
            backlogged: watch::Sender::new(BTreeSet::new()),
            polls: Semaphore::new(POLLS_MAX),
            pulls: Semaphore::new(PULLS_MAX),
        }
    }

    /// Sets the deployments whose jobs other regions may compute.
    pub(super) fn set_backlogged(&self, deployments: BTreeSet<String>) {
        self.backlogged.send_if_modified(|current| {
            let is_new = *current != deployments;
            *current = deployments;
            is_new
        });
    }

    /// Returns these deployments, when they change.
    pub(super) fn backlogged(&self) -> watch::Receiver<BTreeSet<String>> {
        self.backlogged.subscribe()
    }

    /// Returns the number of tickets.
    pub(super) fn tickets(&self) -> usize {
        self.state.lock().tickets.len()
    }

    /// Returns the gateways that wait without a job, by what they wait for, with the number of requests that may be offered.
    pub(super) fn demands(&self) -> Vec<(TransferDemand, usize)> {
        let state = self.state.lock();
        let mut found = BTreeMap::<&TicketRequest, (&TransferDemand, usize)>::new();
        for demand in state.demands.values().filter(|demand| !demand.is_met) {
            found.entry(&demand.request).or_insert((demand, 0)).1 += 1;
        }
        let free = |demand: &TransferDemand| {
            TICKETS_PER_REGION_MAX.saturating_sub(state.tickets.count(demand.request.target))
        };
        let found = found.into_values();
        found.map(|(demand, count)| (demand.clone(), count.min(free(demand)))).collect()
    }

    /// Records that the worker has taken this number of jobs for the gateways that wait for `request`.
    pub(super) fn met(&self, request: &TicketRequest, count: usize) {
        let mut state = self.state.lock();
        let demands = state.demands.values_mut();
        let unmet = demands.filter(|demand| !demand.is_met && demand.request == *request);
        unmet.take(count).for_each(|demand| demand.is_met = true);
    }

    /// Computes a request in another region.
    pub(super) async fn compute(
        &self,
        request: TicketRequest,
        id: String,
        path: &'static str,
        body: Bytes,
    ) -> ReplicaAttemptEnd {
        let (respond, response) = oneshot::channel();
        let offer = {
            let state = &mut *self.state.lock();
            let offer = state.tickets.offer(request.clone(), Instant::now());
            if let Ok(ticket) = offer {
                state.requests.insert(ticket, OfferedRequest { id, path, body, respond });
            }
            offer
        };
        let Ok(ticket) = offer else {
            let reason = format!("{TICKETS_PER_REGION_MAX} requests of jobs are in flight to the region");
            return attempt::no_capacity(reason, Some(NOT_TAKEN_RETRY));
        };
        let _withdrawn = Withdrawal { transfers: self, ticket, request: &request };
        self.offered.notify_waiters();
        response.await.unwrap_or_else(|_| attempt::failed("the transfer ended without a result"))
    }

    /// Waits for a request for a gateway, and grants its ticket. `is_permitted` says whether the gateway may have it now.
    pub(super) async fn pull(
        &self,
        request: &TicketRequest,
        capacity: JobCapacity,
        is_permitted: impl Fn() -> bool,
    ) -> Option<GrantedRequest> {
        let deadline = Instant::now() + PULL_WAIT_MAX;
        let _waiting = self.wait_for(request, capacity);
        self.demanded.notify_one();
        loop {
            // Registered before the search, so that no offer is missed.
            let mut offered = pin!(self.offered.notified());
            offered.as_mut().enable();
            if !is_permitted() {
                return None;
            }
            if let Some(pulled) = self.granted(request) {
                return Some(pulled);
            }
            timeout_at(deadline.into(), offered).await.ok()?;
        }
    }

    fn granted(&self, request: &TicketRequest) -> Option<GrantedRequest> {
        let state = &mut *self.state.lock();
        let ticket = state.tickets.pull(request, Instant::now())?;
        let OfferedRequest { id, path, body, .. } = state.requests.get(&ticket)?;
        Some(GrantedRequest { ticket, id: id.clone(), path, body: body.clone() })
    }

    fn wait_for(&self, request: &TicketRequest, capacity: JobCapacity) -> Waiting<'_> {
        let state = &mut *self.state.lock();
        let number = state.next_demand;
        state.next_demand += 1;
        let demand = TransferDemand { request: request.clone(), capacity, is_met: false };
        state.demands.insert(number, demand);
        Waiting { transfers: self, number }
    }

    /// Extends a ticket. Returns false if it has ended.
    pub(super) fn renew(&self, ticket: u64) -> bool {
        self.state.lock().tickets.renew(ticket, Instant::now())
    }

    /// Ends a ticket with the response of the other region, or with the reason why there is none. Returns false if the ticket
    /// had ended: the response is discarded.
    pub(super) fn end(
        &self,
        ticket: u64,
        response: Result<JobAttemptResponse, (String, Option<Duration>)>,
    ) -> bool {
        let ended = {
            let state = &mut *self.state.lock();
            let request = state.tickets.end(ticket, Instant::now());
            request.and_then(|request| Some((request, state.requests.remove(&ticket)?)))
        };
        let Some((request, offered)) = ended else {
            JobTransferLate { ticket }.record(&self.metrics);
            return false;
        };
        let end = match response {
            Ok(response) => attempt::of_region(response),
            Err((reason, retry_after)) => attempt::no_capacity(reason, retry_after),
        };
        let outcome = match &end {
            ReplicaAttemptEnd::Computed(_) => JobTransferOutcome::Computed,
            ReplicaAttemptEnd::Rejected(_) => JobTransferOutcome::Rejected,
            ReplicaAttemptEnd::Failed(_) => JobTransferOutcome::Failed,
            ReplicaAttemptEnd::NoCapacity { .. } => JobTransferOutcome::NoCapacity,
        };
        self.record(&request, ticket, outcome);
        // The attempt may have been aborted at this moment.
        offered.respond.send(end).is_ok()
    }

    /// Ends the tickets whose lease is over. Returns the time at which the next one ends.
    pub(super) fn expire(&self, now: Instant) -> Option<Instant> {
        let (expired, next) = {
            let state = &mut *self.state.lock();
            let expired = state.tickets.expire(now);
            let mut ended = |ticket: &u64| state.requests.remove(ticket);
            let expired: Vec<_> = expired.into_iter().map(|ticket| (ended(&ticket.number), ticket)).collect();
            (expired, state.tickets.next_expiry())
        };
        let mut lost = BTreeMap::new();
        for (offered, ticket) in expired {
            let (outcome, end) = if ticket.was_granted {
                *lost.entry(ticket.request.target).or_insert(0) += 1;
                let reason = "the gateway that had the request did not return it in time";
                (JobTransferOutcome::Expired, attempt::failed(reason))
            } else {
                let reason = "no gateway has taken the request".to_owned();
                (JobTransferOutcome::NotTaken, attempt::no_capacity(reason, Some(NOT_TAKEN_RETRY)))
            };
            self.record(&ticket.request, ticket.number, outcome);
            if let Some(offered) = offered {
                // The attempt may have been aborted at this moment.
                offered.respond.send(end).ok();
            }
        }
        for (target, count) in lost {
            JobTransfersExpired { region: &self.catalogue.region(target).id, count }.record();
        }
        next
    }

    fn record(&self, request: &TicketRequest, ticket: u64, outcome: JobTransferOutcome) {
        let region = (request.target, &self.catalogue.region(request.target).id);
        JobTransferEnded { region, ticket, outcome }.record(&self.metrics);
    }
}

/// Ends a ticket whose attempt is over, also when the attempt was aborted because its job was cancelled.
struct Withdrawal<'a> {
    transfers: &'a OfferedTransfers,
    ticket: u64,
    request: &'a TicketRequest,
}

impl Drop for Withdrawal<'_> {
    fn drop(&mut self) {
        let was_open = {
            let state = &mut *self.transfers.state.lock();
            state.requests.remove(&self.ticket);
            state.tickets.withdraw(self.ticket)
        };
        if was_open {
            self.transfers.record(self.request, self.ticket, JobTransferOutcome::Withdrawn);
        }
    }
}

/// Registration of a gateway that waits.
struct Waiting<'a> {
    transfers: &'a OfferedTransfers,
    number: u64,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.transfers.state.lock().demands.remove(&self.number);
    }
}
