//! Fault injection and other actions on a running local fleet, for the control API ([`super::control_api`]) and for drills.
//!
//! The main thread owns the processes and executes commands on them; links are changed here. One change is made at a time: an
//! action of a drill, a request of the control API, or the restoration after a drill ([`super::fleet_state`]) waits for the one
//! before, and a change that has begun is completed also if its caller is gone.
//!
//! There are two kinds of slow replicas. A scripted one is configured to take longer. A real one is stopped and continued ten times
//! a second, so that it runs for a small share of the time: it computes in bursts, and its other responses (a report, a rejection)
//! are late as well, as on a machine whose CPU is taken by another process.

use super::link::{EmulatedLink, LinkConditions};
use super::process::signal_to;
use crate::apply;
use loadtest::drill::Action;
use loadtest::drill::action::{LinkChange, LinkDirection, ProcessAction, ProcessTarget};
use regions::id::{IdError, RegionId};
use rustix::process::Signal;
use scheduler_api::paths;
use scheduler_api::route::RouteTableV1;
use scheduler_client::operator::OperatorClient;
use scheduler_core::hubs::Hubs;
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use supervision::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};
use tokio::task::JoinHandle;

/// Period of throttling, in which a slowed replica runs once: short relative to a request, long relative to a timer tick.
const THROTTLE_PERIOD: Duration = Duration::from_millis(100);
/// Timeout of a request to a hub or a replica, after which the next hub is tried: a paused process does not respond.
pub(crate) const REQUEST_TIMEOUT: Duration = Duration::from_secs(2);

/// Command for the main thread, which owns the processes.
pub(crate) enum FleetCommand {
    /// Executes an action on a process.
    Process { process: String, action: ProcessAction, done: oneshot::Sender<Result<(), String>> },
    /// Notes the processes that have ended by themselves.
    NoteEnded(oneshot::Sender<()>),
}

/// Slowed real replica.
pub(crate) struct Throttling {
    /// Factor by which it is slower.
    pub times: u32,
    task: JoinHandle<()>,
}

/// Process names of one region, with the addresses for commands to its scripted replicas.
pub(crate) struct RegionProcesses {
    pub spokes: Vec<String>,
    pub replicas: Vec<(String, Option<SocketAddr>)>,
}

/// Handle for actions on the fleet.
#[derive(Clone)]
pub(crate) struct FleetControl {
    /// Links to the spokes of each region.
    pub links: Arc<BTreeMap<RegionId, Vec<EmulatedLink>>>,
    pub commands: mpsc::Sender<FleetCommand>,
    /// Process ids by name; `None` after the process has ended.
    pub processes: Arc<Mutex<BTreeMap<String, Option<u32>>>>,
    /// Region and process name of each gateway.
    pub gateways: Vec<(RegionId, String)>,
    pub region_processes: Arc<BTreeMap<RegionId, RegionProcesses>>,
    pub hubs: Vec<(String, SocketAddr)>,
    /// Members of the etcd cluster; empty for an embedded store.
    pub store: Vec<String>,
    pub operator: PathBuf,
    /// Slowed real replicas.
    pub throttled: Arc<Mutex<BTreeMap<String, Throttling>>>,
    /// Processes that were paused and not resumed.
    pub paused: Arc<Mutex<BTreeSet<String>>>,
    /// Turn of the next change; one permit.
    pub turn: Arc<Semaphore>,
}

impl FleetControl {
    /// Executes an action after the changes before it. Surges are part of the load and need nothing here.
    pub(crate) async fn execute(&self, action: &Action) -> Result<(), String> {
        let (control, action) = (self.clone(), action.clone());
        self.in_turn(async move { control.perform(&action).await }).await
    }

    /// Executes an action on one process after the changes before it.
    pub(crate) async fn command(&self, process: &str, action: ProcessAction) -> Result<(), String> {
        let (control, process) = (self.clone(), process.to_owned());
        self.in_turn(async move { control.send_command(&process, action).await }).await
    }

    /// Makes a change after those before it, in a task of its own: one that has begun is completed if this is cancelled, and the next
    /// one waits for it.
    async fn in_turn(
        &self,
        change: impl Future<Output = Result<(), String>> + Send + 'static,
    ) -> Result<(), String> {
        let turn = self.turn().await?;
        let changing = tokio::spawn(async move {
            let _turn = turn;
            change.await
        });
        changing.await.unwrap_or_else(|error| Err(format!("the change was not completed: {error}")))
    }

    /// Waits until no other change is being made, and keeps others waiting until the permit is dropped.
    pub(super) async fn turn(&self) -> Result<OwnedSemaphorePermit, String> {
        self.turn.clone().acquire_owned().await.map_err(|_| stopping())
    }

