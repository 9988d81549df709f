//! Who is turned away when there is too much for all, before a body is read and again when it is known what is in it.
//!
//! A *pool* is one deployment in one region. Each region reports how long a request would wait in its queues, by priority;
//! this gateway knows what it has in flight there, and of whom. From the two comes a limit on what may be in
//! flight (see `limit`), and when it is reached, in this order:
//!
//! 1. **Bulk before lookups** (invariant 8, *Bands*). A lookup is shed only together with the bulk of its pool, which stays
//!    out for [`BULK_PAUSE`] after it. So nobody waits for an answer that somebody's backfill has taken.
//! 2. **Whoever has more than its share.** The share of a tenant is the part of the limit that its weight is of the weights
//!    of all who are there; what others leave unused is anybody's. Who is within its share is let in though the limit is
//!    reached, so an aggressor sheds itself and not its neighbours. One request at a time is within anybody's share.
//! 3. **What would come too late anyway**: a request that would wait longer than its caller.
//!
//! Shares are of tokens in flight and not of requests or of rates: a request of two thousand texts is not one of one word,
//! and what is in flight is rate times duration, the very thing that a queue consists of. A pool is keyed by where a request
//! would go first; if it goes on from there, the next region's own queue bound is what holds.

mod limit;
mod pool;

pub use pool::BULK_PAUSE;

use crate::priority::Priority;
use pool::Pool;
use regions::id::DeploymentName;
use regions::set::RegionIndex;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// What a region reports of one deployment; nothing where it does not know.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Waits {
    /// How long a new lookup would wait.
    pub interactive: Option<Duration>,
    /// How long new bulk would wait: behind everything.
    pub bulk: Option<Duration>,
}

impl Waits {
    /// From what waits, in tokens, and the speed. Speeds come as fractions over the wire; a region whose speed is not
    /// known yet says 0.
    pub fn of(lookups: Option<u64>, all: u64, tokens_per_second: f64) -> Waits {
        let wait = |tokens: u64| {
            let seconds = (tokens_per_second > 0.0).then(|| tokens as f64 / tokens_per_second)?;
            Duration::try_from_secs_f64(seconds).ok()
        };
        Waits { interactive: lookups.and_then(wait), bulk: wait(all) }
    }
}

/// A request, as far as this is concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ask {
    /// The place of its tenant.
    pub tenant: usize,
    /// Its tenant's weight.
    pub weight: u64,
    /// The priority that it travels in.
    pub priority: Priority,
    /// What it has, or the least that it can have.
    pub tokens: u64,
    /// How long its caller will still wait.
    pub left: Duration,
}

/// Why a request is turned away. The order is that in which the reasons are looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Reason {
    /// It is bulk, and lookups are being shed.
    LookupsFirst,
    /// Its caller would no longer be there.
    TooLate,
    /// Its tenant has more in flight than its share.
    OverShare,
    /// There is no room, and nobody to share it with.
    NoRoom,
}

impl Reason {
    /// All of them, in their order.
    pub const ALL: [Reason; 4] = [Reason::LookupsFirst, Reason::TooLate, Reason::OverShare, Reason::NoRoom];

    /// Its name in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Reason::LookupsFirst => "lookups_first",
            Reason::TooLate => "too_late",
            Reason::OverShare => "over_share",
            Reason::NoRoom => "no_room",
        }
    }
}

/// A request is turned away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shed {
    /// Why.
    pub reason: Reason,
    /// How long it would have waited, by the region's last report.
    pub wait: Duration,
    /// When it should be right again, if nothing else comes: at the measured speed.
    pub retry_after: Duration,
}

/// What was let in, to be told of when it is over.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "what is never left stays in flight for ever"]
pub struct Entered {
    region: RegionIndex,
    deployment: DeploymentName,
    tenant: usize,
    priority: Priority,
    tokens: u64,
}

/// All pools of a gateway.
#[derive(Clone, Debug, Default)]
pub struct Pools {
    regions: BTreeMap<RegionIndex, BTreeMap<DeploymentName, Pool>>,
}

impl Pools {
    /// A region has reported, on all that it serves.
    pub fn heard(
        &mut self,
        region: RegionIndex,
        waits: impl IntoIterator<Item = (DeploymentName, Waits)>,
        now: Instant,
    ) {
        let pools = self.regions.entry(region).or_default();
        let mut served = BTreeMap::new();
        for (deployment, waits) in waits {
            let mut pool = pools.remove(&deployment).unwrap_or_default();
            pool.heard(waits, now);
            served.insert(deployment, pool);
        }
        // What is no longer served is forgotten when it has left.
        served.extend(std::mem::take(pools).into_iter().filter(|(_, pool)| !pool.is_empty()));
        *pools = served;
    }

    /// Whether everything would be let in everywhere.
    pub fn are_calm(&self) -> bool {
        self.regions.values().flat_map(BTreeMap::values).all(Pool::is_calm)
    }

    /// At the head of a request, which would go to one of these pools, it is not known which: it is turned away if each of
    /// them would turn it away.
    pub fn at_the_head<'a>(
        &mut self,
        pools: impl IntoIterator<Item = (RegionIndex, &'a DeploymentName)> + Clone,
        ask: &Ask,
        now: Instant,
    ) -> Result<(), Shed> {
        let mut soonest: Option<Shed> = None;
        for (region, deployment) in pools.clone() {
            let pool = self.regions.get(&region).and_then(|pools| pools.get(deployment));
            let Some(shed) = pool.and_then(|pool| pool.would_shed(ask, now)) else { return Ok(()) };
            soonest = soonest.filter(|soonest| soonest.retry_after <= shed.retry_after).or(Some(shed));
        }
        let Some(soonest) = soonest else { return Ok(()) };
        for (region, deployment) in pools {
            if let Some(pool) = self.regions.get_mut(&region).and_then(|pools| pools.get_mut(deployment)) {
                pool.shed(ask, now);
            }
        }
        Err(soonest)
    }

    /// Lets a request in that would go to this pool, or turns it away.
    pub fn enter(
        &mut self,
        region: RegionIndex,
        deployment: &DeploymentName,
        ask: &Ask,
        now: Instant,
    ) -> Result<Entered, Shed> {
        let pools = self.regions.entry(region).or_default();
        if !pools.contains_key(deployment) {
            pools.insert(deployment.clone(), Pool::default());
        }
        let pool = pools.get_mut(deployment).expect("it has just been put there");
        if let Some(shed) = pool.would_shed(ask, now) {
            pool.shed(ask, now);
            return Err(shed);
        }
        pool.enter(ask, now);
        let Ask { tenant, weight: _, priority, tokens, left: _ } = *ask;
        Ok(Entered { region, deployment: deployment.clone(), tenant, priority, tokens })
    }

    /// A request that was let in is over, however it ended. Takes what [`Pools::enter`] gave, so that no request leaves twice.
    pub fn leave(&mut self, entered: Entered) {
        let Entered { region, deployment, tenant, priority, tokens } = entered;
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
