//! Authentication with API keys: the tenants of a gateway, and their keys.
//!
//! A key is stored as its SHA-256 digest and looked up by digest. A caller could learn from the duration of the lookup
//! only a prefix of the digest of its own guess, which reveals nothing about any key: so an ordered map is safe where a
//! comparison of the keys themselves would not be. A plain hash (no salt, no stretching) is enough because keys are
//! random, not passwords.
//!
//! An authenticated request shares its tenant; nothing is copied and nothing is looked up by name again: other
//! per-tenant state is stored by [index](Tenant::index).

use crate::tenant::Tenant;
use regions::id::TenantId;
use regions::tenant::KeyDigest;
use sha2::Digest as _;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// SHA-256 digest of a secret.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Digest([u8; 32]);

impl From<Digest> for KeyDigest {
    fn from(Digest(digest): Digest) -> KeyDigest {
        KeyDigest(digest)
    }
}

impl From<KeyDigest> for Digest {
    fn from(KeyDigest(digest): KeyDigest) -> Digest {
        Digest(digest)
    }
}

impl Digest {
    /// Returns the digest of `secret`.
    pub fn of(secret: &[u8]) -> Digest {
        Digest(sha2::Sha256::digest(secret).into())
    }

    /// Returns the bytes of the hash.
    pub(crate) fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

/// Tenants of this gateway and their keys.
#[derive(Clone, Default)]
pub struct KeyRing {
    tenants: Vec<Arc<Tenant>>,
    /// Position of each tenant in the list.
    names: BTreeMap<TenantId, usize>,
    keys: BTreeMap<Digest, KeyEntry>,
}

/// Tenant and expiry of a key.
#[derive(Clone, Copy)]
struct KeyEntry {
    /// Position of the tenant in the list.
    tenant: usize,
    /// Time from which on the key is rejected, in seconds since 1970.
    expires_at: Option<u64>,
}

/// Credential of a request.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Credential<'a> {
    /// Key or token.
    pub secret: &'a [u8],
    /// Digest of the secret.
    pub digest: Digest,
}

/// Reason why a caller is not authenticated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyProblem {
    /// No `authorization` header.
    Missing,
    /// The header is not `Bearer KEY`.
    NotBearer,
    /// Several headers carry different keys.
    Several,
    /// No tenant has this key.
    Unknown,
    /// The key has expired.
    Expired,
}

