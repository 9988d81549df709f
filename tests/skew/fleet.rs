//! Fleet of two versions: a hub with the certificate authority, two regions with two spokes and two replicas each, a gateway. Each
//! process is one of its own, with its identity, its configuration, its data and its log in a folder.
//!
//! The replicas are real ones, of a checkpoint of a few kilobytes: a scripted one would not have the identity of a model. Every
//! process has a loopback address of its own, so that it finds its ports free again after it has ended.

use crate::operator::Operator;
use crate::programs::{ProcessClass, Programs};
use futures_util::future::join_all;
use ring::digest::{SHA256, digest};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};
use tokio::sync::Mutex;

/// Timeout of every wait. The longest expected one is the drain of a gateway (35 s).
pub(crate) const TIMEOUT: Duration = Duration::from_secs(90);
/// Period of checks of a condition.
pub(crate) const PERIOD: Duration = Duration::from_millis(50);
/// API key of the clients.
pub(crate) const KEY: &str = "skew-key";
/// Deployments for the load: each is restricted to the region at its place in [`REGIONS`].
pub(crate) const LOCKED: [&str; 2] = ["in-america", "in-europe"];
/// Deployment without a residency policy, for jobs, and for requests that are explained.
pub(crate) const ANYWHERE: &str = "anywhere";
/// Deployment whose residency policy an operator changes all the time.
pub(crate) const CHANGED: &str = "changed";
/// Texts that the vocabulary of the checkpoint has.
pub(crate) const TEXTS: [&str; 4] =
    ["the sea", "a calm morning by the sea", "two ships", "the ships are at sea again"];

/// Regions, in two jurisdictions.
pub(crate) const REGIONS: [&str; 2] = ["aws/us-east-1", "gcp/europe-west4"];
/// In each region.
const SPOKES: usize = 2;
/// In each region: while one is replaced, the other one serves.
const REPLICAS: usize = 2;
/// Requests that are sent at once so that all replicas are used.
const CONCURRENT_REQUESTS: usize = 32;
/// Requests after which a replica is in use.
const USED_REQUESTS: u64 = 5;
const HUB: &str = "hub";
const GATEWAY: &str = "gateway";

/// Ports, the same at every address.
const PORT: u16 = 7100;
const OPERATIONS: u16 = 7101;
const AUTHORITY: u16 = 7102;

/// Locks that a client holds while it depends on a process of which there is only one.
#[derive(Default)]
pub(crate) struct ReplacementLocks {
    /// The hub: commands of operators fail while it is replaced.
    pub(crate) hub: Mutex<()>,
    /// The gateway: an explanation of the former process may be gone with it.
    pub(crate) gateway: Mutex<()>,
}

struct ProcessSpec {
    class: ProcessClass,
    /// Role of its certificate, and region.
    role: &'static str,
    region: &'static str,
    operations: SocketAddr,
}

/// Running fleet; its processes are killed when it is dropped.
pub(crate) struct Fleet {
    running: BTreeMap<String, Child>,
    specs: BTreeMap<String, ProcessSpec>,
    programs: Programs,
    hub: IpAddr,
    gateway: IpAddr,
    http: reqwest::Client,
    operator: Operator,
    locks: Arc<ReplacementLocks>,
    begun: Instant,
    dir: tempfile::TempDir,
}

/// Loopback addresses that no other process of this test uses.
struct Addresses {
    next: u8,
    fleet: u8,
}

impl Addresses {
    fn new() -> Addresses {
        static FLEETS: AtomicU8 = AtomicU8::new(0);
        Addresses { next: 1, fleet: FLEETS.fetch_add(1, Ordering::Relaxed) }
    }

    fn next(&mut self) -> IpAddr {
        self.next += 1;
        // 127.64.0.0 to 127.127.255.255, by the process and its fleets: two test runs do not meet.
        let [_, _, high, low] = std::process::id().to_be_bytes();
        IpAddr::V4(Ipv4Addr::new(127, 64 + (high ^ self.fleet) % 64, low, self.next))
    }
}

