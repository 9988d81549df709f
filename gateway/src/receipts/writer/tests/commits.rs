//! Receipts that are durable before their requests are forwarded, and disks that do not take them.

use super::*;
use crate::receipts::before::Sending;
use crate::receipts::{NoReceipt, Recorder};
use gateway_core::outcome::AttemptFailure;
use tokio::sync::oneshot;

/// An attempt that is about to be made, and what becomes of it when it is over.
struct Awaited {
    told: Told,
    answered: oneshot::Receiver<bool>,
    finished: Arc<Finished>,
}

impl Scene {
    fn awaited(&self, request: &str, end: AttemptEnd) -> Awaited {
        let Told::Sent(finished) = self.told(request, 1, "eu") else { panic!("it is of a gateway") };
        let Finished { id, at_ms, tls_ended_here, tenant, trail, understood, .. } = &*finished;
        let attempt = trail.attempts().next().unwrap().clone();
        let understood = understood.as_ref().unwrap();
        let sending = Sending {
            number: attempt.key,
            request: id.clone(),
            attempt: 1,
            tenant: tenant.clone().unwrap(),
            deployment: understood.deployment.clone(),
            policy: understood.policy.clone(),
            tls_ended_here: *tls_ended_here,
            region: attempt.region,
            at_ms: *at_ms,
            cause: attempt.cause,
        };
        let (answer, answered) = oneshot::channel();
        let told = Told::Before(Box::new(Before::Sending(sending)), answer);
        let mut trail = Trail::default();
        let on_trail = trail.began(attempt.region, attempt.cause, attempt.key, attempt.began);
        trail.ended(on_trail, end, attempt.began);
        let finished = Arc::new(Finished {
            id: id.clone(),
            trail,
            tenant: tenant.clone(),
            understood: Some(Understood {
                deployment: understood.deployment.clone(),
                cost: understood.cost,
                policy: understood.policy.clone(),
            }),
            arrived: finished.arrived,
            at_ms: *at_ms,
            tls_ended_here: *tls_ended_here,
            asked: finished.asked,
            ending: finished.ending,
            answered: None,
            tokens: None,
            total: finished.total,
            receipt: None,
        });
        Awaited { told, answered, finished }
    }

    fn text(&self) -> String {
        self.files().iter().map(|file| fs::read_to_string(file).unwrap()).collect()
    }
}

#[test]
fn who_waits_is_answered_when_it_is_on_disk_and_all_who_wait_share_one_fsync() {
    let scene = Scene::new(1 << 20);
    let mut writer = scene.open();
    let before = scene.shared.syncs.get();
    let mut waiting: Vec<_> = (0..50)
        .map(|number| scene.awaited(&format!("r{number}"), AttemptEnd::Responded { status: 200 }))
        .collect();
    let (mut told, mut over) = (Vec::new(), Vec::new());
    for Awaited { told: one, answered, finished } in waiting.drain(..) {
        told.push(one);
        over.push((answered, finished));
    }
    writer.write(&mut told);
    assert_eq!(scene.shared.syncs.get(), before + 1, "fifty requests, one fsync");
    assert_eq!(scene.text().matches("\"kind\":\"sent\"").count(), 50);
    for (mut answered, finished) in over {
        assert_eq!(answered.try_recv(), Ok(true));
        told.push(Told::Sent(finished));
    }
    writer.write(&mut told);
    writer.close();
    let text = scene.text();
    assert_eq!(text.matches("\"kind\":\"outcome\"").count(), 50);
    assert_eq!(text.matches("\"kind\":\"attempt\"").count(), 0, "none is written twice");
    scene.check(50, &[]);
    assert_eq!(scene.report().without_outcome, 0);
}

#[test]
fn on_a_full_disk_who_waits_is_refused_and_nothing_is_missing() {
    let scene = Scene::new(1 << 20);
    let mut writer = scene.open();
    // It says that there is no space left, to every write.
    let file = writer.file.replace(OpenOptions::new().append(true).open("/dev/full").unwrap());
    let end = AttemptEnd::Failed(AttemptFailure::ReceiptUnavailable);
    let Awaited { told, mut answered, finished } = scene.awaited("a", end);
    writer.write(&mut vec![told]);
    assert_eq!(answered.try_recv(), Ok(false));
    assert!(scene.shared.failing());
    scene.shared.reject();
    writer.write(&mut vec![Told::Sent(finished)]);
    assert_eq!(scene.shared.lost(GapReason::Disk).get(), 0, "nothing was sent, so no receipt is missing");
    writer.file = file;
    // It recovers by itself: what was rejected is told of as soon as something can be written.
    writer.write(&mut Vec::new());
    assert!(!scene.shared.failing());
    let Awaited { told, mut answered, finished } = scene.awaited("b", AttemptEnd::Responded { status: 200 });
    writer.write(&mut vec![told]);
    assert_eq!(answered.try_recv(), Ok(true));
    writer.write(&mut vec![Told::Sent(finished)]);
    writer.close();
    scene.check(1, &[]);
    assert_eq!((scene.report().rejected, scene.report().missing), (1, 0));
}

