//! Checkpoints: heads of the audited chains, signed with the auditor's key.
//!
//! A chain has no secret, so a process that can write its folder can rewrite or truncate the chain. A checkpoint
//! records the position of each chain's head at the time of an audit; the next audit requires that it is still there.
//! It is signed (HMAC-SHA-256) with a key that only the auditor has, so it can be stored beside the receipts.
//!
//! An older checkpoint has a valid signature as well, so replacing the file can revert the last ones. So it is
//! numbered, and an auditor whose file the audited process can replace has to record its number.

use super::audit::report::{ChainSummary, Report};
use super::chain::hex;
use super::entry::Role;
use super::hmac::{self, HmacKey};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// Version of the format.
pub const VERSION: u32 = 1;
/// Domain separation: prefix of the signed text, so that no other signature of the same key is valid for a checkpoint.
const DOMAIN: &[u8] = b"meridian receipts checkpoint\n";
/// Prefix of the line with the signature.
const SIGNATURE: &str = "hmac-sha256 ";

/// Key of the auditor.
#[derive(Clone)]
pub struct CheckpointKey(HmacKey);

/// Heads of all chains that an audit has read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AuditCheckpoint {
    /// [`VERSION`].
    pub version: u32,
    /// Number of the checkpoint in this file, from 1.
    pub number: u64,
    /// Time of the audit, in milliseconds since 1970.
    pub at_ms: u64,
    /// Heads of the chains, in the order of their identifiers.
    pub chains: Vec<ChainHead>,
}

/// Position of the head of a chain.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ChainHead {
    /// Identifier of the chain.
    pub chain: String,
    /// Writer of the chain.
    pub role: Role,
    /// Region of the writer.
    #[serde(alias = "place")]
    pub region: String,
    /// Number of its last file.
    pub file: u32,
    /// Last complete line in it, from 1.
    pub line: u64,
    /// Hash of that line.
    pub head: String,
    /// Whether the chain was closed.
    pub closed: bool,
}

/// Reason why a text is not a checkpoint of this auditor.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CheckpointProblem {
    /// The text is not the checkpoint of a receipt chain.
    #[error("it is not a checkpoint: a line of JSON and a line with its signature")]
    Form,
    /// The signature of a checkpoint does not match the given key.
    #[error("its signature is not that of this key: it was changed, or made with another key")]
    Signature,
    /// A checkpoint of a receipt chain has a valid signature but another version. Use the `meridian` that wrote it, or
    /// a newer one.
    #[error("it cannot be read as version {VERSION}: {0}")]
    Content(String),
}

impl CheckpointKey {
    /// Minimum bytes of the secret, so that it cannot be guessed.
    pub const SECRET_BYTES_MIN: usize = hmac::SECRET_BYTES_MIN;

    /// Makes the key from a secret; `None` if it is shorter than [`CheckpointKey::SECRET_BYTES_MIN`].
    pub fn new(secret: &[u8]) -> Option<CheckpointKey> {
        (secret.len() >= CheckpointKey::SECRET_BYTES_MIN).then(|| CheckpointKey(HmacKey::of(secret)))
    }

    fn signature(&self, content: &str) -> String {
        hex(&self.0.tag(&[DOMAIN, content.as_bytes()].concat()))
    }
}

impl AuditCheckpoint {
    /// Makes the checkpoint after an audit that used `previous`; `None` if the audit found a modified chain. Entries of
    /// `previous` for chains that were archived since are kept.
    pub fn after(previous: Option<&AuditCheckpoint>, report: &Report, at_ms: u64) -> Option<AuditCheckpoint> {
        if report.counts.keys().any(|kind| kind.breaks_a_chain()) {
            return None;
        }
        let read: BTreeSet<_> = report.chains.iter().map(|chain| chain.chain.as_str()).collect();
        let archived = previous.iter().flat_map(|previous| &previous.chains);
        let archived = archived.filter(|head| !read.contains(head.chain.as_str())).cloned();
        let mut chains: Vec<_> = report.chains.iter().map(ChainHead::of).chain(archived).collect();
        chains.sort_by(|one, other| one.chain.cmp(&other.chain));
        let number = previous.map_or(1, |previous| previous.number + 1);
        Some(AuditCheckpoint { version: VERSION, number, at_ms, chains })
    }

    /// Returns the content of a checkpoint file: a line of JSON and a line with its signature.
    pub fn signed(&self, key: &CheckpointKey) -> String {
        let content = serde_json::to_string(self).expect("a checkpoint serialises to JSON");
        format!("{content}\n{SIGNATURE}{}\n", key.signature(&content))
    }

    /// Parses the content of a checkpoint file.
    ///
    /// # Errors
    ///
    /// If it was not signed with this key.
    pub fn read(text: &str, key: &CheckpointKey) -> Result<AuditCheckpoint, CheckpointProblem> {
        let (content, rest) = text.split_once('\n').ok_or(CheckpointProblem::Form)?;
        let signature = rest.trim_end().strip_prefix(SIGNATURE).ok_or(CheckpointProblem::Form)?;
        if signature != key.signature(content) {
            return Err(CheckpointProblem::Signature);
        }
        let read = serde_json::from_str::<AuditCheckpoint>(content);
        let read = read.map_err(|error| CheckpointProblem::Content(error.to_string()))?;
        match read.version {
            VERSION => Ok(read),
            other => Err(CheckpointProblem::Content(format!("it is of version {other}"))),
        }
    }
}

impl ChainHead {
    fn of(summary: &ChainSummary) -> ChainHead {
        let ChainSummary { chain, role, region, file, line, head, closed, .. } = summary.clone();
        ChainHead { chain, role, region, file, line, head, closed }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checkpoint() -> AuditCheckpoint {
        let head = ChainHead {
            chain: "0e".to_owned(),
            role: Role::Edge,
            region: "aws/us-east-1".to_owned(),
            file: 2,
            line: 7,
            head: "ab".repeat(32),
            closed: false,
        };
        AuditCheckpoint { version: VERSION, number: 3, at_ms: 9, chains: vec![head] }
    }

    #[test]
    fn only_a_checkpoint_signed_with_the_key_is_read() {
        let key = CheckpointKey::new(b"0123456789abcdef").expect("long enough");
        let other = CheckpointKey::new(b"0123456789abcdeg").expect("long enough");
        assert!(CheckpointKey::new(&[1; 15]).is_none());
        let text = checkpoint().signed(&key);
        assert_eq!(AuditCheckpoint::read(&text, &key), Ok(checkpoint()));
        let problem = |text: &str, key| AuditCheckpoint::read(text, key).expect_err("rejected");
        assert_eq!(problem(&text, &other), CheckpointProblem::Signature);
        assert_eq!(problem(&text.replace("\"line\":7", "\"line\":6"), &key), CheckpointProblem::Signature);
        for text in ["", "{}", "{}\n", "{}\nabc\n"] {
            assert_eq!(problem(text, &key), CheckpointProblem::Form, "{text}");
        }
        let newer = AuditCheckpoint { version: 2, ..checkpoint() }.signed(&key);
        assert!(matches!(problem(&newer, &key), CheckpointProblem::Content(_)));
    }
}
