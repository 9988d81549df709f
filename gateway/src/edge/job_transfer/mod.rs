//! Transfer of requests of jobs to other regions than that of their queue.
//!
//! ```text
//!             waiting, pull, renew               request
//!  region of the queue ◀────────────▶ gateway ────────────▶ other region
//!             ◀──────────────────────────────◀──────────────┘
//!                 result, with the ticket         response
//! ```
//!
//! Regions do not know each other's health, load or credit, and have no connections to each other; gateways do. So each gateway
//! polls the regions with a queue for jobs that wait too long ([`scheduler_api::job_transfer`]), selects a region for them
//! ([`gateway_core::job_transfer`]), and sends one request after the other there as an ordinary bulk request, with the policy
//! checks, the failure detection and the receipts of the [`Forwarder`]. The gateway keeps nothing: if it ends, its tickets expire
//! at the region of the queue.
//!
//! Such a request belongs to no client, so it is not charged to the rate limits of its tenant again, and not counted as a request
//! of the gateway.

mod queue_client;
mod running;
mod transfer_end;

pub(super) use queue_client::QueueClient;
pub(super) use transfer_end::{RESULTS_BYTES_MAX, ResultMemory};

use super::forwarder::{AttemptResponse, Forwarder, Permit};
use super::region_monitor::{RegionMonitor, random_draws};
use super::region_states::RoutingContext;
use super::request::Request;
use super::router::{Routable, Router};
use super::table::Current;
use super::view::{Terms, View};
use crate::body_memory::BufferedBody;
use crate::config::EdgeConfig;
use crate::events::{FinishedRequest, ResolvedRequest};
use crate::hop::UpstreamKey;
use crate::metrics::{EndpointLabel, RequestOutcome};
use crate::receipts::{QueueSlot, Recorder, WriterMessage, now_ms};
use crate::relay::ForwardedHeaders;
use crate::respond::ForwardError;
use crate::upstream::{BUFFERED_RESPONSE_MAX, Upstream};
use bytes::Bytes;
use gateway_core::body::BYTES_PER_TOKEN;
use gateway_core::job_transfer::{self as transfer, ReturnStep, TransferCandidate, TransferQuery};
use gateway_core::latency::SizeClass;
use gateway_core::residency::AllowedRegions;
use gateway_core::tenant::{Cost, Tenant};
use gateway_core::trail::{PolicyVersion, Trail};
use jobs_core::transfer::TRANSFER_BYTES_MAX;
use queue_client::PulledTransfer;
use regions::id::DeploymentName;
use regions::residency::ResidencyPolicy;
use regions::set::{RegionIndex, RegionSet};
use replica_api::error::ErrorCode;
use replica_api::headers;
use replica_api::priority::Priority;
use running::RunningTransfers;
use scheduler_api::VERSION;
use scheduler_api::job_transfer::{JobGroupV1, PullRequestV1};
use scheduler_api::report::EXCHANGE_PERIOD;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use supervision::task::{contained, supervise_until_done};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{MissedTickBehavior, interval, sleep, timeout};
use transfer_end::TransferEnd;

/// Transfers of a gateway at the same time, in all regions. With a thousand short texts in flight they take some 20 MB, and
/// [`MEMORY_MAX`] at most.
pub(super) const TRANSFERS_MAX: usize = 32;
/// Memory of the transfers of a gateway: each has its request and a result that was buffered with its head, and the larger results
/// have [`RESULTS_BYTES_MAX`].
const MEMORY_MAX: usize =
    TRANSFERS_MAX * (TRANSFER_BYTES_MAX as usize + BUFFERED_RESPONSE_MAX) + RESULTS_BYTES_MAX;
// As docs/jobs.md says.
const _: () = assert!(MEMORY_MAX <= 416 << 20);
/// Transfers of the jobs of one group, so that another group finds a slot.
const GROUP_TRANSFERS_MAX: usize = 8;
/// Time after which a transfer gives its slot to another group, if no other slot is free.
const SLOT_PERIOD: Duration = Duration::from_secs(2);
/// Period in which the list of regions with a queue is compared with the tasks.
const LIST_PERIOD: Duration = Duration::from_secs(1);
/// Pause between two requests for waiting jobs. What a gateway decides by, the reports of the regions, changes in this period.
const POLL_PAUSE: Duration = EXCHANGE_PERIOD;
/// Pause after a failed one, or a failed pull: the region is unreachable, overloaded, or of an earlier version.
const RETRY_PAUSE: Duration = Duration::from_secs(2);
/// Pause between two attempts to return a result.
const RETURN_PAUSE: Duration = Duration::from_secs(1);
/// Timeout of the computation: many times that of the largest request at a slow replica, which is ready.
const COMPUTE_TIMEOUT: Duration = Duration::from_secs(300);
/// Timeout of the last messages of a gateway that stops: its tickets are returned, without a result if there is none yet.
const FINISH_TIMEOUT: Duration = Duration::from_secs(5);

