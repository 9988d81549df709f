//! A gateway between a scripted hub and three regions that respond like replicas, or as scripted.
//!
//! The regions speak raw HTTP, so that they can fail at any point.

use super::replica;
use crate::address::free_address;
use crate::hub::{deployment, hub};
use gateway::config::EdgeConfig;
use scheduler_api::report::ReportV1;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

pub(crate) const AMERICA: &str = "aws/us-east-1";
pub(crate) const EUROPE: &str = "gcp/europe-west4";
pub(crate) const JAPAN: &str = "oci/ap-tokyo-1";
const REGIONS: [&str; 3] = [AMERICA, EUROPE, JAPAN];

/// Default length of a vector.
pub(crate) const WIDTH: usize = 8;
/// Tokens a second that each region reports: high enough that no part of the tests is too small for the round trip to
/// Japan.
const SPEED: f64 = 5_000.0;

const TENANTS: &str = "[[tenant]]\nname = 'test'\nkey_file = 'key'\n[[tenant]]\nname = 'narrow'\nkey_file = 'narrow'\n\
                       limits = { requests_per_second = 2, tokens_per_minute = 1000000 }\n";

/// Behaviour of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Script {
    /// Responds after this time.
    Responds(Duration),
    /// Computes one request after another, for this time per input.
    Computes(Duration),
    /// Responds to this number of requests and is killed within the next response.
    KilledAfter(u64),
    /// Waits until the request is cancelled.
    Waits,
    /// Rejects this number of requests with this retry-after, and responds to the others.
    Rejects(u64, Duration),
    /// Responds with one row too few.
    OmitsOneRow,
    /// Responds with vectors of this length.
    RespondsWithWidth(usize),
    /// Responds so this number of times, and is killed within the next response.
    RespondsWithWidthUntilKilled(usize, u64),
}

pub(crate) struct Region {
    id: &'static str,
    script: watch::Sender<Script>,
    requests: AtomicU64,
    in_flight: watch::Sender<u64>,
    killed: watch::Sender<bool>,
    /// Held while computing.
    engine: tokio::sync::Mutex<()>,
}

impl Region {
    async fn start(id: &'static str, script: Script) -> (Arc<Region>, SocketAddr) {
        let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = socket.local_addr().unwrap();
        let region = Arc::new(Region {
            id,
            script: watch::Sender::new(script),
            requests: AtomicU64::new(0),
            in_flight: watch::Sender::new(0),
            killed: watch::Sender::new(false),
            engine: tokio::sync::Mutex::new(()),
        });
        let shared = region.clone();
        tokio::spawn(async move {
            let mut killed = shared.killed.subscribe();
            let mut connections = JoinSet::new();
            // When the region is killed, the socket and all connections are dropped here.
            loop {
                tokio::select! {
                    accepted = socket.accept() => {
                        let (region, (stream, _)) = (shared.clone(), accepted.unwrap());
                        connections.spawn(async move { region.serve(BufReader::new(stream)).await });
                    }
                    _ = killed.wait_for(|killed| *killed) => return,
                }
            }
        });
        (region, address)
    }

    async fn serve(&self, mut stream: BufReader<TcpStream>) -> Option<()> {
        loop {
            let (path, body) = read_request(&mut stream).await?;
            if path == scheduler_api::paths::EXCHANGE {
                return crate::reports::serve(&mut stream, |sequence| async move { self.report(sequence) })
                    .await;
            }
            let before = self.requests.fetch_add(1, Ordering::SeqCst);
            self.in_flight.send_modify(|in_flight| *in_flight += 1);
            let served = self.compute(&mut stream, &path, &body, before).await;
            self.in_flight.send_modify(|in_flight| *in_flight -= 1);
            served?;
        }
    }

