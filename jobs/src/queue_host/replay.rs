//! The log of a queue: appending entries, and applying them in their order.

use super::{Applied, EndedWork, QueueError, RETRY_PAUSE, Shared, now};
use crate::log::{EncodedEntry, JobLogError, QueueSnapshot};
use jobs_core::batch::state::BatchRow;
use jobs_core::decide;
use jobs_core::job::{DurableJob, DurableJobId};
use jobs_core::queue::{DurableJobQueue, RecordEffect};
use jobs_core::record::JobRecord;
use std::collections::VecDeque;
use std::sync::Arc;

/// Bytes of the records of an entry that has several: half of the largest message of NATS, 1 MiB. A record is smaller than that
/// message, because its texts and lists are limited.
const ENTRY_BYTES: usize = 512 << 10;
/// Entries that are read and applied together.
const READ_MAX: usize = 1024;
/// Entries whose effects are kept for the callers that have appended them.
const EFFECTS_MAX: usize = 1 << 12;

impl Shared {
    /// Reads the last snapshot and the entries after it.
    pub(super) async fn read_log(&self) -> Result<(), JobLogError> {
        let QueueSnapshot { applied, jobs, batches } = self.log.saved().await?;
        if applied > *self.position.borrow() {
            self.replace(jobs, batches, applied);
        }
        let latest = self.log.latest().await?;
        while *self.position.borrow() < latest {
            self.apply_next().await?;
        }
        Ok(())
    }

    /// Ends the leases of earlier processes, if this process has the log for itself: they have ended, and their jobs need not
    /// wait until their leases expire. An attempt counts as if its lease had expired.
    pub(super) async fn end_leases(&self) -> Result<(), JobLogError> {
        if self.log.is_shared() {
            return Ok(());
        }
        let record = decide::end_leases(&self.applied.lock().queue, now());
        let Some(record) = record else { return Ok(()) };
        let sequence = self.log.append(EncodedEntry::of(&[record])).await?;
        while *self.position.borrow() < sequence {
            self.apply_next().await?;
        }
        Ok(())
    }

    /// Appends records, and returns the sequence number of the last entry with the effects of all. They are one entry unless
    /// they are larger than [`ENTRY_BYTES`].
    pub(super) async fn append(
        &self,
        records: Vec<JobRecord>,
    ) -> Result<(u64, Vec<RecordEffect>), QueueError> {
        let (mut last, mut effects) = (0, Vec::with_capacity(records.len()));
        for entry in entries(&records) {
            let (sequence, of_entry) = self.append_entry(entry).await?;
            last = sequence;
            effects.extend(of_entry);
        }
        if self.ended.receiver_count() > 0 {
            for work in records.iter().zip(&effects).filter_map(|(record, effect)| ended_work(record, effect))
            {
                // The last subscriber may have left.
                self.ended.send(work).ok();
            }
        }
        Ok((last, effects))
    }

    async fn append_entry(&self, entry: EncodedEntry) -> Result<(u64, Vec<RecordEffect>), QueueError> {
        // An entry that follows an unreadable one would never be applied.
        let failure = self.failure.borrow().clone();
        if let Some(error) = failure {
            return Err(error.into());
        }
        let sequence = self.log.append(entry).await?;
        self.wait_for(sequence).await?;
        let applied = self.applied.lock();
        let since = (applied.queue.applied() - sequence) as usize;
        // After more than `EFFECTS_MAX` other entries, and if a snapshot has replaced the entry, the outcome is unknown.
        let index = applied.effects.len().checked_sub(since + 1).ok_or(QueueError::Closed)?;
        Ok((sequence, applied.effects[index].clone()))
    }

    /// Applies the next entries of the log; waits for some.
    async fn apply_next(&self) -> Result<(), JobLogError> {
        let after = *self.position.borrow();
        let mut last = self.log.last();
        if last.wait_for(|last| *last > after).await.is_err() {
            return Err(JobLogError::Unavailable("closed".to_owned()));
        }
        let entries = self.log.read(after, READ_MAX).await?;
        if entries.first().is_none_or(|(sequence, _)| *sequence != after + 1) {
            return self.restore(after).await;
        }
        let mut applied = self.applied.lock();
        for (sequence, entry) in &entries {
            let next = applied.queue.applied() + 1;
            if *sequence != next {
                return Err(JobLogError::Unavailable(format!("entry {next} is missing")));
            }
            let effects = applied.queue.apply(*sequence, entry);
            applied.effects.push_back(effects);
            if applied.effects.len() > EFFECTS_MAX {
                applied.effects.pop_front();
            }
        }
        let position = applied.queue.applied();
        drop(applied);
        self.position.send_replace(position);
        Ok(())
    }

