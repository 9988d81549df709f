//! Manually assembled fleet: one process for each role, and replicas that the test starts.

use crate::load::Rows;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs::File;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Timeout of every wait.
const TIMEOUT: Duration = Duration::from_secs(90);
const POLL_PERIOD: Duration = Duration::from_millis(50);
/// Replicas that the region's file names.
const REPLICAS: usize = 4;

/// Texts whose vectors are compared.
pub(crate) const TEXTS: [&str; 4] =
    ["the sea", "a calm morning by the sea", "two ships", "the ships are at sea again"];

/// Model and precision of a replica.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind {
    F32,
    Int8,
    /// In f32, with another pooling and therefore other files.
    OtherPooling,
}

/// A running fleet.
pub(crate) struct Fleet {
    dir: tempfile::TempDir,
    ports: Vec<u16>,
    running: BTreeMap<String, Child>,
    client: reqwest::Client,
}

/// The ports, after those of the replicas.
const HUB: usize = REPLICAS;
const SPOKE: usize = REPLICAS + 1;
const GATEWAY: usize = REPLICAS + 2;
const OPERATIONS: usize = REPLICAS + 3;

/// Returns different free ports.
fn free_ports(count: usize) -> Vec<u16> {
    let held: Vec<_> = (0..count).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
    held.iter().map(|socket| socket.local_addr().unwrap().port()).collect()
}

/// A checkpoint of a few kilobytes.
fn checkpoint() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("replica/tests/golden/families/bert")
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap().flatten() {
        let target = to.join(entry.file_name());
        if entry.path().is_dir() {
            copy(&entry.path(), &target);
        } else {
            std::fs::copy(entry.path(), target).unwrap();
        }
    }
}

impl Fleet {
    /// Starts a hub, a region and a gateway, without replicas.
    pub(crate) fn start(precision: &str) -> Fleet {
        let dir = tempfile::tempdir().unwrap();
        let client = reqwest::Client::builder().no_proxy().build().unwrap();
        let mut fleet = Fleet { dir, ports: free_ports(REPLICAS + 4), running: BTreeMap::new(), client };
        let at = |port: usize| format!("127.0.0.1:{}", fleet.ports[port]);
        let (hub, spoke, gateway) = (at(HUB), at(SPOKE), at(GATEWAY));
        let replicas: String =
            (0..REPLICAS).map(|number| format!("[[replica]]\nendpoint = \"{}\"\n", at(number))).collect();
        let files = [
            ("key", "local".to_owned()),
            ("tenants.toml", "[[tenant]]\nname = \"local\"\nkey_file = \"key\"\n".to_owned()),
            ("hub.toml", format!("listen = \"{hub}\"\ndata = \"hub\"\ndeployments = \"deployments.toml\"\n")),
            (
                "spoke.toml",
                format!(
                    "region = \"aws/us-east-1\"\nlisten = \"{spoke}\"\nadvertise = \"{spoke}\"\nhub = \"http://{hub}\"\n\
                     {replicas}"
                ),
            ),
            (
                "gateway.toml",
                format!(
                    "listen = \"{gateway}\"\noperations = \"{}\"\nregion = \"aws/us-east-1\"\nhub = \"http://{hub}\"\n\
                     tenants = \"tenants.toml\"\nsnapshot = \"gateway-routes\"\n",
                    at(OPERATIONS)
                ),
            ),
        ];
        for (name, text) in files {
            std::fs::write(fleet.dir.path().join(name), text).unwrap();
        }
        fleet.deployments(precision);
        let other = fleet.dir.path().join("other-pooling");
        copy(&checkpoint(), &other);
        let pooling = other.join("1_Pooling/config.json");
        let mut config: Value = serde_json::from_slice(&std::fs::read(&pooling).unwrap()).unwrap();
        for (key, value) in config.as_object_mut().unwrap() {
            if key.starts_with("pooling_mode_") {
                *value = json!(key == "pooling_mode_max_tokens");
            }
        }
        std::fs::write(&pooling, config.to_string()).unwrap();
        for role in ["hub", "spoke", "gateway"] {
            fleet.restart(role);
        }
        fleet
    }

    /// Writes the deployments file.
    fn deployments(&self, precision: &str) {
        let text = format!(
            "[[deployment]]\nname = \"d\"\ntask = \"embed\"\nmodel = \"{}\"\nengine = {{ kind = \"cpu\", precision = \"{precision}\" }}\n",
            checkpoint().display()
        );
        std::fs::write(self.dir.path().join("deployments.toml"), text).unwrap();
    }

    /// Kills a process.
    pub(crate) fn kill(&mut self, name: &str) {
        if let Some(mut running) = self.running.remove(name) {
            running.kill().unwrap();
            running.wait().unwrap();
        }
    }

    /// Starts a process, after killing the one with this name.
    pub(crate) fn restart(&mut self, name: &str) {
        self.kill(name);
        let role = name.split('-').next().unwrap();
        let log = File::options().create(true).append(true).open(self.dir.path().join(format!("{name}.log")));
        let child = Command::new(env!("CARGO_BIN_EXE_meridian"))
            .args([role, "--config", &format!("{name}.toml")])
            .args(if role == "replica" { &["--region", "aws/us-east-1"][..] } else { &[] })
            .current_dir(self.dir.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log.unwrap())
            .spawn();
        self.running.insert(name.to_owned(), child.unwrap());
    }

