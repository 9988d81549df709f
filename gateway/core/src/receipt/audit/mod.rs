//! The audit: do these receipts prove that every request stayed where it was allowed to be?
//!
//! It is given files of chains, in order, and the catalogue, and nothing else: neither the processes nor their
//! configuration. It asks, of every line, whether it follows from the one before; of every attempt, whether its region is
//! in its allowed set, and of that set whether its policy permits it in the light of the catalogue; and of every attempt
//! and arrival, whether the other end has its counterpart. Whatever does not hold is a finding, and so is every gap: an
//! audit that cannot see does not say that all is well.
//!
//! A request that a region *refused* is none: the region's own policy check did its work, and no replica saw the request.
//! Refusals are counted and listed beside the findings.
//!
//! [`judge`] looks at each receipt, [`join`] at both ends together, and a [`Filter`] says which of them count.

mod filter;
mod join;
mod judge;
mod report;

pub use filter::Filter;
pub use report::{ChainSummary, FINDINGS_TOLD_MAX, Finding, Kind, REFUSALS_TOLD_MAX, Report, Verdict};

use super::chain::{Head, LineProblem};
use super::checkpoint::{ChainHead, Checkpoint};
use super::entry::{Entry, Role, VERSION, VERSION_MIN};
use join::{Expect, Join};
use judge::Policy;
use regions::catalogue::Catalogue;
use regions::set::RegionSet;
use report::Findings;
use std::collections::{BTreeMap, BTreeSet};

/// What an auditor wants to be so.
#[derive(Clone, Debug, Default)]
pub struct Demands {
    /// Heads that were noted elsewhere and must stand in some chain.
    pub heads: BTreeSet<Head>,
    /// Receipts that somebody holds.
    pub receipts: BTreeSet<String>,
    /// Whether a chain may begin after its first file, because earlier ones were archived.
    pub partial: bool,
    /// Receipts that are younger than this, seen from the newest, may miss their counterpart, unless every chain is closed.
    pub settle_ms: u64,
    /// The receipts that are judged.
    pub filter: Filter,
    /// The last checkpoint, whose heads must stand where it says.
    pub checkpoint: Option<Checkpoint>,
}

/// An audit under way.
#[derive(Debug)]
pub struct Audit<'a> {
    catalogue: &'a Catalogue,
    demands: Demands,
    chains: BTreeMap<String, Chain>,
    join: Join,
    findings: Findings,
    /// How many regions each policy permits in the light of the catalogue: a policy is worked out once.
    permitted: BTreeMap<String, Option<RegionSet>>,
    /// What the checkpoint says of chains in which it was not found yet.
    expected: BTreeMap<String, ChainHead>,
    attempts: u64,
    arrivals: u64,
    missing: u64,
    refused: u64,
    refusals: Vec<String>,
    rejected: u64,
    without_outcome: u64,
    newest_ms: u64,
}

#[derive(Debug)]
struct Chain {
    summary: ChainSummary,
    head: Head,
    /// The newest time that it says.
    newest_ms: u64,
    /// Receipts whose outcome is not known yet, by their number: where they are in [`Join`].
    open: BTreeMap<u64, usize>,
}

/// The file that is being read.
struct At<'a> {
    file: &'a str,
    number: u32,
    line: u64,
    chain: String,
    policies: BTreeMap<u32, Policy>,
}

