//! The world itself: its processes and links, and what is done to them between the first start and the last stop.

use super::buttons::{Buttons, Order, Place as Pressed};
use super::etcd::Etcd;
use super::link::Link;
use super::plan::Plan;
use super::ports::Ports;
use super::process::{Process, Spec, StartError};
use super::{Interrupts, control, say};
use anyhow::{Context, Result};
use loadtest::drill::action::Verb;
use regions::id::RegionId;
use rustix::process::Signal;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};
use supervision::Mutex;
use tokio::sync::mpsc;

/// How long a process may take to become ready. A replica reads its weights from disk in this time.
const READY_TIMEOUT: Duration = Duration::from_secs(60);
/// How long a process may take to drain; a little longer than its own bound.
const STOP_TIMEOUT: Duration = Duration::from_secs(32);

/// The addresses of one region's parts.
pub(super) struct Place {
    pub(super) region: RegionId,
    pub(super) spoke: Spec,
    pub(super) spoke_address: SocketAddr,
    pub(super) operations: SocketAddr,
    pub(super) link_address: SocketAddr,
    pub(super) one_way: Duration,
    pub(super) replicas: Vec<(Spec, SocketAddr)>,
}

/// A world that is prepared or runs.
pub(crate) struct World {
    /// What the hub stands on, where that is not a file of its own.
    pub(super) etcd: Option<Etcd>,
    pub(super) hubs: Vec<(Spec, SocketAddr)>,
    pub(super) gateway: (Spec, SocketAddr),
    /// What clients have to believe, where they come over TLS.
    pub(super) certificate: Option<PathBuf>,
    /// What an operator shows to the hub.
    pub(super) operator_token: PathBuf,
    pub(super) operations: SocketAddr,
    pub(super) control: SocketAddr,
    pub(super) places: Vec<Place>,
    pub(super) ports: Ports,
    /// In the order of their start; they are stopped the other way round.
    pub(super) running: Vec<Process>,
    pub(super) orders: Option<mpsc::Receiver<Order>>,
    pub(super) processes: Arc<Mutex<BTreeMap<String, Option<u32>>>>,
    /// Tells a person what happens.
    pub(super) tell: fn(&str),
}

impl World {
    /// Where clients connect, without `/v1`.
    pub(crate) fn url(&self) -> String {
        let scheme = if self.certificate.is_some() { "https" } else { "http" };
        format!("{scheme}://{}", self.gateway.1)
    }

    /// Where operators ask the gateway.
    pub(crate) fn operations(&self) -> SocketAddr {
        self.operations
    }

    /// Where the hubs are.
    pub(crate) fn hubs(&self) -> Vec<SocketAddr> {
        self.hubs.iter().map(|(_, address)| *address).collect()
    }

    /// What an operator shows to them.
    pub(crate) fn operator_token(&self) -> Result<String> {
        let file = &self.operator_token;
        let text = std::fs::read_to_string(file);
        let text = text.with_context(|| format!("{} cannot be read", file.display()))?;
        Ok(text.trim().to_owned())
    }

    /// Starts everything, in the order in which one needs the other.
    pub(crate) async fn raise(&mut self, plan: &Plan) -> Result<Buttons> {
        let begun = Instant::now();
        let (members, peers) =
            self.etcd.as_ref().map(|etcd| (etcd.members.clone(), etcd.peers.clone())).unwrap_or_default();
        peers.iter().for_each(|peer| drop(self.ports.take(*peer)));
        for (member, address) in members {
            self.start(member, address, begun).await?;
        }
        for (hub, address) in self.hubs.clone() {
            self.start(hub, address, begun).await?;
        }
        let places: Vec<_> = self
            .places
            .iter()
            .map(|place| (place.spoke.clone(), place.spoke_address, place.operations, place.replicas.clone()))
            .collect();
        for (spoke, spoke_address, operations, replicas) in places {
            for (replica, address) in replicas {
                self.start(replica, address, begun).await?;
            }
            drop(self.ports.take(operations));
            self.start(spoke, spoke_address, begun).await?;
        }
        let links = self.open_links()?;
        let (gateway, gateway_address) = self.gateway.clone();
        drop(self.ports.take(self.operations));
        self.start(gateway, gateway_address, begun).await?;
        let (orders, receiver) = mpsc::channel(16);
        self.orders = Some(receiver);
        let socket = self.listener(self.control)?;
        let buttons = self.buttons(links, orders, plan)?;
        tokio::spawn(control::serve(socket, buttons.clone()));
        say::healthy(self.operations, plan).await?;
        Ok(buttons)
    }

    fn buttons(
        &self,
        links: Arc<BTreeMap<RegionId, Link>>,
        orders: mpsc::Sender<Order>,
        plan: &Plan,
    ) -> Result<Buttons> {
        let place = |place: &Place| {
            let replicas = place.replicas.iter().map(|(spec, address)| (spec.name.clone(), *address));
            (place.region.clone(), Pressed { spoke: place.spoke.name.clone(), replicas: replicas.collect() })
        };
        let members = self.etcd.iter().flat_map(|etcd| etcd.members.iter().map(|(member, _)| member));
        Ok(Buttons {
            links,
            orders,
            processes: self.processes.clone(),
            places: Arc::new(self.places.iter().map(place).collect()),
            hubs: self.hubs.iter().map(|(spec, address)| (spec.name.clone(), *address)).collect(),
            store: members.map(|member| member.name.clone()).collect(),
            operator_token: self.operator_token.clone(),
            scripted: plan.scripted.is_some(),
            throttled: Arc::default(),
        })
    }

