//! Audit: verification that the receipts prove that every request stayed in its allowed regions.
//!
//! The input is the files of the chains, in order, and the catalogue, without the processes or their configuration. The
//! audit checks of every line that it follows from the one before; of every attempt that its region is in its allowed
//! set, and of that set that its policy allows it according to the catalogue; and of every attempt and arrival that the
//! other end has its counterpart. Every violation is a finding, and so is every gap: an audit with incomplete input
//! does not report success.
//!
//! A request that a region *rejected* is not a finding: the region's own policy check prevented it, and no replica saw
//! the request. Rejections are counted and listed beside the findings.
//!
//! [`judge`] checks each receipt, [`join`] both ends together, and a [`Filter`] selects the receipts that are judged.

mod filter;
mod join;
mod judge;
pub(super) mod report;

pub use filter::Filter;
pub use report::{
    AuditVerdict, ChainSummary, FINDINGS_LISTED_MAX, Finding, Kind, REJECTIONS_LISTED_MAX, Report,
};

use super::chain::{ChainHash, LineProblem};
use super::checkpoint::{AuditCheckpoint, ChainHead};
use super::entry::{Entry, Role, VERSION, VERSION_MIN};
use join::{JoinConditions, ReceiptJoin};
use judge::FilePolicy;
use regions::catalogue::Catalogue;
use regions::set::RegionSet;
use report::Findings;
use std::collections::{BTreeMap, BTreeSet};

/// Options of an audit.
#[derive(Clone, Debug, Default)]
pub struct AuditOptions {
    /// Heads that were recorded elsewhere and must be in some chain.
    pub heads: BTreeSet<ChainHash>,
    /// Receipts that clients hold and that must be in some chain.
    pub receipts: BTreeSet<String>,
    /// Whether a chain may begin after its first file, because earlier ones were archived.
    pub partial: bool,
    /// Age, relative to the newest receipt, below which a receipt may lack its counterpart, unless every chain is
    /// closed.
    pub settle_ms: u64,
    /// Selection of the judged receipts.
    pub filter: Filter,
    /// Last checkpoint, whose heads must be at the recorded positions.
    pub checkpoint: Option<AuditCheckpoint>,
}

/// Audit in progress.
#[derive(Debug)]
pub struct Audit<'a> {
    catalogue: &'a Catalogue,
    options: AuditOptions,
    chains: BTreeMap<String, Chain>,
    join: ReceiptJoin,
    findings: Findings,
    /// Regions that each policy allows according to the catalogue, cached.
    permitted: BTreeMap<String, Option<RegionSet>>,
    /// Heads of the checkpoint that were not found yet.
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
    head: ChainHash,
    /// Newest time in the chain.
    newest_ms: u64,
    /// Receipts without an outcome so far, by number: their index in [`ReceiptJoin`].
    open: BTreeMap<u64, usize>,
}

/// File that is being read, and the position in it.
struct FilePosition<'a> {
    file: &'a str,
    number: u32,
    line: u64,
    chain: String,
    policies: BTreeMap<u32, FilePolicy>,
}

