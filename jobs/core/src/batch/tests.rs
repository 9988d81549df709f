//! Histories of batches in a queue: workers that end, cancellation, expiry, deletion, and restarts.

use super::id::{BatchFileId, BatchId, UploadId};
use super::segment::{self, LineWork};
use super::state::{
    self, BatchPhase, BatchProgress, BatchSpec, ChunkResult, FileDeletion, FileUsage, PlannedChunk,
    UploadedFile,
};
use crate::decide::{self, AttemptPolicy, ComputeEnd, JobFilter, JobWorker, QueueLimits, SubmissionError};
use crate::job::{DurableJobId, IdempotencyKey, JobOperation, StoredRange, UnixMillis};
use crate::queue::{DurableJobQueue, RecordEffect, TenantUsage};
use crate::record::JobRecord;
use backoff::Backoff;
use proptest::prelude::*;
use std::time::Duration;

const POLICY: AttemptPolicy = AttemptPolicy {
    attempts: 3,
    backoff: Backoff { first: Duration::from_millis(1), max: Duration::from_millis(2) },
};
const LEASE: Duration = Duration::from_secs(30);
const FILE: UploadId = UploadId(DurableJobId::FIRST);
const BATCH: BatchId = BatchId(DurableJobId::FIRST);
const EXPIRES: UnixMillis = UnixMillis(1_000_000);

/// A queue with a file of a number of lines, every tenth of which is broken, and a batch of it.
struct History {
    queue: DurableJobQueue,
    records: u64,
    now: UnixMillis,
}

fn range(object: u64) -> StoredRange {
    StoredRange { object, offset: 0, length: 1 }
}

impl History {
    fn new(lines: usize) -> History {
        let text: Vec<_> = (0..lines).map(|line| match line % 10 {
            9 => "broken".to_owned(),
            _ => format!(
                r#"{{"custom_id": "{line}", "method": "POST", "url": "/v1/embeddings", "body": {{"model": "m{}"}}}}"#,
                line % 2
            ),
        }).collect();
        let models = ["m0", "m1"].map(str::to_owned).into();
        let segments =
            segment::scan(text.join("\n").as_bytes(), &models, |_, _| LineWork { inputs: 100, tokens: 7 })
                .unwrap();
        let segments = segments.into_iter().zip(1..);
        let segments =
            segments.map(|((_, segment), object)| segment::FileSegment { range: range(object), ..segment });
        let (tenant, name) = ("a".to_owned(), "f".to_owned());
        let file = UploadedFile {
            tenant,
            name,
            bytes: 1000,
            models,
            segments: segments.collect(),
            residency: None,
            idempotency: None,
        };
        let mut jobs = 0..;
        let chunks = state::plan(&file, JobOperation::Embeddings, || {
            DurableJobId::new(UnixMillis(1), jobs.next().unwrap())
        });
        let mut history = History { queue: DurableJobQueue::default(), records: 0, now: UnixMillis(1) };
        history.append(JobRecord::FileUploaded { id: FILE, file: Box::new(file) });
        assert_eq!(history.create(chunks, lines), RecordEffect::Changed);
        history
    }

    fn create(&mut self, chunks: Vec<PlannedChunk>, lines: usize) -> RecordEffect {
        let spec = BatchSpec {
            tenant: "a".to_owned(),
            file: FILE,
            operation: JobOperation::Embeddings,
            completion_window: "24h".to_owned(),
            expires: EXPIRES,
            metadata: [].into(),
            total: lines as u32,
            problems: Vec::new(),
            residency: None,
            models: ["m0", "m1"].map(str::to_owned).into(),
            idempotency: None,
            trace: None,
        };
        self.append(JobRecord::BatchCreated { id: BATCH, spec: Box::new(spec), chunks })
    }

    fn append(&mut self, record: JobRecord) -> RecordEffect {
        // Through its encoding, as from a log.
        let record = serde_json::from_str(&serde_json::to_string(&record).unwrap()).unwrap();
        self.records += 1;
        self.queue.apply(self.records, &[record]).pop().unwrap()
    }

