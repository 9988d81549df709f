//! Tests of an etcd that is restored from an older backup while watches are open.

use rustix::process::Signal;
use scheduler_store::{Store, Watch, WatchError};

use super::cluster::{Cluster, store_at};
use super::soon;

#[tokio::test]
async fn a_watch_ahead_of_a_restored_store_gets_an_error() {
    let mut cluster = Cluster::start(3).await;
    let store = cluster.store("t/", 0);
    store.put("before", vec![], None).await.unwrap();
    cluster.kill_all();
    let copy = tempfile::tempdir().unwrap();
    cluster.back_up(copy.path());
    cluster.start_all();
    cluster.wait_until_writable().await;

    let mut last = 0;
    for _ in 0..20 {
        last = store.put("after", vec![], None).await.unwrap();
    }
    let mut watch = store.watch("", last);
    assert_eq!(soon("the last change", watch.next()).await.unwrap().len(), 1);
    cluster.kill_all();
    cluster.restore(copy.path());
    cluster.start_all();
    let received = soon("a response", watch.next()).await;
    let Err(WatchError::FutureRevision { from, revision }) = received else { panic!("{received:?}") };
    assert!(from == last + 1 && revision < last, "{received:?}");
    assert_eq!(store.get("after").await, Ok(None), "later writes are lost");
    assert!(store.range("").await.unwrap().revision < last);
}

/// The restored store overtakes the watch before the watch reconnects: no revision is missing there, but all are
/// different.
#[tokio::test]
async fn a_watch_overtaken_by_a_restored_store_gets_an_error_too() {
    let mut cluster = Cluster::start(3).await;
    let (reader, writer) = (store_at(vec![cluster.endpoint(0)], "t/"), cluster.store("t/", 1));
    writer.put("before", vec![], None).await.unwrap();
    cluster.kill_all();
    let copy = tempfile::tempdir().unwrap();
    cluster.back_up(copy.path());
    // Every start begins a raft term, and the backup has fewer.
    for _ in 0..3 {
        cluster.start_all();
        cluster.wait_until_writable().await;
        cluster.kill_all();
    }
    cluster.start_all();
    cluster.wait_until_writable().await;
    let last = writer.put("after", vec![], None).await.unwrap();
    let mut watch = reader.watch("", last);
    assert_eq!(soon("the last change", watch.next()).await.unwrap().len(), 1);

    cluster.kill_all();
    cluster.restore(copy.path());
    // The watch's only member is suspended while the others overtake: its first response has a higher revision.
    cluster.start_all();
    cluster.signal(0, Signal::STOP);
    cluster.wait_until_writable().await;
    let mut ahead = 0;
    while ahead < last + 50 {
        ahead = writer.put("other", vec![], None).await.unwrap();
    }
    cluster.signal(0, Signal::CONT);
    let received = soon("a response", watch.next()).await;
    assert!(matches!(received, Err(WatchError::FutureRevision { .. })), "{received:?} after {ahead}");
}
