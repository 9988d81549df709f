//! The line: who waits, in what order, and how much of it there is.

use std::collections::BTreeMap;
use std::ops::Bound::{Excluded, Unbounded};
use std::time::{Duration, Instant};

use super::{Bound, Bounds, Call, CalledTo, Comes, Held, Ticket, Turn};
use crate::invariants;
use regions::DeploymentName;

/// Everybody who waits, by deployment.
#[derive(Debug)]
pub(in crate::spoke) struct Line {
    bounds: Bounds,
    queues: BTreeMap<DeploymentName, Queue>,
    tenants: BTreeMap<String, Share>,
    all: Share,
    /// Of those who were called and are not at a replica yet.
    called_tokens: u64,
    numbered: u64,
}

/// What somebody has of the room.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Share {
    pub(super) requests: usize,
    pub(super) bytes: u64,
}

/// Those who wait for one deployment.
#[derive(Debug, Default)]
struct Queue {
    waiting: BTreeMap<Turn, Waiting>,
    /// Of those.
    tokens: u64,
    /// Tokens of those who were called and have not left, by number.
    called: BTreeMap<u64, u64>,
    /// When the first of them found no replica.
    cold_since: Option<Instant>,
    /// How long it then took until there was one.
    cold_start: Option<Duration>,
}

/// Somebody who waits.
#[derive(Debug)]
pub(super) struct Waiting {
    tenant: String,
    bytes: u64,
    tokens: u64,
}

impl Default for Line {
    fn default() -> Line {
        Line::within(Bounds::USUAL)
    }
}

impl Share {
    fn with(self, bytes: u64) -> Share {
        Share { requests: self.requests + 1, bytes: self.bytes.saturating_add(bytes) }
    }

    fn without(self, bytes: u64) -> Share {
        Share { requests: self.requests - 1, bytes: self.bytes - bytes }
    }
}

impl Line {
    /// Nobody waits.
    pub(in crate::spoke) fn within(bounds: Bounds) -> Line {
        Line {
            bounds,
            queues: BTreeMap::new(),
            tenants: BTreeMap::new(),
            all: Share::default(),
            called_tokens: 0,
            numbered: 0,
        }
    }

    pub(super) fn waits(&self, deployment: &DeploymentName) -> bool {
        self.queues.get(deployment).is_some_and(|queue| !queue.waiting.is_empty())
    }

    /// The bound that one more would be past.
    pub(super) fn full(&self, comes: &Comes<'_>) -> Option<Bound> {
        let tenant = self.tenants.get(comes.tenant).copied().unwrap_or_default().with(comes.bytes);
        let all = self.all.with(comes.bytes);
        let Bounds { requests, bytes, tenant_requests, tenant_bytes } = self.bounds;
        [
            (tenant.requests > tenant_requests, Bound::TenantRequests),
            (tenant.bytes > tenant_bytes, Bound::TenantBytes),
            (all.requests > requests, Bound::Requests),
            (all.bytes > bytes, Bound::Bytes),
        ]
        .into_iter()
        .find_map(|(past, bound)| past.then_some(bound))
    }

    /// Takes a request in, for which there is room; whether somebody has to be told to start a replica.
    pub(super) fn enter(&mut self, comes: &Comes<'_>, ready: bool, now: Instant) -> (Ticket, bool) {
        let Comes { deployment, tenant, band, bytes, tokens, deadline, elsewhere: _ } = *comes;
        self.numbered += 1;
        let turn = Turn { band, deadline, number: self.numbered };
        if !self.queues.contains_key(deployment) {
            self.queues.insert(deployment.clone(), Queue::default());
        }
        let queue = self.queues.get_mut(deployment).expect("it has just been put there");
        // It is cold anew where the replica that some of them waited for has come and gone.
        let wakes = !ready && (queue.cold_since.is_none() || queue.cold_start.is_some());
        if wakes {
            (queue.cold_since, queue.cold_start) = (Some(now), None);
        }
        queue.waiting.insert(turn, Waiting { tenant: tenant.to_owned(), bytes, tokens });
        queue.tokens = queue.tokens.saturating_add(tokens);
        self.all = self.all.with(bytes);
        let share = self.tenants.entry(tenant.to_owned()).or_default();
        *share = share.with(bytes);
        invariants::held_within(self.all.requests, self.all.bytes, self.bounds.requests, self.bounds.bytes)
            .expect("there was room, or nobody would have been let in");
        (Ticket { deployment: deployment.clone(), turn }, wakes)
    }

