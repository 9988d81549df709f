//! A gateway with three scripted regions behind it, and the hub that publishes them.

use super::region::{Region, Script};
use crate::address::free_address;
use gateway::config::EdgeConfig;
use rustls::pki_types::CertificateDer;
use scheduler_api::usage::UsageV1;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::net::TcpListener;

pub(crate) const AMERICA: &str = "aws/us-east-1";
pub(crate) const EUROPE: &str = "gcp/europe-west4";
pub(crate) const JAPAN: &str = "oci/ap-tokyo-1";

/// Round-trip time to each region: they differ by more than the tie margin, so that the first region does not depend on
/// whether a fixture lives long enough for measurements to replace the distance estimate.
pub(crate) const ROUND_TRIP_TIMES: [Duration; 3] =
    [Duration::ZERO, Duration::from_millis(30), Duration::from_millis(60)];

/// A tenant without limits, and a restricted one.
const TENANTS: &str = "[[tenant]]\nname = 'test'\nkey_file = 'key'\n[[tenant]]\nname = 'narrow'\nkey_file = 'narrow'\n\
                       deployments = ['anywhere']\nresidency = { allow = ['eu'] }\n\
                       limits = { requests_per_second = 10, tokens_per_minute = 1000 }\n";

/// Gateway with three regions.
pub(crate) struct Fixture {
    pub(crate) url: String,
    pub(crate) address: SocketAddr,
    /// Certificate for clients, if it uses TLS.
    pub(crate) certificate: CertificateDer<'static>,
    pub(crate) operations: String,
    pub(crate) regions: BTreeMap<&'static str, Arc<Region>>,
    pub(crate) addresses: BTreeMap<&'static str, SocketAddr>,
    pub(crate) client: reqwest::Client,
    /// Reports of usage that the hub has received.
    pub(crate) usage: UsageReports,
    dir: tempfile::TempDir,
    stop: tokio::sync::oneshot::Sender<()>,
}

/// Receiver of the reports of usage.
pub(crate) type UsageReports = tokio::sync::watch::Receiver<Vec<UsageV1>>;

/// Configuration line that enables TLS for clients.
pub(crate) const TLS: &str = "tls = { certificate = 'gateway.crt', key = 'gateway.key' }";

