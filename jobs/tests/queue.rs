//! A queue on the disk of this machine: submissions, workers, and processes that are killed.

#![expect(clippy::unwrap_used, reason = "a test fails by a panic")]

mod fixture;

use async_trait::async_trait;
use bytes::Bytes;
use fixture::spec;
use jobs::cpu::CpuWork;
use jobs::log::{EmbeddedJobLog, EncodedEntry, JobLog, JobLogError, QueueSnapshot};
use jobs::objects::JobObjects;
use jobs::queue_host::{
    ComputationEnd, Created, EndedWork, NewUpload, QueueConfig, QueueError, QueueHost, QueueTasks, TakenJob,
    now,
};
use jobs_core::batch::id::BatchFileId;
use jobs_core::batch::segment::{self, LineWork};
use jobs_core::batch::state::{BatchSpec, FileDeletion, FileProblem};
use jobs_core::decide::{ComputeEnd, JobFilter, JobWorker};
use jobs_core::job::{
    DurableJob, DurableJobId, IdempotencyKey, JobDelivery, JobOperation, JobOutcome, JobPhase, JobSpec,
    JobStatus, StoredRange, UnixMillis,
};
use jobs_core::queue::{Cancellation, DurableJobQueue};
use jobs_core::record::JobRecord;
use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::broadcast::error::TryRecvError;
use tokio::sync::watch;

/// Folder of the queue in a process that this test starts to kill it.
const FOLDER: &str = "MERIDIAN_TEST_QUEUE_FOLDER";
const WORKER: JobWorker = JobWorker { number: 1, lease: Duration::from_secs(30) };

fn config() -> QueueConfig {
    fixture::config(3, Duration::from_millis(10))
}

async fn open(folder: &Path, config: QueueConfig) -> QueueHost {
    fixture::open(folder, config, &[]).await
}

fn computed(job: &TakenJob) -> (DurableJobId, u64, ComputationEnd) {
    let result = [b"result of ", &*job.body].concat();
    (job.id, job.token, ComputationEnd::Computed(result.into()))
}

#[tokio::test]
async fn jobs_are_computed_cancelled_and_listed() {
    let dir = tempfile::tempdir().unwrap();
    let host = open(dir.path(), config()).await;
    let mut ids = Vec::new();
    for number in 0..3 {
        ids.push(host.submit(spec("a"), Bytes::from(format!("text {number}"))).await.unwrap());
    }
    assert_eq!(host.job("a", ids[2]).unwrap().position.unwrap().jobs, 2);
    assert_eq!(host.job("b", ids[2]).unwrap_err(), QueueError::Unknown, "the job of another tenant");
    assert_eq!(host.cancel("b", ids[2]).await.unwrap_err(), QueueError::Unknown);
    assert_eq!(host.cancel("a", ids[2]).await, Ok(Cancellation::Confirmed));
    let taken = host.take("minilm", 10, WORKER).await.unwrap();
    let bodies: Vec<_> = taken.iter().map(|job| &*job.body).collect();
    assert_eq!(bodies, [b"text 0", b"text 1"]);
    assert_eq!(host.cancel("a", ids[1]).await, Ok(Cancellation::Confirmed));
    let held = taken.iter().map(|job| (job.id, job.token)).collect();
    assert_eq!(host.extend(held, WORKER.lease).await.unwrap(), [ids[0]]);
    assert_eq!(host.end(taken.iter().map(computed).collect()).await.unwrap(), [true, false]);
    assert_eq!(host.result("a", ids[0]).await.unwrap(), Some(Bytes::from("result of text 0")));
    assert_eq!(host.result("a", ids[1]).await.unwrap(), None);
    let succeeded = JobFilter { status: Some(JobPhase::Succeeded), ..JobFilter::default() };
    assert_eq!(host.list(&succeeded, 10).len(), 1);
}

