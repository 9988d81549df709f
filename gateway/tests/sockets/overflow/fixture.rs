//! A gateway and two regions: the nearer one is overloaded, the other may take the overflow.

use crate::address::free_address;
use gateway::config::EdgeConfig;
use gateway::ingress::{self, IngressConfig, IngressSignals};
use regions::catalogue::Catalogue;
use scheduler_core::spoke::Spoke;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::future::IntoFuture;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use supervision::Mutex;
use tokio::net::TcpListener;
use tokio::sync::oneshot;

pub(crate) const NEAR: &str = "aws/us-east-1";
pub(crate) const FAR: &str = "aws/eu-central-1";
/// Queue of a replica with a second of work.
pub(crate) const BUSY: u64 = 10_000;
pub(crate) const SPEED: u64 = 10_000;

/// Scripted replica that responds at once.
#[derive(Default)]
pub(crate) struct Replica {
    pub(crate) pending: AtomicU64,
    speed: AtomicU64,
    pub(crate) requests: AtomicU64,
    pub(crate) tokens: AtomicU64,
}

impl Replica {
    pub(crate) async fn start(pending: u64, speed: u64) -> (Arc<Replica>, SocketAddr) {
        let replica = Arc::new(Replica::default());
        replica.pending.store(pending, Ordering::SeqCst);
        replica.speed.store(speed, Ordering::SeqCst);
        let (status, compute) = (replica.clone(), replica.clone());
        let status = move || async move { axum::Json(status.status()) };
        let compute = move |body: axum::body::Bytes| async move {
            compute.requests.fetch_add(1, Ordering::SeqCst);
            compute.tokens.fetch_add(gateway_core::body::read(&body).unwrap().tokens, Ordering::SeqCst);
            "{}"
        };
        let router = axum::Router::new().route("/status", axum::routing::get(status)).fallback(compute);
        (replica, serve(router).await)
    }

    fn status(&self) -> Value {
        let pending = self.pending.load(Ordering::SeqCst);
        json!({"version": 1, "names": ["m"], "model": "m", "state": "ready", "pending_tokens": pending,
               "interactive_tokens": pending, "pending_inputs": 0, "requests_total": 0,
               "tokens_per_second": self.speed.load(Ordering::SeqCst) as f64})
    }
}

pub(crate) async fn serve(router: axum::Router) -> SocketAddr {
    let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = socket.local_addr().unwrap();
    tokio::spawn(axum::serve(socket, router).into_future());
    address
}

/// Starts the ingress of a region with one replica.
async fn region(
    id: &str,
    replica: SocketAddr,
    stopped: impl Future<Output = ()> + Send + 'static,
) -> SocketAddr {
    ingress(id, vec![replica.into()], stopped).await
}

/// Starts the ingress of a region without replicas.
pub(crate) async fn ingress_of(id: &str, stopped: impl Future<Output = ()> + Send + 'static) -> SocketAddr {
    ingress(id, Vec::new(), stopped).await
}

async fn ingress(
    id: &str,
    replicas: Vec<regions::HostPort>,
    stopped: impl Future<Output = ()> + Send + 'static,
) -> SocketAddr {
    let spoke = Spoke::new(id.parse().unwrap(), 1, replicas).with_instance("a".parse().unwrap());
    let spoke = Arc::new(Mutex::new(spoke));
    let config = IngressConfig {
        tracing: None,
        metrics: None,
        jobs: None,
        proxy_protocol_from: Vec::new(),
        resolver: resolver::Resolver::new(&resolver::DnsSection::default()),
        listen: "127.0.0.1:0".parse().unwrap(),
        region: id.parse().unwrap(),
        signals: IngressSignals::default(),
        catalogue: Arc::new(Catalogue::builtin()),
        receipts: None,
        transport: identity::Transport::Loopback,
        operations: None,
    };
    let (ready, bound) = oneshot::channel();
    tokio::spawn(async move {
        ingress::run(config, spoke, stopped, |address| ready.send(address).unwrap()).await.unwrap();
    });
    bound.await.unwrap()
}

