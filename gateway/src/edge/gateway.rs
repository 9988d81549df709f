//! Components of a gateway, and the tasks that keep them up to date.

use super::account::Accounting;
use super::admission::{AdmissionControl, AdmissionPools};
use super::auth::Authenticator;
use super::explain::Explanations;
use super::forwarder::Forwarder;
use super::operator_state::Operations;
use super::pipeline::Pipeline;
use super::policy::PolicyGuard;
use super::policy_clock::PolicyClock;
use super::reader::RequestReader;
use super::responder::Responder;
use super::router::Router;
use super::scatter::{Room, Splitter};
use super::table::{self, Current};
use super::tenants::Tenants;
use super::watch::Watch;
use super::weights::{self, Demands, PlanCounts, Planned};
use super::{EdgeError, reload, reports};
use crate::config::EdgeConfig;
use crate::events::HopFailures;
use crate::hop::Regions;
use crate::intake::Intake;
use crate::listener::Listener;
use crate::metrics::EdgeMetrics;
use crate::receipts::{ReceiptsError, Recorder, Writing};
use crate::tokens::Tokens;
use crate::upstream::Upstream;
use gateway_core::receipt::entry::Role;
use scheduler_core::rollout::Reader;
use std::sync::Arc;
use supervision::health::Health;
use supervision::task::{supervise, supervise_until_done};
use tokio::sync::watch as channel;
use tokio::task::JoinSet;

/// Components that requests, background tasks and operators share.
pub(super) struct Gateway {
    pub(super) config: Arc<EdgeConfig>,
    /// HTTP client for the control plane.
    pub(super) client: reqwest::Client,
    pub(super) table_reader: Reader,
    metrics: Arc<EdgeMetrics>,
    tenants: Arc<Tenants>,
    tokens: Arc<Tokens>,
    views: channel::Sender<Current>,
    planned: channel::Sender<Planned>,
    plan_counts: Arc<PlanCounts>,
    demands: Arc<Demands>,
    watch: Arc<Watch>,
    pools: Arc<AdmissionPools>,
    policy_clock: Arc<PolicyClock>,
    upstream: Arc<Upstream>,
    intake: Arc<Intake>,
    scattering: Arc<Room>,
    explanations: Arc<Explanations>,
    router: Arc<Router>,
}

impl Gateway {
    /// Components for a configuration, with the route table and the plan that are on disk.
    pub(super) fn new(config: EdgeConfig) -> Result<Gateway, EdgeError> {
        let config = Arc::new(config);
        let metrics = Arc::new(EdgeMetrics::new(&config.catalogue, &config.keys));
        let tenants = Arc::new(Tenants::of_file(&config.keys, metrics.clone()));
        let plan_counts: Arc<PlanCounts> = Arc::default();
        let planned = channel::Sender::new(weights::restore(&config, &plan_counts));
        let demands: Arc<Demands> = Arc::default();
        let watch = Arc::new(Watch::new(config.point, &config.catalogue));
        let gateway = config.catalogue.index_of(&config.place);
        let router = Router {
            gateway: gateway.expect("a place that is configured is in the catalogue"),
            is_spillover_enabled: config.spill,
            watch: watch.clone(),
            planned: planned.subscribe(),
            demands: demands.clone(),
        };
        Ok(Gateway {
            client: reqwest::Client::builder().no_proxy().build()?,
            table_reader: table::reader(&config),
            views: channel::Sender::new(table::restore(&config, &tenants, &metrics)),
            tokens: Arc::new(Tokens::new(&config.issuers)),
            pools: Arc::default(),
            policy_clock: Arc::new(PolicyClock::of(&config.snapshot, config.policy_max_age)),
            upstream: Arc::new(Upstream::to_regions(&config.regions, config.region_http2)?),
            intake: Arc::new(Intake::new(config.bodies).map_err(EdgeError::Threads)?),
            scattering: Arc::new(Room::new()),
            explanations: Arc::new(Explanations::new()),
            router: Arc::new(router),
            config,
            metrics,
            tenants,
            planned,
            plan_counts,
            demands,
            watch,
        })
    }

    /// Starts the tasks that follow the hub and the regions.
    pub(super) fn follow_control_plane(&self, tasks: &mut JoinSet<()>) {
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
        let (config, client, demands) = (self.config.clone(), self.client.clone(), self.demands.clone());
        let (watch, planned) = (self.watch.clone(), self.planned.clone());
        let plan_counts = self.plan_counts.clone();
        tasks.spawn(supervise("demand and plan", move || {
            weights::follow(
                config.clone(),
                client.clone(),
                demands.clone(),
                watch.clone(),
                planned.clone(),
                plan_counts.clone(),
            )
        }));
        let (config, upstream, views) = (self.config.clone(), self.upstream.clone(), self.views.clone());
        let (watch, pools) = (self.watch.clone(), self.pools.clone());
        tasks.spawn(supervise("region reports", move || {
            let views = views.subscribe();
            reports::listen(config.clone(), upstream.clone(), views, watch.clone(), pools.clone())
        }));
        let watch = self.watch.clone();
        tasks.spawn(supervise("region health", move || watch.clone().look_for_silence()));
    }

