//! Fleet on machines of its own: etcd with TLS, hubs, regions with spokes and replicas, gateways, HAProxy.
//!
//! ```text
//!  client ─▶ HAProxy ─▶ 2 gateways ─▶ 2 spokes ─▶ 2 replicas     in each of 3 regions, 2 jurisdictions
//!                           │             │
//!                           └──▶ 2 hubs ◀─┘ ─▶ 3 etcd members
//! ```
//!
//! Everything is configured with names, and every process has a machine ([`crate::network`]) of its own. The first hub
//! is the certificate authority (`meridian pki init`); all other processes join with a token.

use crate::files::{self, FleetFiles, GATEWAY_REGIONS, HUBS, MEMBERS, REGIONS, REPLICAS, SPOKES, port};
use crate::network::{self, Network, host};
use crate::process::{FleetProcess, ProcessSpec, wait_until};
use rustix::process::Signal;
use serde_json::Value;
use std::fs;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::time::{Duration, Instant};

/// Machine of the clients and operators. The thread that creates a fleet moves there.
pub(crate) const CLIENT: &str = "client";

/// Running fleet. The processes end first, then the machines are removed.
pub(crate) struct Fleet {
    processes: Vec<FleetProcess>,
    network: Network,
    meridian: PathBuf,
    dir: tempfile::TempDir,
    http: reqwest::Client,
    begun: Instant,
}

