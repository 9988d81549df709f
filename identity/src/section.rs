//! Section `[identity]` of the configuration of every role.

use crate::process::{IdentityFiles, OwnName, ProcessIdentity};
use configuration::{ConfigFile, Files, section};
use regions::HostPort;
use regions::catalogue::Catalogue;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;

section! {
    /// Identity of the process for mutual TLS 1.3 with the others; without this table, plaintext on this machine only.
    pub struct IdentitySection {
        /// Directory with `certificate.pem`, `key.pem`, `authorities.pem` and, optionally, `revoked.json`.
        pub dir: Option<PathBuf>;
        /// Own certificate chain, instead of `dir`; PEM.
        pub certificate: Option<PathBuf>;
        /// Private key of that certificate; PEM.
        pub key: Option<PathBuf>;
        /// Certificates of the authorities that sign the certificates of the fleet; PEM.
        pub authorities: Option<PathBuf>;
        /// Revoked certificates; JSON.
        pub revoked: Option<PathBuf>;
        /// Plaintext on any network, instead of the files.
        pub insecure: bool = false;
    }
}

/// Transport security of a process's connections to the others.
#[derive(Clone, Debug, Default)]
pub enum Transport {
    /// Plaintext, on this machine only: the default without `[identity]`.
    #[default]
    Loopback,
    /// Plaintext, as configured.
    Plaintext,
    /// Mutual TLS with this identity.
    Tls(Arc<ProcessIdentity>),
}

impl Transport {
    /// Validates the section and loads its files, or records their problems. If the name or the catalogue is missing,
    /// because of another problem of the file, the files are not loaded.
    pub fn read(
        section: Option<IdentitySection>,
        document: &ConfigFile<'_>,
        files: &Files<'_>,
        expected: Option<OwnName>,
        catalogue: Option<&Arc<Catalogue>>,
    ) -> Option<Transport> {
        let Some(section) = section else { return Some(Transport::Loopback) };
        let IdentitySection { dir, certificate, key, authorities, revoked, insecure } = section;
        let named = match (dir, certificate, key, authorities, revoked, insecure) {
            (None, None, None, None, None, true) => return Some(Transport::Plaintext),
            (Some(dir), None, None, None, None, false) => IdentityFiles::in_directory(&files.path(dir)),
            (None, Some(certificate), Some(key), Some(authorities), revoked, false) => IdentityFiles {
                certificate: files.path(certificate),
                key: files.path(key),
                authorities: files.path(authorities),
                revoked: revoked.map(|path| files.path(path)),
            },
            _ => {
                let problem = "needs dir, or certificate, key and authorities, or only insecure = true";
                document.problem("identity", problem);
                return None;
            }
        };
        let loaded = ProcessIdentity::load(named, &expected?, Some(catalogue?));
        let loaded = loaded.map_err(|problems| document.problems_by_key(problems)).ok()?;
        Some(Transport::Tls(Arc::new(loaded)))
    }

    /// Returns the identity, unless connections use plaintext.
    pub fn identity(&self) -> Option<&Arc<ProcessIdentity>> {
        match self {
            Transport::Tls(identity) => Some(identity),
            Transport::Loopback | Transport::Plaintext => None,
        }
    }

    /// Returns whether a connection to or from `address` is permitted.
    pub fn permits(&self, address: IpAddr) -> bool {
        !matches!(self, Transport::Loopback) || address.is_loopback()
    }

    /// Records a problem of the key `name` if a listener at `address` would be in plaintext and reachable from other
    /// machines.
    pub fn check_listener(&self, document: &ConfigFile<'_>, name: &str, address: &HostPort) {
        if matches!(self, Transport::Loopback) && !address.is_loopback() {
            let problem = format!(
                "\"{address}\" is not a loopback address, and without [identity] every process of the network could \
                 connect; add [identity] with dir, or with insecure = true"
            );
            document.problem(name, problem);
        }
    }
}
