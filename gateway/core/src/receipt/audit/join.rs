//! Join of the receipts of both ends of each attempt.
//!
//! They are joined by the key of the attempt, which is unique, if both ends have it. Receipts of version 1 have none:
//! they are joined by request, attempt and region, which a client can use for several requests; of several candidates
//! the one with the same policy is taken. Every pair is compared.

use super::report::{Findings, Kind};
use crate::receipt::AttemptKey;
use std::collections::BTreeMap;

/// Receipt of one end of an attempt.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Record {
    pub(super) request: Box<str>,
    pub(super) attempt: u32,
    /// Its number in [`ReceiptJoin::name`].
    pub(super) region: u32,
    pub(super) key: Option<AttemptKey>,
    pub(super) side: ReceiptSide,
    /// Its number in [`ReceiptJoin::name`].
    pub(super) policy: u32,
    /// End of the attempt.
    pub(super) until_ms: u64,
    /// Whether it is judged.
    pub(super) selected: bool,
}

/// End of the attempt that wrote the receipt, and its result. Attempts with a response are joined first: their region
/// has seen them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum ReceiptSide {
    /// An attempt with a response.
    Responded,
    /// An attempt that the region may have seen.
    NoResponse,
    /// An arrival.
    Arrived,
}

/// Result of the join.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct JoinCounts {
    pub(super) confirmed: u64,
    pub(super) never_arrived: u64,
    pub(super) too_young: u64,
}

/// All receipts.
#[derive(Debug, Default)]
pub(super) struct ReceiptJoin {
    records: Vec<Record>,
    names: BTreeMap<String, u32>,
}

/// Conditions under which a receipt must have a counterpart.
#[derive(Clone, Copy, Debug)]
pub(super) struct JoinConditions {
    /// Whether there are receipts of edges and of regions.
    pub(super) both_ends: bool,
    /// Receipts that ended after this may get theirs later.
    pub(super) settled_ms: u64,
}

impl ReceiptJoin {
    /// Returns the number of a region or policy.
    pub(super) fn name(&mut self, name: &str) -> u32 {
        if let Some(known) = self.names.get(name) {
            return *known;
        }
        let next = self.names.len() as u32;
        self.names.insert(name.to_owned(), next);
        next
    }

    /// Adds a receipt; returns its index for [`ReceiptJoin::ended`].
    pub(super) fn add(&mut self, record: Record) -> usize {
        self.records.push(record);
        self.records.len() - 1
    }

    /// Sets the outcome of the receipt at `index`.
    pub(super) fn ended(&mut self, index: usize, took_us: u64, has_response: bool) {
        let record = &mut self.records[index];
        record.until_ms += took_us / 1000;
        if has_response && record.side == ReceiptSide::NoResponse {
            record.side = ReceiptSide::Responded;
        }
    }

    /// Compares both ends.
    pub(super) fn compare(mut self, expect: JoinConditions, findings: &mut Findings) -> JoinCounts {
        self.records.sort_unstable();
        let mut names = vec![""; self.names.len()];
        self.names.iter().for_each(|(name, number)| names[*number as usize] = name);
        let mut joined = JoinCounts::default();
        let groups = self.records.chunk_by(|one, other| {
            (&one.request, one.attempt, one.region) == (&other.request, other.attempt, other.region)
        });
        for group in groups {
            let MatchedReceipts { pairs, attempts, arrivals } = match_receipts(group);
            let describe = |record: &Record| {
                let Record { request, attempt, region, .. } = record;
                format!("request {request}, attempt {attempt}, at {}", names[*region as usize])
            };
            for (sent, arrived) in pairs.iter().filter(|(sent, arrived)| sent.selected || arrived.selected) {
                joined.confirmed += 1;
                if sent.policy != arrived.policy {
                    let [edge, spoke] = [sent, arrived].map(|record| names[record.policy as usize]);
                    let message = format!(
                        "{}: the edge sent it under '{edge}', and it arrived under '{spoke}'",
                        describe(sent)
                    );
                    findings.add(Kind::PoliciesDiffer, "", 0, message);
                }
            }
            for record in attempts.into_iter().chain(arrivals).filter(|record| record.selected) {
                let (kind, problem) = match record.side {
                    ReceiptSide::NoResponse => {
                        joined.never_arrived += 1;
                        continue;
                    }
                    ReceiptSide::Responded => (
                        Kind::AttemptWithoutArrival,
                        "the edge has a response, and the region has no receipt",
                    ),
                    ReceiptSide::Arrived => {
                        (Kind::ArrivalWithoutAttempt, "it arrived, and no edge has a receipt")
                    }
                };
                match (expect.both_ends, record.until_ms > expect.settled_ms) {
                    (false, _) => {}
                    (true, true) => joined.too_young += 1,
                    (true, false) => findings.add(kind, "", 0, format!("{}: {problem}", describe(record))),
                }
            }
        }
        joined
    }
}

