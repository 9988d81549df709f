//! What an audit found.

use super::filter::Filter;
use crate::receipt::entry::Role;
use serde::Serialize;
use std::collections::BTreeMap;

/// Findings that are told one by one; those beyond are counted. Who has so many needs no more of them.
pub const FINDINGS_TOLD_MAX: usize = 1000;

/// Refused requests that are listed; those beyond are counted.
pub const REFUSALS_TOLD_MAX: usize = 100;

/// What does not hold. The order is that of how bad it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// A request was sent to a region outside its allowed set.
    ResidencyViolation,
    /// An allowed set has a region that its policy does not permit.
    AllowedTooWide,
    /// A region has received a request that no edge has a receipt for.
    ArrivalWithoutAttempt,
    /// A region answered a request, as its edge says, and has no receipt for it.
    AttemptWithoutArrival,
    /// Edge and region do not agree on the policy under which a request travelled.
    PoliciesDiffer,
    /// A line does not follow from those before it.
    BrokenChain,
    /// A receipt does not say what its identifier commits to.
    WrongReceiptId,
    /// A line cannot be understood.
    Unreadable,
    /// A file that others refer to is not there.
    MissingFile,
    /// Receipts are missing, and the chain says so.
    Gap,
    /// A process ended without a word; what it was about to write is missing.
    UncleanEnd,
    /// An outcome refers to an attempt or arrival that is not in its chain.
    OutcomeWithoutAttempt,
    /// A chain does not contain what the last checkpoint signed: it was rewritten, truncated or removed.
    RolledBack,
    /// A head that was noted elsewhere is in no chain: it was rewritten or cut off.
    UnknownHead,
    /// A receipt that somebody holds is in no chain.
    UnknownReceipt,
}

impl Kind {
    /// Whether it shows that a request was sent to, or accepted by, a region that its policy does not permit. The other
    /// kinds say that the receipts do not prove where requests went.
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

    /// Whether it says that a chain is not the one that was written.
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
pub enum Verdict {
    /// No finding. Requests that a region refused are not findings.
    Holds,
    /// No residency violation was found, but the receipts do not prove that there was none.
    NotProven,
    /// There is a residency violation ([`Kind::is_violation`]).
    Violated,
}

/// Something that does not hold, and where.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// What.
    pub kind: Kind,
    /// The file; empty where none is at fault.
    pub file: String,
    /// The line in it, from 1; 0 where none is at fault.
    pub line: u64,
    /// In words.
    pub message: String,
}

/// One chain.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ChainSummary {
    /// Its identifier.
    pub chain: String,
    /// Who wrote it.
    pub role: Role,
    /// Beside or in which region.
    pub place: String,
    /// Files that were read.
    pub files: u32,
    /// Entries in them.
    pub entries: u64,
    /// The number of the last of them.
    pub file: u32,
    /// The last whole line of that file, from 1.
    pub line: u64,
    /// Its head; note it elsewhere, and the next audit can demand it.
    pub head: String,
    /// Whether its writer ended it and has not gone on.
    pub closed: bool,
    /// Bytes of an unfinished line at its end: it is being written, or its writer died and has not come back.
    pub unfinished_bytes: u64,
}

/// Everything that an audit says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Report {
    /// Whether everything held.
    pub holds: bool,
    /// Verdict over the findings.
    pub verdict: Verdict,
    /// The receipts that were judged; all where nothing was asked for. Chains are checked whole in any case.
    pub filter: Filter,
    /// The number of the checkpoint that the chains were compared with.
    pub checkpoint: Option<u64>,
    /// Every chain.
    pub chains: Vec<ChainSummary>,
    /// Receipts of edges.
    pub attempts: u64,
    /// Receipts of regions.
    pub arrivals: u64,
    /// Attempts that have their arrival.
    pub confirmed: u64,
    /// Attempts that came to nothing and never arrived, as their edges say.
    pub never_arrived: u64,
    /// Receipts without a counterpart that are so young that it may still come.
    pub too_young: u64,
    /// Whether both ends' receipts were there to be compared.
    pub both_ends: bool,
    /// Receipts that chains say are missing.
    pub missing: u64,
    /// Requests that a region refused because their policy, or the newest one of their deployment, does not permit it. No
    /// replica saw them: they are not violations.
    pub refused: u64,
    /// The first [`REFUSALS_TOLD_MAX`] of them, in words.
    pub refusals: Vec<String>,
    /// Requests that were rejected because their receipts could not be made durable; nothing of them was forwarded.
    pub rejected: u64,
    /// Attempts and arrivals whose outcome was not written: still under way, or their process was killed.
    pub without_outcome: u64,
    /// How many findings there are of each kind.
    pub counts: BTreeMap<Kind, u64>,
    /// The first [`FINDINGS_TOLD_MAX`].
    pub findings: Vec<Finding>,
}

/// Findings as they come.
#[derive(Debug, Default)]
pub(super) struct Findings {
    pub(super) counts: BTreeMap<Kind, u64>,
    pub(super) told: Vec<Finding>,
}

impl Findings {
    pub(super) fn add(&mut self, kind: Kind, file: &str, line: u64, message: String) {
        *self.counts.entry(kind).or_default() += 1;
        if self.told.len() < FINDINGS_TOLD_MAX {
            self.told.push(Finding { kind, file: file.to_owned(), line, message });
        }
    }
}
