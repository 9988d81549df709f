//! Components of a gateway, and the tasks that keep them up to date.

use super::explain::Explanations;
use super::explanation_archive::{ArchiveStartError, ExplanationArchive};
use super::forwarder::Forwarder;
use super::forwarder::PolicyGuard;
use super::job_transfer::{self, JobTransfers, QueueClient, ResultMemory, TRANSFERS_MAX};
use super::jobs::JobForwarder;
use super::operator_state::Operations;
use super::pipeline::Authenticator;
use super::pipeline::Pipeline;
use super::pipeline::RequestReader;
use super::policy_clock::PolicyClock;
use super::region_monitor::RegionMonitor;
use super::reports::ReportEffects;
use super::request::RequestRecorder;
use super::responder::Responder;
use super::router::Router;
use super::router::{AdmissionControl, AdmissionPools};
use super::scatter::{SplitCapacity, Splitter};
use super::table::{self, Current};
use super::tenants::Tenants;
use super::traffic::{self, TrafficSource};
use super::weights::{self, CurrentWeights, DemandRecorder, PlanCounts};
use super::{EdgeError, ExplanationsConfig, reload, reports, shares};
use crate::config::EdgeConfig;
use crate::listener::Listener;
use crate::metrics::EdgeMetrics;
use crate::receipts::{ReceiptsError, Recorder, WriterHandle};
use crate::request_body::BodyReader;
use crate::tokens::TokenVerifier;
use crate::upstream::Upstream;
use crate::usage::UsageRecorder;
use gateway_core::receipt::entry::Role;
use gateway_core::tenant::GatewayShares;
use identity::ConnectionFailures;
use identity::Transport;
use resolver::Resolver;
use scheduler_api::reader::Reader;
use scheduler_client::hub::ControlPlaneClient;
use std::sync::Arc;
use supervision::health::HealthCheck;
use supervision::task::{supervise, supervise_until_done};
use telemetry::{ExportError, Process, TraceExport, Tracer};
use tokio::sync::{Semaphore, watch as channel};
use tokio::task::JoinSet;

/// Components that requests, background tasks and operators share.
pub(super) struct Gateway {
    pub(super) config: Arc<EdgeConfig>,
    pub(super) client: ControlPlaneClient,
    pub(super) table_reader: Reader,
    metrics: Arc<EdgeMetrics>,
    tenants: Arc<Tenants>,
    tokens: Arc<TokenVerifier>,
    views: channel::Sender<Current>,
    current_weights: channel::Sender<CurrentWeights>,
    plan_counts: Arc<PlanCounts>,
    demand_recorder: Arc<DemandRecorder>,
    region_monitor: Arc<RegionMonitor>,
    pools: Arc<AdmissionPools>,
    policy_clock: Arc<PolicyClock>,
    upstream: Arc<Upstream>,
    body_reader: Arc<BodyReader>,
    split_capacity: Arc<SplitCapacity>,
    explanations: Arc<Explanations>,
    /// Explanations on disk, if they are configured.
    pub(super) archive: Option<Arc<ExplanationArchive>>,
    router: Arc<Router>,
    /// Permits for transfers of requests of jobs.
    transfer_slots: Arc<Semaphore>,
    /// Memory of their results.
    transfer_memory: ResultMemory,
    pub(super) usage: Arc<UsageRecorder>,
}

