//! Usage of tenants: counts finished requests in the gateway's ledger ([`gateway_core::usage`]), writes it to disk, and reports it to
//! the hubs.
//!
//! The ledger is written every [`FLUSH_PERIOD`] and when the gateway stops, so a process that is killed loses at most the counts of
//! that time. It is reported every [`REPORT_PERIOD`], and what is reported is on disk before. While no hub responds, requests are
//! served and counted as always.
//!
//! A ledger has one writer, which holds a lock of its file: during a handover two processes count, each in its own. A process that
//! starts continues the ledgers of those that have ended, its own counts in the first of them.

use gateway_core::usage::{Ledger, LedgerFileV1};
use metrics::{Counter, Total, metric_set};
use regions::catalogue::Catalogue;
use regions::id::{DeploymentName, RegionId, TenantId};
use regions::set::RegionIndex;
use scheduler_api::paths;
use scheduler_api::usage::{ROWS_MAX, UsageCounts, UsageDay, UsageV1};
use scheduler_client::hub::{ControlPlaneClient, HubCallError, HubRequest};
use scheduler_client::snapshot;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use supervision::Mutex;
use tokio::time::MissedTickBehavior;

/// Interval at which the ledger is written to disk: the counts that a killed process loses.
pub(crate) const FLUSH_PERIOD: Duration = Duration::from_secs(10);
/// Interval at which the ledger is reported to a hub, which writes each report to its store.
const REPORT_PERIOD: Duration = Duration::from_secs(60);
/// Timeout of a report. A hub responds after it has written it.
const REPORT_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum time for the last report when the gateway stops. What it misses is reported after the next start.
const LAST_REPORT_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum number of ledgers beside the one in which this process counts. More are left for the next start.
const FORMER_LEDGERS_MAX: usize = 8;

/// Usage of tenants at this gateway.
pub(crate) struct UsageRecorder {
    catalogue: Arc<Catalogue>,
    /// Ledger in which this process counts.
    counting: LedgerOnDisk,
    /// Ledgers of processes that have ended, which are deleted when they are reported.
    former: Vec<LedgerOnDisk>,
    counts: UsageReportCounts,
}

/// Ledger, and the file that has a version of it.
struct LedgerOnDisk {
    ledger: Mutex<Ledger>,
    path: PathBuf,
    /// Held while this process owns the ledger.
    _lock: Option<File>,
    /// Content of the file.
    written: Mutex<Option<Arc<LedgerFileV1>>>,
}

metric_set! {
    /// Counters of writes and reports.
    #[derive(Default)]
    pub(crate) struct UsageReportCounts {
        /// Writes of the usage of tenants to disk that failed.
        write_failures: Counter = "meridian_gateway_usage_write_failures_total",
        /// Reports of the usage of tenants to a hub that failed.
        report_failures: Counter = "meridian_gateway_usage_report_failures_total",
    }
}

metric_set! {
    /// Metrics of the usage of tenants.
    pub(crate) struct UsageScrape<'a> {
        /// Counters.
        counts: &'a UsageReportCounts = set,
        /// Rows of the usage of today: tenants, deployments and regions.
        rows: usize = "meridian_gateway_usage_rows",
        /// Limit of these rows.
        rows_max: usize = "meridian_gateway_usage_rows_max",
        /// Requests that are missing in the usage because the limit of rows was reached.
        uncounted: Total = "meridian_gateway_usage_uncounted_total",
        /// Days of usage that were deleted because no hub has stored them for weeks.
        lost_days: Total = "meridian_gateway_usage_lost_days_total",
    }
}

fn today() -> UsageDay {
    UsageDay::at(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default())
}

impl UsageRecorder {
    /// Continues the ledgers that ended processes left beside the snapshot, or begins one.
    pub(super) fn open(snapshot: &Path, region: &RegionId, catalogue: &Arc<Catalogue>) -> UsageRecorder {
        let (mut former, count) = (Vec::new(), FORMER_LEDGERS_MAX + 1);
        for path in ledger_files(snapshot) {
            match LedgerOnDisk::adopt(&path) {
                Ok(Some(ledger)) if ledger.ledger.lock().gateway() == region => former.push(ledger),
                // Another process uses it, or the files of another gateway were copied.
                Ok(_) => {}
                Err(error) => {
                    // The usage in this file is missing in reports. Move the file away and report the defect.
                    tracing::warn!(file = %path.display(), %error, "usage on disk rejected");
                }
            }
            if former.len() == count {
                break;
            }
        }
        let counting = match former.is_empty() {
            true => LedgerOnDisk::create(snapshot, region),
            false => former.remove(0),
        };
        UsageRecorder { catalogue: catalogue.clone(), counting, former, counts: UsageReportCounts::default() }
    }

    /// Counts a successful request.
    pub(crate) fn count(
        &self,
        tenant: &TenantId,
        deployment: &DeploymentName,
        region: RegionIndex,
        counts: UsageCounts,
    ) {
        let region = &self.catalogue.region(region).id;
        self.counting.ledger.lock().count(today(), tenant, deployment, region, counts);
    }

