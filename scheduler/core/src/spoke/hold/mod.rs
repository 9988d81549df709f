//! Requests that wait for a replica which is not there yet.
//!
//! A deployment that nobody used has no replica, and the first who asks finds none. What the field does with him is what it
//! is complained of for: a 502, a time-out, or a wait of which nobody says how long. Here whoever comes is told one of
//! three things at once, in this order:
//!
//! 1. **OtherRegion**, if a region that may see it has a replica ready and answers sooner than one would be ready here. The
//!    region does not know the others; whoever asks tells what they would take ([`HoldRequest::other_region_in`]).
//! 2. **HeldTotals**, if a replica will be ready before its deadline, and there is room.
//! 3. **Refused**, with the time after which to come back.
//!
//! Who is held is in a line, interactive before bulk and in either the earliest deadline first, with everybody else who
//! comes for that deployment behind them. When a replica is ready the line is let go, not all at once, which would drown it:
//! a replica is given what it does in half a second at most, and one that has just become ready less than that, and more
//! with everything that it answers (`Replica::window`). So the line moves when an answer makes room, and nobody looks at a
//! clock.
//!
//! Room is bounded by requests, by bytes, and in both by tenant: a burst of one may fill its own share and no more. Every
//! ticket ends once, by [`Spoke::left`], whether it was released, gave up, or was nobody's any more (invariants 2 and 6).
//!
//! The obvious other way, to let callers ask again until a replica is ready, makes the first answer as late as the longest
//! pause between two of their questions, and what they ask meanwhile is lost work at every hop.

mod line;

use std::time::{Duration, Instant};

use super::Spoke;
pub(super) use line::HoldQueue;
use regions::DeploymentName;

/// Requests that are held at once. Each is a connection and a task, some 30 KiB with its buffers: 300 MB at most.
pub const HELD_MAX: usize = 10_000;
/// Bytes of all the bodies that are held: half of what an ingress keeps of bodies at all, so that whoever needs not wait
/// still has room.
pub const HELD_BYTES_MAX: u64 = 256 << 20;
/// Of both one tenant may have so much.
const TENANT_PERCENT: usize = 10;
/// And of bytes as many as the largest body has, or nobody could send one.
const LARGEST_BODY_BYTES: u64 = 32 << 20;

/// How much is held at most.
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
    /// Those of every region.
    pub const DEFAULT: HoldLimits = {
        let tenth = HELD_BYTES_MAX * TENANT_PERCENT as u64 / 100;
        let tenant_bytes = if tenth < LARGEST_BODY_BYTES { LARGEST_BODY_BYTES } else { tenth };
        let tenant_requests = HELD_MAX * TENANT_PERCENT / 100;
        HoldLimits { requests: HELD_MAX, bytes: HELD_BYTES_MAX, tenant_requests, tenant_bytes }
    };
}

/// Who goes first. The order of the variants is the preference.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum HoldPriority {
    /// Somebody waits for it.
    Interactive,
    /// It wants throughput.
    Bulk,
}

/// A request that may have to wait.
#[derive(Clone, Copy, Debug)]
pub struct HoldRequest<'a> {
    /// For what.
    pub deployment: &'a DeploymentName,
    /// Whose; those of whom it is not known are one.
    pub tenant: &'a str,
    /// How urgent.
    pub priority: HoldPriority,
    /// Of its body.
    pub bytes: u64,
    /// By estimate.
    pub tokens: u64,
    /// When its caller is gone.
    pub deadline: Instant,
    /// In what time a region that may see it and has a replica ready would answer, if there is one.
    pub other_region_in: Option<Duration>,
}

/// What is to be done with a request.
#[derive(Debug, PartialEq, Eq)]
pub enum HoldDecision {
    /// A replica is ready, and nobody waits for it.
    Forward,
    /// It waits until it is [released](Spoke::release).
    Held {
        /// Its place, to be given back by [`Spoke::left`].
        ticket: HoldTicket,
        /// It is the first that finds no replica: whoever starts one is to be told.
        needs_start: bool,
    },
}