impl Gateway {
    /// Components for a configuration, with the route table and the plan that are on disk. `takes_over` says whether the process has
    /// received the sockets of another one.
    pub(super) fn new(config: EdgeConfig, takes_over: bool) -> Result<Gateway, EdgeError> {
        let config = Arc::new(config);
        let metrics = Arc::new(EdgeMetrics::new(&config.catalogue, &config.keys));
        let plan_counts: Arc<PlanCounts> = Arc::default();
        let restored = shares::restore(&config, &plan_counts);
        let gateway_shares = restored.as_ref().map_or(GatewayShares::equal(1), shares::applied);
        let tenants = Arc::new(Tenants::from_file(&config.keys, gateway_shares, metrics.clone()));
        let current_weights = channel::Sender::new(weights::restore(&config, &plan_counts));
        let demand_recorder: Arc<DemandRecorder> = Arc::default();
        let region_monitor = Arc::new(RegionMonitor::new(config.point, &config.catalogue));
        let gateway = config.catalogue.index_of(&config.region);
        let router = Router {
            gateway: gateway.expect("the configured region is in the catalogue"),
            is_spillover_enabled: config.spill,
            region_monitor: region_monitor.clone(),
            current_weights: current_weights.subscribe(),
            demand_recorder: demand_recorder.clone(),
        };
        let start = |explanations: &ExplanationsConfig| {
            let started = ExplanationArchive::start(explanations, &config.catalogue, takes_over);
            started.map_err(|error| match error {
                ArchiveStartError::InUse => EdgeError::ExplanationsInUse { dir: explanations.dir.clone() },
                ArchiveStartError::Thread(error) => EdgeError::Threads(error),
            })
        };
        let archive = config.explanations.as_ref().map(start).transpose()?;
        let resolver = config.resolver.clone().unwrap_or_else(|| Resolver::new(&config.dns));
        Ok(Gateway {
            client: ControlPlaneClient::new(&config.hub, &config.transport, resolver.clone())?,
            table_reader: table::reader(&config),
            views: channel::Sender::new(table::restore(&config, &tenants, &metrics)),
            tokens: Arc::new(TokenVerifier::new(&config.issuers)),
            pools: Arc::default(),
            policy_clock: Arc::new(PolicyClock::of(&config.snapshot, config.policy_max_age)),
            upstream: Arc::new(Upstream::to_regions(
                &config.transport,
                config.region_http2,
                &config.catalogue,
                resolver.with_source_address(config.source_address),
            )?),
            body_reader: Arc::new(BodyReader::new(config.bodies).map_err(EdgeError::Threads)?),
            split_capacity: Arc::new(SplitCapacity::new()),
            explanations: Arc::new(Explanations::new()),
            archive: archive.map(Arc::new),
            usage: Arc::new(UsageRecorder::open(&config.snapshot, &config.region, &config.catalogue)),
            router: Arc::new(router),
            transfer_slots: Arc::new(Semaphore::new(TRANSFERS_MAX)),
            transfer_memory: ResultMemory::new(),
            config,
            metrics,
            tenants,
            current_weights,
            plan_counts,
            demand_recorder,
            region_monitor,
        })
    }

    /// Starts the tasks that follow the hub and the regions. The demand of tenants is reported until the gateway drains.
    pub(super) fn follow_control_plane(&self, tasks: &mut JoinSet<()>, draining: &channel::Receiver<bool>) {
        let (config, client) = (self.config.clone(), self.client.clone());
        let (reader, views, tenants) = (self.table_reader.clone(), self.views.clone(), self.tenants.clone());
        let (metrics, policy_clock) = (self.metrics.clone(), self.policy_clock.clone());
        tasks.spawn(supervise("route table", move || {
            table::follow(
                config.clone(),
                client.clone(),
                reader.clone(),
                views.clone(),
                tenants.clone(),
                metrics.clone(),
                policy_clock.clone(),
            )
        }));
        let (config, client, demand_recorder) =
            (self.config.clone(), self.client.clone(), self.demand_recorder.clone());
        let (region_monitor, current_weights) = (self.region_monitor.clone(), self.current_weights.clone());
        let plan_counts = self.plan_counts.clone();
        tasks.spawn(supervise("demand and traffic plan", move || {
            weights::follow(
                config.clone(),
                client.clone(),
                demand_recorder.clone(),
                region_monitor.clone(),
                current_weights.clone(),
                plan_counts.clone(),
            )
        }));
        let (config, client, tenants) = (self.config.clone(), self.client.clone(), self.tenants.clone());
        let (plan_counts, draining) = (self.plan_counts.clone(), draining.clone());
        tasks.spawn(supervise("tenant shares", move || {
            shares::follow(
                config.clone(),
                client.clone(),
                tenants.clone(),
                plan_counts.clone(),
                draining.clone(),
            )
        }));
        let (client, usage) = (self.client.clone(), self.usage.clone());
        tasks.spawn(supervise("usage", move || usage.clone().follow(client.clone())));
        let (config, upstream, views) = (self.config.clone(), self.upstream.clone(), self.views.clone());
        let effects = ReportEffects {
            region_monitor: self.region_monitor.clone(),
            pools: self.pools.clone(),
            metrics: self.metrics.clone(),
        };
        tasks.spawn(supervise("region reports", move || {
            reports::listen(config.clone(), upstream.clone(), views.subscribe(), effects.clone())
        }));
        self.report_traffic(tasks);
        let region_monitor = self.region_monitor.clone();
        tasks.spawn(supervise("region health", move || region_monitor.clone().detect_silent_regions()));
    }

