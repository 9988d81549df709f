//! Certificates that the authority issues: accepted keys, validity, and the time of renewal.

use std::time::Duration;

use super::CLOCK_SKEW_MAX;

/// Validity of a certificate by default. It is renewed at half of it, so a hub may be down for half a week.
pub const VALIDITY: Duration = Duration::from_secs(7 * 24 * 3600);
/// Minimum validity. A shorter one would be less than the tolerated clock skew and the time to renew.
pub const VALIDITY_MIN: Duration = Duration::from_secs(10 * 60);
/// Maximum validity. The certificate of a person is not renewed by a process, so it may live longer than [`VALIDITY`].
pub const VALIDITY_MAX: Duration = Duration::from_secs(90 * 24 * 3600);
/// Validity of an authority that is created here.
pub const AUTHORITY_VALIDITY: Duration = Duration::from_secs(10 * 365 * 24 * 3600);
/// Maximum bytes of a request for a certificate. One with an RSA key of 4096 bits has less than 2 KiB.
pub const CSR_BYTES_MAX: usize = 8 << 10;
/// Part of the life by which the renewal is earlier or later at most, so that processes that started together do not
/// renew together.
const RENEWAL_JITTER: f64 = 0.05;

/// Public key of a request for a certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CsrKey {
    /// ECDSA on NIST P-256.
    P256,
    /// ECDSA on NIST P-384.
    P384,
    /// Ed25519.
    Ed25519,
    /// RSA with a modulus of this number of bits.
    Rsa(usize),
    /// Any other algorithm or curve.
    Other,
}

/// Reason for not issuing a certificate.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotIssued {
    /// The key in the certificate request is weak or of an unsupported kind.
    #[error("the key is {0}; use ECDSA P-256 or P-384, Ed25519, or RSA with 2048 to 4096 bits")]
    Key(&'static str),
    /// The requested validity of a certificate is outside its limits.
    #[error("validity ({0:?}) is not between {VALIDITY_MIN:?} and {VALIDITY_MAX:?}")]
    Validity(Duration),
    /// The certificate of the authority expires before the certificate that it would issue.
    #[error("the authority expires in less than {VALIDITY_MIN:?}; replace it with `meridian pki rotate`")]
    AuthorityExpires,
}

/// Period in which a certificate is valid, in whole seconds since 1970.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ValidityPeriod {
    /// First second.
    pub not_before: Duration,
    /// Last second.
    pub not_after: Duration,
}

/// Checks whether a key may be certified.
///
/// # Errors
///
/// [`NotIssued::Key`].
pub fn check_key(key: CsrKey) -> Result<(), NotIssued> {
    match key {
        CsrKey::P256 | CsrKey::P384 | CsrKey::Ed25519 | CsrKey::Rsa(2048..=4096) => Ok(()),
        CsrKey::Rsa(0..2048) => Err(NotIssued::Key("a weak RSA key")),
        CsrKey::Rsa(_) => Err(NotIssued::Key("an RSA key with more than 4096 bits")),
        CsrKey::Other => Err(NotIssued::Key("of another algorithm or curve")),
    }
}

/// Checks a configured or requested validity.
///
/// # Errors
///
/// [`NotIssued::Validity`].
pub fn check_validity(validity: Duration) -> Result<(), NotIssued> {
    if (VALIDITY_MIN..=VALIDITY_MAX).contains(&validity) {
        Ok(())
    } else {
        Err(NotIssued::Validity(validity))
    }
}

impl ValidityPeriod {
    /// Returns the period of a certificate that is issued now. It begins earlier by the tolerated clock skew, because
    /// the clock of a peer may be slow, and ends no later than the authority.
    ///
    /// # Errors
    ///
    /// If the authority expires too soon for a useful certificate.
    pub fn starting(
        now: Duration,
        validity: Duration,
        authority_not_after: Duration,
    ) -> Result<ValidityPeriod, NotIssued> {
        let not_before = whole_seconds(now.saturating_sub(CLOCK_SKEW_MAX));
        let not_after = whole_seconds(now + validity).min(whole_seconds(authority_not_after));
        if not_after < now + VALIDITY_MIN.min(validity) - Duration::from_secs(1) {
            return Err(NotIssued::AuthorityExpires);
        }
        Ok(ValidityPeriod { not_before, not_after })
    }

    /// Returns the time at which the certificate is renewed: half of its life, earlier or later by a twentieth of it.
    /// `chance` is between 0 and 1.
    pub fn renewal(&self, chance: f64) -> Duration {
        let life = self.not_after.saturating_sub(self.not_before);
        self.not_before + life.mul_f64(0.5 + RENEWAL_JITTER * (2.0 * chance.clamp(0.0, 1.0) - 1.0))
    }

    /// Returns whether a certificate with this period is valid at `now`.
    pub fn contains(&self, now: Duration) -> bool {
        let now = whole_seconds(now);
        self.not_before <= now && now <= self.not_after
    }
}

/// Time over which the processes of a fleet renew their certificates after another authority has begun to sign.
pub const ROTATION_SPREAD: Duration = Duration::from_secs(30);