/// Returns the text of the deployments file, with or without a residency policy of [`CHANGED`].
pub(crate) fn deployments(is_changed_locked: bool) -> String {
    let policies = [
        (LOCKED[0], Some("us")),
        (LOCKED[1], Some("eu")),
        (ANYWHERE, None),
        (CHANGED, is_changed_locked.then_some("eu")),
    ];
    let mut text = String::new();
    for (name, policy) in policies {
        write!(
            text,
            "[[deployment]]\nname = '{name}'\ntask = 'embed'\nmodel = '{}'\n\
             engine = {{ kind = 'cpu', precision = 'f32' }}\n",
            checkpoint().display()
        )
        .unwrap();
        if let Some(policy) = policy {
            writeln!(text, "residency = {{ allow = ['{policy}'] }}").unwrap();
        }
    }
    text
}

/// Returns the checkpoint of all deployments.
fn checkpoint() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("replica/tests/golden/families/bert")
}

/// Returns the name of a process of a region, counted from 1.
fn regional(role: &str, region: &str, number: usize) -> String {
    format!("{role}-{}-{number}", region.replace('/', "-"))
}

impl Fleet {
    /// Starts all processes, and waits until the gateway uses all of them. Must be called on the thread of the test: a child
    /// ends with the thread that started it.
    pub(crate) async fn start(programs: Programs) -> Fleet {
        let mut addresses = Addresses::new();
        let (hub, gateway) = (addresses.next(), addresses.next());
        let dir = tempfile::tempdir().unwrap();
        let http = reqwest::Client::builder().no_proxy().pool_max_idle_per_host(0).timeout(TIMEOUT);
        let operator = Operator::new(
            programs.of(ProcessClass::Operator),
            dir.path(),
            &format!("https://{}", SocketAddr::new(hub, PORT)),
        );
        let mut fleet = Fleet {
            running: BTreeMap::new(),
            specs: BTreeMap::new(),
            programs,
            hub,
            gateway,
            http: http.build().unwrap(),
            operator,
            locks: Arc::default(),
            begun: Instant::now(),
            dir,
        };
        fleet.start_hub().await;
        for region in REGIONS {
            let replicas: Vec<IpAddr> = (0..REPLICAS).map(|_| addresses.next()).collect();
            for (address, number) in replicas.iter().zip(1..) {
                fleet.add_replica(region, number, *address);
            }
            for number in 1..=SPOKES {
                fleet.add_spoke(region, number, addresses.next(), &replicas);
            }
        }
        fleet.add_gateway();
        for class in [ProcessClass::Replica, ProcessClass::Spoke, ProcessClass::Gateway] {
            for name in fleet.names(class) {
                fleet.join(&name).await;
            }
        }
        fleet.wait_until_healthy().await;
        for name in LOCKED.into_iter().chain([ANYWHERE, CHANGED]) {
            fleet.wait_until(&format!("{name} is served"), async || fleet.is_served(name).await).await;
        }
        fleet
    }

    /// Creates the authority, starts the hub, and applies deployments and a tenant.
    async fn start_hub(&mut self) {
        let authority = SocketAddr::new(self.hub, AUTHORITY).to_string();
        let mut init = std::process::Command::new(self.programs.of(ProcessClass::Hub));
        init.args(["pki", "init", "--dir", "pki", "--trust-domain", "skew.test", "--region", REGIONS[0]]);
        init.args(["--authority", &authority]).current_dir(self.dir.path());
        let output = init.output().unwrap();
        assert!(output.status.success(), "pki init: {}", String::from_utf8_lossy(&output.stderr));
        let pki = self.dir.path().join("pki");
        let text = format!(
            "listen = '{}'\noperations = '{}'\ndata = 'data'\n[identity]\ndir = {:?}\n\
             [authority]\nlisten = '{authority}'\ndir = {:?}\n",
            SocketAddr::new(self.hub, PORT),
            SocketAddr::new(self.hub, OPERATIONS),
            pki.join("hub"),
            pki.join("authority"),
        );
        self.add(HUB, ProcessClass::Hub, ("hub", REGIONS[0]), self.hub, &text);
        self.start_process(HUB, None).await;
        self.wait_until_hub_is_ready().await;
        // The hub starts its authority after its listener.
        let operator = self.operator.clone();
        self.wait_until("the authority responds", async || operator.run(&["pki", "list"]).await.is_ok())
            .await;
        let key = digest(&SHA256, KEY.as_bytes());
        let key: String = key.as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
        self.write(
            ".",
            "tenants.toml",
            &format!(
                "[[tenant]]\nname = 'skew'\nkey_sha256 = ['{key}']\nlimits = {{ requests_per_second = 100000 }}\n"
            ),
        );
        self.write(".", "deployments.toml", &deployments(false));
        self.write(".", "texts.txt", &TEXTS.join("\n"));
        operator.run(&["apply", "--yes", "deployments.toml", "tenants.toml"]).await.unwrap();
    }

