//! Client of the control API of the local fleet in which this hub runs.

use std::error::Error;
use std::time::Duration;

use replica_api::error::ErrorCode;
use reqwest::{Client, Method, StatusCode, Url};
use scheduler_api::error::HubErrorCode;
use serde_json::Value;

use crate::respond::ErrorResponse;

/// Timeout of a request to the control API, on the same machine.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Client of the control API of a local fleet.
#[derive(Clone, Debug)]
pub(super) struct FleetClient {
    url: Url,
    /// One for the process, because each has connections of its own.
    client: Client,
}

impl FleetClient {
    /// Creates the client of the control API at this URL.
    pub(super) fn new(url: Url) -> Result<FleetClient, reqwest::Error> {
        Ok(FleetClient { url, client: Client::builder().no_proxy().timeout(TIMEOUT).build()? })
    }

    /// Sends a request; `name` is that of a drill.
    pub(super) async fn send(
        &self,
        method: Method,
        path: &str,
        name: Option<&str>,
    ) -> Result<Value, ErrorResponse> {
        let mut url = self.url.clone();
        url.set_path(path);
        if let Some(name) = name {
            url.query_pairs_mut().append_pair("name", name);
        }
        let exchange = async {
            let response = self.client.request(method, url).send().await?;
            Ok::<_, reqwest::Error>((response.status(), response.json::<Value>().await?))
        };
        let (status, body) = exchange.await.map_err(|error| unavailable(&error))?;
        if status.is_success() { Ok(body) } else { Err(rejected(status, &body)) }
    }
}

/// Returns the response to a request that the fleet has rejected.
fn rejected(status: StatusCode, body: &Value) -> ErrorResponse {
    let message = body["error"].as_str().map_or_else(|| format!("status {status}"), str::to_owned);
    let message = format!("The local fleet rejects the request: {message}.");
    match status {
        StatusCode::NOT_FOUND => ErrorResponse::new(ErrorCode::NotFound, message),
        // A drill runs, or none does, or the fleet is not the one that the drill needs.
        StatusCode::CONFLICT => ErrorResponse::new(HubErrorCode::Conflict, message),
        status if status.is_server_error() => ErrorResponse::new(HubErrorCode::FleetUnavailable, message),
        _ => ErrorResponse::new(ErrorCode::InvalidValue, message),
    }
}

/// Returns the response while the fleet does not respond, or not as the control API does.
fn unavailable(error: &reqwest::Error) -> ErrorResponse {
    // The client leaves the cause out of its message.
    let mut cause: &dyn Error = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    let reason = if error.is_timeout() {
        format!("no response within {} s", TIMEOUT.as_secs())
    } else {
        cause.to_string()
    };
    let message = format!(
        "The local fleet does not respond ({reason}); check that `meridian up` runs, and repeat the request."
    );
    ErrorResponse::new(HubErrorCode::FleetUnavailable, message)
}
