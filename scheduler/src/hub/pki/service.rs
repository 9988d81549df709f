//! Operations of the authority: decisions of [`scheduler_core::pki`], signatures, and guarded writes to the store.
//!
//! Hubs with one store share the state. Each certificate is written with a guard on the trusted state and on the token or
//! the certificate for which it is issued. So two hubs never accept a token twice, and no certificate is issued for one
//! that was revoked at the same time.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant, SystemTime};

use regions::Catalogue;
use regions::spiffe::{Role, SpiffeId};
use replica_api::error::ErrorCode;
use scheduler_api::error::HubErrorCode;
use scheduler_api::pki::{
    AuthorityV1, CertificateV1, CertificatesV1, IssuedV1, NewTokenResponseV1, NewTokenV1, OpenTokenV1,
    RevocationsV1, RevokeV1, RotateV1, RotationV1, TokenRecordV1, TrustV1,
};
use scheduler_api::{VERSION, WireError, keys, parsed};
use scheduler_core::pki::closed::ClosedTokens;
use scheduler_core::pki::issue::{self, NotIssued, ValidityPeriod};
use scheduler_core::pki::limit::FailedJoins;
use scheduler_core::pki::rotation::{self, CertificateRecord, RotationPhase, StepRejected};
use scheduler_core::pki::subject::{self, SubjectError};
use scheduler_core::pki::token::{
    Fingerprint, Join, JoinSecret, TOKENS_MAX, TTL_MAX, TTL_MIN, TokenRecord, TokenRejected, TokenUse,
};
use scheduler_core::pki::trust::{CertificateSerial, TooManyRevoked, TrustState, is_expired};
use scheduler_store::{Compare, KeyValue, Op, Range, Store, StoreError, Txn};
use supervision::Mutex;

use super::super::denials::JoinRejection;
use super::super::records::{self, RecordError};
use super::csr::{InvalidCsr, RequestedKey};
use super::signer::{self, AuthoritySigner, CertificateOrder, SignerError};
use crate::events::{CertificateIssued, CertificatesRevoked, JoinRejected, JoinTokenCreated, RotationStep};
use crate::respond::{Code, ErrorResponse};

/// Maximum attempts of a guarded write. Each failed one means that another request has succeeded.
const ATTEMPTS_MAX: u32 = 8;
/// Maximum number of certificates that are issued for one certificate. A process renews it once, and a spoke requests one
/// for its replicas; more attempts happen if the process is killed before the new one is on its disk.
const RENEWALS_MAX: u32 = 16;
/// Maximum number of certificates that have not expired.
const CERTIFICATES_MAX: usize = 50_000;
/// Operations of one transaction that deletes expired records.
const DELETED_AT_ONCE: usize = 100;

/// The built-in authority.
pub(super) struct IssuingAuthority<S> {
    pub(super) store: S,
    pub(super) signer: Arc<dyn AuthoritySigner>,
    pub(super) catalogue: Arc<Catalogue>,
    /// Validity of the certificates of processes.
    pub(super) validity: Duration,
    /// Folder for the key of the next authority; `None` with an external signer.
    pub(super) folder: Option<std::path::PathBuf>,
    /// Tokens that were used or revoked, whatever the store says.
    pub(super) closed: Arc<Mutex<ClosedTokens>>,
    failed_joins: Mutex<FailedJoins>,
    /// Number of stored certificates, counted when expired ones are deleted.
    certificates: AtomicUsize,
}

/// Trusted state, with the revision of its record.
struct Stored {
    state: TrustState,
    revision: u64,
}

