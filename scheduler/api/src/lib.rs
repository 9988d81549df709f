//! API of the control plane: messages between gateways, spokes and the hub, records of the hub's store, and the values
//! that they carry.
//!
//! Each type carries a version, in its name and in its first field, and is converted to a domain type by exhaustive
//! destructuring: a new field does not compile until its conversion is written. A message of another version is
//! rejected before any other field is parsed, and the error names the version.
//!
//! Processes whose versions differ by one minor version work together, in every pair of roles. So a reader ignores unknown fields,
//! an absent new field has the meaning of the version without it, and a value of a closed list that only a later version knows does
//! not reject the message. There is one exception: the orders of an operator ([`apply::ApplyV1`], [`api_key::CreateKeyV1`], those of
//! [`pki`]) and the conditions of a search reject unknown fields, because the hub would do something else without them; an option that
//! is not used is not sent.
//!
//! [`report`] goes from a region to a gateway, [`registration`] from a region to the hub, and [`route`] from the hub to
//! all readers, with every [`deployment`] and every [`tenant`]. [`peer`] is the exchange between the spokes of a region,
//! one of which holds the [`scaler`] lease, [`start_failure`] a model that a region cannot start, and [`job_transfer`] that of a gateway and the region of a queue of jobs. [`plan`]
//! contains the gateways' demand and the traffic plan, [`placements`] the regions that the leader has chosen, [`store_format`] the format of the hub's store, [`apply`] the
//! operator's messages, [`usage`] what tenants have used, [`pki`]
//! the messages of the certificate authority, [`paths`] the HTTP paths, [`error`] the hub's own error codes, and [`keys`] the keys of
//! the hub's store. A [`reader`] follows the route table; a [`lease`] keeps a registration alive. [`traffic`] is for the
//! console of a hub, and [`requests`] the search for requests.

pub mod api_key;
pub mod apply;
pub mod deployment;
pub mod error;
pub mod job_transfer;
pub mod keys;
pub mod lease;
pub mod paths;
pub mod peer;
pub mod pki;
pub mod placements;
pub mod plan;
pub mod reader;
pub mod registration;
pub mod report;
pub mod requests;
pub mod revision;
pub mod route;
pub mod scaler;
pub mod start_failure;
pub mod store_format;
pub mod tenant;
pub mod traffic;
pub mod usage;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;
use std::io;
use std::str::FromStr;

use regions::DeploymentName;
use regions::deployment::MAX_DEPLOYMENTS;

/// Invalid field of a message.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{field}`: {problem}")]
pub struct WireError {
    /// Path of the field, such as `regions[3].endpoint`.
    pub field: String,
    /// Description of the problem, with the expected value.
    pub problem: String,
}

impl WireError {
    /// Creates an error of a field.
    pub fn new(field: impl Into<String>, problem: impl Display) -> WireError {
        WireError { field: field.into(), problem: problem.to_string() }
    }
}

/// Version of all messages: 1. Another version does not deserialize. It is the first field of a message, so that a message
/// of another version is rejected for its version and not for a missing field.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MessageVersion;

/// Version of all messages.
pub const VERSION: MessageVersion = MessageVersion;

impl MessageVersion {
    const NUMBER: u32 = 1;
}

impl Serialize for MessageVersion {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        MessageVersion::NUMBER.serialize(to)
    }
}

impl<'de> Deserialize<'de> for MessageVersion {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<MessageVersion, D::Error> {
        match u32::deserialize(from)? {
            MessageVersion::NUMBER => Ok(MessageVersion),
            other => Err(de::Error::custom(format!(
                "version {other} is not supported; this process supports version {}",
                MessageVersion::NUMBER
            ))),
        }
    }
}

/// Deserializes a field that may be `null`, which differs from an absent one.
fn present<'de, T: Deserialize<'de>, D: Deserializer<'de>>(from: D) -> Result<Option<T>, D::Error> {
    T::deserialize(from).map(Some)
}

/// Parses the text of a field.
///
/// # Errors
///
/// The error of the type, with the name of the field.
pub fn parsed<T: FromStr<Err: Display>>(field: impl Into<String>, text: &str) -> Result<T, WireError> {
    text.parse().map_err(|error| WireError::new(field, error))
}

/// Parses a list of distinct deployment names.
fn names(field: &str, given: &[String]) -> Result<BTreeSet<DeploymentName>, WireError> {
    let read = |at: &str, text: &String| Ok((parsed(at, text)?, ()));
    entries(field, "", given, MAX_DEPLOYMENTS, read).map(|names| names.into_keys().collect())
}

