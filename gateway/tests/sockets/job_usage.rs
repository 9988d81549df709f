//! Usage of tenants by jobs and batches, as a region reports it to its hub.

use super::batches::{Client, EmbeddingReplica, line};
use super::hub::serve;
use super::job_transfers::HeldReplica;
use super::jobs::{EUROPE, REGION, Region, Replica, TOKENS, gateway, gateway_in, jobs_config, text};
use axum::Json;
use axum::http::StatusCode;
use gateway::ingress::JobsConfig;
use scheduler_api::paths;
use scheduler_api::usage::{UsageCounts, UsageV1};
use scheduler_core::hubs::Hubs;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use supervision::Mutex;
use tokio::sync::{Semaphore, watch};

const PATIENCE: Duration = Duration::from_secs(60);

/// Hub that keeps the reports of usage.
struct UsageHub {
    hubs: Hubs,
    reports: Arc<Mutex<Vec<UsageV1>>>,
}

impl UsageHub {
    async fn start() -> UsageHub {
        let reports: Arc<Mutex<Vec<UsageV1>>> = Arc::default();
        let received = reports.clone();
        let report = move |Json(usage): Json<UsageV1>| async move {
            received.lock().push(usage);
            StatusCode::NO_CONTENT
        };
        let address = serve(axum::Router::new().route(paths::USAGE, axum::routing::post(report))).await;
        UsageHub { hubs: Hubs::one(format!("http://{address}")), reports }
    }

    /// Returns the configuration of a queue in this folder, which reports to this hub.
    fn queue(&self, dir: &Path) -> JobsConfig {
        jobs_config(dir, "").reported_to(self.hubs.clone())
    }

    /// Returns requests, inputs and tokens by tenant and region: the newest version of each day of each ledger, as the hub sums them.
    fn sums(&self) -> BTreeMap<(String, String), (u64, u64, u64)> {
        let mut newest: BTreeMap<(u64, String), UsageV1> = BTreeMap::new();
        for usage in self.reports.lock().iter() {
            let stored = newest.entry((usage.ledger, usage.day.clone())).or_insert_with(|| usage.clone());
            if usage.sequence > stored.sequence {
                *stored = usage.clone();
            }
        }
        let mut sums: BTreeMap<_, UsageCounts> = BTreeMap::new();
        for row in newest.into_values().flat_map(|usage| usage.rows) {
            assert_eq!(row.deployment, "m");
            sums.entry((row.tenant, row.region)).or_default().add(row.counts);
        }
        let counts = |UsageCounts { requests, inputs, tokens }| (requests, inputs, tokens);
        sums.into_iter().map(|(key, sum)| (key, counts(sum))).collect()
    }
}

fn rows<const N: usize>(
    rows: [(&str, &str, (u64, u64, u64)); N],
) -> BTreeMap<(String, String), (u64, u64, u64)> {
    rows.map(|(tenant, region, counts)| ((tenant.to_owned(), region.to_owned()), counts)).into()
}

async fn submit(region: &Region, tenant: &str, body: &str) -> Value {
    let (status, job) = region.submit(tenant, body, &[]).await;
    assert_eq!(status, 202, "{job}");
    job["id"].clone()
}

#[tokio::test]
async fn jobs_with_a_result_count_for_their_tenant_and_the_counts_survive_a_restart() {
    let (dir, hub) = (tempfile::tempdir().unwrap(), UsageHub::start().await);
    let (replica, at) = Replica::start().await;
    let config = hub.queue(dir.path());
    let region = Region::start(Some(config.clone()), vec![at]).await;
    let three = json!({"model": "m", "input": ["a", "b", "c"]}).to_string();
    for (tenant, body) in [("a", &text(1)), ("a", &three), ("b", &text(2))] {
        let id = submit(&region, tenant, body).await;
        assert_eq!(region.finished(tenant, &id).await["status"], "succeeded");
    }
    replica.status.store(400, Ordering::SeqCst);
    let id = submit(&region, "a", &text(3)).await;
    assert_eq!(region.finished("a", &id).await["status"], "failed");
    replica.status.store(200, Ordering::SeqCst);
    let region = region.restart(&config, vec![at]).await;
    assert_eq!(hub.sums(), rows([("a", REGION, (2, 4, 2 * TOKENS)), ("b", REGION, (1, 1, TOKENS))]));
    let id = submit(&region, "b", &text(4)).await;
    assert_eq!(region.finished("b", &id).await["status"], "succeeded");
    region.stop().await;
    assert_eq!(hub.sums(), rows([("a", REGION, (2, 4, 2 * TOKENS)), ("b", REGION, (2, 2, 2 * TOKENS))]));
}

