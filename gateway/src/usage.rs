//! Usage of tenants: counts requests in the ledger of the process ([`gateway_core::usage`]), writes it to disk, and reports it to the
//! hubs. A gateway counts the requests that it has served, and a spoke with a queue the jobs and the lines of batches whose results it
//! has stored.
//!
//! ```text
//!  request ──▶ RecentUsage ──every FLUSH_PERIOD──▶ Ledger, and its files ──every REPORT_PERIOD──▶ hub
//!              a lock of its own                   a lock that only blocking threads take
//! ```
//!
//! The ledger is written every [`FLUSH_PERIOD`] and when the process stops, so one that is killed loses at most the counts of that
//! time. It is reported every [`REPORT_PERIOD`], and what is reported is on disk before. While no hub responds, requests are
//! served, counted and written as always. A day that a hub rejects does not delay the others.
//!
//! A ledger has one writer, which holds a lock: during a handover two processes count, each in its own ledger. A process that
//! starts continues the ledgers of those that have ended, its own counts in the first of them.
//!
//! The ledgers are written on a blocking thread under their lock. If the task that waits for the write is cancelled, the write
//! continues, and the next one waits for it.

mod files;

use files::LedgerOnDisk;
use gateway_core::usage::RecentUsage;
use metrics::Counter;
use regions::catalogue::Catalogue;
use regions::id::{DeploymentName, RegionId, TenantId};
use regions::set::RegionIndex;
use scheduler_api::paths;
use scheduler_api::usage::{UsageCounts, UsageDay, UsageV1};
use scheduler_client::hub::{ControlPlaneClient, HubCallError, HubFailure, HubRequest};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU64, AtomicUsize};
use std::time::{Duration, SystemTime};
use supervision::Mutex;
use supervision::task::blocking;
use tokio::time::MissedTickBehavior;

/// Interval at which the ledger is written to disk: the counts that a killed process loses.
pub(crate) const FLUSH_PERIOD: Duration = Duration::from_secs(10);
/// Interval at which the ledger is reported to a hub, which writes each report to its store.
const REPORT_PERIOD: Duration = Duration::from_secs(60);
/// Timeout of a report. A hub responds after it has written it.
const REPORT_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum time for the last write and report when the process stops. What it misses is reported after the next start.
const LAST_REPORT_TIMEOUT: Duration = Duration::from_secs(2);

/// Usage of tenants at this process.
pub(crate) struct UsageRecorder {
    catalogue: Arc<Catalogue>,
    /// Counts since the last write. Each request takes this lock.
    recent: Mutex<RecentUsage>,
    /// Held during writes and reads of files, so only blocking threads take it.
    ledgers: Mutex<Ledgers>,
    /// Sums of the ledgers after the last write.
    totals: LedgerTotals,
    counts: UsageReportCounts,
}

/// Ledgers that this process owns.
struct Ledgers {
    /// Ledger in which this process counts.
    counting: LedgerOnDisk,
    /// Ledgers of processes that have ended, which are deleted when they are reported.
    former: Vec<LedgerOnDisk>,
}

/// Sums of the ledgers, for the metrics, which take no lock.
#[derive(Default)]
struct LedgerTotals {
    rows: AtomicUsize,
    uncounted: AtomicU64,
    lost_days: AtomicU64,
}

/// Counters of writes and reports.
#[derive(Default)]
struct UsageReportCounts {
    write_failures: Counter,
    report_failures: Counter,
}

/// State of the usage for the metrics of a role, as of the last write.
pub(crate) struct LedgerState {
    /// Writes to disk that failed.
    pub(crate) write_failures: u64,
    /// Reports to a hub that failed.
    pub(crate) report_failures: u64,
    /// Rows of today.
    pub(crate) rows: usize,
    /// Requests without a row.
    pub(crate) uncounted: u64,
    /// Days that were deleted before a hub has stored them.
    pub(crate) lost_days: u64,
}

impl UsageRecorder {
    /// Continues the ledgers that ended processes left beside the snapshot, or begins one.
    pub(crate) fn open(snapshot: &Path, region: &RegionId, catalogue: &Arc<Catalogue>) -> UsageRecorder {
        let (counting, former) = files::open(snapshot, region);
        UsageRecorder {
            catalogue: catalogue.clone(),
            recent: Mutex::independent(RecentUsage::default()),
            // A panic costs counts at most, and requests are served without them.
            ledgers: Mutex::independent(Ledgers { counting, former }),
            totals: LedgerTotals::default(),
            counts: UsageReportCounts::default(),
        }
    }

    /// Counts successful requests on a day.
    pub(crate) fn count(
        &self,
        day: UsageDay,
        tenant: &TenantId,
        deployment: &DeploymentName,
        region: RegionIndex,
        counts: UsageCounts,
    ) {
        let region = &self.catalogue.region(region).id;
        self.recent.lock().count(day, tenant, deployment, region, counts);
    }

    /// Returns the state for the metrics.
    pub(crate) fn state(&self) -> LedgerState {
        let LedgerTotals { rows, uncounted, lost_days } = &self.totals;
        LedgerState {
            write_failures: self.counts.write_failures.get(),
            report_failures: self.counts.report_failures.get(),
            rows: rows.load(Relaxed),
            uncounted: uncounted.load(Relaxed),
            lost_days: lost_days.load(Relaxed),
        }
    }

    /// Writes and reports for ever. A report that waits for a hub does not delay the writes.
    pub(crate) async fn follow(self: Arc<UsageRecorder>, client: ControlPlaneClient) {
        tokio::join!(self.write_periodically(), self.report_periodically(&client));
    }

