//! Certificate verification of one end: the chain by rustls, the name by the core.

use super::Credentials;
use super::cause::wrong_peer;
use gateway_core::residency::Peer;
use gateway_core::spiffe::{Role, SpiffeId, WrongPeer};
use regions::set::RegionIndex;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::verify_server_cert_signed_by_trust_anchor;
use rustls::crypto::{verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::server::danger::ClientCertVerified;
use rustls::{CertificateError, DigitallySignedStruct, Error, SignatureScheme};
use std::sync::Arc;

/// Returns the only SPIFFE ID in a certificate.
pub(super) fn name_in(certificate: &CertificateDer<'_>) -> Result<SpiffeId, WrongPeer> {
    let parsed = webpki::EndEntityCert::try_from(certificate).map_err(|_| WrongPeer::InvalidId)?;
    SpiffeId::of(parsed.valid_uri_names())
}

/// Returns the server name that represents a region in rustls, which caches sessions by it. It is not sent
/// (`enable_sni`) and never resolved (RFC 6761, 6.4).
pub(super) fn server_name(region: RegionIndex) -> ServerName<'static> {
    let name = format!("{PREFIX}{}{SUFFIX}", region.as_usize());
    ServerName::try_from(name).expect("letters, digits and a hyphen form a host name")
}

const PREFIX: &str = "region-";
const SUFFIX: &str = ".invalid";

fn region_of(name: &ServerName<'_>) -> Option<RegionIndex> {
    let ServerName::DnsName(name) = name else { return None };
    RegionIndex::new(name.as_ref().strip_prefix(PREFIX)?.strip_suffix(SUFFIX)?.parse().ok()?)
}

/// Verifier with the credentials of one end.
#[derive(Clone, Debug)]
pub(super) struct Verifier(pub(super) Arc<Credentials>);

impl Verifier {
    /// Verifies that the chain ends at a trusted authority and that the certificate is that of region `meant`.
    pub(super) fn region(
        &self,
        certificate: &CertificateDer<'_>,
        others: &[CertificateDer<'_>],
        region: RegionIndex,
        now: UnixTime,
    ) -> Result<Peer, Error> {
        let anchors = &self.0.anchors;
        let parsed = ParsedCertificate::try_from(certificate)?;
        let algorithms = anchors.provider().signature_verification_algorithms.all;
        let roots = anchors.current().roots;
        verify_server_cert_signed_by_trust_anchor(&parsed, &roots, others, now, algorithms)?;
        self.named(certificate, region)
    }

    /// Verifies that a certificate with a verified chain is that of region `meant`.
    pub(super) fn named(&self, certificate: &CertificateDer<'_>, region: RegionIndex) -> Result<Peer, Error> {
        let Credentials { own, catalogue, .. } = &*self.0;
        let name = name_in(certificate).map_err(wrong_peer)?;
        name.verify_region(region, Role::Region, own, catalogue).map_err(wrong_peer)?;
        Peer::proven(&name, own, catalogue).map_err(wrong_peer)
    }

    /// Verifies that the chain ends at a trusted authority and that the certificate is that of a gateway.
    pub(super) fn gateway(
        &self,
        certificate: &CertificateDer<'_>,
        others: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let Credentials { anchors, own, catalogue, .. } = &*self.0;
        let verified = anchors.current().client_verifier.verify_client_cert(certificate, others, now)?;
        let name = name_in(certificate).map_err(wrong_peer)?;
        name.verify(Role::Gateway, own, catalogue).map_err(wrong_peer)?;
        Ok(verified)
    }

    pub(super) fn tls12(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.0.anchors.provider().signature_verification_algorithms;
        verify_tls12_signature(message, certificate, signed, algorithms)
    }

    pub(super) fn tls13(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.0.anchors.provider().signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signed, algorithms)
    }

    pub(super) fn schemes(&self) -> Vec<SignatureScheme> {
        self.0.anchors.provider().signature_verification_algorithms.supported_schemes()
    }
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
        let region = region_of(name).ok_or(Error::InvalidCertificate(CertificateError::NotValidForName))?;
        self.region(certificate, others, region, now).map(|_| ServerCertVerified::assertion())
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
