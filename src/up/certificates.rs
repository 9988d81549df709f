//! Identities of the processes and operators of a local fleet, created at each start.
//!
//! The certificate authority exists only while they are created: its key is never written, so that no reader of the
//! directory can issue further certificates. In a real fleet an operator's own authority does this (SPIRE, cert-manager,
//! Vault); the required content of a certificate is in `docs/identities.md`.

use anyhow::{Context, Result};
use identity::IdentityFiles;
use rcgen::{
    BasicConstraints, Certificate, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, SanType,
};
use regions::catalogue::Region;
use regions::spiffe::{Role, SpiffeId};
use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// Trust domain of a local fleet.
const TRUST_DOMAIN: &str = "up.meridian.internal";
/// Validity of the certificates. A fleet that runs for longer must be restarted.
const VALIDITY: Duration = Duration::from_secs(365 * 24 * 3600);
/// Validity before the creation, so that setting the clock back does not break a fleet.
const BACKDATING: Duration = Duration::from_secs(24 * 3600);

/// Certificate authority of the fleet, used during preparation only.
pub(super) struct Authority {
    issuer: Issuer<'static, KeyPair>,
    /// Its certificate.
    pem: String,
    dir: PathBuf,
}

/// Paths of a certificate and its key.
pub(super) struct IssuedCertificate {
    pub(super) certificate: PathBuf,
    pub(super) key: PathBuf,
}

impl Authority {
    /// Creates an authority that writes identities to directories in `dir`.
    pub(super) fn create(dir: PathBuf) -> Result<Authority> {
        let key = KeyPair::generate().context("cannot generate a key")?;
        let mut params = with_validity(CertificateParams::default());
        params.distinguished_name.push(DnType::CommonName, "Meridian local fleet");
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let pem = params.self_signed(&key).context("cannot create a certificate authority")?.pem();
        Ok(Authority { issuer: Issuer::new(params, key), pem, dir })
    }

    /// Issues the identity of a process in this region; returns its directory.
    pub(super) fn process(&self, role: Role, region: &Region) -> Result<PathBuf> {
        let name = SpiffeId::process(TRUST_DOMAIN, role, &region.id, region.narrowest())?;
        self.issue(&format!("{role}-{}", region.id.as_str().replace('/', "-")), &name)
    }

    /// Issues the identity of an operator or viewer; returns its directory.
    pub(super) fn person(&self, role: Role) -> Result<PathBuf> {
        self.issue(role.as_str(), &SpiffeId::person(TRUST_DOMAIN, role, "local")?)
    }

    fn issue(&self, folder: &str, name: &SpiffeId) -> Result<PathBuf> {
        let (key, uri) = (KeyPair::generate().context("cannot generate a key")?, name.to_string());
        let mut params = with_validity(CertificateParams::default());
        params.distinguished_name.push(DnType::CommonName, folder);
        params.subject_alt_names = vec![SanType::URI(uri.as_str().try_into().context(uri.clone())?)];
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        let made =
            params.signed_by(&key, &self.issuer).with_context(|| format!("{name} cannot be signed"))?;
        let dir = self.dir.join(folder);
        fs::create_dir_all(&dir).with_context(|| format!("{} cannot be created", dir.display()))?;
        let IdentityFiles { certificate, key: key_file, authorities, revoked: _ } =
            IdentityFiles::in_directory(&dir);
        fs::write(&authorities, &self.pem)
            .with_context(|| format!("{} cannot be written", authorities.display()))?;
        IssuedCertificate { certificate, key: key_file }.write(&made, &key)?;
        Ok(dir)
    }
}

fn with_validity(mut params: CertificateParams) -> CertificateParams {
    let now = SystemTime::now();
    params.not_before = (now - BACKDATING).into();
    params.not_after = (now + VALIDITY).into();
    params
}

/// Creates a self-signed certificate for this machine's names in `dir`. Clients trust it by its file.
pub(super) fn self_signed(dir: &Path) -> Result<IssuedCertificate> {
    let made = rcgen::generate_simple_self_signed(["localhost", "127.0.0.1"].map(str::to_owned))
        .context("cannot create a certificate")?;
    let issued = IssuedCertificate { certificate: dir.join("gateway.crt"), key: dir.join("gateway.key") };
    issued.write(&made.cert, &made.signing_key)?;
    Ok(issued)
}

impl IssuedCertificate {
    fn write(&self, certificate: &Certificate, key: &KeyPair) -> Result<()> {
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
