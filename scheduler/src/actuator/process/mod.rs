//! Replicas are processes on the spoke's machine.
//!
//! Each has a port of its own, a configuration that a person can read and start again by hand, a log, a process group of its
//! own (so that a Ctrl-C reaches the spoke alone, which chooses the order of the end), and a record by which the next spoke
//! finds it ([`record`]). Why not simply end them with the spoke: a replica can take a minute to load, a spoke is back in a
//! second. And if it does not come back, they end by themselves ([`crate::keeper`]).
//!
//! A replica that dies is started again, at once the first time and then more and more slowly
//! ([`scheduler_core::scale::restarts`]).

mod life;
mod record;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant};

use regions::{Deployment, DeploymentName, RegionId};
use rustix::process::Pid;
use scheduler_core::scale::restarts::RestartBackoff;
use tokio::process::Command;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval, sleep_until};

use super::{Actuator, Deaths, Found, ReadyAt, ReplicaId, Running, Target, Targets};
use crate::config::ProcessConfig;
use crate::keeper::{self, Keeper};
use crate::scaling::events::{ReplicaEnded, ReplicaFound, ReplicaNotStarted, ReplicaStarted};
use life::{Ended, Life, Start, Told};
use record::{Files, FoundAgain, Identity};

/// Words of replicas that became ready and were not heard yet: as many as there are ports.
const READIED_MAX: usize = 256;

/// Starts and stops processes.
pub(crate) struct Process {
    config: ProcessConfig,
    dir: PathBuf,
    region: RegionId,
    program: PathBuf,
    client: reqwest::Client,
}

/// One that runs.
struct Kept {
    known: Known,
    since: Instant,
    ready: Option<(ReadyAt, Instant)>,
    /// Gone once it was told to end.
    stop: Option<oneshot::Sender<()>>,
}

/// What a process is for, and who it is.
struct Known {
    deployment: Arc<Deployment>,
    files: Files,
    identity: Identity,
}

/// All of them.
struct World {
    process: Process,
    kept: BTreeMap<ReplicaId, Kept>,
    lives: JoinSet<Ended>,
    readied: mpsc::Sender<(ReplicaId, ReadyAt)>,
    /// By deployment and model: one that cannot be loaded does not hold up the one that is served.
    restarts: BTreeMap<(DeploymentName, String), RestartBackoff>,
    deaths: BTreeMap<DeploymentName, Deaths>,
    /// The port that was given last: one that has just become free is not given at once.
    last_port: u16,
}

/// Why a process was not started.
#[derive(Debug, thiserror::Error)]
enum NotStarted {
    #[error("every port from {from} to {to} is taken; widen scaling.ports, or lower `max`")]
    NoPort { from: u16, to: u16 },
    #[error("{what}: {error}")]
    System { what: &'static str, error: io::Error },
}

impl Process {
    /// For the replicas of `region`, with its files in `dir`.
    ///
    /// # Errors
    ///
    /// When there is no client to ask replicas with, or nobody knows which program this is.
    pub(crate) fn new(config: ProcessConfig, dir: PathBuf, region: RegionId) -> io::Result<Process> {
        let program = config.program.clone().map_or_else(std::env::current_exe, Ok)?;
        let client = reqwest::Client::builder().no_proxy().build().map_err(io::Error::other)?;
        Ok(Process { config, dir, region, program, client })
    }
}

impl Actuator for Process {
    async fn run(self, mut targets: watch::Receiver<Targets>, running: watch::Sender<Running>) {
        let (readied, mut ready) = mpsc::channel(READIED_MAX);
        let period = Keeper { file: PathBuf::new(), alone: self.config.alone }.period() / 2;
        let last_port = *self.config.ports.end();
        let mut world = World {
            process: self,
            kept: BTreeMap::new(),
            lives: JoinSet::new(),
            readied,
            restarts: BTreeMap::new(),
            deaths: BTreeMap::new(),
            last_port,
        };
        world.find().await;
        let mut keep = interval(period);
        keep.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let wanted = targets.borrow_and_update().clone();
            let again = world.reconcile(&wanted).await;
            running.send_replace(world.running());
            let restart = async {
                match again {
                    Some(at) => sleep_until(at.into()).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                changed = targets.changed() => if changed.is_err() { break },
                Some(ended) = world.lives.join_next() => {
                    world.ended(ended.expect("a life does not panic and is not aborted")).await;
                }
                Some((id, at)) = ready.recv() => world.ready(&id, at).await,
                _ = keep.tick() => world.touch().await,
                () = restart => {}
            }
        }
        world.stop_all().await;
    }
}

impl World {
    /// Finds those of the spoke before this one.
    async fn find(&mut self) {
        for port in self.process.config.ports.clone() {
            let files = Files::of(&self.process.dir, port);
            let Some(FoundAgain { identity, process, deployment, took }) = files.found().await else {
                files.forget().await;
                continue;
            };
            let id = format!("{port}-{}", identity.name());
            ReplicaFound { id: &id, deployment: &deployment.name }.emit();
            let (deployment, life) = (Arc::new(deployment), Life::found(process, identity));
            self.begin(id, Known { deployment, files, identity }, life, Start::Took(took));
        }
    }

