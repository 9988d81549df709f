//! Ingress between callers and two scripted replicas: one is killed, freezes, or is slow.
//!
//! The callers send the next request as soon as they have a response, like the peers in 3b and 3c of the comparison.
//! The bounds here hold on a slow machine as well; the figures are printed, for a quiet one.

mod locks;
mod metrics;

use gateway::ingress::{self, IngressConfig, IngressSignals};
use regions::catalogue::Catalogue;
use scheduler_core::spoke::Spoke;
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use supervision::Mutex;
use telemetry::TracingConfig;
use tokio::io::{AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

const REGION: &str = "aws/us-east-1";
const CALLERS: usize = 16;
const RESPONSE_TIME: Duration = Duration::from_millis(20);

/// Behaviour of a replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Script {
    /// It responds after this time.
    Takes(Duration),
    /// It accepts connections and requests, and never responds: the effect of SIGSTOP.
    Frozen,
    /// Its connections are reset and new ones refused: the effect of SIGKILL.
    Killed,
}

use Script::*;

struct Replica {
    script: watch::Sender<Script>,
    requests: AtomicU64,
    boot_id: AtomicU64,
    is_ready: AtomicBool,
    /// Deployments that it reports.
    names: watch::Sender<Vec<String>>,
}

impl Replica {
    async fn start(script: Script) -> (Arc<Replica>, SocketAddr) {
        let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = socket.local_addr().unwrap();
        let replica = Arc::new(Replica {
            script: watch::Sender::new(script),
            requests: AtomicU64::new(0),
            boot_id: AtomicU64::new(1),
            is_ready: AtomicBool::new(true),
            names: watch::Sender::new(vec!["m".to_owned()]),
        });
        let shared = replica.clone();
        tokio::spawn(async move {
            let mut connections = JoinSet::new();
            let mut killed = shared.script.subscribe();
            loop {
                tokio::select! {
                    _ = killed.wait_for(|script| *script == Killed) => return,
                    accepted = socket.accept() => {
                        let replica = shared.clone();
                        let (stream, _) = accepted.unwrap();
                        stream.set_nodelay(true).unwrap();
                        connections.spawn(async move { replica.serve(BufReader::new(stream)).await });
                    }
                }
            }
        });
        (replica, address)
    }

    async fn serve(&self, mut stream: BufReader<TcpStream>) -> Option<()> {
        loop {
            let path = read_request(&mut stream).await?;
            let script = *self.script.borrow();
            if script == Frozen {
                self.requests.fetch_add(u64::from(path != "/status"), Ordering::SeqCst);
                std::future::pending::<()>().await;
            }
            let body = if path == "/status" {
                let state = if self.is_ready.load(Ordering::SeqCst) { "ready" } else { "starting" };
                let names = self.names.borrow().clone();
                json!({"version": 1, "boot_id": self.boot_id.load(Ordering::SeqCst), "names": names, "model": "m",
                       "state": state, "pending_tokens": 0, "pending_inputs": 0, "requests_total": 0,
                       "tokens_per_second": 1000.0})
            } else {
                self.requests.fetch_add(1, Ordering::SeqCst);
                if let Takes(time) = script {
                    tokio::time::sleep(time).await;
                }
                json!({"served": true})
            };
            let body = body.to_string();
            let response = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{body}", body.len());
            stream.write_all(response.as_bytes()).await.ok()?;
        }
    }
}

async fn read_request(stream: &mut BufReader<TcpStream>) -> Option<String> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.ok()?);
    }
    let head = String::from_utf8(head).ok()?.to_lowercase();
    let path = head.split(' ').nth(1)?.to_owned();
    let length =
        head.split("content-length: ").nth(1).and_then(|rest| rest.split("\r\n").next()?.parse().ok());
    stream.read_exact(&mut vec![0; length.unwrap_or(0)]).await.ok()?;
    Some(path)
}

/// Ingress with two replicas.
struct Fixture {
    url: String,
    replicas: [Arc<Replica>; 2],
    client: reqwest::Client,
    _stop: tokio::sync::oneshot::Sender<()>,
}

/// Observations of the callers.
#[derive(Debug, Default)]
struct LoadResult {
    took: Vec<Duration>,
    failed: usize,
}

impl LoadResult {
    fn percentile(&self, percent: usize) -> Duration {
        self.took[(self.took.len() - 1) * percent / 100]
    }
}

impl Fixture {
    async fn with(scripts: [Script; 2]) -> Fixture {
        Fixture::traced(scripts, None).await
    }

