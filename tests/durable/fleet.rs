//! Fleet of real processes: a hub, regions with spokes and replicas, gateways. Each process has a folder for its
//! configuration, its data and its log.
//!
//! Every process has a loopback address of its own, so that it finds its port free again after it was killed: outgoing
//! connections have ports of 127.0.0.1.

use crate::replica;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};

/// API key of the clients, and their tenant.
pub(crate) const KEY: &str = "durable-key";
pub(crate) const TENANT: &str = "durable-tenant";
/// Timeout of every wait.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(90);
/// Period of checks of a condition.
const PERIOD: Duration = Duration::from_millis(100);
/// Port of every listener for clients, gateways and spokes, and the one for operators.
const PORT: u16 = 7100;
const OPERATIONS: u16 = 7101;

/// A region.
pub(crate) struct RegionPlan {
    pub(crate) region: &'static str,
    pub(crate) spokes: usize,
    pub(crate) replicas: usize,
    /// Deployments that its replicas serve.
    pub(crate) deployments: &'static [&'static str],
    /// The `[jobs]` table of its first spoke, or of all if the log is in NATS.
    pub(crate) jobs: JobsPlan,
}

/// Queue of a region.
pub(crate) enum JobsPlan {
    /// The first spoke has it, in its own folder; further keys of `[jobs]`.
    File(String),
    /// All spokes share it, with a folder of the region; further keys of `[jobs]`.
    Shared(String),
    /// The first spoke has it, in this folder.
    At(PathBuf),
}

/// Fleet of one test.
pub(crate) struct Plan {
    /// The file of deployments.
    pub(crate) deployments: &'static str,
    pub(crate) regions: Vec<RegionPlan>,
    /// Nearest region of each gateway.
    pub(crate) gateways: Vec<&'static str>,
    /// Level of the logs.
    pub(crate) log: &'static str,
}

struct ProcessSpec {
    name: String,
    command: Box<dyn Fn() -> std::process::Command>,
}

/// Running fleet; its processes are killed when it is dropped.
pub(crate) struct Fleet {
    dir: tempfile::TempDir,
    specs: BTreeMap<String, ProcessSpec>,
    running: BTreeMap<String, Child>,
    /// Base URLs of the gateways.
    pub(crate) gateways: Vec<String>,
    operations: Vec<String>,
    regions: usize,
    log: &'static str,
    http: reqwest::Client,
    begun: Instant,
}

/// Loopback addresses that no other process of this test uses.
pub(crate) struct Addresses {
    next: u8,
    fleet: u8,
}

impl Addresses {
    pub(crate) fn new() -> Addresses {
        static FLEETS: AtomicU8 = AtomicU8::new(0);
        Addresses { next: 1, fleet: FLEETS.fetch_add(1, Ordering::Relaxed) }
    }

    pub(crate) fn next(&mut self) -> IpAddr {
        self.next += 1;
        // 127.64.0.0 to 127.127.255.255, by the process and its fleets: two test runs do not meet.
        let [_, _, high, low] = std::process::id().to_be_bytes();
        IpAddr::V4(Ipv4Addr::new(127, 64 + (high ^ self.fleet) % 64, low, self.next))
    }
}

/// Returns the name of a spoke, counted from 1.
pub(crate) fn spoke(region: &str, number: usize) -> String {
    format!("spoke-{}-{number}", region.replace('/', "-"))
}

/// Returns the name of a replica, counted from 1.
pub(crate) fn replica(region: &str, number: usize) -> String {
    format!("replica-{}-{number}", region.replace('/', "-"))
}

/// Returns the name of a gateway, counted from 1.
pub(crate) fn gateway(number: usize) -> String {
    format!("gateway-{number}")
}

