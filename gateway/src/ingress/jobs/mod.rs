//! Queue of durable jobs of a region: requests that are accepted now and computed when there is capacity.
//!
//! ```text
//! gateway ─▶ api (validate, submit) ─▶ queue (log, objects) ─▶ worker ─▶ replica
//!                                      │ ▲                       │
//!              webhook ◀─ messages ◀───┘ └───── end, result ─────┘
//! ```
//!
//! [`api`] serves submissions and the state of jobs to gateways, [`worker`] computes them, [`webhooks`] accepts their
//! webhooks, [`readers`] decides which gateways may return results, [`messages`] sends the results, [`traces`] makes the
//! traces of jobs, [`usage`] counts what tenants get computed, and [`config`] opens the queue. A job is sent to a replica by
//! the same function as the request of a gateway, as a bulk request.
//!
//! [`files`] and [`batches`] serve files and batches; a chunk of a batch is a job, which [`chunk`] computes. [`attempt`] is the end
//! of one request of a job.
//!
//! While a region has more jobs than it can compute, gateways take requests of jobs to other regions: [`transfers`] has the
//! requests, and [`transfer_api`] serves the gateways.

mod api;
mod attempt;
mod batches;
mod chunk;
mod config;
mod files;
mod messages;
mod names;
mod page_query;
mod readers;
mod traces;
mod transfer_api;
mod transfers;
mod usage;
mod webhooks;
mod worker;

pub(super) use api::{JobApi, JobQuery};
pub(super) use batches::finalize;
pub use config::{JobsConfig, JobsError};
pub(super) use messages::send;
pub(super) use traces::{JobTraces, export_ended};
pub(super) use transfer_api::TransferCall;
pub(super) use transfers::{POLLS_MAX, PULLS_MAX};
pub(super) use usage::{finish_usage, follow_usage};
pub(super) use webhooks::follow_secrets;
pub(super) use worker::{JobComputation, work};

use crate::body_memory::{BodyMemoryBudget, Reservation};
use crate::events::{JobLogReadable, JobLogUnreadable, JobStoreFailed};
use crate::metrics::{JobMetrics, JobScrape};
use crate::respond::Rejection;
use gateway_core::memory::{self, BodyOwner};
use identity::Transport;
use jobs::dir_lock::DirLock;
use jobs::queue_host::{QueueError, QueueHost, QueueTasks, now};
use jobs_core::decide;
use jobs_core::job::{DurableJob, DurableJobId, JobStatus, UnixMillis};
use jobs_core::pace::CompletionRate;
use jobs_core::queue::JobPosition;
use regions::RegionId;
use regions::catalogue::Catalogue;
use replica_api::error::ErrorCode;
use resolver::Resolver;
use scheduler_client::hub::ControlPlaneClient;
use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use supervision::Mutex;
use transfers::OfferedTransfers;
use usage::JobUsage;
use webhooks::Webhooks;

/// Memory of the results, and of the pages of lists, that are being sent. A client that reads slowly holds its own until the write
/// timeout, and a quarter of the total is its tenant's limit, so it delays no other tenant. The largest result
/// ([`attempt::RESULT_BYTES_MAX`]) fits twice, because it is copied into the response.
const RESULT_MEMORY: memory::Limits =
    memory::Limits { total: 2 << 30, per_tenant: 512 << 20, per_connection: usize::MAX };
/// Time after which a client may read a result that was rejected for lack of memory.
const RESULT_RETRY: Duration = Duration::from_secs(1);
const _: () = assert!(RESULT_MEMORY.per_tenant >= 2 * attempt::RESULT_BYTES_MAX);

/// Queue of a region.
pub(super) struct RegionalJobQueue {
    host: QueueHost,
    region: RegionId,
    metrics: Arc<JobMetrics>,
    transfers: Arc<OfferedTransfers>,
    webhooks: Webhooks,
    file_limits: config::FileLimits,
    /// Memory of the results and of the pages of lists that are being sent.
    results: BodyMemoryBudget,
    /// Usage of tenants by its jobs.
    usage: JobUsage,
    /// Whether the last operation failed.
    failing: AtomicBool,
    /// Measured rates of deployments.
    rates: Mutex<BTreeMap<String, CompletionRate>>,
    _dir_lock: DirLock,
}

