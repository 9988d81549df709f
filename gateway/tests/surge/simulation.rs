//! Simulated world of a surge: events in order of time, with all randomness drawn from the seed.

use gateway_core::candidate::OrderPosition;
use gateway_core::circuit::Permille;
use gateway_core::instances::InstanceIndex;
use gateway_core::spill::{Spill, SpillCandidate, SpillRank, SpillRequest};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use regions::catalogue::Catalogue;
use regions::id::DeploymentName;
use regions::latency::LatencyModel;
use regions::set::RegionIndex;
use replica_api::priority::Priority;
use scheduler_api::report::{DeploymentLoad, EXCHANGE_PERIOD, ExchangeRequest, Gateway};
use scheduler_core::spoke::{
    PassiveHealth, ReplicaOutcome, ReplicaStatus, SelectedReplica, Spoke, TrafficOrigin,
};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::{Duration, Instant};

pub(crate) const DEADLINE: Duration = Duration::from_millis(1500);
const REGIONS: [&str; 6] = [
    "aws/us-east-1",
    "aws/us-west-2",
    "aws/eu-central-1",
    "aws/eu-west-2",
    "aws/ap-northeast-1",
    "aws/ap-southeast-2",
];
/// Region and factor of the surge.
const SURGING: usize = 2;
const SURGE: f64 = 3.0;
const GATEWAYS_EACH: usize = 2;
/// Speed of one region in tokens per second, and mean tokens of a request.
const SPEED: f64 = 64_000.0;
const TOKENS_MEAN: f64 = 64.0;
/// Usual load of all regions, as a share of their capacity.
const USUAL_LOAD: f64 = 0.6;
/// Time of a request besides its queue.
const SERVICE: Duration = Duration::from_millis(20);
const BEGINS: Duration = Duration::from_secs(5);
const ENDS: Duration = Duration::from_secs(25);
const OVER: Duration = Duration::from_secs(30);

/// Routing policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Policy {
    Nearest,
    Greedy,
    Credits,
}

/// Outcome of a request that arrived during the surge.
pub(crate) struct Outcome {
    /// `None` if its deadline passed.
    pub(crate) took: Option<Duration>,
    pub(crate) remote: bool,
}

/// Results of the simulation.
pub(crate) struct SimulationResult {
    pub(crate) surge_outcomes: Vec<Outcome>,
    pub(crate) longest_remote_queue: Duration,
}

enum Event {
    /// A client of this gateway sends a request.
    ClientRequest {
        gateway: usize,
    },
    /// A request arrives at a region.
    Arrival {
        region: usize,
        request: Request,
    },
    /// A region completes it.
    Completion {
        region: usize,
        choice: SelectedReplica,
    },
    /// A gateway polls the reports of a region.
    Poll {
        gateway: usize,
        region: usize,
    },
    ExchangeArrival {
        region: usize,
        gateway: usize,
        exchange: ExchangeRequest,
        sent_at: Instant,
    },
    ReportArrival {
        gateway: usize,
        region: usize,
        load: DeploymentLoad,
        granted: Option<u64>,
        sent_at: Instant,
    },
    /// A replica reports its status.
    ReplicaStatusDue {
        region: usize,
    },
}

struct Request {
    gateway: usize,
    tokens: u64,
    sent_at: Instant,
    origin: TrafficOrigin,
}

struct Edge {
    home_region: usize,
    spill: Spill,
    loads: Vec<DeploymentLoad>,
    rtt: Vec<Duration>,
    sequence: u64,
}

struct Region {
    index: RegionIndex,
    spoke: Spoke,
    /// Time at which it has completed all accepted requests.
    idle_at: Instant,
}

struct Simulation {
    policy: Policy,
    chance: SmallRng,
    start: Instant,
    now: Instant,
    events: BinaryHeap<Reverse<(Instant, u64)>>,
    waiting: std::collections::BTreeMap<u64, Event>,
    last_event: u64,
    name: DeploymentName,
    edges: Vec<Edge>,
    regions: Vec<Region>,
    result: SimulationResult,
}

impl SimulationResult {
    pub(crate) fn run(policy: Policy, seed: u64) -> SimulationResult {
        let mut simulation = Simulation::new(policy, seed);
        while let Some(Reverse((at, number))) = simulation.events.pop() {
            if at > simulation.start + OVER {
                break;
            }
            simulation.now = at;
            let event = simulation.waiting.remove(&number).unwrap();
            simulation.handle(event);
        }
        simulation.result
    }
}

