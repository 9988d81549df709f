//! Simulated world of a surge: events in order of time, with all randomness drawn from the seed.

use gateway_core::circuit::Permille;
use gateway_core::instances::InstanceIndex;
use gateway_core::spill::{Spill, SpillCandidate, SpillRequest};
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
pub(crate) struct World {
    pub(crate) in_the_surge: Vec<Outcome>,
    pub(crate) worst_neighbour: Duration,
}

enum Event {
    /// A client of this gateway sends a request.
    Asks {
        gateway: usize,
    },
    /// A request arrives at a region.
    Comes {
        region: usize,
        request: Request,
    },
    /// A region completes it.
    Done {
        region: usize,
        choice: SelectedReplica,
    },
    /// A gateway polls the reports of a region.
    Questions {
        gateway: usize,
        region: usize,
    },
    Answers {
        region: usize,
        gateway: usize,
        question: ExchangeRequest,
        asked: Instant,
    },
    Hears {
        gateway: usize,
        region: usize,
        load: DeploymentLoad,
        granted: Option<u64>,
        asked: Instant,
    },
    /// A replica reports its status.
    Says {
        region: usize,
    },
}

struct Request {
    gateway: usize,
    tokens: u64,
    asked: Instant,
    whose: TrafficOrigin,
}

struct Edge {
    home: usize,
    spill: Spill,
    loads: Vec<DeploymentLoad>,
    rtt: Vec<Duration>,
    sequence: u64,
}

struct Region {
    index: RegionIndex,
    spoke: Spoke,
    /// Time at which it has completed all accepted requests.
    free: Instant,
}

struct Running {
    policy: Policy,
    chance: SmallRng,
    start: Instant,
    now: Instant,
    events: BinaryHeap<Reverse<(Instant, u64)>>,
    waiting: std::collections::BTreeMap<u64, Event>,
    numbered: u64,
    name: DeploymentName,
    edges: Vec<Edge>,
    regions: Vec<Region>,
    world: World,
}

impl World {
    pub(crate) fn run(policy: Policy, seed: u64) -> World {
        let mut running = Running::new(policy, seed);
        while let Some(Reverse((at, number))) = running.events.pop() {
            if at > running.start + OVER {
                break;
            }
            running.now = at;
            let event = running.waiting.remove(&number).unwrap();
            running.happens(event);
        }
        running.world
    }
}

impl Running {
    fn new(policy: Policy, seed: u64) -> Running {
        let (catalogue, start) = (Catalogue::builtin(), Instant::now());
        let index = |name: &str| catalogue.index_of(&name.parse().unwrap()).unwrap();
        let regions = REGIONS.iter().map(|name| Region {
            index: index(name),
            spoke: Spoke::new(name.parse().unwrap(), 1, vec!["10.0.0.1:1".parse().unwrap()]),
            free: start,
        });
        let edges = (0..REGIONS.len() * GATEWAYS_EACH).map(|number| {
            let home = number % REGIONS.len();
            let at = catalogue.region(index(REGIONS[home])).point;
            let latency = LatencyModel::new(at, &catalogue);
            let rtt = REGIONS.iter().map(|name| latency.estimate(index(name), start)).collect();
            let loads = vec![DeploymentLoad::default(); REGIONS.len()];
            Edge { home, spill: Spill::default(), loads, rtt, sequence: 0 }
        });
        let mut running = Running {
            policy,
            chance: SmallRng::seed_from_u64(seed),
            start,
            now: start,
            events: BinaryHeap::new(),
            waiting: Default::default(),
            numbered: 0,
            name: "d".parse().unwrap(),
            edges: edges.collect(),
            regions: regions.collect(),
            world: World { in_the_surge: Vec::new(), worst_neighbour: Duration::ZERO },
        };
        for region in 0..REGIONS.len() {
            running.later(Duration::ZERO, Event::Says { region });
        }
        for gateway in 0..running.edges.len() {
            running.later(Duration::ZERO, Event::Asks { gateway });
            for region in 0..REGIONS.len() {
                let some = running.chance.random_range(0..EXCHANGE_PERIOD.as_micros() as u64);
                running.later(Duration::from_micros(some), Event::Questions { gateway, region });
            }
        }
        running
    }

    fn later(&mut self, after: Duration, event: Event) {
        self.numbered += 1;
        self.events.push(Reverse((self.now + after, self.numbered)));
        self.waiting.insert(self.numbered, event);
    }

    fn surges(&self) -> bool {
        (BEGINS..ENDS).contains(&(self.now - self.start))
    }

    /// Draws from an exponential distribution with this mean.
    fn drawn(&mut self, mean: f64) -> f64 {
        -mean * (1.0 - self.chance.random::<f64>()).ln()
    }

