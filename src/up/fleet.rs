//! The local fleet: its processes and links, from the first start to the last stop.

use super::authority::FleetAuthority;
use super::drills::board::DrillBoard;
use super::etcd::EtcdCluster;
use super::fleet_control::{FleetCommand, FleetControl, RegionProcesses};
use super::link::{EmulatedLink, LinkDelays};
use super::plan::FleetPlan;
use super::ports::Ports;
use super::process::{FleetProcess, ProcessSpec};
use super::readiness::{self, ServedRegions};
use super::{Interrupts, control_api};
use anyhow::{Context, Result};
use loadtest::drill::action::ProcessAction;
use regions::id::RegionId;
use rustix::process::Signal;
use scheduler_client::identity_folder::IdentityFolder;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use supervision::Mutex;
use tokio::sync::{Semaphore, mpsc};

/// Maximum time until a process is ready. A replica reads its weights from disk in this time.
const READY_TIMEOUT: Duration = Duration::from_secs(60);
/// Maximum drain time of a process; slightly longer than its own bound.
const STOP_TIMEOUT: Duration = Duration::from_secs(32);

/// Process specifications and addresses of one region.
pub(super) struct PreparedRegion {
    pub(super) region: RegionId,
    pub(super) spokes: Vec<PreparedSpoke>,
    pub(super) delays: LinkDelays,
    pub(super) replicas: Vec<PreparedReplica>,
}

/// Process specification and addresses of one replica.
#[derive(Clone)]
pub(super) struct PreparedReplica {
    pub(super) spec: ProcessSpec,
    pub(super) address: SocketAddr,
    pub(super) operations: SocketAddr,
    /// Deployment by which its metrics are known; `None` if it is scripted, accepts commands at `operations`, and has no
    /// metrics.
    pub(super) deployment: Option<String>,
}

/// Process specification and addresses of one hub.
#[derive(Clone)]
pub(super) struct PreparedHub {
    pub(super) spec: ProcessSpec,
    pub(super) address: SocketAddr,
    pub(super) operations: SocketAddr,
}

/// Process specification and addresses of one gateway.
#[derive(Clone)]
pub(super) struct PreparedGateway {
    pub(super) spec: ProcessSpec,
    /// Region near which it is.
    pub(super) region: RegionId,
    pub(super) address: SocketAddr,
    pub(super) operations: SocketAddr,
}

/// Process specification and addresses of one spoke; gateways reach it over the link.
#[derive(Clone)]
pub(super) struct PreparedSpoke {
    pub(super) spec: ProcessSpec,
    pub(super) address: SocketAddr,
    pub(super) operations: SocketAddr,
    pub(super) link_address: SocketAddr,
}

/// Local fleet, prepared or running.
pub(crate) struct LocalFleet {
    /// etcd cluster of the hubs; `None` with an embedded store.
    pub(super) etcd: Option<EtcdCluster>,
    pub(super) hubs: Vec<PreparedHub>,
    /// Gateways; the first one is near the first region, and has the port of the options.
    pub(super) gateways: Vec<PreparedGateway>,
    /// Certificate that clients must trust, if they use TLS.
    pub(super) certificate: Option<PathBuf>,
    /// File with the webhook secret of the tenant.
    pub(super) webhook_secrets: PathBuf,
    /// File with the targets of a Prometheus that observes the fleet.
    pub(super) targets: PathBuf,
    /// Directory of the hub's embedded store; `None` with etcd.
    pub(super) embedded_data: Option<PathBuf>,
    /// Authority of the identities of all processes.
    pub(super) authority: FleetAuthority,
    pub(super) control: SocketAddr,
    /// Console of the first hub.
    pub(super) console: SocketAddr,
    pub(super) regions: Vec<PreparedRegion>,
    pub(super) ports: Ports,
    /// Running processes in the order of their start.
    pub(super) running: Vec<FleetProcess>,
    pub(super) commands: Option<mpsc::Receiver<FleetCommand>>,
    pub(super) processes: Arc<Mutex<BTreeMap<String, Option<u32>>>>,
    /// Drills that can be started in it, for the control API.
    pub(super) drills: Option<Arc<DrillBoard>>,
    /// Prints progress for the user.
    pub(super) print: fn(&str),
}

