//! A real gateway and real ingresses, between a scripted hub and scripted replicas.

use crate::address::free_address;
use crate::hub::{deployment, hub, serve};
use configuration::{ConfigFile, Files};
use gateway::config::EdgeConfig;
use gateway::ingress::{IngressConfig, IngressSignals};
use gateway::receipts::ReceiptsConfig;
use regions::catalogue::Catalogue;
use scheduler_core::receipts::ReceiptsSection;
use scheduler_core::spoke::Spoke;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock, Once};
use std::time::{Duration, Instant};
use supervision::Mutex;
use telemetry::log_filter::{FilterLevel, LogFilter};
use telemetry::logs::start_filter;
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

pub(crate) const AMERICA: &str = "aws/us-east-1";
pub(crate) const EUROPE: &str = "gcp/europe-west4";
pub(crate) const JAPAN: &str = "oci/ap-tokyo-1";

/// Longer than any step takes, also on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(30);

const TENANTS: &str = "[[tenant]]\nname = 'test'\nkey_file = 'key'\n";

/// Behaviour of the replicas of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Script {
    Responds,
    /// Waits until the script changes.
    Waits,
    /// Responds that it cannot, and that another region could.
    RejectsNotReady,
}

/// Task that runs until it is stopped.
pub(crate) struct ServerTask {
    stop: Option<oneshot::Sender<()>>,
    task: JoinHandle<()>,
}

impl ServerTask {
    /// Stops it and waits for its end.
    pub(crate) async fn stop(mut self) {
        drop(self.stop.take());
        self.task.await.unwrap();
    }
}

pub(crate) struct Region {
    pub(crate) script: watch::Sender<Script>,
    pub(crate) address: SocketAddr,
    pub(crate) running: Option<ServerTask>,
}

pub(crate) struct Fixture {
    pub(crate) url: String,
    pub(crate) operations: String,
    pub(crate) regions: BTreeMap<&'static str, Region>,
    pub(crate) client: reqwest::Client,
    pub(crate) dir: tempfile::TempDir,
    hub: SocketAddr,
    pub(crate) edge: Option<ServerTask>,
}

impl Fixture {
    pub(crate) async fn new() -> Fixture {
        Fixture::with(|_| {}).await
    }

    /// Starts a fixture with a changed gateway configuration.
    pub(crate) async fn with(change: impl FnOnce(&mut EdgeConfig)) -> Fixture {
        let deployments = [deployment("anywhere", Value::Null), deployment("locked", json!("eu"))];
        Fixture::of(&[AMERICA, EUROPE, JAPAN], false, change, async |rows| {
            hub(3, 14, &rows, &deployments).await
        })
        .await
    }

    /// Starts a fixture of these regions, whose hub is started when their addresses are known; `required` says whether
    /// the regions require receipts.
    pub(crate) async fn of(
        places: &[&'static str],
        required: bool,
        change: impl FnOnce(&mut EdgeConfig),
        hub: impl AsyncFnOnce(Vec<Value>) -> SocketAddr,
    ) -> Fixture {
        log();
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("key"), "k").unwrap();
        std::fs::write(dir.path().join("tenants.toml"), TENANTS).unwrap();
        std::fs::write(dir.path().join("receipts-key"), "0123456789abcdef").unwrap();
        let (mut regions, mut rows) = (BTreeMap::new(), Vec::new());
        for &id in places {
            let region = start_region(id, dir.path(), required).await;
            let endpoint = region.address.to_string();
            rows.push(json!({"id": id, "instances": [{"name": "a", "endpoint": endpoint}], "deployments": ["anywhere", "locked"]}));
            regions.insert(id, region);
        }
        let hub = hub(rows).await;
        let (url, operations, edge) = start_edge(hub, dir.path(), change).await;
        let client = reqwest::Client::builder().no_proxy().build().unwrap();
        let fixture = Fixture { url, operations, regions, client, dir, hub, edge: Some(edge) };
        fixture.wait_until_all_healthy().await;
        fixture
    }

    /// Replaces the gateway by a new process.
    pub(crate) async fn restart_edge(&mut self) {
        self.restart_edge_with(|_| {}).await;
    }

    /// Replaces the gateway by a new process with a changed configuration.
    pub(crate) async fn restart_edge_with(&mut self, change: impl FnOnce(&mut EdgeConfig)) {
        self.edge.take().expect("it runs").stop().await;
        let (url, operations, edge) = start_edge(self.hub, self.dir.path(), change).await;
        (self.url, self.operations, self.edge) = (url, operations, Some(edge));
        self.wait_until_all_healthy().await;
    }

    /// Stops all processes; all receipts are on disk then.
    pub(crate) async fn stop(&mut self) {
        self.edge.take().expect("it runs").stop().await;
        for region in self.regions.values_mut() {
            if let Some(running) = region.running.take() {
                running.stop().await;
            }
        }
    }

    /// Returns the directories of the receipts of the gateway and of the regions.
    pub(crate) fn receipts(&self) -> Vec<PathBuf> {
        let regions = self.regions.keys().map(|id| self.dir.path().join(folder(id)));
        std::iter::once(self.dir.path().join("receipts")).chain(regions).collect()
    }

