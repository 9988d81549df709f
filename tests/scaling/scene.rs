//! A spoke with processes of its own, on a table that a stand-in for the hub gives out, and those who ask it.

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

/// How long anything that is waited for may take before a test gives up.
const PATIENCE: Duration = Duration::from_secs(60);
const LOOK_PERIOD: Duration = Duration::from_millis(20);

const REGION: &str = "gcp/europe-west4";

/// A region of one spoke.
pub(crate) struct Scene {
    dir: tempfile::TempDir,
    door: SocketAddr,
    hub: SocketAddr,
    spoke: Option<Child>,
    client: reqwest::Client,
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// So many ports in a row that nobody has.
fn free_ports(count: u16) -> u16 {
    (0..100)
        .map(|_| free_port())
        .find(|from| (*from..from + count).all(|port| TcpListener::bind(("127.0.0.1", port)).is_ok()))
        .unwrap()
}

impl Scene {
    /// A region in which nothing runs yet. Its replicas end `alone` after the last spoke.
    pub(crate) fn set(alone: &str) -> Scene {
        let dir = tempfile::tempdir().unwrap();
        let (door, hub) = (free_port(), free_port());
        let from = free_ports(4);
        let config = format!(
            "region = \"{REGION}\"\nlisten = \"127.0.0.1:{door}\"\nadvertise = \"127.0.0.1:{door}\"\n\
             hub = \"http://127.0.0.1:{hub}\"\n[scaling]\nactuator = \"process\"\ndir = \"replicas\"\n\
             ports = \"{from}-{}\"\norphan_timeout = \"{alone}\"\ntemplate = \"template.toml\"\n",
            from + 3
        );
        std::fs::write(dir.path().join("spoke.toml"), config).unwrap();
        std::fs::write(dir.path().join("template.toml"), "[threads]\ntokenizer = 1\nengine = 1\n").unwrap();
        let at = |port| SocketAddr::from(([127, 0, 0, 1], port));
        let client = reqwest::Client::builder().no_proxy().build().unwrap();
        Scene { dir, door: at(door), hub: at(hub), spoke: None, client }
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

    /// Ends it as a lost machine does.
    pub(crate) fn kill(&mut self) {
        let mut spoke = self.spoke.take().unwrap();
        spoke.kill().unwrap();
        spoke.wait().unwrap();
    }

    /// Tells it to stop; whether it did so in good order.
    pub(crate) fn stop(&mut self) -> bool {
        let mut spoke = self.spoke.take().unwrap();
        send("-TERM", spoke.id());
        spoke.wait().unwrap().success()
    }

    /// A stand-in for the hub that gives out a table and, to whoever has it, that nothing is newer.
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
        let router = axum::Router::new().route("/v1/routes", axum::routing::get(routes));
        let router = router.with_state(table.clone());
        let socket = tokio::net::TcpListener::bind(self.hub).await.unwrap();
        let task = tokio::spawn(async move { axum::serve(socket, router).await.unwrap() });
        Hub { table, task }
    }

    pub(crate) fn has_a_table(&self) -> bool {
        self.file("replicas").join("routes").exists()
    }

    /// The replicas that run, by port: their process identifiers, as the spoke's records have them.
    pub(crate) fn replicas(&self) -> BTreeMap<String, u32> {
        let entries = std::fs::read_dir(self.file("replicas")).into_iter().flatten().flatten();
        let records = entries.filter(|entry| entry.path().extension().is_some_and(|it| it == "json"));
        let read = |path: PathBuf| -> Option<(String, u32)> {
            let record: Value = serde_json::from_slice(&std::fs::read(&path).ok()?).ok()?;
            let pid = u32::try_from(record["pid"].as_u64()?).ok()?;
            lives(pid).then_some((path.file_stem()?.to_str()?.to_owned(), pid))
        };
        records.filter_map(|entry| read(entry.path())).collect()
    }