    fn add_replica(&mut self, region: &'static str, number: usize, address: IpAddr) {
        let names = [LOCKED[usize::from(region == REGIONS[1])], ANYWHERE, CHANGED];
        let text = format!(
            "listen = '{}'\noperations = '{}'\nnames = {names:?}\nmodel = {:?}\ncache = 'cache'\n\
             engine = {{ kind = 'cpu', precision = 'f32' }}\n[identity]\ndir = 'identity'\n\
             [threads]\ntokenizer = 1\nengine = 1\n",
            SocketAddr::new(address, PORT),
            SocketAddr::new(address, OPERATIONS),
            checkpoint(),
        );
        let name = regional("replica", region, number);
        self.add(&name, ProcessClass::Replica, ("replica", region), address, &text);
    }

    fn add_spoke(&mut self, region: &'static str, number: usize, address: IpAddr, replicas: &[IpAddr]) {
        let (listen, operations) = (SocketAddr::new(address, PORT), SocketAddr::new(address, OPERATIONS));
        let mut text = format!(
            "region = '{region}'\ninstance = 'spoke-{number}'\nlisten = '{listen}'\nadvertise = '{listen}'\n\
             operations = '{operations}'\nhub = '{}'\n[identity]\ndir = 'identity'\n",
            self.operator.hub()
        );
        // A queue in a file has one spoke.
        if number == 1 {
            text.push_str("[jobs]\ndir = 'jobs'\n");
        }
        for replica in replicas {
            writeln!(text, "[[replica]]\nendpoint = '{}'", SocketAddr::new(*replica, PORT)).unwrap();
        }
        let name = regional("spoke", region, number);
        self.add(&name, ProcessClass::Spoke, ("spoke", region), address, &text);
    }

    fn add_gateway(&mut self) {
        let text = format!(
            "listen = '{}'\noperations = '{}'\nregion = '{}'\nhub = '{}'\nsnapshot = 'routes'\n\
             handover = 'handover'\n[identity]\ndir = 'identity'\n[timeouts]\nlame_duck = '0s'\n\
             [explanations]\ndir = 'explanations'\nsample_ratio = 1.0\n",
            SocketAddr::new(self.gateway, PORT),
            SocketAddr::new(self.gateway, OPERATIONS),
            REGIONS[0],
            self.operator.hub(),
        );
        self.add(GATEWAY, ProcessClass::Gateway, ("gateway", REGIONS[0]), self.gateway, &text);
    }

    /// Adds a process, and writes its configuration.
    fn add(
        &mut self,
        name: &str,
        class: ProcessClass,
        (role, region): (&'static str, &'static str),
        address: IpAddr,
        text: &str,
    ) {
        self.write(name, "config.toml", text);
        let operations = SocketAddr::new(address, OPERATIONS);
        self.specs.insert(name.to_owned(), ProcessSpec { class, role, region, operations });
    }

