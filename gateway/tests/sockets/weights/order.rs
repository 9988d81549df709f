//! Deployment with an order of regions (active-passive): the first one takes all requests, is killed, and returns.

use super::fixture::{Edge, FAR, Hub, NEAR, TIMEOUT, plan, region, region_router, row, table};
use serde_json::{Value, json};
use std::net::{SocketAddr, TcpListener};
use std::time::Instant;
use tokio::runtime::{Builder, Runtime};

/// Region that can be killed: the end of its runtime closes its listener and all connections.
struct KillableRegion {
    address: SocketAddr,
    runtime: Option<Runtime>,
}

impl KillableRegion {
    async fn start(id: &'static str, address: SocketAddr) -> KillableRegion {
        let begun = Instant::now();
        let listener = loop {
            match TcpListener::bind(address) {
                Ok(listener) => break listener,
                // The listener of a killed region is closed a moment later.
                Err(error) => assert!(begun.elapsed() < TIMEOUT, "{error}"),
            }
            tokio::task::yield_now().await;
        };
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        runtime.spawn(async move {
            let listener = tokio::net::TcpListener::from_std(listener).unwrap();
            axum::serve(listener, region_router(id)).await
        });
        KillableRegion { address, runtime: Some(runtime) }
    }

    /// Kills the region; returns the address for the next one.
    fn kill(self) -> SocketAddr {
        self.address
    }
}

impl Drop for KillableRegion {
    fn drop(&mut self) {
        // Dropped as it is, a runtime would block.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

fn health_of<'a>(routes: &'a Value, id: &str) -> Option<&'a str> {
    let mut regions = routes["regions"].as_array().into_iter().flatten();
    regions.find(|region| region["region"] == id)?["health"].as_str()
}

#[tokio::test]
async fn the_first_region_of_an_order_takes_all_requests_until_it_dies_and_again_when_it_is_back() {
    let dir = tempfile::tempdir().unwrap();
    let far = KillableRegion::start(FAR, ([127, 0, 0, 1], 0).into()).await;
    let mut routes = table(1, [region(NEAR).await, far.address], &[]);
    routes["deployments"][0]["regions"] = json!([NEAR, FAR]);
    routes["deployments"][0]["routing"] = json!({"order": [FAR, NEAR]});
    let (hub, at) = Hub::start(routes).await;
    // A plan of before the order, by which all requests would go to the standby.
    hub.set_plan(plan(
        1,
        &[row("m", Value::Null, &[(NEAR, 1000)]), row("m-us", json!("us"), &[(NEAR, 1000)])],
    ));
    let edge = Edge::start(dir.path(), at).await;
    edge.wait_for_plan("1.1", 2).await;
    let explained = async |id: &str| {
        let served_by = edge.serving_region("m", &[("x-request-id", id)]).await;
        (served_by, edge.operators(&format!("/explain/{id}")).await["order"].clone())
    };
    assert_eq!(edge.count_far(20, "m").await, 20, "neither distance nor the plan counts");
    assert_eq!(
        edge.count_far(20, "m-us").await,
        0,
        "a deployment without an order is served by the nearest region"
    );
    assert_eq!(edge.serving_region("m", &[("x-meridian-residency", "us")]).await, NEAR, "residency binds");
    let order = json!({"regions": [FAR, NEAR], "place": 1, "passed_over": []});
    assert_eq!(explained("before").await, (FAR.to_owned(), order));

    let address = far.kill();
    // No request fails: those that still reach for the first region are retried at the next one.
    assert_eq!(edge.count_far(20, "m").await, 0);
    edge.wait_until("the first region is down", |routes| health_of(routes, FAR) == Some("down")).await;
    assert_eq!(edge.count_far(20, "m").await, 0);
    let passed_over = [json!({"region": FAR, "reason": "down"})];
    let order = json!({"regions": [FAR, NEAR], "place": 2, "passed_over": passed_over});
    assert_eq!(explained("meanwhile").await, (NEAR.to_owned(), order));

    let far = KillableRegion::start(FAR, address).await;
    edge.wait_until("the first region is healthy", |routes| health_of(routes, FAR) == Some("healthy")).await;
    // The circuit breaker of a region that has failed admits a growing share of the requests over a few seconds.
    let order = json!({"regions": [FAR, NEAR], "place": 1, "passed_over": []});
    let begun = Instant::now();
    for number in 0.. {
        let all = edge.count_far(20, "m").await == 20;
        if all && explained(&format!("after-{number}")).await == (FAR.to_owned(), order.clone()) {
            break;
        }
        assert!(begun.elapsed() < TIMEOUT, "the first region does not take all requests again");
    }
    far.kill();
}
