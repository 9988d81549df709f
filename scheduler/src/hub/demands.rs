//! What gateways are asked for: what a word of it does to the store.
//!
//! A gateway says it every second, and mostly the same. What is no news is not written: the lease under which it stands is
//! kept alive, and that is all. So it makes no difference either to which of several hubs a gateway speaks; it has to be
//! the same one for a while, and when it is another, that one begins with a lease of its own.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use supervision::{Mutex, MutexGuard};

use scheduler_core::wire::keys;
use scheduler_core::wire::plan::{DemandV1, GatewayBoot, GatewayDemand};
use scheduler_store::{Lease, Store, StoreError};

use super::http::Desk;
use super::records;
use super::spokes::{known, refusal};
use crate::respond::{Code, Refusal};

/// Gateways that may be planned for at a time: as many as may hold grants at a region.
pub(super) const GATEWAYS_MAX: usize = 1024;
/// After this long a gateway is forgotten that has not said anything.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(60);
/// What is asked for is news when it differs by more than a tenth, and by more than this many tokens per second.
const NEWS_PART: u64 = 10;
const NEWS_TOKENS: u64 = 50;

/// What was last written, by gateway.
#[derive(Default)]
pub(super) struct Demands(Mutex<BTreeMap<GatewayBoot, Kept>>);

#[derive(Clone)]
struct Kept {
    lease: Lease,
    demand: GatewayDemand,
    heard: Instant,
}

impl Demands {
    fn kept(&self) -> MutexGuard<'_, BTreeMap<GatewayBoot, Kept>> {
        self.0.lock()
    }

    /// Of how many gateways something is kept.
    pub(super) fn gateways(&self) -> usize {
        self.kept().len()
    }

    /// What is kept of this gateway, if anything; an error, if there is no room for one more.
    fn of(&self, gateway: &GatewayBoot, now: Instant) -> Result<Option<Kept>, Refusal> {
        let mut all = self.kept();
        if let Some(kept) = all.get_mut(gateway) {
            kept.heard = now;
            return Ok(Some(kept.clone()));
        }
        if all.len() >= GATEWAYS_MAX {
            all.retain(|_, kept| now.saturating_duration_since(kept.heard) <= FORGOTTEN_AFTER);
        }
        if all.len() >= GATEWAYS_MAX {
            let message = format!("{GATEWAYS_MAX} gateways are planned for already; stop some.");
            return Err(Refusal::new(Code::Overloaded, message).of("gateway"));
        }
        Ok(None)
    }
}

/// Notes what a gateway is asked for, if that is news.
pub(super) async fn note<S: Store>(desk: &Desk<S>, demand: GatewayDemand) -> Result<(), Refusal> {
    let now = Instant::now();
    let GatewayBoot { region: place, boot_id } = demand.gateway.clone();
    known(desk, &place)?;
    let before = desk.demands.of(&demand.gateway, now)?;
    let stands = match &before {
        Some(kept) => stands(desk, kept.lease).await?,
        None => None,
    };
    let lease = match stands {
        Some(_) if before.is_some_and(|kept| is_like(&kept.demand, &demand)) => return Ok(()),
        Some(lease) => lease,
        None => desk.store.lease_grant(desk.lease_ttl, now).await.map_err(refusal)?,
    };
    let value = records::packed(&DemandV1::from(&demand));
    desk.store.put(&keys::demand(&place, boot_id), value, Some(lease)).await.map_err(refusal)?;
    desk.demands.kept().insert(demand.gateway.clone(), Kept { lease, demand, heard: now });
    Ok(())
}

/// Keeps a lease alive; nothing, if it has ended or no key goes with it.
async fn stands<S: Store>(desk: &Desk<S>, lease: Lease) -> Result<Option<Lease>, Refusal> {
    match desk.store.lease_keep_alive(lease, Instant::now()).await {
        Ok(keys) => Ok((!keys.is_empty()).then_some(lease)),
        Err(StoreError::NoSuchLease(_)) => Ok(None),
        Err(error) => Err(refusal(error)),
    }
}

/// Whether a plan would hardly be another with this in the place of what was said before, and no region's standing.
fn is_like(before: &GatewayDemand, now: &GatewayDemand) -> bool {
    let like = |(one, other): (&u64, &u64)| one.abs_diff(*other) <= (*one / NEWS_PART).max(NEWS_TOKENS);
    before.reachable_regions == now.reachable_regions
        && before.classes.len() == now.classes.len()
        && before.classes.keys().eq(now.classes.keys())
        && before.classes.values().zip(now.classes.values()).all(like)
}

#[cfg(test)]
mod tests {
    use super::*;
    use scheduler_core::plan::TrafficClass;

    fn demand(boot_id: u64, classes: &[(&str, u64)]) -> GatewayDemand {
        let place: regions::RegionId = "aws/us-east-1".parse().unwrap();
        let class = |name: &str| TrafficClass {
            deployment: name.parse().unwrap(),
            residency: regions::ResidencyPolicy::Anywhere,
        };
        let classes = classes.iter().map(|(name, tokens)| ((class(name), place.clone()), *tokens)).collect();
        GatewayDemand { gateway: GatewayBoot { region: place, boot_id }, classes, reachable_regions: None }
    }

    #[test]
    fn a_tenth_more_or_less_is_no_news_nor_are_a_few_tokens_and_another_class_is() {
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
        check(0, NEWS_TOKENS, true);
        check(0, NEWS_TOKENS + 1, false);
        assert!(!is_like(&demand(1, &[("a", 1)]), &demand(1, &[("b", 1)])));
        assert!(!is_like(&demand(1, &[("a", 1)]), &demand(1, &[("a", 1), ("b", 0)])));
    }

    #[test]
    fn as_many_gateways_are_planned_for_as_may_be_and_one_more_when_one_is_forgotten() {
        let (demands, now) = (Demands::default(), Instant::now());
        let keep = |boot_id: u64, heard| {
            let demand = demand(boot_id, &[]);
            demands.kept().insert(demand.gateway.clone(), Kept { lease: Lease(boot_id), demand, heard });
        };
        keep(0, now);
        (1..GATEWAYS_MAX as u64).for_each(|boot_id| keep(boot_id, now + Duration::from_secs(1)));
        let one_more = demand(9999, &[]).gateway;
        assert!(demands.of(&one_more, now + FORGOTTEN_AFTER).is_err());
        assert!(demands.of(&demand(5, &[]).gateway, now + FORGOTTEN_AFTER).is_ok_and(|kept| kept.is_some()));
        let later = now + FORGOTTEN_AFTER + Duration::from_millis(1);
        assert!(demands.of(&one_more, later).is_ok_and(|kept| kept.is_none()));
    }
}
