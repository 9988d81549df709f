//! Conformance suite that every store must pass.

use std::time::{Duration, Instant};

use scheduler_store::model::{TXN_BYTES_MAX, TXN_OPS_MAX};
use scheduler_store::{
    Compare, EmbeddedStore, Event, KeyRange, KeyValue, Op, PageContent, SimStore, Store, StoreError, Txn,
    Watch, WatchError,
};

use super::cluster::Cluster;
use super::{soon, wait_until};

const TTL: Duration = Duration::from_secs(2);

#[tokio::test]
async fn the_embedded_store_conforms() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("store");
    let store = EmbeddedStore::open(&path, Instant::now()).await.unwrap();
    conforms(&store, expire_leases, async |store: &EmbeddedStore| {
        // The store has no compaction call; it discards revisions older than the last ten thousand.
        let mut writers = tokio::task::JoinSet::new();
        for writer in 0..100 {
            let store = store.clone();
            writers.spawn(async move {
                for _ in 0..101 {
                    store.put(&format!("flood/{writer}"), vec![], None).await.unwrap();
                }
            });
        }
        writers.join_all().await;
    })
    .await;
}

#[tokio::test]
async fn the_simulated_store_conforms() {
    let store = SimStore::new();
    conforms(&store, expire_leases, async |store: &SimStore| store.compact()).await;
}

#[tokio::test]
async fn an_etcd_of_three_members_conforms() {
    let cluster = Cluster::start(3).await;
    let store = cluster.store("suite/", 1);
    let lease_ends = async |store: &scheduler_store::EtcdStore, key: &str| {
        wait_until("the lease has ended by itself", async || store.get(key).await.unwrap().is_none()).await;
    };
    conforms(&store, lease_ends, async |store: &scheduler_store::EtcdStore| store.compact().await.unwrap())
        .await;
    let other = cluster.store("other/", 1);
    assert!(other.range("").await.unwrap().entries.is_empty(), "another prefix is another store");
}

/// Expires leases, for stores that need a call for that.
async fn expire_leases<S: Store>(store: &S, _: &str) {
    assert_eq!(store.expire(Instant::now() + TTL).await.map(|ended| ended.len()), Ok(1));
}

/// Runs the suite. `lease_ends` returns when the lease of this key has expired; `compact` compacts the history.
async fn conforms<S: Store>(store: &S, lease_ends: impl AsyncFn(&S, &str), compact: impl AsyncFn(&S)) {
    keys_have_values_and_revisions(store).await;
    ranges_have_an_end_and_pages_a_limit(store).await;
    guards_hold(store).await;
    limits_are_the_same(store).await;
    leases_delete_their_keys(store, lease_ends).await;
    a_watch_returns_every_change_once(store).await;
    one_leader_at_a_time_and_deposed_leaders_cannot_write(store).await;
    a_gap_is_reported(store, compact).await;
}

fn put(key: &str, value: &str) -> Op {
    Op::Put { key: key.to_owned(), value: value.into(), lease: None }
}

fn delete(key: &str) -> Op {
    Op::Delete { key: key.to_owned() }
}

async fn keys_have_values_and_revisions<S: Store>(store: &S) {
    let before = store.range("").await.unwrap();
    assert_eq!(before.entries, []);
    let first = store.put("k/a", b"1".to_vec(), None).await.unwrap();
    assert_eq!(first, before.revision + 1);
    let then = vec![put("k/a", "2"), put("k/b", "2"), delete("k/none")];
    let both = store.txn(Txn { when: vec![], then }).await.unwrap();
    assert_eq!((both.succeeded, both.revision), (true, first + 1), "together, at one revision");
    let a = store.get("k/a").await.unwrap().unwrap();
    assert_eq!((a.key.as_str(), &*a.value, a.lease), ("k/a", &b"2"[..], None));
    assert_eq!((a.create_revision, a.mod_revision), (first, first + 1));

    store.put("ka", vec![], None).await.unwrap();
    let listed = store.range("k/").await.unwrap();
    let keys: Vec<_> = listed.entries.iter().map(|entry| entry.key.as_str()).collect();
    assert_eq!((keys, listed.revision), (vec!["k/a", "k/b"], first + 2), "in order, without other keys");
    assert_eq!(store.delete("k/a").await, Ok(first + 3));
    assert_eq!(store.delete("k/a").await, Ok(first + 3), "deleting a missing key changes nothing");
    assert_eq!(store.get("k/a").await, Ok(None));
    store.put("k/a", vec![], None).await.unwrap();
    let anew = store.get("k/a").await.unwrap().unwrap();
    assert_eq!(anew.create_revision, first + 4, "it was created again");
}

