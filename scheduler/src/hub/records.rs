//! Encoding and decoding of the records in the store.
//!
//! The route table grows with regions and deployments, and etcd accepts no request of more than 1.5 MiB. 64 regions
//! with a thousand ready deployments each exceed that as JSON, which repeats the same thousand names 64 times. So a
//! long table is compressed, rather than split into parts that a reader would have to assemble; a test below prints
//! both sizes. The desired deployments are one record for the same reason, and are compressed too.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::io::{Read, Write};

use flate2::Compression;
use flate2::read::ZlibDecoder;
use flate2::write::ZlibEncoder;
use regions::tenant::{ApiKey, KeyDigest};
use regions::{Generation, RegionId, RouteTable, TenantId, TenantRules};
use scheduler_api::api_key::{CreatedKeys, CreatedKeysV1};
use scheduler_api::apply::ReaderV1;
use scheduler_api::deployment::DeploymentsV1;
use scheduler_api::deployment::DesiredDeployments;
use scheduler_api::error::HubErrorCode;
use scheduler_api::pki::{CertificateV1, TokenRecordV1, TrustV1};
use scheduler_api::placements::{PlacementsRecord, PlacementsV1};
use scheduler_api::plan::{
    DemandV1, DrainV1, GatewayBoot, GatewayDemand, GatewayWeights, RegionFloors, RegionFloorsV1,
    TenantDemand, TenantDemandV1, TenantShares, TenantSharesV1, WeightsV1,
};
use scheduler_api::reader::Reader;
use scheduler_api::registration::RegisterV1;
use scheduler_api::registration::Registration;
use scheduler_api::route::RouteTableV1;
use scheduler_api::store_format::StoreFormat;
use scheduler_api::tenant::TenantsV1;
use scheduler_api::usage::{UsageOfDay, UsageV1};
use scheduler_api::{WireError, keys};
use scheduler_core::hub::Event;
use scheduler_core::hub::planning::PlanPart;
use scheduler_core::pki::rotation::CertificateRecord;
use scheduler_core::pki::token::TokenRecord;
use scheduler_core::pki::trust::TrustState;
use scheduler_core::registry::RegisteredSpoke;
use scheduler_store::{self as store, KeyValue};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::respond::ErrorResponse;

/// Unreadable value of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordError {
    key: String,
    problem: String,
}

impl fmt::Display for RecordError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "record `{}` in the store is unreadable: {}", self.key, self.problem)
    }
}

impl std::error::Error for RecordError {}

impl From<RecordError> for ErrorResponse {
    fn from(error: RecordError) -> ErrorResponse {
        ErrorResponse::new(HubErrorCode::StoreUnavailable, error.to_string())
    }
}

/// Serialises a value.
pub(super) fn bytes(wire: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(wire).expect("numbers, texts and lists serialise to JSON")
}

/// Size from which a record is compressed; smaller ones stay readable in the store.
const COMPRESSION_THRESHOLD: usize = 16 << 10;
/// Maximum size of a decompressed record: six times the largest table in the routing benchmarks.
const TABLE_BYTES_MAX: usize = 16 << 20;

/// Serialises a record, and compresses it if it is long.
pub(super) fn packed(wire: &impl Serialize) -> Vec<u8> {
    let plain = bytes(wire);
    if plain.len() < COMPRESSION_THRESHOLD {
        return plain;
    }
    let mut encoder = ZlibEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(&plain).and_then(|()| encoder.finish()).expect("a Vec takes every write")
}

/// Decompresses a record if it is compressed: JSON begins with a brace, zlib does not.
fn unpacked(entry: &KeyValue) -> Result<Cow<'_, [u8]>, RecordError> {
    if entry.value.first() == Some(&b'{') {
        return Ok(Cow::Borrowed(&entry.value));
    }
    let mut plain = Vec::new();
    let read = ZlibDecoder::new(&*entry.value).take(TABLE_BYTES_MAX as u64 + 1).read_to_end(&mut plain);
    read.map_err(|error| unreadable(entry, error))?;
    if plain.len() > TABLE_BYTES_MAX {
        return Err(unreadable(entry, format!("more than {TABLE_BYTES_MAX} bytes")));
    }
    Ok(Cow::Owned(plain))
}