    fn happens(&mut self, event: Event) {
        match event {
            Event::Asks { gateway } => self.asks(gateway),
            Event::Comes { region, request } => self.comes(region, request),
            Event::Done { region, choice } => {
                self.regions[region].spoke.finished(&choice, ReplicaOutcome::Responded, self.now);
            }
            Event::Questions { gateway, region } => {
                let edge = &mut self.edges[gateway];
                edge.sequence += 1;
                let wanted = [(self.name.clone(), edge.spill.demand(&self.name, self.now))].into();
                let who = Gateway { location: String::new(), boot_id: gateway as u64 };
                let question =
                    ExchangeRequest { gateway: who, sequence: edge.sequence, known: None, requested: wanted };
                let (there, asked) = (edge.rtt[region] / 2, self.now);
                self.later(there, Event::Answers { region, gateway, question, asked });
                self.later(EXCHANGE_PERIOD, Event::Questions { gateway, region });
            }
            Event::Answers { region, gateway, question, asked } => {
                let spoke = &mut self.regions[region].spoke;
                let granted = spoke.exchange(&question, self.now).grants.get(&self.name).copied();
                let load = spoke.loads(self.now).get(&self.name).copied().unwrap_or_default();
                let back = self.edges[gateway].rtt[region] / 2;
                self.later(back, Event::Hears { gateway, region, load, granted, asked });
            }
            Event::Hears { gateway, region, load, granted, asked } => {
                let edge = &mut self.edges[gateway];
                edge.loads[region] = load;
                let granted = [(&self.name, granted)];
                edge.spill.set_credits(InstanceIndex::new(self.regions[region].index, 0), granted, asked);
            }
            Event::Says { region } => {
                let waits = self.waits(region);
                if region != SURGING {
                    self.world.worst_neighbour = self.world.worst_neighbour.max(waits);
                }
                let pending_tokens = (waits.as_secs_f64() * SPEED) as u64;
                let observed = ReplicaStatus {
                    model: None,
                    names: [self.name.clone()].into(),
                    ready: true,
                    draining: false,
                    pending_tokens,
                    interactive_tokens: Some(pending_tokens),
                    tokens_per_second: SPEED,
                };
                self.regions[region].spoke.observe_replica(0, observed, self.now);
                self.later(EXCHANGE_PERIOD, Event::Says { region });
            }
        }
    }

    fn waits(&self, region: usize) -> Duration {
        self.regions[region].free.saturating_duration_since(self.now)
    }

    fn asks(&mut self, gateway: usize) {
        let usual = SPEED * USUAL_LOAD / TOKENS_MEAN / GATEWAYS_EACH as f64;
        let surge = if self.edges[gateway].home == SURGING && self.surges() { SURGE } else { 1.0 };
        let next = self.drawn(1.0 / (usual * surge));
        self.later(Duration::from_secs_f64(next), Event::Asks { gateway });
        let tokens = self.drawn(TOKENS_MEAN) as u64 + 1;
        let (region, whose) = self.goes(gateway, tokens);
        let there = self.edges[gateway].rtt[region] / 2;
        let request = Request { gateway, tokens, asked: self.now, whose };
        self.later(there, Event::Comes { region, request });
    }

    fn goes(&mut self, gateway: usize, tokens: u64) -> (usize, TrafficOrigin) {
        let chance = Permille::new(self.chance.random_range(0..1000));
        let edge = &mut self.edges[gateway];
        let place = |region: usize| {
            let load = &edge.loads[region];
            let wait = (load.tokens_per_second > 0.0)
                .then(|| Duration::from_secs_f64(load.pending_tokens as f64 / load.tokens_per_second));
            SpillCandidate { region: self.regions[region].index, rtt: edge.rtt[region], wait }
        };
        let mut places: Vec<_> = (0..REGIONS.len()).map(place).collect();
        let at = |found: RegionIndex| self.regions.iter().position(|region| region.index == found).unwrap();
        match self.policy {
            Policy::Nearest => (edge.home, TrafficOrigin::Local),
            Policy::Greedy => {
                let least = places.iter().min_by_key(|place| place.rtt + place.wait.unwrap_or_default());
                (at(least.unwrap().region), TrafficOrigin::Local)
            }
            Policy::Credits => {
                places.sort_by_key(|place| place.rtt);
                let ask = SpillRequest {
                    deployment: &self.name,
                    priority: Priority::Interactive,
                    tokens,
                    left: DEADLINE,
                    is_shed: false,
                    leave_draw: chance,
                };
                let others = places[1..].iter().map(|place| (place.region, place.rtt));
                let waits = |region| places.iter().find(|place| place.region == region)?.wait;
                let departure = edge.spill.decide(&ask, places[0], others, waits, |_| true, self.now);
                if let Some(departure) = departure {
                    edge.spill.commit(&self.name, departure, self.now);
                }
                match departure.and_then(|departure| departure.to) {
                    Some(region) => (at(region), TrafficOrigin::Spillover),
                    None => (edge.home, TrafficOrigin::Local),
                }
            }
        }
    }

    fn comes(&mut self, region: usize, request: Request) {
        let Request { gateway, tokens, asked, whose } = request;
        let home = self.edges[gateway].home;
        let back = self.edges[gateway].rtt[region] / 2;
        let turn = self.waits(region);
        let compute = Duration::from_secs_f64(tokens as f64 / SPEED);
        let took = (self.now - asked) + turn + compute + SERVICE + back;
        let in_time = took <= DEADLINE;
        if in_time {
            let now = self.now;
            let here = &mut self.regions[region];
            here.spoke.arrived(&self.name, tokens, whose, now);
            let choice =
                here.spoke.select_replica(&self.name, tokens, |_| PassiveHealth::HEALTHY, now).unwrap();
            here.free = here.free.max(now) + compute;
            self.later(turn + compute, Event::Done { region, choice });
        }
        if (BEGINS..ENDS).contains(&(asked - self.start)) {
            let outcome = Outcome { took: in_time.then_some(took), remote: region != home };
            self.world.in_the_surge.push(outcome);
        }
    }
}