/// Transfers of one gateway.
pub(super) struct JobTransfers {
    pub(super) config: Arc<EdgeConfig>,
    /// Region of this gateway.
    pub(super) gateway: RegionIndex,
    pub(super) views: watch::Receiver<Current>,
    pub(super) region_monitor: Arc<RegionMonitor>,
    pub(super) router: Arc<Router>,
    pub(super) forwarder: Arc<Forwarder>,
    pub(super) queue_client: QueueClient,
    pub(super) upstream: Arc<Upstream>,
    pub(super) recorder: Option<Arc<Recorder>>,
    /// A permit for each transfer that may still begin.
    pub(super) slots: Arc<Semaphore>,
    /// Memory of the results.
    pub(super) result_memory: ResultMemory,
    /// Whether the gateway is draining.
    pub(super) draining: watch::Receiver<bool>,
}

/// Decision to transfer a request of a group.
struct Transfer {
    /// Instance that has the queue.
    host: UpstreamKey,
    group: JobGroupV1,
    view: Arc<View>,
    tenant: Arc<Tenant>,
    deployment: DeploymentName,
    /// Residency under which the jobs were accepted.
    accepted: ResidencyPolicy,
    policy: Arc<PolicyVersion>,
    /// Regions that may see the request and its result.
    permitted: AllowedRegions,
    /// The target alone.
    allowed: AllowedRegions,
    target: TransferCandidate,
}

/// Transfers requests of jobs of all regions with a queue.
pub(super) async fn follow(transfers: Arc<JobTransfers>) {
    let mut tasks = JoinSet::new();
    let mut by_region: BTreeMap<RegionIndex, AbortHandle> = BTreeMap::new();
    let mut timer = interval(LIST_PERIOD);
    timer.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        timer.tick().await;
        while tasks.try_join_next().is_some() {}
        by_region.retain(|_, task| !task.is_finished());
        for region in transfers.regions_with_queue().iter() {
            by_region.entry(region).or_insert_with(|| {
                let transfers = transfers.clone();
                tasks.spawn(supervise_until_done("job transfers", move || {
                    transfers.clone().transfer_from(region)
                }))
            });
        }
    }
}

/// Waits until a draining gateway has returned its tickets: aborted transfers would end with expired ones, which count as failed
/// attempts.
pub(super) async fn finish(slots: &Semaphore) {
    // After the timeout the tickets that are left expire.
    timeout(FINISH_TIMEOUT, slots.acquire_many(TRANSFERS_MAX as u32)).await.map(drop).ok();
}

impl JobTransfers {
    /// Returns the regions with a queue to which the gateway has routes.
    fn regions_with_queue(&self) -> RegionSet {
        let routed = self.views.borrow().as_ref().map_or(RegionSet::EMPTY, |view| view.routed);
        self.region_monitor.states().instances.regions_with_jobs().intersect(routed)
    }

    /// Transfers requests of the jobs of one region, until it has no queue and the transfers have ended.
    async fn transfer_from(self: Arc<JobTransfers>, queue: RegionIndex) {
        let mut running = RunningTransfers::default();
        loop {
            let has_queue = self.regions_with_queue().contains(queue);
            let address = self.region_monitor.states().instances.job_host(queue, Instant::now()).cloned();
            let waiting = match address.filter(|_| has_queue) {
                Some(address) => self.queue_client.waiting(&UpstreamKey { region: queue, address }).await,
                None => Err("no instance has the queue".to_owned()),
            };
            running.remove_ended();
            if !has_queue && running.tasks.is_empty() {
                return;
            }
            let Ok(waiting) = waiting else {
                sleep(RETRY_PAUSE).await;
                continue;
            };
            self.start(queue, waiting, &mut running);
            sleep(POLL_PAUSE).await;
        }
    }