    fn take(&mut self, deployment: &str) -> Vec<(DurableJobId, u64)> {
        let worker = JobWorker { number: 1, lease: LEASE };
        let record = decide::take(&mut self.queue, deployment, 1, &POLICY, worker, self.now);
        match record.map(|record| self.append(record)) {
            Some(RecordEffect::Leased(jobs)) => jobs.into_iter().map(|job| (job, self.records)).collect(),
            None => Vec::new(),
            other => panic!("{other:?}"),
        }
    }

    fn computed(&mut self, (id, token): (DurableJobId, u64)) -> RecordEffect {
        let lines = self.queue.job(id).map_or(1, |job| (job.spec.inputs / 100) as u32);
        let object = 1000 + self.records;
        let result = ChunkResult {
            output: Some(range(object)),
            errors: Some(range(object)),
            completed: lines - 1,
            failed: 1,
            output_bytes: 10,
            error_bytes: 1,
        };
        self.append(JobRecord::ChunkComputed { id, token, result, at: self.now })
    }

    fn maintain(&mut self) {
        for record in decide::maintain(&self.queue, &POLICY, Duration::from_secs(60), self.now, 100) {
            self.append(record);
        }
    }

    fn finalize(&mut self) -> RecordEffect {
        let uncomputed = vec![(0, range(5000))];
        self.append(JobRecord::BatchFinalized { id: BATCH, uncomputed, error_bytes: 7, at: self.now })
    }

    fn progress(&self) -> BatchProgress {
        self.queue.batches().batch(BATCH).unwrap().progress
    }

    fn phase(&self) -> BatchPhase {
        self.queue.batches().batch(BATCH).unwrap().phase()
    }

    fn restart(&mut self) {
        let jobs: Vec<_> = self.queue.jobs().map(|(id, job)| (id, job.clone())).collect();
        let rows = serde_json::to_string(&self.queue.batches().rows()).unwrap();
        let restored = DurableJobQueue::restore(jobs, self.queue.applied());
        let restored = restored.with_batches(serde_json::from_str(&rows).unwrap());
        assert_eq!(restored.batches(), self.queue.batches());
        self.queue = restored;
    }
}

#[test]
fn the_records_of_the_largest_file_and_of_its_batch_fit_into_a_message_of_nats() {
    let models: Vec<_> = (0..2).map(|number| format!("{number}{}", "m".repeat(63))).collect();
    // Two lines are a segment. Some segments have lines of two models, and every other line repeats an identifier where
    // that does not remove a group.
    let text = |segments: usize, of_two: usize| {
        let line = |segment: usize, half: usize| {
            let model = &models[if segment < of_two { half } else { 0 }];
            format!(
                r#"{{"custom_id": "r{}", "method": "POST", "url": "/v1/embeddings", "body": {{"model": "{model}"}}}}"#,
                2 * segment + half
            )
        };
        let lines = (0..segments).flat_map(|segment| [line(segment, 0), line(segment, 1)]);
        lines.collect::<Vec<_>>().join("\n")
    };
    let known = models.iter().cloned().collect();
    // The most tokens of a line: those of a text as long as a segment.
    let work = LineWork { inputs: segment::SEGMENT_INPUTS / 2, tokens: segment::SEGMENT_BYTES as u64 / 4 };
    let scan = |text: String| segment::scan(text.as_bytes(), &known, |_, _| work);
    let groups = segment::GROUPS_MAX - segment::SEGMENTS_MAX;
    let segments = scan(text(segment::SEGMENTS_MAX, groups)).unwrap();
    assert_eq!(segments.len(), segment::SEGMENTS_MAX);
    assert_eq!(scan(text(segment::SEGMENTS_MAX + 1, 0)).unwrap_err(), segment::FileError::TooManySegments);
    assert_eq!(
        scan(text(segment::SEGMENTS_MAX, groups + 1)).unwrap_err(),
        segment::FileError::TooManySegments
    );

    let range = StoredRange { object: u64::MAX, offset: 100 << 20, length: 1 << 20 };
    let longest = |(_, segment): (std::ops::Range<usize>, segment::FileSegment)| segment::FileSegment {
        range,
        bytes: 1 << 20,
        first_line: segment::LINE_NUMBER_MAX,
        requests: 256,
        ..segment
    };
    let mut segments: Vec<_> = segments.into_iter().map(longest).collect();
    segments[0].duplicates =
        (0..segment::DUPLICATES_MAX as u32).map(|number| segment::LINE_NUMBER_MAX - number).collect();
    let file = UploadedFile {
        tenant: "t".repeat(64),
        name: "n".repeat(255),
        bytes: 100 << 20,
        models: known.clone(),
        segments,
        residency: Some("r".repeat(2000)),
        idempotency: Some(IdempotencyKey { key: [255; 32], request: [255; 32] }),
    };
    let chunks = state::plan(&file, JobOperation::Embeddings, || DurableJobId::FIRST);
    assert_eq!(chunks.len(), segment::GROUPS_MAX);
    const MESSAGE: usize = 1 << 20;
    let bytes = serde_json::to_vec(&file).unwrap().len();
    assert!(bytes < MESSAGE, "{bytes}");
    let bytes = serde_json::to_vec(&chunks).unwrap().len();
    assert!(bytes + (64 << 10) < MESSAGE, "{bytes}");
}

