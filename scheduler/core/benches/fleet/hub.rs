//! The hub with all spokes and gateways: keep-alives, demand, polls of the route table, plan, published tables.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use regions::{
    Catalogue, Deployment, DeploymentName, EngineKind, EngineSpec, Generation, Precision, RegionId,
    ResidencyPolicy, RouteTable, Scaling, Task,
};
use scheduler_api::VERSION;
use scheduler_api::deployment::{DesiredDeployments, Promotions};
use scheduler_api::paths::RoutesQuery;
use scheduler_api::plan::{
    DemandReportV1, DemandReporter, DemandV1, GatewayBoot, GatewayDemand, RegionCapacity,
};
use scheduler_api::reader::{Reader, Role};
use scheduler_api::registration::{KeepAliveV1, RegionState, RegionStateV1, Registration};
use scheduler_api::route::RouteTableV1;
use scheduler_api::route::changes::{changes, changes_response, checksum};
use scheduler_core::hub::{Event, HubCommand, HubInitialState, HubState, StoreState};
use scheduler_core::plan::plan;
use scheduler_core::registry::{LAPSED_KEEP, RegisteredSpoke};
use scheduler_core::rollout::{Rollout, SETTLE_TIME};
use scheduler_core::table_history::TableHistory;

use super::wire::{HUB_REQUEST_HEAD, HUB_RESPONSE_HEAD, PING, PING_SECONDS, hub_path};
use super::{BenchParameters, CpuMeter, DeploymentState, GATEWAYS, REGIONS, SPOKES, regions};

/// Batches of events in a second: the hub persists a table in a tenth of a second.
pub(crate) const BATCHES: usize = 10;
/// Batches in which each spoke renews its lease once: three tenths of its five seconds.
const KEEP_ALIVE_BATCHES: usize = 15;
/// Seconds for which polls of gateways and spokes are held.
const POLL_SECONDS: [usize; 2] = [4, 5];
pub(crate) const ROUTES_PATH: &str =
    "/v1/routes?after=1.1000&reader=gateway/aws/ap-southeast-2/00000000000000ff&changes=true&wait_ms=4000";
pub(crate) const DEMAND_PATH: &str = "/v1/demand?after=1.1";
const KEEP_ALIVE_PATH: &str =
    "/v1/leases/00000000000000000000000000000001/keepalive?holder=spoke/aws/ap-southeast-2/00000000000000ff";
const LEASE: &str = r#"{"version":1,"lease":"00000000000000000000000000000001","ttl_ms":5000,"unknown":[]}"#;

/// Hub, with the registrations of all spokes.
pub(crate) struct Hub {
    state: HubState,
    parameters: BenchParameters,
    regions: Vec<RegionId>,
    names: Vec<DeploymentName>,
    /// Deployments that every region serves.
    served: BTreeSet<DeploymentName>,
    published: RouteTable,
    body: Vec<u8>,
    history: TableHistory,
    /// Spokes that have not reported the last change.
    unreported: BTreeSet<(usize, usize)>,
}

/// Returns the demand of a gateway without requests.
fn demand() -> DemandV1 {
    let gateway = GatewayBoot { region: "aws/ap-southeast-2".parse().unwrap(), boot_id: u64::MAX };
    let reachable_regions = Some(regions(&Catalogue::builtin()).into_iter().collect());
    let demand = GatewayDemand { gateway, classes: BTreeMap::new(), reachable_regions };
    DemandV1::from(&demand)
}

/// Returns the report of that demand to a hub that has it, as JSON.
pub(crate) fn demand_report() -> Vec<u8> {
    let (mut reporter, demand) = (DemandReporter::default(), demand());
    reporter.acknowledged(&demand);
    let (report, has_changes) = reporter.report(&demand);
    assert!(has_changes);
    serde_json::to_vec(&report).unwrap()
}

fn deployment(name: &DeploymentName) -> Deployment {
    Deployment {
        name: name.clone(),
        task: Task::Embed,
        model: "hf://sentence-transformers/all-MiniLM-L6-v2".to_owned(),
        engine: EngineSpec { kind: EngineKind::Cpu, precision: Precision::F32 },
        residency: ResidencyPolicy::Anywhere,
        regions: Vec::new(),
        order: Vec::new(),
        placement: None,
        scaling: Scaling::default(),
    }
}

