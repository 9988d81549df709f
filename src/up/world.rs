//! The world itself: its processes and links, and what is done to them between the first start and the last stop.

use super::Interrupts;
use super::control::{self, Action, Control, Order};
use super::etcd::Etcd;
use super::files::{Door, Files, Front, state_dir};
use super::identities::Authority;
use super::link::Link;
use super::plan::Plan;
use super::ports::Ports;
use super::process::{Process, Spec, StartError};
use crate::cli::{StoreKind, UpOptions};
use anyhow::{Context, Result};
use regions::id::RegionId;
use regions::residency::ResidencyPolicy;
use std::collections::BTreeMap;
use std::fs;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::sync::mpsc;

/// How long a process may take to become ready. A replica reads its weights from disk in this time.
const READY_TIMEOUT: Duration = Duration::from_secs(60);
/// How long after that the gateway may take to see every region healthy.
const HEALTHY_TIMEOUT: Duration = Duration::from_secs(30);
/// How long a process may take to drain; a little longer than its own bound.
const STOP_TIMEOUT: Duration = Duration::from_secs(32);

/// The addresses of one region's parts.
struct Place {
    region: RegionId,
    spoke: Spec,
    spoke_address: SocketAddr,
    operations: SocketAddr,
    link_address: SocketAddr,
    one_way: Duration,
    replicas: Vec<(Spec, SocketAddr)>,
}

/// A world that is prepared or runs.
pub(super) struct World {
    /// What the hub stands on, where that is not a file of its own.
    etcd: Option<Etcd>,
    hub: (Spec, SocketAddr),
    gateway: (Spec, SocketAddr),
    /// What clients have to believe, where they come over TLS.
    certificate: Option<PathBuf>,
    /// What an operator shows to the hub.
    operator_token: PathBuf,
    operations: SocketAddr,
    control: SocketAddr,
    places: Vec<Place>,
    ports: Ports,
    /// In the order of their start; they are stopped the other way round.
    running: Vec<Process>,
    orders: Option<mpsc::Receiver<Order>>,
    processes: Arc<Mutex<BTreeMap<String, Option<u32>>>>,
}

impl World {
    /// Reserves the ports and writes every configuration.
    pub(super) fn prepare(options: &UpOptions, plan: &Plan) -> Result<World> {
        let mut ports = Ports::default();
        let gateway_address = ports.reserve(options.port).with_context(|| {
            format!("port {} is taken; choose another with --port, or stop whoever has it", options.port)
        })?;
        let dir = match &options.dir {
            Some(dir) => dir.clone(),
            None => state_dir()?.join(format!("up-{}", gateway_address.port())),
        };
        let files = Files { dir };
        fs::create_dir_all(files.logs())
            .with_context(|| format!("{} cannot be made", files.logs().display()))?;
        let files = Files { dir: files.dir.canonicalize()? };
        let operations = ports.reserve(0)?;
        let control = ports.reserve(0)?;
        let hub_address = ports.reserve(0)?;
        let etcd = match options.store {
            StoreKind::Embedded => None,
            StoreKind::Etcd => Some(Etcd::prepare(&files, &mut ports)?),
        };
        let hub = files.hub(plan, hub_address, etcd.as_ref())?;
        let place = plan.regions.first().context("no region")?.clone();
        let authority = Authority::begin(files.dir.join("identities"))?;
        let mut places = Vec::new();
        for region in &plan.regions {
            let (_, round_trip) = plan.apart(&place, region);
            let (listen, advertise, operations) = (ports.reserve(0)?, ports.reserve(0)?, ports.reserve(0)?);
            let mut replicas = Vec::new();
            for (number, (model, deployments)) in plan.replicas(region).into_iter().enumerate() {
                let address = ports.reserve(0)?;
                let names: Vec<_> = deployments.iter().map(|deployment| deployment.name.as_str()).collect();
                replicas.push((files.replica(region, number, address, model, &names)?, address));
            }
            let behind: Vec<_> = replicas.iter().map(|(_, address)| *address).collect();
            let door = Door {
                listen,
                advertise,
                operations,
                hub: hub_address,
                replicas: &behind,
                authority: &authority,
            };
            let spoke = files.spoke(plan, region, &door)?;
            let (region, one_way) = (region.clone(), round_trip / 2);
            let (spoke_address, link_address) = (listen, advertise);
            places.push(Place { region, spoke, spoke_address, operations, link_address, one_way, replicas });
        }
        let certificate = options.tls.then(|| files.certificate()).transpose()?;
        let (key, shown) = (options.key.as_str(), certificate.as_ref());
        let authority = &authority;
        let front = Front { listen: gateway_address, operations, key, certificate: shown, authority };
        let gateway = files.gateway(plan, &place, hub_address, &front)?;
        Ok(World {
            etcd,
            hub: (hub, hub_address),
            gateway: (gateway, gateway_address),
            certificate: certificate.map(|made| made.certificate),
            operator_token: files.operator_token()?,
            operations,
            control,
            places,
            ports,
            running: Vec::new(),
            orders: None,
            processes: Arc::default(),
        })
    }

    /// Starts everything, in the order in which one needs the other.
    pub(super) async fn raise(&mut self, plan: &Plan) -> Result<()> {
        let begun = Instant::now();
        let (members, peers) =
            self.etcd.as_ref().map(|etcd| (etcd.members.clone(), etcd.peers.clone())).unwrap_or_default();
        peers.iter().for_each(|peer| drop(self.ports.take(*peer)));
        for (member, address) in members {
            self.start(member, address, begun).await?;
        }
        let (hub, hub_address) = self.hub.clone();
        self.start(hub, hub_address, begun).await?;
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
        tokio::spawn(control::serve(socket, Control { links, orders, processes: self.processes.clone() }));
        healthy(self.operations, plan).await
    }

