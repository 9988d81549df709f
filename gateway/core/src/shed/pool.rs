//! One deployment in one region, as one gateway sees it: what is in flight there, of whom, and who is turned away.

use super::limit::Limit;
use super::{Ask, Reason, Shed, Waits};
use crate::priority::Priority;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// How long a lookup may wait in a region that this gateway has to itself: a person in front of a search box waits for
/// about a second.
const INTERACTIVE_WAIT: Duration = Duration::from_secs(1);
/// How long a backfill may: a third of the time that a request has by default, so that what is taken in is finished.
const BULK_WAIT: Duration = Duration::from_secs(10);
/// When several tenants share a priority, a queue is what one of them does to the others, and may be this part of it only.
const CONTENDED: u32 = 4;
/// How long bulk stays out after a lookup was shed: the slack within which the two count as one moment (invariant 8).
pub const BULK_PAUSE: Duration = Duration::from_secs(1);
/// A tenant counts as one who shares for so long after it last asked: a caller that sends one lookup after another is
/// not gone between two of them.
const ACTIVE_FOR: Duration = Duration::from_secs(1);
/// The least that anybody is told to wait: by then the region has reported again.
const RETRY_AFTER_MIN: Duration = Duration::from_millis(200);
/// The longest: a queue of this length says that something else is wrong, and somebody may be mending it.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(60);

/// What one tenant has in flight.
#[derive(Clone, Copy, Debug)]
struct Held {
    /// Admitted requests that have not left. The entry is kept by this count and never by tokens: a request can cost none
    /// (`/info` has no inputs), and its entry must still be there when it leaves.
    requests: u64,
    tokens: u64,
    weight: u64,
    asked: Instant,
}

impl Held {
    fn is_active(&self, now: Instant) -> bool {
        self.tokens > 0 || now.saturating_duration_since(self.asked) < ACTIVE_FOR
    }

    /// Whether the entry must be kept.
    fn is_needed(&self, now: Instant) -> bool {
        self.requests > 0 || self.is_active(now)
    }
}

/// What of one priority is in flight.
#[derive(Clone, Debug, Default)]
struct Side {
    limit: Limit,
    /// Tokens.
    in_flight: u64,
    /// By the places of the tenants; those that are idle are dropped with every report.
    tenants: BTreeMap<usize, Held>,
}

impl Side {
    fn contended(&self, now: Instant) -> bool {
        self.tenants.values().filter(|held| held.is_active(now)).count() > 1
    }

    fn target(&self, priority: Priority, now: Instant) -> Duration {
        let alone = match priority {
            Priority::Interactive => INTERACTIVE_WAIT,
            Priority::Bulk => BULK_WAIT,
        };
        if self.contended(now) { alone / CONTENDED } else { alone }
    }

    /// Whether taking `tokens` more would put the tenant over its share: the part that its weight is of the weights of all
    /// who share. Of the limit; or of what is in flight, while that is more: in a queue that somebody else has made, who
    /// sends little has much in flight as well. One request at a time is always within.
    fn over_share(&self, ask: &Ask, limit: u64, now: Instant) -> bool {
        let others = self.tenants.iter().filter(|(place, held)| **place != ask.tenant && held.is_active(now));
        let weights: u64 = ask.weight.saturating_add(others.map(|(_, held)| held.weight).sum());
        let held = self.tenants.get(&ask.tenant).map_or(0, |held| held.tokens);
        let share =
            u128::from(limit.max(self.in_flight)) * u128::from(ask.weight) / u128::from(weights.max(1));
        held > 0 && u128::from(held.saturating_add(ask.tokens)) > share
    }
}

/// See the module.
#[derive(Clone, Debug, Default)]
pub(super) struct Pool {
    interactive: Side,
    bulk: Side,
    bulk_closed_until: Option<Instant>,
}

impl Pool {
    fn side(&self, priority: Priority) -> &Side {
        match priority {
            Priority::Interactive => &self.interactive,
            Priority::Bulk => &self.bulk,
        }
    }

    fn side_mut(&mut self, priority: Priority) -> &mut Side {
        match priority {
            Priority::Interactive => &mut self.interactive,
            Priority::Bulk => &mut self.bulk,
        }
    }