    async fn perform(&self, action: &Action) -> Result<(), String> {
        match action {
            Action::Process(action, target) => {
                for process in self.processes_of(*action, target)? {
                    self.send_command(&process, *action).await?;
                }
                Ok(())
            }
            Action::Link(region, change) => self.change(region, *change),
            Action::SlowReplicas(region, times) => self.slow(region, *times).await,
            Action::Surge { .. } => Ok(()),
            Action::Drain(region) => self.set_draining(region, true).await,
            Action::Undrain(region) => self.set_draining(region, false).await,
        }
    }

    /// Has the main thread execute a command on a process, in the turn of the caller.
    pub(super) async fn send_command(&self, process: &str, action: ProcessAction) -> Result<(), String> {
        let (done, outcome) = oneshot::channel();
        let command = FleetCommand::Process { process: process.to_owned(), action, done };
        self.commands.send(command).await.map_err(|_| stopping())?;
        outcome.await.map_err(|_| stopping())??;
        let mut paused = self.paused.lock();
        if action == ProcessAction::Pause {
            paused.insert(process.to_owned());
        } else {
            paused.remove(process);
        }
        Ok(())
    }

    /// Returns the processes that do not run, also those that have ended by themselves just now.
    pub(super) async fn ended_processes(&self) -> Result<BTreeSet<String>, String> {
        let (done, noted) = oneshot::channel();
        self.commands.send(FleetCommand::NoteEnded(done)).await.map_err(|_| stopping())?;
        noted.await.map_err(|_| stopping())?;
        let processes = self.processes.lock();
        Ok(processes.iter().filter(|(_, id)| id.is_none()).map(|(name, _)| name.clone()).collect())
    }

    /// Changes a link.
    fn change(&self, region: &RegionId, change: LinkChange) -> Result<(), String> {
        let links = self.links.get(region).ok_or_else(|| {
            let known: Vec<_> = self.links.keys().map(RegionId::as_str).collect();
            format!("no link to '{region}'; the links are: {}", known.join(", "))
        })?;
        links.iter().for_each(|link| link.set(|conditions| apply_change(conditions, change)));
        Ok(())
    }

    /// Returns the processes in dependency order: spokes are stopped before their replicas, and started after them.
    fn processes_of(&self, action: ProcessAction, target: &ProcessTarget) -> Result<Vec<String>, String> {
        let place = |region: &RegionId| self.region_processes(region);
        let replicas =
            |place: &RegionProcesses| place.replicas.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
        match target {
            ProcessTarget::Spoke(region, None) => Ok(place(region)?.spokes.clone()),
            ProcessTarget::Spoke(region, Some(number)) => {
                let spoke = place(region)?.spokes.get((*number as usize).saturating_sub(1));
                spoke.map(|name| vec![name.clone()]).ok_or_else(|| format!("no spoke {number} in {region}"))
            }
            ProcessTarget::Replicas(region) => Ok(replicas(place(region)?)),
            ProcessTarget::Region(region) => {
                let place = place(region)?;
                let mut all = replicas(place);
                match action {
                    ProcessAction::Start => all.extend(place.spokes.clone()),
                    ProcessAction::Kill
                    | ProcessAction::Stop
                    | ProcessAction::Restart
                    | ProcessAction::Pause
                    | ProcessAction::Resume => {
                        all.splice(0..0, place.spokes.clone());
                    }
                }
                Ok(all)
            }
            ProcessTarget::Gateways(None) => Ok(self.gateways.iter().map(|(_, name)| name.clone()).collect()),
            ProcessTarget::Gateways(Some(near)) => {
                let gateway = self.gateways.iter().find(|(region, _)| region == near);
                gateway.map(|(_, name)| vec![name.clone()]).ok_or_else(|| format!("no gateway near {near}"))
            }
            ProcessTarget::Hub(number) => {
                let hub = self.hubs.get((*number as usize).saturating_sub(1));
                hub.map(|(name, _)| vec![name.clone()]).ok_or_else(|| format!("no hub {number}"))
            }
            ProcessTarget::Store(None) if !self.store.is_empty() => Ok(self.store.clone()),
            ProcessTarget::Store(number) => {
                let member = number.and_then(|number| self.store.get((number as usize).saturating_sub(1)));
                member.map(|name| vec![name.clone()]).ok_or_else(|| {
                    "no such store: this fleet uses a file in its hub; start it with --store etcd".to_owned()
                })
            }
        }
    }

    fn region_processes(&self, region: &RegionId) -> Result<&RegionProcesses, String> {
        self.region_processes.get(region).ok_or_else(|| {
            let known: Vec<_> = self.region_processes.keys().map(RegionId::as_str).collect();
            format!("no region '{region}'; the regions are: {}", known.join(", "))
        })
    }

