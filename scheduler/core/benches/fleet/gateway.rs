//! One gateway with all spokes: decoded reports, what routing needs of them, and the route table.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use gateway_core::by_deployment::ByDeployment;
use gateway_core::health::{HealthReport, RegionHealthTracker};
use gateway_core::instances::{InstanceIndex, InstanceSet};
use gateway_core::queue::RegionQueue;
use gateway_core::shed::{AdmissionPoolSet, QueueWaits};
use gateway_core::spill::Spill;
use regions::{Catalogue, DeploymentName, HostPort, InstanceName, RegionIndex, RouteTable};
use scheduler_api::report::delta::ReportDecoder;
use scheduler_api::report::stream::{ExchangeRequestWriter, ReportReader, ReportWriter};
use scheduler_api::report::{DeploymentLoad, EXCHANGE_PERIOD, ExchangeRequest, Gateway, ReportV1};
use scheduler_api::route::RouteTableV1;
use scheduler_api::route::changes::{self, RoutesV1};

use super::hub::{self, Hub};
use super::spoke::{self, Region};
use super::wire::{
    CHUNK, HUB_REQUEST_HEAD, HUB_RESPONSE_HEAD, IDLE_CONNECTION, IDLE_CONNECTION_SECONDS, PING, PING_SECONDS,
    hub_path,
};
use super::{BenchParameters, CpuMeter, DeploymentState, REGIONS, SPOKES, regions};

/// Round-trip time of every exchange.
const ROUND_TRIP: Duration = Duration::from_millis(40);

/// State of a gateway that depends on reports and the route table.
#[derive(Default)]
pub(crate) struct EdgeState {
    decoders: BTreeMap<InstanceIndex, ReportDecoder>,
    streams: BTreeMap<InstanceIndex, (ExchangeRequestWriter, ReportReader)>,
    fleet: RegionHealthTracker,
    instances: InstanceSet<HostPort>,
    loads: ByDeployment<(DeploymentLoad, RegionQueue, RegionQueue)>,
    cold: ByDeployment<Duration>,
    spill: Spill,
    pools: AdmissionPoolSet,
    table: Option<(RouteTableV1, RouteTable)>,
}

impl EdgeState {
    fn new(routed: &[(RegionIndex, InstanceName, HostPort)]) -> EdgeState {
        let mut edge = EdgeState::default();
        edge.fleet.set_regions(routed.iter().map(|(region, _, _)| *region).collect::<BTreeSet<_>>());
        edge.instances.set_instances(routed.iter().map(|(region, name, address)| (*region, name, address)));
        edge.decoders =
            edge.instances.each().map(|(index, _, _)| (index, ReportDecoder::default())).collect();
        edge.streams = edge.decoders.keys().map(|index| (*index, Default::default())).collect();
        edge
    }

    /// Returns the next request to an instance, like `gateway::edge::reports`.
    fn request(&mut self, instance: InstanceIndex, sequence: u64, now: Instant) -> Vec<u8> {
        let is_served = |name: &DeploymentName| self.loads.get(instance.region(), name).is_some();
        let requested = self.spill.demands(now).filter(|(name, _)| is_served(name));
        let requested = requested.map(|(name, tokens)| (name.clone(), tokens));
        let gateway = Gateway { location: "aws/ap-southeast-2".to_owned(), boot_id: u64::MAX };
        let known = self.decoders[&instance].known();
        let request = ExchangeRequest { gateway, sequence, known, requested: requested.collect() };
        self.streams.get_mut(&instance).unwrap().0.message(request)
    }

    /// Applies a report, like `gateway::edge::region_states` and `reports`.
    fn reported(&mut self, instance: InstanceIndex, body: &[u8], now: Instant) {
        let EdgeState { decoders, streams, fleet, instances, loads, cold, spill, pools, table: _ } = self;
        let wire = streams.get_mut(&instance).unwrap().1.read(body).unwrap();
        let decoded = decoders.get_mut(&instance).unwrap().decode(wire).unwrap();
        let region = instance.region();
        let touched = instances.reported(instance, decoded, ROUND_TRIP, now);
        let granted = |name| {
            let load = decoded.report.deployments.get(name).filter(|load| !load.is_asleep());
            (name, load.map(|load| load.granted_tokens))
        };
        spill.set_credits(instance, touched.iter().map(granted), now);
        let combined = instances.region_report(region, now).unwrap();
        let mut serves = Vec::with_capacity(combined.touched.len());
        for name in &combined.touched {
            let load = combined.deployments.get(name);
            cold.set(region, name, load.and_then(|load| load.ready_in));
            let backlog = load.map(|load| {
                let before = loads.get(region, name).copied();
                let queue = |queue, tokens| RegionQueue::updated(queue, tokens, load.tokens_per_second, now);
                let total = queue(before.map(|before| before.1), load.pending_tokens);
                let interactive = load.interactive_tokens.unwrap_or(load.pending_tokens);
                (*load, total, queue(before.map(|before| before.2), interactive))
            });
            loads.set(region, name, backlog);
            let is_served = load.is_some_and(|load| load.ready > 0 || load.ready_in.is_some());
            serves.push((name.clone(), is_served));
        }
        let health = HealthReport { round_trip: ROUND_TRIP, serves, draining: combined.draining };
        fleet.reported(region, health, now);
        let waits = combined.touched.iter().map(|name| {
            let waits = |load: &DeploymentLoad| {
                QueueWaits::of(load.interactive_tokens, load.pending_tokens, load.tokens_per_second)
            };
            (name, combined.deployments.get(name).map(waits))
        });
        pools.report(region, waits, now);
    }

