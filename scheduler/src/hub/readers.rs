//! Notes in the store who runs which table.
//!
//! A gateway says with each question for routes which table it has in hand, a spoke with each sign of life. Any hub may be
//! asked, and the one that leads has to know; so each reader has a key in the store under a lease of its own, which runs
//! out when nobody has heard of it for a while, and which ends when it takes its leave. Nobody waits for this: what could
//! not be noted is said again with the next question, or follows from silence.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use regions::Generation;
use scheduler_core::rollout::Reader;
use scheduler_core::wire::apply::ReaderV1;
use scheduler_core::wire::{VERSION, keys};
use scheduler_store::{Lease, Store, StoreError};
use tokio::sync::mpsc;

use super::records;
use crate::events::ReadersTooMany;

/// Readers that one hub knows: as many as it holds questions of, and a spoke for each region of a catalogue.
pub(super) const READERS_MAX: usize = 2048;
/// Words of readers that wait to be noted; what does not fit is said again.
pub(super) const WORDS_MAX: usize = 1024;
/// In what part of its time a lease is kept alive while its reader says nothing new.
const KEEP_ALIVE_PART: u32 = 4;

/// What a reader says of itself.
#[derive(Debug)]
pub(super) enum Word {
    /// It runs the table of this generation.
    Runs(Reader, Generation),
    /// It goes.
    Leaves(Reader),
}

/// Whoever notes.
pub(super) struct Registrar<S> {
    store: S,
    keep: Duration,
    known: BTreeMap<Reader, Noted>,
    /// It was told that there are too many.
    told: bool,
}

struct Noted {
    lease: Lease,
    generation: Generation,
    kept_alive: Instant,
}

impl<S: Store> Registrar<S> {
    pub(super) fn new(store: S, keep: Duration) -> Registrar<S> {
        Registrar { store, keep, known: BTreeMap::new(), told: false }
    }

    /// Notes what is said, until nobody can say anything any longer.
    pub(super) async fn note_all(mut self, mut words: mpsc::Receiver<Word>) {
        while let Some(word) = words.recv().await {
            match word {
                Word::Runs(reader, generation) => {
                    if self.note(&reader, generation, Instant::now()).await.is_err() {
                        // Whether it was noted is not known; the next word begins anew.
                        self.known.remove(&reader);
                    }
                }
                // What is not ended now runs out.
                Word::Leaves(reader) => drop(self.strike(&reader).await),
            }
        }
    }

    /// Ends the lease of a reader that goes, whichever hub it is from.
    async fn strike(&mut self, reader: &Reader) -> Result<(), StoreError> {
        self.known.remove(reader);
        match self.store.get(&keys::reader(reader)).await?.and_then(|entry| entry.lease) {
            Some(lease) => self.store.lease_revoke(lease).await,
            None => Ok(()),
        }
    }

    async fn note(
        &mut self,
        reader: &Reader,
        generation: Generation,
        now: Instant,
    ) -> Result<(), StoreError> {
        let keep_alive_after = self.keep / KEEP_ALIVE_PART;
        let Some(noted) = self.known.get_mut(reader) else {
            return self.begin(reader, generation, now).await;
        };
        if now.duration_since(noted.kept_alive) >= keep_alive_after {
            self.store.lease_keep_alive(noted.lease, now).await?;
            noted.kept_alive = now;
        }
        // What comes late is overtaken.
        if generation > noted.generation {
            self.store.put(&keys::reader(reader), value(reader, generation), Some(noted.lease)).await?;
            noted.generation = generation;
        }
        Ok(())
    }

