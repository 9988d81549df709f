//! HTTP client of the agent: register, keep alive, deregister.

use std::time::Duration;

use reqwest::{RequestBuilder, Response, StatusCode};
use scheduler_api::lease::{self, LeaseHolder, LeaseId, LeaseIdError};
use scheduler_api::registration::{KeepAliveV1, LeaseV1, RegisterV1};
use scheduler_core::hubs::Hubs;
use scheduler_core::token::Token;

/// Time limit of a call; less than half a lease, so that a lost call can be repeated.
const TIMEOUT: Duration = Duration::from_secs(2);
/// Bytes of an error response that are read and logged.
const REASON_BYTES_MAX: usize = 512;

/// Client of the hub.
pub(super) struct Client {
    http: reqwest::Client,
    hub: Hubs,
    fleet: Option<Token>,
}

/// Reason why a call failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum CallError {
    /// The hub is unreachable, or its response is malformed.
    #[error("{}", innermost(.0))]
    Http(#[from] reqwest::Error),
    /// The lease in the response is malformed.
    #[error("malformed lease in the response: {0}")]
    Lease(#[from] LeaseIdError),
    /// The hub does not know the lease.
    #[error("not found: {0}")]
    NotFound(String),
    /// The hub rejected the request.
    #[error("rejected with {status}: {reason}")]
    Rejected { status: StatusCode, reason: String },
}

impl Client {
    /// Creates a client of these hubs, which sends them the fleet token.
    pub(super) fn new(hub: &Hubs, fleet: Option<&Token>) -> Result<Client, reqwest::Error> {
        let http = reqwest::Client::builder().no_proxy().timeout(TIMEOUT).build()?;
        Ok(Client { http, hub: hub.clone(), fleet: fleet.cloned() })
    }

    pub(super) async fn register(&self, message: &RegisterV1) -> Result<LeaseV1, CallError> {
        let call = async |hub: &str| {
            let request = self.http.post(format!("{hub}/v1/spokes")).json(message);
            Ok(self.send(request).await?.json().await?)
        };
        self.call(call).await
    }

    pub(super) async fn keep_alive(
        &self,
        lease: LeaseId,
        holder: &LeaseHolder,
        message: &KeepAliveV1,
    ) -> Result<LeaseV1, CallError> {
        let path = lease::keep_alive_path(lease, holder);
        let call = async |hub: &str| {
            let request = self.http.post(format!("{hub}{path}")).json(message);
            Ok(self.send(request).await?.json().await?)
        };
        self.call(call).await
    }

    pub(super) async fn deregister(&self, lease: LeaseId, holder: &LeaseHolder) -> Result<(), CallError> {
        let path = lease::end_path(lease, holder);
        let call = async |hub: &str| self.send(self.http.delete(format!("{hub}{path}"))).await.map(drop);
        self.call(call).await
    }

    async fn send(&self, request: RequestBuilder) -> Result<Response, CallError> {
        checked(self.fleet.iter().fold(request, |request, token| request.bearer_auth(token.secret()))).await
    }

    /// Calls the current hub. After a failure the next hub becomes the current one; "not found" is not a failure of the
    /// hub.
    async fn call<T>(&self, call: impl AsyncFnOnce(&str) -> Result<T, CallError>) -> Result<T, CallError> {
        let hub = self.hub.current();
        let response = call(hub).await;
        match &response {
            Ok(_) | Err(CallError::NotFound(_)) => {}
            Err(CallError::Http(_) | CallError::Lease(_) | CallError::Rejected { .. }) => {
                self.hub.failed(hub)
            }
        }
        response
    }
}

async fn checked(request: RequestBuilder) -> Result<Response, CallError> {
    let response = request.send().await?;
    let status = response.status();
    if status.is_success() {
        return Ok(response);
    }
    let reason = response.text().await.unwrap_or_default().chars().take(REASON_BYTES_MAX).collect();
    match status {
        StatusCode::NOT_FOUND => Err(CallError::NotFound(reason)),
        status => Err(CallError::Rejected { status, reason }),
    }
}

/// Returns the innermost cause, which reqwest leaves out of its message.
fn innermost(error: &reqwest::Error) -> String {
    let mut cause: &dyn std::error::Error = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    cause.to_string()
}
