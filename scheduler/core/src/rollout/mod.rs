//! From what an operator wants to what is published: what is narrower at once, what is wider when everybody knows.
//!
//! Two sorts of processes hold the residency policy of a deployment, and each runs the newest table that it has heard of. A gateway
//! *sends* a request to the regions that its table permits, and a spoke *takes* what its own permits. They hear of a
//! change one after another, so for a while there are two policies at once; what must not be is that one is sent what another
//! has not heard of being permitted.
//!
//! ```text
//!  wanted      eu ──────────── eu,us                        what an operator has applied
//!  sent        eu ──────────── eu ──────────── eu,us        the residency in the table
//!  taken       eu ──────────── eu,us ───────── eu,us        the same, or what the table says it will be
//!              table 7         table 8   (all have 8)   table 9
//! ```
//!
//! So a wider residency is first *announced*: the table goes on saying the narrower one, and beside it what is to come
//! ([`regions::Widening`]). Whoever runs a table with the announcement takes the wider and sends the narrower. The next
//! table says the wider one when every [`Reader`] has acknowledged one with the announcement. A narrower residency has
//! nothing to wait for and is in the next table; one that is both (`eu` to `us`) is for the time being what both permit,
//! which may be nothing.
//!
//! A reader that ends in order takes its leave, and one that has not been heard of for [`READER_KEEP`] is not waited for
//! either: it may be switched off, and one process that nobody remembers would hold every later change. The residency policy permits that, because such a reader does *less* than it may: as a
//! gateway it sends to the narrower residency, as a spoke it refuses at its door what others send it under the wider one,
//! and that goes elsewhere. It never does more, since a table that permits less waits for nobody. For the same reason
//! nothing is widened while a hub's term is younger than [`SETTLE`]: who could not reach a hub may not have come back yet.
//!
//! Everything else follows from the last table and the acknowledgements: the announcement and its generation are *in* the
//! table, so a hub that takes over goes on where the last one was.

pub mod candidate;
pub mod diff;
mod reader;
mod tenants;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use regions::residency::MAX_POLICY_LEN;
use regions::tenant::MAX_RESIDENCY_LEN;
use regions::{
    Area, Catalogue, Deployment, DeploymentName, Generation, ResidencyPolicy, RouteTable, ServedRevision,
    TenantId, TenantRules, Widening,
};

use crate::invariants;
use crate::revisions::Orders;
pub use reader::{Reader, ReaderError, Role};

/// How long a reader is waited for that is not heard of. A gateway asks for the next table every 20 s at least, and
/// whoever lives has tried thrice by then.
pub const READER_KEEP: Duration = Duration::from_secs(60);
/// How long nothing is widened when a hub's term begins. While no hub answers, gateways ask twice a second and spokes every
/// few seconds: whoever lives has come forward by then.
pub const SETTLE: Duration = Duration::from_secs(15);

/// Longest residency of a deployment in a table, in bytes, while it is on its way from one to another: what the longest of a
/// tenant, joined to it with ` & `, leaves of a policy.
const DEPLOYMENT_LEN_MAX: usize = MAX_POLICY_LEN - MAX_RESIDENCY_LEN - 3;
/// Deployments that were taken away and whose residency is remembered, until everybody has heard of it.
const REMOVED_MAX: usize = 10_000;

/// What the store says that there shall be.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wanted {
    /// An operator has applied it. Otherwise it is what a hub's own file says, and that may say something else at the
    /// hub's next start.
    pub applied: bool,
    /// The deployments.
    pub deployments: BTreeMap<DeploymentName, Deployment>,
    /// What is said about changes of their models.
    pub orders: Orders,
}

impl Wanted {
    /// What is said about changes of models once these deployments are applied. With `hold` every model that changes
    /// waits for a promotion. Without it a model that changes does not wait, and
    /// one that waits already goes on waiting.
    pub fn orders_after(&self, deployments: &BTreeMap<DeploymentName, Deployment>, hold: bool) -> Orders {
        let changes = |name: &DeploymentName| {
            let (before, after) = (self.deployments.get(name), deployments.get(name));
            before.zip(after).is_some_and(|(before, after)| before.model_spec() != after.model_spec())
        };
        let is_held =
            |name: &&DeploymentName| if changes(name) { hold } else { self.orders.held.contains(*name) };
        let held = deployments.keys().filter(is_held).cloned().collect();
        // What was promoted once says nothing of the next time.
        let stays = |name: &DeploymentName| deployments.contains_key(name) && !changes(name);
        let promoted = self.orders.promoted.iter().filter(|(name, _)| stays(name));
        Orders { held, promoted: promoted.map(|(name, revision)| (name.clone(), *revision)).collect() }
    }
}

