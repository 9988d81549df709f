//! Entries of a receipts file, versions 1 and 2.
//!
//! A request for which a receipt is required has two entries at each end: [`Entry::Sent`] or [`Entry::Received`], which
//! is durable before the request is forwarded, and [`Entry::Outcome`] at its end. Every other request has one,
//! [`Entry::Attempt`] or [`Entry::Arrival`], at its end. Version 2 added the first three, [`Entry::Rejected`] and the
//! key of an attempt; files of version 1 are still read.
//!
//! Each file is self-contained: its first entry names the chain, the number of the file in it and the head before it,
//! and a policy is defined in the file that refers to it. So files can be rotated, archived and audited one by one.

use serde::{Deserialize, Serialize};
use std::borrow::Cow;

/// Version that is written.
pub const VERSION: u32 = 2;
/// Oldest version that is read.
pub const VERSION_MIN: u32 = 1;

/// Entry of a receipts file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Entry<'a> {
    /// First entry of a file.
    File {
        /// From [`VERSION_MIN`] to [`VERSION`].
        version: u32,
        /// Identifier of the chain.
        #[serde(borrow)]
        chain: Cow<'a, str>,
        /// Writer of the chain.
        role: Role,
        /// Region of the writer; `place` in older files.
        #[serde(borrow, alias = "place")]
        region: Cow<'a, str>,
        /// Number of the file in the chain, from 1.
        number: u32,
        /// Head of the chain before this file; 64 zeros before the first.
        #[serde(borrow)]
        before: Cow<'a, str>,
        /// Time in milliseconds since 1970, as in all entries.
        at_ms: u64,
    },
    /// A new process continues the chain of one that ended.
    Resumed {
        /// Time.
        at_ms: u64,
        /// Whether the chain ended with [`Entry::Closed`]. If not, receipts may be missing.
        clean: bool,
        /// Bytes of an incomplete last line that were truncated.
        torn_bytes: u64,
    },
    /// Policy that attempts of the same file refer to, so that it is not repeated in each.
    #[serde(rename = "policy", alias = "law")]
    Policy {
        /// Number of the policy in this file.
        #[serde(alias = "law")]
        policy: u32,
        /// Residency policy: the deployment's, narrowed by the tenant's and the request's.
        #[serde(borrow)]
        residency: Cow<'a, str>,
        /// Regions that could see requests under it.
        allowed: Vec<Cow<'a, str>>,
    },
    /// An edge sent a request to a region.
    Attempt {
        /// [`super::ReceiptId`].
        #[serde(borrow)]
        id: Cow<'a, str>,
        /// Identifier of the request.
        #[serde(borrow)]
        request: Cow<'a, str>,
        /// Number of the attempt, from 1.
        attempt: u32,
        /// Pseudonym of the tenant.
        #[serde(borrow)]
        tenant: Cow<'a, str>,
        /// Requested deployment.
        #[serde(borrow)]
        deployment: Cow<'a, str>,
        /// Generation of the route table of the decision.
        #[serde(borrow)]
        generation: Cow<'a, str>,
        /// Number of the residency policy.
        #[serde(alias = "law")]
        policy: u32,
        /// Region in which TLS was terminated; absent if not by this process.
        #[serde(borrow)]
        tls: Option<Cow<'a, str>>,
        /// Region that it was sent to.
        #[serde(borrow)]
        region: Cow<'a, str>,
        /// Start of the attempt.
        at_ms: u64,
        /// Duration in microseconds.
        took_us: u64,
        /// Cause of the attempt: [`crate::trail::AttemptCause::as_str`].
        #[serde(borrow)]
        cause: Cow<'a, str>,
        /// Result of the attempt: [`crate::labels::AttemptResult::as_str`].
        #[serde(borrow)]
        end: Cow<'a, str>,
        /// [`super::AttemptKey`]; absent in version 1.
        #[serde(borrow, default, skip_serializing_if = "Option::is_none")]
        key: Option<Cow<'a, str>>,
    },
    /// A gateway is about to send a request to a region: durable before the first byte is sent. The fields are those of
    /// [`Entry::Attempt`].
    Sent {
        /// [`super::ReceiptId`].
        #[serde(borrow)]
        id: Cow<'a, str>,
        /// Number of this entry among those of the writing process; its [`Entry::Outcome`] refers to it.
        number: u64,
        /// Identifier of the request.
        #[serde(borrow)]
        request: Cow<'a, str>,
        /// Number of the attempt, from 1.
        attempt: u32,
        /// Pseudonym of the tenant.
        #[serde(borrow)]
        tenant: Cow<'a, str>,
        /// Requested deployment.
        #[serde(borrow)]
        deployment: Cow<'a, str>,
        /// Generation of the route table of the decision.
        #[serde(borrow)]
        generation: Cow<'a, str>,
        /// Number of the residency policy.
        #[serde(alias = "law")]
        policy: u32,
        /// Region in which TLS was terminated; absent if not by this process.
        #[serde(borrow)]
        tls: Option<Cow<'a, str>>,
        /// Region that it is sent to.
        #[serde(borrow)]
        region: Cow<'a, str>,
        /// Start of the attempt.
        at_ms: u64,
        /// Cause of the attempt: [`crate::trail::AttemptCause::as_str`].
        #[serde(borrow)]
        cause: Cow<'a, str>,
        /// [`super::AttemptKey`].
        #[serde(borrow)]
        key: Cow<'a, str>,
    },
    /// A request arrived at the ingress of a region.
    Arrival {
        /// Identifier of the request.
        #[serde(borrow)]
        request: Cow<'a, str>,
        /// Number of the attempt; 0 if the sender did not state it.
        attempt: u32,
        /// Pseudonym of the tenant, if it was stated.
        #[serde(borrow)]
        tenant: Option<Cow<'a, str>>,
        /// Requested deployment, if it could be parsed.
        #[serde(borrow)]
        deployment: Option<Cow<'a, str>>,
        /// Residency policy of the request.
        #[serde(borrow)]
        residency: Cow<'a, str>,
        /// Time of the arrival.
        at_ms: u64,
        /// Duration in microseconds.
        took_us: u64,
        /// Outcome: `ok`, an error code, or `unfinished`.
        #[serde(borrow)]
        outcome: Cow<'a, str>,
        /// [`super::AttemptKey`]; absent in version 1, and if the sender did not give one.
        #[serde(borrow, default, skip_serializing_if = "Option::is_none")]
        key: Option<Cow<'a, str>>,
    },
    /// A region has accepted a request and is about to forward it to a replica: durable before the first byte is sent.
    /// The fields are those of [`Entry::Arrival`].
    Received {
        /// Number of this entry among those of the writing process; its [`Entry::Outcome`] refers to it.
        number: u64,
        /// Identifier of the request.
        #[serde(borrow)]
        request: Cow<'a, str>,
        /// Number of the attempt; 0 if the sender did not state it.
        attempt: u32,
        /// Pseudonym of the tenant, if it was stated.
        #[serde(borrow)]
        tenant: Option<Cow<'a, str>>,
        /// Requested deployment, if it could be parsed.
        #[serde(borrow)]
        deployment: Option<Cow<'a, str>>,
        /// Residency policy of the request.
        #[serde(borrow)]
        residency: Cow<'a, str>,
        /// Time of the arrival.
        at_ms: u64,
        /// [`super::AttemptKey`]; absent if the sender did not give one.
        #[serde(borrow, default, skip_serializing_if = "Option::is_none")]
        key: Option<Cow<'a, str>>,
    },
    /// End of the request of a [`Entry::Sent`] or [`Entry::Received`].
    Outcome {
        /// Number of that entry.
        number: u64,
        /// Duration in microseconds.
        took_us: u64,
        /// Result as in [`Entry::Attempt`], or outcome as in [`Entry::Arrival`].
        #[serde(borrow)]
        end: Cow<'a, str>,
    },
    /// Requests were rejected because their receipts could not be made durable. They were not forwarded.
    Rejected {
        /// Number of receipts.
        requests: u64,
        /// Time of the first one.
        since_ms: u64,
        /// Time of this entry.
        at_ms: u64,
    },
    /// Receipts are missing here.
    Gap {
        /// Number of receipts.
        missing: u64,
        /// Reason for the gap; `why` in older files.
        #[serde(alias = "why")]
        reason: GapReason,
        /// Time of the first missing receipt.
        since_ms: u64,
        /// Time of this entry.
        at_ms: u64,
    },
    /// The writing process ends, and has written all receipts.
    Closed {
        /// Time.
        at_ms: u64,
    },
}

/// Writer of a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// An edge: its receipts are attempts.
    Edge,
    /// The ingress of a region: its receipts are arrivals.
    Spoke,
}

/// Reason for missing receipts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GapReason {
    /// The queue of the writer was full.
    QueueFull,
    /// The disk rejected the write.
    Disk,
    /// The write succeeded and the fsync failed.
    Unsynced,
}
