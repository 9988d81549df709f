//! What the store has answered survives kill -9.
//!
//! The test starts itself as another process, which writes from several sides at once and says on stdout what was
//! answered; when it has said enough it is killed in the middle of its work, and the file is opened here.

#![expect(clippy::unwrap_used, reason = "a test that cannot get what it needs has failed")]

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use scheduler_store::{Embedded, Lease, Store};

const CHILD: &str = "SCHEDULER_STORE_CHILD";
const WRITERS: usize = 8;
const ANSWERS: usize = 200;

/// Writes for ever.
async fn write(path: &Path) {
    let store = Embedded::open(path, Instant::now()).await.unwrap();
    let lease = store.lease_grant(Duration::from_secs(5), Instant::now()).await.unwrap();
    let writers = (0..WRITERS).map(|writer| {
        let store = store.clone();
        tokio::spawn(async move {
            for number in 0u64.. {
                let key = format!("{writer}/{}", number % 10);
                let value = number.to_string();
                let revision = store.put(&key, value.clone().into_bytes(), Some(lease)).await.unwrap();
                println!("answered {key} {value} {revision} {}", lease.0);
            }
        })
    });
    for writer in writers.collect::<Vec<_>>() {
        writer.await.unwrap();
    }
}

#[tokio::test]
async fn what_was_answered_survives_kill_9() {
    if let Some(path) = std::env::var_os(CHILD) {
        return write(Path::new(&path)).await;
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("store");
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "what_was_answered_survives_kill_9", "--nocapture"])
        .env(CHILD, &path)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();

    let mut answered = BTreeMap::new();
    let (mut highest, mut under, mut count) = (0, None, 0);
    for line in BufReader::new(child.stdout.take().unwrap()).lines() {
        let line = line.unwrap();
        let Some((_, answer)) = line.split_once("answered ") else { continue };
        // The last line may have been cut off by the kill.
        let [key, value, revision, lease] = answer.split(' ').collect::<Vec<_>>()[..] else { continue };
        let Ok(number) = lease.parse() else { continue };
        let revision: u64 = revision.parse().unwrap();
        answered.insert(key.to_owned(), (value.to_owned(), revision));
        highest = highest.max(revision);
        under = Some(Lease(number));
        count += 1;
        if count == ANSWERS {
            child.kill().unwrap();
        }
    }
    assert!(!child.wait().unwrap().success() && count >= ANSWERS, "{count} answers");

    let now = Instant::now();
    let store = Embedded::open(&path, now).await.unwrap();
    for (key, (value, revision)) in answered {
        let entry = store.get(&key).await.unwrap().unwrap_or_else(|| panic!("{key} is lost"));
        // A later put may have been written and not answered.
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
