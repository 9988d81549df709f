//! Local fleet for a test: `meridian up` with its real processes, on free ports, ended with the test.

pub(crate) mod https;

use serde_json::{Value, json};
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// Timeout of every wait.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Polling period of conditions; polling without a pause would take a core from the fleet.
const POLL_PERIOD: Duration = Duration::from_millis(20);

/// Serializes fleets: each has a dozen processes, and a machine has few cores.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Waits until no other fleet runs; the next one waits until the returned value is dropped.
pub(crate) fn turn() -> MutexGuard<'static, ()> {
    ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Running local fleet.
pub(crate) struct LocalFleet {
    up: Child,
    /// Base URL for clients, without `/v1`.
    pub url: String,
    /// Base URL of the operations port of the gateway.
    pub operations: String,
    /// Base URL of the control API.
    pub control: String,
    /// Link that signs a browser in to the console, once.
    pub console: String,
    /// Base URL of the hub.
    pub hub: String,
    /// Directory with the identity of the operator.
    pub identity: String,
    /// Certificate of the gateway, if clients use TLS.
    certificate: String,
    dir: tempfile::TempDir,
    client: reqwest::Client,
    _turn: MutexGuard<'static, ()>,
}

/// Response to a request.
pub(crate) struct ClientResponse {
    /// The HTTP status.
    pub status: u16,
    headers: reqwest::header::HeaderMap,
    /// The body.
    pub body: Value,
    /// Time from request to response.
    pub took: Duration,
}

impl ClientResponse {
    /// Returns a header; empty if absent.
    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
    }

    /// `error.code`.
    pub(crate) fn code(&self) -> &str {
        self.body["error"]["code"].as_str().unwrap_or_default()
    }

    /// Returns the vectors in the order of their index.
    pub(crate) fn vectors(&self) -> Vec<Vec<f32>> {
        let data = self.body["data"]
            .as_array()
            .unwrap_or_else(|| panic!("no data in {}: {}", self.status, self.body));
        let numbers = |row: &Value| {
            row["embedding"]
                .as_array()
                .expect("numbers")
                .iter()
                .map(|number| number.as_f64().expect("a number") as f32)
                .collect()
        };
        for (index, row) in data.iter().enumerate() {
            assert_eq!(row["index"], index, "rows come in order");
        }
        data.iter().map(numbers).collect()
    }
}

/// The binary under test.
pub(crate) fn meridian() -> Command {
    Command::new(env!("CARGO_BIN_EXE_meridian"))
}

impl LocalFleet {
    /// Starts a fleet and waits for its ready line.
    pub(crate) fn start(arguments: &[&str]) -> LocalFleet {
        LocalFleet::start_with(arguments, &[])
    }

    /// Starts a fleet with environment variables.
    pub(crate) fn start_with(arguments: &[&str], environment: &[(&str, &std::path::Path)]) -> LocalFleet {
        let turn = turn();
        let dir = tempfile::tempdir().expect("a directory");
        let mut up = meridian()
            // One gateway, so that every test knows which one serves its requests.
            .args(["up", "--port", "0", "--gateways", "1", "--dir"])
            .arg(dir.path())
            .args(arguments)
            .envs(environment.iter().copied())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the binary starts");
        let mut lines = BufReader::new(up.stdout.take().expect("piped")).lines();
        let (mut operations, mut control, mut certificate) = (String::new(), String::new(), String::new());
        let (mut hub, mut identity, mut console) = (String::new(), String::new(), String::new());
        let url = loop {
            let line = lines.next().expect("a fleet becomes ready").expect("text");
            println!("{line}");
            let mut words = line.split_whitespace();
            match (words.next(), words.next()) {
                (Some("operations"), Some(url)) => operations = url.trim_end_matches("/routes").to_owned(),
                (Some("control"), Some(url)) => control = url.to_owned(),
                (Some("console"), Some(url)) => console = url.to_owned(),
                (Some("hub"), Some(url)) => {
                    hub = url.to_owned();
                    identity = words.next_back().expect("a file").trim_end_matches(')').to_owned();
                }
                (Some("certificate"), Some(file)) => certificate = file.to_owned(),
                (Some("ready"), Some(url)) => break url.trim_end_matches("/v1").to_owned(),
                _ => {}
            }
        };
        // Further output is printed, so that the pipe does not fill up.
        std::thread::spawn(move || lines.map_while(Result::ok).for_each(|line| println!("up: {line}")));
        let client = reqwest::Client::builder().no_proxy().build().expect("a client");
        LocalFleet {
            up,
            url,
            operations,
            control,
            console,
            hub,
            identity,
            certificate,
            dir,
            client,
            _turn: turn,
        }
    }