#[test]
fn the_files_and_batches_of_a_tenant_are_limited_by_bytes_number_and_size_in_memory() {
    let history = History::new(30);
    let usage = history.queue.batches().usage_of("a");
    assert_eq!((usage.files, usage.batches, usage.bytes), (1, 1, 1000));
    assert!(usage.parts > 2);
    assert_eq!(history.queue.batches().usage_of("b"), FileUsage::default());
    assert_eq!(decide::check_file(usage, 24, 1, 1024), Ok(()));
    assert!(matches!(decide::check_file(usage, 25, 1, 1024), Err(SubmissionError::StoredBytes { .. })));
    assert_eq!(decide::check_batch(usage, 1, 1001, []), Ok(Vec::new()));
    assert!(matches!(decide::check_batch(usage, 1, 1000, []), Err(SubmissionError::StoredBytes { .. })));
    let many = FileUsage { files: decide::FILES_PER_TENANT_MAX, ..usage };
    let rejected = decide::check_file(many, 1, 1, 2000).unwrap_err().to_string();
    assert_eq!(rejected, "you have 1000 files, which is the limit: delete files that you do not need");
    let most = decide::FILE_PARTS_PER_TENANT_MAX - usage.parts;
    assert_eq!(decide::check_file(usage, 1, most, 2000), Ok(()));
    assert_eq!(decide::check_batch(usage, most, 2000, []), Ok(Vec::new()));
    let (parts, limit) = (decide::FILE_PARTS_PER_TENANT_MAX + 1, decide::FILE_PARTS_PER_TENANT_MAX);
    let rejected = SubmissionError::FileParts { parts, limit };
    assert_eq!(decide::check_file(usage, 1, most + 1, 2000), Err(rejected.clone()));
    assert_eq!(decide::check_batch(usage, most + 1, 2000, []), Err(rejected));
}

#[test]
fn at_the_limit_of_batches_the_oldest_that_has_ended_without_files_is_removed() {
    let usage = FileUsage { batches: decide::BATCHES_PER_TENANT_MAX, parts: 100, ..FileUsage::default() };
    let batch = |number| BatchId(DurableJobId::new(UnixMillis(1), number));
    let limit = decide::BATCHES_PER_TENANT_MAX;
    assert_eq!(decide::check_batch(usage, 1, 1, []), Err(SubmissionError::Batches { limit }));
    let without_files = [(batch(1), 5), (batch(2), 5)];
    assert_eq!(decide::check_batch(usage, 1, 1, without_files), Ok(vec![batch(1)]));
    let below = FileUsage { batches: limit - 1, ..usage };
    assert_eq!(decide::check_batch(below, 1, 1, without_files), Ok(Vec::new()));
    let full = FileUsage { batches: 2, parts: decide::FILE_PARTS_PER_TENANT_MAX, ..usage };
    assert_eq!(decide::check_batch(full, 6, 1, without_files), Ok(vec![batch(1), batch(2)]));
    assert!(matches!(
        decide::check_batch(full, 11, 1, without_files),
        Err(SubmissionError::FileParts { .. })
    ));

    let mut history = History::new(30);
    let without_files = |history: &History| history.queue.batches().without_files("a").count();
    assert_eq!(without_files(&history), 0, "it is unfinished");
    let taken = history.take("m0");
    history.computed(taken[0]);
    history.append(JobRecord::BatchCancelled { id: BATCH, at: history.now });
    history.finalize();
    for id in [BatchFileId::Output(BATCH), BatchFileId::Errors(BATCH)] {
        assert_eq!(without_files(&history), 0, "it has a file");
        history.append(JobRecord::FileDeleted { tenant: "a".to_owned(), id });
    }
    assert_eq!(without_files(&history), 1);
    assert!(history.queue.batches().ranges_of_batch(BATCH).is_empty(), "nothing is left to erase");
}

