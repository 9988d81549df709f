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
use scheduler_core::spoke::hold::{
    HoldDecision, HoldLimit, HoldPriority, HoldRejection, HoldRequest, HoldTicket, Release, ReleaseReason,
};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use supervision::{Mutex, MutexGuard};
use tokio::sync::{Notify, oneshot};

/// Everybody who waits.
pub(super) struct Hold {
    spoke: Arc<Mutex<Spoke>>,
    waiting: Mutex<BTreeMap<u64, oneshot::Sender<ReleaseReason>>>,
    /// Rung when the first request finds no replica.
    wake: Arc<Notify>,
    pub(super) metrics: HoldMetrics,
}

/// Somebody's place.
pub(super) struct Place<'a> {
    hold: &'a Hold,
    /// There until it is given back.
    ticket: Option<HoldTicket>,
    called: oneshot::Receiver<ReleaseReason>,
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
    pub(super) fn comes(&self, request: &Passing) -> Result<Option<Place<'_>>, HoldRejection> {
        let now = Instant::now();
        let hold_request = HoldRequest {
            deployment: &request.deployment,
            tenant: request.tenant.as_deref().unwrap_or_default(),
            priority: request.band,
            bytes: request.body.len() as u64,
            tokens: request.tokens,
            deadline: request.deadline,
            other_region_in: request.elsewhere,
        };
        let mut waiting = self.waiting();
        let fate = self.spoke.lock().hold_or_forward(&hold_request, now);
        let (ticket, wakes) = match fate {
            Ok(HoldDecision::Forward) => return Ok(None),
            Ok(HoldDecision::Held { ticket, needs_start: wakes }) => (ticket, wakes),
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

    fn count(&self, why: HoldRejection) {
        let by = match why {
            HoldRejection::NotProvisioned => NotHeldBy::NobodyStarts,
            HoldRejection::OtherRegion { .. } => NotHeldBy::Elsewhere,
            HoldRejection::PastDeadline { .. } => NotHeldBy::TooLate,
            HoldRejection::Full { limit: HoldLimit::TenantRequests, .. } => NotHeldBy::TenantRequests,
            HoldRejection::Full { limit: HoldLimit::TenantBytes, .. } => NotHeldBy::TenantBytes,
            HoldRejection::Full { limit: HoldLimit::Requests, .. } => NotHeldBy::Requests,
            HoldRejection::Full { limit: HoldLimit::Bytes, .. } => NotHeldBy::Bytes,
        };
        self.metrics.not_held.count(by);
    }

    /// Something may have changed: whoever has no reason to wait any longer is called.
    pub(super) fn call(&self) {
        let mut waiting = self.waiting();
        for Release { number, reason } in self.spoke.lock().release(Instant::now()) {
            // Whoever has a ticket listens until it is given back; one that is being dropped at this moment gives it back.
            if let Some(listens) = waiting.remove(&number) {
                listens.send(reason).ok();
            }
        }
    }

    pub(super) fn waiting(&self) -> MutexGuard<'_, BTreeMap<u64, oneshot::Sender<ReleaseReason>>> {
        self.waiting.lock()
    }
}

impl Place<'_> {
    /// Waits until it is called, or until `deadline`.
    pub(super) async fn wait(&mut self, deadline: Instant) -> Waited {
        match tokio::time::timeout_at(deadline.into(), &mut self.called).await {
            Ok(Ok(ReleaseReason::ReplicaReady { cold_start })) => Waited::Called { cold_start },
            // The other end is dropped only with the ingress.
            Ok(Ok(ReleaseReason::Unservable) | Err(_)) => Waited::Nothing,
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
            self.hold.spoke.lock().return_ticket(ticket);
        }
        self.hold.metrics.seconds.observe(self.since.elapsed());
        // What it held back may go now.
        self.hold.call();
    }
}

/// How urgent a request is, as its edge has decided.
pub(super) fn band(priority: Option<&str>) -> HoldPriority {
    if priority == Some("bulk") { HoldPriority::Bulk } else { HoldPriority::Interactive }
}
