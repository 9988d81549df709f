//! Which model revision a region serves each deployment with, and which of its replicas have it.
//!
//! The newest route table says so ([`crate::revisions`]). In the moment in which it is taken, all traffic of the region
//! switches to the revision that it pins. A deployment that the table does not pin yet has no replica that serves: the hub
//! pins the revision of the first that reports one, and until then two regions could disagree.
//!
//! A region that has no table, because it was started while no hub answers, goes by the revision that a gateway's table pins
//! and that comes with the request. For its reports it takes the revision of its first ready replica, and keeps it for as
//! long as one of these is ready.
//!
//! A replica that reports another revision than the pinned one gets no requests. It is a *mismatch*, unless it runs what the
//! table says is to be served next. A replica that reports none is routed to only where nothing is pinned.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Instant;

use regions::{
    DeploymentName, ModelMatch, ModelRevision, NextRevision, ReportedModel, RouteTable, ServedRevision,
};

use super::Spoke;
use super::replica::Replica;
use crate::revisions::{Counted, Reported};

/// Model revision that a request asks for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RevisionAsked {
    /// Only this one will do: other parts of the answer are of it.
    pub required: Option<ModelRevision>,
    /// The one that the route table of its gateway pins.
    pub known: Option<ModelRevision>,
}

/// A replica that has another model than its deployment is served with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mismatch {
    /// The replica's number.
    pub replica: usize,
    /// Where it is reached.
    pub endpoint: SocketAddr,
    /// The deployment that it answers to.
    pub deployment: DeploymentName,
    /// The revision that the deployment is served with.
    pub expected: ModelRevision,
    /// Model that the replica reports; `None` if it reports none.
    pub found: Option<ReportedModel>,
}

/// Known revisions.
#[derive(Debug, Default)]
pub(super) struct Models {
    /// By the newest table; `None` without one, or with one of a hub that does not know of revisions.
    table: Option<BTreeMap<DeploymentName, ServedRevision>>,
    /// Chosen here, while there is no table.
    chosen: BTreeMap<DeploymentName, ModelRevision>,
    /// Replicas that do not match, with what they were seen to run.
    mismatched: BTreeMap<(usize, DeploymentName), Option<ModelRevision>>,
    /// Mismatches that were seen, over all time.
    seen: BTreeMap<DeploymentName, u64>,
}

impl Models {
    pub(super) fn heed(&mut self, table: &RouteTable) {
        self.table.clone_from(&table.revisions);
        if self.table.is_some() {
            self.chosen.clear();
        }
    }

    /// The revision that a deployment is served with.
    fn pinned(&self, deployment: &DeploymentName) -> Option<ModelRevision> {
        match &self.table {
            Some(table) => table.get(deployment).map(|served| served.current),
            None => self.chosen.get(deployment).copied(),
        }
    }

    /// Revision that replaces it.
    fn next(&self, deployment: &DeploymentName) -> Option<&NextRevision> {
        self.table.as_ref()?.get(deployment)?.next.as_ref()
    }

    pub(super) fn forget(&mut self, replica: usize) {
        self.mismatched.retain(|(number, _), _| *number != replica);
    }
}

/// Whether a replica has the revision `pinned`; where none is, only one that does not report its model does.
fn has(replica: &Replica, pinned: Option<ModelRevision>) -> bool {
    replica.model().map(|model| model.revision) == pinned
}

impl Spoke {
    /// The revision that a deployment is served with here.
    pub fn revision(&self, deployment: &DeploymentName) -> Option<ModelRevision> {
        self.models.pinned(deployment)
    }

    /// The revision that the answer to a request must be of.
    pub(super) fn revision_for(
        &self,
        deployment: &DeploymentName,
        asked: RevisionAsked,
    ) -> Option<ModelRevision> {
        // What was chosen here for want of a table is no reason against what a gateway's table says.
        let by_table = self.models.table.as_ref().and_then(|table| table.get(deployment));
        let by_table = by_table.map(|served| served.current);
        asked.required.or(by_table).or(asked.known).or_else(|| self.revision(deployment))
    }

    /// Whether a replica has the model that the deployment is served with.
    pub(super) fn matches(&self, replica: &Replica, deployment: &DeploymentName) -> bool {
        has(replica, self.revision(deployment))
    }

