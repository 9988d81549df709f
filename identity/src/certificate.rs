//! Certificate chain and its key, in two PEM files that are reloaded when they change. A process uses one for the other
//! processes of its fleet ([`crate::process`]), and a gateway another for clients.
//!
//! The files are read with the configuration, so their problems are reported at start; then they are read once a second
//! and used when they have changed *and* match. Certificates are renewed by replacing two files one after the other, so
//! a mismatch is normal for a moment: the old pair stays in use, and the problem is logged once. Open connections keep
//! their session.
//!
//! Changes are detected by content, not by modification time: a mounted secret is a symlink to a directory that is
//! replaced, and a copy can preserve the time.

use crate::reload;
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use supervision::RwLock;
use supervision::task::blocking;

/// Certificate chain and key, as loaded from the files.
#[derive(Debug)]
pub struct TlsIdentity {
    /// Section of the configuration that names the files.
    table: &'static str,
    check: Check,
    certificate: PathBuf,
    key: PathBuf,
    current: RwLock<LoadedIdentity>,
}

/// Loaded files, parsed.
#[derive(Clone, Debug)]
struct LoadedIdentity {
    /// Content of both files.
    files: PairFiles,
    key: Arc<CertifiedKey>,
}

/// Content of both files. It contains a secret and is never printed.
#[derive(Clone, PartialEq, Eq)]
struct PairFiles {
    certificate: Vec<u8>,
    key: Vec<u8>,
}

impl std::fmt::Debug for PairFiles {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("PairFiles")
    }
}

/// Additional check of a certificate; returns its problem.
type CertificateCheck = dyn Fn(&CertificateDer<'_>) -> Result<(), String> + Send + Sync;

/// Check in a box, for `Debug`.
struct Check(Box<CertificateCheck>);

impl std::fmt::Debug for Check {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Check")
    }
}

impl TlsIdentity {
    /// Loads both files of the section `tls`, without additional checks of the certificate.
    ///
    /// # Errors
    ///
    /// Returns the problems of each file, or of their combination.
    pub fn load(certificate: PathBuf, key: PathBuf) -> Result<TlsIdentity, Vec<String>> {
        TlsIdentity::load_where("tls", certificate, key, |_| Ok(()))
    }

    /// Loads both files of a section; the certificate must pass `check`, also after a reload.
    ///
    /// # Errors
    ///
    /// Returns the problems of each file, or of their combination.
    pub(crate) fn load_where(
        table: &'static str,
        certificate: PathBuf,
        key: PathBuf,
        check: impl Fn(&CertificateDer<'_>) -> Result<(), String> + Send + Sync + 'static,
    ) -> Result<TlsIdentity, Vec<String>> {
        let check = Check(Box::new(check));
        let files = read(table, &certificate, &key)?;
        let current = LoadedIdentity {
            key: Arc::new(parse_certified_key(table, &files, &certificate, &key, &check)?),
            files,
        };
        Ok(TlsIdentity { table, check, certificate, key, current: RwLock::independent(current) })
    }

    /// Returns the current certificate chain with its key.
    pub fn certified_key(&self) -> Arc<CertifiedKey> {
        self.current().key.clone()
    }

    /// Reloads the files periodically; never returns.
    pub async fn follow(self: Arc<TlsIdentity>) {
        let mut interval = reload::interval();
        let mut last_problems = None;
        loop {
            interval.tick().await;
            let identity = self.clone();
            match blocking(move || identity.reload()).await {
                Ok(ReloadOutcome::Unchanged) => last_problems = None,
                Ok(ReloadOutcome::Changed) => {
                    last_problems = None;
                    // The certificate file has changed, and new connections use it.
                    tracing::info!(certificate = %self.certificate.display(), "certificate reloaded");
                }
                Err(problems) if last_problems.as_ref() != Some(&problems) => {
                    // Correct the files before the previous certificate expires; they are read again when they change.
                    tracing::error!(?problems, "failed to reload the certificate; keeping the previous one");
                    last_problems = Some(problems);
                }
                Err(_) => {}
            }
        }
    }

    fn reload(&self) -> Result<ReloadOutcome, Vec<String>> {
        let files = read(self.table, &self.certificate, &self.key)?;
        if self.current().files == files {
            return Ok(ReloadOutcome::Unchanged);
        }
        let key = parse_certified_key(self.table, &files, &self.certificate, &self.key, &self.check)?;
        let key = Arc::new(key);
        *self.current.write() = LoadedIdentity { files, key };
        Ok(ReloadOutcome::Changed)
    }

    fn current(&self) -> supervision::RwLockReadGuard<'_, LoadedIdentity> {
        self.current.read()
    }
}

/// Result of a reload.
enum ReloadOutcome {
    Unchanged,
    Changed,
}

impl ResolvesServerCert for TlsIdentity {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.current().key.clone())
    }
}

fn read(table: &str, certificate: &Path, key: &Path) -> Result<PairFiles, Vec<String>> {
    let read = |name: &str, path: &Path| {
        std::fs::read(path)
            .map_err(|error| format!("{table}.{name} = \"{}\" cannot be read: {error}", path.display()))
    };
    match (read("certificate", certificate), read("key", key)) {
        (Ok(certificate), Ok(key)) => Ok(PairFiles { certificate, key }),
        (certificate, key) => Err([certificate.err(), key.err()].into_iter().flatten().collect()),
    }
}

/// Parses all certificates in `text`.
pub(crate) fn certificates(text: &[u8]) -> Result<Vec<CertificateDer<'static>>, String> {
    let read: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(text).collect();
    match read {
        Ok(read) if read.is_empty() => Err("has no certificate; it needs 'BEGIN CERTIFICATE'".to_owned()),
        Ok(read) => Ok(read),
        Err(error) => Err(format!("is not PEM: {error}")),
    }
}

fn parse_certified_key(
    table: &str,
    files: &PairFiles,
    certificate: &Path,
    key: &Path,
    Check(check): &Check,
) -> Result<CertifiedKey, Vec<String>> {
    let of_certificate = |problem| format!("{table}.certificate = \"{}\" {problem}", certificate.display());
    let chain = certificates(&files.certificate).map_err(of_certificate);
    let private = PrivateKeyDer::from_pem_slice(&files.key).map_err(|_| {
        format!("{table}.key = \"{}\" has no private key; it needs 'BEGIN PRIVATE KEY'", key.display())
    });
    match (chain, private) {
        (Ok(chain), Ok(private)) => {
            check(&chain[0]).map_err(|problem| vec![of_certificate(problem)])?;
            CertifiedKey::from_der(chain, private, &ring::default_provider()).map_err(|error| {
                vec![format!(
                    "{table}: the certificate of \"{}\" and the key of \"{}\" do not match: {error}",
                    certificate.display(),
                    key.display()
                )]
            })
        }
        (chain, private) => Err([chain.err(), private.err()].into_iter().flatten().collect()),
    }
}
