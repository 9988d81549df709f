//! State of one replica, as its spoke knows it.
//!
//! The backlog is extrapolated: the last status is the baseline, and the spoke adds what it has sent since and
//! subtracts what has ended. The status counts the requests of all clients in real tokens; the extrapolation counts the
//! spoke's own requests, without delay, in tokens estimated before tokenization. Estimation errors, and requests whose
//! end was not reported, are corrected by the next status.

use std::time::{Duration, Instant};

use super::ReplicaStatus;
use crate::scale::start_failures::ReplicaStartState;
use regions::{DeploymentName, HostPort, ReportedModel};
use scheduler_api::report::DISPATCH_AHEAD;
use scheduler_api::start_failure::FailedModel;

/// Maximum age of a status: five poll intervals.
pub const STATUS_AGE_MAX: Duration = Duration::from_secs(1);

/// Time without contact after which a replica counts as frozen. A replica that computes on all cores of a shared
/// machine was observed to report nothing for 2 s while it responded to every request.
pub const SILENCE_MAX: Duration = Duration::from_secs(3);

/// Tokens given to a replica that has just become ready: a batch or two. Its first responses come from cold caches.
pub const RAMP_TOKENS: u64 = 1024;

/// Maximum tokens given at a time to a replica of unknown speed: far below the million tokens that a replica queues by
/// default before it rejects requests.
const UNMEASURED_TOKENS_MAX: u64 = 32 << 10;

/// State of one replica, as its spoke knows it.
#[derive(Debug)]
pub(super) struct ReplicaState {
    endpoint: HostPort,
    /// Last status.
    status: Option<ReplicaStatus>,
    /// Time of the last contact, successful or not.
    last_contact: Option<Instant>,
    /// It has failed since the last status.
    failed: bool,
    /// Estimated tokens of requests that were sent to it and have not ended.
    outstanding: u64,
    /// The same, at the time of the last status.
    outstanding_at_status: u64,
    /// Requests that were sent to it and have not ended.
    in_flight: u32,
    /// It finishes its requests and gets no new ones.
    is_draining: bool,
    /// Tokens of its responses since it became ready.
    responded_tokens: u64,
    /// Expected end of the download of its model, if it reports one.
    download_ends_at: Option<Instant>,
    /// It waits for another process on its machine that pulls its model, as it reports.
    waits_for_pull: bool,
}

impl ReplicaState {
    pub(super) fn new(endpoint: HostPort) -> ReplicaState {
        ReplicaState {
            endpoint,
            status: None,
            last_contact: None,
            failed: false,
            outstanding: 0,
            outstanding_at_status: 0,
            in_flight: 0,
            is_draining: false,
            responded_tokens: 0,
            download_ends_at: None,
            waits_for_pull: false,
        }
    }

    pub(super) fn endpoint(&self) -> &HostPort {
        &self.endpoint
    }

    pub(super) fn observe(&mut self, status: ReplicaStatus, now: Instant) {
        if !self.is_ready() {
            self.responded_tokens = 0;
        }
        self.status = Some(status);
        self.last_contact = Some(now);
        self.failed = false;
        self.outstanding_at_status = self.outstanding;
    }

    pub(super) fn failed(&mut self, now: Instant) {
        self.last_contact = Some(now);
        self.failed = true;
        self.download_ends_at = None;
        self.waits_for_pull = false;
    }

    /// Records the remaining time of the download of its model; `None` if it downloads none.
    pub(super) fn set_download(&mut self, left: Option<Duration>, now: Instant) {
        self.download_ends_at = left.and_then(|left| now.checked_add(left));
    }

    /// Records whether it waits for another process on its machine that pulls its model.
    pub(super) fn set_waits_for_pull(&mut self, waits: bool) {
        self.waits_for_pull = waits;
    }

    /// Returns the remaining time of the download of its model, if it is not ready and will serve `deployment`.
    pub(super) fn download_left(&self, deployment: &DeploymentName, now: Instant) -> Option<Duration> {
        let ends_at = self.download_ends_at.filter(|_| !self.is_draining && !self.is_ready())?;
        let status = self.status.as_ref().filter(|status| !self.failed && !status.draining)?;
        status.names.contains(deployment).then(|| ends_at.saturating_duration_since(now))
    }

    /// Records a timeout: no response, and no refused connection.
    pub(super) fn timed_out(&mut self, now: Instant) {
        if self
            .last_contact
            .is_none_or(|last_contact| now.saturating_duration_since(last_contact) > SILENCE_MAX)
        {
            self.failed = true;
        }
    }