    async fn wait_until_all_healthy(&self) {
        self.wait_until("the regions are healthy", async || {
            let Ok(response) = self.client.get(format!("{}/routes", self.operations)).send().await else {
                return false;
            };
            let routes: Value = response.json().await.unwrap();
            let regions = routes["regions"].as_array().cloned().unwrap_or_default();
            let fine = |region: &Value| {
                region["health"] == "healthy"
                    && region["ready"].as_array().is_some_and(|ready| ready.len() == 2)
            };
            regions.len() == self.regions.len() && regions.iter().all(fine)
        })
        .await;
    }

    pub(crate) async fn wait_until(&self, description: &str, holds: impl AsyncFn() -> bool) {
        let begun = Instant::now();
        while !holds().await {
            assert!(begun.elapsed() < TIMEOUT, "timed out waiting until {description}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Sends `input` to `model` with this request id.
    pub(crate) async fn send(&self, id: &str, model: &str, input: &str) -> reqwest::Response {
        self.request(id, model, input).send().await.unwrap()
    }

    pub(crate) fn request(&self, id: &str, model: &str, input: &str) -> reqwest::RequestBuilder {
        let body = json!({"model": model, "input": input}).to_string();
        let url = format!("{}/v1/embeddings", self.url);
        self.client.post(url).bearer_auth("k").header("x-request-id", id).body(body)
    }

    /// Scrapes `/metrics` of the gateway.
    pub(crate) async fn scrape(&self) -> Scrape {
        Scrape::of(&self.client, &self.operations).await
    }
}

/// One scrape, checked against the rules of the format.
pub(crate) struct Scrape {
    pub(crate) text: String,
    samples: BTreeMap<String, f64>,
}

impl Scrape {
    pub(crate) async fn of(client: &reqwest::Client, base: &str) -> Scrape {
        let response = client.get(format!("{base}/metrics")).send().await.unwrap();
        let kind = response.headers()["content-type"].to_str().unwrap().to_owned();
        assert!(kind.starts_with("text/plain; version=0.0.4"), "{kind}");
        Scrape::read(response.text().await.unwrap())
    }

    fn read(text: String) -> Scrape {
        let (mut samples, mut kinds) = (BTreeMap::new(), BTreeMap::new());
        let mut helped = None;
        for line in text.lines() {
            if let Some(help) = line.strip_prefix("# HELP ") {
                let (name, help) = help.split_once(' ').expect("a name and a help");
                assert!(help.ends_with('.'), "{line}");
                helped = Some(name.to_owned());
                continue;
            }
            if let Some(kind) = line.strip_prefix("# TYPE ") {
                let (name, kind) = kind.split_once(' ').expect("a name and a kind");
                assert_eq!(helped.take().as_deref(), Some(name), "HELP precedes TYPE");
                let twice = kinds.insert(name.to_owned(), kind.to_owned());
                assert_eq!(twice, None, "{name} has one TYPE line");
                let usual = name
                    .bytes()
                    .all(|byte| byte.is_ascii_lowercase() || byte == b'_' || byte.is_ascii_digit());
                assert!(usual && name.starts_with("meridian_"), "{name}");
                assert_eq!(kind == "counter", name.ends_with("_total"), "{name} is a {kind}");
                continue;
            }
            let (series, value) = line.rsplit_once(' ').expect("a series and a value");
            let name = series.split('{').next().expect("a name");
            let family = ["_bucket", "_sum", "_count"].iter().find_map(|end| name.strip_suffix(end));
            let known = |family: &str, kind: &str| kinds.get(family).is_some_and(|known| known == kind);
            assert!(
                family.is_some_and(|family| known(family, "histogram"))
                    || known(name, "counter")
                    || known(name, "gauge"),
                "{line}: no TYPE line of its family"
            );
            let value: f64 = value.parse().unwrap_or_else(|_| panic!("{line} has a number"));
            assert_eq!(samples.insert(series.to_owned(), value), None, "{series} occurs once");
        }
        Scrape { text, samples }
    }

    /// Returns the value of a series; a counter that was never incremented may be absent, and is 0.
    pub(crate) fn get(&self, series: &str) -> f64 {
        self.samples.get(series).copied().unwrap_or(0.0)
    }

    /// Returns the sum of all series of `name` whose labels contain `label`.
    pub(crate) fn sum(&self, name: &str, label: &str) -> f64 {
        let of_name = |series: &str| series.split('{').next() == Some(name) && series.contains(label);
        self.samples.iter().filter(|(series, _)| of_name(series)).map(|(_, value)| value).sum()
    }
}

async fn start_edge(
    hub: SocketAddr,
    dir: &Path,
    change: impl FnOnce(&mut EdgeConfig),
) -> (String, String, ServerTask) {
    let operations = free_address();
    let text = format!(
        "listen = '127.0.0.1:0'\noperations = '{operations}'\nregion = '{AMERICA}'\nhub = 'http://{hub}'\n\
         snapshot = 'routes'\ntenants = 'tenants.toml'\n\
         [receipts]\ndir = 'receipts'\nkey_file = 'receipts-key'"
    );
    let config = EdgeConfig::parse(&text, dir, &BTreeMap::new()).map_err(|problems| format!("{problems:#?}"));
    let mut config = config.unwrap();
    change(&mut config);
    let (stop, stopped) = oneshot::channel::<()>();
    let (ready, address) = oneshot::channel();
    let shutdown = async { drop(stopped.await) };
    let run = gateway::edge::run(config, shutdown, |address| ready.send(address).expect("the test waits"));
    let task = tokio::spawn(async move { run.await.unwrap() });
    let url = format!("http://{}", address.await.unwrap());
    (url, format!("http://{operations}"), ServerTask { stop: Some(stop), task })
}

/// Returns the receipts directory of a region.
fn folder(region: &str) -> PathBuf {
    PathBuf::from(format!("receipts-{}", region.replace('/', "-")))
}

async fn start_region(id: &'static str, dir: &Path, required: bool) -> Region {
    let script = watch::Sender::new(Script::Responds);
    let replica = replica(script.clone()).await;
    let region = id.parse().unwrap();
    let key_file = Some(PathBuf::from("receipts-key"));
    let section = ReceiptsSection { dir: folder(id), key_file, key_env: None, required };
    let files = Files { base: dir, environment: None };
    let receipts = ConfigFile::read("", |document| ReceiptsConfig::read(section, document, &files)).unwrap();
    let config = IngressConfig {
        tracing: None,
        metrics: None,
        jobs: None,
        proxy_protocol_from: Vec::new(),
        resolver: resolver::Resolver::new(&resolver::DnsSection::default()),
        listen: "127.0.0.1:0".parse().unwrap(),
        region,
        signals: IngressSignals::default(),
        catalogue: Arc::new(Catalogue::builtin()),
        receipts: Some(receipts),
        transport: identity::Transport::Loopback,
        operations: None,
    };
    let spoke = Arc::new(Mutex::new(
        Spoke::new(id.parse().unwrap(), 1, vec![replica.into()]).with_instance("a".parse().unwrap()),
    ));
    let (stop, stopped) = oneshot::channel::<()>();
    let (ready, address) = oneshot::channel();
    let shutdown = async { drop(stopped.await) };
    let run = gateway::ingress::run(config, spoke, shutdown, |address| {
        ready.send(address).expect("the test waits")
    });
    let task = tokio::spawn(async move { run.await.unwrap() });
    Region { script, address: address.await.unwrap(), running: Some(ServerTask { stop: Some(stop), task }) }
}

/// Starts a replica that reports ready, and follows `script`.
async fn replica(script: watch::Sender<Script>) -> SocketAddr {
    let status = json!({"version": 1, "names": ["anywhere", "locked"], "model": "m", "state": "ready",
                        "pending_tokens": 0, "pending_inputs": 0, "requests_total": 0, "tokens_per_second": 0.0});
    let response = move || async move {
        let mut script = script.subscribe();
        script.wait_for(|script| *script != Script::Waits).await.unwrap();
        let timing = ("server-timing", "queue;dur=1, tokenize;dur=2, engine;dur=3");
        match *script.borrow() {
            Script::RejectsNotReady => (
                axum::http::StatusCode::SERVICE_UNAVAILABLE,
                [timing, ("x-meridian-error", "not_ready")],
                "{}",
            ),
            Script::Responds | Script::Waits => {
                (axum::http::StatusCode::OK, [timing, ("x-meridian-tokens", "7")], "{\"data\":[]}")
            }
        }
    };
    let router = axum::Router::new()
        .route("/status", axum::routing::get(async move || axum::Json(status)))
        .route("/v1/embeddings", axum::routing::post(response));
    serve(router).await
}

/// Everything logged in this process, at every level, as JSON lines.
static LOG: LazyLock<Mutex<Vec<u8>>> = LazyLock::new(Mutex::default);

struct LogWriter;

impl std::io::Write for LogWriter {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        LOG.lock().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Filter of the log of this process.
pub(crate) const FILTER: &str = "trace,h2=info,hyper=info,hyper_util=info,mio=info,reqwest=info";

fn log() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let filter = LogFilter::parse(FILTER, FilterLevel::Trace).unwrap();
        let log = tracing_subscriber::fmt::layer().json().with_writer(|| LogWriter);
        tracing_subscriber::registry().with(log).with(start_filter(filter)).init();
    });
}

/// Returns everything logged so far.
pub(crate) fn logged() -> String {
    String::from_utf8(LOG.lock().clone()).unwrap()
}

/// Returns the access lines of the gateway for this request.
pub(crate) fn access_lines(id: &str) -> Vec<Value> {
    let log = logged();
    let lines = log.lines().map(|line| serde_json::from_str::<Value>(line).expect("each line is JSON"));
    let about =
        |line: &Value| line["target"] == "access" && line["level"] == "INFO" && line["fields"]["id"] == id;
    lines.filter(about).map(|line| line["fields"].clone()).collect()
}
