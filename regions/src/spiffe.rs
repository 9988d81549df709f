//! Name of a process or an operator in its certificate, and the verification of a peer's name.
//!
//! A name is a SPIFFE ID, the only URI in the certificate's subject alternative names:
//!
//! ```text
//! spiffe://meridian.example/spoke/aws/eu-central-1/in/de
//!          trust domain     role  region           jurisdiction
//! spiffe://meridian.example/operator/jane
//!          trust domain     role     name
//! ```
//!
//! SPIFFE is used rather than a form of our own because workload certificate issuers support it (SPIRE, cert-manager,
//! Vault), and it has no query part, so nothing in a name is optional. A DNS name is not used either: a process may be
//! behind any address, and name resolution must not decide which region sees a request.
//!
//! The name of a process has the narrowest jurisdiction of the machines. The wider ones follow from the catalogue, so a
//! certificate need not be reissued when a union of countries is added there. If catalogue and certificate disagree, one
//! of them is wrong about the applicable residency policy, and nothing is sent. Operators and viewers are persons or
//! scripts, which are in no region.
//!
//! Peers of one fleet have the same trust domain as one's own certificate. The signature is verified by the shell; this
//! module interprets the name.

use crate::catalogue::Catalogue;
use crate::id::RegionId;
use crate::jurisdiction::Jurisdiction;
use crate::set::RegionIndex;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

/// Maximum bytes of a SPIFFE ID (SPIFFE-ID, 2.3).
const ID_BYTES_MAX: usize = 2048;
/// Maximum bytes of a trust domain (SPIFFE-ID, 2.3).
const DOMAIN_BYTES_MAX: usize = 255;
/// Maximum bytes of the name of an operator or viewer.
const NAME_BYTES_MAX: usize = 64;

/// Role of a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Role {
    /// Gateway.
    Gateway,
    /// Spoke of a region: its ingress, agent and scaler.
    Spoke,
    /// Replica in a region.
    Replica,
    /// Hub.
    Hub,
    /// Person or script that may change what the fleet does.
    Operator,
    /// Person or script that may read the state of the fleet.
    Viewer,
}

impl Role {
    /// All roles.
    pub const ALL: [Role; 6] =
        [Role::Gateway, Role::Spoke, Role::Replica, Role::Hub, Role::Operator, Role::Viewer];

    /// Returns the path segment of a name.
    pub fn as_str(self) -> &'static str {
        match self {
            Role::Gateway => "gateway",
            Role::Spoke => "spoke",
            Role::Replica => "replica",
            Role::Hub => "hub",
            Role::Operator => "operator",
            Role::Viewer => "viewer",
        }
    }

    /// Returns whether it is a role of processes, whose names have a region and a jurisdiction.
    pub fn is_process(self) -> bool {
        match self {
            Role::Gateway | Role::Spoke | Role::Replica | Role::Hub => true,
            Role::Operator | Role::Viewer => false,
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Role {
    type Err = String;

    fn from_str(text: &str) -> Result<Role, String> {
        let found = Role::ALL.into_iter().find(|role| role.as_str() == text);
        let names = Role::ALL.map(Role::as_str).join(", ");
        found.ok_or_else(|| format!("\"{text}\" is not a role; write one of {names}"))
    }
}

/// Name of a process, an operator or a viewer.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SpiffeId {
    domain: Arc<str>,
    role: Role,
    owner: Owner,
}

/// Part of a name after the role.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Owner {
    /// Process in a region.
    Process { region: RegionId, jurisdiction: Jurisdiction },
    /// Operator or viewer.
    Person(Arc<str>),
}

