//! A gateway, a hub that publishes two regions, their ingresses, and between them a network that records traffic and
//! can be rerouted.

use super::authority::{Authority, Subject};
use crate::address::free_address;
use gateway::config::EdgeConfig;
use gateway::ingress::{IngressConfig, IngressSignals};
use identity::{AcceptedPeers, IdentityFiles, OwnName, ProcessIdentity, ServerTls, Transport};
use regions::catalogue::Catalogue;
use regions::spiffe::Role;
use scheduler_core::spoke::Spoke;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::future::IntoFuture;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use supervision::Mutex;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{oneshot, watch};

pub(crate) const AMERICA: &str = "aws/us-east-1";
pub(crate) const EUROPE: &str = "aws/eu-central-1";
/// Text in every request.
pub(crate) const SECRET: &str = "the-text-of-a-tenant";

/// Bytes of a replica's response: about four embeddings of 384 numbers as text.
const RESPONSE_BYTES: usize = 8 << 10;

/// Connections of a replica: those of a benchmark.
const CONNECTIONS_MAX: usize = 4096;

/// Longer than any step takes, also on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Certificates of one end; none in plaintext.
#[derive(Clone, Copy)]
pub(crate) struct PeerTls<'a> {
    pub(crate) certificate_of: Option<&'a Authority>,
    pub(crate) trusts: Option<&'a Authority>,
    /// HTTP version that a gateway uses to regions; a region supports both.
    pub(crate) http: u8,
}

impl<'a> PeerTls<'a> {
    pub(crate) fn tls(authority: &'a Authority) -> PeerTls<'a> {
        PeerTls { certificate_of: Some(authority), trusts: Some(authority), http: 1 }
    }

    pub(crate) fn http2(self) -> PeerTls<'a> {
        PeerTls { http: 2, ..self }
    }

    pub(crate) fn plaintext() -> PeerTls<'static> {
        PeerTls { certificate_of: None, trusts: None, http: 1 }
    }

    fn files(self, dir: &Path, name: &str, uri: &str) -> Option<IdentityFiles> {
        let [certificate, key, ca] = self.certificate_of?.write(dir, name, &Subject::named(uri));
        std::fs::write(&ca, &self.trusts?.pem).unwrap();
        Some(IdentityFiles { certificate, key, authorities: ca, revoked: None })
    }
}

/// Network between gateway and ingresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NetworkKind {
    /// Network that records traffic and can be rerouted or cut.
    Observed,
    /// Direct connection.
    Direct,
}

struct Region {
    operations: SocketAddr,
    network: Network,
    requests: Arc<AtomicU64>,
    _stop: oneshot::Sender<()>,
}

/// Forwards all traffic to a target, records it, and resets every connection when it is rerouted.
struct Network {
    ingress: SocketAddr,
    address: SocketAddr,
    target: watch::Sender<SocketAddr>,
    /// Whether traffic is dropped silently.
    cut: watch::Sender<bool>,
    recorded: Arc<Mutex<Vec<u8>>>,
}

pub(crate) struct Fixture {
    pub(crate) url: String,
    operations: String,
    regions: BTreeMap<&'static str, Region>,
    client: reqwest::Client,
    _dir: tempfile::TempDir,
    _stop: oneshot::Sender<()>,
}

/// Response as a client sees it, and what operators can observe of it.
pub(crate) struct ClientResponse {
    pub(crate) status: u16,
    pub(crate) region: String,
    pub(crate) text: String,
    pub(crate) explained: String,
}

impl Fixture {
    /// Starts two regions with the same settings.
    pub(crate) async fn new(edge: PeerTls<'_>, regions: PeerTls<'_>) -> Fixture {
        Fixture::start(edge, [(AMERICA, regions), (EUROPE, regions)]).await
    }

    pub(crate) async fn start(edge: PeerTls<'_>, hops: [(&'static str, PeerTls<'_>); 2]) -> Fixture {
        Fixture::start_with(NetworkKind::Observed, Duration::ZERO, edge, hops).await
    }

