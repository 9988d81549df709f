//! Explanations on disk, written by one thread off the request path, and searched on blocking threads.
//!
//! ```text
//!  request ──record──▶ queue (bounded, never waits) ──every PAUSE──▶ writer ──▶ files, one for each hour
//!                                                                                │
//!                                     operations port, console of a hub ◀──read──┘
//! ```
//!
//! [`gateway_core::explanation_archive`] decides which requests are kept and which files are deleted. Here, nothing is ever waited
//! for: a request that finds the queue full, whose tenant has used its quota, or that the disk does not take is counted. A write
//! is one call for all lines of a batch; the partial line of a failed one is truncated, that of a killed process is skipped by
//! readers. Nothing is synced, because explanations prove nothing: a loss of power costs the last seconds.

mod reading;

pub(super) use reading::ArchiveError;

use super::explain;
use crate::events::FinishedRequest;
use crate::metrics::{Counter, ExplanationLoss, Family, ObjectiveResult, RequestOutcome};
use crate::receipts::now_ms;
use crate::trace::is_trace_error;
use gateway_core::explanation_archive::{ArchiveFile, ArchiveRules, EndedRequest, FileOnDisk, HourlyQuota};
use metrics::metric_set;
use rand::Rng;
use regions::catalogue::Catalogue;
use scheduler_api::requests::KeptReason;
use serde_json::Value;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::mpsc::{self, Receiver, SyncSender};
use std::time::{Duration, Instant};
use telemetry::sampling::FailoverTrace;
use tokio::sync::{Semaphore, watch};

/// Maximum number of queued requests, at about 1 KiB each.
const QUEUE_MAX: usize = 2048;
/// Maximum number of lines of a write: some hundred KiB.
const BATCH_MAX: u64 = 256;
/// Interval of the writes. Waking the thread for each request would cost more than everything else that the request does here.
const PAUSE: Duration = Duration::from_millis(100);
/// Interval after a failed write, in which explanations are lost.
const RETRY: Duration = Duration::from_secs(5);
/// Interval at which old files are deleted while there is nothing to write.
const TIDY_PERIOD: Duration = Duration::from_secs(600);

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
    /// One permit: a search has a file in memory.
    reads: Arc<Semaphore>,
}

struct KeptRequest {
    request: Arc<FinishedRequest>,
    reason: KeptReason,
}

/// State that the writer shares with requests and metrics.
#[derive(Default)]
struct Shared {
    counts: ArchiveCounts,
    bytes: AtomicU64,
    is_failing: AtomicBool,
    is_closing: AtomicBool,
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

impl ExplanationArchive {
    /// Starts the writer. A directory that cannot be used is reported by the writer, which tries again.
    pub(super) fn start(
        config: &ExplanationsConfig,
        catalogue: &Arc<Catalogue>,
    ) -> io::Result<ExplanationArchive> {
        let (queue, requests) = mpsc::sync_channel(QUEUE_MAX);
        let shared: Arc<Shared> = Arc::default();
        let writer = ArchiveWriter {
            config: config.clone(),
            catalogue: catalogue.clone(),
            process: rand::rng().random(),
            shared: shared.clone(),
            quota: HourlyQuota::default(),
            current: None,
            retry_at: None,
            tidied_at: None,
        };
        let (end, ended) = watch::channel(false);
        supervision::task::thread("explanations", move || {
            writer.run(&requests);
            end.send_replace(true);
        })?;
        let reads = Arc::new(Semaphore::new(1));
        Ok(ExplanationArchive { config: config.clone(), queue, shared, ended, reads })
    }

