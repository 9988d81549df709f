//! What operators ask an edge, on a port of its own.
//!
//! `GET /livez`: it runs. `GET /readyz`: it has a route table. `GET /routes`: the table, and what is known of each
//! region.

use super::table::Current;
use super::watch::Watch;
use crate::circuits;
use crate::config::EdgeConfig;
use axum::Json;
use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::get;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Instant;
use tokio::net::TcpListener;
use tokio::sync::watch;

#[derive(Clone)]
struct Operations {
    config: Arc<EdgeConfig>,
    views: watch::Receiver<Current>,
    watch: Arc<Watch>,
}

/// Serves operators for ever.
pub(crate) async fn serve(
    socket: TcpListener,
    config: Arc<EdgeConfig>,
    views: watch::Receiver<Current>,
    watch: Arc<Watch>,
) {
    let router = Router::new()
        .route("/livez", get(|| async { "alive\n" }))
        .route("/readyz", get(ready))
        .route("/routes", get(routes))
        .with_state(Operations { config, views, watch });
    if let Err(error) = axum::serve(socket, router).await {
        tracing::error!(%error, "the operations port is gone");
    }
}

async fn ready(State(operations): State<Operations>) -> (StatusCode, &'static str) {
    if operations.views.borrow().is_some() {
        (StatusCode::OK, "ready\n")
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, "no route table yet\n")
    }
}

async fn routes(State(operations): State<Operations>) -> Json<Value> {
    let Operations { config, views, watch } = operations;
    let Some(view) = views.borrow().clone() else {
        return Json(json!({"generation": null, "regions": []}));
    };
    let now = Instant::now();
    let states = watch.circuits();
    let circuit = |region| states.iter().find(|state| state.target == region);
    let known = watch.known();
    let regions: Vec<_> = view
        .regions()
        .map(|(region, address)| {
            let (health, age) = known.fleet.state(region, now);
            json!({
                "region": config.catalogue.region(region).id.as_str(),
                "endpoint": address.to_string(),
                "health": format!("{health:?}").to_lowercase(),
                "report_age_ms": age.map(|age| age.as_millis() as u64),
                "rtt_ms": known.latency.estimate(region, now).as_secs_f64() * 1e3,
                "ready": known.fleet.ready(region),
                "circuit": circuit(region).map(|state| circuits::shown(state, now)),
            })
        })
        .collect();
    let deployments: Vec<_> = view
        .deployments()
        .map(|deployment| json!({"name": deployment.name.as_str(), "residency": deployment.residency.to_string()}))
        .collect();
    Json(json!({"generation": view.generation.to_string(), "regions": regions, "deployments": deployments}))
}
