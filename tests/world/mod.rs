//! A real world for a test: `meridian up` with its real processes, on ports of its own, gone with the test.

pub(crate) mod https;

use serde_json::{Value, json};
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// How long anything that is waited for may take before a test gives up.
const PATIENCE: Duration = Duration::from_secs(60);

/// How often a condition is looked at: asking without a pause would take a core from the world that is asked about.
const LOOK_PERIOD: Duration = Duration::from_millis(20);

/// One world at a time: each has a dozen processes, and a machine has few cores.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// A running world.
pub(crate) struct World {
    up: Child,
    /// Base URL for clients, without `/v1`.
    pub url: String,
    operations: String,
    control: String,
    /// Base URL of the hub.
    pub hub: String,
    /// The file with what an operator shows to it.
    pub operator_token: String,
    /// The certificate, where clients come over TLS.
    certificate: String,
    dir: tempfile::TempDir,
    client: reqwest::Client,
    _turn: MutexGuard<'static, ()>,
}

/// What came back for a request.
pub(crate) struct Answer {
    /// The HTTP status.
    pub status: u16,
    headers: reqwest::header::HeaderMap,
    /// The body.
    pub body: Value,
    /// How long it took.
    pub took: Duration,
}

impl Answer {
    /// A header, or nothing.
    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
    }

    /// `error.code`.
    pub(crate) fn code(&self) -> &str {
        self.body["error"]["code"].as_str().unwrap_or_default()
    }

    /// The vectors in the order of their index.
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

impl World {
    /// Starts a world and waits for its ready line.
    pub(crate) fn up(arguments: &[&str]) -> World {
        World::up_with(arguments, &[])
    }

    /// The same, with some environment variables.
    pub(crate) fn up_with(arguments: &[&str], environment: &[(&str, &std::path::Path)]) -> World {
        let turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let dir = tempfile::tempdir().expect("a directory");
        let mut up = meridian()
            .args(["up", "--port", "0", "--dir"])
            .arg(dir.path())
            .args(arguments)
            .envs(environment.iter().copied())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the binary starts");
        let mut lines = BufReader::new(up.stdout.take().expect("piped")).lines();
        let (mut operations, mut control, mut certificate) = (String::new(), String::new(), String::new());
        let (mut hub, mut operator_token) = (String::new(), String::new());
        let url = loop {
            let line = lines.next().expect("a world becomes ready").expect("text");
            println!("{line}");
            let mut words = line.split_whitespace();
            match (words.next(), words.next()) {
                (Some("operations"), Some(url)) => operations = url.trim_end_matches("/routes").to_owned(),
                (Some("control"), Some(url)) => control = url.to_owned(),
                (Some("hub"), Some(url)) => {
                    hub = url.to_owned();
                    operator_token = words.next_back().expect("a file").trim_end_matches(')').to_owned();
                }
                (Some("certificate"), Some(file)) => certificate = file.to_owned(),
                (Some("ready"), Some(url)) => break url.trim_end_matches("/v1").to_owned(),
                _ => {}
            }
        };
        // What else it says goes to the test's output; and its pipe must not fill.
        std::thread::spawn(move || lines.map_while(Result::ok).for_each(|line| println!("up: {line}")));
        let client = reqwest::Client::builder().no_proxy().build().expect("a client");
        World { up, url, operations, control, hub, operator_token, certificate, dir, client, _turn: turn }
    }

    /// `POST /v1/embeddings` with any body and further headers.
    pub(crate) async fn post(&self, body: impl Into<reqwest::Body>, headers: &[(&str, &str)]) -> Answer {
        self.post_to("/v1/embeddings", body, headers).await
    }

    /// `POST` to any path, with any body and further headers.
    pub(crate) async fn post_to(
        &self,
        path: &str,
        body: impl Into<reqwest::Body>,
        headers: &[(&str, &str)],
    ) -> Answer {
        let mut request = self.client.post(format!("{}{path}", self.url)).body(body).timeout(PATIENCE);
        if !headers.iter().any(|(name, _)| *name == "authorization") {
            request = request.header("authorization", "Bearer local");
        }
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        answer(request).await
    }

    /// Embeds `input` with a deployment.
    pub(crate) async fn embed(
        &self,
        model: &str,
        input: impl Into<Value>,
        headers: &[(&str, &str)],
    ) -> Answer {
        self.post(json!({"model": model, "input": input.into()}).to_string(), headers).await
    }

    /// Any `GET` of a client.
    pub(crate) async fn get(&self, path: &str) -> Answer {
        answer(self.client.get(format!("{}{path}", self.url)).header("authorization", "Bearer local")).await
    }