    /// Continues from the last snapshot, after another process has replaced the next entries by it.
    async fn restore(&self, after: u64) -> Result<(), JobLogError> {
        let QueueSnapshot { applied: position, jobs, batches } = self.log.saved().await?;
        if position <= after {
            return Err(JobLogError::Unavailable(format!("entry {} is missing", after + 1)));
        }
        self.replace(jobs, batches, position);
        Ok(())
    }

    /// Replaces the queue by a later one. The effects of the entries that were not applied are unknown.
    fn replace(&self, jobs: Vec<(DurableJobId, Arc<DurableJob>)>, batches: Vec<BatchRow>, position: u64) {
        let queue = DurableJobQueue::restore(jobs, position).with_batches(batches);
        *self.applied.lock() = Applied { queue, effects: VecDeque::new() };
        self.position.send_replace(position);
    }

    /// Waits until all entries are applied that any process has appended before this call.
    pub(super) async fn catch_up(&self) -> Result<(), QueueError> {
        let failure = self.failure.borrow().clone();
        if let Some(error) = failure {
            return Err(error.into());
        }
        let latest = self.log.latest().await?;
        self.wait_for(latest).await
    }

    /// Waits until an entry is applied; fails when entries cannot be read.
    pub(super) async fn wait_for(&self, sequence: u64) -> Result<(), QueueError> {
        let (mut position, mut failure) = (self.position.subscribe(), self.failure.subscribe());
        tokio::select! {
            biased;
            applied = position.wait_for(|position| *position >= sequence) => {
                applied.map(drop).map_err(|_| QueueError::Closed)
            }
            failed = failure.wait_for(Option::is_some) => {
                Err(failed.ok().and_then(|failed| failed.clone()).map_or(QueueError::Closed, QueueError::Log))
            }
        }
    }

    pub(super) async fn follow(&self) {
        loop {
            // After a failure there may be no next entry to wait for.
            let has_failed = self.failure.borrow().is_some();
            let applied = if has_failed { self.read_log().await } else { self.apply_next().await };
            match applied {
                Ok(()) => {
                    self.failure.send_if_modified(|failure| failure.take().is_some());
                }
                Err(error) => {
                    self.failure.send_if_modified(|failure| {
                        failure.replace(error.clone()).is_none_or(|before| before != error)
                    });
                    tokio::time::sleep(RETRY_PAUSE).await;
                }
            }
        }
    }
}

/// Returns the job or the batch that a record has ended. A cancellation may be that of a job that has ended before.
fn ended_work(record: &JobRecord, effect: &RecordEffect) -> Option<EndedWork> {
    match (record, effect) {
        (JobRecord::Finished { id, .. }, RecordEffect::Changed) => Some(EndedWork::Job(*id)),
        (JobRecord::BatchFinalized { id, .. }, RecordEffect::Changed) => Some(EndedWork::Batch(*id)),
        _ => None,
    }
}

/// Encodes records, and divides them into entries.
fn entries(records: &[JobRecord]) -> Vec<EncodedEntry> {
    let mut entries = Vec::<EncodedEntry>::new();
    for record in records {
        let record = serde_json::to_vec(record).expect("a record serialises to JSON");
        match entries.last_mut().filter(|entry| entry.len() + record.len() <= ENTRY_BYTES) {
            Some(entry) => entry.push(&record),
            None => {
                let mut entry = EncodedEntry::default();
                entry.push(&record);
                entries.push(entry);
            }
        }
    }
    entries
}

#[cfg(test)]
mod tests {
    use super::*;
    use jobs_core::job::UnixMillis;

    #[test]
    fn records_are_divided_into_entries_that_a_log_can_store() {
        let id = |number: u64| DurableJobId::new(UnixMillis(number), 0);
        let failed = |number, bytes| JobRecord::Finished {
            id: id(number),
            token: None,
            outcome: jobs_core::job::JobOutcome::Failed { reason: "x".repeat(bytes) },
            result: None,
            at: now(),
        };
        assert!(entries(&[]).is_empty());
        for (count, bytes, expected) in [(1, 900_000, 1), (3, 100, 1), (9_000, 100, 5), (5, 400_000, 5)] {
            let records: Vec<_> = (0..count).map(|number| failed(number, bytes)).collect();
            let divided = entries(&records);
            assert_eq!(divided.len(), expected, "{count} records of {bytes}");
            let stored: Vec<_> = divided.into_iter().map(EncodedEntry::into_bytes).collect();
            assert!(stored.iter().all(|entry| entry.len() < 1 << 20));
            let read =
                stored.iter().flat_map(|entry| serde_json::from_slice::<Vec<JobRecord>>(entry).unwrap());
            assert_eq!(read.collect::<Vec<_>>(), records, "the order is kept");
        }
    }
}