    /// Starts an ingress that exports traces, if they are configured.
    async fn traced(scripts: [Script; 2], tracing: Option<TracingConfig>) -> Fixture {
        let (first, first_at) = Replica::start(scripts[0]).await;
        let (second, second_at) = Replica::start(scripts[1]).await;
        let addresses = vec![first_at.into(), second_at.into()];
        let spoke = Arc::new(Mutex::new(Spoke::new(REGION.parse().unwrap(), 1, addresses)));
        let config = IngressConfig {
            tracing,
            metrics: None,
            jobs: None,
            proxy_protocol_from: Vec::new(),
            resolver: resolver::Resolver::new(&resolver::DnsSection::default()),
            listen: "127.0.0.1:0".parse().unwrap(),
            region: REGION.parse().unwrap(),
            signals: IngressSignals::default(),
            catalogue: Arc::new(Catalogue::builtin()),
            receipts: None,
            transport: identity::Transport::Loopback,
            operations: None,
        };
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let (ready, address) = tokio::sync::oneshot::channel();
        tokio::spawn(ingress::run(config, spoke, async { drop(stopped.await) }, |address| {
            ready.send(address).expect("the test waits for the address")
        }));
        let url = format!("http://{}", address.await.unwrap());
        let client = reqwest::Client::builder().no_proxy().build().unwrap();
        let fixture = Fixture { url, replicas: [first, second], client, _stop: stop };
        fixture.wait_until_ready(2).await;
        fixture
    }

    /// Waits until the region reports this number of replicas as ready.
    async fn wait_until_ready(&self, number: u64) {
        let begun = Instant::now();
        while self.ready().await != number {
            assert!(begun.elapsed() < Duration::from_secs(20), "not {number} replicas become ready");
        }
    }

    /// Returns the number of replicas that the region reports as ready.
    async fn ready(&self) -> u64 {
        let question = json!({"version": 1, "gateway": "test", "sequence": 1});
        let request =
            self.client.post(format!("{}{}", self.url, scheduler_api::paths::EXCHANGE)).json(&question);
        let report: Value = request.send().await.unwrap().json().await.unwrap();
        report["deployments"][0]["ready"].as_u64().unwrap_or(0)
    }

