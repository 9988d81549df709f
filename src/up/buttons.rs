//! What can be done to a world that runs: by people with `curl` ([`super::control`]) and by drills, with the same words.
//!
//! Processes are owned by the main thread, which does what it is ordered to; links are set here. A slow replica is one of two
//! things. A scripted one is told to take longer. A real one is stopped and continued ten times a second, so that it has so
//! small a share of the time: it computes in bursts, and what it has not to compute for (a report, a refusal) is late as well,
//! as on a machine whose processor is taken by somebody else.

use super::link::{Link, Weather};
use super::process::signal_to;
use loadtest::drill::Action;
use loadtest::drill::action::{LinkChange, Verb, Way, Whom};
use regions::id::RegionId;
use reqwest::Method;
use rustix::process::Signal;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use supervision::Mutex;
use tokio::sync::{mpsc, oneshot};
use tokio::task::AbortHandle;

/// In which a slowed replica runs once: short against what a request takes, long against a timer's tick.
const THROTTLE_PERIOD: Duration = Duration::from_millis(100);
/// How long a hub or a replica may take to do what it is told, until the next hub is asked: one that is paused is silent.
const TELL_TIMEOUT: Duration = Duration::from_secs(2);

/// Something that only the main thread does: it owns the processes.
pub(crate) struct Order {
    pub process: String,
    pub verb: Verb,
    pub done: oneshot::Sender<Result<(), String>>,
}

/// The processes of a region.
pub(crate) struct Place {
    pub spoke: String,
    pub replicas: Vec<(String, SocketAddr)>,
}

/// What the buttons act on.
#[derive(Clone)]
pub(crate) struct Buttons {
    pub links: Arc<BTreeMap<RegionId, Link>>,
    pub orders: mpsc::Sender<Order>,
    /// Process identifiers by name; `None` once it has ended.
    pub processes: Arc<Mutex<BTreeMap<String, Option<u32>>>>,
    pub places: Arc<BTreeMap<RegionId, Place>>,
    pub hubs: Vec<(String, SocketAddr)>,
    /// The members of the etcd, if it stands on one.
    pub store: Vec<String>,
    pub operator_token: PathBuf,
    /// Whether nothing is computed.
    pub scripted: bool,
    /// What ends the slowness of a real replica.
    pub throttled: Arc<Mutex<BTreeMap<String, AbortHandle>>>,
}

impl Buttons {
    /// Does what a drill says. What is asked for more often is not done here.
    pub(crate) async fn press(&self, action: &Action) -> Result<(), String> {
        match action {
            Action::Process(verb, whom) => {
                for process in self.processes_of(*verb, whom)? {
                    self.order(&process, *verb).await?;
                }
                Ok(())
            }
            Action::Link(region, change) => self.change(region, *change),
            Action::SlowReplicas(region, times) => self.slow(region, *times).await,
            Action::Surge { .. } => Ok(()),
            Action::Drain(region) => self.drain(Method::PUT, region).await,
            Action::Undrain(region) => self.drain(Method::DELETE, region).await,
        }
    }

    /// Has a process killed, started, paused.
    pub(crate) async fn order(&self, process: &str, verb: Verb) -> Result<(), String> {
        let (done, outcome) = oneshot::channel();
        let stopping = || "the world is stopping".to_owned();
        let order = Order { process: process.to_owned(), verb, done };
        self.orders.send(order).await.map_err(|_| stopping())?;
        outcome.await.map_err(|_| stopping())?
    }

    /// Changes a link.
    pub(crate) fn change(&self, region: &RegionId, change: LinkChange) -> Result<(), String> {
        let link = self.links.get(region).ok_or_else(|| {
            let known: Vec<_> = self.links.keys().map(RegionId::as_str).collect();
            format!("there is no link to '{region}'; there are: {}", known.join(", "))
        })?;
        link.set(|weather| changed(weather, change));
        Ok(())
    }