#[test]
fn a_batch_counts_its_lines_and_ends_with_its_last_chunk() {
    let mut history = History::new(6);
    assert_eq!(history.phase(), BatchPhase::InProgress);
    assert_eq!(history.queue.usage("a").jobs, u64::from(history.progress().open));
    let list = JobFilter { tenant: Some("a".to_owned()), ..JobFilter::default() };
    assert_eq!(decide::list(&history.queue, &list, 10).len(), 0, "chunks are in no list of jobs");
    assert_eq!(decide::list(&history.queue, &JobFilter::default(), 10).len(), 0);
    assert_eq!(history.progress().started, None);
    let mut late = None;
    while history.progress().open > 0 {
        for deployment in ["m0", "m1"] {
            for taken in history.take(deployment) {
                assert!(history.progress().started.is_some());
                assert_eq!(history.computed((taken.0, taken.1 + 9)), RecordEffect::Ignored, "another token");
                assert_eq!(history.computed(taken), RecordEffect::Changed);
                assert_eq!(history.computed(taken), RecordEffect::Ignored, "a chunk has one result");
                late = Some(taken);
            }
        }
    }
    assert_eq!((history.phase(), history.queue.len()), (BatchPhase::Finalizing, 0));
    assert!(
        history.queue.batches().written("a", BATCH, false).is_none(),
        "files exist when the batch has ended"
    );
    assert_eq!(history.finalize(), RecordEffect::Changed);
    assert_eq!(history.finalize(), RecordEffect::Ignored);
    assert_eq!(history.phase(), BatchPhase::Completed);
    assert_eq!(history.computed(late.unwrap()), RecordEffect::Ignored);
    let progress = history.progress();
    assert_eq!(progress.completed + progress.failed, 6);
    assert!(history.queue.batches().written("b", BATCH, false).is_none(), "another tenant");

    // Deletion and retention release the objects.
    let delete = |id| JobRecord::FileDeleted { tenant: "a".to_owned(), id };
    let output = history.queue.batches().batch(BATCH).unwrap().parts(false);
    let output = output.values().next().unwrap()[0].object;
    assert!(history.queue.refers_to(output));
    for id in [BatchFileId::Output(BATCH), BatchFileId::Upload(FILE)] {
        assert_eq!(history.append(delete(id)), RecordEffect::FileDeletion(FileDeletion::Deleted));
        assert_eq!(history.append(delete(id)), RecordEffect::FileDeletion(FileDeletion::Unknown));
    }
    assert!(history.queue.refers_to(output), "errors of the same chunk");
    assert_eq!(
        history.append(delete(BatchFileId::Errors(BATCH))),
        RecordEffect::FileDeletion(FileDeletion::Deleted)
    );
    assert!(
        !history.queue.refers_to(output) && !history.queue.refers_to(5000) && !history.queue.refers_to(1)
    );
    let (batches, files) = history.queue.batches().retired(UnixMillis::NEVER, 10);
    assert_eq!((&batches[..], &files[..]), (&[BATCH][..], &[][..]));
    history.append(JobRecord::BatchesRemoved { batches, files });
    assert_eq!(*history.queue.batches(), state::BatchTable::default());
}

#[test]
fn a_file_in_use_is_kept_and_a_batch_of_a_deleted_file_is_not_created() {
    let mut history = History::new(30);
    let delete = JobRecord::FileDeleted { tenant: "a".to_owned(), id: BatchFileId::Upload(FILE) };
    assert_eq!(history.append(delete.clone()), RecordEffect::FileDeletion(FileDeletion::InUse));
    assert_eq!(history.queue.batches().retired(UnixMillis::NEVER, 10), (Vec::new(), Vec::new()));
    history.append(JobRecord::BatchCancelled { id: BATCH, at: history.now });
    assert_eq!(history.queue.len(), 0, "no new chunk starts");
    assert_eq!((history.phase(), history.progress().failed), (BatchPhase::Cancelling, 30));
    assert_eq!(
        history.append(JobRecord::BatchCancelled { id: BATCH, at: history.now }),
        RecordEffect::Ignored
    );
    assert_eq!(history.append(delete.clone()), RecordEffect::FileDeletion(FileDeletion::InUse));
    history.finalize();
    assert_eq!(history.phase(), BatchPhase::Cancelled);
    assert_eq!(history.append(delete), RecordEffect::FileDeletion(FileDeletion::Deleted));
    assert_eq!(history.create(Vec::new(), 1), RecordEffect::Ignored);
}

