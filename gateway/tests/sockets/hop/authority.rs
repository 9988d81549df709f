//! Certificate authority for tests, which signs any name.

use rcgen::{
    BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose,
    SanType,
};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

pub(crate) struct Authority {
    issuer: Issuer<'static, KeyPair>,
    /// Its certificate.
    pub(crate) pem: String,
}

/// Content of a certificate.
pub(crate) struct Subject<'a> {
    pub(crate) uris: Vec<&'a str>,
    pub(crate) uses: Vec<ExtendedKeyUsagePurpose>,
    /// Validity from now.
    pub(crate) holds: Duration,
    pub(crate) expired: bool,
    /// Valid from an hour after now.
    pub(crate) early: bool,
}

impl<'a> Subject<'a> {
    /// Returns a valid subject for either end.
    pub(crate) fn named(uri: &'a str) -> Subject<'a> {
        Subject {
            uris: vec![uri],
            uses: vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth],
            holds: Duration::from_secs(3600),
            expired: false,
            early: false,
        }
    }
}

impl Authority {
    pub(crate) fn new() -> Authority {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let pem = params.self_signed(&key).unwrap().pem();
        Authority { issuer: Issuer::new(params, key), pem }
    }

    /// Returns a certificate and its key.
    pub(crate) fn sign(&self, subject: &Subject<'_>) -> (String, String) {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::default();
        let uri = |uri: &&str| SanType::URI((*uri).try_into().unwrap());
        params.subject_alt_names = subject.uris.iter().map(uri).collect();
        params.extended_key_usages = subject.uses.clone();
        let now = SystemTime::now();
        let past = now - Duration::from_secs(3600);
        params.not_before = (past - Duration::from_secs(3600)).into();
        if subject.early {
            params.not_before = (now + Duration::from_secs(1800)).into();
        }
        params.not_after = if subject.expired { past.into() } else { (now + subject.holds).into() };
        (params.signed_by(&key, &self.issuer).unwrap().pem(), key.serialize_pem())
    }

    /// Writes both to files with this name, and this authority next to them.
    pub(crate) fn write(&self, dir: &Path, name: &str, subject: &Subject<'_>) -> [PathBuf; 3] {
        let (certificate, key) = self.sign(subject);
        let files = ["crt", "key", "ca"].map(|ending| dir.join(format!("{name}.{ending}")));
        for (file, text) in files.iter().zip([&certificate, &key, &self.pem]) {
            std::fs::write(file, text).unwrap();
        }
        files
    }
}
