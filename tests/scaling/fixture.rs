//! A spoke with replica processes, a fake hub that serves its route table, and clients.

use axum::extract::{RawQuery, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::task::JoinHandle;

/// Timeout of every wait.
const TIMEOUT: Duration = Duration::from_secs(60);
const POLL_PERIOD: Duration = Duration::from_millis(20);

const REGION: &str = "gcp/europe-west4";

/// Region with one spoke.
pub(crate) struct Fixture {
    dir: tempfile::TempDir,
    ingress: SocketAddr,
    hub: SocketAddr,
    spoke: Option<Child>,
    client: reqwest::Client,
}

pub(crate) fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// Returns the first of `count` consecutive free ports.
pub(crate) fn free_ports(count: u16) -> u16 {
    (0..100)
        .map(|_| free_port())
        .find(|from| (*from..from + count).all(|port| TcpListener::bind(("127.0.0.1", port)).is_ok()))
        .unwrap()
}

impl Fixture {
    /// Creates a region in which no process runs yet. Its replicas exit `alone` after the last spoke.
    pub(crate) fn set(alone: &str) -> Fixture {
        let dir = tempfile::tempdir().unwrap();
        let (ingress, hub) = (free_port(), free_port());
        let from = free_ports(4);
        let config = format!(
            "region = \"{REGION}\"\nlisten = \"127.0.0.1:{ingress}\"\nadvertise = \"127.0.0.1:{ingress}\"\n\
             hub = \"http://127.0.0.1:{hub}\"\n[scaling]\nactuator = \"process\"\ndir = \"replicas\"\n\
             ports = \"{from}-{}\"\norphan_timeout = \"{alone}\"\ntemplate = \"template.toml\"\n",
            from + 3
        );
        std::fs::write(dir.path().join("spoke.toml"), config).unwrap();
        std::fs::write(dir.path().join("template.toml"), "[threads]\ntokenizer = 1\nengine = 1\n").unwrap();
        let at = |port| SocketAddr::from(([127, 0, 0, 1], port));
        let client = reqwest::Client::builder().no_proxy().build().unwrap();
        Fixture { dir, ingress: at(ingress), hub: at(hub), spoke: None, client }
    }

    fn file(&self, name: &str) -> PathBuf {
        self.dir.path().canonicalize().unwrap().join(name)
    }

    /// Starts the spoke.
    pub(crate) fn start(&mut self) {
        let log = std::fs::File::options().create(true).append(true).open(self.file("spoke.log")).unwrap();
        let spoke = Command::new(env!("CARGO_BIN_EXE_meridian"))
            .args(["spoke", "--config"])
            .arg(self.file("spoke.toml"))
            .stdout(Stdio::null())
            .stderr(log)
            .spawn();
        self.spoke = Some(spoke.unwrap());
    }

    /// Kills the spoke.
    pub(crate) fn kill(&mut self) {
        let mut spoke = self.spoke.take().unwrap();
        spoke.kill().unwrap();
        spoke.wait().unwrap();
    }

    /// Stops the spoke gracefully; returns whether it exited cleanly.
    pub(crate) fn stop(&mut self) -> bool {
        let mut spoke = self.spoke.take().unwrap();
        send("-TERM", spoke.id());
        spoke.wait().unwrap().success()
    }

    /// Starts a fake hub that serves a table, and 204 to a reader that has it.
    pub(crate) async fn hub(&self, deployment: Value) -> Hub {
        async fn routes(State(table): State<Arc<Mutex<Value>>>, RawQuery(query): RawQuery) -> Response {
            let table = table.lock().unwrap().clone();
            let has = format!("after=1.{}&", table["generation"]);
            match query.is_some_and(|query| query.contains(&has)) {
                false => axum::Json(table).into_response(),
                true => {
                    tokio::time::sleep(Duration::from_millis(500)).await;
                    StatusCode::NO_CONTENT.into_response()
                }
            }
        }
        let table = Arc::new(Mutex::new(table(1, deployment)));
        let router = axum::Router::new().route(scheduler_api::paths::ROUTES, axum::routing::get(routes));
        let router = router.with_state(table.clone());
        let socket = tokio::net::TcpListener::bind(self.hub).await.unwrap();
        let task = tokio::spawn(async move { axum::serve(socket, router).await.unwrap() });
        Hub { table, task }
    }

    pub(crate) fn has_a_table(&self) -> bool {
        self.file("replicas").join("routes").exists()
    }

    /// Returns the process ids of the running replicas by port, from the spoke's records.
    pub(crate) fn replicas(&self) -> BTreeMap<String, u32> {
        let entries = std::fs::read_dir(self.file("replicas")).into_iter().flatten().flatten();
        let records = entries.filter(|entry| entry.path().extension().is_some_and(|it| it == "json"));
        let read = |path: PathBuf| -> Option<(String, u32)> {
            let record: Value = serde_json::from_slice(&std::fs::read(&path).ok()?).ok()?;
            let pid = u32::try_from(record["pid"].as_u64()?).ok()?;
            is_running(pid).then_some((path.file_stem()?.to_str()?.to_owned(), pid))
        };
        records.filter_map(|entry| read(entry.path())).collect()
    }

    /// Returns a metric of the spoke; `None` while it does not exist.
    pub(crate) async fn metric(&self, name: &str) -> Option<u64> {
        let response = self.client.get(format!("http://{}/metrics", self.ingress)).send().await.ok()?;
        let text = response.text().await.ok()?;
        let line = text.lines().find(|line| line.starts_with(name))?;
        line.rsplit(' ').next()?.parse().ok()
    }

    /// Returns whether replicas run and the configurations of all contain this text.
    pub(crate) fn all_run_with(&self, text: &str) -> bool {
        let file = |name: &String| self.file("replicas").join(format!("{name}.toml"));
        let replicas = self.replicas();
        !replicas.is_empty()
            && replicas.keys().all(|name| std::fs::read_to_string(file(name)).unwrap().contains(text))
    }

    /// Waits until this many replicas are ready.
    pub(crate) async fn wait_until_ready(&self, count: u64) {
        self.wait_until(&format!("{count} are ready"), async || {
            let ready = self.metric("meridian_ingress_replicas_ready{").await;
            ready.unwrap_or(0) == count && self.replicas().len() as u64 == count
        })
        .await;
    }

    pub(crate) async fn wait_until(&self, description: &str, mut holds: impl AsyncFnMut() -> bool) {
        let begun = Instant::now();
        while !holds().await {
            if begun.elapsed() > TIMEOUT {
                let log = std::fs::read_to_string(self.file("spoke.log")).unwrap_or_default();
                panic!("timed out: {description}; {:?}\n{log}", self.replicas());
            }
            tokio::time::sleep(POLL_PERIOD).await;
        }
    }

    /// Sends a request like a gateway.
    pub(crate) async fn request_embeddings(&self) -> (u16, String) {
        request(&self.client, self.ingress).await
    }

    /// Starts callers that send their next request after each response, until they are stopped.
    pub(crate) fn callers(&self, count: usize, pause: Duration) -> Callers {
        let shared = Arc::new(CallerState::default());
        let tasks = (0..count).map(|_| {
            let (client, ingress, state) = (self.client.clone(), self.ingress, shared.clone());
            tokio::spawn(async move {
                while !state.stopped.load(Ordering::SeqCst) {
                    let (status, body) = request(&client, ingress).await;
                    assert_eq!(status, 200, "{body}");
                    state.responses.fetch_add(1, Ordering::SeqCst);
                    tokio::time::sleep(pause).await;
                }
            })
        });
        Callers { tasks: tasks.collect(), shared }
    }
}

/// Fake hub, stopped when dropped.
pub(crate) struct Hub {
    table: Arc<Mutex<Value>>,
    task: JoinHandle<()>,
}

impl Hub {
    /// Publishes another table with this generation.
    pub(crate) fn publishes(&self, generation: u64, deployment: Value) {
        *self.table.lock().unwrap() = table(generation, deployment);
    }
}

impl Drop for Hub {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn table(generation: u64, deployment: Value) -> Value {
    json!({"version": 1, "epoch": 1, "generation": generation, "regions": [], "deployments": [deployment]})
}

impl Drop for Fixture {
    fn drop(&mut self) {
        if let Some(mut spoke) = self.spoke.take() {
            spoke.kill().ok();
            spoke.wait().ok();
        }
        for pid in self.replicas().into_values() {
            send("-KILL", pid);
        }
    }
}

#[derive(Default)]
struct CallerState {
    stopped: AtomicBool,
    responses: AtomicU64,
}

/// Running callers.
pub(crate) struct Callers {
    tasks: Vec<JoinHandle<()>>,
    shared: Arc<CallerState>,
}

impl Callers {
    /// Stops the callers; returns the number of responses, all of which were successful.
    pub(crate) async fn stop(self) -> u64 {
        self.shared.stopped.store(true, Ordering::SeqCst);
        for task in self.tasks {
            task.await.unwrap();
        }
        self.shared.responses.load(Ordering::SeqCst)
    }
}

/// Sends a request with texts that no other one has: repeated texts come from the cache, and the measured speed would be that of
/// very small batches.
async fn request(client: &reqwest::Client, ingress: SocketAddr) -> (u16, String) {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let first = NEXT.fetch_add(32, Ordering::SeqCst);
    let texts: Vec<_> =
        (first..first + 32).map(|number| format!("The sea was calm on morning {number}.")).collect();
    let body = json!({"model": "minilm", "input": texts}).to_string();
    let request = client.post(format!("http://{ingress}/v1/embeddings")).body(body).timeout(TIMEOUT);
    let request = request.header("x-meridian-deployment", "minilm").header("x-meridian-timeout-ms", "30000");
    let response = request.send().await.unwrap();
    (response.status().as_u16(), response.text().await.unwrap())
}

/// Sends a signal to a process.
pub(crate) fn send(signal: &str, pid: u32) {
    // The process may have just ended.
    Command::new("kill").args([signal, &pid.to_string()]).stderr(Stdio::null()).status().unwrap();
}

/// Returns whether a process runs; a zombie does not.
pub(crate) fn is_running(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(')').is_some_and(|(_, rest)| !rest.trim_start().starts_with(['Z', 'X']))
}