impl Simulation {
    fn new(policy: Policy, seed: u64) -> Simulation {
        let (catalogue, start) = (Catalogue::builtin(), Instant::now());
        let index = |name: &str| catalogue.index_of(&name.parse().unwrap()).unwrap();
        let regions = REGIONS.iter().map(|name| Region {
            index: index(name),
            spoke: Spoke::new(name.parse().unwrap(), 1, vec!["10.0.0.1:1".parse().unwrap()]),
            idle_at: start,
        });
        let edges = (0..REGIONS.len() * GATEWAYS_EACH).map(|number| {
            let home_region = number % REGIONS.len();
            let at = catalogue.region(index(REGIONS[home_region])).point;
            let latency = LatencyModel::new(at, &catalogue);
            let rtt = REGIONS.iter().map(|name| latency.estimate(index(name), start)).collect();
            let loads = vec![DeploymentLoad::default(); REGIONS.len()];
            Edge { home_region, spill: Spill::default(), loads, rtt, sequence: 0 }
        });
        let mut simulation = Simulation {
            policy,
            chance: SmallRng::seed_from_u64(seed),
            start,
            now: start,
            events: BinaryHeap::new(),
            waiting: Default::default(),
            last_event: 0,
            name: "d".parse().unwrap(),
            edges: edges.collect(),
            regions: regions.collect(),
            result: SimulationResult { surge_outcomes: Vec::new(), longest_remote_queue: Duration::ZERO },
        };
        for region in 0..REGIONS.len() {
            simulation.schedule(Duration::ZERO, Event::ReplicaStatusDue { region });
        }
        for gateway in 0..simulation.edges.len() {
            simulation.schedule(Duration::ZERO, Event::ClientRequest { gateway });
            for region in 0..REGIONS.len() {
                let some = simulation.chance.random_range(0..EXCHANGE_PERIOD.as_micros() as u64);
                simulation.schedule(Duration::from_micros(some), Event::Poll { gateway, region });
            }
        }
        simulation
    }

    fn schedule(&mut self, after: Duration, event: Event) {
        self.last_event += 1;
        self.events.push(Reverse((self.now + after, self.last_event)));
        self.waiting.insert(self.last_event, event);
    }

    fn is_surging(&self) -> bool {
        (BEGINS..ENDS).contains(&(self.now - self.start))
    }

