//! Policies that change while a request is in flight, and a gateway that loses its hub.

use super::fixture::{EUROPE, Fixture, Scrape, Script};
use crate::hub::{deployment, serve};
use axum::extract::RawQuery;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use gateway::config::EdgeConfig;
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// Region in the EU, farther from the gateway than the other.
const FRANKFURT: &str = "aws/eu-central-1";

/// SHA-256 of `k` and of `other`.
const KEY: &str = "8254c329a92850f6d539dd376f4816ee2764517da5e0235514af433164480d7a";
const OTHER: &str = "d9298a10d1b0735837dc4bd85dac641b0f3cef27a47e5d53a54f2f3f5b2fcffa";

/// Starts a hub that publishes the table of the test; `None`: it is unreachable.
async fn hub(table: watch::Receiver<Option<Value>>) -> SocketAddr {
    let routes = move |RawQuery(query): RawQuery| {
        let mut table = table.clone();
        async move { response(query.unwrap_or_default(), &mut table).await }
    };
    serve(axum::Router::new().route(scheduler_api::paths::ROUTES, axum::routing::get(routes))).await
}

async fn response(query: String, table: &mut watch::Receiver<Option<Value>>) -> Response {
    let Some(now) = table.borrow_and_update().clone() else {
        return StatusCode::SERVICE_UNAVAILABLE.into_response();
    };
    if query.contains(&format!("after=1.{}&", now["generation"])) {
        tokio::time::timeout(Duration::from_millis(200), table.changed()).await.ok();
        return StatusCode::NO_CONTENT.into_response();
    }
    axum::Json(now).into_response()
}

fn table(number: u64, rows: &[Value], residency: &str, key: Option<&str>) -> Value {
    let deployments = [deployment("locked", json!(residency)), deployment("anywhere", json!(null))];
    let tenant = key.map(|key| {
        json!({"name": "test", "key_sha256": [key], "deployments": null, "residency": null, "weight": 1, "limits": {}})
    });
    json!({"version": 1, "epoch": 1, "generation": number, "regions": rows, "deployments": deployments,
           "tenants": tenant.into_iter().collect::<Vec<_>>()})
}

struct PolicySetup {
    fixture: Fixture,
    table: watch::Sender<Option<Value>>,
    rows: Vec<Value>,
}

/// Starts two regions of the EU and a hub whose table the test changes.
async fn start_with_table(change: impl FnOnce(&mut EdgeConfig)) -> PolicySetup {
    let (table_to, table_now) = watch::channel(None);
    let mut rows_now = Vec::new();
    let fixture = Fixture::of(&[EUROPE, FRANKFURT], false, change, async |rows| {
        table_to.send_replace(Some(table(1, &rows, "eu", Some(KEY))));
        rows_now = rows;
        hub(table_now).await
    })
    .await;
    PolicySetup { fixture, table: table_to, rows: rows_now }
}

impl PolicySetup {
    /// Publishes a table and waits until the gateway has it.
    async fn publish(&self, number: u64, residency: &str, key: Option<&str>) {
        self.table.send_replace(Some(table(number, &self.rows, residency, key)));
        let generation = "meridian_gateway_route_generation";
        self.fixture
            .wait_until("the gateway has the table", async || {
                self.fixture.scrape().await.get(generation) == number as f64
            })
            .await;
    }