    /// Returns the metrics of the gateway.
    pub(crate) async fn metrics(&self) -> String {
        let response = self.client.get(format!("{}/metrics", self.operations)).send().await;
        response.expect("a response").text().await.expect("text")
    }

    /// Sends `POST /v1/embeddings` with this body and further headers.
    pub(crate) async fn post(
        &self,
        body: impl Into<reqwest::Body>,
        headers: &[(&str, &str)],
    ) -> ClientResponse {
        self.post_to("/v1/embeddings", body, headers).await
    }

    /// Sends a `POST` to this path, with this body and further headers.
    pub(crate) async fn post_to(
        &self,
        path: &str,
        body: impl Into<reqwest::Body>,
        headers: &[(&str, &str)],
    ) -> ClientResponse {
        let mut request = self.client.post(format!("{}{path}", self.url)).body(body).timeout(TIMEOUT);
        if !headers.iter().any(|(name, _)| *name == "authorization") {
            request = request.header("authorization", "Bearer local");
        }
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        response(request).await
    }

    /// Embeds `input` with a deployment.
    pub(crate) async fn embed(
        &self,
        model: &str,
        input: impl Into<Value>,
        headers: &[(&str, &str)],
    ) -> ClientResponse {
        self.post(json!({"model": model, "input": input.into()}).to_string(), headers).await
    }

    /// Sends a `GET` as a client.
    pub(crate) async fn get(&self, path: &str) -> ClientResponse {
        response(self.client.get(format!("{}{path}", self.url)).header("authorization", "Bearer local")).await
    }

    /// Sends a `DELETE` as a client.
    pub(crate) async fn delete(&self, path: &str) -> ClientResponse {
        let request = self.client.delete(format!("{}{path}", self.url));
        response(request.header("authorization", "Bearer local")).await
    }

    /// Calls the control API.
    pub(crate) async fn control_action(&self, action: &str) {
        let response = response(self.client.post(format!("{}/{action}", self.control))).await;
        assert_eq!(response.status, 200, "{action}: {}", response.body);
    }

    /// Returns the process ids by name, from the control API.
    pub(crate) async fn processes(&self) -> Vec<(String, Option<u32>)> {
        let response = response(self.client.get(&self.control)).await;
        let processes = response.body["processes"].as_object().expect("processes").clone();
        processes.into_iter().map(|(name, id)| (name, id.as_u64().map(|id| id as u32))).collect()
    }

    /// Sends a signal to the process with these words on its command line.
    pub(crate) fn signal(&self, signal: &str, name: &[&str]) {
        let id = self.find(name).unwrap_or_else(|| panic!("no process {name:?}"));
        assert!(Command::new("kill").args([signal, &id.to_string()]).status().expect("kill runs").success());
    }

    /// Returns the process of this fleet whose command line has all of these words.
    pub(crate) fn find(&self, words: &[&str]) -> Option<u32> {
        let here = self.dir.path().canonicalize().expect("the directory exists").display().to_string();
        command_lines().into_iter().find_map(|(id, line)| {
            let has = |word: &&str| line.iter().any(|argument| argument == *word);
            (line.iter().any(|argument| argument.starts_with(&here)) && words.iter().all(has)).then_some(id)
        })
    }

