//! Actuator with replicas as processes on the spoke's machine.
//!
//! Each has a port of its own, a readable configuration with which it can be started by hand, a log, a process group of
//! its own (so that Ctrl-C reaches only the spoke, which stops the replicas in order), and a record by which the next
//! spoke finds it ([`record`]). They do not end with a killed spoke, because loading a replica can take a minute, and a
//! spoke restarts in a second. If the spoke does not restart, they end by themselves ([`crate::heartbeat`]).
//!
//! Where devices are configured, each replica has one of its own ([`scheduler_core::scale::devices`]), and there are at most as many
//! replicas as devices.
//!
//! A replica that crashes is restarted, at once the first time and then with growing delays
//! ([`scheduler_core::scale::restarts`]).

mod devices;
mod monitor;
mod record;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant};

use identity::{IdentityFiles, Transport};
use regions::{Deployment, DeploymentName, RegionId};
use replica_api::start_failure::{StartFailure, StartFailureReport};
use rustix::process::Pid;
use scheduler_api::peer::SPOKE_REPLICAS_MAX;
use scheduler_client::readiness::ReadinessProber;
use scheduler_core::scale::devices::{Device, DeviceAssignment, DevicesInUse};
use scheduler_core::scale::restarts::RestartBackoff;
use scheduler_core::scale::start_failures::EndedStart;
use tokio::io::{AsyncReadExt, AsyncSeekExt};
use tokio::process::Command;
use tokio::sync::{Notify, mpsc, oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval, sleep_until};

use super::{
    Actuator, ActuatorStatus, Crashes, DeploymentTarget, DeploymentTargets, EndedStarts, ModelKey,
    ReadyEndpoint, ReplicaId, RunningReplica, model_key,
};
use crate::config::ProcessConfig;
use crate::heartbeat::{self, HeartbeatFile};
use crate::scaling::events::{ReplicaAdopted, ReplicaExited, ReplicaStartFailed, ReplicaStarted};
use crate::{JOIN_TOKEN_VARIABLE, NOTIFY_SOCKET_VARIABLE};
use monitor::{MonitorContext, ProcessExit, ProcessMonitor, ReportSender, StartTime};
use record::{AdoptedProcess, ProcessStart, ReplicaFiles};

/// Bytes of the end of a replica's log that the reason of a failed start may have, and lines.
const LOG_END_BYTES: u64 = 384;
const LOG_END_LINES: usize = 3;

/// Actuator that starts and stops processes.
pub(crate) struct ProcessActuator {
    config: ProcessConfig,
    dir: PathBuf,
    region: RegionId,
    program: PathBuf,
    prober: ReadinessProber,
    /// Identity folder of the replicas, if they use TLS and their template has none.
    identity: Option<PathBuf>,
    /// Devices of the replicas; `None` if they share all of the machine.
    devices: Option<Vec<Device>>,
}

/// Running replica process.
struct ReplicaProcess {
    info: ProcessInfo,
    since: Instant,
    ready: Option<(ReadyEndpoint, Instant)>,
    /// Expected end of the download of its model, if it reports one.
    download_ends_at: watch::Receiver<Option<Instant>>,
    /// It waits for another process that pulls its model.
    waits_for_pull: watch::Receiver<bool>,
    /// Failure that it reports while it is not ready.
    failure: watch::Receiver<Option<StartFailureReport>>,
    /// `None` once the stop was requested.
    stop: Option<oneshot::Sender<()>>,
}

/// Deployment, files and identity of a process.
struct ProcessInfo {
    deployment: Arc<Deployment>,
    files: ReplicaFiles,
    identity: ProcessStart,
}

