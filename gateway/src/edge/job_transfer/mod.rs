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

pub(super) use queue_client::QueueClient;

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
use crate::upstream::{ResponseBody, Upstream, UpstreamResponse};
use bytes::{Bytes, BytesMut};
use gateway_core::body::BYTES_PER_TOKEN;
use gateway_core::job_transfer::{TransferCandidate, TransferQuery};
use gateway_core::latency::SizeClass;
use gateway_core::residency::AllowedRegions;
use gateway_core::tenant::{Cost, Tenant};
use gateway_core::trail::{PolicyVersion, Trail};
use queue_client::PulledTransfer;
use regions::id::DeploymentName;
use regions::residency::ResidencyPolicy;
use regions::set::{RegionIndex, RegionSet};
use replica_api::error::ErrorCode;
use replica_api::headers;
use replica_api::limits::MAX_BODY_BYTES;
use replica_api::priority::Priority;
use scheduler_api::VERSION;
use scheduler_api::job_transfer::{self, JobGroupV1, LINE_BYTES_MAX, PullRequestV1, ReturnedV1};
use scheduler_api::report::EXCHANGE_PERIOD;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use supervision::task::{contained, supervise};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{MissedTickBehavior, interval, sleep};

/// Transfers of a gateway at the same time, in all regions. Each has its request and its result in memory: with the largest ones
/// of both (4 and 32 MiB) 1.2 GB, with a thousand short texts in flight some 20 MB.
pub(super) const TRANSFERS_MAX: usize = 32;
/// Transfers of the jobs of one group, so that another group finds a place.
const GROUP_TRANSFERS_MAX: usize = 8;
/// Period in which the list of regions with a queue is compared with the tasks.
const LIST_PERIOD: Duration = Duration::from_secs(1);
/// Pause between two requests for waiting jobs. What a gateway decides by, the reports of the regions, changes in this period.
const POLL_PAUSE: Duration = EXCHANGE_PERIOD;
/// Pause after a failed one: the region is unreachable, or of an earlier version.
const RETRY_PAUSE: Duration = Duration::from_secs(2);
/// Attempts to return a result, and the pause after each.
const RETURN_ATTEMPTS: u32 = 3;
const RETURN_PAUSE: Duration = Duration::from_secs(1);
/// Timeout of the computation: many times that of the largest request at a slow replica, which is ready.
const COMPUTE_TIMEOUT: Duration = Duration::from_secs(300);
/// Longest result: what the region of the queue reads, without the first line.
const RESULT_BYTES_MAX: usize = MAX_BODY_BYTES - LINE_BYTES_MAX - 1;

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

/// End of a computation in the other region.
struct TransferEnd {
    status: Option<u16>,
    code: Option<ErrorCode>,
    retry_after: Option<Duration>,
    reason: Option<String>,
    body: Bytes,
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
        let routed = transfers.views.borrow().as_ref().map_or(RegionSet::EMPTY, |view| view.routed);
        let with_jobs = transfers.region_monitor.states().instances.regions_with_jobs().intersect(routed);
        by_region.retain(|region, task| {
            let stays = with_jobs.contains(*region);
            if !stays {
                task.abort();
            }
            stays
        });
        for region in with_jobs.iter() {
            by_region.entry(region).or_insert_with(|| {
                let transfers = transfers.clone();
                tasks.spawn(supervise("job transfers", move || transfers.clone().transfer_from(region)))
            });
        }
    }
}

impl JobTransfers {
    /// Transfers requests of the jobs of one region.
    async fn transfer_from(self: Arc<JobTransfers>, queue: RegionIndex) {
        let mut pulls = JoinSet::new();
        let mut running: BTreeMap<(String, String, String), usize> = BTreeMap::new();
        loop {
            let address = self.region_monitor.states().instances.job_host(queue, Instant::now()).cloned();
            let waiting = match address {
                Some(address) => self.queue_client.waiting(&UpstreamKey { region: queue, address }).await,
                None => Err("no instance has the queue".to_owned()),
            };
            while let Some(ended) = pulls.try_join_next() {
                // The place of a task that panicked is free again below, when all have ended.
                if let Ok(Some(key)) = ended
                    && let Some(count) = running.get_mut(&key)
                {
                    *count -= 1;
                }
            }
            if pulls.is_empty() {
                running.clear();
            }
            running.retain(|_, count| *count > 0);
            let Ok(waiting) = waiting else {
                sleep(RETRY_PAUSE).await;
                continue;
            };
            for group in waiting {
                let key = (group.deployment.clone(), group.tenant.clone(), group.residency.clone());
                let count = running.entry(key.clone()).or_insert(0);
                while *count < GROUP_TRANSFERS_MAX
                    && self.decide(queue, &group).is_some()
                    && let Ok(slot) = self.slots.clone().try_acquire_owned()
                {
                    let (transfers, group, key) = (self.clone(), group.clone(), key.clone());
                    pulls.spawn(contained("job transfer", async move {
                        transfers.transfer_group(queue, group, slot).await;
                        key
                    }));
                    *count += 1;
                }
            }
            sleep(POLL_PAUSE).await;
        }
    }

