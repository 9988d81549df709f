//! Deployments that have failed in this region: no replica of them can start.
//!
//! Two sources are combined. The region's scaler decides about the replicas that it starts, and shares its decisions with the
//! other spokes ([`Spoke::set_start_failures`]). About replicas that a spoke does not start, those in its list, it decides
//! itself by their statuses, at each poll. Both apply the rules of [`crate::scale::start_failures`].
//!
//! A failure counts only while no replica of the deployment is ready, and none of the list downloads its model, unless those of the
//! list have failed themselves: a slow origin of the model delivers some bytes now and then. The requests
//! of a failed deployment are neither held nor sent to a replica; its load in the reports names the reason, so that gateways
//! use other regions.

use std::collections::BTreeMap;
use std::time::Instant;

use regions::DeploymentName;
use replica_api::start_failure::StartFailure;
use scheduler_api::start_failure::{DeploymentFailures, FailedModel};

use super::Spoke;
use super::replica::ReplicaState;
use crate::scale::start_failures::StartFailures;

/// Failed deployments of a region.
#[derive(Debug, Default)]
pub(super) struct FailedDeployments {
    /// By decision of the scaler. Deployments without a failure are omitted.
    scaled: BTreeMap<DeploymentName, DeploymentFailures>,
    /// By the statuses of replicas that this spoke does not start.
    listed: BTreeMap<DeploymentName, ListedFailures>,
    /// As of the last [`Spoke::failure_changes`].
    announced: BTreeMap<DeploymentName, StartFailure>,
}

/// Failures of one deployment's replicas that this spoke does not start.
#[derive(Debug, Default)]
struct ListedFailures {
    failures: StartFailures,
    /// The model, if the deployment has failed.
    failed: Option<FailedModel>,
}

/// Change of a deployment, for the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FailureChange {
    /// The deployment.
    pub deployment: DeploymentName,
    /// The model of which no replica can start; `None` if the deployment is no longer failed.
    pub failed: Option<FailedModel>,
}

impl FailedDeployments {
    /// Replaces the decisions of the scaler.
    pub(super) fn set_scaled(
        &mut self,
        failures: impl IntoIterator<Item = (DeploymentName, DeploymentFailures)>,
    ) {
        self.scaled = failures.into_iter().filter(|(_, failures)| !failures.is_empty()).collect();
    }

    fn served(&self, deployment: &DeploymentName) -> Option<&FailedModel> {
        self.scaled.get(deployment)?.served.as_ref()
    }

    fn listed(&self, deployment: &DeploymentName) -> Option<&FailedModel> {
        self.listed.get(deployment)?.failed.as_ref()
    }
}

impl Spoke {
    /// Replaces the failures of the deployments whose replicas this region starts, as its scaler.
    pub fn set_start_failures(&mut self, failures: BTreeMap<DeploymentName, DeploymentFailures>) {
        self.failed.set_scaled(failures);
    }

    /// Returns the served model of a deployment that has failed in this region; `None` while a replica is ready or may become
    /// ready.
    pub fn start_failure(&self, deployment: &DeploymentName, now: Instant) -> Option<&FailedModel> {
        // The scaler may be starting a replica beside those of the list.
        let listed = self.failed.listed(deployment);
        let only_listed = || listed.filter(|_| self.provisioning_count(deployment) == 0);
        let failed = self.failed.served(deployment).or_else(only_listed)?;
        let may_become_ready = |replica: &ReplicaState| {
            replica.failed_model().is_none() && replica.download_left(deployment, now).is_some()
        };
        // The evaluation of those of the list includes their downloads.
        let any_downloads =
            || listed.is_none() && self.replicas.each().any(|(_, replica)| may_become_ready(replica));
        (self.accepting(deployment, now).next().is_none() && !any_downloads()).then_some(failed)
    }

    /// Returns the models of which no replica can start, and the reasons for which replicas wait, for the hub.
    pub fn start_failures(&self, now: Instant) -> BTreeMap<DeploymentName, DeploymentFailures> {
        let names = self.failed.scaled.keys().chain(self.failed.listed.keys());
        let each = names.map(|name| {
            let scaled = self.failed.scaled.get(name);
            let next = scaled.and_then(|failures| failures.next.clone());
            let waiting = scaled.and_then(|failures| failures.waiting.clone());
            let served = self.start_failure(name, now).cloned();
            (name.clone(), DeploymentFailures { served, next, waiting })
        });
        each.filter(|(_, failures)| !failures.is_empty()).collect()
    }

