//! Operator API of the hub: the desired state, its rollout, and drains.

use std::time::Duration;

use http::Method;
use identity::Transport;
use regions::{DeploymentName, RegionId};
use resolver::{DnsSection, Resolver};
use scheduler_api::api_key::{CreateKeyV1, CreatedKeyV1, CreatedKeysV1};
use scheduler_api::apply::{AppliedV1, ApplyV1};
use scheduler_api::deployment::PromotedV1;
use scheduler_api::paths;
use scheduler_api::traffic::ConsoleLoginV1;
use scheduler_core::hubs::Hubs;
use serde::de::{DeserializeOwned, IgnoredAny};

use crate::hub::{ControlPlaneClient, HubCallError, HubClientError, HubRequest};
use crate::operator_token::OperatorToken;

/// Client of an operator.
#[derive(Clone, Debug)]
pub struct OperatorClient {
    client: ControlPlaneClient,
    timeout: Duration,
}

impl OperatorClient {
    /// Creates a client with the identity of an operator or viewer. `timeout` is that of a call to one hub.
    ///
    /// # Errors
    ///
    /// When the URL of a hub does not fit the transport, or TLS cannot be set up.
    pub fn new(
        hubs: &Hubs,
        transport: &Transport,
        timeout: Duration,
    ) -> Result<OperatorClient, HubClientError> {
        let resolver = Resolver::new(&DnsSection::default());
        Ok(OperatorClient { client: ControlPlaneClient::new(hubs, transport, resolver)?, timeout })
    }

    /// Creates a client with a token of the identity provider. `timeout` is that of a call to one hub.
    ///
    /// # Errors
    ///
    /// When the URL of a hub is in plaintext.
    pub fn with_token(
        hubs: &Hubs,
        token: &OperatorToken,
        timeout: Duration,
    ) -> Result<OperatorClient, HubClientError> {
        let resolver = Resolver::new(&DnsSection::default());
        Ok(OperatorClient { client: ControlPlaneClient::with_token(hubs, token, resolver)?, timeout })
    }

    /// Applies files, or previews their effect.
    ///
    /// # Errors
    ///
    /// When the hub does not respond, or rejects the request: with 422 and the problems of invalid files.
    pub async fn apply(&self, message: &ApplyV1) -> Result<AppliedV1, HubCallError> {
        self.send(&HubRequest::post(paths::APPLY, message, self.timeout)).await
    }

    /// Promotes the next model of a deployment.
    ///
    /// # Errors
    ///
    /// When the hub does not respond, or rejects the request.
    pub async fn promote(&self, name: &DeploymentName) -> Result<PromotedV1, HubCallError> {
        self.send(&HubRequest::new(Method::POST, paths::promote(name), self.timeout)).await
    }

    /// Creates an API key.
    ///
    /// # Errors
    ///
    /// When the hub does not respond, or rejects the request.
    pub async fn create_key(&self, message: &CreateKeyV1) -> Result<CreatedKeyV1, HubCallError> {
        self.send(&HubRequest::post(paths::KEYS, message, self.timeout)).await
    }

    /// Returns the created API keys.
    ///
    /// # Errors
    ///
    /// When the hub does not respond, or rejects the request.
    pub async fn keys(&self) -> Result<CreatedKeysV1, HubCallError> {
        self.get(paths::KEYS).await
    }

    /// Revokes an API key.
    ///
    /// # Errors
    ///
    /// When the hub does not respond, or rejects the request.
    pub async fn revoke_key(&self, id: &str) -> Result<(), HubCallError> {
        let request = HubRequest::new(Method::DELETE, paths::key(id), self.timeout);
        self.send::<IgnoredAny>(&request).await.map(drop)
    }

    /// Creates a link that signs a browser in to the console of the hub.
    ///
    /// # Errors
    ///
    /// When the hub does not respond, or has no console.
    pub async fn create_console_login(&self) -> Result<ConsoleLoginV1, HubCallError> {
        self.send(&HubRequest::new(Method::POST, paths::CONSOLE_LOGINS, self.timeout)).await
    }

    /// Starts or ends the drain of a region.
    ///
    /// # Errors
    ///
    /// When the hub does not respond, or rejects the request.
    pub async fn set_draining(&self, region: &RegionId, is_draining: bool) -> Result<(), HubCallError> {
        let method = if is_draining { Method::PUT } else { Method::DELETE };
        let request = HubRequest::new(method, paths::drain(region), self.timeout);
        self.send::<IgnoredAny>(&request).await.map(drop)
    }

    /// Reads a resource.
    ///
    /// # Errors
    ///
    /// When the hub does not respond, or rejects the request.
    pub async fn get<M: DeserializeOwned>(&self, path: &str) -> Result<M, HubCallError> {
        self.send(&HubRequest::new(Method::GET, path, self.timeout)).await
    }

    /// Sends a request to each hub in turn, until one accepts it.
    async fn send<M: DeserializeOwned>(&self, request: &HubRequest) -> Result<M, HubCallError> {
        let hubs = self.client.hubs();
        let mut response = self.client.send(request).await;
        for _ in 1..hubs.count() {
            let Err(HubCallError { hub, .. }) = &response else { break };
            hubs.failed(hub);
            response = self.client.send(request).await;
        }
        response
    }
}