fn read<Wire: DeserializeOwned, T: TryFrom<Wire, Error = WireError>>(
    entry: &KeyValue,
) -> Result<T, RecordError> {
    parse::<Wire, T>(entry, &unpacked(entry)?)
}

fn parse<Wire: DeserializeOwned, T: TryFrom<Wire, Error = WireError>>(
    entry: &KeyValue,
    bytes: &[u8],
) -> Result<T, RecordError> {
    let wire: Wire = serde_json::from_slice(bytes).map_err(|error| unreadable(entry, error))?;
    T::try_from(wire).map_err(|error| unreadable(entry, error))
}

fn unreadable(entry: &KeyValue, problem: impl ToString) -> RecordError {
    RecordError { key: entry.key.clone(), problem: problem.to_string() }
}

/// Parses the trusted state.
pub(super) fn trust(entry: &KeyValue) -> Result<TrustState, RecordError> {
    read::<TrustV1, _>(entry)
}

/// Parses a join token.
pub(super) fn join_token(entry: &KeyValue) -> Result<TokenRecord, RecordError> {
    read::<TokenRecordV1, _>(entry)
}

/// Parses an issued certificate.
pub(super) fn certificate(entry: &KeyValue) -> Result<CertificateRecord, RecordError> {
    read::<CertificateV1, _>(entry)
}

/// Parses the spoke of an entry under `spokes/`.
pub(super) fn spoke(entry: &KeyValue) -> Result<RegisteredSpoke, RecordError> {
    let registration = read::<RegisterV1, Registration>(entry)?;
    if entry.key != keys::spoke(&registration.region, registration.boot_id) {
        return Err(unreadable(
            entry,
            format!("the value belongs to {} {:x}", registration.region, registration.boot_id),
        ));
    }
    Ok(RegisteredSpoke { registration, created: entry.create_revision })
}

/// Parses the deployments of the entry `desired/deployments`.
pub(super) fn wanted(entry: &KeyValue) -> Result<DesiredDeployments, RecordError> {
    parse::<DeploymentsV1, DesiredDeployments>(entry, &unpacked(entry)?)
}

/// Parses the tenants of the entry `desired/tenants`.
pub(super) fn tenants(entry: &KeyValue) -> Result<BTreeMap<TenantId, TenantRules>, RecordError> {
    read::<TenantsV1, BTreeMap<TenantId, TenantRules>>(entry)
}

/// Parses the API keys of the entry `desired/keys`.
pub(super) fn created_keys(entry: &KeyValue) -> Result<CreatedKeys, RecordError> {
    read::<CreatedKeysV1, CreatedKeys>(entry)
}

/// Parses the API keys of the entry `desired/keys`, as gateways need them.
pub(super) fn api_keys(entry: &KeyValue) -> Result<BTreeMap<KeyDigest, ApiKey>, RecordError> {
    let keys = created_keys(entry)?;
    Ok(keys.into_iter().map(|(digest, created)| (digest, created.key)).collect())
}

/// Parses the reader of an entry under `readers/`, and the generation of its table.
pub(super) fn reader(entry: &KeyValue) -> Result<(Reader, Generation), RecordError> {
    let wire: ReaderV1 = serde_json::from_slice(&entry.value).map_err(|error| unreadable(entry, error))?;
    let ReaderV1 { version: _, reader, generation } = wire;
    let reader: Reader = reader.parse().map_err(|error| unreadable(entry, error))?;
    if entry.key != keys::reader(&reader) {
        return Err(unreadable(entry, format!("the value belongs to {reader}")));
    }
    Ok((reader, generation.parse().map_err(|error| unreadable(entry, error))?))
}