    /// Starts the fixture with such a link and response time of the replicas.
    pub(crate) async fn start_with(
        link: NetworkKind,
        takes: Duration,
        edge: PeerTls<'_>,
        hops: [(&'static str, PeerTls<'_>); 2],
    ) -> Fixture {
        let dir = tempfile::tempdir().unwrap();
        let (mut regions, mut rows) = (BTreeMap::new(), Vec::new());
        for (id, hop) in hops {
            let region = start_region(id, hop, takes, dir.path()).await;
            let endpoint = match link {
                NetworkKind::Observed => region.network.address,
                NetworkKind::Direct => region.network.ingress,
            };
            let endpoint = endpoint.to_string();
            rows.push(json!({"id": id, "instances": [{"name": "a", "endpoint": endpoint}], "deployments": ["anywhere", "locked"]}));
            regions.insert(id, region);
        }
        std::fs::write(dir.path().join("key"), "k").unwrap();
        let tenants = "[[tenant]]\nname = 'test'\nkey_file = 'key'\n";
        std::fs::write(dir.path().join("tenants.toml"), tenants).unwrap();
        let operations = free_address();
        let mut text = format!(
            "listen = '127.0.0.1:0'\noperations = '{operations}'\nregion = '{AMERICA}'\nhub = 'http://{}'\n\
             snapshot = 'routes'\ntenants = 'tenants.toml'\nregion_http = {}\n",
            hub(rows).await,
            edge.http
        );
        if edge.files(dir.path(), "edge", "spiffe://m/gateway/aws/us-east-1/in/us-va").is_some() {
            text += "[identity]\ncertificate = 'edge.crt'\nkey = 'edge.key'\nauthorities = 'edge.ca'\n";
        }
        let config = EdgeConfig::parse(&text, dir.path(), &BTreeMap::new());
        let config = config.map_err(|problems| format!("{problems:#?}")).unwrap();
        let (stop, stopped) = oneshot::channel::<()>();
        let (ready, address) = oneshot::channel();
        let shutdown = async { drop(stopped.await) };
        tokio::spawn(gateway::edge::run(config, shutdown, |address| ready.send(address).unwrap()));
        let url = format!("http://{}", address.await.unwrap());
        let client = reqwest::Client::builder().no_proxy().build().unwrap();
        let operations = format!("http://{operations}");
        let fixture = Fixture { url, operations, regions, client, _dir: dir, _stop: stop };
        fixture
            .wait_until("the edge has a table", async || {
                fixture.get(&fixture.operations, "/readyz").await.0 == 200
            })
            .await;
        fixture
    }

    /// Sends a request to a deployment and returns the response head.
    async fn request(&self, deployment: &str) -> reqwest::Response {
        let body = json!({"model": deployment, "input": SECRET}).to_string();
        let request = self.client.post(format!("{}/v1/embeddings", self.url)).bearer_auth("k").body(body);
        request.send().await.unwrap()
    }

    /// Clears the recorded traffic.
    pub(crate) fn clear_recording(&self) {
        self.regions.values().for_each(|region| region.network.recorded.lock().clear());
    }

    /// Sends a request to a deployment and returns the complete response.
    pub(crate) async fn send(&self, deployment: &str) -> ClientResponse {
        let response = self.request(deployment).await;
        let header =
            |name| response.headers().get(name).map_or("", |value| value.to_str().unwrap()).to_owned();
        let (status, region, id) =
            (response.status().as_u16(), header("x-meridian-region"), header("x-request-id"));
        let text = response.text().await.unwrap();
        let (_, explained) = self.get(&self.operations, &format!("/explain/{id}")).await;
        ClientResponse { status, region, text, explained }
    }

    /// Reroutes the address of `region` to the ingress of `other`.
    pub(crate) fn reroute(&self, region: &str, other: &str) {
        let target = self.regions[other].network.ingress;
        self.regions[region].network.target.send_replace(target);
    }

    /// Silently cuts or restores the link to a region.
    pub(crate) fn cut(&self, region: &str, cut: bool) {
        self.regions[region].network.cut.send_replace(cut);
    }

    /// Returns the number of requests that the replica of a region has received.
    pub(crate) fn requests(&self, region: &str) -> u64 {
        self.regions[region].requests.load(Ordering::SeqCst)
    }

    /// Returns all recorded traffic to and from a region.
    pub(crate) fn recorded(&self, region: &str) -> Vec<u8> {
        self.regions[region].network.recorded.lock().clone()
    }

    pub(crate) async fn edge_metrics(&self) -> String {
        self.get(&self.operations, "/metrics").await.1
    }

