//! A queue that several processes share, with its log in NATS.

#![expect(clippy::unwrap_used, reason = "a test fails by a panic")]

#[expect(dead_code, reason = "other tests have the log in a file")]
mod fixture;
#[path = "conformance/nats_server.rs"]
#[expect(dead_code, reason = "the server is not killed here")]
mod nats_server;

use async_nats::jetstream::{self, stream};
use bytes::Bytes;
use fixture::spec;
use jobs::cpu::CpuWork;
use jobs::log::{EncodedEntry, JobLog, NatsJobLog, NatsLogConfig, QueueSnapshot};
use jobs::objects::JobObjects;
use jobs::queue_host::QueueHost;
use nats_server::NatsServer;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

async fn log(server: &NatsServer) -> NatsJobLog {
    let config = NatsLogConfig { servers: vec![server.url()], queue: "eu".to_owned(), replicas: 1 };
    NatsJobLog::connect(&config, &CpuWork::new()).await.unwrap()
}

/// Opens the queue as a process of its own would.
async fn open(server: &NatsServer, folder: &Path) -> QueueHost {
    let objects = JobObjects::in_folder(folder, &CpuWork::new()).unwrap();
    let config = fixture::config(3, Duration::from_millis(10));
    let (host, tasks) = QueueHost::open(Arc::new(log(server).await), objects, config).await.unwrap();
    tokio::spawn(tasks.run());
    host
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_job_that_one_process_has_confirmed_is_known_to_the_others() {
    let (server, dir) = (NatsServer::start(), tempfile::tempdir().unwrap());
    let (one, two) = (open(&server, dir.path()).await, open(&server, dir.path()).await);
    for number in 0..50 {
        let id = one.submit(spec("a"), Bytes::from(format!("text {number}"))).await.unwrap();
        assert!(two.latest_job("a", id).await.is_ok(), "job {number}");
        let list = two.latest_list(&Default::default(), 1).await.unwrap();
        assert_eq!(list[0].0, id, "job {number}");
        assert!(two.cancel("a", id).await.is_ok(), "job {number}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_process_continues_from_a_snapshot_that_has_replaced_entries_it_had_not_read() {
    let (server, dir) = (NatsServer::start(), tempfile::tempdir().unwrap());
    let one = open(&server, dir.path()).await;
    let id = one.submit(spec("a"), Bytes::from("first")).await.unwrap();
    // The other process has opened its queue, but none of its tasks runs yet.
    let objects = JobObjects::in_folder(dir.path(), &CpuWork::new()).unwrap();
    let config = fixture::config(3, Duration::from_millis(10));
    let (two, tasks) = QueueHost::open(Arc::new(log(&server).await), objects, config).await.unwrap();
    let second = one.submit(spec("a"), Bytes::from("second")).await.unwrap();
    let applied = *one.changes().borrow();
    let jobs = [id, second].map(|id| (id, one.job("a", id).unwrap().job));
    let store = log(&server).await;
    store.save(QueueSnapshot { applied, jobs: jobs.to_vec(), batches: Vec::new() }).await.unwrap();
    assert_eq!(store.read(0, 10).await.unwrap(), [], "no entry is left");
    tokio::spawn(tasks.run());
    let view = tokio::time::timeout(Duration::from_secs(10), two.latest_job("a", second)).await;
    assert!(view.expect("it does not wait for ever").is_ok());
    let third = two.submit(spec("a"), Bytes::from("third")).await.unwrap();
    assert!(one.latest_job("a", third).await.is_ok());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_of_a_later_version_is_rejected_with_both_versions_and_is_not_changed() {
    let server = NatsServer::start();
    let context = jetstream::new(async_nats::connect(server.url()).await.unwrap());
    let config = stream::Config {
        name: "meridian-jobs-eu".to_owned(),
        subjects: vec!["meridian.jobs.eu".to_owned()],
        description: Some(r#"{"format":2,"written_by":"0.9.0"}"#.to_owned()),
        ..stream::Config::default()
    };
    let stream = context.create_stream(config).await.unwrap();
    let log = log(&server).await;
    let (entry, none) = (EncodedEntry::of(&[]), QueueSnapshot::default());
    let problems = [log.append(entry).await.unwrap_err(), log.save(none).await.unwrap_err()];
    for problem in problems.map(|problem| problem.to_string()) {
        for part in ["format 2", "version 0.9.0", "format 1", env!("CARGO_PKG_VERSION")] {
            assert!(problem.contains(part), "{part} in {problem}");
        }
    }
    assert_eq!(stream.get_info().await.unwrap().state.messages, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_stream_has_its_format_and_the_version_that_created_it() {
    let server = NatsServer::start();
    log(&server).await.append(EncodedEntry::of(&[])).await.unwrap();
    let context = jetstream::new(async_nats::connect(server.url()).await.unwrap());
    let stream = context.get_stream("meridian-jobs-eu").await.unwrap();
    let expected = format!("{{\"format\":1,\"written_by\":\"{}\"}}", env!("CARGO_PKG_VERSION"));
    assert_eq!(stream.cached_info().config.description, Some(expected));
}
