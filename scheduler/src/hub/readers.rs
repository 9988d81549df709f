//! Records in the store which reader (gateway or spoke) runs which table.
//!
//! A gateway sends the generation of its table with each poll for routes, a spoke with each keep-alive. Any hub may
//! receive it, and the leader needs it; so each reader has a key in the store under a lease of its own, which expires
//! when the reader is silent, and is revoked when the reader deregisters. Nothing waits for these writes: a report that
//! was not written is repeated with the next poll, and a lost deregistration is covered by the lease.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use regions::Generation;
use scheduler_api::apply::ReaderV1;
use scheduler_api::reader::Reader;
use scheduler_api::{VERSION, keys};
use scheduler_store::{Lease, Store, StoreError};
use tokio::sync::mpsc;

use super::records;
use crate::events::ReaderLimitReached;

/// Maximum number of readers that one hub records: the limit of held polls, and a spoke for each region of a catalogue.
pub(super) const READERS_MAX: usize = 2048;
/// Capacity of the queue of reader reports; a report that does not fit is repeated by its reader.
pub(super) const REPORTS_MAX: usize = 1024;
/// Divisor of the lease time after which the lease of an unchanged reader is kept alive.
const KEEP_ALIVE_PART: u32 = 4;

/// Report of a reader about itself.
#[derive(Debug)]
pub(super) enum ReaderReport {
    /// The reader runs the table of this generation.
    Runs(Reader, Generation),
    /// The reader shuts down.
    Deregisters(Reader),
}

/// Writer of reader records.
pub(super) struct ReaderRecorder<S> {
    store: S,
    keep: Duration,
    known: BTreeMap<Reader, ReaderRecord>,
    /// The reader limit was logged.
    limit_logged: bool,
}

struct ReaderRecord {
    lease: Lease,
    generation: Generation,
    kept_alive: Instant,
}

impl<S: Store> ReaderRecorder<S> {
    pub(super) fn new(store: S, keep: Duration) -> ReaderRecorder<S> {
        ReaderRecorder { store, keep, known: BTreeMap::new(), limit_logged: false }
    }

    /// Writes reports until all senders are gone.
    pub(super) async fn run(mut self, mut reports: mpsc::Receiver<ReaderReport>) {
        while let Some(report) = reports.recv().await {
            match report {
                ReaderReport::Runs(reader, generation) => {
                    if self.record(&reader, generation, Instant::now()).await.is_err() {
                        // It is unknown whether the report was written; the next one starts from the store's state.
                        self.known.remove(&reader);
                    }
                }
                // A lease that is not revoked here expires.
                ReaderReport::Deregisters(reader) => drop(self.remove_reader(&reader).await),
            }
        }
    }

    /// Revokes the lease of a reader that shuts down; any hub may have granted it.
    async fn remove_reader(&mut self, reader: &Reader) -> Result<(), StoreError> {
        self.known.remove(reader);
        match self.store.get(&keys::reader(reader)).await?.and_then(|entry| entry.lease) {
            Some(lease) => self.store.lease_revoke(lease).await,
            None => Ok(()),
        }
    }

    async fn record(
        &mut self,
        reader: &Reader,
        generation: Generation,
        now: Instant,
    ) -> Result<(), StoreError> {
        let keep_alive_after = self.keep / KEEP_ALIVE_PART;
        let Some(record) = self.known.get_mut(reader) else {
            return self.record_new(reader, generation, now).await;
        };
        if now.duration_since(record.kept_alive) >= keep_alive_after {
            self.store.lease_keep_alive(record.lease, now).await?;
            record.kept_alive = now;
        }
        // An older generation was delayed and is ignored.
        if generation > record.generation {
            self.store.put(&keys::reader(reader), value(reader, generation), Some(record.lease)).await?;
            record.generation = generation;
        }
        Ok(())
    }

    /// Records a reader that this hub does not know; another hub may have, and then there is a lease.
    async fn record_new(
        &mut self,
        reader: &Reader,
        generation: Generation,
        now: Instant,
    ) -> Result<(), StoreError> {
        let keep = self.keep;
        self.known.retain(|_, record| now.duration_since(record.kept_alive) < keep);
        if self.known.len() >= READERS_MAX {
            if !std::mem::replace(&mut self.limit_logged, true) {
                ReaderLimitReached { limit: READERS_MAX }.emit();
            }
            return Ok(());
        }
        let key = keys::reader(reader);
        let found = self.store.get(&key).await?.and_then(|entry| entry.lease);
        let alive = match found {
            Some(lease) => self.store.lease_keep_alive(lease, now).await.is_ok().then_some(lease),
            None => None,
        };
        let lease = match alive {
            Some(lease) => lease,
            None => self.store.lease_grant(keep, now).await?,
        };
        self.store.put(&key, value(reader, generation), Some(lease)).await?;
        self.known.insert(reader.clone(), ReaderRecord { lease, generation, kept_alive: now });
        Ok(())
    }
}

