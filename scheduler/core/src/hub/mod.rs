//! The hub: events in, commands out.
//!
//! What stands in the store arrives as events, and what is to be published leaves as a command. A table is *persisted*
//! before it is *published*: a hub that dies between the two has shown nobody a generation that its successor would
//! give out a second time. While one table is being persisted, changes gather, and the next table holds them all.
//!
//! Beside the table there is the plan (see [`planning`]), which is made and written in the same way, once a second.
//!
//! The shell's loop is: wait for an event or for [`Hub::next_wakeup`], hand it in, then do what [`Hub::poll`] says until
//! it says nothing.

pub mod planning;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::invariants;
use crate::plan::{Class, Plan, Problem};
use crate::publish::{following, publish};
use crate::registry::{Registry, Standing};
use crate::revisions::{self, Orders};
use crate::rollout::{Reader, Rollout, Wanted};
use crate::wire::plan::{GatewayBoot, GatewayDemand};
use planning::{Around, Part, Planner};
use regions::{
    Catalogue, Deployment, DeploymentName, Generation, RegionId, RouteTable, TenantId, TenantRules,
};

/// How long the hub waits before it asks a store again that did not take a table.
pub const PERSIST_RETRY: Duration = Duration::from_secs(1);

/// What the hub is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// Everything that stands in the store, after the watch on it broke off.
    Listed(Everything),
    /// A spoke registered, or said anew what is ready.
    SpokeStands(Standing),
    /// A spoke's lease ended, or the spoke ended it.
    SpokeGone {
        /// The region whose spoke it was.
        region: RegionId,
        /// Which of its starts.
        boot_id: u64,
    },
    /// These are all the deployments that there shall be.
    Wanted(Wanted),
    /// These are all the tenants that there shall be.
    TenantsWanted(BTreeMap<TenantId, TenantRules>),
    /// A reader runs the table of this generation.
    Acknowledged(Reader, Generation),
    /// A reader was not heard of for too long.
    ReaderGone(Reader),
    /// A gateway says what it is asked for.
    Asked(GatewayDemand),
    /// A gateway does not say it any longer.
    GatewayGone(GatewayBoot),
    /// A region is to be emptied.
    Drained(RegionId),
    /// It is not, or no longer.
    Undrained(RegionId),
    /// The problem of the last [`Command::Plan`] is solved.
    Planned(Plan),
    /// The store holds the parts of the last [`Command::PersistPlan`].
    PlanPersisted(Vec<Part>),
    /// It may not.
    PlanNotPersisted,
    /// The store holds this table: that of the last [`Command::Persist`], or of one before it of which the store said
    /// that it might not hold it.
    Persisted(RouteTable),
    /// It has not, and is to be asked again.
    NotPersisted,
}

/// Everything that stands in the store and that a hub goes by.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Everything {
    /// Every spoke.
    pub spokes: Vec<Standing>,
    /// Every deployment; nothing, if what the store holds cannot be read, and then those that are known stay.
    pub deployments: Option<Wanted>,
    /// Every tenant, if any were ever applied and can be read.
    pub tenants: Option<BTreeMap<TenantId, TenantRules>>,
    /// Every region that is to be emptied.
    pub drains: Vec<RegionId>,
    /// What every gateway is asked for.
    pub demand: Vec<GatewayDemand>,
    /// Who runs which table.
    pub readers: BTreeMap<Reader, Generation>,
}

/// What the hub wants done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// Write this table to the store and say whether that succeeded.
    Persist(RouteTable),
    /// Give this table to whoever asks for one.
    Publish(RouteTable),
    /// Solve this problem after this plan ([`crate::plan::plan`]) and say what came of it. It may take long enough for
    /// something else to be done meanwhile.
    Plan(Box<Problem>, Arc<Plan>),
    /// Write these parts of the plan to the store and say whether that succeeded.
    PersistPlan(Vec<Part>),
    /// Give these parts of the plan to whoever asks for them.
    PublishPlan(Vec<Part>),
}

/// The epoch that has to begin before anything is published on this store, if one has to.
///
/// `known` is the table that a hub has seen before, `epoch` and `table` are what the store says now. A store that knows
/// less than it knew has been set back to an older copy of itself: what is counted up from there would be given out a
/// second time, or never be taken by whoever has the higher one. Whoever restores a store raises its epoch; where that
/// was forgotten, a hub that lives can tell.
pub fn epoch_to_begin(known: Option<Generation>, epoch: u64, table: Option<Generation>) -> Option<u64> {
    let known = known?;
    let went_back = epoch <= known.epoch && table.is_none_or(|table| table < known);
    went_back.then_some(known.epoch + 1)
}

