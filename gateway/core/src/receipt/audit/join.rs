//! Both ends of each attempt, brought together.
//!
//! By the key of the attempt, which no two attempts share, where both ends have it. Receipts of version 1 have none: they
//! are joined by request, attempt and region, which a client can give to several requests; of several candidates the one
//! under the same policy is taken. Every pair is compared.

use super::report::{Findings, Kind};
use crate::receipt::AttemptKey;
use std::collections::BTreeMap;

/// One end of an attempt.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Record {
    pub(super) request: Box<str>,
    pub(super) attempt: u32,
    /// By its number in [`Join::name`].
    pub(super) region: u32,
    pub(super) key: Option<AttemptKey>,
    pub(super) side: Side,
    /// By its number in [`Join::name`].
    pub(super) policy: u32,
    /// When it was over.
    pub(super) until_ms: u64,
    /// Whether it is judged.
    pub(super) selected: bool,
}

/// Which end, and what it says. Attempts that were answered are joined first: their region has seen them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Side {
    /// An attempt that was answered.
    Answered,
    /// An attempt that the region may have seen.
    Unanswered,
    /// An arrival.
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
    records: Vec<Record>,
    names: BTreeMap<String, u32>,
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
    /// The number of a region or policy.
    pub(super) fn name(&mut self, name: &str) -> u32 {
        if let Some(known) = self.names.get(name) {
            return *known;
        }
        let next = self.names.len() as u32;
        self.names.insert(name.to_owned(), next);
        next
    }

    /// Adds a receipt; the place under which [`Join::ended`] finds it.
    pub(super) fn add(&mut self, record: Record) -> usize {
        self.records.push(record);
        self.records.len() - 1
    }

    /// The outcome of the receipt at `place` became known.
    pub(super) fn ended(&mut self, place: usize, took_us: u64, answered: bool) {
        let record = &mut self.records[place];
        record.until_ms += took_us / 1000;
        if answered && record.side == Side::Unanswered {
            record.side = Side::Answered;
        }
    }

    /// Compares both ends.
    pub(super) fn compare(mut self, expect: Expect, findings: &mut Findings) -> Joined {
        self.records.sort_unstable();
        let mut names = vec![""; self.names.len()];
        self.names.iter().for_each(|(name, number)| names[*number as usize] = name);
        let mut joined = Joined::default();
        let groups = self.records.chunk_by(|one, other| {
            (&one.request, one.attempt, one.region) == (&other.request, other.attempt, other.region)
        });
        for group in groups {
            let Matched { pairs, attempts, arrivals } = matched(group);
            let told = |record: &Record| {
                let Record { request, attempt, region, .. } = record;
                format!("request {request}, attempt {attempt}, at {}", names[*region as usize])
            };
            for (sent, arrived) in pairs.iter().filter(|(sent, arrived)| sent.selected || arrived.selected) {
                joined.confirmed += 1;
                if sent.policy != arrived.policy {
                    let [edge, spoke] = [sent, arrived].map(|record| names[record.policy as usize]);
                    let message = format!(
                        "{}: the edge sent it under '{edge}', it arrived under '{spoke}'",
                        told(sent)
                    );
                    findings.add(Kind::PoliciesDiffer, "", 0, message);
                }
            }
            for record in attempts.into_iter().chain(arrivals).filter(|record| record.selected) {
                let (kind, what) = match record.side {
                    Side::Unanswered => {
                        joined.never_arrived += 1;
                        continue;
                    }
                    Side::Answered => {
                        (Kind::AttemptWithoutArrival, "it was answered, and the region has no receipt of it")
                    }
                    Side::Arrived => {
                        (Kind::ArrivalWithoutAttempt, "it arrived, and no edge says that it sent it")
                    }
                };
                match (expect.both_ends, record.until_ms > expect.settled_ms) {
                    (false, _) => {}
                    (true, true) => joined.too_young += 1,
                    (true, false) => findings.add(kind, "", 0, format!("{}: {what}", told(record))),
                }
            }
        }
        joined
    }
}

/// The receipts of one request, attempt and region.
struct Matched<'a> {
    /// Attempts with their arrivals.
    pairs: Vec<(&'a Record, &'a Record)>,
    /// Attempts without.
    attempts: Vec<&'a Record>,
    /// Arrivals without.
    arrivals: Vec<&'a Record>,
}

fn matched(group: &[Record]) -> Matched<'_> {
    let mut found = Matched { pairs: Vec::new(), attempts: Vec::new(), arrivals: Vec::new() };
    // Sorted by key within the group, so both ends of a key are neighbours; those without a key come first.
    for same_key in group.chunk_by(|one, other| one.key == other.key) {
        // By side, so arrivals come last.
        let (attempts, arrivals) =
            same_key.split_at(same_key.partition_point(|record| record.side < Side::Arrived));
        if same_key[0].key.is_none() {
            found.attempts.extend(attempts);
            found.arrivals.extend(arrivals);
            continue;
        }
        let both = attempts.len().min(arrivals.len());
        found.pairs.extend(attempts.iter().zip(arrivals));
        found.attempts.extend(&attempts[both..]);
        found.arrivals.extend(&arrivals[both..]);
    }
    // What is left can be joined only where one end has no key.
    let mut left = Unmatched::of(std::mem::take(&mut found.attempts));
    let arrivals = std::mem::take(&mut found.arrivals);
    let (same_policy, others): (Vec<_>, Vec<_>) = arrivals
        .into_iter()
        .map(|arrival| (arrival, left.take(arrival, Some(arrival.policy))))
        .partition(|(_, sent)| sent.is_some());
    let others = others.into_iter().map(|(arrival, _)| (arrival, left.take(arrival, None)));
    for (arrival, sent) in same_policy.into_iter().chain(others.collect::<Vec<_>>()) {
        match sent {
            Some(sent) => found.pairs.push((sent, arrival)),
            None => found.arrivals.push(arrival),
        }
    }
    found.attempts = left.rest();
    found
}

/// Attempts that have no arrival yet, by whether they have a key, and by policy; of each those that were answered last, so
/// that they are taken first.
struct Unmatched<'a>([BTreeMap<u32, Vec<&'a Record>>; 2]);

impl<'a> Unmatched<'a> {
    fn of(mut attempts: Vec<&'a Record>) -> Unmatched<'a> {
        attempts.sort_by_key(|record| std::cmp::Reverse(record.side));
        let mut pools = [BTreeMap::new(), BTreeMap::new()];
        for record in attempts {
            let pool: &mut BTreeMap<u32, Vec<_>> = &mut pools[usize::from(record.key.is_some())];
            pool.entry(record.policy).or_default().push(record);
        }
        Unmatched(pools)
    }

    /// An attempt that may be that of `arrival`, under this policy if one is named.
    fn take(&mut self, arrival: &Record, policy: Option<u32>) -> Option<&'a Record> {
        let with_key = if arrival.key.is_none() { 2 } else { 1 };
        for pool in &mut self.0[..with_key] {
            let Some(policy) = policy.or_else(|| pool.keys().next().copied()) else { continue };
            let Some(attempts) = pool.get_mut(&policy) else { continue };
            let taken = attempts.pop();
            if attempts.is_empty() {
                pool.remove(&policy);
            }
            return taken;
        }
        None
    }

    fn rest(self) -> Vec<&'a Record> {
        self.0.into_iter().flat_map(BTreeMap::into_values).flatten().collect()
    }
}