    /// Starts the replica with this number, in place of a previous one, and waits until it is ready.
    pub(crate) async fn replica(&mut self, number: usize, kind: Kind) {
        let other = self.dir.path().join("other-pooling");
        let (model, precision) = match kind {
            Kind::F32 => (checkpoint(), "f32"),
            Kind::Int8 => (checkpoint(), "int8"),
            Kind::OtherPooling => (other, "f32"),
        };
        let text = format!(
            "listen = \"127.0.0.1:{}\"\nnames = [\"d\"]\nmodel = \"{}\"\ncache = \"cache\"\n\
             engine = {{ kind = \"cpu\", precision = \"{precision}\" }}\n[threads]\ntokenizer = 1\nengine = 1\n",
            self.ports[number],
            model.display()
        );
        let name = format!("replica-{number}");
        std::fs::write(self.dir.path().join(format!("{name}.toml")), text).unwrap();
        self.restart(&name);
        let url = format!("http://127.0.0.1:{}/health", self.ports[number]);
        self.wait_until(&format!("{name} is ready"), async |fleet| {
            fleet.client.get(&url).send().await.is_ok_and(|response| response.status().is_success())
        })
        .await;
    }

    /// Returns the vectors that a replica computes.
    pub(crate) async fn rows(&self, number: usize) -> Rows {
        let url = format!("http://127.0.0.1:{}/v1/embeddings", self.ports[number]);
        let response = self
            .client
            .post(url)
            .body(json!({"model": "d", "input": TEXTS}).to_string())
            .send()
            .await
            .unwrap();
        Rows::read(response).await.unwrap()
    }

    /// Returns the URL for clients.
    pub(crate) fn url(&self) -> String {
        format!("http://127.0.0.1:{}/v1/embeddings", self.ports[GATEWAY])
    }

    /// Returns the vectors in the gateway's response, if it succeeds.
    pub(crate) async fn request_rows(&self) -> Option<Rows> {
        let body = json!({"model": "d", "input": TEXTS}).to_string();
        let request = self.client.post(self.url()).header("authorization", "Bearer local").body(body);
        let response = request.send().await.ok().filter(|response| response.status().is_success())?;
        Rows::read(response).await.ok()
    }

    pub(crate) async fn wait_until_served(&self) {
        self.wait_until("the deployment is served", async |fleet| fleet.request_rows().await.is_some()).await;
    }

    /// Waits until this many replicas get requests.
    pub(crate) async fn wait_until_ready(&self, count: u64) {
        self.wait_until(&format!("{count} replicas are ready"), async |fleet| {
            fleet.metric("meridian_ingress_replicas_ready{deployment=\"d\"}").await == Some(count)
        })
        .await;
    }

    /// Returns a metric of the region.
    pub(crate) async fn metric(&self, name: &str) -> Option<u64> {
        let url = format!("http://127.0.0.1:{}/metrics", self.ports[SPOKE]);
        let text = self.client.get(url).send().await.ok()?.text().await.ok()?;
        let line = text.lines().find(|line| line.starts_with(name))?;
        line.rsplit(' ').next()?.parse().ok()
    }

    /// Waits for a condition.
    pub(crate) async fn wait_until(&self, description: &str, mut holds: impl AsyncFnMut(&Fleet) -> bool) {
        let begun = Instant::now();
        while !holds(self).await {
            if begun.elapsed() > TIMEOUT {
                let logs: Vec<_> = self.running.keys().map(|name| self.log(name)).collect();
                panic!(
                    "timed out waiting until {description}\n{}\n{}",
                    self.meridian(&["get", "rollout"]),
                    logs.join("\n")
                );
            }
            tokio::time::sleep(POLL_PERIOD).await;
        }
    }

    /// Returns the log of a process.
    pub(crate) fn log(&self, name: &str) -> String {
        std::fs::read_to_string(self.dir.path().join(format!("{name}.log"))).unwrap_or_default()
    }

    /// Runs a command against this fleet; returns its output.
    pub(crate) fn meridian(&self, arguments: &[&str]) -> String {
        let hub = format!("http://127.0.0.1:{}", self.ports[HUB]);
        let output = Command::new(env!("CARGO_BIN_EXE_meridian"))
            .args(arguments)
            .args(["--hub", &hub])
            .current_dir(self.dir.path())
            .output()
            .unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        text(&output.stdout) + &text(&output.stderr)
    }

    /// Runs an operator's command that must succeed.
    pub(crate) fn operator(&self, arguments: &[&str]) {
        let output = self.meridian(arguments);
        println!("{arguments:?}: {output}");
        assert!(!output.contains("meridian: ") && !output.contains("error"), "{output}");
    }

    /// Applies the deployment with another precision.
    pub(crate) fn apply(&self, precision: &str, more: &[&str]) {
        self.deployments(precision);
        self.operator(&[&["apply", "deployments.toml", "--yes"], more].concat());
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        for running in self.running.values_mut() {
            running.kill().ok();
            running.wait().ok();
        }
    }
}