impl Fixture {
    pub(crate) async fn with(scripts: [(&'static str, Script); 3]) -> Fixture {
        Fixture::with_trusted_peer("127.0.0.1", scripts).await
    }

    pub(crate) async fn with_trusted_peer(peer: &str, scripts: [(&'static str, Script); 3]) -> Fixture {
        let text = format!("trusted_peers = ['{peer}']");
        Fixture::start(&text, scripts).await
    }

    /// Starts a gateway with `more` in its configuration. If that enables TLS, clients use it.
    pub(crate) async fn start(more: &str, scripts: [(&'static str, Script); 3]) -> Fixture {
        let (mut regions, mut addresses, mut rows) = (BTreeMap::new(), BTreeMap::new(), Vec::new());
        for ((id, script), away) in scripts.into_iter().zip(ROUND_TRIP_TIMES) {
            let (region, address) = Region::start(id, away, script).await;
            regions.insert(id, region);
            addresses.insert(id, address);
            rows.push(
                json!({"id": id, "instances": [{"name": "a", "endpoint": address.to_string()}], "deployments": ["anywhere", "locked"]}),
            );
        }
        let (hub, usage) = hub(rows).await;
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("key"), "k").unwrap();
        std::fs::write(dir.path().join("narrow"), "n").unwrap();
        std::fs::write(dir.path().join("tenants.toml"), TENANTS).unwrap();
        let certificate = certify(dir.path());
        let (address, operations, stop) = loop {
            let text = format!(
                "listen = '127.0.0.1:0'\noperations = '{}'\nregion = '{AMERICA}'\nhub = 'http://{hub}'\n\
                 snapshot = 'routes'\ntenants = 'tenants.toml'\n{more}",
                free_address()
            );
            let config = EdgeConfig::parse(&text, dir.path(), &BTreeMap::new());
            let config = config.map_err(|problems| format!("{problems:#?}")).unwrap();
            let operations = format!("http://{}", config.operations);
            let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
            let (ready, address) = tokio::sync::oneshot::channel();
            let shutdown = async { drop(stopped.await) };
            let running = tokio::spawn(gateway::edge::run(config, shutdown, |address| {
                ready.send(address).expect("the test waits for the address")
            }));
            if let Ok(address) = address.await {
                break (address, operations, stop);
            }
            // Another fixture may have taken the port in the meantime.
            let ended = running.await.unwrap();
            assert!(matches!(ended, Err(gateway::edge::EdgeError::Bind { .. })), "{ended:?}");
        };
        let url = format!("http://{address}/v1/embeddings");
        let client = reqwest::Client::builder().no_proxy().build().unwrap();
        let fixture =
            Fixture { url, address, certificate, operations, regions, addresses, client, usage, dir, stop };
        fixture.wait_until_all_healthy().await;
        fixture
    }

    /// Stops the gateway. Its directory and the reports of its usage stay.
    pub(crate) fn stop(self) -> (tempfile::TempDir, UsageReports) {
        let Fixture { dir, usage, stop, .. } = self;
        stop.send(()).expect("the gateway runs");
        (dir, usage)
    }

    async fn wait_until_all_healthy(&self) {
        let begun = Instant::now();
        loop {
            assert!(begun.elapsed() < Duration::from_secs(20), "the regions do not become healthy");
            let Ok(response) = self.client.get(format!("{}/routes", self.operations)).send().await else {
                continue;
            };
            let routes: Value = response.json().await.unwrap();
            let regions = routes["regions"].as_array().cloned().unwrap_or_default();
            if regions.len() == 3 && regions.iter().all(|region| region["health"] == "healthy") {
                return;
            }
        }
    }

    pub(crate) async fn send(
        &self,
        model: &str,
        headers: &[(&str, &str)],
    ) -> reqwest::Result<reqwest::Response> {
        let body = json!({"model": model, "input": "x"}).to_string();
        let mut request = self.client.post(&self.url).bearer_auth("k").body(body);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        request.send().await
    }

    /// Returns status and body of the response to any method, path and body.
    pub(crate) async fn any(&self, method: &str, path: &str, body: &str) -> (u16, Value) {
        let url = self.url.replace("/v1/embeddings", path);
        let request =
            self.client.request(method.parse().unwrap(), url).bearer_auth("k").body(body.to_owned());
        let response = request.send().await.unwrap();
        (response.status().as_u16(), response.json().await.unwrap())
    }

    pub(crate) fn requests(&self) -> [u64; 3] {
        [AMERICA, EUROPE, JAPAN].map(|id| self.regions[id].requests())
    }
}

/// Starts a hub with one table; it holds every later poll.
async fn hub(regions: Vec<Value>) -> (SocketAddr, UsageReports) {
    let deployment = |name: &str, residency: Value| {
        json!({"name": name, "task": "embed", "model": "pypi://m", "engine": {"kind": "cpu", "precision": "f32"},
               "residency": residency, "regions": []})
    };
    let deployments = [deployment("anywhere", Value::Null), deployment("locked", json!("eu"))];
    let table =
        json!({"version": 1, "epoch": 1, "generation": 1, "regions": regions, "deployments": deployments});
    let routes = move |query: axum::extract::RawQuery| async move {
        if query.0.is_some_and(|query| query.contains("after=")) {
            std::future::pending::<()>().await;
        }
        axum::Json(table)
    };
    let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = socket.local_addr().unwrap();
    let (reports, received) = tokio::sync::watch::channel(Vec::new());
    let usage = move |axum::Json(usage): axum::Json<UsageV1>| async move {
        reports.send_modify(|all| all.push(usage));
        axum::http::StatusCode::NO_CONTENT
    };
    let router = axum::Router::new()
        .route(scheduler_api::paths::ROUTES, axum::routing::get(routes))
        .route(scheduler_api::paths::USAGE, axum::routing::post(usage));
    tokio::spawn(axum::serve(socket, router).into_future());
    (address, received)
}

/// Writes a certificate for `localhost` and its key; returns the certificate.
fn certify(dir: &Path) -> CertificateDer<'static> {
    let made = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
    std::fs::write(dir.join("gateway.crt"), made.cert.pem()).unwrap();
    std::fs::write(dir.join("gateway.key"), made.signing_key.serialize_pem()).unwrap();
    made.cert.der().clone()
}