    async fn start(&mut self, spec: Spec, address: SocketAddr, begun: Instant) -> Result<()> {
        drop(self.ports.take(address));
        let name = spec.name.clone();
        self.launch(spec).await?;
        println!("{:>6.2} s  {name} on {address}", begun.elapsed().as_secs_f64());
        Ok(())
    }

    async fn launch(&mut self, spec: Spec) -> Result<(), StartError> {
        let process = Process::start(spec, READY_TIMEOUT).await?;
        self.note(&process.spec.name, process.id());
        self.running.push(process);
        Ok(())
    }

    fn note(&self, name: &str, id: Option<u32>) {
        self.processes.lock().expect("nobody panics while holding it").insert(name.to_owned(), id);
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

    /// Says what there is and how to use it.
    pub(super) async fn announce(&self, plan: &Plan, key: &str) -> Result<()> {
        let place = &plan.regions[0];
        println!("\n{:<28} {:<16} {:>9} {:>8}  state", "region", "city", "distance", "rtt");
        for region in &plan.regions {
            let (distance_km, round_trip) = plan.apart(place, region);
            let city = &plan.catalogue.get(region).context("planned above")?.city;
            let millis = round_trip.as_secs_f64() * 1e3;
            println!("{:<28} {city:<16} {distance_km:>6.0} km {millis:>5.0} ms  healthy", region.as_str());
        }
        let (scheme, believing) = match &self.certificate {
            Some(file) => ("https", format!("--cacert {} ", file.display())),
            None => ("http", String::new()),
        };
        let (url, model) = (format!("{scheme}://{}", self.gateway.1), &plan.deployments[0].name);
        println!("\nmodels      {}", names(plan));
        println!("operations  http://{}/routes", self.operations);
        println!("hub         http://{} (--token-file {})", self.hub.1, self.operator_token.display());
        println!("control     http://{} (cut, heal, kill, restart)", self.control);
        if let Some(file) = &self.certificate {
            println!("certificate {}", file.display());
        }
        println!("\nready  {url}/v1\n");
        println!(
            "curl -s {believing}{url}/v1/embeddings -H 'authorization: Bearer {key}' -H 'content-type: application/json' \\\n  \
             -d '{{\"model\": \"{model}\", \"input\": \"The sea was calm that morning.\"}}'"
        );
        Ok(())
    }

    /// Tells what ends, and does what the control port is asked for, until an interrupt.
    pub(super) async fn watch(&mut self, interrupts: &mut Interrupts) {
        let mut orders = self.orders.take().expect("the world was raised");
        let mut look = tokio::time::interval(Duration::from_millis(200));
        loop {
            tokio::select! {
                () = interrupts.next() => return,
                _ = look.tick() => self.tell_ended(),
                Some(order) = orders.recv() => {
                    let outcome = self.obey(&order.process, order.action).await;
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
            println!("{name} ended ({status})");
            self.note(&name, None);
        }
    }

    async fn obey(&mut self, name: &str, action: Action) -> Result<(), String> {
        let spec = self.spec(name).ok_or_else(|| {
            let known: Vec<_> = self.specs().map(|spec| spec.name.as_str()).collect();
            format!("there is no process '{name}'; there are: {}", known.join(", "))
        })?;
        if let Some(at) = self.running.iter().position(|process| process.spec.name == name) {
            let mut process = self.running.remove(at);
            process.kill().await;
            self.note(name, None);
            println!("{name} killed");
        }
        if action == Action::Restart {
            self.launch(spec).await.map_err(|error| error.to_string())?;
            println!("{name} started again");
        }
        Ok(())
    }

    fn specs(&self) -> impl Iterator<Item = &Spec> {
        let places = self.places.iter().flat_map(|place| {
            place.replicas.iter().map(|(replica, _)| replica).chain(std::iter::once(&place.spoke))
        });
        let members = self.etcd.iter().flat_map(|etcd| etcd.members.iter().map(|(member, _)| member));
        [&self.hub.0, &self.gateway.0].into_iter().chain(places).chain(members)
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

fn names(plan: &Plan) -> String {
    let each = plan.deployments.iter().map(|deployment| match &deployment.residency {
        ResidencyPolicy::Anywhere => deployment.name.to_string(),
        residency => format!("{} (only in {residency})", deployment.name),
    });
    each.collect::<Vec<_>>().join(", ")
}

/// Waits until the gateway sees every region healthy, with a replica ready for something.
async fn healthy(operations: SocketAddr, plan: &Plan) -> Result<()> {
    let client = reqwest::Client::builder().no_proxy().build()?;
    let url = format!("http://{operations}/routes");
    let seen = async {
        let mut look = tokio::time::interval(Duration::from_millis(50));
        loop {
            look.tick().await;
            let Ok(answer) = client.get(&url).send().await else {
                continue;
            };
            let Ok(routes) = answer.json::<serde_json::Value>().await else {
                continue;
            };
            let regions = routes["regions"].as_array().map(Vec::as_slice).unwrap_or_default();
            let healthy = |region: &&serde_json::Value| {
                region["health"] == "healthy"
                    && region["ready"].as_array().is_some_and(|ready| !ready.is_empty())
            };
            if regions.iter().filter(healthy).count()
                >= plan.regions.iter().filter(|region| !plan.replicas(region).is_empty()).count()
            {
                return;
            }
        }
    };
    tokio::time::timeout(HEALTHY_TIMEOUT, seen).await.with_context(|| {
        format!(
            "the gateway did not see every region healthy within {} s; see {url}",
            HEALTHY_TIMEOUT.as_secs()
        )
    })
}