/// What is known of who runs which table.
#[derive(Debug)]
pub struct Rollout {
    catalogue: Arc<Catalogue>,
    readers: BTreeMap<Reader, Generation>,
    /// From then on everybody who lives has come forward.
    settles_at: Instant,
    settled: bool,
    /// Deployments that no table has any longer and that some reader may still have: one that comes back under its name
    /// is no new one to that reader.
    removed: BTreeMap<DeploymentName, Removed>,
}

#[derive(Debug)]
struct Removed {
    residency: ResidencyPolicy,
    /// The first table without it.
    since: Generation,
}

/// What the next table says of the deployments.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Staged<'a> {
    /// With the residency under which they are sent.
    pub deployments: Cow<'a, BTreeMap<DeploymentName, Deployment>>,
    /// Those whose residency will be wider.
    pub widening: BTreeMap<DeploymentName, Widening>,
    /// The model revisions that they are served with.
    pub revisions: BTreeMap<DeploymentName, ServedRevision>,
    /// Who may come in, where an operator has said so.
    pub tenants: Option<StagedTenants<'a>>,
}

/// What the next table says of the tenants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StagedTenants<'a> {
    /// With the residency under which their requests are sent.
    pub all: Cow<'a, BTreeMap<TenantId, TenantRules>>,
    /// Those whose residency will be wider.
    pub widening: BTreeMap<TenantId, Widening>,
}

impl Rollout {
    /// Begins with nobody known; for the time `settle` nothing is widened.
    pub fn new(catalogue: Arc<Catalogue>, settle: Duration, now: Instant) -> Rollout {
        let (readers, removed) = (BTreeMap::new(), BTreeMap::new());
        Rollout { catalogue, readers, settles_at: now + settle, settled: settle.is_zero(), removed }
    }

    /// This reader runs the table of this generation.
    pub fn acknowledged(&mut self, reader: Reader, generation: Generation) {
        self.readers.insert(reader, generation);
    }

    /// This reader has not been heard of for too long.
    pub fn gone(&mut self, reader: &Reader) {
        self.readers.remove(reader);
    }

    /// These are all the readers there are.
    pub fn replace(&mut self, readers: BTreeMap<Reader, Generation>) {
        self.readers = readers;
    }

    /// Time has passed.
    pub fn tick(&mut self, now: Instant) {
        self.settled |= self.settles_at <= now;
    }

    /// When [`Rollout::tick`] wants to be called, if anything waits for it.
    pub fn next_wakeup(&self, last: &RouteTable) -> Option<Instant> {
        let announced = last.tenants.as_ref().is_some_and(|tenants| !tenants.widening.is_empty());
        (!self.settled && (announced || !last.widening.is_empty())).then_some(self.settles_at)
    }

    /// The store holds `now`, and held `before`.
    pub fn persisted(&mut self, before: &RouteTable, now: &RouteTable) {
        for (name, deployment) in &before.deployments {
            if !now.deployments.contains_key(name) && self.removed.len() < REMOVED_MAX {
                let residency = deployment.residency.clone();
                self.removed.insert(name.clone(), Removed { residency, since: now.generation });
            }
        }
        let heard = |since| self.readers.values().all(|running| *running >= since);
        let settled = self.settled;
        self.removed
            .retain(|name, removed| !(now.deployments.contains_key(name) || settled && heard(removed.since)));
    }