    /// Starts transfers of waiting groups while there are slots.
    fn start(
        self: &Arc<JobTransfers>,
        queue: RegionIndex,
        waiting: Vec<JobGroupV1>,
        running: &mut RunningTransfers,
    ) {
        let mut groups: Vec<_> = waiting.into_iter().map(|group| (running::key_of(&group), group)).collect();
        running.retain(|key| groups.iter().any(|(listed, _)| listed == key));
        while let Ok(slot) = self.slots.clone().try_acquire_owned() {
            let shares = groups.iter().map(|(key, _)| running.share(key));
            let Some(at) = transfer::next_group(shares, GROUP_TRANSFERS_MAX) else { return };
            let Some(transfer) = self.decide(queue, &groups[at].1) else {
                groups.remove(at);
                continue;
            };
            let (transfers, key) = (self.clone(), groups[at].0.clone());
            running.started(key.clone());
            running.tasks.spawn(contained("job transfer", async move {
                transfers.transfer_group(transfer, slot).await;
                key
            }));
        }
    }

    /// Transfers requests of one group, one after the other, as long as there are some, a region has capacity, and other groups
    /// have slots as well.
    async fn transfer_group(&self, first: Transfer, slot: OwnedSemaphorePermit) {
        let (queue, group) = (first.host.region, first.group.clone());
        let begun = Instant::now();
        let mut next = Some(first);
        while let Some(transfer) = next {
            match self.pull(&transfer).await {
                Ok(Some(pulled)) => self.perform(&transfer, pulled).await,
                Ok(None) => return,
                Err(reason) => {
                    // The region of the queue is unreachable, or too many gateways wait there. The pull is repeated after a pause.
                    tracing::debug!(reason, "pulling a request of a job failed");
                    // Another group may use it.
                    drop(slot);
                    return sleep(RETRY_PAUSE).await;
                }
            }
            if begun.elapsed() >= SLOT_PERIOD && self.slots.available_permits() == 0 {
                return;
            }
            next = self.decide(queue, &group);
        }
    }

    /// Decides whether a request of a group is transferred, and to which region.
    fn decide(&self, queue: RegionIndex, group: &JobGroupV1) -> Option<Transfer> {
        if *self.draining.borrow() {
            return None;
        }
        let catalogue = &self.config.catalogue;
        let view = self.views.borrow().clone()?;
        let tenant = view.keys.tenants().find(|tenant| tenant.id.as_str() == group.tenant)?.clone();
        let routed = view.deployment(&group.deployment, &tenant)?;
        let deployment = routed.deployment.name.clone();
        let accepted: ResidencyPolicy = group.residency.parse().ok()?;
        let Terms { policy, allowed } = routed.terms(&tenant, &accepted, catalogue).ok()?;
        self.forwarder.policy.policy_clock.check(&policy.residency).ok()?;
        let together: ResidencyPolicy = policy.residency.as_str().parse().ok()?;
        let permitted = AllowedRegions::of_policy(&together, catalogue);
        let is_locked = policy.residency.is_locked();
        let query = TransferQuery {
            queue,
            gateway: self.gateway,
            permitted: *permitted,
            allowed: *allowed,
            is_locked,
        };
        let now = Instant::now();
        let (target, address) = {
            let states = self.region_monitor.states();
            let routing = routing(&deployment, Cost { inputs: 1, tokens: 1 });
            let candidates = allowed.intersect(view.routed);
            let order = view.order(&deployment).map(|order| &**order).unwrap_or_default();
            let candidates = candidates.iter().map(|region| TransferCandidate {
                region,
                health: states.health(region, &routing, now),
                is_draining: view.draining.contains(region) || states.fleet.draining().contains(region),
                load: states.load(region, &deployment),
                credit: states.spill.credit(region, &deployment, now),
                order_index: order.iter().position(|ordered| *ordered == region).unwrap_or(order.len()),
                rtt: states.latency.estimate(region, now),
            });
            (query.target(candidates)?, states.instances.job_host(queue, now)?.clone())
        };
        let only: ResidencyPolicy = catalogue.region(target.region).id.as_str().parse().ok()?;
        let allowed = allowed.narrowed(&only, catalogue);
        let host = UpstreamKey { region: queue, address };
        let group = group.clone();
        Some(Transfer { host, group, view, tenant, deployment, accepted, policy, permitted, allowed, target })
    }