    async fn send(&self) -> reqwest::Result<reqwest::Response> {
        let request =
            self.client.post(format!("{}/v1/embeddings", self.url)).header("x-meridian-deployment", "m");
        request.body(r#"{"model":"m","input":"a"}"#).send().await
    }

    /// Runs sixteen callers in a closed loop for this time; `action` runs after a third of it.
    async fn load(self: &Arc<Fixture>, lasts: Duration, action: impl FnOnce(&Fixture)) -> LoadResult {
        let deadline = Instant::now() + lasts;
        let mut callers = JoinSet::new();
        for _ in 0..CALLERS {
            let fixture = self.clone();
            callers.spawn(async move {
                let mut result = LoadResult::default();
                while Instant::now() < deadline {
                    let sent_at = Instant::now();
                    match fixture.send().await {
                        Ok(response) if response.status() == 200 => result.took.push(sent_at.elapsed()),
                        Ok(_) | Err(_) => result.failed += 1,
                    }
                }
                result
            });
        }
        tokio::time::sleep(lasts / 3).await;
        action(self);
        let mut all = LoadResult::default();
        while let Some(result) = callers.join_next().await {
            let LoadResult { took, failed } = result.unwrap();
            all.took.extend(took);
            all.failed += failed;
        }
        all.took.sort_unstable();
        println!(
            "{} served in {lasts:?}, {} failed, p50 {:?}, p99 {:?}, max {:?}; replicas received {} and {}",
            all.took.len(),
            all.failed,
            all.percentile(50),
            all.percentile(99),
            all.percentile(100),
            self.replicas[0].requests.load(Ordering::SeqCst),
            self.replicas[1].requests.load(Ordering::SeqCst),
        );
        all
    }

    fn set_first_script(&self, script: Script) {
        self.replicas[0].script.send_replace(script);
    }

    async fn status(&self) -> Value {
        self.client.get(format!("{}/status", self.url)).send().await.unwrap().json().await.unwrap()
    }
}

/// Returns the duration of the load: nine seconds if figures are requested, as for the peers.
fn load_duration() -> Duration {
    let seconds = std::env::var("MERIDIAN_LOAD_SECONDS").ok().and_then(|text| text.parse().ok());
    Duration::from_secs(seconds.unwrap_or(3))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_replica_fails_no_request() {
    let fixture = Arc::new(Fixture::with([Takes(RESPONSE_TIME), Takes(RESPONSE_TIME)]).await);
    let result = fixture.load(load_duration(), |fixture| fixture.set_first_script(Killed)).await;
    assert_eq!(result.failed, 0);
    assert!(result.percentile(100) < Duration::from_secs(1), "{:?}", result.percentile(100));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_frozen_replica_delays_its_requests_and_fails_none() {
    let fixture = Arc::new(Fixture::with([Takes(RESPONSE_TIME), Takes(RESPONSE_TIME)]).await);
    let result = fixture.load(load_duration(), |fixture| fixture.set_first_script(Frozen)).await;
    assert_eq!(result.failed, 0);
    // The defaults of other proxies lose 99 of 100.
    assert!(
        result.took.len() as u128 * 2 > CALLERS as u128 * load_duration().as_millis() / 20,
        "{}",
        result.took.len()
    );
    assert!(result.percentile(99) < Duration::from_millis(200), "{:?}", result.percentile(99));
    assert!(result.percentile(100) < Duration::from_secs(1), "{:?}", result.percentile(100));
    let status = fixture.status().await;
    assert_ne!(status["replicas"][0]["circuit"]["state"], "closed", "{status}");
    assert_eq!(status["replicas"][1]["circuit"]["state"], "closed", "{status}");
    let late_after = status["replicas"][1]["circuit"]["first_byte"][0]["timeout_ms"].as_u64().unwrap();
    assert!((50..2_000).contains(&late_after), "{status}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_replica_gets_few_requests() {
    let fixture = Arc::new(Fixture::with([Takes(20 * RESPONSE_TIME), Takes(RESPONSE_TIME)]).await);
    let result = fixture.load(load_duration(), |_| {}).await;
    assert_eq!(result.failed, 0);
    let [slow, usual] = [0, 1].map(|place: usize| fixture.replicas[place].requests.load(Ordering::SeqCst));
    assert!(slow * 20 < usual, "{slow} requests to the slow replica, {usual} to the other");
    assert!(result.percentile(95) < Duration::from_millis(200), "{:?}", result.percentile(95));
}

/// A frozen replica that is the only one: the ingress waits, because a late response is better than none.
#[tokio::test]
async fn a_request_without_an_alternative_waits() {
    let fixture = Fixture::with([Takes(RESPONSE_TIME), Takes(RESPONSE_TIME)]).await;
    fixture.replicas[1].script.send_replace(Killed);
    for _ in 0..40 {
        assert_eq!(fixture.send().await.unwrap().status(), 200);
    }
    fixture.replicas[0].script.send_replace(Takes(Duration::from_millis(600)));
    let response = fixture.send().await.unwrap();
    assert_eq!(response.status(), 200, "the late response arrives");
}

#[tokio::test]
async fn the_latency_of_a_replica_is_kept_while_it_is_not_ready_and_reset_for_another_process() {
    let fixture = Fixture::with([Takes(RESPONSE_TIME), Takes(RESPONSE_TIME)]).await;
    fixture.replicas[1].script.send_replace(Killed);
    for _ in 0..40 {
        assert_eq!(fixture.send().await.unwrap().status(), 200);
    }
    let is_known = async || fixture.status().await["replicas"][0]["circuit"]["first_byte"][0].is_object();
    assert!(is_known().await);
    fixture.wait_until_ready(1).await;
    for is_ready in [false, true] {
        fixture.replicas[0].is_ready.store(is_ready, Ordering::SeqCst);
        fixture.wait_until_ready(u64::from(is_ready)).await;
    }
    assert!(is_known().await, "the process is the same");
    fixture.replicas[0].boot_id.store(2, Ordering::SeqCst);
    let begun = Instant::now();
    while is_known().await {
        assert!(begun.elapsed() < Duration::from_secs(20), "the latency of the former process is kept");
    }
}

/// Invariant 1 (Residency), at the receiving end.
#[tokio::test]
async fn a_request_whose_policy_excludes_the_region_is_rejected() {
    let fixture = Fixture::with([Takes(RESPONSE_TIME), Takes(RESPONSE_TIME)]).await;
    let send = async |residency: &str| {
        let request = fixture.client.post(format!("{}/v1/embeddings", fixture.url));
        let request = request.header("x-meridian-deployment", "m").header("x-meridian-residency", residency);
        request.body("{}").send().await.unwrap().status().as_u16()
    };
    assert_eq!((send("eu").await, send("us").await), (403, 200));
    let requests: u64 = fixture.replicas.iter().map(|replica| replica.requests.load(Ordering::SeqCst)).sum();
    assert_eq!(requests, 1);
}
