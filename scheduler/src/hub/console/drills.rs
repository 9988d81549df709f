//! Drills of the local fleet in which this hub runs: the console passes requests on to the control API of `meridian up`, which
//! owns the fleet and runs the drills.

use axum::Json;
use axum::extract::{Path, State};
use replica_api::error::ErrorCode;
use reqwest::Method;
use scheduler_store::Store;
use serde_json::{Value, json};

use super::context::ConsoleApi;
use super::fleet_client::FleetClient;
use crate::respond::ErrorResponse;

const ELSEWHERE: &str = "Drills are started in a local fleet (`meridian up`), because they kill processes and cut links. For a fleet \
                         like this one run `meridian drill FILE --against URL` on a machine of an operator.";

/// Returns the drills, and the one that runs or has run last; without a local fleet, why there are none.
pub(super) async fn show<S: Store>(State(api): State<ConsoleApi<S>>) -> Result<Json<Value>, ErrorResponse> {
    let Some(fleet) = &api.console.fleet else {
        return Ok(Json(json!({"is_available": false, "reason": ELSEWHERE, "drills": [], "run": null})));
    };
    let found = fleet.send(Method::GET, "drills", None).await?;
    Ok(Json(json!({"is_available": true, "drills": found["drills"], "run": found["run"]})))
}

/// Starts a drill.
pub(super) async fn start<S: Store>(
    State(api): State<ConsoleApi<S>>,
    Path(name): Path<String>,
) -> Result<Json<Value>, ErrorResponse> {
    fleet(&api)?.send(Method::POST, "drills/start", Some(&name)).await.map(Json)
}

/// Stops the drill that runs.
pub(super) async fn stop<S: Store>(State(api): State<ConsoleApi<S>>) -> Result<Json<Value>, ErrorResponse> {
    fleet(&api)?.send(Method::POST, "drills/stop", None).await.map(Json)
}

fn fleet<S: Store>(api: &ConsoleApi<S>) -> Result<&FleetClient, ErrorResponse> {
    api.console.fleet.as_ref().ok_or_else(|| ErrorResponse::new(ErrorCode::NotFound, ELSEWHERE))
}
