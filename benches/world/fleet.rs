//! Fleet of real processes with emulated distances: a hub, and in each region a gateway, a
//! spoke, and scripted replicas with a given throughput.
//!
//! As in `meridian up`, every region has a gateway near it. There the relay of a spoke distinguishes the gateways; here there is
//! a relay between each gateway and each region, with the delay of their distance ([`link`]). Each gateway gets the route
//! table through a proxy ([`TableProxy`]) that replaces the endpoints of the regions by those of the gateway's own links.
//! When the hub is killed, the proxy responds with 502.

#[path = "../../src/up/link.rs"]
#[expect(dead_code, reason = "links are not cut here")]
mod link;

use crate::replica;
use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{Method, StatusCode, Uri};
use axum::response::IntoResponse;
use link::{EmulatedLink, LinkDelays};
use loadtest::RawOptions;
use regions::catalogue::Catalogue;
use regions::id::RegionId;
use regions::latency::prior_rtt;
use serde_json::Value;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::net::TcpListener;
use tokio::process::{Child, Command};

/// API key of the clients.
const KEY: &str = "bench";
/// Timeout of every wait.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Polling period of conditions.
const POLL_PERIOD: Duration = Duration::from_millis(50);
/// Timeout of a request for the route table: slightly more than the hub's long-poll timeout.
const TABLE_TIMEOUT: Duration = Duration::from_secs(35);

/// Composition of a fleet.
pub(crate) struct FleetSpec<'a> {
    pub(crate) regions: &'a [&'a str],
    /// Replicas in each region.
    pub(crate) replicas: usize,
    pub(crate) tokens_per_second: u64,
    /// Additional lines of every gateway's configuration.
    pub(crate) gateway: &'a str,
}

/// Running fleet, killed when dropped.
pub(crate) struct LocalFleet {
    dir: tempfile::TempDir,
    hub: Child,
    gateways: Vec<SocketAddr>,
    replicas: Vec<Vec<SocketAddr>>,
    client: reqwest::Client,
    _processes: Vec<Child>,
}

/// Runs a scripted replica and exits, if the arguments of this process request it.
pub(crate) fn become_replica() {
    let given: Vec<String> = std::env::args().skip(1).collect();
    let [role, listen, speed] = &*given else { return };
    if role != "replica" {
        return;
    }
    // The kernel kills it when the benchmark ends, however that ends.
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL)).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(replica::run(listen.parse().unwrap(), speed.parse().unwrap()));
    std::process::exit(0);
}