    /// What the table of generation `next` says of the deployments, which follows `last`, where `wanted` is what an operator
    /// wants. In `doubt` of who lives nothing is widened. What it says of tenants is [`Rollout::stage_tenants`], and of
    /// model revisions [`crate::revisions::stage`].
    ///
    /// # Panics
    ///
    /// When it would let requests be sent to where a reader of `last` does not take them.
    pub fn stage<'a>(
        &self,
        wanted: &'a BTreeMap<DeploymentName, Deployment>,
        last: &RouteTable,
        next: Generation,
        doubt: bool,
    ) -> Staged<'a> {
        let deployments = Cow::Borrowed(wanted);
        let (widening, revisions) = (BTreeMap::new(), BTreeMap::new());
        let mut staged = Staged { deployments, widening, revisions, tenants: None };
        for (name, deployment) in wanted {
            let known = last.deployments.get(name).map(|known| &known.residency);
            let Some(known) = known.or_else(|| self.removed.get(name).map(|removed| &removed.residency))
            else {
                continue;
            };
            let announced = last.widening.get(name);
            let Some((residency, widening)) =
                self.meanwhile(known, &deployment.residency, announced, DEPLOYMENT_LEN_MAX, (next, doubt))
            else {
                continue;
            };
            staged.widening.insert(name.clone(), widening);
            let meanwhile = Deployment { residency, ..deployment.clone() };
            staged.deployments.to_mut().insert(name.clone(), meanwhile);
        }
        self.assert_heard(&staged, last);
        staged
    }

    /// What a residency that is to become `wanted` is in the table `next`, and what that table announces; nothing where it
    /// may say `wanted` itself. What it says has at most `len_max` bytes. Those who run the table before it know `known` and what was `announced` in it.
    fn meanwhile(
        &self,
        known: &ResidencyPolicy,
        wanted: &ResidencyPolicy,
        announced: Option<&Widening>,
        len_max: usize,
        (next, doubt): (Generation, bool),
    ) -> Option<(ResidencyPolicy, Widening)> {
        if known == wanted || !self.wider(known, wanted) {
            return None;
        }
        let announced = announced.filter(|widening| widening.to == *wanted);
        if announced.is_some_and(|announced| !doubt && self.everybody_runs(announced.since)) {
            return None;
        }
        let since = announced.map_or(next, |announced| announced.since);
        Some((self.both(known, wanted, len_max), Widening { to: wanted.clone(), since }))
    }

    /// **Heard before widened**: what is to be sent now is taken by whoever runs the table before.
    fn assert_heard(&self, staged: &Staged<'_>, last: &RouteTable) {
        for (name, deployment) in &*staged.deployments {
            let known =
                last.deployments.get(name).is_some_and(|known| known.residency != deployment.residency);
            if known && let Some(taken) = taken(last, name) {
                let sent = deployment.residency.permitted(&self.catalogue);
                invariants::heard(sent, taken.permitted(&self.catalogue))
                    .expect("what is wider than the last table was announced in it");
            }
        }
    }

    fn wider(&self, known: &ResidencyPolicy, wanted: &ResidencyPolicy) -> bool {
        !wanted.permitted(&self.catalogue).is_subset(&known.permitted(&self.catalogue))
    }

    fn everybody_runs(&self, since: Generation) -> bool {
        self.settled && self.readers.values().all(|running| *running >= since)
    }

    /// A policy that permits nothing that one of these does not permit: both at once, in words that fit.
    fn both(&self, known: &ResidencyPolicy, wanted: &ResidencyPolicy, len_max: usize) -> ResidencyPolicy {
        let within = known.permitted(&self.catalogue);
        if within.is_subset(&wanted.permitted(&self.catalogue)) && known.to_string().len() <= len_max {
            return known.clone();
        }
        let both = known.narrow(wanted);
        if both.to_string().len() <= len_max {
            return both;
        }
        // Change upon change has piled up. Single regions, as many as fit, permit no more.
        let both = both.permitted(&self.catalogue);
        let (mut bytes, mut areas) = (0, Vec::new());
        for index in both.iter() {
            let region = &self.catalogue.region(index).id;
            bytes += region.as_str().len() + 1;
            if bytes <= len_max {
                areas.push(Area::Region(region.clone()));
            }
        }
        ResidencyPolicy::any_of(areas).unwrap_or_else(|_| self.nothing(known))
    }

    /// A policy that permits nothing: two regions at once, of which `known` permits one. What permits nothing already
    /// stays as it is.
    fn nothing(&self, known: &ResidencyPolicy) -> ResidencyPolicy {
        let mut all = self.catalogue.iter().map(|(_, region)| Area::Region(region.id.clone()));
        let only = |area: Option<Area>| area.and_then(|area| ResidencyPolicy::any_of([area]).ok());
        match (only(all.next()), only(all.last())) {
            (Some(first), Some(last)) => first.narrow(&last),
            (_, None) | (None, _) => known.clone(),
        }
    }
}

/// What a reader of `table` takes: what it permits, and what it says it will.
pub fn taken<'a>(table: &'a RouteTable, name: &DeploymentName) -> Option<&'a ResidencyPolicy> {
    let sent = &table.deployments.get(name)?.residency;
    Some(table.widening.get(name).map_or(sent, |widening| &widening.to))
}

#[cfg(test)]
mod tests;
