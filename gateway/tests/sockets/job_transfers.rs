//! Jobs of a region without capacity, which are computed in another region.

use super::batches::{Client, EmbeddingReplica, PATIENCE, file_of, line};
use super::jobs::{EUROPE, REGION, Region, TOKENS, gateway_in, gateway_task, jobs_config, text};
use axum::extract::State;
use scheduler_api::paths;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::future::IntoFuture;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, watch};

/// Replica that returns the bodies of its requests when it is permitted to.
pub(super) struct HeldReplica {
    pub(super) permits: Semaphore,
    pub(super) arrived: AtomicUsize,
    computed: std::sync::Mutex<Vec<String>>,
}

impl HeldReplica {
    pub(super) async fn start(permits: usize) -> (Arc<HeldReplica>, SocketAddr) {
        let (arrived, computed) = (AtomicUsize::new(0), std::sync::Mutex::default());
        let replica = Arc::new(HeldReplica { permits: Semaphore::new(permits), arrived, computed });
        let status = json!({"version": 1, "names": ["m", "m-eu"], "model": "m", "state": "ready", "pending_tokens": 0,
            "pending_inputs": 0, "requests_total": 0, "tokens_per_second": 1000.0});
        let router = axum::Router::new()
            .route("/status", axum::routing::get(move || async move { axum::Json(status) }))
            .route("/v1/embeddings", axum::routing::post(echo))
            .with_state(replica.clone());
        let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = socket.local_addr().unwrap();
        tokio::spawn(axum::serve(socket, router).into_future());
        (replica, address)
    }
}