impl<'a> Audit<'a> {
    /// Starts an audit with this catalogue.
    pub fn new(catalogue: &'a Catalogue, options: AuditOptions) -> Audit<'a> {
        let heads = options.checkpoint.iter().flat_map(|checkpoint| &checkpoint.chains);
        let expected = heads.map(|head| (head.chain.clone(), head.clone())).collect();
        Audit {
            catalogue,
            options,
            chains: BTreeMap::new(),
            join: ReceiptJoin::default(),
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

    /// Reads a whole file with this name. The files of a chain must be given in the order of their numbers.
    pub fn file(&mut self, name: &str, content: &[u8]) {
        let whole = content.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
        let (whole, unfinished) = content.split_at(whole);
        let mut lines = whole.split_inclusive(|byte| *byte == b'\n').map(<[u8]>::trim_ascii_end);
        let Some((mut head, mut at)) = lines.next().and_then(|line| self.begin(name, line)) else {
            return self.findings.add(
                Kind::Unreadable,
                name,
                1,
                format!("it does not start with the header of a receipts file of version {VERSION_MIN} to {VERSION}"),
            );
        };
        for line in lines {
            at.line += 1;
            self.line(line, &mut head, &mut at);
        }
        let chain = self.chains.get_mut(&at.chain).expect("inserted above");
        chain.head = head;
        chain.summary.head = head.to_string();
        chain.summary.files += 1;
        chain.summary.entries += at.line;
        chain.summary.line = at.line;
        chain.summary.unfinished_bytes = unfinished.len() as u64;
    }

    /// Reads the first line of a file, which identifies it.
    fn begin<'f>(&mut self, name: &'f str, line: &[u8]) -> Option<(ChainHash, FilePosition<'f>)> {
        let entry = super::chain::entry_of(line)?;
        let Entry::File { version, chain, role, region, number, before, at_ms } = entry else { return None };
        let mut head: ChainHash = before.parse().ok()?;
        if !(VERSION_MIN..=VERSION).contains(&version) {
            return None;
        }
        self.newest_ms = self.newest_ms.max(at_ms);
        let known = self.chains.get(&*chain);
        let (expected, continues) =
            known.map_or((1, ChainHash::default()), |known| (known.summary.file + 1, known.head));
        if known.is_none() && self.options.partial {
            // Earlier files were archived.
        } else if number != expected {
            let message = format!("it is file {number} of chain {chain}, and file {expected} is missing");
            self.findings.add(Kind::MissingFile, name, 1, message);
        } else if head != continues {
            let message = "it does not continue the file before it".to_owned();
            self.findings.add(Kind::BrokenChain, name, 1, message);
        }
        // If the file with the checkpoint's head was archived, the next one states that head.
        let follows = |expected: &ChainHead| number == expected.file + 1 && expected.head == head.to_string();
        if self.expected.get(&*chain).is_some_and(follows) {
            self.expected.remove(&*chain);
        }
        if let Some(problem) = head.read(line).1 {
            self.findings.add(Kind::BrokenChain, name, 1, problem.to_string());
        }
        self.record_head(&chain, number, 1, &head);
        let fresh = Chain {
            summary: ChainSummary {
                chain: chain.to_string(),
                role,
                region: region.to_string(),
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
        Some((head, FilePosition { file: name, number, line: 1, chain, policies: BTreeMap::new() }))
    }

    /// Records that this head is at this line of a chain, and removes it from the expected heads.
    fn record_head(&mut self, chain: &str, file: u32, line: u64, head: &ChainHash) {
        self.options.heads.remove(head);
        let is_here = |expected: &ChainHead| {
            (expected.file, expected.line) == (file, line) && expected.head == head.to_string()
        };
        if self.expected.get(chain).is_some_and(is_here) {
            self.expected.remove(chain);
        }
    }

    fn line(&mut self, line: &[u8], head: &mut ChainHash, at: &mut FilePosition<'_>) {
        let (entry, problem) = head.read(line);
        self.record_head(&at.chain, at.number, at.line, head);
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

    fn entry(&mut self, entry: Entry<'_>, at: &mut FilePosition<'_>) {
        let chain = self.chains.get_mut(&at.chain).expect("a file begins before its lines");
        chain.summary.closed = false;
        match entry {
            Entry::File { .. } => {
                self.note(Kind::Unreadable, at, "the header of a file is within a file".to_owned())
            }
            Entry::Closed { at_ms } => {
                chain.summary.closed = true;
                self.record_time(at, at_ms);
            }
            Entry::Resumed { at_ms, clean, torn_bytes } => {
                // The outcomes of a process that has ended are never written.
                self.without_outcome += std::mem::take(&mut chain.open).len() as u64;
                let newest_ms = chain.newest_ms;
                self.record_time(at, at_ms);
                if !clean && self.options.filter.overlaps(newest_ms, at_ms) {
                    let message = format!(
                        "its writer stopped without closing the chain ({torn_bytes} bytes of an incomplete line were truncated): its \
                         last receipts may be missing"
                    );
                    self.note(Kind::UncleanEnd, at, message);
                }
            }
            Entry::Gap { missing, reason, since_ms, at_ms } => {
                self.record_time(at, at_ms);
                if self.options.filter.overlaps(since_ms, at_ms) {
                    self.missing += missing;
                    let message =
                        format!("{missing} receipts are missing ({reason:?}) from {since_ms} to {at_ms}");
                    self.note(Kind::Gap, at, message);
                }
            }
            Entry::Rejected { requests, since_ms, at_ms } => {
                self.record_time(at, at_ms);
                if self.options.filter.overlaps(since_ms, at_ms) {
                    self.rejected += requests;
                }
            }
            Entry::Policy { policy, residency, allowed } => self.policy(policy, &residency, &allowed, at),
            Entry::Attempt { .. } | Entry::Sent { .. } => self.attempt(&entry, at),
            Entry::Arrival { .. } | Entry::Received { .. } => self.arrival(&entry, at),
            Entry::Outcome { number, took_us, end } => self.outcome(number, took_us, &end, at),
        }
    }

    /// Records a time in the chain that is being read.
    fn record_time(&mut self, at: &FilePosition<'_>, at_ms: u64) {
        self.newest_ms = self.newest_ms.max(at_ms);
        let chain = self.chains.get_mut(&at.chain).expect("a file begins before its lines");
        chain.newest_ms = chain.newest_ms.max(at_ms);
    }

    fn note(&mut self, kind: Kind, at: &FilePosition<'_>, message: String) {
        self.findings.add(kind, at.file, at.line, message);
    }

    /// Ends the audit after all files and returns the report.
    pub fn finish(mut self) -> Report {
        self.without_outcome += self.chains.values().map(|chain| chain.open.len() as u64).sum::<u64>();
        let chains: Vec<_> = self.chains.into_values().map(|chain| chain.summary).collect();
        let has = |role| chains.iter().any(|chain| chain.role == role);
        let both_ends = has(Role::Edge) && has(Role::Spoke);
        let settled_ms = if chains.iter().all(|chain| chain.closed) {
            u64::MAX
        } else {
            self.newest_ms.saturating_sub(self.options.settle_ms)
        };
        let joined = self.join.compare(JoinConditions { both_ends, settled_ms }, &mut self.findings);
        for head in &self.options.heads {
            self.findings.add(Kind::UnknownHead, "", 0, format!("no chain has the head {head}"));
        }
        for receipt in &self.options.receipts {
            self.findings.add(Kind::UnknownReceipt, "", 0, format!("no chain has the receipt {receipt}"));
        }
        let checkpoint = self.options.checkpoint.as_ref().map(|checkpoint| checkpoint.number);
        for expected in self.expected.values() {
            let found = chains.iter().find(|chain| chain.chain == expected.chain);
            // A closed chain may have been archived since, if the auditor allows archived files.
            if found.is_none() && expected.closed && self.options.partial {
                continue;
            }
            self.findings.add(Kind::RolledBack, "", 0, rolled_back(expected, found));
        }
        let Findings { counts, mut listed } = self.findings;
        listed.sort_by_key(|finding| finding.kind);
        let verdict = match counts.keys().any(|kind| kind.is_violation()) {
            true => AuditVerdict::Violated,
            false if counts.is_empty() => AuditVerdict::Holds,
            false => AuditVerdict::NotProven,
        };
        Report {
            holds: verdict == AuditVerdict::Holds,
            verdict,
            filter: self.options.filter,
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
            findings: listed,
        }
    }
}

/// Describes a chain in which the checkpoint was not found.
fn rolled_back(expected: &ChainHead, found: Option<&ChainSummary>) -> String {
    let ChainHead { chain, file, line, head, .. } = expected;
    let signed = format!(
        "the last checkpoint signed the head {head} of chain {chain} at line {line} of its file {file}"
    );
    match found {
        None => format!("{signed}; the chain is not here: it was removed, or its folder was not given"),
        Some(found) if (found.file, found.line) < (*file, *line) => {
            format!("{signed}; it now ends at line {} of file {}: it was truncated", found.line, found.file)
        }
        Some(_) => {
            format!("{signed}; that head is not there: the chain was rewritten, or the file is missing")
        }
    }
}

#[cfg(test)]
mod tests;