    /// A number at `/metrics`; nothing while there is none.
    pub(crate) async fn metric(&self, name: &str) -> Option<u64> {
        let answer = self.client.get(format!("http://{}/metrics", self.door)).send().await.ok()?;
        let text = answer.text().await.ok()?;
        let line = text.lines().find(|line| line.starts_with(name))?;
        line.rsplit(' ').next()?.parse().ok()
    }

    /// Whether every replica that runs was started with this in its configuration.
    pub(crate) fn all_run_with(&self, text: &str) -> bool {
        let file = |name: &String| self.file("replicas").join(format!("{name}.toml"));
        let replicas = self.replicas();
        !replicas.is_empty()
            && replicas.keys().all(|name| std::fs::read_to_string(file(name)).unwrap().contains(text))
    }

    /// So many replicas take work.
    pub(crate) async fn until_ready(&self, count: u64) {
        self.until(&format!("{count} are ready"), async || {
            let ready = self.metric("meridian_ingress_replicas_ready{").await;
            ready.unwrap_or(0) == count && self.replicas().len() as u64 == count
        })
        .await;
    }

    pub(crate) async fn until(&self, what: &str, mut holds: impl AsyncFnMut() -> bool) {
        let begun = Instant::now();
        while !holds().await {
            if begun.elapsed() > PATIENCE {
                let log = std::fs::read_to_string(self.file("spoke.log")).unwrap_or_default();
                panic!("{what} did not come true; {:?}\n{log}", self.replicas());
            }
            tokio::time::sleep(LOOK_PERIOD).await;
        }
    }

    /// Asks for a vector, as a gateway would.
    pub(crate) async fn ask(&self) -> (u16, String) {
        asked(&self.client, self.door).await
    }

    /// Callers who ask again as soon as they are answered, until they are told to stop.
    pub(crate) fn callers(&self, count: usize, pause: Duration) -> Callers {
        let shared = Arc::new(Asked::default());
        let tasks = (0..count).map(|_| {
            let (client, door, asked_by_all) = (self.client.clone(), self.door, shared.clone());
            tokio::spawn(async move {
                while !asked_by_all.enough.load(Ordering::SeqCst) {
                    let (status, body) = asked(&client, door).await;
                    assert_eq!(status, 200, "{body}");
                    asked_by_all.answered.fetch_add(1, Ordering::SeqCst);
                    tokio::time::sleep(pause).await;
                }
            })
        });
        Callers { tasks: tasks.collect(), shared }
    }
}

/// A stand-in for the hub, until it is dropped.
pub(crate) struct Hub {
    table: Arc<Mutex<Value>>,
    task: JoinHandle<()>,
}

impl Hub {
    /// Another table, of this generation.
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

impl Drop for Scene {
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
struct Asked {
    enough: AtomicBool,
    answered: AtomicU64,
}

/// Those who ask.
pub(crate) struct Callers {
    tasks: Vec<JoinHandle<()>>,
    shared: Arc<Asked>,
}

impl Callers {
    /// They stop; how many were answered. None was refused.
    pub(crate) async fn stop(self) -> u64 {
        self.shared.enough.store(true, Ordering::SeqCst);
        for task in self.tasks {
            task.await.unwrap();
        }
        self.shared.answered.load(Ordering::SeqCst)
    }
}

async fn asked(client: &reqwest::Client, door: SocketAddr) -> (u16, String) {
    let body = json!({"model": "minilm", "input": vec!["The sea was calm that morning."; 32]}).to_string();
    let asked = client.post(format!("http://{door}/v1/embeddings")).body(body).timeout(PATIENCE);
    let asked = asked.header("x-meridian-deployment", "minilm").header("x-meridian-timeout-ms", "30000");
    let answer = asked.send().await.unwrap();
    (answer.status().as_u16(), answer.text().await.unwrap())
}

/// Sends a signal to a process.
pub(crate) fn send(signal: &str, pid: u32) {
    // One that has just ended takes none.
    Command::new("kill").args([signal, &pid.to_string()]).stderr(Stdio::null()).status().unwrap();
}

/// Whether a process runs: one that has ended and that nobody has looked at does not.
pub(crate) fn lives(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(')').is_some_and(|(_, rest)| !rest.trim_start().starts_with(['Z', 'X']))
}
