//! Receipts: evidence for third parties of where every request was sent and that it was allowed.
//!
//! An edge writes one receipt for each attempt, a region's ingress one for each request that arrived (invariant 9,
//! Receipts equal attempts). A receipt holds no text of a client: identifiers, a pseudonym, the policy, the regions,
//! the times, the outcome. Receipts are [`entry`]s of a [`chain`], in which each carries the hash of everything before
//! it: a receipt that is changed, removed or added later breaks the chain from there on. [`audit`] reads the files of
//! both ends, without any of the processes that wrote them, and reports violations.
//!
//! A chain has no secret, so it cannot prove that it was not rewritten as a whole. Two things outside of it do: the
//! identifier of each receipt of a locked deployment, which its client was given and which commits to the content of
//! the receipt, and any head that was recorded elsewhere. The audit accepts both and requires that they are in the
//! chain; it records the heads itself, in a [`checkpoint`] that is signed with the auditor's key.
//!
//! The alternative was a log with a signature for each line. It costs 20 µs a line, puts the key into the process that
//! is audited, and still does not show what was never written.

pub mod audit;
pub mod chain;
pub mod checkpoint;
pub mod entry;
mod hmac;
mod key;
mod pseudonym;

pub use key::AttemptKey;
pub use pseudonym::PseudonymKey;

use sha2::{Digest as _, Sha256};
use std::fmt;

/// Identifier of a receipt: a digest of its content.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ReceiptId([u8; 16]);

/// Content that a [`ReceiptId`] commits to.
#[derive(Clone, Copy, Debug)]
pub struct ReceiptContent<'a> {
    /// Chain of the receipt.
    pub chain: &'a str,
    /// Identifier of the request.
    pub request: &'a str,
    /// Number of the attempt, from 1.
    pub attempt: u32,
    /// Region that it was sent to.
    pub region: &'a str,
    /// Residency policy of the request.
    pub residency: &'a str,
    /// Time of the attempt in milliseconds since 1970.
    pub at_ms: u64,
    /// Key of the attempt; absent in version 1. With it no two attempts have the same identifier.
    pub key: Option<AttemptKey>,
}

impl ReceiptContent<'_> {
    /// Returns the identifier. Each part is hashed with its length, so that different contents have different hash
    /// inputs.
    pub fn id(&self) -> ReceiptId {
        let ReceiptContent { chain, request, attempt, region, residency, at_ms, key } = self;
        let mut hash = Sha256::new();
        for part in [chain, request, region, residency] {
            hash.update((part.len() as u64).to_be_bytes());
            hash.update(part.as_bytes());
        }
        hash.update(attempt.to_be_bytes());
        hash.update(at_ms.to_be_bytes());
        if let Some(AttemptKey { gateway, number }) = key {
            hash.update(gateway.to_be_bytes());
            hash.update(number.to_be_bytes());
        }
        let digest: [u8; 32] = hash.finalize().into();
        let (half, _) = digest.split_at(16);
        ReceiptId(half.try_into().expect("half of 32 is 16"))
    }
}

impl ReceiptId {
    /// Returns the identifier in hexadecimal.
    pub fn text(&self) -> String {
        chain::hex(&self.0)
    }
}

impl fmt::Display for ReceiptId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text())
    }
}

impl fmt::Debug for ReceiptId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_identifier_changes_with_each_part_of_the_content() {
        let content = ReceiptContent {
            chain: "c",
            request: "r",
            attempt: 1,
            region: "a/b",
            residency: "eu",
            at_ms: 7,
            key: None,
        };
        let id = content.id();
        assert_eq!(id.to_string().len(), 32);
        assert_eq!(id, content.id());
        for other in [
            ReceiptContent { chain: "d", ..content },
            ReceiptContent { request: "s", ..content },
            ReceiptContent { attempt: 2, ..content },
            ReceiptContent { region: "a/c", ..content },
            ReceiptContent { residency: "us", ..content },
            ReceiptContent { at_ms: 8, ..content },
            ReceiptContent { chain: "cr", request: "", ..content },
            ReceiptContent { key: Some(AttemptKey { gateway: 0, number: 0 }), ..content },
        ] {
            assert_ne!(id, other.id(), "{other:?}");
        }
    }
}