#[tokio::test]
async fn a_process_is_told_of_each_job_that_it_ends_once() {
    let dir = tempfile::tempdir().unwrap();
    let host = open(dir.path(), config()).await;
    let mut ended = host.subscribe_ended();
    let submit = async |spec: JobSpec| host.submit(spec, Bytes::from("text")).await.unwrap();
    let webhook = Some("https://example.com/".to_owned());
    let succeeds = submit(JobSpec { webhook, ..spec("a") }).await;
    let taken = host.take("minilm", 10, WORKER).await.unwrap();
    let cancelled = submit(spec("a")).await;
    host.cancel("a", cancelled).await.unwrap();
    host.cancel("a", cancelled).await.unwrap();
    host.end(vec![computed(&taken[0])]).await.unwrap();
    host.end(vec![computed(&taken[0])]).await.unwrap();
    // It has ended already; its message is not sent.
    assert_eq!(host.cancel("a", succeeds).await.unwrap(), Cancellation::Confirmed);
    let deadline = Some(now().after(Duration::from_millis(100)));
    let expires = submit(JobSpec { deadline, ..spec("a") }).await;
    for id in [cancelled, succeeds, expires] {
        assert_eq!(ended.recv().await.unwrap(), EndedWork::Job(id));
        assert!(host.job_of_any_tenant(id).unwrap().is_finished());
    }
    assert_eq!(ended.try_recv(), Err(TryRecvError::Empty), "no job twice");
}

#[tokio::test]
async fn a_job_of_a_worker_that_has_ended_need_not_wait_for_its_lease_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let host = open(dir.path(), config()).await;
    let id = host.submit(spec("a"), Bytes::from("text")).await.unwrap();
    let first = host.take("minilm", 10, WORKER).await.unwrap();
    assert_eq!(host.take("minilm", 10, WORKER).await.unwrap(), [], "it is leased");
    drop(host);
    let log = loop {
        // The file is free soon after the last handle was dropped.
        match EmbeddedJobLog::open(&dir.path().join("log")).await {
            Ok(log) => break log,
            Err(error) => assert!(error.to_string().contains("already open"), "{error}"),
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    };
    let objects = JobObjects::in_folder(&dir.path().join("objects"), &CpuWork::new()).unwrap();
    let (host, tasks) = QueueHost::open(Arc::new(log), objects, config()).await.unwrap();
    tokio::spawn(tasks.run());
    let second = host.take("minilm", 10, WORKER).await.unwrap();
    assert_eq!((second[0].id, second[0].job.attempts), (id, 2));
    assert_eq!(host.end(vec![computed(&first[0])]).await, Ok(vec![false]), "the first attempt has no effect");
    assert_eq!(host.end(vec![computed(&second[0])]).await, Ok(vec![true]));
}

#[tokio::test]
async fn a_failed_attempt_is_repeated_and_the_last_one_ends_the_job() {
    let dir = tempfile::tempdir().unwrap();
    let host = open(dir.path(), config()).await;
    let id = host.submit(spec("a"), Bytes::from("text")).await.unwrap();
    for attempt in 1..=3 {
        let taken = loop {
            let taken = host.take("minilm", 10, WORKER).await.unwrap();
            if !taken.is_empty() {
                break taken;
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        };
        assert_eq!(host.job("a", id).unwrap().job.attempts, attempt);
        let end = ComputationEnd::Other(ComputeEnd::Failed("connection reset".to_owned()));
        host.end(vec![(id, taken[0].token, end)]).await.unwrap();
    }
    let failed = JobFilter { status: Some(JobPhase::Failed), ..JobFilter::default() };
    assert_eq!(host.list(&failed, 10)[0].0, id);
}

#[tokio::test]
async fn repeated_submissions_with_a_key_are_one_job_also_at_the_limit() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config();
    config.limits.tenant_jobs = 2;
    let host = open(dir.path(), config).await;
    let keyed = |request| JobSpec {
        idempotency: Some(IdempotencyKey { key: [1; 32], request: [request; 32] }),
        ..spec("a")
    };
    let submissions = (0..8).map(|_| host.submit(keyed(1), Bytes::from("text")));
    let mut ids = Vec::new();
    let tasks: Vec<_> = submissions.map(Box::pin).collect();
    for task in tasks {
        ids.push(task.await.unwrap());
    }
    ids.dedup();
    assert_eq!(ids.len(), 1);
    assert_eq!(host.submit(keyed(2), Bytes::from("x")).await, Err(QueueError::OtherRequest(ids[0])));
    host.submit(spec("a"), Bytes::from("another")).await.unwrap();
    assert!(matches!(host.submit(spec("a"), Bytes::new()).await, Err(QueueError::Rejected(_))));
    assert_eq!(host.submit(keyed(1), Bytes::from("text")).await, Ok(ids[0]));
    host.submit(spec("b"), Bytes::from("of another tenant")).await.unwrap();
    let counted = host.submissions();
    assert_eq!((counted.accepted, counted.repeated), (3, 8), "a conflict and a rejection are neither");
}

