//! Tenants as an operator applies them: who may come in, what they may use, where it may go, and how much of it there is.
//!
//! These are rules and no secrets: a key is known by its SHA-256, so whoever reads the rules cannot use them. What a gateway
//! makes of them is in `gateway_core::tenant`; here is what can be said, and what is wrong with it.

mod read;
mod write;

use std::collections::BTreeSet;
use std::fmt;
use std::num::NonZeroU64;
use std::str::FromStr;

pub use read::parse_tenants;
pub use write::{NoWordsForTenant, write_tenants};

use crate::id::{DeploymentName, TenantId};
use crate::residency::{MAX_POLICY_LEN, ResidencyPolicy};

/// How many tenants there may be. Their keys are what does not compress: with two each, some 400 KB of a route table, which
/// has room for a megabyte and a half.
pub const MAX_TENANTS: usize = 4_000;
/// Keys of one tenant: the old and the new one while it changes them, and for a few places each.
pub const MAX_KEYS: usize = 8;
/// The largest share: with more, those of others would come to nothing.
pub const MAX_WEIGHT: u32 = 1000;
/// Longest residency of a tenant: a quarter of what fits on the wire, since it stands there beside that of a deployment.
pub const MAX_RESIDENCY_LEN: usize = MAX_POLICY_LEN / 4;

/// One tenant's rules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TenantRules {
    /// Its name.
    pub id: TenantId,
    /// What its keys are known by.
    pub keys: BTreeSet<KeyDigest>,
    /// Whose tokens speak for it; without one, its keys only.
    pub issuer: Option<String>,
    /// The deployments that it may use; without a list, all.
    pub deployments: Option<BTreeSet<DeploymentName>>,
    /// Where its requests may go, whatever a deployment permits beyond.
    pub residency: ResidencyPolicy,
    /// The only priority that it has; without one, both.
    pub priority: Option<TenantPriority>,
    /// Its share beside others, from 1 to [`MAX_WEIGHT`].
    pub weight: u32,
    /// How much it may use.
    pub limits: TenantLimits,
}

/// How urgent a request may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum TenantPriority {
    /// Somebody waits for it.
    Interactive,
    /// It wants throughput.
    Bulk,
}

/// How much a tenant may use; absent is as much as there is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TenantLimits {
    /// Requests in a second.
    pub requests_per_second: Option<NonZeroU64>,
    /// Inputs in a second.
    pub inputs_per_second: Option<NonZeroU64>,
    /// Tokens in a minute.
    pub tokens_per_minute: Option<NonZeroU64>,
}

impl TenantPriority {
    /// As files and messages have it.
    pub fn as_str(self) -> &'static str {
        match self {
            TenantPriority::Interactive => "interactive",
            TenantPriority::Bulk => "bulk",
        }
    }
}

/// A text that is no priority.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no priority: there are interactive and bulk")]
pub struct UnknownPriority(String);

impl FromStr for TenantPriority {
    type Err = UnknownPriority;

    fn from_str(text: &str) -> Result<TenantPriority, UnknownPriority> {
        let known = [TenantPriority::Interactive, TenantPriority::Bulk]
            .into_iter()
            .find(|priority| priority.as_str() == text);
        known.ok_or_else(|| UnknownPriority(text.chars().take(64).collect()))
    }
}

/// The SHA-256 of a key, written as 64 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct KeyDigest(pub [u8; 32]);

/// A text that is no digest of a key. It is not repeated: it might be the key.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "it has {0} bytes, and a SHA-256 is written as 64 hexadecimal digits: `printf %s KEY | sha256sum` prints it"
)]
pub struct NoDigest(usize);

impl FromStr for KeyDigest {
    type Err = NoDigest;

    fn from_str(text: &str) -> Result<KeyDigest, NoDigest> {
        let wrong = || NoDigest(text.len());
        let (digits, rest) = text.as_bytes().as_chunks::<2>();
        let mut bytes = [0; 32];
        if digits.len() != bytes.len() || !rest.is_empty() {
            return Err(wrong());
        }
        for (byte, pair) in bytes.iter_mut().zip(digits) {
            let digit = |at: u8| char::from(at).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
            *byte =
                digit(pair[0]).zip(digit(pair[1])).map(|(high, low)| high << 4 | low).ok_or_else(wrong)?;
        }
        Ok(KeyDigest(bytes))
    }
}

impl fmt::Display for KeyDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for KeyDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_is_read_as_it_is_written_and_nothing_else_is_repeated() {
        let text = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08";
        let digest: KeyDigest = text.parse().unwrap();
        assert_eq!(digest.to_string(), text);
        assert_eq!(text.to_uppercase().parse(), Ok(digest));
        for wrong in ["", "s3cret", &text[1..], &format!("{text}0"), &text.replace('f', "g"), &"é".repeat(32)]
        {
            let error = wrong.parse::<KeyDigest>().unwrap_err().to_string();
            assert!(error.contains("sha256sum") && !error.contains("s3cret"), "{error}");
        }
    }
}
