//! A gateway, a hub that publishes one region, and that region: one replica with a fixed speed in tokens a second, one
//! request after another, interactive ones first.

use crate::address::free_address;
use crate::hub;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::IntoResponse;
use gateway::config::EdgeConfig;
use serde_json::{Value, json};
use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::sync::{Notify, oneshot, watch};

const REGION: &str = "aws/us-east-1";
/// Speed of the region in tokens a second.
pub(crate) const SPEED: u64 = 20_000;

/// Time of a request besides the queue and the engine.
const OVERHEAD: Duration = Duration::from_millis(20);
/// Longer than any expected step takes.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(30);

/// The region.
pub(crate) struct Region {
    requests: AtomicU64,
    priority: Mutex<String>,
    /// Tokens a second.
    speed: u64,
    queues: Mutex<Queues>,
    work: Notify,
    /// Stops computing while this is true.
    pub(crate) frozen: watch::Sender<bool>,
}

#[derive(Default)]
struct Queues {
    lookups: VecDeque<(u64, oneshot::Sender<()>)>,
    bulk: VecDeque<(u64, oneshot::Sender<()>)>,
}

impl Queues {
    fn tokens(queue: &VecDeque<(u64, oneshot::Sender<()>)>) -> u64 {
        queue.iter().map(|(tokens, _)| tokens).sum()
    }
}

impl Region {
    fn new(speed: u64) -> Region {
        Region {
            requests: AtomicU64::new(0),
            priority: Mutex::default(),
            speed,
            queues: Mutex::default(),
            work: Notify::new(),
            frozen: watch::Sender::new(false),
        }
    }

    /// Returns the number of received requests.
    pub(crate) fn requests(&self) -> u64 {
        self.requests.load(Ordering::SeqCst)
    }

    /// Returns the priority of the last request.
    pub(crate) fn priority(&self) -> String {
        self.priority.lock().unwrap().clone()
    }

    /// Returns the queued tokens.
    pub(crate) fn waiting(&self) -> u64 {
        let queues = self.queues.lock().unwrap();
        Queues::tokens(&queues.lookups) + Queues::tokens(&queues.bulk)
    }

    fn report(&self, sequence: u64) -> Value {
        let queues = self.queues.lock().unwrap();
        let lookups = Queues::tokens(&queues.lookups);
        let load = json!({"name": "m", "ready": 1, "pending_tokens": lookups + Queues::tokens(&queues.bulk),
                          "interactive_tokens": lookups, "tokens_per_second": self.speed as f64});
        json!({"version": 1, "region": REGION, "instance": "a", "boot_id": 1, "sequence": sequence, "draining": false, "deployments": [load]})
    }

    /// Computes the queue, interactive requests first, one after another; never returns.
    async fn compute(self: Arc<Region>) {
        let mut frozen = self.frozen.subscribe();
        let mut busy_until = Instant::now();
        loop {
            frozen.wait_for(|frozen| !frozen).await.unwrap();
            let next = {
                let mut queues = self.queues.lock().unwrap();
                queues.lookups.pop_front().or_else(|| queues.bulk.pop_front())
            };
            let Some((tokens, done)) = next else {
                self.work.notified().await;
                continue;
            };
            busy_until =
                busy_until.max(Instant::now()) + Duration::from_nanos(tokens * 1_000_000_000 / self.speed);
            tokio::time::sleep_until(busy_until.into()).await;
            let _ = done.send(());
        }
    }
}

async fn exchange(State(region): State<Arc<Region>>, body: axum::body::Body) -> impl IntoResponse {
    crate::reports::respond(body, move |sequence| {
        let region = region.clone();
        async move { region.report(sequence).to_string() }
    })
}

async fn compute(State(region): State<Arc<Region>>, headers: HeaderMap, body: Bytes) -> impl IntoResponse {
    region.requests.fetch_add(1, Ordering::SeqCst);
    let priority = headers.get("x-meridian-priority").map_or("", |priority| priority.to_str().unwrap());
    *region.priority.lock().unwrap() = priority.to_owned();
    let tokens = gateway_core::body::read(&body).unwrap().tokens;
    let (done, computed) = oneshot::channel();
    {
        let mut queues = region.queues.lock().unwrap();
        let queue = if priority == "bulk" { &mut queues.bulk } else { &mut queues.lookups };
        queue.push_back((tokens, done));
    }
    region.work.notify_one();
    let _ = computed.await;
    tokio::time::sleep(OVERHEAD).await;
    (StatusCode::OK, [("x-meridian-tokens", tokens.to_string())], "{}")
}

/// The complete fixture.
pub(crate) struct Fixture {
    pub(crate) region: Arc<Region>,
    address: SocketAddr,
    operations: String,
    client: reqwest::Client,
    _dir: tempfile::TempDir,
    _stop: tokio::sync::oneshot::Sender<()>,
}

impl Fixture {
    /// Starts the fixture with these tenants; an environment variable with a key has its own name as the value.
    pub(crate) async fn start(tenants: &str) -> Fixture {
        Fixture::with_files(tenants, &[]).await
    }

