//! Tests of the store through its interface: responses, watches, and failures of the disk.

use super::*;
use crate::model::{Compare, Event, Op, WatchError};
use crate::store::Watch;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

const TTL: Duration = Duration::from_secs(5);

fn changed(events: Vec<Event>) -> Vec<(String, u64)> {
    events.iter().map(|event| (event.key().to_owned(), event.revision())).collect()
}

#[tokio::test]
async fn acknowledged_writes_survive_closing_and_reopening() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("store");
    let now = Instant::now();
    let store = EmbeddedStore::open(&path, now).await.unwrap();
    let lease = store.lease_grant(TTL, now).await.unwrap();
    assert_eq!(store.put("a", b"1".to_vec(), Some(lease)).await, Ok(1));
    let taken = EmbeddedStore::open(&path, now).await.err().expect("the file is locked").to_string();
    assert!(taken.contains("cannot open the store") && taken.contains("already open"), "{taken}");

    let other = store.clone();
    store.close().await;
    assert_eq!(other.get("a").await, Err(StoreError::Closed));
    assert_eq!(other.watch("", 2).next().await, Err(WatchError::Closed));

    let store = EmbeddedStore::open(&path, now).await.unwrap();
    assert_eq!(store.get("a").await.unwrap().map(|entry| entry.value.to_vec()), Some(b"1".to_vec()));
    assert_eq!(store.put("b", b"2".to_vec(), None).await, Ok(2), "the revision continues");
    assert_eq!(store.lease_keep_alive(lease, now).await, Ok(vec!["a".to_owned()]));
    assert_eq!(store.expire(now + TTL).await, Ok(vec![lease]));
    assert_eq!(store.range("").await.map(|range| (range.entries.len(), range.revision)), Ok((1, 3)));
}

#[tokio::test]
async fn of_two_writes_with_the_same_guard_one_fails() {
    let dir = tempfile::tempdir().unwrap();
    let store = EmbeddedStore::open(&dir.path().join("store"), Instant::now()).await.unwrap();
    let write = async |value: &str| {
        let when = vec![Compare::ModRevision("routes".to_owned(), 0)];
        let then = vec![Op::Put { key: "routes".to_owned(), value: value.into(), lease: None }];
        store.txn(Txn { when, then }).await.unwrap().succeeded
    };
    let (one, other) = tokio::join!(write("one"), write("other"));
    assert!(one != other, "{one} {other}");
}

#[tokio::test]
async fn a_watch_returns_each_change_once() {
    let dir = tempfile::tempdir().unwrap();
    let store = EmbeddedStore::open(&dir.path().join("store"), Instant::now()).await.unwrap();
    let lease = store.lease_grant(TTL, Instant::now()).await.unwrap();
    store.put("spokes/a", b"1".to_vec(), Some(lease)).await.unwrap();
    let listed = store.range("spokes/").await.unwrap();
    let mut watch = store.watch("spokes/", listed.revision + 1);
    let (received, ()) = tokio::join!(watch.next(), async {
        store.put("other", b"".to_vec(), None).await.unwrap();
        store.lease_revoke(lease).await.unwrap();
    });
    assert_eq!(received.map(changed), Ok(vec![("spokes/a".to_owned(), 3)]));

    // A dropped future loses no change.
    tokio::select! {
        biased;
        received = watch.next() => panic!("no change: {received:?}"),
        () = std::future::ready(()) => {}
    }
    store.put("spokes/b", b"".to_vec(), None).await.unwrap();
    assert_eq!(watch.next().await.map(changed), Ok(vec![("spokes/b".to_owned(), 4)]));

    let mut late = store.watch("spokes/", 0);
    assert_eq!(late.next().await, Err(WatchError::Compacted { oldest: 1 }));
    let mut early = store.watch("spokes/", 6);
    assert_eq!(early.next().await, Err(WatchError::FutureRevision { from: 6, revision: 4 }));
}

#[tokio::test]
async fn concurrent_requests_get_their_own_responses() {
    let dir = tempfile::tempdir().unwrap();
    let store = EmbeddedStore::open(&dir.path().join("store"), Instant::now()).await.unwrap();
    let mut tasks = tokio::task::JoinSet::new();
    for number in 0..3 * BATCH_MAX {
        let store = store.clone();
        tasks.spawn(async move {
            let key = format!("{number:04}");
            let revision = store.put(&key, key.clone().into_bytes(), None).await.unwrap();
            let entry = store.get(&key).await.unwrap().expect("an acknowledged write is there");
            assert_eq!((entry.mod_revision, &*entry.value), (revision, key.as_bytes()));
            revision
        });
    }
    let mut revisions = tasks.join_all().await;
    revisions.sort_unstable();
    assert!(revisions.into_iter().eq(1..=3 * BATCH_MAX as u64));
}

