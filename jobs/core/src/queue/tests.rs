//! Histories of a queue: single rules, and random ones in which workers end, are slow, and compete.

use super::*;
use crate::decide::{
    self, AttemptPolicy, ComputeEnd, DeliveryEnd, DeliveryPolicy, JobFilter, JobWorker, QueueLimits,
};
use crate::delivery::{DeliveriesInFlight, DeliveryLimits};
use crate::job::{JobOperation, JobSpec, StoredRange};
use backoff::Backoff;
use proptest::prelude::*;
use regions::Priority;
use std::time::Duration;

const POLICY: AttemptPolicy = AttemptPolicy {
    attempts: 3,
    backoff: Backoff { first: Duration::from_secs(1), max: Duration::from_secs(10) },
};
const DELIVERY: DeliveryPolicy =
    DeliveryPolicy { backoff: POLICY.backoff, retry_for: Duration::from_secs(9) };
const PLACES: DeliveryLimits = DeliveryLimits { total: 20, per_host: 20 };
const LEASE: Duration = Duration::from_secs(30);
const RETENTION: Duration = Duration::from_secs(300);

fn worker(number: u64) -> JobWorker {
    JobWorker { number, lease: LEASE }
}

fn spec(tenant: &str) -> JobSpec {
    JobSpec {
        tenant: tenant.to_owned(),
        deployment: "minilm".to_owned(),
        operation: JobOperation::Embeddings,
        priority: Priority::Bulk,
        inputs: 1,
        payload: StoredRange { object: 1, offset: 0, length: 10 },
        deadline: None,
        start_by: None,
        idempotency: None,
        webhook: None,
        chunk: None,
        residency: None,
        trace: None,
    }
}

/// A queue and its log.
#[derive(Default)]
struct Log {
    queue: DurableJobQueue,
    records: Vec<JobRecord>,
    ids: u64,
}

impl Log {
    fn append(&mut self, record: JobRecord) -> RecordEffect {
        self.records.push(record);
        let entry = &self.records[self.records.len() - 1..];
        self.queue.apply(self.records.len() as u64, entry).pop().unwrap()
    }

    fn submit_at(&mut self, spec: JobSpec, at: UnixMillis) -> DurableJobId {
        self.ids += 1;
        let id = DurableJobId::new(at, self.ids.into());
        assert_eq!(self.append(JobRecord::Submitted { id, spec: Box::new(spec) }), RecordEffect::Submitted);
        id
    }

    fn submit(&mut self, spec: JobSpec) -> DurableJobId {
        self.submit_at(spec, UnixMillis(0))
    }

    fn take(&mut self, number: u64, inputs: u64, at: UnixMillis) -> Vec<DurableJobId> {
        match decide::take(&mut self.queue, "minilm", inputs, &POLICY, worker(number), at) {
            None => Vec::new(),
            Some(record) => match self.append(record) {
                RecordEffect::Leased(jobs) => jobs,
                other => panic!("{other:?}"),
            },
        }
    }

    fn token(&self, id: DurableJobId) -> u64 {
        self.queue.job(id).unwrap().lease().unwrap().token
    }

    fn end(&mut self, id: DurableJobId, token: u64, end: ComputeEnd, at: UnixMillis) -> RecordEffect {
        let job = self.queue.job(id).unwrap();
        self.append(decide::after_computation((id, job), token, end, &POLICY, at, 1.0))
    }

    fn finish(&mut self, id: DurableJobId, at: UnixMillis) -> RecordEffect {
        let range = StoredRange { object: 9, offset: 0, length: 4 };
        self.end(id, self.token(id), ComputeEnd::Computed(range), at)
    }

    fn start_delivery(&mut self, at: UnixMillis) -> Vec<DurableJobId> {
        match decide::take_deliveries(&self.queue, &DeliveriesInFlight::default(), PLACES, worker(1), at) {
            None => Vec::new(),
            Some(record) => match self.append(record) {
                RecordEffect::Leased(jobs) => jobs,
                other => panic!("{other:?}"),
            },
        }
    }

