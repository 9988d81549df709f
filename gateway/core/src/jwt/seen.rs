//! Tokens whose signature was found right, so that the next request with the same one pays for a lookup.
//!
//! A client sends one token with every request for as long as it lives, and a signature costs 25 to 100 µs, more than
//! everything else that a gateway does with a request. What is kept is a digest and no token. An entry is good for the
//! keys that it was verified with: when an issuer changes its keys, all are forgotten. Times are looked at on every use.

use super::Bearer;
use crate::keys::Digest;
use crate::tenant::Tenant;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// How many are kept: some 100 bytes each. When there are more, those that have expired are dropped, and if that makes no
/// room, all are: then each is verified once more, which is what would happen without this.
pub const SEEN_MAX: usize = 4096;

/// The tokens that were found right.
#[derive(Default)]
pub struct Seen {
    generation: u64,
    entries: BTreeMap<Digest, Entry>,
}

struct Entry {
    tenant: Arc<Tenant>,
    from: Duration,
    until: Duration,
}

impl Seen {
    /// Whom the token of this digest lets in at `now`, if it was found right with the keys of this generation.
    pub fn tenant(&self, digest: &Digest, generation: u64, now: Duration) -> Option<&Arc<Tenant>> {
        let entry = self.entries.get(digest).filter(|_| generation == self.generation)?;
        (entry.from <= now && now < entry.until).then_some(&entry.tenant)
    }

    /// A token was found right with the keys of this generation.
    pub fn found(
        &mut self,
        digest: Digest,
        generation: u64,
        bearer: &Bearer,
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
        if self.entries.len() >= SEEN_MAX {
            self.entries.retain(|_, entry| now < entry.until);
        }
        if self.entries.len() >= SEEN_MAX {
            self.entries.clear();
        }
        let Bearer { tenant: _, from, until } = *bearer;
        self.entries.insert(digest, Entry { tenant: tenant.clone(), from, until });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tenant;

    const SECOND: Duration = Duration::from_secs(1);

    fn bearer(from: u32, until: u32) -> Bearer {
        Bearer { tenant: "a".to_owned(), from: from * SECOND, until: until * SECOND }
    }

    fn digest(number: usize) -> Digest {
        Digest::of(&number.to_le_bytes())
    }

    #[test]
    fn a_token_is_known_for_as_long_as_it_lives_and_its_keys_stay() {
        let tenant = tenant::tests::named("a");
        let mut seen = Seen::default();
        seen.found(digest(1), 1, &bearer(5, 10), &tenant, 5 * SECOND);
        let known =
            |seen: &Seen, generation, now: u32| seen.tenant(&digest(1), generation, now * SECOND).is_some();
        assert_eq!([4, 5, 9, 10].map(|now| known(&seen, 1, now)), [false, true, true, false]);
        assert!(!known(&seen, 2, 7), "the keys have changed");
        assert!(seen.tenant(&digest(2), 1, 7 * SECOND).is_none());
        seen.found(digest(2), 2, &bearer(5, 10), &tenant, 5 * SECOND);
        assert!(!known(&seen, 2, 7), "the others went with their keys");
        seen.found(digest(1), 1, &bearer(5, 10), &tenant, 5 * SECOND);
        assert!(!known(&seen, 2, 7), "a verification that was overtaken by a change of keys says nothing");
    }

    #[test]
    fn no_more_are_kept_than_the_bound() {
        let tenant = tenant::tests::named("a");
        let mut seen = Seen::default();
        let mut found = |number, until, now: u32| {
            seen.found(digest(number), 1, &bearer(0, until), &tenant, now * SECOND);
            seen.entries.len()
        };
        for number in 0..SEEN_MAX {
            assert_eq!(found(number, if number % 2 == 0 { 10 } else { 20 }, 1), number + 1);
        }
        assert_eq!(found(SEEN_MAX, 20, 15), SEEN_MAX / 2 + 1, "the expired made room");
        for number in SEEN_MAX + 1..SEEN_MAX + SEEN_MAX / 2 {
            found(number, 20, 15);
        }
        assert_eq!(found(3 * SEEN_MAX, 20, 15), 1, "nobody had expired");
    }
}