/// The peer is not the intended one. Its name was signed by a trusted authority, so it may be shown.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WrongPeer {
    /// The certificate of the peer is not one of this fleet.
    #[error("its certificate does not have exactly one URI that is a SPIFFE ID of this fleet's form")]
    InvalidId,
    /// The peer belongs to another fleet.
    #[error("{0} has another trust domain")]
    OtherDomain(Box<SpiffeId>),
    /// The peer belongs to this fleet, but its role is not accepted here.
    #[error("{0} has another role")]
    OtherRole(Box<SpiffeId>),
    /// The region in the certificate of the peer is not in the catalogue of this process.
    #[error("the region of {0} is not in the catalogue")]
    UnknownRegion(Box<SpiffeId>),
    /// The certificate of the peer and the catalogue of this process name different jurisdictions for its region.
    #[error("{0} has another jurisdiction than the catalogue, which has {1}")]
    OtherJurisdiction(Box<SpiffeId>, Jurisdiction),
    /// The peer is in another region than the one that was to be reached.
    #[error("{0} is not of the expected region")]
    OtherRegion(Box<SpiffeId>),
}

impl SpiffeId {
    /// Returns the name of a process.
    ///
    /// # Errors
    ///
    /// [`WrongPeer::InvalidId`] if the trust domain is invalid or the role is not that of a process.
    pub fn process(
        domain: &str,
        role: Role,
        region: &RegionId,
        jurisdiction: &Jurisdiction,
    ) -> Result<SpiffeId, WrongPeer> {
        format!("spiffe://{domain}/{role}/{region}/in/{}", jurisdiction.as_str()).parse()
    }

    /// Returns the name of an operator or viewer.
    ///
    /// # Errors
    ///
    /// [`WrongPeer::InvalidId`] if the trust domain or the name is invalid or the role is that of a process.
    pub fn person(domain: &str, role: Role, name: &str) -> Result<SpiffeId, WrongPeer> {
        format!("spiffe://{domain}/{role}/{name}").parse()
    }

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

    /// Returns the name of a process of another role in the same region.
    ///
    /// # Errors
    ///
    /// [`WrongPeer::InvalidId`] if either is the name of a person.
    pub fn with_role(&self, role: Role) -> Result<SpiffeId, WrongPeer> {
        match &self.owner {
            Owner::Process { region, jurisdiction } => {
                SpiffeId::process(&self.domain, role, region, jurisdiction)
            }
            Owner::Person(_) => Err(WrongPeer::InvalidId),
        }
    }

    /// Returns the trust domain.
    pub fn domain(&self) -> &str {
        &self.domain
    }

    /// Returns the role.
    pub fn role(&self) -> Role {
        self.role
    }

    /// Returns the region of a process.
    pub fn region(&self) -> Option<&RegionId> {
        match &self.owner {
            Owner::Process { region, .. } => Some(region),
            Owner::Person(_) => None,
        }
    }

    /// Verifies that it has the trust domain of `own` and, for a process, the catalogue's jurisdiction; returns its
    /// region. Without a catalogue, the region is not verified.
    ///
    /// # Errors
    ///
    /// The first condition that is not met.
    pub fn verify(
        &self,
        own: &SpiffeId,
        catalogue: Option<&Catalogue>,
    ) -> Result<Option<RegionIndex>, WrongPeer> {
        let shown = || Box::new(self.clone());
        if self.domain != own.domain {
            return Err(WrongPeer::OtherDomain(shown()));
        }
        let (Owner::Process { region, jurisdiction }, Some(catalogue)) = (&self.owner, catalogue) else {
            return Ok(None);
        };
        let index = catalogue.index_of(region).ok_or_else(|| WrongPeer::UnknownRegion(shown()))?;
        let known = catalogue.region(index).narrowest();
        if known != jurisdiction {
            return Err(WrongPeer::OtherJurisdiction(shown(), known.clone()));
        }
        Ok(Some(index))
    }

    /// Verifies the same, that its role is one of `roles`, and that its region is `region`, where one is expected.
    ///
    /// # Errors
    ///
    /// The first condition that is not met.
    pub fn verify_as(
        &self,
        roles: &[Role],
        region: Option<RegionIndex>,
        own: &SpiffeId,
        catalogue: Option<&Catalogue>,
    ) -> Result<Option<RegionIndex>, WrongPeer> {
        let found = self.verify(own, catalogue)?;
        if !roles.contains(&self.role) {
            return Err(WrongPeer::OtherRole(Box::new(self.clone())));
        }
        match region {
            Some(_) if found != region => Err(WrongPeer::OtherRegion(Box::new(self.clone()))),
            _ => Ok(found),
        }
    }
}

