//! Traffic plan at the gateway, over real sockets: division of requests by weights, precedence over weights, and
//! invalid plans or a missing hub.

pub(crate) mod fixture;
mod order;
mod residency;

use fixture::{Edge, FAR, Hub, NEAR, plan, region, row, table};
use serde_json::{Value, json};
use std::net::SocketAddr;

async fn two_regions() -> [SocketAddr; 2] {
    [region(NEAR).await, region(FAR).await]
}

#[tokio::test]
async fn requests_are_divided_by_the_weights_and_explained_by_them() {
    let dir = tempfile::tempdir().unwrap();
    let (hub, at) = Hub::start(table(1, two_regions().await, &[])).await;
    hub.set_plan(plan(7, &[row("m", Value::Null, &[(NEAR, 300), (FAR, 700)])]));
    let edge = Edge::start(dir.path(), at).await;
    edge.wait_for_plan("1.7", 2).await;
    // Seven tenths of 400 are 280, give or take 9.2.
    let far = edge.count_far(400, "m").await;
    assert!((235..=325).contains(&far), "{far} of 400");
    // Without a row the nearest region is used.
    assert_eq!(edge.count_far(20, "m-us").await, 0);

    let region = edge.serving_region("m", &[("x-request-id", "one")]).await;
    let explained = edge.operators("/explain/one").await;
    assert_eq!(
        (&explained["regions"][0]["region"], &explained["regions"][0]["rank"]),
        (&json!(region), &json!(1))
    );
    let of =
        |id: &str| explained["regions"].as_array().unwrap().iter().find(|row| row["region"] == id).unwrap();
    assert_eq!((&of(FAR)["weight_permille"], &of(FAR)["planned"]), (&json!(700), &json!("nearer_full")));
    assert_eq!(of(NEAR)["weight_permille"], 300);
    assert_eq!(edge.scraped("meridian_gateway_plan_rows").await, 1);
}

#[tokio::test]
async fn a_plan_moves_bulk_before_interactive_requests() {
    let dir = tempfile::tempdir().unwrap();
    let (hub, at) = Hub::start(table(1, two_regions().await, &[])).await;
    hub.set_plan(plan(1, &[row("m", Value::Null, &[(FAR, 500), (NEAR, 500)])]));
    let edge = Edge::start(dir.path(), at).await;
    edge.wait_for_plan("1.1", 2).await;
    let both = async || {
        let lookup = edge.serving_region("m", &[]).await;
        let bulk = edge.serving_region("m", &[("x-meridian-priority", "bulk")]).await;
        [lookup, bulk]
    };
    // Until there is an average of both.
    let before = *hub.demand_reports.borrow();
    while *hub.demand_reports.borrow() < before + 2 {
        both().await;
    }
    let mut far = [0; 2];
    for _ in 0..200 {
        let regions = both().await;
        for (far, region) in far.iter_mut().zip(&regions) {
            *far += u32::from(region == FAR);
        }
    }
    // Half of the requests are interactive, within the accuracy of a second's count.
    let [lookups, bulk] = far;
    assert!(lookups <= 30 && bulk >= 170, "{lookups} lookups and {bulk} of the backfill of 200 each");
}

/// Invariant 1, Residency: for every plan.
#[tokio::test]
async fn a_weight_sends_no_request_to_an_excluded_or_failed_region() {
    let dir = tempfile::tempdir().unwrap();
    let (hub, at) = Hub::start(table(1, two_regions().await, &[])).await;
    hub.set_plan(plan(1, &[row("m", Value::Null, &[(FAR, 1000)]), row("m-us", json!("us"), &[(FAR, 1000)])]));
    let edge = Edge::start(dir.path(), at).await;
    edge.wait_for_plan("1.1", 2).await;
    assert_eq!(edge.count_far(20, "m").await, 20);
    assert_eq!(edge.count_far(20, "m-us").await, 0);
    for _ in 0..20 {
        assert_eq!(edge.serving_region("m", &[("x-meridian-residency", "us")]).await, NEAR);
    }

    let closed = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let regions = [region(NEAR).await, closed.local_addr().unwrap()];
    drop(closed);
    let dir = tempfile::tempdir().unwrap();
    let (hub, at) = Hub::start(table(1, regions, &[])).await;
    hub.set_plan(plan(1, &[row("m", Value::Null, &[(FAR, 1000)])]));
    let edge = Edge::start(dir.path(), at).await;
    edge.wait_for_plan("1.1", 1).await;
    assert_eq!(edge.count_far(20, "m").await, 0);
}

