//! Forwards a request to regions, with retries, failover and hedging, until one responds.

use super::policy::{Permit, PolicyGuard};
use super::race::{AttemptResponse, AttemptStart, Race};
use super::refusals::{deadline_passed, no_receipt, reject_reason_text};
use super::region_monitor::{InFlight, NextStep, RegionMonitor};
use super::region_states::REGION_IN_FLIGHT_MAX;
use super::request::{ForwardError, Request};
use crate::config::EdgeConfig;
use crate::events::at;
use crate::names;
use crate::receipts::{CommitFailed, Recorder, Sending, WriteAhead};
use crate::respond::Rejection;
use crate::upstream::{BUFFERED_RESPONSE_MAX, Upstream, UpstreamResponse};
use gateway_core::outcome::AttemptFailure;
use gateway_core::plan::{RequestPlan, Step};
use gateway_core::trail::{AttemptCause, AttemptEnd, Trail};
use regions::set::{RegionIndex, RegionSet};
use replica_api::error::{ErrorCode, Remedy};
use replica_api::headers;
use replica_api::priority::Priority;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Bounds of the connect timeout to a region; between them it is twice the estimated round trip.
const CONNECT_MIN: Duration = Duration::from_millis(100);
const CONNECT_MAX: Duration = Duration::from_millis(400);

/// Retry delay when the in-flight limit of a region is reached; by then half of its requests have been responded to.
const FULL_RETRY_AFTER: Duration = Duration::from_secs(1);

/// Event that a request waits for while attempts are in flight.
enum ForwardEvent<'a> {
    AttemptEnded(InFlight<'a>, Result<AttemptResponse, AttemptFailure>),
    /// Health of a region got worse.
    HealthChanged,
    /// A timer of the plan fired.
    TimerFired,
}

/// One attempt, as it is sent.
struct OutboundAttempt {
    region: RegionIndex,
    /// Number within the request, from 1.
    number: u32,
    cause: AttemptCause,
    /// Number unique in the process.
    key: u64,
    began: Instant,
    /// Remaining time of the request.
    left: Duration,
}

/// Forwards requests to regions.
pub(super) struct Forwarder {
    pub(super) config: Arc<EdgeConfig>,
    pub(super) region_monitor: Arc<RegionMonitor>,
    pub(super) policy: Arc<PolicyGuard>,
    pub(super) upstream: Arc<Upstream>,
    pub(super) recorder: Option<Arc<Recorder>>,
}

