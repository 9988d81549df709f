//! Regions whose replicas become ready on command, their ingresses, and a gateway before them.

use crate::address::free_address;
use crate::hub;
use axum::body::Bytes;
use axum::http::{HeaderMap, StatusCode};
use axum::response::IntoResponse;
use gateway::config::EdgeConfig;
use gateway::ingress::{self, IngressConfig, IngressSignals};
use regions::catalogue::Catalogue;
use regions::id::DeploymentName;
use scheduler_core::spoke::{ReplicaStatus, Spoke};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use supervision::{Mutex, MutexGuard};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::oneshot;

pub(crate) const NEAR: &str = "aws/us-east-1";
pub(crate) const FAR: &str = "aws/eu-central-1";
/// Longer than any step takes, also on a busy machine.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(30);

/// Replica that becomes ready on command.
#[derive(Default)]
pub(crate) struct Replica {
    pub(crate) ready: AtomicBool,
    /// Closes the connection without a response and reports starting again, once.
    pub(crate) fails_next: AtomicBool,
    /// Response time in milliseconds.
    pub(crate) response_time_ms: AtomicU64,
    /// Reported tokens a second.
    pub(crate) speed: AtomicU64,
    /// Failure that it reports while it is not ready.
    failure: Mutex<Option<&'static str>>,
    /// Ids of the received requests, and their arrival times.
    pub(crate) received: Mutex<Vec<(String, Instant)>>,
}

impl Replica {
    async fn start(ready: bool) -> (Arc<Replica>, SocketAddr) {
        let replica = Arc::new(Replica::default());
        replica.ready.store(ready, Ordering::SeqCst);
        let (status, compute) = (replica.clone(), replica.clone());
        let status = move || async move { axum::Json(status.status()) };
        let compute = move |headers: HeaderMap, _: Bytes| async move { compute.compute(&headers).await };
        let router = axum::Router::new().route("/status", axum::routing::get(status)).fallback(compute);
        (replica, hub::serve(router.layer(axum::extract::DefaultBodyLimit::disable())).await)
    }

    fn status(&self) -> Value {
        let state = if self.ready.load(Ordering::SeqCst) { "ready" } else { "starting" };
        let failure = self.failure.lock().filter(|_| state == "starting");
        let failure =
            failure.map(|reason| json!({"reason": reason, "message": "/srv/models/m cannot be loaded"}));
        json!({"version": 1, "names": ["m"], "model": "m", "state": state, "failure": failure, "pending_tokens": 0, "pending_inputs": 0,
               "requests_total": 0, "tokens_per_second": self.speed.load(Ordering::SeqCst) as f64})
    }

    async fn compute(&self, headers: &HeaderMap) -> axum::response::Response {
        let id = headers.get("x-request-id").map_or("", |id| id.to_str().unwrap()).to_owned();
        self.received.lock().push((id, Instant::now()));
        if self.fails_next.swap(false, Ordering::SeqCst) {
            self.ready.store(false, Ordering::SeqCst);
            // Unwinding ends the connection without a response.
            panic!("this replica fails on command");
        }
        tokio::time::sleep(Duration::from_millis(self.response_time_ms.load(Ordering::SeqCst))).await;
        (StatusCode::OK, "{}").into_response()
    }

    /// Sets the failure that it reports while it is not ready.
    pub(crate) fn fail(&self, reason: Option<&'static str>) {
        *self.failure.lock() = reason;
    }

    pub(crate) fn ids(&self) -> Vec<String> {
        self.received.lock().iter().map(|(id, _)| id.clone()).collect()
    }
}

/// Ingress of a region with one replica.
pub(crate) struct Region {
    pub(crate) replica: Arc<Replica>,
    pub(crate) address: SocketAddr,
    pub(crate) signals: IngressSignals,
    spoke: Arc<Mutex<Spoke>>,
    client: reqwest::Client,
    _stop: oneshot::Sender<()>,
}

pub(crate) fn name() -> DeploymentName {
    "m".parse().unwrap()
}

impl Region {
    /// Starts a region whose replica is not ready, with this estimated start time.
    pub(crate) async fn cold(id: &str, start_time: Duration) -> Region {
        let region = Region::start(id, false).await;
        region.set_start_time(Some(start_time));
        region
    }

