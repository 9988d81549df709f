//! State of a gateway that the handlers of the operations port share.

use super::explain::Explanations;
use super::explanation_archive::ExplanationArchive;
use super::job_transfer::ResultMemory;
use super::policy_clock::PolicyClock;
use super::region_monitor::RegionMonitor;
use super::router::AdmissionPools;
use super::router::Router;
use super::scatter::SplitCapacity;
use super::table::Current;
use super::tenants::Tenants;
use super::weights::PlanCounts;
use crate::config::EdgeConfig;
use crate::metrics::{EdgeMetrics, ListenerMetrics};
use crate::receipts::ReceiptMetrics;
use crate::request_body::BodyReader;
use crate::upstream::Upstream;
use crate::usage::UsageRecorder;
use identity::ConnectionFailures;
use std::sync::Arc;
use supervision::health::HealthCheck;
use telemetry::Tracer;
use tokio::sync::{Semaphore, watch};

/// Shared state of the operations port.
#[derive(Clone)]
pub(super) struct Operations {
    pub(super) config: Arc<EdgeConfig>,
    /// Runs health checks, one at a time.
    pub(super) health: HealthCheck,
    pub(super) tenants: Arc<Tenants>,
    pub(super) views: watch::Receiver<Current>,
    pub(super) policy_clock: Arc<PolicyClock>,
    pub(super) router: Arc<Router>,
    pub(super) plan_counts: Arc<PlanCounts>,
    pub(super) pools: Arc<AdmissionPools>,
    pub(super) region_monitor: Arc<RegionMonitor>,
    pub(super) metrics: Arc<EdgeMetrics>,
    pub(super) body_reader: Arc<BodyReader>,
    /// One permit for each further connection that may be opened.
    pub(super) connections: Arc<Semaphore>,
    /// Limit on open connections.
    pub(super) connections_max: usize,
    /// Metrics of the client listener.
    pub(super) listener: Arc<ListenerMetrics>,
    /// Capacity shared by split requests.
    pub(super) split_capacity: Arc<SplitCapacity>,
    /// One permit for each transfer of a request of a job that may still begin.
    pub(super) transfer_slots: Arc<Semaphore>,
    /// Memory of the results of transfers.
    pub(super) transfer_memory: ResultMemory,
    pub(super) explanations: Arc<Explanations>,
    /// Explanations on disk, if they are configured.
    pub(super) archive: Option<Arc<ExplanationArchive>>,
    pub(super) usage: Arc<UsageRecorder>,
    pub(super) upstream: Arc<Upstream>,
    /// Rejected connections of both ports.
    pub(super) refused: Arc<ConnectionFailures>,
    /// Whether the gateway is draining.
    pub(super) leaving: watch::Receiver<bool>,
    /// Metrics of the receipts, if they are configured.
    pub(super) receipts: Option<ReceiptMetrics>,
    /// Tracer, if traces are configured.
    pub(super) tracer: Option<Tracer>,
}
