//! Forwards a request to regions, with retries, failover and hedging, until one responds.
//!
//! **Policy.** It is checked again before each attempt ([`PolicyGuard`]). A request may be in flight for minutes. In that time its tenant may be removed, its key revoked, its deployment removed or
//! the residency of the tenant or the deployment narrowed. The request is then not sent again, or only to regions that are
//! still allowed. A newer table never widens the allowed regions of a request beyond those it was admitted with.
//!
//! As long as there is no newer table the check is one pointer comparison. Hedges, retries and the parts of a split request
//! are all checked, because they all pass through the forwarder.
//!
//! A gateway without a response from any hub for longer than `policy_max_age` may have missed a narrowed policy. It rejects
//! requests of locked deployments and serves all others.
//!
//! **Attempts in flight.** There is one, or there are two with a hedged request ([`Race`]). An attempt is a future. To cancel it is to drop it: its connection closes, and the region stops computing. Each
//! attempt has one entry on the trail, which is closed only here. It counts as in flight at its region until the caller
//! that receives its [`InFlight`] guard has recorded its outcome.

use super::policy_clock::PolicyClock;
use super::refusals::{
    deadline_passed, key_removed, no_receipt, no_region, policy_too_old, reject_reason_text,
    residency_too_long, unknown_model,
};
use super::region_monitor::{InFlight, NextStep, RegionMonitor};
use super::region_states::{REGION_IN_FLIGHT_MAX, RoutingContext};
use super::request::Request;
use super::table::Current;
use super::view::{Terms, View};
use crate::config::EdgeConfig;
use crate::events::at;
use crate::names;
use crate::receipts::{CommitFailed, Recorder, Sending, WriteAhead};
use crate::respond::{ForwardError, Rejection};
use crate::start_failure::deployment_failed;
use crate::upstream::{BUFFERED_RESPONSE_MAX, Upstream, UpstreamResponse};
use gateway_core::outcome::AttemptFailure;
use gateway_core::plan::{RequestPlan, Step};
use gateway_core::residency::AllowedRegions;
use gateway_core::route::RejectReason;
use gateway_core::trail::{AttemptCause, AttemptEnd, AttemptId, AttemptTrace, PolicyVersion, Trail};
use regions::HostPort;
use regions::id::InstanceName;
use regions::set::{RegionIndex, RegionSet};
use replica_api::error::{ErrorCode, Remedy};
use replica_api::headers;
use replica_api::priority::Priority;
use scheduler_api::report::DeploymentLoad;
use std::future::{Future, poll_fn};
use std::ops::ControlFlow;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};
use telemetry::Tracer;
use telemetry::context::{SpanId, TraceContext};
use telemetry::sampling::FailoverTrace;
use tokio::sync::watch;

/// Bounds of the connect timeout to a region; between them it is twice the estimated round trip.
const CONNECT_MIN: Duration = Duration::from_millis(100);
const CONNECT_MAX: Duration = Duration::from_millis(400);

/// Retry delay when the in-flight limit of a region is reached; by then half of its requests have been responded to.
const FULL_RETRY_AFTER: Duration = Duration::from_secs(1);

/// Event that a request waits for while attempts are in flight.
#[expect(
    clippy::large_enum_variant,
    reason = "one at a time on the stack; a box would be an allocation for each attempt"
)]
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
    /// Address of the instance; `None` if the region has none.
    address: Option<HostPort>,
    /// Number within the request, from 1.
    number: u32,
    cause: AttemptCause,
    /// Number unique in the process.
    key: u64,
    /// Context of the attempt, if the request has a trace.
    context: Option<TraceContext>,
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
    /// Tracer, if traces are configured.
    pub(super) tracer: Option<Tracer>,
}

