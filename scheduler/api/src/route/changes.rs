//! Route table as changes since the one that a reader has.
//!
//! ```text
//!  reader                                     hub
//!  "after": generation 4, "changes" ────────▶ has published 4, 5 and 6, and keeps what changed from each to the next
//!  applies them in order, compares ◀───────── changes from 4 to 5 and from 5 to 6, checksum of table 6
//!  the checksum; has table 6
//! ```
//!
//! A new table then costs as much as has changed, whatever is deployed. The hub computes the changes once for each table
//! that it publishes, and sends the same bytes to all readers. A reader whose generation is none of the last ones, or
//! that does not ask for changes, receives the whole table. So does a reader whose checksum differs: its next request
//! does not ask for changes. The changes are of the encoded table; the table that they result in is validated as a whole,
//! like one that was sent as a whole.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use regions::{Generation, RegionRoute, RouteTable};
use serde::de::value::MapAccessDeserializer;
use serde::de::{DeserializeSeed, IntoDeserializer, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

use super::{InstanceRouteV1, RegionRouteV1, RouteTableV1, WideningV1, instances_v1, widening_v1};
use crate::api_key::{TableKeyV1, table_keys_v1};
use crate::deployment::DeploymentV1;
use crate::revision::{ServedRevisionV1, served_v1};
use crate::tenant::TenantV1;
use crate::{MessageVersion, VERSION, WireError, json_checksum, parsed, reject_too_many, to_strings};

/// Maximum number of published tables whose changes a hub keeps and a response has: at ten tables a second, those of the
/// longest long poll.
pub const CHANGES_MAX: usize = 256;

/// Name of the member in which a response has changes.
const CHANGES: &str = "changes";

/// Response of `GET /v1/routes` to a reader that asks for changes: the table, or `{"changes": [...]}`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RoutesV1 {
    /// The whole table.
    Table(Box<RouteTableV1>),
    /// The changes from the reader's table to the newest one, in the order in which they are applied.
    Changes(Vec<TableChangesV1>),
}

/// Changes from one table to the next one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TableChangesV1 {
    /// Version of the message.
    pub version: MessageVersion,
    /// Generation of the table to which the changes are applied.
    pub base: String,
    /// Generation of the resulting table.
    pub generation: String,
    /// Checksum of the resulting table ([`checksum`]).
    pub checksum: u64,
    /// Changed and added regions.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub regions: Vec<RegionChangesV1>,
    /// Removed regions.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub removed_regions: Vec<String>,
    /// Deployments.
    #[serde(default = "none", skip_serializing_if = "ListChangesV1::is_empty")]
    pub deployments: ListChangesV1<DeploymentV1>,
    /// Announced wider residencies of deployments.
    #[serde(default = "none", skip_serializing_if = "ListChangesV1::is_empty")]
    pub widening: ListChangesV1<WideningV1>,
    /// Served model revisions.
    #[serde(default = "none", skip_serializing_if = "ListChangesV1::is_empty")]
    pub revisions: ListChangesV1<ServedRevisionV1>,
    /// Tenants.
    #[serde(default = "none", skip_serializing_if = "ListChangesV1::is_empty")]
    pub tenants: ListChangesV1<TenantV1>,
    /// Announced wider residencies of tenants.
    #[serde(default = "none", skip_serializing_if = "ListChangesV1::is_empty")]
    pub tenant_widening: ListChangesV1<WideningV1>,
    /// Keys that operators created.
    #[serde(default = "none", skip_serializing_if = "ListChangesV1::is_empty")]
    pub api_keys: ListChangesV1<TableKeyV1>,
}

/// Changes of one region. An added region has its instances and all its deployments.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RegionChangesV1 {
    /// Region, as `cloud/name`.
    pub id: String,
    /// Its spoke instances, all of them. Absent if unchanged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instances: Option<Vec<InstanceRouteV1>>,
    /// Deployments that have a ready replica now.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub added: Vec<String>,
    /// Deployments that no longer have a ready replica.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub removed: Vec<String>,
    /// Whether an operator drains the region. Absent if not.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub draining: bool,
}

/// Changes of a list whose entries have names.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListChangesV1<T> {
    /// Changed and added entries.
    #[serde(default = "Vec::new", skip_serializing_if = "Vec::is_empty")]
    pub changed: Vec<T>,
    /// Names of removed entries.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub removed: Vec<String>,
}