    /// Waits until a series of the gateway's metrics is not zero.
    pub(crate) async fn wait_until_edge_counts(&self, line: &str) {
        self.wait_until(line, async || counts(&self.edge_metrics().await, line)).await;
    }

    /// Returns the metrics of a region from its operations port.
    pub(crate) async fn region_metrics(&self, region: &str) -> String {
        self.get(&format!("http://{}", self.regions[region].operations), "/metrics").await.1
    }

    /// Returns whether a series of the gateway's metrics is present and not zero.
    pub(crate) async fn counts(&self, line: &str) -> bool {
        counts(&self.edge_metrics().await, &format!("{line} "))
    }

    /// Waits until a series of a region's metrics is not zero.
    pub(crate) async fn wait_until_region_counts(&self, region: &str, line: &str) {
        let url = format!("http://{}", self.regions[region].operations);
        self.wait_until(line, async || counts(&self.get(&url, "/metrics").await.1, line)).await;
    }

    pub(crate) async fn wait_until_healthy(&self, region: &str) {
        self.wait_until("a region is healthy", async || {
            let routes: Value = serde_json::from_str(&self.get(&self.operations, "/routes").await.1).unwrap();
            let rows = routes["regions"].as_array().cloned().unwrap_or_default();
            let ready = |row: &Value| row["ready"].as_array().is_some_and(|ready| ready.len() == 2);
            rows.iter().any(|row| row["region"] == region && row["health"] == "healthy" && ready(row))
        })
        .await;
    }

    async fn get(&self, url: &str, path: &str) -> (u16, String) {
        match self.client.get(format!("{url}{path}")).send().await {
            Ok(response) => (response.status().as_u16(), response.text().await.unwrap()),
            Err(_) => (0, String::new()),
        }
    }