async fn ranges_have_an_end_and_pages_a_limit<S: Store>(store: &S) {
    let from = store.range("").await.unwrap().revision + 1;
    for key in ["p/a", "p/b", "p/c", "p0", "q"] {
        store.put(key, b"value".to_vec(), None).await.unwrap();
    }
    let between =
        |from: &str, before: &str| KeyRange::Between { from: from.to_owned(), before: before.to_owned() };
    let names = |entries: &[KeyValue]| entries.iter().map(|entry| entry.key.clone()).collect::<Vec<_>>();
    let ranged = async |keys: KeyRange| names(&store.range(keys).await.unwrap().entries);
    assert_eq!(ranged(between("p/b", "p0")).await, ["p/b", "p/c"]);
    assert_eq!(ranged(between("p/b\0", "q")).await, ["p/c", "p0"]);
    assert_eq!(ranged(between("q", "p")).await, [""; 0], "an empty range");
    for (keys, limit, expected) in [
        (KeyRange::from("p/"), 2, (vec!["p/a", "p/b"], 3)),
        (KeyRange::from("p/"), 3, (vec!["p/a", "p/b", "p/c"], 3)),
        (between("p/b\0", "q"), 9, (vec!["p/c", "p0"], 2)),
        (KeyRange::from("p/"), 0, (vec![], 3)),
        (KeyRange::from("none/"), 1, (vec![], 0)),
    ] {
        for (content, value) in [(PageContent::Values, &b"value"[..]), (PageContent::Keys, b"")] {
            let page = store.page(keys.clone(), limit, content).await.unwrap();
            let (found, total) = &expected;
            assert_eq!(
                (names(&page.entries), page.total),
                (found.iter().map(|key| (*key).to_owned()).collect(), *total),
                "{keys:?}"
            );
            assert!(page.entries.iter().all(|entry| &*entry.value == value && entry.mod_revision >= from));
        }
    }
    let mut watch = store.watch(between("p/b", "p0"), from);
    let mut changed = Vec::new();
    while changed.len() < 2 {
        let events = soon("the changes", watch.next()).await.unwrap();
        changed.extend(events.iter().map(|event| event.key().to_owned()));
    }
    assert_eq!(changed, ["p/b", "p/c"]);
}

async fn guards_hold<S: Store>(store: &S) {
    let created = store.put("g", b"1".to_vec(), None).await.unwrap();
    let changed = store.put("g", b"2".to_vec(), None).await.unwrap();
    let check = async |when: Compare, holds: bool| {
        let before = store.range("g").await.unwrap().revision;
        let txn = Txn { when: vec![when.clone()], then: vec![put("g!", "")] };
        let outcome = store.txn(txn).await.unwrap();
        assert_eq!(outcome.succeeded, holds, "{when:?}");
        assert_eq!(outcome.revision, before + u64::from(holds), "{when:?}");
    };
    let of = |key: &str| key.to_owned();
    check(Compare::CreateRevision(of("g"), created), true).await;
    check(Compare::CreateRevision(of("g"), changed), false).await;
    check(Compare::CreateRevision(of("g"), 0), false).await;
    check(Compare::CreateRevision(of("g-new"), 0), true).await;
    check(Compare::ModRevision(of("g"), changed), true).await;
    check(Compare::ModRevision(of("g"), created), false).await;
    check(Compare::ModRevision(of("g-new"), 0), true).await;
    let both = vec![Compare::ModRevision(of("g"), changed), Compare::ModRevision(of("g"), created)];
    assert!(!store.txn(Txn { when: both, then: vec![delete("g")] }).await.unwrap().succeeded);
    assert!(store.get("g").await.unwrap().is_some());
}