/// Why changes were not applied. The reader's table stays, and its next request does not ask for changes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChangesError {
    /// The changes are invalid.
    #[error(transparent)]
    Invalid(#[from] WireError),
    /// The hub sent changes of the route table, although the process requested the whole table.
    #[error("the response has changes, and a whole table was requested")]
    Unrequested,
    /// The changes of the route table do not belong to the table of this process, which requests the whole table.
    #[error("the changes are of table {base}, and this process has table {known}")]
    UnknownBase {
        /// Generation of the table that they change.
        base: Generation,
        /// Generation that the reader has.
        known: Generation,
    },
    /// The changes of the route table give another table than the hub has: the hub may have a newer version, with
    /// fields that this process does not know. The whole table is requested.
    #[error("the table after the changes of generation {generation} differs from that of the hub")]
    Checksum {
        /// Generation of the resulting table.
        generation: Generation,
    },
}

/// Entry of a list of the table.
trait Named {
    fn name(&self) -> &str;
}

macro_rules! named {
    ($($type:ident.$field:ident),+) => {
        $(impl Named for $type {
            fn name(&self) -> &str {
                &self.$field
            }
        })+
    };
}

named!(
    RegionRouteV1.id,
    DeploymentV1.name,
    WideningV1.name,
    ServedRevisionV1.name,
    TenantV1.name,
    TableKeyV1.key_sha256
);

/// Returns the changes from `base` to `table`, whose checksum is `checksum`. `None` if they cannot be expressed, because
/// only one of the tables has revisions or tenants: then readers need the whole table.
pub fn changes(base: &RouteTable, table: &RouteTable, checksum: u64) -> Option<TableChangesV1> {
    let RouteTable { generation: base_generation, regions: old, deployments, widening, revisions, tenants } =
        base;
    let is_comparable =
        revisions.is_some() == table.revisions.is_some() && tenants.is_some() == table.tenants.is_some();
    if !is_comparable {
        return None;
    }
    let regions = table.regions.iter().filter(|(id, route)| old.get(*id) != Some(*route));
    let regions = regions.map(|(id, route)| region_changes(id.to_string(), old.get(id), route)).collect();
    let (none, no_tenants) = (BTreeMap::new(), regions::Tenants::default());
    let revisions = revisions.as_ref().unwrap_or(&none);
    let revisions_now = table.revisions.as_ref().unwrap_or(&none);
    let regions::Tenants { all, widening: announced, keys } = tenants.as_ref().unwrap_or(&no_tenants);
    let now = table.tenants.as_ref().unwrap_or(&no_tenants);
    let encoded_keys = |changed: &BTreeMap<_, _>| table_keys_v1(changed);
    Some(TableChangesV1 {
        version: VERSION,
        base: base_generation.to_string(),
        generation: table.generation.to_string(),
        checksum,
        regions,
        removed_regions: removed(old, &table.regions),
        deployments: list_changes(deployments, &table.deployments, |changed| {
            changed.values().map(DeploymentV1::from).collect()
        }),
        widening: list_changes(widening, &table.widening, |changed| {
            changed.iter().map(widening_v1).collect()
        }),
        revisions: list_changes(revisions, revisions_now, served_v1),
        tenants: list_changes(all, &now.all, |changed| changed.values().map(TenantV1::from).collect()),
        tenant_widening: list_changes(announced, &now.widening, |changed| {
            changed.iter().map(widening_v1).collect()
        }),
        api_keys: list_changes(keys, &now.keys, encoded_keys),
    })
}

fn region_changes(id: String, old: Option<&RegionRoute>, route: &RegionRoute) -> RegionChangesV1 {
    let RegionRoute { instances, deployments, draining } = route;
    let none = BTreeSet::new();
    let before = old.map_or(&none, |old| &old.deployments);
    let is_same = old.is_some_and(|old| old.instances == *instances);
    RegionChangesV1 {
        id,
        instances: (!is_same).then(|| instances_v1(instances)),
        added: to_strings(deployments.difference(before)),
        removed: to_strings(before.difference(deployments)),
        draining: *draining,
    }
}

fn removed<K: Ord + ToString, V>(old: &BTreeMap<K, V>, now: &BTreeMap<K, V>) -> Vec<String> {
    to_strings(old.keys().filter(|name| !now.contains_key(*name)).map(ToString::to_string))
}

fn list_changes<K: Ord + Clone + ToString, V: PartialEq + Clone, W>(
    old: &BTreeMap<K, V>,
    now: &BTreeMap<K, V>,
    encode: impl FnOnce(&BTreeMap<K, V>) -> Vec<W>,
) -> ListChangesV1<W> {
    let changed = now.iter().filter(|(name, value)| old.get(*name) != Some(*value));
    let changed: BTreeMap<K, V> = changed.map(|(name, value)| (name.clone(), value.clone())).collect();
    ListChangesV1 { changed: encode(&changed), removed: removed(old, now) }
}