    async fn compute(
        &self,
        stream: &mut BufReader<TcpStream>,
        path: &str,
        body: &[u8],
        before: u64,
    ) -> Option<()> {
        let script = *self.script.borrow();
        let width = match script {
            Script::RespondsWithWidth(width) | Script::RespondsWithWidthUntilKilled(width, _) => width,
            _ => WIDTH,
        };
        // Limit of a real replica, which no part may exceed.
        let mut response = replica::response(path, body, replica_api::limits::MAX_INPUTS, width);
        match script {
            Script::Responds(time) => tokio::time::sleep(time).await,
            Script::Computes(time) => {
                let inputs = String::from_utf8_lossy(body).matches("text number").count() as u32;
                let _engine = self.engine.lock().await;
                tokio::time::sleep(time * inputs).await;
            }
            Script::KilledAfter(responses) if before < responses => {
                tokio::time::sleep(Duration::from_millis(5)).await
            }
            Script::RespondsWithWidthUntilKilled(_, responses) if before < responses => {}
            Script::KilledAfter(_) | Script::RespondsWithWidthUntilKilled(..) => {
                let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", response.body.len());
                stream.write_all(head.as_bytes()).await.ok()?;
                stream.write_all(&response.body[..response.body.len() / 2]).await.ok()?;
                stream.flush().await.ok()?;
                self.killed.send_replace(true);
                return None;
            }
            Script::Waits => {
                let _ = stream.read_u8().await;
                return None;
            }
            Script::Rejects(times, wait) if before < times => {
                let headers = format!(
                    "x-meridian-error: overloaded\r\nretry-after-ms: {}\r\nretry-after: 1\r\n",
                    wait.as_millis()
                );
                return write(stream, 429, &headers, b"{\"error\":{\"code\":\"overloaded\"}}").await;
            }
            Script::Rejects(..) => {}
            Script::OmitsOneRow => {
                let mut short: Value = serde_json::from_slice(&response.body).unwrap();
                short["data"].as_array_mut().unwrap().pop();
                response.body = short.to_string().into_bytes();
            }
            Script::RespondsWithWidth(_) => {}
        }
        let headers = format!(
            "content-type: application/json\r\nserver-timing: region;dur=1\r\nx-meridian-tokens: {}\r\n",
            response.tokens
        );
        write(stream, response.status, &headers, &response.body).await
    }

    fn report(&self, sequence: u64) -> Vec<u8> {
        let load =
            |name: &str| json!({"name": name, "ready": 1, "pending_tokens": 0, "tokens_per_second": SPEED});
        let report = json!({
            "version": 1, "region": self.id, "instance": "a", "boot_id": 1, "sequence": sequence, "draining": false,
            "deployments": [load("anywhere"), load("locked")],
        });
        let wire: ReportV1 = serde_json::from_value(report).expect("a report as a spoke sends it");
        serde_json::to_vec(&wire).unwrap()
    }

    /// Waits for a number of requests in flight.
    pub(crate) async fn wait_for_in_flight(&self, holds: impl Fn(u64) -> bool) {
        self.in_flight.subscribe().wait_for(|in_flight| holds(*in_flight)).await.unwrap();
    }

    /// Changes the script.
    pub(crate) fn set_script(&self, script: Script) {
        self.script.send_replace(script);
    }

    /// Returns the number of requests in flight.
    pub(crate) fn in_flight(&self) -> u64 {
        *self.in_flight.borrow()
    }

    /// Returns the number of requests.
    pub(crate) fn requests(&self) -> u64 {
        self.requests.load(Ordering::SeqCst)
    }
}

async fn read_request(stream: &mut BufReader<TcpStream>) -> Option<(String, Vec<u8>)> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.ok()?);
    }
    let head = String::from_utf8(head).ok()?.to_lowercase();
    let path = head.split(' ').nth(1)?.to_owned();
    // The body of an exchange has no length.
    let length = head.split("content-length: ").nth(1).unwrap_or("0").split("\r\n").next()?.parse().ok()?;
    let mut body = vec![0; length];
    stream.read_exact(&mut body).await.ok()?;
    Some((path, body))
}

async fn write(stream: &mut BufReader<TcpStream>, status: u16, headers: &str, body: &[u8]) -> Option<()> {
    let head = format!("HTTP/1.1 {status} Status\r\n{headers}content-length: {}\r\n\r\n", body.len());
    stream.write_all(head.as_bytes()).await.ok()?;
    stream.write_all(body).await.ok()?;
    stream.flush().await.ok()
}

/// Gateway with three regions.
pub(crate) struct Fixture {
    pub(crate) url: String,
    operations: String,
    pub(crate) regions: BTreeMap<&'static str, Arc<Region>>,
    pub(crate) client: reqwest::Client,
    dir: tempfile::TempDir,
    _stop: tokio::sync::oneshot::Sender<()>,
}

impl Fixture {
    /// Starts the fixture with three regions that respond immediately.
    pub(crate) async fn healthy() -> Fixture {
        Fixture::with([Script::Responds(Duration::from_millis(5)); 3]).await
    }

