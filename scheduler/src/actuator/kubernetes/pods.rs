//! Pods of one workload, as its task observes them.
//!
//! A pod whose container ends or cannot start says nothing about a model that was deployed after it. Which model a pod runs is in
//! the manifests of the cluster, so it is inferred: pods of an older template than the newest one are outdated, by the label
//! with the hash of the template that the workload's controller sets. The newest of the templates that have pods is the one that
//! appeared last, by the earliest creation of a pod of each: a pod of an old template that is created again, for
//! example because its node was drained, does not make that template the newest one. Pods that were there when the model changed are outdated
//! for [`REPLACED_WITHIN`], because an operator changes the manifest before or after the deployment; those that are
//! still the newest ones after that time count, so that a failure is not hidden.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::ops::Bound;
use std::time::{Duration, Instant};

use hyper::StatusCode;
use replica_api::start_failure::StartFailureReport;
use scheduler_core::scale::start_failures::EndedStart;

use super::api::ApiError;
use super::objects::{Pod, Status, WatchEvent};
use crate::actuator::{DeploymentTarget, EndedStarts, ModelKey, ReplicaId, RunningReplica};
use crate::config::WorkloadKind;

/// Time after which a pod that no node has capacity for counts as failed: a cluster autoscaler adds a node within it.
const UNSCHEDULABLE_AFTER: Duration = Duration::from_secs(300);
/// Time after a change of the model in which pods of before do not count: a controller replaces the pods of a changed workload
/// within it.
const REPLACED_WITHIN: Duration = Duration::from_secs(300);

/// Maximum number of templates without pods that are remembered: a Deployment keeps ten old ones by default.
const TEMPLATES_MAX: usize = 32;

/// Hash of the template of a pod; `None` if it has no such label.
type Template = Option<String>;
/// Time of the creation of a pod, with its name, as in [`Pod::creation`].
type Creation = (Option<String>, String);

/// Pods of a workload.
#[derive(Clone, Debug, Default)]
pub(super) struct Pods {
    pub(super) replicas: BTreeMap<ReplicaId, RunningReplica>,
    /// Container restarts and failed pods since the watch started.
    pub(super) crashes: u64,
    /// Model of the deployment, with container restarts and failed pods before readiness since it was deployed.
    pub(super) ended: Option<(ModelKey, EndedStarts)>,
}

/// Existing pod.
pub(super) struct ObservedPod {
    pub(super) pod: Pod,
    since: Instant,
    /// Time of its last container restart, or of its first observation.
    pub(super) began: Instant,
    /// Set once the pod was ready, with the start time if the pod was observed before it was ready.
    pub(super) ready: Option<Option<Duration>>,
    /// Failure that its replica reports.
    pub(super) reported: Option<StartFailureReport>,
    /// Its replica waits for another one on its node that pulls the model, as it reports.
    pub(super) waits_for_pull: bool,
}

/// Observed pods of a workload.
#[derive(Default)]
pub(super) struct State {
    pub(super) observed: BTreeMap<ReplicaId, ObservedPod>,
    pub(super) crashes: u64,
    /// Model of the deployment, and the ended starts since it was deployed.
    model: Option<ModelKey>,
    ended: Option<EndedStarts>,
    /// Time at which the model replaced another one.
    model_since: Option<Instant>,
    /// First observed creation of a pod of each template.
    templates: BTreeMap<Template, Creation>,
    /// Pod that was polled last.
    probed: Option<ReplicaId>,
}

impl ObservedPod {
    /// Returns the failure of its start, while it is not ready.
    pub(super) fn start_failure(&self) -> Option<StartFailureReport> {
        let platform = || self.pod.start_failure(self.since.elapsed() >= UNSCHEDULABLE_AFTER);
        self.reported.clone().filter(|_| self.pod.ready_at().is_none()).or_else(platform)
    }
}

impl State {
    /// Forgets the ended starts of another model.
    pub(super) fn set_model(&mut self, model: ModelKey, now: Instant) {
        if self.model.as_ref() != Some(&model) {
            self.model_since = self.model.as_ref().map(|_| now);
            (self.model, self.ended) = (Some(model), None);
        }
    }