    /// Waits until the gateway reports this health of a region.
    pub(crate) async fn wait_for_health(&self, region: &str, health: &str) {
        self.wait_until(&format!("{region} is {health}"), async || {
            self.route(region).await["health"] == health
        })
        .await;
    }

    /// Returns the gateway's row of a region; null if it has none.
    pub(crate) async fn route(&self, region: &str) -> Value {
        let routes = response(self.client.get(format!("{}/routes", self.operations))).await;
        let regions = routes.body["regions"].as_array().cloned().unwrap_or_default();
        regions.into_iter().find(|row| row["region"] == region).unwrap_or_default()
    }

    /// Waits for a condition.
    pub(crate) async fn wait_until(&self, description: &str, mut holds: impl AsyncFnMut() -> bool) {
        let begun = Instant::now();
        while !holds().await {
            assert!(begun.elapsed() < TIMEOUT, "timed out: {description}");
            tokio::time::sleep(POLL_PERIOD).await;
        }
    }

    /// Returns the request count of a region's replica.
    pub(crate) async fn requests_at(&self, region: &str) -> u64 {
        let address = self.address(&format!("replica-{}-0", region.replace('/', "-")), "operations");
        let status = response(self.client.get(format!("http://{address}/status"))).await;
        status.body["requests_total"].as_u64().expect("a count")
    }

    /// Sends bytes to an address of a region's spoke; returns the response.
    pub(crate) async fn send_to_spoke(&self, region: &str, key: &str, bytes: &[u8]) -> String {
        let address = self.address(&format!("spoke-{}", region.replace('/', "-")), key);
        let mut stream = TcpStream::connect(address).await.expect("a connection");
        stream.write_all(bytes).await.expect("room for a few bytes");
        let mut received = Vec::new();
        // A reset is as good as an end of stream.
        tokio::time::timeout(TIMEOUT, stream.read_to_end(&mut received)).await.expect("an end").ok();
        String::from_utf8_lossy(&received).into_owned()
    }

    /// Returns the value of `key` in a configuration of this fleet.
    fn address(&self, name: &str, key: &str) -> String {
        let file = self.dir.path().join(format!("{name}.toml"));
        let config: toml::Table =
            std::fs::read_to_string(file).expect("a configuration").parse().expect("TOML");
        config[key].as_str().expect("an address").to_owned()
    }

    /// Returns the path of a file in the fleet's directory.
    pub(crate) fn file(&self, name: &str) -> std::path::PathBuf {
        self.dir.path().canonicalize().expect("the directory exists").join(name)
    }

    /// The process of `meridian up` itself.
    pub(crate) fn process(&mut self) -> &mut Child {
        &mut self.up
    }
}

impl Drop for LocalFleet {
    fn drop(&mut self) {
        // The kernel kills the other processes; waiting reaps this one.
        self.up.kill().ok();
        self.up.wait().ok();
    }
}

/// Returns every process of this machine with its arguments.
pub(crate) fn command_lines() -> Vec<(u32, Vec<String>)> {
    let entries = std::fs::read_dir("/proc").expect("a /proc");
    let ids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u32>().ok());
    ids.filter_map(|id| {
        let line = std::fs::read(format!("/proc/{id}/cmdline")).ok()?;
        let arguments =
            line.split(|byte| *byte == 0).map(|argument| String::from_utf8_lossy(argument).into_owned());
        Some((id, arguments.collect()))
    })
    .collect()
}

async fn response(request: reqwest::RequestBuilder) -> ClientResponse {
    let begun = Instant::now();
    let response = request.send().await.expect("a response");
    let (status, headers) = (response.status().as_u16(), response.headers().clone());
    let body = response.bytes().await.expect("a complete response");
    let body = serde_json::from_slice(&body).unwrap_or(Value::Null);
    ClientResponse { status, headers, body, took: begun.elapsed() }
}
