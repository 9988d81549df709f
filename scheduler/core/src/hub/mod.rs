//! State machine of the hub: events in, commands out.
//!
//! Changes of the store arrive as events, and tables to publish leave as commands. A table is *persisted* before it is
//! *published*, so that a hub that crashes between the two has not shown any reader a generation that its successor
//! would use again. Changes that arrive while a table is being persisted are collected in the next table.
//!
//! The traffic plan (see [`planning`]) is computed, persisted and published in the same way, once a second, and so are the
//! gateways' shares in the rate limits of tenants ([`crate::shares`]).
//!
//! The shell's loop is: wait for an event or for [`HubState::next_wakeup`], pass it to [`HubState::handle`] or
//! [`HubState::handle_timeout`], then execute the commands of [`HubState::poll`] until it returns `None`.

mod placement_record;
pub mod planning;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::invariants;
use crate::placement::{Fleet, Infeasible, Placements};
use crate::plan::{PlanInput, TrafficPlan};
use crate::publish::{next_generation, publish};
use crate::registry::{RegisteredSpoke, Registry};
use crate::revisions;
use crate::rollout::Rollout;
use crate::shares::{ShareAllocator, ShareChanges};
use placement_record::PlacementRecord;
use planning::{HubView, PlanPart, Planner};
use regions::tenant::{ApiKey, KeyDigest};
use regions::{
    Catalogue, Deployment, DeploymentName, Generation, RegionId, RouteTable, TenantId, TenantRules,
};
use scheduler_api::deployment::{DesiredDeployments, Promotions};
use scheduler_api::placements::DecidedPlacements;
use scheduler_api::plan::{GatewayBoot, GatewayDemand, GatewayInstance, TenantDemand, TrafficClass};
use scheduler_api::reader::Reader;

/// Delay before the next attempt to persist a table that the store did not accept.
pub const PERSIST_RETRY: Duration = Duration::from_secs(1);

/// Input of the hub.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// Complete content of the store, after its watch was interrupted.
    Listed(StoreState),
    /// A spoke registered, or updated its registration.
    SpokeRegistered(RegisteredSpoke),
    /// A spoke's lease ended, by expiry or at the spoke's request.
    SpokeRemoved {
        /// Region of the spoke.
        region: RegionId,
        /// Boot id of the spoke instance.
        boot_id: u64,
    },
    /// The complete set of desired deployments changed.
    DeploymentsChanged(DesiredDeployments),
    /// The complete set of tenants changed.
    TenantsChanged(BTreeMap<TenantId, TenantRules>),
    /// The complete set of created API keys changed.
    ApiKeysChanged(BTreeMap<KeyDigest, ApiKey>),
    /// A reader runs the table of this generation.
    Acknowledged(Reader, Generation),
    /// A reader has not been heard of for longer than its timeout.
    ReaderExpired(Reader),
    /// A gateway reported its demand.
    DemandReported(GatewayDemand),
    /// A gateway's demand report expired.
    GatewayExpired(GatewayBoot),
    /// A gateway reported the demand of its tenants.
    TenantDemandReported(TenantDemand),
    /// A gateway's report of the demand of its tenants expired.
    TenantDemandExpired(GatewayInstance),
    /// An operator started to drain a region.
    DrainStarted(RegionId),
    /// The drain of a region was cancelled.
    DrainCancelled(RegionId),
    /// The planner computed the plan for the last [`HubCommand::Plan`].
    PlanComputed(TrafficPlan),
    /// The store holds the parts of the last [`HubCommand::PersistPlan`].
    PlanPersisted(Vec<PlanPart>),
    /// The outcome of the last [`HubCommand::PersistPlan`] is unknown or a failure.
    PlanPersistFailed,
    /// The store holds the shares of the last [`HubCommand::PersistShares`].
    SharesPersisted,
    /// The outcome of the last [`HubCommand::PersistShares`] is unknown or a failure.
    SharesPersistFailed,
    /// The store holds the decisions of the last [`HubCommand::PersistPlacements`].
    PlacementsPersisted,
    /// The outcome of the last [`HubCommand::PersistPlacements`] is unknown or a failure.
    PlacementsPersistFailed,
    /// The store holds this table: that of the last [`HubCommand::Persist`], or an earlier one whose outcome was
    /// unknown.
    Persisted(RouteTable),
    /// The last [`HubCommand::Persist`] failed and is to be retried.
    PersistFailed,
}