    fn end_delivery(&mut self, id: DurableJobId, end: DeliveryEnd, at: UnixMillis) -> RecordEffect {
        let (job, token) = (self.queue.job(id).unwrap(), self.token(id));
        self.append(decide::after_delivery((id, job), token, end, &DELIVERY, at, 1.0))
    }

    fn cancel(&mut self, id: DurableJobId, at: UnixMillis) -> Cancellation {
        match self.append(JobRecord::CancelRequested { id, at }) {
            RecordEffect::Cancellation(cancellation) => cancellation,
            other => panic!("{other:?}"),
        }
    }

    fn maintain(&mut self, at: UnixMillis) -> usize {
        let records = decide::maintain(&self.queue, &POLICY, RETENTION, at, 100);
        let count = records.len();
        for record in records {
            assert_eq!(self.append(record), RecordEffect::Changed);
        }
        count
    }
}

fn seconds(seconds: u64) -> UnixMillis {
    UnixMillis(1000 * seconds)
}

#[test]
fn totals_and_deployments_follow_the_status_of_jobs() {
    let mut log = Log::default();
    assert_eq!(log.queue.totals(), QueueTotals::default());
    let first = log.submit_at(spec("a"), UnixMillis(5));
    log.submit_at(JobSpec { deployment: "other".to_owned(), ..spec("a") }, UnixMillis(9));
    let totals = QueueTotals { queued: 2, oldest: Some(UnixMillis(5)), ..QueueTotals::default() };
    assert_eq!(log.queue.totals(), totals);
    let startable = |log: &mut Log, at| decide::startable_deployments(&mut log.queue, &POLICY, at);
    assert_eq!(Vec::from_iter(startable(&mut log, UnixMillis(10))), ["minilm", "other"]);
    assert_eq!(log.take(1, 1, UnixMillis(10)), [first]);
    assert_eq!(log.queue.totals(), QueueTotals { queued: 1, running: 1, ..totals });
    assert_eq!(Vec::from_iter(startable(&mut log, UnixMillis(11))), ["other"]);
    // The worker has ended.
    let later = UnixMillis(10).after(LEASE);
    assert_eq!(Vec::from_iter(startable(&mut log, later)), ["minilm", "other"]);
    log.append(JobRecord::CancelRequested { id: first, at: later });
    let totals =
        QueueTotals { queued: 1, finished: 1, oldest: Some(UnixMillis(9)), ..QueueTotals::default() };
    assert_eq!(log.queue.totals(), totals);
}

#[test]
fn a_job_is_computed_and_delivered_once() {
    let mut log = Log::default();
    let id = log.submit(JobSpec { webhook: Some("https://example.com".to_owned()), ..spec("a") });
    assert_eq!(log.take(1, 10, seconds(1)), [id]);
    assert!(log.take(2, 10, seconds(1)).is_empty() && log.start_delivery(seconds(1)).is_empty());
    assert_eq!(log.finish(id, seconds(2)), RecordEffect::Changed);
    assert_eq!(
        (log.queue.totals().undelivered, log.queue.totals().oldest_undelivered),
        (1, Some(seconds(2)))
    );
    assert_eq!(log.start_delivery(seconds(2)), [id]);
    assert!(log.start_delivery(seconds(3)).is_empty());
    let again = JobRecord::RedeliveryRequested { id, at: seconds(3) };
    assert_eq!(log.append(again), RecordEffect::Ignored, "it is being sent");
    assert_eq!(log.end_delivery(id, DeliveryEnd::Accepted, seconds(3)), RecordEffect::Changed);
    assert!(log.start_delivery(seconds(100)).is_empty());
    assert_eq!(log.queue.totals().undelivered, 0);
    let again = |at| JobRecord::RedeliveryRequested { id, at };
    assert_eq!(log.append(again(seconds(200))), RecordEffect::Changed);
    assert_eq!(log.append(again(seconds(200))), RecordEffect::Ignored, "it is due already");
    assert_eq!(log.start_delivery(seconds(200)), [id]);
    // A request brings the next attempt forward, and begins the time of retries again.
    let failed = DeliveryEnd::Failed { reason: "500".to_owned(), retry_after: Some(Duration::from_secs(60)) };
    log.end_delivery(id, failed, seconds(201));
    assert!(log.start_delivery(seconds(202)).is_empty());
    assert_eq!(log.append(again(seconds(202))), RecordEffect::Changed);
    assert_eq!(log.start_delivery(seconds(202)), [id]);
    // After the end of its sender the result is sent again.
    assert_eq!(log.start_delivery(seconds(202).after(LEASE)), [id]);
    let JobStatus::Finished { delivery: JobDelivery::Sending { progress, .. }, .. } =
        &log.queue.job(id).unwrap().status
    else {
        panic!("it is being sent");
    };
    assert_eq!((progress.attempts, progress.last_error.as_deref()), (1, Some(SENDER_ENDED)));
}