    /// Scripts of America, Europe and Japan.
    pub(crate) async fn with(scripts: [Script; 3]) -> Fixture {
        let (mut regions, mut rows) = (BTreeMap::new(), Vec::new());
        for (id, script) in REGIONS.into_iter().zip(scripts) {
            let (region, address) = Region::start(id, script).await;
            regions.insert(id, region);
            rows.push(
                json!({"id": id, "instances": [{"name": "a", "endpoint": address.to_string()}], "deployments": ["anywhere", "locked"]}),
            );
        }
        let hub =
            hub(1, 1, &rows, &[deployment("anywhere", Value::Null), deployment("locked", json!("eu"))]).await;
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("key"), "k").unwrap();
        std::fs::write(dir.path().join("narrow"), "n").unwrap();
        std::fs::write(dir.path().join("receipts-key"), "0123456789abcdef").unwrap();
        std::fs::write(dir.path().join("tenants.toml"), TENANTS).unwrap();
        let operations = free_address();
        let text = format!(
            "listen = '127.0.0.1:0'\noperations = '{operations}'\nregion = '{AMERICA}'\nhub = 'http://{hub}'\n\
             snapshot = 'routes'\ntenants = 'tenants.toml'\n[receipts]\ndir = 'receipts'\nkey_file = 'receipts-key'"
        );
        let config = EdgeConfig::parse(&text, dir.path(), &BTreeMap::new())
            .map_err(|problems| format!("{problems:#?}"));
        let config = config.unwrap();
        let operations = format!("http://{}", config.operations);
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let (ready, address) = tokio::sync::oneshot::channel();
        let shutdown = async { drop(stopped.await) };
        tokio::spawn(gateway::edge::run(config, shutdown, |address| {
            ready.send(address).expect("the test waits for the address")
        }));
        let url = format!("http://{}", address.await.unwrap());
        let client = reqwest::Client::builder().no_proxy().build().unwrap();
        let fixture = Fixture { url, operations, regions, client, dir, _stop: stop };
        fixture.wait_until_all_healthy().await;
        fixture
    }

    async fn wait_until_all_healthy(&self) {
        let begun = Instant::now();
        loop {
            assert!(begun.elapsed() < Duration::from_secs(20), "the regions do not become healthy");
            let Ok(response) = self.client.get(format!("{}/routes", self.operations)).send().await else {
                continue;
            };
            let routes: Value = response.json().await.unwrap();
            let regions = routes["regions"].as_array().cloned().unwrap_or_default();
            if regions.len() == 3 && regions.iter().all(|region| region["health"] == "healthy") {
                return;
            }
        }
    }

    /// Sends a request as the unlimited tenant.
    pub(crate) async fn send(&self, path: &str, body: &Value, headers: &[(&str, &str)]) -> ClientResponse {
        self.send_as("k", path, body, headers).await
    }

    pub(crate) async fn send_as(
        &self,
        key: &str,
        path: &str,
        body: &Value,
        headers: &[(&str, &str)],
    ) -> ClientResponse {
        let mut request =
            self.client.post(format!("{}{path}", self.url)).bearer_auth(key).body(body.to_string());
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let response = request.send().await.expect("an answer");
        let (status, headers) = (response.status().as_u16(), response.headers().clone());
        ClientResponse {
            status,
            headers,
            body: response.bytes().await.map_err(drop).map(|body| body.to_vec()),
        }
    }

    /// Returns the explanation of a finished request.
    pub(crate) async fn explain(&self, id: &str) -> Value {
        let begun = Instant::now();
        loop {
            let response = self.client.get(format!("{}/explain/{id}", self.operations)).send().await.unwrap();
            if response.status() == 200 {
                return response.json().await.unwrap();
            }
            assert!(begun.elapsed() < Duration::from_secs(20), "{id} is not explained");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Returns the regions to which a request was sent by its receipts, once they are on disk.
    pub(crate) async fn regions_in_receipts(&self, id: &str) -> Vec<String> {
        let begun = Instant::now();
        loop {
            let files = gateway::receipts::files_in(&[self.dir.path().join("receipts")]).unwrap();
            let text: String = files.iter().map(|file| std::fs::read_to_string(file).unwrap()).collect();
            let entries =
                text.lines().filter_map(|line| serde_json::from_str::<Value>(line.split_once(' ')?.1).ok());
            let of_it = entries.filter(|entry| entry["kind"] == "attempt" && entry["id"] == id);
            let regions: Vec<_> = of_it.map(|entry| entry["region"].as_str().unwrap().to_owned()).collect();
            if !regions.is_empty() {
                return regions;
            }
            assert!(begun.elapsed() < Duration::from_secs(20), "no receipt {id}: {text}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Returns the number of requests of each region.
    pub(crate) fn requests(&self) -> [u64; 3] {
        REGIONS.map(|id| self.regions[id].requests())
    }
}

/// Response.
pub(crate) struct ClientResponse {
    pub(crate) status: u16,
    headers: reqwest::header::HeaderMap,
    /// `Err` if it was truncated.
    pub(crate) body: Result<Vec<u8>, ()>,
}

impl ClientResponse {
    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", |value| value.to_str().unwrap())
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(self.body.as_ref().expect("a complete response")).expect("JSON")
    }
}