/// Applies changes in their order to the reader's table.
///
/// # Errors
///
/// When the changes are not of this table, or do not result in the table that the hub has. The result is not validated
/// otherwise.
pub fn apply(mut table: RouteTableV1, changes: Vec<TableChangesV1>) -> Result<RouteTableV1, ChangesError> {
    reject_too_many(CHANGES, changes.len(), CHANGES_MAX)?;
    let mut expected = None;
    for changes in changes {
        let TableChangesV1 {
            version: _,
            base,
            generation,
            checksum,
            regions,
            removed_regions,
            deployments,
            widening,
            revisions,
            tenants,
            tenant_widening,
            api_keys,
        } = changes;
        let base: Generation = parsed("changes.base", &base)?;
        let known = Generation { epoch: table.epoch, number: table.generation };
        if base != known {
            return Err(ChangesError::UnknownBase { base, known });
        }
        let next: Generation = parsed("changes.generation", &generation)?;
        (table.epoch, table.generation) = (next.epoch, next.number);
        apply_regions(&mut table.regions, regions, removed_regions);
        apply_list(&mut table.deployments, deployments);
        apply_list(&mut table.widening, widening);
        apply_list_if_present("changes.revisions", &mut table.revisions, revisions)?;
        apply_list_if_present("changes.tenants", &mut table.tenants, tenants)?;
        apply_list(&mut table.tenant_widening, tenant_widening);
        apply_list(&mut table.api_keys, api_keys);
        expected = Some((checksum, next));
    }
    let Some((expected, generation)) = expected else {
        return Err(WireError::new(CHANGES, "it is empty").into());
    };
    if checksum(&table) == expected { Ok(table) } else { Err(ChangesError::Checksum { generation }) }
}

fn apply_regions(regions: &mut Vec<RegionRouteV1>, changes: Vec<RegionChangesV1>, removed: Vec<String>) {
    let changed = changes.into_iter().map(|RegionChangesV1 { id, instances, added, removed, draining }| {
        let old = regions.iter_mut().find(|route| route.id == id);
        let (mut old_instances, mut deployments) = (Vec::new(), BTreeSet::new());
        let removed: BTreeSet<_> = removed.into_iter().collect();
        if let Some(old) = old {
            old_instances = std::mem::take(&mut old.instances);
            deployments.extend(std::mem::take(&mut old.deployments));
        }
        deployments.retain(|name| !removed.contains(name));
        deployments.extend(added);
        let instances = instances.unwrap_or(old_instances);
        RegionRouteV1 { id, instances, deployments: deployments.into_iter().collect(), draining }
    });
    let changed = changed.collect();
    apply_list(regions, ListChangesV1 { changed, removed });
}

/// Replaces and removes entries of a list, which is ordered by name like that of the hub.
fn apply_list<T: Named>(list: &mut Vec<T>, ListChangesV1 { changed, removed }: ListChangesV1<T>) {
    if changed.is_empty() && removed.is_empty() {
        return;
    }
    {
        let names = changed.iter().map(Named::name).chain(removed.iter().map(String::as_str));
        let replaced: BTreeSet<&str> = names.collect();
        list.retain(|entry| !replaced.contains(entry.name()));
    }
    list.extend(changed);
    list.sort_by(|one, other| one.name().cmp(other.name()));
}

fn apply_list_if_present<T: Named>(
    field: &str,
    list: &mut Option<Vec<T>>,
    changes: ListChangesV1<T>,
) -> Result<(), WireError> {
    match list {
        Some(list) => apply_list(list, changes),
        None if changes.is_empty() => {}
        None => return Err(WireError::new(field, "the table that it changes has no such list")),
    }
    Ok(())
}

/// Checksum of an encoded table: FNV-1a of its JSON. It detects defects and other versions of the message, not forgery:
/// the connection authenticates the hub.
pub fn checksum(table: &RouteTableV1) -> u64 {
    json_checksum(table)
}

/// Encodes the response that has these changes, each of which is an encoded [`TableChangesV1`].
pub fn changes_response<'a>(changes: impl IntoIterator<Item = &'a [u8]>) -> Vec<u8> {
    let mut response = format!("{{\"{CHANGES}\":[").into_bytes();
    for (index, encoded) in changes.into_iter().enumerate() {
        response.extend_from_slice(if index > 0 { b"," } else { b"" });
        response.extend_from_slice(encoded);
    }
    response.extend_from_slice(b"]}");
    response
}

