//! What a line of a receipts file says, version 1.
//!
//! Each file stands for itself: its first entry names the chain, the number of the file in it and the head before it, and
//! a law is written out in the file that refers to it. So files can be rotated, archived and audited one by one.

use serde::{Deserialize, Serialize};
use std::borrow::Cow;

/// The version of everything here.
pub const VERSION: u32 = 1;

/// One entry.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum EntryV1<'a> {
    /// The first of a file.
    File {
        /// 1.
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
        /// Whether it ended with [`EntryV1::Closed`]. If not, it may have been about to write more.
        clean: bool,
        /// Bytes of a half-written last line, which were cut off.
        torn_bytes: u64,
    },
    /// A law that attempts of the same file refer to, so that it is not written out with each.
    Law {
        /// Its number in this file.
        law: u32,
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
        /// The law under which it travelled.
        law: u32,
        /// The place in which TLS ended; absent if that was not this process.
        #[serde(borrow)]
        tls: Option<Cow<'a, str>>,
        /// Where it was sent.
        #[serde(borrow)]
        region: Cow<'a, str>,
        /// When.
        at_ms: u64,
        /// How long it took.
        took_us: u64,
        /// Why: [`crate::trail::Cause::as_str`].
        #[serde(borrow)]
        cause: Cow<'a, str>,
        /// How it ended: [`crate::words::Ended::as_str`].
        #[serde(borrow)]
        end: Cow<'a, str>,
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
        /// How long it took.
        took_us: u64,
        /// How it ended: ok, an error code, or unfinished.
        #[serde(borrow)]
        outcome: Cow<'a, str>,
    },
    /// Receipts are missing here.
    Gap {
        /// How many.
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
