//! An etcd that is set back to an older copy of itself, with the store's callers in the middle of their work.

use rustix::process::Signal;
use scheduler_store::{Store, Watch, WatchError};

use super::cluster::{Cluster, store_at};
use super::soon;

#[tokio::test]
async fn a_watch_that_is_ahead_of_a_restored_store_is_told() {
    let mut cluster = Cluster::start(3).await;
    let store = cluster.store("t/", 0);
    store.put("before", vec![], None).await.unwrap();
    cluster.kill_all();
    let copy = tempfile::tempdir().unwrap();
    cluster.back_up(copy.path());
    cluster.start_all();
    cluster.until_writable().await;

    let mut last = 0;
    for _ in 0..20 {
        last = store.put("after", vec![], None).await.unwrap();
    }
    let mut watch = store.watch("", last);
    assert_eq!(soon("the last change", watch.next()).await.unwrap().len(), 1);
    cluster.kill_all();
    cluster.restore(copy.path());
    cluster.start_all();
    let told = soon("an answer", watch.next()).await;
    let Err(WatchError::FromTheFuture { from, revision }) = told else { panic!("{told:?}") };
    assert!(from == last + 1 && revision < last, "{told:?}");
    assert_eq!(store.get("after").await, Ok(None), "what was written since is gone");
    assert!(store.range("").await.unwrap().revision < last);
}

/// The restored store has overtaken the watch before the watch could look: no revision is missing there, and nothing is
/// as it was.
#[tokio::test]
async fn a_watch_that_a_restored_store_has_overtaken_is_told_too() {
    let mut cluster = Cluster::start(3).await;
    let (reader, writer) = (store_at(vec![cluster.endpoint(0)], "t/"), cluster.store("t/", 1));
    writer.put("before", vec![], None).await.unwrap();
    cluster.kill_all();
    let copy = tempfile::tempdir().unwrap();
    cluster.back_up(copy.path());
    // Every start is a term of etcd's own, and the copy has seen fewer.
    for _ in 0..3 {
        cluster.start_all();
        cluster.until_writable().await;
        cluster.kill_all();
    }
    cluster.start_all();
    cluster.until_writable().await;
    let last = writer.put("after", vec![], None).await.unwrap();
    let mut watch = reader.watch("", last);
    assert_eq!(soon("the last change", watch.next()).await.unwrap().len(), 1);

    cluster.kill_all();
    cluster.restore(copy.path());
    // The only member that the watch knows sleeps while the others overtake: the first thing that it is told is of a
    // higher revision.
    cluster.start_all();
    cluster.signal(0, Signal::STOP);
    cluster.until_writable().await;
    let mut ahead = 0;
    while ahead < last + 50 {
        ahead = writer.put("other", vec![], None).await.unwrap();
    }
    cluster.signal(0, Signal::CONT);
    let told = soon("an answer", watch.next()).await;
    assert!(matches!(told, Err(WatchError::FromTheFuture { .. })), "{told:?} after {ahead}");
}
