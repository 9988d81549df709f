//! Explanations on disk, written by one thread off the request path, and searched on blocking threads.
//!
//! ```text
//!  request ──record──▶ queue (bounded, never waits) ──every PAUSE──▶ writer ──▶ files, one for each hour
//!                                                                                │
//!                                     operations port, console of a hub ◀──read──┘
//! ```
//!
//! [`gateway_core::explanation_archive`] decides which requests are kept and which files are deleted. Here, nothing is ever waited
//! for: a request that finds the queue full, whose tenant has used its quota, or that the disk does not take is counted. Nothing is
//! synced, because explanations prove nothing: a loss of power costs what the operating system has not written yet, on Linux
//! usually the last 30 seconds.

mod lock;
mod reading;
mod writing;

pub(super) use reading::{ArchiveError, ReadCaller};

use crate::events::FinishedRequest;
use crate::metrics::{Counter, ExplanationLoss, Family, ObjectiveResult, RequestOutcome};
use crate::trace::is_trace_error;
use gateway_core::explanation_archive::{ArchiveFile, ArchiveRules, EndedRequest, FileOnDisk};
use metrics::metric_set;
use rand::Rng;
use reading::ReadPermits;
use regions::catalogue::Catalogue;
use scheduler_api::requests::KeptReason;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
use std::sync::mpsc::{self, SyncSender};
use std::time::Duration;
use telemetry::sampling::FailoverTrace;
use tokio::sync::watch;
use writing::ArchiveWriter;

/// Maximum number of queued requests, at about 1 KiB each.
const QUEUE_MAX: usize = 2048;
/// Maximum number of queued requests of the reasons that tenants cause at will: many rejections leave half of the queue to failed
/// requests.
const QUEUE_AT_WILL_MAX: usize = QUEUE_MAX / 2;

/// Configuration of the archive.
#[derive(Clone, Debug)]
pub struct ExplanationsConfig {
    /// Directory of the files.
    pub dir: PathBuf,
    /// Limits and rules.
    pub rules: ArchiveRules,
}

/// Archive of explanations.
pub(super) struct ExplanationArchive {
    config: ExplanationsConfig,
    queue: SyncSender<KeptRequest>,
    shared: Arc<Shared>,
    /// Whether the writer has ended.
    ended: watch::Receiver<bool>,
    permits: ReadPermits,
}

struct KeptRequest {
    request: Arc<FinishedRequest>,
    reason: KeptReason,
}

/// State that the writer shares with requests and metrics.
#[derive(Default)]
struct Shared {
    counts: ArchiveCounts,
    /// Queued requests of the reasons that tenants cause at will.
    queued_at_will: AtomicUsize,
    bytes: AtomicU64,
    is_failing: AtomicBool,
    /// Whether the process drains, so that another one may use the directory.
    is_draining: AtomicBool,
    is_closing: AtomicBool,
}

impl Shared {
    /// Reserves a slot of the queue. Returns whether one is free for this reason.
    fn reserve(&self, reason: KeptReason) -> bool {
        if !reason.is_at_will() {
            return true;
        }
        let is_free = self.queued_at_will.fetch_add(1, Relaxed) < QUEUE_AT_WILL_MAX;
        if !is_free {
            self.release(reason);
        }
        is_free
    }

    /// Releases the slot of a request that was taken from the queue, or not queued.
    fn release(&self, reason: KeptReason) {
        if reason.is_at_will() {
            self.queued_at_will.fetch_sub(1, Relaxed);
        }
    }
}

metric_set! {
    /// Counters of the archive.
    #[derive(Default)]
    struct ArchiveCounts {
        /// Explanations that were written to disk.
        written: Counter = "meridian_gateway_explanations_written_total",
        /// Explanations that should have been written and were not: the queue was full, their tenant had used its quota of the hour,
        /// or the disk did not take them.
        lost: Family<ExplanationLoss> = "meridian_gateway_explanations_lost_total" ["reason"],
    }
}

metric_set! {
    /// Metrics of the explanations on disk.
    pub(super) struct ArchiveScrape<'a> {
        /// Counters.
        counts: &'a ArchiveCounts = set,
        /// Bytes of the explanations on disk.
        bytes: u64 = "meridian_gateway_explanations_bytes",
        /// Limit of the bytes of the explanations on disk.
        bytes_max: u64 = "meridian_gateway_explanations_bytes_max",
        /// 1 while explanations cannot be written to disk.
        failing: bool = "meridian_gateway_explanations_failing",
    }
}