impl RegionalJobQueue {
    /// Opens the queue of a region.
    pub(super) async fn open(
        config: &JobsConfig,
        region: &RegionId,
        resolver: &Resolver,
        transport: &Transport,
        catalogue: &Arc<Catalogue>,
    ) -> Result<(RegionalJobQueue, QueueTasks), JobsError> {
        let hubs = config.hubs.as_ref();
        let client =
            hubs.map(|hubs| ControlPlaneClient::new(hubs, transport, resolver.clone())).transpose()?;
        let webhooks = Webhooks::new(&config.webhooks, region, resolver)?;
        let config::OpenedQueue { host, tasks, lock } = config.open(region).await?;
        let (metrics, rates) = (Arc::new(JobMetrics::new(catalogue)), Mutex::default());
        let transfers = Arc::new(OfferedTransfers::new(catalogue.clone(), metrics.clone()));
        let failing = AtomicBool::new(false);
        let results = BodyMemoryBudget::new(RESULT_MEMORY);
        // The directory exists now.
        let usage = JobUsage::open(&config.usage_files(), region, catalogue, client);
        let (region, file_limits) = (region.clone(), config.file_limits);
        let queue = RegionalJobQueue {
            host,
            region,
            metrics,
            transfers,
            webhooks,
            file_limits,
            results,
            usage,
            failing,
            rates,
            _dir_lock: lock,
        };
        Ok((queue, tasks))
    }

    /// Records whether an operation failed because of the store; returns its result.
    fn recorded<T>(&self, result: Result<T, QueueError>) -> Result<T, QueueError> {
        match &result {
            Err(error @ (QueueError::Log(_) | QueueError::Objects(_) | QueueError::Closed)) => {
                let is_new = !self.failing.swap(true, Ordering::Relaxed);
                JobStoreFailed { region: &self.region, error, is_new }.record(&self.metrics);
            }
            Ok(_) => self.failing.store(false, Ordering::Relaxed),
            // A mistake of the client.
            Err(QueueError::Rejected(_) | QueueError::OtherRequest(_) | QueueError::Unknown) => {}
        }
        result
    }

    /// Reserves the memory to send the result of a job, if it has one.
    fn reserve_result(&self, job: &DurableJob) -> Result<Option<Reservation>, Rejection> {
        let JobStatus::Finished { result: Some(range), .. } = &job.status else { return Ok(None) };
        reserve(&self.results, &job.spec.tenant, range.length).map(Some)
    }

    /// Returns the metrics of the queue.
    pub(super) fn scrape(&self) -> JobScrape<'_> {
        let (totals, submissions) = (self.host.totals(), self.host.submissions());
        JobScrape {
            counted: &self.metrics,
            accepted: metrics::Total(submissions.accepted),
            repeated: metrics::Total(submissions.repeated),
            queued: totals.queued,
            running: totals.running,
            transfers: self.transfers.tickets(),
            finished: totals.finished,
            oldest: totals.oldest.map_or(Duration::ZERO, |oldest| now().since(oldest)),
            failing: self.host.failure().borrow().is_some(),
            undelivered: totals.undelivered,
            oldest_undelivered: totals
                .oldest_undelivered
                .map_or(Duration::ZERO, |oldest| now().since(oldest)),
            erasures_dropped: metrics::Total(self.host.erasures_dropped()),
            usage: self.usage.state().into(),
        }
    }

    /// Returns the estimated time until a job at this position starts.
    fn start_estimate(&self, deployment: &str, position: &JobPosition) -> Option<Duration> {
        let rate = self.rates.lock().get(deployment)?.inputs_per_second()?;
        decide::start_estimate(position, rate)
    }

    /// Measures the rate of a deployment: its first job has started, or inputs were computed.
    fn measure(&self, deployment: &str, measure: impl FnOnce(&mut CompletionRate, Instant)) {
        let now = Instant::now();
        let mut rates = self.rates.lock();
        let rate = rates.entry(deployment.to_owned()).or_insert_with(|| CompletionRate::new(now));
        measure(rate, now);
    }
}

/// Returns the number by which budgets and limits distinguish a tenant. Two tenants with the same one share a limit.
fn number_of(tenant: &str) -> usize {
    let mut hasher = DefaultHasher::new();
    tenant.hash(&mut hasher);
    hasher.finish() as usize
}

