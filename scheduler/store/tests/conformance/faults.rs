//! Tests of the store against failures of a real etcd.

use std::time::{Duration, Instant};

use rustix::process::Signal;
use scheduler_store::{CALL_BUDGET, Compare, EtcdStore, Op, Store, StoreError, Txn, Watch, WatchError};

use super::cluster::Cluster;
use super::{soon, wait_until};

/// Counts up one key, each time guarded by the last revision, as the hub writes its table. If a guard fails, the key is
/// read: of two attempts the first may have succeeded.
async fn count(store: &EtcdStore, to: u64) {
    let mut at = store.get("count").await.unwrap().map_or(0, |entry| entry.mod_revision);
    for number in 1..=to {
        let value = number.to_string().into_bytes();
        let txn = Txn {
            when: vec![Compare::ModRevision("count".to_owned(), at)],
            then: vec![Op::Put { key: "count".to_owned(), value: value.clone(), lease: None }],
        };
        let outcome = store.txn(txn).await.unwrap_or_else(|error| panic!("{number}: {error}"));
        let entry = store.get("count").await.unwrap().unwrap();
        assert_eq!(*entry.value, *value, "{number}: {outcome:?}");
        assert!(entry.mod_revision > at, "a revision fell");
        at = entry.mod_revision;
    }
}

/// Watches the same key from its first number to its last: each once, in order, despite broken streams.
async fn follow(store: &EtcdStore, from: u64, to: u64) {
    let mut watch = store.watch("count", from);
    let mut next = 1;
    while next <= to {
        for event in soon("the next number", watch.next()).await.unwrap() {
            let scheduler_store::Event::Put(entry) = event else { panic!("the key is never deleted") };
            assert_eq!(*entry.value, *next.to_string().as_bytes());
            next += 1;
        }
    }
}

#[tokio::test]
async fn a_killed_leader_fails_no_call_and_loses_no_change() {
    const NUMBERS: u64 = 300;
    let mut cluster = Cluster::start(3).await;
    let leader = cluster.leader().await;
    // Both use the leader first, so both lose their member.
    let (writer, reader) = (cluster.store("t/", leader), cluster.store("t/", leader));
    let from = writer.range("").await.unwrap().revision + 1;
    let slow = cluster.store("t/", leader);
    let fault = async {
        wait_until("some numbers are written", async || slow.range("").await.unwrap().revision > from + 50)
            .await;
        cluster.kill(leader);
    };
    tokio::join!(count(&writer, NUMBERS), follow(&reader, from, NUMBERS), fault);
    cluster.start_member(leader);
    cluster.wait_until_writable().await;
}

#[tokio::test]
async fn calls_and_watches_move_from_a_hanging_member_to_another() {
    const NUMBERS: u64 = 300;
    let cluster = Cluster::start(3).await;
    let hangs = (cluster.leader().await + 1) % 3;
    let (writer, reader) = (cluster.store("t/", hangs), cluster.store("t/", hangs));
    let other = cluster.store("t/", (hangs + 1) % 3);
    let from = writer.range("").await.unwrap().revision + 1;
    let fault = async {
        wait_until("some numbers are written", async || other.range("").await.unwrap().revision > from + 50)
            .await;
        cluster.signal(hangs, Signal::STOP);
    };
    tokio::join!(count(&writer, NUMBERS), follow(&reader, from, NUMBERS), fault);
    cluster.signal(hangs, Signal::CONT);
}

#[tokio::test]
async fn a_suspended_watch_gets_an_error_after_a_compaction() {
    let cluster = Cluster::start(3).await;
    let hangs = (cluster.leader().await + 1) % 3;
    let (reader, writer) = (cluster.store("t/", hangs), cluster.store("t/", (hangs + 1) % 3));
    let from = writer.put("a", vec![], None).await.unwrap();
    let mut watch = reader.watch("", from);
    assert_eq!(soon("present keys", watch.next()).await.unwrap().len(), 1);
    cluster.signal(hangs, Signal::STOP);
    writer.put("a", vec![], None).await.unwrap();
    writer.delete("a").await.unwrap();
    writer.compact().await.unwrap();
    let received = soon("the gap", watch.next()).await;
    assert!(matches!(received, Err(WatchError::Compacted { oldest }) if oldest > from), "{received:?}");
    // The keys are listed again, and watched from there without a gap.
    let listed = reader.range("").await.unwrap();
    let mut watch = reader.watch("", listed.revision + 1);
    let next = writer.put("b", vec![], None).await.unwrap();
    let received = soon("the new key", watch.next()).await.unwrap();
    assert_eq!((listed.entries.len(), received.len(), received[0].revision()), (0, 1, next));
    cluster.signal(hangs, Signal::CONT);
}

/// The compaction is at the revision of a deletion, whose event etcd before 3.4.33 and 3.5.15 does not send any more.
#[tokio::test]
async fn a_deletion_at_the_revision_of_a_compaction_is_not_lost_silently() {
    let cluster = Cluster::start(1).await;
    let store = cluster.store("t/", 0);
    store.put("a", vec![], None).await.unwrap();
    let deleted = store.delete("a").await.unwrap();
    store.compact().await.unwrap();
    let received = soon("a response", store.watch("", deleted).next()).await;
    assert_eq!(received, Err(WatchError::Compacted { oldest: deleted + 1 }));
}

#[tokio::test]
async fn without_a_quorum_calls_time_out_and_succeed_again_with_it() {
    let mut cluster = Cluster::start(3).await;
    let store = cluster.store("t/", 0);
    let lease = store.lease_grant(Duration::from_secs(60), Instant::now()).await.unwrap();
    let from = store.put("a", vec![], Some(lease)).await.unwrap() + 1;
    let mut watch = store.watch("", from);
    for dead in [&[1, 2][..], &[0]] {
        dead.iter().for_each(|member| cluster.kill(*member));
        let started = Instant::now();
        let rejected = store.put("b", vec![], None).await;
        assert!(matches!(rejected, Err(StoreError::Unavailable(_))), "{rejected:?}");
        assert!(started.elapsed() < 2 * CALL_BUDGET, "{:?}", started.elapsed());
    }
    tokio::select! {
        received = watch.next() => panic!("there is no quorum: {received:?}"),
        () = tokio::time::sleep(Duration::from_millis(100)) => {}
    }
    cluster.start_all();
    cluster.wait_until_writable().await;
    let revision = store.put("c", vec![], None).await.unwrap();
    let mut changes = Vec::new();
    while changes.last() != Some(&("c".to_owned(), revision)) {
        let received = soon("the written keys", watch.next()).await.unwrap();
        changes.extend(received.iter().map(|event| (event.key().to_owned(), event.revision())));
    }
    // A failed put may have been written all the same, and then its event is received as well.
    assert!(changes.iter().all(|(key, _)| key == "b" || key == "c"), "{changes:?}");
    assert_eq!(store.lease_keep_alive(lease, Instant::now()).await, Ok(vec!["a".to_owned()]));
}

#[tokio::test]
async fn a_dead_member_of_three_fails_no_call() {
    let mut cluster = Cluster::start(3).await;
    let dead = (cluster.leader().await + 1) % 3;
    cluster.kill(dead);
    let store = cluster.store("t/", dead);
    let begun = Instant::now();
    count(&store, 100).await;
    let lease = store.lease_grant(Duration::from_secs(60), Instant::now()).await.unwrap();
    for _ in 0..50 {
        store.lease_keep_alive(lease, Instant::now()).await.unwrap();
    }
    println!("350 calls with one of three members dead: {:?}, 0 failed", begun.elapsed());
}
