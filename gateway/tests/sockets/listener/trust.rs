//! Validation of the hub's responses: a generation that no hub can have published is rejected.

use super::fixture::{BODY, Edge, Fixture, TIMEOUT, post};
use crate::hub;
use axum::extract::{RawQuery, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Returns the SHA-256 of the key `stolen`.
fn stolen() -> String {
    Sha256::digest("stolen").iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Man in the middle: forwards the responses of the hub, or forges them.
struct ForgingProxy {
    /// Table of the hub, without its generation.
    table: Value,
    number: AtomicU64,
    forges: AtomicBool,
    /// Number of forged responses so far.
    forged: AtomicU64,
}

impl ForgingProxy {
    async fn start(fixture: &Fixture) -> (Arc<ForgingProxy>, String) {
        let client = reqwest::Client::builder().no_proxy().build().unwrap();
        let url = format!("{}/v1/routes", fixture.hub.trim_matches('\''));
        let table: Value = client.get(url).send().await.unwrap().json().await.unwrap();
        let (number, forges, forged) = (AtomicU64::new(1), AtomicBool::new(false), AtomicU64::new(0));
        let proxy = Arc::new(ForgingProxy { table, number, forges, forged });
        let router = axum::Router::new()
            .route(scheduler_api::paths::ROUTES, axum::routing::get(ForgingProxy::routes))
            .route(scheduler_api::paths::DEMAND, axum::routing::post(ForgingProxy::demand))
            .with_state(proxy.clone());
        (proxy, format!("'http://{}'", hub::serve(router).await))
    }

    fn table(&self, epoch: u64, number: u64) -> Value {
        let mut table = self.table.clone();
        table["epoch"] = json!(epoch);
        table["generation"] = json!(number);
        table
    }

    /// Returns a table that accepts a key of the attacker.
    fn forged(&self, epoch: u64, number: u64) -> Value {
        let mut table = self.table(epoch, number);
        table["tenants"] = json!([{"name": "test", "key_sha256": [stolen()], "deployments": null, "residency": null, "weight": 1, "limits": {}}]);
        table
    }

    async fn routes(State(proxy): State<Arc<ForgingProxy>>, RawQuery(query): RawQuery) -> Response {
        let query = query.unwrap_or_default();
        let after = query.split('&').find_map(|pair| pair.strip_prefix("after="));
        let after = after.map_or(0, |after| after.split_once('.').unwrap().1.parse().unwrap());
        if after > 0 && proxy.forges.load(Ordering::SeqCst) {
            let times = proxy.forged.fetch_add(1, Ordering::SeqCst);
            let (epoch, number) =
                [(1, u64::MAX), (u64::MAX, 1), (1, 100_000), (4_000_000_000, 2)][times as usize % 4];
            return axum::Json(proxy.forged(epoch, number)).into_response();
        }
        let number = proxy.number.load(Ordering::SeqCst);
        if number > after {
            return axum::Json(proxy.table(1, number)).into_response();
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
        StatusCode::NO_CONTENT.into_response()
    }

    async fn demand(State(proxy): State<Arc<ForgingProxy>>) -> Response {
        if !proxy.forges.load(Ordering::SeqCst) {
            return StatusCode::NO_CONTENT.into_response();
        }
        let rows =
            json!({"version": 1, "epoch": 1, "generation": u64::MAX, "gateway": "aws/us-east-1", "rows": []});
        axum::Json(rows).into_response()
    }
}

fn count(metrics: &str, name: &str) -> u64 {
    let line = metrics.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.unwrap_or_else(|| panic!("no {name}")).parse().unwrap()
}

async fn metric(edge: &Edge, name: &str) -> u64 {
    count(&edge.operate("/metrics").await.1, name)
}

async fn wait_for_generation(edge: &Edge, generation: &str) {
    let (expected, begun) = (format!("\"generation\":\"{generation}\""), Instant::now());
    while !edge.operate("/routes").await.1.contains(&expected) {
        assert!(begun.elapsed() < TIMEOUT, "{generation} is not taken");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn a_forged_generation_is_rejected_and_counted_and_the_next_genuine_table_is_used() {
    let mut fixture = Fixture::new().await;
    let (proxy, url) = ForgingProxy::start(&fixture).await;
    fixture.hub = url;
    let edge = fixture.edge("").await;
    wait_for_generation(&edge, "1.1").await;
    assert_eq!(metric(&edge, "meridian_gateway_tables_refused_total").await, 0);

    proxy.forges.store(true, Ordering::SeqCst);
    let begun = Instant::now();
    while metric(&edge, "meridian_gateway_tables_refused_total").await < 5
        || metric(&edge, "meridian_gateway_plans_refused_total").await < 1
    {
        assert!(begun.elapsed() < TIMEOUT, "forged responses are not counted");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(edge.operate("/routes").await.1.contains("\"generation\":\"1.1\""));
    let stolen = post("", BODY)
        .replace("Bearer k", "Bearer stolen")
        .replace("host: x", "host: x\r\nconnection: close");
    assert_eq!(edge.send_bytes(stolen.as_bytes()).await.status, 401, "no key of a forged table is accepted");
    let on_disk = std::fs::read_to_string(fixture.dir.path().join("routes")).unwrap();
    assert!(!on_disk.contains("18446744073709551615") && on_disk.contains("\"generation\":1"), "{on_disk}");
    assert!(!fixture.dir.path().join("routes.plan").exists(), "a forged plan is not stored");

    proxy.number.store(2, Ordering::SeqCst);
    proxy.forges.store(false, Ordering::SeqCst);
    wait_for_generation(&edge, "1.2").await;
    assert_eq!(edge.send_bytes(post("connection: close\r\n", BODY).as_bytes()).await.status, 200);
}

fn write_snapshot(path: &Path, table: &Value) {
    let body = table.to_string();
    let sum: String = Sha256::digest(&body).iter().map(|byte| format!("{byte:02x}")).collect();
    std::fs::write(path, format!("{sum}\n{body}")).unwrap();
}

#[tokio::test]
async fn a_poisoned_snapshot_is_rejected_and_replaced_by_a_genuine_table() {
    let mut fixture = Fixture::new().await;
    let (proxy, url) = ForgingProxy::start(&fixture).await;
    fixture.hub = url;
    let path = fixture.dir.path().join("routes");
    for (epoch, number) in [(1, u64::MAX), (u64::MAX, 7)] {
        write_snapshot(&path, &proxy.forged(epoch, number));
        let mut edge = fixture.edge("[timeouts]\nlame_duck = '0s'\n").await;
        wait_for_generation(&edge, "1.1").await;
        assert_eq!(metric(&edge, "meridian_gateway_tables_refused_total").await, 1);
        let on_disk = std::fs::read_to_string(&path).unwrap();
        assert!(on_disk.contains("\"generation\":1,") && on_disk.contains("\"epoch\":1,"), "{on_disk}");
        edge.stop();
        edge.running.await.unwrap();
    }
}
