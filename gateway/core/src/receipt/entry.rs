//! Entries of a receipts file, versions 1 and 2.
//!
//! A request for which a receipt is required leaves two entries at each end: [`Entry::Sent`] or [`Entry::Received`], which
//! is durable before the request is forwarded, and [`Entry::Outcome`] when it is over. Every other request leaves one,
//! [`Entry::Attempt`] or [`Entry::Arrival`], when it is over. Version 2 added the first three, [`Entry::Rejected`] and the
//! key of an attempt; files of version 1 are read as before.
//!
//! Each file stands for itself: its first entry names the chain, the number of the file in it and the head before it, and
//! a policy is written out in the file that refers to it. So files can be rotated, archived and audited one by one.

use serde::{Deserialize, Serialize};
use std::borrow::Cow;

/// The version that is written.
pub const VERSION: u32 = 2;
/// The oldest version that is read.
pub const VERSION_MIN: u32 = 1;

/// One entry.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Entry<'a> {
    /// The first of a file.
    File {
        /// From [`VERSION_MIN`] to [`VERSION`].
        version: u32,
        /// Which chain.
        #[serde(borrow)]
        chain: Cow<'a, str>,
        /// Who writes it.
        role: Role,
        /// The region beside or in which it is written.
        #[serde(borrow)]
        place: Cow<'a, str>,
        /// Which file of the chain, from 1.
        number: u32,
        /// The head of the chain before this file; 64 zeros before the first.
        #[serde(borrow)]
        before: Cow<'a, str>,
        /// When, in milliseconds since 1970, as everywhere here.
        at_ms: u64,
    },
    /// The process that wrote the chain ended, and another goes on with it.
    Resumed {
        /// When.
        at_ms: u64,
        /// Whether it ended with [`Entry::Closed`]. If not, it may have been about to write more.
        clean: bool,
        /// Bytes of a half-written last line, which were cut off.
        torn_bytes: u64,
    },
    /// A policy that attempts of the same file refer to, so that it is not written out with each.
    #[serde(rename = "policy", alias = "law")]
    Policy {
        /// Its number in this file.
        #[serde(alias = "law")]
        policy: u32,
        /// The policy: the deployment's, narrowed by the tenant's and the request's.
        #[serde(borrow)]
        residency: Cow<'a, str>,
        /// The regions that could see requests under it.
        allowed: Vec<Cow<'a, str>>,
    },
    /// An edge sent a request to a region.
    Attempt {
        /// [`super::ReceiptId`].
        #[serde(borrow)]
        id: Cow<'a, str>,
        /// The request.
        #[serde(borrow)]
        request: Cow<'a, str>,
        /// Which attempt at it, from 1.
        attempt: u32,
        /// The pseudonym of its tenant.
        #[serde(borrow)]
        tenant: Cow<'a, str>,
        /// What it was for.
        #[serde(borrow)]
        deployment: Cow<'a, str>,
        /// Of the route table by which it was decided.
        #[serde(borrow)]
        generation: Cow<'a, str>,
        /// The policy under which it travelled.
        #[serde(alias = "law")]
        policy: u32,
        /// The place in which TLS ended; absent if that was not this process.
        #[serde(borrow)]
        tls: Option<Cow<'a, str>>,
        /// Where it was sent.
        #[serde(borrow)]
        region: Cow<'a, str>,
        /// When.
        at_ms: u64,
        /// Duration in microseconds.
        took_us: u64,
        /// Why: [`crate::trail::Cause::as_str`].
        #[serde(borrow)]
        cause: Cow<'a, str>,
        /// How it ended: [`crate::words::Ended::as_str`].
        #[serde(borrow)]
        end: Cow<'a, str>,
        /// [`super::AttemptKey`]; absent in version 1.
        #[serde(borrow, default, skip_serializing_if = "Option::is_none")]
        key: Option<Cow<'a, str>>,
    },
    /// A gateway is about to send a request to a region: durable before the first byte of it leaves. The fields are those
    /// of [`Entry::Attempt`].
    Sent {
        /// [`super::ReceiptId`].
        #[serde(borrow)]
        id: Cow<'a, str>,
        /// The number of this entry among those of the process that writes it; its [`Entry::Outcome`] refers to it.
        number: u64,
        /// The request.
        #[serde(borrow)]
        request: Cow<'a, str>,
        /// Which attempt at it, from 1.
        attempt: u32,
        /// The pseudonym of its tenant.
        #[serde(borrow)]
        tenant: Cow<'a, str>,
        /// The deployment that it is for.
        #[serde(borrow)]
        deployment: Cow<'a, str>,
        /// The generation of the route table by which it was decided.
        #[serde(borrow)]
        generation: Cow<'a, str>,
        /// The number of the residency policy under which it is sent.
        #[serde(alias = "law")]
        policy: u32,
        /// The place in which TLS ended; absent if that was not this process.
        #[serde(borrow)]
        tls: Option<Cow<'a, str>>,
        /// The region that it is sent to.
        #[serde(borrow)]
        region: Cow<'a, str>,
        /// The time at which the attempt began.
        at_ms: u64,
        /// Why: [`crate::trail::Cause::as_str`].
        #[serde(borrow)]
        cause: Cow<'a, str>,
        /// [`super::AttemptKey`].
        #[serde(borrow)]
        key: Cow<'a, str>,
    },
    /// A request arrived at the door of a region.
    Arrival {
        /// The request.
        #[serde(borrow)]
        request: Cow<'a, str>,
        /// Which attempt at it; 0 if whoever sent it did not say.
        attempt: u32,
        /// The pseudonym of its tenant, if it was named.
        #[serde(borrow)]
        tenant: Option<Cow<'a, str>>,
        /// What it was for, if that could be read.
        #[serde(borrow)]
        deployment: Option<Cow<'a, str>>,
        /// The policy under which it travelled.
        #[serde(borrow)]
        residency: Cow<'a, str>,
        /// When.
        at_ms: u64,
        /// Duration in microseconds.
        took_us: u64,
        /// How it ended: ok, an error code, or unfinished.
        #[serde(borrow)]
        outcome: Cow<'a, str>,
        /// [`super::AttemptKey`]; absent in version 1, and if the sender did not give one.
        #[serde(borrow, default, skip_serializing_if = "Option::is_none")]
        key: Option<Cow<'a, str>>,
    },
    /// A region has accepted a request and is about to forward it to a replica: durable before the first byte of it
    /// leaves. The fields are those of [`Entry::Arrival`].
    Received {
        /// The number of this entry among those of the process that writes it; its [`Entry::Outcome`] refers to it.
        number: u64,
        /// The request.
        #[serde(borrow)]
        request: Cow<'a, str>,
        /// Which attempt at it; 0 if the sender did not say.
        attempt: u32,
        /// The pseudonym of its tenant, if it was named.
        #[serde(borrow)]
        tenant: Option<Cow<'a, str>>,
        /// The deployment that it is for, if that could be read.
        #[serde(borrow)]
        deployment: Option<Cow<'a, str>>,
        /// The policy under which it came.
        #[serde(borrow)]
        residency: Cow<'a, str>,
        /// The time at which it arrived.
        at_ms: u64,
        /// [`super::AttemptKey`]; absent if the sender did not give one.
        #[serde(borrow, default, skip_serializing_if = "Option::is_none")]
        key: Option<Cow<'a, str>>,
    },
    /// The request of a [`Entry::Sent`] or [`Entry::Received`] is over.
    Outcome {
        /// The number of that entry.
        number: u64,
        /// Duration in microseconds.
        took_us: u64,
        /// Outcome, in the words of [`Entry::Attempt`] or [`Entry::Arrival`].
        #[serde(borrow)]
        end: Cow<'a, str>,
    },
    /// Requests were rejected because their receipts could not be made durable. Nothing of them was forwarded.
    Rejected {
        /// Number of receipts.
        requests: u64,
        /// The time of the first.
        since_ms: u64,
        /// The time at which this was written.
        at_ms: u64,
    },
    /// Receipts are missing here.
    Gap {
        /// Number of receipts.
        missing: u64,
        /// Why.
        why: Why,
        /// When the first of them was lost.
        since_ms: u64,
        /// When this was written.
        at_ms: u64,
    },
    /// The process that writes the chain ends, and has written everything.
    Closed {
        /// When.
        at_ms: u64,
    },
}

/// Who writes a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// An edge: its receipts are attempts.
    Edge,
    /// A region's door: its receipts are arrivals.
    Spoke,
}

/// Why receipts are missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Why {
    /// They came faster than the disk took them.
    QueueFull,
    /// The disk did not take them.
    Disk,
    /// The disk took them and then could not say that it has them.
    Unsynced,
}
