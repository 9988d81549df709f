//! Name in a certificate that an operator orders, and the texts by which operators refer to it.

use regions::spiffe::{Role, SpiffeId};
use regions::{Catalogue, RegionId};

/// Invalid owner of a certificate.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubjectError {
    /// The trust domain of the authority is invalid.
    #[error(
        "the trust domain must have 1 to 255 letters a to z, digits, `.`, `-` and `_`, such as m.example"
    )]
    InvalidDomain,
    /// The name of the person for a certificate is invalid.
    #[error("the name must have 1 to 64 letters, digits, `.`, `-` and `_`, such as alice")]
    InvalidName,
    /// A join token or certificate was requested for a process without a region, or for a person with one.
    #[error("a {0} has a {needs} and nothing else; give the {needs}", needs = if .0.is_process() { "region" } else { "name" })]
    OtherOwner(Role),
    /// A join token or certificate was requested for a region that the hub's catalogue does not have.
    #[error("region {0} is not in the catalogue")]
    UnknownRegion(RegionId),
}

/// Checks a trust domain.
///
/// # Errors
///
/// [`SubjectError::InvalidDomain`].
pub fn check_domain(domain: &str) -> Result<(), SubjectError> {
    SpiffeId::person(domain, Role::Viewer, "x").map(drop).map_err(|_| SubjectError::InvalidDomain)
}

/// Returns the name of a process or a person: one of `region` and `person` is given, as the role requires. The
/// jurisdiction is that of the catalogue.
///
/// # Errors
///
/// The first problem.
pub fn subject(
    domain: &str,
    role: Role,
    region: Option<&RegionId>,
    person: Option<&str>,
    catalogue: &Catalogue,
) -> Result<SpiffeId, SubjectError> {
    let named = match (role.is_process(), region, person) {
        (true, Some(region), None) => {
            let found = catalogue.get(region).ok_or_else(|| SubjectError::UnknownRegion(region.clone()))?;
            SpiffeId::process(domain, role, region, found.narrowest())
        }
        (false, None, Some(person)) => SpiffeId::person(domain, role, person),
        _ => return Err(SubjectError::OtherOwner(role)),
    };
    named.map_err(|_| SubjectError::InvalidName)
}

/// Returns whether `text` refers to this owner: the SPIFFE ID, that without the trust domain, without the jurisdiction too,
/// or the name of a person.
pub fn is_named(owner: &SpiffeId, text: &str) -> bool {
    let id = owner.to_string();
    let Some((_, path)) = id.strip_prefix("spiffe://").and_then(|id| id.split_once('/')) else {
        return false;
    };
    let (role, rest) = path.split_once('/').unwrap_or((path, ""));
    let without_jurisdiction = path.rsplit_once("/in/").filter(|_| owner.role().is_process());
    text == id
        || text == path
        || without_jurisdiction.is_some_and(|(short, _)| text == short)
        || (!owner.role().is_process() && text == rest && role == owner.role().as_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(role: Role, region: Option<&str>, person: Option<&str>) -> Result<SpiffeId, SubjectError> {
        let region: Option<RegionId> = region.map(|region| region.parse().unwrap());
        subject("m.example", role, region.as_ref(), person, &Catalogue::builtin())
    }

    #[test]
    fn a_role_has_the_owner_that_it_requires_and_no_other() {
        let spoke = of(Role::Spoke, Some("aws/eu-central-1"), None).unwrap();
        assert_eq!(spoke.to_string(), "spiffe://m.example/spoke/aws/eu-central-1/in/de");
        assert_eq!(of(Role::Gateway, None, Some("alice")), Err(SubjectError::OtherOwner(Role::Gateway)));
        assert_eq!(of(Role::Gateway, None, None), Err(SubjectError::OtherOwner(Role::Gateway)));
        let both = of(Role::Operator, Some("aws/us-east-1"), Some("alice"));
        assert_eq!(both, Err(SubjectError::OtherOwner(Role::Operator)));
        let replica = of(Role::Replica, Some("aws/us-east-1"), None).unwrap();
        assert_eq!(replica.to_string(), "spiffe://m.example/replica/aws/us-east-1/in/us-va");
        let unknown = "aws/mars-1".parse().unwrap();
        assert_eq!(of(Role::Hub, Some("aws/mars-1"), None), Err(SubjectError::UnknownRegion(unknown)));
        for person in ["", "..", "a/b", "a b", "spiffe:", "ä"] {
            assert_eq!(of(Role::Operator, None, Some(person)), Err(SubjectError::InvalidName), "{person}");
        }
    }

    #[test]
    fn an_owner_is_named_by_its_id_its_path_or_a_persons_name() {
        let spoke = of(Role::Spoke, Some("aws/eu-central-1"), None).unwrap();
        for name in [
            "spiffe://m.example/spoke/aws/eu-central-1/in/de",
            "spoke/aws/eu-central-1/in/de",
            "spoke/aws/eu-central-1",
        ] {
            assert!(is_named(&spoke, name), "{name}");
        }
        for name in ["", "spoke", "aws/eu-central-1", "spiffe://other/spoke/aws/eu-central-1/in/de", "de"] {
            assert!(!is_named(&spoke, name), "{name}");
        }
        let viewer = of(Role::Viewer, None, Some("bob")).unwrap();
        assert!(
            is_named(&viewer, "bob") && is_named(&viewer, "viewer/bob") && !is_named(&viewer, "operator/bob")
        );
    }
}