#[test]
fn a_worker_that_lost_its_lease_cannot_finish_a_job() {
    let mut log = Log::default();
    let id = log.submit(spec("a"));
    log.take(1, 10, seconds(0));
    let stale = log.token(id);
    assert!(log.take(2, 10, seconds(29)).is_empty());
    assert_eq!(log.take(2, 10, seconds(30)), [id]);
    let range = StoredRange { object: 9, offset: 0, length: 4 };
    assert_eq!(log.end(id, stale, ComputeEnd::Computed(range), seconds(31)), RecordEffect::Ignored);
    let extension = JobRecord::Extended { jobs: vec![(id, stale)], until: seconds(90) };
    assert_eq!(log.append(extension), RecordEffect::Extended(vec![]));
    let extension = JobRecord::Extended { jobs: vec![(id, log.token(id))], until: seconds(90) };
    assert_eq!(log.append(extension), RecordEffect::Extended(vec![id]));
    assert!(log.take(1, 10, seconds(89)).is_empty());
    assert_eq!(log.finish(id, seconds(89)), RecordEffect::Changed);
}

#[test]
fn a_job_that_ends_its_workers_is_set_aside() {
    let mut log = Log::default();
    let id = log.submit(spec("a"));
    for attempt in 0..3 {
        assert_eq!(log.take(1, 10, seconds(30 * attempt)), [id]);
    }
    assert!(log.take(1, 10, seconds(90)).is_empty());
    assert_eq!(log.maintain(seconds(90)), 1);
    let JobStatus::Finished { outcome: JobOutcome::Failed { reason }, .. } =
        &log.queue.job(id).unwrap().status
    else {
        panic!()
    };
    assert!(reason.starts_with("3 attempts, in the last of which the worker ended"), "{reason}");
}

#[test]
fn missing_capacity_is_no_attempt() {
    let mut log = Log::default();
    let id = log.submit(spec("a"));
    for round in 0..10 {
        assert_eq!(log.take(1, 10, seconds(10 * round)), [id]);
        let retry_after = Duration::from_secs(5);
        let end = ComputeEnd::NoCapacity { reason: "full".to_owned(), retry_after };
        log.end(id, log.token(id), end, seconds(10 * round));
        assert!(log.take(1, 10, seconds(10 * round + 4)).is_empty(), "pause");
    }
    let failures = (1..=3).map(|round| {
        assert_eq!(log.take(1, 10, seconds(100 * round)), [id]);
        log.end(id, log.token(id), ComputeEnd::Failed("reset".to_owned()), seconds(100 * round));
        JobPhase::of(log.queue.job(id).unwrap())
    });
    use crate::job::JobPhase::{Failed, Queued};
    assert_eq!(failures.collect::<Vec<_>>(), [Queued, Queued, Failed]);
}