impl Forwarder {
    /// Sends a request to its targets, one after the other, until one responds. Before each attempt the policy is
    /// checked against the newest route table ([`super::policy`]).
    pub(super) async fn forward(
        &self,
        request: &Request,
        mut permit: Permit,
        trail: &mut Trail,
    ) -> Result<AttemptResponse, ForwardError> {
        // Subscribed before the first step, so that no loss of a region falls between the two.
        let mut health_changes = self.region_monitor.subscribe();
        let routing = request.routing_context();
        self.policy.renew(request, &mut permit)?;
        let route = &request.route;
        trail.routed((**route).clone());
        let targets = route.targets().map(|target| target.region).collect();
        let hedges = self.config.hedge && request.priority == Priority::Interactive;
        let mut plan = RequestPlan::new(targets, hedges, request.arrived + request.timeout);
        plan.restrict(*permit.allowed);
        let mut next = self.region_monitor.start(&mut plan, &routing);
        // A part of a split request may have been rejected before.
        let before = trail.count() as u32;
        let (mut last_response, mut policy_rejection, mut race) = (None, None, Race::new(trail));
        loop {
            match next.step {
                Step::Send { region, attempt, cause, instead_of } => {
                    if let Some(late) = instead_of {
                        drop(race.cancel(late, AttemptEnd::Failed(AttemptFailure::FirstByteTimeout)));
                    }
                    let (number, cause) = match cause {
                        AttemptCause::First if before > 0 => (attempt + before, AttemptCause::Retry),
                        cause => (attempt + before, cause),
                    };
                    let spills_over = cause == AttemptCause::First && request.spills_over_to(region);
                    let cause = if spills_over { AttemptCause::Spillover } else { cause };
                    let (began, key) = (Instant::now(), self.next_attempt_key());
                    let left = plan.time_left(began);
                    let policy = permit.newer_than(request);
                    let attempt = OutboundAttempt { region, number, cause, key, began, left };
                    let completion = self.attempt(request, permit.clone(), attempt);
                    let in_flight = next.in_flight.take().expect("a step that sends has an in-flight guard");
                    race.start(cause, in_flight, AttemptStart { began, key, policy }, completion);
                }
                Step::Wait => {}
                Step::RelayResponse | Step::NoRegionReachable if policy_rejection.is_some() => {
                    return Err(policy_rejection.take().expect("checked above"));
                }
                Step::RelayResponse => {
                    return Ok(last_response
                        .take()
                        .expect("a plan relays only a response that was received"));
                }
                Step::NoRegionReachable => {
                    return Err(self.no_region_reachable(request, &permit).into());
                }
                Step::RegionFull(region) => return Err(self.region_full(region).into()),
                Step::ReceiptUnavailable => return Err(no_receipt().into()),
                Step::DeadlineExceeded => {
                    race.cancel_all(AttemptEnd::Failed(AttemptFailure::DeadlineExceeded));
                    return Err(deadline_passed(request.timeout).into());
                }
            }
            let event = tokio::select! {
                biased;
                (attempt, ended) = race.next() => ForwardEvent::AttemptEnded(attempt, ended),
                _ = health_changes.changed() => ForwardEvent::HealthChanged,
                () = tokio::time::sleep_until(plan.next_timer().into()) => ForwardEvent::TimerFired,
            };
            // Attempts in flight were sent under an older policy; every further attempt is sent under the newest.
            if let Err(refusal) = self.policy.renew(request, &mut permit) {
                policy_rejection = Some(refusal.into());
            }
            plan.restrict(if policy_rejection.is_some() { RegionSet::EMPTY } else { *permit.allowed });
            next = match event {
                ForwardEvent::AttemptEnded(attempt, Ok(received))
                    if !is_retryable_elsewhere(&received.response) =>
                {
                    let status = received.response.head.status.as_u16();
                    let took = received.waited.saturating_sub(held_duration(&received.response));
                    self.region_monitor.response_received(&mut plan, attempt, &routing, status, took);
                    race.slower().for_each(|slower| self.region_monitor.hedge_won(slower));
                    race.cancel_all(AttemptEnd::Cancelled);
                    return Ok(received);
                }
                ForwardEvent::AttemptEnded(attempt, Ok(received)) => {
                    let status = received.response.head.status.as_u16();
                    last_response = Some(received);
                    self.region_monitor.attempt_failed(
                        &mut plan,
                        attempt,
                        AttemptFailure::Declined,
                        Some(status),
                        &routing,
                    )
                }
                ForwardEvent::AttemptEnded(attempt, Err(failure)) => {
                    let region = self.config.catalogue.region(attempt.region()).id.as_str();
                    tracing::debug!(id = request.id, region, ?failure, "attempt failed");
                    self.region_monitor.attempt_failed(&mut plan, attempt, failure, None, &routing)
                }
                ForwardEvent::HealthChanged => match race
                    .find_region(|region| self.region_monitor.should_abandon(&plan, region, &routing))
                {
                    Some(region) => {
                        let attempt = race.cancel(region, AttemptEnd::Failed(AttemptFailure::RegionDown));
                        // The other attempt of a hedged request may have to be abandoned too, so the change is handled
                        // again.
                        health_changes.mark_changed();
                        self.region_monitor.attempt_failed(
                            &mut plan,
                            attempt,
                            AttemptFailure::RegionDown,
                            None,
                            &routing,
                        )
                    }
                    None => NextStep::WAIT,
                },
                ForwardEvent::TimerFired => self.region_monitor.timers_expired(&mut plan, &routing),
            };
        }
    }

    /// Number of the next attempt, unique in the process.
    fn next_attempt_key(&self) -> u64 {
        self.recorder.as_ref().map_or(0, |recorder| recorder.number())
    }

