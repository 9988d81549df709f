//! What crosses a process between gateways, spokes and the hub, and what the store keeps.
//!
//! Each type carries a version, in its name and in its first field, and is turned into what the rest of the code works
//! with by a conversion that is written out: a new field does not compile until somebody decides what it means. A
//! message of another version is refused before any other field is looked at, and the refusal names the version.
//!
//! [`report`] is what a region says to a gateway, [`registry`] what it says to the hub, [`route`] what the hub says to
//! everybody, with every [`deployment`] and every [`tenant`], [`plan`] what gateways ask for and how that is divided, [`apply`] what an operator and the hub say to each other.
//! [`keys`] says under which key the hub's store keeps what.

pub mod apply;
pub mod deployment;
pub mod keys;
pub mod plan;
pub mod registry;
pub mod report;
pub mod revision;
pub mod route;
pub mod tenant;

use serde::{Deserialize, Deserializer};
use std::collections::BTreeSet;
use std::fmt::Display;
use std::net::SocketAddr;
use std::str::FromStr;

use regions::DeploymentName;
use regions::deployment::MAX_DEPLOYMENTS;

/// The version of everything here.
pub const VERSION: u32 = 1;

/// What is wrong with a message, and in which of its fields.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{field}`: {problem}")]
pub struct WireError {
    /// The field, as `regions[3].endpoint`.
    pub field: String,
    /// What is wrong with it and what is wanted.
    pub problem: String,
}

impl WireError {
    fn new(field: impl Into<String>, problem: impl Display) -> WireError {
        WireError { field: field.into(), problem: problem.to_string() }
    }
}

/// A message of a version that is not read here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("version {0} is not known here; this reads version {VERSION}")]
struct UnknownVersion(u32);

fn check_version(version: u32) -> Result<(), UnknownVersion> {
    if version == VERSION { Ok(()) } else { Err(UnknownVersion(version)) }
}

/// Reads the field `version`. It stands first, so that a message of another version is refused for that and not for a
/// field that it lacks.
fn known_version<'de, D: Deserializer<'de>>(from: D) -> Result<u32, D::Error> {
    let version = u32::deserialize(from)?;
    check_version(version).map_err(serde::de::Error::custom)?;
    Ok(version)
}

/// The same question, of a message that did not come through a deserialiser.
fn refuse_other_versions(version: u32) -> Result<(), WireError> {
    check_version(version).map_err(|error| WireError::new("version", error))
}

fn parsed<T: FromStr<Err: Display>>(field: impl Into<String>, text: &str) -> Result<T, WireError> {
    text.parse().map_err(|error| WireError::new(field, error))
}

/// An address at which somebody else can reach its owner.
fn endpoint(field: impl Into<String>, text: &str) -> Result<SocketAddr, WireError> {
    let shown: String = text.chars().take(64).collect();
    let address = text.parse::<SocketAddr>().ok();
    address.filter(|at| at.port() != 0 && !at.ip().is_unspecified() && !at.ip().is_multicast()).ok_or_else(
        || {
            WireError::new(
                field,
                format!("`{shown}` is no address that can be reached: write IP:PORT, such as 10.0.0.7:7100"),
            )
        },
    )
}

/// A list that names nothing twice.
fn names(field: &str, given: &[String]) -> Result<BTreeSet<DeploymentName>, WireError> {
    refuse_too_many(field, given.len(), MAX_DEPLOYMENTS)?;
    let mut names = BTreeSet::new();
    for (index, text) in given.iter().enumerate() {
        let name: DeploymentName = parsed(format!("{field}[{index}]"), text)?;
        if !names.insert(name) {
            return Err(WireError::new(format!("{field}[{index}]"), format!("`{text}` stands here twice")));
        }
    }
    Ok(names)
}

fn refuse_too_many(field: &str, given: usize, most: usize) -> Result<(), WireError> {
    if given <= most {
        return Ok(());
    }
    Err(WireError::new(field, format!("{given} entries; at most {most} fit")))
}

fn texts<T: ToString>(names: impl IntoIterator<Item = T>) -> Vec<String> {
    names.into_iter().map(|name| name.to_string()).collect()
}

/// What the property tests of the wire types draw from.
#[cfg(test)]
mod any {
    use super::*;
    use proptest::collection::btree_set;
    use proptest::prelude::*;
    use regions::RegionId;

    pub(super) fn region() -> impl Strategy<Value = RegionId> {
        "[a-z]{1,8}/[a-z0-9-]{1,20}".prop_map(|text| text.parse().unwrap())
    }

    pub(super) fn name() -> impl Strategy<Value = DeploymentName> {
        "[A-Za-z0-9._-]{1,64}".prop_map(|text| text.parse().unwrap())
    }

    pub(super) fn names() -> impl Strategy<Value = BTreeSet<DeploymentName>> {
        btree_set(name(), 0..5)
    }

    pub(super) fn endpoint() -> impl Strategy<Value = SocketAddr> {
        (any::<[u8; 4]>(), 1..=u16::MAX)
            .prop_map(SocketAddr::from)
            .prop_filter("can be reached", |at| !at.ip().is_unspecified() && !at.ip().is_multicast())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_is_one_that_somebody_else_can_reach() {
        for text in ["10.0.0.7:7100", "[2001:db8::1]:7100", "127.0.0.1:1"] {
            assert_eq!(endpoint("endpoint", text).map(|at| at.to_string()), Ok(text.to_owned()));
        }
        for text in
            ["", "spoke.internal:7100", "10.0.0.7", "0.0.0.0:7100", "[::]:1", "10.0.0.7:0", "224.0.0.1:1"]
        {
            let error = endpoint("endpoint", text).unwrap_err();
            assert_eq!(error.field, "endpoint", "{text}");
            assert!(error.problem.contains("such as 10.0.0.7:7100"), "{error}");
        }
    }

    #[test]
    fn as_many_names_as_there_may_be_are_read_and_one_more_is_not() {
        let list = |len: usize| (0..len).map(|n| format!("d{n}")).collect::<Vec<_>>();
        assert_eq!(
            names("deployments", &list(MAX_DEPLOYMENTS)).map(|names| names.len()),
            Ok(MAX_DEPLOYMENTS)
        );
        assert_eq!(names("deployments", &list(MAX_DEPLOYMENTS + 1)).unwrap_err().field, "deployments");
    }
}
