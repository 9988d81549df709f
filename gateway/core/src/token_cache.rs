//! Cache of verified tokens, so that the next request with the same token pays only for a lookup.
//!
//! A client sends the same token with every request during its lifetime, and a signature costs 25 to 100 µs, more than
//! everything else that a gateway does with a request. The cache holds a digest and no token. An entry is valid for the
//! keys that verified it: when an issuer changes its keys, all are dropped. Validity periods are checked on every use.

use crate::keys::Digest;
use crate::tenant::Tenant;
use jwt_core::TokenPeriod;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// Maximum entries, of some 100 bytes each. When it is reached, expired ones are dropped, and if there are none, all
/// are: then each token is verified once more, as without the cache.
pub const VERIFIED_TOKENS_MAX: usize = 4096;

/// Verified tokens of one key generation.
#[derive(Default)]
pub struct VerifiedTokens {
    generation: u64,
    entries: BTreeMap<Digest, Entry>,
}

struct Entry {
    tenant: Arc<Tenant>,
    from: Duration,
    until: Duration,
}

impl VerifiedTokens {
    /// Returns the tenant of the token with this digest at `now`, if it was verified with the keys of this generation.
    pub fn tenant(&self, digest: &Digest, generation: u64, now: Duration) -> Option<&Arc<Tenant>> {
        let entry = self.entries.get(digest).filter(|_| generation == self.generation)?;
        (entry.from <= now && now < entry.until).then_some(&entry.tenant)
    }

    /// Adds a token that was verified with the keys of this generation.
    pub fn insert(
        &mut self,
        digest: Digest,
        generation: u64,
        period: TokenPeriod,
        tenant: &Arc<Tenant>,
        now: Duration,
    ) {
        if generation < self.generation {
            return;
        }
        if generation > self.generation {
            self.entries.clear();
            self.generation = generation;
        }
        if self.entries.len() >= VERIFIED_TOKENS_MAX {
            self.entries.retain(|_, entry| now < entry.until);
        }
        if self.entries.len() >= VERIFIED_TOKENS_MAX {
            self.entries.clear();
        }
        let TokenPeriod { from, until } = period;
        self.entries.insert(digest, Entry { tenant: tenant.clone(), from, until });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tenant;

    const SECOND: Duration = Duration::from_secs(1);

    fn period(from: u32, until: u32) -> TokenPeriod {
        TokenPeriod { from: from * SECOND, until: until * SECOND }
    }

    fn digest(number: usize) -> Digest {
        Digest::of(&number.to_le_bytes())
    }

    #[test]
    fn a_token_is_cached_while_it_and_its_keys_are_valid() {
        let tenant = tenant::tests::named("a");
        let mut cache = VerifiedTokens::default();
        cache.insert(digest(1), 1, period(5, 10), &tenant, 5 * SECOND);
        let is_cached = |cache: &VerifiedTokens, generation, now: u32| {
            cache.tenant(&digest(1), generation, now * SECOND).is_some()
        };
        assert_eq!([4, 5, 9, 10].map(|now| is_cached(&cache, 1, now)), [false, true, true, false]);
        assert!(!is_cached(&cache, 2, 7), "the keys have changed");
        assert!(cache.tenant(&digest(2), 1, 7 * SECOND).is_none());
        cache.insert(digest(2), 2, period(5, 10), &tenant, 5 * SECOND);
        assert!(!is_cached(&cache, 2, 7), "the other tokens were dropped with their keys");
        cache.insert(digest(1), 1, period(5, 10), &tenant, 5 * SECOND);
        assert!(!is_cached(&cache, 2, 7), "a verification with outdated keys is ignored");
    }

    #[test]
    fn the_cache_is_bounded() {
        let tenant = tenant::tests::named("a");
        let mut cache = VerifiedTokens::default();
        let mut insert = |number, until, now: u32| {
            cache.insert(digest(number), 1, period(0, until), &tenant, now * SECOND);
            cache.entries.len()
        };
        for number in 0..VERIFIED_TOKENS_MAX {
            assert_eq!(insert(number, if number % 2 == 0 { 10 } else { 20 }, 1), number + 1);
        }
        assert_eq!(
            insert(VERIFIED_TOKENS_MAX, 20, 15),
            VERIFIED_TOKENS_MAX / 2 + 1,
            "expired entries were dropped"
        );
        for number in VERIFIED_TOKENS_MAX + 1..VERIFIED_TOKENS_MAX + VERIFIED_TOKENS_MAX / 2 {
            insert(number, 20, 15);
        }
        assert_eq!(insert(3 * VERIFIED_TOKENS_MAX, 20, 15), 1, "no entry had expired");
    }
}