    /// Starts the tasks that follow certificates, credentials, the tenants file and the keys of token issuers.
    pub(super) fn follow_files(&self, tasks: &mut JoinSet<()>) {
        if let Some(identity) = self.config.tls.clone() {
            tasks.spawn(supervise("certificate", move || identity.clone().follow()));
        }
        match &self.config.regions {
            Regions::Tls(credentials) => {
                let credentials = credentials.clone();
                tasks.spawn(supervise("region credentials", move || credentials.clone().follow()));
            }
            Regions::InTheClear => {
                tracing::warn!("requests go to regions in the clear, as [region_tls] says")
            }
            Regions::OnThisMachine => {}
        }
        if let Some(file) = self.config.tenants.clone() {
            let (issuers, tenants) = (self.config.issuers.clone(), self.tenants.clone());
            let (views, metrics) = (self.views.clone(), self.metrics.clone());
            tasks.spawn(supervise_until_done("tenants file", move || {
                reload::follow(file.clone(), issuers.clone(), tenants.clone(), views.clone(), metrics.clone())
            }));
        }
        if !self.tokens.none() {
            let (tokens, issuers) = (self.tokens.clone(), self.config.issuers.clone());
            tasks.spawn(supervise("token issuers", move || tokens.clone().follow(issuers.clone())));
        }
    }

    /// Starts the writer of receipts, if they are configured.
    pub(super) fn start_receipts(&self) -> Result<(Option<Arc<Recorder>>, Option<Writing>), ReceiptsError> {
        let Some(receipts) = &self.config.receipts else {
            tracing::warn!(
                "no receipts are kept, because there is no [receipts]: where requests went cannot be proven"
            );
            return Ok((None, None));
        };
        let regions = self.config.catalogue.iter().map(|(_, region)| region.id.clone()).collect();
        let (recorder, writing) = Recorder::start(receipts, Role::Edge, &self.config.place, regions)?;
        Ok((Some(Arc::new(recorder)), Some(writing)))
    }

    /// Handler of client requests.
    pub(super) fn pipeline(&self, recorder: Option<Arc<Recorder>>) -> Pipeline {
        let admission = Arc::new(AdmissionControl {
            config: self.config.clone(),
            pools: self.pools.clone(),
            router: self.router.clone(),
            watch: self.watch.clone(),
            metrics: self.metrics.clone(),
        });
        let policy = Arc::new(PolicyGuard {
            config: self.config.clone(),
            views: self.views.subscribe(),
            policy_clock: self.policy_clock.clone(),
        });
        let forwarder = Arc::new(Forwarder {
            config: self.config.clone(),
            watch: self.watch.clone(),
            policy: policy.clone(),
            upstream: self.upstream.clone(),
            recorder: recorder.clone(),
        });
        let responder = Arc::new(Responder { config: self.config.clone(), upstream: self.upstream.clone() });
        Pipeline {
            tenants: self.tenants.clone(),
            views: self.views.subscribe(),
            authenticator: Authenticator { tokens: self.tokens.clone() },
            reader: RequestReader {
                config: self.config.clone(),
                intake: self.intake.clone(),
                router: self.router.clone(),
                admission,
            },
            splitter: Splitter {
                config: self.config.clone(),
                scattering: self.scattering.clone(),
                intake: self.intake.clone(),
                router: self.router.clone(),
                policy,
                forwarder: forwarder.clone(),
                responder: responder.clone(),
                watch: self.watch.clone(),
                upstream: self.upstream.clone(),
                metrics: self.metrics.clone(),
            },
            forwarder,
            responder,
            accounting: Accounting {
                config: self.config.clone(),
                metrics: self.metrics.clone(),
                explanations: self.explanations.clone(),
                recorder: recorder.clone(),
            },
            recorder,
        }
    }

    /// State for the operations port.
    pub(super) fn operator_state(
        &self,
        listener: &Listener,
        refused: Arc<HopFailures>,
        leaving: channel::Receiver<bool>,
        recorder: Option<&Recorder>,
    ) -> Operations {
        Operations {
            config: self.config.clone(),
            health: Health::default(),
            tenants: self.tenants.clone(),
            views: self.views.subscribe(),
            policy_clock: self.policy_clock.clone(),
            router: self.router.clone(),
            plan_counts: self.plan_counts.clone(),
            pools: self.pools.clone(),
            watch: self.watch.clone(),
            metrics: self.metrics.clone(),
            intake: self.intake.clone(),
            upstream: self.upstream.clone(),
            refused,
            connections: listener.room(),
            connections_max: self.config.connections_max,
            listener: listener.counts(),
            scattering: self.scattering.clone(),
            explanations: self.explanations.clone(),
            leaving,
            receipts: recorder.map(Recorder::gauge),
        }
    }
}
