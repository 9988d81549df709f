//! Demand of tenants that gateways report; it is written to the store like that of classes ([`super::demands`]). A report
//! also changes when the gateway acknowledges shares.

use regions::tenant::PerLimit;
use scheduler_api::keys;
use scheduler_api::plan::{GatewayInstance, TenantDemand, TenantDemandV1};

use super::demands::GatewayReport;
use super::records;

/// A demand counts as changed if it differs by more than a twentieth and by more than this number of units per minute.
const CHANGE_PART: u64 = 20;
const CHANGE_UNITS: u64 = 60;

impl GatewayReport for TenantDemand {
    type Gateway = GatewayInstance;

    fn gateway(&self) -> &GatewayInstance {
        &self.gateway
    }

    fn record(&self) -> (String, Vec<u8>) {
        (keys::tenant_demand(&self.gateway), records::packed(&TenantDemandV1::from(self)))
    }

    fn is_like(&self, now: &TenantDemand) -> bool {
        let near = |(one, other): (u64, u64)| one.abs_diff(other) <= (one / CHANGE_PART).max(CHANGE_UNITS);
        let like = |(one, other): (&PerLimit<u64>, &PerLimit<u64>)| {
            one.zip(*other).into_values().into_iter().all(near)
        };
        self.running == now.running
            && self.tenants.keys().eq(now.tenants.keys())
            && self.tenants.values().zip(now.tenants.values()).all(like)
    }
}

#[cfg(test)]
mod tests {
    use super::super::demands::{GATEWAY_EXPIRY, GatewayReports, WrittenReport};
    use super::*;
    use regions::Generation;
    use scheduler_api::report::GATEWAYS_MAX;
    use scheduler_store::Lease;
    use std::time::{Duration, Instant};

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
                demand(1, &[("a", before)]).is_like(&demand(1, &[("a", now)])),
                like,
                "{before} {now}"
            );
        };
        check(6000, 6300, true);
        check(6000, 6301, false);
        check(0, CHANGE_UNITS, true);
        check(0, CHANGE_UNITS + 1, false);
        assert!(!demand(1, &[("a", 1)]).is_like(&demand(2, &[("a", 1)])));
        assert!(!demand(1, &[("a", 1)]).is_like(&demand(1, &[])));
        assert!(!demand(1, &[]).is_like(&demand(1, &[("a", 1)])));
    }

    #[test]
    fn limit_of_sharing_gateways_is_enforced_and_expired_ones_free_slots() {
        let (reports, now) = (GatewayReports::default(), Instant::now());
        let gateway = |id| GatewayInstance { id, ..demand(1, &[]).gateway };
        for id in 0..GATEWAYS_MAX as u64 {
            let report = TenantDemand { gateway: gateway(id), ..demand(1, &[]) };
            reports.insert(WrittenReport { lease: Lease(id), report, last_report: now });
        }
        assert!(reports.find(&gateway(u64::MAX), now).is_err());
        assert!(reports.find(&gateway(0), now).is_ok_and(|record| record.is_some()));
        let later = now + GATEWAY_EXPIRY + Duration::from_millis(1);
        assert!(reports.find(&gateway(u64::MAX), later).is_ok_and(|record| record.is_none()));
    }
}
