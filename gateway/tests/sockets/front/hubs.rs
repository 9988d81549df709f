//! Several hubs, of which some are silent: an edge takes its table from whoever has one.

use super::scene::{PATIENCE, Scene};
use crate::hub;
use serde_json::json;
use std::net::{SocketAddr, TcpListener};
use std::time::Instant;

/// One that takes connections and says nothing: its process is stopped, or its disk stands still.
fn hangs() -> (TcpListener, String) {
    let socket = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", socket.local_addr().unwrap());
    (socket, url)
}

/// A hub that has one table, of the second generation, which leads to nobody; and gives it to everybody at once.
async fn with_the_next_table() -> SocketAddr {
    let table = json!({"version": 1, "epoch": 1, "generation": 2, "regions": [], "deployments": []});
    let routes = move || std::future::ready(axum::Json(table.clone()));
    hub::serve(axum::Router::new().route("/v1/routes", axum::routing::get(routes))).await
}

#[tokio::test]
async fn an_edge_whose_first_hubs_refuse_or_hang_takes_the_table_of_the_third() {
    let mut scene = Scene::new().await;
    let ((_silent, silent), refuses) = (hangs(), hangs().1);
    let good = scene.hub.trim_matches('\'').to_owned();
    scene.hub = json!([refuses, silent, good]).to_string();
    let edge = scene.edge("").await;
    let (status, routes) = edge.operate("/routes").await;
    assert!(status == 200 && routes.contains("\"generation\":\"1.1\""), "{routes}");
}

/// The first hub of the list gives its table and then answers nothing any more, so that only the second can tell of the
/// newer one.
#[tokio::test]
async fn a_hub_that_hangs_after_its_first_answer_is_left_for_the_next() {
    let mut scene = Scene::new().await;
    let (old, new) = (scene.hub.trim_matches('\'').to_owned(), with_the_next_table().await);
    scene.hub = json!([old, format!("http://{new}")]).to_string();
    let (edge, begun) = (scene.edge("").await, Instant::now());
    while !edge.operate("/routes").await.1.contains("\"generation\":\"1.2\"") {
        assert!(begun.elapsed() < PATIENCE, "it stays with a hub that hangs");
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
}
