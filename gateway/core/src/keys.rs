//! Who asks: the tenants of a gateway, and the API keys by which they are known.
//!
//! A key is kept as its SHA-256 digest and looked up by digest. What a caller could learn from how long the lookup
//! takes is a prefix of the digest of their own guess, which says nothing about any key: so an ordered map is safe
//! where comparing the keys themselves would not be. A plain hash (no salt, no stretching) is enough because keys are
//! random, not passwords.
//!
//! A request that is let in shares its tenant; nothing is copied and nothing is looked up by name again: what others keep
//! for each tenant they keep by its [place](Tenant::place).

use crate::tenant::Tenant;
use regions::id::TenantId;
use regions::tenant::KeyDigest;
use sha2::Digest as _;
use std::collections::BTreeMap;
use std::sync::Arc;

/// What is kept of a secret.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Digest([u8; 32]);

impl From<KeyDigest> for Digest {
    fn from(KeyDigest(digest): KeyDigest) -> Digest {
        Digest(digest)
    }
}

impl Digest {
    /// That of `secret`.
    pub fn of(secret: &[u8]) -> Digest {
        Digest(sha2::Sha256::digest(secret).into())
    }
}

/// The tenants of this gateway and the keys that open it.
#[derive(Clone, Default)]
pub struct KeyRing {
    tenants: Vec<Arc<Tenant>>,
    /// Where each stands in the list.
    names: BTreeMap<TenantId, usize>,
    keys: BTreeMap<Digest, usize>,
}

/// What came in the `authorization` header.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Credential<'a> {
    /// The key, or the token.
    pub secret: &'a [u8],
    /// Its digest.
    pub digest: Digest,
}

/// Why a caller is not let in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyProblem {
    /// No `authorization` header.
    Missing,
    /// The header is not `Bearer KEY`.
    NotBearer,
    /// Several headers carry keys, and not the same one.
    Several,
    /// Nobody has this key.
    Unknown,
}