impl Event {
    /// Returns whether the route table may depend on it.
    fn changes_table(&self) -> bool {
        match self {
            Event::Listed(_)
            | Event::SpokeRegistered(_)
            | Event::SpokeRemoved { .. }
            | Event::DeploymentsChanged(_)
            | Event::TenantsChanged(_)
            | Event::ApiKeysChanged(_)
            | Event::Acknowledged(..)
            | Event::ReaderExpired(_)
            | Event::DrainStarted(_)
            | Event::DrainCancelled(_)
            | Event::Persisted(_)
            | Event::PersistFailed => true,
            // Those of the plan and of the shares. The regions that gateways reach only decide when a lapsed spoke expires.
            Event::DemandReported(_)
            | Event::GatewayExpired(_)
            | Event::TenantDemandReported(_)
            | Event::TenantDemandExpired(_)
            | Event::PlanComputed(_)
            | Event::PlanPersisted(_)
            | Event::PlanPersistFailed
            | Event::SharesPersisted
            | Event::SharesPersistFailed
            | Event::PlacementsPersisted
            | Event::PlacementsPersistFailed => false,
        }
    }
}

/// Complete content of the store, as far as the hub uses it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StoreState {
    /// All registered spokes.
    pub spokes: Vec<RegisteredSpoke>,
    /// All desired deployments; `None` if the stored record cannot be read, in which case the current ones stay.
    pub deployments: Option<DesiredDeployments>,
    /// All tenants, if any were ever applied and can be read.
    pub tenants: Option<BTreeMap<TenantId, TenantRules>>,
    /// Created API keys, if they can be read.
    pub api_keys: Option<BTreeMap<KeyDigest, ApiKey>>,
    /// Regions that are being drained.
    pub drains: Vec<RegionId>,
    /// Demand reports of all gateways.
    pub demand: Vec<GatewayDemand>,
    /// Demand of tenants at all gateways.
    pub tenant_demand: Vec<TenantDemand>,
    /// Generation that each reader runs.
    pub readers: BTreeMap<Reader, Generation>,
}

/// Output of the hub.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HubCommand {
    /// Write this table to the store and report the result as an event.
    Persist(RouteTable),
    /// Publish this table to all readers.
    Publish(RouteTable),
    /// Compute the plan that follows the given one from this input ([`crate::plan::plan`]) and report it as an event.
    /// The computation may take long enough to run it in the background.
    Plan(Box<PlanInput>, Arc<TrafficPlan>),
    /// Write these parts of the plan to the store and report the result as an event.
    PersistPlan(Vec<PlanPart>),
    /// Publish these parts of the plan.
    PublishPlan(Vec<PlanPart>),
    /// Write these shares to the store, delete those of gateways that are gone, and report the result as an event.
    PersistShares(ShareChanges),
    /// Write these decisions on the placements of the current desired deployments to the store and report the result as an event.
    PersistPlacements(DecidedPlacements),
}

/// Returns the epoch that must begin before anything is published on this store, if one is required.
///
/// `known` is the newest generation that a hub has seen; `epoch` and `table` are the current values of the store. A
/// store that holds less than was seen before has been set back to an older copy. Generations counted from there would
/// be used a second time, or be rejected by every reader of a higher one. `meridian restore` raises the epoch; if only
/// etcd was restored, a hub that kept running detects it here.
pub fn required_epoch(known: Option<Generation>, epoch: u64, table: Option<Generation>) -> Option<u64> {
    let known = known?;
    let went_back = epoch <= known.epoch && table.is_none_or(|table| table < known);
    went_back.then_some(known.epoch + 1)
}

