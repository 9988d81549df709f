//! A queue that cannot be written: its log in NATS is unreachable, or its disk is full. New jobs are rejected with the time to
//! wait, accepted ones are kept and continue.

use crate::fleet::{Fleet, JobsPlan, Plan, RegionPlan, spoke};
use crate::load::Client;
use crate::nats::{NODES, NatsCluster, skipped};
use crate::replica;
use crate::small_disk::SmallDisk;
use crate::{ALONE, AMERICA, DEPLOYMENTS, EUROPE};
use reqwest::Method;
use serde_json::Value;
use std::process::Command;
use std::time::{Duration, Instant};

/// Longest time until a submission is rejected: long enough for the servers of NATS to be tried, and short for a client.
const REJECTED_WITHIN: Duration = Duration::from_secs(8);
const MODEL: &str = "in-america";

async fn start(spokes: usize, jobs: JobsPlan) -> Fleet {
    let region = RegionPlan { region: AMERICA, spokes, replicas: 1, deployments: &[MODEL], jobs };
    let gateways = vec![AMERICA, EUROPE];
    Fleet::start(&Plan { deployments: DEPLOYMENTS, regions: vec![region], gateways, log: "info" }).await
}

async fn assert_succeeded(client: &Client, jobs: &[(String, String)]) {
    for (id, text) in jobs {
        for gateway in 0..2 {
            let job = client.finished(gateway, id).await;
            assert_eq!(job["result"], replica::response(MODEL, text), "{job}");
        }
    }
}

/// Returns whether a rejection asks the client to wait.
fn waits(body: &Value, code: &str) -> bool {
    body["error"]["code"] == code
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_nats_is_down_jobs_are_rejected_and_afterwards_all_accepted_ones_are_computed() {
    let _alone = ALONE.lock().await;
    let Some(mut nats) = NatsCluster::start().await else { return };
    let mut fleet = start(2, JobsPlan::Shared(nats.jobs())).await;
    let client = Client::new(&fleet.gateways);
    let mut jobs = Vec::new();
    for number in 0..100 {
        let text = format!("before the outage: {number}");
        jobs.push((client.accepted(MODEL, &text).await, text));
    }
    let finished = client.finished(0, &jobs[0].0).await;
    assert_eq!(finished["status"], "succeeded");
    // Without a wait: some of the others are leased.
    (0..NODES).for_each(|node| nats.kill(node));
    fleet.print("NATS is down");
    for number in 0..3 {
        let begun = Instant::now();
        let rejected = client.submit(MODEL, &format!("during the outage: {number}")).await;
        let Err(Ok((503, body))) = &rejected else { panic!("{rejected:?}\n{}", fleet.logs()) };
        assert!(waits(body, "jobs_unavailable"), "{body}");
        assert!(begun.elapsed() < REJECTED_WITHIN, "{:?}", begun.elapsed());
    }
    // A spoke that is restarted meanwhile serves what needs no queue, and a finished job can be read at the other one.
    fleet.kill(&spoke(AMERICA, 2)).await;
    fleet.start_process(&spoke(AMERICA, 2)).await;
    let body = serde_json::json!({"model": MODEL, "input": ["interactive"]}).to_string();
    let response = client.send(Method::POST, 0, "/v1/embeddings", Some((body, String::new()))).await;
    assert_eq!(response, Ok((200, replica::response(MODEL, "interactive"))));
    let path = format!("/v1/async/{}", jobs[0].0);
    let (status, job) = client.send(Method::GET, 0, &path, None).await.unwrap();
    assert_eq!((status, &job["status"]), (200, &finished["status"]), "{job}");
    nats.start_again(&(0..NODES).collect::<Vec<_>>()).await;
    fleet.print("NATS is back");
    for number in 0..20 {
        let text = format!("after the outage: {number}");
        jobs.push((client.accepted(MODEL, &text).await, text));
    }
    assert_succeeded(&client, &jobs).await;
    fleet.print("all jobs have succeeded");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_disk_rejects_new_jobs_and_keeps_the_accepted_ones() {
    let _alone = ALONE.lock().await;
    let dir = tempfile::tempdir().unwrap();
    let disk = match SmallDisk::mount(&dir.path().join("disk"), "16m") {
        Ok(disk) => disk,
        Err(reason) => {
            return skipped(&format!("this test needs to mount a file system (root on Linux): {reason}"));
        }
    };
    let mut fleet = start(1, JobsPlan::At(disk.path.clone())).await;
    let client = Client::new(&fleet.gateways);
    // A quarter of a megabyte each.
    let text = |number: usize| format!("{number} {}", "x".repeat(250_000));
    let (mut jobs, mut number) = (Vec::new(), 0);
    let rejected = loop {
        match client.submit(MODEL, &text(number)).await {
            Ok(id) => jobs.push((id, text(number))),
            Err(response) => break response,
        }
        number += 1;
        assert!(number < 100, "the disk does not become full");
    };
    let Ok((507, body)) = &rejected else { panic!("{rejected:?}\n{}", fleet.logs()) };
    assert!(waits(body, "storage_full"), "{body}");
    assert!(jobs.len() > 20, "{}", jobs.len());
    fleet.print(&format!("the disk is full after {} jobs", jobs.len()));
    // The rest of the disk, so that no result can be stored either.
    let filler = disk.path.join("filler");
    std::fs::write(&filler, vec![0; 16 << 20]).expect_err("the disk is full");
    // A restart does not help, and loses nothing.
    fleet.kill(&spoke(AMERICA, 1)).await;
    fleet.start_process(&spoke(AMERICA, 1)).await;
    fleet.wait_until_healthy().await;
    let rejected = client.submit(MODEL, &text(number)).await;
    assert!(matches!(&rejected, Err(Ok((507, body))) if waits(body, "storage_full")), "{rejected:?}");
    for (id, _) in &jobs {
        let (status, job) = client.send(Method::GET, 0, &format!("/v1/async/{id}"), None).await.unwrap();
        assert_eq!(status, 200, "{job}");
    }
    std::fs::remove_file(&filler).unwrap();
    // Inputs fill it up to the part that is kept for the results and the log.
    assert_succeeded(&client, &jobs).await;
    fleet.print("all accepted jobs have succeeded");
    let rejected = client.submit(MODEL, "one more").await;
    assert!(matches!(&rejected, Err(Ok((507, body))) if waits(body, "storage_full")), "{rejected:?}");
    // Their inputs still fill it; an operator gives it more space.
    let more = Command::new("mount").args(["-o", "remount,size=64m"]).arg(&disk.path).status();
    assert!(more.is_ok_and(|status| status.success()));
    let text = "the disk has space".to_owned();
    jobs.push((client.accepted(MODEL, &text).await, text));
    assert_succeeded(&client, &jobs).await;
    drop(fleet);
    drop(disk);
}