impl<'a> Credential<'a> {
    /// Reads an `authorization` header (RFC 6750 §2.1; the scheme's case does not matter).
    pub fn read(authorization: Option<&'a [u8]>) -> Result<Credential<'a>, KeyProblem> {
        let header = authorization.ok_or(KeyProblem::Missing)?;
        let (scheme, secret) = header.split_at_checked("Bearer ".len()).ok_or(KeyProblem::NotBearer)?;
        if !scheme.eq_ignore_ascii_case(b"Bearer ") {
            return Err(KeyProblem::NotBearer);
        }
        Ok(Credential::of(secret))
    }

    /// The credential of a request: in `authorization`, or as it stands in one of the headers of `keys`, which Azure's,
    /// NVIDIA's and Anthropic's clients send. Where several are sent they must be the same: of two tenants, each could be
    /// the one that was meant.
    pub fn of_request(
        authorization: Option<&'a [u8]>,
        keys: [Option<&'a [u8]>; 2],
    ) -> Result<Credential<'a>, KeyProblem> {
        let bearer = authorization.map(|authorization| Credential::read(Some(authorization))).transpose()?;
        let mut all = bearer.into_iter().chain(keys.into_iter().flatten().map(Credential::of));
        let first = all.next().ok_or(KeyProblem::Missing)?;
        if all.any(|other| other.digest != first.digest) { Err(KeyProblem::Several) } else { Ok(first) }
    }

    fn of(secret: &'a [u8]) -> Credential<'a> {
        let secret = secret.trim_ascii();
        Credential { secret, digest: Digest::of(secret) }
    }
}

impl KeyRing {
    /// Takes a tenant in. Returns false when there is one of its name.
    #[must_use]
    pub fn add(&mut self, tenant: Tenant) -> bool {
        let place = self.tenants.len();
        self.add_at_its_place(Tenant { place, ..tenant })
    }

    /// The same, of one that has a place already, at which no other of this ring is.
    #[must_use]
    pub fn add_at_its_place(&mut self, tenant: Tenant) -> bool {
        if self.names.contains_key(&tenant.id) {
            return false;
        }
        self.names.insert(tenant.id.clone(), self.tenants.len());
        self.tenants.push(Arc::new(tenant));
        true
    }

    /// The same tenants and keys, each tenant at the place that `place` has for its name.
    #[must_use]
    pub fn placed(&self, mut place: impl FnMut(&TenantId) -> usize) -> KeyRing {
        let at = |tenant: &Arc<Tenant>| Arc::new(Tenant { place: place(&tenant.id), ..(**tenant).clone() });
        KeyRing { tenants: self.tenants.iter().map(at).collect(), ..self.clone() }
    }

    /// All keys' digests in order, each with whose it is: two rings with the same keys have the same.
    pub fn fingerprint(&self) -> Vec<u8> {
        let one = |(Digest(digest), at): (&Digest, &usize)| {
            [&digest[..], self.tenants[*at].id.as_str().as_bytes(), b"\n"].concat()
        };
        self.keys.iter().flat_map(one).collect()
    }

    /// Gives `key` to the tenant of this name; a tenant may have several. Returns false when somebody else has that very
    /// key, or there is no such tenant.
    #[must_use]
    pub fn add_key(&mut self, key: &str, tenant: &TenantId) -> bool {
        self.add_digest(Digest::of(key.as_bytes()), tenant)
    }

    /// The same, of a key of which no more is known than its digest.
    #[must_use]
    pub fn add_digest(&mut self, digest: Digest, tenant: &TenantId) -> bool {
        let Some(place) = self.names.get(tenant) else { return false };
        self.keys.entry(digest).or_insert(*place) == place
    }

    /// What somebody who was let in by a token is in this ring, which may be a newer one than it was found in; nothing, if
    /// that issuer no longer speaks for it.
    pub fn again(&self, tenant: &Tenant) -> Option<&Arc<Tenant>> {
        let now = &self.tenants[*self.names.get(&tenant.id)?];
        (now.issuer == tenant.issuer).then_some(now)
    }

    /// What a tenant who was authenticated by another ring, with this key or, without one, with a token, is in this one;
    /// nothing if the tenant is gone, or its key was revoked or given to somebody else.
    pub fn still(&self, tenant: &Tenant, key: Option<&Digest>) -> Option<&Arc<Tenant>> {
        let Some(key) = key else { return self.again(tenant) };
        let now = &self.tenants[*self.keys.get(key)?];
        (now.id == tenant.id).then_some(now)
    }

    /// The tenant who has this key.
    pub fn tenant(&self, credential: &Credential<'_>) -> Result<&Arc<Tenant>, KeyProblem> {
        let place = self.keys.get(&credential.digest).ok_or(KeyProblem::Unknown)?;
        Ok(&self.tenants[*place])
    }

    /// The tenant of this name, if the tokens of this issuer speak for it.
    pub fn tenant_of(&self, issuer: &str, name: &str) -> Option<&Arc<Tenant>> {
        let tenant = &self.tenants[*self.names.get(&name.parse::<TenantId>().ok()?)?];
        (tenant.issuer.as_deref() == Some(issuer)).then_some(tenant)
    }

    /// Everybody, in the order in which they came.
    pub fn tenants(&self) -> impl ExactSizeIterator<Item = &Arc<Tenant>> {
        self.tenants.iter()
    }

    /// Whether nobody could ever be let in.
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
    fn a_key_may_stand_in_any_of_three_headers_and_in_several_if_it_is_one() {
        let secret = |authorization: Option<&'static str>, keys: [Option<&'static str>; 2]| {
            let keys = keys.map(|key| key.map(str::as_bytes));
            Credential::of_request(authorization.map(str::as_bytes), keys).map(|found| found.secret)
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

    #[test]
    fn only_the_bearer_of_a_known_key_is_let_in() {
        let mut ring = ring();
        assert!(ring.add_key("s3cret", &id("local")));
        assert!(ring.add_key("s3cret", &id("local")));
        assert!(!ring.add_key("s3cret", &id("other")), "one key, one tenant");
        assert!(!ring.add_key("x", &id("nobody")));
        let check = |header: Option<&str>, expected: Result<&str, KeyProblem>| {
            let credential = Credential::read(header.map(str::as_bytes));
            let tenant =
                credential.and_then(|credential| ring.tenant(&credential).map(|tenant| tenant.id.as_str()));
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
    fn an_issuer_speaks_only_for_whoever_names_it() {
        let mut ring = ring();
        assert!(!ring.add(Tenant::clone(&named("local"))), "one name, one tenant");
        assert!(ring.is_empty());
        let ours = Tenant { issuer: Some("https://a/".to_owned()), ..Tenant::clone(&named("docs")) };
        assert!(ring.add(ours) && !ring.is_empty());
        let places: Vec<_> = ring.tenants().map(|tenant| tenant.place).collect();
        assert_eq!(places, [0, 1, 2]);
        let check = |issuer, name, expected: bool| {
            assert_eq!(ring.tenant_of(issuer, name).is_some(), expected, "{issuer} {name}")
        };
        check("https://a/", "docs", true);
        check("https://b/", "docs", false);
        check("https://a/", "local", false);
        check("https://a/", "nobody", false);
        check("https://a/", "no name", false);
    }

    #[test]
    fn whoever_was_let_in_by_a_token_is_found_again_as_it_is_now() {
        let mut ring = KeyRing::default();
        let docs = |issuer: &str, place| Tenant {
            issuer: Some(issuer.to_owned()),
            place,
            ..Tenant::clone(&named("docs"))
        };
        assert!(ring.add_at_its_place(docs("https://a/", 7)));
        let now = ring.again(&docs("https://a/", 0)).map(|tenant| tenant.place);
        assert_eq!((now, ring.again(&docs("https://b/", 0))), (Some(7), None));
        assert_eq!(ring.again(&Tenant::clone(&named("other"))), None);
        let digest = KeyDigest(sha2::Sha256::digest("s3cret").into());
        assert!(ring.add_digest(digest.into(), &id("docs")));
        let credential = Credential::read(Some(b"Bearer s3cret")).unwrap();
        assert_eq!(ring.tenant(&credential).map(|tenant| tenant.place), Ok(7));
    }
}