async fn limits_are_the_same<S: Store>(store: &S) {
    let ops = |len: usize| Txn { when: vec![], then: (0..len).map(|n| put(&format!("l/{n}"), "")).collect() };
    assert!(store.txn(ops(TXN_OPS_MAX)).await.unwrap().succeeded);
    assert_eq!(store.txn(ops(TXN_OPS_MAX + 1)).await, Err(StoreError::TooManyOps(TXN_OPS_MAX + 1)));

    let key = "large";
    let value = |len: usize| vec![b'x'; len];
    let fits = TXN_BYTES_MAX - key.len();
    store.put(key, value(fits), None).await.unwrap();
    assert_eq!(store.get(key).await.unwrap().unwrap().value.len(), fits);
    let too_large = store.put(key, value(fits + 1), None).await;
    assert_eq!(too_large, Err(StoreError::TooLarge(TXN_BYTES_MAX + 1)));
    store.delete(key).await.unwrap();

    let twice = Txn { when: vec![], then: vec![put("twice", "1"), delete("twice")] };
    assert_eq!(store.txn(twice).await, Err(StoreError::DuplicateKey("twice".to_owned())));
}

async fn leases_delete_their_keys<S: Store>(store: &S, lease_ends: impl AsyncFn(&S, &str)) {
    let now = Instant::now();
    let (kept, left) =
        (store.lease_grant(10 * TTL, now).await.unwrap(), store.lease_grant(TTL, now).await.unwrap());
    assert_ne!(kept, left);
    store.put("lease/kept", vec![], Some(kept)).await.unwrap();
    store.put("lease/moved", vec![], Some(left)).await.unwrap();
    store.put("lease/left", vec![], Some(left)).await.unwrap();
    store.put("lease/moved", vec![], Some(kept)).await.unwrap();
    let mut held = store.lease_keep_alive(kept, now).await.unwrap();
    held.sort();
    assert_eq!(held, ["lease/kept", "lease/moved"], "a key belongs to the lease of its last put");
    assert_eq!(store.get("lease/left").await.unwrap().unwrap().lease, Some(left));

    let before = store.range("lease/").await.unwrap().revision;
    let mut watch = store.watch("lease/", before + 1);
    lease_ends(store, "lease/left").await;
    let gone = soon("the end of the lease", watch.next()).await.unwrap();
    assert_eq!(gone, [Event::Delete { key: "lease/left".to_owned(), revision: before + 1 }]);
    let lost = StoreError::NoSuchLease(left);
    assert_eq!(store.lease_keep_alive(left, now).await, Err(lost.clone()));
    assert_eq!(store.lease_revoke(left).await, Err(lost.clone()));
    assert_eq!(store.put("lease/new", vec![], Some(left)).await, Err(lost.clone()));
    let then =
        vec![put("lease/a", ""), Op::Put { key: "lease/b".to_owned(), value: vec![], lease: Some(left) }];
    assert_eq!(store.txn(Txn { when: vec![], then }).await, Err(lost));
    assert_eq!(store.get("lease/a").await, Ok(None), "a rejected transaction has no effect");

    store.lease_revoke(kept).await.unwrap();
    let mut gone = soon("the keys of the lease", watch.next()).await.unwrap();
    gone.sort_by(|one, other| one.key().cmp(other.key()));
    let keys: Vec<_> = gone.iter().map(|event| (event.key(), event.revision())).collect();
    assert_eq!(keys, [("lease/kept", before + 2), ("lease/moved", before + 2)], "together, at one revision");
    assert_eq!(store.range("lease/").await.unwrap().entries, []);
}

async fn a_watch_returns_every_change_once<S: Store>(store: &S) {
    let from = store.put("w/before", b"1".to_vec(), None).await.unwrap();
    let mut watch = store.watch("w/", from);
    let first = soon("earlier changes", watch.next()).await.unwrap();
    assert_eq!(changed(&first), [("w/before", from)]);
    // A dropped future loses no change.
    tokio::select! {
        biased;
        received = watch.next() => panic!("no change: {received:?}"),
        () = std::future::ready(()) => {}
    }
    store.put("beside", vec![], None).await.unwrap();
    let then = vec![put("w/b", "2"), put("w/a", "2"), delete("w/before")];
    let together = store.txn(Txn { when: vec![], then }).await.unwrap().revision;
    let last = store.put("w/a", b"3".to_vec(), None).await.unwrap();
    let mut received = Vec::new();
    while received.last().is_none_or(|event: &Event| event.revision() < last) {
        received.extend(soon("the changes", watch.next()).await.unwrap());
    }
    let mut keys = changed(&received);
    keys[..3].sort_unstable();
    let expected = [("w/a", together), ("w/b", together), ("w/before", together), ("w/a", last)];
    assert_eq!(keys, expected, "each once, in the order of revisions");
    let Some(Event::Put(entry)) = received.last() else { panic!("the last change is a put") };
    assert_eq!(store.get("w/a").await.unwrap().as_ref(), Some(entry));
}