/// Returns the epoch of a restored store whose epoch is `present`, 0 without one. `now` is the time since 1970 in
/// seconds: it is later than the epochs that the lost store has begun since the backup, and the epoch rises also if the
/// clock is behind it.
pub fn restored_epoch(present: u64, now: u64) -> u64 {
    now.max(present.saturating_add(1))
}

/// Content of the store at the start of a hub.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HubInitialState {
    /// Epoch of the store.
    pub epoch: u64,
    /// Table that was published last, if any.
    pub table: Option<RouteTable>,
    /// Parts of the last plan.
    pub plan: Vec<PlanPart>,
    /// Everything else.
    pub all: StoreState,
}

/// The hub.
#[derive(Debug)]
pub struct HubState {
    epoch: u64,
    /// Desired deployments. The table contains them as far as all readers have acknowledged a wider residency.
    deployments: BTreeMap<DeploymentName, Deployment>,
    /// Operator's orders for model changes.
    promotions: Promotions,
    /// Desired tenants; `None` until an operator has applied some.
    tenants: Option<BTreeMap<TenantId, TenantRules>>,
    /// Created API keys.
    api_keys: BTreeMap<KeyDigest, ApiKey>,
    rollout: Rollout,
    registry: Registry,
    /// Table in the store.
    persisted: RouteTable,
    table_write: TableWrite,
    /// No other table is needed, and what a table depends on has not changed since that was found. To find it costs as much as
    /// there are deployments and spokes, and the hub wakes up at least once a second for its plan.
    is_table_current: bool,
    /// [`HubState::persisted`] has not been published yet.
    to_publish: bool,
    drains: BTreeSet<RegionId>,
    catalogue: Arc<Catalogue>,
    /// Placements by the last table that was computed.
    placements: Placements,
    placement_record: PlacementRecord,
    planner: Planner,
    /// Progress of the last plan.
    plan_write: PlanWrite,
    shares: ShareAllocator,
    /// Shares in the store that are not published yet.
    shares_to_publish: Vec<PlanPart>,
    now: Instant,
}

/// Progress of the parts of a plan.
#[derive(Debug)]
enum PlanWrite {
    Idle,
    ToPersist(Vec<PlanPart>),
    ToPublish(Vec<PlanPart>),
}

/// Progress of the next table on its way to the store.
#[derive(Debug)]
enum TableWrite {
    Idle,
    InFlight,
    /// The store did not accept the table.
    RetryAt {
        at: Instant,
    },
}

impl HubState {
    /// Creates a hub from the content of its store. Spokes of the regions in the last table have `lapsed_keep` to
    /// register.
    pub fn new(
        initial: HubInitialState,
        catalogue: Arc<Catalogue>,
        lapsed_keep: Duration,
        rollout: Rollout,
        now: Instant,
    ) -> HubState {
        let HubInitialState { epoch, table, plan, all } = initial;
        let to_publish = table.is_some();
        let persisted = table.unwrap_or_else(RouteTable::empty);
        let registry = Registry::new(&persisted.regions, lapsed_keep, now);
        let (mut shares_to_publish, mut stored_shares) = (Vec::new(), Vec::new());
        let mut rest = Vec::new();
        for part in plan {
            match part {
                PlanPart::Shares(shares) => {
                    stored_shares.push(shares.clone());
                    shares_to_publish.push(PlanPart::Shares(shares));
                }
                PlanPart::Weights(_) | PlanPart::Floors(_) => rest.push(part),
            }
        }
        let (plan, shares) = (rest, ShareAllocator::new(epoch, stored_shares, now));
        let plan_write = if plan.is_empty() { PlanWrite::Idle } else { PlanWrite::ToPublish(plan.clone()) };
        let mut hub = HubState {
            epoch,
            deployments: persisted.deployments.clone(),
            promotions: Promotions::default(),
            tenants: persisted.tenants.as_ref().map(|tenants| tenants.all.clone()),
            api_keys: persisted.tenants.as_ref().map(|tenants| tenants.keys.clone()).unwrap_or_default(),
            rollout,
            registry,
            persisted,
            table_write: TableWrite::Idle,
            is_table_current: false,
            to_publish,
            drains: BTreeSet::new(),
            catalogue: catalogue.clone(),
            placements: Placements::default(),
            placement_record: PlacementRecord::default(),
            planner: Planner::new(catalogue, epoch, plan, now),
            plan_write,
            shares,
            shares_to_publish,
            now,
        };
        hub.handle(Event::Listed(all), now);
        hub
    }

