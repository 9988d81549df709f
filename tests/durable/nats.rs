//! Cluster of three NATS servers with JetStream, on loopback, each with a store on the disk.

use crate::fleet::{Addresses, TIMEOUT};
use std::fs::{self, File};
use std::io::Write;
use std::net::IpAddr;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Servers: a stream with three replicas survives the loss of one.
pub(crate) const NODES: usize = 3;
/// Program.
const SERVER: &str = "nats-server";
const CLIENTS: u16 = 4222;
const ROUTES: u16 = 6222;
const MONITORING: u16 = 8222;
/// Period of checks whether a server is ready.
const PERIOD: Duration = Duration::from_millis(100);
/// Variable that `.ci/run` sets: no test may be skipped.
const CI_VARIABLE: &str = "MERIDIAN_CI";

/// Running cluster; its processes are killed when it is dropped.
pub(crate) struct NatsCluster {
    dir: tempfile::TempDir,
    addresses: Vec<IpAddr>,
    nodes: Vec<Option<Child>>,
    http: reqwest::Client,
}

impl NatsCluster {
    /// Starts the servers; `None` on a machine without `nats-server`, which is an error in CI.
    pub(crate) async fn start() -> Option<NatsCluster> {
        let mut version = Command::new(SERVER);
        version.arg("--version").env("PATH", path()).stdout(Stdio::null()).stderr(Stdio::null());
        if version.status().is_err() {
            skipped("this test needs nats-server in the PATH: run .ci/prerequisites test");
            return None;
        }
        let mut free = Addresses::new();
        let addresses: Vec<_> = (0..NODES).map(|_| free.next()).collect();
        let dir = tempfile::tempdir().unwrap();
        let routes: Vec<_> =
            addresses.iter().map(|address| format!("nats-route://{address}:{ROUTES}")).collect();
        for (number, address) in addresses.iter().enumerate() {
            let store = dir.path().join(format!("store-{number}"));
            let text = format!(
                "server_name: node-{number}\nlisten: \"{address}:{CLIENTS}\"\nhttp: \"{address}:{MONITORING}\"\n\
                 jetstream {{ store_dir: {store:?}, max_file_store: 4GB }}\n\
                 cluster {{ name: durable, listen: \"{address}:{ROUTES}\", routes: {routes:?} }}\n"
            );
            fs::write(dir.path().join(format!("node-{number}.conf")), text).unwrap();
        }
        let http = reqwest::Client::builder().no_proxy().timeout(Duration::from_secs(2)).build().unwrap();
        let nodes = (0..NODES).map(|_| None).collect();
        let mut cluster = NatsCluster { dir, addresses, nodes, http };
        for node in 0..NODES {
            cluster.spawn(node);
        }
        for node in 0..NODES {
            cluster.wait_until_ready(node).await;
        }
        Some(cluster)
    }

    /// Returns the keys of `[jobs]` for this cluster.
    pub(crate) fn jobs(&self) -> String {
        let servers: Vec<_> =
            self.addresses.iter().map(|address| format!("nats://{address}:{CLIENTS}")).collect();
        format!("nats = {servers:?}\nnats_replicas = {NODES}\n")
    }

    fn log(&self, node: usize) -> PathBuf {
        self.dir.path().join(format!("node-{node}.log"))
    }

    fn spawn(&mut self, node: usize) {
        let log = File::options().create(true).append(true).open(self.log(node)).unwrap();
        // It ends with this process, however that ends.
        let mut command = Command::new(env!("CARGO_BIN_EXE_meridian"));
        command.args(["with-parent", SERVER, "--config"]);
        command.arg(self.dir.path().join(format!("node-{node}.conf")));
        command.env("PATH", path()).env("MERIDIAN_PARENT_PID", std::process::id().to_string());
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        self.nodes[node] = Some(command.spawn().unwrap());
    }

    /// Waits until a server is current, so that another one can end.
    async fn wait_until_ready(&self, node: usize) {
        let (url, begun) = (format!("http://{}:{MONITORING}/healthz", self.addresses[node]), Instant::now());
        loop {
            match self.http.get(&url).send().await {
                Ok(response) if response.status() == 200 => return,
                _ => {}
            }
            let log = || fs::read_to_string(self.log(node)).unwrap_or_default();
            assert!(begun.elapsed() < TIMEOUT, "nats-server {node} is not ready: {}", log());
            tokio::time::sleep(PERIOD).await;
        }
    }

    /// Kills a server. Its files remain.
    pub(crate) fn kill(&mut self, node: usize) {
        if let Some(mut process) = self.nodes[node].take() {
            process.kill().unwrap();
            process.wait().unwrap();
        }
    }

    /// Starts servers again that were killed, and waits until they are current.
    pub(crate) async fn start_again(&mut self, nodes: &[usize]) {
        nodes.iter().for_each(|node| self.spawn(*node));
        for node in nodes {
            self.wait_until_ready(*node).await;
        }
    }
}

impl Drop for NatsCluster {
    fn drop(&mut self) {
        (0..NODES).for_each(|node| self.kill(node));
    }
}

/// Ends a test that this machine cannot run, with what it needs.
pub(crate) fn skipped(needs: &str) {
    assert!(std::env::var_os(CI_VARIABLE).is_none(), "{needs}, or unset {CI_VARIABLE} to skip it");
    // Not with `eprintln!`, whose output is captured and is not shown for a test that passes.
    std::io::stderr().write_all(format!("skipped: {needs}\n").as_bytes()).unwrap();
}

/// Returns the PATH with the folders in which Debian installs servers.
fn path() -> String {
    format!("{}:/usr/sbin:/usr/local/sbin", std::env::var("PATH").unwrap_or_default())
}
