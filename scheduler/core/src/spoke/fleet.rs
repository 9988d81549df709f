//! The replicas of a region, which come and go.
//!
//! Each has a number, by which everybody calls it: the ingress that asks how it is, the request that was sent to it, the
//! scaler that lets it go. A number is given once, so that whatever still speaks of a replica that has gone, the end of a
//! request or a late status, can never be taken for a word about another.
//!
//! A replica goes in two steps. From [`Spoke::let_go`] on nothing new is sent there, and what it has it finishes; when
//! [`Spoke::members`] shows it with nothing in flight, whoever started it stops it, and it is [forgotten](Spoke::remove_replica).
//! In between it can be [kept](Spoke::keep): traffic that comes back finds it warm.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Instant;

use super::Spoke;
use super::replica::Replica;

/// One replica, for whoever starts and stops them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Member {
    /// Requests that were sent to it and have not ended.
    pub in_flight: u32,
    /// How it stands.
    pub standing: Standing,
}

/// How a replica stands, for whoever starts and stops them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// Nobody has heard of it yet.
    Unheard,
    /// It takes work.
    Serving,
    /// It was heard, and takes no work now: it is frozen, gone, or says that it is not ready.
    Lost,
    /// It was let go.
    Leaving,
}

/// All of them.
#[derive(Debug, Default)]
pub(super) struct Fleet {
    replicas: BTreeMap<usize, Replica>,
    /// The number of the next.
    next: usize,
}

impl Fleet {
    pub(super) fn of(endpoints: Vec<SocketAddr>) -> Fleet {
        let mut fleet = Fleet::default();
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
    pub fn let_go(&mut self, number: usize) {
        self.replicas.with(number, |replica| replica.set_leaving(true));
        self.choose_revisions();
    }

    /// It stays after all.
    pub fn keep(&mut self, number: usize) {
        self.replicas.with(number, |replica| replica.set_leaving(false));
    }

    /// Where each of them is reached, by number.
    pub fn endpoints(&self) -> BTreeMap<usize, SocketAddr> {
        self.replicas.each().map(|(number, replica)| (number, replica.endpoint())).collect()
    }

    /// How each of these stands; those that are not there any longer are left out.
    pub fn members(&self, numbers: impl IntoIterator<Item = usize>, now: Instant) -> BTreeMap<usize, Member> {
        let deaf = self.is_deaf(now);
        let standing = |replica: &Replica| {
            if replica.leaving() {
                Standing::Leaving
            } else if replica.takes_work() && (deaf || replica.heard_lately(now)) {
                Standing::Serving
            } else if replica.unheard() {
                Standing::Unheard
            } else {
                Standing::Lost
            }
        };
        let each = numbers.into_iter().filter_map(|number| Some((number, self.replicas.get(number)?)));
        each.map(|(number, replica)| {
            (number, Member { in_flight: replica.in_flight(), standing: standing(replica) })
        })
        .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Outcome, Refusal, ReplicaObserved, SILENCE_MAX, Seen};
    use super::*;
    use crate::some_instant;
    use regions::DeploymentName;
    use std::collections::BTreeSet;
    use std::time::Duration;

    fn name() -> DeploymentName {
        "minilm".parse().unwrap()
    }

    fn well() -> ReplicaObserved {
        ReplicaObserved {
            model: None,
            names: BTreeSet::from([name()]),
            ready: true,
            draining: false,
            pending_tokens: 0,
            lookup_tokens: None,
            tokens_per_second: 1000.0,
        }
    }

    fn at(port: u16) -> SocketAddr {
        ([10, 0, 0, 1], port).into()
    }

    fn spoke(replicas: Vec<SocketAddr>) -> Spoke {
        Spoke::new("aws/us-east-1".parse().unwrap(), 7, replicas)
    }

    fn standing(spoke: &Spoke, number: usize, now: Instant) -> Option<Standing> {
        spoke.members([number], now).get(&number).map(|member| member.standing)
    }

    #[test]
    fn a_replica_that_is_let_go_finishes_what_it_has_and_gets_nothing_new() {
        let (mut spoke, now) = (spoke(vec![at(1)]), some_instant());
        let added = spoke.add_replica(at(2));
        assert_eq!(spoke.endpoints(), BTreeMap::from([(0, at(1)), (added, at(2))]));
        assert_eq!(standing(&spoke, added, now), Some(Standing::Unheard));
        spoke.observe_replica(added, well(), now);
        let choice = spoke.choose(&name(), 10, |_| Seen::FINE, now).unwrap();
        assert_eq!((choice.index, standing(&spoke, added, now)), (added, Some(Standing::Serving)));

        spoke.let_go(added);
        assert!(matches!(spoke.choose(&name(), 10, |_| Seen::FINE, now), Err(Refusal::NoneReady { .. })));
        let leaving = Member { in_flight: 1, standing: Standing::Leaving };
        assert_eq!(spoke.members([added], now)[&added], leaving);
        spoke.finished(&choice, Outcome::Answered, now);
        assert_eq!(spoke.members([added], now)[&added].in_flight, 0);

        spoke.keep(added);
        assert!(spoke.choose(&name(), 10, |_| Seen::FINE, now).is_ok(), "it is warm");
    }

    #[test]
    fn what_is_said_of_a_replica_that_has_gone_says_nothing_of_the_next() {
        let (mut spoke, now) = (spoke(Vec::new()), some_instant());
        let first = spoke.add_replica(at(1));
        spoke.observe_replica(first, well(), now);
        let choice = spoke.choose(&name(), 10, |_| Seen::FINE, now).unwrap();
        spoke.remove_replica(first);
        let second = spoke.add_replica(at(1));
        assert_ne!(first, second);
        spoke.observe_replica(first, well(), now);
        spoke.replica_late(first, now);
        spoke.replica_failed(first, now);
        spoke.finished(&choice, Outcome::Failed, now);
        assert_eq!(spoke.members([first, second], now).len(), 1);
        assert_eq!(standing(&spoke, second, now), Some(Standing::Unheard));
        assert_eq!(spoke.replicas(), 1);
    }

    #[test]
    fn who_was_heard_and_takes_no_work_is_lost() {
        let (mut spoke, now) = (spoke(vec![at(1), at(2)]), some_instant());
        spoke.observe_replica(0, well(), now);
        spoke.observe_replica(1, well(), now);
        spoke.replica_failed(1, now);
        assert_eq!(standing(&spoke, 1, now), Some(Standing::Lost));
        let later = now + SILENCE_MAX + Duration::from_millis(1);
        spoke.observe_replica(1, ReplicaObserved { ready: false, ..well() }, later);
        assert_eq!(standing(&spoke, 1, later), Some(Standing::Lost));
        assert_eq!(standing(&spoke, 0, later), Some(Standing::Lost), "it has fallen silent, alone");
        assert_eq!(standing(&spoke, 9, later), None);
    }
}
