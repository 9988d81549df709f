//! Deployments of which no replica can start: at an ingress, and through a gateway before two regions.

use super::fixture::{Edge, FAR, NEAR, Region, name, wait_until};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::{Duration, Instant};

const S: Duration = Duration::from_secs(1);
const BODY: &[u8] = br#"{"model":"m","input":"a question of a few words"}"#;
/// Longer than a rejection takes on a busy machine, and shorter than the start for which a request would be held.
const AT_ONCE: Duration = Duration::from_secs(5);
const START_TIME: Duration = Duration::from_secs(60);
const FAILED_METRIC: &str = "meridian_deployment_failed{deployment=\"m\",reason=\"model_missing\"}";

/// Waits until a gateway knows that the deployment has failed in a region; without a reason, that it has not.
async fn wait_for_failure(edge: &Edge, region: &str, reason: Option<&str>) {
    let expected = reason.map_or_else(|| json!({}), |reason| json!({"m": reason}));
    edge.wait_until(region, |region| region["failed"] == expected).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_is_not_sent_to_a_failed_region_and_returns_when_it_has_recovered() {
    let (near, far) = (Region::cold(NEAR, START_TIME).await, Region::warm(FAR).await);
    let edge = Edge::start(&[(NEAR, &near), (FAR, &far)]).await;
    near.replica.fail(Some("model_missing"));
    wait_for_failure(&edge, NEAR, Some("model_missing")).await;
    assert_eq!(edge.route(NEAR).await["held_for_ms"], json!({}));
    for _ in 0..5 {
        let begun = Instant::now();
        let response = edge.send(&[]).await;
        assert_eq!((response.status, response.header("x-meridian-region")), (200, Some(FAR)), "{response:?}");
        assert_eq!(response.number("x-meridian-attempts"), 1, "the failed region is no target");
        assert!(begun.elapsed() < AT_ONCE);
    }
    assert_eq!(near.scraped(FAILED_METRIC).await, "1");

    near.replica.fail(None);
    near.mark_ready();
    wait_for_failure(&edge, NEAR, None).await;
    edge.wait_until(NEAR, |near| near["ready"] == json!(["m"])).await;
    assert_eq!(edge.send(&[]).await.header("x-meridian-region"), Some(NEAR));
    assert!(!near.metrics().await.contains(FAILED_METRIC));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_region_that_a_gateway_does_not_know_to_have_failed_rejects_at_once_and_the_next_one_responds() {
    let (near, far) = (Region::cold(NEAR, START_TIME).await, Region::warm(FAR).await);
    let edge = Edge::start(&[(NEAR, &near), (FAR, &far)]).await;
    let residency = [("x-meridian-residency", NEAR)];
    // The region knows it before its next report.
    near.replica.fail(Some("model_missing"));
    wait_until("the region knows", async || {
        near.status().await["deployments"][0]["failed"] == "model_missing"
    })
    .await;
    let begun = Instant::now();
    let response = edge.send(&residency).await;
    assert_eq!(
        (response.status, response.header("x-meridian-error")),
        (503, Some("deployment_failed")),
        "{response:?}"
    );
    assert!(begun.elapsed() < AT_ONCE);
    let response = edge.send(&[]).await;
    assert_eq!((response.status, response.header("x-meridian-region")), (200, Some(FAR)), "{response:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_gets_the_reason_without_retry_after_if_all_allowed_regions_have_failed() {
    let (near, far) = (Region::cold(NEAR, START_TIME).await, Region::cold(FAR, START_TIME).await);
    let edge = Edge::start(&[(NEAR, &near), (FAR, &far)]).await;
    for (id, region) in [(NEAR, &near), (FAR, &far)] {
        region.replica.fail(Some("model_forbidden"));
        wait_for_failure(&edge, id, Some("model_forbidden")).await;
    }
    let begun = Instant::now();
    let response = edge.send(&[]).await;
    assert!(begun.elapsed() < AT_ONCE);
    assert_eq!(
        (response.status, response.header("x-meridian-error")),
        (503, Some("deployment_failed")),
        "{response:?}"
    );
    assert_eq!(
        (response.header("retry-after"), response.header("retry-after-ms")),
        (None, None),
        "{response:?}"
    );
    let error: Value = serde_json::from_str(&response.body).unwrap();
    let message = error["error"]["message"].as_str().unwrap();
    assert_eq!(error["error"]["code"], "deployment_failed");
    for part in ["'m'", "model_forbidden", "denies access", NEAR, FAR] {
        assert!(message.contains(part), "{part} in {message}");
    }
    assert!(!message.contains("/srv/models"), "the text of the replica is for operators: {message}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_failed_region_beside_one_that_is_down_is_no_failed_deployment() {
    let (near, far) = (Region::cold(NEAR, START_TIME).await, Region::warm(FAR).await);
    let edge = Edge::start(&[(NEAR, &near), (FAR, &far)]).await;
    near.replica.fail(Some("disk_full"));
    wait_for_failure(&edge, NEAR, Some("disk_full")).await;
    drop(far);
    edge.wait_until(FAR, |far| far["health"] == "down").await;
    let response = edge.send(&[]).await;
    assert_eq!(
        (response.status, response.header("x-meridian-error")),
        (503, Some("no_capacity_in_allowed_regions")),
        "{response:?}"
    );
    assert!(response.body.contains("failed: disk_full") && response.body.contains(FAR), "{response:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn held_requests_are_released_when_the_start_fails() {
    let region = Arc::new(Region::cold(NEAR, START_TIME).await);
    let held = tokio::spawn({
        let region = region.clone();
        async move { region.send("x", &[("x-meridian-timeout-ms", "600000")], BODY).await }
    });
    region.wait_until_held(1).await;
    region.replica.fail(Some("unknown_family"));
    let response = tokio::time::timeout(30 * S, held).await.expect("it is released").unwrap();
    assert_eq!(
        (response.status, response.header("x-meridian-error")),
        (503, Some("deployment_failed")),
        "{response:?}"
    );
    assert!(response.body.contains("unknown_family"), "{response:?}");
    assert_eq!(region.spoke().held(&name()).requests, 0);
    let rejected = region.send("y", &[], BODY).await;
    assert_eq!(
        rejected.header("x-meridian-error"),
        Some("deployment_failed"),
        "it is not held: {rejected:?}"
    );
    assert_eq!(region.scraped("meridian_ingress_not_held_total{reason=\"failed\"}").await, "1");
    assert!(region.replica.ids().is_empty());
}
