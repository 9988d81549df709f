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

use super::attempt::{self, JobAttemptResponse, JobRequestEnd, ReplicaAttemptEnd};
use crate::events::{JobTransferEnded, JobTransferLate, JobTransfersExpired};
use crate::metrics::{JobMetrics, JobTransferOutcome};
use bytes::Bytes;
use jobs_core::pace::JobCapacity;
use jobs_core::transfer::{TICKETS_PER_REGION_MAX, TicketRequest, TicketTable, WaitingGroup};
use regions::catalogue::Catalogue;
use regions::set::RegionIndex;
use scheduler_api::job_transfer::PULL_WAIT_MAX;
use scheduler_api::report::GATEWAYS_MAX;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use supervision::Mutex;
use tokio::sync::{Notify, Semaphore, oneshot, watch};
use tokio::time::timeout_at;

/// Requests for waiting jobs that are held: one of each gateway.
pub(in crate::ingress) const POLLS_MAX: usize = GATEWAYS_MAX;
/// Requests for a body that wait: four for each gateway, or those of eight gateways with the maximum of transfers.
pub(in crate::ingress) const PULLS_MAX: usize = 256;
/// Retry time after a request for which there is no ticket: about the time of a round trip to another region with its computation.
const NO_TICKET_RETRY: Duration = Duration::from_millis(500);

/// Requests of the jobs of a queue for other regions.
pub(super) struct OfferedTransfers {
    pub(super) catalogue: Arc<Catalogue>,
    metrics: Arc<JobMetrics>,
    state: Mutex<TransferState>,
    /// Signal to the worker: a gateway waits for a request, or a request was offered, which expires.
    pub(super) changed: Notify,
    /// Jobs that other regions may compute, of backlogged deployments, in the order in which they are served.
    waiting: watch::Sender<Arc<[WaitingGroup]>>,
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
    traceparent: Option<String>,
    path: &'static str,
    body: Bytes,
    respond: oneshot::Sender<JobRequestEnd>,
}

/// A gateway that waits for a request.
struct TransferDemand {
    /// Group and region of the requests that it waits for.
    request: TicketRequest,
    /// Capacity of the region that it has selected.
    capacity: JobCapacity,
    /// Whether the worker has taken a job for it.
    is_met: bool,
    /// Signal to it: such a request was offered.
    offered: Arc<Notify>,
}

/// Gateways that wait for the same requests, for which the worker has taken no job.
pub(super) struct UnmetDemand {
    /// Capacity of the region that the first one has selected.
    pub(super) capacity: JobCapacity,
    /// Their number.
    pub(super) count: usize,
}