    /// Returns the deployments that have failed, have another reason, or have recovered since the last call.
    pub fn failure_changes(&mut self, now: Instant) -> Vec<FailureChange> {
        if self.failed.scaled.is_empty() && self.failed.listed.is_empty() && self.failed.announced.is_empty()
        {
            return Vec::new();
        }
        let current: BTreeMap<_, _> = self
            .start_failures(now)
            .into_iter()
            .filter_map(|(name, DeploymentFailures { served, .. })| Some((name, served?)))
            .collect();
        let reasons = current.iter().map(|(name, failed)| (name.clone(), failed.failure.reason)).collect();
        let before = std::mem::replace(&mut self.failed.announced, reasons);
        let recovered = before.keys().filter(|name| !current.contains_key(*name));
        let mut changes: Vec<_> =
            recovered.map(|name| FailureChange { deployment: name.clone(), failed: None }).collect();
        let is_new =
            |(name, failed): &(DeploymentName, FailedModel)| before.get(name) != Some(&failed.failure.reason);
        let failed = current.into_iter().filter(is_new);
        changes.extend(failed.map(|(deployment, failed)| FailureChange { deployment, failed: Some(failed) }));
        changes
    }

    /// Records whether a replica waits for another process on its machine that pulls its model, as it reports it with its status;
    /// before [`Spoke::observe_replica`].
    pub fn observe_pull_wait(&mut self, index: usize, waits: bool) {
        self.replicas.with(index, |replica| replica.set_waits_for_pull(waits));
    }

    /// Evaluates the deployments of a replica after a poll of its status.
    pub(super) fn update_listed_failures(&mut self, number: usize, now: Instant) {
        let Spoke { replicas, failed: FailedDeployments { listed, .. }, .. } = self;
        let Some(replica) = replicas.get(number) else { return };
        let is_failing = replica.failed_model().is_some();
        let names: Vec<_> = replica.names().filter(|name| is_failing || listed.contains_key(*name)).collect();
        for name in names {
            let each =
                || replicas.each().map(|(_, replica)| replica).filter(|replica| replica.may_serve(name));
            let states = each().filter(|replica| !replica.is_draining());
            let states = states.map(|replica| replica.start_state(now));
            let ListedFailures { failures, failed } = listed.entry(name.clone()).or_default();
            *failed = failures.observe_current(states, now).and_then(|failure| {
                // The failure of an unavailable origin outlasts the reports of the replicas.
                let model = each().find_map(|replica| replica.failed_model()).or(failed.as_ref())?;
                Some(FailedModel { failure: failure.clone(), ..model.clone() })
            });
            let any_failing = each().any(|replica| replica.failed_model().is_some());
            if failed.is_none() && !any_failing {
                listed.remove(name);
            }
        }
    }

    /// Forgets the failures of deployments without a replica that reports them.
    pub(super) fn forget_listed_failures(&mut self) {
        let Spoke { replicas, failed, .. } = self;
        failed.listed.retain(|name, _| {
            replicas.each().any(|(_, replica)| replica.names().any(|reported| reported == name))
        });
    }
}

#[cfg(test)]
mod tests {
    use super::super::ReplicaStatus;
    use super::super::hold::{HoldDecision, HoldRejection, HoldRequest, ReleaseReason};
    use super::*;
    use crate::some_instant;
    use regions::priority::Priority;
    use replica_api::start_failure::StartFailureReport;
    use std::time::Duration;

    const S: Duration = Duration::from_secs(1);

    fn name() -> DeploymentName {
        "m".parse().unwrap()
    }

    fn failed(reason: StartFailure) -> FailedModel {
        let failure = StartFailureReport::new(reason, "text for the operator");
        FailedModel { model: "hf://m".to_owned(), task: None, engine: None, failure }
    }

    fn status(ready: bool, failure: Option<StartFailure>) -> ReplicaStatus {
        ReplicaStatus {
            model: None,
            failure: failure.map(failed),
            names: [name()].into(),
            ready,
            draining: false,
            pending_tokens: 0,
            interactive_tokens: None,
            tokens_per_second: 0.0,
        }
    }

    /// A region with this many replicas in its list.
    fn region(replicas: u16) -> Spoke {
        let at = |port| regions::HostPort::from(([10, 0, 0, 1], port));
        Spoke::new("aws/us-east-1".parse().unwrap(), 7, (1..=replicas).map(at).collect())
    }

    fn of_scaler(reason: StartFailure) -> BTreeMap<DeploymentName, DeploymentFailures> {
        [(name(), DeploymentFailures { served: Some(failed(reason)), ..DeploymentFailures::default() })]
            .into()
    }

    fn reason(spoke: &Spoke, now: Instant) -> Option<StartFailure> {
        spoke.start_failure(&name(), now).map(|failed| failed.failure.reason)
    }