    /// Starts the fixture with these files next to the tenants file.
    pub(crate) async fn with_files(tenants: &str, files: &[(&str, String)]) -> Fixture {
        let region = Arc::new(Region::new(SPEED));
        tokio::spawn(region.clone().compute());
        let router = axum::Router::new()
            .route(scheduler_api::paths::EXCHANGE, axum::routing::post(exchange))
            .fallback(compute)
            .with_state(region.clone());
        let endpoint = hub::serve(router).await.to_string();
        let regions =
            [json!({"id": REGION, "instances": [{"name": "a", "endpoint": endpoint}], "deployments": ["m"]})];
        let hub = hub::hub(1, 1, &regions, &[hub::deployment("m", Value::Null)]).await;
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in
            files.iter().map(|(name, text)| (*name, text.as_str())).chain([("tenants.toml", tenants)])
        {
            std::fs::write(dir.path().join(name), text).unwrap();
        }
        let operations = free_address().to_string();
        let text = format!(
            "listen = '127.0.0.1:0'\noperations = '{operations}'\nregion = '{REGION}'\nhub = 'http://{hub}'\n\
             snapshot = 'routes'\ntenants = 'tenants.toml'"
        );
        let keys = tenants.lines().filter_map(|line| line.strip_prefix("key_env = '")?.strip_suffix('\''));
        let environment: BTreeMap<_, _> = keys.map(|key| (key.to_owned(), key.to_owned())).collect();
        let config = EdgeConfig::parse(&text, dir.path(), &environment);
        let config = config.map_err(|problems| format!("{problems:#?}")).unwrap();
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let (ready, bound) = tokio::sync::oneshot::channel();
        tokio::spawn(async move {
            let shutdown = async { drop(stopped.await) };
            gateway::edge::run(config, shutdown, |address| ready.send(address).unwrap()).await.unwrap();
        });
        let address = bound.await.unwrap();
        let client = reqwest::Client::builder().no_proxy().build().unwrap();
        let fixture = Fixture { region, address, operations, client, _dir: dir, _stop: stop };
        fixture.wait_until_it_serves(tenants).await;
        fixture
    }

    async fn wait_until_it_serves(&self, tenants: &str) {
        let key =
            tenants.lines().find_map(|line| line.strip_prefix("key_env = '")?.strip_suffix('\'')).unwrap();
        let url = format!("http://{}/v1/models", self.address);
        let begun = Instant::now();
        while self.client.get(&url).bearer_auth(key).send().await.unwrap().status() != 200 {
            assert!(begun.elapsed() < TIMEOUT, "the gateway does not serve");
            tokio::task::yield_now().await;
        }
    }

    /// Returns the explanation of a finished request.
    pub(crate) async fn explain(&self, id: &str) -> Value {
        let begun = Instant::now();
        loop {
            let url = format!("http://{}/explain/{id}", self.operations);
            let response = self.client.get(url).send().await.unwrap();
            if response.status() == 200 {
                return response.json().await.unwrap();
            }
            assert!(begun.elapsed() < TIMEOUT, "{id} is not explained");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Requests embeddings.
    pub(crate) async fn post(
        &self,
        bearer: &str,
        headers: &[(&str, &str)],
        body: String,
    ) -> reqwest::Response {
        let url = format!("http://{}/v1/embeddings", self.address);
        let mut request = self.client.post(url).bearer_auth(bearer).body(body);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        request.send().await.unwrap()
    }

    /// Opens a connection.
    pub(crate) async fn connect(&self) -> Connection {
        Connection(BufReader::new(TcpStream::connect(self.address).await.unwrap()))
    }

    /// Returns the status and text of the response to the head of a request whose body is never sent.
    pub(crate) async fn head_only(&self, bearer: &str, headers: &str, length: usize) -> (u16, String) {
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        let head = format!(
            "POST /v1/embeddings HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {bearer}\r\ncontent-length: {length}\r\n{headers}\r\n"
        );
        stream.write_all(head.as_bytes()).await.unwrap();
        let mut text = String::new();
        let mut buffer = [0; 4096];
        // The complete response, which is one JSON object after one head.
        while !text.ends_with("}}") {
            let read = stream.read(&mut buffer).await.unwrap();
            assert!(read > 0, "closed after {text}");
            text.push_str(std::str::from_utf8(&buffer[..read]).unwrap());
        }
        (text.split(' ').nth(1).unwrap().parse().unwrap(), text.to_lowercase())
    }
}

/// Connection with a minimal client: the client's own cost must not distort the measurement of many requests.
pub(crate) struct Connection(BufReader<TcpStream>);

impl Connection {
    /// Sends a request and returns the status.
    pub(crate) async fn post(&mut self, bearer: &str, body: &str) -> u16 {
        let length = body.len();
        let request = format!(
            "POST /v1/embeddings HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {bearer}\r\ncontent-length: {length}\r\n\r\n{body}"
        );
        self.0.write_all(request.as_bytes()).await.unwrap();
        let (mut line, mut head) = (String::new(), String::new());
        while self.0.read_line(&mut line).await.unwrap() > 2 {
            head.push_str(&line.to_lowercase());
            line.clear();
        }
        let length = head.split("content-length: ").nth(1).and_then(|rest| rest.split("\r").next());
        self.0.read_exact(&mut vec![0; length.unwrap().parse().unwrap()]).await.unwrap();
        head.split(' ').nth(1).unwrap().parse().unwrap()
    }
}

/// Returns the value of a header, or an empty string.
pub(crate) fn header<'a>(response: &'a reqwest::Response, name: &str) -> &'a str {
    response.headers().get(name).map_or("", |value| value.to_str().unwrap())
}