    /// Does what can be done now; when to look again, if somebody has died too often to be started now.
    async fn reconcile(&mut self, wanted: &Targets) -> Option<Instant> {
        let mut again: Option<Instant> = None;
        let all = wanted.values().flat_map(|target| {
            let next = target.next.iter().map(|(next, _)| next);
            std::iter::once(&target.deployment).chain(next)
        });
        let all: BTreeSet<_> = all.map(|deployment| restarts_of(deployment)).collect();
        self.restarts.retain(|key, _| all.contains(key));
        for (name, Target { deployment, replicas, next, stop }) in wanted {
            for id in stop {
                if let Some(stop) = self.kept.get_mut(id).and_then(|kept| kept.stop.take()) {
                    // Who has ended meanwhile is not there to hear it.
                    stop.send(()).ok();
                }
            }
            let next_spec = next.as_ref().map(|(next, _)| next.model_spec());
            let is_next = |it: &Deployment| next_spec.as_ref() == Some(&it.model_spec());
            let (mut of_next, mut served) = (0, 0);
            for Kept { known, stop, .. } in self.kept.values() {
                if known.deployment.name == *name && stop.is_some() {
                    *(if is_next(&known.deployment) { &mut of_next } else { &mut served }) += 1;
                }
            }
            // What is served comes first, where there are not ports for all.
            let next = next.iter().map(|(next, replicas)| (next, of_next, *replicas));
            for (deployment, there, replicas) in std::iter::once((deployment, served, *replicas)).chain(next)
            {
                if let Some(at) = self.start_missing(deployment, there, replicas).await {
                    again = Some(again.map_or(at, |again: Instant| again.min(at)));
                }
            }
        }
        again
    }

    /// Starts as many as are missing; when to look again, if they cannot all be started now.
    async fn start_missing(
        &mut self,
        deployment: &Arc<Deployment>,
        there: u32,
        replicas: u32,
    ) -> Option<Instant> {
        let key = restarts_of(deployment);
        for _ in there..replicas {
            let now = Instant::now();
            let pause = self.restarts.get(&key).map_or(Duration::ZERO, |restarts| restarts.delay(now));
            if pause.is_zero() {
                match self.start(deployment).await {
                    Ok(()) => continue,
                    Err(error) => {
                        ReplicaNotStarted { deployment: &deployment.name, error: &error }.emit();
                        self.died(deployment, None);
                    }
                }
            }
            let pause = self.restarts.get(&key).map_or(Duration::ZERO, |restarts| restarts.delay(now));
            return Some(now + pause);
        }
        None
    }

    async fn start(&mut self, deployment: &Arc<Deployment>) -> Result<(), NotStarted> {
        let failed = |what| move |error| NotStarted::System { what, error };
        let Process { config, dir, region, program, .. } = &self.process;
        let endpoint = self.free_port()?;
        let files = Files::of(dir, endpoint.port());
        let text = configuration(deployment, region, endpoint, &config.template);
        tokio::fs::write(files.config(), text)
            .await
            .map_err(failed("its configuration cannot be written"))?;
        keeper::touch(&files.alive()).await.map_err(failed("its file cannot be touched"))?;
        let log = File::create(files.log()).map_err(failed("its log cannot be written"))?;
        let keeper = Keeper { file: files.alive(), alone: config.alone };
        let child = Command::new(program)
            .args(["replica", "--region", region.as_str(), "--config"])
            .arg(files.config())
            .env(keeper::VARIABLE, keeper.value())
            .env_remove(keeper::PARENT_VARIABLE)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .process_group(0)
            // Nobody is left running whom nobody knows of: it is dropped only when the lines below fail.
            .kill_on_drop(true)
            .spawn()
            .map_err(failed("the program cannot be started"))?;
        let pid = child.id().and_then(|id| Pid::from_raw(id.cast_signed()));
        let pid = pid.expect("a child that was not waited for has a number");
        let identity = Identity::of(pid).map_err(failed("it cannot be told from others"))?;
        let life = Life::started(child, identity).map_err(failed("it cannot be watched"))?;
        files.write(identity, deployment, None).await.map_err(failed("its record cannot be written"))?;
        let id = format!("{}-{}", endpoint.port(), identity.name());
        ReplicaStarted { id: &id, deployment: &deployment.name, endpoint, log: &files.log() }.emit();
        self.last_port = endpoint.port();
        let known = Known { deployment: deployment.clone(), files, identity };
        self.begin(id, known, life, Start::Since(Instant::now()));
        Ok(())
    }

    fn begin(&mut self, id: ReplicaId, known: Known, life: Life, start: Start) {
        let (stop, told) = oneshot::channel();
        let endpoint = SocketAddr::from((self.process.config.address, known.files.port));
        self.lives.spawn(life.live(Told {
            id: id.clone(),
            endpoint,
            start,
            client: self.process.client.clone(),
            stop: told,
            readied: self.readied.clone(),
        }));
        self.kept.insert(id, Kept { known, since: Instant::now(), ready: None, stop: Some(stop) });
    }

