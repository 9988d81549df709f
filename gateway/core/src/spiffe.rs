//! Who stands at the other end of the hop between edge and region: the name in a certificate, and whether it is the one
//! that was meant.
//!
//! A name is a SPIFFE ID, the one URI in the certificate's subject alternative names:
//!
//! ```text
//! spiffe://meridian.example/region/aws/eu-central-1/in/de
//!          trust domain    role   where            which residency policy
//! ```
//!
//! SPIFFE and not a form of our own, because whatever gives workloads certificates speaks it (SPIRE, cert-manager,
//! Vault), and it has no query part, so nothing in a name is optional. Not a DNS name either: a region's door may be behind
//! any address, and who resolves a name must not decide who sees a request.
//!
//! The name carries the narrowest jurisdiction in which the machines stand. The wider ones follow from it by the catalogue's
//! own table, so a certificate need not be made anew when a union of countries is added there. Where catalogue and
//! certificate disagree, one of them is wrong about which residency policy applies, and nothing is sent.
//!
//! Peers of one fleet are those of one trust domain: that of one's own certificate. Which authority signed a name is for
//! the shell to verify; here it is decided what the name says.

use regions::catalogue::Catalogue;
use regions::id::RegionId;
use regions::jurisdiction::Jurisdiction;
use regions::set::RegionIndex;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

/// Bytes of a SPIFFE ID (SPIFFE-ID, 2.3).
const ID_BYTES_MAX: usize = 2048;
/// Bytes of a trust domain (SPIFFE-ID, 2.3).
const DOMAIN_BYTES_MAX: usize = 255;

/// What a peer is there for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Asks regions.
    Gateway,
    /// Is asked.
    Region,
}

/// The name of a gateway or of a region's door.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpiffeId {
    domain: Arc<str>,
    role: Role,
    region: RegionId,
    within: Jurisdiction,
}

/// A peer that is not the one that was meant. What it says of itself was signed by an authority of ours, so it may be shown.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WrongPeer {
    /// Its certificate has no name that one of us could have.
    #[error("its certificate has not exactly one URI, or that is no SPIFFE ID of a gateway or a region")]
    Nameless,
    /// It belongs to another fleet.
    #[error("{0} is of another trust domain")]
    OtherDomain(Box<SpiffeId>),
    /// It is of us, but a region where a gateway was meant, or the reverse.
    #[error("{0} is there for something else")]
    OtherRole(Box<SpiffeId>),
    /// No region of the catalogue.
    #[error("{0} stands in no region of the catalogue")]
    UnknownRegion(Box<SpiffeId>),
    /// The catalogue has the region under another policy.
    #[error("{0} claims another jurisdiction than the catalogue has, which is {1}")]
    OtherJurisdiction(Box<SpiffeId>, Jurisdiction),
    /// Another region than the one that was meant.
    #[error("{0} is not the region that was meant")]
    OtherRegion(Box<SpiffeId>),
}

impl Role {
    /// The word for it in a name.
    pub fn as_str(self) -> &'static str {
        match self {
            Role::Gateway => "gateway",
            Role::Region => "region",
        }
    }
}

impl SpiffeId {
    /// The one name among the URIs of a certificate: with two of them, two readers could see two peers (X509-SVID, 2).
    ///
    /// # Errors
    ///
    /// [`WrongPeer::Nameless`] when there is none, or more than one, or none of ours.
    pub fn of<'a>(mut uris: impl Iterator<Item = &'a str>) -> Result<SpiffeId, WrongPeer> {
        match (uris.next(), uris.next()) {
            (Some(only), None) => only.parse(),
            _ => Err(WrongPeer::Nameless),
        }
    }

    /// Where it stands, if it is of the same fleet as `own`, in this `role`, and as the catalogue has it.
    ///
    /// # Errors
    ///
    /// What of that is not so.
    pub fn stands(
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
        let within = catalogue.region(index).narrowest();
        if *within != self.within {
            return Err(WrongPeer::OtherJurisdiction(shown(), within.clone()));
        }
        Ok(index)
    }

    /// The same for a peer that was meant to stand in one region.
    ///
    /// # Errors
    ///
    /// What of that is not so.
    pub fn is_at(
        &self,
        meant: RegionIndex,
        role: Role,
        own: &SpiffeId,
        catalogue: &Catalogue,
    ) -> Result<(), WrongPeer> {
        if self.stands(role, own, catalogue)? == meant {
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
            let within: Jurisdiction = match (next()?, next()?, next()) {
                ("in", within, None) => {
                    within.parse().ok().filter(|read: &Jurisdiction| read.as_str() == within)?
                }
                _ => return None,
            };
            is_domain(domain).then(|| SpiffeId { domain: domain.into(), role, region, within })
        };
        if text.len() > ID_BYTES_MAX {
            return Err(WrongPeer::Nameless);
        }
        read().ok_or(WrongPeer::Nameless)
    }
}

impl fmt::Display for SpiffeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let SpiffeId { domain, role, region, within } = self;
        write!(f, "spiffe://{domain}/{}/{region}/in/{}", role.as_str(), within.as_str())
    }
}

/// As SPIFFE has it: lower case, no port, no user.
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
    fn a_name_reads_as_it_was_written_and_nothing_else_is_one() {
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
        assert_eq!(of(&[]), Err(WrongPeer::Nameless));
        assert_eq!(of(&[FRANKFURT, FRANKFURT]), Err(WrongPeer::Nameless));
        assert_eq!(of(&["https://m.example"]), Err(WrongPeer::Nameless));
    }

    #[test]
    fn a_peer_is_the_one_that_was_meant_or_it_is_told_why_not() {
        let catalogue = Catalogue::builtin();
        let own: SpiffeId = GATEWAY.parse().unwrap();
        let meant = catalogue.index_of(&"aws/eu-central-1".parse().unwrap()).unwrap();
        let check = |name: &str, expected: &str| {
            let name: SpiffeId = name.parse().unwrap();
            let seen = name.is_at(meant, Role::Region, &own, &catalogue);
            match seen {
                Ok(()) => assert_eq!(expected, "", "{name}"),
                Err(wrong) => {
                    let said = wrong.to_string();
                    assert!(!expected.is_empty() && said.contains(expected), "{said}");
                    assert!(said.contains(&name.to_string()), "{said}");
                }
            }
        };
        check(FRANKFURT, "");
        check("spiffe://other.example/region/aws/eu-central-1/in/de", "another trust domain");
        check("spiffe://m.example/gateway/aws/eu-central-1/in/de", "something else");
        check("spiffe://m.example/region/aws/atlantis-1/in/de", "no region of the catalogue");
        check("spiffe://m.example/region/aws/eu-central-1/in/us", "another jurisdiction");
        check("spiffe://m.example/region/aws/eu-central-1/in/eu", "which is de");
        check("spiffe://m.example/region/gcp/europe-west3/in/de", "not the region that was meant");
    }
}
