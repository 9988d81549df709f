//! Admission control and load shedding, before a body is read and again when its cost is known.
//!
//! A *pool* is one deployment in one region. Each region reports its queueing delay by priority; this gateway knows its
//! own tokens in flight there, by tenant. From the two follows a limit of the tokens in flight (see `limit`), and when
//! it is reached, the order is:
//!
//! 1. **Bulk before interactive** (invariant 8, *Priorities*). An interactive request is shed only together with the bulk of
//!    its pool,
//!    which is paused for [`BULK_PAUSE`] after it. So no interactive request is rejected because of a backfill.
//! 2. **Tenants above their fair share.** The share of a tenant is the part of the limit that its weight is of the
//!    weights of all active tenants; unused shares are available to all. A tenant within its share is admitted though
//!    the limit is reached, so an aggressor sheds its own requests and not its neighbours'. One request at a time is
//!    within any share.
//! 3. **Requests that would miss their deadline**: the queueing delay is longer than the time left.
//!
//! Shares are of tokens in flight and not of requests or of rates: a request of two thousand texts is not one of one
//! word, and tokens in flight are rate times duration, which is what a queue consists of. A pool is keyed by the
//! primary of a request; after a retry, the queue limit of the next region applies.

mod limit;
mod pool;

pub use pool::BULK_PAUSE;

use pool::AdmissionPool;
use regions::id::DeploymentName;
use regions::set::RegionIndex;
use replica_api::priority::Priority;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Queueing delays of one deployment as reported by a region; `None` where it does not know.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueWaits {
    /// Queueing delay of a new interactive request.
    pub interactive: Option<Duration>,
    /// Queueing delay of a new bulk request: behind all others.
    pub bulk: Option<Duration>,
}

impl QueueWaits {
    /// Computes the delays from the queued tokens and the speed. Speeds are fractions on the wire; a region whose speed
    /// is not known yet reports 0.
    pub fn of(interactive: Option<u64>, total: u64, tokens_per_second: f64) -> QueueWaits {
        let wait = |tokens: u64| {
            let seconds = (tokens_per_second > 0.0).then(|| tokens as f64 / tokens_per_second)?;
            Duration::try_from_secs_f64(seconds).ok()
        };
        QueueWaits { interactive: interactive.and_then(wait), bulk: wait(total) }
    }

    /// Returns whether no request would wait, as far as is known.
    fn are_zero(&self) -> bool {
        [self.interactive, self.bulk].iter().flatten().all(Duration::is_zero)
    }
}

/// Request to be admitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdmissionRequest {
    /// Index of its tenant.
    pub tenant: usize,
    /// Weight of its tenant.
    pub weight: u64,
    /// Priority of the request.
    pub priority: Priority,
    /// Tokens of the request, or the minimum of them.
    pub tokens: u64,
    /// Time until its deadline.
    pub left: Duration,
}

/// Reason for shedding a request, in the order of evaluation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ShedReason {
    /// It is bulk, and interactive requests are being shed.
    BulkPaused,
    /// It would miss its deadline.
    DeadlineTooShort,
    /// Its tenant has more in flight than its share.
    OverShare,
    /// The limit is reached, and no other tenant is active.
    NoCapacity,
}

impl ShedReason {
    /// All reasons, in their order.
    pub const ALL: [ShedReason; 4] =
        [ShedReason::BulkPaused, ShedReason::DeadlineTooShort, ShedReason::OverShare, ShedReason::NoCapacity];

    /// Returns the metric label.
    pub fn as_str(self) -> &'static str {
        match self {
            ShedReason::BulkPaused => "bulk_paused",
            ShedReason::DeadlineTooShort => "deadline_too_short",
            ShedReason::OverShare => "over_share",
            ShedReason::NoCapacity => "no_capacity",
        }
    }
}

/// A request is shed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shed {
    /// Reason for it.
    pub reason: ShedReason,
    /// Queueing delay by the region's last report.
    pub wait: Duration,
    /// Time after which a retry should pass at the measured speed, without further load.
    pub retry_after: Duration,
}

/// Record of an admitted request, to be returned when it ends.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a request that is never released stays in flight for ever"]
pub struct PoolEntry {
    region: RegionIndex,
    deployment: DeploymentName,
    tenant: usize,
    priority: Priority,
    tokens: u64,
}