    /// Pulls a request; none if there is none for the target.
    async fn pull(&self, transfer: &Transfer) -> Result<Option<PulledTransfer>, String> {
        let Transfer { group, target, .. } = transfer;
        let message = PullRequestV1 {
            version: VERSION,
            group: group.clone(),
            target: self.config.catalogue.region(target.region).id.to_string(),
            ready: target.load.ready,
            pending_tokens: target.load.pending_tokens,
            tokens_per_second: target.load.tokens_per_second,
        };
        self.queue_client.pull(&transfer.host, &message).await
    }

    /// Computes a request in the other region, and returns the result, unless the ticket ends before.
    async fn perform(&self, transfer: &Transfer, pulled: PulledTransfer) {
        let computed = async {
            let end = tokio::select! {
                biased;
                end = self.compute(transfer, &pulled) => end,
                // Otherwise the request would wait until the ticket expires.
                () = self.until_draining() => TransferEnd::without_response(pulled.ticket, "the gateway stops", None),
            };
            self.return_result(transfer, pulled.ticket, end).await;
        };
        tokio::select! {
            biased;
            () = computed => {}
            // The job was cancelled, or the ticket has expired. The attempt ends with its future.
            () = self.queue_client.renew_until_lost(&transfer.host, &pulled) => {}
        }
    }

    /// Returns a result to the region of the queue.
    async fn return_result(&self, transfer: &Transfer, ticket: u64, end: TransferEnd) {
        if self.send_result(transfer, ticket, &end.message).await == ReturnStep::WithoutResult {
            drop(end);
            let reason = "the region of the queue is overloaded";
            let without = TransferEnd::without_response(ticket, reason, None);
            self.send_result(transfer, ticket, &without.message).await;
        }
    }

    /// Sends a result to the region of the queue until the region accepts it or the attempts are over.
    async fn send_result(&self, transfer: &Transfer, ticket: u64, message: &Bytes) -> ReturnStep {
        let mut attempt = 1;
        loop {
            // A repetition after a lost response finds the ticket ended.
            let returned =
                self.queue_client.return_result(&transfer.host, &transfer.permitted, message.clone()).await;
            let step = transfer::after_return(returned.as_ref().ok().copied(), attempt);
            if step != ReturnStep::Ended {
                // The result could not be returned, and `step` follows. After the last attempt the request is computed again.
                tracing::debug!(ticket, attempt, ?returned, ?step, "returning a result failed");
            }
            if step != ReturnStep::Repeat {
                return step;
            }
            attempt += 1;
            sleep(RETURN_PAUSE).await;
        }
    }

    async fn until_draining(&self) {
        let mut draining = self.draining.clone();
        if draining.wait_for(|draining| *draining).await.is_err() {
            // The gateway ends.
            std::future::pending().await
        }
    }

