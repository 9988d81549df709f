//! Held requests: they wait for a replica that is not ready yet.
//!
//! `scheduler_core::spoke::hold` decides which requests are held and released; this module makes a request wait without
//! polling: each held request has a [`HoldGuard`], and every event that may release requests (a replica's probe, a
//! response that frees capacity, a request that leaves, the scaler) calls [`Hold::call`] at once. The hold ends when
//! the guard is dropped, also when the client disconnects.
//!
//! The lock of the waiters is taken before that of the spoke, so that no ticket is released between its issue and the
//! registration of its waiter.

use super::request::ForwardedRequest;
use crate::metrics::{HoldMetrics, NotHeldReason};
use regions::DeploymentName;
use replica_api::start_failure::StartFailure;
use scheduler_core::spoke::Spoke;
use scheduler_core::spoke::hold::{
    HoldDecision, HoldLimit, HoldRejection, HoldRequest, HoldTicket, Release, ReleaseReason,
};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use supervision::{Mutex, MutexGuard};
use telemetry::context::TraceId;
use tokio::sync::{Notify, oneshot};

/// Held requests of a region.
pub(super) struct Hold {
    spoke: Arc<Mutex<Spoke>>,
    waiting: Mutex<BTreeMap<u64, oneshot::Sender<ReleaseReason>>>,
    /// Signal to the scaler: a first request found no replica.
    wake: Arc<Notify>,
    /// The same signal to the exchange with the scaler at another spoke.
    pub(super) woken: Notify,
    pub(super) metrics: HoldMetrics,
}

/// Held request, until this is dropped.
pub(super) struct HoldGuard<'a> {
    hold: &'a Hold,
    /// `Some` until it is returned.
    ticket: Option<HoldTicket>,
    released: oneshot::Receiver<ReleaseReason>,
    since: Instant,
    /// Trace of the request, if it was sampled.
    trace: Option<TraceId>,
}

impl Hold {
    pub(super) fn new(spoke: Arc<Mutex<Spoke>>, wake: Arc<Notify>) -> Hold {
        Hold { spoke, waiting: Mutex::default(), wake, woken: Notify::new(), metrics: HoldMetrics::default() }
    }

    /// Holds a request, whose trace is `trace` if it was sampled; `None` if it need not wait.
    pub(super) fn enter(
        &self,
        request: &ForwardedRequest,
        trace: Option<TraceId>,
    ) -> Result<Option<HoldGuard<'_>>, HoldRejection> {
        let now = Instant::now();
        let hold_request = HoldRequest {
            deployment: &request.deployment,
            tenant: request.tenant.as_deref().unwrap_or_default(),
            priority: request.priority,
            bytes: request.body.bytes.len() as u64,
            tokens: request.tokens,
            deadline: request.deadline,
            other_region_in: request.elsewhere,
        };
        let mut waiting = self.waiting();
        let fate = self.spoke.lock().hold_or_forward(&hold_request, now);
        let (ticket, wakes) = match fate {
            Ok(HoldDecision::Forward) => return Ok(None),
            Ok(HoldDecision::Held { ticket, needs_start: wakes }) => (ticket, wakes),
            Err(rejection) => {
                self.count(rejection);
                return Err(rejection);
            }
        };
        let (release, released) = oneshot::channel();
        waiting.insert(ticket.number(), release);
        drop(waiting);
        if wakes {
            self.metrics.wakes.add(1);
            self.wake.notify_one();
            self.woken.notify_waiters();
        }
        Ok(Some(HoldGuard { hold: self, ticket: Some(ticket), released, since: now, trace }))
    }

    /// Returns the reason if a deployment has failed in this region.
    pub(super) fn start_failure(&self, deployment: &DeploymentName) -> Option<StartFailure> {
        let spoke = self.spoke.lock();
        spoke.start_failure(deployment, Instant::now()).map(|failed| failed.failure.reason)
    }

    fn count(&self, rejection: HoldRejection) {
        let by = match rejection {
            HoldRejection::NotProvisioned => NotHeldReason::NoScaler,
            HoldRejection::Failed { .. } => NotHeldReason::Failed,
            HoldRejection::OtherRegion { .. } => NotHeldReason::OtherRegion,
            HoldRejection::PastDeadline { .. } => NotHeldReason::Deadline,
            HoldRejection::Full { limit: HoldLimit::TenantRequests, .. } => NotHeldReason::TenantRequests,
            HoldRejection::Full { limit: HoldLimit::TenantBytes, .. } => NotHeldReason::TenantBytes,
            HoldRejection::Full { limit: HoldLimit::Requests, .. } => NotHeldReason::Requests,
            HoldRejection::Full { limit: HoldLimit::Bytes, .. } => NotHeldReason::Bytes,
        };
        self.metrics.not_held.count(by);
    }

    /// Releases the requests that need not wait any longer. Called when something may have changed.
    pub(super) fn call(&self) {
        let mut waiting = self.waiting();
        for Release { number, reason } in self.spoke.lock().release(Instant::now()) {
            // A ticket has a waiter until it is returned; one that is being dropped at this moment returns it.
            if let Some(waiter) = waiting.remove(&number) {
                waiter.send(reason).ok();
            }
        }
    }

    pub(super) fn waiting(&self) -> MutexGuard<'_, BTreeMap<u64, oneshot::Sender<ReleaseReason>>> {
        self.waiting.lock()
    }
}

impl HoldGuard<'_> {
    /// Waits until the request is released; `None` if its deadline has passed.
    pub(super) async fn wait(&mut self, deadline: Instant) -> Option<ReleaseReason> {
        let released = tokio::time::timeout_at(deadline.into(), &mut self.released).await.ok()?;
        // The sender is dropped only with the ingress.
        Some(released.unwrap_or(ReleaseReason::Unservable))
    }

    /// Returns the time for which it has been held.
    pub(super) fn held_for(&self) -> Duration {
        self.since.elapsed()
    }
}

impl Drop for HoldGuard<'_> {
    fn drop(&mut self) {
        let Some(ticket) = self.ticket.take() else { return };
        {
            let mut waiting = self.hold.waiting();
            waiting.remove(&ticket.number());
            self.hold.spoke.lock().return_ticket(ticket);
        }
        let now = Instant::now();
        let exemplar = self.trace.map(|trace| telemetry::exemplar(trace, now));
        self.hold.metrics.seconds.observe_traced(now.saturating_duration_since(self.since), exemplar);
        // Requests queued behind it may be released now.
        self.hold.call();
    }
}
