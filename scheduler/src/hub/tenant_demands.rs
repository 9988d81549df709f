//! Demand of tenants that gateways report, and how it is written to the store.
//!
//! As with the demand of classes ([`super::demands`]), an unchanged report is not written; only the lease of its key is
//! kept alive. A report changes when the gateway acknowledges shares.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use regions::tenant::PerLimit;
use scheduler_api::keys;
use scheduler_api::plan::{GatewayInstance, TenantDemand, TenantDemandV1};
use scheduler_api::report::GATEWAYS_MAX;
use scheduler_store::{Lease, Store};
use supervision::Mutex;

use super::demands::{GATEWAY_EXPIRY, keep_alive};
use super::records;
use crate::respond::{Code, ErrorResponse};

/// A demand counts as changed if it differs by more than a twentieth and by more than this number of units per minute.
const CHANGE_PART: u64 = 20;
const CHANGE_UNITS: u64 = 60;

/// Last written demand of tenants by gateway.
#[derive(Default)]
pub(super) struct TenantDemandRecords(Mutex<BTreeMap<GatewayInstance, TenantDemandRecord>>);

#[derive(Clone)]
struct TenantDemandRecord {
    lease: Lease,
    demand: TenantDemand,
    last_report: Instant,
}

impl TenantDemandRecords {
    /// Returns the record of this gateway, if any; an error if the limit of gateways is reached.
    fn find(
        &self,
        gateway: &GatewayInstance,
        now: Instant,
    ) -> Result<Option<TenantDemandRecord>, ErrorResponse> {
        let mut all = self.0.lock();
        if let Some(record) = all.get_mut(gateway) {
            record.last_report = now;
            return Ok(Some(record.clone()));
        }
        if all.len() >= GATEWAYS_MAX {
            all.retain(|_, record| now.saturating_duration_since(record.last_report) <= GATEWAY_EXPIRY);
        }
        if all.len() >= GATEWAYS_MAX {
            let message = format!("At most {GATEWAYS_MAX} gateways share the limits of tenants; stop some.");
            return Err(ErrorResponse::new(Code::Overloaded, message).with_field("gateway"));
        }
        Ok(None)
    }

    /// Writes the demand of tenants at a gateway if it has changed.
    pub(super) async fn record<S: Store>(
        &self,
        store: &S,
        lease_ttl: Duration,
        demand: TenantDemand,
    ) -> Result<(), ErrorResponse> {
        let now = Instant::now();
        let before = self.find(&demand.gateway, now)?;
        let alive = match &before {
            Some(record) => keep_alive(store, record.lease).await?,
            None => None,
        };
        let lease = match alive {
            Some(_) if before.is_some_and(|record| is_like(&record.demand, &demand)) => return Ok(()),
            Some(lease) => lease,
            None => store.lease_grant(lease_ttl, now).await?,
        };
        let value = records::packed(&TenantDemandV1::from(&demand));
        store.put(&keys::tenant_demand(&demand.gateway), value, Some(lease)).await?;
        let gateway = demand.gateway.clone();
        self.0.lock().insert(gateway, TenantDemandRecord { lease, demand, last_report: now });
        Ok(())
    }
}

/// Returns whether the demand is so similar to the previous one that the shares would hardly differ.
fn is_like(before: &TenantDemand, now: &TenantDemand) -> bool {
    let near = |(one, other): (u64, u64)| one.abs_diff(other) <= (one / CHANGE_PART).max(CHANGE_UNITS);
    let like =
        |(one, other): (&PerLimit<u64>, &PerLimit<u64>)| one.zip(*other).into_values().into_iter().all(near);
    before.running == now.running
        && before.tenants.keys().eq(now.tenants.keys())
        && before.tenants.values().zip(now.tenants.values()).all(like)
}

#[cfg(test)]
mod tests {
    use super::*;
    use regions::Generation;

    fn demand(running: u64, tenants: &[(&str, u64)]) -> TenantDemand {
        let gateway = GatewayInstance { region: "aws/us-east-1".parse().unwrap(), id: 1 };
        let units = |units| PerLimit::each(|| units);
        let tenants = tenants.iter().map(|(name, demand)| (name.parse().unwrap(), units(*demand))).collect();
        TenantDemand { gateway, running: Some(Generation { epoch: 1, number: running }), tenants }
    }

    #[test]
    fn small_changes_of_demand_are_not_written_and_acknowledgements_are() {
        let check = |before: u64, now: u64, like: bool| {
            assert_eq!(
                is_like(&demand(1, &[("a", before)]), &demand(1, &[("a", now)])),
                like,
                "{before} {now}"
            );
        };
        check(6000, 6300, true);
        check(6000, 6301, false);
        check(0, CHANGE_UNITS, true);
        check(0, CHANGE_UNITS + 1, false);
        assert!(!is_like(&demand(1, &[("a", 1)]), &demand(2, &[("a", 1)])));
        assert!(!is_like(&demand(1, &[("a", 1)]), &demand(1, &[])));
        assert!(!is_like(&demand(1, &[]), &demand(1, &[("a", 1)])));
    }

    #[test]
    fn limit_of_sharing_gateways_is_enforced_and_expired_ones_free_slots() {
        let (records, now) = (TenantDemandRecords::default(), Instant::now());
        let gateway = |id| GatewayInstance { id, ..demand(1, &[]).gateway };
        for id in 0..GATEWAYS_MAX as u64 {
            let record = TenantDemandRecord { lease: Lease(id), demand: demand(1, &[]), last_report: now };
            records.0.lock().insert(gateway(id), record);
        }
        assert!(records.find(&gateway(u64::MAX), now).is_err());
        assert!(records.find(&gateway(0), now).is_ok_and(|record| record.is_some()));
        let later = now + GATEWAY_EXPIRY + Duration::from_millis(1);
        assert!(records.find(&gateway(u64::MAX), later).is_ok_and(|record| record.is_none()));
    }
}
