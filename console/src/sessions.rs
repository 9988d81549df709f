//! Browsers that are signed in to the console.
//!
//! A person with the identity of a viewer or operator asks the hub for a link (`meridian console`), which has a secret for one
//! use. The page exchanges it for a session, whose secret is in a cookie that scripts cannot read. Both are 256 random bits;
//! only their digests are kept, in memory: a restart of the hub ends all sessions.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use sha2::{Digest, Sha256};

/// Time for which a link can be used.
pub const LOGIN_TTL: Duration = Duration::from_secs(600);
/// Time after which a person has to sign in again: a working day.
pub const SESSION_TTL: Duration = Duration::from_secs(12 * 3600);
/// Maximum number of unused links; beyond it the oldest is invalid.
pub const LOGINS_MAX: usize = 64;
/// Maximum number of sessions; beyond it the oldest ends.
pub const SESSIONS_MAX: usize = 256;

/// Role of a person.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ConsoleRole {
    /// Read.
    Viewer,
    /// Read, drain regions and promote models.
    Operator,
}

impl ConsoleRole {
    /// Returns the name.
    pub fn as_str(self) -> &'static str {
        match self {
            ConsoleRole::Viewer => "viewer",
            ConsoleRole::Operator => "operator",
        }
    }
}

/// Person at the console.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Visitor {
    /// Role.
    pub role: ConsoleRole,
    /// Name, from the certificate or the token.
    pub name: String,
}

/// Secret of a link or a session.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Secret([u8; 32]);

impl Secret {
    /// Creates a secret from random bytes.
    pub fn from_random(bytes: [u8; 32]) -> Secret {
        Secret(bytes)
    }

    /// Returns the secret as 64 hexadecimal digits.
    pub fn expose(&self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

type Digested = [u8; 32];

fn digest(secret: &str) -> Digested {
    Sha256::digest(secret.as_bytes()).into()
}

/// Unused links and sessions.
#[derive(Debug, Default)]
pub struct Sessions {
    logins: Expiring,
    sessions: Expiring,
}

#[derive(Debug, Default)]
struct Expiring(BTreeMap<Digested, (Visitor, Instant)>);

impl Expiring {
    fn insert(&mut self, secret: Secret, visitor: Visitor, until: Instant, max: usize, now: Instant) {
        self.0.retain(|_, (_, until)| *until > now);
        if self.0.len() >= max {
            let oldest = self.0.iter().min_by_key(|(_, (_, until))| *until).map(|(digest, _)| *digest);
            oldest.map(|oldest| self.0.remove(&oldest));
        }
        self.0.insert(digest(&secret.expose()), (visitor, until));
    }

    fn find(&self, secret: &str, now: Instant) -> Option<&Visitor> {
        self.0.get(&digest(secret)).filter(|(_, until)| *until > now).map(|(visitor, _)| visitor)
    }
}

impl Sessions {
    /// Creates a link with this secret for a person.
    pub fn create_login(&mut self, secret: Secret, visitor: Visitor, now: Instant) {
        self.logins.insert(secret, visitor, now + LOGIN_TTL, LOGINS_MAX, now);
    }

    /// Exchanges the secret of a link, which is invalid from then on, for the session with the secret `session`.
    pub fn redeem(&mut self, login: &str, session: Secret, now: Instant) -> Option<Visitor> {
        let (visitor, until) = self.logins.0.remove(&digest(login))?;
        if until <= now {
            return None;
        }
        self.sessions.insert(session, visitor.clone(), now + SESSION_TTL, SESSIONS_MAX, now);
        Some(visitor)
    }

    /// Returns the person of a session.
    pub fn find(&self, session: &str, now: Instant) -> Option<Visitor> {
        self.sessions.find(session, now).cloned()
    }

    /// Ends a session.
    pub fn end(&mut self, session: &str) {
        self.sessions.0.remove(&digest(session));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secret(number: u16) -> Secret {
        let mut bytes = [0; 32];
        bytes[..2].copy_from_slice(&number.to_be_bytes());
        Secret::from_random(bytes)
    }

    fn viewer() -> Visitor {
        Visitor { role: ConsoleRole::Viewer, name: "ada".to_owned() }
    }

    #[expect(
        clippy::disallowed_methods,
        reason = "the tests need any instant, and compute the others from it"
    )]
    fn begin() -> Instant {
        Instant::now()
    }

    #[test]
    fn a_link_signs_in_once_and_the_session_ends_with_its_time() {
        let (mut sessions, now) = (Sessions::default(), begin());
        sessions.create_login(secret(1), viewer(), now);
        assert_eq!(sessions.redeem(&secret(2).expose(), secret(9), now), None, "another secret");
        assert_eq!(sessions.redeem(&secret(1).expose(), secret(9), now), Some(viewer()));
        assert_eq!(sessions.redeem(&secret(1).expose(), secret(8), now), None, "it was used");
        let session = secret(9).expose();
        assert_eq!(sessions.find(&session, now + SESSION_TTL - Duration::from_secs(1)), Some(viewer()));
        assert_eq!(sessions.find(&session, now + SESSION_TTL), None);
        sessions.end(&session);
        assert_eq!(sessions.find(&session, now), None);
    }

    #[test]
    fn a_link_expires() {
        let (mut sessions, now) = (Sessions::default(), begin());
        sessions.create_login(secret(1), viewer(), now);
        assert_eq!(sessions.redeem(&secret(1).expose(), secret(9), now + LOGIN_TTL), None);
    }

    #[test]
    fn limits_of_links_and_sessions_are_enforced_and_the_oldest_end() {
        let (mut sessions, now) = (Sessions::default(), begin());
        let later = |number: usize| now + Duration::from_millis(number as u64);
        for number in 0..=LOGINS_MAX {
            sessions.create_login(secret(number as u16), viewer(), later(number));
        }
        assert_eq!(sessions.logins.0.len(), LOGINS_MAX);
        assert_eq!(sessions.redeem(&secret(0).expose(), secret(999), now), None);
        for number in 0..=SESSIONS_MAX {
            sessions.create_login(secret(5_000), viewer(), later(number));
            sessions.redeem(&secret(5_000).expose(), secret(number as u16), later(number)).unwrap();
        }
        assert_eq!(sessions.sessions.0.len(), SESSIONS_MAX);
        assert_eq!(sessions.find(&secret(0).expose(), now), None);
        assert!(sessions.find(&secret(1).expose(), now).is_some());
    }
}
