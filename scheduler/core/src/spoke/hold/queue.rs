//! The line: who waits, in what order, and how much of it there is.

use std::collections::BTreeMap;
use std::ops::HoldLimit::{Excluded, Unbounded};
use std::time::{Duration, Instant};

use super::{HoldLimit, HoldLimits, Release, ReleaseReason, HoldRequest, HeldTotals, HoldTicket, QueuePosition};
use crate::invariants;
use regions::DeploymentName;

/// Everybody who waits, by deployment.
#[derive(Debug)]
pub(in crate::spoke) struct HoldQueue {
    limits: HoldLimits,
    queues: BTreeMap<DeploymentName, DeploymentQueue>,
    tenants: BTreeMap<String, HeldUsage>,
    all: HeldUsage,
    /// Of those who were released and are not at a replica yet.
    released_tokens: u64,
    next_number: u64,
}

/// What somebody has of the room.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct HeldUsage {
    pub(super) requests: usize,
    pub(super) bytes: u64,
}

/// Those who wait for one deployment.
#[derive(Debug, Default)]
struct DeploymentQueue {
    waiting: BTreeMap<QueuePosition, HeldRequest>,
    /// Of those.
    tokens: u64,
    /// Tokens of those who were released and have not left, by number.
    released: BTreeMap<u64, u64>,
    /// When the first of them found no replica.
    cold_since: Option<Instant>,
    /// How long it then took until there was one.
    cold_start: Option<Duration>,
}

/// Somebody who waits.
#[derive(Debug)]
pub(super) struct HeldRequest {
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
    /// Nobody waits.
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

    /// The bound that one more would be past.
    pub(super) fn full(&self, comes: &HoldRequest<'_>) -> Option<HoldLimit> {
        let tenant = self.tenants.get(comes.tenant).copied().unwrap_or_default().with(comes.bytes);
        let all = self.all.with(comes.bytes);
        let HoldLimits { requests, bytes, tenant_requests, tenant_bytes } = self.limits;
        [
            (tenant.requests > tenant_requests, HoldLimit::TenantRequests),
            (tenant.bytes > tenant_bytes, HoldLimit::TenantBytes),
            (all.requests > requests, HoldLimit::Requests),
            (all.bytes > bytes, HoldLimit::Bytes),
        ]
        .into_iter()
        .find_map(|(past, bound)| past.then_some(bound))
    }

    /// Takes a request in, for which there is room; whether somebody has to be told to start a replica.
    pub(super) fn push(&mut self, comes: &HoldRequest<'_>, ready: bool, now: Instant) -> (HoldTicket, bool) {
        let HoldRequest { deployment, tenant, priority, bytes, tokens, deadline, other_region_in: _ } = *comes;
        self.next_number += 1;
        let position = QueuePosition { priority, deadline, number: self.next_number };
        if !self.queues.contains_key(deployment) {
            self.queues.insert(deployment.clone(), DeploymentQueue::default());
        }
        let queue = self.queues.get_mut(deployment).expect("it has just been put there");
        // It is cold anew where the replica that some of them waited for has come and gone.
        let needs_start = !ready && (queue.cold_since.is_none() || queue.cold_start.is_some());
        if needs_start {
            (queue.cold_since, queue.cold_start) = (Some(now), None);
        }
        queue.waiting.insert(position, HeldRequest { tenant: tenant.to_owned(), bytes, tokens });
        queue.tokens = queue.tokens.saturating_add(tokens);
        self.all = self.all.with(bytes);
        let share = self.tenants.entry(tenant.to_owned()).or_default();
        *share = share.with(bytes);
        invariants::held_within(self.all.requests, self.all.bytes, self.limits.requests, self.limits.bytes)
            .expect("there was room, or nobody would have been let in");
        (HoldTicket { deployment: deployment.clone(), position }, needs_start)
    }

    /// Tokens of those before whom a request would not go.
    pub(super) fn tokens_before(&self, comes: &HoldRequest<'_>) -> u64 {
        let Some(queue) = self.queues.get(comes.deployment) else { return 0 };
        let position = QueuePosition { priority: comes.priority, deadline: comes.deadline, number: u64::MAX };
        // Whoever comes last has as a rule the latest deadline, and then there is nobody behind.
        let behind = queue.waiting.range((Excluded(position), Unbounded)).map(|(_, waiting)| waiting.tokens);
        queue.tokens.saturating_sub(behind.fold(0, u64::saturating_add))
    }