    /// A port that nobody has, the one longest unused first.
    fn free_port(&self) -> Result<SocketAddr, NotStarted> {
        let ProcessConfig { address, ports, .. } = &self.process.config;
        let taken = |port: &u16| self.kept.values().any(|kept| kept.known.files.port == *port);
        let after = ports.clone().filter(|port| *port > self.last_port);
        let before = ports.clone().filter(|port| *port <= self.last_port);
        let free = |port: &u16| !taken(port) && TcpListener::bind((*address, *port)).is_ok();
        let port = after.chain(before).find(free);
        let port = port.ok_or(NotStarted::NoPort { from: *ports.start(), to: *ports.end() })?;
        Ok(SocketAddr::from((*address, port)))
    }

    async fn ready(&mut self, id: &ReplicaId, at: ReadyAt) {
        let Some(kept) = self.kept.get_mut(id) else { return };
        kept.ready = Some((at, Instant::now()));
        let Known { deployment, files, identity } = &kept.known;
        if let Err(error) = files.write(*identity, deployment, at.took).await {
            tracing::debug!(replica = id, %error, "how long it took to start is not kept");
        }
    }

    async fn ended(&mut self, Ended { id, told, how }: Ended) {
        let Some(kept) = self.kept.remove(&id) else { return };
        let Known { deployment, files, identity: _ } = &kept.known;
        files.forget().await;
        let log = files.log();
        ReplicaEnded { id: &id, deployment: &deployment.name, told, how: &how, log: &log }.emit();
        if !told {
            self.died(deployment, kept.ready.map(|(_, since)| since.elapsed()));
        }
    }

    fn died(&mut self, deployment: &Deployment, ready_for: Option<Duration>) {
        let now = Instant::now();
        let restarts = self.restarts.entry(restarts_of(deployment)).or_default();
        restarts.record_crash(ready_for, now);
        let deaths = self.deaths.entry(deployment.name.clone()).or_default();
        deaths.count += 1;
        deaths.restart_at = Some(now + restarts.delay(now));
    }

    /// Somebody looks after them.
    async fn touch(&self) {
        for kept in self.kept.values() {
            let files = &kept.known.files;
            if let Err(error) = keeper::touch(&files.alive()).await {
                tracing::debug!(port = files.port, %error, "a replica may take itself for alone");
            }
        }
    }

    fn running(&self) -> Running {
        let each = self.kept.iter().map(|(id, kept)| {
            let Kept { known: Known { deployment, .. }, since, ready, .. } = kept;
            let ready = ready.map(|(at, _)| at);
            (id.clone(), Found { deployment: deployment.clone(), since: *since, ready, rank: 0 })
        });
        Running { surveyed: true, replicas: each.collect(), deaths: self.deaths.clone() }
    }

    /// Ends them all, in good order and at the same time.
    async fn stop_all(mut self) {
        self.kept.values_mut().for_each(|kept| drop(kept.stop.take()));
        while let Some(ended) = self.lives.join_next().await {
            self.ended(ended.expect("a life does not panic and is not aborted")).await;
        }
    }
}

/// By which the restarts of a deployment's replicas are counted.
fn restarts_of(deployment: &Deployment) -> (DeploymentName, String) {
    (deployment.name.clone(), format!("{:?}", deployment.model_spec()))
}

/// The file of one replica.
fn configuration(deployment: &Deployment, region: &RegionId, listen: SocketAddr, template: &str) -> String {
    let text = |value: &str| toml::Value::String(value.to_owned());
    let Deployment { name, task, model, engine, residency: _, regions: _, scaling: _ } = deployment;
    format!(
        "# A replica of {name} in {region}, started by its spoke, which writes this file anew.\n\
         listen = {}\nnames = [{}]\nmodel = {}\ntask = {}\nengine = {{ kind = {}, precision = {} }}\n{template}",
        text(&listen.to_string()),
        text(name.as_str()),
        text(model),
        text(task.as_str()),
        text(engine.kind.as_str()),
        text(engine.precision.as_str()),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_replicas_file_has_what_the_deployment_says_and_then_the_template() {
        let text = "[[deployment]]\nname = \"a\"\ntask = \"embed\"\nmodel = \"/models/\\\"x\\\"\"\nengine = { kind = \"cpu\", precision = \"int8\" }\n";
        let deployment =
            regions::parse_deployments(text, &regions::Catalogue::builtin()).expect("sound").remove(0);
        let region = "aws/us-east-1".parse().expect("a region");
        let text =
            configuration(&deployment, &region, ([127, 0, 0, 1], 7300).into(), "[threads]\nengine = 2\n");
        let table: toml::Table = text.parse().expect("TOML");
        assert_eq!(table["listen"].as_str(), Some("127.0.0.1:7300"));
        assert_eq!(table["names"].as_array().map(|names| names[0].as_str()), Some(Some("a")));
        assert_eq!(table["model"].as_str(), Some("/models/\"x\""), "a value cannot break out of its line");
        assert_eq!(table["task"].as_str(), Some("embed"));
        assert_eq!(table["engine"]["precision"].as_str(), Some("int8"));
        assert_eq!(table["threads"]["engine"].as_integer(), Some(2));
    }
}
