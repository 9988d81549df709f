//! Loaded identity of a process: its certificate, the authorities it trusts, and the certificates that are revoked.

use crate::authorities::TrustAnchors;
use crate::certificate::TlsIdentity;
use crate::revocation::Revocations;
use regions::catalogue::Catalogue;
use regions::id::RegionId;
use regions::set::RegionIndex;
use regions::spiffe::{Role, SpiffeId, WrongPeer};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

/// Files of an identity.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IdentityFiles {
    /// Own certificate chain.
    pub certificate: PathBuf,
    /// Private key of that certificate.
    pub key: PathBuf,
    /// Certificate authorities of the peers.
    pub authorities: PathBuf,
    /// Revoked certificates; the file need not exist.
    pub revoked: Option<PathBuf>,
}

impl IdentityFiles {
    /// Name of the file of the certificate chain in an identity directory.
    pub const CERTIFICATE: &'static str = "certificate.pem";
    /// Name of the file of the private key.
    pub const KEY: &'static str = "key.pem";
    /// Name of the file of the trusted authorities.
    pub const AUTHORITIES: &'static str = "authorities.pem";
    /// Name of the file of the revoked certificates.
    pub const REVOKED: &'static str = "revoked.json";

    /// Returns the files of an identity directory.
    pub fn in_directory(dir: &Path) -> IdentityFiles {
        let [certificate, key, authorities, revoked] =
            [Self::CERTIFICATE, Self::KEY, Self::AUTHORITIES, Self::REVOKED].map(|name| dir.join(name));
        IdentityFiles { certificate, key, authorities, revoked: Some(revoked) }
    }
}

/// Name that the certificate of a process must have.
#[derive(Clone, Debug)]
pub struct OwnName {
    /// Roles, of which it has one.
    pub roles: &'static [Role],
    /// Region, for a process that knows its region.
    pub region: Option<RegionId>,
}

impl OwnName {
    /// Returns the name of a process in `region`.
    pub fn of(roles: &'static [Role], region: &RegionId) -> OwnName {
        OwnName { roles, region: Some(region.clone()) }
    }

    /// Returns whether a name has one of the roles, and the region if this process knows its own.
    pub fn matches(&self, name: &SpiffeId) -> bool {
        let is_region = self.region.as_ref().is_none_or(|region| name.region() == Some(region));
        is_region && self.roles.contains(&name.role())
    }
}

/// Identity of this process.
#[derive(Debug)]
pub struct ProcessIdentity {
    pub(crate) certificate: Arc<TlsIdentity>,
    pub(crate) anchors: Arc<TrustAnchors>,
    pub(crate) revocations: Arc<Revocations>,
    pub(crate) catalogue: Option<Arc<Catalogue>>,
    own: SpiffeId,
}

