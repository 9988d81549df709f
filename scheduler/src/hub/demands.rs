//! Demand that gateways report, and how it is written to the store.
//!
//! A gateway reports every second, mostly without a change. An unchanged report is not written; only the lease of its key
//! is kept alive. So the choice of hub does not matter either: a gateway stays with one hub for a while, and after a change
//! the new hub writes the report under a lease of its own.
//!
//! There are two reports: the demand of traffic classes, here, and that of tenants ([`super::tenant_demands`]).

use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use supervision::Mutex;

use replica_api::error::ErrorCode;
use scheduler_api::keys;
use scheduler_api::plan::{DemandV1, GatewayBoot, GatewayDemand};
use scheduler_api::report::GATEWAYS_MAX;
use scheduler_store::{Lease, Store, StoreError};

use super::records;
use crate::respond::ErrorResponse;

/// Time after which a gateway without reports is forgotten.
pub(super) const GATEWAY_EXPIRY: Duration = Duration::from_secs(60);
/// A demand counts as changed if it differs by more than a tenth and by more than this number of tokens per second.
const CHANGE_PART: u64 = 10;
const CHANGE_TOKENS: u64 = 50;

/// Report of a gateway that is stored under a lease.
pub(super) trait GatewayReport: Clone {
    /// Identifies the gateway.
    type Gateway: Clone + Ord;

    /// Returns the gateway.
    fn gateway(&self) -> &Self::Gateway;

    /// Returns the key and the value of its record.
    fn record(&self) -> (String, Vec<u8>);

    /// Returns whether the decisions that follow from the report would hardly differ from those of `self`.
    fn is_like(&self, now: &Self) -> bool;
}

/// Last written report of each gateway.
pub(super) struct GatewayReports<R: GatewayReport>(Mutex<BTreeMap<R::Gateway, WrittenReport<R>>>);

#[derive(Clone)]
pub(super) struct WrittenReport<R> {
    pub(super) lease: Lease,
    pub(super) report: R,
    pub(super) last_report: Instant,
}

impl<R: GatewayReport> Default for GatewayReports<R> {
    fn default() -> GatewayReports<R> {
        GatewayReports(Mutex::default())
    }
}

impl<R: GatewayReport> GatewayReports<R> {
    /// Returns the number of known gateways.
    pub(super) fn gateways(&self) -> usize {
        self.0.lock().len()
    }

    /// Returns the last report of this gateway, if any; an error if the limit of gateways is reached.
    pub(super) fn find(
        &self,
        gateway: &R::Gateway,
        now: Instant,
    ) -> Result<Option<WrittenReport<R>>, ErrorResponse> {
        let mut all = self.0.lock();
        if let Some(written) = all.get_mut(gateway) {
            written.last_report = now;
            return Ok(Some(written.clone()));
        }
        if all.len() >= GATEWAYS_MAX {
            all.retain(|_, written| now.saturating_duration_since(written.last_report) <= GATEWAY_EXPIRY);
        }
        if all.len() >= GATEWAYS_MAX {
            let message = format!("The maximum of {GATEWAYS_MAX} gateways report to this hub; stop some.");
            return Err(ErrorResponse::new(ErrorCode::Overloaded, message).with_field("gateway"));
        }
        Ok(None)
    }

    /// Writes a report if it has changed.
    pub(super) async fn record<S: Store>(
        &self,
        store: &S,
        lease_ttl: Duration,
        report: R,
    ) -> Result<(), ErrorResponse> {
        let now = Instant::now();
        let before = self.find(report.gateway(), now)?;
        let alive = match &before {
            Some(written) => keep_alive(store, written.lease).await?,
            None => None,
        };
        let lease = match alive {
            Some(_) if before.is_some_and(|written| written.report.is_like(&report)) => return Ok(()),
            Some(lease) => lease,
            None => store.lease_grant(lease_ttl, now).await?,
        };
        let (key, value) = report.record();
        store.put(&key, value, Some(lease)).await?;
        self.insert(WrittenReport { lease, report, last_report: now });
        Ok(())
    }

