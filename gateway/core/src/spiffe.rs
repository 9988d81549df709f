//! Identity of a peer on the hop between edge and region: the name in its certificate, and its verification.
//!
//! A name is a SPIFFE ID, the only URI in the certificate's subject alternative names:
//!
//! ```text
//! spiffe://meridian.example/region/aws/eu-central-1/in/de
//!          trust domain    role   region           jurisdiction
//! ```
//!
//! SPIFFE is used rather than a form of our own because workload certificate issuers support it (SPIRE, cert-manager,
//! Vault), and it has no query part, so nothing in a name is optional. A DNS name is not used either: an ingress may be
//! behind any address, and name resolution must not decide which region sees a request.
//!
//! The name has the narrowest jurisdiction of the machines. The wider ones follow from the catalogue, so a certificate
//! need not be reissued when a union of countries is added there. If catalogue and certificate disagree, one of them is
//! wrong about the applicable residency policy, and nothing is sent.
//!
//! Peers of one fleet have the same trust domain as one's own certificate. The signature is verified by the shell; this
//! module interprets the name.

use regions::catalogue::Catalogue;
use regions::id::RegionId;
use regions::jurisdiction::Jurisdiction;
use regions::set::RegionIndex;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

/// Maximum bytes of a SPIFFE ID (SPIFFE-ID, 2.3).
const ID_BYTES_MAX: usize = 2048;
/// Maximum bytes of a trust domain (SPIFFE-ID, 2.3).
const DOMAIN_BYTES_MAX: usize = 255;

/// Role of a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Gateway, the client of the hop.
    Gateway,
    /// Ingress of a region, the server of the hop.
    Region,
}

/// Name of a gateway or of a region's ingress.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpiffeId {
    domain: Arc<str>,
    role: Role,
    region: RegionId,
    jurisdiction: Jurisdiction,
}

/// The peer is not the intended one. Its name was signed by a trusted authority, so it may be shown.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WrongPeer {
    /// Its certificate has no valid name.
    #[error("its certificate does not have exactly one URI that is a SPIFFE ID of a gateway or a region")]
    InvalidId,
    /// It belongs to another fleet.
    #[error("{0} has another trust domain")]
    OtherDomain(Box<SpiffeId>),
    /// It belongs to this fleet, but is a region instead of a gateway, or the reverse.
    #[error("{0} has another role")]
    OtherRole(Box<SpiffeId>),
    /// Its region is not in the catalogue.
    #[error("the region of {0} is not in the catalogue")]
    UnknownRegion(Box<SpiffeId>),
    /// The catalogue has another jurisdiction for the region.
    #[error("{0} has another jurisdiction than the catalogue, which has {1}")]
    OtherJurisdiction(Box<SpiffeId>, Jurisdiction),
    /// It is another region than the intended one.
    #[error("{0} is not the expected region")]
    OtherRegion(Box<SpiffeId>),
}

impl Role {
    /// Returns the path segment of a name.
    pub fn as_str(self) -> &'static str {
        match self {
            Role::Gateway => "gateway",
            Role::Region => "region",
        }
    }
}

impl SpiffeId {
    /// Returns the only name among the URIs of a certificate: with two of them, two readers could see two peers
    /// (X509-SVID, 2).
    ///
    /// # Errors
    ///
    /// [`WrongPeer::InvalidId`] if there is not exactly one valid URI.
    pub fn of<'a>(mut uris: impl Iterator<Item = &'a str>) -> Result<SpiffeId, WrongPeer> {
        match (uris.next(), uris.next()) {
            (Some(only), None) => only.parse(),
            _ => Err(WrongPeer::InvalidId),
        }
    }

    /// Verifies that it has the trust domain of `own`, this `role`, and the catalogue's jurisdiction; returns its
    /// region.
    ///
    /// # Errors
    ///
    /// The first condition that is not met.
    pub fn verify(
        &self,
        role: Role,
        own: &SpiffeId,
        catalogue: &Catalogue,
    ) -> Result<RegionIndex, WrongPeer> {
        let shown = || Box::new(self.clone());
        if self.domain != own.domain {
            return Err(WrongPeer::OtherDomain(shown()));
        }
        if self.role != role {
            return Err(WrongPeer::OtherRole(shown()));
        }
        let index = catalogue.index_of(&self.region).ok_or_else(|| WrongPeer::UnknownRegion(shown()))?;
        let jurisdiction = catalogue.region(index).narrowest();
        if *jurisdiction != self.jurisdiction {
            return Err(WrongPeer::OtherJurisdiction(shown(), jurisdiction.clone()));
        }
        Ok(index)
    }

    /// Verifies the same, and that its region is `expected`.
    ///
    /// # Errors
    ///
    /// The first condition that is not met.
    pub fn verify_region(
        &self,
        expected: RegionIndex,
        role: Role,
        own: &SpiffeId,
        catalogue: &Catalogue,
    ) -> Result<(), WrongPeer> {
        if self.verify(role, own, catalogue)? == expected {
            Ok(())
        } else {
            Err(WrongPeer::OtherRegion(Box::new(self.clone())))
        }
    }
}

impl FromStr for SpiffeId {
    type Err = WrongPeer;

