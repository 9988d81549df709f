//! What the store holds, as bytes and as what it means.

use std::fmt;

use regions::{Deployment, RouteTable};
use scheduler_core::hub::Event;
use scheduler_core::registry::{Registration, Standing};
use scheduler_core::wire::WireError;
use scheduler_core::wire::keys;
use scheduler_core::wire::registry::RegisterV1;
use scheduler_core::wire::route::{RouteTableV1, StoredDeploymentV1};
use scheduler_store::{self as store, KeyValue};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// A key whose value cannot be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordError {
    key: String,
    problem: String,
}

impl fmt::Display for RecordError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the store's `{}` cannot be read: {}", self.key, self.problem)
    }
}

/// A value, as it is written.
pub(super) fn bytes(wire: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(wire).expect("numbers, texts and lists serialise to JSON")
}

fn read<Wire: DeserializeOwned, T: TryFrom<Wire, Error = WireError>>(
    entry: &KeyValue,
) -> Result<T, RecordError> {
    let wire: Wire = serde_json::from_slice(&entry.value).map_err(|error| wrong(entry, error))?;
    T::try_from(wire).map_err(|error| wrong(entry, error))
}

fn wrong(entry: &KeyValue, problem: impl ToString) -> RecordError {
    RecordError { key: entry.key.clone(), problem: problem.to_string() }
}

/// The spoke of an entry under `spokes/`.
pub(super) fn standing(entry: &KeyValue) -> Result<Standing, RecordError> {
    let registration = read::<RegisterV1, Registration>(entry)?;
    if entry.key != keys::spoke(&registration.region, registration.boot_id) {
        return Err(wrong(entry, format!("it is of {} {:x}", registration.region, registration.boot_id)));
    }
    Ok(Standing { registration, created: entry.create_revision })
}

/// The deployment of an entry under `deployments/`.
pub(super) fn deployment(entry: &KeyValue) -> Result<Deployment, RecordError> {
    let deployment = read::<StoredDeploymentV1, Deployment>(entry)?;
    if entry.key != keys::deployment(&deployment.name) {
        return Err(wrong(entry, format!("it is of {}", deployment.name)));
    }
    Ok(deployment)
}

/// The table of the entry `routes`.
pub(super) fn table(entry: &KeyValue) -> Result<RouteTable, RecordError> {
    read::<RouteTableV1, RouteTable>(entry)
}

/// The number of the entry `meta/epoch`.
pub(super) fn epoch(entry: &KeyValue) -> Result<u64, RecordError> {
    let text = std::str::from_utf8(&entry.value).map_err(|error| wrong(entry, error))?;
    text.parse().map_err(|error| wrong(entry, error))
}

/// What a change of the store means for the hub: nothing, if it is a change of something else.
pub(super) fn event(change: &store::Event) -> Option<Result<Event, RecordError>> {
    let key = change.key();
    match change {
        store::Event::Put(entry) if key.starts_with(keys::SPOKES) => {
            Some(standing(entry).map(Event::SpokeStands))
        }
        store::Event::Put(entry) if key.starts_with(keys::DEPLOYMENTS) => {
            Some(deployment(entry).map(Event::Deployed))
        }
        store::Event::Put(_) => None,
        store::Event::Delete { .. } => {
            let gone = keys::spoke_of(key).map(|(region, boot_id)| Event::SpokeGone { region, boot_id });
            gone.or_else(|| keys::deployment_of(key).map(Event::Undeployed)).map(Ok)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(key: &str, value: &str) -> KeyValue {
        let value = value.as_bytes().into();
        KeyValue { key: key.to_owned(), value, create_revision: 3, mod_revision: 4, lease: None }
    }

    const SPOKE: &str =
        r#"{"version":1,"region":"aws/us-east-1","endpoint":"10.0.0.7:7100","boot_id":255,"deployments":[]}"#;

    #[test]
    fn a_spoke_is_read_from_its_own_key_only() {
        let standing = |key| super::standing(&entry(key, SPOKE));
        assert_eq!(standing("spokes/aws/us-east-1/00000000000000ff").map(|standing| standing.created), Ok(3));
        let error = standing("spokes/aws/us-east-2/00000000000000ff").unwrap_err().to_string();
        assert!(
            error.contains("`spokes/aws/us-east-2/00000000000000ff`") && error.contains("us-east-1 ff"),
            "{error}"
        );
    }

    #[test]
    fn what_cannot_be_read_is_told_by_its_key() {
        let check = |change: store::Event, word: &str| {
            let error = event(&change).expect("it concerns the hub").unwrap_err().to_string();
            assert!(error.contains(change.key()) && error.contains(word), "{error}");
        };
        check(store::Event::Put(entry("spokes/aws/us-east-1/01", "{}")), "version");
        check(store::Event::Put(entry("deployments/a", r#"{"version":9}"#)), "version 9");
        assert!(epoch(&entry("meta/epoch", "one")).is_err());
        assert!(table(&entry("routes", "")).is_err());
        assert_eq!(event(&store::Event::Put(entry("meta/epoch", "1"))), None);
    }
}