impl Forwarder {
    /// Sends a request to its targets, one after the other, until one responds. Before each attempt the policy is
    /// checked against the newest route table ([`PolicyGuard`]).
    pub(super) async fn forward(
        &self,
        request: &Request,
        mut permit: Permit,
        trail: &mut Trail,
    ) -> Result<AttemptResponse, ForwardError> {
        // Subscribed before the first step, so that no loss of a region falls between the two.
        let health_changes = self.region_monitor.subscribe();
        self.policy.renew(request, &mut permit)?;
        let mut state = ForwardState::new(self, request, permit, health_changes, trail);
        let mut next = self.region_monitor.start(&mut state.plan, &state.routing);
        loop {
            if let Some(response) = state.perform(next)? {
                return Ok(response);
            }
            let event = state.next_event().await;
            state.renew_policy();
            next = match state.handle(event) {
                ControlFlow::Continue(next) => next,
                ControlFlow::Break(response) => return Ok(response),
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
        let OutboundAttempt { region, address, number, cause, key, context, began, left } = attempt;
        let Permit { view, allowed, policy } = permit;
        let address = address.or_else(|| view.address(region).cloned()).ok_or(AttemptFailure::Unreachable)?;
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
        let traceparent = context.map(|context| context.traceparent());
        extra.extend(traceparent.as_deref().map(|context| (headers::TRACEPARENT, context)));
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
        let loads: Vec<_> = {
            let states = self.region_monitor.states();
            let rejected = view.regions().filter(|region| permitted.contains(*region));
            let rejected = rejected.filter_map(|region| Some((region, route.rejected.reason(region)?)));
            rejected
                .map(|(region, reason)| (region, reason, states.reported_load(region, &request.deployment)))
                .collect()
        };
        if attempted.clone().next().is_none()
            && let Some(rejection) = self.failed_everywhere(request, &loads)
        {
            return rejection;
        }
        let mut allowed: Vec<_> =
            attempted.clone().map(|region| format!("{} (tried)", named(region))).collect();
        for (region, reason, load) in loads {
            let failed = load.and_then(|load| load.failed).filter(|_| reason == RejectReason::NotServing);
            let reason = failed.map_or_else(
                || reject_reason_text(reason).to_owned(),
                |why| format!("failed: {}", why.as_str()),
            );
            allowed.push(format!("{} ({reason})", named(region)));
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

    /// Returns the rejection of a request whose deployment has failed in every allowed region that runs it; `None` if another
    /// reason keeps one of them from serving it.
    fn failed_everywhere(
        &self,
        request: &Request,
        rejected: &[(RegionIndex, RejectReason, Option<DeploymentLoad>)],
    ) -> Option<Rejection> {
        let mut failed = Vec::new();
        for (region, reason, load) in rejected {
            match (reason, load) {
                (RejectReason::NotServing, Some(DeploymentLoad { failed: Some(reason), .. })) => {
                    failed.push((*region, *reason));
                }
                // It does not run the deployment.
                (RejectReason::NotServing, None) => {}
                _ => return None,
            }
        }
        let named = |(region, reason)| (&self.config.catalogue.region(region).id, reason);
        (!failed.is_empty()).then(|| deployment_failed(&request.deployment, failed.into_iter().map(named)))
    }
}

/// Request that is being forwarded: its plan, its attempts in flight, and the policy under which it may be sent.
struct ForwardState<'a> {
    forwarder: &'a Forwarder,
    request: &'a Request,
    routing: RoutingContext<'a>,
    race: Race<'a>,
    plan: RequestPlan,
    permit: Permit,
    health_changes: watch::Receiver<()>,
    /// Number of attempts before this forwarding: a part of a split request may have been rejected before.
    attempts_before: u32,
    /// Last response of a region that reports that another region could serve the request.
    last_response: Option<AttemptResponse>,
    /// Reason why the request may not be sent any more. It is returned when no attempt is in flight.
    policy_rejection: Option<Rejection>,
}

impl<'a> ForwardState<'a> {
    fn new(
        forwarder: &'a Forwarder,
        request: &'a Request,
        permit: Permit,
        health_changes: watch::Receiver<()>,
        trail: &'a mut Trail,
    ) -> ForwardState<'a> {
        let targets = request.route.targets().map(|target| target.region).collect();
        let hedges = forwarder.config.hedge && request.priority == Priority::Interactive;
        let mut plan = RequestPlan::new(targets, hedges, request.arrived + request.timeout);
        plan.restrict(*permit.allowed);
        ForwardState {
            forwarder,
            request,
            routing: request.routing_context(),
            attempts_before: trail.count() as u32,
            race: Race::new(trail),
            plan,
            permit,
            health_changes,
            last_response: None,
            policy_rejection: None,
        }
    }

    /// Performs a step of the plan; returns the response if it is the last one.
    fn perform(&mut self, next: NextStep<'a>) -> Result<Option<AttemptResponse>, ForwardError> {
        match next.step {
            Step::Send { region, instance: _, attempt, cause, instead_of } => {
                if let Some(late) = instead_of {
                    drop(self.race.cancel(late, AttemptEnd::Failed(AttemptFailure::FirstByteTimeout)));
                }
                let in_flight = next.in_flight.expect("a step that sends has an in-flight guard");
                self.send(region, attempt, cause, in_flight);
                Ok(None)
            }
            Step::Wait => Ok(None),
            Step::RelayResponse | Step::NoRegionReachable if self.policy_rejection.is_some() => {
                Err(self.policy_rejection.take().expect("checked above").into())
            }
            Step::RelayResponse => {
                let response = self.last_response.take();
                Ok(Some(response.expect("a plan relays only a response that was received")))
            }
            Step::NoRegionReachable => {
                Err(self.forwarder.no_region_reachable(self.request, &self.permit).into())
            }
            Step::RegionFull(region) => Err(self.forwarder.region_full(region).into()),
            Step::ReceiptUnavailable => Err(no_receipt().into()),
            Step::DeadlineExceeded => {
                self.race.cancel_all(AttemptEnd::Failed(AttemptFailure::DeadlineExceeded));
                Err(deadline_passed(self.request.timeout).into())
            }
        }
    }

    /// Starts an attempt at a region.
    fn send(&mut self, region: RegionIndex, attempt: u32, cause: AttemptCause, mut in_flight: InFlight<'a>) {
        let (forwarder, request) = (self.forwarder, self.request);
        let number = attempt + self.attempts_before;
        let cause = match cause {
            AttemptCause::First if self.attempts_before > 0 => AttemptCause::Retry,
            AttemptCause::First if request.spills_over_to(region) => AttemptCause::Spillover,
            cause => cause,
        };
        let (instance, address) = in_flight.take_spoke().unzip();
        let (began, key) = (Instant::now(), forwarder.next_attempt_key());
        let left = self.plan.time_left(began);
        let policy = self.permit.newer_than(request);
        let context = self.trace_context(cause);
        let trace = context.map(|TraceContext { trace: _, span, is_sampled }| AttemptTrace {
            span,
            is_exported: is_sampled,
            address: address.clone(),
        });
        let attempt = OutboundAttempt { region, address, number, cause, key, context, began, left };
        let completion = forwarder.attempt(request, self.permit.clone(), attempt);
        self.race.start(cause, in_flight, AttemptStart { began, key, policy, instance, trace }, completion);
    }

    /// Returns the context of an attempt, if the request has a trace. The attempts after a failed one are sampled within the limit of
    /// kept traces, so that the region and its replica export their part of a trace that the gateway keeps.
    fn trace_context(&self, cause: AttemptCause) -> Option<TraceContext> {
        let trace = self.request.trace?;
        let admits = || self.forwarder.tracer.as_ref().is_some_and(Tracer::admit_failover);
        let is_kept = || self.race.trail.failover() == FailoverTrace::Exported || admits();
        let is_sampled = trace.is_sampled || (cause.is_failover() && is_kept());
        Some(TraceContext { trace: trace.trace, span: SpanId::from_random(rand::random()), is_sampled })
    }

    /// Waits until an attempt has ended, the health of a region is worse, or a timer of the plan fires.
    async fn next_event(&mut self) -> ForwardEvent<'a> {
        tokio::select! {
            biased;
            (attempt, ended) = self.race.next() => ForwardEvent::AttemptEnded(attempt, ended),
            _ = self.health_changes.changed() => ForwardEvent::HealthChanged,
            () = tokio::time::sleep_until(self.plan.next_timer().into()) => ForwardEvent::TimerFired,
        }
    }

    /// Restricts the plan to the regions that the newest policy allows. Attempts in flight were sent under an older policy;
    /// every further attempt is sent under the newest.
    fn renew_policy(&mut self) {
        if let Err(refusal) = self.forwarder.policy.renew(self.request, &mut self.permit) {
            self.policy_rejection = Some(refusal);
        }
        let is_rejected = self.policy_rejection.is_some();
        self.plan.restrict(if is_rejected { RegionSet::EMPTY } else { *self.permit.allowed });
    }

    /// Records an event: ends with the response of a region, or continues with the next step of the plan.
    fn handle(&mut self, event: ForwardEvent<'a>) -> ControlFlow<AttemptResponse, NextStep<'a>> {
        ControlFlow::Continue(match event {
            ForwardEvent::AttemptEnded(attempt, Ok(received))
                if !is_retryable_elsewhere(&received.response) =>
            {
                self.responded(attempt, &received);
                return ControlFlow::Break(received);
            }
            ForwardEvent::AttemptEnded(attempt, Ok(received)) => {
                let status = received.response.head.status.as_u16();
                self.last_response = Some(received);
                self.failed(attempt, AttemptFailure::Declined, Some(status))
            }
            ForwardEvent::AttemptEnded(attempt, Err(failure)) => {
                let region = self.forwarder.config.catalogue.region(attempt.region()).id.as_str();
                // An attempt of a request failed (`failure`). The request is sent to its next target, if the budgets permit
                // one.
                tracing::debug!(id = self.request.id, region, ?failure, "attempt failed");
                self.failed(attempt, failure, None)
            }
            ForwardEvent::HealthChanged => self.abandon_lost_attempt(),
            ForwardEvent::TimerFired => {
                self.forwarder.region_monitor.timers_expired(&mut self.plan, &self.routing)
            }
        })
    }

    /// Records the response that is relayed, and cancels the other attempts.
    fn responded(&mut self, attempt: InFlight<'a>, received: &AttemptResponse) {
        let monitor = &self.forwarder.region_monitor;
        let status = received.response.head.status.as_u16();
        let took = received.waited.saturating_sub(held_duration(&received.response));
        monitor.response_received(&mut self.plan, attempt, &self.routing, status, took);
        self.race.slower().for_each(|slower| monitor.hedge_won(slower));
        self.race.cancel_all(AttemptEnd::Cancelled);
    }

    /// Records a failed attempt, and returns the next step of the plan.
    fn failed(
        &mut self,
        attempt: InFlight<'a>,
        failure: AttemptFailure,
        status: Option<u16>,
    ) -> NextStep<'a> {
        let monitor = &self.forwarder.region_monitor;
        monitor.attempt_failed(&mut self.plan, attempt, failure, status, &self.routing)
    }

    /// Abandons the first attempt whose region or instance is lost, and returns the next step of the plan.
    fn abandon_lost_attempt(&mut self) -> NextStep<'a> {
        let monitor = &self.forwarder.region_monitor;
        let lost = self.race.find_region(|region| monitor.should_abandon(&self.plan, region, &self.routing));
        let Some(region) = lost else { return NextStep::WAIT };
        let attempt = self.race.cancel(region, AttemptEnd::Failed(AttemptFailure::RegionDown));
        // The other attempt of a hedged request may have to be abandoned too, so the change is handled again.
        self.health_changes.mark_changed();
        self.failed(attempt, AttemptFailure::RegionDown, None)
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
    let code = || response.head.headers.get(names::name(headers::ERROR))?.to_str().ok();
    response.head.status.is_server_error()
        && code().is_some_and(|code| ErrorCode::remedy_of(code) == Remedy::Elsewhere)
}

/// Regions and policy under which a request may be sent now.
#[derive(Clone)]
pub(super) struct Permit {
    /// Newest route table.
    pub(super) view: Arc<View>,
    /// Regions that are allowed both under that table and under the table with which the request was admitted.
    pub(super) allowed: AllowedRegions,
    pub(super) policy: Arc<PolicyVersion>,
}

impl Permit {
    /// Returns the permit with which the request was admitted.
    pub(super) fn of(request: &Request, view: &Arc<View>) -> Permit {
        Permit { view: view.clone(), allowed: request.allowed, policy: request.policy.clone() }
    }

