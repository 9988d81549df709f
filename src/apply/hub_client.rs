//! HTTP client of the hub's operator API.

use reqwest::{RequestBuilder, Response, StatusCode, Url};
use scheduler_api::apply::{AppliedDeploymentsV1, AppliedV1, ApplyV1, ProblemsV1, RolloutV1};
use scheduler_api::deployment::PromotedV1;
use scheduler_api::plan::PlanV1;
use scheduler_api::route::RouteTableV1;
use scheduler_api::tenant::TenantsV1;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::time::Duration;

/// Timeout of a call; a hub retries its store for some seconds.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Failure of a call.
#[derive(Debug)]
pub(super) enum HubCallError {
    /// The files are invalid.
    InvalidFiles(ProblemsV1),
    /// Any other failure.
    Failed(String),
}

/// Client of a hub, with an operator's credentials.
pub(super) struct ApplyClient {
    client: reqwest::Client,
    url: Url,
    token: Option<String>,
}

impl ApplyClient {
    pub(super) fn new(hub: &str, token: Option<String>) -> Result<ApplyClient, String> {
        let url = Url::parse(hub).ok().filter(|url| url.scheme() == "http" && url.has_host());
        let url = url.ok_or_else(|| format!("--hub {hub} is not a URL of a hub; write http://HOST:PORT"))?;
        let client = reqwest::Client::builder().no_proxy().timeout(TIMEOUT).build();
        Ok(ApplyClient { client: client.map_err(|error| error.to_string())?, url, token })
    }

    pub(super) async fn apply(&self, message: &ApplyV1) -> Result<AppliedV1, HubCallError> {
        let response = self.send(self.client.post(self.path("/v1/apply")).json(message)).await?;
        if response.status() == StatusCode::UNPROCESSABLE_ENTITY {
            return Err(HubCallError::InvalidFiles(self.read(response).await?));
        }
        self.read_success(response).await
    }

    pub(super) async fn promote(&self, name: &str) -> Result<PromotedV1, HubCallError> {
        let mut url = self.path("/v1/deployments");
        url.path_segments_mut().expect("an http URL has segments").extend([name, "promote"]);
        let response = self.send(self.client.post(url)).await?;
        self.read_success(response).await
    }

    pub(super) async fn deployments(&self) -> Result<AppliedDeploymentsV1, HubCallError> {
        self.get("/v1/deployments").await
    }

    pub(super) async fn routes(&self) -> Result<RouteTableV1, HubCallError> {
        self.get("/v1/routes").await
    }

    pub(super) async fn rollout(&self) -> Result<RolloutV1, HubCallError> {
        self.get("/v1/rollout").await
    }

    pub(super) async fn tenants(&self) -> Result<TenantsV1, HubCallError> {
        self.get("/v1/tenants").await
    }

    pub(super) async fn plan(&self) -> Result<PlanV1, HubCallError> {
        self.get("/v1/plan").await
    }

    async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, HubCallError> {
        let response = self.send(self.client.get(self.path(path))).await?;
        self.read_success(response).await
    }

    fn path(&self, path: &str) -> Url {
        let mut url = self.url.clone();
        url.set_path(path);
        url
    }

    async fn send(&self, request: RequestBuilder) -> Result<Response, HubCallError> {
        let request = self.token.iter().fold(request, |request, token| request.bearer_auth(token));
        let sent = request.send().await;
        sent.map_err(|error| {
            HubCallError::Failed(format!("request to the hub at {} failed: {error}", self.url))
        })
    }

    /// Returns the body of a successful response, or the hub's error message.
    async fn read_success<T: DeserializeOwned>(&self, response: Response) -> Result<T, HubCallError> {
        let status = response.status();
        if status == StatusCode::OK {
            return self.read(response).await;
        }
        let body: Value = response.json().await.unwrap_or_default();
        let message = body["error"]["message"].as_str().unwrap_or("no reason given");
        Err(HubCallError::Failed(format!("the hub at {} returned {status}: {message}", self.url)))
    }

    async fn read<T: DeserializeOwned>(&self, response: Response) -> Result<T, HubCallError> {
        let read = response.json().await;
        read.map_err(|error| HubCallError::Failed(format!("invalid response of {}: {error}", self.url)))
    }
}
