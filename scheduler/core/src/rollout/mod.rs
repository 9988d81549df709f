//! Rollout of desired deployments and tenants: narrower residency policies at once, wider ones after all readers
//! acknowledged.
//!
//! Two kinds of processes apply the residency policy of a deployment, each with the newest table that it has received.
//! A gateway *sends* a request to the regions that its table allows, and a spoke *accepts* what its own table allows.
//! They receive a change one after another, so for a while two policies coexist. The invariant is that no process sends
//! a request to a region that has not yet received the policy that allows it.
//!
//! ```text
//!  desired     eu ──────────── eu,us                        applied by an operator
//!  sent        eu ──────────── eu ──────────── eu,us        residency in the table
//!  accepted    eu ──────────── eu,us ───────── eu,us        residency in the table, or the announced one
//!              table 7         table 8   (all have 8)   table 9
//! ```
//!
//! A wider residency is therefore first *announced*: the table keeps the narrower one and adds the future one
//! ([`regions::Widening`]). A reader of a table with the announcement accepts the wider one and sends by the narrower
//! one. When every [`Reader`] has acknowledged a table with the announcement, the next table contains the wider
//! residency. A narrower residency does not wait and is in the next table. A change that does both (`eu` to `us`) uses
//! the intersection in the meantime, which may be empty.
//!
//! A reader that shuts down in order deregisters, and a reader that has not been heard of for [`READER_TIMEOUT`] is not
//! waited for: it may be switched off, and one forgotten process would block every later change. This is safe, because
//! such a reader does *less* than it may: a gateway sends by the narrower residency, and a spoke rejects requests that
//! arrive under the wider one, so that their senders fail over. It never does more, since narrowing does not wait. For
//! the same reason nothing is widened during the first [`SETTLE_TIME`] of a hub's term: a reader that could not reach a
//! hub may not have come back yet.
//!
//! All other state is in the last table and the acknowledgements: the announcement and its generation are part of the
//! table, so a new leader continues where the last one stopped.

pub mod apply_files;
pub mod diff;
pub mod runnable;
pub mod status;
mod tenants;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use regions::residency::MAX_POLICY_LEN;
use regions::tenant::{ApiKey, KeyDigest, MAX_RESIDENCY_LEN};
use regions::{
    Area, Catalogue, Deployment, DeploymentName, Generation, ResidencyPolicy, RouteTable, ServedRevision,
    TenantId, TenantRules, Widening,
};

use crate::invariants;
use scheduler_api::reader::Reader;

/// Time after which a silent reader is not waited for. A gateway polls for the next table at least every 20 s, so a
/// running one has tried three times by then.
pub const READER_TIMEOUT: Duration = Duration::from_secs(60);
/// Time after the start of a hub's term in which nothing is widened. While no hub is reachable, gateways poll twice a
/// second and spokes every few seconds, so all running readers have come back by then.
pub const SETTLE_TIME: Duration = Duration::from_secs(15);

/// Maximum length in bytes of a deployment's interim residency in a table: the length that the longest residency of a
/// tenant, joined to it with ` & `, leaves of a policy.
const DEPLOYMENT_LEN_MAX: usize = MAX_POLICY_LEN - MAX_RESIDENCY_LEN - 3;
/// Maximum number of removed deployments whose residency is remembered until all readers have acknowledged the removal.
const REMOVED_MAX: usize = 10_000;

/// Rollout state: the generation that each reader runs.
#[derive(Debug)]
pub struct Rollout {
    catalogue: Arc<Catalogue>,
    readers: BTreeMap<Reader, Generation>,
    /// Time at which all running readers have reported.
    settles_at: Instant,
    settled: bool,
    /// Deployments that are in no table any longer, but that some reader may still have. For such a reader, a
    /// deployment of the same name is not a new one.
    removed: BTreeMap<DeploymentName, Removed>,
}

/// Deployment that was removed from the table.
#[derive(Debug)]
struct Removed {
    residency: ResidencyPolicy,
    /// First table without it.
    since: Generation,
}