    /// Returns the metrics.
    pub(super) fn scrape(&self) -> UsageScrape<'_> {
        let ledger = self.counting.ledger.lock();
        UsageScrape {
            counts: &self.counts,
            rows: ledger.rows(),
            rows_max: ROWS_MAX,
            uncounted: Total(ledger.uncounted()),
            lost_days: Total(ledger.lost_days()),
        }
    }

    /// Writes and reports for ever.
    pub(super) async fn follow(self: Arc<UsageRecorder>, client: ControlPlaneClient) {
        let mut interval = tokio::time::interval(FLUSH_PERIOD);
        interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let periods = (REPORT_PERIOD.as_secs() / FLUSH_PERIOD.as_secs()).max(1);
        let mut reachable = true;
        for tick in 0_u64.. {
            interval.tick().await;
            self.write().await;
            if !tick.is_multiple_of(periods) {
                continue;
            }
            match self.report(&client).await {
                Ok(()) if std::mem::replace(&mut reachable, true) => {}
                Ok(()) => {
                    // A hub stores the usage of tenants again, also that of the time between.
                    tracing::info!(hub = client.hubs().current(), "reports of usage resumed");
                }
                Err(error) if std::mem::replace(&mut reachable, false) => {
                    // `meridian get usage` misses the latest requests until a hub responds; they are on disk. Check the hubs.
                    tracing::warn!(%error, "report of usage failed; trying again");
                }
                Err(_) => {}
            }
        }
    }

    /// Writes and reports the last counts when the gateway stops.
    pub(super) async fn finish(&self, client: &ControlPlaneClient) {
        self.write().await;
        // What a hub does not store now is on disk, and reported after the next start.
        let _ = tokio::time::timeout(LAST_REPORT_TIMEOUT, self.report(client)).await;
    }

    /// Writes the ledger in which this process counts, if it has changed.
    async fn write(&self) {
        let Some(file) = self.counting.ledger.lock().flush() else { return };
        let (path, written) = (self.counting.path.clone(), Arc::new(file));
        let content = written.clone();
        let saved = tokio::task::spawn_blocking(move || save(&path, &content)).await;
        match saved.map_err(io::Error::other).flatten() {
            Ok(()) => *self.counting.written.lock() = Some(written),
            Err(error) => {
                self.counts.write_failures.add(1);
                self.counting.ledger.lock().unflushed();
                // Usage is counted in memory, and not reported before it is on disk. Check the disk of `snapshot`.
                tracing::warn!(file = %self.counting.path.display(), %error, "cannot write the usage to disk");
            }
        }
    }

    /// Reports all days that no hub has stored yet, and deletes the files of ledgers that have nothing left.
    async fn report(&self, client: &ControlPlaneClient) -> Result<(), HubCallError> {
        for ledger in std::iter::once(&self.counting).chain(&self.former) {
            let Some(written) = ledger.written.lock().clone() else { continue };
            let days: Vec<UsageV1> = ledger.ledger.lock().unreported(&written).into_iter().cloned().collect();
            for usage in days {
                let request = HubRequest::post(paths::USAGE, &usage, REPORT_TIMEOUT);
                let sent = client.send::<Option<()>>(&request).await;
                if let Err(error) = sent {
                    self.counts.report_failures.add(1);
                    return Err(error);
                }
                if let Ok(day) = usage.day.parse() {
                    ledger.ledger.lock().reported(day, usage.sequence, today());
                }
            }
        }
        for ledger in &self.former {
            let is_done = ledger
                .written
                .lock()
                .as_ref()
                .is_some_and(|written| ledger.ledger.lock().unreported(written).is_empty());
            if is_done {
                *ledger.written.lock() = None;
                let path = ledger.path.clone();
                let remove = move || {
                    std::fs::remove_file(&path)?;
                    std::fs::remove_file(snapshot::with_suffix(&path, LOCK_SUFFIX))
                };
                // If it stays, it is reported again after the next start, which changes nothing.
                let _ = tokio::task::spawn_blocking(remove).await;
            }
        }
        Ok(())
    }
}

impl LedgerOnDisk {
    /// Begins a ledger with a file of its own.
    fn create(snapshot: &Path, region: &RegionId) -> LedgerOnDisk {
        let id: u64 = rand::random();
        let path = snapshot::with_suffix(snapshot, &format!("{SUFFIX}{id:016x}"));
        let lock = lock(&path).ok().flatten();
        let ledger = Mutex::independent(Ledger::new(region.clone(), id));
        LedgerOnDisk { ledger, path, _lock: lock, written: Mutex::independent(None) }
    }