impl Hub {
    pub(crate) fn new(parameters: BenchParameters, now: Instant) -> Hub {
        let catalogue = Arc::new(Catalogue::builtin());
        let (regions, names) = (regions(&catalogue), parameters.names());
        let deployments = names.iter().map(|name| (name.clone(), deployment(name))).collect();
        let desired = DesiredDeployments { applied: true, deployments, promotions: Promotions::default() };
        let all = StoreState { deployments: Some(desired), ..StoreState::default() };
        let initial = HubInitialState { epoch: 1, table: None, plan: Vec::new(), all };
        let rollout = Rollout::new(catalogue.clone(), SETTLE_TIME, now);
        let state = HubState::new(initial, catalogue, LAPSED_KEEP, rollout, now);
        let mut hub = Hub {
            state,
            parameters,
            regions,
            served: names.iter().cloned().collect(),
            names,
            published: RouteTable::empty(),
            body: Vec::new(),
            history: TableHistory::default(),
            unreported: BTreeSet::new(),
        };
        for region in 0..REGIONS {
            for spoke in 0..SPOKES {
                hub.register(region, spoke, hub.served.clone(), now);
            }
        }
        let reachable_regions = Some(hub.regions.iter().cloned().collect::<BTreeSet<_>>());
        for number in 0..GATEWAYS {
            let gateway = GatewayBoot { region: hub.regions[number].clone(), boot_id: number as u64 };
            let demand = GatewayDemand {
                gateway,
                classes: BTreeMap::new(),
                reachable_regions: reachable_regions.clone(),
            };
            hub.state.handle(Event::DemandReported(demand), now);
        }
        hub.settle(now);
        hub
    }

    pub(crate) fn generation(&self) -> Generation {
        self.published.generation
    }

    fn register(&mut self, region: usize, spoke: usize, deployments: BTreeSet<DeploymentName>, now: Instant) {
        let registration = Registration {
            region: self.regions[region].clone(),
            instance: ["a", "b", "c"][spoke].parse().unwrap(),
            endpoint: ([10, 0, region as u8, spoke as u8], 7100).into(),
            boot_id: (region * SPOKES + spoke) as u64,
            deployments,
            capacity: RegionCapacity::default(),
            models: BTreeMap::new(),
            failures: BTreeMap::new(),
            engines: None,
            draining: false,
            scales: false,
            job_log: None,
            accelerators: regions::Accelerators::new(),
        };
        let created = registration.boot_id + 1;
        self.state.handle(Event::SpokeRegistered(RegisteredSpoke { registration, created }), now);
    }

    /// Adds or removes the deployments that change in this second, in all regions.
    pub(crate) fn change(&mut self, second: usize) {
        for number in self.parameters.changing(second) {
            let name = &self.names[number];
            if !self.served.remove(name) {
                self.served.insert(name.clone());
            }
        }
        self.unreported =
            (0..REGIONS).flat_map(|region| (0..SPOKES).map(move |spoke| (region, spoke))).collect();
    }

    /// Processes the keep-alives of a batch, and publishes what follows from them.
    pub(crate) fn keep_alives(&mut self, batch: usize, now: Instant, meter: &mut CpuMeter) {
        let mut has_event = false;
        for region in 0..REGIONS {
            for spoke in 0..SPOKES {
                if (region * SPOKES + spoke) % KEEP_ALIVE_BATCHES != batch % KEEP_ALIVE_BATCHES {
                    continue;
                }
                let state = self.unreported.remove(&(region, spoke)).then(|| {
                    let deployments = self.served.iter().map(ToString::to_string).collect();
                    RegionStateV1 {
                        deployments,
                        capacity: Vec::new(),
                        models: Vec::new(),
                        failures: Vec::new(),
                        draining: false,
                    }
                });
                has_event |= state.is_some();
                let body = serde_json::to_vec(&KeepAliveV1 { version: VERSION, state }).unwrap();
                meter.traffic.receive(HUB_REQUEST_HEAD + hub_path(KEEP_ALIVE_PATH) + body.len());
                meter.traffic.send(HUB_RESPONSE_HEAD + LEASE.len());
                meter.run(|| {
                    let KeepAliveV1 { version: _, state } = serde_json::from_slice(&body).unwrap();
                    if let Some(state) = state {
                        let state = RegionState::try_from(state).unwrap();
                        self.register(region, spoke, state.deployments, now);
                    }
                });
            }
        }
        // Like its shell, the hub wakes for an event or at the time that it names.
        if has_event || self.state.next_wakeup().is_some_and(|at| at <= now) {
            meter.run(|| {
                self.state.handle_timeout(now);
                self.settle(now);
            });
        }
    }

