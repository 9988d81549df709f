//! The calls to the hub.

use reqwest::{RequestBuilder, Response, StatusCode, Url};
use scheduler_core::wire::apply::{AppliedDeploymentsV1, AppliedV1, ApplyV1, ProblemsV1, RolloutV1};
use scheduler_core::wire::deployment::PromotedV1;
use scheduler_core::wire::plan::PlanV1;
use scheduler_core::wire::route::RouteTableV1;
use scheduler_core::wire::tenant::TenantsV1;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::time::Duration;

/// How long one call may take; a hub tries its store again for some seconds.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Why nothing came of it.
#[derive(Debug)]
pub(super) enum NotDone {
    /// The files are wrong.
    Wrong(ProblemsV1),
    /// Something else.
    Failed(String),
}

/// A hub, as an operator asks it.
pub(super) struct Hub {
    client: reqwest::Client,
    url: Url,
    token: Option<String>,
}

impl Hub {
    pub(super) fn at(hub: &str, token: Option<String>) -> Result<Hub, String> {
        let url = Url::parse(hub).ok().filter(|url| url.scheme() == "http" && url.has_host());
        let url = url.ok_or_else(|| format!("--hub {hub} is no URL of a hub; write http://HOST:PORT"))?;
        let client = reqwest::Client::builder().no_proxy().timeout(TIMEOUT).build();
        Ok(Hub { client: client.map_err(|error| error.to_string())?, url, token })
    }

    pub(super) async fn apply(&self, message: &ApplyV1) -> Result<AppliedV1, NotDone> {
        let answer = self.send(self.client.post(self.path("/v1/apply")).json(message)).await?;
        if answer.status() == StatusCode::UNPROCESSABLE_ENTITY {
            return Err(NotDone::Wrong(self.read(answer).await?));
        }
        self.good(answer).await
    }

    pub(super) async fn promote(&self, name: &str) -> Result<PromotedV1, NotDone> {
        let mut url = self.path("/v1/deployments");
        url.path_segments_mut().expect("an http URL has segments").extend([name, "promote"]);
        let answer = self.send(self.client.post(url)).await?;
        self.good(answer).await
    }

    pub(super) async fn deployments(&self) -> Result<AppliedDeploymentsV1, NotDone> {
        self.get("/v1/deployments").await
    }

    pub(super) async fn routes(&self) -> Result<RouteTableV1, NotDone> {
        self.get("/v1/routes").await
    }

    pub(super) async fn rollout(&self) -> Result<RolloutV1, NotDone> {
        self.get("/v1/rollout").await
    }

    pub(super) async fn tenants(&self) -> Result<TenantsV1, NotDone> {
        self.get("/v1/tenants").await
    }

    pub(super) async fn plan(&self) -> Result<PlanV1, NotDone> {
        self.get("/v1/plan").await
    }

    async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, NotDone> {
        let answer = self.send(self.client.get(self.path(path))).await?;
        self.good(answer).await
    }

    fn path(&self, path: &str) -> Url {
        let mut url = self.url.clone();
        url.set_path(path);
        url
    }

    async fn send(&self, request: RequestBuilder) -> Result<Response, NotDone> {
        let request = self.token.iter().fold(request, |request, token| request.bearer_auth(token));
        let asked = request.send().await;
        asked.map_err(|error| NotDone::Failed(format!("the hub at {} cannot be asked: {error}", self.url)))
    }

    /// The answer, or what the hub has against it.
    async fn good<T: DeserializeOwned>(&self, answer: Response) -> Result<T, NotDone> {
        let status = answer.status();
        if status == StatusCode::OK {
            return self.read(answer).await;
        }
        let body: Value = answer.json().await.unwrap_or_default();
        let message = body["error"]["message"].as_str().unwrap_or("it does not say why");
        Err(NotDone::Failed(format!("the hub at {} refuses ({status}): {message}", self.url)))
    }

    async fn read<T: DeserializeOwned>(&self, answer: Response) -> Result<T, NotDone> {
        let read = answer.json().await;
        read.map_err(|error| NotDone::Failed(format!("the answer of {} cannot be read: {error}", self.url)))
    }
}