/// All pools of a gateway.
#[derive(Clone, Debug, Default)]
pub struct AdmissionPoolSet {
    regions: BTreeMap<RegionIndex, BTreeMap<DeploymentName, AdmissionPool>>,
}

impl AdmissionPoolSet {
    /// Applies a report of a region: the queueing delays of the deployments that may have changed, `None` if the region serves
    /// it no more. Pools without requests, limits and delays are dropped, so the cost is that of the others.
    pub fn report<'a>(
        &mut self,
        region: RegionIndex,
        waits: impl IntoIterator<Item = (&'a DeploymentName, Option<QueueWaits>)>,
        now: Instant,
    ) {
        let pools = self.regions.entry(region).or_default();
        for (deployment, waits) in waits {
            match (pools.get_mut(deployment), waits) {
                (Some(pool), waits) => pool.waits = waits,
                (None, Some(waits)) if !waits.are_zero() => {
                    pools.entry(deployment.clone()).or_default().waits = Some(waits);
                }
                (None, _) => {}
            }
        }
        pools.retain(|_, pool| {
            pool.report(now);
            !pool.is_idle()
        });
    }

    /// Returns whether every pool admits everything.
    pub fn are_unlimited(&self) -> bool {
        self.regions.values().flat_map(BTreeMap::values).all(AdmissionPool::is_unlimited)
    }

    /// Checks a request at its head, when only a set of possible pools is known: it is shed if each of them would shed
    /// it.
    pub fn check_head<'a>(
        &mut self,
        pools: impl IntoIterator<Item = (RegionIndex, &'a DeploymentName)> + Clone,
        request: &AdmissionRequest,
        now: Instant,
    ) -> Result<(), Shed> {
        let mut earliest: Option<Shed> = None;
        for (region, deployment) in pools.clone() {
            let Some(shed) = self.rejection(region, deployment, request, now) else { return Ok(()) };
            earliest = earliest.filter(|earliest| earliest.retry_after <= shed.retry_after).or(Some(shed));
        }
        let Some(earliest) = earliest else { return Ok(()) };
        for (region, deployment) in pools {
            self.record_rejection(region, deployment, request, now);
        }
        Err(earliest)
    }

    /// Returns the rejection of a request by this pool, if it would be shed. Changes nothing.
    pub fn rejection(
        &self,
        region: RegionIndex,
        deployment: &DeploymentName,
        request: &AdmissionRequest,
        now: Instant,
    ) -> Option<Shed> {
        self.regions.get(&region)?.get(deployment)?.would_shed(request, now)
    }

    /// Records that this pool rejects a request which another one admits: an interactive one pauses the bulk of this pool.
    pub fn record_rejection(
        &mut self,
        region: RegionIndex,
        deployment: &DeploymentName,
        request: &AdmissionRequest,
        now: Instant,
    ) {
        if let Some(pool) = self.regions.get_mut(&region).and_then(|pools| pools.get_mut(deployment)) {
            pool.shed(request, now);
        }
    }

    /// Admits a request to this pool, or sheds it.
    pub fn enter(
        &mut self,
        region: RegionIndex,
        deployment: &DeploymentName,
        request: &AdmissionRequest,
        now: Instant,
    ) -> Result<PoolEntry, Shed> {
        let pools = self.regions.entry(region).or_default();
        if !pools.contains_key(deployment) {
            pools.insert(deployment.clone(), AdmissionPool::default());
        }
        let pool = pools.get_mut(deployment).expect("it was just inserted");
        if let Some(shed) = pool.would_shed(request, now) {
            pool.shed(request, now);
            return Err(shed);
        }
        pool.enter(request, now);
        let AdmissionRequest { tenant, weight: _, priority, tokens, left: _ } = *request;
        Ok(PoolEntry { region, deployment: deployment.clone(), tenant, priority, tokens })
    }

    /// Releases an admitted request, however it ended. Takes the value of [`AdmissionPoolSet::enter`], so that it is
    /// released once.
    pub fn leave(&mut self, entered: PoolEntry) {
        let PoolEntry { region, deployment, tenant, priority, tokens } = entered;
        match self.regions.get_mut(&region).and_then(|pools| pools.get_mut(&deployment)) {
            Some(pool) => pool.leave(tenant, priority, tokens),
            None => debug_assert!(false, "the pool of {deployment} is gone while a request is in flight"),
        }
    }
}

#[cfg(test)]
mod bookkeeping;
#[cfg(test)]
mod tests;
