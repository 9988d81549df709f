//! Demand reports of gateways, and how they are written to the store.
//!
//! A gateway reports its demand every second, mostly unchanged. An unchanged report is not written; only the lease of
//! its key is kept alive. So the choice of hub does not matter either: a gateway stays with one hub for a while, and
//! after a change the new hub writes the report under a lease of its own.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use supervision::{Mutex, MutexGuard};

use scheduler_api::keys;
use scheduler_api::plan::{DemandV1, GatewayBoot, GatewayDemand};
use scheduler_api::report::GATEWAYS_MAX;
use scheduler_store::{Lease, Store, StoreError};

use super::records;
use crate::respond::{Code, ErrorResponse};

/// Time after which a gateway without reports is forgotten.
pub(super) const GATEWAY_EXPIRY: Duration = Duration::from_secs(60);
/// A demand counts as changed if it differs by more than a tenth and by more than this number of tokens per second.
const CHANGE_PART: u64 = 10;
const CHANGE_TOKENS: u64 = 50;

/// Last written demand by gateway.
#[derive(Default)]
pub(super) struct DemandRecords(Mutex<BTreeMap<GatewayBoot, DemandRecord>>);

#[derive(Clone)]
struct DemandRecord {
    lease: Lease,
    demand: GatewayDemand,
    last_report: Instant,
}

impl DemandRecords {
    fn records(&self) -> MutexGuard<'_, BTreeMap<GatewayBoot, DemandRecord>> {
        self.0.lock()
    }

    /// Returns the number of known gateways.
    pub(super) fn gateways(&self) -> usize {
        self.records().len()
    }

    /// Returns the record of this gateway, if any; an error if the limit of gateways is reached.
    fn find(&self, gateway: &GatewayBoot, now: Instant) -> Result<Option<DemandRecord>, ErrorResponse> {
        let mut all = self.records();
        if let Some(record) = all.get_mut(gateway) {
            record.last_report = now;
            return Ok(Some(record.clone()));
        }
        if all.len() >= GATEWAYS_MAX {
            all.retain(|_, record| now.saturating_duration_since(record.last_report) <= GATEWAY_EXPIRY);
        }
        if all.len() >= GATEWAYS_MAX {
            let message = format!("The plan has the maximum of {GATEWAYS_MAX} gateways; stop some.");
            return Err(ErrorResponse::new(Code::Overloaded, message).with_field("gateway"));
        }
        Ok(None)
    }

    /// Writes the demand of a gateway if it has changed.
    pub(super) async fn record<S: Store>(
        &self,
        store: &S,
        lease_ttl: Duration,
        demand: GatewayDemand,
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
        let GatewayBoot { region, boot_id } = &demand.gateway;
        let value = records::packed(&DemandV1::from(&demand));
        store.put(&keys::demand(region, *boot_id), value, Some(lease)).await?;
        self.records().insert(demand.gateway.clone(), DemandRecord { lease, demand, last_report: now });
        Ok(())
    }
}

/// Keeps a lease alive; returns `None` if it has ended or has no keys.
pub(super) async fn keep_alive<S: Store>(store: &S, lease: Lease) -> Result<Option<Lease>, StoreError> {
    match store.lease_keep_alive(lease, Instant::now()).await {
        Ok(keys) => Ok((!keys.is_empty()).then_some(lease)),
        Err(StoreError::NoSuchLease(_)) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Returns whether the demand is so similar to the previous one that the plan would hardly differ, and no region's
/// health does.
fn is_like(before: &GatewayDemand, now: &GatewayDemand) -> bool {
    let like = |(one, other): (&u64, &u64)| one.abs_diff(*other) <= (*one / CHANGE_PART).max(CHANGE_TOKENS);
    before.reachable_regions == now.reachable_regions
        && before.classes.len() == now.classes.len()
        && before.classes.keys().eq(now.classes.keys())
        && before.classes.values().zip(now.classes.values()).all(like)
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
                is_like(&demand(1, &[("a", before)]), &demand(1, &[("a", now)])),
                like,
                "{before} {now}"
            );
        };
        check(1000, 1100, true);
        check(1000, 1101, false);
        check(1000, 899, false);
        check(0, CHANGE_TOKENS, true);
        check(0, CHANGE_TOKENS + 1, false);
        assert!(!is_like(&demand(1, &[("a", 1)]), &demand(1, &[("b", 1)])));
        assert!(!is_like(&demand(1, &[("a", 1)]), &demand(1, &[("a", 1), ("b", 0)])));
    }

    #[test]
    fn limit_of_gateways_is_enforced_and_expired_gateways_free_slots() {
        let (demands, now) = (DemandRecords::default(), Instant::now());
        let keep = |boot_id: u64, last_report| {
            let demand = demand(boot_id, &[]);
            demands
                .records()
                .insert(demand.gateway.clone(), DemandRecord { lease: Lease(boot_id), demand, last_report });
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