async fn hub(near: SocketAddr, far: SocketAddr) -> SocketAddr {
    let at = |id: &str, at: SocketAddr| json!({"id": id, "instances": [{"name": "a", "endpoint": at.to_string()}], "deployments": ["m"]});
    let deployment = json!({"name": "m", "task": "embed", "model": "pypi://m",
        "engine": {"kind": "cpu", "precision": "f32"}, "residency": null, "regions": []});
    let table = json!({"version": 1, "epoch": 1, "generation": 1, "regions": [at(NEAR, near), at(FAR, far)],
        "deployments": [deployment]});
    let routes = move |query: axum::extract::RawQuery| async move {
        if query.0.is_some_and(|query| query.contains("after=")) {
            std::future::pending::<()>().await;
        }
        axum::Json(table)
    };
    serve(axum::Router::new().route(scheduler_api::paths::ROUTES, axum::routing::get(routes))).await
}

/// The complete fixture. The gateway is in the near region.
pub(crate) struct Fixture {
    pub(crate) near: Arc<Replica>,
    pub(crate) far: Arc<Replica>,
    url: String,
    operations: SocketAddr,
    client: reqwest::Client,
    _dir: tempfile::TempDir,
    _stop: tokio::sync::watch::Sender<()>,
}

impl Fixture {
    pub(crate) async fn start(near: (u64, u64), far: (u64, u64)) -> Fixture {
        Fixture::with(near, far, async |address| address).await
    }

    /// Starts the fixture; the gateway reaches the far region at the address that `between` returns for its ingress.
    pub(crate) async fn with(
        near: (u64, u64),
        far: (u64, u64),
        between: impl AsyncFnOnce(SocketAddr) -> SocketAddr,
    ) -> Fixture {
        let stop = tokio::sync::watch::Sender::new(());
        let stopped = || {
            let mut stop = stop.subscribe();
            async move { while stop.changed().await.is_ok() {} }
        };
        let (near, near_at) = Replica::start(near.0, near.1).await;
        let (far, far_at) = Replica::start(far.0, far.1).await;
        let far_ingress = between(region(FAR, far_at, stopped()).await).await;
        let hub = hub(region(NEAR, near_at, stopped()).await, far_ingress).await;
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("tenants.toml"), "[[tenant]]\nname = 't'\nkey_env = 'KEY'\n").unwrap();
        let operations = free_address();
        let text = format!(
            "listen = '127.0.0.1:0'\noperations = '{operations}'\nregion = '{NEAR}'\nhub = 'http://{hub}'\n\
             snapshot = 'routes'\ntenants = 'tenants.toml'"
        );
        let environment = BTreeMap::from([("KEY".to_owned(), "KEY".to_owned())]);
        let config = EdgeConfig::parse(&text, dir.path(), &environment).unwrap();
        let (ready, bound) = oneshot::channel();
        let shutdown = stopped();
        tokio::spawn(async move {
            gateway::edge::run(config, shutdown, |address| ready.send(address).unwrap()).await.unwrap();
        });
        let url = format!("http://{}/v1/embeddings", bound.await.unwrap());
        let client = reqwest::Client::builder().no_proxy().build().unwrap();
        Fixture { near, far, url, operations, client, _dir: dir, _stop: stop }
    }

    /// Returns the region that serves an interactive request.
    pub(crate) async fn serving_region(&self) -> String {
        let body = json!({"model": "m", "input": "a question of a few words"}).to_string();
        let response = self.client.post(&self.url).bearer_auth("KEY").body(body).send().await.unwrap();
        let region = response.headers().get("x-meridian-region").map_or("", |value| value.to_str().unwrap());
        region.to_owned()
    }

    /// Sends requests until both regions have reported and a request was served by `region`.
    pub(crate) async fn wait_until_served_by(&self, region: &str) {
        while self.serving_region().await != region {
            tokio::task::yield_now().await;
        }
    }

    pub(crate) async fn scraped(&self, sample: &str) -> u64 {
        let url = format!("http://{}/metrics", self.operations);
        let text = self.client.get(url).send().await.unwrap().text().await.unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix(sample));
        line.map_or(0, |value| value.trim().parse().unwrap())
    }
}