    /// The replicas that take work for `deployment` and have the revision `pinned`.
    pub(super) fn serving_revision<'a>(
        &'a self,
        deployment: &'a DeploymentName,
        pinned: Option<ModelRevision>,
        now: Instant,
    ) -> impl Iterator<Item = (usize, &'a Replica)> {
        self.taking(deployment, now).filter(move |(_, replica)| has(replica, pinned))
    }

    /// Whether the replica of this number has the model that the deployment is served with; one that is not known has not.
    /// Without a table nobody knows, and each has: then a new replica takes over when the last old one is gone.
    pub fn replica_matches(&self, number: usize, deployment: &DeploymentName) -> bool {
        let without_a_table = self.models.table.is_none();
        let matches = |replica| without_a_table || self.matches(replica, deployment);
        self.replicas.get(number).is_some_and(matches)
    }

    /// Goes on without a table: chooses where nothing is chosen, or where no ready replica has the choice any longer.
    pub(super) fn choose_revisions(&mut self) {
        if self.models.table.is_some() {
            return;
        }
        let mut chosen = BTreeMap::new();
        for (_, replica) in self.replicas.each().filter(|(_, replica)| replica.takes_work()) {
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

    /// Notes whether a replica has the models that its deployments are served with, and returns where it has begun not to.
    pub(super) fn note_mismatches(&mut self, number: usize) -> Vec<Mismatch> {
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
            found.push(Mismatch {
                replica: number,
                endpoint: replica.endpoint(),
                deployment: name.clone(),
                expected,
                found: model.cloned(),
            });
        }
        let Models { mismatched, seen, .. } = &mut self.models;
        let before: BTreeMap<_, _> = mismatched.extract_if(.., |(other, _), _| *other == number).collect();
        found.retain(|mismatch| {
            let key = (number, mismatch.deployment.clone());
            let revision = mismatch.found.as_ref().map(|model| model.revision);
            let is_new = before.get(&key) != Some(&revision);
            if is_new {
                *seen.entry(mismatch.deployment.clone()).or_default() += 1;
            }
            mismatched.insert(key, revision);
            is_new
        });
        found
    }

    /// For each deployment with mismatches: how many replicas do not match now, and how many were ever seen.
    pub fn mismatches(&self) -> BTreeMap<DeploymentName, (u64, u64)> {
        let mut each: BTreeMap<_, _> =
            self.models.seen.iter().map(|(name, seen)| (name.clone(), (0, *seen))).collect();
        for (_, name) in self.models.mismatched.keys() {
            each.entry(name.clone()).or_default().0 += 1;
        }
        each
    }

    /// What the replicas of each deployment run; those that were let go, and those that do not report it, are left out.
    pub fn models(&self, now: Instant) -> BTreeMap<DeploymentName, Reported> {
        let deaf = self.is_deaf(now);
        let mut each: BTreeMap<DeploymentName, BTreeMap<&ReportedModel, (u32, u32)>> = BTreeMap::new();
        for (_, replica) in self.replicas.each().filter(|(_, replica)| !replica.leaving()) {
            let Some(model) = replica.model() else { continue };
            let ready = replica.takes_work() && (deaf || replica.heard_lately(now));
            for name in replica.names() {
                let (count, of_these) = each.entry(name.clone()).or_default().entry(model).or_default();
                *count += 1;
                *of_these += u32::from(ready);
            }
        }
        let reported = each.into_iter().map(|(name, models)| {
            let target = self.decided().get(&name).map(|decided| decided.wanted.replicas);
            let counted = |(model, (replicas, ready)): (&ReportedModel, (u32, u32))| Counted {
                model: model.clone(),
                replicas,
                ready,
            };
            let models = models.into_iter().map(counted).collect();
            (name, Reported { target, models })
        });
        reported.collect()
    }
}

/// Whether a replica runs what is to be served next.
fn is_next(model: &ReportedModel, next: &NextRevision) -> bool {
    match &next.revision {
        Some(revision) => model.revision == *revision,
        // The hub has not heard of the first one yet.
        None => model.runs(&next.spec, ModelMatch::Engine),
    }
}

#[cfg(test)]
mod tests;