    /// Returns the policy if it differs from the one with which the request was admitted.
    pub(super) fn newer_than(&self, request: &Request) -> Option<Arc<PolicyVersion>> {
        (!Arc::ptr_eq(&self.policy, &request.policy)).then(|| self.policy.clone())
    }
}

/// Checks requests in flight against the newest route table.
pub(super) struct PolicyGuard {
    pub(super) config: Arc<EdgeConfig>,
    pub(super) views: watch::Receiver<Current>,
    pub(super) policy_clock: Arc<PolicyClock>,
}

impl PolicyGuard {
    /// Updates a permit to the newest route table.
    ///
    /// # Errors
    ///
    /// The rejection, when the request may not be sent to any region any more.
    pub(super) fn renew(&self, request: &Request, permit: &mut Permit) -> Result<(), Rejection> {
        self.policy_clock.check(&permit.policy.residency).map_err(policy_too_old)?;
        let view = match &*self.views.borrow() {
            Some(view) if !Arc::ptr_eq(view, &permit.view) => view.clone(),
            Some(_) | None => return Ok(()),
        };
        let tenant = view.keys.current_for(&request.tenant, request.key.as_ref()).ok_or_else(key_removed)?;
        let routed = view
            .deployment(request.deployment.as_str(), tenant)
            .ok_or_else(|| unknown_model(request.deployment.as_str(), &view, tenant))?;
        let Terms { policy, allowed } = routed
            .terms(tenant, &request.requested_residency, &self.config.catalogue)
            .map_err(|error| residency_too_long(&request.deployment, tenant, &error))?;
        let both = allowed.and(request.allowed);
        if both.is_empty() {
            return Err(no_region(&request.deployment, &policy.residency, tenant));
        }
        permit.policy = match both == allowed {
            true => policy,
            false => Arc::new(PolicyVersion { allowed: *both, ..(*policy).clone() }),
        };
        permit.allowed = both;
        permit.view = view.clone();
        self.policy_clock.check(&permit.policy.residency).map_err(policy_too_old)
    }
}

/// Response of a region to an attempt.
pub(super) struct AttemptResponse {
    pub(super) response: UpstreamResponse,
    pub(super) region: RegionIndex,
    /// Time from sending the attempt to the head of its response.
    pub(super) waited: Duration,
}

/// Result of an attempt.
type AttemptCompletion = Result<AttemptResponse, AttemptFailure>;

/// Attempts of one request that are in flight.
pub(super) struct Race<'a> {
    trail: &'a mut Trail,
    /// In the order of their start.
    attempts: Vec<RacingAttempt<'a>>,
    /// Number of attempts in flight that started before the one that ended last.
    earlier_count: usize,
}

