//! State of a local fleet that a drill changes: it is noted before the drill, and restored after it.
//!
//! | part | after the restoration |
//! |---|---|
//! | processes | run, are paused, or have ended as before; one that the drill ended or restarted is a new process with the same command line |
//! | links | have their conditions of before |
//! | real replicas | are as slow as before |
//! | regions that the drill drains | are drained, or not, as before |
//!
//! Changes that are made by hand while a drill runs are undone as well, except drains. Everything else stays as the drill has left it:
//! the leader of the hubs, what gateways have measured, records and counts of requests, and jobs.

use super::fleet_control::{FleetControl, start_order};
use super::link::LinkConditions;
use loadtest::drill::action::ProcessAction;
use regions::id::RegionId;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// Time for which a drain is set again after a failure: a hub that was just started waits for its election.
const DRAIN_RETRY_FOR: Duration = Duration::from_secs(15);
/// Pause between two attempts.
const DRAIN_RETRY_PAUSE: Duration = Duration::from_millis(500);

/// State of the parts that a drill may change.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct FleetState {
    ended: BTreeSet<String>,
    paused: BTreeSet<String>,
    links: BTreeMap<RegionId, Vec<LinkConditions>>,
    /// Factors of the slowed replicas.
    slowed: BTreeMap<String, u32>,
    /// Whether each region is drained that the drill drains.
    drains: BTreeMap<RegionId, bool>,
}

impl FleetState {
    /// Notes the state after the changes before. `drained` are the regions that the drill drains.
    ///
    /// # Errors
    ///
    /// When the fleet is stopping, or no hub responds.
    pub(super) async fn note(
        control: &FleetControl,
        drained: &BTreeSet<RegionId>,
    ) -> Result<FleetState, String> {
        let _turn = control.turn().await?;
        // Without a drain the hubs may be down.
        let draining = if drained.is_empty() { BTreeSet::new() } else { control.drained_regions().await? };
        let ended = control.ended_processes().await?;
        let (mut paused, mut slowed) = (control.paused.lock().clone(), slowed(control));
        paused.retain(|process| !ended.contains(process));
        slowed.retain(|process, _| !ended.contains(process));
        Ok(FleetState {
            ended,
            paused,
            links: conditions(control),
            slowed,
            drains: drained.iter().map(|region| (region.clone(), draining.contains(region))).collect(),
        })
    }

    /// Returns whether all regions can serve.
    pub(super) fn is_undisturbed(&self) -> bool {
        let FleetState { ended, paused, links, slowed, drains } = self;
        let are_normal = links.values().flatten().all(|conditions| *conditions == LinkConditions::NORMAL);
        let is_drained = drains.values().any(|is_drained| *is_drained);
        ended.is_empty() && paused.is_empty() && slowed.is_empty() && are_normal && !is_drained
    }

    /// Restores the state, after the change that is being made. Returns what did not succeed.
    pub(super) async fn restore(&self, control: &FleetControl) -> Vec<String> {
        let _turn = match control.turn().await {
            Ok(turn) => turn,
            Err(problem) => return vec![problem],
        };
        for (region, before) in &self.links {
            let links = control.links.get(region).into_iter().flatten();
            links.zip(before).for_each(|(link, before)| link.set(|conditions| *conditions = *before));
        }
        let mut problems = self.restore_processes(control).await.unwrap_or_else(|problem| vec![problem]);
        for (region, is_draining) in &self.drains {
            problems.extend(restore_drain(control, region, *is_draining).await.err());
        }
        problems
    }

    async fn restore_processes(&self, control: &FleetControl) -> Result<Vec<String>, String> {
        let mut stopped = control.paused.lock().clone();
        for process in slowed(control).into_keys() {
            control.end_throttling(&process).await;
            stopped.insert(process);
        }
        // A process that a signal has stopped delays those that need it.
        let ended = control.ended_processes().await?;
        let mut problems = command(control, stopped.difference(&ended), ProcessAction::Resume).await;
        let ended = control.ended_processes().await?;
        let mut to_start: Vec<_> = ended.difference(&self.ended).collect();
        to_start.sort_by_key(|name| start_order(name));
        problems.extend(command(control, to_start, ProcessAction::Start).await);
        let mut to_stop: Vec<_> = self.ended.difference(&ended).collect();
        to_stop.sort_by_key(|name| Reverse(start_order(name)));
        problems.extend(command(control, to_stop, ProcessAction::Stop).await);
        problems.extend(command(control, &self.paused, ProcessAction::Pause).await);
        for (process, times) in &self.slowed {
            problems.extend(control.throttle(process, *times).await.err());
        }
        Ok(problems)
    }
}

