//! Requests to the hubs: one request ([`ControlPlaneClient`]), and failover with backoff for a task that calls the hubs as long as
//! the process runs ([`HubConnection`]).

use std::mem::{Discriminant, discriminant};
use std::time::Duration;

use backoff::Backoff;
use bytes::Bytes;
use http::header::{AUTHORIZATION, CONTENT_TYPE};
use http::{HeaderValue, Method, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use identity::{ConnectionFailureCause, Transport};
use resolver::Resolver;
use scheduler_core::hubs::{Failover, Hubs};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::connect::HubConnector;
use crate::operator_token::OperatorToken;

/// Maximum size of a response. The largest is a route table: 1,000 deployments in 64 regions are some 5 MiB.
pub const RESPONSE_BYTES_MAX: usize = 64 << 20;
/// Timeout of one exchange of a gateway with a hub: its demand for rows of the plan, or for shares of rate limits. The
/// next one follows within a second anyway. The exchanges between gateways and spokes (`gateway`) have timeouts of their
/// own, because other deadlines bound them.
pub const EXCHANGE_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum number of characters of an error response that are logged.
const MESSAGE_CHARS_MAX: usize = 512;
/// Maximum number of idle HTTP/1.1 connections to one hub (in plaintext): a long poll, a registration and a report, and one
/// more.
const IDLE_MAX: usize = 4;
/// Interval of pings on an HTTP/2 connection, and time after which a connection without their acknowledgement is closed. A
/// request that times out closes its stream only; without pings, a connection that a firewall has forgotten would be used
/// again and again.
const PING_INTERVAL: Duration = Duration::from_secs(5);
const PING_TIMEOUT: Duration = Duration::from_secs(3);
/// Time after which an idle connection is closed.
const IDLE_TIMEOUT: Duration = Duration::from_secs(60);
const _: () = assert!(
    IDLE_TIMEOUT.as_millis() < identity::FIRST_REQUEST_MAX.as_millis(),
    "a hub does not close a connection that its client keeps for a first request"
);

/// Request to a hub.
#[derive(Clone, Debug)]
pub struct HubRequest {
    method: Method,
    path: String,
    body: Option<Vec<u8>>,
    timeout: Duration,
    is_optional: bool,
}

impl HubRequest {
    /// Creates a request without a body. `path` may contain a query.
    pub fn new(method: Method, path: impl Into<String>, timeout: Duration) -> HubRequest {
        HubRequest { method, path: path.into(), body: None, timeout, is_optional: false }
    }

    /// Creates a `POST` request with a JSON body.
    pub fn post(path: impl Into<String>, body: &impl Serialize, timeout: Duration) -> HubRequest {
        let body = serde_json::to_vec(body).expect("a message serialises to JSON");
        HubRequest { body: Some(body), ..HubRequest::new(Method::POST, path, timeout) }
    }

    /// Returns the request for a resource that may not exist: "not found" is decoded like `null`.
    pub fn optional(self) -> HubRequest {
        HubRequest { is_optional: true, ..self }
    }
}

/// Failed request to a hub. `failure` is one of the texts `does not respond`, `is not connected`, `returned`, `sent an
/// invalid response` and `has no route table yet`.
#[derive(Debug, thiserror::Error)]
#[error("the hub at {hub} {failure}")]
pub struct HubCallError {
    /// URL of the hub.
    pub hub: String,
    /// Cause.
    pub failure: HubFailure,
}

/// Cause of a failed request.
#[derive(Debug, thiserror::Error)]
pub enum HubFailure {
    /// The connection to the hub failed, or the hub did not respond in time. The next hub of the list is called.
    #[error("does not respond: {0}")]
    Unreachable(String),
    /// The process at the address is not a hub of this fleet, or rejects this process. `docs/identities.md` has the fix
    /// for each cause.
    #[error("is not connected: {reason} (cause {})", .cause.as_str())]
    Untrusted {
        /// Cause.
        cause: ConnectionFailureCause,
        /// Message of the verification.
        reason: String,
    },
    /// The hub rejected the request with this status and message.
    #[error("returned {status}: {message}")]
    Rejected {
        /// Status of the response.
        status: StatusCode,
        /// Message of the error object, or the beginning of another body.
        message: String,
        /// Body of the response.
        body: Vec<u8>,
    },
    /// The response of the hub cannot be decoded or must not be accepted; usually the hub has another version.
    #[error("sent an invalid response: {0}")]
    Invalid(String),
    /// The hub has not published a route table, for example because it has just started. The next hub of the list is
    /// called.
    #[error("has no route table yet")]
    NoTable,
}

impl HubFailure {
    /// Returns the status of a rejection.
    pub fn status(&self) -> Option<StatusCode> {
        match self {
            HubFailure::Rejected { status, .. } => Some(*status),
            HubFailure::Unreachable(_)
            | HubFailure::Untrusted { .. }
            | HubFailure::Invalid(_)
            | HubFailure::NoTable => None,
        }
    }
}

/// The hubs cannot be called with the transport of this process.
#[derive(Debug, thiserror::Error)]
pub enum HubClientError {
    /// The URL of a hub does not fit the process: https:// needs an identity, and http:// to another machine needs
    /// `insecure = true`.
    #[error("hub: {0}")]
    Url(String),
    /// The TLS library rejects the identity of this process for connections to hubs.
    #[error("TLS cannot be set up: {0}")]
    Tls(#[from] rustls::Error),
}

/// HTTP client of the hubs, with the identity of the process. Clones share the current hub and the connections.
#[derive(Clone, Debug)]
pub struct ControlPlaneClient {
    http: Client<HubConnector, Full<Bytes>>,
    hubs: Hubs,
    /// Value of `authorization`, for an operator without a certificate.
    authorization: Option<HeaderValue>,
}

/// Checks whether the hubs can be called with this transport: plaintext stays on this machine unless the configuration
/// permits it, and TLS needs an identity.
///
/// # Errors
///
/// The first URL that does not fit, with the fix.
pub fn check_transport(hubs: &Hubs, transport: &Transport) -> Result<(), String> {
    match (transport, hubs.first_with_tls(), hubs.first_in_plaintext_elsewhere()) {
        (Transport::Loopback | Transport::Plaintext, Some(url), _) => Err(format!(
            "\"{url}\" uses TLS, and there is no identity; add [identity] with dir, or write http://"
        )),
        (Transport::Loopback | Transport::Tls(_), _, Some(url)) => Err(format!(
            "\"{url}\" uses plaintext and is not a loopback address; write https:// with [identity], or set \
             identity.insecure = true"
        )),
        _ => Ok(()),
    }
}

fn http_client(connector: HubConnector) -> Client<HubConnector, Full<Bytes>> {
    Client::builder(TokioExecutor::new())
        .pool_idle_timeout(IDLE_TIMEOUT)
        .pool_timer(hyper_util::rt::TokioTimer::new())
        .pool_max_idle_per_host(IDLE_MAX)
        .timer(hyper_util::rt::TokioTimer::new())
        .http2_keep_alive_interval(PING_INTERVAL)
        .http2_keep_alive_timeout(PING_TIMEOUT)
        .build(connector)
}

impl ControlPlaneClient {
    /// Creates a client of these hubs, whose names `resolver` resolves.
    ///
    /// # Errors
    ///
    /// When the URL of a hub does not fit the transport, or TLS cannot be set up.
    pub fn new(
        hubs: &Hubs,
        transport: &Transport,
        resolver: Resolver,
    ) -> Result<ControlPlaneClient, HubClientError> {
        check_transport(hubs, transport).map_err(HubClientError::Url)?;
        let http = http_client(HubConnector::new(transport, resolver)?);
        Ok(ControlPlaneClient { http, hubs: hubs.clone(), authorization: None })
    }

    /// Creates a client of these hubs, whose requests have the token of an operator.
    ///
    /// # Errors
    ///
    /// When the URL of a hub is in plaintext, in which a token can be read on the way.
    pub fn with_token(
        hubs: &Hubs,
        token: &OperatorToken,
        resolver: Resolver,
    ) -> Result<ControlPlaneClient, HubClientError> {
        if let Some(url) = hubs.first_in_plaintext() {
            let problem =
                format!("\"{url}\" is in plaintext, and a token needs TLS; write https://HOST:PORT");
            return Err(HubClientError::Url(problem));
        }
        let http = http_client(HubConnector::with_token(token, resolver));
        Ok(ControlPlaneClient { http, hubs: hubs.clone(), authorization: Some(token.header.clone()) })
    }

    /// Returns a client for each hub, for messages that every hub receives. They share the connections of this one.
    pub fn each(&self) -> Vec<ControlPlaneClient> {
        self.hubs.each().map(|hubs| ControlPlaneClient { hubs, ..self.clone() }).collect()
    }

    /// Returns the hubs.
    pub fn hubs(&self) -> &Hubs {
        &self.hubs
    }

    /// Sends a request to the current hub and decodes the response. An empty body is decoded like `null`.
    ///
    /// # Errors
    ///
    /// When there is no valid response with a status of success. The current hub stays.
    pub async fn send<M: DeserializeOwned>(&self, request: &HubRequest) -> Result<M, HubCallError> {
        let hub = self.hubs.current();
        self.send_to(hub, request).await.map_err(|failure| HubCallError { hub: hub.to_owned(), failure })
    }

    async fn send_to<M: DeserializeOwned>(&self, hub: &str, request: &HubRequest) -> Result<M, HubFailure> {
        let HubRequest { method, path, body, timeout, is_optional } = request;
        let mut call = http::Request::builder().method(method.clone()).uri(format!("{hub}{path}"));
        if body.is_some() {
            call = call.header(CONTENT_TYPE, "application/json");
        }
        if let Some(authorization) = &self.authorization {
            call = call.header(AUTHORIZATION, authorization);
        }
        let sent = call.body(Full::from(body.clone().unwrap_or_default()));
        let sent = sent.map_err(|error| HubFailure::Unreachable(error.to_string()))?;
        let exchange = tokio::time::timeout(*timeout, self.exchange(sent)).await;
        let (status, mut body) = exchange.map_err(|_| HubFailure::Unreachable("timed out".to_owned()))??;
        if *is_optional && status == StatusCode::NOT_FOUND {
            body.clear();
        } else if !status.is_success() {
            return Err(HubFailure::Rejected { status, message: message(&body), body });
        }
        let text = if body.is_empty() { b"null" } else { body.as_slice() };
        serde_json::from_slice(text).map_err(|error| HubFailure::Invalid(error.to_string()))
    }

    /// Sends a request and reads the whole response.
    async fn exchange(
        &self,
        request: http::Request<Full<Bytes>>,
    ) -> Result<(StatusCode, Vec<u8>), HubFailure> {
        let response = self.http.request(request).await.map_err(|error| failure(&error))?;
        let (status, mut frames) = (response.status(), response.into_body());
        let mut body = Vec::new();
        while let Some(frame) = frames.frame().await {
            let frame = frame.map_err(|error| failure(&error))?;
            let Ok(chunk) = frame.into_data() else { continue };
            if body.len() + chunk.len() > RESPONSE_BYTES_MAX {
                return Err(HubFailure::Invalid(format!("it has more than {RESPONSE_BYTES_MAX} bytes")));
            }
            body.extend_from_slice(&chunk);
        }
        Ok((status, body))
    }
}

/// Returns the message of an error response.
pub(crate) fn message(body: &[u8]) -> String {
    let object: Value = serde_json::from_slice(body).unwrap_or_default();
    let text = object["error"]["message"].as_str().map(Into::into);
    let text = text.unwrap_or_else(|| String::from_utf8_lossy(body));
    if text.is_empty() {
        "no reason given".to_owned()
    } else {
        text.chars().take(MESSAGE_CHARS_MAX).collect()
    }
}

/// Returns why a request failed: the innermost cause, which the client leaves out of its message.
pub(crate) fn failure(error: &(dyn std::error::Error + 'static)) -> HubFailure {
    let mut cause = error;
    loop {
        let io: Option<&std::io::Error> = cause.downcast_ref();
        if let Some(cause) = io.and_then(ConnectionFailureCause::of_io) {
            return HubFailure::Untrusted { cause, reason: io.map_or(String::new(), ToString::to_string) };
        }
        match cause.source() {
            Some(source) => cause = source,
            None => return HubFailure::Unreachable(cause.to_string()),
        }
    }
}

/// Connection of a long-running task to the hubs. It calls the current hub until that fails, then the next one at once,
/// and waits only after all hubs have failed. A failure of all hubs is logged when it begins, when its kind is new, and
/// when it ends, not at each attempt.
#[derive(Debug)]
pub struct HubConnection {
    client: ControlPlaneClient,
    /// Name of the task in log lines.
    task: &'static str,
    failover: Failover,
    delay: Option<Duration>,
    /// Kinds of failures that were logged since the last success.
    logged: Vec<Discriminant<HubFailure>>,
}

impl HubConnection {
    /// Creates the connection of a task.
    pub fn new(client: ControlPlaneClient, task: &'static str, backoff: Backoff) -> HubConnection {
        let failover = Failover::new(&client.hubs, backoff);
        HubConnection { client, task, failover, delay: None, logged: Vec::new() }
    }

    /// Returns the client, for requests without failover.
    pub fn client(&self) -> &ControlPlaneClient {
        &self.client
    }

    /// Returns whether the last call failed.
    pub fn is_failing(&self) -> bool {
        self.failover.is_failing()
    }

    /// Waits until the next call is due: for the backoff delay after all hubs have failed.
    pub async fn ready(&mut self) {
        if let Some(delay) = self.delay.take() {
            tokio::time::sleep(delay).await;
        }
    }

    /// Sends a request to the current hub and has `accept` convert the response. After a failure, also one of `accept`,
    /// the next hub becomes the current one.
    ///
    /// # Errors
    ///
    /// When there is no response, or it is not acceptable. The caller repeats the call when the connection is
    /// [ready](HubConnection::ready).
    pub async fn call<M: DeserializeOwned, T>(
        &mut self,
        request: &HubRequest,
        accept: impl AsyncFnOnce(M) -> Result<T, HubFailure>,
    ) -> Result<T, HubCallError> {
        let hub = self.client.hubs.current();
        let called = match self.client.send_to(hub, request).await {
            Ok(response) => accept(response).await,
            Err(failure) => Err(failure),
        };
        if called.is_ok() {
            self.logged.clear();
            if self.failover.succeeded() {
                // Requests to a hub succeed again.
                tracing::info!(task = self.task, hub, "hub reachable again");
            }
        }
        let hub = hub.to_owned();
        called.map_err(|failure| HubCallError { hub, failure }).inspect_err(|error| self.failed(error))
    }

    fn failed(&mut self, error: &HubCallError) {
        let (task, hubs) = (self.task, &self.client.hubs);
        hubs.failed(&error.hub);
        self.delay = self.failover.failed(rand::random());
        if self.delay.is_none() {
            // A request to a hub failed, and is sent to the next hub of the list.
            tracing::info!(task, %error, next = %hubs, "hub call failed, trying the next hub");
        } else if is_new(&mut self.logged, &error.failure) {
            let status = error.failure.status();
            let remedy = match &error.failure {
                HubFailure::Untrusted { .. } => Some("compare the identities and authorities of both ends"),
                _ if status == Some(StatusCode::FORBIDDEN) => {
                    Some("use the identity of this role and region")
                }
                _ => None,
            };
            // Requests continue, and changes of the configuration wait. Check the hubs and the network.
            tracing::warn!(task, %error, remedy, "hub unreachable; continuing with the last known state");
        }
    }
}

/// Returns whether no failure of this kind was logged, and adds it. A lost connection to a hub may precede one to another
/// process at its address, which an operator must see.
fn is_new(logged: &mut Vec<Discriminant<HubFailure>>, failure: &HubFailure) -> bool {
    let kind = discriminant(failure);
    let is_new = !logged.contains(&kind);
    if is_new {
        logged.push(kind);
    }
    is_new
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_of_failure_is_logged_once() {
        let lost = || HubFailure::Unreachable("connection closed".to_owned());
        let untrusted =
            || HubFailure::Untrusted { cause: ConnectionFailureCause::Untrusted, reason: String::new() };
        let mut logged = Vec::new();
        let failures = [lost(), lost(), untrusted(), lost(), untrusted(), HubFailure::NoTable];
        let is_logged = failures.map(|failure| is_new(&mut logged, &failure));
        assert_eq!(is_logged, [true, false, true, false, false, true]);
    }
}