/// What the hub finds in its store when it starts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// Of the store.
    pub epoch: u64,
    /// The table that was published last, if one ever was.
    pub table: Option<RouteTable>,
    /// The parts of the plan that was made last.
    pub plan: Vec<Part>,
    /// The rest.
    pub all: Everything,
}

/// The hub.
#[derive(Debug)]
pub struct Hub {
    epoch: u64,
    /// What an operator wants; the table says it as far as everybody has heard of it.
    deployments: BTreeMap<DeploymentName, Deployment>,
    /// What an operator has said about changes of their models.
    orders: Orders,
    /// Whom an operator wants let in; nothing as long as none has said so.
    tenants: Option<BTreeMap<TenantId, TenantRules>>,
    rollout: Rollout,
    registry: Registry,
    /// The table in the store.
    persisted: RouteTable,
    writing: Writing,
    /// [`Hub::persisted`] has not been given out yet.
    to_publish: bool,
    drains: BTreeSet<RegionId>,
    planner: Planner,
    /// Of the plan, what has to be written or given out.
    planned: Planned,
    now: Instant,
}

/// Where the parts of a plan stand on their way out.
#[derive(Debug)]
enum Planned {
    Nothing,
    ToPersist(Vec<Part>),
    ToPublish(Vec<Part>),
}

/// Where the next table stands on its way into the store.
#[derive(Debug)]
enum Writing {
    Nothing,
    UnderWay,
    /// The store did not take one.
    Again {
        at: Instant,
    },
}

impl Hub {
    /// A hub that starts with what it finds. Regions of the last table have `lapsed_keep` to come forward.
    pub fn new(
        found: Found,
        catalogue: Arc<Catalogue>,
        lapsed_keep: Duration,
        rollout: Rollout,
        now: Instant,
    ) -> Hub {
        let Found { epoch, table, plan, all } = found;
        let to_publish = table.is_some();
        let persisted = table.unwrap_or_else(RouteTable::empty);
        let registry = Registry::new(&persisted.regions, lapsed_keep, now);
        let planned = if plan.is_empty() { Planned::Nothing } else { Planned::ToPublish(plan.clone()) };
        let mut hub = Hub {
            epoch,
            deployments: persisted.deployments.clone(),
            orders: Orders::default(),
            tenants: persisted.tenants.as_ref().map(|tenants| tenants.all.clone()),
            rollout,
            registry,
            persisted,
            writing: Writing::Nothing,
            to_publish,
            drains: BTreeSet::new(),
            planner: Planner::new(catalogue, epoch, plan, now),
            planned,
            now,
        };
        hub.handle(Event::Listed(all), now);
        hub
    }

    /// Takes note of what happened.
    ///
    /// # Panics
    ///
    /// When told that the store holds a table which does not supersede the one before it.
    pub fn handle(&mut self, event: Event, now: Instant) {
        self.now = self.now.max(now);
        match event {
            Event::Listed(Everything { spokes, deployments, tenants, drains, demand, readers }) => {
                self.registry.replace(spokes, now);
                self.drains = drains.into_iter().collect();
                self.registry.hear_only(demand.iter().map(heard), now);
                self.planner.replace(demand, now);
                self.rollout.replace(readers);
                if let Some(Wanted { applied: _, deployments, orders }) = deployments {
                    (self.deployments, self.orders) = (deployments, orders);
                }
                self.tenants = tenants.or(self.tenants.take());
            }
            Event::SpokeStands(standing) => self.registry.put(standing, now),
            Event::SpokeGone { region, boot_id } => self.registry.remove(&region, boot_id, now),
            Event::Wanted(Wanted { applied: _, deployments, orders }) => {
                (self.deployments, self.orders) = (deployments, orders);
            }
            Event::TenantsWanted(tenants) => self.tenants = Some(tenants),
            Event::Acknowledged(reader, generation) => self.rollout.acknowledged(reader, generation),
            Event::ReaderGone(reader) => self.rollout.gone(&reader),
            Event::Asked(demand) => {
                let (gateway, reaches) = heard(&demand);
                self.registry.heard(gateway, reaches, now);
                self.planner.asked(demand);
            }
            Event::GatewayGone(gateway) => {
                self.registry.silent(&gateway, now);
                self.planner.silent(&gateway, now);
            }
            Event::Drained(region) => drop(self.drains.insert(region)),
            Event::Undrained(region) => drop(self.drains.remove(&region)),
            Event::Planned(plan) => {
                let news = self.planner.solved(plan);
                self.planned = if news.is_empty() { Planned::Nothing } else { Planned::ToPersist(news) };
            }
            Event::PlanPersisted(parts) => {
                self.planner.written(&parts);
                self.planned = Planned::ToPublish(parts);
            }
            Event::PlanNotPersisted => self.planner.not_written(),
            Event::Persisted(table) => {
                invariants::monotone(self.persisted.generation, table.generation)
                    .expect("the store is written by this hub alone, and this hub counts upwards");
                self.rollout.persisted(&self.persisted, &table);
                self.persisted = table;
                self.to_publish = true;
                self.writing = Writing::Nothing;
            }
            Event::NotPersisted => self.writing = Writing::Again { at: now + PERSIST_RETRY },
        }
    }

