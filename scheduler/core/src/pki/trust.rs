//! Trusted authorities and revoked certificates: one value with one generation, which every process follows and keeps on
//! disk.
//!
//! A generation is the time of the change in milliseconds, or one more than the previous generation if that is greater.
//! So a store that was restored from a backup continues with higher generations than those that processes have seen,
//! without anyone keeping numbers.
//!
//! A revocation is never undone: a process keeps each one until the certificate has expired, also if a newer value
//! lacks it, because the store was restored from a backup that is older than the revocation.

use std::collections::BTreeMap;
use std::time::Duration;

use scheduler_api::pki::{AuthorityV1, RevokedCertificateV1, TrustV1};
use scheduler_api::{VERSION, WireError, parsed};

use super::CLOCK_SKEW_MAX;
use super::token::{AUTHORITIES_MAX, Fingerprint};

/// Maximum number of revoked certificates that have not expired: the record fits into one value of every store.
pub const REVOKED_MAX: usize = 8192;
/// Maximum digits of a serial number (RFC 5280, 4.1.2.2).
const SERIAL_DIGITS_MAX: usize = 40;
/// Maximum bytes of the certificate of an authority, in PEM.
pub const AUTHORITY_BYTES_MAX: usize = 16 << 10;

/// Serial number of a certificate, in lower-case hexadecimal digits.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct CertificateSerial(String);

impl CertificateSerial {
    /// Creates a serial number from random bytes. The first byte is positive, so the number has the same digits in every
    /// encoding.
    pub fn from_random(mut bytes: [u8; 16]) -> CertificateSerial {
        bytes[0] = (bytes[0] & 0x7f).max(1);
        CertificateSerial(super::hex(&bytes))
    }

    /// Returns the digits.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl std::str::FromStr for CertificateSerial {
    type Err = String;

    fn from_str(text: &str) -> Result<CertificateSerial, String> {
        let is_digit = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
        let is_serial = (2..=SERIAL_DIGITS_MAX).contains(&text.len())
            && text.len().is_multiple_of(2)
            && text.bytes().all(is_digit);
        if is_serial {
            Ok(CertificateSerial(text.to_owned()))
        } else {
            Err(format!("is not a serial number; write 2 to {SERIAL_DIGITS_MAX} hexadecimal digits"))
        }
    }
}

impl std::fmt::Display for CertificateSerial {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

/// Trusted authority.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TrustedAuthority {
    /// SHA-256 of the certificate.
    pub fingerprint: Fingerprint,
    /// The certificate, in PEM.
    pub certificate: String,
    /// Last second of its validity.
    pub not_after: Duration,
}

/// Trusted authorities and revoked certificates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TrustState {
    /// Generation, raised by each change.
    pub generation: u64,
    /// Trust domain.
    pub domain: String,
    /// One authority, or two during a rotation, the oldest first.
    pub authorities: Vec<TrustedAuthority>,
    /// Position of the authority that signs.
    pub signer: usize,
    /// Revoked certificates, with the last second of their validity.
    pub revoked: BTreeMap<CertificateSerial, Duration>,
}

/// Error for a revocation while the list of revoked certificates is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{REVOKED_MAX} revoked certificates have not expired yet; rotate the authority instead of revoking more"
)]
pub struct TooManyRevoked;

/// Returns the generation of a change at `now`.
pub fn next_generation(previous: u64, now: Duration) -> u64 {
    let milliseconds = u64::try_from(now.as_millis()).unwrap_or(u64::MAX);
    milliseconds.max(previous.saturating_add(1))
}

impl TrustState {
    /// Returns the first state of a fleet.
    pub fn new(domain: String, authority: TrustedAuthority, now: Duration) -> TrustState {
        TrustState {
            generation: next_generation(0, now),
            domain,
            authorities: vec![authority],
            signer: 0,
            revoked: BTreeMap::new(),
        }
    }

    /// Returns the authority that signs.
    pub fn signer(&self) -> &TrustedAuthority {
        &self.authorities[self.signer]
    }

    /// Returns the state in which these certificates are revoked too, with the last second of their validity.
    ///
    /// # Errors
    ///
    /// [`TooManyRevoked`].
    pub fn revoke(
        &self,
        certificates: impl IntoIterator<Item = (CertificateSerial, Duration)>,
        now: Duration,
    ) -> Result<TrustState, TooManyRevoked> {
        let mut next = self.clone();
        next.revoked.extend(certificates);
        next.forget_expired(now);
        if next.revoked.len() > REVOKED_MAX {
            return Err(TooManyRevoked);
        }
        next.generation = next_generation(self.generation, now);
        Ok(next)
    }