    /// Sends a request to its target, and receives the whole response.
    async fn compute(&self, transfer: &Transfer, pulled: &PulledTransfer) -> TransferEnd {
        let Transfer { view, tenant, deployment, policy, allowed, target, accepted, .. } = transfer;
        let ticket = pulled.ticket;
        let tokens = (pulled.body.len() as u64 / BYTES_PER_TOKEN).max(1);
        let cost = Cost { inputs: 1, tokens };
        let Some(routed) = view.deployment(deployment.as_str(), tenant) else {
            return TransferEnd::without_response(ticket, "the deployment was removed", None);
        };
        let [target_draw, _, _] = random_draws();
        let routing = RoutingContext { target_draw, ..routing(deployment, cost) };
        let registered = routed.registered;
        let routable = Routable { view, routing, allowed: **allowed, registered, client: None };
        let route = self.router.route_transfer(&routable, target.region, tokens);
        let is_locked = policy.residency.is_locked();
        let needs_receipt = is_locked && self.recorder.as_ref().is_some_and(|recorder| recorder.required());
        let slot = self.recorder.as_ref().filter(|_| needs_receipt).map(|recorder| recorder.reserve());
        if matches!(slot, Some(None)) {
            return TransferEnd::without_response(ticket, "the gateway cannot write a receipt", None);
        }
        let (arrived, at_ms) = (Instant::now(), now_ms());
        let mut decided = vec![(headers::PRIORITY, Priority::Bulk.as_str())];
        // The gateway adds no span to the trace of a job.
        decided.extend(pulled.traceparent.as_deref().map(|span| (headers::TRACEPARENT, span)));
        let request = Request {
            id: pulled.id.clone(),
            arrived,
            timeout: COMPUTE_TIMEOUT,
            client: None,
            tenant: tenant.clone(),
            deployment: deployment.clone(),
            priority: Priority::Bulk,
            priority_changed: false,
            cost,
            residency: policy.residency.clone(),
            allowed: *allowed,
            policy: policy.clone(),
            requested_residency: accepted.clone(),
            key: None,
            at_ms,
            tls_ended_here: false,
            registered,
            revision: routed.revision,
            required: None,
            may_sleep: false,
            path: pulled.path,
            headers: ForwardedHeaders::of_job(&decided),
            body: BufferedBody::of_job(pulled.body.clone()),
            target_draw,
            route,
            trace: None,
            _admission: None,
        };
        let mut record = TransferRecord {
            transfers: self,
            request: &request,
            slot: slot.flatten(),
            trail: Trail::default(),
            outcome: RequestOutcome::Shutdown,
        };
        let permit = Permit::of(&request, view);
        let end = match self.forwarder.forward(&request, permit, &mut record.trail).await {
            Ok(AttemptResponse { response, .. }) => {
                TransferEnd::received(ticket, response, &self.upstream, &self.result_memory).await
            }
            Err(ForwardError::Rejected(rejection)) if rejection.code == ErrorCode::DeadlineExceeded => {
                TransferEnd::with_response(ticket, (rejection.code.status(), Some(rejection.code)), b"")
            }
            Err(ForwardError::Rejected(rejection)) => {
                TransferEnd::without_response(ticket, rejection.message, rejection.retry_after)
            }
            Err(ForwardError::ClientDisconnected) => {
                TransferEnd::without_response(ticket, "the gateway stopped", None)
            }
        };
        if let Some((status, code)) = end.response {
            record.outcome = RequestOutcome::Complete { status, code };
        }
        end
    }
}

fn routing(deployment: &DeploymentName, cost: Cost) -> RoutingContext<'_> {
    RoutingContext {
        deployment,
        priority: Priority::Bulk,
        size: SizeClass::of(cost.tokens),
        target_draw: crate::circuits::random_draw(),
        uses_engine: true,
        is_job: false,
    }
}

/// Receipts of a transferred request, written when it ends, also when it is cancelled in the middle.
struct TransferRecord<'a> {
    transfers: &'a JobTransfers,
    request: &'a Request,
    slot: Option<QueueSlot>,
    trail: Trail,
    outcome: RequestOutcome,
}

impl Drop for TransferRecord<'_> {
    fn drop(&mut self) {
        let now = Instant::now();
        self.trail.close(now);
        let Some(recorder) = &self.transfers.recorder else { return };
        let Request { id, arrived, at_ms, tenant, deployment, cost, policy, path, .. } = self.request;
        let finished = FinishedRequest {
            id: id.clone(),
            arrived: *arrived,
            at_ms: *at_ms,
            tls_ended_here: false,
            endpoint: EndpointLabel::at(path),
            outcome: self.outcome,
            tenant: Some(tenant.id.clone()),
            trail: std::mem::take(&mut self.trail),
            routed_at: None,
            served_by: None,
            tokens: None,
            total: now.saturating_duration_since(*arrived),
            resolved: Some(ResolvedRequest {
                deployment: deployment.clone(),
                cost: *cost,
                policy: policy.clone(),
            }),
            receipt: None,
            trace: None,
        };
        recorder.record(WriterMessage::Finished(Arc::new(finished)), self.slot.take());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;

    #[tokio::test(start_paused = true)]
    async fn a_gateway_ends_when_its_transfers_have_ended_or_after_a_timeout() {
        let slots = Semaphore::new(TRANSFERS_MAX);
        let transfer = slots.acquire().await.unwrap();
        let mut finished = Box::pin(finish(&slots));
        assert!((&mut finished).now_or_never().is_none(), "a transfer returns its ticket");
        drop(transfer);
        assert!(finished.now_or_never().is_some());
        let _lost = slots.acquire().await.unwrap();
        let begun = tokio::time::Instant::now();
        finish(&slots).await;
        assert!(begun.elapsed() >= FINISH_TIMEOUT);
    }
}
