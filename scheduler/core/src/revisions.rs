//! Model revision that each deployment is served with, and the switch to a new one.
//!
//! The route table pins one [`ModelRevision`] for each deployment, and every region routes to replicas of that revision
//! only ([`crate::spoke`]). A deployment without a pin gets the first revision that a ready replica of its spec
//! reports.
//!
//! A deployment whose spec (model reference, engine, precision) changes is served as before until the new model is
//! ready:
//!
//! ```text
//!  desired  cpu f32 ─────── cpu int8 ───────────────────────────── cpu int8
//!  table    cpu f32         cpu f32, next: cpu int8 (no replica)    cpu int8
//!  pin      9a41…           9a41…, next: 03cd… (ready in 1 of 2)    03cd…
//! ```
//!
//! The table keeps the old spec and names the new one as *next*. Regions, or an operator, start replicas of it beside
//! the old ones. When each region with replicas of the old revision has as many ready ones of the new revision, the
//! next table pins the new revision and contains the new spec. A region whose spoke is gone is waited for as long as it
//! keeps its route. A region switches all of its traffic when it accepts that table. A rollback is the same change in
//! the other direction.
//!
//! A replica of the current spec may report another revision, because the files behind its model reference have
//! changed. It gets no traffic. The table names its revision as held; it replaces the current one when an operator
//! promotes it.

use std::borrow::Cow;
use std::collections::BTreeMap;

use regions::{
    Deployment, DeploymentName, ModelMatch, ModelRevision, ModelSpec, NextRevision, RegionId, ReportedModel,
    RouteTable, ServedRevision,
};
use scheduler_api::deployment::{DesiredDeployments, Promotions};
use scheduler_api::revision::ReplicaRevisions;

/// Returns the orders after `deployments` replace the desired ones. With `hold`, every model that changes waits for a
/// promotion. Without it, a model that changes does not wait, and one that already waits continues to wait.
pub fn promotions_after(
    desired: &DesiredDeployments,
    deployments: &BTreeMap<DeploymentName, Deployment>,
    hold: bool,
) -> Promotions {
    let changes = |name: &DeploymentName| {
        let (before, after) = (desired.deployments.get(name), deployments.get(name));
        before.zip(after).is_some_and(|(before, after)| before.model_spec() != after.model_spec())
    };
    let is_held =
        |name: &&DeploymentName| if changes(name) { hold } else { desired.promotions.held.contains(*name) };
    let held = deployments.keys().filter(is_held).cloned().collect();
    // A promotion applies to one model change only.
    let stays = |name: &DeploymentName| deployments.contains_key(name) && !changes(name);
    let promoted = desired.promotions.promoted.iter().filter(|(name, _)| stays(name));
    Promotions { held, promoted: promoted.map(|(name, revision)| (name.clone(), *revision)).collect() }
}

type Deployments = BTreeMap<DeploymentName, Deployment>;
type Revisions = BTreeMap<DeploymentName, ServedRevision>;
/// Reports of the regions with a spoke.
pub type Reports<'a> = BTreeMap<&'a RegionId, &'a BTreeMap<DeploymentName, ReplicaRevisions>>;