    /// Returns the state of a process that is offered `self` by a hub: `None` if it is not newer than `current`.
    /// Revocations of `current` are kept until they expire.
    pub fn accept(mut self, current: Option<&TrustState>, now: Duration) -> Option<TrustState> {
        let Some(current) = current else { return Some(self) };
        if self.generation <= current.generation {
            return None;
        }
        for (serial, not_after) in &current.revoked {
            if self.revoked.len() < REVOKED_MAX && !is_expired(*not_after, now) {
                self.revoked.entry(serial.clone()).or_insert(*not_after);
            }
        }
        Some(self)
    }

    /// Removes the revocations of certificates that have expired on every clock.
    fn forget_expired(&mut self, now: Duration) {
        self.revoked.retain(|_, not_after| !is_expired(*not_after, now));
    }
}

/// Returns whether a certificate has expired, also for a process with a slow clock.
pub fn is_expired(not_after: Duration, now: Duration) -> bool {
    not_after + CLOCK_SKEW_MAX < now
}

impl TryFrom<TrustV1> for TrustState {
    type Error = WireError;

    fn try_from(wire: TrustV1) -> Result<TrustState, WireError> {
        let TrustV1 { version: _, generation, trust_domain, authorities, signer, revoked } = wire;
        let problem = |field: &str, problem: String| WireError { field: field.to_owned(), problem };
        if !(1..=AUTHORITIES_MAX).contains(&authorities.len()) {
            let count = authorities.len();
            return Err(problem(
                "authorities",
                format!("{count} entries; 1 or {AUTHORITIES_MAX} are trusted at a time"),
            ));
        }
        if signer >= authorities.len() {
            return Err(problem("signer", format!("{signer} is not the position of an authority")));
        }
        if revoked.len() > REVOKED_MAX {
            return Err(problem(
                "revoked",
                format!("{} entries; at most {REVOKED_MAX} are allowed", revoked.len()),
            ));
        }
        let read_authority = |AuthorityV1 { fingerprint, certificate, not_after_s }| {
            if certificate.len() > AUTHORITY_BYTES_MAX {
                let bytes = certificate.len();
                return Err(problem(
                    "certificate",
                    format!("{bytes} bytes; at most {AUTHORITY_BYTES_MAX} are allowed"),
                ));
            }
            Ok(TrustedAuthority {
                fingerprint: parsed("fingerprint", &fingerprint)?,
                certificate,
                not_after: Duration::from_secs(not_after_s),
            })
        };
        let read_revoked = |RevokedCertificateV1 { serial, not_after_s }| {
            Ok((parsed("serial", &serial)?, Duration::from_secs(not_after_s)))
        };
        Ok(TrustState {
            generation,
            domain: trust_domain,
            authorities: authorities.into_iter().map(read_authority).collect::<Result<_, WireError>>()?,
            signer,
            revoked: revoked.into_iter().map(read_revoked).collect::<Result<_, WireError>>()?,
        })
    }
}

impl From<&TrustedAuthority> for AuthorityV1 {
    fn from(authority: &TrustedAuthority) -> AuthorityV1 {
        let TrustedAuthority { fingerprint, certificate, not_after } = authority;
        AuthorityV1 {
            fingerprint: fingerprint.to_string(),
            certificate: certificate.clone(),
            not_after_s: not_after.as_secs(),
        }
    }
}

