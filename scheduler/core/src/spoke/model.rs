//! Model revision that a region serves each deployment with, and the replicas that run it.
//!
//! The newest route table pins the revisions ([`crate::revisions`]). When the region accepts a table, all of its
//! traffic switches to the pinned revisions at once. A deployment that is not pinned yet is not served: the hub pins
//! the first revision that a replica reports, and before that two regions could disagree.
//!
//! A region without a table, because it was started while no hub was reachable, uses the revision that the gateway's
//! table pins and that comes with the request. For its reports it chooses the revision of its first ready replica, and
//! keeps it as long as a ready replica runs it.
//!
//! A replica that reports another revision than the pinned one gets no requests. It is a *mismatch*, unless it runs the
//! next revision of the table. A replica that reports no revision is used only where nothing is pinned.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use regions::{
    DeploymentName, HostPort, ModelMatch, ModelRevision, NextRevision, ReportedModel, RouteTable,
    ServedRevision,
};

use super::Spoke;
use super::replica::ReplicaState;
use scheduler_api::revision::{ReplicaRevisions, RevisionReplicas};

/// Requirements of a request on the model revision of its response.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RequestedRevision {
    /// Required revision: other parts of the response have it.
    pub required: Option<ModelRevision>,
    /// Revision that the gateway's route table pins.
    pub known: Option<ModelRevision>,
}

/// Replica that runs another model revision than the served one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RevisionMismatch {
    /// Number of the replica.
    pub replica: usize,
    /// Address of the replica.
    pub endpoint: HostPort,
    /// Deployment that it serves.
    pub deployment: DeploymentName,
    /// Served revision of the deployment.
    pub expected: ModelRevision,
    /// Model that the replica reports; `None` if it reports none.
    pub found: Option<ReportedModel>,
}

/// Number of deployments whose mismatches are counted for each of them. Without a route table replicas name the deployments, so the
/// number of names has no other limit.
pub const MISMATCHED_DEPLOYMENTS_MAX: usize = 200;

/// Numbers of the replicas that run another model revision than the served one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MismatchCounts {
    /// For each deployment, at most [`MISMATCHED_DEPLOYMENTS_MAX`], those now and all ever observed.
    pub by_deployment: BTreeMap<DeploymentName, (u64, u64)>,
    /// The same numbers of all other deployments.
    pub others: (u64, u64),
}

/// Served and observed revisions.
#[derive(Debug, Default)]
pub(super) struct ServedModels {
    /// Revisions of the newest table; `None` without one, or with one of a hub without support for revisions.
    table: Option<BTreeMap<DeploymentName, ServedRevision>>,
    /// Deployments of the newest table.
    deployments: BTreeSet<DeploymentName>,
    /// Revisions chosen locally, without a table.
    chosen: BTreeMap<DeploymentName, ModelRevision>,
    /// Current mismatches, with the reported revision.
    mismatched: BTreeMap<(usize, DeploymentName), Option<ModelRevision>>,
    /// Total number of mismatches observed, of at most [`MISMATCHED_DEPLOYMENTS_MAX`] deployments.
    observed: BTreeMap<DeploymentName, u64>,
    /// That of all other deployments.
    observed_others: u64,
}

impl ServedModels {
    pub(super) fn apply_route_table(&mut self, table: &RouteTable) {
        self.table.clone_from(&table.revisions);
        self.deployments = table.deployments.keys().cloned().collect();
        if self.table.is_some() {
            self.chosen.clear();
        }
    }

    /// Returns the revision that a deployment is served with.
    fn pinned(&self, deployment: &DeploymentName) -> Option<ModelRevision> {
        match &self.table {
            Some(table) => table.get(deployment).map(|served| served.current),
            None => self.chosen.get(deployment).copied(),
        }
    }

    /// Returns the revision that is to replace it.
    fn next(&self, deployment: &DeploymentName) -> Option<&NextRevision> {
        self.table.as_ref()?.get(deployment)?.next.as_ref()
    }

    pub(super) fn forget(&mut self, replica: usize) {
        self.mismatched.retain(|(number, _), _| *number != replica);
    }
}

/// Returns whether a replica runs the revision `pinned`; with `None`, whether it reports no model.
fn has(replica: &ReplicaState, pinned: Option<ModelRevision>) -> bool {
    replica.model().map(|model| model.revision) == pinned
}

impl Spoke {
    /// Returns the revision that a deployment is served with in this region.
    pub fn revision(&self, deployment: &DeploymentName) -> Option<ModelRevision> {
        self.models.pinned(deployment)
    }

    /// Returns the revision that the response to a request must have.
    pub(super) fn revision_for(
        &self,
        deployment: &DeploymentName,
        requested: RequestedRevision,
    ) -> Option<ModelRevision> {
        // A revision chosen locally does not override the one that a gateway's table pins.
        let by_table = self.models.table.as_ref().and_then(|table| table.get(deployment));
        let by_table = by_table.map(|served| served.current);
        requested.required.or(by_table).or(requested.known).or_else(|| self.revision(deployment))
    }

    /// Returns whether a replica runs the served revision of the deployment.
    pub(super) fn matches(&self, replica: &ReplicaState, deployment: &DeploymentName) -> bool {
        has(replica, self.revision(deployment))
    }

