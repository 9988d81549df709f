//! Report of an audit.

use super::filter::Filter;
use crate::receipt::entry::Role;
use serde::Serialize;
use std::collections::BTreeMap;

/// Maximum findings that are listed; further ones are only counted.
pub const FINDINGS_LISTED_MAX: usize = 1000;

/// Maximum rejected requests that are listed; further ones are only counted.
pub const REJECTIONS_LISTED_MAX: usize = 100;

/// Kind of a finding, in the order of severity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// A request was sent to a region outside its allowed set.
    ResidencyViolation,
    /// An allowed set has a region that its policy does not allow.
    AllowedTooWide,
    /// A region has received a request for which no edge has a receipt.
    ArrivalWithoutAttempt,
    /// A region responded to a request according to the edge, and has no receipt for it.
    AttemptWithoutArrival,
    /// Edge and region have different policies for a request.
    PoliciesDiffer,
    /// A line does not follow from those before it.
    BrokenChain,
    /// The identifier of a receipt does not match its content.
    WrongReceiptId,
    /// A line cannot be parsed.
    Unreadable,
    /// A file is missing between others of its chain.
    MissingFile,
    /// Receipts are missing, as the chain states.
    Gap,
    /// A process ended without closing its chain; its last receipts may be missing.
    UncleanEnd,
    /// An outcome refers to an attempt or arrival that is not in its chain.
    OutcomeWithoutAttempt,
    /// A chain does not contain the head of the last checkpoint: it was rewritten, truncated or removed.
    RolledBack,
    /// A head that was recorded elsewhere is in no chain: the chain was rewritten or truncated.
    UnknownHead,
    /// A receipt that a client holds is in no chain.
    UnknownReceipt,
}

impl Kind {
    /// Returns whether it shows that a request was sent to, or accepted by, a region that its policy does not allow.
    /// The other kinds show that the receipts do not prove where requests were sent.
    pub fn is_violation(self) -> bool {
        match self {
            Kind::ResidencyViolation | Kind::AllowedTooWide => true,
            Kind::ArrivalWithoutAttempt
            | Kind::AttemptWithoutArrival
            | Kind::PoliciesDiffer
            | Kind::BrokenChain
            | Kind::WrongReceiptId
            | Kind::Unreadable
            | Kind::MissingFile
            | Kind::Gap
            | Kind::UncleanEnd
            | Kind::OutcomeWithoutAttempt
            | Kind::RolledBack
            | Kind::UnknownHead
            | Kind::UnknownReceipt => false,
        }
    }

    /// Returns whether it shows that a chain was modified.
    pub fn breaks_a_chain(self) -> bool {
        matches!(
            self,
            Kind::BrokenChain | Kind::Unreadable | Kind::MissingFile | Kind::RolledBack | Kind::UnknownHead
        )
    }
}

/// Result of an audit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum AuditVerdict {
    /// No finding. Requests that a region rejected are not findings.
    Holds,
    /// No residency violation was found, but the receipts do not prove that there was none.
    NotProven,
    /// There is a residency violation ([`Kind::is_violation`]).
    Violated,
}

/// Finding with its position.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Kind of the finding.
    pub kind: Kind,
    /// File; empty if it concerns none.
    pub file: String,
    /// Line in the file, from 1; 0 if it concerns none.
    pub line: u64,
    /// Description.
    pub message: String,
}

/// Summary of one chain.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ChainSummary {
    /// Identifier of the chain.
    pub chain: String,
    /// Writer of the chain.
    pub role: Role,
    /// Region of the writer.
    pub region: String,
    /// Number of files that were read.
    pub files: u32,
    /// Number of entries in them.
    pub entries: u64,
    /// Number of the last file.
    pub file: u32,
    /// Last complete line of that file, from 1.
    pub line: u64,
    /// Head of the chain; record it elsewhere, and the next audit can require it.
    pub head: String,
    /// Whether its writer closed it and has not resumed it.
    pub closed: bool,
    /// Bytes of an incomplete line at its end: it is being written, or its writer has died and not resumed.
    pub unfinished_bytes: u64,
}

/// Report of an audit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Report {
    /// Whether there is no finding.
    pub holds: bool,
    /// Verdict over the findings.
    pub verdict: AuditVerdict,
    /// Selection of the judged receipts. Chains are verified completely in any case.
    pub filter: Filter,
    /// Number of the checkpoint that the chains were compared with.
    pub checkpoint: Option<u64>,
    /// All chains.
    pub chains: Vec<ChainSummary>,
    /// Number of receipts of edges.
    pub attempts: u64,
    /// Number of receipts of regions.
    pub arrivals: u64,
    /// Number of attempts with an arrival.
    pub confirmed: u64,
    /// Number of attempts without a response that never arrived.
    pub never_arrived: u64,
    /// Number of receipts without a counterpart that are so recent that it may still be written.
    pub too_young: u64,
    /// Whether receipts of both ends were available.
    pub both_ends: bool,
    /// Number of receipts that the chains report as missing.
    pub missing: u64,
    /// Number of requests that a region rejected because their policy, or the newest one of their deployment, does not
    /// allow it. No replica saw them: they are not violations.
    pub refused: u64,
    /// Descriptions of the first [`REJECTIONS_LISTED_MAX`] of them.
    pub refusals: Vec<String>,
    /// Number of requests that were rejected because their receipts could not be made durable; they were not forwarded.
    pub rejected: u64,
    /// Number of attempts and arrivals without an outcome: in flight, or their process was killed.
    pub without_outcome: u64,
    /// Number of findings by kind.
    pub counts: BTreeMap<Kind, u64>,
    /// The first [`FINDINGS_LISTED_MAX`] findings.
    pub findings: Vec<Finding>,
}

/// Collector of findings.
#[derive(Debug, Default)]
pub(super) struct Findings {
    pub(super) counts: BTreeMap<Kind, u64>,
    pub(super) listed: Vec<Finding>,
}

impl Findings {
    pub(super) fn add(&mut self, kind: Kind, file: &str, line: u64, message: String) {
        *self.counts.entry(kind).or_default() += 1;
        if self.listed.len() < FINDINGS_LISTED_MAX {
            self.listed.push(Finding { kind, file: file.to_owned(), line, message });
        }
    }
}