    pub(super) fn sent(&mut self, tokens: u64) {
        self.outstanding = self.outstanding.saturating_add(tokens);
        self.in_flight = self.in_flight.saturating_add(1);
    }

    pub(super) fn ended(&mut self, tokens: u64) {
        self.outstanding = self.outstanding.saturating_sub(tokens);
        self.in_flight = self.in_flight.saturating_sub(1);
    }

    pub(super) fn in_flight(&self) -> u32 {
        self.in_flight
    }

    pub(super) fn set_draining(&mut self, draining: bool) {
        self.is_draining = draining;
    }

    pub(super) fn is_draining(&self) -> bool {
        self.is_draining
    }

    /// Returns whether there has been no contact yet.
    pub(super) fn is_pending(&self) -> bool {
        self.last_contact.is_none()
    }

    /// Records a response to a request of this many tokens.
    pub(super) fn responded(&mut self, tokens: u64) {
        self.responded_tokens = self.responded_tokens.saturating_add(tokens);
    }

    /// Returns the maximum backlog, in tokens, up to which held requests are sent to this replica. It doubles with each
    /// round of responses, up to the work of [`DISPATCH_AHEAD`].
    pub(super) fn window(&self) -> u64 {
        let ahead = |speed: f64| (speed * DISPATCH_AHEAD.as_secs_f64()) as u64;
        let limit = self.speed().map_or(UNMEASURED_TOKENS_MAX, ahead).max(RAMP_TOKENS);
        RAMP_TOKENS.saturating_add(self.responded_tokens).min(limit)
    }

    /// Returns whether it has failed since its last status.
    pub(super) fn has_failed(&self) -> bool {
        self.failed
    }

    fn is_ready(&self) -> bool {
        !self.failed && self.status.as_ref().is_some_and(|status| status.ready && !status.draining)
    }

    /// Returns the deployments that it serves, by its last status.
    pub(super) fn names(&self) -> impl Iterator<Item = &DeploymentName> {
        self.status.iter().flat_map(|status| &status.names)
    }

    /// Returns whether it is ready and serves `deployment`, by its last status.
    pub(super) fn serves(&self, deployment: &DeploymentName) -> bool {
        self.accepts_requests()
            && self.status.as_ref().is_some_and(|status| status.names.contains(deployment))
    }

    /// Returns the model that it runs, by its last status, if reported.
    pub(super) fn model(&self) -> Option<&ReportedModel> {
        self.status.as_ref()?.model.as_ref()
    }

    /// Returns the model that it cannot load, by its last status, while it is not ready because of that.
    pub(super) fn failed_model(&self) -> Option<&FailedModel> {
        let status = self.status.as_ref().filter(|status| !self.failed && !status.ready)?;
        status.failure.as_ref()
    }

    /// Returns the state of its start, by its last status. One that does not respond may be starting again.
    pub(super) fn start_state(&self, now: Instant) -> ReplicaStartState<'_> {
        match self.failed_model() {
            Some(failed) => ReplicaStartState::Failing(&failed.failure),
            None if self.is_ready() => ReplicaStartState::Ready,
            None if self.waits_for_pull => ReplicaStartState::Waiting { since: now },
            None => ReplicaStartState::Starting { since: now },
        }
    }

    /// Returns whether it accepts requests, by its last status.
    pub(super) fn accepts_requests(&self) -> bool {
        !self.is_draining && self.is_ready()
    }

    /// Returns whether it serves `deployment` when ready, or may do so because it has not reported a status yet.
    pub(super) fn may_serve(&self, deployment: &DeploymentName) -> bool {
        self.status.as_ref().is_none_or(|status| status.names.contains(deployment))
    }

    pub(super) fn is_fresh(&self, now: Instant) -> bool {
        self.last_contact
            .is_some_and(|last_contact| now.saturating_duration_since(last_contact) <= STATUS_AGE_MAX)
    }

    /// Returns the estimated backlog, in tokens.
    pub(super) fn backlog_tokens(&self) -> u64 {
        let reported = self.status.as_ref().map_or(0, |status| status.pending_tokens);
        reported.saturating_add(self.outstanding).saturating_sub(self.outstanding_at_status)
    }

    /// Returns the queued tokens of interactive requests, by its last status. They are not extrapolated: a status is as
    /// recent as the reports that contain them.
    pub(super) fn interactive_tokens(&self) -> Option<u64> {
        self.status.as_ref()?.interactive_tokens
    }

    /// Returns the measured speed in tokens per second, if known.
    pub(super) fn speed(&self) -> Option<f64> {
        let speed = self.status.as_ref()?.tokens_per_second;
        (speed.is_finite() && speed > 0.0).then_some(speed)
    }
}