#[test]
fn a_batch_and_its_jobs_keep_the_residency_policy_of_the_file() {
    let mut history = History::new(6);
    let first = history.queue.batches().batch(BATCH).unwrap().spec.clone();
    let spec = BatchSpec { residency: Some("eu".to_owned()), ..first };
    let chunk = PlannedChunk {
        segment: 0,
        deployment: "m0".to_owned(),
        lines: 1,
        inputs: 1,
        tokens: 1,
        job: DurableJobId::new(UnixMillis(2), 1),
    };
    let second = BatchId(DurableJobId::new(UnixMillis(2), 2));
    let (job, chunks) = (chunk.job, vec![chunk]);
    history.append(JobRecord::BatchCreated { id: second, spec: Box::new(spec.clone()), chunks });
    assert_eq!(history.queue.job(job).unwrap().spec.residency, Some("eu".to_owned()));
    assert_eq!(history.queue.batches().batch(second).unwrap().spec, spec);
}

#[test]
fn a_repeated_file_or_batch_is_the_first_one_until_it_is_deleted() {
    let mut history = History::new(10);
    let key = |request| Some(IdempotencyKey { key: [1; 32], request: [request; 32] });
    let batches = history.queue.batches();
    let file = UploadedFile { idempotency: key(1), ..(**batches.file("a", FILE).unwrap()).clone() };
    let spec = batches.batch(BATCH).unwrap().spec.clone();
    let numbers = [10, 11, 12].map(|number| DurableJobId::new(UnixMillis(2), number));
    let upload = |number: DurableJobId, file: &UploadedFile| JobRecord::FileUploaded {
        id: UploadId(number),
        file: Box::new(file.clone()),
    };
    assert_eq!(history.append(upload(numbers[0], &file)), RecordEffect::Changed);
    let earlier = |same_request| RecordEffect::AlreadyExists { id: numbers[0], same_request };
    assert_eq!(history.append(upload(numbers[1], &file)), earlier(true));
    let other = UploadedFile { idempotency: key(2), ..file.clone() };
    assert_eq!(history.append(upload(numbers[1], &other)), earlier(false));
    let of_another_tenant = UploadedFile { tenant: "b".to_owned(), ..other.clone() };
    assert_eq!(history.append(upload(numbers[2], &of_another_tenant)), RecordEffect::Changed);
    history.restart();
    assert_eq!(history.append(upload(numbers[1], &file)), earlier(true), "after a restart");
    let id = BatchFileId::Upload(UploadId(numbers[0]));
    history.append(JobRecord::FileDeleted { tenant: "a".to_owned(), id });
    assert_eq!(history.append(upload(numbers[1], &other)), RecordEffect::Changed, "the key is forgotten");

    let key = |request| Some(IdempotencyKey { key: [3; 32], request: [request; 32] });
    let create = |number: DurableJobId, request| JobRecord::BatchCreated {
        id: BatchId(number),
        spec: Box::new(BatchSpec { idempotency: key(request), ..spec.clone() }),
        chunks: Vec::new(),
    };
    assert_eq!(history.append(create(numbers[0], 1)), RecordEffect::Changed);
    history.restart();
    assert_eq!(history.append(create(numbers[1], 1)), earlier(true));
    assert_eq!(history.append(create(numbers[1], 2)), earlier(false));
    assert_eq!(history.queue.batches().batches_of("a", None).count(), 2);
}

