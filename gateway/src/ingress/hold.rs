//! Where requests wait for a replica that is not ready yet.
//!
//! `scheduler_core::spoke::hold` decides who waits and who is called; here is how somebody waits without asking again and
//! again: each has a place ([`Place`]), and whoever learns that something may have changed (a replica's probe, an answer that
//! made room, somebody who left, whoever starts replicas) has the line called at once ([`Hold::call`]). A place is given
//! back when it is dropped: also when its client has hung up.
//!
//! Who waits is locked before the spoke, so that nobody is called between getting a ticket and listening for its number.

use super::attempts::Passing;
use crate::metrics::{HoldMetrics, NotHeldBy};
use scheduler_core::spoke::Spoke;
use scheduler_core::spoke::hold::{Band, Bound, Call, CalledTo, Comes, Fate, NotHeld, Ticket};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use supervision::{Mutex, MutexGuard};
use tokio::sync::{Notify, oneshot};

/// Everybody who waits.
pub(super) struct Hold {
    spoke: Arc<Mutex<Spoke>>,
    waiting: Mutex<BTreeMap<u64, oneshot::Sender<CalledTo>>>,
    /// Rung when the first request finds no replica.
    wake: Arc<Notify>,
    pub(super) metrics: HoldMetrics,
}

/// Somebody's place.
pub(super) struct Place<'a> {
    hold: &'a Hold,
    /// There until it is given back.
    ticket: Option<Ticket>,
    called: oneshot::Receiver<CalledTo>,
    since: Instant,
}

/// How waiting ended.
pub(super) enum Waited {
    /// A replica has room.
    Called { cold_start: Option<Duration> },
    /// There is nothing to wait for any more.
    Nothing,
    /// It took too long.
    TooLong,
}

impl Hold {
    pub(super) fn new(spoke: Arc<Mutex<Spoke>>, wake: Arc<Notify>) -> Hold {
        Hold { spoke, waiting: Mutex::default(), wake, metrics: HoldMetrics::default() }
    }

    /// A place for a request, or none where it need not wait.
    pub(super) fn comes(&self, request: &Passing) -> Result<Option<Place<'_>>, NotHeld> {
        let now = Instant::now();
        let comes = Comes {
            deployment: &request.deployment,
            tenant: request.tenant.as_deref().unwrap_or_default(),
            band: request.band,
            bytes: request.body.len() as u64,
            tokens: request.tokens,
            deadline: request.deadline,
            elsewhere: request.elsewhere,
        };
        let mut waiting = self.waiting();
        let fate = self.spoke.lock().comes(&comes, now);
        let (ticket, wakes) = match fate {
            Ok(Fate::Now) => return Ok(None),
            Ok(Fate::Held { ticket, wakes }) => (ticket, wakes),
            Err(why) => {
                self.count(why);
                return Err(why);
            }
        };
        let (call, called) = oneshot::channel();
        waiting.insert(ticket.number(), call);
        drop(waiting);
        if wakes {
            self.metrics.wakes.add(1);
            self.wake.notify_one();
        }
        Ok(Some(Place { hold: self, ticket: Some(ticket), called, since: now }))
    }

    fn count(&self, why: NotHeld) {
        let by = match why {
            NotHeld::NobodyStarts => NotHeldBy::NobodyStarts,
            NotHeld::Elsewhere { .. } => NotHeldBy::Elsewhere,
            NotHeld::TooLate { .. } => NotHeldBy::TooLate,
            NotHeld::Full { bound: Bound::TenantRequests, .. } => NotHeldBy::TenantRequests,
            NotHeld::Full { bound: Bound::TenantBytes, .. } => NotHeldBy::TenantBytes,
            NotHeld::Full { bound: Bound::Requests, .. } => NotHeldBy::Requests,
            NotHeld::Full { bound: Bound::Bytes, .. } => NotHeldBy::Bytes,
        };
        self.metrics.not_held.count(by);
    }

    /// Something may have changed: whoever has no reason to wait any longer is called.
    pub(super) fn call(&self) {
        let mut waiting = self.waiting();
        for Call { number, to } in self.spoke.lock().call(Instant::now()) {
            // Whoever has a ticket listens until it is given back; one that is being dropped at this moment gives it back.
            if let Some(listens) = waiting.remove(&number) {
                listens.send(to).ok();
            }
        }
    }

    pub(super) fn waiting(&self) -> MutexGuard<'_, BTreeMap<u64, oneshot::Sender<CalledTo>>> {
        self.waiting.lock()
    }
}

impl Place<'_> {
    /// Waits until it is called, or until `deadline`.
    pub(super) async fn wait(&mut self, deadline: Instant) -> Waited {
        match tokio::time::timeout_at(deadline.into(), &mut self.called).await {
            Ok(Ok(CalledTo::Replica { cold_start })) => Waited::Called { cold_start },
            // The other end is dropped only with the ingress.
            Ok(Ok(CalledTo::Nothing) | Err(_)) => Waited::Nothing,
            Err(_) => Waited::TooLong,
        }
    }

    /// For how long it has been held.
    pub(super) fn held_for(&self) -> Duration {
        self.since.elapsed()
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let Some(ticket) = self.ticket.take() else { return };
        {
            let mut waiting = self.hold.waiting();
            waiting.remove(&ticket.number());
            self.hold.spoke.lock().left(ticket);
        }
        self.hold.metrics.seconds.observe(self.since.elapsed());
        // What it held back may go now.
        self.hold.call();
    }
}

/// How urgent a request is, as its edge has decided.
pub(super) fn band(priority: Option<&str>) -> Band {
    if priority == Some("bulk") { Band::Bulk } else { Band::Interactive }
}
