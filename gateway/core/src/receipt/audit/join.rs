//! Both ends of each attempt, brought together by request, attempt and region.

use super::report::{Findings, Kind};
use std::collections::BTreeMap;

/// One attempt, as both ends name it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Key {
    pub(super) request: Box<str>,
    pub(super) attempt: u32,
    pub(super) region: Box<str>,
}

/// What both ends say. A client may use an identifier twice, so there may be several of each.
#[derive(Clone, Debug, Default)]
struct Pair {
    /// Attempts that were answered, so that the region has seen them.
    answered: u32,
    /// Attempts that the region may have seen.
    unanswered: u32,
    arrived: u32,
    /// When the last of them was over.
    until_ms: u64,
    /// The policy of the first at each end, by its number.
    policies: [Option<u32>; 2],
}

/// One end of an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    Answered,
    Unanswered,
    Arrived,
}

/// How far the two ends agree.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Joined {
    pub(super) confirmed: u64,
    pub(super) never_arrived: u64,
    pub(super) too_young: u64,
}

/// All attempts.
#[derive(Debug, Default)]
pub(super) struct Join {
    pairs: BTreeMap<Key, Pair>,
    policies: BTreeMap<String, u32>,
}

/// Which receipts may be expected to have a counterpart.
#[derive(Clone, Copy, Debug)]
pub(super) struct Expect {
    /// There are receipts of edges, and of regions.
    pub(super) both_ends: bool,
    /// Receipts that ended after this may still get theirs.
    pub(super) settled_ms: u64,
}

impl Join {
    pub(super) fn add(&mut self, key: Key, side: Side, until_ms: u64, policy: &str) {
        let next = self.policies.len() as u32;
        let policy = match self.policies.get(policy) {
            Some(known) => *known,
            None => *self.policies.entry(policy.to_owned()).or_insert(next),
        };
        let pair = self.pairs.entry(key).or_default();
        let (count, end) = match side {
            Side::Answered => (&mut pair.answered, 0),
            Side::Unanswered => (&mut pair.unanswered, 0),
            Side::Arrived => (&mut pair.arrived, 1),
        };
        *count += 1;
        pair.until_ms = pair.until_ms.max(until_ms);
        pair.policies[end].get_or_insert(policy);
    }

    /// Compares both ends.
    pub(super) fn compare(&self, expect: Expect, findings: &mut Findings) -> Joined {
        let mut joined = Joined::default();
        for (key, pair) in &self.pairs {
            let Pair { answered, unanswered, arrived, until_ms, policies } = pair;
            let sent = answered + unanswered;
            joined.confirmed += u64::from(sent.min(*arrived));
            joined.never_arrived += u64::from(sent.saturating_sub((*arrived).max(*answered)));
            if !expect.both_ends {
                continue;
            }
            if let [Some(edge), Some(spoke)] = policies
                && edge != spoke
            {
                let policy = |number: &u32| {
                    self.policies.iter().find(|(_, known)| *known == number).map_or("", |(text, _)| text)
                };
                let (edge, spoke) = (policy(edge), policy(spoke));
                let message =
                    format!("{}: the edge sent it under '{edge}', it arrived under '{spoke}'", told(key));
                findings.add(Kind::PoliciesDiffer, "", 0, message);
            }
            let unmatched = answered.saturating_sub(*arrived).max(arrived.saturating_sub(sent));
            if unmatched > 0 && *until_ms > expect.settled_ms {
                joined.too_young += u64::from(unmatched);
            } else if arrived > &sent {
                let message = format!("{}: it arrived, and no edge says that it sent it", told(key));
                findings.add(Kind::ArrivalWithoutAttempt, "", 0, message);
            } else if answered > arrived {
                let message = format!("{}: it was answered, and the region has no receipt of it", told(key));
                findings.add(Kind::AttemptWithoutArrival, "", 0, message);
            }
        }
        joined
    }
}

fn told(key: &Key) -> String {
    let Key { request, attempt, region } = key;
    format!("request {request}, attempt {attempt}, at {region}")
}