    async fn start(&mut self, spec: Spec, address: SocketAddr, begun: Instant) -> Result<()> {
        drop(self.ports.take(address));
        let name = spec.name.clone();
        self.launch(spec).await?;
        (self.tell)(&format!("{:>6.2} s  {name} on {address}", begun.elapsed().as_secs_f64()));
        Ok(())
    }

    async fn launch(&mut self, spec: Spec) -> Result<(), StartError> {
        let process = Process::start(spec, READY_TIMEOUT).await?;
        self.note(&process.spec.name, process.id());
        self.running.push(process);
        Ok(())
    }

    fn note(&self, name: &str, id: Option<u32>) {
        self.processes.lock().insert(name.to_owned(), id);
    }

    fn open_links(&mut self) -> Result<Arc<BTreeMap<RegionId, Link>>> {
        let mut links = BTreeMap::new();
        let places: Vec<_> = self
            .places
            .iter()
            .map(|place| (place.region.clone(), place.link_address, place.spoke_address, place.one_way))
            .collect();
        for (region, door, target, one_way) in places {
            let socket = self.listener(door)?;
            links.insert(region, Link::open(socket, target, one_way));
        }
        Ok(Arc::new(links))
    }

    fn listener(&mut self, address: SocketAddr) -> Result<tokio::net::TcpListener> {
        let socket = self.ports.take(address).context("a reserved port is taken once")?;
        socket.set_nonblocking(true)?;
        Ok(tokio::net::TcpListener::from_std(socket)?)
    }

    /// Tells what ends, and does what the control port is asked for, until an interrupt.
    pub(crate) async fn watch(&mut self, interrupts: &mut Interrupts) {
        let mut orders = self.orders.take().expect("the world was raised");
        let mut look = tokio::time::interval(Duration::from_millis(200));
        loop {
            tokio::select! {
                () = interrupts.next() => return,
                _ = look.tick() => self.tell_ended(),
                Some(order) = orders.recv() => {
                    let outcome = self.obey(&order.process, order.verb).await;
                    // Whoever asked may have hung up; the order was carried out all the same.
                    order.done.send(outcome).ok();
                }
            }
        }
    }

    fn tell_ended(&mut self) {
        let mut ended = Vec::new();
        self.running.retain_mut(|process| match process.has_ended() {
            None => true,
            Some(status) => {
                ended.push((process.spec.name.clone(), status));
                false
            }
        });
        for (name, status) in ended {
            (self.tell)(&format!("{name} ended ({status})"));
            self.note(&name, None);
        }
    }

    async fn obey(&mut self, name: &str, verb: Verb) -> Result<(), String> {
        let spec = self.spec(name).ok_or_else(|| {
            let known: Vec<_> = self.specs().map(|spec| spec.name.as_str()).collect();
            format!("there is no process '{name}'; there are: {}", known.join(", "))
        })?;
        let at = self.running.iter().position(|process| process.spec.name == name);
        let done = match (verb, at) {
            (Verb::Pause | Verb::Resume, Some(at)) => {
                let (signal, done) =
                    if verb == Verb::Pause { (Signal::STOP, "paused") } else { (Signal::CONT, "resumed") };
                if !self.running[at].signal(signal) {
                    return Err(format!("{name} has just ended"));
                }
                done
            }
            (Verb::Pause | Verb::Resume | Verb::Stop, None) => {
                return Err(format!("{name} does not run; start it first"));
            }
            (Verb::Start, Some(_)) => return Err(format!("{name} runs already; restart begins anew")),
            // Killing what has ended changes nothing, and whoever kills wants it to be gone.
            (Verb::Kill, None) => "gone already",
            (Verb::Kill, Some(at)) => {
                let mut process = self.running.remove(at);
                process.kill().await;
                self.note(name, None);
                "killed"
            }
            (Verb::Stop, Some(at)) => {
                self.running.remove(at).stop(STOP_TIMEOUT).await;
                self.note(name, None);
                "stopped"
            }
            (Verb::Start, None) => {
                self.launch(spec).await.map_err(|error| error.to_string())?;
                "started"
            }
            (Verb::Restart, Some(at)) if spec.takes_over => {
                let before = self.running.remove(at);
                // One that was stopped has to hear of the next.
                before.signal(Signal::CONT);
                let mut next = spec;
                next.arguments.push("--take-over".to_owned());
                if let Err(error) = self.launch(next).await {
                    // Nothing was taken from it, and it goes on.
                    self.running.push(before);
                    return Err(error.to_string());
                }
                before.ended(STOP_TIMEOUT).await;
                "handed over to another"
            }
            (Verb::Restart, at) => {
                if let Some(at) = at {
                    self.running.remove(at).stop(STOP_TIMEOUT).await;
                    self.note(name, None);
                }
                self.launch(spec).await.map_err(|error| error.to_string())?;
                "started again"
            }
        };
        (self.tell)(&format!("{name} {done}"));
        Ok(())
    }

    fn specs(&self) -> impl Iterator<Item = &Spec> {
        let places = self.places.iter().flat_map(|place| {
            place.replicas.iter().map(|(replica, _)| replica).chain(std::iter::once(&place.spoke))
        });
        let members = self.etcd.iter().flat_map(|etcd| etcd.members.iter().map(|(member, _)| member));
        let hubs = self.hubs.iter().map(|(hub, _)| hub);
        hubs.chain([&self.gateway.0]).chain(places).chain(members)
    }

    fn spec(&self, name: &str) -> Option<Spec> {
        self.specs().find(|spec| spec.name == name).cloned()
    }

    /// Drains the world from its door inwards.
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
