//! From region to region until one answers.

use super::known::REGION_IN_FLIGHT_MAX;
use super::policy::{Permit, PolicyGuard};
use super::race::{Answered, Beginning, Race};
use super::refusals::{deadline_passed, in_words, no_receipt};
use super::request::{NotForwarded, Request};
use super::watch::{InFlight, Next, Watch};
use crate::config::EdgeConfig;
use crate::events::at;
use crate::names;
use crate::receipts::{CommitFailed, Recorder, Sending, WriteAhead};
use crate::respond::Rejection;
use crate::upstream::{BUFFERED_RESPONSE_MAX, Upstream, UpstreamResponse};
use gateway_core::outcome::AttemptFailure;
use gateway_core::plan::{RequestPlan, Step};
use gateway_core::priority::Priority;
use gateway_core::trail::{AttemptCause, AttemptEnd, Trail};
use regions::set::{RegionIndex, RegionSet};
use replica_core::wire::error::{ErrorCode, Remedy};
use replica_core::wire::headers;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The least and the most that a connection to a region may take to open; between them, two round trips and a bit.
const CONNECT_MIN: Duration = Duration::from_millis(100);
const CONNECT_MAX: Duration = Duration::from_millis(400);

/// When to come back where a region has as much as it may: half of what waits there has been answered by then.
const FULL_RETRY_AFTER: Duration = Duration::from_secs(1);

/// Event that a request waits for while attempts are in flight.
enum Happened<'a> {
    Ended(InFlight<'a>, Result<Answered, AttemptFailure>),
    /// A region has got worse.
    Worse,
    /// Something of the plan has come to its time.
    Due,
}

/// One attempt, as it is sent.
struct Attempt {
    region: RegionIndex,
    /// Which one at the request, from 1.
    number: u32,
    cause: AttemptCause,
    /// Its number among all of the process.
    key: u64,
    began: Instant,
    /// Remaining time of the request.
    left: Duration,
}

/// Forwards requests to regions.
pub(super) struct Forwarder {
    pub(super) config: Arc<EdgeConfig>,
    pub(super) watch: Arc<Watch>,
    pub(super) policy: Arc<PolicyGuard>,
    pub(super) upstream: Arc<Upstream>,
    pub(super) recorder: Option<Arc<Recorder>>,
}

impl Forwarder {
    /// Sends a request to its targets, one after the other, until one responds. Before each attempt the policy is checked against
    /// the newest route table ([`super::policy`]).
    pub(super) async fn forward(
        &self,
        request: &Request,
        mut permit: Permit,
        trail: &mut Trail,
    ) -> Result<Answered, NotForwarded> {
        // Subscribed before the first step, so that no loss of a region falls between the two.
        let mut bell = self.watch.bell();
        let about = request.about();
        self.policy.renew(request, &mut permit)?;
        let route = &request.route;
        trail.routed((**route).clone());
        let targets = route.targets().map(|target| target.region).collect();
        let hedges = self.config.hedge && request.priority == Priority::Interactive;
        let mut plan = RequestPlan::new(targets, hedges, request.arrived + request.timeout);
        plan.restrict(*permit.allowed);
        let mut next = self.watch.start(&mut plan, &about);
        // A piece of a larger request may have been turned away before.
        let before = trail.count() as u32;
        let (mut at_hand, mut denied, mut race) = (None, None, Race::new(trail));
        loop {
            match next.step {
                Step::Send { region, attempt, cause, instead_of } => {
                    if let Some(late) = instead_of {
                        drop(race.leave(late, AttemptEnd::Failed(AttemptFailure::FirstByteTimeout)));
                    }
                    let (number, cause) = match cause {
                        AttemptCause::First if before > 0 => (attempt + before, AttemptCause::Retry),
                        cause => (attempt + before, cause),
                    };
                    let spills_over = cause == AttemptCause::First && request.spills_over_to(region);
                    let cause = if spills_over { AttemptCause::Spillover } else { cause };
                    let (began, key) = (Instant::now(), self.next_key());
                    let left = plan.time_left(began);
                    let policy = permit.newer_than(request);
                    let attempt = Attempt { region, number, cause, key, began, left };
                    let asked = self.attempt(request, permit.clone(), attempt);
                    let in_flight = next.in_flight.take().expect("whoever is asked counts as waiting");
                    race.enter(cause, in_flight, Beginning { began, key, policy }, asked);
                }
                Step::Wait => {}
                Step::RelayResponse | Step::NoRegionReachable if denied.is_some() => {
                    return Err(denied.take().expect("checked above"));
                }
                Step::RelayResponse => {
                    return Ok(at_hand.take().expect("a plan relays what an attempt has brought"));
                }
                Step::NoRegionReachable => {
                    return Err(self.nobody_reachable(request, &permit).into());
                }
                Step::RegionFull(region) => return Err(self.full(region).into()),
                Step::ReceiptUnavailable => return Err(no_receipt().into()),
                Step::DeadlineExceeded => {
                    race.leave_all(AttemptEnd::Failed(AttemptFailure::DeadlineExceeded));
                    return Err(deadline_passed(request.timeout).into());
                }
            }
            let happened = tokio::select! {
                biased;
                (attempt, ended) = race.next() => Happened::Ended(attempt, ended),
                _ = bell.changed() => Happened::Worse,
                () = tokio::time::sleep_until(plan.next_timer().into()) => Happened::Due,
            };
            // What is under way was sent under the policy of its time; nothing more is sent but under the newest.
            if let Err(refusal) = self.policy.renew(request, &mut permit) {
                denied = Some(refusal.into());
            }
            plan.restrict(if denied.is_some() { RegionSet::EMPTY } else { *permit.allowed });
            next = match happened {
                Happened::Ended(attempt, Ok(answered)) if !says_elsewhere(&answered.answer) => {
                    let status = answered.answer.head.status.as_u16();
                    let took = answered.waited.saturating_sub(held(&answered.answer));
                    self.watch.answered(&mut plan, attempt, &about, status, took);
                    race.overtaken().for_each(|slower| self.watch.overtaken(slower));
                    race.leave_all(AttemptEnd::Cancelled);
                    return Ok(answered);
                }
                Happened::Ended(attempt, Ok(answered)) => {
                    let status = answered.answer.head.status.as_u16();
                    at_hand = Some(answered);
                    self.watch.failed(&mut plan, attempt, AttemptFailure::Declined, Some(status), &about)
                }
                Happened::Ended(attempt, Err(failure)) => {
                    let region = attempt.region().as_usize();
                    tracing::debug!(id = request.id, region, ?failure, "an attempt failed");
                    self.watch.failed(&mut plan, attempt, failure, None, &about)
                }
                Happened::Worse => match race.find(|region| self.watch.gives_up(&plan, region, &about)) {
                    Some(region) => {
                        let attempt = race.leave(region, AttemptEnd::Failed(AttemptFailure::RegionDown));
                        // Another that races may be given up as well: the bell is heard again.
                        bell.mark_changed();
                        self.watch.failed(&mut plan, attempt, AttemptFailure::RegionDown, None, &about)
                    }
                    None => Next::WAIT,
                },
                Happened::Due => self.watch.woke(&mut plan, &about),
            };
        }
    }