impl FromStr for SpiffeId {
    type Err = WrongPeer;

    fn from_str(text: &str) -> Result<SpiffeId, WrongPeer> {
        let read = || {
            let (domain, path) = text.strip_prefix("spiffe://")?.split_once('/')?;
            let (role, path) = path.split_once('/')?;
            let role: Role = role.parse().ok()?;
            let owner = if role.is_process() { process(path)? } else { person(path)? };
            is_domain(domain).then(|| SpiffeId { domain: domain.into(), role, owner })
        };
        if text.len() > ID_BYTES_MAX {
            return Err(WrongPeer::InvalidId);
        }
        read().ok_or(WrongPeer::InvalidId)
    }
}

fn process(path: &str) -> Option<Owner> {
    let mut path = path.split('/');
    let mut next = || path.next();
    let region = format!("{}/{}", next()?, next()?).parse().ok()?;
    let jurisdiction: Jurisdiction = match (next()?, next()?, next()) {
        ("in", jurisdiction, None) => {
            jurisdiction.parse().ok().filter(|read: &Jurisdiction| read.as_str() == jurisdiction)?
        }
        _ => return None,
    };
    Some(Owner::Process { region, jurisdiction })
}

fn person(name: &str) -> Option<Owner> {
    let letter = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-' | b'_');
    let is_name = (1..=NAME_BYTES_MAX).contains(&name.len()) && name.bytes().all(letter);
    (is_name && !name.bytes().all(|byte| byte == b'.')).then(|| Owner::Person(name.into()))
}