/// All replica processes.
struct ProcessSet {
    actuator: ProcessActuator,
    replicas: BTreeMap<ReplicaId, ReplicaProcess>,
    monitors: JoinSet<ProcessExit>,
    ready_sender: mpsc::Sender<(ReplicaId, ReadyEndpoint)>,
    /// By deployment and model: a model that cannot be loaded does not delay restarts of the served one.
    restarts: BTreeMap<ModelKey, RestartBackoff>,
    crashes: BTreeMap<DeploymentName, Crashes>,
    /// Devices of the running replicas, by port.
    devices: DeviceAssignment<u16>,
    /// Deployments and models that wait for a free device, with the reason; this was logged. A start is tried when a replica has
    /// ended.
    waiting: BTreeMap<ModelKey, String>,
    ended_starts: BTreeMap<ModelKey, EndedStarts>,
    /// Notified when a replica reports another failure.
    failure_changed: Arc<Notify>,
    /// Port that was assigned last; a port that was just freed is not reused at once.
    last_port: u16,
}

/// Reason why a process was not started.
#[derive(Debug, thiserror::Error)]
enum ReplicaStartError {
    /// No port of `scaling.ports` is free. The replica is not started.
    #[error("all ports from {from} to {to} are in use; widen scaling.ports, or lower scaling.max")]
    NoPort { from: u16, to: u16 },
    /// Every device of `scaling.devices` has a replica. The replica is started when another one has ended.
    #[error(
        "all {0} devices of scaling.devices have a replica; lower scaling.max of the deployments, or add devices"
    )]
    NoDevice(usize),
    /// The replica is not started, because it could not authenticate to the spoke. The start is tried again.
    #[error(
        "its identity folder {} has no certificate yet; the spoke obtains one if its own certificate is of the built-in \
         authority, otherwise add [identity] to the file of scaling.template",
        .0.display()
    )]
    NoIdentity(PathBuf),
    #[error("{operation}: {error}")]
    System { operation: &'static str, error: io::Error },
}

impl ProcessActuator {
    /// Creates the actuator for the replicas of `region`, with its files in `dir`.
    ///
    /// # Errors
    ///
    /// When TLS cannot be set up, the path of the own executable is unknown, or the machine has no devices and all of them are
    /// configured.
    pub(crate) fn new(
        config: ProcessConfig,
        dir: PathBuf,
        region: RegionId,
        transport: &Transport,
    ) -> io::Result<ProcessActuator> {
        let program = config.program.clone().map_or_else(std::env::current_exe, Ok)?;
        let prober = ReadinessProber::new(transport).map_err(io::Error::other)?;
        let identity = config.replica_identity(&dir, transport);
        let devices = devices::selected(config.devices.clone(), Path::new("/"))?;
        Ok(ProcessActuator { config, dir, region, program, prober, identity, devices })
    }

    /// Returns the maximum number of replicas; `None` if only the ports limit them.
    pub(crate) fn replicas_max(&self) -> Option<u32> {
        self.devices.as_ref().map(|devices| u32::try_from(devices.len()).unwrap_or(u32::MAX))
    }
}

impl Actuator for ProcessActuator {
    async fn run(
        self,
        mut targets: watch::Receiver<DeploymentTargets>,
        running: watch::Sender<ActuatorStatus>,
    ) {
        let (ready_sender, mut ready) = mpsc::channel(SPOKE_REPLICAS_MAX);
        let period = HeartbeatFile { file: PathBuf::new(), timeout: self.config.orphan_timeout }.period() / 2;
        let last_port = *self.config.ports.end();
        let devices = DeviceAssignment::new(self.devices.clone());
        let failure_changed: Arc<Notify> = Arc::default();
        let mut processes = ProcessSet {
            actuator: self,
            replicas: BTreeMap::new(),
            monitors: JoinSet::new(),
            ready_sender,
            restarts: BTreeMap::new(),
            crashes: BTreeMap::new(),
            devices,
            waiting: BTreeMap::new(),
            ended_starts: BTreeMap::new(),
            failure_changed: failure_changed.clone(),
            last_port,
        };
        processes.adopt().await;
        let mut heartbeats = interval(period);
        heartbeats.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let desired = targets.borrow_and_update().clone();
            let retry_at = processes.reconcile(&desired).await;
            running.send_replace(processes.status());
            let restart = async {
                match retry_at {
                    Some(at) => sleep_until(at.into()).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                changed = targets.changed() => if changed.is_err() { break },
                Some(exit) = processes.monitors.join_next() => {
                    processes.handle_exit(exit.expect("a monitor does not panic and is not aborted")).await;
                }
                Some((id, at)) = ready.recv() => processes.handle_ready(&id, at).await,
                () = failure_changed.notified() => {}
                _ = heartbeats.tick() => processes.send_heartbeats().await,
                () = restart => {}
            }
        }
        processes.stop_all().await;
    }
}