#[test]
fn a_confirmed_cancellation_prevents_delivery() {
    let mut log = Log::default();
    let webhook = || JobSpec { webhook: Some("https://example.com".to_owned()), ..spec("a") };
    let ids = [(); 4].map(|()| log.submit(webhook()));
    assert_eq!(log.cancel(ids[0], seconds(0)), Cancellation::Confirmed);
    assert_eq!(log.cancel(ids[0], seconds(0)), Cancellation::AlreadyCancelled);
    assert_eq!(log.take(1, 10, seconds(0)), &ids[1..]);
    let token = log.token(ids[1]);
    assert_eq!(log.cancel(ids[1], seconds(1)), Cancellation::Confirmed);
    let range = StoredRange { object: 9, offset: 0, length: 4 };
    assert_eq!(log.end(ids[1], token, ComputeEnd::Computed(range), seconds(1)), RecordEffect::Ignored);
    log.finish(ids[2], seconds(1));
    assert_eq!(log.cancel(ids[2], seconds(1)), Cancellation::Confirmed);
    log.finish(ids[3], seconds(1));
    assert_eq!(log.start_delivery(seconds(1)), [ids[3]]);
    assert_eq!(log.cancel(ids[3], seconds(1)), Cancellation::BeingDelivered);
    log.end_delivery(ids[3], DeliveryEnd::Failed { reason: "500".to_owned(), retry_after: None }, seconds(2));
    assert_eq!(log.cancel(ids[3], seconds(2)), Cancellation::Confirmed);
    assert!(log.start_delivery(seconds(100)).is_empty());
    assert_eq!(log.cancel(DurableJobId::new(seconds(1), 0), seconds(2)), Cancellation::Unknown);
}

#[test]
fn a_webhook_is_tried_for_a_time_and_410_ends_it() {
    let mut log = Log::default();
    let ids = [(); 2]
        .map(|()| log.submit(JobSpec { webhook: Some("https://example.com".to_owned()), ..spec("a") }));
    log.take(1, 10, seconds(0));
    for id in ids {
        log.finish(id, seconds(0));
    }
    log.start_delivery(seconds(0));
    assert_eq!(log.end_delivery(ids[1], DeliveryEnd::Gone, seconds(0)), RecordEffect::Changed);
    let failed = |retry_after| DeliveryEnd::Failed { reason: "refused".to_owned(), retry_after };
    log.end_delivery(ids[0], failed(Some(Duration::from_secs(7))), seconds(0));
    assert!(log.start_delivery(seconds(6)).is_empty());
    assert_eq!(log.start_delivery(seconds(7)), [ids[0]]);
    log.end_delivery(ids[0], failed(None), seconds(7));
    assert_eq!(log.start_delivery(seconds(9)), [ids[0]]);
    log.end_delivery(ids[0], failed(None), seconds(9));
    let delivery = |id| match &log.queue.job(id).unwrap().status {
        JobStatus::Finished { delivery, .. } => delivery.clone(),
        other => panic!("{other:?}"),
    };
    let reason = "all 3 attempts failed; the last one: refused".to_owned();
    assert_eq!(delivery(ids[0]), JobDelivery::Abandoned { reason, attempts: 3 });
    let reason = "the target responded 410 Gone".to_owned();
    assert_eq!(delivery(ids[1]), JobDelivery::Stopped { reason, attempts: 1 });
}

