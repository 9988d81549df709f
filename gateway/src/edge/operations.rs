//! Operations port of a gateway.
//!
//! | path | response |
//! |---|---|
//! | `/livez` | 200 while the process runs and no lock that requests need is stuck ([`super::health`]) |
//! | `/readyz` | 200 while the gateway has a route table, makes routing decisions and is not draining |
//! | `/routes` | the route table, and the state of each region |
//! | `/explain/{id}` | routing decision and attempts of a request ([`super::explain`]) |
//! | `/requests` | search for requests whose explanation is on disk ([`super::explanation_archive`]) |
//! | `/log` | filter of the log, which a `PUT` changes ([`telemetry::logs::http`]) |
//! | `/metrics` | metrics, in the text format of Prometheus or OpenMetrics ([`super::scrape`]) |

use super::explain::{self, RECENT_REQUESTS_MAX};
use super::explanation_archive::{ArchiveError, ReadCaller};
use super::operator_state::Operations;
use super::scrape;
use crate::circuits;
use axum::Json;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Path, Query, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use gateway_core::instances::InstanceStatus;
use identity::operations::{self, OperationsLimits};
use metrics::Format;
use regions::{HostPort, RegionId};
use scheduler_api::paths;
use scheduler_api::requests::{RequestFilter, RequestFilterV1};
use serde_json::{Value, json};
use std::time::Instant;
use tokio::net::TcpListener;

/// Serves the operations port for ever.
pub(super) async fn serve(socket: TcpListener, operations: Operations) {
    let refused = operations.refused.clone();
    let router = axum::Router::new()
        .route(paths::LIVEZ, get(alive))
        .route(paths::READYZ, get(ready))
        .route("/routes", get(routes))
        .route(paths::EXPLAIN, get(explain))
        .route(paths::REQUESTS, get(requests))
        .route(paths::METRICS, get(metrics))
        .merge(telemetry::logs::http::routes())
        .with_state(operations);
    let served = operations::serve(socket, router, OperationsLimits::DEFAULT, refused).await;
    let reason = served.err().map_or_else(|| "server ended".to_owned(), |error| error.to_string());
    supervision::process::fail(&format!("operations port: {reason}"));
}

async fn alive(State(operations): State<Operations>) -> (StatusCode, String) {
    probe_response(operations.alive().await, "alive")
}

async fn ready(State(operations): State<Operations>) -> (StatusCode, String) {
    probe_response(operations.ready().await, "ready")
}

fn probe_response(result: Result<(), String>, ok_text: &str) -> (StatusCode, String) {
    match result {
        Ok(()) => (StatusCode::OK, format!("{ok_text}\n")),
        Err(problem) => (StatusCode::SERVICE_UNAVAILABLE, format!("{problem}\n")),
    }
}

/// The identifier is the rest of the path, because it may contain slashes.
async fn explain(State(operations): State<Operations>, Path(id): Path<String>) -> (StatusCode, Json<Value>) {
    if let Some(request) = operations.explanations.find(&id) {
        return (StatusCode::OK, Json(explain::to_json(&request, &operations.config.catalogue)));
    }
    let on_disk = match &operations.archive {
        Some(archive) => archive.find(ReadCaller::Operations, id).await,
        None => Ok(None),
    };
    match on_disk {
        Ok(Some(explanation)) => (StatusCode::OK, Json(explanation)),
        Ok(None) => {
            let error = format!(
                "no request with this identifier; the gateway keeps the last {RECENT_REQUESTS_MAX} requests, with [explanations] \
                 also those that failed, failed over or were slow, for hours, and its log has all"
            );
            (StatusCode::NOT_FOUND, Json(json!({"error": error})))
        }
        Err(error) => archive_error(&error),
    }
}