    /// In the order in which one needs the other: a door closes before what is behind it, and opens after it.
    fn processes_of(&self, verb: Verb, whom: &Whom) -> Result<Vec<String>, String> {
        let place = |region: &RegionId| self.place(region);
        let replicas =
            |place: &Place| place.replicas.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
        match whom {
            Whom::Spoke(region) => Ok(vec![place(region)?.spoke.clone()]),
            Whom::Replicas(region) => Ok(replicas(place(region)?)),
            Whom::Region(region) => {
                let place = place(region)?;
                let mut all = replicas(place);
                match verb {
                    Verb::Start => all.push(place.spoke.clone()),
                    Verb::Kill | Verb::Stop | Verb::Restart | Verb::Pause | Verb::Resume => {
                        all.insert(0, place.spoke.clone());
                    }
                }
                Ok(all)
            }
            Whom::Gateway => Ok(vec!["gateway".to_owned()]),
            Whom::Hub(number) => {
                let hub = self.hubs.get((*number as usize).saturating_sub(1));
                hub.map(|(name, _)| vec![name.clone()]).ok_or_else(|| format!("there is no hub {number}"))
            }
            Whom::Store(None) if !self.store.is_empty() => Ok(self.store.clone()),
            Whom::Store(number) => {
                let member = number.and_then(|number| self.store.get((number as usize).saturating_sub(1)));
                member.map(|name| vec![name.clone()]).ok_or_else(|| {
                    "there is no such store: this world's is a file in its hub; start it with --store etcd".to_owned()
                })
            }
        }
    }

    fn place(&self, region: &RegionId) -> Result<&Place, String> {
        self.places.get(region).ok_or_else(|| {
            let known: Vec<_> = self.places.keys().map(RegionId::as_str).collect();
            format!("there is no region '{region}'; there are: {}", known.join(", "))
        })
    }

    /// Makes the replicas of a region so many times slower than they are; once is as before.
    pub(crate) async fn slow(&self, region: &RegionId, times: u32) -> Result<(), String> {
        for (name, address) in &self.place(region)?.replicas {
            if self.scripted {
                told(Method::POST, format!("http://{address}/slow?times={times}"), None).await?;
            } else {
                self.throttle(name, times).await?;
            }
        }
        Ok(())
    }

    async fn throttle(&self, process: &str, times: u32) -> Result<(), String> {
        let before = self.throttled.lock().remove(process);
        if let Some(before) = before {
            before.abort();
            // It may have been taken by surprise while it was stopped.
            self.order(process, Verb::Resume).await?;
        }
        let id = self.id(process);
        if id.is_none() {
            return Err(format!("{process} does not run; start it first"));
        }
        if times > 1 {
            let task = tokio::spawn(throttled(self.clone(), process.to_owned(), id, times));
            let mut throttled = self.throttled.lock();
            throttled.insert(process.to_owned(), task.abort_handle());
        }
        Ok(())
    }

    fn id(&self, process: &str) -> Option<u32> {
        self.processes.lock().get(process).copied().flatten()
    }

    /// As an operator would: any hub that answers.
    pub(crate) async fn drain(&self, method: Method, region: &RegionId) -> Result<(), String> {
        let token = std::fs::read_to_string(&self.operator_token)
            .map_err(|error| format!("{} cannot be read: {error}", self.operator_token.display()))?;
        let mut last = "there is no hub".to_owned();
        for (_, hub) in &self.hubs {
            let url = format!("http://{hub}/v1/drains/{}/{}", region.cloud(), region.name());
            match told(method.clone(), url, Some(token.trim())).await {
                Ok(()) => return Ok(()),
                Err(problem) => last = problem,
            }
        }
        Err(last)
    }
}

/// Lets a process run for its share of each period, for as long as it is the same process.
async fn throttled(buttons: Buttons, process: String, id: Option<u32>, times: u32) {
    let runs = THROTTLE_PERIOD / times;
    while buttons.id(&process) == id && signal_to(id, Signal::STOP) {
        tokio::time::sleep(THROTTLE_PERIOD - runs).await;
        if buttons.id(&process) != id || !signal_to(id, Signal::CONT) {
            return;
        }
        tokio::time::sleep(runs).await;
    }
}

pub(crate) async fn told(method: Method, url: String, token: Option<&str>) -> Result<(), String> {
    let client = reqwest::Client::builder().no_proxy().timeout(TELL_TIMEOUT).build();
    let request = client.map_err(|error| error.to_string())?.request(method, &url);
    let request = token.iter().fold(request, |request, token| request.bearer_auth(token));
    let answer = request.send().await.map_err(|error| format!("{url} cannot be asked: {error}"))?;
    let status = answer.status();
    if status.is_success() { Ok(()) } else { Err(format!("{url} says {status}")) }
}

fn changed(weather: &mut Weather, change: LinkChange) {
    match change {
        LinkChange::Cut(way) => {
            weather.cut_to |= matches!(way, Way::Both | Way::To);
            weather.cut_from |= matches!(way, Way::Both | Way::From);
        }
        LinkChange::Heal => *weather = Weather::CALM,
        LinkChange::Times(times) => weather.times = times,
        LinkChange::Delay(extra) => weather.extra = extra,
        LinkChange::Lose(percent) => weather.lost = percent / 100.0,
    }
}