/// Parses the table of the entry `routes`.
pub(super) fn table(entry: &KeyValue) -> Result<RouteTable, RecordError> {
    read::<RouteTableV1, RouteTable>(entry)
}

/// Parses the decisions of the entry `placements`.
pub(super) fn placements(entry: &KeyValue) -> Result<PlacementsRecord, RecordError> {
    read::<PlacementsV1, PlacementsRecord>(entry)
}

/// Parses a gateway's demand of an entry under `demand/`.
pub(super) fn demand(entry: &KeyValue) -> Result<GatewayDemand, RecordError> {
    let demand = read::<DemandV1, GatewayDemand>(entry)?;
    let GatewayBoot { region, boot_id } = &demand.gateway;
    if entry.key != keys::demand(region, *boot_id) {
        return Err(unreadable(entry, format!("the value belongs to {region} {boot_id:x}")));
    }
    Ok(demand)
}

/// Parses the demand of tenants of an entry under `tenant-demand/`.
pub(super) fn tenant_demand(entry: &KeyValue) -> Result<TenantDemand, RecordError> {
    let demand = read::<TenantDemandV1, TenantDemand>(entry)?;
    if entry.key != keys::tenant_demand(&demand.gateway) {
        let problem = format!("the value belongs to {}", keys::tenant_demand(&demand.gateway));
        return Err(unreadable(entry, problem));
    }
    Ok(demand)
}

/// Parses one day of a ledger of an entry under `usage/`.
pub(super) fn usage(entry: &KeyValue) -> Result<UsageOfDay, RecordError> {
    let usage = read::<UsageV1, UsageOfDay>(entry)?;
    let key = keys::usage(usage.day, &usage.gateway, usage.ledger);
    if entry.key == key { Ok(usage) } else { Err(unreadable(entry, format!("the value belongs to {key}"))) }
}

/// Parses the region of an entry under `drains/`.
pub(super) fn drain(entry: &KeyValue) -> Result<RegionId, RecordError> {
    let region = read::<DrainV1, RegionId>(entry)?;
    if entry.key != keys::drain(&region) {
        return Err(unreadable(entry, format!("the value belongs to {region}")));
    }
    Ok(region)
}

/// Parses the part of the plan of an entry under `plan/`.
pub(super) fn part(entry: &KeyValue) -> Result<PlanPart, RecordError> {
    let part = if entry.key.starts_with(keys::WEIGHTS) {
        read::<WeightsV1, GatewayWeights>(entry).map(PlanPart::Weights)
    } else if entry.key.starts_with(keys::SHARES) {
        read::<TenantSharesV1, TenantShares>(entry).map(PlanPart::Shares)
    } else {
        read::<RegionFloorsV1, RegionFloors>(entry).map(PlanPart::Floors)
    }?;
    if entry.key != key_of(&part) {
        return Err(unreadable(entry, format!("the value belongs to {}", key_of(&part))));
    }
    Ok(part)
}

/// Returns the key of a part of the plan.
pub(super) fn key_of(part: &PlanPart) -> String {
    match part {
        PlanPart::Weights(weights) => keys::weights(&weights.gateway),
        PlanPart::Floors(floors) => keys::floors(&floors.region),
        PlanPart::Shares(shares) => keys::shares(&shares.gateway),
    }
}

/// Serialises a part of the plan, and compresses it if it is long.
pub(super) fn packed_part(part: &PlanPart) -> Vec<u8> {
    match part {
        PlanPart::Weights(weights) => packed(&WeightsV1::from(weights)),
        PlanPart::Floors(floors) => packed(&RegionFloorsV1::from(floors)),
        PlanPart::Shares(shares) => packed(&TenantSharesV1::from(shares)),
    }
}

/// Parses the format of the entry `meta/format`.
pub(super) fn format(entry: &KeyValue) -> Result<StoreFormat, RecordError> {
    serde_json::from_slice(&entry.value).map_err(|error| unreadable(entry, error))
}

