//! Browsers that are signed in to the console.
//!
//! A person with the identity of a viewer or operator asks the hub for a link (`meridian console`), which has a secret for one
//! use. The page exchanges it for a session, whose secret is in a cookie that scripts cannot read. Both are 256 random bits;
//! only their digests are kept, in memory: a restart of the hub ends all sessions. Neither outlives the certificate or the token
//! of the person: it is valid until that expires, and as long as the certificate is not revoked ([`Visitor::is_admitted`]).

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use sha2::{Digest, Sha256};

/// Time for which a link can be used.
pub const LOGIN_TTL: Duration = Duration::from_secs(600);
/// Time after which a person has to sign in again: a working day.
pub const SESSION_TTL: Duration = Duration::from_secs(12 * 3600);
/// Maximum number of unused links; beyond it the oldest is invalid.
pub const LOGINS_MAX: usize = 64;
/// Maximum number of unused links of one person; beyond it their oldest is invalid, and not that of another person.
pub const VISITOR_LOGINS_MAX: usize = 8;
/// Maximum number of sessions; beyond it the oldest ends.
pub const SESSIONS_MAX: usize = 256;
/// Maximum number of sessions of one person, which are browsers; beyond it their oldest ends.
pub const VISITOR_SESSIONS_MAX: usize = 16;

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
    /// Serial number of the certificate; `None` of a token, and at a hub without an identity.
    pub certificate: Option<String>,
    /// Time at which the certificate or the token expires.
    pub valid_until: Option<Instant>,
}

impl Visitor {
    /// Returns whether the certificate or the token is valid at `now`. `is_revoked` says it of a serial number.
    pub fn is_admitted(&self, is_revoked: impl FnOnce(&str) -> bool, now: Instant) -> bool {
        self.valid_until.is_none_or(|until| now < until)
            && !self.certificate.as_deref().is_some_and(is_revoked)
    }
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

/// Visitors by the digest of their secret.
#[derive(Debug, Default)]
struct Expiring(BTreeMap<Digested, Entry>);

#[derive(Debug)]
struct Entry {
    visitor: Visitor,
    begun: Instant,
    until: Instant,
}

/// Limits of the entries.
#[derive(Clone, Copy, Debug)]
struct Limits {
    ttl: Duration,
    max: usize,
    /// Maximum number of those of one visitor.
    visitor_max: usize,
}

const LOGINS: Limits = Limits { ttl: LOGIN_TTL, max: LOGINS_MAX, visitor_max: VISITOR_LOGINS_MAX };
const SESSIONS: Limits = Limits { ttl: SESSION_TTL, max: SESSIONS_MAX, visitor_max: VISITOR_SESSIONS_MAX };

impl Expiring {
    fn insert(&mut self, secret: Secret, visitor: Visitor, limits: Limits, now: Instant) {
        self.0.retain(|_, entry| entry.until > now);
        let own = |entry: &Entry| entry.visitor.name == visitor.name;
        if self.0.values().filter(|entry| own(entry)).count() >= limits.visitor_max {
            self.remove_oldest(own);
        }
        if self.0.len() >= limits.max {
            self.remove_oldest(|_| true);
        }
        let until = now + limits.ttl;
        let until = visitor.valid_until.map_or(until, |valid_until| until.min(valid_until));
        self.0.insert(digest(&secret.expose()), Entry { visitor, begun: now, until });
    }

    fn remove_oldest(&mut self, is_meant: impl Fn(&Entry) -> bool) {
        let meant = self.0.iter().filter(|(_, entry)| is_meant(entry));
        if let Some(oldest) = meant.min_by_key(|(_, entry)| entry.begun).map(|(digest, _)| *digest) {
            self.0.remove(&oldest);
        }
    }

    fn find(&self, secret: &str, now: Instant) -> Option<&Visitor> {
        self.0.get(&digest(secret)).filter(|entry| entry.until > now).map(|entry| &entry.visitor)
    }
}

impl Sessions {
    /// Creates a link with this secret for a person.
    pub fn create_login(&mut self, secret: Secret, visitor: Visitor, now: Instant) {
        self.logins.insert(secret, visitor, LOGINS, now);
    }

