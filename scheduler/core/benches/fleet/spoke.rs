//! One spoke with all gateways: status of its replicas, exchanges, encoded reports.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use regions::{Catalogue, DeploymentName, RegionId};
use scheduler_api::report::delta::ReportEncoder;
use scheduler_api::report::stream::{ExchangeRequestReader, ExchangeRequestWriter, ReportWriter};
use scheduler_api::report::{EXCHANGE_PERIOD, ExchangeRequest, Gateway, KnownState, ReportV1};
use scheduler_core::spoke::{ReplicaStatus, Spoke};

use super::wire::{CHUNK, IDLE_CONNECTION, IDLE_CONNECTION_SECONDS};
use super::{BenchParameters, CpuMeter, GATEWAYS, SPOKES, regions};

/// Start time of a replica.
const START: Duration = Duration::from_secs(2);

/// Spoke whose replicas serve one deployment each.
pub(crate) struct Region {
    spoke: Spoke,
    encoder: ReportEncoder,
    names: Vec<DeploymentName>,
    /// Number of the replica of each deployment that has one.
    replicas: BTreeMap<usize, usize>,
}

impl Region {
    pub(crate) fn new(region: RegionId, parameters: BenchParameters) -> Region {
        let spoke = Spoke::new(region, 1, Vec::new()).with_instance("a".parse().unwrap());
        let names = parameters.names();
        let mut region =
            Region { spoke, encoder: ReportEncoder::default(), names, replicas: BTreeMap::new() };
        for name in &region.names {
            region.spoke.set_start_time(name, Some(START));
        }
        // Ready deployments are spread over all numbers.
        (0..parameters.ready())
            .for_each(|number| region.toggle(number * parameters.deployments / parameters.ready()));
        region
    }

    /// Starts or removes the replica of a deployment.
    pub(crate) fn toggle(&mut self, deployment: usize) {
        match self.replicas.remove(&deployment) {
            Some(replica) => self.spoke.remove_replica(replica),
            None => {
                let address = ([10, 1, (deployment >> 8) as u8, deployment as u8], 8000).into();
                self.replicas.insert(deployment, self.spoke.add_replica(address));
            }
        }
    }

    /// Records the statuses of all replicas.
    pub(crate) fn observe(&mut self, now: Instant) {
        for (deployment, replica) in &self.replicas {
            let status = ReplicaStatus {
                model: None,
                failure: None,
                names: [self.names[*deployment].clone()].into(),
                ready: true,
                draining: false,
                pending_tokens: 0,
                interactive_tokens: Some(0),
                tokens_per_second: 7_500.0,
            };
            self.spoke.observe_replica(*replica, status, now);
        }
    }

    /// Responds to a request, like the ingress.
    pub(crate) fn exchange(&mut self, request: &ExchangeRequest, now: Instant) -> ReportV1 {
        let report = self.spoke.exchange(request, now);
        if self.encoder.needs_loads(now) {
            self.encoder.update(self.spoke.loads(now), now);
        }
        self.encoder.encode(report, &request.gateway, request.known)
    }
}

pub(crate) fn request(number: usize, sequence: u64, known: Option<KnownState>) -> ExchangeRequest {
    let gateway = Gateway { location: "aws/ap-southeast-2".to_owned(), boot_id: u64::MAX - number as u64 };
    ExchangeRequest { gateway, sequence, known, requested: BTreeMap::new() }
}

pub(crate) fn run(parameters: BenchParameters, begun: Instant) -> (Region, CpuMeter) {
    let mut meter = CpuMeter::default();
    let mut region = Region::new(regions(&Catalogue::builtin())[0].clone(), parameters);
    let per_second = (Duration::from_secs(1).as_millis() / EXCHANGE_PERIOD.as_millis()) as usize;
    let mut known = [None; GATEWAYS];
    let mut writers: Vec<ExchangeRequestWriter> =
        (0..GATEWAYS).map(|_| ExchangeRequestWriter::default()).collect();
    let mut streams: Vec<(ExchangeRequestReader, ReportWriter)> =
        (0..GATEWAYS).map(|_| Default::default()).collect();
    // Until the gateways have a state and grants, nothing is counted.
    for tick in 0..(parameters.seconds + 1) * per_second {
        let now = begun + EXCHANGE_PERIOD * tick as u32;
        if tick % per_second == 0 && tick >= per_second {
            parameters.changing(tick / per_second).for_each(|deployment| region.toggle(deployment));
        }
        if tick == per_second {
            meter = CpuMeter::default();
        }
        meter.run(|| region.observe(now));
        for (gateway, known) in known.iter_mut().enumerate() {
            let message = writers[gateway].message(request(gateway, tick as u64, *known));
            let (reader, writer) = &mut streams[gateway];
            let (response, state) = meter.run(|| {
                let request = reader.read(&message).unwrap();
                let report = region.exchange(&request, now);
                (writer.message(&report, request.known), report.state)
            });
            meter.traffic.receive(CHUNK + message.len());
            meter.traffic.send(CHUNK + response.len());
            if tick % (IDLE_CONNECTION_SECONDS * per_second) == 0 {
                meter.traffic.both(IDLE_CONNECTION);
            }
            *known = state.map(|state| KnownState { boot_id: 1, number: state.number, grants: state.grants });
        }
    }
    assert_eq!(SPOKES, 3, "each spoke of a region costs the same");
    (region, meter)
}