impl ProcessSet {
    /// Adopts the running replicas of an earlier spoke.
    async fn adopt(&mut self) {
        let mut without_device = Vec::new();
        for port in self.actuator.config.ports.clone() {
            let files = ReplicaFiles::new(&self.actuator.dir, port);
            let Some(AdoptedProcess { identity, process, deployment, device, took }) =
                files.running_process().await
            else {
                files.remove().await;
                continue;
            };
            let id = format!("{port}-{}", identity.name());
            ReplicaAdopted { id: &id, deployment: &deployment.name }.emit();
            match device {
                Some(device) => self.devices.hold(port, device),
                None => without_device.push(port),
            }
            let (deployment, monitor) = (Arc::new(deployment), ProcessMonitor::adopted(process, identity));
            self.monitor(id, ProcessInfo { deployment, files, identity }, monitor, StartTime::Took(took));
        }
        without_device.into_iter().for_each(|port| self.devices.hold_unknown(port));
    }

    /// Starts and stops replicas as far as possible now; returns when to retry, if restarts are delayed.
    async fn reconcile(&mut self, desired: &DeploymentTargets) -> Option<Instant> {
        let mut retry_at: Option<Instant> = None;
        let all = desired.values().flat_map(|target| {
            let next = target.next.iter().map(|(next, _)| next);
            std::iter::once(&target.deployment).chain(next)
        });
        let all: BTreeSet<_> = all.map(|deployment| model_key(deployment)).collect();
        self.restarts.retain(|key, _| all.contains(key));
        self.waiting.retain(|key, _| all.contains(key));
        self.ended_starts.retain(|key, _| all.contains(key));
        for (name, DeploymentTarget { deployment, replicas, next, stop, is_scaled_here }) in desired {
            for id in stop {
                if let Some(stop) = self.replicas.get_mut(id).and_then(|replica| replica.stop.take()) {
                    // On failure, the process has ended meanwhile.
                    stop.send(()).ok();
                }
            }
            if !is_scaled_here {
                self.waiting.retain(|(waiting, _), _| waiting != name);
                continue;
            }
            let next_spec = next.as_ref().map(|(next, _)| next.model_spec());
            let is_next = |it: &Deployment| next_spec.as_ref() == Some(&it.model_spec());
            let (mut next_count, mut served_count) = (0, 0);
            for ReplicaProcess { info, stop, .. } in self.replicas.values() {
                if info.deployment.name == *name && stop.is_some() {
                    *(if is_next(&info.deployment) { &mut next_count } else { &mut served_count }) += 1;
                }
            }
            // The served model comes first if there are not enough ports or devices.
            let next = next.iter().map(|(next, replicas)| (next, next_count, *replicas));
            for (deployment, existing, replicas) in
                std::iter::once((deployment, served_count, *replicas)).chain(next)
            {
                if let Some(at) = self.start_missing(deployment, existing, replicas).await {
                    retry_at = Some(retry_at.map_or(at, |retry_at: Instant| retry_at.min(at)));
                }
            }
        }
        retry_at
    }

