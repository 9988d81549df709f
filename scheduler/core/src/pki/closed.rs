//! Join tokens that were used or revoked, as a hub remembers them outside of the store.
//!
//! A store that is restored from a backup has tokens as they were then: one that was used or revoked afterwards would be
//! valid again. So each hub follows the tokens and keeps those that were closed on its own disk, until they expire.

use std::collections::BTreeMap;
use std::time::Duration;

use super::token::TOKENS_MAX;
use super::trust::is_expired;

/// Maximum number of closed tokens: as many as a store has, for several restorations within the life of a token. The ones
/// that expire first are forgotten.
pub const CLOSED_MAX: usize = 4 * TOKENS_MAX;

/// Token in the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredToken {
    /// Hash of its secret.
    pub hash: String,
    /// Last second in which it can be used.
    pub expires: Duration,
    /// Whether it was used.
    pub is_used: bool,
}

/// Closed tokens by the hash of their secret, with the last second in which they could have been used.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClosedTokens {
    closed: BTreeMap<String, Duration>,
    /// Tokens in the store that are not used.
    open: BTreeMap<String, Duration>,
}

impl ClosedTokens {
    /// Returns the value with these closed tokens.
    pub fn new(closed: BTreeMap<String, Duration>) -> ClosedTokens {
        ClosedTokens { closed, open: BTreeMap::new() }
    }

    /// Returns whether a token was used or revoked, whatever the store says.
    pub fn contains(&self, hash: &str) -> bool {
        self.closed.contains_key(hash)
    }

    /// Returns the closed tokens.
    pub fn iter(&self) -> impl Iterator<Item = (&str, Duration)> {
        self.closed.iter().map(|(hash, expires)| (hash.as_str(), *expires))
    }

    /// Records all tokens of the store. Those that were open before and are missing were deleted meanwhile. Returns whether
    /// a token was closed.
    pub fn list(&mut self, tokens: Vec<StoredToken>, now: Duration) -> bool {
        let mut gone = std::mem::take(&mut self.open);
        for token in &tokens {
            gone.remove(&token.hash);
        }
        let before = self.closed.len();
        self.closed.extend(gone.into_iter().filter(|(_, expires)| !is_expired(*expires, now)));
        let is_changed = self.closed.len() > before;
        tokens.into_iter().fold(is_changed, |is_changed, token| self.put(token) || is_changed)
    }

    /// Records a new or changed token. Returns whether it was closed.
    pub fn put(&mut self, token: StoredToken) -> bool {
        let StoredToken { hash, expires, is_used } = token;
        if is_used {
            self.open.remove(&hash);
            self.closed.insert(hash, expires).is_none()
        } else {
            // One that is closed already was reopened by a restoration, and stays closed.
            self.open.insert(hash, expires);
            false
        }
    }

    /// Records the deletion of a token. Returns whether it was closed by that: not if it had expired.
    pub fn delete(&mut self, hash: &str, now: Duration) -> bool {
        let Some(expires) = self.open.remove(hash) else { return false };
        !is_expired(expires, now) && self.closed.insert(hash.to_owned(), expires).is_none()
    }

    /// Forgets expired tokens, which are not accepted anyway, and those above [`CLOSED_MAX`].
    pub fn forget_expired(&mut self, now: Duration) {
        self.closed.retain(|_, expires| !is_expired(*expires, now));
        let excess = self.closed.len().saturating_sub(CLOSED_MAX);
        if excess > 0 {
            let mut by_end: Vec<_> =
                self.closed.iter().map(|(hash, expires)| (*expires, hash.clone())).collect();
            by_end.sort();
            for (_, hash) in by_end.iter().take(excess) {
                self.closed.remove(hash);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Duration = Duration::from_secs(1_800_000_000);
    const HOUR: Duration = Duration::from_secs(3600);

    fn token(hash: &str, is_used: bool) -> StoredToken {
        StoredToken { hash: hash.to_owned(), expires: NOW + HOUR, is_used }
    }

    #[test]
    fn a_token_that_was_used_or_revoked_stays_closed_when_the_store_is_restored() {
        let mut tokens = ClosedTokens::default();
        let backup = || ["used", "revoked", "gone", "open"].map(|hash| token(hash, false)).to_vec();
        assert!(!tokens.list(backup(), NOW));
        assert!(tokens.put(token("used", true)) && !tokens.put(token("used", true)));
        assert!(tokens.delete("revoked", NOW) && !tokens.delete("unknown", NOW));
        // While the hub did not watch, another one was revoked.
        assert!(tokens.list(vec![token("used", true), token("open", false)], NOW));
        // The store is restored.
        assert!(!tokens.list(backup(), NOW));
        assert_eq!(
            ["used", "revoked", "gone", "open"].map(|hash| tokens.contains(hash)),
            [true, true, true, false]
        );
    }

    #[test]
    fn expired_tokens_are_forgotten_and_the_number_is_bounded() {
        let mut tokens = ClosedTokens::default();
        tokens.put(token("a", false));
        assert!(!tokens.delete("a", NOW + 2 * HOUR), "it had expired");
        tokens.put(token("b", true));
        tokens.forget_expired(NOW);
        assert!(tokens.contains("b"));
        tokens.forget_expired(NOW + 2 * HOUR);
        assert!(!tokens.contains("b"));
        let many = |count: usize| {
            (0..count).map(|n| (format!("{n:06}"), NOW + HOUR + Duration::from_secs(n as u64)))
        };
        for (count, first) in [(CLOSED_MAX, true), (CLOSED_MAX + 1, false)] {
            let mut tokens = ClosedTokens::new(many(count).collect());
            tokens.forget_expired(NOW);
            assert_eq!((tokens.iter().count(), tokens.contains("000000")), (CLOSED_MAX, first));
        }
    }
}
