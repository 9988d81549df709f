//! Certificate verification of one end: the chain by rustls, the name by [`regions::spiffe`], revocation by the list.

use crate::cause::wrong_peer;
use crate::expiry::CertificateValidity;
use crate::process::ProcessIdentity;
use crate::revocation::{ConnectionGuard, SerialNumber};
use regions::set::RegionIndex;
use regions::spiffe::{Role, SpiffeId};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::verify_server_cert_signed_by_trust_anchor;
use rustls::crypto::{verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::{CertificateError, DigitallySignedStruct, Error, SignatureScheme};
use std::sync::Arc;

/// Verified identity of the other end of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerIdentity {
    /// Name.
    pub id: SpiffeId,
    /// Region in the catalogue, of a process.
    pub region: Option<RegionIndex>,
    /// Serial number of the certificate.
    pub serial: SerialNumber,
    /// Last second of its validity, since 1970; 0 if it cannot be read.
    pub not_after: u64,
}

impl PeerIdentity {
    /// Returns the role.
    pub fn role(&self) -> Role {
        self.id.role()
    }
}

/// Peers that a listener accepts.
#[derive(Clone, Copy, Debug)]
pub struct AcceptedPeers {
    /// Roles.
    pub roles: &'static [Role],
    /// Further roles, of which only peers in the region of this process are accepted.
    pub same_region: &'static [Role],
}

/// Peer that a client expects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpectedPeer {
    /// Role.
    pub role: Role,
    /// Region, if only one is correct.
    pub region: Option<RegionIndex>,
}

const SUFFIX: &str = ".identity.invalid";

impl ExpectedPeer {
    /// Returns the server name that represents the peer in rustls, which caches sessions by it. It is not sent
    /// (`enable_sni`) and never resolved (RFC 6761, 6.4).
    pub(crate) fn server_name(self) -> ServerName<'static> {
        let region = self.region.map_or("any".to_owned(), |region| region.as_usize().to_string());
        let name = format!("{}-{region}{SUFFIX}", self.role);
        ServerName::try_from(name).expect("letters, digits and a hyphen form a host name")
    }

    fn of_server_name(name: &ServerName<'_>) -> Option<ExpectedPeer> {
        let ServerName::DnsName(name) = name else { return None };
        let (role, region) = name.as_ref().strip_suffix(SUFFIX)?.split_once('-')?;
        let region = match region {
            "any" => None,
            index => Some(RegionIndex::new(index.parse().ok()?)?),
        };
        Some(ExpectedPeer { role: role.parse().ok()?, region })
    }
}

/// Verifier with the identity of one end.
#[derive(Clone, Debug)]
pub struct Verifier(pub(crate) Arc<ProcessIdentity>);

impl Verifier {
    /// Creates the verifier of this process.
    pub fn new(identity: Arc<ProcessIdentity>) -> Verifier {
        Verifier(identity)
    }

    /// Verifies that the chain of a server ends at a trusted authority, and that the certificate is that of the
    /// expected peer.
    pub(crate) fn server(
        &self,
        certificate: &CertificateDer<'_>,
        others: &[CertificateDer<'_>],
        expected: ExpectedPeer,
        now: UnixTime,
    ) -> Result<PeerIdentity, Error> {
        let anchors = &self.0.anchors;
        let parsed = ParsedCertificate::try_from(certificate)?;
        let algorithms = anchors.provider().signature_verification_algorithms.all;
        let roots = anchors.current().roots;
        verify_server_cert_signed_by_trust_anchor(&parsed, &roots, others, now, algorithms)?;
        self.named(certificate, &[expected.role], expected.region)
    }

    /// Verifies the same of a client and the peers that a server accepts.
    ///
    /// # Errors
    ///
    /// The first condition that is not met.
    pub fn client(
        &self,
        certificate: &CertificateDer<'_>,
        others: &[CertificateDer<'_>],
        accepted: AcceptedPeers,
        now: UnixTime,
    ) -> Result<PeerIdentity, Error> {
        self.0.anchors.current().client_verifier.verify_client_cert(certificate, others, now)?;
        let AcceptedPeers { roles, same_region } = accepted;
        match self.0.own_region() {
            Some(own) if same_region.contains(&role_of(certificate)?) => {
                self.named(certificate, same_region, Some(own))
            }
            _ => self.named(certificate, roles, None),
        }
    }

    /// Verifies that a certificate with a verified chain has one of these roles, is of this region, and is not revoked.
    pub(crate) fn named(
        &self,
        certificate: &CertificateDer<'_>,
        roles: &[Role],
        region: Option<RegionIndex>,
    ) -> Result<PeerIdentity, Error> {
        let parsed = parsed(certificate)?;
        let id = SpiffeId::of(parsed.valid_uri_names()).map_err(wrong_peer)?;
        let serial = SerialNumber::of(parsed.serial());
        let ProcessIdentity { revocations, catalogue, .. } = &*self.0;
        let region = id.verify_as(roles, region, self.0.own(), catalogue.as_deref()).map_err(wrong_peer)?;
        if revocations.contains(&serial) {
            return Err(Error::InvalidCertificate(CertificateError::Revoked));
        }
        let not_after = CertificateValidity::of(certificate).map_or(0, |validity| validity.not_after);
        Ok(PeerIdentity { id, region, serial, not_after })
    }

    /// Registers an open connection of a verified peer, so that a revocation ends it.
    ///
    /// # Errors
    ///
    /// If the certificate has been revoked in the meantime.
    pub fn admit(&self, peer: &PeerIdentity) -> Result<ConnectionGuard, Error> {
        let guard = self.0.revocations.admit(peer.serial.clone());
        guard.ok_or(Error::InvalidCertificate(CertificateError::Revoked))
    }

    pub(crate) fn tls12(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.0.anchors.provider().signature_verification_algorithms;
        verify_tls12_signature(message, certificate, signed, algorithms)
    }

    pub(crate) fn tls13(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.0.anchors.provider().signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signed, algorithms)
    }

    pub(crate) fn schemes(&self) -> Vec<SignatureScheme> {
        self.0.anchors.provider().signature_verification_algorithms.supported_schemes()
    }
}

fn parsed<'a>(certificate: &'a CertificateDer<'_>) -> Result<webpki::EndEntityCert<'a>, Error> {
    webpki::EndEntityCert::try_from(certificate)
        .map_err(|_| Error::InvalidCertificate(CertificateError::BadEncoding))
}

/// Returns the role in the name of a certificate.
fn role_of(certificate: &CertificateDer<'_>) -> Result<Role, Error> {
    SpiffeId::of(parsed(certificate)?.valid_uri_names()).map(|id| id.role()).map_err(wrong_peer)
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        others: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        _: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let expected = ExpectedPeer::of_server_name(name)
            .ok_or(Error::InvalidCertificate(CertificateError::NotValidForName))?;
        self.server(certificate, others, expected, now).map(|_| ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.tls12(message, certificate, signed)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.tls13(message, certificate, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.schemes()
    }
}