/// Returns the deployments of the table that follows `last`, with the specs that are served for now, and their
/// revisions. No revision replaces another while the set of regions is `in_doubt`.
pub fn stage<'a>(
    desired: &'a Deployments,
    promotions: &Promotions,
    last: &RouteTable,
    reports: &Reports<'_>,
    in_doubt: bool,
) -> (Cow<'a, Deployments>, Revisions) {
    let mut deployments = Cow::Borrowed(desired);
    let mut revisions = Revisions::new();
    for (name, deployment) in desired {
        let reported: Vec<&ReplicaRevisions> =
            reports.values().filter_map(|region| region.get(name)).collect();
        let spec = deployment.model_spec();
        let Some(before) = last.revision(name) else {
            if let Some(current) = preferred(&reported, &spec, |model| model.runs(&spec, ModelMatch::Engine))
            {
                revisions.insert(name.clone(), ServedRevision { current, next: None });
            }
            continue;
        };
        let served = last.deployments.get(name).map_or_else(|| spec.clone(), Deployment::model_spec);
        let has_silent_region = last
            .regions
            .iter()
            .any(|(region, route)| route.deployments.contains(name) && !reports.contains_key(region));
        let change =
            ModelChange { before, served: &served, spec: &spec, reported: &reported, has_silent_region };
        let promoted = promotions.promoted.get(name).copied();
        let next = change.next(promoted, promotions.held.contains(name));
        let ready = next.as_ref().and_then(|next| {
            let revision = next.revision.filter(|_| !next.held && !in_doubt)?;
            change.is_ready(revision).then_some(revision)
        });
        if let Some(current) = ready {
            revisions.insert(name.clone(), ServedRevision { current, next: None });
            continue;
        }
        if served != spec {
            deployments.to_mut().insert(name.clone(), deployment.with_model(&served));
        }
        revisions.insert(name.clone(), ServedRevision { current: before.current, next });
    }
    (deployments, revisions)
}

/// Deployment whose model may change.
struct ModelChange<'a> {
    before: &'a ServedRevision,
    /// Served model.
    served: &'a ModelSpec,
    /// Desired model.
    spec: &'a ModelSpec,
    reported: &'a [&'a ReplicaRevisions],
    /// A region that serves the deployment has no spoke now, so its replicas are unknown.
    has_silent_region: bool,
}

impl ModelChange<'_> {
    /// Returns the revision that replaces the current one, if any.
    fn next(&self, promoted: Option<ModelRevision>, held: bool) -> Option<NextRevision> {
        let changes = self.served != self.spec;
        let current = self.before.current;
        // With the same engine, only the model reference distinguishes new replicas from old ones.
        let agreement = match changes && self.served.engine != self.spec.engine {
            true => ModelMatch::Engine,
            false => ModelMatch::EngineAndModel,
        };
        let candidate = |model: &ReportedModel| {
            model.runs(self.spec, agreement) && (changes || model.revision != current)
        };
        let known = self.before.next.as_ref().filter(|next| next.spec == *self.spec);
        let known = known.and_then(|next| next.revision).filter(|revision| {
            let mut models = self.reported.iter().flat_map(|reported| &reported.models);
            models.any(|replicas| replicas.model.revision == *revision && candidate(&replicas.model))
        });
        let revision = known.or_else(|| preferred(self.reported, self.spec, candidate));
        if !changes && revision.is_none() {
            return None;
        }
        let waits = held || !changes;
        let held = waits && (revision.is_none() || revision != promoted);
        Some(NextRevision { spec: self.spec.clone(), revision, held })
    }

    /// Returns whether every region can serve `next` as it serves the current revision.
    fn is_ready(&self, next: ModelRevision) -> bool {
        let current = self.before.current;
        let enough = |reported: &&ReplicaRevisions| {
            let ready = reported.ready(current);
            reported.ready(next) >= reported.target.map_or(ready, |target| ready.min(target))
        };
        next == current
            || !self.has_silent_region
                && self.reported.iter().all(enough)
                && self.reported.iter().any(|reported| reported.ready(next) > 0)
    }
}

/// Returns the eligible revision with the most ready replicas. Revisions with the deployment's model reference come
/// first; of equals, the smallest wins.
fn preferred(
    reported: &[&ReplicaRevisions],
    spec: &ModelSpec,
    is_eligible: impl Fn(&ReportedModel) -> bool,
) -> Option<ModelRevision> {
    let mut ready: BTreeMap<(bool, ModelRevision), u32> = BTreeMap::new();
    for replicas in reported.iter().flat_map(|reported| &reported.models) {
        if replicas.ready > 0 && is_eligible(&replicas.model) {
            let exact = replicas.model.source == spec.model;
            *ready.entry((exact, replicas.model.revision)).or_default() += replicas.ready;
        }
    }
    let best = ready
        .into_iter()
        .max_by_key(|((exact, revision), ready)| (*exact, *ready, std::cmp::Reverse(*revision)));
    best.map(|((_, revision), _)| revision)
}

#[cfg(test)]
mod tests;
