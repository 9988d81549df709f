//! Files of a queue after the retention time: none has an input, a result, or the name of a tenant.

#![expect(clippy::unwrap_used, reason = "a test fails by a panic")]

mod fixture;
#[path = "conformance/nats_server.rs"]
mod nats_server;
#[path = "../../tests/durable/search.rs"]
mod search;

use bytes::Bytes;
use fixture::spec;
use jobs::cpu::CpuWork;
use jobs::log::{EmbeddedJobLog, JobLog, NatsJobLog, NatsLogConfig};
use jobs::objects::JobObjects;
use jobs::queue_host::{ComputationEnd, QueueConfig, QueueHost};
use jobs_core::decide::JobWorker;
use jobs_core::job::{IdempotencyKey, JobSpec};
use jobs_core::queue::Cancellation;
use nats_server::NatsServer;
use search::files_with;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

const WORKER: JobWorker = JobWorker { number: 1, lease: Duration::from_secs(30) };
const RETENTION: Duration = Duration::from_millis(300);
const TIMEOUT: Duration = Duration::from_secs(30);
const TENANT: &str = "recognisable-tenant";
const INPUT: &str = "recognisable input";
const RESULT: &str = "recognisable result";

fn config() -> QueueConfig {
    QueueConfig { retention: RETENTION, ..fixture::config(3, Duration::from_millis(10)) }
}

async fn wait_until(description: &str, mut holds: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < TIMEOUT, "timed out: {description}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

fn request(number: u64) -> (JobSpec, Bytes) {
    let key = IdempotencyKey { key: [number as u8; 32], request: [0; 32] };
    let spec = JobSpec { idempotency: Some(key), ..spec(TENANT) };
    (spec, Bytes::from(format!("{INPUT} {number}")))
}

/// Submits jobs of which three succeed, one is cancelled during the computation, and one waits; returns the input of that.
async fn use_queue(host: &QueueHost) -> String {
    // Together, so that they have one object.
    let submitted = (0..5).map(|number| {
        let (spec, input) = request(number);
        host.submit(spec, input)
    });
    let ids = futures_util::future::join_all(submitted).await;
    let ids: Vec<_> = ids.into_iter().map(Result::unwrap).collect();
    let (spec, input) = request(0);
    assert_eq!(host.submit(spec, input).await, Ok(ids[0]), "a repeated submission");
    let taken = host.take("minilm", 4, WORKER).await.unwrap();
    assert_eq!(taken.len(), 4);
    assert_eq!(host.cancel(TENANT, taken[0].id).await, Ok(Cancellation::Confirmed));
    let computed = |result: String| ComputationEnd::Computed(result.into());
    let ends = taken
        .iter()
        .enumerate()
        .map(|(number, job)| (job.id, job.token, computed(format!("{RESULT} {number}"))));
    assert_eq!(host.end(ends.collect()).await.unwrap(), [false, true, true, true]);
    for job in &taken[1..] {
        assert!(host.result(TENANT, job.id).await.unwrap().is_some());
    }
    let inputs = (0..5).map(|number| format!("{INPUT} {number}"));
    inputs.into_iter().find(|input| taken.iter().all(|job| job.body != *input)).unwrap()
}

#[tokio::test]
async fn after_the_retention_time_no_file_has_an_input_a_result_or_a_tenant() {
    let dir = tempfile::tempdir().unwrap();
    let host = fixture::open(dir.path(), config(), &[]).await;
    let waiting = use_queue(&host).await;
    assert!(!files_with(dir.path(), TENANT).is_empty() && !files_with(dir.path(), INPUT).is_empty());
    // One job waits, and keeps the object with the inputs of the others.
    wait_until("four jobs are removed", || host.totals().finished == 0).await;
    wait_until("only the input of the job that waits is left", || {
        let inputs = (0..5).map(|number| format!("{INPUT} {number}"));
        inputs.into_iter().all(|input| files_with(dir.path(), &input).is_empty() == (input != waiting))
            && files_with(dir.path(), RESULT).is_empty()
    })
    .await;
    let taken = host.take("minilm", 1, WORKER).await.unwrap();
    assert_eq!(taken[0].body, waiting, "which is kept");
    assert_eq!(host.cancel(TENANT, taken[0].id).await, Ok(Cancellation::Confirmed));
    wait_until("no job is left", || host.totals().finished == 0).await;
    wait_until("nothing of the jobs is left", || {
        [TENANT, INPUT, RESULT].iter().all(|text| files_with(dir.path(), text).is_empty())
    })
    .await;
    // The log continues in its new file.
    let (spec, input) = request(9);
    let id = host.submit(spec, input).await.unwrap();
    drop(host);
    let host = loop {
        match EmbeddedJobLog::open(&dir.path().join("log")).await {
            Ok(log) => break open(Arc::new(log), dir.path()).await,
            Err(error) => assert!(error.to_string().contains("already open"), "{error}"),
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    };
    assert!(host.job(TENANT, id).is_ok());
}

async fn open(log: Arc<dyn JobLog>, folder: &Path) -> QueueHost {
    let objects = JobObjects::in_folder(&folder.join("objects"), &CpuWork::new()).unwrap();
    let (host, tasks) = QueueHost::open(log, objects, config()).await.unwrap();
    tokio::spawn(tasks.run());
    host
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_the_retention_time_no_file_of_nats_has_them_either() {
    let server = NatsServer::start();
    let dir = tempfile::tempdir().unwrap();
    let config = NatsLogConfig { servers: vec![server.url()], queue: "eu".to_owned(), replicas: 1 };
    let log = NatsJobLog::connect(&config, &CpuWork::new()).await.unwrap();
    let host = open(Arc::new(log), dir.path()).await;
    use_queue(&host).await;
    assert!(files_with(server.dir(), INPUT).is_empty() && files_with(server.dir(), RESULT).is_empty());
    let taken = host.take("minilm", 1, WORKER).await.unwrap();
    assert_eq!(host.cancel(TENANT, taken[0].id).await, Ok(Cancellation::Confirmed));
    wait_until("no job is left", || host.totals().finished == 0).await;
    wait_until("nothing of the jobs is left", || {
        let stores = [dir.path(), server.dir()];
        let is_left = |text: &&str| stores.iter().any(|store| !files_with(store, text).is_empty());
        ![TENANT, INPUT, RESULT].iter().any(is_left)
    })
    .await;
}