    fn hold(spoke: &mut Spoke, now: Instant) -> Result<HoldDecision, HoldRejection> {
        let request = HoldRequest {
            deployment: &name(),
            tenant: "t",
            priority: Priority::Interactive,
            bytes: 1,
            tokens: 1,
            deadline: now + 30 * S,
            other_region_in: None,
        };
        spoke.hold_or_forward(&request, now)
    }

    #[test]
    fn requests_of_a_failed_deployment_are_rejected_at_once_and_held_ones_are_released() {
        let (mut spoke, now) = (region(0), some_instant());
        spoke.set_start_time(&name(), Some(S));
        let Ok(HoldDecision::Held { ticket, .. }) = hold(&mut spoke, now) else { panic!("it is held") };
        assert_eq!(spoke.release(now), []);
        assert!(spoke.loads(now)[&name()].ready_in.is_some());

        spoke.set_start_failures(of_scaler(StartFailure::ModelMissing));
        let released = spoke.release(now);
        assert_eq!(
            released.iter().map(|release| release.reason).collect::<Vec<_>>(),
            [ReleaseReason::Unservable]
        );
        spoke.return_ticket(ticket);
        let reason = StartFailure::ModelMissing;
        assert_eq!(hold(&mut spoke, now), Err(HoldRejection::Failed { reason }));
        let load = spoke.loads(now)[&name()];
        assert_eq!((load.failed, load.ready_in), (Some(reason), None), "gateways send nothing");

        spoke.set_start_failures(BTreeMap::new());
        assert!(matches!(hold(&mut spoke, now), Ok(HoldDecision::Held { .. })));
        assert_eq!(spoke.loads(now)[&name()].failed, None);
    }

    #[test]
    fn a_deployment_with_a_ready_replica_has_not_failed() {
        let (mut spoke, now) = (region(1), some_instant());
        spoke.set_start_failures(of_scaler(StartFailure::DiskFull));
        assert_eq!(reason(&spoke, now), Some(StartFailure::DiskFull));
        spoke.observe_replica(0, status(true, None), now);
        assert_eq!(reason(&spoke, now), None);
        assert!(spoke.start_failures(now).is_empty());
        assert_eq!(hold(&mut spoke, now), Ok(HoldDecision::Forward));
    }

    #[test]
    fn replicas_of_the_list_fail_their_deployment_by_their_statuses() {
        let (mut spoke, now) = (region(2), some_instant());
        spoke.observe_replica(0, status(false, Some(StartFailure::UnknownFamily)), now);
        assert_eq!(reason(&spoke, now), None, "the other one has not reported");
        spoke.observe_replica(1, status(false, None), now);
        assert_eq!(reason(&spoke, now), None, "the other one is starting");
        spoke.observe_replica(1, status(false, Some(StartFailure::UnknownFamily)), now);
        assert_eq!(reason(&spoke, now), Some(StartFailure::UnknownFamily));
        assert_eq!(spoke.start_failures(now)[&name()].served, Some(failed(StartFailure::UnknownFamily)));
        assert_eq!(hold(&mut spoke, now), Err(HoldRejection::Failed { reason: StartFailure::UnknownFamily }));

        spoke.set_provisioning(&name(), vec![S], now);
        assert_eq!(reason(&spoke, now), None, "the scaler starts another one");
        spoke.set_provisioning(&name(), Vec::new(), now);
        spoke.observe_replica(0, status(true, None), now);
        assert_eq!(reason(&spoke, now), None);
        spoke.observe_replica(0, status(false, Some(StartFailure::ModelCorrupt)), now);
        assert!(reason(&spoke, now).is_some());
        spoke.remove_replica(0);
        spoke.remove_replica(1);
        assert_eq!(reason(&spoke, now), None, "no replica reports it");
    }

    #[test]
    fn the_failure_of_a_replica_of_the_list_ends_when_it_reports_another_state_or_is_gone() {
        let (mut spoke, now) = (region(1), some_instant());
        let fails = |spoke: &mut Spoke, at| {
            spoke.observe_replica(0, status(false, Some(StartFailure::ModelMissing)), at);
            assert_eq!(reason(spoke, at), Some(StartFailure::ModelMissing));
        };
        fails(&mut spoke, now);
        spoke.observe_replica(0, status(false, None), now);
        assert_eq!(reason(&spoke, now), None, "it starts normally");
        fails(&mut spoke, now);
        spoke.replica_failed(0, now);
        assert_eq!(reason(&spoke, now), None, "it may be starting again");
        fails(&mut spoke, now);
        spoke.replica_late(0, now + S);
        assert!(reason(&spoke, now + S).is_some(), "one late response");
        spoke.replica_late(0, now + 10 * S);
        assert_eq!(reason(&spoke, now + 10 * S), None);
    }