    /// Returns the model of the deployment, as of the last report.
    pub(super) fn model(&self) -> Option<&ModelKey> {
        self.model.as_ref()
    }

    /// Returns the model and its ended starts, if there are any.
    pub(super) fn ended_starts(&self) -> Option<(ModelKey, EndedStarts)> {
        self.model.clone().zip(self.ended.clone())
    }

    /// Returns the newest template that has pods: the one that appeared last.
    pub(super) fn newest_template(&self) -> Option<&str> {
        let pods = self.observed.values().map(|observed| &observed.pod);
        pods.max_by_key(|pod| self.appeared(pod)).and_then(Pod::template)
    }

    /// Returns when the template of a pod appeared.
    fn appeared(&self, pod: &Pod) -> Option<&Creation> {
        self.templates.get(&pod.template().map(str::to_owned))
    }

    /// Records the template of a pod, and forgets the oldest ones that have no pods.
    fn record_template(&mut self, pod: &Pod) {
        let (time, name) = pod.creation();
        let creation = (time.map(str::to_owned), name.to_owned());
        let template = pod.template().map(str::to_owned);
        let first = self.templates.entry(template.clone()).or_insert_with(|| creation.clone());
        if creation < *first {
            *first = creation;
        }
        if self.templates.len() <= TEMPLATES_MAX {
            return;
        }
        let observed = self.observed.values().map(|observed| observed.pod.template().map(str::to_owned));
        let used: BTreeSet<Template> = observed.chain([template]).collect();
        let unused = self.templates.iter().filter(|(template, _)| !used.contains(*template));
        if let Some(oldest) =
            unused.min_by_key(|(_, creation)| *creation).map(|(template, _)| template.clone())
        {
            self.templates.remove(&oldest);
        }
    }

    /// Returns whether a pod may run an earlier model than that of the deployment.
    pub(super) fn is_outdated(&self, observed: &ObservedPod, newest: Option<&str>, now: Instant) -> bool {
        let is_recent = |changed: Instant| {
            observed.since < changed && now.saturating_duration_since(changed) < REPLACED_WITHIN
        };
        observed.pod.template() != newest || self.model_since.is_some_and(is_recent)
    }

    /// Returns the pods to poll next, in turns: those after the ones that were polled last.
    pub(super) fn next_probed(&mut self, max: usize) -> Vec<(ReplicaId, IpAddr)> {
        let after = self.probed.clone().map_or(Bound::Unbounded, Bound::Excluded);
        let starting =
            |(id, observed): (&ReplicaId, &ObservedPod)| Some((id.clone(), observed.pod.starting_at()?));
        let mut next: Vec<_> =
            self.observed.range((after, Bound::Unbounded)).filter_map(starting).take(max).collect();
        if let Some(last) = &self.probed {
            let before = self.observed.range::<ReplicaId, _>(..=last).filter_map(starting);
            next.extend(before.take(max - next.len()));
        }
        self.probed = next.last().map(|(id, _)| id.clone());
        next
    }

    /// Returns the pods that run and are not ready, with their addresses.
    pub(super) fn starting(&self) -> impl Iterator<Item = (ReplicaId, IpAddr)> {
        self.observed.iter().filter_map(|(id, observed)| Some((id.clone(), observed.pod.starting_at()?)))
    }

    /// Counts container restarts of a pod that has never been ready, and is not outdated.
    fn start_ended(&mut self, restarts: u64, last: EndedStart) {
        let count = self.ended.as_ref().map_or(0, |ended| ended.count).saturating_add(restarts);
        self.ended = Some(EndedStarts { count, last });
    }

    /// Replaces all pods by a list.
    pub(super) fn replace(&mut self, mut pods: Vec<Pod>) {
        pods.iter().for_each(|pod| self.record_template(pod));
        // Those of the newest template first: they decide which of the others are outdated.
        pods.sort_by(|a, b| self.appeared(b).cmp(&self.appeared(a)));
        let mut before = std::mem::take(&mut self.observed);
        for pod in pods {
            let before = before.remove(&pod.metadata.uid);
            self.put(pod, before);
        }
    }