/// Returns the conditions of the links of each region.
fn conditions(control: &FleetControl) -> BTreeMap<RegionId, Vec<LinkConditions>> {
    let links = control.links.iter();
    links.map(|(region, all)| (region.clone(), all.iter().map(|link| link.conditions()).collect())).collect()
}

/// Returns the factors of the slowed replicas.
fn slowed(control: &FleetControl) -> BTreeMap<String, u32> {
    let throttled = control.throttled.lock();
    throttled.iter().map(|(process, throttling)| (process.clone(), throttling.times)).collect()
}

/// Executes an action on processes, one after the other. Returns the problems.
async fn command(
    control: &FleetControl,
    processes: impl IntoIterator<Item = &String>,
    action: ProcessAction,
) -> Vec<String> {
    let mut problems = Vec::new();
    for process in processes {
        problems.extend(control.send_command(process, action).await.err());
    }
    problems
}

async fn restore_drain(control: &FleetControl, region: &RegionId, is_draining: bool) -> Result<(), String> {
    let begun = Instant::now();
    loop {
        let Err(problem) = control.set_draining(region, is_draining).await else { return Ok(()) };
        if begun.elapsed() >= DRAIN_RETRY_FOR {
            let what = if is_draining { "not drained again" } else { "still drained" };
            return Err(format!("{region} is {what}: {problem}"));
        }
        tokio::time::sleep(DRAIN_RETRY_PAUSE).await;
    }
}

#[cfg(test)]
mod tests {
    use super::ProcessAction::{Kill, Pause, Resume, Start, Stop};
    use super::*;
    use crate::up::fleet_control::{FleetCommand, RegionProcesses};
    use crate::up::link::{EmulatedLink, LinkDelays};
    use loadtest::drill::Action;
    use loadtest::drill::action::{LinkChange, LinkDirection, ProcessTarget};
    use std::sync::Arc;
    use supervision::Mutex;
    use tokio::net::TcpListener;
    use tokio::sync::{Notify, Semaphore, mpsc};

    const SPOKE: &str = "spoke gcp/europe-west4";
    const REPLICA: &str = "replica gcp/europe-west4";

    fn europe() -> RegionId {
        "gcp/europe-west4".parse().unwrap()
    }

    /// Fleet whose processes are entries, and that executes one command for each permit.
    struct SimFleet {
        control: FleetControl,
        permits: Arc<Semaphore>,
        /// Signal of a command that has begun.
        begun: Arc<Notify>,
        executed: Arc<Mutex<Vec<(String, ProcessAction)>>>,
    }

    impl SimFleet {
        async fn start() -> SimFleet {
            let (commands, mut received) = mpsc::channel(16);
            let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let target = socket.local_addr().unwrap();
            let link = EmulatedLink::open(socket, target, LinkDelays::default());
            let processes = [SPOKE, REPLICA].map(|name| (name.to_owned(), Some(i32::MAX as u32)));
            let region = RegionProcesses {
                spokes: vec![SPOKE.to_owned()],
                replicas: vec![(REPLICA.to_owned(), None)],
            };
            let control = FleetControl {
                links: Arc::new(BTreeMap::from([(europe(), vec![link])])),
                commands,
                processes: Arc::new(Mutex::new(processes.into_iter().collect())),
                gateways: Vec::new(),
                region_processes: Arc::new(BTreeMap::from([(europe(), region)])),
                hubs: Vec::new(),
                store: Vec::new(),
                operator: std::path::PathBuf::new(),
                throttled: Arc::default(),
                paused: Arc::default(),
                turn: Arc::new(Semaphore::new(1)),
            };
            let sim = SimFleet {
                control,
                permits: Arc::new(Semaphore::new(0)),
                begun: Arc::default(),
                executed: Arc::default(),
            };
            let (processes, permits) = (sim.control.processes.clone(), sim.permits.clone());
            let (begun, executed) = (sim.begun.clone(), sim.executed.clone());
            tokio::spawn(async move {
                while let Some(command) = received.recv().await {
                    match command {
                        FleetCommand::NoteEnded(done) => done.send(()).unwrap(),
                        FleetCommand::Process { process, action, done } => {
                            begun.notify_one();
                            permits.acquire().await.unwrap().forget();
                            let is_ended = matches!(action, Kill | Stop);
                            let id = (!is_ended).then_some(i32::MAX as u32);
                            processes.lock().insert(process.clone(), id);
                            executed.lock().push((process, action));
                            done.send(Ok(())).ok();
                        }
                    }
                }
            });
            sim
        }