/// A place in the line.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a place that is not given back is taken for ever"]
pub struct HoldTicket {
    deployment: DeploymentName,
    position: QueuePosition,
}

impl HoldTicket {
    /// By which it is released.
    pub fn number(&self) -> u64 {
        self.position.number
    }
}

/// Why a request is not held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HoldRejection {
    /// There is no replica, and nobody starts one.
    NotProvisioned,
    /// A region that has one ready answers sooner, or is the only one that can.
    OtherRegion {
        /// How long it would have waited here.
        ready_in: Duration,
    },
    /// Its caller would be gone.
    PastDeadline {
        /// How long it would have waited here.
        ready_in: Duration,
    },
    /// As much is held as may be.
    Full {
        /// Of what.
        limit: HoldLimit,
        /// How long it would have waited here.
        ready_in: Duration,
    },
}

/// One of the limits. The order is that in which they are looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum HoldLimit {
    /// The requests of one tenant.
    TenantRequests,
    /// The bytes of one tenant.
    TenantBytes,
    /// All requests.
    Requests,
    /// All bytes.
    Bytes,
}

/// Whoever holds this ticket waits no longer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Release {
    /// The ticket's number.
    pub number: u64,
    /// What for.
    pub to: ReleaseReason,
}

/// What a request is released to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReleaseReason {
    /// A replica has room for it.
    Replica {
        /// How long that took to become ready, from when the first found none; for those of whom it is known.
        cold_start: Option<Duration>,
    },
    /// Nobody starts a replica any more, or it may not be seen here any more.
    Unservable,
}

/// How much waits for a deployment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HeldTotals {
    /// Requests.
    pub requests: usize,
    /// Their tokens, by estimate.
    pub tokens: u64,
}

/// A place in the line; less is earlier. **The order of the fields is the policy.**
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct QueuePosition {
    priority: HoldPriority,
    deadline: Instant,
    /// Of equals whoever came first.
    number: u64,
}

impl Spoke {
    /// What is to be done with a request: see the head of this file.
    ///
    /// # Errors
    ///
    /// When it is to go other_region_in, or to come back.
    pub fn comes(&mut self, comes: &HoldRequest<'_>, now: Instant) -> Result<HoldDecision, HoldRejection> {
        let ready = self.serving(comes.deployment, now).count();
        if ready > 0 && !self.held.has_waiting(comes.deployment) {
            return Ok(HoldDecision::Forward);
        }
        let replica_in = if ready > 0 { Some(Duration::ZERO) } else { self.ready_in(comes.deployment, now) };
        let replica_in = replica_in.ok_or(HoldRejection::NotProvisioned)?;
        let before = self.held.tokens_before(comes);
        let ready_in = replica_in.saturating_add(self.queue_time(comes.deployment, before, ready));
        let left = comes.deadline.saturating_duration_since(now);
        let there = comes.other_region_in.filter(|there| *there < left);
        if there.is_some_and(|there| there < ready_in) {
            return Err(HoldRejection::OtherRegion { ready_in });
        }
        // A line that is too long today is what more replicas are ordered for; only what no order can hurry is too late.
        let refused = if replica_in >= left {
            HoldRejection::PastDeadline { ready_in }
        } else if let Some(bound) = self.held.full(comes) {
            HoldRejection::Full { limit, ready_in }
        } else {
            let (ticket, needs_start) = self.held.push(comes, ready > 0, now);
            return Ok(HoldDecision::Held { ticket, needs_start });
        };
        // Later than it would have been here is better than not at all.
        Err(if there.is_some() { HoldRejection::OtherRegion { ready_in } } else { refused })
    }

    /// How long a request that comes now would wait for a replica, with the least urgent; `None` where one is ready and
    /// nobody waits, and where nobody starts one.
    pub(super) fn wait_estimate(&self, deployment: &DeploymentName, now: Instant) -> Option<Duration> {
        let ready = self.serving(deployment, now).count();
        let replica_in = match ready {
            0 => self.ready_in(deployment, now)?,
            _ if self.held.has_waiting(deployment) => Duration::ZERO,
            _ => return None,
        };
        let line = self.queue_time(deployment, self.held.held(deployment).tokens, ready);
        Some(replica_in.saturating_add(line))
    }