    /// The number of the next attempt among all of this process.
    fn next_key(&self) -> u64 {
        self.recorder.as_ref().map_or(0, |recorder| recorder.number())
    }

    /// One attempt; whoever waits for it bounds its time by dropping it. Where a receipt is required it is durable before a
    /// connection is opened.
    async fn attempt(
        &self,
        request: &Request,
        permit: Permit,
        attempt: Attempt,
    ) -> Result<Answered, AttemptFailure> {
        let Attempt { region, number, cause, key, began, left } = attempt;
        let Permit { view, allowed, policy } = permit;
        let address = view.address(region).ok_or(AttemptFailure::Unreachable)?;
        let to = allowed.open(region, address);
        let to = to.expect("a plan goes only where it is allowed (invariant 1, Residency)");
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
        let begun = Instant::now();
        let left = left.saturating_sub(begun.saturating_duration_since(began));
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
            let known = self.watch.known();
            (
                2 * known.latency.estimate(region, begun),
                known.elsewhere(&request.about(), request.may_sleep, request.route.targets(), region),
            )
        };
        let connect = connect.clamp(CONNECT_MIN, CONNECT_MAX);
        let elsewhere_ms = elsewhere.map(|there| there.as_millis().to_string());
        extra.extend(elsewhere_ms.as_deref().map(|there| (headers::ALTERNATIVE_MS, there)));
        let head = request.headers.head(request.path, &request.body.bytes, &extra);
        let body = allowed.seal(request.body.bytes.clone());
        let answer = self.upstream.send(to, connect, head, body, BUFFERED_RESPONSE_MAX).await?;
        Ok(Answered { answer, region, waited: begun.elapsed() })
    }

    fn full(&self, region: RegionIndex) -> Rejection {
        let region = &self.config.catalogue.region(region).id;
        let message = format!(
            "{REGION_IN_FLIGHT_MAX} requests of this gateway wait for {region} already, as many as may; try again \
             shortly, or send fewer at once. They are not sent to a region further away, which has not offered room."
        );
        Rejection::new(ErrorCode::Overloaded, message).after(FULL_RETRY_AFTER)
    }

    fn nobody_reachable(&self, request: &Request, permit: &Permit) -> Rejection {
        let Permit { view, allowed: permitted, policy } = permit;
        let catalogue = &self.config.catalogue;
        let route = &request.route;
        let tried = route.targets().map(|target| target.region).filter(|region| permitted.contains(*region));
        let named = |region: RegionIndex| catalogue.region(region).id.to_string();
        let mut allowed: Vec<_> = tried.clone().map(|region| format!("{} (tried)", named(region))).collect();
        for (region, _) in view.regions().filter(|(region, _)| permitted.contains(*region)) {
            if let Some(reason) = route.rejected.reason(region) {
                allowed.push(format!("{} ({})", named(region), in_words(reason)));
            }
        }
        let places = if allowed.is_empty() { "none has registered".to_owned() } else { allowed.join(", ") };
        Rejection::new(
            ErrorCode::NoCapacityInAllowedRegions,
            format!(
                "No region that may serve '{}' under the residency '{}' can be reached: {places}. Try again shortly; \
                 other regions were not asked.",
                request.deployment,
                policy.residency.as_str()
            ),
        )
    }
}

/// For how long the region held the request because no replica was ready: that says nothing of how long it takes.
fn held(answer: &UpstreamResponse) -> Duration {
    let held = answer.head.headers.get(names::name(headers::HELD_MS));
    let held = held.and_then(|value| value.to_str().ok()?.parse().ok());
    held.map(Duration::from_millis).unwrap_or_default()
}

/// The region's own word that another region could do what it cannot.
fn says_elsewhere(answer: &UpstreamResponse) -> bool {
    let said = || answer.head.headers.get(names::name(headers::ERROR))?.to_str().ok();
    let code = || said().and_then(ErrorCode::parse);
    answer.head.status.is_server_error() && code().is_some_and(|code| code.remedy() == Remedy::Elsewhere)
}