    pub(crate) async fn warm(id: &str) -> Region {
        let region = Region::start(id, true).await;
        wait_until("a replica is ready", async || region.status().await["deployments"][0]["ready"] == 1)
            .await;
        region
    }

    async fn start(id: &str, ready: bool) -> Region {
        let (replica, at) = Replica::start(ready).await;
        let spoke = Arc::new(Mutex::new(
            Spoke::new(id.parse().unwrap(), 1, vec![at.into()]).with_instance("a".parse().unwrap()),
        ));
        let signals = IngressSignals::default();
        let config = IngressConfig {
            tracing: None,
            metrics: None,
            jobs: None,
            proxy_protocol_from: Vec::new(),
            resolver: resolver::Resolver::new(&resolver::DnsSection::default()),
            listen: "127.0.0.1:0".parse().unwrap(),
            region: id.parse().unwrap(),
            catalogue: Arc::new(Catalogue::builtin()),
            receipts: None,
            transport: identity::Transport::Loopback,
            operations: None,
            signals: signals.clone(),
        };
        let (stop, stopped) = oneshot::channel::<()>();
        let (ready, bound) = oneshot::channel();
        let shared = spoke.clone();
        tokio::spawn(async move {
            let shutdown = async { drop(stopped.await) };
            ingress::run(config, shared, shutdown, |address| ready.send(address).unwrap()).await.unwrap();
        });
        let client = reqwest::Client::builder().no_proxy().build().unwrap();
        Region { replica, address: bound.await.unwrap(), signals, spoke, client, _stop: stop }
    }

    pub(crate) fn spoke(&self) -> MutexGuard<'_, Spoke> {
        self.spoke.lock()
    }

    pub(crate) fn set_start_time(&self, start_time: Option<Duration>) {
        self.spoke().set_start_time(&name(), start_time);
        self.signals.changed.notify_one();
    }

    /// Marks the replica as ready, as the scaler would, without a probe.
    pub(crate) fn mark_ready(&self) {
        self.replica.ready.store(true, Ordering::SeqCst);
        let observed = ReplicaStatus {
            model: None,
            failure: None,
            names: [name()].into(),
            ready: true,
            draining: false,
            pending_tokens: 0,
            interactive_tokens: None,
            tokens_per_second: self.replica.speed.load(Ordering::SeqCst) as f64,
        };
        self.spoke().observe_replica(0, observed, Instant::now());
        self.signals.changed.notify_one();
    }

    pub(crate) async fn status(&self) -> Value {
        let url = format!("http://{}/status", self.address);
        self.client.get(url).send().await.unwrap().json().await.unwrap()
    }

    /// Waits until exactly `count` requests are held.
    pub(crate) async fn wait_until_held(&self, count: usize) {
        let held = || self.spoke().held(&name()).requests;
        let begun = Instant::now();
        while held() != count {
            assert!(begun.elapsed() < TIMEOUT, "{} are held, not {count}", held());
            tokio::time::sleep(Duration::from_micros(200)).await;
        }
    }

    pub(crate) async fn metrics(&self) -> String {
        let url = format!("http://{}/metrics", self.address);
        self.client.get(url).send().await.unwrap().text().await.unwrap()
    }

    pub(crate) async fn scraped(&self, sample: &str) -> String {
        let text = self.metrics().await;
        let line = text.lines().find_map(|line| line.strip_prefix(sample)?.strip_prefix(' '));
        line.unwrap_or_else(|| panic!("no {sample} in {text}")).to_owned()
    }

    pub(crate) async fn send(&self, id: &str, headers: &[(&str, &str)], body: &[u8]) -> ClientResponse {
        let mut all = vec![("x-meridian-deployment", "m"), ("x-request-id", id)];
        all.extend(headers);
        send(self.address, &all, body).await
    }
}

/// Polls a condition a few times a millisecond.
pub(crate) async fn wait_until(description: &str, holds: impl AsyncFn() -> bool) {
    let begun = Instant::now();
    while !holds().await {
        assert!(begun.elapsed() < TIMEOUT, "timed out waiting until {description}");
        tokio::time::sleep(Duration::from_micros(200)).await;
    }
}