        fn executed(&self) -> Vec<(String, ProcessAction)> {
            std::mem::take(&mut *self.executed.lock())
        }

        async fn noted(&self) -> FleetState {
            FleetState::note(&self.control, &BTreeSet::new()).await.unwrap()
        }
    }

    fn commands(expected: &[(&str, ProcessAction)]) -> Vec<(String, ProcessAction)> {
        expected.iter().map(|(process, action)| ((*process).to_owned(), *action)).collect()
    }

    #[tokio::test]
    async fn an_action_that_has_begun_when_the_drill_is_stopped_ends_before_the_restoration_and_is_undone() {
        let sim = SimFleet::start().await;
        let before = sim.noted().await;
        let kill = Action::Process(Kill, ProcessTarget::Region(europe()));
        tokio::select! {
            done = sim.control.execute(&kill) => panic!("it waits: {done:?}"),
            () = sim.begun.notified() => {}
        }
        let restoring = tokio::spawn({
            let (before, control) = (before.clone(), sim.control.clone());
            async move { before.restore(&control).await }
        });
        tokio::task::yield_now().await;
        let cut = Action::Link(europe(), LinkChange::Cut(LinkDirection::Both));
        let (cutting, control) = (cut.clone(), sim.control.clone());
        let cutting = tokio::spawn(async move { control.execute(&cutting).await });
        sim.permits.add_permits(16);
        assert_eq!(restoring.await.unwrap(), [""; 0]);
        let expected = [(SPOKE, Kill), (REPLICA, Kill), (REPLICA, Start), (SPOKE, Start)];
        assert_eq!(sim.executed(), commands(&expected));
        cutting.await.unwrap().unwrap();
        assert_ne!(sim.noted().await, before, "the change after the restoration stays");
    }

    #[tokio::test]
    async fn the_fleet_returns_to_its_state_before_and_not_to_that_of_its_start() {
        let sim = SimFleet::start().await;
        sim.permits.add_permits(1000);
        assert!(sim.noted().await.is_undisturbed());
        let link = |change| Action::Link(europe(), change);
        sim.control.execute(&link(LinkChange::Times(3))).await.unwrap();
        sim.control.command(REPLICA, Pause).await.unwrap();
        sim.control.command(SPOKE, Kill).await.unwrap();
        let before = sim.noted().await;
        assert!(!before.is_undisturbed());
        sim.control.execute(&link(LinkChange::Cut(LinkDirection::To))).await.unwrap();
        sim.control.command(REPLICA, Kill).await.unwrap();
        sim.control.command(SPOKE, Start).await.unwrap();
        sim.executed();
        assert_eq!(before.restore(&sim.control).await, [""; 0]);
        let expected = [(REPLICA, Start), (SPOKE, Stop), (REPLICA, Pause)];
        assert_eq!(sim.executed(), commands(&expected));
        assert_eq!(sim.noted().await, before);
    }

    #[tokio::test]
    async fn a_slowed_replica_runs_at_its_speed_again() {
        let sim = SimFleet::start().await;
        sim.permits.add_permits(1000);
        let before = sim.noted().await;
        sim.control.execute(&Action::SlowReplicas(europe(), 10)).await.unwrap();
        assert!(!sim.noted().await.is_undisturbed());
        assert_eq!(before.restore(&sim.control).await, [""; 0]);
        assert_eq!(sim.executed(), commands(&[(REPLICA, Resume)]));
        assert_eq!(sim.noted().await, before);
    }
}
