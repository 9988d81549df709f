//! Requests for a certificate (PKCS #10).
//!
//! Only the public key is used, after the signature has shown that the sender has the private key. Names and extensions
//! are ignored: what the certificate says is decided by the token or by the current certificate.

use rcgen::SubjectPublicKeyInfo;
use scheduler_core::pki::hex;
use scheduler_core::pki::issue::{CSR_BYTES_MAX, CsrKey, NotIssued, check_key};
use sha2::{Digest, Sha256};
use x509_parser::certification_request::X509CertificationRequest;
use x509_parser::oid_registry::{
    OID_EC_P256, OID_KEY_TYPE_EC_PUBLIC_KEY, OID_NIST_EC_P384, OID_PKCS1_RSAENCRYPTION, OID_SIG_ED25519,
};
use x509_parser::prelude::FromDer;
use x509_parser::public_key::PublicKey;

/// Public key of a valid request.
#[derive(Debug)]
pub(super) struct RequestedKey {
    pub(super) key: SubjectPublicKeyInfo,
    /// SHA-256 of the key.
    pub(super) sha256: String,
}

/// Invalid request for a certificate.
#[derive(Debug, thiserror::Error)]
pub(super) enum InvalidCsr {
    /// The certificate request is longer than the limit.
    #[error("the request for a certificate has {0} bytes; at most {CSR_BYTES_MAX} are allowed")]
    TooLong(usize),
    /// The text sent to the authority is not a certificate request in PEM.
    #[error("it is no request for a certificate; send one in PEM (`BEGIN CERTIFICATE REQUEST`)")]
    Malformed,
    #[error("{0}")]
    Key(#[from] NotIssued),
    /// The certificate request was not signed with the key that it contains.
    #[error(
        "the signature of the request for a certificate is invalid; sign it with the key that it contains"
    )]
    Signature,
}

impl RequestedKey {
    /// Parses and verifies a request in PEM.
    pub(super) fn parse(pem: &str) -> Result<RequestedKey, InvalidCsr> {
        if pem.len() > CSR_BYTES_MAX {
            return Err(InvalidCsr::TooLong(pem.len()));
        }
        let (_, pem) = x509_parser::pem::parse_x509_pem(pem.as_bytes()).map_err(|_| InvalidCsr::Malformed)?;
        if pem.label != "CERTIFICATE REQUEST" {
            return Err(InvalidCsr::Malformed);
        }
        let parsed = X509CertificationRequest::from_der(&pem.contents);
        let (rest, request) = parsed.map_err(|_| InvalidCsr::Malformed)?;
        if !rest.is_empty() {
            return Err(InvalidCsr::Malformed);
        }
        let info = &request.certification_request_info.subject_pki;
        let curve = info.algorithm.parameters.as_ref().and_then(|parameters| parameters.as_oid().ok());
        let kind = match &info.algorithm.algorithm {
            algorithm if *algorithm == OID_SIG_ED25519 => CsrKey::Ed25519,
            algorithm if *algorithm == OID_KEY_TYPE_EC_PUBLIC_KEY => match curve {
                Some(curve) if curve == OID_EC_P256 => CsrKey::P256,
                Some(curve) if curve == OID_NIST_EC_P384 => CsrKey::P384,
                _ => CsrKey::Other,
            },
            algorithm if *algorithm == OID_PKCS1_RSAENCRYPTION => match info.parsed() {
                Ok(PublicKey::RSA(key)) => CsrKey::Rsa(key.key_size()),
                _ => CsrKey::Other,
            },
            _ => CsrKey::Other,
        };
        check_key(kind)?;
        request.verify_signature().map_err(|_| InvalidCsr::Signature)?;
        let key = SubjectPublicKeyInfo::from_der(info.raw).map_err(|_| InvalidCsr::Malformed)?;
        Ok(RequestedKey { key, sha256: hex(&Sha256::digest(info.raw)) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcgen::{CertificateParams, KeyPair, PKCS_ECDSA_P384_SHA384, PKCS_ED25519, PKCS_RSA_SHA256};

    fn error(pem: &str) -> String {
        RequestedKey::parse(pem).unwrap_err().to_string()
    }

    #[test]
    fn requests_with_strong_keys_are_accepted_and_their_names_are_ignored() {
        for algorithm in [&rcgen::PKCS_ECDSA_P256_SHA256, &PKCS_ECDSA_P384_SHA384, &PKCS_ED25519] {
            let key = KeyPair::generate_for(algorithm).unwrap();
            let params = CertificateParams::new(vec!["other.example".to_owned()]).unwrap();
            let csr = params.serialize_request(&key).unwrap().pem().unwrap();
            let read = RequestedKey::parse(&csr).unwrap();
            assert_eq!(rcgen::PublicKeyData::der_bytes(&read.key), key.public_key_raw());
            assert_eq!(read.sha256.len(), 64);
        }
        let _ = &PKCS_RSA_SHA256;
    }

    /// Requests of `openssl req -new -newkey rsa:N` and `-newkey ec -pkeyopt ec_paramgen_curve:P-192`.
    #[test]
    fn weak_keys_are_rejected() {
        assert!(error(include_str!("testdata/rsa-1024.pem")).contains("weak RSA key"));
        assert!(error(include_str!("testdata/p-192.pem")).contains("another algorithm or curve"));
        assert!(RequestedKey::parse(include_str!("testdata/rsa-2048.pem")).is_ok());
    }

    #[test]
    fn garbage_and_foreign_signatures_are_rejected() {
        let key = KeyPair::generate().unwrap();
        let csr = CertificateParams::default().serialize_request(&key).unwrap();
        let pem = csr.pem().unwrap();
        for garbage in [
            "",
            "garbage",
            "-----BEGIN CERTIFICATE REQUEST-----\nAAAA\n-----END CERTIFICATE REQUEST-----\n",
            "-----BEGIN CERTIFICATE REQUEST-----\n",
            &pem.replace("CERTIFICATE REQUEST", "CERTIFICATE"),
        ] {
            assert!(error(garbage).contains("no request for a certificate"), "{garbage}");
        }
        assert!(error(&"x".repeat(CSR_BYTES_MAX + 1)).contains("at most 8192"));
        // Every changed byte makes it invalid, or is one that the signature does not cover; none makes the parser fail.
        let der = csr.der().to_vec();
        let certified = RequestedKey::parse(&pem).unwrap().sha256;
        let mut accepted = 0;
        for at in 0..der.len() {
            let mut changed = der.clone();
            changed[at] ^= 1;
            let text = pem::encode(&pem::Pem::new("CERTIFICATE REQUEST", changed));
            if let Ok(read) = RequestedKey::parse(&text) {
                assert_eq!(read.sha256, certified, "byte {at} changes the key");
                accepted += 1;
            }
        }
        assert!(accepted <= 2, "{accepted} changes are accepted");
    }
}