impl Fleet {
    /// Starts all processes, and waits until every gateway uses every region. Must be called on the thread of the test: a
    /// child ends with the thread that started it.
    pub(crate) async fn start(plan: &Plan) -> Fleet {
        let http = reqwest::Client::builder().no_proxy().timeout(Duration::from_secs(2)).build().unwrap();
        let mut fleet = Fleet {
            dir: tempfile::tempdir().unwrap(),
            specs: BTreeMap::new(),
            running: BTreeMap::new(),
            gateways: Vec::new(),
            operations: Vec::new(),
            regions: plan.regions.len(),
            log: plan.log,
            http,
            begun: Instant::now(),
        };
        let mut addresses = Addresses::new();
        let hub = SocketAddr::new(addresses.next(), PORT);
        fleet.write("hub", "deployments.toml", plan.deployments);
        let text = format!("listen = '{hub}'\ndata = 'data'\ndeployments = 'deployments.toml'\n");
        fleet.role("hub", "hub", &text);
        for region in &plan.regions {
            let replicas = (1..=region.replicas).map(|_| SocketAddr::new(addresses.next(), PORT));
            let replicas: Vec<_> = replicas.collect();
            for (address, number) in replicas.iter().zip(1..) {
                let (address, names) = (*address, region.deployments);
                let command = move || replica::command(address, names);
                fleet.add(replica(region.region, number), Box::new(command));
            }
            for number in 1..=region.spokes {
                fleet.add_spoke(region, number, &replicas, addresses.next(), hub);
            }
        }
        for (place, number) in plan.gateways.iter().zip(1..) {
            let address = addresses.next();
            let (listen, operations) = (SocketAddr::new(address, PORT), SocketAddr::new(address, OPERATIONS));
            let name = gateway(number);
            fleet.write(&name, "key", KEY);
            let tenants = format!("[[tenant]]\nname = '{TENANT}'\nkey_file = 'key'\n");
            fleet.write(&name, "tenants.toml", &tenants);
            let text = format!(
                "listen = '{listen}'\noperations = '{operations}'\nregion = '{place}'\nhub = 'http://{hub}'\n\
                 snapshot = 'routes'\ntenants = 'tenants.toml'\n[timeouts]\nlame_duck = '0s'\n"
            );
            fleet.role("gateway", &name, &text);
            fleet.gateways.push(format!("http://{listen}"));
            fleet.operations.push(format!("http://{operations}"));
        }
        // The hub first, then those that register with it.
        for role in ["hub", "replica", "spoke", "gateway"] {
            let names: Vec<_> = fleet.specs.keys().filter(|name| name.starts_with(role)).cloned().collect();
            for name in names {
                fleet.start_process(&name).await;
            }
        }
        fleet.wait_until_healthy().await;
        fleet
    }

    fn add_spoke(
        &mut self,
        plan: &RegionPlan,
        number: usize,
        replicas: &[SocketAddr],
        address: IpAddr,
        hub: SocketAddr,
    ) {
        let RegionPlan { region, jobs, .. } = plan;
        let (listen, operations) = (SocketAddr::new(address, PORT), SocketAddr::new(address, OPERATIONS));
        let mut text = format!(
            "region = '{region}'\ninstance = 'spoke-{number}'\nlisten = '{listen}'\nadvertise = '{listen}'\n\
             operations = '{operations}'\nhub = 'http://{hub}'\n"
        );
        match jobs {
            JobsPlan::File(keys) if number == 1 => write!(text, "[jobs]\ndir = 'jobs'\n{keys}\n").unwrap(),
            JobsPlan::At(dir) if number == 1 => write!(text, "[jobs]\ndir = {dir:?}\n").unwrap(),
            JobsPlan::File(_) | JobsPlan::At(_) => {}
            JobsPlan::Shared(keys) => {
                let dir = self.folder(&format!("shared-{}", region.replace('/', "-")));
                write!(text, "[jobs]\ndir = {dir:?}\n{keys}\n").unwrap();
            }
        }
        for replica in replicas {
            writeln!(text, "[[replica]]\nendpoint = '{replica}'").unwrap();
        }
        self.role("spoke", &spoke(region, number), &text);
    }