impl fmt::Display for SpiffeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let SpiffeId { domain, role, owner } = self;
        match owner {
            Owner::Process { region, jurisdiction } => {
                write!(f, "spiffe://{domain}/{role}/{region}/in/{}", jurisdiction.as_str())
            }
            Owner::Person(name) => write!(f, "spiffe://{domain}/{role}/{name}"),
        }
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

    const FRANKFURT: &str = "spiffe://m.example/spoke/aws/eu-central-1/in/de";
    const GATEWAY: &str = "spiffe://m.example/gateway/aws/us-east-1/in/us-va";
    const OPERATOR: &str = "spiffe://m.example/operator/jane.doe-2";

    #[test]
    fn a_name_is_parsed_back_and_other_texts_are_rejected() {
        let check = |text: &str, good: bool| {
            let read: Result<SpiffeId, _> = text.parse();
            assert_eq!(read.map(|id| id.to_string()).ok().as_deref(), good.then_some(text), "{text}");
        };
        for role in Role::ALL {
            let path = if role.is_process() { "aws/eu-central-1/in/de" } else { "jane" };
            check(&format!("spiffe://m.example/{role}/{path}"), true);
            let other = if role.is_process() { "jane" } else { "aws/eu-central-1/in/de" };
            check(&format!("spiffe://m.example/{role}/{other}"), false);
            assert_eq!(role.as_str().parse(), Ok(role));
        }
        check(OPERATOR, true);
        let domain = |bytes: usize| format!("spiffe://{}/spoke/aws/eu-central-1/in/de", "d".repeat(bytes));
        check(&domain(DOMAIN_BYTES_MAX), true);
        check(&domain(DOMAIN_BYTES_MAX + 1), false);
        let person = |bytes: usize| format!("spiffe://m.example/viewer/{}", "n".repeat(bytes));
        check(&person(NAME_BYTES_MAX), true);
        check(&person(NAME_BYTES_MAX + 1), false);
        for wrong in [
            "",
            "https://m.example/spoke/aws/eu-central-1/in/de",
            "SPIFFE://m.example/spoke/aws/eu-central-1/in/de",
            "spiffe://M.example/spoke/aws/eu-central-1/in/de",
            "spiffe://m.example:443/spoke/aws/eu-central-1/in/de",
            "spiffe:///spoke/aws/eu-central-1/in/de",
            "spiffe://m.example/region/aws/eu-central-1/in/de",
            "spiffe://m.example/spoke/aws/eu-central-1",
            "spiffe://m.example/spoke/aws/eu-central-1/in",
            "spiffe://m.example/spoke/aws/eu-central-1/in/de/",
            "spiffe://m.example/spoke/aws/eu-central-1/in/de/eu",
            "spiffe://m.example/spoke/aws/eu-central-1/in/DE",
            "spiffe://m.example/spoke/aws/eu-central-1/in/de?jurisdiction=us",
            "spiffe://m.example/spoke/aws//in/de",
            "spiffe://m.example/spoke/aws/eu-central-1/at/de",
            "spiffe://m.example/operator/",
            "spiffe://m.example/operator",
            "spiffe://m.example/operator/..",
            "spiffe://m.example/operator/jane/doe",
            "spiffe://m.example/operator/jane%20doe",
        ] {
            check(wrong, false);
        }
        let text = format!("spiffe://m.example/spoke/aws/{}/in/de", "x".repeat(ID_BYTES_MAX));
        check(&text, false);
    }

    #[test]
    fn names_are_made_of_their_parts() {
        let (region, de) = ("aws/eu-central-1".parse().unwrap(), "de".parse().unwrap());
        let made = SpiffeId::process("m.example", Role::Spoke, &region, &de).unwrap();
        assert_eq!(made, FRANKFURT.parse().unwrap());
        assert_eq!((made.domain(), made.role(), made.region()), ("m.example", Role::Spoke, Some(&region)));
        let made = SpiffeId::person("m.example", Role::Operator, "jane.doe-2").unwrap();
        assert_eq!((made.to_string().as_str(), made.region()), (OPERATOR, None));
        assert_eq!(SpiffeId::person("m.example", Role::Spoke, "jane"), Err(WrongPeer::InvalidId));
        assert_eq!(SpiffeId::person("m.example", Role::Viewer, "a/b"), Err(WrongPeer::InvalidId));
        assert_eq!(SpiffeId::process("m.example", Role::Viewer, &region, &de), Err(WrongPeer::InvalidId));
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
        let region = catalogue.index_of(&"aws/eu-central-1".parse().unwrap());
        let check = |name: &str, expected: &str| {
            let name: SpiffeId = name.parse().unwrap();
            let result = name.verify_as(&[Role::Spoke, Role::Operator], region, &own, Some(&catalogue));
            match result {
                Ok(found) => assert_eq!((expected, found), ("", region), "{name}"),
                Err(wrong) => {
                    let message = wrong.to_string();
                    assert!(!expected.is_empty() && message.contains(expected), "{message}");
                    assert!(message.contains(&name.to_string()), "{message}");
                }
            }
        };
        check(FRANKFURT, "");
        check("spiffe://other.example/spoke/aws/eu-central-1/in/de", "another trust domain");
        check("spiffe://m.example/gateway/aws/eu-central-1/in/de", "another role");
        check("spiffe://m.example/viewer/jane", "another role");
        check("spiffe://m.example/operator/jane", "not of the expected region");
        check("spiffe://m.example/spoke/aws/atlantis-1/in/de", "not in the catalogue");
        check("spiffe://m.example/spoke/aws/eu-central-1/in/us", "another jurisdiction");
        check("spiffe://m.example/spoke/aws/eu-central-1/in/eu", "which has de");
        check("spiffe://m.example/spoke/gcp/europe-west3/in/de", "not of the expected region");
        let operator: SpiffeId = "spiffe://m.example/operator/jane".parse().unwrap();
        assert_eq!(operator.verify_as(&[Role::Operator], None, &own, Some(&catalogue)), Ok(None));
    }
}
