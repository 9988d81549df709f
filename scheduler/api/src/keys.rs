//! Keys of the hub's store.
//!
//! ```text
//! meta/epoch                    decimal digits       raised when the store is replaced or restored
//! meta/format                   StoreFormat          format of the records below, and the version that wrote it
//! desired/deployments           DeploymentsV1        desired deployments, compressed if large
//! desired/tenants               TenantsV1            desired tenants, if any were applied
//! desired/keys                  CreatedKeysV1        created API keys, compressed if large
//! spokes/{region}/{boot id}     RegisterV1           registration, under the spoke's lease
//! instances/{region}/{name}     boot id              spoke with this instance name, under its lease
//! leases/{region}/{boot id}     32 hex digits        identifier of the spoke's lease, under that lease
//! scalers/{region}              boot id              spoke that holds the scaler lease, under the spoke's lease
//! readers/{reader}              ReaderV1             table that a gateway or a spoke runs, under a lease of its own
//! routes                        RouteTableV1         last published table, compressed if large
//! demand/{region}/{boot id}     DemandV1             demand of a gateway, under a lease of its own
//! tenant-demand/{region}/{id}   TenantDemandV1       demand of tenants at a gateway, under a lease of its own
//! usage/{day}/{region}/{id}     UsageV1              one day of a gateway's ledger of usage, compressed if large
//! drains/{region}               DrainV1              region that an operator drains
//! placements                    PlacementsV1         regions that the leader has chosen, compressed if large
//! plan/weights/{region}         WeightsV1            rows of the gateways in a region, compressed if large
//! plan/floors/{region}          RegionFloorsV1       minimum numbers of replicas of a region
//! plan/shares/{region}/{id}     TenantSharesV1       a gateway's shares of the tenants' limits, compressed if large
//! pki/trust                     TrustV1              trusted authorities and revoked certificates
//! pki/tokens/{hash}             TokenRecordV1        join token, by the SHA-256 of its secret
//! pki/certificates/{serial}     CertificateV1        issued certificate
//! leader                        a hub's address      hub that writes `routes`, under its lease
//! ```
//!
//! All deployments have one key, because they are applied as a whole and one key changes atomically in every store. A
//! transaction of etcd is limited to 128 operations.

use regions::{InstanceName, RegionId};

use crate::lease::LeaseHolder;
use crate::plan::GatewayInstance;
use crate::reader::Reader;
use crate::usage::UsageDay;

/// Epoch of the store, raised when the store is replaced or restored.
pub const EPOCH: &str = "meta/epoch";
/// Format of the store.
pub const FORMAT: &str = "meta/format";
/// Desired deployments.
pub const DEPLOYMENTS: &str = "desired/deployments";
/// Desired tenants.
pub const TENANTS: &str = "desired/tenants";
/// Created API keys.
pub const CREATED_KEYS: &str = "desired/keys";
/// Prefix of the readers.
pub const READERS: &str = "readers/";
/// Prefix of the spokes.
pub const SPOKES: &str = "spokes/";
/// Prefix of the spokes' instance names.
const INSTANCES: &str = "instances/";
/// Prefix of the identifiers of spokes' leases.
const LEASES: &str = "leases/";
/// Prefix of the scaler leases.
const SCALERS: &str = "scalers/";
/// Last published route table.
pub const ROUTES: &str = "routes";

/// Prefix of the gateways' demand reports.
pub const DEMAND: &str = "demand/";
/// Prefix of the demand of tenants at the gateways.
pub const TENANT_DEMAND: &str = "tenant-demand/";
/// Prefix of the usage of tenants. All other keys are before it, so the leader reads and watches what is before it, at one
/// revision: the usage of a year does not fit into a response of the store.
pub const USAGE: &str = "usage/";
/// First key after the usage of tenants.
pub const USAGE_END: &str = "usage0";
/// Prefix of the drains.
pub const DRAINS: &str = "drains/";
/// Regions that the leader has chosen for deployments that state a placement.
pub const PLACEMENTS: &str = "placements";
/// Prefix of the plan. Each part has its own key, so that no value grows with the whole fleet and unchanged parts are
/// not written.
pub const PLAN: &str = "plan/";
/// Prefix of the plan's rows.
pub const WEIGHTS: &str = "plan/weights/";
/// Prefix of the plan's floors.
pub const FLOORS: &str = "plan/floors/";
/// Prefix of the gateways' shares of the tenants' limits.
pub const SHARES: &str = "plan/shares/";

