//! Messages and records of the built-in certificate authority. The decisions are in `scheduler_core::pki`.
//!
//! Certificates and requests for them are PEM, times are seconds since 1970, serial numbers and fingerprints are
//! lower-case hexadecimal digits.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::MessageVersion;

/// `POST /v1/pki/tokens`: request for a join token.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NewTokenV1 {
    /// Version of the message.
    pub version: MessageVersion,
    /// Role of the certificate.
    pub role: String,
    /// Region of a process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub region: Option<String>,
    /// Name of a person.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Time in which the token can be used.
    pub ttl_s: u64,
    /// Validity of the certificate; the hub's default if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub validity_s: Option<u64>,
}

/// Response to [`NewTokenV1`]. The secret is sent once; the hub stores only its hash.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NewTokenResponseV1 {
    /// Version of the message.
    pub version: MessageVersion,
    /// Secret of the token.
    pub secret: String,
    /// SHA-256 fingerprints of the authorities that may have signed the hub's certificate.
    pub fingerprints: Vec<String>,
    /// Name in the certificate.
    pub subject: String,
    /// End of the token.
    pub expires_s: u64,
}

/// `POST /v1/pki/join`: request for the first certificate. Processes of later versions may send further fields.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JoinV1 {
    /// Version of the message.
    pub version: MessageVersion,
    /// Secret of the token.
    pub secret: String,
    /// Request for a certificate. Its names are ignored.
    pub csr: String,
}

/// `POST /v1/pki/renew`: request for the next certificate of the caller. `POST /v1/pki/replica`: request of a spoke for a
/// certificate of the replicas of its region. Processes of later versions may send further fields.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RenewV1 {
    /// Version of the message.
    pub version: MessageVersion,
    /// Request for a certificate. Its names are ignored.
    pub csr: String,
}

/// Response to [`JoinV1`] and [`RenewV1`], with the certificate.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IssuedV1 {
    /// Version of the message.
    pub version: MessageVersion,
    /// Serial number.
    pub serial: String,
    /// Fingerprint of its authority.
    pub authority: String,
    /// First second of its validity.
    pub not_before_s: u64,
    /// Last second of its validity.
    pub not_after_s: u64,
    /// Certificate, followed by that of its authority.
    pub certificate: String,
    /// Trusted authorities and revoked certificates.
    pub trust: TrustV1,
}

/// `GET /v1/pki/trust`: trusted authorities and revoked certificates; also the stored record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TrustV1 {
    /// Version of the message.
    pub version: MessageVersion,
    /// Generation, raised by each change.
    pub generation: u64,
    /// Trust domain.
    pub trust_domain: String,
    /// Trusted authorities, the oldest first: one, or two during a rotation.
    pub authorities: Vec<AuthorityV1>,
    /// Position of the authority that signs.
    pub signer: usize,
    /// Revoked certificates that have not expired.
    pub revoked: Vec<RevokedCertificateV1>,
}

/// Trusted authority.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AuthorityV1 {
    /// SHA-256 of the certificate.
    pub fingerprint: String,
    /// The certificate.
    pub certificate: String,
    /// Last second of its validity.
    pub not_after_s: u64,
}

/// Revoked certificate.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RevokedCertificateV1 {
    /// Serial number.
    pub serial: String,
    /// Last second of its validity; the entry is dropped later.
    pub not_after_s: u64,
}

/// Stored record of a join token, whose key is the hash of its secret.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenRecordV1 {
    /// Version of the message.
    pub version: MessageVersion,
    /// Name in the certificate.
    pub subject: String,
    /// End of the token.
    pub expires_s: u64,
    /// Validity of the certificate.
    pub validity_s: u64,
    /// Certificate that was issued for it, once it is used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub used: Option<UsedTokenV1>,
}

/// Use of a join token.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UsedTokenV1 {
    /// SHA-256 of the public key that was certified. The same request, repeated because the response was lost, receives
    /// the same certificate.
    pub key_sha256: String,
    /// The certificate, followed by that of its authority.
    pub certificate: String,
}

/// Issued certificate: an entry of `GET /v1/pki/certificates`, and the stored record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CertificateV1 {
    /// Version of the message.
    pub version: MessageVersion,
    /// Serial number.
    pub serial: String,
    /// Name of the owner.
    pub subject: String,
    /// First second of its validity.
    pub not_before_s: u64,
    /// Last second of its validity.
    pub not_after_s: u64,
    /// Fingerprint of its authority.
    pub authority: String,
    /// Number of certificates that were issued for it.
    pub renewals: u32,
    /// Generation of the trusted state that its owner applies.
    pub applied: u64,
}