/// Rejected request.
#[derive(Debug, thiserror::Error)]
pub(super) enum PkiError {
    #[error("{0}")]
    Wire(#[from] WireError),
    #[error("{0}")]
    Csr(#[from] InvalidCsr),
    #[error("{0}")]
    Subject(#[from] SubjectError),
    #[error("{0}")]
    NotIssued(#[from] NotIssued),
    #[error("{0}")]
    Token(#[from] TokenRejected),
    #[error("{0}")]
    Step(#[from] StepRejected),
    #[error("{0}")]
    Revocations(#[from] TooManyRevoked),
    #[error("{0}")]
    Signer(#[from] SignerError),
    #[error("{0}")]
    Store(#[from] StoreError),
    #[error("{0}")]
    Record(#[from] RecordError),
    /// An address that tries invalid join tokens is rejected for a while.
    #[error("too many failed attempts to join from this address; wait {} s", .0.as_secs().max(1))]
    TooManyAttempts(Duration),
    /// A process with a revoked certificate requested a renewal.
    #[error("the certificate is revoked; join again with a new token")]
    Revoked,
    #[error("{0}")]
    Limit(String),
    #[error("{0}")]
    Invalid(String),
    #[error("{0}")]
    NotFound(String),
    /// The authority has just started and is not ready for requests.
    #[error("the authority has no record in the store yet; wait until the hub has read its folder")]
    NotReady,
    /// Concurrent requests to the authority changed the same records, and this one had no effect.
    #[error("other requests changed the same records {ATTEMPTS_MAX} times; repeat the request")]
    Busy,
}

impl From<PkiError> for ErrorResponse {
    fn from(error: PkiError) -> ErrorResponse {
        let code: Code = match error {
            PkiError::Store(error) => return error.into(),
            PkiError::Wire(error) => return error.into(),
            PkiError::Record(error) => return error.into(),
            PkiError::Csr(InvalidCsr::TooLong(_)) => ErrorCode::BodyTooLarge.into(),
            PkiError::Csr(_) | PkiError::Subject(_) | PkiError::Invalid(_) => ErrorCode::InvalidValue.into(),
            PkiError::Token(_) | PkiError::Revoked => HubErrorCode::Forbidden.into(),
            PkiError::Step(_) | PkiError::Busy => HubErrorCode::Conflict.into(),
            PkiError::TooManyAttempts(_) | PkiError::Limit(_) | PkiError::Revocations(_) => {
                ErrorCode::Overloaded.into()
            }
            PkiError::NotFound(_) => ErrorCode::NotFound.into(),
            PkiError::Signer(_) | PkiError::NotIssued(_) | PkiError::NotReady => ErrorCode::NotReady.into(),
        };
        ErrorResponse::new(code, format!("{error}."))
    }
}

impl PkiError {
    /// Returns why a request to join was rejected; `None` if the hub failed, and the request may be repeated.
    pub(super) fn join_rejection(&self) -> Option<JoinRejection> {
        match self {
            PkiError::Token(TokenRejected::Unknown) => Some(JoinRejection::Unknown),
            PkiError::Token(TokenRejected::Expired) => Some(JoinRejection::Expired),
            PkiError::Token(TokenRejected::Used(_)) => Some(JoinRejection::Used),
            PkiError::Revoked => Some(JoinRejection::Revoked),
            PkiError::Csr(_) | PkiError::Wire(_) => Some(JoinRejection::InvalidRequest),
            PkiError::TooManyAttempts(_) => Some(JoinRejection::TooManyAttempts),
            PkiError::Subject(_)
            | PkiError::NotIssued(_)
            | PkiError::Step(_)
            | PkiError::Revocations(_)
            | PkiError::Signer(_)
            | PkiError::Store(_)
            | PkiError::Record(_)
            | PkiError::Limit(_)
            | PkiError::Invalid(_)
            | PkiError::NotFound(_)
            | PkiError::NotReady
            | PkiError::Busy => None,
        }
    }
}

/// Returns the time since 1970.
pub(super) fn unix_time() -> Duration {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default()
}

impl<S: Store> IssuingAuthority<S> {
    pub(super) fn new(
        store: S,
        signer: Arc<dyn AuthoritySigner>,
        catalogue: Arc<Catalogue>,
        validity: Duration,
        folder: Option<std::path::PathBuf>,
    ) -> IssuingAuthority<S> {
        let failed_joins = Mutex::independent(FailedJoins::default());
        IssuingAuthority {
            store,
            signer,
            catalogue,
            validity,
            folder,
            closed: Arc::new(Mutex::independent(ClosedTokens::default())),
            failed_joins,
            certificates: AtomicUsize::new(0),
        }
    }

    /// Writes the state of the first authority, unless the store has one.
    pub(super) async fn begin(
        &self,
        first: TrustState,
        certificates: Vec<CertificateRecord>,
    ) -> Result<(), StoreError> {
        let when = vec![Compare::CreateRevision(keys::TRUST.to_owned(), 0)];
        let mut then = vec![put(keys::TRUST.to_owned(), records::bytes(&TrustV1::from(&first)))];
        then.extend(certificates.into_iter().map(|record| {
            // Its owner has the state that is written here, of another generation.
            let record = CertificateRecord { applied: first.generation, ..record };
            put(keys::certificate(record.serial.as_str()), records::bytes(&CertificateV1::from(&record)))
        }));
        self.store.txn(Txn { when, then }).await.map(drop)
    }

    async fn trust(&self) -> Result<Stored, PkiError> {
        let entry = self.store.get(keys::TRUST).await?.ok_or(PkiError::NotReady)?;
        Ok(Stored { state: records::trust(&entry)?, revision: entry.mod_revision })
    }

    /// Returns the fingerprint of the authority that signs.
    pub(super) async fn signing_authority(&self) -> Result<Fingerprint, PkiError> {
        Ok(self.trust().await?.state.signer().fingerprint)
    }

    /// Creates a join token.
    pub(super) async fn create_token(
        &self,
        request: NewTokenV1,
        now: Duration,
    ) -> Result<NewTokenResponseV1, PkiError> {
        let NewTokenV1 { version: _, role, region, name, ttl_s, validity_s } = request;
        let role: Role = parsed("role", &role)?;
        let region = region.map(|region| parsed("region", &region)).transpose()?;
        let ttl = Duration::from_secs(ttl_s);
        if !(TTL_MIN..=TTL_MAX).contains(&ttl) {
            return Err(PkiError::Invalid(format!(
                "`ttl_s` ({ttl_s}) is not between {TTL_MIN:?} and {TTL_MAX:?}"
            )));
        }
        let validity = validity_s.map_or(self.validity, Duration::from_secs);
        issue::check_validity(validity)?;
        let Stored { state, revision: _ } = self.trust().await?;
        let subject =
            subject::subject(&state.domain, role, region.as_ref(), name.as_deref(), &self.catalogue)?;
        let stored = self.store.range(keys::JOIN_TOKENS).await?.entries.len();
        if stored >= TOKENS_MAX {
            return Err(PkiError::Limit(format!(
                "{TOKENS_MAX} join tokens are stored; wait until some expire"
            )));
        }
        let secret = JoinSecret::from_random(rand::random());
        let record = TokenRecord { subject, expires: now + ttl, validity, used: None };
        let value = records::bytes(&TokenRecordV1::from(&record));
        self.store.put(&keys::join_token(&secret.hash()), value, None).await?;
        let TokenRecord { subject, expires, validity: _, used: _ } = record;
        JoinTokenCreated { subject: &subject, ttl }.emit();
        Ok(NewTokenResponseV1 {
            version: VERSION,
            secret: secret.reveal(),
            fingerprints: state.authorities.iter().map(|it| it.fingerprint.to_string()).collect(),
            subject: subject.to_string(),
            expires_s: expires.as_secs(),
        })
    }

    /// Deletes all tokens; returns their number.
    pub(super) async fn delete_all_tokens(&self) -> Result<usize, StoreError> {
        let tokens = self.store.range(keys::JOIN_TOKENS).await?.entries;
        for part in tokens.chunks(DELETED_AT_ONCE) {
            let then = part.iter().map(|entry| Op::Delete { key: entry.key.clone() }).collect();
            self.store.txn(Txn { when: Vec::new(), then }).await?;
        }
        Ok(tokens.len())
    }

    /// Issues the first certificate of a process or person, for a token. `address` is that of the caller.
    pub(super) async fn join(
        &self,
        secret: &str,
        csr: &str,
        address: IpAddr,
        now: Duration,
    ) -> Result<IssuedV1, PkiError> {
        if let Some(delay) = self.failed_joins.lock().delay(address, Instant::now()) {
            return Err(PkiError::TooManyAttempts(delay));
        }
        let joined = self.join_once_checked(secret, csr, now).await;
        if let Err(error @ (PkiError::Token(_) | PkiError::Csr(_) | PkiError::Wire(_) | PkiError::Revoked)) =
            &joined
        {
            self.failed_joins.lock().failed(address, Instant::now());
            JoinRejected { address, reason: error }.emit();
        }
        joined
    }

    async fn join_once_checked(&self, secret: &str, csr: &str, now: Duration) -> Result<IssuedV1, PkiError> {
        let requested = RequestedKey::parse(csr)?;
        let hash = secret.parse::<JoinSecret>().map_err(|_| TokenRejected::Unknown)?.hash();
        let key = keys::join_token(&hash);
        for _ in 0..ATTEMPTS_MAX {
            let Some(entry) = self.store.get(&key).await? else { return Err(TokenRejected::Unknown.into()) };
            let token = records::join_token(&entry)?;
            if token.used.is_none() && self.closed.lock().contains(&hash) {
                // The store was restored from a backup that is older than the use.
                return Err(TokenRejected::Used(Box::new(token.subject)).into());
            }
            let trust = self.trust().await?;
            if let Join::Repeat(certificate) = token.join(&requested.sha256, now)? {
                return self.repeat(certificate, &trust.state).await;
            }
            let order = (&token.subject, token.validity);
            let (record, certificate) = self.sign(order, &requested, &trust.state, now).await?;
            let used =
                Some(TokenUse { key_sha256: requested.sha256.clone(), certificate: certificate.clone() });
            let value = records::bytes(&TokenRecordV1::from(&TokenRecord { used, ..token }));
            let guard = Compare::ModRevision(key.clone(), entry.mod_revision);
            if self.write(&trust, &record, guard, put(key.clone(), value)).await? {
                CertificateIssued::emit(&record, "join");
                return Ok(issued(&record, certificate, &trust.state));
            }
        }
        Err(PkiError::Busy)
    }

    /// Sends the certificate of a token again, because the first response may have been lost.
    async fn repeat(&self, certificate: String, trust: &TrustState) -> Result<IssuedV1, PkiError> {
        let serial = signer::serial_of(&certificate)?;
        let entry = self.store.get(&keys::certificate(serial.as_str())).await?;
        let entry = entry.ok_or(TokenRejected::Expired)?;
        if trust.revoked.contains_key(&serial) {
            return Err(PkiError::Revoked);
        }
        Ok(issued(&records::certificate(&entry)?, certificate, trust))
    }

    /// Issues the next certificate of the owner of a certificate.
    pub(super) async fn renew(
        &self,
        owner: &SpiffeId,
        serial: &CertificateSerial,
        csr: &str,
        now: Duration,
    ) -> Result<IssuedV1, PkiError> {
        self.issue(owner, serial, csr, "renewal", now).await
    }

    /// Issues a certificate for the replicas that a spoke starts in its region.
    pub(super) async fn issue_for_replicas(
        &self,
        spoke: &SpiffeId,
        serial: &CertificateSerial,
        csr: &str,
        now: Duration,
    ) -> Result<IssuedV1, PkiError> {
        let replica = spoke.with_role(Role::Replica).map_err(|wrong| PkiError::Invalid(wrong.to_string()))?;
        self.issue(&replica, serial, csr, "replicas of a spoke", now).await
    }

    /// Issues a certificate of `subject` to the owner of the certificate `serial`.
    async fn issue(
        &self,
        subject: &SpiffeId,
        serial: &CertificateSerial,
        csr: &str,
        cause: &'static str,
        now: Duration,
    ) -> Result<IssuedV1, PkiError> {
        let requested = RequestedKey::parse(csr)?;
        let key = keys::certificate(serial.as_str());
        for _ in 0..ATTEMPTS_MAX {
            let entry = self.store.get(&key).await?;
            let trust = self.trust().await?;
            if trust.state.revoked.contains_key(serial) {
                return Err(PkiError::Revoked);
            }
            // The store lacks the record if it was restored from an older backup. The certificate is valid all the same.
            let current = entry.as_ref().map(records::certificate).transpose()?;
            let revision = entry.map_or(0, |entry| entry.mod_revision);
            let life = current.as_ref().map(|it| it.not_after.saturating_sub(it.not_before + super::SKEW));
            let validity = life.filter(|_| !subject.role().is_process()).unwrap_or(self.validity);
            if current.as_ref().is_some_and(|current| current.renewals >= RENEWALS_MAX) {
                return Err(PkiError::Limit(format!(
                    "{RENEWALS_MAX} certificates were issued for this one, but its owner still uses it; check that its \
                     folder is writable, or revoke it and join again"
                )));
            }
            let (record, certificate) = self.sign((subject, validity), &requested, &trust.state, now).await?;
            let guard = Compare::ModRevision(key.clone(), revision);
            let counted = match current {
                Some(current) => {
                    let counted = CertificateRecord { renewals: current.renewals + 1, ..current };
                    put(key.clone(), records::bytes(&CertificateV1::from(&counted)))
                }
                None => Op::Delete { key: key.clone() },
            };
            if self.write(&trust, &record, guard, counted).await? {
                CertificateIssued::emit(&record, cause);
                return Ok(issued(&record, certificate, &trust.state));
            }
        }
        Err(PkiError::Busy)
    }

    async fn sign(
        &self,
        (subject, validity): (&SpiffeId, Duration),
        requested: &RequestedKey,
        trust: &TrustState,
        now: Duration,
    ) -> Result<(CertificateRecord, String), PkiError> {
        if self.certificates.load(Ordering::Relaxed) >= CERTIFICATES_MAX {
            return Err(PkiError::Limit(format!(
                "{CERTIFICATES_MAX} certificates have not expired; shorten authority.validity"
            )));
        }
        let authority = trust.signer().clone();
        let period = ValidityPeriod::starting(now, validity, authority.not_after)?;
        let serial = CertificateSerial::from_random(rand::random());
        let (signer, key) = (self.signer.clone(), requested.key.clone());
        let (subject, ordered) = (subject.clone(), serial.clone());
        let (signed_by, named) = (authority.clone(), subject.clone());
        let signed = tokio::task::spawn_blocking(move || {
            let order = CertificateOrder { subject: &named, serial: &ordered, period, key: &key };
            signer::sign(&*signer, &signed_by, &order)
        });
        let certificate =
            signed.await.map_err(|_| SignerError::Certificate("the signer panicked".to_owned()))??;
        let record = CertificateRecord {
            serial,
            subject,
            not_before: period.not_before,
            not_after: period.not_after,
            authority: authority.fingerprint,
            renewals: 0,
            applied: trust.generation,
        };
        Ok((record, certificate))
    }

    /// Writes an issued certificate, if neither the trusted state nor the guarded record has changed; returns whether it was
    /// written.
    async fn write(
        &self,
        trust: &Stored,
        record: &CertificateRecord,
        guard: Compare,
        change: Op,
    ) -> Result<bool, PkiError> {
        let key = keys::certificate(record.serial.as_str());
        let value = records::bytes(&CertificateV1::from(record));
        let when = vec![Compare::ModRevision(keys::TRUST.to_owned(), trust.revision), guard];
        let written =
            self.store.txn(Txn { when, then: vec![put(key.clone(), value), change] }).await?.succeeded;
        // Of two attempts of the store's client the first may have succeeded; no one else writes this key.
        let written = written || self.store.get(&key).await?.is_some();
        if written {
            self.certificates.fetch_add(1, Ordering::Relaxed);
        }
        Ok(written)
    }

    /// Records that the owner of a certificate applies the trusted state of this generation.
    pub(super) async fn applied(&self, serial: &CertificateSerial, generation: u64) -> Result<(), PkiError> {
        let key = keys::certificate(serial.as_str());
        let Some(entry) = self.store.get(&key).await? else { return Ok(()) };
        let record = records::certificate(&entry)?;
        if record.applied >= generation || generation > self.trust().await?.state.generation {
            return Ok(());
        }
        let changed = CertificateRecord { applied: generation, ..record };
        let when = vec![Compare::ModRevision(key.clone(), entry.mod_revision)];
        let then = vec![put(key, records::bytes(&CertificateV1::from(&changed)))];
        // If another request has changed it, the next poll repeats this.
        self.store.txn(Txn { when, then }).await?;
        Ok(())
    }

    async fn certificates(&self) -> Result<Vec<CertificateRecord>, PkiError> {
        let entries = self.store.range(keys::CERTIFICATES).await?.entries;
        Ok(entries.iter().filter_map(|entry| records::certificate(entry).ok()).collect())
    }

    /// Lists the certificates and unused tokens.
    pub(super) async fn list(&self, now: Duration) -> Result<CertificatesV1, PkiError> {
        let mut certificates: Vec<_> =
            self.certificates().await?.into_iter().filter(|record| record.not_after >= now).collect();
        certificates.sort_by_key(|record| (record.subject.to_string(), record.not_before));
        let revoked = self.trust().await?.state.revoked;
        let tokens = self.store.range(keys::JOIN_TOKENS).await?.entries;
        let tokens = tokens.iter().filter_map(|entry| records::join_token(entry).ok());
        let open = tokens.filter(|token| token.used.is_none() && token.expires >= now);
        Ok(CertificatesV1 {
            version: VERSION,
            certificates: certificates.iter().map(CertificateV1::from).collect(),
            revoked: revoked.keys().map(ToString::to_string).collect(),
            tokens: open
                .map(|token| OpenTokenV1 {
                    subject: token.subject.to_string(),
                    expires_s: token.expires.as_secs(),
                })
                .collect(),
        })
    }

    /// Revokes a certificate, or all certificates and unused tokens of an owner. `own` is the serial number of the caller's
    /// certificate.
    pub(super) async fn revoke(
        &self,
        request: &RevokeV1,
        own: Option<&CertificateSerial>,
        now: Duration,
    ) -> Result<RevocationsV1, PkiError> {
        let RevokeV1 { version: _, target, own: including_own } = request;
        let is_meant = |record: &CertificateRecord| {
            record.serial.as_str() == target || subject::is_named(&record.subject, target)
        };
        let mut revoked: BTreeMap<CertificateSerial, CertificateRecord> = BTreeMap::new();
        // Tokens first: afterwards, no further certificate is issued for one.
        let tokens = self.delete_tokens(target).await?;
        for _ in 0..ATTEMPTS_MAX {
            let found = self.certificates().await?;
            let trust = self.trust().await?;
            let meant: Vec<_> = found
                .into_iter()
                .filter(|record| is_meant(record) && record.not_after >= now)
                .filter(|record| !trust.state.revoked.contains_key(&record.serial))
                .collect();
            if meant.iter().any(|record| Some(&record.serial) == own) && !including_own {
                return Err(PkiError::Invalid(
                    "`target`: this is the certificate with which the request is sent; use another operator's, or \
                     --own"
                        .to_owned(),
                ));
            }
            if meant.is_empty() {
                // Nothing is left, also no certificate that was issued while the others were being revoked.
                if revoked.is_empty() && tokens == 0 {
                    return Err(PkiError::NotFound(format!(
                        "no valid certificate and no unused token has this serial number or name; `meridian pki list` \
                         shows them (given: {} characters)",
                        target.chars().count()
                    )));
                }
                CertificatesRevoked { certificates: revoked.len(), tokens }.emit();
                let revoked = revoked.values().map(CertificateV1::from).collect();
                return Ok(RevocationsV1 { version: VERSION, revoked, tokens });
            }
            let entries = meant.iter().map(|record| (record.serial.clone(), record.not_after));
            let next = trust.state.revoke(entries, now)?;
            if self.replace_trust(&trust, &next).await? {
                revoked.extend(meant.into_iter().map(|record| (record.serial.clone(), record)));
            }
        }
        Err(PkiError::Busy)
    }

    async fn delete_tokens(&self, target: &str) -> Result<usize, PkiError> {
        let mut deleted = 0;
        for entry in self.store.range(keys::JOIN_TOKENS).await?.entries {
            let is_meant = records::join_token(&entry)
                .is_ok_and(|token| token.used.is_none() && subject::is_named(&token.subject, target));
            if is_meant {
                self.store.delete(&entry.key).await?;
                deleted += 1;
            }
        }
        Ok(deleted)
    }

    async fn replace_trust(&self, from: &Stored, to: &TrustState) -> Result<bool, PkiError> {
        let when = vec![Compare::ModRevision(keys::TRUST.to_owned(), from.revision)];
        let then = vec![put(keys::TRUST.to_owned(), records::bytes(&TrustV1::from(to)))];
        if self.store.txn(Txn { when, then }).await?.succeeded {
            return Ok(true);
        }
        // Of two attempts of the store's client the first may have succeeded.
        Ok(self.trust().await?.state == *to)
    }

    /// Returns the phase of the rotation.
    pub(super) async fn rotation(&self, now: Duration) -> Result<RotationV1, PkiError> {
        let trust = self.trust().await?;
        Ok(rotation_response(&trust.state, &self.certificates().await?, now))
    }

    /// Takes the next step of the rotation, or cancels it.
    pub(super) async fn rotate(&self, request: RotateV1, now: Duration) -> Result<RotationV1, PkiError> {
        let RotateV1 { version: _, phase, certificate, cancel, force } = request;
        let seen: RotationPhase = parsed("phase", &phase)?;
        let trust = self.trust().await?;
        let certificates = self.certificates().await?;
        let present = RotationPhase::of(&trust.state);
        let next = if cancel {
            rotation::cancel(&trust.state, now)?
        } else {
            let next = match (present == RotationPhase::Single && seen == present, certificate, &self.folder)
            {
                (false, _, _) | (true, None, None) => None,
                (true, Some(pem), _) => Some(self.given_authority(&pem, &trust.state)?),
                (true, None, Some(folder)) => {
                    let (folder, domain) = (folder.clone(), trust.state.domain.clone());
                    let created =
                        tokio::task::spawn_blocking(move || signer::create_authority(&folder, &domain, now));
                    let created = created.await.map_err(|error| PkiError::Limit(error.to_string()))?;
                    Some(created.map_err(PkiError::Limit)?)
                }
            };
            rotation::step(&trust.state, seen, next, &certificates, force, now)?
        };
        if !self.replace_trust(&trust, &next).await? {
            return Err(PkiError::Busy);
        }
        RotationStep {
            phase: RotationPhase::of(&next).as_str(),
            signer: &next.signer().fingerprint,
            authorities: next.authorities.len(),
        }
        .emit();
        Ok(rotation_response(&next, &certificates, now))
    }

    fn given_authority(
        &self,
        pem: &str,
        trust: &TrustState,
    ) -> Result<scheduler_core::pki::trust::TrustedAuthority, PkiError> {
        let (authority, domain) = signer::read_authority(pem)?;
        if domain != trust.domain {
            return Err(PkiError::Invalid(format!(
                "`certificate`: its trust domain is {domain}, but the fleet's is {}",
                trust.domain
            )));
        }
        Ok(authority)
    }

    /// Deletes the records of expired certificates and tokens.
    pub(super) async fn delete_expired(&self, now: Duration) -> Result<(), PkiError> {
        let Range { entries, revision: _ } = self.store.range(keys::CERTIFICATES).await?;
        let is_old = |entry: &&KeyValue| {
            records::certificate(entry).is_ok_and(|record| is_expired(record.not_after, now))
        };
        let mut old: Vec<String> = entries.iter().filter(is_old).map(|entry| entry.key.clone()).collect();
        self.certificates.store(entries.len() - old.len(), Ordering::Relaxed);
        let tokens = self.store.range(keys::JOIN_TOKENS).await?.entries;
        let is_old =
            |entry: &&KeyValue| records::join_token(entry).is_ok_and(|token| is_expired(token.expires, now));
        old.extend(tokens.iter().filter(is_old).map(|entry| entry.key.clone()));
        for part in old.chunks(DELETED_AT_ONCE) {
            let then = part.iter().map(|key| Op::Delete { key: key.clone() }).collect();
            self.store.txn(Txn { when: Vec::new(), then }).await?;
        }
        Ok(())
    }
}

fn put(key: String, value: Vec<u8>) -> Op {
    Op::Put { key, value, lease: None }
}

fn issued(record: &CertificateRecord, certificate: String, trust: &TrustState) -> IssuedV1 {
    IssuedV1 {
        version: VERSION,
        serial: record.serial.to_string(),
        authority: record.authority.to_string(),
        not_before_s: record.not_before.as_secs(),
        not_after_s: record.not_after.as_secs(),
        certificate,
        trust: TrustV1::from(trust),
    }
}

fn rotation_response(state: &TrustState, certificates: &[CertificateRecord], now: Duration) -> RotationV1 {
    let waiting = rotation::waiting_for(state, certificates, now);
    RotationV1 {
        version: VERSION,
        phase: RotationPhase::of(state).as_str().to_owned(),
        authorities: state.authorities.iter().map(AuthorityV1::from).collect(),
        signer: state.signer,
        waiting_for: waiting.iter().map(ToString::to_string).collect(),
    }
}

#[cfg(test)]
mod tests;