impl<'a> Credential<'a> {
    /// Parses an `authorization` header (RFC 6750 §2.1; the scheme is case-insensitive).
    pub fn read(authorization: Option<&'a [u8]>) -> Result<Credential<'a>, KeyProblem> {
        let header = authorization.ok_or(KeyProblem::Missing)?;
        let (scheme, secret) = header.split_at_checked("Bearer ".len()).ok_or(KeyProblem::NotBearer)?;
        if !scheme.eq_ignore_ascii_case(b"Bearer ") {
            return Err(KeyProblem::NotBearer);
        }
        Ok(Credential::of(secret))
    }

    /// Returns the credential of a request: from `authorization`, or from one of the headers of `keys`, which Azure's,
    /// NVIDIA's and Anthropic's clients send. If several are sent they must be equal, because each of two tenants could
    /// be the intended one.
    pub fn of_request(
        authorization: Option<&'a [u8]>,
        keys: [Option<&'a [u8]>; 2],
    ) -> Result<Credential<'a>, KeyProblem> {
        let bearer = authorization.map(|authorization| Credential::read(Some(authorization))).transpose()?;
        let mut credentials = bearer.into_iter().chain(keys.into_iter().flatten().map(Credential::of));
        let first = credentials.next().ok_or(KeyProblem::Missing)?;
        if credentials.any(|other| other.digest != first.digest) {
            Err(KeyProblem::Several)
        } else {
            Ok(first)
        }
    }

    fn of(secret: &'a [u8]) -> Credential<'a> {
        let secret = secret.trim_ascii();
        Credential { secret, digest: Digest::of(secret) }
    }
}

impl KeyRing {
    /// Adds a tenant. Returns false if its name is taken.
    #[must_use]
    pub fn add(&mut self, tenant: Tenant) -> bool {
        let index = self.tenants.len();
        self.add_at_index(Tenant { index, ..tenant })
    }

    /// Adds a tenant that has an index already, which no other tenant of this ring has.
    #[must_use]
    pub fn add_at_index(&mut self, tenant: Tenant) -> bool {
        if self.names.contains_key(&tenant.id) {
            return false;
        }
        self.names.insert(tenant.id.clone(), self.tenants.len());
        self.tenants.push(Arc::new(tenant));
        true
    }

    /// Returns the same tenants and keys, with the indices that `index` assigns to the names.
    #[must_use]
    pub fn reindexed(&self, mut index: impl FnMut(&TenantId) -> usize) -> KeyRing {
        let at = |tenant: &Arc<Tenant>| Arc::new(Tenant { index: index(&tenant.id), ..(**tenant).clone() });
        KeyRing { tenants: self.tenants.iter().map(at).collect(), ..self.clone() }
    }

    /// Returns all digests of keys in order, each with its tenant: equal for two rings with the same keys.
    pub fn fingerprint(&self) -> Vec<u8> {
        let one = |(Digest(digest), entry): (&Digest, &KeyEntry)| {
            [&digest[..], self.tenants[entry.tenant].id.as_str().as_bytes(), b"\n"].concat()
        };
        self.keys.iter().flat_map(one).collect()
    }

    /// Adds `key` to the tenant of this name, which may have several. Returns false if another tenant has the same key,
    /// or there is no such tenant.
    #[must_use]
    pub fn add_key(&mut self, key: &str, tenant: &TenantId) -> bool {
        self.add_digest(Digest::of(key.as_bytes()), tenant)
    }

    /// Adds a key of which only the digest is known.
    #[must_use]
    pub fn add_digest(&mut self, digest: Digest, tenant: &TenantId) -> bool {
        self.add_expiring_digest(digest, tenant, None)
    }

    /// Adds a key that is rejected from `expires_at` on, in seconds since 1970.
    #[must_use]
    pub fn add_expiring_digest(
        &mut self,
        digest: Digest,
        tenant: &TenantId,
        expires_at: Option<u64>,
    ) -> bool {
        let Some(tenant) = self.names.get(tenant).copied() else { return false };
        self.keys.entry(digest).or_insert(KeyEntry { tenant, expires_at }).tenant == tenant
    }

    /// Returns the current version of a tenant that was authenticated by a token, possibly with an older ring; `None`
    /// if it no longer belongs to that issuer.
    pub fn current(&self, tenant: &Tenant) -> Option<&Arc<Tenant>> {
        let now = &self.tenants[*self.names.get(&tenant.id)?];
        (now.issuer == tenant.issuer).then_some(now)
    }

    /// Returns the current version of a tenant that was authenticated with an older ring, by this key or, without one,
    /// by a token; `None` if the tenant was removed, or its key was revoked or moved to another tenant.
    pub fn current_for(&self, tenant: &Tenant, key: Option<&Digest>) -> Option<&Arc<Tenant>> {
        let Some(key) = key else { return self.current(tenant) };
        let now = &self.tenants[self.keys.get(key)?.tenant];
        (now.id == tenant.id).then_some(now)
    }

    /// Returns the tenant of this key. `now` is the time since 1970; it is read only for a key that expires.
    pub fn tenant(
        &self,
        credential: &Credential<'_>,
        now: impl FnOnce() -> Duration,
    ) -> Result<&Arc<Tenant>, KeyProblem> {
        let KeyEntry { tenant, expires_at } =
            *self.keys.get(&credential.digest).ok_or(KeyProblem::Unknown)?;
        if expires_at.is_some_and(|expires_at| now().as_secs() >= expires_at) {
            return Err(KeyProblem::Expired);
        }
        Ok(&self.tenants[tenant])
    }

    /// Returns the tenant of this name if it belongs to this issuer.
    pub fn tenant_of(&self, issuer: &str, name: &str) -> Option<&Arc<Tenant>> {
        let tenant = &self.tenants[*self.names.get(&name.parse::<TenantId>().ok()?)?];
        (tenant.issuer.as_deref() == Some(issuer)).then_some(tenant)
    }

    /// Returns all tenants, in the order in which they were added.
    pub fn tenants(&self) -> impl ExactSizeIterator<Item = &Arc<Tenant>> {
        self.tenants.iter()
    }

    /// Returns whether no caller can be authenticated.
    pub fn is_empty(&self) -> bool {
        self.keys.is_empty() && self.tenants.iter().all(|tenant| tenant.issuer.is_none())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tenant::tests::named;

    fn ring() -> KeyRing {
        let mut ring = KeyRing::default();
        for name in ["local", "other"] {
            assert!(ring.add(Tenant::clone(&named(name))));
        }
        ring
    }

    fn id(name: &str) -> TenantId {
        name.parse().unwrap()
    }

    #[test]
    fn a_key_may_be_in_any_of_three_headers_and_in_several_if_equal() {
        let secret = |authorization: Option<&'static str>, keys: [Option<&'static str>; 2]| {
            let keys = keys.map(|key| key.map(str::as_bytes));
            Credential::of_request(authorization.map(str::as_bytes), keys).map(|credential| credential.secret)
        };
        assert_eq!(secret(Some("Bearer a"), [None, None]), Ok(&b"a"[..]));
        assert_eq!(secret(None, [Some("a"), None]), Ok(&b"a"[..]));
        assert_eq!(secret(None, [None, Some(" a ")]), Ok(&b"a"[..]));
        assert_eq!(secret(Some("Bearer a"), [Some("a"), Some("a")]), Ok(&b"a"[..]));
        assert_eq!(secret(Some("Bearer a"), [Some("b"), None]), Err(KeyProblem::Several));
        assert_eq!(secret(None, [Some("a"), Some("b")]), Err(KeyProblem::Several));
        assert_eq!(secret(Some("Basic a"), [Some("a"), None]), Err(KeyProblem::NotBearer));
        assert_eq!(secret(None, [None, None]), Err(KeyProblem::Missing));
    }

    /// Clock for keys that do not expire.
    fn never() -> Duration {
        panic!("only a key that expires needs the time")
    }

    #[test]
    fn a_key_is_rejected_from_its_expiry_on() {
        let mut ring = ring();
        let digest = Digest::of(b"s3cret");
        assert!(ring.add_expiring_digest(digest, &id("local"), Some(100)));
        assert!(!ring.add_expiring_digest(digest, &id("other"), None), "one key, one tenant");
        let credential = Credential::read(Some(b"Bearer s3cret")).unwrap();
        let tenant = |seconds, millis| {
            let now = Duration::from_secs(seconds) + Duration::from_millis(millis);
            ring.tenant(&credential, || now).map(|tenant| tenant.id.as_str())
        };
        assert_eq!(tenant(99, 999), Ok("local"));
        assert_eq!(
            (tenant(100, 0), tenant(u64::MAX, 0)),
            (Err(KeyProblem::Expired), Err(KeyProblem::Expired))
        );
    }

    #[test]
    fn only_a_known_key_is_authenticated() {
        let mut ring = ring();
        assert!(ring.add_key("s3cret", &id("local")));
        assert!(ring.add_key("s3cret", &id("local")));
        assert!(!ring.add_key("s3cret", &id("other")), "one key, one tenant");
        assert!(!ring.add_key("x", &id("unknown")));
        let check = |header: Option<&str>, expected: Result<&str, KeyProblem>| {
            let credential = Credential::read(header.map(str::as_bytes));
            let tenant = credential
                .and_then(|credential| ring.tenant(&credential, never).map(|tenant| tenant.id.as_str()));
            assert_eq!(tenant, expected, "{header:?}")
        };
        check(Some("Bearer s3cret"), Ok("local"));
        check(Some("bearer  s3cret "), Ok("local"));
        check(Some("Bearer s3cre"), Err(KeyProblem::Unknown));
        check(Some("Bearer "), Err(KeyProblem::Unknown));
        check(Some("Basic s3cret"), Err(KeyProblem::NotBearer));
        check(Some("s3cret"), Err(KeyProblem::NotBearer));
        check(Some(""), Err(KeyProblem::NotBearer));
        check(None, Err(KeyProblem::Missing));
    }

    #[test]
    fn an_issuer_authenticates_only_its_own_tenants() {
        let mut ring = ring();
        assert!(!ring.add(Tenant::clone(&named("local"))), "one name, one tenant");
        assert!(ring.is_empty());
        let ours = Tenant { issuer: Some("https://a/".to_owned()), ..Tenant::clone(&named("docs")) };
        assert!(ring.add(ours) && !ring.is_empty());
        let indices: Vec<_> = ring.tenants().map(|tenant| tenant.index).collect();
        assert_eq!(indices, [0, 1, 2]);
        let check = |issuer, name, expected: bool| {
            assert_eq!(ring.tenant_of(issuer, name).is_some(), expected, "{issuer} {name}")
        };
        check("https://a/", "docs", true);
        check("https://b/", "docs", false);
        check("https://a/", "local", false);
        check("https://a/", "unknown", false);
        check("https://a/", "no name", false);
    }

    #[test]
    fn a_tenant_authenticated_by_a_token_is_found_in_its_current_version() {
        let mut ring = KeyRing::default();
        let docs = |issuer: &str, index| Tenant {
            issuer: Some(issuer.to_owned()),
            index,
            ..Tenant::clone(&named("docs"))
        };
        assert!(ring.add_at_index(docs("https://a/", 7)));
        let now = ring.current(&docs("https://a/", 0)).map(|tenant| tenant.index);
        assert_eq!((now, ring.current(&docs("https://b/", 0))), (Some(7), None));
        assert_eq!(ring.current(&Tenant::clone(&named("other"))), None);
        let digest = KeyDigest(sha2::Sha256::digest("s3cret").into());
        assert!(ring.add_digest(digest.into(), &id("docs")));
        let credential = Credential::read(Some(b"Bearer s3cret")).unwrap();
        assert_eq!(ring.tenant(&credential, never).map(|tenant| tenant.index), Ok(7));
    }
}
