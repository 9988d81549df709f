//! Reader of the section `[authority]` of `hub.toml`.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use configuration::{ConfigFile, Files, section};
use scheduler_core::pki::issue::{VALIDITY, VALIDITY_MAX, VALIDITY_MIN};

/// Maximum number of words of the command of an external signer.
const SIGNER_WORDS_MAX: usize = 64;

section! {
    /// Built-in certificate authority. Without this table, certificates come from elsewhere.
    pub(super) partial struct AuthoritySection {
        /// Listener for processes that join or renew their certificates, and for `meridian pki`.
        listen: SocketAddr, like "\"IP:PORT\"";
        /// Directory with the certificate of the authority and its key, as `meridian pki init` creates it.
        dir: PathBuf;
        /// External signer instead of the key: a command with its arguments, which signs its standard input.
        signer: Option<Vec<String>>, in 1..=SIGNER_WORDS_MAX;
        /// Validity of the certificates of processes, which renew them at half of it.
        validity: Duration = VALIDITY, in VALIDITY_MIN..=VALIDITY_MAX;
    }
}

/// Configuration of the built-in authority.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuthorityConfig {
    /// Address of its listener.
    pub listen: SocketAddr,
    /// Directory of the authority.
    pub dir: PathBuf,
    /// Command of an external signer.
    pub signer: Option<Vec<String>>,
    /// Validity of the certificates of processes.
    pub validity: Duration,
    /// Identity directory of the hub.
    pub identity: PathBuf,
}

/// Reads the section. `identity` is the identity directory of the hub, which the authority needs and keeps current.
pub(super) fn read(
    document: &ConfigFile<'_>,
    files: &Files<'_>,
    section: Option<AuthoritySection>,
    identity: Option<PathBuf>,
) -> Option<Option<AuthorityConfig>> {
    let Some(AuthoritySection { listen, dir, signer, validity }) = section else { return Some(None) };
    let Some(identity) = identity else {
        document.problem("authority", "needs the identity of the hub; add [identity] with dir");
        return None;
    };
    Some(Some(AuthorityConfig {
        listen: listen?,
        dir: files.path(dir?),
        signer: signer?,
        validity: validity?,
        identity: files.path(identity),
    }))
}
