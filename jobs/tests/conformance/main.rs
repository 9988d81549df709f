//! Rules of a job log, for each implementation.

#![expect(clippy::unwrap_used, reason = "a test fails by a panic")]

#[expect(dead_code, reason = "the tests of retention search its files")]
mod nats_server;

use jobs::cpu::CpuWork;
use jobs::log::{
    EmbeddedJobLog, EncodedEntry, JobLog, JobLogError, NatsJobLog, NatsLogConfig, QueueSnapshot,
};
use jobs_core::job::{DurableJob, DurableJobId, JobOperation, JobSpec, JobStatus, StoredRange, UnixMillis};
use jobs_core::record::JobRecord;
use nats_server::NatsServer;
use std::sync::Arc;
use std::time::Duration;

fn id(number: u64) -> DurableJobId {
    DurableJobId::new(UnixMillis(number), number.into())
}

fn job(number: u64) -> DurableJob {
    let spec = JobSpec {
        tenant: "a \"tenant\"\n".to_owned(),
        deployment: "minilm".to_owned(),
        operation: JobOperation::Rerank,
        priority: regions::Priority::Interactive,
        inputs: number,
        payload: StoredRange { object: u64::MAX, offset: 1, length: 2 },
        deadline: Some(UnixMillis::NEVER),
        start_by: None,
        idempotency: None,
        webhook: Some("https://example.com/ü".to_owned()),
        chunk: None,
        residency: None,
        trace: None,
    };
    let status = JobStatus::Queued { not_before: UnixMillis(0) };
    DurableJob { spec, sequence: number, attempts: 0, last_error: None, status }
}

fn record(number: u64) -> JobRecord {
    JobRecord::Submitted { id: id(number), spec: Box::new(job(number).spec) }
}

/// Returns the records with these numbers.
fn entry<const N: usize>(numbers: [u64; N]) -> Vec<JobRecord> {
    numbers.map(record).into()
}

