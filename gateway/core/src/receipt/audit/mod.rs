//! The audit: do these receipts prove that every request stayed where it was allowed to be?
//!
//! It is given files of chains, in order, and the catalogue, and nothing else: neither the processes nor their
//! configuration. It asks, of every line, whether it follows from the one before; of every attempt, whether its region is
//! in its allowed set, and of that set whether its policy permits it in the light of the catalogue; and of every attempt
//! and arrival, whether the other end has its counterpart. Whatever does not hold is a finding, and so is every gap: an
//! audit that cannot see does not say that all is well.

mod join;
mod report;

pub use report::{ChainSummary, FINDINGS_TOLD_MAX, Finding, Kind, Report};

use super::Essence;
use super::chain::Head;
use super::entry::{EntryV1, Role, VERSION};
use crate::words::{Ended, NOT_RESIDENT_HERE};
use join::{Expect, Join, Key, Side};
use regions::catalogue::Catalogue;
use regions::residency::ResidencyPolicy;
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
    attempts: u64,
    arrivals: u64,
    missing: u64,
    newest_ms: u64,
}

#[derive(Debug)]
struct Chain {
    summary: ChainSummary,
    head: Head,
    number: u32,
}

/// A law of a file.
struct Law {
    residency: String,
    allowed: BTreeSet<String>,
}

/// The file that is being read.
struct At<'a> {
    file: &'a str,
    line: u64,
    chain: String,
    laws: BTreeMap<u32, Law>,
}