    /// Returns the ready replicas that serve `deployment` with the revision `pinned`.
    pub(super) fn serving_revision<'a>(
        &'a self,
        deployment: &'a DeploymentName,
        pinned: Option<ModelRevision>,
        now: Instant,
    ) -> impl Iterator<Item = (usize, &'a ReplicaState)> {
        self.accepting(deployment, now).filter(move |(_, replica)| has(replica, pinned))
    }

    /// Returns whether the replica of this number runs the served revision of the deployment; false for an unknown
    /// number. Without a table it is true for all replicas: then a new replica takes over when the last old one is
    /// gone.
    pub fn replica_matches(&self, number: usize, deployment: &DeploymentName) -> bool {
        let without_a_table = self.models.table.is_none();
        let matches = |replica| without_a_table || self.matches(replica, deployment);
        self.replicas.get(number).is_some_and(matches)
    }

    /// Chooses revisions while there is no table: keeps a choice as long as a ready replica runs it.
    pub(super) fn update_chosen_revisions(&mut self) {
        if self.models.table.is_some() {
            return;
        }
        let mut chosen = BTreeMap::new();
        for (_, replica) in self.replicas.each().filter(|(_, replica)| replica.accepts_requests()) {
            let Some(model) = replica.model() else { continue };
            for name in replica.names() {
                let kept = self.models.chosen.get(name) == Some(&model.revision);
                if kept || !chosen.contains_key(name) {
                    chosen.insert(name.clone(), model.revision);
                }
            }
        }
        self.models.chosen = chosen;
    }

    /// Records the mismatches of a replica, and returns the new ones.
    pub(super) fn record_mismatches(&mut self, number: usize) -> Vec<RevisionMismatch> {
        let Some(replica) = self.replicas.get(number) else { return Vec::new() };
        let mut found = Vec::new();
        for name in replica.names() {
            let Some(expected) = self.models.pinned(name).filter(|_| !self.matches(replica, name)) else {
                continue;
            };
            let model = replica.model();
            if model.is_some_and(|model| self.models.next(name).is_some_and(|next| is_next(model, next))) {
                continue;
            }
            found.push(RevisionMismatch {
                replica: number,
                endpoint: replica.endpoint().clone(),
                deployment: name.clone(),
                expected,
                found: model.cloned(),
            });
        }
        let ServedModels { mismatched, observed, observed_others, .. } = &mut self.models;
        let before: BTreeMap<_, _> = mismatched.extract_if(.., |(other, _), _| *other == number).collect();
        found.retain(|mismatch| {
            let key = (number, mismatch.deployment.clone());
            let revision = mismatch.found.as_ref().map(|model| model.revision);
            let is_new = before.get(&key) != Some(&revision);
            if is_new {
                let has_slot = observed.len() < MISMATCHED_DEPLOYMENTS_MAX;
                match observed.entry(mismatch.deployment.clone()) {
                    Entry::Occupied(mut count) => *count.get_mut() += 1,
                    Entry::Vacant(free) if has_slot => *free.insert(0) += 1,
                    Entry::Vacant(_) => *observed_others += 1,
                }
            }
            mismatched.insert(key, revision);
            is_new
        });
        found
    }

    /// Returns the numbers of mismatches by deployment.
    pub fn mismatches(&self) -> MismatchCounts {
        let ServedModels { mismatched, observed, observed_others, .. } = &self.models;
        let by_deployment = observed.iter().map(|(name, observed)| (name.clone(), (0, *observed))).collect();
        let mut counts = MismatchCounts { by_deployment, others: (0, *observed_others) };
        for (_, name) in mismatched.keys() {
            counts.by_deployment.get_mut(name).unwrap_or(&mut counts.others).0 += 1;
        }
        counts
    }

    /// Returns whether the newest route table has the deployment, or this spoke scales it. Other names in [`Spoke::loads`] are those
    /// that only replicas report.
    pub fn is_configured(&self, deployment: &DeploymentName) -> bool {
        self.models.deployments.contains(deployment) || self.scaling_status().contains_key(deployment)
    }

    /// Returns the models of the replicas of each deployment. Draining replicas and those that report no model are
    /// omitted.
    pub fn models(&self, now: Instant) -> BTreeMap<DeploymentName, ReplicaRevisions> {
        let all_silent = self.all_silent(now);
        let mut each: BTreeMap<DeploymentName, BTreeMap<&ReportedModel, (u32, u32)>> = BTreeMap::new();
        for (_, replica) in self.replicas.each().filter(|(_, replica)| !replica.is_draining()) {
            let Some(model) = replica.model() else { continue };
            let ready = replica.accepts_requests() && (all_silent || replica.is_fresh(now));
            for name in replica.names() {
                let (count, ready_count) = each.entry(name.clone()).or_default().entry(model).or_default();
                *count += 1;
                *ready_count += u32::from(ready);
            }
        }
        let reported = each.into_iter().map(|(name, models)| {
            let target = self.scaling_status().get(&name).map(|status| status.decision.replicas);
            let target = target.or_else(|| self.peers.desired(&name));
            let counted = |(model, (replicas, ready)): (&ReportedModel, (u32, u32))| RevisionReplicas {
                model: model.clone(),
                replicas,
                ready,
            };
            let models = models.into_iter().map(counted).collect();
            (name, ReplicaRevisions { target, models })
        });
        reported.collect()
    }
}

/// Returns whether a replica runs the next revision.
fn is_next(model: &ReportedModel, next: &NextRevision) -> bool {
    match &next.revision {
        Some(revision) => model.revision == *revision,
        // The hub has not received the first report yet.
        None => model.runs(&next.spec, ModelMatch::Engine),
    }
}

#[cfg(test)]
mod tests;
