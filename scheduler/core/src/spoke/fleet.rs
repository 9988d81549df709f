//! The replicas of a region, which come and go.
//!
//! Each has a number, by which everybody calls it: the ingress that asks how it is, the request that was sent to it, the
//! scaler that lets it go. A number is given once, so that whatever still speaks of a replica that has gone, the end of a
//! request or a late status, can never be taken for a word about another.
//!
//! A replica goes in two steps. From [`Spoke::drain_replica`] on nothing new is sent there, and what it has it finishes; when
//! [`Spoke::members`] shows it with nothing in flight, whoever started it stops it, and it is [forgotten](Spoke::remove_replica).
//! In between it can be [kept](Spoke::undrain_replica): traffic that comes back finds it warm.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Instant;

use super::Spoke;
use super::replica::Replica;

/// One replica, for whoever starts and stops them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplicaMember {
    /// Requests that were sent to it and have not ended.
    pub in_flight: u32,
    /// How it stands.
    pub state: MemberState,
}

/// How a replica stands, for whoever starts and stops them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemberState {
    /// Nobody has heard of it yet.
    Pending,
    /// It takes work.
    Serving,
    /// It was heard, and takes no work now: it is frozen, gone, or says that it is not ready.
    Lost,
    /// It was let go.
    Draining,
}

/// All of them.
#[derive(Debug, Default)]
pub(super) struct ReplicaSet {
    replicas: BTreeMap<usize, Replica>,
    /// The number of the next.
    next: usize,
}

impl ReplicaSet {
    pub(super) fn of(endpoints: Vec<SocketAddr>) -> ReplicaSet {
        let mut fleet = ReplicaSet::default();
        for endpoint in endpoints {
            fleet.add(endpoint);
        }
        fleet
    }

    fn add(&mut self, endpoint: SocketAddr) -> usize {
        let number = self.next;
        self.next += 1;
        self.replicas.insert(number, Replica::new(endpoint));
        number
    }

    pub(super) fn get(&self, number: usize) -> Option<&Replica> {
        self.replicas.get(&number)
    }

    /// Does something to a replica, if it is still there.
    pub(super) fn with<T>(&mut self, number: usize, act: impl FnOnce(&mut Replica) -> T) -> Option<T> {
        self.replicas.get_mut(&number).map(act)
    }

    /// In the order of their numbers.
    pub(super) fn each(&self) -> impl Iterator<Item = (usize, &Replica)> {
        self.replicas.iter().map(|(number, replica)| (*number, replica))
    }

    pub(super) fn len(&self) -> usize {
        self.replicas.len()
    }
}

impl Spoke {
    /// There is one more, from which nothing was heard yet. Its number.
    pub fn add_replica(&mut self, endpoint: SocketAddr) -> usize {
        self.replicas.add(endpoint)
    }

    /// It is gone. What was sent there and has not ended ends without it.
    pub fn remove_replica(&mut self, number: usize) {
        self.replicas.replicas.remove(&number);
        self.models.forget(number);
        self.choose_revisions();
    }

    /// Nothing new is sent there from now on.
    pub fn drain_replica(&mut self, number: usize) {
        self.replicas.with(number, |replica| replica.set_leaving(true));
        self.choose_revisions();
    }

    /// It stays after all.
    pub fn undrain_replica(&mut self, number: usize) {
        self.replicas.with(number, |replica| replica.set_leaving(false));
    }

    /// Where each of them is reached, by number.
    pub fn endpoints(&self) -> BTreeMap<usize, SocketAddr> {
        self.replicas.each().map(|(number, replica)| (number, replica.endpoint())).collect()
    }