impl ProcessIdentity {
    /// Loads an identity whose certificate must have the name `expected`. Without a catalogue the regions and
    /// jurisdictions in names are not verified, as for the commands of an operator.
    ///
    /// # Errors
    ///
    /// Returns the problems of all files, each with the key of the section `[identity]`.
    pub fn load(
        files: IdentityFiles,
        expected: &OwnName,
        catalogue: Option<&Arc<Catalogue>>,
    ) -> Result<ProcessIdentity, Vec<String>> {
        let IdentityFiles { certificate, key, authorities, revoked } = files;
        let (expected, known) = (expected.clone(), catalogue.cloned());
        // Peers and the process itself know the name; a renewed certificate has the same one.
        let name: Arc<OnceLock<SpiffeId>> = Arc::default();
        let loaded = name.clone();
        let check = move |certificate: &CertificateDer<'_>| {
            let own = own_name(certificate, &expected, known.as_deref())?;
            let first = name.get_or_init(|| own.clone());
            if *first == own {
                Ok(())
            } else {
                Err(format!("is of {own}, but this process is {first}; restart it to change its name"))
            }
        };
        let certificate = TlsIdentity::load_where("identity", certificate, key, check);
        let anchors = TrustAnchors::load("identity", "authorities", authorities);
        let revocations = Revocations::load("identity.revoked", revoked);
        match (certificate, anchors, revocations) {
            (Ok(certificate), Ok(anchors), Ok(revocations)) => Ok(ProcessIdentity {
                certificate: Arc::new(certificate),
                anchors: Arc::new(anchors),
                revocations: Arc::new(revocations),
                catalogue: catalogue.cloned(),
                own: loaded.get().expect("a certificate is loaded only with a valid name").clone(),
            }),
            (certificate, anchors, revocations) => {
                let mut problems = certificate.err().unwrap_or_default();
                problems.extend(anchors.err());
                problems.extend(revocations.err());
                Err(problems)
            }
        }
    }

    /// Loads an identity of this name whose certificate may be any, for tests of peers with invalid ones.
    ///
    /// # Errors
    ///
    /// Returns the problems of all files.
    #[cfg(any(test, feature = "unchecked"))]
    pub fn unchecked(
        files: IdentityFiles,
        own: SpiffeId,
        catalogue: &Arc<Catalogue>,
    ) -> Result<ProcessIdentity, Vec<String>> {
        let IdentityFiles { certificate, key, authorities, revoked } = files;
        let anchors = TrustAnchors::load("identity", "authorities", authorities).map_err(|it| vec![it])?;
        let revocations = Revocations::load("identity.revoked", revoked).map_err(|it| vec![it])?;
        Ok(ProcessIdentity {
            certificate: Arc::new(TlsIdentity::load(certificate, key)?),
            anchors: Arc::new(anchors),
            revocations: Arc::new(revocations),
            catalogue: Some(catalogue.clone()),
            own,
        })
    }

    /// Returns the name of this process.
    pub fn own(&self) -> &SpiffeId {
        &self.own
    }

    /// Returns the region of this process in its catalogue; `None` for a person, or without a catalogue.
    pub fn own_region(&self) -> Option<RegionIndex> {
        self.catalogue.as_ref()?.index_of(self.own.region()?)
    }

    /// Returns the certificate with its key.
    pub fn certificate(&self) -> &Arc<TlsIdentity> {
        &self.certificate
    }

    /// Returns the revoked certificates.
    pub fn revocations(&self) -> &Arc<Revocations> {
        &self.revocations
    }

    /// Reloads the files periodically; never returns.
    pub async fn follow(self: Arc<ProcessIdentity>) {
        tokio::join!(
            self.certificate.clone().follow(),
            self.anchors.clone().follow(),
            self.revocations.clone().follow()
        );
    }
}

/// Returns the only SPIFFE ID in the first certificate of a chain in PEM.
///
/// # Errors
///
/// [`WrongPeer::InvalidId`] without a certificate, or without exactly one SPIFFE ID in it.
pub fn name_in_pem(chain: &[u8]) -> Result<SpiffeId, WrongPeer> {
    let certificate = CertificateDer::from_pem_slice(chain).map_err(|_| WrongPeer::InvalidId)?;
    name_in(&certificate)
}

/// Returns the only SPIFFE ID in a certificate.
fn name_in(certificate: &CertificateDer<'_>) -> Result<SpiffeId, WrongPeer> {
    let parsed = webpki::EndEntityCert::try_from(certificate).map_err(|_| WrongPeer::InvalidId)?;
    SpiffeId::of(parsed.valid_uri_names())
}

/// Returns the SPIFFE ID in our own certificate, or why peers would reject it.
fn own_name(
    certificate: &CertificateDer<'_>,
    expected: &OwnName,
    catalogue: Option<&Catalogue>,
) -> Result<SpiffeId, String> {
    let OwnName { roles, region } = expected;
    let form = || {
        let role = roles.iter().map(|role| role.as_str()).collect::<Vec<_>>().join(" or ");
        if !roles.iter().any(|role| role.is_process()) {
            return format!("spiffe://TRUST-DOMAIN/{role}/NAME");
        }
        let within = region.as_ref().zip(catalogue).and_then(|(region, catalogue)| catalogue.get(region));
        let within = within.map_or("JURISDICTION", |region| region.narrowest().as_str());
        let region = region.as_ref().map_or("CLOUD/REGION", RegionId::as_str);
        format!("spiffe://TRUST-DOMAIN/{role}/{region}/in/{within}")
    };
    let index = match (region, catalogue) {
        (Some(region), Some(catalogue)) => {
            let index = catalogue.index_of(region);
            Some(index.ok_or_else(|| format!("is of {region}, which is not in the catalogue"))?)
        }
        _ => None,
    };
    let own = name_in(certificate).and_then(|own| {
        own.verify_as(roles, index, &own, catalogue)?;
        Ok(own)
    });
    own.map_err(|wrong| format!("is not that of this process: {wrong}; its only URI must be {}", form()))
}