async fn echo(
    State(replica): State<Arc<HeldReplica>>,
    headers: axum::http::HeaderMap,
    body: String,
) -> ([(&'static str, String); 1], String) {
    assert_eq!(headers["x-meridian-priority"], "bulk", "never ahead of interactive requests");
    replica.arrived.fetch_add(1, Ordering::SeqCst);
    replica.permits.acquire().await.unwrap().forget();
    replica.computed.lock().unwrap().push(body.clone());
    ([("x-meridian-tokens", TOKENS.to_string())], body)
}

/// Sends a message of a gateway in a region. Returns the status and the lines of the response.
async fn call(region: &Region, gateway: &str, path: &str, message: &str) -> (u16, String) {
    let (status, body) = region.send("POST", path, &[("x-meridian-gateway-region", gateway)], message).await;
    (status, body.as_str().map_or_else(|| body.to_string(), str::to_owned))
}

/// Pulls a request of `deployment` for `target`.
async fn pull(region: &Region, gateway: &str, group: (&str, &str), target: &str) -> (u16, String) {
    let (deployment, residency) = group;
    let message = json!({"version": 1, "deployment": deployment, "tenant": "everywhere", "residency": residency,
        "target": target, "ready": 1, "pending_tokens": 0, "tokens_per_second": 1000.0});
    call(region, gateway, paths::JOBS_PULL, &message.to_string()).await
}

/// Waits until jobs wait for too long, and returns the deployments that a gateway in `gateway` may transfer.
async fn waiting(region: &Region, gateway: &str) -> BTreeSet<String> {
    let begun = Instant::now();
    loop {
        let (status, body) = call(region, gateway, paths::JOBS_WAITING, "").await;
        assert_eq!(status, 200, "{body}");
        let body: Value = serde_json::from_str(&body).unwrap();
        let groups = body["groups"].as_array().unwrap();
        if !groups.is_empty() {
            return groups.iter().map(|group| group["deployment"].as_str().unwrap().to_owned()).collect();
        }
        assert!(begun.elapsed() < PATIENCE, "no job waits for too long");
    }
}

async fn metrics(region: &Region) -> String {
    region.send("GET", "/metrics", &[], "").await.1.as_str().unwrap().to_owned()
}

/// Returns the number of transfers to a region with an outcome.
async fn transfers(region: &Region, target: &str, outcome: &str) -> u64 {
    let name = format!("meridian_jobs_transfers_total{{region=\"{target}\",outcome=\"{outcome}\"}} ");
    let page = metrics(region).await;
    let value = page.lines().find_map(|line| line.strip_prefix(&name));
    value.map_or(0, |value| value.parse().unwrap())
}

#[tokio::test]
async fn jobs_of_a_region_without_capacity_are_computed_in_another_region() {
    let dirs = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let (replica, at) = HeldReplica::start(Semaphore::MAX_PERMITS).await;
    let america = Region::start(Some(jobs_config(dirs[0].path(), "")), Vec::new()).await;
    let europe = Region::start_in(EUROPE, None, vec![at]).await;
    let stop = watch::Sender::new(());
    gateway_in(REGION, "", dirs[1].path(), &[(REGION, &america), (EUROPE, &europe)], &stop).await;
    let mut ids = Vec::new();
    for number in 0..20 {
        let (status, job) = america.submit("everywhere", &text(number), &[]).await;
        assert_eq!(status, 202, "{job}");
        ids.push(job["id"].clone());
    }
    for (number, id) in ids.iter().enumerate() {
        let job = america.finished("everywhere", id).await;
        assert_eq!((&job["status"], job["result"].to_string()), (&json!("succeeded"), text(number)), "{job}");
    }
    assert_eq!(replica.computed.lock().unwrap().len(), 20, "each job once");
    assert_eq!(transfers(&america, EUROPE, "computed").await, 20);
    assert!(metrics(&america).await.contains("meridian_jobs_attempts_total{outcome=\"succeeded\"} 20"));
    drop(stop);
    america.stop().await;
    europe.stop().await;
}

#[tokio::test]
async fn the_lines_of_a_batch_are_computed_in_another_region_in_their_order() {
    let dirs = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let (_, at) = EmbeddingReplica::start(Semaphore::MAX_PERMITS).await;
    let america = Region::start(Some(jobs_config(dirs[0].path(), "")), Vec::new()).await;
    let europe = Region::start_in(EUROPE, None, vec![at]).await;
    let stop = watch::Sender::new(());
    let regions = [(REGION, &america), (EUROPE, &europe)];
    let gateway = Client::new(gateway_in(REGION, "", dirs[1].path(), &regions, &stop).await);
    let file = gateway.upload(&file_of(0..300)).await;
    let batch = gateway.create(&file, "24h").await;
    let batch = gateway.wait(&batch, &["completed"]).await;
    let lines = gateway.lines(&batch["output_file_id"]).await;
    let ids: Vec<_> = lines.iter().map(|line| line["custom_id"].as_str().unwrap().to_owned()).collect();
    assert_eq!(ids, (0..300).map(|number| format!("r{number}")).collect::<Vec<_>>());
    for (number, line) in lines.iter().enumerate() {
        let length = format!("text {number}").len();
        assert_eq!(line["response"]["body"]["data"][0]["embedding"][0], json!(length), "{line}");
    }
    assert!(transfers(&america, EUROPE, "computed").await >= 2, "two chunks at least");
    drop(stop);
    america.stop().await;
    europe.stop().await;
}

#[tokio::test]
async fn after_the_sudden_end_of_a_gateway_each_of_its_jobs_ends_once() {
    let dirs = [(); 3].map(|()| tempfile::tempdir().unwrap());
    let (replica, at) = HeldReplica::start(0).await;
    let america = Region::start(Some(jobs_config(dirs[0].path(), "")), Vec::new()).await;
    let europe = Region::start_in(EUROPE, None, vec![at]).await;
    let stop = watch::Sender::new(());
    let regions = [(REGION, &america), (EUROPE, &europe)];
    let (_, first) = gateway_task(REGION, "", dirs[1].path(), &regions, &stop).await;
    let mut ids = Vec::new();
    for number in 0..6 {
        ids.push(america.submit("everywhere", &text(number), &[]).await.1["id"].clone());
    }
    let begun = Instant::now();
    while replica.arrived.load(Ordering::SeqCst) == 0 {
        assert!(begun.elapsed() < PATIENCE, "no request in the other region");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    first.abort();
    assert!(first.await.unwrap_err().is_cancelled());
    replica.permits.add_permits(1000);
    gateway_in(REGION, "", dirs[2].path(), &regions, &stop).await;
    for (number, id) in ids.iter().enumerate() {
        let job = america.finished("everywhere", id).await;
        assert_eq!((&job["status"], job["result"].to_string()), (&json!("succeeded"), text(number)), "{job}");
    }
    assert!(transfers(&america, EUROPE, "expired").await >= 1, "the tickets of the first gateway expire");
    let page = metrics(&america).await;
    for line in ["meridian_jobs_attempts_total{outcome=\"succeeded\"} 6", "meridian_jobs_transfers 0"] {
        assert!(page.contains(line), "{line} in {page}");
    }
    drop(stop);
    america.stop().await;
    europe.stop().await;
}

#[tokio::test]
async fn a_gateway_that_stops_returns_its_tickets() {
    let dirs = [(); 3].map(|()| tempfile::tempdir().unwrap());
    let (replica, at) = HeldReplica::start(0).await;
    let america = Region::start(Some(jobs_config(dirs[0].path(), "")), Vec::new()).await;
    let europe = Region::start_in(EUROPE, None, vec![at]).await;
    let regions = [(REGION, &america), (EUROPE, &europe)];
    let stop = watch::Sender::new(());
    let (_, first) = gateway_task(REGION, "", dirs[1].path(), &regions, &stop).await;
    let mut ids = Vec::new();
    for number in 0..3 {
        ids.push(america.submit("everywhere", &text(number), &[]).await.1["id"].clone());
    }
    let begun = Instant::now();
    while replica.arrived.load(Ordering::SeqCst) == 0 {
        assert!(begun.elapsed() < PATIENCE, "no request in the other region");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    // No request of a client is in flight.
    drop(stop);
    first.await.unwrap();
    assert!(transfers(&america, EUROPE, "no_capacity").await >= 1, "returned before its end");
    assert!(metrics(&america).await.contains("meridian_jobs_transfers 0"));
    replica.permits.add_permits(1000);
    let stop = watch::Sender::new(());
    gateway_in(REGION, "", dirs[2].path(), &regions, &stop).await;
    for id in &ids {
        assert_eq!(america.finished("everywhere", id).await["status"], "succeeded");
    }
    assert_eq!(transfers(&america, EUROPE, "expired").await, 0);
    drop(stop);
    america.stop().await;
    europe.stop().await;
}

/// Response of a replica to an embedding request with one text.
fn embedded(body: &str) -> String {
    let body: Value = serde_json::from_str(body).unwrap();
    let length = body["input"].as_str().unwrap().len();
    let data = json!([{"object": "embedding", "index": 0, "embedding": [length]}]);
    let usage = json!({"prompt_tokens": 1, "total_tokens": 1});
    json!({"object": "list", "data": data, "model": "m", "usage": usage}).to_string()
}

#[tokio::test]
async fn one_gateway_computes_each_line_of_a_chunk_once() {
    let dirs = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let america = Region::start(Some(jobs_config(dirs[0].path(), "")), Vec::new()).await;
    let stop = watch::Sender::new(());
    // This gateway transfers no jobs; the test does.
    let url = gateway_in(REGION, "spill = false", dirs[1].path(), &[(REGION, &america)], &stop).await;
    let client = Client::new(url);
    // Lines with different parameters are requests of their own.
    let lines = (0..20).map(|number| {
        let body = json!({"model": "m", "input": format!("text {number}"), "user": format!("{number}")});
        line(&format!("r{number}"), &body) + "\n"
    });
    let file = client.upload(&lines.collect::<String>()).await;
    let batch = client.create(&file, "24h").await;
    waiting(&america, REGION).await;
    let pulled = async || {
        let (status, message) = pull(&america, REGION, ("m", "anywhere"), EUROPE).await;
        assert_eq!(status, 200, "{message}");
        let (line, body) = message.split_once('\n')?;
        let line: Value = serde_json::from_str(line).unwrap();
        Some((line["ticket"].as_u64().unwrap(), body.to_owned()))
    };
    let computed = std::cell::RefCell::new(Vec::new());
    let returned = async |(ticket, body): (u64, String)| {
        let line = json!({"version": 1, "ticket": ticket, "status": 200});
        let message = format!("{line}\n{}", embedded(&body));
        assert_eq!(call(&america, REGION, paths::JOBS_RESULT, &message).await.0, 200);
        computed.borrow_mut().push(body);
    };
    let begun = Instant::now();
    let first = loop {
        match pulled().await {
            Some(first) => break first,
            None => assert!(begun.elapsed() < PATIENCE, "no request"),
        }
    };
    // The chunk was taken for one gateway. Other requests would expire, and the chunk would be lost with them.
    assert_eq!(pulled().await, None);
    assert!(metrics(&america).await.contains("meridian_jobs_transfers 1"));
    returned(first).await;
    let all = async {
        loop {
            if let Some(next) = pulled().await {
                returned(next).await;
            }
        }
    };
    let batch = tokio::select! {
        batch = client.wait(&batch, &["completed"]) => batch,
        () = all => unreachable!("it has no end"),
    };
    assert_eq!(batch["request_counts"]["completed"], 20, "{batch}");
    let computed = computed.into_inner();
    assert_eq!(computed.len(), 20);
    assert_eq!(computed.iter().collect::<BTreeSet<_>>().len(), 20, "each line once");
    drop(stop);
    america.stop().await;
}

#[tokio::test]
async fn a_late_result_is_discarded_and_a_cancelled_job_ends_its_ticket() {
    let dir = tempfile::tempdir().unwrap();
    let america = Region::start(Some(jobs_config(dir.path(), "")), Vec::new()).await;
    let id = america.submit("everywhere", &text(1), &[]).await.1["id"].clone();
    assert_eq!(waiting(&america, REGION).await, BTreeSet::from(["m".to_owned()]));
    let pulled = async || {
        let begun = Instant::now();
        loop {
            let (status, message) = pull(&america, REGION, ("m", "anywhere"), EUROPE).await;
            assert_eq!(status, 200, "{message}");
            if let Some((line, body)) = message.split_once('\n') {
                let line: Value = serde_json::from_str(line).unwrap();
                assert_eq!((&line["path"], body), (&json!("/v1/embeddings"), text(1).as_str()));
                return line["ticket"].as_u64().unwrap();
            }
            assert!(begun.elapsed() < PATIENCE, "no request");
        }
    };
    let result = |ticket: u64, body: &str| {
        format!("{}\n{body}", json!({"version": 1, "ticket": ticket, "status": 200}))
    };
    let renewal = |ticket: u64| json!({"version": 1, "ticket": ticket}).to_string();
    let first = pulled().await;
    assert_eq!(call(&america, REGION, paths::JOBS_RENEW, &renewal(first)).await.0, 200);
    // Without a renewal the ticket expires, and the job gets another one.
    let second = pulled().await;
    assert_ne!(first, second);
    assert_eq!(call(&america, REGION, paths::JOBS_RENEW, &renewal(first)).await.0, 404);
    assert_eq!(call(&america, REGION, paths::JOBS_RESULT, &result(first, "\"late\"")).await.0, 404);
    assert_eq!(america.job("everywhere", &id).await.1["status"], "running");
    assert_eq!(call(&america, REGION, paths::JOBS_RESULT, &result(second, "\"in time\"")).await.0, 200);
    assert_eq!(america.finished("everywhere", &id).await["result"], "in time");
    assert_eq!(call(&america, REGION, paths::JOBS_RESULT, &result(second, "\"again\"")).await.0, 404);
    assert!(metrics(&america).await.contains("meridian_jobs_transfers_late_total 2"));

    let id = america.submit("everywhere", &text(1), &[]).await.1["id"].clone();
    let ticket = pulled().await;
    let path = format!("/v1/async/{}", id.as_str().unwrap());
    let (_, job) = america.send("DELETE", &path, &[("x-meridian-tenant", "everywhere")], "").await;
    assert_eq!(job["status"], "cancelled");
    let begun = Instant::now();
    while call(&america, REGION, paths::JOBS_RENEW, &renewal(ticket)).await.0 != 404 {
        assert!(begun.elapsed() < PATIENCE, "the ticket of a cancelled job continues");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(transfers(&america, EUROPE, "withdrawn").await, 1);
    america.stop().await;
}

#[tokio::test]
async fn a_locked_job_leaves_its_region_only_for_allowed_regions_through_allowed_gateways() {
    let dirs = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let (replica, at) = HeldReplica::start(Semaphore::MAX_PERMITS).await;
    let europe = Region::start_in(EUROPE, Some(jobs_config(dirs[0].path(), "")), Vec::new()).await;
    let america = Region::start(None, vec![at]).await;
    let locked = json!({"model": "m-eu", "input": "locked"}).to_string();
    let own = [
        ("x-meridian-tenant", "everywhere"),
        ("x-meridian-deployment", "m-eu"),
        ("x-meridian-residency", "eu"),
    ];
    let (status, job) = europe.send("POST", "/v1/async/embeddings", &own, &locked).await;
    assert_eq!(status, 202, "{job}");
    let (status, open) = europe.submit("everywhere", &text(1), &[]).await;
    assert_eq!(status, 202, "{open}");
    let both = BTreeSet::from(["m".to_owned(), "m-eu".to_owned()]);
    let begun = Instant::now();
    while waiting(&europe, EUROPE).await != both {
        assert!(begun.elapsed() < PATIENCE, "not both jobs wait for too long");
    }
    assert_eq!(waiting(&europe, REGION).await, BTreeSet::from(["m".to_owned()]));
    let group = ("m-eu", "eu");
    for (gateway, target) in
        [(REGION, "aws/eu-west-1"), (EUROPE, REGION), (REGION, REGION), ("", "aws/eu-west-1")]
    {
        let (status, message) = pull(&europe, gateway, group, target).await;
        assert!(
            !message.contains("locked") && (status, message.is_empty()) != (200, false),
            "{gateway} {target}: {message}"
        );
    }

    // The open job of the same queue is computed in America, and the locked one waits.
    let stop = watch::Sender::new(());
    gateway_in(REGION, "", dirs[1].path(), &[(REGION, &america), (EUROPE, &europe)], &stop).await;
    assert_eq!(europe.finished("everywhere", &open["id"]).await["status"], "succeeded");
    let waits = europe.job("everywhere", &job["id"]).await.1;
    assert!(["queued", "running"].contains(&waits["status"].as_str().unwrap()), "{waits}");
    assert_eq!(*replica.computed.lock().unwrap(), [text(1)]);
    assert_eq!(transfers(&europe, REGION, "computed").await, 1);

    // Through a gateway in Europe, to another region there.
    let begun = Instant::now();
    loop {
        let (status, message) = pull(&europe, EUROPE, group, "aws/eu-west-1").await;
        assert_eq!(status, 200, "{message}");
        if message.ends_with(&format!("\n{locked}")) {
            break;
        }
        assert!(begun.elapsed() < PATIENCE, "{message}");
    }
    drop(stop);
    america.stop().await;
    europe.stop().await;
}
