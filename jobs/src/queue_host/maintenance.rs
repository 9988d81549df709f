//! Maintenance of a queue: expirations, retention, snapshots, and the deletion of objects without a job.

use super::{QueueConfig, Shared, now, since_epoch};
use crate::log::QueueSnapshot;
use crate::objects::JobObjects;
use jobs_core::decide;
use jobs_core::job::StoredRange;
use jobs_core::record::JobRecord;
use std::collections::BTreeMap;
use std::time::{Duration, Instant, SystemTime};

/// Period of expirations, retention and snapshots.
const MAINTENANCE_PERIOD: Duration = Duration::from_secs(1);
/// Jobs that one maintenance changes at most.
const MAINTENANCE_MAX: usize = 10_000;
/// Minimum number of entries between two snapshots; with more jobs than this, as many entries as jobs.
const SNAPSHOT_ENTRIES: u64 = 10_000;
/// Age at which an object without a job is deleted. The record that refers to a new object follows within seconds.
pub(super) const ORPHAN_AGE: Duration = Duration::from_secs(600);
/// Period of the deletion of objects without a job.
const SWEEP_PERIOD: Duration = Duration::from_secs(60);
/// Longest time for which the log keeps the entry of a removed job, which has the name of its tenant.
const ERASE_PERIOD: Duration = Duration::from_secs(3600);

impl Shared {
    /// Expirations, retention, snapshots, and the deletion of objects without a job.
    pub(super) async fn maintain(&self) {
        let mut saved = *self.position.borrow();
        // Jobs may have been removed before the start of this process.
        let (mut has_removed, mut erased) = (true, Instant::now());
        // What an earlier process of this log has not finished is without a job.
        let mut orphans_before = if self.log.is_shared() { Duration::ZERO } else { since_epoch() };
        let mut swept = SystemTime::UNIX_EPOCH;
        loop {
            tokio::time::sleep(MAINTENANCE_PERIOD).await;
            let QueueConfig { computation, retention, .. } = &self.config;
            let (records, removed) = {
                let applied = self.applied.lock();
                let records =
                    decide::maintain(&applied.queue, computation, *retention, now(), MAINTENANCE_MAX);
                let removed = records.iter().filter_map(|record| match record {
                    JobRecord::Removed { jobs } => Some(jobs),
                    _ => None,
                });
                let removed: Vec<_> = removed.flat_map(|jobs| applied.queue.stored(jobs)).collect();
                (records, removed)
            };
            // The next period tries again after a failure, here and below.
            if !records.is_empty() && self.append(records).await.is_ok() {
                has_removed |= !removed.is_empty();
                self.discard(removed).await;
            }
            self.remove_retired_batches(*retention).await.ok();
            let snapshot = {
                let applied = self.applied.lock();
                let position = applied.queue.applied();
                // Another process may have stored it.
                let entries = position.saturating_sub(saved);
                let erases = has_removed && erased.elapsed() >= ERASE_PERIOD.min(*retention / 10);
                let due = erases || entries >= SNAPSHOT_ENTRIES.max(applied.queue.len() as u64);
                due.then(|| {
                    let jobs = applied.queue.jobs().map(|(id, job)| (id, job.clone())).collect();
                    QueueSnapshot { applied: position, jobs, batches: applied.queue.batches().rows() }
                })
            };
            if let Some(snapshot) = snapshot {
                let position = snapshot.applied;
                if self.log.save(snapshot).await.is_ok() {
                    saved = position;
                    (has_removed, erased) = (false, Instant::now());
                }
            }
            if swept.elapsed().unwrap_or_default() >= SWEEP_PERIOD {
                swept = SystemTime::now();
                self.sweep(orphans_before.max(since_epoch().saturating_sub(ORPHAN_AGE))).await;
                // Only at the start: if the clock is set back later, a new object seems to be older than this process.
                orphans_before = Duration::ZERO;
            }
        }
    }

    /// Deletes the objects that no job refers to, of those that were written before this time since the Unix epoch.
    async fn sweep(&self, before: Duration) {
        // The next period tries again after a failure.
        let Ok(mut objects) = self.objects.list().await else { return };
        objects.retain(|object| JobObjects::written(*object) < before);
        // Of a shared log this process may have applied less than others, whose jobs refer to the objects.
        if self.catch_up().await.is_err() {
            return;
        }
        objects.retain(|object| !self.applied.lock().queue.refers_to(*object));
        for object in objects {
            self.objects.delete(object).await.ok();
        }
        self.objects.delete_interrupted(before).await.ok();
    }

    /// Deletes payloads and results that no job has any more: the whole object if no other job refers to it. One that cannot
    /// be deleted remains until the sweep deletes its object.
    pub(super) async fn discard(&self, ranges: Vec<StoredRange>) {
        let mut by_object = BTreeMap::<u64, Vec<StoredRange>>::new();
        for range in ranges.into_iter().filter(|range| range.length > 0) {
            by_object.entry(range.object).or_default().push(range);
        }
        for (object, parts) in by_object {
            let is_used = self.applied.lock().queue.refers_to(object);
            match is_used {
                true => self.objects.erase(object, &parts).await.ok(),
                false => self.objects.delete(object).await.ok(),
            };
        }
    }
}