    /// Processes one event.
    ///
    /// # Panics
    ///
    /// Panics if the store holds a table that does not supersede the one before it.
    pub fn handle(&mut self, event: Event, now: Instant) {
        self.now = self.now.max(now);
        self.is_table_current &= !event.changes_table();
        match event {
            Event::Listed(StoreState {
                spokes,
                deployments,
                tenants,
                api_keys,
                drains,
                demand,
                tenant_demand,
                readers,
            }) => {
                self.registry.replace(spokes, now);
                self.drains = drains.into_iter().collect();
                self.registry.replace_gateways(demand.iter().map(gateway_reach), now);
                self.planner.replace(demand, now);
                self.shares.replace(tenant_demand, now);
                self.rollout.replace(readers);
                if let Some(deployments) = deployments {
                    self.replace_deployments(deployments);
                }
                self.tenants = tenants.or(self.tenants.take());
                self.api_keys = api_keys.unwrap_or(std::mem::take(&mut self.api_keys));
            }
            Event::SpokeRegistered(spoke) => self.registry.put(spoke, now),
            Event::SpokeRemoved { region, boot_id } => self.registry.remove(&region, boot_id, now),
            Event::DeploymentsChanged(deployments) => self.replace_deployments(deployments),
            Event::ApiKeysChanged(keys) => self.api_keys = keys,
            Event::TenantsChanged(tenants) => self.tenants = Some(tenants),
            Event::Acknowledged(reader, generation) => self.rollout.acknowledged(reader, generation),
            Event::ReaderExpired(reader) => self.rollout.remove_reader(&reader),
            Event::DemandReported(demand) => {
                let (gateway, reachable_regions) = gateway_reach(&demand);
                self.registry.gateway_reported(gateway, reachable_regions, now);
                self.planner.report_demand(demand);
            }
            Event::GatewayExpired(gateway) => {
                self.registry.gateway_expired(&gateway, now);
                self.planner.gateway_expired(&gateway, now);
            }
            Event::TenantDemandReported(demand) => self.shares.report(demand, now),
            Event::TenantDemandExpired(gateway) => self.shares.expired(&gateway, now),
            Event::SharesPersisted => {
                self.shares_to_publish.extend(self.shares.written().into_iter().map(PlanPart::Shares));
            }
            Event::SharesPersistFailed => self.shares.write_failed(),
            Event::PlacementsPersisted => self.placement_record.persisted(),
            Event::PlacementsPersistFailed => self.placement_record.failed(self.now),
            Event::DrainStarted(region) => drop(self.drains.insert(region)),
            Event::DrainCancelled(region) => drop(self.drains.remove(&region)),
            Event::PlanComputed(plan) => {
                let changes = self.planner.plan_computed(plan);
                self.plan_write =
                    if changes.is_empty() { PlanWrite::Idle } else { PlanWrite::ToPersist(changes) };
            }
            Event::PlanPersisted(parts) => {
                self.planner.written(&parts);
                self.plan_write = PlanWrite::ToPublish(parts);
            }
            Event::PlanPersistFailed => self.planner.write_failed(),
            Event::Persisted(table) => {
                invariants::monotone(self.persisted.generation, table.generation)
                    .expect("the store is written by this hub only, and its generations rise");
                self.rollout.persisted(&self.persisted, &table);
                self.persisted = table;
                self.to_publish = true;
                self.table_write = TableWrite::Idle;
            }
            Event::PersistFailed => self.table_write = TableWrite::RetryAt { at: now + PERSIST_RETRY },
        }
    }