/// Searches the explanations on disk.
async fn requests(
    State(operations): State<Operations>,
    query: Result<Query<Vec<(String, String)>>, QueryRejection>,
) -> (StatusCode, Json<Value>) {
    let read = |query| RequestFilterV1::from_query(query).and_then(RequestFilter::try_from);
    let query = query.map_err(|rejection| rejection.body_text());
    let filter = match query.and_then(|Query(query)| read(query).map_err(|error| error.to_string())) {
        Ok(filter) => filter,
        Err(problem) => return (StatusCode::BAD_REQUEST, Json(json!({"error": problem}))),
    };
    let Some(archive) = &operations.archive else {
        let error = "the gateway keeps no explanations; add [explanations] with dir to its configuration";
        return (StatusCode::NOT_FOUND, Json(json!({"error": error})));
    };
    match archive.search(ReadCaller::Operations, filter).await {
        Ok((found, _)) => (StatusCode::OK, Json(json!(found))),
        Err(error) => archive_error(&error),
    }
}

fn archive_error(error: &ArchiveError) -> (StatusCode, Json<Value>) {
    let status = match error {
        ArchiveError::Busy => StatusCode::TOO_MANY_REQUESTS,
        ArchiveError::Disk(_) => StatusCode::INTERNAL_SERVER_ERROR,
        ArchiveError::Hanging | ArchiveError::Incomplete { .. } => StatusCode::SERVICE_UNAVAILABLE,
    };
    (status, Json(json!({"error": error.to_string()})))
}

async fn metrics(State(operations): State<Operations>, headers: HeaderMap) -> impl IntoResponse {
    let accept = headers.get(header::ACCEPT).and_then(|value| value.to_str().ok());
    let format = Format::negotiate(accept);
    ([(header::CONTENT_TYPE, format.content_type())], scrape::snapshot(&operations).text(format))
}

async fn routes(State(operations): State<Operations>) -> Json<Value> {
    let Operations { config, views, router, region_monitor, .. } = operations;
    let plan = router.current_weights.borrow().as_ref().map(|weights| weights.generation.to_string());
    let Some(view) = views.borrow().clone() else {
        return Json(json!({"generation": null, "regions": []}));
    };
    let now = Instant::now();
    let states = region_monitor.circuit_states();
    let circuit = |region| states.iter().find(|state| state.target == region);
    let region_states = region_monitor.states();
    let regions: Vec<_> = view
        .regions()
        .map(|region| {
            let instances = region_states.instances.status(region, now);
            let (health, age) = region_states.fleet.state(region, now);
            json!({
                "region": config.catalogue.region(region).id.as_str(),
                "instances": instances.iter().map(instance_json).collect::<Vec<_>>(),
                "health": health.as_str(),
                "draining": view.draining.contains(region),
                "report_age_ms": age.map(|age| age.as_millis() as u64),
                "rtt_ms": region_states.latency.estimate(region, now).as_secs_f64() * 1e3,
                "ready": region_states.fleet.ready(region),
                "held_for_ms": region_states.hold_times_ms(region),
                "failed": region_states.failed_deployments(region),
                "circuit": circuit(region).map(|state| circuits::to_json(state, now)),
            })
        })
        .collect();
    let deployments: Vec<_> = view
        .deployments()
        .map(|deployment| {
            json!({
                "name": deployment.name.as_str(),
                "residency": deployment.residency.to_string(),
                "order": deployment.order.iter().map(RegionId::as_str).collect::<Vec<_>>(),
            })
        })
        .collect();
    let generation = view.generation.to_string();
    Json(json!({"generation": generation, "plan": plan, "regions": regions, "deployments": deployments}))
}

/// Returns the state of a spoke instance as JSON.
fn instance_json(status: &InstanceStatus<'_, HostPort>) -> Value {
    let InstanceStatus { index: _, name, address, health, draining, circuit, in_flight, report_age } = status;
    json!({
        "name": name.as_str(),
        "endpoint": address.to_string(),
        "health": health.as_str(),
        "draining": draining,
        "circuit": circuits::state_name(*circuit),
        "in_flight": in_flight,
        "report_age_ms": report_age.map(|age| age.as_millis() as u64),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io;

    #[test]
    fn a_read_that_fails_is_not_an_unknown_request() {
        let status = |error: &ArchiveError| archive_error(error).0.as_u16();
        assert_eq!(status(&ArchiveError::Disk(io::Error::from(io::ErrorKind::PermissionDenied))), 500);
        assert_eq!(status(&ArchiveError::Hanging), 503);
        assert_eq!(status(&ArchiveError::Incomplete { until: String::new() }), 503);
        assert_eq!(status(&ArchiveError::Busy), 429);
    }
}
