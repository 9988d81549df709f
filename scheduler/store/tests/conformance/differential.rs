//! Random histories, executed by all three stores. The response of etcd to each call is the expected response of the
//! other two: the same success or error, the same keys, values and leases, the same revisions (relative to etcd's first
//! one), and in the end the same events.
//!
//! The seeds are printed. `MERIDIAN_DIFFERENTIAL_OPS=100000` makes the histories longer, and
//! `MERIDIAN_DIFFERENTIAL_SEED` changes them.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use scheduler_store::{
    Compare, EmbeddedStore, EtcdStore, Event, KeyValue, Lease, Op, Range, SimStore, Store, StoreError, Txn,
    Watch, WatchError,
};

use super::cluster::Cluster;
use super::soon;

/// Default number of operations of a history.
const OPS: u64 = 700;
const HISTORIES: u64 = 3;
/// Longer than any history: expiry by etcd's clock is not compared.
const TTL: Duration = Duration::from_secs(3600);
const KEYS: [&str; 6] = ["a", "a/1", "a/2", "b", "b/1", "c"];

fn env_number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |value| value.parse().unwrap_or_else(|_| panic!("{name}={value}")))
}

/// A store, with the mapping of its revisions and leases to common numbers.
struct TestedStore<S> {
    store: S,
    /// Its revision at the start of the history.
    zero: u64,
    /// Its leases, in the order in which they were granted.
    leases: Vec<Lease>,
}

