//! The suite: what every store does, and does alike.

use std::time::{Duration, Instant};

use scheduler_store::model::{TXN_BYTES_MAX, TXN_OPS_MAX};
use scheduler_store::{Compare, Embedded, Event, Op, Sim, Store, StoreError, Txn, Watch, WatchError};

use super::cluster::Cluster;
use super::{soon, until};

const TTL: Duration = Duration::from_secs(2);

#[tokio::test]
async fn the_embedded_store_conforms() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("store");
    let store = Embedded::open(&path, Instant::now()).await.unwrap();
    conforms(&store, let_leases_end, async |store: &Embedded| {
        // It has no word for that; it forgets what is older than ten thousand revisions.
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
    let store = Sim::new();
    conforms(&store, let_leases_end, async |store: &Sim| store.compact()).await;
}

#[tokio::test]
async fn an_etcd_of_three_members_conforms() {
    let cluster = Cluster::start(3).await;
    let store = cluster.store("suite/", 1);
    let lease_ends = async |store: &scheduler_store::Etcd, key: &str| {
        until("the lease has ended by itself", async || store.get(key).await.unwrap().is_none()).await;
    };
    conforms(&store, lease_ends, async |store: &scheduler_store::Etcd| store.compact().await.unwrap()).await;
    let other = cluster.store("other/", 1);
    assert!(other.range("").await.unwrap().entries.is_empty(), "another prefix is another store");
}

/// For stores whose leases end when they are told the time.
async fn let_leases_end<S: Store>(store: &S, _: &str) {
    assert_eq!(store.expire(Instant::now() + TTL).await.map(|ended| ended.len()), Ok(1));
}

/// `lease_ends` returns when the lease under which this key stands has ended by itself; `compact` lets the store forget.
async fn conforms<S: Store>(store: &S, lease_ends: impl AsyncFn(&S, &str), compact: impl AsyncFn(&S)) {
    keys_have_values_and_revisions(store).await;
    guards_hold(store).await;
    limits_are_the_same(store).await;
    leases_take_their_keys(store, lease_ends).await;
    a_watch_tells_everything_once(store).await;
    one_leads_and_a_deposed_leader_writes_nothing(store).await;
    a_gap_is_told(store, compact).await;
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
    assert_eq!((keys, listed.revision), (vec!["k/a", "k/b"], first + 2), "in order, and nothing beside it");
    assert_eq!(store.delete("k/a").await, Ok(first + 3));
    assert_eq!(store.delete("k/a").await, Ok(first + 3), "what is not there cannot go");
    assert_eq!(store.get("k/a").await, Ok(None));
    store.put("k/a", vec![], None).await.unwrap();
    let anew = store.get("k/a").await.unwrap().unwrap();
    assert_eq!(anew.create_revision, first + 4, "it came to be anew");
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

async fn leases_take_their_keys<S: Store>(store: &S, lease_ends: impl AsyncFn(&S, &str)) {
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
    assert_eq!(held, ["lease/kept", "lease/moved"], "a key goes with the lease that it was last put under");
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
    assert_eq!(store.get("lease/a").await, Ok(None), "nothing of a refused transaction is done");

    store.lease_revoke(kept).await.unwrap();
    let mut gone = soon("the lease's keys", watch.next()).await.unwrap();
    gone.sort_by(|one, other| one.key().cmp(other.key()));
    let keys: Vec<_> = gone.iter().map(|event| (event.key(), event.revision())).collect();
    assert_eq!(keys, [("lease/kept", before + 2), ("lease/moved", before + 2)], "together, at one revision");
    assert_eq!(store.range("lease/").await.unwrap().entries, []);
}

async fn a_watch_tells_everything_once<S: Store>(store: &S) {
    let from = store.put("w/before", b"1".to_vec(), None).await.unwrap();
    let mut watch = store.watch("w/", from);
    let first = soon("what has happened already", watch.next()).await.unwrap();
    assert_eq!(changed(&first), [("w/before", from)]);
    // Somebody stopped waiting.
    tokio::select! {
        biased;
        told = watch.next() => panic!("nothing has changed: {told:?}"),
        () = std::future::ready(()) => {}
    }
    store.put("beside", vec![], None).await.unwrap();
    let then = vec![put("w/b", "2"), put("w/a", "2"), delete("w/before")];
    let together = store.txn(Txn { when: vec![], then }).await.unwrap().revision;
    let last = store.put("w/a", b"3".to_vec(), None).await.unwrap();
    let mut told = Vec::new();
    while told.last().is_none_or(|event: &Event| event.revision() < last) {
        told.extend(soon("the changes", watch.next()).await.unwrap());
    }
    let mut seen = changed(&told);
    seen[..3].sort_unstable();
    let wanted = [("w/a", together), ("w/b", together), ("w/before", together), ("w/a", last)];
    assert_eq!(seen, wanted, "each once, in the order of revisions");
    let Some(Event::Put(entry)) = told.last() else { panic!("a put was the last") };
    assert_eq!(store.get("w/a").await.unwrap().as_ref(), Some(entry));
}

async fn one_leads_and_a_deposed_leader_writes_nothing<S: Store>(store: &S) {
    let now = Instant::now();
    let ttl = 20 * TTL;
    let (one, other) =
        (store.lease_grant(ttl, now).await.unwrap(), store.lease_grant(ttl, now).await.unwrap());
    let first =
        soon("a term that nobody else has", store.campaign("leader", b"one".to_vec(), one)).await.unwrap();
    assert_eq!((first.key.as_str(), first.lease), ("leader", one));
    let again = soon("one's own term", store.campaign("leader", b"one".to_vec(), one)).await.unwrap();
    assert_eq!(again, first, "who asks again has it already");

    let second = store.campaign("leader", b"other".to_vec(), other);
    tokio::pin!(second);
    let write = async |term: &scheduler_store::Term, value: &str| {
        let txn = Txn { when: vec![term.guard()], then: vec![put("plan", value)] };
        store.txn(txn).await.unwrap().succeeded
    };
    tokio::select! {
        biased;
        term = &mut second => panic!("two lead: {term:?}"),
        written = write(&first, "first") => assert!(written),
    }
    store.lease_revoke(one).await.unwrap();
    let second = soon("the next term", second).await.unwrap();
    assert!(second.created > first.created);
    assert!(write(&second, "second").await);
    assert!(!write(&first, "from the grave").await, "the term is over");
    assert_eq!(&*store.get("plan").await.unwrap().unwrap().value, b"second");
    let lost = store.campaign("leader", b"one".to_vec(), one);
    tokio::select! {
        biased;
        lost = lost => assert_eq!(lost, Err(StoreError::NoSuchLease(one))),
        () = store_passes(store) => {}
    }
    store.lease_revoke(other).await.unwrap();
    let lost = soon("an answer", store.campaign("leader", b"one".to_vec(), one)).await;
    assert_eq!(lost, Err(StoreError::NoSuchLease(one)), "a candidate without a lease does not lead");
}

/// A while in which the store answers something.
async fn store_passes<S: Store>(store: &S) {
    for _ in 0..10 {
        store.get("plan").await.unwrap();
    }
}

async fn a_gap_is_told<S: Store>(store: &S, compact: impl AsyncFn(&S)) {
    let mut never = store.watch("", 0);
    assert_eq!(soon("an answer", never.next()).await, Err(WatchError::Compacted { oldest: 1 }));
    let here = store.put("c/a", vec![], None).await.unwrap();
    let mut early = store.watch("c/", here + 2);
    let told = soon("an answer", early.next()).await;
    assert_eq!(told, Err(WatchError::FromTheFuture { from: here + 2, revision: here }));
    assert_eq!(soon("the same", early.next()).await, told);

    let mut follows = store.watch("c/", here);
    assert_eq!(changed(&soon("what is there", follows.next()).await.unwrap()), [("c/a", here)]);
    store.put("c/a", vec![], None).await.unwrap();
    compact(store).await;
    let last = store.put("c/b", vec![], None).await.unwrap();
    let mut late = store.watch("c/", here);
    let told = soon("an answer", late.next()).await;
    assert!(matches!(told, Err(WatchError::Compacted { oldest }) if oldest > here), "{told:?}");
    // Who followed may have seen it all in time, or is told; what does not happen is that something is left out.
    let mut seen = Vec::new();
    let gap = loop {
        match soon("the changes, or a gap", follows.next()).await {
            Ok(events) => {
                seen.extend(changed(&events).iter().map(|(key, revision)| ((*key).to_owned(), *revision)))
            }
            Err(gap) => break Some(gap),
        }
        if seen.last().is_some_and(|(_, revision)| *revision == last) {
            break None;
        }
    };
    let whole = seen == [("c/a".to_owned(), here + 1), ("c/b".to_owned(), last)];
    assert!(whole || matches!(gap, Some(WatchError::Compacted { .. })), "{seen:?} {gap:?}");
}

fn changed(events: &[Event]) -> Vec<(&str, u64)> {
    events.iter().map(|event| (event.key(), event.revision())).collect()
}