    /// How long so much takes from when there is a replica; nothing where it is not known how fast one is.
    fn queue_time(&self, deployment: &DeploymentName, tokens: u64, ready: usize) -> Duration {
        let Some(speed) = self.provisioning.speed(deployment) else { return Duration::ZERO };
        let replicas = (ready + self.ordered(deployment)).max(1);
        Duration::try_from_secs_f64(tokens as f64 / (speed * replicas as f64)).unwrap_or(Duration::MAX)
    }

    /// Whether somebody waits for a replica of this deployment, before whom nobody else is to go.
    pub fn has_held_requests(&self, deployment: &DeploymentName) -> bool {
        self.held.has_waiting(deployment)
    }

    /// Whether anybody waits at all.
    pub fn any_request_held(&self) -> bool {
        !self.held.is_empty()
    }

    /// Those who wait no longer: as many as the replicas that are ready have room for, in their order, and those for whom
    /// nobody starts one. To be asked whenever one of that may have changed. Whoever is released still holds its ticket.
    pub fn release(&mut self, now: Instant) -> Vec<Release> {
        let mut releases = Vec::new();
        let lost: Vec<_> = self.held.names().filter(|name| self.is_unservable(name, now)).cloned().collect();
        for name in lost {
            self.held.release_unservable(&name, &mut releases);
        }
        while let Some(name) = self.next_release(now) {
            releases.push(self.held.release(&name, now));
        }
        releases
    }

    /// The deployment whose first in line has room. Between deployments the line is one.
    fn next_release(&self, now: Instant) -> Option<DeploymentName> {
        let mut heads: Vec<_> = self.held.heads().collect();
        heads.sort_unstable_by_key(|(position, ..)| *position);
        let next = heads.into_iter().find(|(_, name, tokens)| self.has_capacity(name, *tokens, now));
        next.map(|(_, name, _)| name.clone())
    }

    /// Whether the replicas that are ready can be given so much more. Whoever was released and is on its way to one counts,
    /// whichever it goes to: that lasts for a moment, and its end is a reason to ask again.
    fn has_capacity(&self, deployment: &DeploymentName, tokens: u64, now: Instant) -> bool {
        let mut room = None;
        for (_, replica) in self.serving(deployment, now) {
            let (window, before) = room.unwrap_or((0u64, 0u64));
            room = Some((
                window.saturating_add(replica.window()),
                before.saturating_add(replica.backlog_tokens()),
            ));
        }
        let released = self.held.released_tokens();
        // However large one is, somebody who has nothing to do takes it.
        room.is_some_and(|(window, before)| {
            let before = before.saturating_add(released);
            before == 0 || before.saturating_add(tokens) <= window
        })
    }

    fn is_unservable(&self, deployment: &DeploymentName, now: Instant) -> bool {
        let nobody = || self.serving(deployment, now).next().is_none();
        // Or what they wait for is not allowed here any longer.
        self.forbids(deployment) || (nobody() && self.ready_in(deployment, now).is_none())
    }

    /// A ticket is given back: whoever had it was sent to a replica, or gave up.
    ///
    /// # Panics
    ///
    /// When it was given back before, which cannot be: it is gone then.
    #[expect(clippy::needless_pass_by_value, reason = "a ticket is good once")]
    pub fn return_ticket(&mut self, ticket: HoldTicket) {
        self.held.leave(&ticket);
    }

    /// What waits for a deployment.
    pub fn held(&self, deployment: &DeploymentName) -> HeldTotals {
        self.held.held(deployment)
    }

    /// Requests that wait, over all deployments, and the bytes of their bodies.
    pub fn totals(&self) -> (usize, u64) {
        self.held.totals()
    }
}

#[cfg(test)]
mod tests;