    /// How each of these stands; those that are not there any longer are left out.
    pub fn members(&self, numbers: impl IntoIterator<Item = usize>, now: Instant) -> BTreeMap<usize, ReplicaMember> {
        let all_silent = self.all_silent(now);
        let state = |replica: &Replica| {
            if replica.draining() {
                MemberState::Draining
            } else if replica.takes_work() && (all_silent || replica.is_fresh(now)) {
                MemberState::Serving
            } else if replica.unheard() {
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
    use super::super::{ReplicaOutcome, NoReplica, ReplicaStatus, SILENCE_MAX, PassiveHealth};
    use super::*;
    use crate::some_instant;
    use regions::DeploymentName;
    use std::collections::BTreeSet;
    use std::time::Duration;

    fn name() -> DeploymentName {
        "minilm".parse().unwrap()
    }

    fn well() -> ReplicaStatus {
        ReplicaStatus {
            model: None,
            names: BTreeSet::from([name()]),
            ready: true,
            draining: false,
            pending_tokens: 0,
            interactive_tokens: None,
            tokens_per_second: 1000.0,
        }
    }

    fn at(port: u16) -> SocketAddr {
        ([10, 0, 0, 1], port).into()
    }

    fn spoke(replicas: Vec<SocketAddr>) -> Spoke {
        Spoke::new("aws/us-east-1".parse().unwrap(), 7, replicas)
    }

    fn state(spoke: &Spoke, number: usize, now: Instant) -> Option<MemberState> {
        spoke.members([number], now).get(&number).map(|member| member.state)
    }

    #[test]
    fn a_replica_that_is_let_go_finishes_what_it_has_and_gets_nothing_new() {
        let (mut spoke, now) = (spoke(vec![at(1)]), some_instant());
        let added = spoke.add_replica(at(2));
        assert_eq!(spoke.endpoints(), BTreeMap::from([(0, at(1)), (added, at(2))]));
        assert_eq!(state(&spoke, added, now), Some(MemberState::Pending));
        spoke.observe_replica(added, well(), now);
        let choice = spoke.select_replica(&name(), 10, |_| PassiveHealth::HEALTHY, now).unwrap();
        assert_eq!((choice.index, state(&spoke, added, now)), (added, Some(MemberState::Serving)));

        spoke.drain_replica(added);
        assert!(matches!(spoke.select_replica(&name(), 10, |_| PassiveHealth::HEALTHY, now), Err(NoReplica::NoneReady { .. })));
        let draining = ReplicaMember { in_flight: 1, state: MemberState::Draining };
        assert_eq!(spoke.members([added], now)[&added], draining);
        spoke.finished(&choice, ReplicaOutcome::Responded, now);
        assert_eq!(spoke.members([added], now)[&added].in_flight, 0);

        spoke.undrain_replica(added);
        assert!(spoke.select_replica(&name(), 10, |_| PassiveHealth::HEALTHY, now).is_ok(), "it is warm");
    }

    #[test]
    fn what_is_said_of_a_replica_that_has_gone_says_nothing_of_the_next() {
        let (mut spoke, now) = (spoke(Vec::new()), some_instant());
        let first = spoke.add_replica(at(1));
        spoke.observe_replica(first, well(), now);
        let choice = spoke.select_replica(&name(), 10, |_| PassiveHealth::HEALTHY, now).unwrap();
        spoke.remove_replica(first);
        let second = spoke.add_replica(at(1));
        assert_ne!(first, second);
        spoke.observe_replica(first, well(), now);
        spoke.replica_late(first, now);
        spoke.replica_failed(first, now);
        spoke.finished(&choice, ReplicaOutcome::Failed, now);
        assert_eq!(spoke.members([first, second], now).len(), 1);
        assert_eq!(state(&spoke, second, now), Some(MemberState::Pending));
        assert_eq!(spoke.replicas(), 1);
    }

    #[test]
    fn who_was_heard_and_takes_no_work_is_lost() {
        let (mut spoke, now) = (spoke(vec![at(1), at(2)]), some_instant());
        spoke.observe_replica(0, well(), now);
        spoke.observe_replica(1, well(), now);
        spoke.replica_failed(1, now);
        assert_eq!(state(&spoke, 1, now), Some(MemberState::Lost));
        let later = now + SILENCE_MAX + Duration::from_millis(1);
        spoke.observe_replica(1, ReplicaStatus { ready: false, ..well() }, later);
        assert_eq!(state(&spoke, 1, later), Some(MemberState::Lost));
        assert_eq!(state(&spoke, 0, later), Some(MemberState::Lost), "it has fallen silent, alone");
        assert_eq!(state(&spoke, 9, later), None);
    }
}
