//! Checkpoints: what an audit remembers of the chains, signed with the auditor's key.
//!
//! A chain has no secret, so a process that can write its folder can rewrite or truncate the chain. A checkpoint records
//! where the head of each chain stood when it was audited; the next audit demands that it still stands there. It is
//! signed (HMAC-SHA-256) with a key that the auditor has and the audited has not, so it can be kept beside the receipts.
//!
//! An older checkpoint is signed as well: who can replace the file can take back the last ones. So it is numbered, and an
//! auditor who keeps it within reach of the audited notes its number.

use super::audit::{ChainSummary, Report};
use super::chain::hex;
use super::entry::Role;
use super::hmac::HmacKey;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// The version of the format.
pub const VERSION: u32 = 1;
/// Domain separation: prefix of the signed text, so that no other signature of the same key is valid for a checkpoint.
const DOMAIN: &[u8] = b"meridian receipts checkpoint\n";
/// Prefix of the line with the signature.
const SIGNATURE: &str = "hmac-sha256 ";

/// The auditor's key.
#[derive(Clone)]
pub struct CheckpointKey(HmacKey);

/// The heads of all chains that an audit has read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Checkpoint {
    /// [`VERSION`].
    pub version: u32,
    /// Counts the checkpoints of this file, from 1.
    pub number: u64,
    /// When it was made, in milliseconds since 1970.
    pub at_ms: u64,
    /// Each chain, in the order of their identifiers.
    pub chains: Vec<ChainHead>,
}

/// Where the head of a chain stood.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ChainHead {
    /// The chain.
    pub chain: String,
    /// Writer of the chain.
    pub role: Role,
    /// Beside or in which region.
    pub place: String,
    /// The number of its last file.
    pub file: u32,
    /// The last whole line in it, from 1.
    pub line: u64,
    /// The hash of that line.
    pub head: String,
    /// Whether the chain was closed.
    pub closed: bool,
}

/// Why a text is no checkpoint of the auditor's.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CheckpointProblem {
    /// It is not of the form.
    #[error("it is not a checkpoint: a line of JSON and a line with its signature")]
    Form,
    /// The signature is not that of the key.
    #[error("its signature is not that of this key: it was changed, or made with another key")]
    Signature,
    /// It is signed, and of another version.
    #[error("it cannot be read as version {VERSION}: {0}")]
    Content(String),
}

impl CheckpointKey {
    /// The shortest secret that is taken, in bytes: one that can be guessed signs for everybody.
    pub const SECRET_BYTES_MIN: usize = 16;

    /// The key made from a secret; `None` if that is shorter than [`CheckpointKey::SECRET_BYTES_MIN`].
    pub fn new(secret: &[u8]) -> Option<CheckpointKey> {
        (secret.len() >= CheckpointKey::SECRET_BYTES_MIN).then(|| CheckpointKey(HmacKey::of(secret)))
    }

    fn signature(&self, content: &str) -> String {
        hex(&self.0.tag(&[DOMAIN, content.as_bytes()].concat()))
    }
}

impl Checkpoint {
    /// The checkpoint after an audit that had `previous`; `None` if the audit found a chain that is not the one that was
    /// written. What `previous` says of chains that were archived since stays.
    pub fn after(previous: Option<&Checkpoint>, report: &Report, at_ms: u64) -> Option<Checkpoint> {
        if report.counts.keys().any(|kind| kind.breaks_a_chain()) {
            return None;
        }
        let read: BTreeSet<_> = report.chains.iter().map(|chain| chain.chain.as_str()).collect();
        let archived = previous.iter().flat_map(|previous| &previous.chains);
        let archived = archived.filter(|head| !read.contains(head.chain.as_str())).cloned();
        let mut chains: Vec<_> = report.chains.iter().map(ChainHead::of).chain(archived).collect();
        chains.sort_by(|one, other| one.chain.cmp(&other.chain));
        let number = previous.map_or(1, |previous| previous.number + 1);
        Some(Checkpoint { version: VERSION, number, at_ms, chains })
    }

    /// The text of a checkpoint file: a line of JSON and a line with its signature.
    pub fn signed(&self, key: &CheckpointKey) -> String {
        let content = serde_json::to_string(self).expect("a checkpoint serialises to JSON");
        format!("{content}\n{SIGNATURE}{}\n", key.signature(&content))
    }

    /// Reads the text of a checkpoint file.
    ///
    /// # Errors
    ///
    /// When it is not one that was signed with this key.
    pub fn read(text: &str, key: &CheckpointKey) -> Result<Checkpoint, CheckpointProblem> {
        let (content, rest) = text.split_once('\n').ok_or(CheckpointProblem::Form)?;
        let signature = rest.trim_end().strip_prefix(SIGNATURE).ok_or(CheckpointProblem::Form)?;
        if signature != key.signature(content) {
            return Err(CheckpointProblem::Signature);
        }
        let read = serde_json::from_str::<Checkpoint>(content);
        let read = read.map_err(|error| CheckpointProblem::Content(error.to_string()))?;
        match read.version {
            VERSION => Ok(read),
            other => Err(CheckpointProblem::Content(format!("it is of version {other}"))),
        }
    }
}

impl ChainHead {
    fn of(summary: &ChainSummary) -> ChainHead {
        let ChainSummary { chain, role, place, file, line, head, closed, .. } = summary.clone();
        ChainHead { chain, role, place, file, line, head, closed }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checkpoint() -> Checkpoint {
        let head = ChainHead {
            chain: "0e".to_owned(),
            role: Role::Edge,
            place: "aws/us-east-1".to_owned(),
            file: 2,
            line: 7,
            head: "ab".repeat(32),
            closed: false,
        };
        Checkpoint { version: VERSION, number: 3, at_ms: 9, chains: vec![head] }
    }

    #[test]
    fn only_what_was_signed_with_the_key_is_read() {
        let key = CheckpointKey::new(b"0123456789abcdef").expect("long enough");
        let other = CheckpointKey::new(b"0123456789abcdeg").expect("long enough");
        assert!(CheckpointKey::new(&[1; 15]).is_none());
        let text = checkpoint().signed(&key);
        assert_eq!(Checkpoint::read(&text, &key), Ok(checkpoint()));
        let problem = |text: &str, key| Checkpoint::read(text, key).expect_err("refused");
        assert_eq!(problem(&text, &other), CheckpointProblem::Signature);
        assert_eq!(problem(&text.replace("\"line\":7", "\"line\":6"), &key), CheckpointProblem::Signature);
        for text in ["", "{}", "{}\n", "{}\nabc\n"] {
            assert_eq!(problem(text, &key), CheckpointProblem::Form, "{text}");
        }
        let newer = Checkpoint { version: 2, ..checkpoint() }.signed(&key);
        assert!(matches!(problem(&newer, &key), CheckpointProblem::Content(_)));
    }
}
