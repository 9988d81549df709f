//! Certificate of the gateway for clients of a local fleet, and files with secrets.

use anyhow::{Context, Result};
use rcgen::{Certificate, KeyPair};
use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// Paths of a certificate and its key.
pub(super) struct IssuedCertificate {
    pub(super) certificate: PathBuf,
    pub(super) key: PathBuf,
}

/// Creates a self-signed certificate for this machine's names in `dir`. Clients trust it by its file.
pub(super) fn self_signed(dir: &Path) -> Result<IssuedCertificate> {
    let made = rcgen::generate_simple_self_signed(["localhost", "127.0.0.1", "::1"].map(str::to_owned))
        .context("cannot create a certificate")?;
    let issued = IssuedCertificate { certificate: dir.join("gateway.crt"), key: dir.join("gateway.key") };
    issued.write(&made.cert, &made.signing_key)?;
    Ok(issued)
}

impl IssuedCertificate {
    /// Writes both files.
    pub(super) fn write(&self, certificate: &Certificate, key: &KeyPair) -> Result<()> {
        let context = |path: &Path| format!("{} cannot be written", path.display());
        fs::write(&self.certificate, certificate.pem()).with_context(|| context(&self.certificate))?;
        write_secret(&self.key, &key.serialize_pem()).with_context(|| context(&self.key))
    }
}

/// Writes a file that only its owner can read.
pub(super) fn write_secret(file: &Path, secret: &str) -> io::Result<()> {
    if file.exists() {
        fs::remove_file(file)?;
    }
    let mut open = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(file)?;
    open.write_all(secret.as_bytes())
}
