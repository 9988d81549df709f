//! Replacement of the authority, without a moment in which two processes cannot connect.
//!
//! ```text
//! single ──next authority is added──▶ next_trusted ──it signs──▶ next_signs ──old one is removed──▶ single
//!    ▲                                     │
//!    └──────────────cancelled──────────────┘
//! ```
//!
//! A process must trust the next authority before another one has a certificate of it, and every process must have such a
//! certificate before the old authority is removed. So a step waits for the processes that are not ready for it; a process
//! that is gone is revoked, or its certificate expires, or the operator forces the step. Persons are not waited for: they
//! obtain the next authority when they use the hub.

use std::time::Duration;

use regions::spiffe::SpiffeId;
use scheduler_api::WireError;
use scheduler_api::pki::CertificateV1;
use scheduler_api::{VERSION, parsed};

use super::token::Fingerprint;
use super::trust::{CertificateSerial, TrustState, TrustedAuthority, next_generation};

/// Phase of the rotation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RotationPhase {
    /// One authority is trusted and signs.
    Single,
    /// Two are trusted, and the old one signs.
    NextTrusted,
    /// Two are trusted, and the new one signs.
    NextSigns,
}

impl RotationPhase {
    const ALL: [RotationPhase; 3] =
        [RotationPhase::Single, RotationPhase::NextTrusted, RotationPhase::NextSigns];

    /// Returns the phase of a state.
    pub fn of(state: &TrustState) -> RotationPhase {
        match (state.authorities.len(), state.signer) {
            (2.., 0) => RotationPhase::NextTrusted,
            (2.., _) => RotationPhase::NextSigns,
            _ => RotationPhase::Single,
        }
    }

    /// Returns the text in messages.
    pub fn as_str(self) -> &'static str {
        match self {
            RotationPhase::Single => "single",
            RotationPhase::NextTrusted => "next_trusted",
            RotationPhase::NextSigns => "next_signs",
        }
    }
}

impl std::str::FromStr for RotationPhase {
    type Err = String;

    fn from_str(text: &str) -> Result<RotationPhase, String> {
        let found = RotationPhase::ALL.into_iter().find(|phase| phase.as_str() == text);
        found.ok_or_else(|| "is not a phase; write single, next_trusted or next_signs".to_owned())
    }
}

/// Issued certificate, as the hub records it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CertificateRecord {
    /// Serial number.
    pub serial: CertificateSerial,
    /// Owner.
    pub subject: SpiffeId,
    /// First second of its validity.
    pub not_before: Duration,
    /// Last second of its validity.
    pub not_after: Duration,
    /// Its authority.
    pub authority: Fingerprint,
    /// Number of certificates that were issued for it.
    pub renewals: u32,
    /// Generation of the trusted state that its owner applies.
    pub applied: u64,
}

impl TryFrom<CertificateV1> for CertificateRecord {
    type Error = WireError;

    fn try_from(wire: CertificateV1) -> Result<CertificateRecord, WireError> {
        let CertificateV1 {
            version: _,
            serial,
            subject,
            not_before_s,
            not_after_s,
            authority,
            renewals,
            applied,
        } = wire;
        Ok(CertificateRecord {
            serial: parsed("serial", &serial)?,
            subject: parsed("subject", &subject)?,
            not_before: Duration::from_secs(not_before_s),
            not_after: Duration::from_secs(not_after_s),
            authority: parsed("authority", &authority)?,
            renewals,
            applied,
        })
    }
}

impl From<&CertificateRecord> for CertificateV1 {
    fn from(record: &CertificateRecord) -> CertificateV1 {
        let CertificateRecord { serial, subject, not_before, not_after, authority, renewals, applied } =
            record;
        CertificateV1 {
            version: VERSION,
            serial: serial.to_string(),
            subject: subject.to_string(),
            not_before_s: not_before.as_secs(),
            not_after_s: not_after.as_secs(),
            authority: authority.to_string(),
            renewals: *renewals,
            applied: *applied,
        }
    }
}

/// Reason for not taking a step.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StepRejected {
    /// Another operator has continued the rotation since its state was shown.
    #[error("the rotation is in the phase {}, not in the one that was given; look again", .0.as_str())]
    OtherPhase(RotationPhase),
    /// The rotation was started without the certificate of the next authority.
    #[error("the first step needs the certificate of the next authority")]
    NoAuthority,
    /// The rotation was started with the certificate of the authority that is in use.
    #[error("the certificate is that of the present authority; create another one")]
    SameAuthority,
    /// The rotation of the authority can be cancelled only in its second phase.
    #[error(
        "only the phase next_trusted can be cancelled: before, nothing has changed, and after it the next authority \
             has signed certificates; finish the rotation, then begin another one"
    )]
    NotCancellable,
    /// The listed processes do not trust the next authority yet, or still have a certificate of the old one.
    #[error("the step would interrupt the connections of {}; wait, revoke those that are gone, or force the step",
            list(.0))]
    NotReady(Vec<SpiffeId>),
}