    /// A reader that this hub does not know: another one may, and then there is a lease.
    async fn begin(
        &mut self,
        reader: &Reader,
        generation: Generation,
        now: Instant,
    ) -> Result<(), StoreError> {
        let keep = self.keep;
        self.known.retain(|_, noted| now.duration_since(noted.kept_alive) < keep);
        if self.known.len() >= READERS_MAX {
            if !std::mem::replace(&mut self.told, true) {
                ReadersTooMany { most: READERS_MAX }.emit();
            }
            return Ok(());
        }
        let key = keys::reader(reader);
        let found = self.store.get(&key).await?.and_then(|entry| entry.lease);
        let stands = match found {
            Some(lease) => self.store.lease_keep_alive(lease, now).await.is_ok().then_some(lease),
            None => None,
        };
        let lease = match stands {
            Some(lease) => lease,
            None => self.store.lease_grant(keep, now).await?,
        };
        self.store.put(&key, value(reader, generation), Some(lease)).await?;
        self.known.insert(reader.clone(), Noted { lease, generation, kept_alive: now });
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
    use scheduler_core::rollout::Role;
    use scheduler_store::Sim;

    const KEEP: Duration = Duration::from_secs(60);

    fn reader(boot_id: u64) -> Reader {
        Reader { role: Role::Gateway, region: "aws/us-east-1".parse().unwrap(), boot_id }
    }

    fn generation(number: u64) -> Generation {
        Generation { epoch: 1, number }
    }

    async fn noted(store: &Sim) -> Vec<(u64, u64)> {
        let range = store.range(keys::READERS).await.unwrap();
        let read = |entry| records::reader(entry).unwrap();
        let numbers = |(reader, generation): (Reader, Generation)| (reader.boot_id, generation.number);
        range.entries.iter().map(read).map(numbers).collect()
    }

    #[tokio::test]
    async fn a_reader_stands_for_as_long_as_somebody_hears_of_it_whichever_hub_that_is() {
        let (store, begun) = (Sim::new(), Instant::now());
        let (mut one, mut other) = (Registrar::new(store.clone(), KEEP), Registrar::new(store.clone(), KEEP));
        one.note(&reader(1), generation(3), begun).await.unwrap();
        one.note(&reader(1), generation(2), begun).await.unwrap();
        assert_eq!(noted(&store).await, [(1, 3)], "what comes late is overtaken");
        other.note(&reader(1), generation(4), begun + KEEP / 2).await.unwrap();
        let leases = |range: scheduler_store::Range| range.entries[0].lease;
        let lease = leases(store.range(keys::READERS).await.unwrap());
        for quarter in 3..8 {
            other.note(&reader(1), generation(4), begun + KEEP * quarter / 4).await.unwrap();
            store.expire(begun + KEEP * quarter / 4).await.unwrap();
        }
        assert_eq!(noted(&store).await, [(1, 4)]);
        assert_eq!(leases(store.range(keys::READERS).await.unwrap()), lease, "one reader, one lease");
        store.expire(begun + KEEP * 4).await.unwrap();
        assert_eq!(noted(&store).await, []);
        assert!(other.note(&reader(1), generation(5), begun + KEEP * 4).await.is_err(), "its lease is gone");
    }

    #[tokio::test]
    async fn a_reader_that_goes_is_struck_by_whichever_hub_hears_it_and_may_come_back() {
        let (store, now) = (Sim::new(), Instant::now());
        let (mut one, mut other) = (Registrar::new(store.clone(), KEEP), Registrar::new(store.clone(), KEEP));
        one.note(&reader(1), generation(3), now).await.unwrap();
        one.note(&reader(2), generation(3), now).await.unwrap();
        other.strike(&reader(1)).await.unwrap();
        assert_eq!(noted(&store).await, [(2, 3)]);
        other.strike(&reader(1)).await.unwrap();
        let stale = one.note(&reader(1), generation(4), now).await;
        assert_eq!((stale.is_err(), noted(&store).await), (true, vec![(2, 3)]), "its lease has ended");
        other.note(&reader(1), generation(4), now).await.unwrap();
        assert_eq!(noted(&store).await, [(1, 4), (2, 3)]);
    }

    #[tokio::test]
    async fn as_many_readers_as_there_may_be_are_noted_and_one_more_is_not() {
        let (store, now) = (Sim::new(), Instant::now());
        let mut registrar = Registrar::new(store.clone(), KEEP);
        for boot_id in 0..=READERS_MAX as u64 {
            registrar.note(&reader(boot_id), generation(1), now).await.unwrap();
        }
        assert_eq!(noted(&store).await.len(), READERS_MAX);
        registrar.note(&reader(u64::MAX), generation(1), now + KEEP).await.unwrap();
        assert_eq!(noted(&store).await.len(), READERS_MAX + 1, "whoever is gone makes room");
    }
}