impl<'a> Audit<'a> {
    /// An audit in the light of `catalogue`.
    pub fn new(catalogue: &'a Catalogue, demands: Demands) -> Audit<'a> {
        let heads = demands.checkpoint.iter().flat_map(|checkpoint| &checkpoint.chains);
        let expected = heads.map(|head| (head.chain.clone(), head.clone())).collect();
        Audit {
            catalogue,
            demands,
            chains: BTreeMap::new(),
            join: Join::default(),
            findings: Findings::default(),
            permitted: BTreeMap::new(),
            expected,
            attempts: 0,
            arrivals: 0,
            missing: 0,
            refused: 0,
            refusals: Vec::new(),
            rejected: 0,
            without_outcome: 0,
            newest_ms: 0,
        }
    }

    /// Reads a whole file, which is called `name`. The files of a chain are given in the order of their numbers.
    pub fn file(&mut self, name: &str, content: &[u8]) {
        let whole = content.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
        let (whole, unfinished) = content.split_at(whole);
        let mut lines = whole.split_inclusive(|byte| *byte == b'\n').map(<[u8]>::trim_ascii_end);
        let Some((mut head, mut at)) = lines.next().and_then(|line| self.begin(name, line)) else {
            return self.findings.add(
                Kind::Unreadable,
                name,
                1,
                format!("it does not begin as a file of receipts of version {VERSION_MIN} to {VERSION}"),
            );
        };
        for line in lines {
            at.line += 1;
            self.line(line, &mut head, &mut at);
        }
        let chain = self.chains.get_mut(&at.chain).expect("begun above");
        chain.head = head;
        chain.summary.head = head.to_string();
        chain.summary.files += 1;
        chain.summary.entries += at.line;
        chain.summary.line = at.line;
        chain.summary.unfinished_bytes = unfinished.len() as u64;
    }

    /// Reads the first line of a file, which says which it is.
    fn begin<'f>(&mut self, name: &'f str, line: &[u8]) -> Option<(Head, At<'f>)> {
        let entry = super::chain::entry_of(line)?;
        let Entry::File { version, chain, role, place, number, before, at_ms } = entry else { return None };
        let mut head: Head = before.parse().ok()?;
        if !(VERSION_MIN..=VERSION).contains(&version) {
            return None;
        }
        self.newest_ms = self.newest_ms.max(at_ms);
        let known = self.chains.get(&*chain);
        let (expected, continues) =
            known.map_or((1, Head::default()), |known| (known.summary.file + 1, known.head));
        if known.is_none() && self.demands.partial {
            // Whatever was before it was archived.
        } else if number != expected {
            let message = format!("it is file {number} of chain {chain}, and file {expected} is not here");
            self.findings.add(Kind::MissingFile, name, 1, message);
        } else if head != continues {
            let message = "it does not continue from the file before it".to_owned();
            self.findings.add(Kind::BrokenChain, name, 1, message);
        }
        // Where the file that the checkpoint ends in was archived, the next one says how it ended.
        let follows = |expected: &ChainHead| number == expected.file + 1 && expected.head == head.to_string();
        if self.expected.get(&*chain).is_some_and(follows) {
            self.expected.remove(&*chain);
        }
        if let Some(problem) = head.read(line).1 {
            self.findings.add(Kind::BrokenChain, name, 1, problem.to_string());
        }
        self.stands(&chain, number, 1, &head);
        let fresh = Chain {
            summary: ChainSummary {
                chain: chain.to_string(),
                role,
                place: place.to_string(),
                files: 0,
                entries: 0,
                file: number,
                line: 1,
                head: String::new(),
                closed: false,
                unfinished_bytes: 0,
            },
            head,
            newest_ms: at_ms,
            open: BTreeMap::new(),
        };
        let chain = chain.into_owned();
        self.chains.entry(chain.clone()).or_insert(fresh).summary.file = number;
        Some((head, At { file: name, number, line: 1, chain, policies: BTreeMap::new() }))
    }

    /// This head stands at this line of a chain: is it one that must be there?
    fn stands(&mut self, chain: &str, file: u32, line: u64, head: &Head) {
        self.demands.heads.remove(head);
        let is_here = |expected: &ChainHead| {
            (expected.file, expected.line) == (file, line) && expected.head == head.to_string()
        };
        if self.expected.get(chain).is_some_and(is_here) {
            self.expected.remove(chain);
        }
    }

    fn line(&mut self, line: &[u8], head: &mut Head, at: &mut At<'_>) {
        let (entry, problem) = head.read(line);
        self.stands(&at.chain, at.number, at.line, head);
        if let Some(problem) = problem {
            let kind = match problem {
                LineProblem::Hash => Kind::BrokenChain,
                LineProblem::Form | LineProblem::Entry(_) => Kind::Unreadable,
            };
            self.findings.add(kind, at.file, at.line, problem.to_string());
        }
        if let Some(entry) = entry {
            self.entry(entry, at);
        }
    }

