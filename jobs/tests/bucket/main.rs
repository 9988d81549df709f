//! Objects in a bucket: the rules of an object store, a queue on it, and what happens when it fails.

#![expect(clippy::unwrap_used, reason = "a test fails by a panic")]

#[path = "../fixture/mod.rs"]
#[expect(dead_code, reason = "other tests open a queue in a folder")]
mod fixture;
mod s3_server;

use bytes::Bytes;
use fixture::spec;
use jobs::cpu::CpuWork;
use jobs::log::EmbeddedJobLog;
use jobs::objects::{JobObjects, ObjectError};
use jobs::queue_host::{ComputationEnd, QueueConfig, QueueError, QueueHost, now};
use jobs_core::decide::JobWorker;
use jobs_core::job::JobSpec;
use s3_server::{S3Server, config};
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

const WORKER: JobWorker = JobWorker { number: 1, lease: Duration::from_secs(30) };
const KEY: [u8; 32] = [7; 32];

fn parts(number: usize) -> Vec<Bytes> {
    vec![Bytes::from(format!("first of {number}")), Bytes::new(), Bytes::from(vec![number as u8; 10_000])]
}

/// Runs the rules of an object store. `open` opens the same one again.
async fn conforms(open: impl Fn() -> JobObjects) {
    let at = Duration::from_secs(1000);
    let ranges = open().put(&parts(1), at).await.unwrap();
    for (part, range) in parts(1).iter().zip(&ranges) {
        assert_eq!(open().get(*range).await.unwrap(), *part);
    }
    let object = ranges[0].object;
    assert_eq!(JobObjects::written(object), at);
    assert_eq!(open().list().await.unwrap(), [object]);

    // Two processes that write at the same time do not overwrite each other.
    let writes = (0..40).map(|number| {
        let objects = open();
        tokio::spawn(async move { (number, objects.put(&parts(number), at).await.unwrap()) })
    });
    let mut numbers = BTreeSet::from([object]);
    for write in writes.collect::<Vec<_>>() {
        let (number, ranges) = write.await.unwrap();
        assert!(numbers.insert(ranges[0].object), "an object of its own");
        assert_eq!(open().get(ranges[2]).await.unwrap(), parts(number)[2]);
    }
    assert_eq!(open().list().await.unwrap().into_iter().collect::<BTreeSet<_>>(), numbers);

    open().erase(object, &ranges[2..]).await.unwrap();
    assert_eq!(open().get(ranges[0]).await.unwrap(), parts(1)[0], "the others are kept");
    let erased = open().get(ranges[2]).await;
    assert!(erased.is_err() || erased == Ok(Bytes::from(vec![0; 10_000])), "{erased:?}");

    for number in numbers {
        open().delete(number).await.unwrap();
        open().delete(number).await.unwrap();
    }
    assert_eq!(open().get(ranges[0]).await, Err(ObjectError::Missing(object)));
    open().erase(object, &ranges).await.unwrap();
    assert!(open().list().await.unwrap().is_empty());
}

#[tokio::test]
async fn a_folder_and_a_bucket_conform() {
    let dir = tempfile::tempdir().unwrap();
    let server = S3Server::start(&dir.path().join("s3"), 0).await;
    for keys in [&[][..], &[KEY]] {
        conforms(|| {
            JobObjects::in_folder(&dir.path().join("folder"), &CpuWork::new()).unwrap().encrypted(keys)
        })
        .await;
        for prefix in ["", "meridian/eu"] {
            conforms(|| {
                JobObjects::in_bucket(&server.config(prefix), &CpuWork::new()).unwrap().encrypted(keys)
            })
            .await;
        }
    }
}

#[tokio::test]
async fn prefixes_separate_the_queues_of_a_bucket_and_contents_are_encrypted() {
    let dir = tempfile::tempdir().unwrap();
    let server = S3Server::start(dir.path(), 0).await;
    let open = |prefix: &str| {
        JobObjects::in_bucket(&server.config(prefix), &CpuWork::new()).unwrap().encrypted(&[KEY])
    };
    let eu = open("eu").put(&parts(1), Duration::from_secs(1)).await.unwrap();
    assert!(open("us").list().await.unwrap().is_empty());
    assert_eq!(open("us").get(eu[0]).await, Err(ObjectError::Missing(eu[0].object)));
    let stored = std::fs::read(dir.path().join(format!("jobs/eu/{:016x}", eu[0].object))).unwrap();
    assert!(!stored.windows(5).any(|window| window == b"first"));
}

async fn open(folder: &Path, server: &S3Server) -> QueueHost {
    let log = EmbeddedJobLog::open(&folder.join("log")).await.unwrap();
    let objects = JobObjects::in_bucket(&server.config("eu"), &CpuWork::new()).unwrap();
    let config = fixture::config(3, Duration::from_millis(10));
    let (host, tasks) = QueueHost::open(Arc::new(log), objects, config).await.unwrap();
    tokio::spawn(tasks.run());
    host
}

