//! A hub with one route table: it returns it to clients that have none, and holds every later poll.

use serde_json::{Value, json};
use std::net::SocketAddr;
use tokio::net::TcpListener;

/// Returns a deployment as in the route table, with this residency; `null` allows all regions.
pub(crate) fn deployment(name: &str, residency: Value) -> Value {
    json!({"name": name, "task": "embed", "model": "pypi://m", "engine": {"kind": "cpu", "precision": "f32"},
           "residency": residency, "regions": []})
}

/// Starts it and returns its address.
pub(crate) async fn hub(epoch: u64, generation: u64, regions: &[Value], deployments: &[Value]) -> SocketAddr {
    let table = json!({
        "version": 1, "epoch": epoch, "generation": generation, "regions": regions, "deployments": deployments,
    });
    let routes = move |query: axum::extract::RawQuery| async move {
        if query.0.is_some_and(|query| query.contains("after=")) {
            std::future::pending::<()>().await;
        }
        axum::Json(table)
    };
    serve(axum::Router::new().route(scheduler_api::paths::ROUTES, axum::routing::get(routes))).await
}

/// Serves on a free port of this machine until the test ends.
pub(crate) async fn serve(router: axum::Router) -> SocketAddr {
    let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = socket.local_addr().unwrap();
    tokio::spawn(axum::serve(socket, router).into_future());
    address
}
