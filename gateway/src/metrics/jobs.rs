//! Metrics of the queue of durable jobs of a region.

use super::{Counter, Family};
use crate::usage::LedgerState;
use metrics::{ByIndex, Total, labels, metric_set};
use regions::catalogue::Catalogue;
use scheduler_api::usage::ROWS_MAX;
use std::sync::Arc;
use std::time::Duration;

labels! {
    /// Outcome of an attempt to compute a job.
    pub(crate) enum JobAttemptOutcome {
        /// The result is stored.
        Succeeded = "succeeded",
        /// The request can never succeed, so the job has failed.
        Rejected = "rejected",
        /// The attempt failed. After the last one the job has failed.
        Failed = "failed",
        /// No replica had capacity. The job stays in the queue, and the attempt does not count.
        NoCapacity = "no_capacity",
    }
}

labels! {
    /// Outcome of a request of a job that was offered to another region.
    pub(crate) enum JobTransferOutcome {
        /// The other region has computed it.
        Computed = "computed",
        /// The model there has rejected it.
        Rejected = "rejected",
        /// The attempt there failed.
        Failed = "failed",
        /// The other region had no capacity for it, or the gateway did not send it there.
        NoCapacity = "no_capacity",
        /// The gateway did not renew its ticket: it was lost.
        Expired = "expired",
        /// No gateway has taken it.
        NotTaken = "not_taken",
        /// Its job was cancelled or has expired.
        Withdrawn = "withdrawn",
    }
}

labels! {
    /// Outcome of an attempt to deliver a result to a webhook.
    pub(crate) enum WebhookAttemptOutcome {
        /// The target has accepted it.
        Delivered = "delivered",
        /// The attempt failed, and another one follows.
        Failed = "failed",
        /// The attempt failed, and it was the last one.
        Abandoned = "abandoned",
        /// The target wants no further attempts (410).
        Stopped = "stopped",
        /// The outcome could not be stored: the result is sent again.
        NotRecorded = "not_recorded",
    }
}

labels! {
    /// Outcome of a line of a batch.
    pub(crate) enum BatchLineOutcome {
        /// It has a response.
        Completed = "completed",
        /// It has an error of the model.
        Failed = "failed",
    }
}

metric_set! {
    /// Counters of the queue of jobs.
    #[derive(Default)]
    pub(crate) struct JobMetrics {
        /// Ended attempts to compute a job, by outcome.
        pub(crate) attempts: Family<JobAttemptOutcome> = "meridian_jobs_attempts_total" ["outcome"],
        /// Requests of jobs that were offered to another region, by that region and by outcome.
        pub(crate) transfers: ByIndex<Family<JobTransferOutcome>> =
            "meridian_jobs_transfers_total" ["region", "outcome"],
        /// Results from other regions whose ticket had ended before; they were discarded.
        pub(crate) transfers_late: Counter = "meridian_jobs_transfers_late_total",
        /// Files that were stored.
        pub(crate) files: Counter = "meridian_jobs_files_total",
        /// Batches that were created.
        pub(crate) batches: Counter = "meridian_jobs_batches_total",
        /// Lines of batches that were computed, by outcome. Lines without an attempt, such as expired ones, are not counted.
        pub(crate) batch_lines: Family<BatchLineOutcome> = "meridian_jobs_batch_lines_total" ["outcome"],
        /// Failures of the job log that stopped the queue.
        pub(crate) log_failures: Counter = "meridian_jobs_log_failures_total",
        /// Operations that failed because the log or an object could not be read or written.
        pub(crate) store_failures: Counter = "meridian_jobs_store_failures_total",
        /// Ended attempts to deliver a result to a webhook, by outcome.
        pub(crate) webhook_attempts: Family<WebhookAttemptOutcome> = "meridian_jobs_webhook_attempts_total" ["outcome"],
        /// Versions of the file with webhook secrets that were rejected; the secrets before stay in use.
        pub(crate) webhook_secrets_rejected: Counter = "meridian_jobs_webhook_secrets_rejected_total",
    }
}

impl JobMetrics {
    /// Creates the metrics for these regions.
    pub(crate) fn new(catalogue: &Catalogue) -> JobMetrics {
        let regions = catalogue.iter().map(|(_, region)| region.id.to_string()).collect::<Arc<[_]>>();
        JobMetrics { transfers: ByIndex::new(&regions), ..JobMetrics::default() }
    }
}

metric_set! {
    /// Queue of durable jobs.
    pub(crate) struct JobScrape<'a> {
        /// Counters.
        pub(crate) counted: &'a JobMetrics = set,
        /// Jobs that were accepted: durable, and confirmed to the client. The parts of batches are not counted.
        pub(crate) accepted: Total = "meridian_jobs_accepted_total",
        /// Submissions with the idempotency key of an earlier job, which they have returned. They add no job.
        pub(crate) repeated: Total = "meridian_jobs_repeated_total",
        /// Jobs that wait.
        pub(crate) queued: u64 = "meridian_jobs_queued",
        /// Jobs that are computed, or whose worker has ended.
        pub(crate) running: u64 = "meridian_jobs_running",
        /// Requests of jobs that are offered to other regions, or computed there.
        pub(crate) transfers: usize = "meridian_jobs_transfers",
        /// Finished jobs that are kept until the end of their retention.
        pub(crate) finished: u64 = "meridian_jobs_finished",
        /// Age of the oldest unfinished job; 0 without one.
        pub(crate) oldest: Duration = "meridian_jobs_oldest_seconds",
        /// 1 while the job log cannot be read, and jobs fail.
        pub(crate) failing: bool = "meridian_jobs_failing",
        /// Results that are still to be delivered to a webhook.
        pub(crate) undelivered: u64 = "meridian_jobs_undelivered",
        /// Age of the oldest of them, since the end of its job; 0 without one.
        pub(crate) oldest_undelivered: Duration = "meridian_jobs_oldest_undelivered_seconds",
        /// Parts of stored objects that were not overwritten when their jobs or files were removed, because too many waited for the
        /// store. Each stays until its object is deleted, which is when the last job of the object is removed.
        pub(crate) erasures_dropped: Total = "meridian_jobs_erasures_dropped_total",
        /// Usage of tenants.
        pub(crate) usage: JobUsageScrape = set,
    }
}

metric_set! {
    /// Metrics of the usage of tenants by jobs.
    pub(crate) struct JobUsageScrape {
        /// Writes of the usage of tenants by jobs to disk that failed.
        write_failures: Total = "meridian_jobs_usage_write_failures_total",
        /// Reports of the usage of tenants by jobs to a hub that failed.
        report_failures: Total = "meridian_jobs_usage_report_failures_total",
        /// Rows of the usage of today: tenants, deployments and regions.
        rows: usize = "meridian_jobs_usage_rows",
        /// Limit of these rows.
        rows_max: usize = "meridian_jobs_usage_rows_max",
        /// Jobs and lines of batches that are missing in the usage because the limit of rows was reached.
        uncounted: Total = "meridian_jobs_usage_uncounted_total",
        /// Days of usage by jobs that were deleted because no hub has stored them for weeks.
        lost_days: Total = "meridian_jobs_usage_lost_days_total",
    }
}

impl From<LedgerState> for JobUsageScrape {
    fn from(usage: LedgerState) -> JobUsageScrape {
        let LedgerState { write_failures, report_failures, rows, uncounted, lost_days } = usage;
        JobUsageScrape {
            write_failures: Total(write_failures),
            report_failures: Total(report_failures),
            rows,
            rows_max: ROWS_MAX,
            uncounted: Total(uncounted),
            lost_days: Total(lost_days),
        }
    }
}
