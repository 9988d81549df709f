//! Queue of held requests: order, limits, and totals.

use std::collections::BTreeMap;
use std::ops::Bound::{Excluded, Unbounded};
use std::time::{Duration, Instant};

use super::{
    HeldTotals, HoldLimit, HoldLimits, HoldRequest, HoldTicket, QueuePosition, Release, ReleaseReason,
};
use crate::invariants;
use regions::DeploymentName;

/// Held requests, by deployment.
#[derive(Debug)]
pub(in crate::spoke) struct HoldQueue {
    limits: HoldLimits,
    queues: BTreeMap<DeploymentName, DeploymentQueue>,
    tenants: BTreeMap<String, HeldUsage>,
    all: HeldUsage,
    /// Tokens of requests that were released and have not reached a replica yet.
    released_tokens: u64,
    next_number: u64,
}

/// Use of the queue's limits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct HeldUsage {
    pub(super) requests: usize,
    pub(super) bytes: u64,
}

/// Held requests of one deployment.
#[derive(Debug, Default)]
struct DeploymentQueue {
    waiting: BTreeMap<QueuePosition, QueuedRequest>,
    /// Their tokens.
    tokens: u64,
    /// Tokens of released requests whose tickets have not been returned, by number.
    released: BTreeMap<u64, u64>,
    /// Arrival of the first request without a replica.
    cold_since: Option<Instant>,
    /// Time from then until a replica was ready.
    cold_start: Option<Duration>,
}

/// Held request.
#[derive(Debug)]
pub(super) struct QueuedRequest {
    tenant: String,
    bytes: u64,
    tokens: u64,
}

impl Default for HoldQueue {
    fn default() -> HoldQueue {
        HoldQueue::within(HoldLimits::DEFAULT)
    }
}

impl HeldUsage {
    fn with(self, bytes: u64) -> HeldUsage {
        HeldUsage { requests: self.requests + 1, bytes: self.bytes.saturating_add(bytes) }
    }

    fn without(self, bytes: u64) -> HeldUsage {
        HeldUsage { requests: self.requests - 1, bytes: self.bytes - bytes }
    }
}

impl HoldQueue {
    /// Creates an empty queue.
    pub(in crate::spoke) fn within(limits: HoldLimits) -> HoldQueue {
        HoldQueue {
            limits,
            queues: BTreeMap::new(),
            tenants: BTreeMap::new(),
            all: HeldUsage::default(),
            released_tokens: 0,
            next_number: 0,
        }
    }

    pub(super) fn has_waiting(&self, deployment: &DeploymentName) -> bool {
        self.queues.get(deployment).is_some_and(|queue| !queue.waiting.is_empty())
    }

    /// Returns the limit that one more request would exceed, if any.
    pub(super) fn exceeded_limit(&self, request: &HoldRequest<'_>) -> Option<HoldLimit> {
        let tenant = self.tenants.get(request.tenant).copied().unwrap_or_default().with(request.bytes);
        let all = self.all.with(request.bytes);
        let HoldLimits { requests, bytes, tenant_requests, tenant_bytes } = self.limits;
        [
            (tenant.requests > tenant_requests, HoldLimit::TenantRequests),
            (tenant.bytes > tenant_bytes, HoldLimit::TenantBytes),
            (all.requests > requests, HoldLimit::Requests),
            (all.bytes > bytes, HoldLimit::Bytes),
        ]
        .into_iter()
        .find_map(|(exceeded, limit)| exceeded.then_some(limit))
    }

    /// Adds a request within the limits. Returns its ticket, and whether the scaler must be notified to start a
    /// replica.
    pub(super) fn push(
        &mut self,
        request: &HoldRequest<'_>,
        ready: bool,
        now: Instant,
    ) -> (HoldTicket, bool) {
        let HoldRequest { deployment, tenant, priority, bytes, tokens, deadline, other_region_in: _ } =
            *request;
        self.next_number += 1;
        let position = QueuePosition { priority, deadline, number: self.next_number };
        if !self.queues.contains_key(deployment) {
            self.queues.insert(deployment.clone(), DeploymentQueue::default());
        }
        let queue = self.queues.get_mut(deployment).expect("it has just been inserted");
        // It is a new cold start if the replica that earlier requests waited for has been removed again.
        let needs_start = !ready && (queue.cold_since.is_none() || queue.cold_start.is_some());
        if needs_start {
            (queue.cold_since, queue.cold_start) = (Some(now), None);
        }
        queue.waiting.insert(position, QueuedRequest { tenant: tenant.to_owned(), bytes, tokens });
        queue.tokens = queue.tokens.saturating_add(tokens);
        self.all = self.all.with(bytes);
        let usage = self.tenants.entry(tenant.to_owned()).or_default();
        *usage = usage.with(bytes);
        invariants::held_within(self.all.requests, self.all.bytes, self.limits.requests, self.limits.bytes)
            .expect("the limits were checked before");
        (HoldTicket { deployment: deployment.clone(), position }, needs_start)
    }