/// Reserves the memory to send a result of this many bytes to a tenant.
fn reserve(results: &BodyMemoryBudget, tenant: &str, bytes: u64) -> Result<Reservation, Rejection> {
    let owner = BodyOwner { tenant: Some(number_of(tenant)), connection: None };
    let mut reservation = results.reservation(owner);
    // What encryption and the other lines of a chunk add to the largest result is neglected: otherwise it would be rejected also
    // when no other one is being sent.
    match reservation.grow_to((2 * bytes as usize).min(RESULT_MEMORY.per_tenant)) {
        Ok(()) => Ok(reservation),
        Err(_) => {
            let message = "Too many results and lists of jobs are being read at the same time; read fewer at once, and repeat the \
                           request.";
            Err(Rejection::new(ErrorCode::Overloaded, message).after(RESULT_RETRY))
        }
    }
}

/// Returns a time in seconds since 1970, as in the API.
fn seconds(time: UnixMillis) -> u64 {
    time.0 / 1000
}

/// Records when the log of the queue cannot be read, and when it can again.
pub(super) async fn follow_failure(queue: Arc<RegionalJobQueue>) {
    let mut failure = queue.host.failure();
    let mut failed = false;
    loop {
        let error = failure.borrow_and_update().clone();
        let was_failed = std::mem::replace(&mut failed, error.is_some());
        match error {
            Some(error) => JobLogUnreadable { region: &queue.region, error: &error }.record(&queue.metrics),
            None if was_failed => JobLogReadable { region: &queue.region }.record(),
            None => {}
        }
        if failure.changed().await.is_err() {
            // The queue is closed: the process ends.
            return std::future::pending().await;
        }
    }
}

/// Identifier of a job for clients: that of the queue and the region of the queue, so that every gateway finds it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct ClientJobId<'a> {
    id: DurableJobId,
    region: &'a RegionId,
}

impl std::fmt::Display for ClientJobId<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let ClientJobId { id, region } = self;
        write!(f, "{id}.{}", region.as_str().replace('/', "."))
    }
}

impl<'a> ClientJobId<'a> {
    /// Reads the identifier of a job of this region; none if it is another text.
    fn of_region(text: &str, region: &'a RegionId) -> Option<ClientJobId<'a>> {
        let (id, rest) = text.split_once('.')?;
        let id = DurableJobId::from_str(id).ok()?;
        let id = ClientJobId { id, region };
        (format!("{}.{rest}", id.id) == id.to_string()).then_some(id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_of_one_tenant_leave_memory_for_those_of_others() {
        let results = BodyMemoryBudget::new(RESULT_MEMORY);
        let largest = attempt::RESULT_BYTES_MAX as u64;
        let first = reserve(&results, "a", largest).expect("the largest result fits");
        let rejected = reserve(&results, "a", 1).map(drop).expect_err("the limit of the tenant");
        assert_eq!((rejected.code, rejected.retry_after), (ErrorCode::Overloaded, Some(RESULT_RETRY)));
        let others =
            ["b", "c", "d"].map(|tenant| reserve(&results, tenant, largest).expect("of another tenant"));
        assert!(reserve(&results, "e", 1).is_err(), "the limit of the process");
        drop((first, others));
        assert!(reserve(&results, "a", largest).is_ok(), "memory is released");
        let encrypted = reserve(&results, "a", largest + 32).expect("no result is larger than all memory");
        assert!(reserve(&results, "a", 1).is_err());
        drop(encrypted);
    }

    #[test]
    fn an_identifier_names_the_region_of_its_queue() {
        let region: RegionId = "gcp/europe-west4".parse().expect("a region");
        let other: RegionId = "gcp/europe-west3".parse().expect("a region");
        let id = ClientJobId { id: DurableJobId::new(UnixMillis(1), 2), region: &region };
        let text = id.to_string();
        assert!(text.ends_with(".gcp.europe-west4"), "{text}");
        assert_eq!(ClientJobId::of_region(&text, &region), Some(id.clone()));
        assert_eq!(ClientJobId::of_region(&text, &other), None);
        for wrong in ["", "job_", &id.id.to_string(), &format!("{text}x"), &text.to_uppercase()] {
            assert_eq!(ClientJobId::of_region(wrong, &region), None, "{wrong}");
        }
    }
}
