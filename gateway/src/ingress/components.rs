//! Components of an ingress, and its background tasks.

use super::arrival::ArrivalRecorder;
use super::forwarder::ReplicaForwarder;
use super::hold::Hold;
use super::jobs::{self, JobApi, JobComputation, JobTraces, RegionalJobQueue};
use super::operations::{IngressOperations, ListenerUsage};
use super::peers::{self, PeerExchange};
use super::pipeline::IngressPipeline;
use super::probe::ReplicaProber;
use super::replicas::Replicas;
use super::reports::ReportExchange;
use super::residency::ResidencyGuard;
use super::{IngressConfig, IngressError, IngressSignals, follow};
use crate::body_memory::BodyLimits;
use crate::config::Timeouts;
use crate::metrics::IngressMetrics;
use crate::receipts::Recorder;
use crate::request_body::BodyReader;
use crate::upstream::Upstream;
use identity::Transport;
use regions::set::RegionIndex;
use scheduler_core::spoke::Spoke;
use std::sync::Arc;
use supervision::Mutex;
use supervision::health::HealthCheck;
use supervision::task::supervise;
use telemetry::Tracer;
use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;

/// Components of an ingress, by what uses them: its listeners and its background tasks.
pub(super) struct Ingress {
    /// Handler of the listener for gateways.
    pub(super) pipeline: Arc<IngressPipeline>,
    /// Handler of the operations port.
    pub(super) operations: Arc<IngressOperations>,
    prober: Arc<ReplicaProber>,
    peers: Arc<PeerExchange>,
    /// Worker of the queue of jobs, if the region has one.
    job_worker: Option<(Arc<RegionalJobQueue>, Arc<JobComputation>)>,
    /// Traces of its jobs, if traces are configured.
    job_traces: Option<Arc<JobTraces>>,
    /// Signal that replicas were added or removed.
    changed: Arc<Notify>,
    /// Sequence number of the state to share with the other spokes.
    shared: Arc<watch::Sender<u64>>,
    transport: Transport,
}