    /// Returns the tokens of the held requests that precede this one.
    pub(super) fn tokens_before(&self, request: &HoldRequest<'_>) -> u64 {
        let Some(queue) = self.queues.get(request.deployment) else { return 0 };
        let position =
            QueuePosition { priority: request.priority, deadline: request.deadline, number: u64::MAX };
        // The latest arrival usually has the latest deadline, so this range is usually empty.
        let behind = queue.waiting.range((Excluded(position), Unbounded)).map(|(_, waiting)| waiting.tokens);
        queue.tokens.saturating_sub(behind.fold(0, u64::saturating_add))
    }

    /// Returns the number of deployments with held requests or unreturned tickets.
    #[cfg(test)]
    pub(super) fn queues(&self) -> usize {
        self.queues.len()
    }

    /// Returns whether no request is held.
    pub(super) fn is_empty(&self) -> bool {
        self.all.requests == 0
    }

    /// Returns the first request of each deployment, with its tokens.
    pub(super) fn heads(&self) -> impl Iterator<Item = (QueuePosition, &DeploymentName, u64)> {
        self.queues.iter().filter_map(|(name, queue)| {
            let (position, waiting) = queue.waiting.first_key_value()?;
            Some((*position, name, waiting.tokens))
        })
    }

    /// Returns the deployments with held requests.
    pub(super) fn names(&self) -> impl Iterator<Item = &DeploymentName> {
        self.queues.iter().filter(|(_, queue)| !queue.waiting.is_empty()).map(|(name, _)| name)
    }

    pub(super) fn released_tokens(&self) -> u64 {
        self.released_tokens
    }

    /// Releases the first request of a deployment to a replica.
    pub(super) fn release(&mut self, deployment: &DeploymentName, now: Instant) -> Release {
        let queue = self.queues.get_mut(deployment).expect("a request is held for it");
        let (position, waiting) = queue.waiting.pop_first().expect("a request is held for it");
        if let (Some(since), None) = (queue.cold_since, queue.cold_start) {
            queue.cold_start = Some(now.saturating_duration_since(since));
        }
        let reason = ReleaseReason::ReplicaReady { cold_start: queue.cold_start };
        queue.tokens = queue.tokens.saturating_sub(waiting.tokens);
        queue.released.insert(position.number, waiting.tokens);
        self.released_tokens = self.released_tokens.saturating_add(waiting.tokens);
        self.release_usage(&waiting);
        Release { number: position.number, reason }
    }

    /// Releases all requests of a deployment that became unservable.
    pub(super) fn release_unservable(&mut self, deployment: &DeploymentName, releases: &mut Vec<Release>) {
        let Some(queue) = self.queues.get_mut(deployment) else { return };
        queue.tokens = 0;
        (queue.cold_since, queue.cold_start) = (None, None);
        let waiting = std::mem::take(&mut queue.waiting);
        queue.released.extend(waiting.keys().map(|position| (position.number, 0)));
        for (position, waiting) in waiting {
            self.release_usage(&waiting);
            releases.push(Release { number: position.number, reason: ReleaseReason::Unservable });
        }
    }

    /// Removes the request of a returned ticket.
    pub(super) fn remove(&mut self, ticket: &HoldTicket) {
        let HoldTicket { deployment, position } = ticket;
        let queue = self.queues.get_mut(deployment).expect("a ticket belongs to a queue");
        match queue.waiting.remove(position) {
            Some(waiting) => {
                queue.tokens = queue.tokens.saturating_sub(waiting.tokens);
                self.release_usage(&waiting);
            }
            None => {
                let tokens = queue.released.remove(&position.number);
                let tokens = tokens.expect("a ticket is returned once (invariant 2, One outcome)");
                self.released_tokens = self.released_tokens.saturating_sub(tokens);
            }
        }
        let is_empty = |queue: &DeploymentQueue| queue.waiting.is_empty() && queue.released.is_empty();
        if self.queues.get(deployment).is_some_and(is_empty) {
            self.queues.remove(deployment);
        }
    }

    pub(super) fn held(&self, deployment: &DeploymentName) -> HeldTotals {
        let queue = self.queues.get(deployment);
        queue.map_or(HeldTotals::default(), |queue| HeldTotals {
            requests: queue.waiting.len(),
            tokens: queue.tokens,
        })
    }

    pub(super) fn totals(&self) -> (usize, u64) {
        (self.all.requests, self.all.bytes)
    }

    fn release_usage(&mut self, waiting: &QueuedRequest) {
        self.all = self.all.without(waiting.bytes);
        let usage = self.tenants.get_mut(&waiting.tenant).expect("a held request is counted");
        *usage = usage.without(waiting.bytes);
        if usage.requests == 0 {
            self.tenants.remove(&waiting.tenant);
        }
    }
}