    /// Returns the folder of a process.
    pub(crate) fn folder(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Returns the folders of all processes, with their names.
    pub(crate) fn folders(&self) -> Vec<(String, PathBuf)> {
        let entries = fs::read_dir(self.dir.path()).unwrap().map(|entry| entry.unwrap());
        entries.map(|entry| (entry.file_name().into_string().unwrap(), entry.path())).collect()
    }

    fn write(&self, name: &str, file: &str, text: &str) -> PathBuf {
        fs::create_dir_all(self.folder(name)).unwrap();
        let file = self.folder(name).join(file);
        fs::write(&file, text).unwrap();
        file
    }

    /// Adds a process of a role of `meridian`.
    fn role(&mut self, role: &'static str, name: &str, text: &str) {
        let file = self.write(name, "config.toml", text);
        let command = move || {
            let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_meridian"));
            command.args([role, "--config"]).arg(&file);
            command
        };
        self.add(name.to_owned(), Box::new(command));
    }

    fn add(&mut self, name: String, command: Box<dyn Fn() -> std::process::Command>) {
        fs::create_dir_all(self.folder(&name)).unwrap();
        self.specs.insert(name.clone(), ProcessSpec { name, command });
    }

    /// Starts a process, and waits until it is ready. One that ends before is started again, as by a supervisor.
    pub(crate) async fn start_process(&mut self, name: &str) {
        let begun = Instant::now();
        loop {
            match self.try_start(name).await {
                Ok(child) => {
                    self.running.insert(name.to_owned(), child);
                    return;
                }
                Err(problem) => {
                    assert!(begun.elapsed() < TIMEOUT, "{name} does not start: {problem}");
                    println!("{:>6.1} s  {name} ended while it started", self.begun.elapsed().as_secs_f64());
                    tokio::time::sleep(PERIOD).await;
                }
            }
        }
    }

    async fn try_start(&self, name: &str) -> Result<Child, String> {
        let spec = &self.specs[name];
        let log = self.folder(&spec.name).join("log");
        let file = File::options().create(true).append(true).open(&log).unwrap();
        let mut command: Command = (spec.command)().into();
        command.env("MERIDIAN_PARENT_PID", std::process::id().to_string()).current_dir(self.folder(name));
        command.env("MERIDIAN_LOG", self.log);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(file).kill_on_drop(true);
        let mut child = command.spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let ready = async {
            while let Ok(Some(line)) = lines.next_line().await {
                if line.starts_with("ready ") {
                    return true;
                }
            }
            false
        };
        let ready = tokio::time::timeout(TIMEOUT, ready).await;
        if ready == Ok(true) {
            // Its further output is read until its end, so that the pipe stays open.
            tokio::spawn(async move { while let Ok(Some(_)) = lines.next_line().await {} });
            return Ok(child);
        }
        Err(tail(&log))
    }

    /// Returns the names of the processes of a region, replicas first.
    pub(crate) fn processes_of(&self, region: &str) -> Vec<String> {
        let region = format!("-{}-", region.replace('/', "-"));
        self.specs.keys().filter(|name| name.contains(&region)).cloned().collect()
    }

    /// Sends SIGKILL, and waits for the end of the process.
    pub(crate) async fn kill(&mut self, name: &str) {
        let mut child = self.running.remove(name).unwrap_or_else(|| panic!("{name} does not run"));
        child.kill().await.unwrap();
    }

    /// Prints an event with its time.
    pub(crate) fn print(&self, event: &str) {
        println!("{:>6.1} s  {event}", self.begun.elapsed().as_secs_f64());
    }

    /// Waits until every gateway uses every region.
    pub(crate) async fn wait_until_healthy(&self) {
        for operations in &self.operations {
            self.wait_until(&format!("{operations} uses all regions"), async || {
                let Ok(response) = self.http.get(format!("{operations}/routes")).send().await else {
                    return false;
                };
                let routes: Value = response.json().await.unwrap_or_default();
                let is_healthy = |region: &&Value| {
                    let has_replica = region["ready"].as_array().is_some_and(|ready| !ready.is_empty());
                    region["health"] == "healthy" && has_replica
                };
                let regions = routes["regions"].as_array().map(Vec::as_slice).unwrap_or_default();
                regions.iter().filter(is_healthy).count() == self.regions
            })
            .await;
        }
    }

    /// Waits for a condition.
    pub(crate) async fn wait_until(&self, description: &str, mut holds: impl AsyncFnMut() -> bool) {
        let begun = Instant::now();
        while !holds().await {
            assert!(begun.elapsed() < TIMEOUT, "timed out: {description}\n{}", self.logs());
            tokio::time::sleep(PERIOD).await;
        }
    }

    /// Returns the ends of all logs.
    pub(crate) fn logs(&self) -> String {
        self.specs
            .keys()
            .map(|name| format!("== {name}\n{}\n", tail(&self.folder(name).join("log"))))
            .collect()
    }
}

/// Returns the last lines of a file.
fn tail(file: &Path) -> String {
    let text = fs::read(file).map(|text| String::from_utf8_lossy(&text).into_owned()).unwrap_or_default();
    let lines: Vec<_> = text.lines().collect();
    lines[lines.len().saturating_sub(12)..].join("\n")
}