impl<'a> Audit<'a> {
    /// An audit in the light of `catalogue`.
    pub fn new(catalogue: &'a Catalogue, demands: Demands) -> Audit<'a> {
        Audit {
            catalogue,
            demands,
            chains: BTreeMap::new(),
            join: Join::default(),
            findings: Findings::default(),
            permitted: BTreeMap::new(),
            attempts: 0,
            arrivals: 0,
            missing: 0,
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
                "it does not begin as a file of receipts".to_owned(),
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
        chain.summary.unfinished_bytes = unfinished.len() as u64;
    }

    /// Reads the first line of a file, which says which it is.
    fn begin<'f>(&mut self, name: &'f str, line: &[u8]) -> Option<(Head, At<'f>)> {
        let entry = super::chain::entry_of(line)?;
        let EntryV1::File { version, chain, role, place, number, before, at_ms } = entry else { return None };
        let mut head: Head = before.parse().ok()?;
        if version != VERSION {
            return None;
        }
        self.newest_ms = self.newest_ms.max(at_ms);
        let known = self.chains.get(&*chain);
        let (expected, continues) =
            known.map_or((1, Head::default()), |known| (known.number + 1, known.head));
        if known.is_none() && self.demands.partial {
            // Whatever was before it was archived.
        } else if number != expected {
            let message = format!("it is file {number} of chain {chain}, and file {expected} is not here");
            self.findings.add(Kind::MissingFile, name, 1, message);
        } else if head != continues {
            let message = "it does not continue from the file before it".to_owned();
            self.findings.add(Kind::BrokenChain, name, 1, message);
        }
        if let Some(problem) = head.read(line).1 {
            self.findings.add(Kind::BrokenChain, name, 1, problem.to_string());
        }
        self.demands.heads.remove(&head);
        let fresh = Chain {
            summary: ChainSummary {
                chain: chain.to_string(),
                role,
                place: place.to_string(),
                files: 0,
                entries: 0,
                head: String::new(),
                closed: false,
                unfinished_bytes: 0,
            },
            head,
            number,
        };
        let chain = chain.into_owned();
        self.chains.entry(chain.clone()).or_insert(fresh).number = number;
        Some((head, At { file: name, line: 1, chain, laws: BTreeMap::new() }))
    }

    fn line(&mut self, line: &[u8], head: &mut Head, at: &mut At<'_>) {
        let (entry, problem) = head.read(line);
        self.demands.heads.remove(head);
        if let Some(problem) = problem {
            let kind = match problem {
                super::chain::LineProblem::Hash => Kind::BrokenChain,
                super::chain::LineProblem::Form | super::chain::LineProblem::Entry(_) => Kind::Unreadable,
            };
            self.findings.add(kind, at.file, at.line, problem.to_string());
        }
        if let Some(entry) = entry {
            self.entry(entry, at);
        }
    }

    fn entry(&mut self, entry: EntryV1<'_>, at: &mut At<'_>) {
        let chain = self.chains.get_mut(&at.chain).expect("a file begins before its lines");
        chain.summary.closed = false;
        match entry {
            EntryV1::File { .. } => self.note(Kind::Unreadable, at, "a file begins within a file".to_owned()),
            EntryV1::Closed { at_ms } => {
                chain.summary.closed = true;
                self.newest_ms = self.newest_ms.max(at_ms);
            }
            EntryV1::Resumed { at_ms, clean, torn_bytes } => {
                self.newest_ms = self.newest_ms.max(at_ms);
                if !clean {
                    let message = format!(
                        "its writer ended without a word ({torn_bytes} bytes of a torn line were cut off): receipts of \
                         its last moments may be missing"
                    );
                    self.note(Kind::UncleanEnd, at, message);
                }
            }
            EntryV1::Gap { missing, why, since_ms, at_ms } => {
                self.newest_ms = self.newest_ms.max(at_ms);
                self.missing += missing;
                let message = format!("{missing} receipts are missing ({why:?}) from {since_ms} to {at_ms}");
                self.note(Kind::Gap, at, message);
            }
            EntryV1::Law { law, residency, allowed } => {
                let allowed: BTreeSet<String> = allowed.iter().map(|region| region.to_string()).collect();
                self.law(&residency, &allowed, at);
                at.laws.insert(law, Law { residency: residency.into_owned(), allowed });
            }
            EntryV1::Attempt { .. } => self.attempt(&entry, at),
            EntryV1::Arrival { .. } => self.arrival(&entry, at),
        }
    }

    /// Does the allowed set follow from the policy and the catalogue?
    fn law(&mut self, residency: &str, allowed: &BTreeSet<String>, at: &At<'_>) {
        let Some(permitted) = self.permitted(residency) else {
            let message = format!("'{residency}' is no residency policy");
            return self.note(Kind::Unreadable, at, message);
        };
        for region in allowed {
            let index = region.parse().ok().and_then(|id| self.catalogue.index_of(&id));
            if !index.is_some_and(|index| permitted.contains(index)) {
                let message = format!("'{residency}' does not permit {region}, which it lists as allowed");
                self.note(Kind::AllowedTooWide, at, message);
            }
        }
    }

    fn attempt(&mut self, entry: &EntryV1<'_>, at: &At<'_>) {
        let EntryV1::Attempt { id, request, attempt, law, region, at_ms, took_us, end, .. } = entry else {
            unreachable!("called with an attempt");
        };
        self.attempts += 1;
        let Some(Law { residency, allowed }) = at.laws.get(law) else {
            return self.note(Kind::Unreadable, at, format!("there is no law {law} before it in this file"));
        };
        if !allowed.contains(&**region) {
            let message = format!(
                "request {request}, attempt {attempt}, was sent to {region}, which '{residency}' does not allow"
            );
            self.findings.add(Kind::Unlawful, at.file, at.line, message);
        }
        let essence =
            Essence { chain: &at.chain, request, attempt: *attempt, region, residency, at_ms: *at_ms };
        if essence.id().to_string() != **id {
            let message = format!("receipt {id} does not say what it committed to");
            self.findings.add(Kind::WrongReceiptId, at.file, at.line, message);
        }
        self.demands.receipts.remove(&**id);
        let until_ms = at_ms + took_us / 1000;
        self.newest_ms = self.newest_ms.max(until_ms);
        let side = match Ended::parse(end) {
            Some(end) if end.was_answered() => Side::Answered,
            Some(_) => Side::Unanswered,
            None => return self.note(Kind::Unreadable, at, format!("'{end}' is no end of an attempt")),
        };
        let key = Key { request: (&**request).into(), attempt: *attempt, region: (&**region).into() };
        self.join.add(key, side, until_ms, residency);
    }

    fn arrival(&mut self, entry: &EntryV1<'_>, at: &At<'_>) {
        let EntryV1::Arrival { request, attempt, residency, at_ms, took_us, outcome, .. } = entry else {
            unreachable!("called with an arrival");
        };
        self.arrivals += 1;
        let until_ms = at_ms + took_us / 1000;
        self.newest_ms = self.newest_ms.max(until_ms);
        let place = self.chains[&at.chain].summary.place.clone();
        let here = place.parse().ok().and_then(|id| self.catalogue.index_of(&id));
        let lawful =
            self.permitted(residency).zip(here).is_some_and(|(permitted, here)| permitted.contains(here));
        if **outcome == *NOT_RESIDENT_HERE {
            let message =
                format!("request {request}, attempt {attempt}, came under '{residency}' and was refused");
            self.note(Kind::RefusedAtTheDoor, at, message);
        } else if !lawful {
            let message = format!(
                "request {request}, attempt {attempt}, was taken in {place}, which '{residency}' does not allow"
            );
            self.note(Kind::Unlawful, at, message);
        }
        let key = Key { request: (&**request).into(), attempt: *attempt, region: place.into() };
        self.join.add(key, Side::Arrived, until_ms, residency);
    }

    fn permitted(&mut self, residency: &str) -> Option<RegionSet> {
        if let Some(known) = self.permitted.get(residency) {
            return *known;
        }
        let policy = residency.parse::<ResidencyPolicy>().ok();
        let permitted = policy.map(|policy| policy.permitted(self.catalogue));
        self.permitted.insert(residency.to_owned(), permitted);
        permitted
    }

    fn note(&mut self, kind: Kind, at: &At<'_>, message: String) {
        self.findings.add(kind, at.file, at.line, message);
    }

    /// Everything was read: what holds?
    pub fn finish(mut self) -> Report {
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
        let Findings { counts, mut told } = self.findings;
        told.sort_by_key(|finding| finding.kind);
        Report {
            holds: counts.is_empty(),
            chains,
            attempts: self.attempts,
            arrivals: self.arrivals,
            confirmed: joined.confirmed,
            never_arrived: joined.never_arrived,
            too_young: joined.too_young,
            both_ends,
            missing: self.missing,
            counts,
            findings: told,
        }
    }
}

#[cfg(test)]
mod tests;