#[test]
fn what_was_written_and_not_made_durable_is_no_receipt() {
    let scene = Scene::new(1 << 20);
    let mut writer = scene.open();
    // A pipe takes what is written, and cannot be made durable.
    let (_reader, pipe) = io::pipe().unwrap();
    writer.file = Some(File::from(std::os::fd::OwnedFd::from(pipe)));
    let Awaited { told, mut answered, .. } = scene.awaited("a", AttemptEnd::Cancelled);
    writer.write(&mut vec![told]);
    assert_eq!(answered.try_recv(), Ok(false));
    assert!(scene.shared.failing());
}

/// A recorder over a folder of its own.
fn recorder(scene: &Scene) -> (Recorder, super::super::super::Writing) {
    let config = ReceiptsConfig { required: true, queue: 64, ..scene.config.clone() };
    let regions = scene.catalogue.iter().map(|(_, region)| region.id.clone()).collect();
    Recorder::start(&config, Role::Edge, &"aws/us-east-1".parse().unwrap(), regions).unwrap()
}

#[tokio::test]
async fn a_receipt_is_on_disk_when_its_request_goes_on_and_none_is_taken_after_the_end() {
    let scene = Scene::new(1 << 20);
    let (recorder, writing) = recorder(&scene);
    let begun = Instant::now();
    let rounds = 20;
    for round in 0..rounds {
        let Told::Before(before, _) = scene.awaited(&format!("r{round}"), AttemptEnd::Cancelled).told else {
            panic!("it waits")
        };
        assert_eq!(recorder.commit(*before).await, Ok(()));
        assert_eq!(scene.text().matches("\"kind\":\"sent\"").count(), round + 1, "it is there");
    }
    println!("{:?} for each of {rounds} receipts, one after the other", begun.elapsed() / rounds as u32);
    writing.finish(Duration::from_secs(30)).await;
    let Told::Before(before, _) = scene.awaited("late", AttemptEnd::Cancelled).told else {
        panic!("it waits")
    };
    assert_eq!(recorder.commit(*before).await, Err(NoReceipt), "the chain has ended");
    let report = scene.report();
    assert!(report.holds && report.chains[0].closed, "{report:#?}");
    assert_eq!(report.without_outcome, rounds as u64);
}

#[tokio::test]
async fn requests_that_wait_at_once_share_the_fsyncs() {
    let scene = Arc::new(Scene::new(1 << 20));
    let (recorder, writing) = recorder(&scene);
    let (callers, rounds) = (64, 20);
    let begun = Instant::now();
    let mut tasks = tokio::task::JoinSet::new();
    for caller in 0..callers {
        let (scene, recorder) = (scene.clone(), recorder.clone());
        tasks.spawn(async move {
            for round in 0..rounds {
                let Told::Before(before, _) =
                    scene.awaited(&format!("{caller}-{round}"), AttemptEnd::Cancelled).told
                else {
                    panic!("it waits")
                };
                recorder.commit(*before).await.unwrap();
            }
        });
    }
    while let Some(ended) = tasks.join_next().await {
        ended.unwrap();
    }
    let took = begun.elapsed();
    let (commits, syncs) = (callers * rounds, recorder.shared.syncs.get());
    writing.finish(Duration::from_secs(30)).await;
    println!(
        "{commits} receipts by {callers} callers in {took:?}: {:.0} a second, {syncs} fsyncs",
        commits as f64 / took.as_secs_f64()
    );
    assert!(syncs < commits / 4, "{syncs} fsyncs for {commits} receipts");
    assert_eq!(scene.report().attempts, commits);
}

#[tokio::test]
async fn a_chain_ends_when_its_owner_says_so_whoever_still_has_a_recorder() {
    let scene = Scene::new(1 << 20);
    let (recorder, writing) = recorder(&scene);
    let another = recorder.clone();
    recorder.record(scene.told("a", 1, "eu"), None);
    let begun = Instant::now();
    writing.finish(Duration::from_secs(60)).await;
    assert!(begun.elapsed() < Duration::from_secs(30), "{:?}", begun.elapsed());
    scene.check(1, &[]);
    assert!(scene.report().chains[0].closed, "what was handed in before is there, and the end");
    another.record(scene.told("b", 1, "eu"), None);
    drop((recorder, another));
    scene.check(1, &[]);
}