/// Operation in common numbers: revisions relative to the start, leases by the order in which they were granted.
#[derive(Clone, Debug)]
enum Step {
    Get(&'static str),
    Range(&'static str),
    Txn { when: Vec<(bool, &'static str, u64)>, then: Vec<Change> },
    Grant,
    KeepAlive(usize),
    Revoke(usize),
}

#[derive(Clone, Debug)]
enum Change {
    Put(&'static str, u64, Option<usize>),
    Delete(&'static str),
}

/// Key, value, created, changed, lease.
type Entry = (String, Vec<u8>, u64, u64, Option<usize>);

/// Response in common numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Reply {
    Entries(Vec<Entry>, Option<u64>),
    Outcome(bool, u64),
    Keys(Vec<String>),
    Done,
    NoSuchLease(usize),
    Rejected(StoreError),
}

impl<S: Store> TestedStore<S> {
    async fn new(store: S) -> TestedStore<S> {
        let zero = store.range("").await.unwrap().revision;
        TestedStore { store, zero, leases: Vec::new() }
    }

    /// 0 means a key that does not exist, in all stores.
    fn shared(&self, revision: u64) -> u64 {
        if revision == 0 { 0 } else { revision - self.zero }
    }

    fn own_revision(&self, revision: u64) -> u64 {
        if revision == 0 { 0 } else { revision + self.zero }
    }

    fn lease_index(&self, lease: Lease) -> usize {
        self.leases.iter().position(|known| *known == lease).expect("a lease of this history")
    }

    fn entry(&self, entry: KeyValue) -> Entry {
        let KeyValue { key, value, create_revision, mod_revision, lease } = entry;
        let (created, changed) = (self.shared(create_revision), self.shared(mod_revision));
        (key, value.to_vec(), created, changed, lease.map(|lease| self.lease_index(lease)))
    }

    fn txn(&self, when: &[(bool, &str, u64)], then: &[Change]) -> Txn {
        let when = when.iter().map(|(created, key, revision)| {
            let (key, revision) = ((*key).to_owned(), self.own_revision(*revision));
            if *created {
                Compare::CreateRevision(key, revision)
            } else {
                Compare::ModRevision(key, revision)
            }
        });
        let then = then.iter().map(|change| match change {
            Change::Put(key, value, lease) => {
                let (key, value) = ((*key).to_owned(), value.to_string().into_bytes());
                Op::Put { key, value, lease: lease.map(|lease_index| self.leases[lease_index]) }
            }
            Change::Delete(key) => Op::Delete { key: (*key).to_owned() },
        });
        Txn { when: when.collect(), then: then.collect() }
    }

    async fn execute(&mut self, step: &Step) -> Reply {
        let now = Instant::now();
        let reply = match step {
            Step::Get(key) => self.store.get(key).await.map(|entry| {
                Reply::Entries(entry.into_iter().map(|entry| self.entry(entry)).collect(), None)
            }),
            Step::Range(prefix) => self.store.range(*prefix).await.map(|Range { entries, revision }| {
                let entries = entries.into_iter().map(|entry| self.entry(entry));
                Reply::Entries(entries.collect(), Some(self.shared(revision)))
            }),
            Step::Txn { when, then } => {
                let outcome = self.store.txn(self.txn(when, then)).await;
                outcome.map(|outcome| Reply::Outcome(outcome.succeeded, self.shared(outcome.revision)))
            }
            Step::Grant => self.store.lease_grant(TTL, now).await.map(|lease| {
                self.leases.push(lease);
                Reply::Done
            }),
            Step::KeepAlive(lease_index) => {
                self.store.lease_keep_alive(self.leases[*lease_index], now).await.map(|mut keys| {
                    keys.sort();
                    Reply::Keys(keys)
                })
            }
            Step::Revoke(lease_index) => {
                self.store.lease_revoke(self.leases[*lease_index]).await.map(|()| Reply::Done)
            }
        };
        reply.unwrap_or_else(|error| match error {
            StoreError::NoSuchLease(lease) => Reply::NoSuchLease(self.lease_index(lease)),
            other => Reply::Rejected(other),
        })
    }

    /// Returns all changes from a watch since the start: the entry by revision and key.
    async fn changes(&self, until: u64) -> BTreeMap<(u64, String), Option<Entry>> {
        let mut watch = self.store.watch("", self.zero + 1);
        let mut changes = BTreeMap::new();
        while changes.keys().next_back().is_none_or(|(revision, _)| *revision < until) {
            for event in soon("the history", watch.next()).await.unwrap() {
                let key = (self.shared(event.revision()), event.key().to_owned());
                let entry = match event {
                    Event::Put(entry) => Some(self.entry(entry)),
                    Event::Delete { .. } => None,
                };
                assert_eq!(changes.insert(key, entry), None, "received twice");
            }
        }
        changes
    }
}

/// Draws the next operation. With the known state, guards hold about as often as not.
fn step(rng: &mut SmallRng, leases: usize, known: &BTreeMap<String, (u64, u64)>, number: u64) -> Step {
    let key = |rng: &mut SmallRng| KEYS[rng.random_range(0..KEYS.len())];
    match rng.random_range(0..100) {
        0..8 => Step::Get(key(rng)),
        8..14 => Step::Range(["", "a", "a/", "b", "none"][rng.random_range(0..5)]),
        14..22 => Step::Grant,
        22..28 if leases > 0 => Step::KeepAlive(rng.random_range(0..leases)),
        28..34 if leases > 0 => Step::Revoke(rng.random_range(0..leases)),
        _ => {
            let when = (0..rng.random_range(0..3)).map(|_| {
                let (created, key) = (rng.random(), key(rng));
                let (create, change) = known.get(key).copied().unwrap_or_default();
                let right = if created { create } else { change };
                (created, key, if rng.random_bool(0.8) { right } else { right.saturating_sub(1) })
            });
            let when = when.collect();
            // Sometimes empty, sometimes with the same key twice.
            let then = (0..rng.random_range(0..4)).map(|_| {
                if rng.random_bool(0.3) {
                    Change::Delete(key(rng))
                } else {
                    let under = (leases > 0 && rng.random_bool(0.4)).then(|| rng.random_range(0..leases));
                    Change::Put(key(rng), number, under)
                }
            });
            Step::Txn { when, then: then.collect() }
        }
    }
}

async fn compare(seed: u64, ops: u64, etcd: EtcdStore) -> u64 {
    let dir = tempfile::tempdir().unwrap();
    let embedded = EmbeddedStore::open(&dir.path().join("store"), Instant::now()).await.unwrap();
    let mut etcd = TestedStore::new(etcd).await;
    let mut embedded = TestedStore::new(embedded).await;
    let mut sim = TestedStore::new(SimStore::new()).await;
    let mut rng = SmallRng::seed_from_u64(seed);
    let mut last = 0;
    for number in 0..ops {
        let listed = sim.store.range("").await.unwrap();
        let known = listed
            .entries
            .iter()
            .map(|entry| (entry.key.clone(), (entry.create_revision, entry.mod_revision)));
        let step = step(&mut rng, sim.leases.len(), &known.collect(), number);
        let expected = etcd.execute(&step).await;
        let at = || format!("seed {seed}, operation {number}: {step:?}");
        assert!(!matches!(expected, Reply::Rejected(StoreError::Unavailable(_))), "{}: {expected:?}", at());
        assert_eq!(embedded.execute(&step).await, expected, "embedded, {}", at());
        assert_eq!(sim.execute(&step).await, expected, "sim, {}", at());
        last = sim.store.range("").await.unwrap().revision;
    }
    let expected = etcd.changes(last).await;
    // Both stores in this process limit their history; etcd was not compacted.
    let is_compacted = matches!(embedded.store.watch("", 1).next().await, Err(WatchError::Compacted { .. }));
    if !is_compacted {
        assert_eq!(embedded.changes(last).await, expected, "embedded, seed {seed}");
        assert_eq!(sim.changes(last).await, expected, "sim, seed {seed}");
    }
    embedded.store.close().await;
    last
}

#[tokio::test]
async fn all_stores_respond_alike_to_random_histories() {
    let cluster = Cluster::start(3).await;
    let ops = env_number("MERIDIAN_DIFFERENTIAL_OPS", OPS);
    let first = env_number("MERIDIAN_DIFFERENTIAL_SEED", 1);
    for seed in first..first + HISTORIES {
        let begun = Instant::now();
        let etcd = cluster.store(&format!("{seed}/"), 0);
        let revisions = compare(seed, ops, etcd).await;
        println!(
            "seed {seed}: {ops} operations, {revisions} revisions, 0 differences between etcd, embedded and sim; {:?}",
            begun.elapsed()
        );
    }
}