    /// Deployments for which somebody waits, or was released and has not left.
    #[cfg(test)]
    pub(super) fn queues(&self) -> usize {
        self.queues.len()
    }

    /// Whether nobody waits for anything.
    pub(super) fn is_empty(&self) -> bool {
        self.all.requests == 0
    }

    /// The first in line of each deployment, with its tokens.
    pub(super) fn heads(&self) -> impl Iterator<Item = (QueuePosition, &DeploymentName, u64)> {
        self.queues.iter().filter_map(|(name, queue)| {
            let (position, waiting) = queue.waiting.first_key_value()?;
            Some((*position, name, waiting.tokens))
        })
    }

    /// Deployments for which somebody waits.
    pub(super) fn names(&self) -> impl Iterator<Item = &DeploymentName> {
        self.queues.iter().filter(|(_, queue)| !queue.waiting.is_empty()).map(|(name, _)| name)
    }

    pub(super) fn released_tokens(&self) -> u64 {
        self.released_tokens
    }

    /// The first in line of a deployment goes to a replica.
    pub(super) fn release(&mut self, deployment: &DeploymentName, now: Instant) -> Release {
        let queue = self.queues.get_mut(deployment).expect("somebody waits for it");
        let (position, waiting) = queue.waiting.pop_first().expect("somebody waits for it");
        if let (Some(since), None) = (queue.cold_since, queue.cold_start) {
            queue.cold_start = Some(now.saturating_duration_since(since));
        }
        let to = ReleaseReason::Replica { cold_start: queue.cold_start };
        queue.tokens = queue.tokens.saturating_sub(waiting.tokens);
        queue.released.insert(position.number, waiting.tokens);
        self.released_tokens = self.released_tokens.saturating_add(waiting.tokens);
        self.release_usage(&waiting);
        Release { number: position.number, to }
    }

    /// Nobody in the line of a deployment has anything to wait for.
    pub(super) fn release_unservable(&mut self, deployment: &DeploymentName, releases: &mut Vec<Release>) {
        let Some(queue) = self.queues.get_mut(deployment) else { return };
        queue.tokens = 0;
        (queue.cold_since, queue.cold_start) = (None, None);
        let waiting = std::mem::take(&mut queue.waiting);
        queue.released.extend(waiting.keys().map(|position| (position.number, 0)));
        for (position, waiting) in waiting {
            self.release_usage(&waiting);
            releases.push(Release { number: position.number, to: ReleaseReason::Unservable });
        }
    }

    /// A place is given back.
    pub(super) fn leave(&mut self, ticket: &HoldTicket) {
        let HoldTicket { deployment, position } = ticket;
        let queue = self.queues.get_mut(deployment).expect("whoever has a ticket is in line");
        match queue.waiting.remove(position) {
            Some(waiting) => {
                queue.tokens = queue.tokens.saturating_sub(waiting.tokens);
                self.release_usage(&waiting);
            }
            None => {
                let tokens = queue.released.remove(&position.number);
                let tokens = tokens.expect("a ticket is given back once (invariant 2, One fate)");
                self.released_tokens = self.released_tokens.saturating_sub(tokens);
            }
        }
        let over = |queue: &DeploymentQueue| queue.waiting.is_empty() && queue.released.is_empty();
        if self.queues.get(deployment).is_some_and(over) {
            self.queues.remove(deployment);
        }
    }

    pub(super) fn held(&self, deployment: &DeploymentName) -> HeldTotals {
        let queue = self.queues.get(deployment);
        queue.map_or(HeldTotals::default(), |queue| HeldTotals { requests: queue.waiting.len(), tokens: queue.tokens })
    }

    pub(super) fn totals(&self) -> (usize, u64) {
        (self.all.requests, self.all.bytes)
    }

    fn release_usage(&mut self, waiting: &HeldRequest) {
        self.all = self.all.without(waiting.bytes);
        let share = self.tenants.get_mut(&waiting.tenant).expect("whoever waits is counted");
        *share = share.without(waiting.bytes);
        if share.requests == 0 {
            self.tenants.remove(&waiting.tenant);
        }
    }
}