    /// Starts the tasks that report traffic, one for each hub.
    fn report_traffic(&self, tasks: &mut JoinSet<()>) {
        let boot_id = rand::random();
        for client in self.client.each() {
            let source = TrafficSource {
                config: self.config.clone(),
                boot_id,
                views: self.views.subscribe(),
                region_monitor: self.region_monitor.clone(),
                explanations: self.explanations.clone(),
                archive: self.archive.clone(),
            };
            tasks.spawn(supervise("traffic report", move || traffic::follow(client.clone(), source.clone())));
        }
    }

    /// Starts the tasks that follow certificates, credentials, the tenants file and the keys of token issuers.
    pub(super) fn follow_files(&self, tasks: &mut JoinSet<()>) {
        if let Some(identity) = self.config.tls.clone() {
            tasks.spawn(supervise("certificate", move || identity.clone().follow()));
        }
        match &self.config.transport {
            Transport::Tls(identity) => {
                let identity = identity.clone();
                tasks.spawn(supervise("identity", move || identity.clone().follow()));
            }
            Transport::Plaintext => {
                // Requests cross the network unencrypted. Configure certificates unless the network is trusted.
                tracing::warn!("connections use plaintext because of [identity]")
            }
            Transport::Loopback => {}
        }
        if let Some(file) = self.config.tenants.clone() {
            let (issuers, tenants) = (self.config.issuers.clone(), self.tenants.clone());
            let (views, metrics) = (self.views.clone(), self.metrics.clone());
            tasks.spawn(supervise_until_done("tenants file", move || {
                reload::follow(file.clone(), issuers.clone(), tenants.clone(), views.clone(), metrics.clone())
            }));
        }
        if !self.tokens.is_empty() {
            let (tokens, issuers) = (self.tokens.clone(), self.config.issuers.clone());
            tasks.spawn(supervise("token issuers", move || tokens.clone().follow(issuers.clone())));
        }
    }

    /// Starts the writer of receipts, if they are configured.
    pub(super) fn start_receipts(
        &self,
    ) -> Result<(Option<Arc<Recorder>>, Option<WriterHandle>), ReceiptsError> {
        let Some(receipts) = &self.config.receipts else {
            // Add the table `[receipts]` to the configuration if residency must be proven.
            tracing::warn!(
                "receipts disabled because [receipts] is missing; the regions of requests cannot be proven"
            );
            return Ok((None, None));
        };
        let regions = self.config.catalogue.iter().map(|(_, region)| region.id.clone()).collect();
        let (recorder, writing) = Recorder::start(receipts, Role::Edge, &self.config.region, regions)?;
        Ok((Some(Arc::new(recorder)), Some(writing)))
    }

    /// Starts the task that transfers requests of jobs to other regions, until the gateway drains, unless spillover is
    /// disabled.
    pub(super) fn transfer_jobs(
        &self,
        tasks: &mut JoinSet<()>,
        recorder: Option<Arc<Recorder>>,
        draining: &channel::Receiver<bool>,
    ) {
        if !self.config.spill {
            return;
        }
        let transfers = Arc::new(JobTransfers {
            config: self.config.clone(),
            gateway: self.router.gateway,
            views: self.views.subscribe(),
            region_monitor: self.region_monitor.clone(),
            router: self.router.clone(),
            forwarder: self.forwarder(recorder.clone(), None),
            queue_client: QueueClient { config: self.config.clone(), upstream: self.upstream.clone() },
            upstream: self.upstream.clone(),
            recorder,
            slots: self.transfer_slots.clone(),
            result_memory: self.transfer_memory.clone(),
            draining: draining.clone(),
        });
        tasks.spawn(supervise("job transfers", move || job_transfer::follow(transfers.clone())));
    }