    /// Takes over the ledger of a file; `None` if another process holds it.
    fn adopt(path: &Path) -> io::Result<Option<LedgerOnDisk>> {
        let Some(lock) = lock(path)? else { return Ok(None) };
        let content = match std::fs::read(path) {
            Ok(content) => content,
            // Its owner has deleted it meanwhile.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        let written: LedgerFileV1 = serde_json::from_slice(&content)?;
        let ledger = Ledger::adopt(written.clone()).map_err(io::Error::other)?;
        Ok(Some(LedgerOnDisk {
            ledger: Mutex::independent(ledger),
            path: path.to_owned(),
            _lock: Some(lock),
            written: Mutex::independent(Some(Arc::new(written))),
        }))
    }
}

/// Suffix of the files, before the number of the ledger.
const SUFFIX: &str = ".usage-";
/// Suffix of the lock of a file. It is another file, because each write replaces the file itself.
const LOCK_SUFFIX: &str = ".lock";

/// Returns the files of ledgers beside the snapshot, in the order of their numbers.
fn ledger_files(snapshot: &Path) -> Vec<PathBuf> {
    let prefix = snapshot::with_suffix(snapshot, SUFFIX);
    let (Some(dir), Some(prefix)) = (prefix.parent(), prefix.file_name()) else { return Vec::new() };
    let dir = if dir.as_os_str().is_empty() { Path::new(".") } else { dir };
    let is_ledger = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let number = name.strip_prefix(&*prefix.to_string_lossy());
        number.is_some_and(|number| number.len() == 16 && u64::from_str_radix(number, 16).is_ok())
    };
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let mut files: Vec<_> = entries.map(|entry| entry.path()).filter(is_ledger).collect();
    files.sort();
    files
}

/// Locks the ledger of a file until the returned file is dropped or the process ends; `None` if another process holds it.
fn lock(path: &Path) -> io::Result<Option<File>> {
    let file = File::create(snapshot::with_suffix(path, LOCK_SUFFIX))?;
    match file.try_lock() {
        Ok(()) => Ok(Some(file)),
        Err(std::fs::TryLockError::WouldBlock) => Ok(None),
        Err(std::fs::TryLockError::Error(error)) => Err(error),
    }
}

fn save(path: &Path, file: &LedgerFileV1) -> io::Result<()> {
    snapshot::replace(path, &[&serde_json::to_vec(file)?])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(dir: &Path) -> UsageRecorder {
        let catalogue = Arc::new(Catalogue::builtin());
        UsageRecorder::open(&dir.join("routes"), &"aws/us-east-1".parse().unwrap(), &catalogue)
    }

    fn count(recorder: &UsageRecorder, requests: u64) {
        let region = recorder.catalogue.index_of(&"aws/us-east-1".parse().unwrap()).unwrap();
        let counts = UsageCounts { requests, inputs: 0, tokens: 0 };
        recorder.count(&"acme".parse().unwrap(), &"minilm".parse().unwrap(), region, counts);
    }

    /// Returns the requests in the file of the ledger in which a process counts.
    fn written(recorder: &UsageRecorder) -> u64 {
        let written = recorder.counting.written.lock().clone();
        let days = written.iter().flat_map(|file| &file.days);
        days.flat_map(|day| &day.rows).map(|row| row.counts.requests).sum()
    }

    #[tokio::test]
    async fn a_process_continues_the_ledger_of_one_that_was_killed_after_its_last_write() {
        let dir = tempfile::tempdir().unwrap();
        let first = open(dir.path());
        count(&first, 5);
        first.write().await;
        count(&first, 7);
        // The lock ends with the process, and the last counts were only in its memory.
        drop(first);
        let second = open(dir.path());
        assert_eq!(written(&second), 5);
        count(&second, 1);
        second.write().await;
        assert_eq!((written(&second), ledger_files(&dir.path().join("routes")).len()), (6, 1));
    }

    #[tokio::test]
    async fn two_processes_count_in_ledgers_of_their_own() {
        let dir = tempfile::tempdir().unwrap();
        let (old, new) = (open(dir.path()), open(dir.path()));
        count(&old, 2);
        count(&new, 3);
        old.write().await;
        new.write().await;
        assert_eq!((written(&old), written(&new)), (2, 3));
        drop((old, new));
        let next = open(dir.path());
        assert_eq!(next.former.len(), 1, "one is continued, and the other one is reported");
        let former = next.former[0].written.lock().clone();
        let former = former.map_or(0, |file| file.days[0].rows[0].counts.requests);
        assert_eq!(written(&next) + former, 5);
    }

    #[tokio::test]
    async fn a_write_that_failed_is_made_up_for_by_the_next() {
        let dir = tempfile::tempdir().unwrap();
        let recorder = open(&dir.path().join("missing"));
        count(&recorder, 4);
        recorder.write().await;
        assert_eq!((written(&recorder), recorder.counts.write_failures.get()), (0, 1));
        std::fs::create_dir(dir.path().join("missing")).unwrap();
        recorder.write().await;
        assert_eq!(written(&recorder), 4, "without a new request");
    }

    #[test]
    fn an_unreadable_file_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("routes.usage-00000000000000ff");
        std::fs::write(&file, "{").unwrap();
        std::fs::write(dir.path().join("routes.usage-other"), "{").unwrap();
        let recorder = open(dir.path());
        assert!(recorder.former.is_empty() && recorder.counting.path != file);
        assert_eq!(std::fs::read_to_string(file).unwrap(), "{");
    }
}