    /// Returns which of the two regions has a request in flight.
    async fn region_in_flight(&self) -> &'static str {
        let begun = Instant::now();
        loop {
            for id in [EUROPE, FRANKFURT] {
                let region = format!("http://{}", self.fixture.regions[id].address);
                let scrape = Scrape::of(&self.fixture.client, &region).await;
                if scrape.get("meridian_ingress_requests_in_flight") == 1.0 {
                    return id;
                }
            }
            assert!(begun.elapsed() < Duration::from_secs(30), "the request has not arrived anywhere");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Returns the number of requests that a region has served or rejected.
    async fn requests_served(&self, id: &str) -> f64 {
        let region = format!("http://{}", self.fixture.regions[id].address);
        Scrape::of(&self.fixture.client, &region)
            .await
            .sum("meridian_ingress_requests_total", "/v1/embeddings")
    }
}

/// Publishes another table while a request waits in its first region, which then reports that another region could
/// serve it. Returns the status and code of the response, and the number of requests that the other region received.
async fn change_while_in_flight(residency: &dyn Fn(&str) -> String, key: Option<&str>) -> (u16, String, f64) {
    let setup = start_with_table(|config| config.hedge = false).await;
    for id in [EUROPE, FRANKFURT] {
        setup.fixture.regions[id].script.send_replace(Script::Waits);
    }
    let waiting = tokio::spawn(setup.fixture.request("in-flight", "locked", "x").send());
    let first = setup.region_in_flight().await;
    let second = if first == EUROPE { FRANKFURT } else { EUROPE };
    setup.fixture.regions[second].script.send_replace(Script::Responds);
    setup.publish(2, &residency(first), key).await;
    setup.fixture.regions[first].script.send_replace(Script::RejectsNotReady);
    let response = waiting.await.unwrap().unwrap();
    let code =
        response.headers().get("x-meridian-error").map_or("", |code| code.to_str().unwrap()).to_owned();
    (response.status().as_u16(), code, setup.requests_served(second).await)
}

#[tokio::test]
async fn a_retry_continues_under_a_newer_table_that_allows_it() {
    let found = change_while_in_flight(&|_| "eu".to_owned(), Some(KEY)).await;
    assert_eq!(found, (200, String::new(), 1.0));
}

#[tokio::test]
async fn a_narrowed_residency_stops_later_attempts() {
    let (status, code, others) = change_while_in_flight(&|first: &str| first.to_owned(), Some(KEY)).await;
    assert_eq!((status, others), (503, 0.0), "{code}: the other region is no longer permitted");
    // No region is allowed any more.
    let (status, code, others) = change_while_in_flight(&|_| "us".to_owned(), Some(KEY)).await;
    assert_eq!((status, code.as_str(), others), (403, "region_not_permitted", 0.0));
}

#[tokio::test]
async fn a_revoked_key_or_removed_tenant_stops_later_attempts() {
    for key in [Some(OTHER), None] {
        let (status, code, others) = change_while_in_flight(&|_| "eu".to_owned(), key).await;
        assert_eq!((status, code.as_str(), others), (401, "invalid_api_key", 0.0), "{key:?}");
    }
}

#[tokio::test]
async fn a_gateway_without_a_hub_rejects_only_locked_deployments_past_policy_max_age() {
    let max = Duration::from_secs(5);
    let mut setup = start_with_table(|config| config.policy_max_age = max).await;
    assert_eq!(setup.fixture.send("fresh", "locked", "x").await.status(), 200);
    let age = "meridian_gateway_policy_age_seconds";
    assert_eq!(setup.fixture.scrape().await.get("meridian_gateway_policy_max_age_seconds"), 5.0);
    setup.table.send_replace(None);
    setup
        .fixture
        .wait_until("the policy is too old", async || setup.fixture.scrape().await.get(age) > 5.0)
        .await;
    let rejected = setup.fixture.send("old", "locked", "x").await;
    assert_eq!(rejected.status(), 503);
    assert_eq!(rejected.headers()["x-meridian-error"], "policy_too_old");
    assert!(rejected.text().await.unwrap().contains("policy_max_age"));
    assert_eq!(
        setup.fixture.send("anywhere", "anywhere", "x").await.status(),
        200,
        "other deployments are served"
    );

    // The age is on disk: a restart does not reset it.
    setup.fixture.restart_edge_with(|config| config.policy_max_age = max).await;
    assert!(setup.fixture.scrape().await.get(age) > 5.0);
    assert_eq!(setup.fixture.send("old-still", "locked", "x").await.status(), 503);
    assert_eq!(setup.fixture.send("anywhere-still", "anywhere", "x").await.status(), 200);

    let again = table(2, &setup.rows, "eu", Some(KEY));
    setup.table.send_replace(Some(again));
    setup.fixture.wait_until("a hub responds", async || setup.fixture.scrape().await.get(age) < 5.0).await;
    assert_eq!(setup.fixture.send("fresh-again", "locked", "x").await.status(), 200);
}