    /// Waits until the transfers of a draining gateway have ended.
    pub(super) async fn finish_transfers(&self) {
        job_transfer::finish(&self.transfer_slots).await;
    }

    fn forwarder(&self, recorder: Option<Arc<Recorder>>, tracer: Option<Tracer>) -> Arc<Forwarder> {
        let policy = Arc::new(PolicyGuard {
            config: self.config.clone(),
            views: self.views.subscribe(),
            policy_clock: self.policy_clock.clone(),
        });
        Arc::new(Forwarder {
            config: self.config.clone(),
            region_monitor: self.region_monitor.clone(),
            policy,
            upstream: self.upstream.clone(),
            recorder,
            tracer,
        })
    }

    /// Starts the export of traces, if it is configured.
    pub(super) fn start_tracing(&self) -> Result<(Option<Tracer>, Option<TraceExport>), ExportError> {
        let Some(config) = &self.config.tracing else { return Ok((None, None)) };
        let process = Process { role: "gateway", region: Some(self.config.region.as_str()) };
        let started = telemetry::start(config, process)?;
        Ok(Some(started).unzip())
    }

    /// Handler of client requests.
    pub(super) fn pipeline(&self, recorder: Option<Arc<Recorder>>, tracer: Option<Tracer>) -> Pipeline {
        let admission = Arc::new(AdmissionControl {
            config: self.config.clone(),
            pools: self.pools.clone(),
            router: self.router.clone(),
            region_monitor: self.region_monitor.clone(),
            metrics: self.metrics.clone(),
        });
        let forwarder = self.forwarder(recorder.clone(), tracer.clone());
        let policy = forwarder.policy.clone();
        let responder = Arc::new(Responder { config: self.config.clone(), upstream: self.upstream.clone() });
        Pipeline {
            tenants: self.tenants.clone(),
            views: self.views.subscribe(),
            authenticator: Authenticator { tokens: self.tokens.clone() },
            reader: RequestReader {
                config: self.config.clone(),
                body_reader: self.body_reader.clone(),
                admission,
            },
            splitter: Splitter {
                config: self.config.clone(),
                split_capacity: self.split_capacity.clone(),
                body_reader: self.body_reader.clone(),
                router: self.router.clone(),
                policy,
                forwarder: forwarder.clone(),
                responder: responder.clone(),
                region_monitor: self.region_monitor.clone(),
                upstream: self.upstream.clone(),
                metrics: self.metrics.clone(),
            },
            forwarder,
            jobs: JobForwarder {
                catalogue: self.config.catalogue.clone(),
                region_monitor: self.region_monitor.clone(),
                upstream: self.upstream.clone(),
                responder: responder.clone(),
            },
            responder,
            request_recorder: RequestRecorder {
                config: self.config.clone(),
                metrics: self.metrics.clone(),
                explanations: self.explanations.clone(),
                archive: self.archive.clone(),
                usage: self.usage.clone(),
                recorder: recorder.clone(),
                tracer,
            },
            recorder,
        }
    }

    /// State for the operations port.
    pub(super) fn operator_state(
        &self,
        listener: &Listener,
        refused: Arc<ConnectionFailures>,
        leaving: channel::Receiver<bool>,
        recorder: Option<&Recorder>,
        tracer: Option<Tracer>,
    ) -> Operations {
        Operations {
            config: self.config.clone(),
            health: HealthCheck::default(),
            tenants: self.tenants.clone(),
            views: self.views.subscribe(),
            policy_clock: self.policy_clock.clone(),
            router: self.router.clone(),
            plan_counts: self.plan_counts.clone(),
            pools: self.pools.clone(),
            region_monitor: self.region_monitor.clone(),
            metrics: self.metrics.clone(),
            body_reader: self.body_reader.clone(),
            upstream: self.upstream.clone(),
            refused,
            connections: listener.permits(),
            connections_max: self.config.connections_max,
            listener: listener.metrics(),
            split_capacity: self.split_capacity.clone(),
            transfer_slots: self.transfer_slots.clone(),
            transfer_memory: self.transfer_memory.clone(),
            explanations: self.explanations.clone(),
            archive: self.archive.clone(),
            usage: self.usage.clone(),
            leaving,
            receipts: recorder.map(Recorder::metrics),
            tracer,
        }
    }
}
