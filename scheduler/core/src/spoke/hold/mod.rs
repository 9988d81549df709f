//! Hold queue: requests that wait for a replica that is not ready yet.
//!
//! A deployment at zero replicas has none for its first request. Common systems answer such a request with a 502 or a
//! timeout, or let it wait for an unknown time. Here each request gets one of four decisions at once, in this order:
//!
//! 1. **Failed**, if no replica can start (`super::failures`): waiting does not help, and another region may respond.
//! 2. **Other region**, if an allowed region has a ready replica and would respond sooner than one would be ready here.
//!    The region does not know the others; the gateway sends their expected response time
//!    ([`HoldRequest::other_region_in`]).
//! 3. **Held**, if a replica will be ready before the request's deadline, and there is capacity.
//! 4. **Rejected**, with the time after which to retry.
//!
//! Held requests are queued: interactive before bulk, then earliest deadline first; later requests for the same
//! deployment queue behind them. When a replica becomes ready, the queue is released gradually, so that the replica is
//! not overloaded: it is given the work of half a second at most, less if it has just become ready, and more with each
//! response (`ReplicaState::window`). The queue therefore advances with responses and needs no timer.
//!
//! The queue is bounded by requests and by bytes, in total and per tenant, so that a burst of one tenant fills only its
//! own share. Every ticket ends exactly once, by [`Spoke::return_ticket`], whether its request was released, timed out,
//! or lost its client (invariants 2 and 6).
//!
//! The obvious alternative, clients that retry until a replica is ready, delays the first response by up to the longest
//! pause between two retries, and every rejected retry is lost work at each hop.

mod queue;

use std::time::{Duration, Instant};

use super::Spoke;
pub(super) use queue::HoldQueue;
use regions::DeploymentName;
use regions::priority::Priority;
use replica_api::start_failure::StartFailure;

/// Maximum number of held requests. Each is a connection and a task, about 30 KiB with its buffers: 300 MB at most.
pub const HELD_MAX: usize = 10_000;
/// Maximum bytes of all held bodies: half of the ingress's body budget, so that requests that need not wait still have
/// capacity.
pub const HELD_BYTES_MAX: u64 = 256 << 20;
/// Share of both limits that one tenant may use.
const TENANT_PERCENT: usize = 10;
/// Lower bound of a tenant's bytes: the largest body, because no request of that size could be held otherwise.
const LARGEST_BODY_BYTES: u64 = 32 << 20;

/// Limits of the hold queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HoldLimits {
    /// Requests.
    pub requests: usize,
    /// Bytes of their bodies.
    pub bytes: u64,
    /// Requests of one tenant.
    pub tenant_requests: usize,
    /// Bytes of one tenant's bodies.
    pub tenant_bytes: u64,
}

impl HoldLimits {
    /// Limits of every region.
    pub const DEFAULT: HoldLimits = {
        let tenth = HELD_BYTES_MAX * TENANT_PERCENT as u64 / 100;
        let tenant_bytes = if tenth < LARGEST_BODY_BYTES { LARGEST_BODY_BYTES } else { tenth };
        let tenant_requests = HELD_MAX * TENANT_PERCENT / 100;
        HoldLimits { requests: HELD_MAX, bytes: HELD_BYTES_MAX, tenant_requests, tenant_bytes }
    };
}

/// Request that may have to wait.
#[derive(Clone, Copy, Debug)]
pub struct HoldRequest<'a> {
    /// Requested deployment.
    pub deployment: &'a DeploymentName,
    /// Tenant of the request; all requests without a known tenant count as one tenant.
    pub tenant: &'a str,
    /// Priority.
    pub priority: Priority,
    /// Bytes of the body.
    pub bytes: u64,
    /// Estimated tokens.
    pub tokens: u64,
    /// Deadline of the request.
    pub deadline: Instant,
    /// Expected response time of an allowed region with a ready replica, if there is one.
    pub other_region_in: Option<Duration>,
}

/// Decision about a request.
#[derive(Debug, PartialEq, Eq)]
pub enum HoldDecision {
    /// Forward it: a replica is ready, and no request is held for the deployment.
    Forward,
    /// Hold it until it is [released](Spoke::release).
    Held {
        /// Ticket, to be returned by [`Spoke::return_ticket`].
        ticket: HoldTicket,
        /// Whether it is the first request without a replica, so that the scaler must be notified.
        needs_start: bool,
    },
}

