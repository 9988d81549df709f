//! A hub on a port of its own, with a store that goes with the test.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use regions::{Catalogue, RegionId, RouteTable, parse_deployments};
use reqwest::header::{AUTHORIZATION, HeaderMap};
use scheduler::config::{HubConfig, LEASE_TTL, StoreConfig};
use scheduler::hub::{self, HubError};
use scheduler_core::access::Tokens;
use scheduler_core::registry::LAPSED_KEEP;
use scheduler_core::rollout::{READER_TIMEOUT, SETTLE_TIME};
use scheduler_core::token::Token;
use scheduler_core::wire::route::RouteTableV1;
use serde_json::{Value, json};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// How long anything that is waited for may take before a test gives up.
const PATIENCE: Duration = Duration::from_secs(30);

pub(crate) const EUROPE: &str = "gcp/europe-west4";
pub(crate) const AMERICA: &str = "aws/us-east-1";

/// What an operator shows.
pub(crate) const TOKEN: &str = "0123456789abcdef";

/// What gateways and spokes show, and the client of a [`Hub`] where it shows nothing else.
pub(crate) const FLEET_TOKEN: &str = "token-of-the-test-fleet";

/// The lease of a spoke instance.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Lease {
    pub(crate) id: String,
    pub(crate) holder: String,
}

impl Lease {
    /// The one that a registration of this instance has returned.
    pub(crate) fn of(region: &str, boot_id: u64, body: &Value) -> Lease {
        let id = body["lease"].as_str().unwrap().to_owned();
        assert_eq!((id.len(), body["version"].as_u64()), (32, Some(1)), "{body}");
        Lease { id, holder: format!("spoke/{region}/{boot_id:016x}") }
    }

    pub(crate) fn keep_alive_path(&self) -> String {
        format!("/v1/leases/{}/keepalive?holder={}", self.id, self.holder)
    }

    pub(crate) fn path(&self) -> String {
        format!("/v1/leases/{}?holder={}", self.id, self.holder)
    }
}

/// Waits for a condition.
pub(crate) async fn until(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let begun = Instant::now();
    while !holds().await {
        assert!(begun.elapsed() < PATIENCE, "{what} did not come true");
        tokio::task::yield_now().await;
    }
}

/// A hub that keeps its store in `data`, serves `minilm` and `minilm-eu`, and listens on any port.
pub(crate) fn config(data: &Path) -> HubConfig {
    let catalogue = Catalogue::builtin();
    let text = include_str!("../../../configs/deployments.toml");
    HubConfig {
        listen: ([127, 0, 0, 1], 0).into(),
        store: StoreConfig::Embedded { data: data.join("hub") },
        deployments: parse_deployments(text, &catalogue).unwrap(),
        catalogue: Arc::new(catalogue),
        lease_ttl: LEASE_TTL,
        lapsed_keep: LAPSED_KEEP,
        reader_keep: READER_TIMEOUT,
        settle: SETTLE_TIME,
        tokens: Tokens {
            operator: Some(Token::read(TOKEN).unwrap()),
            fleet: vec![Token::read(FLEET_TOKEN).unwrap()],
        },
    }
}

/// A hub that runs.
pub(crate) struct Hub {
    pub(crate) url: String,
    pub(crate) client: reqwest::Client,
    stop: oneshot::Sender<()>,
    task: JoinHandle<Result<(), HubError>>,
}

impl Hub {
    pub(crate) async fn start(config: HubConfig) -> Hub {
        Hub::try_start(config).await.unwrap_or_else(|error| panic!("{error}"))
    }

    /// Starts a hub, or says why it does not.
    pub(crate) async fn try_start(config: HubConfig) -> Result<Hub, HubError> {
        let (stop, stopped) = oneshot::channel();
        let (ready, address) = oneshot::channel();
        let shutdown = async { stopped.await.unwrap_or_default() };
        let task = tokio::spawn(hub::run(config, shutdown, |address| ready.send(address).unwrap()));
        let Ok(address) = address.await else {
            return Err(task.await.unwrap().expect_err("it was not told to stop"));
        };
        let token = format!("Bearer {FLEET_TOKEN}").parse().unwrap();
        let headers = HeaderMap::from_iter([(AUTHORIZATION, token)]);
        let client = reqwest::Client::builder().no_proxy().default_headers(headers).build().unwrap();
        Ok(Hub { url: format!("http://{address}"), client, stop, task })
    }