    /// Tokens of those before whom a request would not go.
    pub(super) fn tokens_before(&self, comes: &Comes<'_>) -> u64 {
        let Some(queue) = self.queues.get(comes.deployment) else { return 0 };
        let turn = Turn { band: comes.band, deadline: comes.deadline, number: u64::MAX };
        // Whoever comes last has as a rule the latest deadline, and then there is nobody behind.
        let behind = queue.waiting.range((Excluded(turn), Unbounded)).map(|(_, waiting)| waiting.tokens);
        queue.tokens.saturating_sub(behind.fold(0, u64::saturating_add))
    }

    /// Deployments for which somebody waits, or was called and has not left.
    #[cfg(test)]
    pub(super) fn queues(&self) -> usize {
        self.queues.len()
    }

    /// Whether nobody waits for anything.
    pub(super) fn is_empty(&self) -> bool {
        self.all.requests == 0
    }

    /// The first in line of each deployment, with its tokens.
    pub(super) fn firsts(&self) -> impl Iterator<Item = (Turn, &DeploymentName, u64)> {
        self.queues.iter().filter_map(|(name, queue)| {
            let (turn, waiting) = queue.waiting.first_key_value()?;
            Some((*turn, name, waiting.tokens))
        })
    }

    /// Deployments for which somebody waits.
    pub(super) fn names(&self) -> impl Iterator<Item = &DeploymentName> {
        self.queues.iter().filter(|(_, queue)| !queue.waiting.is_empty()).map(|(name, _)| name)
    }

    pub(super) fn called_tokens(&self) -> u64 {
        self.called_tokens
    }

    /// The first in line of a deployment goes to a replica.
    pub(super) fn call(&mut self, deployment: &DeploymentName, now: Instant) -> Call {
        let queue = self.queues.get_mut(deployment).expect("somebody waits for it");
        let (turn, waiting) = queue.waiting.pop_first().expect("somebody waits for it");
        if let (Some(since), None) = (queue.cold_since, queue.cold_start) {
            queue.cold_start = Some(now.saturating_duration_since(since));
        }
        let to = CalledTo::Replica { cold_start: queue.cold_start };
        queue.tokens = queue.tokens.saturating_sub(waiting.tokens);
        queue.called.insert(turn.number, waiting.tokens);
        self.called_tokens = self.called_tokens.saturating_add(waiting.tokens);
        self.no_longer_held(&waiting);
        Call { number: turn.number, to }
    }

    /// Nobody in the line of a deployment has anything to wait for.
    pub(super) fn call_off(&mut self, deployment: &DeploymentName, calls: &mut Vec<Call>) {
        let Some(queue) = self.queues.get_mut(deployment) else { return };
        queue.tokens = 0;
        (queue.cold_since, queue.cold_start) = (None, None);
        let waiting = std::mem::take(&mut queue.waiting);
        queue.called.extend(waiting.keys().map(|turn| (turn.number, 0)));
        for (turn, waiting) in waiting {
            self.no_longer_held(&waiting);
            calls.push(Call { number: turn.number, to: CalledTo::Nothing });
        }
    }

    /// A place is given back.
    pub(super) fn leave(&mut self, ticket: &Ticket) {
        let Ticket { deployment, turn } = ticket;
        let queue = self.queues.get_mut(deployment).expect("whoever has a ticket is in line");
        match queue.waiting.remove(turn) {
            Some(waiting) => {
                queue.tokens = queue.tokens.saturating_sub(waiting.tokens);
                self.no_longer_held(&waiting);
            }
            None => {
                let tokens = queue.called.remove(&turn.number);
                let tokens = tokens.expect("a ticket is given back once (invariant 2, One fate)");
                self.called_tokens = self.called_tokens.saturating_sub(tokens);
            }
        }
        let over = |queue: &Queue| queue.waiting.is_empty() && queue.called.is_empty();
        if self.queues.get(deployment).is_some_and(over) {
            self.queues.remove(deployment);
        }
    }

    pub(super) fn held(&self, deployment: &DeploymentName) -> Held {
        let queue = self.queues.get(deployment);
        queue.map_or(Held::default(), |queue| Held { requests: queue.waiting.len(), tokens: queue.tokens })
    }

    pub(super) fn held_in_all(&self) -> (usize, u64) {
        (self.all.requests, self.all.bytes)
    }

    fn no_longer_held(&mut self, waiting: &Waiting) {
        self.all = self.all.without(waiting.bytes);
        let share = self.tenants.get_mut(&waiting.tenant).expect("whoever waits is counted");
        *share = share.without(waiting.bytes);
        if share.requests == 0 {
            self.tenants.remove(&waiting.tenant);
        }
    }
}
