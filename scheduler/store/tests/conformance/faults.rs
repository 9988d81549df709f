//! What a real etcd does to its callers, and that they are none the worse for it.

use std::time::{Duration, Instant};

use rustix::process::Signal;
use scheduler_store::{CALL_BUDGET, Compare, Etcd, Op, Store, StoreError, Txn, Watch, WatchError};

use super::cluster::Cluster;
use super::{soon, until};

/// Counts up one key, each time on top of the last, as the hub writes its table; and says how far it came. A guard that
/// fails is looked into: of two tries the first may have succeeded.
async fn count(store: &Etcd, to: u64) {
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

/// Follows the same key from its first number to its last: each once, in order, whatever happens to the stream.
async fn follow(store: &Etcd, from: u64, to: u64) {
    let mut watch = store.watch("count", from);
    let mut next = 1;
    while next <= to {
        for event in soon("the next number", watch.next()).await.unwrap() {
            let scheduler_store::Event::Put(entry) = event else { panic!("nobody deletes it") };
            assert_eq!(*entry.value, *next.to_string().as_bytes());
            next += 1;
        }
    }
}

#[tokio::test]
async fn a_leader_that_is_killed_costs_no_call_and_no_change() {
    const NUMBERS: u64 = 300;
    let mut cluster = Cluster::start(3).await;
    let leader = cluster.leader().await;
    // Both ask the leader first, so both lose whom they ask.
    let (writer, reader) = (cluster.store("t/", leader), cluster.store("t/", leader));
    let from = writer.range("").await.unwrap().revision + 1;
    let slow = cluster.store("t/", leader);
    let fault = async {
        until("some numbers are written", async || slow.range("").await.unwrap().revision > from + 50).await;
        cluster.kill(leader);
    };
    tokio::join!(count(&writer, NUMBERS), follow(&reader, from, NUMBERS), fault);
    cluster.start_member(leader);
    cluster.until_writable().await;
}

#[tokio::test]
async fn a_member_that_hangs_is_left_for_another_with_the_calls_and_the_watch_that_were_on_it() {
    const NUMBERS: u64 = 300;
    let cluster = Cluster::start(3).await;
    let hangs = (cluster.leader().await + 1) % 3;
    let (writer, reader) = (cluster.store("t/", hangs), cluster.store("t/", hangs));
    let other = cluster.store("t/", (hangs + 1) % 3);
    let from = writer.range("").await.unwrap().revision + 1;
    let fault = async {
        until("some numbers are written", async || other.range("").await.unwrap().revision > from + 50).await;
        cluster.signal(hangs, Signal::STOP);
    };
    tokio::join!(count(&writer, NUMBERS), follow(&reader, from, NUMBERS), fault);
    cluster.signal(hangs, Signal::CONT);
}

#[tokio::test]
async fn a_watch_that_lies_still_while_history_is_compacted_is_told_of_the_gap() {
    let cluster = Cluster::start(3).await;
    let hangs = (cluster.leader().await + 1) % 3;
    let (reader, writer) = (cluster.store("t/", hangs), cluster.store("t/", (hangs + 1) % 3));
    let from = writer.put("a", vec![], None).await.unwrap();
    let mut watch = reader.watch("", from);
    assert_eq!(soon("what is there", watch.next()).await.unwrap().len(), 1);
    cluster.signal(hangs, Signal::STOP);
    writer.put("a", vec![], None).await.unwrap();
    writer.delete("a").await.unwrap();
    writer.compact().await.unwrap();
    let told = soon("the gap", watch.next()).await;
    assert!(matches!(told, Err(WatchError::Compacted { oldest }) if oldest > from), "{told:?}");
    // What there is now is read anew, and followed from there without a gap.
    let listed = reader.range("").await.unwrap();
    let mut watch = reader.watch("", listed.revision + 1);
    let next = writer.put("b", vec![], None).await.unwrap();
    let told = soon("what is new", watch.next()).await.unwrap();
    assert_eq!((listed.entries.len(), told.len(), told[0].revision()), (0, 1, next));
    cluster.signal(hangs, Signal::CONT);
}

/// The revision of the compaction is that of a deletion, of which etcd before 3.4.33 and 3.5.15 tells nothing any more.
#[tokio::test]
async fn a_deletion_at_the_very_revision_of_a_compaction_is_not_lost_in_silence() {
    let cluster = Cluster::start(1).await;
    let store = cluster.store("t/", 0);
    store.put("a", vec![], None).await.unwrap();
    let deleted = store.delete("a").await.unwrap();
    store.compact().await.unwrap();
    let told = soon("an answer", store.watch("", deleted).next()).await;
    assert_eq!(told, Err(WatchError::Compacted { oldest: deleted + 1 }));
}

#[tokio::test]
async fn without_a_quorum_calls_fail_in_time_and_everything_goes_on_when_it_is_back() {
    let mut cluster = Cluster::start(3).await;
    let store = cluster.store("t/", 0);
    let lease = store.lease_grant(Duration::from_secs(60), Instant::now()).await.unwrap();
    let from = store.put("a", vec![], Some(lease)).await.unwrap() + 1;
    let mut watch = store.watch("", from);
    for dead in [&[1, 2][..], &[0]] {
        dead.iter().for_each(|member| cluster.kill(*member));
        let asked = Instant::now();
        let refused = store.put("b", vec![], None).await;
        assert!(matches!(refused, Err(StoreError::Unavailable(_))), "{refused:?}");
        assert!(asked.elapsed() < 2 * CALL_BUDGET, "{:?}", asked.elapsed());
    }
    tokio::select! {
        told = watch.next() => panic!("nobody could say anything: {told:?}"),
        () = tokio::time::sleep(Duration::from_millis(100)) => {}
    }
    cluster.start_all();
    cluster.until_writable().await;
    let revision = store.put("c", vec![], None).await.unwrap();
    let mut seen = Vec::new();
    while seen.last() != Some(&("c".to_owned(), revision)) {
        let told = soon("what was written", watch.next()).await.unwrap();
        seen.extend(told.iter().map(|event| (event.key().to_owned(), event.revision())));
    }
    // A put that failed may have been written all the same, and then it is told as well.
    assert!(seen.iter().all(|(key, _)| key == "b" || key == "c"), "{seen:?}");
    assert_eq!(store.lease_keep_alive(lease, Instant::now()).await, Ok(vec!["a".to_owned()]));
}

#[tokio::test]
async fn of_three_members_a_dead_one_fails_no_call() {
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