impl LocalFleet {
    /// Returns the base URL of each gateway for clients, without `/v1`.
    pub(crate) fn urls(&self) -> Vec<String> {
        let scheme = if self.certificate.is_some() { "https" } else { "http" };
        self.gateways.iter().map(|gateway| format!("{scheme}://{}", gateway.address)).collect()
    }

    /// Returns the region and the operations address of each gateway.
    pub(crate) fn operations(&self) -> Vec<(RegionId, SocketAddr)> {
        self.gateways.iter().map(|gateway| (gateway.region.clone(), gateway.operations)).collect()
    }

    /// Returns the addresses of the hubs.
    pub(crate) fn hubs(&self) -> Vec<SocketAddr> {
        self.hubs.iter().map(|hub| hub.address).collect()
    }

    /// Returns the directory with the identity of the operator.
    pub(crate) fn operator(&self) -> &Path {
        self.authority.operator()
    }

    /// Starts everything, in dependency order.
    pub(crate) async fn start_all(&mut self, plan: &FleetPlan) -> Result<FleetControl> {
        let begun = Instant::now();
        let (members, peers) =
            self.etcd.as_ref().map(|etcd| (etcd.members.clone(), etcd.peers.clone())).unwrap_or_default();
        peers.iter().for_each(|peer| drop(self.ports.take(*peer)));
        for (member, address) in members {
            self.start(member, address, begun).await?;
        }
        if let Some(data) = &self.embedded_data {
            self.authority.replace_former(data).await?;
        }
        drop(self.ports.take(self.console));
        for (number, PreparedHub { spec, address, operations }) in self.hubs.clone().into_iter().enumerate() {
            drop(self.ports.take(self.authority.address(number)));
            drop(self.ports.take(operations));
            self.start(spec, address, begun).await?;
        }
        self.authority.issue_viewer().await?;
        let regions: Vec<_> =
            self.regions.iter().map(|region| (region.spokes.clone(), region.replicas.clone())).collect();
        for (spokes, replicas) in regions {
            for PreparedReplica { spec, address, operations, deployment: _ } in replicas {
                drop(self.ports.take(operations));
                self.start(spec, address, begun).await?;
            }
            for PreparedSpoke { spec, address, operations, link_address: _ } in spokes {
                drop(self.ports.take(operations));
                self.start(spec, address, begun).await?;
            }
        }
        let links = self.open_links()?;
        for PreparedGateway { spec, region: _, address, operations } in self.gateways.clone() {
            drop(self.ports.take(operations));
            self.start(spec, address, begun).await?;
        }
        let (commands, receiver) = mpsc::channel(16);
        self.commands = Some(receiver);
        let socket = self.listener(self.control)?;
        let control = self.control_handle(links, commands)?;
        tokio::spawn(control_api::serve(socket, control.clone(), self.drills.clone()));
        let served = ServedRegions::of(plan);
        for gateway in &self.gateways {
            readiness::until_healthy(gateway.operations, &served).await?;
        }
        Ok(control)
    }

