//! Admission pool of one deployment in one region, as seen by one gateway: tokens in flight by tenant, and the decision
//! to shed.

use super::limit::Limit;
use super::{AdmissionRequest, QueueWaits, Shed, ShedReason};
use replica_api::priority::Priority;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Target queueing delay of interactive requests in a region that this gateway uses alone: a person in front of a
/// search box waits for about a second.
const INTERACTIVE_WAIT: Duration = Duration::from_secs(1);
/// Target queueing delay of bulk: a third of the default timeout of a request, so that admitted requests are finished.
const BULK_WAIT: Duration = Duration::from_secs(10);
/// Divisor of the target when several tenants share a priority, because a queue is then the delay that one causes to
/// the others.
const CONTENDED: u32 = 4;
/// Pause of bulk after an interactive request was shed: the slack within which the two count as one moment (invariant
/// 8).
pub const BULK_PAUSE: Duration = Duration::from_secs(1);
/// Time after its last request for which a tenant counts as active: a caller that sends one request after another stays
/// active between two of them.
const ACTIVE_FOR: Duration = Duration::from_secs(1);
/// Minimum retry delay: by then the region has reported again.
const RETRY_AFTER_MIN: Duration = Duration::from_millis(200);
/// Maximum retry delay: a queue of this length has another cause, which may be removed in the meantime.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(60);

/// Requests of one tenant in flight.
#[derive(Clone, Copy, Debug)]
struct TenantLoad {
    /// Admitted requests that have not ended. The entry is kept by this count and never by tokens: a request can cost
    /// none (`/info` has no inputs), and its entry must still exist when it ends.
    requests: u64,
    tokens: u64,
    weight: u64,
    last_request: Instant,
}

impl TenantLoad {
    fn is_active(&self, now: Instant) -> bool {
        self.tokens > 0 || now.saturating_duration_since(self.last_request) < ACTIVE_FOR
    }

    /// Returns whether the entry must be kept.
    fn is_needed(&self, now: Instant) -> bool {
        self.requests > 0 || self.is_active(now)
    }
}

/// Requests of one priority in flight.
#[derive(Clone, Debug, Default)]
struct PriorityUsage {
    limit: Limit,
    /// Tokens.
    in_flight: u64,
    /// By tenant index; idle tenants are dropped with every report.
    tenants: BTreeMap<usize, TenantLoad>,
}

impl PriorityUsage {
    fn is_contended(&self, now: Instant) -> bool {
        self.tenants.values().filter(|load| load.is_active(now)).count() > 1
    }

    fn target(&self, priority: Priority, now: Instant) -> Duration {
        let uncontended = match priority {
            Priority::Interactive => INTERACTIVE_WAIT,
            Priority::Bulk => BULK_WAIT,
        };
        if self.is_contended(now) { uncontended / CONTENDED } else { uncontended }
    }

    /// Returns whether `tokens` more would put the tenant over its share: the part that its weight is of the weights of
    /// all active tenants. Of the limit; or of the tokens in flight, while they are more: in a queue that another
    /// tenant has caused, a tenant with few requests has many in flight as well. One request at a time is always within
    /// the share.
    fn exceeds_share(&self, request: &AdmissionRequest, limit: u64, now: Instant) -> bool {
        let others =
            self.tenants.iter().filter(|(index, load)| **index != request.tenant && load.is_active(now));
        let weights: u64 = request.weight.saturating_add(others.map(|(_, load)| load.weight).sum());
        let load = self.tenants.get(&request.tenant).map_or(0, |load| load.tokens);
        let share =
            u128::from(limit.max(self.in_flight)) * u128::from(request.weight) / u128::from(weights.max(1));
        load > 0 && u128::from(load.saturating_add(request.tokens)) > share
    }
}

/// Admission pool of one deployment in one region.
#[derive(Clone, Debug, Default)]
pub(super) struct AdmissionPool {
    interactive: PriorityUsage,
    bulk: PriorityUsage,
    bulk_paused_until: Option<Instant>,
    /// Queueing delays by the last report; `None` if the region does not serve the deployment, or has not reported it.
    pub(super) waits: Option<QueueWaits>,
}

impl AdmissionPool {
    fn usage(&self, priority: Priority) -> &PriorityUsage {
        match priority {
            Priority::Interactive => &self.interactive,
            Priority::Bulk => &self.bulk,
        }
    }

    fn usage_mut(&mut self, priority: Priority) -> &mut PriorityUsage {
        match priority {
            Priority::Interactive => &mut self.interactive,
            Priority::Bulk => &mut self.bulk,
        }
    }

