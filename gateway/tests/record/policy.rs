//! Policies that change while a request is in flight, and a gateway that loses its hub.

use super::scene::{EUROPE, Scene, Scrape, Script};
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
        async move { answer(query.unwrap_or_default(), &mut table).await }
    };
    serve(axum::Router::new().route(scheduler_api::paths::ROUTES, axum::routing::get(routes))).await
}

async fn answer(query: String, table: &mut watch::Receiver<Option<Value>>) -> Response {
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

struct Changing {
    scene: Scene,
    table: watch::Sender<Option<Value>>,
    rows: Vec<Value>,
}

/// Starts two regions of the EU and a hub whose table the test changes.
async fn changing(change: impl FnOnce(&mut EdgeConfig)) -> Changing {
    let (table_to, table_now) = watch::channel(None);
    let mut rows_now = Vec::new();
    let scene = Scene::of(&[EUROPE, FRANKFURT], false, change, async |rows| {
        table_to.send_replace(Some(table(1, &rows, "eu", Some(KEY))));
        rows_now = rows;
        hub(table_now).await
    })
    .await;
    Changing { scene, table: table_to, rows: rows_now }
}

impl Changing {
    /// Publishes a table and waits until the gateway has it.
    async fn publish(&self, number: u64, residency: &str, key: Option<&str>) {
        self.table.send_replace(Some(table(number, &self.rows, residency, key)));
        let generation = "meridian_gateway_route_generation";
        self.scene
            .until("the table is in hand", async || {
                self.scene.scrape().await.get(generation) == number as f64
            })
            .await;
    }

    /// Returns which of the two regions has a request in flight.
    async fn asked(&self) -> &'static str {
        let begun = Instant::now();
        loop {
            for id in [EUROPE, FRANKFURT] {
                let region = format!("http://{}", self.scene.regions[id].address);
                let scrape = Scrape::of(&self.scene.client, &region).await;
                if scrape.get("meridian_ingress_requests_in_flight") == 1.0 {
                    return id;
                }
            }
            assert!(begun.elapsed() < Duration::from_secs(30), "the request has not arrived anywhere");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Returns the number of requests that a region has answered or rejected.
    async fn served(&self, id: &str) -> f64 {
        let region = format!("http://{}", self.scene.regions[id].address);
        Scrape::of(&self.scene.client, &region).await.sum("meridian_ingress_requests_total", "/v1/embeddings")
    }
}

/// Publishes another table while a request waits in its first region, which then reports that another region could
/// serve it. Returns the status and code of the response, and the number of requests that the other region received.
async fn under_way(residency: &dyn Fn(&str) -> String, key: Option<&str>) -> (u16, String, f64) {
    let world = changing(|config| config.hedge = false).await;
    for id in [EUROPE, FRANKFURT] {
        world.scene.regions[id].script.send_replace(Script::Waits);
    }
    let waiting = tokio::spawn(world.scene.asking("under-way", "locked", "x").send());
    let first = world.asked().await;
    let second = if first == EUROPE { FRANKFURT } else { EUROPE };
    world.scene.regions[second].script.send_replace(Script::Answers);
    world.publish(2, &residency(first), key).await;
    world.scene.regions[first].script.send_replace(Script::SaysElsewhere);
    let answer = waiting.await.unwrap().unwrap();
    let code = answer.headers().get("x-meridian-error").map_or("", |code| code.to_str().unwrap()).to_owned();
    (answer.status().as_u16(), code, world.served(second).await)
}

#[tokio::test]
async fn a_retry_continues_under_a_newer_table_that_allows_it() {
    let found = under_way(&|_| "eu".to_owned(), Some(KEY)).await;
    assert_eq!(found, (200, String::new(), 1.0));
}

#[tokio::test]
async fn a_narrowed_residency_stops_later_attempts() {
    let (status, code, others) = under_way(&|first: &str| first.to_owned(), Some(KEY)).await;
    assert_eq!((status, others), (503, 0.0), "{code}: the other region is no longer permitted");
    // No region is allowed any more.
    let (status, code, others) = under_way(&|_| "us".to_owned(), Some(KEY)).await;
    assert_eq!((status, code.as_str(), others), (403, "region_not_permitted", 0.0));
}

#[tokio::test]
async fn a_revoked_key_or_removed_tenant_stops_later_attempts() {
    for key in [Some(OTHER), None] {
        let (status, code, others) = under_way(&|_| "eu".to_owned(), key).await;
        assert_eq!((status, code.as_str(), others), (401, "invalid_api_key", 0.0), "{key:?}");
    }
}

#[tokio::test]
async fn a_gateway_without_a_hub_rejects_only_locked_deployments_past_policy_max_age() {
    let max = Duration::from_secs(5);
    let mut world = changing(|config| config.policy_max_age = max).await;
    assert_eq!(world.scene.ask("fresh", "locked", "x").await.status(), 200);
    let age = "meridian_gateway_policy_age_seconds";
    assert_eq!(world.scene.scrape().await.get("meridian_gateway_policy_max_age_seconds"), 5.0);
    world.table.send_replace(None);
    world.scene.until("it is old", async || world.scene.scrape().await.get(age) > 5.0).await;
    let rejected = world.scene.ask("old", "locked", "x").await;
    assert_eq!(rejected.status(), 503);
    assert_eq!(rejected.headers()["x-meridian-error"], "policy_too_old");
    assert!(rejected.text().await.unwrap().contains("policy_max_age"));
    assert_eq!(world.scene.ask("anywhere", "anywhere", "x").await.status(), 200, "others continue");

    // The age is on disk: a restart does not reset it.
    world.scene.restart_edge_with(|config| config.policy_max_age = max).await;
    assert!(world.scene.scrape().await.get(age) > 5.0);
    assert_eq!(world.scene.ask("old-still", "locked", "x").await.status(), 503);
    assert_eq!(world.scene.ask("anywhere-still", "anywhere", "x").await.status(), 200);

    let again = table(2, &world.rows, "eu", Some(KEY));
    world.table.send_replace(Some(again));
    world.scene.until("a hub answers", async || world.scene.scrape().await.get(age) < 5.0).await;
    assert_eq!(world.scene.ask("fresh-again", "locked", "x").await.status(), 200);
}
