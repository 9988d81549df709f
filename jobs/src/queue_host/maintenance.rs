//! Maintenance of a queue: expirations, retention, snapshots, and the erasure of content without a job.
//!
//! Erasures and sweeps are tasks of their own, because a store that is slow or down would delay expirations.

use super::{QueueConfig, Shared, now, since_epoch};
use crate::log::QueueSnapshot;
use crate::objects::{JobObjects, ObjectError};
use futures_util::stream::{self, StreamExt};
use jobs_core::decide;
use jobs_core::erasure::{ContentOwner, Erasure};
use jobs_core::job::StoredRange;
use jobs_core::record::JobRecord;
use std::time::{Duration, Instant};
use supervision::Mutex;

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
/// Period of erasures, and pause after one has failed.
const ERASURE_PERIOD: Duration = Duration::from_millis(200);
const ERASURE_RETRY: Duration = Duration::from_secs(10);
/// Times that a maintenance looks at a part of the content whose removal may not be applied yet: more than it removes itself
/// ([`MAINTENANCE_MAX`]), so that each removal is noticed within seconds also while there are many that have failed.
const REMOVAL_TURNS: usize = 16;
/// Erasures at the same time. Each in a bucket has an object in memory, of 16 MiB (submissions) to some 256 MiB (one result).
const ERASURES_IN_FLIGHT: usize = 8;

impl Shared {
    /// Expirations, retention and snapshots; forever.
    pub(super) async fn maintain(&self) {
        let mut saved = *self.position.borrow();
        // Jobs may have been removed before the start of this process.
        let (mut has_removed, mut erased) = (true, Instant::now());
        loop {
            tokio::time::sleep(MAINTENANCE_PERIOD).await;
            let QueueConfig { computation, retention, .. } = &self.config;
            let can_erase = !self.erasures.lock().delays_retention();
            let records = {
                let applied = self.applied.lock();
                let mut records =
                    decide::maintain(&applied.queue, computation, *retention, now(), MAINTENANCE_MAX);
                records.retain(|record| can_erase || !matches!(record, JobRecord::Removed { .. }));
                let removed = records.iter().filter_map(|record| match record {
                    JobRecord::Removed { jobs } => Some(jobs),
                    _ => None,
                });
                let mut removals = self.removals.lock();
                for owner in removed.flatten().copied().map(ContentOwner::Job) {
                    removals.add(owner, applied.queue.stored(owner));
                }
                records
            };
            // The next period tries again after a failure, here and below.
            if !records.is_empty() {
                self.append(records).await.ok();
            }
            if can_erase {
                self.remove_retired_batches(*retention).await.ok();
            }
            has_removed |= self.discard_removed();
            let snapshot = {
                let applied = self.applied.lock();
                let position = applied.queue.applied();
                // Another process may have stored it.
                let entries = position.saturating_sub(saved);
                let erases = has_removed && erased.elapsed() >= ERASE_PERIOD.min(*retention / 10);
                let due = erases || entries >= SNAPSHOT_ENTRIES.max(applied.queue.len() as u64);
                due.then(|| {
                    let (jobs, batches) = (applied.queue.shared_jobs(), applied.queue.batches().rows());
                    QueueSnapshot { applied: position, jobs, batches }
                })
            };
            if let Some(snapshot) = snapshot {
                let position = snapshot.applied;
                if self.log.save(snapshot).await.is_ok() {
                    saved = position;
                    (has_removed, erased) = (false, Instant::now());
                }
            }
        }
    }

    /// Deletes objects without a job; forever.
    pub(super) async fn sweep(&self) {
        // What an earlier process of this log has not finished is without a job.
        let mut orphans_before = if self.log.is_shared() { Duration::ZERO } else { since_epoch() };
        tokio::time::sleep(MAINTENANCE_PERIOD).await;
        loop {
            self.sweep_once(orphans_before.max(since_epoch().saturating_sub(ORPHAN_AGE))).await;
            // Only at the start: if the clock is set back later, a new object seems to be older than this process.
            orphans_before = Duration::ZERO;
            tokio::time::sleep(SWEEP_PERIOD).await;
        }
    }

    /// Deletes the objects that no job refers to, of those that were written before this time since the Unix epoch.
    async fn sweep_once(&self, before: Duration) {
        // The next period tries again after a failure.
        let Ok(mut objects) = self.objects.list().await else { return };
        objects.retain(|object| JobObjects::written(*object) < before);
        // Of a shared log this process may have applied less than others, whose jobs refer to the objects.
        if self.catch_up().await.is_err() {
            return;
        }
        objects.retain(|object| !self.applied.lock().queue.refers_to(*object));
        let delete = async |object| drop(self.objects.delete(object).await);
        stream::iter(objects).for_each_concurrent(ERASURES_IN_FLIGHT, delete).await;
        self.objects.delete_interrupted(before).await.ok();
    }

    /// Queues the erasure of the content whose removal was applied; returns whether there is any.
    fn discard_removed(&self) -> bool {
        let mut has_removed = false;
        let turns = self.removals.lock().turns().min(REMOVAL_TURNS);
        for _ in 0..turns {
            let removed = {
                let applied = self.applied.lock();
                self.removals.lock().take_removed(|owner| applied.queue.stored(owner))
            };
            has_removed |= !removed.is_empty();
            self.discard(removed);
        }
        has_removed
    }

    /// Queues the erasure of content whose removal was applied. An earlier attempt to remove it may have failed.
    pub(super) fn discard_of(&self, owner: ContentOwner, ranges: Vec<StoredRange>) {
        self.removals.lock().forget(owner, &ranges);
        self.discard(ranges);
    }

    /// Queues the erasure of payloads and results that no job has any more.
    pub(super) fn discard(&self, ranges: Vec<StoredRange>) {
        self.erasures.lock().add(ranges, now());
    }

    /// Erases what was discarded; forever.
    pub(super) async fn erase(&self) {
        loop {
            tokio::time::sleep(ERASURE_PERIOD).await;
            if self.erasures.lock().is_empty() {
                continue;
            }
            let due = {
                let applied = self.applied.lock();
                let is_used = |object| applied.queue.refers_to(object);
                self.erasures.lock().take_due(self.objects.overwrite_delay(), now(), is_used)
            };
            let failed = Mutex::<Vec<Erasure>>::default();
            let erase = async |erasure: Erasure| {
                let erased: Result<(), ObjectError> = match &erasure {
                    Erasure::Delete(object) => self.objects.delete(*object).await,
                    Erasure::Overwrite(object, parts) => self.objects.erase(*object, parts).await,
                };
                if erased.is_err() {
                    failed.lock().push(erasure);
                }
            };
            stream::iter(due).for_each_concurrent(ERASURES_IN_FLIGHT, erase).await;
            let failed = std::mem::take(&mut *failed.lock());
            if !failed.is_empty() {
                failed.into_iter().for_each(|erasure| self.erasures.lock().add_failed(erasure, now()));
                tokio::time::sleep(ERASURE_RETRY).await;
            }
        }
    }
}
