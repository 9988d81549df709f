//! Queue of durable jobs of a region: requests that are accepted now and computed when there is capacity.
//!
//! ```text
//! gateway ─▶ api (validate, submit) ─▶ queue (log, objects) ─▶ worker ─▶ replica
//!                                        ▲                       │
//!                                        └───── end, result ─────┘
//! ```
//!
//! [`api`] serves submissions and the state of jobs to gateways, [`worker`] computes them, and [`config`] opens the queue. A
//! job is sent to a replica by the same function as the request of a gateway, as a bulk request.

mod api;
mod config;
mod worker;

pub(super) use api::{JobApi, JobQuery};
pub use config::{JobsConfig, JobsError};
pub(super) use worker::{JobComputation, work};

use crate::events::{JobLogReadable, JobLogUnreadable, JobStoreFailed};
use crate::metrics::{JobMetrics, JobScrape};
use jobs::queue_host::{QueueError, QueueHost, QueueTasks, now};
use jobs_core::decide;
use jobs_core::job::DurableJobId;
use jobs_core::pace::CompletionRate;
use jobs_core::queue::JobPosition;
use regions::RegionId;
use std::collections::BTreeMap;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use supervision::Mutex;

/// Queue of a region.
pub(super) struct RegionalJobQueue {
    host: QueueHost,
    region: RegionId,
    metrics: JobMetrics,
    /// Whether the last operation failed.
    failing: AtomicBool,
    /// Measured rates of deployments.
    rates: Mutex<BTreeMap<String, CompletionRate>>,
}

impl RegionalJobQueue {
    /// Opens the queue of a region.
    pub(super) async fn open(
        config: &JobsConfig,
        region: &RegionId,
    ) -> Result<(RegionalJobQueue, QueueTasks), JobsError> {
        let (host, tasks) = config.open(region).await?;
        let (metrics, rates) = (JobMetrics::default(), Mutex::default());
        let failing = AtomicBool::new(false);
        Ok((RegionalJobQueue { host, region: region.clone(), metrics, failing, rates }, tasks))
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

    /// Returns the metrics of the queue.
    pub(super) fn scrape(&self) -> JobScrape<'_> {
        let totals = self.host.totals();
        JobScrape {
            counted: &self.metrics,
            queued: totals.queued,
            running: totals.running,
            finished: totals.finished,
            oldest: totals.oldest.map_or(Duration::ZERO, |oldest| now().since(oldest)),
            failing: self.host.failure().borrow().is_some(),
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
    use jobs_core::job::UnixMillis;

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