/// Computes a job, and returns its result.
async fn compute(host: &QueueHost) -> Bytes {
    let taken = loop {
        let taken = host.take("minilm", 1, WORKER).await.unwrap();
        if !taken.is_empty() {
            break taken;
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    };
    let result: Bytes = [b"result of ", &*taken[0].body].concat().into();
    let end = (taken[0].id, taken[0].token, ComputationEnd::Computed(result));
    assert_eq!(host.end(vec![end]).await.unwrap(), [true]);
    host.result("a", taken[0].id).await.unwrap().unwrap()
}

#[tokio::test]
async fn jobs_are_kept_while_the_server_of_the_bucket_is_down() {
    let dir = tempfile::tempdir().unwrap();
    let s3 = dir.path().join("s3");
    let server = S3Server::start(&s3, 0).await;
    let port = server.port;
    let host = open(dir.path(), &server).await;
    host.submit(spec("a"), Bytes::from("one")).await.unwrap();
    host.submit(spec("a"), Bytes::from("two")).await.unwrap();
    assert_eq!(compute(&host).await, "result of one");

    drop(server);
    let begun = Instant::now();
    let failed = host.submit(spec("a"), Bytes::from("three")).await.unwrap_err();
    assert!(matches!(failed, QueueError::Objects(ObjectError::Unavailable(_))), "{failed:?}");
    assert!(begun.elapsed() < Duration::from_secs(15), "a client gets its response: {:?}", begun.elapsed());
    // A payload that cannot be read is no attempt.
    assert_eq!(host.take("minilm", 1, WORKER).await.unwrap(), []);

    let _server = S3Server::start(&s3, port).await;
    assert_eq!(compute(&host).await, "result of two");
    host.submit(spec("a"), Bytes::from("three")).await.unwrap();
    assert_eq!(compute(&host).await, "result of three");
}

#[tokio::test]
async fn objects_without_a_job_are_deleted_from_the_bucket_and_the_others_are_kept() {
    let dir = tempfile::tempdir().unwrap();
    let server = S3Server::start(&dir.path().join("s3"), 0).await;
    let objects = JobObjects::in_bucket(&server.config("eu"), &CpuWork::new()).unwrap();
    // Of a job whose retention time has passed, or of a write whose record was lost.
    let orphan = objects.put(&parts(1), Duration::from_secs(1000)).await.unwrap()[0].object;
    let host = open(dir.path(), &server).await;
    host.submit(spec("a"), Bytes::from("kept")).await.unwrap();
    let begun = Instant::now();
    while objects.list().await.unwrap().contains(&orphan) {
        assert!(begun.elapsed() < Duration::from_secs(30), "the object is not deleted");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(objects.list().await.unwrap().len(), 1);
    assert_eq!(compute(&host).await, "result of kept");
}

/// Server that responds to each request with this status and body.
async fn scripted(status: &'static str, body: &'static str) -> u16 {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut request = [0; 65536];
            drop(stream.read(&mut request).await);
            let length = body.len();
            let head = format!("HTTP/1.1 {status}\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n");
            drop(stream.write_all([head.as_bytes(), body.as_bytes()].concat().as_slice()).await);
        }
    });
    port
}

#[tokio::test]
async fn failures_say_whether_space_or_the_access_or_the_server_is_missing() {
    let dir = tempfile::tempdir().unwrap();
    let server = S3Server::start(dir.path(), 0).await;
    let put = async |port: u16, secret: &str| {
        let objects = JobObjects::in_bucket(&config(port, "eu", secret), &CpuWork::new()).unwrap();
        objects.put(&[Bytes::from("text")], Duration::from_secs(1)).await
    };
    assert!(put(server.port, "secret").await.is_ok());
    let denied = put(server.port, "another").await.unwrap_err();
    assert!(matches!(&denied, ObjectError::Denied(_)), "{denied}");
    for (status, body) in [
        ("507 Insufficient Storage", "<Error><Code>XMinioStorageFull</Code></Error>"),
        ("400 Bad Request", "<Error><Code>XMinioAdminBucketQuotaExceeded</Code></Error>"),
        ("403 Forbidden", "<Error><Code>QuotaExceeded</Code></Error>"),
    ] {
        assert_eq!(put(scripted(status, body).await, "secret").await, Err(ObjectError::Full), "{status}");
    }
    let broken = put(scripted("500 Internal Server Error", "").await, "secret").await.unwrap_err();
    assert!(matches!(&broken, ObjectError::Unavailable(_)), "{broken}");
}

/// Accepts connections and never responds.
async fn hang(port: u16) {
    let listener = loop {
        // The connections of the server before may not have ended.
        match tokio::net::TcpListener::bind(("127.0.0.1", port)).await {
            Ok(listener) => break listener,
            Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
        }
    };
    tokio::spawn(async move {
        let mut connections = Vec::new();
        while let Ok((stream, _)) = listener.accept().await {
            connections.push(stream);
        }
    });
}

#[tokio::test]
async fn expirations_do_not_wait_for_erasures() {
    let dir = tempfile::tempdir().unwrap();
    let server = S3Server::start(&dir.path().join("s3"), 0).await;
    let port = server.port;
    let log = EmbeddedJobLog::open(&dir.path().join("log")).await.unwrap();
    let objects = JobObjects::in_bucket(&server.config("eu"), &CpuWork::new()).unwrap();
    let config = fixture::config(3, Duration::from_millis(10));
    let config = QueueConfig { retention: Duration::from_millis(1), ..config };
    let (host, tasks) = QueueHost::open(Arc::new(log), objects, config).await.unwrap();
    let finished = host.submit(spec("a"), Bytes::from("one"));
    let deadline = Some(now().after(Duration::from_secs(6)));
    let expiring = host.submit(JobSpec { deadline, ..spec("a") }, Bytes::from("two"));
    let serve = tokio::spawn(tasks.run());
    let (finished, expiring) = (finished.await.unwrap(), expiring.await.unwrap());
    drop(server);
    hang(port).await;
    // Its erasure begins and does not end: each try waits a minute for a response.
    host.cancel("a", finished).await.unwrap();
    let begun = Instant::now();
    // When it has expired, it is removed within a second.
    while host.job("a", expiring).is_ok_and(|view| !view.job.is_finished()) {
        assert!(begun.elapsed() < Duration::from_secs(40), "the job does not expire");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    serve.abort();
}