/// Maximum number of names in a message.
const NAMES_MAX: usize = 8;

fn list(names: &[SpiffeId]) -> String {
    let mut text = names.iter().take(NAMES_MAX).map(ToString::to_string).collect::<Vec<_>>().join(", ");
    if names.len() > NAMES_MAX {
        text.push_str(&format!(" and {} more", names.len() - NAMES_MAX));
    }
    text
}

/// Returns the owners of certificates for which the next step waits: processes that do not apply the present state, or
/// whose newest certificate is of the old authority.
pub fn waiting_for(state: &TrustState, certificates: &[CertificateRecord], now: Duration) -> Vec<SpiffeId> {
    let valid = |record: &&CertificateRecord| {
        record.subject.role().is_process()
            && record.not_after >= now
            && !state.revoked.contains_key(&record.serial)
    };
    let is_waited_for = |record: &&CertificateRecord| match RotationPhase::of(state) {
        RotationPhase::Single => false,
        // A renewed certificate is out of use, and its owner acknowledges with the new one.
        RotationPhase::NextTrusted => record.renewals == 0 && record.applied < state.generation,
        RotationPhase::NextSigns => record.renewals == 0 && record.authority != state.signer().fingerprint,
    };
    let mut names: Vec<SpiffeId> = certificates
        .iter()
        .filter(valid)
        .filter(is_waited_for)
        .map(|record| record.subject.clone())
        .collect();
    names.sort_by_key(ToString::to_string);
    names.dedup();
    names
}

/// Takes the next step of the rotation, if the caller has seen the present phase. `next` is the next authority for the
/// first step.
///
/// # Errors
///
/// The reason why the step is not taken; the state stays.
pub fn step(
    state: &TrustState,
    seen: RotationPhase,
    next: Option<TrustedAuthority>,
    certificates: &[CertificateRecord],
    force: bool,
    now: Duration,
) -> Result<TrustState, StepRejected> {
    let phase = RotationPhase::of(state);
    if phase != seen {
        return Err(StepRejected::OtherPhase(phase));
    }
    let waiting = waiting_for(state, certificates, now);
    if !waiting.is_empty() && !force {
        return Err(StepRejected::NotReady(waiting));
    }
    let mut changed = state.clone();
    match phase {
        RotationPhase::Single => {
            let next = next.ok_or(StepRejected::NoAuthority)?;
            if next.fingerprint == state.signer().fingerprint {
                return Err(StepRejected::SameAuthority);
            }
            changed.authorities.push(next);
        }
        RotationPhase::NextTrusted => changed.signer = 1,
        RotationPhase::NextSigns => {
            changed.authorities.remove(0);
            changed.signer = 0;
        }
    }
    changed.generation = next_generation(state.generation, now);
    Ok(changed)
}

/// Cancels the rotation before the next authority has signed anything.
///
/// # Errors
///
/// [`StepRejected::NotCancellable`].
pub fn cancel(state: &TrustState, now: Duration) -> Result<TrustState, StepRejected> {
    if RotationPhase::of(state) != RotationPhase::NextTrusted {
        return Err(StepRejected::NotCancellable);
    }
    let mut changed = state.clone();
    changed.authorities.truncate(1);
    changed.generation = next_generation(state.generation, now);
    Ok(changed)
}

#[cfg(test)]
mod tests {
    use super::super::trust::tests::authority;
    use super::*;
    use proptest::prelude::*;

    const NOW: Duration = Duration::from_secs(1000);

    fn process(number: u8, authority: Fingerprint, applied: u64) -> CertificateRecord {
        CertificateRecord {
            serial: CertificateSerial::from_random([number.max(1); 16]),
            subject: format!("spiffe://m/spoke/aws/r{number}/in/de").parse().unwrap(),
            not_before: Duration::ZERO,
            not_after: NOW + NOW,
            authority,
            renewals: 0,
            applied,
        }
    }

    /// State of a simulated process: the authorities that it trusts, and the one that signed its certificate.
    #[derive(Clone, Debug)]
    struct Simulated {
        trusts: Vec<Fingerprint>,
        record: CertificateRecord,
    }

    #[derive(Clone, Debug)]
    enum RotationAction {
        Follow(usize),
        Renew(usize),
        Step,
        Cancel,
    }

    fn action() -> impl Strategy<Value = RotationAction> {
        prop_oneof![
            (0_usize..4).prop_map(RotationAction::Follow),
            (0_usize..4).prop_map(RotationAction::Renew),
            Just(RotationAction::Step),
            Just(RotationAction::Cancel),
        ]
    }