    /// Exchanges the secret of a link, which is invalid from then on, for the session with the secret `session`.
    pub fn redeem(&mut self, login: &str, session: Secret, now: Instant) -> Option<Visitor> {
        let Entry { visitor, until, .. } = self.logins.0.remove(&digest(login))?;
        if until <= now {
            return None;
        }
        self.sessions.insert(session, visitor.clone(), SESSIONS, now);
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
    use crate::some_instant;

    fn secret(number: u16) -> Secret {
        let mut bytes = [0; 32];
        bytes[..2].copy_from_slice(&number.to_be_bytes());
        Secret::from_random(bytes)
    }

    fn viewer() -> Visitor {
        named("ada".to_owned())
    }

    fn named(name: String) -> Visitor {
        Visitor { role: ConsoleRole::Viewer, name, certificate: None, valid_until: None }
    }

    #[test]
    fn a_link_signs_in_once_and_the_session_ends_with_its_time() {
        let (mut sessions, now) = (Sessions::default(), some_instant());
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
        let (mut sessions, now) = (Sessions::default(), some_instant());
        sessions.create_login(secret(1), viewer(), now);
        assert_eq!(sessions.redeem(&secret(1).expose(), secret(9), now + LOGIN_TTL), None);
    }

    #[test]
    fn limits_of_links_and_sessions_are_enforced_and_the_oldest_end() {
        let (mut sessions, now) = (Sessions::default(), some_instant());
        let later = |number: usize| now + Duration::from_millis(number as u64);
        let visitor = |number: usize| named(format!("visitor-{number}"));
        for number in 0..=LOGINS_MAX {
            sessions.create_login(secret(number as u16), visitor(number), later(number));
        }
        assert_eq!(sessions.logins.0.len(), LOGINS_MAX);
        assert_eq!(sessions.redeem(&secret(0).expose(), secret(999), now), None);
        for number in 0..=SESSIONS_MAX {
            sessions.create_login(secret(5_000), visitor(number), later(number));
            sessions.redeem(&secret(5_000).expose(), secret(number as u16), later(number)).unwrap();
        }
        assert_eq!(sessions.sessions.0.len(), SESSIONS_MAX);
        assert_eq!(sessions.find(&secret(0).expose(), now), None);
        assert!(sessions.find(&secret(1).expose(), now).is_some());
    }

    #[test]
    fn limits_of_one_visitor_are_enforced_and_others_keep_their_links_and_sessions() {
        let (mut sessions, now) = (Sessions::default(), some_instant());
        let later = |number: u16| now + Duration::from_millis(u64::from(number));
        sessions.create_login(secret(900), named("grace".to_owned()), now);
        sessions.create_login(secret(901), named("grace".to_owned()), now);
        sessions.redeem(&secret(901).expose(), secret(902), now).unwrap();
        for number in 0..=VISITOR_SESSIONS_MAX as u16 {
            sessions.create_login(secret(800), viewer(), later(number));
            sessions.redeem(&secret(800).expose(), secret(number), later(number)).unwrap();
        }
        let found = |session: u16| sessions.find(&secret(session).expose(), now).is_some();
        assert_eq!([0, 1, VISITOR_SESSIONS_MAX as u16, 902].map(found), [false, true, true, true]);
        for number in 0..=VISITOR_LOGINS_MAX as u16 {
            sessions.create_login(secret(number), viewer(), later(number));
        }
        let mut redeem =
            |login: u16| sessions.redeem(&secret(login).expose(), secret(700 + login), now).is_some();
        assert_eq!([0, 1, VISITOR_LOGINS_MAX as u16, 900].map(&mut redeem), [false, true, true, true]);
    }

    #[test]
    fn neither_a_link_nor_a_session_outlives_the_certificate() {
        let (mut sessions, now) = (Sessions::default(), some_instant());
        let valid_until = now + Duration::from_secs(60);
        let visitor =
            Visitor { valid_until: Some(valid_until), certificate: Some("0a".to_owned()), ..viewer() };
        sessions.create_login(secret(1), visitor.clone(), now);
        sessions.create_login(secret(2), visitor.clone(), now);
        assert_eq!(sessions.redeem(&secret(1).expose(), secret(9), now), Some(visitor.clone()));
        assert_eq!(sessions.redeem(&secret(2).expose(), secret(8), valid_until), None);
        let session = secret(9).expose();
        assert!(sessions.find(&session, valid_until - Duration::from_millis(1)).is_some());
        assert_eq!(sessions.find(&session, valid_until), None);
        assert!(visitor.is_admitted(|_| false, now) && !visitor.is_admitted(|_| false, valid_until));
        assert!(!visitor.is_admitted(|serial| serial == "0a", now), "it is revoked");
        assert!(viewer().is_admitted(|_| true, now), "it has no certificate");
    }
}