/// Parses a list of at most `max` entries with distinct names. `read` gets the path of an entry; `name` is the field of
/// its name, such as `.name`.
fn entries<W, K: Ord + Display, V>(
    field: &str,
    name: &str,
    given: impl IntoIterator<Item = W, IntoIter: ExactSizeIterator>,
    max: usize,
    mut read: impl FnMut(&str, W) -> Result<(K, V), WireError>,
) -> Result<BTreeMap<K, V>, WireError> {
    let given = given.into_iter();
    reject_too_many(field, given.len(), max)?;
    let mut found = BTreeMap::new();
    for (index, entry) in given.enumerate() {
        let at = format!("{field}[{index}]");
        let (key, value) = read(&at, entry)?;
        match found.entry(key) {
            Entry::Vacant(slot) => drop(slot.insert(value)),
            Entry::Occupied(first) => {
                let problem = format!("`{}` is listed twice", first.key());
                return Err(WireError::new(format!("{at}{name}"), problem));
            }
        }
    }
    Ok(found)
}

/// Parses a list, entry by entry.
fn list<W, T>(
    field: &str,
    given: impl IntoIterator<Item = W>,
    mut read: impl FnMut(&str, W) -> Result<T, WireError>,
) -> Result<Vec<T>, WireError> {
    given.into_iter().enumerate().map(|(index, entry)| read(&format!("{field}[{index}]"), entry)).collect()
}

fn reject_too_many(field: &str, given: usize, max: usize) -> Result<(), WireError> {
    if given <= max {
        return Ok(());
    }
    Err(WireError::new(field, format!("{given} entries; at most {max} are allowed")))
}

/// First value of [`fnv1a`].
const FNV_BASIS: u64 = 0xcbf2_9ce4_8422_2325;

/// FNV-1a of `bytes`, continued from `hash`. It detects defects, not forgery.
fn fnv1a(hash: u64, bytes: impl IntoIterator<Item = u8>) -> u64 {
    bytes.into_iter().fold(hash, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}

/// FNV-1a of the JSON of a message.
fn json_checksum(message: &impl Serialize) -> u64 {
    struct Hash(u64);
    impl io::Write for Hash {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0 = fnv1a(self.0, bytes.iter().copied());
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let mut hash = Hash(FNV_BASIS);
    serde_json::to_writer(&mut hash, message).expect("numbers, texts and lists serialise to JSON");
    hash.0
}

fn to_strings<T: ToString>(names: impl IntoIterator<Item = T>) -> Vec<String> {
    names.into_iter().map(|name| name.to_string()).collect()
}

/// Strategies for the property tests of the wire types.
#[cfg(test)]
mod any {
    use super::*;
    use proptest::collection::btree_set;
    use proptest::prelude::*;
    use regions::{HostPort, InstanceName, RegionId};

    pub(super) fn region() -> impl Strategy<Value = RegionId> {
        "[a-z]{1,8}/[a-z0-9-]{1,20}".prop_map(|text| text.parse().unwrap())
    }

    pub(super) fn instance() -> impl Strategy<Value = InstanceName> {
        "[a-z0-9.-]{1,64}".prop_map(|text| text.parse().unwrap())
    }

    pub(super) fn name() -> impl Strategy<Value = DeploymentName> {
        "[A-Za-z0-9._-]{1,64}".prop_map(|text| text.parse().unwrap())
    }

    pub(super) fn names() -> impl Strategy<Value = BTreeSet<DeploymentName>> {
        btree_set(name(), 0..5)
    }

    pub(super) fn endpoint() -> impl Strategy<Value = HostPort> {
        let host = prop_oneof![
            "10\\.[1-9][0-9]?\\.1\\.1",
            "\\[2001:db8::[1-9a-f]{1,4}\\]",
            "[a-z]{1,9}\\.[a-z]{2,9}\\.?"
        ];
        (host, 1..=u16::MAX).prop_map(|(host, port)| format!("{host}:{port}").parse().unwrap())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_maximum_number_of_names_is_accepted_and_one_more_is_not() {
        let list = |len: usize| (0..len).map(|n| format!("d{n}")).collect::<Vec<_>>();
        assert_eq!(
            names("deployments", &list(MAX_DEPLOYMENTS)).map(|names| names.len()),
            Ok(MAX_DEPLOYMENTS)
        );
        assert_eq!(names("deployments", &list(MAX_DEPLOYMENTS + 1)).unwrap_err().field, "deployments");
    }
}