    async fn wait_until(&self, description: &str, holds: impl AsyncFn() -> bool) {
        let waited = async {
            while !holds().await {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(TIMEOUT, waited)
            .await
            .unwrap_or_else(|_| panic!("timed out waiting until {description}"));
    }
}

fn counts(metrics: &str, line: &str) -> bool {
    metrics.lines().any(|text| text.strip_prefix(line).is_some_and(|value| value.trim() != "0"))
}

async fn start_region(id: &'static str, hop: PeerTls<'_>, takes: Duration, dir: &Path) -> Region {
    let catalogue = Arc::new(Catalogue::builtin());
    let region = id.parse().unwrap();
    let within = catalogue.get(&region).unwrap().narrowest().as_str();
    let name = id.replace('/', "-");
    let identity = |role: Role, hop: PeerTls<'_>| {
        let uri = format!("spiffe://m/{role}/{id}/in/{within}");
        let files = hop.files(dir, &format!("{role}-{name}"), &uri)?;
        let own = OwnName { roles: &[Role::Spoke, Role::Replica], region: Some(region.clone()) };
        let loaded = ProcessIdentity::load(files, &own, Some(&catalogue));
        Some(Arc::new(loaded.map_err(|wrong| wrong.join("\n")).unwrap()))
    };
    let transport = identity(Role::Spoke, hop).map_or(Transport::Loopback, Transport::Tls);
    // The spoke and its replica trust each other, also if gateways reject the spoke.
    let of_replica = PeerTls { certificate_of: hop.trusts, trusts: hop.certificate_of, ..hop };
    let (replica, requests) = replica(takes, identity(Role::Replica, of_replica)).await;
    let operations = free_address();
    let config = IngressConfig {
        tracing: None,
        metrics: None,
        jobs: None,
        proxy_protocol_from: Vec::new(),
        resolver: resolver::Resolver::new(&resolver::DnsSection::default()),
        listen: "127.0.0.1:0".parse().unwrap(),
        region: region.clone(),
        signals: IngressSignals::default(),
        catalogue: catalogue.clone(),
        receipts: None,
        transport,
        operations: Some(operations),
    };
    let spoke = Arc::new(Mutex::new(
        Spoke::new(region.clone(), 1, vec![replica.into()]).with_instance("a".parse().unwrap()),
    ));
    let (stop, stopped) = oneshot::channel::<()>();
    let (ready, address) = oneshot::channel();
    let shutdown = async { drop(stopped.await) };
    tokio::spawn(gateway::ingress::run(config, spoke, shutdown, |address| ready.send(address).unwrap()));
    let network = Network::start(address.await.unwrap()).await;
    Region { operations, network, requests, _stop: stop }
}

impl Network {
    async fn start(ingress: SocketAddr) -> Network {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (target, recorded) = (watch::Sender::new(ingress), Arc::new(Mutex::new(Vec::new())));
        let cut = watch::Sender::new(false);
        let (targets, copied, broken) = (target.subscribe(), recorded.clone(), cut.subscribe());
        tokio::spawn(async move {
            while let Ok((near, _)) = listener.accept().await {
                let (mut targets, copied, broken) = (targets.clone(), copied.clone(), broken.clone());
                tokio::spawn(async move {
                    let target = *targets.borrow_and_update();
                    let Ok(far) = TcpStream::connect(target).await else { return };
                    let (near, far) = (near.into_split(), far.into_split());
                    tokio::select! {
                        () = copy(near.0, far.1, &copied, broken.clone()) => {}
                        () = copy(far.0, near.1, &copied, broken.clone()) => {}
                        _ = targets.changed() => {}
                    }
                });
            }
        });
        Network { ingress, address, target, cut, recorded }
    }
}

/// Copies bytes until either end closes.
async fn copy(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    record: &Mutex<Vec<u8>>,
    mut cut: watch::Receiver<bool>,
) {
    let mut buffer = [0; 16 << 10];
    while let Ok(read @ 1..) = from.read(&mut buffer).await {
        cut.wait_for(|cut| !*cut).await.unwrap();
        record.lock().extend_from_slice(&buffer[..read]);
        if to.write_all(&buffer[..read]).await.is_err() {
            return;
        }
    }
}

/// Starts a replica that is ready and responds; also returns the number of received requests.
async fn replica(takes: Duration, identity: Option<Arc<ProcessIdentity>>) -> (SocketAddr, Arc<AtomicU64>) {
    let status = json!({"version": 1, "names": ["anywhere", "locked"], "model": "m", "state": "ready",
                        "pending_tokens": 0, "pending_inputs": 0, "requests_total": 0, "tokens_per_second": 0.0});
    let requests: Arc<AtomicU64> = Arc::default();
    let counted = requests.clone();
    let response = move || async move {
        counted.fetch_add(1, Ordering::SeqCst);
        if !takes.is_zero() {
            tokio::time::sleep(takes).await;
        }
        format!("{{\"data\":\"{}\"}}", "x".repeat(RESPONSE_BYTES))
    };
    let router = axum::Router::new()
        .route("/status", axum::routing::get(move || async move { axum::Json(status) }))
        .fallback(response);
    let Some(identity) = identity else { return (serve(router).await, requests) };
    let accepted = AcceptedPeers { roles: &[], same_region: &[Role::Spoke] };
    let tls = ServerTls::new(&identity, accepted, &[b"http/1.1"]).unwrap();
    let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (listener, acceptor) =
        identity::listener::listen(socket, Some(tls), CONNECTIONS_MAX, Arc::default()).unwrap();
    let address = listener.address();
    tokio::spawn(acceptor.run());
    tokio::spawn(axum::serve(listener, router).into_future());
    (address, requests)
}

async fn hub(rows: Vec<Value>) -> SocketAddr {
    let deployment = |name: &str, residency: Value| {
        json!({"name": name, "task": "embed", "model": "pypi://m", "engine": {"kind": "cpu", "precision": "f32"},
               "residency": residency, "regions": []})
    };
    let deployments = [deployment("anywhere", Value::Null), deployment("locked", json!("eu"))];
    let table =
        json!({"version": 1, "epoch": 1, "generation": 1, "regions": rows, "deployments": deployments});
    let routes = move |query: axum::extract::RawQuery| async move {
        if query.0.is_some_and(|query| query.contains("after=")) {
            std::future::pending::<()>().await;
        }
        axum::Json(table)
    };
    serve(axum::Router::new().route(scheduler_api::paths::ROUTES, axum::routing::get(routes))).await
}

async fn serve(router: axum::Router) -> SocketAddr {
    let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = socket.local_addr().unwrap();
    tokio::spawn(axum::serve(socket, router).into_future());
    address
}
