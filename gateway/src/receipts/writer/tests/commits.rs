//! Write-ahead receipts, and disks that fail.

use super::*;
use crate::receipts::write_ahead::Sending;
use crate::receipts::{CommitFailed, Recorder};
use gateway_core::outcome::AttemptFailure;
use tokio::sync::oneshot;

/// Attempt with its write-ahead message, and its record when it has ended.
struct WriteAheadAttempt {
    message: WriterMessage,
    durable: oneshot::Receiver<bool>,
    finished: Arc<FinishedRequest>,
}

impl Fixture {
    fn write_ahead(&self, request: &str, end: AttemptEnd) -> WriteAheadAttempt {
        let WriterMessage::Finished(finished) = self.finished(request, 1, "eu") else {
            panic!("a request of a gateway")
        };
        let FinishedRequest { id, at_ms, tls_ended_here, tenant, trail, resolved, .. } = &*finished;
        let attempt = trail.attempts().next().unwrap().clone();
        let resolved = resolved.as_ref().unwrap();
        let sending = Sending {
            number: attempt.key,
            request: id.clone(),
            attempt: 1,
            tenant: tenant.clone().unwrap(),
            deployment: resolved.deployment.clone(),
            policy: resolved.policy.clone(),
            tls_ended_here: *tls_ended_here,
            region: attempt.region,
            at_ms: *at_ms,
            cause: attempt.cause,
        };
        let (reply, durable) = oneshot::channel();
        let message = WriterMessage::WriteAhead(Box::new(WriteAhead::Sending(sending)), reply);
        let mut trail = Trail::default();
        let index = trail.began(attempt.region, None, attempt.cause, attempt.key, attempt.began);
        trail.ended(index, end, attempt.began);
        let finished = Arc::new(FinishedRequest {
            id: id.clone(),
            trail,
            tenant: tenant.clone(),
            resolved: Some(ResolvedRequest {
                deployment: resolved.deployment.clone(),
                cost: resolved.cost,
                policy: resolved.policy.clone(),
            }),
            arrived: finished.arrived,
            at_ms: *at_ms,
            tls_ended_here: *tls_ended_here,
            endpoint: finished.endpoint,
            outcome: finished.outcome,
            routed_at: None,
            served_by: None,
            tokens: None,
            total: finished.total,
            receipt: None,
            trace: None,
        });
        WriteAheadAttempt { message, durable, finished }
    }

    fn text(&self) -> String {
        self.files().iter().map(|file| fs::read_to_string(file).unwrap()).collect()
    }
}

#[test]
fn waiting_requests_are_notified_when_their_receipts_are_durable_and_share_one_fsync() {
    let fixture = Fixture::new(1 << 20);
    let mut writer = fixture.open();
    let before = fixture.shared.counts.syncs.get();
    let mut waiting: Vec<_> = (0..50)
        .map(|number| fixture.write_ahead(&format!("r{number}"), AttemptEnd::Responded { status: 200 }))
        .collect();
    let (mut messages, mut ended) = (Vec::new(), Vec::new());
    for WriteAheadAttempt { message, durable, finished } in waiting.drain(..) {
        messages.push(message);
        ended.push((durable, finished));
    }
    writer.write(&mut messages);
    assert_eq!(fixture.shared.counts.syncs.get(), before + 1, "fifty requests, one fsync");
    assert_eq!(fixture.text().matches("\"kind\":\"sent\"").count(), 50);
    for (mut durable, finished) in ended {
        assert_eq!(durable.try_recv(), Ok(true));
        messages.push(WriterMessage::Finished(finished));
    }
    writer.write(&mut messages);
    writer.close();
    let text = fixture.text();
    assert_eq!(text.matches("\"kind\":\"outcome\"").count(), 50);
    assert_eq!(text.matches("\"kind\":\"attempt\"").count(), 0, "no receipt is written twice");
    fixture.check(50, &[]);
    assert_eq!(fixture.report().without_outcome, 0);
}

#[test]
fn on_a_full_disk_waiting_requests_are_rejected_and_no_receipt_is_missing() {
    let fixture = Fixture::new(1 << 20);
    let mut writer = fixture.open();
    // /dev/full fails every write with ENOSPC.
    let file = writer.file.replace(OpenOptions::new().append(true).open("/dev/full").unwrap());
    let end = AttemptEnd::Failed(AttemptFailure::ReceiptUnavailable);
    let WriteAheadAttempt { message, mut durable, finished } = fixture.write_ahead("a", end);
    writer.write(&mut vec![message]);
    assert_eq!(durable.try_recv(), Ok(false));
    assert!(fixture.shared.failing());
    fixture.shared.reject();
    writer.write(&mut vec![WriterMessage::Finished(finished)]);
    assert_eq!(
        fixture.shared.counts.lost.of(GapReason::Disk).get(),
        0,
        "the request was not sent, so no receipt is missing"
    );
    writer.file = file;
    // The writer recovers by itself: rejected requests are recorded with the next successful write.
    writer.write(&mut Vec::new());
    assert!(!fixture.shared.failing());
    let WriteAheadAttempt { message, mut durable, finished } =
        fixture.write_ahead("b", AttemptEnd::Responded { status: 200 });
    writer.write(&mut vec![message]);
    assert_eq!(durable.try_recv(), Ok(true));
    writer.write(&mut vec![WriterMessage::Finished(finished)]);
    writer.close();
    fixture.check(1, &[]);
    assert_eq!((fixture.report().rejected, fixture.report().missing), (1, 0));
}