    fn replace_deployments(&mut self, desired: DesiredDeployments) {
        let DesiredDeployments { applied: _, deployments, promotions } = desired;
        (self.deployments, self.promotions) = (deployments, promotions);
        self.placements.deployments_changed();
    }

    /// Returns the next command, if any. The work of one call is bounded; while [`HubState::has_pending_placements`], the next one
    /// continues.
    pub fn poll(&mut self) -> Option<HubCommand> {
        if std::mem::take(&mut self.to_publish) {
            return Some(HubCommand::Publish(self.persisted.clone()));
        }
        self.next_table()
            .or_else(|| self.next_placements_command())
            .or_else(|| self.next_shares_command())
            .or_else(|| self.next_plan_command())
    }

    fn next_placements_command(&mut self) -> Option<HubCommand> {
        let (revision, has_pending) = (self.placements.revision(), self.placements.has_pending());
        let is_due = self.placement_record.begin(revision, has_pending, self.now);
        let decided = || self.placements.decided(&self.deployments, &self.catalogue);
        is_due.then(|| HubCommand::PersistPlacements(decided()))
    }

    fn next_shares_command(&mut self) -> Option<HubCommand> {
        if !self.shares_to_publish.is_empty() {
            return Some(HubCommand::PublishPlan(std::mem::take(&mut self.shares_to_publish)));
        }
        // The published limits are those that gateways apply.
        let none = BTreeMap::new();
        let rules = self.persisted.tenants.as_ref().map_or(&none, |tenants| &tenants.all);
        self.shares.divide(rules, self.now).map(HubCommand::PersistShares)
    }

    fn next_table(&mut self) -> Option<HubCommand> {
        match self.table_write {
            TableWrite::InFlight | TableWrite::RetryAt { .. } => None,
            TableWrite::Idle if self.is_table_current => {
                debug_assert_eq!(self.other_table(), None, "a change of its input was missed");
                None
            }
            TableWrite::Idle => {
                let next = self.other_table();
                match next {
                    Some(_) => self.table_write = TableWrite::InFlight,
                    None => self.is_table_current = !self.placements.has_pending(),
                }
                next.map(HubCommand::Persist)
            }
        }
    }

    /// Returns the table that follows from the current state, if it differs from the one in the store.
    fn other_table(&mut self) -> Option<RouteTable> {
        let next = next_generation(&self.persisted, self.epoch);
        let in_doubt = self.registry.is_holding();
        let (rollout, last) = (&self.rollout, &self.persisted);
        let reports = self.registry.reports();
        let routes = self.registry.routes();
        let registered = self.registry.representatives().into_values();
        let lapsed = self.registry.lapsed_representatives().into_values();
        let fleet = Fleet::new(&self.catalogue, routes.keys(), registered, lapsed, &self.drains, in_doubt);
        let placed = self.placements.stage(&self.deployments, last, &fleet, self.now);
        let (deployments, revisions) = revisions::stage(placed, &self.promotions, last, &reports, in_doubt);
        let mut staged = rollout.stage(&deployments, last, next, in_doubt);
        staged.revisions = revisions;
        let tenants = self.tenants.as_ref();
        staged.tenants =
            tenants.map(|tenants| rollout.stage_tenants(tenants, &self.api_keys, last, next, in_doubt));
        publish(&self.persisted, self.epoch, routes, staged, &self.drains)
    }

