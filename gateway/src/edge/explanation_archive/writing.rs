//! Writer of the explanations: a thread that renders queued requests, appends them to files, and deletes surplus files.
//!
//! A write is one call for all lines of a batch. The partial line of a failed one is truncated, that of a killed process is skipped by
//! readers. After a failed write, nothing is rendered for [`RETRY`]. A file that was deleted or moved away would take lines that no
//! search finds, so each batch checks that the current one is still in the directory, and creates both again if it is not.

use super::lock::DirectoryLock;
use super::{ExplanationsConfig, KeptRequest, Shared, list};
use crate::edge::explain;
use crate::events::FinishedRequest;
use crate::metrics::ExplanationLoss;
use crate::receipts::now_ms;
use gateway_core::explanation_archive::{ARCHIVE_FORMAT, ArchiveFile, HourlyQuota, TenantBytes};
use regions::catalogue::Catalogue;
use scheduler_api::requests::KeptReason;
use serde_json::Value;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

/// Maximum number of requests of a write: some hundred KiB.
const BATCH_MAX: u64 = 256;
/// Interval of the writes. Waking the thread for each request would cost more than everything else that the request does here.
const PAUSE: Duration = Duration::from_millis(100);
/// Interval after a failed write, in which explanations are lost.
const RETRY: Duration = Duration::from_secs(5);
/// Interval at which surplus files are deleted while there is nothing to write.
const DELETION_PERIOD: Duration = Duration::from_secs(600);

/// Writer of the files.
pub(super) struct ArchiveWriter {
    config: ExplanationsConfig,
    catalogue: Arc<Catalogue>,
    process: u64,
    shared: Arc<Shared>,
    pub(super) lock: DirectoryLock,
    quota: HourlyQuota,
    current: Option<OpenFile>,
    /// Time of the next attempt after a failed write.
    pub(super) retry_at: Option<Instant>,
    /// Time at which surplus files were deleted last.
    deleted_at: Option<Instant>,
}

/// File that is being written.
struct OpenFile {
    name: ArchiveFile,
    file: File,
    /// Bytes of complete lines.
    bytes: u64,
}

impl OpenFile {
    /// Returns whether the directory still has the file. An error other than that it has not is left to the write.
    fn is_in(&self, dir: &Path) -> bool {
        let found = fs::symlink_metadata(dir.join(self.name.name())).map_err(|error| error.kind());
        !matches!(found, Err(io::ErrorKind::NotFound | io::ErrorKind::NotADirectory))
    }
}

/// Lines that are written together.
#[derive(Default)]
struct LineBatch {
    text: Vec<u8>,
    lines: u64,
    by_tenant: TenantBytes,
}

impl ArchiveWriter {
    /// Creates the writer of a process with this random number.
    pub(super) fn new(
        config: &ExplanationsConfig,
        catalogue: &Arc<Catalogue>,
        process: u64,
        shared: Arc<Shared>,
    ) -> ArchiveWriter {
        ArchiveWriter {
            lock: DirectoryLock::new(&config.dir),
            config: config.clone(),
            catalogue: catalogue.clone(),
            process,
            shared,
            quota: HourlyQuota::default(),
            current: None,
            retry_at: None,
            deleted_at: None,
        }
    }

    pub(super) fn run(mut self, requests: &Receiver<KeptRequest>) {
        loop {
            let is_closing = self.shared.is_closing.load(Relaxed);
            if self.shared.is_draining.load(Relaxed) {
                self.lock.release();
            } else {
                self.lock.keep(Instant::now());
            }
            let is_empty = self.write_batch(requests);
            if is_empty && is_closing {
                return;
            }
            if self.deleted_at.is_none_or(|at| at.elapsed() >= DELETION_PERIOD) {
                self.delete_surplus();
            }
            if is_empty {
                std::thread::sleep(PAUSE);
            }
        }
    }

