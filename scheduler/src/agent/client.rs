//! The agent's three calls to the hub.

use std::time::Duration;

use reqwest::{RequestBuilder, Response, StatusCode};
use scheduler_core::hubs::Hubs;
use scheduler_core::lease::{self, LeaseHolder, LeaseId, LeaseIdError};
use scheduler_core::token::Token;
use scheduler_core::wire::registry::{KeepAliveV1, LeaseV1, RegisterV1};

/// How long one call may take; less than half a lease, so that a lost one can be made up for.
const TIMEOUT: Duration = Duration::from_secs(2);
/// Bytes of a refusal that are read and logged.
const REASON_BYTES_MAX: usize = 512;

/// The hub, as an agent asks it.
pub(super) struct Client {
    http: reqwest::Client,
    hub: Hubs,
    fleet: Option<Token>,
}

/// Why there is no answer to work with.
#[derive(Debug, thiserror::Error)]
pub(super) enum NoAnswer {
    /// The hub could not be asked, or said something that is no answer.
    #[error("{}", innermost(.0))]
    Http(#[from] reqwest::Error),
    /// What it calls a lease is none.
    #[error("not readable: {0}")]
    Lease(#[from] LeaseIdError),
    /// It does not know what it was asked about.
    #[error("not found: {0}")]
    NotFound(String),
    /// It refuses.
    #[error("refused with {status}: {reason}")]
    Refused { status: StatusCode, reason: String },
}

impl Client {
    /// A client of these hubs, which sends them the fleet token.
    pub(super) fn new(hub: &Hubs, fleet: Option<&Token>) -> Result<Client, reqwest::Error> {
        let http = reqwest::Client::builder().no_proxy().timeout(TIMEOUT).build()?;
        Ok(Client { http, hub: hub.clone(), fleet: fleet.cloned() })
    }

    pub(super) async fn register(&self, message: &RegisterV1) -> Result<LeaseV1, NoAnswer> {
        let ask = async |hub: &str| {
            let request = self.http.post(format!("{hub}/v1/spokes")).json(message);
            Ok(self.send(request).await?.json().await?)
        };
        self.ask(ask).await
    }

    pub(super) async fn keep_alive(
        &self,
        lease: LeaseId,
        holder: &LeaseHolder,
        message: &KeepAliveV1,
    ) -> Result<LeaseV1, NoAnswer> {
        let path = lease::keep_alive_path(lease, holder);
        let ask = async |hub: &str| {
            let request = self.http.post(format!("{hub}{path}")).json(message);
            Ok(self.send(request).await?.json().await?)
        };
        self.ask(ask).await
    }

    pub(super) async fn leave(&self, lease: LeaseId, holder: &LeaseHolder) -> Result<(), NoAnswer> {
        let path = lease::end_path(lease, holder);
        let ask = async |hub: &str| self.send(self.http.delete(format!("{hub}{path}"))).await.map(drop);
        self.ask(ask).await
    }

    async fn send(&self, request: RequestBuilder) -> Result<Response, NoAnswer> {
        answer(self.fleet.iter().fold(request, |request, token| request.bearer_auth(token.secret()))).await
    }

    /// Asks the hub whose turn it is. If it has nothing to say the next one is asked from now on; one that does not know
    /// what it was asked about has something to say.
    async fn ask<T>(&self, ask: impl AsyncFnOnce(&str) -> Result<T, NoAnswer>) -> Result<T, NoAnswer> {
        let hub = self.hub.current();
        let answer = ask(hub).await;
        match &answer {
            Ok(_) | Err(NoAnswer::NotFound(_)) => {}
            Err(NoAnswer::Http(_) | NoAnswer::Lease(_) | NoAnswer::Refused { .. }) => self.hub.failed(hub),
        }
        answer
    }
}

async fn answer(request: RequestBuilder) -> Result<Response, NoAnswer> {
    let answer = request.send().await?;
    let status = answer.status();
    if status.is_success() {
        return Ok(answer);
    }
    let reason = answer.text().await.unwrap_or_default().chars().take(REASON_BYTES_MAX).collect();
    match status {
        StatusCode::NOT_FOUND => Err(NoAnswer::NotFound(reason)),
        status => Err(NoAnswer::Refused { status, reason }),
    }
}

/// reqwest says that there was an error, and keeps which one it was inside.
fn innermost(error: &reqwest::Error) -> String {
    let mut cause: &dyn std::error::Error = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    cause.to_string()
}