/// A log whose entries cannot be read while `unreadable` is set, and whose appends fail after they have been written while
/// `unconfirmed` is set.
struct DamagedLog {
    log: EmbeddedJobLog,
    unreadable: Arc<AtomicBool>,
    unconfirmed: Arc<AtomicBool>,
}

#[async_trait]
impl JobLog for DamagedLog {
    async fn append(&self, entry: EncodedEntry) -> Result<u64, JobLogError> {
        let sequence = self.log.append(entry).await?;
        match self.unconfirmed.load(Ordering::SeqCst) {
            true => Err(JobLogError::Unavailable("no confirmation".to_owned())),
            false => Ok(sequence),
        }
    }

    async fn read(&self, after: u64, count: usize) -> Result<Vec<(u64, Vec<JobRecord>)>, JobLogError> {
        match self.unreadable.load(Ordering::SeqCst) {
            true => Err(JobLogError::Unavailable("entry 2 cannot be read".to_owned())),
            false => self.log.read(after, count).await,
        }
    }

    fn last(&self) -> watch::Receiver<u64> {
        self.log.last()
    }

    async fn save(&self, snapshot: QueueSnapshot) -> Result<(), JobLogError> {
        self.log.save(snapshot).await
    }

    async fn saved(&self) -> Result<QueueSnapshot, JobLogError> {
        self.log.saved().await
    }
}

/// A queue whose log is a [`DamagedLog`], with the switches of the log.
struct DamagedQueue {
    host: QueueHost,
    tasks: QueueTasks,
    unreadable: Arc<AtomicBool>,
    unconfirmed: Arc<AtomicBool>,
    /// Folder of the objects.
    objects: PathBuf,
}

impl DamagedQueue {
    async fn open(folder: &Path, config: QueueConfig) -> DamagedQueue {
        let [unreadable, unconfirmed] = [(); 2].map(|()| Arc::new(AtomicBool::new(false)));
        let log = EmbeddedJobLog::open(&folder.join("log")).await.unwrap();
        let log = DamagedLog { log, unreadable: unreadable.clone(), unconfirmed: unconfirmed.clone() };
        let folder = folder.join("objects");
        let objects = JobObjects::in_folder(&folder, &CpuWork::new()).unwrap();
        let (host, tasks) = QueueHost::open(Arc::new(log), objects, config).await.unwrap();
        DamagedQueue { host, tasks, unreadable, unconfirmed, objects: folder }
    }
}

