//! Replicas of a region, which are added and removed at runtime.
//!
//! Each replica has a number, used by the ingress that polls it, the requests sent to it, and the scaler that drains
//! it. A number is never reused, so that late information about a removed replica (the end of a request, a late status)
//! is never attributed to another one.
//!
//! A replica is removed in two steps. After [`Spoke::drain_replica`] no new requests are sent to it, and it finishes
//! its requests. When [`Spoke::members`] shows no requests in flight, the actuator stops it, and it is
//! [removed](Spoke::remove_replica). In between it can be [kept](Spoke::undrain_replica): returning traffic finds it
//! warm.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use regions::HostPort;

use super::Spoke;
use super::replica::ReplicaState;

/// Time after which a lost replica is drained: ten times the silence after which its spoke considers it frozen.
pub const LOST_MAX: Duration = Duration::from_secs(30);

/// View of one replica for the scaler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplicaMember {
    /// Requests that were sent to it and have not ended.
    pub in_flight: u32,
    /// Its state.
    pub state: MemberState,
}

/// State of a replica, for the scaler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemberState {
    /// It has not reported a status yet.
    Pending,
    /// It accepts requests.
    Serving,
    /// It has reported a status and does not accept requests now: it is frozen, gone, or not ready.
    Lost,
    /// It is being drained.
    Draining,
}

/// All replicas of a region.
#[derive(Debug, Default)]
pub(super) struct ReplicaFleet {
    replicas: BTreeMap<usize, ReplicaState>,
    /// Number of the next replica.
    next: usize,
}

impl ReplicaFleet {
    pub(super) fn of(endpoints: Vec<HostPort>) -> ReplicaFleet {
        let mut fleet = ReplicaFleet::default();
        for endpoint in endpoints {
            fleet.add(endpoint);
        }
        fleet
    }

    fn add(&mut self, endpoint: HostPort) -> usize {
        let number = self.next;
        self.next += 1;
        self.replicas.insert(number, ReplicaState::new(endpoint));
        number
    }

    pub(super) fn get(&self, number: usize) -> Option<&ReplicaState> {
        self.replicas.get(&number)
    }

    /// Applies `act` to a replica, if it still exists.
    pub(super) fn with<T>(&mut self, number: usize, act: impl FnOnce(&mut ReplicaState) -> T) -> Option<T> {
        self.replicas.get_mut(&number).map(act)
    }

    /// Iterates in the order of numbers.
    pub(super) fn each(&self) -> impl Iterator<Item = (usize, &ReplicaState)> {
        self.replicas.iter().map(|(number, replica)| (*number, replica))
    }

    pub(super) fn len(&self) -> usize {
        self.replicas.len()
    }
}

impl Spoke {
    /// Adds a replica without a status. Returns its number.
    pub fn add_replica(&mut self, endpoint: HostPort) -> usize {
        self.replicas.add(endpoint)
    }

    /// Removes a replica. Its requests end without effect on other replicas.
    pub fn remove_replica(&mut self, number: usize) {
        self.replicas.replicas.remove(&number);
        self.models.forget(number);
        self.forget_listed_failures();
        self.update_chosen_revisions();
    }

    /// Stops sending new requests to a replica.
    pub fn drain_replica(&mut self, number: usize) {
        self.replicas.with(number, |replica| replica.set_draining(true));
        self.update_chosen_revisions();
    }

    /// Keeps a draining replica.
    pub fn undrain_replica(&mut self, number: usize) {
        self.replicas.with(number, |replica| replica.set_draining(false));
    }

    /// Returns the endpoint of each replica, by number.
    pub fn endpoints(&self) -> BTreeMap<usize, HostPort> {
        self.replicas.each().map(|(number, replica)| (number, replica.endpoint().clone())).collect()
    }