    proptest! {
        #[test]
        fn every_two_processes_trust_each_other_at_every_moment_of_a_rotation(
            actions in proptest::collection::vec(action(), 0..80),
        ) {
            let mut state = TrustState::new("m".to_owned(), authority(0), NOW);
            let first = state.signer().fingerprint;
            let mut processes: Vec<_> = (0..4)
                .map(|n| Simulated { trusts: vec![first], record: process(n, first, state.generation) })
                .collect();
            let mut next = 1;
            for action in actions {
                let records: Vec<_> = processes.iter().map(|it| it.record.clone()).collect();
                match action {
                    RotationAction::Follow(at) => {
                        processes[at].trusts = state.authorities.iter().map(|it| it.fingerprint).collect();
                        processes[at].record.applied = state.generation;
                    }
                    RotationAction::Renew(at) => processes[at].record.authority = state.signer().fingerprint,
                    RotationAction::Step => {
                        let offered = Some(authority(next));
                        let changed = step(&state, RotationPhase::of(&state), offered, &records, false, NOW);
                        if let Ok(changed) = changed {
                            prop_assert!(changed.generation > state.generation);
                            next += 1;
                            state = changed;
                        }
                    }
                    RotationAction::Cancel => {
                        if let Ok(changed) = cancel(&state, NOW) {
                            state = changed;
                        }
                    }
                }
                for one in &processes {
                    for other in &processes {
                        prop_assert!(one.trusts.contains(&other.record.authority), "{one:?} {other:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn a_rotation_has_three_steps_and_each_waits_for_the_processes_that_are_not_ready() {
        let state = TrustState::new("m".to_owned(), authority(1), NOW);
        let (old, new) = (authority(1).fingerprint, authority(2).fingerprint);
        let mut records = vec![process(1, old, 0), process(2, old, 0)];
        let single = RotationPhase::Single;
        assert_eq!(step(&state, single, None, &records, false, NOW), Err(StepRejected::NoAuthority));
        let same = step(&state, single, Some(authority(1)), &records, false, NOW);
        assert_eq!(same, Err(StepRejected::SameAuthority));
        assert_eq!(cancel(&state, NOW), Err(StepRejected::NotCancellable));

        let trusted = step(&state, single, Some(authority(2)), &records, false, NOW).unwrap();
        let phase = RotationPhase::NextTrusted;
        assert_eq!(RotationPhase::of(&trusted), phase);
        assert_eq!(trusted.signer().fingerprint, old);
        let repeated = step(&trusted, single, Some(authority(3)), &records, false, NOW);
        assert_eq!(repeated, Err(StepRejected::OtherPhase(phase)));
        assert_eq!(cancel(&trusted, NOW).unwrap().authorities, state.authorities);

        records[0].applied = trusted.generation;
        let both = step(&trusted, phase, None, &records, false, NOW);
        assert_eq!(both, Err(StepRejected::NotReady(vec![records[1].subject.clone()])));
        assert!(step(&trusted, phase, None, &records, true, NOW).is_ok());
        let mut revoked = trusted.clone();
        revoked.revoked.insert(records[1].serial.clone(), NOW + NOW);
        assert!(
            step(&revoked, phase, None, &records, false, NOW).is_ok(),
            "a revoked process is not waited for"
        );
        assert!(step(&trusted, phase, None, &records, false, NOW * 3).is_ok(), "nor an expired one");
        records[1].applied = trusted.generation;
        let signs = step(&trusted, phase, None, &records, false, NOW).unwrap();
        assert_eq!((RotationPhase::of(&signs), signs.signer().fingerprint), (RotationPhase::NextSigns, new));
        assert_eq!(cancel(&signs, NOW), Err(StepRejected::NotCancellable));

        let phase = RotationPhase::NextSigns;
        let waiting = step(&signs, phase, None, &records, false, NOW).unwrap_err();
        assert!(waiting.to_string().contains("spiffe://m/spoke/aws/r1/in/de, spiffe://m/spoke/aws/r2/in/de"));
        records.iter_mut().for_each(|record| record.authority = new);
        let last = step(&signs, phase, None, &records, false, NOW).unwrap();
        assert_eq!(RotationPhase::of(&last), single);
        assert_eq!(last.authorities, [authority(2)]);
    }

    #[test]
    fn a_certificate_record_is_read_back_as_it_was_written() {
        let record = process(7, authority(1).fingerprint, 9);
        assert_eq!(CertificateRecord::try_from(CertificateV1::from(&record)), Ok(record));
        assert_eq!("next_signs".parse(), Ok(RotationPhase::NextSigns));
        assert!("other".parse::<RotationPhase>().is_err());
    }
}