    /// Tells it to stop and waits until it has.
    pub(crate) async fn stop(self) {
        self.stop.send(()).unwrap();
        self.task.await.unwrap().unwrap_or_else(|error| panic!("{error}"));
    }

    /// Ends it where it stands. Its store is free soon after.
    pub(crate) async fn kill(self) {
        self.task.abort();
        assert!(self.task.await.unwrap_err().is_cancelled());
    }

    /// What comes back for a `POST`: status, the header with the code, the body.
    pub(crate) async fn post(&self, path: &str, body: impl Into<reqwest::Body>) -> (u16, String, Value) {
        answer(self.client.post(format!("{}{path}", self.url)).body(body)).await
    }

    pub(crate) async fn get(&self, path: &str) -> (u16, String, Value) {
        answer(self.client.get(format!("{}{path}", self.url))).await
    }

    /// Registers a spoke and returns its lease.
    pub(crate) async fn register(&self, region: &str, port: u16, boot_id: u64, ready: &[&str]) -> Lease {
        let (status, _, body) = self.post("/v1/spokes", registration(region, port, boot_id, ready)).await;
        assert_eq!(status, 200, "{body}");
        Lease::of(region, boot_id, &body)
    }

    pub(crate) async fn keep_alive(&self, lease: &Lease, ready: &[&str]) -> (u16, Value) {
        let body = json!({"version": 1, "deployments": ready}).to_string();
        let (status, _, body) = self.post(&lease.keep_alive_path(), body).await;
        (status, body)
    }

    pub(crate) async fn leave(&self, lease: &Lease) -> u16 {
        answer(self.client.delete(format!("{}{}", self.url, lease.path()))).await.0
    }

    /// The table that is published now.
    pub(crate) async fn routes(&self) -> RouteTable {
        let (status, _, body) = self.get("/v1/routes").await;
        assert_eq!(status, 200, "{body}");
        table(body)
    }

    /// Waits until the table is as it should be, by long polls as a gateway would. Generations must rise on the way.
    pub(crate) async fn until_routes(&self, what: &str, holds: impl Fn(&RouteTable) -> bool) -> RouteTable {
        let begun = Instant::now();
        let mut routes = self.routes().await;
        while !holds(&routes) {
            assert!(begun.elapsed() < PATIENCE, "{what} did not come true: {routes:#?}");
            let path = format!("/v1/routes?after={}&wait_ms=1000", routes.generation);
            let (status, _, body) = self.get(&path).await;
            if status == 200 {
                let next = table(body);
                assert!(
                    next.generation > routes.generation,
                    "{} after {}",
                    next.generation,
                    routes.generation
                );
                routes = next;
            }
        }
        routes
    }
}

pub(crate) fn registration(region: &str, port: u16, boot_id: u64, ready: &[&str]) -> String {
    json!({"version": 1, "region": region, "endpoint": format!("10.0.0.1:{port}"), "boot_id": boot_id,
           "deployments": ready})
    .to_string()
}

/// The port at which the table says that a region is reached.
pub(crate) fn port(table: &RouteTable, region: &str) -> Option<u16> {
    table.regions.get(region).map(|route| route.endpoint.port())
}

/// What the table says is ready in a region.
pub(crate) fn ready(table: &RouteTable, region: &str) -> BTreeSet<String> {
    let route = &table.regions[&region.parse::<RegionId>().unwrap()];
    route.deployments.iter().map(ToString::to_string).collect()
}

pub(crate) fn table(body: Value) -> RouteTable {
    let wire: RouteTableV1 = serde_json::from_value(body).unwrap();
    RouteTable::try_from(wire).unwrap()
}

pub(crate) async fn answer(request: reqwest::RequestBuilder) -> (u16, String, Value) {
    let answer = request.send().await.unwrap();
    let status = answer.status().as_u16();
    let code = answer.headers().get("x-meridian-error").map(|code| code.to_str().unwrap().to_owned());
    let body = serde_json::from_slice(&answer.bytes().await.unwrap()).unwrap_or(Value::Null);
    (status, code.unwrap_or_default(), body)
}