    /// Slows the replicas of a region by this factor; 1 restores normal speed.
    async fn slow(&self, region: &RegionId, times: u32) -> Result<(), String> {
        for (name, scripted) in &self.region_processes(region)?.replicas {
            match scripted {
                Some(control) => send(format!("http://{control}/slow?times={times}")).await?,
                None => self.throttle(name, times).await?,
            }
        }
        Ok(())
    }

    /// Slows a real replica by this factor; 1 restores normal speed.
    pub(super) async fn throttle(&self, process: &str, times: u32) -> Result<(), String> {
        if self.end_throttling(process).await {
            // The task may have ended while the process was stopped.
            self.send_command(process, ProcessAction::Resume).await?;
        }
        let id = self.id(process);
        if id.is_none() {
            return Err(format!("{process} is not running; start it first"));
        }
        if times > 1 {
            let task = tokio::spawn(throttled(self.clone(), process.to_owned(), id, times));
            self.throttled.lock().insert(process.to_owned(), Throttling { times, task });
        }
        Ok(())
    }

    /// Ends the task that slows a replica, and leaves the process stopped or running. Returns whether there was one.
    pub(super) async fn end_throttling(&self, process: &str) -> bool {
        let before = self.throttled.lock().remove(process);
        let Some(Throttling { times: _, task }) = before else { return false };
        task.abort();
        // Until it has ended it may stop the process once more. It was aborted, which is no error.
        let _ = task.await;
        true
    }

    fn id(&self, process: &str) -> Option<u32> {
        self.processes.lock().get(process).copied().flatten()
    }

    /// Starts or ends a drain like an operator, at the first hub that responds.
    pub(super) async fn set_draining(&self, region: &RegionId, is_draining: bool) -> Result<(), String> {
        let draining = self.operator_client()?.set_draining(region, is_draining).await;
        draining.map_err(|error| error.to_string())
    }

    /// Returns the regions that are being drained, by the route table of the first hub that responds.
    pub(super) async fn drained_regions(&self) -> Result<BTreeSet<RegionId>, String> {
        let table = self.operator_client()?.get::<RouteTableV1>(paths::ROUTES).await;
        let regions = table.map_err(|error| error.to_string())?.regions.into_iter();
        let drained = regions.filter(|region| region.draining).map(|region| region.id.parse());
        drained.collect::<Result<_, IdError>>().map_err(|error| error.to_string())
    }

    fn operator_client(&self) -> Result<OperatorClient, String> {
        let urls = self.hubs.iter().map(|(_, hub)| format!("https://{hub}"));
        let hubs = Hubs::at(urls).ok_or("no hub")?;
        let transport = apply::transport(Some(&self.operator))?;
        let operator = OperatorClient::new(&hubs, &transport, REQUEST_TIMEOUT);
        operator.map_err(|error| error.to_string())
    }
}

fn stopping() -> String {
    "the fleet is stopping".to_owned()
}

/// Returns the position of a process in the order of dependencies, by the first word of its name.
pub(super) fn start_order(name: &str) -> usize {
    let roles = ["etcd", "hub", "replica", "spoke"];
    roles.iter().position(|role| name.starts_with(role)).unwrap_or(roles.len())
}

/// Lets a process run for its share of each period, until it ends or is replaced.
async fn throttled(control: FleetControl, process: String, id: Option<u32>, times: u32) {
    let runs = THROTTLE_PERIOD / times;
    while control.id(&process) == id && signal_to(id, Signal::STOP) {
        tokio::time::sleep(THROTTLE_PERIOD - runs).await;
        if control.id(&process) != id || !signal_to(id, Signal::CONT) {
            return;
        }
        tokio::time::sleep(runs).await;
    }
}

/// Sends a command to a scripted replica.
async fn send(url: String) -> Result<(), String> {
    let client = reqwest::Client::builder().no_proxy().timeout(REQUEST_TIMEOUT).build();
    let request = client.map_err(|error| error.to_string())?.post(&url);
    let response = request.send().await.map_err(|error| format!("request to {url} failed: {error}"))?;
    let status = response.status();
    if status.is_success() { Ok(()) } else { Err(format!("{url} returned {status}")) }
}

fn apply_change(conditions: &mut LinkConditions, change: LinkChange) {
    match change {
        LinkChange::Cut(direction) => {
            conditions.cut_to |= matches!(direction, LinkDirection::Both | LinkDirection::To);
            conditions.cut_from |= matches!(direction, LinkDirection::Both | LinkDirection::From);
        }
        LinkChange::Heal => *conditions = LinkConditions::NORMAL,
        LinkChange::Times(times) => conditions.times = times,
        LinkChange::Delay(extra) => conditions.extra = extra,
        LinkChange::Lose(percent) => conditions.lost = percent / 100.0,
    }
}