#[test]
fn jobs_expire_in_the_queue_and_at_their_deadline() {
    let mut log = Log::default();
    let queued = log.submit(JobSpec { start_by: Some(seconds(5)), ..spec("a") });
    let started = log.submit(JobSpec { start_by: Some(seconds(5)), ..spec("a") });
    let late = log.submit(JobSpec { deadline: Some(seconds(8)), ..spec("a") });
    assert_eq!(log.take(1, 1, seconds(1)), [late], "the earliest deadline is first");
    assert_eq!(log.take(1, 1, seconds(1)), [queued]);
    log.end(queued, log.token(queued), ComputeEnd::Failed("reset".to_owned()), seconds(1));
    assert_eq!(log.take(1, 1, seconds(1)), [started]);
    assert_eq!(log.maintain(seconds(4)), 0);
    assert_eq!(log.maintain(seconds(5)), 1);
    assert!(log.take(1, 9, seconds(6)).is_empty());
    assert_eq!(log.finish(started, seconds(7)), RecordEffect::Changed, "it began in time");
    let token = log.token(late);
    assert_eq!(log.maintain(seconds(8)), 1);
    let range = StoredRange { object: 9, offset: 0, length: 4 };
    assert_eq!(log.end(late, token, ComputeEnd::Computed(range), seconds(8)), RecordEffect::Ignored);
    let phases = [queued, started, late].map(|id| JobPhase::of(log.queue.job(id).unwrap()));
    use crate::job::JobPhase::{Expired, Succeeded};
    assert_eq!(phases, [Expired, Succeeded, Expired]);
}

#[test]
fn an_idempotency_key_returns_the_same_job() {
    let mut log = Log::default();
    let keyed = |tenant: &str, request| JobSpec {
        idempotency: Some(IdempotencyKey { key: [1; 32], request: [request; 32] }),
        ..spec(tenant)
    };
    let id = log.submit(keyed("a", 1));
    log.submit(keyed("b", 1));
    for (request, same_request) in [(1, true), (2, false)] {
        let again = JobRecord::Submitted {
            id: DurableJobId::new(seconds(1), request.into()),
            spec: Box::new(keyed("a", request)),
        };
        assert_eq!(log.append(again), RecordEffect::AlreadyExists { id, same_request });
    }
    assert_eq!(log.queue.jobs().count(), 2);
    log.take(1, 1, seconds(0));
    log.finish(id, seconds(0));
    assert_eq!(log.maintain(seconds(300)), 1);
    assert!(log.queue.job(id).is_none() && !log.queue.refers_to(9) && log.queue.refers_to(1));
    log.submit(keyed("a", 2));
}

#[test]
fn tenants_share_a_deployment_whatever_they_submit() {
    let mut log = Log::default();
    let many: Vec<_> = (0..100).map(|_| log.submit(JobSpec { inputs: 10, ..spec("many") })).collect();
    let position = log.queue.position(many[40]).unwrap();
    assert_eq!((position.jobs, position.inputs, position.tenants), (40, 400, 1));
    assert_eq!(decide::start_estimate(&position, 100.0), Some(Duration::from_secs(4)));
    assert_eq!(decide::start_estimate(&position, 0.0), None);
    log.take(1, 50, seconds(0));
    // This tenant submits its next job when the last one has started, and has half of the inputs all the same.
    let mut started = [0u64; 2];
    let mut one = log.submit(JobSpec { inputs: 10, ..spec("one") });
    for _ in 0..40 {
        for id in log.take(1, 10, seconds(0)) {
            started[usize::from(id == one)] += 1;
            if id == one {
                one = log.submit(JobSpec { inputs: 10, ..spec("one") });
            }
        }
    }
    assert!(started[0].abs_diff(started[1]) <= 1, "{started:?}");
    let urgent = log.submit(JobSpec { priority: Priority::Interactive, ..spec("many") });
    assert_eq!(log.take(1, 1, seconds(0)), [urgent]);
    assert_eq!(log.queue.position(urgent), None);
}

