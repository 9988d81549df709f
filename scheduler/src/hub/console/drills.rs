//! Drills of the local fleet in which this hub runs: the console passes requests on to the control API of `meridian up`, which
//! owns the fleet and runs the drills.

use std::time::Duration;

use axum::Json;
use axum::extract::{Path, State};
use replica_api::error::ErrorCode;
use reqwest::{Client, Method, StatusCode, Url};
use scheduler_store::Store;
use serde_json::{Value, json};

use super::context::ConsoleApi;
use crate::respond::ErrorResponse;

/// Timeout of a request to the control API, on the same machine.
const TIMEOUT: Duration = Duration::from_secs(5);
const ELSEWHERE: &str = "Drills are started in a local fleet (`meridian up`), because they kill processes and cut links. For a fleet \
                         like this one run `meridian drill FILE --against URL` on a machine of an operator.";

/// Returns the drills, and the one that runs or has run last; without a local fleet, why there are none.
pub(super) async fn show<S: Store>(State(api): State<ConsoleApi<S>>) -> Result<Json<Value>, ErrorResponse> {
    if api.console.drills.is_none() {
        return Ok(Json(json!({"is_available": false, "reason": ELSEWHERE, "drills": [], "run": null})));
    }
    let found = send(&api, Method::GET, "drills", None).await?;
    Ok(Json(json!({"is_available": true, "drills": found["drills"], "run": found["run"]})))
}

/// Starts a drill.
pub(super) async fn start<S: Store>(
    State(api): State<ConsoleApi<S>>,
    Path(name): Path<String>,
) -> Result<Json<Value>, ErrorResponse> {
    send(&api, Method::POST, "drills/start", Some(&name)).await.map(Json)
}

/// Stops the drill that runs.
pub(super) async fn stop<S: Store>(State(api): State<ConsoleApi<S>>) -> Result<Json<Value>, ErrorResponse> {
    send(&api, Method::POST, "drills/stop", None).await.map(Json)
}

async fn send<S: Store>(
    api: &ConsoleApi<S>,
    method: Method,
    path: &str,
    name: Option<&str>,
) -> Result<Value, ErrorResponse> {
    let Some(control) = &api.console.drills else {
        return Err(ErrorResponse::new(ErrorCode::NotFound, ELSEWHERE));
    };
    let mut url = control.clone();
    url.set_path(path);
    if let Some(name) = name {
        url.query_pairs_mut().append_pair("name", name);
    }
    let (status, body) = exchange(method, url).await.map_err(|error| {
        ErrorResponse::new(ErrorCode::Internal, format!("The local fleet cannot be reached: {error}."))
    })?;
    if status.is_success() {
        return Ok(body);
    }
    let code = if status == StatusCode::NOT_FOUND { ErrorCode::NotFound } else { ErrorCode::InvalidValue };
    let message = body["error"].as_str().unwrap_or("the local fleet has responded with an error");
    Err(ErrorResponse::new(code, format!("The drill is not started or stopped: {message}.")))
}

async fn exchange(method: Method, url: Url) -> Result<(StatusCode, Value), reqwest::Error> {
    let client = Client::builder().no_proxy().timeout(TIMEOUT).build()?;
    let response = client.request(method, url).send().await?;
    Ok((response.status(), response.json().await?))
}