/// Error that prevents the start of the writer.
#[derive(Debug)]
pub(super) enum ArchiveStartError {
    /// Another gateway uses the directory.
    InUse,
    /// The thread cannot be started.
    Thread(io::Error),
}

impl ExplanationArchive {
    /// Starts the writer. A directory that cannot be used is reported by the writer, which tries again; one that another gateway uses is
    /// an error, unless this one takes over from another, which releases it then.
    pub(super) fn start(
        config: &ExplanationsConfig,
        catalogue: &Arc<Catalogue>,
        takes_over: bool,
    ) -> Result<ExplanationArchive, ArchiveStartError> {
        let (queue, requests) = mpsc::sync_channel(QUEUE_MAX);
        let shared: Arc<Shared> = Arc::default();
        let mut writer = ArchiveWriter::new(config, catalogue, rand::rng().random(), shared.clone());
        if matches!(writer.lock.acquire(), Ok(false)) && !takes_over {
            return Err(ArchiveStartError::InUse);
        }
        let (end, ended) = watch::channel(false);
        let thread = supervision::task::thread("explanations", move || {
            writer.run(&requests);
            end.send_replace(true);
        });
        thread.map_err(ArchiveStartError::Thread)?;
        Ok(ExplanationArchive {
            config: config.clone(),
            queue,
            shared,
            ended,
            permits: ReadPermits::default(),
        })
    }

    /// Keeps the explanation of a request, if there is a reason. Never waits.
    pub(super) fn record(&self, request: &Arc<FinishedRequest>) {
        let Some(reason) = self.config.rules.reason(&ended(request), rand::rng().random()) else { return };
        if !self.enqueue(KeptRequest { request: request.clone(), reason }) {
            self.shared.counts.lost.of(ExplanationLoss::QueueFull).add(1);
        }
    }

    /// Queues a request. Returns whether there was a slot. Never waits.
    fn enqueue(&self, kept: KeptRequest) -> bool {
        let reason = kept.reason;
        if !self.shared.reserve(reason) {
            return false;
        }
        let is_queued = self.queue.try_send(kept).is_ok();
        if !is_queued {
            self.shared.release(reason);
        }
        is_queued
    }

    /// Returns the metrics.
    pub(super) fn scrape(&self) -> ArchiveScrape<'_> {
        ArchiveScrape {
            counts: &self.shared.counts,
            bytes: self.shared.bytes.load(Relaxed),
            bytes_max: self.config.rules.bytes_max,
            failing: self.shared.is_failing.load(Relaxed),
        }
    }

    /// Releases the directory, so that the next process may use it. This one still writes the explanations of its last requests there.
    pub(super) fn release_directory(&self) {
        self.shared.is_draining.store(true, Relaxed);
    }

    /// Writes what is queued and ends the writer, within this time.
    pub(super) async fn finish(&self, timeout: Duration) {
        self.shared.is_closing.store(true, Relaxed);
        let mut ended = self.ended.clone();
        // A disk that hangs costs the last explanations.
        let _ = tokio::time::timeout(timeout, ended.wait_for(|ended| *ended)).await;
    }
}

fn ended(request: &FinishedRequest) -> EndedRequest {
    let FinishedRequest { outcome, tenant, trail, total, trace, .. } = request;
    let is_client_error = matches!(outcome, RequestOutcome::Complete { status: 400..500, .. });
    EndedRequest {
        is_failed: ObjectiveResult::of(*outcome) == ObjectiveResult::Failed || is_trace_error(*outcome),
        is_rejected: is_client_error && tenant.is_some(),
        is_failed_over: trail.failover() != FailoverTrace::None,
        is_sampled: trace.is_some_and(|trace| trace.is_sampled),
        total: *total,
    }
}

/// Returns the files of a directory in order of time. Directories, links, FIFOs and devices with such a name are not files of a gateway.
fn list(dir: &Path) -> io::Result<Vec<FileOnDisk>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let Some(file) = entry.file_name().to_str().and_then(ArchiveFile::parse) else { continue };
        // Another process may have deleted it meanwhile.
        let Ok(metadata) = entry.metadata() else { continue };
        if metadata.is_file() {
            files.push(FileOnDisk { file, bytes: metadata.len() });
        }
    }
    files.sort();
    Ok(files)
}

#[cfg(test)]
mod tests;