    /// Starts the missing replicas; returns when to retry, if not all can be started now.
    async fn start_missing(
        &mut self,
        deployment: &Arc<Deployment>,
        existing: u32,
        replicas: u32,
    ) -> Option<Instant> {
        let key = model_key(deployment);
        if existing >= replicas {
            self.waiting.remove(&key);
        }
        for _ in existing..replicas {
            let now = Instant::now();
            let pause = self.restarts.get(&key).map_or(Duration::ZERO, |restarts| restarts.delay(now));
            if pause.is_zero() {
                match self.start(deployment).await {
                    Ok(()) => {
                        self.waiting.remove(&key);
                        continue;
                    }
                    // No crash: a replica has to end first, and its exit leads here again.
                    Err(error @ ReplicaStartError::NoDevice(devices)) => {
                        let reason = format!("no free device: {devices} of {devices} in use");
                        if self.waiting.insert(key, reason).is_none() {
                            ReplicaStartFailed { deployment: &deployment.name, error: &error }.emit();
                        }
                        return None;
                    }
                    Err(error) => {
                        ReplicaStartFailed { deployment: &deployment.name, error: &error }.emit();
                        // The spoke obtains the certificate soon after its own start.
                        if !matches!(error, ReplicaStartError::NoIdentity(_)) {
                            let failure = StartFailureReport::new(StartFailure::Other, error.to_string());
                            self.start_ended(deployment, failure, Duration::ZERO);
                        }
                        self.crashed(deployment, None);
                    }
                }
            }
            let pause = self.restarts.get(&key).map_or(Duration::ZERO, |restarts| restarts.delay(now));
            return Some(now + pause);
        }
        None
    }

    async fn start(&mut self, deployment: &Arc<Deployment>) -> Result<(), ReplicaStartError> {
        let failed = |operation| move |error| ReplicaStartError::System { operation, error };
        let ProcessActuator { config, dir, region, program, identity, .. } = &self.actuator;
        let device = self.devices.free().map_err(|DevicesInUse(count)| ReplicaStartError::NoDevice(count))?;
        let device = device.cloned();
        let endpoint = self.free_port()?;
        let files = ReplicaFiles::new(dir, endpoint.port());
        if let Some(folder) = identity
            && !folder.join(IdentityFiles::CERTIFICATE).exists()
        {
            return Err(ReplicaStartError::NoIdentity(folder.clone()));
        }
        let text = configuration(deployment, region, endpoint, config, identity.as_deref());
        tokio::fs::write(files.config(), text).await.map_err(failed("cannot write its configuration"))?;
        heartbeat::touch(&files.heartbeat()).await.map_err(failed("cannot touch its heartbeat file"))?;
        let log = File::create(files.log()).map_err(failed("cannot create its log"))?;
        let heartbeat = HeartbeatFile { file: files.heartbeat(), timeout: config.orphan_timeout };
        let mut command = Command::new(program);
        if let Some(device) = &device {
            let (order, by_address) = devices::DEVICE_ORDER;
            command.env(devices::DEVICE_VARIABLE, device.as_str()).env(order, by_address);
        }
        let child = command
            .args(["replica", "--region", region.as_str(), "--config"])
            .arg(files.config())
            .env(heartbeat::VARIABLE, heartbeat.value())
            .env_remove(heartbeat::PARENT_VARIABLE)
            .env_remove(JOIN_TOKEN_VARIABLE)
            .env_remove(NOTIFY_SOCKET_VARIABLE)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .process_group(0)
            // Dropped only when one of the lines below fails; then no unrecorded process stays.
            .kill_on_drop(true)
            .spawn()
            .map_err(failed("cannot start the program"))?;
        let pid = child.id().and_then(|id| Pid::from_raw(id.cast_signed()));
        let pid = pid.expect("a child that was not waited for has a process id");
        let identity = ProcessStart::read(pid).map_err(failed("cannot identify the process"))?;
        let monitor =
            ProcessMonitor::started(child, identity).map_err(failed("cannot monitor the process"))?;
        let record = files.write(identity, deployment, device.as_ref(), None).await;
        record.map_err(failed("cannot write its record"))?;
        let id = format!("{}-{}", endpoint.port(), identity.name());
        let (device_of, log) = (device.as_ref(), files.log());
        ReplicaStarted { id: &id, deployment: &deployment.name, endpoint, device: device_of, log: &log }
            .emit();
        if let Some(device) = device {
            self.devices.hold(endpoint.port(), device);
        }
        self.last_port = endpoint.port();
        let info = ProcessInfo { deployment: deployment.clone(), files, identity };
        self.monitor(id, info, monitor, StartTime::At(Instant::now()));
        Ok(())
    }