impl Fleet {
    /// Creates the machines and starts all processes of this binary; returns when every gateway uses every region.
    ///
    /// # Errors
    ///
    /// Reason why this machine cannot create network namespaces.
    pub(crate) async fn start(meridian: &Path) -> Result<Fleet, String> {
        let regional = |kind: fn(&str, usize) -> String, count: usize| {
            REGIONS.iter().flat_map(move |region| (1..=count).map(move |number| kind(region, number)))
        };
        let machines: Vec<String> = [CLIENT, files::BALANCER]
            .map(str::to_owned)
            .into_iter()
            .chain((1..=MEMBERS).map(files::member))
            .chain((1..=HUBS).map(files::hub))
            .chain(regional(files::replica, REPLICAS))
            .chain(regional(files::spoke, SPOKES))
            .chain((1..=GATEWAY_REGIONS.len()).map(files::gateway))
            .collect();
        let network = Network::create(&machines)?;
        network::enter(CLIENT);
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("logs")).unwrap();
        let http = reqwest::Client::builder().no_proxy().timeout(Duration::from_secs(2)).build().unwrap();
        let (processes, meridian, begun) = (Vec::new(), meridian.to_owned(), Instant::now());
        let mut fleet = Fleet { processes, network, meridian, dir, http, begun };
        fleet.start_all().await;
        Ok(fleet)
    }

    /// Returns the time since the start of the fleet, in seconds.
    pub(crate) fn seconds(&self) -> f64 {
        self.begun.elapsed().as_secs_f64()
    }

    /// Prints an event with its time.
    pub(crate) fn print(&self, event: &str) {
        println!("{:>6.1} s  {event}", self.seconds());
    }

    async fn start_all(&mut self) {
        self.files().etcd_certificates();
        // The members need each other to be ready.
        self.start_and_wait((1..=MEMBERS).map(|number| self.files().etcd(number)).collect()).await;
        let domain = ["pki", "init", "--dir", "pki", "--trust-domain", "fleet.test", "--region", REGIONS[0]];
        let authorities =
            (1..=HUBS).map(|number| format!("{}:{}", host(&files::hub(number)), port::AUTHORITY));
        let authorities: Vec<_> = authorities.flat_map(|it| ["--authority".to_owned(), it]).collect();
        self.operate(&[&domain.map(str::to_owned)[..], &authorities].concat());
        self.start_and_wait(vec![self.files().hub(1)]).await;
        wait_until("the authority responds", async || self.run(&["pki", "list"]).status.success()).await;
        for number in 2..=HUBS {
            self.copy_authority(number);
            let hub = self.joining("hub", REGIONS[0], self.files().hub(number));
            self.start_and_wait(vec![hub]).await;
        }
        for region in REGIONS {
            let replicas = (1..=REPLICAS).map(|number| self.files().replica(region, number));
            let replicas = replicas.map(|replica| self.joining("replica", region, replica)).collect();
            self.start_and_wait(replicas).await;
            let spokes = (1..=SPOKES).map(|number| self.files().spoke(region, number));
            let spokes = spokes.map(|spoke| self.joining("spoke", region, spoke)).collect();
            self.start_and_wait(spokes).await;
        }
        let gateways = GATEWAY_REGIONS.iter().zip(1..);
        let gateways = gateways.map(|(region, number)| (*region, self.files().gateway(number)));
        let gateways = gateways.map(|(region, spec)| self.joining("gateway", region, spec)).collect();
        self.start_and_wait(gateways).await;
        self.start_and_wait(vec![self.files().haproxy()]).await;
        self.wait_until_healthy().await;
    }

    fn files(&self) -> FleetFiles<'_> {
        FleetFiles { dir: self.dir.path(), network: &self.network }
    }

    /// Adds a new join token to the arguments of a process. A restarted process has a certificate and ignores it.
    fn joining(&self, role: &str, region: &str, mut spec: ProcessSpec) -> ProcessSpec {
        let token = self.operate(&["pki", "token", "--role", role, "--region", region].map(str::to_owned));
        spec.arguments.extend(["--join".to_owned(), token.trim().to_owned()]);
        spec
    }

    /// Starts processes, and waits until all of them are ready.
    async fn start_and_wait(&mut self, specs: Vec<ProcessSpec>) {
        let first = self.processes.len();
        for spec in specs {
            self.processes.push(FleetProcess::start(spec, &self.meridian, self.dir.path()));
        }
        for at in first..self.processes.len() {
            self.wait_until_ready(at).await;
        }
    }

    async fn wait_until_ready(&mut self, at: usize) {
        let process = &mut self.processes[at];
        let (name, url) = (process.spec.name.clone(), process.spec.ready.clone());
        let log = crate::process::log(self.dir.path(), &name);
        let http = &self.http;
        wait_until(&format!("{name} is ready: {url}"), async || {
            if let Some(status) = process.ended() {
                panic!("{name} ended ({status}): {}", fs::read_to_string(&log).unwrap_or_default());
            }
            http.get(&url).send().await.is_ok_and(|response| response.status() == 200)
        })
        .await;
    }

    /// Waits until all members of the store are healthy, the gateways use all spokes, and HAProxy uses all gateways.
    pub(crate) async fn wait_until_healthy(&self) {
        for machine in (1..=MEMBERS).map(files::member) {
            let member = async || {
                self.get(&machine, port::ETCD_OPERATIONS, "/health").await.contains("\"health\":\"true\"")
            };
            wait_until(&format!("{machine} is healthy"), member).await;
        }
        for machine in (1..=GATEWAY_REGIONS.len()).map(files::gateway) {
            wait_until(&format!("{machine} uses all regions"), async || {
                let routes = self.get(&machine, port::GATEWAY_OPERATIONS, "/routes").await;
                let routes: Value = serde_json::from_str(&routes).unwrap_or_default();
                let regions = routes["regions"].as_array().map(Vec::as_slice).unwrap_or_default();
                regions.len() == REGIONS.len() && regions.iter().all(is_healthy)
            })
            .await;
            let is_up = async || self.haproxy("gateways", &machine, "status").await == "UP";
            wait_until(&format!("HAProxy uses {machine}"), is_up).await;
        }
    }

    /// Returns the body of a response of a machine; empty without one.
    async fn get(&self, machine: &str, port: u16, path: &str) -> String {
        let url = format!("http://{}:{port}{path}", self.network.address(machine));
        let Ok(response) = self.http.get(url).send().await else { return String::new() };
        response.text().await.unwrap_or_default()
    }

    /// Returns a column of HAProxy's statistics.
    async fn haproxy(&self, proxy: &str, server: &str, column: &str) -> String {
        let table = self.get(files::BALANCER, port::HAPROXY_OPERATIONS, "/;csv").await;
        let mut lines =
            table.lines().map(|line| line.trim_start_matches("# ").split(',').collect::<Vec<_>>());
        let at = lines.next().and_then(|names| names.iter().position(|name| *name == column));
        let row = lines.find(|row| row.starts_with(&[proxy, server]));
        row.zip(at).and_then(|(row, at)| row.get(at).copied()).unwrap_or_default().to_owned()
    }

    /// Returns a number of HAProxy's statistics.
    async fn count(&self, proxy: &str, server: &str, column: &str) -> u64 {
        let mut count = None;
        wait_until("HAProxy returns its statistics", async || {
            count = self.haproxy(proxy, server, column).await.parse().ok();
            count.is_some()
        })
        .await;
        count.expect("the condition holds")
    }

    /// Waits until HAProxy has received this number of further requests.
    pub(crate) async fn wait_for_requests(&self, more: u64) {
        let requests = async || self.count("clients", "FRONTEND", "req_tot").await;
        let first = requests().await;
        wait_until("requests arrive", async || requests().await >= first + more).await;
    }

    /// Returns the number of attempts that HAProxy has repeated, at the same gateway or another one.
    pub(crate) async fn repeated(&self) -> u64 {
        self.count("gateways", "BACKEND", "wretr").await + self.count("gateways", "BACKEND", "wredis").await
    }

    /// Returns the machine of the process that has this line in its metrics.
    async fn find(&self, machines: impl Iterator<Item = String>, port: u16, line: &str) -> String {
        let machines: Vec<_> = machines.collect();
        let mut found = None;
        wait_until(&format!("a process has {line}"), async || {
            for machine in &machines {
                if self.get(machine, port, "/metrics").await.lines().any(|it| it == line) {
                    found = Some(machine.clone());
                }
            }
            found.is_some()
        })
        .await;
        found.expect("the condition holds")
    }

    /// Returns the machine of the leading hub.
    pub(crate) async fn leading_hub(&self) -> String {
        self.find((1..=HUBS).map(files::hub), port::HUB_OPERATIONS, "meridian_hub_leader 1").await
    }

    /// Returns the machine of the leading etcd member.
    pub(crate) async fn leading_member(&self) -> String {
        let line = "etcd_server_is_leader 1";
        self.find((1..=MEMBERS).map(files::member), port::ETCD_OPERATIONS, line).await
    }

    /// Returns the names and process ids of all processes.
    pub(crate) fn processes(&self) -> impl Iterator<Item = (&str, u32)> {
        self.processes.iter().map(|process| (process.spec.name.as_str(), process.id()))
    }

    fn at(&self, name: &str) -> usize {
        self.processes.iter().position(|process| process.spec.name == name).expect("a process of the fleet")
    }

    /// Ends a process with this signal, and waits for its end.
    pub(crate) async fn end(&mut self, name: &str, signal: Signal) {
        let at = self.at(name);
        let signal_name = if signal == Signal::KILL { "SIGKILL" } else { "SIGTERM" };
        self.print(&format!("{signal_name} to {name}"));
        self.processes[at].end(signal).await;
        self.print(&format!("{name} has ended"));
    }

    /// Waits until a replica has computed some requests since its start: the spokes of its region use it.
    pub(crate) async fn wait_until_used(&self, replica: &str) {
        wait_until(&format!("{replica} is used"), async || {
            let status = self.get(replica, port::REPLICA_OPERATIONS, "/status").await;
            let status: Value = serde_json::from_str(&status).unwrap_or_default();
            status["requests_total"].as_u64().is_some_and(|requests| requests >= 10)
        })
        .await;
    }

    /// Starts an ended process again, and waits until it is ready.
    pub(crate) async fn start_again(&mut self, name: &str) {
        let at = self.at(name);
        let spec = self.processes[at].spec.clone();
        self.processes[at] = FleetProcess::start(spec, &self.meridian, self.dir.path());
        self.wait_until_ready(at).await;
    }

    /// Returns the processes that have ended.
    pub(crate) fn ended(&mut self) -> Vec<(String, ExitStatus)> {
        let processes = self.processes.iter_mut();
        processes.filter_map(|it| Some((it.spec.name.clone(), it.ended()?))).collect()
    }

    /// Returns a command of `meridian` on the machine of the clients, with the identity of the operator.
    pub(crate) fn meridian(&self) -> Command {
        let mut command = network::command(CLIENT, &self.meridian);
        command.current_dir(self.dir.path()).env("MERIDIAN_IDENTITY", "pki/operator");
        command
    }

    /// Runs `meridian` as the operator.
    pub(crate) fn run(&self, arguments: &[&str]) -> std::process::Output {
        self.meridian().args(arguments).output().unwrap()
    }

    /// Runs `meridian` as the operator; returns its output.
    fn operate(&self, arguments: &[String]) -> String {
        let arguments: Vec<_> = arguments.iter().map(String::as_str).collect();
        let output = self.run(&arguments);
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    /// Copies the files of the authority from the first hub to another one.
    pub(crate) fn copy_authority(&self, number: usize) {
        let [from, to] = [1, number].map(|hub| self.dir.path().join(files::authority(hub)));
        fs::create_dir_all(&to).unwrap();
        for entry in fs::read_dir(from).unwrap() {
            let entry = entry.unwrap();
            fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
        }
    }

    /// Returns the certificate of every process that has one, with its name.
    pub(crate) fn certificates(&self) -> Vec<(String, String)> {
        let hubs = (1..=HUBS).map(|number| (files::hub(number), files::hub_identity(number)));
        let others = self.processes().map(|(name, _)| name).filter(|it| !it.starts_with("hub-"));
        let others = others.map(|name| (name.to_owned(), format!("identities/{name}")));
        let certificate = |(name, folder): (String, String)| {
            let file = self.dir.path().join(folder).join("certificate.pem");
            Some((name, fs::read_to_string(file).ok()?))
        };
        hubs.chain(others).filter_map(certificate).collect()
    }

    /// Returns the address of a machine.
    pub(crate) fn address(&self, machine: &str) -> Ipv4Addr {
        self.network.address(machine)
    }

    /// Returns the URL for clients.
    pub(crate) fn url(&self) -> String {
        format!("http://{}:{}", host(files::BALANCER), port::HTTP)
    }

    /// Returns the directory with configurations, identities and logs.
    pub(crate) fn dir(&self) -> &Path {
        self.dir.path()
    }
}

/// Returns whether a gateway uses all spokes of a region, for a row of its `/routes`.
fn is_healthy(region: &Value) -> bool {
    let instances = region["instances"].as_array().map(Vec::as_slice).unwrap_or_default();
    let is_usable =
        |it: &Value| it["health"] == "healthy" && it["draining"] == false && it["circuit"] == "closed";
    region["health"] == "healthy"
        && region["ready"].as_array().is_some_and(|ready| !ready.is_empty())
        && instances.len() == SPOKES
        && instances.iter().all(is_usable)
}