#[test]
fn limits_apply_to_unfinished_jobs_of_a_tenant() {
    let limits = QueueLimits {
        tenant_jobs: 2,
        tenant_bytes: 25,
        tenant_batch_tokens: 0,
        age: Duration::from_secs(100),
    };
    let mut log = Log::default();
    let check = |log: &Log, spec: &JobSpec| {
        let (usage, bytes) = (log.queue.usage(&spec.tenant), spec.payload.length);
        decide::check_submission(usage, &limits, spec, bytes, seconds(10)).map_err(|error| error.to_string())
    };
    let id = log.submit(spec("a"));
    log.submit(spec("a"));
    let full = "you have 2 unfinished jobs, and the limit is 2: wait until some are finished, or cancel some";
    assert_eq!(check(&log, &spec("a")), Err(full.to_owned()));
    assert_eq!(check(&log, &spec("b")), Ok(()));
    log.cancel(id, seconds(1));
    assert_eq!(check(&log, &spec("a")), Ok(()));
    let large = JobSpec { payload: StoredRange { object: 1, offset: 0, length: 16 }, ..spec("a") };
    assert!(check(&log, &large).unwrap_err().starts_with("your unfinished jobs have 26 bytes"));
    let past = JobSpec { deadline: Some(seconds(10)), ..spec("b") };
    assert_eq!(check(&log, &past), Err("`deadline` is not in the future".to_owned()));
    let late = JobSpec { start_by: Some(seconds(111)), ..spec("b") };
    assert_eq!(check(&log, &late), Err("`max_time_in_queue` is more than 100 s in the future".to_owned()));
}

#[test]
fn records_of_an_entry_are_applied_in_order() {
    let (mut queue, id) = (DurableJobQueue::default(), DurableJobId::new(seconds(1), 1));
    let submitted = JobRecord::Submitted { id, spec: Box::new(spec("a")) };
    let cancelled = JobRecord::CancelRequested { id, at: seconds(1) };
    let effects = queue.apply(5, &[submitted.clone(), submitted, cancelled.clone()]);
    let cancellation = RecordEffect::Cancellation(Cancellation::Confirmed);
    assert_eq!(effects, [RecordEffect::Submitted, RecordEffect::Ignored, cancellation]);
    assert_eq!(queue.apply(5, &[cancelled]), [RecordEffect::Ignored]);
    assert_eq!((queue.applied(), queue.len()), (5, 1));
}

#[test]
fn lists_are_filtered_and_paged() {
    let mut log = Log::default();
    let ids: Vec<_> =
        (0..6).map(|at| log.submit_at(spec(["a", "b"][at as usize % 2]), seconds(at))).collect();
    log.cancel(ids[2], seconds(9));
    let list = |filter: JobFilter| -> Vec<_> {
        decide::list(&log.queue, &filter, 2).into_iter().map(|(id, _)| id).collect()
    };
    assert_eq!(list(JobFilter::default()), [ids[5], ids[4]]);
    assert_eq!(list(JobFilter { before: Some(ids[4]), ..JobFilter::default() }), [ids[3], ids[2]]);
    let of_a = JobFilter { tenant: Some("a".to_owned()), ..JobFilter::default() };
    assert_eq!(list(JobFilter { status: Some(JobPhase::Queued), ..of_a.clone() }), [ids[4], ids[0]]);
    assert_eq!(list(JobFilter { since: Some(seconds(3)), ..of_a.clone() }), [ids[4]]);
    assert_eq!(list(of_a.clone()), [ids[4], ids[2]], "of two statuses, the newest first");
    assert_eq!(list(JobFilter { before: Some(ids[4]), ..of_a.clone() }), [ids[2], ids[0]]);
    let until = |time| JobFilter { before: Some(DurableJobId::first_at(time)), ..of_a.clone() };
    assert_eq!(list(until(seconds(4))), [ids[2], ids[0]], "not those of this time");
    assert_eq!(list(until(UnixMillis::NEVER)), [ids[4], ids[2]], "a time beyond all identifiers");
    let other = log.submit_at(JobSpec { deployment: "other".to_owned(), ..spec("a") }, seconds(7));
    let list = |deployment: &str, tenant: Option<&str>| -> Vec<_> {
        let (deployment, tenant) = (Some(deployment.to_owned()), tenant.map(str::to_owned));
        let filter = JobFilter { deployment, tenant, ..JobFilter::default() };
        decide::list(&log.queue, &filter, 2).into_iter().map(|(id, _)| id).collect()
    };
    assert_eq!(list("other", Some("a")), [other]);
    assert_eq!(list("minilm", Some("a")), [ids[4], ids[2]]);
    assert_eq!(list("minilm", None), [ids[5], ids[4]]);
    assert_eq!(list("none", Some("a")), []);
}