impl LocalFleet {
    /// Starts all processes and waits until every gateway reports every region as healthy. Must be called on the main thread:
    /// the children end with the thread that started them.
    pub(crate) async fn start(made: &FleetSpec<'_>) -> LocalFleet {
        let dir = tempfile::tempdir().unwrap();
        let client = reqwest::Client::builder().no_proxy().build().unwrap();
        let catalogue = Catalogue::builtin();
        let files = FleetFiles { dir: dir.path().to_owned() };
        let hub_at = free_address().await;
        let deployment = format!(
            "[[deployment]]\nname = '{0}'\ntask = 'embed'\nmodel = 'pypi://{0}'\nengine = {{ kind = 'cpu', precision = 'f32' }}",
            replica::MODEL
        );
        files.write("deployments.toml", &deployment);
        files.write("key", KEY);
        files.write("tenants.toml", "[[tenant]]\nname = 'bench'\nkey_file = 'key'");
        let hub_config = files.write(
            "hub.toml",
            &format!("listen = '{hub_at}'\ndata = 'hub'\ndeployments = 'deployments.toml'"),
        );
        let hub = files.start("hub", meridian().args(["hub", "--config"]).arg(hub_config)).await;

        let (mut processes, mut endpoints, mut replicas) = (Vec::new(), Vec::new(), Vec::new());
        for region in made.regions {
            let name = region.replace('/', "-");
            let (endpoint, operations) = (free_address().await, free_address().await);
            let mut config = format!(
                "region = '{region}'\nlisten = '{endpoint}'\nadvertise = '{endpoint}'\noperations = '{operations}'\nhub = 'http://{hub_at}'\n"
            );
            let mut here = Vec::new();
            for number in 0..made.replicas {
                let at = free_address().await;
                let mut command = Command::new(std::env::current_exe().unwrap());
                command.args(["replica", &at.to_string(), &made.tokens_per_second.to_string()]);
                processes.push(files.start(&format!("replica-{name}-{number}"), &mut command).await);
                config += &format!("[[replica]]\nendpoint = '{at}'\n");
                here.push(at);
            }
            let config = files.write(&format!("spoke-{name}.toml"), &config);
            let mut command = meridian();
            command.args(["spoke", "--config"]).arg(config);
            processes.push(files.start(&format!("spoke-{name}"), &mut command).await);
            endpoints.push((region.parse::<RegionId>().unwrap(), endpoint));
            replicas.push(here);
        }
        let (mut gateways, mut operations) = (Vec::new(), Vec::new());
        for place in made.regions {
            let table =
                TableProxy::open(&catalogue, &place.parse().unwrap(), &endpoints, hub_at, &client).await;
            let (listen, operated) = (free_address().await, free_address().await);
            let name = format!("gateway-{}", place.replace('/', "-"));
            let config = format!(
                "listen = '{listen}'\noperations = '{operated}'\nregion = '{place}'\nhub = 'http://{table}'\n\
                 snapshot = '{name}-routes'\ntenants = 'tenants.toml'\n{}\n[timeouts]\nlame_duck = '0s'",
                made.gateway
            );
            let config = files.write(&format!("{name}.toml"), &config);
            let mut command = meridian();
            command.args(["gateway", "--config"]).arg(config);
            processes.push(files.start(&name, &mut command).await);
            gateways.push(listen);
            operations.push(operated);
        }
        let fleet = LocalFleet { dir, hub, gateways, replicas, client, _processes: processes };
        for operations in operations {
            fleet
                .wait_until("every region is healthy", || {
                    fleet.reports_all_healthy(operations, made.regions.len())
                })
                .await;
        }
        fleet
    }

    /// Kills the hub.
    pub(crate) async fn kill_hub(&mut self) {
        self.hub.kill().await.unwrap();
    }

    /// Slows the first `replicas` replicas of a region by this factor.
    pub(crate) async fn slow(&self, region: usize, replicas: usize, times: u32) {
        for at in self.replicas[region].iter().take(replicas) {
            let response = self.client.post(format!("http://{at}/slow?times={times}")).send().await;
            assert!(response.unwrap().status().is_success());
        }
    }

    /// Runs `meridian load` on the gateway of a region; returns its report.
    pub(crate) async fn load(&self, region: usize, rate: &str) -> Value {
        let RawOptions { url, model, rate, arrival, timeout, seed, texts, .. } = self.options(region, rate);
        let mut command = meridian();
        command.args(["load", "--json", "--arrival", &arrival, "--model", &model, "--rate", &rate]);
        command.args(["--url", &url, "--key", KEY, "--seed", &seed.to_string(), "--timeout", &timeout]);
        command.arg("--texts").arg(texts.unwrap());
        let output = command.stderr(Stdio::null()).kill_on_drop(true).output().await.unwrap();
        serde_json::from_slice(&output.stdout).expect("a report")
    }

    /// Returns the options of the same load for a run in this process, which provides the complete distributions.
    pub(crate) fn options(&self, region: usize, rate: &str) -> RawOptions {
        RawOptions {
            url: format!("http://{}", self.gateways[region]),
            key: Some(KEY.to_owned()),
            model: replica::MODEL.to_owned(),
            rate: rate.to_owned(),
            arrival: "poisson".to_owned(),
            texts: Some(self.texts()),
            timeout: "20s".to_owned(),
            seed: region as u64 + 1,
            ..RawOptions::default()
        }
    }

    /// Writes texts of some hundred tokens, so that tokens dominate the cost of a request.
    fn texts(&self) -> PathBuf {
        let file = self.dir.path().join("texts");
        if !file.exists() {
            let line =
                |number: usize| format!("{number} {}\n", "the harbour was calm that morning ".repeat(12));
            std::fs::write(&file, (0..100).map(line).collect::<String>()).unwrap();
        }
        file
    }