async fn one_leader_at_a_time_and_deposed_leaders_cannot_write<S: Store>(store: &S) {
    let now = Instant::now();
    let ttl = 20 * TTL;
    let (one, other) =
        (store.lease_grant(ttl, now).await.unwrap(), store.lease_grant(ttl, now).await.unwrap());
    let first = soon("a free term", store.campaign("leader", b"one".to_vec(), one)).await.unwrap();
    assert_eq!((first.key.as_str(), first.lease), ("leader", one));
    let again = soon("the present term", store.campaign("leader", b"one".to_vec(), one)).await.unwrap();
    assert_eq!(again, first, "a second campaign returns the same term");

    let second = store.campaign("leader", b"other".to_vec(), other);
    tokio::pin!(second);
    let write = async |term: &scheduler_store::Term, value: &str| {
        let txn = Txn { when: vec![term.guard()], then: vec![put("plan", value)] };
        store.txn(txn).await.unwrap().succeeded
    };
    tokio::select! {
        biased;
        term = &mut second => panic!("two leaders: {term:?}"),
        written = write(&first, "first") => assert!(written),
    }
    store.lease_revoke(one).await.unwrap();
    let second = soon("the next term", second).await.unwrap();
    assert!(second.created > first.created);
    assert!(write(&second, "second").await);
    assert!(!write(&first, "too late").await, "the term is over");
    assert_eq!(&*store.get("plan").await.unwrap().unwrap().value, b"second");
    let lost = store.campaign("leader", b"one".to_vec(), one);
    tokio::select! {
        biased;
        lost = lost => assert_eq!(lost, Err(StoreError::NoSuchLease(one))),
        () = some_responses(store) => {}
    }
    store.lease_revoke(other).await.unwrap();
    let lost = soon("a response", store.campaign("leader", b"one".to_vec(), one)).await;
    assert_eq!(lost, Err(StoreError::NoSuchLease(one)), "a candidate without a lease does not lead");
}

/// Waits for some responses of the store.
async fn some_responses<S: Store>(store: &S) {
    for _ in 0..10 {
        store.get("plan").await.unwrap();
    }
}

async fn a_gap_is_reported<S: Store>(store: &S, compact: impl AsyncFn(&S)) {
    let mut never = store.watch("", 0);
    assert_eq!(soon("a response", never.next()).await, Err(WatchError::Compacted { oldest: 1 }));
    let here = store.put("c/a", vec![], None).await.unwrap();
    let mut early = store.watch("c/", here + 2);
    let received = soon("a response", early.next()).await;
    assert_eq!(received, Err(WatchError::FutureRevision { from: here + 2, revision: here }));
    assert_eq!(soon("the same", early.next()).await, received);

    let mut open_watch = store.watch("c/", here);
    assert_eq!(changed(&soon("present keys", open_watch.next()).await.unwrap()), [("c/a", here)]);
    store.put("c/a", vec![], None).await.unwrap();
    compact(store).await;
    let last = store.put("c/b", vec![], None).await.unwrap();
    let mut late = store.watch("c/", here);
    let received = soon("a response", late.next()).await;
    assert!(matches!(received, Err(WatchError::Compacted { oldest }) if oldest > here), "{received:?}");
    // The open watch may have received all changes in time, or gets an error; it never skips a change.
    let mut keys = Vec::new();
    let gap = loop {
        match soon("the changes, or a gap", open_watch.next()).await {
            Ok(events) => {
                keys.extend(changed(&events).iter().map(|(key, revision)| ((*key).to_owned(), *revision)))
            }
            Err(gap) => break Some(gap),
        }
        if keys.last().is_some_and(|(_, revision)| *revision == last) {
            break None;
        }
    };
    let is_complete = keys == [("c/a".to_owned(), here + 1), ("c/b".to_owned(), last)];
    assert!(is_complete || matches!(gap, Some(WatchError::Compacted { .. })), "{keys:?} {gap:?}");
}

fn changed(events: &[Event]) -> Vec<(&str, u64)> {
    events.iter().map(|event| (event.key(), event.revision())).collect()
}
