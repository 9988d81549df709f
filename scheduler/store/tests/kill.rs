//! Test that acknowledged writes survive kill -9.
//!
//! The test starts itself as another process, which writes from several tasks and prints each acknowledged write; after
//! a number of them it is killed, and the file is opened here.

#![expect(clippy::unwrap_used, reason = "a missing prerequisite fails the test")]

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use scheduler_store::{EmbeddedStore, Lease, Store};

const CHILD: &str = "SCHEDULER_STORE_CHILD";
const WRITERS: usize = 8;
const WRITES_MIN: usize = 200;

/// Writes until the process is killed.
async fn write(path: &Path) {
    let store = EmbeddedStore::open(path, Instant::now()).await.unwrap();
    let lease = store.lease_grant(Duration::from_secs(5), Instant::now()).await.unwrap();
    let writers = (0..WRITERS).map(|writer| {
        let store = store.clone();
        tokio::spawn(async move {
            for number in 0u64.. {
                let key = format!("{writer}/{}", number % 10);
                let value = number.to_string();
                let revision = store.put(&key, value.clone().into_bytes(), Some(lease)).await.unwrap();
                println!("acknowledged {key} {value} {revision} {}", lease.0);
            }
        })
    });
    for writer in writers.collect::<Vec<_>>() {
        writer.await.unwrap();
    }
}

#[tokio::test]
async fn acknowledged_writes_survive_kill_9() {
    if let Some(path) = std::env::var_os(CHILD) {
        return write(Path::new(&path)).await;
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("store");
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "acknowledged_writes_survive_kill_9", "--nocapture"])
        .env(CHILD, &path)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();

    let mut acknowledged = BTreeMap::new();
    let (mut highest, mut under, mut count) = (0, None, 0);
    for line in BufReader::new(child.stdout.take().unwrap()).lines() {
        let line = line.unwrap();
        let Some((_, record)) = line.split_once("acknowledged ") else { continue };
        // The last line may be incomplete.
        let [key, value, revision, lease] = record.split(' ').collect::<Vec<_>>()[..] else { continue };
        let Ok(number) = lease.parse() else { continue };
        let revision: u64 = revision.parse().unwrap();
        acknowledged.insert(key.to_owned(), (value.to_owned(), revision));
        highest = highest.max(revision);
        under = Some(Lease(number));
        count += 1;
        if count == WRITES_MIN {
            child.kill().unwrap();
        }
    }
    assert!(!child.wait().unwrap().success() && count >= WRITES_MIN, "{count} writes");

    let now = Instant::now();
    let store = EmbeddedStore::open(&path, now).await.unwrap();
    for (key, (value, revision)) in acknowledged {
        let entry = store.get(&key).await.unwrap().unwrap_or_else(|| panic!("{key} is lost"));
        // A later put may have been written and not acknowledged.
        assert!(entry.mod_revision >= revision, "{key} = {value} at {revision}, found {entry:?}");
        assert!(
            entry.mod_revision > revision || *entry.value == *value.as_bytes(),
            "{key} = {value}, found {entry:?}"
        );
        assert_eq!(entry.lease, under);
    }
    let kept = store.lease_keep_alive(under.unwrap(), now).await.unwrap();
    assert_eq!(kept.len(), store.range("").await.unwrap().entries.len());
    assert!(store.put("after", vec![], None).await.unwrap() > highest);
}