    /// Applies an event of the watch; returns its version.
    pub(super) fn apply(&mut self, event: WatchEvent) -> Result<String, ApiError> {
        match event {
            WatchEvent::Added(pod) | WatchEvent::Modified(pod) => {
                let version = pod.metadata.resource_version.clone();
                let before = self.observed.remove(&pod.metadata.uid);
                self.put(pod, before);
                Ok(version)
            }
            WatchEvent::Deleted(pod) => {
                self.observed.remove(&pod.metadata.uid);
                Ok(pod.metadata.resource_version)
            }
            WatchEvent::Bookmark(bookmark) => Ok(bookmark.metadata.resource_version),
            WatchEvent::Error(Status { code, message }) => {
                let status = StatusCode::from_u16(code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
                Err(ApiError::Rejected { status, reason: message.chars().take(256).collect() })
            }
        }
    }

    fn put(&mut self, pod: Pod, before: Option<ObservedPod>) {
        let id = pod.metadata.uid.clone();
        let now = Instant::now();
        self.record_template(&pod);
        // A pod that was ready when first observed has no known start time.
        let Some(ObservedPod { pod: before, since, began, ready, reported, waits_for_pull }) = before else {
            let ready = pod.ready_at().map(|_| None);
            let (reported, waits_for_pull) = (None, false);
            let observed = ObservedPod { pod, since: now, began: now, ready, reported, waits_for_pull };
            self.observed.insert(id, observed);
            return;
        };
        let failed = pod.status.phase == "Failed" && before.status.phase != "Failed";
        let crashes = pod.restarts().saturating_sub(before.restarts()) + u64::from(failed);
        self.crashes += crashes;
        // The time includes the pause of the kubelet before the restart.
        let lasted = now.saturating_duration_since(began);
        let failure = reported.clone().unwrap_or_else(|| pod.crash());
        let was_ready = ready.is_some();
        let ready = ready.or_else(|| pod.ready_at().map(|_| Some(now.saturating_duration_since(since))));
        let began = if crashes > 0 { now } else { began };
        let observed = ObservedPod { pod, since, began, ready, reported, waits_for_pull };
        self.observed.insert(id.clone(), observed);
        let is_outdated = |observed| self.is_outdated(observed, self.newest_template(), now);
        if crashes > 0 && !was_ready && !self.observed.get(&id).is_some_and(is_outdated) {
            self.start_ended(crashes, EndedStart { at: now, lasted, failure });
        }
    }

    /// Returns the target count, but at least the number of pods that have not been drained.
    pub(super) fn replica_count(&self, target: &DeploymentTarget, kind: WorkloadKind) -> u32 {
        let undrained = self
            .observed
            .iter()
            .filter(|(id, observed)| observed.pod.is_active() && !target.stop.contains(*id));
        let min_replicas = match kind {
            WorkloadKind::Deployment => undrained.count() as u32,
            WorkloadKind::StatefulSet => undrained
                .filter_map(|(_, observed)| observed.pod.ordinal())
                .map(|ordinal| ordinal + 1)
                .max()
                .unwrap_or(0),
        };
        target.replicas.max(min_replicas)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn model(name: &str) -> ModelKey {
        ("a".parse().unwrap(), name.to_owned())
    }

    /// Returns a pod of this template, created in this second, whose container has been restarted this many times.
    fn pod(name: &str, template: &str, second: u32, restarts: u64) -> Pod {
        let labels = json!({"pod-template-hash": template});
        let metadata = json!({"name": name, "uid": name, "labels": labels,
                              "creationTimestamp": format!("2026-01-01T00:00:{second:02}Z")});
        let status = json!({"phase": "Running", "podIP": "10.0.0.9", "containerStatuses": [{"restartCount": restarts}]});
        serde_json::from_value(json!({"metadata": metadata, "status": status})).unwrap()
    }

    fn count(state: &State) -> u64 {
        state.ended_starts().map_or(0, |(_, ended)| ended.count)
    }

    fn outdated(state: &State, now: Instant) -> Vec<&str> {
        let newest = state.newest_template();
        let each = state.observed.iter().filter(|(_, observed)| state.is_outdated(observed, newest, now));
        each.map(|(id, _)| id.as_str()).collect()
    }

    #[test]
    fn a_pod_of_an_earlier_model_does_not_count_until_it_should_have_been_replaced() {
        let mut state = State::default();
        state.set_model(model("old"), Instant::now());
        state.replace(vec![pod("p", "1", 0, 0)]);
        state.replace(vec![pod("p", "1", 0, 2)]);
        assert_eq!(
            state.ended_starts().map(|(model, ended)| (model.1, ended.count)),
            Some(("old".to_owned(), 2))
        );
        let changed = Instant::now();
        state.set_model(model("new"), changed);
        state.replace(vec![pod("p", "1", 0, 7)]);
        assert_eq!((count(&state), outdated(&state, changed)), (0, vec!["p"]));
        assert!(outdated(&state, changed + REPLACED_WITHIN).is_empty(), "its manifest was changed before");
    }

    #[test]
    fn a_pod_of_an_older_template_than_the_newest_pod_is_outdated() {
        let mut state = State::default();
        let now = Instant::now();
        state.set_model(model("m"), now);
        state.replace(vec![pod("a", "1", 0, 0), pod("b", "2", 5, 0), pod("c", "2", 9, 0)]);
        assert_eq!(outdated(&state, now + 2 * REPLACED_WITHIN), ["a"]);
        state.replace(vec![pod("a", "1", 0, 3), pod("b", "2", 5, 1), pod("c", "2", 9, 0)]);
        assert_eq!(count(&state), 1, "that of the newest template");
    }

    #[test]
    fn a_pod_of_an_old_template_that_is_created_again_is_outdated() {
        let mut state = State::default();
        let later = Instant::now() + 2 * REPLACED_WITHIN;
        state.set_model(model("m"), Instant::now());
        state.replace(vec![pod("a", "1", 0, 0), pod("b", "2", 5, 0)]);
        // The node of the old pod is drained during the rollout, before and after the new one is listed again.
        state.apply(WatchEvent::Deleted(pod("a", "1", 0, 0))).unwrap();
        state.apply(WatchEvent::Added(pod("c", "1", 9, 0))).unwrap();
        assert_eq!(outdated(&state, later), ["c"]);
        state.replace(vec![pod("c", "1", 9, 2), pod("b", "2", 5, 1)]);
        assert_eq!((outdated(&state, later), count(&state)), (vec!["c"], 1), "only the restart of b counts");
        // The rollout is undone: the old template is the only one.
        state.replace(vec![pod("c", "1", 9, 2)]);
        assert!(outdated(&state, later).is_empty());
        state.replace(vec![pod("c", "1", 9, 2), pod("d", "2", 20, 0), pod("e", "3", 30, 0)]);
        assert_eq!(outdated(&state, later), ["c", "d"]);
    }

    #[test]
    fn the_templates_without_pods_are_bounded() {
        let mut state = State::default();
        for number in 0..3 * TEMPLATES_MAX {
            let second = u32::try_from(number % 60).unwrap();
            state.replace(vec![pod("first", "0", 0, 0), pod("p", &number.to_string(), second, 0)]);
            assert!(state.templates.len() <= TEMPLATES_MAX + 1);
        }
        assert!(state.templates.contains_key(&Some("0".to_owned())), "it has a pod");
    }

    #[test]
    fn each_starting_pod_is_polled_in_turn() {
        let mut state = State::default();
        assert!(state.next_probed(2).is_empty());
        state.replace(["a", "b", "c", "d", "e"].map(|name| pod(name, "1", 0, 0)).into());
        let mut next = || state.next_probed(2).into_iter().map(|(id, _)| id).collect::<Vec<_>>();
        assert_eq!([next(), next(), next()], [["a", "b"], ["c", "d"], ["e", "a"]]);
        state.replace(vec![pod("b", "1", 0, 0)]);
        assert_eq!(state.next_probed(2).len(), 1, "each one once");
    }
}