    pub(super) fn insert(&self, written: WrittenReport<R>) {
        self.0.lock().insert(written.report.gateway().clone(), written);
    }
}

/// Keeps a lease alive; returns `None` if it has ended or has no keys.
async fn keep_alive<S: Store>(store: &S, lease: Lease) -> Result<Option<Lease>, StoreError> {
    match store.lease_keep_alive(lease, Instant::now()).await {
        Ok(keys) => Ok((!keys.is_empty()).then_some(lease)),
        Err(StoreError::NoSuchLease(_)) => Ok(None),
        Err(error) => Err(error),
    }
}

impl GatewayReport for GatewayDemand {
    type Gateway = GatewayBoot;

    fn gateway(&self) -> &GatewayBoot {
        &self.gateway
    }

    fn record(&self) -> (String, Vec<u8>) {
        let GatewayBoot { region, boot_id } = &self.gateway;
        (keys::demand(region, *boot_id), records::packed(&DemandV1::from(self)))
    }

    /// The health of no region differs either.
    fn is_like(&self, now: &GatewayDemand) -> bool {
        let like =
            |(one, other): (&u64, &u64)| one.abs_diff(*other) <= (*one / CHANGE_PART).max(CHANGE_TOKENS);
        self.reachable_regions == now.reachable_regions
            && self.classes.len() == now.classes.len()
            && self.classes.keys().eq(now.classes.keys())
            && self.classes.values().zip(now.classes.values()).all(like)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use scheduler_api::plan::TrafficClass;

    fn demand(boot_id: u64, classes: &[(&str, u64)]) -> GatewayDemand {
        let region: regions::RegionId = "aws/us-east-1".parse().unwrap();
        let class = |name: &str| TrafficClass {
            deployment: name.parse().unwrap(),
            residency: regions::ResidencyPolicy::Anywhere,
        };
        let classes = classes.iter().map(|(name, tokens)| ((class(name), region.clone()), *tokens)).collect();
        GatewayDemand { gateway: GatewayBoot { region, boot_id }, classes, reachable_regions: None }
    }

    #[test]
    fn small_changes_are_not_written_and_other_classes_are() {
        let check = |before: u64, now: u64, like: bool| {
            assert_eq!(
                demand(1, &[("a", before)]).is_like(&demand(1, &[("a", now)])),
                like,
                "{before} {now}"
            );
        };
        check(1000, 1100, true);
        check(1000, 1101, false);
        check(1000, 899, false);
        check(0, CHANGE_TOKENS, true);
        check(0, CHANGE_TOKENS + 1, false);
        assert!(!demand(1, &[("a", 1)]).is_like(&demand(1, &[("b", 1)])));
        assert!(!demand(1, &[("a", 1)]).is_like(&demand(1, &[("a", 1), ("b", 0)])));
    }

    #[test]
    fn limit_of_gateways_is_enforced_and_expired_gateways_free_slots() {
        let (demands, now) = (GatewayReports::default(), Instant::now());
        let keep = |boot_id: u64, last_report| {
            let report = demand(boot_id, &[]);
            demands.insert(WrittenReport { lease: Lease(boot_id), report, last_report });
        };
        keep(0, now);
        (1..GATEWAYS_MAX as u64).for_each(|boot_id| keep(boot_id, now + Duration::from_secs(1)));
        let one_more = demand(9999, &[]).gateway;
        assert!(demands.find(&one_more, now + GATEWAY_EXPIRY).is_err());
        assert!(
            demands.find(&demand(5, &[]).gateway, now + GATEWAY_EXPIRY).is_ok_and(|record| record.is_some())
        );
        let later = now + GATEWAY_EXPIRY + Duration::from_millis(1);
        assert!(demands.find(&one_more, later).is_ok_and(|record| record.is_none()));
    }
}
