//! Events of the queue of durable jobs of a region.

use std::fmt::Display;

use jobs_core::job::DurableJobId;
use regions::RegionId;
use regions::set::RegionIndex;

use crate::metrics::{JobAttemptOutcome, JobMetrics, JobTransferOutcome};

/// Entries of the log of the queue cannot be read or applied: submissions and workers fail until they can. If the reason
/// is an entry that cannot be read, another version of the spoke wrote it, or the disk is damaged: start the newer version
/// again, or restore the directory of `[jobs]`. Otherwise check the NATS servers.
pub(crate) struct JobLogUnreadable<'a> {
    pub(crate) region: &'a RegionId,
    pub(crate) error: &'a dyn Display,
}

impl JobLogUnreadable<'_> {
    pub(crate) fn record(self, metrics: &JobMetrics) {
        let JobLogUnreadable { region, error } = self;
        metrics.log_failures.add(1);
        tracing::error!(%region, %error, "job log cannot be read, so jobs fail");
    }
}

/// The log of the queue can be read again.
pub(crate) struct JobLogReadable<'a> {
    pub(crate) region: &'a RegionId,
}

impl JobLogReadable<'_> {
    pub(crate) fn record(self) {
        tracing::info!(region = %self.region, "job log can be read again");
    }
}

/// The log or an object of the queue of jobs could not be read or written: clients get 503 or 507, and jobs in flight are
/// computed again after their leases. Logged when this begins. Check the disk and the keys of `[jobs]`, or the NATS servers.
pub(crate) struct JobStoreFailed<'a> {
    pub(crate) region: &'a RegionId,
    pub(crate) error: &'a dyn Display,
    /// Whether the operation before did not fail.
    pub(crate) is_new: bool,
}

impl JobStoreFailed<'_> {
    pub(crate) fn record(self, metrics: &JobMetrics) {
        let JobStoreFailed { region, error, is_new } = self;
        metrics.store_failures.add(1);
        if is_new {
            tracing::warn!(%region, %error, "store of jobs failed");
        }
    }
}

/// An attempt to compute a job has ended.
pub(crate) struct JobAttemptEnded<'a> {
    pub(crate) id: DurableJobId,
    pub(crate) outcome: JobAttemptOutcome,
    /// Reason, if it did not succeed.
    pub(crate) reason: Option<&'a str>,
}

impl JobAttemptEnded<'_> {
    pub(crate) fn record(self, metrics: &JobMetrics) {
        let JobAttemptEnded { id, outcome, reason } = self;
        metrics.attempts.count(outcome);
        // DEBUG only: there may be thousands a second, and the job has the reason.
        tracing::debug!(%id, outcome = outcome.as_str(), reason, "attempt to compute a job ended");
    }
}

/// A request of a job that was offered to another region has ended.
pub(crate) struct JobTransferEnded<'a> {
    pub(crate) region: (RegionIndex, &'a RegionId),
    pub(crate) ticket: u64,
    pub(crate) outcome: JobTransferOutcome,
}

impl JobTransferEnded<'_> {
    pub(crate) fn record(self, metrics: &JobMetrics) {
        let JobTransferEnded { region: (index, region), ticket, outcome } = self;
        metrics.transfers.of(index.as_usize()).count(outcome);
        // DEBUG only: there may be hundreds a second.
        tracing::debug!(%region, ticket, outcome = outcome.as_str(), "transfer of a request of a job ended");
    }
}

/// Gateways had requests of jobs for this region, and did not renew their tickets: they ended, or lost the connection to the
/// region of the queue. Each of the requests counts as a failed attempt and is computed again. Expected when a gateway is
/// killed; otherwise check the network between the gateways and this region.
pub(crate) struct JobTransfersExpired<'a> {
    pub(crate) region: &'a RegionId,
    pub(crate) count: u64,
}

impl JobTransfersExpired<'_> {
    pub(crate) fn record(self) {
        let JobTransfersExpired { region, count } = self;
        tracing::warn!(%region, count, "tickets of transferred requests expired");
    }
}

/// A gateway returned a result whose ticket had ended before, so it was discarded: the ticket has expired, or the job was
/// cancelled.
pub(crate) struct JobTransferLate {
    pub(crate) ticket: u64,
}

impl JobTransferLate {
    pub(crate) fn record(self, metrics: &JobMetrics) {
        let JobTransferLate { ticket } = self;
        metrics.transfers_late.add(1);
        tracing::debug!(ticket, "late result of a transferred request discarded");
    }
}
