//! Who asks: API keys.
//!
//! A key is kept as its SHA-256 digest and looked up by digest. What a caller could learn from how long the lookup
//! takes is a prefix of the digest of their own guess, which says nothing about any key: so an ordered map is safe
//! where comparing the keys themselves would not be. A plain hash (no salt, no stretching) is enough because keys are
//! random, not passwords.

use crate::tenant::Tenant;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::sync::Arc;

/// The keys that open this gateway.
#[derive(Clone, Default)]
pub struct KeyRing {
    tenants: BTreeMap<[u8; 32], Arc<Tenant>>,
}

/// Why a caller is not let in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyProblem {
    /// No `authorization` header.
    Missing,
    /// The header is not `Bearer KEY`.
    NotBearer,
    /// Nobody has this key.
    Unknown,
}

impl KeyRing {
    /// Gives `key` to `tenant`; a tenant may have several. Returns false when somebody else has that very key.
    #[must_use]
    pub fn add(&mut self, key: &str, tenant: &Arc<Tenant>) -> bool {
        let holder = self.tenants.entry(digest(key.as_bytes())).or_insert_with(|| tenant.clone());
        holder.id == tenant.id
    }

    /// The tenant behind an `authorization` header (RFC 6750 §2.1; the scheme's case does not matter).
    pub fn tenant(&self, authorization: Option<&[u8]>) -> Result<&Arc<Tenant>, KeyProblem> {
        let header = authorization.ok_or(KeyProblem::Missing)?;
        let (scheme, key) = header.split_at_checked("Bearer ".len()).ok_or(KeyProblem::NotBearer)?;
        if !scheme.eq_ignore_ascii_case(b"Bearer ") {
            return Err(KeyProblem::NotBearer);
        }
        self.tenants.get(&digest(key.trim_ascii())).ok_or(KeyProblem::Unknown)
    }

    /// Everybody who has a key; whoever has several comes as often.
    pub fn tenants(&self) -> impl Iterator<Item = &Arc<Tenant>> {
        self.tenants.values()
    }

    /// Whether nobody could ever be let in.
    pub fn is_empty(&self) -> bool {
        self.tenants.is_empty()
    }
}

fn digest(key: &[u8]) -> [u8; 32] {
    Sha256::digest(key).into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lane::Lanes;
    use crate::tenant::Limits;
    use regions::residency::ResidencyPolicy;

    #[test]
    fn only_the_bearer_of_a_known_key_is_let_in() {
        let named = |name: &str| {
            Arc::new(Tenant {
                id: name.parse().unwrap(),
                deployments: None,
                residency: ResidencyPolicy::Anywhere,
                lanes: Lanes::default(),
                limits: Limits::default(),
            })
        };
        let tenant = named("local");
        let mut ring = KeyRing::default();
        assert!(ring.add("s3cret", &tenant));
        assert!(ring.add("s3cret", &tenant));
        assert!(!ring.add("s3cret", &named("other")), "one key, one tenant");
        let check = |header: Option<&str>, expected| {
            assert_eq!(ring.tenant(header.map(str::as_bytes)), expected, "{header:?}")
        };
        check(Some("Bearer s3cret"), Ok(&tenant));
        check(Some("bearer  s3cret "), Ok(&tenant));
        check(Some("Bearer s3cre"), Err(KeyProblem::Unknown));
        check(Some("Bearer "), Err(KeyProblem::Unknown));
        check(Some("Basic s3cret"), Err(KeyProblem::NotBearer));
        check(Some("s3cret"), Err(KeyProblem::NotBearer));
        check(Some(""), Err(KeyProblem::NotBearer));
        check(None, Err(KeyProblem::Missing));
    }
}