/// Request that a gateway has pulled.
pub(super) struct GrantedRequest {
    pub(super) ticket: u64,
    pub(super) id: String,
    /// Span of the request, if it has a trace.
    pub(super) traceparent: Option<String>,
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
            changed: Notify::new(),
            waiting: watch::Sender::new(Arc::default()),
            polls: Semaphore::new(POLLS_MAX),
            pulls: Semaphore::new(PULLS_MAX),
        }
    }

    /// Publishes the jobs that other regions may compute.
    pub(super) fn set_waiting(&self, groups: Vec<WaitingGroup>) {
        self.waiting.send_if_modified(|current| {
            let is_new = **current != *groups;
            if is_new {
                *current = groups.into();
            }
            is_new
        });
    }

    /// Returns these jobs, when they change.
    pub(super) fn waiting(&self) -> watch::Receiver<Arc<[WaitingGroup]>> {
        self.waiting.subscribe()
    }

    /// Returns the number of tickets.
    pub(super) fn tickets(&self) -> usize {
        self.state.lock().tickets.len()
    }

    /// Returns the gateways that wait without a job, by what they wait for.
    pub(super) fn demands(&self) -> BTreeMap<TicketRequest, UnmetDemand> {
        let state = self.state.lock();
        let mut found = BTreeMap::new();
        for demand in state.demands.values().filter(|demand| !demand.is_met) {
            let unmet = UnmetDemand { capacity: demand.capacity, count: 0 };
            found.entry(demand.request.clone()).or_insert(unmet).count += 1;
        }
        found
    }

    /// Returns the number of requests that can still be offered for a region.
    pub(super) fn free_tickets(&self, target: RegionIndex) -> usize {
        self.state.lock().tickets.free(target)
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
        (id, traceparent): (String, Option<String>),
        path: &'static str,
        body: Bytes,
    ) -> JobRequestEnd {
        let (respond, response) = oneshot::channel();
        let offer = {
            let state = &mut *self.state.lock();
            let offer = state.tickets.offer(request.clone(), Instant::now());
            if let Ok(ticket) = offer {
                state.requests.insert(ticket, OfferedRequest { id, traceparent, path, body, respond });
                let waiting = state.demands.values().filter(|demand| demand.request == request);
                waiting.for_each(|demand| demand.offered.notify_one());
            }
            offer
        };
        let Ok(ticket) = offer else {
            let reason = format!("{TICKETS_PER_REGION_MAX} requests of jobs are in flight to the region");
            return attempt::no_capacity(reason, Some(NO_TICKET_RETRY)).into();
        };
        let _withdrawn = Withdrawal { transfers: self, ticket, request: &request };
        // It has to end the ticket when its lease is over.
        self.changed.notify_one();
        response.await.unwrap_or_else(|_| attempt::failed("the transfer ended without a result").into())
    }

    /// Waits for a request for a gateway, and grants its ticket. `is_permitted` says whether the gateway may have it now.
    pub(super) async fn pull(
        &self,
        request: &TicketRequest,
        capacity: JobCapacity,
        is_permitted: impl Fn() -> bool,
    ) -> Option<GrantedRequest> {
        if !is_permitted() {
            return None;
        }
        let deadline = Instant::now() + PULL_WAIT_MAX;
        let waiting = self.wait_for(request, capacity);
        self.changed.notify_one();
        loop {
            if let Some(pulled) = self.granted(request) {
                return Some(pulled);
            }
            // An offer since the registration is not missed: its signal stays until it is received.
            timeout_at(deadline.into(), waiting.offered.notified()).await.ok()?;
            if !is_permitted() {
                return None;
            }
        }
    }

    fn granted(&self, request: &TicketRequest) -> Option<GrantedRequest> {
        let state = &mut *self.state.lock();
        let ticket = state.tickets.pull(request, Instant::now())?;
        let OfferedRequest { id, traceparent, path, body, .. } = state.requests.get(&ticket)?;
        let (id, traceparent) = (id.clone(), traceparent.clone());
        Some(GrantedRequest { ticket, id, traceparent, path, body: body.clone() })
    }

    fn wait_for(&self, request: &TicketRequest, capacity: JobCapacity) -> Waiting<'_> {
        let state = &mut *self.state.lock();
        let number = state.next_demand;
        state.next_demand += 1;
        let offered = Arc::new(Notify::new());
        let demand =
            TransferDemand { request: request.clone(), capacity, is_met: false, offered: offered.clone() };
        state.demands.insert(number, demand);
        Waiting { transfers: self, number, offered }
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
            ReplicaAttemptEnd::Computed { .. } => JobTransferOutcome::Computed,
            ReplicaAttemptEnd::Rejected(_) => JobTransferOutcome::Rejected,
            ReplicaAttemptEnd::Failed(_) => JobTransferOutcome::Failed,
            ReplicaAttemptEnd::NoCapacity { .. } => JobTransferOutcome::NoCapacity,
        };
        self.record(&request, ticket, outcome);
        // The attempt may have been aborted at this moment.
        offered.respond.send(end.into()).is_ok()
    }

    /// Ends a ticket that its gateway has not received. The request is offered again with the next attempt.
    pub(super) fn undelivered(&self, ticket: u64) {
        let ended = {
            let state = &mut *self.state.lock();
            let request = state.tickets.end(ticket, Instant::now());
            request.and_then(|request| Some((request, state.requests.remove(&ticket)?)))
        };
        let Some((request, offered)) = ended else { return };
        self.record(&request, ticket, JobTransferOutcome::NotTaken);
        // The attempt may have been aborted at this moment.
        offered.respond.send(attempt::gateway_lost(false)).ok();
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
            let outcome = if ticket.was_granted {
                *lost.entry(ticket.request.target).or_insert(0) += 1;
                JobTransferOutcome::Expired
            } else {
                JobTransferOutcome::NotTaken
            };
            self.record(&ticket.request, ticket.number, outcome);
            if let Some(offered) = offered {
                // The attempt may have been aborted at this moment.
                offered.respond.send(attempt::gateway_lost(ticket.was_granted)).ok();
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
    offered: Arc<Notify>,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.transfers.state.lock().demands.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;
    use jobs_core::transfer::TransferGroup;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::{Context, Wake, Waker};

    /// Waker that counts.
    #[derive(Default)]
    struct Wakes(AtomicUsize);

    impl Wake for Wakes {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    const CAPACITY: JobCapacity =
        JobCapacity { ready: 1, held: 0, pending_tokens: 0, tokens_per_second: 1000.0 };

    fn transfers() -> OfferedTransfers {
        let catalogue = Arc::new(Catalogue::builtin());
        let metrics = Arc::new(JobMetrics::new(&catalogue));
        OfferedTransfers::new(catalogue, metrics)
    }

    fn request(transfers: &OfferedTransfers, tenant: &str) -> TicketRequest {
        let (deployment, residency) = ("m".to_owned(), "anywhere".to_owned());
        let group = TransferGroup { deployment, tenant: tenant.to_owned(), residency };
        TicketRequest { group, target: transfers.catalogue.all().iter().next().expect("a region") }
    }

    #[tokio::test]
    async fn an_offer_wakes_the_worker_and_the_gateways_that_wait_for_it() {
        let transfers = transfers();
        let (wanted, other) = (request(&transfers, "a"), request(&transfers, "b"));
        let wakes = [(); 2].map(|()| Arc::new(Wakes::default()));
        let always: fn() -> bool = || true;
        let mut pulls = [&wanted, &other].map(|request| Box::pin(transfers.pull(request, CAPACITY, always)));
        for (pull, wakes) in pulls.iter_mut().zip(&wakes) {
            let waker = Waker::from(wakes.clone());
            assert!(pull.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        }
        assert!(transfers.changed.notified().now_or_never().is_some(), "a demand wakes the worker");
        assert_eq!(transfers.demands()[&wanted].count, 1);
        let offer = |request: &TicketRequest| {
            Box::pin(transfers.compute(
                request.clone(),
                ("id".to_owned(), None),
                "/v1/embeddings",
                Bytes::new(),
            ))
        };
        let mut offered = offer(&wanted);
        assert!((&mut offered).now_or_never().is_none());
        assert!(
            transfers.changed.notified().now_or_never().is_some(),
            "the worker, which may sleep for as long as the lease of an offer, ends it in time"
        );
        let woken = wakes.each_ref().map(|wakes| wakes.0.load(Ordering::Relaxed));
        assert_eq!(woken, [1, 0], "only the gateway that waits for such a request");
        let [pull, of_other] = pulls;
        drop(of_other);
        let granted = pull.await.expect("the request");
        assert!(transfers.demands().is_empty());
        transfers.expire(Instant::now() + 2 * jobs_core::transfer::TICKET_LEASE);
        assert!(!transfers.renew(granted.ticket));
        let JobRequestEnd { end, is_gateway_lost } = offered.await;
        assert!(matches!(end, ReplicaAttemptEnd::Failed(_)) && is_gateway_lost, "it counts as an attempt");

        let mut offered = offer(&wanted);
        assert!((&mut offered).now_or_never().is_none());
        let granted = transfers.pull(&wanted, CAPACITY, || true).await.expect("the request");
        transfers.undelivered(granted.ticket);
        let JobRequestEnd { end, is_gateway_lost } = offered.await;
        assert!(matches!(end, ReplicaAttemptEnd::NoCapacity { .. }) && is_gateway_lost, "it does not count");
        assert!(!transfers.renew(granted.ticket));

        let mut offered = offer(&wanted);
        assert!((&mut offered).now_or_never().is_none());
        let granted = transfers.pull(&wanted, CAPACITY, || true).await.expect("the request");
        assert!(transfers.end(granted.ticket, Err(("no replica".to_owned(), None))));
        assert!(!offered.await.is_gateway_lost, "the region that the gateway selected is the cause");
    }

    #[tokio::test]
    async fn a_gateway_without_permission_is_no_demand() {
        let transfers = transfers();
        let wanted = request(&transfers, "a");
        assert!(transfers.pull(&wanted, CAPACITY, || false).await.is_none());
        assert!(transfers.changed.notified().now_or_never().is_none(), "the worker is not woken");
    }
}