impl<T> ListChangesV1<T> {
    fn is_empty(&self) -> bool {
        self.changed.is_empty() && self.removed.is_empty()
    }
}

fn none<T>() -> ListChangesV1<T> {
    ListChangesV1 { changed: Vec::new(), removed: Vec::new() }
}

/// A table has no member `changes`, and a response with changes has no other one. So the first name decides, and a table
/// is read without a copy.
impl<'de> Deserialize<'de> for RoutesV1 {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<RoutesV1, D::Error> {
        struct Routes;
        impl<'de> Visitor<'de> for Routes {
            type Value = RoutesV1;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "a route table, or its changes")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<RoutesV1, A::Error> {
                let first: Option<String> = members.next_key()?;
                if first.as_deref() == Some(CHANGES) {
                    return members.next_value().map(RoutesV1::Changes);
                }
                let members = WithFirst { first, members };
                RouteTableV1::deserialize(MapAccessDeserializer::new(members))
                    .map(Box::new)
                    .map(RoutesV1::Table)
            }
        }
        from.deserialize_map(Routes)
    }
}

/// Members of an object, of which the first name has been read.
struct WithFirst<A> {
    first: Option<String>,
    members: A,
}

impl<'de, A: MapAccess<'de>> MapAccess<'de> for WithFirst<A> {
    type Error = A::Error;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, A::Error> {
        match self.first.take() {
            Some(first) => seed.deserialize(first.into_deserializer()).map(Some),
            None => self.members.next_key_seed(seed),
        }
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, A::Error> {
        self.members.next_value_seed(seed)
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{table, table_after};
    use super::*;
    use proptest::prelude::*;

    /// Sends changes through JSON.
    fn sent(all: &[TableChangesV1]) -> RoutesV1 {
        let encoded: Vec<_> = all.iter().map(|changes| serde_json::to_vec(changes).unwrap()).collect();
        serde_json::from_slice(&changes_response(encoded.iter().map(Vec::as_slice))).unwrap()
    }

    fn between(base: &RouteTable, table: &RouteTable) -> Option<TableChangesV1> {
        changes(base, table, checksum(&RouteTableV1::from(table)))
    }

    fn applied(base: &RouteTable, all: Vec<TableChangesV1>) -> Result<RouteTable, ChangesError> {
        Ok(RouteTable::try_from(apply(RouteTableV1::from(base), all)?)?)
    }

    fn at(table: RouteTable, number: u64) -> RouteTable {
        RouteTable { generation: Generation { epoch: 1, number }, ..table }
    }

    proptest! {
        /// The second and third table have some entries of the first, some that differ, and some of their own.
        #[test]
        fn changes_of_any_tables_result_in_the_table_of_the_hub_and_apply_to_no_other(
            (first, second, third) in table().prop_flat_map(|first| {
                let second = table_after(first.clone());
                (Just(first), second).prop_flat_map(|(first, second)| {
                    (Just(first), Just(second.clone()), table_after(second))
                })
            }),
        ) {
            let (first, second, third) = (at(first, 4), at(second, 5), at(third, 7));
            let steps = [between(&first, &second), between(&second, &third)];
            let is_comparable = |one: &RouteTable, other: &RouteTable| {
                one.revisions.is_some() == other.revisions.is_some() && one.tenants.is_some() == other.tenants.is_some()
            };
            prop_assert_eq!(steps[0].is_some(), is_comparable(&first, &second));
            prop_assert_eq!(steps[1].is_some(), is_comparable(&second, &third));
            let steps: Vec<_> = steps.into_iter().flatten().collect();
            prop_assume!(steps.len() == 2);
            let RoutesV1::Changes(steps) = sent(&steps) else { panic!("a response with changes") };
            prop_assert_eq!(applied(&first, steps[..1].to_vec()), Ok(second.clone()));
            prop_assert_eq!(applied(&second, steps[1..].to_vec()), Ok(third.clone()));
            prop_assert_eq!(applied(&first, steps.clone()), Ok(third.clone()));
            let unknown = |base: &RouteTable, known: &RouteTable| {
                Err(ChangesError::UnknownBase { base: base.generation, known: known.generation })
            };
            prop_assert_eq!(applied(&second, steps.clone()), unknown(&first, &second));
            prop_assert_eq!(applied(&first, steps[1..].to_vec()), unknown(&second, &first));
            // A table of the same generation with another content.
            let mut other = first.clone();
            other.regions.insert("other/region".parse().unwrap(), RegionRoute {
                instances: [("a".parse().unwrap(), "10.0.0.1:1".parse().unwrap())].into(),
                deployments: BTreeSet::new(),
                draining: false,
            });
            let differs = Err(ChangesError::Checksum { generation: second.generation });
            prop_assert_eq!(applied(&other, steps[..1].to_vec()), differs);
        }

        #[test]
        fn a_table_in_a_response_is_read_like_a_table_alone(table in table()) {
            let wire = RouteTableV1::from(&table);
            let read: RoutesV1 = serde_json::from_slice(&serde_json::to_vec(&wire).unwrap()).unwrap();
            prop_assert_eq!(read, RoutesV1::Table(Box::new(wire)));
        }
    }

    fn one_region(number: u64, deployments: &[&str]) -> RouteTable {
        let route = RegionRoute {
            instances: [("a".parse().unwrap(), "10.0.0.1:1".parse().unwrap())].into(),
            deployments: deployments.iter().map(|name| name.parse().unwrap()).collect(),
            draining: false,
        };
        let regions = [("aws/us-east-1".parse().unwrap(), route)].into();
        at(RouteTable { regions, ..RouteTable::empty() }, number)
    }

    #[test]
    fn changes_name_only_the_deployments_that_have_become_ready_or_are_ready_no_longer() {
        let (first, second) = (one_region(1, &["a", "b", "c"]), one_region(2, &["b", "c", "d"]));
        let step = between(&first, &second).unwrap();
        let mut text = serde_json::to_value(&step).unwrap();
        text["checksum"] = 0.into();
        let regions = serde_json::json!([{"id": "aws/us-east-1", "added": ["d"], "removed": ["a"]}]);
        let expected = serde_json::json!(
            {"version": 1, "base": "1.1", "generation": "1.2", "checksum": 0, "regions": regions});
        assert_eq!(text, expected);
    }

    #[test]
    fn wrong_changes_are_rejected() {
        let (first, second) = (one_region(1, &["a"]), one_region(2, &["b"]));
        let step = between(&first, &second).unwrap();
        let rejected = |change: &dyn Fn(&mut TableChangesV1)| {
            let mut step = step.clone();
            change(&mut step);
            applied(&first, vec![step]).unwrap_err()
        };
        let field = |error| match error {
            ChangesError::Invalid(error) => error.field,
            other => other.to_string(),
        };
        assert_eq!(field(rejected(&|step| step.base = "1".to_owned())), "changes.base");
        assert_eq!(field(rejected(&|step| step.generation = "x".to_owned())), "changes.generation");
        let revision = ServedRevisionV1 { name: "b".to_owned(), current: "00".to_owned(), next: None };
        let named = rejected(&|step| step.revisions.changed = vec![revision.clone()]);
        assert_eq!(field(named), "changes.revisions");
        let generation = second.generation;
        assert_eq!(rejected(&|step| step.checksum ^= 1), ChangesError::Checksum { generation });
        let more = rejected(&|step| step.regions[0].added.push("c".to_owned()));
        assert_eq!(more, ChangesError::Checksum { generation });
        let too_many = applied(&first, vec![step.clone(); CHANGES_MAX + 1]);
        assert_eq!(field(too_many.unwrap_err()), "changes");
        assert_eq!(field(applied(&first, Vec::new()).unwrap_err()), "changes");
    }

    #[test]
    fn the_maximum_number_of_changes_is_applied() {
        let names = ["a", "b"];
        let tables: Vec<_> =
            (0..=CHANGES_MAX).map(|number| one_region(number as u64, &names[number % 2..][..1])).collect();
        let steps: Vec<_> = tables.windows(2).map(|pair| between(&pair[0], &pair[1]).unwrap()).collect();
        assert_eq!(steps.len(), CHANGES_MAX);
        assert_eq!(applied(&tables[0], steps).as_ref(), Ok(&tables[CHANGES_MAX]));
    }

    #[test]
    fn a_response_of_another_version_is_rejected_for_its_version() {
        for text in [r#"{"version":2}"#, r#"{"changes":[{"version":2}]}"#] {
            let error = serde_json::from_str::<RoutesV1>(text).unwrap_err();
            assert!(error.to_string().starts_with("version 2 is not supported"), "{error}");
        }
        let error = serde_json::from_str::<RoutesV1>("{}").unwrap_err();
        assert!(error.to_string().contains("missing field `version`"), "{error}");
    }
}