/// `GET /v1/pki/certificates`: certificates that have not expired, and unused tokens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CertificatesV1 {
    /// Version of the message.
    pub version: MessageVersion,
    /// Certificates, by name.
    pub certificates: Vec<CertificateV1>,
    /// Serial numbers of those that are revoked.
    pub revoked: Vec<String>,
    /// Unused tokens, without their secrets.
    pub tokens: Vec<OpenTokenV1>,
}

/// Unused join token.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpenTokenV1 {
    /// Name in the certificate.
    pub subject: String,
    /// End of the token.
    pub expires_s: u64,
}

/// `POST /v1/pki/revoke`: revocation of one certificate, or of all certificates of an owner.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RevokeV1 {
    /// Version of the message.
    pub version: MessageVersion,
    /// Serial number, SPIFFE ID, its path such as `spoke/aws/us-east-1`, or the name of a person.
    pub target: String,
    /// Revoke also the certificate with which the request is sent. Absent if not.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub own: bool,
}

/// Response to [`RevokeV1`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RevocationsV1 {
    /// Version of the message.
    pub version: MessageVersion,
    /// The certificates that were revoked.
    pub revoked: Vec<CertificateV1>,
    /// Number of unused tokens of the same owner that were deleted.
    pub tokens: usize,
}

/// `POST /v1/pki/rotation`: next step of the rotation of the authority, or its cancellation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RotateV1 {
    /// Version of the message.
    pub version: MessageVersion,
    /// Phase in which the caller has seen the rotation, so that a repeated request is not another step.
    pub phase: String,
    /// Certificate of the next authority, if its key is at an external signer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub certificate: Option<String>,
    /// Return to the first phase, before the next authority has signed anything. Absent if not.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub cancel: bool,
    /// Take the step although processes would lose their connections. Absent if not.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub force: bool,
}

/// `GET /v1/pki/rotation`, and the response to [`RotateV1`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RotationV1 {
    /// Version of the message.
    pub version: MessageVersion,
    /// Phase: `single`, `next_trusted` or `next_signs`.
    pub phase: String,
    /// Trusted authorities, the oldest first.
    pub authorities: Vec<AuthorityV1>,
    /// Position of the authority that signs.
    pub signer: usize,
    /// Owners of certificates for which the next step waits.
    pub waiting_for: Vec<String>,
}

/// Secrets are not in the output.
impl fmt::Debug for NewTokenResponseV1 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let NewTokenResponseV1 { version: _, secret: _, fingerprints: _, subject, expires_s } = self;
        f.debug_struct("NewTokenResponseV1").field("subject", subject).field("expires_s", expires_s).finish()
    }
}

/// Secrets are not in the output.
impl fmt::Debug for JoinV1 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let JoinV1 { version: _, secret: _, csr } = self;
        f.debug_struct("JoinV1").field("csr", csr).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::super::VERSION;
    use super::*;
    use serde_json::json;

    #[test]
    fn a_process_of_a_later_version_gets_its_certificate() {
        let renewal = json!({"version": 1, "csr": "c", "attestation": "a"});
        assert_eq!(serde_json::from_value::<RenewV1>(renewal).unwrap().csr, "c");
        let join = json!({"version": 1, "secret": "s", "csr": "c", "attestation": "a"});
        assert_eq!(serde_json::from_value::<JoinV1>(join).unwrap().secret, "s");
    }

    /// The hub rejects a field that it does not know, so one that is not used is not sent to an earlier hub.
    #[test]
    fn an_order_without_options_has_no_field_of_an_option() {
        let revocation = RevokeV1 { version: VERSION, target: "aa".to_owned(), own: false };
        assert_eq!(serde_json::to_value(revocation).unwrap(), json!({"version": 1, "target": "aa"}));
        let phase = "single".to_owned();
        let step = RotateV1 { version: VERSION, phase, certificate: None, cancel: false, force: false };
        assert_eq!(serde_json::to_value(&step).unwrap(), json!({"version": 1, "phase": "single"}));
        let forced = RotateV1 { force: true, ..step };
        let text = serde_json::to_string(&forced).unwrap();
        assert_eq!(serde_json::from_str::<RotateV1>(&text).unwrap(), forced);
        let unknown = json!({"version": 1, "phase": "single", "dry_run": true});
        let error = serde_json::from_value::<RotateV1>(unknown).unwrap_err().to_string();
        assert!(error.contains("unknown field `dry_run`"), "{error}");
    }

    #[test]
    fn the_debug_output_of_a_message_has_no_secret() {
        let join = JoinV1 { version: VERSION, secret: "s3cret".into(), csr: String::new() };
        let token = NewTokenResponseV1 {
            version: VERSION,
            secret: "s3cret".into(),
            fingerprints: Vec::new(),
            subject: String::new(),
            expires_s: 0,
        };
        assert!(!format!("{join:?} {token:?}").contains("s3cret"));
    }
}