    fn entry(&mut self, entry: Entry<'_>, at: &mut At<'_>) {
        let chain = self.chains.get_mut(&at.chain).expect("a file begins before its lines");
        chain.summary.closed = false;
        match entry {
            Entry::File { .. } => self.note(Kind::Unreadable, at, "a file begins within a file".to_owned()),
            Entry::Closed { at_ms } => {
                chain.summary.closed = true;
                self.saw(at, at_ms);
            }
            Entry::Resumed { at_ms, clean, torn_bytes } => {
                // Nobody writes the outcomes of a process that is gone.
                self.without_outcome += std::mem::take(&mut chain.open).len() as u64;
                let newest_ms = chain.newest_ms;
                self.saw(at, at_ms);
                if !clean && self.demands.filter.overlaps(newest_ms, at_ms) {
                    let message = format!(
                        "its writer ended without a word ({torn_bytes} bytes of a torn line were cut off): receipts of \
                         its last moments may be missing"
                    );
                    self.note(Kind::UncleanEnd, at, message);
                }
            }
            Entry::Gap { missing, why, since_ms, at_ms } => {
                self.saw(at, at_ms);
                if self.demands.filter.overlaps(since_ms, at_ms) {
                    self.missing += missing;
                    let message =
                        format!("{missing} receipts are missing ({why:?}) from {since_ms} to {at_ms}");
                    self.note(Kind::Gap, at, message);
                }
            }
            Entry::Rejected { requests, since_ms, at_ms } => {
                self.saw(at, at_ms);
                if self.demands.filter.overlaps(since_ms, at_ms) {
                    self.rejected += requests;
                }
            }
            Entry::Policy { policy, residency, allowed } => self.policy(policy, &residency, &allowed, at),
            Entry::Attempt { .. } | Entry::Sent { .. } => self.attempt(&entry, at),
            Entry::Arrival { .. } | Entry::Received { .. } => self.arrival(&entry, at),
            Entry::Outcome { number, took_us, end } => self.outcome(number, took_us, &end, at),
        }
    }

    /// The chain that is being read says that it was this late.
    fn saw(&mut self, at: &At<'_>, at_ms: u64) {
        self.newest_ms = self.newest_ms.max(at_ms);
        let chain = self.chains.get_mut(&at.chain).expect("a file begins before its lines");
        chain.newest_ms = chain.newest_ms.max(at_ms);
    }

    fn note(&mut self, kind: Kind, at: &At<'_>, message: String) {
        self.findings.add(kind, at.file, at.line, message);
    }

    /// Everything was read: what holds?
    pub fn finish(mut self) -> Report {
        self.without_outcome += self.chains.values().map(|chain| chain.open.len() as u64).sum::<u64>();
        let chains: Vec<_> = self.chains.into_values().map(|chain| chain.summary).collect();
        let has = |role| chains.iter().any(|chain| chain.role == role);
        let both_ends = has(Role::Edge) && has(Role::Spoke);
        let settled_ms = if chains.iter().all(|chain| chain.closed) {
            u64::MAX
        } else {
            self.newest_ms.saturating_sub(self.demands.settle_ms)
        };
        let joined = self.join.compare(Expect { both_ends, settled_ms }, &mut self.findings);
        for head in &self.demands.heads {
            self.findings.add(Kind::UnknownHead, "", 0, format!("no chain has the head {head}"));
        }
        for receipt in &self.demands.receipts {
            self.findings.add(Kind::UnknownReceipt, "", 0, format!("no chain has the receipt {receipt}"));
        }
        let checkpoint = self.demands.checkpoint.as_ref().map(|checkpoint| checkpoint.number);
        for expected in self.expected.values() {
            let there = chains.iter().find(|chain| chain.chain == expected.chain);
            // A chain that was closed may have been archived since, where the auditor says that some are.
            if there.is_none() && expected.closed && self.demands.partial {
                continue;
            }
            self.findings.add(Kind::RolledBack, "", 0, rolled_back(expected, there));
        }
        let Findings { counts, mut told } = self.findings;
        told.sort_by_key(|finding| finding.kind);
        let verdict = match counts.keys().any(|kind| kind.is_violation()) {
            true => Verdict::Violated,
            false if counts.is_empty() => Verdict::Holds,
            false => Verdict::NotProven,
        };
        Report {
            holds: verdict == Verdict::Holds,
            verdict,
            filter: self.demands.filter,
            checkpoint,
            chains,
            attempts: self.attempts,
            arrivals: self.arrivals,
            confirmed: joined.confirmed,
            never_arrived: joined.never_arrived,
            too_young: joined.too_young,
            both_ends,
            missing: self.missing,
            refused: self.refused,
            refusals: self.refusals,
            rejected: self.rejected,
            without_outcome: self.without_outcome,
            counts,
            findings: told,
        }
    }
}

/// State of a chain in which the checkpoint was not found.
fn rolled_back(expected: &ChainHead, there: Option<&ChainSummary>) -> String {
    let ChainHead { chain, file, line, head, .. } = expected;
    let stood = format!(
        "the last checkpoint signed the head {head} of chain {chain} at line {line} of its file {file}"
    );
    match there {
        None => format!("{stood}; the chain is not here: give the folder that it is in, or it was removed"),
        Some(there) if (there.file, there.line) < (*file, *line) => {
            format!("{stood}; it now ends at line {} of file {}: it was truncated", there.line, there.file)
        }
        Some(_) => {
            format!("{stood}; that head is not there: the chain was rewritten, or the file is missing")
        }
    }
}

#[cfg(test)]
mod tests;