/// Position in the hold queue.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a ticket that is not returned occupies its position forever"]
pub struct HoldTicket {
    deployment: DeploymentName,
    position: QueuePosition,
}

impl HoldTicket {
    /// Returns the number by which the request is released.
    pub fn number(&self) -> u64 {
        self.position.number
    }
}

/// Reason for not holding a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HoldRejection {
    /// There is no replica, and nothing starts one.
    NotProvisioned,
    /// There is no replica, and none can start.
    Failed {
        /// Reason.
        reason: StartFailure,
    },
    /// A region with a ready replica responds sooner, or is the only one that can respond.
    OtherRegion {
        /// Time that it would have waited here.
        ready_in: Duration,
    },
    /// The deadline passes before a replica is ready.
    PastDeadline {
        /// Time that it would have waited here.
        ready_in: Duration,
    },
    /// A limit of the queue is reached.
    Full {
        /// The limit.
        limit: HoldLimit,
        /// Time that it would have waited here.
        ready_in: Duration,
    },
}

/// Limit of the hold queue, in the order of the checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum HoldLimit {
    /// Requests of one tenant.
    TenantRequests,
    /// Bytes of one tenant.
    TenantBytes,
    /// All requests.
    Requests,
    /// All bytes.
    Bytes,
}

/// Release of a held request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Release {
    /// Number of its ticket.
    pub number: u64,
    /// Reason of the release.
    pub reason: ReleaseReason,
}

/// Reason for releasing a held request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReleaseReason {
    /// A replica has capacity for it.
    ReplicaReady {
        /// Time from the first request without a replica until the replica was ready, if the request waited for it.
        cold_start: Option<Duration>,
    },
    /// No replica is being started any longer or can start, or the request is no longer allowed in this region.
    Unservable,
}

/// Held requests of a deployment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HeldTotals {
    /// Number of requests.
    pub requests: usize,
    /// Their estimated tokens.
    pub tokens: u64,
}

/// Position in the hold queue; the lowest is first. **The order of the fields is the policy.**
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct QueuePosition {
    priority: Priority,
    deadline: Instant,
    /// Tie-break by arrival.
    number: u64,
}

impl Spoke {
    /// Decides about a request; see the module documentation.
    ///
    /// # Errors
    ///
    /// The reason for not holding the request here.
    pub fn hold_or_forward(
        &mut self,
        request: &HoldRequest<'_>,
        now: Instant,
    ) -> Result<HoldDecision, HoldRejection> {
        let ready = self.serving(request.deployment, now).count();
        if ready > 0 && !self.hold_queue.has_waiting(request.deployment) {
            return Ok(HoldDecision::Forward);
        }
        if ready == 0
            && let Some(failed) = self.start_failure(request.deployment, now)
        {
            return Err(HoldRejection::Failed { reason: failed.failure.reason });
        }
        let replica_in =
            if ready > 0 { Some(Duration::ZERO) } else { self.ready_in(request.deployment, now) };
        let replica_in = replica_in.ok_or(HoldRejection::NotProvisioned)?;
        let before = self.hold_queue.tokens_before(request);
        let ready_in = replica_in.saturating_add(self.queue_time(request.deployment, before, ready));
        let left = request.deadline.saturating_duration_since(now);
        let other = request.other_region_in.filter(|other| *other < left);
        if other.is_some_and(|other| other < ready_in) {
            return Err(HoldRejection::OtherRegion { ready_in });
        }
        // A long queue is shortened by ordering more replicas; only a start time that exceeds the deadline is too long.
        let rejection = if replica_in >= left {
            HoldRejection::PastDeadline { ready_in }
        } else if let Some(limit) = self.hold_queue.exceeded_limit(request) {
            HoldRejection::Full { limit, ready_in }
        } else {
            let (ticket, needs_start) = self.hold_queue.push(request, ready > 0, now);
            self.peers.wakes += u64::from(needs_start);
            return Ok(HoldDecision::Held { ticket, needs_start });
        };
        // A slower response elsewhere is better than none.
        Err(if other.is_some() { HoldRejection::OtherRegion { ready_in } } else { rejection })
    }