    /// Writes queued requests. Returns whether there are no more.
    pub(super) fn write_batch(&mut self, requests: &Receiver<KeptRequest>) -> bool {
        let is_pause = self.retry_at.is_some_and(|at| Instant::now() < at);
        let (mut batch, mut taken) = (LineBatch::default(), 0);
        while taken < BATCH_MAX
            && let Ok(kept) = requests.try_recv()
        {
            taken += 1;
            self.shared.release(kept.reason);
            if !is_pause {
                self.render(&kept, &mut batch);
            }
        }
        if is_pause {
            self.shared.counts.lost.of(ExplanationLoss::Disk).add(taken);
        } else if batch.lines > 0 {
            self.append(batch);
        }
        taken < BATCH_MAX
    }

    /// Adds the line of a request, unless its tenant has used its quota.
    fn render(&mut self, kept: &KeptRequest, batch: &mut LineBatch) {
        let KeptRequest { request, reason } = kept;
        let tenant = request.tenant.as_ref();
        if !self.quota.admits(&self.config.rules, (tenant, *reason), &batch.by_tenant, now_ms()) {
            self.shared.counts.lost.of(ExplanationLoss::Quota).add(1);
            return;
        }
        let line = line(request, *reason, &self.catalogue);
        *batch.by_tenant.entry(tenant.cloned()).or_default() += line.len() as u64 + 1;
        batch.text.extend_from_slice(line.as_bytes());
        batch.text.push(b'\n');
        batch.lines += 1;
    }

    /// Writes a batch. Only what was written counts for the quotas of tenants.
    fn append(&mut self, LineBatch { text, lines, by_tenant }: LineBatch) {
        match self.try_append(&text) {
            Ok(()) => {
                self.retry_at = None;
                self.quota.count(by_tenant);
                self.shared.counts.written.add(lines);
                if self.shared.is_failing.swap(false, Relaxed) {
                    // The disk takes explanations again. Those of the time between are missing.
                    tracing::info!(dir = %self.config.dir.display(), "explanations are written again");
                }
            }
            Err(error) => {
                self.shared.counts.lost.of(ExplanationLoss::Disk).add(lines);
                self.retry_at = Some(Instant::now() + RETRY);
                if !self.shared.is_failing.swap(true, Relaxed) {
                    // Requests are served, and cannot be searched. Check the disk and the permissions of the directory.
                    tracing::warn!(dir = %self.config.dir.display(), %error, "explanations cannot be written; trying again");
                }
            }
        }
    }

    fn try_append(&mut self, text: &[u8]) -> io::Result<()> {
        let (rules, now) = (self.config.rules, now_ms());
        if self.current.as_ref().is_some_and(|open| !open.is_in(&self.config.dir)) {
            self.current = None;
            // The lock file may be gone as well.
            self.lock.forget();
        }
        let needs_next = |open: &OpenFile| rules.needs_next_file(&open.name, open.bytes, now);
        if self.current.as_ref().is_none_or(needs_next) {
            let next = ArchiveFile { began_ms: now, process: self.process, format: ARCHIVE_FORMAT };
            self.current = Some(open(&self.config.dir, next)?);
            self.delete_surplus();
        }
        let Some(current) = &mut self.current else { return Ok(()) };
        if let Err(error) = current.file.write_all(text) {
            // If this fails as well, the rest of the line is in the way of no other file.
            if current.file.set_len(current.bytes).is_err() {
                self.current = None;
            }
            return Err(error);
        }
        let written = text.len() as u64;
        current.bytes += written;
        if self.shared.bytes.fetch_add(written, Relaxed) + written > rules.bytes_max {
            self.delete_surplus();
        }
        Ok(())
    }

    /// Deletes files that are too old or too many, and counts the bytes of the others.
    fn delete_surplus(&mut self) {
        self.deleted_at = Some(Instant::now());
        // The directory may have been deleted. It is created with the next file.
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
pub(super) fn line(request: &FinishedRequest, reason: KeptReason, catalogue: &Catalogue) -> String {
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