#[test]
fn a_receipt_that_failed_to_sync_is_not_durable() {
    let fixture = Fixture::new(1 << 20);
    let mut writer = fixture.open();
    // A pipe accepts writes and cannot be synced.
    let (_reader, pipe) = io::pipe().unwrap();
    writer.file = Some(File::from(std::os::fd::OwnedFd::from(pipe)));
    let WriteAheadAttempt { message, mut durable, .. } = fixture.write_ahead("a", AttemptEnd::Cancelled);
    writer.write(&mut vec![message]);
    assert_eq!(durable.try_recv(), Ok(false));
    assert!(fixture.shared.failing());
}

/// Starts a recorder over a directory of its own.
fn recorder(fixture: &Fixture) -> (Recorder, super::super::super::WriterHandle) {
    let config = ReceiptsConfig { required: true, queue: 64, ..fixture.config.clone() };
    let regions = fixture.catalogue.iter().map(|(_, region)| region.id.clone()).collect();
    Recorder::start(&config, Role::Edge, &"aws/us-east-1".parse().unwrap(), regions).unwrap()
}

#[tokio::test]
async fn a_receipt_is_on_disk_before_its_request_is_forwarded_and_none_is_accepted_after_the_end() {
    let fixture = Fixture::new(1 << 20);
    let (recorder, writer) = recorder(&fixture);
    let started = Instant::now();
    let rounds = 20;
    for round in 0..rounds {
        let WriterMessage::WriteAhead(entry, _) =
            fixture.write_ahead(&format!("r{round}"), AttemptEnd::Cancelled).message
        else {
            panic!("it waits")
        };
        assert_eq!(recorder.commit(*entry).await, Ok(()));
        assert_eq!(
            fixture.text().matches("\"kind\":\"sent\"").count(),
            round + 1,
            "the receipt is in the file"
        );
    }
    println!("{:?} for each of {rounds} receipts, one after the other", started.elapsed() / rounds as u32);
    writer.finish(Duration::from_secs(30)).await;
    let WriterMessage::WriteAhead(entry, _) = fixture.write_ahead("late", AttemptEnd::Cancelled).message
    else {
        panic!("it waits")
    };
    assert_eq!(recorder.commit(*entry).await, Err(CommitFailed), "the chain has ended");
    let report = fixture.report();
    assert!(report.holds && report.chains[0].closed, "{report:#?}");
    assert_eq!(report.without_outcome, rounds as u64);
}

#[tokio::test]
async fn concurrent_requests_share_fsyncs() {
    let fixture = Arc::new(Fixture::new(1 << 20));
    let (recorder, writer) = recorder(&fixture);
    let (callers, rounds) = (64, 20);
    let started = Instant::now();
    let mut tasks = tokio::task::JoinSet::new();
    for caller in 0..callers {
        let (fixture, recorder) = (fixture.clone(), recorder.clone());
        tasks.spawn(async move {
            for round in 0..rounds {
                let WriterMessage::WriteAhead(entry, _) =
                    fixture.write_ahead(&format!("{caller}-{round}"), AttemptEnd::Cancelled).message
                else {
                    panic!("it waits")
                };
                recorder.commit(*entry).await.unwrap();
            }
        });
    }
    while let Some(ended) = tasks.join_next().await {
        ended.unwrap();
    }
    let took = started.elapsed();
    let (commits, syncs) = (callers * rounds, recorder.shared.counts.syncs.get());
    writer.finish(Duration::from_secs(30)).await;
    println!(
        "{commits} receipts by {callers} callers in {took:?}: {:.0} a second, {syncs} fsyncs",
        commits as f64 / took.as_secs_f64()
    );
    assert!(syncs < commits / 4, "{syncs} fsyncs for {commits} receipts");
    assert_eq!(fixture.report().attempts, commits);
}

#[tokio::test]
async fn a_chain_closes_when_its_owner_finishes_even_if_recorders_remain() {
    let fixture = Fixture::new(1 << 20);
    let (recorder, writer) = recorder(&fixture);
    let another = recorder.clone();
    recorder.record(fixture.finished("a", 1, "eu"), None);
    let started = Instant::now();
    writer.finish(Duration::from_secs(60)).await;
    assert!(started.elapsed() < Duration::from_secs(30), "{:?}", started.elapsed());
    fixture.check(1, &[]);
    assert!(fixture.report().chains[0].closed, "the earlier receipts and the closing entry are written");
    another.record(fixture.finished("b", 1, "eu"), None);
    drop((recorder, another));
    fixture.check(1, &[]);
}
