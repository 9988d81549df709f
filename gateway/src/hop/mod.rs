//! Connections between gateway and region ("hop"): mutual TLS 1.3.
//!
//! Any network may lie between a gateway and a region, between clouds and across oceans, and a request contains a
//! tenant's text. So both ends authenticate before a byte of it is written: the region proves that it is the region the
//! request may be sent to, in the jurisdiction of the catalogue, and the gateway proves that it is a gateway.
//! Identities are SPIFFE IDs ([`gateway_core::spiffe`]), issued by the authorities in a file ([`anchors`]). The address
//! of a region comes from the hub, which need not be trusted: a peer at that address with another identity is rejected.
//!
//! ```text
//!  gateway                                       ingress of a region
//!  Connector ── TCP ── TLS 1.3 handshake ──────▶  GatewayAcceptor
//!     region_ca: a trusted region?                  client_ca: a trusted gateway?
//!     the intended one? in which jurisdiction?
//!  residency::send  ── request ─────────────────▶  Ingress
//! ```
//!
//! rustls implements TLS, below the HTTP clients ([`crate::http1`], [`crate::http2`]), which are unaware of it.
//! Connections are pooled and sessions resumed: a new connection costs one more round trip than plaintext, and no
//! signature. A resumed session is verified like a new one, chain, validity and name, because tickets outlive
//! certificates.
//!
//! Certificates, keys and authorities are reloaded like those for clients ([`crate::tls`]): renewed files are used
//! without a restart, invalid ones are reported and ignored.
//!
//! Beyond the ingress, requests are forwarded in plaintext to replicas of the same region.

mod anchors;
mod cause;
mod connector;
mod gateway_acceptor;
mod stream;
mod verify;

pub(crate) use cause::HopFailureCause;
pub(crate) use connector::{Connector, PeerConnection, UpstreamKey};
pub(crate) use gateway_acceptor::{GatewayAcceptor, HANDSHAKE_RECORD};
pub(crate) use stream::TransportStream;

use crate::tls::TlsIdentity;
use anchors::TrustAnchors;
use configuration::{Files, section};
use gateway_core::spiffe::{Role, SpiffeId};
use regions::catalogue::Catalogue;
use regions::id::RegionId;
use rustls::pki_types::CertificateDer;
use std::path::PathBuf;
use std::sync::Arc;
use verify::name_in;

/// ALPN protocols of the connection: HTTP/2 or HTTP/1.1.
const HTTP2: &[u8] = b"h2";
const HTTP1: &[u8] = b"http/1.1";

/// Transport security of a gateway's connections to regions.
#[derive(Clone, Debug)]
pub enum RegionTransport {
    /// Plaintext, only to regions on this machine: the default without `[region_tls]`.
    Loopback,
    /// Plaintext, as configured.
    Plaintext,
    /// Mutual TLS with these credentials.
    Tls(Arc<Credentials>),
}

section! {
    /// Mutual TLS 1.3 with the regions; without this table, plaintext to regions on this machine only.
    pub(crate) struct RegionTlsSection {
        /// Own certificate chain; PEM.
        certificate: Option<PathBuf>;
        /// Private key of that certificate; PEM.
        key: Option<PathBuf>;
        /// Certificates of the authorities that sign the regions' certificates; PEM.
        region_ca: Option<PathBuf>;
        /// Plaintext over any network, instead of the files.
        insecure: bool = false;
    }
}

impl RegionTransport {
    /// Validates the section and loads its files, for a gateway in `region`.
    pub(crate) fn read(
        section: Option<RegionTlsSection>,
        files: &Files<'_>,
        region: &RegionId,
        catalogue: &Arc<Catalogue>,
    ) -> Result<RegionTransport, Vec<String>> {
        let Some(RegionTlsSection { certificate, key, region_ca, insecure }) = section else {
            return Ok(RegionTransport::Loopback);
        };
        match (certificate, key, region_ca, insecure) {
            (None, None, None, true) => Ok(RegionTransport::Plaintext),
            (Some(certificate), Some(key), Some(ca), false) => {
                let [certificate, key, ca] = [certificate, key, ca].map(|path| files.path(path));
                Credentials::of_gateway(CredentialFiles { certificate, key, ca }, region, catalogue)
                    .map(|read| RegionTransport::Tls(Arc::new(read)))
            }
            _ => Err(vec![
                "[region_tls] needs certificate, key and region_ca, or only insecure = true".to_owned(),
            ]),
        }
    }
}

