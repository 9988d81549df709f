//! State that operators can query, shared by the handlers of the operations port.

use super::admission::AdmissionPools;
use super::explain::Explanations;
use super::policy_clock::PolicyClock;
use super::router::Router;
use super::scatter::Room;
use super::table::Current;
use super::tenants::Tenants;
use super::watch::Watch;
use super::weights::PlanCounts;
use crate::config::EdgeConfig;
use crate::events::HopFailures;
use crate::intake::Intake;
use crate::metrics::{EdgeMetrics, ListenerMetrics};
use crate::receipts::Gauge;
use crate::upstream::Upstream;
use std::sync::Arc;
use supervision::health::Health;
use tokio::sync::{Semaphore, watch};

/// State of a gateway, for operators.
#[derive(Clone)]
pub(super) struct Operations {
    pub(super) config: Arc<EdgeConfig>,
    /// Checks of its own state, one at a time.
    pub(super) health: Health,
    pub(super) tenants: Arc<Tenants>,
    pub(super) views: watch::Receiver<Current>,
    pub(super) policy_clock: Arc<PolicyClock>,
    pub(super) router: Arc<Router>,
    pub(super) plan_counts: Arc<PlanCounts>,
    pub(super) pools: Arc<AdmissionPools>,
    pub(super) watch: Arc<Watch>,
    pub(super) metrics: Arc<EdgeMetrics>,
    pub(super) intake: Arc<Intake>,
    /// A permit for each connection that could be opened.
    pub(super) connections: Arc<Semaphore>,
    /// How many may be open at once.
    pub(super) connections_max: usize,
    /// What its listener has ended.
    pub(super) listener: Arc<ListenerMetrics>,
    /// What requests in pieces have together.
    pub(super) scattering: Arc<Room>,
    pub(super) explanations: Arc<Explanations>,
    pub(super) upstream: Arc<Upstream>,
    /// Clients that came with TLS to a port in the clear.
    pub(super) refused: Arc<HopFailures>,
    /// Whether the edge is on its way out.
    pub(super) leaving: watch::Receiver<bool>,
    /// How receipts are getting on, if they are kept.
    pub(super) receipts: Option<Gauge>,
}
