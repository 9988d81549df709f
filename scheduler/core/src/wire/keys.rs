//! Under which key the hub's store keeps what.
//!
//! ```text
//! meta/epoch                    decimal digits       raised when the store is replaced or restored
//! desired/deployments            DeploymentsV1        what there is to serve, compressed where it is long
//! desired/tenants                TenantsV1            who may come in, if that was ever applied
//! spokes/{region}/{boot id}     RegisterV1           under the spoke's lease
//! leases/{region}/{boot id}     32 hex digits        the identifier of the spoke's lease, under that lease
//! readers/{reader}              ReaderV1             which table a gateway or a spoke runs, under a lease of its own
//! routes                        RouteTableV1         what was published last, compressed where it is long
//! demand/{region}/{boot id}      DemandV1             what a gateway is asked for, under a lease of its own
//! drains/{region}               DrainV1              a region that its operator wants emptied
//! plan/weights/{region}          WeightsV1            the rows of the gateways there, compressed where they are long
//! plan/floors/{region}          RegionFloorsV1       how many replicas that region keeps
//! leader                        a hub's address      of the hub that writes `routes`, under its lease
//! ```
//!
//! All deployments stand under one key: what an operator applies is one thing, and whatever the store, one key changes
//! as a whole. A transaction of etcd takes no more than 128.

use regions::RegionId;

use crate::lease::LeaseHolder;
use crate::rollout::Reader;

/// Counts the stores that have followed one another.
pub const EPOCH: &str = "meta/epoch";
/// The deployments that there shall be.
pub const DEPLOYMENTS: &str = "desired/deployments";
/// The tenants that there shall be.
pub const TENANTS: &str = "desired/tenants";
/// Everything under which a reader is kept.
pub const READERS: &str = "readers/";
/// Everything under which a spoke is kept.
pub const SPOKES: &str = "spokes/";
/// Everything under which the identifier of a spoke's lease is kept.
const LEASES: &str = "leases/";
/// The route table that was published last.
pub const ROUTES: &str = "routes";

/// Everything under which a gateway's demand is kept.
pub const DEMAND: &str = "demand/";
/// Everything under which a drain is kept.
pub const DRAINS: &str = "drains/";
/// Everything under which the plan is kept, a part of it under each key: so no value grows with the whole fleet, and what
/// has not changed is not written.
pub const PLAN: &str = "plan/";
/// Of the plan, the rows.
pub const WEIGHTS: &str = "plan/weights/";
/// Of the plan, the floors.
pub const FLOORS: &str = "plan/floors/";

/// Which hub leads.
pub const LEADER: &str = "leader";

/// Where a reader is kept.
pub fn reader(reader: &Reader) -> String {
    format!("{READERS}{reader}")
}

/// Where a spoke is kept. Each start of a spoke has a key of its own, so that an old one that is still draining and the
/// new one in its region do not overwrite each other.
pub fn spoke(region: &RegionId, boot_id: u64) -> String {
    format!("{}{boot_id:016x}", spokes_of(region))
}

/// Everything under which a spoke of this region is kept.
pub fn spokes_of(region: &RegionId) -> String {
    format!("{SPOKES}{region}/")
}

/// Where the identifier of a spoke's lease is kept ([`crate::lease`]).
pub fn lease(LeaseHolder { region, boot_id }: &LeaseHolder) -> String {
    format!("{LEASES}{region}/{boot_id:016x}")
}

/// Where a gateway's demand is kept. Each start has a key of its own, as a spoke's.
pub fn demand(region: &RegionId, boot_id: u64) -> String {
    format!("{DEMAND}{region}/{boot_id:016x}")
}

/// Where a drain is kept.
pub fn drain(region: &RegionId) -> String {
    format!("{DRAINS}{region}")
}

/// Where the rows of the gateways at a region are kept.
pub fn weights(region: &RegionId) -> String {
    format!("{WEIGHTS}{region}")
}

/// Where the floors of a region are kept.
pub fn floors(region: &RegionId) -> String {
    format!("{FLOORS}{region}")
}

/// The reader of this key.
pub fn reader_of(key: &str) -> Option<Reader> {
    key.strip_prefix(READERS)?.parse().ok()
}

/// The spoke of this key.
pub fn spoke_of(key: &str) -> Option<(RegionId, u64)> {
    start_of(key.strip_prefix(SPOKES)?)
}

/// The gateway of this key.
pub fn demand_of(key: &str) -> Option<(RegionId, u64)> {
    start_of(key.strip_prefix(DEMAND)?)
}

/// The drained region of this key.
pub fn drain_of(key: &str) -> Option<RegionId> {
    key.strip_prefix(DRAINS)?.parse().ok()
}

fn start_of(key: &str) -> Option<(RegionId, u64)> {
    let (region, boot_id) = key.rsplit_once('/')?;
    Some((region.parse().ok()?, u64::from_str_radix(boot_id, 16).ok()?))
}

#[cfg(test)]
mod tests {
    use super::super::any;
    use super::*;
    use crate::rollout::Role;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_key_leads_back_to_what_it_was_made_for(region in any::region(), boot_id: u64) {
            let key = spoke(&region, boot_id);
            prop_assert!(key.starts_with(&spokes_of(&region)));
            prop_assert_eq!(spoke_of(&key), Some((region.clone(), boot_id)));
            prop_assert_eq!(demand_of(&demand(&region, boot_id)), Some((region.clone(), boot_id)));
            prop_assert_eq!(drain_of(&drain(&region)), Some(region.clone()));
            let gateway = Reader { role: Role::Gateway, region: region, boot_id };
            prop_assert_eq!(reader_of(&reader(&gateway)), Some(gateway));
        }
    }

    #[test]
    fn what_is_no_key_of_ours_leads_nowhere() {
        for key in ["spokes/", "spokes/aws/us-east-1", "spokes/aws/us-east-1/one", "routes", "leader", ""] {
            assert_eq!(spoke_of(key), None, "{key}");
        }
        assert_eq!(reader_of("readers/gateway/aws"), None);
    }
}