/// One step of a random history: each number selects among what exists at that time.
#[derive(Debug, Clone)]
enum Step {
    Submit {
        tenant: u8,
        webhook: bool,
        inputs: u64,
        deadline: Option<u64>,
    },
    Take {
        worker: u64,
        inputs: u64,
    },
    /// A worker reports on a lease that it once had, which may have ended.
    End {
        lease: usize,
        how: u8,
    },
    Cancel {
        job: usize,
    },
    Deliver {
        worker: u64,
    },
    Maintain,
    Wait {
        seconds: u64,
    },
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0u8..3, any::<bool>(), 0u64..20, prop::option::of(1u64..200)).prop_map(
            |(tenant, webhook, inputs, deadline)| Step::Submit { tenant, webhook, inputs, deadline }
        ),
        4 => (0u64..3, 1u64..40).prop_map(|(worker, inputs)| Step::Take { worker, inputs }),
        6 => (any::<usize>(), 0u8..4).prop_map(|(lease, how)| Step::End { lease, how }),
        1 => any::<usize>().prop_map(|job| Step::Cancel { job }),
        2 => (0u64..3).prop_map(|worker| Step::Deliver { worker }),
        1 => Just(Step::Maintain),
        3 => (1u64..40).prop_map(|seconds| Step::Wait { seconds }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// Invariant 10: each job is finished once, a result belongs to a lease that has not been replaced, and nothing is
    /// sent after a confirmed cancellation. The log restores the same queue, from the start or from any snapshot.
    #[test]
    fn random_histories_keep_the_invariants(steps in prop::collection::vec(step(), 1..120), cut: prop::sample::Index) {
        let mut log = Log::default();
        let mut now = UnixMillis(0);
        let mut ids: Vec<DurableJobId> = Vec::new();
        // Leases: job, token, end, whether for delivery.
        let mut leases: Vec<(DurableJobId, u64, UnixMillis, bool)> = Vec::new();
        let (mut cancelled, mut finished) = (BTreeSet::new(), BTreeSet::new());
        for step in steps {
            match step {
                Step::Submit { tenant, webhook, inputs, deadline } => {
                    let spec = JobSpec {
                        webhook: webhook.then(|| "https://example.com".to_owned()),
                        inputs,
                        deadline: deadline.map(|after| now.after(Duration::from_secs(after))),
                        ..spec(&format!("tenant {tenant}"))
                    };
                    ids.push(log.submit_at(spec, now));
                }
                Step::Take { worker, inputs } => {
                    for id in log.take(worker, inputs, now) {
                        let others = leases.iter().filter(|(job, _, until, _)| *job == id && *until > now);
                        prop_assert!(others.count() == 0 || !log.queue.job(id).unwrap().is_finished());
                        leases.push((id, log.token(id), now.after(LEASE), false));
                    }
                }
                Step::End { lease, how } => {
                    if leases.is_empty() {
                        continue;
                    }
                    let (id, token, _, delivers) = leases[lease % leases.len()];
                    let Some(job) = log.queue.job(id) else { continue };
                    let current = job.lease().is_some_and(|lease| lease.token == token);
                    let before = job.clone();
                    let effect = if delivers {
                        let end = match how {
                            0 => DeliveryEnd::Accepted,
                            1 => DeliveryEnd::Gone,
                            _ => DeliveryEnd::Failed { reason: "500".to_owned(), retry_after: None },
                        };
                        let record = decide::after_delivery((id, job), token, end, &DELIVERY, now, 0.5);
                        log.append(record)
                    } else {
                        let retry_after = Duration::from_secs(1);
                        let end = match how {
                            0 => ComputeEnd::Computed(StoredRange { object: 2, offset: 0, length: 1 }),
                            1 => ComputeEnd::Rejected("bad".to_owned()),
                            2 => ComputeEnd::Failed("reset".to_owned()),
                            _ => ComputeEnd::NoCapacity { reason: "full".to_owned(), retry_after },
                        };
                        log.end(id, token, end, now)
                    };
                    prop_assert_eq!(effect == RecordEffect::Changed, current);
                    if !current {
                        prop_assert_eq!(log.queue.job(id), Some(&before));
                    } else if !delivers && log.queue.job(id).unwrap().is_finished() {
                        prop_assert!(finished.insert(id), "finished twice");
                    }
                }
                Step::Cancel { job } => {
                    if ids.is_empty() {
                        continue;
                    }
                    let id = ids[job % ids.len()];
                    if log.cancel(id, now) == Cancellation::Confirmed {
                        cancelled.insert(id);
                    }
                }
                Step::Deliver { worker: number } => {
                    let (none, limits) = (DeliveriesInFlight::default(), DeliveryLimits { total: 4, per_host: 4 });
                    if let Some(record) = decide::take_deliveries(&log.queue, &none, limits, worker(number), now)
                        && let RecordEffect::Leased(jobs) = log.append(record)
                    {
                        for id in jobs {
                            prop_assert!(!cancelled.contains(&id), "sent after a confirmed cancellation");
                            leases.push((id, log.token(id), now.after(LEASE), true));
                        }
                    }
                }
                Step::Maintain => {
                    log.maintain(now);
                }
                Step::Wait { seconds } => now = now.after(Duration::from_secs(seconds)),
            }
            let unfinished = log.queue.jobs().filter(|(_, job)| !job.is_finished());
            let usage: u64 = (0..3).map(|tenant| log.queue.usage(&format!("tenant {tenant}")).jobs).sum();
            prop_assert_eq!(unfinished.count() as u64, usage);
        }

        // The same log, in two parts, through the encoding that the shells store.
        let encode = |records: &[JobRecord]| serde_json::to_string(records).unwrap();
        let read: Vec<JobRecord> = serde_json::from_str(&encode(&log.records)).unwrap();
        let at = cut.index(read.len() + 1);
        let mut first = DurableJobQueue::default();
        for (index, record) in read[..at].iter().enumerate() {
            first.apply(index as u64 + 1, std::slice::from_ref(record));
        }
        let jobs: Vec<_> = first.jobs().map(|(id, job)| (id, job.clone())).collect();
        let snapshot: Vec<(DurableJobId, DurableJob)> =
            serde_json::from_str(&serde_json::to_string(&jobs).unwrap()).unwrap();
        let mut restored = DurableJobQueue::restore(snapshot, first.applied());
        for (index, record) in read.iter().enumerate() {
            restored.apply(index as u64 + 1, std::slice::from_ref(record));
        }
        prop_assert!(restored.jobs().eq(log.queue.jobs()));

        // A tenant's list, which is read from an index, is what a search of all jobs finds.
        for tenant in (0..3).map(|tenant| format!("tenant {tenant}")) {
            for status in JobPhase::ALL.map(Some).into_iter().chain([None]) {
                let deployment = status.map(|_| "minilm".to_owned());
                let filter = JobFilter { tenant: Some(tenant.clone()), status, deployment, ..JobFilter::default() };
                let found = decide::list(&restored, &filter, 1000).into_iter().map(|(id, _)| id);
                let of_tenant = restored.newest(None).filter(|(_, job)| job.spec.tenant == tenant);
                let all = of_tenant.filter(|(_, job)| status.is_none_or(|status| JobPhase::of(job) == status));
                prop_assert!(found.eq(all.map(|(id, _)| id)), "{filter:?}");
            }
        }

        // All that is left ends when the workers return: nothing is lost.
        for _ in 0..400 {
            now = now.after(Duration::from_secs(31));
            for id in log.take(1, 1000, now) {
                log.finish(id, now);
            }
            log.maintain(now);
        }
        prop_assert_eq!(log.queue.jobs().filter(|(_, job)| !job.is_finished()).count(), 0);
    }
}