/// Trusted authorities and revoked certificates.
pub const TRUST: &str = "pki/trust";
/// Prefix of the join tokens.
pub const JOIN_TOKENS: &str = "pki/tokens/";
/// Prefix of the issued certificates.
pub const CERTIFICATES: &str = "pki/certificates/";

/// Address of the leading hub.
pub const LEADER: &str = "leader";

/// Returns the key of a reader.
pub fn reader(reader: &Reader) -> String {
    format!("{READERS}{reader}")
}

/// Returns the key of a spoke. Each instance of a spoke has its own key, so that an old instance that still drains and
/// its successor do not overwrite each other.
pub fn spoke(region: &RegionId, boot_id: u64) -> String {
    format!("{}{boot_id:016x}", spokes_of(region))
}

/// Returns the prefix of this region's spokes.
pub fn spokes_of(region: &RegionId) -> String {
    format!("{SPOKES}{region}/")
}

/// Returns the key of an instance name, which one spoke of `region` at a time has.
pub fn instance(region: &RegionId, instance: &InstanceName) -> String {
    format!("{INSTANCES}{region}/{instance}")
}

/// Returns the key of the identifier of a spoke's lease ([`crate::lease`]).
pub fn lease(LeaseHolder { region, boot_id }: &LeaseHolder) -> String {
    format!("{LEASES}{region}/{boot_id:016x}")
}

/// Returns the key of the scaler lease of a region ([`crate::scaler`]).
pub fn scaler(region: &RegionId) -> String {
    format!("{SCALERS}{region}")
}

/// Returns the key of a gateway's demand report. Each instance has its own key, like a spoke's.
pub fn demand(region: &RegionId, boot_id: u64) -> String {
    format!("{DEMAND}{region}/{boot_id:016x}")
}

/// Returns the key of one day of a ledger of usage.
pub fn usage(day: UsageDay, gateway: &RegionId, ledger: u64) -> String {
    format!("{}{ledger:016x}", usage_of_gateway(day, gateway))
}

/// Returns the prefix of the usage of one day.
pub fn usage_of(day: UsageDay) -> String {
    format!("{USAGE}{day}/")
}

/// Returns the prefix of the usage of one day of the gateways of a region.
pub fn usage_of_gateway(day: UsageDay, gateway: &RegionId) -> String {
    format!("{}{gateway}/", usage_of(day))
}

/// Returns the key of the demand of tenants at a gateway.
pub fn tenant_demand(GatewayInstance { region, id }: &GatewayInstance) -> String {
    format!("{TENANT_DEMAND}{region}/{id:016x}")
}

/// Returns the key of a gateway's shares of the tenants' limits.
pub fn shares(GatewayInstance { region, id }: &GatewayInstance) -> String {
    format!("{SHARES}{region}/{id:016x}")
}

/// Returns the key of a drain.
pub fn drain(region: &RegionId) -> String {
    format!("{DRAINS}{region}")
}

/// Returns the key of the rows of a region's gateways.
pub fn weights(region: &RegionId) -> String {
    format!("{WEIGHTS}{region}")
}

/// Returns the key of a region's floors.
pub fn floors(region: &RegionId) -> String {
    format!("{FLOORS}{region}")
}

/// Returns the key of a join token, by the hash of its secret.
pub fn join_token(hash: &str) -> String {
    format!("{JOIN_TOKENS}{hash}")
}