#[tokio::test]
async fn submissions_fail_at_once_while_the_log_cannot_be_read() {
    let dir = tempfile::tempdir().unwrap();
    let DamagedQueue { host, tasks, unreadable, .. } = DamagedQueue::open(dir.path(), config()).await;
    tokio::spawn(tasks.run());
    let first = host.submit(spec("a"), Bytes::from("text")).await.unwrap();
    unreadable.store(true, Ordering::SeqCst);
    let mut failure = host.failure();
    // The submission that finds the entry unreadable, and those after it.
    for _ in 0..3 {
        let failed = host.submit(spec("a"), Bytes::from("text")).await.unwrap_err();
        assert!(matches!(&failed, QueueError::Log(JobLogError::Unavailable(_))), "{failed}");
    }
    assert!(failure.wait_for(Option::is_some).await.is_ok());
    assert!(host.job("a", first).is_ok(), "what was applied can be read");
    unreadable.store(false, Ordering::SeqCst);
    failure.wait_for(Option::is_none).await.unwrap();
    host.submit(spec("a"), Bytes::from("text")).await.unwrap();
    // The first failed submission had been written.
    assert_eq!(host.totals().queued, 3);
}

#[tokio::test]
async fn a_lost_payload_ends_its_job_and_no_other() {
    let dir = tempfile::tempdir().unwrap();
    let host = open(dir.path(), config()).await;
    let lost = host.submit(spec("a"), Bytes::from("lost")).await.unwrap();
    let kept = host.submit(spec("a"), Bytes::from("kept")).await.unwrap();
    let object = host.job("a", lost).unwrap().job.spec.payload.object;
    std::fs::remove_file(dir.path().join("objects").join(format!("{object:016x}"))).unwrap();
    let taken = host.take("minilm", 10, WORKER).await.unwrap();
    assert_eq!(taken.iter().map(|job| job.id).collect::<Vec<_>>(), [kept]);
    let job = host.job("a", lost).unwrap().job;
    let JobStatus::Finished { outcome: JobOutcome::Failed { reason }, .. } = &job.status else { panic!() };
    assert_eq!(*reason, format!("the object store has no object {object:016x}"));
}