#[test]
fn the_tokens_of_unfinished_batches_are_limited() {
    let mut history = History::new(10);
    let limits =
        QueueLimits { tenant_jobs: 99, tenant_bytes: 9999, tenant_batch_tokens: 100, age: Duration::MAX };
    let file = history.queue.batches().file("a", FILE).unwrap();
    let chunks = state::plan(file, JobOperation::Embeddings, || DurableJobId::FIRST);
    // Seven for each of the nine valid lines.
    assert_eq!(history.queue.usage("a").batch_tokens, 63);
    let check = |usage, tokens| {
        let limits = QueueLimits { tenant_batch_tokens: tokens, ..limits };
        decide::check_batch_work(usage, &limits, &chunks, 1).map_err(|error| error.to_string())
    };
    let usage = history.queue.usage("a");
    assert_eq!(check(usage, 126), Ok(()));
    let rejected = check(usage, 125).unwrap_err();
    assert!(rejected.starts_with("your unfinished batches have some 126 tokens with this one"), "{rejected}");
    let rejected = check(TenantUsage::default(), 62).unwrap_err();
    assert!(rejected.starts_with("it has some 63 tokens, and the limit"), "{rejected}");
    history.append(JobRecord::BatchCancelled { id: BATCH, at: history.now });
    assert_eq!(history.queue.usage("a"), TenantUsage::default(), "a batch that has ended does not count");
}

#[test]
fn a_record_of_a_version_without_batches_is_read() {
    let text = r#"{"submitted": {"id": "job_00000000000000000000000000", "spec": {"tenant": "a", "deployment": "m",
        "operation": "embeddings", "priority": "bulk", "inputs": 1, "payload": {"object": 1, "offset": 0, "length": 1},
        "deadline": null, "start_by": null, "idempotency": null, "webhook": null}}}"#;
    let JobRecord::Submitted { spec, .. } = serde_json::from_str(text).unwrap() else {
        panic!("another record")
    };
    assert_eq!((spec.chunk, &spec.residency), (None, &None));
    let written = serde_json::to_string(&spec).unwrap();
    assert!(
        !written.contains("chunk") && !written.contains("residency"),
        "an older version reads it as well"
    );
}

#[derive(Debug, Clone)]
enum Step {
    Take(bool),
    Compute(usize),
    Fail(usize),
    Reject(usize),
    Wait(u64),
    Cancel,
    Restart,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => any::<bool>().prop_map(Step::Take),
        6 => (0usize..8).prop_map(Step::Compute),
        3 => (0usize..8).prop_map(Step::Fail),
        1 => (0usize..8).prop_map(Step::Reject),
        2 => (0u64..60_000).prop_map(Step::Wait),
        1 => Just(Step::Restart),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]
    #[test]
    fn each_line_is_counted_once_in_any_history(
        lines in 1usize..60,
        steps in prop::collection::vec(step(), 0..80),
        cancels in any::<bool>(),
    ) {
        let mut history = History::new(lines);
        let mut taken = Vec::new();
        let last = if cancels { Step::Cancel } else { Step::Wait(2_000_000) };
        for step in steps.into_iter().chain([last]) {
            match step {
                Step::Take(first) => taken.extend(history.take(if first { "m0" } else { "m1" })),
                Step::Compute(at) => {
                    if let Some(taken) = taken.get(at) {
                        history.computed(*taken);
                    }
                }
                Step::Fail(at) | Step::Reject(at) => {
                    if let Some((id, token)) = taken.get(at).copied()
                        && let Some(job) = history.queue.job(id)
                    {
                        let end = match step {
                            Step::Reject(_) => ComputeEnd::Rejected("no".to_owned()),
                            _ => ComputeEnd::Failed("no".to_owned()),
                        };
                        let record = decide::after_computation((id, job), token, end, &POLICY, history.now, 0.5);
                        history.append(record);
                    }
                }
                Step::Wait(millis) => {
                    history.now = history.now.after(Duration::from_millis(millis));
                    history.maintain();
                }
                Step::Cancel => {
                    history.append(JobRecord::BatchCancelled { id: BATCH, at: history.now });
                }
                Step::Restart => history.restart(),
            }
            let BatchProgress { completed, failed, open, .. } = history.progress();
            prop_assert!(completed + failed <= lines as u32);
            prop_assert_eq!(history.queue.len() as u32, open, "each open chunk has a job");
        }
        let progress = history.progress();
        prop_assert_eq!((progress.open, progress.completed + progress.failed), (0, lines as u32));
        history.finalize();
        prop_assert!(history.progress().ended.is_some());
    }
}