    fn monitor(&mut self, id: ReplicaId, info: ProcessInfo, monitor: ProcessMonitor, start: StartTime) {
        let (stop, stop_request) = oneshot::channel();
        let (download, download_ends_at) = watch::channel(None);
        let (waiting, waits_for_pull) = watch::channel(false);
        let (failure, reported) = watch::channel(None);
        let failure_changed = self.failure_changed.clone();
        let endpoint = SocketAddr::from((self.actuator.config.address, info.files.port));
        self.monitors.spawn(monitor.run(MonitorContext {
            id: id.clone(),
            endpoint,
            start,
            prober: self.actuator.prober.clone(),
            stop: stop_request,
            ready: self.ready_sender.clone(),
            report: ReportSender { download, waits_for_pull: waiting, failure, failure_changed },
        }));
        let (since, ready, stop) = (Instant::now(), None, Some(stop));
        let process =
            ReplicaProcess { info, since, ready, download_ends_at, waits_for_pull, failure: reported, stop };
        self.replicas.insert(id, process);
    }

    /// Returns a free port, the one longest unused first.
    fn free_port(&self) -> Result<SocketAddr, ReplicaStartError> {
        let ProcessConfig { address, ports, .. } = &self.actuator.config;
        let taken = |port: &u16| self.replicas.values().any(|replica| replica.info.files.port == *port);
        let after = ports.clone().filter(|port| *port > self.last_port);
        let before = ports.clone().filter(|port| *port <= self.last_port);
        let free = |port: &u16| !taken(port) && TcpListener::bind((*address, *port)).is_ok();
        let port = after.chain(before).find(free);
        let port = port.ok_or(ReplicaStartError::NoPort { from: *ports.start(), to: *ports.end() })?;
        Ok(SocketAddr::from((*address, port)))
    }

    async fn handle_ready(&mut self, id: &ReplicaId, at: ReadyEndpoint) {
        let Some(replica) = self.replicas.get_mut(id) else { return };
        replica.ready = Some((at, Instant::now()));
        let ProcessInfo { deployment, files, identity } = &replica.info;
        let device = self.devices.of(&files.port);
        if let Err(error) = files.write(*identity, deployment, device, at.took).await {
            // The start duration of a replica could not be written to its record. The spoke knows it until it restarts.
            tracing::debug!(replica = id, %error, "cannot record the start duration");
        }
    }

    async fn handle_exit(&mut self, ProcessExit { id, requested, status }: ProcessExit) {
        let Some(replica) = self.replicas.remove(&id) else { return };
        let ProcessInfo { deployment, files, identity: _ } = &replica.info;
        self.devices.release(&files.port);
        files.remove().await;
        let log = files.log();
        ReplicaExited { id: &id, deployment: &deployment.name, requested, status: &status, log: &log }.emit();
        if requested {
            return;
        }
        if replica.ready.is_none() {
            let reported = replica.failure.borrow().clone();
            let failure = match reported {
                Some(failure) => failure,
                None => {
                    let end = log_end(&log).await;
                    let message = format!("the process ended before it was ready ({status}): {end}");
                    StartFailureReport::new(StartFailure::CrashLoop, message)
                }
            };
            self.start_ended(deployment, failure, replica.since.elapsed());
        }
        self.crashed(deployment, replica.ready.map(|(_, since)| since.elapsed()));
    }

    /// Counts a start that ended now, before readiness.
    fn start_ended(&mut self, deployment: &Deployment, failure: StartFailureReport, lasted: Duration) {
        let key = model_key(deployment);
        let count = self.ended_starts.get(&key).map_or(0, |ended| ended.count);
        let last = EndedStart { at: Instant::now(), lasted, failure };
        self.ended_starts.insert(key, EndedStarts { count: count.saturating_add(1), last });
    }

    fn crashed(&mut self, deployment: &Deployment, ready_for: Option<Duration>) {
        let now = Instant::now();
        let restarts = self.restarts.entry(model_key(deployment)).or_default();
        restarts.record_crash(ready_for, now);
        let crashes = self.crashes.entry(deployment.name.clone()).or_default();
        crashes.count += 1;
        crashes.restart_at = Some(now + restarts.delay(now));
    }

