//! Tenants as an operator applies them to the hub: credentials, permitted deployments, residency policy, limits.
//!
//! The rules contain no secrets: a key is represented by its SHA-256, so reading the rules does not grant access. The
//! gateway's runtime form is `gateway_core::tenant`; this module defines the file format and its validation.

mod key;
mod read;
mod share;
mod write;

use std::collections::BTreeSet;
use std::fmt;
use std::num::NonZeroU64;
use std::str::FromStr;

pub use key::{ApiKey, MAX_CREATED_KEYS, MAX_CREATED_KEYS_PER_TENANT};
pub use read::{Limits, TenantEntry, parse_tenants, read_tenants, rules};
pub use share::{LimitShare, PerLimit};
pub use write::write_tenants;

use crate::id::{DeploymentName, TenantId};
use crate::priority::Priority;
use crate::residency::{MAX_POLICY_LEN, ResidencyPolicy};

/// Maximum number of tenants. Key digests do not compress: with two each, they take some 400 KB of a route table, whose
/// limit is a megabyte and a half.
pub const MAX_TENANTS: usize = 4_000;
/// Maximum number of keys of a tenant: enough for the old and the new one during rotation, at several sites.
pub const MAX_KEYS: usize = 8;
/// Maximum weight. A larger one would reduce the shares of other tenants to almost nothing.
pub const MAX_WEIGHT: u32 = 1000;
/// Maximum length of a tenant's residency policy: a quarter of the limit on the wire, where that of a deployment is added.
pub const MAX_RESIDENCY_LEN: usize = MAX_POLICY_LEN / 4;

/// Rules of one tenant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TenantRules {
    /// Name.
    pub id: TenantId,
    /// Digests of its API keys.
    pub keys: BTreeSet<KeyDigest>,
    /// Issuer whose tokens identify the tenant; without one, only keys do.
    pub issuer: Option<String>,
    /// Deployments that it may use; `None` for all.
    pub deployments: Option<BTreeSet<DeploymentName>>,
    /// Residency policy of its requests. It narrows that of a deployment.
    pub residency: ResidencyPolicy,
    /// Only priority that it may use; `None` for both.
    pub priority: Option<Priority>,
    /// Weight of its fair share, from 1 to [`MAX_WEIGHT`].
    pub weight: u32,
    /// Rate limits.
    pub limits: TenantLimits,
}

/// Rate limits of a tenant; `None` is unlimited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TenantLimits {
    /// Requests per second.
    pub requests_per_second: Option<NonZeroU64>,
    /// Inputs per second.
    pub inputs_per_second: Option<NonZeroU64>,
    /// Tokens per minute.
    pub tokens_per_minute: Option<NonZeroU64>,
}

/// SHA-256 of an API key, written as 64 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct KeyDigest(pub [u8; 32]);

/// Error for a text that is not the SHA-256 of an API key. The text is not repeated, because it might be the key.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the value has {0} bytes; write a SHA-256 as 64 hexadecimal digits: `printf %s KEY | sha256sum` prints it"
)]
pub struct KeyDigestError(usize);

impl TenantLimits {
    /// Returns the limits in units per minute; `None` where there is none.
    pub fn per_minute(&self) -> PerLimit<Option<u64>> {
        let TenantLimits { requests_per_second, inputs_per_second, tokens_per_minute } = self;
        let from_second = |limit: &Option<NonZeroU64>| limit.map(|limit| limit.get().saturating_mul(60));
        PerLimit {
            requests: from_second(requests_per_second),
            inputs: from_second(inputs_per_second),
            tokens: tokens_per_minute.map(NonZeroU64::get),
        }
    }
}

impl FromStr for KeyDigest {
    type Err = KeyDigestError;

    fn from_str(text: &str) -> Result<KeyDigest, KeyDigestError> {
        let error = || KeyDigestError(text.len());
        let (digits, rest) = text.as_bytes().as_chunks::<2>();
        let mut bytes = [0; 32];
        if digits.len() != bytes.len() || !rest.is_empty() {
            return Err(error());
        }
        for (byte, pair) in bytes.iter_mut().zip(digits) {
            let digit = |at: u8| char::from(at).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
            *byte =
                digit(pair[0]).zip(digit(pair[1])).map(|(high, low)| high << 4 | low).ok_or_else(error)?;
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
    fn a_digest_round_trips_and_an_invalid_one_is_not_repeated() {
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