    /// Draws from an exponential distribution with this mean.
    fn exponential(&mut self, mean: f64) -> f64 {
        -mean * (1.0 - self.chance.random::<f64>()).ln()
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::ClientRequest { gateway } => self.send_request(gateway),
            Event::Arrival { region, request } => self.arrive(region, request),
            Event::Completion { region, choice } => {
                self.regions[region].spoke.finished(&choice, ReplicaOutcome::Responded, self.now);
            }
            Event::Poll { gateway, region } => {
                let edge = &mut self.edges[gateway];
                edge.sequence += 1;
                let expected = [(self.name.clone(), edge.spill.demand(&self.name, self.now))].into();
                let sender = Gateway { location: String::new(), boot_id: gateway as u64 };
                let exchange = ExchangeRequest {
                    gateway: sender,
                    sequence: edge.sequence,
                    known: None,
                    requested: expected,
                };
                let (outbound, sent_at) = (edge.rtt[region] / 2, self.now);
                self.schedule(outbound, Event::ExchangeArrival { region, gateway, exchange, sent_at });
                self.schedule(EXCHANGE_PERIOD, Event::Poll { gateway, region });
            }
            Event::ExchangeArrival { region, gateway, exchange, sent_at } => {
                let spoke = &mut self.regions[region].spoke;
                let granted = spoke.exchange(&exchange, self.now).grants.get(&self.name).copied();
                let load = spoke.loads(self.now).get(&self.name).copied().unwrap_or_default();
                let inbound = self.edges[gateway].rtt[region] / 2;
                self.schedule(inbound, Event::ReportArrival { gateway, region, load, granted, sent_at });
            }
            Event::ReportArrival { gateway, region, load, granted, sent_at } => {
                let edge = &mut self.edges[gateway];
                edge.loads[region] = load;
                let granted = [(&self.name, granted)];
                edge.spill.set_credits(InstanceIndex::new(self.regions[region].index, 0), granted, sent_at);
            }
            Event::ReplicaStatusDue { region } => {
                let wait_time = self.wait_time(region);
                if region != SURGING {
                    self.result.longest_remote_queue = self.result.longest_remote_queue.max(wait_time);
                }
                let pending_tokens = (wait_time.as_secs_f64() * SPEED) as u64;
                let observed = ReplicaStatus {
                    model: None,
                    failure: None,
                    names: [self.name.clone()].into(),
                    ready: true,
                    draining: false,
                    pending_tokens,
                    interactive_tokens: Some(pending_tokens),
                    tokens_per_second: SPEED,
                };
                self.regions[region].spoke.observe_replica(0, observed, self.now);
                self.schedule(EXCHANGE_PERIOD, Event::ReplicaStatusDue { region });
            }
        }
    }

    fn wait_time(&self, region: usize) -> Duration {
        self.regions[region].idle_at.saturating_duration_since(self.now)
    }

    fn send_request(&mut self, gateway: usize) {
        let usual = SPEED * USUAL_LOAD / TOKENS_MEAN / GATEWAYS_EACH as f64;
        let surge = if self.edges[gateway].home_region == SURGING && self.is_surging() { SURGE } else { 1.0 };
        let next = self.exponential(1.0 / (usual * surge));
        self.schedule(Duration::from_secs_f64(next), Event::ClientRequest { gateway });
        let tokens = self.exponential(TOKENS_MEAN) as u64 + 1;
        let (region, origin) = self.route(gateway, tokens);
        let outbound = self.edges[gateway].rtt[region] / 2;
        let request = Request { gateway, tokens, sent_at: self.now, origin };
        self.schedule(outbound, Event::Arrival { region, request });
    }

    fn route(&mut self, gateway: usize, tokens: u64) -> (usize, TrafficOrigin) {
        let chance = Permille::new(self.chance.random_range(0..1000));
        let edge = &mut self.edges[gateway];
        let candidate = |region: usize| {
            let load = &edge.loads[region];
            let wait = (load.tokens_per_second > 0.0)
                .then(|| Duration::from_secs_f64(load.pending_tokens as f64 / load.tokens_per_second));
            SpillCandidate { region: self.regions[region].index, rtt: edge.rtt[region], wait }
        };
        let mut candidates: Vec<_> = (0..REGIONS.len()).map(candidate).collect();
        let at = |found: RegionIndex| self.regions.iter().position(|region| region.index == found).unwrap();
        match self.policy {
            Policy::Nearest => (edge.home_region, TrafficOrigin::Local),
            Policy::Greedy => {
                let least = candidates
                    .iter()
                    .min_by_key(|candidate| candidate.rtt + candidate.wait.unwrap_or_default());
                (at(least.unwrap().region), TrafficOrigin::Local)
            }
            Policy::Credits => {
                candidates.sort_by_key(|candidate| candidate.rtt);
                let ask = SpillRequest {
                    deployment: &self.name,
                    priority: Priority::Interactive,
                    tokens,
                    left: DEADLINE,
                    is_shed: false,
                    leave_draw: chance,
                };
                let others = candidates[1..].iter().map(|candidate| SpillRank {
                    order: OrderPosition::default(),
                    rtt: candidate.rtt,
                    region: candidate.region,
                });
                let wait_time = |region| candidates.iter().find(|candidate| candidate.region == region)?.wait;
                let decision = edge.spill.decide(&ask, candidates[0], others, wait_time, |_| true, self.now);
                if let Some(decision) = decision {
                    edge.spill.commit(&self.name, decision, self.now);
                }
                match decision.and_then(|decision| decision.to) {
                    Some(region) => (at(region), TrafficOrigin::Spillover),
                    None => (edge.home_region, TrafficOrigin::Local),
                }
            }
        }
    }

    fn arrive(&mut self, region: usize, request: Request) {
        let Request { gateway, tokens, sent_at, origin } = request;
        let home_region = self.edges[gateway].home_region;
        let inbound = self.edges[gateway].rtt[region] / 2;
        let queueing = self.wait_time(region);
        let compute = Duration::from_secs_f64(tokens as f64 / SPEED);
        let took = (self.now - sent_at) + queueing + compute + SERVICE + inbound;
        let in_time = took <= DEADLINE;
        if in_time {
            let now = self.now;
            let here = &mut self.regions[region];
            here.spoke.arrived(&self.name, tokens, origin, now);
            let choice =
                here.spoke.select_replica(&self.name, tokens, |_| PassiveHealth::HEALTHY, now).unwrap();
            here.idle_at = here.idle_at.max(now) + compute;
            self.schedule(queueing + compute, Event::Completion { region, choice });
        }
        if (BEGINS..ENDS).contains(&(sent_at - self.start)) {
            let outcome = Outcome { took: in_time.then_some(took), remote: region != home_region };
            self.result.surge_outcomes.push(outcome);
        }
    }
}