    /// Keeps the explanation of a request, if there is a reason. Never waits.
    pub(super) fn record(&self, request: &Arc<FinishedRequest>) {
        let Some(reason) = self.config.rules.reason(&ended(request), rand::rng().random()) else { return };
        if self.queue.try_send(KeptRequest { request: request.clone(), reason }).is_err() {
            self.shared.counts.lost.of(ExplanationLoss::QueueFull).add(1);
        }
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

/// Writer of the files.
struct ArchiveWriter {
    config: ExplanationsConfig,
    catalogue: Arc<Catalogue>,
    process: u64,
    shared: Arc<Shared>,
    quota: HourlyQuota,
    current: Option<OpenFile>,
    /// Time of the next attempt after a failed write.
    retry_at: Option<Instant>,
    tidied_at: Option<Instant>,
}

/// File that is being written.
struct OpenFile {
    name: ArchiveFile,
    file: File,
    /// Bytes of complete lines.
    bytes: u64,
}

impl ArchiveWriter {
    fn run(mut self, requests: &Receiver<KeptRequest>) {
        loop {
            let is_closing = self.shared.is_closing.load(Relaxed);
            let is_empty = self.write_batch(requests);
            if is_empty && is_closing {
                return;
            }
            if self.tidied_at.is_none_or(|at| at.elapsed() >= TIDY_PERIOD) {
                self.tidy();
            }
            if is_empty {
                std::thread::sleep(PAUSE);
            }
        }
    }

    /// Writes queued requests. Returns whether there are no more.
    fn write_batch(&mut self, requests: &Receiver<KeptRequest>) -> bool {
        let (mut batch, mut lines, mut is_empty) = (Vec::new(), 0, false);
        while lines < BATCH_MAX && !is_empty {
            match requests.try_recv() {
                Ok(kept) => lines += u64::from(self.render(&kept, &mut batch)),
                Err(_) => is_empty = true,
            }
        }
        if lines > 0 {
            self.append(&batch, lines);
        }
        is_empty
    }

    /// Adds the line of a request, unless its tenant has used its quota.
    fn render(&mut self, kept: &KeptRequest, batch: &mut Vec<u8>) -> bool {
        let KeptRequest { request, reason } = kept;
        let tenant = request.tenant.as_ref();
        if !self.quota.admits(&self.config.rules, tenant, *reason, now_ms()) {
            self.shared.counts.lost.of(ExplanationLoss::Quota).add(1);
            return false;
        }
        let line = line(request, *reason, &self.catalogue);
        self.quota.count(tenant, line.len() as u64 + 1);
        batch.extend_from_slice(line.as_bytes());
        batch.push(b'\n');
        true
    }

    fn append(&mut self, batch: &[u8], lines: u64) {
        let result = match self.retry_at.filter(|at| Instant::now() < *at) {
            Some(_) => Err(None),
            None => self.try_append(batch).map_err(Some),
        };
        match result {
            Ok(()) => {
                self.retry_at = None;
                self.shared.counts.written.add(lines);
                if self.shared.is_failing.swap(false, Relaxed) {
                    // The disk takes explanations again. Those of the time between are missing.
                    tracing::info!(dir = %self.config.dir.display(), "explanations are written again");
                }
            }
            Err(error) => {
                self.shared.counts.lost.of(ExplanationLoss::Disk).add(lines);
                let Some(error) = error else { return };
                self.retry_at = Some(Instant::now() + RETRY);
                if !self.shared.is_failing.swap(true, Relaxed) {
                    // Requests are served, and cannot be searched. Check the disk and the permissions of the directory.
                    tracing::warn!(dir = %self.config.dir.display(), %error, "explanations cannot be written; trying again");
                }
            }
        }
    }

    fn try_append(&mut self, batch: &[u8]) -> io::Result<()> {
        let (rules, now) = (self.config.rules, now_ms());
        let needs_next = |open: &OpenFile| rules.needs_next_file(&open.name, open.bytes, now);
        if self.current.as_ref().is_none_or(needs_next) {
            self.current =
                Some(open(&self.config.dir, ArchiveFile { began_ms: now, process: self.process })?);
            self.tidy();
        }
        let Some(current) = &mut self.current else { return Ok(()) };
        if let Err(error) = current.file.write_all(batch) {
            // If this fails as well, the rest of the line is in the way of no other file.
            if current.file.set_len(current.bytes).is_err() {
                self.current = None;
            }
            return Err(error);
        }
        let written = batch.len() as u64;
        current.bytes += written;
        if self.shared.bytes.fetch_add(written, Relaxed) + written > rules.bytes_max {
            self.tidy();
        }
        Ok(())
    }

    /// Deletes files that are too old or too many, and counts the bytes of the others.
    fn tidy(&mut self) {
        self.tidied_at = Some(Instant::now());
        // The directory is created with the first file.
        let Ok(mut files) = list(&self.config.dir) else { return };
        let current = self.current.as_ref().map(|open| &open.name);
        let surplus = self.config.rules.surplus(&files, current, now_ms());
        // Another process may have deleted it.
        surplus.iter().for_each(|file| drop(fs::remove_file(self.config.dir.join(file.name()))));
        files.retain(|it| !surplus.contains(&it.file));
        self.shared.bytes.store(files.iter().map(|it| it.bytes).sum(), Relaxed);
    }
}

/// Returns the line of a request.
fn line(request: &FinishedRequest, reason: KeptReason, catalogue: &Catalogue) -> String {
    let mut explanation = explain::to_json(request, catalogue);
    if let Value::Object(fields) = &mut explanation {
        let resolved = request.resolved.as_ref();
        let is_restricted = resolved.is_none_or(|resolved| resolved.policy.residency.is_locked());
        fields.insert("kept".to_owned(), reason.as_str().into());
        fields.insert("is_restricted".to_owned(), is_restricted.into());
    }
    explanation.to_string()
}

/// Creates a file that only this user may read.
fn open(dir: &Path, name: ArchiveFile) -> io::Result<OpenFile> {
    fs::create_dir_all(dir)?;
    let file = OpenOptions::new().create(true).append(true).mode(0o600).open(dir.join(name.name()))?;
    let bytes = file.metadata()?.len();
    Ok(OpenFile { name, file, bytes })
}

/// Returns the files of a directory in order of time.
fn list(dir: &Path) -> io::Result<Vec<FileOnDisk>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let Some(file) = entry.file_name().to_str().and_then(ArchiveFile::parse) else { continue };
        // Another process may have deleted it meanwhile.
        let Ok(metadata) = entry.metadata() else { continue };
        files.push(FileOnDisk { file, bytes: metadata.len() });
    }
    files.sort();
    Ok(files)
}

#[cfg(test)]
mod tests;