/// Start of an attempt.
pub(super) struct AttemptStart {
    pub(super) began: Instant,
    /// Number of the attempt, unique in the process.
    pub(super) key: u64,
    /// Policy under which it is sent, if it differs from the one that the request was admitted under.
    pub(super) policy: Option<Arc<PolicyVersion>>,
    /// Name of the instance that it is sent to.
    pub(super) instance: Option<InstanceName>,
    /// Trace of the attempt, if the request has one.
    pub(super) trace: Option<AttemptTrace>,
}

struct RacingAttempt<'a> {
    attempt_id: AttemptId,
    in_flight: InFlight<'a>,
    attempt: Pin<Box<dyn Future<Output = AttemptCompletion> + Send + 'a>>,
}

impl<'a> Race<'a> {
    pub(super) fn new(trail: &'a mut Trail) -> Race<'a> {
        Race { trail, attempts: Vec::with_capacity(1), earlier_count: 0 }
    }

    /// Starts an attempt.
    pub(super) fn start(
        &mut self,
        cause: AttemptCause,
        in_flight: InFlight<'a>,
        AttemptStart { began, key, policy, instance, trace }: AttemptStart,
        attempt: impl Future<Output = AttemptCompletion> + Send + 'a,
    ) {
        let attempt_id = self.trail.began(in_flight.region(), instance, cause, key, began);
        if let Some(policy) = policy {
            self.trail.set_policy(attempt_id, policy);
        }
        if let Some(trace) = trace {
            self.trail.set_trace(attempt_id, trace);
        }
        self.attempts.push(RacingAttempt { attempt_id, in_flight, attempt: Box::pin(attempt) });
    }

    /// Waits for the next attempt to end and returns its result; pending for ever while no attempt is in flight.
    pub(super) async fn next(&mut self) -> (InFlight<'a>, AttemptCompletion) {
        let (index, ended) = poll_fn(|context| {
            for (index, racing) in self.attempts.iter_mut().enumerate() {
                if let Poll::Ready(ended) = racing.attempt.as_mut().poll(context) {
                    return Poll::Ready((index, ended));
                }
            }
            Poll::Pending
        })
        .await;
        let end = match &ended {
            Ok(response) => AttemptEnd::Responded { status: response.response.head.status.as_u16() },
            Err(failure) => AttemptEnd::Failed(*failure),
        };
        self.earlier_count = index;
        (self.close(index, end), ended)
    }

    /// First region with an attempt in flight that satisfies `holds`.
    pub(super) fn find_region(&self, holds: impl Fn(RegionIndex) -> bool) -> Option<RegionIndex> {
        self.attempts.iter().map(|racing| racing.in_flight.region()).find(|region| holds(*region))
    }

    /// Attempts in flight that started before the one that ended last.
    pub(super) fn slower(&self) -> impl Iterator<Item = &InFlight<'a>> {
        self.attempts[..self.earlier_count].iter().map(|racing| &racing.in_flight)
    }

    /// Cancels the attempt at `region`.
    pub(super) fn cancel(&mut self, region: RegionIndex, end: AttemptEnd) -> InFlight<'a> {
        let index = self.attempts.iter().position(|racing| racing.in_flight.region() == region);
        self.close(index.expect("a cancelled region has an attempt in flight"), end)
    }

    /// Cancels all attempts.
    pub(super) fn cancel_all(&mut self, end: AttemptEnd) {
        while !self.attempts.is_empty() {
            self.close(0, end);
        }
    }

    fn close(&mut self, index: usize, end: AttemptEnd) -> InFlight<'a> {
        let RacingAttempt { attempt_id, in_flight, attempt: _ } = self.attempts.remove(index);
        self.trail.ended(attempt_id, end, Instant::now());
        in_flight
    }
}