/// Parses the epoch of the entry `meta/epoch`.
pub(super) fn epoch(entry: &KeyValue) -> Result<u64, RecordError> {
    let text = std::str::from_utf8(&entry.value).map_err(|error| unreadable(entry, error))?;
    text.parse().map_err(|error| unreadable(entry, error))
}

/// Converts a change of the store to an event of the hub; `None` for keys that do not concern it.
pub(super) fn event(change: &store::Event) -> Option<Result<Event, RecordError>> {
    let key = change.key();
    match change {
        store::Event::Put(entry) if key.starts_with(keys::SPOKES) => {
            Some(spoke(entry).map(Event::SpokeRegistered))
        }
        store::Event::Put(entry) if key.starts_with(keys::READERS) => {
            Some(reader(entry).map(|(reader, generation)| Event::Acknowledged(reader, generation)))
        }
        store::Event::Put(entry) if key == keys::DEPLOYMENTS => {
            Some(wanted(entry).map(Event::DeploymentsChanged))
        }
        store::Event::Put(entry) if key == keys::TENANTS => Some(tenants(entry).map(Event::TenantsChanged)),
        store::Event::Put(entry) if key == keys::CREATED_KEYS => {
            Some(api_keys(entry).map(Event::ApiKeysChanged))
        }
        store::Event::Put(entry) if key.starts_with(keys::DEMAND) => {
            Some(demand(entry).map(Event::DemandReported))
        }
        store::Event::Put(entry) if key.starts_with(keys::TENANT_DEMAND) => {
            Some(tenant_demand(entry).map(Event::TenantDemandReported))
        }
        store::Event::Put(entry) if key.starts_with(keys::DRAINS) => {
            Some(drain(entry).map(Event::DrainStarted))
        }
        store::Event::Put(_) => None,
        // A deleted record of deployments or tenants changes nothing; only an empty record removes them.
        store::Event::Delete { .. } => deleted(key).map(Ok),
    }
}

/// Converts the deletion of a key to an event.
fn deleted(key: &str) -> Option<Event> {
    let spoke = || keys::spoke_of(key).map(|(region, boot_id)| Event::SpokeRemoved { region, boot_id });
    let gateway = || keys::demand_of(key).map(|(region, boot_id)| GatewayBoot { region, boot_id });
    spoke()
        .or_else(|| gateway().map(Event::GatewayExpired))
        .or_else(|| keys::tenant_demand_of(key).map(Event::TenantDemandExpired))
        .or_else(|| keys::drain_of(key).map(Event::DrainCancelled))
        .or_else(|| keys::reader_of(key).map(Event::ReaderExpired))
}

#[cfg(test)]
mod tests {
    use super::*;
    use scheduler_api::deployment::Promotions;
    use sha2::{Digest, Sha256};

    fn entry(key: &str, value: &str) -> KeyValue {
        let value = value.as_bytes().into();
        KeyValue { key: key.to_owned(), value, create_revision: 3, mod_revision: 4, lease: None }
    }

    const SPOKE: &str = r#"{"version":1,"region":"aws/us-east-1","instance":"a","endpoint":"10.0.0.7:7100","boot_id":255,"deployments":[]}"#;

    #[test]
    fn a_spoke_is_read_from_its_own_key_only() {
        let standing = |key| super::spoke(&entry(key, SPOKE));
        assert_eq!(standing("spokes/aws/us-east-1/00000000000000ff").map(|standing| standing.created), Ok(3));
        let error = standing("spokes/aws/us-east-2/00000000000000ff").unwrap_err().to_string();
        assert!(
            error.contains("`spokes/aws/us-east-2/00000000000000ff`") && error.contains("us-east-1 ff"),
            "{error}"
        );
    }