    /// Sends the heartbeat to all replicas.
    async fn send_heartbeats(&self) {
        for replica in self.replicas.values() {
            let files = &replica.info.files;
            if let Err(error) = heartbeat::touch(&files.heartbeat()).await {
                // The spoke could not update the heartbeat file of a replica. A replica without heartbeats stops: check
                // the disk.
                tracing::debug!(port = files.port, %error, "cannot touch the heartbeat file of a replica");
            }
        }
    }

    fn status(&self) -> ActuatorStatus {
        let each = self.replicas.iter().map(|(id, replica)| {
            let ReplicaProcess { info, since, ready, download_ends_at, waits_for_pull, failure, .. } =
                replica;
            let ready = ready.map(|(at, _)| at);
            let running = RunningReplica {
                deployment: info.deployment.clone(),
                since: *since,
                ready,
                download_ends_at: *download_ends_at.borrow(),
                waits_for_pull: *waits_for_pull.borrow(),
                failure: failure.borrow().clone().filter(|_| ready.is_none()),
                is_outdated: false,
                rank: 0,
            };
            (id.clone(), running)
        });
        ActuatorStatus {
            is_initialized: true,
            replicas: each.collect(),
            crashes: self.crashes.clone(),
            ended_starts: self.ended_starts.clone(),
            waiting: self.waiting.clone(),
        }
    }

    /// Stops all replicas gracefully and concurrently.
    async fn stop_all(mut self) {
        self.replicas.values_mut().for_each(|replica| drop(replica.stop.take()));
        while let Some(exit) = self.monitors.join_next().await {
            self.handle_exit(exit.expect("a monitor does not panic and is not aborted")).await;
        }
    }
}

/// Returns the last lines of a replica's log in one line.
async fn log_end(log: &Path) -> String {
    let read = async {
        let mut file = tokio::fs::File::open(log).await?;
        let length = file.metadata().await?.len();
        file.seek(io::SeekFrom::Start(length.saturating_sub(LOG_END_BYTES))).await?;
        let mut end = Vec::new();
        file.take(LOG_END_BYTES).read_to_end(&mut end).await?;
        Ok::<_, io::Error>(last_lines(&String::from_utf8_lossy(&end)))
    };
    match read.await {
        Ok(lines) if lines.is_empty() => "its log is empty".to_owned(),
        Ok(lines) => lines,
        Err(error) => format!("its log cannot be read: {error}"),
    }
}

/// Returns the last lines of a text, without empty ones and control characters, separated by ` | `.
fn last_lines(text: &str) -> String {
    let lines = text.lines().map(|line| line.replace(char::is_control, " ").trim().to_owned());
    let lines: Vec<_> = lines.filter(|line| !line.is_empty()).collect();
    lines[lines.len().saturating_sub(LOG_END_LINES)..].join(" | ")
}

/// Returns the configuration file of one replica.
fn configuration(
    deployment: &Deployment,
    region: &RegionId,
    listen: SocketAddr,
    ProcessConfig { template, has_identity, catalogue, .. }: &ProcessConfig,
    identity: Option<&Path>,
) -> String {
    let text = |value: &str| toml::Value::String(value.to_owned());
    let path = |value: &Path| text(&value.to_string_lossy());
    let Deployment {
        name,
        task,
        model,
        engine,
        residency: _,
        regions: _,
        order: _,
        placement: _,
        scaling: _,
    } = deployment;
    let mut written = format!(
        "# Replica of {name} in {region}. Written by its spoke at every start; do not edit.\n\
         listen = {}\nnames = [{}]\nmodel = {}\ntask = {}\nengine = {{ kind = {}, precision = {} }}\n",
        text(&listen.to_string()),
        text(name.as_str()),
        text(model),
        text(task.as_str()),
        text(engine.kind.as_str()),
        text(engine.precision.as_str()),
    );
    if let Some(catalogue) = catalogue
        && (*has_identity || identity.is_some())
    {
        written += &format!("catalogue = {}\n", path(catalogue));
    }
    written += template;
    if let Some(identity) = identity {
        written += &format!("\n[identity]\ndir = {}\n", path(identity));
    }
    written
}

#[cfg(test)]
mod tests;