/// Files of the credentials of one end.
pub struct CredentialFiles {
    /// Own certificate chain.
    pub certificate: PathBuf,
    /// Private key of that certificate.
    pub key: PathBuf,
    /// Certificate authorities of the peers.
    pub ca: PathBuf,
}

/// Own certificate and trusted authorities of one end.
#[derive(Debug)]
pub struct Credentials {
    identity: Arc<TlsIdentity>,
    anchors: Arc<TrustAnchors>,
    own: SpiffeId,
    catalogue: Arc<Catalogue>,
}

impl Credentials {
    /// Loads the credentials of a gateway in `region`.
    ///
    /// # Errors
    ///
    /// Returns the problems of all files.
    pub fn of_gateway(
        files: CredentialFiles,
        region: &RegionId,
        catalogue: &Arc<Catalogue>,
    ) -> Result<Credentials, Vec<String>> {
        Credentials::load(Role::Gateway, ("region_tls", "region_ca"), files, region, catalogue)
    }

    /// Loads the credentials of the ingress of `region`.
    ///
    /// # Errors
    ///
    /// Returns the problems of all files.
    pub fn of_region(
        files: CredentialFiles,
        region: &RegionId,
        catalogue: &Arc<Catalogue>,
    ) -> Result<Credentials, Vec<String>> {
        Credentials::load(Role::Region, ("tls", "client_ca"), files, region, catalogue)
    }

    fn load(
        role: Role,
        (table, ca_key): (&'static str, &'static str),
        files: CredentialFiles,
        region: &RegionId,
        catalogue: &Arc<Catalogue>,
    ) -> Result<Credentials, Vec<String>> {
        let CredentialFiles { certificate, key, ca } = files;
        let (expected, known) = (region.clone(), catalogue.clone());
        let own = move |certificate: &CertificateDer<'_>| {
            own_name(certificate, role, &expected, &known).map(|_| ())
        };
        let identity = TlsIdentity::load_where(table, certificate, key, own);
        let anchors = TrustAnchors::load(table, ca_key, ca);
        match (identity, anchors) {
            (Ok(identity), Ok(anchors)) => Ok(Credentials {
                own: own_name(&identity.certified_key().cert[0], role, region, catalogue)
                    .expect("a certificate is loaded only if its name is valid"),
                identity: Arc::new(identity),
                anchors: Arc::new(anchors),
                catalogue: catalogue.clone(),
            }),
            (identity, anchors) => {
                let mut problems = identity.err().unwrap_or_default();
                problems.extend(anchors.err());
                Err(problems)
            }
        }
    }

    /// Reloads the files periodically; never returns.
    pub(crate) async fn follow(self: Arc<Credentials>) {
        tokio::join!(self.identity.clone().follow(), self.anchors.clone().follow());
    }
}

/// Returns the SPIFFE ID in our own certificate, or why peers would reject it.
fn own_name(
    certificate: &CertificateDer<'_>,
    role: Role,
    region: &RegionId,
    catalogue: &Catalogue,
) -> Result<SpiffeId, String> {
    let expected = || {
        let within = catalogue.get(region).map_or("…", |region| region.narrowest().as_str());
        format!("spiffe://TRUST-DOMAIN/{}/{region}/in/{within}", role.as_str())
    };
    let index =
        catalogue.index_of(region).ok_or_else(|| format!("is of {region}, which is not in the catalogue"))?;
    name_in(certificate)
        .and_then(|own| own.verify_region(index, role, &own, catalogue).map(|()| own))
        .map_err(|wrong| {
            format!("is not that of this {}: {wrong}; its only URI must be {}", role.as_str(), expected())
        })
}

#[cfg(test)]
mod tests;