/// Returns the key of an issued certificate, by its serial number.
pub fn certificate(serial: &str) -> String {
    format!("{CERTIFICATES}{serial}")
}

/// Parses the key of a reader.
pub fn reader_of(key: &str) -> Option<Reader> {
    key.strip_prefix(READERS)?.parse().ok()
}

/// Parses the key of a spoke.
pub fn spoke_of(key: &str) -> Option<(RegionId, u64)> {
    instance_of(key.strip_prefix(SPOKES)?)
}

/// Parses the key of a demand report.
pub fn demand_of(key: &str) -> Option<(RegionId, u64)> {
    instance_of(key.strip_prefix(DEMAND)?)
}

/// Parses the key of the demand of tenants at a gateway.
pub fn tenant_demand_of(key: &str) -> Option<GatewayInstance> {
    let (region, id) = instance_of(key.strip_prefix(TENANT_DEMAND)?)?;
    Some(GatewayInstance { region, id })
}

/// Parses the key of a gateway's shares of the tenants' limits.
pub fn shares_of(key: &str) -> Option<GatewayInstance> {
    let (region, id) = instance_of(key.strip_prefix(SHARES)?)?;
    Some(GatewayInstance { region, id })
}

/// Parses the key of a drain.
pub fn drain_of(key: &str) -> Option<RegionId> {
    key.strip_prefix(DRAINS)?.parse().ok()
}

fn instance_of(key: &str) -> Option<(RegionId, u64)> {
    let (region, boot_id) = key.rsplit_once('/')?;
    Some((region.parse().ok()?, u64::from_str_radix(boot_id, 16).ok()?))
}

#[cfg(test)]
mod tests {
    use super::super::any;
    use super::*;
    use crate::reader::Role;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_key_parses_to_the_values_it_was_made_from(region in any::region(), boot_id: u64) {
            let key = spoke(&region, boot_id);
            prop_assert!(key.starts_with(&spokes_of(&region)));
            prop_assert_eq!(spoke_of(&key), Some((region.clone(), boot_id)));
            prop_assert_eq!(demand_of(&demand(&region, boot_id)), Some((region.clone(), boot_id)));
            let gateway = GatewayInstance { region: region.clone(), id: boot_id };
            prop_assert_eq!(tenant_demand_of(&tenant_demand(&gateway)), Some(gateway.clone()));
            prop_assert_eq!(shares_of(&shares(&gateway)), Some(gateway.clone()));
            prop_assert_eq!(drain_of(&drain(&region)), Some(region.clone()));
            let gateway = Reader { role: Role::Gateway, region, boot_id };
            prop_assert_eq!(reader_of(&reader(&gateway)), Some(gateway));
        }
    }

    #[test]
    fn all_keys_but_those_of_usage_are_before_it() {
        let all = [
            EPOCH,
            DEPLOYMENTS,
            TENANTS,
            CREATED_KEYS,
            READERS,
            SPOKES,
            INSTANCES,
            LEASES,
            SCALERS,
            ROUTES,
            DEMAND,
            TENANT_DEMAND,
            DRAINS,
            PLAN,
            WEIGHTS,
            FLOORS,
            SHARES,
            TRUST,
            JOIN_TOKENS,
            CERTIFICATES,
            LEADER,
        ];
        for prefix in all {
            assert!(*format!("{prefix}\u{10ffff}") < *USAGE, "{prefix}");
        }
        let key = usage(UsageDay(20_000), &"aws/us-east-1".parse().unwrap(), u64::MAX);
        assert!((USAGE..USAGE_END).contains(&key.as_str()));
    }

    #[test]
    fn a_foreign_key_does_not_parse() {
        for key in ["spokes/", "spokes/aws/us-east-1", "spokes/aws/us-east-1/one", "routes", "leader", ""] {
            assert_eq!(spoke_of(key), None, "{key}");
        }
        assert_eq!(reader_of("readers/gateway/aws"), None);
    }
}
