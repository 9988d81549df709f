//! Receipts: what proves, later and to somebody else, where every request was sent and that it was allowed to be.
//!
//! An edge leaves one receipt for each attempt that it made, a region's door one for each request that arrived
//! (invariant 9, Receipts equal attempts). A receipt holds no text of a client: identifiers, a pseudonym, the policy, the
//! places, the times, the outcome. Receipts are [`entry`]s of a [`chain`], in which each carries the hash of everything
//! before it: one that is changed, left out or added later breaks the chain from there on. [`audit`] reads both ends'
//! files, without any of the processes that wrote them, and says what does not hold.
//!
//! What a chain cannot prove is that nobody rewrote all of it, for it has no secret. Two things outside of it do: the
//! identifier of each receipt of a locked deployment, which its client was given and which commits to what the receipt
//! says, and any head that was noted elsewhere. The audit takes both and demands that they are there; it keeps the heads
//! itself, in a [`checkpoint`] that is signed with the auditor's key.
//!
//! A log with a signature for each line was the other way. It costs 20 µs a line, moves the question to who holds the key
//! (the process that is audited), and still does not show what was never written.

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

/// What the holder of a receipt holds: a digest of what it says.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ReceiptId([u8; 16]);

/// What a [`ReceiptId`] commits to.
#[derive(Clone, Copy, Debug)]
pub struct Essence<'a> {
    /// The chain that the receipt is in.
    pub chain: &'a str,
    /// The request.
    pub request: &'a str,
    /// Which attempt at it, from 1.
    pub attempt: u32,
    /// Where it was sent.
    pub region: &'a str,
    /// The policy under which it travelled.
    pub residency: &'a str,
    /// When, in milliseconds since 1970.
    pub at_ms: u64,
    /// The key of the attempt; absent in version 1. With it no two attempts have the same identifier.
    pub key: Option<AttemptKey>,
}

impl Essence<'_> {
    /// The identifier of a receipt that says so. Each part stands with its length, so that no two essences read the same.
    pub fn id(&self) -> ReceiptId {
        let Essence { chain, request, attempt, region, residency, at_ms, key } = self;
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
    /// As it is told, in hexadecimal.
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
    fn an_identifier_changes_with_everything_that_it_commits_to() {
        let essence = Essence {
            chain: "c",
            request: "r",
            attempt: 1,
            region: "a/b",
            residency: "eu",
            at_ms: 7,
            key: None,
        };
        let id = essence.id();
        assert_eq!(id.to_string().len(), 32);
        assert_eq!(id, essence.id());
        for other in [
            Essence { chain: "d", ..essence },
            Essence { request: "s", ..essence },
            Essence { attempt: 2, ..essence },
            Essence { region: "a/c", ..essence },
            Essence { residency: "us", ..essence },
            Essence { at_ms: 8, ..essence },
            Essence { chain: "cr", request: "", ..essence },
            Essence { key: Some(AttemptKey { gateway: 0, number: 0 }), ..essence },
        ] {
            assert_ne!(id, other.id(), "{other:?}");
        }
    }
}