    /// Writes for ever, without a hub.
    pub(crate) async fn write_periodically(self: &Arc<UsageRecorder>) {
        let mut interval = interval(FLUSH_PERIOD);
        loop {
            interval.tick().await;
            self.write().await;
        }
    }

    async fn report_periodically(self: &Arc<UsageRecorder>, client: &ControlPlaneClient) {
        let mut interval = interval(REPORT_PERIOD);
        let mut reachable = true;
        loop {
            interval.tick().await;
            match self.report(client).await {
                Ok(()) if std::mem::replace(&mut reachable, true) => {}
                Ok(()) => {
                    // A hub stores the usage of tenants again, also that of the time between.
                    tracing::info!(hub = client.hubs().current(), "reports of usage resumed");
                }
                Err(error) if std::mem::replace(&mut reachable, false) => {
                    // `meridian get usage` misses requests until a hub stores them; they are on disk. If the hub rejects a day, the error
                    // has the reason. Otherwise check the hubs.
                    tracing::warn!(%error, "report of usage failed; trying again");
                }
                Err(_) => {}
            }
        }
    }

    /// Writes and reports the last counts when the process stops.
    pub(crate) async fn finish(self: &Arc<UsageRecorder>, client: &ControlPlaneClient) {
        let last = async {
            self.write().await;
            self.report(client).await
        };
        // What a hub does not store now is on disk, and reported after the next start.
        let _ = tokio::time::timeout(LAST_REPORT_TIMEOUT, last).await;
    }

    /// Runs a function with the ledgers on a blocking thread, where it continues if this is cancelled. A panic ends the task that
    /// waits, which is started again.
    async fn with_ledgers<T: Send + 'static>(
        self: &Arc<UsageRecorder>,
        run: impl FnOnce(&UsageRecorder, &mut Ledgers) -> T + Send + 'static,
    ) -> T {
        let recorder = self.clone();
        blocking(move || {
            let mut ledgers = recorder.ledgers.lock();
            run(&recorder, &mut ledgers)
        })
        .await
    }

    /// Writes the ledgers, if they have changed.
    pub(crate) async fn write(self: &Arc<UsageRecorder>) {
        let today = UsageDay::of(SystemTime::now());
        self.with_ledgers(move |recorder, ledgers| ledgers.write(recorder, today)).await;
    }

    /// Reports all days that no hub has stored yet, and deletes the files of ledgers that have nothing left. A rejected day is
    /// reported again with the next report. Returns the first error.
    async fn report(self: &Arc<UsageRecorder>, client: &ControlPlaneClient) -> Result<(), HubCallError> {
        let mut result = Ok(());
        for (ledger, day) in self.with_ledgers(|_, ledgers| ledgers.unreported()).await {
            let read = self.with_ledgers(move |_, ledgers| ledgers.read(ledger, day)).await;
            let Some(usage) = read else { continue };
            let request = HubRequest::post(paths::USAGE, &usage, REPORT_TIMEOUT);
            match client.send::<Option<()>>(&request).await {
                Ok(_) => {
                    let sequence = usage.sequence;
                    self.with_ledgers(move |_, ledgers| ledgers.reported(ledger, day, sequence)).await;
                }
                Err(error) => {
                    self.counts.report_failures.add(1);
                    let is_rejected = matches!(error.failure, HubFailure::Rejected { .. });
                    result = result.and(Err(error));
                    if !is_rejected {
                        break;
                    }
                }
            }
        }
        self.with_ledgers(|_, ledgers| ledgers.retire()).await;
        result
    }
}

fn interval(period: Duration) -> tokio::time::Interval {
    let mut interval = tokio::time::interval(period);
    interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
    interval
}

impl Ledgers {
    fn all(&mut self) -> impl Iterator<Item = &mut LedgerOnDisk> {
        std::iter::once(&mut self.counting).chain(&mut self.former)
    }

    fn find(&mut self, ledger: u64) -> Option<&mut LedgerOnDisk> {
        self.all().find(|it| it.ledger.id() == ledger)
    }

    /// Adds the recent counts, and writes what has changed.
    fn write(&mut self, recorder: &UsageRecorder, today: UsageDay) {
        let recent = std::mem::take(&mut *recorder.recent.lock());
        self.counting.ledger.merge(recent);
        for ledger in self.all() {
            recorder.counts.write_failures.add(ledger.write());
        }
        let expired = self.counting.ledger.expire(today);
        self.counting.delete(&expired);
        let ledger = &self.counting.ledger;
        recorder.totals.rows.store(ledger.rows(), Relaxed);
        recorder.totals.uncounted.store(ledger.uncounted(), Relaxed);
        recorder.totals.lost_days.store(ledger.lost_days(), Relaxed);
    }

    /// Returns the days of ledgers that are on disk, and that no hub has stored.
    fn unreported(&mut self) -> Vec<(u64, UsageDay)> {
        let days =
            |it: &mut LedgerOnDisk| it.ledger.unreported().into_iter().zip(std::iter::repeat(it.ledger.id()));
        self.all().flat_map(days).map(|(day, ledger)| (ledger, day)).collect()
    }

    /// Returns the version of a day that is on disk.
    fn read(&mut self, ledger: u64, day: UsageDay) -> Option<UsageV1> {
        self.find(ledger)?.read(day)
    }

    fn reported(&mut self, ledger: u64, day: UsageDay, sequence: u64) {
        if let Some(it) = self.find(ledger) {
            it.ledger.reported(day, sequence);
        }
    }

    /// Deletes the former ledgers that have nothing left to report.
    fn retire(&mut self) {
        self.former.retain_mut(|it| {
            let days = it.ledger.retire();
            it.delete(&days);
            !it.ledger.is_empty()
        });
    }
}

#[cfg(test)]
mod tests;