    /// Executes the commands of the hub until there are none.
    fn settle(&mut self, now: Instant) {
        while let Some(command) = self.state.poll() {
            match command {
                HubCommand::Persist(table) => {
                    std::hint::black_box(serde_json::to_vec(&RouteTableV1::from(&table)).unwrap());
                    self.state.handle(Event::Persisted(table), now);
                }
                HubCommand::Publish(table) => self.publish(table, now),
                HubCommand::Plan(input, previous) => {
                    self.state.handle(Event::PlanComputed(plan(&input, &previous)), now);
                }
                HubCommand::PersistPlan(parts) => self.state.handle(Event::PlanPersisted(parts), now),
                HubCommand::PersistShares(_) => self.state.handle(Event::SharesPersisted, now),
                HubCommand::PersistPlacements(_) => self.state.handle(Event::PlacementsPersisted, now),
                HubCommand::PublishPlan(_) => {}
            }
        }
    }

    /// Publishes a table, like `scheduler::hub::publisher`.
    fn publish(&mut self, table: RouteTable, now: Instant) {
        let wire = RouteTableV1::from(&table);
        self.body = serde_json::to_vec(&wire).unwrap();
        let steps = changes(&self.published, &table, checksum(&wire));
        let encoded = steps.map(|steps| serde_json::to_vec(&steps).unwrap());
        self.history.push(self.published.generation, encoded);
        self.published = table;
        for reader in self.readers() {
            self.state.handle(Event::Acknowledged(reader, self.published.generation), now);
        }
    }

    fn readers(&self) -> Vec<Reader> {
        let reader = |role, number: usize| Reader {
            role,
            region: self.regions[number % REGIONS].clone(),
            boot_id: number as u64,
        };
        let gateways = (0..GATEWAYS).map(|number| reader(Role::Gateway, number));
        gateways.chain((0..REGIONS * SPOKES).map(|number| reader(Role::Spoke, number))).collect()
    }

    /// Returns the response to a reader that has the table of generation `after`.
    pub(crate) fn routes(&self, after: Option<Generation>) -> Vec<u8> {
        let since = after.and_then(|after| self.history.since(after, self.body.len()));
        since.map_or_else(|| self.body.clone(), changes_response)
    }
}

pub(crate) fn run(parameters: BenchParameters, begun: Instant) -> (Hub, CpuMeter) {
    let mut meter = CpuMeter::default();
    let mut hub = Hub::new(parameters, begun);
    let (demand, report) = (demand(), demand_report());
    let query = ROUTES_PATH.split_once('?').unwrap().1;
    for batch in 0..(parameters.seconds + 1) * BATCHES {
        let now = begun + Duration::from_secs(1) / BATCHES as u32 * batch as u32;
        let second = batch / BATCHES;
        if batch == BATCHES {
            meter = CpuMeter::default();
        }
        if batch % BATCHES == 0 && parameters.state == DeploymentState::Changing && second > 0 {
            hub.change(second);
        }
        let before = hub.generation();
        hub.keep_alives(batch, now, &mut meter);
        let readers = GATEWAYS + REGIONS * SPOKES;
        let mut polls = 0;
        if hub.generation() > before {
            polls = readers;
        } else if batch % BATCHES == 0 {
            let [gateways, spokes] = POLL_SECONDS;
            polls += if second.is_multiple_of(gateways) { GATEWAYS } else { 0 };
            polls += if second.is_multiple_of(spokes) { REGIONS * SPOKES } else { 0 };
        }
        for _ in 0..polls {
            let response = meter.run(|| {
                std::hint::black_box(RoutesQuery::parse(query).unwrap());
                (hub.generation() > before).then(|| hub.routes(Some(before)))
            });
            meter.traffic.receive(HUB_REQUEST_HEAD + hub_path(ROUTES_PATH));
            meter.traffic.send(HUB_RESPONSE_HEAD + response.map_or(0, |body| body.len()));
        }
        if batch % BATCHES == 0 {
            for _ in 0..GATEWAYS {
                meter.traffic.receive(HUB_REQUEST_HEAD + hub_path(DEMAND_PATH) + report.len());
                meter.traffic.send(HUB_RESPONSE_HEAD);
                meter.run(|| {
                    let report: DemandReportV1 = serde_json::from_slice(&report).unwrap();
                    let demand = report.restore(Some(&demand)).unwrap();
                    std::hint::black_box(GatewayDemand::try_from(demand).unwrap());
                });
            }
            if second.is_multiple_of(PING_SECONDS) {
                for _ in 0..readers {
                    meter.traffic.receive(PING);
                    meter.traffic.send(PING);
                }
            }
        }
    }
    (hub, meter)
}
