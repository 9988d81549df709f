//! Who is who in a world: certificates by which its gateway and its regions know each other, made anew at each start.
//!
//! An authority is made, names everybody, and is forgotten: its key is never written, so nobody can be named later, by
//! whoever reads the folder. In a fleet an operator's own authority does this (SPIRE, cert-manager, Vault); what has to be in a
//! certificate is in `configs/gateway.toml` and `configs/spoke.toml`.

use super::files::write_secret;
use anyhow::{Context, Result};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, SanType,
};
use regions::catalogue::Region;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// The trust domain of a world on one machine.
const TRUST_DOMAIN: &str = "up.meridian.internal";
/// How long its certificates hold. A world that runs for longer is started anew.
const LIFE: Duration = Duration::from_secs(365 * 24 * 3600);
/// Before they are made, so that a clock that is set back does not end a world.
const BEFORE: Duration = Duration::from_secs(24 * 3600);

/// Who names the world's gateway and regions, for as long as it is being prepared.
pub(super) struct Authority {
    issuer: Issuer<'static, KeyPair>,
    /// Where its certificate is.
    pub(super) file: PathBuf,
    dir: PathBuf,
}

/// Where the certificate and the key of one of them are.
pub(super) struct Named {
    pub(super) certificate: PathBuf,
    pub(super) key: PathBuf,
}

impl Authority {
    /// Makes one whose files are in `dir`.
    pub(super) fn begin(dir: PathBuf) -> Result<Authority> {
        fs::create_dir_all(&dir).with_context(|| format!("{} cannot be made", dir.display()))?;
        let key = KeyPair::generate().context("no key can be made")?;
        let mut params = lasting(CertificateParams::default());
        params.distinguished_name.push(DnType::CommonName, "A world on one machine");
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let certificate = params.self_signed(&key).context("no authority can be made")?;
        let file = dir.join("authority.crt");
        fs::write(&file, certificate.pem())
            .with_context(|| format!("{} cannot be written", file.display()))?;
        Ok(Authority { issuer: Issuer::new(params, key), file, dir })
    }

    /// The gateway beside this region.
    pub(super) fn gateway(&self, place: &Region) -> Result<Named> {
        self.name("gateway", place, ExtendedKeyUsagePurpose::ClientAuth)
    }

    /// The door of this region.
    pub(super) fn region(&self, region: &Region) -> Result<Named> {
        self.name("region", region, ExtendedKeyUsagePurpose::ServerAuth)
    }

    fn name(&self, role: &str, region: &Region, usage: ExtendedKeyUsagePurpose) -> Result<Named> {
        let name = format!("spiffe://{TRUST_DOMAIN}/{role}/{}/in/{}", region.id, region.narrowest().as_str());
        let key = KeyPair::generate().context("no key can be made")?;
        let mut params = lasting(CertificateParams::default());
        params.distinguished_name.push(DnType::CommonName, format!("{role} {}", region.id));
        params.subject_alt_names = vec![SanType::URI(name.as_str().try_into().context(name.clone())?)];
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![usage];
        let made =
            params.signed_by(&key, &self.issuer).with_context(|| format!("{name} cannot be signed"))?;
        let file = format!("{role}-{}", region.id.as_str().replace('/', "-"));
        let path = |ending: &str| self.dir.join(format!("{file}.{ending}"));
        let named = Named { certificate: path("crt"), key: path("key") };
        let wrote = |path: &Path| format!("{} cannot be written", path.display());
        fs::write(&named.certificate, made.pem()).with_context(|| wrote(&named.certificate))?;
        write_secret(&named.key, &key.serialize_pem()).with_context(|| wrote(&named.key))?;
        Ok(named)
    }
}

fn lasting(mut params: CertificateParams) -> CertificateParams {
    let now = SystemTime::now();
    params.not_before = (now - BEFORE).into();
    params.not_after = (now + LIFE).into();
    params
}