#[tokio::test]
async fn a_job_that_is_computed_twice_counts_once() {
    let (dir, hub) = (tempfile::tempdir().unwrap(), UsageHub::start().await);
    let (replica, at) = HeldReplica::start(0).await;
    let config = hub.queue(dir.path());
    let region = Region::start(Some(config.clone()), vec![at]).await;
    let id = submit(&region, "a", &text(1)).await;
    let begun = Instant::now();
    while replica.arrived.load(Ordering::SeqCst) == 0 {
        assert!(begun.elapsed() < PATIENCE, "the job does not arrive");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let region = region.restart(&config, vec![at]).await;
    replica.permits.add_permits(2);
    assert_eq!(region.finished("a", &id).await["status"], "succeeded");
    assert_eq!(replica.arrived.load(Ordering::SeqCst), 2, "it was computed by both processes");
    region.stop().await;
    assert_eq!(hub.sums(), rows([("a", REGION, (1, 1, TOKENS))]));
}

#[tokio::test]
async fn each_computed_line_of_a_batch_counts_with_its_inputs_and_a_rejected_one_does_not() {
    let (dirs, hub) = ([(); 2].map(|()| tempfile::tempdir().unwrap()), UsageHub::start().await);
    let (_, at) = EmbeddingReplica::start(Semaphore::MAX_PERMITS).await;
    let region = Region::start(Some(hub.queue(dirs[0].path())), vec![at]).await;
    let stop = watch::Sender::new(());
    let client = Client::new(gateway(dirs[1].path(), &[(REGION, &region)], &stop).await);
    let inputs = [json!("one"), json!("two"), json!(["three", "four", "five"]), json!("too long"), json!("")];
    let lines = inputs.iter().enumerate();
    let lines = lines.map(|(n, input)| line(&format!("r{n}"), &json!({"model": "m", "input": input})) + "\n");
    let file = client.upload(&lines.collect::<String>()).await;
    let batch = client.create(&file, "24h").await;
    let batch = client.wait(&batch, &["completed"]).await;
    assert_eq!(
        (&batch["request_counts"]["completed"], &batch["request_counts"]["failed"]),
        (&json!(3), &json!(2))
    );
    drop(stop);
    region.stop().await;
    assert_eq!(hub.sums(), rows([("everywhere", REGION, (3, 5, 5))]));
}

#[tokio::test]
async fn a_job_counts_in_the_region_that_has_computed_it() {
    let (dirs, hub) = ([(); 2].map(|()| tempfile::tempdir().unwrap()), UsageHub::start().await);
    let (_, at) = HeldReplica::start(Semaphore::MAX_PERMITS).await;
    let america = Region::start(Some(hub.queue(dirs[0].path())), Vec::new()).await;
    let europe = Region::start_in(EUROPE, None, vec![at]).await;
    let stop = watch::Sender::new(());
    gateway_in(REGION, "", dirs[1].path(), &[(REGION, &america), (EUROPE, &europe)], &stop).await;
    let id = submit(&america, "everywhere", &text(1)).await;
    assert_eq!(america.finished("everywhere", &id).await["status"], "succeeded");
    drop(stop);
    america.stop().await;
    europe.stop().await;
    assert_eq!(hub.sums(), rows([("everywhere", EUROPE, (1, 1, TOKENS))]));
}