    fn write(&self, folder: &str, file: &str, text: &str) {
        let folder = self.dir.path().join(folder);
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join(file), text).unwrap();
    }

    /// Returns the names of the processes of a class.
    fn names(&self, class: ProcessClass) -> Vec<String> {
        let of_class = self.specs.iter().filter(|(_, spec)| spec.class == class);
        of_class.map(|(name, _)| name.clone()).collect()
    }

    /// Starts a process for the first time, with a join token.
    async fn join(&mut self, name: &str) {
        let ProcessSpec { role, region, .. } = self.specs[name];
        let token = self.operator.run(&["pki", "token", "--role", role, "--region", region]).await.unwrap();
        self.start_process(name, Some(token.trim())).await;
    }

    async fn start_process(&mut self, name: &str, token: Option<&str>) {
        let child = self.try_start(name, token, &[]).await;
        self.running.insert(name.to_owned(), child.unwrap_or_else(|log| panic!("{name} has ended: {log}")));
    }

    /// Starts a process and waits until it is ready. The error is the end of its log.
    async fn try_start(&self, name: &str, token: Option<&str>, more: &[&str]) -> Result<Child, String> {
        let ProcessSpec { class, role, .. } = &self.specs[name];
        let folder = self.dir.path().join(name);
        let log = folder.join("log");
        let file = File::options().create(true).append(true).open(&log).unwrap();
        let mut command = Command::new(self.programs.of(*class));
        command.arg(role).arg("--config").arg(folder.join("config.toml")).args(more).current_dir(&folder);
        // The process ends with this one.
        command.env("MERIDIAN_PARENT_PID", std::process::id().to_string());
        command.envs(token.map(|token| ("MERIDIAN_JOIN_TOKEN", token)));
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
        if tokio::time::timeout(TIMEOUT, ready).await != Ok(true) {
            return Err(tail(&log));
        }
        // Its further output is read until its end, so that the pipe stays open.
        tokio::spawn(async move { while let Ok(Some(_)) = lines.next_line().await {} });
        Ok(child)
    }

    /// Sends SIGTERM to a process, and waits for its end.
    async fn stop(&mut self, name: &str) {
        let child = self.running.remove(name).unwrap_or_else(|| panic!("{name} does not run"));
        let id = child.id().unwrap_or_else(|| panic!("{name} has ended: {}", self.log(name)));
        let pid = Pid::from_raw(id.try_into().unwrap()).unwrap();
        kill_process(pid, Signal::TERM).unwrap();
        self.wait_for_end(name, child).await;
    }

    async fn wait_for_end(&self, name: &str, mut child: Child) {
        let ended = tokio::time::timeout(TIMEOUT, child.wait()).await;
        let status = ended.unwrap_or_else(|_| panic!("{name} does not end: {}", self.log(name))).unwrap();
        assert!(status.success(), "{name} has ended with {status}: {}", self.log(name));
    }

    /// Replaces all processes of the class by those of another program, in the order of docs/deploy/upgrade.md. Returns an
    /// exception that the documentation permits, if there was one.
    pub(crate) async fn replace(&mut self, program: &Path) -> Option<&'static str> {
        let class = self.programs.class;
        let former = std::mem::replace(&mut self.programs.of_class, program.to_owned());
        let locks = self.locks.clone();
        match class {
            ProcessClass::Operator => self.operator.set_program(program),
            ProcessClass::Hub => {
                let _lock = locks.hub.lock().await;
                let exception = self.replace_hub(former).await;
                self.wait_until_hub_is_ready().await;
                return exception;
            }
            ProcessClass::Gateway => {
                let _lock = locks.gateway.lock().await;
                self.print("the gateway is replaced");
                let next = self.try_start(GATEWAY, None, &["--take-over"]).await;
                let next = next.unwrap_or_else(|log| panic!("the next gateway has ended: {log}"));
                let before = self.running.insert(GATEWAY.to_owned(), next).unwrap();
                self.wait_for_end(GATEWAY, before).await;
            }
            ProcessClass::Spoke | ProcessClass::Replica => {
                for name in self.names(class) {
                    self.print(&format!("{name} is replaced"));
                    self.stop(&name).await;
                    self.start_process(&name, None).await;
                    self.wait_until_healthy().await;
                    if class == ProcessClass::Replica {
                        self.wait_until_used(&name).await;
                    }
                }
            }
        }
        None
    }

    /// Replaces the hub. An earlier one may reject the store of a later one; then the later one is started again.
    async fn replace_hub(&mut self, former: PathBuf) -> Option<&'static str> {
        self.print("the hub is replaced");
        self.stop(HUB).await;
        match self.try_start(HUB, None, &[]).await {
            Ok(child) => {
                self.running.insert(HUB.to_owned(), child);
                None
            }
            Err(log) if log.contains("reads format") => {
                self.programs.of_class = former;
                self.start_process(HUB, None).await;
                Some("the store has a later format, which the earlier hub rejects")
            }
            Err(log) => panic!("the hub has ended: {log}"),
        }
    }

    async fn wait_until_hub_is_ready(&self) {
        let url = format!("http://{}/readyz", self.specs[HUB].operations);
        self.wait_until("the hub is ready", async || {
            self.http.get(&url).send().await.is_ok_and(|response| response.status() == 200)
        })
        .await;
    }

    /// Waits until the gateway uses all spokes of all regions.
    async fn wait_until_healthy(&self) {
        self.wait_until("the gateway uses all spokes", async || {
            let routes = self.get(GATEWAY, "/routes").await;
            let regions = routes["regions"].as_array().map(Vec::as_slice).unwrap_or_default();
            regions.len() == REGIONS.len() && regions.iter().all(is_healthy)
        })
        .await;
    }

    /// Waits until a replica has computed some requests since its start: the spokes of its region use it. Requests are sent at once in
    /// the meantime, because an idle region sends them one after another to the same replica.
    async fn wait_until_used(&self, replica: &str) {
        self.wait_until(&format!("{replica} is used"), async || {
            let requests = LOCKED.iter().cycle().take(CONCURRENT_REQUESTS);
            join_all(requests.map(|deployment| self.is_served(deployment))).await;
            let status = self.get(replica, "/status").await;
            status["requests_total"].as_u64().is_some_and(|requests| requests >= USED_REQUESTS)
        })
        .await;
    }

    /// Returns whether a request to a deployment succeeds.
    async fn is_served(&self, deployment: &str) -> bool {
        let body = json!({"model": deployment, "input": TEXTS}).to_string();
        let request = self.http.post(format!("{}/v1/embeddings", self.url())).bearer_auth(KEY).body(body);
        request.send().await.is_ok_and(|response| response.status() == 200)
    }

    /// Returns the JSON of a response of an operations port; null without one.
    async fn get(&self, name: &str, path: &str) -> Value {
        let url = format!("http://{}{path}", self.specs[name].operations);
        let Ok(response) = self.http.get(url).send().await else { return Value::Null };
        response.json().await.unwrap_or_default()
    }

    /// Waits for a condition.
    async fn wait_until(&self, description: &str, mut holds: impl AsyncFnMut() -> bool) {
        let begun = Instant::now();
        while !holds().await {
            assert!(begun.elapsed() < TIMEOUT, "timed out: {description}\n{}", self.logs());
            tokio::time::sleep(PERIOD).await;
        }
    }

    /// Prints an event with its time.
    fn print(&self, event: &str) {
        println!("{:>6.1} s  {event}", self.begun.elapsed().as_secs_f64());
    }

    fn log(&self, name: &str) -> String {
        tail(&self.dir.path().join(name).join("log"))
    }

    /// Returns the ends of all logs.
    pub(crate) fn logs(&self) -> String {
        self.specs.keys().map(|name| format!("== {name}\n{}\n", self.log(name))).collect()
    }

    /// Returns the URL for clients.
    pub(crate) fn url(&self) -> String {
        format!("http://{}", SocketAddr::new(self.gateway, PORT))
    }

    /// Returns the URL of the gateway's operations port.
    pub(crate) fn operations(&self) -> String {
        format!("http://{}", SocketAddr::new(self.gateway, OPERATIONS))
    }

    /// Returns the operator of the fleet.
    pub(crate) fn operator(&self) -> &Operator {
        &self.operator
    }

    /// Returns the locks that clients hold.
    pub(crate) fn locks(&self) -> &Arc<ReplacementLocks> {
        &self.locks
    }

    /// Returns the directory of the fleet, which has the files of the operator.
    pub(crate) fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Returns the client for requests without kept connections.
    pub(crate) fn http(&self) -> &reqwest::Client {
        &self.http
    }
}

/// Returns whether the gateway uses all spokes of a region, for a row of its `/routes`.
fn is_healthy(region: &Value) -> bool {
    let instances = region["instances"].as_array().map(Vec::as_slice).unwrap_or_default();
    let is_usable =
        |it: &Value| it["health"] == "healthy" && it["draining"] == false && it["circuit"] == "closed";
    region["health"] == "healthy"
        && region["ready"].as_array().is_some_and(|ready| !ready.is_empty())
        && instances.len() == SPOKES
        && instances.iter().all(is_usable)
}

/// Returns the last lines of a file.
fn tail(file: &Path) -> String {
    let text = fs::read(file).map(|text| String::from_utf8_lossy(&text).into_owned()).unwrap_or_default();
    let lines: Vec<_> = text.lines().collect();
    lines[lines.len().saturating_sub(12)..].join("\n")
}
