//! Cold starts through a gateway, between a region without replicas and one with them.

use super::fixture::{Edge, FAR, NEAR, Region, name, wait_until};
use serde_json::json;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use tokio::task::JoinSet;

const S: Duration = Duration::from_secs(1);
const MS: Duration = Duration::from_millis(1);
/// Restricts a request to the near region.
const NEAR_ONLY: [(&str, &str); 1] = [("x-meridian-residency", NEAR)];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_faster_warm_region_is_used_and_no_replica_is_started() {
    let (near, far) = (Region::cold(NEAR, 10 * S).await, Region::warm(FAR).await);
    let edge = Edge::start(&[(NEAR, &near), (FAR, &far)]).await;
    assert_eq!(edge.route(NEAR).await["held_for_ms"], json!({"m": 10_000}));
    for _ in 0..20 {
        let response = edge.send(&[]).await;
        assert_eq!((response.status, response.header("x-meridian-region")), (200, Some(FAR)), "{response:?}");
        assert_eq!(
            (response.number("x-meridian-attempts"), response.header("x-meridian-held-ms")),
            (1, None)
        );
    }
    assert_eq!(near.scraped("meridian_ingress_wakes_total").await, "0");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cold_region_that_is_ready_sooner_than_the_warm_one_responds_is_used() {
    let (near, far) = (Arc::new(Region::cold(NEAR, 10 * S).await), Region::warm(FAR).await);
    let edge = Edge::start(&[(NEAR, &near), (FAR, &far)]).await;
    // The first response shows how long the far one takes.
    far.replica.response_time_ms.store(800, Ordering::SeqCst);
    assert_eq!(edge.send(&[]).await.header("x-meridian-region"), Some(FAR));
    near.set_start_time(Some(50 * MS));
    edge.wait_until(NEAR, |near| near["held_for_ms"] == json!({"m": 50})).await;
    let (wake, starts) = (near.signals.wake.clone(), near.clone());
    let starter = tokio::spawn(async move {
        wake.notified().await;
        starts.mark_ready();
    });
    let response = edge.send(&[]).await;
    assert_eq!((response.status, response.header("x-meridian-region")), (200, Some(NEAR)), "{response:?}");
    assert_eq!(response.number("x-meridian-attempts"), 1);
    assert!(response.header("x-meridian-held-ms").is_some(), "{response:?}");
    starter.await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cold_start_longer_than_estimated_causes_no_retry_and_no_ejection() {
    let (near, far) = (Arc::new(Region::warm(NEAR).await), Region::warm(FAR).await);
    let edge = Arc::new(Edge::start(&[(NEAR, &near), (FAR, &far)]).await);
    // After these responses the gateway has a first-byte timeout for the region: a tenth of a second.
    for _ in 0..32 {
        assert_eq!(edge.send(&NEAR_ONLY).await.status, 200);
    }
    near.set_start_time(Some(300 * MS));
    near.replica.ready.store(false, Ordering::SeqCst);
    edge.wait_until(NEAR, |near| near["held_for_ms"] == json!({"m": 300})).await;
    let mut asking = JoinSet::new();
    for _ in 0..30 {
        let edge = edge.clone();
        asking.spawn(async move { edge.send(&NEAR_ONLY).await });
    }
    near.wait_until_held(30).await;
    // Longer than the estimate, its tolerance and a first-byte timeout together.
    let held = Instant::now();
    wait_until("they have waited", async || held.elapsed() > 1500 * MS).await;
    near.mark_ready();
    for response in asking.join_all().await {
        assert_eq!(
            (response.status, response.header("x-meridian-region")),
            (200, Some(NEAR)),
            "{response:?}"
        );
        assert_eq!(response.number("x-meridian-attempts"), 1, "no other region was used");
        assert!(response.number("x-meridian-held-ms") >= 1500, "{response:?}");
    }
    assert_eq!(edge.route(NEAR).await["circuit"]["state"], "closed", "{}", edge.route(NEAR).await);
    let late_after = edge.route(NEAR).await["circuit"]["first_byte"][0]["timeout_ms"].as_u64().unwrap();
    assert!(late_after < 1000, "the hold time is not part of the response time: {late_after} ms");
    assert_eq!(far.replica.ids().len(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_gets_retry_after_if_every_cold_start_exceeds_its_deadline() {
    let (near, far) = (Region::cold(NEAR, 20 * S).await, Region::cold(FAR, 9 * S).await);
    let edge = Edge::start(&[(NEAR, &near), (FAR, &far)]).await;
    let response = edge.send(&[("x-meridian-timeout-ms", "3000")]).await;
    assert_eq!(
        (response.status, response.header("x-meridian-error")),
        (503, Some("cold_start")),
        "{response:?}"
    );
    assert_eq!(response.number("retry-after"), 9, "the sooner of the two");
    assert_eq!(near.scraped("meridian_ingress_not_held_total{reason=\"deadline\"}").await, "0");
    assert_eq!(near.spoke().held(&name()).requests, 0);
}
