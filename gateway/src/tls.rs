//! What a process proves its name with: a certificate chain and its key, in two PEM files that may change at any time. To
//! clients an edge shows one, and gateways and regions show each other another ([`crate::hop`]).
//!
//! The files are read when the configuration is, so that what is wrong with them is told then; after that they are looked
//! at once a second and taken when they have changed *and* belong together. Certificates are renewed by replacing two
//! files one after the other, so a pair that does not fit is a moment and not a mistake: the old one is kept, and what
//! was wrong is said once. Connections that are open keep what they have agreed on.
//!
//! By their content and not by their time of change: a mounted secret is a symbolic link to a folder that is exchanged,
//! and a copy can keep its time.

use pingora::listeners::tls::Acceptor;
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{ClientHello, ResolvesServerCert, ServerConfig};
use rustls::sign::CertifiedKey;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use supervision::RwLock;

/// How often the files are looked at.
const LOOK_PERIOD: Duration = Duration::from_secs(1);
/// What ALPN offers, best first.
const PROTOCOLS: [&[u8]; 2] = [b"h2", b"http/1.1"];

/// A certificate chain with its key, as the files have it now.
#[derive(Debug)]
pub struct Identity {
    /// The table of the configuration that names the files.
    table: &'static str,
    check: Check,
    certificate: PathBuf,
    key: PathBuf,
    current: RwLock<Current>,
}

#[derive(Clone, Debug)]
struct Current {
    /// The two files as they were read.
    files: Files,
    key: Arc<CertifiedKey>,
}

/// The content of both files. It holds a secret and is never shown.
#[derive(Clone, PartialEq, Eq)]
struct Files {
    certificate: Vec<u8>,
    key: Vec<u8>,
}

impl std::fmt::Debug for Files {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Files")
    }
}

/// What must hold of a certificate beside that its key fits, else what to say of it.
type Holds = dyn Fn(&CertificateDer<'_>) -> Result<(), String> + Send + Sync;

struct Check(Box<Holds>);

impl std::fmt::Debug for Check {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Check")
    }
}

impl Identity {
    /// Reads both files, of the table `tls`, of whose certificate nothing more must hold.
    ///
    /// # Errors
    ///
    /// What is wrong with each of them, or with the two together.
    pub fn load(certificate: PathBuf, key: PathBuf) -> Result<Identity, Vec<String>> {
        Identity::load_where("tls", certificate, key, |_| Ok(()))
    }

    /// Reads both files, of this table, now and whenever they change; the certificate must pass `check`.
    ///
    /// # Errors
    ///
    /// What is wrong with each of them, or with the two together.
    pub(crate) fn load_where(
        table: &'static str,
        certificate: PathBuf,
        key: PathBuf,
        check: impl Fn(&CertificateDer<'_>) -> Result<(), String> + Send + Sync + 'static,
    ) -> Result<Identity, Vec<String>> {
        let check = Check(Box::new(check));
        let files = read(table, &certificate, &key)?;
        let current = Current { key: Arc::new(certified(table, &files, &certificate, &key, &check)?), files };
        Ok(Identity { table, check, certificate, key, current: RwLock::independent(current) })
    }

    /// Both, as they are now.
    pub(crate) fn shown(&self) -> Arc<CertifiedKey> {
        self.current().key.clone()
    }

    /// Follows the files for ever.
    pub(crate) async fn follow(self: Arc<Identity>) {
        let mut look = tokio::time::interval(LOOK_PERIOD);
        look.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut refused = None;
        loop {
            look.tick().await;
            let identity = self.clone();
            let looked = tokio::task::spawn_blocking(move || identity.look());
            match looked.await.expect("looking at two files does not panic") {
                Ok(Looked::Same) => refused = None,
                Ok(Looked::Changed) => {
                    refused = None;
                    tracing::info!(certificate = %self.certificate.display(), "a new certificate is in use");
                }
                Err(problems) if refused.as_ref() != Some(&problems) => {
                    tracing::error!(?problems, "the new certificate is not taken; the old one stays in use");
                    refused = Some(problems);
                }
                Err(_) => {}
            }
        }
    }

    fn look(&self) -> Result<Looked, Vec<String>> {
        let files = read(self.table, &self.certificate, &self.key)?;
        if self.current().files == files {
            return Ok(Looked::Same);
        }
        let key = certified(self.table, &files, &self.certificate, &self.key, &self.check)?;
        let key = Arc::new(key);
        *self.current.write() = Current { files, key };
        Ok(Looked::Changed)
    }

    fn current(&self) -> supervision::RwLockReadGuard<'_, Current> {
        self.current.read()
    }
}

enum Looked {
    Same,
    Changed,
}

impl ResolvesServerCert for Identity {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.current().key.clone())
    }
}

/// Greets clients with `identity`: TLS 1.2 and 1.3, HTTP/2 or HTTP/1.1. Tickets, so that a client that comes again is
/// greeted for a tenth of the work, by whichever of the connections it had before.
pub(crate) fn acceptor(identity: Arc<Identity>) -> Result<Acceptor, rustls::Error> {
    let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()?
        .with_no_client_auth()
        .with_cert_resolver(identity);
    config.alpn_protocols = PROTOCOLS.map(<[u8]>::to_vec).into();
    config.ticketer = ring::Ticketer::new()?;
    Ok(Acceptor::from_server_config(Arc::new(config)))
}

fn read(table: &str, certificate: &Path, key: &Path) -> Result<Files, Vec<String>> {
    let read = |name: &str, path: &Path| {
        std::fs::read(path)
            .map_err(|error| format!("{table}.{name} = \"{}\" cannot be read: {error}", path.display()))
    };
    match (read("certificate", certificate), read("key", key)) {
        (Ok(certificate), Ok(key)) => Ok(Files { certificate, key }),
        (certificate, key) => Err([certificate.err(), key.err()].into_iter().flatten().collect()),
    }
}

/// Every certificate in `text`, or what is wrong with it.
pub(crate) fn certificates(text: &[u8]) -> Result<Vec<CertificateDer<'static>>, String> {
    let read: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(text).collect();
    match read {
        Ok(read) if read.is_empty() => Err("has no certificate; it needs 'BEGIN CERTIFICATE'".to_owned()),
        Ok(read) => Ok(read),
        Err(error) => Err(format!("is not PEM: {error}")),
    }
}

fn certified(
    table: &str,
    files: &Files,
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
                    "{table}: the certificate of \"{}\" and the key of \"{}\" do not go together: {error}",
                    certificate.display(),
                    key.display()
                )]
            })
        }
        (chain, private) => Err([chain.err(), private.err()].into_iter().flatten().collect()),
    }
}