    /// Presses a button of the control port.
    pub(crate) async fn press(&self, button: &str) {
        let answer = answer(self.client.post(format!("{}/{button}", self.control))).await;
        assert_eq!(answer.status, 200, "{button}: {}", answer.body);
    }

    /// Process identifiers by name, as the control port tells them.
    pub(crate) async fn processes(&self) -> Vec<(String, Option<u32>)> {
        let answer = answer(self.client.get(&self.control)).await;
        let processes = answer.body["processes"].as_object().expect("processes").clone();
        processes.into_iter().map(|(name, id)| (name, id.as_u64().map(|id| id as u32))).collect()
    }

    /// Sends a signal to a process of the world, found as an operator with `ps` would find it.
    pub(crate) fn signal(&self, signal: &str, name: &[&str]) {
        let id = self.find(name).unwrap_or_else(|| panic!("no process {name:?}"));
        assert!(Command::new("kill").args([signal, &id.to_string()]).status().expect("kill runs").success());
    }

    /// The process of this world whose command line has all of these words.
    pub(crate) fn find(&self, words: &[&str]) -> Option<u32> {
        let here = self.dir.path().canonicalize().expect("the directory stands").display().to_string();
        command_lines().into_iter().find_map(|(id, line)| {
            let has = |word: &&str| line.iter().any(|argument| argument == *word);
            (line.iter().any(|argument| argument.starts_with(&here)) && words.iter().all(has)).then_some(id)
        })
    }

    /// Waits until the gateway sees a region in this health.
    pub(crate) async fn until_health(&self, region: &str, health: &str) {
        self.until(&format!("{region} is {health}"), async || self.route(region).await["health"] == health)
            .await;
    }

    /// How the gateway sees a region; nothing where it does not.
    pub(crate) async fn route(&self, region: &str) -> Value {
        let routes = answer(self.client.get(format!("{}/routes", self.operations))).await;
        let regions = routes.body["regions"].as_array().cloned().unwrap_or_default();
        regions.into_iter().find(|row| row["region"] == region).unwrap_or_default()
    }

    /// Waits for a condition.
    pub(crate) async fn until(&self, what: &str, mut holds: impl AsyncFnMut() -> bool) {
        let begun = Instant::now();
        while !holds().await {
            assert!(begun.elapsed() < PATIENCE, "{what} did not come true");
            tokio::time::sleep(LOOK_PERIOD).await;
        }
    }

    /// How many requests the replica of a region has counted.
    pub(crate) async fn requests_at(&self, region: &str) -> u64 {
        let address = self.address(&format!("replica-{}-0", region.replace('/', "-")), "listen");
        let status = answer(self.client.get(format!("http://{address}/status"))).await;
        status.body["requests_total"].as_u64().expect("a count")
    }

    /// What an address of a region's spoke has to say to these bytes.
    pub(crate) async fn say_to_spoke(&self, region: &str, key: &str, bytes: &[u8]) -> String {
        let address = self.address(&format!("spoke-{}", region.replace('/', "-")), key);
        let mut stream = TcpStream::connect(address).await.expect("a connection");
        stream.write_all(bytes).await.expect("room for a few bytes");
        let mut said = Vec::new();
        // However it ends; a reset says no less than an end.
        tokio::time::timeout(PATIENCE, stream.read_to_end(&mut said)).await.expect("an end").ok();
        String::from_utf8_lossy(&said).into_owned()
    }

    /// What a configuration of this world has under `key`.
    fn address(&self, name: &str, key: &str) -> String {
        let file = self.dir.path().join(format!("{name}.toml"));
        let config: toml::Table =
            std::fs::read_to_string(file).expect("a configuration").parse().expect("TOML");
        config[key].as_str().expect("an address").to_owned()
    }

    /// A file of the world's folder.
    pub(crate) fn file(&self, name: &str) -> std::path::PathBuf {
        self.dir.path().canonicalize().expect("the directory stands").join(name)
    }

    /// The process of `meridian up` itself.
    pub(crate) fn process(&mut self) -> &mut Child {
        &mut self.up
    }
}

impl Drop for World {
    fn drop(&mut self) {
        // The kernel ends the rest with it; waiting frees its identifier.
        self.up.kill().ok();
        self.up.wait().ok();
    }
}

/// Every process of this machine with its arguments.
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

async fn answer(request: reqwest::RequestBuilder) -> Answer {
    let begun = Instant::now();
    let answer = request.send().await.expect("an answer");
    let (status, headers) = (answer.status().as_u16(), answer.headers().clone());
    let body = answer.bytes().await.expect("a whole answer");
    let body = serde_json::from_slice(&body).unwrap_or(Value::Null);
    Answer { status, headers, body, took: begun.elapsed() }
}