impl From<&TrustState> for TrustV1 {
    fn from(state: &TrustState) -> TrustV1 {
        let TrustState { generation, domain, authorities, signer, revoked } = state;
        let written = |(serial, not_after): (&CertificateSerial, &Duration)| RevokedCertificateV1 {
            serial: serial.to_string(),
            not_after_s: not_after.as_secs(),
        };
        TrustV1 {
            version: VERSION,
            generation: *generation,
            trust_domain: domain.clone(),
            authorities: authorities.iter().map(AuthorityV1::from).collect(),
            signer: *signer,
            revoked: revoked.iter().map(written).collect(),
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Returns an authority that expires in ten years.
    pub(in crate::pki) fn authority(number: u8) -> TrustedAuthority {
        TrustedAuthority {
            fingerprint: Fingerprint::of(&[number]),
            certificate: format!("authority {number}"),
            not_after: Duration::from_secs(10 * 365 * 24 * 3600),
        }
    }

    fn serial(number: u64) -> CertificateSerial {
        format!("{:04x}", number + 256).parse().unwrap()
    }

    proptest! {
        #[test]
        fn the_generation_only_rises_whatever_the_clock_does(times in proptest::collection::vec(0_u64..10_000, 1..50)) {
            let mut state = TrustState::new("m".to_owned(), authority(1), Duration::ZERO);
            for (number, time) in times.into_iter().enumerate() {
                let next = state.revoke([(serial(number as u64), Duration::from_secs(9_999))], Duration::from_millis(time));
                let next = next.unwrap();
                prop_assert!(next.generation > state.generation);
                prop_assert!(next.generation >= time);
                state = next;
            }
        }

        #[test]
        fn an_accepted_revocation_stays_until_the_certificate_has_expired(
            offers in proptest::collection::vec((0_u64..20, proptest::collection::vec(0_u64..30, 0..5)), 1..30),
        ) {
            let now = Duration::from_secs(1000);
            let mut current: Option<TrustState> = None;
            let mut seen = std::collections::BTreeSet::new();
            for (generation, revoked) in offers {
                let mut offered = TrustState::new("m".to_owned(), authority(1), Duration::ZERO);
                offered.generation = generation;
                offered.revoked = revoked.iter().map(|number| (serial(*number), now)).collect();
                let is_newer = current.as_ref().is_none_or(|current| generation > current.generation);
                let accepted = offered.accept(current.as_ref(), now);
                prop_assert_eq!(accepted.is_some(), is_newer);
                if let Some(accepted) = accepted {
                    seen.extend(revoked);
                    current = Some(accepted);
                }
                let kept = &current.as_ref().unwrap().revoked;
                prop_assert!(seen.iter().all(|number| kept.contains_key(&serial(*number))));
            }
        }

        #[test]
        fn a_state_is_read_back_as_it_was_written(
            generation: u64, two: bool, signer in 0_usize..2, revoked in proptest::collection::btree_map(0_u64..999, 0_u64..999, 0..9),
        ) {
            let mut state = TrustState::new("m.example".to_owned(), authority(1), Duration::ZERO);
            state.generation = generation;
            if two {
                state.authorities.push(authority(2));
                state.signer = signer;
            }
            let entry = |(number, end): (u64, u64)| (serial(number), Duration::from_secs(end));
            state.revoked = revoked.into_iter().map(entry).collect();
            prop_assert_eq!(TrustState::try_from(TrustV1::from(&state)), Ok(state));
        }

        #[test]
        fn a_random_serial_number_is_positive_and_has_all_its_digits(bytes: [u8; 16]) {
            let serial = CertificateSerial::from_random(bytes);
            prop_assert_eq!(serial.as_str().len(), 32);
            prop_assert!(("01".."80").contains(&&serial.as_str()[..2]));
            prop_assert_eq!(serial.as_str().parse(), Ok(serial.clone()));
        }
    }

    #[test]
    fn revocations_are_forgotten_after_their_certificate_has_expired_on_every_clock() {
        let end = Duration::from_secs(10_000);
        let state = TrustState::new("m".to_owned(), authority(1), Duration::ZERO);
        let state = state.revoke([(serial(1), end)], Duration::from_secs(1)).unwrap();
        let kept = |now: Duration| state.revoke([], now).unwrap().revoked.len();
        assert_eq!(kept(end + CLOCK_SKEW_MAX), 1);
        assert_eq!(kept(end + CLOCK_SKEW_MAX + Duration::from_secs(1)), 0);
    }

    #[test]
    fn the_maximum_of_revocations_is_accepted_and_one_more_is_not() {
        let state = TrustState::new("m".to_owned(), authority(1), Duration::ZERO);
        let end = Duration::from_secs(1);
        let revoke =
            |count: u64| state.revoke((0..count).map(|number| (serial(number), end)), Duration::ZERO);
        assert!(revoke(REVOKED_MAX as u64).is_ok());
        assert_eq!(revoke(REVOKED_MAX as u64 + 1), Err(TooManyRevoked));
    }

    #[test]
    fn invalid_states_are_rejected_with_the_field() {
        let valid = TrustV1::from(&TrustState::new("m".to_owned(), authority(1), Duration::ZERO));
        let check =
            |wire: TrustV1, field: &str| assert_eq!(TrustState::try_from(wire).unwrap_err().field, field);
        check(TrustV1 { authorities: Vec::new(), ..valid.clone() }, "authorities");
        check(TrustV1 { authorities: vec![valid.authorities[0].clone(); 3], ..valid.clone() }, "authorities");
        check(TrustV1 { signer: 1, ..valid.clone() }, "signer");
        let revoked = vec![RevokedCertificateV1 { serial: "0".to_owned(), not_after_s: 1 }];
        check(TrustV1 { revoked, ..valid.clone() }, "serial");
        let mut long = valid;
        long.authorities[0].certificate = "x".repeat(AUTHORITY_BYTES_MAX + 1);
        check(long, "certificate");
    }
}