/// Receipts of one request, attempt and region.
struct MatchedReceipts<'a> {
    /// Attempts with their arrivals.
    pairs: Vec<(&'a Record, &'a Record)>,
    /// Attempts without an arrival.
    attempts: Vec<&'a Record>,
    /// Arrivals without an attempt.
    arrivals: Vec<&'a Record>,
}

fn match_receipts(group: &[Record]) -> MatchedReceipts<'_> {
    let mut matched = MatchedReceipts { pairs: Vec::new(), attempts: Vec::new(), arrivals: Vec::new() };
    // Sorted by key within the group, so both ends of a key are adjacent; those without a key come first.
    for same_key in group.chunk_by(|one, other| one.key == other.key) {
        // By side, so arrivals come last.
        let (attempts, arrivals) =
            same_key.split_at(same_key.partition_point(|record| record.side < ReceiptSide::Arrived));
        if same_key[0].key.is_none() {
            matched.attempts.extend(attempts);
            matched.arrivals.extend(arrivals);
            continue;
        }
        let both = attempts.len().min(arrivals.len());
        matched.pairs.extend(attempts.iter().zip(arrivals));
        matched.attempts.extend(&attempts[both..]);
        matched.arrivals.extend(&arrivals[both..]);
    }
    // The rest can be joined only if one end has no key.
    let mut left = UnmatchedAttempts::of(std::mem::take(&mut matched.attempts));
    let arrivals = std::mem::take(&mut matched.arrivals);
    let (same_policy, others): (Vec<_>, Vec<_>) = arrivals
        .into_iter()
        .map(|arrival| (arrival, left.take(arrival, Some(arrival.policy))))
        .partition(|(_, sent)| sent.is_some());
    let others = others.into_iter().map(|(arrival, _)| (arrival, left.take(arrival, None)));
    for (arrival, sent) in same_policy.into_iter().chain(others.collect::<Vec<_>>()) {
        match sent {
            Some(sent) => matched.pairs.push((sent, arrival)),
            None => matched.arrivals.push(arrival),
        }
    }
    matched.attempts = left.rest();
    matched
}

/// Attempts without an arrival so far, by presence of a key, and by policy; those with a response are last, so that
/// they are taken first.
struct UnmatchedAttempts<'a>([BTreeMap<u32, Vec<&'a Record>>; 2]);

impl<'a> UnmatchedAttempts<'a> {
    fn of(mut attempts: Vec<&'a Record>) -> UnmatchedAttempts<'a> {
        attempts.sort_by_key(|record| std::cmp::Reverse(record.side));
        let mut pools = [BTreeMap::new(), BTreeMap::new()];
        for record in attempts {
            let pool: &mut BTreeMap<u32, Vec<_>> = &mut pools[usize::from(record.key.is_some())];
            pool.entry(record.policy).or_default().push(record);
        }
        UnmatchedAttempts(pools)
    }

    /// Takes an attempt that may belong to `arrival`, under `policy` if given.
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