impl Ingress {
    /// Creates the components of an ingress in the region `here`.
    pub(super) fn new(
        config: IngressConfig,
        here: RegionIndex,
        spoke: Arc<Mutex<Spoke>>,
        timeouts: Timeouts,
        listener: ListenerUsage,
        (recorder, tracer): (Option<Recorder>, Option<Tracer>),
        jobs: Option<Arc<RegionalJobQueue>>,
    ) -> Result<Ingress, IngressError> {
        let IngressConfig { region, signals, catalogue, transport, resolver, .. } = config;
        let IngressSignals { wake, changed, shared } = signals;
        let to_spokes = Upstream::to_regions(&transport, true, &catalogue, resolver.clone())?;
        let to_replicas = Arc::new(Upstream::to_replicas(&transport, &catalogue, resolver)?);
        let limits = BodyLimits::from_gateways(timeouts.body);
        let body_reader = Arc::new(BodyReader::new(limits).map_err(IngressError::Threads)?);
        let metrics: Arc<IngressMetrics> = Arc::default();
        let hold = Arc::new(Hold::new(spoke.clone(), wake.clone()));
        let replicas = Arc::new(Replicas::new(spoke.clone(), hold.clone()));
        let residency = Arc::new(ResidencyGuard {
            region: region.clone(),
            here,
            catalogue: catalogue.clone(),
            spoke: spoke.clone(),
        });
        let peers = Arc::new(PeerExchange {
            here,
            spoke: spoke.clone(),
            hold: hold.clone(),
            upstream: to_spokes,
            body_reader: body_reader.clone(),
            metrics: metrics.clone(),
            scaler_wake: wake,
            changed: changed.clone(),
        });
        let prober = Arc::new(ReplicaProber {
            region: region.clone(),
            here,
            spoke: spoke.clone(),
            replicas: replicas.clone(),
            hold: hold.clone(),
            upstream: to_replicas.clone(),
        });
        let operations = Arc::new(IngressOperations {
            region: region.clone(),
            transport: transport.clone(),
            spoke: spoke.clone(),
            replicas: replicas.clone(),
            hold: hold.clone(),
            health: HealthCheck::default(),
            body_reader: body_reader.clone(),
            upstream: to_replicas.clone(),
            metrics: metrics.clone(),
            listener,
            receipts: recorder.as_ref().map(Recorder::metrics),
            tracer: tracer.clone(),
            jobs: jobs.clone(),
        });
        let forwarder = Arc::new(ReplicaForwarder {
            region: region.clone(),
            here,
            residency: residency.clone(),
            replicas,
            hold,
            upstream: to_replicas,
        });
        let job_traces = tracer.clone().map(|tracer| {
            let (region, residency) = (region.clone(), residency.clone());
            // Failed jobs are often mistakes of their clients, and must not use the limit of requests.
            Arc::new(JobTraces { tracer: tracer.with_own_limit(), region, residency })
        });
        let job_worker = jobs.clone().map(|queue| {
            let computation = JobComputation {
                region: region.clone(),
                catalogue,
                spoke: spoke.clone(),
                residency: residency.clone(),
                forwarder: forwarder.clone(),
                body_reader: body_reader.clone(),
                traces: job_traces.clone(),
            };
            (queue, Arc::new(computation))
        });
        let pipeline = Arc::new(IngressPipeline {
            forwarder,
            jobs: JobApi {
                region: region.clone(),
                residency: residency.clone(),
                body_reader: body_reader.clone(),
                queue: jobs,
                traces: job_traces.clone(),
            },
            arrival_recorder: ArrivalRecorder {
                region: region.clone(),
                metrics: metrics.clone(),
                receipts: recorder,
                tracer,
            },
            reports: ReportExchange::new(spoke.clone(), metrics),
            peers: peers.clone(),
            operations: operations.clone(),
            region,
            spoke,
            residency,
            body_reader,
        });
        Ok(Ingress {
            pipeline,
            operations,
            prober,
            peers,
            job_worker,
            job_traces,
            changed,
            shared,
            transport,
        })
    }

    /// Starts the tasks that follow the certificates, the replicas, and the other spokes of the region, and the worker of its
    /// queue of jobs.
    pub(super) fn start_tasks(&self, tasks: &mut JoinSet<()>) {
        if let Some(identity) = self.transport.identity().cloned() {
            tasks.spawn(supervise("identity", move || identity.clone().follow()));
        }
        let (prober, changed) = (self.prober.clone(), self.changed.clone());
        tasks.spawn(supervise("replicas", move || follow::replicas(prober.clone(), changed.clone())));
        let (peers, shared) = (self.peers.clone(), self.shared.clone());
        tasks.spawn(supervise("exchange with spokes", move || {
            peers::follow(peers.clone(), shared.subscribe())
        }));
        if let Some((queue, computation)) = self.job_worker.clone() {
            let followed = queue.clone();
            tasks.spawn(supervise("job log", move || jobs::follow_failure(followed.clone())));
            let (sent, spoke) = (queue.clone(), computation.spoke.clone());
            let traces = self.job_traces.clone();
            tasks.spawn(supervise("webhooks", move || {
                jobs::send(sent.clone(), spoke.clone(), traces.clone())
            }));
            if let Some(traces) = self.job_traces.clone() {
                let ended = queue.clone();
                tasks.spawn(supervise("job traces", move || {
                    jobs::export_ended(ended.clone(), traces.clone())
                }));
            }
            let followed = queue.clone();
            tasks.spawn(supervise("webhook secrets", move || jobs::follow_secrets(followed.clone())));
            let counted = queue.clone();
            tasks.spawn(supervise("job usage", move || jobs::follow_usage(counted.clone())));
            let finalized = queue.clone();
            tasks.spawn(supervise("batches", move || jobs::finalize(finalized.clone())));
            tasks.spawn(supervise("job worker", move || jobs::work(computation.clone(), queue.clone())));
        }
    }
}
