//! Last demand of each gateway, of which its next report has the changes ([`scheduler_api::plan::DemandReportV1`]).
//!
//! It is the demand as reported, and not as written to the store, which differs by small changes ([`super::demands`]).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use scheduler_api::error::HubErrorCode;
use scheduler_api::plan::{DemandReportError, DemandReportV1, DemandV1, GatewayBoot};
use scheduler_api::report::GATEWAYS_MAX;
use supervision::Mutex;

use super::demands::GATEWAY_EXPIRY;
use crate::respond::ErrorResponse;

/// Last demand of each gateway, with its time; of at most [`GATEWAYS_MAX`] gateways. A demand is shared and not copied,
/// because all reports take the lock.
#[derive(Default)]
pub(super) struct DemandBases(Mutex<BTreeMap<GatewayBoot, (Arc<DemandV1>, Instant)>>);

impl DemandBases {
    /// Returns the demand of a report.
    pub(super) fn restore(
        &self,
        gateway: &GatewayBoot,
        report: DemandReportV1,
    ) -> Result<DemandV1, ErrorResponse> {
        let base = self.last(gateway);
        report.restore(base.as_deref()).map_err(|error| match error {
            DemandReportError::Invalid(error) => error.into(),
            error @ DemandReportError::UnknownBase => {
                ErrorResponse::new(HubErrorCode::UnknownBase, format!("The report: {error}."))
            }
        })
    }

    /// Returns the last demand of a gateway.
    fn last(&self, gateway: &GatewayBoot) -> Option<Arc<DemandV1>> {
        self.0.lock().get(gateway).map(|(demand, _)| demand.clone())
    }

    /// Keeps a demand that is recorded. Without a slot, the next report of the gateway must be complete.
    pub(super) fn keep(&self, gateway: GatewayBoot, demand: DemandV1, now: Instant) {
        let demand = Arc::new(demand);
        let mut all = self.0.lock();
        if all.len() >= GATEWAYS_MAX && !all.contains_key(&gateway) {
            all.retain(|_, (_, at)| now.saturating_duration_since(*at) <= GATEWAY_EXPIRY);
        }
        if all.len() < GATEWAYS_MAX || all.contains_key(&gateway) {
            all.insert(gateway, (demand, now));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use scheduler_api::VERSION;
    use std::time::Duration;

    fn demand(boot_id: u64) -> (GatewayBoot, DemandV1) {
        let region: regions::RegionId = "aws/us-east-1".parse().unwrap();
        let demand = DemandV1 {
            version: VERSION,
            gateway: region.to_string(),
            boot_id,
            classes: Vec::new(),
            reachable_regions: None,
        };
        (GatewayBoot { region, boot_id }, demand)
    }

    #[test]
    fn a_base_is_shared_by_reports_and_not_copied_under_the_lock() {
        let (bases, (gateway, demand)) = (DemandBases::default(), demand(1));
        bases.keep(gateway.clone(), demand.clone(), Instant::now());
        let last = bases.last(&gateway).unwrap();
        assert_eq!(*last, demand);
        assert!(Arc::ptr_eq(&last, &bases.last(&gateway).unwrap()));
    }

    #[test]
    fn bases_are_limited_and_those_of_silent_gateways_make_room() {
        let (bases, now) = (DemandBases::default(), Instant::now());
        let keep = |boot_id, at| {
            let (gateway, demand) = demand(boot_id);
            bases.keep(gateway, demand, at);
        };
        let is_kept = |boot_id| bases.last(&demand(boot_id).0).is_some();
        keep(0, now);
        (1..GATEWAYS_MAX as u64).for_each(|boot_id| keep(boot_id, now + Duration::from_secs(1)));
        keep(5, now + GATEWAY_EXPIRY);
        keep(9999, now + GATEWAY_EXPIRY);
        assert_eq!([0, 5, 9999].map(is_kept), [true, true, false], "at the limit");
        keep(9999, now + GATEWAY_EXPIRY + Duration::from_millis(1));
        assert_eq!([0, 5, 9999].map(is_kept), [false, true, true]);
    }
}