    fn control_handle(
        &self,
        links: Arc<BTreeMap<RegionId, Vec<EmulatedLink>>>,
        commands: mpsc::Sender<FleetCommand>,
    ) -> Result<FleetControl> {
        let processes = |prepared: &PreparedRegion| {
            let replicas = prepared.replicas.iter().map(|replica| {
                (replica.spec.name.clone(), replica.deployment.is_none().then_some(replica.operations))
            });
            let spokes = prepared.spokes.iter().map(|spoke| spoke.spec.name.clone()).collect();
            (prepared.region.clone(), RegionProcesses { spokes, replicas: replicas.collect() })
        };
        let members = self.etcd.iter().flat_map(|etcd| etcd.members.iter().map(|(member, _)| member));
        Ok(FleetControl {
            links,
            commands,
            processes: self.processes.clone(),
            gateways: self.gateways.iter().map(|it| (it.region.clone(), it.spec.name.clone())).collect(),
            region_processes: Arc::new(self.regions.iter().map(processes).collect()),
            hubs: self.hubs.iter().map(|hub| (hub.spec.name.clone(), hub.address)).collect(),
            store: members.map(|member| member.name.clone()).collect(),
            operator: self.operator().to_owned(),
            throttled: Arc::default(),
            paused: Arc::default(),
            turn: Arc::new(Semaphore::new(1)),
        })
    }

    async fn start(&mut self, spec: ProcessSpec, address: SocketAddr, begun: Instant) -> Result<()> {
        drop(self.ports.take(address));
        let name = spec.name.clone();
        self.launch(spec).await?;
        (self.print)(&format!("{:>6.2} s  {name} on {address}", begun.elapsed().as_secs_f64()));
        Ok(())
    }

    async fn launch(&mut self, spec: ProcessSpec) -> Result<()> {
        let joins = spec.member.as_ref().filter(|member| !IdentityFolder::new(&member.dir).has_certificate());
        let token = match joins {
            Some(member) => Some(self.authority.token(member).await?),
            None => None,
        };
        let process = FleetProcess::start(spec, token.as_ref(), READY_TIMEOUT).await?;
        self.set_process_id(&process.spec.name, process.id());
        self.running.push(process);
        Ok(())
    }

    fn set_process_id(&self, name: &str, id: Option<u32>) {
        self.processes.lock().insert(name.to_owned(), id);
    }

    /// Opens a link to each spoke.
    fn open_links(&mut self) -> Result<Arc<BTreeMap<RegionId, Vec<EmulatedLink>>>> {
        let mut links: BTreeMap<RegionId, Vec<EmulatedLink>> = BTreeMap::new();
        let regions: Vec<_> = self
            .regions
            .iter()
            .map(|region| (region.region.clone(), region.spokes.clone(), region.delays.clone()))
            .collect();
        for (region, spokes, delays) in regions {
            for PreparedSpoke { link_address, address, .. } in spokes {
                let socket = self.listener(link_address)?;
                let link = EmulatedLink::open(socket, address, delays.clone());
                links.entry(region.clone()).or_default().push(link);
            }
        }
        Ok(Arc::new(links))
    }

    fn listener(&mut self, address: SocketAddr) -> Result<tokio::net::TcpListener> {
        let socket = self.ports.take(address).context("a reserved port is taken once")?;
        socket.set_nonblocking(true)?;
        Ok(tokio::net::TcpListener::from_std(socket)?)
    }

    /// Reports ended processes and executes commands, until an interrupt.
    pub(crate) async fn watch(&mut self, interrupts: &mut Interrupts) {
        let mut commands = self.commands.take().expect("the fleet was started");
        let mut poll = tokio::time::interval(Duration::from_millis(200));
        loop {
            tokio::select! {
                () = interrupts.next() => return,
                _ = poll.tick() => self.report_ended(),
                Some(command) = commands.recv() => self.command(command).await,
            }
        }
    }

    async fn command(&mut self, command: FleetCommand) {
        self.report_ended();
        // The caller may be gone; the command is executed regardless.
        match command {
            FleetCommand::Process { process, action, done } => {
                done.send(self.execute(&process, action).await).ok();
            }
            FleetCommand::NoteEnded(done) => {
                done.send(()).ok();
            }
        }
    }

    fn report_ended(&mut self) {
        let mut ended = Vec::new();
        self.running.retain_mut(|process| match process.exit_status() {
            None => true,
            Some(status) => {
                ended.push((process.spec.name.clone(), status));
                false
            }
        });
        for (name, status) in ended {
            (self.print)(&format!("{name} ended ({status})"));
            self.set_process_id(&name, None);
        }
    }

