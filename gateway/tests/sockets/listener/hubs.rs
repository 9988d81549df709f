//! Several hubs, some of them unresponsive: a gateway takes its table from any that has one.

use super::fixture::{Fixture, TIMEOUT};
use crate::hub;
use serde_json::json;
use std::net::{SocketAddr, TcpListener};
use std::time::Instant;

/// Returns a hub that accepts connections and never responds: its process is stopped, or its disk hangs.
fn hangs() -> (TcpListener, String) {
    let socket = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", socket.local_addr().unwrap());
    (socket, url)
}

/// Starts a hub with one table, of the second generation and without regions, which it returns at once to every
/// request.
async fn with_the_next_table() -> SocketAddr {
    let table = json!({"version": 1, "epoch": 1, "generation": 2, "regions": [], "deployments": []});
    let routes = move || std::future::ready(axum::Json(table.clone()));
    hub::serve(axum::Router::new().route(scheduler_api::paths::ROUTES, axum::routing::get(routes))).await
}

#[tokio::test]
async fn a_gateway_takes_the_table_of_the_third_hub_if_the_first_two_refuse_or_hang() {
    let mut fixture = Fixture::new().await;
    let ((_silent, silent), refuses) = (hangs(), hangs().1);
    let good = fixture.hub.trim_matches('\'').to_owned();
    fixture.hub = json!([refuses, silent, good]).to_string();
    let edge = fixture.edge("").await;
    let (status, routes) = edge.operate("/routes").await;
    assert!(status == 200 && routes.contains("\"generation\":\"1.1\""), "{routes}");
}

/// The first hub of the list returns its table and then hangs, so that only the second can return the newer one.
#[tokio::test]
async fn a_gateway_leaves_a_hub_that_hangs_after_its_first_response() {
    let mut fixture = Fixture::new().await;
    let (old, new) = (fixture.hub.trim_matches('\'').to_owned(), with_the_next_table().await);
    fixture.hub = json!([old, format!("http://{new}")]).to_string();
    let (edge, begun) = (fixture.edge("").await, Instant::now());
    while !edge.operate("/routes").await.1.contains("\"generation\":\"1.2\"") {
        assert!(begun.elapsed() < TIMEOUT, "it continues to use the unresponsive hub");
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
}