    fn from_str(text: &str) -> Result<SpiffeId, WrongPeer> {
        let read = || {
            let (domain, path) = text.strip_prefix("spiffe://")?.split_once('/')?;
            let mut path = path.split('/');
            let mut next = || path.next();
            let role = match next()? {
                "gateway" => Role::Gateway,
                "region" => Role::Region,
                _ => return None,
            };
            let region = format!("{}/{}", next()?, next()?).parse().ok()?;
            let jurisdiction: Jurisdiction = match (next()?, next()?, next()) {
                ("in", jurisdiction, None) => {
                    jurisdiction.parse().ok().filter(|read: &Jurisdiction| read.as_str() == jurisdiction)?
                }
                _ => return None,
            };
            is_domain(domain).then(|| SpiffeId { domain: domain.into(), role, region, jurisdiction })
        };
        if text.len() > ID_BYTES_MAX {
            return Err(WrongPeer::InvalidId);
        }
        read().ok_or(WrongPeer::InvalidId)
    }
}

impl fmt::Display for SpiffeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let SpiffeId { domain, role, region, jurisdiction } = self;
        write!(f, "spiffe://{domain}/{}/{region}/in/{}", role.as_str(), jurisdiction.as_str())
    }
}

/// Returns whether the text is a trust domain: lower case, no port, no user.
fn is_domain(text: &str) -> bool {
    let letter =
        |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || matches!(byte, b'.' | b'-' | b'_');
    (1..=DOMAIN_BYTES_MAX).contains(&text.len()) && text.bytes().all(letter)
}

#[cfg(test)]
mod tests {
    use super::*;

    const FRANKFURT: &str = "spiffe://m.example/region/aws/eu-central-1/in/de";
    const GATEWAY: &str = "spiffe://m.example/gateway/aws/us-east-1/in/us-va";

    #[test]
    fn a_name_is_parsed_back_and_other_texts_are_rejected() {
        let check = |text: &str, good: bool| {
            let read: Result<SpiffeId, _> = text.parse();
            assert_eq!(read.map(|id| id.to_string()).ok().as_deref(), good.then_some(text), "{text}");
        };
        check(FRANKFURT, true);
        check(GATEWAY, true);
        let domain = |bytes: usize| format!("spiffe://{}/region/aws/eu-central-1/in/de", "d".repeat(bytes));
        check(&domain(DOMAIN_BYTES_MAX), true);
        check(&domain(DOMAIN_BYTES_MAX + 1), false);
        for wrong in [
            "",
            "https://m.example/region/aws/eu-central-1/in/de",
            "SPIFFE://m.example/region/aws/eu-central-1/in/de",
            "spiffe://M.example/region/aws/eu-central-1/in/de",
            "spiffe://m.example:443/region/aws/eu-central-1/in/de",
            "spiffe:///region/aws/eu-central-1/in/de",
            "spiffe://m.example/replica/aws/eu-central-1/in/de",
            "spiffe://m.example/region/aws/eu-central-1",
            "spiffe://m.example/region/aws/eu-central-1/in",
            "spiffe://m.example/region/aws/eu-central-1/in/de/",
            "spiffe://m.example/region/aws/eu-central-1/in/de/eu",
            "spiffe://m.example/region/aws/eu-central-1/in/DE",
            "spiffe://m.example/region/aws/eu-central-1/in/de?jurisdiction=us",
            "spiffe://m.example/region/aws//in/de",
            "spiffe://m.example/region/aws/eu-central-1/at/de",
        ] {
            check(wrong, false);
        }
        let text = format!("spiffe://m.example/region/aws/{}/in/de", "x".repeat(ID_BYTES_MAX));
        check(&text, false);
    }

    #[test]
    fn a_certificate_has_one_name() {
        let of = |uris: &[&str]| SpiffeId::of(uris.iter().copied()).map(|id| id.to_string());
        assert_eq!(of(&[FRANKFURT]), Ok(FRANKFURT.to_owned()));
        assert_eq!(of(&[]), Err(WrongPeer::InvalidId));
        assert_eq!(of(&[FRANKFURT, FRANKFURT]), Err(WrongPeer::InvalidId));
        assert_eq!(of(&["https://m.example"]), Err(WrongPeer::InvalidId));
    }

    #[test]
    fn a_peer_is_the_expected_one_or_rejected_with_a_reason() {
        let catalogue = Catalogue::builtin();
        let own: SpiffeId = GATEWAY.parse().unwrap();
        let region = catalogue.index_of(&"aws/eu-central-1".parse().unwrap()).unwrap();
        let check = |name: &str, expected: &str| {
            let name: SpiffeId = name.parse().unwrap();
            let result = name.verify_region(region, Role::Region, &own, &catalogue);
            match result {
                Ok(()) => assert_eq!(expected, "", "{name}"),
                Err(wrong) => {
                    let message = wrong.to_string();
                    assert!(!expected.is_empty() && message.contains(expected), "{message}");
                    assert!(message.contains(&name.to_string()), "{message}");
                }
            }
        };
        check(FRANKFURT, "");
        check("spiffe://other.example/region/aws/eu-central-1/in/de", "another trust domain");
        check("spiffe://m.example/gateway/aws/eu-central-1/in/de", "another role");
        check("spiffe://m.example/region/aws/atlantis-1/in/de", "not in the catalogue");
        check("spiffe://m.example/region/aws/eu-central-1/in/us", "another jurisdiction");
        check("spiffe://m.example/region/aws/eu-central-1/in/eu", "which has de");
        check("spiffe://m.example/region/gcp/europe-west3/in/de", "not the expected region");
    }
}