    async fn execute(&mut self, name: &str, action: ProcessAction) -> Result<(), String> {
        let spec = self.spec(name).ok_or_else(|| {
            let known: Vec<_> = self.specs().map(|spec| spec.name.as_str()).collect();
            format!("no process '{name}'; the processes are: {}", known.join(", "))
        })?;
        let at = self.running.iter().position(|process| process.spec.name == name);
        let done = match (action, at) {
            (ProcessAction::Pause | ProcessAction::Resume, Some(at)) => {
                let (signal, done) = if action == ProcessAction::Pause {
                    (Signal::STOP, "paused")
                } else {
                    (Signal::CONT, "resumed")
                };
                if !self.running[at].signal(signal) {
                    return Err(format!("{name} has ended"));
                }
                done
            }
            (ProcessAction::Pause | ProcessAction::Resume | ProcessAction::Stop, None) => {
                return Err(format!("{name} is not running; start it first"));
            }
            (ProcessAction::Start, Some(_)) => return Err(format!("{name} is running already; use restart")),
            // Killing an ended process succeeds, because the desired state is reached.
            (ProcessAction::Kill, None) => "not running",
            (ProcessAction::Kill, Some(at)) => {
                let mut process = self.running.remove(at);
                process.kill().await;
                self.set_process_id(name, None);
                "killed"
            }
            (ProcessAction::Stop, Some(at)) => {
                self.running.remove(at).stop(STOP_TIMEOUT).await;
                self.set_process_id(name, None);
                "stopped"
            }
            (ProcessAction::Start, None) => {
                self.launch(spec).await.map_err(|error| error.to_string())?;
                "started"
            }
            (ProcessAction::Restart, Some(at)) if spec.takes_over => {
                let before = self.running.remove(at);
                // A paused process must be resumed to hand over.
                before.signal(Signal::CONT);
                let mut next = spec;
                next.arguments.push("--take-over".to_owned());
                if let Err(error) = self.launch(next).await {
                    // Nothing was handed over, and the old process continues.
                    self.running.push(before);
                    return Err(error.to_string());
                }
                before.wait(STOP_TIMEOUT).await;
                "handed over to a new process"
            }
            (ProcessAction::Restart, at) => {
                if let Some(at) = at {
                    self.running.remove(at).stop(STOP_TIMEOUT).await;
                    self.set_process_id(name, None);
                }
                self.launch(spec).await.map_err(|error| error.to_string())?;
                "restarted"
            }
        };
        (self.print)(&format!("{name} {done}"));
        Ok(())
    }

    fn specs(&self) -> impl Iterator<Item = &ProcessSpec> {
        let regions = self.regions.iter().flat_map(|region| {
            region
                .replicas
                .iter()
                .map(|replica| &replica.spec)
                .chain(region.spokes.iter().map(|spoke| &spoke.spec))
        });
        let members = self.etcd.iter().flat_map(|etcd| etcd.members.iter().map(|(member, _)| member));
        let hubs = self.hubs.iter().map(|hub| &hub.spec);
        let gateways = self.gateways.iter().map(|gateway| &gateway.spec);
        hubs.chain(gateways).chain(regions).chain(members)
    }

    fn spec(&self, name: &str) -> Option<ProcessSpec> {
        self.specs().find(|spec| spec.name == name).cloned()
    }

    /// Drains the fleet, in the order of the request path.
    pub(super) async fn stop(&mut self) {
        let mut stopping = Vec::new();
        for role in ["gateway", "spoke", "replica", "hub", "etcd"] {
            let (now, later): (Vec<_>, Vec<_>) = std::mem::take(&mut self.running)
                .into_iter()
                .partition(|process| process.spec.name.starts_with(role));
            self.running = later;
            stopping.extend(now.into_iter().map(|process| tokio::spawn(process.stop(STOP_TIMEOUT))));
            for stopped in stopping.drain(..) {
                stopped.await.expect("stopping a process does not panic");
            }
        }
    }
}