    /// Returns the state of each of these replicas; removed ones are omitted.
    pub fn members(
        &self,
        numbers: impl IntoIterator<Item = usize>,
        now: Instant,
    ) -> BTreeMap<usize, ReplicaMember> {
        let all_silent = self.all_silent(now);
        let state = |replica: &ReplicaState| {
            if replica.is_draining() {
                MemberState::Draining
            } else if replica.accepts_requests() && (all_silent || replica.is_fresh(now)) {
                MemberState::Serving
            } else if replica.is_pending() {
                MemberState::Pending
            } else {
                MemberState::Lost
            }
        };
        let each = numbers.into_iter().filter_map(|number| Some((number, self.replicas.get(number)?)));
        each.map(|(number, replica)| {
            (number, ReplicaMember { in_flight: replica.in_flight(), state: state(replica) })
        })
        .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::{NoReplica, PassiveHealth, ReplicaOutcome, ReplicaStatus, SILENCE_MAX};
    use super::*;
    use crate::some_instant;
    use regions::DeploymentName;
    use std::collections::BTreeSet;
    use std::time::Duration;

    fn name() -> DeploymentName {
        "minilm".parse().unwrap()
    }

    fn status() -> ReplicaStatus {
        ReplicaStatus {
            model: None,
            failure: None,
            names: BTreeSet::from([name()]),
            ready: true,
            draining: false,
            pending_tokens: 0,
            interactive_tokens: None,
            tokens_per_second: 1000.0,
        }
    }

    fn at(port: u16) -> HostPort {
        ([10, 0, 0, 1], port).into()
    }

    fn spoke(replicas: Vec<HostPort>) -> Spoke {
        Spoke::new("aws/us-east-1".parse().unwrap(), 7, replicas)
    }

    fn state(spoke: &Spoke, number: usize, now: Instant) -> Option<MemberState> {
        spoke.members([number], now).get(&number).map(|member| member.state)
    }

    #[test]
    fn a_draining_replica_finishes_its_requests_and_gets_no_new_ones() {
        let (mut spoke, now) = (spoke(vec![at(1)]), some_instant());
        let added = spoke.add_replica(at(2));
        assert_eq!(spoke.endpoints(), BTreeMap::from([(0, at(1)), (added, at(2))]));
        assert_eq!(state(&spoke, added, now), Some(MemberState::Pending));
        spoke.observe_replica(added, status(), now);
        let selected = spoke.select_replica(&name(), 10, |_| PassiveHealth::HEALTHY, now).unwrap();
        assert_eq!((selected.index, state(&spoke, added, now)), (added, Some(MemberState::Serving)));

        spoke.drain_replica(added);
        assert!(matches!(
            spoke.select_replica(&name(), 10, |_| PassiveHealth::HEALTHY, now),
            Err(NoReplica::NoneReady { .. })
        ));
        let draining = ReplicaMember { in_flight: 1, state: MemberState::Draining };
        assert_eq!(spoke.members([added], now)[&added], draining);
        spoke.finished(&selected, ReplicaOutcome::Responded, now);
        assert_eq!(spoke.members([added], now)[&added].in_flight, 0);

        spoke.undrain_replica(added);
        assert!(spoke.select_replica(&name(), 10, |_| PassiveHealth::HEALTHY, now).is_ok(), "it is warm");
    }

    #[test]
    fn late_information_about_a_removed_replica_does_not_affect_the_next() {
        let (mut spoke, now) = (spoke(Vec::new()), some_instant());
        let first = spoke.add_replica(at(1));
        spoke.observe_replica(first, status(), now);
        let selected = spoke.select_replica(&name(), 10, |_| PassiveHealth::HEALTHY, now).unwrap();
        spoke.remove_replica(first);
        let second = spoke.add_replica(at(1));
        assert_ne!(first, second);
        spoke.observe_replica(first, status(), now);
        spoke.replica_late(first, now);
        spoke.replica_failed(first, now);
        spoke.finished(&selected, ReplicaOutcome::Failed, now);
        assert_eq!(spoke.members([first, second], now).len(), 1);
        assert_eq!(state(&spoke, second, now), Some(MemberState::Pending));
        assert_eq!(spoke.replicas(), 1);
    }

    #[test]
    fn a_replica_that_reported_and_is_not_ready_is_lost() {
        let (mut spoke, now) = (spoke(vec![at(1), at(2)]), some_instant());
        spoke.observe_replica(0, status(), now);
        spoke.observe_replica(1, status(), now);
        spoke.replica_failed(1, now);
        assert_eq!(state(&spoke, 1, now), Some(MemberState::Lost));
        let later = now + SILENCE_MAX + Duration::from_millis(1);
        spoke.observe_replica(1, ReplicaStatus { ready: false, ..status() }, later);
        assert_eq!(state(&spoke, 1, later), Some(MemberState::Lost));
        assert_eq!(state(&spoke, 0, later), Some(MemberState::Lost), "it alone is silent");
        assert_eq!(state(&spoke, 9, later), None);
    }
}