    /// Transfers requests of one group, one after the other, as long as there are some and a region has capacity.
    async fn transfer_group(&self, queue: RegionIndex, group: JobGroupV1, _slot: OwnedSemaphorePermit) {
        while let Some(transfer) = self.decide(queue, &group) {
            let Some(pulled) = self.pull(&transfer).await else { return };
            self.perform(&transfer, pulled).await;
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
            let candidates = candidates.iter().map(|region| TransferCandidate {
                region,
                health: states.health(region, &routing, now),
                is_draining: view.draining.contains(region),
                load: states.load(region, &deployment),
                credit: states.spill.credit(region, &deployment, now),
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
    async fn pull(&self, transfer: &Transfer) -> Option<PulledTransfer> {
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
                () = self.until_draining() => TransferEnd::none("the gateway stops"),
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
        let TransferEnd { status, code, retry_after, reason, body } = end;
        let line = ReturnedV1 {
            version: VERSION,
            ticket,
            status,
            error: code.map(|code| code.as_str().to_owned()),
            retry_after_ms: retry_after.map(|wait| wait.as_millis() as u64),
            reason,
        };
        let message = Bytes::from(job_transfer::framed(&line, &body));
        drop(body);
        for attempt in 1..=RETURN_ATTEMPTS {
            // A repetition after a lost response finds the ticket ended.
            let returned =
                self.queue_client.return_result(&transfer.host, &transfer.permitted, message.clone());
            match returned.await {
                Ok(()) => return,
                Err(reason) => {
                    // The result could not be returned. After the last attempt the request is computed again.
                    tracing::debug!(ticket, attempt, reason, "returning a result failed");
                    sleep(RETURN_PAUSE).await;
                }
            }
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
        let tokens = (pulled.body.len() as u64 / BYTES_PER_TOKEN).max(1);
        let cost = Cost { inputs: 1, tokens };
        let Some(routed) = view.deployment(deployment.as_str(), tenant) else {
            return TransferEnd::none("the deployment was removed");
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
            return TransferEnd::none("the gateway cannot write a receipt");
        }
        let (arrived, at_ms) = (Instant::now(), now_ms());
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
            headers: ForwardedHeaders::of_job(&[(headers::PRIORITY, Priority::Bulk.as_str())]),
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
            Ok(AttemptResponse { response, .. }) => self.received(response).await,
            Err(ForwardError::Rejected(rejection)) if rejection.code == ErrorCode::DeadlineExceeded => {
                TransferEnd {
                    status: Some(rejection.code.status()),
                    code: Some(rejection.code),
                    retry_after: None,
                    reason: None,
                    body: Bytes::new(),
                }
            }
            Err(ForwardError::Rejected(rejection)) => {
                TransferEnd { retry_after: rejection.retry_after, ..TransferEnd::none(rejection.message) }
            }
            Err(ForwardError::ClientDisconnected) => TransferEnd::none("the gateway stopped"),
        };
        if let Some(status) = end.status {
            record.outcome = RequestOutcome::Complete { status, code: end.code };
        }
        end
    }

    /// Receives the whole response of a region.
    async fn received(&self, response: UpstreamResponse) -> TransferEnd {
        let UpstreamResponse { head, body } = response;
        let text = |name: &str| head.headers.get(name).and_then(|value| value.to_str().ok());
        let failed = |reason: &str| TransferEnd {
            status: Some(500),
            body: serde_json::json!({"error": reason}).to_string().into(),
            ..TransferEnd::none("")
        };
        let body = match body {
            ResponseBody::Buffered(body) => body,
            ResponseBody::Streamed(mut streamed) => {
                let mut whole = BytesMut::new();
                loop {
                    match streamed.chunk().await {
                        Ok(Some(chunk)) if whole.len() + chunk.len() > RESULT_BYTES_MAX => {
                            return failed("the result is too large to be returned by a gateway");
                        }
                        Ok(Some(chunk)) => whole.extend_from_slice(&chunk),
                        Ok(None) => break,
                        // Not a lack of capacity: a request that ends replicas must not be repeated for ever.
                        Err(_) => return failed("the response of the region was truncated"),
                    }
                }
                streamed.finish(&self.upstream);
                whole.freeze()
            }
        };
        let retry_after = text(headers::RETRY_AFTER_MS).and_then(|wait| wait.parse().ok());
        TransferEnd {
            status: Some(head.status.as_u16()),
            code: text(headers::ERROR).and_then(ErrorCode::parse),
            retry_after: retry_after.map(Duration::from_millis),
            reason: None,
            body,
        }
    }
}

impl TransferEnd {
    /// No region has responded.
    fn none(reason: impl Into<String>) -> TransferEnd {
        let reason = Some(reason.into());
        TransferEnd { status: None, code: None, retry_after: None, reason, body: Bytes::new() }
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