    fn next_plan_command(&mut self) -> Option<HubCommand> {
        match std::mem::replace(&mut self.plan_write, PlanWrite::Idle) {
            PlanWrite::ToPersist(parts) => return Some(HubCommand::PersistPlan(parts)),
            PlanWrite::ToPublish(parts) => return Some(HubCommand::PublishPlan(parts)),
            PlanWrite::Idle => {}
        }
        let HubState { registry, persisted, drains, .. } = self;
        // The plan uses the published policies, not the desired ones: not every reader has acknowledged the wider ones.
        let view = HubView { registry, deployments: &persisted.deployments, drains };
        let (input, previous) = self.planner.begin(&view, self.now)?;
        Some(HubCommand::Plan(Box::new(input), previous))
    }

    /// Returns the number of regions with a registered spoke.
    pub fn registered_spokes(&self) -> usize {
        self.registry.representatives().len()
    }

    /// Returns the regions whose spokes have several queues of jobs, of which gateways find the jobs of one.
    pub fn regions_with_several_job_queues(&self) -> BTreeSet<&RegionId> {
        self.registry.regions_with_several_job_queues()
    }

    /// Returns whether so many leases ended at once that the hub suspects the store and holds their regions.
    pub fn suspects_store_failure(&self) -> bool {
        self.registry.is_holding()
    }

    /// Returns the classes that cannot survive the loss of their largest region with the replicas allowed, by the last
    /// plan.
    pub fn uncovered_classes(&self) -> &BTreeSet<TrafficClass> {
        self.planner.uncovered_classes()
    }

    /// Returns the deployments for which no set of regions is feasible, with the constraint that fails.
    pub fn infeasible_placements(&self) -> &BTreeMap<DeploymentName, Infeasible> {
        self.placements.infeasible()
    }

    /// Returns whether decisions on placements wait for the next [`HubState::poll`], because the last one has spent its budget.
    pub fn has_pending_placements(&self) -> bool {
        matches!(self.table_write, TableWrite::Idle) && self.placements.has_pending()
    }

    /// Returns the regions that `table` has for each deployment with a placement.
    pub fn placed_regions(&self, table: &RouteTable) -> BTreeMap<DeploymentName, Vec<RegionId>> {
        let placed = self.deployments.values().filter(|deployment| deployment.placement.is_some());
        let regions = placed.filter_map(|Deployment { name, .. }| {
            table.deployments.get(name).map(|known| (name.clone(), known.regions.clone()))
        });
        regions.collect()
    }

    /// Returns the latest time at which [`HubState::handle_timeout`] must be called.
    pub fn next_wakeup(&self) -> Option<Instant> {
        let retry = match self.table_write {
            TableWrite::RetryAt { at } => Some(at),
            TableWrite::Idle | TableWrite::InFlight => None,
        };
        let continued = self.has_pending_placements().then_some(self.now);
        let settled = self.rollout.next_wakeup(&self.persisted);
        let planned = self.planner.next_due();
        let divided = self.shares.next_due();
        self.registry
            .next_expiry()
            .into_iter()
            .chain(retry)
            .chain(continued)
            .chain(settled)
            .chain(planned)
            .chain(divided)
            .chain(self.placements.next_due())
            .chain(self.placement_record.next_due())
            .min()
    }

    /// Processes the passage of time.
    pub fn handle_timeout(&mut self, now: Instant) {
        self.now = self.now.max(now);
        let has_expired = self.registry.expire(now);
        let has_settled = self.rollout.tick(now);
        let has_dwelt = self.placements.tick(now);
        self.is_table_current &= !(has_expired || has_settled || has_dwelt);
        if let TableWrite::RetryAt { at } = self.table_write
            && at <= now
        {
            self.table_write = TableWrite::Idle;
        }
    }
}

/// Returns the regions that a gateway reports as reachable.
fn gateway_reach(demand: &GatewayDemand) -> (GatewayBoot, Option<BTreeSet<RegionId>>) {
    (demand.gateway.clone(), demand.reachable_regions.clone())
}

#[cfg(test)]
mod tests;