/// Runs the rules. `open` opens the same log again, after the handles of the last one were dropped.
async fn conforms<L: JobLog>(open: impl AsyncFn() -> L) {
    // An empty log.
    let log = open().await;
    assert_eq!(*log.last().borrow(), 0);
    assert_eq!(log.read(0, 10).await.unwrap(), []);
    assert_eq!(log.saved().await.unwrap(), QueueSnapshot::default());

    // Sequence numbers begin at 1 and have no gaps; a reader is notified.
    let mut last = log.last();
    assert_eq!(log.append(EncodedEntry::of(&entry([1]))).await, Ok(1));
    assert_eq!(log.append(EncodedEntry::of(&entry([2, 3]))).await, Ok(2));
    assert_eq!(log.append(EncodedEntry::of(&entry([]))).await, Ok(3));
    assert_eq!(*last.wait_for(|last| *last == 3).await.unwrap(), 3);
    let all = [(1, entry([1])), (2, entry([2, 3])), (3, entry([]))];
    assert_eq!(log.read(0, 10).await.unwrap(), all);
    assert_eq!(log.read(1, 1).await.unwrap(), all[1..2]);
    assert_eq!(log.read(3, 10).await.unwrap(), []);
    assert_eq!(log.read(u64::MAX, 10).await.unwrap(), []);
    drop(log);

    // Entries of many callers are in the log once each.
    let log = Arc::new(open().await);
    assert_eq!(*log.last().borrow(), 3);
    let callers = (0..100).map(|caller| {
        let log = log.clone();
        tokio::spawn(
            async move { (caller, log.append(EncodedEntry::of(&entry([caller, 1000]))).await.unwrap()) },
        )
    });
    for caller in callers.collect::<Vec<_>>() {
        let (caller, sequence) = caller.await.unwrap();
        assert_eq!(log.read(sequence - 1, 1).await.unwrap(), [(sequence, entry([caller, 1000]))]);
    }
    assert_eq!(log.read(0, 1000).await.unwrap().len(), 103);

    // A snapshot replaces the entries that it contains. An older one, and one of the future, are ignored.
    let snapshot = QueueSnapshot {
        applied: 100,
        jobs: vec![(id(7), Arc::new(job(7))), (id(8), Arc::new(job(8)))],
        batches: Vec::new(),
    };
    log.save(snapshot.clone()).await.unwrap();
    log.save(QueueSnapshot { applied: 99, jobs: Vec::new(), batches: Vec::new() }).await.unwrap();
    log.save(QueueSnapshot { applied: 104, jobs: Vec::new(), batches: Vec::new() }).await.unwrap();
    let left = log.read(0, 1000).await.unwrap().into_iter().map(|(sequence, _)| sequence);
    assert_eq!(left.collect::<Vec<_>>(), [101, 102, 103]);
    drop(log);
    let log = open().await;
    assert_eq!(log.saved().await.unwrap(), snapshot);
    assert_eq!(log.append(EncodedEntry::of(&entry([104]))).await, Ok(104));
    let next = QueueSnapshot { applied: 104, jobs: vec![(id(9), Arc::new(job(9)))], batches: Vec::new() };
    log.save(next.clone()).await.unwrap();
    drop(log);
    let log = open().await;
    assert_eq!(log.saved().await.unwrap(), next);
    assert_eq!(*log.last().borrow(), 104, "also without entries");
    assert_eq!(log.append(EncodedEntry::of(&entry([105]))).await, Ok(105));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_embedded_log_conforms() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("log");
    conforms(async || {
        // The file is free soon after the last handle was dropped.
        loop {
            match EmbeddedJobLog::open(&path).await {
                Ok(log) => return log,
                Err(error) => assert!(error.to_string().contains("already open"), "{error}"),
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
}

#[tokio::test]
async fn two_processes_cannot_open_the_same_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("log");
    let _log = EmbeddedJobLog::open(&path).await.unwrap();
    let error = EmbeddedJobLog::open(&path).await.unwrap_err().to_string();
    assert!(error.contains("already open"), "{error}");
}

fn nats_config(server: &NatsServer, queue: &str) -> NatsLogConfig {
    NatsLogConfig { servers: vec![server.url()], queue: queue.to_owned(), replicas: 1 }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_log_in_nats_conforms() {
    let server = NatsServer::start();
    let config = nats_config(&server, "eu");
    conforms(async || NatsJobLog::connect(&config, &CpuWork::new()).await.unwrap()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn processes_share_a_log_in_nats_and_queues_are_separate() {
    let server = NatsServer::start();
    let (eu, us) = (nats_config(&server, "eu"), nats_config(&server, "us"));
    let one = NatsJobLog::connect(&eu, &CpuWork::new()).await.unwrap();
    let two = NatsJobLog::connect(&eu, &CpuWork::new()).await.unwrap();
    let other = NatsJobLog::connect(&us, &CpuWork::new()).await.unwrap();
    let mut last = two.last();
    assert_eq!(one.append(EncodedEntry::of(&entry([1]))).await, Ok(1));
    tokio::time::timeout(Duration::from_secs(10), last.wait_for(|last| *last == 1)).await.unwrap().unwrap();
    assert_eq!(two.append(EncodedEntry::of(&entry([2]))).await, Ok(2));
    assert_eq!(one.read(0, 10).await.unwrap(), [(1, entry([1])), (2, entry([2]))]);
    assert_eq!(other.read(0, 10).await.unwrap(), []);

    // A process whose queue is older than the stored snapshot does not replace it.
    one.save(QueueSnapshot { applied: 2, jobs: vec![(id(1), Arc::new(job(1)))], batches: Vec::new() })
        .await
        .unwrap();
    two.save(QueueSnapshot { applied: 1, jobs: Vec::new(), batches: Vec::new() }).await.unwrap();
    assert_eq!(two.saved().await.unwrap().applied, 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn entries_survive_a_killed_nats_server_and_appends_fail_until_it_is_back() {
    let mut server = NatsServer::start();
    let log = NatsJobLog::connect(&nats_config(&server, "eu"), &CpuWork::new()).await.unwrap();
    for number in 1..=20 {
        assert_eq!(log.append(EncodedEntry::of(&entry([number]))).await, Ok(number));
    }
    server.kill();
    let failed = log.append(EncodedEntry::of(&entry([21]))).await;
    assert!(matches!(failed, Err(JobLogError::Unavailable(_))), "{failed:?}");
    server.start_again();
    let mut last = log.last();
    let appended = loop {
        match log.append(EncodedEntry::of(&entry([22]))).await {
            Ok(sequence) => break sequence,
            Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
        }
    };
    last.wait_for(|last| *last >= appended).await.unwrap();
    let entries = log.read(0, 100).await.unwrap();
    assert!((1..=20).all(|number| entries[number as usize - 1] == (number, entry([number]))));
    assert_eq!(entries.last(), Some(&(appended, entry([22]))));
    // The append that failed may have been stored; nothing is stored twice.
    assert!((21..=22).contains(&appended), "{appended}");
}