/// Content of the next table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Staged<'a> {
    /// Deployments, with the residency under which their requests are sent.
    pub deployments: Cow<'a, BTreeMap<DeploymentName, Deployment>>,
    /// Announced wider residencies of deployments.
    pub widening: BTreeMap<DeploymentName, Widening>,
    /// Model revisions that they are served with.
    pub revisions: BTreeMap<DeploymentName, ServedRevision>,
    /// Tenants, where an operator has applied any.
    pub tenants: Option<StagedTenants<'a>>,
}

/// Tenants of the next table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StagedTenants<'a> {
    /// Tenants, with the residency under which their requests are sent.
    pub all: Cow<'a, BTreeMap<TenantId, TenantRules>>,
    /// Announced wider residencies of tenants.
    pub widening: BTreeMap<TenantId, Widening>,
    /// Keys that operators created.
    pub keys: BTreeMap<KeyDigest, ApiKey>,
}

impl Rollout {
    /// Creates a rollout without known readers. Nothing is widened for the time `settle`.
    pub fn new(catalogue: Arc<Catalogue>, settle: Duration, now: Instant) -> Rollout {
        let (readers, removed) = (BTreeMap::new(), BTreeMap::new());
        Rollout { catalogue, readers, settles_at: now + settle, settled: settle.is_zero(), removed }
    }

    /// Records that this reader runs the table of this generation.
    pub fn acknowledged(&mut self, reader: Reader, generation: Generation) {
        self.readers.insert(reader, generation);
    }

    /// Removes a reader that deregistered or timed out.
    pub fn remove_reader(&mut self, reader: &Reader) {
        self.readers.remove(reader);
    }

    /// Replaces all readers.
    pub fn replace(&mut self, readers: BTreeMap<Reader, Generation>) {
        self.readers = readers;
    }

    /// Processes the passage of time. Returns whether anything has changed.
    pub fn tick(&mut self, now: Instant) -> bool {
        let settles = !self.settled && self.settles_at <= now;
        self.settled |= settles;
        settles
    }

    /// Returns the time at which [`Rollout::tick`] must be called, if an announcement waits for it.
    pub fn next_wakeup(&self, last: &RouteTable) -> Option<Instant> {
        let announced = last.tenants.as_ref().is_some_and(|tenants| !tenants.widening.is_empty());
        (!self.settled && (announced || !last.widening.is_empty())).then_some(self.settles_at)
    }

    /// Records that the store now holds the table `now`, the successor of `before`.
    pub fn persisted(&mut self, before: &RouteTable, now: &RouteTable) {
        for (name, deployment) in &before.deployments {
            if !now.deployments.contains_key(name) && self.removed.len() < REMOVED_MAX {
                let residency = deployment.residency.clone();
                self.removed.insert(name.clone(), Removed { residency, since: now.generation });
            }
        }
        let is_acknowledged = |since| self.readers.values().all(|running| *running >= since);
        let settled = self.settled;
        self.removed.retain(|name, removed| {
            !(now.deployments.contains_key(name) || settled && is_acknowledged(removed.since))
        });
    }