    #[test]
    fn unreadable_records_are_reported_by_key() {
        let check = |change: store::Event, word: &str| {
            let error = event(&change).expect("it concerns the hub").unwrap_err().to_string();
            assert!(error.contains(change.key()) && error.contains(word), "{error}");
        };
        check(store::Event::Put(entry("spokes/aws/us-east-1/01", "{}")), "version");
        check(store::Event::Put(entry("desired/deployments", r#"{"version":9}"#)), "version 9");
        check(store::Event::Put(entry("desired/deployments", "")), "desired/deployments");
        check(store::Event::Put(entry("readers/gateway/aws/us-east-1/00000000000000ff", "{}")), "version");
        assert!(epoch(&entry("meta/epoch", "one")).is_err());
        assert!(table(&entry("routes", "")).is_err());
        assert_eq!(event(&store::Event::Put(entry("meta/epoch", "1"))), None);
    }

    /// Table with the number of regions and deployments of the routing benchmarks.
    fn large_table() -> RouteTable {
        use regions::{
            Deployment, EngineKind, EngineSpec, Precision, RegionRoute, ResidencyPolicy, Scaling, Task,
        };
        let names: Vec<regions::DeploymentName> = (0..1000)
            .map(|n: u64| format!("tenant-{:x}.embed-{n:04}", n.wrapping_mul(2_654_435_761)).parse().unwrap())
            .collect();
        let route = |at: u8| RegionRoute {
            instances: [("spoke-a".parse().unwrap(), ([10, 0, 0, at], 7100).into())].into(),
            deployments: names.iter().cloned().collect(),
            draining: false,
        };
        let deployment = |name: &regions::DeploymentName| Deployment {
            name: name.clone(),
            task: Task::Embed,
            model: format!("hf://models/{name}"),
            engine: EngineSpec { kind: EngineKind::Cpu, precision: Precision::F32 },
            residency: ResidencyPolicy::Anywhere,
            regions: Vec::new(),
            order: Vec::new(),
            placement: None,
            scaling: Scaling::default(),
        };
        RouteTable {
            regions: (1..=64).map(|at| (format!("aws/region-{at}").parse().unwrap(), route(at))).collect(),
            deployments: names.iter().map(|name| (name.clone(), deployment(name))).collect(),
            ..RouteTable::empty()
        }
    }

    #[test]
    fn the_table_of_64_regions_and_a_thousand_deployments_fits_into_a_transaction() {
        let large = large_table();
        let plain = bytes(&RouteTableV1::from(&large)).len();
        let packed = packed(&RouteTableV1::from(&large));
        println!("64 regions x 1000 deployments: {plain} bytes as JSON, {} in the store", packed.len());
        assert!(plain > store::model::TXN_BYTES_MAX, "it has to be compressed: {plain}");
        assert!(packed.len() + keys::ROUTES.len() <= store::model::TXN_BYTES_MAX, "{}", packed.len());
        let entry = KeyValue { value: packed.into(), ..entry("routes", "") };
        assert_eq!(table(&entry), Ok(large));
    }

    #[test]
    fn the_maximum_of_deployments_fits_into_a_transaction() {
        let one = large_table().deployments.into_values().next().unwrap();
        let name =
            |n: u64| format!("tenant-{:x}.embed-{n:05}", n.wrapping_mul(2_654_435_761)).parse().unwrap();
        let most = 0..regions::deployment::MAX_DEPLOYMENTS as u64;
        let deployment = |n| (name(n), regions::Deployment { name: name(n), ..one.clone() });
        let all = DesiredDeployments {
            applied: true,
            deployments: most.map(deployment).collect(),
            promotions: Promotions::default(),
        };
        let packed = packed(&DeploymentsV1::from(&all));
        println!("10000 deployments: {} bytes in the store", packed.len());
        assert!(packed.len() + keys::DEPLOYMENTS.len() <= store::model::TXN_BYTES_MAX, "{}", packed.len());
        let read = wanted(&KeyValue { value: packed.into(), ..entry(keys::DEPLOYMENTS, "") });
        assert_eq!(read, Ok(all));
    }

    #[test]
    fn the_placements_of_the_maximum_of_deployments_fit_into_a_transaction() {
        use scheduler_api::placements::DecidedPlacement;
        // 16 of 64 regions each, which differ from deployment to deployment.
        let decision = |n: u64| {
            let mix = |region: u64| (n * 64 + region).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
            let mut regions: Vec<u64> = (1..=64).collect();
            regions.sort_by_key(|region| mix(*region));
            regions.truncate(16);
            regions.sort_unstable();
            let regions = regions.iter().map(|at| format!("aws/region-{at}").parse().unwrap()).collect();
            let cost =
                format!("max_cost: the cheapest feasible set costs {n}.5 per hour; the placement permits 7");
            let name = format!("tenant-{:x}.embed-{n:05}", n.wrapping_mul(2_654_435_761)).parse().unwrap();
            (name, DecidedPlacement { regions, infeasible: n.is_multiple_of(2).then_some(cost) })
        };
        let decided = (0..regions::deployment::MAX_DEPLOYMENTS as u64).map(decision).collect();
        let record = PlacementsRecord { term: u64::MAX, revision: u64::MAX, decided };
        let packed = packed(&PlacementsV1::from(&record));
        println!("10000 placements: {} bytes in the store", packed.len());
        assert!(packed.len() + keys::PLACEMENTS.len() <= store::model::TXN_BYTES_MAX, "{}", packed.len());
        let read = placements(&KeyValue { value: packed.into(), ..entry(keys::PLACEMENTS, "") });
        assert_eq!(read, Ok(record));
    }

    #[test]
    fn the_maximum_of_tenants_fits_with_the_routes_of_a_large_fleet() {
        use regions::tenant::{KeyDigest, MAX_TENANTS, TenantLimits};
        let digest =
            |n: usize, key: u8| KeyDigest(Sha256::digest([n.to_string().as_bytes(), &[key]].concat()).into());
        let tenant = |n: usize| TenantRules {
            id: format!("tenant-{n}").parse().unwrap(),
            keys: [digest(n, 0), digest(n, 1)].into(),
            issuer: None,
            deployments: None,
            residency: "eu".parse().unwrap(),
            priority: None,
            weight: 1,
            limits: TenantLimits::default(),
        };
        let all: BTreeMap<_, _> =
            (0..MAX_TENANTS).map(tenant).map(|tenant| (tenant.id.clone(), tenant)).collect();
        let alone = packed(&TenantsV1::from(&all));
        let read = tenants(&KeyValue { value: alone.clone().into(), ..entry(keys::TENANTS, "") });
        assert_eq!(read.as_ref(), Ok(&all));
        let tenants = Some(regions::Tenants { all, ..regions::Tenants::default() });
        let table = packed(&RouteTableV1::from(&RouteTable { tenants, ..large_table() }));
        println!(
            "{MAX_TENANTS} tenants of two keys: {} bytes in the store, {} with a large table",
            alone.len(),
            table.len()
        );
        assert!(table.len() + keys::ROUTES.len() <= store::model::TXN_BYTES_MAX, "{}", table.len());
    }

    #[test]
    fn incorrectly_compressed_or_too_large_tables_are_rejected() {
        let refused =
            |value: Vec<u8>| table(&KeyValue { value: value.into(), ..entry("routes", "") }).unwrap_err();
        let mut torn = packed(&RouteTableV1::from(&large_table()));
        torn.truncate(torn.len() / 2);
        assert!(refused(torn).to_string().contains("`routes`"));
        let pack = |len: usize| {
            let mut encoder = ZlibEncoder::new(Vec::new(), Compression::fast());
            encoder.write_all(&vec![b' '; len]).unwrap();
            encoder.finish().unwrap()
        };
        assert!(refused(pack(TABLE_BYTES_MAX)).to_string().contains("EOF"), "decompressed, but empty");
        assert!(refused(pack(TABLE_BYTES_MAX + 1)).to_string().contains("16777216"));
    }
}
