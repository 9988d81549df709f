//! What operators ask an edge, on a port of its own.
//!
//! | path | says |
//! |---|---|
//! | `/livez` | it runs, and no lock that requests need is held for good ([`super::health`]) |
//! | `/readyz` | it could serve a request now: it has a route table, decides, and is not about to leave |
//! | `/routes` | the table, and what is known of each region |
//! | `/explain/{id}` | why a request went where it went ([`super::explain`]) |
//! | `/metrics` | what it has done and what it holds, for Prometheus ([`super::scrape`]) |

use super::explain::{self, KEPT_MAX, health_word};
use super::operator_state::Operations;
use super::scrape;
use crate::circuits;
use crate::metrics::CONTENT_TYPE;
use axum::Json;
use axum::extract::{Path, State};
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use serde_json::{Value, json};
use std::time::Instant;
use tokio::net::TcpListener;

/// Serves operators for ever.
pub(super) async fn serve(socket: TcpListener, operations: Operations) {
    let router = axum::Router::new()
        .route("/livez", get(alive))
        .route("/readyz", get(ready))
        .route("/routes", get(routes))
        .route("/explain/{*id}", get(explain))
        .route("/metrics", get(metrics))
        .with_state(operations);
    let served = axum::serve(socket, router).await;
    let reason = served.err().map_or_else(|| "it ended".to_owned(), |error| error.to_string());
    supervision::process::fail(&format!("operations port: {reason}"));
}

async fn alive(State(operations): State<Operations>) -> (StatusCode, String) {
    shown(operations.alive().await, "alive")
}

async fn ready(State(operations): State<Operations>) -> (StatusCode, String) {
    shown(operations.ready().await, "ready")
}

fn shown(found: Result<(), String>, well: &str) -> (StatusCode, String) {
    match found {
        Ok(()) => (StatusCode::OK, format!("{well}\n")),
        Err(problem) => (StatusCode::SERVICE_UNAVAILABLE, format!("{problem}\n")),
    }
}

/// An identifier may have slashes in it, so it is all that stands after the first two.
async fn explain(State(operations): State<Operations>, Path(id): Path<String>) -> (StatusCode, Json<Value>) {
    match operations.explanations.find(&id) {
        Some(request) => (StatusCode::OK, Json(explain::in_json(&request, &operations.config.catalogue))),
        None => {
            let error = format!(
                "this gateway knows no request of this identifier; it keeps the last {KEPT_MAX}, and its log has all"
            );
            (StatusCode::NOT_FOUND, Json(json!({"error": error})))
        }
    }
}

async fn metrics(State(operations): State<Operations>) -> impl IntoResponse {
    ([(header::CONTENT_TYPE, CONTENT_TYPE)], scrape::text(&operations))
}

async fn routes(State(operations): State<Operations>) -> Json<Value> {
    let Operations { config, views, router, watch, .. } = operations;
    let plan = router.planned.borrow().as_ref().map(|weights| weights.generation.to_string());
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
                "health": health_word(health),
                "draining": view.draining.contains(region),
                "report_age_ms": age.map(|age| age.as_millis() as u64),
                "rtt_ms": known.latency.estimate(region, now).as_secs_f64() * 1e3,
                "ready": known.fleet.ready(region),
                "held_for_ms": known.holds(region),
                "circuit": circuit(region).map(|state| circuits::shown(state, now)),
            })
        })
        .collect();
    let deployments: Vec<_> = view
        .deployments()
        .map(|deployment| json!({"name": deployment.name.as_str(), "residency": deployment.residency.to_string()}))
        .collect();
    let generation = view.generation.to_string();
    Json(json!({"generation": generation, "plan": plan, "regions": regions, "deployments": deployments}))
}