    pub(super) fn heard(&mut self, waits: Waits, now: Instant) {
        for (priority, wait) in [(Priority::Interactive, waits.interactive), (Priority::Bulk, waits.bulk)] {
            let side = self.side_mut(priority);
            side.tenants.retain(|_, held| held.is_needed(now));
            let target = side.target(priority, now);
            side.limit.heard(wait, target, side.in_flight);
        }
        self.bulk_closed_until = self.bulk_closed_until.filter(|until| now < *until);
    }

    /// Whether everything would be let in but for callers with less patience than a report takes to come.
    pub(super) fn is_calm(&self) -> bool {
        let calm = |side: &Side| {
            side.limit.tokens().is_none() && side.limit.wait().is_none_or(|wait| wait <= RETRY_AFTER_MIN)
        };
        self.bulk_closed_until.is_none() && calm(&self.interactive) && calm(&self.bulk)
    }

    /// Whether no request is in flight.
    pub(super) fn is_empty(&self) -> bool {
        self.requests() == 0
    }

    /// Requests in flight.
    pub(super) fn requests(&self) -> u64 {
        let of = |side: &Side| side.tenants.values().map(|held| held.requests).sum::<u64>();
        of(&self.interactive) + of(&self.bulk)
    }

    /// Whether a request would be turned away, and why.
    pub(super) fn would_shed(&self, ask: &Ask, now: Instant) -> Option<Shed> {
        let side = self.side(ask.priority);
        let wait = side.limit.wait().unwrap_or_default();
        let closed = self.bulk_closed_until.filter(|until| ask.priority == Priority::Bulk && now < *until);
        let limit = side.limit.tokens().unwrap_or(u64::MAX);
        let over = side.in_flight > 0 && side.in_flight.saturating_add(ask.tokens) > limit;
        let (reason, helps_in) = if let Some(until) = closed {
            (Reason::LookupsFirst, until.saturating_duration_since(now))
        } else if wait > ask.left {
            (Reason::TooLate, wait - ask.left)
        } else if over && side.over_share(ask, limit, now) {
            let reason = if side.contended(now) { Reason::OverShare } else { Reason::NoRoom };
            (reason, wait.saturating_sub(side.target(ask.priority, now)))
        } else {
            return None;
        };
        Some(Shed { reason, wait, retry_after: helps_in.clamp(RETRY_AFTER_MIN, RETRY_AFTER_MAX) })
    }

    /// A request was turned away.
    pub(super) fn shed(&mut self, ask: &Ask, now: Instant) {
        self.asked(ask, now);
        if ask.priority == Priority::Interactive {
            self.bulk_closed_until = Some(now + BULK_PAUSE);
        }
    }

    /// A request is let in.
    pub(super) fn enter(&mut self, ask: &Ask, now: Instant) {
        let held = self.asked(ask, now);
        held.requests += 1;
        held.tokens = held.tokens.saturating_add(ask.tokens);
        let side = self.side_mut(ask.priority);
        side.in_flight = side.in_flight.saturating_add(ask.tokens);
    }

    /// One that was let in is over, however it ended. Nothing here can fail: this runs where a request is dropped, under the
    /// lock of all pools.
    pub(super) fn leave(&mut self, tenant: usize, priority: Priority, tokens: u64) {
        let side = self.side_mut(priority);
        let Some(held) = side.tenants.get_mut(&tenant).filter(|held| held.requests > 0) else {
            debug_assert!(false, "the entry of tenant {tenant} is gone while a request is in flight");
            return;
        };
        held.requests -= 1;
        held.tokens = held.tokens.saturating_sub(tokens);
        side.in_flight = side.in_flight.saturating_sub(tokens);
    }

    fn asked(&mut self, ask: &Ask, now: Instant) -> &mut Held {
        let Ask { tenant, weight, priority, tokens: _, left: _ } = *ask;
        let held = self.side_mut(priority).tenants.entry(tenant).or_insert(Held {
            requests: 0,
            tokens: 0,
            weight,
            asked: now,
        });
        held.asked = now;
        held
    }
}