/// Response to a client.
#[derive(Clone, Debug)]
pub(crate) struct ClientResponse {
    pub(crate) status: u16,
    head: String,
    pub(crate) body: String,
}

impl ClientResponse {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().find_map(|line| Some(line.strip_prefix(name)?.strip_prefix(": ")?.trim()))
    }

    pub(crate) fn number(&self, name: &str) -> u64 {
        self.header(name).unwrap_or_else(|| panic!("no {name}: {self:?}")).parse().unwrap()
    }
}

/// Sends a request on its own connection, with a minimal client: a thousand of them are cheap.
pub(crate) async fn send(address: SocketAddr, headers: &[(&str, &str)], body: &[u8]) -> ClientResponse {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let mut head = format!(
        "POST /v1/embeddings HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {}\r\n",
        body.len()
    );
    headers.iter().for_each(|(name, value)| head.push_str(&format!("{name}: {value}\r\n")));
    head.push_str("\r\n");
    stream.write_all(head.as_bytes()).await.unwrap();
    stream.write_all(body).await.unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).await.unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no response: {text:?}"));
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    ClientResponse { status, head: head.to_lowercase(), body: body.to_owned() }
}

/// Gateway in the near region, before these regions.
pub(crate) struct Edge {
    pub(crate) address: SocketAddr,
    pub(crate) operations: SocketAddr,
    client: reqwest::Client,
    _dir: tempfile::TempDir,
    _stop: oneshot::Sender<()>,
}

impl Edge {
    pub(crate) async fn start(regions: &[(&str, &Region)]) -> Edge {
        let route = |(id, region): &(&str, &Region)| json!({"id": id, "instances": [{"name": "a", "endpoint": region.address.to_string()}], "deployments": ["m"]});
        let routes: Vec<_> = regions.iter().map(route).collect();
        let hub = hub::hub(1, 1, &routes, &[hub::deployment("m", Value::Null)]).await;
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("tenants.toml"), "[[tenant]]\nname = 't'\nkey_env = 'KEY'\n").unwrap();
        let operations = free_address();
        let text = format!(
            "listen = '127.0.0.1:0'\noperations = '{operations}'\nregion = '{NEAR}'\nhub = 'http://{hub}'\n\
             snapshot = 'routes'\ntenants = 'tenants.toml'"
        );
        let environment = BTreeMap::from([("KEY".to_owned(), "KEY".to_owned())]);
        let config = EdgeConfig::parse(&text, dir.path(), &environment).unwrap();
        let (stop, stopped) = oneshot::channel::<()>();
        let (ready, bound) = oneshot::channel();
        tokio::spawn(async move {
            let shutdown = async { drop(stopped.await) };
            gateway::edge::run(config, shutdown, |address| ready.send(address).unwrap()).await.unwrap();
        });
        let client = reqwest::Client::builder().no_proxy().build().unwrap();
        let edge = Edge { address: bound.await.unwrap(), operations, client, _dir: dir, _stop: stop };
        for (id, _) in regions {
            edge.wait_until(id, |region| region["health"] == "healthy" && region["ready"] == json!(["m"]))
                .await;
        }
        edge
    }

    /// Waits for a state of a region at the gateway.
    pub(crate) async fn wait_until(&self, id: &str, holds: impl Fn(&Value) -> bool) {
        wait_until(id, async || holds(&self.route(id).await)).await;
    }

    /// Returns the state of a region at the gateway.
    pub(crate) async fn route(&self, id: &str) -> Value {
        let url = format!("http://{}/routes", self.operations);
        let Ok(response) = self.client.get(url).send().await else { return Value::Null };
        let routes: Value = response.json().await.unwrap();
        let regions = routes["regions"].as_array().unwrap();
        regions.iter().find(|region| region["region"] == id).cloned().unwrap_or_default()
    }

    pub(crate) async fn send(&self, headers: &[(&str, &str)]) -> ClientResponse {
        let mut all = vec![("authorization", "Bearer KEY")];
        all.extend(headers);
        send(self.address, &all, br#"{"model":"m","input":"a question of a few words"}"#).await
    }
}
