//! Hub on a free port, with a store in a temporary folder.

use scheduler_api::paths;
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use identity::Transport;
use regions::{Catalogue, RegionId, RouteTable, parse_deployments};
use scheduler::config::{HubConfig, LEASE_TTL, StoreConfig};
use scheduler::hub::{self, HubError};
use scheduler_api::route::RouteTableV1;
use scheduler_core::registry::LAPSED_KEEP;
use scheduler_core::rollout::{READER_TIMEOUT, SETTLE_TIME};
use serde_json::{Value, json};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// Time limit of every wait.
const TIMEOUT: Duration = Duration::from_secs(30);

pub(crate) const EUROPE: &str = "gcp/europe-west4";
pub(crate) const AMERICA: &str = "aws/us-east-1";

/// The lease of a spoke instance.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Lease {
    pub(crate) id: String,
    pub(crate) holder: String,
}

impl Lease {
    /// Reads the lease from the response to a registration of this instance.
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

/// Returns an address of this machine that no process uses.
pub(crate) fn free_address() -> SocketAddr {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}

/// Waits for a condition.
pub(crate) async fn wait_until(description: &str, mut holds: impl AsyncFnMut() -> bool) {
    let begun = Instant::now();
    while !holds().await {
        assert!(begun.elapsed() < TIMEOUT, "timed out: {description}");
        tokio::task::yield_now().await;
    }
}

/// Returns a configuration with the store in `data`, the deployments `minilm` and `minilm-eu`, and any port.
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
        console: None,
        logs: None,
        metrics: None,
        operations: None,
        transport: Transport::Loopback,
        authority: None,
        operators: None,
    }
}

/// Running hub.
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

    /// Starts a hub, or returns the error.
    pub(crate) async fn try_start(config: HubConfig) -> Result<Hub, HubError> {
        let (stop, stopped) = oneshot::channel();
        let (ready, address) = oneshot::channel();
        let shutdown = async { stopped.await.unwrap_or_default() };
        let task = tokio::spawn(hub::run(config, shutdown, |address| ready.send(address).unwrap()));
        let Ok(address) = address.await else {
            return Err(task.await.unwrap().expect_err("it was not stopped"));
        };
        let client = reqwest::Client::builder().no_proxy().build().unwrap();
        Ok(Hub { url: format!("http://{address}"), client, stop, task })
    }

    /// Stops the hub gracefully.
    pub(crate) async fn stop(self) {
        self.stop.send(()).unwrap();
        self.task.await.unwrap().unwrap_or_else(|error| panic!("{error}"));
    }

    /// Kills the hub. Its store is free soon after.
    pub(crate) async fn kill(self) {
        self.task.abort();
        assert!(self.task.await.unwrap_err().is_cancelled());
    }

    /// Sends a `POST`; returns the status, the error code in the header, and the body.
    pub(crate) async fn post(&self, path: &str, body: impl Into<reqwest::Body>) -> (u16, String, Value) {
        response(self.client.post(format!("{}{path}", self.url)).body(body)).await
    }

    pub(crate) async fn get(&self, path: &str) -> (u16, String, Value) {
        response(self.client.get(format!("{}{path}", self.url))).await
    }

    /// Registers a spoke and returns its lease.
    pub(crate) async fn register(&self, region: &str, port: u16, boot_id: u64, ready: &[&str]) -> Lease {
        let (status, _, body) = self.post(paths::SPOKES, registration(region, port, boot_id, ready)).await;
        assert_eq!(status, 200, "{body}");
        Lease::of(region, boot_id, &body)
    }

    pub(crate) async fn keep_alive(&self, lease: &Lease, ready: &[&str]) -> (u16, Value) {
        let body = json!({"version": 1, "state": {"deployments": ready}}).to_string();
        let (status, _, body) = self.post(&lease.keep_alive_path(), body).await;
        (status, body)
    }

    /// Keeps a lease alive without a change of the region's state.
    pub(crate) async fn keep_alive_unchanged(&self, lease: &Lease) -> (u16, Value) {
        let (status, _, body) = self.post(&lease.keep_alive_path(), json!({"version": 1}).to_string()).await;
        (status, body)
    }

    pub(crate) async fn deregister(&self, lease: &Lease) -> u16 {
        response(self.client.delete(format!("{}{}", self.url, lease.path()))).await.0
    }

    /// Returns the published table.
    pub(crate) async fn routes(&self) -> RouteTable {
        let (status, _, body) = self.get(paths::ROUTES).await;
        assert_eq!(status, 200, "{body}");
        table(body)
    }

    /// Long-polls like a gateway until the table meets a condition. Generations must rise meanwhile.
    pub(crate) async fn wait_for_routes(
        &self,
        description: &str,
        holds: impl Fn(&RouteTable) -> bool,
    ) -> RouteTable {
        let begun = Instant::now();
        let mut routes = self.routes().await;
        while !holds(&routes) {
            assert!(begun.elapsed() < TIMEOUT, "timed out: {description}: {routes:#?}");
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
    json!({"version": 1, "region": region, "instance": boot_id.to_string(), "endpoint": format!("10.0.0.1:{port}"), "boot_id": boot_id,
           "deployments": ready})
    .to_string()
}

/// Returns the ports of a region's spokes in the table.
pub(crate) fn ports(table: &RouteTable, region: &str) -> Vec<u16> {
    let instances = table.regions.get(region).map(|route| &route.instances);
    instances.into_iter().flat_map(|all| all.values().map(|endpoint| endpoint.port())).collect()
}

/// Returns the port of the first spoke of a region in the table.
pub(crate) fn port(table: &RouteTable, region: &str) -> Option<u16> {
    ports(table, region).first().copied()
}

/// Returns the ready deployments of a region in the table.
pub(crate) fn ready(table: &RouteTable, region: &str) -> BTreeSet<String> {
    let route = &table.regions[&region.parse::<RegionId>().unwrap()];
    route.deployments.iter().map(ToString::to_string).collect()
}

pub(crate) fn table(body: Value) -> RouteTable {
    let wire: RouteTableV1 = serde_json::from_value(body).unwrap();
    RouteTable::try_from(wire).unwrap()
}

pub(crate) async fn response(request: reqwest::RequestBuilder) -> (u16, String, Value) {
    let response = request.send().await.unwrap();
    let status = response.status().as_u16();
    let code = response.headers().get("x-meridian-error").map(|code| code.to_str().unwrap().to_owned());
    let body = serde_json::from_slice(&response.bytes().await.unwrap()).unwrap_or(Value::Null);
    (status, code.unwrap_or_default(), body)
}