    async fn reports_all_healthy(&self, operations: SocketAddr, count: usize) -> bool {
        let response = self.client.get(format!("http://{operations}/routes")).send().await;
        let Ok(response) = response else { return false };
        let Ok(routes) = response.json::<Value>().await else { return false };
        let is_healthy = |region: &&Value| {
            region["health"] == "healthy" && region["ready"].as_array().is_some_and(|ready| !ready.is_empty())
        };
        routes["regions"].as_array().is_some_and(|regions| regions.iter().filter(is_healthy).count() == count)
    }

    async fn wait_until<F: Future<Output = bool>>(&self, description: &str, holds: impl Fn() -> F) {
        let begun = Instant::now();
        while !holds().await {
            assert!(begun.elapsed() < TIMEOUT, "timed out: {description}");
            tokio::time::sleep(POLL_PERIOD).await;
        }
    }
}

fn meridian() -> Command {
    Command::new(env!("CARGO_BIN_EXE_meridian"))
}

/// Directory of the fleet's files.
struct FleetFiles {
    dir: PathBuf,
}

impl FleetFiles {
    fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.dir.join(name);
        std::fs::write(&path, text).unwrap();
        path
    }

    /// Starts a process and waits for its ready line.
    async fn start(&self, name: &str, command: &mut Command) -> Child {
        let log = self.dir.join(format!("{name}.log"));
        let mut child = command
            .env("MERIDIAN_PARENT_PID", std::process::id().to_string())
            .env("MERIDIAN_LOG", "warn")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(std::fs::File::create(&log).unwrap())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let ready = async {
            while let Some(line) = lines.next_line().await.unwrap() {
                if line.starts_with("ready ") {
                    return true;
                }
            }
            false
        };
        let ready = tokio::time::timeout(TIMEOUT, ready).await;
        assert_eq!(ready, Ok(true), "{name}: {}", std::fs::read_to_string(&log).unwrap());
        child
    }
}

async fn free_address() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap()
}

/// Proxy between a gateway and the hub that rewrites the route table.
struct TableProxy {
    hub: SocketAddr,
    /// Address of the gateway's link by endpoint of the region.
    links: BTreeMap<String, String>,
    client: reqwest::Client,
}

impl TableProxy {
    /// Opens the links of the gateway in `place` and starts its proxy; returns the proxy's address.
    async fn open(
        catalogue: &Catalogue,
        place: &RegionId,
        endpoints: &[(RegionId, SocketAddr)],
        hub: SocketAddr,
        client: &reqwest::Client,
    ) -> SocketAddr {
        let point = |region: &RegionId| catalogue.get(region).unwrap().point;
        let mut links = BTreeMap::new();
        for (region, endpoint) in endpoints {
            let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
            links.insert(endpoint.to_string(), socket.local_addr().unwrap().to_string());
            let other = prior_rtt(point(place).distance_km(point(region))) / 2;
            EmulatedLink::open(socket, *endpoint, LinkDelays { other, by_source: BTreeMap::new() });
        }
        let table = Arc::new(TableProxy { hub, links, client: client.clone() });
        let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = socket.local_addr().unwrap();
        tokio::spawn(axum::serve(socket, Router::new().fallback(forward).with_state(table)).into_future());
        address
    }
}

async fn forward(
    State(table): State<Arc<TableProxy>>,
    method: Method,
    uri: Uri,
    body: Bytes,
) -> impl IntoResponse {
    let request = table.client.request(method, format!("http://{}{uri}", table.hub)).body(body);
    let response = async {
        let response = request.timeout(TABLE_TIMEOUT).send().await?;
        Ok::<_, reqwest::Error>((response.status(), response.bytes().await?))
    };
    let Ok((status, body)) = response.await else {
        return (StatusCode::BAD_GATEWAY, Bytes::new());
    };
    let Ok(mut routes) = serde_json::from_slice::<Value>(&body) else { return (status, body) };
    for region in routes["regions"].as_array_mut().into_iter().flatten() {
        let link = region["instances"][0]["endpoint"]
            .as_str()
            .and_then(|endpoint| table.links.get(endpoint))
            .cloned();
        if let Some(link) = link {
            region["instances"][0]["endpoint"] = link.into();
        }
    }
    (status, routes.to_string().into())
}
