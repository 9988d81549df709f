//! Certificates of the etcd cluster of a local fleet, and of the hubs as its clients.
//!
//! They have an authority of their own, as etcd's documentation recommends and as a fleet over several clouds has it: etcd accepts
//! every certificate of the authority that it trusts, whatever name is in it, so with the authority of the fleet any gateway or
//! replica could write the store. Its key exists only while the certificates are signed, which is before etcd starts. They
//! do not expire before the fleet ends: all are new at the next start.

use super::certificates::IssuedCertificate;
use anyhow::{Context, Result};
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyPair, KeyUsagePurpose,
};
use std::fs;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

/// Files of the certificates.
pub(super) struct EtcdCertificates {
    /// Certificate of the authority.
    pub(super) authority: PathBuf,
    /// Certificate of all members, for their clients and for each other: they have one address.
    pub(super) member: IssuedCertificate,
    /// Certificate of the hubs as clients.
    pub(super) hub: IssuedCertificate,
}

impl EtcdCertificates {
    /// Creates the certificates of members at `address` in `dir`.
    pub(super) fn create(dir: &Path, address: IpAddr) -> Result<EtcdCertificates> {
        fs::create_dir_all(dir).with_context(|| format!("{} cannot be created", dir.display()))?;
        let issuer = EtcdIssuer::create(dir.join("authority.crt"))?;
        let both = [ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        let [_, client] = both.clone();
        // A member is a client of the others, and of itself for its JSON API.
        let member = issuer.issue(dir, "member", vec![address.to_string()], &both)?;
        let hub = issuer.issue(dir, "hub", Vec::new(), &[client])?;
        Ok(EtcdCertificates { authority: issuer.certificate, member, hub })
    }
}

struct EtcdIssuer {
    certificate: PathBuf,
    issuer: Issuer<'static, KeyPair>,
}

impl EtcdIssuer {
    fn create(certificate: PathBuf) -> Result<EtcdIssuer> {
        let mut params = CertificateParams::default();
        params.distinguished_name = name("etcd of meridian up");
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let key = KeyPair::generate().context("cannot generate a key")?;
        let made = params.self_signed(&key).context("cannot create a certificate")?;
        fs::write(&certificate, made.pem())
            .with_context(|| format!("{} cannot be written", certificate.display()))?;
        Ok(EtcdIssuer { certificate, issuer: Issuer::new(params, key) })
    }

    fn issue(
        &self,
        dir: &Path,
        owner: &str,
        addresses: Vec<String>,
        uses: &[ExtendedKeyUsagePurpose],
    ) -> Result<IssuedCertificate> {
        let mut params = CertificateParams::new(addresses).context("cannot create a certificate")?;
        params.distinguished_name = name(owner);
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = uses.to_vec();
        let key = KeyPair::generate().context("cannot generate a key")?;
        let made = params.signed_by(&key, &self.issuer).context("cannot create a certificate")?;
        let issued = IssuedCertificate {
            certificate: dir.join(format!("{owner}.crt")),
            key: dir.join(format!("{owner}.key")),
        };
        issued.write(&made, &key)?;
        Ok(issued)
    }
}

fn name(common: &str) -> DistinguishedName {
    let mut name = DistinguishedName::new();
    name.push(DnType::CommonName, common);
    name
}