/// Invariant 5, Monotonic plans.
#[tokio::test]
async fn an_older_or_invalid_plan_is_rejected_and_counted() {
    let dir = tempfile::tempdir().unwrap();
    let (hub, at) = Hub::start(table(1, two_regions().await, &[])).await;
    let to = |region: &str| row("m", Value::Null, &[(region, 1000)]);
    hub.set_plan(plan(5, &[to(FAR)]));
    let edge = Edge::start(dir.path(), at).await;
    edge.wait_for_plan("1.5", 2).await;
    let elsewhere = json!({"version": 1, "epoch": 1, "generation": 9, "gateway": FAR, "rows": []});
    let other = json!({"version": 2, "epoch": 1, "generation": 9, "gateway": NEAR, "rows": []});
    let short = plan(9, &[row("m", Value::Null, &[(NEAR, 999)])]);
    for wrong in [plan(4, &[to(NEAR)]), plan(5, &[to(NEAR)]), elsewhere, other, short, json!("nonsense")] {
        let before = edge.scraped("meridian_gateway_plans_refused_total").await;
        hub.set_plan(wrong);
        hub.wait_until_reported().await;
        assert!(edge.scraped("meridian_gateway_plans_refused_total").await > before);
        assert_eq!(edge.count_far(5, "m").await, 5, "the last valid table stays in use");
    }
    hub.set_plan(plan(6, &[to(NEAR)]));
    edge.wait_for_plan("1.6", 2).await;
    assert_eq!(edge.count_far(5, "m").await, 0);
}

/// Invariant 4, Static stability.
#[tokio::test]
async fn a_gateway_that_starts_without_its_hub_uses_the_plan_on_disk() {
    let dir = tempfile::tempdir().unwrap();
    let (hub, at) = Hub::start(table(1, two_regions().await, &[])).await;
    hub.set_plan(plan(3, &[row("m", Value::Null, &[(FAR, 1000)])]));
    let edge = Edge::start(dir.path(), at).await;
    edge.wait_for_plan("1.3", 2).await;
    drop(edge);
    let closed = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let edge = Edge::start(dir.path(), closed).await;
    edge.wait_for_plan("1.3", 2).await;
    assert_eq!(edge.count_far(20, "m").await, 20);

    std::fs::write(dir.path().join("routes.plan"), "torn").unwrap();
    let edge = Edge::start(dir.path(), closed).await;
    edge.wait_until("it serves without a plan", |routes| {
        let healthy = |region: &&Value| region["health"] == "healthy";
        routes["regions"].as_array().into_iter().flatten().filter(healthy).count() == 2
    })
    .await;
    assert_eq!(edge.count_far(20, "m").await, 0, "the nearest");
}

#[tokio::test]
async fn a_draining_region_keeps_locked_requests_and_its_share_of_the_plan() {
    let dir = tempfile::tempdir().unwrap();
    let regions = two_regions().await;
    let (hub, at) = Hub::start(table(1, regions, &[NEAR])).await;
    let edge = Edge::start(dir.path(), at).await;
    let routes = edge
        .wait_until("both regions are healthy", |routes| {
            let rows = routes["regions"].as_array().into_iter().flatten();
            rows.filter(|region| region["health"] == "healthy").count() == 2
        })
        .await;
    let draining: Vec<_> =
        routes["regions"].as_array().unwrap().iter().filter(|row| row["draining"] == true).collect();
    assert_eq!((draining.len(), &draining[0]["region"]), (1, &json!(NEAR)));
    assert_eq!(edge.count_far(20, "m").await, 20, "the nearest region that does not drain");
    assert_eq!(edge.count_far(20, "m-us").await, 0, "no other region is allowed");

    // It drains at the pace of the plan.
    hub.set_plan(plan(1, &[row("m", Value::Null, &[(NEAR, 900), (FAR, 100)])]));
    edge.wait_for_plan("1.1", 2).await;
    let far = edge.count_far(100, "m").await;
    assert!(far < 40, "{far} of 100");
    hub.set_plan(plan(2, &[row("m", Value::Null, &[(FAR, 1000)])]));
    edge.wait_for_plan("1.2", 2).await;
    assert_eq!(edge.count_far(20, "m").await, 20);
    hub.table.send_replace(table(2, regions, &[]));
    hub.set_plan(plan(3, &[row("m", Value::Null, &[(NEAR, 1000)])]));
    edge.wait_for_plan("1.3", 2).await;
    assert_eq!(edge.count_far(20, "m").await, 0);
}

#[tokio::test]
async fn demand_is_reported_to_the_hub_by_class_and_origin() {
    let dir = tempfile::tempdir().unwrap();
    let (hub, at) = Hub::start(table(1, two_regions().await, &[])).await;
    let edge = Edge::start(dir.path(), at).await;
    edge.wait_until("both regions are healthy", |routes| {
        let rows = routes["regions"].as_array().into_iter().flatten();
        rows.filter(|region| region["health"] == "healthy").count() == 2
    })
    .await;
    for _ in 0..50 {
        edge.serving_region("m", &[]).await;
        edge.serving_region("m", &[("x-meridian-residency", "eu")]).await;
        edge.serving_region("m-us", &[]).await;
    }
    hub.wait_until_reported().await;
    let reported = hub.demand.lock().unwrap().clone().unwrap();
    assert_eq!(reported.gateway, NEAR);
    let classes: Vec<_> = reported
        .classes
        .iter()
        .map(|class| (class.deployment.as_str(), class.residency.as_deref(), class.origin.as_str()))
        .collect();
    assert_eq!(classes, [("m", None, NEAR), ("m", Some("eu"), NEAR), ("m-us", Some("us"), NEAR)]);
    assert!(reported.classes.iter().all(|class| class.tokens_per_second > 0), "{reported:?}");
    assert_eq!(edge.scraped("meridian_gateway_demand_missed_total").await, 0);
}