/// Returns the time at which a certificate is renewed. One of an authority that does not sign any more is renewed soon,
/// but not by all processes at once. `chance` is between 0 and 1.
pub fn renewal(period: ValidityPeriod, is_of_old_authority: bool, chance: f64, now: Duration) -> Duration {
    let due = period.renewal(chance);
    // The time is divided into windows, so that repeated calls within one give the same time.
    let window = ROTATION_SPREAD.as_secs().max(1);
    let begin = Duration::from_secs(now.as_secs() / window * window);
    // At least a second before the end of the window, so that a caller that waits for it does not find the next window.
    let last = ROTATION_SPREAD.saturating_sub(Duration::from_secs(1));
    let soon = begin + last.mul_f64(chance.clamp(0.0, 1.0));
    if is_of_old_authority { due.min(soon) } else { due }
}

fn whole_seconds(time: Duration) -> Duration {
    Duration::from_secs(time.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const DECADE: Duration = AUTHORITY_VALIDITY;

    /// Found by the property below: the time was between the last second of a window and its end.
    #[test]
    fn a_renewal_at_the_end_of_a_window_is_not_missed() {
        let now = Duration::from_secs(1_500_000_000);
        let period = ValidityPeriod::starting(now, VALIDITY, now + DECADE).unwrap();
        for chance in [0.974_717_143_020_864_3, 1.0] {
            let at = now + Duration::from_secs(29);
            assert!(renewal(period, true, chance, at) <= at, "{chance}");
        }
    }

    proptest! {
        #[test]
        fn a_new_certificate_is_valid_for_a_peer_whose_clock_is_wrong_by_the_tolerated_skew(
            now_ms in 1_500_000_000_000_u64..3_000_000_000_000,
            validity in 600_u64..=90 * 24 * 3600,
            skew_ms in 0_u64..=300_000,
        ) {
            let (now, skew) = (Duration::from_millis(now_ms), Duration::from_millis(skew_ms));
            let period = ValidityPeriod::starting(now, Duration::from_secs(validity), now + DECADE).unwrap();
            prop_assert!(period.contains(now) && period.contains(now - skew) && period.contains(now + skew));
            prop_assert!(period.not_after <= now + Duration::from_secs(validity));
        }

        #[test]
        fn a_certificate_is_renewed_near_half_of_its_life(
            now in 1_500_000_000_u64..3_000_000_000, validity in 600_u64..=90 * 24 * 3600, chance in 0.0..=1.0,
        ) {
            let (now, validity) = (Duration::from_secs(now), Duration::from_secs(validity));
            let period = ValidityPeriod::starting(now, validity, now + DECADE).unwrap();
            let (renewal, life) = (period.renewal(chance), period.not_after - period.not_before);
            prop_assert!(renewal >= period.not_before + life.mul_f64(0.449));
            prop_assert!(renewal <= period.not_before + life.mul_f64(0.551));
        }

        #[test]
        fn a_certificate_of_an_old_authority_is_renewed_within_two_windows(
            now in 1_500_000_000_u64..3_000_000_000, chance in 0.0..=1.0,
        ) {
            let now = Duration::from_secs(now);
            let period = ValidityPeriod::starting(now, VALIDITY, now + DECADE).unwrap();
            let second = Duration::from_secs(1);
            let is_due = |at: Duration| renewal(period, true, chance, at) <= at;
            prop_assert!((0..=60).any(|later| is_due(now + second * later)));
            prop_assert_eq!(renewal(period, false, chance, now), period.renewal(chance));
        }

        #[test]
        fn no_certificate_outlives_its_authority(
            now in 1_500_000_000_u64..3_000_000_000, validity in 600_u64..=90 * 24 * 3600, left in 0_u64..10_000_000,
        ) {
            let now = Duration::from_secs(now);
            let end = now + Duration::from_secs(left);
            match ValidityPeriod::starting(now, Duration::from_secs(validity), end) {
                Ok(period) => prop_assert!(period.not_after <= end && period.contains(now)),
                Err(error) => prop_assert!(error == NotIssued::AuthorityExpires && left < 600, "{}", error),
            }
        }
    }

    #[test]
    fn weak_keys_and_unknown_curves_are_rejected() {
        for key in [CsrKey::P256, CsrKey::P384, CsrKey::Ed25519, CsrKey::Rsa(2048), CsrKey::Rsa(4096)] {
            assert_eq!(check_key(key), Ok(()), "{key:?}");
        }
        for key in [CsrKey::Rsa(0), CsrKey::Rsa(1024), CsrKey::Rsa(2047), CsrKey::Rsa(4097), CsrKey::Other] {
            assert!(check_key(key).is_err_and(|error| error.to_string().contains("P-256")), "{key:?}");
        }
    }

    #[test]
    fn validity_is_accepted_at_its_limits_and_not_past_them() {
        let second = Duration::from_secs(1);
        for validity in [VALIDITY_MIN, VALIDITY, VALIDITY_MAX] {
            assert_eq!(check_validity(validity), Ok(()));
        }
        for validity in [VALIDITY_MIN - second, VALIDITY_MAX + second] {
            assert_eq!(check_validity(validity), Err(NotIssued::Validity(validity)));
        }
    }
}