    /// Returns the deployments of the table of generation `next`, which follows `last`. While the set of readers is
    /// `in_doubt`, nothing is widened. Tenants are staged by [`Rollout::stage_tenants`], model revisions by
    /// [`crate::revisions::stage`].
    ///
    /// # Panics
    ///
    /// Panics if requests would be sent to a region that does not accept them under `last`.
    pub fn stage<'a>(
        &self,
        desired: &'a BTreeMap<DeploymentName, Deployment>,
        last: &RouteTable,
        next: Generation,
        in_doubt: bool,
    ) -> Staged<'a> {
        let deployments = Cow::Borrowed(desired);
        let (widening, revisions) = (BTreeMap::new(), BTreeMap::new());
        let mut staged = Staged { deployments, widening, revisions, tenants: None };
        for (name, deployment) in desired {
            let known = last.deployments.get(name).map(|known| &known.residency);
            let Some(known) = known.or_else(|| self.removed.get(name).map(|removed| &removed.residency))
            else {
                continue;
            };
            let announced = last.widening.get(name);
            let Some((residency, widening)) = self.interim_residency(
                known,
                &deployment.residency,
                announced,
                DEPLOYMENT_LEN_MAX,
                (next, in_doubt),
            ) else {
                continue;
            };
            staged.widening.insert(name.clone(), widening);
            let interim = Deployment { residency, ..deployment.clone() };
            staged.deployments.to_mut().insert(name.clone(), interim);
        }
        self.assert_acknowledged(&staged, last);
        staged
    }

    /// Returns the interim residency and the announcement in the table `next` for a residency that is to become
    /// `desired`; `None` if that table may contain `desired` itself. The interim residency has at most `len_max` bytes.
    /// Readers of the preceding table know `known` and the announcement `announced`.
    fn interim_residency(
        &self,
        known: &ResidencyPolicy,
        desired: &ResidencyPolicy,
        announced: Option<&Widening>,
        len_max: usize,
        (next, in_doubt): (Generation, bool),
    ) -> Option<(ResidencyPolicy, Widening)> {
        if known == desired || !self.widens(known, desired) {
            return None;
        }
        let announced = announced.filter(|widening| widening.to == *desired);
        if announced.is_some_and(|announced| !in_doubt && self.all_readers_run(announced.since)) {
            return None;
        }
        let since = announced.map_or(next, |announced| announced.since);
        Some((self.intersection(known, desired, len_max), Widening { to: desired.clone(), since }))
    }

    /// **Acknowledged before widened**: readers of the previous table accept what the new table sends.
    fn assert_acknowledged(&self, staged: &Staged<'_>, last: &RouteTable) {
        for (name, deployment) in &*staged.deployments {
            let known =
                last.deployments.get(name).is_some_and(|known| known.residency != deployment.residency);
            if known && let Some(accepted) = accepted_residency(last, name) {
                let sent = deployment.residency.permitted(&self.catalogue);
                invariants::acknowledged_before_widened(sent, accepted.permitted(&self.catalogue))
                    .expect("a wider residency was announced in the last table");
            }
        }
    }

    fn widens(&self, known: &ResidencyPolicy, desired: &ResidencyPolicy) -> bool {
        !desired.permitted(&self.catalogue).is_subset(&known.permitted(&self.catalogue))
    }

    fn all_readers_run(&self, since: Generation) -> bool {
        self.settled && self.readers.values().all(|running| *running >= since)
    }

    /// Returns a policy that allows at most what both policies allow, with a bounded length.
    fn intersection(
        &self,
        known: &ResidencyPolicy,
        desired: &ResidencyPolicy,
        len_max: usize,
    ) -> ResidencyPolicy {
        let within = known.permitted(&self.catalogue);
        if within.is_subset(&desired.permitted(&self.catalogue)) && known.to_string().len() <= len_max {
            return known.clone();
        }
        let both = known.narrow(desired);
        if both.to_string().len() <= len_max {
            return both;
        }
        // After repeated changes the policy is too long. A list of single regions, as many as fit, never allows more.
        let regions = both.permitted(&self.catalogue);
        let (mut bytes, mut areas) = (0, Vec::new());
        for index in regions.iter() {
            let region = &self.catalogue.region(index).id;
            bytes += region.as_str().len() + 1;
            if bytes <= len_max {
                areas.push(Area::Region(region.clone()));
            }
        }
        ResidencyPolicy::any_of(areas).unwrap_or_else(|_| self.empty_policy(known))
    }

    /// Returns a policy that allows nothing: the intersection of two regions, of which `known` allows at most one. A
    /// policy that already allows nothing stays.
    fn empty_policy(&self, known: &ResidencyPolicy) -> ResidencyPolicy {
        let mut all = self.catalogue.iter().map(|(_, region)| Area::Region(region.id.clone()));
        let only = |area: Option<Area>| area.and_then(|area| ResidencyPolicy::any_of([area]).ok());
        match (only(all.next()), only(all.last())) {
            (Some(first), Some(last)) => first.narrow(&last),
            (_, None) | (None, _) => known.clone(),
        }
    }
}

/// Returns the residency that a reader of `table` accepts: the announced one, or else the current one.
pub fn accepted_residency<'a>(table: &'a RouteTable, name: &DeploymentName) -> Option<&'a ResidencyPolicy> {
    let sent = &table.deployments.get(name)?.residency;
    Some(table.widening.get(name).map_or(sent, |widening| &widening.to))
}

#[cfg(test)]
mod tests;