    /// What is to be done next, if anything.
    pub fn poll(&mut self) -> Option<Command> {
        if std::mem::take(&mut self.to_publish) {
            return Some(Command::Publish(self.persisted.clone()));
        }
        self.next_table().or_else(|| self.next_of_the_plan())
    }

    fn next_table(&mut self) -> Option<Command> {
        match self.writing {
            Writing::UnderWay | Writing::Again { .. } => None,
            Writing::Nothing => {
                let next = following(&self.persisted, self.epoch);
                let doubt = self.registry.holds();
                let (rollout, last) = (&self.rollout, &self.persisted);
                let reports = self.registry.reports();
                let (deployments, revisions) =
                    revisions::stage(&self.deployments, &self.orders, last, &reports, doubt);
                let mut staged = rollout.stage(&deployments, last, next, doubt);
                staged.revisions = revisions;
                let tenants = self.tenants.as_ref();
                staged.tenants = tenants.map(|tenants| rollout.stage_tenants(tenants, last, next, doubt));
                let routes = self.registry.routes();
                let next = publish(&self.persisted, self.epoch, routes, staged, &self.drains)?;
                self.writing = Writing::UnderWay;
                Some(Command::Persist(next))
            }
        }
    }

    fn next_of_the_plan(&mut self) -> Option<Command> {
        match std::mem::replace(&mut self.planned, Planned::Nothing) {
            Planned::ToPersist(parts) => return Some(Command::PersistPlan(parts)),
            Planned::ToPublish(parts) => return Some(Command::PublishPlan(parts)),
            Planned::Nothing => {}
        }
        let Hub { registry, persisted, drains, .. } = self;
        // What is in force, and not what is wanted: of what is to be wider not everybody has heard.
        let around = Around { registry, deployments: &persisted.deployments, drains };
        let (problem, before) = self.planner.begin(&around, self.now)?;
        Some(Command::Plan(Box::new(problem), before))
    }

    /// Whether so many leases ended in one moment that their regions are held, the store being suspected.
    pub fn suspects_the_store(&self) -> bool {
        self.registry.holds()
    }

    /// Classes that could not bear the loss of their largest region, by the last plan, however many replicas were started.
    pub fn short(&self) -> &BTreeSet<Class> {
        self.planner.short()
    }

    /// When [`Hub::handle_timeout`] wants to be called, at the latest.
    pub fn next_wakeup(&self) -> Option<Instant> {
        let again = match self.writing {
            Writing::Again { at } => Some(at),
            Writing::Nothing | Writing::UnderWay => None,
        };
        let settles = self.rollout.next_wakeup(&self.persisted);
        let planned = self.planner.next_due();
        self.registry.next_expiry().into_iter().chain(again).chain(settles).chain(planned).min()
    }

    /// Time has passed.
    pub fn handle_timeout(&mut self, now: Instant) {
        self.now = self.now.max(now);
        self.registry.expire(now);
        self.rollout.tick(now);
        if let Writing::Again { at } = self.writing
            && at <= now
        {
            self.writing = Writing::Nothing;
        }
    }
}

/// Which regions a gateway hears, by its own word.
fn heard(demand: &GatewayDemand) -> (GatewayBoot, Option<BTreeSet<RegionId>>) {
    (demand.gateway.clone(), demand.reaches.clone())
}

#[cfg(test)]
mod tests;