    /// Sends one attempt; the caller bounds its time by dropping it. A required receipt is durable before a connection
    /// is opened.
    async fn attempt(
        &self,
        request: &Request,
        permit: Permit,
        attempt: OutboundAttempt,
    ) -> Result<AttemptResponse, AttemptFailure> {
        let OutboundAttempt { region, number, cause, key, began, left } = attempt;
        let Permit { view, allowed, policy } = permit;
        let address = view.address(region).ok_or(AttemptFailure::Unreachable)?;
        let to = allowed.open(region, address);
        let to = to.expect("a plan targets only allowed regions (invariant 1, Residency)");
        let locked = policy.residency.is_locked();
        if let Some(recorder) = self.recorder.as_ref().filter(|recorder| locked && recorder.required()) {
            let sending = Sending {
                number: key,
                request: request.id.clone(),
                attempt: number,
                tenant: request.tenant.id.clone(),
                deployment: request.deployment.clone(),
                policy: policy.clone(),
                tls_ended_here: request.tls_ended_here,
                region,
                at_ms: at(began, request.arrived, request.at_ms),
                cause,
            };
            let durable = recorder.commit(WriteAhead::Sending(sending)).await;
            durable.map_err(|CommitFailed| AttemptFailure::ReceiptUnavailable)?;
        }
        let sent_at = Instant::now();
        let left = left.saturating_sub(sent_at.saturating_duration_since(began));
        let (left_ms, number) = (left.as_millis().max(1).to_string(), number.to_string());
        let mut extra = vec![
            (headers::REQUEST_ID, request.id.as_str()),
            (headers::DEPLOYMENT, request.deployment.as_str()),
            (headers::TENANT, request.tenant.id.as_str()),
            (headers::TIMEOUT_MS, &left_ms),
            (headers::ATTEMPT, &number),
        ];
        let key = self.recorder.as_ref().map(|recorder| recorder.key(key).to_string());
        extra.extend(key.as_deref().map(|key| (headers::ATTEMPT_KEY, key)));
        if locked {
            extra.push((headers::RESIDENCY, policy.residency.as_str()));
        }
        if request.spills_over_to(region) {
            extra.push((headers::SPILLOVER, "1"));
        }
        let revision = request.revision.map(|revision| revision.to_string());
        extra.extend(revision.as_deref().map(|revision| (headers::MODEL_REVISION, revision)));
        let required = request.required.map(|revision| revision.to_string());
        extra.extend(required.as_deref().map(|revision| (headers::REQUIRED_REVISION, revision)));
        let (connect, elsewhere) = {
            let region_states = self.region_monitor.states();
            (
                2 * region_states.latency.estimate(region, sent_at),
                region_states.alternative_response_time(
                    &request.routing_context(),
                    request.may_sleep,
                    request.route.targets(),
                    region,
                ),
            )
        };
        let connect = connect.clamp(CONNECT_MIN, CONNECT_MAX);
        let elsewhere_ms = elsewhere.map(|there| there.as_millis().to_string());
        extra.extend(elsewhere_ms.as_deref().map(|there| (headers::ALTERNATIVE_MS, there)));
        let head = request.headers.head(request.path, &request.body.bytes, &extra);
        let body = allowed.seal(request.body.bytes.clone());
        let response = self.upstream.send(to, connect, head, body, BUFFERED_RESPONSE_MAX).await?;
        Ok(AttemptResponse { response, region, waited: sent_at.elapsed() })
    }

    fn region_full(&self, region: RegionIndex) -> Rejection {
        let region = &self.config.catalogue.region(region).id;
        let message = format!(
            "This gateway has {REGION_IN_FLIGHT_MAX} requests in flight to {region}, which is the limit; try \
             again shortly, or send fewer requests at once. Other regions have not offered capacity for them."
        );
        Rejection::new(ErrorCode::Overloaded, message).after(FULL_RETRY_AFTER)
    }

    fn no_region_reachable(&self, request: &Request, permit: &Permit) -> Rejection {
        let Permit { view, allowed: permitted, policy } = permit;
        let catalogue = &self.config.catalogue;
        let route = &request.route;
        let attempted =
            route.targets().map(|target| target.region).filter(|region| permitted.contains(*region));
        let named = |region: RegionIndex| catalogue.region(region).id.to_string();
        let mut allowed: Vec<_> =
            attempted.clone().map(|region| format!("{} (tried)", named(region))).collect();
        for (region, _) in view.regions().filter(|(region, _)| permitted.contains(*region)) {
            if let Some(reason) = route.rejected.reason(region) {
                allowed.push(format!("{} ({})", named(region), reject_reason_text(reason)));
            }
        }
        let regions =
            if allowed.is_empty() { "no region is registered".to_owned() } else { allowed.join(", ") };
        Rejection::new(
            ErrorCode::NoCapacityInAllowedRegions,
            format!(
                "No allowed region of the deployment '{}' under the residency policy '{}' is reachable: \
                 {regions}. Try again shortly; the request was not sent to any other region.",
                request.deployment,
                policy.residency.as_str()
            ),
        )
    }
}

/// Time for which the region held the request because no replica was ready; it is no part of the service time.
fn held_duration(response: &UpstreamResponse) -> Duration {
    let held_duration = response.head.headers.get(names::name(headers::HELD_MS));
    let held_duration = held_duration.and_then(|value| value.to_str().ok()?.parse().ok());
    held_duration.map(Duration::from_millis).unwrap_or_default()
}

/// Whether the region reports that another region could serve the request.
fn is_retryable_elsewhere(response: &UpstreamResponse) -> bool {
    let value = || response.head.headers.get(names::name(headers::ERROR))?.to_str().ok();
    let code = || value().and_then(ErrorCode::parse);
    response.head.status.is_server_error() && code().is_some_and(|code| code.remedy() == Remedy::Elsewhere)
}