    /// Applies a response with a route table or its changes, up to the text of the snapshot.
    fn routed(&mut self, body: &[u8]) {
        let wire = match (serde_json::from_slice(body).unwrap(), self.table.take()) {
            (RoutesV1::Table(table), _) => *table,
            (RoutesV1::Changes(steps), Some((base, _))) => changes::apply(base, steps).unwrap(),
            (RoutesV1::Changes(_), None) => panic!("the first response is a complete table"),
        };
        let table = RouteTable::try_from(wire.clone()).unwrap();
        std::hint::black_box(serde_json::to_vec(&RouteTableV1::from(&table)).unwrap());
        self.table = Some((wire, table));
    }
}

pub(crate) fn run(parameters: BenchParameters, begun: Instant) -> (EdgeState, CpuMeter) {
    let mut meter = CpuMeter::default();
    let catalogue = Catalogue::builtin();
    let ids = regions(&catalogue);
    let names: Vec<InstanceName> = ["a", "b", "c"].map(|name| name.parse().unwrap()).to_vec();
    assert_eq!((ids.len(), names.len()), (REGIONS, SPOKES));
    let indexes: Vec<RegionIndex> = ids.iter().map(|id| catalogue.index_of(id).unwrap()).collect();
    let all = indexes.iter().flat_map(|region| {
        names.iter().map(move |name| (*region, name.clone(), HostPort::from(([10, 0, 0, 1], 7100))))
    });
    let mut edge = EdgeState::new(&all.collect::<Vec<_>>());
    let instances: Vec<InstanceIndex> = edge.decoders.keys().copied().collect();
    // All regions are alike, so one spoke makes the loads of all reports.
    let mut region = Region::new(ids[0].clone(), parameters);
    let mut hub = Hub::new(parameters, begun);
    let mut writers: Vec<ReportWriter> = instances.iter().map(|_| ReportWriter::default()).collect();
    let per_second = (Duration::from_secs(1).as_millis() / EXCHANGE_PERIOD.as_millis()) as usize;
    edge.routed(&hub.routes(None));
    for tick in 0..(parameters.seconds + 1) * per_second {
        let now = begun + EXCHANGE_PERIOD * tick as u32;
        if tick % per_second == 0 && tick >= per_second {
            parameters.changing(tick / per_second).for_each(|deployment| region.toggle(deployment));
            if parameters.state == DeploymentState::Changing {
                hub.change(tick / per_second);
            }
        }
        if tick == per_second {
            meter = CpuMeter::default();
        }
        if parameters.state == DeploymentState::Changing {
            let before = hub.generation();
            hub.keep_alives(tick * 2, now, &mut CpuMeter::default());
            hub.keep_alives(tick * 2 + 1, now, &mut CpuMeter::default());
            if hub.generation() > before {
                let routes = hub.routes(Some(before));
                meter.traffic.send(HUB_REQUEST_HEAD + hub_path(hub::ROUTES_PATH));
                meter.traffic.receive(HUB_RESPONSE_HEAD + routes.len());
                meter.run(|| edge.routed(&routes));
            }
        }
        if tick % per_second == 0 {
            // The demand, and the poll of the route table, which the hub holds for 4 s.
            meter.traffic.send(HUB_REQUEST_HEAD + hub_path(hub::DEMAND_PATH) + hub::demand_report().len());
            meter.traffic.receive(HUB_RESPONSE_HEAD);
            if (tick / per_second).is_multiple_of(4) {
                meter.traffic.send(HUB_REQUEST_HEAD + hub_path(hub::ROUTES_PATH));
                meter.traffic.receive(HUB_RESPONSE_HEAD);
            }
            if (tick / per_second).is_multiple_of(PING_SECONDS) {
                meter.traffic.send(PING);
                meter.traffic.receive(PING);
            }
        }
        region.observe(now);
        let known = edge.decoders[&instances[0]].known();
        let template = region.exchange(&spoke::request(0, tick as u64, known), now);
        for (number, instance) in instances.iter().enumerate() {
            let request = meter.run(|| edge.request(*instance, tick as u64, now));
            let region = catalogue.region(instance.region()).id.to_string();
            let instance_name = names[number % SPOKES].to_string();
            let response = ReportV1 { region, instance: instance_name, ..template.clone() };
            let response = writers[number].message(&response, known);
            meter.traffic.send(CHUNK + request.len());
            meter.traffic.receive(CHUNK + response.len());
            if tick % (IDLE_CONNECTION_SECONDS * per_second) == 0 {
                meter.traffic.both(IDLE_CONNECTION);
            }
            meter.run(|| edge.reported(*instance, &response, now));
        }
        meter.run(|| {
            for check in 0..2 {
                let now = now + EXCHANGE_PERIOD / 2 * check;
                assert!(edge.fleet.tick(now).is_empty() && edge.instances.tick(now).is_empty());
            }
        });
    }
    (edge, meter)
}
