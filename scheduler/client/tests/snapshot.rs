//! Tests of snapshots on disk.

#![expect(clippy::unwrap_used, reason = "a missing prerequisite fails the test")]

use regions::RouteTable;
use scheduler_api::route::RouteTableV1;
use scheduler_client::snapshot::{Snapshot, lock_directory, restore};
use sha2::{Digest, Sha256};
use std::path::Path;

fn table(number: u64) -> RouteTableV1 {
    let table = serde_json::json!({
        "version": 1, "epoch": 1, "generation": number, "deployments": [],
        // Long enough for a torn write to be visible.
        "regions": (0..200).map(|at| serde_json::json!({
            "id": format!("aws/region-{at}"), "instances": [{"name": "a", "endpoint": "127.0.0.1:1"}], "deployments": [],
        })).collect::<Vec<_>>(),
    });
    serde_json::from_value(table).unwrap()
}

/// Writes a table like a process without a current one, for which every table is new.
async fn write(path: &Path, number: u64) {
    let mut snapshot = Snapshot::new(Some(path.to_owned()), None);
    snapshot.accept(table(number), |_: &mut RouteTable| Ok(())).await.unwrap();
}

/// Returns the number of the table on disk, or that it was rejected.
fn stored(path: &Path) -> (Option<u64>, bool) {
    let mut is_rejected = false;
    let table = restore::<RouteTableV1>(path, || is_rejected = true);
    (table.map(|table| table.generation.number), is_rejected)
}

/// Invariant 5, Monotonic plans.
#[tokio::test]
async fn the_generation_on_disk_never_decreases() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("routes");
    assert_eq!(stored(&path), (None, false), "no file is no error");
    for (written, expected) in [(3, 3), (2, 3), (3, 3), (4, 4), (1, 4)] {
        write(&path, written).await;
        assert_eq!(stored(&path), (Some(expected), false), "after {written}");
    }
    // An invalid file is replaced, also one with a valid checksum that no hub can have published.
    let body = serde_json::to_string(&table(u64::MAX)).unwrap();
    let sum: String = Sha256::digest(&body).iter().map(|byte| format!("{byte:02x}")).collect();
    for (number, invalid) in
        [(1, "torn".to_owned()), (2, format!("{sum}\n{body}")), (3, format!("{sum}\n{body} "))]
    {
        std::fs::write(&path, invalid).unwrap();
        assert_eq!(stored(&path), (None, true));
        write(&path, number).await;
        assert_eq!(stored(&path), (Some(number), false));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn concurrent_writers_leave_the_newest_table_intact() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("routes");
    write(&path, 1).await;
    let mut writers = tokio::task::JoinSet::new();
    for writer in 0..4 {
        let path = path.clone();
        writers.spawn(async move {
            let mut previous = 1;
            for round in 0..25 {
                write(&path, 2 + 4 * round + writer).await;
                let now = stored(&path).0.unwrap();
                assert!(now >= previous && now >= 2 + 4 * round + writer, "{previous} {now}");
                previous = now;
            }
        });
    }
    writers.join_all().await;
    assert_eq!(stored(&path).0, Some(2 + 4 * 24 + 3));
}

#[test]
fn a_directory_has_one_user_at_a_time() {
    let dir = tempfile::tempdir().unwrap();
    let first = lock_directory(dir.path()).unwrap();
    let problem = lock_directory(dir.path()).unwrap_err().to_string();
    assert!(problem.contains("another process uses this directory"), "{problem}");
    drop(first);
    lock_directory(dir.path()).unwrap();
}