    /// Returns the time that a new request of the lowest urgency would be held, for a deployment with this number of
    /// ready replicas; `None` if it would not wait, or if no replica is ready and none would be started or can start.
    pub(super) fn wait_estimate(
        &self,
        deployment: &DeploymentName,
        ready: usize,
        now: Instant,
    ) -> Option<Duration> {
        let replica_in = match ready {
            0 if self.start_failure(deployment, now).is_some() => return None,
            0 => self.ready_in(deployment, now)?,
            _ if self.hold_queue.has_waiting(deployment) => Duration::ZERO,
            _ => return None,
        };
        let queue = self.queue_time(deployment, self.hold_queue.held(deployment).tokens, ready);
        Some(replica_in.saturating_add(queue))
    }

    /// Returns the time that the replicas need for this many tokens; zero while their speed is unknown.
    fn queue_time(&self, deployment: &DeploymentName, tokens: u64, ready: usize) -> Duration {
        let Some(speed) = self.provisioning.speed(deployment) else { return Duration::ZERO };
        let replicas = (ready + self.provisioning_count(deployment)).max(1);
        Duration::try_from_secs_f64(tokens as f64 / (speed * replicas as f64)).unwrap_or(Duration::MAX)
    }

    /// Returns whether requests are held for this deployment. New requests must queue behind them.
    pub fn has_held_requests(&self, deployment: &DeploymentName) -> bool {
        self.hold_queue.has_waiting(deployment)
    }

    /// Returns whether any request is held.
    pub fn any_request_held(&self) -> bool {
        !self.hold_queue.is_empty()
    }

    /// Releases as many held requests as the ready replicas have capacity for, in order, and those that became
    /// unservable. Must be called after each change of either condition. A released request still has its ticket.
    pub fn release(&mut self, now: Instant) -> Vec<Release> {
        let mut releases = Vec::new();
        let unservable: Vec<_> =
            self.hold_queue.names().filter(|name| self.is_unservable(name, now)).cloned().collect();
        for name in unservable {
            self.hold_queue.release_unservable(&name, &mut releases);
        }
        while let Some(name) = self.next_release(now) {
            releases.push(self.hold_queue.release(&name, now));
        }
        releases
    }

    /// Returns the deployment whose first held request can be released. The order is global across deployments.
    fn next_release(&self, now: Instant) -> Option<DeploymentName> {
        let mut heads: Vec<_> = self.hold_queue.heads().collect();
        heads.sort_unstable_by_key(|(position, ..)| *position);
        let next = heads.into_iter().find(|(_, name, tokens)| self.has_capacity(name, *tokens, now));
        next.map(|(_, name, _)| name.clone())
    }

    /// Returns whether the ready replicas can take this many tokens. Requests that were released but not sent yet count
    /// for every replica; that state is short, and its end triggers the next release.
    fn has_capacity(&self, deployment: &DeploymentName, tokens: u64, now: Instant) -> bool {
        let mut capacity = None;
        for (_, replica) in self.serving(deployment, now) {
            let (window, backlog) = capacity.unwrap_or((0u64, 0u64));
            capacity = Some((
                window.saturating_add(replica.window()),
                backlog.saturating_add(replica.backlog_tokens()),
            ));
        }
        let released = self.hold_queue.released_tokens();
        // An idle replica takes a request of any size.
        capacity.is_some_and(|(window, backlog)| {
            let backlog = backlog.saturating_add(released);
            backlog == 0 || backlog.saturating_add(tokens) <= window
        })
    }

    fn is_unservable(&self, deployment: &DeploymentName, now: Instant) -> bool {
        let none_ready = || self.serving(deployment, now).next().is_none();
        // Held requests of a deployment that is no longer allowed here are unservable too.
        let cannot_start =
            || self.ready_in(deployment, now).is_none() || self.start_failure(deployment, now).is_some();
        self.forbids(deployment) || (none_ready() && cannot_start())
    }

    /// Returns the ticket of a request that was sent to a replica, timed out, or lost its client.
    ///
    /// # Panics
    ///
    /// Panics if the ticket was returned before. The type rules that out: returning consumes the ticket.
    #[expect(clippy::needless_pass_by_value, reason = "a ticket is returned only once")]
    pub fn return_ticket(&mut self, ticket: HoldTicket) {
        self.hold_queue.remove(&ticket);
    }

    /// Returns the held requests of a deployment.
    pub fn held(&self, deployment: &DeploymentName) -> HeldTotals {
        self.hold_queue.held(deployment)
    }

    /// Returns the number of all held requests and the bytes of their bodies.
    pub fn held_totals(&self) -> (usize, u64) {
        self.hold_queue.totals()
    }
}

#[cfg(test)]
mod tests;