/// Storage backend with injectable failures, which keeps earlier writes.
#[derive(Clone, Debug, Default)]
struct FailingStorage {
    bytes: Arc<Mutex<Vec<u8>>>,
    fails: Arc<AtomicBool>,
}

impl FailingStorage {
    fn bytes(&self) -> io::Result<supervision::MutexGuard<'_, Vec<u8>>> {
        if self.fails.load(Ordering::SeqCst) {
            Err(io::ErrorKind::StorageFull.into())
        } else {
            Ok(self.bytes.lock())
        }
    }
}

impl redb::StorageBackend for FailingStorage {
    fn len(&self) -> io::Result<u64> {
        Ok(self.bytes()?.len() as u64)
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let start = offset as usize;
        out.copy_from_slice(&self.bytes()?[start..start + out.len()]);
        Ok(())
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.bytes()?.resize(len as usize, 0);
        Ok(())
    }

    fn sync_data(&self) -> io::Result<()> {
        self.bytes().map(drop)
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let start = offset as usize;
        self.bytes()?[start..start + data.len()].copy_from_slice(data);
        Ok(())
    }
}

#[tokio::test]
async fn failed_writes_have_no_effect_and_the_store_recovers_with_the_disk() {
    let disk = FailingStorage::default();
    let opener = disk.clone();
    let opener: Opener = Box::new(move |now| StoreFile::on(opener.clone(), now));
    let store = EmbeddedStore::start(opener, Instant::now()).await.unwrap();
    store.put("a", b"1".to_vec(), None).await.unwrap();
    let mut watch = store.watch("", 2);

    disk.fails.store(true, Ordering::SeqCst);
    for attempt in 0..2 {
        let rejected = store.put("a", b"2".to_vec(), None).await;
        assert!(matches!(rejected, Err(StoreError::Unavailable(_))), "attempt {attempt}: {rejected:?}");
    }
    assert!(matches!(store.get("a").await, Err(StoreError::Unavailable(_))), "the content is unknown");

    disk.fails.store(false, Ordering::SeqCst);
    assert_eq!(store.get("a").await.unwrap().map(|entry| entry.value.to_vec()), Some(b"1".to_vec()));
    assert_eq!(store.put("b", b"3".to_vec(), None).await, Ok(2));
    assert_eq!(watch.next().await.map(changed), Ok(vec![("b".to_owned(), 2)]), "nothing was missed");
}

/// The error comes after the bytes: the write succeeded, but was reported as possibly failed.
#[tokio::test]
async fn a_watch_that_may_have_missed_changes_gets_an_error() {
    let disk = FailingStorage::default();
    let (base, swapped) = (disk.clone(), disk.clone());
    let opener: Opener = Box::new(move |now| StoreFile::on(swapped.clone(), now));
    let store = EmbeddedStore::start(opener, Instant::now()).await.unwrap();
    store.put("a", b"1".to_vec(), None).await.unwrap();
    let mut watch = store.watch("", 2);

    // The disk then holds the result of another store on the same bytes, with one more revision.
    let copy = FailingStorage {
        bytes: Arc::new(Mutex::new(base.bytes.lock().clone())),
        ..FailingStorage::default()
    };
    let same = copy.clone();
    let opener: Opener = Box::new(move |now| StoreFile::on(same.clone(), now));
    let ahead = EmbeddedStore::start(opener, Instant::now()).await.unwrap();
    ahead.put("a", b"2".to_vec(), None).await.unwrap();
    ahead.close().await;

    disk.fails.store(true, Ordering::SeqCst);
    assert!(store.put("a", b"2".to_vec(), None).await.is_err());
    *disk.bytes.lock() = copy.bytes.lock().clone();
    disk.fails.store(false, Ordering::SeqCst);
    assert_eq!(store.get("a").await.unwrap().map(|entry| entry.mod_revision), Some(2));
    assert_eq!(watch.next().await, Err(WatchError::Compacted { oldest: 3 }));
}