    #[test]
    fn an_unavailable_origin_of_replicas_of_the_list_ends_when_they_start_for_some_seconds() {
        let (mut spoke, now) = (region(1), some_instant());
        let poll = |spoke: &mut Spoke, failure: Option<StartFailure>, second: u32| {
            let at = now + S * second;
            spoke.observe_download(0, failure.is_none().then_some(3600 * S), at);
            spoke.observe_replica(0, status(false, failure), at);
            reason(spoke, at)
        };
        let unavailable = Some(StartFailure::ModelUnavailable);
        assert_eq!([0, 2, 3].map(|at| poll(&mut spoke, unavailable, at)), [None, None, unavailable]);
        assert_eq!([4, 6].map(|at| poll(&mut spoke, None, at)), [unavailable; 2], "some bytes have arrived");
        assert_eq!([7, 9].map(|at| poll(&mut spoke, unavailable, at)), [unavailable; 2]);
        assert_eq!([10, 15, 16].map(|at| poll(&mut spoke, None, at)), [unavailable, unavailable, None]);
    }

    #[test]
    fn a_replica_of_the_list_that_waits_for_the_pull_of_a_failed_one_does_not_keep_requests_waiting() {
        let (mut spoke, now) = (region(2), some_instant());
        let unavailable = Some(StartFailure::ModelUnavailable);
        for second in 0..4 {
            spoke.observe_replica(0, status(false, unavailable), now + S * second);
            spoke.observe_pull_wait(1, true);
            spoke.observe_replica(1, status(false, None), now + S * second);
        }
        assert_eq!(reason(&spoke, now + 3 * S), unavailable);
        let (mut spoke, later) = (region(2), now + 60 * S);
        spoke.observe_pull_wait(0, true);
        spoke.observe_replica(0, status(false, None), later);
        spoke.observe_replica(1, status(false, None), later);
        assert_eq!(reason(&spoke, later), None, "it counts as one that starts");
    }

    #[test]
    fn a_deployment_with_a_replica_of_the_list_that_downloads_its_model_has_not_failed() {
        let (mut spoke, now) = (region(1), some_instant());
        spoke.set_start_failures(of_scaler(StartFailure::DiskFull));
        spoke.observe_download(0, Some(60 * S), now);
        spoke.observe_replica(0, status(false, None), now);
        assert_eq!(reason(&spoke, now), None);
        assert!(spoke.start_failures(now).is_empty());
        assert_eq!(spoke.loads(now)[&name()].ready_in, Some(60 * S), "gateways learn the time");
        spoke.observe_download(0, None, now);
        spoke.observe_replica(0, status(false, Some(StartFailure::ModelMissing)), now);
        assert_eq!(reason(&spoke, now), Some(StartFailure::DiskFull), "it has failed");
    }

    #[test]
    fn each_change_is_announced_once() {
        let (mut spoke, now) = (region(1), some_instant());
        assert_eq!(spoke.failure_changes(now), []);
        spoke.set_start_failures(of_scaler(StartFailure::CrashLoop));
        let change = |failed| FailureChange { deployment: name(), failed };
        assert_eq!(spoke.failure_changes(now), [change(Some(failed(StartFailure::CrashLoop)))]);
        assert_eq!(spoke.failure_changes(now), []);
        spoke.set_start_failures(of_scaler(StartFailure::DiskFull));
        assert_eq!(
            spoke.failure_changes(now),
            [change(Some(failed(StartFailure::DiskFull)))],
            "another reason"
        );
        spoke.observe_replica(0, status(true, None), now);
        assert_eq!(spoke.failure_changes(now), [change(None)]);
        assert_eq!(spoke.failure_changes(now), []);
    }

    #[test]
    fn a_next_model_that_fails_does_not_fail_the_deployment() {
        let (mut spoke, now) = (region(0), some_instant());
        spoke.set_start_time(&name(), Some(S));
        let next = Some(failed(StartFailure::ModelMissing));
        let next = DeploymentFailures { next, waiting: Some("no free device".to_owned()), served: None };
        spoke.set_start_failures([(name(), next.clone())].into());
        assert_eq!(reason(&spoke, now), None);
        assert!(matches!(hold(&mut spoke, now), Ok(HoldDecision::Held { .. })));
        assert_eq!(spoke.start_failures(now)[&name()], next, "the hub learns it");
    }

    #[test]
    fn a_failed_deployment_has_no_capacity() {
        let (mut spoke, now) = (region(0), some_instant());
        spoke.set_replicas_max([(name(), 4)].into());
        let max = |spoke: &Spoke| spoke.capacity(now).pools[0].deployments[&name()].max;
        assert_eq!(max(&spoke), 4);
        spoke.set_start_failures(of_scaler(StartFailure::ModelForbidden));
        assert_eq!(max(&spoke), 0);
    }
}
