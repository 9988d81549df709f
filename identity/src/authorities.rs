//! Trusted certificate authorities of a process: certificates in a PEM file that is reloaded when it changes.
//!
//! To replace an authority without downtime, the file contains both the old and the new one as long as certificates of
//! both are in use. Open connections stay open; new ones, including resumed sessions, are verified against the new
//! list.

use crate::certificate::certificates;
use crate::reload;
use rustls::RootCertStore;
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::ClientCertVerifier;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use supervision::RwLock;
use supervision::task::blocking;

/// Maximum number of authorities: two while one is replaced, and some for the bundles of other issuers.
pub const AUTHORITIES_MAX: usize = 8;

/// Trust anchors from a PEM file.
#[derive(Debug)]
pub struct TrustAnchors {
    /// Key of the file in the configuration.
    name: String,
    file: PathBuf,
    provider: Arc<CryptoProvider>,
    current: RwLock<TrustedRoots>,
}

/// Parsed content of the file.
#[derive(Clone, Debug)]
pub(crate) struct TrustedRoots {
    text: Arc<[u8]>,
    pub(crate) roots: Arc<RootCertStore>,
    /// Verifier of client certificates against the same roots.
    pub(crate) client_verifier: Arc<dyn ClientCertVerifier>,
}

impl TrustAnchors {
    /// Loads the file that `table.key` names.
    pub(crate) fn load(table: &str, key: &str, file: PathBuf) -> Result<TrustAnchors, String> {
        let (name, provider) = (format!("{table}.{key}"), Arc::new(ring::default_provider()));
        let text = std::fs::read(&file)
            .map_err(|error| format!("{name} = \"{}\" cannot be read: {error}", file.display()))?;
        let current = parse_roots(text, &provider)
            .map_err(|problem| format!("{name} = \"{}\" {problem}", file.display()))?;
        Ok(TrustAnchors { name, file, provider, current: RwLock::independent(current) })
    }

    pub(crate) fn current(&self) -> TrustedRoots {
        self.current.read().clone()
    }

    pub(crate) fn provider(&self) -> &Arc<CryptoProvider> {
        &self.provider
    }

    /// Reloads the file periodically; never returns.
    pub(crate) async fn follow(self: Arc<TrustAnchors>) {
        let mut interval = reload::interval();
        let mut last_problem = None;
        loop {
            interval.tick().await;
            let anchors = self.clone();
            match blocking(move || anchors.reload()).await {
                Ok(changed) => {
                    last_problem = None;
                    if changed {
                        // The file of this `key` has changed, and new connections are verified with its authorities.
                        tracing::info!(key = self.name, "certificate authorities reloaded");
                    }
                }
                Err(problem) if last_problem.as_ref() != Some(&problem) => {
                    // New connections are verified with the previous authorities. Correct the file of this `key`; it is
                    // read again when it changes.
                    tracing::error!(
                        key = self.name,
                        problem,
                        "failed to reload the certificate authorities; keeping the previous ones"
                    );
                    last_problem = Some(problem);
                }
                Err(_) => {}
            }
        }
    }

    fn reload(&self) -> Result<bool, String> {
        let text = std::fs::read(&self.file).map_err(|error| format!("cannot be read: {error}"))?;
        if *self.current().text == *text {
            return Ok(false);
        }
        let current = parse_roots(text, &self.provider)?;
        *self.current.write() = current;
        Ok(true)
    }
}

/// Reads the certificates of a PEM file as trusted authorities.
///
/// # Errors
///
/// When the file cannot be read, has an invalid certificate, or none; with its path.
pub fn read_roots(file: &Path) -> Result<RootCertStore, String> {
    let unusable = |error: &dyn std::fmt::Display| format!("{}: {error}", file.display());
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_file_iter(file).map_err(|error| unusable(&error))? {
        let added = roots.add(certificate.map_err(|error| unusable(&error))?);
        added.map_err(|error| unusable(&error))?;
    }
    if roots.is_empty() {
        return Err(unusable(&"it has no certificate"));
    }
    Ok(roots)
}

fn parse_roots(text: Vec<u8>, provider: &Arc<CryptoProvider>) -> Result<TrustedRoots, String> {
    let mut roots = RootCertStore::empty();
    let certificates = certificates(&text)?;
    if certificates.len() > AUTHORITIES_MAX {
        let count = certificates.len();
        return Err(format!(
            "has {count} certificates, more than {AUTHORITIES_MAX}; remove unused authorities"
        ));
    }
    for certificate in certificates {
        roots
            .add(certificate)
            .map_err(|error| format!("contains a certificate that is not an authority: {error}"))?;
    }
    let roots = Arc::new(roots);
    let client_verifier = WebPkiClientVerifier::builder_with_provider(roots.clone(), provider.clone())
        .build()
        .map_err(|error| format!("cannot be used: {error}"))?;
    Ok(TrustedRoots { text: text.into(), roots, client_verifier })
}