#[tokio::test]
async fn removed_jobs_leave_no_payload_and_no_result() {
    let dir = tempfile::tempdir().unwrap();
    let host = open(dir.path(), QueueConfig { retention: Duration::from_millis(1), ..config() }).await;
    let id = host.submit(spec("a"), Bytes::from("a confidential text")).await.unwrap();
    let taken = host.take("minilm", 10, WORKER).await.unwrap();
    host.end(taken.iter().map(computed).collect()).await.unwrap();
    while host.job("a", id).is_ok() {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    // The log has only ever had the ranges; the objects are deleted by the next sweep.
    let log = std::fs::read(dir.path().join("log")).unwrap();
    assert!(!log.windows(12).any(|window| window == b"confidential"));
}

#[tokio::test]
async fn the_content_of_a_job_is_erased_although_the_append_of_its_removal_has_failed() {
    let dir = tempfile::tempdir().unwrap();
    let config = QueueConfig { retention: Duration::from_millis(500), ..config() };
    let queue = DamagedQueue::open(dir.path(), config).await;
    let DamagedQueue { host, tasks, unconfirmed, objects: folder, .. } = queue;
    // Both have one object: they wait together.
    let (first, second) = (Bytes::from("content one"), Bytes::from("content two"));
    let submitted = async { tokio::join!(host.submit(spec("a"), first), host.submit(spec("a"), second)) };
    let (submitted, ()) = tokio::join!(submitted, async { drop(tokio::spawn(tasks.run())) });
    assert_eq!(host.cancel("a", submitted.0.unwrap()).await, Ok(Cancellation::Confirmed));
    unconfirmed.store(true, Ordering::SeqCst);
    let stored = || -> Vec<u8> {
        let files =
            std::fs::read_dir(&folder).unwrap().map(|file| std::fs::read(file.unwrap().path()).unwrap());
        files.flatten().collect()
    };
    let has = |text: &[u8]| stored().windows(text.len()).any(|window| window == text);
    let begun = Instant::now();
    while has(b"content one") {
        assert!(begun.elapsed() < Duration::from_secs(30), "the content of the removed job stays");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(has(b"content two") && host.totals().finished == 0);
}

#[tokio::test]
async fn the_content_of_a_file_is_erased_although_the_append_of_its_deletion_has_failed() {
    let dir = tempfile::tempdir().unwrap();
    let queue = DamagedQueue::open(dir.path(), config()).await;
    let DamagedQueue { host, tasks, unconfirmed, objects: folder, .. } = queue;
    tokio::spawn(tasks.run());
    let text = Bytes::from(
        r#"{"custom_id":"1","method":"POST","url":"/v1/embeddings","body":{"model":"m","input":"x"}}"#,
    );
    let models = BTreeSet::from(["m".to_owned()]);
    let segments = segment::scan(&text, &models, |_, _| LineWork { inputs: 1, tokens: 1 }).unwrap();
    let upload = NewUpload {
        tenant: "a".to_owned(),
        name: "f".to_owned(),
        text,
        models,
        segments,
        residency: None,
        idempotency: None,
    };
    // After that the tasks of the queue run. They delete what an earlier process has left.
    host.submit(spec("a"), Bytes::from("text")).await.unwrap();
    let id = BatchFileId::Upload(host.store_file(upload, u64::MAX).await.unwrap().id);
    unconfirmed.store(true, Ordering::SeqCst);
    assert!(host.delete_file("a", id).await.is_err());
    let begun = Instant::now();
    while std::fs::read_dir(&folder).unwrap().count() > 1 {
        assert!(begun.elapsed() < Duration::from_secs(30), "the content of the deleted file stays");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(host.file("a", id), None);
}

/// The longest time for which a snapshot may stop every other operation on a queue of 100,000 jobs.
const SNAPSHOT_LOCK_MAX: Duration = Duration::from_millis(20);

/// Returns a queue with this number of jobs, half of them finished, of several tenants.
fn large_queue(jobs: u64) -> DurableJobQueue {
    let finished = |at| JobStatus::Finished {
        outcome: JobOutcome::Succeeded,
        result: Some(StoredRange { object: at, offset: 0, length: 1 }),
        at: UnixMillis(at),
        delivery: JobDelivery::None,
    };
    let job = |number: u64| DurableJob {
        spec: JobSpec {
            webhook: Some(format!("https://example.com/results/{number}")),
            residency: Some("anywhere".to_owned()),
            idempotency: Some(IdempotencyKey { key: [(number % 251) as u8; 32], request: [0; 32] }),
            ..spec(&format!("tenant {}", number % 10))
        },
        sequence: number,
        attempts: 1,
        last_error: None,
        status: match number % 2 {
            0 => finished(number),
            _ => JobStatus::Queued { not_before: UnixMillis(0) },
        },
    };
    let jobs = (1..=jobs).map(|number| (DurableJobId::new(UnixMillis(number), number.into()), job(number)));
    DurableJobQueue::restore(jobs, 1)
}

#[test]
fn a_snapshot_of_many_jobs_shares_them_with_the_queue() {
    let mut queue = large_queue(100_000);
    // Time of the processor, since other tests run at the same time; the best of several, since they use the same caches.
    let thread_time = || {
        let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
        Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
    };
    let best = |measured: &mut dyn FnMut()| {
        let times = (0..5).map(|_| {
            let begun = thread_time();
            measured();
            thread_time() - begun
        });
        times.min().unwrap()
    };
    let copied = best(&mut || {
        let copy: Vec<_> = queue.jobs().map(|(id, job)| (id, job.clone())).collect();
        assert_eq!(copy.len(), 100_000);
    });
    let shared = best(&mut || assert_eq!(queue.shared_jobs().len(), 100_000));
    println!("snapshot of 100,000 jobs: {shared:?}; a copy of them: {copied:?}");
    assert!(2 * shared < copied, "{shared:?} {copied:?}");
    assert!(cfg!(debug_assertions) || shared < SNAPSHOT_LOCK_MAX, "{shared:?}");
    // What is changed afterwards is not in the snapshot.
    let snapshot = queue.shared_jobs();
    let (id, before) = snapshot.iter().find(|(_, job)| !job.is_finished()).unwrap();
    let record = JobRecord::CancelRequested { id: *id, at: UnixMillis(1) };
    queue.apply(queue.applied() + 1, &[record]);
    assert!(queue.job(*id).unwrap().is_finished() && !before.is_finished());
}

#[tokio::test]
async fn a_repeated_upload_is_one_file_and_leaves_no_second_object() {
    let dir = tempfile::tempdir().unwrap();
    let host = open(dir.path(), config()).await;
    let key = |request| Some(IdempotencyKey { key: [1; 32], request: [request; 32] });
    let upload = |idempotency| NewUpload {
        tenant: "a".to_owned(),
        name: "f".to_owned(),
        text: Bytes::from("{}\n"),
        models: [].into(),
        segments: segment::scan(b"{}\n", &[].into(), |_, _| LineWork { inputs: 1, tokens: 1 }).unwrap(),
        residency: None,
        idempotency,
    };
    // At the same time, so that both may write their object.
    let (first, second) =
        tokio::join!(host.store_file(upload(key(1)), 3), host.store_file(upload(key(1)), 3));
    let (first, second) = (first.unwrap(), second.unwrap());
    let id = first.id;
    assert_eq!(second.id, id);
    assert_ne!(first.is_new, second.is_new, "one of them has stored it");
    let again = Created { id, is_new: false };
    assert_eq!(host.store_file(upload(key(1)), 3).await, Ok(again), "also at the limit of bytes");
    assert_eq!(host.store_file(upload(key(2)), 9).await, Err(QueueError::OtherRequest(id.0)));
    assert_ne!(host.store_file(upload(None), 9).await.unwrap().id, id);
    let begun = Instant::now();
    let objects = || std::fs::read_dir(dir.path().join("objects")).unwrap().count();
    while objects() != 2 {
        assert!(begun.elapsed() < Duration::from_secs(30), "{} objects", objects());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(host.upload("a", id).is_some());
}

#[tokio::test]
async fn a_batch_keeps_the_models_of_its_deleted_file() {
    let dir = tempfile::tempdir().unwrap();
    let host = open(dir.path(), config()).await;
    let models: BTreeSet<_> = ["m", "n"].map(str::to_owned).into();
    let line = |model: &str| {
        format!(
            r#"{{"custom_id": "{model}", "method": "POST", "url": "/v1/rerank", "body": {{"model": "{model}"}}}}"#
        )
    };
    let text = [line("m"), line("n")].join("\n");
    let work = |_, _: &[u8]| LineWork { inputs: 1, tokens: 1 };
    let upload = NewUpload {
        tenant: "a".to_owned(),
        name: "f".to_owned(),
        segments: segment::scan(text.as_bytes(), &models, work).unwrap(),
        text: text.into(),
        models: models.clone(),
        residency: None,
        idempotency: None,
    };
    let file = host.store_file(upload, u64::MAX).await.unwrap().id;
    let problem = FileProblem { code: "invalid_url".to_owned(), message: "no".to_owned(), line: 1 };
    let spec = BatchSpec {
        tenant: "a".to_owned(),
        file,
        operation: JobOperation::Embeddings,
        completion_window: "24h".to_owned(),
        expires: now().after(Duration::from_secs(60)),
        metadata: [].into(),
        total: 2,
        problems: vec![problem],
        residency: None,
        models: models.clone(),
        idempotency: None,
        trace: None,
    };
    let batch = host.create_batch(spec, u64::MAX).await.unwrap().id;
    let deleted = host.delete_file("a", BatchFileId::Upload(file)).await;
    assert_eq!(deleted, Ok(FileDeletion::Deleted));
    // Their policies decide who may read its errors, which quote lines of both.
    assert_eq!(host.batch_origin("a", batch).unwrap().deployments, models);
}

/// Submits and computes jobs until it is killed, and prints each confirmed step.
async fn serve_until_killed(folder: &Path) {
    let host = open(folder, config()).await;
    let mut tasks = tokio::task::JoinSet::new();
    let print = |line: String| {
        let mut out = std::io::stdout().lock();
        writeln!(out, "{line}").unwrap();
        out.flush().unwrap();
    };
    for caller in 0..8 {
        let host = host.clone();
        tasks.spawn(async move {
            for number in 0.. {
                let text = format!("text {caller} {number}");
                let id = host.submit(spec("a"), Bytes::from(text.clone())).await.unwrap();
                print(format!("submitted {id} {text}"));
                if number % 5 == 0 && host.cancel("a", id).await == Ok(Cancellation::Confirmed) {
                    print(format!("cancelled {id}"));
                }
            }
        });
    }
    loop {
        let taken = host.take("minilm", 20, WORKER).await.unwrap();
        let ended = host.end(taken.iter().map(computed).collect()).await.unwrap();
        for (job, _) in taken.iter().zip(ended).filter(|(_, ended)| *ended) {
            print(format!("computed {}", job.id));
        }
        tokio::task::yield_now().await;
    }
}

/// Invariant 10. The process is killed with SIGKILL several times, at any point of a write.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_confirmed_survives_a_killed_process() {
    if let Some(folder) = std::env::var_os(FOLDER) {
        return serve_until_killed(Path::new(&folder)).await;
    }
    let dir = tempfile::tempdir().unwrap();
    let mut expected: BTreeMap<DurableJobId, (String, JobPhase)> = BTreeMap::new();
    for round in 0..6u64 {
        let mut process = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "what_was_confirmed_survives_a_killed_process", "--nocapture"])
            .env(FOLDER, dir.path())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(process.stdout.take().unwrap()).lines();
        let mut seen = 0;
        while let Some(Ok(line)) = lines.next() {
            let words: Vec<_> = line.splitn(3, ' ').collect();
            // The test harness prints lines of its own.
            let Some(id) = words.get(1).and_then(|id| id.parse::<DurableJobId>().ok()) else { continue };
            match words[0] {
                "submitted" => {
                    let known = expected.insert(id, (words[2].to_owned(), JobPhase::Queued));
                    assert!(known.is_none() || known.unwrap().1 == JobPhase::Succeeded);
                }
                "cancelled" => expected.get_mut(&id).unwrap().1 = JobPhase::Cancelled,
                "computed" => {
                    // The worker may have been faster than the response to the client.
                    let job = expected.entry(id).or_insert((String::new(), JobPhase::Queued));
                    job.1 = JobPhase::Succeeded;
                }
                other => panic!("{other}"),
            }
            seen += 1;
            if seen == 150 + 37 * round {
                process.kill().unwrap();
            }
        }
        process.wait().unwrap();
    }
    let host = open(dir.path(), config()).await;
    let (mut queued, mut succeeded, mut cancelled) = (0, 0, 0);
    for (id, (text, phase)) in &expected {
        let job = host.job("a", *id).unwrap().job;
        match (phase, JobPhase::of(&job)) {
            (JobPhase::Cancelled, JobPhase::Cancelled) => cancelled += 1,
            (JobPhase::Succeeded, JobPhase::Succeeded) => {
                succeeded += 1;
                let result = host.result("a", *id).await.unwrap().unwrap();
                assert!(result.starts_with(b"result of text") && result.ends_with(text.as_bytes()));
            }
            // A step after the last line of the killed process.
            (JobPhase::Queued, _) => queued += 1,
            (confirmed, found) => panic!("{id} was {confirmed:?} and is {found:?}"),
        }
    }
    println!("{queued} queued, {succeeded} succeeded, {cancelled} cancelled; all found after 6 kills");
    assert!(queued + succeeded + cancelled > 500 && succeeded > 50 && cancelled > 50);
}