    /// Applies a report with the current delays. The limits of a deployment that is not served stay as they are.
    pub(super) fn report(&mut self, now: Instant) {
        let Some(waits) = self.waits else { return };
        for (priority, wait) in [(Priority::Interactive, waits.interactive), (Priority::Bulk, waits.bulk)] {
            let usage = self.usage_mut(priority);
            usage.tenants.retain(|_, load| load.is_needed(now));
            let target = usage.target(priority, now);
            usage.limit.report(wait, target, usage.in_flight);
        }
        self.bulk_paused_until = self.bulk_paused_until.filter(|until| now < *until);
    }

    /// Returns whether everything is admitted, except for requests with less time left than the report period.
    pub(super) fn is_unlimited(&self) -> bool {
        let is_unlimited = |usage: &PriorityUsage| {
            usage.limit.tokens().is_none() && usage.limit.wait().is_none_or(|wait| wait <= RETRY_AFTER_MIN)
        };
        self.bulk_paused_until.is_none() && is_unlimited(&self.interactive) && is_unlimited(&self.bulk)
    }

    /// Returns whether it is as good as a new one. A deployment that is not served has no limits to keep.
    pub(super) fn is_idle(&self) -> bool {
        let is_idle = |usage: &PriorityUsage| usage.tenants.is_empty() && usage.limit.is_idle();
        match self.waits {
            None => self.is_empty(),
            Some(_) => self.bulk_paused_until.is_none() && is_idle(&self.interactive) && is_idle(&self.bulk),
        }
    }

    /// Returns whether no request is in flight.
    pub(super) fn is_empty(&self) -> bool {
        self.requests() == 0
    }

    /// Returns the number of requests in flight.
    pub(super) fn requests(&self) -> u64 {
        let of = |usage: &PriorityUsage| usage.tenants.values().map(|load| load.requests).sum::<u64>();
        of(&self.interactive) + of(&self.bulk)
    }

    /// Returns the shedding decision for a request; `None` if it would be admitted.
    pub(super) fn would_shed(&self, request: &AdmissionRequest, now: Instant) -> Option<Shed> {
        let usage = self.usage(request.priority);
        let wait = usage.limit.wait().unwrap_or_default();
        let paused =
            self.bulk_paused_until.filter(|until| request.priority == Priority::Bulk && now < *until);
        let limit = usage.limit.tokens().unwrap_or(u64::MAX);
        let exceeds_limit = usage.in_flight > 0 && usage.in_flight.saturating_add(request.tokens) > limit;
        let (reason, retry_after) = if let Some(until) = paused {
            (ShedReason::BulkPaused, until.saturating_duration_since(now))
        } else if wait > request.left {
            (ShedReason::DeadlineTooShort, wait - request.left)
        } else if exceeds_limit && usage.exceeds_share(request, limit, now) {
            let reason = if usage.is_contended(now) { ShedReason::OverShare } else { ShedReason::NoCapacity };
            (reason, wait.saturating_sub(usage.target(request.priority, now)))
        } else {
            return None;
        };
        Some(Shed { reason, wait, retry_after: retry_after.clamp(RETRY_AFTER_MIN, RETRY_AFTER_MAX) })
    }

    /// Records a request that was shed.
    pub(super) fn shed(&mut self, request: &AdmissionRequest, now: Instant) {
        self.active_tenant(request, now);
        if request.priority == Priority::Interactive {
            self.bulk_paused_until = Some(now + BULK_PAUSE);
        }
    }

    /// Records an admitted request.
    pub(super) fn enter(&mut self, request: &AdmissionRequest, now: Instant) {
        let load = self.active_tenant(request, now);
        load.requests += 1;
        load.tokens = load.tokens.saturating_add(request.tokens);
        let usage = self.usage_mut(request.priority);
        usage.in_flight = usage.in_flight.saturating_add(request.tokens);
    }

    /// Releases an admitted request, however it ended. This must not panic: it runs when a request is dropped, under
    /// the lock of all pools.
    pub(super) fn leave(&mut self, tenant: usize, priority: Priority, tokens: u64) {
        let usage = self.usage_mut(priority);
        let Some(load) = usage.tenants.get_mut(&tenant).filter(|load| load.requests > 0) else {
            debug_assert!(false, "the entry of tenant {tenant} is gone while a request is in flight");
            return;
        };
        load.requests -= 1;
        load.tokens = load.tokens.saturating_sub(tokens);
        usage.in_flight = usage.in_flight.saturating_sub(tokens);
    }

    fn active_tenant(&mut self, request: &AdmissionRequest, now: Instant) -> &mut TenantLoad {
        let AdmissionRequest { tenant, weight, priority, tokens: _, left: _ } = *request;
        let load = self.usage_mut(priority).tenants.entry(tenant).or_insert(TenantLoad {
            requests: 0,
            tokens: 0,
            weight,
            last_request: now,
        });
        load.last_request = now;
        load
    }
}