fn value(reader: &Reader, generation: Generation) -> Vec<u8> {
    records::bytes(&ReaderV1 {
        version: VERSION,
        reader: reader.to_string(),
        generation: generation.to_string(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use scheduler_api::reader::Role;
    use scheduler_store::SimStore;

    const KEEP: Duration = Duration::from_secs(60);

    fn reader(boot_id: u64) -> Reader {
        Reader { role: Role::Gateway, region: "aws/us-east-1".parse().unwrap(), boot_id }
    }

    fn generation(number: u64) -> Generation {
        Generation { epoch: 1, number }
    }

    async fn recorded(store: &SimStore) -> Vec<(u64, u64)> {
        let range = store.range(keys::READERS).await.unwrap();
        let read = |entry| records::reader(entry).unwrap();
        let numbers = |(reader, generation): (Reader, Generation)| (reader.boot_id, generation.number);
        range.entries.iter().map(read).map(numbers).collect()
    }

    #[tokio::test]
    async fn a_reader_record_is_kept_as_long_as_any_hub_receives_reports() {
        let (store, begun) = (SimStore::new(), Instant::now());
        let (mut one, mut other) =
            (ReaderRecorder::new(store.clone(), KEEP), ReaderRecorder::new(store.clone(), KEEP));
        one.record(&reader(1), generation(3), begun).await.unwrap();
        one.record(&reader(1), generation(2), begun).await.unwrap();
        assert_eq!(recorded(&store).await, [(1, 3)], "an older generation is ignored");
        other.record(&reader(1), generation(4), begun + KEEP / 2).await.unwrap();
        let leases = |range: scheduler_store::Range| range.entries[0].lease;
        let lease = leases(store.range(keys::READERS).await.unwrap());
        for quarter in 3..8 {
            other.record(&reader(1), generation(4), begun + KEEP * quarter / 4).await.unwrap();
            store.expire(begun + KEEP * quarter / 4).await.unwrap();
        }
        assert_eq!(recorded(&store).await, [(1, 4)]);
        assert_eq!(leases(store.range(keys::READERS).await.unwrap()), lease, "one reader, one lease");
        store.expire(begun + KEEP * 4).await.unwrap();
        assert_eq!(recorded(&store).await, []);
        assert!(
            other.record(&reader(1), generation(5), begun + KEEP * 4).await.is_err(),
            "its lease is gone"
        );
    }

    #[tokio::test]
    async fn a_deregistered_reader_is_removed_by_any_hub_and_may_return() {
        let (store, now) = (SimStore::new(), Instant::now());
        let (mut one, mut other) =
            (ReaderRecorder::new(store.clone(), KEEP), ReaderRecorder::new(store.clone(), KEEP));
        one.record(&reader(1), generation(3), now).await.unwrap();
        one.record(&reader(2), generation(3), now).await.unwrap();
        other.remove_reader(&reader(1)).await.unwrap();
        assert_eq!(recorded(&store).await, [(2, 3)]);
        other.remove_reader(&reader(1)).await.unwrap();
        let stale = one.record(&reader(1), generation(4), now).await;
        assert_eq!((stale.is_err(), recorded(&store).await), (true, vec![(2, 3)]), "its lease has ended");
        other.record(&reader(1), generation(4), now).await.unwrap();
        assert_eq!(recorded(&store).await, [(1, 4), (2, 3)]);
    }

    #[tokio::test]
    async fn reader_limit_is_enforced() {
        let (store, now) = (SimStore::new(), Instant::now());
        let mut recorder = ReaderRecorder::new(store.clone(), KEEP);
        for boot_id in 0..=READERS_MAX as u64 {
            recorder.record(&reader(boot_id), generation(1), now).await.unwrap();
        }
        assert_eq!(recorded(&store).await.len(), READERS_MAX);
        recorder.record(&reader(u64::MAX), generation(1), now + KEEP).await.unwrap();
        assert_eq!(
            recorded(&store).await.len(),
            READERS_MAX + 1,
            "a reader whose lease has expired frees a slot"
        );
    }
}
